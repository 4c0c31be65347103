"""The definition of every op in plain PyTorch. Kernels must give exactly these bits (DESIGN: the draw law)."""

import torch
from torch import Tensor

from fastmlm import philox
from fastmlm.chunked import linear_cross_entropy as linear_cross_entropy
from fastmlm.rows import Rows
from fastmlm.spec import RANDOM
from fastmlm.units import How, select

_LOW32 = 0xFFFFFFFF
_AT_ONCE = 1 << 20  # logits, whose draws take some hundred bytes each on their way


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
    """Select, replace and label; arguments as :func:`fastmlm._ops.mask_tokens` describes them."""
    ids = input_ids.to(torch.int64)
    key = ids.new_full((1,), seed) if device_seed is None else device_seed
    rows = Rows(key, row_keys, attention_mask, cu_seqlens, ids)
    how = How(words, span_limits, id_thresholds, exact, at_least, at_most)
    limit = threshold if thresholds is None else thresholds
    unit, selected = select(ids, rows, attention_mask, special_tokens_mask, units, flags, limit, how)

    # What takes the place of the selected. A unit's action tells nothing of ids, which have draws of their own then.
    action = rows.draw(philox.ACTION, unit if per_unit else rows.position)
    masked = selected & (action < mask_threshold)
    output = torch.where(masked, mask_token_id, ids)
    if random_threshold > mask_threshold:
        of_id, width = action - mask_threshold, random_threshold - mask_threshold
        if per_unit:
            of_id, width = rows.draw(philox.UNIT_ID, rows.position), 1 << 32
        random_id, drawn = _random_ids(of_id, ids, flags, random_ids, width, exclude_original)
        output = torch.where(selected & ~masked & (action < random_threshold) & drawn, random_id, output)
    labels.copy_(torch.where(selected, ids, ignore_index))
    output_ids.copy_(output)  # last, since it may be input_ids


def _random_ids(
    draw: Tensor,
    ids: Tensor,
    flags: Tensor,
    random_ids: Tensor | None,
    width: int,
    exclude_original: bool,
) -> tuple[Tensor, Tensor | bool]:
    """The random id at each position and whether there is one, of draws in [0, width)."""
    count = flags.numel() if random_ids is None else random_ids.numel()

    def look_up(multiplier: Tensor | int) -> Tensor:
        # Elsewhere than at random actions the draw is out of range; the clamp keeps the look-up legal there.
        index = ((draw * multiplier) >> 32 & _LOW32).clamp(0, count - 1)
        return index if random_ids is None else random_ids[index]

    if not exclude_original:
        return look_up((count << 32) // width), True
    # One id fewer where the original is in the table: drawing it means the last id, which no other draw reaches.
    in_table = (flags[ids.clamp(0, flags.numel() - 1)] & RANDOM) != 0
    multiplier = torch.where(in_table, ((count - 1) << 32) // width, (count << 32) // width)
    random_id = look_up(multiplier)
    last = count - 1 if random_ids is None else random_ids[count - 1]
    return torch.where(random_id == ids, last, random_id), ~in_table | (count > 1)


def sample_tokens(
    logits: Tensor, seed: int, device_seed: Tensor | None, row_keys: Tensor, temperature: float
) -> Tensor:
    """One sample of each row; arguments as :func:`fastmlm._ops.sample_tokens` describes them."""
    key = row_keys.new_full((1,), seed) if device_seed is None else device_seed
    at_once = max(_AT_ONCE // max(logits.shape[1], 1), 1)
    parts = zip(logits.split(at_once), row_keys.split(at_once), strict=True)
    return torch.cat([_sample(part, key, keys, 1 / temperature) for part, keys in parts])


def _sample(logits: Tensor, key: Tensor, row_keys: Tensor, scale: float) -> Tensor:
    draw = philox.draw_rows(key, row_keys, logits.shape[1], (philox.GUMBEL,))[0]
    # x and 1 - x, the smaller of which float32 has with all its digits, and E = -log(1 - x) from that one.
    upper = draw > _LOW32 // 2
    x = torch.where(upper, _LOW32 - draw, draw).float().add_(0.5).mul_(2.0**-32)
    exponential = torch.where(upper, -x.log(), -torch.log1p(-x))
    score, token = (logits.float() * scale - exponential.log()).max(1)
    return torch.where(score.isfinite(), token, -1)
