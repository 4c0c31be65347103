"""Training with transformers' Trainer: the sparse head, epochs told to the collator, evaluation without idle logits."""

from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn
from transformers import Trainer

from fastmlm.collator import DataCollatorForMaskedLM
from fastmlm.head import loss_only, sparsify


class MaskedLMTrainer(Trainer):
    """``transformers.Trainer(sparsify(model), args, data_collator, callbacks=[data_collator.callback()], ...)``

    Takes Trainer's arguments. The model is made sparse in place (`fastmlm.sparsify`; checkpoints stay plain), from
    ``model_init`` too. A `DataCollatorForMaskedLM` is told the epochs. Evaluation that returns the loss alone, as it
    does without ``compute_metrics`` or with ``prediction_loss_only``, projects selected positions only; with metrics,
    logits are (B, S, V) and lie beside their labels as ever.

    Raises:
        TypeError, ValueError: the model cannot be made sparse; the message says why.
    """

    def __init__(
        self, model: Any = None, args: Any = None, data_collator: Any = None, *rest: Any, **named: Any
    ) -> None:
        if isinstance(model, nn.Module):
            sparsify(model)  # before the Trainer looks whether the model divides its loss by the number of tokens
        super().__init__(model, args, data_collator, *rest, **named)
        if isinstance(self.data_collator, DataCollatorForMaskedLM):
            self.add_callback(self.data_collator.callback())

    def call_model_init(self, trial: Any = None) -> nn.Module:
        return sparsify(super().call_model_init(trial))

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Any]:
        with loss_only() if prediction_loss_only else nullcontext():
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
