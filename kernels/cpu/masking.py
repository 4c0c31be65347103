"""Masking on the CPU: tensors to addresses, for the native kernels."""

import torch
from torch import Tensor

from fastmlm.kernels.cpu import _native
from fastmlm.spec import check_ids


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _as_int64(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.to(torch.int64).contiguous()


def mask_tokens(
    input_ids: Tensor,
    seed: int,
    device_seed: Tensor | None,
    row_keys: Tensor | None,
    attention_mask: Tensor | None,
    special_tokens_mask: Tensor | None,
    units: Tensor | None,
    cu_seqlens: Tensor | None,
    thresholds: Tensor | None,
    flags: Tensor,
    random_ids: Tensor | None,
    threshold: int,
    mask_token_id: int,
    mask_threshold: int,
    random_threshold: int,
    ignore_index: int,
    exclude_original: bool,
    words: bool,
    span_limits: Tensor | None,
    id_thresholds: Tensor | None,
    per_unit: bool,
    exact: bool,
    at_least: int,
    at_most: int,
    output_ids: Tensor,
    labels: Tensor,
) -> None:
    """Run the kernel; arguments as :mod:`fastmlm._ops` describes them, checked by :func:`fastmlm.mask_tokens`."""
    rows, length = input_ids.shape
    # Named, since the addresses that follow must outlive the call.
    units, cu_seqlens = _as_int64(units), _as_int64(cu_seqlens)
    row_keys = None if row_keys is None else row_keys.contiguous()
    if device_seed is not None:
        seed = int(device_seed)
    segments = rows if cu_seqlens is None else cu_seqlens.numel() - 1
    per_token = thresholds is not None and thresholds.shape == input_ids.shape
    if per_token and length == 1 and rows == segments:
        per_token = False  # one a token is one a row here, which counts go by
    in_range = _native.mask_tokens(
        input_ids.data_ptr(),
        output_ids.data_ptr(),
        labels.data_ptr(),
        input_ids.element_size(),
        segments,
        length,
        _address(cu_seqlens),
        seed & 0xFFFFFFFFFFFFFFFF,
        _address(row_keys),
        _address(attention_mask),
        1 if attention_mask is None else attention_mask.element_size(),
        _address(special_tokens_mask),
        1 if special_tokens_mask is None else special_tokens_mask.element_size(),
        _address(units),
        _address(thresholds),
        per_token,
        flags.data_ptr(),
        flags.numel(),
        _address(random_ids),
        flags.numel() if random_ids is None else random_ids.numel(),
        threshold,
        mask_threshold,
        random_threshold,
        mask_token_id,
        ignore_index,
        exclude_original,
        words,
        _address(span_limits),
        0 if span_limits is None else span_limits.numel() + 1,
        _address(id_thresholds),
        per_unit,
        exact,
        at_least,
        at_most,
    )
    if not in_range:
        lowest, highest = input_ids.aminmax()
        check_ids(int(lowest), int(highest), flags.numel())


def thresholds(rates: Tensor) -> Tensor | None:
    """``fastmlm.spec.thresholds`` of contiguous float32 or float64; None if not all of them are in [0, 1]."""
    limits = torch.empty_like(rates, dtype=torch.int64)
    inside = _native.thresholds(rates.data_ptr(), rates.dtype == torch.float64, rates.numel(), limits.data_ptr())
    return limits if inside else None


def units_fit(units: Tensor, attention_mask: Tensor | None) -> bool:
    """Whether each real token's unit, of (B, S) int64, starts in its row and not after the token; all contiguous."""
    size = 1 if attention_mask is None else attention_mask.element_size()
    return _native.units_fit(units.data_ptr(), _address(attention_mask), size, *units.shape)


def row_keys(input_ids: Tensor, attention_mask: Tensor | None, weights: Tensor) -> Tensor:
    """The row keys of (B, S) int64 or int32 ids; ``weights`` are the multipliers of the positions (at least S)."""
    keys = input_ids.new_empty(input_ids.shape[0], dtype=torch.int64)
    _native.row_keys(
        input_ids.data_ptr(),
        input_ids.element_size(),
        _address(attention_mask),
        1 if attention_mask is None else attention_mask.element_size(),
        weights.data_ptr(),
        *input_ids.shape,
        keys.data_ptr(),
    )
    return keys


def row_draws(key: int, row_keys: Tensor, stream: int) -> Tensor:
    """``draw_stream(0)`` of each row, (B,) int64, by contiguous row keys."""
    draws = torch.empty_like(row_keys)
    _native.row_draws(key, row_keys.data_ptr(), len(row_keys), stream, draws.data_ptr())
    return draws


def count_selectable(
    input_ids: Tensor, flags: Tensor, attention_mask: Tensor | None, special_tokens_mask: Tensor | None
) -> Tensor:
    """How many tokens of each row may be selected, (B,) int64; (B, S) int64 or int32 ids, all contiguous."""
    counts = input_ids.new_empty(len(input_ids), dtype=torch.int64)
    _native.count_selectable(
        input_ids.data_ptr(),
        input_ids.element_size(),
        flags.data_ptr(),
        flags.numel(),
        _address(attention_mask),
        1 if attention_mask is None else attention_mask.element_size(),
        _address(special_tokens_mask),
        1 if special_tokens_mask is None else special_tokens_mask.element_size(),
        *input_ids.shape,
        counts.data_ptr(),
    )
    return counts
