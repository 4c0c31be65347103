"""From the runs to means over seeds, differences to the first objective, and whether these are more than noise."""

import statistics
from typing import Any

from fastmlm.cli.noise import standard_error, t95

Runs = dict[str, list[dict[str, Any]]]  # by objective, the first of which is the baseline; a run for each seed


def summarise(runs: Runs, target: float | None) -> dict[str, Any]:
    """A record for each objective, and the target loss: that of the baseline at its end, unless one is given."""
    baseline = next(iter(runs))
    if target is None:
        target = mean_curve(runs[baseline])[-1][1]
    return {
        "baseline": baseline,
        "target_loss": target,
        "untrained_probe": _mean([run["untrained_probe"] for run in runs[baseline]]),
        "objectives": {name: _summary(of, runs[baseline], target) for name, of in runs.items()},
    }


def mean_curve(runs: list[dict[str, Any]]) -> list[tuple[int, float]]:
    """Validation loss by step, the mean over seeds."""
    curves = [run["eval_loss"] for run in runs]
    return [(points[0][0], statistics.fmean(loss for _, loss in points)) for points in zip(*curves, strict=True)]


def steps_to(curve: list[tuple[int, float]], target: float) -> float | None:
    """Where a curve first reaches the target, on a straight line between two evaluations; None if it does not."""
    before = None
    for step, loss in curve:
        if loss <= target:
            if before is None:
                return float(step)
            share = (before[1] - target) / (before[1] - loss)
            return before[0] + share * (step - before[0])
        before = (step, loss)
    return None


def difference(values: list[float], others: list[float]) -> dict[str, Any]:
    """The mean of paired differences with its 95 % interval (Student's t), and a word for it."""
    differences = [value - other for value, other in zip(values, others, strict=True)]
    mean, error = statistics.fmean(differences), standard_error(differences)
    if error is None:
        return {"mean": mean, "half_width_95": None, "verdict": "one seed: no noise to measure it by"}
    half_width = t95(len(differences) - 1) * error
    within = abs(mean) <= half_width
    return {
        "mean": mean,
        "half_width_95": half_width,
        "verdict": "within noise" if within else "lower" if mean < 0 else "higher",
    }


def _summary(runs: list[dict[str, Any]], baseline: list[dict[str, Any]], target: float) -> dict[str, Any]:
    losses = [run["eval_loss"][-1][1] for run in runs]
    steps = steps_to(mean_curve(runs), target)
    summary: dict[str, Any] = {
        "seeds": [run["seed"] for run in runs],
        "final_losses": losses,
        "final_loss": statistics.fmean(losses),
        "final_loss_standard_error": standard_error(losses),
        "steps_to_target": steps,
        "tokens_to_target": None if steps is None else steps * runs[0]["tokens_per_step"],
        "selected_tokens_per_second": statistics.median(run["selected"] / run["seconds"] for run in runs),
        "seconds": statistics.median(run["seconds"] for run in runs),
        "parameters": runs[0]["parameters"],
        "probe": _mean([run["probe"] for run in runs]),
    }
    if runs is not baseline:
        summary["loss_difference"] = difference(losses, [run["eval_loss"][-1][1] for run in baseline])
        if summary["probe"] is not None:
            summary["probe_difference"] = difference(*([run["probe"] for run in of] for of in (runs, baseline)))
    return summary


def _mean(values: list[float | None]) -> dict[str, Any] | None:
    known = [value for value in values if value is not None]
    return {"mean": statistics.fmean(known), "standard_error": standard_error(known)} if known else None
