"""Make the lake of the debugging tasks, print the questions, or the answers that the lake itself gives.

    python -m benchmarks.debugging_cases --lake build/cases [--set 2] [--small]
    python -m benchmarks.debugging_cases --questions [--set 2]
    python -m benchmarks.debugging_cases --lake build/cases --answers [--set 2]

Give the questions and `trajlake view --lake build/cases` to somebody who has not seen the answers, and compare.
"""

import argparse
from pathlib import Path


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lake", type=Path)
    parser.add_argument("--small", action="store_true", help="a fifth of the episodes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", type=int, choices=(1, 2), default=1, help="number of the questions; default 1")
    parser.add_argument("--questions", action="store_true")
    parser.add_argument("--answers", action="store_true")
    arguments = parser.parse_args()
    if arguments.set == 1:
        from benchmarks.debugging_cases.cases import CASES
    else:
        from benchmarks.debugging_cases.second_cases import SECOND_CASES as CASES
    if arguments.questions:
        for number, case in enumerate(CASES, 1):
            print(f"{number:2}. {case.question}")
        return
    if arguments.lake is None:
        parser.error("--lake: the folder of the lake is missing")
    import lake
    from benchmarks.debugging_cases import history, plan, second_plan

    if not arguments.answers:
        build = history.build if arguments.set == 1 else second_plan.build_second
        build(arguments.lake, plan.SMALL if arguments.small else plan.Size(), arguments.seed, print)
        return
    snapshot = lake.open(arguments.lake).snapshot()
    for number, case in enumerate(CASES, 1):
        print(f"{number:2}. {case.question}")
        (answer,) = snapshot.sql(case.sql).iter_rows(named=True)
        for name, value in answer.items():
            print(f"      {name}: {value:.3g}" if isinstance(value, float) else f"      {name}: {value}")


if __name__ == "__main__":
    main()
