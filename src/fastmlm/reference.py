"""The definition of every op in plain PyTorch. Kernels must give exactly these bits (DESIGN: the draw law)."""

import torch
from torch import Tensor

from fastmlm import philox
from fastmlm.chunked import linear_cross_entropy as linear_cross_entropy
from fastmlm.spec import RANDOM, SPECIAL

_LOW32 = 0xFFFFFFFF


class _Rows:
    """Positions and draws of a batch, padded or packed: everything that depends on where rows lie."""

    def __init__(
        self,
        key: Tensor,
        row_keys: Tensor | None,
        attention_mask: Tensor | None,
        cu_seqlens: Tensor | None,
        like: Tensor,
    ) -> None:
        shape, device = like.shape, like.device
        self.key = key
        columns = torch.arange(shape[1], device=device)
        if cu_seqlens is None:
            starts = torch.zeros(shape[0], dtype=torch.int64, device=device)
            if attention_mask is not None:
                starts = philox.first_real(attention_mask)
            self.row = torch.arange(shape[0], device=device)[:, None].expand(shape)
            self.start = starts[:, None]
            self.inside: Tensor | None = None
        else:
            self.row = (torch.searchsorted(cu_seqlens, columns, right=True) - 1)[None]
            # On a GPU nothing checks cu_seqlens: what no segment covers belongs to none and is left alone.
            self.inside = (self.row >= 0) & (self.row < cu_seqlens.numel() - 1)
            self.row = self.row.clamp(0, max(cu_seqlens.numel() - 2, 0))
            starts = cu_seqlens[:-1].to(torch.int64)
            if attention_mask is not None:
                real = torch.where((attention_mask != 0) & self.inside, columns, shape[1])[0]
                starts = torch.full_like(starts, shape[1]).scatter_reduce(0, self.row[0], real, "amin")
            self.start = starts[self.row]
        self.position = columns - self.start  # negative before the first real token, where nothing is selectable
        self.keys = torch.arange(len(starts), device=device) if row_keys is None else row_keys
        self.packed = cu_seqlens is not None
        self._table: Tensor | None = None

    def draw(self, stream: int, position: Tensor) -> Tensor:
        """draw_t at one position for each token of the batch, (B, S) int64."""
        position = position.clamp(0, max(position.shape[1] - 1, 0))
        if self.packed:
            return philox.draw_at(self.key, self.keys[self.row], position, stream)
        if self._table is None:
            self._table = philox.draw_rows(self.key, self.keys, position.shape[1], (philox.SELECT, philox.ACTION))
        return self._table[stream].gather(1, position)

    def per_token(self, thresholds: Tensor, position: Tensor) -> Tensor:
        """The threshold that holds at a position: thresholds are one a row, (rows, 1), or one a token, (B, S)."""
        if thresholds.shape == position.shape:
            return thresholds.gather(1, (position + self.start).clamp(0, position.shape[1] - 1))
        return thresholds[:, 0][self.row]


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
    """Select, replace and label; arguments as :func:`fastmlm._ops.mask_tokens` describes them."""
    ids = input_ids.to(torch.int64)
    key = ids.new_full((1,), seed) if device_seed is None else device_seed
    rows = _Rows(key, row_keys, attention_mask, cu_seqlens, ids)

    # 1. What may be selected.
    in_vocabulary = (ids >= 0) & (ids < flags.numel())
    flag = flags[ids.clamp(0, flags.numel() - 1)]
    selectable = in_vocabulary & ((flag & SPECIAL) == 0)
    if attention_mask is not None:
        selectable &= attention_mask != 0
    if special_tokens_mask is not None:
        selectable &= special_tokens_mask == 0
    if rows.inside is not None:
        selectable &= rows.inside

    # 2. What is selected: the draw and the rate of the unit decide for all its tokens.
    unit = rows.position if units is None else units.to(torch.int64)
    limit = threshold if thresholds is None else rows.per_token(thresholds, unit)
    selected = selectable & (rows.draw(philox.SELECT, unit) < limit)

    # 3. What takes its place.
    action = rows.draw(philox.ACTION, rows.position)
    masked = selected & (action < mask_threshold)
    output = torch.where(masked, mask_token_id, ids)
    if random_threshold > mask_threshold:
        in_table = (flag & RANDOM) != 0
        random_id, drawn = _random_ids(
            action - mask_threshold,
            ids,
            in_table,
            flags,
            random_ids,
            random_threshold - mask_threshold,
            exclude_original,
        )
        output = torch.where(selected & ~masked & (action < random_threshold) & drawn, random_id, output)
    labels.copy_(torch.where(selected, ids, ignore_index))
    output_ids.copy_(output)  # last, since it may be input_ids


def _random_ids(
    rest: Tensor,
    ids: Tensor,
    in_table: Tensor,
    flags: Tensor,
    random_ids: Tensor | None,
    width: int,
    exclude_original: bool,
) -> tuple[Tensor, Tensor | bool]:
    """The random id at each position and whether there is one; ``rest`` is the draw less T_mask, in [0, width)."""
    count = flags.numel() if random_ids is None else random_ids.numel()

    def look_up(multiplier: Tensor | int) -> Tensor:
        # Elsewhere than at random actions ``rest`` is out of range; the clamp keeps the look-up legal there.
        index = ((rest * multiplier) >> 32 & _LOW32).clamp(0, count - 1)
        return index if random_ids is None else random_ids[index]

    if not exclude_original:
        return look_up((count << 32) // width), True
    # One id fewer where the original is in the table: drawing it means the last id, which no other draw reaches.
    multiplier = torch.where(in_table, ((count - 1) << 32) // width, (count << 32) // width)
    random_id = look_up(multiplier)
    last = count - 1 if random_ids is None else random_ids[count - 1]
    return torch.where(random_id == ids, last, random_id), ~in_table | (count > 1)
