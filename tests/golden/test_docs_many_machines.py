"""docs/guides/many-machines.md says what the code does."""

import re
from pathlib import Path

from lake.execution import EXECUTORS
from lake.execution.executor import TRIES

PAGE = (Path(__file__).resolve().parents[2] / "docs/guides/many-machines.md").read_text("utf-8")


def test_every_executor_has_a_row_and_the_tries_are_right() -> None:
    table = PAGE.split("| `--executor` |")[1].split("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(EXECUTORS)
    assert TRIES == 3
    assert "is run again, three times in all" in " ".join(PAGE.split())
