"""From raw clocks and losses to medians with their spread, and to a verdict on whether two losses differ."""

import math
import statistics
from typing import Any

from fastmlm.cli.noise import standard_error, t95
from fastmlm.cli.train import FASTMLM, HUGGINGFACE

# The first batches and steps of a run allocate memory and warm caches; no side's figures include them.
_WARM_UP = 3


def summarise(results: list[dict[str, Any]]) -> dict[str, Any]:
    """One side's figures over its runs: quartiles of times and speed, median and range of memory."""
    collator = [ms for result in results for ms in _warm(result["collator_ms"])]
    step = [ms for result in results for ms in _warm(result["step_ms"])]
    collating = results[0]["batches_per_step"] * (statistics.median(collator) if collator else 0.0)
    return {
        "collator_ms": _quartiles(collator),
        "step_ms": _quartiles(step),
        "tokens_per_second": _quartiles([1e3 * results[0]["tokens_per_step"] / (collating + ms) for ms in step]),
        "peak_mb": _range([result["memory"]["peak_mb"] for result in results]),
        "growth_mb": _range([result["memory"]["growth_mb"] for result in results]),
    }


def compare_sides(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Both sides' figures, and the difference of their final validation losses with its 95 % interval."""
    sides = {}
    for side in (FASTMLM, HUGGINGFACE):
        runs = [result for result in results if result["side"] == side]
        losses = [run["eval_loss"][-1][1] for run in runs]
        sides[side] = {
            **summarise(runs),
            "final_eval_loss": statistics.fmean(losses),
            "final_eval_loss_standard_error": standard_error(losses),
            "final_eval_losses": losses,
        }
    return {"sides": sides, "eval_loss_difference": _difference(*sides.values())}


def _difference(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    repeats = len(ours["final_eval_losses"])
    difference = ours["final_eval_loss"] - theirs["final_eval_loss"]
    if repeats == 1:
        return {"value": difference, "half_width_95": None, "verdict": "one run a side: no noise to measure it by"}
    error = math.hypot(ours["final_eval_loss_standard_error"], theirs["final_eval_loss_standard_error"])
    half_width = t95(2 * (repeats - 1)) * error  # equal variances
    within = abs(difference) <= half_width
    verdict = (
        "equal within the noise" if within else f"{'lower' if difference < 0 else 'higher'} by more than the noise"
    )
    return {"value": difference, "half_width_95": half_width, "verdict": verdict}


def _warm(milliseconds: list[float]) -> list[float]:
    return milliseconds[min(_WARM_UP, len(milliseconds) // 2) :]


def _quartiles(values: list[float]) -> dict[str, float] | None:
    """None where nothing was timed: collators in worker processes, for one, time themselves out of our sight."""
    if not values:
        return None
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else 3 * values
    return {"low": low, "median": middle, "high": high, "count": len(values)}


def _range(values: list[float]) -> dict[str, float]:
    return {"low": min(values), "median": statistics.median(values), "high": max(values), "count": len(values)}
