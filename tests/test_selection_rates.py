"""What must hold of masks by a selection: their place in a batch does not matter, and chances are those asked for.

Draws are counter-based and seeds fixed, so each test of a frequency always passes or always fails. ``ALPHA`` is its
significance, as in ``test_masking_laws.py``.
"""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chi2, chisquare
from test_masking_laws import ALPHA, DEVICE, LENGTHS, SPEC, V, padded, ragged
from torch import Tensor

from fastmlm import MaskingSpec, Selection, available_impls, mask_tokens, philox

ROWS = 20_000
MARKS = (torch.arange(V) % 3 == 0).to(torch.uint8) + 2 * (torch.arange(V) % 7 == 0).to(torch.uint8)
KINDS = {
    "words": Selection(word_marks=MARKS, replace_per_unit=True),
    "spans": Selection(span_lengths=(0.2, 0.3, 0.5)),
    "spans of words": Selection(word_marks=MARKS, span_lengths=(0.5, 0.5), replace_per_unit=True),
    "exact": Selection(exact=True),
    "exact spans of words": Selection(word_marks=MARKS, span_lengths=(0.5, 0.5), exact=True, at_least=1),
    "bounds": Selection(at_least=2, at_most=20),
    "rates by id": Selection(rates_by_id=torch.linspace(0, 1, V)),
}


# ---- Padding, batching, packing ----


@pytest.mark.parametrize("impl", available_impls())
@pytest.mark.parametrize("name", KINDS)
def test_place_does_not_matter(name: str, impl: str) -> None:
    """A row alone, padded on either side, among other rows or packed has the same masks."""
    rows, keys = ragged()
    call: dict[str, Any] = {"spec": SPEC, "seed": 9, "selection": KINDS[name], "impl": impl}
    reference = call | {"impl": "reference"}
    alone = [mask_tokens(row, row_keys=key[None], **reference) for row, key in zip(rows, keys, strict=True)]
    ids, labels = torch.cat([one.input_ids for one in alone]), torch.cat([one.labels for one in alone])
    assert (labels != -100).sum() > 20
    ends = torch.tensor([0, *np.cumsum(LENGTHS)], device=DEVICE)
    packed = mask_tokens(torch.cat(rows), row_keys=keys, cu_seqlens=ends, **call)
    assert torch.equal(packed.input_ids, ids)
    assert torch.equal(packed.labels, labels)
    for side, width in (("left", 131), ("right", 200))[: 1 if impl == "triton" else 2]:  # the interpreter is slow
        wide, real = padded(rows, side, width)
        masked = mask_tokens(wide, row_keys=keys, attention_mask=real, **call)
        assert torch.equal(masked.input_ids[real == 1], ids)
        assert torch.equal(masked.labels[real == 1], labels)
        assert (masked.labels[real == 0] == -100).all()
        if impl == "triton":
            continue
        part = mask_tokens(wide[[3, 1]], row_keys=keys[[3, 1]], attention_mask=real[[3, 1]], **call)
        assert torch.equal(part.labels, masked.labels[[3, 1]])


# ---- Frequencies ----


def mask(row: list[int], seed: int, p: float, split: tuple[float, float] = (1, 0), **how: Any) -> tuple[Tensor, Tensor]:
    """One row's tokens, of which 0 to 3 are special, under many row keys: output ids, and whether they are selected."""
    spec = MaskingSpec(99, 100, (0, 1, 2, 3), p, *split, exclude_original=True, random_token_ids=range(50, 90))
    ids = torch.tensor(row).expand(ROWS, -1).contiguous()
    output, labels = mask_tokens(ids, spec, seed=seed, selection=Selection(**how), impl="reference")
    return output, labels != -100


def fits(seen: Tensor, p: float) -> bool:
    """Whether each column is true at rate p; columns of a unit go together, so each is tested by itself."""
    off = (seen.sum(0) - ROWS * p) ** 2 / (ROWS * p * (1 - p))
    return bool(off.max() < chi2.isf(ALPHA / seen.shape[1], 1))


MARKED = (torch.arange(100) < 30).to(torch.uint8)  # ids below 30 start words


def test_every_token_of_words_and_spans_has_its_rate() -> None:
    """At the row's edges, beside special tokens, and for words and spans of any length."""
    row = [2, 5, 35, 36, 6, 7, 37, 0, 38, 39, 8, *[40] * 9, 9, 10, 41, 3]
    inside = [s for s, token in enumerate(row) if token > 3]
    for seed, how in enumerate([{}, {"word_marks": MARKED}]):
        for spans in ((), (0.2, 0.3, 0.5), (0.0, 0.0, 0.0, 1.0)):
            _, selected = mask(row, seed, 0.3, span_lengths=spans, **how)
            assert fits(selected[:, inside], 0.3)
            assert not fits(selected[:, inside], 0.32)
            assert not selected[:, [0, 7, len(row) - 1]].any()


@pytest.mark.parametrize("words", [False, True])
def test_span_lengths(words: bool) -> None:
    """Spans are not seen, but how often two units are selected together tells how often they are in one span."""
    shares, p = (0.5, 0.3, 0.2), 0.5
    row = list(itertools.chain(*[[5, 35, 36]] * 40)) if words else [5] * 40
    _, selected = mask(row, 3, p, span_lengths=shares, **({"word_marks": MARKED} if words else {}))
    units = selected[:, ::3] if words else selected
    if words:
        assert torch.equal(units.repeat_interleave(3, 1), selected)
    # The chance that units i and i + d lie in the same span, once the row's start is forgotten, by renewal theory.
    mean = sum(length * share for length, share in enumerate(shares, 1))
    for d in (1, 2, 3):
        together = sum(share * max(length - d, 0) for length, share in enumerate(shares, 1)) / mean
        for i in (20, 25, 30):
            both = int((units[:, i] & units[:, i + d]).sum())
            chance = together * p + (1 - together) * p * p
            assert chisquare([both, ROWS - both], [ROWS * chance, ROWS * (1 - chance)]).pvalue > ALPHA
            for off in (-0.03, 0.03):
                assert chisquare([both, ROWS - both], np.array([chance + off, 1 - chance - off]) * ROWS).pvalue < ALPHA


def test_the_first_span_has_a_length_by_itself() -> None:
    """At the start of a row, where there is no span before it: exact shares, not only the mean."""
    shares = (0.5, 0.3, 0.2)
    _, selected = mask([5] * 4, 8, 0.5, span_lengths=shares)
    # Selected together with unit 0: unit 1 where the span has 2 or 3 units, unit 2 where it has 3.
    for d, together in ((1, 0.5), (2, 0.2), (3, 0.0)):
        same = int((selected[:, 0] == selected[:, d]).sum())
        chance = together + (1 - together) / 2
        assert chisquare([same, ROWS - same], [ROWS * chance, ROWS * (1 - chance)]).pvalue > ALPHA


def test_exact_counts_are_exact_and_any_set_is_as_likely() -> None:
    """2 of 5 tokens: all 10 pairs are as likely. And T(p) n is rounded to the nearest: T(0.15) is just below 0.15."""
    _, selected = mask([2, 5, 6, 0, 7, 8, 9], 1, 0.4, exact=True)
    assert (selected.sum(1) == 2).all()
    numbers = (selected[:, [1, 2, 4, 5, 6]] * 2 ** torch.arange(5)).sum(1)
    sets = torch.bincount(numbers, minlength=32).numpy()
    assert (sets > 0).sum() == 10
    assert chisquare(sets[sets > 0]).pvalue > ALPHA
    for n, p, count in (
        (10, 0.25, 3),
        (10, 0.24, 2),
        (10, 0.15, 1),
        (3, 0.5, 2),
        (7, 1.0, 7),
        (7, 0.0, 0),
        (1, 0.4, 0),
    ):
        assert (mask([5] * n, 2, p, exact=True)[1][:50].sum(1) == count).all(), (n, p)


def test_the_k_smallest_draws_are_taken() -> None:
    """So raising k only adds to what is selected, which at k by chance is selected anyway."""
    row = [5] * 30
    smaller, larger = (mask(row, 4, p, exact=True)[1] for p in (0.2, 0.3))
    assert not (smaller & ~larger).any()
    by_chance = mask(row, 4, 0.2)[1]
    assert ((by_chance & ~smaller).any(1) == (by_chance.sum(1) > 6)).all()


@pytest.mark.parametrize("impl", [impl for impl in available_impls() if impl != "triton"])  # sorts as the reference
def test_of_equal_draws_the_first_goes_first(impl: str) -> None:
    """In so long a row two tokens draw the same 32 bits; as many are selected as to part them."""
    n, spec = 1 << 17, MaskingSpec(1, 10)
    draws = philox.draw_rows(torch.tensor([5]), torch.tensor([0]), n, (philox.SELECT,))[0, 0]
    ordered, order = draws.sort(stable=True)
    k = int((ordered[1:] == ordered[:-1]).int().argmax()) + 1
    assert ordered[k] == ordered[k - 1]
    how = Selection(at_least=k, at_most=k)
    for p in (0.0, 1.0):
        labels = mask_tokens(torch.full((n,), 5), spec, seed=5, mlm_probability=p, selection=how, impl=impl).labels
        expected = torch.zeros(n, dtype=torch.bool).scatter(0, order[:k], True)
        assert torch.equal(labels != -100, expected)


def test_bounds_hold_and_change_nothing_within() -> None:
    row = [2, *[5] * 40, 3]
    by_chance, bounded = (mask(row, 5, 0.15, **how)[1] for how in ({}, {"at_least": 5, "at_most": 8}))
    count = by_chance.sum(1)
    assert torch.equal(bounded.sum(1), count.clamp(5, 8))
    within = (count >= 5) & (count <= 8)
    assert 0 < within.sum() < ROWS
    assert torch.equal(bounded[within], by_chance[within])
    assert not (by_chance & ~bounded)[count < 5].any()
    assert not (bounded & ~by_chance)[count > 8].any()


@pytest.mark.parametrize("spans", [(), (0.5, 0.5)])
def test_counts_of_words(spans: tuple[float, ...]) -> None:
    """Never more than asked for, whole words, fewer only where no further one fits, and one where none does."""
    sizes = [1, 3, 2, 5, 1, 4, 2, 2]  # 20 tokens
    row = list(itertools.chain(*([5, *[35] * (size - 1)] for size in sizes)))
    word = torch.tensor([w for w, size in enumerate(sizes) for _ in range(size)])
    how: dict[str, Any] = {"word_marks": MARKED, "span_lengths": spans, "exact": True}
    _, selected = mask(row, 6, 0.3, **how)
    by_word = selected[:, [int((word == w).int().argmax()) for w in range(8)]]
    assert torch.equal(by_word[:, word], selected)
    assert (selected.sum(1) <= 6).all()
    if not spans:  # a word of one token always fits into a token's room
        assert not ((selected.sum(1) < 6) & ~by_word[:, [0, 4]].all(1)).any()
    few = mask([5, *[35] * 9], 6, 0.3, **how)[1]
    assert not few.any(), "3 tokens, and the one word has 10"
    assert mask([5, *[35] * 9], 6, 0.3, **how | {"at_least": 1})[1].all()
    assert not mask([5, *[35] * 9], 6, 0.3, **how | {"at_least": 1, "at_most": 9})[1].any()


def test_rates_by_id() -> None:
    rates = torch.linspace(0, 1, 100)
    row = [5, 35, 36, 60, 10, 37, 90]
    _, selected = mask(row, 7, 0.15, rates_by_id=rates)
    for s, token in enumerate(row):
        assert fits(selected[:, [s]], float(rates[token]))
    _, selected = mask(row, 7, 0.15, rates_by_id=rates, word_marks=MARKED)
    for s, first in enumerate([5, 5, 5, 5, 10, 10, 10]):  # of the word's first token
        assert fits(selected[:, [s]], float(rates[first]))


def test_one_action_for_a_unit() -> None:
    """80/10/10 of units; a unit's random ids are as likely, and independent of one another and of the action."""
    row = list(itertools.chain(*[[5, 35, 36]] * 4))
    output, selected = mask(row, 9, 0.5, (0.5, 0.3), word_marks=MARKED, replace_per_unit=True)
    words = output.view(-1, 3)[selected[:, ::3].flatten()]
    masked, kept = (words == 99).all(1), (words == torch.tensor(row[:3])).all(1)
    drawn = words[~masked & ~kept]
    assert ((drawn >= 50) & (drawn < 90)).all()
    assert chisquare([masked.sum(), len(drawn), kept.sum()], len(words) * np.array([0.5, 0.3, 0.2])).pvalue > ALPHA
    for column in drawn.T:
        assert chisquare(torch.bincount(column - 50, minlength=40).numpy()).pvalue > ALPHA
    pairs = (drawn[:, 0] - 50) * 40 + drawn[:, 1] - 50
    assert chisquare(torch.bincount(pairs, minlength=1600).numpy()).pvalue > ALPHA
    # Without it, tokens of a word go apart.
    output, selected = mask(row, 9, 0.5, (0.5, 0.3), word_marks=MARKED)
    words = output.view(-1, 3)[selected[:, ::3].flatten()] == 99
    assert (words.any(1) & ~words.all(1)).any()


def test_exclude_original_with_one_action_for_a_unit() -> None:
    """The original is never drawn, the other ids of the table as often; a table of the original alone keeps it."""
    spec = MaskingSpec(0, 20, (), 1.0, 0.0, 1.0, exclude_original=True, random_token_ids=(3, 1, 4, 15, 9))
    how = Selection(replace_per_unit=True)
    for original, others in ((4, [1, 3, 9, 15]), (9, [1, 3, 4, 15]), (7, [1, 3, 4, 9, 15])):
        ids = torch.full((200, 100), original)
        seen = torch.bincount(mask_tokens(ids, spec, seed=1, selection=how).input_ids.flatten(), minlength=20).numpy()
        assert seen.sum() == seen[others].sum()
        assert chisquare(seen[others]).pvalue > ALPHA
    alone = MaskingSpec(0, 20, (), 1.0, 0.0, 1.0, exclude_original=True, random_token_ids=(4,))
    assert (mask_tokens(torch.full((5, 5), 4), alone, seed=1, selection=how).input_ids == 4).all()
