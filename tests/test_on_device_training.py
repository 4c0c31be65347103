"""Loops that mask on the device: Trainer, Accelerate and plain ones see what the collator's masks would have shown."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from test_distributed import run
from test_on_device import assert_same, pair
from test_trainer import arguments as one_step
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import Trainer

from fastmlm import MaskedLMTrainer, MaskOnDevice, mask_batches, row_capacity, sparsify
from fastmlm.on_device import capacity_of
from fastmlm.testing import MASKED_LM_NAMES, make_model


def rows_to_train_on(count: int = 12) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    return [{"input_ids": rng.integers(5, 37, 4 + i % 9).tolist()} for i in range(count)]


@pytest.fixture
def small(wordpiece) -> Any:
    wordpiece.model_input_names = ["input_ids", "attention_mask"]
    return wordpiece


def model_for(tokenizer: Any, name: str = "Bert") -> Any:
    return make_model(name, vocab_size=len(tokenizer)).float()


def test_a_loop_of_ones_own(small) -> None:
    plain, ships = pair(small)
    rows = rows_to_train_on()
    batches = mask_batches(DataLoader(rows, 4, collate_fn=ships), device="cpu")
    assert len(batches) == 3
    for _ in range(2):
        expected = list(DataLoader(rows, 4, collate_fn=plain))
        got = list(batches)
        assert len(got) == 3
        for one, other in zip(got, expected, strict=True):
            assert_same(one, other)


def test_rows_for_a_sparse_model(small) -> None:
    _, ships = pair(small)
    rows, model = rows_to_train_on(), sparsify(model_for(small))
    loader = DataLoader(rows, 4, collate_fn=ships)
    for plain, batch in zip(mask_batches(loader), mask_batches(loader, rows=True), strict=True):
        assert len(batch["rows"]) == 128
        assert batch["count"] == (plain["labels"] != -100).sum()
        torch.testing.assert_close(model(**batch).loss, model(**plain).loss)
    few = mask_batches(loader, rows=2)
    with pytest.warns(UserWarning, match="selected positions did not count in the loss"):
        assert {len(batch["rows"]) for batch in few} == {2}
    left = iter(few)
    next(left)
    with pytest.warns(UserWarning, match="selected positions did not count in the loss"):
        left.close()  # as a loop does that is left before its end


def test_capacities_of_the_law(small) -> None:
    tokens = 8192
    assert capacity_of(pair(small, mlm_probability=0.15)[1], tokens) == row_capacity(tokens, 0.15)
    words = pair(small, mlm_probability=0.15, whole_word_mask=True)[1]
    assert capacity_of(words, tokens) == row_capacity(tokens, 0.15, unit_size=4) > row_capacity(tokens, 0.15)


def test_accelerate(small) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    plain, ships = pair(small)
    rows = rows_to_train_on()
    loader = Accelerator(cpu=True).prepare(DataLoader(rows, 4, collate_fn=ships))
    for one, other in zip(mask_batches(loader), DataLoader(rows, 4, collate_fn=plain), strict=True):
        assert_same(one, other)


def test_workers_and_pinned_forms(small) -> None:
    """What leaves a worker is what the collator made, and its epoch reaches them."""
    plain, ships = pair(small, epoch=None)
    rows = rows_to_train_on()
    loader = DataLoader(rows, 4, collate_fn=ships, num_workers=1, persistent_workers=True)
    for epoch in (0, 1):
        ships.set_epoch(epoch)
        plain.set_epoch(epoch)
        for one, other in zip(mask_batches(loader), DataLoader(rows, 4, collate_fn=plain), strict=True):
            assert_same(one, other)


def arguments(path: Path, **changes: Any) -> transformers.TrainingArguments:
    """Two passes in batches of two."""
    passes = {"max_steps": -1, "num_train_epochs": 2, "learning_rate": 0.01, "data_seed": 1}
    sizes = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 4}
    return one_step(path, **passes | sizes | changes)


class OnDevice(MaskOnDevice, Trainer):
    pass


class SparseOnDevice(MaskOnDevice, MaskedLMTrainer):
    pass


def train(cls: Any, collator: Any, path: Path, model: Any, resume: Any = None, **kwargs: Any) -> Any:
    """A Trainer that has trained, with all batches that its model saw."""
    changes, rows, named = kwargs.pop("changes", {}), kwargs.pop("rows", None) or rows_to_train_on(), kwargs
    seen: list[dict[str, Tensor]] = []
    callbacks = [] if issubclass(cls, MaskedLMTrainer) else [collator.callback()]
    trainer = cls(
        model, arguments(path, **changes), data_collator=collator, train_dataset=rows,
        eval_dataset=rows_to_train_on(6), callbacks=callbacks, **named,
    )  # fmt: skip
    trainer.model.register_forward_pre_hook(  # after a sparse model was tried
        lambda _m, _a, given: seen.append({k: x.clone() for k, x in given.items() if isinstance(x, Tensor)}),
        with_kwargs=True,
        prepend=True,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer, seen


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("classes", [(Trainer, OnDevice), (MaskedLMTrainer, SparseOnDevice)], ids=["plain", "sparse"])
@pytest.mark.parametrize("name", MASKED_LM_NAMES[:2])
def test_the_trainer(small, tmp_path, name, classes, steps) -> None:
    """Every batch, the number of selected tokens, losses, weights and evaluation are as with the collator's masks."""
    changes = {"gradient_accumulation_steps": steps, "eval_strategy": "epoch"}
    plain, ships = pair(small, epoch=None)
    runs = []
    for cls, collator in zip(classes, (plain, ships), strict=True):
        model = model_for(small, name)
        model.accepts_loss_kwargs = True
        runs.append(train(cls, collator, tmp_path, model, changes=changes))
    (one, seen_one), (other, seen_other) = runs
    assert len(seen_one) == len(seen_other) == 2 * (6 + 2)
    for expected, got in zip(seen_one, seen_other, strict=True):
        assert_same(got, expected)
    if steps > 1:
        assert "num_items_in_batch" in seen_other[0]
    timed = ("runtime", "per_second", "flos")
    for expected, got in zip(one.state.log_history, other.state.log_history, strict=True):
        keep = {k: v for k, v in expected.items() if not k.endswith(timed)}
        assert {k: v for k, v in got.items() if not k.endswith(timed)} == keep
    for expected, got in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(got, expected)


def test_metrics_are_given_the_masked_inputs(small, tmp_path) -> None:
    given = []
    for cls, collator in zip((Trainer, OnDevice), pair(small), strict=True):
        trainer = cls(
            model_for(small), arguments(tmp_path, include_for_metrics=["inputs"]), data_collator=collator,
            eval_dataset=rows_to_train_on(6), compute_metrics=lambda found: given.append(found) or {},
        )  # fmt: skip
        trainer.evaluate()
    expected, got = given
    assert np.array_equal(got.inputs, expected.inputs)
    assert np.array_equal(got.label_ids, expected.label_ids)
    assert (got.inputs == small.mask_token_id).any()


def test_a_resumed_run(small, tmp_path) -> None:
    """Resumed in the middle of an epoch: the masks and weights of the unbroken run."""
    changes = {"save_strategy": "steps", "save_steps": 4}
    whole, seen_whole = train(OnDevice, pair(small, epoch=None)[1], tmp_path, model_for(small), changes=changes)
    resumed, seen = train(
        OnDevice, pair(small, epoch=None)[1], tmp_path, model_for(small), tmp_path / "checkpoint-8", changes=changes
    )
    assert len(seen) == 4
    for got, expected in zip(seen, seen_whole[8:], strict=True):
        assert_same(got, expected)
    for got, expected in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(got, expected)


def test_rows_in_the_trainer(small, tmp_path) -> None:
    """With a capacity, the sparse model is given rows in training, and what has no row is told."""
    model = sparsify(model_for(small))
    trainer, seen = train(SparseOnDevice, pair(small)[1], tmp_path, model, row_capacity=64)
    assert {len(batch["rows"]) for batch in seen} == {64}
    assert all(batch["count"] == (batch["labels"] != -100).sum() for batch in seen)
    trainer.evaluate()
    assert "rows" not in seen[-1]
    expected, _ = train(MaskedLMTrainer, pair(small)[0], tmp_path, model_for(small))
    losses = [[entry["loss"] for entry in run.state.log_history if "loss" in entry] for run in (trainer, expected)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
    with pytest.warns(UserWarning, match="selected positions did not count in the loss"):
        train(SparseOnDevice, pair(small)[1], tmp_path, sparsify(model_for(small)), row_capacity=1)


@pytest.mark.parametrize("gpus", [1, 2])
def test_rows_by_the_law_on_a_gpu(small, tmp_path, monkeypatch, gpus) -> None:
    """Without a capacity, where the device is no CPU; not where ``nn.DataParallel`` would divide the rows."""
    trainer = SparseOnDevice(sparsify(model_for(small)), arguments(tmp_path), data_collator=pair(small)[1])
    shipped = trainer.data_collator(rows_to_train_on(4))
    trainer._prepare_input = lambda batch: batch
    assert "rows" not in next(iter(trainer.get_batch_samples(iter([shipped]), 1, None)[0]))
    monkeypatch.setattr(type(trainer.args), "device", torch.device("cuda"))
    monkeypatch.setattr(type(trainer.args), "n_gpu", gpus)
    (batch,), _ = trainer.get_batch_samples(iter([shipped]), 1, torch.device("cpu"))
    assert ("rows" in batch) == (gpus == 1)
    assert gpus > 1 or len(batch["rows"]) == capacity_of(trainer.data_collator, batch["labels"].numel())


@pytest.mark.parametrize(
    "own", [{"compute_loss_func": lambda *args, **kwargs: args[0].logits.sum()}, {"smoothing": 0.1}]
)
def test_no_rows_where_the_model_computes_no_loss(small, tmp_path, own) -> None:
    changes = {"label_smoothing_factor": own.pop("smoothing", 0.0)}
    _, seen = train(SparseOnDevice, pair(small)[1], tmp_path, model_for(small), row_capacity=1, changes=changes, **own)
    assert not any("rows" in batch for batch in seen)


def assert_evaluates(trainer: Any, seen: list[Any], collator: Any, like: Any) -> None:
    """An evaluation by a loader of its own shows the model the batches of another collator."""
    rows, before = rows_to_train_on(6), len(seen)
    trainer.get_eval_dataloader = lambda *args: DataLoader(rows, 4, collate_fn=collator)
    trainer.evaluate()
    for got, expected in zip(seen[before:], DataLoader(rows, 4, collate_fn=like), strict=True):
        assert_same({name: got[name] for name in expected}, dict(expected))


def test_a_batch_is_masked_by_the_collator_of_its_loader(small, tmp_path) -> None:
    """Evaluation with another rate, by a collator of its own."""
    trainer, seen = train(OnDevice, pair(small)[1], tmp_path, model_for(small))
    plain, ships = pair(small, mlm_probability=0.9)
    assert_evaluates(trainer, seen, ships, plain)
    train_rows = rows_to_train_on()
    trainer = OnDevice(model_for(small), arguments(tmp_path), data_collator=pair(small)[1], train_dataset=train_rows)
    trainer.data_collator, first = ships, trainer.data_collator
    loader = trainer.get_train_dataloader()
    trainer.data_collator = first
    (batch,), _ = trainer.get_batch_samples(iter(loader), 1, torch.device("cpu"))
    original = torch.where(batch["labels"] == -100, batch["input_ids"], batch["labels"])
    again = plain([row["input_ids"] for row in map(_unpadded, original, batch["attention_mask"])])
    assert torch.equal(batch["labels"], again["labels"])


def _unpadded(ids: Tensor, real: Tensor) -> dict[str, Any]:
    return {"input_ids": ids[real == 1].tolist()}


def test_a_dense_model_is_given_no_rows(small, tmp_path) -> None:
    _, seen = train(OnDevice, pair(small)[1], tmp_path, model_for(small), row_capacity=64)
    assert not any("rows" in batch for batch in seen)


def on_two(rank: int, tokenizer: Any, path: Path, dispatch: bool) -> None:
    """Each process sees rows of its own, with the masks that one process gives them."""
    names = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2}
    os.environ |= {name: str(value) for name, value in names.items()}  # what accelerate looks for
    changes = {
        "num_train_epochs": 1, "ddp_backend": "gloo",
        "accelerator_config": {"dispatch_batches": dispatch, "split_batches": False},
    }  # fmt: skip
    # Dispatched batches are put together for all processes, and must be of one width.
    _, ships = pair(tokenizer, epoch=None, pad_to_multiple_of=16)
    trainer, seen = train(OnDevice, ships, path / str(rank), model_for(tokenizer), changes=changes)
    assert trainer.args.world_size == 2
    plain, _ = pair(tokenizer, epoch=0)
    expected = {tuple(row["input_ids"]): plain([row]) for row in rows_to_train_on()}
    found = [row for batch in seen for row in rows_of_batch(batch)]
    assert len(found) == 6
    for original, ids, labels in found:
        assert ids == tuple(expected[original]["input_ids"][0].tolist())
        assert labels == tuple(expected[original]["labels"][0].tolist())


def rows_of_batch(batch: dict[str, Tensor]) -> list[tuple[tuple[int, ...], ...]]:
    """For each row without padding: what it was, its ids and its labels."""
    rows = []
    for ids, labels, real in zip(batch["input_ids"], batch["labels"], batch["attention_mask"] == 1, strict=True):
        original = torch.where(labels == -100, ids, labels)
        rows.append(tuple(tuple(column[real].tolist()) for column in (original, ids, labels)))
    return rows


@pytest.mark.parametrize("dispatch", [False, True])
def test_two_processes(small, tmp_path, dispatch) -> None:
    run(partial(on_two, tokenizer=small, path=tmp_path, dispatch=dispatch), tmp_path)


def test_batches_that_have_labels_are_left_alone(small, tmp_path) -> None:
    """Evaluation with batches of another collator."""
    plain, ships = pair(small)
    trainer, seen = train(OnDevice, ships, tmp_path, model_for(small))
    assert_evaluates(trainer, seen, plain, plain)


def test_bad_arguments(wordpiece, tmp_path) -> None:
    plain, ships = pair(wordpiece)
    rows = rows_to_train_on()
    with pytest.raises(ValueError, match=r"collator: expected a .*DataCollatorForMaskedLM with mask_on"):
        mask_batches(DataLoader(rows, 4, collate_fn=plain))
    with pytest.raises(ValueError, match=r"collator: .*got NoneType"):
        mask_batches([ships(rows)])
    with pytest.raises(ValueError, match=r"batches: expected batches of a collator .* got one with input_ids"):
        next(iter(mask_batches([plain(rows)], collator=ships)))
    with pytest.raises(TypeError, match=r"rows: expected True, False or how many, got 0.15"):
        mask_batches([], collator=ships, rows=0.15)
    with pytest.raises(ValueError, match=r"rows: expected at least 1, got -1"):
        mask_batches([], collator=ships, rows=-1)
    with pytest.raises(ValueError, match=r"data_collator: expected a .*DataCollatorForMaskedLM with mask_on"):
        OnDevice(model_for(wordpiece), arguments(tmp_path), data_collator=plain, train_dataset=rows)

    class WrongOrder(MaskedLMTrainer, MaskOnDevice):
        pass

    for cls in (MaskedLMTrainer, WrongOrder):
        with pytest.raises(
            ValueError, match=r"data_collator: expected mask_on_device=False, or .*MaskOnDevice, MaskedLM"
        ):
            cls(model_for(wordpiece), arguments(tmp_path), data_collator=ships, train_dataset=rows)
    with pytest.raises(ValueError, match="row_capacity"):
        OnDevice(model_for(wordpiece), arguments(tmp_path), data_collator=ships, row_capacity=0)


@pytest.mark.parametrize("cls", [Trainer, MaskedLMTrainer, SparseOnDevice])
def test_packed_batches_are_not_dispatched(small, tmp_path, cls) -> None:
    """Accelerate would put them together and divide them by rows; in training, evaluation and loops of one's own."""
    plain, ships = pair(small, packing=True)
    collator = ships if cls is SparseOnDevice else plain
    for dispatch in (True, False):
        AcceleratorState._reset_state(reset_partial_state=True)
        trainer = cls(
            model_for(small), arguments(tmp_path, max_steps=1, accelerator_config={"dispatch_batches": dispatch}),
            data_collator=collator, train_dataset=rows_to_train_on(), eval_dataset=rows_to_train_on(6),
            callbacks=[collator.callback()] if cls is Trainer else [],
        )  # fmt: skip
        runs = [trainer.train] if cls is Trainer else [trainer.train, trainer.evaluate]
        if collator is ships:
            runs.append(lambda trainer=trainer: mask_batches(trainer.get_train_dataloader(), collator=ships))
        for go in runs:
            if not dispatch:
                assert go() is not None
                continue
            with pytest.raises(ValueError, match=r"packing: expected dispatch_batches=False .* got True"):
                go()
