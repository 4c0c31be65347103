"""linear_cross_entropy with the Triton kernel: what is ignored, chunks, memory, the compiler, and no wait for a GPU."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from no_sync import NoSync
from oracle import DEVICE
from test_linear_loss import GRADIENTS, Largest, case, eager, in_chunks, placed
from torch import Tensor

from fastmlm import dispatch
from fastmlm._ops import LOSS_IMPLS
from fastmlm.kernels.gpu import linear_cross_entropy as kernel
from fastmlm.loss import linear_cross_entropy, masked_accuracy

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.mark.parametrize("rows", [50, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_worse_than_eager_in_the_same_type(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, rows: int) -> None:
    """By the rule of test_linear_loss_limits.py, with a fifth of the rows ignored."""
    in_chunks(monkeypatch, rows)
    generator = torch.Generator().manual_seed(rows)
    x, bias = torch.randn(50, 32, generator=generator), torch.randn(333, generator=generator)
    weight, target = torch.randn(333, 32, generator=generator) / 4, torch.randint(333, (50,), generator=generator)
    target[::5] = -100
    target, rounded = target.to(DEVICE), [tensor.to(DEVICE, dtype) for tensor in (x, weight, bias)]
    errors = []
    for function in (linear_cross_entropy, eager):
        found = []
        for tensors, used in ((rounded, function), ([tensor.double() for tensor in rounded], eager)):
            given = [tensor.clone().requires_grad_() for tensor in tensors]
            loss = used(given[0], given[1], target, linear_bias=given[2], reduction="sum", impl="triton")
            found.append([loss.detach(), *torch.autograd.grad(loss, given)])
        errors.append([float((a.double() - b).norm() / b.norm()) for a, b in zip(*found, strict=True)])
    # The interpreter cuts the digits off that bfloat16 has no place for; test_codegen_loss.py looks whether GPUs round.
    more = {torch.float32: 2.0**-20, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-9}[dtype]
    assert errors[0][0] < 1e-3
    assert all(ours <= theirs + more for ours, theirs in zip(*errors, strict=True)), errors


def gradients_of(given: dict[str, Any], **options: Any) -> list[Tensor]:
    tensors = {k: v.clone().requires_grad_() if k in GRADIENTS else v for k, v in given.items()}
    loss = linear_cross_entropy(**tensors, **options, impl="triton")
    return [loss.detach(), *torch.autograd.grad(loss.sum(), [tensors[name] for name in GRADIENTS if name in given])]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("rows", [1000, 4])
def test_what_is_ignored_may_be_anything(monkeypatch: pytest.MonkeyPatch, reduction: str, rows: int) -> None:
    """Not even NaN reaches the loss or a gradient; those of its own row are 0."""
    in_chunks(monkeypatch, rows)
    given = placed(case(), "triton")
    taken = (given["target"] != -100)[..., None]
    expected = gradients_of(given, reduction=reduction)
    for value in (torch.nan, torch.inf):
        given["input"] = given["input"].where(taken, value)
        given["weight_per_row"] = given["weight_per_row"].where(taken[..., 0], value)
        found = gradients_of(given, reduction=reduction)
        torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)
        assert not found[1][~taken[..., 0]].any()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nothing_taken(reduction: str, dtype: torch.dtype) -> None:
    given = placed(case(dtype=dtype), "triton")
    given |= {"target": torch.full_like(given["target"], -100), "input": torch.full_like(given["input"], torch.nan)}
    assert not any(tensor.any() for tensor in gradients_of(given, reduction=reduction))
    del given["weight_per_row"]
    given["linear_weight"].requires_grad_()
    assert masked_accuracy(**given, impl="triton").isnan()


def test_a_wrong_target_makes_the_loss_nan() -> None:
    given = placed(case(), "triton")
    given["target"][3, 2] = 11
    assert gradients_of(given)[0].isnan()
    assert gradients_of(given, reduction="none")[0].isnan().nonzero().tolist() == [[3, 2]]


@pytest.mark.parametrize("rows", [1000, 3])
def test_ranks(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    in_chunks(monkeypatch, rows)
    given = placed(case(), "triton")
    del given["weight_per_row"]
    for top_k in (1, 3, 11):
        found = [masked_accuracy(**given, top_k=top_k, impl=impl) for impl in ("reference", "triton")]
        assert torch.equal(*found)
    assert found[0] == 1


def test_strided_arguments() -> None:
    """V is a multiple of what rows are aligned to, so that nothing has to be copied for that."""
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(8, 64, generator=generator).t(), torch.randn(64, 2, generator=generator)[:, 0]
    x, target = torch.randn(5, 2, 8, generator=generator)[:, 0], torch.randint(64, (5, 2), generator=generator)[:, 1]
    scale = torch.rand(5, 3, generator=generator)[:, 1]
    given = {"input": x, "linear_weight": weight, "target": target, "linear_bias": bias, "weight_per_row": scale}
    given = placed(given, "triton")
    for reduction in ("mean", "sum", "none"):
        expected = eager(**given, reduction=reduction)
        torch.testing.assert_close(linear_cross_entropy(**given, reduction=reduction, impl="triton"), expected)


def test_it_never_holds_all_logits(launches: "Launches", monkeypatch: pytest.MonkeyPatch) -> None:
    in_chunks(monkeypatch, 16)
    x, weight, bias = (torch.randn(shape, device=DEVICE).bfloat16() for shape in ((64, 8), (500, 8), (500,)))
    target = torch.randint(500, (64,), device=DEVICE)
    with Largest() as seen:
        kernel.linear_cross_entropy(x, weight, bias, target, None, -100, 0.0, "mean", [True] * 3, True)
    assert seen.numel == 16 * 512


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # dynamo looks at fakes
@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.*instantiated:DeprecationWarning")  # and does that
def test_it_compiles_whole() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")
    results = []
    for function in (compiled, linear_cross_entropy):
        tensors = {k: v.requires_grad_(k in GRADIENTS) for k, v in placed(case(), "triton").items()}
        loss = function(**tensors, impl="triton")
        results.append((loss.detach(), torch.autograd.grad(3 * loss, [tensors[name] for name in GRADIENTS])))
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


def test_the_op_is_sound() -> None:
    given = placed(case(), "triton")
    arguments = (given["input"].flatten(0, 1), given["linear_weight"], given["linear_bias"], given["target"].flatten())
    options = (given["weight_per_row"].flatten(), -100, 0.1, "none", [True, False, True], True, "triton")
    torch.library.opcheck(torch.ops.fastmlm.linear_cross_entropy.default, (*arguments, *options))


def test_sums_are_added_to_within_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """As CUDA does it: in float32, and the first product in place of whatever was in memory."""

    def addmm(added: Tensor, a: Tensor, b: Tensor, out_dtype: torch.dtype, beta: int, out: Tensor) -> None:
        assert out is added
        product = a.to(out_dtype) @ b.to(out_dtype)
        out.copy_(product + added if beta else product)

    monkeypatch.setattr(torch, "addmm", addmm)
    generator = torch.Generator().manual_seed(0)
    weight, exact = torch.empty(40, 8, dtype=torch.bfloat16), torch.zeros(40, 8, dtype=torch.float64)
    sums = kernel._Sums(weight, True)
    sums.sum.fill_(torch.nan)
    for rows in (3, 5, 1):
        grad = torch.randn(rows, 64, generator=generator).bfloat16()[:, :40]
        x = torch.randn(rows, 8, generator=generator).bfloat16()
        sums.add(grad, x)
        exact += grad.double().t() @ x.double()
    assert sums.sum.dtype == torch.float32
    torch.testing.assert_close(sums.sum.double(), exact, rtol=1e-6, atol=1e-6)
    assert torch.equal(sums.total(), sums.sum.bfloat16())
    assert not kernel._Sums(weight, True).total().any()


# ---- Nothing waits for the GPU ----


class Launches:
    """Stands in for the kernel, and keeps what it was called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **kwargs: self.calls.append((grid, args, kwargs))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    recorder = Launches()
    monkeypatch.setattr(kernel, "_cross_entropy", recorder)
    kernel._adds_in_float32.cache_clear()
    yield recorder
    kernel._adds_in_float32.cache_clear()


def call(dtype: torch.dtype, reduction: str, with_scale: bool = True) -> tuple[Any, ...]:
    """Arguments of the op, not on the CPU, without values that could be read."""
    x, weight, bias = (torch.empty(shape, dtype=dtype, device="meta") for shape in ((50, 8), (100, 8), (100,)))
    wide = torch.promote_types(dtype, torch.float32)
    target, scale = torch.empty(50, dtype=torch.int64, device="meta"), torch.empty(50, dtype=wide, device="meta")
    rest = (-100, 0.1, reduction, [True] * 3, True)
    return x, weight, bias, target, scale if with_scale else None, *rest


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_it_never_waits(
    launches: Launches, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, reduction: str
) -> None:
    in_chunks(monkeypatch, 20)
    with NoSync() as mode:
        for with_scale in (True, False):
            arguments = call(dtype, reduction, with_scale)
            loss, *gradients, ranks = kernel.linear_cross_entropy(*arguments)
            assert (loss.shape, ranks.shape) == ((50,) if reduction == "none" else (), (50,))
            assert [g.shape for g in gradients] == [a.shape for a in arguments[:3]]
            assert all(tensor.device.type == "meta" for tensor in (loss, *gradients, ranks))
    assert mode.operations > 20
    assert [grid for grid, _, _ in launches.calls] == [(17,), (17,), (16,)] * 2
    for _, (logits, bias, *_, width, vocabulary, ignored), _ in launches.calls:
        assert (logits.stride(), logits.shape[1], vocabulary, ignored) == ((width, 1), 100, 100, -100)
        assert width % 16 == 0
        assert bias.shape == (width,)


def test_a_wait_would_be_seen(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the CPU does, to drop rows, and reading the loss."""
    with NoSync():
        loss = kernel.linear_cross_entropy(*call(torch.bfloat16, "mean"))[0]
        with pytest.raises(AssertionError, match="waits for the device"):
            loss.item()
        monkeypatch.setattr(kernel._Chunks, "drops_ignored", True)
        with pytest.raises(AssertionError, match="waits for the device"):
            kernel.linear_cross_entropy(*call(torch.bfloat16, "mean"))


def test_products_in_16_bits_are_added_up_in_float32(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where PyTorch can; not on the CPU."""
    given: list[torch.dtype | None] = []
    addmm = torch.addmm
    monkeypatch.setattr(torch, "addmm", lambda *a, **kw: (given.append(kw.get("out_dtype")), addmm(*a, **kw))[1])
    weight = torch.empty(4, 3, dtype=torch.bfloat16)
    assert not isinstance(kernel._Chunks(-100).weight_gradient(weight, several=True), kernel._Sums)
    in_chunks(monkeypatch, 20)
    for dtype in DTYPES:
        given.clear()
        kernel.linear_cross_entropy(*call(dtype, "mean"))  # three chunks, and once to try
        assert given == ([torch.float32] * 4 if dtype.itemsize == 2 else [None] * 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_public_function_never_waits(dtype: torch.dtype, reduction: str) -> None:
    """Nor does the backward pass, on meta, where autograd works without a GPU; the op itself is a fake here."""
    with NoSync() as mode:
        given = [torch.empty(shape, dtype=dtype, device="meta").requires_grad_() for shape in ((50, 8), (3, 8), (3,))]
        target, scale = torch.empty(50, dtype=torch.int32, device="meta"), torch.empty(50, device="meta")
        options: dict[str, Any] = {"linear_bias": given[2], "weight_per_row": scale, "reduction": reduction}
        loss = linear_cross_entropy(*given[:2], target, **options).sum()
        gradients = torch.autograd.grad(loss, given, torch.empty((), device="meta"))
        assert [(g.shape, g.dtype) for g in gradients] == [(tensor.shape, dtype) for tensor in given]
        assert masked_accuracy(*given[:2], target).device.type == "meta"
    assert mode.operations > 5


def test_gradients_are_multiplied_on_the_device() -> None:
    """In float32, as everywhere: a factor of no dimension would be rounded to the type of the gradients."""
    gradient, factor = torch.linspace(-1, 1, 1001).bfloat16(), torch.tensor(1 / 3)
    expected = (gradient.float() * factor).bfloat16()
    assert torch.equal(gradient.clone().mul_(factor.reshape(1)), expected)


def test_it_is_the_default_on_a_gpu() -> None:
    assert dispatch.resolve(None, torch.device("cuda"), LOSS_IMPLS) == "triton"
