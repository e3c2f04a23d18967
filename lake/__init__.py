"""The floor of Trajlake: trajectories in Delta tables, exactly once, queryable with SQL.

    import lake

    rollouts = lake.open("my-lake")
    rollouts.sql("SELECT task_id, avg(env_return) FROM episodes GROUP BY task_id")

Knows no other layer and imports neither torch nor streamlit. The public names load on first use, so that the command
line, which lives in this package, answers `-h` at once.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lake import errors
    from lake.lake import Lake
    from lake.live.opening import recorder
    from lake.opening import open  # noqa: A004 - `lake.open` is the name people guess
    from lake.read.snapshot import Snapshot
    from lake.records import EpisodeRecord, ScoreRecord, SpanRecord, StepRecord, TokensRecord

__all__ = [
    "EpisodeRecord",
    "Lake",
    "ScoreRecord",
    "Snapshot",
    "SpanRecord",
    "StepRecord",
    "TokensRecord",
    "errors",
    "open",
    "recorder",
]

_HOME = {
    "EpisodeRecord": "lake.records",
    "Lake": "lake.lake",
    "ScoreRecord": "lake.records",
    "Snapshot": "lake.read.snapshot",
    "SpanRecord": "lake.records",
    "StepRecord": "lake.records",
    "TokensRecord": "lake.records",
    "open": "lake.opening",
    "recorder": "lake.live.opening",
}


def __getattr__(name: str) -> Any:
    """Load a public name on first use (PEP 562)."""
    if name == "errors":
        return import_module("lake.errors")
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module `lake` has no attribute `{name}`; public names: {', '.join(__all__)}")
