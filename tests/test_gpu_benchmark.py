"""The benchmark for a GPU, as far as a CPU can run it: in Triton's interpreter, at tiny sizes, in a fresh process."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
SECTIONS = ["correctness", "masking", "latency", "head", "step"]


def run(folder: Path, *arguments: str, before: str = "") -> tuple[int, str, dict[str, Any], str]:
    """The exit code, what was printed, the JSON and the Markdown; `before` runs in the process, with gpu imported."""
    code = f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r}); import gpu; {before}\nsys.exit(gpu.main())"
    options = ["--dry-run", "--output", str(folder), "--peers", str(folder / "none"), *arguments]
    done = subprocess.run([sys.executable, "-c", code, *options], capture_output=True, text=True, timeout=300)
    text = done.stdout + done.stderr
    assert (folder / "gpu.json").exists(), text
    return done.returncode, text, json.loads((folder / "gpu.json").read_text()), (folder / "gpu.md").read_text()


@pytest.mark.slow
def test_a_dry_run_goes_through_everything(tmp_path: Path) -> None:
    code, text, record, page = run(tmp_path)
    assert code == 0, text
    assert list(record["sections"]) == SECTIONS
    assert record["dry_run"]
    for name, section in record["sections"].items():
        assert section["error"] is None, (name, section["error"])
        for row in section["rows"]:
            for contender, entry in row["entries"].items():
                missing = "not installed" in entry.get("skipped", "") or "torch" in entry.get("skipped", "")
                assert "ms" in entry or missing, (name, contender, entry)
    checks = record["sections"]["correctness"]["checks"]
    assert len(checks) > 40
    assert all(check["ok"] is True for check in checks), checks
    kinds = {check["name"].partition(":")[0] for check in checks}
    assert kinds == {"masks", "loss", "model"}
    goals = [goal["goal"] for section in record["sections"].values() for goal in section["goals"]]
    assert all(any(part in goal for goal in goals) for part in ("85 %", "10 ×", "ahead of every peer", "peak memory"))
    assert all(goal in page for goal in goals)
    assert "**A dry run on a CPU" in page
    titles = [f"| {title} |" for title in ("check", "contender", "goal")]
    assert all(title in page for title in titles)
    assert page.count("| contender |") == sum(len(section["rows"]) for section in record["sections"].values())
    for column in ("GB/s", "peak MB", "tokens/s", "time ÷ fastmlm"):
        assert column in page


FAILING = """
def use(section):
    section.check("a check that fails", lambda: 1 // 0)
    section.check("one after it", lambda: "fine")
def stop(section):
    raise RuntimeError("the section stops")
def last(section):
    section.notes.append("the last one ran")
before = gpu.describe_run
def patched(arguments):
    found = before(arguments)
    from gpu_sections import checks, masking, step
    checks.correctness, masking.latency, step.step = use, stop, last
    return found
gpu.describe_run = patched
"""


def test_what_fails_is_told_and_stops_nothing(tmp_path: Path) -> None:
    code, text, record, page = run(tmp_path, "--sections", "correctness,latency,step", before=f"exec({FAILING!r})")
    assert code == 1, text
    failed, fine = record["sections"]["correctness"]["checks"]
    assert failed["ok"] is False
    assert "ZeroDivisionError" in failed["detail"]
    assert fine["ok"] is True
    assert record["sections"]["latency"]["error"] == "RuntimeError: the section stops"
    assert record["sections"]["step"]["notes"] == ["the last one ran"]
    assert "not: a check that fails" in page
    assert "**The section failed: RuntimeError: the section stops**" in page


def test_the_watchdog_ends_what_hangs(tmp_path: Path) -> None:
    slowly = "import time\ndef hang(section):\n section.notes.append('so far')\n time.sleep(100)"
    patch = FAILING.replace("def last", f"{slowly}\ndef last").replace("= use, stop, last", "= hang, stop, last")
    code, text, record, page = run(tmp_path, "--seconds=-18", before=f"exec({patch!r})")
    assert code == 1, text
    assert "watchdog" in record["stopped"]
    assert list(record["sections"]) == ["correctness"]
    assert "- so far" in page
    assert "was not finished" in page
    assert "**Stopped by the watchdog" in page


def test_no_figures_without_a_gpu(tmp_path: Path) -> None:
    """Where there is no GPU, nothing runs and nothing is written."""
    if torch.cuda.is_available():
        pytest.skip("there is one")
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--output", str(tmp_path / "out")]
    outside = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=outside)
    assert done.returncode == 1
    assert "no GPU" in done.stderr
    assert not (tmp_path / "out").exists()
