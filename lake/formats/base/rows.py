"""The values of a file (lines, an array, one document, rows of Parquet), and each of them as episodes.

Most formats only say what one value means. They are functions from a value to records; `convert_values` turns values
that they cannot take into rejects with a position, and never raises for the content of a file. Pieces of a big file
that belong to one episode and are spread over the file, such as spans of concurrent traces, are grouped on disk.
"""

import json
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from msgspec import UNSET

from lake import ids
from lake.errors import FormatError, LakeAccessError
from lake.formats.base.format import Item, read_head, read_head_or_other
from lake.formats.base.json_array import (
    Element,
    ObjectMember,
    Rewriter,
    find_not_a_number,
    find_repeated_key,
    read_array,
    read_members,
)
from lake.formats.base.source import LINE_LIMIT, Input, Note, Source, is_cut_line, read_lines, reject_line
from lake.records import (
    EpisodeRecord,
    Reject,
    StepRecord,
    check,
    excerpt,
    fill_sampling,
    format_record,
    make_episode_id,
)

if TYPE_CHECKING:
    import pyarrow as pa

DOCUMENT_LIMIT = 1 << 30
"""Bytes of a document that is one episode."""
_COMPANION_BYTES = 256 << 20
"""Length up to which a file next to a document is read."""
_FIRST_BYTES = 64
"""Bytes that usually suffice to see that a file is not an array."""
_MOST_NOTES = 1000
_CACHE_KIB = 64 << 10
"""Memory for grouped pieces; SQLite writes the others to disk."""
_BUFFER = 1 << 20
_BOM = b"\xef\xbb\xbf"
_DECODE = msgspec.json.Decoder().decode
_NOT_DECODED = (msgspec.MsgspecError, ValueError, RecursionError)
_NOT_PYTHON = (ValueError, OverflowError, LookupError, TypeError)
"""Errors of an Arrow value that Python does not have; errors of Arrow are of these classes too."""
SHAPE_ERRORS = (msgspec.MsgspecError, ValueError, RecursionError, TypeError, LookupError, AttributeError, OverflowError)
"""Errors that reading a value of the wrong shape raises."""
_EARLIEST = datetime.min.replace(tzinfo=UTC)
_REASON = "not_trainable"
"""Key of `steps.extra` for the reason."""
_TEXTS = frozenset(("text", "input_text", "output_text", "summary_text", "refusal", "thinking", "reasoning"))
"""Types of parts for which engines have tokens."""


class UnsupportedError(ValueError):
    """An unknown version of a format, most likely a newer one. The message names the known ones."""


class ShapeError(ValueError):
    """A value of another shape than the format's; the message names the place and what is valid."""


def report_unknown(file: Input, holder: str, keys: Iterable[str]) -> None:
    """Count the keys or types of a holder (`message`, say) that a reader does not know, for the report of the ingest.

    Raises UnsupportedError: the ingest is strict, and there is one.
    """
    names = sorted(keys)
    if names and file.is_strict:
        listed = ", ".join(map(repr, names))
        article = "an" if holder[0] in "aeiou" else "a"
        raise UnsupportedError(
            f"{article} {holder} has {listed}, which the reader does not know; without --strict it is read"
        )
    for name in names:
        add_note(file, Note("unknown", holder, name))


def add_note(file: Input, note: Note) -> None:
    """Count a remark about a file; of very many different ones (keys that are data), only the first are counted."""
    if note in file.notes or len(file.notes) < _MOST_NOTES:
        file.notes[note] += 1


# ---------------------------------------------------------------- values as episodes


def convert_values(
    items: Iterable[Element | Reject], name: str, convert: Callable[[Any], Iterable[EpisodeRecord]]
) -> Iterator[Item]:
    """Convert each value of a file (see `read_values`) to episodes. `name` is the format's."""
    for item in items:
        yield from convert_value(item, name, convert)


def convert_value(
    item: Element | Reject, name: str, convert: Callable[[Any], Iterable[EpisodeRecord]]
) -> Iterator[Item]:
    """Convert one value of a file to episodes, or to one reject if any of its episodes is invalid."""
    if isinstance(item, Reject):
        yield item
        return
    reason, problem, records = "invalid", item.problem, []
    if problem is None:
        try:
            records = list(convert(item.value))
            checks = (_complete_record(record, name, is_plain=item.is_plain) for record in records)
            problem = next(filter(None, checks), None)
        except UnsupportedError as error:
            reason, problem = "unsupported", str(error)
        except SHAPE_ERRORS as error:
            problem = explain_error(error)
    if problem is None:
        yield from ((item.index, record) for record in records)
    else:
        yield Reject(position=item.index, reason=reason, message=problem, raw=item.raw)


def complete_record(record: EpisodeRecord, name: str) -> str | None:
    """Complete a record of the format `name`, and return its problem; None if it is valid."""
    try:
        return _complete_record(record, name, is_plain=False)
    except SHAPE_ERRORS as error:
        return explain_error(error)


def _complete_record(record: EpisodeRecord, name: str, *, is_plain: bool) -> str | None:
    record.source_format = name
    record.steps = mark_untrainable_steps(record)
    if not record.steps and (record.env_return is not None or record.scores):
        # Only the outcome is known: the episode counts among its siblings, and has nothing to train on.
        record.steps = [StepRecord(state=None, action="", trainable=False)]
    if not record.steps:
        return "it holds no decision of an agent, and no outcome: there is nothing to learn from it"
    fill_sampling(record)
    problem = check(record, is_plain=is_plain)
    if problem is None:
        _canonicalise(record)
    return problem


def explain_error(error: Exception) -> str:
    """Describe the fault of a value by the error that reading it raised."""
    if isinstance(error, ShapeError | msgspec.MsgspecError):
        return str(error)
    if isinstance(error, KeyError):
        return f"the key {error.args[0]!r} is missing"
    return f"a value is not of the type that the format has there: {error}"


def make_episode_text_id(record: EpisodeRecord, file: Input) -> str:
    """Return the id that a record will get, in the form of `parent_episode_id` and `root_episode_id`."""
    return ids.to_text(make_episode_id(record, record.run_id or file.run_id))


def omit_fields(source: dict[str, Any], *mapped_keys: str) -> dict[str, Any] | None:
    """Return the fields of an object that are neither in `mapped_keys` nor null, for `extra`; None without any."""
    return {key: field for key, field in source.items() if key not in mapped_keys and field is not None} or None


def drop_empty(source: Mapping[str, Any], *mapped_keys: str) -> dict[str, Any]:
    """Return the fields that are neither in `mapped_keys` nor null nor empty, of an object that has all defaults."""
    fields = ((key, field) for key, field in source.items() if key not in mapped_keys)
    return {key: field for key, field in fields if field is not None and field not in ("", [], {})}


# ---------------------------------------------------------------- the canonical form of records


def _canonicalise(record: EpisodeRecord) -> None:
    """Bring a checked record into the form in which a lake returns it.

    A lake does not store whether a default was written out, the zone of a time, the digits of a log-probability beyond
    float32, or the order of spans. All of these are in the content hash of a record. So an exported episode is
    recognised where it came from.
    """
    record.started_at, record.ended_at = _to_utc(record.started_at), _to_utc(record.ended_at)
    for index, step in enumerate(record.steps):
        step.started_at = _to_utc(step.started_at)
        if (tokens := step.tokens) is not None:
            if tokens.prefix_step_index == (index - 1 if index else None):
                tokens.prefix_step_index = UNSET
            if tokens.action_mask is not None and all(tokens.action_mask):
                tokens.action_mask = None
            if tokens.action_logprobs:
                # The shortest number that is the same in float32.
                tokens.action_logprobs = [float(str(lp)) for lp in np.asarray(tokens.action_logprobs, np.float32)]
    for span in record.spans:
        span.started_at, span.ended_at = _to_utc(span.started_at), _to_utc(span.ended_at)
    record.spans.sort(key=lambda span: (span.started_at or _EARLIEST, span.trace_id, span.span_id))


def _to_utc(moment: datetime | None) -> datetime | None:
    if moment is None or moment.tzinfo is UTC:
        return moment
    return moment.astimezone(UTC) if moment.tzinfo else moment.replace(tzinfo=UTC)


def mark_untrainable_steps(record: EpisodeRecord) -> list[StepRecord]:
    """Return the steps of a record; those whose tokens do not determine the prompt are marked as not trainable.

    For an image or a sound, the engine's token ids are placeholders: every image of a size has the same ids. This holds
    from such a message on: a later prompt may no longer contain it (it was cut, or agents take turns), but the tokens
    cannot show that. Steps without tokens stay unchanged: rendering reads their messages, and refuses other parts.
    """
    if all(step.tokens is None for step in record.steps):
        return record.steps
    steps, kinds = [], list_non_text_parts(record.initial_messages or ())
    for step in record.steps:
        kinds = kinds or list_non_text_parts([*step.context, {"content": (step.extra or {}).get("content")}])
        if kinds and step.tokens is not None and step.trainable:
            reason = f"a message holds a part of type {kinds[0]!r}, for which its tokens are placeholders"
            steps.append(msgspec.structs.replace(step, trainable=False, extra={_REASON: reason} | (step.extra or {})))
        else:
            steps.append(step)
    return steps


def list_non_text_parts(messages: Iterable[Any]) -> list[str]:
    """Return the types of message parts that are not text: `image_url`, `input_audio`."""
    return [
        kind
        for message in messages
        if isinstance(message, dict) and isinstance(content := message.get("content"), list)
        for part in content
        if isinstance(part, dict) and (kind := str(part.get("type", "text"))) not in _TEXTS
    ]


# ---------------------------------------------------------------- values of a file


def read_values(file: Input, *, by_line: bool = False) -> Iterator[Element | Reject]:
    """Read the values of a file in order: lines from 1, elements of an array, rows, or the one document from 0.

    `by_line`: files of the format are lines. A file with damaged first lines is then not taken for a document, unless
    it begins with an opening bracket on a separate line.
    """
    head = read_head_or_other(file.path)
    by_line = by_line and head.text.lstrip().partition("\n")[0].rstrip() != "{"
    if head.kind == "parquet":
        yield from read_parquet_rows(file, constants=False)
    elif head.kind == "array":
        yield from read_array_values(file)
    elif head.kind == "lines" or by_line:
        yield from read_line_values(file)
    else:
        document = read_document(file)
        if not (file.may_grow and isinstance(document, Reject) and document.reason == "truncated"):
            yield document  # else it is the start of a first line that is still being written


def read_array_values(file: Input) -> Iterator[Element | Reject]:
    """Read the elements of a JSON array, with indices from 0."""
    return read_array(file.path, file.meter)


def read_object_members(file: Input, *names: str) -> Iterator[ObjectMember | Element | Reject]:
    """Read the members of a document that is an object, in order, and the arrays `names` element by element."""
    return read_members(file.path, names, file.meter)


def read_line_values(file: Input, *, constants: bool = False) -> Iterator[Element | Reject]:
    """Read the values of lines, with line numbers from 1. `constants`: see `parse_document`."""
    rewriter = Rewriter()
    for item in read_lines(file):
        if isinstance(item, Reject):
            yield item
            continue
        number, line = item
        text = line.removeprefix(_BOM)
        try:
            line_value = _DECODE(text)
        except _NOT_DECODED as error:
            if constants and (line_value := _decode_with_constants(text)) is not None:
                yield Element(number, line_value, None, False, line)
                continue
            reason = "truncated" if is_cut_line(line, str(error)) else "malformed"
            yield reject_line(number, line, reason, find_not_a_number(text) or f"not JSON: {error}")
            continue
        is_plain, may_repeat = rewriter.compare(text, line_value)
        problem = find_repeated_key(text) if may_repeat else None
        yield Element(number, line_value, problem, is_plain, line)


def read_document(file: Input) -> Element | Reject:
    """Read a file that is one JSON value."""
    with Source(file.path) as source:
        content = source.read(DOCUMENT_LIMIT + 1)
        fault, is_cut = source.fault, source.is_cut
    file.meter.done += len(content)
    if fault is not None:
        return _reject_document(0, content, "truncated" if is_cut else "malformed", fault)
    if len(content) > DOCUMENT_LIMIT:
        message = f"the document is longer than {DOCUMENT_LIMIT >> 20} MB"
        return _reject_document(0, content[:LINE_LIMIT], "invalid", message)
    return parse_document(0, content)


def parse_document(position: int, content: bytes, *, constants: bool = False) -> Element | Reject:
    """Parse a document or an entry of an archive as one JSON value.

    `constants`: the format writes NaN and infinities, which JSON does not have.
    """
    text = content.removeprefix(_BOM)
    is_json = True
    try:
        document = _DECODE(text)
    except _NOT_DECODED as error:
        is_json, document = False, _decode_with_constants(text) if constants else None
        if document is None:
            reason = "truncated" if is_cut_line(text.rstrip(), str(error)) else "malformed"
            return _reject_document(position, content, reason, find_not_a_number(text) or f"not JSON: {error}")
    is_plain, may_repeat = Rewriter().compare(text, document)
    return Element(position, document, find_repeated_key(text) if may_repeat else None, is_plain and is_json, content)


def _reject_document(position: int, content: bytes, reason: str, message: str) -> Reject:
    raw = excerpt(content.decode("utf-8", errors="backslashreplace"))
    return Reject(position=position, reason=reason, message=message, raw=raw)


def _decode_with_constants(text: bytes) -> Any:
    with suppress(ValueError, RecursionError):
        return json.loads(text)
    return None


# ---------------------------------------------------------------- rows of Arrow


def read_parquet_rows(file: Input, *, constants: bool = True) -> Iterator[Element | Reject]:
    """Read the rows of a Parquet file as objects, without the fields of structs that are NULL, as JSON would.

    `constants`: see `parse_document`.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    index = 0
    try:
        # A memory map would count the pages of a big file as ours. The buffer reads a column page by page.
        with pq.ParquetFile(file.path, memory_map=False, pre_buffer=False, buffer_size=_BUFFER) as parquet:
            for batch in parquet.iter_batches(batch_size=256):
                # Texts of Arrow are UTF-8, and the schema bounds the nesting.
                is_plain = all(map(is_finite, batch.columns))
                for row, fault in read_batch_rows(batch):
                    jsonable_row = to_jsonable(row)
                    needs_search = not (is_plain or constants or fault)
                    problem = find_not_a_number(json.dumps(jsonable_row)) if needs_search else fault
                    yield Element(index, jsonable_row, problem, is_plain, source=None)
                    index += 1
                file.meter.done = int(file.path.stat().st_size * index / max(parquet.metadata.num_rows, 1))
    except (pa.ArrowException, OSError, ValueError) as error:
        is_short = "ends" in str(error) or "magic bytes" in str(error)
        message = f"the Parquet file cannot be read from row {index} on: {error}"
        yield Reject(position=index, reason="truncated" if is_short else "malformed", message=message, raw="")


class UnreadableCell(str):
    """The reason why a cell has no value, in place of its value."""

    __slots__ = ()


def read_batch_rows(batch: "pa.RecordBatch") -> Iterator[tuple[dict[str, Any], str | None]]:
    """Read the rows of a batch, each with the reason why it cannot be taken: a date of the year 300,000, say.

    Such a cell costs no other row of the batch.
    """
    try:
        rows = batch.to_pylist()
    except _NOT_PYTHON:
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        for index in range(batch.num_rows):
            row: dict[str, Any] = {}
            for name, column in columns.items():
                try:
                    row[name] = column[index].as_py()
                except _NOT_PYTHON as error:
                    valid = "valid: times of the years 1 to 9999, in a zone that this machine knows"
                    row[name] = UnreadableCell(f"`{name}` is a {column.type} that cannot be read ({error}); {valid}")
            yield row, next((cell for cell in row.values() if isinstance(cell, UnreadableCell)), None)
    else:
        yield from zip(rows, repeat(None))


def is_finite(array: "pa.Array[Any]") -> bool:
    """Return whether the numbers of an array are finite, at any depth."""
    import pyarrow as pa
    import pyarrow.compute as pc

    def has_floats(arrow_type: Any) -> bool:
        inner_types = (arrow_type.field(index).type for index in range(arrow_type.num_fields))
        return pa.types.is_floating(arrow_type) or any(map(has_floats, inner_types))

    if pa.types.is_floating(array.type):
        return pc.all(pc.is_finite(array)).as_py() is not False
    if not has_floats(array.type):
        return True
    if isinstance(array, pa.MapArray):
        return is_finite(array.keys) and is_finite(array.items)
    inner: Any = array.flatten()  # the fields of a struct, or all entries of the lists of an array
    return all(map(is_finite, inner if isinstance(inner, list) else [inner]))


def to_jsonable(cell: Any) -> Any:
    """Return a value of Arrow as JSON has it: a text for times and bytes, seconds for durations."""
    if cell is None or isinstance(cell, str | int | float):
        return cell
    if type(cell) is dict:
        return {
            key: field if type(field) is str else to_jsonable(field) for key, field in cell.items() if field is not None
        }
    if isinstance(cell, list | tuple):
        return [to_jsonable(entry) for entry in cell]
    if isinstance(cell, Decimal):
        return int(cell) if cell.is_finite() and cell == cell.to_integral_value() else float(cell)
    if isinstance(cell, timedelta):
        return cell.total_seconds()
    if isinstance(cell, bytes):
        cell = cell.decode("utf-8", errors="backslashreplace")
    return cell.isoformat() if isinstance(cell, datetime | date | time) else str(cell)


# ---------------------------------------------------------------- documents of one episode


def is_array(path: Path) -> bool:
    """Return whether a file looks like a JSON array."""
    try:
        with Source(path) as source:
            start = source.read(_FIRST_BYTES).removeprefix(_BOM).lstrip()
        return start[:1] in (b"[", b"") and read_head(path).kind == "array"
    except (FormatError, OSError):
        return False


def read_with_partial(file: Input, *arrays: str) -> Iterator[tuple[Element | Reject, bool]]:
    """Read the values of a file, each with whether it is the readable part of a document that ends too early.

    Such a document comes twice: as its readable part, and as a reject. The part holds the complete elements of the
    first array of `arrays` that has some, and nothing of a document that is cut elsewhere.
    """
    for item in read_values(file):
        # Lines are numbered from 1: only a document that fills the file has a readable part.
        if isinstance(item, Reject) and item.reason == "truncated" and item.position == 0:
            for array in arrays:
                partial: dict[str, Any] = {array: []}
                for member in read_object_members(Input(file.path, file.run_id), array):
                    if isinstance(member, ObjectMember):
                        partial[member.key] = member.value
                    elif isinstance(member, Element) and member.problem is None:
                        partial[array].append(member.value)
                if partial.get(array):
                    yield Element(0, partial, source=item.raw), True
                    break
        yield item, False


def read_companion(path: Path) -> tuple[Any, str | None]:
    """Return the JSON value of a file next to another, and why it has none; neither if the file does not exist."""
    try:
        if not path.is_file():
            return None, None
        with Source(path) as source:
            content = source.read(_COMPANION_BYTES + 1)
            fault = source.fault
    except OSError as error:
        return None, f"{path.name} cannot be read: {error.strerror}"
    if fault is not None:
        return None, fault
    try:
        return msgspec.json.decode(content.removeprefix(_BOM)), None
    except _NOT_DECODED as error:
        return None, f"{path.name} is not JSON: {error}"


def find_element_problem(element: Element) -> str | None:
    """Return why one of several values of an episode cannot be part of it; None if it can."""
    if element.problem is None and not element.is_plain:
        try:
            msgspec.json.encode(element.value)
        except (TypeError, ValueError, RecursionError, OverflowError) as error:
            return f"it cannot be stored as UTF-8 JSON: {error}"
    return element.problem


def make_element(document: Any) -> Element:
    """Return an object that a reader built from values of a file as one value; its text is for a person."""
    try:
        return Element(0, document, source=msgspec.json.encode(document))
    except (TypeError, ValueError, RecursionError, OverflowError):
        return Element(0, document, source=format_record(document))


# ---------------------------------------------------------------- pieces grouped by key


def group_pieces(items: Iterable[tuple[str, bytes]]) -> Iterator[tuple[str, list[bytes]]]:
    """Group pieces by key: keys in the order in which each appears first, pieces of a key in their order.

    All items are read before the first group is returned, into a temporary SQLite database. SQLite caches it while it
    fits, writes the rest to a temporary file, and removes that with the connection. Memory is bounded by one group.
    Raises LakeAccessError: the disk has no room for the pieces.
    """
    try:
        with closing(sqlite3.connect("", isolation_level=None, check_same_thread=False)) as database:
            database.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
            database.execute("PRAGMA journal_mode = OFF")
            database.execute("PRAGMA synchronous = OFF")
            database.execute("CREATE TABLE groups (number INTEGER PRIMARY KEY, key BLOB UNIQUE)")
            database.execute("CREATE TABLE pieces (number INTEGER, piece BLOB)")
            database.execute("BEGIN")
            last_key, number = None, 0
            for key, piece in items:
                if key != last_key:
                    # As bytes, because a key may hold half a surrogate pair, which is not a text of SQLite.
                    key_bytes = key.encode("utf-8", "surrogatepass")
                    database.execute("INSERT OR IGNORE INTO groups (key) VALUES (?)", (key_bytes,))
                    ((number,),) = database.execute("SELECT number FROM groups WHERE key = ?", (key_bytes,))
                    last_key = key
                database.execute("INSERT INTO pieces VALUES (?, ?)", (number, piece))
            database.execute("CREATE INDEX by_number ON pieces (number)")
            for number, key_bytes in database.execute("SELECT number, key FROM groups ORDER BY number"):
                rows = database.execute("SELECT piece FROM pieces WHERE number = ? ORDER BY rowid", (number,))
                yield key_bytes.decode("utf-8", "surrogatepass"), [piece for (piece,) in rows]
    except sqlite3.Error as error:
        folder = os.environ.get("TMPDIR", "/var/tmp")  # where SQLite puts its temporary files
        raise LakeAccessError(
            f"the temporary folder {folder} cannot hold the pieces of the source while they are sorted: {error}; "
            "make room there, or set TMPDIR to a folder with more"
        ) from error
