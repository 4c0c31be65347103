"""Padding against ``tokenizer.pad(..., return_tensors="pt")`` for every kind of row, and its error messages."""

import array
import copy
import functools

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers import PreTrainedTokenizerFast

from fastmlm import available_impls, padding

INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]


@pytest.fixture(scope="module", autouse=True, params=[False, True], ids=["python", "native"])
def _native(request) -> None:
    """Every test here runs without and with the native module, where there is one."""
    global pad_rows
    if request.param and "cpp" not in available_impls():
        pytest.skip("the native module was not built")
    pad_rows = functools.partial(padding.pad_rows, native=request.param)


@pytest.fixture(scope="module")
def tokenizer(wordpiece_core) -> PreTrainedTokenizerFast:
    """Pad values are not 0, so that a forgotten fill shows. One for the module: hypothesis runs many examples."""
    made = PreTrainedTokenizerFast(tokenizer_object=wordpiece_core, pad_token="[MASK]", unk_token="[UNK]")
    made._pad_token_type_id = 3  # what XLNet's kind of tokenizer has
    assert (made.pad_token_id, made.pad_token_type_id) == (4, 3)
    return made


def _read_only(values) -> np.ndarray:
    array = np.array(values, dtype=np.int64)
    array.flags.writeable = False
    return array


KINDS = {
    "list": list,
    "tuple": tuple,
    "list of numpy ints": lambda values: [np.int32(value) for value in values],
    "read-only": _read_only,
    "negative stride": lambda values: np.array(values[::-1], dtype=np.int64)[::-1],
    "every other": lambda values: np.repeat(np.array(values, dtype=np.int64), 2)[::2],
    "tensor view": lambda values: torch.tensor(values).repeat_interleave(3)[::3],
    **{f"array {name}": lambda values, name=name: np.array(values, dtype=name) for name in INTEGERS},
    **{f"array >{name}": lambda v, name=name: np.array(v, dtype=np.dtype(name).newbyteorder(">")) for name in INTEGERS},
    **{f"tensor {name}": lambda v, name=name: torch.tensor(v, dtype=getattr(torch, name)) for name in INTEGERS},
}  # fmt: skip


def assert_same(ours: dict, theirs) -> None:
    assert list(ours) == list(theirs)
    for name, expected in theirs.items():
        assert ours[name].dtype == expected.dtype, name
        assert torch.equal(ours[name], expected), name


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=6),
    side=st.sampled_from(["left", "right"]),
    multiple=st.sampled_from([None, 1, 3, 8]),
    columns=st.permutations(["input_ids", "token_type_ids", "attention_mask", "special_tokens_mask"]),
    kept=st.integers(0, 3),
    kind=st.sampled_from(sorted(KINDS)),
    data=st.data(),
)
def test_equal_to_the_tokenizers_own(tokenizer, lengths, side, multiple, columns, kept, kind, data):
    names = ["input_ids", *columns[:kept]] if "input_ids" not in columns[:kept] else columns[:kept]
    values = st.integers(0, 127)  # fits every dtype
    lists = [{name: data.draw(st.lists(values, min_size=n, max_size=n)) for name in names} for n in lengths]
    rows = [{name: KINDS[kind](column) for name, column in row.items()} for row in lists]
    before = copy.deepcopy(lists)
    tokenizer.padding_side = side
    ours = pad_rows(rows, tokenizer, multiple)
    assert_same(ours, tokenizer.pad(lists, return_tensors="pt", pad_to_multiple_of=multiple))
    for row, expected in zip(rows, before, strict=True):
        assert {name: [int(value) for value in column] for name, column in row.items()} == expected


@settings(max_examples=50, deadline=None)
@given(kinds=st.lists(st.sampled_from(sorted(KINDS)), min_size=2, max_size=5), data=st.data())
def test_rows_of_different_kinds_in_one_batch(tokenizer, kinds, data):
    lists = [data.draw(st.lists(st.integers(0, 127), min_size=1, max_size=9)) for _ in kinds]
    tokenizer.padding_side = "right"
    mixed = [{"input_ids": KINDS[kind](ids), "x": i} for i, (kind, ids) in enumerate(zip(kinds, lists, strict=True))]
    expected = tokenizer.pad([{"input_ids": ids, "x": i} for i, ids in enumerate(lists)], return_tensors="pt")
    assert_same(pad_rows(mixed, tokenizer), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_bare_ids_of_every_kind(tokenizer, kind):
    tokenizer.padding_side = "left"
    batch = pad_rows([KINDS[kind]([5, 6, 7]), KINDS[kind]([9])], tokenizer)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [4, 4, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]
    assert batch["input_ids"].dtype == torch.int64


@pytest.mark.parametrize("side", ["left", "right"])
def test_ranges_and_empty_rows(tokenizer, side):
    tokenizer.padding_side = side
    rows = [{"input_ids": []}, {"input_ids": range(3, 9, 2)}, {"input_ids": np.array([], dtype=np.int32)}]
    batch = pad_rows(rows, tokenizer, 4)
    ids = [3, 5, 7]
    assert batch["input_ids"].tolist() == [[4] * 4, [4, *ids] if side == "left" else [*ids, 4], [4] * 4]
    assert batch["attention_mask"].sum(1).tolist() == [0, 3, 0]
    assert pad_rows([[]], tokenizer)["input_ids"].shape == (1, 0)


def test_large_values_survive(tokenizer):
    tokenizer.padding_side = "right"
    big = (1 << 63) - 1  # would become a float, or wrap, on the way through another dtype
    for rows in (
        [[big, -big - 1], [3]],
        [np.array([big, -big - 1]), np.array([3], dtype=np.int8)],
        [np.array([big], dtype=np.uint64), np.array([3], dtype=np.int64)],
        [np.array([3], dtype=np.int64), torch.tensor([big]).to(torch.uint64)],
    ):
        batch = pad_rows(rows, tokenizer)
        assert batch["input_ids"].dtype == torch.int64
        assert big in batch["input_ids"].flatten().tolist()


def test_inner_dimensions_are_padded_by_token(tokenizer):
    tokenizer.padding_side = "left"
    rows = [
        {"input_ids": [1, 2], "offset_mapping": [(0, 1), (1, 3)], "weights": np.float16([0.5, 1])},
        {"input_ids": [7], "offset_mapping": [(0, 4)], "weights": np.float64([0.25])},
    ]
    batch = pad_rows(rows, tokenizer)
    assert batch["offset_mapping"].tolist() == [[[0, 1], [1, 3]], [[0, 0], [0, 4]]]
    assert batch["weights"].tolist() == [[0.5, 1.0], [0.0, 0.25]]
    assert (batch["offset_mapping"].dtype, batch["weights"].dtype) == (torch.int64, torch.float64)
    assert list(pad_rows(rows, tokenizer, skip=("offset_mapping",))) == ["input_ids", "weights", "attention_mask"]


def test_word_ids_with_none_as_tokenizers_give_them(tokenizer):
    tokenizer.padding_side = "right"
    rows = [{"input_ids": [1, 2, 3], "word_ids": [None, 0, None]}, {"input_ids": [4], "word_ids": [5]}]
    assert pad_rows(rows, tokenizer)["word_ids"].tolist() == [[-1, 0, -1], [5, -1, -1]]
    rows[0]["word_ids"], rows[1]["word_ids"] = [0, 0, None], [None]  # a None that is not the first value
    assert pad_rows(rows, tokenizer)["word_ids"].tolist() == [[0, 0, -1], [-1, -1, -1]]


@pytest.mark.parametrize("rows", [3, 5])
def test_columns_that_do_not_count_tokens_keep_their_shape(tokenizer, rows):
    tokenizer.padding_side = "right"
    kinds = {"vector": lambda i: np.ones(7, np.float32) * i, "scalar": np.int8, "zero_dim": torch.tensor}
    features = [{"input_ids": [1] * (i + 1), **{k: make(i) for k, make in kinds.items()}} for i in range(rows)]
    batch = pad_rows(features, tokenizer)
    assert batch["vector"].shape == (rows, 7)
    assert batch["scalar"].tolist() == batch["zero_dim"].tolist() == list(range(rows))
    assert batch["scalar"].dtype == torch.int64


@pytest.mark.parametrize(
    "values",
    [["a", "b"], [None, "b"], [{"k": 1}, {"k": 2}], [np.str_("a"), np.str_("b")], [b"x", b"y"], [None, None]],
)
def test_other_objects_pass_through(tokenizer, values):
    rows = [{"input_ids": [1], "meta": values[0]}, {"input_ids": [1, 2], "meta": values[1]}]
    assert pad_rows(rows, tokenizer)["meta"] == values


def test_lists_of_strings_pass_through(tokenizer):
    """What a row's words look like in a data set; they are no numbers, so there is nothing to pad."""
    words = [["He", "is"], ["Yes"]]
    rows = [{"input_ids": [1, 2], "tokens": words[0]}, {"input_ids": [3], "tokens": words[1]}]
    assert pad_rows(rows, tokenizer)["tokens"] == words


OK = [1, 2, 3]
BAD_IDS = {
    "None": None,
    "a string": "abc",
    "a number": 5,
    "a set": {1},
    "strings": ["a", "b"],
    "a float": [1, 2.0],
    "a numpy float": [np.float64(1)],
    "complex": [1j],
    "None inside": [1, None],
    "a bool": [1, True],
    "a numpy bool": [1, np.bool_(True)],
    "nested": [[1, 2]],
    "nested and empty": [[]],
    "two-dimensional": np.ones((1, 2), dtype=np.int64),
    "two-dimensional tensor": torch.ones((1, 2), dtype=torch.int64),
    "0-dim array": np.array(3),
    "0-dim tensor": torch.tensor(3),
    "float array": np.ones(2),
    "float tensor": torch.ones(2),
    "bool array": np.array([True]),
    "bool tensor": torch.tensor([True]),
    "object array": np.array([1, None], dtype=object),
    "string array": np.array(["a"]),
    "too large": [1 << 63],
    "too small": [-(1 << 63) - 1],
    "too large array": np.array([1 << 63], dtype=np.uint64),
    "too large big-endian array": np.array([1 << 63], dtype=">u8"),
    "too large tensor": torch.tensor([1 << 63], dtype=torch.uint64),
}


@pytest.mark.parametrize("good", [OK, np.array(OK), torch.tensor(OK)], ids=["list", "array", "tensor"])
@pytest.mark.parametrize("bad", BAD_IDS.values(), ids=BAD_IDS)
@pytest.mark.parametrize("wrap", [lambda ids: {"input_ids": ids}, lambda ids: ids], ids=["dict", "bare"])
def test_bad_ids_name_column_and_row(tokenizer, wrap, bad, good):
    with pytest.raises((TypeError, ValueError, OverflowError), match=r"^input_ids, row 2\b"):
        pad_rows([wrap(good), wrap(good), wrap(bad), wrap(good)], tokenizer)


@pytest.mark.parametrize("bad", BAD_IDS.values(), ids=BAD_IDS)
def test_bad_ids_in_the_first_row(tokenizer, bad):
    with pytest.raises((TypeError, ValueError, OverflowError), match=r"^input_ids, row 0\b"):
        pad_rows([{"input_ids": bad}, {"input_ids": OK}], tokenizer)


BAD_COLUMNS = {
    "one short": ([1, 1, 1], [1]),
    "a number after lists": ([1, 1, 1], 1),
    "None after lists": ([1, 1, 1], None),
    "None after numbers": (1, None),
    "a string after numbers": (1, "x"),
    "None inside": ([1, 1, 1], [1, None]),
    "ragged inside": ([[1], [1], [1]], [[1], [1, 2]]),
    "other inner shape": ([[1], [1], [1]], [[1, 2], [1, 2]]),
    "a string inside": ([1, 1, 1], [1, "x"]),
    "too large": ([1, 1, 1], [1, 1 << 64]),
    "too large array": (np.array([1, 1, 1], dtype=np.uint64), np.array([1, 1 << 63], dtype=np.uint64)),
}


@pytest.mark.parametrize("column", ["attention_mask", "weights"])
@pytest.mark.parametrize("values", BAD_COLUMNS.values(), ids=BAD_COLUMNS)
def test_bad_columns_name_column_and_row(tokenizer, values, column):
    rows = [{"input_ids": [1, 2, 3], column: values[0]}, {"input_ids": [1, 2], column: values[1]}]
    with pytest.raises((TypeError, ValueError, OverflowError), match=rf"^{column}, row 1\b"):
        pad_rows(rows, tokenizer)


@pytest.mark.parametrize("column", ["attention_mask", "token_type_ids", "special_tokens_mask"])
def test_columns_known_to_count_tokens_must_fit_the_ids(tokenizer, column):
    """All rows have one shape here, as a fixed-size vector would; but these columns are never that."""
    for values in ([1, 1, 1], [1, 1, 1]), (np.array([1, 1, 1]),) * 2, (1, 1):
        rows = [{"input_ids": [1, 2, 3], column: values[0]}, {"input_ids": [1, 2], column: values[1]}]
        with pytest.raises((TypeError, ValueError), match=rf"^{column}, row \d"):
            pad_rows(rows, tokenizer)


def test_numbers_and_lists_in_one_column(tokenizer):
    with pytest.raises((TypeError, ValueError), match=r"^x, row \d"):
        pad_rows([{"input_ids": OK, "x": 1}, {"input_ids": OK, "x": [1, 1]}], tokenizer)


def test_missing_columns_and_rows(tokenizer):
    with pytest.raises(ValueError, match=r"row 1 has no 'label'"):
        pad_rows([{"input_ids": OK, "label": 1}, {"input_ids": OK}], tokenizer)
    with pytest.raises(ValueError, match=r"input_ids.*\['label'\]"):
        pad_rows([{"label": 1}], tokenizer)
    with pytest.raises(ValueError, match="features: expected at least one row"):
        pad_rows([], tokenizer)
    with pytest.raises((TypeError, ValueError), match="row 1"):  # a bare row among dicts
        pad_rows([{"input_ids": OK}, OK], tokenizer)


def test_no_pad_token(tokenizer, wordpiece_core):
    bare = PreTrainedTokenizerFast(tokenizer_object=wordpiece_core)
    assert pad_rows([OK, OK], bare)["input_ids"].tolist() == [OK, OK]  # equal lengths need none
    for rows, multiple in (([OK, [1]], None), ([OK, OK], 8)):
        with pytest.raises(ValueError, match="no pad token"):
            pad_rows(rows, bare, multiple)


@pytest.mark.parametrize("kind", ["list", "array int64", "tensor int64"])
@pytest.mark.parametrize("count", [1, 3])
def test_nothing_aliases_the_rows(tokenizer, kind, count):
    rows = [{"input_ids": KINDS[kind](OK), "attention_mask": KINDS[kind]([1, 1, 1])} for _ in range(count)]
    batch = pad_rows(rows, tokenizer)
    for column in batch.values():
        column.fill_(77)
    assert all([int(x) for x in row["input_ids"]] == OK for row in rows)
    batch = pad_rows(rows, tokenizer)
    for row in rows:
        row["input_ids"][0] = 55
    assert batch["input_ids"].tolist() == [OK] * count


def test_rows_with_buffers_of_different_kinds(tokenizer):
    rows = [[1, 2], array.array("q", [3]), np.array([4, 5]), memoryview(np.array([6], dtype=np.int32))]
    for order in (rows, rows[::-1]):
        padded = pad_rows([{"input_ids": row} for row in order], tokenizer)
        assert [ids[ids != 4].tolist() or [4] for ids in padded["input_ids"]] == [
            [i for i in row if i != 4] or [4] for row in order
        ]


@pytest.mark.parametrize("text", [b"dex", bytearray(b"de")])
def test_bytes_are_no_numbers(tokenizer, text):
    rows = [{"input_ids": [1, 2], "name": text}, {"input_ids": [3], "name": b"x"}]
    assert pad_rows(rows, tokenizer)["name"] == [text, b"x"]
    with pytest.raises((TypeError, ValueError), match=r"^weights, row 1"):
        pad_rows([{"input_ids": [1, 2], "weights": [1, 2]}, {"input_ids": [3], "weights": text}], tokenizer)
    with pytest.raises(TypeError, match=r"^input_ids, row 1"):
        pad_rows([[1, 2], text], tokenizer)
