"""Epochs, workers, ranks and resumes: what masks depend on, and what they must not depend on."""

import copy
import itertools
import pickle
import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset
from transformers import BertConfig, BertForMaskedLM, Trainer, TrainerState, TrainingArguments

from fastmlm import DataCollatorForMaskedLM, seeding

pytestmark = [
    # A machine with one core advises against two workers; newer Pythons advise against forks.
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
]


@pytest.fixture
def rows(wordpiece, make_rows) -> list[dict]:
    return [{"input_ids": row["input_ids"], "idx": i} for i, row in enumerate(make_rows(wordpiece, 24, 40))]


def collator(tokenizer, seed=7, epoch=None, **kwargs) -> DataCollatorForMaskedLM:
    made = DataCollatorForMaskedLM(tokenizer, mlm_probability=0.5, seed=seed, **kwargs)
    if epoch is not None:
        made.set_epoch(epoch)
    return made


def by_row(batches) -> dict[int, tuple]:
    """What became of each row, padding stripped."""
    result = {}
    for batch in batches:
        for i, idx in enumerate(batch["idx"].tolist()):
            real = batch["attention_mask"][i] == 1
            result[idx] = tuple(batch["input_ids"][i][real].tolist()), tuple(batch["labels"][i][real].tolist())
    return result


def masks(batches) -> dict[int, tuple]:
    """Which positions of each row are selected."""
    return {idx: tuple(label != -100 for label in labels) for idx, (_, labels) in by_row(batches).items()}


def repeats(one: dict, other: dict) -> int:
    """How many rows of more than 20 tokens got the same mask: by chance none, at p = 0.5."""
    return sum(one[idx] == other[idx] for idx in one if len(one[idx]) > 20)


# With a seed and an epoch told: a function of (seed, epoch, row content).


@pytest.mark.parametrize("epoch", [0, 3, 2**40])
def test_masks_depend_on_row_and_epoch_alone(wordpiece, rows, epoch):
    expected = by_row([collator(wordpiece, epoch=epoch)([row]) for row in rows])
    shuffled = random.Random(1).sample(rows, len(rows))
    tensors = [{"input_ids": torch.tensor(row["input_ids"], dtype=torch.int32), "idx": row["idx"]} for row in rows]
    arrays = [{"input_ids": np.array(row["input_ids"], dtype=np.uint16), "idx": row["idx"]} for row in rows]
    for data, size, multiple, side in (
        (rows, 24, None, "right"),
        (rows, 5, 64, "left"),
        (shuffled, 7, 8, "right"),
        (shuffled, 3, None, "left"),
        (tensors, 4, None, "left"),
        (arrays, 9, 16, "right"),
    ):
        wordpiece.padding_side = side
        loader = DataLoader(data, size, collate_fn=collator(wordpiece, epoch=epoch, pad_to_multiple_of=multiple))
        assert by_row(loader) == expected


def test_one_collator_told_again_and_again(wordpiece, rows):
    one = collator(wordpiece)
    passes = {}
    for epoch in (0, 1, 0, 2, 1):  # going back gives the same masks again
        one.set_epoch(epoch)
        passes.setdefault(epoch, []).append(by_row([one(rows)]))
        passes[epoch].append(by_row([one(rows)]))
    assert all(result == results[0] for results in passes.values() for result in results)
    for a, b in itertools.combinations(passes, 2):
        assert repeats(passes[a][0], passes[b][0]) == 0


def test_seeds_give_different_masks(wordpiece, rows):
    results = [masks([collator(wordpiece, seed=seed, epoch=0)(rows)]) for seed in (0, 1, -1, 2**64 - 2)]
    assert all(repeats(a, b) == 0 for a, b in itertools.combinations(results, 2))


def test_seed_and_epoch_do_not_trade_places(wordpiece, rows):
    """Seed 0 in epoch 1 is not seed 1 in epoch 0, as it would be if they were added."""
    assert repeats(masks([collator(wordpiece, 0, 1)(rows)]), masks([collator(wordpiece, 1, 0)(rows)])) == 0


def test_equal_rows_share_a_mask_and_others_do_not(wordpiece):
    """Rows that differ in one token, or share a beginning, are different rows."""
    ids = list(range(50, 90))
    variants = [ids, ids, [*ids[:-1], 99], ids[:-1], [51, *ids[1:]], [50, 52, 51, *ids[3:]]]
    result = masks([collator(wordpiece, epoch=0)([{"input_ids": v, "idx": i} for i, v in enumerate(variants)])])
    assert result[0] == result[1]
    distinct = [result[i][:38] for i in (0, 2, 3, 4, 5)]
    assert len(set(distinct)) == 5


@pytest.mark.parametrize(
    "make", [lambda c: c, copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))], ids=["itself", "deepcopy", "pickle"]
)
def test_persistent_forked_workers_hear_of_epochs(wordpiece, rows, make):
    """Workers forked in the first epoch hear of later ones; also where the collator is a copy, as frameworks make."""
    one = make(collator(wordpiece))
    loader = DataLoader(rows, 4, num_workers=2, collate_fn=one, persistent_workers=True, multiprocessing_context="fork")
    for epoch in (0, 1, 5):
        one.set_epoch(epoch)
        assert by_row(loader) == by_row([collator(wordpiece, epoch=epoch)(rows)])


def test_fresh_forked_workers(wordpiece, rows):
    one = collator(wordpiece)
    for epoch, workers in ((0, 1), (1, 2), (1, 3)):
        one.set_epoch(epoch)
        loader = DataLoader(rows, 3, num_workers=workers, collate_fn=one, multiprocessing_context="fork")
        assert by_row(loader) == by_row([collator(wordpiece, epoch=epoch)(rows)])


def test_persistent_spawned_workers(wordpiece, rows):
    one = collator(wordpiece)
    loader = DataLoader(
        rows, 8, num_workers=1, collate_fn=one, persistent_workers=True, multiprocessing_context="spawn"
    )
    for epoch in (0, 4):
        one.set_epoch(epoch)
        assert by_row(loader) == by_row([collator(wordpiece, epoch=epoch)(rows)])


def test_ranks_agree_where_an_epoch_was_told(wordpiece, rows, monkeypatch):
    """A row's mask is the same whichever rank has it, so a change of the world size changes nothing."""
    expected = by_row([collator(wordpiece, epoch=2)(rows)])
    monkeypatch.setattr(seeding, "_rank", lambda: 5)
    assert by_row([collator(wordpiece, epoch=2)(rows)]) == expected


# Without an epoch: nothing repeats.


@pytest.mark.parametrize("seed", [7, None])
@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (1, False), (2, False), (2, True)])
def test_passes_do_not_repeat(wordpiece, rows, seed, workers, persistent):
    """Hugging Face's collator with a seed gives new workers the same stream in every pass: static masks."""
    torch.manual_seed(0)
    one = collator(wordpiece, seed)
    loader = DataLoader(rows, 4, num_workers=workers, collate_fn=one, persistent_workers=persistent)
    passes = [masks(loader) for _ in range(3)]
    assert all(repeats(a, b) == 0 for a, b in itertools.combinations(passes, 2))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("seed", [7, None])
def test_rows_batches_and_workers_do_not_repeat(wordpiece, seed, workers):
    """One text over and over: every row of every batch of every worker gets a mask of its own."""
    data = [{"input_ids": list(range(50, 114)), "idx": i} for i in range(48)]
    found = masks(DataLoader(data, 4, num_workers=workers, collate_fn=collator(wordpiece, seed)))
    assert len(set(found.values())) == 48
    columns = np.array(list(found.values()))
    assert abs(columns.mean() - 0.5) < 5 * 0.5 / columns.size**0.5


@pytest.mark.parametrize("workers", [0, 2])
def test_collators_of_one_seed_agree(wordpiece, rows, workers):
    results = []
    for _ in range(2):
        torch.manual_seed(3)  # which the loader gives its workers
        loader = DataLoader(rows, 4, num_workers=workers, collate_fn=collator(wordpiece))
        results.append([by_row(loader), by_row(loader)])
    assert results[0] == results[1]


def test_two_collators_with_one_seed_in_turns(wordpiece, rows):
    one, other = collator(wordpiece), collator(wordpiece)
    for _ in range(3):
        torch.rand(1)  # what else is drawn in between does not matter
        assert by_row([one(rows)]) == by_row([other(rows)])


class Worker:
    """What PyTorch tells a worker of itself, with the seeds of one loader pass."""

    def __init__(self, id, base=1000):
        self.id, self.seed = id, base + id


def test_workers_of_neighbouring_seeds_share_no_stream(wordpiece, rows, monkeypatch):
    """In Hugging Face's collator seed 7 in worker 1 and seed 8 in worker 0 are one stream."""
    found = []
    for seed, worker in itertools.product((7, 8), (0, 1)):
        monkeypatch.setattr(seeding, "get_worker_info", lambda worker=worker: Worker(worker))
        found.append(masks([collator(wordpiece, seed)(rows)]))
    # The next pass of a loader has another base seed, by which one worker may get the seed of another.
    monkeypatch.setattr(seeding, "get_worker_info", lambda: Worker(0, base=1001))
    found.append(masks([collator(wordpiece, 7)(rows)]))
    assert all(repeats(a, b) == 0 for a, b in itertools.combinations(found, 2))


@pytest.mark.parametrize("seed", [7, None])
def test_ranks_differ(wordpiece, rows, monkeypatch, seed):
    """Every rank seeds PyTorch alike, so in Hugging Face's collator all ranks draw one mask."""
    found = []
    for rank in range(3):
        torch.manual_seed(0)
        monkeypatch.setattr(seeding, "_rank", lambda rank=rank: rank)
        found.append(masks([collator(wordpiece, seed)(rows)]))
    assert all(repeats(a, b) == 0 for a, b in itertools.combinations(found, 2))


def test_the_rank_goes_along_to_workers_without_a_process_group(wordpiece, rows, monkeypatch):
    """A spawned worker has no process group; the collator it gets knows the rank of the process that sent it."""
    monkeypatch.setattr(seeding, "_rank", lambda: 3)
    expected = by_row([collator(wordpiece)(rows)])
    sent = pickle.dumps(collator(wordpiece))
    monkeypatch.setattr(seeding, "_rank", lambda: 0)
    assert by_row([pickle.loads(sent)(rows)]) == expected
    assert by_row([collator(wordpiece)(rows)]) != expected


def test_rank_is_asked_of_torch(monkeypatch):
    assert seeding._rank() == 0
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 6)
    assert seeding._rank() == 6


# In a Trainer.


class Recorder(DataCollatorForMaskedLM):
    """Keeps the batches it makes."""

    def torch_call(self, examples):
        batch = super().torch_call(examples)
        self.__dict__.setdefault("batches", []).append({name: column.clone() for name, column in batch.items()})
        return batch


class Stream(IterableDataset):
    """Rows without a length."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


def content(batch) -> list[tuple]:
    """(original ids, selected positions and what they became) of each row."""
    original = torch.where(batch["labels"] == -100, batch["input_ids"], batch["labels"])
    real = batch["attention_mask"].bool()
    return [
        (tuple(o[r].tolist()), tuple(i[r].tolist()), tuple(l[r].tolist()))
        for o, i, l, r in zip(original, batch["input_ids"], batch["labels"], real, strict=True)  # noqa: E741
    ]


def train(tokenizer, data, path, resume=None, **arguments) -> list[list[tuple]]:
    """The batches that a Trainer with the collator's callback trained on."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8
    )
    made = Recorder(tokenizer, mlm_probability=0.5, seed=7)
    arguments = TrainingArguments(
        str(path), per_device_train_batch_size=4, use_cpu=True, report_to=[], disable_tqdm=True, logging_strategy="no",
        dataloader_pin_memory=False, save_strategy="steps", **{"save_steps": 100, **arguments},
    )  # fmt: skip
    trainer = Trainer(BertForMaskedLM(config), arguments, made, data, callbacks=[made.callback()])
    trainer.train(resume_from_checkpoint=resume)
    return [content(batch) for batch in made.batches]


def epochs_of(tokenizer, batches, epochs=range(9)) -> list[int | None]:
    """The epoch in which each batch's rows would be masked as they were."""
    told = {epoch: collator(tokenizer, epoch=epoch) for epoch in epochs}
    found = []
    for batch in batches:
        rows = [list(original) for original, _, _ in batch]
        found.append([epoch for epoch, one in told.items() if content(one(rows)) == batch])
    return [epochs[0] if len(epochs) == 1 else None for epochs in found]


# 12 rows in batches of 4: 3 steps an epoch.
RUNS = {
    "epochs": {"num_train_epochs": 3},
    "accumulation": {"num_train_epochs": 3, "gradient_accumulation_steps": 2},
    "steps": {"max_steps": 9},
}


@pytest.fixture
def texts(rows) -> list[dict]:
    return [{"input_ids": row["input_ids"]} for row in rows if len(row["input_ids"]) > 20][:12]


@pytest.mark.parametrize("run", RUNS)
def test_a_trainer_tells_epochs(wordpiece, texts, tmp_path, run):
    batches = train(wordpiece, texts, tmp_path, **RUNS[run])
    assert epochs_of(wordpiece, batches) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_a_second_run_counts_anew(wordpiece, rows, tmp_path):
    """``trainer.train()`` called twice starts from epoch 0 twice."""
    one = collator(wordpiece)
    callback, arguments = one.callback(), TrainingArguments(str(tmp_path), use_cpu=True)
    for _ in range(2):
        callback.on_train_begin(arguments, TrainerState(), None, train_dataloader=[1])
        for epoch in (0, 1):
            callback.on_epoch_begin(arguments, TrainerState(), None)
            assert by_row([one(rows)]) == by_row([collator(wordpiece, epoch=epoch)(rows)])


@pytest.mark.parametrize("step", [2, 3, 4, 6, 8])
def test_a_resumed_run_continues(wordpiece, texts, tmp_path, step):
    """Inside an epoch and at its end: the same rows, masked as the unbroken run masks them."""
    arguments = {"num_train_epochs": 3, "save_steps": step}
    unbroken = train(wordpiece, texts, tmp_path, **arguments)
    resumed = train(wordpiece, texts, tmp_path, f"{tmp_path}/checkpoint-{step}", **arguments)
    assert resumed == unbroken[step:]


def test_data_without_a_length(wordpiece, texts, tmp_path):
    """``state.epoch`` is wrong here (0.33 at the start of the second pass): passes are counted."""
    batches = train(wordpiece, Stream(texts), tmp_path, max_steps=9)
    assert epochs_of(wordpiece, batches) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize("step", [1, 2, 3])
def test_resuming_data_without_a_length(wordpiece, texts, tmp_path, step):
    """The Trainer reads the first pass again and drops what was trained on; it cannot skip beyond that pass."""
    arguments = {"max_steps": 9, "save_steps": step}
    unbroken = train(wordpiece, Stream(texts), tmp_path, **arguments)
    resumed = train(wordpiece, Stream(texts), tmp_path, f"{tmp_path}/checkpoint-{step}", **arguments)
    assert resumed[-(9 - step) :] == unbroken[step:]


def test_a_resumed_trainer_and_the_collator_count_passes_alike(wordpiece, texts, tmp_path):
    """After two passes the Trainer starts again with the first, whatever ``state.epoch`` says; masks follow it."""
    arguments = {"max_steps": 9, "save_steps": 6}
    train(wordpiece, Stream(texts), tmp_path, **arguments)
    resumed = train(wordpiece, Stream(texts), tmp_path, f"{tmp_path}/checkpoint-6", **arguments)
    assert epochs_of(wordpiece, resumed) == [0, 0, 0, 1, 1, 1]
