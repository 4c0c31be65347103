"""Sampling as one Triton kernel: a program takes a row, reads each logit once, and keeps the best score of each place.

By the draw law one Philox block serves four ids 16 apart, so each of a program's (block, lane) elements draws once for
four logits; the 16 lanes are neighbours in memory.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastmlm.kernels.gpu.masking import _philox
from fastmlm.philox import BLOCK, GUMBEL, LANES

_BLOCK, _LANES, _GUMBEL = tl.constexpr(BLOCK), tl.constexpr(LANES), tl.constexpr(GUMBEL)
_NO_ID = tl.constexpr((1 << 31) - 1)
_SERIES = tl.constexpr(1 / 16)  # below it, 1 - x would keep less than 20 bits of x

_BLOCKS = 32  # of 64 ids, at a time
_WARPS = 4  # with which a thread has 16 of them


@triton.jit
def _log_exponential(draw):
    """log(E) of draws: either end of E keeps its digits."""
    upper = draw >= 0x80000000
    x = (tl.where(upper, draw ^ 0xFFFFFFFF, draw).to(tl.float32) + 0.5) * (1 / 4294967296)  # or 1 - x, if smaller
    series = 1 / 5 + x * (1 / 6 + x * (1 / 7))
    series = x * (1 + x * (1 / 2 + x * (1 / 3 + x * (1 / 4 + x * series))))
    exponential = tl.where(upper | (x > _SERIES), -tl.log(tl.where(upper, x, 1 - x)), series)
    return tl.log(exponential)


@triton.jit(do_not_specialize=("seed", "vocab_size"))
def _sample_rows(
    logits, tokens, device_seed, row_keys, seed, stride, vocab_size, scale, BLOCKS: tl.constexpr
):  # fmt: skip
    """A program for a row."""
    row = tl.program_id(0).to(tl.int64)  # int64 before it multiplies: there may be more than 2^31 logits
    logits += row * stride
    row_key = tl.load(row_keys + row)
    key = seed.to(tl.int64)
    if device_seed is not None:
        key = tl.load(device_seed)
    block, lane = tl.arange(0, BLOCKS)[:, None], tl.arange(0, _LANES)[None, :]
    best = tl.full((BLOCKS, _LANES), float("-inf"), tl.float32)
    token = tl.full((BLOCKS, _LANES), _NO_ID, tl.int32)
    bad = tl.zeros((BLOCKS, _LANES), tl.int32)
    for start in range(0, vocab_size, BLOCKS * _BLOCK):
        draws = _philox(key, (block + start // _BLOCK) * _LANES + lane, _GUMBEL, row_key)
        for word in tl.static_range(4):
            id_ = block * _BLOCK + lane + (start + word * _LANES)
            x = tl.load(logits + id_, mask=id_ < vocab_size, other=float("-inf")).to(tl.float32)
            score = x * scale - _log_exponential(draws[word])
            bad |= ((score < float("inf")) == 0).to(tl.int32)  # NaN, too
            better = score > best  # of equal ones the first wins
            best = tl.where(better, score, best)
            token = tl.where(better, id_, token)
    top = tl.max(tl.max(best, 1), 0)
    first = tl.min(tl.min(tl.where(best == top, token, _NO_ID), 1), 0)
    none = (tl.max(tl.max(bad, 1), 0) > 0) | (top == float("-inf"))
    tl.store(tokens + row, tl.where(none, -1, first).to(tl.int64))


def sample_tokens(
    logits: Tensor, seed: int, device_seed: Tensor | None, row_keys: Tensor, temperature: float
) -> Tensor:
    """Launch the kernel; arguments as :mod:`fastmlm._ops` describes them."""
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    tokens = torch.empty_like(row_keys)
    rows, vocab_size = logits.shape
    with torch.cuda.device_of(logits):
        _sample_rows[(rows,)](
            logits, tokens, device_seed, row_keys, seed, logits.stride(0), vocab_size, 1 / temperature,
            BLOCKS=min(_BLOCKS, triton.next_power_of_2(triton.cdiv(vocab_size, BLOCK))), num_warps=_WARPS,
            enable_fp_fusion=True,
        )  # fmt: skip
    return tokens
