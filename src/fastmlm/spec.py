"""What to mask and with what: the settings of masked language modelling, checked once, as the integers kernels use."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPECIAL, RANDOM, STARTS_WORD, ENDS_WORD = 1, 2, 4, 8  # bits of the table by id

_TWO32 = 1 << 32


def threshold(p: float) -> int:
    """T(p) = p · 2^32 rounded half to even, in [0, 2^32]: a uint32 draw is below it with probability p."""
    return round(float(p) * _TWO32)


def probability(name: str, value: object) -> float:
    """``float(value)`` if it is a number in [0, 1] (Python, numpy or 0-dim tensor), else an error that names it."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if not isinstance(value, Real):
        raise TypeError(f"{name}: expected a number between 0 and 1, got {type(value).__name__}")
    p = float(value)
    if not 0 <= p <= 1:  # also catches nan
        raise ValueError(f"{name}: expected a number between 0 and 1, got {value}")
    return p


def integer(name: str, value: object, low: int, high: int) -> int:
    """``int(value)`` if it is an integer (Python's or numpy's) in [low, high), else an error that names it."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    number = int(value)
    if not low <= number < high:
        raise ValueError(f"{name}: expected an int in [{low}, {high}), got {value}")
    return number


def _ids(name: str, values: Iterable[int], vocab_size: int) -> tuple[int, ...]:
    if isinstance(values, Tensor):
        values = values.tolist()
    if not isinstance(values, Iterable) or isinstance(values, str):
        raise TypeError(f"{name}: expected ids, got {type(values).__name__}")
    return tuple(integer(f"{name}[{i}]", value, 0, vocab_size) for i, value in enumerate(values))


@dataclass(frozen=True)
class MaskingSpec:
    """The law of masking: which tokens may be selected, how often, and what replaces them.

    Devlin et al., "BERT" (2019), section 3.1: 15 % of the tokens are selected; of these 80 % become the mask token,
    10 % a random token and 10 % stay. Frozen and hashable; every value is checked here and nowhere else.

    Args:
        mask_token_id: id that replaces selected tokens, in [0, vocab_size).
        vocab_size: ids run from 0 to vocab_size - 1; others are never selected.
        special_token_ids: ids never selected ([CLS], [SEP], [PAD] ...).
        mlm_probability: share of the selectable tokens to select.
        mask_replace_prob: share of the selected tokens that become the mask token.
        random_replace_prob: share of the selected tokens that become a random token; the two sum to at most 1, and what
            is left stays as it was. Not 0 but below K · 2⁻²⁸ for K random ids is refused: not every id could be drawn.
        random_token_ids: the K ids to draw random tokens from; None: all of [0, vocab_size), as in the BERT paper.
        exclude_original: never draw the original as its own random replacement.
        ignore_index: label where nothing is selected.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """

    mask_token_id: int
    vocab_size: int
    special_token_ids: tuple[int, ...] = ()
    mlm_probability: float = 0.15
    mask_replace_prob: float = 0.8
    random_replace_prob: float = 0.1
    random_token_ids: tuple[int, ...] | None = None
    exclude_original: bool = False
    ignore_index: int = -100
    # Derived: the thresholds and the multiplier of the draw law.
    mask_threshold: int = field(init=False, repr=False, compare=False)
    random_threshold: int = field(init=False, repr=False, compare=False)
    _tables: dict[torch.device, tuple[Tensor, Tensor | None]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        put = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731 - frozen: the one way in
        put("vocab_size", integer("vocab_size", self.vocab_size, 1, 1 << 31))
        put("mask_token_id", integer("mask_token_id", self.mask_token_id, 0, self.vocab_size))
        put("ignore_index", integer("ignore_index", self.ignore_index, -(1 << 31), 1 << 31))
        if not isinstance(self.exclude_original, bool):
            raise TypeError(f"exclude_original: expected a bool, got {type(self.exclude_original).__name__}")
        special = _ids("special_token_ids", self.special_token_ids, self.vocab_size)
        put("special_token_ids", tuple(sorted(set(special))))
        for name in ("mlm_probability", "mask_replace_prob", "random_replace_prob"):
            put(name, probability(name, getattr(self, name)))
        if self.mask_replace_prob + self.random_replace_prob > 1:
            raise ValueError(
                "mask_replace_prob + random_replace_prob: expected at most 1, got "
                f"{self.mask_replace_prob} + {self.random_replace_prob}"
            )
        if self.random_token_ids is not None:
            ids = _ids("random_token_ids", self.random_token_ids, self.vocab_size)
            if not ids or len(set(ids)) < len(ids):
                raise ValueError(f"random_token_ids: expected distinct ids, at least one, got {_shorten(ids)}")
            put("random_token_ids", ids)
        if 0 < self.random_replace_prob < self.random_count * 2.0**-28:
            raise ValueError(
                f"random_replace_prob: expected 0 or at least {self.random_count * 2.0**-28:.3g} (2^-28 for each of "
                f"{self.random_count} random ids, so that every id can be drawn), got {self.random_replace_prob}"
            )
        put("mask_threshold", threshold(self.mask_replace_prob))
        put("random_threshold", min(_TWO32, self.mask_threshold + threshold(self.random_replace_prob)))
        put("_tables", {})

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_tables": {}}  # tables are rebuilt where a pickled spec lands

    @classmethod
    def from_tokenizer(cls, tokenizer: PreTrainedTokenizerBase, **overrides: Any) -> MaskingSpec:
        """The settings a transformers tokenizer implies: mask token, specials, and ids up to its largest one.

        ``vocab_size`` is the largest id + 1, added tokens included; where ids have gaps, random tokens are the ids that
        exist. ``overrides`` are arguments of :class:`MaskingSpec`.

        Raises:
            ValueError: the tokenizer has no mask token.
        """
        if tokenizer.mask_token_id is None:
            raise ValueError(
                f"tokenizer: expected one with a mask token, got {type(tokenizer).__name__} without; "
                "set tokenizer.mask_token or use mlm=False"
            )
        ids = set(tokenizer.get_vocab().values())
        settings: dict[str, Any] = {
            "mask_token_id": tokenizer.mask_token_id,
            "vocab_size": max(ids) + 1,
            "special_token_ids": [i for i in tokenizer.all_special_ids if i is not None],
        }
        if len(ids) <= max(ids):
            settings["random_token_ids"] = sorted(ids)
        return cls(**settings | overrides)

    @property
    def random_count(self) -> int:
        """K: how many ids random tokens are drawn from."""
        return self.vocab_size if self.random_token_ids is None else len(self.random_token_ids)

    def tables(self, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """What kernels look up by id, built once a device.

        Returns:
            flags, (vocab_size,) uint8: bit 0 special, bit 1 in the random table; and ``random_token_ids``, (K,) int64,
            or None where they are all of [0, vocab_size).
        """
        if device in self._tables:
            return self._tables[device]
        flags = torch.zeros(self.vocab_size, dtype=torch.uint8, device="cpu")
        flags[list(self.special_token_ids)] = SPECIAL
        ids = None if self.random_token_ids is None else torch.tensor(self.random_token_ids, device="cpu")
        flags[slice(None) if ids is None else ids] |= RANDOM
        tables = flags.to(device), None if ids is None else ids.to(device)
        if type(flags) is Tensor and not torch.compiler.is_exporting():  # a trace's tensors are fakes, no good to keep
            self._tables[device] = tables
        return tables


def _shorten(ids: tuple[int, ...]) -> str:
    return str(ids) if len(ids) <= 8 else f"({', '.join(map(str, ids[:8]))}, ... {len(ids)} in all)"


def check_ids(lowest: int, highest: int, vocab_size: int) -> None:
    """Raise ValueError unless all ids of a batch are in [0, vocab_size)."""
    if lowest < 0 or highest >= vocab_size:
        raise ValueError(
            f"input_ids: expected ids in [0, {vocab_size}), got {lowest if lowest < 0 else highest}; if tokens were "
            "added, the spec's vocab_size (and the model's embedding) must grow with them"
        )


def thresholds(p: Tensor) -> Tensor:
    """T(p) of every element, from its exact value in its own dtype: int64 in [0, 2^32]; out of range is clamped."""
    return torch.round(p.to(torch.float64).nan_to_num(nan=0.0).clamp(0, 1) * math.ldexp(1, 32)).to(torch.int64)
