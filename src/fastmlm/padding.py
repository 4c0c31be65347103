"""From a list of rows (Python lists, arrays or tensors) to padded tensors, a column at a time.

``tokenizer.pad`` turns everything into Python lists and ``torch.tensor`` reads those one object at a time; here lists
of ints and arrays go straight into the padded tensor by the native module. Without it, lists go by :mod:`struct`, and
arrays are copied as blocks, as tensors are in either case.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import itemgetter
from struct import Struct, error as StructError
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fastmlm.dispatch import kernel
from fastmlm.philox import real_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Column = Sequence[Any]  # one value a row
_INTEGERS = {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8}
_BOOLS = {bool, np.bool_}
_PER_TOKEN = ("attention_mask", "token_type_ids", "special_tokens_mask")  # never anything else


def pad_rows(
    features: Sequence[Any],
    tokenizer: "PreTrainedTokenizerBase",
    pad_to_multiple_of: int | None = None,
    skip: Sequence[str] = (),
    native: bool = False,
) -> dict[str, Any]:
    """``tokenizer.pad(features, return_tensors="pt")`` for rows of integers, with the same keys in the same order.

    Args:
        features: rows: mappings with at least ``input_ids``, or the ids themselves; lists, tuples, arrays or tensors of
            any integer type. Their keys are those of the first row. Never changed.
        tokenizer: gives ``padding_side``, ``pad_token_id``, ``pad_token_type_id`` and ``model_input_names``.
        pad_to_multiple_of: round the padded length up to a multiple of this.
        skip: columns to leave out.
        native: read lists and arrays by the native module.

    Returns:
        Columns of integers as int64, of floats as float64, (B, S, ...) where they hold one value a token (padded with
        0; ``input_ids``, ``token_type_ids`` and ``special_tokens_mask`` as the tokenizer pads them), (B, ...)
        otherwise; columns of strings, lists of strings or other objects as plain lists. ``attention_mask`` is added
        where the tokenizer's models take one.

    Raises:
        TypeError, ValueError, OverflowError: naming the column, the row and what was expected.
    """
    if isinstance(features, Mapping):
        raise TypeError(f"features: expected a sequence of rows, got one {type(features).__name__}")
    if len(features) == 0:
        raise ValueError("features: expected at least one row, got none")
    if native and hasattr(features, "padded"):  # a batch in columns (fastmlm.feeding), which knows a shorter way
        batch = features.padded(tokenizer, pad_to_multiple_of, skip)
        if batch is not None:
            return batch
    columns = {name: _without_buffers(column) for name, column in _columns(features).items() if name not in skip}
    lengths = _lengths(columns["input_ids"])
    width = padded_width(max(lengths), pad_to_multiple_of)
    if tokenizer.pad_token_id is None and any(n != width for n in lengths):
        raise ValueError(
            f"features: expected rows of one length, since {type(tokenizer).__name__} has no pad token to fill them up "
            f"with, got lengths from {min(lengths)} to {width}; set tokenizer.pad_token"
        )
    layout = _Layout(lengths, width, tokenizer.padding_side == "left", native)
    fill = fill_values(tokenizer)
    batch = {name: _column(name, column, layout, fill.get(name, 0)) for name, column in columns.items()}
    if "attention_mask" not in batch and "attention_mask" in tokenizer.model_input_names:
        batch["attention_mask"] = (
            torch.ones((len(lengths), width), dtype=torch.int64, device="cpu")
            if layout.full
            else real_tokens(torch.tensor(lengths, device="cpu"), width, layout.left)
        )
    return batch


def padded_width(longest: int, multiple: int | None) -> int:
    """The width of a batch whose longest row has so many tokens."""
    return longest if multiple is None else -(-longest // multiple) * multiple


def fill_values(tokenizer: "PreTrainedTokenizerBase") -> dict[str, int]:
    """What columns are filled up with; with 0 where they are not named."""
    return {
        "input_ids": tokenizer.pad_token_id or 0,
        "token_type_ids": tokenizer.pad_token_type_id,
        "special_tokens_mask": 1,
        "labels": -100,
        "word_ids": -1,
    }


@dataclass
class _Layout:
    """Where the tokens of each row go in a padded batch."""

    lengths: list[int]
    width: int
    left: bool
    native: bool

    @cached_property
    def full(self) -> bool:
        """Whether no row needs filling up."""
        return all(n == self.width for n in self.lengths)

    def place(self, row: int) -> slice:
        """The columns of a row's tokens."""
        n = self.lengths[row]
        return slice(self.width - n, self.width) if self.left else slice(0, n)


def _columns(features: Sequence[Any]) -> dict[str, Column]:
    """The rows turned into columns, by the keys of the first row."""
    first = features[0]
    if not isinstance(first, Mapping):
        return {"input_ids": list(features)}
    if "input_ids" not in first:
        raise ValueError(f"features: expected rows with input_ids, got keys {list(first)}")
    columns: dict[str, Column] = {}
    for name in first:
        try:
            columns[name] = list(map(itemgetter(name), features))
        except (KeyError, TypeError, IndexError) as error:
            raise _bad_row(features, name) from error
    return columns


def _bad_row(features: Sequence[Any], name: str) -> Exception:
    """Why not every row has this key of the first row."""
    for i, row in enumerate(features):
        if not isinstance(row, Mapping):
            return TypeError(f"features, row {i}: expected a mapping like the first row, got {type(row).__name__}")
        if name not in row:
            return ValueError(f"features: expected the keys of the first row in every row, row {i} has no {name!r}")
    return TypeError(f"features: expected {name!r} to be readable in every row")


def _without_buffers(column: Column) -> Column:
    """The column, with what offers its memory by the buffer protocol (``array.array``, ``memoryview``) as arrays."""
    known = (list, dict, tuple, range, str, bytes, bytearray, int, float, type(None), np.ndarray, np.generic, Tensor)
    if all(issubclass(kind, known) for kind in set(map(type, column))):
        return column
    return [row if isinstance(row, known) else _array_of_buffer(row) for row in column]


def _array_of_buffer(row: Any) -> Any:
    try:
        return np.asarray(memoryview(row))
    except TypeError:
        return row


def _lengths(column: Column) -> list[int]:
    """How many tokens each row of ``input_ids`` has, if it is what it should be; who reads it will see."""
    kinds = set(map(type, column))
    if kinds == {Tensor}:
        return [row.numel() for row in column]  # a fifth of the time of len
    if kinds <= {list, tuple, range, np.ndarray}:
        try:
            return list(map(len, column))
        except TypeError:  # an array without dimensions
            pass
    return [_length(row, i) for i, row in enumerate(column)]


def _length(row: Any, index: int) -> int:
    """How many tokens a row of ``input_ids`` has."""
    if isinstance(row, Tensor) and row.dtype in _INTEGERS and row.dim() == 1:
        return len(row)
    if isinstance(row, (list, tuple, range)):
        return len(row)
    if isinstance(row, (Tensor, np.ndarray)):
        if row.ndim != 1:
            raise ValueError(f"input_ids, row {index}: expected one dimension, got shape {tuple(row.shape)}")
        if isinstance(row, Tensor):
            whole = not (row.is_floating_point() or row.is_complex() or row.dtype == torch.bool)
        else:
            whole = row.dtype.kind in "iu"
        if not whole:
            raise TypeError(f"input_ids, row {index}: expected integers, got {row.dtype}")
        return len(row)
    raise TypeError(f"input_ids, row {index}: expected a list, array or tensor of integers, got {type(row).__name__}")


def _column(name: str, column: Column, layout: _Layout, fill: int) -> Any:
    first = column[0]
    words = isinstance(first, (list, tuple)) and isinstance(next(iter(first), None), str) and name != "input_ids"
    # numpy's strings are among its numbers' types: ask for strings first
    if words or isinstance(first, (str, bytes, bytearray)):
        return list(column)
    if layout.native and isinstance(first, (list, tuple, np.ndarray)):
        packed = kernel("cpp", "rows.pack")(column, layout.lengths, layout.width, layout.left, fill)
        if packed is not None:
            return packed
    elif isinstance(first, (Tensor, np.ndarray)):
        flat = _flat(column, layout)
        if flat is not None:
            return _spread(flat, layout, fill)
    if name == "input_ids":  # whatever they are, they were none of the usual
        for i, row in enumerate(column):
            _length(row, i)
    if isinstance(first, (list, tuple, range)):
        packed = _pack_lists(name, column, layout, fill)
        if packed is not None:
            return packed
    elif not isinstance(first, (bool, int, float, np.generic, np.ndarray, Tensor)):
        if name in _PER_TOKEN:
            raise TypeError(f"{name}, row 0: expected one integer a token, got {type(first).__name__}")
        return list(column)
    return _to_tensor(_pad_arrays(name, [_array(name, i, row) for i, row in enumerate(column)], layout, fill))


def _flat(column: Column, layout: _Layout) -> Tensor | None:
    """Arrays or tensors of integers, one a token, end to end as int64; None where the column is something else."""
    if set(map(type, column)) == {Tensor}:
        dtypes = {row.dtype for row in column}
        if len(dtypes) > 1 or not dtypes <= _INTEGERS or [row.numel() for row in column] != layout.lengths:
            return None
        try:
            flat = torch.cat(tuple(column))
        except RuntimeError:  # of different dimensions
            return None
        return flat.cpu().to(torch.int64) if flat.dim() == 1 else None
    if set(map(type, column)) != {np.ndarray}:
        return None
    if not {(row.dtype.kind, row.ndim) for row in column} <= {("i", 1), ("u", 1)}:
        return None
    if list(map(len, column)) != layout.lengths:
        return None
    array = np.concatenate(column)
    if array.dtype.kind not in "iu" or (array.dtype.kind == "u" and array.dtype.itemsize == 8):
        return None
    return torch.from_numpy(array.astype(np.int64, copy=False))


def _spread(flat: Tensor, layout: _Layout, fill: int) -> Tensor:
    """The tokens of all rows end to end, as (B, width), filled up."""
    if layout.full:
        return flat.view(len(layout.lengths), layout.width)
    out = np.full((len(layout.lengths), layout.width), fill, np.int64)
    end, values = 0, flat.numpy()
    for i, n in enumerate(layout.lengths):
        start, end = end, end + n
        out[i, layout.place(i)] = values[start:end]
    return torch.from_numpy(out)


@lru_cache(maxsize=4096)
def _int64s(count: int) -> Struct:
    return Struct(f"{count}q")


def _pack_lists(name: str, column: Column, layout: _Layout, fill: int) -> Tensor | None:
    """Lists of ints, one a token, packed into (B, width) int64; None where the column is something else."""
    ids = name == "input_ids"
    sample = next((value for row in column if isinstance(row, (list, tuple)) for value in row[:1]), 0)
    if not ids and (not isinstance(sample, (int, np.integer)) or isinstance(sample, bool)):
        return None
    out = np.full((len(layout.lengths), layout.width), fill, np.int64)
    buffer = out.data.cast("B") if out.size else memoryview(bytearray())
    for i, (row, n) in enumerate(zip(column, layout.lengths, strict=True)):
        if not isinstance(row, (list, tuple, range)) or len(row) != n:
            if not ids:
                return None
            row = _array(name, i, row).tolist()  # rows of different kinds in one column
        elif ids and not _BOOLS.isdisjoint(map(type, row)):
            raise _bad_id(row, i)
        try:
            _int64s(n).pack_into(buffer, 8 * (i * layout.width + layout.place(i).start), *row)
        except StructError as error:
            if not ids:
                return None
            raise _bad_id(row, i) from error
    return torch.from_numpy(out)


def _bad_id(row: Sequence[Any], index: int) -> Exception:
    """What is wrong with a row of ids that would not pack."""
    for position, value in enumerate(row):
        where = f"input_ids, row {index}, position {position}: expected an int"
        if type(value) in _BOOLS or not hasattr(value, "__index__"):
            return TypeError(f"{where}, got {value!r} ({type(value).__name__})")
        if not -(1 << 63) <= int(value) < 1 << 63:
            return OverflowError(f"{where} of 64 bits, got {value!r}")
    return TypeError(f"input_ids, row {index}: expected ints, got {row!r}")


def _array(name: str, index: int, row: Any) -> np.ndarray:
    """A row's value as an array of numbers, without a copy where it is an array or a tensor."""
    if isinstance(row, Tensor):
        row = row.detach().cpu()
        row = (row.float() if row.dtype == torch.bfloat16 else row).numpy()
    if name == "word_ids" and not isinstance(row, np.ndarray):  # tokenizers say None where a token has no word
        row = [-1 if word is None else word for word in row]
    if name == "input_ids" and isinstance(row, (list, tuple)) and not _BOOLS.isdisjoint(map(type, row)):
        raise _bad_id(row, index)
    if isinstance(row, bytearray):
        raise TypeError(f"{name}, row {index}: expected numbers, got {row!r:.80}")
    try:
        array = np.asarray(row)
    except ValueError as error:  # ragged inside
        raise ValueError(f"{name}, row {index}: expected values of one shape, got {row!r:.80}") from error
    if name == "input_ids" and array.size and array.dtype.kind not in "iu":
        raise _bad_id(list(row), index)
    if array.dtype.kind == "u" and array.itemsize == 8:
        if array.size and array.max() >= 1 << 63:
            raise OverflowError(f"{name}, row {index}: expected integers below 2^63, got {array.max()}")
        array = array.astype(np.int64)
    if array.dtype.kind not in "biuf":
        raise TypeError(f"{name}, row {index}: expected numbers, got {row!r:.80}")
    return array


def _pad_arrays(name: str, column: list[np.ndarray], layout: _Layout, fill: int) -> np.ndarray:
    """Rows stacked; filled up to the width where their first dimension counts the row's tokens."""
    lengths, width = layout.lengths, layout.width
    per_token = all(row.shape[:1] == (n,) for row, n in zip(column, lengths, strict=True))
    one_shape = all(row.shape == column[0].shape for row in column) and (per_token or name not in _PER_TOKEN)
    if one_shape and not (per_token and lengths[0] != width):
        return np.stack(column)
    if not per_token:
        i = next(i for i, n in enumerate(lengths) if column[i].shape[:1] != (n,))
        raise ValueError(
            f"{name}, row {i}: expected one value for each of the row's {lengths[i]} tokens"
            f"{'' if name in _PER_TOKEN else ', or one shape in all rows'}, got shape {column[i].shape}"
        )
    filled = [row for row in column if len(row)] or column
    inner = filled[0].shape[1:]
    out = np.full((len(lengths), width, *inner), fill, dtype=np.result_type(*{row.dtype for row in filled}))
    for i, (row, n) in enumerate(zip(column, lengths, strict=True)):
        if n and row.shape[1:] != inner:
            raise ValueError(f"{name}, row {i}: expected shape {(n, *inner)}, got {row.shape}")
        out[i, layout.place(i)] = row.reshape(n, *inner)
    return out


def _to_tensor(array: np.ndarray) -> Tensor:
    """int64 for integers, float64 for floats; bool stays."""
    kind = array.dtype.kind
    return torch.from_numpy(array if kind == "b" else array.astype(np.float64 if kind == "f" else np.int64, copy=False))
