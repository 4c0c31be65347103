"""The sparse head against the dense models themselves, in float64."""

import copy
import inspect
import io
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastmlm.head import densify, sparsify

pytest.importorskip("transformers")
import transformers

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
NAMES = list(_CONFIGS)

# Dense and sparse run the same float64 operations on differently shaped matrices: sums come out in another order, which
# costs some 1e-15 of numbers of size 1 to 10. 1e-10 leaves room for BLAS and is far below what one wrong row changes.
CLOSE: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-12}


def perturb(model: nn.Module) -> None:
    """Noise on every parameter: biases start at zero and norms at one, and could hide what is forgotten or doubled."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))


def make(name: str = "Bert", cls: Any = None, **overrides: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**_CONFIGS[name], **overrides})
    model = (cls or getattr(transformers, f"{name}ForMaskedLM"))(config).double().train()
    perturb(model)
    return model


def batch(seed: int = 0, counts: tuple[int, ...] = (4, 1, 2)) -> dict[str, Tensor]:
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
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return {name: g for name, g in zip(names, found, strict=True) if g is not None}


def dense_loss(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """The definition, over all of a dense model's logits. ModernBERT's own loss is computed in float32 even here."""
    logits = model(**{key: value for key, value in inputs.items() if key != "labels"}).logits
    return nn.functional.cross_entropy(logits.view(-1, V), inputs["labels"].view(-1))


def assert_same_training(sparse: Any, dense: Any, inputs: dict[str, Tensor]) -> None:
    expected, got = dense_loss(dense, inputs), sparse(**inputs).loss
    torch.testing.assert_close(got, expected, **CLOSE)
    torch.testing.assert_close(gradients(sparse, got), gradients(dense, expected), **CLOSE)


@pytest.mark.parametrize("name", NAMES)
def test_loss_and_every_gradient_equal_the_dense_model(name: str) -> None:
    dense = make(name)
    sparse = sparsify(copy.deepcopy(dense))
    inputs = batch()
    assert_same_training(sparse, dense, inputs)
    got, expected = sparse(**inputs), dense(**inputs)
    # The model's own loss too; 1e-6 for ModernBERT's float32.
    torch.testing.assert_close(got.loss, expected.loss.double(), rtol=1e-6 if name == "ModernBert" else 1e-10, atol=0)
    # The point of it all: only the 7 selected rows reached the vocabulary, in order.
    assert got.logits.shape == (1, 7, V)
    torch.testing.assert_close(got.logits[0], expected.logits[inputs["labels"] != -100], **CLOSE)


@pytest.mark.parametrize("name", NAMES)
def test_evaluation_keeps_dense_logits(name: str) -> None:
    dense = make(name).eval()
    sparse = sparsify(copy.deepcopy(dense))
    inputs = batch()
    expected, got = dense(**inputs), sparse(**inputs)
    assert torch.equal(got.logits, expected.logits)
    torch.testing.assert_close(got.loss, dense_loss(dense, inputs), **CLOSE)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mode", [True, False])
def test_nothing_selected(name: str, mode: bool) -> None:
    # The dense models give NaN here.
    model = sparsify(make(name)).train(mode)
    loss = model(**batch(counts=(0, 0, 0))).loss
    assert loss.item() == 0
    found = gradients(model, loss)
    assert "weight" in " ".join(found)  # the graph reaches parameters at all
    assert all(torch.equal(g, torch.zeros_like(g)) for g in found.values())


def test_one_token_of_id_zero_selected() -> None:
    # K = 1, and `labels > 0` would lose it.
    dense = make()
    inputs = batch(counts=(0, 0, 0))
    inputs["labels"][1, 4] = 0
    assert_same_training(sparsify(copy.deepcopy(dense)), dense, inputs)


@pytest.mark.parametrize("mode", [True, False])
def test_int32_and_non_contiguous_labels(mode: bool) -> None:
    model = sparsify(make()).train(mode)
    inputs = batch()
    expected = model(**inputs).loss
    assert torch.equal(model(**{**inputs, "labels": inputs["labels"].int()}).loss, expected)
    assert torch.equal(model(**{**inputs, "labels": inputs["labels"].t().contiguous().t()}).loss, expected)


@pytest.mark.parametrize("mode", [True, False])
def test_tuples(mode: bool) -> None:
    model = sparsify(make()).train(mode)
    inputs = batch()
    whole = model(**inputs, output_hidden_states=True)
    loss, logits, hidden_states = model(**inputs, output_hidden_states=True, return_dict=False)
    assert torch.equal(loss, whole.loss)
    assert torch.equal(logits, whole.logits)
    # The other outputs keep all their positions.
    assert [h.shape for h in hidden_states] == [h.shape for h in whole.hidden_states] == [(B, S, H)] * 3
    assert list(whole) == ["loss", "logits", "hidden_states"]


@pytest.mark.parametrize("mode", [True, False])
def test_positional_labels(mode: bool) -> None:
    model = sparsify(make()).train(mode)
    inputs = batch()
    got = model(inputs["input_ids"], inputs["attention_mask"], None, None, None, None, None, inputs["labels"])
    expected = model(**inputs)
    assert torch.equal(got.loss, expected.loss)
    assert torch.equal(got.logits, expected.logits)


@pytest.mark.parametrize("mode", [True, False])
def test_without_labels_nothing_changes(mode: bool) -> None:
    dense = make().train(mode)
    sparse = sparsify(copy.deepcopy(dense))
    inputs = batch()
    del inputs["labels"]
    expected = dense(**inputs)
    for got in (sparse(**inputs), sparse(**inputs, labels=None)):
        assert list(got) == ["logits"]
        assert torch.equal(got.logits, expected.logits)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mode", [True, False])
def test_num_items_in_batch(name: str, mode: bool) -> None:
    model = sparsify(make(name)).train(mode)
    inputs = batch()
    expected = model(**inputs).loss * 7 / 20
    for items in (20, torch.tensor(20), torch.tensor([20])):
        torch.testing.assert_close(model(**inputs, num_items_in_batch=items).loss, expected, **CLOSE)


def test_gradient_accumulation_over_uneven_micro_batches() -> None:
    # Micro-batches of 5, 0, 1 and 3 selected tokens: a mean of means would weigh them wrongly.
    dense = make()
    inputs = batch(counts=(5, 0, 1, 3))
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
    dense = make()
    inputs = batch(counts=(5, 0, 1, 3))
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
    dense = make(tie_word_embeddings=tied)
    assert (dense.get_output_embeddings().weight is dense.get_input_embeddings().weight) == tied
    assert_same_training(sparsify(copy.deepcopy(dense)), dense, batch())


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")  # the new name is not yet in 4.57
def test_gradient_checkpointing() -> None:
    dense = make()
    sparse = sparsify(copy.deepcopy(dense))
    sparse.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    calls: list[int] = []
    sparse.bert.encoder.layer[0].attention.register_forward_hook(lambda *_: calls.append(0))
    assert_same_training(sparse, dense, batch())
    assert len(calls) == 2  # once forward, once more for backward: layers were really recomputed


@pytest.mark.parametrize("mode", [True, False])
def test_bfloat16_model_has_a_float32_loss(mode: bool) -> None:
    model = make().bfloat16().train(mode)
    inputs = batch()
    selected = inputs["labels"] != -100
    logits = model(**inputs).logits[selected]
    expected = nn.functional.cross_entropy(logits.float(), inputs["labels"][selected])
    loss = sparsify(model)(**inputs).loss
    assert loss.dtype == torch.float32
    # The head's matrix product may round a few logits of size 1 to the neighbouring bfloat16 number, 2**-7 away.
    torch.testing.assert_close(loss, expected, rtol=0, atol=2**-7)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo asks every tensor, and hides it only by showwarning
def test_compile_without_recompiling_for_every_batch() -> None:
    dense = make()
    model = sparsify(copy.deepcopy(dense))
    compiled = torch.compile(model, backend="eager")

    def check(seed: int) -> None:
        inputs = batch(seed, counts=(4, 1, 2 + seed))
        expected, got = dense_loss(dense, inputs), compiled(**inputs)
        assert got.logits.shape == (1, 7 + seed, V)
        torch.testing.assert_close(got.loss, expected, **CLOSE)
        torch.testing.assert_close(gradients(model, got.loss), gradients(dense, expected), **CLOSE)

    for seed in range(2):  # sizes become dynamic on the second one
        check(seed)
    with torch.compiler.set_stance("fail_on_recompile"):
        for seed in range(2, 5):
            check(seed)
    torch.compiler.reset()


def copy_by_pickle(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


def copy_by_torch_save(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copier", [copy.deepcopy, copy_by_pickle, copy_by_torch_save])
def test_copies_are_sparse_and_independent(copier: Any) -> None:
    model = sparsify(make())
    twin = copier(model)
    inputs = batch()
    expected = model(**inputs)
    assert torch.equal(twin(**inputs).logits, expected.logits)
    perturb(twin)
    assert torch.equal(model(**inputs).loss, expected.loss)
    # Undoing the copy undoes just the copy, and a hook registered on it later takes no hook's place.
    twin.register_forward_hook(lambda *_: None)
    assert twin(**inputs).logits.shape == (1, 7, V)
    assert densify(twin)(**inputs).logits.shape == (B, S, V)
    assert model(**inputs).logits.shape == (1, 7, V)


def test_checkpoints_are_plain(tmp_path: Path) -> None:
    dense = make()
    sparse = sparsify(copy.deepcopy(dense))
    assert list(sparse.state_dict()) == list(dense.state_dict())
    dense.save_pretrained(tmp_path / "dense")
    sparse.save_pretrained(tmp_path / "sparse")
    for file in (tmp_path / "dense").iterdir():
        assert (tmp_path / "sparse" / file.name).read_bytes() == file.read_bytes()
    loaded = transformers.BertForMaskedLM.from_pretrained(tmp_path / "sparse", dtype=torch.float64).train()
    assert loaded(**batch()).logits.shape == (B, S, V)
    assert_same_training(sparsify(loaded), dense, batch())


def hooks(model: nn.Module) -> list[Any]:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs")
    found = [getattr(m, kind) for m in model.modules() for kind in (*kinds, "_forward_hooks_always_called")]
    return [hook for table in found for hook in table.values()]


def test_twice_is_once_and_densify_leaves_no_trace() -> None:
    model = make()
    inputs = batch()
    before, attributes = model(**inputs), set(model.__dict__)
    sparsify(model)
    once = hooks(model)
    assert len(once) == 6  # three hooks; two of them with keywords, one of them called always
    assert sparsify(model) is model
    assert hooks(model) == once
    assert model.accepts_loss_kwargs is True
    assert densify(model) is model
    assert hooks(model) == []
    assert set(model.__dict__) == attributes
    after = model(**inputs)
    assert torch.equal(after.loss, before.loss)
    assert torch.equal(after.logits, before.logits)
    assert densify(model) is model  # never sparse, or no longer: left alone


def test_densify_puts_back_accepts_loss_kwargs() -> None:
    model = make()
    model.accepts_loss_kwargs = False
    assert densify(sparsify(model)).accepts_loss_kwargs is False


class Drawing(transformers.BertForMaskedLM):
    """Uses random numbers even without dropout, as hashing and noisy models do."""

    def forward(self, **kwargs: Any) -> Any:
        torch.rand(3)
        return super().forward(**kwargs)

    forward.__signature__ = inspect.signature(transformers.BertForMaskedLM.forward)  # type: ignore[attr-defined]


def test_sparsify_changes_no_state() -> None:
    model = make(cls=Drawing, hidden_dropout_prob=0.5)
    model.bert.encoder.layer[0].eval()
    model.cls.predictions.bias.requires_grad_(False)

    def state() -> list[Any]:
        return [(m.training, *((p.requires_grad, p.grad) for p in m.parameters())) for m in model.modules()]

    before, values, random = state(), copy.deepcopy(model.state_dict()), torch.get_rng_state()
    sparsify(model)
    assert state() == before
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, values[key]) for key, value in model.state_dict().items())


def test_an_exception_in_forward_leaves_nothing_behind() -> None:
    model = sparsify(make())
    inputs = batch()
    expected = model(**inputs).loss

    def fail(*_: Any) -> None:
        raise RuntimeError("in the middle")

    for module in (model.bert.embeddings, model.cls):  # before and after the rows are selected
        handle = module.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="in the middle"):
            model(**inputs)
        handle.remove()
        # Labels left behind would select rows of a call that has none.
        assert model.bert(inputs["input_ids"]).last_hidden_state.shape == (B, S, H)
        assert torch.equal(model(**inputs).loss, expected)


def test_labels_of_another_size_are_refused() -> None:
    inputs = batch()
    inputs["labels"] = inputs["labels"][:, :-1]
    for mode in (True, False):
        with pytest.raises(ValueError, match=r"labels hold 27 positions, but the model made \(3, 10\)"):
            sparsify(make()).train(mode)(**inputs)


def test_calls_inside_a_call() -> None:
    model, other = sparsify(make()), sparsify(make("Roberta"))
    outer, inner = batch(0), batch(1, counts=(1, 5, 0))
    expected = [m(**inputs).loss for m, inputs in ((model, outer), (model, inner), (other, inner))]
    found: list[Tensor] = []

    def call_again(*_: Any) -> None:
        if not found:  # not from inside the inner calls
            found.append(torch.empty(0))
            found.extend([model(**inner).loss, other(**inner).loss])
            found.extend([model(inner["input_ids"]).logits, other.roberta(inner["input_ids"]).last_hidden_state])

    model.bert.register_forward_pre_hook(call_again)
    found.append(model(**outer).loss)
    _, again, another, unlabelled, bare, loss = found
    assert torch.equal(torch.stack([loss, again, another]), torch.stack(expected))
    assert unlabelled.shape == (B, S, V)
    assert bare.shape == (B, S, H)


def test_two_threads_share_a_model() -> None:
    model = sparsify(make())
    inputs = [batch(0), batch(1, counts=(1, 5, 0))]
    expected = [model(**i).loss for i in inputs]
    got: dict[int, Tensor] = {}
    entered, left = ([threading.Event(), threading.Event()] for _ in range(2))

    def run(i: int) -> None:
        got[i] = model(**inputs[i]).loss
        left[i].set()

    def meet(*_: Any) -> None:
        # The first call goes on when the second has begun, and ends before it: the last labels given are not its own.
        i = int(threading.current_thread().name)
        entered[i].set()
        assert (left[0] if i else entered[1]).wait(timeout=20)

    model.bert.embeddings.register_forward_hook(meet)
    threads = [threading.Thread(target=run, args=(i,), name=str(i)) for i in (0, 1)]
    threads[0].start()
    assert entered[0].wait(timeout=20)
    threads[1].start()
    for thread in threads:
        thread.join()
    # Not torch.equal: in a thread of its own BLAS may split its sums differently.
    torch.testing.assert_close([got[0], got[1]], expected, **CLOSE)


class TupleBase(transformers.BertForMaskedLM):
    """A base model that returns a plain tuple, of which the model uses more than the first item."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        hidden, all_hidden = self.bert(input_ids, return_dict=False, output_hidden_states=True)
        logits = self.cls(hidden)
        loss = None if labels is None else nn.functional.cross_entropy(logits.view(-1, V), labels.view(-1))
        return transformers.modeling_outputs.MaskedLMOutput(loss=loss, logits=logits, hidden_states=all_hidden)


def test_base_model_that_returns_a_tuple() -> None:
    dense = make(cls=TupleBase)
    inputs = {key: value for key, value in batch().items() if key != "attention_mask"}
    sparse = sparsify(copy.deepcopy(dense))
    assert_same_training(sparse, dense, inputs)
    torch.testing.assert_close(sparse(**inputs).hidden_states, dense(**inputs).hidden_states, **CLOSE)


class Smoothed(transformers.BertForMaskedLM):
    """A loss with a term of its own."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Any:
        output = super().forward(input_ids, labels=labels, **kwargs)
        if labels is not None:
            output.loss = output.loss + 0.01 * output.logits.square().mean()
        return output


class Mixing(transformers.BertForMaskedLM):
    """A head that looks at other positions, through a weight that starts at zero: only perturbing it tells."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.mix = nn.Parameter(torch.zeros(()))
        self.cls.register_forward_pre_hook(lambda _, args: (args[0] + self.mix * args[0].cumsum(1),))


class NeedsPixels(transformers.BertForMaskedLM):
    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Any:
        raise KeyError("pixel_values")


class NeedsLabels(transformers.BertForMaskedLM):
    """Runs as a dense model, and fails once its labels are taken out of the call."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Any:
        if labels is None:
            raise KeyError("labels")
        return super().forward(input_ids, labels=labels, **kwargs)


def test_refuses_another_loss_and_undoes_everything() -> None:
    for cls in (Smoothed, Mixing):
        model = make(cls=cls)
        if cls is Mixing:
            model.mix.data.zero_()
        values, attributes = copy.deepcopy(model.state_dict()), set(model.__dict__)
        with pytest.raises(ValueError, match=rf"{cls.__name__}: its loss is \d.*, but \d.* with a sparse head"):
            sparsify(model)
        assert len(hooks(model.bert)) == 0
        assert set(model.__dict__) == attributes
        assert all(torch.equal(value, values[key]) for key, value in model.state_dict().items())
        assert model.training


@pytest.mark.parametrize(("cls", "missing"), [(NeedsPixels, "pixel_values"), (NeedsLabels, "labels")])
def test_refuses_a_model_that_fails(cls: Any, missing: str) -> None:
    model = make(cls=cls)
    with pytest.raises(ValueError, match=f"{cls.__name__}: it fails on a plain batch.*{missing}") as caught:
        sparsify(model)
    assert isinstance(caught.value.__cause__, KeyError)
    assert hooks(model) == []


def test_refuses_what_has_no_masked_lm_head() -> None:
    with pytest.raises(TypeError, match="Linear: it has no base model"):
        sparsify(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="BertModel: it has no base model"):
        sparsify(make(cls=transformers.BertModel))
    with pytest.raises(TypeError, match="BertForSequenceClassification: get_output_embeddings"):
        sparsify(make(cls=transformers.BertForSequenceClassification))


def test_models_on_meta_are_taken_unchecked() -> None:
    # A model that is to be loaded or sharded later cannot be run now. Its hooks wait for it.
    with torch.device("meta"):
        model = transformers.BertForMaskedLM(transformers.BertConfig(**_CONFIGS["Bert"])).train()
    sparsify(model)
    dense = make()
    model = model.to_empty(device="cpu").double()
    model.tie_weights()
    model.load_state_dict(dense.state_dict())
    model.bert.embeddings.position_ids = torch.arange(16)[None]
    model.bert.embeddings.token_type_ids = torch.zeros(1, 16, dtype=torch.int64)
    assert_same_training(model, dense, batch())
