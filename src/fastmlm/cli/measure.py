"""Clocks and memory, the same around either side of a comparison."""

import ctypes
import os
import platform
import resource
import sys
import time
import zlib
from array import array
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import TrainerCallback

from fastmlm import __version__

_M_MMAP_THRESHOLD = -3  # of glibc's malloc.h


class TimedCollator:
    """Calls a collator, timing nothing but the call, and keeps a checksum of the rows in the order they came."""

    def __init__(self, collator: Any) -> None:
        self.collator = collator
        self.milliseconds: list[float] = []
        self.order = 0

    def __call__(self, features: list[dict[str, list[int]]]) -> Any:
        for row in features:
            self.order = zlib.crc32(array("q", row["input_ids"]).tobytes(), self.order)
        start = time.perf_counter()
        batch = self.collator(features)
        self.milliseconds.append(1e3 * (time.perf_counter() - start))
        return batch


class StepTimer(TrainerCallback):
    """Times forward, backward, clipping and optimizer: from the Trainer's on_step_begin to its on_step_end."""

    def __init__(self) -> None:
        self.milliseconds: list[float] = []
        self._start = 0.0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._start = now()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.milliseconds.append(1e3 * (now() - self._start))


def now() -> float:
    if torch.cuda.is_available():  # else the clock would time the launches, not the work
        torch.cuda.synchronize()
    return time.perf_counter()


def return_freed_memory() -> None:
    """Keep glibc from raising its mmap threshold, so that a freed tensor of 4 MB or more leaves the process.

    By default each freed large block raises the threshold, up to 32 MB. The buffers of a sparse head are below that and
    of another size each step, so the heap they then come from fragments to several times what is in use.
    """
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 4 * 2**20)


class PeakMemory:
    """Peak memory in MB of this process (of the GPU where there is one), in all and above where it was at the start."""

    def __init__(self) -> None:
        self._start = torch.cuda.memory_allocated() / 2**20 if torch.cuda.is_available() else _status("VmRSS")

    def read(self) -> dict[str, float]:
        peak = torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else _status("VmHWM")
        return {"peak_mb": peak, "growth_mb": peak - self._start}


def _status(field: str) -> float:
    """A line of /proc/self/status in MB; elsewhere the peak that getrusage knows.

    Linux hands getrusage's ru_maxrss down from a parent process to its children, which would give a child the peak of
    whoever started it; VmHWM begins anew with each program.
    """
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith(field))
        return int(line.split()[1]) / 2**10
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    return {
        "device": device,
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "fastmlm": __version__,
    }
