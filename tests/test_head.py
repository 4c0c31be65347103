"""The sparse head against the dense models themselves, in float64."""

import copy
import inspect
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

from fastmlm.head import sparsify
from fastmlm.testing import (
    CLOSE,
    MASKED_LM_NAMES,
    B,
    H,
    S,
    V,
    assert_same_training,
    dense_loss,
    gradients,
    make_batch,
    make_model,
)


@pytest.mark.parametrize("name", MASKED_LM_NAMES)
def test_loss_and_every_gradient_equal_the_dense_model(name: str) -> None:
    dense = make_model(name)
    sparse = sparsify(copy.deepcopy(dense))
    inputs = make_batch()
    assert_same_training(sparse, dense, inputs)
    got, expected = sparse(**inputs), dense(**inputs)
    # The model's own loss too; 1e-6 for ModernBERT's float32.
    torch.testing.assert_close(got.loss, expected.loss.double(), rtol=1e-6 if name == "ModernBert" else 1e-10, atol=0)
    # The point of it all: ESM, which adds a bias after its decoder, gets the logits of the 7 selected rows alone, in
    # order; the others get their loss without any.
    selected = expected.logits[inputs["labels"] != -100] if name == "Esm" else expected.logits[0, :0]
    assert got.logits.shape == (1, len(selected), V)
    torch.testing.assert_close(got.logits[0], selected, **CLOSE)


@pytest.mark.parametrize("name", MASKED_LM_NAMES)
def test_evaluation_keeps_dense_logits(name: str) -> None:
    dense = make_model(name).eval()
    sparse = sparsify(copy.deepcopy(dense))
    inputs = make_batch()
    expected, got = dense(**inputs), sparse(**inputs)
    assert torch.equal(got.logits, expected.logits)
    torch.testing.assert_close(got.loss, dense_loss(dense, inputs), **CLOSE)


@pytest.mark.parametrize("name", MASKED_LM_NAMES)
@pytest.mark.parametrize("mode", [True, False])
def test_nothing_selected(name: str, mode: bool) -> None:
    # The dense models give NaN here.
    model = sparsify(make_model(name)).train(mode)
    loss = model(**make_batch(counts=(0, 0, 0))).loss
    assert loss.item() == 0
    found = gradients(model, loss)
    assert "weight" in " ".join(found)  # the graph reaches parameters at all
    assert all(torch.equal(g, torch.zeros_like(g)) for g in found.values())


def test_one_token_of_id_zero_selected() -> None:
    # K = 1, and `labels > 0` would lose it.
    dense = make_model()
    inputs = make_batch(counts=(0, 0, 0))
    inputs["labels"][1, 4] = 0
    assert_same_training(sparsify(copy.deepcopy(dense)), dense, inputs)


@pytest.mark.parametrize("mode", [True, False])
def test_int32_and_non_contiguous_labels(mode: bool) -> None:
    model = sparsify(make_model()).train(mode)
    inputs = make_batch()
    expected = model(**inputs).loss
    assert torch.equal(model(**{**inputs, "labels": inputs["labels"].int()}).loss, expected)
    assert torch.equal(model(**{**inputs, "labels": inputs["labels"].t().contiguous().t()}).loss, expected)


@pytest.mark.parametrize("mode", [True, False])
def test_tuples(mode: bool) -> None:
    model = sparsify(make_model()).train(mode)
    inputs = make_batch()
    whole = model(**inputs, output_hidden_states=True)
    loss, logits, hidden_states = model(**inputs, output_hidden_states=True, return_dict=False)
    assert torch.equal(loss, whole.loss)
    assert torch.equal(logits, whole.logits)
    # The other outputs keep all their positions.
    assert [h.shape for h in hidden_states] == [h.shape for h in whole.hidden_states] == [(B, S, H)] * 3
    assert list(whole) == ["loss", "logits", "hidden_states"]


@pytest.mark.parametrize("mode", [True, False])
def test_positional_labels(mode: bool) -> None:
    model = sparsify(make_model()).train(mode)
    inputs = make_batch()
    names = [*inspect.signature(type(model).forward).parameters][1:]  # where labels stand differs between releases
    got = model(*(inputs.get(name) for name in names[: names.index("labels") + 1]))
    expected = model(**inputs)
    assert torch.equal(got.loss, expected.loss)
    assert torch.equal(got.logits, expected.logits)


@pytest.mark.parametrize("mode", [True, False])
def test_without_labels_nothing_changes(mode: bool) -> None:
    dense = make_model().train(mode)
    sparse = sparsify(copy.deepcopy(dense))
    inputs = make_batch()
    del inputs["labels"]
    expected = dense(**inputs)
    for got in (sparse(**inputs), sparse(**inputs, labels=None)):
        assert list(got) == ["logits"]
        assert torch.equal(got.logits, expected.logits)


@pytest.mark.parametrize("name", MASKED_LM_NAMES)
@pytest.mark.parametrize("mode", [True, False])
def test_num_items_in_batch(name: str, mode: bool) -> None:
    model = sparsify(make_model(name)).train(mode)
    inputs = make_batch()
    expected = model(**inputs).loss * 7 / 20
    for items in (20, torch.tensor(20), torch.tensor([20])):
        torch.testing.assert_close(model(**inputs, num_items_in_batch=items).loss, expected, **CLOSE)


@pytest.mark.parametrize("name", ["Bert", "Esm"])
def test_num_items_in_batch_of_any_single_shape(name: str) -> None:
    model, inputs = sparsify(make_model(name)), make_batch()
    expected = model(**inputs, num_items_in_batch=5).loss
    for shape in ((), (1,), (1, 1)):
        assert torch.equal(model(**inputs, num_items_in_batch=torch.full(shape, 5)).loss, expected)


def test_gradient_accumulation_over_uneven_micro_batches() -> None:
    # Micro-batches of 5, 0, 1 and 3 selected tokens: a mean of means would weigh them wrongly.
    dense = make_model()
    inputs = make_batch(counts=(5, 0, 1, 3))
    sparse = sparsify(copy.deepcopy(dense))
    for row in range(4):
        micro = {key: value[row : row + 1] for key, value in inputs.items()}
        sparse(**micro, num_items_in_batch=torch.tensor(9)).loss.backward()
    expected = gradients(dense, dense_loss(dense, inputs))
    got = {name: p.grad for name, p in sparse.named_parameters() if p.grad is not None}
    torch.testing.assert_close(got, expected, **CLOSE)


@pytest.mark.parametrize("steps", [1, 4])
def test_trainer_gradient_accumulation(steps: int, tmp_path: Path) -> None:
    # One SGD step of the Trainer, however accumulated, is one SGD step of a plain loop over the whole batch.
    pytest.importorskip("accelerate")
    dense = make_model()
    inputs = make_batch(counts=(5, 0, 1, 3))
    sparse = sparsify(copy.deepcopy(dense))
    arguments = transformers.TrainingArguments(
        tmp_path, per_device_train_batch_size=4 // steps, gradient_accumulation_steps=steps, max_steps=1,
        max_grad_norm=0.0, report_to=[], use_cpu=True, save_strategy="no", logging_strategy="no", disable_tqdm=True,
        dataloader_pin_memory=False,
    )  # fmt: skip
    optimizer = torch.optim.SGD(sparse.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    rows = [{key: value[row] for key, value in inputs.items()} for row in range(4)]
    transformers.Trainer(sparse, arguments, train_dataset=rows, optimizers=(optimizer, scheduler)).train()

    dense(**inputs).loss.backward()
    torch.optim.SGD(dense.parameters(), lr=0.5).step()
    torch.testing.assert_close(dict(sparse.named_parameters()), dict(dense.named_parameters()), **CLOSE)


@pytest.mark.parametrize("tied", [True, False])
def test_tied_and_untied_embeddings(tied: bool) -> None:
    dense = make_model(tie_word_embeddings=tied)
    assert (dense.get_output_embeddings().weight is dense.get_input_embeddings().weight) == tied
    assert_same_training(sparsify(copy.deepcopy(dense)), dense, make_batch())


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")  # the new name is not yet in 4.57
def test_gradient_checkpointing() -> None:
    dense = make_model()
    sparse = sparsify(copy.deepcopy(dense))
    sparse.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    calls: list[int] = []
    sparse.bert.encoder.layer[0].attention.register_forward_hook(lambda *_: calls.append(0))
    assert_same_training(sparse, dense, make_batch())
    assert len(calls) == 2  # once forward, once more for backward: layers were really recomputed


@pytest.mark.parametrize("mode", [True, False])
def test_bfloat16_model_has_a_float32_loss(mode: bool) -> None:
    model = make_model().bfloat16().train(mode)
    inputs = make_batch()
    selected = inputs["labels"] != -100
    logits = model(**inputs).logits[selected]
    expected = nn.functional.cross_entropy(logits.float(), inputs["labels"][selected])
    loss = sparsify(model)(**inputs).loss
    assert loss.dtype == torch.float32
    # The head's matrix product may round a few logits of size 1 to the neighbouring bfloat16 number, 2**-7 away.
    torch.testing.assert_close(loss, expected, rtol=0, atol=2**-7)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo asks every tensor, and hides it only by showwarning
def test_compile_without_recompiling_for_every_batch() -> None:
    dense = make_model()
    model = sparsify(copy.deepcopy(dense))
    compiled = torch.compile(model, backend="eager")

    def check(seed: int) -> None:
        inputs = make_batch(seed, counts=(4, 1, 2 + seed))
        expected, got = dense_loss(dense, inputs), compiled(**inputs)
        assert got.logits.shape == (1, 0, V)
        torch.testing.assert_close(got.loss, expected, **CLOSE)
        torch.testing.assert_close(gradients(model, got.loss), gradients(dense, expected), **CLOSE)

    for seed in range(2):  # sizes become dynamic on the second one
        check(seed)
    with torch.compiler.set_stance("fail_on_recompile"):
        for seed in range(2, 5):
            check(seed)
    torch.compiler.reset()
