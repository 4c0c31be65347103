"""Permutation language modelling (XLNet) against Hugging Face's collator, which takes even lengths only."""

from collections.abc import Callable
from typing import Any

import pytest
from transformers import DataCollatorForPermutationLanguageModeling

from fastmlm import DataCollatorForPermutationLM


def make_rows(tokenizer: Any, ids: list[int], count: int, length: int) -> list[dict[str, Any]]:
    """Rows of text between [CLS] and [SEP]; Hugging Face's reads nothing but their ids."""
    width = length - 2
    stream = ids * (1 + count * width // len(ids))
    cls, sep = tokenizer.cls_token_id, tokenizer.sep_token_id
    return [{"input_ids": [cls, *stream[i * width : (i + 1) * width], sep]} for i in range(count)]


@pytest.mark.parametrize(
    ("shape", "impl"), [("16×128", "cpp"), ("32×512", "cpp"), ("64×512", "cpp"), ("64×512", "reference")]
)
def bench_permutation(compare: Callable[..., None], corpus_ids: Any, shape: str, impl: str) -> None:
    tokenizer, ids = corpus_ids
    rows = make_rows(tokenizer, ids, *map(int, shape.split("×")))
    ours = DataCollatorForPermutationLM(tokenizer, seed=1, impl=impl)
    ours.set_epoch(0)  # reproducible, which theirs is not
    theirs = DataCollatorForPermutationLanguageModeling(tokenizer)
    compare(
        lambda: ours(rows),
        lambda: theirs(rows),
        case=f"{shape}, dicts of lists, permutation LM",
        ours_name=f"DataCollatorForPermutationLM(seed=1, impl={impl!r})",
        peer_name="HF permutation collator",
        rounds=10,
        calls=10,
    )
