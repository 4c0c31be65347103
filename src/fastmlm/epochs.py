"""Tells a collator the epochs and the steps of a Trainer run."""

from typing import Any

from accelerate.data_loader import DataLoaderDispatcher
from transformers import TrainerCallback
from transformers.trainer_utils import has_length

from fastmlm.packing import check_undivided


class TellEpoch(TrainerCallback):
    """Calls ``collator.set_epoch`` and ``set_step`` at each pass, and logs the mask probability of a schedule.

    Epochs are counted, since ``state.epoch`` is wrong without a length. What a resumed pass skips is not collated, and
    its first batch is for ``state.global_step``; without a length, the Trainer collates what it skips, from step 0 on.
    """

    def __init__(self, collator: Any) -> None:
        self.collator = collator
        self.epoch = 0
        self._replays = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # A resumed run starts in the epoch it broke off; without a length the Trainer replays all passes.
        loader = kwargs.get("train_dataloader")
        check_undivided(loader, self.collator.packing)
        batches = len(loader) if loader is not None and has_length(loader) else None
        # The epoch that the Trainer goes on in; state.epoch counted the batches of before, perhaps of another size.
        steps = max(-(-(batches or 0) // args.gradient_accumulation_steps), 1)
        self.epoch = 0 if batches is None else state.global_step // steps
        self._replays = batches is None and not args.ignore_data_skip

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.collator.set_epoch(self.epoch)
        self.epoch += 1
        loader = kwargs.get("train_dataloader")
        shared = isinstance(loader, DataLoaderDispatcher) and not loader.split_batches  # one process makes all batches
        batches = args.gradient_accumulation_steps * (args.world_size if shared else 1)
        self.collator.set_step(0 if self._replays else state.global_step, batches)
        self._replays = False

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """For callbacks that come after this one; `MaskedLMTrainer` logs it for all."""
        for entry in (logs, state.log_history[-1] if state.log_history else None):
            if entry is not None and "loss" in entry:
                entry |= logged_probability(self.collator, state) | entry


def logged_probability(collator: Any, state: Any) -> dict[str, float]:
    """What to log of a collator's schedule: the mask probability of the last step; of a number, nothing."""
    if not callable(getattr(collator, "mlm_probability", None)):
        return {}
    return {"mlm_probability": collator.probability_at(max(state.global_step - 1, 0))}
