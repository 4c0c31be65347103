"""Masks are a function of seed, epoch and row: under torchrun, FSDP2 and Accelerate, for streams, samplers, resumes."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from accelerate.state import AcceleratorState
from scale import (
    ACCELERATED,
    ALONE,
    BESIDE,
    TRAINERS,
    Seen,
    expected,
    make_collator,
    make_rows,
    results,
    rows_of,
    stream,
    torchrun,
    train,
)
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from fastmlm.on_device import mask_batch

pytestmark = [
    # A machine with one core advises against several workers; newer Pythons advise against forks.
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
]
ROWS = make_rows()


def check(seen: list[Seen], whole: int = 2, begun: int = 0, rows: list[dict[str, Any]] = ROWS) -> None:
    """Each row was masked as it is alone in the epoch of its pass: all rows in whole passes, some in those begun."""
    for passed in range(whole + begun):
        truth = expected(passed, rows)
        found = [(one.idx, one.row) for one in seen if one.passed == passed]
        assert all(row == truth[idx] for idx, row in found), f"other masks in pass {passed}"
        missing = truth.keys() - {idx for idx, _ in found}
        assert not missing if passed < whole else found, f"pass {passed} lacks {missing}"
    assert {one.passed for one in seen} == set(range(whole + begun))


def test_what_is_expected() -> None:
    """Rows are masked, differently in each epoch, equal ones alike; and `check` sees a mask that differs."""
    first, second = expected(0, ROWS), expected(1, ROWS)
    assert all(first[idx][1] != second[idx][1] for idx in first)
    assert all(first[idx] == first[idx + 11] for idx in range(11))
    assert len(set(first.values())) == 11
    seen = [Seen(0, 0, idx, row) for idx, row in first.items()]
    check(seen, 1)
    for wrong in ([*seen[1:], seen[0]._replace(row=second[0])], seen[1:], [one._replace(passed=1) for one in seen]):
        with pytest.raises(AssertionError):
            check(wrong, 1)


# ---- Several processes ----


@pytest.mark.parametrize("world", [2, 4])
def test_torchrun(world: int, tmp_path: Path) -> None:
    """Each process of `Trainer` and `MaskedLMTrainer` sees rows of its own, masked as one process alone masks them."""
    others = [name for name in BESIDE if name not in ACCELERATED] if world == 2 else []
    torchrun(world, tmp_path, "scale.py", *ALONE, *others)
    for name in ALONE:
        ranks = results(tmp_path, name, world)
        alone = train(name.removeprefix("ddp "), tmp_path, ROWS)
        check(alone)
        check([one for seen in ranks for one in seen])
        steps = -(-len(ROWS) // (3 * world))
        assert [len(seen) for seen in ranks] == [2 * 3 * steps] * world  # some twice, for batches of one size
        assert len({tuple(one.idx for one in seen) for seen in ranks}) == world
        same = {(one.passed, one.idx): one.row for one in alone}
        assert all(same[one.passed, one.idx] == one.row for seen in ranks for one in seen)
    for name in others:
        ranks = results(tmp_path, name, world)
        if "packed" in name:
            message = "packing: expected dispatch_batches=False"
            assert all(isinstance(error, ValueError) and message in str(error) for error in ranks), f"{name}: {ranks}"
            continue
        assert all(isinstance(seen, list) for seen in ranks), f"{name}: {ranks}"
        check([one for seen in ranks for one in seen], begun=name != "fsdp2")
        assert {one[:3] for one in ranks[0]}.isdisjoint(one[:3] for one in ranks[1]), name


# What Accelerate says where it cannot put batches together, or take them apart.
WIDTHS = (RuntimeError, "You can't use batches of different size with `dispatch_batches=True`")
NO_ROWS = (TypeError, "Unsupported types (<class 'int'>) passed to `_gpu_broadcast_one`")
REFUSED = {
    "widths, dispatch=True, split=False": WIDTHS,
    "widths, odd end, dispatch=True, split=False": WIDTHS,
    "widths, odd end, dispatch=True, split=True": (RuntimeError, "Sizes of tensors must match except in dimension 0"),
    "packed, dispatch=True, split=False": WIDTHS,
    "packed on device, dispatch=True, split=False": WIDTHS,
    "packed to one size, dispatch=True, split=False": (TypeError, "Can only concatenate tensors but got <class 'int'>"),
    "packed, dispatch=True, split=True": NO_ROWS,
    "packed on device, dispatch=True, split=True": NO_ROWS,
    "packed to one size, dispatch=True, split=True": NO_ROWS,
}


def test_accelerate(tmp_path: Path) -> None:
    """Whatever is dispatched or split: the same masks, or an error on all processes, never rows mixed up."""
    torchrun(2, tmp_path, "scale.py", *ACCELERATED)
    for name in ACCELERATED:
        ranks = results(tmp_path, name, 2)
        if name in REFUSED:
            error, message = REFUSED[name]
            assert isinstance(ranks[0], error), f"{name}: {ranks[0]!r:.300}"
            assert message in str(ranks[0]), f"{name}: {ranks[0]}"
            assert isinstance(ranks[1], (RuntimeError, TypeError)), f"{name}: {ranks[1]!r:.300}"
            continue
        for seen in ranks:
            assert isinstance(seen, list), f"{name}: {seen!r}"
        rows = ROWS[:21] if "odd end" in name else ROWS
        both = [one for seen in ranks for one in seen]
        check(both, *((0, 2) if "skipped" in name else (2, 0)), rows)
        assert {one[:3] for one in ranks[0]}.isdisjoint(one[:3] for one in ranks[1]) or "odd end" in name
        assert min(map(len, ranks)) > 8


def test_dispatched_batches_that_are_masked_on_the_device_without_an_epoch() -> None:
    """Of 4 and 2 rows, put together and divided in 3 and 3: each row has the mask that its own batch gave it."""
    rows = [{"input_ids": list(range(50, 90)), "idx": i} for i in range(6)]
    ships, plain = (make_collator(mask_on_device=shipped) for shipped in (True, False))
    batches = [ships(rows[:4]), ships(rows[4:])]
    together = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    parts = [{name: column[part] for name, column in together.items()} for part in (slice(0, 3), slice(3, 6))]
    found = [pair for part in parts for pair in rows_of(mask_batch(part, ships))]
    assert len({row for _, row in found}) == 6
    assert found == [pair for part in (rows[:4], rows[4:]) for pair in rows_of(plain(part))]


# ---- One process ----


class Stream(IterableDataset):
    """The rows, divided among the workers of a loader."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = get_worker_info()
        return iter(ROWS[worker.id :: worker.num_workers] if worker else ROWS)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", [Stream, stream])
def test_streams(make: Any, workers: int, tmp_path: Path) -> None:
    """Without a length, passes are counted: two whole ones and a part of a third."""
    for kind in TRAINERS:
        data, last = make(), 18
        check(train(kind, tmp_path, data, max_steps=last, dataloader_num_workers=workers), begun=1)


def test_batches_of_rows_of_like_lengths(tmp_path: Path) -> None:
    fields = transformers.TrainingArguments.__dataclass_fields__
    new = "train_sampling_strategy" in fields
    by_length = {"train_sampling_strategy": "group_by_length"} if new else {"group_by_length": True}
    for kind in TRAINERS:
        seen = train(kind, tmp_path, ROWS, **by_length)
        check(seen)
        longest = max(len(row["input_ids"]) for row in ROWS)
        assert [len(seen[i].row[0]) for i in (0, len(ROWS))] == [longest, longest]  # where out of memory shows at once


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", TRAINERS)
def test_accumulation_and_resumes(kind: str, workers: int, tmp_path: Path) -> None:
    """Steps of 3, 3 and 2 batches: resumed in each pass and at its end, a run sees what the unbroken one saw."""
    changes = {"gradient_accumulation_steps": 3, "save_strategy": "steps", "save_steps": 1} | worked(workers)
    unbroken = train(kind, tmp_path, ROWS, **changes)
    check(unbroken)
    for step in (1, 3, 5):
        begun = unbroken[0].passed + step // 3
        resumed = train(kind, tmp_path / "resumed", ROWS, tmp_path / f"checkpoint-{step}", **changes)
        assert resumed == [one._replace(passed=one.passed - begun) for one in unbroken if one.step >= step]
        assert len(resumed) == {1: 35, 3: 22, 5: 4}[step]


def worked(workers: int) -> dict[str, Any]:
    return {"dataloader_num_workers": workers, "dataloader_persistent_workers": workers > 0}


def test_resumed_with_batches_of_another_size(tmp_path: Path) -> None:
    """Then the Trainer counts the epochs anew, by steps; masks are of the epoch that it counts, also when resumed."""
    for kind in TRAINERS:
        changes = {"save_strategy": "steps", "save_steps": 3}
        train(kind, tmp_path / kind, ROWS, num_train_epochs=1, **changes)
        changes |= {"per_device_train_batch_size": 11, "num_train_epochs": 4}  # two steps a pass, so in the second one
        first = train(kind, tmp_path / kind, ROWS, tmp_path / kind / "checkpoint-3", **changes)
        second = train(kind, tmp_path / "again", ROWS, tmp_path / kind / "checkpoint-6", **changes)
        assert [one.row for one in second] == [one.row for one in first if one.step >= 6]
        truth = [expected(passed, ROWS) for passed in range(4)]
        assert all(one.row == truth[one.step // 2][one.idx] for one in first)


def loaders(workers: int, shuffle: bool = True) -> tuple[DataLoader, Any]:
    made = make_collator()
    generator = torch.Generator().manual_seed(3)
    context = {"num_workers": workers, "persistent_workers": workers > 0}
    return DataLoader(ROWS, 4, shuffle=shuffle, generator=generator, collate_fn=made, **context), made


def rows_in(batches: Any, passed: int) -> list[Seen]:
    return [Seen(passed, step, idx, row) for step, batch in enumerate(batches) for idx, row in rows_of(batch)]


@pytest.mark.parametrize("workers", [0, 2])
def test_skipped_batches(workers: int) -> None:
    """Those that Accelerate skips at a resume leave no trace in the masks of the others."""
    AcceleratorState._reset_state(reset_partial_state=True)
    plain, made = loaders(workers)
    loader = Accelerator(cpu=True).prepare(plain)
    for epoch, skipped in ((1, 0), (0, 2), (0, 5), (1, 1)):
        made.set_epoch(epoch)
        seen = rows_in(skip_first_batches(loader, skipped), epoch)
        truth = expected(epoch, ROWS)
        assert len(seen) == len(ROWS) - 4 * skipped
        assert all(one.row == truth[one.idx] for one in seen)


def test_passes_left_early() -> None:
    """Workers that have collated ahead in one epoch give nothing of it to the next."""
    loader, made = loaders(2)
    for epoch, left in enumerate((1, 2, 3, None)):
        made.set_epoch(epoch)
        truth = expected(epoch, ROWS)
        found = [pair for batch in islice(loader, left) for pair in rows_of(batch)]
        assert len(found) == (4 * left if left else len(ROWS))
        assert all(row == truth[idx] for idx, row in found)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata 0.11 with torch 2.13
@pytest.mark.parametrize("workers", [0, 2])
def test_loaders_with_a_state(workers: int) -> None:
    """torchdata's loader, saved in mid-epoch and restored in another one, alone and as Accelerate uses it."""
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    for prepared in (False, True):
        rest: list[list[Seen]] = []
        state: Any = None
        for resumed in (False, True):
            AcceleratorState._reset_state(reset_partial_state=True)
            made = make_collator(epoch=1)
            kwargs: dict[str, Any] = {"collate_fn": made, "num_workers": workers}
            if prepared:
                config = DataLoaderConfiguration(use_stateful_dataloader=True)
                loader = Accelerator(cpu=True, dataloader_config=config).prepare(DataLoader(ROWS, 4, **kwargs))
            else:
                loader = torchdata.StatefulDataLoader(ROWS, 4, **kwargs)
            if resumed:
                loader.load_state_dict(state)
            batches = iter(loader)
            if not resumed:
                next(batches), next(batches)
                state = loader.state_dict()
            rest.append(rows_in(batches, 1))
        assert rest[0] == rest[1]
        truth = expected(1, ROWS)
        assert [(one.idx, one.row) for one in rest[1]] == list(truth.items())[8:]
