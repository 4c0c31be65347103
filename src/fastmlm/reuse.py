"""Memory of large tensors, used again once nothing refers to them: most of their cost is the pages of fresh memory."""

import math
import weakref

import numpy as np
import torch
from torch import Tensor

_KEPT = 4  # free blocks: two tensors of a batch, while those of the batch before are still in use


class Reuse:
    """``torch.empty(shape)`` in float32 on the CPU, in the memory of such tensors that are gone.

    A tensor's memory comes back when the last tensor, view or array in it is freed, which PyTorch counts; so nobody
    sees numbers change. An allocator gives blocks of this size back to the system at once, which has to clear each page
    again: that takes several times as long as writing the masks.
    """

    def __init__(self) -> None:
        self._free: list[np.ndarray] = []

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return Reuse, ()  # copies start without memory

    def empty(self, *shape: int) -> Tensor:
        """An uninitialised tensor."""
        count, block = math.prod(shape), None
        while self._free and block is None:
            # Blocks too small are dropped: the largest batches decide. Only single steps, since arrays may be freed in
            # other threads, or in this one by its garbage collector.
            try:
                block = self._free.pop()
            except IndexError:
                break
            if block.size < count:
                block = None
        if block is None:
            block = torch.empty(count, dtype=torch.float32, device="cpu").numpy()
        array = block[:count].reshape(shape)
        weakref.finalize(array, self._take_back, block).atexit = False
        return torch.from_numpy(array)

    def _take_back(self, block: np.ndarray) -> None:
        if len(self._free) < _KEPT:
            self._free.append(block)
