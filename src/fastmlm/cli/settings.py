"""What a run was asked to do, as one plain record that is written beside its results and read again by ``--resume``."""

import argparse
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from fastmlm.cli.errors import CliError

SETTINGS_FILE = "settings.json"

# A resumed run may go on for longer, and save more often; everything else must stay as it was.
_FREE_ON_RESUME = {"steps", "save_steps", "output_dir", "overwrite", "resume"}


@dataclass(frozen=True)
class Settings:
    """The flags of ``fastmlm pretrain``, one field each; see ``fastmlm pretrain --help``."""

    texts: list[str]
    tokenizer: str | None
    model: str
    output_dir: str
    vocab_size: int
    length: int
    eval_fraction: float
    mlm_probability: float
    whole_word_mask: bool
    steps: int
    batch_size: int
    learning_rate: float
    seed: int
    bf16: bool
    gradient_checkpointing: bool
    gradient_accumulation: int
    max_grad_norm: float
    save_steps: int
    trainer_arg: list[str]
    resume: bool
    overwrite: bool
    compare: bool
    compare_repeats: int

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> "Settings":
        return cls(**{field.name: getattr(args, field.name) for field in fields(cls)})

    @classmethod
    def from_json(cls, text: str) -> "Settings":
        return cls(**json.loads(text))

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"


def saved_settings(output_dir: str) -> Settings:
    """The settings of the run that ``--resume`` goes on with."""
    file = Path(output_dir, SETTINGS_FILE)
    if not file.is_file():
        raise CliError(f"argument --resume: expected a run to go on with in {output_dir}, got no {SETTINGS_FILE} there")
    return Settings.from_json(file.read_text("utf-8"))


def check_same_run(old: Settings, new: Settings) -> None:
    """Refuse a resume that would not be the same run any more."""
    for field in fields(Settings):
        before, now = getattr(old, field.name), getattr(new, field.name)
        if field.name not in _FREE_ON_RESUME and before != now:
            flag = "TEXT" if field.name == "texts" else "--" + field.name.replace("_", "-")
            raise CliError(
                f"argument {flag}: expected {before!r} as when the run was started, got {now!r} with --resume"
            )
