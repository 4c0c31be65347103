"""Permutation language modelling on the CPU: tensors to addresses, for the native module."""

import torch
from torch import Tensor

from fastmlm.kernels.cpu import _native
from fastmlm.spec import check_ids


def permute(
    input_ids: Tensor,
    key: int,
    row_keys: Tensor,
    attention_mask: Tensor | None,
    special_tokens_mask: Tensor | None,
    flags: Tensor,
    mask_token_id: int | None,
    probability: float,
    max_span_length: int,
    perm_mask: Tensor,
    target_mapping: Tensor,
) -> Tensor:
    """Run the kernel; arguments as of ``fastmlm.permutation.permute``, all contiguous."""
    rows, length = input_ids.shape
    labels = torch.empty_like(input_ids)
    in_range = _native.permute(
        input_ids.data_ptr(),
        labels.data_ptr(),
        perm_mask.data_ptr(),
        target_mapping.data_ptr(),
        rows,
        length,
        key & 0xFFFFFFFFFFFFFFFF,
        row_keys.data_ptr(),
        0 if attention_mask is None else attention_mask.data_ptr(),
        1 if attention_mask is None else attention_mask.element_size(),
        0 if special_tokens_mask is None else special_tokens_mask.data_ptr(),
        1 if special_tokens_mask is None else special_tokens_mask.element_size(),
        flags.data_ptr(),
        flags.numel(),
        0 if mask_token_id is None else mask_token_id,
        mask_token_id is not None,
        probability,
        max_span_length,
    )
    if not in_range:
        lowest, highest = input_ids.aminmax()
        check_ids(int(lowest), int(highest), flags.numel())
    return labels
