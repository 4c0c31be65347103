"""The record of a GPU run in Markdown."""

from statistics import median
from typing import Any

OURS = ("fastmlm", "sparsify")  # how the names of our contenders begin
TITLES = {
    "correctness": "Correctness",
    "masking": "Masking",
    "latency": "Launch-bound latency",
    "head": "Head and loss, forward and backward",
    "step": "A training step of BERT-base",
}


def markdown(record: dict[str, Any]) -> str:
    lines = ["# On a GPU", "", *environment(record), "", *goals(record)]
    for name, title in TITLES.items():
        section = record["sections"].get(name)
        lines += ["", f"## {title}"]
        if section is None:
            lines += ["", "Not run."]
            continue
        lines += checks(section["checks"])
        for row in section["rows"]:
            lines += ["", heading(row), "", *table(row)]
        if section["error"]:
            lines += ["", f"**The section failed: {section['error']}**"]
        lines += ["", *(f"- {note}" for note in [*section["notes"], took(section)])]
    return "\n".join(lines).rstrip() + "\n"


def took(section: dict[str, Any]) -> str:
    seconds = section.get("seconds")
    return "This section was not finished." if seconds is None else f"This section took {seconds} s."


def environment(record: dict[str, Any]) -> list[str]:
    device = ", ".join(f"{value}" if key == "name" else f"{key} {value}" for key, value in record["device"].items())
    versions = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    lines = [
        f"{device}; {versions}; commit {record['commit']}, {record['date']}; {record['seconds']} s in all.",
        "",
        f"Times are medians, quartiles in brackets, of calls between two CUDA events; {record['flushed_mb']:.0f} MB "
        "are written before each call, so the L2 is cold and launching is largely hidden (launch-bound latency: by the "
        "host's clock, warm). Contenders take turns. Ratios are medians over turns. Peak memory is that above what was "
        "there before the call, its results included.",
    ]
    if record["dry_run"]:
        lines[:0] = ["**A dry run on a CPU: no figure below says anything about a GPU.**", ""]
    if record.get("stopped"):
        lines += ["", f"**Stopped {record['stopped']}.**"]
    if record["notes"]:
        lines += ["", *(f"- {note}" for note in record["notes"])]
    return lines


def goals(record: dict[str, Any]) -> list[str]:
    lines = ["## Goals", "", "| goal | figure | |", "|---|---:|---|"]
    words = {None: "open", True: "met", False: "**missed**"}
    for section in record["sections"].values():
        lines += [f"| {goal['goal']} | {goal['figure']} | {words[goal['met']]} |" for goal in section["goals"]]
    return lines


def checks(found: list[dict[str, Any]]) -> list[str]:
    if not found:
        return []
    count = sum(check["ok"] is True for check in found)
    words = {None: "not run", True: "ok", False: "**FAILED**"}
    failing = ", ".join(check["name"] for check in found if check["ok"] is not True)
    lines = ["", f"{count} of {len(found)} checks ok{f'; not: {failing}' if failing else ''}.", ""]
    lines += ["<details><summary>All checks</summary>", "", "| check | | |", "|---|---|---|"]
    return [*lines, *(f"| {c['name']} | {words[c['ok']]} | {cell(c['detail'])} |" for c in found), "", "</details>"]


def heading(row: dict[str, Any]) -> str:
    """What a table is about."""
    words = {"size": "{}", "shape": "{}", "dtype": "{}", "tokens": "{:,} tokens", "selected": "{:,} selected",
             "width": "H = {}", "vocabulary": "V = {}", "bytes_per_token": "{} bytes a token"}  # fmt: skip
    return "### " + ", ".join(words[key].format(value) for key, value in row.items() if key in words)


def table(row: dict[str, Any]) -> list[str]:
    """A line for each contender, with how many times as long it takes as the first, which is ours."""
    entries = row["entries"]
    first = next(iter(entries))
    speed = {"gb_per_s": "GB/s", "tokens_per_s": "tokens/s", "loss": "loss"}
    speed = {key: title for key, title in speed.items() if any(key in entry for entry in entries.values())}
    titles = ["contender", "ms", *speed.values(), "peak MB", f"time ÷ {first}"]
    lines = ["| " + " | ".join(titles) + " |", "|---" + "|---:" * (len(titles) - 1) + "|"]
    for name, entry in entries.items():
        shown = f"**{name}**" if name.startswith(OURS) else name
        if "ms" not in entry:
            reason = cell("failed: " + entry["error"] if "error" in entry else entry.get("skipped", ""))
            lines.append(f"| {shown} | {reason}" + " | " * (len(titles) - 1) + "|")
            continue
        low, high = entry["quartiles"]
        cells = [shown, f"{number(entry['ms'])} ({number(low)}–{number(high)})"]
        cells += [number(entry[key]) if entry.get(key) is not None else "" for key in speed]
        cells.append("in its graph" if entry["peak_mb"] is None else number(entry["peak_mb"]))
        cells.append(against(entries[first], entry))
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def against(first: dict[str, Any], entry: dict[str, Any]) -> str:
    if "turns" not in first:
        return ""
    return f"{median(b / a for a, b in zip(first['turns'], entry['turns'], strict=False)):.3g}"


def number(value: float) -> str:
    """Four digits, without an exponent."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
