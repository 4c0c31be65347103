"""How many tokens of a row: given, rounded, or bounded."""

from dataclasses import dataclass
from typing import Any

from fastmlm.selection_spec import NO_MOST
from fastmlm.spec import MaskingSpec, integer
from fastmlm.strategies.base import Strategy


@dataclass(frozen=True)
class Counts(Strategy):
    """``selected = scores.argsort()[:k]`` of a row's selectable tokens, ``scores = torch.rand(n)``.

    BERT's code takes ``Counts(rounded=True, at_least=1, max_predictions_per_row=20)``. Words and spans are taken whole,
    in the order of their draws, while they fit.

    Args:
        exactly: so many tokens of every row that has them.
        rounded: mlm_probability times the row's n selectable tokens, rounded to the nearest, half up.
        at_least: take so many where chance, or the rounding, gave fewer; of words and spans, one that is larger if none
            is as small.
        max_predictions_per_row: take no more.

    Law: ``n`` tokens are selectable, ``c = (T(p) n + 2^31) >> 32`` with ``rounded``, else the number that
    ``draw_0 < T(p)`` selects; ``k = min(max(c, at_least), max_predictions_per_row, n)``, and the k smallest
    ``(draw_0(s), s)`` are selected.

    Source: Devlin et al., "BERT" (2019), ``create_masked_lm_predictions`` of its code.
    """

    exactly: int | None = None
    rounded: bool = False
    at_least: int = 0
    max_predictions_per_row: int | None = None

    def __post_init__(self) -> None:
        integer("at_least", self.at_least, 0, NO_MOST)
        if not isinstance(self.rounded, bool):
            raise TypeError(f"rounded: expected a bool, got {type(self.rounded).__name__}")
        if self.max_predictions_per_row is not None:
            integer("max_predictions_per_row", self.max_predictions_per_row, self.at_least, NO_MOST)
        if self.exactly is not None:
            integer("exactly", self.exactly, 0, NO_MOST)
            if self.rounded or self.at_least or self.max_predictions_per_row is not None:
                raise ValueError(
                    f"exactly: expected None with rounded, at_least or max_predictions, got {self.exactly}"
                )
        elif not self.rounded and not self.at_least and self.max_predictions_per_row is None:
            raise ValueError("exactly, rounded, at_least, max_predictions_per_row: expected at least one, got none")

    def selects(self, spec: MaskingSpec) -> dict[str, Any]:
        if self.exactly is not None:
            return {"at_least": self.exactly, "at_most": self.exactly}
        return {"exact": self.rounded, "at_least": self.at_least, "at_most": self.max_predictions_per_row}
