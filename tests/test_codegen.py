"""codegen: the code a GPU runs, compiled ahead of time where there is none, held to limits."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOFLINE = Path(__file__).parents[1] / "benchmarks" / "roofline.py"
NVIDIA = ["sm_80", "sm_90", "sm_100"]
TARGETS = [*NVIDIA, "gfx942"]


@pytest.fixture(scope="module")
def counts() -> Any:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(ROOFLINE), "--json"]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout)


def test_codegen_keeps_everything_in_registers(counts: Any) -> None:
    assert len(counts) >= 11
    for case, by_target in counts.items():
        for target, found in by_target.items():
            spilled = ("spills", "scratch") if target == "gfx942" else ("stack", "local")
            assert [found[name] for name in spilled] == [0, 0], (case, target)


# While an H200's memory moves a token's 24 bytes (12 of int32), its processors run 186 (93) instructions.
@pytest.mark.parametrize(("case", "most"), [("plain", 65), ("int32", 55), ("attention mask", 78), ("packed", 85)])
@pytest.mark.parametrize("target", TARGETS)
def test_codegen_instructions(counts: Any, target: str, case: str, most: int) -> None:
    assert 30 < counts[case][target]["instructions_per_token"] <= most


@pytest.mark.parametrize(("case", "itemsize"), [("plain", 8), ("int32", 4)])
@pytest.mark.parametrize("target", TARGETS)
def test_codegen_wide_accesses(counts: Any, target: str, case: str, itemsize: int) -> None:
    """A thread reads its ids 16 bytes at a time, and writes ids and labels so, whichever type they have."""
    found = counts[case][target]
    accesses = found["tokens"] * itemsize / 16
    assert accesses >= 4
    assert found["wide_loads"] == accesses
    assert found["wide_stores"] == 2 * accesses


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", ["plain", "int32", "odd", "odd int32", "attention mask", "packed"])
def test_codegen_draws_once(counts: Any, target: str, case: str) -> None:
    """Two streams of ten rounds of two multiplies serve four tokens: ten each, beside one for a random id.

    Threads that hold lanes in two ways would make the draws twice. A few multiplies less where the first rounds are
    alike for all lanes and are made once a program, a few more for addresses.
    """
    found = counts[case][target]
    assert 9 <= found["multiplies"] / found["tokens"] < 12
