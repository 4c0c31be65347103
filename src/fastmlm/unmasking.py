"""Text from a masked language model: mask tokens are filled in over several passes, as masked diffusion samples."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from fastmlm.spec import integer


def unmask(
    model: Any,
    input_ids: Tensor,
    *,
    mask_token_id: int,
    steps: int,
    attention_mask: Tensor | None = None,
    temperature: float = 0.0,
    order: str = "confidence",
    generator: torch.Generator | None = None,
    forbidden_ids: Iterable[int] = (),
) -> Tensor:
    """``ids[masked] = model(ids).logits[masked].argmax(-1)``, of each row's n mask tokens n / steps at a time

    The sampler of masked diffusion language models (MDLM, Sahoo et al. 2024; LLaDA, Nie et al. 2025, with its schedule:
    equal shares, and what is filled in stays) for any ``*ForMaskedLM``, sparse or not. In pass t of T every mask token
    gets a candidate, and the best are taken, until the row has ``n * (t + 1) // T`` of its n filled in. T is ``steps``,
    or the most mask tokens of any row if these are fewer, which are then filled in one at a time.

    Args:
        model: in whatever mode, which it comes out in; it runs in evaluation mode, without gradients.
        input_ids: (B, S), integers. Whatever is not the mask token is a prompt, and stays.
        mask_token_id: the id that is filled in, and never with itself.
        steps: the number of passes, at least 1.
        attention_mask: (B, S), 0 where padding, of which nothing is filled in.
        temperature: 0 for the likeliest ids; else they are drawn from ``softmax(logits / temperature)``, in float64,
            since draws in float32 miss rare ids (Zheng et al. 2024).
        order: which candidates are taken: ``"confidence"``, those of the highest ``softmax(logits)`` in their row
            (MaskGIT, Chang et al. 2022), at equal ones the first, which prefers likely ids beyond the temperature; or
            ``"random"``, any, by which ids follow the law that a model of masked diffusion is trained for.
        generator: of the draws, on the device of the ids; None: PyTorch's own of that device.
        forbidden_ids: never filled in: special tokens, say, or rows of the embedding that are no tokens.

    Returns:
        The ids, (B, S), in a tensor of their own.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    if input_ids.dim() != 2 or input_ids.is_floating_point():
        raise ValueError(f"input_ids: expected integers, (B, S), got {input_ids.dtype} {tuple(input_ids.shape)}")
    if attention_mask is not None and attention_mask.shape != input_ids.shape:
        raise ValueError(f"attention_mask: expected {tuple(input_ids.shape)}, got {tuple(attention_mask.shape)}")
    integer("steps", steps, 1, 1 << 31)
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature: expected a number of at least 0, got {temperature}")
    if order not in ("confidence", "random"):
        raise ValueError(f"order: expected 'confidence' or 'random', got {order!r}")
    ids = input_ids.clone()
    masked = (ids == mask_token_id) if attention_mask is None else (ids == mask_token_id) & (attention_mask != 0)
    totals = masked.sum(1, keepdim=True)
    passes = min(steps, int(totals.max())) if ids.numel() else 0
    banned = sorted({int(id_) for id_ in (mask_token_id, *forbidden_ids)})
    inputs = {"input_ids": ids} if attention_mask is None else {"input_ids": ids, "attention_mask": attention_mask}
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        with torch.no_grad():
            for t in range(passes):
                candidates, scores = _candidates(model(**inputs).logits[masked], banned, temperature, generator)
                if order == "random":
                    scores = torch.rand(scores.shape, device=ids.device, generator=generator, dtype=scores.dtype)
                of_rows = scores.new_full(ids.shape, -math.inf).masked_scatter(masked, scores)
                place = of_rows.argsort(dim=1, descending=True, stable=True).argsort(1)  # 0 for the best of a row
                due = place < totals * (t + 1) // passes - totals * t // passes
                ids.copy_(ids.masked_scatter(masked, candidates.to(ids.dtype)).where(due, ids))
                masked &= ~due
    finally:
        for module, mode in modes:
            module.training = mode
    return ids


def _candidates(
    logits: Tensor, banned: list[int], temperature: float, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """An id for each row of (K, V), and its probability, (K,)."""
    if banned[0] < 0 or banned[-1] >= logits.shape[1] or len(banned) == logits.shape[1]:
        raise ValueError(f"forbidden_ids: expected some of the ids in [0, {logits.shape[1]}), got {banned}")
    wide = torch.float64 if temperature else torch.promote_types(logits.dtype, torch.float32)
    logits = logits.to(wide).index_fill(1, torch.tensor(banned, device=logits.device), -math.inf)
    probabilities = logits.softmax(1)
    if temperature == 0:
        ids = logits.argmax(1)
    else:
        ids = torch.multinomial((logits / temperature).softmax(1), 1, generator=generator).squeeze(1)
    return ids, probabilities.gather(1, ids[:, None]).squeeze(1)
