"""mask_tokens: the reference against the law in plain Python integers, Triton against the reference, bad arguments."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from oracle import DEVICE, agrees, calls, signed
from torch import Tensor

from fastmlm import MaskedTokens, MaskingSpec, advance_seed, available_impls, mask_tokens
from fastmlm.masking import row_keys

IDS = torch.tensor([[2, 3, 4], [5, 6, 7]])
FLAT = torch.arange(6)
LONG = torch.arange(12) % 10

few = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
many = settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@many
@given(calls())
def test_reference_is_the_law(case: tuple[dict[str, Any], tuple[list[int], list[int]]]) -> None:
    agrees(*case, "reference")


@few
@given(calls())
def test_triton_is_the_law(case: tuple[dict[str, Any], tuple[list[int], list[int]]]) -> None:
    agrees(*case, "triton")


# ---- Triton and the native kernel against the reference, bit for bit ----

# One token, less than a stripe of 16, one block, one more, odd with several blocks a program, two programs a row.
SHAPES = [(1, 1), (5, 1), (2, 15), (2, 64), (2, 65), (2, 507), (1, 1025)]
SPLITS = [(0, 0), (1, 0), (0.8, 0.2), (0, 1), (0.8, 0.1)]
V = 1000


def batch(shape: tuple[int, int], padding: str = "none", dtype: torch.dtype = torch.int64) -> dict[str, Tensor]:
    """ids and masks; padding on a side, in holes, or of a whole row."""
    generator = torch.Generator().manual_seed(shape[1])
    ids = torch.randint(0, V if dtype.itemsize > 1 else 256, shape, generator=generator).to(dtype)
    real = torch.rand(shape, generator=generator) < (0.6 if padding == "holes" else 2)
    pad = torch.randint(0, shape[1] + 1, (shape[0], 1), generator=generator)
    if padding == "left":
        real &= torch.arange(shape[1]) >= pad
    if padding == "right":
        real &= torch.arange(shape[1]) < pad
    return {"input_ids": ids.to(DEVICE), "attention_mask": real.to(DEVICE)}


def same(ids: Tensor, spec: MaskingSpec, seed: Any = 0x9876543210ABCDEF, **arguments: Any) -> MaskedTokens:
    expected = mask_tokens(ids, spec, seed=seed, impl="reference", **arguments)
    for impl in [impl for impl in available_impls() if impl != "reference"]:
        got = mask_tokens(ids, spec, seed=seed, impl=impl, **arguments)
        for a, b in zip(expected, got, strict=True):
            assert a.dtype == b.dtype
            assert torch.equal(a, b), impl
    return expected


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("p", [0, 1e-6, 0.15, 0.3, 1])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_equal_reference(shape: tuple[int, int], p: float, split: tuple[float, float]) -> None:
    spec = MaskingSpec(4, V, (0, 1, 2), p, *split)
    same(batch(shape)["input_ids"], spec)


@pytest.mark.parametrize("exclude", [False, True])
@pytest.mark.parametrize("table", [None, (999,), (5, 3, 999, 6), tuple(range(7, V, 2))])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8])
@pytest.mark.parametrize("padding", ["left", "right", "holes"])
def test_kernels_equal_reference_with_padding_and_tables(
    padding: str, dtype: torch.dtype, table: tuple[int, ...] | None, exclude: bool
) -> None:
    spec = MaskingSpec(4, V, (0, 1, 2), 0.8, 0.1, 0.8, random_token_ids=table, exclude_original=exclude)
    same(spec=spec, ids=(given_batch := batch((2, 83), padding, dtype)).pop("input_ids"), **given_batch)


@pytest.mark.parametrize("real", [torch.bool, torch.int64, torch.int32, torch.int8, torch.uint8])
@pytest.mark.parametrize("special", [None, torch.bool, torch.int64, torch.int8])
@pytest.mark.parametrize("rate", ["spec", "row", "column", "token"])
def test_kernels_equal_reference_over_argument_kinds(real: torch.dtype, special: torch.dtype | None, rate: str) -> None:
    shape = (3, 67)
    given_batch = batch(shape, "holes")
    arguments: dict[str, Any] = {"attention_mask": given_batch["attention_mask"].to(real)}
    if special is not None:
        arguments["special_tokens_mask"] = (given_batch["input_ids"] % 3 == 0).to(special)
    if rate != "spec":
        size = {"row": (3,), "column": (3, 1), "token": shape}[rate]
        arguments["mlm_probability"] = torch.rand(size, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    arguments["row_keys"] = torch.tensor([-1, -(2**63), 2**63 - 1], device=DEVICE)
    same(given_batch["input_ids"], MaskingSpec(4, V, (0, 1, 2)), **arguments)


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1])
def test_seed_as_number_and_as_tensor(seed: int) -> None:
    ids, spec = batch((2, 65))["input_ids"], MaskingSpec(4, V, mlm_probability=0.5)
    number = same(ids, spec, seed)
    for shape in ((1,), (), (1, 1)):
        tensor = same(ids, spec, torch.tensor(signed(seed), device=DEVICE).reshape(shape))
        assert torch.equal(number.input_ids, tensor.input_ids)
    assert not torch.equal(number.labels, same(ids, spec, seed ^ 1 << 63).labels)


def test_a_seed_that_advances_on_the_device() -> None:
    """Each step has the masks of its own key, to which the host could have counted."""
    ids, spec = batch((4, 65))["input_ids"], MaskingSpec(4, V, mlm_probability=0.5)
    key, seed, seen = (1 << 64) - 3, torch.tensor([-3], device=DEVICE), set()
    for _ in range(20):
        masked = same(ids, spec, seed)
        assert torch.equal(masked.labels, same(ids, spec, key).labels)
        seen.add(tuple(masked.labels.flatten().tolist()))
        advance_seed(seed)
        key = (key + 0x9E3779B97F4A7C15) % (1 << 64)
    assert len(seen) == 20
    for wrong in (3, torch.tensor([1.0]), torch.tensor([1, 2]), torch.tensor([1], dtype=torch.int32)):
        with pytest.raises(TypeError, match="seed: expected an int64 tensor of one element"):
            advance_seed(wrong)


def test_non_contiguous_arguments() -> None:
    wide = batch((65, 6))["input_ids"]
    arguments = {
        "attention_mask": (wide % 5 != 0).t()[::2],
        "special_tokens_mask": (wide % 7 == 0).t()[::2],
        "mlm_probability": torch.rand((65, 6), generator=torch.Generator().manual_seed(3)).to(DEVICE).t()[::2],
        "row_keys": (torch.arange(6, device=DEVICE) - 2)[::2],
    }
    spec, ids = MaskingSpec(4, V), wide.t()[::2]
    assert not any(value.is_contiguous() for value in (ids, *arguments.values()))
    strided = same(ids, spec, **arguments)
    plain = same(ids.contiguous(), spec, **{name: value.contiguous() for name, value in arguments.items()})
    assert torch.equal(strided.input_ids, plain.input_ids)
    assert torch.equal(strided.labels, plain.labels)
    assert (strided.labels != -100).any()
    # Packed, with where rows start, their keys and the words as columns of wider tensors.
    columns = torch.tensor([[0, 5], [6, 7], [64, 3], [65, 65]], device=DEVICE)
    units = torch.cat([torch.arange(n) // 2 * 2 for n in (6, 58, 1)])[:, None].expand(-1, 2).contiguous().to(DEVICE)
    packed = {"cu_seqlens": columns[:, 0], "row_keys": columns[:3, 1], "units": units[:, 1]}
    assert not any(value.is_contiguous() for value in packed.values())
    strided = same(wide[:, 0], spec, **packed)
    plain = same(wide[:, 0].contiguous(), spec, **{name: value.contiguous() for name, value in packed.items()})
    assert torch.equal(strided.labels, plain.labels)
    assert not torch.equal(strided.labels, same(wide[:, 0], spec, **packed | {"row_keys": columns[:3, 0]}).labels)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0), (0,)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_empty(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    ids = torch.zeros(shape, dtype=dtype, device=DEVICE)
    spec = MaskingSpec(1, 5)
    for arguments in ({}, {"attention_mask": ids}, {"mlm_probability": ids.float()}):
        masked = same(ids, spec, **arguments)
        assert masked.labels.shape == shape
        assert masked.labels.dtype == (torch.int32 if dtype == torch.int32 else torch.int64)


def test_triton_writes_every_element_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs start as a sentinel no id equals, inside a larger buffer whose edges must survive."""
    from fastmlm.kernels.gpu import masking as kernel

    ids, real = batch((3, 507), "left").values()
    spec = MaskingSpec(4, V, (0, 1, 2))
    sentinel, edge, buffers = -77, 1024, []

    def poisoned(like: Tensor) -> Tensor:
        buffers.append(torch.full((like.numel() + 2 * edge,), sentinel, dtype=like.dtype, device=like.device))
        return buffers[-1][edge:-edge].view(like.shape)

    expected = mask_tokens(ids, spec, seed=1, attention_mask=real, impl="reference")
    monkeypatch.setattr(kernel.torch, "empty_like", poisoned)
    got = mask_tokens(ids, spec, seed=1, attention_mask=real, impl="triton")
    assert len(buffers) == 2
    for a, b, buffer in zip(expected, got, buffers, strict=True):
        assert torch.equal(a, b)
        assert not (b == sentinel).any()
        assert (buffer[:edge] == sentinel).all()
        assert (buffer[-edge:] == sentinel).all()


@pytest.mark.slow
@settings(max_examples=1500, deadline=None)
@given(calls())
def test_triton_is_the_law_at_length(case: tuple[dict[str, Any], tuple[list[int], list[int]]]) -> None:
    agrees(*case, "triton")


# ---- Writing to given tensors ----


@pytest.mark.parametrize("impl", available_impls())
@pytest.mark.parametrize("padding", ["none", "left", "right", "holes"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("in_place", [False, True])
def test_out_takes_the_result(impl: str, padding: str, dtype: torch.dtype, in_place: bool) -> None:
    arguments = batch((5, 131), padding, dtype)
    ids, spec = arguments["input_ids"], MaskingSpec(3, V, (0, 1, 2), 0.4)
    expected = mask_tokens(**arguments, spec=spec, seed=7, impl="reference")
    before = ids.clone()
    out = (ids if in_place else torch.full_like(ids, 77), torch.full_like(ids, 77))
    got = mask_tokens(**arguments, spec=spec, seed=7, impl=impl, out=out)
    assert got.input_ids is out[0]
    assert got.labels is out[1]
    assert torch.equal(out[0], expected.input_ids)
    assert torch.equal(out[1], expected.labels)
    assert in_place or torch.equal(ids, before)


@pytest.mark.parametrize("impl", available_impls())
def test_out_of_one_row_of_narrow_and_of_strided_ids(impl: str) -> None:
    spec = MaskingSpec(3, 200, (), 0.4)
    ids = torch.arange(200, dtype=torch.uint8, device=DEVICE)
    for kind in (ids, ids.repeat_interleave(2)[::2], ids.view(4, 50).t(), ids[:0]):
        both = torch.empty(2, *kind.shape, dtype=torch.int64, device=DEVICE)
        out = (both[0], both[1])
        expected = mask_tokens(kind, spec, seed=7, impl="reference")
        mask_tokens(kind, spec, seed=7, impl=impl, out=out)
        assert torch.equal(out[0], expected.input_ids)
        assert torch.equal(out[1], expected.labels)


def test_out_beside_narrow_ids_in_memory() -> None:
    """Ids of one byte take an eighth of the room of what comes out, which may lie right behind them."""
    room = torch.zeros(64 * 17, dtype=torch.uint8)
    ids, rest = room[:64], room[64:].view(torch.int64)
    mask_tokens(ids, MaskingSpec(1, 10), seed=0, out=(rest[:64], rest[64:128]))
    with pytest.raises(ValueError, match=r"out: .*share no memory"):
        mask_tokens(ids, MaskingSpec(1, 10), seed=0, out=(room[: 64 * 8].view(torch.int64), rest[64:128]))


@pytest.mark.parametrize("name", ["attention_mask", "special_tokens_mask", "units"])
def test_out_is_not_what_is_read(name: str) -> None:
    read, free = torch.zeros_like(IDS), torch.empty_like(IDS)
    for out in ((read, free), (free, read)):
        with pytest.raises(ValueError, match=r"out: .*share no memory"):
            mask_tokens(IDS, MaskingSpec(1, 10), seed=0, out=out, **{name: read})


def test_masks_of_another_shape_are_refused_before_they_are_read() -> None:
    ids, mask = torch.full((300, 4096), 7), torch.ones(1, 1, dtype=torch.int64)
    for impl in available_impls():
        with pytest.raises(ValueError, match=r"attention_mask: expected the shape \(300, 4096\)"):
            row_keys(ids, mask, impl)


@pytest.mark.skipif(DEVICE != "cpu", reason="values are checked on the CPU alone")
@pytest.mark.parametrize("impl", available_impls())
@pytest.mark.parametrize("bad", [-1, V, -(1 << 31), (1 << 31) - 1])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_ids_out_of_range_are_left_as_they_were(impl: str, bad: int, dtype: torch.dtype) -> None:
    ids = batch((5, 131), dtype=dtype)["input_ids"]
    ids[4, 130] = bad
    before, spec = ids.clone(), MaskingSpec(3, V, (), 0.4)
    for out in (None, (ids, torch.empty_like(ids)), (torch.empty_like(ids), torch.empty_like(ids))):
        with pytest.raises(ValueError, match=rf"input_ids: expected ids in \[0, {V}\), got {bad}"):
            mask_tokens(ids, spec, seed=7, impl=impl, out=out)
        assert torch.equal(ids, before)


# ---- Bad arguments ----

# fmt: off
BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"input_ids": [[1, 2]]}, TypeError, r"input_ids: expected a tensor of integers, .*got list"),
    ({"input_ids": IDS.float()}, TypeError, r"input_ids: .*got torch.float32 tensor of shape \(2, 3\) on cpu"),
    ({"input_ids": IDS.bool()}, TypeError, "input_ids: .*got torch.bool"),
    ({"input_ids": IDS[None]}, TypeError, r"input_ids: .*\(B, S\) or \(S,\), got .*\(1, 2, 3\)"),
    ({"input_ids": torch.tensor(3)}, TypeError, r"input_ids: .*shape \(\)"),
    ({"input_ids": IDS + 3}, ValueError, r"input_ids: expected ids in \[0, 10\), got 10"),
    ({"input_ids": IDS - 3}, ValueError, r"input_ids: expected ids in \[0, 10\), got -1"),
    ({"spec": 0.15}, TypeError, "spec: expected a MaskingSpec, got float"),
    ({"seed": None}, TypeError, "seed: expected an int or an int64 tensor of one element, got NoneType"),
    ({"seed": 1.0}, TypeError, "seed: .*got float"),
    ({"seed": True}, TypeError, "seed: .*got bool"),
    ({"seed": -1}, ValueError, r"seed: expected an int in \[0, 2\^64\), got -1"),
    ({"seed": 1 << 64}, ValueError, r"seed: expected an int in \[0, 2\^64\), got 18446744073709551616"),
    ({"seed": torch.tensor([1, 2])}, TypeError, r"seed: expected an int64 tensor of one element.*shape \(2,\)"),
    ({"seed": torch.tensor([1], dtype=torch.int32)}, TypeError, "seed: expected an int64 tensor.*got torch.int32"),
    ({"row_keys": [0, 1]}, TypeError, "row_keys: expected an int64 tensor on cpu, got list"),
    ({"row_keys": torch.tensor([0, 1]).int()}, TypeError, "row_keys: expected an int64 tensor.*got torch.int32"),
    ({"row_keys": torch.arange(3)}, ValueError, r"row_keys: expected one key a row, shape \(2,\), got .*\(3,\)"),
    ({"row_keys": torch.zeros(2, 1).long()}, ValueError, r"row_keys: expected one key a row.*\(2, 1\)"),
    ({"attention_mask": [[1, 1, 1], [1, 1, 0]]}, TypeError, "attention_mask: .*integers or bool, got list"),
    ({"attention_mask": torch.ones(2, 3)}, TypeError, "attention_mask: .*got torch.float32"),
    ({"attention_mask": torch.ones(2, 4).long()}, ValueError, r"attention_mask: expected the shape \(2, 3\).*\(2, 4\)"),
    ({"attention_mask": torch.ones(3).long()}, ValueError, r"attention_mask: expected the shape \(2, 3\).*\(3,\)"),
    ({"special_tokens_mask": torch.ones(2, 3)}, TypeError, "special_tokens_mask: .*got torch.float32"),
    ({"special_tokens_mask": torch.ones(3, 2).bool()}, ValueError, r"special_tokens_mask: .*\(3, 2\)"),
    ({"units": IDS.bool()}, TypeError, "units: expected a tensor of integers, got torch.bool"),
    ({"units": FLAT}, ValueError, r"units: expected the shape \(2, 3\).*\(6,\)"),
    ({"units": torch.tensor([[0, 1, 2], [0, 2, 2]])}, ValueError, "units: expected .*position .*got"),
    ({"units": torch.tensor([[0, 1, 2], [0, -1, 2]])}, ValueError, "units: expected .*position.*-1"),
    ({"input_ids": FLAT, "cu_seqlens": torch.tensor([0])}, ValueError, "cu_seqlens: expected .*0 to 6, got no row"),
    ({"input_ids": FLAT, "cu_seqlens": torch.tensor([0, 4, 6]), "units": FLAT}, ValueError, "units: .*position"),
    ({"cu_seqlens": [0, 6]}, TypeError, "cu_seqlens: expected an int32 or int64 tensor.*got list"),
    ({"cu_seqlens": torch.tensor([0.0, 6.0])}, TypeError, "cu_seqlens: .*got torch.float32"),
    ({"input_ids": FLAT, "cu_seqlens": torch.zeros(0).long()}, TypeError, r"cu_seqlens: .*\(rows \+ 1,\).*\(0,\)"),
    ({"input_ids": FLAT, "cu_seqlens": torch.tensor([[0, 6]])}, TypeError, r"cu_seqlens: .*\(1, 2\)"),
    ({"cu_seqlens": torch.tensor([0, 6])}, ValueError, r"input_ids: .*\(1, N\) with cu_seqlens.*\(2, 3\)"),
    ({"input_ids": FLAT, "cu_seqlens": torch.tensor([0, 5])}, ValueError, r"cu_seqlens: .*from 0 to 6, got \[0, 5\]"),
    ({"input_ids": FLAT, "cu_seqlens": torch.tensor([1, 6])}, ValueError, r"cu_seqlens: .*got \[1, 6\]"),
    ({"input_ids": FLAT, "cu_seqlens": torch.tensor([0, 4, 2, 6])}, ValueError, r"cu_seqlens: .*got \[0, 4, 2, 6\]"),
    ({"mlm_probability": "0.15"}, TypeError, "mlm_probability: expected a number between 0 and 1, got str"),
    ({"mlm_probability": 1.5}, ValueError, "mlm_probability: expected a number between 0 and 1, got 1.5"),
    ({"mlm_probability": float("nan")}, ValueError, "mlm_probability: .*nan"),
    ({"mlm_probability": [0.1, 0.2]}, TypeError, "mlm_probability: .*got list"),
    ({"mlm_probability": torch.tensor([0.1, 1.5])}, ValueError, "mlm_probability: .*between 0 and 1, .*to 1.5"),
    ({"mlm_probability": torch.tensor([0.1, float("nan")])}, ValueError, "mlm_probability: .*between 0 and 1"),
    ({"mlm_probability": torch.rand(3)}, ValueError, r"mlm_probability: .*\(2,\) or .*\(2, 3\), got .*\(3,\)"),
    ({"mlm_probability": torch.ones(2) * 1j}, TypeError, "mlm_probability: expected real numbers.*complex64"),
    ({"impl": "cuda"}, ValueError, "impl: expected None or one of reference, cpp, triton, got 'cuda'"),
    ({"out": torch.empty(2, 2, 3).long()}, TypeError, "out: expected a tuple of two .*got torch.int64 tensor"),
    ({"out": (IDS,)}, TypeError, "out: expected a tuple of two .*got tuple"),
    ({"out": (IDS.clone(), [1])}, TypeError, "out: .*got tuple"),
    ({"out": (IDS.clone(), IDS.int())}, ValueError, r"out: .*torch.int64 .*shape \(2, 3\) on cpu.*got .*torch.int32"),
    ({"out": (IDS.flatten(), IDS.flatten())}, ValueError, r"out: .*shape \(2, 3\).*got .*shape \(6,\)"),
    ({"out": (IDS.clone(), torch.empty(3, 2).long().t())}, ValueError, "out: .*contiguous"),
    ({"out": (IDS.clone(), IDS)}, ValueError, "out: .*share no memory"),
    ({"out": (LONG[:6].view(2, 3), LONG[3:9].view(2, 3))}, ValueError, "out: .*share no memory"),
    ({"input_ids": LONG[:6].view(2, 3), "out": (LONG[3:9].view(2, 3), IDS.clone())}, ValueError, "out: .*share no mem"),
    ({"input_ids": LONG[::2].view(2, 3), "out": (LONG[:6].view(2, 3), IDS.clone())}, ValueError, "out: .*share no mem"),
    # Column 2 of a row whose first column is padding is position 1.
    ({"attention_mask": IDS > 2, "units": torch.tensor([[0, 0, 2], [0, 1, 2]])}, ValueError, "units: .*position"),
]
# fmt: on


@pytest.mark.parametrize(("arguments", "error", "message"), BAD)
def test_every_bad_argument_is_named(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        mask_tokens(**{"input_ids": IDS, "spec": MaskingSpec(1, 10), "seed": 0, "impl": "reference"} | arguments)


def test_everything_after_the_spec_is_by_name() -> None:
    with pytest.raises(TypeError):
        mask_tokens(IDS, MaskingSpec(1, 10), 0)  # type: ignore[misc]
    with pytest.raises(TypeError, match="seed"):
        mask_tokens(IDS, MaskingSpec(1, 10))  # type: ignore[call-arg]
