"""Runs of one process and of several, which write down what became of each row; a script for torchrun as well.

``torchrun ... scale.py FOLDER CASE...``: each process leaves what it saw of a case in ``FOLDER/CASE-RANK``.
"""

import multiprocessing
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from datasets import Dataset
from tokenizers import Tokenizer, models
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

from fastmlm import DataCollatorForMaskedLM, MaskedLMTrainer, sparsify
from fastmlm.on_device import mask_batch
from fastmlm.testing import make_model

SECONDS = 100  # until a run counts as hanging
Row = tuple[tuple[int, ...], tuple[int, ...]]  # ids and labels without padding


class Seen(NamedTuple):
    """A row that a model was shown."""

    passed: int  # how many passes over the data came before, in this process
    step: int
    idx: int
    row: Row


# ---- Data ----


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {token: i for i, token in enumerate([*specials, *(f"w{i}" for i in range(195))])}
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), specials, strict=True))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, "[UNK]")),
        model_input_names=["input_ids", "attention_mask"], **names,
    )  # fmt: skip


def make_rows(count: int = 22) -> list[dict[str, Any]]:
    """Rows of 16 to 40 tokens; those of the second half are those of the first again."""
    rng = np.random.default_rng(5)
    texts = [[2, *rng.integers(5, 200, 14 + 3 * (7 * i % 9)).tolist(), 3] for i in range(count // 2)]
    return [{"input_ids": ids, "idx": i} for i, ids in enumerate(texts * 2)]


def make_collator(epoch: int | None = None, **kwargs: Any) -> DataCollatorForMaskedLM:
    made = DataCollatorForMaskedLM(tokenizer(), **{"seed": 11, "mlm_probability": 0.4, **kwargs})
    if epoch is not None:
        made.set_epoch(epoch)
    return made


def rows_of(batch: Any) -> list[tuple[int, Row]]:
    """The numbers of a batch's rows, and the rows."""
    if "cu_seq_lens_q" in batch:
        sizes = batch["cu_seq_lens_q"].diff().tolist()
        columns = [batch[name][0].split(sizes) for name in ("input_ids", "labels")]
    else:
        real = batch["attention_mask"] == 1
        columns = [[row[r] for row, r in zip(batch[name], real, strict=True)] for name in ("input_ids", "labels")]
    pairs = list(zip(*([tuple(row.tolist()) for row in column] for column in columns), strict=True))
    numbers = batch["idx"].tolist()
    return list(zip(numbers, pairs[: len(numbers)], strict=True))  # a packed batch may end with a row of padding


def expected(epoch: int, rows: Iterable[dict[str, Any]], **kwargs: Any) -> dict[int, Row]:
    """Each row as it is masked when it comes alone."""
    made = make_collator(epoch, **kwargs)
    return {idx: found for row in rows for idx, found in rows_of(made([row]))}


# ---- Training ----


class Recording:
    """Before a Trainer: keeps what its model is shown."""

    seen: list[Seen]

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        trainer: Any = self
        passed = trainer.passes.count - 1
        trainer.seen += [Seen(passed, trainer.state.global_step, idx, row) for idx, row in rows_of(inputs)]
        del inputs["idx"]
        return super().training_step(model, inputs, *args, **kwargs)  # type: ignore[misc]


class Passes(transformers.TrainerCallback):
    count = 0

    def on_epoch_begin(self, *args: Any, **kwargs: Any) -> None:
        self.count += 1


class PlainTrainer(Recording, transformers.Trainer):
    pass


class SparseTrainer(Recording, MaskedLMTrainer):
    pass


TRAINERS = {"plain": PlainTrainer, "sparse": SparseTrainer}


def make_trainer(kind: str, path: Path, data: Any, callbacks: Any = (), **changes: Any) -> Any:
    """A Trainer of the kind, of a tiny BERT with dropout; two passes in batches of three by default."""
    made = changes.pop("collator", None) or make_collator()
    model = make_model("Bert", vocab_size=200, max_position_embeddings=64, hidden_dropout_prob=0.1).float()
    arguments = transformers.TrainingArguments(
        **{
            "output_dir": str(path), "use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True,
            "logging_strategy": "no", "num_train_epochs": 2, "per_device_train_batch_size": 3, "learning_rate": 0.01,
            "dataloader_pin_memory": False, "remove_unused_columns": False, "seed": 1,
        } | changes
    )  # fmt: skip
    passes = Passes()
    told = [made.callback()] if kind == "plain" else []
    trainer = TRAINERS[kind](model, arguments, made, data, callbacks=[passes, *told, *callbacks])
    trainer.passes, trainer.seen = passes, []
    return trainer


def train(kind: str, path: Path, data: Any, resume: Any = None, **changes: Any) -> list[Seen]:
    trainer = make_trainer(kind, path, data, **changes)
    trainer.train(resume_from_checkpoint=resume)
    return trainer.seen


# ---- What processes do ----


def sharded(path: Path) -> list[Seen]:
    """Two passes of FSDP2, as a loop of one's own."""
    made, rows, seen = make_collator(), make_rows(), []
    model: Any = sparsify(make_model("Bert", vocab_size=200, max_position_embeddings=64).float())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (*model.bert.encoder.layer, model):
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sampler: Any = DistributedSampler(rows, seed=3)
    for epoch in range(2):
        made.set_epoch(epoch)
        sampler.set_epoch(epoch)
        for step, batch in enumerate(DataLoader(rows, 4, sampler=sampler, collate_fn=made)):
            seen += [Seen(epoch, step, idx, row) for idx, row in rows_of(batch)]
            del batch["idx"]
            loss = model(**batch).loss
            assert torch.isfinite(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return seen


def accelerated(path: Path, dispatch: bool, split: bool, skip: int = 0, count: int = 22, **kwargs: Any) -> list[Seen]:
    """Two passes of a loader that Accelerate has prepared, from a batch on."""
    config = DataLoaderConfiguration(dispatch_batches=dispatch, split_batches=split)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    made, seen = make_collator(**kwargs), []
    loader = accelerator.prepare(DataLoader(make_rows()[:count], 4, shuffle=True, collate_fn=made))
    for epoch in range(2):
        made.set_epoch(epoch)
        loader.set_epoch(epoch)
        for step, batch in enumerate(skip_first_batches(loader, skip) if skip else loader):
            masked = mask_batch(batch, made) if made.mask_on_device else batch
            seen += [Seen(epoch, step, idx, row) for idx, row in rows_of(masked)]
    return seen


def stream(shards: int = 4) -> Any:
    return Dataset.from_list(make_rows()).to_iterable_dataset(shards).shuffle(seed=2, buffer_size=8)


def streamed(path: Path, dispatch: bool, **kwargs: Any) -> list[Seen]:
    """A Trainer's passes over a stream: by default the first process reads it for all."""
    config = {"dispatch_batches": dispatch, "split_batches": False}
    changes = {"max_steps": 9, "accelerator_config": config, "ddp_backend": "gloo"}
    return train("sparse", path, stream(), collator=make_collator(pad_to_multiple_of=64, **kwargs), **changes)


_FORMS: dict[str, dict[str, Any]] = {
    "one width": {"pad_to_multiple_of": 64},
    "on device": {"pad_to_multiple_of": 64, "mask_on_device": True},
    "odd end": {"pad_to_multiple_of": 64, "count": 21},
    "skipped": {"pad_to_multiple_of": 64, "skip": 1},
    "widths": {},
    "widths, odd end": {"count": 21},
    "packed": {"packing": True},
    "packed to one size": {"packing": True, "pad_to_multiple_of": 256},
    "packed on device": {"packing": True, "mask_on_device": True},
}
ACCELERATED = {
    f"{form}, {dispatch=}, {split=}": partial(accelerated, dispatch=dispatch, split=split, **kwargs)
    for form, kwargs in _FORMS.items()
    for dispatch in (False, True)
    for split in (False, True)
}
BESIDE: dict[str, Callable[[Path], list[Seen]]] = {
    "fsdp2": sharded,
    "stream": partial(streamed, dispatch=False),
    "stream, dispatched": partial(streamed, dispatch=True),
    "stream, packed and dispatched": partial(streamed, dispatch=True, packing=True),
    **ACCELERATED,
}  # each in processes and with a process group of its own, for some end with an error
ALONE = {f"ddp {kind}": partial(train, kind, data=make_rows(), ddp_backend="gloo") for kind in TRAINERS}


def torchrun(processes: int, path: Path, script: str, *arguments: str, restarts: int = 0) -> None:
    """``torchrun --nproc-per-node PROCESSES SCRIPT PATH ARGUMENTS``; raises if that fails or takes too long."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}",
        f"--max-restarts={restarts}", str(Path(__file__).with_name(script)), str(path), *arguments,
    ]  # fmt: skip
    run(command, path)


def run(command: list[str], path: Path) -> None:
    """A command that must end well, and in time."""
    log = path / "log"
    code: int | str
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with log.open("w") as output:  # a pipe would stay open as long as any worker of a killed process lives
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        try:
            code = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            process.terminate()  # on which torchrun ends its processes
            code = f"{process.wait(60)} after {SECONDS} s"
        finally:
            process.kill()
    assert code == 0, f"exit code {code}\n{log.read_text()[-5000:]}"


def results(path: Path, case: str, processes: int) -> list[Any]:
    """What each process saw of a case, or the error it ended with."""
    return [pickle.loads((path / f"{case}-{rank}").read_bytes()) for rank in range(processes)]


def keep(path: Path, name: str, work: Callable[[Path], Any]) -> None:
    """Leave in a file what some work returns, or raises."""
    rank = os.environ.get("RANK", "0")
    try:
        result = work(path / f"of {name}")
    except Exception as error:
        result = error
    (path / f"{name}-{rank}").write_bytes(pickle.dumps(result))


def join(path: Path, name: str) -> None:
    """A process group by a file, where torchrun started several processes."""
    if "RANK" in os.environ:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        rendezvous = (path / f"{name} group").as_uri()
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world)


def beside(path: Path, name: str, work: Callable[[Path], Any]) -> int | None:
    """`keep` in a fork, with a process group of its own where there are several processes; the exit code."""

    def child() -> None:
        join(path, name)
        keep(path, name, work)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(SECONDS / 2)
    if process.is_alive():
        process.kill()
        raise TimeoutError(f"{name} did not end")
    return process.exitcode


def main(path: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    for name in names:
        if name in BESIDE:
            beside(path, name, BESIDE[name])
    for name in names:
        if name in ALONE:
            keep(path, name, ALONE[name])
    if dist.is_initialized():
        dist.destroy_process_group()  # else its threads, ended with the process, may abort it


if __name__ == "__main__":
    import scale  # under its name, by which its classes are found again where results are read

    scale.main(Path(sys.argv[1]), sys.argv[2:])
