"""The law in plain Python integers, from its text and nothing else: what every implementation is held against.

And calls of ``mask_tokens`` for hypothesis, each with what the law says must come out.
"""

import itertools
from fractions import Fraction
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from fastmlm import MaskingSpec, mask_tokens

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # without a GPU the kernel runs in Triton's interpreter
TWO32, TWO64 = 1 << 32, 1 << 64
# The op's arguments of a selection, where there is none.
PLAIN: dict[str, Any] = {
    "words": False, "span_limits": None, "id_thresholds": None, "per_unit": False, "exact": False, "at_least": 0,
    "at_most": (1 << 31) - 1,
}  # fmt: skip


def slow_mix(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % TWO64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % TWO64
    return z ^ (z >> 31)


def slow_fold(a: int, b: int) -> int:
    golden = 0x9E3779B97F4A7C15
    return slow_mix((slow_mix((a + golden) % TWO64) + b + golden) % TWO64)


def slow_philox(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """Salmon et al. 2011, figure 2 and section 4: ten rounds, the key bumped by Weyl constants between them."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c0, TWO32)
        high1, low1 = divmod(0xCD9E8D57 * c2, TWO32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % TWO32, (k1 + 0xBB67AE85) % TWO32
    return c0, c1, c2, c3


def slow_draw(key: int, row_key: int, s: int, stream: int) -> int:
    counter = (16 * (s // 64) + s % 16, stream, row_key % TWO32, row_key >> 32)
    return slow_philox(counter, (key % TWO32, key >> 32))[s % 64 // 16]


def slow_row_key(tokens: list[tuple[int, int]]) -> int:
    """``tokens``: (position, id) of each real token."""
    total = sum((slow_mix((s + 1) * 0x9E3779B97F4A7C15 % TWO64) | 1) * token for s, token in tokens)
    return slow_fold(total % TWO64, len(tokens))


def signed(value: int) -> int:
    return value - TWO64 if value >= TWO64 // 2 else value


def oracle(
    ids: list[int],
    rows: list[range],
    spec: MaskingSpec,
    seed: int,
    row_keys: list[int],
    real: list[int],
    special: list[int],
    units: list[int] | None,
    p: list[float],
) -> tuple[list[int], list[int]]:
    """Output ids and labels of flat lists; ``rows`` says which cells make a row, ``p`` is the rate at each cell."""
    out, labels = list(ids), [spec.ignore_index] * len(ids)
    table = list(range(spec.vocab_size)) if spec.random_token_ids is None else list(spec.random_token_ids)
    to_mask = round(Fraction(spec.mask_replace_prob) * TWO32)
    to_random = min(TWO32, to_mask + round(Fraction(spec.random_replace_prob) * TWO32))
    for row, key in zip(rows, row_keys, strict=True):
        first = next((cell for cell in row if real[cell]), row.start)
        for cell in row:
            token, s = ids[cell], cell - first
            if not real[cell] or special[cell] or token in spec.special_token_ids:
                continue
            if not 0 <= token < spec.vocab_size:
                continue
            unit = s if units is None else units[cell]
            if slow_draw(seed, key, unit, 0) >= round(Fraction(p[first + unit]) * TWO32):
                continue
            labels[cell] = token
            x = slow_draw(seed, key, s, 1)
            if x < to_mask:
                out[cell] = spec.mask_token_id
            elif x < to_random:
                count = len(table) - (spec.exclude_original and token in table)
                if count:
                    index = (x - to_mask) * (TWO32 * count // (to_random - to_mask)) >> 32
                    out[cell] = table[index]
                    if spec.exclude_original and out[cell] == token:
                        out[cell] = table[-1]
    return out, labels


@st.composite
def specs(draw: st.DrawFn, vocab_size: int) -> MaskingSpec:
    token = st.integers(0, vocab_size - 1)
    split = draw(st.sampled_from([(0, 0), (1, 0), (0.8, 0.2), (0, 1), (0.8, 0.1), (0.1, 0.6), (0.3, 0.4)]))
    return MaskingSpec(
        mask_token_id=draw(token),
        vocab_size=vocab_size,
        special_token_ids=tuple(draw(st.sets(token, max_size=2))),
        mlm_probability=draw(st.sampled_from([0, 1e-6, 0.15, 0.5, 0.9, 1]) | st.floats(0, 1)),
        mask_replace_prob=split[0],
        random_replace_prob=split[1],
        random_token_ids=draw(st.none() | st.lists(token, min_size=1, max_size=5, unique=True)),
        exclude_original=draw(st.booleans()),
        ignore_index=draw(st.sampled_from([-100, -1, 0, 7])),
    )


@st.composite
def calls(draw: st.DrawFn) -> tuple[dict[str, Any], tuple[list[int], list[int]]]:
    """Arguments of mask_tokens and what the law says comes out."""
    vocab_size = draw(st.integers(1, 12))
    spec = draw(specs(vocab_size))
    packed = draw(st.booleans())
    if packed:
        ends = sorted(draw(st.lists(st.integers(0, 90), min_size=0, max_size=4)))
        cu_seqlens = [0, *ends, (ends[-1] if ends else 0) + draw(st.integers(0, 20))]
        rows, shape = [range(a, b) for a, b in itertools.pairwise(cu_seqlens)], (1, cu_seqlens[-1])
    else:
        shape = draw(st.integers(1, 3)), draw(st.integers(1, 8) | st.sampled_from([16, 17, 64, 65, 70]))
        rows = [range(b * shape[1], (b + 1) * shape[1]) for b in range(shape[0])]
    size = shape[0] * shape[1]
    cells = lambda values: draw(st.lists(values, min_size=size, max_size=size))  # noqa: E731
    full = lambda values, dtype: torch.tensor(values, dtype=dtype).reshape(shape).to(DEVICE)  # noqa: E731

    ids = cells(st.integers(0, vocab_size - 1))
    id_dtype = draw(st.sampled_from([torch.int64, torch.int32, torch.int16, torch.uint8]))
    seed = draw(st.integers(0, TWO64 - 1))
    keys = draw(st.none() | st.lists(st.integers(0, TWO64 - 1), min_size=len(rows), max_size=len(rows)))
    real = cells(st.sampled_from([0, 1, 1])) if draw(st.booleans()) else None
    special = cells(st.sampled_from([0, 0, 1])) if draw(st.booleans()) else None
    mask_dtype = st.sampled_from([torch.bool, torch.int64, torch.int8])
    call: dict[str, Any] = {
        "input_ids": full(ids, id_dtype),
        "spec": spec,
        "seed": torch.tensor([signed(seed)], device=DEVICE) if draw(st.booleans()) else seed,
        "row_keys": None if keys is None else torch.tensor([signed(k) for k in keys], device=DEVICE).long(),
        "attention_mask": None if real is None else full(real, draw(mask_dtype)),
        "special_tokens_mask": None if special is None else full(special, draw(mask_dtype)),
    }
    if packed:
        dtype = draw(st.sampled_from([torch.int32, torch.int64]))
        call["cu_seqlens"] = torch.tensor(cu_seqlens, dtype=dtype).to(DEVICE)

    real = [1] * size if real is None else real
    units: list[int] | None = None
    if draw(st.booleans()):
        units = [0] * size
        for row in rows:
            first = next((cell for cell in row if real[cell]), row.start)
            for cell in row:
                s = cell - first
                units[cell] = s if s <= 0 or not draw(st.booleans()) else max(0, units[cell - 1])
        starts = [max(unit, 0) for unit in units]  # columns before the first real token have no position
        call["units"] = full(starts, draw(st.sampled_from([torch.int64, torch.int32])))

    p = [spec.mlm_probability] * size
    rate, dtype = st.floats(0, 1), draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]))
    kind = draw(st.sampled_from(["spec", "number", "row", "column", "token"]))
    if kind == "number":
        call["mlm_probability"] = draw(rate)
        p = [call["mlm_probability"]] * size
    elif kind in ("row", "column") and not (packed and len(rows) == size):  # (N,) is one a token
        by_row = torch.tensor(draw(st.lists(rate, min_size=len(rows), max_size=len(rows)))).to(dtype)
        call["mlm_probability"] = (by_row if kind == "row" else by_row[:, None]).to(DEVICE)
        for value, row in zip(by_row.tolist(), rows, strict=True):
            p[row.start : row.stop] = [value] * len(row)
    elif kind == "token":
        call["mlm_probability"] = full(cells(rate), torch.float64).to(dtype)
        p = call["mlm_probability"].flatten().tolist()
    keys = list(range(len(rows))) if keys is None else keys
    return call, oracle(ids, rows, spec, seed, keys, real, special or [0] * size, units, p)


def agrees(call: dict[str, Any], expected: tuple[list[int], list[int]], impl: str) -> None:
    before = {name: value.clone() for name, value in call.items() if isinstance(value, Tensor)}
    ids = call["input_ids"]
    masked = mask_tokens(**call, impl=impl)
    dtype = torch.int32 if ids.dtype == torch.int32 else torch.int64
    for got, want in zip(masked, expected, strict=True):
        assert (got.dtype, got.shape, got.device) == (dtype, ids.shape, ids.device)
        assert got.flatten().tolist() == want
        assert got.data_ptr() != ids.data_ptr() or not ids.numel()
    for name, value in before.items():
        assert torch.equal(call[name], value), f"{name} was written"
