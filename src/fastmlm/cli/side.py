"""``python -m fastmlm.cli.side DIR``: one run of a comparison, in a process of its own for the sake of its memory."""

import json
import sys
from pathlib import Path

JOB_FILE, RESULT_FILE = "job.json", "result.json"


def main(directory: Path) -> int:
    """Do the job described in the directory and leave the result beside it."""
    try:
        from fastmlm.cli.quiet import quiet  # seconds of imports, in which Ctrl-C may come too
        from fastmlm.cli.train import Job, run_job

        quiet()
        result = run_job(Job.from_json((directory / JOB_FILE).read_text("utf-8")))
    except KeyboardInterrupt:  # the terminal interrupts both processes, and the one that started this speaks
        return 130
    (directory / RESULT_FILE).write_text(json.dumps(result), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
