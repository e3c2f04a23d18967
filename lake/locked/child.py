"""The locked process of `lake.locked.query`: one query over files it was given, its rows as an Arrow stream on stdout.

By the time this module runs the process is locked in (`lake.locked.isolation`). The job comes from the parent, on
stdin.
"""

import json
import os
import pickle
import sys
from dataclasses import dataclass
from typing import Any

import polars as pl
import pyarrow as pa

from lake.errors import LakeAccessError, QueryError, TrajlakeError
from lake.read.bound import Params
from lake.read.query import Limits, Session
from lake.read.visibility import DataFile
from lake.storage.objects import Objects

EXIT_REFUSED = 3
"""Exit status where the last line on stderr is the error as JSON."""


@dataclass(frozen=True)
class Query:
    """What the parent wants to know."""

    sql: str
    params: Params
    files: dict[str, list[DataFile]]
    hidden: dict[int, list[int]]
    """Episodes that readers do not see, by place of the files."""
    by_clock: bool
    root: str
    memory: str
    threads: int
    max_rows: int


def answer(query: Query, out: Any) -> None:
    """Write a query's rows as an Arrow stream. Raises QueryError, also for too many rows, and LakeAccessError."""
    session = Session(
        lambda name: query.files[name],
        Objects(query.root),
        lambda place: pl.Series("episode_id", query.hidden.get(place, []), dtype=pl.Int64),
        Limits(memory=query.memory, threads=query.threads, spill=False),
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
    """Read the job, answer it, and end without clean-up: the process holds nothing that needs it."""
    query = pickle.load(sys.stdin.buffer)
    # Rows go where stdout went; whatever else is printed goes to stderr.
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    status = 0
    try:
        answer(query, out)
        out.flush()
    except (TrajlakeError, MemoryError, OSError) as error:
        kind = LakeAccessError if isinstance(error, LakeAccessError) else QueryError
        text = str(error) or "the query needs more memory than it may use"
        place = error.place if isinstance(error, QueryError) else None
        sys.stderr.write("\n" + json.dumps({"error": kind.__name__, "message": text, "place": place}) + "\n")
        sys.stderr.flush()
        status = EXIT_REFUSED
    os._exit(status)


if __name__ == "__main__":
    main()
