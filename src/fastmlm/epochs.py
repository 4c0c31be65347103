"""Tells a collator the epochs of a Trainer run."""

from typing import Any

from transformers import TrainerCallback
from transformers.trainer_utils import has_length


class TellEpoch(TrainerCallback):
    """Calls ``collator.set_epoch`` at each pass: with a count, since ``state.epoch`` is wrong without a length."""

    def __init__(self, collator: Any) -> None:
        self.collator = collator
        self.epoch = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # A resumed run starts in the epoch it broke off; without a length the Trainer replays all passes.
        loader = kwargs.get("train_dataloader")
        self.epoch = int(state.epoch or 0) if loader is not None and has_length(loader) else 0

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.collator.set_epoch(self.epoch)
        self.epoch += 1
