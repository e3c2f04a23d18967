"""What a `testkit.processes.Worker` does: writes to a lake, and is held, stopped or killed where its orders say.

Nothing shipped is replaced: a `Fault` wraps methods of this process's own `Store` and strikes next to them.
"""

import os
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec
import polars as pl

import lake
from lake import Lake
from lake.care.maintenance import FEW_FILES
from lake.errors import ConflictError
from lake.execution.local import LocalExecutor
from lake.storage.store import Store
from lake.tables import TABLES
from lake.write.ingest import ingest
from pipelines.credit import GiGPO
from pipelines.credit.job import run_credit
from testkit.clocks import clock_of
from testkit.episodes import episode

_OPTIONS: dict[str, Any] = {"compact_above": FEW_FILES}
"""Of `lake.open` in this process."""
_METHODS = {"commit": ("_commit", 1), "write": ("_write", 0), "create": ("_create_table", 0)}
"""Places of faults: a method of the store, and which of its arguments names the table."""


@dataclass
class Fault:
    """Something that happens to a worker next to one of its steps.

    Args:
        place: `commit:TABLE` (data files are written, no log names them yet), `write:TABLE` (a data file), or
            `create:TABLE` (version 0 of the table); without a table it is every call of that kind.
        number: of the call, from 1; 0 strikes at each.
        side: before or after the call.
        action: kill (SIGKILL to itself), hold (wait at the gate, saying where), or repeat (again, as a network
            does that lost the answer).
    """

    place: str
    number: int
    side: str
    action: str
    calls: int = 0

    @classmethod
    def parse(cls, text: str) -> "Fault":
        """From `PLACE NUMBER SIDE ACTION`."""
        point, number, side, action = text.split()
        return cls(point, int(number), side, action)

    def arm(self) -> None:
        """Wrap the method concerned."""
        kind, _, table = self.place.partition(":")
        name, position = _METHODS[kind]
        original = getattr(Store, name)

        def struck(store: Store, *args: Any, **kwargs: Any) -> Any:
            where = f"{kind}:{args[position]}"
            if table and where != self.place:
                return original(store, *args, **kwargs)
            self.calls += 1
            due = self.number in (0, self.calls)
            if due and self.side == "before":
                self._strike(where)
            result = original(store, *args, **kwargs)
            if due and self.action == "repeat":
                original(store, *args, **kwargs)
            elif due and self.side == "after":
                self._strike(where)
            return result

        setattr(Store, name, struck)

    def _strike(self, where: str) -> None:
        if self.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        gate(f"{self.side} {where}")


def gate(says: str = "ready") -> None:
    """Wait until the test says go; without a test there is nothing to do."""
    print(says, flush=True)
    if not sys.stdin.readline():
        sys.exit("the test has gone")


def opened(uri: str) -> Lake:
    """The lake, made if needed, with the test's clock if there is one."""
    return lake.open(uri, create=True, clock=clock_of(uri), **_OPTIONS)


def run_ingest(uri: str, path: str, run_id: str, batch_size: str) -> None:
    """Ingest a file and print the report as JSON."""
    gate()
    report = ingest(opened(uri), path, run_id=run_id, batch_size=int(batch_size))
    print(msgspec.json.encode(report).decode())


def record(uri: str, name: str, batches: str, size: str) -> None:
    """Record batches of episodes, each with a metric, in one job."""
    lk = opened(uri)
    gate()
    with lk.job(kind="collect", run_id="run", parameters={"name": name}) as job:
        for number in range(int(batches)):
            first = number * int(size)
            counts = job.record([episode(name, first + index, tokens=True) for index in range(int(size))])
            row = {"step": number, "name": "new", "value": float(counts.new), "at": datetime.now(UTC)}
            job.write("metrics", pl.DataFrame([row]))


def create(*uris: str) -> None:
    """Create one lake after the other, each when the test opens the gate."""
    for uri in uris:
        gate()
        lk = lake.open(uri, create=True)
        with lk.job(kind="collect", run_id="run") as job:
            job.record([episode(str(os.getpid()))])


def credit(uri: str) -> None:
    """Run the credit job and print its report as JSON."""
    lk = opened(uri)
    gate()
    print(run_credit(lk, GiGPO()).model_dump_json(include={"job_id", "skipped"}))


def credit_ranges(uri: str) -> None:
    """As `credit`, one group after the other."""
    lk = opened(uri)
    gate()
    report = run_credit(lk, GiGPO(), executor=LocalExecutor(1), memory_gb=1e-6)
    print(report.model_dump_json(include={"job_id", "skipped"}))


def maintain(uri: str, operation: str, *episode_ids: str) -> None:
    """Run one operation of maintenance; retract and forget take episode ids."""
    lk = opened(uri)
    gate()
    if operation == "compact":
        compact(lk)
    elif operation == "vacuum":
        lk.vacuum()
    else:
        getattr(lk, operation)([int(text) for text in episode_ids], reason="a test")


def compact(lk: Lake) -> None:
    """Compact every table; where another process was quicker, that is that."""
    for name in TABLES:
        with suppress(ConflictError):
            lk.compact(name)


COMMANDS: dict[str, Callable[..., None]] = {
    "ingest": run_ingest,
    "record": record,
    "create": create,
    "credit": credit,
    "credit_ranges": credit_ranges,
    "maintain": maintain,
}


def main(args: Sequence[str]) -> None:
    """Run a command: the faults, separated by semicolons, then its name and its arguments.

    A fault is a `Fault`, or `fsize BYTES` (no file may become larger), or `auto FILES` (tables with that many small
    files are compacted by the process that ends a job), or `env JSON` (variables of its environment).
    """
    for text in filter(None, args[0].split(";")):
        if text.startswith("fsize "):
            resource.setrlimit(resource.RLIMIT_FSIZE, (int(text.split()[1]),) * 2)
        elif text.startswith("env "):
            os.environ.update(msgspec.json.decode(text.removeprefix("env ")))
        elif text.startswith("auto "):
            _OPTIONS["compact_above"] = int(text.split()[1])
        else:
            Fault.parse(text).arm()
            # What strikes at commits of this process needs a process that makes them itself.
            _OPTIONS["group_commit"] = False
    COMMANDS[args[1]](*args[2:])
