"""UniLM: bidirectional, sequence-to-sequence and one-sided language models in one, by the attention of each row."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastmlm.attention import MODES as NAMES, attention_masks, check_dtype
from fastmlm.philox import MODES, first_real
from fastmlm.spec import probability, threshold
from fastmlm.strategies.base import Batch, Strategy

_SEGMENTS = "token_type_ids"


@dataclass(frozen=True)
class UniLM(Strategy):
    """``batch["attention_mask"] = attention_masks(modes, ...)``, with ``modes = torch.multinomial(shares, B, True)``

    Each row is in one of four modes, and selected tokens are predicted, where they are, from what that mode lets them
    see: all of the row; the source, and what is to the left in the target; what is to the left; what is to the right.
    The batch's ``attention_mask`` is then (B, 1, S, S), as `fastmlm.attention_masks` makes it. What is selected is up
    to the other strategies; the paper's own are ``(UniLM(), NGrams((0.8, 0.1, 0.1), whole_words=False))``.

    Needs a model that takes such masks: of transformers 5, BERT, RoBERTa, DistilBERT, ELECTRA and ALBERT do, with
    ``attn_implementation`` ``"sdpa"`` or ``"eager"``. (ModernBERT's layers of local attention then see as far as the
    mask goes; ESM does not take them with ``token_dropout``; ``packing=True`` is refused.)

    Args:
        bidirectional, seq2seq, left_to_right, right_to_left: the share of the rows in each mode; they sum to 1.
        prefix: which tokens are the source of rows in mode seq2seq: ``"token_type_ids"``, all before the first one of
            segment 1 (in a row without one, all); or a column of how many, special ones included.
        mask_dtype: of the attention masks, which are added to scores: that of the model's weights, of others of which
            attention refuses some, and reads some wrongly (PyTorch 2.13, float32 beside float64, on CPUs). Autocast
            takes float32. ``torch.bool`` takes a quarter of the bytes, and is for ``"sdpa"`` alone.

    Law: the mode is ``#{m < 3 : draw_7(0) >= T(sum of the shares up to m)}`` of the row, in the order of the arguments.

    Source: Dong et al., "Unified language model pre-training for natural language understanding and generation"
    (UniLM, 2019), sections 2.3 and 2.4 (shares).
    """

    bidirectional: float = 1 / 3
    seq2seq: float = 1 / 3
    left_to_right: float = 1 / 6
    right_to_left: float = 1 / 6
    prefix: str = _SEGMENTS
    mask_dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        shares = [probability(name, getattr(self, name)) for name in NAMES]
        if abs(sum(shares) - 1) > 1e-6:
            raise ValueError(f"{', '.join(NAMES)}: expected shares that sum to 1, got a sum of {sum(shares)}")
        if not isinstance(self.prefix, str):
            raise TypeError(f"prefix: expected the name of a column, got {self.prefix!r}")
        check_dtype("mask_dtype", self.mask_dtype)

    @property
    def columns(self) -> tuple[str, ...]:
        return () if self.prefix == _SEGMENTS else (self.prefix,)

    @property
    def reads(self) -> tuple[str, ...]:
        return (_SEGMENTS,) if self.prefix == _SEGMENTS else ()

    def prepares(self, batch: Batch) -> dict[str, Tensor]:
        *sums, total = itertools.accumulate(getattr(self, name) for name in NAMES)
        draws = batch.draws(MODES)
        modes = torch.stack([draws >= threshold(min(part / total, 1.0)) for part in sums]).sum(0)
        prefix = self._prefix_lengths(batch) if self.seq2seq > 0 else torch.zeros_like(modes)
        return {"fastmlm_modes": modes.to(torch.uint8), "fastmlm_prefix": prefix.to(torch.int32)}

    def _prefix_lengths(self, batch: Batch) -> Tensor:
        given, shape = batch.column(self, self.prefix), batch.input_ids.shape
        segments = self.prefix == _SEGMENTS
        if given.is_floating_point() or given.shape != (shape if segments else shape[:1]):
            raise ValueError(
                f"features: expected one int a {'token' if segments else 'row'} in the column {self.prefix!r} for "
                f"{self!r}, got {given.dtype} of shape {tuple(given.shape)}"
            )
        if not segments:
            if bool((given < 0).any()):
                raise ValueError(f"features: expected ints from 0 on in the column {self.prefix!r}, got {given.min()}")
            return given.clamp(max=shape[1])
        target = given != 0
        if batch.attention_mask is None:
            return torch.where(target.any(1), first_real(target), shape[1])
        target &= batch.attention_mask != 0
        lengths = first_real(target) - first_real(batch.attention_mask)
        return torch.where(target.any(1), lengths, shape[1])

    def arranges(
        self, batch: dict[str, Any], attention_mask: Tensor, tokenizer: Any, multiple: int | None
    ) -> dict[str, Any]:
        modes, prefix = batch.pop("fastmlm_modes"), batch.pop("fastmlm_prefix")
        return batch | {"attention_mask": attention_masks(modes, attention_mask, prefix, dtype=self.mask_dtype)}
