"""Progress bars: steps, loss, speed and time left, on stderr and only where that is a terminal."""

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from transformers import TrainerCallback


def _bar(*fields: str) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        *(TextColumn(field) for field in fields),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )


class ProgressBar(TrainerCallback):
    """Draws the bar as the Trainer goes."""

    def __init__(self, name: str, tokens_per_step: float) -> None:
        self._tokens_per_step = tokens_per_step
        self._progress = _bar("loss {task.fields[loss]}  {task.fields[speed]} tokens/s")
        self._task = self._progress.add_task(name, total=None, loss="-", speed="-")
        self._start, self._first_step = 0.0, 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._start, self._first_step = time.perf_counter(), state.global_step
        self._progress.update(self._task, total=state.max_steps, completed=state.global_step)
        if self._progress.console.is_terminal:
            self._progress.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        done = state.global_step - self._first_step
        speed = done * self._tokens_per_step / (time.perf_counter() - self._start)
        self._progress.update(self._task, completed=state.global_step, speed=f"{speed:,.0f}")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        if "loss" in logs:
            self._progress.update(self._task, loss=f"{float(logs['loss']):.3f}")

    def close(self) -> None:
        """Leave the terminal as it was, whether the run ended or was interrupted."""
        if self._progress.console.is_terminal:
            self._progress.stop()


class ComparisonBar:
    """One bar over the steps of many runs: ``with bar: ...``, and each run's Trainer gets ``bar.run(name)``."""

    def __init__(self, steps: int, done: int) -> None:
        self._progress = _bar("loss {task.fields[loss]}")
        self._task = self._progress.add_task("", total=steps, completed=done, loss="-")

    def __enter__(self) -> "ComparisonBar":
        if self._progress.console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._progress.console.is_terminal:
            self._progress.stop()

    def run(self, name: str) -> TrainerCallback:
        self._progress.update(self._task, description=name, loss="-")
        return _Advance(self._progress, self._task)


class _Advance(TrainerCallback):
    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress, self._task = progress, task

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self._progress.advance(self._task)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        if "loss" in logs:
            self._progress.update(self._task, loss=f"{float(logs['loss']):.3f}")
