"""``linear_cross_entropy`` on gathered rows, forward and backward, against PyTorch's own and against eager PyTorch."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from fastmlm.loss import linear_cross_entropy

# Rows, H and V of a batch of 16×256 (4×256 where V is large), 15 % of it selected.
SHAPES = {
    "BERT-base": (614, 768, 30522),
    "ModernBERT-base": (614, 768, 50368),
    "mmBERT-base": (154, 768, 256_000),
    "XLM-R base": (154, 768, 250_002),
    "ESM-2 650M": (614, 1280, 33),
}


def torch_loss(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.linear_cross_entropy(x, weight, target, linear_bias=bias)


def eager_loss(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(x, weight, bias).float(), target)


def our_loss(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return linear_cross_entropy(x, weight, target, linear_bias=bias)


PEERS = {"F.linear_cross_entropy": torch_loss, "F.cross_entropy(F.linear(...))": eager_loss}


@pytest.mark.parametrize("peer", PEERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SHAPES)
def bench_linear_cross_entropy(compare: Callable[..., None], name: str, dtype: torch.dtype, peer: str) -> None:
    rows, width, vocabulary = SHAPES[name]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, width, generator=generator).to(dtype).requires_grad_()
    weight = (0.02 * torch.randn(vocabulary, width, generator=generator)).to(dtype).requires_grad_()
    bias = torch.zeros(vocabulary, dtype=dtype, requires_grad=True)
    target = torch.randint(vocabulary, (rows,), generator=generator)

    def step(loss: Callable[..., torch.Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(loss(x, weight, target, bias), (x, weight, bias))

    compare(
        step(our_loss),
        step(PEERS[peer]),
        case=f"loss, {name} shape (K={rows}, H={width}, V={vocabulary}), {str(dtype).removeprefix('torch.')}",
        ours_name="linear_cross_entropy",
        peer_name=peer,
        rounds=5,
        calls=1,
        threads=torch.get_num_threads(),
    )
