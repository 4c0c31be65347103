"""The way from the public function to a kernel: which impl runs, the op for torch.compile, no host sync, GPU code."""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from no_sync import NoSync
from oracle import PLAIN
from torch import Tensor
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from fastmlm import MaskingSpec, available_impls, dispatch, mask_tokens, masking, philox, reference

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SPEC = MaskingSpec(3, 50, (0, 1, 2), 0.4, random_token_ids=tuple(range(3, 50)), exclude_original=True)
IDS = torch.randint(0, 50, (3, 70), generator=torch.Generator().manual_seed(0))


# ---- Which implementation runs ----


def test_available_impls() -> None:
    assert available_impls()[0] == "reference"
    assert "triton" in available_impls()  # on a GPU or in the interpreter


def test_default_impl() -> None:
    native = "cpp" in available_impls()  # where there was a compiler
    assert dispatch.resolve(None, CPU) == ("cpp" if native else "reference")  # the interpreter is never a default
    assert dispatch.resolve(None, CUDA) == "triton"


def test_default_impl_without_triton_and_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_installed", lambda module: False)
    dispatch._warn_without_native.cache_clear()
    assert dispatch.resolve(None, CUDA) == "reference"
    with pytest.warns(UserWarning, match=r"masking .* PyTorch, .*native module was not built.*C\+\+ compiler"):
        assert dispatch.resolve(None, CPU) == "reference"
    assert dispatch.resolve(None, CPU) == "reference"  # the warning came once: here it would be an error
    assert available_impls() == ("reference",)
    with pytest.raises(RuntimeError, match=r"impl: 'cpp' cannot run here: .*C\+\+ compiler"):
        dispatch.resolve("cpp", CPU)
    with pytest.raises(RuntimeError, match=r'impl: .triton. cannot run here: .*pip install "fastmlm\[gpu\]"'):
        dispatch.resolve("triton", CUDA)


@pytest.mark.parametrize("impl", ["cuda", "Triton", "", 3])
def test_unknown_impl(impl: Any) -> None:
    with pytest.raises(ValueError, match=f"impl: expected None or one of reference, cpp, triton, got {impl!r}"):
        mask_tokens(IDS, SPEC, seed=0, impl=impl)


def test_native_kernels_take_no_gpu_tensors() -> None:
    with pytest.raises(RuntimeError, match=r"impl: 'cpp' cannot run here: .*on the CPU, and these are on cuda"):
        dispatch.resolve("cpp", CUDA)


def test_triton_on_cpu_tensors_without_the_interpreter() -> None:
    code = (
        "import torch, fastmlm\n"
        "print(*fastmlm.available_impls())\n"
        "try: fastmlm.mask_tokens(torch.arange(4), fastmlm.MaskingSpec(1, 9), seed=0, impl='triton')\n"
        "except RuntimeError as error: print(error)\n"
    )
    impls, message = without_interpreter(code).splitlines()
    assert ("triton" in impls.split()) == torch.cuda.is_available()
    assert message.startswith("impl: 'triton' cannot run here: ")
    assert "GPU" in message


def without_interpreter(code: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout


# ---- As PyTorch sees the op ----


def arguments(kind: str, seed: int = 5) -> dict[str, Any]:
    """Arguments of the op, by its schema's names, for a kind of call."""
    flags, random_ids = SPEC.tables(CPU)
    call: dict[str, Any] = {
        "input_ids": IDS, "seed": seed, "device_seed": None, "row_keys": None, "attention_mask": None,
        "special_tokens_mask": None, "units": None, "cu_seqlens": None, "thresholds": None, "flags": flags,
        "random_ids": random_ids, "threshold": 1 << 31, "mask_token_id": 3, "mask_threshold": SPEC.mask_threshold,
        "random_threshold": SPEC.random_threshold, "ignore_index": -100, "exclude_original": True, **PLAIN,
    }  # fmt: skip
    if kind != "plain":
        call["device_seed"], call["special_tokens_mask"] = torch.tensor([seed]), IDS % 5 == 0
        call["attention_mask"], call["row_keys"] = IDS % 7 != 0, torch.tensor([3, 4, -5])
        call["thresholds"] = torch.full(IDS.shape, 1 << 31) if "token" in kind else torch.full((3, 1), 1 << 31)
    if "units" in kind:
        call["units"] = (torch.arange(70) // 2 * 2).expand(3, -1).contiguous()
    if "packed" in kind:
        call |= {"cu_seqlens": torch.tensor([0, 64, 65, 210]), "thresholds": torch.full((3, 1), 1 << 31)}
        for name in ("input_ids", "attention_mask", "special_tokens_mask", "units"):
            call[name] = None if call[name] is None else call[name].reshape(1, -1)
    return call


def outputs(ids: Tensor) -> dict[str, Tensor]:
    return {"output_ids": torch.empty_like(ids), "labels": torch.empty_like(ids)}


KINDS = ["plain", "rows", "token", "units", "packed", "units token", "units packed"]


@pytest.mark.parametrize(
    ("kind", "impl"),
    [("plain", "triton"), ("rows", "triton"), ("units packed", "triton"), ("units", "reference")],
)
def test_opcheck(kind: str, impl: str) -> None:
    """Schema (nothing written, nothing aliased), fake implementation, dynamic shapes under AOTAutograd."""
    given = (*arguments(kind).values(), impl)
    torch.library.opcheck(torch.ops.fastmlm.mask_tokens.default, given)
    torch.library.opcheck(torch.ops.fastmlm.mask_tokens.out, given, outputs(given[0]))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_fake_outputs(dtype: torch.dtype) -> None:
    ids, spec = IDS.to(dtype), MaskingSpec(3, 50)
    spec.tables(CPU)
    real = mask_tokens(ids, spec, seed=1)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = torch.ops.fastmlm.mask_tokens(
            *(arguments("plain") | {"input_ids": mode.from_tensor(ids)}).values(), "triton"
        )
    for a, b in zip(real, fake, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("impl", [None, "triton"])
def test_compile_with_a_changing_seed(backend: str, impl: str | None) -> None:
    """One graph for the first seed, one for every later one."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    spec = MaskingSpec(3, 50, (0, 1, 2), 0.4)  # its tables are built in the compiled call

    def step(ids: Tensor, seed: int) -> Tensor:
        masked = mask_tokens(ids + 0, spec, seed=seed, attention_mask=ids != 4, impl=impl)
        return torch.stack([masked.input_ids, masked.labels]) * 2

    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for seed in (7, 0, 1, 2, 2**31, 2**32 + 1, 2**62, 2**63 - 1):
        assert torch.equal(compiled(IDS, seed), step(IDS, seed))
    assert counter.frame_count <= 3  # 7, any, and perhaps 0 or 1, which dynamo likes to see as constants


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("in_place", [False, True])
def test_compile_with_out(backend: str, in_place: bool) -> None:
    torch._dynamo.reset()
    SPEC.tables(CPU)

    def step(ids: Tensor, output: Tensor, labels: Tensor) -> Tensor:
        mask_tokens(ids, SPEC, seed=7, out=(ids if in_place else output, labels))
        return labels + 1

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    expected = [IDS.clone(), torch.empty_like(IDS), torch.empty_like(IDS)]
    got = [IDS.clone(), torch.empty_like(IDS), torch.empty_like(IDS)]
    assert torch.equal(compiled(*got), step(*expected))
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[2], expected[2])
    assert in_place or torch.equal(got[1], expected[1])
    assert in_place != torch.equal(got[0], IDS)


def test_compile_with_a_seed_on_the_device_and_lengths_that_change() -> None:
    torch._dynamo.reset()
    counter = CompileCounter()
    SPEC.tables(CPU)  # built inside, they would cost a second graph

    def step(ids: Tensor, seed: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(mask_tokens(ids, SPEC, seed=seed, mlm_probability=ids / 50))

    compiled = torch.compile(step, fullgraph=True, backend=counter, dynamic=True)
    for seed, length in enumerate((70, 64, 33, 2)):
        call = IDS[:, :length].clone(), torch.tensor([seed])
        for got, want in zip(compiled(*call), step(*call), strict=True):
            assert torch.equal(got, want)
    assert counter.frame_count == 1


def test_compiled_seeds_with_the_top_bit() -> None:
    """Half of all keys do not fit an int64: as tensors they work, as numbers they may fail but never lie."""
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda ids, seed: mask_tokens(ids, SPEC, seed=seed).labels, backend="eager", fullgraph=True
    )
    for seed in (5, 6, 2**63, 2**64 - 1, 7, 2**63 + 5):
        expected = mask_tokens(IDS, SPEC, seed=seed).labels
        assert torch.equal(compiled(IDS, torch.tensor([philox.as_int64(seed)])), expected)
        try:
            got = compiled(IDS, seed)
        except (RuntimeError, OverflowError):
            assert seed >= 2**63
        else:
            assert torch.equal(got, expected)


class Masking(torch.nn.Module):
    def __init__(self, spec: MaskingSpec) -> None:
        super().__init__()
        self.spec = spec

    def forward(self, ids: Tensor) -> Tensor:
        return mask_tokens(ids, self.spec, seed=1).labels


def test_fake_tensors_leave_the_spec_usable() -> None:
    spec = MaskingSpec(3, 50, random_token_ids=(4, 5))
    with FakeTensorMode() as mode:
        mask_tokens(mode.from_tensor(IDS), spec, seed=1)
    expected = mask_tokens(IDS, MaskingSpec(3, 50, random_token_ids=(4, 5)), seed=1)
    assert torch.equal(mask_tokens(IDS, spec, seed=1).labels, expected.labels)
    assert all(type(table) is Tensor for table in spec.tables(CPU))


def test_exporting_leaves_the_spec_usable() -> None:
    """Tables first asked for while tracing with fake tensors must not stay behind in the spec as fakes."""
    spec = MaskingSpec(3, 50, (0, 1, 2))
    exported = torch.export.export(Masking(spec), (IDS,), strict=False)
    expected = mask_tokens(IDS, MaskingSpec(3, 50, (0, 1, 2)), seed=1).labels
    assert (expected != -100).any()
    assert torch.equal(mask_tokens(IDS, spec, seed=1).labels, expected)
    assert torch.equal(exported.module()(IDS), expected)


# ---- Nothing waits for the device ----


@pytest.mark.parametrize("kind", KINDS)
def test_reference_never_waits(kind: str) -> None:
    call = arguments(kind)
    call |= outputs(call["input_ids"])
    with NoSync() as seen:
        reference.mask_tokens(**call)
    assert seen.operations > 50
    # Fake tensors have no values at all: what reads one, be it by tolist() or numpy(), raises.
    with FakeTensorMode() as mode:
        reference.mask_tokens(**{k: mode.from_tensor(v) if isinstance(v, Tensor) else v for k, v in call.items()})


@pytest.mark.parametrize("packed", [False, True])
def test_public_function_never_waits(monkeypatch: pytest.MonkeyPatch, packed: bool) -> None:
    """As on a GPU, where no values are read; the tables by id are there after a spec's first call."""
    monkeypatch.setattr(masking, "_readable", lambda tensor: False)
    monkeypatch.setattr(masking._ops, "mask_tokens", masking._ops._mask_tokens)  # a mode does not see inside an op
    SPEC.tables(CPU)
    call = {
        "attention_mask": IDS % 7,
        "special_tokens_mask": IDS % 5 == 0,
        "units": IDS * 0,
        "mlm_probability": IDS / 50,
    }
    ids, seed, cu_seqlens = IDS, torch.tensor([1]), None
    if packed:
        call, cu_seqlens = {k: v.flatten() for k, v in call.items()}, torch.tensor([0, 64, 210])
        ids = IDS.flatten()
    philox.row_keys(IDS, IDS % 7)  # its table of weights, like those of the spec, is built once
    with NoSync() as seen:
        mask_tokens(ids, SPEC, seed=seed, cu_seqlens=cu_seqlens, impl="reference", **call)
        mask_tokens(ids, SPEC, seed=2**64 - 1, cu_seqlens=cu_seqlens, impl="reference")
        philox.row_keys(IDS, IDS % 7)
    assert seen.operations > 100
