"""The command line end to end, in-process: what it writes, what it refuses, and that a resumed run is the same run."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from command_line import refused

pytest.importorskip("transformers")
pytest.importorskip("rich")

from fastmlm import __version__
from fastmlm.cli import main

# torch's DataLoader and the Trainer go through swig- and numpy-made C types that Python 3.12 warns about.
pytestmark = pytest.mark.filterwarnings("ignore:builtin type .* has no __module__ attribute:DeprecationWarning")

FAST = ["--length", "24", "--batch-size", "4", "--vocab-size", "120", "--learning-rate", "0.005"]


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A repetitive text, so that a dozen steps teach a tiny model something; its last row is a short one."""
    sentence = "the quick brown fox jumps over the lazy dog while seven wizards watch from a quiet hill"
    words = sentence.split()
    lines = [" ".join(words[(i * k) % len(words)] for k in range(1, 9)) for i in range(60)]
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(".\n".join(lines), "utf-8")
    return str(file)


@pytest.fixture(scope="session")
def trained(text: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of 12 steps with checkpoints at 6 and 12. Copy it before changing it."""
    directory = tmp_path_factory.mktemp("trained") / "out"
    code = main(["pretrain", text, *FAST, "--steps", "12", "--save-steps", "6", "--output-dir", str(directory)])
    assert code == 0
    return directory


def _weights(directory: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(directory / "model.safetensors")


def _same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_pretrain_leaves_a_model_that_plain_transformers_loads(trained: Path) -> None:
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    model = AutoModelForMaskedLM.from_pretrained(trained)
    tokenizer = AutoTokenizer.from_pretrained(trained)
    batch = tokenizer("the quick [MASK] fox", return_tensors="pt")
    assert tokenizer.mask_token_id in batch["input_ids"]
    assert model(**batch).logits.shape == (*batch["input_ids"].shape, len(tokenizer))
    assert (trained / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert not (trained / "prepared" / "model").exists()  # first weights are of no use afterwards


def test_metrics_hold_a_loss_that_falls(trained: Path) -> None:
    metrics = json.loads((trained / "metrics.json").read_text())
    losses = [loss for _, loss in metrics["eval_loss"]]
    assert all(0 < loss < 6 for loss in losses)
    assert losses[-1] < losses[0] - 0.3
    assert metrics["final_eval_loss"] == losses[-1]
    assert metrics["train_loss"][-1][0] == 12
    assert metrics["step_ms"]["low"] <= metrics["step_ms"]["median"] <= metrics["step_ms"]["high"]
    assert metrics["settings"]["steps"] == 12
    assert len(metrics["filled_masks"][0]["candidates"]) == 5


def test_output_shows_filled_masks(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pretrain", text, *FAST, "--steps", "1", "--output-dir", str(tmp_path / "out")]) == 0
    out, err = capsys.readouterr()
    assert "[MASK]" in out
    assert "validation loss" in out
    assert err == ""


def test_resume_ends_with_the_weights_of_an_unbroken_run(trained: Path, tmp_path: Path) -> None:
    broken = tmp_path / "out"
    shutil.copytree(trained, broken)
    shutil.rmtree(broken / "checkpoint-12")
    (broken / "model.safetensors").unlink()
    assert main(["pretrain", "--resume", "--output-dir", str(broken)]) == 0
    assert _same(_weights(broken), _weights(trained))
    old, new = (json.loads((where / "metrics.json").read_text()) for where in (trained, broken))
    assert new["final_eval_loss"] == old["final_eval_loss"]
    assert new["eval_loss"] == old["eval_loss"][1:]  # the loss before the first step is not known to a checkpoint


def test_seed_alone_decides_a_run(trained: Path, text: str, tmp_path: Path) -> None:
    flags = ["pretrain", text, *FAST, "--steps", "12", "--output-dir"]
    assert main([*flags, str(tmp_path / "same")]) == 0
    assert main([*flags, str(tmp_path / "other"), "--seed", "1"]) == 0
    assert _same(_weights(tmp_path / "same"), _weights(trained))
    assert not _same(_weights(tmp_path / "other"), _weights(trained))
    same, other = (torch.load(tmp_path / run / "prepared/validation.pt") for run in ("same", "other"))
    assert _same(same, other)  # validation does not depend on the seed


def test_resume_refuses_other_settings(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "out"
    shutil.copytree(trained, copy)
    resume = ["pretrain", "--resume", "--output-dir", str(copy)]
    refused(capsys, [*resume, "--batch-size", "8"], "--batch-size", "8")
    refused(capsys, resume, "--steps", "12")  # all are done
    refused(capsys, [*resume, "--compare"], "--resume", "--compare")
    shutil.rmtree(copy / "checkpoint-6")
    shutil.rmtree(copy / "checkpoint-12")
    refused(capsys, resume, "--resume", "checkpoint")


def test_directories_are_not_overwritten(trained: Path, text: str, tmp_path: Path, capsys: Any) -> None:
    copy = tmp_path / "out"
    shutil.copytree(trained, copy)
    (copy / "notes.txt").write_text("mine")
    run = ["pretrain", text, *FAST, "--steps", "2", "--output-dir", str(copy)]
    before = (copy / "metrics.json").read_text()
    refused(capsys, run, "--output-dir", "--overwrite")
    assert (copy / "metrics.json").read_text() == before
    assert main([*run, "--overwrite"]) == 0
    assert json.loads((copy / "metrics.json").read_text())["settings"]["steps"] == 2
    assert (copy / "notes.txt").read_text() == "mine"
    assert not (copy / "checkpoint-12").exists()

    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "model.safetensors").write_text("not ours")
    refused(capsys, [*run[:-1], str(foreign), "--overwrite"], "--overwrite", "earlier run")
    assert (foreign / "model.safetensors").read_text() == "not ours"


def _tokenizer(directory: Path, **changes: Any) -> str:
    from fastmlm.cli.tokenizer import train_tokenizer

    tokenizer = train_tokenizer(["some words to train on"], 100)
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    tokenizer.save_pretrained(directory)
    return str(directory)


def _file(directory: Path, name: str, content: bytes) -> str:
    (directory / name).write_bytes(content)
    return str(directory / name)


def _config(directory: Path, **content: Any) -> str:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(content))
    return str(directory)


BAD: dict[str, tuple[Callable[[Path], list[str]], tuple[str, ...]]] = {
    "missing file": (lambda d: [str(d / "none.txt")], ("TEXT", "none.txt", "does not exist")),
    "directory as text": (lambda d: [str(d)], ("TEXT", "directory")),
    "empty text": (lambda d: [_file(d, "empty.txt", b" \n")], ("TEXT", "white space")),
    "not UTF-8": (lambda d: [_file(d, "latin.txt", b"caf\xe9 au lait")], ("TEXT", "UTF-8", "at 3")),
    "short text": (lambda d: [_file(d, "short.txt", b"only a few words here")], ("TEXT", "2 rows")),
    "unknown model": (lambda d: ["--model", "huge"], ("--model", "huge", "tiny, small, base")),
    "model without config": (lambda d: ["--model", str(d)], ("--model", "config.json")),
    "broken config": (lambda d: ["--model", _config(d / "c", model_type="no such")], ("--model", "config.json")),
    "not for masks": (lambda d: ["--model", _config(d / "c", model_type="gpt2")], ("--model", "gpt2")),
    "too long": (
        lambda d: ["--model", _config(d / "c", model_type="bert", max_position_embeddings=16), "--length", "17"],
        ("--length", "16", "17"),
    ),
    "no tokenizer": (lambda d: ["--tokenizer", str(d)], ("--tokenizer",)),
    "no directory": (lambda d: ["--tokenizer", str(d / "none")], ("--tokenizer", "none")),
    "config only": (lambda d: ["--tokenizer", _config(d / "c", model_type="bert")], ("--tokenizer",)),
    "no mask token": (lambda d: ["--tokenizer", _tokenizer(d / "t", mask_token=None)], ("--tokenizer", "mask token")),
    "no pad token": (lambda d: ["--tokenizer", _tokenizer(d / "t", pad_token=None)], ("--tokenizer", "pad token")),
    "probability": (lambda d: ["--mlm-probability", "1.5"], ("--mlm-probability", "1.5")),
    "nan": (lambda d: ["--mlm-probability", "nan"], ("--mlm-probability", "nan")),
    "eval fraction": (lambda d: ["--eval-fraction", "1"], ("--eval-fraction", "between 0 and 1")),
    "steps": (lambda d: ["--steps", "0"], ("--steps", "'0'")),
    "batch size": (lambda d: ["--batch-size", "four"], ("--batch-size", "four")),
    "unknown flag": (lambda d: ["--stepz", "3"], ("--stepz",)),
    "no checkpoint": (lambda d: ["--resume"], ("--resume",)),
    "trainer argument": (lambda d: ["--trainer-arg", "weight_decoy=1"], ("--trainer-arg", "weight_decoy")),
    "no value": (lambda d: ["--trainer-arg", "weight_decay"], ("--trainer-arg", "NAME=VALUE")),
    "its type": (lambda d: ["--trainer-arg", "weight_decay=much"], ("--trainer-arg", "weight_decay", "much")),
    "its choice": (lambda d: ["--trainer-arg", "lr_scheduler_type=up"], ("--trainer-arg", "lr_scheduler_type", "up")),
    "our flag": (lambda d: ["--trainer-arg", "max_steps=3"], ("--trainer-arg", "--steps")),
    "whole words compared": (lambda d: ["--compare", "--whole-word-mask"], ("--compare", "--whole-word-mask")),
    "output is a file": (lambda d: ["--output-dir", _file(d, "file", b"x")], ("--output-dir", "file")),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_code_2(case: str, tmp_path: Path, capsys: Any) -> None:
    make, named = BAD[case]
    argv, out = make(tmp_path), tmp_path / "out"
    refused(capsys, ["pretrain", "--output-dir", str(out), *argv], *named)
    assert not out.exists()


def test_trainer_arguments_are_read_by_their_type() -> None:
    from fastmlm.cli.trainer_args import extra_arguments

    given = ["weight_decay=0.5", "dataloader_drop_last=true", "lr_scheduler_type=cosine", 'optim_args=a="b=c"']
    values = extra_arguments(given)
    assert values["weight_decay"] == 0.5
    assert values["dataloader_drop_last"] is True
    assert values["lr_scheduler_type"] == "cosine"
    assert values["optim_args"] == 'a="b=c"'


def test_trainer_arguments_reach_the_trainer(trained: Path, text: str, tmp_path: Path) -> None:
    flags = ["pretrain", text, *FAST, "--steps", "12", "--output-dir", str(tmp_path / "out")]
    assert main([*flags, "--trainer-arg", "warmup_steps=12", "--trainer-arg", "logging_steps=3"]) == 0
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert [step for step, _ in metrics["train_loss"]] == [3, 6, 9, 12]
    assert not _same(_weights(tmp_path / "out"), _weights(trained))


def test_flags_reach_the_run(trained: Path, text: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    extra = [
        "--whole-word-mask",
        "--gradient-checkpointing",
        "--gradient-accumulation",
        "2",
        "--bf16",
        "--max-grad-norm",
        "0",
    ]
    assert (
        main(["pretrain", text, *FAST, "--steps", "2", "--output-dir", str(out), "--tokenizer", str(trained), *extra])
        == 0
    )
    assert json.loads((out / "metrics.json").read_text())["settings"]["gradient_accumulation"] == 2
    assert (out / "tokenizer.json").read_text() == (trained / "tokenizer.json").read_text()


def test_a_checkpoint_directory_is_trained_on(trained: Path, text: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(["pretrain", text, *FAST, "--steps", "1", "--model", str(trained), "--output-dir", str(out)]) == 0
    first = json.loads((out / "metrics.json").read_text())["eval_loss"][0][1]
    assert first == pytest.approx(json.loads((trained / "metrics.json").read_text())["final_eval_loss"], rel=1e-5)


def test_compare_prints_and_writes_the_table(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    run = ["pretrain", text, *FAST, "--steps", "4", "--compare", "--compare-repeats", "1", "--output-dir", str(out)]
    assert main(run) == 0
    printed = capsys.readouterr().out
    table = (out / "compare.md").read_text()
    for title in ("collator, ms a batch", "step, ms", "tokens/s", "peak memory, MB", "validation loss"):
        assert title in printed
        assert f"| {title} |" in table
    sides = json.loads((out / "metrics.json").read_text())["comparison"]["sides"]
    assert set(sides) == {"fastmlm", "Hugging Face"}
    results = [json.loads(file.read_text()) for file in sorted(out.glob("runs/*/result.json"))]
    assert results[0]["data_order"] == results[1]["data_order"]
    assert results[0]["eval_loss"][0] == results[1]["eval_loss"][0]  # same first weights, same validation
    assert results[0]["train_loss"] != results[1]["train_loss"]  # but masks of their own
    assert (out / "model.safetensors").exists()


def test_interrupt_is_one_line_and_code_130(text: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("transformers.Trainer.train", interrupted)
    assert main(["pretrain", text, *FAST, "--output-dir", str(tmp_path / "out")]) == 130
    assert capsys.readouterr().err.count("\n") == 1


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, expected in (
        (["--version"], f"fastmlm {__version__}\n"),
        (["--help"], "pretrain"),
        (["inspect", "-h"], "--rows"),
    ):
        with pytest.raises(SystemExit, match="0"):
            main(argv)
        assert expected in capsys.readouterr().out


def test_inspect_prints_every_fate_and_the_rates(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", text, "--rows", "40", "--length", "32", "--vocab-size", "120"]) == 0
    out, err = capsys.readouterr()
    body, _, rates = out.partition("rates")
    for mark in ("[M:", "[R:", "[K:", "<[CLS]>", "<[SEP]>", "<[PAD]>*"):
        assert mark in body
    assert err == ""
    assert "15.00%" in rates
    assert "80.00%" in rates


@pytest.mark.parametrize("flags", [[], ["--whole-word-mask"], ["--mlm-probability", "1"]])
def test_inspect_takes_the_flags(flags: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", text, "--vocab-size", "120", "--rows", "2", *flags]) == 0
    out = capsys.readouterr().out
    assert ("100.00%" in out) == ("1" in flags)
    assert ("wholes" in out) == ("--whole-word-mask" in flags)


def test_fates_are_read_off_the_batch() -> None:
    from fastmlm.cli.inspect import batch_fates

    tokenizer: Any = SimpleNamespace(all_special_ids=[0, 1, 2], mask_token_id=2)
    batch = {
        "input_ids": torch.tensor([[1, 2, 7, 8, 9, 2, 0]]),
        "labels": torch.tensor([[-100, 5, 6, 8, -100, -100, -100]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 1, 0]]),
    }
    expected = [["special", "masked", "random", "kept", "untouched", "special", "padding"]]
    assert batch_fates(tokenizer, batch) == expected


def test_verdict_weighs_the_difference_against_the_noise() -> None:
    from fastmlm.cli.summary import compare_sides

    def run(side: str, loss: float) -> dict[str, Any]:
        times = {"collator_ms": [1.0] * 9, "step_ms": [10.0] * 9, "batches_per_step": 1, "tokens_per_step": 110.0}
        return {"side": side, "eval_loss": [[9, loss]], "memory": {"peak_mb": 5.0, "growth_mb": 1.0}, **times}

    noisy = [run("fastmlm", 2.0), run("fastmlm", 2.2), run("Hugging Face", 2.1), run("Hugging Face", 2.3)]
    compared = compare_sides(noisy)
    assert compared["sides"]["fastmlm"]["tokens_per_second"]["median"] == pytest.approx(10_000)
    # Student's t, 2 degrees of freedom: 4.303 standard errors, each side's 0.1.
    assert compared["eval_loss_difference"]["half_width_95"] == pytest.approx(4.303 * 0.1 * 2**0.5)
    assert "equal" in compared["eval_loss_difference"]["verdict"]
    clear = [run("fastmlm", 2.0), run("fastmlm", 2.001), run("Hugging Face", 2.5), run("Hugging Face", 2.501)]
    assert "lower" in compare_sides(clear)["eval_loss_difference"]["verdict"]


def test_rows_are_framed_chunks_of_single_documents() -> None:
    from fastmlm.cli.corpus import make_rows
    from fastmlm.cli.tokenizer import train_tokenizer

    documents = ["a b c d e f g h i j k l m n o p q r s", "t u v w x y z a b"]
    tokenizer = train_tokenizer(documents, 200)
    rows = make_rows(documents, tokenizer, length=12)
    assert [len(row) for row in rows] == [12, 11, 11]
    assert all(row[0] == tokenizer.cls_token_id and row[-1] == tokenizer.sep_token_id for row in rows)
    assert tokenizer.decode(rows[2], skip_special_tokens=True) == documents[1]


def test_lengths_beyond_the_positions_of_a_model(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """RoBERTa numbers positions from its padding id on, and has fewer than its config says."""
    config = transformers.RobertaConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, max_position_embeddings=64
    )
    config.save_pretrained(tmp_path / "model")
    out = tmp_path / "out"
    code = main(["pretrain", str(text), "--model", str(tmp_path / "model"), "--length", "64", "--output-dir", str(out)])
    assert code == 2
    assert "argument --length: expected no more positions than the model has, got 64" in capsys.readouterr().err
    assert not out.exists()
