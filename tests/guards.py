"""Buffers between guard zones, which a kernel must neither write nor, under AddressSanitizer, read."""

import contextlib
import ctypes
import itertools
from collections.abc import Iterator

import numpy as np

from fastmlm.kernels.cpu import _native

ISAS = _native.isas()
INT64 = (-(1 << 63), (1 << 63) - 1)

# ---- Memory ----

GUARD, PATTERN = 64, 0xA5  # bytes before and after each buffer; what they hold
# Under AddressSanitizer the guard zones are poisoned too, so that reading them is caught as well as writing them.
_poison = getattr(ctypes.CDLL(None), "__asan_poison_memory_region", None)
_unpoison = getattr(ctypes.CDLL(None), "__asan_unpoison_memory_region", None)
for _function in (_poison, _unpoison):
    if _function is not None:
        _function.argtypes, _function.restype = (ctypes.c_void_p, ctypes.c_size_t), None

Arrays = dict[str, np.ndarray | None]


@contextlib.contextmanager
def buffers(inputs: Arrays, outputs: Arrays) -> Iterator[dict[str, int]]:
    """The arrays' addresses by name, 0 for None and, as torch has it, for empty ones.

    On exit the guard zones must be whole and the inputs unchanged; the outputs' arrays then hold what was written.
    """
    address, whole = {}, {}
    for name, array in (inputs | outputs).items():
        address[name] = 0
        if array is not None and array.size:
            whole[name] = np.full(array.nbytes + 2 * GUARD, PATTERN, np.uint8)
            whole[name][GUARD:-GUARD] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            address[name] = whole[name].ctypes.data + GUARD
    ends = [(block.ctypes.data, block.ctypes.data + block.nbytes - GUARD) for block in whole.values()]
    try:
        for start in itertools.chain(*ends) if _poison else ():
            _poison(start, GUARD)
        yield address
    finally:
        for start in itertools.chain(*ends) if _unpoison else ():
            _unpoison(start, GUARD)
    for name, block in whole.items():
        assert (block[:GUARD] == PATTERN).all(), f"{name}: written before its start"
        assert (block[-GUARD:] == PATTERN).all(), f"{name}: written after its end"
        middle, array = block[GUARD:-GUARD], (inputs | outputs)[name]
        if name in outputs:
            array.reshape(-1).view(np.uint8)[:] = middle
        else:
            assert middle.tobytes() == array.tobytes(), f"{name}: an input was written"


def itemsize(array: np.ndarray | None) -> int:
    return 1 if array is None else array.itemsize
