"""Making a table: the first entry of its log, and the list of the tables that a lake has had.

A lake begins as an empty `episodes`; every other table is made by the first write to it. So a table that is not there
may never have been written, or may be lost. What tells the two apart is an empty object a table under
`_trajlake/tables/`, put there once the table is: without its folder `retractions`, say, what was retracted would be
back.
"""

import uuid
from datetime import datetime

import msgspec
from deltalake import Schema

from lake.storage.log_check import NOTE
from lake.storage.migrations import configuration
from lake.storage.objects import Objects
from lake.tables import TABLES
from lake.tables.columns import Table

OWN_FOLDER = "_trajlake"
"""Right under a lake, with what is no table: this list, snapshots by name, leases. The first write makes it."""
_FOLDER = f"{OWN_FOLDER}/tables"


def make_table(objects: Objects, table: Table, at: datetime) -> None:
    """Write version 0 of a table, without rows; of several processes that do so at once, one is first.

    delta-rs takes 6 ms for what is one small object.
    """
    made = int(at.timestamp() * 1000)
    note = {"at": at.isoformat(), "operation": "create table"}
    metadata = {
        "id": str(uuid.uuid4()),
        "name": table.name,
        "format": {"provider": "parquet", "options": {}},
        "schemaString": Schema.from_arrow(table.arrow()).to_json(),
        "partitionColumns": [],
        "createdTime": made,
        "configuration": configuration(table),
    }
    actions = (
        {"commitInfo": {"timestamp": made, "operation": "CREATE TABLE", NOTE: note}},
        # The oldest protocol: whoever reads Delta reads a lake.
        {"protocol": {"minReaderVersion": 1, "minWriterVersion": 2}},
        {"metaData": metadata},
    )
    objects.create(f"{table.name}/_delta_log/{0:020d}.json", b"\n".join(map(msgspec.json.encode, actions)) + b"\n")


class MadeTables:
    """The tables that a lake has had."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._known: set[str] = set()

    def names(self) -> frozenset[str]:
        """The tables on the list."""
        self._known.update(found.path.rpartition("/")[2] for found in self._objects.list(_FOLDER))
        return frozenset(self._known & TABLES.keys())

    def add(self, name: str) -> None:
        """Put a table that is there on the list, if it is not on it."""
        if name not in self._known:
            self._objects.create(f"{_FOLDER}/{name}", b"")
            self._known.add(name)
