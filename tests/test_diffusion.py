"""Masked diffusion: times, masks, and weights that make the loss an unbiased estimate of the likelihood bound."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from batches import many, selected
from scipy import special, stats

from fastmlm import DataCollatorForMaskedLM
from fastmlm.strategies import MaskedDiffusion, Prompts


def collator_of(tokenizer: Any, strategy: Any, epoch: int = 0, **kwargs: Any) -> DataCollatorForMaskedLM:
    collator = DataCollatorForMaskedLM(tokenizer, seed=4, strategy=strategy, **kwargs)
    collator.set_epoch(epoch)
    return collator


def times_of(batch: Any, strategy: MaskedDiffusion) -> np.ndarray:
    """t of each row, from its weight."""
    weight = batch["loss_weights"][:, 0].double().numpy()
    slope = 1 - strategy.eps
    if strategy.schedule == "linear":
        return (slope / weight - strategy.eps) / slope
    if strategy.eps > 1e-6:
        raise AssertionError("the weight is the cotangent without eps alone")
    return np.arctan(math.pi / 2 / weight) * 2 / math.pi


@pytest.mark.parametrize("strategy", [MaskedDiffusion(), MaskedDiffusion("cosine", eps=1e-9)], ids=str)
def test_times_are_uniform(wordpiece, strategy) -> None:
    """By the Kolmogorov–Smirnov test, and the share of a row's tokens that is masked is the row's probability."""
    rows = many(wordpiece, count=500, length=200)
    batch = collator_of(wordpiece, strategy)(rows)
    times = times_of(batch, strategy)
    assert stats.kstest(times, "uniform").pvalue > 1e-3
    rates = times if strategy.schedule == "linear" else np.sin(times * math.pi / 2)
    shares = selected(batch).double().mean(1).numpy()
    errors = np.abs(shares - rates) / np.sqrt(rates * (1 - rates) / 200 + 1e-6)
    assert errors.max() < 5
    assert bool(((batch["input_ids"] == wordpiece.mask_token_id) == selected(batch)).all())


@pytest.mark.parametrize("size", [7, 64])
def test_stratified_times_are_spread_evenly(wordpiece, size) -> None:
    """One in each of B equal parts, turned by the same part of one of them; in any order of the rows."""
    strategy, rows = MaskedDiffusion(times="stratified"), many(wordpiece, count=size, length=50)
    for epoch in range(3):
        collator = collator_of(wordpiece, strategy, epoch)
        times = times_of(collator(rows), strategy)
        assert np.sort(np.floor(np.sort(times) * size)).tolist() == list(range(size))
        assert np.ptp(np.sort(times) * size - np.arange(size)) < 1e-2
        assert np.array_equal(times_of(collator(rows[::-1]), strategy)[::-1], times)


def exact_bound(losses: dict[frozenset[int], float], count: int) -> float:
    """The sum over all masks M of the integral of p^|M| (1 - p)^(n - |M|) / p dp, times M's loss; over n."""
    return sum(special.beta(len(m), count - len(m) + 1) * loss for m, loss in losses.items()) / count


@pytest.mark.parametrize("times", ["uniform", "stratified"])
@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_loss_is_unbiased(wordpiece, schedule, times) -> None:
    """Of any function of what is masked: here one with a large and uneven value for each of the masks of four tokens.

    Equal rows in one batch would get equal masks, so their prompts differ, which are protected.
    """
    rng = np.random.default_rng(1)
    masks = [frozenset(m) for n in range(1, 5) for m in itertools.combinations(range(4), n)]
    by_token = {m: {i: float(rng.exponential()) for i in m} for m in masks}
    expected = exact_bound({m: sum(v.values()) for m, v in by_token.items()}, 4)
    # The weights' variance grows with 1 / eps; the bias of leaving [0, eps] out is about eps.
    strategy = (MaskedDiffusion(schedule, times, eps=1e-4), Prompts())
    ids = np.random.default_rng(2).integers(5, len(wordpiece), (60_000, 3))
    rows = [{"input_ids": [*row.tolist(), 10, 11, 12, 13], "prompt_length": 3} for row in ids]
    batch = collator_of(wordpiece, strategy)(rows)
    assert set(batch["loss_tokens"].tolist()) == {4}
    chosen, weights = selected(batch)[:, 3:].numpy(), batch["loss_weights"][:, 0].double().numpy()
    assert not bool(selected(batch)[:, :3].any())
    losses = np.array([sum(by_token.get(frozenset(np.flatnonzero(row)), {0: 0.0}).values()) for row in chosen])
    estimates = weights * losses / 4
    error = estimates.std() / len(rows) ** 0.5
    assert estimates.mean() == pytest.approx(expected, abs=4 * error)
    assert error < 0.03 * expected


def test_columns(wordpiece) -> None:
    """What the loss is divided by is the tokens that may be selected: no special ones, no padding, no prompt."""
    rows = [{"input_ids": [2, *range(10, 10 + n), 3], "prompt_length": k} for n, k in ((5, 3), (9, 0), (1, 7))]
    batch = collator_of(wordpiece, (MaskedDiffusion(), Prompts()))(rows)
    assert batch["loss_tokens"].tolist() == [3, 9, 0]
    assert batch["loss_weights"].shape == batch["labels"].shape
    assert batch["loss_weights"].dtype == torch.float32
    assert bool((batch["loss_weights"] >= 0.999).all())
    constant = collator_of(wordpiece, MaskedDiffusion(), mask_replace_prob=0.5, random_replace_prob=0.5)
    assert bool((constant(rows[:2])["input_ids"] != 2).all()) is False
