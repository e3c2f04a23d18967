"""Run untrusted SQL: each query in a separate process that cannot write, reach the network, or exceed its time.

Two independent barriers stop a hostile query. DuckDB is locked down: exactly one SELECT, only the snapshot's files, and
no settings, extensions or spilling. Around it the operating system isolates the process (`lake.locked.isolation`), even
if DuckDB has a hole. The parent enforces the deadline by SIGKILL.

The child also runs this module (`main`), after it has isolated itself. It reads the query from stdin and writes the
rows to stdout as an Arrow stream.
"""

import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import polars as pl
import pyarrow as pa

from lake.errors import LakeAccessError, QueryError, TrajlakeError, UsageError
from lake.locked import isolation
from lake.locked.isolation import ChildPipes
from lake.read.joined_snapshot import JoinedSnapshot
from lake.read.parquet import DataFile
from lake.read.query import QueryLimits, QuerySession, first_paragraph, to_polars
from lake.read.snapshot import Snapshot
from lake.read.view_binding import Params
from lake.storage.objects import Objects
from lake.tables import TABLES

EXIT_REFUSED = 3
"""Exit status of a child whose last line on stderr is an error as JSON."""


@dataclass(frozen=True)
class LockedQuery:
    """The input of the child."""

    sql: str
    params: Params
    files: dict[str, list[DataFile]]
    hidden: dict[int, list[int]]
    """Hidden episodes by the `hidden_set` of the files."""
    by_clock: bool
    root: str
    memory: str
    threads: int
    max_rows: int


def _run_query(query: LockedQuery, out: Any) -> None:
    """Write a query's rows as an Arrow stream. Raises QueryError (for too many rows as well) and LakeAccessError."""
    session = QuerySession(
        lambda name: query.files[name],
        Objects(query.root),
        lambda hidden_set: pl.Series("episode_id", query.hidden.get(hidden_set, []), dtype=pl.Int64),
        QueryLimits(memory=query.memory, threads=query.threads, spill=False),
        only=[file.path for files in query.files.values() for file in files],
        by_clock=query.by_clock,
    )
    reader = session.stream(query.sql, query.params)
    rows = 0
    with pa.ipc.new_stream(out, reader.schema) as stream:
        for batch in reader:
            rows += batch.num_rows
            if rows > query.max_rows:
                msg = f"the result has more than {query.max_rows:,} rows, the most a locked query may return; add LIMIT"
                raise QueryError(msg)
            stream.write_batch(batch)


def main() -> None:
    """Run the query of stdin in the child, and exit without clean-up, which nothing needs."""
    query = pickle.load(sys.stdin.buffer)
    # Rows go to the original stdout; other output goes to stderr.
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    status = 0
    try:
        _run_query(query, out)
        out.flush()
    except (TrajlakeError, MemoryError, OSError) as error:
        kind = LakeAccessError if isinstance(error, LakeAccessError) else QueryError
        text = str(error) or "the query needs more memory than it may use"
        position = error.position if isinstance(error, QueryError) else None
        sys.stderr.write("\n" + json.dumps({"error": kind.__name__, "message": text, "position": position}) + "\n")
        sys.stderr.flush()
        status = EXIT_REFUSED
    os._exit(status)


MEMORY = "1GB"
SECONDS = 30.0
ROWS = 100_000
"""Default limits of a locked query."""
_UNITS = {"": 1, "B": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_PROCESS_BYTES = 3 << 30
"""Address space that Python, Arrow, Polars and DuckDB reserve before a query starts; they use little of it."""
_STDERR_BYTES = 1 << 16


class LockedReader:
    """Runs SELECTs of untrusted users on a snapshot.

    Args:
        snapshot: snapshot of a lake in a local folder.
        timeout: seconds for one query, including the start of its process (about half a second).
        require: weakest acceptable isolation: `strong`, `basic` or `none`. On Linux with Landlock (6.2 or later) it is
            strong.

    Raises:
        UsageError: isolation here is weaker than required (the message names the missing layers), or the lake is
            remote.
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
        missing = isolation.find_missing_layers()
        self._layers = tuple(layer for layer in isolation.LAYERS if layer not in missing)
        self.isolation = isolation.name_level(self._layers)
        """Isolation level of a query: strong, basic or none."""
        order = ("none", "basic", "strong")
        if require not in order:
            raise UsageError(f"require={require!r} is not an isolation level; valid: {', '.join(order)}")
        if order.index(self.isolation) < order.index(require):
            why = "; ".join(f"no {name}: {reason}" for name, reason in missing.items())
            msg = f"locked SQL needs {require} isolation, here it is {self.isolation} ({why}); lower it only on purpose"
            raise UsageError(msg)
        self._snapshot = snapshot
        self._memory = memory_limit
        self._memory_bytes = parse_size(memory_limit)
        self._timeout = timeout
        self._max_rows = max_rows
        self._max_bytes = max_bytes
        self._threads = threads
        self._files = {name: snapshot.files(name) for name in TABLES}
        hidden_sets = {file.hidden_set for files in self._files.values() for file in files}
        hidden = {hidden_set: snapshot.hidden(hidden_set) for hidden_set in hidden_sets}
        self._hidden = {key: episodes.to_list() for key, episodes in hidden.items() if episodes is not None}

    def sql(self, query: str, params: Params = None) -> pl.DataFrame:
        """Return the rows of one SELECT. Raises the errors of `QuerySession.stream`."""
        return to_polars(self.arrow(query, params))

    def arrow(self, query: str, params: Params = None) -> pa.Table:
        """Return the rows of one SELECT as an Arrow table; see `sql`."""
        locked_query = LockedQuery(
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
        stream = self._run(pickle.dumps(locked_query))
        try:
            table = pa.ipc.open_stream(stream).read_all()
            table.validate(full=True)
        except pa.ArrowException as error:
            raise QueryError("the locked process sent no readable result") from error
        return table

    def close(self) -> None:
        """Do nothing: each query's process ends with the query."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, pickled_query: bytes) -> bytes:
        package = Path(__file__).parents[1]
        files = [file.path for table_files in self._files.values() for file in table_files]
        policy = isolation.LockPolicy(
            read=(*isolation.list_runtime_folders(), str(package), *files),
            memory_bytes=self._memory_bytes + _PROCESS_BYTES,
            cpu_seconds=int(self._timeout * self._threads) + 5,
            open_files=4096,
            layers=self._layers,
        )
        orders = isolation.encode_orders("lake.locked.query", policy, {"lake": str(package.parent)})
        deadline = time.monotonic() + self._timeout
        environment = {"LANG": "C.UTF-8", "MALLOC_ARENA_MAX": "2", "POLARS_MAX_THREADS": "1", "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            isolation.build_command(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            cwd="/",
            start_new_session=True,
        )
        pipes = ChildPipes(process)
        try:
            out, err = _exchange(pipes, orders + pickled_query, deadline, self._max_bytes)
            process.wait(max(0.1, deadline - time.monotonic()))
        except _OutputTooLargeError:
            msg = f"the result is larger than {self._max_bytes:,} bytes, the most a locked query may return; add LIMIT"
            raise QueryError(msg) from None
        except (TimeoutError, subprocess.TimeoutExpired):
            raise QueryError(f"stopped after {self._timeout:g} s, the time a locked query has; narrow it") from None
        finally:
            process.kill()
            process.wait()
            pipes.close()
        if process.returncode:
            raise self._build_error(process.returncode, err)
        return out

    def _build_error(self, status: int, err: bytes) -> Exception:
        """Build the exception for a failed child. Its stderr may hold any text, even if it was killed."""
        text = err.decode("utf-8", "replace").strip()
        last = text.rpartition("\n")[2]
        if status == EXIT_REFUSED and last.startswith("{"):
            report = json.loads(last)
            message = first_paragraph(QueryError(report.get("message")))
            if report.get("error") == "LakeAccessError":
                return LakeAccessError(message)
            refusal = QueryError(message)
            match report.get("position"):
                case [int(line), int(character)]:
                    refusal.position = (line, character)
            return refusal
        if status == isolation.EXIT_NOT_LOCKED:
            return LakeAccessError(f"the query was not run: {first_paragraph(QueryError(last))}")
        if status in (-signal.SIGXCPU, -signal.SIGKILL):
            return QueryError(
                f"stopped: the query used up its processor time or its {self._memory} of memory; narrow it"
            )
        why = f"signal {-status}" if status < 0 else f"exit status {status}"
        return QueryError(
            f"the query's process ended early ({why}), most likely for want of memory: it has {self._memory}; narrow it"
        )


class _OutputTooLargeError(Exception):
    """The child wrote more bytes than allowed."""


def _exchange(pipes: ChildPipes, message: bytes, deadline: float, max_bytes: int) -> tuple[bytes, bytes]:
    """Send a message and read stdout and stderr, within the time and size limits."""
    output = {"stdout": bytearray(), "stderr": bytearray()}
    limits = {"stdout": max_bytes, "stderr": _STDERR_BYTES}
    pipes.post(message, last=True)
    while pipes.is_open:
        pieces = pipes.exchange(max(0.0, deadline - time.monotonic()))
        if time.monotonic() >= deadline:
            raise TimeoutError
        for stream, piece in pieces:
            output[stream] += piece
            if len(output[stream]) > limits[stream]:
                raise _OutputTooLargeError
    return bytes(output["stdout"]), bytes(output["stderr"])


def parse_size(text: str) -> int:
    """Convert a size such as 512MB or 1.5GiB to bytes. Raises UsageError: not a size."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", text, re.IGNORECASE)
    if match is None:
        raise UsageError(f"{text!r} is not a size; write for example 512MB or 2GiB")
    unit = _UNITS[match[2].upper()]
    if match[3]:
        unit = 1024 ** "BKMGT".index(match[2].upper() or "B")
    return int(float(match[1]) * unit)


if __name__ == "__main__":
    main()
