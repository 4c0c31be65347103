"""Inputs for the native kernels that work on arrays, and what must come out."""

import itertools
from typing import Any

import numpy as np
from guards import INT64, ISAS, PATTERN, Arrays, buffers, itemsize
from hypothesis import strategies as st
from oracle import slow_fold

from fastmlm.kernels.cpu import _native

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


MOST = (1 << 31) - 1
# exact, at_least and at_most, which need not make sense together
COUNTS = [(True, 0, MOST), (True, 3, 20), (False, 5, MOST), (False, 0, 9), (False, 0, 0), (True, 40, 2)]


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
        "words": draw(st.booleans()),
        "spans": draw(st.sampled_from([None, None, 1, 2, 10, 64])),  # the longest
        "rates_by_id": draw(st.sampled_from([False, False, True])),
        "per_unit": draw(st.booleans()),
        "counts": draw(st.sampled_from([(False, 0, MOST), (False, 0, MOST), *COUNTS])),
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
    flags |= rng.choice(np.array([0, 4, 8, 12], np.uint8), vocab_size)  # marks of words
    real = some_flags(rng, size, case["attention_mask"])
    special = some_flags(rng, size, case["special_tokens_mask"])
    thresholds = None
    if case["rate"] != "one":
        thresholds = rng.choice([0, 1, 1 << 31, 1 << 32], rows if case["rate"] == "row" else size)
    units = None
    if case["units"]:  # positions, and where nothing is selectable they may be anything
        anything = rng.choice([-1, length, *INT64], size)
        units = np.where(rng.random(size) < 0.7, rng.integers(0, length + 1, size), anything)
    spans, id_thresholds = None, None
    if case["spans"] is not None:
        spans = rng.choice([0, 1, 1 << 31, (1 << 32) - 1, 1 << 32], case["spans"] - 1)
    if case["rates_by_id"]:
        id_thresholds = rng.choice([0, 1, 1 << 31, 1 << 32], vocab_size)
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
        "span_limits": spans,
        "id_thresholds": id_thresholds,
    }
    to_mask, to_random = (round(share * (1 << 32)) for share in case["split"])
    results = []
    fits = bool(((ids >= 0) & (ids < vocab_size)).all())
    for isa, in_place in itertools.product(ISAS, (False, True)):
        _native.select_isa(isa)
        output = ids.copy() if in_place else np.full(size, 0x5A5A5A5A, dtype)
        labels = np.full(size, 0x5A5A5A5A, dtype)
        with buffers(inputs, {"output": output, "labels": labels}) as at:
            from_ids = at["output" if in_place else "ids"]
            found = _native.mask_tokens(
                *(from_ids, at["output"], at["labels"], case["id_size"], rows, length, at["offsets"]),
                *(case["key"], at["row_keys"], at["attention_mask"], itemsize(real)),
                *(at["special_tokens_mask"], itemsize(special), at["units"]),
                *(at["thresholds"], case["rate"] == "token", at["flags"], vocab_size, at["random_ids"]),
                *(vocab_size if table is None else len(table), case["threshold"], to_mask, to_random, 0, ignore_index),
                *(case["exclude_original"], case["words"], at["span_limits"], case["spans"] or 0),
                *(at["id_thresholds"], case["per_unit"], *case["counts"]),
            )
        assert found == fits
        if in_place and not fits:
            assert (output == ids).all(), "masked in place although an id is out of range"
        else:
            results.append((output, labels))
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
    if fits and ignore_index < 0:  # else labels do not tell what is selected
        check_counts(case, thresholds, selectable, selected, rows)


def check_counts(
    case: dict[str, Any], thresholds: np.ndarray | None, selectable: np.ndarray, selected: np.ndarray, rows: int
) -> None:
    """No row has more than it may have, and one of single tokens has exactly what is asked for."""
    exact, at_least, at_most = case["counts"]
    ends = case.get("offsets", [r * case.get("length", 0) for r in range(rows + 1)])
    single = not (case["words"] or case["units"] or case["spans"])
    for r, (start, end) in enumerate(itertools.pairwise(ends)):
        n, count = int(selectable[start:end].sum()), int(selected[start:end].sum())
        assert count <= at_most
        if not single:
            continue
        assert count >= min(at_least, at_most, n)
        if exact and case["rate"] != "token":
            limit = case["threshold"] if thresholds is None else int(thresholds[r])
            assert count == min(max((limit * n + (1 << 31)) >> 32, at_least), at_most, n)


# ---- row_keys and units_fit ----

_WEIGHTS = np.random.default_rng(0).integers(0, 1 << 64, 256, np.uint64)


@st.composite
def token_cases(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "seed": draw(SEEDS),
        "id_size": draw(st.sampled_from([8, 4])),
        "rows": draw(st.integers(0, 4)),
        "length": draw(LENGTHS),
        "attention_mask": draw(FLAG_KINDS),
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


def check_units_fit(case: dict[str, Any]) -> None:
    """Random units fit; with one of them changed, they fit where it is no real token's, or still a position."""
    rng, rows, length = np.random.default_rng(case["seed"]), case["rows"], case["length"]
    real = some_flags(rng, rows * length, case["attention_mask"])
    padding = (np.zeros(rows * length, bool) if real is None else real == 0).reshape(rows, length)
    units, changed = np.zeros(rows * length, np.int64), None
    if units.size:
        starts = np.maximum.accumulate(np.where(rng.random((rows, length)) < 0.5, np.arange(length), 0), 1)
        units = (starts - padding.argmin(1)[:, None]).clip(0).reshape(-1)
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
