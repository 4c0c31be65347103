"""What a run was asked to do, as one plain record that is written beside its results and read again by ``--resume``."""

import argparse
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TypeVar

from fastmlm.cli.errors import CliError

SETTINGS_FILE = "settings.json"

# A resumed run may go on for longer, and save more often; everything else must stay as it was.
_FREE_ON_RESUME = {"steps", "save_steps", "output_dir", "overwrite", "resume"}
_FLAGS = {"texts": "TEXT", "objectives": "OBJECTIVE"}  # those that are not the field's name with dashes

AnySettings = TypeVar("AnySettings", bound="Settings")


@dataclass(frozen=True)
class Settings:
    """The flags that commands share, one field each; see ``fastmlm pretrain --help``."""

    texts: list[str]
    tokenizer: str | None
    model: str
    output_dir: str
    vocab_size: int
    length: int
    eval_fraction: float
    mlm_probability: float
    steps: int
    batch_size: int
    learning_rate: float
    seed: int
    bf16: bool
    gradient_checkpointing: bool
    gradient_accumulation: int
    max_grad_norm: float
    trainer_arg: list[str]
    resume: bool
    overwrite: bool

    @classmethod
    def from_args(cls: type[AnySettings], args: argparse.Namespace) -> AnySettings:
        return cls(**{field.name: getattr(args, field.name) for field in fields(cls)})

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"


@dataclass(frozen=True)
class PretrainSettings(Settings):
    """The flags of ``fastmlm pretrain``."""

    whole_word_mask: bool
    save_steps: int
    compare: bool
    compare_repeats: int


@dataclass(frozen=True)
class CompareSettings(Settings):
    """The flags of ``fastmlm compare``."""

    objectives: list[str]
    seeds: int
    evaluations: int
    target_loss: float | None


KINDS: dict[str, type[Settings]] = {"pretrain": PretrainSettings, "compare": CompareSettings}


def saved_settings(command: str, output_dir: str) -> Settings:
    """The settings of the run that ``--resume`` goes on with."""
    file, kind = Path(output_dir, SETTINGS_FILE), KINDS[command]
    if not file.is_file():
        raise CliError(f"argument --resume: expected a run to go on with in {output_dir}, got no {SETTINGS_FILE} there")
    try:
        return kind(**json.loads(file.read_text("utf-8")))
    except (TypeError, ValueError) as error:
        raise CliError(f"argument --resume: expected a run of fastmlm {command}, got {file} of another kind") from error


def check_same_run(old: Settings, new: Settings, free: frozenset[str] = frozenset(_FREE_ON_RESUME)) -> None:
    """Refuse a resume that would not be the same run any more, but for the fields that are free to change."""
    for field in fields(new):
        before, now = getattr(old, field.name), getattr(new, field.name)
        if field.name not in free and before != now:
            flag = _FLAGS.get(field.name, "--" + field.name.replace("_", "-"))
            raise CliError(
                f"argument {flag}: expected {before!r} as when the run was started, got {now!r} with --resume"
            )
