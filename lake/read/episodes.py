"""Whole episodes of a lake, in bounded memory: their rows by batch, and the records they were written from.

Batches follow the order of the lake's files (run, group, episode), so each touches few files. A batch contains whole
groups. The order depends on the episodes only, not on files or commits.

An episode is one conversation: each decision adds the messages since the decision before. If an agent rewrote its
history or went back, recorders and readers of traces note it in `steps.extra` (`lake.live.calls.steps`,
`lake.formats.tracing.episodes`):

    history: rewritten   the step's context is its whole prompt
    follows: 3           the step continues step 3, which is not the agent's previous step
"""

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
import numpy as np
import polars as pl
from msgspec import UNSET

from lake import ids
from lake.read.parquet import collect_rows
from lake.read.snapshot import Snapshot
from lake.records import EpisodeRecord, ScoreRecord, SpanRecord, StepRecord, TokensRecord
from lake.tables import EPISODES, SPANS, STEPS, TOKENS
from lake.tables.columns import Table, Type
from lake.write.rows import inline_blobs

KEYS = ("run_id", "group_id", "episode_id")
"""Order of the lake's files."""
STEPS_PER_BATCH = 8192
EPISODES_PER_BATCH = 1024
"""Upper bounds of a batch; a batch has at least one group of any size."""
_EARLIEST = datetime.min.replace(tzinfo=UTC)
_SCORE = ("episode_id", "step_index", "scorer", "scorer_version", "value", "reason", "error", "metrics")
_VERSIONS = "SELECT scorer, scorer_version FROM scorer_versions WHERE is_current"
_JOB_ORDER = (
    "SELECT job_id, row_number() OVER (ORDER BY ended_order(sequence, ended_at, job_id)) AS ended FROM job_runs"
)


def split_batches(
    episodes: pl.DataFrame, *, steps: int = STEPS_PER_BATCH, most: int = EPISODES_PER_BATCH
) -> Iterator[pl.DataFrame]:
    """Yield episodes in the order of the files, in batches of whole groups with a bounded number of steps.

    Args:
        episodes: `KEYS` and num_steps.
        steps: largest number of steps of a batch.
        most: largest number of episodes of a batch.
    """
    ordered = episodes.sort(*KEYS)
    starts = [0]
    batch_episodes = batch_steps = 0
    groups = ordered.select("group_id", rows=pl.lit(1)).with_row_index("at").group_by("group_id", maintain_order=True)
    bounds = groups.agg(pl.col("at").first(), pl.len())
    sums = ordered["num_steps"].cum_sum()
    for at, length in bounds.select("at", "len").iter_rows():
        group_steps = sums[at + length - 1] - (sums[at - 1] if at else 0)
        if batch_episodes and (batch_episodes + length > most or batch_steps + group_steps > steps):
            starts.append(at)
            batch_episodes = batch_steps = 0
        batch_episodes += length
        batch_steps += group_steps
    for low, high in zip(starts, [*starts[1:], len(ordered)], strict=True):
        if high > low:
            yield ordered[low:high]


def read_rows(
    snapshot: Snapshot, table: str, batch: pl.DataFrame, columns: Sequence[str], documents: Sequence[str]
) -> pl.DataFrame:
    """Read the rows of a batch with large payloads inlined; ranges of the sort keys skip files and row groups.

    Args:
        batch: `KEYS` of the episodes.
        documents: columns that may refer to `blobs`.
    """
    groups = batch["group_id"]
    rows = snapshot.scan(table).filter(
        pl.col("group_id").is_between(groups.min(), groups.max()),
        pl.col("run_id").is_in(batch["run_id"].unique().implode()),
        pl.col("episode_id").is_in(batch["episode_id"].implode()),
    )
    return inline_blobs(snapshot, collect_rows(rows.select(columns)), documents)


class StoredEpisode(msgspec.Struct, frozen=True):
    """A record of a lake with its ids."""

    episode_id: int
    group_id: int
    record: EpisodeRecord
    scores: list[tuple[str, ScoreRecord]]
    """Current scores, each with its scorer's version."""


def read_episodes(
    snapshot: Snapshot, batch: pl.DataFrame, *, tokens: bool = True, spans: bool = True, scores: bool = True
) -> list[StoredEpisode]:
    """Read the episodes of a batch, in its order, as records that would be written as the same rows.

    `record.scores` is empty: the caller decides which scores belong to a record. Tokens are only the exact tokens of
    engines. A log-probability is the shortest decimal number with the same float32 value.

    Raises:
        LakeAccessError: a damaged file.
    """
    fields = _shared_fields(EPISODES, EpisodeRecord)
    heads = _read_typed_rows(snapshot, EPISODES, batch, ("episode_id", "group_id", *fields))
    by_id = {head["episode_id"]: head for head in heads}

    def read_by_episode(table: Table, columns: Sequence[str]) -> dict[int, list[dict[str, Any]]]:
        rows: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for row in _read_typed_rows(snapshot, table, batch, ("episode_id", *columns)):
            rows[row["episode_id"]].append(row)
        return rows

    steps = read_by_episode(STEPS, ("step_index", *_shared_fields(STEPS, StepRecord)))
    step_tokens = _read_tokens(snapshot, batch) if tokens and snapshot.files("tokens") else {}
    has_spans = spans and snapshot.files("spans")
    episode_spans = read_by_episode(SPANS, _shared_fields(SPANS, SpanRecord)) if has_spans else {}
    episode_scores = read_scores(snapshot, batch) if scores else {}
    episodes = []
    for episode_id in batch["episode_id"]:
        head = by_id[episode_id]
        record = EpisodeRecord(
            **{name: head[name] for name in fields},
            steps=[
                StepRecord(**_drop(row, "episode_id", "step_index"), tokens=step_tokens.get((episode_id, index)))
                for row in sorted(steps[episode_id], key=lambda row: int(row["step_index"]))
                for index in [row["step_index"]]
            ],
            spans=[SpanRecord(**_drop(row, "episode_id")) for row in episode_spans.get(episode_id, ())],
        )
        # Files do not keep the order of spans; `lake.formats.base.rows` uses this order.
        record.spans.sort(key=lambda span: (span.started_at or _EARLIEST, span.trace_id, span.span_id))
        episodes.append(StoredEpisode(episode_id, head["group_id"], record, episode_scores.get(episode_id, [])))
    return episodes


def read_scores(
    snapshot: Snapshot, batch: pl.DataFrame, *, all_versions: bool = False
) -> dict[int, list[tuple[str, ScoreRecord]]]:
    """Read the scores of a batch by episode, each with its scorer's version.

    They are the rows of view `current_scores`, or of `latest_scores` for all versions. The views themselves would read
    the whole table for every batch.
    """
    scores: dict[int, list[tuple[str, ScoreRecord]]] = defaultdict(list)
    if not snapshot.files("scores"):
        return scores
    versions, job_order = _read_scorings(snapshot)
    rows = read_rows(snapshot, "scores", batch, (*_SCORE, "job_id"), ["metrics"]).join(job_order, on="job_id")
    if not all_versions:
        rows = rows.join(versions, on=versions.columns, how="semi")
    newest = pl.col("ended") == pl.col("ended").max().over("scorer", "scorer_version", "episode_id")
    rows = rows.filter(newest).sort(*_SCORE[:4], nulls_last=False).select(_SCORE)
    for episode_id, step_index, scorer, version, value, reason, error, metrics in rows.iter_rows():
        decoded = None if metrics is None else msgspec.json.decode(metrics)
        score = ScoreRecord(
            scorer=scorer, value=value, step_index=step_index, reason=reason, error=error, metrics=decoded
        )
        scores[episode_id].append((version, score))
    return scores


@lru_cache(maxsize=2)
def _read_scorings(snapshot: Snapshot) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Read the current version of each scorer, and the order in which jobs ended."""
    with snapshot.session() as session:
        return session.query(_VERSIONS), session.query(_JOB_ORDER)


def _shared_fields(table: Table, record: type[msgspec.Struct]) -> list[str]:
    """List the columns of a table that are fields of its records."""
    names = set(record.__struct_fields__)
    return [name for name in table.names if name in names]


def _read_typed_rows(
    snapshot: Snapshot, table: Table, batch: pl.DataFrame, columns: Sequence[str]
) -> list[dict[str, Any]]:
    """Read rows of a batch with JSON decoded and ids of other episodes as text."""
    documents = [name for name in columns if table.column(name).type is Type.JSON]
    frame = read_rows(snapshot, table.name, batch, columns, documents)
    rows: list[dict[str, Any]] = frame.to_dicts()
    references = [name for name in ("parent_episode_id", "root_episode_id") if name in columns]
    defaults = [name for name in ("status", "source_format") if name in columns]
    decode = msgspec.json.decode
    for row in rows:
        for name in documents:
            row[name] = None if row[name] is None else decode(row[name])
        for name in references:
            row[name] = None if row[name] is None else ids.to_text(row[name])
        for name in defaults:
            # Encoding a record omits a field only if its value is the very object of the default.
            row[name] = sys.intern(row[name])
    return rows


def _read_tokens(snapshot: Snapshot, batch: pl.DataFrame) -> dict[tuple[int, int], TokensRecord]:
    """Read the engine's tokens by episode and step."""
    fields = _shared_fields(TOKENS, TokensRecord)
    columns = ("episode_id", "step_index", "provenance", *fields)
    frame = read_rows(snapshot, "tokens", batch, columns, ["version_spans"])
    records = {}
    for row in frame.filter(pl.col("provenance") == "engine").to_dicts():
        index = row["step_index"]
        tokens = _drop(row, "episode_id", "step_index", "provenance")
        if tokens["prefix_step_index"] == (index - 1 if index else None):
            tokens["prefix_step_index"] = UNSET
        if all(tokens["action_mask"]):
            tokens["action_mask"] = None
        if tokens["version_spans"] is not None:
            tokens["version_spans"] = [tuple(span) for span in msgspec.json.decode(tokens["version_spans"])]
        if tokens["action_logprobs"] is not None:
            logprobs = np.asarray(tokens["action_logprobs"], np.float32)
            tokens["action_logprobs"] = [float(str(logprob)) for logprob in logprobs]
        records[row["episode_id"], index] = TokensRecord(**tokens)
    return records


def _drop(row: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: row[name] for name in row if name not in names}


# ---------------------------------------------------------------- conversations


class PromptOrigin(NamedTuple):
    """Which step a step's prompt continues, from the notes in `steps.extra`."""

    opens: bool = False
    """The step opens a new conversation."""
    follows: int | None = None
    """The step that it continues, if that is not the agent's previous step."""

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> "PromptOrigin":
        """Parse `steps.extra`."""
        follows = extra.get("follows")
        return cls(extra.get("history") == "rewritten", follows if type(follows) is int else None)


CONTINUES = PromptOrigin()
"""The step continues its agent's previous step."""


def find_predecessors(steps: Iterable[tuple[int, str | None, PromptOrigin]]) -> list[int | None]:
    """Return the step that each step continues; None if it opens a conversation.

    Agents that take turns in one episode have separate conversations. Notes of missing steps are ignored.

    Args:
        steps: step_index, agent_id and origin of each step, in order.
    """
    last: dict[str | None, int] = {}
    earlier: set[int] = set()
    predecessors: list[int | None] = []
    for step, agent, origin in steps:
        before = None if origin.opens else last.get(agent)
        predecessors.append(origin.follows if origin.follows in earlier else before)
        last[agent] = step
        earlier.add(step)
    return predecessors
