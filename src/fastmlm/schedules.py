"""Mask probabilities that change from step to step: ``mlm_probability=Linear(0.3, 0.15, steps=10_000)`` of a collator.

Batches are made ahead of their step and in other processes, so the step is not looked up but counted: a collator is
told the step of the first batch before a pass begins, and numbers the batches from there. With W workers, PyTorch's
loader has worker w make the batches w, w + W, w + 2 W and so on.
"""

import math
import os
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from fastmlm.spec import integer, probability


@dataclass(frozen=True)
class Linear:
    """``start + (end - start) * min(step / steps, 1)``: from one probability to another in a straight line.

    Args:
        start, end: mask probabilities in [0, 1].
        steps: optimizer steps after which the end is reached, and kept.

    Raises:
        TypeError, ValueError: naming the argument.
    """

    start: float
    end: float
    steps: int

    def __post_init__(self) -> None:
        probability("start", self.start)
        probability("end", self.end)
        integer("steps", self.steps, 1, 1 << 62)

    def __call__(self, step: int) -> float:
        return self.start + (self.end - self.start) * self._course(min(step / self.steps, 1.0))

    def _course(self, share: float) -> float:
        """How much of the way is done after a share of the steps."""
        return share

    @property
    def highest(self) -> float:
        """The largest probability there will be."""
        return max(self.start, self.end)


@dataclass(frozen=True)
class Cosine(Linear):
    """``start + (end - start) * (1 - cos(pi * min(step / steps, 1))) / 2``: slow at first and at last.

    Arguments and errors as of `Linear`.
    """

    def _course(self, share: float) -> float:
        return (1 - math.cos(math.pi * share)) / 2


@dataclass(frozen=True)
class Stages:
    """``max((s, p) for s, p in stages.items() if s <= step)[1]``: constant in each stage of training.

    Args:
        stages: the first step of each stage, 0 among them, and the mask probability from there on. ModernBERT (Warner
            et al., 2024, section 2.2) trains at 30 %; ``{0: 0.3, 80_000: 0.15}`` ends at 15 %.

    Raises:
        TypeError, ValueError: naming the argument.
    """

    stages: Mapping[int, float]

    def __post_init__(self) -> None:
        if not isinstance(self.stages, Mapping) or 0 not in self.stages:
            raise ValueError(
                f"stages: expected a mapping of first steps to probabilities, from 0 on, got {self.stages!r}"
            )
        stages = {
            integer("stages", step, 0, 1 << 62): probability(f"stages[{step}]", p) for step, p in self.stages.items()
        }
        object.__setattr__(self, "stages", dict(sorted(stages.items())))

    def __call__(self, step: int) -> float:
        steps = list(self.stages)
        return self.stages[steps[bisect_right(steps, step) - 1]]

    @property
    def highest(self) -> float:
        """The largest probability there will be."""
        return max(self.stages.values())


Schedule = Callable[[int], float]  # the mask probability of a step, counted from 0


def rate_at(schedule: Schedule, step: int) -> float:
    """``schedule(step)``, checked."""
    return probability(f"mlm_probability, the schedule at step {step}", schedule(step))


class Steps:
    """Which optimizer step the next batch of a collator is for."""

    def __init__(self) -> None:
        # How often a step was told, which, and the batches a step takes: in shared memory, as the epochs of `Keys` are.
        self._told: Tensor = torch.zeros(3, dtype=torch.int64, device="cpu").share_memory_()
        self._seen, self._batches = (0, 0), 0  # the last telling a process saw, and its batches since then

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._told.share_memory_()

    def tell(self, step: int, batches_per_step: int) -> None:
        """Tell the step of the first batch of the pass that begins, and how many batches a step takes."""
        self._told[1], self._told[2] = step, batches_per_step
        self._told[0] += 1

    def next(self) -> int:
        """The step of the next batch.

        Raises:
            ValueError: none was told.
        """
        times, first, per_step = self._told.tolist()
        if not times:
            raise ValueError(
                "mlm_probability: expected to be told the step before a schedule's first batch: collator.set_step "
                "before each pass, Trainer(callbacks=[collator.callback()]), or MaskedLMTrainer"
            )
        if (times, os.getpid()) != self._seen:  # a forked worker does not go on with what was counted before
            self._seen, self._batches = (times, os.getpid()), 0
        worker = get_worker_info()
        batch = self._batches if worker is None else self._batches * worker.num_workers + worker.id
        self._batches += 1
        return first + batch // per_step
