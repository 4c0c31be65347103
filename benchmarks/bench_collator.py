"""The collator against Hugging Face's, from rows as data sets give them to a masked batch."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DataCollatorForLanguageModeling, DataCollatorWithFlattening

from fastmlm import DataCollatorForMaskedLM
from fastmlm.schedules import Linear

KINDS = {"lists": lambda row: row, "arrays": np.array, "tensors": torch.tensor}


def make_rows(ids: list[int], lengths: list[int], kind: str) -> list[dict[str, Any]]:
    """Rows of the three columns a BERT tokenizer gives."""
    starts = np.cumsum([0, *lengths])
    stream = ids * (1 + int(starts[-1]) // len(ids))
    convert = KINDS[kind]
    return [
        {
            "input_ids": convert(stream[start : start + length]),
            "token_type_ids": convert([0] * length),
            "attention_mask": convert([1] * length),
        }
        for start, length in zip(starts, lengths, strict=False)
    ]


def lengths_of(shape: str) -> list[int]:
    """``"64×512"``: 64 rows of 512; ``"64×64…512"``: of lengths spread evenly from 64 to 512."""
    rows, _, span = shape.partition("×")
    low, _, high = span.partition("…")
    return [int(n) for n in np.linspace(int(low), int(high or low), int(rows))]


@pytest.mark.parametrize(
    ("shape", "kind", "impl"),
    [
        ("16×128", "lists", "cpp"),
        ("64×512", "lists", "cpp"),
        ("64×512", "arrays", "cpp"),
        ("64×512", "tensors", "cpp"),
        ("64×64…512", "lists", "cpp"),
        ("8×8192", "lists", "cpp"),
        ("64×512", "lists", "reference"),
        ("64×64…512", "lists", "reference"),
    ],
)
def bench_collator(compare: Callable[..., None], corpus_ids: Any, shape: str, kind: str, impl: str) -> None:
    tokenizer, ids = corpus_ids
    rows = make_rows(ids, lengths_of(shape), kind)
    ours, theirs = DataCollatorForMaskedLM(tokenizer, impl=impl), DataCollatorForLanguageModeling(tokenizer)
    compare(
        lambda: ours(rows),
        lambda: theirs(rows),
        case=f"{shape}, dicts of {kind}",
        ours_name=f"DataCollatorForMaskedLM(impl={impl!r})",
        peer_name="HF collator",
        rounds=20,
        calls=20,
    )


def bench_collator_epochs(compare: Callable[..., None], corpus_ids: Any) -> None:
    """With masks by (seed, epoch, row content): the price of reproducible masks is in this row."""
    tokenizer, ids = corpus_ids
    rows = make_rows(ids, lengths_of("64×512"), "lists")
    ours, theirs = DataCollatorForMaskedLM(tokenizer, seed=1), DataCollatorForLanguageModeling(tokenizer, seed=1)
    ours.set_epoch(0)
    compare(
        lambda: ours(rows),
        lambda: theirs(rows),
        case="64×512, dicts of lists, masks by (seed, epoch, row)",
        ours_name="DataCollatorForMaskedLM(seed=1)",
        peer_name="HF collator, seed=1",
        rounds=20,
        calls=20,
    )


@pytest.mark.parametrize("kind", ["lists", "arrays"])
@pytest.mark.parametrize("scheduled", [False, True], ids=["rate", "schedule"])
def bench_collator_overhead(compare: Callable[..., None], corpus_ids: Any, kind: str, scheduled: bool) -> None:
    """Masks that are the same everywhere, against those of a collator that is told nothing: at most 10 % longer."""
    tokenizer, ids = corpus_ids
    rows = make_rows(ids, lengths_of("64×512"), kind)
    rate = Linear(0.15, 0.15, steps=1000) if scheduled else 0.15
    plain = DataCollatorForMaskedLM(tokenizer)
    same = DataCollatorForMaskedLM(tokenizer, seed=1, mlm_probability=rate)
    same.set_epoch(0)
    same.set_step(0)
    compare(
        lambda: same(rows),
        lambda: plain(rows),
        case=f"64×512, dicts of {kind}, masks by (seed, epoch, row{', step' if scheduled else ''})",
        ours_name=f"DataCollatorForMaskedLM(seed=1{', mlm_probability=Linear(…)' if scheduled else ''})",
        peer_name="DataCollatorForMaskedLM()",
        rounds=40,
        calls=20,
    )


@pytest.mark.parametrize("source", ["vocabulary", "offsets"])
def bench_collator_whole_words(compare: Callable[..., None], corpus_ids: Any, source: str) -> None:
    """Hugging Face's needs the offsets of tokens, ours the vocabulary; once with the same columns for both."""
    tokenizer, ids = corpus_ids
    rows = make_rows(ids, lengths_of("64×512"), "lists")
    with_offsets = [
        row | {"offset_mapping": [(5 * (i // 2) + 2 * (i % 2), 5 * (i // 2) + 2 * (i % 2) + 2) for i in range(512)]}
        for row in rows
    ]
    ours = DataCollatorForMaskedLM(tokenizer, whole_word_mask=True)
    theirs = DataCollatorForLanguageModeling(
        tokenizer, whole_word_mask=True, mask_replace_prob=1, random_replace_prob=0
    )
    compare(
        lambda: ours(rows if source == "vocabulary" else with_offsets),
        lambda: theirs(with_offsets),
        case=f"64×512, dicts of lists, whole words ({source}; HF: offsets)",
        ours_name="DataCollatorForMaskedLM(whole_word_mask=True)",
        peer_name="HF collator, whole_word_mask=True",
        rounds=10,
        calls=15,
    )


def bench_collator_packing(compare: Callable[..., None], corpus_ids: Any) -> None:
    """The peer flattens and does not mask: Hugging Face has no collator that does both."""
    tokenizer, ids = corpus_ids
    rows = [{"input_ids": row["input_ids"]} for row in make_rows(ids, lengths_of("64×64…512"), "lists")]
    ours = DataCollatorForMaskedLM(tokenizer, packing=True)
    theirs = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    compare(
        lambda: ours(rows),
        lambda: theirs(rows),
        case="64×64…512, dicts of lists, packed",
        ours_name="DataCollatorForMaskedLM(packing=True)",
        peer_name="HF DataCollatorWithFlattening, no masks",
        rounds=20,
        calls=20,
    )
