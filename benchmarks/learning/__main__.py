"""Run the learning study, or render its report.

    python -m benchmarks.learning --out build/learning [--game coin] [--processes 2] [--small]
    python -m benchmarks.learning --out build/learning --report docs/learning.md

A study that was stopped goes on where it was. `--report` puts the tables between the markers of a Markdown page, and
every run into a JSON file beside it; what is missing is said. `--small` proves in a minute that everything works
together. It needs the extra trajlake[textworld], and Java.
"""

import argparse
import os
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.learning.settings import GAMES, SMALL, Settings


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--game", choices=tuple(GAMES), action="append")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--report", type=Path)
    arguments = parser.parse_args()
    settings = SMALL if arguments.small else Settings()
    games = [GAMES[name] for name in arguments.game or GAMES]
    if arguments.report is not None:
        from benchmarks.learning.report import write_report

        write_report(arguments.out, settings, games, arguments.report)
        return
    from transformers.utils import logging

    from benchmarks.learning.study import run_study

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    run_study(arguments.out, settings, games, processes=arguments.processes, say=_say)


def _say(line: str) -> None:
    print(time.strftime("%H:%M:%S"), line, flush=True)


if __name__ == "__main__":
    main()
