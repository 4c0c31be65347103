"""What the masks of a batch follow from: a collator's settings, its strategies, and the keys and steps it was told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastmlm.masking import row_keys
from fastmlm.philox import GOLDEN, as_int64
from fastmlm.schedules import Steps, rate_at
from fastmlm.seeding import Keys, distinct
from fastmlm.selection_spec import Selection
from fastmlm.spec import MaskingSpec, integer
from fastmlm.strategies import Strategy, WholeWords, words
from fastmlm.strategies.base import Batch, Strategies


class Plan(NamedTuple):
    """How a batch is masked: arguments of ``mask_tokens``, and columns for the loss."""

    spec: MaskingSpec
    key: int
    row_keys: Tensor
    units: Tensor | None
    selection: Selection | None
    special_tokens_mask: Tensor | None
    rates: Tensor | float | None  # in place of the spec's probability
    added: dict[str, Tensor]


class Planner:
    """The part of a `fastmlm.DataCollatorForMaskedLM` that says how to mask, and leaves it to others.

    The attributes are the collator's arguments. They, and the tokenizer's tokens, may change after construction.
    """

    tokenizer: Any
    whole_word_mask: bool
    mlm_probability: Any  # float | Schedule
    mask_replace_prob: float
    random_replace_prob: float
    seed: int | None
    rng: str
    random_words: str | Sequence[int]
    exclude_original: bool
    special_token_ids: Sequence[int] | None
    impl: str | None
    static: bool
    static_copies: int | None
    row_key_column: str | None
    mask_on_device: bool
    strategy: Strategy | Sequence[Strategy] | None

    def _start_planning(self) -> None:
        self._keys, self._steps = Keys(), Steps()
        self._spec: tuple[object, MaskingSpec] | None = None
        self._strategies: tuple[object, Strategies] | None = None
        self._marks: Tensor | None = None

    def probability_at(self, step: int) -> float:
        """The mask probability of an optimizer step, counted from 0."""
        rate = self.mlm_probability
        return rate_at(rate, step) if callable(rate) else rate

    @property
    def spec(self) -> MaskingSpec:
        """The settings as ``mask_tokens`` takes them; with a schedule, the probability is that of the first step."""
        settings = (
            self.mlm_probability, self.mask_replace_prob, self.random_replace_prob, self.exclude_original,
            self.random_words, self.special_token_ids, self.strategy, len(self.tokenizer),
            *self.tokenizer.all_special_ids,
        )  # fmt: skip
        if self._spec is None or self._spec[0] != settings:
            self._spec = settings, self._make_spec()
        return self._spec[1]

    def _make_spec(self) -> MaskingSpec:
        overrides: dict[str, Any] = {
            "mlm_probability": self.probability_at(0),
            "mask_replace_prob": self.mask_replace_prob,
            "random_replace_prob": self.random_replace_prob,
            "exclude_original": self.exclude_original,
            **self.strategies.replaces,
        }
        if self.special_token_ids is not None:
            overrides["special_token_ids"] = self.special_token_ids
        if not isinstance(self.random_words, str):
            overrides["random_token_ids"] = self.random_words
        elif self.random_words == "non_special":
            special = set(self.special_token_ids or ()) | set(self.tokenizer.all_special_ids)
            overrides["random_token_ids"] = sorted(set(self.tokenizer.get_vocab().values()) - special)
        return MaskingSpec.from_tokenizer(self.tokenizer, **overrides)

    @property
    def strategies(self) -> Strategies:
        """The strategies as one, ``whole_word_mask`` among them."""
        settings = (self.strategy, self.whole_word_mask, self.rng)
        if self._strategies is None or self._strategies[0] != settings:
            together = Strategies(self.strategy)
            if self.whole_word_mask and self.rng == "philox" and not together.whole_words:
                together = Strategies((*together.parts, WholeWords()))
            self._strategies = settings, together
        return self._strategies[1]

    def selection(self, by_vocabulary: bool = True) -> Selection | None:
        """What the strategies select by, as ``mask_tokens`` takes it.

        Args:
            by_vocabulary: words, if any, are read off the vocabulary; False: they come as units.
        """
        return self._selection(self.spec, by_vocabulary)

    def _selection(self, spec: MaskingSpec, by_vocabulary: bool) -> Selection | None:
        marks = self._word_marks(spec) if by_vocabulary and self.strategies.whole_words else None
        return self.strategies.selection(spec, marks)

    def plan(
        self,
        inputs: Tensor,
        special_tokens_mask: Tensor | None,
        offset_mapping: Tensor | None,
        attention_mask: Tensor | None,
        word_ids: Tensor | None,
        columns: Mapping[str, Any],
    ) -> Plan:
        """How to mask a padded batch, (B, S) each; ``columns`` are those that the masks depend on beside these.

        Each call is for another batch: keys and steps go on.
        """
        copies = 1 if self.static else self.static_copies
        key, by_content = self._keys.next(self._checked_seed(), copies)
        host_impl = None if self.mask_on_device else self.impl
        if by_content:
            rows = row_keys(inputs, attention_mask, host_impl)
            if self.row_key_column is not None:
                rows = distinct(rows, self.row_key_column, columns.get(self.row_key_column))
        else:
            # The batch's key goes into its rows', so that rows of several batches may be masked as one on a device.
            key, rows = 0, _steps_of_rows(len(inputs)) + as_int64(key)
        rates: Tensor | float | None = None
        if callable(self.mlm_probability):
            rates = self.probability_at(self._steps.next())
        # Once a batch: a tokenizer puts its list of special tokens together anew each time it is asked.
        units, spec, strategies = None, self.spec, self.strategies
        if strategies.whole_words and (word_ids is not None or offset_mapping is not None):
            flags, _ = spec.tables(inputs.device)
            given = (special_tokens_mask, offset_mapping, attention_mask, word_ids)
            units = words.units_of_batch(inputs, self._word_marks(spec), flags, *given)
        added: dict[str, Tensor] = {}
        if strategies.reads_batches:
            rate = spec.mlm_probability if rates is None else float(rates)
            batch = Batch(inputs, attention_mask, special_tokens_mask, columns, spec, rate, key, rows, host_impl)
            own, special_tokens_mask, added = strategies.apply(batch)
            rates = rates if own is None else own
        return Plan(spec, key, rows, units, self._selection(spec, units is None), special_tokens_mask, rates, added)

    def _checked_seed(self) -> int | None:
        return None if self.seed is None else integer("seed", self.seed, -(1 << 63), 1 << 64)

    def _word_marks(self, spec: MaskingSpec) -> Tensor:
        if self._marks is None or len(self._marks) != spec.vocab_size:
            self._marks = words.marks_by_id(self.tokenizer)
        return self._marks


@lru_cache(maxsize=8)
def _steps_of_rows(count: int) -> Tensor:
    """``i * G`` of each row i, on the CPU; to be read alone."""
    return torch.arange(count, device="cpu") * as_int64(GOLDEN)
