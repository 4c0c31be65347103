"""The random numbers behind every mask: counter-based, so a draw is a pure function of (key, row, position).

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) keyed and counted as follows; all
arithmetic is modulo 2^64, and int64 tensors hold the bits of unsigned numbers.

    draw_t(s) = word (s % 64) // 16 of Philox(counter = (16 * (s // 64) + s % 16, t, row_key low, row_key high),
                                              key = (key low, key high))

so one Philox block serves the positions s, s + 16, s + 32, s + 48: stripes of 16 lanes, which need no shuffles in
SIMD and stay coalesced on a GPU.

Streams ``t`` (a new use of randomness takes a new number here):

====  =================================================
0     selection; with counts, the order of a row's units
1     action (mask, random or keep) and the random id
2     the random id where an action covers a whole unit
3     spans: draw j is the length of the row's span j; for
      permutations, draws 2j and 2j + 1 its length and start
4     Gumbel noise: draw v is that of the id v
5     permutations
6     rates per row
7     modes: who sees whom in a row
8     hybrid objective: which tokens go one by one
====  =================================================
"""

from functools import lru_cache

import torch
from torch import Tensor

# Streams.
SELECT, ACTION, UNIT_ID, SPANS, GUMBEL, PERMUTATIONS, RATES, MODES, HALVES = range(9)

GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: splitmix64's increment
MIX_1, MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # splitmix64's finaliser
PHILOX_M0, PHILOX_M1 = 0xD2511F53, 0xCD9E8D57  # multipliers of Philox4x32
WEYL_0, WEYL_1 = 0x9E3779B9, 0xBB67AE85  # what a round adds to the key
ROUNDS = 10
BLOCK = 64  # positions whose draws come from the same 16 Philox blocks
LANES = 16

_LOW32 = 0xFFFFFFFF
_LOW64 = 0xFFFFFFFFFFFFFFFF


def as_int64(value: int) -> int:
    """The signed number with the same 64 bits, which is what int64 tensors hold."""
    value &= _LOW64
    return value - (1 << 64) if value >> 63 else value


def mix(z: int) -> int:
    """splitmix64's finaliser m(z) on Python integers, in [0, 2^64)."""
    z &= _LOW64
    z = (z ^ (z >> 30)) * MIX_1 & _LOW64
    z = (z ^ (z >> 27)) * MIX_2 & _LOW64
    return z ^ (z >> 31)


def fold(a: int, b: int) -> int:
    """Combine two 64-bit numbers into one: ``m(m(a + G) + b + G)``; order matters."""
    return mix(mix(a + GOLDEN) + b + GOLDEN)


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """Logical (unsigned) shift right of int64, whose own shift copies the sign bit."""
    return (z >> bits) & (_LOW64 >> bits)


def mix_tensor(z: Tensor) -> Tensor:
    """:func:`mix`, element by element, on int64."""
    z = (z ^ _shift_right(z, 30)) * as_int64(MIX_1)
    z = (z ^ _shift_right(z, 27)) * as_int64(MIX_2)
    return z ^ _shift_right(z, 31)


def fold_tensor(a: Tensor, b: Tensor) -> Tensor:
    """:func:`fold`, element by element, on int64 (broadcasting)."""
    golden = as_int64(GOLDEN)
    return mix_tensor(mix_tensor(a + golden) + b + golden)


def first_real(attention_mask: Tensor) -> Tensor:
    """``(attention_mask != 0).int().argmax(1)``: the column of each row's first real token, 0 where there is none."""
    if attention_mask.shape[1] == 0:
        return attention_mask.new_zeros(len(attention_mask), dtype=torch.int64)
    return (attention_mask != 0).to(torch.uint8).argmax(1)


def real_tokens(lengths: Tensor, width: int, left: bool) -> Tensor:
    """The attention mask of rows of these lengths, (B,): (B, width) int64."""
    column = torch.arange(width, device=lengths.device)
    real = lengths[:, None]
    return (column >= width - real if left else column < real).to(torch.int64)


def position_weights(length: int, device: torch.device) -> Tensor:
    """``m((s + 1) * G) | 1`` for s = 0 … length - 1, int64: the multipliers of the row hash."""
    # Lengths are rounded up, so that batches of many lengths share few tables.
    return _position_weights(max(512, 1 << max(length - 1, 0).bit_length()), device)[:length]


@lru_cache(maxsize=8)
def _position_weights(length: int, device: torch.device) -> Tensor:
    steps = torch.arange(1, length + 1, dtype=torch.int64, device=device)
    return mix_tensor(steps * as_int64(GOLDEN)) | 1


def row_keys(input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    """Name each row by its content: ``fold(sum((m((s + 1) * G) | 1) * id_s), n)`` over its n real tokens.

    The same tokens give the same key whatever the padding, batch, worker or device. Two different rows among n collide
    with probability about n² · 2⁻⁶⁵.

    Args:
        input_ids: (B, S) integers, before masking.
        attention_mask: (B, S), nonzero where a token is real; None: all are.

    Returns:
        (B,) int64, the bits of unsigned 64-bit keys.
    """
    rows, length = input_ids.shape
    ids = input_ids.to(torch.int64)
    weights = position_weights(length, input_ids.device)
    if attention_mask is None:
        return fold_tensor((ids * weights).sum(1), torch.full((rows,), length, device=ids.device))
    real = attention_mask != 0
    columns = torch.arange(length, device=ids.device) - first_real(attention_mask)[:, None]
    # Columns before the first real token have no position; they are not real, so any weight serves.
    weights = weights[columns.clamp_(min=0)]
    return fold_tensor((ids * weights * real).sum(1), real.sum(1))


def _multiply_high_low(factor: int, x: Tensor) -> tuple[Tensor, Tensor]:
    product = x * factor  # both below 2^32: the 64 bits are exact whatever sign int64 reads into them
    return (product >> 32) & _LOW32, product & _LOW32


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor | int, Tensor | int]) -> tuple[Tensor, ...]:
    """Philox4x32-10 of Random123 on int64 tensors that hold uint32 words.

    Args:
        counter: four tensors that broadcast with one another, values in [0, 2^32).
        key: two words, tensors or Python integers in [0, 2^32).

    Returns:
        four int64 tensors of the broadcast shape, values in [0, 2^32).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _multiply_high_low(PHILOX_M0, c0)
        high1, low1 = _multiply_high_low(PHILOX_M1, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + WEYL_0) & _LOW32, (k1 + WEYL_1) & _LOW32
    return c0, c1, c2, c3


def _words(value: Tensor) -> tuple[Tensor, Tensor]:
    return value & _LOW32, (value >> 32) & _LOW32


def draw_rows(key: Tensor, keys_by_row: Tensor, length: int, streams: tuple[int, ...]) -> Tensor:
    """draw_t(s) for s = 0 … length - 1 of every row: the layout of padded batches.

    Args:
        key: int64 tensor of one element, the bits of the 64-bit key.
        keys_by_row: (B,) int64 row keys.
        streams: the T streams t wanted.

    Returns:
        (T, B, length) int64, values in [0, 2^32).
    """
    blocks = -(-length // BLOCK)
    device = keys_by_row.device
    low, high = _words(keys_by_row)
    # Not torch.tensor(streams): its copy from the host would make a GPU's stream wait.
    stream = torch.stack([keys_by_row.new_full((), t) for t in streams])[:, None, None]
    lane = torch.arange(blocks * LANES, device=device)
    words = philox((lane, stream, low[:, None], high[:, None]), _words(key.reshape(())))
    shape = (len(streams), keys_by_row.shape[0], blocks, 4, LANES)
    striped = torch.stack([word.expand(shape[0], shape[1], -1).unflatten(2, (blocks, LANES)) for word in words], 3)
    return striped.reshape(shape[0], shape[1], blocks * BLOCK)[:, :, :length]


def draw_at(key: Tensor, keys_by_position: Tensor, positions: Tensor, stream: int) -> Tensor:
    """draw_t(s) at any positions of any rows: one Philox block each, four times the work of :func:`draw_rows`.

    Args:
        key: int64 tensor of one element.
        keys_by_position: int64, the row key of each wanted draw; broadcasts with positions.
        positions: int64, s of each wanted draw.
        stream: t.

    Returns:
        int64 of the broadcast shape, values in [0, 2^32).
    """
    low, high = _words(keys_by_position)
    counter = LANES * (positions // BLOCK) + positions % LANES
    c0, c1, c2, c3 = philox((counter, torch.full_like(counter, stream), low, high), _words(key.reshape(())))
    word = positions % BLOCK // LANES
    return torch.where(word < 2, torch.where(word == 0, c0, c1), torch.where(word == 2, c2, c3))
