"""Everything a run needs on disk, made once, so that each side of a comparison and a resumed run load the same."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fastmlm import MaskingSpec, mask_tokens
from fastmlm.cli.corpus import make_rows, read_documents, split_rows
from fastmlm.cli.model import build_model, model_tokenizer
from fastmlm.cli.settings import Settings
from fastmlm.cli.tokenizer import get_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Validation rows are masked once, at one rate and with one seed whatever the flags say: losses of all runs compare.
_EVAL_SEED, _EVAL_PROBABILITY = 20190524, 0.15

Validation = dict[str, Tensor]  # input_ids, attention_mask, labels, original_ids, all (rows, positions)


@dataclass(frozen=True)
class Prepared:
    """A run's ingredients in memory, before anything is written."""

    tokenizer: "PreTrainedTokenizerBase"
    model: "PreTrainedModel"
    train_rows: list[list[int]]
    validation: Validation

    def save(self, directory: Path, tokenizer_dir: Path) -> None:
        from datasets import Dataset

        columns = {"input_ids": self.train_rows, "attention_mask": [[1] * len(row) for row in self.train_rows]}
        Dataset.from_dict(columns).save_to_disk(directory / "train")
        torch.save(self.validation, directory / "validation.pt")
        self.model.save_pretrained(directory / "model")
        self.tokenizer.save_pretrained(tokenizer_dir)


def prepare(settings: Settings) -> Prepared:
    """Read, tokenise, cut, split, mask the validation rows and draw the first weights; bad input ends here."""
    documents = read_documents(settings.texts)
    tokenizer = get_tokenizer(settings.tokenizer or model_tokenizer(settings.model), documents, settings.vocab_size)
    model = build_model(settings.model, tokenizer, settings.length, settings.seed)
    train_rows, eval_rows = split_rows(make_rows(documents, tokenizer, settings.length), settings.eval_fraction)
    return Prepared(tokenizer, model, train_rows, mask_validation(eval_rows, tokenizer))


def mask_validation(rows: list[list[int]], tokenizer: "PreTrainedTokenizerBase", **replacement: float) -> Validation:
    """Pad and mask the held-out rows, 80/10/10 unless told otherwise, by the reference: the same on every machine."""
    width = max(map(len, rows))
    ids = torch.full((len(rows), width), tokenizer.pad_token_id)
    attention_mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
        attention_mask[i, : len(row)] = 1
    spec = MaskingSpec.from_tokenizer(tokenizer, mlm_probability=_EVAL_PROBABILITY, **replacement)
    masked = mask_tokens(ids, spec, seed=_EVAL_SEED, attention_mask=attention_mask, impl="reference")
    return {
        "input_ids": masked.input_ids,
        "attention_mask": attention_mask,
        "labels": masked.labels,
        "original_ids": ids,
    }
