"""Training loops around the sparse head: Trainer, MaskedLMTrainer, Accelerate; accumulation and evaluation."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch.utils.data import Dataset

from fastmlm import DataCollatorForMaskedLM, MaskedLMTrainer, sparsify
from fastmlm.testing import CLOSE, MASKED_LM_NAMES, V, dense_loss, gradients, make_batch, make_model

COUNTS = (5, 0, 1, 3)  # one micro-batch of four has nothing selected


class Rows(Dataset):
    """The rows of a batch, masked already."""

    def __init__(self, counts: tuple[int, ...] = COUNTS) -> None:
        self.batch = make_batch(counts=counts)

    def __len__(self) -> int:
        return len(self.batch["labels"])

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {name: column[i] for name, column in self.batch.items()}


def arguments(path: Path, **changes: Any) -> transformers.TrainingArguments:
    """One optimizer step over four rows, without randomness."""
    return transformers.TrainingArguments(
        **{
            "output_dir": str(path), "use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True,
            "max_steps": 1, "logging_steps": 1, "learning_rate": 0.0, "max_grad_norm": 1e9, "seed": 1,
            "per_device_train_batch_size": 4, "per_device_eval_batch_size": 2, "dataloader_pin_memory": False,
        } | changes
    )  # fmt: skip


@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("trainer_class", [transformers.Trainer, MaskedLMTrainer])
@pytest.mark.parametrize("name", MASKED_LM_NAMES)
def test_accumulation_in_the_trainer(name: str, trainer_class: Any, steps: int, tmp_path: Path) -> None:
    """The logged loss and the norm of the gradients are those of one large batch, at any number of steps."""
    dense = make_model(name)
    expected = dense_loss(dense, make_batch(counts=COUNTS))
    norm = torch.stack([g.norm() for g in gradients(dense, expected).values()]).norm()
    trainer = trainer_class(
        sparsify(copy.deepcopy(dense)),
        arguments(tmp_path, per_device_train_batch_size=4 // steps, gradient_accumulation_steps=steps),
        train_dataset=Rows(),
    )
    trainer.train()
    logged = trainer.state.log_history[0]
    # The Trainer logs four digits of the loss.
    assert logged["loss"] == pytest.approx(expected.item(), abs=6e-5)
    assert logged["grad_norm"] == pytest.approx(norm.item(), rel=1e-6)


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_accumulation_in_accelerate(steps: int) -> None:
    """Accelerate divides by the number of steps in ``backward``, so the loss is multiplied by it."""
    AcceleratorState._reset_state(reset_partial_state=True)
    dense = make_model()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    model, optimizer = sparsify(copy.deepcopy(dense)), None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loader = torch.utils.data.DataLoader(Rows(), batch_size=4 // steps)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for micro in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**micro, num_items_in_batch=sum(COUNTS)).loss * steps)
            assert accelerator.sync_gradients or steps > 1
    wanted = gradients(dense, dense_loss(dense, make_batch(counts=COUNTS)))
    found = {name: p.grad for name, p in accelerator.unwrap_model(model).named_parameters() if p.grad is not None}
    torch.testing.assert_close(found, wanted, **CLOSE)


def test_masked_lm_trainer_makes_models_sparse(tmp_path: Path) -> None:
    model = make_model()
    trainer = MaskedLMTrainer(model, arguments(tmp_path), train_dataset=Rows())
    assert model(**make_batch()).logits.shape == (1, 0, V)
    assert trainer.model_accepts_loss_kwargs
    built = MaskedLMTrainer(model_init=lambda: make_model(), args=arguments(tmp_path), train_dataset=Rows())
    built.train()
    assert built.model.train()(**make_batch()).logits.shape == (1, 0, V)
    with pytest.raises(TypeError, match="cannot sparsify BertModel"):
        MaskedLMTrainer(make_model(cls=transformers.BertModel), arguments(tmp_path))


def test_masked_lm_trainer_tells_epochs(wordpiece: Any, tmp_path: Path) -> None:
    collator = DataCollatorForMaskedLM(wordpiece, seed=3)
    told: list[int] = []
    collator.set_epoch = told.append  # type: ignore[method-assign]
    model = make_model(vocab_size=len(wordpiece))
    rows = [{"input_ids": list(range(5, 15))} for _ in range(4)]
    MaskedLMTrainer(
        model, arguments(tmp_path, max_steps=-1, num_train_epochs=3), data_collator=collator, train_dataset=rows
    ).train()
    assert told == [0, 1, 2]


class Watch:
    """How many rows of logits a model's head makes."""

    def __init__(self, model: Any) -> None:
        self.rows: list[int] = []
        model.cls.register_forward_hook(self)

    def __call__(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self.rows.append(output.shape[:-1].numel())


def test_evaluation_of_the_loss_alone_makes_no_logits(tmp_path: Path) -> None:
    dense = make_model()
    model = copy.deepcopy(dense)
    watch = Watch(model)
    trainer = MaskedLMTrainer(model, arguments(tmp_path), eval_dataset=Rows())
    watch.rows.clear()
    got = trainer.evaluate()["eval_loss"]
    assert watch.rows == [0, 0]
    plain = transformers.Trainer(dense.eval(), arguments(tmp_path), eval_dataset=Rows()).evaluate()["eval_loss"]
    assert got == pytest.approx(plain, rel=1e-6)
    assert not model.training
    assert model(**make_batch()).logits.shape == (3, 10, V)  # dense again outside of the trainer


@pytest.mark.parametrize("trainer_class", [transformers.Trainer, MaskedLMTrainer])
@pytest.mark.parametrize("preprocess", [False, True])
def test_metrics_get_logits_beside_their_labels(trainer_class: Any, preprocess: bool, tmp_path: Path) -> None:
    seen: list[Any] = []

    def compute_metrics(prediction: transformers.EvalPrediction) -> dict[str, float]:
        seen.append((prediction.predictions, prediction.label_ids))
        return {}

    def argmax(logits: Any, labels: Tensor) -> Tensor:
        assert logits.shape[:-1] == labels.shape
        return logits.argmax(-1)

    dense = make_model()
    for model in (dense, sparsify(copy.deepcopy(dense))):
        trainer_class(
            model,
            arguments(tmp_path),
            eval_dataset=Rows(),
            compute_metrics=compute_metrics,
            preprocess_logits_for_metrics=argmax if preprocess else None,
        ).evaluate()
    (expected, labels), (got, same_labels) = seen
    assert np.array_equal(labels, same_labels)
    assert np.array_equal(got, expected)
    assert got.shape == (4, 10) if preprocess else (4, 10, V)
