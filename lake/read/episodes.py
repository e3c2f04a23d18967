"""Whole episodes out of a lake, in bounded memory: their rows a part at a time, and as the records they came from.

Parts follow the order of the lake's files (run, group, episode), so that each touches few of them, and hold groups
whole. The order depends on the episodes alone, not on files or commits.
"""

import sys
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
import polars as pl
from msgspec import UNSET

from lake import ids
from lake.read.parquet import collected
from lake.read.snapshot import Snapshot
from lake.records import EpisodeRecord, ScoreRecord, SpanRecord, StepRecord, TokensRecord
from lake.tables import EPISODES, SPANS, STEPS, TOKENS
from lake.tables.columns import Table, Type
from lake.write.rows import inlined

KEYS = ("run_id", "group_id", "episode_id")
"""Order of the lake's files."""
STEPS_A_PART = 8192
EPISODES_A_PART = 1024
"""Bounds of a part; a part has one group at least, whatever its size."""
_EARLIEST = datetime.min.replace(tzinfo=UTC)
_SCORE = ("episode_id", "step_index", "scorer", "scorer_version", "value", "reason", "error", "metrics")
_VERSIONS = "SELECT scorer, scorer_version FROM scorer_versions WHERE is_current"
_ENDED = "SELECT job_id, row_number() OVER (ORDER BY ended_order(sequence, ended_at, job_id)) AS ended FROM job_runs"


def parts(episodes: pl.DataFrame, *, steps: int = STEPS_A_PART, most: int = EPISODES_A_PART) -> Iterator[pl.DataFrame]:
    """Rows of chosen episodes in the order of the files, groups whole, a bounded number of steps at a time.

    Args:
        episodes: `KEYS` and num_steps.
        steps: of a part.
        most: episodes of a part.
    """
    ordered = episodes.sort(*KEYS)
    starts = [0]
    size = taken = 0
    groups = ordered.select("group_id", rows=pl.lit(1)).with_row_index("at").group_by("group_id", maintain_order=True)
    bounds = groups.agg(pl.col("at").first(), pl.len())
    sums = ordered["num_steps"].cum_sum()
    for at, length in bounds.select("at", "len").iter_rows():
        group_steps = sums[at + length - 1] - (sums[at - 1] if at else 0)
        if size and (size + length > most or taken + group_steps > steps):
            starts.append(at)
            size = taken = 0
        size += length
        taken += group_steps
    for low, high in zip(starts, [*starts[1:], len(ordered)], strict=True):
        if high > low:
            yield ordered[low:high]


def rows_of(
    snapshot: Snapshot, table: str, part: pl.DataFrame, columns: Sequence[str], documents: Sequence[str]
) -> pl.DataFrame:
    """Rows of some episodes with their big payloads put back; ranges of the sort keys spare files and row groups.

    Args:
        part: `KEYS` of the episodes.
        documents: the columns that may refer to `blobs`.
    """
    groups = part["group_id"]
    rows = snapshot.scan(table).filter(
        pl.col("group_id").is_between(groups.min(), groups.max()),
        pl.col("run_id").is_in(part["run_id"].unique().implode()),
        pl.col("episode_id").is_in(part["episode_id"].implode()),
    )
    return inlined(snapshot, collected(rows.select(columns)), documents)


class Episode(msgspec.Struct, frozen=True):
    """A record as the lake holds it, with its ids."""

    episode_id: int
    group_id: int
    record: EpisodeRecord
    scores: list[tuple[str, ScoreRecord]]
    """What scorers say of it now, each with the scorer's version."""


def read_episodes(
    snapshot: Snapshot, part: pl.DataFrame, *, tokens: bool = True, spans: bool = True, scores: bool = True
) -> list[Episode]:
    """The episodes of a part, in its order, as records that would be written as the same rows.

    `record.scores` is empty: which scores belong to a record is for its reader to say. Tokens are the engine's exact
    ones alone; log-probabilities are the shortest numbers that are theirs in float32.

    Raises:
        LakeAccessError: a damaged file.
    """
    fields = _fields(EPISODES, EpisodeRecord)
    heads = _typed_rows(snapshot, EPISODES, part, ("episode_id", "group_id", *fields))
    steps = _by_episode(_typed_rows(snapshot, STEPS, part, ("episode_id", "step_index", *_fields(STEPS, StepRecord))))
    of_tokens = _tokens(snapshot, part) if tokens and snapshot.files("tokens") else {}
    of_spans: Mapping[int, list[dict[str, Any]]] = {}
    if spans and snapshot.files("spans"):
        of_spans = _by_episode(_typed_rows(snapshot, SPANS, part, ("episode_id", *_fields(SPANS, SpanRecord))))
    of_scores = read_scores(snapshot, part) if scores else {}
    by_id = {head["episode_id"]: head for head in heads}
    found = []
    for episode_id in part["episode_id"]:
        head = by_id[episode_id]
        record = EpisodeRecord(
            **{name: head[name] for name in fields},
            steps=[
                StepRecord(**_without(row, "episode_id", "step_index"), tokens=of_tokens.get((episode_id, index)))
                for row in sorted(steps[episode_id], key=lambda row: int(row["step_index"]))
                for index in [row["step_index"]]
            ],
            spans=[SpanRecord(**_without(row, "episode_id")) for row in of_spans.get(episode_id, ())],
        )
        record.spans.sort(key=_in_order)
        found.append(Episode(episode_id, head["group_id"], record, of_scores.get(episode_id, [])))
    return found


def read_scores(
    snapshot: Snapshot, part: pl.DataFrame, *, all_versions: bool = False
) -> dict[int, list[tuple[str, ScoreRecord]]]:
    """The scores of the episodes of a part, each with the scorer's version.

    They are the rows of view `current_scores`, or `latest_scores` if of all versions; the views themselves would read
    the whole table for every part.
    """
    found: dict[int, list[tuple[str, ScoreRecord]]] = defaultdict(list)
    if not snapshot.files("scores"):
        return found
    versions, ended = _scorings(snapshot)
    rows = rows_of(snapshot, "scores", part, (*_SCORE, "job_id"), ["metrics"]).join(ended, on="job_id")
    if not all_versions:
        rows = rows.join(versions, on=versions.columns, how="semi")
    newest = pl.col("ended") == pl.col("ended").max().over("scorer", "scorer_version", "episode_id")
    rows = rows.filter(newest).sort(*_SCORE[:4], nulls_last=False).select(_SCORE)
    for episode_id, step_index, scorer, version, value, reason, error, metrics in rows.iter_rows():
        decoded = None if metrics is None else msgspec.json.decode(metrics)
        score = ScoreRecord(
            scorer=scorer, value=value, step_index=step_index, reason=reason, error=error, metrics=decoded
        )
        found[episode_id].append((version, score))
    return found


@lru_cache(maxsize=2)
def _scorings(snapshot: Snapshot) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The version of each scorer that counts, and of every job its place in the order in which they ended."""
    with snapshot.session() as session:
        return session.query(_VERSIONS), session.query(_ENDED)


def _fields(table: Table, record: type[msgspec.Struct]) -> list[str]:
    """The columns of a table that are fields of its records."""
    names = set(record.__struct_fields__)
    return [name for name in table.names if name in names]


def _typed_rows(snapshot: Snapshot, table: Table, part: pl.DataFrame, columns: Sequence[str]) -> list[dict[str, Any]]:
    """Rows of some episodes with JSON decoded, and the ids of other episodes as text."""
    documents = [name for name in columns if table.column(name).type is Type.JSON]
    frame = rows_of(snapshot, table.name, part, columns, documents)
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
            # The very objects that are the defaults of records: only those are left out where a record is spelled.
            row[name] = sys.intern(row[name])
    return rows


def _in_order(span: SpanRecord) -> tuple[datetime, str, str]:
    """As `lake.formats.base.canonical` has it: the order of files is not kept."""
    return span.started_at or _EARLIEST, span.trace_id, span.span_id


def _by_episode(rows: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    found: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        found[row["episode_id"]].append(row)
    return found


def _tokens(snapshot: Snapshot, part: pl.DataFrame) -> dict[tuple[int, int], TokensRecord]:
    """The engine's tokens of the steps that have them."""
    fields = _fields(TOKENS, TokensRecord)
    frame = rows_of(snapshot, "tokens", part, ("episode_id", "step_index", "provenance", *fields), ["version_spans"])
    found = {}
    for row in frame.filter(pl.col("provenance") == "engine").to_dicts():
        index = row["step_index"]
        kept = _without(row, "episode_id", "step_index", "provenance")
        if kept["prefix_step_index"] == (index - 1 if index else None):
            kept["prefix_step_index"] = UNSET
        if all(kept["action_mask"]):
            kept["action_mask"] = None
        if kept["version_spans"] is not None:
            kept["version_spans"] = [tuple(span) for span in msgspec.json.decode(kept["version_spans"])]
        if kept["action_logprobs"] is not None:
            kept["action_logprobs"] = [float(str(value)) for value in np.asarray(kept["action_logprobs"], np.float32)]
        found[row["episode_id"], index] = TokensRecord(**kept)
    return found


def _without(row: Mapping[str, Any], *names: str) -> dict[str, Any]:
    left: Collection[str] = row.keys() - set(names)
    return {name: row[name] for name in row if name in left}
