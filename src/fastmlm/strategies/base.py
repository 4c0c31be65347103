"""What a strategy is, and what several of them together ask of masking.

A strategy says one thing of how tokens are selected: what is selected together, how many, at which rates, what never.
It does not mask: its answers are the arguments of :func:`fastmlm.mask_tokens`. So strategies combine as far as they
speak of different things, and every implementation draws their masks by the one law.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastmlm import philox
from fastmlm.dispatch import kernel, resolve
from fastmlm.philox import as_int64, first_real
from fastmlm.selection_spec import Selection
from fastmlm.spec import SPECIAL, MaskingSpec


class Batch(NamedTuple):
    """A padded batch before it is masked, on the CPU.

    ``input_ids`` and the two masks are (B, S), the masks None where all tokens are real, or none is special;
    ``columns`` are those that the strategies read; ``key`` and ``row_keys``, (B,) int64, are those of the masks, and
    ``probability`` is the collator's, of this batch.
    """

    input_ids: Tensor
    attention_mask: Tensor | None
    special_tokens_mask: Tensor | None
    columns: Mapping[str, Any]
    spec: MaskingSpec
    probability: float
    key: int
    row_keys: Tensor
    impl: str | None

    def lengths(self) -> Tensor:
        """How many real tokens each row has, (B,) int64."""
        if self.attention_mask is None:
            return self.input_ids.new_full((len(self.input_ids),), self.input_ids.shape[1], dtype=torch.int64)
        return (self.attention_mask != 0).sum(1)

    def positions(self) -> Tensor:
        """The position of each token, counted from its row's first real one, (B, S) or (1, S) int64."""
        columns = torch.arange(self.input_ids.shape[1], device=self.input_ids.device)[None]
        return columns if self.attention_mask is None else columns - first_real(self.attention_mask)[:, None]

    def selectable(self) -> Tensor:
        """Which tokens may be selected, (B, S) bool."""
        flags, _ = self.spec.tables(self.input_ids.device)
        inside = self.input_ids.clamp(0, len(flags) - 1)
        allowed = ((flags[inside] & SPECIAL) == 0) & (inside == self.input_ids)
        if self.attention_mask is not None:
            allowed &= self.attention_mask != 0
        if self.special_tokens_mask is not None:
            allowed &= self.special_tokens_mask == 0
        return allowed

    def selectable_count(self) -> Tensor:
        """How many tokens of each row may be selected, (B,) int64."""
        ids, masks = self.input_ids, (self.attention_mask, self.special_tokens_mask)
        if resolve(self.impl, ids.device) != "cpp" or ids.dtype not in (torch.int64, torch.int32):
            return self.selectable().sum(1)
        given = [None if mask is None else mask.contiguous() for mask in masks]
        flags, _ = self.spec.tables(ids.device)
        return kernel("cpp", "masking.count_selectable")(ids.contiguous(), flags, *given)

    def draws(self, stream: int) -> Tensor:
        """``draw_stream(0)`` of each row, (B,) int64 in [0, 2^32): one number a row, of the batch's key."""
        if resolve(self.impl, self.row_keys.device) == "cpp":
            return kernel("cpp", "masking.row_draws")(self.key, self.row_keys, stream)
        key = self.row_keys.new_full((1,), as_int64(self.key))
        return philox.draw_at(key, self.row_keys, torch.zeros_like(self.row_keys), stream)

    def column(self, strategy: Strategy, name: str) -> Tensor:
        """A column of numbers, or an error that names the strategy that needs it."""
        values = self.columns.get(name)
        if not isinstance(values, Tensor):
            got = "none" if values is None else type(values).__name__
            raise ValueError(f"features: expected a column {name!r} of numbers for {strategy!r}, got {got}")
        return values


@dataclass(frozen=True)
class Strategy:
    """Part of how tokens are selected; a subclass says its part in one or two of these methods."""

    # Without annotations, which would make them fields.
    whole_words = False  # whether what is selected together is at least a word
    span_size = 1.0  # sum(n ** 2) / sum(n) of the units in what is selected together
    highest = None  # the highest rate where `rates` gives them, if it is known
    appends = False  # whether `arranges` adds positions, as many as the masks ask for

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the rows that it reads, and that models do not get to see."""
        return ()

    @property
    def reads(self) -> tuple[str, ...]:
        """Columns that it reads, and that stay in the batch."""
        return ()

    def selects(self, spec: MaskingSpec) -> dict[str, Any]:
        """Arguments of :class:`fastmlm.Selection`, without ``word_marks``."""
        return {}

    def replaces(self) -> dict[str, float]:
        """Arguments of :class:`fastmlm.MaskingSpec` in place of the collator's."""
        return {}

    def rates(self, batch: Batch) -> Tensor | None:
        """Mask probabilities: one a row, (B,), or one a token, (B, S)."""
        return None

    def protects(self, batch: Batch) -> Tensor | None:
        """Tokens that are never selected beside special ones, (B, S) bool."""
        return None

    def weighs(self, batch: Batch, rates: Tensor) -> dict[str, Tensor]:
        """Columns to add to the batch, for the loss, from the rates that it gave."""
        return {}

    def prepares(self, batch: Batch) -> dict[str, Tensor]:
        """What `arranges` needs beside the masks, one value a row or a token: goes to the device where masks do."""
        return {}

    def arranges(
        self, batch: dict[str, Any], attention_mask: Tensor, tokenizer: Any, multiple: int | None
    ) -> dict[str, Any]:
        """The masked batch with attention masks of its own, on its device, where nothing waits unless it `appends`.

        Args:
            batch: the columns, those of `prepares` among them, which do not stay.
            attention_mask: (B, S), whether among the columns or not.
            tokenizer: of the collator.
            multiple: of which the new length is to be one.
        """
        return batch


class Strategies:
    """Several strategies as one.

    Args:
        parts: what a collator was given: None, a strategy, or several.

    Raises:
        TypeError: something is no strategy.
        ValueError: two speak of the same thing.
    """

    def __init__(self, parts: Strategy | Sequence[Strategy] | None) -> None:
        several = () if parts is None else (parts,) if isinstance(parts, Strategy) else parts
        if not isinstance(several, Sequence) or not all(isinstance(part, Strategy) for part in several):
            raise TypeError(f"strategy: expected a strategy of fastmlm.strategies, or several, got {parts!r}")
        self.parts = tuple(several)
        self.whole_words = any(part.whole_words for part in self.parts)
        self.columns = tuple(name for part in self.parts for name in part.columns)
        self.reads = tuple(name for part in self.parts for name in part.reads)
        self.replaces = _merge((part, part.replaces()) for part in self.parts)
        self._rates, self._protects, self._weighs = map(self._who, ("rates", "protects", "weighs"))
        self.arranges = self._who("arranges")
        self._selections: dict[bool, tuple[MaskingSpec, Selection | None]] = {}

    def _who(self, method: str) -> Strategy | None:
        """The part that has a method of its own; there may be one."""
        having = [part for part in self.parts if getattr(type(part), method) is not getattr(Strategy, method)]
        if len(having) > 1:
            raise ValueError(
                f"strategy: expected one that {method} tokens or rows, got {having[0]!r} and {having[1]!r}"
            )
        return having[0] if having else None

    @property
    def reads_batches(self) -> bool:
        """Whether any part needs to see a batch before it is masked."""
        return any((self._rates, self._protects, self._weighs, self.arranges))

    @property
    def gives_rates(self) -> bool:
        """Whether rows or tokens have rates of their own."""
        return self._rates is not None

    def highest(self, probability: float | None) -> float | None:
        """The highest rate of a row of a collator with this probability; None: not known."""
        return self._rates.highest if self._rates else probability

    def unit_size(self, size_of_word: float) -> float:
        """``sum(size ** 2) / sum(size)`` of what is selected together, for words of this one."""
        return max((part.span_size for part in self.parts), default=1.0) * (size_of_word if self.whole_words else 1.0)

    def selection(self, spec: MaskingSpec, marks: Tensor | None) -> Selection | None:
        """What all parts select by, as ``mask_tokens`` takes it, made once for a spec; None: each token by itself.

        Args:
            marks: of words by id, for words that are read off the vocabulary; None: where there are none, or units.
        """
        kept = self._selections.get(marks is not None)
        if kept is None or kept[0] is not spec:
            said = _merge((part, part.selects(spec)) for part in self.parts)
            kept = spec, Selection(word_marks=marks, **said) if said or marks is not None else None
            self._selections[marks is not None] = kept
        return kept[1]

    def apply(self, batch: Batch) -> tuple[Tensor | None, Tensor | None, dict[str, Tensor]]:
        """Rates, the special tokens mask with what is protected, and columns to add; None where nobody says."""
        special = batch.special_tokens_mask
        protected = self._protects.protects(batch) if self._protects else None
        if protected is not None:
            special = protected if special is None else protected | (special != 0)
            batch = batch._replace(special_tokens_mask=special)
        rates = self._rates.rates(batch) if self._rates else None
        weights = {} if self._weighs is None or rates is None else self._weighs.weighs(batch, rates)
        return rates, special, weights if self.arranges is None else weights | self.arranges.prepares(batch)

    def arrange(self, batch: dict[str, Any], *given: Any) -> dict[str, Any]:
        """A masked batch as the part that arranges it has it; as it is where there is none."""
        return batch if self.arranges is None else self.arranges.arranges(batch, *given)


def _merge(said: Iterable[tuple[Strategy, dict[str, Any]]]) -> dict[str, Any]:
    """What several say, where none contradicts another."""
    merged: dict[str, Any] = {}
    by: dict[str, Strategy] = {}
    for part, arguments in said:
        for name, value in arguments.items():
            if name in merged and (isinstance(value, Tensor) or merged[name] != value):
                raise ValueError(f"strategy: expected one that says {name}, got {by[name]!r} and {part!r}")
            merged[name], by[name] = value, part
    return merged


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise ValueError unless a value is one of some strings."""
    if value not in choices:
        raise ValueError(f"{name}: expected {' or '.join(map(repr, choices))}, got {value!r}")
