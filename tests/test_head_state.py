"""What a model goes through: copies, checkpoints, errors, threads, refusals."""

import copy
import inspect
import io
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from fastmlm.head import densify, sparsify
from fastmlm.testing import CLOSE, B, H, S, V, assert_same_training, make_batch, make_config, make_model, perturb


def copy_by_pickle(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


def copy_by_torch_save(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copier", [copy.deepcopy, copy_by_pickle, copy_by_torch_save])
def test_copies_are_sparse_and_independent(copier: Any) -> None:
    model = sparsify(make_model())
    twin = copier(model)
    inputs = make_batch()
    expected = model(**inputs)
    assert torch.equal(twin(**inputs).logits, expected.logits)
    perturb(twin)
    assert torch.equal(model(**inputs).loss, expected.loss)
    # Undoing the copy undoes just the copy, and a hook registered on it later takes no hook's place.
    twin.register_forward_hook(lambda *_: None)
    assert twin(**inputs).logits.shape == (1, 0, V)
    assert densify(twin)(**inputs).logits.shape == (B, S, V)
    assert model(**inputs).logits.shape == (1, 0, V)


def test_checkpoints_are_plain(tmp_path: Path) -> None:
    dense = make_model()
    sparse = sparsify(copy.deepcopy(dense))
    assert list(sparse.state_dict()) == list(dense.state_dict())
    dense.save_pretrained(tmp_path / "dense")
    sparse.save_pretrained(tmp_path / "sparse")
    for file in (tmp_path / "dense").iterdir():
        assert (tmp_path / "sparse" / file.name).read_bytes() == file.read_bytes()
    loaded = transformers.BertForMaskedLM.from_pretrained(tmp_path / "sparse", dtype=torch.float64).train()
    assert loaded(**make_batch()).logits.shape == (B, S, V)
    assert_same_training(sparsify(loaded), dense, make_batch())


def hooks(model: nn.Module) -> list[Any]:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs")
    found = [getattr(m, kind) for m in model.modules() for kind in (*kinds, "_forward_hooks_always_called")]
    return [hook for table in found for hook in table.values()]


def test_twice_is_once_and_densify_leaves_no_trace() -> None:
    model = make_model()
    inputs = make_batch()
    before, attributes = model(**inputs), set(model.__dict__)
    sparsify(model)
    once = hooks(model)
    assert len(once) == 7  # four hooks; two of them with keywords, one of them called always
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
    model = make_model()
    model.accepts_loss_kwargs = False
    assert densify(sparsify(model)).accepts_loss_kwargs is False


class Drawing(transformers.BertForMaskedLM):
    """Uses random numbers even without dropout, as hashing and noisy models do."""

    def forward(self, **kwargs: Any) -> Any:
        torch.rand(3)
        return super().forward(**kwargs)

    forward.__signature__ = inspect.signature(transformers.BertForMaskedLM.forward)  # type: ignore[attr-defined]


def test_sparsify_changes_no_state() -> None:
    model = make_model(cls=Drawing, hidden_dropout_prob=0.5)
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
    model = sparsify(make_model())
    inputs = make_batch()
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
    inputs = make_batch()
    inputs["labels"] = inputs["labels"][:, :-1]
    for mode in (True, False):
        with pytest.raises(ValueError, match=r"labels hold 27 positions, but the model made \(3, 10\)"):
            sparsify(make_model()).train(mode)(**inputs)


def test_calls_inside_a_call() -> None:
    model, other = sparsify(make_model()), sparsify(make_model("Roberta"))
    outer, inner = make_batch(0), make_batch(1, counts=(1, 5, 0))
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
    model = sparsify(make_model())
    inputs = [make_batch(0), make_batch(1, counts=(1, 5, 0))]
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
        hidden, *_, all_hidden = self.bert(input_ids, return_dict=False, output_hidden_states=True)
        logits = self.cls(hidden)
        loss = None if labels is None else nn.functional.cross_entropy(logits.view(-1, V), labels.view(-1))
        return transformers.modeling_outputs.MaskedLMOutput(loss=loss, logits=logits, hidden_states=all_hidden)


def test_base_model_that_returns_a_tuple() -> None:
    dense = make_model(cls=TupleBase)
    inputs = {key: value for key, value in make_batch().items() if key != "attention_mask"}
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
        model = make_model(cls=cls)
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
    model = make_model(cls=cls)
    with pytest.raises(ValueError, match=f"{cls.__name__}: it fails on a plain batch.*{missing}") as caught:
        sparsify(model)
    assert isinstance(caught.value.__cause__, KeyError)
    assert hooks(model) == []


def test_refuses_what_has_no_masked_lm_head() -> None:
    with pytest.raises(TypeError, match="Linear: it has no base model"):
        sparsify(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="BertModel: it has no base model"):
        sparsify(make_model(cls=transformers.BertModel))
    with pytest.raises(TypeError, match="BertForSequenceClassification: get_output_embeddings"):
        sparsify(make_model(cls=transformers.BertForSequenceClassification))


def test_models_on_meta_are_taken_unchecked() -> None:
    # A model that is to be loaded or sharded later cannot be run now. Its hooks wait for it.
    with torch.device("meta"):
        model = transformers.BertForMaskedLM(make_config()).train()
    sparsify(model)
    dense = make_model()
    model = model.to_empty(device="cpu").double()
    model.tie_weights()
    model.load_state_dict(dense.state_dict())
    model.bert.embeddings.position_ids = torch.arange(16)[None]
    model.bert.embeddings.token_type_ids = torch.zeros(1, 16, dtype=torch.int64)
    assert_same_training(model, dense, make_batch())
