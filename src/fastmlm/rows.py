"""Where the rows of a batch lie, padded or packed: their positions, their draws, and sums within them."""

import torch
from torch import Tensor

from fastmlm import philox


class Rows:
    """What depends on where rows lie, for (B, S) tensors of B padded rows or (1, N) ones that ``cu_seqlens`` divides.

    A *cell* is a column of such a tensor; a *position* is counted from the row's first real token, and negative before
    it. Nothing here reads values, so no host waits for a GPU.
    """

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
        self.columns = torch.arange(shape[1], device=device)
        self.cu_seqlens = cu_seqlens
        if cu_seqlens is None:
            starts = torch.zeros(shape[0], dtype=torch.int64, device=device)
            if attention_mask is not None:
                starts = philox.first_real(attention_mask)
            self.row = torch.arange(shape[0], device=device)[:, None].expand(shape)
            self.start = starts[:, None]
            self.inside: Tensor | None = None
        else:
            self.row = (torch.searchsorted(cu_seqlens, self.columns, right=True) - 1)[None]
            # On a GPU nothing checks cu_seqlens: what no segment covers belongs to none and is left alone.
            self.inside = (self.row >= 0) & (self.row < cu_seqlens.numel() - 1)
            self.row = self.row.clamp(0, max(cu_seqlens.numel() - 2, 0))
            starts = cu_seqlens[:-1].to(torch.int64)
            if attention_mask is not None:
                real = torch.where((attention_mask != 0) & self.inside, self.columns, shape[1])[0]
                starts = torch.full_like(starts, shape[1]).scatter_reduce(0, self.row[0], real, "amin")
            self.start = starts[self.row]
        self.position = self.columns - self.start
        self.keys = torch.arange(len(starts), device=device) if row_keys is None else row_keys
        self._tables: dict[int, Tensor] = {}

    def draw(self, stream: int, position: Tensor) -> Tensor:
        """draw_t at one position for each cell, (B, S) int64."""
        position = position.clamp(0, max(position.shape[1] - 1, 0))
        if self.cu_seqlens is not None:
            return philox.draw_at(self.key, self.keys[self.row], position, stream)
        if stream not in self._tables:
            self._tables[stream] = philox.draw_rows(self.key, self.keys, position.shape[1], (stream,))[0]
        return self._tables[stream].gather(1, position)

    def cell(self, position: Tensor) -> Tensor:
        """The cell of a position of each cell's own row; in the tensor, whatever the position."""
        return (position + self.start).clamp(0, max(position.shape[1] - 1, 0))

    def ends(self) -> Tensor | int:
        """The cell after the last one of each cell's row."""
        if self.cu_seqlens is None:
            return self.position.shape[1]
        return self.cu_seqlens[1:].to(torch.int64)[self.row]

    def sum(self, values: Tensor) -> Tensor:
        """The sum over each row, (rows,) int64."""
        if self.cu_seqlens is None:
            return values.sum(1)
        return torch.zeros_like(self.keys).scatter_add(0, self.row[0], values[0].to(torch.int64))

    def cumsum(self, values: Tensor) -> Tensor:
        """The sum over each cell's row up to and with the cell, (B, S) int64."""
        total = values.cumsum(1)
        if self.cu_seqlens is None or not values.numel():
            return total
        begin = torch.where(self.row > 0, self.cu_seqlens[:-1].to(torch.int64)[self.row], 0)  # row 0 has what is before
        return total - (total - values).gather(1, begin.clamp(0, values.shape[1] - 1))

    def sort(self, keys: Tensor) -> Tensor:
        """The cells in the order of their keys, each row's within its own cells, (B, S) int64."""
        if self.cu_seqlens is None:
            return keys.argsort(dim=1)
        order = keys.argsort(dim=1)
        return order.gather(1, self.row.gather(1, order).argsort(dim=1, stable=True))
