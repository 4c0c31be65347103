"""A comparison as a table, on the terminal and in Markdown, and as a picture."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fastmlm.cli.compare.summary import Runs

_GENERATOR = ("electra",)  # whose loss is of a smaller model


def rows(comparison: dict[str, Any]) -> list[tuple[str, ...]]:
    """The table, its head first: an objective in each row."""
    objectives = comparison["objectives"]
    probed = next(iter(objectives.values()))["probe"] is not None
    head = (
        "objective", "validation loss", f"minus {comparison['baseline']}'s",
        f"steps to {comparison['target_loss']:.3f}", "tokens to it", "selected tokens/s",
    )  # fmt: skip
    table = [head + (("topic found", f"minus {comparison['baseline']}'s") if probed else ())]
    for name, of in objectives.items():
        steps, tokens = of["steps_to_target"], of["tokens_to_target"]
        cells: tuple[str, ...] = (
            name + ("*" if name.startswith(_GENERATOR) else ""),
            _mean(of["final_loss"], of["final_loss_standard_error"], "{:.3f}"),
            _difference(of.get("loss_difference"), "{:+.3f}", "{:.3f}"),
            "not reached" if steps is None else f"{steps:,.0f}",
            "" if tokens is None else f"{tokens / 1000:,.0f} k",
            f"{of['selected_tokens_per_second']:,.0f}",
        )
        if probed:
            cells += (
                _mean(of["probe"]["mean"], of["probe"]["standard_error"], "{:.1%}"),
                _difference(of.get("probe_difference"), "{:+.1%}", "{:.1%}"),
            )
        table.append(cells)
    return table


def caption(comparison: dict[str, Any]) -> list[str]:
    """How to read the table, a sentence or two each."""
    objectives, of = comparison["objectives"], comparison["settings"]
    seeds, others = of["seeds"], len(objectives) - 1
    lines = [
        f"{of['steps']} steps of {of['batch_size'] * of['gradient_accumulation']} rows of up to {of['length']} tokens, "
        f"{seeds} seed{'s' if seeds > 1 else ''} each; means ± standard error. All runs of a seed have the same rows "
        "in the same order, and the same first weights where the model is the same.",
        "Validation loss: nats a token, of 15 % of the held-out rows' tokens, the same ones in all runs, all hidden.",
    ]
    if seeds > 1:
        lines.append(
            "Differences: of runs of the same seed, with 95 % intervals (Student's t)."
            + (" One in twenty of them misses the truth by chance." if others > 1 else "")
        )
    if comparison["probe"] is not None:
        probe, untrained = comparison["probe"], comparison["untrained_probe"]["mean"]
        lines.append(
            f"Topic found: by a linear classifier on the frozen features of whole held-out passages, one of "
            f"{probe['topics']} topics; {untrained:.1%} before training, {probe['majority']:.1%} by always saying one."
        )
    if any(name.startswith(_GENERATOR) for name in objectives):
        lines.append("* The loss is the generator's, a smaller model than the others; topics are the discriminator's.")
    return lines


def verdicts(comparison: dict[str, Any]) -> list[str]:
    """What is more than noise, and what is not, in plain words."""
    said: dict[str, list[str]] = {}
    for name, of in comparison["objectives"].items():
        if "loss_difference" in of:
            said.setdefault(of["loss_difference"]["verdict"], []).append(name)
    baseline = comparison["baseline"]
    opening = {
        "lower": f"Validation loss lower than {baseline}'s by more than noise",
        "higher": f"Validation loss higher than {baseline}'s by more than noise",
        "within noise": f"Within noise of {baseline}'s validation loss",
    }
    return [f"{opening.get(verdict, verdict.capitalize())}: {', '.join(names)}." for verdict, names in said.items()]


def print_comparison(console: Console, comparison: dict[str, Any]) -> None:
    head, *body = rows(comparison)
    table = Table()
    for i, title in enumerate(head):
        table.add_column(title, justify="right" if i else "left")
    for row in body:
        table.add_row(*row)
    console.print(table)
    for line in (*caption(comparison), *verdicts(comparison)):
        console.print(line)


def write_markdown(comparison: dict[str, Any], file: Path) -> None:
    head, *body = rows(comparison)
    lines = [head, ("---", *["---:"] * (len(head) - 1)), *body]
    table = ["| " + " | ".join(cells) + " |" for cells in lines]
    where = ", ".join(f"{name} {value}" for name, value in comparison["machine"].items())
    text = [*table, "", " ".join(caption(comparison)), "", " ".join(verdicts(comparison)), "", f"Machine: {where}.", ""]
    file.write_text("\n".join(text), "utf-8")


def plot(runs: Runs, comparison: dict[str, Any], file: Path) -> None:
    """Validation losses by step, with bands from the lowest to the highest seed, and the probe's accuracy beside it."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    probed = comparison["probe"] is not None
    figure = Figure(figsize=(11 if probed else 7, 5), layout="constrained")
    axes, *others = figure.subplots(1, 2 if probed else 1, squeeze=False, width_ratios=[3, 2][: 1 + probed])[0]
    colours = dict(zip(runs, colormaps["tab20"].colors * (1 + len(runs) // 20), strict=False))  # type: ignore[attr-defined]
    of = comparison["objectives"]
    for name in sorted(runs, key=lambda name: -of[name]["final_loss"]):  # the legend in the order of the curves' ends
        curves = [[loss for _, loss in run["eval_loss"]] for run in runs[name]]
        steps = [step for step, _ in runs[name][0]["eval_loss"]]
        low, high = ([edge(values) for values in zip(*curves, strict=True)] for edge in (min, max))
        middle = [sum(values) / len(values) for values in zip(*curves, strict=True)]
        style = "--" if name.startswith(_GENERATOR) else "-"
        label = name + (" (generator)" if name.startswith(_GENERATOR) else "")
        axes.plot(
            steps, middle, style, color=colours[name], label=f"{label} {of[name]['final_loss']:.2f}", linewidth=1.5
        )
        axes.fill_between(steps, low, high, color=colours[name], alpha=0.2, linewidth=0)
    later = [loss for of_name in runs.values() for run in of_name for _, loss in run["eval_loss"][1:]]
    axes.set(xlabel="step", ylabel="validation loss (nats a token)")
    axes.set_ylim(min(later) - 0.05, max(later) + 0.3)  # the first steps fall from far above, all alike
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", title="at the end")
    for beside in others:
        order = sorted(runs, key=lambda name: of[name]["probe"]["mean"])
        for place, name in enumerate(order):
            found = [100 * run["probe"] for run in runs[name]]
            beside.plot([min(found), max(found)], [place, place], color=colours[name], linewidth=2)
            beside.plot(found, [place] * len(found), "o", color=colours[name], markersize=4)
        untrained = 100 * comparison["untrained_probe"]["mean"]
        beside.axvline(untrained, color="grey", linestyle=":", label="before training")
        beside.set(xlabel="topic found by a linear probe (%)", yticks=range(len(order)), yticklabels=order)
        beside.grid(alpha=0.3, axis="x")
        beside.legend(fontsize="small", loc="lower right")
    FigureCanvasAgg(figure).print_png(str(file))


def _mean(mean: float, error: float | None, form: str) -> str:
    return form.format(mean) + ("" if error is None else f" ± {form.format(error)}")


def _difference(of: dict[str, Any] | None, form: str, width: str) -> str:
    if of is None:
        return ""
    if of["half_width_95"] is None:
        return form.format(of["mean"])
    text = f"{form.format(of['mean'])} ± {width.format(of['half_width_95'])}"
    return f"{text}, within noise" if of["verdict"] == "within noise" else text
