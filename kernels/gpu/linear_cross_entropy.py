"""The loss of a linear layer on a GPU: matrix products by PyTorch, and one Triton kernel for what lies between them.

A program takes one row of a chunk's logits and goes over it twice: for the sum of exponentials, the loss and the rank
of the target, and then to put the gradients where the logits were. The 16 bytes that a thread loads at a time are a
vector; each vector of a block keeps a maximum and a sum of its own, so that threads wait for each other but once a row.

Nothing here waits for the GPU or depends on values, and a CUDA graph can hold all of it: rows that are ignored are not
dropped, for which somebody would have to know how many they are, but found by their programs, which write zeros.
"""

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from fastmlm import chunked

_LOG2E = tl.constexpr(1.4426950408889634)
_LOWEST = tl.constexpr(-1e38)  # where maxima start, below all logits, and a number: -inf less itself would be NaN

_VECTOR = 16  # bytes that a thread loads at once
_BLOCK = 4096  # bytes that a program does; with 4 warps, two vectors a thread: 5 programs run on a multiprocessor
_ALIGNED = 128  # bytes; where rows of logits start


@triton.jit
def _exp(x):
    return tl.exp2(x * _LOG2E)  # tl.exp takes three instructions more, to keep denormal numbers


@triton.jit
def _columns(start, BLOCK: tl.constexpr, VECTOR: tl.constexpr):
    """The ids of a block, (vectors, ids of a vector)."""
    return start + tl.arange(0, BLOCK // VECTOR)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]


@triton.jit
def _load(logits, bias, column, width, vocab_size, WIDE: tl.constexpr, WHOLE: tl.constexpr):
    """Logits with the bias, -inf beyond the vocabulary; a whole block has nothing there.

    Bounded by the width of a row in memory, of which the compiler knows that it divides into vectors.
    """
    in_bounds = None if WHOLE else column < width
    x = tl.load(logits + column, mask=in_bounds).to(WIDE)
    if not WHOLE:
        x = tl.where(column < vocab_size, x, float("-inf"))
    if bias is not None:
        x += tl.load(bias + column, mask=in_bounds).to(WIDE)
    return x


@triton.jit
def _reduce_block(
    state, logits, bias, chosen, target, start, width, vocab_size,
    SMOOTH: tl.constexpr, RANK: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Take a block into the state of each vector's place: maximum, exponentials, sum and ids that beat the target."""
    before, exponentials, added, beaten = state
    column = _columns(start, BLOCK, VECTOR)
    x = _load(logits, bias, column, width, vocab_size, before.dtype, WHOLE)
    largest = tl.maximum(before, tl.max(x, 1))  # of numbers; a NaN gets into the exponentials
    exponentials = exponentials * _exp(before - largest) + tl.sum(_exp(x - largest[:, None]), 1)
    if SMOOTH:
        added += tl.sum(x if WHOLE else tl.where(column < vocab_size, x, 0.0), 1)
    if RANK:
        beats = ((x <= chosen) == 0) | ((x == chosen) & (column < target))
        if not WHOLE:
            beats &= column < vocab_size
        beaten += tl.sum(beats.to(tl.int32), 1)
    return largest, exponentials, added, beaten


@triton.jit
def _reduce(
    logits, bias, chosen, target, width, vocab_size,
    SMOOTH: tl.constexpr, RANK: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Of a row: the largest logit, the sum of exponentials of what is left without it, the sum of logits, the rank."""
    zeros = tl.zeros((BLOCK // VECTOR,), chosen.dtype)
    state = (zeros + _LOWEST, zeros, zeros, tl.zeros((BLOCK // VECTOR,), tl.int32))
    end = vocab_size // BLOCK * BLOCK
    for start in range(0, end, BLOCK):
        state = _reduce_block(
            state, logits, bias, chosen, target, start, width, vocab_size, SMOOTH, RANK, BLOCK, VECTOR, True
        )  # fmt: skip
    largest, exponentials, added, beaten = _reduce_block(
        state, logits, bias, chosen, target, end, width, vocab_size, SMOOTH, RANK, BLOCK, VECTOR, False
    )  # fmt: skip
    top = tl.max(largest, 0)
    return top, tl.sum(exponentials * _exp(largest - top), 0), tl.sum(added, 0), tl.sum(beaten, 0)


@triton.jit
def _differentiate_block(
    logits, bias, target, top, share, of_target, of_each, start, width, vocab_size,
    SMOOTH: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    column = _columns(start, BLOCK, VECTOR)
    x = _load(logits, bias, column, width, vocab_size, top.dtype, WHOLE)
    grad = _exp(x - top) * share - tl.where(column == target, of_target, 0.0)
    if SMOOTH:
        grad -= of_each
    tl.store(logits + column, grad, mask=None if WHOLE else column < width)


# What changes from call to call and chunk to chunk, and is no reason to compile anew: a program reads it once.
@triton.jit(
    do_not_specialize=("vocab_size", "ignore_index"),
    do_not_specialize_on_alignment=("targets", "scales", "losses", "ranks"),
)
def _cross_entropy(
    logits, bias, targets, scales, losses, ranks, width, vocab_size, ignore_index,
    SMOOTHING: tl.constexpr, WITH_GRAD: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """A program for a row; rows lie ``width`` ids apart, and what lies between them is overwritten."""
    WIDE: tl.constexpr = losses.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)  # int64 before it multiplies: a chunk may have more than 2^31 logits
    logits += row * width
    label = tl.load(targets + row)
    if label == ignore_index:  # whatever its logits are, they are not read
        tl.store(losses + row, tl.zeros((), WIDE))
        if ranks is not None:
            tl.store(ranks + row, -1)
        if WITH_GRAD:
            for start in range(0, width, BLOCK):
                column = _columns(start, BLOCK, VECTOR)
                tl.store(logits + column, tl.zeros((BLOCK // VECTOR, VECTOR), WIDE), mask=column < width)
    else:
        # Targets are not checked on a GPU: a wrong one has a logit of NaN, and so become the loss and the gradients.
        is_id = (label >= 0) & (label < vocab_size)
        target = tl.where(is_id, label, -1).to(tl.int32)
        chosen = tl.load(logits + target, mask=is_id, other=float("nan")).to(WIDE)
        if bias is not None:
            chosen += tl.load(bias + target, mask=is_id, other=0.0).to(WIDE)
        scale = tl.where(is_id, tl.load(scales + row), float("nan"))
        top, total, added, beaten = _reduce(
            logits, bias, chosen, target, width, vocab_size, SMOOTHING > 0, ranks is not None, BLOCK, VECTOR
        )  # fmt: skip
        # From the difference to the largest logit, so that a loss near 0 keeps its digits.
        loss = (top - chosen) * (1 - SMOOTHING) + tl.log(total)
        if SMOOTHING > 0:
            loss += (top - added / vocab_size.to(WIDE)) * SMOOTHING
        tl.store(losses + row, loss)
        if ranks is not None:
            tl.store(ranks + row, beaten.to(tl.int64))
        if WITH_GRAD:
            share, of_target, of_each = scale / total, scale * (1 - SMOOTHING), scale * SMOOTHING / vocab_size.to(WIDE)
            end = vocab_size // BLOCK * BLOCK
            for start in range(0, end, BLOCK):
                _differentiate_block(
                    logits, bias, target, top, share, of_target, of_each, start, width, vocab_size,
                    SMOOTHING > 0, BLOCK, VECTOR, True,
                )  # fmt: skip
            _differentiate_block(
                logits, bias, target, top, share, of_target, of_each, end, width, vocab_size,
                SMOOTHING > 0, BLOCK, VECTOR, False,
            )  # fmt: skip


def shape_of_program(vocab_size: int, itemsize: int) -> dict[str, Any]:
    """How many ids a program does at a time and a thread loads at once, and Triton's options."""
    vector = _VECTOR // itemsize
    block = min(_BLOCK // itemsize, triton.next_power_of_2(max(vocab_size, vector)))
    warps = max(4 * block * itemsize // _BLOCK, 1)
    return {"BLOCK": block, "VECTOR": vector, "num_warps": warps, "enable_fp_fusion": True}


class _Chunks(chunked.Chunks):
    """Chunks that keep the rows that are ignored, whose target this is."""

    drops_ignored = False

    def __init__(self, ignore_index: int) -> None:
        self.ignore_index = ignore_index

    def rows(self, count: int, weight: Tensor) -> int:
        """As many as fit into 512 MiB, and at least 2048: by the data sheet of an H200, less would save little.

        Each of several chunks reads and writes the sum of the weight's gradients in float32, which at 800 rows takes as
        long as the product it adds, and at 2048 two fifths of that. The sum itself takes as much memory as the logits
        of 2 H rows in 16 bits. And the gradient of the input, rows by H, is a small product for a GPU to fill.
        """
        return max((1 << 29) // max(len(weight) * weight.itemsize, 1), 2048)

    def buffer(self, like: Tensor, rows: int, vocab_size: int) -> Tensor:
        """Rows that start at multiples of 128 bytes, whatever V is: so they are read and written 16 bytes at a time."""
        ids = _ALIGNED // like.itemsize
        return like.new_empty(rows, -(-vocab_size // ids) * ids)[:, :vocab_size]

    def cross_entropy(
        self, logits: Tensor, bias: Tensor | None, target: Tensor, scale: Tensor, label_smoothing: float,
        losses: Tensor, grad_bias: Tensor | None, ranks: Tensor | None, with_grad: bool,
    ) -> None:  # fmt: skip
        rows, vocab_size = logits.shape
        width = logits.stride(0)
        if bias is not None:
            bias = F.pad(bias, (0, width - vocab_size)).contiguous()
        _cross_entropy[(rows,)](
            logits, bias, target, scale, losses, ranks, width, vocab_size, self.ignore_index,
            SMOOTHING=label_smoothing, WITH_GRAD=with_grad, **shape_of_program(vocab_size, logits.itemsize),
        )  # fmt: skip
        if grad_bias is not None:  # in a fixed order, which atomic additions in the kernel would not have
            grad_bias += logits.sum(0, dtype=grad_bias.dtype)

    def weight_gradient(self, weight: Tensor, several: bool) -> chunked.WeightGradient:
        if several and weight.itemsize == 2 and _adds_in_float32(weight.dtype, weight.device):
            return _Sums(weight, several)
        return super().weight_gradient(weight, several)


class _Sums(chunked.WeightGradient):
    """Products in 16 bits, added to a sum in float32 within the matrix product, without being rounded before."""

    def add(self, grad: Tensor, x: Tensor) -> None:
        beta = 0 if self.empty else 1
        torch.addmm(self.sum, grad.t(), x, out_dtype=torch.float32, beta=beta, out=self.sum)
        self.empty = False


@lru_cache(maxsize=16)
def _adds_in_float32(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether PyTorch has such products, by way of trial: for CUDA, since it takes a sum in float32 (its PR 167931)."""
    x = torch.zeros(16, 16, dtype=dtype, device=device)
    added = x.float()
    try:
        torch.addmm(added, x, x, out_dtype=torch.float32, out=added)
    except (RuntimeError, TypeError):  # refused before anything runs, also while a graph is captured
        return False
    return True


def linear_cross_entropy(
    input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, scale: Tensor | None, ignore_index: int,
    *arguments: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """As `fastmlm.chunked.linear_cross_entropy`, of tensors on a GPU, which may be another than the current one."""
    chunks = _Chunks(ignore_index)
    with torch.cuda.device_of(input):
        return chunked.linear_cross_entropy(
            input, weight, bias, target, scale, ignore_index, *arguments, chunks=chunks
        )  # fmt: skip
