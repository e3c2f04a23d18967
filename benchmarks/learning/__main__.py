"""Run the learning study, or render its report.

    python -m benchmarks.learning --out build/learning [--environment taxi] [--processes 2] [--small]
    python -m benchmarks.learning --out build/learning --environment taxi --arm gigpo --seed 3 --rate 1e-3
    python -m benchmarks.learning --out build/learning --report docs/learning.md

The study takes 14 processor hours; one that was stopped resumes. `--arm` repeats one run, stores its result in
OUT/pilots and prints it; `--change` changes sizes, as the pilots did. `--report` puts the tables between the markers of
a Markdown page, and every run into a JSON file beside it. `--restore docs/learning.md` reads that file, and the study
resumes from its runs. `--small` proves in minutes that everything works together. It needs the packages
gymnasium and minigrid.
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.learning import exit_plainly, hold_folder
from benchmarks.learning.arms import BY_NAME, START
from benchmarks.learning.results import Results, Task
from benchmarks.learning.settings import ENVIRONMENTS, SMALL, Regime, StudyPlan
from lake.errors import UsageError
from lake.settings import validate

_OF_A_RUN = ("seed", "rate", "split", "change")
"""Options that say which run --arm repeats."""


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.learning", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the study: results, start weights, runs")
    parser.add_argument(
        "--environment",
        choices=tuple(ENVIRONMENTS),
        action="append",
        help="environment, repeatable (the four of the study)",
    )
    parser.add_argument("--processes", type=int, default=1, help="number of runs at a time (1)")
    parser.add_argument("--small", action="store_true", help="a study of minutes, whose figures mean nothing")
    parser.add_argument("--report", type=Path, help="page that gets the tables, and nothing is run")
    parser.add_argument("--restore", type=Path, help="page whose JSON file holds runs that have ended")
    parser.add_argument("--arm", choices=(START, *BY_NAME), help="the only arm that is run, on one environment")
    parser.add_argument("--seed", type=int, help="seed of --arm (0)")
    parser.add_argument("--rate", type=float, help="learning rate of --arm")
    parser.add_argument("--split", choices=("dev", "test"), help="worlds that measure --arm (test)")
    parser.add_argument("--change", help="""fields of settings.Regime for --arm, as JSON: '{"groups": 8}'""")
    arguments = parser.parse_args()
    if arguments.arm is not None and len(arguments.environment or ()) != 1:
        parser.error("--arm needs one --environment")
    if arguments.arm is not None and arguments.report is not None:
        parser.error("--report runs nothing: leave --arm out, or --report")
    if arguments.arm is None and any(getattr(arguments, name) is not None for name in _OF_A_RUN):
        parser.error(f"{', '.join(f'--{name}' for name in _OF_A_RUN)} belong to one run: name its --arm")
    if arguments.arm not in (None, START) and arguments.rate is None:
        parser.error("--arm needs --rate, its learning rate, such as 3e-4")
    for page in (arguments.report, arguments.restore):
        if page is not None and not page.is_file():
            parser.error(f"{page} is not a file: name a Markdown page, such as docs/learning.md")
    if arguments.processes < 1:
        parser.error(f"--processes is 1 or more, and not {arguments.processes}")
    with exit_plainly(parser.prog):
        _run(arguments)


def _run(arguments: argparse.Namespace) -> None:
    """Report, run the study, or repeat a run. Raises UsageError: files are damaged, or --change is."""
    plan = SMALL if arguments.small else StudyPlan()
    environments = [ENVIRONMENTS[name] for name in arguments.environment or plan.environments]
    if arguments.restore is not None:
        from benchmarks.learning.report import restore_results

        print(restore_results(arguments.restore, arguments.out))
    if arguments.report is not None:
        from benchmarks.learning.report import write_report

        changed = write_report(arguments.out, plan, environments, arguments.report)
        print(f"{arguments.report}: {changed} of its runs have another outcome than before")
        return
    from benchmarks.learning.runs import remove_run, run_task
    from benchmarks.learning.study import run_study, silence_bars

    silence_bars()
    if arguments.arm is None:
        with hold_folder(arguments.out):
            run_study(arguments.out, plan, environments, processes=arguments.processes, say=_say)
        return
    changes = plan.changes | _read_change(arguments.change)
    validate(Regime, environments[0].changes | changes, "--change: ")
    run = {"environment": environments[0].name, "arm": arguments.arm, "changes": changes}
    choice = {"seed": arguments.seed or 0, "learning_rate": arguments.rate or 0.0, "split": arguments.split or "test"}
    task = validate(Task, run | choice)
    with hold_folder(arguments.out):
        result = run_task(arguments.out, task, _say)
        Results(arguments.out / "pilots").add(result)
        remove_run(arguments.out, task)
    print(result.model_dump_json(indent=1))


def _read_change(text: str | None) -> dict[str, Any]:
    try:
        change = {} if text is None else json.loads(text)
    except ValueError as error:
        raise UsageError(f"--change is not JSON: {error}") from error
    if not isinstance(change, dict):
        raise UsageError(f"--change is a JSON object, such as '{{\"groups\": 8}}', and not {text}")
    return change


def _say(line: str) -> None:
    print(time.strftime("%H:%M:%S"), line, flush=True)


if __name__ == "__main__":
    main()
