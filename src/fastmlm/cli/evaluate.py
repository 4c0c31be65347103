"""Validation loss and filled-in masks, computed by the model's own dense head on both sides of a comparison."""

from typing import TYPE_CHECKING, Any

import torch

from fastmlm.cli.prepare import Validation

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Few rows at a time: the logits of validation must not be what sets a run's peak memory.
_ROWS = 4
_IGNORED = -100
_CONTEXT = 6  # tokens shown on either side of a filled-in mask


@torch.no_grad()
def validation_loss(model: "PreTrainedModel", validation: Validation) -> float:
    """Mean cross entropy in nats over all selected tokens of the validation rows."""
    was_training = model.training
    model.eval()
    total, count = 0.0, 0
    for start in range(0, len(validation["labels"]), _ROWS):
        part = {name: tensor[start : start + _ROWS].to(model.device) for name, tensor in validation.items()}
        logits = model(input_ids=part["input_ids"], attention_mask=part["attention_mask"]).logits
        selected = part["labels"] != _IGNORED
        labels = part["labels"][selected]
        total += torch.nn.functional.cross_entropy(logits[selected].double(), labels, reduction="sum").item()
        count += labels.numel()
    model.train(was_training)
    return total / max(count, 1)


@torch.no_grad()
def fill_masks(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", validation: Validation, count: int
) -> list[dict[str, Any]]:
    """Hide a word of each of the first ``count`` validation rows, the middle one of those selected, and fill it in.

    Each entry has the text before and after, the answer, and the five best candidates with their probabilities.
    """
    model.eval()
    filled: list[dict[str, Any]] = []
    for ids, attention, labels in zip(
        validation["original_ids"], validation["attention_mask"], validation["labels"], strict=True
    ):
        selected = (labels != _IGNORED).nonzero().flatten().tolist()
        words = [at for at in selected if tokenizer.convert_ids_to_tokens(ids[at].item()).isalpha()]
        if not words or len(filled) == count:
            continue
        at = words[len(words) // 2]
        hidden = ids.clone()
        hidden[at] = tokenizer.mask_token_id
        logits = model(input_ids=hidden[None].to(model.device), attention_mask=attention[None].to(model.device)).logits
        best = logits[0, at].float().softmax(-1).topk(5)
        tokens = tokenizer.convert_ids_to_tokens(best.indices.tolist())
        filled.append(
            {
                "before": tokenizer.decode(ids[max(0, at - _CONTEXT) : at], skip_special_tokens=True),
                "after": tokenizer.decode(ids[at + 1 : at + 1 + _CONTEXT], skip_special_tokens=True),
                "answer": tokenizer.convert_ids_to_tokens(ids[at].item()),
                "candidates": list(zip(tokens, best.values.tolist(), strict=True)),
            }
        )
    return filled
