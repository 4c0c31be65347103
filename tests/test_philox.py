"""The draw law (DESIGN, section 2) against its known answers and against plain Python integers."""

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, strategies as st
from oracle import DEVICE, TWO32, TWO64, signed, slow_draw, slow_fold, slow_mix, slow_philox, slow_row_key
from torch import Tensor

from fastmlm import MaskedTokens, MaskingSpec, mask_tokens, philox

KEY = 0x6A18965C8A3CCA10  # fold(42, 3)
ROW = [101, 7592, 1010, 2088, 999, 102]
ROW_KEY = 0x4E13561745F02217

# Random123's kat_vectors: counter, key, output.
RANDOM123 = [
    ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
# s: (draw_0, draw_1) with KEY and ROW_KEY.
DRAWS = {
    0: (0x99A695A9, 0xE405EB2B),
    1: (0xC22ED895, 0x476EAC8F),
    2: (0xD5F52E55, 0xD364F4AB),
    3: (0x8EAFD993, 0x883BD79D),
    4: (0x4CF5F5BA, 0x0657978B),
    5: (0x1952D301, 0x743A94C9),
    15: (0x4096FC11, 0xED6404B4),
    16: (0x59C86F47, 0x11584F9E),
    63: (0x4BA97A22, 0xC9991DCE),
    64: (0xC8AB3D65, 0x03E31FF6),
    65: (0x37796C1A, 0x77C4A3AF),
}


# ---- The law in plain Python integers, from DESIGN.md and from nothing else ----


def unsigned(tensor: Tensor) -> list[int]:
    return [value % TWO64 for value in tensor.flatten().tolist()]


# ---- Known answers ----


@pytest.mark.parametrize(("counter", "key", "expected"), RANDOM123)
def test_random123_vectors(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert slow_philox(counter, key) == expected
    words = philox.philox(tuple(torch.tensor([c]) for c in counter), key)
    assert tuple(int(word) for word in words) == expected
    words = philox.philox(tuple(torch.tensor([c]) for c in counter), tuple(torch.tensor(k) for k in key))
    assert tuple(int(word) for word in words) == expected


@triton.jit
def _philox_kernel(counters, key, out):
    lane = tl.arange(0, 1)
    c0 = tl.load(counters + lane).to(tl.uint32)
    c1 = tl.load(counters + lane + 1).to(tl.uint32)
    c2 = tl.load(counters + lane + 2).to(tl.uint32)
    c3 = tl.load(counters + lane + 3).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(tl.load(key), c0, c1, c2, c3)
    tl.store(out + lane, w0.to(tl.int64))
    tl.store(out + lane + 1, w1.to(tl.int64))
    tl.store(out + lane + 2, w2.to(tl.int64))
    tl.store(out + lane + 3, w3.to(tl.int64))


@pytest.mark.parametrize(("counter", "key", "expected"), RANDOM123)
def test_random123_vectors_in_triton(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    counters = torch.tensor(counter, device=DEVICE)
    out = torch.full((4,), -1, device=DEVICE)
    _philox_kernel[(1,)](counters, torch.tensor([signed(key[0] | key[1] << 32)], device=DEVICE), out)
    assert tuple(out.tolist()) == expected


def test_mix_and_fold() -> None:
    assert philox.mix(1) == slow_mix(1) == 0x5692161D100B05E5
    assert philox.fold(0, 0) == slow_fold(0, 0) == 0xA706DD2F4D197E6F
    assert philox.fold(42, 3) == slow_fold(42, 3) == KEY
    assert philox.fold(3, 42) != KEY


def test_row_key_of_the_known_row() -> None:
    weights = [slow_mix((s + 1) * 0x9E3779B97F4A7C15 % TWO64) | 1 for s in range(len(ROW))]
    assert sum(w * i for w, i in zip(weights, ROW, strict=True)) % TWO64 == 0xE6F66E622C64E908
    assert slow_row_key(list(enumerate(ROW))) == ROW_KEY
    assert unsigned(philox.row_keys(torch.tensor([ROW]))) == [ROW_KEY]


@pytest.mark.parametrize("s", DRAWS)
def test_known_draws(s: int) -> None:
    key, row_key = torch.tensor([signed(KEY)]), torch.tensor([signed(ROW_KEY)])
    for stream in (0, 1):
        assert slow_draw(KEY, ROW_KEY, s, stream) == DRAWS[s][stream]
        assert philox.draw_at(key, row_key, torch.tensor([s]), stream).tolist() == [DRAWS[s][stream]]
    assert tuple(philox.draw_rows(key, row_key, 66, (0, 1))[:, 0, s].tolist()) == DRAWS[s]


def test_streams_have_the_numbers_of_the_table() -> None:
    assert (philox.SELECT, philox.ACTION) == (0, 1)


# ---- The same, seen through mask_tokens ----


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_known_row(impl: str) -> None:
    spec = MaskingSpec(103, 30522, (101, 102), mlm_probability=0.5, mask_replace_prob=0.5, random_replace_prob=0.4)
    ids = torch.tensor([ROW], device=DEVICE)
    masked = mask_tokens(ids, spec, seed=KEY, row_keys=torch.tensor([signed(ROW_KEY)], device=DEVICE), impl=impl)
    assert isinstance(masked, MaskedTokens)
    assert masked.input_ids.tolist() == [[101, 7592, 1010, 2088, 103, 102]]
    assert masked.labels.tolist() == [[-100, -100, -100, -100, 999, -100]]


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("s", DRAWS)
def test_known_draws_from_outside(impl: str, s: int) -> None:
    """A token is selected at rate (d + 1) / 2^32 but not at d / 2^32; likewise masked: so the draw is exactly d."""
    ids, keys = torch.full((1, 66), 5, device=DEVICE), torch.tensor([signed(ROW_KEY)], device=DEVICE)
    selects, acts = DRAWS[s]
    for above in (0, 1):
        spec = MaskingSpec(1, 10, mlm_probability=(selects + above) / TWO32, mask_replace_prob=1, random_replace_prob=0)
        masked = mask_tokens(ids, spec, seed=KEY, row_keys=keys, impl=impl)
        assert (int(masked.labels[0, s]), int(masked.input_ids[0, s])) == ((5, 1) if above else (-100, 5))
        spec = MaskingSpec(1, 10, (), 1.0, mask_replace_prob=(acts + above) / TWO32, random_replace_prob=0)
        masked = mask_tokens(ids, spec, seed=KEY, row_keys=keys, impl=impl)
        assert (int(masked.labels[0, s]), int(masked.input_ids[0, s])) == (5, 1 if above else 5)


# ---- Against plain integers ----

uint64 = st.integers(0, TWO64 - 1) | st.sampled_from([0, 1, 1 << 31, 1 << 32, 1 << 63, TWO64 - 1])


@given(uint64, uint64)
def test_mix_and_fold_are_unsigned(a: int, b: int) -> None:
    ta, tb = torch.tensor([signed(a)]), torch.tensor([signed(b)])
    assert philox.as_int64(a) == signed(a)
    assert unsigned(philox.mix_tensor(ta)) == [philox.mix(a)] == [slow_mix(a)]
    assert unsigned(philox.fold_tensor(ta, tb)) == [philox.fold(a, b)] == [slow_fold(a, b)]


@given(uint64, st.lists(uint64, min_size=1, max_size=3), st.integers(1, 130), st.integers(0, 6))
def test_draws_are_the_law(key: int, row_keys: list[int], length: int, stream: int) -> None:
    expected = [slow_draw(key, row_key, s, stream) for row_key in row_keys for s in range(length)]
    seed, keys = torch.tensor([signed(key)]), torch.tensor([signed(k) for k in row_keys])
    assert philox.draw_rows(seed, keys, length, (stream,)).flatten().tolist() == expected
    assert philox.draw_at(seed, keys[:, None], torch.arange(length), stream).flatten().tolist() == expected


def test_draws_far_from_the_start() -> None:
    """Positions of long genomes: the counter is 16 * (s // 64) + s % 16, not s."""
    positions = [10_000_003, 2**31 - 1]
    draws = philox.draw_at(torch.tensor([5]), torch.tensor([6]), torch.tensor(positions), 1)
    assert draws.tolist() == [slow_draw(5, 6, s, 1) for s in positions]


@st.composite
def padded_rows(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]]]:
    """ids and attention mask with padding on both sides, holes and rows without a real token."""
    rows, length = draw(st.integers(1, 4)), draw(st.integers(1, 12))
    cell = lambda values: st.lists(st.lists(values, min_size=length, max_size=length), min_size=rows, max_size=rows)  # noqa: E731
    return draw(cell(st.integers(0, 2**31 - 1))), draw(cell(st.sampled_from([0, 1, 1, 1])))


@given(
    padded_rows(), st.sampled_from([torch.int64, torch.int32]), st.sampled_from([torch.bool, torch.int64, torch.int8])
)
def test_row_keys_are_the_law(
    batch: tuple[list[list[int]], list[list[int]]], id_dtype: torch.dtype, mask_dtype: torch.dtype
) -> None:
    expected = []
    for ids, real in zip(*batch, strict=True):
        first = real.index(1) if 1 in real else 0
        expected.append(slow_row_key([(c - first, ids[c]) for c in range(len(ids)) if real[c]]))
    keys = philox.row_keys(torch.tensor(batch[0], dtype=id_dtype), torch.tensor(batch[1]).to(mask_dtype))
    assert keys.dtype == torch.int64
    assert unsigned(keys) == expected


@pytest.mark.parametrize("length", [1, 511, 512, 513, 1025])  # around the sizes of the cached table of weights
def test_row_keys_at_lengths(length: int) -> None:
    ids = torch.arange(7, 7 + length)
    expected = slow_row_key(list(enumerate(ids.tolist())))
    assert unsigned(philox.row_keys(ids[None])) == [expected]
    padded = torch.nn.functional.pad(ids[None], (3, 5), value=1)
    real = torch.nn.functional.pad(torch.ones_like(ids)[None], (3, 5))
    assert unsigned(philox.row_keys(padded, real)) == [expected]


@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (0, 0)])
@pytest.mark.parametrize("with_mask", [False, True])
def test_row_keys_of_empty_batches(shape: tuple[int, int], with_mask: bool) -> None:
    ids = torch.zeros(shape, dtype=torch.int64)
    keys = philox.row_keys(ids, torch.ones_like(ids) if with_mask else None)
    assert unsigned(keys) == [slow_fold(0, 0)] * shape[0]


def test_row_keys_tell_rows_apart() -> None:
    """Length, order and a zero id at the end all count."""
    rows = [[1, 2, 3], [1, 3, 2], [3, 2, 1], [1, 2, 3, 0], [0, 1, 2, 3], [1, 2], [0], [0, 0], [1, 2, 4]]
    keys = [int(philox.row_keys(torch.tensor([row]))) for row in rows]
    assert len(set(keys)) == len(rows)
