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
CASES = ["plain", "int32", "short", "all", "packed", "packed, all"]


@pytest.fixture(scope="module")
def counts() -> Any:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(ROOFLINE), "--json"]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout)


@pytest.mark.parametrize("case", CASES)
def test_codegen_keeps_everything_in_registers(counts: Any, case: str) -> None:
    for target in NVIDIA:
        assert counts[case][target]["stack"] == 0, target
        assert counts[case][target]["local"] == 0, target
    assert counts[case]["gfx942"]["spills"] == 0  # scalar and vector registers
    assert counts[case]["gfx942"]["scratch"] == 0


@pytest.mark.parametrize(("case", "most"), [("plain", 110), ("int32", 93)])  # as it is; the aim is 100 and 90
@pytest.mark.parametrize("target", NVIDIA)
def test_codegen_instructions(counts: Any, target: str, case: str, most: int) -> None:
    assert 40 < counts[case][target]["instructions_per_token"] <= most


@pytest.mark.parametrize("target", NVIDIA)
def test_codegen_wide_accesses(counts: Any, target: str) -> None:
    """16 bytes at a time: two ids of 8 bytes. Threads have two neighbours each, so 4-byte ids go 8 bytes at a time."""
    assert counts["plain"][target]["wide_loads"] > 0
    assert counts["plain"][target]["wide_stores"] > 0


@pytest.mark.parametrize("target", [*NVIDIA, "gfx942"])
def test_codegen_draws_once(counts: Any, target: str) -> None:
    """Two streams of ten rounds of two multiplies serve four tokens: ten each, beside one for a random id."""
    found = counts["plain"][target]
    # A little less where a compiler makes the first rounds, alike for all lanes, once a program.
    assert 8 <= found["multiplies"] / found["tokens"] < 15
