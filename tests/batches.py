"""Batches, and what the collator's tests ask of them."""

import numpy as np
import torch

SPECIALS = [0, 1, 2, 3, 4]  # of every tokenizer but the amino acids'


def equal(one, other) -> bool:
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


def selected(batch) -> torch.Tensor:
    return batch["labels"] != -100


def originals(batch) -> torch.Tensor:
    return torch.where(selected(batch), batch["labels"], batch["input_ids"])


def many(tokenizer, count=64, length=128, seed=0) -> list[dict]:
    """Rows of random ordinary ids, enough to measure rates."""
    ids = np.random.default_rng(seed).integers(5, len(tokenizer), (count, length))
    return [{"input_ids": row} for row in ids]
