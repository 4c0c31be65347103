"""Replaced-token detection: losses, labels, samples that stay the same, shared embeddings, the Trainer, checkpoints."""

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import ElectraConfig, ElectraForMaskedLM, ElectraForPreTraining

from fastmlm import DataCollatorForMaskedLM, ReplacedTokenDetection, densify, sample_tokens
from fastmlm.masking import row_keys
from fastmlm.philox import fold
from fastmlm.testing import CLOSE, perturb

V, WEIGHT = 61, 50.0


def config(hidden: int, vocab_size: int = V, **changes: Any) -> ElectraConfig:
    sizes = {
        "embedding_size": 16, "hidden_size": hidden, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 2 * hidden, "max_position_embeddings": 64,
    }  # fmt: skip
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return ElectraConfig(vocab_size=vocab_size, **sizes | no_dropout | changes)


def make(vocab_size: int = V, noise: bool = True, **arguments: Any) -> ReplacedTokenDetection:
    """Models in float64, with noise on what starts at zero or one."""
    transformers.set_seed(0)
    generator = ElectraForMaskedLM(config(8, vocab_size))
    discriminator = ElectraForPreTraining(config(16, vocab_size))
    if noise:
        for model in (generator.double(), discriminator.double()):
            perturb(model)
    return ReplacedTokenDetection(generator, discriminator, **arguments).train()


def make_batch(seed: int = 0, counts: tuple[int, ...] = (5, 2, 4)) -> dict[str, Tensor]:
    """Rows of 12, 9 and 7 tokens padded to 12, with so many selected."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, V, (len(counts), 12), generator=generator)
    lengths = torch.tensor([12, 9, 7, 12])[: len(counts)]
    mask = (torch.arange(12) < lengths[:, None]).long()
    labels = torch.full_like(ids, -100)
    for row, count in enumerate(counts):
        columns = torch.randperm(int(lengths[row]), generator=generator)[:count]
        labels[row, columns] = ids[row, columns]
    masked = ids.where(labels == -100, 4) * mask
    types = torch.arange(12).expand_as(ids) // 6 * mask
    return {"input_ids": masked, "attention_mask": mask, "token_type_ids": types, "labels": labels}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def filled_in(model: ReplacedTokenDetection, batch: dict[str, Tensor]) -> Tensor:
    """The ids that the discriminator sees."""
    ids: list[Tensor] = []
    hook = model.discriminator.register_forward_pre_hook(
        lambda _module, _args, kwargs: ids.append(kwargs["input_ids"]), with_kwargs=True
    )
    model(**batch)
    hook.remove()
    return ids[0]


def parts(batch: dict[str, Tensor], rows: slice) -> dict[str, Tensor]:
    return {name: column[rows] for name, column in batch.items()}


# ---- The two losses ----


def test_generator_gradients_are_those_of_plain_masked_language_modelling() -> None:
    """Nothing of the discriminator's loss gets through the samples, whatever its weight."""
    model, batch = make(share_embeddings=False), make_batch()
    plain = densify(copy.deepcopy(model.generator))
    loss = plain(**batch).loss
    loss.backward()
    made = model(**batch)
    made.loss.backward()
    torch.testing.assert_close(made.mlm_loss, loss.detach(), **CLOSE)
    torch.testing.assert_close(gradients(model.generator), gradients(plain), **CLOSE)


@pytest.mark.parametrize("training", [True, False])
def test_the_discriminator_sees_samples_and_is_asked_for_them(training: bool) -> None:
    """What forward does, in steps: all logits, samples by the law, labels, and the loss of transformers' own model."""
    model, batch = make(seed=9).train(training), make_batch()
    labels, mask, types = batch["labels"], batch["attention_mask"], batch["token_type_ids"]
    selected, key = labels != -100, model.key.clone() if training else fold(9, 2**64 - 1)
    made = model(**batch)
    with torch.no_grad():
        dense = densify(copy.deepcopy(model.generator))
        logits = dense(batch["input_ids"], mask, types).logits[selected]
    original = labels.where(selected, batch["input_ids"])
    row, column = selected.nonzero().T
    tokens = sample_tokens(logits, seed=key, row_keys=row_keys(original, mask)[row], positions=column)
    ids = original.masked_scatter(selected, tokens)
    plain = model.discriminator(ids, mask, types, labels=(ids != original).long())
    torch.testing.assert_close(made.logits, plain.logits, **CLOSE)
    real = mask == 1
    assert torch.equal(made.rtd_labels, (ids != original).long().where(real, -100))
    torch.testing.assert_close(made.rtd_loss, plain.loss.detach(), rtol=1e-6, atol=0, check_dtype=False)  # float32
    torch.testing.assert_close(made.loss, made.mlm_loss + WEIGHT * made.rtd_loss, **CLOSE)
    assert made.mlm_accuracy == (logits.argmax(-1) == labels[selected]).float().mean()
    assert made.rtd_accuracy == ((made.logits > 0) == (ids != original))[real].float().mean()
    assert made.replaced_share == (ids != original)[real].float().mean()


def test_a_sample_that_equals_the_original_is_not_replaced() -> None:
    model, batch = make(), make_batch()
    with torch.no_grad():  # a generator that says 30 whatever it sees
        model.generator.generator_lm_head.bias[30] = 1e4
    batch["labels"][0, 3] = 30
    made = model(**batch)
    assert made.rtd_labels[0, 3] == 0
    others = (batch["labels"] != -100) & (batch["labels"] != 30)
    assert (made.rtd_labels[others] == 1).all()


@pytest.mark.parametrize("items", [None, 0, 7])
def test_nothing_selected(items: int | None) -> None:
    model, batch = make(), make_batch(counts=(0, 0, 0))
    made = model(**batch, num_items_in_batch=items)
    made.loss.backward()
    assert math.isfinite(made.loss.detach())
    assert made.mlm_loss == 0
    assert (made.rtd_labels != 1).all()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    assert items is not None or made.rtd_loss > 0


def test_micro_batches_add_up() -> None:
    """With both counts exactly; with that of the selected tokens alone, by their share. (Evaluation has one key.)"""
    model, batch = make().eval(), make_batch(counts=(5, 2, 4, 0))
    whole = model(**batch)
    whole.loss.backward()
    wanted = gradients(model)
    model.zero_grad()
    tokens, total, by_share = int(batch["attention_mask"].sum()), 0.0, 0.0
    for rows in (slice(0, 1), slice(1, 2), slice(2, 4)):
        part = parts(batch, rows)
        made = model(**part, num_items_in_batch=torch.tensor(11), num_tokens_in_batch=tokens)
        made.loss.backward()
        total += float(made.loss.detach())
        alone, share = model(**part).rtd_loss, int((part["labels"] != -100).sum()) / 11
        shared = model(**part, num_items_in_batch=11)
        torch.testing.assert_close(shared.rtd_loss, alone * share, **CLOSE)
        torch.testing.assert_close(shared.mlm_loss, made.mlm_loss, **CLOSE)
        by_share += float(shared.rtd_loss)
    assert total == pytest.approx(float(whole.loss.detach()), rel=1e-10)
    torch.testing.assert_close(gradients(model), wanted, **CLOSE)
    assert by_share == pytest.approx(float(whole.rtd_loss), rel=0.3)


# ---- Samples that stay the same ----


def test_a_row_is_sampled_alone() -> None:
    """In any batch, in any order, padded on either side by any number of tokens."""
    model, batch = make().eval(), make_batch()
    wanted = filled_in(model, batch)
    for row, length in enumerate((12, 9, 7)):
        short = {name: column[row : row + 1, :length] for name, column in batch.items()}
        assert torch.equal(filled_in(model, short), wanted[row : row + 1, :length])
        left = {name: F.pad(column, (3, 0), value=-100 if name == "labels" else 0) for name, column in short.items()}
        left["position_ids"] = (torch.arange(length + 3) - 3).clamp(min=0)[None]
        assert torch.equal(filled_in(model, left)[:, 3:], wanted[row : row + 1, :length])
    assert torch.equal(filled_in(model, {name: column.flip(0) for name, column in batch.items()}), wanted.flip(0))


def test_samples_follow_from_seed_and_step() -> None:
    batch = make_batch()
    one, two, other = (make(seed=seed) for seed in (3, 3, 4))
    runs = [torch.stack([filled_in(model, batch) for _ in range(4)]) for model in (one, two, other)]
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])
    assert not torch.equal(runs[0][0], runs[0][1]), "each step has its own"
    resumed = make(seed=3)
    resumed.load_state_dict(one.state_dict())
    assert torch.equal(filled_in(resumed, batch), filled_in(one, batch))
    fixed = filled_in(one.eval(), batch)
    assert torch.equal(filled_in(one, batch), fixed)
    assert torch.equal(filled_in(one.train(), batch), filled_in(resumed, batch)), "evaluation is no step"


# ---- Embeddings ----


def test_embeddings_are_shared_and_trained_by_both() -> None:
    apart, batch = make(share_embeddings=False), make_batch()
    apart.discriminator.electra.embeddings.load_state_dict(apart.generator.electra.embeddings.state_dict())
    together = ReplacedTokenDetection(*(copy.deepcopy(m) for m in (apart.generator, apart.discriminator))).train()
    embeddings = together.generator.electra.embeddings, together.discriminator.electra.embeddings
    for model in (apart, together):
        model(**batch).loss.backward()
    for name in ("word_embeddings", "position_embeddings", "token_type_embeddings"):
        mine, other = (getattr(each, name).weight for each in embeddings)
        assert mine is other, name
        summed = getattr(apart.generator.electra.embeddings, name).weight.grad
        summed = summed + getattr(apart.discriminator.electra.embeddings, name).weight.grad
        torch.testing.assert_close(mine.grad, summed, **CLOSE)
    assert together.generator.generator_lm_head.weight is embeddings[1].word_embeddings.weight
    before = embeddings[0].word_embeddings.weight.detach().clone()
    torch.optim.SGD(together.parameters(), lr=0.1).step()
    assert not torch.equal(embeddings[1].word_embeddings.weight, before)
    for part in (together.generator, together.discriminator):
        assert set(part.state_dict()) == set(type(part)(part.config).state_dict()), "complete"
    converted = copy.deepcopy(together).float()
    assert converted.generator.get_input_embeddings().weight is converted.discriminator.get_input_embeddings().weight
    assert apart.generator.get_input_embeddings().weight is not apart.discriminator.get_input_embeddings().weight


def test_state_dict_has_each_parameter_once() -> None:
    model, fresh = make(), make(seed=5)
    perturb(fresh)
    state = model.state_dict()
    assert len({tensor.data_ptr() for tensor in state.values()}) == len(state)
    fresh.load_state_dict(state)
    for mine, other in zip(model.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(mine, other)
    wrapped = nn.Sequential(model)
    assert set(wrapped.state_dict()) == {f"0.{name}" for name in state}
    nn.Sequential(fresh).load_state_dict(wrapped.state_dict())


def test_what_does_not_fit_is_refused() -> None:
    generator, discriminator = ElectraForMaskedLM(config(8)), ElectraForPreTraining(config(16, embedding_size=8))
    with pytest.raises(ValueError, match="share_embeddings: expected embeddings of one shape"):
        ReplacedTokenDetection(generator, discriminator)
    with pytest.raises(ValueError, match="discriminator: expected embeddings of all the generator's 61 ids, got 60"):
        ReplacedTokenDetection(generator, ElectraForPreTraining(config(16, 60)))
    batch = make_batch()
    del batch["labels"]
    with pytest.raises(ValueError, match="labels: expected"):
        make()(**batch)


# ---- Training ----


def arguments(path: Path, **changes: Any) -> transformers.TrainingArguments:
    return transformers.TrainingArguments(
        **{
            "output_dir": str(path), "use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True,
            "max_steps": 1, "logging_steps": 1, "learning_rate": 0.0, "max_grad_norm": 1e9, "seed": 1,
            "per_device_train_batch_size": 4, "per_device_eval_batch_size": 2, "dataloader_pin_memory": False,
        } | changes
    )  # fmt: skip


class Rows(torch.utils.data.Dataset):
    """The rows of a batch, masked already; one of four has nothing selected."""

    def __init__(self) -> None:
        self.batch = make_batch(counts=(5, 2, 4, 0))

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {name: column[i] for name, column in self.batch.items()}


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_accumulation_in_the_trainer(steps: int, tmp_path: Path) -> None:
    """The generator's loss is that of one large batch."""
    model = make(discriminator_weight=0.0)
    expected = float(model(**Rows().batch).mlm_loss)
    settings = arguments(tmp_path, per_device_train_batch_size=4 // steps, gradient_accumulation_steps=steps)
    trainer = transformers.Trainer(model, settings, train_dataset=Rows())
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(expected, abs=6e-5)  # of which it logs four digits


def test_evaluation_with_metrics(tmp_path: Path) -> None:
    seen: list[Any] = []
    trainer = transformers.Trainer(
        make(), arguments(tmp_path), eval_dataset=Rows(), compute_metrics=lambda found: seen.append(found) or {}
    )
    first, again = trainer.evaluate()["eval_loss"], trainer.evaluate()["eval_loss"]
    assert first == again
    logits, rtd_labels = seen[0].predictions[:2]
    assert logits.shape == rtd_labels.shape == (4, 12)
    assert np.array_equal(rtd_labels == -100, Rows().batch["attention_mask"].numpy() == 0)


def test_training_on_text(wordpiece: Any, make_rows: Any, tmp_path: Path) -> None:
    """Both losses fall; a run resumed from a checkpoint ends as one without a break; plain models load what is left."""
    rows = make_rows(wordpiece, 48, 32)

    def run(**more: Any) -> tuple[ReplacedTokenDetection, list[float]]:
        collator = DataCollatorForMaskedLM(wordpiece, seed=2)
        model = make(len(wordpiece), noise=False)
        settings = arguments(
            tmp_path, max_steps=60, learning_rate=3e-3, per_device_train_batch_size=16, save_strategy="steps",
            save_steps=50,
        )  # fmt: skip
        trainer = transformers.Trainer(model, settings, collator, rows, callbacks=[collator.callback()])
        trainer.train(**more)
        return model, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    model, losses = run()
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5])
    resumed, same = run(resume_from_checkpoint=str(tmp_path / "checkpoint-50"))
    assert same == losses
    for mine, other in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(mine, other)

    batch = DataCollatorForMaskedLM(wordpiece, seed=2, static=True)(rows[:6])
    untrained = make(len(wordpiece), noise=False).eval()(**batch)
    trained = model.eval()(**batch)
    assert trained.mlm_loss < untrained.mlm_loss - 0.3
    assert trained.rtd_loss < untrained.rtd_loss - 0.1

    model.save_pretrained(tmp_path / "saved")
    generator = ElectraForMaskedLM.from_pretrained(tmp_path / "saved" / "generator").eval()
    discriminator = ElectraForPreTraining.from_pretrained(tmp_path / "saved" / "discriminator").eval()
    labels = batch.pop("labels")
    assert torch.equal(generator(**batch).logits, model.generator(**batch).logits)
    assert torch.equal(discriminator(**batch).logits, model.discriminator(**batch).logits)
    assert torch.isfinite(generator(**batch, labels=labels).loss)
