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
from lake.formats.look import Look, look
from lake.formats.rows import Item
from lake.formats.source import Input, Meter, stem


class Reader(Protocol):
    """From a file to its records and rejects, in order."""

    def __call__(self, file: Input) -> Iterator[Item]:
        """Read a file; its meter is moved on as it is read."""


def _holds_none(look: Look) -> str | None:
    """Every file of the format holds trajectories."""


@dataclass(frozen=True, slots=True)
class Format:
    """One format."""

    name: str
    description: str
    recognise: Callable[[Look], bool]
    """Whether a file looks like this format."""
    reader: Reader
    no_trajectory: Callable[[Look], str | None] = _holds_none
    """What a file of the same tool is that holds no trajectory, as a sentence; None if it may hold some."""
    by_line: bool = False
    """Each line of a file is complete by itself: a file that grows is read on from where its last line ended."""
    is_whole: bool = False
    """A file is one episode, or few whose records stand anywhere in it: if it grows, it is read again from its start,
    and what has grown replaces what it was."""

    def read(self, path: Path, meter: Meter | None = None, run_id: str | None = None) -> Iterator[Item]:
        """Records and rejects of a file."""
        return self.reader(Input(path, stem(path) if run_id is None else run_id, meter or Meter()))


FORMATS: dict[str, Format] = {
    fmt.name: fmt
    for fmt in (
        Format("tau_bench", "tau-bench historical trajectories (a JSON array)", tau_bench.recognise, tau_bench.read),
        Format("jsonl", "one episode a line; docs/reference/jsonl.md", jsonl.recognise, jsonl.read, by_line=True),
    )
}
"""In the order in which they are asked whether a file is theirs: what is most particular first."""


def choose(path: Path, name: str | None = None) -> Format:
    """The format of a name, or of what a file looks like.

    Raises:
        FormatError: no such one; a file that cannot be read, that holds no trajectory, or that looks like none.
    """
    seen = look(path)
    for fmt in FORMATS.values():
        if (what := fmt.no_trajectory(seen)) is not None:
            raise FormatError(f"{path} holds no trajectory: {what}")
    looks_like = next((fmt for fmt in FORMATS.values() if fmt.recognise(seen)), None)
    chosen = looks_like if name is None else FORMATS.get(name)
    if chosen is not None and looks_like is not None and not chosen.recognise(seen):
        raise FormatError(f"{path} looks like {looks_like.name}, not like {name}; leave --format out")
    if chosen is not None:
        return chosen
    if name is not None:
        known = "; ".join(f"{fmt.name} = {fmt.description}" for fmt in FORMATS.values())
        raise FormatError(f"there is no format {name!r}; known: {known}")
    names = ", ".join(FORMATS)
    raise FormatError(
        f"{path} has no known format{_seen(seen)}; known: {names}. Name one with --format if you are sure, or say in "
        "SQL what its rows are: `trajlake ingest --query FILE.sql`"
    )


def _seen(seen: Look) -> str:
    """What there is in a file, in words."""
    keys = list(seen.first) or list(seen.names)
    if not keys:
        return ""
    what = {"parquet": "columns", "zip": "entries", "sqlite": "tables"}.get(seen.kind, "keys")
    return f" (its {what}: {', '.join(map(str, keys[:12]))}{', ...' if len(keys) > 12 else ''})"
