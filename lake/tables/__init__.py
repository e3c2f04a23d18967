"""Every table of the lake, defined once.

Facts (`episodes`, `steps`, `tokens`, `spans`, `blobs`, `rejects`, `retractions`) are appended once and never rewritten,
except by compaction and `forget`. Judgements are narrow and keyed. Lineage records the jobs and their inputs. NULL
means unknown or not scored, never 0. Keys and filtered columns come first.
"""

from lake.tables.columns import Table, Type
from lake.tables.definitions import (
    BLOBS,
    EPISODES,
    FACTS,
    JOBS,
    JUDGEMENTS,
    LINEAGE,
    RELATIONS,
    RETRACTIONS,
    SPANS,
    STATUSES,
    STEPS,
    TOKENS,
)

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
"""Version of the tables: stored in every Delta table, checked on opening, raised by `lake.storage.store`."""

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
"""Order in which a snapshot resolves tables: the reverse of the order of writers' commits.

So a snapshot resolves everything that a resolved row refers to at a version that has it. Retractions come after
episodes: the retraction of a retry has the retry's write_id and commits before it.
"""

WRITTEN_BY_JOBS = tuple(name for name in TABLES if name not in ("episodes", "steps", "blobs", "jobs"))
"""Tables that `Job.write` appends to; `Job.record` and the start and end of jobs write the others."""

ID_COLUMNS = frozenset(c.name for table in TABLES.values() for c in table.columns if c.type in (Type.ID, Type.IDS))
"""Names of the columns that users see as base32."""
