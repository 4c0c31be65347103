"""Processes that are killed: runs resume with the masks and weights of the unbroken one, and a worker's end is told."""

import multiprocessing
import os
import signal
import sys
from pathlib import Path
from typing import Any

import crash
import pytest
import torch
import transformers
from scale import TRAINERS, expected, make_collator, make_rows, make_trainer, results, rows_of, run, torchrun
from torch.utils.data import DataLoader, get_worker_info

pytestmark = [
    # A machine with one core advises against several workers; newer Pythons advise against forks.
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
]


def check(whole: Any, resumed: Any, steps: int) -> None:
    """A resumed run saw what the unbroken one did from there on, masked as expected, and ends with its weights."""
    seen, weights = whole
    truth = [expected(epoch, crash.ROWS) for epoch in range(16 // steps)]
    assert all(one.row == truth[one.step // steps][one.idx] for one in seen)
    missed = crash.SAVED_AT // steps  # whole passes
    assert resumed[0] == [one._replace(passed=one.passed - missed) for one in seen if one.step >= crash.SAVED_AT]
    assert len(resumed[0]) == 3 * (16 - crash.SAVED_AT)
    assert weights.keys() == resumed[1].keys()
    different = [name for name in weights if not torch.equal(weights[name], resumed[1][name])]
    assert not different, different


def test_a_killed_run(tmp_path: Path) -> None:
    """By SIGKILL, in mid-epoch: the resumed run ends with the weights of the unbroken one, dropout included."""
    run([sys.executable, crash.__file__, str(tmp_path)], tmp_path)
    for kind in TRAINERS:
        whole, resumed = (results(tmp_path, f"{name} {kind}", 1)[0] for name in ("whole", "resumed"))
        check(whole, resumed, steps=8)
        assert not list(tmp_path.glob(f"killed {kind}-*"))  # it did not come to its end
    plain, sparse = (results(tmp_path, f"whole {kind}", 1)[0] for kind in TRAINERS)
    assert plain[0] == sparse[0]


def test_a_killed_process_of_two(tmp_path: Path) -> None:
    """torchrun starts both again; they see the masks that they would have seen."""
    torchrun(2, tmp_path, "crash.py", restarts=1)
    for kind in TRAINERS:
        ranks = [results(tmp_path, f"{name} {kind}", 2) for name in ("whole", "resumed")]
        for whole, resumed in zip(*ranks, strict=True):
            check(whole, resumed, steps=4)
        assert ranks[0][0][0] != ranks[0][1][0]
        assert [path.name for path in tmp_path.glob(f"killed {kind}-*")] == [f"killed {kind}-0"]


# ---- Workers of a loader ----

COUNT, LAST = 60, 36  # the row that kills, with which batch 12 begins
TOLD = r"DataLoader worker \(pid.*\) (is killed by signal: Killed|exited unexpectedly)"


class Deadly:
    """Rows of which one ends the worker that reads it: when all before it have arrived, lest others are cut off."""

    def __init__(self) -> None:
        self.rows, self.arrived = make_rows(COUNT), multiprocessing.get_context("fork").Event()

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, i: int) -> dict[str, Any]:
        if i == LAST:
            assert get_worker_info() is not None
            assert self.arrived.wait(60)
            os.kill(os.getpid(), signal.SIGKILL)
        return self.rows[i]


def check_until_then(seen: list[tuple[int, Any]], epoch: int, count: int) -> None:
    truth = expected(epoch, make_rows(COUNT))
    assert [idx for idx, _ in seen] == list(range(count))
    assert all(row == truth[idx] for idx, row in seen)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_killed_worker(persistent: bool) -> None:
    """An error, and until then no row twice or with other masks."""
    data, made, seen = Deadly(), make_collator(1), []
    kwargs: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "fork", "persistent_workers": persistent}
    batches = iter(DataLoader(data, 3, collate_fn=made, **kwargs))
    for _ in range(LAST // 3):
        seen += rows_of(next(batches))
    data.arrived.set()
    with pytest.raises(RuntimeError, match=TOLD):
        next(batches)
    check_until_then(seen, 1, LAST)


class TellArrival(transformers.TrainerCallback):
    """Accelerate's loader is one batch ahead of the step: the last that arrives is that of the step after this one."""

    def __init__(self, data: Deadly) -> None:
        self.data = data

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == LAST // 3 - 1:
            self.data.arrived.set()


@pytest.mark.parametrize("kind", TRAINERS)
def test_a_killed_worker_of_a_trainer(kind: str, tmp_path: Path) -> None:
    data = Deadly()
    trainer = make_trainer(kind, tmp_path, data, [TellArrival(data)], dataloader_num_workers=2)
    trainer._get_train_sampler = lambda *args: None  # in order
    with pytest.raises(RuntimeError, match=TOLD):
        trainer.train()
    assert all(one.passed == 0 for one in trainer.seen)
    check_until_then([(one.idx, one.row) for one in trainer.seen], 0, LAST - 3)
