"""One training run: a side's collator and head in Hugging Face's Trainer, with clocks around both."""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerBase,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from fastmlm import DataCollatorForMaskedLM, sparsify
from fastmlm.cli.evaluate import fill_masks, validation_loss
from fastmlm.cli.measure import PeakMemory, StepTimer, TimedCollator, return_freed_memory
from fastmlm.cli.prepare import Validation
from fastmlm.cli.progress import ProgressBar
from fastmlm.cli.settings import PretrainSettings
from fastmlm.cli.trainer_args import training_arguments

FASTMLM, HUGGINGFACE = "fastmlm", "Hugging Face"


@dataclass(frozen=True)
class Job:
    """A run to do. ``keep`` saves the model and checkpoints; ``checkpoint`` is where to go on from."""

    side: str
    repeat: int
    run_dir: str
    prepared_dir: str
    tokenizer_dir: str
    keep: bool
    threads: int
    settings: PretrainSettings
    checkpoint: str | None = None

    @property
    def name(self) -> str:
        return f"{self.side} {self.repeat + 1}" if self.settings.compare else self.side

    @property
    def mask_seed(self) -> int:
        return (self.settings.seed + self.repeat) % 2**32

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Job":
        values = json.loads(text)
        return cls(**values | {"settings": PretrainSettings(**values["settings"])})


class _Validate(TrainerCallback):
    """Adds the validation loss to the Trainer's own history, which checkpoints carry, five times in a run."""

    def __init__(self, validation: Validation) -> None:
        self._validation = validation

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step % max(1, state.max_steps // 5) == 0 or state.global_step == state.max_steps:
            loss = validation_loss(model, self._validation)
            state.log_history.append({"step": state.global_step, "eval_loss": loss})


def run_job(job: Job) -> dict[str, Any]:
    """Train, validate, save what is to be kept; returns the measurements, raw, and a few filled-in masks."""
    torch.set_num_threads(job.threads)
    return_freed_memory()
    prepared = Path(job.prepared_dir)
    tokenizer = AutoTokenizer.from_pretrained(job.tokenizer_dir, local_files_only=True)
    rows = Dataset.load_from_disk(prepared / "train")
    validation = torch.load(prepared / "validation.pt")
    model = AutoModelForMaskedLM.from_pretrained(job.checkpoint or prepared / "model", local_files_only=True)
    first_loss = validation_loss(model, validation)
    args = training_arguments(job.settings, job.run_dir, job.mask_seed, job.settings.save_steps if job.keep else None)
    tokens_per_step = _tokens_per_step(rows, args)
    collator, callbacks = _collator_of(job, tokenizer)
    if job.side == FASTMLM:
        sparsify(model)
    timer, progress = StepTimer(), ProgressBar(job.name, tokens_per_step)
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=rows,
        data_collator=collator,
        processing_class=tokenizer,
        callbacks=[timer, *callbacks, progress, _Validate(validation)],
    )
    trainer.remove_callback(PrinterCallback)
    memory = PeakMemory()
    try:
        trainer.train(resume_from_checkpoint=job.checkpoint)
    finally:
        progress.close()
    result = {
        "side": job.side,
        "mask_seed": job.mask_seed,
        "data_order": collator.order,
        "collator_ms": collator.milliseconds,
        "step_ms": timer.milliseconds,
        "batches_per_step": args.gradient_accumulation_steps,
        "tokens_per_step": tokens_per_step,
        "memory": memory.read(),
        "train_loss": _history(trainer, "loss"),
        "eval_loss": ([] if job.checkpoint else [[0, first_loss]]) + _history(trainer, "eval_loss"),
    }
    if job.keep:
        trainer.save_model(job.run_dir)
        result["filled_masks"] = fill_masks(model, tokenizer, validation, count=5)
    return result


def _collator_of(job: Job, tokenizer: PreTrainedTokenizerBase) -> tuple[TimedCollator, list[TrainerCallback]]:
    """The side's collator, timed, and the callbacks it needs."""
    probability = job.settings.mlm_probability
    if job.side == HUGGINGFACE:
        return TimedCollator(DataCollatorForLanguageModeling(tokenizer, mlm_probability=probability)), []
    ours = DataCollatorForMaskedLM(
        tokenizer, whole_word_mask=job.settings.whole_word_mask, mlm_probability=probability, seed=job.mask_seed
    )
    return TimedCollator(ours), [ours.callback()]


def _tokens_per_step(rows: Dataset, args: TrainingArguments) -> float:
    """Real tokens in an optimizer step, on average over an epoch, whose last batch may be smaller."""
    batches = math.ceil(len(rows) / args.train_batch_size)
    return sum(map(len, rows["input_ids"])) / math.ceil(batches / args.gradient_accumulation_steps)


def _history(trainer: Trainer, name: str) -> list[list[float]]:
    return [[entry["step"], float(entry[name])] for entry in trainer.state.log_history if name in entry]
