"""``fastmlm pretrain``: text → tokenizer → model → Trainer → a directory with the model and what was measured."""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from fastmlm.cli import report
from fastmlm.cli.errors import CliError
from fastmlm.cli.measure import machine
from fastmlm.cli.output import PREPARED, check_output, claim_output, last_checkpoint
from fastmlm.cli.prepare import prepare
from fastmlm.cli.quiet import quiet
from fastmlm.cli.settings import PretrainSettings, check_same_run, saved_settings
from fastmlm.cli.sides import run_sides
from fastmlm.cli.summary import compare_sides, summarise
from fastmlm.cli.train import FASTMLM, Job, run_job
from fastmlm.cli.trainer_args import training_arguments


def pretrain(args: argparse.Namespace) -> None:
    """Run the command. All checks of the input come before the first byte is written."""
    settings = PretrainSettings.from_args(args)
    quiet()
    _check(settings)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    if settings.resume:
        check_same_run(saved_settings("pretrain", settings.output_dir), settings)
        checkpoint = last_checkpoint(settings)
        directory = claim_output(settings)
    else:
        checkpoint = None
        ready = prepare(settings)
        directory = claim_output(settings)
        ready.save(directory / PREPARED, directory)
        console.print(
            f"{len(ready.train_rows):,} rows to train on, {len(ready.validation['labels'])} held out, "
            f"{len(ready.tokenizer):,} tokens in the vocabulary, {ready.model.num_parameters():,} parameters"
        )
        del ready  # the run loads its own, and the memory it needs is measured
    job = Job(
        side=FASTMLM,
        repeat=0,
        run_dir=str(directory),
        prepared_dir=str(directory / PREPARED),
        tokenizer_dir=str(directory),
        keep=True,
        threads=torch.get_num_threads(),
        settings=settings,
        checkpoint=checkpoint,
    )
    results = run_sides(job) if settings.compare else [run_job(job)]
    shutil.rmtree(
        directory / PREPARED / "model", ignore_errors=settings.resume
    )  # the first weights; the last are in the directory itself
    _report(console, settings, directory, results)


def _check(settings: PretrainSettings) -> None:
    check_output(settings)
    training_arguments(settings, settings.output_dir, settings.seed, settings.save_steps)
    if settings.compare and settings.whole_word_mask:
        raise CliError(
            "argument --compare: expected without --whole-word-mask, "
            "for which Hugging Face's collator needs columns that the Trainer drops"
        )


def _report(console: Console, settings: PretrainSettings, directory: Path, results: list[dict[str, Any]]) -> None:
    main = results[0]
    metrics: dict[str, Any] = {
        "machine": machine(),
        "settings": vars(settings),
        "final_eval_loss": main["eval_loss"][-1][1],
        **summarise([main]),
        "train_loss": main["train_loss"],
        "eval_loss": main["eval_loss"],
        "filled_masks": main["filled_masks"],
    }
    report.plot_losses(results, directory / "loss.png")
    report.print_filled(console, main["filled_masks"])
    if settings.compare:
        metrics["comparison"] = compare_sides(results)
        report.print_comparison(console, metrics["comparison"])
        report.write_markdown(metrics["comparison"], metrics["machine"], directory / "compare.md")
    else:
        report.print_run(console, metrics)
    (directory / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n", "utf-8")
    console.print(f"model, tokenizer, metrics.json and loss.png are in {directory}")
