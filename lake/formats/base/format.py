"""Formats: how a file is recognised by its beginning, and how it is read.

Only the beginning of a file is examined. A JSON value that this beginning cuts is decoded as far as it reaches, so a
damaged or huge file is recognised like a complete one.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any, Literal, Protocol

import msgspec

from lake.errors import FormatError
from lake.formats.base import archives
from lake.formats.base.rules import apply_rules
from lake.formats.base.source import Input, Meter, Source, get_stem
from lake.records import EpisodeRecord, Reject

Item = tuple[int, EpisodeRecord] | Reject
"""A record with its position in the file, or the reject that explains why it has no record."""
Kind = Literal["lines", "array", "object", "parquet", "zip", "sqlite", "other"]
HEAD_BYTES = 1 << 16
_WIDE_BYTES = 16 << 20
"""Bytes that are examined when the first value is longer than the head: the telling key may be its last one."""
_MOST_VALUES = 200
_KEY = re.compile(r'"([A-Za-z_][\w.$-]*)"\s*:')
_MAGIC: tuple[tuple[bytes, Kind], ...] = (
    (b"PAR1", "parquet"),
    (b"PK\x03\x04", "zip"),
    (b"PK\x05\x06", "zip"),
    (b"SQLite format 3\x00", "sqlite"),
)
_UTF16 = (b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True)
class FileHead:
    """The beginning of a file."""

    path: Path
    kind: Kind
    """lines, array or object for JSON; a binary kind by its first bytes; other for everything else."""
    text: str = ""
    """The first 64 KB with undecodable bytes replaced; empty for a binary kind."""
    values: list[Any] = field(default_factory=list)
    """The first JSON values: lines, elements of the array, or the one object. The last one may be cut."""

    @cached_property
    def objects(self) -> list[dict[str, Any]]:
        """The values that are objects."""
        return [json_value for json_value in self.values if isinstance(json_value, dict)]

    @cached_property
    def _key_sets(self) -> set[frozenset[str]]:
        # Many lines share few different sets of keys.
        return {frozenset(row) for row in self.objects}

    @property
    def first(self) -> dict[str, Any]:
        """The first object; an empty one if the file has no object."""
        return next(iter(self.objects), {})

    def has(self, *keys: str) -> bool:
        """Return whether one of the first objects has all of these keys."""
        return any(key_set.issuperset(keys) for key_set in self._key_sets)

    def says(self, key: str, texts: Iterable[str]) -> bool:
        """Return whether one of the first objects has one of these texts under `key`."""
        return any(row.get(key) in set(texts) for row in self.objects if isinstance(row.get(key), str))

    @property
    def names(self) -> tuple[str, ...]:
        """Columns of a Parquet file, entries of a zip archive, tables of an SQLite file; empty if it is damaged."""
        return self._names_and_damage[0]

    @property
    def damage(self) -> str | None:
        """The reason why a binary file shows no names; None if nothing is damaged."""
        return self._names_and_damage[1]

    @cached_property
    def _names_and_damage(self) -> tuple[tuple[str, ...], str | None]:
        names: tuple[str, ...] = ()
        try:
            if self.kind == "parquet":
                import pyarrow.parquet as pq

                names = tuple(pq.read_schema(self.path).names)
            elif self.kind in ("zip", "sqlite"):
                is_zip = self.kind == "zip"
                names = (
                    tuple(e.name for e in archives.list_entries(self.path)[0])
                    if is_zip
                    else archives.list_tables(self.path)
                )
        except (OSError, ValueError) as error:
            return (), str(error).partition(". ")[0]
        return names, None


def read_head(path: Path) -> FileHead:
    """Read the beginning of a file. Raises FormatError: the file cannot be read, or is empty."""
    try:
        with Source(path) as file:
            start, fault = file.read(HEAD_BYTES), file.fault
            kind = next((kind for magic, kind in _MAGIC if start.startswith(magic)), None)
            if kind is not None:
                return FileHead(path, kind)
            if start.startswith(_UTF16):
                raise FormatError(f"{path} is text in UTF-16; save it as UTF-8")
            text = start.decode("utf-8", errors="replace").lstrip("\ufeff")
            head = _decode_head(path, text, text)
            if head.kind == "object" and len(start) == HEAD_BYTES:
                wide = start + file.read(_WIDE_BYTES)
                head = _decode_head(path, text, wide.decode("utf-8", errors="replace").lstrip("\ufeff"))
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror}; give the path of a readable file") from error
    if not text.strip() and fault is not None:
        raise FormatError(f"{path}: {fault}; nothing in it can be read")
    if not text.strip() or (head.kind == "array" and not "".join(text.split()).removeprefix("[").removesuffix("]")):
        raise FormatError(f"{path} is empty; there is nothing to ingest")
    return head


def read_head_or_other(path: Path) -> FileHead:
    """Read the beginning of a file; an unreadable one is of kind `other`, and reading its values reports the reason."""
    try:
        return read_head(path)
    except FormatError:
        return FileHead(path, "other")


def _decode_head(path: Path, text: str, wide: str) -> FileHead:
    """Decode the first JSON values of `wide`, which begins like `text`."""
    from pydantic_core import from_json

    def decode(json_text: str, *, allow_partial: bool) -> Any:
        try:
            return from_json(json_text, allow_partial=allow_partial)  # also takes NaN, which some formats write
        except ValueError:
            return None

    start = text.lstrip()
    # A document that an error cuts short still shows its keys.
    keys = dict.fromkeys(_KEY.findall(start)) if start[:1] in ("{", "[") else {}
    by_keys = [keys] if keys else []
    if start.startswith("["):
        elements = decode(start, allow_partial=True)
        return FileHead(path, "array", text, elements[:_MOST_VALUES] if isinstance(elements, list) else by_keys)
    rows = []
    for line in (line.rstrip() for line in wide.split("\n", _MOST_VALUES)[:_MOST_VALUES]):
        if line.startswith("{") and line.endswith("}"):
            try:
                row = msgspec.json.decode(line)
            except (msgspec.DecodeError, ValueError, RecursionError):
                row = decode(line, allow_partial=False)
            rows += [row] if row else []
    if rows:
        return FileHead(path, "lines", text, rows)
    if not start.startswith("{"):
        return FileHead(path, "other", text)
    document = decode(wide.lstrip(), allow_partial=True)
    return FileHead(path, "object", text, [document] if document else by_keys)


class FormatReader(Protocol):
    """Reads a file as records and rejects, in order."""

    def __call__(self, file: Input) -> Iterator[Item]:
        """Read a file and advance its meter."""


RunFolder = Callable[[PurePath], PurePath]
"""Function from the path of a file to the folder that names its run."""


def get_parent_folder(path: PurePath) -> PurePath:
    """Return the folder that contains a file."""
    return path.parent


def find_folder_above(pattern: str) -> RunFolder:
    """Return a function that finds the nearest folder above a file whose name does not match `pattern`."""
    return lambda path: next((f for f in path.parents if not re.fullmatch(pattern, f.name)), path.parent)


def get_rollouts_folder(path: PurePath) -> PurePath:
    """Return the parent folder, or the one above it if each rollout has a folder with the name of its file."""
    return path.parents[1] if path.name.startswith(f"{path.parent.name}.") else path.parent


@dataclass(frozen=True, slots=True)
class Format:
    """One format."""

    name: str
    description: str
    recognise: Callable[[FileHead], bool]
    """Returns whether a file looks like this format."""
    reader: FormatReader
    no_trajectory: Callable[[FileHead], str | None] = lambda _: None
    """Returns a sentence about a file of the same tool without trajectories; None if the file may hold some."""
    by_line: bool = False
    """Each line of a file is complete: a growing file is read again from the end of its last line."""
    any_line: bool = False
    """A line also does not depend on the lines before it: a file can be read from any line on."""
    is_whole: bool = False
    """A file is one episode, or few whose records are spread over it. If it grows, it is read again completely, and the
    new rows replace the old ones. Keys therefore come from ids or from the beginning of a rollout. If rollouts share
    one, their decisions tell them apart (`lake.write.growth`)."""

    list_parts: Callable[[Path], Iterable[Path]] = lambda _: ()
    """Lists the files that reading a file includes: an ingest of their folder would read and count them twice."""
    is_exact: bool = False
    """Its fields are a record's, so no rule changes them (`lake.formats.base.rules`)."""
    location: str | None = None
    """Path of the declaration, for a format that a user declared."""
    has_copies: bool = False
    """Its tool writes the history of a session again into other files (`lake.formats.chat.sessions`)."""
    run_folder: RunFolder | None = None
    """Finds the folder that stands for the run when a file is one part of it, such as an episode or a training step.
    None: a file is a run."""

    def read(self, path: Path, meter: Meter | None = None, run_id: str | None = None) -> Iterator[Item]:
        """Read the records and rejects of a file."""
        return self.read_items(Input(path, get_stem(path) if run_id is None else run_id, meter or Meter()))

    def read_items(self, file: Input) -> Iterator[Item]:
        """Read the records and rejects of a file, with the rules that hold for all formats."""
        items = self.reader(file)
        return items if self.is_exact else (i for i in items if isinstance(i, Reject) or apply_rules(i[1], file))
