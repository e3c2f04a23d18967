"""The book of injected faults: what was done to a lake, and what it cost.

`Faults` collects what a test injects and what its checks find. With `TRAJLAKE_FAULT_LOG` naming a file, every injected
fault becomes one JSON line there, from which `benchmarks/fault_table.py` makes the table in the documentation.
"""

import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

LOG = "TRAJLAKE_FAULT_LOG"


@dataclass
class Harm:
    """What a lake shows that it should not, counted in episodes (or rows of a job)."""

    lost: int = 0
    duplicated: int = 0
    half_visible: int = 0

    def __add__(self, added: "Harm") -> "Harm":
        return Harm(*(getattr(self, f.name) + getattr(added, f.name) for f in fields(self)))


class Faults:
    """The faults of one test. A context: they are written down when it is left, no matter how the test ended."""

    def __init__(self) -> None:
        self.injected: list[str] = []
        self.harm = Harm()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not (path := os.environ.get(LOG)):
            return
        test = os.environ.get("PYTEST_CURRENT_TEST", "").partition(" ")[0]
        lines = [{"kind": name, "test": test, "passed": error is None, **asdict(Harm())} for name in self.injected]
        if lines:
            # Harm is the test's, not one fault's: it stands once, so that sums are right.
            lines[-1] |= asdict(self.harm)
        with Path(path).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)

    def inject(self, kind: str, times: int = 1) -> None:
        """Note a fault that has been injected."""
        self.injected += [kind] * times

    def found(self, harm: Harm) -> None:
        """Note what a check found, and fail if it is anything."""
        self.harm += harm
        assert harm == Harm(), f"after {self.injected}: {harm}"


def seeded(runs: int = 20) -> pytest.MarkDecorator:
    """Parametrise a test by `seed`: 0 always, and that many more, from 1 on, in the slow suite."""
    return pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, runs + 1))])
