"""Rows of a SELECT (`trajlake ingest --query FILE.sql`) or of a frame: one episode, step or message per row.

.. code-block:: text

    episodes   has `messages`: a list of chat messages, or JSON text of one (`lake.formats.chat.messages` defines how
               they become decisions); `step_rewards`: a number or null for each decision
    steps      has `action`; `state`, `reward` and the other fields of a step in docs/reference/jsonl.md but `tokens`
    messages   has `role`; `content`, `tool_calls`, `tool_call_id`, `name`, `reasoning_content`, `is_error`; `reward` of
               an assistant's message belongs to its step; other columns stay with the message

    episode    identifies the rows of one episode (steps, messages); else run_id, task_id, rollout_index, attempt,
               agent_id, collection_round and seed do
    task_id    else the value of `episode`, else the number of the row
    rollout_index   else rows of a task are numbered in their order
    step_index, message_index   the order inside an episode; else the order of the rows
    scores     {name: number} or a list of {"scorer", "value", ...}
    any other field of an episode in docs/reference/jsonl.md, of its first row that has it; in `steps`, a name that a
    step also has belongs to the step

Other names are stored in `extra`: of the episode (episodes), or of the step (steps). NULL means not given. Messages
about faults contain the number of the row, from 0. DuckDB runs the query, with all its functions. A query is code of
the person who runs it, and reads what that person may read: the format is never recognised, only named.
"""

import json
import pickle
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from lake.errors import FormatError, QueryError, UsageError
from lake.formats.base.fields import as_object
from lake.formats.base.format import Format, Item
from lake.formats.base.json_array import Element
from lake.formats.base.rows import (
    ShapeError,
    UnreadableCell,
    convert_value,
    explain_error,
    group_pieces,
    read_batch_rows,
    read_parquet_rows,
    to_jsonable,
)
from lake.formats.base.source import Input, Meter
from lake.formats.chat.messages import check_message, parse_chat
from lake.records import EpisodeRecord, Reject, ScoreRecord, StepRecord, printable

if TYPE_CHECKING:
    import duckdb

# ---------------------------------------------------------------- shapes of rows

Shape = Literal["episodes", "steps", "messages"]
SHAPES: dict[Shape, str] = {"episodes": "messages", "messages": "role", "steps": "action"}
"""Shape -> its required column."""
_KEY = ("run_id", "task_id", "rollout_index", "attempt", "agent_id", "collection_round", "seed")
_EPISODE = frozenset(EpisodeRecord.__struct_fields__) - {"steps", "spans", "scores", "source_format", "source_uri"}
# Not `tokens`: rows cannot distinguish an absent `prefix_step_index` from a null one.
_STEP = frozenset(StepRecord.__struct_fields__) - {"tokens"}
_DOCUMENTS = frozenset(
    (
        *("messages", "step_rewards", "tool_calls", "context", "scores", "ground_truth", "tools"),
        *("initial_messages", "final_observation", "sampling", "extra"),
    )
)
"""Columns that may hold JSON text of a list or an object."""
_ROW_COLUMNS = frozenset(("episode", "scores"))
_MESSAGE = frozenset(("role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content", "is_error"))
_NOT_MESSAGE = _EPISODE | _ROW_COLUMNS | {"message_index", "reward"}
_COLUMNS: dict[Shape, frozenset[str]] = {
    "episodes": _EPISODE | _ROW_COLUMNS | {"messages", "step_rewards"},
    "steps": _EPISODE | _ROW_COLUMNS | _STEP | {"step_index"},
    "messages": _MESSAGE | _NOT_MESSAGE,
}
"""Shape -> its columns."""
_CLOSE = 0.7
"""Similarity from which an unknown name suggests a known one."""
_FIELD = re.compile(r"`\$\.(\w+)")
_encode, _decode = msgspec.json.Encoder(enc_hook=str).encode, msgspec.json.Decoder().decode
_Row = dict[str, Any]


def choose_shape(columns: Iterable[str], name: str | None = None) -> Shape:
    """Return the shape of rows with some columns. Raises UsageError: they have no shape, or not the shape `name`."""
    present = set(columns)
    for shape, column in SHAPES.items():
        if (name is None or name == shape) and column in present:
            return shape
    valid = "; ".join(f"{shape}: a column `{column}`" for shape, column in SHAPES.items())
    needed = f"rows of the shape {name!r}" if name is not None else "rows of one of three shapes"
    raise UsageError(f"{needed} are needed ({valid}); there are: {', '.join(columns)}")


def describe_unknown_columns(columns: Iterable[str], shape: Shape) -> str:
    """Describe the columns without a meaning, where they are stored, and similar names; empty without any."""
    unknown = [column for column in columns if column not in _COLUMNS[shape]]
    free = sorted(_COLUMNS[shape] - set(columns))
    names = [
        printable(column) + "".join(f" ({close}?)" for close in get_close_matches(column, free, 1, _CLOSE))
        for column in unknown
    ]
    where = "with their message" if shape == "messages" else "in extra"
    return f"columns without a meaning here, kept {where}: {', '.join(names)}" if names else ""


def read_rows(rows: Iterable[_Row], shape: Shape, file: Input, name: str) -> Iterator[Item]:
    """Read the records and rejects of rows; a position is the number of an episode's first row."""

    def convert(numbers: Sequence[int], episode_rows: Sequence[_Row]) -> Iterator[Item]:
        element = Element(numbers[0], episode_rows, source=None)
        return convert_value(element, name, lambda rows: [_build_record(numbers, rows, shape, file)])

    def pickle_rows() -> Iterator[tuple[str, bytes]]:
        for number, source_row in enumerate(rows):
            row = to_jsonable(source_row)
            key = [row["episode"]] if row.get("episode") is not None else [None, *map(row.get, _KEY)]
            yield _encode(key).decode(), pickle.dumps((number, row))

    if shape == "episodes":
        for number, row in enumerate(rows):
            yield from convert([number], [to_jsonable(row)])
        return
    for _, pieces in group_pieces(pickle_rows()):
        file.meter.done += sum(map(len, pieces))
        numbers, episode_rows = zip(*map(pickle.loads, pieces), strict=True)
        yield from convert(numbers, episode_rows)


def _build_record(numbers: Sequence[int], source_rows: Sequence[_Row], shape: Shape, file: Input) -> EpisodeRecord:
    rows = []
    for number, row in zip(numbers, source_rows, strict=True):
        with _naming_row(number):
            rows.append({key: _decode_cell(key, cell) for key, cell in row.items() if cell is not None})
    fields, field_rows = _collect_fields(numbers, rows, shape)
    episode = rows[0].get("episode", numbers[0])
    fields.setdefault("task_id", episode if isinstance(episode, str) else _encode(episode).decode())
    if "rollout_index" not in fields:
        fields["rollout_index"] = file.next_index(*(str(fields.get(key)) for key in _KEY))
    numbers, rows = _sort_rows(numbers, rows, "step_index" if shape == "steps" else "message_index")
    chat = _build_steps(numbers, rows) if shape == "steps" else _build_chat(numbers, rows, shape)
    if shape == "episodes":
        fields |= _add_extra(fields, rows[0], shape)
    try:
        record = msgspec.convert({"steps": []} | fields, EpisodeRecord, strict=False)
    except msgspec.ValidationError as error:
        field = _FIELD.search(str(error))
        raise ShapeError(f"row {field_rows.get(field[1] if field else '', numbers[0])}: {error}") from error
    for key, field_value in chat.items():
        if field_value or key == "steps":
            setattr(record, key, field_value)
    columns = [(number, row["scores"]) for number, row in zip(numbers, rows, strict=True) if "scores" in row]
    for number, cell in columns[:1]:
        with _naming_row(number):
            named = [{"scorer": scorer, "value": score} for scorer, score in as_object(cell).items()]
            record.scores = msgspec.convert(named if isinstance(cell, dict) else cell, list[ScoreRecord], strict=False)
    return record


def _collect_fields(numbers: Sequence[int], rows: Sequence[_Row], shape: Shape) -> tuple[_Row, dict[str, int]]:
    """Return the fields of an episode, each from the first row that has it, and the number of that row."""
    names = _EPISODE
    if shape == "steps":  # without the names that belong to the step
        names -= _STEP - {"agent_id"} if rows[0].get("episode") is None else _STEP
    fields: _Row = {}
    field_rows: dict[str, int] = {}
    for number, row in zip(numbers, rows, strict=True):
        for key in row.keys() & names - fields.keys():
            fields[key], field_rows[key] = row[key], number
    return fields, field_rows


@contextmanager
def _naming_row(number: int) -> Iterator[None]:
    """Add the number of the row to the message of an error."""
    try:
        yield
    except (msgspec.MsgspecError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise ShapeError(f"row {number}: {explain_error(error)}") from error


def _sort_rows(numbers: Sequence[int], rows: Sequence[_Row], column: str) -> tuple[list[int], list[_Row]]:
    """Return the rows of an episode in the order of `column`, and their numbers."""
    if not any(column in row for row in rows):
        return list(numbers), list(rows)
    by_index: dict[int, tuple[int, _Row]] = {}
    for number, row in zip(numbers, rows, strict=True):
        with _naming_row(number):
            try:
                index = msgspec.convert(row.get(column), int, strict=False)
            except msgspec.ValidationError:
                raise ShapeError(f"`{column}` is {row.get(column)!r}; valid: a whole number") from None
            if index in by_index:
                raise ShapeError(f"`{column}` is {index}, as in row {by_index[index][0]}; valid: each number once")
            by_index[index] = number, row
    ordered = [by_index[index] for index in sorted(by_index)]
    return [number for number, _ in ordered], [row for _, row in ordered]


def _add_extra(fields: _Row, row: _Row, shape: Shape) -> _Row:
    """Return `extra` with the columns of a row that have no meaning; empty without any."""
    unknown = {key: cell for key, cell in row.items() if key not in _COLUMNS[shape]}
    return {"extra": fields.get("extra", {}) | unknown} if unknown else {}


def _build_steps(numbers: Sequence[int], rows: Sequence[_Row]) -> dict[str, Any]:
    steps = []
    for number, row in zip(numbers, rows, strict=True):
        with _naming_row(number):
            fields = {"state": None} | {key: cell for key, cell in row.items() if key in _STEP}
            fields |= _add_extra(fields, row, "steps")
            steps.append(msgspec.convert(fields, StepRecord, strict=False))
    return {"steps": steps}


def _build_chat(numbers: Sequence[int], rows: Sequence[_Row], shape: Shape) -> dict[str, Any]:
    if shape == "episodes":
        with _naming_row(numbers[0]):
            messages, rewards = rows[0].get("messages"), rows[0].get("step_rewards")
            if not isinstance(messages, list):
                kind = type(messages).__name__
                raise ShapeError(f"`messages` is {kind}; valid: a list of messages, or JSON text of one")
            chat = parse_chat(messages)
            if rewards is not None and (not isinstance(rewards, list) or len(rewards) != len(chat.steps)):
                valid = f"valid: a number or null for each of {len(chat.steps)} decisions"
                raise ShapeError(f"`step_rewards` is {rewards!r}; {valid}")
            numbers = [numbers[0]] * len(chat.steps)
    else:
        messages = []
        for number, row in zip(numbers, rows, strict=True):
            message = {key: cell for key, cell in row.items() if key in _MESSAGE or key not in _NOT_MESSAGE}
            with _naming_row(number):
                messages.append(check_message(message, "message"))
        chat = parse_chat(messages)
        rewards = [rows[index].get("reward") for index in chat.message_indices]
        numbers = [numbers[index] for index in chat.message_indices]
    for step, reward, number in zip(chat.steps, rewards or (), numbers, strict=False):
        with _naming_row(number):
            try:
                step.reward = msgspec.convert(reward, float | None, strict=False)
            except msgspec.ValidationError:
                raise ShapeError(f"a reward is {reward!r}; valid: a number, or null if it is unknown") from None
    return chat.fields


def _decode_cell(key: str, cell: Any) -> Any:
    """Return a cell; JSON text of a list or an object is decoded in a column that may hold one."""
    if isinstance(cell, UnreadableCell):
        raise ShapeError(cell)
    if key in _DOCUMENTS and isinstance(cell, str) and cell.lstrip()[:1] in ("[", "{"):
        try:
            return _decode(cell)
        except msgspec.DecodeError as error:
            raise ShapeError(f"`{key}` is no JSON: {error}") from error
    if isinstance(cell, float) and not isfinite(cell):
        raise ShapeError(f"`{key}` is {cell}; valid: a finite number, or NULL if it is unknown")
    return cell


# ---------------------------------------------------------------- queries and frames

NAME = "query"
FRAME_NAME = "frame"
_ROWS = 4096
_PLAIN = frozenset(
    ("BOOLEAN", "TINYINT", "SMALLINT", "INTEGER", "BIGINT", "UTINYINT", "USMALLINT", "UINTEGER", "UBIGINT", "FLOAT")
) | {"DOUBLE", "VARCHAR", "UUID", "DATE", "TIME", "TIMESTAMP", "TIMESTAMP WITH TIME ZONE"}
"""Types whose values Arrow returns unchanged. All others are read as JSON: a content that may be a text or a list of
parts is a value of type JSON inside a list of structs, and Arrow would put the quotes around its text."""


def read(file: Input) -> Iterator[Item]:
    """Read the records and rejects of a query's rows."""
    with _connect() as connection:
        relation = _bind_query(connection, file.path)
        shape = choose_shape(relation.columns)
        # Rows that are grouped first are counted with their episodes.
        meter = file.meter if shape == "episodes" else Meter()
        yield from read_rows(_fetch_rows(relation, file.path, meter), shape, file, NAME)


def check_query(path: Path) -> str:
    """Describe the unknown columns of a file's query before anything is written; see `describe_unknown_columns`.

    Raises QueryError, UsageError, FormatError: the query cannot be run, or has the wrong columns.
    """
    with _connect() as connection:
        columns = _bind_query(connection, path).columns
    return describe_unknown_columns(columns, choose_shape(columns))


def read_frame(file: Input) -> Iterator[Item]:
    """Read the records and rejects of a frame in a Parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        shape: Shape = file.memory.get("shape") or choose_shape(pq.read_schema(file.path).names)
    except (pa.ArrowException, OSError) as error:
        raise FormatError(f"{file.path} is no Parquet file: {error}") from error

    def iterate_rows() -> Iterator[dict[str, Any]]:
        for item in read_parquet_rows(file):
            if isinstance(item, Reject):
                raise FormatError(f"the frame cannot be read: {item.message}")
            yield item.value

    yield from read_rows(iterate_rows(), shape, file, FRAME_NAME)


def _bind_query(connection: "duckdb.DuckDBPyConnection", path: Path) -> "duckdb.DuckDBPyRelation":
    """Bind the query of a file without running it."""
    import duckdb

    try:
        query = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise FormatError(f"{path}: {error}; --query takes a file of SQL") from error
    try:
        types = [statement.type for statement in connection.extract_statements(query)]
        if types == [duckdb.StatementType.MULTI]:
            raise UsageError(f"{path} holds several statements in one; of a PIVOT, name the values: ON column IN ('a')")
        if types != [duckdb.StatementType.SELECT]:
            content = "no SELECT" if len(types) == 1 else f"{len(types)} statements"
            raise UsageError(f"{path} holds {content}; --query takes a file with one SELECT")
        # Without its semicolon and the comments behind it, the query can be part of another statement.
        text = query.encode()
        ends = [start for start, _ in duckdb.tokenize(query) if text[start : start + 1] == b";"]
        query = text[: ends[0]].decode() if ends else query
        if _has_writing_with(connection, query):
            raise UsageError(f"{path} holds no SELECT alone: its WITH writes; --query takes a file with one SELECT")
        relation = connection.sql(query)
    except duckdb.Error as error:
        where = "; relative paths start in the working directory" if isinstance(error, duckdb.IOException) else ""
        raise QueryError(f"{path} cannot be run: {error}{where}") from error
    repeated = {name for name in relation.columns if relation.columns.count(name) > 1}
    if repeated:
        raise UsageError(f"{path} gives the column `{min(repeated)}` twice; name each of them with AS")
    return relation


def _has_writing_with(connection: "duckdb.DuckDBPyConnection", query: str) -> bool:
    """Return whether a SELECT has a WITH that writes, which binding would run.

    DuckDB explains such a statement without running it, and only binds it at the top.
    """
    import duckdb

    try:
        connection.sql(f"FROM ({query}\n)")
    except (duckdb.BinderException, duckdb.CatalogException):
        with suppress(duckdb.Error):  # binding reports the error
            connection.execute(f"EXPLAIN {query}")
            return True
    return False


def _fetch_rows(relation: "duckdb.DuckDBPyRelation", path: Path, meter: Meter) -> Iterator[dict[str, Any]]:
    import duckdb
    import pyarrow as pa

    columns = {name: '"' + name.replace('"', '""') + '"' for name in relation.columns}
    packed = [name for name, kind in zip(columns, relation.types, strict=True) if str(kind) not in _PLAIN]
    as_json = {name: f"CAST(to_json({columns[name]}) AS VARCHAR) AS {columns[name]}" for name in packed}
    try:
        reader: Any = relation.project(", ".join((columns | as_json).values())).to_arrow_reader(_ROWS)
        for batch in reader:
            for row, _ in read_batch_rows(batch):
                meter.done += sum(len(cell) for cell in row.values() if isinstance(cell, str))
                for name in packed:
                    if row[name]:
                        try:
                            row[name] = _decode(row[name])
                        except msgspec.DecodeError:
                            # With NaN and infinities, which the check of the record then refuses.
                            row[name] = json.loads(row[name])
                yield row
    except (duckdb.Error, pa.ArrowException, OSError) as error:
        raise QueryError(f"{path}: {error}") from error


def _connect() -> "duckdb.DuckDBPyConnection":
    import duckdb

    # One thread returns the rows in the same order each time, so that numbers by row are stable. A name in the query
    # never refers to a variable of this module.
    return duckdb.connect(config={"threads": 1, "preserve_insertion_order": True, "python_enable_replacements": False})


FORMAT = Format(NAME, "rows of a SELECT (--query)", lambda _: False, read, is_exact=True)
FRAME_FORMAT = Format(FRAME_NAME, "rows of a frame (lake.ingest_frame)", lambda _: False, read_frame, is_exact=True)
