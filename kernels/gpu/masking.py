"""Masking as one Triton kernel: select, replace and label, each id read once; padded or packed.

A program takes some blocks of 64 positions of one row. By the draw law (:mod:`fastmlm.philox`) one Philox block serves
four positions 16 apart, so each of a program's (block, lane) elements draws once a stream and handles four tokens; the
16 lanes are neighbours in memory. Positions are columns turned round by the row's first real token: the columns before
it, which are padding and never selected, come last, and every column is written exactly once.

Where no row is turned round and all start at multiples of 16 bytes, a thread takes as many neighbours as fill them: 2
ids of 64 bits or 4 of 32 go in one access. Elsewhere neighbours belong to neighbouring threads.

Packed rows have any length, and the host does not know which: the tiles of a row are numbered from floor(offset / tile)
plus the row's number, which leaves each row at least as many as it needs, and a program searches for the row it is in.
With units a token's selection is drawn at another position, so each token then has a Philox block of its own.

What a selection asks of whole rows (words, spans, how many tokens) PyTorch works out before, with :mod:`fastmlm.units`;
the kernel gets units, or what is not selected as special tokens.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastmlm.philox import ACTION, BLOCK, LANES, PHILOX_M0, PHILOX_M1, ROUNDS, SELECT, UNIT_ID, WEYL_0, WEYL_1
from fastmlm.rows import Rows
from fastmlm.spec import RANDOM, SPECIAL
from fastmlm.units import How, look_up, select, unit_of_tokens

_BLOCK, _LANES = tl.constexpr(BLOCK), tl.constexpr(LANES)
_SELECT, _ACTION, _UNIT_ID = tl.constexpr(SELECT), tl.constexpr(ACTION), tl.constexpr(UNIT_ID)
_M0, _M1, _W0, _W1 = (tl.constexpr(c) for c in (PHILOX_M0, PHILOX_M1, WEYL_0, WEYL_1))
_ROUNDS = tl.constexpr(ROUNDS)
_SPECIAL, _RANDOM = tl.constexpr(SPECIAL), tl.constexpr(RANDOM)

WARP = 64 if torch.version.hip else 32  # threads

# Numbers that change from call to call or that may be 1: Triton would compile each value, or a 1 as a constant, apart.
_NUMBERS = (
    "seed",
    "rows",
    "length",
    "vocab_size",
    "random_count",
    "threshold",
    "mask_token_id",
    "mask_threshold",
    "random_threshold",
    "multiplier",
    "multiplier_in_table",
    "ignore_index",
)


@triton.jit
def _high(value):
    return (value >> 32).to(tl.uint32)


@triton.jit
def _philox(key, counter, STREAM: tl.constexpr, row_key):
    """Philox4x32-10 as tl.philox has it, but with one multiply of 64 bits for the two halves of each product."""
    key, row_key = key.to(tl.uint64), row_key.to(tl.uint64)  # unsigned: a shift right fills with zeros
    c0, c1, c2, c3 = counter.to(tl.uint32), tl.full((), STREAM, tl.uint32), row_key.to(tl.uint32), _high(row_key)
    k0, k1 = key.to(tl.uint32), _high(key)
    for _ in tl.static_range(_ROUNDS):
        product0, product1 = c0.to(tl.uint64) * _M0, c2.to(tl.uint64) * _M1
        c0, c1 = _high(product1) ^ c1 ^ k0, product1.to(tl.uint32)
        c2, c3 = _high(product0) ^ c3 ^ k1, product0.to(tl.uint32)
        k0, k1 = k0 + _W0, k1 + _W1
    return c0, c1, c2, c3


@triton.jit
def _draw_at(key, position, STREAM: tl.constexpr, row_key):
    """The draw at any position: its word of its own Philox block."""
    word0, word1, word2, word3 = _philox(key, position // _BLOCK * _LANES + position % _LANES, STREAM, row_key)
    word = position % _BLOCK // _LANES
    return tl.where(word == 0, word0, tl.where(word == 1, word1, tl.where(word == 2, word2, word3)))


@triton.jit
def _boundary(cu_seqlens, i, rows, tokens):
    """Where row i - 1 starts, if rows are numbered from 1, with what lies before them and after them as two more."""
    inside = tl.load(cu_seqlens + tl.minimum(tl.maximum(i - 1, 0), rows)).to(tl.int64)
    inside = tl.minimum(tl.maximum(inside, 0), tokens)
    return tl.where(i == 0, 0, tl.where(i > rows + 1, tokens, inside))


@triton.jit
def _find_row(program, cu_seqlens, rows, tokens, TILE: tl.constexpr):
    """The row, of rows + 2, that a program works for, by halving: the last one whose tiles start at or before it."""
    low = program * 0
    high = low + rows + 2
    while high - low > 1:
        middle = (low + high) // 2
        before = _boundary(cu_seqlens, middle, rows, tokens) // TILE + middle <= program
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    return low


@triton.jit
def _replacement(
    token, flag, selected, action, of_id, random_ids, random_count, mask_token_id, mask_threshold, random_threshold,
    multiplier, multiplier_in_table, PER_UNIT: tl.constexpr, EXCLUDE: tl.constexpr,
):  # fmt: skip
    """What takes the place of tokens. Selected ids have no more than 31 bits, so 32 are enough to compute with."""
    ids = token.to(tl.uint32)
    rest = action - mask_threshold.to(tl.uint32)
    # Draws below T_mask wrap round, to a rest no smaller than the width.
    masked = selected & (action.to(tl.int64) < mask_threshold.to(tl.int64))
    random = selected & (rest.to(tl.int64) < random_threshold.to(tl.int64) - mask_threshold)

    # The draw's share of the range [T_mask, T_random), or another draw's of all, scaled to an index, looked up.
    scale = multiplier.to(tl.uint64)
    if EXCLUDE:
        scale = tl.where((flag & _RANDOM) != 0, multiplier_in_table.to(tl.uint64), scale)
    if not PER_UNIT:
        of_id = rest
    random_id = _high(of_id.to(tl.uint64) * scale)
    last = random_count.to(tl.uint32) - 1
    if random_ids is not None:
        random_id = tl.load(random_ids + random_id, mask=random, other=0).to(tl.uint32)
        last = tl.load(random_ids + last).to(tl.uint32)
    if EXCLUDE:  # a table of the original alone gives the original
        random_id = tl.where(random_id == ids, last, random_id)
    output = tl.where(masked, mask_token_id.to(tl.uint32), tl.where(random, random_id, ids))
    if token.dtype == tl.int64:
        output = output.to(tl.int64) | (token & -0x100000000)  # only an id that stays has an upper half
    return output.to(token.dtype)


@triton.jit
def _mask_stripe(
    draw, action, of_id, position, column, start, row_offset, key, row_key,
    input_ids, output_ids, labels, attention_mask, special_tokens_mask, units, thresholds, flags, random_ids,
    length, vocab_size, random_count, largest, mask_token_id, mask_threshold, random_threshold,
    multiplier, multiplier_in_table, ignore_index,
    PER_TOKEN: tl.constexpr, PER_UNIT: tl.constexpr, EXCLUDE: tl.constexpr,
):  # fmt: skip
    """Mask the tokens at ``position``, whose draws of the streams are given; with units, those not of the units."""
    # The row's own offset goes to the pointers, so that lanes compute with 32 bits.
    in_bounds = position < length
    token = tl.load(input_ids + row_offset + column, mask=in_bounds, other=0)
    # Unsigned, negative ids are the largest.
    if token.dtype == tl.int64:
        selectable = in_bounds & (token.to(tl.uint64) < vocab_size.to(tl.uint64))
    else:
        selectable = in_bounds & (token.to(tl.uint32) < vocab_size.to(tl.uint32))
    if attention_mask is not None:
        selectable &= tl.load(attention_mask + row_offset + column, mask=in_bounds, other=0) != 0
    if special_tokens_mask is not None:
        selectable &= tl.load(special_tokens_mask + row_offset + column, mask=in_bounds, other=1) == 0
    flag = tl.load(flags + token.to(tl.uint32), mask=selectable, other=_SPECIAL)

    decides = column  # where the token is whose rate holds
    if units is not None:
        # Checked on the CPU alone; whatever they are, they point into the row.
        unit = tl.load(units + row_offset + column, mask=in_bounds, other=0).to(tl.int32)
        unit = tl.maximum(tl.minimum(unit, length - 1), 0)
        draw = _draw_at(key, unit, _SELECT, row_key)
        if PER_UNIT:
            action = _draw_at(key, unit, _ACTION, row_key)
        decides = tl.minimum(unit + start, length - 1)
    if PER_TOKEN:  # a draw fills all 32 bits and a threshold may be 2^32: they compare in 64
        limit = tl.load(thresholds + row_offset + decides, mask=in_bounds, other=0)
        selected = ((flag & _SPECIAL) == 0) & (draw.to(tl.int64) < limit)
    else:
        selected = ((flag & _SPECIAL) == 0) & (draw <= largest)

    output = _replacement(
        token, flag, selected, action, of_id, random_ids, random_count, mask_token_id, mask_threshold, random_threshold,
        multiplier, multiplier_in_table, PER_UNIT, EXCLUDE,
    )  # fmt: skip
    label = tl.where(selected, token, ignore_index.to(token.dtype))
    tl.store(output_ids + row_offset + column, output, mask=in_bounds)
    tl.store(labels + row_offset + column, label, mask=in_bounds)


@triton.jit(do_not_specialize=_NUMBERS)
def _mask_rows(
    input_ids, output_ids, labels, device_seed, row_keys, starts, cu_seqlens, attention_mask, special_tokens_mask,
    units, thresholds, flags, random_ids, seed, rows, length, vocab_size, random_count, threshold, mask_token_id,
    mask_threshold, random_threshold, multiplier, multiplier_in_table, ignore_index,
    TILES: tl.constexpr, BLOCKS: tl.constexpr, WIDTH: tl.constexpr, PER_TOKEN: tl.constexpr, PER_UNIT: tl.constexpr,
    EXCLUDE: tl.constexpr,
):  # fmt: skip
    """One program masks BLOCKS blocks of 64 positions of one row: of TILES programs a row, or packed, length in all."""
    program = tl.program_id(0)
    if cu_seqlens is None:
        row = (program // TILES).to(tl.int64)  # int64 before it multiplies: batches may pass 2^31 tokens
        tile = program % TILES
        length = length // WIDTH * WIDTH  # changes nothing, but tells Triton where rows start
        row_offset = row * length
    else:
        program, tokens = program.to(tl.int64), length.to(tl.int64)
        found = _find_row(program, cu_seqlens, rows, tokens, BLOCKS * _BLOCK)
        row_offset = _boundary(cu_seqlens, found, rows, tokens)
        tile = program - (row_offset // (BLOCKS * _BLOCK) + found)
        length = (_boundary(cu_seqlens, found + 1, rows, tokens) - row_offset).to(tl.int32)
        vocab_size = tl.where((found > 0) & (found <= rows), vocab_size, 0)  # what no row covers is copied
        row = tl.minimum(tl.maximum(found - 1, 0), rows - 1)
    start = 0
    if starts is not None:
        start = tl.load(starts + row).to(tl.int32)
    limit = threshold.to(tl.int64)
    if thresholds is not None and not PER_TOKEN:
        limit = tl.load(thresholds + row)
    # What selects are draws up to the largest, in 32 bits. At a rate of 0 there is none, and no id is looked up.
    largest = (limit - 1).to(tl.uint32)
    if not PER_TOKEN:
        vocab_size = tl.where(limit > 0, vocab_size, 0)
    row_key = row
    if row_keys is not None:
        row_key = tl.load(row_keys + row)
    key = seed.to(tl.int64)
    if device_seed is not None:
        key = tl.load(device_seed)

    # The lanes a thread takes together are a dimension of their own, the first: Triton's layout for what is not loaded
    # leaves it to one thread, and so does the one for wide accesses. Where the two differ, draws are made in both.
    block = tile.to(tl.int32) * BLOCKS + tl.arange(0, BLOCKS)[None, :, None]
    lane = tl.arange(0, _LANES // WIDTH)[None, None, :] * WIDTH + tl.arange(0, WIDTH)[:, None, None]
    actions = _philox(key, block * _LANES + lane, _ACTION, row_key)
    draws = actions  # with units, drawn token by token
    if units is None:
        draws = _philox(key, block * _LANES + lane, _SELECT, row_key)
    of_ids = actions
    if PER_UNIT:
        of_ids = _philox(key, block * _LANES + lane, _UNIT_ID, row_key)
    for word in tl.static_range(4):
        position = block * _BLOCK + lane + word * _LANES
        column = position
        if starts is not None:
            column += start
            column = tl.where(column >= length, column - length, column)
        _mask_stripe(
            draws[word], actions[word], of_ids[word], position, column, start, row_offset, key, row_key,
            input_ids, output_ids, labels, attention_mask, special_tokens_mask, units, thresholds, flags, random_ids,
            length, vocab_size, random_count, largest, mask_token_id, mask_threshold, random_threshold,
            multiplier, multiplier_in_table, ignore_index, PER_TOKEN, PER_UNIT, EXCLUDE,
        )  # fmt: skip


@triton.jit(do_not_specialize=("length", "tokens"))
def _first_real(attention_mask, cu_seqlens, starts, length, tokens, BLOCK: tl.constexpr):
    """One program finds the first real token of one row, from where the row starts; 0 if there is none."""
    row = tl.program_id(0).to(tl.int64)
    if cu_seqlens is None:
        begin, end = row * length, (row + 1) * length
    else:
        begin = tl.minimum(tl.maximum(tl.load(cu_seqlens + row).to(tl.int64), 0), tokens)
        end = tl.minimum(tl.maximum(tl.load(cu_seqlens + row + 1).to(tl.int64), 0), tokens)
    found, at = end, begin
    while (at < end) & (found == end):  # in most rows, once
        column = at + tl.arange(0, BLOCK)
        in_bounds = column < end
        real = tl.load(attention_mask + column, mask=in_bounds, other=0) != 0
        found = tl.min(tl.where(real & in_bounds, column, end), 0)
        at += BLOCK
    tl.store(starts + row, tl.where(found < end, found - begin, 0).to(tl.int32))


def tile_shape(longest: int, neighbours: int, warp: int) -> tuple[int, int, int]:
    """A program's blocks of 64 positions, the lanes a thread takes together, its warps.

    A tile never mixes rows: short rows get small ones, long rows 1024 positions. A thread makes 2 Philox blocks or as
    many as it takes lanes together, so 8 or 16 tokens, as far as there is enough for a warp of threads.
    """
    blocks = min(16, triton.next_power_of_2(max(triton.cdiv(longest, BLOCK), 1)))
    elements = blocks * LANES
    lanes = min(neighbours, max(elements // warp, 1))
    return blocks, lanes, max(elements // (max(lanes, 2) * warp), 1)


def _prepare(
    input_ids: Tensor, key: Tensor | int, row_keys: Tensor | None, attention_mask: Tensor | None,
    special_tokens_mask: Tensor | None, units: Tensor | None, cu_seqlens: Tensor | None, limit: Tensor | int,
    flags: Tensor, per_unit: bool, how: How,
) -> tuple[Tensor | None, Tensor | None, Tensor | int]:  # fmt: skip
    """What the kernel takes for special_tokens_mask, units and thresholds, where a selection looks beyond a token."""
    ids = input_ids.to(torch.int64)
    key = key if isinstance(key, Tensor) else ids.new_full((1,), key)
    rows = Rows(key, row_keys, attention_mask, cu_seqlens, ids)
    if how.counts:  # what is selected is known then, whatever the kernel draws
        unit, selected = select(ids, rows, attention_mask, special_tokens_mask, units, flags, limit, how)
        return ~selected, unit if per_unit else None, 1 << 32
    inside, flag, special = look_up(ids, rows, attention_mask, special_tokens_mask, flags)
    if how.words or how.span_limits is not None:
        units = unit_of_tokens(rows, special, flag, units, how)
    return special_tokens_mask, units, limit if how.id_thresholds is None else how.id_thresholds[inside]


def _first_tokens(attention_mask: Tensor, cu_seqlens: Tensor | None, rows: int) -> Tensor:
    """The first real token of each row, (rows,) int32."""
    length, tokens = attention_mask.shape[1], attention_mask.numel()
    starts = torch.empty(rows, dtype=torch.int32, device=attention_mask.device)
    _first_real[(rows,)](attention_mask, cu_seqlens, starts, length, tokens, BLOCK=512, num_warps=1)
    return starts


def mask_tokens(
    input_ids: Tensor,
    seed: int,
    device_seed: Tensor | None,
    row_keys: Tensor | None,
    attention_mask: Tensor | None,
    special_tokens_mask: Tensor | None,
    units: Tensor | None,
    cu_seqlens: Tensor | None,
    thresholds: Tensor | None,
    flags: Tensor,
    random_ids: Tensor | None,
    threshold: int,
    mask_token_id: int,
    mask_threshold: int,
    random_threshold: int,
    ignore_index: int,
    exclude_original: bool,
    words: bool,
    span_limits: Tensor | None,
    id_thresholds: Tensor | None,
    per_unit: bool,
    exact: bool,
    at_least: int,
    at_most: int,
    output_ids: Tensor,
    labels: Tensor,
) -> None:
    """Launch the kernel; arguments as :mod:`fastmlm._ops` describes them."""
    how = How(words, span_limits, id_thresholds, exact, at_least, at_most)
    limit = threshold if thresholds is None else thresholds
    if how.beyond_a_token:
        special_tokens_mask, units, limit = _prepare(
            input_ids, seed if device_seed is None else device_seed, row_keys, attention_mask, special_tokens_mask,
            units, cu_seqlens, limit, flags, per_unit, how,
        )  # fmt: skip
    _launch(
        input_ids, seed, device_seed, row_keys, attention_mask, special_tokens_mask, units, cu_seqlens,
        None if isinstance(limit, int) else limit, flags, random_ids, limit if isinstance(limit, int) else 0,
        mask_token_id, mask_threshold, random_threshold, ignore_index, exclude_original, per_unit, output_ids, labels,
    )  # fmt: skip


def _launch(
    input_ids: Tensor, seed: int, device_seed: Tensor | None, row_keys: Tensor | None, attention_mask: Tensor | None,
    special_tokens_mask: Tensor | None, units: Tensor | None, cu_seqlens: Tensor | None, thresholds: Tensor | None,
    flags: Tensor, random_ids: Tensor | None, threshold: int, mask_token_id: int, mask_threshold: int,
    random_threshold: int, ignore_index: int, exclude_original: bool, per_unit: bool, output_ids: Tensor,
    labels: Tensor,
) -> None:  # fmt: skip
    rows, length = input_ids.shape
    longest = length
    if cu_seqlens is not None:
        rows = cu_seqlens.numel() - 1
        longest = triton.cdiv(length, rows)  # on the average: the host does not know better
    neighbours = 16 // input_ids.itemsize
    turned = attention_mask is not None or cu_seqlens is not None  # or starts anywhere
    aligned = length % neighbours == 0 and all(t.data_ptr() % 16 == 0 for t in (input_ids, output_ids, labels))
    blocks, lanes, warps = tile_shape(longest, neighbours if aligned and not turned else 1, WARP)
    tiles = triton.cdiv(length, blocks * BLOCK)
    programs = rows * tiles if cu_seqlens is None else length // (blocks * BLOCK) + rows + 2
    # bool tensors are bytes to Triton only when viewed as such
    byte_masks = [None if m is None else m.view(torch.uint8) if m.dtype == torch.bool else m
                  for m in (attention_mask, special_tokens_mask)]  # fmt: skip
    starts = None if byte_masks[0] is None else _first_tokens(byte_masks[0], cu_seqlens, rows)
    count = flags.numel() if random_ids is None else random_ids.numel()
    width = max(random_threshold - mask_threshold, 1)
    if per_unit:  # ids have draws of their own, of the whole range
        width = 1 << 32
    _mask_rows[(programs,)](
        input_ids, output_ids, labels, device_seed, row_keys, starts, cu_seqlens, *byte_masks, units, thresholds,
        flags, random_ids, seed, rows, length, flags.numel(), count, threshold, mask_token_id, mask_threshold,
        random_threshold, (count << 32) // width if random_threshold > mask_threshold else 0,
        ((count - 1) << 32) // width if random_threshold > mask_threshold else 0, ignore_index,
        TILES=tiles, BLOCKS=blocks, WIDTH=lanes,
        PER_TOKEN=thresholds is not None and thresholds.shape == input_ids.shape, PER_UNIT=per_unit,
        EXCLUDE=exclude_original, num_warps=warps,
    )  # fmt: skip
