"""One run of a comparison: an objective and a seed, trained and measured."""

import zlib
from array import array
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PrinterCallback, TrainerCallback

from fastmlm.cli.compare.objectives import Objective, Start
from fastmlm.cli.compare.probe import Probe
from fastmlm.cli.corpus import make_passages, read_documents, split_rows
from fastmlm.cli.measure import now
from fastmlm.cli.model import model_tokenizer
from fastmlm.cli.prepare import Validation, mask_validation
from fastmlm.cli.settings import CompareSettings
from fastmlm.cli.tokenizer import get_tokenizer
from fastmlm.cli.trainer_args import training_arguments

_ROWS = 32  # of validation at a time


@dataclass(frozen=True)
class Material:
    """What all runs share."""

    tokenizer: PreTrainedTokenizerBase
    rows: Dataset
    validation: Validation
    probe: Probe
    start: Start
    digest: int  # of all rows, so that a resumed comparison is of the same text


def gather(settings: CompareSettings) -> Material:
    """Read, tokenise, cut, split, and hide 15 % of the held-out rows' tokens."""
    documents = read_documents(settings.texts)
    tokenizer = get_tokenizer(settings.tokenizer or model_tokenizer(settings.model), documents, settings.vocab_size)
    passages = make_passages(documents, tokenizer, settings.length)
    train, held_out = split_rows(passages, settings.eval_fraction)
    rows = [row for row, _ in train]
    digest = 0
    for row, _ in passages:
        digest = zlib.crc32(array("q", row).tobytes(), digest)
    ids = torch.tensor([id_ for row in rows for id_ in row])
    return Material(
        tokenizer=tokenizer,
        rows=Dataset.from_dict({"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]}),
        # All that is selected is hidden: what an objective does with the 10 % that BERT leaves as they are and the 10 %
        # that it swaps should not count.
        validation=mask_validation(
            [row for row, _ in held_out], tokenizer, mask_replace_prob=1.0, random_replace_prob=0.0
        ),
        probe=Probe(train, held_out, tokenizer.pad_token_id),
        start=Start(settings.model, settings.length, settings.steps, tokenizer, ids.bincount(minlength=len(tokenizer))),
        digest=digest,
    )


def run(
    objective: Objective,
    seed: int,
    settings: CompareSettings,
    material: Material,
    bar: TrainerCallback,
    directory: Path,
) -> tuple[dict[str, Any], Any]:
    """The measurements, raw, and the trained model."""
    model = objective.build(material.start, seed)
    untrained = material.probe.accuracy(objective.encoder(model))
    arguments = training_arguments(replace(settings, seed=seed), str(directory), seed, save_steps=None)
    watch = _Watch(objective, material.validation, settings.evaluations)
    collator = objective.collator(material.start, seed)
    trainer: Any = objective.trainer(
        model, collator, arguments, train_dataset=objective.rows(material.rows), processing_class=material.tokenizer,
        callbacks=[watch, bar],
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    batches = -(-len(material.rows) // arguments.train_batch_size)
    steps = -(-batches // arguments.gradient_accumulation_steps)  # of an epoch
    result = {
        "seed": seed,
        "eval_loss": watch.losses,
        "train_loss": [[entry["step"], float(entry["loss"])] for entry in trainer.state.log_history if "loss" in entry],
        "selected": trainer.selected,
        "seconds": watch.seconds,
        "tokens_per_step": sum(map(len, material.rows["input_ids"])) / steps,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "probe": material.probe.accuracy(objective.encoder(model)),
        "untrained_probe": untrained,
    }
    return result, model


@torch.no_grad()
def validation_loss(objective: Objective, model: Any, validation: Validation) -> float:
    """Mean cross entropy in nats over all hidden tokens of the validation rows."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    total, count, device = 0.0, 0, next(model.parameters()).device
    for first in range(0, len(validation["labels"]), _ROWS):
        ids, mask, labels = (
            validation[name][first : first + _ROWS].to(device) for name in ("input_ids", "attention_mask", "labels")
        )
        hidden = int((labels != -100).sum())
        if hidden:
            total += hidden * float(objective.loss(model, ids, mask, labels))
            count += hidden
    for module, mode in modes:
        module.training = mode
    return total / max(count, 1)


class _Watch(TrainerCallback):
    """The validation loss before, during and after training, and the time that is spent on all else."""

    def __init__(self, objective: Objective, validation: Validation, evaluations: int) -> None:
        self.losses: list[list[float]] = []
        self.seconds = 0.0
        self._objective, self._validation, self._evaluations = objective, validation, evaluations
        self._since = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._evaluate(model, 0)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        step, every = state.global_step, max(1, state.max_steps // self._evaluations)
        if step == state.max_steps or (step % every == 0 and state.max_steps - step >= every):
            self.seconds += now() - self._since
            self._evaluate(model, step)

    def _evaluate(self, model: Any, step: int) -> None:
        self.losses.append([step, validation_loss(self._objective, model, self._validation)])
        self._since = now()


def check(objective: Objective, material: Material) -> None:
    """Raise whatever an objective would: its collator and model are tried on two rows."""
    model: Any = objective.build(material.start, 0)
    rows: Any = objective.rows(material.rows.select(range(min(2, len(material.rows)))))
    collator = objective.collator(material.start, 0)
    collator.set_epoch(0)
    collator.set_step(0)
    batch = collator(list(rows))
    with torch.no_grad():
        model(**{name: column for name, column in batch.items() if isinstance(column, Tensor) and name in _TAKEN})


_TAKEN = {"input_ids", "attention_mask", "labels", "perm_mask", "target_mapping", "position_ids"}
