"""The Trainer's arguments: those our flags set, and any other through ``--trainer-arg NAME=VALUE``."""

from typing import Any, NoReturn

import torch
from transformers import HfArgumentParser, TrainingArguments

from fastmlm.cli.errors import CliError
from fastmlm.cli.settings import Settings

# Fields that belong to a flag of ours (or to nobody): handing them through would set them twice.
_FLAG_OF_FIELD = {
    "output_dir": "--output-dir",
    "max_steps": "--steps",
    "num_train_epochs": "--steps",
    "per_device_train_batch_size": "--batch-size",
    "gradient_accumulation_steps": "--gradient-accumulation",
    "gradient_checkpointing": "--gradient-checkpointing",
    "activation_checkpointing": "--gradient-checkpointing",
    "learning_rate": "--learning-rate",
    "max_grad_norm": "--max-grad-norm",
    "bf16": "--bf16",
    "seed": "--seed",
    "data_seed": "--seed",
    "save_steps": "--save-steps",
    "resume_from_checkpoint": "--resume",
}


class _FieldParser(HfArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise CliError(f"argument --trainer-arg: {message}")


def extra_arguments(assignments: list[str]) -> dict[str, Any]:
    """``["weight_decay=0.1"]`` → ``{"weight_decay": 0.1}``, each value read as its field's type says."""
    parser = _FieldParser(TrainingArguments, allow_abbrev=False, add_help=False)
    fields = {action.dest for action in parser._actions}
    values = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals:
            raise CliError(f"argument --trainer-arg: expected NAME=VALUE, got {assignment!r}")
        if name in _FLAG_OF_FIELD:
            raise CliError(f"argument --trainer-arg: expected {_FLAG_OF_FIELD[name]} for this, got {assignment!r}")
        if name not in fields:
            raise CliError(f"argument --trainer-arg: expected a field of TrainingArguments, got {name!r}")
        values[name] = getattr(parser.parse_args([f"--{name}={value}"]), name)
    return values


def training_arguments(settings: Settings, run_dir: str, mask_seed: int, save_steps: int | None) -> TrainingArguments:
    """A run's arguments, with checkpoints every so many steps, or without.

    ``mask_seed`` seeds the global generators, hence Hugging Face's masks, but not data order.
    """
    arguments = {
        "output_dir": run_dir,
        "max_steps": settings.steps,
        "per_device_train_batch_size": settings.batch_size,
        "gradient_accumulation_steps": settings.gradient_accumulation,
        "learning_rate": settings.learning_rate,
        "max_grad_norm": settings.max_grad_norm,
        "bf16": settings.bf16,
        "seed": mask_seed,
        "data_seed": settings.seed,
        "warmup_steps": max(1, settings.steps // 20),
        "weight_decay": 0.01,
        "logging_steps": max(1, settings.steps // 40),
        "save_strategy": "steps" if save_steps else "no",
        "save_steps": save_steps or settings.steps,
        "save_total_limit": 2,
        "use_cpu": not torch.accelerator.is_available(),
        "dataloader_pin_memory": torch.accelerator.is_available(),
        "disable_tqdm": True,
        "report_to": "none",
    }
    if settings.gradient_checkpointing:  # named anew in transformers 5.24, where the old name warns
        renamed = "activation_checkpointing" in TrainingArguments.__dataclass_fields__
        arguments["activation_checkpointing" if renamed else "gradient_checkpointing"] = True
    try:
        return TrainingArguments(**arguments | extra_arguments(settings.trainer_arg))
    except (ValueError, TypeError, ImportError) as error:
        raise CliError(f"the Trainer refuses its arguments: {error}") from error
