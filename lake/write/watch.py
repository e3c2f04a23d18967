"""Ingest that goes on: what is appended to files or put into folders is taken as it comes, until interrupted.

Lines are read on from where the last whole line ended. Other files (a session, a document, Parquet) are read again as a
whole once nobody has written to them for a moment. What was taken is known by its key, as ever: after a restart the
files are read from their start once more, and nothing is taken twice.
"""

import time
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import msgspec

from lake.errors import FormatError, UsageError
from lake.formats.look import look
from lake.formats.source import Source
from lake.lake import Lake
from lake.write.ingest import BATCH_EPISODES, Plan, Reading, Report, plan, run_plan
from lake.write.sources import Argument, File, located

INTERVAL_SECONDS = 1.0
QUIET_SECONDS = 2.0
"""How long a file that is read as a whole must be left alone first."""


class _Seen(NamedTuple):
    """What tells a file that has changed from one that has not."""

    inode: int
    size: int
    modified: int

    @classmethod
    def of(cls, path: Path) -> "_Seen":
        found = path.stat()
        return cls(found.st_ino, found.st_size, found.st_mtime_ns)


class Watched(msgspec.Struct):
    """The files that arguments stand for, and how far each was read."""

    arguments: Sequence[str]
    run_id: str | None = None
    format_name: str | None = None
    quiet_seconds: float = QUIET_SECONDS
    taken: dict[Path, _Seen] = msgspec.field(default_factory=dict)
    """What a file was when it was read last, or found to be none of ours."""
    readings: dict[Path, Reading] = msgspec.field(default_factory=dict)
    """Of files that are read on by lines."""

    def __post_init__(self) -> None:
        """Raises UsageError: something that nothing can be appended to."""
        for name in self.arguments:
            if name == "-" or "://" in name or Path(name).is_fifo():
                raise UsageError(f"{name!r} cannot be watched; valid: files, folders and globs of this machine")

    def changed(self) -> list[Plan]:
        """What is to be read now: one plan per argument that has something."""
        plans = []
        for name in self.arguments:
            try:
                with located([name], BytesIO()) as (argument,):
                    readings = [found for file in argument.files if (found := self._reading(name, file)) is not None]
            except FormatError:
                continue  # an empty folder, a file that will be there later
            if readings:
                formats = ", ".join(dict.fromkeys(reading.format.name for reading in readings))
                report = Report(readings[0].file.name, formats, readings[0].input.run_id, files=len(readings))
                plans.append(Plan(report, readings))
        return plans

    def _reading(self, name: str, file: File) -> Reading | None:
        """How to read a file now; None if there is nothing new, or it is still being written, or none of ours."""
        try:
            seen = _Seen.of(file.path)
        except FileNotFoundError:
            return None
        before = self.taken.get(file.path)
        if seen == before:
            return None
        known = self.readings.get(file.path)
        if known is not None and before is not None and seen.inode == before.inode and seen.size >= before.size:
            self.taken[file.path] = seen
            return known
        try:
            (reading,) = plan(Argument(name, [file]), run_id=self.run_id, format_name=self.format_name).readings
            by_line = reading.format.by_line and look(file.path).kind == "lines" and not _is_packed(file.path)
        except FormatError:
            self.taken[file.path] = seen
            return None
        if by_line:
            reading.input.may_grow = True
            self.readings[file.path] = reading
        elif time.time() - seen.modified / 1e9 < self.quiet_seconds:
            return None
        self.taken[file.path] = seen
        return reading


def watch(
    lake: Lake,
    watched: Watched,
    *,
    batch_size: int = BATCH_EPISODES,
    interval: float = INTERVAL_SECONDS,
    tell: Callable[[Report], None],
) -> None:
    """Take what comes, until interrupted; `tell` hears of every round that brought something."""
    while True:
        for planned in watched.changed():
            report = run_plan(lake, planned, batch_size=batch_size, only_if_any=True)
            if report.records:
                tell(report)
        time.sleep(interval)


def _is_packed(path: Path) -> bool:
    with Source(path) as file:
        return file.is_packed
