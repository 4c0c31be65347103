"""Rows for a DataLoader straight from the memory of an Arrow table, past the formats of ``datasets``.

A batch that ``datasets`` gives is sliced out of the table a row at a time, joined, and made into Python objects or
copied arrays; with a fast collator that takes most of the time. Here each value is a view of the (memory-mapped) table.
"""

import copy
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset, DatasetDict
from torch import Tensor

from fastmlm.dispatch import kernel
from fastmlm.padding import fill_values, padded_width
from fastmlm.philox import real_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The part of a column in one record batch: where each row starts in the values, and the end; and the values.
_Views = tuple[Sequence[int], np.ndarray]
_Part = list[_Views | pa.Array]  # a record batch, by column; as it is where anything is None


def zero_copy(dataset: Dataset) -> "ZeroCopyDataset":
    """``dataset``, with batches for a DataLoader that are views of its memory: ``[dict(input_ids=array, ...), ...]``.

    The result is a ``datasets.Dataset`` like the one given, so Trainer drops unused columns as ever, and can be
    pickled, shuffled, selected from and sliced; the dataset given stays as it is. Only what PyTorch's DataLoader asks
    for (``__getitems__``) differs: columns of lists of numbers come as read-only arrays of the type they are stored in,
    whatever the format; others as Python objects. Columns chosen by ``with_format(columns=...)`` are kept to, and a
    transform set by ``with_transform`` is applied, at the speed of ``datasets``. Lists with None in them come as
    Python lists. ``map`` and ``concatenate_datasets`` make new datasets: apply this last. A batch is a sequence of
    dicts; collators that insist on a list (``tokenizer.pad``) take ``list(batch)``.

    Args:
        dataset: of any features. The rows come fastest where all columns are (large, fixed-size) lists of numbers.

    Raises:
        TypeError: what came is no ``datasets.Dataset``: take one split of a DatasetDict; iterable datasets have no
            table.
    """
    if not isinstance(dataset, Dataset):
        raise TypeError(f"dataset: expected a datasets.Dataset, got {type(dataset).__name__}")
    result = copy.copy(dataset)
    result.__class__ = ZeroCopyDataset
    return result


class ZeroCopyDataset(Dataset):
    """What :func:`zero_copy` makes."""

    _reader: "_Reader | None" = None

    def __getitems__(self, keys: list[int]) -> Sequence[Any]:
        """The rows of a batch; called by PyTorch's DataLoader."""
        if self._reader is None:
            if self.format["type"] == "custom":
                return super().__getitems__(keys)
            self._reader = _Reader(self)
        return ArrowBatch(self._reader, keys)

    def set_format(self, *args: Any, **kwargs: Any) -> None:
        """``Dataset.set_format``, on which all other changes of the format are built."""
        super().set_format(*args, **kwargs)
        self._reader = None  # other columns, or a transform

    # Methods that make a new dataset of some of the rows; shard, skip and take are built on select.

    def select(self, *args: Any, **kwargs: Any) -> Dataset:
        """``Dataset.select``."""
        return zero_copy(super().select(*args, **kwargs))

    def shuffle(self, *args: Any, **kwargs: Any) -> Dataset:
        """``Dataset.shuffle``."""
        return zero_copy(super().shuffle(*args, **kwargs))

    def sort(self, *args: Any, **kwargs: Any) -> Dataset:
        """``Dataset.sort``."""
        return zero_copy(super().sort(*args, **kwargs))

    def train_test_split(self, *args: Any, **kwargs: Any) -> DatasetDict:
        """``Dataset.train_test_split``."""
        splits = super().train_test_split(*args, **kwargs)
        return DatasetDict({name: zero_copy(split) for name, split in splits.items()})

    def __getstate__(self) -> dict[str, Any]:
        # A copy opens its table itself: it may be given another one, and in a worker memory lies elsewhere.
        return {name: value for name, value in self.__dict__.items() if name != "_reader"}


class ArrowBatch(Sequence[dict[str, Any]]):
    """Rows of a table: dicts, made when first asked for, or padded columns without them.

    Raises:
        IndexError: a key is not in ``[-rows, rows)``.
    """

    def __init__(self, reader: "_Reader", keys: Sequence[int]) -> None:
        self._reader = reader
        self._keys = keys
        self._places = [reader.place(key) for key in keys]

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, index: Any) -> Any:
        return self._rows[index]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._rows)

    @cached_property
    def _rows(self) -> list[dict[str, Any]]:
        return self._reader.rows(self._keys, self._places)

    def padded(
        self, tokenizer: "PreTrainedTokenizerBase", pad_to_multiple_of: int | None = None, skip: Sequence[str] = ()
    ) -> dict[str, Tensor] | None:
        """:func:`fastmlm.padding.pad_rows` of these rows by the native module, from the table to tensors at once.

        None where anything but one integer a token is among them: the rows then go the way of all others, and so do
        those that have an error in them.
        """
        reader = self._reader
        names = [name for name in reader.names if name not in skip]
        parts, places = zip(*self._places, strict=True)
        if "input_ids" not in names or not reader.columns.keys() >= set(names) or not reader.whole.issuperset(parts):
            return None
        part, place = (torch.from_numpy(np.array(numbers, np.int64)) for numbers in (parts, places))
        lengths = kernel("cpp", "lists.lengths")(reader.columns["input_ids"], part, place)
        if lengths is None:
            return None
        shortest, width = (int(n) for n in lengths.aminmax())
        width = padded_width(width, pad_to_multiple_of)
        if tokenizer.pad_token_id is None and shortest != width:
            return None
        fill = fill_values(tokenizer)
        left = tokenizer.padding_side == "left"
        pad = kernel("cpp", "lists.pad")
        batch: dict[str, Tensor] = {}
        for name in names:
            column = pad(reader.columns[name], part, place, lengths, width, left, fill.get(name, 0))
            if column is None:
                return None
            batch[name] = column
        if "attention_mask" not in batch and "attention_mask" in tokenizer.model_input_names:
            batch["attention_mask"] = real_tokens(lengths, width, left)
        return batch


class _Reader:
    """An open table: the record batches of it read so far as arrays."""

    def __init__(self, dataset: Dataset) -> None:
        chosen = dataset.format["columns"]
        self.names = [name for name in dataset.column_names if dataset.format["output_all_columns"] or name in chosen]
        kinds = {name: dataset.data.schema.field(name).type for name in self.names}
        self._viewed = [name for name, kind in kinds.items() if _is_numbers(kind)]
        others = [name for name in self.names if name not in self._viewed]
        self._others = dataset.select_columns(others).with_format(None) if others else None
        self._rows = len(dataset)
        self._batches = dataset.data.to_batches()
        self._ends = [0, *accumulate(batch.num_rows for batch in self._batches)]
        self._parts: list[_Part | None] = [None] * len(self._batches)
        self._indices = None if dataset._indices is None else _Indices(dataset._indices.column(0))
        # For the native module: columns of integers by name, and the record batches read that have no None in them.
        self.columns = {
            name: (
                torch.zeros((len(self._batches), 3), dtype=torch.int64, device="cpu"),
                4 if pa.types.is_list(kinds[name]) else 8,
                kinds[name].value_type.bit_width // 8,
                pa.types.is_signed_integer(kinds[name].value_type),
            )
            for name in self._viewed
            if pa.types.is_integer(kinds[name].value_type) and not pa.types.is_uint64(kinds[name].value_type)
        }
        self.whole: set[int] = set()

    def place(self, key: int) -> tuple[int, int]:
        """The record batch of a row, read from now on, and the row's place in it; negative keys count from the end."""
        rows = self._rows
        if not -rows <= key < rows:
            raise IndexError(f"keys: expected rows of a dataset of {rows}, got {key}")
        row = key % rows if self._indices is None else self._indices[key % rows]
        part = bisect_right(self._ends, row) - 1
        if self._parts[part] is None:
            self._open(part)
        return part, row - self._ends[part]

    def rows(self, keys: Sequence[int], places: list[tuple[int, int]]) -> list[dict[str, Any]]:
        """Rows as dicts of views."""
        columns: dict[str, list[Any]] = {name: [] for name in self.names}
        opened = [(self._parts[part], place) for part, place in places]
        for i, name in enumerate(self._viewed):
            columns[name] = list(_values(i, opened))
        if self._others is not None and places:
            columns.update(self._others[[key % self._rows for key in keys]])
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def _open(self, part: int) -> None:
        batch = self._batches[part]
        arrays = self._parts[part] = [_arrays(batch.column(name)) for name in self._viewed]
        views = {name: array for name, array in zip(self._viewed, arrays, strict=True) if isinstance(array, tuple)}
        if views.keys() >= self.columns.keys():
            for name, (addresses, *_) in self.columns.items():
                starts, values = views[name]
                where = [_address(starts), _address(values), len(values)]
                addresses[part] = torch.tensor(where, device="cpu")
            self.whole.add(part)


def _address(array: Any) -> int:
    return np.asarray(array).__array_interface__["data"][0]


def _values(column: int, places: list[tuple[Any, int]]) -> Iterator[Any]:
    """A column of a batch, one value a row."""
    for parts, i in places:
        part = parts[column]
        if type(part) is tuple:
            starts, values = part
            yield values[starts[i] : starts[i + 1]]
        else:
            yield part[i].as_py()


class _Indices:
    """The numbers of the rows that a shuffled or selected dataset has, in memory that stays where it is."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        self._chunks = [memoryview(chunk.to_numpy()) for chunk in column.chunks]
        self._ends = [0, *accumulate(map(len, self._chunks))]

    def __getitem__(self, row: int) -> int:
        chunk = bisect_right(self._ends, row) - 1
        return self._chunks[chunk][row - self._ends[chunk]]


def _is_numbers(kind: pa.DataType) -> bool:
    """Whether values of this type are lists that lie in memory as numpy has arrays."""
    lists = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return lists and (pa.types.is_integer(kind.value_type) or pa.types.is_floating(kind.value_type))


def _arrays(array: pa.Array) -> _Views | pa.Array:
    """A part of a column of lists of numbers as numpy has it, without a copy; as it is where anything is None."""
    values = array.values
    if array.null_count or values.null_count:
        return array
    if pa.types.is_fixed_size_list(array.type):
        # The values are those of the array before it was sliced.
        starts = np.arange(array.offset, array.offset + len(array) + 1) * array.type.list_size
    else:
        starts = array.offsets.to_numpy()
    return memoryview(starts), values.to_numpy()  # a memoryview's items are ints, and sooner there than numpy's
