"""Small random models and batches, to try things on: what the tests of fastmlm and of its users need.

Needs transformers.
"""

from typing import Any

import torch
import transformers
from torch import Tensor, nn

B, S, H, V = 3, 10, 16, 37
_SIZES = {"hidden_size": H, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": V}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
# RoBERTa and ESM number positions from the padding id on, so they need more of them than S.
_BERT_LIKE = {**_SIZES, **_NO_DROPOUT, "max_position_embeddings": 16}
_CONFIGS: dict[str, dict[str, Any]] = {
    "Bert": _BERT_LIKE,
    "Roberta": _BERT_LIKE,
    "DistilBert": {
        "dim": H, "n_layers": 2, "n_heads": 2, "hidden_dim": 24, "vocab_size": V, "max_position_embeddings": 16,
        "dropout": 0.0, "attention_dropout": 0.0,
    },
    "ModernBert": {**_SIZES, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1,
                   "sep_token_id": 2, "max_position_embeddings": 16},
    "Esm": {**_BERT_LIKE, "pad_token_id": 1, "mask_token_id": V - 1, "position_embedding_type": "rotary",
            "token_dropout": True},
}  # fmt: skip
MASKED_LM_NAMES = tuple(_CONFIGS)

# Dense and sparse run the same float64 operations on differently shaped matrices: sums come out in another order, which
# costs some 1e-15 of numbers of size 1 to 10. 1e-10 leaves room for BLAS and is far below what one wrong row changes.
CLOSE: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-12}


def perturb(model: nn.Module) -> None:
    """Noise on every parameter: biases start at zero and norms at one, and could hide what is forgotten or doubled."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))


def make_config(name: str = "Bert", **overrides: Any) -> Any:
    """The configuration of a model of a few thousand parameters."""
    return getattr(transformers, f"{name}Config")(**{**_CONFIGS[name], **overrides})


def make_model(name: str = "Bert", cls: Any = None, **overrides: Any) -> Any:
    """A random float64 model `<name>ForMaskedLM`, or of a class given, in training mode and without dropout."""
    torch.manual_seed(0)
    model = (cls or getattr(transformers, f"{name}ForMaskedLM"))(make_config(name, **overrides)).double().train()
    perturb(model)
    return model


def make_batch(seed: int = 0, counts: tuple[int, ...] = (4, 1, 2)) -> dict[str, Tensor]:
    """Rows of length S - row with as many selected tokens as `counts` says."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(3, V - 1, (len(counts), S), generator=generator)
    attention_mask = torch.ones_like(input_ids)
    labels = torch.full_like(input_ids, -100)
    for row, count in enumerate(counts):
        attention_mask[row, S - row :] = 0
        positions = torch.randperm(S - row, generator=generator)[:count]
        labels[row, positions] = torch.randint(V, (count,), generator=generator)
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """The gradient of every parameter that has one, by name; nothing is accumulated in ``.grad``."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return {name: g for name, g in zip(names, found, strict=True) if g is not None}


def dense_loss(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """``F.cross_entropy(model(...).logits.view(-1, V), labels.view(-1))``; not ModernBERT's own, which is float32."""
    logits = model(**{key: value for key, value in inputs.items() if key != "labels"}).logits
    return nn.functional.cross_entropy(logits.flatten(0, -2), inputs["labels"].view(-1))


def assert_same_training(sparse: Any, dense: Any, inputs: dict[str, Tensor]) -> None:
    """Two float64 models give the same loss and the same gradient of every parameter."""
    expected, got = dense_loss(dense, inputs), sparse(**inputs).loss
    torch.testing.assert_close(got, expected, **CLOSE)
    torch.testing.assert_close(gradients(sparse, got), gradients(dense, expected), **CLOSE)
