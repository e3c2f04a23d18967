"""The entries of an `.eval` archive of Inspect: its header, and its samples, put together where they are in chunks.

A sample in chunks is samples/ID_epoch_N/sample.json, metadata.json if there is any, and for messages, events and
attachments a list in START.json for every thousand or so. Its conversation is `message_refs`, ranges of the messages;
its attachments are called by their number. What else lies there (calls, skeleton.json, events/stats.json) can be made
of these or repeats them.
"""

import re
from collections.abc import Iterator
from typing import Any, BinaryIO

import msgspec

from lake.formats.base.json_array import Element
from lake.formats.base.rows import ShapeError, parsed
from lake.formats.base.source import Input
from lake.formats.base.zip_entries import EntryError, listed
from lake.records import Reject

HEADERS = ("header.json", "_journal/start.json")
"""What says version, eval and plan: the first one of a log that is finished, the second from the start."""
_WHOLE = re.compile(r"samples/.+_epoch_\d+\.json")
_CHUNKED = re.compile(r"samples/.+_epoch_\d+/sample\.json")
_CHUNK = re.compile(r"(samples/.+_epoch_\d+)/(messages|events|attachments)/(\d+)\.json")
_SEQUENCES = ("messages", "events", "attachments")
_MOST_MESSAGES = 1_000_000


def is_sample(name: str) -> bool:
    """Whether an entry is a sample, or the head of one in chunks."""
    return bool(_WHOLE.fullmatch(name) or _CHUNKED.fullmatch(name))


class Archive:
    """An archive that is read."""

    def __init__(self, file: Input, source: BinaryIO) -> None:
        found, self._fault = listed(file.path)
        self._file, self._source = file, source
        self._entries = {entry.name: entry for entry in found}
        self._chunks: dict[tuple[str, str], list[tuple[int, str]]] = {}
        for name in self._entries:
            if chunk := _CHUNK.fullmatch(name):
                self._chunks.setdefault((chunk[1], chunk[2]), []).append((int(chunk[3]), name))

    def header(self) -> dict[str, Any]:
        """The header, or if it is damaged or not there yet, the beginning. Raises ShapeError: there is neither."""
        problems = []
        for name in filter(self._entries.__contains__, HEADERS):
            item = self._read(name, 0)
            if isinstance(item, Element) and isinstance(item.value, dict):
                return item.value
            problems.append(f"{name}: {item.message if isinstance(item, Reject) else 'it is no object'}")
        raise ShapeError("; ".join(problems) or f"the archive has neither {HEADERS[0]} nor {HEADERS[1]}")

    def samples(self) -> Iterator[tuple[str, Element | Reject]]:
        """Every sample with the name of its entry, in their order; last, if the archive is cut, a reject."""
        names = list(filter(is_sample, self._entries))
        for position, name in enumerate(names):
            item = self._read(name, position)
            if isinstance(item, Element) and isinstance(item.value, dict) and _CHUNKED.fullmatch(name):
                item = self._put_together(item, name.removesuffix("/sample.json"))
            yield name, item
        if self._fault is not None:
            reject = Reject(position=len(names), reason="truncated", message=self._fault, raw="")
            yield self._file.path.name, reject

    def _read(self, name: str, position: int) -> Element | Reject:
        """The JSON value of an entry; NaN is what the tool writes for a score that there is none of."""
        entry = self._entries[name]
        try:
            data = entry.read(self._source)
        except EntryError as error:
            return Reject(position=position, reason="malformed", message=str(error), raw="")
        self._file.meter.done += entry.packed
        return parsed(position, data, constants=True)

    def _put_together(self, shell: Element, prefix: str) -> Element | Reject:
        """A sample in chunks as if it were whole."""
        try:
            parts = {name: self._sequence(shell, prefix, name) for name in _SEQUENCES}
            value = dict(shell.value)
            pool = parts["messages"]
            value["messages"] = _referred(value.pop("message_refs", []), pool)
            if f"{prefix}/metadata.json" in self._entries:
                value["metadata"] = self._part(shell, f"{prefix}/metadata.json")
        except ShapeError as error:
            return Reject(position=shell.index, reason="invalid", message=str(error), raw=shell.raw)
        attachments = {str(index): text for index, text in enumerate(parts["attachments"])}
        value |= {"events": parts["events"], "events_data": {"messages": pool}, "attachments": attachments}
        return msgspec.structs.replace(shell, value=value)

    def _sequence(self, shell: Element, prefix: str, sequence: str) -> list[Any]:
        """A list that lies in chunks. Raises ShapeError: one is damaged, or missing."""
        found: list[Any] = []
        for start, name in sorted(self._chunks.get((prefix, sequence), ())):
            items = self._part(shell, name)
            if start != len(found) or not isinstance(items, list):
                problem = "a chunk before it is missing" if isinstance(items, list) else "it is no list"
                raise ShapeError(f"{name}: {problem}; {len(found)} items stand before it")
            found += items
        return found

    def _part(self, shell: Element, name: str) -> Any:
        item = self._read(name, shell.index)
        if problem := item.message if isinstance(item, Reject) else item.problem:
            raise ShapeError(f"{name}: {problem}")
        assert isinstance(item, Element)
        shell.is_plain &= item.is_plain
        return item.value


def _referred(refs: Any, pool: list[Any]) -> list[Any]:
    """The messages that ranges refer to. Raises ShapeError: they are none."""
    found: list[Any] = []
    for ref in refs if isinstance(refs, list) else [refs]:
        match ref:
            case [int(start), int(end)] if 0 <= start <= end <= len(pool) and len(found) < _MOST_MESSAGES:
                found += pool[start:end]
            case _:
                raise ShapeError(
                    f"`message_refs` holds {ref!r}; valid: ranges of the {len(pool)} messages that there are"
                )
    return found
