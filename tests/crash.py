"""Runs that are killed in the middle of an epoch and resumed; a script, for torchrun as well: ``crash.py FOLDER``."""

import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from scale import beside, join, keep, make_rows, make_trainer
from transformers.trainer_utils import get_last_checkpoint

SAVED_AT, KILLED_AT = 10, 11  # of 16 steps, in the middle of an epoch of 8 or 4 steps
ROWS = make_rows(24)


class Kill(transformers.TrainerCallback):
    """Ends a process as the kernel does that is out of memory, or a cluster that wants its node back."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == KILLED_AT and args.process_index == self.rank:
            os.kill(os.getpid(), signal.SIGKILL)


def trained(path: Path, kind: str, to: str, kill: int | None = None, resume: bool = False, **changes: Any) -> Any:
    """What a run saw, and its weights at the end."""
    torch.use_deterministic_algorithms(True)
    output = path.parent / f"{kind} {to}"
    callbacks = [] if kill is None else [Kill(kill)]
    trainer = make_trainer(kind, output, ROWS, callbacks, save_strategy="steps", save_steps=5, **changes)
    checkpoint = get_last_checkpoint(str(output)) if resume else None
    assert not resume or checkpoint == str(output / f"checkpoint-{SAVED_AT}"), checkpoint
    trainer.train(resume_from_checkpoint=checkpoint)
    return trainer.seen, {name: weight.detach().clone() for name, weight in trainer.model.state_dict().items()}


def runs_of(kind: str, kill: int, **changes: Any) -> dict[str, Callable[[Path], Any]]:
    return {
        f"whole {kind}": partial(trained, kind=kind, to="whole", **changes),
        f"killed {kind}": partial(trained, kind=kind, to="broken", kill=kill, **changes),
        f"resumed {kind}": partial(trained, kind=kind, to="broken", resume=True, **changes),
    }


def one_process(path: Path) -> None:
    """Each run in a process of its own, which knows nothing of the others but their files."""
    for kind, workers in (("plain", 2), ("sparse", 0)):
        for name, work in runs_of(kind, 0, dataloader_num_workers=workers).items():
            code = beside(path, name, work)
            assert code == (-signal.SIGKILL if name.startswith("killed") else 0), f"{name}: {code}"


def two_processes(path: Path) -> None:
    """The second process is killed: that of one Trainer beside, the other in torchrun's first attempt of two."""
    changes = {"num_train_epochs": 4, "ddp_backend": "gloo"}
    plain, sparse = runs_of("plain", 1, **changes), runs_of("sparse", 1, **changes)
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    if attempt == "0":
        for name, work in (*sparse.items(), ("whole plain", plain["whole plain"])):
            beside(path, name, work)
    # Not torchrun's own store, in which PyTorch 2.13 finds addresses of the first attempt in the second.
    join(path, f"attempt {attempt}")
    name = "killed plain" if attempt == "0" else "resumed plain"
    keep(path, name, plain[name])


if __name__ == "__main__":
    import crash  # under its name, by which its functions are found

    torch.set_num_threads(1)
    (crash.two_processes if "RANK" in os.environ else crash.one_process)(Path(sys.argv[1]))
