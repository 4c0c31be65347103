"""``fastmlm compare``: every objective trains, a broken comparison goes on, and noise is called noise."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import refused
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("rich")

from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    ElectraForMaskedLM,
    ElectraForPreTraining,
    XLNetLMHeadModel,
)

from fastmlm.cli import main
from fastmlm.cli.compare.catalogue import DEFAULT, OBJECTIVES, parse_objective
from fastmlm.cli.compare.objectives import _BUILDERS, make_objective
from fastmlm.cli.compare.probe import Probe
from fastmlm.cli.compare.report import rows, verdicts
from fastmlm.cli.compare.run import validation_loss
from fastmlm.cli.compare.summary import difference, mean_curve, steps_to, summarise

pytestmark = pytest.mark.filterwarnings("ignore:builtin type .* has no __module__ attribute:DeprecationWarning")

SMALL = ["--length", "24", "--batch-size", "8", "--vocab-size", "120", "--eval-fraction", "0.2"]
WORDS = {
    "birds": "the quick brown sparrow hops over a lazy finch while seven owls watch from quiet trees",
    "ships": "a slow grey frigate sails past the old harbour as three captains wave to crowded decks",
}


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two documents of words of their own, so that a topic is easily told."""
    directory, files = tmp_path_factory.mktemp("texts"), []
    for name, sentence in WORDS.items():
        words = sentence.split()
        lines = [" ".join(words[(i * k) % len(words)] for k in range(1, 9)) for i in range(90)]
        (directory / name).write_text(".\n".join(lines), "utf-8")
        files.append(str(directory / name))
    return files


def command(texts: list[str], out: Path, *objectives: str, steps: int = 6, seeds: int = 2) -> list[str]:
    sizes = ["--steps", str(steps), "--seeds", str(seeds), "--evaluations", "3"]
    return ["compare", *objectives, "--texts", *texts, *SMALL, *sizes, "--output-dir", str(out)]


@pytest.fixture(scope="session")
def compared(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished comparison. Copy it before changing it."""
    out = tmp_path_factory.mktemp("compared") / "out"
    assert main(command(texts, out, "mlm", "words-30", "electra", "xlnet")) == 0
    return out


def results(out: Path) -> dict[str, Any]:
    """All runs but for what the clock said."""
    runs = json.loads((out / "compare.json").read_text())["runs"]
    return {name: [run | {"seconds": None} for run in of] for name, of in runs.items()}


# ---- What a comparison leaves ----


def test_results(compared: Path) -> None:
    found = json.loads((compared / "compare.json").read_text())
    assert list(found["objectives"]) == ["mlm", "words-30", "electra", "xlnet"]
    assert found["baseline"] == "mlm"
    assert found["probe"]["topics"] == 2
    table = (compared / "compare.md").read_text()
    for name, runs in found["runs"].items():
        assert f"| {name}" in table
        assert [run["seed"] for run in runs] == [0, 1]
        for run in runs:
            assert [step for step, _ in run["eval_loss"]] == [0, 2, 4, 6]
            assert run["selected"] > 0
            assert run["seconds"] > 0
    mlm, words = found["runs"]["mlm"], found["runs"]["words-30"]
    for a, b in zip(mlm, words, strict=True):
        assert a["eval_loss"][0] == b["eval_loss"][0]  # the same first weights and validation rows
        assert 1.5 < b["selected"] / a["selected"] < 2.7
    assert mlm[0]["eval_loss"][0] != mlm[1]["eval_loss"][0]  # of another seed, others
    assert (compared / "compare.png").read_bytes().startswith(b"\x89PNG")


def test_models_load_in_plain_transformers(compared: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(compared)
    batch = tokenizer("the quick [MASK] sparrow", return_tensors="pt", return_token_type_ids=False)
    shape = (*batch["input_ids"].shape, len(tokenizer))
    models = compared / "models"
    assert AutoModelForMaskedLM.from_pretrained(models / "mlm")(**batch).logits.shape == shape
    assert ElectraForMaskedLM.from_pretrained(models / "electra" / "generator")(**batch).logits.shape == shape
    assert ElectraForPreTraining.from_pretrained(models / "electra" / "discriminator")(**batch).logits.ndim == 2
    assert XLNetLMHeadModel.from_pretrained(models / "xlnet")(**batch).logits.shape == shape


def test_saved_models_are_the_measured_ones(compared: Path, texts: list[str]) -> None:
    """The dense loss of a plain model, computed here, is the last that was reported."""
    from fastmlm.cli.compare.run import gather
    from fastmlm.cli.settings import saved_settings

    settings: Any = saved_settings("compare", str(compared))
    validation = gather(settings).validation
    model = AutoModelForMaskedLM.from_pretrained(compared / "models" / "mlm").eval()
    selected = validation["labels"] != -100
    assert (validation["input_ids"][selected] == AutoTokenizer.from_pretrained(compared).mask_token_id).all()
    with torch.no_grad():
        logits = model(validation["input_ids"], validation["attention_mask"]).logits[selected]
    loss = nn.functional.cross_entropy(logits.double(), validation["labels"][selected])
    assert results(compared)["mlm"][0]["eval_loss"][-1][1] == pytest.approx(float(loss), rel=1e-5)  # float32 sums


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_teaches(name: str, texts: list[str], tmp_path: Path) -> None:
    """The validation loss falls by far more than it would by chance, from the same text."""
    run = command(texts, tmp_path / "out", name, steps=30, seeds=1)
    assert main([*run, "--learning-rate", "0.005"]) == 0
    curve = results(tmp_path / "out")[name][0]["eval_loss"]
    assert curve[0][1] == pytest.approx(math.log(120), abs=0.8)  # about that of a uniform guess
    assert curve[-1][1] < curve[0][1] - 0.5


# ---- Interrupted ----


def test_a_broken_comparison_goes_on(compared: Path, texts: list[str], tmp_path: Path, monkeypatch: Any) -> None:
    import transformers

    train, calls = transformers.Trainer.train, [0]

    def interrupted(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == 4:
            raise KeyboardInterrupt
        return train(self, *args, **kwargs)

    monkeypatch.setattr(transformers.Trainer, "train", interrupted)
    out = tmp_path / "out"
    assert main(command(texts, out, "mlm", "words-30", "electra", "xlnet")) == 130
    assert len(list((out / "runs").glob("*.json"))) == 3
    assert main(["compare", "--resume", "--output-dir", str(out)]) == 0
    assert calls[0] == 9  # three, the broken one, and the five that were left
    assert results(out) == results(compared)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--steps", "7"], ("--steps", "6", "7")),
        (["mlm"], ("OBJECTIVE", "words-30")),
        (["--seeds", "3"], ("--seeds", "2", "3")),
        (["--overwrite"], ("--resume", "--overwrite")),
    ],
)
def test_resume_refuses_another_comparison(
    flags: list[str], named: tuple[str, ...], compared: Path, tmp_path: Path, capsys: Any
) -> None:
    copy = shutil.copytree(compared, tmp_path / "copy")
    refused(capsys, ["compare", *flags, "--resume", "--output-dir", str(copy)], *named)
    assert results(copy) == results(compared)


def test_resume_refuses_another_text(compared: Path, texts: list[str], tmp_path: Path, capsys: Any) -> None:
    copy = shutil.copytree(compared, tmp_path / "copy")
    settings = json.loads((copy / "settings.json").read_text())
    other = tmp_path / "birds"
    other.write_text(Path(texts[0]).read_text().replace("sparrow", "swallow"))
    (copy / "settings.json").write_text(json.dumps(settings | {"texts": [str(other), texts[1]]}))
    refused(capsys, ["compare", "--resume", "--output-dir", str(copy)], "--resume", "the text", "got another")


def test_runs_of_another_command_are_refused(compared: Path, capsys: Any) -> None:
    refused(capsys, ["pretrain", "--resume", "--output-dir", str(compared)], "--resume", "fastmlm pretrain")


def test_report_alone_is_made_anew(compared: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """A finished comparison resumed trains nothing; the target may change."""
    copy = shutil.copytree(compared, tmp_path / "copy")
    monkeypatch.setattr("transformers.Trainer.train", None)
    assert main(["compare", "--resume", "--target-loss", "4.5", "--output-dir", str(copy)]) == 0
    assert json.loads((copy / "compare.json").read_text())["target_loss"] == 4.5
    assert results(copy) == results(compared)


# ---- Bad input ----


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["mask"], ("OBJECTIVE", "'mask'", "spans")),
        (["mlm-0"], ("OBJECTIVE", "mlm-0", "percentage")),
        (["mlm-101"], ("OBJECTIVE", "mlm-101", "percentage")),
        (["words-many"], ("OBJECTIVE", "words-many", "percentage")),
        (["diffusion-15"], ("OBJECTIVE", "diffusion-15", "its own")),
        (["mlm", "mlm"], ("OBJECTIVE", "mlm", "once")),
        (["--seeds", "0"], ("--seeds", "'0'")),
        (["--target-loss", "0"], ("--target-loss", "'0'")),
        (["--texts", "none.txt"], ("none.txt", "does not exist")),
        (["--trainer-arg", "seed=3"], ("--trainer-arg", "--seed")),
    ],
)
def test_bad_input(argv: list[str], named: tuple[str, ...], tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out"
    refused(capsys, ["compare", *argv, "--output-dir", str(out)], *named)
    assert not out.exists()


@pytest.mark.parametrize("objective", ["electra", "xlnet"])
def test_models_of_another_kind_need_a_size(objective: str, compared: Path, tmp_path: Path, capsys: Any) -> None:
    model = str(compared / "models" / "mlm")
    argv = ["compare", "mlm", objective, "--model", model, "--tokenizer", str(compared), "--length", "24"]
    refused(capsys, [*argv, "--output-dir", str(tmp_path / "out")], "--model", objective, "tiny")


def test_what_an_objective_refuses_is_told_first(tmp_path: Path, texts: list[str], capsys: Any) -> None:
    """A model of one position fewer than a row needs: seen on two rows, before anything is written."""
    from transformers import BertConfig

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 16}
    BertConfig(max_position_embeddings=23, **sizes).save_pretrained(tmp_path / "model")
    argv = command(texts, tmp_path / "out", "mlm", "spans")
    refused(capsys, [*argv, "--model", str(tmp_path / "model")], "--length", "23", "24")
    assert not (tmp_path / "out").exists()


# ---- The parts ----


def test_the_catalogue_is_complete(capsys: Any) -> None:
    assert OBJECTIVES.keys() == _BUILDERS.keys()
    assert parse_objective("mlm-12.5") == ("mlm", 0.125)
    assert parse_objective("spans") == ("spans", None)
    assert all(make_objective(name, 0.15).rate in (0.15, 0.2, 0.3, 0.4) for name in DEFAULT)
    with pytest.raises(SystemExit, match="0"):
        main(["compare", "--help"])
    printed = capsys.readouterr().out
    assert all(f"  {name} " in printed for name in OBJECTIVES)


def test_xlnet_fills_in_masks_without_seeing_them(compared: Path) -> None:
    """Whatever stands at hidden positions, the loss is the same; whatever stands elsewhere changes it."""
    objective: Any = make_objective("xlnet", 0.15)
    model = XLNetLMHeadModel.from_pretrained(compared / "models" / "xlnet").eval()
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(5, 100, (3, 12), generator=generator)
    labels = torch.full_like(ids, -100)
    for row, columns in enumerate([[2, 3], [5], []]):
        labels[row, columns] = ids[row, columns]
    validation = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    loss = validation_loss(objective, model, validation)
    hidden = validation | {"input_ids": ids.masked_fill(labels != -100, 4)}
    assert validation_loss(objective, model, hidden) == loss
    changed = ids.clone()
    changed[0, 8] = 7
    assert validation_loss(objective, model, validation | {"input_ids": changed}) != loss
    losses = []
    for row, columns in enumerate([[2, 3], [5]]):  # position by position, by XLNet's own arguments
        for column in columns:
            mapping, masked = torch.zeros(1, 1, 12), torch.zeros(1, 12, 12)
            mapping[0, 0, column] = 1
            masked[0, :, columns] = 1
            with torch.no_grad():
                logits = model(ids[row : row + 1], perm_mask=masked, target_mapping=mapping).logits[0]
            losses.append(nn.functional.cross_entropy(logits, labels[row, column : column + 1]))
    assert loss == pytest.approx(float(torch.stack(losses).mean()), rel=1e-5)


class Lookup(nn.Module):
    """An encoder whose features are those of the tokens alone."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.embedding = nn.Embedding.from_pretrained(weight, freeze=False)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        from types import SimpleNamespace

        assert torch.equal(attention_mask, (input_ids != 60).long())
        states = self.embedding(input_ids) + 1e3 * (attention_mask == 0)[..., None]  # padding would be seen
        return SimpleNamespace(last_hidden_state=states)


def passages(count: int, seed: int) -> list[tuple[list[int], int]]:
    """Of three topics, each with ids of its own, and of one that is too rare; what stands first and last is noise."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for i in range(count):
        topic = 3 if i == 0 else i % 3
        inner = torch.randint(10 * topic, 10 * topic + 10, (4 + i % 5,), generator=generator)
        first, last = torch.randint(40, 60, (2,), generator=generator).tolist()
        made.append(([first, *inner.tolist(), last], topic))
    return made


def test_the_probe_finds_topics_that_are_in_the_features() -> None:
    probe = Probe(passages(90, 0), passages(60, 1), pad_token_id=60)
    assert probe.topics == 3
    told = torch.zeros(61, 8)
    for topic in range(3):
        told[10 * topic : 10 * topic + 10, topic] = 1
    told[40:60] = 50 * torch.randn(20, 8, generator=torch.Generator().manual_seed(1))  # left out of features
    assert probe.accuracy(Lookup(told)) == 1.0
    assert probe.accuracy(Lookup(torch.ones(61, 8))) == pytest.approx(1 / 3, abs=0.05)
    assert probe.majority == pytest.approx(1 / 3, abs=0.05)
    assert Probe(passages(90, 0)[3::3], passages(60, 1)[3::3], 60).accuracy(Lookup(told)) is None  # one topic alone


def test_steps_to_a_loss() -> None:
    curve = [(0, 5.0), (10, 4.0), (20, 2.0), (30, 3.0)]
    assert steps_to(curve, 5.0) == 0
    assert steps_to(curve, 4.5) == 5
    assert steps_to(curve, 2.5) == 17.5
    assert steps_to(curve, 1.9) is None


def fake(seed: int, loss: float, probe: float | None = 0.5) -> dict[str, Any]:
    return {
        "seed": seed, "eval_loss": [[0, 5.0], [10, loss]], "selected": 300, "seconds": 2.0, "tokens_per_step": 100.0,
        "parameters": 7, "probe": probe, "untrained_probe": 0.25,
    }  # fmt: skip


def test_differences_are_weighed_against_the_noise() -> None:
    runs = {
        "mlm": [fake(0, 3.0), fake(1, 3.4), fake(2, 3.2)],
        "better": [fake(0, 2.5), fake(1, 2.9), fake(2, 2.71)],  # by half a nat, whatever the seed
        "other": [fake(0, 3.4), fake(1, 3.0), fake(2, 3.2)],
        "worse": [fake(0, 4.0), fake(1, 4.4), fake(2, 4.21)],
    }
    found = summarise(runs, None)
    assert found["target_loss"] == pytest.approx(3.2)
    better = found["objectives"]["better"]
    assert better["steps_to_target"] == pytest.approx(10 * 1.8 / (5 - 8.11 / 3))
    assert better["tokens_to_target"] == pytest.approx(100 * better["steps_to_target"])
    assert better["selected_tokens_per_second"] == 150
    assert found["objectives"]["worse"]["steps_to_target"] is None
    # Student's t, 2 degrees of freedom: 4.303 standard errors of the three paired differences.
    assert better["loss_difference"]["mean"] == pytest.approx(-0.4966667)
    assert better["loss_difference"]["half_width_95"] == pytest.approx(4.303 * 0.0033333, rel=1e-3)
    said = verdicts(found)
    assert said[0].startswith("Validation loss lower than mlm's")
    assert said[0].endswith(": better.")
    assert said[1].startswith("Within noise")
    assert said[1].endswith(": other.")
    assert said[2].endswith(": worse.")
    assert mean_curve(runs["mlm"]) == [(0, 5.0), (10, pytest.approx(3.2))]


def test_one_seed_is_no_measure_of_noise() -> None:
    assert difference([1.0], [2.0]) == {
        "mean": -1.0, "half_width_95": None, "verdict": "one seed: no noise to measure it by",
    }  # fmt: skip
    found = summarise({"mlm": [fake(0, 3.0, None)], "words": [fake(0, 2.0, None)]}, 2.5)
    assert "no noise" in verdicts(found)[0]
    assert all(len(row) == 6 for row in rows(found))  # no columns of a probe where there are no topics
