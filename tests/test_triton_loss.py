"""The Triton kernel of the loss, without a GPU in its interpreter, against float64: values, edges, memory."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from oracle import DEVICE
from torch import Tensor

from fastmlm import chunked
from fastmlm.kernels.gpu import linear_cross_entropy as kernel

ROWS = 4
NOWHERE = -12345.0
IGNORED = 7  # an id like others: only equality counts
# Vectors hold 2, 4 or 8 ids, blocks 512, 1024 or 2048: less than a vector, a whole one, blocks with and without a rest.
WIDTHS = [1, 8, 33, 1000, 2048, 2049, 4500]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


class Batch:
    """Logits in a buffer as the kernel wants it, between rows that must stay as they are; what is to be written."""

    def __init__(self, vocabulary: int, dtype: torch.dtype, spread: float = 3.0) -> None:
        generator = torch.Generator().manual_seed(vocabulary)
        wide = torch.promote_types(dtype, torch.float32)
        self.chunks = kernel._Chunks(IGNORED)
        self.around = self.chunks.buffer(torch.empty(0, dtype=dtype, device=DEVICE), ROWS + 2, vocabulary)
        whole = self.around.as_strided((ROWS + 2, self.around.stride(0)), (self.around.stride(0), 1))
        whole.fill_(torch.nan)  # between the rows, too
        self.around[[0, -1]] = NOWHERE
        self.logits = self.around[1:-1]
        self.logits.copy_(spread * torch.randn(ROWS, vocabulary, generator=generator))
        self.bias = torch.randn(vocabulary, generator=generator).to(DEVICE, dtype)
        target = torch.randint(vocabulary, (ROWS,), generator=generator)
        target[0], target[1] = 0, vocabulary - 1
        self.target = target.where(target != IGNORED, 0).to(DEVICE)
        self.scale = (torch.rand(ROWS, generator=generator) + 0.5).to(DEVICE, wide)
        self.losses = torch.full((ROWS + 2,), NOWHERE, dtype=wide, device=DEVICE)
        self.grad_bias = torch.zeros(vocabulary, dtype=wide, device=DEVICE)
        self.ranks = torch.full((ROWS + 2,), -7, device=DEVICE)

    def run(self, bias: bool = True, smoothing: float = 0.0, with_grad: bool = True, ranks: bool = True) -> None:
        self.chunks.cross_entropy(
            self.logits, self.bias if bias else None, self.target, self.scale, smoothing, self.losses[1:-1],
            self.grad_bias if with_grad else None, self.ranks[1:-1] if ranks else None, with_grad,
        )  # fmt: skip
        assert (self.losses[[0, -1]] == NOWHERE).all()
        assert (self.ranks[[0, -1]] == -7).all()
        assert (self.around[[0, -1]] == self.around[0, 0]).all()

    def expected(self, bias: bool = True, smoothing: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
        """Losses, gradients of the logits and ranks, in float64, of the logits before they were run."""
        logits = self.logits.double().requires_grad_()
        full = logits + self.bias.double() if bias else logits
        losses = F.cross_entropy(full, self.target, label_smoothing=smoothing, reduction="none")
        (gradients,) = torch.autograd.grad((losses * self.scale).sum(), logits)
        # In the type that the kernel adds in, so that what is equal there is equal here.
        wide = self.losses.dtype
        added = self.logits.to(wide) + self.bias.to(wide) if bias else self.logits.to(wide)
        return losses.detach(), gradients, chunked.rank_of_targets(added, self.target)


# ---- The kernel ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", WIDTHS)
def test_values(vocabulary: int, dtype: torch.dtype) -> None:
    for bias, smoothing in ((True, 0.0), (False, 0.0), (True, 0.2), (False, 1.0)):
        batch = Batch(vocabulary, dtype)
        losses, gradients, ranks = batch.expected(bias, smoothing)
        batch.run(bias, smoothing)
        unit, wide = torch.finfo(dtype).eps, torch.finfo(batch.losses.dtype).eps
        torch.testing.assert_close(batch.losses[1:-1].double(), losses, rtol=8 * wide, atol=16 * wide)
        # Of exponents up to 20 the last digit counts 20 times; the smallest numbers of float16 lie 6e-8 apart.
        close = {"rtol": max(unit, 64 * wide), "atol": max(4 * wide, 3e-8 if dtype == torch.float16 else 0)}
        torch.testing.assert_close(batch.logits.double(), gradients, **close)
        summed = {"rtol": 2 * unit, "atol": 64 * unit}  # of what was rounded
        torch.testing.assert_close(batch.grad_bias.double(), gradients.sum(0), **summed)
        torch.testing.assert_close(batch.grad_bias.double(), batch.logits.double().sum(0), rtol=8 * wide, atol=8 * wide)
        assert torch.equal(batch.ranks[1:-1], ranks)


@pytest.mark.parametrize("vocabulary", [33, 3000])
def test_without_gradients_the_logits_stay(vocabulary: int) -> None:
    batch = Batch(vocabulary, torch.bfloat16)
    before, (losses, _, _) = batch.logits.clone(), batch.expected()
    batch.run(with_grad=False, ranks=False)
    assert torch.equal(batch.logits, before)
    torch.testing.assert_close(batch.losses[1:-1].double(), losses, rtol=1e-6, atol=2e-6)
    assert (batch.ranks == -7).all()


@pytest.mark.parametrize("with_grad", [True, False])
@pytest.mark.parametrize("vocabulary", [33, 3000])
def test_ignored_rows_are_not_read(vocabulary: int, with_grad: bool) -> None:
    batch = Batch(vocabulary, torch.bfloat16)
    losses, gradients, ranks = batch.expected()
    batch.target[1] = batch.target[3] = IGNORED
    batch.logits[1], batch.logits[3], batch.scale[1] = torch.nan, torch.inf, torch.nan
    before = batch.logits.clone()
    batch.run(with_grad=with_grad)
    found = batch.losses[1:-1], batch.ranks[1:-1]
    for row in (1, 3):
        assert (found[0][row], found[1][row]) == (0, -1)
        assert with_grad or torch.equal(batch.logits[row].isnan(), before[row].isnan())
        assert not with_grad or not batch.logits[row].any()
    for row in (0, 2):
        torch.testing.assert_close(found[0][row].double(), losses[row], rtol=1e-6, atol=2e-6)
        assert found[1][row] == ranks[row]
    if with_grad:
        torch.testing.assert_close(batch.grad_bias.double(), (gradients[0] + gradients[2]), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("wrong", [-1, 33, 38, 64, 1 << 40, -(1 << 40), (1 << 32) + 5])
def test_wrong_targets_make_their_loss_nan(wrong: int) -> None:
    """And their gradients, so that nobody trains on; nothing is read or written elsewhere."""
    batch = Batch(33, torch.float32)
    losses, gradients, _ = batch.expected()
    batch.target[2] = wrong
    batch.run()
    others = [0, 1, 3]
    torch.testing.assert_close(batch.losses[1:-1][others].double(), losses[others], rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(batch.logits[others].double(), gradients[others], rtol=1e-5, atol=1e-6)
    assert batch.losses[3].isnan()
    assert batch.logits[2].isnan().all()


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # the interpreter's numpy
@pytest.mark.filterwarnings("ignore:divide by zero encountered:RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [5, 40])
def test_what_is_not_finite(vocabulary: int, dtype: torch.dtype) -> None:
    """NaN and infinite logits make NaN losses, as in PyTorch; -inf is a probability of 0, and a loss of inf."""
    for place, value in itertools.product((0, vocabulary - 1), (torch.nan, torch.inf, -torch.inf)):
        batch = Batch(vocabulary, dtype)
        batch.target.fill_(1)
        batch.logits[0, place], batch.logits[1, 1] = value, value
        batch.logits[2, 1], batch.logits[3] = -torch.inf, -torch.inf
        losses, gradients, ranks = batch.expected()
        batch.run()
        torch.testing.assert_close(batch.losses[1:-1].double(), losses, rtol=1e-6, atol=2e-6, equal_nan=True)
        assert torch.equal(batch.logits.isnan(), gradients.isnan())
        assert torch.equal(batch.logits[0] == 0, gradients[0] == 0)
        assert torch.equal(batch.ranks[1:-1], ranks)
        assert batch.losses[3] == torch.inf


def test_exponentials_over_their_whole_range() -> None:
    batch = Batch(400, torch.float32, spread=0)
    batch.logits[:, 1:] = -torch.linspace(0, 120, ROWS * 399, device=DEVICE).view(ROWS, -1)
    batch.target.zero_()
    batch.scale.fill_(1)
    losses, gradients, _ = batch.expected(bias=False)
    batch.run(bias=False)
    # The exponent is rounded: 120 * 2^-24. Denormal numbers may be 0.
    torch.testing.assert_close(batch.logits[:, 1:].double(), gradients[:, 1:], rtol=1e-5, atol=2e-38)
    assert losses[0] > 1  # and others are as good as 0
    torch.testing.assert_close(batch.losses[1:-1].double(), losses, rtol=1e-6, atol=1e-7)


def test_logits_far_from_0() -> None:
    """What all of them have in common does not matter, but for the digits it takes from float32."""
    batch = Batch(300, torch.float32)
    batch.bias += 1e5
    for smoothing in (0.0, 0.1):
        losses, _, _ = batch.expected(smoothing=smoothing)
        batch.run(smoothing=smoothing, with_grad=False)
        torch.testing.assert_close(batch.losses[1:-1].double(), losses, rtol=0, atol=4 * 1e5 * 2.0**-24)


def test_a_small_loss_of_large_logits_keeps_its_digits() -> None:
    """It would have none in the logarithm of the whole sum, which is 4096.0018."""
    batch = Batch(300, torch.float32, spread=0)
    batch.logits.fill_(4084)
    batch.logits.scatter_(1, batch.target[:, None], 4096)
    losses, gradients, _ = batch.expected(bias=False)
    batch.run(bias=False)
    torch.testing.assert_close(batch.losses[1:-1].double(), losses, rtol=5e-4, atol=0)
    torch.testing.assert_close(batch.logits.double(), gradients, rtol=5e-4, atol=0)


def test_ranks_of_equal_logits_go_by_id() -> None:
    batch = Batch(2100, torch.bfloat16, spread=0)
    batch.target = torch.tensor([0, 6, 2047, 2099], device=DEVICE)
    batch.run(bias=False)
    assert batch.ranks[1:-1].tolist() == batch.target.tolist()


def test_more_than_two_to_the_31_logits() -> None:
    """In one chunk: where its last row lies does not fit into 32 bits. The memory in between is never touched."""
    width, vocabulary = 1 << 30, 33
    logits = torch.empty(2 * width + 64, dtype=torch.bfloat16, device=DEVICE).as_strided((3, vocabulary), (width, 1))
    logits.zero_()[2, 5] = 10
    target, losses = torch.full((3,), 5, device=DEVICE), torch.empty(3, device=DEVICE)
    kernel._Chunks(-100).cross_entropy(logits, None, target, torch.ones_like(losses), 0.0, losses, None, None, True)
    expected = F.cross_entropy(torch.eye(33)[5][None].double() * 10, torch.tensor([5])).item()
    assert losses.tolist() == pytest.approx([torch.tensor(33.0).log().item()] * 2 + [expected], rel=1e-5)
    assert logits[2, 0].item() == pytest.approx(1 / (32 + torch.tensor(10.0).exp().item()), rel=2**-8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [1, 33, 64, 1000, 30522, 50368])
def test_rows_of_logits_are_aligned(dtype: torch.dtype, vocabulary: int) -> None:
    buffer = kernel._Chunks(-100).buffer(torch.empty(0, dtype=dtype), 3, vocabulary)
    assert buffer.shape == (3, vocabulary)
    assert buffer.stride(1) == 1
    assert buffer.stride(0) % 16 == 0  # which Triton looks for
    assert buffer.stride(0) * buffer.itemsize % 128 == 0
    assert (buffer.stride(0) - vocabulary) * buffer.itemsize < 128


def test_rows_of_a_chunk() -> None:
    for vocabulary, dtype, rows in ((30522, torch.bfloat16, 8794), (30522, torch.float32, 4397), (1 << 18, None, 2048)):
        weight = torch.empty(vocabulary, 8, dtype=dtype, device="meta")
        assert kernel._Chunks(-100).rows(100_000, weight) == rows
