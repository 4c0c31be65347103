"""Fuzzing of the native module, with inputs that no caller of ours would give too; every buffer between guard zones.

``make sanitize`` runs this file under AddressSanitizer and UBSan; test_native_fuzz.py runs a few hundred inputs of each
check in the ordinary build, where the guard zones are looked at but reads beyond a buffer go unseen.
"""

import argparse
import contextlib
import ctypes
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, seed, settings, strategies as st
from oracle import slow_fold

from fastmlm.kernels.cpu import _native

ISAS = _native.isas()
INT64 = (-(1 << 63), (1 << 63) - 1)

# ---- Memory ----

GUARD, PATTERN = 64, 0xA5  # bytes before and after each buffer; what they hold
# Under AddressSanitizer the guard zones are poisoned too, so that reading them is caught as well as writing them.
_poison = getattr(ctypes.CDLL(None), "__asan_poison_memory_region", None)
_unpoison = getattr(ctypes.CDLL(None), "__asan_unpoison_memory_region", None)
for _function in (_poison, _unpoison):
    if _function is not None:
        _function.argtypes, _function.restype = (ctypes.c_void_p, ctypes.c_size_t), None

Arrays = dict[str, np.ndarray | None]


@contextlib.contextmanager
def buffers(inputs: Arrays, outputs: Arrays) -> Iterator[dict[str, int]]:
    """The arrays' addresses by name, 0 for None and, as torch has it, for empty ones.

    On exit the guard zones must be whole and the inputs unchanged; the outputs' arrays then hold what was written.
    """
    address, whole = {}, {}
    for name, array in (inputs | outputs).items():
        address[name] = 0
        if array is not None and array.size:
            whole[name] = np.full(array.nbytes + 2 * GUARD, PATTERN, np.uint8)
            whole[name][GUARD:-GUARD] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            address[name] = whole[name].ctypes.data + GUARD
    ends = [(block.ctypes.data, block.ctypes.data + block.nbytes - GUARD) for block in whole.values()]
    try:
        for start in itertools.chain(*ends) if _poison else ():
            _poison(start, GUARD)
        yield address
    finally:
        for start in itertools.chain(*ends) if _unpoison else ():
            _unpoison(start, GUARD)
    for name, block in whole.items():
        assert (block[:GUARD] == PATTERN).all(), f"{name}: written before its start"
        assert (block[-GUARD:] == PATTERN).all(), f"{name}: written after its end"
        middle, array = block[GUARD:-GUARD], (inputs | outputs)[name]
        if name in outputs:
            array.reshape(-1).view(np.uint8)[:] = middle
        else:
            assert middle.tobytes() == array.tobytes(), f"{name}: an input was written"


def itemsize(array: np.ndarray | None) -> int:
    return 1 if array is None else array.itemsize


# ---- Arrays of one value a token ----

# Hypothesis draws the shapes, the options and a seed; values come from the seed, since drawing each would take
# milliseconds an input.


def some_ids(rng: np.random.Generator, size: int, vocab_size: int, dtype: np.dtype) -> np.ndarray:
    """Ids, some of them outside the vocabulary."""
    ids = rng.integers(0, vocab_size, size).astype(dtype)
    limits = np.iinfo(dtype)
    outside = np.array([-1, vocab_size, vocab_size + 1, limits.min, limits.max], dtype)
    return np.where(rng.random(size) < rng.choice([0, 0.2, 1]), rng.choice(outside, size), ids)


def some_flags(rng: np.random.Generator, size: int, kind: str | None) -> np.ndarray | None:
    """A mask of an unsigned type; true values of every bit pattern, rows' beginnings and ends both ways."""
    if kind is None:
        return None
    dtype = np.dtype(kind)
    true = np.array([1, np.iinfo(dtype).max, 1 << (8 * dtype.itemsize - 1)], dtype)
    return np.where(rng.random(size) < rng.choice([0, 0.1, 0.8, 1]), rng.choice(true, size), dtype.type(0))


FLAG_KINDS = st.sampled_from([None, "u1", "u2", "u4", "u8"])
LENGTHS = st.integers(0, 9) | st.sampled_from([15, 16, 17, 63, 64, 65, 127, 128, 129, 200])
SEEDS = st.integers(0, (1 << 64) - 1)

# ---- mask_tokens ----


@st.composite
def mask_cases(draw: st.DrawFn) -> dict[str, Any]:
    case = {
        "seed": draw(SEEDS),
        "key": draw(SEEDS),
        "id_size": draw(st.sampled_from([8, 4])),
        "vocab_size": draw(st.integers(1, 40)),
        "table": draw(st.sampled_from([0, 0, 1, 2, 5])),  # ids in it; 0: the whole vocabulary
        "exclude_original": draw(st.booleans()),
        "ignore_index": draw(st.sampled_from([-100, 0, -(1 << 31), (1 << 31) - 1])),
        "attention_mask": draw(FLAG_KINDS),
        "special_tokens_mask": draw(FLAG_KINDS),
        "units": draw(st.booleans()),
        "rate": draw(st.sampled_from(["one", "row", "token"])),
        "row_keys": draw(st.booleans()),
        "threshold": draw(st.sampled_from([0, 1, 644245094, 1 << 31, (1 << 32) - 1, 1 << 32])),
        "split": draw(st.sampled_from([(0, 0), (1, 1), (0.8, 0.9), (0, 1), (0.5, 1), (0.1, 0.1)])),
    }
    if draw(st.booleans()):
        case["offsets"] = [0, *itertools.accumulate(draw(st.lists(LENGTHS, max_size=4)))]
    else:
        case["rows"], case["length"] = draw(st.integers(0, 4)), draw(LENGTHS)
    return case


def check_mask_tokens(case: dict[str, Any]) -> None:
    """Every instruction set gives the same; each cell is written; what is not selectable stays."""
    rng = np.random.default_rng(case["seed"])
    offsets = case.get("offsets")
    rows = case["rows"] if offsets is None else len(offsets) - 1
    length = case["length"] if offsets is None else offsets[-1]
    size = rows * length if offsets is None else length
    vocab_size, ignore_index = case["vocab_size"], case["ignore_index"]
    dtype = np.dtype(np.int64 if case["id_size"] == 8 else np.int32)
    ids = some_ids(rng, size, vocab_size, dtype)
    table = rng.permutation(vocab_size)[: case["table"]] if case["table"] else None
    flags = (rng.random(vocab_size) < 0.2).astype(np.uint8)
    flags[slice(None) if table is None else table] |= 2
    real = some_flags(rng, size, case["attention_mask"])
    special = some_flags(rng, size, case["special_tokens_mask"])
    thresholds = None
    if case["rate"] != "one":
        thresholds = rng.choice([0, 1, 1 << 31, 1 << 32], rows if case["rate"] == "row" else size)
    units = None
    if case["units"]:  # positions, and where nothing is selectable they may be anything
        anything = rng.choice([-1, length, *INT64], size)
        units = np.where(rng.random(size) < 0.7, rng.integers(0, length + 1, size), anything)
    inputs: Arrays = {
        "ids": ids,
        "offsets": None if offsets is None else np.array(offsets, np.int64),
        "row_keys": rng.integers(*INT64, rows) if case["row_keys"] else None,
        "attention_mask": real,
        "special_tokens_mask": special,
        "units": units,
        "thresholds": thresholds,
        "flags": flags,
        "random_ids": table,
    }
    to_mask, to_random = (round(share * (1 << 32)) for share in case["split"])
    results = []
    for isa in ISAS:
        _native.select_isa(isa)
        output, labels = np.full(size, 0x5A5A5A5A, dtype), np.full(size, 0x5A5A5A5A, dtype)
        with buffers(inputs, {"output": output, "labels": labels}) as at:
            found = _native.mask_tokens(
                *(at["ids"], at["output"], at["labels"], case["id_size"], rows, length, length, at["offsets"]),
                *(case["key"], at["row_keys"], at["attention_mask"], itemsize(real)),
                *(at["special_tokens_mask"], itemsize(special), at["units"]),
                *(at["thresholds"], case["rate"] == "token", at["flags"], vocab_size, at["random_ids"]),
                *(vocab_size if table is None else len(table), case["threshold"], to_mask, to_random, 0, ignore_index),
                case["exclude_original"],
            )
        results.append((output, labels))
        assert not size or found == (ids.min(), ids.max())
    _native.select_isa(None)

    output, labels = results[0]
    for other in results[1:]:
        assert (other[0] == output).all(), "instruction sets differ in their ids"
        assert (other[1] == labels).all(), "instruction sets differ in their labels"
    inside = (ids >= 0) & (ids < vocab_size)
    selectable = inside & ~(flags[np.where(inside, ids, 0)] & 1).astype(bool)
    for mask, kept in ((real, True), (special, False)):
        selectable &= True if mask is None else (mask != 0) == kept
    assert ((labels == ignore_index) | ((labels == ids) & selectable)).all()
    selected = (labels == ids) & selectable
    assert (output[~selected] == ids[~selected]).all()
    assert ((output[selected] >= 0) & (output[selected] < vocab_size)).all()


# ---- row_keys and word_units ----

_WEIGHTS = np.random.default_rng(0).integers(0, 1 << 64, 256, np.uint64)


@st.composite
def token_cases(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "seed": draw(SEEDS),
        "id_size": draw(st.sampled_from([8, 4])),
        "rows": draw(st.integers(0, 4)),
        "length": draw(LENGTHS),
        "attention_mask": draw(FLAG_KINDS),
        "special_tokens_mask": draw(FLAG_KINDS),
        "vocab_size": draw(st.integers(1, 40)),
    }


def check_row_keys(case: dict[str, Any]) -> None:
    """The row hash, from its text in DESIGN, section 2."""
    rng, rows, length = np.random.default_rng(case["seed"]), case["rows"], case["length"]
    ids = some_ids(rng, rows * length, 30522, np.dtype(np.int64 if case["id_size"] == 8 else np.int32))
    real = some_flags(rng, rows * length, case["attention_mask"])
    weights = _WEIGHTS[:length]  # as long as the rows, and not a word longer
    expected = []
    for r in range(rows):
        row = slice(r * length, (r + 1) * length)
        keep = np.ones(length, bool) if real is None else real[row] != 0
        first = int(keep.argmax()) if length else 0
        factors = ids[row][first:].astype(np.int64).view(np.uint64) * keep[first:]
        total = int((factors * weights[: length - first]).sum(dtype=np.uint64))
        expected.append(slow_fold(total, int(keep.sum())))
    for isa in ISAS:
        _native.select_isa(isa)
        keys = np.full(rows, PATTERN, np.uint64)
        inputs: Arrays = {"ids": ids, "real": real, "weights": weights}
        with buffers(inputs, {"keys": keys}) as at:
            _native.row_keys(
                *(at["ids"], case["id_size"], at["real"], itemsize(real), at["weights"], rows, length, at["keys"])
            )
        assert keys.tolist() == expected
    _native.select_isa(None)


def check_word_units(case: dict[str, Any]) -> None:
    """The rule of kernels/cpu/words.h; ids outside the vocabulary too."""
    rng, rows, length, vocab_size = (
        np.random.default_rng(case["seed"]),
        case["rows"],
        case["length"],
        case["vocab_size"],
    )
    ids = some_ids(rng, rows * length, vocab_size, np.dtype(np.int64 if case["id_size"] == 8 else np.int32))
    flags = (rng.random(vocab_size) < 0.2).astype(np.uint8)
    marks = rng.choice(np.array([0, 0, 1, 2, 3], np.uint8), vocab_size)
    real = some_flags(rng, rows * length, case["attention_mask"])
    special = some_flags(rng, rows * length, case["special_tokens_mask"])
    units = np.full(rows * length, PATTERN, np.int64)
    inputs: Arrays = {"ids": ids, "flags": flags, "marks": marks, "real": real, "special": special}
    with buffers(inputs, {"units": units}) as at:
        _native.word_units(
            *(at["ids"], case["id_size"], at["flags"], at["marks"], vocab_size, at["real"], itemsize(real)),
            *(at["special"], itemsize(special), rows, length, at["units"]),
        )
    nearest, shape = ids.clip(0, vocab_size - 1), (rows, length)
    padding = (np.zeros(len(ids), bool) if real is None else real == 0).reshape(shape)
    breaks = ((flags[nearest] & 1) | (0 if special is None else special != 0)).astype(bool).reshape(shape) | padding
    begins = breaks | (marks[nearest] & 1).astype(bool).reshape(shape)
    begins[:, :1] = True
    begins[:, 1:] |= (breaks | (marks[nearest] & 2).astype(bool).reshape(shape))[:, :-1]
    if units.size:
        start = np.maximum.accumulate(np.where(begins, np.arange(length), 0), 1)
        assert (units.reshape(shape) == (start - padding.argmin(1)[:, None]).clip(0)).all()
    check_units_fit(units, real, rows, length, rng)


def check_units_fit(
    units: np.ndarray, real: np.ndarray | None, rows: int, length: int, rng: np.random.Generator
) -> None:
    """Units by the rule fit; with one of them changed, they fit where it is no real token's, or still a position."""
    units, changed = units.copy(), None
    if units.size and rng.random() < 0.8:
        changed = int(rng.integers(units.size))
        units[changed] = rng.choice([0, 1, length // 2, length - 1, length, -1, *INT64])
    with buffers({"units": units, "real": real}, {}) as at:
        fit = _native.units_fit(at["units"], at["real"], itemsize(real), rows, length)
    if changed is None:
        assert fit
        return
    row = range(changed - changed % length, changed + 1)
    first = row.start if real is None else next((i for i in row if real[i]), None)
    is_real = real is None or real[changed] != 0
    assert fit == (not is_real or 0 <= units[changed] <= changed - first)


# ---- Arrow's list columns ----


@st.composite
def list_cases(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "seed": draw(SEEDS),
        "parts": draw(st.lists(st.lists(st.integers(0, 20), max_size=4), min_size=1, max_size=3)),  # rows' lengths
        "rows": draw(st.integers(0, 5)),
        "offsets": draw(st.sampled_from(["i4", "i8"])),
        "values": draw(st.sampled_from(["i1", "i2", "i4", "i8", "u1", "u2", "u4"])),
        "broken": draw(st.integers(0, 3)) == 3,  # an offset that does not lie in the values
        "lie": draw(st.integers(0, 3)) == 3,  # a length that is not the row's
        "narrow": draw(st.integers(0, 3)) == 3,  # a width below the rows' lengths
        "left": draw(st.booleans()),
    }


def check_lists(case: dict[str, Any]) -> None:
    """Lengths and padded values, or the first row at fault."""
    rng = np.random.default_rng(case["seed"])
    offsets = [np.cumsum([rng.integers(3), *part]).astype(case["offsets"]) for part in case["parts"]]
    limits = np.iinfo(case["values"])
    values = [
        rng.integers(limits.min, limits.max, int(ends[-1] + rng.integers(3)), case["values"], endpoint=True)
        for ends in offsets
    ]
    if case["broken"]:
        ends = offsets[rng.integers(len(offsets))]
        wrong = [-1, ends[-1] + 5, np.iinfo(ends.dtype).max, np.iinfo(ends.dtype).min]
        ends[rng.integers(len(ends))] = rng.choice(np.array(wrong, ends.dtype))
    usable = [p for p, part in enumerate(case["parts"]) if part]
    part = rng.choice(usable, case["rows"] if usable else 0).astype(np.int64) if usable else np.zeros(0, np.int64)
    place = np.array([rng.integers(len(case["parts"][p])) for p in part], np.int64)
    expected_lengths: list[int] = []
    fault = -1
    for i, (p, k) in enumerate(zip(part, place, strict=True)):
        start, end = int(offsets[p][k]), int(offsets[p][k + 1])
        if not 0 <= start <= end <= len(values[p]):
            fault = i
            break
        expected_lengths.append(end - start)
    lengths = np.array([*expected_lengths, *[3] * (len(part) - len(expected_lengths))], np.int64)
    width, fill = max([0, *lengths.tolist()]) + int(rng.integers(3)), -100
    memory: Arrays = {f"offsets {i}": x for i, x in enumerate(offsets)} | {
        f"values {i}": x for i, x in enumerate(values)
    }
    kind = (offsets[0].itemsize, values[0].itemsize, limits.min < 0)
    with buffers(memory, {}) as at:
        table = np.array([[at[f"offsets {i}"], at[f"values {i}"], len(x)] for i, x in enumerate(values)], np.int64)
        rows: Arrays = {"parts": table, "part": part, "place": place}
        found = np.full(len(part), -7, np.int64)
        with buffers(rows, {"found": found}) as row:
            assert (
                _native.list_lengths(row["parts"], *kind, row["part"], row["place"], len(part), row["found"]) == fault
            )
        assert found[: len(expected_lengths)].tolist() == expected_lengths

        if case["lie"] and len(lengths):
            lengths[rng.integers(len(lengths))] = rng.choice([0, 7, -1, *INT64])
        width = width // 2 if case["narrow"] else width
        bad = next(
            (i for i, n in enumerate(expected_lengths) if n != lengths[i] or n > width),
            fault,
        )
        out = np.full(len(part) * width, -7, np.int64)
        with buffers(rows | {"lengths": lengths}, {"out": out}) as row:
            got = _native.gather_lists(
                *(row["parts"], *kind, row["part"], row["place"], len(part), row["lengths"], row["out"]),
                *(width, case["left"], fill),
            )
    assert got == bad
    for i, line in enumerate(out.reshape(len(part), width)[: None if bad < 0 else bad].tolist()):
        start = int(offsets[part[i]][place[i]])
        row_values, padding = values[part[i]][start : start + lengths[i]].tolist(), [fill] * int(width - lengths[i])
        assert line == (padding + row_values if case["left"] else row_values + padding)


# ---- pack_rows ----


class Index:
    """An object with ``__index__``, which does something first to the column and the rows that hold it."""

    def __init__(self, value: Any, action: str, world: "World") -> None:
        self.value, self.action, self.world = value, action, world
        self.row: Any = None

    def __index__(self) -> int:
        column, row = self.world.column, self.row
        if self.action == "raise":
            raise ZeroDivisionError("mine")
        if self.action == "clear column":
            column.clear()
        elif self.action == "drop rows":  # and with them the last references to them
            del row
            for index in self.world.indices:
                index.row = None
            column[:] = [None] * len(column)
        elif self.action == "swap rows":
            column[:] = [[5] * len(row)] * len(column)
        elif self.action == "grow column":
            column.extend([[1]] * 100)
        elif isinstance(row, list):
            if self.action == "clear row":
                row.clear()
            elif self.action == "shrink row":
                del row[1:]
            elif self.action == "grow row":
                row.extend([1] * 1000)
            elif self.action == "move row":  # the same length in other memory, and other objects
                values = [1 << 40] * len(row)
                row.clear()
                row.extend([0] * 3000)
                row[:] = values
        return self.value


class World:
    """A column of a case, and the objects in it that run code of their own."""

    def __init__(self, rows: list[Any], kinds: list[Any]) -> None:
        self.indices: list[Index] = []
        self.column = [self._row(values, kind) for values, kind in zip(rows, kinds, strict=True)]

    def _row(self, values: list[Any], kind: Any) -> Any:
        first = len(self.indices)
        row = as_kind([self._item(value) for value in values], kind)
        for index in self.indices[first:]:
            index.row = row if isinstance(row, (list, tuple)) else []
        return row

    def _item(self, value: Any) -> Any:
        if not (isinstance(value, tuple) and value[:1] == ("index",)):
            return value
        self.indices.append(Index(value[2], value[1], self))
        return self.indices[-1]


class ListOf(list):
    pass


class TupleOf(tuple):
    pass


ACTIONS = ["clear column", "drop rows", "swap rows", "grow column", "clear row", "shrink row", "grow row", "move row"]
INTS = st.integers(-5, 1 << 17) | st.integers(-(1 << 70), 1 << 70) | st.sampled_from([*INT64, 1 << 63, -(1 << 63) - 1])
OTHERS = st.sampled_from(
    [None, "1", "", b"1", 1.0, float("nan"), True, False, [1], (), {}, int, 3j, 1 << 30, -(1 << 30)]
)
ARRAYS = st.sampled_from([np.int64(7), np.uint64(1 << 63), np.bool_(True), np.float64(1), np.array(3), np.array([3])])
INDICES = st.tuples(st.just("index"), st.sampled_from(["", "", "raise", *ACTIONS]), INTS | st.just("no int"))
ROWS = st.lists(INTS, max_size=40) | st.lists(INTS | INTS | INTS | OTHERS | ARRAYS | INDICES, max_size=6)
KINDS = st.sampled_from([list] * 6 + [tuple, tuple, ListOf, TupleOf, None, str, dict, range, np.array, iter, set])


@st.composite
def pack_cases(draw: st.DrawFn) -> dict[str, Any]:
    rows = draw(st.lists(ROWS, max_size=4))
    lies = st.integers(-2, 8) | st.sampled_from([1 << 31, 1 << 62, *INT64])
    lengths = [draw(lies) if draw(st.integers(0, 15)) == 15 else len(row) for row in rows]
    return {
        "rows": rows,
        "kinds": draw(st.lists(KINDS, min_size=len(rows), max_size=len(rows))),
        "lengths": lengths,
        "width": max([0, *map(len, rows)]) + draw(st.sampled_from([0, 0, 0, 1, 3, -1])),
        "left": draw(st.booleans()),
        "fill": draw(st.sampled_from([0, 1, -100, *INT64])),
    }


def as_kind(row: list[Any], kind: Any) -> Any:
    if kind in (list, tuple, ListOf, TupleOf):
        return kind(row)
    if kind is np.array:
        return np.arange(len(row))
    if kind is range:
        return range(len(row))
    return {None: None, str: "12", dict: {1: 2}, set: {1, 2}, iter: iter(row)}[kind]


def first_bad(column: list[Any], lengths: list[int], width: int) -> tuple[int, int] | None:
    """What pack_rows must say where no item has code of its own."""
    for r, (row, n) in enumerate(zip(column, lengths, strict=True)):
        if not isinstance(row, (list, tuple)) or len(row) != n or n > width:
            return r, -1
        for position, value in enumerate(row):
            try:
                fits = INT64[0] <= value.__index__() <= INT64[1]
            except (AttributeError, TypeError):  # arrays have the method, and raise unless they hold one integer
                fits = False
            if isinstance(value, type) or not fits:
                return r, position
    return None


def check_pack_rows(case: dict[str, Any]) -> None:
    """None and the padded values, or which value is at fault; never a byte outside, whatever objects' code does."""
    world = World(case["rows"], case["kinds"])
    column, sly = world.column, bool(world.indices)
    lengths, width, left, fill = case["lengths"], max(case["width"], 0), case["left"], case["fill"]
    raising = any(isinstance(x, np.ndarray) and x.ndim for values in case["rows"] for x in values)
    expected = None if sly or raising else first_bad(column, lengths, width)
    count, before = len(column), [] if sly else list(column)  # what is held here is not dropped there
    out = np.full(len(column) * width, 77, np.int64)
    counts = np.array(lengths, np.int64)
    with buffers({"lengths": counts}, {"out": out}) as at:
        try:
            bad = _native.pack_rows(column, at["out"], at["lengths"], width, left, fill)
        except (ZeroDivisionError, TypeError):  # of __index__: what it raised, or what it returned was no int
            assert sly or raising
            return
    assert bad is None or (0 <= bad[0] < count and bad[1] >= -1)
    if sly or raising:
        return
    assert bad == expected
    assert all(a is b for a, b in zip(column, before, strict=True))
    if bad is None:
        for row, got in zip(column, out.reshape(len(column), width).tolist(), strict=True):
            padding = [fill] * (width - len(row))
            values = [x.__index__() for x in row]
            assert got == (padding + values if left else values + padding)


# Which inputs, the check, and its share of them.
CHECKS: dict[str, tuple[st.SearchStrategy[dict[str, Any]], Callable[[dict[str, Any]], None], float]] = {
    "mask_tokens": (mask_cases(), check_mask_tokens, 0.4),
    "pack_rows": (pack_cases(), check_pack_rows, 0.3),
    "lists": (list_cases(), check_lists, 0.1),
    "row_keys": (token_cases(), check_row_keys, 0.1),
    "word_units": (token_cases(), check_word_units, 0.1),
}

# ---- As a program ----

_CHUNK = 2000  # inputs hypothesis remembers at a time; its memory grows with them


def fuzz(name: str, inputs: int, first_seed: int, record: str | None) -> None:
    """Give a check so many inputs; ``record`` names a file that holds the one that runs, for when the process dies."""
    cases, check, _ = CHECKS[name]
    done, began = 0, time.monotonic()
    file = None if record is None else os.open(record, os.O_WRONLY | os.O_CREAT)

    def run(case: dict[str, Any]) -> None:
        nonlocal done
        done += 1
        if file is not None:
            text = f"{name}: {case}\n".encode()
            os.ftruncate(file, os.pwrite(file, text, 0))
        check(case)

    for chunk in itertools.count():
        if done >= inputs:
            break
        options = settings(
            max_examples=min(_CHUNK, inputs - done),
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        seed(first_seed + chunk)(options(given(cases)(run)))()
    print(f"{name}: {done} inputs in {time.monotonic() - began:.0f} s, nothing found", flush=True)
    if file is not None:
        os.close(file)


def misuse(kind: str) -> None:
    """A wrong call that only a sanitizer sees: eight bytes beyond a buffer, or an address that is not aligned."""
    ids = np.zeros(1, np.int64)
    rows, shift = (2, 0) if kind == "overflow" else (1, 1)
    with buffers({"weights": ids}, {"keys": ids.copy()}) as at:
        _native.row_keys(0, 8, 0, 1, at["weights"], rows, 0, at["keys"] + shift)


def check_sanitizers() -> None:
    """Both must end the process that calls wrongly; a build without them would pass everything."""
    for kind, message in (
        ("overflow", "AddressSanitizer: use-after-poison"),
        ("misaligned", "runtime error: store to"),
    ):
        run = subprocess.run([sys.executable, __file__, "--misuse", kind], capture_output=True, text=True)
        if run.returncode == 0 or message not in run.stderr:
            sys.exit(f"the sanitizers are not at work: no {message!r} on {kind}\n{run.stderr[-2000:]}")
    print(f"the sanitizers are at work in {_native.__file__}", flush=True)


def fuzz_apart(name: str, arguments: argparse.Namespace) -> int:
    """One check in its own process, which the sanitizers may end."""
    inputs = round(arguments.inputs * CHECKS[name][2])
    command = [sys.executable, __file__, "--only", name, "--inputs", str(inputs), "--seed", str(arguments.seed)]
    command += [] if arguments.record is None else ["--record", f"{arguments.record}.{name}"]
    # AddressSanitizer watches objects that come from malloc one by one; hypothesis then takes twice the time.
    watched = {"PYTHONMALLOC": "malloc"} if arguments.sanitized and name == "pack_rows" else {}
    return subprocess.run(command, env=os.environ | watched).returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=200_000, help="of all checks together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=list(CHECKS), help="one check, in this process")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--sanitized", action="store_true", help="first make sure that the sanitizers are at work")
    parser.add_argument("--record", help="files of this name hold the inputs that run, for when a process dies")
    parser.add_argument("--misuse", choices=["overflow", "misaligned"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.misuse:
        misuse(arguments.misuse)
    elif arguments.only:
        fuzz(arguments.only, arguments.inputs, arguments.seed, arguments.record)
    else:
        if arguments.sanitized:
            check_sanitizers()
        with ThreadPoolExecutor(arguments.processes) as pool:
            codes = list(pool.map(lambda name: fuzz_apart(name, arguments), CHECKS))
        bad = [name for name, code in zip(CHECKS, codes, strict=True) if code]
        if bad:
            sys.exit(f"{', '.join(bad)}: failed, see above; the inputs that ran last are in {arguments.record}.*")


if __name__ == "__main__":
    main()
