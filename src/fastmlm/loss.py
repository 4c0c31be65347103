"""The loss of masked language modelling: over rows of logits, or over hidden states without holding their logits."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastmlm import _ops
from fastmlm.chunked import all_taken, rank_of_targets
from fastmlm.dispatch import check_name


def masked_lm_loss(
    logits: Tensor,
    labels: Tensor,
    *,
    num_items_in_batch: int | Tensor | None = None,
    weight_per_row: Tensor | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """``F.cross_entropy(logits.float(), labels, ignore_index=-100, reduction="sum") / (labels != -100).sum()``

    With ``num_items_in_batch``, the number of selected tokens of the whole optimizer step, the sum is divided by that
    instead, so micro-batches of uneven size add up to the loss of one large batch. Nothing selected gives exactly 0
    with a ``grad_fn`` and zero gradients, never NaN: a divisor of 0 counts as 1.

    Args:
        logits: (K, V), any floating dtype. float16 and bfloat16 are computed in float32; float64 stays float64, so that
            the loss can be checked against a float64 truth.
        labels: (K,), int32 or int64 in ``[0, V)``, or ``ignore_index`` for rows that do not take part. Id 0 is an
            ordinary label.
        num_items_in_batch: an int, or a tensor of one element on any device. It is never read on the host.
        weight_per_row: (K,), what the loss of each row is multiplied by (masked diffusion: 1 / p). Of rows that do not
            take part it is not looked at.

    Returns:
        A scalar, float32 (float64 for float64 logits).

    Raises:
        ValueError: the shapes do not fit.
        TypeError: ``logits`` is not floating, or ``labels`` neither int32 nor int64.
    """
    if logits.dim() != 2 or labels.shape != logits.shape[:1]:
        raise ValueError(
            f"logits must be (K, V) and labels (K,), got logits {tuple(logits.shape)} and labels {tuple(labels.shape)}"
        )
    if not logits.is_floating_point():
        raise TypeError(f"logits must be floating point, got {logits.dtype}")
    if labels.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"labels must be int32 or int64, got {labels.dtype}")
    if weight_per_row is not None and weight_per_row.shape != labels.shape:
        raise ValueError(f"weight_per_row must be {tuple(labels.shape)}, got {tuple(weight_per_row.shape)}")
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    reduction = "sum" if weight_per_row is None else "none"
    total = F.cross_entropy(logits, labels.long(), ignore_index=ignore_index, reduction=reduction)
    if weight_per_row is not None:
        # Where ignored it may be NaN, and 0 times NaN is not 0.
        total = (total * weight_per_row.to(total).masked_fill(labels == ignore_index, 0)).sum()
    if num_items_in_batch is None:
        num_items_in_batch = labels.ne(ignore_index).sum()
    if isinstance(num_items_in_batch, Tensor):
        return total / num_items_in_batch.to(total).reshape(()).clamp(min=1)
    return total / max(num_items_in_batch, 1)


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight_per_row: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    impl: str | None = None,
) -> Tensor:
    """``F.cross_entropy(F.linear(input, linear_weight, linear_bias).float(), target, reduction="mean")``

    Ignored rows are dropped before they are multiplied, the rest go through in chunks (:mod:`fastmlm.chunked`), and
    gradients are computed with the loss, so the logits of all rows never exist at once. They are computed anew in the
    backward pass with ``reduction="none"``, and in float16, where a scaled loss must scale them before they are
    rounded. Gradients of gradients hold all logits; ``torch.func`` is not served.

    On a GPU nothing is read on the host, so that CUDA graphs can hold it: ignored rows are multiplied like others and
    then passed over, whatever is in them. Where they are many, take the selected rows first (`fastmlm.select_rows`).
    On a CPU, with less than half as many ids as H and no ignored row, it is the line above, which is then the fastest.

    Args:
        input: (..., H), any floating type; under autocast, its type.
        linear_weight: (V, H). Its gradient is summed in float32 at least; in bfloat16 on the CPU in 24 bits, of which
            16 are of precision where the gradient itself has 8.
        target: (...), int32 or int64, in [0, V) or ``ignore_index``.
        linear_bias: (V,).
        weight_per_row: (...), what the loss of each row is multiplied by (masked diffusion: 1 / p); has no gradient.
        ignore_index: rows of this target take no part.
        reduction: ``"mean"`` over the rows that take part, whatever their weights; ``"sum"``; or ``"none"``, (...) with
            0 where ignored.
        label_smoothing: share of each target spread evenly over all of V.
        impl: ``"reference"``, which waits for a GPU to count the rows; ``"cpp"`` on the CPU, which treats float32 and
            bfloat16 in native code; ``"triton"`` on a GPU; None: the fastest. They differ by rounding.

    Returns:
        The loss, float32 (float64 for float64 input); exactly 0 with zero gradients where no row takes part.

    Raises:
        TypeError, ValueError: naming the argument. Targets are checked on the CPU only; on a GPU a wrong one makes the
            loss NaN.
        RuntimeError: ``impl`` cannot run here.
    """
    settings = Settings(ignore_index, label_smoothing, reduction, impl)
    loss, _ = loss_and_ranks(input, linear_weight, target, linear_bias, weight_per_row, settings, with_ranks=False)
    return loss


def masked_accuracy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    top_k: int = 1,
    ignore_index: int = -100,
    impl: str | None = None,
) -> Tensor:
    """``(F.linear(input, linear_weight, linear_bias).topk(top_k).indices == target[:, None]).any(1).float().mean()``

    How often the target is among the ``top_k`` likeliest ids, over the rows that are not ignored, without holding the
    logits of all rows. Of ids with equal logits the first counts as the likelier one.

    Args:
        input: (..., H), any floating type; under autocast, its type.
        linear_weight: (V, H).
        target: (...), int32 or int64, in [0, V) or ``ignore_index``.
        linear_bias: (V,).
        top_k: 1 or more.
        ignore_index: rows of this target take no part.
        impl: as of `linear_cross_entropy`.

    Returns:
        A scalar, float32, in [0, 1]; NaN where no row takes part. It has no gradient.

    Raises:
        TypeError, ValueError: naming the argument. Targets are checked on the CPU only.
        RuntimeError: ``impl`` cannot run here.
    """
    check_top_k(top_k)
    with torch.no_grad():
        settings = Settings(ignore_index=ignore_index, impl=impl)
        _, ranks = loss_and_ranks(input, linear_weight, target, linear_bias, None, settings, with_ranks=True)
        return ((ranks >= 0) & (ranks < top_k)).sum() / (ranks >= 0).sum()


class Settings(NamedTuple):
    """The arguments of `linear_cross_entropy` that are no tensors."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    reduction: str = "mean"
    impl: str | None = None


def loss_and_ranks(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight_per_row: Tensor | None,
    settings: Settings,
    *,
    with_ranks: bool,
) -> tuple[Tensor, Tensor]:
    """The loss and, if asked for, how many ids beat each target, (...) int64, -1 where ignored."""
    device = input.device.type
    casts = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    cast = casts and input.dtype != torch.float64
    _check_linear(input, linear_weight, target, linear_bias, weight_per_row, settings, cast)
    if cast:  # as F.linear does
        dtype = torch.get_autocast_dtype(device)
        input, linear_weight = input.to(dtype), linear_weight.to(dtype)
        linear_bias = None if linear_bias is None else linear_bias.to(dtype)
    wide = torch.promote_types(input.dtype, torch.float32)
    scale = None if weight_per_row is None else weight_per_row.reshape(-1).to(wide)
    tensors = (input, linear_weight, linear_bias)
    needs = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in tensors]
    rows = input if input.dim() == 2 else input[None].flatten(0, -2)  # a view costs time of its own
    labels = (target if target.dim() == 1 else target.reshape(-1)).long()
    if _is_small(rows, linear_weight, labels, settings):
        return _of_few_ids(rows, linear_weight, linear_bias, labels, scale, settings, target.shape, with_ranks)
    loss, ranks = _LinearCrossEntropy.apply(
        rows, linear_weight, linear_bias, labels, scale, settings, needs, with_ranks
    )
    reduced = settings.reduction != "none"
    return loss if reduced else loss.reshape(target.shape), ranks.reshape(target.shape) if with_ranks else ranks


def _is_small(rows: Tensor, weight: Tensor, labels: Tensor, settings: Settings) -> bool:
    """Whether the logits are no matter beside the input: then PyTorch's own way is the fastest.

    So it is for proteins, with 33 ids (measured on a CPU). With rows to be dropped, it is not.
    """
    if settings.impl is not None or 2 * len(weight) > rows.shape[1] or torch.compiler.is_compiling():
        return False
    readable = labels.device.type == "cpu" and type(labels) is Tensor
    return readable and all_taken(labels, len(weight), settings.ignore_index)


def _of_few_ids(
    rows: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, scale: Tensor | None, settings: Settings,
    shape: torch.Size, with_ranks: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    logits = F.linear(rows, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    reduction = settings.reduction if scale is None else "none"
    loss = F.cross_entropy(logits, labels, label_smoothing=settings.label_smoothing, reduction=reduction)
    if scale is not None:
        loss = loss * scale
        loss = loss if settings.reduction == "none" else loss.sum()
        loss = loss / len(labels) if settings.reduction == "mean" else loss
    ranks = rank_of_targets(logits.detach(), labels).reshape(shape) if with_ranks else labels
    return loss.reshape(shape) if settings.reduction == "none" else loss, ranks


class _LinearCrossEntropy(torch.autograd.Function):
    """The loss, its gradients computed in the forward pass; or of each row, with gradients later.

    Gradients are given away by the first backward pass, without a copy; another one computes them anew.
    """

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, scale: Tensor | None,
        settings: Settings, needs: list[bool], with_ranks: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.settings, ctx.needs = settings, needs
        ignore_index, label_smoothing, reduction, impl = settings
        now = needs if reduction != "none" and input.dtype != torch.float16 else [False] * 3
        given = (input, weight, bias, target, scale, ignore_index, label_smoothing, reduction)
        loss, *gradients, ranks = _ops.linear_cross_entropy(*given, now, with_ranks, impl or "")
        ctx.save_for_backward(input, weight, bias, target, scale)
        ctx.gradients = gradients if any(now) else None
        ctx.mark_non_differentiable(ranks)
        return loss, ranks

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, _: Tensor) -> tuple[Any, ...]:
        ignore_index, label_smoothing, reduction, impl = ctx.settings
        gradients, ctx.gradients = ctx.gradients, None
        input, weight, bias, target, scale = ctx.saved_tensors
        if torch.is_grad_enabled():  # somebody wants gradients of these gradients
            # Views, since the graph before them may lead from the weight to the input, as tied ones do.
            input, weight = input.view_as(input), weight.view_as(weight)
            bias = None if bias is None else bias.view_as(bias)
            asked_for = [tensor for tensor, needed in zip((input, weight, bias), ctx.needs, strict=True) if needed]
            loss = _eager(input, weight, bias, target, scale, ctx.settings)
            found = iter(torch.autograd.grad((loss * grad_output).sum(), asked_for, create_graph=True))
            gradients = [next(found) if needed else None for needed in ctx.needs]
        elif gradients is None:
            share = grad_output.expand(target.shape).contiguous()
            share = share if scale is None else share * scale
            reduction = "sum" if reduction == "none" else reduction
            given = (input, weight, bias, target, share, ignore_index, label_smoothing, reduction)
            _, *gradients, _ = _ops.linear_cross_entropy(*given, ctx.needs, False, impl or "")
        elif torch.compiler.is_compiling() or type(grad_output) is not Tensor:
            # In the wider type: not to round the factor to bfloat16.
            gradients = [(gradient.to(grad_output.dtype) * grad_output).to(gradient.dtype) for gradient in gradients]
        elif grad_output.device.type == "cpu":
            factor = grad_output.item()
            gradients = gradients if factor == 1 else [gradient.mul_(factor) for gradient in gradients]
        else:  # a factor of one dimension counts in the type of the product, which is then the wider one as well
            gradients = [gradient.mul_(grad_output.reshape(1)) for gradient in gradients]
        asked = [gradient if needed else None for gradient, needed in zip(gradients, ctx.needs, strict=True)]
        return *asked, None, None, None, None, None


def _eager(
    input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, scale: Tensor | None, settings: Settings
) -> Tensor:
    """The loss as PyTorch has it, which can be differentiated any number of times."""
    logits = F.linear(input, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    ignore_index, label_smoothing, reduction, _ = settings
    losses = F.cross_entropy(
        logits, target, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none"
    )
    losses = losses if scale is None else losses * scale
    if reduction == "none":
        return losses
    return losses.sum() / (target.ne(ignore_index).sum().clamp(min=1) if reduction == "mean" else 1)


def check_top_k(top_k: object) -> None:
    """Raise ValueError unless it is a whole number of at least 1."""
    if not isinstance(top_k, int) or isinstance(top_k, bool) or top_k < 1:
        raise ValueError(f"top_k: expected a whole number of at least 1, got {top_k!r}")


def _check_linear(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    weight_per_row: Tensor | None,
    settings: Settings,
    cast: bool,
) -> None:
    """Raise unless the arguments fit; with `cast`, types become the same."""
    check_name(settings.impl)
    if not input.is_floating_point() or input.dim() < 1:
        raise TypeError(f"input: expected floating numbers, (..., H), got {_describe(input)}")
    if weight.dim() != 2 or weight.shape[1] != input.shape[-1] or not (cast or weight.dtype == input.dtype):
        raise ValueError(
            f"linear_weight: expected (V, {input.shape[-1]}) {input.dtype}, like input, got {_describe(weight)}"
        )
    if target.dtype not in (torch.int32, torch.int64) or target.shape != input.shape[:-1]:
        raise ValueError(f"target: expected int32 or int64 {tuple(input.shape[:-1])}, got {_describe(target)}")
    if bias is not None and (bias.shape != weight.shape[:1] or not (cast or bias.dtype == weight.dtype)):
        raise ValueError(f"linear_bias: expected {tuple(weight.shape[:1])} {weight.dtype}, got {_describe(bias)}")
    if weight_per_row is not None and weight_per_row.shape != target.shape:
        raise ValueError(f"weight_per_row: expected the shape of target, got {_describe(weight_per_row)}")
    if weight_per_row is not None and weight_per_row.requires_grad:
        raise ValueError("weight_per_row: expected numbers without a gradient, got a tensor that requires one")
    if not isinstance(settings.ignore_index, int):
        raise TypeError(f"ignore_index: expected an int, got {settings.ignore_index!r}")
    if settings.reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction: expected 'mean', 'sum' or 'none', got {settings.reduction!r}")
    if not 0 <= settings.label_smoothing <= 1:
        raise ValueError(f"label_smoothing: expected a number between 0 and 1, got {settings.label_smoothing!r}")


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}"
