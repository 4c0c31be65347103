"""Masking of padded batches as one Triton kernel: select, replace and label, each id read once.

A program takes some blocks of 64 positions of one row. By the draw law (:mod:`fastmlm.philox`) one Philox block serves
four positions 16 apart, so each of a program's (block, lane) elements draws once a stream and handles four tokens; the
16 lanes are neighbours in memory. Positions are columns turned round by the row's first real token: the columns before
it, which are padding and never selected, come last, and every column is written exactly once.
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
def _mask_stripe(
    draw, action, position, start, row, row_offset,
    input_ids, output_ids, labels, attention_mask, special_tokens_mask, thresholds, flags, random_ids,
    length, vocab_size, random_count, threshold, mask_token_id, mask_threshold, random_threshold,
    multiplier, multiplier_in_table, ignore_index,
    PER_TOKEN: tl.constexpr, EXCLUDE: tl.constexpr,
):  # fmt: skip
    """Mask the tokens at ``position``, whose draws of the two streams are given."""
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

    limit = threshold.to(tl.int64)
    if thresholds is not None:
        if PER_TOKEN:
            limit = tl.load(thresholds + offset, mask=in_bounds, other=0)
        else:
            limit = tl.load(thresholds + row)
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
    input_ids, output_ids, labels, device_seed, row_keys, starts, attention_mask, special_tokens_mask, thresholds,
    flags, random_ids, seed, length, vocab_size, random_count, threshold, mask_token_id, mask_threshold,
    random_threshold, multiplier, multiplier_in_table, ignore_index,
    TILES: tl.constexpr, BLOCKS: tl.constexpr, PER_TOKEN: tl.constexpr, EXCLUDE: tl.constexpr,
):  # fmt: skip
    """One program masks BLOCKS blocks of 64 positions of one row, which TILES programs share."""
    program = tl.program_id(0).to(tl.int64)  # int64 before it multiplies: batches may pass 2^31 tokens
    row = program // TILES
    row_offset = row * length
    start = 0
    if starts is not None:
        start = tl.load(starts + row).to(tl.int32)
    row_key = row
    if row_keys is not None:
        row_key = tl.load(row_keys + row)
    key = seed.to(tl.int64)
    if device_seed is not None:
        key = tl.load(device_seed)

    block = (program % TILES).to(tl.int32) * BLOCKS + tl.arange(0, BLOCKS)[:, None]
    lane = tl.arange(0, _LANES)[None, :]
    counter = (block * _LANES + lane).to(tl.uint32)
    low = tl.zeros_like(counter) + (row_key & 0xFFFFFFFF).to(tl.uint32)
    high = tl.zeros_like(counter) + ((row_key >> 32) & 0xFFFFFFFF).to(tl.uint32)
    select0, select1, select2, select3 = tl.philox(key, counter, tl.zeros_like(counter) + _SELECT, low, high)
    action0, action1, action2, action3 = tl.philox(key, counter, tl.zeros_like(counter) + _ACTION, low, high)
    position = block * _BLOCK + lane
    for word in tl.static_range(4):
        draw = select0 if word == 0 else select1 if word == 1 else select2 if word == 2 else select3
        action = action0 if word == 0 else action1 if word == 1 else action2 if word == 2 else action3
        _mask_stripe(
            draw, action, position + word * _LANES, start, row, row_offset,
            input_ids, output_ids, labels, attention_mask, special_tokens_mask, thresholds, flags, random_ids,
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
    if units is not None or cu_seqlens is not None:
        argument = "units" if units is not None else "cu_seqlens"
        raise NotImplementedError(f"{argument}: the Triton kernel does not cover it yet; impl='reference' does")
    rows, length = input_ids.shape
    # A tile never mixes rows; short rows get small tiles, long ones 1024 positions, 8 tokens a thread.
    blocks = min(16, triton.next_power_of_2(triton.cdiv(length, BLOCK)))
    tiles = triton.cdiv(length, blocks * BLOCK)
    count = flags.numel() if random_ids is None else random_ids.numel()
    width = max(random_threshold - mask_threshold, 1)
    # bool tensors are bytes to Triton only when viewed as such
    byte_masks = [None if m is None else m.view(torch.uint8) if m.dtype == torch.bool else m
                  for m in (attention_mask, special_tokens_mask)]  # fmt: skip
    _mask_rows[(rows * tiles,)](
        input_ids, output_ids, labels, device_seed, row_keys,
        None if attention_mask is None else first_real(attention_mask),
        *byte_masks, thresholds, flags, random_ids, seed, length, flags.numel(), count, threshold, mask_token_id,
        mask_threshold, random_threshold, (count << 32) // width if random_threshold > mask_threshold else 0,
        ((count - 1) << 32) // width if random_threshold > mask_threshold else 0, ignore_index,
        TILES=tiles, BLOCKS=blocks, PER_TOKEN=thresholds is not None and thresholds.shape == input_ids.shape,
        EXCLUDE=exclude_original, num_warps=max(1, min(4, blocks // 4)),
    )  # fmt: skip
