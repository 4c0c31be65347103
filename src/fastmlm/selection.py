"""Selected positions in a buffer of fixed size: nothing waits for a GPU, and every step has tensors of the same shapes.

``nonzero`` makes a tensor as long as there are selected positions, which the host must first be told. Here the host
decides on the length, from the law by which positions are selected, and the device counts what did not fit.
"""

import math
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

SHIPPED_KEYS = "fastmlm_keys"  # the column by which a batch is known that the device is to mask
_ROUNDED_TO = 128  # rows: matrix products of such sizes waste no tile
_SIGMAS = 6  # a normal law passes them once in 10^9 steps


class SelectedRows(NamedTuple):
    """``rows``: flat indices of the selected positions, in order; ``count``: how many positions are selected."""

    rows: Tensor
    count: Tensor  # type: ignore[assignment]  # a tuple has a method of that name, which nobody needs here


def select_rows(labels: Tensor, capacity: int, *, ignore_index: int = -100) -> SelectedRows:
    """``rows = (labels.flatten() != -100).nonzero()[:capacity, 0]``, filled up with N; and how many there are

    A sparse model (`fastmlm.sparsify`) and `MaskedLMHead` take both, beside the labels, and then neither wait for a GPU
    nor break the graph of ``torch.compile``::

        capacity = row_capacity(labels.numel(), 0.15)
        loss = model(**batch, **select_rows(batch["labels"], capacity)._asdict()).loss

    Positions beyond the capacity do not count in that loss. `Overflow` adds them up.

    Args:
        labels: any shape of N elements, int32 or int64.
        capacity: the number of rows, at least 1.
        ignore_index: the label of positions that are not selected.

    Returns:
        rows: (capacity,) int64, in [0, N), in order; N in unused slots, which are no-ops in the head.
        count: () int64; more than the capacity where that was too small.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    if not isinstance(labels, Tensor) or labels.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"labels: expected an int32 or int64 tensor, got {getattr(labels, 'dtype', type(labels))}")
    if isinstance(capacity, bool) or not isinstance(capacity, int):
        raise TypeError(f"capacity: expected an int, got {capacity!r}")
    if capacity < 1:
        raise ValueError(f"capacity: expected at least 1, got {capacity}")
    selected = labels.reshape(-1) != ignore_index
    if not labels.numel():  # on a GPU, PyTorch's function fails on nothing (its issue 162473)
        return SelectedRows(torch.zeros(capacity, dtype=torch.int64, device=labels.device), selected.sum())
    rows = torch.nonzero_static(selected, size=capacity, fill_value=labels.numel())
    return SelectedRows(rows.squeeze(1), selected.sum())


def row_capacity(tokens: int, mlm_probability: float | None, *, unit_size: float = 1.0) -> int:
    """``N * p + 6 * sqrt(N * p * (1 - p) * unit_size)``, rounded up to 128

    So many rows are enough for the selected positions of a batch, but once in 10⁹ steps by the normal law.

    Args:
        tokens: N, with special tokens and padding.
        mlm_probability: p; None: any, such as a random one for each row, for which only all N are enough.
        unit_size: how large the unit (word, span) of a token is on the average over tokens, Σ size² / Σ size, where
            units are selected as a whole.

    Returns:
        The capacity for `select_rows`.

    Raises:
        ValueError: naming the argument.
    """
    if tokens < 0:
        raise ValueError(f"tokens: expected a number of tokens, got {tokens}")
    if unit_size < 1:
        raise ValueError(f"unit_size: expected at least 1, got {unit_size}")
    p = 1.0 if mlm_probability is None else float(mlm_probability)
    if not 0 <= p <= 1:
        raise ValueError(f"mlm_probability: expected a number between 0 and 1, got {mlm_probability}")
    enough = tokens * p + _SIGMAS * math.sqrt(tokens * p * (1 - p) * unit_size)
    return max(-(-min(math.ceil(enough), tokens) // _ROUNDED_TO) * _ROUNDED_TO, _ROUNDED_TO)


class Overflow:
    """``overflow += (count - capacity).clamp(min=0)``: selected positions that no slot was left for, on the device."""

    def __init__(self) -> None:
        self._dropped: Tensor | None = None  # () int64

    def add(self, selected: SelectedRows) -> None:
        """Count those of one step."""
        beyond = (selected.count - len(selected.rows)).clamp(min=0)
        self._dropped = beyond if self._dropped is None else self._dropped.to(beyond.device) + beyond

    def warn(self, stacklevel: int = 2) -> None:
        """Say how many there were since this was last asked, if any; call it where the host reads results anyway."""
        dropped, self._dropped = self._dropped, None
        count = 0 if dropped is None else int(dropped)
        if count:
            warnings.warn(
                f"{count} selected positions did not count in the loss, since a batch had more of them than the "
                "capacity has slots; give a larger capacity",
                stacklevel=stacklevel + 1,
            )


def check_is_masked(batch: Mapping[str, Any]) -> None:
    """Raise if a batch is one that a collator leaves to the device to mask, and nobody did."""
    if SHIPPED_KEYS in batch:
        raise ValueError(
            "labels: expected a masked batch, got one as a collator with mask_on_device=True ships it; mask it by "
            "fastmlm.mask_batches, or by a trainer of class MyTrainer(MaskOnDevice, MaskedLMTrainer)"
        )


def check_rows(rows: Any) -> None:
    """Raise unless they can be those of `select_rows`."""
    if not isinstance(rows, Tensor) or rows.dtype != torch.int64 or rows.dim() != 1:
        got = f"{rows.dtype} of shape {tuple(rows.shape)}" if isinstance(rows, Tensor) else type(rows).__name__
        raise TypeError(f"rows: expected an int64 tensor of one dimension, as select_rows makes it, got {got}")


def check_weights(labels: Tensor, weights: Any, tokens: Any, num_items_in_batch: Any) -> None:
    """Raise unless what a batch brings along for its loss, as far as it does, fits its labels."""
    if weights is not None:
        if not isinstance(weights, Tensor) or not weights.is_floating_point():
            raise TypeError(f"loss_weights: expected floating numbers, got {getattr(weights, 'dtype', type(weights))}")
        if weights.shape != labels.shape:
            raise ValueError(f"loss_weights: expected {tuple(labels.shape)}, like labels, got {tuple(weights.shape)}")
        if weights.requires_grad:
            raise ValueError("loss_weights: expected numbers without a gradient, got a tensor that requires one")
    if tokens is None:
        return
    if not isinstance(tokens, Tensor) or tokens.dtype not in (torch.int32, torch.int64) or tokens.dim() != 1:
        got = f"{tokens.dtype} of shape {tuple(tokens.shape)}" if isinstance(tokens, Tensor) else type(tokens).__name__
        raise TypeError(f"loss_tokens: expected an int64 tensor of one number a row, got {got}")
    if num_items_in_batch is not None:
        # By neither may the loss be divided in silence: a Trainer counts labels, and is wrong by a random factor then.
        raise ValueError(
            "loss_tokens: expected none beside num_items_in_batch, for the loss is divided by one of them; train with "
            "fastmlm.MaskedLMTrainer, which counts loss_tokens and not labels, or give their sum over all batches of "
            "the step as num_items_in_batch, and not them"
        )


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """``x.index_select(0, rows)``, (N, H) → (K, H): of any row where ``rows`` is N, which then gets no gradient."""
    return _TakeRows.apply(x, rows)


def labels_at(labels: Tensor, rows: Tensor, ignore_index: int) -> Tensor:
    """``labels.index_select(0, rows)``, (N,) → (K,), with ``ignore_index`` where ``rows`` is N; numbers of any kind."""
    if not labels.numel():
        return labels.new_full(rows.shape, ignore_index)
    last = labels.numel() - 1
    return labels.index_select(0, rows.clamp(max=last)).masked_fill(rows > last, ignore_index)


class _TakeRows(torch.autograd.Function):
    """Its backward pass copies each row's gradient to its place: no additions, whose order a GPU would not keep."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.count = len(x)
        if not len(x):
            return x.new_zeros(len(rows), *x.shape[1:])
        return x.index_select(0, rows.clamp(max=len(x) - 1))

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        # One row more, for the slots that are not used.
        grad = grad_output.new_zeros(ctx.count + 1, *grad_output.shape[1:])
        return grad.index_copy_(0, rows, grad_output)[: ctx.count], None
