"""``fastmlm inspect``: a masked batch in the terminal, each token by its fate, and the rates it was masked at."""

import argparse
import math

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from fastmlm import DataCollatorForMaskedLM
from fastmlm.cli.corpus import make_rows, read_documents
from fastmlm.cli.errors import CliError
from fastmlm.cli.quiet import quiet
from fastmlm.cli.tokenizer import get_tokenizer

# Fate: colour, mark. Without colour the marks alone tell the fates apart.
_FATES = {
    "masked": ("bold white on red", "[M:{token}]"),
    "random": ("bold black on yellow", "[R:{token}>{new}]"),
    "kept": ("bold black on green", "[K:{token}]"),
    "special": ("cyan", "<{token}>"),
    "padding": ("dim", "<{token}>*{new}"),
    "untouched": ("", "{token}"),
}
_SHARES = {"masked": 0.8, "random": 0.1, "kept": 0.1}  # the collator's defaults


def inspect(args: argparse.Namespace) -> None:
    """Run the command."""
    quiet()
    documents = read_documents(args.texts)
    tokenizer = get_tokenizer(args.tokenizer, documents, args.vocab_size)
    rows = make_rows(documents, tokenizer, args.length)
    if not rows:
        raise CliError("argument TEXT: expected text for at least one row, got less")
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(args.seed)).tolist()
    chosen = [rows[i] for i in order[: args.rows]]
    collator = DataCollatorForMaskedLM(
        tokenizer, whole_word_mask=args.whole_word_mask, mlm_probability=args.mlm_probability, seed=args.seed
    )
    batch = collator([{"input_ids": row, "attention_mask": [1] * len(row)} for row in chosen])
    console = Console(highlight=False, markup=False)
    _print_rows(console, tokenizer, batch, fates := batch_fates(tokenizer, batch))
    _print_legend(console)
    _print_rates(console, fates, args.mlm_probability, args.whole_word_mask)


def batch_fates(tokenizer: PreTrainedTokenizerBase, batch: dict[str, Tensor]) -> list[list[str]]:
    """What became of each token, read off the batch; a random token that happens to be the original counts as kept."""
    specials = set(tokenizer.all_special_ids)
    fates = []
    for ids, labels, real in zip(*(batch[k].tolist() for k in ("input_ids", "labels", "attention_mask")), strict=True):
        row = []
        for token, label, is_real in zip(ids, labels, real, strict=True):
            if label != -100:
                changed = "masked" if token == tokenizer.mask_token_id else "random"
                row.append("kept" if token == label else changed)
            elif not is_real:
                row.append("padding")
            else:
                row.append("special" if token in specials else "untouched")
        fates.append(row)
    return fates


def _print_rows(
    console: Console, tokenizer: PreTrainedTokenizerBase, batch: dict[str, Tensor], fates: list[list[str]]
) -> None:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(justify="right", style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for number, row in enumerate(fates):
        tokens = tokenizer.convert_ids_to_tokens(batch["input_ids"][number].tolist())
        labels = batch["labels"][number].tolist()
        line = Text()
        for token, label, fate in zip(tokens, labels, row, strict=True):
            if fate == "padding":  # counted below instead
                continue
            original = token.strip("<>") if fate == "special" else token
            _append(line, fate, original if label == -100 else tokenizer.convert_ids_to_tokens(label), token)
        if count := row.count("padding"):
            _append(line, "padding", tokenizer.pad_token.strip("<>"), str(count))
        grid.add_row(str(number), line)
    console.print(grid)


def _append(line: Text, fate: str, token: str, new: str) -> None:
    style, mark = _FATES[fate]
    line.append(mark.format(token=token, new=new), style=style).append(" ")


def _print_legend(console: Console) -> None:
    line = Text("\n")
    for fate in _FATES:
        line.append(f"{fate}: ", style="dim")
        _append(line, fate, "token", "count" if fate == "padding" else "new")
        line.append(" ")
    console.print(line)


def _print_rates(console: Console, fates: list[list[str]], probability: float, whole_words: bool) -> None:
    count = {fate: sum(row.count(fate) for row in fates) for fate in _FATES}
    selected = sum(count[fate] for fate in _SHARES)
    table = Table(title="rates", title_justify="left")
    for title in ("", "count", "of", "measured", "expected", "standard error"):
        table.add_column(title, justify="left" if not title else "right")
    parts = [("selected", selected, selected + count["untouched"], probability)]
    parts += [(fate, count[fate], selected, share) for fate, share in _SHARES.items()]
    for name, number, total, expected in parts:
        measured = f"{number / total:.2%}" if total else "-"
        error = f"{math.sqrt(expected * (1 - expected) / total):.2%}" if total else "-"
        table.add_row(name, f"{number:,}", f"{total:,}", measured, f"{expected:.2%}", error)
    table.add_row("special", f"{count['special']:,}", "", "", "", "")
    table.add_row("padding", f"{count['padding']:,}", "", "", "", "")
    console.print(table)
    if whole_words:
        console.print(
            "Words are selected as wholes, so the share of selected tokens varies more than its standard error says."
        )
