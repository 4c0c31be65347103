"""What strategies select: whole words, spans of the right lengths, counts, rates and weights; by chi-square."""

from typing import Any

import numpy as np
import pytest
import torch
from batches import many, originals, selected
from scipy import stats
from test_strategies import collator_of, rows_for, weights_of_ids
from test_words import encode, groups, selected_together

from fastmlm import MaskingSpec
from fastmlm.strategies import (
    Counts,
    NGrams,
    Prompts,
    RandomRates,
    RateColumn,
    RatesByLength,
    Spans,
    TokenWeights,
    WeightColumn,
    WholeWords,
    inverse_frequency,
)

# ---- Words and spans ----


def many_draws(tokenizer: Any, rows: list[Any], strategy: Any, times: int) -> torch.Tensor:
    collator = collator_of(tokenizer, strategy, mlm_probability=0.5)
    found = []
    for epoch in range(times):
        collator.set_epoch(epoch)
        found.append(selected(collator(rows)))
    return torch.stack(found)


@pytest.mark.parametrize("source", ["vocabulary", "offset_mapping", "word_ids"])
@pytest.mark.parametrize("family", ["wordpiece", "byte_level", "unigram"])
@pytest.mark.parametrize(
    "strategy", [WholeWords("word"), Spans(whole_words=True), NGrams()], ids=["words", "spans", "ngrams"]
)
def test_words_are_never_split(tokenizers, sentences, family, source, strategy) -> None:
    tokenizer = tokenizers[family]
    rows, word_ids = encode(tokenizer, sentences[:4], source)
    drawn = many_draws(tokenizer, rows, strategy, 40)
    for i, ids in enumerate(word_ids):
        together = selected_together(drawn, i, len(ids), drawn.shape[2] - len(ids) if family == "unigram" else 0)
        words = groups(ids)
        if isinstance(strategy, WholeWords) and (family == "wordpiece" or source == "word_ids"):
            assert together == words  # elsewhere punctuation adjoins a word
        for word in words:
            assert any(set(word) <= set(unit) for unit in together), "a word was split"


def span_lengths(batch: Any) -> list[int]:
    """The lengths of runs of selected tokens."""
    lengths = []
    for row in selected(batch):
        edges = torch.diff(row.int(), prepend=torch.zeros(1), append=torch.zeros(1)).nonzero().flatten()
        lengths += (edges[1::2] - edges[::2]).tolist()
    return lengths


def test_spans_have_their_lengths(wordpiece) -> None:
    """At a low rate two spans seldom meet, so that runs are spans: chi-square against the geometric shares."""
    strategy, rows = Spans(p=0.3, max_length=5), many(wordpiece, count=2000, length=120)
    lengths = span_lengths(collator_of(wordpiece, strategy, mlm_probability=0.004)(rows))
    counts = np.bincount(lengths, minlength=8)[1:]
    assert counts[5:].sum() <= 0.02 * counts.sum()  # two that met
    shares = np.array(strategy.lengths)
    observed = counts[:5]
    assert stats.chisquare(observed, shares * observed.sum()).pvalue > 1e-3
    assert len(lengths) > 200


@pytest.mark.parametrize("strategy", [Spans(), Spans(whole_words=True), NGrams(), WholeWords()], ids=str)
def test_the_budget_is_exact(wordpiece, strategy) -> None:
    """Every position is selected at the rate, the first and the last as well, within five standard errors."""
    rows = many(wordpiece, count=64, length=32)
    rate = many_draws(wordpiece, rows, strategy, 60).double().mean((0, 1))
    error = 5 * (0.25 / (60 * 64)) ** 0.5
    assert bool(((rate - 0.5).abs() < error).all())


@pytest.mark.parametrize(
    ("strategy", "whole"), [(Spans(), True), (Spans(replace="token"), False), (WholeWords("word"), True)]
)
def test_one_action_for_a_unit(wordpiece, strategy, whole) -> None:
    """Of runs of selected tokens, all of one action unless two units met, or actions are drawn for tokens."""
    rows = many(wordpiece, count=400, length=120)
    batch = collator_of(wordpiece, strategy, mlm_probability=0.01, mask_replace_prob=0.5, random_replace_prob=0.0)(rows)
    chosen, masked = selected(batch), batch["input_ids"] == wordpiece.mask_token_id
    runs = [
        row_masked[run].unique().numel()
        for row_chosen, row_masked in zip(chosen, masked, strict=True)
        for run in groups([bool(x) or None for x in row_chosen.tolist()])
        if len(run) > 1
    ]
    mixed = runs.count(2) / len(runs)
    assert len(runs) > 20
    assert mixed < 0.15 if whole else mixed > 0.4


# ---- Counts ----


def test_counts(wordpiece) -> None:
    rows = [{"input_ids": [2, *range(10, 10 + n), 3]} for n in (0, 1, 2, 6, 30, 200)]
    lengths = torch.tensor([0, 1, 2, 6, 30, 200])
    for strategy, expected in (
        (Counts(exactly=4), lengths.clamp(max=4)),
        (Counts(rounded=True), ((0.3 * lengths) + 0.5).long()),
        (Counts(rounded=True, at_least=1, max_predictions_per_row=20),
         ((0.3 * lengths) + 0.5).long().clamp(1, 20).minimum(lengths)),
    ):  # fmt: skip
        assert selected(collator_of(wordpiece, strategy)(rows)).sum(1).tolist() == expected.tolist()
    drawn = many_draws(wordpiece, rows, Counts(at_least=2, max_predictions_per_row=17), 30).sum(2)
    assert bool((drawn >= lengths.clamp(max=2)).all())
    assert drawn.max() == 17
    assert len(set(drawn[:, 4].tolist())) > 3  # between the bounds, chance decides


def test_counts_of_words_keep_words_whole(wordpiece, sentences) -> None:
    rows, word_ids = encode(wordpiece, sentences[:8], "vocabulary")
    drawn = many_draws(wordpiece, rows, (WholeWords(), Counts(rounded=True, max_predictions_per_row=6)), 40)
    assert drawn.sum(2).max() == 6
    for i, ids in enumerate(word_ids):
        for word in groups(ids):
            assert len({tuple(column) for column in drawn[:, i, word].T.tolist()}) == 1


# ---- Rates ----


def test_random_rates_are_uniform(wordpiece) -> None:
    rows = many(wordpiece, count=400, length=300)
    shares = selected(collator_of(wordpiece, RandomRates(0.2, 0.8))(rows)).double().mean(1)
    # The share of 300 tokens lies within 0.03 of the rate, as a rule: a distance that is small beside 0.6.
    assert stats.kstest((shares - 0.2) / 0.6, "uniform").statistic < 0.1
    assert 0.1 < shares.min() < 0.25
    assert 0.75 < shares.max() < 0.9


def test_rates_by_length_and_column(wordpiece) -> None:
    rows = [{"input_ids": row["input_ids"][: (50, 400)[i % 2]]} for i, row in enumerate(many(wordpiece, 80, 400))]
    rows = [row | {"rate": 0.9 if len(row["input_ids"]) > 100 else 0.1} for row in rows]
    for strategy in (RateColumn("rate"), RatesByLength(lambda n: torch.where(n > 100, 0.9, 0.1))):
        shares = selected(collator_of(wordpiece, strategy)(rows)).sum(1) / torch.tensor([50, 400] * 40)
        assert shares[::2].mean() == pytest.approx(0.1, abs=0.03)  # 2000 tokens: four standard errors
        assert shares[1::2].mean() == pytest.approx(0.9, abs=0.01)


def test_weights_of_tokens_and_columns(wordpiece) -> None:
    """Each id is selected at its rate, and the budget is what it is without weights."""
    rows = many(wordpiece, count=400, length=200)
    weights = weights_of_ids(wordpiece)
    ids = torch.tensor(np.stack([row["input_ids"] for row in rows]))
    for row in rows:
        row["weights"] = weights[torch.tensor(row["input_ids"])].tolist()
    for strategy in (TokenWeights(weights), WeightColumn("weights")):
        kept = [row if isinstance(strategy, WeightColumn) else {"input_ids": row["input_ids"]} for row in rows]
        chosen = selected(collator_of(wordpiece, strategy)(kept))
        assert chosen.double().mean() == pytest.approx(0.3, abs=0.005)
        by_weight = [float(chosen[weights[ids] == w].double().mean()) for w in range(1, 8)]
        assert by_weight == pytest.approx([0.3 * w / 4 for w in range(1, 8)], abs=0.02)


def test_inverse_frequency_keeps_the_budget_where_rates_reach_one() -> None:
    counts = torch.tensor([1000.0, 100, 10, 1, 0])
    spec = MaskingSpec(mask_token_id=0, vocab_size=5, mlm_probability=0.2)
    rates = inverse_frequency(counts).selects(spec)["rates_by_id"]
    assert float((rates * counts).sum() / counts.sum()) == pytest.approx(0.2)
    assert rates[2] == rates[3] == rates[4] == 1.0
    assert rates[1] / rates[0] == pytest.approx(10**0.5)
    without = inverse_frequency(counts).selects(MaskingSpec(0, 5, (0,), mlm_probability=0.4))["rates_by_id"]
    assert float((without * counts)[1:].sum() / counts[1:].sum()) == pytest.approx(0.4)


def test_prompts_are_protected(wordpiece, make_rows) -> None:
    for side in ("left", "right"):
        wordpiece.padding_side = side
        rows = rows_for(wordpiece, Prompts(), make_rows)
        batch = collator_of(wordpiece, Prompts(), mlm_probability=1.0)(rows)
        for row, chosen, real in zip(rows, selected(batch), batch["attention_mask"] == 1, strict=True):
            special = [i in wordpiece.all_special_ids for i in row["input_ids"]]
            expected = [s >= row["prompt_length"] and not special[s] for s in range(len(special))]
            assert chosen[real].tolist() == expected
        assert "prompt_length" not in batch
        assert torch.equal(
            originals(batch)[batch["attention_mask"] == 1], torch.cat([torch.tensor(r["input_ids"]) for r in rows])
        )
