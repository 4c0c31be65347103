"""From text files to rows of token ids."""

from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from fastmlm.cli.errors import CliError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Row = TypeVar("Row")  # with whatever belongs to it

# Tails with fewer tokens than this teach nothing and would only add padding.
_SHORTEST = 8

# The held-out rows depend on the text alone, so that runs with different --seed are validated on the same rows.
_SPLIT_SEED = 0


def read_documents(texts: list[str]) -> list[str]:
    """The files' texts, a document each; without files Python's help topics, about 465 kB of English prose."""
    if not texts:
        from pydoc_data.topics import topics

        return list(dict.fromkeys(topics.values()))  # two topics share one text
    documents = [_read(name) for name in texts]
    if not any(document.strip() for document in documents):
        raise CliError(f"argument TEXT: expected some text, got only white space in {', '.join(texts)}")
    return documents


def _read(name: str) -> str:
    try:
        return Path(name).read_text("utf-8-sig")
    except FileNotFoundError:
        raise CliError(f"argument TEXT: expected a text file, got {name}, which does not exist") from None
    except UnicodeDecodeError as error:
        raise CliError(f"argument TEXT: expected UTF-8, got {name} with other bytes at {error.start}") from None
    except OSError as error:
        raise CliError(f"argument TEXT: expected a readable text file, got {name} ({error.strerror})") from None


def make_rows(documents: list[str], tokenizer: "PreTrainedTokenizerBase", length: int) -> list[list[int]]:
    """Cut each document's tokens into chunks and frame them: ``[CLS] up to length - 2 tokens [SEP]``.

    This is ``group_texts`` of Hugging Face's examples, except that a row never runs on into the next document
    (RoBERTa's DOC-SENTENCES) and that the short row at a document's end is kept, from 8 tokens up.
    """
    return [row for row, _ in make_passages(documents, tokenizer, length)]


def make_passages(
    documents: list[str], tokenizer: "PreTrainedTokenizerBase", length: int
) -> list[tuple[list[int], int]]:
    """The rows of `make_rows`, each with the number of its document."""
    first = [i for i in [_first_id(tokenizer.cls_token_id, tokenizer.bos_token_id)] if i is not None]
    last = [i for i in [_first_id(tokenizer.sep_token_id, tokenizer.eos_token_id)] if i is not None]
    size = length - len(first) - len(last)
    passages = []
    for number, ids in enumerate(tokenizer(documents, add_special_tokens=False, verbose=False)["input_ids"]):
        chunks = [ids[start : start + size] for start in range(0, len(ids), size)]
        passages += [(first + chunk + last, number) for chunk in chunks if len(chunk) >= min(_SHORTEST, size)]
    return passages


def _first_id(preferred: int | None, other: int | None) -> int | None:
    return other if preferred is None else preferred


def split_rows(rows: list[Row], eval_fraction: float) -> tuple[list[Row], list[Row]]:
    """Training and validation rows: at least one of each, drawn at random but always the same way."""
    if len(rows) < 2:
        raise CliError(
            f"argument TEXT: expected text for at least 2 rows (1 to train on, 1 held out), got {len(rows)}; "
            "add text or lower --length"
        )
    held_out = min(max(1, round(len(rows) * eval_fraction)), len(rows) - 1)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(_SPLIT_SEED)).tolist()
    return [rows[i] for i in order[held_out:]], [rows[i] for i in order[:held_out]]
