"""Permutation language modelling: who sees whom, the law of spans and orders, what masks depend on, XLNet."""

import copy
import dataclasses
import itertools
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from batches import SPECIALS, equal
from oracle import slow_draw, slow_fold, slow_row_key
from scipy.stats import chisquare
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import DataCollatorForPermutationLanguageModeling, XLNetConfig, XLNetLMHeadModel

from fastmlm import DataCollatorForPermutationLM

IMPLS = ("reference", "cpp")
UNLIKELY = 1e-4  # p-value of chi-square, seeds being fixed


def collator_of(tokenizer: Any, epoch: int | None = 0, **kwargs: Any) -> DataCollatorForPermutationLM:
    collator = DataCollatorForPermutationLM(tokenizer, **{"seed": 3} | kwargs)
    if epoch is not None:
        collator.set_epoch(epoch)
    return collator


def random_rows(lengths: list[int], seed: int = 0) -> list[list[int]]:
    """Rows of ordinary ids of a tokenizer with 800."""
    rng = np.random.default_rng(seed)
    return [rng.integers(5, 600, n).tolist() for n in lengths]


def targets_of(batch: Any) -> Tensor:
    return batch["labels"] != -100


def order_of(batch: Any, row: int) -> list[int]:
    """A row's targets in the order in which they are predicted: the n-th sees n of them."""
    at = targets_of(batch)[row].nonzero()[:, 0]
    return at[(batch["perm_mask"][row][at][:, at] == 0).sum(1).argsort()].tolist()


def by_row(batch: Any) -> list[Any]:
    """All there is of each row, without padding."""
    found = []
    for row, real in enumerate(batch["attention_mask"] == 1):
        columns = [batch[name][row][real].tolist() for name in ("input_ids", "labels")]
        found.append([*columns, batch["perm_mask"][row][real][:, real].tolist()])
    return found


def assert_factorises(batch: Any, row: int, never: Tensor) -> None:
    """Brute force, by the definition: over all pairs, and along chains of who sees whom, as deep as a model may be."""
    hidden, targets = batch["perm_mask"][row], targets_of(batch)[row].tolist()
    order = {at: place for place, at in enumerate(order_of(batch, row))}
    assert sorted(order.values()) == list(range(sum(targets)))
    for i, j in itertools.product(range(len(targets)), repeat=2):
        sees = not targets[j] or (targets[i] and order[j] < order[i])
        assert hidden[i, j] == (0 if sees else 1), (i, j)
    sees_at_depth = (hidden == 0).float()  # what a target's prediction is made of, itself left out
    for _ in range(3):
        sees_at_depth = ((sees_at_depth + sees_at_depth @ (hidden == 0).float()) > 0).float()
    for i, place in order.items():
        assert not any(sees_at_depth[i, j] for j, other in order.items() if other >= place)
    assert not (targets_of(batch)[row] & never[row]).any()


# ---- What it gives, and who sees whom ----


def test_arguments_are_hugging_faces_in_their_order(wordpiece) -> None:
    theirs = dataclasses.fields(DataCollatorForPermutationLanguageModeling)
    ours = dataclasses.fields(DataCollatorForPermutationLM)
    assert [(f.name, f.default) for f in ours[: len(theirs)]] == [(f.name, f.default) for f in theirs]
    assert all(field.kw_only for field in ours[len(theirs) :])
    assert isinstance(collator_of(wordpiece), DataCollatorForPermutationLanguageModeling)


@pytest.mark.parametrize("kind", ["dicts", "ids", "arrays", "tensors"])
@pytest.mark.parametrize("return_tensors", ["pt", "np"])
def test_what_hugging_faces_gives(wordpiece, make_rows, kind, return_tensors) -> None:
    rows: list[Any] = make_rows(wordpiece, 5, 24, padding="max_length")
    if kind != "dicts":
        convert = {"ids": list, "arrays": np.array, "tensors": torch.tensor}[kind]
        rows = [convert(row["input_ids"]) for row in rows]
    theirs = DataCollatorForPermutationLanguageModeling(wordpiece, return_tensors=return_tensors)(copy.deepcopy(rows))
    ours = collator_of(wordpiece, return_tensors=return_tensors)(rows)
    assert type(ours) is type(theirs)
    assert list(ours) == [*theirs, "attention_mask"] + ["token_type_ids"] * (kind == "dicts")
    for name, column in theirs.items():
        assert (type(ours[name]), ours[name].shape, ours[name].dtype) == (type(column), column.shape, column.dtype)
    assert (ours["target_mapping"] == theirs["target_mapping"]).all()
    plain = collator_of(wordpiece, mask_inputs=False)(rows)
    targets = torch.as_tensor(ours["labels"]) != -100
    masked = plain["input_ids"].masked_fill(targets, wordpiece.mask_token_id)
    assert torch.equal(masked, torch.as_tensor(ours["input_ids"]))
    assert torch.equal(plain["labels"], plain["input_ids"].masked_fill(~targets, -100))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("p", [1 / 6, 0.6, 1.0])
def test_the_masks_factorise(tokenizers, make_rows, impl, p) -> None:
    for name in ("wordpiece", "unigram"):  # which pad on either side
        rows = make_rows(tokenizers[name], 6, 21)
        rows[0]["special_tokens_mask"] = [0] * len(rows[0]["input_ids"])
        rows[0]["special_tokens_mask"][3:6] = [1, 1, 1]
        for row in rows[1:]:
            row["special_tokens_mask"] = [0] * len(row["input_ids"])
        batch = collator_of(tokenizers[name], plm_probability=p, impl=impl)(rows)
        plain = collator_of(tokenizers[name], plm_probability=p, impl=impl, mask_inputs=False)(rows)["input_ids"]
        never = torch.isin(plain, torch.tensor(SPECIALS)) | (batch["attention_mask"] == 0)
        start = int((batch["attention_mask"][0] == 0).int().argmin())
        never[0, start + 3 : start + 6] = True
        assert targets_of(batch).any()  # short rows may have none
        assert torch.equal(targets_of(batch), ~never) or p < 1, "with 1, all that may be are targets"
        for row in range(len(rows)):
            assert_factorises(batch, row, never)


def tiny_xlnet() -> XLNetLMHeadModel:
    torch.manual_seed(0)
    return XLNetLMHeadModel(
        XLNetConfig(vocab_size=800, d_model=32, n_layer=3, n_head=2, d_inner=64, dropout=0.0, initializer_range=0.1)
    )


def changed_by(model: Any, batch: dict[str, Tensor], column: int) -> Tensor:
    """The columns of the first row whose logits change with the id in one column."""
    other = batch | {"input_ids": batch["input_ids"].clone()}
    other["input_ids"][0, column] += 1
    with torch.no_grad():
        return (model(**batch).logits[0] - model(**other).logits[0]).abs().amax(1) > 0


def test_nothing_leaks_through_a_model(wordpiece) -> None:
    """With ids in place of mask tokens, XLNet's attention shows a target's id to later targets, and to nobody else."""
    model = tiny_xlnet().eval()
    row = [2, *random_rows([21])[0], 3]
    batch = collator_of(wordpiece, mask_inputs=False, plm_probability=0.3)([row])
    batch.pop("labels")
    order = order_of(collator_of(wordpiece, plm_probability=0.3)([row]), 0)
    assert len(order) > 4
    for place, column in enumerate(order):
        assert set(changed_by(model, batch, column).nonzero()[:, 0].tolist()) == set(order[place + 1 :])
    assert changed_by(model, batch, 0).all()  # what is no target is seen by all
    # As Hugging Face has it, specials see the targets before them in the order, and all see specials.
    batch["perm_mask"][0, -1] = 0
    assert order[0] in changed_by(model, batch, order[0]).nonzero()[:, 0].tolist()


# ---- The law ----


def by_the_law(ids: list[int], key: int, p: float, longest: int) -> tuple[list[int], list[int]]:
    """The targets of a row without special tokens, and their order, in Python's integers."""
    row_key = slow_row_key(list(enumerate(ids)))
    covered, start, j = set(), 0, 0
    while start < len(ids):
        length = 1 + (slow_draw(key, row_key, 2 * j, 3) * longest >> 32)
        context = int(min(length / p, 2**31))
        first = start + (slow_draw(key, row_key, 2 * j + 1, 3) * (context - length + 1) >> 32)
        covered |= set(range(first, min(first + length, len(ids))))
        start, j = start + context, j + 1
    return sorted(covered), sorted(covered, key=lambda s: (slow_draw(key, row_key, s, 5), s))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("p", "longest"), [(1 / 6, 5), (0.15, 3), (0.9, 1), (1.0, 4), (1e-9, 5), (0.5, (1 << 31) - 1)])
def test_the_law_in_integers(wordpiece, impl, p, longest) -> None:
    for side in ("left", "right"):
        wordpiece.padding_side = side
        rows = random_rows([1, 2, 33, 64, 65, 150])
        batch = collator_of(wordpiece, 7, plm_probability=p, max_span_length=longest, impl=impl)(rows)
        for i, ids in enumerate(rows):
            targets, order = by_the_law(ids, slow_fold(3, 7), p, longest)
            shift = batch["labels"].shape[1] - len(ids) if side == "left" else 0
            assert (targets_of(batch)[i].nonzero()[:, 0] - shift).tolist() == targets
            assert [column - shift for column in order_of(batch, i)] == order


@pytest.mark.parametrize("lengths", [[1], [0, 2], [15, 64, 3], [65, 1, 129], [507, 0, 506, 9, 300], [64] * 300])
@pytest.mark.parametrize("p", [1 / 6, 1.0])
def test_both_implementations(wordpiece, lengths, p) -> None:
    """Also where the masks are written past the caches (5 × 507²), and into memory that held others before."""
    for side, mask_inputs in (("left", True), ("right", False)):
        wordpiece.padding_side = side
        rows: list[Any] = [{"input_ids": ids} for ids in random_rows(lengths)]
        rng = np.random.default_rng(1)
        for row in rows:
            n = len(row["input_ids"])
            row |= {"attention_mask": rng.integers(0, 5, n) != 0, "special_tokens_mask": rng.integers(0, 5, n) == 0}
        expected = collator_of(wordpiece, impl="reference", plm_probability=p, mask_inputs=mask_inputs)(rows)
        collator = collator_of(wordpiece, impl="cpp", plm_probability=p, mask_inputs=mask_inputs)
        for _ in range(3):
            batch = collator(rows)
            assert equal(batch, expected)
            assert targets_of(batch).any() or sum(lengths) < 9
            for name in ("perm_mask", "target_mapping"):
                batch[name].fill_(float("nan"))
            del batch


def test_spans_are_uniform(wordpiece) -> None:
    """The first span of a row, whose context of at most 320 tokens is inside of it; few touch the next one."""
    rows = random_rows([320] * 3000)
    collator = collator_of(wordpiece, plm_probability=1 / 64)
    lengths, places = np.zeros(5), np.zeros(4)
    for at in range(0, len(rows), 100):
        targets = targets_of(collator(rows[at : at + 100])).numpy()
        first = targets.argmax(1)
        length = np.array([row[start:].argmin() for row, start in zip(targets, first, strict=True)])
        for n, start in zip(length, first, strict=True):
            lengths[min(n, 5) - 1] += 1  # of 1 in 10000 more than 5: two that touch
            places[min(4 * start // (63 * n + 1), 3)] += 1
    assert chisquare(lengths).pvalue > UNLIKELY
    assert chisquare(places).pvalue > UNLIKELY


@pytest.mark.parametrize("p", [0.05, 1 / 6, 0.5])
def test_share_of_targets(wordpiece, p) -> None:
    rows = random_rows([512] * 80)
    share = targets_of(collator_of(wordpiece, plm_probability=p)(rows)).float().mean()
    assert abs(share - p) < 0.03 * p + 0.004  # 40960 tokens in spans of 11/3 tokens on average: 3 standard deviations


@pytest.mark.parametrize("n", [3, 4])
def test_orders_are_uniform(wordpiece, n) -> None:
    rows = random_rows([n] * 6000)
    batch = collator_of(wordpiece, plm_probability=1.0)(rows)
    counts = dict.fromkeys(itertools.permutations(range(n)), 0)
    for order in ((batch["perm_mask"] == 0).sum(2)).tolist():
        counts[tuple(order)] += 1
    assert chisquare(list(counts.values())).pvalue > UNLIKELY


# ---- Masks are a function of (seed, epoch, row) ----


def test_only_the_row_counts(wordpiece, make_rows) -> None:
    rows = make_rows(wordpiece, 12)
    expected = by_row(collator_of(wordpiece)(rows))
    for size, side, multiple, workers in ((1, "left", 8, 0), (5, "right", None, 2), (5, "left", None, 0)):
        wordpiece.padding_side = side
        collator = collator_of(wordpiece, pad_to_multiple_of=multiple)
        batches = list(DataLoader(rows, size, collate_fn=collator, num_workers=workers))
        assert multiple is None or all(batch["perm_mask"].shape[2] % multiple == 0 for batch in batches)
        assert [row for batch in batches for row in by_row(batch)] == expected
    assert by_row(collator_of(wordpiece)(rows[7:])) == expected[7:]  # a resumed pass
    assert by_row(collator_of(wordpiece)(rows[::-1])) == expected[::-1]
    bare = collator_of(wordpiece)([row["input_ids"] for row in rows])
    assert by_row(bare) == expected
    for other in (collator_of(wordpiece, 1), collator_of(wordpiece, seed=4), collator_of(wordpiece).for_evaluation()):
        assert by_row(other(rows)) != expected


def test_keys(wordpiece, make_rows) -> None:
    rows = make_rows(wordpiece)
    for fresh in (collator_of(wordpiece, None, seed=None), collator_of(wordpiece, None)):
        assert not torch.equal(fresh(rows)["labels"], fresh(rows)["labels"])
    static, evaluation = collator_of(wordpiece, None, static=True), collator_of(wordpiece).for_evaluation()
    for same in (static, evaluation):
        expected = same(rows)
        same.set_epoch(5)
        assert equal(same(rows), expected)
    twins = [{"input_ids": rows[1]["input_ids"], "name": name} for name in "ab"]
    apart = collator_of(wordpiece, row_key_column="name")(twins)
    assert "name" not in apart
    assert not torch.equal(*apart["labels"])
    assert torch.equal(*collator_of(wordpiece)(twins)["labels"])
    collator = collator_of(wordpiece, 2)
    for duplicate in (pickle.loads(pickle.dumps(collator)), copy.deepcopy(collator), copy.copy(collator)):
        assert equal(duplicate(rows), collator(rows))


# ---- XLNet ----


def test_xlnet_learns(wordpiece, make_rows) -> None:
    """Rows of odd and unequal lengths; without the attention mask, padding would count."""
    rows = make_rows(wordpiece, 8, 31)
    collator, model = collator_of(wordpiece, plm_probability=0.3), tiny_xlnet()
    assert collator(rows)["input_ids"].shape[1] == 31
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for epoch in range(30):
        collator.set_epoch(epoch)
        losses.append(model(**collator(rows)).loss)
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert sum(losses[-5:]) < 0.75 * sum(losses[:5])


def test_through_the_trainer(wordpiece, make_rows, tmp_path: Path) -> None:
    rows = [row | {"text": "left out"} for row in make_rows(wordpiece, 8, 17)]
    collator = collator_of(wordpiece, None, plm_probability=0.3)
    arguments = transformers.TrainingArguments(
        str(tmp_path), use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True, num_train_epochs=6,
        per_device_train_batch_size=4, logging_steps=1, learning_rate=1e-2, remove_unused_columns=False,
        dataloader_pin_memory=False, eval_strategy="epoch",
    )  # fmt: skip
    sets = {"train_dataset": rows, "eval_dataset": rows}
    trainer = transformers.Trainer(tiny_xlnet(), arguments, collator, **sets, callbacks=[collator.callback()])
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 12
    assert sum(losses[-4:]) < sum(losses[:4])
    assert equal(collator(rows), collator_of(wordpiece, 5, plm_probability=0.3)(rows))  # the last epoch it was told


# ---- What cannot be ----


def without(tokenizer: Any, **names: str) -> Any:
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, **names)


def test_tokens_that_are_not_needed(wordpiece) -> None:
    batch = collator_of(without(wordpiece, mask_token="[MASK]"), plm_probability=1.0)([[5, 6, 7], [8, 9, 10]])
    assert (batch["input_ids"] == 4).all()
    no_mask = without(wordpiece, pad_token="[PAD]")
    batch = collator_of(no_mask, plm_probability=1.0, mask_inputs=False)([[5, 6], [7]])
    assert batch["input_ids"].tolist() == [[5, 6], [7, 0]]
    with pytest.raises(ValueError, match="tokenizer: expected one with a mask token, got"):
        collator_of(no_mask)
    with pytest.raises(ValueError, match="features: expected rows of one length"):
        collator_of(without(wordpiece, mask_token="[MASK]"))([[5, 6], [7]])


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"plm_probability": 0}, ValueError, "plm_probability: expected a number above 0 and up to 1, got 0"),
        ({"plm_probability": 1.5}, ValueError, "plm_probability: expected a number between 0 and 1, got 1.5"),
        ({"plm_probability": "x"}, TypeError, "plm_probability: expected a number between 0 and 1, got str"),
        ({"max_span_length": 0}, ValueError, "max_span_length: expected an int in .*, got 0"),
        ({"max_span_length": 2.5}, TypeError, "max_span_length: expected an int, got float"),
        ({"seed": 1.5}, TypeError, "seed: expected an int, got float"),
        ({"seed": None, "static": True}, ValueError, "static: expected a seed with it, got None"),
        ({"pad_to_multiple_of": 0}, ValueError, "pad_to_multiple_of: expected an int in .*, got 0"),
        ({"row_key_column": 3}, TypeError, "row_key_column: expected a column's name, got 3"),
        ({"tokenizer": "xlnet"}, TypeError, "tokenizer: expected one of transformers, got str"),
        ({"impl": "triton"}, RuntimeError, "impl: 'triton' cannot run here: there are reference and cpp of this op"),
        ({"impl": "cuda"}, ValueError, "impl: expected None or one of"),
    ],
)
def test_bad_arguments(wordpiece, kwargs, error, message) -> None:
    with pytest.raises(error, match=message):
        DataCollatorForPermutationLM(**{"tokenizer": wordpiece, "seed": 3} | kwargs)([[5, 6]])


def test_bad_rows(wordpiece) -> None:
    for impl, bad in itertools.product(IMPLS, (-1, 800)):
        with pytest.raises(ValueError, match=rf"input_ids: expected ids in \[0, 800\), got {bad}"):
            collator_of(wordpiece, impl=impl)([[5, bad]])
    collator = collator_of(wordpiece)
    with pytest.raises(ValueError, match="features: expected at least one row, got none"):
        collator([])
    with pytest.raises(TypeError, match="features: expected a sequence of rows, got one dict"):
        collator.torch_call({"input_ids": [5]})
    with pytest.raises(TypeError, match=r"inputs: expected a .* tensor of integers"):
        collator.torch_mask_tokens([[5, 6]])
    with pytest.raises(ValueError, match=r"special_tokens_mask: expected the shape \(1, 2\) of inputs, got \(1, 3\)"):
        collator.torch_mask_tokens(torch.tensor([[5, 6]]), special_tokens_mask=torch.zeros(1, 3))
    with pytest.raises(ValueError, match="row_key_column: expected a column 'name'"):
        collator_of(wordpiece, row_key_column="name")([[5, 6]])
    collator.plm_probability = 0.0  # changed later
    with pytest.raises(ValueError, match="plm_probability"):
        collator([[5, 6]])


def test_members_that_user_code_calls_and_overrides(wordpiece, make_rows) -> None:
    """With Hugging Face's arguments; called directly, pad tokens are no part of a row."""

    class Old(DataCollatorForPermutationLM):
        def torch_mask_tokens(self, inputs: Tensor) -> Any:
            made = super().torch_mask_tokens(inputs)
            return (made[0] + 1, *made[1:])

        def numpy_mask_tokens(self, inputs: np.ndarray) -> Any:
            return inputs + 2, *super().numpy_mask_tokens(inputs)[1:]

    wordpiece.padding_side = "left"
    rows = make_rows(wordpiece)
    expected, old = collator_of(wordpiece)(rows), Old(wordpiece, seed=3, static=True)
    assert equal(old(rows), expected | {"input_ids": expected["input_ids"] + 1})
    assert np.array_equal(old(rows, return_tensors="np")["labels"], expected["labels"].numpy())
    ids = collator_of(wordpiece, mask_inputs=False)(rows)["input_ids"]
    for inputs in (ids.clone(), ids.to(torch.int32).T.contiguous().T):
        made = collator_of(wordpiece).torch_mask_tokens(inputs)
        assert torch.equal(inputs, ids), "not changed"
        for tensor, name in zip(made, ("input_ids", "perm_mask", "target_mapping", "labels"), strict=True):
            assert torch.equal(tensor, expected[name])
