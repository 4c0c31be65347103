"""How far a mean may be off by chance."""

import math
import statistics

# Two-sided 95 % points of Student's t by degrees of freedom; between two rows the one before is safe.
_T95 = {
    1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228, 12: 2.179,
    14: 2.145, 16: 2.120, 18: 2.101, 20: 2.086, 30: 2.042, 60: 2.000,
}  # fmt: skip


def t95(degrees: int) -> float:
    """How many standard errors a mean is off by, at most, in 95 % of cases."""
    return _T95[max(known for known in _T95 if known <= degrees)]


def standard_error(values: list[float]) -> float | None:
    """Of the mean; None of a single value."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
