"""From records to table frames: the one place that knows how an episode becomes rows of three tables."""

from collections.abc import Sequence
from datetime import UTC, datetime
from operator import attrgetter
from typing import Any

import msgspec
import polars as pl
from msgspec import UNSET

from lake import ids
from lake.columns import Column, Table, Type
from lake.records import EpisodeRecord, Identity, SpanRecord, StepRecord, TokensRecord
from lake.tables import EPISODES, SPANS, STEPS, TOKENS

_ENCODER = msgspec.json.Encoder()


def json_text(value: Any) -> str | None:
    """A JSON value as compact text; None stays NULL."""
    return None if value is None else msgspec.json.encode(value).decode()


def episodes_frame(records: Sequence[EpisodeRecord], identities: Sequence[Identity], write_id: int) -> pl.DataFrame:
    """One row per record, columns of `episodes`."""
    columns: dict[str, list[Any]] = {
        "episode_id": [i.episode_id for i in identities],
        "group_id": [i.group_id for i in identities],
        "write_id": [write_id] * len(records),
        "num_steps": [len(r.steps) for r in records],
        "content_hash": [i.content_hash for i in identities],
        "source_id": [i.source_id for i in identities],
        "blob_ids": [None] * len(records),
        "root_episode_id": [_maybe_id(r.root_episode_id) for r in records],
        "parent_episode_id": [_maybe_id(r.parent_episode_id) for r in records],
    }
    return _fill(EPISODES, records, columns)


def steps_frame(records: Sequence[EpisodeRecord], identities: Sequence[Identity], write_id: int) -> pl.DataFrame:
    """One row per step of every record, columns of `steps`."""
    steps_S: list[StepRecord] = []
    columns: dict[str, list[Any]] = {name: [] for name in ("episode_id", "step_index", "group_id", "run_id")}
    for record, identity in zip(records, identities, strict=True):
        n = len(record.steps)
        steps_S += record.steps
        columns["episode_id"] += [identity.episode_id] * n
        columns["group_id"] += [identity.group_id] * n
        columns["run_id"] += [record.run_id] * n
        columns["step_index"] += range(n)
    columns["write_id"] = [write_id] * len(steps_S)
    columns["state_hash"] = [None if step.state is None else ids.text_hash(step.state) for step in steps_S]
    return _fill(STEPS, steps_S, columns)


def spans_frame(records: Sequence[EpisodeRecord], identities: Sequence[Identity], write_id: int) -> pl.DataFrame:
    """One row per span of every record, columns of `spans`."""
    spans: list[SpanRecord] = []
    columns: dict[str, list[Any]] = {name: [] for name in ("episode_id", "group_id", "run_id", "write_id")}
    for record, identity in zip(records, identities, strict=True):
        n = len(record.spans)
        spans += record.spans
        for name, value in (
            ("episode_id", identity.episode_id),
            ("group_id", identity.group_id),
            ("run_id", record.run_id),
            ("write_id", write_id),
        ):
            columns[name] += [value] * n
    return _fill(SPANS, spans, columns)


def tokens_frame(records: Sequence[EpisodeRecord], identities: Sequence[Identity], write_id: int) -> pl.DataFrame:
    """One row per step that carries tokens, columns of `tokens`, provenance `engine`."""
    tokens_S: list[TokensRecord] = []
    columns: dict[str, list[Any]] = {
        name: []
        for name in (
            "episode_id",
            "step_index",
            "group_id",
            "run_id",
            "encoding_id",
            "prefix_step_index",
            "prefix_length",
        )
    }
    for record, identity in zip(records, identities, strict=True):
        carried = [(index, step.tokens) for index, step in enumerate(record.steps) if step.tokens is not None]
        if not carried:
            continue
        encoding_id = ids.key_hash("engine", record.tokenizer, record.chat_template)
        end_S: dict[int, int] = {}
        for index, tokens in carried:
            prefix = (index - 1 if index else None) if tokens.prefix_step_index is UNSET else tokens.prefix_step_index
            length = 0 if prefix is None else end_S[prefix]
            end_S[index] = length + len(tokens.context_ids) + len(tokens.action_ids)
            tokens_S.append(tokens)
            columns["episode_id"].append(identity.episode_id)
            columns["group_id"].append(identity.group_id)
            columns["run_id"].append(record.run_id)
            columns["step_index"].append(index)
            columns["encoding_id"].append(encoding_id)
            columns["prefix_step_index"].append(prefix)
            columns["prefix_length"].append(length)
    mask_S = [t.action_mask if t.action_mask is not None else [True] * len(t.action_ids) for t in tokens_S]
    columns |= {
        "write_id": [write_id] * len(tokens_S),
        "provenance": ["engine"] * len(tokens_S),
        "n_context": [len(t.context_ids) for t in tokens_S],
        "n_action": [len(t.action_ids) for t in tokens_S],
        "n_trained": [sum(mask) for mask in mask_S],
        "has_logprobs": [t.action_logprobs is not None for t in tokens_S],
        "action_mask": mask_S,
    }
    return _fill(TOKENS, tokens_S, columns)


def _fill(table: Table, structs: Sequence[msgspec.Struct], columns: dict[str, list[Any]]) -> pl.DataFrame:
    """The table's frame: given columns as they are, all others from the structs' fields of the same name."""
    schema = table.polars()
    series = []
    for column in table.columns:
        values = columns.get(column.name)
        if values is None:
            values = list(map(attrgetter(column.name), structs))
        series.append(_series(column, values, schema[column.name]))
    return pl.DataFrame(series)


def _series(column: Column, values: list[Any], dtype: pl.DataType) -> pl.Series:
    if column.type is Type.JSON:
        # Bytes that never become a Python text: the cast checks them where they lie.
        encode = _ENCODER.encode
        texts = [None if value is None else encode(value) for value in values]
        return pl.Series(column.name, texts, dtype=pl.Binary).cast(pl.String)
    if column.type is Type.TIME:
        values = [_utc(value) for value in values]
    return pl.Series(column.name, values, dtype=dtype, strict=False)


def _utc(value: datetime | None) -> datetime | None:
    """A time in UTC; one without a zone is taken as UTC."""
    if value is None:
        return None
    return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


def _maybe_id(text: str | None) -> int | None:
    return None if text is None else ids.from_text(text)
