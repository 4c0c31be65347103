"""Rows of Python ints, arrays or buffers to padded tensors, by the native module."""

import torch
from torch import Tensor

from fastmlm.kernels.cpu import _native


def pack(column: list[object], lengths: list[int], width: int, left: bool, fill: int) -> Tensor | None:
    """Rows of integers as (B, width) int64, filled up on one side: lists, tuples, or what offers the buffer protocol.

    None where a row is none of these or not of its length, or a value no int of 64 bits: the caller knows what to say.
    """
    out = torch.empty((len(column), width), dtype=torch.int64, device="cpu")  # whatever the default device is
    bad = _native.pack_rows(column, out.data_ptr(), lengths, width, left, fill)
    return out if bad is None else None
