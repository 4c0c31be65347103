"""A linear layer and its cross-entropy in chunks of rows, with gradients computed along the way, on any device.

One buffer holds the logits of a chunk, which become their gradients in place: (rows, V) is all there is at a time. The
chunks are not sized by the ratio of V to H, as kernels for large language models size them: at the shapes of encoders
that makes hundreds of tiny matrix products.
"""

import torch
from torch import Tensor


class Chunks:
    """What is done with a chunk of rows; the kernels of a device override what it does better in another way."""

    # Whether ignored rows are taken out before they are multiplied, for which the host must know how many they are;
    # else `cross_entropy` comes to see them, and gives them a loss and gradients of 0 and a rank of -1.
    drops_ignored = True

    def rows(self, count: int, weight: Tensor) -> int:
        """How many of ``count`` rows to take at a time: as many as fit a budget of memory, and at least 1024."""
        return max((1 << 28) // max(len(weight) * weight.itemsize, 1), 1024)

    def buffer(self, like: Tensor, rows: int, vocab_size: int) -> Tensor:
        """Where the logits of a chunk go, (rows, V)."""
        return like.new_empty(rows, vocab_size)

    def project(self, x: Tensor, weight: Tensor, logits: Tensor) -> None:
        """``logits.copy_(x @ weight.t())``"""
        torch.mm(x, weight.t(), out=logits)

    def cross_entropy(
        self, logits: Tensor, bias: Tensor | None, target: Tensor, scale: Tensor, label_smoothing: float,
        losses: Tensor, grad_bias: Tensor | None, ranks: Tensor | None, with_grad: bool,
    ) -> None:  # fmt: skip
        """Write the losses of a chunk; put the gradients of (losses * scale).sum() in place of its logits.

        Losses and scale are float32 at least, and so is ``grad_bias``, to which the gradients are added. ``ranks``
        takes how many ids have a larger logit than the target, or as large a one and come before it.
        """
        wide = logits.to(losses.dtype)  # the logits themselves, if they are
        if bias is not None:
            wide = wide.add_(bias) if wide is logits else wide + bias
        index = target[:, None]
        if ranks is not None:
            ranks.copy_(rank_of_targets(wide, target))
        log_softmax = torch.log_softmax(wide, 1, out=wide)
        picked = log_softmax.gather(1, index)[:, 0]
        if label_smoothing:
            torch.add(-(1 - label_smoothing) * picked, log_softmax.mean(1), alpha=-label_smoothing, out=losses)
        else:
            torch.neg(picked, out=losses)
        if not with_grad:
            return
        grad = log_softmax.exp_()
        if label_smoothing:
            grad -= label_smoothing / logits.shape[1]
        grad.scatter_add_(1, index, grad.new_full(index.shape, label_smoothing - 1)).mul_(scale[:, None])
        if grad_bias is not None:
            grad_bias += grad.sum(0)
        if grad is not logits:
            logits.copy_(grad)

    def weight_gradient(self, weight: Tensor, several: bool) -> "WeightGradient":
        """Where the gradients of the weight from one chunk or several are added up."""
        return WeightGradient(weight, several)


class WeightGradient:
    """The sum of ``grad.t() @ x`` over chunks: in float32 at least, if there are several of them."""

    def __init__(self, weight: Tensor, several: bool) -> None:
        self.dtype = weight.dtype
        dtype = torch.promote_types(weight.dtype, torch.float32) if several else weight.dtype
        self.sum = torch.empty_like(weight, dtype=dtype, memory_format=torch.contiguous_format)
        self.empty = True

    def add(self, grad: Tensor, x: Tensor) -> None:
        if self.sum.dtype == x.dtype:
            torch.addmm(self.sum, grad.t(), x, beta=0 if self.empty else 1, out=self.sum)
        elif self.empty:
            self.sum.copy_(grad.t() @ x)
        else:
            self.sum += grad.t() @ x
        self.empty = False

    def total(self) -> Tensor:
        return self.sum.zero_().to(self.dtype) if self.empty else self.sum.to(self.dtype)


def rank_of_targets(logits: Tensor, target: Tensor) -> Tensor:
    """How many ids beat each row's target, (rows,): by a larger logit, or by an equal one and coming before it.

    Numbers that are NaN beat every other, and those that are not beat a target that is.
    """
    chosen = logits.gather(1, target[:, None])
    beating = (logits <= chosen).logical_not_()
    equal_before = (logits == chosen) & (torch.arange(logits.shape[1], device=logits.device) < target[:, None])
    return beating.sum(1) + equal_before.sum(1)


def linear_cross_entropy(
    input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, scale: Tensor | None, ignore_index: int,
    label_smoothing: float, reduction: str, needs: list[bool], with_ranks: bool, *,
    chunks: Chunks = Chunks(),  # noqa: B008
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The loss, its gradients and the targets' ranks; arguments and results as :mod:`fastmlm._ops` describes them.

    Losses are float32 (float64 for float64) whatever the type of the input, and so are the sums over rows.
    """
    taken = _taken(target, len(weight), ignore_index) if chunks.drops_ignored else None
    ignored = None if chunks.drops_ignored else target == ignore_index
    rows, labels = (input, target) if taken is None else (input.index_select(0, taken), target.index_select(0, taken))
    wide = torch.promote_types(input.dtype, torch.float32)
    count, vocab_size = len(rows), len(weight)
    labels, losses = labels.contiguous(), input.new_empty(count, dtype=wide)
    scale = scale if scale is None or taken is None else scale.index_select(0, taken)
    factors = _factors(losses, scale, ignored, reduction)
    parts = -(-count // chunks.rows(count, weight))
    step = -(-count // max(parts, 1))  # of one size: a rest of few rows would be a poor matrix product
    buffer = chunks.buffer(input, step, vocab_size)
    ranks = labels.new_empty(count) if with_ranks else None
    grad_rows = torch.empty_like(rows, memory_format=torch.contiguous_format) if needs[0] else None
    grad_weight = chunks.weight_gradient(weight, parts > 1) if needs[1] else None
    grad_bias = weight.new_zeros(vocab_size, dtype=wide) if needs[2] else None
    for start in range(0, count, max(step, 1)):
        part = slice(start, min(start + step, count))
        x, logits = rows[part], buffer[: part.stop - start]
        if ignored is not None:  # they may be NaN, and 0 times NaN is not 0
            x = x.masked_fill(ignored[part, None], 0)
        chunks.project(x, weight, logits)
        chunks.cross_entropy(
            logits, bias, labels[part], factors[part], label_smoothing, losses[part], grad_bias,
            None if ranks is None else ranks[part], any(needs),
        )  # fmt: skip
        if grad_rows is not None:
            torch.mm(logits, weight, out=grad_rows[part])
        if grad_weight is not None:
            grad_weight.add(logits, x)
        del logits
    del buffer  # before sums are rounded, which may take a copy
    scaled = losses.mul_(factors)
    nothing = input.new_empty(0)
    return (
        _put_back(scaled, taken, len(target), 0) if reduction == "none" else scaled.sum(),
        nothing if grad_rows is None else _put_back(grad_rows, taken, len(target), 0),
        nothing.clone() if grad_weight is None else grad_weight.total(),
        nothing.clone() if grad_bias is None else grad_bias.to(weight.dtype),
        labels.new_empty(0) if ranks is None else _put_back(ranks, taken, len(target), -1),
    )


def all_taken(target: Tensor, vocab_size: int, ignore_index: int) -> bool:
    """Whether the lowest and the highest target tell that no row is ignored and none is out of range."""
    if not target.numel():
        return False
    low, high = (int(bound) for bound in target.aminmax())
    return low >= 0 and high < vocab_size and not low <= ignore_index <= high


def _taken(target: Tensor, vocab_size: int, ignore_index: int) -> Tensor | None:
    """The indices of the rows that are not ignored; None: all of them. On the CPU, targets are checked."""
    if target.device.type == "cpu" and all_taken(target, vocab_size, ignore_index):
        return None
    taken = (target != ignore_index).nonzero()[:, 0]
    if target.device.type == "cpu":
        labels = target.index_select(0, taken)
        wrong = labels[(labels < 0) | (labels >= vocab_size)]
        if len(wrong):
            raise ValueError(f"target: expected ids in [0, {vocab_size}) or {ignore_index}, got {wrong[0].item()}")
    return None if len(taken) == len(target) else taken


def _factors(losses: Tensor, scale: Tensor | None, ignored: Tensor | None, reduction: str) -> Tensor:
    """What each of the losses is multiplied by; 0 if ignored. Dense, whatever the scale is."""
    mean = reduction == "mean"
    if ignored is None:
        share = 1 / max(len(losses), 1) if mean else 1.0
        return torch.full_like(losses, share) if scale is None else scale * share
    scale = torch.ones_like(losses) if scale is None else scale
    scale = scale / (~ignored).sum() if mean else scale
    return scale.masked_fill(ignored, 0)


def _put_back(x: Tensor, taken: Tensor | None, count: int, fill: int) -> Tensor:
    """Rows that were taken, where they were taken from; the others filled."""
    return x if taken is None else x.new_full((count, *x.shape[1:]), fill).index_copy_(0, taken, x)
