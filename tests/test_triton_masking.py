"""The Triton kernel on packed rows and units, in its interpreter on the CPU, bit for bit against the reference."""

import itertools
import mmap
import sys
from typing import Any

import numpy as np
import pytest
import torch
from oracle import PLAIN
from test_dispatch import CPU
from test_masking import DEVICE
from torch import Tensor

from fastmlm import MaskingSpec, mask_tokens, reference
from fastmlm.kernels.gpu import masking as kernel

SPEC = MaskingSpec(3, 50, (0, 1, 2), random_token_ids=tuple(range(5, 40)), exclude_original=True, mlm_probability=0.4)
# Rows that end inside a block of 64, on its edge and after it; tiles of several programs; empty rows; one row; many.
ROWS = {
    "edges": [5, 0, 64, 65, 1, 63, 128, 0],
    "long": [1100, 3, 2049],
    "one": [130],
    "many short": [1 + i % 7 for i in range(60)],
    "empty": [0, 0, 0],
}


def packed(name: str, dtype: torch.dtype = torch.int64) -> dict[str, Any]:
    """Ids with rows' ends, and every argument that a packed batch may have."""
    lengths = ROWS[name]
    ends = torch.tensor([0, *itertools.accumulate(lengths)])
    generator = torch.Generator().manual_seed(len(lengths))
    count = int(ends[-1])
    attention_mask = torch.rand(count, generator=generator) < 0.8
    for row in (0, 3):  # without a real token
        if len(lengths) > 3:
            attention_mask[ends[row] : ends[row + 1]] = False
    # Positions count from the first real token, and words of three from there.
    units = torch.cat([_units(row) for row in attention_mask.split(lengths)]) if count else torch.zeros(0).long()
    call = {
        "input_ids": torch.randint(50, (count,), generator=generator).to(dtype),
        "cu_seqlens": ends.to(dtype),
        "attention_mask": attention_mask,
        "special_tokens_mask": torch.rand(count, generator=generator) < 0.1,
        "units": units,
        "row_keys": torch.randint(-(1 << 62), 1 << 62, (len(lengths),), generator=generator),
        "mlm_probability": torch.rand(count, generator=generator),
    }
    return {key: value.to(DEVICE) for key, value in call.items()}


def _units(real: Tensor) -> Tensor:
    first = int(real.int().argmax()) if real.any() else 0
    return ((torch.arange(len(real)) - first).clamp(min=0) // 3) * 3


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("without", [(), ("units",), ("attention_mask", "units"), ("row_keys", "mlm_probability")])
@pytest.mark.parametrize("name", ROWS)
def test_packed_rows(name: str, without: tuple[str, ...], dtype: torch.dtype) -> None:
    call = {key: value for key, value in packed(name, dtype).items() if key not in without}
    if "mlm_probability" in without:  # one a row then
        call["mlm_probability"] = torch.linspace(1, 0.3, len(ROWS[name]), device=DEVICE)[:, None]
    expected = mask_tokens(spec=SPEC, seed=77, impl="reference", **call)
    out = tuple(torch.full_like(call["input_ids"], -7) for _ in range(2))
    got = mask_tokens(spec=SPEC, seed=77, impl="triton", out=out, **call)
    assert torch.equal(got.input_ids, expected.input_ids)
    assert torch.equal(got.labels, expected.labels)
    assert name == "empty" or (expected.labels != -100).any()


@pytest.mark.parametrize("ends", [[3, 40, 41], [0, 40], [100, 100], [0, 100, 100]])
def test_what_no_row_covers_is_copied(ends: list[int]) -> None:
    """Ends are not checked on a GPU: every output is written all the same, and nothing is selected outside of rows."""
    ids = (torch.arange(100) % 50)[None].to(DEVICE)
    flags, random_ids = SPEC.tables(CPU)
    call: dict[str, Any] = {
        "input_ids": ids, "seed": 5, "device_seed": None, "row_keys": None, "attention_mask": (ids != 7),
        "special_tokens_mask": None, "units": None, "cu_seqlens": torch.tensor(ends), "thresholds": None,
        "flags": flags, "random_ids": random_ids, "threshold": 1 << 31, "mask_token_id": 3,
        "mask_threshold": SPEC.mask_threshold, "random_threshold": SPEC.random_threshold, "ignore_index": -100,
        "exclude_original": True, **PLAIN,
    }  # fmt: skip
    results = []
    for function in (kernel.mask_tokens, reference.mask_tokens):
        out = {"output_ids": torch.full_like(ids, -7), "labels": torch.full_like(ids, -7)}
        function(**call, **out)
        results.append(out)
    ours, expected = results
    assert torch.equal(ours["output_ids"], expected["output_ids"])
    assert torch.equal(ours["labels"], expected["labels"])
    outside = torch.ones_like(ids, dtype=torch.bool)
    outside[:, ends[0] : ends[-1]] = False
    assert torch.equal(ours["output_ids"][outside], ids[outside])
    assert (ours["labels"][outside] == -100).all()


@pytest.mark.parametrize("side", ["left", "right"])
def test_units_of_padded_rows(side: str) -> None:
    ids = torch.randint(50, (3, 200), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    columns = torch.arange(200, device=DEVICE)
    pad = torch.tensor([[0], [37], [199]], device=DEVICE)
    real = columns >= pad if side == "left" else columns < 200 - pad
    units = torch.stack([_units(row.cpu()) for row in real]).to(DEVICE)
    rates = torch.rand(3, 200, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    call: dict[str, Any] = {"attention_mask": real, "units": units, "mlm_probability": rates}
    expected = mask_tokens(ids, SPEC, seed=9, impl="reference", **call)
    got = mask_tokens(ids, SPEC, seed=9, impl="triton", **call)
    assert torch.equal(got.input_ids, expected.input_ids)
    assert torch.equal(got.labels, expected.labels)
    assert (expected.labels != -100).any()


def test_a_packed_batch_may_be_masked_in_place() -> None:
    call = packed("edges")
    expected = mask_tokens(spec=SPEC, seed=1, impl="triton", **call)
    out = (call["input_ids"], torch.empty_like(call["input_ids"]))
    got = mask_tokens(spec=SPEC, seed=1, impl="triton", out=out, **call)
    assert got.input_ids is out[0]
    assert torch.equal(got.input_ids, expected.input_ids)
    assert torch.equal(got.labels, expected.labels)


# ---- Ids of many bits, wide accesses, batches of many tokens ----


def arguments(ids: Tensor, spec: MaskingSpec, **others: Any) -> dict[str, Any]:
    """Arguments of an implementation behind the op, in the order of its schema."""
    flags, random_ids = spec.tables(ids.device)
    names = ("device_seed", "row_keys", "attention_mask", "special_tokens_mask", "units", "cu_seqlens", "thresholds")
    return {"input_ids": ids, "seed": 5, **dict.fromkeys(names), "flags": flags, "random_ids": random_ids,
            "threshold": 1 << 32, "mask_token_id": spec.mask_token_id, "mask_threshold": spec.mask_threshold,
            "random_threshold": spec.random_threshold, "ignore_index": -100, "exclude_original": spec.exclude_original,
            **PLAIN} | others  # fmt: skip


def outputs(ids: Tensor) -> dict[str, Tensor]:
    return {"output_ids": torch.full_like(ids, -7), "labels": torch.full_like(ids, -7)}


@pytest.mark.parametrize("split", [(0.5, 0.5), (1, 0)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_ids_out_of_the_vocabulary_stay(dtype: torch.dtype, split: tuple[float, float]) -> None:
    """The kernel computes with the lower 32 bits of ids, and they may lie in the vocabulary where the id does not."""
    outside = [-1, 50, -(1 << 31), (1 << 31) - 1]
    if dtype == torch.int64:
        outside += [1 << 31, (1 << 32) - 1, 1 << 32, (1 << 32) + 7, -(1 << 32) + 7, -(1 << 63), (1 << 63) - 1]
    ids = torch.tensor(outside + [7] * (64 - len(outside)), dtype=dtype, device=DEVICE)[None]
    call = arguments(ids, MaskingSpec(3, 50, (0, 1, 2), 1, *split))
    got, expected = outputs(ids), outputs(ids)
    kernel.mask_tokens(**call, **got)
    reference.mask_tokens(**call, **expected)
    assert torch.equal(got["output_ids"], expected["output_ids"])
    assert torch.equal(got["labels"], expected["labels"])
    assert got["output_ids"][0, : len(outside)].tolist() == outside
    assert (got["labels"][0] == -100).tolist() == [True] * len(outside) + [False] * (64 - len(outside))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("length", [256, 300, 1032])  # a tile for 4 blocks; its end inside a block; two tiles
@pytest.mark.parametrize("kind", ["plain", "rows", "units", "in place"])
def test_rows_of_which_threads_take_lanes_together(kind: str, length: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(50, (3, length), generator=generator).to(dtype)
    call: dict[str, Any] = {}
    if kind == "rows":
        call = {"mlm_probability": torch.rand(3, generator=generator), "row_keys": torch.tensor([-1, 0, 1 << 62])}
    if kind == "units":
        call = {"mlm_probability": torch.rand(3, length, generator=generator)}
        call["units"] = (torch.arange(length) // 3 * 3).expand(3, -1).contiguous()
    call = {name: value.to(DEVICE) for name, value in call.items()} | {"spec": SPEC, "seed": -1 % (1 << 64)}
    ids = ids.to(DEVICE)
    expected = mask_tokens(ids, impl="reference", **call)
    out = (ids if kind == "in place" else torch.full_like(ids, -7), torch.full_like(ids, -7))
    got = mask_tokens(ids, impl="triton", out=out, **call)
    assert torch.equal(got.input_ids, expected.input_ids)
    assert torch.equal(got.labels, expected.labels)


@pytest.mark.parametrize(
    ("dtype", "length", "change", "lanes"),
    [
        (torch.int64, 256, {}, 2),
        (torch.int32, 256, {}, 2),
        (torch.int32, 300, {}, 4),
        (torch.int64, 510, {}, 2),  # rows at multiples of 16 bytes, though not of 16 ids
        (torch.int32, 510, {}, 1),
        (torch.int64, 1021, {}, 1),
        (torch.int64, 64, {}, 1),  # there are no more lanes than threads
        (torch.int64, 1024, {"attention_mask": torch.ones(2, 1024, device=DEVICE)}, 1),
    ],
)
def test_threads_take_lanes_together_where_rows_are_aligned(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, length: int, change: dict[str, Any], lanes: int
) -> None:
    """What the counts of tests/test_codegen.py rest on."""
    launched: list[dict[str, Any]] = []

    class Launch:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **kwargs: launched.append(kwargs)

    monkeypatch.setattr(kernel, "_mask_rows", Launch())
    monkeypatch.setattr(kernel, "WARP", 32)
    memory = torch.ones(2 * length + 1, dtype=dtype, device=DEVICE)
    for ids, expected in ((memory[:-1], lanes), (memory[1:], 1)):
        kernel.mask_tokens(**arguments(ids.view(2, length), SPEC, **change), **outputs(ids.view(2, length)))
        call = launched.pop()
        assert call["WIDTH"] == expected
        threads = 32 * call["num_warps"]
        assert call["BLOCKS"] * 16 % (call["WIDTH"] * threads) == 0 or call["num_warps"] == 1


MAP_NORESERVE = 0x4000  # of Linux, which Python does not name everywhere


@pytest.fixture
def only_program(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``only_program(number)``: of a launch, the interpreter runs this program alone, and copies no tensor after it."""
    from triton import language as tl
    from triton.runtime import interpreter

    class Launch:
        def __getitem__(self, grid: Any, one: Any = kernel._mask_rows) -> Any:
            return one[(1,)]

    def choose(number: int) -> None:
        handle = interpreter.TensorHandle(np.array([number], dtype=np.int32), tl.int32)
        monkeypatch.setattr(interpreter.interpreter_builder, "create_get_program_id", lambda axis: handle)
        monkeypatch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda *args: None)
        monkeypatch.setattr(kernel, "_mask_rows", Launch())

    return choose


def far(row: Tensor, before: int) -> Tensor:
    """``torch.cat([torch.zeros(before), row])``, but the system gives memory only to the pages that are written.

    As much lies before the tensor, where an offset of 32 bits would lead.
    """
    count = before + row.numel()
    half = count * row.itemsize
    memory = mmap.mmap(-1, 2 * half, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    tensor = torch.frombuffer(memory, dtype=row.dtype, count=count, offset=half)
    tensor[before:] = row
    return tensor


@pytest.mark.skipif(DEVICE != "cpu" or sys.platform != "linux", reason="the interpreter, on Linux")
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("form", ["padded", "units", "packed"])
def test_more_than_2_to_31_tokens(only_program: Any, form: str, dtype: torch.dtype) -> None:
    """The program of the last row, which starts where an int32 does not reach."""
    length, before = 64, 1 << 31
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 50, (length,), generator=generator).to(dtype)
    tensors = {"input_ids": ids, "special_tokens_mask": (torch.rand(length, generator=generator) < 0.2).byte()}
    if form == "units":
        tensors["units"] = torch.arange(length) // 3 * 3
        tensors["thresholds"] = torch.randint(1 << 32, (length,), generator=generator)
    row = program = before // length
    others: dict[str, Any] = {"threshold": 1 << 31}
    if form == "packed":
        before += 36  # inside a tile
        others["cu_seqlens"] = torch.tensor([0, before, before + length])
        row, program = 1, before // 1024 + 2  # what lies before rows is one more
    shape = (1, -1) if form == "packed" else (-1, length)

    expected = outputs(ids[None])
    alone = {name: tensor[None] for name, tensor in tensors.items()}
    call = arguments(ids[None], SPEC, **others) | alone | {"row_keys": torch.tensor([row]), "cu_seqlens": None}
    reference.mask_tokens(**call, **expected)
    assert (expected["labels"] != -100).any()

    call = arguments(ids, SPEC, **others) | {name: far(tensor, before).view(shape) for name, tensor in tensors.items()}
    got = {name: far(tensor, before).view(shape) for name, tensor in outputs(ids).items()}
    only_program(program)
    kernel.mask_tokens(**call, **got)
    for name, tensor in got.items():
        assert torch.equal(tensor.flatten()[before:], expected[name][0]), name
