"""Lists of anything for the native module to read, and what must come out."""

import sys
from typing import Any

import numpy as np
from guards import INT64, buffers
from hypothesis import strategies as st

from fastmlm.kernels.cpu import _native

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
RUNS = st.lists(st.tuples(INTS, st.sampled_from([1, 2, 15, 16, 17, 33, 48])), max_size=4).map(
    lambda runs: [value for value, count in runs for _ in range(count)]
)
ROWS = RUNS | st.lists(INTS, max_size=40) | st.lists(INTS | INTS | INTS | OTHERS | ARRAYS | INDICES, max_size=6)
BUFFERS = st.builds(
    "{} {}{}".format,
    st.sampled_from(
        ["plain"] * 3
        + ["strided", "backwards", "unaligned", "readonly", "view", "bytes", "square", "scalar", "without-dimensions"]
    ),
    st.sampled_from("<<<>"),
    st.sampled_from(["i1", "u1", "i2", "u2", "i4", "u4", "i8", "i8", "u8", "f4", "f8", "?", "c8", "M8[s]", "S3", "U2"]),
)
KINDS = st.sampled_from([list] * 6 + [tuple, tuple, ListOf, TupleOf, None, dict, range, iter, set]) | BUFFERS


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
    if isinstance(kind, str):
        return as_buffer(len(row), kind)
    if kind is range:
        return range(len(row))
    return {None: None, dict: {1: 2}, set: {1, 2}, iter: iter(row)}[kind]


def as_buffer(n: int, kind: str) -> Any:
    """An object with the buffer protocol: numbers from -3 up of a dtype, stored in one of several ways."""
    how, _, dtype = kind.partition(" ")
    values = np.arange(-3, n - 3).astype(dtype)
    if how == "strided":
        return np.repeat(values, 3)[::3]
    if how == "backwards":
        return values[::-1]
    if how == "unaligned":
        return np.frombuffer(b"x" + values.tobytes(), dtype=dtype, offset=1, count=n)
    if how == "readonly":
        values.flags.writeable = False
    if how == "view" and dtype[1:] not in ("M8[s]", "U2"):  # numpy has no buffers of these
        return memoryview(values)
    if how == "bytes":
        return values.tobytes()
    if how == "square":
        return values[:, None]
    if how == "scalar":
        return values.dtype.type()
    if how == "without-dimensions":
        return np.zeros((), dtype)
    return values


def buffer_values(row: Any) -> list[int] | None:
    """The integers of a row with the buffer protocol; None where it offers something else."""
    if isinstance(row, (bytes, bytearray)):
        return None
    try:
        view = memoryview(row)
    except (TypeError, ValueError):
        return None
    swapped = view.format[:1] == (">" if sys.byteorder == "little" else "<")
    if view.ndim != 1 or swapped or view.format[-1] not in "bBhHiIlLqQ":
        return None
    return np.asarray(view).tolist()


def first_bad(column: list[Any], lengths: list[int], width: int) -> tuple[int, int] | None:
    """What pack_rows must say where no item has code of its own."""
    for r, (row, n) in enumerate(zip(column, lengths, strict=True)):
        values = row if isinstance(row, (list, tuple)) else buffer_values(row)
        if values is None or len(values) != n or n > width:
            return r, -1
        for position, value in enumerate(values):
            if isinstance(value, (type, bool, np.bool_)):
                return r, position
            try:
                fits = INT64[0] <= value.__index__() <= INT64[1]
            except (AttributeError, TypeError):  # arrays have the method, and raise unless they hold one integer
                fits = False
            if not fits:
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
    with buffers({}, {"out": out}) as at:
        try:
            bad = _native.pack_rows(column, at["out"], lengths, width, left, fill)
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
            values = row if isinstance(row, (list, tuple)) else buffer_values(row)
            padding = [fill] * (width - len(values))
            values = [x.__index__() for x in values]
            assert got == (padding + values if left else values + padding)
