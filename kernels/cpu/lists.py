"""Rows of list columns, as Arrow lays them out in memory, to padded tensors, by the native module."""

import torch
from torch import Tensor

from fastmlm.kernels.cpu import _native

# A column: (parts, 3) int64, the addresses of each part's offsets and values and how many values; the bytes of an
# offset, the bytes of a value, whether values are signed.
Column = tuple[Tensor, int, int, bool]


def lengths(column: Column, part: Tensor, place: Tensor) -> Tensor | None:
    """The lengths of the rows at these places of these parts; None where offsets do not lie in the values."""
    out = torch.empty_like(part)
    parts, *kind = column
    bad = _native.list_lengths(parts.data_ptr(), *kind, part.data_ptr(), place.data_ptr(), part.numel(), out.data_ptr())
    return out if bad < 0 else None


def pad(
    column: Column, part: Tensor, place: Tensor, row_lengths: Tensor, width: int, left: bool, fill: int
) -> Tensor | None:
    """Rows as (B, width) int64, filled up on one side; None where a row has another length than expected."""
    out = torch.empty((part.numel(), width), dtype=torch.int64, device="cpu")
    parts, *kind = column
    bad = _native.gather_lists(
        parts.data_ptr(), *kind, part.data_ptr(), place.data_ptr(), part.numel(), row_lengths.data_ptr(),
        out.data_ptr(), width, left, fill,
    )  # fmt: skip
    return out if bad < 0 else None
