"""Time and memory on a GPU; and a stand-in for both on a CPU, by which a dry run goes the same way through the code."""

import gc
import subprocess
from collections.abc import Callable
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import torch

Call = Callable[[], object]

FLUSH = 512 << 20  # bytes written between calls: 8 times the L2 of an H200, and 120 µs in which the host runs ahead
HUGE = 20_000  # MB: a call that takes more gets memory of its own, or the allocator would search for it in its turn


class Device:
    """A CUDA device. `dry` tells the other sections to take tiny sizes."""

    dry = False
    kind = "cuda"
    compiler = "inductor"  # backend of torch.compile
    flush_bytes = FLUSH
    turns = 5
    most_calls = 50  # in a turn

    def __init__(self) -> None:
        self.device = torch.device("cuda", 0)
        self._flush = torch.empty(self.flush_bytes, dtype=torch.uint8, device=self.device)

    def describe(self) -> dict[str, Any]:
        properties = torch.cuda.get_device_properties(self.device)
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            driver = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.strip()
        except (OSError, subprocess.TimeoutExpired):
            driver = "unknown"
        return {
            "name": properties.name,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
            "driver": driver,
        }

    def wait(self) -> None:
        torch.cuda.synchronize()

    def free(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()

    def cold(self, call: Call, calls: int) -> list[float]:
        """Milliseconds of each call between two events, the L2 flushed before it.

        The flush also keeps the device busy while the host launches, so that little of launching is counted.
        """
        times = []
        for _ in range(calls):
            self._flush.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return times

    def in_a_row(self, call: Call, calls: int) -> list[float]:
        """Milliseconds a call by the host's clock, the device waited for once after all of them."""
        self.wait()
        start = perf_counter()
        for _ in range(calls):
            call()
        self.wait()
        return [1e3 * (perf_counter() - start) / calls]

    def peak(self, call: Call) -> float:
        """MB that a call takes at most above what was there before, its results included."""
        self.free()
        self.wait()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        self.wait()
        return (torch.cuda.max_memory_allocated() - before) / 1e6

    def capture(self, call: Call) -> Call:
        """A CUDA graph of the call, after three that warm it up; what its replay calls for."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        self.wait()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph.replay


class StandIn(Device):
    """The CPU with its clock: a graph is the call itself, and memory, which is not measured, always 1 MB."""

    dry = True
    kind = "cpu"
    compiler = "eager"
    flush_bytes = 1 << 10
    turns, most_calls = 1, 2

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        torch.set_num_threads(1)  # everything is tiny: more would wait for each other
        self._flush = torch.empty(self.flush_bytes, dtype=torch.uint8)

    def describe(self) -> dict[str, Any]:
        return {"name": "no GPU: a dry run in Triton's interpreter, whose figures say nothing"}

    def wait(self) -> None:
        pass

    def free(self) -> None:
        gc.collect()

    def cold(self, call: Call, calls: int) -> list[float]:
        times = []
        for _ in range(calls):
            self._flush.zero_()
            start = perf_counter()
            call()
            times.append(1e3 * (perf_counter() - start))
        return times

    def peak(self, call: Call) -> float:
        call()
        return 1.0

    def capture(self, call: Call) -> Call:
        call()
        return call


class Captured:
    """Replays the CUDA graph of a call, captured when first asked for: whoever fails to be captured fails then."""

    def __init__(self, device: Device, call: Call) -> None:
        self.device, self.call = device, call
        self.replay: Call | None = None

    def __call__(self) -> None:
        if self.replay is None:
            self.replay = self.device.capture(self.call)
        self.replay()


def describe_error(error: BaseException) -> str:
    """One line, not too long."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}"[:300]


def take_turns(
    device: Device,
    calls: dict[str, Call],
    seconds: float,
    until: float,
    *,
    measure: Callable[[Call, int], list[float]] | None = None,
    look: Callable[[Any], dict[str, Any]] | None = None,
) -> dict[str, dict[str, Any]]:
    """Every contender by turns, for so many seconds in all, with what it takes of memory.

    Each is first called alone: who fails then is left out with the error, and who finds no time left is skipped. A turn
    is a call that is not measured, which finds what it needs in the allocator again, and some that are.

    Returns:
        by name: "ms", the median, "quartiles", "turns", the median of each, "calls", "peak_mb" (None for a graph),
        "first_s", the seconds of the first call, which may compile, and what `look` finds in its result; or "error", or
        "skipped".
    """
    measure = measure or device.cold
    entries: dict[str, dict[str, Any]] = {}
    once: dict[str, float] = {}
    for name, call in calls.items():
        if perf_counter() > until:
            entries[name] = {"skipped": "no time was left"}
            continue
        try:
            start = perf_counter()
            result = call()
            device.wait()
            entries[name] = {"first_s": round(perf_counter() - start, 3), **(look(result) if look else {})}
            del result
            # A graph has taken its memory when it was captured.
            entries[name]["peak_mb"] = None if isinstance(call, Captured) else device.peak(call)
            once[name] = max(min(measure(call, 1) + measure(call, 1)), 1e-4)
        except Exception as error:
            entries[name] = {"error": describe_error(error)}
            once.pop(name, None)
        device.free()
    samples: dict[str, list[list[float]]] = {name: [] for name in once}
    for turn in range(device.turns):
        for name in list(samples):
            if turn >= 2 and perf_counter() > until:
                continue
            count = int(1e3 * seconds / device.turns / len(samples) / once[name])
            try:
                peak = entries[name]["peak_mb"] or 0
                samples[name].append(_turn(device, calls[name], measure, count, peak > HUGE))
            except Exception as error:
                entries[name] = {"error": describe_error(error)}
                del samples[name]
    for name, turns in samples.items():
        entries[name] |= summary(turns)
    return entries


def _turn(
    device: Device, call: Call, measure: Callable[[Call, int], list[float]], count: int, huge: bool
) -> list[float]:
    if huge:
        device.free()
    call()
    times = measure(call, max(1, min(device.most_calls, count)))
    if huge:
        device.free()
    return times


def summary(turns: list[list[float]]) -> dict[str, Any]:
    every = [time for turn in turns for time in turn]
    low, middle, high = quantiles(every, n=4, method="inclusive") if len(every) > 1 else every * 3
    return {"ms": middle, "quartiles": [low, high], "turns": [median(turn) for turn in turns], "calls": len(every)}


def ratio(entries: dict[str, dict[str, Any]], ours: str, theirs: str) -> float | None:
    """How many times as long theirs takes: the median over turns; None where one of the two was not measured."""
    one, other = entries.get(ours, {}).get("turns"), entries.get(theirs, {}).get("turns")
    return median(b / a for a, b in zip(one, other, strict=False)) if one and other else None
