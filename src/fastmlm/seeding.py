"""Which key a batch is masked with: by epoch where one was told, else a fresh one that nothing repeats."""

import hashlib
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from fastmlm.philox import as_int64, fold, fold_tensor

_EVALUATION = (1 << 64) - 1  # in place of an epoch, which none reaches


def _rank() -> int:
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


class Keys:
    """The keys of a collator's batches.

    With a seed and an epoch told, the key is ``fold(seed, epoch)`` and rows are told apart by content, so masks do not
    depend on batches, workers, ranks or resumes. Otherwise each batch has a key of its own, from the seed and a count,
    or from torch's global generator where there is no seed; the rank, and in a worker its id and the seed that PyTorch
    gave it for this pass, are folded in, so that passes, workers and ranks never repeat one another.

    Args:
        for_evaluation: one key for all batches, told or not, from the seed or from 0.
    """

    def __init__(self, for_evaluation: bool = False) -> None:
        self.for_evaluation = for_evaluation
        self._warned = False
        # Whether an epoch was told, and which: in shared memory, where workers started earlier see it change.
        self._told: Tensor = torch.zeros(2, dtype=torch.int64, device="cpu").share_memory_()
        self._rank = 0  # of the process that made a copy of this object, for workers that start without the group
        self._batches = 0

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_rank": max(_rank(), self._rank)}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._told.share_memory_()  # a copy's own memory, which its workers must see as well

    def set_epoch(self, epoch: int) -> None:
        """Tell the epoch; takes effect for loaders iterated from now on."""
        self._told[1] = as_int64(epoch)
        self._told[0] = 1

    def next(self, seed: int | None, static_copies: int | None = None) -> tuple[int, bool]:
        """The key of the next batch in [0, 2^64), and whether rows go by content; copies as the collator has them."""
        if self.for_evaluation:
            return fold(seed or 0, _EVALUATION), True
        told, epoch = self._told.tolist()
        if static_copies is not None:
            told, epoch = told or static_copies == 1, epoch % (1 << 64) % static_copies
        if told and seed is not None:
            return fold(seed, epoch), True
        if seed is None:
            key = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
        else:
            self._batches += 1
            key = fold(seed, self._batches)
            self._say_what_a_seed_alone_does()
        worker = get_worker_info()
        if worker is not None:
            key = fold(fold(key, worker.seed), worker.id)
        return fold(key, max(_rank(), self._rank)), False

    def _say_what_a_seed_alone_does(self) -> None:
        worker = get_worker_info()
        if not self._warned and (worker is None or worker.id == 0):
            warnings.warn(
                "seed: no epoch was told, so masks depend on the order of batches and on workers, and a resumed run "
                "sees others; tell it (collator.set_epoch before each pass, Trainer(callbacks=[collator.callback()]), "
                "or MaskedLMTrainer), or give static=True",
                stacklevel=2,
            )
        self._warned = True


def distinct(row_keys: Tensor, name: str, column: Any) -> Tensor:
    """Row keys, (B,), with what a column says of each row folded in: equal rows then have keys of their own.

    Args:
        row_keys: (B,) int64.
        name: of the column.
        column: (B,) integers, or B strings, of which the first 8 bytes of their BLAKE2b hash count.

    Raises:
        ValueError: there is no such column.
        TypeError: it holds anything else.
    """
    if column is None:
        raise ValueError(f"row_key_column: expected a column {name!r} in every batch, got a batch without it")
    if isinstance(column, Tensor) and column.dim() == 1 and not column.is_floating_point():
        numbers = column.to(torch.int64)
    elif isinstance(column, Sequence) and all(isinstance(value, (str, bytes)) for value in column):
        encoded = (value.encode() if isinstance(value, str) else value for value in column)
        digests = [hashlib.blake2b(value, digest_size=8).digest() for value in encoded]
        numbers = torch.tensor([int.from_bytes(d, "little", signed=True) for d in digests], dtype=torch.int64)
    else:
        got = f"{column.dtype} of shape {tuple(column.shape)}" if isinstance(column, Tensor) else f"{column!r:.80}"
        raise TypeError(f"row_key_column: expected one integer or string a row in {name!r}, got {got}")
    return fold_tensor(row_keys, numbers)
