"""The loss of masked language modelling over rows of logits."""

import torch
import torch.nn.functional as F
from torch import Tensor


def masked_lm_loss(
    logits: Tensor,
    labels: Tensor,
    *,
    num_items_in_batch: int | Tensor | None = None,
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
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    total = F.cross_entropy(logits, labels.long(), ignore_index=ignore_index, reduction="sum")
    if num_items_in_batch is None:
        num_items_in_batch = labels.ne(ignore_index).sum()
    if isinstance(num_items_in_batch, Tensor):
        return total / num_items_in_batch.to(total).reshape(()).clamp(min=1)
    return total / max(num_items_in_batch, 1)
