"""The running call of a sparse model: what `fastmlm.head`'s hooks share."""

import dataclasses
from contextvars import ContextVar

import torch
from torch import Tensor, nn

from fastmlm.selection import labels_at, take_rows

IGNORE_INDEX = -100  # what the models themselves ignore; not ours to choose


@dataclasses.dataclass(frozen=True)
class Selection:
    """What a running call takes part with: N flat labels, the K rows among them, weights and divisor of the loss."""

    labels: Tensor
    rows: Tensor
    given: bool  # the rows came with the call, and may be fewer than K
    weights: Tensor | None  # of the N positions
    divisor: int | Tensor | None  # of the sum of losses; None: the number of selected tokens
    pair_labels: Tensor | None

    def labels_of_rows(self, device: torch.device) -> Tensor:
        """The labels of the selected rows, (K,)."""
        return self._of_rows(self.labels, IGNORE_INDEX).to(device)

    def weights_of_rows(self, device: torch.device) -> Tensor | None:
        """What the losses of the selected rows are multiplied by, (K,); None: by nothing."""
        return None if self.weights is None else self._of_rows(self.weights, 0).to(device)

    def _of_rows(self, flat: Tensor, unused: int) -> Tensor:
        return labels_at(flat, self.rows, unused) if self.given else flat.index_select(0, self.rows)

    def take(self, x: Tensor) -> Tensor:
        """The selected rows of (..., D), as (1, K, D): a batch of one sequence, which any head accepts."""
        if x.shape[:-1].numel() != self.labels.numel():
            raise ValueError(f"labels hold {self.labels.numel()} positions, but the model made {tuple(x.shape[:-1])}")
        flat, rows = x.reshape(-1, x.shape[-1]), self.rows.to(x.device)
        return (take_rows(flat, rows) if self.given else flat.index_select(0, rows)).unsqueeze(0)


@dataclasses.dataclass(frozen=True)
class Call:
    """One running call of a sparse model; `outer` is the call it runs inside of."""

    model: nn.Module
    selection: Selection | None
    sparse: bool  # whether the head sees the selected rows alone
    outer: "Call | None"
    losses: list[Tensor] = dataclasses.field(default_factory=list)  # one, where it was computed before the decoder


class _Traced:
    """The call being traced by `torch.compile`, or left by a graph that broke inside of it.

    One for all threads, for what is compiled cannot set a thread's own. Hooks see that it is not theirs by the model.
    """

    def __init__(self) -> None:
        self.call: Call | None = None


_CALL: ContextVar[Call | None] = ContextVar("fastmlm_call", default=None)
TRACED = _Traced()


def is_traced() -> bool:
    """Whether this very code is being compiled; ``is_compiling`` says so while any thread compiles anything."""
    return torch.compiler.is_dynamo_compiling()


def running() -> Call | None:
    """The call that hooks belong to: the innermost one."""
    return TRACED.call if is_traced() else _CALL.get() or TRACED.call


def enter(model: nn.Module, selection: Selection | None, sparse: bool) -> None:
    """Open a call."""
    if is_traced():
        TRACED.call = Call(model, selection, sparse, TRACED.call)
    else:
        _CALL.set(Call(model, selection, sparse, _CALL.get()))


def leave(call: Call) -> None:
    """Close the running call."""
    if call is TRACED.call:
        TRACED.call = call.outer
    else:
        _CALL.set(call.outer)
