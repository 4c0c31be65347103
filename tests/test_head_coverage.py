"""The sparse head on every class that transformers has for masked language modelling, against the dense model."""

import copy
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers

from fastmlm.head import sparsify
from fastmlm.testing import CLOSE, MASKED_LM_CLASSES, compare_training, gradients, make_batch, make_model

# These make the decoder's input from the labels, or project to the vocabulary without output embeddings.
REFUSED = {
    "BartForConditionalGeneration": "an encoder-decoder makes its decoder's input from the labels",
    "MBartForConditionalGeneration": "an encoder-decoder makes its decoder's input from the labels",
    "MvpForConditionalGeneration": "an encoder-decoder makes its decoder's input from the labels",
    "PerceiverForMaskedLM": r"get_output_embeddings\(\) gives no projection",
}
PAIRS = [
    "AlbertForPreTraining", "BertForPreTraining", "BigBirdForPreTraining", "ErnieForPreTraining", "FNetForPreTraining",
    "MegatronBertForPreTraining", "MobileBertForPreTraining",
]  # fmt: skip


def test_transformers_has_all_that_is_refused() -> None:
    assert len(MASKED_LM_CLASSES) >= 40
    assert set(REFUSED) <= set(MASKED_LM_CLASSES)


@pytest.mark.parametrize("name", MASKED_LM_CLASSES)
def test_loss_and_every_gradient_equal_the_dense_model(name: str) -> None:
    dense = make_model(name)
    if name in REFUSED:
        with pytest.raises(TypeError, match=f"cannot sparsify {name}: {REFUSED[name]}"):
            sparsify(dense)
        return
    sparse = sparsify(copy.deepcopy(dense))
    loss_error, gradient_error = compare_training(sparse, dense, make_batch(name=name))
    # Sums in another order: some 1e-15 of float64, 1e-6 of MRA's float32; the rest is room for BLAS.
    limit = 1e-10 if next(dense.parameters()).dtype == torch.float64 else 1e-5
    assert loss_error < limit
    assert gradient_error < limit


@pytest.mark.parametrize("name", [name for name in MASKED_LM_CLASSES if name not in REFUSED])
def test_evaluation_is_as_before(name: str) -> None:
    dense = make_model(name).eval()
    sparse = sparsify(copy.deepcopy(dense))
    inputs = make_batch(name=name)
    with torch.no_grad():
        expected, got = dense(**inputs), sparse(**inputs)
    assert torch.equal(got.logits, expected.logits)
    torch.testing.assert_close(got.loss.double(), expected.loss.double(), rtol=1e-5, atol=0)  # some compute in float32


@pytest.mark.parametrize("return_dict", [True, False])
@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("name", PAIRS)
def test_pairs_of_sentences_keep_their_loss(name: str, mode: bool, return_dict: bool) -> None:
    dense = make_model(name).train(mode)
    sparse = sparsify(copy.deepcopy(dense))
    label = "sentence_order_label" if name.startswith("Albert") else "next_sentence_label"
    inputs = make_batch(name=name) | {label: torch.tensor([1, 0, 1])}
    expected, got = (model(**inputs, return_dict=return_dict)[0] for model in (dense, sparse))
    torch.testing.assert_close(got, expected, **CLOSE)
    torch.testing.assert_close(gradients(sparse, got), gradients(dense, expected), **CLOSE)
    assert sparse.accepts_loss_kwargs is False  # the Trainer divides both losses by the accumulation steps
    tokens_alone = sparse(**make_batch(name=name)).loss
    assert tokens_alone.item() != pytest.approx(got.item())


def test_adaptive_softmax_is_refused() -> None:
    """XLM's own forward fails on logits of three dimensions there."""
    model = make_model("XLMWithLMHeadModel", asm=True, asm_cutoffs=[10, 20], asm_div_value=2.0)
    with pytest.raises(ValueError, match="cannot sparsify XLMWithLMHeadModel: it fails on a plain batch"):
        sparsify(model)


def test_vision_and_language() -> None:
    """Positions of an image are among the hidden states, and none is selected."""
    dense = make_model("ModernVBertForMaskedLM")
    sparse = sparsify(copy.deepcopy(dense))
    inputs = make_batch(name="ModernVBertForMaskedLM")
    inputs["input_ids"][:, 1:5] = dense.config.image_token_id
    inputs["labels"][:, 1:5] = -100
    inputs["labels"][:, 0] = 7
    inputs["pixel_values"] = torch.randn(3, 1, 3, 32, 32, dtype=torch.float64)
    expected, got = dense(**inputs).loss, sparse(**inputs).loss
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)  # its own is float32
    torch.testing.assert_close(gradients(sparse, got), gradients(dense, expected), rtol=1e-5, atol=1e-7)


def test_logits_that_are_scaled_after_the_decoder() -> None:
    class Scaled(transformers.BertForMaskedLM):
        def forward(self, input_ids=None, attention_mask=None, labels=None):  # type: ignore[no-untyped-def]
            logits = super().forward(input_ids, attention_mask=attention_mask).logits * 0.37
            loss = None if labels is None else F.cross_entropy(logits.flatten(0, -2), labels.flatten())
            return transformers.modeling_outputs.MaskedLMOutput(loss=loss, logits=logits)

    dense = make_model(cls=Scaled)
    sparse = sparsify(copy.deepcopy(dense))
    loss_error, gradient_error = compare_training(sparse, dense, make_batch())
    assert loss_error < 1e-10
    assert gradient_error < 1e-10


def test_the_support_table_is_this_one() -> None:
    table = (Path(__file__).parents[1] / "benchmarks" / "results" / "support.md").read_text("utf-8")
    if f"transformers {transformers.__version__} " not in table:
        pytest.skip("the table is of another release")
    said = dict(re.findall(r"^\| `(\w+)` \| (yes|no)", table, flags=re.M))
    assert said == {name: "no" if name in REFUSED else "yes" for name in MASKED_LM_CLASSES}
