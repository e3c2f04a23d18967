"""From records to table frames: the one place that knows how an episode becomes rows.

Payloads too big for a row, images and texts over 64 KB, move to `blobs` and are referred to by hash. In a JSON column,
a long text (an image as a data URI is one) is replaced by the text `blob:sha256:<64 digits>`, and a document that is
long without holding a long text (a list of tools) is replaced as a whole. What a step's `state` and `action` say stays
in the row: they are what SQL and credit look at. `inlined` puts everything back, byte for byte.

A write attempt stores a payload once, for its own episodes and for no others: so whether a payload is still needed is
known without looking at any other write, and erasure races with nobody.
"""

import hashlib
import re
from collections.abc import Callable, Sequence
from datetime import UTC
from operator import attrgetter
from typing import Any

import msgspec
import polars as pl
from msgspec import UNSET

from lake import ids
from lake.read.parquet import collected
from lake.read.snapshot import Snapshot
from lake.records import EpisodeRecord, Identity, SpanRecord, StepRecord, TokensRecord, identify
from lake.tables import BLOBS, EPISODES, SPANS, STEPS, TABLES, TOKENS
from lake.tables.columns import Column, Table, Type
from lake.write.secret_columns import without_keys_in

LIMIT = 64 << 10
"""Bytes of UTF-8 that stay in a row."""
_REFERENCE = re.compile(r'"blob:sha256:([0-9a-f]{64})"')
_DOCUMENT, _TEXT = "application/json", "text/plain"


class Blob(msgspec.Struct, frozen=True):
    """A payload that was moved out."""

    sha256: str
    media_type: str
    """application/json: it stands for a whole document; anything else: for a text."""
    payload: bytes

    @property
    def blob_id(self) -> int:
        """Its key: the first 63 bits of the hash."""
        return int(self.sha256[:16], 16) & ids.MASK


def moved_out(
    episodes: pl.DataFrame, steps: pl.DataFrame, tables: tuple[Table, Table]
) -> tuple[pl.DataFrame, pl.DataFrame, list[Blob]]:
    """Move big payloads out of frames of `episodes` and `steps`; `episodes.blob_ids` names them."""
    blobs: dict[int, Blob] = {}
    used: dict[int, set[int]] = {}
    frames = [_without(frame, table, blobs, used) for frame, table in zip((episodes, steps), tables, strict=True)]
    if used:
        lists = [sorted(used[key]) if key in used else None for key in episodes["episode_id"]]
        frames[0] = frames[0].with_columns(pl.Series("blob_ids", lists, dtype=pl.List(pl.Int64)))
    return frames[0], frames[1], list(blobs.values())


def blobs_frame(blobs: Sequence[Blob], write_id: int) -> pl.DataFrame:
    """Rows of `blobs`."""
    columns = {
        "blob_id": [blob.blob_id for blob in blobs],
        "write_id": [write_id] * len(blobs),
        "sha256": [blob.sha256 for blob in blobs],
        "media_type": [blob.media_type for blob in blobs],
        "n_bytes": [len(blob.payload) for blob in blobs],
        "payload": [blob.payload for blob in blobs],
    }
    return pl.DataFrame(columns, schema=BLOBS.polars())


def inlined(snapshot: Snapshot, frame: pl.DataFrame, columns: Sequence[str]) -> pl.DataFrame:
    """The frame with references in JSON columns replaced by what they stand for.

    A text that looks like a reference, but to nothing the lake holds, stays as it is.
    """

    def find(hashes: list[str]) -> pl.DataFrame:
        rows = snapshot.scan("blobs").filter(pl.col("sha256").is_in(hashes))
        return collected(rows.select("sha256", "media_type", "payload"))

    return put_back(frame, columns, find)


def put_back(frame: pl.DataFrame, columns: Sequence[str], find: Callable[[list[str]], pl.DataFrame]) -> pl.DataFrame:
    """As `inlined`; `find` gives the rows (sha256, media_type, payload) of `blobs` for some hashes."""
    found = {
        sha256
        for name in columns
        for text in frame[name].filter(frame[name].str.contains('"blob:sha256:', literal=True).fill_null(value=False))
        for sha256 in _REFERENCE.findall(text)
    }
    if not found:
        return frame
    known = {
        # A document stood as it is, a text as a JSON string.
        sha256: text if media_type == _DOCUMENT else msgspec.json.encode(text).decode()
        for sha256, media_type, payload in find(sorted(found)).iter_rows()
        for text in [payload.decode()]
    }

    def back(text: str | None) -> str | None:
        return text and _REFERENCE.sub(lambda match: known.get(match[1], match[0]), text)

    return frame.with_columns(
        pl.Series(name, [back(text) for text in frame[name]], dtype=pl.String) for name in columns
    )


def _without(frame: pl.DataFrame, table: Table, blobs: dict[int, Blob], used: dict[int, set[int]]) -> pl.DataFrame:
    for column in table.columns:
        if column.type is not Type.JSON:
            continue
        texts = frame[column.name]
        long = (texts.str.len_bytes() > LIMIT).fill_null(value=False).arg_true()
        if long.is_empty():
            continue
        values = texts.to_list()
        for row in long:
            moved: list[Blob] = []
            text = msgspec.json.encode(_replaced(msgspec.json.decode(values[row]), moved)).decode()
            if len(text.encode()) > LIMIT:
                # Without its long texts it is still too long: it moves as a whole.
                moved.clear()
                text = msgspec.json.encode(_moved(values[row], _DOCUMENT, moved)).decode()
            values[row] = text
            blobs.update((blob.blob_id, blob) for blob in moved)
            used.setdefault(frame["episode_id"][row], set()).update(blob.blob_id for blob in moved)
        frame = frame.with_columns(pl.Series(column.name, values, dtype=pl.String))
    return frame


def _replaced(value: Any, moved: list[Blob]) -> Any:
    if isinstance(value, dict):
        return {key: _replaced(item, moved) for key, item in value.items()}
    if isinstance(value, list):
        return [_replaced(item, moved) for item in value]
    if isinstance(value, str) and len(value) > LIMIT // 4 and len(value.encode()) > LIMIT:
        # A data URI says what it is; its payload is the URI as it stood.
        found = re.match(r"data:([\w.+-]+/[\w.+-]+)[;,]", value)
        return _moved(value, found[1] if found and found[1] != _DOCUMENT else _TEXT, moved)
    return value


def _moved(text: str, media_type: str, moved: list[Blob]) -> str:
    payload = text.encode()
    blob = Blob(hashlib.sha256(payload).hexdigest(), media_type, payload)
    moved.append(blob)
    return f"blob:sha256:{blob.sha256}"


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
    columns: dict[str, list[Any]] = {name: [] for name in ("episode_id", "group_id", "run_id")}
    for record, identity in zip(records, identities, strict=True):
        n = len(record.spans)
        spans += record.spans
        columns["episode_id"] += [identity.episode_id] * n
        columns["group_id"] += [identity.group_id] * n
        columns["run_id"] += [record.run_id] * n
    columns["write_id"] = [write_id] * len(spans)
    return _fill(SPANS, spans, columns)


def tokens_frame(records: Sequence[EpisodeRecord], identities: Sequence[Identity], write_id: int) -> pl.DataFrame:
    """One row per step that carries tokens, columns of `tokens`, provenance `engine`."""
    tokens_S: list[TokensRecord] = []
    columns: dict[str, list[Any]] = {name: [] for name in ("episode_id", "group_id", "run_id")}
    columns |= {name: [] for name in ("step_index", "encoding_id", "prefix_step_index", "prefix_length")}
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


_OF_A_SCORE = ("episode_id", "step_index", "scorer", "value", "reason", "error", "metrics")
SCORE_COLUMNS: dict[str, pl.DataType] = {name: TABLES["scores"].polars()[name] for name in _OF_A_SCORE}
"""What is known of a score before it is written."""


class ScoreRows:
    """Scores that came with records, collected until they are written."""

    def __init__(self) -> None:
        self._columns: dict[str, list[Any]] = {name: [] for name in SCORE_COLUMNS}

    def __len__(self) -> int:
        return len(self._columns["episode_id"])

    def add(self, record: EpisodeRecord) -> None:
        """Add those of a record that has its run and its attempt."""
        episode_id = identify(record, record.run_id or "").episode_id
        for score in record.scores:
            row = (episode_id, score.step_index, score.scorer, score.value, score.reason, score.error)
            for values, value in zip(self._columns.values(), (*row, json_text(score.metrics)), strict=True):
                values.append(value)

    def extend(self, rows: pl.DataFrame) -> None:
        """Add rows that another one had `taken`."""
        for name, values in self._columns.items():
            values.extend(rows[name].to_list())

    def taken(self) -> pl.DataFrame:
        """All of them as rows, of which this one is rid."""
        frame = without_keys_in("scores", pl.DataFrame(self._columns, schema=SCORE_COLUMNS))
        for values in self._columns.values():
            values.clear()
        return frame


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
    if values and values[0] is None and values.count(None) == len(values):  # most columns: no need to convert
        return pl.Series(column.name, [None], dtype=dtype).new_from_index(0, len(values))
    if column.type is Type.JSON:
        # Bytes that never become a Python text: the cast checks them where they lie.
        encode = _ENCODER.encode
        texts = [None if value is None else encode(value) for value in values]
        return pl.Series(column.name, texts, dtype=pl.Binary).cast(pl.String)
    if column.type is Type.TIME:
        # A time without a zone is taken as UTC.
        values = [v and (v.astimezone(UTC) if v.tzinfo else v.replace(tzinfo=UTC)) for v in values]
    return pl.Series(column.name, values, dtype=dtype, strict=False)


def _maybe_id(text: str | None) -> int | None:
    return None if text is None else ids.from_text(text)
