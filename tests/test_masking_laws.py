"""What must hold of any masks: padding, batching and packing do not matter, and the frequencies are those asked for.

The statistical tests use fixed seeds and counter-based draws, so each either always passes or always fails: they cannot
flake. ``ALPHA`` is the significance of each test; it says how surprised one may be when a new seed is chosen.
"""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from oracle import PLAIN
from scipy.stats import chi2_contingency, chisquare
from torch import Tensor
from torch.nn.functional import pad

from fastmlm import MaskingSpec, mask_tokens, philox

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # without a GPU the kernel runs in Triton's interpreter
IMPLS = ["reference", "triton"]
ALPHA = 1e-4
V = 1000
SPEC = MaskingSpec(4, V, (0, 1, 2, 3, 4), mlm_probability=0.3, exclude_original=True)


# ---- Padding, batching, packing ----

LENGTHS = [1, 15, 64, 65, 130]


def ragged() -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, V, (n,), generator=generator).to(DEVICE) for n in LENGTHS]
    return rows, torch.cat([philox.row_keys(row[None]) for row in rows])


def padded(rows: list[Tensor], side: str, width: int = 140) -> tuple[Tensor, Tensor]:
    """ids and attention mask; pads are id 7, no special, so that only the mask protects them."""
    fit = lambda row, value: pad(row, (0, width - len(row)) if side == "right" else (width - len(row), 0), value=value)  # noqa: E731
    return torch.stack([fit(row, 7) for row in rows]), torch.stack([fit(torch.ones_like(row), 0) for row in rows])


def alone(rows: list[Tensor], keys: Tensor, **arguments: Any) -> list[tuple[Tensor, Tensor]]:
    """Each row in a batch of its own without padding: what every other arrangement must give."""
    return [
        mask_tokens(row, SPEC, seed=9, row_keys=key[None], impl="reference", **arguments)
        for row, key in zip(rows, keys, strict=True)
    ]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("width", [130, 140, 200])
def test_padding_does_not_matter(side: str, width: int, impl: str) -> None:
    rows, keys = ragged()
    ids, real = padded(rows, side, width)
    assert torch.equal(philox.row_keys(ids, real), keys)
    masked = mask_tokens(ids, SPEC, seed=9, row_keys=keys, attention_mask=real, impl=impl)
    for b, (expected_ids, expected_labels) in enumerate(alone(rows, keys)):
        assert torch.equal(masked.input_ids[b][real[b] == 1], expected_ids)
        assert torch.equal(masked.labels[b][real[b] == 1], expected_labels)
    assert (masked.input_ids[real == 0] == 7).all()
    assert (masked.labels[real == 0] == -100).all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("two_dimensional", [False, True])
def test_packing_does_not_matter(dtype: torch.dtype, two_dimensional: bool) -> None:
    rows, keys = ragged()
    cu_seqlens = torch.tensor([0, *np.cumsum(LENGTHS)], dtype=dtype, device=DEVICE)
    ids = torch.cat(rows)[None] if two_dimensional else torch.cat(rows)
    masked = mask_tokens(ids, SPEC, seed=9, row_keys=keys, cu_seqlens=cu_seqlens)
    assert masked.labels.shape == ids.shape
    expected = alone(rows, keys)
    assert torch.equal(masked.input_ids.flatten(), torch.cat([e[0] for e in expected]))
    assert torch.equal(masked.labels.flatten(), torch.cat([e[1] for e in expected]))


def test_padding_inside_packed_rows_does_not_matter() -> None:
    """Segments padded on the left keep counting from their first real token; a zero in the middle is a hole."""
    rows, keys = ragged()
    ids, real = padded(rows, "left", 131)
    cu_seqlens = torch.arange(0, 131 * len(rows) + 1, 131, device=DEVICE)
    masked = mask_tokens(
        ids.flatten(), SPEC, seed=9, row_keys=keys, attention_mask=real.flatten(), cu_seqlens=cu_seqlens
    )
    assert torch.equal(masked.labels[real.flatten() == 1], torch.cat([e[1] for e in alone(rows, keys)]))
    assert (masked.labels[real.flatten() == 0] == -100).all()


def test_units_and_rates_are_read_in_the_row_whatever_its_layout() -> None:
    rows, keys = ragged()
    units = [torch.arange(len(row), device=DEVICE) // 3 * 3 for row in rows]
    rates = [torch.linspace(0, 1, len(row), device=DEVICE) for row in rows]
    expected = [
        mask_tokens(row, SPEC, seed=9, row_keys=key[None], units=unit, mlm_probability=rate)
        for row, key, unit, rate in zip(rows, keys, units, rates, strict=True)
    ]
    labels = torch.cat([e.labels for e in expected])
    cu_seqlens = torch.tensor([0, *np.cumsum(LENGTHS)], device=DEVICE)
    flat = {"units": torch.cat(units), "mlm_probability": torch.cat(rates)}
    packed = mask_tokens(torch.cat(rows), SPEC, seed=9, row_keys=keys, cu_seqlens=cu_seqlens, **flat)
    assert torch.equal(packed.labels, labels)
    for side in ("left", "right"):
        ids, real = padded(rows, side)
        wide = {"units": padded(units, side)[0], "mlm_probability": padded(rates, side)[0]}
        wide["units"][real == 0] = 0
        wide["mlm_probability"][real == 0] = 0
        masked = mask_tokens(ids, SPEC, seed=9, row_keys=keys, attention_mask=real, **wide)
        assert torch.equal(masked.labels[real == 1], labels)


@pytest.mark.parametrize("impl", IMPLS)
def test_batch_order_and_size_do_not_matter(impl: str) -> None:
    rows, keys = ragged()
    ids, real = padded(rows, "right")
    full = mask_tokens(ids, SPEC, seed=9, row_keys=keys, attention_mask=real, impl=impl)
    for order in ([4, 2, 0, 1, 3], [3], [2, 2, 1]):
        part = mask_tokens(ids[order], SPEC, seed=9, row_keys=keys[order], attention_mask=real[order], impl=impl)
        assert torch.equal(part.input_ids, full.input_ids[order])
        assert torch.equal(part.labels, full.labels[order])


def test_default_row_keys_are_indices() -> None:
    rows, _ = ragged()
    indices = torch.arange(len(rows), device=DEVICE)
    ids, real = padded(rows, "right")
    for arguments in (
        {"input_ids": ids, "attention_mask": real},
        {"input_ids": torch.cat(rows), "cu_seqlens": torch.tensor([0, *np.cumsum(LENGTHS)], device=DEVICE)},
    ):
        without = mask_tokens(spec=SPEC, seed=9, **arguments)
        assert torch.equal(without.labels, mask_tokens(spec=SPEC, seed=9, row_keys=indices, **arguments).labels)


# ---- What is never touched ----


def op(
    ids: Tensor, spec: MaskingSpec, impl: str, attention_mask: Tensor, special_tokens_mask: Tensor
) -> tuple[Tensor, Tensor]:
    """The op itself, which on a GPU meets ids that the public function refuses on the CPU."""
    flags, random_ids = spec.tables(ids.device)
    limit = round(spec.mlm_probability * 2**32)
    return torch.ops.fastmlm.mask_tokens(
        ids, 5, None, None, attention_mask, special_tokens_mask, None, None, None, flags, random_ids, limit,
        spec.mask_token_id, spec.mask_threshold, spec.random_threshold, spec.ignore_index, spec.exclude_original,
        *PLAIN.values(), impl,
    )  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    impl=st.sampled_from(IMPLS),
    p=st.sampled_from([0.0, 0.5, 1.0]),
    specials=st.sets(st.integers(0, 9), max_size=4),
    dtype=st.sampled_from([torch.int64, torch.int32]),
)
def test_specials_padding_and_foreign_ids_are_never_touched(
    data: st.DataObject, impl: str, p: float, specials: set[int], dtype: torch.dtype
) -> None:
    size = data.draw(st.integers(1, 20))
    row = lambda values: torch.tensor([data.draw(st.lists(values, min_size=size, max_size=size))], device=DEVICE)  # noqa: E731
    far = st.sampled_from([-(2**31), -100, -1, 10, 11, 2**31 - 1])  # outside [0, 10)
    ids = row(st.integers(0, 9) | far).to(dtype)
    real, special = row(st.sampled_from([0, 1, 1])), row(st.sampled_from([0, 0, 1]))
    spec = MaskingSpec(3, 10, tuple(specials), p, mask_replace_prob=0.5, random_replace_prob=0.5, exclude_original=True)
    before = ids.clone()
    output, labels = op(ids, spec, impl, real, special)
    assert torch.equal(ids, before)
    known = (ids >= 0) & (ids < 10)
    selectable = known & (real == 1) & (special == 0) & ~torch.isin(ids, torch.tensor(sorted(specials), device=DEVICE))
    selected = labels != -100
    assert not (selected & ~selectable).any()
    assert torch.equal(output[~selected], ids[~selected])
    assert torch.equal(labels[selected], ids[selected])
    if p == 1:
        assert torch.equal(selected, selectable)  # all of them
        assert ((output == 3) | (output != ids))[selected].all()  # half masked, half another id, none kept
    if p == 0:
        assert not selected.any()


def test_foreign_ids_at_the_edge_of_int64() -> None:
    ids = torch.tensor([[2**63 - 1, -(2**63), 2**32 + 5, 5, -(2**32) + 5]], device=DEVICE)
    for impl in IMPLS:
        output, labels = op(
            ids, MaskingSpec(3, 10, (), 1.0, 1.0, 0.0), impl, torch.ones_like(ids), torch.zeros_like(ids)
        )
        assert output.tolist() == [[2**63 - 1, -(2**63), 2**32 + 5, 3, -(2**32) + 5]]
        assert labels.tolist() == [[-100, -100, -100, 5, -100]]


def test_global_generators_are_not_touched() -> None:
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    mask_tokens(torch.arange(500), SPEC, seed=1)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()


# ---- Frequencies ----

ROWS, LENGTH = 2048, 1024  # two million tokens a batch


def counts(ids: Tensor, spec: MaskingSpec, batches: int) -> np.ndarray:
    """How many tokens were not selected, masked, replaced by another id, kept."""
    total = np.zeros(4, dtype=np.int64)
    for seed in range(batches):
        output, labels = mask_tokens(ids, spec, seed=seed, impl="reference")
        selected, masked = labels != -100, output == spec.mask_token_id
        kept = selected & (output == ids)
        total += np.array([int(x.sum()) for x in (~selected, masked, selected & ~masked & ~kept, kept)])
    return total


@pytest.mark.parametrize(("p", "split"), [(0.15, (0.8, 0.1)), (1.0, (0.8, 0.1)), (1.0, (0.3, 0.4)), (0.4, (0.1, 0.5))])
def test_rates(p: float, split: tuple[float, float]) -> None:
    """8 million tokens: the rates fit, and rates 1 % off would not.

    Originals lie outside the random table, so that a random id is told from a kept one.
    """
    spec = MaskingSpec(0, 200, (), p, *split, random_token_ids=tuple(range(100, 200)))
    ids = torch.randint(1, 100, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    observed = counts(ids, spec, 4)

    def fit(p: float, mask: float, random: float) -> float:
        shares = np.array([1 - p, p * mask, p * random, p * (1 - mask - random)])
        assert observed[shares == 0].sum() == 0
        present = shares > 0
        return float(chisquare(observed[present], observed.sum() * shares[present]).pvalue)

    assert fit(p, *split) > ALPHA
    for off in (0.99, 1.01):
        if p < 1:
            assert fit(p * off, *split) < ALPHA
        else:  # every token shows its action: enough to see the split 1 % off
            assert fit(p, split[0] * off, split[1]) < ALPHA
            assert fit(p, split[0], split[1] * off) < ALPHA


@pytest.mark.parametrize(
    ("table", "split", "original", "exclude"),
    [
        (None, (0.0, 1.0), 7, False),
        (None, (0.8, 0.1), 7, False),  # the id is read off the same draw as the action
        (None, (0.0, 1.0), 7, True),
        (None, (0.0, 1.0), 49, True),  # the last id of the table, which takes the place of the others
        ((3, 1, 4, 15, 9), (0.2, 0.5), 4, False),
        ((3, 1, 4, 15, 9), (0.2, 0.5), 4, True),
        ((3, 1, 4, 15, 9), (0.2, 0.5), 30, True),  # not in the table: all five
    ],
)
def test_random_ids_are_uniform(
    table: tuple[int, ...] | None, split: tuple[float, float], original: int, exclude: bool
) -> None:
    """Each of K ids is drawn about N / K times, K at most 50 and N 200 000 to 2 million; others never."""
    spec = MaskingSpec(50, 51, (), 1.0, *split, random_token_ids=table or tuple(range(50)), exclude_original=exclude)
    output = mask_tokens(torch.full((ROWS, LENGTH), original), spec, seed=11, impl="reference").input_ids
    seen = torch.bincount(output.flatten(), minlength=51).numpy()
    ids = table or range(50)
    assert seen.sum() == seen[[*{*ids, original, 50}]].sum()
    if exclude and sum(split) == 1:
        assert seen[original] == 0
    # An original that is kept looks like one that is drawn, so it takes part only where neither happens.
    drawn = [i for i in ids if i != original or (sum(split) == 1 and not exclude)]
    assert len(drawn) >= 4
    assert chisquare(seen[drawn]).pvalue > ALPHA


def test_random_ids_of_a_large_vocabulary_are_uniform() -> None:
    """BERT's own vocabulary, about 70 draws an id: the ends of the range are reached as often as the middle."""
    spec = MaskingSpec(103, 30522, (), 1.0, 0.0, 1.0)
    output = mask_tokens(torch.zeros(ROWS, LENGTH, dtype=torch.int64), spec, seed=3, impl="reference").input_ids
    seen = torch.bincount(output.flatten(), minlength=30522).numpy()
    assert len(seen) == 30522
    assert chisquare(seen).pvalue > ALPHA
    parts = [x.sum() for x in (seen[:100], seen[100:-100], seen[-100:])]
    assert chisquare(parts, seen.sum() * np.array([100, 30322, 100]) / 30522).pvalue > ALPHA


# ---- Independence ----


def independent(a: Tensor, b: Tensor, values: int) -> bool:
    """Chi-square test of a contingency table. Overlapping pairs (s, s + d) are allowed: products do not correlate."""
    table = torch.bincount((a * values + b).flatten(), minlength=values**2).reshape(values, values)
    return bool(chi2_contingency(table.numpy(), correction=False).pvalue > ALPHA)


def draws(key: int, keys: Tensor, streams: tuple[int, ...] = (0,)) -> Tensor:
    return philox.draw_rows(torch.tensor([key]), keys, LENGTH, streams)


def nibbles(draw: Tensor) -> list[Tensor]:
    """The highest bits, which decide, and the lowest, where weak generators show: 16 values each."""
    return [draw >> 28, draw & 15]


ADJACENT = torch.arange(1024)  # row keys that differ in few bits, as the default ones do


@pytest.mark.parametrize("distance", [1, 15, 16, 48, 64])
@pytest.mark.parametrize("stream", [0, 1])
def test_neighbours_are_independent(distance: int, stream: int) -> None:
    """A million pairs. Lanes are neighbours at 1, words of one Philox block at 16 and 48, blocks at 64."""
    for part in nibbles(draws(1, ADJACENT, (stream,))[0]):
        assert independent(part[:, :-distance], part[:, distance:], 16)


def test_rows_seeds_and_streams_are_independent() -> None:
    both = draws(1, ADJACENT, (0, 1))
    others = {
        "next row": (both[0, :-1], both[0, 1:]),
        "row that differs in the top bit": (both[0], draws(1, ADJACENT - 2**63)[0]),
        "next seed": (both[0], draws(2, ADJACENT)[0]),
        "seed that differs in the top bit": (both[0], draws(1 - 2**63, ADJACENT)[0]),
        "seed and row exchanged": (draws(7, torch.full((1024,), 3) + 8 * ADJACENT)[0], draws(3, 7 + 8 * ADJACENT)[0]),
        "stream": (both[0], both[1]),
        "stream and position": (both[0, :, 1:], both[1, :, :-1]),
    }
    for name, (a, b) in others.items():
        assert all(independent(x, y, 16) for x, y in zip(nibbles(a), nibbles(b), strict=True)), name


def test_selections_and_actions_are_independent() -> None:
    """The same through mask_tokens: 2 million pairs show a correlation of half a percent."""
    spec = MaskingSpec(0, 10, (), 0.15, 0.5, 0.0)
    ids = torch.full((ROWS, LENGTH), 5)
    first, second = (mask_tokens(ids, spec, seed=seed, impl="reference") for seed in (100, 101))
    selected, again = (first.labels != -100).long(), (second.labels != -100).long()
    for distance in (1, 16, 64):
        assert independent(selected[:, :-distance], selected[:, distance:], 2)
    assert independent(selected[:-1], selected[1:], 2)
    assert independent(selected, again, 2)
    # An action does not depend on how far below the threshold the selecting draw fell.
    half = mask_tokens(ids, spec, seed=100, mlm_probability=0.075, impl="reference").labels != -100
    chosen = selected == 1
    assert independent(half[chosen].long(), (first.input_ids[chosen] == 0).long(), 2)


def test_the_independence_test_sees_dependence() -> None:
    part = draws(1, ADJACENT)[0] >> 28
    copied = torch.where(draws(2, ADJACENT)[0] % 100 == 0, part, draws(3, ADJACENT)[0] >> 28)
    assert not independent(part, copied, 16)  # one value in a hundred copied
