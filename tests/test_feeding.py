"""``zero_copy``: the same rows and masks as ``datasets`` gives, through everything that people do with a dataset."""

import copy
import pickle

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from batches import equal

from fastmlm import DataCollatorForMaskedLM, available_impls
from fastmlm.feeding import ZeroCopyDataset, zero_copy
from fastmlm.padding import pad_rows

# Of datasets 5 with pyarrow 25 and later, when it sorts.
pytestmark = pytest.mark.filterwarnings("ignore:Specifying null_placement:FutureWarning")

INTEGERS = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]
LENGTHS = [3, 1, 0, 4, 2, 7, 1, 5, 3, 6, 2, 2]  # an empty row among them


def lists(first: int = 5) -> list[list[int]]:
    """A column of lists of these lengths."""
    return [list(range(first + i, first + i + n)) for i, n in enumerate(LENGTHS)]


def table_of(chunks: int = 3, **columns: tuple[list, pa.DataType]) -> datasets.Dataset:
    """A dataset of several chunks."""
    table = pa.table({name: pa.array(values, kind) for name, (values, kind) in columns.items()})
    size = -(-len(table) // chunks)
    return datasets.Dataset(pa.Table.from_batches(table.to_batches(max_chunksize=size)))


def plain(value):
    """Python objects, whatever came."""
    return value.tolist() if isinstance(value, np.ndarray) else value


def rows_of(dataset, keys=None) -> list[dict]:
    """What a loader gets, as Python objects."""
    batch = dataset.__getitems__(list(range(len(dataset))) if keys is None else keys)
    return [{name: plain(value) for name, value in row.items()} for row in batch]


def same_rows(fast, slow) -> bool:
    return isinstance(fast, ZeroCopyDataset) and rows_of(fast) == list(slow)


# Rows


@pytest.mark.parametrize("kind", INTEGERS, ids=str)
def test_types_of_numbers_are_kept(kind):
    dataset = table_of(input_ids=(lists(), pa.list_(kind)))
    fast = zero_copy(dataset)
    assert same_rows(fast, dataset)
    assert {row["input_ids"].dtype for row in fast.__getitems__([0, 5, 11])} == {np.dtype(str(kind))}


@pytest.mark.parametrize("kind", [pa.list_, pa.large_list], ids=["list", "large_list"])
def test_kinds_of_lists(kind):
    dataset = table_of(input_ids=(lists(), kind(pa.int32())), scores=(lists(), kind(pa.float32())))
    assert same_rows(zero_copy(dataset), dataset)


@pytest.mark.parametrize("size", [0, 1, 4])
def test_lists_of_one_size(size):
    """Their values do not follow a slice of the list, unlike offsets: the second chunk would repeat the first."""
    rows = [[10 * i + j for j in range(size)] for i in range(9)]
    dataset = table_of(input_ids=(rows, pa.list_(pa.int16(), size)))
    assert pa.types.is_fixed_size_list(dataset.data.schema.field("input_ids").type)
    assert same_rows(zero_copy(dataset), dataset)
    assert same_rows(zero_copy(dataset).select(range(4, 8)), dataset.select(range(4, 8)))


def test_other_columns_come_as_datasets_gives_them():
    dataset = table_of(
        name=([f"row {i}" for i in range(12)], pa.string()),
        input_ids=(lists(), pa.list_(pa.int32())),
        label=(list(range(12)), pa.int64()),
        pairs=([[[1, 2]] * n for n in LENGTHS], pa.list_(pa.list_(pa.int64()))),
        flags=([[True] * n for n in LENGTHS], pa.list_(pa.bool_())),
        words=([["a"] * n for n in LENGTHS], pa.list_(pa.string())),
        missing=([None, 1.5] * 6, pa.float64()),
    )
    fast = zero_copy(dataset)
    assert same_rows(fast, dataset)
    assert [list(row) for row in rows_of(fast)] == [dataset.column_names] * 12
    assert rows_of(fast, [-1, 3]) == [dataset[-1], dataset[3]]
    shuffled = dataset.shuffle(seed=1)
    assert same_rows(fast.shuffle(seed=1), shuffled)
    assert rows_of(fast.shuffle(seed=1), [-1, 3]) == [shuffled[11], shuffled[3]]


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.select([5, 3, 3, 11]),
        lambda d: d.select(range(2, 9)),
        lambda d: d.select([7, 1, 9, 2, 4]).select([4, 0, 2]),
        lambda d: d.shuffle(seed=1, writer_batch_size=5),  # indices in several chunks
        lambda d: d.shuffle(seed=1).select(range(3, 40)),
        lambda d: d.shuffle(seed=2).shard(3, 1),
        lambda d: d.skip(4).take(9),
        lambda d: d.sort("text"),
        lambda d: d.train_test_split(0.25, seed=3)["test"],
        lambda d: d.filter(lambda row: len(row["input_ids"]) > 20),
        lambda d: d.remove_columns(["text", "attention_mask"]),
        lambda d: d.select_columns(["input_ids"]),
        lambda d: d.rename_column("input_ids", "ids"),
        lambda d: d.flatten_indices(),
    ],
)
def test_whatever_is_done_to_the_dataset(mapped, change):
    """Before or after; and again after rows were read, when a table that was opened must not stay."""
    slow = change(mapped)
    assert same_rows(zero_copy(slow), slow)
    fast = zero_copy(mapped)
    for _ in range(2):
        changed = change(fast)
        assert rows_of(changed) == list(slow)
        rows_of(fast)


def test_caches_of_datasets_do_not_bring_plain_ones_back(mapped):
    """Shuffles and sorts of a saved dataset are stored in files, and read again in another way than first made."""
    fast = zero_copy(mapped)
    for _ in range(2):
        made = [fast.shuffle(seed=5), fast.sort("text"), *fast.train_test_split(0.5, seed=5).values()]
        assert {type(dataset) for dataset in made} == {ZeroCopyDataset}


@pytest.mark.parametrize("kind", [None, "numpy", "torch", "arrow", "pandas"])
def test_formats_make_no_difference(mapped, kind):
    fast = zero_copy(mapped.with_format(kind, columns=["input_ids", "text"]))
    expected = list(mapped.select_columns(["text", "input_ids"]))
    assert rows_of(fast) == expected
    assert rows_of(zero_copy(mapped).with_format(kind, columns=["input_ids", "text"])) == expected
    rows = zero_copy(mapped)
    rows_of(rows)
    rows.set_format(kind, columns=["input_ids"])
    assert rows_of(rows) == list(mapped.select_columns("input_ids"))
    rows.set_format(kind, columns=["input_ids"], output_all_columns=True)
    assert rows_of(rows) == list(mapped)


def test_a_transform_is_applied(mapped):
    fast = zero_copy(mapped)
    rows_of(fast)
    fast.set_transform(lambda batch: {"n": [len(ids) for ids in batch["input_ids"]]})
    assert rows_of(fast, [3, 0]) == [{"n": len(mapped[3]["input_ids"])}, {"n": len(mapped[0]["input_ids"])}]
    fast.reset_format()
    assert same_rows(fast, mapped)


def test_joined_columns_of_other_chunks():
    """Columns joined sideways are cut at other rows."""
    left = datasets.concatenate_datasets([table_of(input_ids=(lists(), pa.list_(pa.int32())))] * 2)
    right = table_of(5, labels=(lists(40) * 2, pa.list_(pa.int64())))
    joined = datasets.concatenate_datasets([left, right], axis=1)
    assert same_rows(zero_copy(joined), joined)


def test_nothing_is_copied_or_changed(mapped):
    fast = zero_copy(mapped)
    (one,), (other,) = fast.__getitems__([20]), fast.__getitems__([20])
    for name in ("input_ids", "attention_mask", "token_type_ids"):
        assert np.shares_memory(one[name], other[name])
        assert not one[name].flags.writeable
    memory = mapped.data.slice(20, 1).column("input_ids").chunk(0)
    at = one["input_ids"].__array_interface__["data"][0]
    assert at == memory.buffers()[3].address + 4 * memory.offsets[0].as_py()
    assert type(mapped) is datasets.Dataset
    assert isinstance(mapped.__getitems__([0])[0]["input_ids"], list)


def test_else_it_is_the_dataset(mapped):
    """Only batches for a loader differ."""
    fast = zero_copy(mapped)
    assert isinstance(fast, datasets.Dataset)
    assert (len(fast), fast.column_names, fast.features) == (len(mapped), mapped.column_names, mapped.features)
    assert (fast[4], fast[2:5], fast["text"][3]) == (mapped[4], mapped[2:5], mapped["text"][3])
    assert list(fast) == list(mapped)
    assert list(fast.__getitems__([])) == []
    assert len(zero_copy(mapped.select([]))) == 0


def test_copies_open_their_own_table(mapped):
    fast = zero_copy(mapped)
    before = len(pickle.dumps(fast))
    rows_of(fast)
    blob = pickle.dumps(fast)
    assert len(blob) == before < 20_000, "the memory mapped is not in it"
    for again in (pickle.loads(blob), copy.deepcopy(fast), copy.copy(fast)):
        assert again._reader is None
        assert same_rows(again, mapped)


# Errors


@pytest.mark.parametrize("value", [[1, 2], None, datasets.DatasetDict(), torch.utils.data.TensorDataset()])
def test_what_is_no_dataset(value):
    with pytest.raises(TypeError, match=rf"^dataset: expected a datasets.Dataset, got {type(value).__name__}$"):
        zero_copy(value)


@pytest.mark.parametrize("key", [12, -13, 1 << 40])
def test_keys_out_of_range(key):
    dataset = zero_copy(table_of(input_ids=(lists(), pa.list_(pa.int32()))))
    for rows in (dataset, dataset.shuffle(seed=1)):
        with pytest.raises(IndexError, match=rf"^keys: expected rows of a dataset of 12, got {key}$"):
            rows.__getitems__([0, key])


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (None, r"input_ids, row 1: expected a list, array or tensor of integers, got NoneType"),
        ([5, None], r"input_ids, row 1, position 1: expected an int, got None"),
    ],
)
@pytest.mark.parametrize("kind", [pa.list_(pa.int32()), pa.large_list(pa.int64()), pa.list_(pa.int32(), 2)], ids=str)
def test_nulls_are_told_by_the_collator(wordpiece, kind, bad, message):
    dataset = table_of(1, input_ids=([[5, 6], bad, [7, 8], [9, 10]], kind))
    fast = zero_copy(dataset)
    assert same_rows(fast, dataset)
    collator = DataCollatorForMaskedLM(wordpiece)
    with pytest.raises(TypeError, match=message):
        collator(fast.__getitems__([0, 1]))
    assert collator(fast.__getitems__([2, 3]))["input_ids"].shape == (2, 2)


def test_words_of_no_word(wordpiece):
    """``word_ids`` columns have None at special tokens, which the collator takes."""
    rows = table_of(
        input_ids=([[2, 9, 10, 3], [2, 11, 3]], pa.list_(pa.int32())),
        word_ids=([[None, 0, 0, None], [None, 0, None]], pa.list_(pa.int64())),
    )
    collator = DataCollatorForMaskedLM(wordpiece, whole_word_mask=True, seed=1, mlm_probability=0.5)
    collator.set_epoch(0)
    assert equal(collator(zero_copy(rows).__getitems__([0, 1])), collator(rows.__getitems__([0, 1])))


# Padding straight from the table

needs_native = pytest.mark.skipif("cpp" not in available_impls(), reason="needs the native module")


@needs_native
@pytest.mark.parametrize("multiple", [None, 8])
@pytest.mark.parametrize("family", ["wordpiece", "byte_level", "unigram", "amino_acids"])
def test_padded_as_all_rows_are(tokenizers, family, multiple):
    """Right and left padding, other pad ids, columns of every width of integer, empty rows; in any order."""
    tokenizer = tokenizers[family]
    names = ["labels", "special_tokens_mask", "token_type_ids", "attention_mask", "word_ids", "a", "b"]
    columns = {
        name: (lists(i - 3), pa.list_(kind))
        for i, (name, kind) in enumerate(zip(names, INTEGERS[:4] * 2, strict=False))
    }
    columns |= {f"u{kind}": (lists(100), pa.large_list(kind)) for kind in INTEGERS[4:7]}
    dataset = table_of(4, input_ids=(lists(), pa.list_(pa.int32())), **columns)
    for rows in (dataset, dataset.shuffle(seed=1), dataset.remove_columns("attention_mask")):
        for keys in (range(12), [3], [2], [11, 0, 5, 5, -1]):
            slow = pad_rows(rows.__getitems__([key % 12 for key in keys]), tokenizer, multiple, ("labels",))
            fast = zero_copy(rows).__getitems__(list(keys)).padded(tokenizer, multiple, ("labels",))
            assert equal(fast, slow)
            assert {column.dtype for column in fast.values()} == {torch.int64}


@needs_native
@pytest.mark.parametrize("size", [0, 1, 4])
def test_padded_lists_of_one_size(wordpiece, size):
    rows = [[10 * i + j for j in range(size)] for i in range(9)]
    dataset = table_of(input_ids=(rows, pa.list_(pa.int16(), size))).select(range(1, 8))
    keys = [5, 0, 6, 2]
    assert equal(
        zero_copy(dataset).__getitems__(keys).padded(wordpiece), pad_rows(dataset.__getitems__(keys), wordpiece)
    )


@needs_native
@pytest.mark.parametrize(
    "columns",
    [
        {"label": (list(range(12)), pa.int64())},
        {"scores": (lists(), pa.list_(pa.float32()))},
        {"big": (lists(), pa.list_(pa.uint64()))},
        {"position_ids": (lists()[::-1], pa.list_(pa.int32()))},  # of other lengths
        {"word_ids": ([[None] * n for n in LENGTHS], pa.list_(pa.int32()))},
    ],
    ids=lambda columns: next(iter(columns)),
)
def test_other_rows_go_the_way_of_all(wordpiece, columns):
    dataset = zero_copy(table_of(input_ids=(lists(), pa.list_(pa.int32())), **columns))
    (name,) = columns
    keys = list(range(12))
    assert dataset.__getitems__(keys).padded(wordpiece) is None
    if name != "word_ids":  # batches with None in them are left to the others whatever is asked for
        assert dataset.__getitems__(keys).padded(wordpiece, skip=(name,)) is not None
    assert dataset.rename_column("input_ids", "ids").__getitems__(keys).padded(wordpiece) is None


@needs_native
def test_a_default_device_changes_nothing(wordpiece):
    dataset = table_of(input_ids=(lists(), pa.list_(pa.int32())))
    with torch.device("meta"):
        batch = zero_copy(dataset).__getitems__([3, 0]).padded(wordpiece)
    assert equal(batch, pad_rows(dataset.__getitems__([3, 0]), wordpiece))


@needs_native
def test_no_pad_token(wordpiece):
    wordpiece.pad_token = None
    dataset = zero_copy(table_of(input_ids=(lists(), pa.list_(pa.int32()))))
    assert dataset.__getitems__([0, 3]).padded(wordpiece) is None
    assert dataset.__getitems__([0, 8]).padded(wordpiece)["input_ids"].tolist() == [lists()[0], lists()[8]]
    assert dataset.__getitems__([0, 8]).padded(wordpiece, 2) is None


@needs_native
@pytest.mark.parametrize("offsets", [[0, 5, 4], [0, 1 << 30, 4], [0, -1, 4], [0, 3, 2]])
@pytest.mark.parametrize("kind", [pa.int32(), pa.int64()], ids=str)
def test_broken_offsets_read_no_memory_beyond(wordpiece, offsets, kind):
    """A damaged file is not checked when it is loaded."""
    memory = np.array([0, 2, 4], kind.to_pandas_dtype())
    make = pa.ListArray if kind == pa.int32() else pa.LargeListArray
    array = make.from_arrays(pa.array(memory), pa.array([5, 6, 7, 8], pa.int32()))
    memory[:] = offsets  # what is made of broken ones is refused
    assert array.offsets.to_pylist() == offsets
    good = pa.array([[5, 6], [7, 8]], pa.list_(pa.int32()))
    for columns in ({"input_ids": array, "other": good}, {"input_ids": good, "other": array}):
        dataset = datasets.Dataset(pa.table(columns), fingerprint="none")  # to make one, datasets would read the rows
        assert zero_copy(dataset).__getitems__([0, 1]).padded(wordpiece) is None
