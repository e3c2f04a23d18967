"""What will be read as what: the files of an argument with their formats and runs, before any record is read."""

from typing import Any

import msgspec

from lake.errors import FormatError
from lake.formats import choose, query
from lake.formats.base.format import Format
from lake.formats.base.source import Input, is_packed
from lake.records import check_run_name, printable
from lake.write.runs import run_of
from lake.write.sources import Argument, File


class Taken(msgspec.Struct):
    """What became of one file."""

    format: str
    episodes: int = 0
    """New or present."""
    rejected: int = 0
    runs: set[str] = msgspec.field(default_factory=set)

    def take(self, run_id: str) -> None:
        """Count an episode."""
        self.episodes += 1
        self.runs.add(run_id)


class Report(msgspec.Struct):
    """What became of what a person named: a file, or the files of a folder."""

    source: str
    format: str
    """The formats, comma-separated, that its files have."""
    run_id: str | None
    """The run of records that name none; None if that depends on the file."""
    files: int = 1
    """Those that were read."""
    skipped: dict[str, str] = msgspec.field(default_factory=dict)
    """Files of a folder that hold no trajectory or are of no known format -> why they were left out."""
    records: int = 0
    new: int = 0
    present: int = 0
    replaced: int = 0
    """New episodes that replace an earlier reading: a session that has gone on since."""
    rejected: int = 0
    steps: int = 0
    """Steps of the new episodes."""
    scores: int = 0
    """Scores that are new, of new episodes and of those that were present."""
    runs: set[str] = msgspec.field(default_factory=set)
    """The runs that the records name."""
    first_fault: tuple[str, int, str] | None = None
    """File, position and message of the first record that was not taken."""
    copies: str = ""
    """What there is to know of episodes that repeat a sibling, as a sentence."""
    columns: str = ""
    """Columns of a query or a frame that mean nothing, where they are kept and what they might mean, as a sentence."""
    by_file: dict[str, Taken] = msgspec.field(default_factory=dict)
    """Each file that was read -> what became of it."""

    def add(self, later: "Report") -> None:
        """Count what another one has counted of records that come after these."""
        self.records += later.records
        self.new += later.new
        self.present += later.present
        self.replaced += later.replaced
        self.rejected += later.rejected
        self.steps += later.steps
        self.runs |= later.runs
        self.first_fault = self.first_fault or later.first_fault
        for name, file in later.by_file.items():
            mine = self.by_file.setdefault(name, Taken(file.format))
            mine.episodes += file.episodes
            mine.rejected += file.rejected
            mine.runs |= file.runs


class Reading(msgspec.Struct):
    """A file, its format, and what its reader needs."""

    file: File
    format: Format
    input: Input
    is_run_given: bool = True
    """Whether the run was named by a person, or is settled: see `lake.write.runs`."""
    columns: str = ""
    """See `Report.columns`."""


class Plan(msgspec.Struct):
    """What an argument stands for, before any record is read."""

    report: Report
    readings: list[Reading]

    @property
    def size(self) -> int:
        """Bytes of the files."""
        return sum(reading.file.path.stat().st_size for reading in self.readings)

    @property
    def text_size(self) -> int | None:
        """Bytes of text that the files hold; None if that is not known before all is read."""
        return None if any(map(_is_unlike_its_text, self.readings)) else self.size

    @property
    def done(self) -> int:
        """Bytes of text that were read."""
        return sum(reading.input.meter.done for reading in self.readings)

    def parameters(self) -> dict[str, Any]:
        """Of the job: nothing that depends on the machine."""
        report = self.report
        several = {} if len(self.readings) == 1 else {"files": len(self.readings)}
        named = {"source": report.source, "bytes": self.size, "format": report.format, "run_id": report.run_id}
        return named | several


def _is_unlike_its_text(reading: Reading) -> bool:
    """Whether a file is packed, or has its text from elsewhere."""
    return reading.format.name == query.NAME or is_packed(reading.file.path)


def plan(argument: Argument, *, run_id: str | None = None, format_name: str | None = None) -> Plan:
    """Which files will be read as what; needs no lake. Nothing is read of an argument whose files were named before.

    A file's records belong to the run that `lake.write.runs` says, unless they or `run_id` name another.

    Raises:
        FormatError: a file that was named is missing, empty, of no known format or without trajectories; a folder has
            none that is not.
        UsageError: an empty run.
    """
    readings: list[Reading] = []
    skipped = dict(argument.left_out)
    for file in argument.files:
        try:
            readings.append(reading_of(file, run_id=run_id, format_name=format_name))
        except FormatError as error:
            if not argument.label:
                raise FormatError(str(error).replace(str(file.path), argument.name)) from error
            skipped[file.name] = reason_of(error, file)
    if argument.files and not readings:
        name, why = next((file.name, skipped[file.name]) for file in argument.files)
        more = f" (and {len(skipped) - 1} more files)" if len(skipped) > 1 else ""
        raise FormatError(f"{argument.name} holds no trajectories: {name} {why}{more}")
    return planned(argument, readings, skipped, run_id)


def reading_of(file: File, *, run_id: str | None, format_name: str | None) -> Reading:
    """How a file will be read. Raises FormatError, UsageError: see `plan`; QueryError: a query that cannot be run."""
    fmt = choose(file.path, format_name)
    columns = query.check(file.path) if fmt.name == query.NAME else ""
    run = run_of(file, fmt) if run_id is None else printable(run_id)
    check_run_name(run)
    return Reading(file, fmt, Input(file.path, run), is_run_given=run_id is not None, columns=columns)


def reason_of(error: FormatError, file: File) -> str:
    """Why a file is left out, without its path."""
    return str(error).removeprefix(str(file.path)).lstrip(": ")


def planned(argument: Argument, readings: list[Reading], skipped: dict[str, str], run_id: str | None) -> Plan:
    """The plan of an argument. The job of a folder has no run of its own: that would depend on what is in it today."""
    formats = ", ".join(dict.fromkeys(reading.format.name for reading in readings))
    run = readings[0].input.run_id if readings and not argument.label else run_id
    report = Report(argument.source, formats, run, files=len(readings), skipped=skipped)
    report.columns = "; ".join(dict.fromkeys(reading.columns for reading in readings if reading.columns))
    report.by_file = {reading.file.name: Taken(reading.format.name) for reading in readings}
    return Plan(report, readings)
