"""A few of the inputs of native_fuzz.py in the ordinary build; and that calls leave nothing behind."""

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import guards
import native_fuzz
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from fastmlm.kernels.cpu import _native


@pytest.mark.parametrize("name", native_fuzz.CHECKS)
def test_fuzz(name: str) -> None:
    cases, check, _ = native_fuzz.CHECKS[name]
    options = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    options(given(cases)(check))()


def test_guards_see_what_is_written_outside() -> None:
    for shift, message in ((-8, "keys: written before its start"), (8, "keys: written after its end")):
        keys, weights = np.zeros(1, np.uint64), np.zeros(1, np.uint64)
        with (
            pytest.raises(AssertionError, match=message),
            guards.buffers({"weights": weights}, {"keys": keys}) as at,
        ):
            _native.row_keys(0, 8, 0, 1, at["weights"], 1, 0, at["keys"] + shift)


def rss() -> int:
    """Bytes of memory this process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class Raises:
    def __index__(self) -> int:
        raise ZeroDivisionError


def leak_cases() -> dict[str, Callable[[], Any]]:
    """Calls that succeed, that find fault and that raise; what they need is made once."""
    n = 100
    ids, out, labels = (np.arange(n) for _ in range(3))
    flags, weights = np.zeros(n, np.uint8), np.arange(n, dtype=np.uint64)
    at = {name: array.ctypes.data for name, array in locals().items() if isinstance(array, np.ndarray)}
    keep = (ids, out, labels, flags, weights)
    big, item = 1 << 40, np.int64(3)
    good = [[big, item, True], (5, 1 << 62, -big)]

    def pack(column: list[Any]) -> Any:
        return _native.pack_rows(column, at["out"], [3, 3], 4, True, 0)

    def raising() -> None:
        with pytest.raises(ZeroDivisionError):
            pack([[1, big, Raises()], good[0]])

    def mask(units: int, longest_span: int = 0, exact: bool = False) -> None:
        assert keep
        # Units, spans and counts need scratch memory; the ids serve as units and as limits of spans.
        _native.mask_tokens(
            *(at["ids"], at["out"], at["labels"], 8, 1, n, 0, 1, 0, 0, 1, 0, 1, units, 0, False),
            *(at["flags"], n, 0, n, 1 << 31, 1 << 30, 1 << 31, 4, -100, False),
            *(False, at["ids"], longest_span, 0, exact, exact, 0, (1 << 31) - 1),
        )

    def wrong() -> None:
        with pytest.raises(TypeError):
            _native.mask_tokens("no address")
        with pytest.raises(ValueError, match="isa"):
            _native.select_isa("mmx")

    return {
        "pack": lambda: pack(good),
        "pack a bad value": lambda: pack([good[0], [big, 2, None]]),
        "pack too large a value": lambda: pack([good[0], [big, 2, 1 << 90]]),
        "pack a row of another kind": lambda: pack([good[0], "abc"]),
        "pack, raising": raising,
        "mask": lambda: mask(0),
        "mask by units": lambda: mask(at["ids"]),
        "mask so many by spans": lambda: mask(0, 5, True),
        "row_keys": lambda: _native.row_keys(at["ids"], 8, 0, 1, at["weights"], 2, n // 2, at["out"]),
        "isas": _native.isas,
        "wrong arguments": wrong,
    }


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the memory of the process from /proc")
@pytest.mark.parametrize("name", leak_cases())
def test_100000_calls_leave_nothing_behind(name: str) -> None:
    """A leak of one object or 16 bytes a call would show as 100 000 blocks or 1.6 MB."""
    call = leak_cases()[name]
    calls = 5_000 if name in ("pack, raising", "wrong arguments") else 100_000  # pytest.raises is slow
    for _ in range(2000):  # free lists, arenas and the allocator's caches fill up
        call()
    gc.collect()
    blocks, before = sys.getallocatedblocks(), rss()
    for _ in range(calls):
        call()
    gc.collect()
    assert sys.getallocatedblocks() - blocks < 500
    assert rss() - before < 1 << 20


def test_reference_counts_stay() -> None:
    """Of the values, the rows, the column, None and the ints that everyone shares."""
    value, index, raises = 1 << 40, np.int64(3), Raises()
    row, other = [value, index, True], (value, index, 7)
    columns = [
        [row, other],
        [row, [value, None, raises]],
        [row, [value, 1 << 90, 1]],
        [row, None],
        [row, [raises, 1, 2]],
    ]
    watched = [value, index, raises, row, other, None, True, *columns, *(c[1] for c in columns)]
    out, lengths = np.zeros(8, np.int64), [3, 3]
    counts = [sys.getrefcount(x) for x in watched]
    for _ in range(10_000):
        for column in columns:
            try:
                _native.pack_rows(column, out.ctypes.data, lengths, 4, False, 0)
            except ZeroDivisionError:
                assert column is columns[-1]
    gc.collect()
    drift = [sys.getrefcount(x) - count for x, count in zip(watched, counts, strict=True)]
    assert all(abs(d) < 100 for d in drift), drift  # None and True have other users
