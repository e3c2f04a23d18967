"""Every table of the lake, spelled once.

Facts (`episodes`, `steps`, `tokens`, `spans`, `blobs`, `rejects`, `retractions`) are appended once and never rewritten,
compaction and `forget` aside. Judgements are narrow and keyed. Lineage says what made what. NULL means unknown or not
scored, never 0. Keys and filtered columns come first.
"""

from lake.tables.columns import Table, Type
from lake.tables.facts import (
    BLOBS,
    EPISODES,
    REJECTS,
    RELATIONS,
    RETRACTIONS,
    SPANS,
    STATUSES,
    STEPS,
    TOKENS,
)
from lake.tables.judgements import (
    ADVANTAGES,
    ANNOTATIONS,
    CREDIT_GROUPS,
    GROUPINGS,
    RATIOS,
    RESPONSES,
    SCORES,
    SELECTIONS,
)
from lake.tables.lineage import BATCHES, CHECKPOINTS, JOBS, METRICS

__all__ = [
    "ADVANTAGES",
    "ANNOTATIONS",
    "BATCHES",
    "BLOBS",
    "CHECKPOINTS",
    "CREDIT_GROUPS",
    "EPISODES",
    "FORMAT_VERSION",
    "GROUPINGS",
    "ID_COLUMNS",
    "JOBS",
    "METRICS",
    "RATIOS",
    "REJECTS",
    "RELATIONS",
    "RESOLUTION_ORDER",
    "RESPONSES",
    "RETRACTIONS",
    "SCORES",
    "SELECTIONS",
    "SPANS",
    "STATUSES",
    "STEPS",
    "TABLES",
    "TOKENS",
    "WRITTEN_BY_JOBS",
]

FORMAT_VERSION = 4
"""Version of the tables; written into every Delta table, checked on opening, raised by `lake.storage.migrations`."""

TABLES: dict[str, Table] = {
    table.name: table
    for table in (
        EPISODES,
        STEPS,
        TOKENS,
        SPANS,
        BLOBS,
        REJECTS,
        RETRACTIONS,
        SCORES,
        ADVANTAGES,
        GROUPINGS,
        SELECTIONS,
        RATIOS,
        ANNOTATIONS,
        CREDIT_GROUPS,
        RESPONSES,
        JOBS,
        BATCHES,
        CHECKPOINTS,
        METRICS,
    )
}
"""All tables by name."""

RESOLUTION_ORDER = (
    "checkpoints",
    "metrics",
    "batches",
    "jobs",
    "annotations",
    "ratios",
    "selections",
    "groupings",
    "credit_groups",
    "advantages",
    "scores",
    "responses",
    "rejects",
    "episodes",
    "retractions",
    "blobs",
    "spans",
    "tokens",
    "steps",
)
"""Order in which a snapshot resolves tables: the reverse of the order in which writers commit, so that whatever a
resolved row refers to is resolved at a version that holds it. Retractions come after episodes: the one that a retry
brings carries the retry's write_id, and commits before it."""

WRITTEN_BY_JOBS = tuple(name for name in TABLES if name not in ("episodes", "steps", "blobs", "jobs"))
"""Tables that `Job.write` appends to; the others are written by `Job.record`, and by a job's start and end."""

ID_COLUMNS = frozenset(c.name for table in TABLES.values() for c in table.columns if c.type in (Type.ID, Type.IDS))
"""Names of the columns that people see as base32."""
