"""Ingest that goes on: what is appended to files or put into folders is taken as it comes, until interrupted.

Lines are read on from where the last whole line ended, as long as the file still holds that line. Other files (a
session, a document, Parquet) are read again as a whole once nobody has written to them for a moment. Either way half
of a last line is left until its other half comes. What was taken is known by its key, as ever: after a restart the
files are read from their start once more, and nothing is taken twice. A file that is renamed meanwhile, as logs are
that are rotated, is gone on with.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgspec

from lake.errors import FormatError, TrajlakeError, UsageError
from lake.formats import FORMATS, NAMES, query
from lake.formats.base.lines import TAIL
from lake.formats.base.look import look
from lake.formats.base.source import Input, is_packed
from lake.lake import Lake
from lake.records import check_run_name
from lake.write.batches import BATCH_EPISODES
from lake.write.ingest import run_plan
from lake.write.plan import Plan, Reading, Report, planned, reading_of, reason_of
from lake.write.sources import File, is_, local

INTERVAL_SECONDS = 1.0
_REST = 9
"""Seconds of rest for each that was spent on looking: of many thousand files it would be all there is."""
QUIET_SECONDS = 2.0
"""How long a file that is read as a whole must be left alone first."""


class _Seen(NamedTuple):
    """What tells a file that has changed from one that has not."""

    inode: tuple[int, int]
    """With its device."""
    size: int
    modified: int


class _State(msgspec.Struct):
    """What is known of a file."""

    seen: _Seen | None = None
    since: float = 0.0
    """When it was first seen like that, by our own clock: a file's time may be that of another machine."""
    is_done: bool = False
    """As it is, it was read, or found to be none of ours."""
    reading: Reading | None = None
    """If it is read on by lines."""


class Watched(msgspec.Struct):
    """The files that arguments stand for, and how far each was read."""

    arguments: Sequence[str]
    run_id: str | None = None
    format_name: str | None = None
    follow_links: bool = False
    """Whether links in folders to files outside of them are followed."""
    quiet_seconds: float = QUIET_SECONDS
    files: dict[Path, _State] = msgspec.field(default_factory=dict)
    told: set[tuple[str, str, str]] = msgspec.field(default_factory=set)
    """Argument, name and reason of what is no file to be read."""

    def __post_init__(self) -> None:
        """Raises UsageError, FormatError: what nothing can be appended to; no such format, or an empty run."""
        for name in self.arguments:
            if not name or name == "-" or "://" in name or is_(Path(name).is_fifo):
                raise UsageError(f"{name!r} cannot be watched; valid: files, folders and globs of this machine")
        if self.format_name == query.NAME:
            raise UsageError("the rows of a query cannot be watched; run it again when its files have grown")
        if self.format_name is not None and self.format_name not in FORMATS:
            raise FormatError(f"there is no format {self.format_name!r}; known: {', '.join(NAMES)}")
        if self.run_id is not None:
            check_run_name(self.run_id)

    def absent(self) -> list[str]:
        """The arguments that stand for nothing yet."""
        return [name for name in self.arguments if not (is_(Path(name).exists) or _matches_some(name))]

    def changed(self) -> list[Plan]:
        """What is to be read, or to be told of, now: one plan per argument that has something."""
        now = time.monotonic()
        plans = []
        met: set[object] = set()
        arguments = [local(name, met, may_be_empty=True, follow_links=self.follow_links) for name in self.arguments]
        seen = _seen(file.path for argument in arguments for file in argument.files)
        self._follow(seen)
        for argument in arguments:
            readings: list[Reading] = []
            left_out = {(argument.name, *item): item for item in argument.left_out.items()}
            skipped = dict(item for key, item in left_out.items() if key not in self.told)
            self.told |= left_out.keys()
            for file in filter(lambda file: file.path in seen, argument.files):
                try:
                    reading = self._reading(file, seen[file.path], now)
                except FormatError as error:
                    skipped[file.name] = reason_of(error, file)
                else:
                    readings += [] if reading is None else [reading]
            if readings or skipped:
                plans.append(planned(argument, readings, skipped, self.run_id))
        return plans

    def is_away(self, plan: Plan, error: OSError) -> bool:
        """Whether reading failed because a file has gone or changed hands meanwhile; all are looked at again then."""
        paths = {str(reading.file.path) for reading in plan.readings}
        if isinstance(error, TrajlakeError) or str(error.filename) not in paths:
            return False
        for reading in plan.readings:
            self.files.pop(reading.file.path, None)
        return True

    def _follow(self, seen: dict[Path, _Seen]) -> None:
        """Go on with files that have other names by now; their records stay in their run."""
        known = {state.seen.inode: (path, state) for path, state in self.files.items() if state.seen}
        moved = {}
        for path, found in seen.items():
            before, state = known.get(found.inode, (path, _State()))
            if before != path and (found == state.seen or (state.reading and _goes_on(state.reading.input, path))):
                moved[path] = self.files.pop(before)
        for path, state in moved.items():
            if state.reading is not None:
                state.reading.file = replace(state.reading.file, path=path)
                state.reading.input.path = path
        self.files |= moved

    def _reading(self, file: File, seen: _Seen, now: float) -> Reading | None:
        """How to read a file now; None if there is nothing new, or it is still being written.

        Raises:
            FormatError: it has been quiet for long enough, and is none of ours.
        """
        state = self.files.setdefault(file.path, _State())
        if seen != state.seen:
            state.seen, state.since, state.is_done = seen, now, False
        if state.is_done:
            return None
        if state.reading is not None and _goes_on(state.reading.input, file.path):
            state.is_done = True
            state.reading.input.meter.done = 0
            return state.reading
        state.reading = None
        is_quiet = now - state.since >= self.quiet_seconds
        try:
            reading = reading_of(file, run_id=self.run_id, format_name=self.format_name)
            reading.input.may_grow = _has_lines(file.path)
        except FormatError:
            state.is_done = is_quiet
            if not is_quiet:
                return None
            raise
        except OSError:
            return None  # it has gone meanwhile; what takes its place is another file
        if reading.input.may_grow and reading.format.by_line:
            state.reading = reading
        elif not is_quiet:
            return None
        state.is_done = True
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
        began = time.perf_counter()
        plans = watched.changed()
        looked = time.perf_counter() - began
        for plan in plans:
            try:
                report = run_plan(lake, plan, batch_size=batch_size, only_if_any=True)
            except OSError as error:
                if not watched.is_away(plan, error):
                    raise
                continue
            if report.records or report.skipped:
                tell(report)
        time.sleep(max(interval, _REST * looked))


def _matches_some(pattern: str) -> bool:
    return any(is_(file.path.exists) for file in local(pattern, set(), may_be_empty=True).files)


def _seen(paths: Iterable[Path]) -> dict[Path, _Seen]:
    """How the files are now that are there."""
    found = {}
    for path in paths:
        try:
            now = path.stat()
        except OSError:
            continue
        found[path] = _Seen((now.st_dev, now.st_ino), now.st_size, now.st_mtime_ns)
    return found


def _has_lines(path: Path) -> bool:
    """Whether a file is lines that may be added to: it is not packed, and no document over many lines."""
    seen = look(path)
    text = seen.text.strip()
    begins_document = "\n" in text and text.partition("\n")[0].rstrip() == "{"
    return seen.kind in ("lines", "object") and not is_packed(path) and not begins_document


def _goes_on(file: Input, path: Path) -> bool:
    """Whether a file still holds what was read last where it was: it was appended to or renamed, not written anew."""
    tail: bytes = file.memory.get(TAIL, b"")
    if not tail:
        return False
    try:
        with path.open("rb") as opened:
            opened.seek(file.from_byte - len(tail))
            return opened.read(len(tail)) == tail
    except OSError:
        return False
