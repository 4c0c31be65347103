"""linear_cross_entropy against eager PyTorch: every option, gradient and chunking, precision, memory, the compiler."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import DEVICE
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastmlm import chunked
from fastmlm._ops import LOSS_IMPLS
from fastmlm.kernels.cpu import linear_cross_entropy as native
from fastmlm.kernels.gpu import linear_cross_entropy as triton_kernel
from fastmlm.loss import linear_cross_entropy

N, WIDTH, VOCABULARY = 20, 6, 11


def case(seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Rows of hidden states, of which a quarter is ignored; a decoder; targets with 0 and the last id among them."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    target = torch.randint(VOCABULARY, (4, N // 4), generator=generator)
    target[0] = -100
    target[1, 0], target[1, 1] = 0, VOCABULARY - 1
    return {
        "input": normal(4, N // 4, WIDTH),
        "linear_weight": normal(VOCABULARY, WIDTH),
        "linear_bias": normal(VOCABULARY),
        "target": target,
        "weight_per_row": torch.rand(4, N // 4, generator=generator, dtype=torch.float64) + 0.5,
    }


def eager(
    input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Any = None, weight_per_row: Any = None,
    reduction: str = "mean", label_smoothing: float = 0.0, ignore_index: int = -100, impl: Any = None,
) -> Tensor:  # fmt: skip
    logits = F.linear(input, linear_weight, linear_bias).flatten(0, -2)
    losses = F.cross_entropy(
        logits, target.flatten(), reduction="none", label_smoothing=label_smoothing, ignore_index=ignore_index
    ).view(target.shape)
    losses = losses if weight_per_row is None else losses * weight_per_row
    if reduction == "mean":
        return losses.sum() / (target != ignore_index).sum().clamp(min=1)
    return losses.sum() if reduction == "sum" else losses


def placed(given: dict[str, Any], impl: str | None) -> dict[str, Any]:
    """Tensors where the implementation runs."""
    device = DEVICE if impl == "triton" else "cpu"
    return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in given.items()}


def same_loss(given: dict[str, Any], asked: tuple[str, ...], **options: Any) -> None:
    """Loss and gradients of what is asked for equal eager PyTorch's, for a gradient of the loss that is not 1."""
    results = []
    given = placed(given, (given | options).get("impl"))
    for function in (linear_cross_entropy, eager):
        tensors = {k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in given.items()}
        for name in asked:
            tensors[name].requires_grad_()
        loss = function(**tensors, **options)
        factor = torch.linspace(0.5, 2, loss.numel(), dtype=loss.dtype).view(loss.shape)
        found = torch.autograd.grad(loss, [tensors[name] for name in asked], factor) if asked else ()
        results.append((loss.detach(), found))
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


GRADIENTS = ["input", "linear_weight", "linear_bias"]


def in_chunks(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """So many rows at a time, whatever implementation it is."""
    for kind in (chunked.Chunks, native._Chunks, triton_kernel._Chunks):
        monkeypatch.setattr(kind, "rows", lambda self, count, weight: rows)


@pytest.fixture(params=[f"{impl}, {chunks}" for impl in LOSS_IMPLS for chunks in ("one chunk", "many chunks")])
def impl(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """All rows at once, or four at a time."""
    name, chunks = request.param.split(", ")
    if chunks == "many chunks":
        in_chunks(monkeypatch, 4)
    return name


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("without", [(), ("linear_bias",), ("weight_per_row",), ("linear_bias", "weight_per_row")])
def test_linear_loss_equals_eager(impl: str, reduction: str, label_smoothing: float, without: tuple[str, ...]) -> None:
    given = {name: value for name, value in case().items() if name not in without}
    asked = tuple(name for name in GRADIENTS if name in given)
    same_loss(given, asked, reduction=reduction, label_smoothing=label_smoothing, impl=impl)


@pytest.mark.parametrize("asked", [c for k in range(4) for c in itertools.combinations(GRADIENTS, k)])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_linear_loss_gives_the_gradients_asked_for(impl: str, asked: tuple[str, ...], reduction: str) -> None:
    same_loss(case(), asked, reduction=reduction, impl=impl)


@pytest.mark.parametrize("kind", ["flat", "int32", "strided", "another ignore_index", "nothing taken", "no rows"])
def test_linear_loss_of_all_kinds_of_rows(impl: str, kind: str) -> None:
    given: dict[str, Any] = placed(case(), impl) | {"impl": impl}
    if kind == "flat":
        given |= {name: given[name].flatten(0, 1) for name in ("input", "target", "weight_per_row")}
    if kind == "int32":
        same = linear_cross_entropy(**given)
        assert torch.equal(linear_cross_entropy(**given | {"target": given["target"].int()}), same)
    if kind == "strided":
        given |= {"input": given["input"].transpose(0, 1), "target": given["target"].t()}
        given |= {
            "weight_per_row": given["weight_per_row"].t(),
            "linear_weight": given["linear_weight"].t().clone().t(),
        }
    if kind == "another ignore_index":
        given |= {"ignore_index": 3, "target": given["target"].clamp(min=0)}
    if kind == "nothing taken":
        given["target"] = torch.full_like(given["target"], -100)
    if kind == "no rows":
        given |= {name: given[name][:0] for name in ("input", "target", "weight_per_row")}
    same_loss(given, tuple(GRADIENTS))
    loss = linear_cross_entropy(**{k: v.requires_grad_() if k in GRADIENTS else v for k, v in given.items()})
    assert loss.requires_grad
    assert kind not in ("nothing taken", "no rows") or loss.item() == 0


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_linear_loss_by_finite_differences(reduction: str) -> None:
    given = case()
    inputs = [given[name].requires_grad_() for name in GRADIENTS]

    def function(input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return linear_cross_entropy(
            input, weight, given["target"], linear_bias=bias, weight_per_row=given["weight_per_row"],
            reduction=reduction, label_smoothing=0.1,
        )  # fmt: skip

    assert torch.autograd.gradcheck(function, inputs)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_gradients_of_gradients(reduction: str) -> None:
    given = case()
    inputs = [given[name].requires_grad_() for name in GRADIENTS]
    options = {"reduction": reduction, "weight_per_row": given["weight_per_row"], "label_smoothing": 0.1}

    def function(input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return linear_cross_entropy(input, weight, given["target"], linear_bias=bias, **options)

    loss = function(*inputs).sum()
    with_graph = torch.autograd.grad(loss, inputs, create_graph=True, retain_graph=True)
    torch.testing.assert_close(with_graph, torch.autograd.grad(loss, inputs), rtol=1e-12, atol=1e-12)

    assert torch.autograd.gradgradcheck(function, inputs)


def test_first_gradients_of_tied_weights_with_a_graph() -> None:
    """The input depends on the weight: what is asked for with ``create_graph`` is what is asked for without."""
    given = case()
    weight = given["linear_weight"].requires_grad_()
    for reduction in ("mean", "none"):
        found = []
        for function, graph in ((linear_cross_entropy, False), (linear_cross_entropy, True), (eager, True)):
            x = weight[given["target"].clamp(min=0)].sin()
            loss = function(x, weight, given["target"], reduction=reduction).sum()
            found.append(torch.autograd.grad(loss, weight, create_graph=graph)[0].detach())
        torch.testing.assert_close(found[1:], [found[0]] * 2, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("impl", ["reference", "cpp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1.0, 100.0])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_linear_loss_in_native_types(impl: str, dtype: torch.dtype, size: float, reduction: str) -> None:
    """Strided inputs of every kind, more ids than a product takes at once, and logits whose exponentials overflow."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = 2500

    def strided(*shape: int, of: float = 1.0) -> Tensor:
        return (of * torch.randn(*shape[:-1], 2 * shape[-1], generator=generator).to(dtype))[..., ::2]

    given: dict[str, Any] = {
        "input": strided(40, 8, of=size), "linear_weight": strided(vocabulary, 8), "linear_bias": strided(vocabulary),
        "target": torch.randint(vocabulary, (40, 2), generator=generator)[:, 0],
        "weight_per_row": torch.rand(40, 2, generator=generator)[:, 0],
    }  # fmt: skip
    truth = {k: v.double() if v.is_floating_point() else v for k, v in given.items()}
    results = []
    for function, of in ((linear_cross_entropy, given), (eager, truth)):
        tensors = {k: v.requires_grad_() if k in GRADIENTS else v for k, v in of.items()}
        loss = function(**tensors, reduction=reduction, label_smoothing=0.1, impl=impl)
        weights = torch.linspace(1, 2, loss.numel(), dtype=loss.dtype).view(loss.shape)
        results.append([loss, *torch.autograd.grad(loss, [tensors[name] for name in GRADIENTS], weights)])
    # A logit of 100 is right to 0.2 in bfloat16, and with it its exponential.
    bound = 1e-5 if dtype == torch.float32 else 0.02 if size == 1 else 0.2
    for ours, exact in zip(*results, strict=True):
        assert (ours.double() - exact).norm() <= bound * exact.norm()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("without", [(), ("linear_bias", "weight_per_row")])
@pytest.mark.parametrize("ignored", [False, True])
def test_linear_loss_of_few_ids(reduction: str, without: tuple[str, ...], ignored: bool) -> None:
    """Where PyTorch's own way is taken, and where one ignored row takes it back."""
    given: dict[str, Any] = {name: value for name, value in case().items() if name not in without}
    given |= {"linear_weight": given["linear_weight"][:3], "target": given["target"].clamp(0, 2)}
    if "linear_bias" in given:
        given["linear_bias"] = given["linear_bias"][:3]
    if ignored:
        given["target"][2, 2] = -100
    asked = tuple(name for name in GRADIENTS if name in given)
    same_loss(given, asked, reduction=reduction, label_smoothing=0.1)
    with Largest() as seen, torch.no_grad():
        linear_cross_entropy(**given)
    assert ("fastmlm::linear_cross_entropy" in seen.names) is ignored
    half = {k: v.bfloat16() if k in GRADIENTS else v for k, v in given.items()}
    assert linear_cross_entropy(**half).dtype == torch.float32
    with pytest.raises(ValueError, match=r"target: expected ids in \[0, 3\) or -100, got 3"):
        linear_cross_entropy(**given | {"target": given["target"] + 1})


@pytest.mark.parametrize("ignore_index", [-100, 3, 11, 300])
def test_wrong_targets_are_seen_whatever_is_ignored(ignore_index: int) -> None:
    for wrong in (-1, VOCABULARY, VOCABULARY + 5):
        if wrong == ignore_index:
            continue
        given = case()
        given["target"].clamp_(min=0)[0, 2:4] = torch.tensor([ignore_index, wrong])
        with pytest.raises(ValueError, match=rf"target: expected ids in \[0, 11\) or {ignore_index}, got {wrong}"):
            linear_cross_entropy(**given, ignore_index=ignore_index)


@pytest.mark.parametrize("impl", LOSS_IMPLS)
@pytest.mark.parametrize(("shape", "vocabulary"), [((3, 0), 5), ((0, 4), 5), ((0, 4), 0), ((0, 0), 3)])
def test_linear_loss_of_no_numbers(shape: tuple[int, int], vocabulary: int, impl: str) -> None:
    given: dict[str, Any] = {"input": torch.ones(shape), "linear_weight": torch.ones(vocabulary, shape[1])}
    given = placed(given | {"target": torch.zeros(shape[0], dtype=torch.int64)}, impl)
    x, weight = given["input"].requires_grad_(), given["linear_weight"].requires_grad_()
    loss = linear_cross_entropy(**given, impl=impl)
    assert loss.item() == pytest.approx(0.0 if shape[0] == 0 else torch.tensor(float(vocabulary)).log().item())
    assert [g.shape for g in torch.autograd.grad(loss, (x, weight))] == [x.shape, weight.shape]


@pytest.mark.parametrize("scale", [1.0, 2.0**16])
def test_float16_gradients_are_scaled_before_they_are_rounded(scale: float) -> None:
    """A scaled loss is there to keep small gradients from vanishing, and 65536 itself is beyond float16."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(300, 16, generator=generator), 0.1 * torch.randn(2000, 16, generator=generator)
    target, share = torch.randint(2000, (300,), generator=generator), torch.full((300,), 1e-5)
    found = []
    for function, dtype in ((linear_cross_entropy, torch.float16), (eager, torch.float16), (eager, torch.float64)):
        tensors = [tensor.to(dtype).requires_grad_() for tensor in (x, weight)]
        loss = function(*tensors, target, weight_per_row=share, reduction="sum")
        found.append([g.double() / scale for g in torch.autograd.grad(loss * scale, tensors)])
    ours, theirs, truth = found
    for mine, other, exact in zip(ours, theirs, truth, strict=True):
        error, peers = ((g - exact).norm() / exact.norm() for g in (mine, other))
        assert error < max(2e-3, 1.5 * peers.item())


@pytest.mark.parametrize("impl", LOSS_IMPLS)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_linear_loss_backward_twice(reduction: str, impl: str) -> None:
    given = placed(case(), impl)
    given["linear_weight"].requires_grad_()
    loss = linear_cross_entropy(**given, reduction=reduction, impl=impl).sum()
    (first,) = torch.autograd.grad(loss, given["linear_weight"], retain_graph=True)
    before = first.clone()
    first.zero_()  # what a caller does with a gradient does not reach the next
    (second,) = torch.autograd.grad(loss, given["linear_weight"])
    assert torch.equal(second, before)


class Largest(TorchDispatchMode):
    """The largest tensor that is made, and the names of ops."""

    def __init__(self) -> None:
        super().__init__()
        self.numel, self.names = 0, set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.names.add(func._schema.name)
        for tensor in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return made


GIVEN = case()
# fmt: off
BAD_LINEAR: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"input": GIVEN["target"]}, TypeError, "input: expected floating numbers.*int64"),
    ({"linear_weight": GIVEN["linear_weight"][:, 1:]}, ValueError, r"linear_weight: expected \(V, 6\).*\(11, 5\)"),
    ({"linear_weight": GIVEN["linear_weight"].float()}, ValueError, "linear_weight: .*float64.*got torch.float32"),
    ({"target": GIVEN["target"].double()}, ValueError, "target: expected int32 or int64.*float64"),
    ({"target": GIVEN["target"][1:]}, ValueError, r"target: expected int32 or int64 \(4, 5\).*\(3, 5\)"),
    ({"target": GIVEN["target"] + 5}, ValueError, r"target: expected ids in \[0, 11\) or -100, got"),
    ({"target": GIVEN["target"].clamp(min=-7)}, ValueError, r"target: expected ids in \[0, 11\) or -100, got -7"),
    ({"linear_bias": GIVEN["linear_bias"][1:]}, ValueError, r"linear_bias: expected \(11,\).*\(10,\)"),
    ({"weight_per_row": GIVEN["linear_bias"]}, ValueError, r"weight_per_row: expected the shape of target.*\(11,\)"),
    ({"weight_per_row": torch.rand(4, 5, requires_grad=True)}, ValueError, "weight_per_row: .*without a gradient"),
    ({"reduction": "median"}, ValueError, "reduction: expected 'mean', 'sum' or 'none', got 'median'"),
    ({"label_smoothing": 1.5}, ValueError, "label_smoothing: expected a number between 0 and 1, got 1.5"),
    ({"ignore_index": None}, TypeError, "ignore_index: expected an int, got None"),
    ({"impl": "cuda"}, ValueError, "impl: expected None or one of reference, cpp, triton, got 'cuda'"),
]
# fmt: on


@pytest.mark.parametrize(("arguments", "error", "message"), BAD_LINEAR)
def test_linear_loss_names_what_is_wrong(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        linear_cross_entropy(**GIVEN | arguments)
