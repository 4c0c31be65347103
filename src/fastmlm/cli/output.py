"""The output directory: checked before any work, written only when the work is sure to begin."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

from fastmlm.cli.errors import CliError
from fastmlm.cli.settings import SETTINGS_FILE, Settings

# Prepared data lives here: rows, validation batch and first weights, which every side of a comparison loads.
PREPARED = "prepared"
RUNS = "runs"  # results of the runs of a comparison whose models are not kept
MODELS = "models"  # those that are, of `fastmlm compare`

# What a run leaves directly in the directory, besides checkpoints; --overwrite removes this and nothing else.
_WRITTEN = ["config.json", "generation_config.json", "model*.safetensors*", "training_args.bin", "tokenizer*.json"]
_WRITTEN += ["special_tokens_map.json", "metrics.json", "loss.png", "compare.md", "compare.png", "compare.json"]


def check_output(settings: Settings) -> None:
    """Refuse a directory that would have to be overwritten, or that cannot be one."""
    directory = Path(settings.output_dir)
    parent = next(path for path in [directory, *directory.absolute().parents] if path.exists())
    if not parent.is_dir():
        raise CliError(f"argument --output-dir: expected a directory, got {directory}, where {parent} is a file")
    if not os.access(parent, os.W_OK):
        raise CliError(f"argument --output-dir: expected a directory to write in, got {directory}, which is read-only")
    if settings.resume or not directory.is_dir() or not any(directory.iterdir()):
        return
    if not settings.overwrite:
        raise CliError(
            f"argument --output-dir: expected a new or empty directory, got {directory}, which has files in it; "
            "--overwrite replaces them, --resume goes on"
        )
    if not (directory / SETTINGS_FILE).is_file():
        raise CliError(f"argument --overwrite: expected an earlier run in {directory}, got files that are not one")


def claim_output(settings: Settings) -> Path:
    """Make the directory, clear what an earlier run left (nothing else), and note the settings."""
    directory = Path(settings.output_dir)
    directory.mkdir(parents=True, exist_ok=True)
    if settings.overwrite:
        for path in [directory / PREPARED, directory / RUNS, directory / MODELS, *directory.glob("checkpoint-*")]:
            shutil.rmtree(path, ignore_errors=True)
        for pattern in _WRITTEN:
            for file in directory.glob(pattern):
                file.unlink()
    started = replace(settings, resume=False, overwrite=False)
    (directory / SETTINGS_FILE).write_text(started.to_json(), "utf-8")
    return directory


def last_checkpoint(settings: Settings) -> str:
    """The newest checkpoint of the earlier run, to go on from."""
    from transformers.trainer_utils import get_last_checkpoint

    checkpoint = get_last_checkpoint(settings.output_dir)
    if checkpoint is None:
        raise CliError(f"argument --resume: expected a checkpoint in {settings.output_dir}, got none")
    done = int(checkpoint.rpartition("-")[2])
    if settings.steps <= done:
        raise CliError(f"argument --steps: expected more than the {done} steps already done, got {settings.steps}")
    return checkpoint
