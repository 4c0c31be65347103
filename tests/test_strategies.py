"""Strategies in the collator: what each is for, how they combine, and masks that nothing but the row changes."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from batches import equal
from test_on_device import assert_same
from torch.utils.data import DataLoader

from fastmlm import DataCollatorForMaskedLM, row_capacity
from fastmlm.on_device import capacity_of, mask_batch
from fastmlm.schedules import Linear
from fastmlm.strategies import (
    Counts,
    MaskedDiffusion,
    NGrams,
    Prompts,
    RandomRates,
    RateColumn,
    RatesByLength,
    Spans,
    TokenWeights,
    WeightColumn,
    WholeWords,
)


def weights_of_ids(tokenizer: Any) -> torch.Tensor:
    return 1.0 + torch.arange(len(tokenizer)) % 7


# By name: from a tokenizer to a strategy.
STRATEGIES = {
    "words": lambda t: WholeWords(),
    "whole replaced words": lambda t: WholeWords("word"),
    "spans": lambda t: Spans(),
    "spans of words": lambda t: Spans(p=0.4, max_length=4, whole_words=True, replace="token"),
    "n-grams": lambda t: NGrams(),
    "exactly": lambda t: Counts(exactly=5),
    "rounded": lambda t: Counts(rounded=True, at_least=1, max_predictions_per_row=9),
    "bounded words": lambda t: (WholeWords(), Counts(at_least=1, max_predictions_per_row=4)),
    "random rates": lambda t: RandomRates(0.1, 0.9),
    "rates by length": lambda t: RatesByLength(lambda n: 0.5 / (1 + 0.01 * n)),
    "rate column": lambda t: RateColumn("rate"),
    "rates of tokens": lambda t: RateColumn("rates"),
    "weight column": lambda t: WeightColumn("rates"),
    "weights": lambda t: TokenWeights(weights_of_ids(t)),
    "prompts": lambda t: Prompts(),
    "diffusion": lambda t: (MaskedDiffusion(), Prompts()),
    "cosine": lambda t: MaskedDiffusion("cosine"),
}


def collator_of(tokenizer: Any, strategy: Any, epoch: int | None = 0, **kwargs: Any) -> DataCollatorForMaskedLM:
    collator = DataCollatorForMaskedLM(tokenizer, seed=3, strategy=strategy, **{"mlm_probability": 0.3} | kwargs)
    if epoch is not None:
        collator.set_epoch(epoch)
    return collator


def rows_for(tokenizer: Any, strategy: Any, make_rows: Any, count: int = 12) -> list[dict[str, Any]]:
    """Rows of unequal length with the columns that a strategy reads."""
    rng = np.random.default_rng(0)
    rows = make_rows(tokenizer, count=count)
    for row in rows:
        n = len(row["input_ids"])
        row |= {"rate": float(rng.random()), "rates": rng.random(n).tolist(), "prompt_length": int(rng.integers(0, n))}
    names = {"input_ids", "attention_mask", "token_type_ids", *collator_of(tokenizer, strategy).columns}
    return [{name: value for name, value in row.items() if name in names} for row in rows]


def by_row(batch: Any) -> list[Any]:
    """The (ids, labels) of each row, without padding, and its loss columns."""
    real = batch["attention_mask"] == 1
    weights = batch.get("loss_weights", torch.zeros(batch["labels"].shape))
    tokens = batch.get("loss_tokens", torch.zeros(len(real)))
    found = zip(batch["input_ids"], batch["labels"], weights, tokens, real, strict=True)
    return [(i[r].tolist(), y[r].tolist(), set(w[r].tolist()), int(n)) for i, y, w, n, r in found]


@pytest.mark.parametrize("name", STRATEGIES)
def test_masks_are_a_function_of_the_row(wordpiece, make_rows, name) -> None:
    """Batches, workers, padding and packing, the order of rows and the place where a pass starts change nothing."""
    strategy = STRATEGIES[name](wordpiece)
    rows = rows_for(wordpiece, strategy, make_rows)
    expected = [
        row for batch in DataLoader(rows, 12, collate_fn=collator_of(wordpiece, strategy)) for row in by_row(batch)
    ]
    assert any(set(labels) != {-100} for _, labels, _, _ in expected)
    for size, side, multiple, workers in ((1, "left", 8, 0), (5, "right", None, 2), (5, "left", None, 0)):
        wordpiece.padding_side = side
        collator = collator_of(wordpiece, strategy, pad_to_multiple_of=multiple)
        loader = DataLoader(rows, size, collate_fn=collator, num_workers=workers)
        assert [row for batch in loader for row in by_row(batch)] == expected
    resumed = collator_of(wordpiece, strategy)(rows[7:])
    assert by_row(resumed) == expected[7:]
    backwards = collator_of(wordpiece, strategy)(rows[::-1])
    assert by_row(backwards) == expected[::-1]
    packed = collator_of(wordpiece, strategy, packing=True)(rows)
    assert packed["input_ids"][0].tolist() == [i for ids, *_ in expected for i in ids]
    assert packed["labels"][0].tolist() == [label for _, labels, *_ in expected for label in labels]
    if "loss_tokens" in packed:
        assert packed["loss_tokens"].tolist() == [n for *_, n in expected]
        bounds = packed["cu_seq_lens_q"].tolist()
        weights = [set(packed["loss_weights"][0, a:b].tolist()) for a, b in pairwise(bounds)]
        assert weights == [w for _, _, w, _ in expected]
    other = collator_of(wordpiece, strategy, epoch=1)(rows)
    assert by_row(other) != expected


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_implementation_and_the_device(wordpiece, make_rows, name) -> None:
    strategy = STRATEGIES[name](wordpiece)
    rows = rows_for(wordpiece, strategy, make_rows, count=5)
    for packing in (False, True):
        expected = collator_of(wordpiece, strategy, impl="reference", packing=packing)(rows)
        for impl in ("cpp", "triton"):
            assert_same(collator_of(wordpiece, strategy, impl=impl, packing=packing)(rows), expected)
        for impl in ("reference", "cpp", "triton"):
            ships = collator_of(wordpiece, strategy, impl=impl, packing=packing, mask_on_device=True)
            assert_same(mask_batch(ships(rows), ships), expected)


def test_without_an_epoch_batches_differ(wordpiece, make_rows) -> None:
    for strategy in (Spans(), RandomRates(), MaskedDiffusion()):
        rows = rows_for(wordpiece, strategy, make_rows)
        collator = collator_of(wordpiece, strategy, epoch=None)
        assert not torch.equal(collator(rows)["labels"], collator(rows)["labels"])


def test_arrays(wordpiece, make_rows) -> None:
    for name in ("spans", "rates of tokens", "diffusion"):
        strategy = STRATEGIES[name](wordpiece)
        rows = rows_for(wordpiece, strategy, make_rows)
        arrays = collator_of(wordpiece, strategy, return_tensors="np")(rows)
        for key, column in collator_of(wordpiece, strategy)(rows).items():
            assert np.array_equal(arrays[key], column.numpy())


def test_whole_word_mask_is_a_strategy(wordpiece, make_rows) -> None:
    rows = make_rows(wordpiece)
    short = collator_of(wordpiece, None, whole_word_mask=True)(rows)
    assert equal(short, collator_of(wordpiece, WholeWords())(rows))
    both = collator_of(wordpiece, Spans(whole_words=True), whole_word_mask=True)(rows)
    assert equal(both, collator_of(wordpiece, Spans(whole_words=True))(rows))
    of_words = collator_of(wordpiece, Counts(exactly=3), whole_word_mask=True)(rows)
    assert equal(of_words, collator_of(wordpiece, (WholeWords(), Counts(exactly=3)))(rows))


# ---- On the device, with schedules, and what cannot be ----


def test_capacity(wordpiece) -> None:
    def capacity(strategy: Any, **kwargs: Any) -> int:
        return capacity_of(collator_of(wordpiece, strategy, mask_on_device=True, **kwargs), 8192)

    assert capacity(RandomRates(0.1, 0.5)) == row_capacity(8192, 0.5)
    assert capacity(MaskedDiffusion()) == row_capacity(8192, 1.0) == 8192
    geometric = 1 + (Spans().span_size - 1)
    assert capacity(Spans()) == row_capacity(8192, 0.3, unit_size=geometric) > row_capacity(8192, 0.3)
    assert geometric == pytest.approx(sum(n * n * q for n, q in enumerate(Spans().lengths, 1)) / 3.797, rel=1e-3)
    with pytest.raises(ValueError, match=r"row_capacity .*: expected how many"):
        capacity(RateColumn("rate"))


def test_schedules_and_strategies(wordpiece, make_rows) -> None:
    rows = make_rows(wordpiece)
    for strategy in (Spans(), Counts(rounded=True)):
        scheduled = collator_of(wordpiece, strategy, mlm_probability=Linear(0.1, 0.5, 4))
        scheduled.set_step(3)
        assert equal(scheduled(rows), collator_of(wordpiece, strategy, mlm_probability=0.4)(rows))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: WholeWords("span"), ValueError, "replace: expected 'token' or 'word', got 'span'"),
        (lambda: Spans(p=1.0), ValueError, "p: expected a number between 0 and 1, and not one of them, got 1.0"),
        (lambda: Spans(max_length=65), ValueError, "max_length: expected an int in"),
        (lambda: NGrams(()), ValueError, "shares: expected the probabilities"),
        (lambda: NGrams((0.5, 0.6)), ValueError, "span_lengths: expected probabilities that sum to 1"),
        (lambda: Counts(), ValueError, "exactly, rounded, at_least, max_predictions_per_row: expected at least one"),
        (lambda: Counts(exactly=3, rounded=True), ValueError, "exactly: expected None with rounded"),
        (
            lambda: Counts(at_least=3, max_predictions_per_row=2),
            ValueError,
            "max_predictions_per_row: expected an int in",
        ),
        (lambda: RandomRates(0.5, 0.2), ValueError, "low: expected no more than high, 0.2, got 0.5"),
        (lambda: TokenWeights(torch.tensor([0.5, -1])), ValueError, "weights: expected finite numbers from 0 on"),
        (lambda: TokenWeights([0.5]), TypeError, "weights: expected a .* tensor of numbers"),
        (lambda: MaskedDiffusion("square"), ValueError, "schedule: expected 'linear' or 'cosine', got 'square'"),
        (lambda: MaskedDiffusion(eps=0.0), ValueError, "eps: expected a number between 0 and 1"),
    ],
)
def test_bad_strategies(make, error, message) -> None:
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("strategy", "kwargs", "error", "message"),
    [
        ("words", {}, TypeError, "strategy: expected a strategy of fastmlm.strategies, or several, got 'words'"),
        ([Spans(), 3], {}, TypeError, "strategy: expected a strategy .* or several, got"),
        ([Spans(), NGrams()], {}, ValueError, "strategy: expected one that says span_lengths, got Spans.* and NGrams"),
        (
            [RandomRates(), RateColumn("x")],
            {},
            ValueError,
            "strategy: expected one that rates tokens or rows, got Random",
        ),
        (Spans(), {"rng": "torch"}, ValueError, "strategy: expected None with rng='torch' or mlm=False, got Spans"),
        (Spans(), {"mlm": False}, ValueError, "strategy: expected None with rng='torch' or mlm=False, got Spans"),
        (TokenWeights(torch.ones(3)), {}, ValueError, "weights, counts: expected one for each of .* ids, got 3 and 3"),
    ],
)
def test_bad_combinations(wordpiece, strategy, kwargs, error, message) -> None:
    with pytest.raises(error, match=message):
        collator_of(wordpiece, strategy, None, **kwargs)


@pytest.mark.parametrize(
    ("strategy", "row", "message"),
    [
        (RateColumn("r"), {}, r"features: expected a column 'r' of numbers for RateColumn\(column='r'\), got none"),
        (RateColumn("r"), {"r": "high"}, "features: expected a column 'r' of numbers .* got list"),
        (RateColumn("r"), {"r": 1}, "features: expected one float a row or a token in the column 'r', got torch.int64"),
        (RateColumn("r"), {"r": 1.5}, "mlm_probability: expected numbers between 0 and 1"),
        (WeightColumn("r"), {"r": 0.5}, "features: expected one number a token in the column 'r', got one a row"),
        (WeightColumn("r"), {"r": [0.5, -1.0]}, "features: expected numbers from 0 on in the column 'r'"),
        (Prompts("r"), {"r": 1.5}, "features: expected one int a row in the column 'r', got torch.float"),
        (RatesByLength(lambda n: 0.3), {}, "rate: expected a function that gives a tensor of 2 numbers, got float"),
        (
            (WeightColumn("r"), Counts(exactly=1)),
            {"r": [0.5, 1.0]},
            "mlm_probability: expected one number or one a row",
        ),
    ],
)
def test_bad_columns(wordpiece, strategy, row, message) -> None:
    with pytest.raises(ValueError, match=message):
        collator_of(wordpiece, strategy)([{"input_ids": [10, 11], **row}] * 2)
