"""Small random models and batches, to try things on: what the tests of fastmlm and of its users need.

Needs transformers.
"""

import math
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

B, S, H, V = 3, 10, 16, 37

# What configurations call their sizes, and small values for them; each takes those it knows.
_SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "embedding_size", "emb_dim", "dim", "d_model", "pooler_hidden_size"), H),
    **dict.fromkeys(("num_hidden_layers", "n_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_heads", "encoder_attention_heads", "decoder_attention_heads"), 2),
    **dict.fromkeys(("intermediate_size", "hidden_dim", "encoder_ffn_dim", "decoder_ffn_dim"), 24),
    "num_key_value_heads": 2, "head_dim": H // 2, "vocab_size": V,
    "max_position_embeddings": 16,  # more than S, since RoBERTa and its like number positions from the padding id on
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2,
}  # fmt: skip
_TEXT = {name: _SMALL[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
                                         "vocab_size", "max_position_embeddings", "pad_token_id", "bos_token_id",
                                         "eos_token_id", "cls_token_id", "sep_token_id")}  # fmt: skip
_IMAGES = {"hidden_size": H, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
           "image_size": 32, "patch_size": 16}  # fmt: skip
# What single classes need besides, to be small or to be built at all.
_OWN: dict[str, dict[str, Any]] = {
    "EsmForMaskedLM": {"pad_token_id": 1, "mask_token_id": V - 1, "position_embedding_type": "rotary",
                       "token_dropout": True},
    "FunnelForMaskedLM": {"block_sizes": [1, 1], "n_head": 2, "d_head": 8, "d_inner": 24, "num_decoder_layers": 1},
    "LayoutLMForMaskedLM": {"max_2d_position_embeddings": 4},
    "LongformerForMaskedLM": {"attention_window": 4},
    "LukeForMaskedLM": {"entity_vocab_size": 5, "entity_emb_size": 8},
    "MobileBertForMaskedLM": {"embedding_size": 8, "intra_bottleneck_size": H, "num_feedforward_networks": 1},
    "ModernVBertForMaskedLM": {"text_config": {**_TEXT, "model_type": "modernbert"},
                               "vision_config": _IMAGES, "image_token_id": V - 1, "pixel_shuffle_factor": 1},
    "NeoMMEForMaskedLM": {"embedding_rank": 8, "head_dim": 16, "layer_types": ["sliding_attention", "full_attention"],
                          "per_layer_config": None, "embedding_dim": 8, "patch_size": 4},
    "PerceiverForMaskedLM": {"num_latents": 4, "d_latents": H, "num_self_attends_per_block": 1, "qk_channels": H,
                             "v_channels": H, "num_self_attention_heads": 2, "num_cross_attention_heads": 2,
                             "max_position_embeddings": S},
    "ReformerForMaskedLM": {"attention_head_size": 8, "attn_layers": ["local"], "num_hidden_layers": 1,
                            "axial_pos_shape": [4, 3], "axial_pos_embds_dim": [8, 8], "feed_forward_size": 24,
                            "local_attn_chunk_length": 4, "is_decoder": False},
    "RemBertForMaskedLM": {"input_embedding_size": 8, "output_embedding_size": H},
    "RobertaForMaskedLM": {"pad_token_id": 1, "bos_token_id": 0},
    "RoCBertForMaskedLM": {"pronunciation_embed_dim": 4, "pronunciation_vocab_size": 5, "shape_embed_dim": 4,
                           "shape_vocab_size": 5},
    "TapasForMaskedLM": {"max_num_rows": 4, "max_num_columns": 4, "type_vocab_sizes": [3] * 7},
    "UltrabertForMaskedLM": {"prediction_head_size": H},
    "UltraVBertForMaskedLM": {"text_config": {**_TEXT, "num_key_value_heads": 2, "head_dim": 8,
                                              "prediction_head_size": H},
                              "vision_config": _IMAGES, "image_token_id": V - 1, "pixel_shuffle_factor": 1},
    "XmodForMaskedLM": {"default_language": "en_XX"},
}  # fmt: skip
_LENGTHS = {"ReformerForMaskedLM": 12}  # the product of its axes
_UNPADDED = {"LongformerForMaskedLM"}  # a window of nothing but padding makes its own gradients NaN
_SINGLE = {"MraForMaskedLM"}  # computes its attention in float32, and fails where the rest is float64

MASKED_LM_NAMES = ("Bert", "Roberta", "DistilBert", "ModernBert", "Esm")
MASKED_LM_CLASSES = tuple(sorted(set(MODEL_FOR_MASKED_LM_MAPPING_NAMES.values())))
"""All classes that transformers lists for masked language modelling."""

# Dense and sparse run the same float64 operations on differently shaped matrices: sums come out in another order, which
# costs some 1e-15 of numbers of size 1 to 10. 1e-10 leaves room for BLAS and is far below what one wrong row changes.
CLOSE: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-12}


def perturb(model: nn.Module) -> None:
    """Noise on every parameter: biases start at zero and norms at one, and could hide what is forgotten or doubled."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))


def _class(name: str) -> Any:
    """The class of transformers called `name`, or `<name>ForMaskedLM`."""
    return getattr(transformers, name, None) or getattr(transformers, f"{name}ForMaskedLM")


def make_config(name: str = "Bert", **overrides: Any) -> Any:
    """The configuration of a model of a few thousand parameters, without dropout."""
    cls = _class(name)
    defaults = cls.config_class().to_dict()
    settings = {key: value for key, value in _SMALL.items() if key in defaults}
    settings |= {key: 0.0 for key, value in defaults.items() if "drop" in key and isinstance(value, float)}
    own = _OWN.get(cls.__name__.replace("ForPreTraining", "ForMaskedLM"), {})
    return cls.config_class(**{**settings, **own, **overrides})


def make_model(name: str = "Bert", cls: Any = None, **overrides: Any) -> Any:
    """A random model `<name>ForMaskedLM`, or `name`, or of a class given; float64, in training mode, without dropout.

    MRA alone comes in float32, since it computes in nothing else.
    """
    torch.manual_seed(0)
    model = (cls or _class(name))(make_config(name, **overrides)).train()
    if type(model).__name__ not in _SINGLE:
        model = model.double()
    perturb(model)
    return model


def make_batch(seed: int = 0, counts: tuple[int, ...] = (4, 1, 2), name: str = "Bert") -> dict[str, Tensor]:
    """Rows of length S - row with as many selected tokens as `counts` says, as the model of that name can take them."""
    generator = torch.Generator().manual_seed(seed)
    length = _LENGTHS.get(_class(name).__name__, S)
    input_ids = torch.randint(3, V - 1, (len(counts), length), generator=generator)
    attention_mask = torch.ones_like(input_ids)
    labels = torch.full_like(input_ids, -100)
    for row, count in enumerate(counts):
        if _class(name).__name__ not in _UNPADDED:
            attention_mask[row, length - row :] = 0
        positions = torch.randperm(length - row, generator=generator)[:count]
        labels[row, positions] = torch.randint(V, (count,), generator=generator)
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """The gradient of every parameter that has one, by its name in the uncompiled model; ``.grad`` is left alone."""
    trained = [(name.removeprefix("_orig_mod."), p) for name, p in model.named_parameters() if p.requires_grad]
    names, parameters = zip(*trained, strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return {name: g for name, g in zip(names, found, strict=True) if g is not None}


def dense_loss(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """``F.cross_entropy(model(...).logits.view(-1, V), labels.view(-1))``; not ModernBERT's own, which is float32."""
    logits = model(**{key: value for key, value in inputs.items() if key != "labels"}).logits
    return nn.functional.cross_entropy(logits.flatten(0, -2), inputs["labels"].view(-1))


def compare_training(sparse: Any, dense: Any, inputs: dict[str, Tensor]) -> tuple[float, float]:
    """How far apart two models are in their loss and in any gradient, each relative to the dense one's largest value.

    Infinity where one model has the gradient of a parameter and the other has not.
    """
    expected, got = dense_loss(dense, inputs), sparse(**inputs).loss
    wanted, found = gradients(dense, expected), gradients(sparse, got)
    if wanted.keys() != found.keys():
        return math.inf, math.inf
    largest = max(float(g.abs().max()) for g in wanted.values())
    errors = torch.stack([(found[name] - g).abs().max() for name, g in wanted.items()])  # whose max keeps NaN
    loss_error = (got - expected).detach().abs() / expected.detach().abs()
    return float(loss_error), float(errors.max()) / largest


def assert_same_training(sparse: Any, dense: Any, inputs: dict[str, Tensor]) -> None:
    """Two float64 models give the same loss and the same gradient of every parameter."""
    expected, got = dense_loss(dense, inputs), sparse(**inputs).loss
    torch.testing.assert_close(got, expected, **CLOSE)
    torch.testing.assert_close(gradients(sparse, got), gradients(dense, expected), **CLOSE)
