"""The native kernels in every instruction set of this processor, against the law; and what they must not trust."""

import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from oracle import agrees, calls
from torch import Tensor

from fastmlm import MaskingSpec, mask_tokens, philox
from fastmlm.dispatch import kernel
from fastmlm.kernels.cpu import _native
from fastmlm.masking import row_keys

ISAS = _native.isas()


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    yield _native.select_isa(request.param)
    _native.select_isa(None)


def test_instruction_sets() -> None:
    assert ISAS[-1] == "plain"  # which every processor runs
    flags = Path("/proc/cpuinfo").read_text() if sys.platform == "linux" else ""
    for name, flag in (("avx512", " avx512bw"), ("avx2", " avx2")):
        assert (name in ISAS) == (flag in flags) or not flags
    assert _native.select_isa(None) == ISAS[0]
    with pytest.raises(ValueError, match="isa: this processor or build has no mmx"):
        _native.select_isa("mmx")


def in_every_isa(call: dict[str, Any], expected: tuple[list[int], list[int]]) -> None:
    try:
        for name in ISAS:
            _native.select_isa(name)
            agrees(call, expected, "cpp")
    finally:
        _native.select_isa(None)


@settings(max_examples=300, deadline=None)
@given(calls())
def test_native_kernel_is_the_law(case: tuple[dict[str, Any], tuple[list[int], list[int]]]) -> None:
    in_every_isa(*case)


# Around a vector, a stripe, a block; odd; several blocks.
@pytest.mark.parametrize("length", [1, 4, 7, 8, 9, 15, 16, 17, 63, 64, 65, 507, 1025])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("p", [0, 1e-6, 0.15, 1])
def test_native_kernel_equals_the_reference(isa: str, length: int, dtype: torch.dtype, p: float) -> None:
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(0, 1000, (5, length), generator=generator).to(dtype)
    real = torch.rand((5, length), generator=generator) < 0.8
    keys = torch.tensor([0, -1, 1 << 62, -(1 << 63), 12345])
    for exclude in (False, True):
        for table in (None, (999,), (5, 3, 999, 6)):
            spec = MaskingSpec(4, 1000, (0, 1, 2), p, 0.5, 0.4, random_token_ids=table, exclude_original=exclude)
            for rate in (None, torch.rand(5, generator=generator), torch.rand((5, length), generator=generator)):
                arguments = {"seed": 1 << 63, "row_keys": keys, "attention_mask": real, "mlm_probability": rate}
                expected = mask_tokens(ids, spec, impl="reference", **arguments)
                got = mask_tokens(ids, spec, impl="cpp", **arguments)
                assert torch.equal(got.input_ids, expected.input_ids)
                assert torch.equal(got.labels, expected.labels)


def test_every_element_is_written_and_nothing_else(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs poisoned, and with a guard after them that must survive."""
    guards = []

    def poisoned(like: Tensor) -> Tensor:
        buffer = torch.full((like.numel() + 64,), -7, dtype=like.dtype)
        guards.append(buffer[like.numel() :])
        return buffer[: like.numel()].view(like.shape)

    module = sys.modules["fastmlm.kernels.cpu.masking"]
    ids, spec = torch.arange(3 * 507).view(3, 507) % 100, MaskingSpec(4, 100, mlm_probability=0.5)
    expected = mask_tokens(ids, spec, seed=1, impl="reference")
    monkeypatch.setattr(module.torch, "empty_like", poisoned)
    got = mask_tokens(ids, spec, seed=1, impl="cpp")
    assert torch.equal(got.input_ids, expected.input_ids)
    assert torch.equal(got.labels, expected.labels)
    assert len(guards) == 2
    assert all(bool((guard == -7).all()) for guard in guards)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("real", [None, torch.bool, torch.int16, torch.int32, torch.int64])
def test_row_keys(isa: str, dtype: torch.dtype, real: torch.dtype | None) -> None:
    generator = torch.Generator().manual_seed(1)
    for shape in ((1, 1), (3, 17), (4, 700), (2, 0), (0, 5)):
        ids = torch.randint(0, 30000, shape, generator=generator).to(dtype)
        mask = None if real is None else (torch.rand(shape, generator=generator) < 0.7).to(real)
        assert torch.equal(row_keys(ids, mask, "cpp"), philox.row_keys(ids, mask))
        strided = torch.stack([ids, ids], -1)[..., 0]
        assert torch.equal(row_keys(strided, mask, "cpp"), philox.row_keys(ids, mask))


# ---- Reading lists ----

pack = kernel("cpp", "rows.pack")


@given(st.lists(st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=5), min_size=1, max_size=4), st.booleans())
def test_lists_are_packed(rows: list[list[int]], left: bool) -> None:
    lengths = [len(row) for row in rows]
    width = max(lengths) + 2
    expected = [[9] * (width - len(row)) + row if left else row + [9] * (width - len(row)) for row in rows]
    assert pack(rows, lengths, width, left, 9).tolist() == expected
    assert pack([tuple(row) for row in rows], lengths, width, left, 9).tolist() == expected


class Sly:
    """An index that shrinks the list it is read from."""

    def __init__(self, row: list[Any]) -> None:
        self.row = row

    def __index__(self) -> int:
        del self.row[1:]
        return 5


class Failing:
    def __index__(self) -> int:
        raise ZeroDivisionError("mine")


@pytest.mark.parametrize("value", [None, "1", 1.0, True, np.bool_(True), 1 << 63, -(1 << 63) - 1, [1], b"1"])
def test_what_is_no_int_is_not_packed(value: Any) -> None:
    assert pack([[1, 2], [3, value]], [2, 2], 2, False, 0) is None


@pytest.mark.parametrize("value", [np.int32(1), np.uint8(1), torch.tensor(1)])
def test_what_is_like_an_int_is_packed(value: Any) -> None:
    assert pack([[7, value]], [2], 2, False, 0).tolist() == [[7, 1]]


@pytest.mark.parametrize("row", [[1, 2, 3], [1], [], "ab", {1: 2, 3: 4}, np.array([1, 2.0]), None])
def test_rows_of_another_length_or_kind_are_not_packed(row: Any) -> None:
    assert pack([[1, 2], row], [2, 2], 2, False, 0) is None


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("dtype", [f"{order}{kind}{size}" for order in "<>" for kind in "iu" for size in (1, 2, 4, 8)])
def test_arrays_and_buffers_are_packed(dtype: str, left: bool) -> None:
    """Of any integer type and stride; of the other byte order not, nor what does not fit into int64."""
    values = np.array([3, 1, 250, 7]).astype(dtype)
    rows = [values, values[::-1], np.repeat(values, 2)[1::2], memoryview(values), [3, 1], values[:0]]
    lengths = [len(row) for row in rows]
    packed = pack(rows, lengths, 5, left, 9)
    if np.dtype(dtype) != np.dtype(dtype).newbyteorder("="):
        assert packed is None
        return
    for row, n, got in zip(rows, lengths, packed.tolist(), strict=True):
        assert got == ([9] * (5 - n) + list(row) if left else list(row) + [9] * (5 - n))
    if dtype == "<u8":
        assert pack([np.array([1 << 63], dtype)], [1], 1, left, 9) is None


def test_lists_that_change_while_they_are_read() -> None:
    row: list[Any] = [1, 2, 3]
    row[0] = Sly(row)
    assert pack([row], [3], 3, False, 0) is None
    column: list[Any] = [[1], [2]]

    class Clears:
        def __index__(self) -> int:
            column.clear()
            return 1

    column[0] = [Clears()]
    assert pack(column, [1, 1], 1, False, 0) is None


def test_errors_of_items_come_through() -> None:
    with pytest.raises(ZeroDivisionError, match="mine"):
        pack([[Failing()]], [1], 1, False, 0)


def test_no_references_are_lost_or_kept() -> None:
    value, bad = 1 << 40, object()
    row = [value, np.int64(3), True]
    counts = [sys.getrefcount(x) for x in (value, row[1], bad, row)]
    for _ in range(1000):
        pack([row, row], [3, 3], 4, True, 0)
        pack([[value, bad]], [2], 2, False, 0)
        pack([row], [2], 2, False, 0)
    gc.collect()
    assert [sys.getrefcount(x) for x in (value, row[1], bad, row)] == counts


# ---- Units ----


@pytest.mark.parametrize("wrong", [-1, 5, 1 << 62, -(1 << 63)])
@pytest.mark.parametrize("real", [None, torch.bool, torch.int64])
def test_units_that_do_not_fit_are_found(wrong: int, real: torch.dtype | None) -> None:
    fit = kernel("cpp", "masking.units_fit")
    units = torch.tensor([[0, 0, 0, 0, 1, 3], [0, 0, 1, 1, 1, 0]])
    mask = None if real is None else torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 1, 0]]).to(real)
    assert fit(units, None)
    assert fit(torch.where(torch.tensor([1, 1, 1, 1, 1, 0]).bool(), units, 2), mask)
    units[1, 4] = wrong
    assert not fit(units, mask)
    units[1, 4], units[1, 5] = 0, 99  # where there is no token
    assert fit(torch.stack([units[1] * 0, units[1]]), mask) == (mask is not None)
