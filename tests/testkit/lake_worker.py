"""The program of `testkit.processes.Worker`: writes to a lake, and dies where it is told to.

Nothing shipped is replaced: `crash` wraps methods of this process's own `Store` and kills the process in them.
"""

import os
import signal
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec
import polars as pl

import lake
from lake.ingest import ingest
from lake.store import Store
from testkit.episodes import episode


def gate() -> None:
    """Wait until the test says go."""
    print("ready", flush=True)
    sys.stdin.readline()


def run_ingest(uri: str, path: str, run_id: str, batch_size: str) -> None:
    """Ingest a file and print the report as JSON."""
    gate()
    report = ingest(lake.open(uri, create=True), path, run_id=run_id, batch_size=int(batch_size))
    print(msgspec.json.encode(report).decode())


def crash(uri: str, path: str, run_id: str, batch_size: str, place: str, number: str, when: str) -> None:
    """Ingest, and die before or after the n-th call of a method of the store (`append:TABLE`, `append_episodes`)."""
    method, _, table = place.partition(":")
    original: Callable[..., Any] = getattr(Store, method)
    left = int(number)

    def deadly(self: Store, *args: Any, **kwargs: Any) -> Any:
        nonlocal left
        if table and args[0] != table:
            return original(self, *args, **kwargs)
        left -= 1
        if left == 0 and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(self, *args, **kwargs)
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(Store, method, deadly)
    run_ingest(uri, path, run_id, batch_size)


def record(uri: str, name: str, batches: str, size: str) -> None:
    """Record batches of episodes, each with a metric, in one job."""
    lk = lake.open(uri, create=True)
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


COMMANDS: dict[str, Callable[..., None]] = {
    "ingest": run_ingest,
    "crash": crash,
    "record": record,
    "create": create,
}

if __name__ == "__main__":
    COMMANDS[sys.argv[1]](*sys.argv[2:])
