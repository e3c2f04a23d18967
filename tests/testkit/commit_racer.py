"""A process that races others for the versions of one Delta log: arguments KIND URI OPTIONS NAME COMMITS.

KIND `delta` appends with delta-rs, which gives up on a lost race; KIND `objects` creates the log's next file itself.
OPTIONS are storage options as JSON. Prints a line when it is ready, waits for a line, then prints the marks of the
commits that it was sure of.
"""

import json
import sys
from collections.abc import Sequence

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, write_deltalake
from deltalake.exceptions import CommitFailedError

from lake.storage.objects import Objects


def newest(objects: Objects) -> int:
    """The newest version of the log."""
    return max(int(f.path[11:31]) for f in objects.list("_delta_log") if f.path.endswith(".json"))


def by_delta(objects: Objects, mark: str) -> bool:
    """One append that is tried once."""
    table = DeltaTable(objects.root, storage_options=objects.delta_options)
    properties = CommitProperties(max_commit_retries=0, custom_metadata={"mark": mark})
    try:
        write_deltalake(table, pa.table({"a": [1]}), mode="append", commit_properties=properties)
    except CommitFailedError:
        return False
    return True


def by_objects(objects: Objects, mark: str) -> bool:
    """One commit without actions."""
    commit = {"commitInfo": {"timestamp": 0, "operation": "WRITE", "mark": mark}}
    return objects.create(f"_delta_log/{newest(objects) + 1:020d}.json", json.dumps(commit).encode() + b"\n")


def main(args: Sequence[str]) -> None:
    """Race, from the opening of the gate on."""
    kind, uri, options, name, commits = args
    objects = Objects(uri, json.loads(options))
    attempt = {"delta": by_delta, "objects": by_objects}[kind]
    print("ready", flush=True)
    sys.stdin.readline()
    marks: list[str] = []
    tried = 0
    while len(marks) < int(commits):
        tried += 1
        mark = f"{name}-{tried}"
        if attempt(objects, mark):
            marks.append(mark)
    print(json.dumps({"made": marks, "tried": tried}), flush=True)
