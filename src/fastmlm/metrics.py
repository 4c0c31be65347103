"""How often the selected tokens are predicted right: counted along with the loss, without logits kept for it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, Token
from types import TracebackType

import torch
from torch import Tensor

from fastmlm.chunked import rank_of_targets
from fastmlm.loss import check_top_k


class MaskedAccuracy:
    """``(logits.topk(k).indices == labels[..., None]).any(-1)[labels != -100].float().mean()``, of many calls together

    Counts the calls of sparse models (`fastmlm.sparsify`) with ``labels`` in a ``with`` block, in training and in
    evaluation; the numbers stay on the device until they are asked for::

        with MaskedAccuracy(top_k=(1, 5)) as accuracy:
            for batch in loader:
                model(**batch)
        accuracy.compute()  # {"masked_accuracy": ..., "masked_accuracy_top5": ...}

    Where the loss is computed without logits, the right ones are counted as its chunks go by. Of ids with equal logits
    the first counts as the likelier one. Models in other threads (``nn.DataParallel``) are not counted, nor calls
    compiled with ``rows``, and what a reentrant checkpoint runs twice counts twice.

    Args:
        top_k: for which k, one or several, to count the targets that are among the k likeliest ids.

    Raises:
        ValueError: a k is not a whole number of at least 1.
    """

    def __init__(self, top_k: int | Sequence[int] = (1,)) -> None:
        self.top_k = tuple(top_k) if isinstance(top_k, Sequence) else (top_k,)
        for k in self.top_k:
            check_top_k(k)
        self.counts: Tensor | None = None  # (1 + len(top_k),) int64: all that were selected, and the right ones by k
        self._tokens: list[Token[MaskedAccuracy | None]] = []

    def __enter__(self) -> "MaskedAccuracy":
        self._tokens.append(_RUNNING.set(self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _RUNNING.reset(self._tokens.pop())

    def add(self, ranks: Tensor) -> None:
        """Count targets by how many ids beat each of them, (...), -1 where not selected."""
        selected = ranks >= 0
        found = torch.stack([selected.sum(), *((selected & (ranks < k)).sum() for k in self.top_k)])
        self.counts = found if self.counts is None else self.counts.to(found.device) + found

    def add_logits(self, logits: Tensor, labels: Tensor) -> None:
        """Count targets, (K,), below 0 where not selected, by the logits they have among, (K, V)."""
        ranks = rank_of_targets(logits.detach(), labels.long().clamp(min=0))
        self.add(ranks.masked_fill(labels < 0, -1))

    def compute(self) -> dict[str, float]:
        """``masked_accuracy`` and, for other k, ``masked_accuracy_topk``; nothing where no token was selected."""
        selected, *right = [0] if self.counts is None else self.counts.tolist()
        names = ["masked_accuracy" + ("" if k == 1 else f"_top{k}") for k in self.top_k]
        return {name: count / selected for name, count in zip(names, right, strict=True)} if selected else {}

    def reset(self) -> None:
        """Count from nothing again."""
        self.counts = None


_RUNNING: ContextVar[MaskedAccuracy | None] = ContextVar("fastmlm_accuracy", default=None)


@contextmanager
def nobody_counts() -> Iterator[None]:
    """In the block, calls are counted by nobody."""
    before = _RUNNING.set(None)
    try:
        yield
    finally:
        _RUNNING.reset(before)


def running() -> MaskedAccuracy | None:
    """What counts the calls being made now; nothing in calls that are compiled, which cannot follow a ContextVar."""
    return None if torch.compiler.is_dynamo_compiling() else _RUNNING.get()
