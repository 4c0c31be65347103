"""Masked diffusion: a rate for each row between none and all, and the weights that make the loss a likelihood bound."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fastmlm.philox import RATES
from fastmlm.spec import probability
from fastmlm.strategies.base import Batch, Strategy, check_choice
from fastmlm.strategies.rates import uniform


@dataclass(frozen=True)
class MaskedDiffusion(Strategy):
    """``p = eps + (1 - eps) * torch.rand(B)``; ``loss = (cross_entropy / p)[selected].sum() / selectable.sum()``

    Each row has a time t and with it a mask probability p(t); all selected tokens become the mask token. The batch gets
    two more columns, for `fastmlm.MaskedLMTrainer` and sparse models: ``loss_weights``, (B, S) float32, p'(t) / p(t),
    and ``loss_tokens``, (B,) int64, how many tokens of each row may be selected. Their loss, ``(loss_weights *
    cross_entropy).sum() / loss_tokens.sum()``, is an unbiased estimate of the bound on the negative log-likelihood of
    a token, whatever the schedule. Prompts stay with :class:`fastmlm.strategies.Prompts` beside it, and
    `fastmlm.unmask` samples.

    Args:
        schedule: ``"linear"``: p = t (LLaDA; MDLM's log-linear noise); ``"cosine"``: p = sin(π t / 2).
        times: ``"uniform"``: of each row by itself; ``"stratified"``: spread evenly over the rows of a batch, for less
            noise. A row's masks then depend on the rows beside it, though not on their order.
        eps: the smallest probability, that no weight is without bound.

    Law: ``u = (draw_6(0) + 0.5) * 2^-32``, float64, of the row, is t. Stratified: ``t = (u + rank / B) mod 1``, u of
    the row key 0, rank that of the row's key among the batch's B, as signed numbers. p(t) becomes ``eps + (1 - eps)
    p(t)``.

    Source: Sahoo et al., "Simple and effective masked diffusion language models" (MDLM, 2024), sections 3.2 and 3.4
    (low-discrepancy times); Nie et al., "Large language diffusion models" (LLaDA, 2025), section 2.
    """

    schedule: Literal["linear", "cosine"] = "linear"
    times: Literal["uniform", "stratified"] = "uniform"
    eps: float = 1e-3

    def __post_init__(self) -> None:
        check_choice("schedule", self.schedule, ("linear", "cosine"))
        check_choice("times", self.times, ("uniform", "stratified"))
        if not 0 < probability("eps", self.eps) < 1:
            raise ValueError(f"eps: expected a number between 0 and 1, and not one of them, got {self.eps}")

    @property
    def highest(self) -> float:  # type: ignore[override]
        return 1.0

    def replaces(self) -> dict[str, float]:
        return {"mask_replace_prob": 1.0, "random_replace_prob": 0.0}

    def rates(self, batch: Batch) -> Tensor:
        time = uniform(batch) if self.times == "uniform" else self._spread(batch)
        course = time if self.schedule == "linear" else torch.sin(time * (math.pi / 2))
        return self.eps + (1 - self.eps) * course

    def _spread(self, batch: Batch) -> Tensor:
        rank = batch.row_keys.argsort(stable=True).argsort()
        start = batch._replace(row_keys=batch.row_keys.new_zeros(1)).draws(RATES)
        return ((start + 0.5) * 2.0**-32 + rank / len(rank)) % 1

    def weighs(self, batch: Batch, rates: Tensor) -> dict[str, Tensor]:
        slope: Tensor | float = 1 - self.eps
        if self.schedule == "cosine":
            slope = (math.pi / 2) * ((1 - self.eps) ** 2 - (rates - self.eps) ** 2).clamp(min=0).sqrt()
        weights = (slope / rates).to(torch.float32)
        return {
            "loss_weights": weights[:, None].expand(batch.input_ids.shape).contiguous(),
            "loss_tokens": batch.selectable_count(),
        }
