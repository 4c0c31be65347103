"""Accuracy of the selected tokens: from hidden states, counted along with the loss, and in the Trainer's log."""

import copy
import os
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from test_distributed import run
from torch import Tensor
from torch.utils.data import Dataset

from fastmlm import MaskedAccuracy, MaskedLMTrainer, chunked, masked_accuracy, sparsify
from fastmlm.head import loss_only
from fastmlm.kernels.cpu import linear_cross_entropy as native
from fastmlm.testing import make_batch, make_model

K = (1, 3, 10)


def case(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows that tell their targets more or less: input (4, 30, 16), weight, target with ignored ones, bias."""
    generator = torch.Generator().manual_seed(0)
    weight, target = torch.randn(50, 16, generator=generator), torch.randint(50, (4, 30), generator=generator)
    x = weight[target] + 2 * torch.randn(4, 30, 16, generator=generator)
    target[0, ::2] = -100
    return x.to(dtype), weight.to(dtype), target, torch.randn(50, generator=generator).to(dtype)


def by_topk(logits: Tensor, target: Tensor, k: int) -> float:
    taken = target != -100
    return (logits[taken].topk(k).indices == target[taken][:, None]).any(1).double().mean().item()


@pytest.mark.parametrize("impl", ["reference", "cpp"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [7, 1000])
def test_masked_accuracy(monkeypatch: pytest.MonkeyPatch, impl: str, dtype: torch.dtype, bias: bool, rows: int) -> None:
    for kind in (chunked.Chunks, native._Chunks):
        monkeypatch.setattr(kind, "rows", lambda self, count, weight: rows)
    x, weight, target, given = case(dtype)
    logits = (x @ weight.t()).to(torch.promote_types(dtype, torch.float32)) + (given if bias else 0)
    for k in K:
        got = masked_accuracy(x, weight, target, linear_bias=given if bias else None, top_k=k, impl=impl)
        assert got.dtype == torch.float32
        # Where bfloat16 makes logits equal, topk takes any of them: one row of 105 either way.
        assert got.item() == pytest.approx(by_topk(logits, target, k), abs=0.01 if dtype == torch.bfloat16 else 1e-6)
        assert 0.1 < got.item() < 0.95


def test_masked_accuracy_needs_no_gradient_and_takes_int32() -> None:
    x, weight, target, _ = case()
    got = masked_accuracy(x.requires_grad_(), weight.requires_grad_(), target.int())
    assert not got.requires_grad
    assert got == masked_accuracy(x, weight, target)


@pytest.mark.parametrize("impl", ["reference", "cpp"])
def test_of_equal_logits_the_first_is_the_likelier(impl: str) -> None:
    x, weight, target = torch.ones(5, 2), torch.ones(5, 2), torch.arange(5)
    assert masked_accuracy(x, weight, target, impl=impl).item() == pytest.approx(1 / 5)
    assert masked_accuracy(x, weight, target, top_k=3, impl=impl).item() == pytest.approx(3 / 5)
    assert masked_accuracy(x * torch.nan, weight, target, impl=impl).item() == 0


def test_masked_accuracy_of_few_ids() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(4, 9, 16, generator=generator), torch.randn(5, 16, generator=generator)
    target = torch.randint(5, (4, 9), generator=generator)
    for k in (1, 3):
        assert masked_accuracy(x, weight, target, top_k=k).item() == pytest.approx(by_topk(x @ weight.t(), target, k))


def test_masked_accuracy_of_nothing_is_nan() -> None:
    x, weight, target, _ = case()
    assert masked_accuracy(x, weight, torch.full_like(target, -100)).isnan()


@pytest.mark.parametrize("top_k", [0, -1, 1.0, True, "1"])
def test_top_k_is_checked(top_k: Any) -> None:
    x, weight, target, _ = case()
    with pytest.raises(ValueError, match="top_k: expected a whole number of at least 1, got"):
        masked_accuracy(x, weight, target, top_k=top_k)
    with pytest.raises(ValueError, match="top_k: expected a whole number of at least 1, got"):
        MaskedAccuracy(top_k=(1, top_k))


def expected(dense: Any, batches: list[dict[str, Tensor]]) -> dict[str, float]:
    """The accuracies of a dense model on several batches together."""
    with torch.no_grad():
        logits = torch.cat([dense(**batch).logits.flatten(0, 1) for batch in batches])
    target = torch.cat([batch["labels"].flatten() for batch in batches])
    return {"masked_accuracy" if k == 1 else f"masked_accuracy_top{k}": by_topk(logits, target, k) for k in K}


@pytest.mark.parametrize("name", ["Bert", "Roberta", "FlaubertWithLMHeadModel"])  # the last one with logits of rows
@pytest.mark.parametrize("mode", ["training", "evaluation", "loss only"])
def test_counted_along_with_the_loss(name: str, mode: str) -> None:
    dense = make_model(name)
    model = sparsify(copy.deepcopy(dense)).train(mode == "training")
    batches = [make_batch(seed, counts=(5, 3, 4), name=name) for seed in range(3)]
    wanted = expected(dense, batches)
    with MaskedAccuracy(top_k=K) as accuracy:
        for batch in batches:
            with loss_only() if mode == "loss only" else nullcontext():
                model(**batch)
    model(**batches[0])  # outside: not counted
    assert accuracy.compute() == pytest.approx(wanted)
    accuracy.reset()
    assert accuracy.compute() == {}


def test_the_loss_is_the_same_when_counted() -> None:
    model, batch = sparsify(make_model()), make_batch()
    loss = model(**batch).loss
    gradients = torch.autograd.grad(loss, model.cls.predictions.decoder.weight)
    with MaskedAccuracy():
        counted = model(**batch).loss
    assert torch.equal(counted, loss)
    assert torch.equal(torch.autograd.grad(counted, model.cls.predictions.decoder.weight)[0], gradients[0])


def test_the_inner_one_counts() -> None:
    model, batch = sparsify(make_model()), make_batch(counts=(2, 1, 0))
    with MaskedAccuracy() as outer:
        model(**batch)
        with MaskedAccuracy() as inner:
            model(**batch)
        model(**batch)
    assert outer.counts is not None
    assert inner.counts is not None
    assert (outer.counts[0], inner.counts[0]) == (6, 3)
    with pytest.raises(ValueError, match="input_ids"), outer:
        model(labels=batch["labels"])
    model(**batch)
    assert outer.counts[0] == 6
    with outer:
        sparsify(make_model())  # tries the model, which is nobody's batch
    assert outer.counts[0] == 6


def test_one_k_need_not_be_a_sequence() -> None:
    assert MaskedAccuracy(top_k=5).top_k == (5,)


class Rows(Dataset):
    """Rows of a batch of 4 or fewer tokens each, masked already."""

    def __init__(self) -> None:
        self.batch = make_batch(seed=1, counts=(4, 3, 2, 4))

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {name: column[i] for name, column in self.batch.items()}


def trainer(model: Any, path: Path, **changes: Any) -> MaskedLMTrainer:
    arguments = transformers.TrainingArguments(
        output_dir=str(path), use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True, max_steps=4,
        logging_steps=2, learning_rate=0.0, per_device_train_batch_size=2, per_device_eval_batch_size=3,
        dataloader_pin_memory=False, seed=1,
    )  # fmt: skip
    return MaskedLMTrainer(model, arguments, train_dataset=Rows(), eval_dataset=Rows(), **changes)


def test_the_trainer_logs_it(tmp_path: Path) -> None:
    dense = make_model()
    wanted = expected(dense, [Rows().batch])
    training = trainer(copy.deepcopy(dense), tmp_path, accuracy_top_k=K)
    training.train()
    logged = [entry for entry in training.state.log_history if "loss" in entry]
    assert len(logged) == 2
    for entry in logged:  # two steps of two rows: all four
        assert {name: entry[name] for name in wanted} == pytest.approx(wanted)
    metrics = training.evaluate()
    assert {name: metrics[f"eval_{name}"] for name in wanted} == pytest.approx(wanted)
    assert training.predict(Rows()).metrics["test_masked_accuracy"] == pytest.approx(wanted["masked_accuracy"])


def test_only_the_own_log_of_training_counts(tmp_path: Path) -> None:
    """Others log a loss as well, on one process perhaps, and what has been counted before a run is not of that run."""

    class Talkative(MaskedLMTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            self.log({"loss": 1.0})
            return super().compute_loss(*args, **kwargs)

        def evaluation_loop(self, dataloader: Any, description: str, *rest: Any, **kwargs: Any) -> Any:
            assert not kwargs or not rest
            given = dict(zip(("prediction_loss_only", "ignore_keys", "metric_key_prefix"), rest, strict=False)) | kwargs
            return super().evaluation_loop(dataloader, description, *given.values())

    plain = trainer(make_model(), tmp_path)
    training = Talkative(plain.model, plain.args, train_dataset=Rows(), eval_dataset=Rows())
    training.args.max_steps = 3
    for _ in range(2):
        training.train()
        logged = [entry for entry in training.state.log_history if "loss" in entry]
        assert [("masked_accuracy" in entry, "grad_norm" in entry) for entry in logged].count((True, True)) == 1
        assert not any("masked_accuracy" in entry for entry in logged if "grad_norm" not in entry)
        assert training._accuracy.counts is not None
        assert training._accuracy.counts[0] < 8  # of the third step, which is not logged
    assert "eval_masked_accuracy" in training.evaluate()


def test_evaluation_in_between_leaves_the_count_of_training_alone(tmp_path: Path) -> None:
    training = trainer(make_model(), tmp_path)
    training.args.eval_strategy, training.args.eval_steps = transformers.trainer_utils.IntervalStrategy.STEPS, 1
    training.args.logging_steps = 4
    counts: list[Any] = []
    training._accuracy.reset = lambda: counts.append(training._accuracy.counts)  # type: ignore[method-assign]
    training.train()
    assert counts[0] is None  # before the first step
    assert counts[1][0] == 26  # twice the 13 of the four rows


def test_the_trainer_leaves_it_out_when_told(tmp_path: Path) -> None:
    training = trainer(make_model(), tmp_path, accuracy_top_k=())
    training.train()
    assert "loss" in training.state.log_history[0]
    assert not any("accuracy" in name for entry in training.state.log_history for name in entry)
    assert not any("accuracy" in name for name in training.evaluate())


def on_two(rank: int, path: Path) -> None:
    """Both processes log what all rows together give, though each has seen some of them."""
    # The group is there already; accelerate looks for what torchrun tells.
    names = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2}
    os.environ |= {name: str(value) for name, value in names.items()}
    dense = make_model()
    training = trainer(copy.deepcopy(dense), path, accuracy_top_k=K, data_collator=transformers.default_data_collator)
    training.args.per_device_eval_batch_size = 2
    training.args.per_device_train_batch_size = 1
    assert training.args.world_size == 2
    wanted = expected(dense, [Rows().batch])
    training.train()
    entry = next(entry for entry in training.state.log_history if "loss" in entry)
    metrics = training.evaluate()
    for name, value in wanted.items():
        assert entry[name] == pytest.approx(value)
        assert metrics[f"eval_{name}"] == pytest.approx(value)


def test_the_trainer_counts_all_processes(tmp_path: Path) -> None:
    run(partial(on_two, path=tmp_path), tmp_path)
