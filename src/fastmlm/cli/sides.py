"""``--compare``: fastmlm and Hugging Face by turns, each run in a process of its own, on equal terms.

Both load the same rows, the same first weights and the same arguments, use as many threads, and read the rows in the
same order, which is checked. Repeats differ in their masks alone. Runs alternate, so that a machine that slows down
slows both.
"""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastmlm.cli.output import RUNS
from fastmlm.cli.side import JOB_FILE, RESULT_FILE
from fastmlm.cli.train import FASTMLM, HUGGINGFACE, Job


def run_sides(main: Job) -> list[dict[str, Any]]:
    """The results of ``compare_repeats`` runs of each side; the first is ``main``, whose model is kept."""
    results = []
    for repeat in range(main.settings.compare_repeats):
        for side in (FASTMLM, HUGGINGFACE):
            exchange = Path(main.run_dir, RUNS, f"{side.replace(' ', '').lower()}-{repeat + 1}")
            keep = side == FASTMLM and repeat == 0
            job = replace(main, side=side, repeat=repeat, keep=keep, run_dir=main.run_dir if keep else str(exchange))
            results.append(_run_alone(job, exchange))
    if len({result["data_order"] for result in results}) != 1:
        raise RuntimeError("the runs of a comparison read their rows in different orders; their figures do not compare")
    return results


def _run_alone(job: Job, exchange: Path) -> dict[str, Any]:
    exchange.mkdir(parents=True)
    (exchange / JOB_FILE).write_text(job.to_json(), "utf-8")
    code = subprocess.run([sys.executable, "-m", "fastmlm.cli.side", str(exchange)], check=False).returncode
    if code == 130:
        raise KeyboardInterrupt
    if code != 0:
        raise RuntimeError(f"the run {job.name} ended with exit code {code}; what it said stands above")
    return json.loads((exchange / RESULT_FILE).read_text("utf-8"))
