"""Hugging Face's masking with its own random stream, bit for bit: the proof that the collator is a drop-in."""

from collections.abc import Callable

import torch
from torch import Generator, Tensor


def mask_tokens(
    input_ids: Tensor,
    never: Tensor,
    spread: Callable[[Tensor], Tensor],
    *,
    mask_token_id: int,
    vocab_size: int,
    mlm_probability: float,
    mask_replace_prob: float,
    random_replace_prob: float,
    generator: Generator | None,
) -> tuple[Tensor, Tensor]:
    """What ``DataCollatorForLanguageModeling.torch_mask_tokens`` makes of the same generator state.

    Its order of draws: selection, mask token, then (unless nothing is left to replace) random token or not, and random
    ids; each for every position of the batch, selected or not.

    Args:
        input_ids: (B, S) int64; not changed.
        never: (B, S) bool, where no draw selects.
        spread: from the positions drawn to those selected: the identity, or whole words from their first tokens.
        generator: None: torch's global one.

    Returns:
        input_ids with replacements, and labels.
    """

    def bernoulli(rate: Tensor) -> Tensor:
        return torch.bernoulli(rate, generator=generator).bool()

    shape = input_ids.shape
    selected = spread(bernoulli(torch.full(shape, mlm_probability, device=input_ids.device).masked_fill_(never, 0.0)))
    labels = input_ids.masked_fill(~selected, -100)
    masked = bernoulli(torch.full(shape, mask_replace_prob, device=input_ids.device)) & selected
    output = input_ids.masked_fill(masked, mask_token_id)
    if mask_replace_prob == 1 or random_replace_prob == 0:
        return output, labels
    rate = random_replace_prob / (1 - mask_replace_prob)
    random = bernoulli(torch.full(shape, rate, device=input_ids.device)) & selected & ~masked
    random_ids = torch.randint(vocab_size, shape, dtype=torch.long, generator=generator, device=input_ids.device)
    return torch.where(random, random_ids, output), labels
