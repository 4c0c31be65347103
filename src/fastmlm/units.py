"""Which tokens are selected as one, and how many of a row: the part of the law that looks beyond a token.

Operations of PyTorch on the device of the tensors, without a wait for it. They define the law, so the reference is made
of them; what runs before the Triton kernel is made of them too, since sorting and counting rows is no work for a kernel
that takes tokens one by one. Hence they lie below both, where a kernel may import them.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fastmlm.philox import SELECT, SPANS
from fastmlm.rows import Rows
from fastmlm.selection_spec import NO_MOST
from fastmlm.spec import ENDS_WORD, SPECIAL, STARTS_WORD

_NEVER = (1 << 63) - 1  # sorts after every unit


class How(NamedTuple):
    """How to select: the op's arguments of a :class:`fastmlm.Selection`, under its names."""

    words: bool
    span_limits: Tensor | None
    id_thresholds: Tensor | None
    exact: bool
    at_least: int
    at_most: int

    @property
    def counts(self) -> bool:
        """Whether a row's number of tokens is not left to chance."""
        return self.exact or self.at_least > 0 or self.at_most < NO_MOST

    @property
    def beyond_a_token(self) -> bool:
        """Whether anything asks for more than each token, or its given unit, by itself and at the rate of its row."""
        return self.words or self.span_limits is not None or self.id_thresholds is not None or self.counts


def select(
    ids: Tensor,
    rows: Rows,
    attention_mask: Tensor | None,
    special_tokens_mask: Tensor | None,
    units: Tensor | None,
    flags: Tensor,
    limit: Tensor | int,
    how: How,
) -> tuple[Tensor, Tensor]:
    """The position of each token's unit, and whether it is selected; (B, S) int64 and bool.

    Args:
        ids: (B, S) int64.
        limit: T(p): one number, one a row (rows, 1), or one a token (B, S).
        Others as :mod:`fastmlm._ops` describes them.
    """
    inside, flag, special = look_up(ids, rows, attention_mask, special_tokens_mask, flags)
    selectable = ~special & (inside == ids)
    unit = unit_of_tokens(rows, special, flag, units, how)
    if how.id_thresholds is not None:
        limit = how.id_thresholds[inside]
    if isinstance(limit, Tensor):
        by_token = limit.shape == ids.shape
        limit_of_token: Tensor | int = limit.gather(1, rows.cell(unit)) if by_token else limit[:, 0][rows.row]
    else:
        limit_of_token = limit
    drawn = rows.draw(SELECT, unit) < limit_of_token
    selected = selectable & drawn
    if how.counts:
        selected = _count(rows, selectable, selected, unit, limit, how)
    return unit, selected


def look_up(
    ids: Tensor, rows: Rows, attention_mask: Tensor | None, special_tokens_mask: Tensor | None, flags: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Of each token the nearest id of the vocabulary, the flags of that, and whether it is special or padding."""
    inside = ids.clamp(0, flags.numel() - 1)
    flag = flags[inside]
    special = (flag & SPECIAL) != 0
    if attention_mask is not None:
        special |= attention_mask == 0
    if special_tokens_mask is not None:
        special |= special_tokens_mask != 0
    if rows.inside is not None:
        special |= ~rows.inside
    return inside, flag, special


def unit_of_tokens(rows: Rows, special: Tensor, flag: Tensor, units: Tensor | None, how: How) -> Tensor:
    """The position of the first token of each token's word or span, (B, S) int64.

    Args:
        special: (B, S) bool, what is never selected: it parts words and spans.
        flag: (B, S) uint8, the flags of each token's id.
        units: (B, S) integers, the words where they are given.
    """
    unit = rows.position if units is None else units.to(torch.int64)
    if not how.words and how.span_limits is None:
        return unit
    cut = special | (rows.position == 0)
    cut[:, 1:] |= special[:, :-1]  # over the end of a row too: there the next row starts, or what comes before it
    if how.words:
        starts = cut | ((flag & STARTS_WORD) != 0)
        starts[:, 1:] |= (flag[:, :-1] & ENDS_WORD) != 0
        unit = _last_start(rows, starts)
    if how.span_limits is None:
        return unit
    first = (unit == rows.position) & (rows.position >= 0)
    number = (rows.cumsum(first.to(torch.int64)) - 1).clamp(min=0)
    return _last_start(rows, cut | (first & _starts_span(rows, how.span_limits).gather(1, rows.cell(number))))


def _last_start(rows: Rows, starts: Tensor) -> Tensor:
    """The position of the last start up to each cell; starts must have the row's position 0."""
    last = torch.where(starts, rows.columns, 0).cummax(1).values if starts.numel() else rows.position
    return (last - rows.start).clamp(min=0)


def _starts_span(rows: Rows, limits: Tensor) -> Tensor:
    """Whether the unit of a number starts a span, at the cell whose position is that number; (B, S) bool.

    Spans follow one another from unit 0 on, each of a length of its own draw; so span j starts at the sum of the
    lengths before it, and no row has more spans than tokens.
    """
    draws = rows.draw(SPANS, rows.position)
    lengths = torch.where(rows.position >= 0, 1 + torch.searchsorted(limits, draws, right=True), 0)
    cell = rows.start + rows.cumsum(lengths) - lengths
    beyond = lengths.shape[1]
    cell = torch.where((rows.position >= 0) & (cell < rows.ends()), cell, beyond)
    marked = torch.zeros(lengths.shape[0], beyond + 1, dtype=torch.bool, device=lengths.device)
    return marked.scatter(1, cell, True)[:, :beyond]


def _count(rows: Rows, selectable: Tensor, drawn: Tensor, unit: Tensor, limit: Tensor | int, how: How) -> Tensor:
    """What is selected where a row's number of tokens is given or bounded; ``drawn`` is what chance alone selects."""
    count = rows.sum(selectable)
    if how.exact:
        wanted = ((limit[:, 0] if isinstance(limit, Tensor) else limit) * count + (1 << 31)) >> 32
    else:
        wanted = rows.sum(drawn)
    most = wanted.clamp(min=how.at_least).clamp(max=how.at_most).minimum(count)

    cell = rows.cell(unit)
    size = torch.zeros_like(unit).scatter_add(1, cell, selectable.to(torch.int64))  # at the cell of the unit's name
    key = (rows.draw(SELECT, rows.position) << 31) + rows.position
    order = rows.sort(torch.where(size > 0, key, _NEVER))
    taken = _take(rows, size.gather(1, order), most, how)
    taken = torch.zeros_like(taken).scatter(1, order, taken).gather(1, cell)
    if how.exact:
        return selectable & taken
    return torch.where((most == wanted)[rows.row], drawn, selectable & taken)


def _take(rows: Rows, size: Tensor, most: Tensor, how: How) -> Tensor:
    """Which units go in, where each goes in that fits beside those before it: ``most`` tokens a row at most.

    Args:
        size: (B, S) int64, the units' tokens, in the order in which they are tried; 0 for none.
        most: (rows,) int64.

    A round takes units up to the first that does not fit, and there are not many: that one is smaller in each round,
    since the room left is, and units of 1 + 2 + ... + m tokens need a row of m (m + 1) / 2.
    """
    room, taken = most[rows.row], torch.zeros_like(size, dtype=torch.bool)
    for _ in range(math.isqrt(2 * size.shape[1]) + 1):
        fits = (size > 0) & (size <= room) & ~taken
        if size.device.type == "cpu" and not bool(fits.any()):
            break
        takes = fits & (rows.cumsum(torch.where(fits, size, 0)) <= room)
        room = room - rows.sum(torch.where(takes, size, 0))[rows.row]
        taken |= takes
    if how.at_least > 0:
        fits = (size > 0) & (size <= how.at_most)
        taken |= fits & (rows.cumsum(fits.to(torch.int64)) == 1) & (rows.sum(taken) == 0)[rows.row]
    return taken
