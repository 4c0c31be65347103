"""Permutation language modelling: the data collator of XLNet, Hugging Face's arguments, masks by the draw law."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from transformers import DataCollatorForPermutationLanguageModeling, TrainerCallback

from fastmlm import philox
from fastmlm.dispatch import kernel, resolve
from fastmlm.epochs import TellEpoch
from fastmlm.masking import row_keys
from fastmlm.packing import row_lengths
from fastmlm.padding import pad_rows
from fastmlm.reuse import Reuse
from fastmlm.seeding import Keys, distinct
from fastmlm.spec import SPECIAL, check_ids, integer, probability

_CPU = torch.device("cpu")
_IMPLS = ("reference", "cpp")
_LONGEST = 1 << 31  # of contexts, so that a draw times one fits in 63 bits; no row is longer
_NEVER = (1 << 63) - 1  # sorts after every target
_KEPT = ("attention_mask", "token_type_ids")  # of the rows' columns; Hugging Face keeps none
_OURS = {"input_ids", "special_tokens_mask", *_KEPT}


def permute(
    input_ids: Tensor,
    key: int,
    keys_by_row: Tensor,
    attention_mask: Tensor | None,
    special_tokens_mask: Tensor | None,
    flags: Tensor,
    mask_token_id: int | None,
    probability: float,
    max_span_length: int,
    perm_mask: Tensor,
    target_mapping: Tensor,
) -> Tensor:
    """The law of :class:`DataCollatorForPermutationLM` in plain PyTorch, which defines it.

    Args:
        input_ids: (B, S) int64, masked in place.
        key: of the draw law.
        keys_by_row: (B,) int64.
        attention_mask, special_tokens_mask: (B, S) integers or bool, or None.
        flags: (V,) uint8, by id: bit 0 for special tokens.
        mask_token_id: what targets become; None: they stay.
        probability, max_span_length: as the collator has them.
        perm_mask, target_mapping: (B, S, S) float32, written.

    Returns:
        the labels, (B, S) int64.

    Raises:
        ValueError: ids are outside of the table.
    """
    rows, length = input_ids.shape
    if input_ids.numel():
        check_ids(int(input_ids.min()), int(input_ids.max()), flags.numel())
    device = input_ids.device
    column = torch.arange(length, device=device)
    first = philox.first_real(input_ids.new_ones(rows, length) if attention_mask is None else attention_mask)
    position = column - first[:, None]
    key_tensor = input_ids.new_full((1,), philox.as_int64(key))
    selectable = (flags[input_ids] & SPECIAL) == 0
    if attention_mask is not None:
        selectable &= attention_mask != 0
    if special_tokens_mask is not None:
        selectable &= special_tokens_mask == 0

    draws = philox.draw_rows(key_tensor, keys_by_row, 2 * length, (philox.SPANS,))[0]
    target = selectable & _in_spans(position, draws, probability, max_span_length)

    # The order of the targets; all others come before them and see none.
    draws = philox.draw_rows(key_tensor, keys_by_row, length, (philox.PERMUTATIONS,))[0]
    draws = draws.gather(1, position.clamp(min=0))
    order = torch.where(target, (draws << 31) + position, _NEVER).argsort(1).argsort(1)
    sees = torch.where(target, order, 0)[:, :, None] > order[:, None, :]
    perm_mask.copy_(target[:, None, :] & ~sees)
    target_mapping.copy_(torch.eye(length, device=device))
    labels = torch.where(target, input_ids, -100)
    if mask_token_id is not None:
        input_ids.masked_fill_(target, mask_token_id)
    return labels


def _in_spans(position: Tensor, draws: Tensor, probability: float, max_span_length: int) -> Tensor:
    """Whether a span covers each position, (B, S): by 2S draws, for no row has more spans than tokens."""
    size, place = 1 + (draws[:, ::2] * max_span_length >> 32), draws[:, 1::2]
    context = (size.to(torch.float64) / probability).clamp(max=_LONGEST).to(torch.int64)
    start = context.cumsum(1) - context + (place * (context - size + 1) >> 32)
    nearest = (torch.searchsorted(start, position, right=True) - 1).clamp(min=0)
    from_start = position - start.gather(1, nearest)
    return (from_start >= 0) & (from_start < size.gather(1, nearest))


@dataclass
class DataCollatorForPermutationLM(DataCollatorForPermutationLanguageModeling):
    """``transformers.DataCollatorForPermutationLanguageModeling(tokenizer, ...)``: same arguments, order and outputs.

    Spans of tokens are targets, which are predicted one after another in a random order (the factorisation): each sees
    the tokens that are no targets and the targets before it, and neither itself nor those after it. Differences to
    Hugging Face's, each on purpose:

    - Rows of odd lengths are taken. Hugging Face permutes both halves of a row alike, for XLNet's memory of a segment's
      first half, and so needs even ones. (For that, its first half would have to see nothing of the second, and it
      does.) Here, as in the paper's objective, each order of a row's targets is as likely as any other.
    - Special tokens and padding are never targets and see no target. Hugging Face lets them see the targets before them
      and be seen by all, so that a target sees itself by way of [SEP] once its id is in ``input_ids``.
    - ``attention_mask`` and ``token_type_ids`` are kept, so models do not attend to padding.
    - A pad token is needed only where rows have different lengths; with a ``seed`` masks are reproducible.

    Args:
        tokenizer: a transformers tokenizer.
        plm_probability: share of the tokens to predict, above 0 and up to 1.
        max_span_length: the longest span; lengths from 1 on are equally likely.
        return_tensors: ``"pt"`` or ``"np"``.
        seed, static, row_key_column, impl: as in `fastmlm.DataCollatorForMaskedLM`; with a seed, and an epoch told
            (:meth:`set_epoch`, :meth:`callback`), all is a function of (seed, epoch, row content) alone.
        pad_to_multiple_of: round padded lengths up to a multiple of this.
        mask_inputs: targets become the mask token in ``input_ids``, as Hugging Face has it: a target then knows where
            the targets before it are, and not what. False: ids stay, as in the paper; each target sees what the earlier
            ones are, and ``perm_mask`` hides the rest (rows need a token that is no target, such as [SEP]: XLNet's
            attention falls back to all tokens where all are hidden).

    Shapes: ``input_ids`` and ``labels`` (B, S) int64, -100 where nothing is predicted; ``perm_mask`` (B, S, S) float32,
    1 where i cannot attend to j; ``target_mapping`` (B, S, S) float32, the identity; ``attention_mask`` and
    ``token_type_ids`` (B, S) int64 where rows have them or the tokenizer's models take them; no other columns. A dict.

    Law, in integers but for one division in float64 (`fastmlm.philox` has the draws; positions s count from the row's
    first token with ``attention_mask != 0``)::

        length_j  = 1 + (draw_3(2j) * max_span_length >> 32)
        context_j = min(int(length_j / plm_probability), 2^31)
        start_j   = context_0 + ... + context_(j-1) + (draw_3(2j + 1) * (context_j - length_j + 1) >> 32)
        target(s) = selectable(s) and start_j <= s < start_j + length_j for some j
        order     : targets sorted by (draw_5(s), s)
        perm_mask[i, j] = target(j) and not (target(i) and j comes before i in the order)

    Selectable: neither special by id or by a ``special_tokens_mask`` column, nor ``attention_mask == 0``.

    Raises:
        TypeError, ValueError: naming the argument, or the column and row, what was expected and what came.

    Source: Yang et al., "XLNet" (2019), sections 2.2, 2.3 and (spans) the appendix on pretraining.
    """

    seed: int | None = field(default=None, kw_only=True)
    static: bool = field(default=False, kw_only=True)
    row_key_column: str | None = field(default=None, kw_only=True)
    pad_to_multiple_of: int | None = field(default=None, kw_only=True)
    mask_inputs: bool = field(default=True, kw_only=True)
    impl: str | None = field(default=None, kw_only=True)

    packing: ClassVar[bool] = False  # which the callback asks for

    def __post_init__(self) -> None:
        self._keys, self._memory = Keys(), Reuse()
        self._table: tuple[object, Tensor] | None = None
        self._settings()
        if not callable(getattr(self.tokenizer, "get_vocab", None)):
            raise TypeError(f"tokenizer: expected one of transformers, got {type(self.tokenizer).__name__}")
        if self.row_key_column is not None and not isinstance(self.row_key_column, str):
            raise TypeError(f"row_key_column: expected a column's name, got {self.row_key_column!r}")
        if self.pad_to_multiple_of is not None:
            integer("pad_to_multiple_of", self.pad_to_multiple_of, 1, 1 << 31)
        self._mask_token_id()

    def set_epoch(self, epoch: int) -> None:
        """Tell the epoch, before the loader is iterated; reaches workers, also persistent ones."""
        self._keys.set_epoch(integer("epoch", epoch, 0, 1 << 64))

    def set_step(self, step: int, batches_per_step: int = 1) -> None:
        """Nothing: no schedule goes by it. What tells collators of epochs tells them of steps as well."""

    def for_evaluation(self) -> "DataCollatorForPermutationLM":
        """A copy for evaluation: a row's masks are the same each time, and those of no epoch of training."""
        other = copy.copy(self)
        other._keys = Keys(for_evaluation=True)
        return other

    def callback(self) -> TrainerCallback:
        """A callback for ``Trainer(callbacks=[...])`` that tells this collator the epochs, on resume too."""
        return TellEpoch(self)

    # Hugging Face's members, which user code calls and overrides.

    def torch_call(self, examples: Sequence[Any]) -> dict[str, Any]:
        """Collate to tensors."""
        columns, attention = self._pad(examples)
        if type(self).torch_mask_tokens is not DataCollatorForPermutationLM.torch_mask_tokens:
            made = self.torch_mask_tokens(columns["input_ids"])  # of a subclass, with Hugging Face's argument
        else:
            made = self._permute(columns["input_ids"], attention, columns.get("special_tokens_mask"), columns)
        batch = dict(zip(("input_ids", "perm_mask", "target_mapping", "labels"), made, strict=True))
        return batch | {name: columns[name] for name in _KEPT if name in columns}

    def numpy_call(self, examples: Sequence[Any]) -> dict[str, Any]:
        """Collate to arrays."""
        if type(self).numpy_mask_tokens is DataCollatorForPermutationLM.numpy_mask_tokens:
            return {name: column.numpy() for name, column in self.torch_call(examples).items()}
        columns = {name: column.numpy() for name, column in self._pad(examples)[0].items() if name in _OURS}
        made = self.numpy_mask_tokens(columns["input_ids"])
        batch = dict(zip(("input_ids", "perm_mask", "target_mapping", "labels"), made, strict=True))
        return batch | {name: columns[name] for name in _KEPT if name in columns}

    def torch_mask_tokens(
        self,
        inputs: Tensor,
        *,
        attention_mask: Tensor | None = None,
        special_tokens_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """A padded batch, (B, S) each: input_ids, perm_mask, target_mapping and labels. ``inputs`` are not changed.

        Args:
            attention_mask: None: all but pad tokens are real.
        """
        if not isinstance(inputs, Tensor) or inputs.dim() != 2 or inputs.is_floating_point():
            raise TypeError(f"inputs: expected a (B, S) tensor of integers, got {type(inputs).__name__}")
        if attention_mask is None and self.tokenizer.pad_token_id is not None:
            attention_mask = inputs != self.tokenizer.pad_token_id
        for name, mask in (("attention_mask", attention_mask), ("special_tokens_mask", special_tokens_mask)):
            if mask is not None and (mask.shape != inputs.shape or mask.device != inputs.device):
                raise ValueError(f"{name}: expected the shape {tuple(inputs.shape)} of inputs, got {tuple(mask.shape)}")
        copied = inputs.to(torch.int64, copy=True, memory_format=torch.contiguous_format)
        return self._permute(copied, attention_mask, special_tokens_mask, {})

    def numpy_mask_tokens(
        self,
        inputs: np.ndarray,
        *,
        attention_mask: np.ndarray | None = None,
        special_tokens_mask: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """:meth:`torch_mask_tokens` for arrays."""
        masks = {"attention_mask": attention_mask, "special_tokens_mask": special_tokens_mask}
        made = DataCollatorForPermutationLM.torch_mask_tokens(
            self,
            torch.from_numpy(np.array(inputs)),  # copied, since PyTorch takes only writable arrays of positive strides
            **{name: None if mask is None else torch.from_numpy(np.array(mask)) for name, mask in masks.items()},
        )
        ids, perm_mask, target_mapping, labels = (tensor.numpy() for tensor in made)
        return ids, perm_mask, target_mapping, labels

    # What the members above share.

    def _pad(self, examples: Sequence[Any]) -> tuple[dict[str, Any], Tensor]:
        """The rows as padded columns; and their attention mask, among the columns or not."""
        first = examples[0] if not isinstance(examples, Mapping) and len(examples) else None
        wanted = _OURS | {self.row_key_column}
        skip = [name for name in first if name not in wanted] if isinstance(first, Mapping) else []
        native = resolve(self.impl, _CPU, _IMPLS) == "cpp"
        columns = pad_rows(examples, self.tokenizer, self.pad_to_multiple_of, skip, native)
        attention = columns.get("attention_mask")
        if attention is None:
            left = self.tokenizer.padding_side == "left"
            lengths = torch.tensor(row_lengths(examples), device="cpu")
            attention = philox.real_tokens(lengths, columns["input_ids"].shape[1], left)
        return columns, attention

    def _permute(
        self,
        inputs: Tensor,
        attention_mask: Tensor | None,
        special_tokens_mask: Tensor | None,
        columns: Mapping[str, Any],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Mask in place; the next batch's key is used up."""
        seed, rate, longest = self._settings()
        impl = resolve(self.impl, inputs.device, _IMPLS)
        masks = [None if mask is None else mask.contiguous() for mask in (attention_mask, special_tokens_mask)]
        key, by_content = self._keys.next(seed, 1 if self.static else None)
        keys_by_row = torch.arange(len(inputs), device=inputs.device)
        if by_content:
            keys_by_row = row_keys(inputs, masks[0], impl)
            if self.row_key_column is not None:
                keys_by_row = distinct(keys_by_row, self.row_key_column, columns.get(self.row_key_column))
        run: Callable[..., Tensor] = permute if impl == "reference" else kernel("cpp", "permutation.permute")
        flags, mask_token_id = self._flags().to(inputs.device), self._mask_token_id()
        shape = (*inputs.shape, inputs.shape[1])
        if inputs.device.type == "cpu":
            perm_mask, target_mapping = self._memory.empty(*shape), self._memory.empty(*shape)
        else:
            perm_mask, target_mapping = torch.empty((2, *shape), dtype=torch.float32, device=inputs.device)
        settings = (flags, mask_token_id, rate, longest, perm_mask, target_mapping)
        labels = run(inputs, key, keys_by_row.contiguous(), *masks, *settings)
        return inputs, perm_mask, target_mapping, labels

    def _settings(self) -> tuple[int | None, float, int]:
        """The seed, the share and the longest span, checked: attributes may have changed since the last batch."""
        rate = probability("plm_probability", self.plm_probability)
        if rate == 0:
            raise ValueError(f"plm_probability: expected a number above 0 and up to 1, got {self.plm_probability}")
        longest = integer("max_span_length", self.max_span_length, 1, _LONGEST)
        seed = None if self.seed is None else integer("seed", self.seed, -(1 << 63), 1 << 64)
        if self.static and seed is None:
            raise ValueError("static: expected a seed with it, got None")
        return seed, rate, longest

    def _mask_token_id(self) -> int | None:
        """What targets become, if anything."""
        if not self.mask_inputs:
            return None
        if self.tokenizer.mask_token_id is None:
            raise ValueError(
                f"tokenizer: expected one with a mask token, got {type(self.tokenizer).__name__} without; "
                "set tokenizer.mask_token or use mask_inputs=False"
            )
        return self.tokenizer.mask_token_id

    def _flags(self) -> Tensor:
        """Which ids are special, by id; made anew where the tokenizer's tokens have changed."""
        special = [i for i in self.tokenizer.all_special_ids if i is not None]
        settings = (len(self.tokenizer), *special)
        if self._table is None or self._table[0] != settings:
            flags = torch.zeros(max(self.tokenizer.get_vocab().values()) + 1, dtype=torch.uint8, device="cpu")
            flags[special] = SPECIAL
            self._table = settings, flags
        return self._table[1]
