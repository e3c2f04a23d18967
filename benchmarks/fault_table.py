"""The table of injected faults in docs/reference/faults.md, from the log that the fault tests write.

    TRAJLAKE_FAULT_LOG=/tmp/faults.jsonl pytest tests/integration -m "slow or not slow" -k lake
    python benchmarks/fault_table.py /tmp/faults.jsonl

Each line of the log is one fault: its kind, the test that injected it, whether that test passed, and what was found
lost, duplicated or half visible (episodes or rows) when the lake was looked through after it.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path

HEADER = ("kind", "injected", "lost", "duplicated", "half visible")
COSTS = ("lost", "duplicated", "half_visible")


def fault_table(lines: list[dict[str, object]]) -> str:
    """A Markdown table: a row per kind of fault, and their sum."""
    sums: dict[str, list[int]] = defaultdict(lambda: [0] * (1 + len(COSTS)))
    for line in lines:
        for row in (sums[str(line["kind"])], sums["**all**"]):
            row[0] += 1
            for place, cost in enumerate(COSTS, 1):
                row[place] += int(str(line[cost]))
    order = sorted(sums, key=lambda kind: (kind == "**all**", kind))
    rows = [HEADER, ("---", *["---:"] * len(HEADER[1:])), *((kind, *(f"{n:,}" for n in sums[kind])) for kind in order)]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main(path: str) -> None:
    """Print the table of a log."""
    lines = [json.loads(line) for line in Path(path).read_text("utf-8").splitlines()]
    failed = sorted({str(line["test"]) for line in lines if not line["passed"]})
    print(fault_table(lines))
    print(f"\n{len(lines):,} faults in {len({line['test'] for line in lines}):,} tests; {len(failed)} failed.")
    for test in failed:
        print(f"* failed: {test}")


if __name__ == "__main__":
    main(sys.argv[1])
