"""A credit job in its own process, one range per group, on any executor; some of its processes get killed.

`testkit.processes.Forked("testkit.credit_worker", URI, EXECUTOR, FATE, FOLDER)` prints the report as JSON. What happens
to the process that computes the second range: nothing (`none`); killed before it writes (`before`) or after its commit
(`after`), the first time or (`always`) each time; or `wait`: every range leaves a mark in FOLDER, and from the second
on waits for a file `go` there, so that the driver can be killed in the meantime.
"""

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl

import lake
from lake.execution import make_executor
from lake.write.jobs import JobPart, WrittenRows
from pipelines.credit import GiGPO
from pipelines.credit.estimators.protocol import CreditRows
from pipelines.credit.job import run_credit
from pipelines.credit.steps import StepBatch

TINY = 1e-6
"""A budget of memory that holds one group."""


class DoomedGiGPO(GiGPO):
    """GiGPO whose second range meets its fate; its results are GiGPO's."""

    fate: str = "none"
    folder: str = ""

    def credit(self, batch: StepBatch) -> CreditRows:
        if self.fate != "none" and self._number() == 2:
            self._meet()
        return super().credit(batch)

    def _number(self) -> int:
        """Which range this is, by the marks that ranges leave; one that is run again has its number again."""
        for number in range(1, 100):
            try:
                os.close(os.open(Path(self.folder) / f"range-{number}", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            return number
        raise AssertionError("more ranges than a test has")

    def _meet(self) -> None:
        if self.fate == "wait":
            while not (Path(self.folder) / "go").exists():
                time.sleep(0.02)
            return
        if self.fate == "always":
            (Path(self.folder) / "range-2").unlink()
        if self.fate != "after":
            os.kill(os.getpid(), signal.SIGKILL)
        JobPart.write = _commits_and_dies  # type: ignore[method-assign, assignment]


_WRITE = JobPart.write


def _commits_and_dies(part: JobPart, name: str, frame: pl.DataFrame) -> WrittenRows | None:
    _WRITE(part, name, frame)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def main(args: Sequence[str]) -> None:
    """Run the job: where, on which executor, with which fate, and the folder of its marks."""
    uri, executor, fate, folder = args
    os.environ.update(HOME=folder, RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0")
    doomed = DoomedGiGPO(fate=fate, folder=folder)
    options: dict[str, Any] = {"executor": make_executor(executor, 2), "memory_gb": TINY}
    report = run_credit(lake.open(uri), doomed, **options)
    print(report.model_dump_json(include={"job_id", "skipped", "groups_computed"}))
