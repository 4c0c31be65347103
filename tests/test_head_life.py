"""The sparse head in what people do to models: adapters, odd decoders, half precision, compilers."""

import copy
import warnings
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from fastmlm.head import densify, sparsify
from fastmlm.testing import CLOSE, assert_same_training, compare_training, gradients, make_batch, make_model, perturb

# ---- Adapters ----

TARGETS = {
    "attention": ["query", "value"],
    "decoder": ["decoder"],
    "head": ["transform.dense", "decoder"],
}


def with_lora(model: nn.Module, targets: list[str]) -> Any:
    """LoRA starts as no change at all, so its weights are perturbed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tied weights, which nobody merges here
        adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=targets, r=2)).double().train()
    perturb(adapted)
    return adapted


@pytest.mark.parametrize("targets", TARGETS.values(), ids=TARGETS)
def test_lora_before_sparsify(targets: list[str]) -> None:
    dense = with_lora(make_model(), targets)
    sparse = copy.deepcopy(dense)
    assert sparsify(sparse) is sparse
    assert_same_training(sparse, dense, make_batch())
    assert sparse(**make_batch()).logits.shape[:2] == (1, 7 if "decoder" in targets else 0)
    assert densify(sparse) is sparse
    assert sparse(**make_batch()).logits.shape[:2] == (3, 10)


@pytest.mark.parametrize("targets", TARGETS.values(), ids=TARGETS)
def test_lora_after_sparsify(targets: list[str]) -> None:
    dense = with_lora(make_model(), targets)
    sparse = with_lora(sparsify(make_model()), targets)
    assert_same_training(sparse, dense, make_batch())
    assert sparse(**make_batch()).logits.shape[:2] == (1, 7 if "decoder" in targets else 0)


# ---- Decoders that are no plain linear layer ----


class Quantised(nn.Linear):
    """Weights in steps of a sixteenth, straight through for gradients."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight + ((self.weight * 16).round() / 16 - self.weight).detach()
        return F.linear(x, weight, self.bias)


def quantise(model: Any) -> None:
    decoder = model.get_output_embeddings()
    decoder.__class__ = Quantised


def hook(model: Any) -> None:
    model.get_output_embeddings().register_forward_hook(lambda module, inputs, output: output * 0.5 + 0.1)


def parametrise(model: Any) -> None:
    nn.utils.parametrizations.weight_norm(model.cls.predictions.transform.dense)


def drop_bias(model: Any) -> None:
    model.cls.predictions.bias = None
    model.cls.predictions.decoder.bias = None


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("change", [quantise, hook, parametrise, drop_bias])
@pytest.mark.parametrize("order", ["before", "after"])
def test_the_models_own_decoder_is_used(change: Any, tied: bool, order: str) -> None:
    dense, sparse = make_model(tie_word_embeddings=tied), make_model(tie_word_embeddings=tied)
    change(dense)
    if order == "before":
        change(sparse)
    sparsify(sparse)
    if order == "after":
        change(sparse)
    assert_same_training(sparse, dense, make_batch())
    plain = change in (parametrise, drop_bias)  # of what comes before the decoder, or of nothing
    assert sparse(**make_batch()).logits.shape[:2] == (1, 0 if plain else 7)


def test_dropout_after_the_decoder_keeps_its_logits() -> None:
    """It does nothing while sparsify compares, and a loss in place of the decoder would never see it."""

    class Noisy(transformers.BertForMaskedLM):
        def forward(self, input_ids=None, attention_mask=None, labels=None):  # type: ignore[no-untyped-def]
            logits = super().forward(input_ids, attention_mask=attention_mask).logits
            logits = F.dropout(logits, 0.5, training=self.cls.training)
            loss = None if labels is None else F.cross_entropy(logits.flatten(0, -2), labels.flatten())
            return transformers.modeling_outputs.MaskedLMOutput(loss=loss, logits=logits)

    sparse = sparsify(make_model(cls=Noisy))
    assert sparse(**make_batch()).logits.shape[:2] == (1, 7)
    assert sparse(**make_batch()).loss != sparse(**make_batch()).loss


def test_hooks_on_all_modules_keep_the_decoder() -> None:
    dense = make_model()
    sparse = sparsify(copy.deepcopy(dense))
    halve = lambda module, inputs, output: output * 0.5 if type(module) is nn.Linear else None  # noqa: E731
    handle = nn.modules.module.register_module_forward_hook(halve)
    try:
        assert_same_training(sparse, dense, make_batch())
    finally:
        handle.remove()
    assert sparse(**make_batch()).logits.shape[:2] == (1, 0)


def test_a_prefix_of_ones_own() -> None:
    class Tower(transformers.BertForMaskedLM):
        base_model_prefix = "tower"

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.tower = self.bert
            del self.bert

        def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):  # type: ignore[no-untyped-def]
            logits = self.cls(self.tower(input_ids, attention_mask=attention_mask)[0])
            loss = None if labels is None else F.cross_entropy(logits.flatten(0, -2), labels.flatten())
            return transformers.modeling_outputs.MaskedLMOutput(loss=loss, logits=logits)

    dense = make_model(cls=Tower)
    assert_same_training(sparsify(copy.deepcopy(dense)), dense, make_batch())


# ---- Half precision ----

# Rounding of a model of this size in half precision, seen in both: some 2^-8 of bfloat16 and 2^-11 of float16.
HALF = {torch.bfloat16: 3e-2, torch.float16: 4e-3}


@pytest.mark.parametrize("dtype", HALF)
def test_models_in_half_precision(dtype: torch.dtype) -> None:
    exact = make_model()
    sparse = sparsify(copy.deepcopy(exact).to(dtype))
    loss = sparse(**make_batch()).loss
    assert loss.dtype == torch.float32
    expected = exact(**make_batch()).loss
    assert loss.item() == pytest.approx(expected.item(), rel=HALF[dtype])
    found, wanted = gradients(sparse, loss), gradients(exact, expected)
    assert found.keys() == wanted.keys()
    largest = max(float(g.abs().max()) for g in wanted.values())
    for name, gradient in wanted.items():
        assert found[name].dtype == dtype
        assert float((found[name] - gradient).abs().max()) < 4 * HALF[dtype] * largest, name


@pytest.mark.parametrize("dtype", HALF)
def test_autocast(dtype: torch.dtype) -> None:
    dense = make_model().float()
    sparse = sparsify(copy.deepcopy(dense))
    with torch.autocast("cpu", dtype=dtype):
        got, expected = sparse(**make_batch()).loss, dense(**make_batch()).loss
    assert got.dtype == torch.float32
    assert got.item() == pytest.approx(expected.item(), rel=HALF[dtype])
    found, wanted = gradients(sparse, got), gradients(dense, expected)
    largest = max(float(g.abs().max()) for g in wanted.values())
    assert max(float((found[name] - g).abs().max()) for name, g in wanted.items()) < 4 * HALF[dtype] * largest


def test_float16_with_a_scaler_and_clipping() -> None:
    """The scaled loss stays finite, and a clipped step moves both models to the same place."""
    models = [make_model().float(), sparsify(make_model().float())]
    for model in models:
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=2.0**14)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(**make_batch()).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        assert norm.item() < float("inf")
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0**14  # no overflow was seen
    before, dense, sparse = ([*model.state_dict().values()] for model in (make_model().float(), *models))
    moved = max(float((a - b).abs().max()) for a, b in zip(before, dense, strict=True))
    apart = max(float((a - b).abs().max()) for a, b in zip(sparse, dense, strict=True))
    assert moved > 0.01
    assert apart < 4 * HALF[torch.float16] * moved


# ---- Compilers ----


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # dynamo looks at fakes
@pytest.mark.parametrize("order", ["before", "after", "after a call"])
def test_inductor(order: str) -> None:
    """Sparse before the model is compiled, before its first call, and after it was compiled for a dense head."""
    torch._dynamo.reset()
    dense = make_model()
    model = copy.deepcopy(dense)
    if order == "before":
        sparsify(model)
    compiled = torch.compile(model)
    if order == "after a call":
        compiled(**make_batch())
    if order != "before":
        assert sparsify(compiled) is compiled
    assert compiled(**make_batch()).logits.shape[:2] == (1, 0)
    for seed, counts in enumerate([(4, 1, 2), (1, 0, 6), (0, 0, 3)]):
        loss_error, gradient_error = compare_training(compiled, dense, make_batch(seed, counts))
        assert loss_error < 1e-10
        assert gradient_error < 1e-10
    torch.testing.assert_close(compiled.eval()(**make_batch()).logits, dense.eval()(**make_batch()).logits, **CLOSE)


def test_fill_mask_pipeline_is_as_before(wordpiece: Any) -> None:
    model = make_model(vocab_size=len(wordpiece), max_position_embeddings=32).float().eval()
    texts = [f"for a {wordpiece.mask_token} of names", f"{wordpiece.mask_token} class"]
    expected = transformers.pipeline("fill-mask", model=model, tokenizer=wordpiece)(texts)
    assert transformers.pipeline("fill-mask", model=sparsify(model), tokenizer=wordpiece)(texts) == expected
