"""What strategies cost beside masking token by token: the kernels alone, and in the collator."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from bench_collator import lengths_of, make_rows

from fastmlm import DataCollatorForMaskedLM, MaskingSpec, Selection, mask_tokens
from fastmlm.strategies import (
    Counts,
    MaskedDiffusion,
    NGrams,
    RandomRates,
    Spans,
    TokenWeights,
    WholeWords,
)
from fastmlm.strategies.words import marks_by_id

SHAPE = "64×512"
STRATEGIES = {
    "WholeWords()": lambda size: WholeWords(),
    "NGrams()": lambda size: NGrams(),
    "Spans()": lambda size: Spans(),
    "Spans(whole_words=True)": lambda size: Spans(whole_words=True),
    "Counts(rounded=True)": lambda size: Counts(rounded=True),
    "Counts(exactly=77)": lambda size: Counts(exactly=77),
    "TokenWeights(weights)": lambda size: TokenWeights(1.0 + torch.arange(size) % 7),
    "RandomRates(0.1, 0.2)": lambda size: RandomRates(0.1, 0.2),
    "MaskedDiffusion()": lambda size: MaskedDiffusion(),
}


def kernel_arguments(strategy: Any, tokenizer: Any) -> tuple[MaskingSpec, dict[str, Any]]:
    """What a collator with this strategy gives to ``mask_tokens`` beside ids and keys."""
    spec = MaskingSpec.from_tokenizer(tokenizer, **strategy.replaces())
    marks = marks_by_id(tokenizer) if strategy.whole_words else None
    said = strategy.selects(spec)
    selection = Selection(word_marks=marks, **said) if said or marks is not None else None
    generator = torch.Generator().manual_seed(0)
    rates = None
    if strategy.highest is not None:
        low, high = (strategy.eps, 1.0) if isinstance(strategy, MaskedDiffusion) else (strategy.low, strategy.high)
        rates = low + (high - low) * torch.rand(64, dtype=torch.float64, generator=generator)
    return spec, {"selection": selection, "mlm_probability": rates}


@pytest.mark.parametrize("name", STRATEGIES)
def bench_strategy(compare: Callable[..., None], corpus_ids: Any, name: str) -> None:
    tokenizer, ids = corpus_ids
    plain = MaskingSpec.from_tokenizer(tokenizer)
    spec, arguments = kernel_arguments(STRATEGIES[name](plain.vocab_size), tokenizer)
    batch = torch.tensor([row["input_ids"] for row in make_rows(ids, lengths_of(SHAPE), "lists")])
    compare(
        lambda: mask_tokens(batch, spec, seed=1, **arguments),
        lambda: mask_tokens(batch, plain, seed=1),
        case=f"strategy: {SHAPE}, mask_tokens",
        ours_name=name,
        peer_name="mask_tokens, token by token",
        rounds=40,
        calls=20,
    )


@pytest.mark.parametrize("name", STRATEGIES)
def bench_strategy_in_collator(compare: Callable[..., None], corpus_ids: Any, name: str) -> None:
    tokenizer, ids = corpus_ids
    rows = make_rows(ids, lengths_of(SHAPE), "lists")
    plain = DataCollatorForMaskedLM(tokenizer, seed=1)
    ours = DataCollatorForMaskedLM(tokenizer, seed=1, strategy=STRATEGIES[name](len(tokenizer)))
    for collator in (plain, ours):
        collator.set_epoch(0)
    compare(
        lambda: ours(rows),
        lambda: plain(rows),
        case=f"strategy: {SHAPE}, collator",
        ours_name=name,
        peer_name="DataCollatorForMaskedLM(seed=1)",
        rounds=40,
        calls=20,
    )
