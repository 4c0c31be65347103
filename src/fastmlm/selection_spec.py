"""Which tokens are selected together and how many of a row: settings beside those of :class:`fastmlm.MaskingSpec`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fastmlm.spec import STARTS_WORD, MaskingSpec, integer, probability, threshold, thresholds

LONGEST_SPAN = 64
NO_MOST = (1 << 31) - 1  # at_most of the op where there is none

_MARK_BITS = STARTS_WORD.bit_length() - 1  # how far the marks of words lie from the lowest bits, in the table by id


@dataclass(frozen=True, eq=False)
class Selection:
    """How tokens are selected, where not each by itself and at the rate of its row.

    Frozen; every value is checked here and nowhere else. Tensors are copied.

    Args:
        word_marks: (vocab_size,) uint8, which ids start a word (1) and which end one (2), as
            :func:`fastmlm.strategies.words.marks_by_id` gives them: words are selected as a whole.
        span_lengths: probabilities of a span to have 1, 2, ... units (words or tokens), 64 at most, which sum to 1:
            spans are selected as a whole (Joshi et al., "SpanBERT", 2020). They tile the row and end at special tokens,
            so every token is selected at exactly its rate.
        replace_per_unit: all tokens of a unit are masked, or all become random tokens, or all stay.
        rates_by_id: (vocab_size,) floating point in [0, 1], the rate of a unit by the id of its first token; it takes
            the place of every other rate.
        exact: of a row with n selectable tokens, mlm_probability · n are selected, rounded to the nearest; fewer where
            the last units do not fit.
        at_least: select so many tokens of a row, if it has them; and one unit, if none fits (but see at_most).
        at_most: select no more tokens of a row.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """

    word_marks: Tensor | None = None
    span_lengths: tuple[float, ...] = ()
    replace_per_unit: bool = False
    rates_by_id: Tensor | None = None
    exact: bool = False
    at_least: int = 0
    at_most: int | None = None
    # Derived: T(P(a span has at most l units)) for l = 1 ... L - 1.
    span_limits: tuple[int, ...] | None = field(init=False, repr=False)
    _sizes: tuple[tuple[str, int], ...] = field(init=False, repr=False)  # of the tables by id, which every call checks
    _tables: dict[torch.device, _Tables] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        put = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731 - frozen: the one way in
        for name in ("replace_per_unit", "exact"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}: expected a bool, got {type(getattr(self, name)).__name__}")
        put("word_marks", _by_id("word_marks", self.word_marks))
        put("rates_by_id", _by_id("rates_by_id", self.rates_by_id))
        put("span_lengths", _span_lengths(self.span_lengths))
        put("span_limits", _span_limits(self.span_lengths))
        put("at_least", integer("at_least", self.at_least, 0, NO_MOST))
        if self.at_most is not None:
            put("at_most", integer("at_most", self.at_most, self.at_least, NO_MOST))
        if self.counts and self.rates_by_id is not None:
            raise ValueError(
                "rates_by_id: expected None with exact, at_least or at_most, which count on one rate for a row"
            )
        tables = {"word_marks": self.word_marks, "rates_by_id": self.rates_by_id}
        put("_sizes", tuple((name, len(table)) for name, table in tables.items() if table is not None))
        put("_tables", {})

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_tables": {}}  # tables are rebuilt where a pickled one lands

    @property
    def counts(self) -> bool:
        """Whether the number of tokens of a row is given or bounded."""
        return self.exact or self.at_least > 0 or self.at_most is not None

    def check(self, spec: MaskingSpec) -> None:
        """Raise ValueError unless what goes by id goes by the ids of the spec."""
        for name, size in self._sizes:
            if size != spec.vocab_size:
                raise ValueError(
                    f"selection.{name}: expected one value for each of the spec's {spec.vocab_size} ids, got {size}"
                )

    def tables(self, spec: MaskingSpec, device: torch.device) -> _Tables:
        """What kernels look up: ``spec.tables(device)``'s flags with the marks of words, span_limits, id_thresholds.

        Kept for one spec a device, the last.
        """
        flags, _ = spec.tables(device)
        kept = self._tables.get(device)
        if kept is not None and kept[0] is flags:
            return kept
        marked = flags if self.word_marks is None else flags | (self.word_marks << _MARK_BITS).to(device)
        limits = None
        if self.span_limits is not None:
            limits = torch.tensor(self.span_limits, dtype=torch.int64, device="cpu").to(device)
        rates = None if self.rates_by_id is None else thresholds(self.rates_by_id).to(device)
        tables = (flags, marked, limits, rates)
        if type(flags) is Tensor and not torch.compiler.is_exporting():  # a trace's tensors are fakes, no good to keep
            self._tables[device] = tables
        return tables


# The spec's flags, those with marks, span_limits and id_thresholds.
_Tables = tuple[Tensor, Tensor, "Tensor | None", "Tensor | None"]


def _by_id(name: str, values: Tensor | None) -> Tensor | None:
    """A table by id, checked, as a copy on the CPU."""
    if values is None:
        return None
    marks = name == "word_marks"
    kind = "(vocab_size,) uint8 tensor" if marks else "(vocab_size,) tensor of floating point"
    if not isinstance(values, Tensor):
        raise TypeError(f"{name}: expected a {kind}, got {type(values).__name__}")
    right = values.dtype == torch.uint8 if marks else values.is_floating_point()
    if not right or values.dim() != 1 or not values.numel():
        raise TypeError(f"{name}: expected a {kind}, got {values.dtype} tensor of shape {tuple(values.shape)}")
    values = values.detach().to("cpu", copy=True).contiguous()
    top = 3 if marks else 1
    if not bool(((values >= 0) & (values <= top)).all()):
        raise ValueError(
            f"{name}: expected values from 0 to {top}, got values from {values.min().item()} to {values.max().item()}"
        )
    return values


def _span_lengths(values: Iterable[float]) -> tuple[float, ...]:
    if isinstance(values, Tensor):
        values = values.tolist()
    if not isinstance(values, Iterable) or isinstance(values, str):
        raise TypeError(f"span_lengths: expected probabilities, got {type(values).__name__}")
    shares = tuple(probability(f"span_lengths[{i}]", value) for i, value in enumerate(values))
    if len(shares) > LONGEST_SPAN:
        raise ValueError(f"span_lengths: expected at most {LONGEST_SPAN} probabilities, got {len(shares)}")
    if shares and abs(sum(shares) - 1) > 1e-6:
        raise ValueError(f"span_lengths: expected probabilities that sum to 1, got a sum of {sum(shares)}")
    return shares


def _span_limits(shares: tuple[float, ...]) -> tuple[int, ...] | None:
    """T of the shares' sums from left to right, each divided by the last; None where there are no spans."""
    if not shares:
        return None
    *sums, total = itertools.accumulate(shares)
    return tuple(threshold(min(part / total, 1.0)) for part in sums)
