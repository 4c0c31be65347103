"""The checks of a collator's arguments: one clear error for each that is wrong, or does not go with another."""

import warnings
from typing import Any

from fastmlm.schedules import rate_at
from fastmlm.spec import MaskingSpec, integer

_MANY_SPECIALS = 0.05  # share of the vocabulary from which random words are too often special tokens


def check_arguments(collator: Any) -> None:
    """Raise unless the arguments of a `fastmlm.DataCollatorForMaskedLM` are what it takes, and go together.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """
    if collator.rng not in ("philox", "torch"):
        raise ValueError(f"rng: expected 'philox' or 'torch', got {collator.rng!r}")
    _check_values(collator)
    _check_copies(collator)
    if collator.rng == "torch":
        _check_without_counter(collator)
    if collator.mask_on_device and (collator.rng == "torch" or not collator.mlm or collator.return_tensors != "pt"):
        raise ValueError("mask_on_device: expected False with rng='torch', mlm=False or return_tensors='np', got True")
    if collator.strategy is not None and (collator.rng == "torch" or not collator.mlm):
        raise ValueError(f"strategy: expected None with rng='torch' or mlm=False, got {collator.strategy!r}")
    if collator.mlm and collator.rng == "philox":
        if collator.mlm_probability is None:
            raise ValueError("mlm_probability: expected a number between 0 and 1, or a schedule, got None")
        if callable(collator.mlm_probability):
            rate_at(collator.mlm_probability, 0)


def check_arrangement(collator: Any, return_tensors: str = "pt") -> None:
    """Raise where a strategy's attention masks have no room, or its positions cannot be known.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    strategy = collator.strategies.arranges
    if strategy is None:
        return
    size = "(B, 1, S, S), and packed rows have one sequence"
    if collator.packing:
        raise ValueError(f"packing: expected False with {strategy!r}, whose attention masks are {size}, got True")
    if return_tensors != "pt" or collator.return_tensors != "pt":
        raise ValueError(f"return_tensors: expected 'pt' with {strategy!r}, whose batches are tensors, got 'np'")
    if strategy.appends and collator.mask_on_device:
        raise ValueError(
            f"mask_on_device: expected False with {strategy!r}, whose masks say how long a batch is, got True"
        )


def _check_values(collator: Any) -> None:
    if isinstance(collator.random_words, str) and collator.random_words not in ("all", "non_special"):
        raise ValueError(f"random_words: expected 'all', 'non_special' or ids, got {collator.random_words!r}")
    start = collator.position_ids_start
    if not isinstance(start, int) or start < 0 or (start and not collator.packing):
        raise ValueError(f"position_ids_start: expected an int from 0 on, only 0 without packing, got {start!r}")
    collator._checked_seed()
    if not callable(getattr(collator.tokenizer, "get_vocab", None)):
        raise TypeError(f"tokenizer: expected one of transformers, got {type(collator.tokenizer).__name__}")
    if collator.pad_to_multiple_of is not None:
        integer("pad_to_multiple_of", collator.pad_to_multiple_of, 1, 1 << 31)
    if collator.row_key_column is not None and not isinstance(collator.row_key_column, str):
        raise ValueError(f"row_key_column: expected a column's name, got {collator.row_key_column!r}")


def _check_copies(collator: Any) -> None:
    if collator.static and collator.static_copies is not None:
        raise ValueError(f"static_copies: expected None with static=True, got {collator.static_copies!r}")
    if collator.static_copies is not None:
        integer("static_copies", collator.static_copies, 1, 1 << 63)
    if (collator.static or collator.static_copies is not None) and (collator.seed is None or collator.rng == "torch"):
        name, got = "static" if collator.static else "static_copies", f"{collator.seed!r} and {collator.rng!r}"
        raise ValueError(f"{name}: expected a seed and rng='philox' with it, got {got}")


def _check_without_counter(collator: Any) -> None:
    """Hugging Face's masks have no room for these."""
    defaults = (("random_words", "all"), ("exclude_original", False), ("impl", None), ("row_key_column", None))
    for name, default in defaults:
        value = getattr(collator, name)
        if type(value) is not type(default) or value != default:
            raise ValueError(f"{name}: expected {default!r} with rng='torch', got {value!r}")
    if callable(collator.mlm_probability):
        raise ValueError(f"mlm_probability: expected a number with rng='torch', got {collator.mlm_probability!r}")


def warn_of_many_specials(spec: MaskingSpec) -> None:
    """Say so where random words, drawn from the whole vocabulary, are special tokens too often."""
    share = len(spec.special_token_ids) / spec.vocab_size
    if share > _MANY_SPECIALS:
        warnings.warn(
            f"{share:.0%} of the vocabulary are special tokens, and random words are drawn from all of it, as in "
            "the BERT paper; random_words='non_special' draws from the others",
            stacklevel=4,  # the caller of the collator's constructor
        )
