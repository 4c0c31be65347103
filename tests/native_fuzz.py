"""Fuzzing of the native module, with inputs that no caller of ours would give too; every buffer between guard zones.

``make sanitize`` runs this file under AddressSanitizer and UBSan; test_native_fuzz.py runs a few hundred inputs of each
check in the ordinary build, where the guard zones are looked at but reads beyond a buffer go unseen.
"""

import argparse
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from fuzz_arrays import (
    check_lists,
    check_mask_tokens,
    check_row_keys,
    check_units_fit,
    list_cases,
    mask_cases,
    token_cases,
)
from fuzz_lists import check_pack_rows, pack_cases
from guards import buffers
from hypothesis import HealthCheck, given, seed, settings, strategies as st

from fastmlm.kernels.cpu import _native

# Which inputs, the check, and its share of them.
CHECKS: dict[str, tuple[st.SearchStrategy[dict[str, Any]], Callable[[dict[str, Any]], None], float]] = {
    "mask_tokens": (mask_cases(), check_mask_tokens, 0.4),
    "pack_rows": (pack_cases(), check_pack_rows, 0.3),
    "lists": (list_cases(), check_lists, 0.1),
    "row_keys": (token_cases(), check_row_keys, 0.1),
    "units_fit": (token_cases(), check_units_fit, 0.1),
}

# ---- As a program ----

_CHUNK = 2000  # inputs hypothesis remembers at a time; its memory grows with them


def fuzz(name: str, inputs: int, first_seed: int, record: str | None) -> None:
    """Give a check so many inputs; ``record`` names a file that holds the one that runs, for when the process dies."""
    cases, check, _ = CHECKS[name]
    done, began = 0, time.monotonic()
    file = None if record is None else os.open(record, os.O_WRONLY | os.O_CREAT)

    def run(case: dict[str, Any]) -> None:
        nonlocal done
        done += 1
        if file is not None:
            text = f"{name}: {case}\n".encode()
            os.ftruncate(file, os.pwrite(file, text, 0))
        check(case)

    for chunk in itertools.count():
        if done >= inputs:
            break
        options = settings(
            max_examples=min(_CHUNK, inputs - done),
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        seed(first_seed + chunk)(options(given(cases)(run)))()
    print(f"{name}: {done} inputs in {time.monotonic() - began:.0f} s, nothing found", flush=True)
    if file is not None:
        os.close(file)


def misuse(kind: str) -> None:
    """A wrong call that only a sanitizer sees: eight bytes beyond a buffer, or an address that is not aligned."""
    ids = np.zeros(1, np.int64)
    rows, shift = (2, 0) if kind == "overflow" else (1, 1)
    with buffers({"weights": ids}, {"keys": ids.copy()}) as at:
        _native.row_keys(0, 8, 0, 1, at["weights"], rows, 0, at["keys"] + shift)


def check_sanitizers() -> None:
    """Both must end the process that calls wrongly; a build without them would pass everything."""
    for kind, message in (
        ("overflow", "AddressSanitizer: use-after-poison"),
        ("misaligned", "runtime error: store to"),
    ):
        run = subprocess.run([sys.executable, __file__, "--misuse", kind], capture_output=True, text=True)
        if run.returncode == 0 or message not in run.stderr:
            sys.exit(f"the sanitizers are not at work: no {message!r} on {kind}\n{run.stderr[-2000:]}")
    print(f"the sanitizers are at work in {_native.__file__}", flush=True)


def fuzz_apart(name: str, arguments: argparse.Namespace) -> int:
    """One check in its own process, which the sanitizers may end."""
    inputs = round(arguments.inputs * CHECKS[name][2])
    command = [sys.executable, __file__, "--only", name, "--inputs", str(inputs), "--seed", str(arguments.seed)]
    command += [] if arguments.record is None else ["--record", f"{arguments.record}.{name}"]
    # AddressSanitizer watches objects that come from malloc one by one; hypothesis then takes twice the time.
    watched = {"PYTHONMALLOC": "malloc"} if arguments.sanitized and name == "pack_rows" else {}
    return subprocess.run(command, env=os.environ | watched).returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=200_000, help="of all checks together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=list(CHECKS), help="one check, in this process")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--sanitized", action="store_true", help="first make sure that the sanitizers are at work")
    parser.add_argument("--record", help="files of this name hold the inputs that run, for when a process dies")
    parser.add_argument("--misuse", choices=["overflow", "misaligned"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.misuse:
        misuse(arguments.misuse)
    elif arguments.only:
        fuzz(arguments.only, arguments.inputs, arguments.seed, arguments.record)
    else:
        if arguments.sanitized:
            check_sanitizers()
        with ThreadPoolExecutor(arguments.processes) as pool:
            codes = list(pool.map(lambda name: fuzz_apart(name, arguments), CHECKS))
        bad = [name for name, code in zip(CHECKS, codes, strict=True) if code]
        if bad:
            sys.exit(f"{', '.join(bad)}: failed, see above; the inputs that ran last are in {arguments.record}.*")


if __name__ == "__main__":
    main()
