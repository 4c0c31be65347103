"""The Triton kernel on packed rows and units, in its interpreter on the CPU, bit for bit against the reference."""

import itertools
from typing import Any

import pytest
import torch
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
        "exclude_original": True,
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
