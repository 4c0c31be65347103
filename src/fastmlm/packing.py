"""From a masked, padded batch to a packed one: the real tokens of all rows, one row after another, in a single row.

Packing comes after masking, so that a row's masks are those of the padded form: draws count a row's positions, holes
included, and words, special tokens and Hugging Face's own random stream need nothing of their own here.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Columns that never hold anything else than one value a token, and those of ours that do where they have that shape.
_PER_TOKEN = ("input_ids", "labels", "token_type_ids", "special_tokens_mask")
_OURS = ("fastmlm_units", "fastmlm_rates", "loss_weights")


def check_undivided(loader: Any, packs: bool) -> None:
    """Raise where Accelerate would put packed batches together and divide them by rows, of which they have one.

    Some it refuses itself, without saying why; others it divides in the wrong places.

    Raises:
        ValueError: the loader is one of ``dispatch_batches=True``, and packed.
    """
    dispatches = any(cls.__name__ == "DataLoaderDispatcher" for cls in type(loader).__mro__)  # without loading it
    if packs and dispatches:
        raise ValueError(
            "packing: expected dispatch_batches=False (accelerator_config, DataLoaderConfiguration; it is True for "
            "data sets without a length unless given), since a packed batch cannot be divided among processes, got True"
        )


def row_lengths(examples: Sequence[Any]) -> list[int]:
    """How many tokens each row brought, before padding."""
    return [len(row["input_ids"] if isinstance(row, Mapping) else row) for row in examples]


def flatten(
    batch: Mapping[str, Any],
    examples: Sequence[Any],
    attention_mask: Any,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    pad_to_multiple_of: int | None = None,
    position_ids_start: int = 0,
    separate: bool = False,
) -> dict[str, Any]:
    """``DataCollatorWithFlattening(return_flash_attn_kwargs=True)`` for a batch that is already padded and masked.

    Args:
        batch: columns of B rows: tensors or arrays, (B, S, ...) where they hold one value a token, and lists.
        examples: the rows they were made of.
        attention_mask: (B, S); only tokens where it is not 0 are kept, and only rows that keep one.
        tokenizer: gives the ids of padding.
        pad_to_multiple_of: fill the flat row up with one more row, of padding, to a multiple of this.
        position_ids_start: the first position of each row.
        separate: the first label of each row is -100, as a model that shifts labels needs it.

    Returns:
        Columns of one value a token as (1, N, ...) tensors, then ``position_ids`` (1, N) int64 (where the rows brought
        none), ``cu_seq_lens_q`` and ``_k`` (rows + 1,) int32, ``max_length_q`` and ``_k`` ints. Columns of one value a
        row lose the rows that were dropped.

    Raises:
        ValueError: no token is left, or there is no pad token to fill up with.
    """
    keep = np.asarray(attention_mask) != 0
    lengths = np.count_nonzero(keep, axis=1)
    rows = np.flatnonzero(lengths)
    if not len(rows):
        raise ValueError("features: expected at least one token with attention_mask 1 to pack, got none in any row")
    index = torch.from_numpy(np.flatnonzero(keep))
    missing = 0 if pad_to_multiple_of is None else -len(index) % pad_to_multiple_of
    if missing and tokenizer.pad_token_id is None:
        raise ValueError(
            f"pad_to_multiple_of: expected a tokenizer with a pad token to fill {len(index)} tokens up with, got none"
        )
    fill = {"input_ids": tokenizer.pad_token_id, "token_type_ids": tokenizer.pad_token_type_id, "labels": -100}
    packed = {
        name: _take_tokens(column, index, missing, fill.get(name, 0))
        if _per_token(name, column, keep.shape, examples)
        else _take_rows(column, rows, len(lengths))
        for name, column in batch.items()
        if name != "attention_mask"
    }
    lengths = np.append(lengths[rows], missing) if missing else lengths[rows]
    ends = np.cumsum(lengths)
    starts = ends - lengths
    if separate:
        packed["labels"][0, starts] = -100
    if "position_ids" not in packed:
        positions = np.arange(position_ids_start, position_ids_start + ends[-1]) - np.repeat(starts, lengths)
        packed["position_ids"] = torch.from_numpy(positions)[None]
    bounds = np.append(0, ends).astype(np.int32)
    longest = int(lengths.max())
    return packed | {
        "cu_seq_lens_q": torch.from_numpy(bounds),
        "cu_seq_lens_k": torch.from_numpy(bounds.copy()),
        "max_length_q": longest,
        "max_length_k": longest,
    }


def _per_token(name: str, column: Any, shape: tuple[int, ...], examples: Sequence[Any]) -> bool:
    """Whether a column holds one value a token; one of the padded width may still hold so many values a row."""
    if isinstance(column, list) or tuple(column.shape[:2]) != shape:
        return False
    return name in (*_PER_TOKEN, *_OURS) or [len(row[name]) for row in examples] == row_lengths(examples)


def _take_tokens(column: Any, index: Tensor, missing: int, fill: int) -> Tensor:
    """(B, S, ...) → (1, N, ...): the tokens at flat indices, then as many of padding as are missing."""
    flat = torch.as_tensor(column, device="cpu").flatten(0, 1)
    if len(index) != len(flat):  # else all tokens are real, and nothing moves
        flat = flat.index_select(0, index)
    if missing:
        flat = torch.cat([flat, flat.new_full((missing, *flat.shape[1:]), fill)])
    return flat[None]


def _take_rows(column: Any, rows: np.ndarray, count: int) -> Any:
    """The rows that kept a token, of a column of one value a row."""
    if len(rows) == count:
        return column
    return [column[i] for i in rows] if isinstance(column, list) else column[rows]
