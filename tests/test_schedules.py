"""Mask probabilities by step: the right step's in every batch, whoever makes it and whenever."""

import math
import os
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from test_distributed import run
from test_on_device import assert_same, both, pair
from test_on_device_training import OnDevice, SparseOnDevice, model_for, rows_of_batch, rows_to_train_on, train
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer

from fastmlm import DataCollatorForMaskedLM, MaskedLMTrainer, row_capacity
from fastmlm.on_device import capacity_of
from fastmlm.schedules import Cosine, Linear, Stages

FALLING = Stages({0: 0.9, 2: 0.5, 3: 0.2, 5: 0.05})


def sevenths(step: int) -> float:
    """A function of the user's own."""
    return (1 + 2 * step % 7) / 8


def test_values() -> None:
    linear, cosine = Linear(0.3, 0.1, steps=10), Cosine(0.1, 0.3, steps=4)
    assert [linear(step) for step in (0, 5, 10, 99)] == pytest.approx([0.3, 0.2, 0.1, 0.1])
    assert [cosine(step) for step in (0, 1, 2, 4, 9)] == pytest.approx(
        [0.1, 0.1 + 0.1 * (1 - math.sqrt(0.5)), 0.2, 0.3, 0.3]
    )
    assert [FALLING(step) for step in (0, 1, 2, 3, 4, 5, 10**9)] == [0.9, 0.9, 0.5, 0.2, 0.2, 0.05, 0.05]
    assert [schedule.highest for schedule in (linear, cosine, FALLING)] == [0.3, 0.3, 0.9]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Linear(1.5, 0.1, 3), "start: expected a number between 0 and 1, got 1.5"),
        (lambda: Cosine(0.5, "x", 3), "end: expected a number between 0 and 1, got str"),
        (lambda: Linear(0.5, 0.1, 0), "steps: expected an int in"),
        (lambda: Stages({5: 0.3}), "stages: expected a mapping of first steps to probabilities, from 0 on, got"),
        (lambda: Stages([0.3]), "stages: expected a mapping"),
        (lambda: Stages({0: 0.3, -1: 0.2}), "stages: expected an int in"),
        (lambda: Stages({0: 0.3, 4: 2}), r"stages\[4\]: expected a number between 0 and 1, got 2"),
    ],
)
def test_bad_schedules(make, message) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        make()


def collator_at(tokenizer: Any, schedule: Any, **kwargs: Any) -> DataCollatorForMaskedLM:
    collator = DataCollatorForMaskedLM(tokenizer, mlm_probability=schedule, seed=7, **kwargs)
    collator.set_epoch(0)
    return collator


def test_bad_use(wordpiece) -> None:
    rows = rows_to_train_on()
    with pytest.raises(ValueError, match=r"mlm_probability: expected to be told the step .*set_step"):
        collator_at(wordpiece, FALLING)(rows)
    with pytest.raises(ValueError, match=r"mlm_probability, the schedule at step 0: expected .* got 1.5"):
        collator_at(wordpiece, lambda step: 1.5 - step)
    later = collator_at(wordpiece, lambda step: 0.5 + step)
    later.set_step(1)
    with pytest.raises(ValueError, match=r"mlm_probability, the schedule at step 1: expected .* got 1.5"):
        later(rows)
    with pytest.raises(ValueError, match="mlm_probability: expected a number with rng='torch', got Stages"):
        DataCollatorForMaskedLM(wordpiece, mlm_probability=FALLING, rng="torch")
    with pytest.raises(ValueError, match="step: expected an int in"):
        later.set_step(-1)
    with pytest.raises(ValueError, match="batches_per_step: expected an int in"):
        later.set_step(0, 0)


def expected_batches(tokenizer: Any, rows: Any, size: int, steps: list[int], epoch: int = 0) -> list[Any]:
    """Batch by batch what a collator with the probability of the batch's step gives."""
    batches = []
    for i, step in enumerate(steps):
        constant = collator_at(tokenizer, sevenths(step))
        constant.set_epoch(epoch)
        batches.append(constant(rows[i * size : (i + 1) * size]))
    return batches


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than processors
@pytest.mark.parametrize("per_step", [1, 2])
@pytest.mark.parametrize(
    "workers",
    [
        {},
        {"num_workers": 2},
        {"num_workers": 3, "persistent_workers": True, "prefetch_factor": 4},
        {"num_workers": 1, "multiprocessing_context": "spawn", "persistent_workers": True},
    ],
    ids=["none", "forked", "persistent", "spawned"],
)
def test_workers(wordpiece, workers, per_step) -> None:
    """Each pass goes on from the step told, whatever was collated by hand before."""
    collator, rows = collator_at(wordpiece, sevenths), rows_to_train_on(14)
    loader = DataLoader(rows, 2, collate_fn=collator, **workers)
    for epoch, first in enumerate([0, 4]):
        collator.set_epoch(epoch)
        collator.set_step(0)
        collator(rows)
        collator.set_step(first, per_step)
        steps = [first + i // per_step for i in range(7)]
        for got, expected in zip(loader, expected_batches(wordpiece, rows, 2, steps, epoch), strict=True):
            assert_same(got, expected)


def test_a_look_at_a_batch_moves_no_worker(wordpiece) -> None:
    """A batch made by hand after the step was told counts in this process alone."""
    collator, rows = collator_at(wordpiece, sevenths), rows_to_train_on(4)
    collator.set_step(0)
    collator(rows)
    batches = list(DataLoader(rows, 2, collate_fn=collator, num_workers=1))
    for got, expected in zip(batches, expected_batches(wordpiece, rows, 2, [0, 1]), strict=True):
        assert_same(got, expected)


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_masks_on_the_device(wordpiece, packing, monkeypatch) -> None:
    monkeypatch.setattr("fastmlm.schedules.Steps.next", lambda self: 2)
    rows = rows_to_train_on()
    for multiple in (None, 16):
        expected, masked = both(
            wordpiece, rows, mlm_probability=FALLING, packing=packing, pad_to_multiple_of=multiple, seed=7, epoch=0
        )
        assert_same(masked, expected)
        constant = collator_at(wordpiece, 0.5, packing=packing, pad_to_multiple_of=multiple)
        assert_same(masked, constant(rows))


def test_capacity_is_for_the_highest(wordpiece) -> None:
    assert capacity_of(pair(wordpiece, mlm_probability=FALLING)[1], 8192) == row_capacity(8192, 0.9)
    with pytest.raises(
        ValueError, match=r"row_capacity .*: expected how many, since the highest mask probability is not known"
    ):
        capacity_of(pair(wordpiece, mlm_probability=sevenths)[1], 8192)


def test_evaluation_has_one_probability(wordpiece) -> None:
    rows = rows_to_train_on()
    for kwargs, p in (({}, 0.15), ({"mlm_probability": 0.4}, 0.4)):
        scheduled = collator_at(wordpiece, FALLING).for_evaluation(**kwargs)
        assert_same(scheduled(rows), collator_at(wordpiece, p).for_evaluation()(rows))
    with pytest.raises(ValueError, match="mlm_probability: expected a number between 0 and 1, got 2"):
        collator_at(wordpiece, FALLING).for_evaluation(mlm_probability=2)


def seen_rows(seen: list[dict[str, Any]]) -> list[list[Any]]:
    return [rows_of_batch(batch) for batch in seen]


def check(tokenizer: Any, seen: list[dict[str, Any]], steps: list[int], epochs: list[int], schedule: Any) -> None:
    """Every row of every batch has the masks of the batch's step and epoch."""
    assert len(seen) == len(steps)
    for batch, step, epoch in zip(seen, steps, epochs, strict=True):
        constant = collator_at(tokenizer, schedule(step))
        constant.set_epoch(epoch)
        for original, ids, labels in rows_of_batch(batch):
            expected = constant([{"input_ids": list(original)}])
            assert (ids, labels) == (tuple(expected["input_ids"][0].tolist()), tuple(expected["labels"][0].tolist()))


@pytest.mark.parametrize(("cls", "workers"), [(Trainer, 0), (MaskedLMTrainer, 2), (OnDevice, 2), (SparseOnDevice, 0)])
def test_the_trainer(wordpiece, tmp_path, cls, workers) -> None:
    """12 rows, batches of 2, 4 batches a step, two passes: 2 steps each, of 4 and of 2 batches; resumed after one."""
    on_device = cls in (OnDevice, SparseOnDevice)
    changes = {
        "gradient_accumulation_steps": 4, "save_strategy": "steps", "save_steps": 1, "dataloader_num_workers": workers,
        "eval_strategy": "epoch", "seed": 7,
    }  # fmt: skip
    steps, epochs = [0] * 4 + [1] * 2 + [2] * 4 + [3] * 2, [0] * 6 + [1] * 6

    def trained(resume: Any = None) -> Any:
        collator = collator_at(wordpiece, FALLING, mask_on_device=on_device)
        trainer, seen = train(cls, collator, tmp_path, model_for(wordpiece), resume, changes=changes)
        return trainer, [batch for batch in seen if len(batch["labels"]) == 2]  # evaluation takes 4 and 2 of 6 rows

    trainer, seen = trained()
    seen = seen[:6] + seen[7:13]  # without the last batch of each evaluation
    check(wordpiece, seen, steps, epochs, FALLING)
    logged = [entry["mlm_probability"] for entry in trainer.state.log_history if "loss" in entry]
    assert logged == [0.9, 0.9, 0.5, 0.2]
    assert not any("mlm_probability" in entry for entry in trainer.state.log_history if "loss" not in entry)
    for checkpoint, first in ((1, 4), (3, 10)):
        _, resumed = trained(tmp_path / f"checkpoint-{checkpoint}")
        check(wordpiece, resumed[: 6 - first % 6], steps[first : first + 6 - first % 6],
              epochs[first : first + 6 - first % 6], FALLING)  # fmt: skip


class Stream(IterableDataset):
    """Rows without a length."""

    def __iter__(self) -> Any:
        return iter(rows_to_train_on(8))


def test_a_stream(wordpiece, tmp_path) -> None:
    """Batches of 2, 4 a pass; resumed in the first pass, whose skipped batches the Trainer collates again."""
    changes = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2}

    def trained(resume: Any = None) -> Any:
        collator = collator_at(wordpiece, FALLING)
        return train(MaskedLMTrainer, collator, tmp_path, model_for(wordpiece), resume, changes=changes, rows=Stream())

    steps, epochs = list(range(6)), [0] * 4 + [1] * 2
    _, seen = trained()
    check(wordpiece, seen, steps, epochs, FALLING)
    _, resumed = trained(tmp_path / "checkpoint-2")
    check(wordpiece, resumed[:2], steps[2:4], epochs[2:4], FALLING)


def on_two(rank: int, tokenizer: Any, path: Path, dispatch: bool, split: bool) -> None:
    names = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2}
    os.environ |= {name: str(value) for name, value in names.items()}  # what accelerate looks for
    changes = {
        "num_train_epochs": 1, "ddp_backend": "gloo", "gradient_accumulation_steps": 2,
        "accelerator_config": {"dispatch_batches": dispatch, "split_batches": split},
    }  # fmt: skip
    collator = collator_at(tokenizer, FALLING, pad_to_multiple_of=16)
    _, seen = train(MaskedLMTrainer, collator, path / str(rank), model_for(tokenizer), changes=changes)
    per_step = [i // 2 for i in range(len(seen))]
    check(tokenizer, seen, per_step, [0] * len(seen), FALLING)


@pytest.mark.parametrize(("dispatch", "split"), [(False, False), (True, False), (True, True), (False, True)])
def test_two_processes(wordpiece, tmp_path, dispatch, split) -> None:
    run(partial(on_two, tokenizer=wordpiece, path=tmp_path, dispatch=dispatch, split=split), tmp_path)


def test_a_number_is_not_logged(wordpiece, tmp_path) -> None:
    trainer, _ = train(MaskedLMTrainer, collator_at(wordpiece, 0.3), tmp_path, model_for(wordpiece))
    assert trainer.state.log_history
    assert not any("mlm_probability" in entry for entry in trainer.state.log_history)


def test_static_masks_grow_with_the_probability(wordpiece) -> None:
    """One draw a token: what is selected at a low probability is selected at a higher one too."""
    collator, rows = collator_at(wordpiece, Linear(0.1, 0.9, 4), static=True), rows_to_train_on()
    collator.set_step(0)
    chosen = [collator(rows)["labels"] != -100 for _ in range(5)]
    for fewer, more in pairwise(chosen):
        assert bool((fewer <= more).all())
        assert fewer.sum() < more.sum()
