"""How an episode becomes table rows: frames of columns, payloads in `blobs`, and no keys or passwords.

**Blobs.** Images and texts over 64 KB move to `blobs`, and the row refers to them by hash. In a JSON column, the text
`blob:sha256:<64 digits>` replaces a long text, such as an image as a data URI. It replaces a whole document if the
document is long without a long text, such as a list of tools. A step's `state` and `action` stay in the row for SQL and
credit. `inline_blobs` restores everything, byte for byte. A write attempt stores a payload once, and only
for its own episodes. So erasure need not look at other write attempts to know whether a payload is still needed.

**Keys.** The rule of `lake.secrets` applies to whole columns before they are written. One search over all
texts finds the few that may hold a key, and only those are decoded. Tokens spell a step's texts. So a step whose text
loses a key is stored without tokens, and so are the steps that extend it. Ids and hashes stay those of the original
record, so that a file that is read again counts as present.
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
import polars as pl
from msgspec import UNSET

from lake import ids
from lake.read.parquet import collect_rows
from lake.read.snapshot import Snapshot
from lake.records import EpisodeRecord, Identity, SpanRecord, StepRecord, TokensRecord, identify
from lake.secrets import (
    BY_NAME,
    NAMES,
    NO_REQUEST,
    SIGNS,
    TEXT_FIELDS,
    TOKENS_SPELL_KEY,
    Secrets,
    has_signs,
    is_quoting,
    is_speech,
)
from lake.tables import BLOBS, EPISODES, SPANS, STEPS, TABLES, TOKENS
from lake.tables.columns import Column, Table, Type

_TEXTS = (Type.TEXT, Type.WORD, Type.JSON)
_FEW_BYTES = 200_000
"""Up to this size Python searches, because Polars takes milliseconds to start."""
_SHORTEST = 8
"""Minimum bytes of a text that holds a key and its sign."""
_NAMES = re.compile(NAMES)


class _Texts(NamedTuple):
    """The texts of a column; those of a WORD column without repetitions."""

    table: str
    column: Column
    texts: pl.Series


def remove_table_keys(name: str, frame: pl.DataFrame) -> pl.DataFrame:
    """Return the rows of a table without keys and passwords."""
    return _clean_frames({name: frame})[0][name]


def remove_episode_keys(frames: Mapping[str, pl.DataFrame]) -> dict[str, pl.DataFrame]:
    """Return the rows of new episodes, by table, without keys and without the tokens that spell one."""
    clean, changed = _clean_frames(frames)
    steps_with_keys = {
        (frames["steps"]["episode_id"][row], frames["steps"]["step_index"][row])
        for name in TEXT_FIELDS
        for row in changed.get(("steps", name), ())
    }
    steps_with_keys |= {
        (frames["episodes"]["episode_id"][row], 0) for row in changed.get(("episodes", "initial_messages"), ())
    }
    if steps_with_keys and "tokens" in clean:
        clean["steps"], clean["tokens"] = _remove_tokens(clean["steps"], clean["tokens"], steps_with_keys)
    if rows := changed.get(("steps", "state")):
        steps = clean["steps"]
        hashes = steps["state_hash"].to_list()
        for row in rows:
            hashes[row] = ids.text_hash(steps["state"][row])
        clean["steps"] = steps.with_columns(pl.Series("state_hash", hashes, dtype=pl.Int64))
    return clean


_Changed = dict[tuple[str, str], list[int]]
"""Table and column -> positions of the rows that lost a key."""


def _clean_frames(frames: Mapping[str, pl.DataFrame]) -> tuple[dict[str, pl.DataFrame], _Changed]:
    columns = [texts for name, frame in frames.items() for texts in _collect_texts(TABLES[name], frame)]
    by_shape = _find_candidates(columns, SIGNS)
    # In columns of settings, a name such as `api_key` shows that its value is a key.
    settings = [
        texts
        for texts in columns
        if is_quoting(texts.column.name) or (texts.column.type is Type.JSON and not is_speech(texts.column.name))
    ]
    by_name = _find_candidates(settings, (NAMES,))
    clean, changed = dict(frames), _Changed()
    for table, name in dict.fromkeys((*by_shape, *by_name)):
        secrets = NO_REQUEST if (table, name) in by_shape else BY_NAME
        candidates = by_shape.get((table, name), set()) | by_name.get((table, name), set())
        column, cells = TABLES[table].column(name), clean[table][name]
        clean_texts = {text: _clean_text(text, column, secrets) for text in candidates}
        clean_texts = {text: clean_text for text, clean_text in clean_texts.items() if clean_text != text}
        if not clean_texts:
            continue
        changed[table, name] = cells.is_in(list(clean_texts)).fill_null(value=False).arg_true().to_list()
        texts = cells.to_list()
        for row in changed[table, name]:
            texts[row] = clean_texts[texts[row]]
        clean[table] = clean[table].with_columns(pl.Series(name, texts, dtype=cells.dtype))
    return clean, changed


def _collect_texts(table: Table, frame: pl.DataFrame) -> Iterator[_Texts]:
    for column in table.columns:
        if column.type not in _TEXTS or column.values or column.name not in frame.columns:
            continue
        cells = frame[column.name]
        if cells.null_count() < cells.len():
            cells = cells.cast(pl.String)
            yield _Texts(table.name, column, cells.unique() if column.type is Type.WORD else cells)


def _find_candidates(columns: list[_Texts], signs: tuple[str, ...]) -> dict[tuple[str, str], set[str]]:
    """Return the texts that may hold a key, by table and column."""
    candidates: dict[tuple[str, str], set[str]] = {}
    if not columns:
        return candidates
    together = pl.concat([texts.texts.rename("") for texts in columns], rechunk=False)
    mask = together.is_null() & False
    if int(together.str.len_bytes().sum() or 0) <= _FEW_BYTES:
        if (_NAMES.search if signs == (NAMES,) else has_signs)("\n".join(together.drop_nulls())):
            mask = together.is_not_null()
    else:
        long = together.filter(together.str.len_bytes() >= _SHORTEST)  # most texts are short, and each costs time
        for sign in signs:
            if long.str.contains(sign).any():
                mask |= together.str.contains(sign)
    start = 0
    for texts in columns:
        rows = mask.slice(start, texts.texts.len()).fill_null(value=False).arg_true()
        if not rows.is_empty():
            candidates.setdefault((texts.table, texts.column.name), set()).update(texts.texts.gather(rows).drop_nulls())
        start += texts.texts.len()
    return candidates


def _clean_text(text: str, column: Column, secrets: Secrets) -> str:
    document: Any = text
    if column.type is Type.JSON:
        with suppress(msgspec.DecodeError):
            document = msgspec.json.decode(text)
    clean = secrets.remove_keys(document, column.name)
    if clean is document or clean == document:
        return text
    return str(clean) if document is text else msgspec.json.encode(clean).decode()


def _remove_tokens(
    steps: pl.DataFrame, tokens: pl.DataFrame, steps_with_keys: set[tuple[int, int]]
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return steps whose `extra` names the reason for missing tokens, and the remaining tokens."""
    without = set(steps_with_keys)
    remains = []
    for episode_id, step, prefix in tokens.select("episode_id", "step_index", "prefix_step_index").iter_rows():
        if (episode_id, prefix) in without:
            without.add((episode_id, step))
        remains.append((episode_id, step) not in without)
    mask = pl.Series(remains, dtype=pl.Boolean)
    removed = set(tokens.filter(~mask).select("episode_id", "step_index").iter_rows())
    extras: list[str | None] = []
    for text, *key in steps.select("extra", "episode_id", "step_index").iter_rows():
        if tuple(key) in removed:
            extra: dict[str, Any] = msgspec.json.decode(text) if text else {}
            extras.append(encode_json(extra | {"tokens_left_out": TOKENS_SPELL_KEY}))
        else:
            extras.append(text)
    return steps.with_columns(pl.Series("extra", extras, dtype=pl.String)), tokens.filter(mask)


LIMIT = 64 << 10
"""Maximum bytes of UTF-8 that stay in a row."""
_REFERENCE = re.compile(r'"blob:sha256:([0-9a-f]{64})"')
_DOCUMENT, _TEXT = "application/json", "text/plain"


class Blob(msgspec.Struct, frozen=True):
    """A payload that is stored in `blobs`."""

    sha256: str
    media_type: str
    """application/json for a whole document; anything else for a text."""
    payload: bytes

    @property
    def blob_id(self) -> int:
        """Its key: the first 63 bits of the hash."""
        return int(self.sha256[:16], 16) & ids.MASK


def extract_blobs(
    episodes: pl.DataFrame, steps: pl.DataFrame, tables: tuple[Table, Table]
) -> tuple[pl.DataFrame, pl.DataFrame, list[Blob]]:
    """Move large payloads out of frames of `episodes` and `steps`; `episodes.blob_ids` names them."""
    blobs: dict[int, Blob] = {}
    used: dict[int, set[int]] = {}
    frames = [_move_payloads(frame, table, blobs, used) for frame, table in zip((episodes, steps), tables, strict=True)]
    if used:
        lists = [sorted(used[key]) if key in used else None for key in episodes["episode_id"]]
        frames[0] = frames[0].with_columns(pl.Series("blob_ids", lists, dtype=pl.List(pl.Int64)))
    return frames[0], frames[1], list(blobs.values())


def build_blobs_frame(blobs: Sequence[Blob], write_id: int) -> pl.DataFrame:
    """Return the rows of `blobs`."""
    columns = {
        "blob_id": [blob.blob_id for blob in blobs],
        "write_id": [write_id] * len(blobs),
        "sha256": [blob.sha256 for blob in blobs],
        "media_type": [blob.media_type for blob in blobs],
        "n_bytes": [len(blob.payload) for blob in blobs],
        "payload": [blob.payload for blob in blobs],
    }
    return pl.DataFrame(columns, schema=BLOBS.polars())


def inline_blobs(snapshot: Snapshot, frame: pl.DataFrame, columns: Sequence[str]) -> pl.DataFrame:
    """Replace the references in JSON columns by the payloads.

    A text that looks like a reference stays unchanged if the lake has no such payload.
    """

    def find(hashes: list[str]) -> pl.DataFrame:
        rows = snapshot.scan("blobs").filter(pl.col("sha256").is_in(hashes))
        return collect_rows(rows.select("sha256", "media_type", "payload"))

    return put_back(frame, columns, find)


def put_back(frame: pl.DataFrame, columns: Sequence[str], find: Callable[[list[str]], pl.DataFrame]) -> pl.DataFrame:
    """Replace references like `inline_blobs`; `find` returns sha256, media_type and payload for some hashes."""
    hashes = {
        sha256
        for name in columns
        for text in frame[name].filter(frame[name].str.contains('"blob:sha256:', literal=True).fill_null(value=False))
        for sha256 in _REFERENCE.findall(text)
    }
    if not hashes:
        return frame
    payloads = {
        # A document replaced raw JSON, a text replaced a JSON string.
        sha256: text if media_type == _DOCUMENT else msgspec.json.encode(text).decode()
        for sha256, media_type, payload in find(sorted(hashes)).iter_rows()
        for text in [payload.decode()]
    }

    return frame.with_columns(
        pl.Series(
            name,
            [(text and _REFERENCE.sub(lambda match: payloads.get(match[1], match[0]), text)) for text in frame[name]],
            dtype=pl.String,
        )
        for name in columns
    )


def _move_payloads(
    frame: pl.DataFrame, table: Table, blobs: dict[int, Blob], used: dict[int, set[int]]
) -> pl.DataFrame:
    for column in table.columns:
        if column.type is not Type.JSON or column.name not in frame.columns:
            continue
        cells = frame[column.name]
        long = (cells.str.len_bytes() > LIMIT).fill_null(value=False).arg_true()
        if long.is_empty():
            continue
        texts = cells.to_list()
        for row in long:
            moved: list[Blob] = []
            text = msgspec.json.encode(_move_texts(msgspec.json.decode(texts[row]), moved)).decode()
            if len(text.encode()) > LIMIT:
                # The document is too long even without its long texts, so all of it moves.
                moved.clear()
                text = msgspec.json.encode(_move(texts[row], _DOCUMENT, moved)).decode()
            texts[row] = text
            blobs.update((blob.blob_id, blob) for blob in moved)
            used.setdefault(frame["episode_id"][row], set()).update(blob.blob_id for blob in moved)
        frame = frame.with_columns(pl.Series(column.name, texts, dtype=pl.String))
    return frame


def _move_texts(node: Any, moved: list[Blob]) -> Any:
    """Replace the long texts of a JSON document by references, and append their payloads to `moved`."""
    if isinstance(node, dict):
        return {key: _move_texts(child, moved) for key, child in node.items()}
    if isinstance(node, list):
        return [_move_texts(child, moved) for child in node]
    if isinstance(node, str) and len(node) > LIMIT // 4 and len(node.encode()) > LIMIT:
        # A data URI names its media type; the payload is the complete URI.
        match = re.match(r"data:([\w.+-]+/[\w.+-]+)[;,]", node)
        return _move(node, match[1] if match and match[1] != _DOCUMENT else _TEXT, moved)
    return node


def _move(text: str, media_type: str, moved: list[Blob]) -> str:
    """Append a text to `moved` and return the reference to it."""
    payload = text.encode()
    blob = Blob(hashlib.sha256(payload).hexdigest(), media_type, payload)
    moved.append(blob)
    return f"blob:sha256:{blob.sha256}"


_ENCODER = msgspec.json.Encoder()


def encode_json(document: Any) -> str | None:
    """Encode a JSON value as compact text; None stays NULL."""
    return None if document is None else msgspec.json.encode(document).decode()


def build_episodes_frame(
    records: Sequence[EpisodeRecord], identities: Sequence[Identity], write_id: int
) -> pl.DataFrame:
    """Return one row per record, with the columns of `episodes`."""
    columns: dict[str, list[Any]] = {
        "episode_id": [i.episode_id for i in identities],
        "group_id": [i.group_id for i in identities],
        "write_id": [write_id] * len(records),
        "num_steps": [len(r.steps) for r in records],
        "content_hash": [i.content_hash for i in identities],
        "source_id": [i.source_id for i in identities],
        "blob_ids": [None] * len(records),
        "root_episode_id": [None if r.root_episode_id is None else ids.from_text(r.root_episode_id) for r in records],
        "parent_episode_id": [
            None if r.parent_episode_id is None else ids.from_text(r.parent_episode_id) for r in records
        ],
    }
    return _fill(EPISODES, records, columns)


def build_steps_frame(records: Sequence[EpisodeRecord], identities: Sequence[Identity], write_id: int) -> pl.DataFrame:
    """Return one row per step of every record, with the columns of `steps`."""
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


def list_stored_decisions(steps: Sequence[StepRecord]) -> list[tuple[str, str | None]]:
    """Return the action and the tool calls of steps as the table has them."""
    columns = {"episode_id": [0] * len(steps), "action": [step.action for step in steps]}
    columns["tool_calls"] = [encode_json(step.tool_calls) for step in steps]
    schema = {name: STEPS.polars()[name] for name in columns}
    frame = _move_payloads(remove_table_keys("steps", pl.DataFrame(columns, schema=schema)), STEPS, {}, {})
    return list(frame.select("action", "tool_calls").iter_rows())


def build_spans_frame(records: Sequence[EpisodeRecord], identities: Sequence[Identity], write_id: int) -> pl.DataFrame:
    """Return one row per span of every record, with the columns of `spans`."""
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


def build_tokens_frame(records: Sequence[EpisodeRecord], identities: Sequence[Identity], write_id: int) -> pl.DataFrame:
    """Return one row per step with tokens, with the columns of `tokens`; the provenance is `engine`."""
    tokens_S: list[TokensRecord] = []
    columns: dict[str, list[Any]] = {name: [] for name in ("episode_id", "group_id", "run_id")}
    columns |= {name: [] for name in ("step_index", "encoding_id", "prefix_step_index", "prefix_length")}
    for record, identity in zip(records, identities, strict=True):
        with_tokens = [(index, step.tokens) for index, step in enumerate(record.steps) if step.tokens is not None]
        if not with_tokens:
            continue
        encoding_id = ids.hash_engine_encoding(record.tokenizer, record.chat_template)
        end_S: dict[int, int] = {}
        for index, tokens in with_tokens:
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


_SCORE_NAMES = ("episode_id", "step_index", "scorer", "value", "reason", "error", "metrics")
SCORE_COLUMNS: dict[str, pl.DataType] = {name: TABLES["scores"].polars()[name] for name in _SCORE_NAMES}
"""Columns of a score before it is written."""


class ScoreRows:
    """Collects the scores of records until they are written."""

    def __init__(self) -> None:
        self._columns: dict[str, list[Any]] = {name: [] for name in SCORE_COLUMNS}

    def __len__(self) -> int:
        return len(self._columns["episode_id"])

    def add(self, record: EpisodeRecord) -> None:
        """Add the scores of a record whose run and attempt are set."""
        episode_id = identify(record, record.run_id or "").episode_id
        for score in record.scores:
            row = (episode_id, score.step_index, score.scorer, score.value, score.reason, score.error)
            for cells, cell in zip(self._columns.values(), (*row, encode_json(score.metrics)), strict=True):
                cells.append(cell)

    def extend(self, rows: pl.DataFrame) -> None:
        """Add rows that another collector returned from `drain`."""
        for name, cells in self._columns.items():
            cells.extend(rows[name].to_list())

    def drain(self) -> pl.DataFrame:
        """Return all scores as rows without keys, and forget them."""
        frame = remove_table_keys("scores", pl.DataFrame(self._columns, schema=SCORE_COLUMNS))
        for cells in self._columns.values():
            cells.clear()
        return frame


def _fill(table: Table, structs: Sequence[msgspec.Struct], columns: dict[str, list[Any]]) -> pl.DataFrame:
    """Build a table's frame; missing columns come from the structs' fields of the same name."""
    schema = table.polars()
    series = []
    for column in table.columns:
        cells = columns.get(column.name)
        if cells is None:
            cells = list(map(attrgetter(column.name), structs))
        series.append(_build_series(column, cells, schema[column.name]))
    return pl.DataFrame(series)


def _build_series(column: Column, cells: list[Any], dtype: pl.DataType) -> pl.Series:
    if cells and cells[0] is None and cells.count(None) == len(cells):  # most columns: no need to convert
        return pl.Series(column.name, [None], dtype=dtype).new_from_index(0, len(cells))
    if column.type is Type.JSON:
        # Bytes never become Python texts: the cast checks them in place.
        encode = _ENCODER.encode
        texts = [None if cell is None else encode(cell) for cell in cells]
        return pl.Series(column.name, texts, dtype=pl.Binary).cast(pl.String)
    if column.type is Type.TIME:
        # A time without a zone is in UTC.
        cells = [cell and (cell.astimezone(UTC) if cell.tzinfo else cell.replace(tzinfo=UTC)) for cell in cells]
    return pl.Series(column.name, cells, dtype=dtype, strict=False)
