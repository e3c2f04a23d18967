"""Rows without keys: the rule of `lake.formats.base.secrets` for whole columns, before they are written.

A look of the engine at all texts together finds the few that may hold a key; only these are taken apart. The tokens of
a step spell its texts: where one of these loses a key, the step is stored without tokens, and so are those that extend
them. Ids and hashes stay those of the record as it came, so a file that is read again is known as present.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
import polars as pl

from lake import ids
from lake.formats.base.secret_shapes import NAMES, SIGNS, is_quoting, is_speech
from lake.formats.base.secrets import BY_NAME, NO_REQUEST, TEXT_FIELDS, TOKENS_SPELL_KEY, Secrets, has_signs
from lake.tables import TABLES
from lake.tables.columns import Column, Table, Type

_TEXTS = (Type.TEXT, Type.WORD, Type.JSON)
_FEW_BYTES = 200_000
"""Up to which Python looks for itself: Polars takes milliseconds to begin."""
_SHORTEST = 8
"""Bytes of a text that holds a key, with what tells it."""
_NAMES = re.compile(NAMES)


class _Texts(NamedTuple):
    """The texts of a column, each once where they repeat."""

    table: str
    column: Column
    texts: pl.Series


def without_keys_in(name: str, frame: pl.DataFrame) -> pl.DataFrame:
    """Rows of a table without keys and passwords."""
    return _clean_frames({name: frame})[0][name]


def episodes_without_keys(frames: Mapping[str, pl.DataFrame]) -> dict[str, pl.DataFrame]:
    """Rows of new episodes, by table, without keys and without the tokens that spell one."""
    clean, changed = _clean_frames(frames)
    steps_with_keys = _steps_with_keys(frames, changed)
    if steps_with_keys and "tokens" in clean:
        clean["steps"], clean["tokens"] = _without_tokens(clean["steps"], clean["tokens"], steps_with_keys)
    if rows := changed.get(("steps", "state")):
        steps = clean["steps"]
        hashes = steps["state_hash"].to_list()
        for row in rows:
            hashes[row] = ids.text_hash(steps["state"][row])
        clean["steps"] = steps.with_columns(pl.Series("state_hash", hashes, dtype=pl.Int64))
    return clean


_Changed = dict[tuple[str, str], list[int]]
"""Table and column -> the rows that lost a key."""


def _clean_frames(frames: Mapping[str, pl.DataFrame]) -> tuple[dict[str, pl.DataFrame], _Changed]:
    columns = [texts for name, frame in frames.items() for texts in _texts(TABLES[name], frame)]
    by_shape = _candidates(columns, SIGNS)
    by_name = _candidates([texts for texts in columns if _has_settings(texts.column)], (NAMES,))
    clean, changed = dict(frames), _Changed()
    for table, name in dict.fromkeys((*by_shape, *by_name)):
        secrets = NO_REQUEST if (table, name) in by_shape else BY_NAME
        candidates = by_shape.get((table, name), set()) | by_name.get((table, name), set())
        column, cells = TABLES[table].column(name), clean[table][name]
        clean_values = {text: _without_keys(text, column, secrets) for text in candidates}
        clean_values = {text: clean_text for text, clean_text in clean_values.items() if clean_text != text}
        if not clean_values:
            continue
        changed[table, name] = cells.is_in(list(clean_values)).fill_null(value=False).arg_true().to_list()
        values = cells.to_list()
        for row in changed[table, name]:
            values[row] = clean_values[values[row]]
        clean[table] = clean[table].with_columns(pl.Series(name, values, dtype=cells.dtype))
    return clean, changed


def _texts(table: Table, frame: pl.DataFrame) -> Iterator[_Texts]:
    for column in table.columns:
        if column.type not in _TEXTS or column.values or column.name not in frame.columns:
            continue
        cells = frame[column.name]
        if cells.null_count() < cells.len():
            cells = cells.cast(pl.String)
            yield _Texts(table.name, column, cells.unique() if column.type is Type.WORD else cells)


def _has_settings(column: Column) -> bool:
    """Whether names count in a column."""
    return is_quoting(column.name) or (column.type is Type.JSON and not is_speech(column.name))


def _candidates(columns: list[_Texts], signs: tuple[str, ...]) -> dict[tuple[str, str], set[str]]:
    """The texts that may hold a key, by table and column."""
    candidates: dict[tuple[str, str], set[str]] = {}
    if not columns:
        return candidates
    together = pl.concat([texts.texts.rename("") for texts in columns], rechunk=False)
    mask = together.is_null() & False
    if int(together.str.len_bytes().sum() or 0) <= _FEW_BYTES:
        if (_NAMES.search if signs == (NAMES,) else has_signs)("\n".join(together.drop_nulls())):
            mask = together.is_not_null()
    else:
        long = together.filter(together.str.len_bytes() >= _SHORTEST)  # most texts are short, and each takes its time
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


def _without_keys(text: str, column: Column, secrets: Secrets) -> str:
    value: Any = text
    if column.type is Type.JSON:
        with suppress(msgspec.DecodeError):
            value = msgspec.json.decode(text)
    clean = secrets.without_keys(value, column.name)
    if clean is value or clean == value:
        return text
    return str(clean) if value is text else msgspec.json.encode(clean).decode()


def _steps_with_keys(frames: Mapping[str, pl.DataFrame], changed: _Changed) -> set[tuple[int, int]]:
    """Steps whose texts lost a key: episode and index."""
    of_steps = {
        (frames["steps"]["episode_id"][row], frames["steps"]["step_index"][row])
        for name in TEXT_FIELDS
        for row in changed.get(("steps", name), ())
    }
    return of_steps | {
        (frames["episodes"]["episode_id"][row], 0) for row in changed.get(("episodes", "initial_messages"), ())
    }


def _without_tokens(
    steps: pl.DataFrame, tokens: pl.DataFrame, steps_with_keys: set[tuple[int, int]]
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Steps that say why they have no tokens, and the tokens that are left."""
    without = set(steps_with_keys)
    remains = []
    for episode_id, step, prefix in tokens.select("episode_id", "step_index", "prefix_step_index").iter_rows():
        if (episode_id, prefix) in without:
            without.add((episode_id, step))
        remains.append((episode_id, step) not in without)
    mask = pl.Series(remains, dtype=pl.Boolean)
    gone = set(tokens.filter(~mask).select("episode_id", "step_index").iter_rows())
    extra = [
        _with_reason(text) if key in gone else text
        for text, *at in steps.select("extra", "episode_id", "step_index").iter_rows()
        for key in [tuple(at)]
    ]
    return steps.with_columns(pl.Series("extra", extra, dtype=pl.String)), tokens.filter(mask)


def _with_reason(extra: str | None) -> str:
    known: dict[str, Any] = msgspec.json.decode(extra) if extra else {}
    return msgspec.json.encode(known | {"tokens_left_out": TOKENS_SPELL_KEY}).decode()
