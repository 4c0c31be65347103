"""Rows of Python ints to padded tensors, by the native module."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fastmlm.kernels.cpu import _native


def pack_lists(column: list[object], lengths: Sequence[int], width: int, left: bool, fill: int) -> Tensor | None:
    """Lists or tuples of ints as (B, width) int64, filled up on one side.

    None where a row is no list or tuple of its length, or a value no int of 64 bits: the caller knows what to say.
    """
    out = torch.empty((len(column), width), dtype=torch.int64, device="cpu")  # whatever the default device is
    counts = torch.tensor(lengths, dtype=torch.int64, device="cpu")
    bad = _native.pack_rows(column, out.data_ptr(), counts.data_ptr(), width, left, fill)
    return out if bad is None else None
