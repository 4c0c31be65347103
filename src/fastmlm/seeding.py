"""Which key a batch is masked with: by epoch where one was told, else a fresh one that nothing repeats."""

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from fastmlm.philox import as_int64, fold


def _rank() -> int:
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


class Keys:
    """The keys of a collator's batches.

    With a seed and an epoch told, the key is ``fold(seed, epoch)`` and rows are told apart by content, so masks do not
    depend on batches, workers, ranks or resumes. Otherwise each batch has a key of its own, from the seed and a count,
    or from torch's global generator where there is no seed; the rank, and in a worker its id and the seed that PyTorch
    gave it for this pass, are folded in, so that passes, workers and ranks never repeat one another.
    """

    def __init__(self) -> None:
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

    def next(self, seed: int | None) -> tuple[int, bool]:
        """The key of the next batch in [0, 2^64), and whether rows go by content."""
        told, epoch = self._told.tolist()
        if told and seed is not None:
            return fold(seed, epoch), True
        if seed is None:
            key = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
        else:
            self._batches += 1
            key = fold(seed, self._batches)
        worker = get_worker_info()
        if worker is not None:
            key = fold(fold(key, worker.seed), worker.id)
        return fold(key, max(_rank(), self._rank)), False
