"""Formats: one file per format, each a reader from a file to records; and sniffing, which tells them apart.

A reader yields `(position, EpisodeRecord)` or a `Reject`, in file order, in bounded memory, and never raises for what
a record contains: a bad record becomes a reject and the rest goes on.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lake.errors import FormatError
from lake.formats import jsonl, tau_bench
from lake.formats.source import Meter, Source
from lake.records import EpisodeRecord, Reject

Item = tuple[int, EpisodeRecord] | Reject
_HEAD_BYTES = 1 << 16


class Reader(Protocol):
    """From a file to its records and rejects, in order."""

    def __call__(self, path: Path, meter: Meter | None = None) -> Iterator[Item]:
        """Read a file; the meter is moved on as it is read."""


@dataclass(frozen=True, slots=True)
class Format:
    """One format."""

    name: str
    description: str
    recognise: Callable[[str], bool]
    """Whether the first 64 KB of a file (as text) look like this format."""
    read: Reader


FORMATS: dict[str, Format] = {
    fmt.name: fmt
    for fmt in (
        Format("tau_bench", "tau-bench historical trajectories (a JSON array)", tau_bench.recognise, tau_bench.read),
        Format("jsonl", "one episode a line; docs/reference/jsonl.md", jsonl.recognise, jsonl.read),
    )
}


def choose(path: Path, name: str | None = None) -> Format:
    """The format of a name, or of what a file looks like. Raises FormatError: no such one, or an unreadable file."""
    text = _head(path)
    looks_like = next((fmt for fmt in FORMATS.values() if fmt.recognise(text)), None)
    chosen = looks_like if name is None else FORMATS.get(name)
    if chosen is not None and looks_like is not None and not chosen.recognise(text):
        raise FormatError(f"{path} begins like {looks_like.name}, not like {name}; leave --format out")
    if chosen is not None:
        return chosen
    known = "; ".join(f"{fmt.name} = {fmt.description}" for fmt in FORMATS.values())
    if name is not None:
        raise FormatError(f"there is no format {name!r}; known: {known}")
    raise FormatError(f"{path} has no known format; known: {known}. Name one with --format if you are sure")


def _head(path: Path) -> str:
    """The first 64 KB of a file, as text."""
    try:
        with Source(path) as file:
            head, fault = file.read(_HEAD_BYTES), file.fault
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror}; give the path of a readable file") from error
    text = head.decode("utf-8", errors="replace").lstrip("\ufeff")
    if not text.strip() and fault is not None:
        raise FormatError(f"{path}: {fault}; nothing of it can be read")
    if not text.strip():
        raise FormatError(f"{path} is empty; there is nothing to ingest")
    return text
