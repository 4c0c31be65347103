"""What a section of the GPU benchmark finds: rows of figures, checks, goals."""

from collections.abc import Callable
from math import inf
from time import perf_counter
from typing import Any

from gpu_sections.timing import Device, describe_error


class Section:
    """One part of the run, with the time by which it should end. Nothing that fails in it stops what follows."""

    def __init__(
        self, name: str, device: Device, until: float, loss_impl: str | None, save: Callable[[], None]
    ) -> None:
        self.name, self.device, self.until = name, device, until
        self.loss_impl = loss_impl  # of linear_cross_entropy
        self.save = save  # writes everything found so far, called after each row
        self.rows: list[dict[str, Any]] = []
        self.checks: list[dict[str, Any]] = []
        self.goals: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self.error: str | None = None

    def left(self) -> float:
        return self.until - perf_counter()

    def check(self, name: str, run: Callable[[], str]) -> None:
        """Run a check, which raises where it fails and else says what it saw."""
        if self.left() <= 0:
            self._checked(name, None, "no time was left")
            return
        start = perf_counter()
        try:
            detail, ok = run(), True
        except Exception as error:
            detail, ok = describe_error(error), False
        self.device.free()
        self._checked(name, ok, f"{detail}, {perf_counter() - start:.1f} s")

    def _checked(self, name: str, ok: bool | None, detail: str) -> None:
        self.checks.append({"name": name, "ok": ok, "detail": detail})
        print(f"  {'skipped' if ok is None else 'ok' if ok else 'FAILED'}: {name} ({detail})", flush=True)

    def add(self, row: dict[str, Any]) -> None:
        """A row of figures: whatever it is about, and "entries", the contenders."""
        self.rows.append(row)
        print("  " + ", ".join(f"{value}" for key, value in row.items() if key != "entries"), flush=True)
        for name, entry in row["entries"].items():
            print(f"    {name}: {brief(entry)}", flush=True)
        self.save()

    def goal(self, text: str, figure: float | None, unit: str, least: float = -inf, most: float = inf) -> None:
        """A goal that is met where the figure lies between these; it is open where there is no figure."""
        met = None if figure is None else least <= figure <= most
        shown = "not measured" if figure is None else f"{figure:.3g}{unit}"
        self.goals.append({"goal": text, "figure": shown, "met": met})
        print(f"  goal: {text}: {shown}, {'open' if met is None else 'met' if met else 'MISSED'}", flush=True)

    def failed(self) -> bool:
        return self.error is not None or any(check["ok"] is False for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        """The lists themselves, which go on to be filled."""
        return {
            "rows": self.rows, "checks": self.checks, "goals": self.goals, "notes": self.notes, "error": self.error,
        }  # fmt: skip


def brief(entry: dict[str, Any]) -> str:
    """A contender's figures in a line."""
    if "ms" not in entry:
        return "not measured: " + (entry.get("error") or entry.get("skipped") or "?")
    low, high = entry["quartiles"]
    peak = "" if entry["peak_mb"] is None else f", peak {entry['peak_mb']:.0f} MB"
    return f"{entry['ms']:.4f} ms ({low:.4f}-{high:.4f}){peak}, {entry['calls']} calls"
