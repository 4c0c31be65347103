"""``mask_tokens``, native and in PyTorch, against Hugging Face's ``torch_mask_tokens``, on padded tensors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DataCollatorForLanguageModeling

from fastmlm import MaskingSpec, mask_tokens

SHAPES = [(16, 128), (64, 512), (8, 8192)]


@pytest.mark.parametrize("impl", ["cpp", "reference"])
@pytest.mark.parametrize("given", ["column", "ids"])
@pytest.mark.parametrize(("rows", "length"), SHAPES)
def bench_mask_tokens(
    compare: Callable[..., None], corpus_ids: Any, rows: int, length: int, given: str, impl: str
) -> None:
    tokenizer, ids = corpus_ids
    stream = torch.tensor(ids).repeat(-(-rows * length // len(ids)))
    batch = stream[: rows * length].view(rows, length)
    special = torch.zeros_like(batch) if given == "column" else None
    theirs = DataCollatorForLanguageModeling(tokenizer)
    spec = MaskingSpec.from_tokenizer(tokenizer)
    compare(
        lambda: mask_tokens(batch, spec, seed=1, special_tokens_mask=special, impl=impl),
        # A fresh copy, since it masks its input in place; the copy is about 1 % of its time.
        lambda: theirs.torch_mask_tokens(batch.clone(), special_tokens_mask=special),
        case=f"{rows}×{length}, specials from {'a column' if special is not None else 'the ids'}",
        ours_name=f"mask_tokens(impl={impl!r})",
        peer_name="HF torch_mask_tokens",
        rounds=20,
        calls=20,
    )
