"""Weights in the loss, and a divisor that no chance decides: what masked diffusion trains with."""

import copy
import itertools
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from test_distributed import run
from test_masked_lm_head import H as HEAD_H, V as HEAD_V, case
from test_selection import first, with_rows
from test_selection_compiled import of_dynamo
from test_trainer import arguments
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from fastmlm import MaskedAccuracy, MaskedLMHead, MaskedLMTrainer, sparsify
from fastmlm.head import loss_only
from fastmlm.loss import masked_lm_loss
from fastmlm.testing import CLOSE, S, V, gradients, make_batch, make_model

COUNTS = (5, 0, 1, 3)  # one row, and one micro-batch of four, has nothing selected
PATHS = ("Bert", "Esm", "ModernBert")  # Esm's loss comes of logits, the others' of none


def weighted(seed: int = 0, counts: tuple[int, ...] = COUNTS) -> dict[str, Tensor]:
    """A batch with weights between 1 and 5, and none that counts where nothing is selected."""
    batch = make_batch(seed, counts)
    generator = torch.Generator().manual_seed(seed)
    weights = 1 + 4 * torch.rand(batch["labels"].shape, generator=generator)
    weights[batch["labels"] == -100] = torch.nan
    weights[0][batch["labels"][0] == -100] = torch.inf
    return batch | {"loss_weights": weights, "loss_tokens": batch["attention_mask"].sum(1)}


def without(batch: dict[str, Tensor], *names: str) -> dict[str, Tensor]:
    return {name: column for name, column in batch.items() if name not in names}


def exact(dense: Any, batch: dict[str, Tensor], divisor: Any = None) -> Tensor:
    """The loss from dense logits, divided by the batch's tokens unless by something else."""
    logits = dense(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.double()
    losses = F.cross_entropy(logits.flatten(0, -2), batch["labels"].flatten(), reduction="none")
    selected = batch["labels"].flatten() != -100
    total = (losses[selected] * batch["loss_weights"].flatten()[selected].double()).sum()
    return total / (batch["loss_tokens"].sum() if divisor is None else divisor)


# ---- Sparse models ----


@pytest.mark.parametrize("capacity", [None, 128, 4])
@pytest.mark.parametrize("name", PATHS)
def test_loss_and_gradients(name: str, capacity: int | None) -> None:
    """By the tokens that could have been selected, by a number that is given, by those that were selected."""
    dense, batch = make_model(name), weighted()
    batch["labels"][-1, -1], batch["loss_weights"][-1, -1] = 3, 2.0  # what unused slots must not find
    sparse = sparsify(copy.deepcopy(dense))
    given = batch if capacity is None else with_rows(batch, capacity)
    kept = batch if capacity is None else batch | {"labels": first(batch["labels"], capacity)}
    alone = without(given, "loss_tokens")
    for inputs, divisor in [
        (given, None),
        ({**alone, "num_items_in_batch": 17}, 17),
        ({**alone, "num_items_in_batch": torch.tensor([17])}, 17),
        (alone, (kept["labels"] != -100).sum()),
        (given | {"loss_tokens": batch["loss_tokens"].int(), "loss_weights": batch["loss_weights"].double()}, None),
    ]:
        loss, expected = sparse(**inputs).loss, exact(dense, kept, divisor)
        torch.testing.assert_close(loss, expected, **CLOSE)
        torch.testing.assert_close(gradients(sparse, loss), gradients(dense, expected), **CLOSE)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", PATHS[:2])
def test_tokens_without_weights_and_ones(name: str, training: bool) -> None:
    model, batch = sparsify(make_model(name)).train(training), weighted()
    plain = without(batch, "loss_weights", "loss_tokens")
    expected = model(**plain).loss * sum(COUNTS) / batch["loss_tokens"].sum()
    torch.testing.assert_close(model(**without(batch, "loss_weights")).loss, expected, **CLOSE)
    ones = torch.ones_like(batch["loss_weights"])
    torch.testing.assert_close(model(**plain, loss_weights=ones).loss, model(**plain).loss, **CLOSE)
    packed = {name: column.view(1, -1) for name, column in plain.items()}  # of one row here, told as three
    packed = {name: column[:, :S] for name, column in packed.items()}
    loss = model(**packed, loss_tokens=torch.tensor([4, 5, 1])).loss
    torch.testing.assert_close(loss, model(**packed).loss * 5 / 10, **CLOSE)


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("name", PATHS)
def test_evaluation(name: str, rows: bool) -> None:
    dense, batch = make_model(name).eval(), weighted()
    sparse = sparsify(copy.deepcopy(dense))
    inputs = with_rows(batch) if rows else batch
    out = sparse(**inputs)
    torch.testing.assert_close(out.loss, exact(dense, batch), **CLOSE)
    assert out.logits.shape == (4, S, V)
    with loss_only():
        torch.testing.assert_close(sparse(**inputs).loss, exact(dense, batch), **CLOSE)
    by_number = sparse(**without(inputs, "loss_tokens"), num_items_in_batch=17).loss
    torch.testing.assert_close(by_number, exact(dense, batch, 17), **CLOSE)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("name", PATHS[:2])
def test_nothing_selected(name: str, rows: bool, training: bool) -> None:
    """All weights are NaN or inf then; nothing to be selected either."""
    model, batch = sparsify(make_model(name)).train(training), weighted(counts=(0, 0))
    for tokens in (batch["loss_tokens"], torch.zeros(2, dtype=torch.int64), None):
        inputs = batch | {"loss_tokens": tokens}
        loss = model(**(with_rows(inputs) if rows else inputs)).loss
        assert loss == 0
        assert not any(g.any() for g in gradients(model, loss).values())


def test_the_models_own_forward_sees_nothing_of_it() -> None:
    model, seen = sparsify(make_model()), set()
    model.register_forward_pre_hook(lambda _model, _args, given: seen.update(given), with_kwargs=True)
    model(**weighted())
    assert {"input_ids", "attention_mask"} <= seen
    assert not {"loss_weights", "loss_tokens"} & seen


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", PATHS[:2])
def test_accuracy_is_not_weighted(name: str, training: bool) -> None:
    model, batch = sparsify(make_model(name)).train(training), weighted()
    with MaskedAccuracy((1, 10)) as expected:
        model(**without(batch, "loss_weights", "loss_tokens"))
    with MaskedAccuracy((1, 10)) as found:
        model(**batch)
    assert found.compute() == expected.compute()


@of_dynamo
@pytest.mark.parametrize("name", PATHS[:2])
def test_one_graph(name: str) -> None:
    dense = make_model(name)
    sparse = sparsify(copy.deepcopy(dense))
    compiled: Any = torch.compile(sparse, fullgraph=True, backend="eager")
    try:
        compiled(**with_rows(weighted()))
        with torch.compiler.set_stance("fail_on_recompile"):
            for seed, counts in enumerate([(1, 7, 2, 6), (5, 0, 1, 3)]):
                batch = weighted(seed, counts)
                loss, expected = compiled(**with_rows(batch)).loss, exact(dense, batch)
                torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-7)  # ESM has a float32 step of its own
                found, wanted = gradients(sparse, loss), gradients(dense, expected)
                torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)
    finally:
        torch.compiler.reset()


@pytest.mark.parametrize("name", PATHS[:2])
def test_the_expectation_over_all_masks(name: str) -> None:
    """Rows of 3 and of 4 tokens, selected with their own p: it is the mean of all losses, exactly.

    The model sees the tokens themselves, whatever is selected, so that each has one loss.
    """
    model, batch = sparsify(make_model(name)), make_batch()
    ids, attention = batch["input_ids"][:2, :4], torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    real, p = attention == 1, torch.tensor([[0.25], [0.5]]).expand(2, 4)
    every = {"input_ids": ids, "attention_mask": attention, "labels": ids.where(real, -100)}
    by_tokens, by_selected, weight = 0.0, 0.0, 0.0
    with torch.no_grad():
        wanted = exact(model, every | {"loss_weights": torch.ones(2, 4)}, 7).item()
        for mask in itertools.product([False, True], repeat=7):
            selected = torch.zeros(2, 4, dtype=torch.bool)
            selected[real] = torch.tensor(mask)
            chance = p.where(selected, 1 - p)[real].prod().item()
            inputs = every | {"labels": ids.where(selected, -100), "loss_weights": 1 / p}
            by_selected += chance * model(**inputs).loss.item()
            by_tokens += chance * model(**inputs, loss_tokens=real.sum(1)).loss.item()
            weight += chance
    assert weight == pytest.approx(1, abs=1e-12)
    assert by_tokens == pytest.approx(wanted, rel=1e-6 if name == "Esm" else 1e-12)
    assert abs(by_selected - wanted) > 0.1 * wanted


# ---- Heads and losses of one's own ----


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("rows", [False, True])
def test_a_head_of_ones_own(rows: bool, plain: bool) -> None:
    head = MaskedLMHead(HEAD_H, HEAD_V).double()
    if not plain:
        head.decoder.register_forward_hook(lambda module, args, output: output * 2)
    x, labels = case()
    columns = {"loss_weights": torch.rand(labels.shape), "loss_tokens": torch.tensor([7, 5, 6])}
    columns["loss_weights"][labels == -100] = torch.nan
    losses = F.cross_entropy(head(x)[labels != -100], labels[labels != -100], reduction="none")
    expected = (losses * columns["loss_weights"][labels != -100]).sum() / 18
    inputs = with_rows({"labels": labels, **columns}) if rows else {"labels": labels, **columns}
    loss = head(x, **inputs)
    torch.testing.assert_close(loss, expected, **CLOSE)
    trained = [x, *head.parameters()]
    torch.testing.assert_close(torch.autograd.grad(loss, trained), torch.autograd.grad(expected, trained), **CLOSE)


def test_masked_lm_loss_does_not_look_at_ignored_weights() -> None:
    logits = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    labels, weights = torch.tensor([4, -100, 0]), torch.tensor([0.5, torch.nan, 3.0])
    expected = (F.cross_entropy(logits[::2], labels[::2], reduction="none") * weights[::2]).sum() / 2
    loss = masked_lm_loss(logits, labels, weight_per_row=weights)
    torch.testing.assert_close(loss, expected, **CLOSE)
    torch.testing.assert_close(*(torch.autograd.grad(one, logits) for one in (loss, expected)), **CLOSE)
    with pytest.raises(ValueError, match=r"weight_per_row must be \(3,\), got \(1,\)"):
        masked_lm_loss(logits, labels, weight_per_row=torch.ones(1))


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize(
    ("columns", "error", "message"),
    [
        (
            {"loss_weights": torch.ones(4, 9)},
            ValueError,
            r"loss_weights: expected \(4, 10\), like .*, got \(4, 9\)",
        ),
        ({"loss_weights": torch.ones(4, 10).long()}, TypeError, "loss_weights: expected floating .* got torch.int64"),
        ({"loss_weights": 2.0}, TypeError, "loss_weights: expected floating numbers, got <class 'float'>"),
        ({"loss_weights": torch.ones(4, 10, requires_grad=True)}, ValueError, "loss_weights: .* without a gradient"),
        (
            {"loss_tokens": torch.ones(4)},
            TypeError,
            r"loss_tokens: expected an .* got torch.float32 of shape \(4,",
        ),
        ({"loss_tokens": torch.ones(4, 1).long()}, TypeError, r"loss_tokens: .* got torch.int64 of shape \(4, 1\)"),
        ({"loss_tokens": 40}, TypeError, "loss_tokens: expected an int64 tensor of one number a row, got int"),
        (
            {"loss_tokens": torch.ones(4).long(), "num_items_in_batch": 4},
            ValueError,
            "loss_tokens: expected none beside num_items_in_batch, .* train with fastmlm.MaskedLMTrainer",
        ),
    ],
)
def test_what_does_not_fit(columns: dict[str, Any], error: type[Exception], message: str, head: bool) -> None:
    model, batch = sparsify(make_model()), make_batch(counts=COUNTS)
    ones_own = partial(MaskedLMHead(HEAD_H, HEAD_V), torch.ones(4, 10, HEAD_H), batch["labels"])
    with pytest.raises(error, match=message):
        (ones_own if head else partial(model, **batch))(**columns)
    model(**batch).loss.backward()  # nothing of the call that failed is left


@pytest.mark.parametrize("name", ["loss_weights", "loss_tokens"])
def test_without_labels(name: str) -> None:
    """The weights would be lost on whoever computes the loss then."""
    with pytest.raises(ValueError, match="loss_weights, loss_tokens: expected labels beside them"):
        sparsify(make_model())(input_ids=torch.ones(1, 4).long(), **{name: weighted()[name]})


# ---- Trainers ----


class Rows(Dataset):
    """The rows of a weighted batch, with these columns or without."""

    def __init__(self, with_columns: bool = True) -> None:
        self.batch = weighted() if with_columns else without(weighted(), "loss_weights", "loss_tokens")

    def __len__(self) -> int:
        return len(self.batch["labels"])

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {name: column[i] for name, column in self.batch.items()}


def collate(examples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Rows without weights and tokens, to which they are added."""
    batch, of_all = {name: torch.stack([row[name] for row in examples]) for name in examples[0]}, weighted()
    assert "loss_weights" not in batch
    places = (batch["input_ids"][:, None] == of_all["input_ids"]).all(-1).int().argmax(1)
    return batch | {name: of_all[name][places] for name in ("loss_weights", "loss_tokens")}


def loss_and_norm(name: str) -> tuple[float, float]:
    """Of one large batch."""
    dense = make_model(name)
    expected = exact(dense, weighted())
    return expected.item(), torch.stack([g.norm() for g in gradients(dense, expected).values()]).norm().item()


@pytest.mark.parametrize(("steps", "source"), [(1, "data set"), (2, "collator"), (4, "data set")])
@pytest.mark.parametrize("name", PATHS[:2])
def test_accumulation(name: str, steps: int, source: str, tmp_path: Path) -> None:
    """The logged loss and the norm of the gradients are those of one large batch, at any number of steps."""
    trainer = MaskedLMTrainer(
        make_model(name),
        arguments(tmp_path, per_device_train_batch_size=4 // steps, gradient_accumulation_steps=steps),
        data_collator=collate if source == "collator" else None,
        train_dataset=Rows(source == "data set"),
    )
    trainer.train()
    (loss, norm), logged = loss_and_norm(name), trainer.state.log_history[0]
    assert logged["loss"] == pytest.approx(loss, abs=6e-5)  # four digits are logged
    assert logged["grad_norm"] == pytest.approx(norm, rel=1e-6)
    assert 0 <= logged["masked_accuracy"] <= 1


@pytest.mark.parametrize("metrics", [False, True])
def test_evaluation_in_the_trainer(metrics: bool, tmp_path: Path) -> None:
    """The weighted loss, with logits and without; that of batches is averaged over them, as Trainer does."""
    shapes: list[Any] = []
    trainer = MaskedLMTrainer(
        make_model(),
        arguments(tmp_path),
        eval_dataset=Rows(),
        compute_metrics=(lambda found: shapes.append(found.predictions.shape) or {}) if metrics else None,
    )
    dense, batch = make_model().eval(), weighted()
    halves = [{name: column[i : i + 2] for name, column in batch.items()} for i in (0, 2)]
    expected = sum(exact(dense, half).item() for half in halves) / 2
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-6)
    assert shapes == ([(4, S, V)] if metrics else [])


def test_other_trainers_refuse(tmp_path: Path) -> None:
    """One that counts labels would divide by a random number; one that computes the loss would leave out weights."""
    named = {"data_collator": collate, "train_dataset": Rows(False), "eval_dataset": Rows(False)}
    plain = transformers.Trainer(sparsify(make_model()), arguments(tmp_path), **named)
    for call in (plain.train, plain.evaluate):
        with pytest.raises(ValueError, match="loss_tokens: expected none beside num_items_in_batch"):
            call()
    smooth = MaskedLMTrainer(make_model(), arguments(tmp_path, label_smoothing_factor=0.1), **named)
    with pytest.raises(ValueError, match="expected labels beside them"):
        smooth.train()


def on_two(rank: int, path: Path) -> None:
    """Either process has two rows; gradients, and what the Trainer logs, are those of one process with all."""
    dense, batch = make_model(), weighted()
    model = sparsify(copy.deepcopy(dense))
    wrapped: nn.Module = DistributedDataParallel(model)
    half = {name: column[2 * rank : 2 * rank + 2] for name, column in without(batch, "loss_tokens").items()}
    (wrapped(**half, num_items_in_batch=batch["loss_tokens"].sum()).loss * 2).backward()  # which averages gradients
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    torch.testing.assert_close(found, gradients(dense, exact(dense, batch)), **CLOSE)
    names = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2}
    os.environ |= {name: str(value) for name, value in names.items()}  # what accelerate looks for
    changes = {"ddp_backend": "gloo", "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    trainer = MaskedLMTrainer(make_model(), arguments(path / str(rank), **changes), train_dataset=Rows())
    trainer.train()
    assert trainer.args.world_size == 2
    (loss, norm), logged = loss_and_norm("Bert"), trainer.state.log_history[0]
    assert logged["loss"] == pytest.approx(loss, abs=6e-5)
    assert logged["grad_norm"] == pytest.approx(norm, rel=1e-6)


def test_two_processes(tmp_path: Path) -> None:
    run(partial(on_two, path=tmp_path), tmp_path)
