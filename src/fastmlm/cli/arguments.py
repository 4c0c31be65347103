"""Flags, their types and their defaults. Nothing heavy is imported here."""

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import NoReturn

from fastmlm import __version__
from fastmlm.cli.compare.catalogue import DEFAULT, catalogue
from fastmlm.cli.errors import CliError
from fastmlm.cli.settings import saved_settings

_SEED_LIMIT = 2**32  # numpy, which the Trainer seeds as well, takes no larger one


class _Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line, without the usage text in front."""

    def error(self, message: str) -> NoReturn:
        raise CliError(message)


def _number(kind: type, accept: Callable[[float], bool], expected: str) -> Callable[[str], float]:
    """An argparse type: ``kind(text)`` where ``accept`` holds, else an error that says what was expected."""

    def convert(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not accept(value):
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
        return value

    return convert


_positive = _number(int, lambda n: n >= 1, "a whole number from 1 up")
_seed = _number(int, lambda n: 0 <= n < _SEED_LIMIT, "a whole number from 0 to 4294967295")
_length = _number(int, lambda n: n >= 8, "a whole number from 8 up")
_vocab = _number(int, lambda n: n >= 100, "a whole number from 100 up")
_probability = _number(float, lambda p: 0 < p <= 1, "a number above 0 and up to 1")
_fraction = _number(float, lambda p: 0 < p < 1, "a number between 0 and 1")
_rate = _number(float, lambda x: 0 < x < math.inf, "a number above 0")
_norm = _number(float, lambda x: 0 <= x < math.inf, "a number from 0 up (0: no clipping)")


def _add_data_flags(parser: argparse.ArgumentParser, length: int, vocab_size: int = 8192, texts: str = "texts") -> None:
    group = parser.add_argument_group("text and masking")
    group.add_argument(
        texts, nargs="*", metavar="TEXT", help="UTF-8 text files, a document each (default: Python's own help texts)"
    )
    group.add_argument("--tokenizer", metavar="DIR", help="directory of a tokenizer (default: train WordPiece on TEXT)")
    group.add_argument(
        "--vocab-size", type=_vocab, default=vocab_size, metavar="N", help="at most so many tokens (%(default)s)"
    )
    group.add_argument("--length", type=_length, default=length, metavar="N", help="tokens in a row (%(default)s)")
    group.add_argument(
        "--mlm-probability", type=_probability, default=0.15, metavar="P", help="share of tokens selected (%(default)s)"
    )
    group.add_argument("--seed", type=_seed, default=0, metavar="N", help="of weights, data order, masks (%(default)s)")


def _add_whole_words(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--whole-word-mask", action="store_true", help="select whole words")


def _add_training_flags(
    parser: argparse.ArgumentParser, steps: int, learning_rate: float, eval_fraction: float
) -> None:
    group = parser.add_argument_group("training")
    group.add_argument(
        "--model", default="tiny", help="tiny, small, base, or a config/checkpoint directory (%(default)s)"
    )
    group.add_argument("--steps", type=_positive, default=steps, metavar="N", help="optimizer steps (%(default)s)")
    group.add_argument("--batch-size", type=_positive, default=32, metavar="N", help="rows in a batch (%(default)s)")
    group.add_argument(
        "--learning-rate", type=_rate, default=learning_rate, metavar="X", help="at its peak (%(default)s)"
    )
    group.add_argument("--bf16", action="store_true", help="bfloat16 autocast")
    group.add_argument("--gradient-checkpointing", action="store_true", help="recompute activations: less memory")
    group.add_argument(
        "--gradient-accumulation", type=_positive, default=1, metavar="N", help="batches in a step (%(default)s)"
    )
    group.add_argument("--max-grad-norm", type=_norm, default=1.0, metavar="X", help="clip gradients at (%(default)s)")
    group.add_argument(
        "--eval-fraction", type=_fraction, default=eval_fraction, metavar="P", help="rows held out (%(default)s)"
    )
    group.add_argument(
        "--trainer-arg", action="append", default=[], metavar="NAME=VALUE", help="any other TrainingArguments field"
    )


def _add_output_flags(parser: argparse.ArgumentParser, directory: str, resume: str) -> None:
    group = parser.add_argument_group("output")
    group.add_argument("--output-dir", default=directory, metavar="DIR", help="(%(default)s)")
    group.add_argument("--resume", action="store_true", help=resume)
    group.add_argument("--overwrite", action="store_true", help="replace what an earlier run left in --output-dir")


def _add_side_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--save-steps", type=_positive, default=500, metavar="N", help="checkpoint every N (%(default)s)"
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="train with Hugging Face's collator and dense head too, and print a table",
    )
    parser.add_argument(
        "--compare-repeats", type=_positive, default=3, metavar="N", help="runs of each side, other masks (%(default)s)"
    )


def _add_comparison_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("comparison")
    group.add_argument(
        "objectives",
        nargs="*",
        default=list(DEFAULT),
        metavar="OBJECTIVE",
        help=f"one or more of the list below (default: {' '.join(DEFAULT)})",
    )
    group.add_argument("--seeds", type=_positive, default=3, metavar="N", help="runs of each (%(default)s)")
    group.add_argument(
        "--evaluations", type=_positive, default=10, metavar="N", help="validations in a run (%(default)s)"
    )
    group.add_argument(
        "--target-loss",
        type=_rate,
        metavar="X",
        help="steps are counted to this validation loss (default: that at which the first objective ends)",
    )


_COMPARE = "train one model for each objective and seed on the same text, and tell which differences are noise"


def _build_parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The whole parser, and those of the commands that can be resumed."""
    parser = _Parser(prog="fastmlm", description="Masked language modelling, cheap, exact and reproducible.")
    parser.add_argument("--version", action="version", version=f"fastmlm {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    text = "train a masked language model on text files, from tokenizer to filled-in masks"
    pretrain = commands.add_parser("pretrain", help=text, description=text)
    _add_data_flags(pretrain, length=128)
    _add_whole_words(pretrain)
    _add_training_flags(pretrain, steps=80, learning_rate=1e-3, eval_fraction=0.05)
    _add_output_flags(pretrain, "fastmlm-out", "go on from the last checkpoint in --output-dir")
    _add_side_flags(pretrain)
    compare = commands.add_parser(
        "compare", help=_COMPARE, description=_COMPARE, epilog=catalogue(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    _add_comparison_flags(compare)
    _add_data_flags(compare, length=64, vocab_size=2048, texts="--texts")
    _add_training_flags(compare, steps=300, learning_rate=3e-3, eval_fraction=0.1)
    _add_output_flags(compare, "fastmlm-compare", "go on with the first run in --output-dir that did not end")
    text = "print a masked batch, each token by its fate, and the rates it was masked at"
    inspect = commands.add_parser("inspect", help=text, description=text)
    _add_data_flags(inspect, length=64)
    _add_whole_words(inspect)
    inspect.add_argument("--rows", type=_positive, default=8, metavar="N", help="rows in the batch (%(default)s)")
    return parser, {"pretrain": pretrain, "compare": compare}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line. With ``--resume`` the flags not given are those the run was started with."""
    parser, commands = _build_parser()
    args = parser.parse_args(argv)
    if getattr(args, "resume", False):
        for other in ("compare", "overwrite"):
            if getattr(args, other, False):
                raise CliError(f"argument --resume: expected alone, got it with --{other}")
        saved = asdict(saved_settings(args.command, args.output_dir))
        defaults = {name: value for name, value in saved.items() if name != "output_dir"}
        commands[args.command].set_defaults(**defaults)
        args = parser.parse_args(argv)
    return args
