"""Hugging Face's masking with its own random stream, bit for bit: the proof that the collator is a drop-in."""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor
from torch.utils.data import get_worker_info
from transformers import DataCollatorForLanguageModeling

from fastmlm.spec import SPECIAL, MaskingSpec


class HuggingFaceRandom(DataCollatorForLanguageModeling):
    """Hugging Face's collator, with what it takes to mask a batch by a generator, as ``rng="torch"`` asks for it."""

    generator: Any

    @property
    def spec(self) -> MaskingSpec:
        """The settings as ``mask_tokens`` takes them."""
        raise NotImplementedError

    def get_generator(self, seed: int, return_tensors: str | None = None) -> torch.Generator | np.random.Generator:
        """The generator of ``rng="torch"``: torch's, or numpy's for arrays."""
        if (return_tensors or self.return_tensors) == "pt":
            return torch.Generator().manual_seed(seed)
        return np.random.default_rng(seed)

    def create_rng(self, return_tensors: str | None = None) -> None:
        """Seed the generator of ``rng="torch"``: with the seed, in a worker plus its id, as Hugging Face does."""
        worker = get_worker_info()
        self.generator = self.get_generator(self.seed + (worker.id if worker else 0), return_tensors)
        self._generator_pid = os.getpid()

    def _seed_generator(self, return_tensors: str) -> None:
        kind = torch.Generator if return_tensors == "pt" else np.random.Generator
        if self.seed is not None and (not isinstance(self.generator, kind) or self._generator_pid != os.getpid()):
            self.create_rng(return_tensors)

    def _mask_by_generator(
        self, inputs: Tensor, special_tokens_mask: Tensor | None, offset_mapping: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Hugging Face's masks: its stream, its rule for specials (the column if there, else ids), its words."""
        self._seed_generator("pt")
        if special_tokens_mask is None:
            flags, _ = self.spec.tables(inputs.device)
            special = (flags[inputs.clamp(0, flags.numel() - 1)] & SPECIAL) != 0
        else:
            special = special_tokens_mask.bool()
        never, spread = special, lambda drawn: drawn
        if self.whole_word_mask:
            if offset_mapping is None:
                raise ValueError("offset_mapping: expected this column with whole_word_mask and rng='torch', got none")
            word_ids, not_first = self._calc_word_ids_and_prob_mask(offset_mapping.numpy(), special.numpy())
            never = torch.from_numpy(not_first)
            spread = lambda drawn: torch.from_numpy(self._whole_word_mask(word_ids, drawn))  # noqa: E731
        return mask_tokens(
            inputs,
            never,
            spread,
            mask_token_id=self.tokenizer.mask_token_id,
            vocab_size=len(self.tokenizer),
            mlm_probability=self.mlm_probability,
            mask_replace_prob=self.mask_replace_prob,
            random_replace_prob=self.random_replace_prob,
            generator=self.generator,
        )


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
