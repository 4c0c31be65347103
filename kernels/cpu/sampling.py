"""Sampling on the CPU: tensors to addresses, for the native kernel."""

import torch
from torch import Tensor

from fastmlm.kernels.cpu import _native


def sample_tokens(
    logits: Tensor, seed: int, device_seed: Tensor | None, row_keys: Tensor, temperature: float
) -> Tensor:
    """Run the kernel; arguments as :mod:`fastmlm._ops` describes them."""
    if logits.dtype not in (torch.float32, torch.bfloat16):
        logits = logits.float()
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    if device_seed is not None:
        seed = int(device_seed)
    tokens = torch.empty_like(row_keys)
    _native.sample_tokens(
        logits.data_ptr(),
        logits.dtype == torch.bfloat16,
        *logits.shape,
        logits.stride(0),
        seed & 0xFFFFFFFFFFFFFFFF,
        row_keys.data_ptr(),
        1 / temperature,
        tokens.data_ptr(),
        torch.get_num_threads(),
    )
    return tokens
