"""What the user sees at the end: filled-in masks, the table of a comparison, and the loss curve."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fastmlm.cli.train import FASTMLM, HUGGINGFACE

Row = tuple[str, str, str, str]  # what was measured, fastmlm, Hugging Face, ratio


def print_filled(console: Console, filled: list[dict[str, Any]]) -> None:
    """Each hidden token in its context, what it was, and the model's five best candidates."""
    for mask in filled:
        line = Text(f"… {mask['before']} ").append("[MASK]", style="bold reverse").append(f" {mask['after']} …")
        console.print(line)
        best = ", ".join(f"{token} {probability:.1%}" for token, probability in mask["candidates"])
        console.print(Text(f"    {mask['answer']}: {best}", style="dim"))


def print_run(console: Console, metrics: dict[str, Any]) -> None:
    """The figures of a run without a comparison, on one line."""
    first, last = metrics["eval_loss"][0][1], metrics["eval_loss"][-1][1]
    console.print(
        f"validation loss {first:.3f} → {last:.3f}, step {_spread(metrics['step_ms'], 1)} ms, "
        f"{_spread(metrics['tokens_per_second'], 0)} tokens/s, peak memory {metrics['peak_mb']['median']:,.0f} MB"
    )


def comparison_rows(comparison: dict[str, Any]) -> list[Row]:
    """The table's body; a ratio says how many times better fastmlm is."""
    ours, theirs = comparison["sides"][FASTMLM], comparison["sides"][HUGGINGFACE]
    measured = [
        ("collator, ms a batch", "collator_ms", 2),
        ("step, ms", "step_ms", 1),
        ("tokens/s", "tokens_per_second", 0),
        ("peak memory, MB", "peak_mb", 0),
        ("grown in training, MB", "growth_mb", 0),
    ]
    rows = []
    for title, key, digits in measured:
        rows.append((title, _spread(ours[key], digits), _spread(theirs[key], digits), _ratio(ours, theirs, key)))
    rows.append(("validation loss", _loss(ours), _loss(theirs), ""))
    return rows


def verdict(comparison: dict[str, Any]) -> str:
    """The difference of the losses in a sentence."""
    difference = comparison["eval_loss_difference"]
    width = difference["half_width_95"]
    interval = f"{difference['value']:+.4f}" + ("" if width is None else f" ± {width:.4f} (95 %)")
    return f"Validation loss, {FASTMLM} minus {HUGGINGFACE}: {interval}, {difference['verdict']}."


def caption(comparison: dict[str, Any]) -> str:
    """How to read the figures."""
    runs = len(comparison["sides"][FASTMLM]["final_eval_losses"])
    return (
        f"Medians [quartiles] over {runs} alternating runs a side; memory: median [range]; loss: mean ± SE. "
        "A step is forward, backward and optimizer; tokens/s count collator and step. All runs have the same first "
        "weights, rows and order, and masks of their own; validation rows are masked once for all; "
        "glibc returns freed blocks of 4 MB and more at once."
    )


def print_comparison(console: Console, comparison: dict[str, Any]) -> None:
    table = Table()
    table.add_column("")
    for title in (FASTMLM, HUGGINGFACE, "ratio"):
        table.add_column(title, justify="right")
    for row in comparison_rows(comparison):
        table.add_row(*row)
    console.print(table)
    console.print(caption(comparison))
    console.print(verdict(comparison))


def write_markdown(comparison: dict[str, Any], machine: dict[str, Any], file: Path) -> None:
    head = [("", FASTMLM, HUGGINGFACE, "ratio"), ("---", "---:", "---:", "---:")]
    lines = ["| " + " | ".join(row) + " |" for row in [*head, *comparison_rows(comparison)]]
    where = ", ".join(f"{name} {value}" for name, value in machine.items())
    file.write_text(
        "\n".join([*lines, "", caption(comparison), "", verdict(comparison), "", f"Machine: {where}.", ""]), "utf-8"
    )


def plot_losses(results: list[dict[str, Any]], file: Path) -> None:
    """Training and validation loss by step; of a comparison every run, Hugging Face's in another colour."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss (nats)")
    labelled = set()
    for result in results:
        side = result["side"]
        colour = "tab:blue" if side == FASTMLM else "tab:orange"
        names = ("_", "_") if side in labelled else (f"{side}, training", f"{side}, validation")
        labelled.add(side)
        for curve, style, name in ((result["train_loss"], "-", names[0]), (result["eval_loss"], "o--", names[1])):
            if curve:
                axes.plot(
                    *zip(*curve, strict=True), style, color=colour, label=name, linewidth=1, markersize=3, alpha=0.8
                )
    axes.grid(alpha=0.3)
    axes.legend()
    FigureCanvasAgg(figure).print_png(str(file))


def _spread(figures: dict[str, float] | None, digits: int) -> str:
    if figures is None:
        return "not timed"
    low, middle, high = (f"{figures[name]:,.{digits}f}" for name in ("low", "median", "high"))
    return f"{middle} [{low}–{high}]"


def _ratio(ours: dict[str, Any], theirs: dict[str, Any], key: str) -> str:
    if ours[key] is None or theirs[key] is None:
        return ""
    ratio = theirs[key]["median"] / ours[key]["median"]
    return f"{1 / ratio if key == 'tokens_per_second' else ratio:.2f}×"


def _loss(side: dict[str, Any]) -> str:
    error = side["final_eval_loss_standard_error"]
    return f"{side['final_eval_loss']:.4f}" + ("" if error is None else f" ± {error:.4f}")
