"""Making a table, and the formats of stored lakes: how a lake of an older one becomes one of the newest.

A lake begins as an empty `episodes`; every other table is made by the first write to it. So a table that is not there
may never have been written, or may be lost. What tells the two apart is an empty object a table under
`_trajlake/tables/`, put there once the table is: without its folder `retractions`, say, what was retracted would be
back.

A lake of an older format is read as it is: tables it lacks are empty, columns it lacks are NULL. The first write
brings its tables up to date, one after the other, each in commits that change metadata only, so a migration that is
killed is finished by the next writer, and pinned snapshots stay as they were.

Format 1: ten tables. Format 2: `spans`, `blobs`, `retractions`, `groupings`, `selections`, `ratios`, `annotations`;
`episodes.blob_ids`, `rejects.episode_id`, `jobs.sequence`; file statistics for keys only. Format 3: `steps.state` and
`steps.state_hash` may be NULL; `cost` of episodes and steps, token counts of steps. Format 4: a table is made by the
first write to it, where all of them were made with the lake. Format 5: `episodes.tokenizer`, `episodes.chat_template`.
Format 6: `batches.token_weights`, `batches.loss_weight`, `ratios.entropies`. Format 7: `credit_groups.empty_steps`.
Format 8: `retractions.restores`; rows of kind `restored` there, which a trajlake of before would not obey: it refuses.
"""

import uuid
from collections.abc import Callable
from datetime import datetime

import msgspec
from deltalake import DeltaTable, Schema
from deltalake.exceptions import CommitFailedError

from lake.errors import LakeVersionError, NotALakeError
from lake.storage.commits import NOTE, CommitLostError, until_committed
from lake.storage.identity import OWN_FOLDER, identity
from lake.storage.objects import Objects
from lake.tables import EPISODES, FORMAT_VERSION, TABLES
from lake.tables.columns import Table

FORMAT_KEY = "trajlake.formatVersion"
_FORMAT_1_TABLES = frozenset(
    ["episodes", "steps", "tokens", "rejects", "scores", "advantages", "jobs", "batches", "checkpoints", "metrics"]
)
_FORMAT_2_TABLES = _FORMAT_1_TABLES.union(
    ["spans", "blobs", "retractions", "groupings", "selections", "ratios", "annotations", "credit_groups", "responses"]
)


def made_with_lake(version: int | None) -> frozenset[str]:
    """The tables that a lake of a format had from the beginning; none if the format is not known."""
    known = {None: frozenset[str](), 1: _FORMAT_1_TABLES, 2: _FORMAT_2_TABLES, 3: _FORMAT_2_TABLES}
    return known.get(version, frozenset([EPISODES.name]))


def configuration(table: Table) -> dict[str, str]:
    """Properties of a table in the newest format."""
    return {
        FORMAT_KEY: str(FORMAT_VERSION),
        # The default forgets versions after 30 days; a pinned snapshot must open years later.
        "delta.logRetentionDuration": "interval 36500 days",
        "delta.dataSkippingStatsColumns": ",".join(table.statistics),
    }


def missing_table(root: str, name: str) -> str:
    """What to say of a lake that has lost a table."""
    return f"table `{name}` of {root} is missing; restore its folder. `trajlake doctor` tells what else is wrong"


def require_known(handle: DeltaTable, place: str) -> int:
    """The format version of a table. Raises LakeVersionError: a newer one. Raises NotALakeError: it is not ours."""
    found = handle.metadata().configuration.get(FORMAT_KEY, "")
    if not found.isdecimal():
        raise NotALakeError(f"{place} is a Delta table, but not of a lake: it names no {FORMAT_KEY}")
    if int(found) > FORMAT_VERSION:
        raise LakeVersionError(
            f"{place} has format version {found}; this trajlake reads up to {FORMAT_VERSION}. Install a newer "
            "trajlake: pip install --upgrade trajlake"
        )
    return int(found)


def migrate(opened: Callable[[], DeltaTable], table: Table) -> bool:
    """Bring one table to the newest format; does nothing if it is there, or if another process is first."""
    old = False

    def commit() -> bool:
        nonlocal old
        handle = opened()
        if require_known(handle, f"table `{table.name}`") == FORMAT_VERSION:
            return old
        old = True
        wanted = Schema.from_arrow(table.arrow())
        have = {field.name: field for field in handle.schema().fields}
        try:
            if missing := [field for field in wanted.fields if field.name not in have]:
                handle.alter.add_columns(missing)
            for field in wanted.fields:
                if field.nullable and field.name in have and not have[field.name].nullable:
                    handle.alter.drop_column_not_null(field.name)
            handle.alter.set_table_properties(configuration(table), raise_if_not_exists=False)
        except CommitFailedError as error:
            raise CommitLostError(str(error)) from error
        return True

    return until_committed(commit)


_FOLDER = f"{OWN_FOLDER}/tables"


def make_table(objects: Objects, table: Table, at: datetime) -> None:
    """Write version 0 of a table, without rows; of several processes that do so at once, one is first.

    delta-rs takes 6 ms for what is one small object.
    """
    made = int(at.timestamp() * 1000)
    note = {"at": at.isoformat(), "operation": "create table"}
    metadata = {
        "id": (identity(objects) if table is EPISODES else None) or str(uuid.uuid4()),
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
