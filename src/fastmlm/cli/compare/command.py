"""``fastmlm compare``: text → a run for each objective and seed → a table, a picture, and the models."""

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from fastmlm.cli.compare import report
from fastmlm.cli.compare.objectives import Objective, make_objective
from fastmlm.cli.compare.run import Material, check, gather, run
from fastmlm.cli.compare.summary import Runs, summarise
from fastmlm.cli.errors import CliError
from fastmlm.cli.measure import machine
from fastmlm.cli.output import MODELS, RUNS, check_output, claim_output
from fastmlm.cli.progress import ComparisonBar
from fastmlm.cli.quiet import quiet
from fastmlm.cli.settings import CompareSettings, check_same_run, saved_settings
from fastmlm.cli.trainer_args import training_arguments

# What a comparison that has begun can change: its report.
_FREE = frozenset({"target_loss", "output_dir", "overwrite", "resume"})


def compare(args: argparse.Namespace) -> None:
    """Run the command. All checks of the input come before the first byte is written."""
    settings = CompareSettings.from_args(args)
    quiet()
    repeated = {name for name in settings.objectives if settings.objectives.count(name) > 1}
    if repeated:
        raise CliError(f"argument OBJECTIVE: expected each once, got {', '.join(sorted(repeated))} again")
    objectives = {name: make_objective(name, settings.mlm_probability) for name in settings.objectives}
    check_output(settings)
    training_arguments(settings, settings.output_dir, settings.seed, save_steps=None)
    if settings.resume:
        check_same_run(saved_settings("compare", settings.output_dir), settings, _FREE)
    material = gather(settings)
    for name, objective in objectives.items():
        try:
            check(objective, material)
        except (TypeError, ValueError, RuntimeError) as error:
            raise CliError(
                f"argument OBJECTIVE: expected one that the model can be trained by, got {name}: {error}"
            ) from error
    done = _earlier(settings, material.digest)
    directory = claim_output(settings)
    material.tokenizer.save_pretrained(directory)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(
        f"{len(material.rows):,} rows to train on, {len(material.validation['labels'])} held out; "
        f"{len(_runs(settings))} runs" + (f", {len(done)} of them done before" if done else "")
    )
    runs = _train(settings, objectives, material, done)
    probe = {"topics": material.probe.topics, "majority": material.probe.majority}
    comparison: dict[str, Any] = {
        "machine": machine(),
        "settings": vars(settings),
        "probe": None if probe["majority"] is None else probe,
        **summarise(runs, settings.target_loss),
    }
    report.print_comparison(console, comparison)
    report.write_markdown(comparison, directory / "compare.md")
    report.plot(runs, comparison, directory / "compare.png")
    (directory / "compare.json").write_text(json.dumps(comparison | {"runs": runs}, indent=2) + "\n", "utf-8")
    console.print(f"compare.md, compare.png, compare.json and {MODELS} are in {directory}")


def _earlier(settings: CompareSettings, digest: int) -> dict[tuple[str, int], dict[str, Any]]:
    """The runs that ended before an interruption, by objective and seed."""
    found = {}
    for name, seed in _runs(settings) if settings.resume else ():
        file = _file(settings, name, seed)
        if file.is_file():
            found[name, seed] = json.loads(file.read_text("utf-8"))
            if found[name, seed]["digest"] != digest:
                raise CliError(f"argument --resume: expected the text that {file} was trained on, got another")
    return found


def _runs(settings: CompareSettings) -> list[tuple[str, int]]:
    """Seed by seed, so that whatever is done first is a comparison already."""
    seeds = range(settings.seed, settings.seed + settings.seeds)
    return [(name, seed) for seed in seeds for name in settings.objectives]


def _file(settings: CompareSettings, name: str, seed: int) -> Path:
    return Path(settings.output_dir, RUNS, f"{name}-seed{seed}.json")


def _train(
    settings: CompareSettings, objectives: dict[str, Objective], material: Material, done: dict[tuple[str, int], Any]
) -> Runs:
    """All runs, with the results of those that are done already."""
    directory, results = Path(settings.output_dir), dict(done)
    with ComparisonBar(settings.steps * len(_runs(settings)), settings.steps * len(done)) as bar:
        for name, seed in _runs(settings):
            if (name, seed) in done:
                continue
            progress = bar.run(f"{name}, seed {seed}")
            result, model = run(objectives[name], seed, settings, material, progress, directory / RUNS)
            if seed == settings.seed:
                model.save_pretrained(directory / MODELS / name)
            results[name, seed] = result | {"digest": material.digest}
            _write(_file(settings, name, seed), results[name, seed])
    return {name: [results[other, seed] for other, seed in _runs(settings) if other == name] for name in objectives}


def _write(file: Path, result: dict[str, Any]) -> None:
    """Whole or not at all."""
    file.parent.mkdir(exist_ok=True)
    part = file.with_suffix(".part")
    part.write_text(json.dumps(result), "utf-8")
    part.replace(file)
