"""How many rows keep their masks when something changes that should not change them: Hugging Face's collator and ours.

Both have a seed, and ours is told the epoch. A row keeps its mask where its ids and labels, without padding, are the
same in both runs; for epochs, the share of rows that get another mask is given. Text, tokenizer and all are embedded:

    python benchmarks/reproducibility.py
"""

from collections.abc import Callable
from pydoc_data.topics import topics
from typing import Any

import torch
from accelerate import skip_first_batches
from report import quote
from torch.utils.data import DataLoader, DistributedSampler
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerBase

from fastmlm import DataCollatorForMaskedLM
from fastmlm.cli.tokenizer import train_tokenizer

ROWS, LENGTH, SEED = 512, 64, 42
Row = tuple[tuple[int, ...], tuple[int, ...]]  # ids and labels, without padding
Pass = dict[int, Row]
Collator = Callable[[list[Any]], Any]


def make_rows(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[dict[str, Any]]:
    """Different rows of 16 to 64 tokens, numbered: long enough that no two masks are the same by chance."""
    ids = [i for text in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] for i in text]
    rows, start = [], 0
    for number in range(ROWS):
        size = 14 + 7 * number % (LENGTH - 15)
        row = [tokenizer.cls_token_id, *ids[start : start + size], tokenizer.sep_token_id]
        rows.append({"input_ids": row, "attention_mask": [1] * len(row), "idx": number})
        start += size
    return rows


class Setting:
    """One collator after another on the same rows, each made anew as a new run makes it."""

    def __init__(self, ours: bool, tokenizer: PreTrainedTokenizerBase, rows: Any) -> None:
        self.ours, self.tokenizer, self.rows = ours, tokenizer, rows

    def collator(self, epoch: int = 0) -> Collator:
        if not self.ours:
            return DataCollatorForLanguageModeling(self.tokenizer, seed=SEED)
        made = DataCollatorForMaskedLM(self.tokenizer, seed=SEED)
        made.set_epoch(epoch)
        return made

    def passed(self, collator: Any = None, ranks: int = 1, skipped: int = 0, order: int = 0, **changes: Any) -> Pass:
        """A pass over the data, in batches of 4 without workers unless told otherwise: what became of each row."""
        collator = collator or self.collator()
        found: Pass = {}
        for rank in range(ranks):
            own = collator if ranks == 1 else self.collator()  # each rank is a process with a collator of its own
            sampler: Any = DistributedSampler(self.rows, ranks, rank, seed=SEED + order)
            loader: Any = DataLoader(
                self.rows,
                collate_fn=own,
                sampler=sampler,
                **{"batch_size": 4, **changes},
            )
            for batch in skip_first_batches(loader, skipped) if skipped else loader:
                real = batch["attention_mask"] == 1
                for i, number in enumerate(batch["idx"].tolist()):
                    ids, labels = batch["input_ids"][i][real[i]], batch["labels"][i][real[i]]
                    found[number] = tuple(ids.tolist()), tuple(labels.tolist())
        return found

    def left_padded(self) -> Pass:
        self.tokenizer.padding_side = "left"
        try:
            return self.passed()
        finally:
            self.tokenizer.padding_side = "right"

    def epochs(self, shuffled: bool) -> tuple[Pass, Pass]:
        """Two epochs of one run, with workers that start anew in each, as the Trainer's do by default."""
        collator: Any = self.collator()
        passes = []
        for epoch in range(2):
            if self.ours:
                collator.set_epoch(epoch)
            passes.append(self.passed(collator, num_workers=2, order=epoch * shuffled))
        return passes[0], passes[1]

    def evaluations(self) -> tuple[Pass, Pass]:
        """Two evaluations in one run, with the collator that the Trainer, or MaskedLMTrainer, has for them."""
        collator: Any = self.collator()
        collator = collator.for_evaluation() if self.ours else collator
        return self.passed(collator), self.passed(collator)


def same(one: Pass, other: Pass) -> float:
    """The share of the rows of the second pass whose ids and labels are those of the first, in percent."""
    return 100 * sum(one[number] == row for number, row in other.items()) / len(other)


def measure(setting: Setting) -> dict[str, float]:
    first = setting.passed()
    assert same(first, setting.passed()) == 100, "a run repeated as it was"
    return {
        "0 → 2 workers: same": same(first, setting.passed(num_workers=2)),
        "batches of 4 → 7 rows: same": same(first, setting.passed(batch_size=7)),
        "padding on the right → left: same": same(first, setting.left_padded()),
        "1 → 2 ranks: same": same(first, setting.passed(ranks=2)),
        "resumed after 37 of 128 steps: same": same(first, setting.passed(skipped=37)),
        "evaluated twice: same": same(*setting.evaluations()),
        "next epoch, same order, 2 workers: **different**": 100 - same(*setting.epochs(shuffled=False)),
        "next epoch, shuffled anew, 2 workers: **different**": 100 - same(*setting.epochs(shuffled=True)),
    }


def main() -> None:
    torch.set_num_threads(1)
    texts = list(dict.fromkeys(topics.values()))
    tokenizer = train_tokenizer(texts, 2000)
    rows = make_rows(tokenizer, texts)
    hf, ours = (measure(Setting(which, tokenizer, rows)) for which in (False, True))
    lines = [
        f"Masks of {ROWS} rows, in percent; all should be 100, or almost: short rows may have nothing selected twice.",
        "",
        "| what changes | Hugging Face, `seed=42` | fastmlm, `seed=42`, epoch told |",
        "|---|--:|--:|",
        *(f"| {name} | {hf[name]:.1f} | {ours[name]:.1f} |" for name in hf),
    ]
    quote("reproducibility", "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
