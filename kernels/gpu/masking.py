"""Masking as one Triton kernel: select, replace and label, each id read once; padded or packed.

A program takes some blocks of 64 positions of one row. By the draw law (:mod:`fastmlm.philox`) one Philox block serves
four positions 16 apart, so each of a program's (block, lane) elements draws once a stream and handles four tokens; the
16 lanes are neighbours in memory. Positions are columns turned round by the row's first real token: the columns before
it, which are padding and never selected, come last, and every column is written exactly once.

Packed rows have any length, and the host does not know which: the tiles of a row are numbered from floor(offset / tile)
plus the row's number, which leaves each row at least as many as it needs, and a program searches for the row it is in.
With units a token's selection is drawn at another position, so each token then has a Philox block of its own.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastmlm.philox import ACTION, BLOCK, LANES, SELECT, first_real
from fastmlm.spec import RANDOM, SPECIAL

_BLOCK, _LANES = tl.constexpr(BLOCK), tl.constexpr(LANES)
_SELECT, _ACTION = tl.constexpr(SELECT), tl.constexpr(ACTION)
_SPECIAL, _RANDOM = tl.constexpr(SPECIAL), tl.constexpr(RANDOM)

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
def _random_id(
    action,
    ids,
    in_table,
    mask_threshold,
    random_ids,
    random_count,
    multiplier,
    multiplier_in_table,
    EXCLUDE: tl.constexpr,
):
    """The id an action draws: its share of the range [T_mask, T_random), scaled to an index, looked up."""
    rest = action - mask_threshold.to(tl.uint32)
    scale = tl.full(rest.shape, 0, tl.uint32) + multiplier.to(tl.uint32)
    if EXCLUDE:
        scale = tl.where(in_table, multiplier_in_table.to(tl.uint32), scale)
    index = tl.minimum(tl.umulhi(rest, scale).to(tl.int64), random_count.to(tl.int64) - 1)
    last = random_count.to(tl.int64) - 1
    if random_ids is not None:
        index = tl.load(random_ids + index)
        last = tl.load(random_ids + last)
    if EXCLUDE:
        index = tl.where(index == ids, last, index)
    return index


@triton.jit
def _draw_at(key, position, low, high):
    """The selection draw at any position: its word of its own Philox block."""
    counter = (position // _BLOCK * _LANES + position % _LANES).to(tl.uint32)
    zero = tl.zeros_like(counter)
    word0, word1, word2, word3 = tl.philox(key, counter, zero + _SELECT, zero + low, zero + high)
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
def _mask_stripe(
    draw, action, position, start, row, is_row, row_offset, key, key_low, key_high,
    input_ids, output_ids, labels, attention_mask, special_tokens_mask, units, thresholds, flags, random_ids,
    length, vocab_size, random_count, threshold, mask_token_id, mask_threshold, random_threshold,
    multiplier, multiplier_in_table, ignore_index,
    PER_TOKEN: tl.constexpr, EXCLUDE: tl.constexpr,
):  # fmt: skip
    """Mask the tokens at ``position``, whose draws of the two streams are given; with units, that of the actions."""
    in_bounds = position < length
    column = position + start
    offset = row_offset + tl.where(column >= length, column - length, column)

    token = tl.load(input_ids + offset, mask=in_bounds, other=-1)
    ids = token.to(tl.int64)
    selectable = in_bounds & (ids >= 0) & (ids < vocab_size)
    flag = tl.load(flags + ids, mask=selectable, other=_SPECIAL)
    selectable &= (flag & _SPECIAL) == 0
    if attention_mask is not None:
        selectable &= tl.load(attention_mask + offset, mask=in_bounds, other=0) != 0
    if special_tokens_mask is not None:
        selectable &= tl.load(special_tokens_mask + offset, mask=in_bounds, other=1) == 0

    decides = offset  # where the token is whose rate holds
    if units is not None:
        # Checked on the CPU alone; whatever they are, they point into the row.
        unit = tl.load(units + offset, mask=in_bounds, other=0).to(tl.int32)
        unit = tl.maximum(tl.minimum(unit, length - 1), 0)
        draw = _draw_at(key, unit, key_low, key_high)
        decides = row_offset + tl.minimum(unit + start, length - 1)
    limit = threshold.to(tl.int64)
    if thresholds is not None:
        if PER_TOKEN:
            limit = tl.load(thresholds + decides, mask=in_bounds, other=0)
        else:
            limit = tl.load(thresholds + row)
    if is_row is not None:
        limit = tl.where(is_row, limit, 0)
    selected = selectable & (draw.to(tl.int64) < limit)

    # A draw fills all 32 bits and a threshold may be 2^32: both compare in 64.
    masked = selected & (action.to(tl.int64) < mask_threshold.to(tl.int64))
    random = selected & (action.to(tl.int64) < random_threshold.to(tl.int64)) & (masked == 0)
    in_table = (flag & _RANDOM) != 0
    if EXCLUDE:
        random &= (in_table == 0) | (random_count > 1)
    random_id = _random_id(
        action, ids, in_table, mask_threshold, random_ids, random_count, multiplier, multiplier_in_table, EXCLUDE
    )
    output = tl.where(masked, mask_token_id.to(tl.int64), tl.where(random, random_id, ids))
    label = tl.where(selected, ids, ignore_index.to(tl.int64))
    tl.store(output_ids + offset, output.to(token.dtype), mask=in_bounds)
    tl.store(labels + offset, label.to(token.dtype), mask=in_bounds)


@triton.jit(do_not_specialize=_NUMBERS)
def _mask_rows(
    input_ids, output_ids, labels, device_seed, row_keys, starts, cu_seqlens, attention_mask, special_tokens_mask,
    units, thresholds, flags, random_ids, seed, rows, length, vocab_size, random_count, threshold, mask_token_id,
    mask_threshold, random_threshold, multiplier, multiplier_in_table, ignore_index,
    TILES: tl.constexpr, BLOCKS: tl.constexpr, PER_TOKEN: tl.constexpr, EXCLUDE: tl.constexpr,
):  # fmt: skip
    """One program masks BLOCKS blocks of 64 positions of one row: of TILES programs a row, or packed, length in all."""
    program = tl.program_id(0).to(tl.int64)  # int64 before it multiplies: batches may pass 2^31 tokens
    if cu_seqlens is None:
        row = program // TILES
        tile = program % TILES
        row_offset = row * length
        is_row = None
    else:
        tokens = length.to(tl.int64)
        found = _find_row(program, cu_seqlens, rows, tokens, BLOCKS * _BLOCK)
        row_offset = _boundary(cu_seqlens, found, rows, tokens)
        tile = program - (row_offset // (BLOCKS * _BLOCK) + found)
        length = (_boundary(cu_seqlens, found + 1, rows, tokens) - row_offset).to(tl.int32)
        is_row = (found > 0) & (found <= rows)  # not what no row covers, which is copied
        row = tl.minimum(tl.maximum(found - 1, 0), rows - 1)
    start = 0
    if starts is not None:
        start = tl.load(starts + row).to(tl.int32)
    row_key = row
    if row_keys is not None:
        row_key = tl.load(row_keys + row)
    key = seed.to(tl.int64)
    if device_seed is not None:
        key = tl.load(device_seed)

    block = tile.to(tl.int32) * BLOCKS + tl.arange(0, BLOCKS)[:, None]
    lane = tl.arange(0, _LANES)[None, :]
    counter = (block * _LANES + lane).to(tl.uint32)
    key_low = (row_key & 0xFFFFFFFF).to(tl.uint32)
    key_high = ((row_key >> 32) & 0xFFFFFFFF).to(tl.uint32)
    low, high = tl.zeros_like(counter) + key_low, tl.zeros_like(counter) + key_high
    action0, action1, action2, action3 = tl.philox(key, counter, tl.zeros_like(counter) + _ACTION, low, high)
    select0, select1, select2, select3 = action0, action1, action2, action3  # with units, drawn token by token
    if units is None:
        select0, select1, select2, select3 = tl.philox(key, counter, tl.zeros_like(counter) + _SELECT, low, high)
    position = block * _BLOCK + lane
    for word in tl.static_range(4):
        draw = select0 if word == 0 else select1 if word == 1 else select2 if word == 2 else select3
        action = action0 if word == 0 else action1 if word == 1 else action2 if word == 2 else action3
        _mask_stripe(
            draw, action, position + word * _LANES, start, row, is_row, row_offset, key, key_low, key_high,
            input_ids, output_ids, labels, attention_mask, special_tokens_mask, units, thresholds, flags, random_ids,
            length, vocab_size, random_count, threshold, mask_token_id, mask_threshold, random_threshold,
            multiplier, multiplier_in_table, ignore_index, PER_TOKEN, EXCLUDE,
        )  # fmt: skip


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
    output_ids: Tensor,
    labels: Tensor,
) -> None:
    """Launch the kernel; arguments as :mod:`fastmlm._ops` describes them."""
    # A tile never mixes rows; short rows get small tiles, long ones 1024 positions, 8 tokens a thread.
    rows, length = input_ids.shape
    longest = length
    if cu_seqlens is not None:
        rows = cu_seqlens.numel() - 1
        longest = triton.cdiv(length, rows)  # on the average: the host does not know better
    blocks = min(16, triton.next_power_of_2(max(triton.cdiv(longest, BLOCK), 1)))
    tiles = triton.cdiv(length, blocks * BLOCK)
    programs = rows * tiles if cu_seqlens is None else length // (blocks * BLOCK) + rows + 2
    starts = None
    if attention_mask is not None:
        starts = first_real(attention_mask) if cu_seqlens is None else _first_real_packed(attention_mask, cu_seqlens)
    count = flags.numel() if random_ids is None else random_ids.numel()
    width = max(random_threshold - mask_threshold, 1)
    # bool tensors are bytes to Triton only when viewed as such
    byte_masks = [None if m is None else m.view(torch.uint8) if m.dtype == torch.bool else m
                  for m in (attention_mask, special_tokens_mask)]  # fmt: skip
    _mask_rows[(programs,)](
        input_ids, output_ids, labels, device_seed, row_keys, starts, cu_seqlens, *byte_masks, units, thresholds,
        flags, random_ids, seed, rows, length, flags.numel(), count, threshold, mask_token_id, mask_threshold,
        random_threshold, (count << 32) // width if random_threshold > mask_threshold else 0,
        ((count - 1) << 32) // width if random_threshold > mask_threshold else 0, ignore_index,
        TILES=tiles, BLOCKS=blocks, PER_TOKEN=thresholds is not None and thresholds.shape == input_ids.shape,
        EXCLUDE=exclude_original, num_warps=max(1, min(4, blocks // 4)),
    )  # fmt: skip


def _first_real_packed(attention_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """`fastmlm.philox.first_real` of packed rows, (rows,): columns from where each row starts."""
    columns = torch.arange(attention_mask.shape[1], device=attention_mask.device)
    row = torch.searchsorted(cu_seqlens, columns, right=True) - 1
    inside = (row >= 0) & (row < cu_seqlens.numel() - 1)
    real = columns.where((attention_mask[0] != 0) & inside, attention_mask.shape[1])
    begin, end = cu_seqlens[:-1].to(torch.int64), cu_seqlens[1:]
    first = torch.full_like(begin, attention_mask.shape[1])
    first.scatter_reduce_(0, row.clamp_(0, len(first) - 1), real, "amin")
    return torch.where(first < end, first - begin, 0)
