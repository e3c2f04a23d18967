"""The page docs/reference/faults.md, from the log that the fault tests write.

    TRAJLAKE_FAULT_LOG=/tmp/faults.jsonl pytest -m "slow or not slow" tests/integration/test_lake_*.py
    python benchmarks/fault_table.py /tmp/faults.jsonl > docs/reference/faults.md

Each line of the log is one fault: its kind, the test that injected it, whether that test passed, and what was found
lost, duplicated or half visible (episodes or rows) when the lake was looked through after it.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

COSTS = ("lost", "duplicated", "half_visible")
PAGE = """# Injected faults

What the fault tests did to lakes, with real processes, and what it cost. After each fault a snapshot is read row by
row and compared with an oracle of plain dictionaries: an episode that must be there and is not (or not as it was) is
*lost*, a row too many is *duplicated*, an episode without all of its steps and tokens, or with content that no writer
offered, is *half visible*.

The run of {tests:,} tests behind this page injected {faults:,} faults; {failed} tests failed. A kill counts if the
process was still at work.

{table}

Made by `benchmarks/fault_table.py` from the log of a run with `TRAJLAKE_FAULT_LOG` set; the slow suite injects them
again. What follows from it for you is in [what the lake promises](../guides/promises.md).
"""


def fault_table(lines: Iterable[dict[str, Any]]) -> str:
    """A Markdown table: a row per kind of fault, and their sum."""
    sums: dict[str, list[int]] = defaultdict(lambda: [0] * (1 + len(COSTS)))
    where: dict[str, set[str]] = defaultdict(set)
    for line in lines:
        where[line["kind"]].add(Path(line["test"].partition("::")[0]).stem.removeprefix("test_lake_"))
        for row in (sums[line["kind"]], sums["**all**"]):
            row[0] += 1
            for place, cost in enumerate(COSTS, 1):
                row[place] += line[cost]
    order = sorted(sums, key=lambda kind: (kind == "**all**", sorted(where[kind]), kind))
    rows: list[Sequence[str]] = [("fault", "tests", "injected", "lost", "duplicated", "half visible")]
    rows.append(("---", "---", *["---:"] * (1 + len(COSTS))))
    rows += [(kind, ", ".join(sorted(where[kind])), *(f"{n:,}" for n in sums[kind])) for kind in order]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main(path: str) -> None:
    """Print the page; the names of failed tests go to stderr."""
    lines = [json.loads(line) for line in Path(path).read_text("utf-8").splitlines()]
    failed = sorted({line["test"] for line in lines if not line["passed"]})
    tests = len({line["test"] for line in lines})
    print(PAGE.format(table=fault_table(lines), faults=len(lines), tests=tests, failed=len(failed) or "no"), end="")
    for test in failed:
        print(f"failed: {test}", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1])
