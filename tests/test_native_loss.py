"""The native kernels of the loss, for each instruction set, against float64: values, edges, memory, threads."""

import itertools
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastmlm import chunked
from fastmlm.kernels.cpu import _native
from fastmlm.kernels.cpu.linear_cross_entropy import _CHUNKS, _Sums

ROWS = 23
# Around the widths of vectors (4, 8, 16) and the blocks of sums (256, 512, 1024).
WIDTHS = [1, 3, 4, 15, 16, 17, 33, 255, 257, 1025, 4100]
DTYPES = [torch.float32, torch.bfloat16]
NOWHERE = -12345.0


@pytest.fixture(params=_native.isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    yield _native.select_isa(request.param)
    _native.select_isa(None)


class Batch:
    """Logits inside of a larger tensor, whose rest must stay as it is, and what the kernel writes beside them."""

    def __init__(self, width: int, dtype: torch.dtype, spread: float = 3.0) -> None:
        generator = torch.Generator().manual_seed(width)
        self.around = torch.full((ROWS * width + 64,), NOWHERE, dtype=dtype)
        self.logits = self.around[32 : 32 + ROWS * width].view(ROWS, width)
        self.logits.copy_(spread * torch.randn(ROWS, width, generator=generator))
        self.bias = torch.randn(width, generator=generator).to(dtype)
        self.target = torch.randint(width, (ROWS,), generator=generator)
        self.scale = torch.rand(ROWS, generator=generator) + 0.5
        self.losses = torch.full((ROWS + 2,), NOWHERE)
        self.grad_bias = torch.zeros(width)
        self.ranks = torch.full((ROWS,), -7)

    def run(self, bias: bool = True, smoothing: float = 0.0, with_grad: bool = True) -> None:
        _CHUNKS.cross_entropy(
            self.logits, self.bias if bias else None, self.target, self.scale, smoothing, self.losses[1:-1],
            self.grad_bias if with_grad else None, self.ranks, with_grad,
        )  # fmt: skip
        assert (self.losses[0], self.losses[-1]) == (NOWHERE, NOWHERE)
        assert (self.around[:32] == self.around[0]).all()
        assert (self.around[-32:] == self.around[0]).all()

    def expected(self, bias: bool = True, smoothing: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
        """Losses, gradients of the logits and ranks, in float64, of the logits before they were run."""
        logits = self.logits.double().requires_grad_()
        full = logits + self.bias.double() if bias else logits
        losses = F.cross_entropy(full, self.target, label_smoothing=smoothing, reduction="none")
        (gradients,) = torch.autograd.grad((losses * self.scale).sum(), logits)
        # In float32, so that what is equal there is equal here.
        added = self.logits.float() + self.bias.float() if bias else self.logits.float()
        return losses.detach(), gradients, chunked.rank_of_targets(added, self.target)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_values(isa: str, width: int, dtype: torch.dtype) -> None:
    for bias, smoothing in itertools.product((True, False), (0.0, 0.2, 1.0)):
        batch = Batch(width, dtype)
        losses, gradients, ranks = batch.expected(bias, smoothing)
        batch.run(bias, smoothing)
        # Exponentials are right to 2 units in the last place, and so are the sums: a few 2^-24 of the logits' size.
        torch.testing.assert_close(batch.losses[1:-1].double(), losses, rtol=1e-6, atol=2e-6)
        unit = torch.finfo(dtype).eps
        torch.testing.assert_close(batch.logits.double(), gradients, rtol=unit, atol=1e-6)
        torch.testing.assert_close(batch.grad_bias.double(), gradients.sum(0), rtol=1e-5, atol=5e-6)
        assert torch.equal(batch.ranks, ranks)


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_gradients_the_logits_stay(isa: str, dtype: torch.dtype) -> None:
    batch = Batch(33, dtype)
    before = batch.logits.clone()
    losses, _, _ = batch.expected()
    batch.run(with_grad=False)
    assert torch.equal(batch.logits, before)
    torch.testing.assert_close(batch.losses[1:-1].double(), losses, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("width", [5, 16, 40])
def test_exponentials_over_their_whole_range(isa: str, width: int) -> None:
    """Differences from 0 to beyond where float32 has numbers; a probability of 0 is 0, not something near it."""
    batch = Batch(width, torch.float32, spread=0)
    batch.logits[:, 0] = 0
    batch.logits[:, 1:] = -torch.linspace(0, 120, ROWS * (width - 1)).view(ROWS, -1)
    batch.target.zero_()
    batch.scale.fill_(1)
    _, gradients, _ = batch.expected(bias=False)
    far = batch.logits < -88
    batch.run(bias=False)
    others = (batch.logits[:, 1:].double(), gradients[:, 1:])
    torch.testing.assert_close(*others, rtol=4 * 2.0**-23, atol=1e-37)
    # The target's is a difference, p - 1.
    torch.testing.assert_close(batch.logits[:, 0].double(), gradients[:, 0], rtol=0, atol=2.0**-23)
    assert (batch.logits[far] == 0).all()
    assert far.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [5, 16, 40])
def test_what_is_not_finite(isa: str, width: int, dtype: torch.dtype) -> None:
    """NaN and infinite logits make NaN losses, as in PyTorch; -inf is a probability of 0, and a loss of inf."""
    for place, value in itertools.product((0, width - 1), (float("nan"), float("inf"), float("-inf"))):
        batch = Batch(width, dtype)
        batch.target.fill_(1)
        batch.logits[3, place] = value
        batch.logits[4, 1] = float("-inf")
        losses, gradients, ranks = batch.expected()
        batch.run()
        torch.testing.assert_close(batch.losses[1:-1].double(), losses, rtol=1e-6, atol=2e-6, equal_nan=True)
        assert torch.equal(batch.logits.isnan(), gradients.isnan())
        assert torch.equal(batch.logits[3] == 0, gradients[3] == 0)
        assert torch.equal(batch.ranks, ranks)
        assert batch.losses[5] == float("inf")


def test_ranks_of_equal_logits_go_by_id(isa: str) -> None:
    batch = Batch(37, torch.bfloat16, spread=0)  # all 0
    batch.target = torch.arange(ROWS)
    batch.run(bias=False)
    assert batch.ranks.tolist() == list(range(ROWS))


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_number_of_threads_gives_the_same(isa: str, dtype: torch.dtype) -> None:
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            batch = Batch(4100, dtype)  # enough for several
            batch.run()
            results.append(batch)
    finally:
        torch.set_num_threads(before)
    for batch in results[1:]:
        assert torch.equal(batch.losses, results[0].losses)
        assert torch.equal(batch.logits, results[0].logits)
        torch.testing.assert_close(batch.grad_bias, results[0].grad_bias, rtol=1e-5, atol=1e-6)  # another order


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 5), (5, 16), (37, 33), (2100, 7)])
def test_sums_in_24_bits(isa: str, rows: int, width: int) -> None:
    """Each addition is right to 2^-16 of the sum, where bfloat16 alone would be to 2^-8 and stand still."""
    generator = torch.Generator().manual_seed(0)
    sums = _Sums(torch.empty(rows, width, dtype=torch.bfloat16))
    exact = torch.zeros(rows, width, dtype=torch.float64)
    for _ in range(40):
        grad, x = torch.rand(1, rows, generator=generator), torch.rand(1, width, generator=generator)
        grad, x = grad.bfloat16(), x.bfloat16()
        sums.add(grad, x)
        exact += (grad.t() @ x).double()  # each product is rounded to bfloat16, as there
    kept = (sums.high.view(torch.int16).int() << 16 | sums.low.int() << 8).view(torch.float32)
    torch.testing.assert_close(kept.double(), exact, rtol=40 * 2.0**-17, atol=0)
    total = sums.total()
    assert total.dtype == torch.bfloat16
    torch.testing.assert_close(total, kept.bfloat16(), rtol=0, atol=0)


def test_sums_keep_what_is_not_finite(isa: str) -> None:
    sums = _Sums(torch.empty(3, 6, dtype=torch.bfloat16))
    x = torch.ones(1, 6, dtype=torch.bfloat16)
    for grad in ([1.0, float("inf"), float("nan")], [1.0, 1.0, 1.0]):
        sums.add(torch.tensor([grad], dtype=torch.bfloat16), x)
    total = sums.total()
    assert (total[0] == 2).all()
    assert total[1].isposinf().all()
    assert total[2].isnan().all()


@pytest.mark.slow
def test_more_than_two_to_the_31_logits(isa: str) -> None:
    """In one buffer: the offsets of its last rows do not fit into 32 bits."""
    rows, width = 16_400, 1 << 17
    logits = torch.zeros(rows, width, dtype=torch.bfloat16)
    target = torch.full((rows,), width - 1)
    logits[-1, -1] = 10
    losses, ranks = torch.empty(rows), torch.empty(rows, dtype=torch.int64)
    assert logits.numel() > 1 << 31
    _CHUNKS.cross_entropy(logits, None, target, torch.ones(rows), 0.0, losses, None, ranks, True)
    expected = F.cross_entropy(torch.tensor([[10.0] + [0.0] * (width - 1)]).double(), torch.tensor([0]))
    assert losses[-1].item() == pytest.approx(expected.item(), rel=1e-6)
    assert ranks[-1] == 0
    assert ranks[-2] == width - 1
    assert losses[:-1].allclose(torch.tensor(float(width)).log(), rtol=1e-6)
    assert logits[-1, 0].item() == pytest.approx(1 / (width - 1 + torch.tensor(10.0).exp().item()), rel=2**-8)
    assert logits[-2, -1].item() == pytest.approx(1 / width - 1, rel=2**-8)
