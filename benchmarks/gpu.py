"""Everything there is to know about a GPU in one run of less than 6 minutes: ``python benchmarks/gpu.py``.

Whether the compiled kernels are right, then how fast: masking, its latency, the vocabulary projection with its loss, a
whole training step, each beside its peers, with its peak memory. Needs torch, triton and transformers, no network and
no install: the package is taken from this checkout. Peers that are not installed (Liger, cut-cross-entropy) are looked
for in ``build/peers``: ``pip install --no-deps --target build/peers liger-kernel cut-cross-entropy``.

Writes ``gpu.json`` and ``gpu.md`` as results come, into ``$OUT`` or ``benchmarks/results``. The exit code is 1 if a
check failed, 0 whatever the figures are. With ``--dry-run`` the same code runs on a CPU, kernels in Triton's
interpreter, at tiny sizes and into a temporary folder.
"""

import argparse
import gc
import json
import os
import platform
import sys
import tempfile
import threading
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from time import perf_counter
from typing import Any

START = perf_counter()
SECONDS = 330  # of all sections together, imports included; the watchdog gives the last of them 20 more
SHARES = {"correctness": 80, "masking": 85, "latency": 25, "head": 90, "step": 40}  # of that time


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="on a CPU, in Triton's interpreter, at tiny sizes")
    parser.add_argument("--output", type=Path, help="folder of the results")
    parser.add_argument("--peers", type=Path, help="folder of unpacked wheels of peers (build/peers)")
    parser.add_argument("--commit", help="what is measured, where the checkout has no .git")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time for all sections together")
    parser.add_argument("--sections", default=",".join(SHARES), help="which of them to run, by commas")
    arguments = parser.parse_args()
    unknown = set(arguments.sections.split(",")) - set(SHARES)
    if unknown:
        parser.error(f"no such sections: {', '.join(sorted(unknown))}")
    return arguments


def output_folder(arguments: argparse.Namespace) -> Path:
    """A dry run never writes where results are kept, unless it is told to."""
    if arguments.output is not None:
        return arguments.output
    if arguments.dry_run:
        return Path(tempfile.mkdtemp(prefix="fastmlm-gpu-dry-run-"))
    return Path(os.environ.get("OUT") or Path(__file__).parent / "results")


def write(folder: Path, record: dict[str, Any]) -> None:
    """Whole files or none: a run may be killed at any time."""
    from gpu_sections.report import markdown

    folder.mkdir(parents=True, exist_ok=True)
    record["seconds"] = round(perf_counter() - START, 1)
    text = json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False)
    for name, content in (("gpu.json", text + "\n"), ("gpu.md", markdown(record))):
        unfinished = folder / f".{name}"
        unfinished.write_text(content)
        unfinished.replace(folder / name)


def watch(folder: Path, record: dict[str, Any], seconds: float) -> threading.Timer:
    """Ends the process when something hangs, with what there is by then."""

    def stop() -> None:
        record["stopped"] = f"by the watchdog, after {perf_counter() - START:.0f} s"
        print(f"STOPPED {record['stopped']}", flush=True)
        try:
            write(folder, record)
        finally:
            os._exit(1)

    timer = threading.Timer(max(seconds - (perf_counter() - START), 1), stop)
    timer.daemon = True
    timer.start()
    return timer


def describe_run(arguments: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """The device, and what is written about the run before it begins."""
    from gpu_sections import tree

    notes = tree.use_tree(arguments.peers or tree.PEERS)
    import torch
    from gpu_sections.timing import Device, StandIn

    from fastmlm._ops import LOSS_IMPLS

    if not arguments.dry_run and not torch.cuda.is_available():
        raise SystemExit("There is no GPU here. On a CPU, try --dry-run.")
    device = StandIn() if arguments.dry_run else Device()
    loss_impl = "triton" if "triton" in LOSS_IMPLS else None
    if loss_impl is None:
        notes.append("linear_cross_entropy has no Triton kernel yet: impl=None, the fastest there is, was measured.")
    for note in notes:
        print(f"note: {note}", flush=True)
    record: dict[str, Any] = {
        "dry_run": arguments.dry_run,
        "device": device.describe(),
        "machine": platform.platform(),
        "versions": tree.versions(),
        "commit": arguments.commit or tree.commit(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "flushed_mb": device.flush_bytes / 1e6,
        "loss_impl": loss_impl,
        "notes": notes,
        "sections": {},
    }
    return device, record


def run_section(section: Any, function: Callable[[Any], None], record: dict[str, Any]) -> bool:
    """Run it, whatever happens in it, and put down what it finds as it finds it; whether it failed."""
    import traceback

    from gpu_sections.timing import describe_error

    start = perf_counter()
    record["sections"][section.name] = found = section.as_dict()
    print(f"{section.name}: {section.left():.0f} s at most", flush=True)
    try:
        function(section)
    except Exception as error:
        section.error = describe_error(error)
        traceback.print_exc()
    section.device.free()
    found |= {"error": section.error, "seconds": round(perf_counter() - start, 1)}
    section.save()
    return section.failed()


def main() -> int:
    arguments = parse()
    if arguments.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when kernels are decorated
    elif os.environ.get("TRITON_INTERPRET", "0") != "0":
        raise SystemExit("TRITON_INTERPRET is set: that is for --dry-run.")
    folder = output_folder(arguments)
    device, record = describe_run(arguments)
    watchdog = watch(folder, record, arguments.seconds + 20)

    from gpu_sections import checks, loss, masking, step
    from gpu_sections.record import Section

    gc.freeze()  # what was imported stays; collections in between take no time over it
    functions: dict[str, Callable[[Any], None]] = {
        "correctness": checks.correctness,
        "masking": masking.masking,
        "latency": masking.latency,
        "head": loss.head,
        "step": step.step,
    }
    chosen = [name for name in SHARES if name in arguments.sections.split(",")]
    available = arguments.seconds - (perf_counter() - START)
    until, failed = perf_counter(), False
    for name in chosen:  # what one leaves of its time, the next ones have
        until += available * SHARES[name] / sum(SHARES[other] for other in chosen)
        section = Section(name, device, until, record["loss_impl"], save=lambda: write(folder, record))
        failed |= run_section(section, functions[name], record)
    watchdog.cancel()
    print(f"{folder / 'gpu.md'}, {folder / 'gpu.json'}: {record['seconds']:.0f} s, {'FAILED' if failed else 'ok'}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
