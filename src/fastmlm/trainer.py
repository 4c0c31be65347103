"""Training with transformers' Trainer: the sparse head, epochs told to the collator, evaluation without idle logits.

And masks made on the device, for any Trainer.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer
from transformers.trainer_utils import EvalLoopOutput

from fastmlm import on_device
from fastmlm.collator import DataCollatorForMaskedLM
from fastmlm.epochs import logged_probability
from fastmlm.head import is_sparse, loss_only, sparsify
from fastmlm.metrics import MaskedAccuracy
from fastmlm.packing import check_undivided
from fastmlm.selection import Overflow
from fastmlm.spec import integer


class MaskOnDevice:
    """``class MyTrainer(MaskOnDevice, transformers.Trainer)``: batches are masked on the device they were moved to.

    The collator is a `DataCollatorForMaskedLM` with ``mask_on_device=True``, whose batches take a sixth of the bytes
    on their way, and which makes no masks in the loader's processes. Training, its count of selected tokens, evaluation
    and resumed runs see the masks that the collator would have made, bit for bit. A batch is masked by the collator of
    its loader; batches of other collators are left alone.

    On a GPU a sparse model is given ``rows`` and ``count`` in training (`fastmlm.select_rows`), so that nothing in its
    head waits; positions for which there were no rows are told when the loss is logged, by a warning, and count in
    ``num_items_in_batch`` all the same. (transformers itself waits in each step to hear whether the attention mask is
    all ones, where attention is ``"sdpa"``, and whether the loss is NaN, unless ``logging_nan_inf_filter=False``.)

    Args:
        row_capacity: how many rows; None: on a GPU as many as `fastmlm.row_capacity` says, and none on the CPU, where
            nothing waits.

    Raises:
        ValueError: the collator masks its batches itself.
    """

    def __init__(self, *args: Any, row_capacity: int | None = None, **kwargs: Any) -> None:
        if row_capacity is not None:
            integer("row_capacity", row_capacity, 1, 1 << 31)
        super().__init__(*args, **kwargs)
        on_device.check_masks_on_device("data_collator", self.data_collator)  # type: ignore[attr-defined]
        self._row_capacity = row_capacity
        self._overflow = Overflow()
        self._collators: dict[str, Any] = {}  # of the loaders of training and evaluation

    def get_train_dataloader(self) -> Any:
        loader = super().get_train_dataloader()  # type: ignore[misc]
        self._collators["training"] = on_device.collator_of(loader)
        return loader

    def get_batch_samples(self, epoch_iterator: Iterator[Any], *args: Any, **kwargs: Any) -> Any:
        # Before the labels are counted; lazily, as many as are asked for.
        return super().get_batch_samples(map(self._mask_training_batch, epoch_iterator), *args, **kwargs)  # type: ignore[misc]

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        self._collators["evaluation"] = on_device.collator_of(dataloader)
        return super().evaluation_loop(dataloader, *args, **kwargs)  # type: ignore[misc]

    def prediction_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        masked = self._mask_batch(inputs, "evaluation")
        if masked is not inputs:  # in its place, for the loop may hand it on to metrics
            inputs.clear()
            inputs.update(masked)
        return super().prediction_step(model, inputs, *args, **kwargs)  # type: ignore[misc]

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        self._overflow.warn()
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    def _mask_batch(self, batch: Any, loader: str) -> Any:
        trainer: Any = self
        if not on_device.is_shipped(batch):
            return batch
        collator = self._collators.get(loader) or trainer.data_collator
        return on_device.mask_batch(trainer._prepare_input(batch), collator)

    def _mask_training_batch(self, batch: Any) -> Any:
        trainer: Any = self
        masked = self._mask_batch(batch, "training")
        if masked is batch or not self._gives_rows():
            return masked
        collator = self._collators.get("training") or trainer.data_collator
        return on_device.with_rows(masked, collator, self._row_capacity, self._overflow)

    def _gives_rows(self) -> bool:
        """Whether the model takes rows, computes the loss itself, and there is a wait to spare."""
        trainer: Any = self
        asked_for = self._row_capacity is not None or trainer.args.device.type != "cpu"
        own_loss = trainer.label_smoother is not None or trainer.compute_loss_func is not None
        return asked_for and not own_loss and trainer.args.n_gpu <= 1 and is_sparse(trainer.model)


class _Countable:
    """In place of a batch's labels where the Trainer counts them: as many as ``loss_tokens`` says."""

    def __init__(self, tokens: Tensor) -> None:
        self._tokens = tokens

    def ne(self, ignore_index: int) -> Tensor:
        return self._tokens


class MaskedLMTrainer(Trainer):
    """``transformers.Trainer(sparsify(model), args, data_collator, callbacks=[data_collator.callback()], ...)``

    Takes Trainer's arguments. The model is made sparse in place (`fastmlm.sparsify`; checkpoints stay plain), from
    ``model_init`` too. A `DataCollatorForMaskedLM` is told the epochs, and its columns are not removed as unused ones;
    evaluation and prediction have its `for_evaluation`, whose masks stay the same. Evaluation that returns the loss
    alone, as it does without ``compute_metrics`` or with ``prediction_loss_only``, projects selected positions only;
    with metrics, logits are (B, S, V) and lie beside their labels as ever.

    The log has ``masked_accuracy`` beside ``loss``, of the selected tokens since the last entry, and evaluations have
    ``eval_masked_accuracy``, of all processes together; both are counted along with the loss (`MaskedAccuracy`). Rows
    that several processes repeat to have batches of one size count as often as they are evaluated. Where the mask
    probability is a schedule, the log has ``mlm_probability`` of the last step.

    In batches with ``loss_tokens`` (masked diffusion; see `fastmlm.sparsify`), these are counted and not the selected
    tokens, so that the loss is an unbiased estimate, exact for any number of accumulation steps and processes;
    evaluation averages it over batches, as Trainer does. Those columns may come from the collator or the data set.

    Args:
        accuracy_top_k: for which k, one or several, to log how often the target is among the k likeliest ids (k = 5:
            ``masked_accuracy_top5``); empty: for none.

    Raises:
        TypeError, ValueError: the model cannot be made sparse; the message says why.
    """

    data_collator: Any

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        data_collator: Any = None,
        *rest: Any,
        accuracy_top_k: int | Sequence[int] = (1,),
        **named: Any,
    ) -> None:
        self._accuracy = MaskedAccuracy(accuracy_top_k)
        self._may_log_training = False
        self._for_evaluation: tuple[Any, Any] = (None, None)  # a collator, and what it gives for evaluation
        if isinstance(model, nn.Module):
            sparsify(model)  # before the Trainer looks whether the model divides its loss by the number of tokens
        super().__init__(model, args, data_collator, *rest, **named)
        order = type(self).__mro__
        if getattr(self.data_collator, "mask_on_device", False) and (
            MaskOnDevice not in order or order.index(MaskOnDevice) > order.index(MaskedLMTrainer)
        ):
            raise ValueError(
                "data_collator: expected mask_on_device=False, or a trainer that masks on the device: "
                "class MyTrainer(MaskOnDevice, MaskedLMTrainer)"
            )
        if isinstance(self.data_collator, DataCollatorForMaskedLM):
            self.add_callback(self.data_collator.callback())

    def call_model_init(self, trial: Any = None) -> nn.Module:
        return sparsify(super().call_model_init(trial))

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        batches = [
            {**batch, "labels": _Countable(batch["loss_tokens"])} if "loss_tokens" in batch else batch
            for batch in batch_samples
        ]
        return super()._get_num_items_in_batch(batches, device)

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if num_items_in_batch is not None and "loss_tokens" in inputs:  # which are counted in it
            inputs = {name: column for name, column in inputs.items() if name != "loss_tokens"}
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Any]:
        with loss_only() if prediction_loss_only else nullcontext():
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        with self._collating_for_evaluation():
            return self._checked(super().get_eval_dataloader(*args, **kwargs))

    def get_test_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        with self._collating_for_evaluation():
            return self._checked(super().get_test_dataloader(*args, **kwargs))

    def _checked(self, loader: Any) -> Any:
        check_undivided(loader, getattr(self.data_collator, "packing", False))
        return loader

    @contextmanager
    def _collating_for_evaluation(self) -> Iterator[None]:
        """Loaders take the collator that the trainer has when they are made."""
        collator = self.data_collator
        if isinstance(collator, DataCollatorForMaskedLM):
            if self._for_evaluation[0] is not collator:
                self._for_evaluation = (collator, collator.for_evaluation())
            self.data_collator = self._for_evaluation[1]
        try:
            yield
        finally:
            self.data_collator = collator

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        columns = ["loss_weights", "loss_tokens"]
        if isinstance(self.data_collator, DataCollatorForMaskedLM):
            columns += self.data_collator.columns
        self._signature_columns += [c for c in columns if c not in self._signature_columns]

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        with self._accuracy if self._accuracy.top_k else nullcontext():
            return super().training_step(*args, **kwargs)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        self._accuracy.reset()
        return super().train(*args, **kwargs)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        self._may_log_training = True  # which all processes do then, and callers of `log` perhaps not
        try:
            super()._maybe_log_save_evaluate(*args, **kwargs)
        finally:
            self._may_log_training = False

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if self._may_log_training and "loss" in logs:
            self._may_log_training = False
            logs = logs | self._of_all_processes(self._accuracy) | logged_probability(self.data_collator, self.state)
            self._accuracy.reset()
        super().log(logs, *args, **kwargs)

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        accuracy = MaskedAccuracy(self._accuracy.top_k)
        with accuracy if accuracy.top_k else nullcontext():
            output = super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
        found = self._of_all_processes(accuracy)
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in found.items()})
        return output

    def _of_all_processes(self, accuracy: MaskedAccuracy) -> dict[str, float]:
        if not accuracy.top_k:
            return {}
        if self.args.world_size > 1:  # also from one that has counted nothing
            counts = accuracy.counts if accuracy.counts is not None else torch.zeros(1 + len(accuracy.top_k)).long()
            accuracy.counts = self.accelerator.reduce(counts.to(self.args.device), "sum")
        return accuracy.compute()
