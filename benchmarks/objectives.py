"""``fastmlm compare`` with its defaults, for the README, and one run of each other objective, for its loss curve.

Run as ``python benchmarks/objectives.py``: a quarter of an hour on two cores.
"""

import shutil
import subprocess
import sys
import time

from report import HERE, RESULTS, quote

from fastmlm.cli.compare.catalogue import DEFAULT, OBJECTIVES

BUILD = HERE.parent / "build"


def compare(name: str, *flags: str) -> float:
    """Run the command, keep its results under a name; returns the minutes it took."""
    out, start = BUILD / name, time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "fastmlm.cli", "compare", *flags, "--output-dir", str(out), "--overwrite"], check=True
    )
    minutes = (time.perf_counter() - start) / 60
    for kind in ("png", "json"):
        shutil.copy(out / f"compare.{kind}", RESULTS / f"{name}.{kind}")
    return minutes


def table(name: str) -> str:
    return (BUILD / name / "compare.md").read_text()


def main() -> None:
    RESULTS.mkdir(exist_ok=True)
    minutes = compare("compare")
    quote("compare", f"{table('compare')}It took {minutes:.1f} minutes.\n")
    others = [name for name in OBJECTIVES if name not in {each.partition("-")[0] for each in DEFAULT}]
    compare("objectives", "mlm", *others, "--seeds", "1")
    (RESULTS / "objectives.md").write_text(table("objectives"))


if __name__ == "__main__":
    main()
