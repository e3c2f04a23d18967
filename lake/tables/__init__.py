"""Every table of the lake, spelled once.

Facts (`episodes`, `steps`, `tokens`, `spans`, `blobs`, `rejects`, `retractions`) are appended once and never rewritten,
compaction and `forget` aside. Judgements are narrow and keyed. Lineage says what made what. NULL means unknown or not
scored, never 0. Keys and filtered columns come first.
"""

from lake.tables.columns import Table, Type
from lake.tables.facts import BLOBS, EPISODES, FACTS, RELATIONS, RETRACTIONS, SPANS, STATUSES, STEPS, TOKENS
from lake.tables.judgements import JUDGEMENTS
from lake.tables.lineage import JOBS, LINEAGE

__all__ = [
    "BLOBS",
    "EPISODES",
    "FORMAT_VERSION",
    "ID_COLUMNS",
    "JOBS",
    "RELATIONS",
    "RESOLUTION_ORDER",
    "RETRACTIONS",
    "SPANS",
    "STATUSES",
    "STEPS",
    "TABLES",
    "TOKENS",
    "WRITTEN_BY_JOBS",
]

FORMAT_VERSION = 8
"""Version of the tables; written into every Delta table, checked on opening, raised by `lake.storage.migrations`."""

TABLES: dict[str, Table] = {table.name: table for table in (*FACTS, *JUDGEMENTS, *LINEAGE)}
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
