"""Static masks, rows told apart by a column, and evaluation, whose masks stay the same."""

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import equal, many, selected
from datasets import Dataset
from test_on_device_training import arguments
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import Trainer

from fastmlm import DataCollatorForMaskedLM, MaskedLMTrainer
from fastmlm.on_device import mask_batch
from fastmlm.testing import make_model

ROWS = [{"input_ids": list(range(5, 60)), "id": i} for i in range(4)]  # equal but for their ids


def collator(tokenizer: Any, **kwargs: Any) -> DataCollatorForMaskedLM:
    return DataCollatorForMaskedLM(tokenizer, **{"seed": 7, "mlm_probability": 0.5, **kwargs})


def of_epochs(made: DataCollatorForMaskedLM, rows: list[Any], epochs: Any) -> list[Tensor]:
    found = []
    for epoch in epochs:
        if epoch is not None:
            made.set_epoch(epoch)
        found.append(made(rows)["labels"])
    return found


# ---- Static ----


def test_static_masks(wordpiece) -> None:
    """Those of the first epoch, in every epoch, told or not."""
    rows = many(wordpiece, 4)
    (expected,) = of_epochs(collator(wordpiece), rows, [0])
    for labels in of_epochs(collator(wordpiece, static=True), rows, [None, None, 0, 1, 7, 2**64 - 1]):
        assert torch.equal(labels, expected)
    assert not torch.equal(of_epochs(collator(wordpiece, static=True, seed=8), rows, [None])[0], expected)


@pytest.mark.parametrize("copies", [1, 3, 10])
def test_static_copies(wordpiece, copies) -> None:
    rows = many(wordpiece, 4)
    epochs = [0, 1, 2, 3, 10, 11, 2**63, 2**64 - 1]
    expected = of_epochs(collator(wordpiece), rows, [epoch % copies for epoch in epochs])
    found = of_epochs(collator(wordpiece, static_copies=copies), rows, epochs)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert len({tuple(labels.flatten().tolist()) for labels in found}) == len({epoch % copies for epoch in epochs})


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"static": True, "seed": None}, "static: expected a seed and rng='philox' with it, got None and 'philox'"),
        ({"static_copies": 10, "seed": None}, "static_copies: expected a seed"),
        ({"static": True, "rng": "torch"}, "static: expected a seed and rng='philox' with it, got 7 and 'torch'"),
        ({"static": True, "static_copies": 10}, "static_copies: expected None with static=True, got 10"),
        ({"static_copies": 0}, "static_copies"),
        ({"row_key_column": 3}, "row_key_column: expected a column's name, got 3"),
        ({"row_key_column": "id", "rng": "torch"}, "row_key_column: expected None with rng='torch', got 'id'"),
    ],
)
def test_bad_settings(wordpiece, kwargs, message) -> None:
    with pytest.raises(ValueError, match=message):
        collator(wordpiece, **kwargs)


def test_a_seed_without_an_epoch_is_told_once(wordpiece) -> None:
    made, rows = collator(wordpiece), many(wordpiece, 2)
    with pytest.warns(UserWarning, match="seed: no epoch was told, so masks depend on the order of batches"):
        made(rows)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made(rows)
        for other in (collator(wordpiece, static=True), collator(wordpiece, seed=None), collator(wordpiece)):
            if not other.static and other.seed is not None:
                other.set_epoch(0)
            other(rows)
        collator(wordpiece).for_evaluation()(rows)


# ---- Rows told apart ----


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("kind", [int, str, lambda i: f"row {i}".encode(), lambda i: torch.tensor(i), lambda i: -i])
def test_equal_rows_told_apart(wordpiece, kind, packing) -> None:
    made = collator(wordpiece, row_key_column="id", packing=packing)
    made.set_epoch(3)
    rows = [row | {"id": kind(row["id"])} for row in ROWS]
    batch = made(rows)
    assert "id" not in batch
    masks = selected(batch).view(4, -1)
    assert len({tuple(mask.tolist()) for mask in masks}) == 4
    # Whatever the batch: by the id and the content.
    for i in (3, 0):
        assert torch.equal(selected(made([rows[i]])).view(-1), masks[i])
    changed = rows[0] | {"input_ids": [6, *rows[0]["input_ids"][1:]]}
    assert not torch.equal(selected(made([changed])).view(-1), masks[0])


def test_without_a_column_equal_rows_are_masked_alike(wordpiece) -> None:
    made = collator(wordpiece)
    made.set_epoch(3)
    batch = made(ROWS)
    assert len({tuple(mask.tolist()) for mask in selected(batch)}) == 1
    assert torch.equal(batch["id"], torch.arange(4))


def test_every_way_of_masking_sees_the_column(wordpiece) -> None:
    """Arrays, an override with Hugging Face's arguments, and the device."""

    class Override(DataCollatorForMaskedLM):
        def torch_mask_tokens(self, inputs, special_tokens_mask=None, offset_mapping=None):
            return super().torch_mask_tokens(inputs, special_tokens_mask, offset_mapping)

    kwargs: dict[str, Any] = {"seed": 7, "mlm_probability": 0.5, "row_key_column": "id"}
    expected = None
    for cls, more in (
        (DataCollatorForMaskedLM, {}),
        (DataCollatorForMaskedLM, {"return_tensors": "np"}),
        (Override, {}),
        (DataCollatorForMaskedLM, {"mask_on_device": True}),
    ):
        made = cls(wordpiece, **kwargs, **more)
        made.set_epoch(1)
        batch = made(ROWS)
        batch = mask_batch(batch, made) if made.mask_on_device else batch
        labels = torch.as_tensor(batch["labels"])
        expected = labels if expected is None else expected
        assert torch.equal(labels, expected)
        assert "id" not in batch


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        (None, ValueError, "row_key_column: expected a column 'id' in every batch, got a batch without it"),
        ([0.5, 1.5], TypeError, "row_key_column: expected one integer or string a row in 'id', got torch.float"),
        ([[1, 2], [3, 4]], TypeError, r"row_key_column: .* got torch.int64 of shape \(2, 2\)"),
        ([None, None], TypeError, "row_key_column: expected one integer or string a row in 'id', got"),
    ],
)
def test_columns_that_do_not_tell(wordpiece, values, error, message) -> None:
    made = collator(wordpiece, row_key_column="id")
    made.set_epoch(0)
    rows = many(wordpiece, 2)
    if values is not None:
        rows = [row | {"id": value} for row, value in zip(rows, values, strict=True)]
    with pytest.raises(error, match=message):
        made(rows)


# ---- Evaluation ----


def test_evaluation_has_masks_of_its_own(wordpiece) -> None:
    """The same each time, in each batch and copy; those of no epoch; told epochs do not change them."""
    rows, training = many(wordpiece, 6), collator(wordpiece)
    evaluation = training.for_evaluation()
    expected = evaluation(rows)
    evaluation.set_epoch(4)
    assert equal(evaluation(rows), expected)
    parts = [evaluation(rows[i : i + 2])["labels"] for i in (0, 2, 4)]
    assert torch.equal(torch.cat(parts), expected["labels"])
    copies = (pickle.loads(pickle.dumps(evaluation)), copy.deepcopy(evaluation))
    for other in (collator(wordpiece).for_evaluation(), *copies):
        assert equal(other(rows), expected)
    for epoch in range(3):
        training.set_epoch(epoch)
        assert not torch.equal(training(rows)["labels"], expected["labels"])
    assert not equal(collator(wordpiece, seed=8).for_evaluation()(rows), expected)
    assert equal(*(collator(wordpiece, seed=seed).for_evaluation()(rows) for seed in (None, 0)))
    loader = DataLoader(rows, 2, collate_fn=evaluation, num_workers=2)
    assert torch.equal(torch.cat([batch["labels"] for batch in loader]), expected["labels"])


def trainer(cls: Any, tokenizer: Any, path: Path, made: Any, rows: Any, **kwargs: Any) -> Any:
    model = make_model("Bert", vocab_size=len(tokenizer), max_position_embeddings=64).float()
    return cls(model, arguments(path, **kwargs), data_collator=made, train_dataset=rows, eval_dataset=rows)


def test_evaluations_of_one_model_are_equal(wordpiece, tmp_path) -> None:
    """To the last bit, before and after an epoch was told, on any batch size; not with a plain Trainer."""
    wordpiece.model_input_names = ["input_ids", "attention_mask"]
    rows = [{"input_ids": row["input_ids"][:40].tolist()} for row in many(wordpiece, 8)]
    made = collator(wordpiece)
    ours = trainer(MaskedLMTrainer, wordpiece, tmp_path, made, rows)
    first = ours.evaluate()
    made.set_epoch(5)
    again, predicted = ours.evaluate(), ours.predict(rows)
    assert again["eval_loss"] == first["eval_loss"]
    assert predicted.metrics["test_loss"] == pytest.approx(first["eval_loss"], rel=1e-6)  # of all logits, so rounded
    assert again["eval_masked_accuracy"] == first["eval_masked_accuracy"]
    assert ours.data_collator is made
    plain = trainer(Trainer, wordpiece, tmp_path, collator(wordpiece, seed=None), rows)
    assert plain.evaluate()["eval_loss"] != plain.evaluate()["eval_loss"]


def test_columns_of_the_collator_are_kept(wordpiece, tmp_path) -> None:
    """Those that Trainer would remove, since the model does not take them: the key, specials, words."""
    wordpiece.model_input_names = ["input_ids", "attention_mask"]
    special = [int(i % 2 == 0) for i in range(55)]
    rows = Dataset.from_list([row | {"special_tokens_mask": special, "other": "text"} for row in ROWS])
    made = collator(wordpiece, row_key_column="id", mlm_probability=1.0)
    made.set_epoch(0)
    ours = trainer(MaskedLMTrainer, wordpiece, tmp_path, made, rows, per_device_train_batch_size=4)
    (batch,) = ours.get_train_dataloader()
    assert set(batch) == {"input_ids", "attention_mask", "labels"}
    assert torch.equal(selected(batch)[0], torch.tensor(special) == 0)
    words = collator(wordpiece, whole_word_mask=True, row_key_column="id")
    assert words.columns == ("id", "special_tokens_mask", "offset_mapping", "word_ids")
    with pytest.raises(ValueError, match="row_key_column: expected a column 'id'"):
        next(iter(trainer(Trainer, wordpiece, tmp_path, made, rows).get_train_dataloader()))
