"""Formats of stored lakes: which there were, and how a lake of an older one becomes one of the newest.

A lake of an older format is read as it is: tables it lacks are empty, columns it lacks are NULL. The first write
brings its tables up to date, one after the other, each in commits that change metadata only, so a migration that is
killed is finished by the next writer, and pinned snapshots stay as they were.

Format 1: ten tables. Format 2: `spans`, `blobs`, `retractions`, `groupings`, `selections`, `ratios`, `annotations`;
`episodes.blob_ids`, `rejects.episode_id`, `jobs.sequence`; file statistics for keys only. Format 3: `steps.state` and
`steps.state_hash` may be NULL; `cost` of episodes and steps, token counts of steps. Format 4: a table is made by the
first write to it, where all of them were made with the lake (`lake.storage.creation`).
"""

from collections.abc import Callable

from deltalake import DeltaTable, Schema
from deltalake.exceptions import CommitFailedError

from lake.errors import LakeVersionError, NotALakeError
from lake.storage.commits import CommitLostError, until_committed
from lake.tables import EPISODES, FORMAT_VERSION
from lake.tables.columns import Table

FORMAT_KEY = "trajlake.formatVersion"
_FORMAT_1_TABLES = frozenset(
    ["episodes", "steps", "tokens", "rejects", "scores", "advantages", "jobs", "batches", "checkpoints", "metrics"]
)
_FORMAT_2_TABLES = _FORMAT_1_TABLES | {
    "spans",
    "blobs",
    "retractions",
    "groupings",
    "selections",
    "ratios",
    "annotations",
    "credit_groups",
    "responses",
}


def made_with_lake(version: int | None) -> frozenset[str]:
    """The tables that a lake of a format had from the beginning; none if the format is not known."""
    if version is None:
        return frozenset()
    if version == 1:
        return _FORMAT_1_TABLES
    return _FORMAT_2_TABLES if version <= 3 else frozenset([EPISODES.name])


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
    """The format version of a table.

    Raises:
        LakeVersionError: newer than this package.
        NotALakeError: a Delta table that is not ours.
    """
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
