"""SQL that nobody vouches for: each query in a process of its own that cannot write, reach out, or outstay its time.

Against a hostile query two walls stand, each enough alone for what it covers: DuckDB locked down (exactly one SELECT,
only the snapshot's files, no settings, extensions, or spilling), and around it the operating system
(`lake.locked.isolation`), which holds even if DuckDB has a hole. The deadline is the parent's SIGKILL.
"""

import json
import pickle
import re
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import polars as pl
import pyarrow as pa

from lake.errors import LakeAccessError, QueryError, UsageError
from lake.locked import isolation
from lake.locked.child import EXIT_REFUSED, Query
from lake.locked.pipes import ChildPipes
from lake.read import query_results
from lake.read.bound import Params
from lake.read.joined_snapshot import JoinedSnapshot
from lake.read.snapshot import Snapshot
from lake.tables import TABLES

MEMORY = "1GB"
SECONDS = 30.0
ROWS = 100_000
"""What a locked query may use unless told otherwise."""
_UNITS = {"": 1, "B": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_PROCESS_BYTES = 3 << 30
"""Address space that Python, Arrow, Polars and DuckDB take before a query starts; little of it is ever used."""
_STDERR_BYTES = 1 << 16


class LockedReader:
    """A snapshot that answers SELECTs of strangers.

    Args:
        snapshot: what to read; its lake must lie in a local folder.
        timeout: seconds of one query, the start of its process (about half a second) included.
        require: the weakest isolation to accept: `strong`, `basic` or `none`. On Linux with Landlock (5.13 and later,
            6.2 for all of it) it is strong; elsewhere say what you accept.

    Raises:
        UsageError: isolation here is weaker than required (the message says what is missing), or the lake is remote.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        *,
        memory_limit: str = MEMORY,
        timeout: float = SECONDS,
        max_rows: int = ROWS,
        max_bytes: int = 256 << 20,
        threads: int = 2,
        require: str = "strong",
    ) -> None:
        if snapshot.objects.folder is None:
            raise UsageError(
                f"{snapshot.objects.root}: a locked query has no network, so it cannot read a lake in a bucket; copy "
                "the lake into a local folder, or run the query unlocked if you trust it"
            )
        absent = isolation.missing()
        self._layers = tuple(layer for layer in isolation.LAYERS if layer not in absent)
        self.isolation = isolation.level(self._layers)
        """What holds a query: strong, basic or none."""
        order = ("none", "basic", "strong")
        if require not in order:
            raise UsageError(f"require={require!r} is no isolation level; valid: {', '.join(order)}")
        if order.index(self.isolation) < order.index(require):
            why = "; ".join(f"no {name}: {reason}" for name, reason in absent.items())
            msg = f"locked SQL needs {require} isolation, here it is {self.isolation} ({why}); lower it only on purpose"
            raise UsageError(msg)
        self._snapshot = snapshot
        self._memory = memory_limit
        self._memory_bytes = size_in_bytes(memory_limit)
        self._timeout = timeout
        self._max_rows = max_rows
        self._max_bytes = max_bytes
        self._threads = threads
        self._files = {name: snapshot.files(name) for name in TABLES}
        places = {file.place for files in self._files.values() for file in files}
        hidden = {place: snapshot.hidden(place) for place in places}
        self._hidden = {place: episodes.to_list() for place, episodes in hidden.items() if episodes is not None}

    def sql(self, query: str, params: Params = None) -> pl.DataFrame:
        """Rows of one SELECT, or an error as `Session.query` raises."""
        return query_results.frame(self.arrow(query, params))

    def arrow(self, query: str, params: Params = None) -> pa.Table:
        """As `sql`, the rows as an Arrow table."""
        job = Query(
            query,
            dict(params) if isinstance(params, Mapping) else params and list(params),
            self._files,
            self._hidden,
            isinstance(self._snapshot, JoinedSnapshot),
            self._snapshot.objects.root,
            self._memory,
            self._threads,
            self._max_rows,
        )
        stream = self._run(pickle.dumps(job))
        try:
            table = pa.ipc.open_stream(stream).read_all()
            table.validate(full=True)
        except pa.ArrowException as error:
            raise QueryError("the locked process sent no readable result") from error
        return table

    def close(self) -> None:
        """Nothing to close: a query's process ends with it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, job: bytes) -> bytes:
        package = Path(__file__).parents[1]
        files = [file.path for of_table in self._files.values() for file in of_table]
        policy = isolation.Policy(
            read=(*isolation.runtime_folders(), str(package), *files),
            memory_bytes=self._memory_bytes + _PROCESS_BYTES,
            cpu_seconds=int(self._timeout * self._threads) + 5,
            open_files=4096,
            layers=self._layers,
        )
        orders = isolation.orders("lake.locked.child", policy, {"lake": str(package.parent)})
        deadline = time.monotonic() + self._timeout
        environment = {"LANG": "C.UTF-8", "MALLOC_ARENA_MAX": "2", "POLARS_MAX_THREADS": "1", "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            isolation.command(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            cwd="/",
            start_new_session=True,
        )
        pipes = ChildPipes(process)
        try:
            out, err = _answer(pipes, orders + job, deadline, self._max_bytes)
            process.wait(max(0.1, deadline - time.monotonic()))
        except _TooMuchError:
            msg = f"the result is larger than {self._max_bytes:,} bytes, the most a locked query may return; add LIMIT"
            raise QueryError(msg) from None
        except (TimeoutError, subprocess.TimeoutExpired):
            raise QueryError(f"stopped after {self._timeout:g} s, the time a locked query has; narrow it") from None
        finally:
            process.kill()
            process.wait()
            pipes.close()
        if process.returncode:
            raise self._failure(process.returncode, err)
        return out

    def _failure(self, status: int, err: bytes) -> Exception:
        """The child's error. What it says is text for a person, whatever has become of it."""
        text = err.decode("utf-8", "replace").strip()
        last = text.rpartition("\n")[2]
        if status == EXIT_REFUSED and last.startswith("{"):
            report = json.loads(last)
            said = query_results.one_line(QueryError(report.get("message")))
            if report.get("error") == "LakeAccessError":
                return LakeAccessError(said)
            refusal = QueryError(said)
            match report.get("place"):
                case [int(line), int(character)]:
                    refusal.place = (line, character)
            return refusal
        if status == isolation.EXIT_NOT_LOCKED:
            return LakeAccessError(f"the query was not run: {query_results.one_line(QueryError(last))}")
        if status in (-signal.SIGXCPU, -signal.SIGKILL):
            return QueryError(
                f"stopped: the query used up its processor time or its {self._memory} of memory; narrow it"
            )
        why = f"signal {-status}" if status < 0 else f"exit status {status}"
        return QueryError(
            f"the query's process ended early ({why}), most likely for want of memory: it has {self._memory}; narrow it"
        )


class _TooMuchError(Exception):
    """The child wrote more than it may."""


def _answer(pipes: ChildPipes, job: bytes, deadline: float, most: int) -> tuple[bytes, bytes]:
    """Hand the job over and read what comes back, within time and size."""
    found = {"stdout": bytearray(), "stderr": bytearray()}
    limits = {"stdout": most, "stderr": _STDERR_BYTES}
    pipes.post(job, last=True)
    while pipes.is_open:
        said = pipes.turn(max(0.0, deadline - time.monotonic()))
        if time.monotonic() >= deadline:
            raise TimeoutError
        for stream, data in said:
            found[stream] += data
            if len(found[stream]) > limits[stream]:
                raise _TooMuchError
    return bytes(found["stdout"]), bytes(found["stderr"])


def size_in_bytes(text: str) -> int:
    """A size such as 512MB or 1.5GiB in bytes. Raises UsageError: no size."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", text, re.IGNORECASE)
    if found is None:
        raise UsageError(f"{text!r} is no size; write for example 512MB or 2GiB")
    unit = _UNITS[found[2].upper()]
    if found[3]:
        unit = 1024 ** "BKMGT".index(found[2].upper() or "B")
    return int(float(found[1]) * unit)
