"""Run the learning study, or render its report.

    python -m benchmarks.learning --out build/learning [--environment taxi] [--processes 2] [--small]
    python -m benchmarks.learning --out build/learning --environment taxi --arm gigpo --seed 3 --rate 1e-3
    python -m benchmarks.learning --out build/learning --report docs/learning.md

A study that was stopped resumes. `--arm` repeats one run and prints its result; `--change` sets a field of the regime,
as the pilots did. `--report` puts the tables between the markers of a Markdown page, and every run into a JSON file
beside it. `--restore docs/learning.md` takes the runs of that file, so that the study resumes
on another machine. `--small` proves in minutes that everything works together. It needs the packages gymnasium and
minigrid.
"""

import argparse
import json
import os
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.learning.arms import BY_NAME, START
from benchmarks.learning.results import Results, Task
from benchmarks.learning.settings import ENVIRONMENTS, SMALL, StudyPlan


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--environment", choices=tuple(ENVIRONMENTS), action="append")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--report", type=Path)
    parser.add_argument("--restore", type=Path, help="page whose JSON file holds runs that have ended")
    parser.add_argument("--arm", choices=(START, *BY_NAME), help="run this arm alone, on one environment")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=0.0, help="learning rate of --arm")
    parser.add_argument("--split", choices=("dev", "test"), default="test")
    parser.add_argument("--change", default="{}", help="fields of the regime, a JSON object")
    arguments = parser.parse_args()
    if arguments.arm is not None and len(arguments.environment or ()) != 1:
        parser.error("--arm needs one --environment")
    plan = SMALL if arguments.small else StudyPlan()
    environments = [ENVIRONMENTS[name] for name in arguments.environment or plan.environments]
    if arguments.restore is not None:
        from benchmarks.learning.report import restore_results

        print(f"{restore_results(arguments.restore, arguments.out)} runs restored from {arguments.restore}")
    if arguments.report is not None:
        from benchmarks.learning.report import write_report

        write_report(arguments.out, plan, environments, arguments.report)
        return
    from benchmarks.learning.runs import remove_run, run_task
    from benchmarks.learning.study import run_study, silence_bars

    silence_bars()
    if arguments.arm is None:
        run_study(arguments.out, plan, environments, processes=arguments.processes, say=_say)
        return
    task = Task(
        environment=environments[0].name,
        arm=arguments.arm,
        seed=arguments.seed,
        learning_rate=arguments.rate,
        split=arguments.split,
        changes=plan.changes | json.loads(arguments.change),
    )
    result = run_task(arguments.out, task, _say)
    Results(arguments.out / "pilots").add(result)
    remove_run(arguments.out, task)
    print(result.model_dump_json(indent=1))


def _say(line: str) -> None:
    print(time.strftime("%H:%M:%S"), line, flush=True)


if __name__ == "__main__":
    main()
