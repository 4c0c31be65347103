"""README says what is so: its tables are those of the results folder, its code runs."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")


@pytest.mark.parametrize(
    "name",
    [
        "readme.md",
        "demo.md",
        "support.md",
        "accumulation.md",
        "loss.md",
        "loss_errors.md",
        "roofline.md",
        "strategies.md",
        "reproducibility.md",
        "compare.md",
    ],
)
def test_tables_are_the_results(name: str) -> None:
    assert (ROOT / "benchmarks" / "results" / name).read_text("utf-8").strip() in README


def test_python_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {"__name__": "readme"})


def test_commands_are_in_the_makefile() -> None:
    targets = re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text("utf-8"), flags=re.M)
    named = re.findall(r"make (\w[\w-]*)", README + (ROOT / "CONTRIBUTING.md").read_text("utf-8"))
    assert named
    assert set(named) <= set(targets)
