"""``zero_copy`` in training: the masks and losses of the ordinary path, through loaders, workers and the Trainer."""

import pytest
import torch
import transformers
from batches import equal
from torch.utils.data import DataLoader

from fastmlm import DataCollatorForMaskedLM
from fastmlm.feeding import ZeroCopyDataset, zero_copy
from fastmlm.testing import make_model


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("kind", [None, "numpy", "torch"])
def test_masks_equal_those_of_the_ordinary_path(wordpiece, mapped, kind, workers):
    collator = DataCollatorForMaskedLM(wordpiece, seed=3)
    numbers = [name for name in mapped.column_names if name != "text"]

    def batches(dataset, epoch, workers):
        collator.set_epoch(epoch)
        order = torch.Generator().manual_seed(1)
        loader = DataLoader(
            dataset, batch_size=8, shuffle=True, generator=order, collate_fn=collator, num_workers=workers
        )
        return list(loader)

    rows = mapped.select_columns(numbers)
    first = batches(rows.with_format(kind), 0, 0)
    for epoch in (0, 1):
        expected = batches(rows.with_format(kind), epoch, 0)
        got = batches(zero_copy(rows.with_format(kind)), epoch, workers)
        assert len(got) == len(expected) > 5
        assert all(equal(one, other) for one, other in zip(got, expected, strict=True))
        assert (epoch == 0) == all(equal(one, other) for one, other in zip(got, first, strict=True))


def test_fresh_masks_equal_too(wordpiece, mapped):
    """Without an epoch told, a batch draws its key from torch's generator: as often and in the same order."""
    collator = DataCollatorForMaskedLM(wordpiece)
    rows = mapped.remove_columns("text")
    passes = []
    for dataset in (rows, zero_copy(rows)):
        torch.manual_seed(4)
        passes.append([collator(dataset.__getitems__(list(range(i, i + 5)))) for i in (0, 5, 3)])
    assert all(equal(one, other) for one, other in zip(*passes, strict=True))


def test_hugging_faces_collator_takes_the_rows(wordpiece, mapped):
    collator = transformers.DataCollatorForLanguageModeling(wordpiece, seed=1)
    rows = mapped.remove_columns("text")
    expected = collator(rows.__getitems__([4, 9, 2]))
    collator.generator = None
    assert equal(collator(list(zero_copy(rows).__getitems__([4, 9, 2]))), expected)


@pytest.mark.parametrize("workers", [0, 2])
def test_trainer_needs_no_other_argument(wordpiece, mapped, tmp_path, workers):
    """It drops the text, keeps the fast path, and trains on the batches it would have seen."""
    losses = []
    for dataset in (mapped, zero_copy(mapped)):
        collator = DataCollatorForMaskedLM(wordpiece, seed=2)
        arguments = transformers.TrainingArguments(
            tmp_path, max_steps=4, per_device_train_batch_size=16, report_to=[], use_cpu=True, save_strategy="no",
            logging_steps=1, disable_tqdm=True, dataloader_pin_memory=False, dataloader_num_workers=workers,
        )  # fmt: skip
        model = make_model(vocab_size=len(wordpiece), max_position_embeddings=512)
        trainer = transformers.Trainer(
            model, arguments, train_dataset=dataset, data_collator=collator, callbacks=[collator.callback()]
        )
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert type(trainer.get_train_dataloader().dataset) is ZeroCopyDataset
    assert len(losses[0]) == 4
    assert losses[0] == losses[1]
