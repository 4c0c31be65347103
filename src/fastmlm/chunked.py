"""A linear layer and its cross-entropy in chunks of rows, with gradients computed along the way, on any device.

The logits of a chunk become its log-softmax, its softmax and then its gradient in place: one buffer of (rows, V) is all
there is at a time. Rows come in as many as a budget of memory allows, not by the ratio of V to H that kernels for large
language models use: at the shapes of encoders that ratio makes hundreds of tiny matrix products.
"""

import torch
from torch import Tensor

BUDGET = 1 << 28  # bytes of logits at a time
_LEAST_ROWS = 1024


def linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    scale: Tensor,
    ignore_index: int,
    label_smoothing: float,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Losses of the rows, and gradients of their scaled sum; arguments as :mod:`fastmlm._ops` describes them.

    Losses are float32 (float64 for float64) whatever the type of the input, and so are the sums over rows.
    """
    taken = (target != ignore_index).nonzero()[:, 0]
    everything = len(taken) == len(target)
    rows = input if everything else input.index_select(0, taken)
    labels, factors = (target, scale) if everything else (target[taken], scale[taken])
    wide = torch.promote_types(input.dtype, torch.float32)
    count, vocab_size = len(rows), len(weight)
    losses = rows.new_empty(count, dtype=wide)
    grad_rows = torch.empty_like(rows) if needs[0] else None
    grad_weight = grad_bias = None
    step = max(BUDGET // (vocab_size * wide.itemsize), _LEAST_ROWS)
    for start in range(0, count, step):
        part = slice(start, start + step)
        x, index = rows[part], labels[part, None]
        grad = _losses_and_grad(x, weight, bias, index, label_smoothing, losses[part], any(needs))
        if grad is None:
            continue
        grad *= factors[part, None]
        if needs[2]:
            sums = grad.sum(0)
            grad_bias = sums if grad_bias is None else grad_bias.add_(sums)
        grad = grad.to(rows.dtype)
        if grad_rows is not None:
            torch.mm(grad, weight, out=grad_rows[part])
        if needs[1]:
            if grad_weight is None:  # as it is, if no other chunk is to be added
                grad_weight = (grad.t() @ x).to(wide if count > step else rows.dtype)
            elif wide == rows.dtype:
                grad_weight.addmm_(grad.t(), x)
            else:
                grad_weight += grad.t() @ x
        del grad  # before the next chunk asks for its own
    losses_of_all = losses if everything else losses.new_zeros(len(target)).index_copy_(0, taken, losses)
    nothing = input.new_empty(0)
    if grad_rows is None:
        grad_input = nothing
    else:
        grad_input = grad_rows if everything else torch.zeros_like(input).index_copy_(0, taken, grad_rows)
    if needs[1]:
        grad_weight = torch.zeros_like(weight) if grad_weight is None else grad_weight.to(weight.dtype)
    if needs[2]:
        grad_bias = weight.new_zeros(vocab_size) if grad_bias is None else grad_bias.to(weight.dtype)
    return (
        losses_of_all,
        grad_input,
        nothing.clone() if grad_weight is None else grad_weight,
        nothing.clone() if grad_bias is None else grad_bias,
    )


def _losses_and_grad(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    index: Tensor,
    label_smoothing: float,
    losses: Tensor,
    with_grad: bool,
) -> Tensor | None:
    """Write the losses of a chunk; its gradients of the logits, if asked for. ``index``: the targets, (rows, 1)."""
    logits = torch.nn.functional.linear(x, weight, bias).to(losses.dtype)
    log_softmax = torch.log_softmax(logits, 1, out=logits)
    picked = log_softmax.gather(1, index)[:, 0]
    if label_smoothing:
        torch.add(-(1 - label_smoothing) * picked, log_softmax.mean(1), alpha=-label_smoothing, out=losses)
    else:
        torch.neg(picked, out=losses)
    if not with_grad:
        return None
    grad = log_softmax.exp_()
    if label_smoothing:
        grad -= label_smoothing / len(weight)
    return grad.scatter_add_(1, index, grad.new_full(index.shape, label_smoothing - 1))
