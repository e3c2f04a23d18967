"""Run the offline ladder, or render its report.

    python -m benchmarks.ladder --out build/ladder [--processes 1] [--small]
    python -m benchmarks.ladder --out build/ladder --report docs/ladder.md

A run that was stopped goes on where it was. `--report` puts the tables between the markers of a Markdown page and the
results of every seed into a JSON file beside it. `--small` proves in seconds that everything works together.
"""

import argparse
import os
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.ladder.settings import SMALL, LadderSettings


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--report", type=Path)
    arguments = parser.parse_args()
    settings = SMALL if arguments.small else LadderSettings()
    if arguments.report is not None:
        from benchmarks.ladder.report import write_report

        write_report(arguments.out, settings, arguments.report)
        return
    from transformers.utils import logging

    from benchmarks.ladder.ladder import run_ladder

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    run_ladder(arguments.out, settings, processes=arguments.processes, say=_say)


def _say(line: str) -> None:
    print(time.strftime("%H:%M:%S"), line, flush=True)


if __name__ == "__main__":
    main()
