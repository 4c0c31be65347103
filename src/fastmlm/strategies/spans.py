"""Spans: neighbouring tokens, or words, selected together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fastmlm.selection_spec import LONGEST_SPAN, Selection
from fastmlm.spec import MaskingSpec, integer, probability
from fastmlm.strategies.base import Strategy, check_choice


@dataclass(frozen=True)
class Spans(Strategy):
    """``selected = (torch.rand(spans) < p)[span_of_token]``: spans of geometric length, SpanBERT's by default.

    Spans tile the row: the first starts at its first token, each next one where the one before ends, and special tokens
    end them too. A span is selected with the collator's probability; so every token is selected with exactly that, no
    span is longer than ``max_length``, and the budget is met on the average, not row by row (:class:`Counts` bounds
    it). SpanBERT's own code places spans one by one until 15 % are reached, which selects the middle of a row more
    often than its ends, and overshoots.

    Args:
        p: of the geometric distribution, P(length = n) in proportion to ``p * (1 - p) ** (n - 1)``.
        max_length: the longest span; lengths beyond are not drawn (mean 3.8 for SpanBERT's 0.2 and 10).
        whole_words: lengths count words, and spans start and end with them (SpanBERT does that).
        replace: what the 80/10/10 are drawn for: the "span" as a whole (SpanBERT), or each "token".

    Law: span j has ``1 + #{l < L : draw_3(j) >= T(P(length <= l))}`` units and starts where the lengths before sum up
    to; unit(s) is the first token of s's span, and selects as of :class:`fastmlm.strategies.WholeWords`.

    Source: Joshi et al., "SpanBERT" (2020), section 3.1.
    """

    p: float = 0.2
    max_length: int = 10
    whole_words: bool = False
    replace: Literal["span", "token"] = "span"

    def __post_init__(self) -> None:
        if not 0 < probability("p", self.p) < 1:
            raise ValueError(f"p: expected a number between 0 and 1, and not one of them, got {self.p}")
        integer("max_length", self.max_length, 1, LONGEST_SPAN + 1)
        check_choice("replace", self.replace, ("span", "token"))

    @property
    def lengths(self) -> tuple[float, ...]:
        """P(a span has 1, 2, ... units)."""
        shares = [self.p * (1 - self.p) ** n for n in range(self.max_length)]
        return tuple(share / sum(shares) for share in shares)

    @property
    def span_size(self) -> float:  # type: ignore[override]
        return _mean_size(self.lengths)

    def selects(self, spec: MaskingSpec) -> dict[str, Any]:
        return {"span_lengths": self.lengths, "replace_per_unit": self.replace == "span"}


@dataclass(frozen=True)
class NGrams(Strategy):
    """``selected = (torch.rand(ngrams) < p)[ngram_of_token]``: words by ones, twos, threes and so on, MacBERT's shares.

    As :class:`Spans`, with the shares of the lengths given.

    Args:
        shares: P(1, 2, ... units), which sum to 1.
        whole_words: of words; else of tokens.
        replace: what the 80/10/10 are drawn for: the "span" as a whole, or each "token".

    Source: Cui et al., "Revisiting pre-trained models for Chinese natural language processing" (MacBERT, 2020),
    section 3.2; word n-grams: Levine et al., "PMI-Masking" (2021), section 2.
    """

    shares: Sequence[float] = (0.4, 0.3, 0.2, 0.1)
    whole_words: bool = True
    replace: Literal["span", "token"] = "token"

    def __post_init__(self) -> None:
        if not (isinstance(self.shares, Sequence) and len(self.shares)):
            raise ValueError(f"shares: expected the probabilities of 1, 2, ... units, got {self.shares!r}")
        object.__setattr__(self, "shares", tuple(self.shares))
        Selection(span_lengths=tuple(self.shares))  # whose checks they are
        check_choice("replace", self.replace, ("span", "token"))

    @property
    def span_size(self) -> float:  # type: ignore[override]
        return _mean_size(self.shares)

    def selects(self, spec: MaskingSpec) -> dict[str, Any]:
        return {"span_lengths": tuple(self.shares), "replace_per_unit": self.replace == "span"}


def _mean_size(shares: Sequence[float]) -> float:
    """The mean size of the span that a token is in: sum(P(n) n²) / sum(P(n) n)."""
    squares = sum(share * n * n for n, share in enumerate(shares, 1))
    return squares / sum(share * n for n, share in enumerate(shares, 1))
