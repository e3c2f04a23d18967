"""The values of a file, whatever holds them: lines, an array, one document, a Parquet file; and each as episodes.

Most formats say what one value means, and nothing about where it stands. They are functions from a value to records;
`converted` reads the file, turns what they cannot take into rejects with a position, and never raises for what a file
holds.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import msgspec

from lake import ids
from lake.formats.base.arrow import is_finite, rows_of
from lake.formats.base.canonical import spell
from lake.formats.base.json_array import Damage, Element, Member, read_array, read_members
from lake.formats.base.json_faults import Rewriter, not_a_number, repeated_key
from lake.formats.base.lines import LINE_LIMIT, is_cut, read_lines, reject
from lake.formats.base.look import look_or_other
from lake.formats.base.source import Input, Source
from lake.formats.base.unseen import marked
from lake.records import EpisodeRecord, Reject, StepRecord, check, excerpt, identify, tell_sampling

Item = tuple[int, EpisodeRecord] | Reject
"""A record with its position in the file, or why there is none."""
DOCUMENT_LIMIT = 1 << 30
"""Bytes of a document that is one episode."""
_BUFFER = 1 << 20
_DECODE = msgspec.json.Decoder().decode
_NOT_DECODED = (msgspec.MsgspecError, ValueError, RecursionError)
WRONG = (msgspec.MsgspecError, ValueError, RecursionError, TypeError, LookupError, AttributeError, OverflowError)
"""What comes of a value of the wrong shape."""


class UnsupportedError(ValueError):
    """A version of a format that is not known: newer, most likely. The message says which are."""


class ShapeError(ValueError):
    """A value that is not what the format says; the message tells where and what is valid."""


def converted(
    items: Iterable[Element | Reject], name: str, convert: Callable[[Any], Iterable[EpisodeRecord]]
) -> Iterator[Item]:
    """The episodes of each value of a file (see `values`), and its rejects. `name` is the format's."""
    for item in items:
        yield from items_of(item, name, convert)


def items_of(item: Element | Reject, name: str, convert: Callable[[Any], Iterable[EpisodeRecord]]) -> Iterator[Item]:
    """One value of a file as episodes, or as the reject that says why not: all of its episodes or none."""
    if isinstance(item, Reject):
        yield item
        return
    reason, problem, records = "invalid", item.problem, []
    if problem is None:
        try:
            records = list(convert(item.value))
            problem = next(filter(None, (_finished(record, name, is_plain=item.is_plain) for record in records)), None)
        except UnsupportedError as error:
            reason, problem = "unsupported", str(error)
        except WRONG as error:
            problem = explained(error)
    if problem is None:
        yield from ((item.index, record) for record in records)
    else:
        yield Reject(position=item.index, reason=reason, message=problem, raw=item.raw)


def finished(record: EpisodeRecord, name: str) -> str | None:
    """Complete a record of a format, and say what is wrong with it; None if nothing is."""
    try:
        return _finished(record, name, is_plain=False)
    except WRONG as error:
        return explained(error)


def _finished(record: EpisodeRecord, name: str, *, is_plain: bool) -> str | None:
    record.source_format = name
    record.steps = marked(record)
    if not record.steps and (record.env_return is not None or record.scores):
        # Only its outcome is known: it counts among its siblings, and nothing of it is trained on.
        record.steps = [StepRecord(state=None, action="", trainable=False)]
    if not record.steps:
        return "it holds no decision of an agent, and no outcome: there is nothing to learn from it"
    tell_sampling(record)
    problem = check(record, is_plain=is_plain)
    if problem is None:
        spell(record)
    return problem


def explained(error: Exception) -> str:
    """What is wrong with a value, from the error that reading it raised."""
    if isinstance(error, ShapeError | msgspec.MsgspecError):
        return str(error)
    if isinstance(error, KeyError):
        return f"the key {error.args[0]!r} is missing"
    return f"a value is not of the type that the format has there: {error}"


def episode_text_id(record: EpisodeRecord, file: Input) -> str:
    """The id that a record will have, as `parent_episode_id` and `root_episode_id` take it."""
    return ids.to_text(identify(record, record.run_id or file.run_id).episode_id)


def rest(value: dict[str, Any], *known: str) -> dict[str, Any] | None:
    """The fields of an object that a format has no place for, for `extra`; None if there are none."""
    left = {key: item for key, item in value.items() if key not in known and item is not None}
    return left or None


def values(file: Input, *, by_line: bool = False) -> Iterator[Element | Reject]:
    """The values of a file in order: lines from 1, elements of an array, rows, or the one document from 0.

    `by_line`: files of the format are lines, so that one whose first lines are damaged is not taken for a document;
    only an opening bracket on a line of its own begins one.
    """
    seen = look_or_other(file.path)
    by_line = by_line and seen.text.lstrip().partition("\n")[0].rstrip() != "{"
    if seen.kind == "parquet":
        yield from parquet_rows(file, constants=False)
    elif seen.kind == "array":
        yield from array_values(file)
    elif seen.kind == "lines" or by_line:
        yield from line_values(file)
    else:
        found = document(file)
        is_begun = file.may_grow and isinstance(found, Reject) and found.reason == "truncated"
        if not is_begun:  # else it is the beginning of its first line
            yield found


def array_values(file: Input) -> Iterator[Element | Reject]:
    """The elements of a JSON array, with indices from 0."""
    return map(_undamaged, read_array(file.path, file.meter))


def line_values(file: Input, *, constants: bool = False) -> Iterator[Element | Reject]:
    """The values of lines, with line numbers from 1. `constants`: see `parsed`."""
    rewriter = Rewriter()
    for item in read_lines(file):
        if isinstance(item, Reject):
            yield item
            continue
        number, line = item
        text = line.removeprefix(b"\xef\xbb\xbf")
        try:
            value = _DECODE(text)
        except _NOT_DECODED as error:
            if constants and (value := _with_constants(text)) is not None:
                yield Element(number, value, None, False, line)
                continue
            reason = "truncated" if is_cut(line, str(error)) else "malformed"
            yield reject(number, line, reason, not_a_number(text) or f"not JSON: {error}")
            continue
        is_plain, may_repeat = rewriter.compared(text, value)
        problem = repeated_key(text) if may_repeat else None
        yield Element(number, value, problem, is_plain, line)


def document(file: Input) -> Element | Reject:
    """A file that is one JSON value."""
    with Source(file.path) as source:
        data = source.read(DOCUMENT_LIMIT + 1)
        fault, is_cut_short = source.fault, source.is_cut
    file.meter.done += len(data)
    if fault is not None:
        reason = "truncated" if is_cut_short else "malformed"
        return Reject(position=0, reason=reason, message=fault, raw=_shown(data))
    if len(data) > DOCUMENT_LIMIT:
        message = f"the document is longer than {DOCUMENT_LIMIT >> 20} MB"
        return Reject(position=0, reason="invalid", message=message, raw=_shown(data[:LINE_LIMIT]))
    return parsed(0, data)


def parsed(position: int, data: bytes, *, constants: bool = False) -> Element | Reject:
    """The one JSON value that a document or an entry of an archive is.

    `constants`: its format writes NaN and infinities, which JSON does not have.
    """
    text = data.removeprefix(b"\xef\xbb\xbf")
    is_json = True
    try:
        value = _DECODE(text)
    except _NOT_DECODED as error:
        is_json, value = False, _with_constants(text) if constants else None
        if value is None:
            reason = "truncated" if is_cut(text.rstrip(), str(error)) else "malformed"
            message = not_a_number(text) or f"not JSON: {error}"
            return Reject(position=position, reason=reason, message=message, raw=_shown(data))
    is_plain, may_repeat = Rewriter().compared(text, value)
    return Element(position, value, repeated_key(text) if may_repeat else None, is_plain and is_json, data)


def _with_constants(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def members(file: Input, *names: str) -> Iterator[Member | Element | Reject]:
    """The members of a document that is an object, in order, the arrays `names` element by element."""
    for item in read_members(file.path, names, file.meter):
        yield item if isinstance(item, Member) else _undamaged(item)


def parquet_rows(file: Input, *, constants: bool = True) -> Iterator[Element | Reject]:
    """The rows of a Parquet file as objects; fields of structs that are NULL are left out, as JSON would.

    `constants`: see `parsed`.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    index = 0
    try:
        # Not memory-mapped: pages of a big file would count as ours. Buffered: a column is read page by page.
        with pq.ParquetFile(file.path, memory_map=False, pre_buffer=False, buffer_size=_BUFFER) as parquet:
            for batch in parquet.iter_batches(batch_size=256):
                # Texts of Arrow are UTF-8, and a schema nests as deeply as somebody wrote it down.
                is_plain = all(map(is_finite, batch.columns))
                for row, fault in rows_of(batch):
                    value = jsonable(row)
                    problem = fault if is_plain or constants or fault else not_a_number(json.dumps(value))
                    yield Element(index, value, problem, is_plain, source=None)
                    index += 1
                file.meter.done = int(file.path.stat().st_size * index / max(parquet.metadata.num_rows, 1))
    except (pa.ArrowException, OSError, ValueError) as error:
        is_short = "ends" in str(error) or "magic bytes" in str(error)
        message = f"the Parquet file cannot be read from row {index} on: {error}"
        yield Reject(position=index, reason="truncated" if is_short else "malformed", message=message, raw="")


def _shown(data: bytes) -> str:
    return excerpt(data.decode("utf-8", errors="backslashreplace"))


def _undamaged(item: Element | Damage) -> Element | Reject:
    if isinstance(item, Element):
        return item
    reason = "truncated" if item.at_end else "malformed"
    return Reject(position=item.index, reason=reason, message=item.message, raw=item.raw)


def jsonable(value: Any) -> Any:
    """A value of Arrow as JSON has it."""
    kind = type(value)
    if kind is str:
        return value
    if kind is dict:
        return {key: item if type(item) is str else jsonable(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, Decimal):
        return int(value) if value.is_finite() and value == value.to_integral_value() else float(value)
    return value if value is None or isinstance(value, str | int | float) else _in_words(value)


def _in_words(value: Any) -> str | float:
    """A value that JSON has no type for: its text, or the seconds that it lasts."""
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    return value.decode("utf-8", errors="backslashreplace") if isinstance(value, bytes) else str(value)
