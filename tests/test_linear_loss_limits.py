"""linear_cross_entropy: its precision, its memory, and as PyTorch's compiler, autocast and estimators see it."""

import pytest
import torch
from test_linear_loss import GRADIENTS, Largest, case, eager, in_chunks
from torch._subclasses.fake_tensor import FakeTensorMode

from fastmlm.dispatch import kernel
from fastmlm.loss import linear_cross_entropy


def test_linear_loss_without_values() -> None:
    """On meta, and of fakes, as estimators of memory use them."""
    x, weight = torch.ones(4, 8, device="meta", requires_grad=True), torch.ones(9, 8, device="meta")
    target = torch.zeros(4, dtype=torch.int64, device="meta")
    loss = linear_cross_entropy(x, weight, target)
    assert (loss.device.type, loss.shape, loss.dtype) == ("meta", (), torch.float32)
    with FakeTensorMode():
        x, weight = torch.ones(4, 8, requires_grad=True), torch.ones(9, 8, requires_grad=True)
        linear_cross_entropy(x, weight, torch.zeros(4, dtype=torch.int64)).backward()
        assert x.grad is not None
        assert x.grad.shape == (4, 8)


# Beyond eager's error. A chunk's product is rounded to the type once before it is added up, which eager, with one
# product, need not do: half a unit in the last place. In float32 chunks are added up one by one, and in the native
# kernel the rows of the bias, where eager adds in blocks.
MORE = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-10, torch.float16: 2.0**-10}


@pytest.mark.parametrize("impl", ["reference", "cpp"])
@pytest.mark.parametrize("rows", [1, 3, 32, 250, 1000])
@pytest.mark.parametrize("dtype", MORE)
def test_linear_loss_is_no_worse_than_eager_in_the_same_type(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, rows: int, impl: str
) -> None:
    """At each number of chunks, from 1 to 1000."""
    in_chunks(monkeypatch, rows)
    generator = torch.Generator().manual_seed(rows)
    x, bias = torch.randn(1000, 32, generator=generator), torch.randn(333, generator=generator)
    weight, target = torch.randn(333, 32, generator=generator) / 4, torch.randint(333, (1000,), generator=generator)
    errors = []
    rounded = [tensor.to(dtype) for tensor in (x, weight, bias)]
    for function in (linear_cross_entropy, eager):
        found = []
        for tensors in (rounded, [tensor.double() for tensor in rounded]):
            given = [tensor.clone().requires_grad_() for tensor in tensors]
            used = eager if tensors is not rounded else function
            loss = used(given[0], given[1], target, linear_bias=given[2], impl=impl)
            found.append([loss.detach(), *torch.autograd.grad(loss, given)])
        assert found[0][0].dtype == (torch.float32 if function is linear_cross_entropy else dtype)
        errors.append([float((a.double() - b).norm() / b.norm()) for a, b in zip(*found, strict=True)])
    assert errors[0][0] < 1e-3
    assert all(ours <= theirs + MORE[dtype] for ours, theirs in zip(*errors, strict=True)), errors


def test_linear_loss_under_autocast() -> None:
    given = case(dtype=torch.float32)
    given["weight_per_row"] = given["weight_per_row"].float()
    tensors = {k: v.requires_grad_(k in GRADIENTS) for k, v in given.items()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(**tensors)
    grads = torch.autograd.grad(loss, [tensors[name] for name in GRADIENTS])
    assert loss.dtype == torch.float32
    assert all(g.dtype == torch.float32 for g in grads)
    assert loss.item() == pytest.approx(eager(**given).item(), rel=1e-2)  # 2^-8 of bfloat16, a few times


def test_autocast_leaves_float64_alone_and_casts_a_bias_of_another_type() -> None:
    given = case()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(linear_cross_entropy(**given), linear_cross_entropy(**case()))
        assert linear_cross_entropy(**given).dtype == torch.float64
        mixed = {k: v.float() if v.is_floating_point() else v for k, v in given.items()}
        loss = linear_cross_entropy(**mixed | {"linear_bias": mixed["linear_bias"].bfloat16()})
    assert loss.item() == pytest.approx(linear_cross_entropy(**given).item(), rel=1e-2)


@pytest.mark.parametrize("impl", ["reference", "cpp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_loss_never_holds_all_logits(monkeypatch: pytest.MonkeyPatch, impl: str, dtype: torch.dtype) -> None:
    in_chunks(monkeypatch, 32)
    x, weight, bias = (torch.randn(shape, dtype=dtype, requires_grad=True) for shape in ((1000, 8), (500, 8), (500,)))
    target = torch.randint(500, (1000,))
    with Largest() as ours, torch.no_grad():  # what the op runs
        kernel(impl, "linear_cross_entropy.linear_cross_entropy")(
            x, weight, bias, target, None, -100, 0.0, "mean", [True] * 3, True
        )
    with Largest() as theirs:
        eager(x, weight, target, bias).backward()
    assert ours.numel == 32 * 500
    assert theirs.numel == 1000 * 500


def test_linear_loss_op_is_sound() -> None:
    given = case()
    arguments = (given["input"].flatten(0, 1), given["linear_weight"], given["linear_bias"], given["target"].flatten())
    scale = given["weight_per_row"].flatten()
    op = torch.ops.fastmlm.linear_cross_entropy.default
    for needs in ([True, True, True], [False, False, False], [True, False, True]):
        for impl in ("reference", "cpp"):
            for reduction, with_ranks in (("mean", True), ("none", False)):
                torch.library.opcheck(op, (*arguments, scale, -100, 0.1, reduction, needs, with_ranks, impl))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # dynamo looks at fakes
@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.*instantiated:DeprecationWarning")  # and does that
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_linear_loss_compiles_whole(backend: str, reduction: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend=backend)
    results = []
    for function in (compiled, linear_cross_entropy):
        tensors = {k: v.requires_grad_(k in GRADIENTS) for k, v in case().items()}
        loss = function(**tensors, reduction=reduction)
        results.append((loss.detach(), torch.autograd.grad(3 * loss.sum(), [tensors[name] for name in GRADIENTS])))
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_linear_loss_of_more_than_two_to_the_31_logits() -> None:
    """Of all rows together, against eager PyTorch, some rows at a time."""
    generator = torch.Generator().manual_seed(0)
    rows, vocabulary = 16_500, 1 << 17
    x = torch.randn(rows, 4, generator=generator).requires_grad_()
    weight = torch.randn(vocabulary, 4, generator=generator).requires_grad_()
    target = torch.randint(vocabulary, (rows,), generator=generator)
    assert rows * vocabulary > 1 << 31
    for start in range(0, rows, 1000):
        part = slice(start, start + 1000)
        eager(x[part], weight, target[part], reduction="sum").backward()
    for impl in ("reference", "cpp"):
        loss = linear_cross_entropy(x, weight, target, reduction="sum", impl=impl)
        for ours, theirs in zip(torch.autograd.grad(loss, (x, weight)), (x.grad, weight.grad), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)  # sums of 16,500 in another order
