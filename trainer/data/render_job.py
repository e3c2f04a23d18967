"""The render job: token rows of text-only episodes, made once and found again by their encoding."""

from collections import Counter
from typing import Any

import msgspec
import polars as pl

from lake.blobs import inlined
from lake.lake import Lake
from lake.objects import Objects
from lake.query import Session
from lake.reading import collected
from lake.snapshot import Snapshot
from lake.tables import TOKENS
from lake.visibility import DataFile
from trainer.data import chat, render
from trainer.data import unrendered as unrendered_module
from trainer.data.chat import STEP_DOCUMENTS, turns_of
from trainer.data.render import Renderer
from trainer.data.unrendered import Rendering, UnrenderableError, loses_reasoning

EPISODES_A_WRITE = 2048
"""Episodes rendered and written at a time."""
_EPISODE_COLUMNS = ("episode_id", "run_id", "task_id", "rollout_index", "initial_messages", "tools")
_STEP_COLUMNS = (
    "episode_id",
    "step_index",
    "group_id",
    "run_id",
    "context",
    "state",
    "state_role",
    "action",
    "reasoning",
    "tool_calls",
    "agent_id",
    "finish_reason",
)


def render_missing(
    lk: Lake, snapshot: Snapshot, renderer: Renderer, episode_ids: pl.Series, parameters: dict[str, Any]
) -> Rendering:
    """Render the episodes that have no rows in the renderer's encoding yet, as a `render` job.

    Args:
        lk: where rows go.
        snapshot: where episodes come from.
        renderer: the template.
        episode_ids: int64 [E].
        parameters: for the job's row.
    """
    missing = unrendered(snapshot, renderer, episode_ids)
    done = Rendering(Counter({"rendered": 0, "present": len(episode_ids) - len(missing)}))
    if missing.is_empty():
        return done
    with lk.job(
        kind="render",
        parameters=parameters,
        code=[chat, render, unrendered_module],
        snapshot=snapshot,
    ) as job:
        for low in range(0, len(missing), EPISODES_A_WRITE):
            frame = _render(snapshot, renderer, missing[low : low + EPISODES_A_WRITE], done)
            job.write("tokens", frame)
            job.counts["rows_out"] = job.counts.get("rows_out", 0) + frame.height
        job.counts |= {f"episodes_{name}": number for name, number in done.counts.items()}
    return done


def rendered_beside(
    scratch: Lake, snapshot: Snapshot, renderer: Renderer, episode_ids: pl.Series
) -> tuple[Snapshot, Rendering]:
    """As `render_missing`, but into another lake, so that the rows can be counted and are then forgotten.

    Args:
        scratch: takes the rows; nothing else is in it.
        snapshot: where episodes come from.
        renderer: the template.
        episode_ids: int64 [E].

    Returns:
        The snapshot with the scratch lake's token rows in place of its own, unless all of them are there already.
    """
    if unrendered(snapshot, renderer, episode_ids).is_empty():
        return snapshot, Rendering(Counter({"rendered": 0, "present": len(episode_ids)}))
    empty = Composed(snapshot, scratch.snapshot())
    done = render_missing(scratch, empty, renderer, episode_ids, {})
    return Composed(snapshot, scratch.snapshot()), done


class Composed(Snapshot):
    """A snapshot whose token rows are those of another lake.

    Args:
        snapshot: has all other tables.
        tokens: has the token rows.
    """

    def __init__(self, snapshot: Snapshot, tokens: Snapshot) -> None:
        self._snapshot, self._tokens = snapshot, tokens
        self.versions, self.root = snapshot.versions, snapshot.root

    @property
    def objects(self) -> Objects:
        """Where the files of token rows lie: whoever reads others asks for a scan."""
        return self._tokens.objects

    def files(self, name: str) -> list[DataFile]:
        """See `Snapshot.files`."""
        return self._of(name).files(name)

    def scan_all(self, name: str) -> pl.LazyFrame:
        """See `Snapshot.scan_all`."""
        return self._of(name).scan_all(name)

    def session(self, *, retracted_too: bool = False) -> Session:
        """Queries see the token rows of the snapshot itself."""
        return self._snapshot.session(retracted_too=retracted_too)

    def _of(self, name: str) -> Snapshot:
        return self._tokens if name == "tokens" else self._snapshot


def unrendered(snapshot: Snapshot, renderer: Renderer, episode_ids: pl.Series) -> pl.Series:
    """Those of some episodes that have no rows in the renderer's encoding, int64, sorted."""
    rows = snapshot.scan("tokens").filter(pl.col("encoding_id") == renderer.encoding_id)
    present = collected(rows.select(pl.col("episode_id").unique()))["episode_id"]
    return episode_ids.filter(~episode_ids.is_in(present.implode())).sort()


def _named(episode: dict[str, Any], place: str) -> str:
    """An episode by its names, and a place in it."""
    name = f"run {episode['run_id']}, task {episode['task_id']}, rollout {episode['rollout_index']}"
    return f"{name}, {place}" if place else name


def _render(snapshot: Snapshot, renderer: Renderer, chunk: pl.Series, done: Rendering) -> pl.DataFrame:
    """Token rows of some episodes; what becomes of each is added to `done`."""
    mine = pl.col("episode_id").is_in(chunk.implode())
    heads = collected(snapshot.scan("episodes").filter(mine).select(_EPISODE_COLUMNS))
    heads = inlined(snapshot, heads, ("initial_messages", "tools"))
    head_of = {row["episode_id"]: row for row in heads.iter_rows(named=True)}
    steps = inlined(snapshot, collected(snapshot.scan("steps").filter(mine).select(_STEP_COLUMNS)), STEP_DOCUMENTS)
    steps = steps.sort("run_id", "group_id", *_STEP_COLUMNS[:2])
    rows: list[dict[str, Any]] = []
    for part in steps.partition_by("episode_id", maintain_order=True):
        episode_id = part["episode_id"][0]
        head = head_of[episode_id]
        common = {"group_id": part["group_id"][0], "run_id": part["run_id"][0]}
        tools = msgspec.json.decode(head["tools"]) if head["tools"] else None
        try:
            turns = turns_of(head["initial_messages"], part.to_dicts())
            spans = renderer.spans(turns, tools)
        except UnrenderableError as error:
            done.counts[error.reason] += 1
            done.examples.setdefault(error.reason, _named(head, error.place))
            continue
        done.counts["rendered"] += 1
        if any(loses_reasoning(turn, span.action) for turn, span in zip(turns, spans, strict=True)):
            done.counts["without_reasoning"] += 1
        rows += renderer.rows(episode_id, spans, common)
    if not rows:
        return pl.DataFrame()
    schema = {name: dtype for name, dtype in TOKENS.polars().items() if name in rows[0]}
    fixed = {"encoding_id": renderer.encoding_id, "provenance": "rendered", "has_logprobs": False}
    return pl.DataFrame(rows, schema=schema, orient="row").with_columns(pl.lit(v).alias(k) for k, v in fixed.items())
