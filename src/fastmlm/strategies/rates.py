"""Rates that differ from row to row, or from token to token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastmlm.philox import RATES
from fastmlm.spec import MaskingSpec, probability
from fastmlm.strategies.base import Batch, Strategy


@dataclass(frozen=True)
class RandomRates(Strategy):
    """``p = low + (high - low) * torch.rand(B)``: each row has a mask probability of its own.

    Args:
        low, high: the range.

    Law: ``p = low + (high - low) * (draw_6(0) + 0.5) * 2^-32`` of the row, in float64.

    Source: Liao et al., "Probabilistically Masked Language Model" (2020), section 3.1 (uniform from 0 to 1).
    """

    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        if probability("low", self.low) > probability("high", self.high):
            raise ValueError(f"low: expected no more than high, {self.high}, got {self.low}")

    @property
    def highest(self) -> float:  # type: ignore[override]
        return self.high

    def rates(self, batch: Batch) -> Tensor:
        return self.low + (self.high - self.low) * uniform(batch)


@dataclass(frozen=True)
class RatesByLength(Strategy):
    """``p = rate(attention_mask.sum(1))``: the mask probability of a row from its number of real tokens.

    Args:
        rate: from (B,) int64 lengths to (B,) numbers from 0 to 1.
    """

    rate: Callable[[Tensor], Tensor]

    def rates(self, batch: Batch) -> Tensor:
        lengths = batch.lengths()
        rates = self.rate(lengths)
        if not isinstance(rates, Tensor) or rates.shape != lengths.shape:
            got = f"shape {tuple(rates.shape)}" if isinstance(rates, Tensor) else type(rates).__name__
            raise ValueError(f"rate: expected a function that gives a tensor of {len(lengths)} numbers, got {got}")
        return rates


@dataclass(frozen=True)
class RateColumn(Strategy):
    """``p = batch[column]``: mask probabilities of your own, one a row or one a token.

    Args:
        column: of floats from 0 to 1.
    """

    column: str

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,)

    def rates(self, batch: Batch) -> Tensor:
        return of_rows_or_tokens(batch, self, self.column)


@dataclass(frozen=True)
class WeightColumn(Strategy):
    """``p_s = mlm_probability * w_s / w[selectable].mean()``, at most 1: tokens by weights of your own.

    A row's expected number of selected tokens stays what it is without weights, as far as no token reaches 1.

    Args:
        column: one float of 0 or more a token.
    """

    column: str

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,)

    def rates(self, batch: Batch) -> Tensor:
        weights = of_rows_or_tokens(batch, self, self.column)
        if weights.shape != batch.input_ids.shape:
            raise ValueError(f"features: expected one number a token in the column {self.column!r}, got one a row")
        allowed = batch.selectable()
        weights = weights.to(torch.float64).where(allowed, 0.0)
        if not bool(((weights >= 0) & weights.isfinite()).all()):
            raise ValueError(f"features: expected numbers from 0 on in the column {self.column!r}, got others")
        mean = weights.sum(1, keepdim=True) / allowed.sum(1, keepdim=True).clamp(min=1)
        return (batch.probability * weights / mean.where(mean > 0, 1.0)).clamp(max=1.0)


@dataclass(frozen=True, eq=False)
class TokenWeights(Strategy):
    """``p_id = mlm_probability * w_id / mean``, at most 1: tokens by a weight of their id, rare ones more often, say.

    The rates are scaled so that, of tokens as frequent as ``counts`` says, mlm_probability are selected, whatever of
    them reaches 1.

    Args:
        weights: (V,) floats of 0 or more, one for each id.
        counts: (V,) how often each id occurs in the data; None: all equally often.

    Source: Lample and Conneau, "Cross-lingual language model pretraining" (XLM, 2019), section 3.3, whose weights are
    ``counts ** -0.5``: :func:`inverse_frequency`.
    """

    weights: Tensor
    counts: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("weights", "counts"):
            values = getattr(self, name)
            if values is None and name == "counts":
                continue
            if not isinstance(values, Tensor) or values.dim() != 1 or values.is_complex():
                raise TypeError(f"{name}: expected a (V,) tensor of numbers, got {values!r:.80}")
            values = values.to("cpu", torch.float64)
            if not bool(((values >= 0) & values.isfinite()).all()) or not float(values.sum()) > 0:
                raise ValueError(f"{name}: expected finite numbers from 0 on, not all of them 0, got {values!r:.80}")
            object.__setattr__(self, name, values)

    def selects(self, spec: MaskingSpec) -> dict[str, Any]:
        counts = torch.ones_like(self.weights) if self.counts is None else self.counts.clone()
        if not len(self.weights) == len(counts) == spec.vocab_size:
            raise ValueError(
                f"weights, counts: expected one for each of {spec.vocab_size} ids, got {len(self.weights)} and "
                f"{len(counts)}"
            )
        counts[list(spec.special_token_ids)] = 0
        return {"rates_by_id": _scaled(self.weights, counts, spec.mlm_probability)}


def inverse_frequency(counts: Tensor, power: float = 0.5) -> TokenWeights:
    """``TokenWeights(counts ** -power, counts)``: of ids by how rare they are; ids never seen count as seen once."""
    if not isinstance(counts, Tensor):
        raise TypeError(f"counts: expected a (V,) tensor of numbers, got {type(counts).__name__}")
    return TokenWeights(counts.to(torch.float64).clamp(min=1) ** -power, counts)


def _scaled(weights: Tensor, counts: Tensor, p: float) -> Tensor:
    """Rates in proportion to the weights, at most 1, whose mean by the counts is p."""
    total = counts.sum()
    rates, capped = torch.zeros_like(weights), torch.zeros_like(weights, dtype=torch.bool)
    while True:  # each round caps at least one more id
        left = (p * total - counts[capped].sum()).clamp(min=0)
        mass = (counts * weights)[~capped].sum()
        rates = torch.where(capped, 1.0, weights * (left / mass if mass > 0 else 0.0))
        over = (rates > 1) & ~capped
        if not bool(over.any()):
            return rates
        capped |= over


@dataclass(frozen=True)
class Prompts(Strategy):
    """``special_tokens_mask |= position < prompt_length``: the first tokens of a row are never selected.

    Args:
        column: of how many tokens, special ones included, the prompt of each row has.
    """

    column: str = "prompt_length"

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,)

    def protects(self, batch: Batch) -> Tensor:
        lengths = batch.column(self, self.column)
        if lengths.is_floating_point() or lengths.shape != (len(batch.input_ids),):
            raise ValueError(f"features: expected one int a row in the column {self.column!r}, got {lengths.dtype}")
        return batch.positions() < lengths[:, None]


def uniform(batch: Batch) -> Tensor:
    """One number between 0 and 1 a row, (B,) float64, of the rows' own draws."""
    return (batch.draws(RATES) + 0.5) * 2.0**-32


def of_rows_or_tokens(batch: Batch, strategy: Strategy, name: str) -> Tensor:
    """A column of floats, (B,) or (B, S)."""
    values = batch.column(strategy, name)
    if not values.is_floating_point() or values.shape not in ((len(batch.input_ids),), batch.input_ids.shape):
        raise ValueError(
            f"features: expected one float a row or a token in the column {name!r}, got {values.dtype} of shape "
            f"{tuple(values.shape)} for ids of {tuple(batch.input_ids.shape)}"
        )
    return values
