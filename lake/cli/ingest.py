"""Command `ingest`."""

import re
import shlex
import sys
from typing import TYPE_CHECKING, Any

import click

import lake
from lake.cli.executor_options import executor_of, executor_options
from lake.cli.options import lake_option
from lake.read.text_table import cell, counted

if TYPE_CHECKING:
    from lake.execution.executor import Executor
    from lake.write.plan import Plan, Report, Taken
    from lake.write.preview import Seen
    from lake.write.sources import Argument

_RUNS_NAMED = 3
_FILES_NAMED = 20
_SKIPPED_NAMED = 3
"""Of each reason."""
_REASONS_NAMED = 5
_DETAILS = re.compile(r" \(its .*|; say in SQL .*|; known: .*", re.DOTALL)
"""What a reason says of one file more than of others."""
_SHOWN = 300
"""Characters of a reject's message."""


class _Ingest(click.Command):
    """Its help also lists the names of the formats, which are imported only then."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Options, then formats."""
        from lake.formats import NAMES

        super().format_options(ctx, formatter)
        with formatter.section("Formats"):
            formatter.write_text(", ".join(NAMES))


@click.command(cls=_Ingest)
@click.argument("files", nargs=-1, required=True)
@lake_option
@click.option("--run", "run_id", help="Run of records that name none.  [default: the file's or its folder's name]")
@click.option("--format", "format_name", help="One of those below.  [default: recognised by what a file holds]")
@click.option("--query", is_flag=True, help="FILES are SQL, each a SELECT whose rows are episodes, steps or messages.")
@click.option("--dry-run", is_flag=True, help="Say what would be taken and rejected, show examples, write nothing.")
@click.option("--follow-links", is_flag=True, help="Read links in folders whose files lie outside of them.")
@click.option("--watch", is_flag=True, help="Go on taking what is appended to files or put into folders, until Ctrl-C.")
@click.option(
    "--batch-size",
    type=click.IntRange(min=1),
    default=4096,
    show_default=True,
    help="Most episodes of a commit; it also ends at 32 MB of text.",
)
@executor_options("Parts of the files")
def ingest(
    files: tuple[str, ...],
    lake_uri: str,
    run_id: str | None,
    format_name: str | None,
    query: bool,
    dry_run: bool,
    follow_links: bool,
    watch: bool,
    batch_size: int,
    executor: str,
    workers: int | None,
) -> None:
    """Read trajectories into a lake (made if it is not there): files, folders, globs, s3:// and other URIs, or `-`.

    Formats are recognised by what a file holds (docs/guides/bring-your-trajectories.md says what is read of each);
    .gz and .zst are unpacked. In a folder, files that hold no trajectories are left out, with a message that says why.

    Every record is taken exactly once: the same file again adds nothing, a killed ingest is simply run again. Records
    that cannot be taken are in the table `rejects` with position, reason and raw text. Exits with 1 if there were
    only such.
    """
    from lake.errors import UsageError
    from lake.formats.query import FRAME
    from lake.formats.query import NAME as QUERY
    from lake.write.plan import plan
    from lake.write.preview import Seen
    from lake.write.sources import located

    if watch and (dry_run or query):
        raise UsageError(f"--watch cannot be combined with {'--dry-run' if dry_run else '--query'}")
    if (executor != "local" or workers is not None) and (watch or dry_run or query):
        other = "--watch" if watch else "--dry-run" if dry_run else "--query"
        raise UsageError(f"{other} runs in one process; leave --executor and --workers out")
    if query and format_name is not None:
        raise UsageError("--query and --format exclude each other: a query's rows have a form of their own")
    if format_name in (QUERY, FRAME):
        instead = "--query" if format_name == QUERY else "`Lake.ingest_frame` in Python"
        raise UsageError(f"{format_name} is no format of files; use {instead}")
    options: dict[str, Any] = {"run_id": run_id, "format_name": QUERY if query else format_name}
    if watch:
        _watch(files, lake_uri, batch_size, options | {"follow_links": follow_links})
        return

    def tell(text: str) -> None:
        click.echo(cell(text), err=True)

    with located(files, sys.stdin.buffer, tell, follow_links=follow_links) as arguments:
        # Before a lake is made: a wrong path must leave nothing behind.
        planned = [(argument, plan(argument, **options)) for argument in arguments]
        for argument, found in planned:
            if not found.readings:
                click.echo(f"{cell(argument.name)}: its files were named before", err=True)
        planned = [(argument, found) for argument, found in planned if found.readings]
        if dry_run:
            seen: Seen = {}
            for argument, found in planned:
                _preview(argument, found, seen)
            return
        there = executor_of(executor, workers)
        reports = [_taken(argument, found, lake_uri, batch_size, there) for argument, found in planned]
    if not any(report.new + report.present for report in reports) and any(report.rejected for report in reports):
        sys.exit(1)


def _taken(argument: "Argument", plan: "Plan", lake_uri: str, batch_size: int, executor: "Executor | None") -> "Report":
    """Ingest what one argument names, and say what became of it."""
    from lake.write.ingest import Progress, run_plan

    def show(progress: Progress) -> None:
        size = "" if progress.size is None else f" of {progress.size / 1e6:,.0f}"
        name = cell(argument.name)
        click.echo(f"{name}: {progress.records:,} records, {progress.done / 1e6:,.0f}{size} MB", err=True)

    target = lake.open(lake_uri, create=True)
    report = run_plan(target, plan, batch_size=batch_size, progress=show, executor=executor)
    _tell(argument.name, report, lake_uri)
    return report


def _watch(files: tuple[str, ...], lake_uri: str, batch_size: int, options: dict[str, Any]) -> None:
    from lake.write.watch import Watched, watch

    def tell(report: "Report") -> None:
        if report.records:
            _tell(report.source, report, lake_uri)
        else:
            _tell_skipped(report)

    watched = Watched(files, **options)
    try:
        target = lake.open(lake_uri, create=True)
        click.echo(f"watching {cell(', '.join(files))}; Ctrl-C ends it", err=True)
        for name in watched.absent():
            click.echo(f"{cell(name)} is not there yet", err=True)
        watch(target, watched, batch_size=batch_size, tell=tell)
    except KeyboardInterrupt:
        click.echo("ended; what was taken is in the lake, and is not taken again", err=True)


def _preview(argument: "Argument", plan: "Plan", seen: "Seen") -> None:
    """Say what one argument holds, with examples."""
    from lake.write.preview import preview, shown

    found = preview(plan, seen)
    parts = [
        counted(found.episodes, "episode"),
        counted(found.steps, "step"),
        counted(found.tool_calls, "tool call"),
        counted(found.scores, "score"),
        counted(sum(found.reasons.values()), "reject"),
    ]
    parts += [f"{found.present} repeated"] if found.present else []
    parts += [f"{counted(found.with_tokens, 'step')} with exact tokens"] if found.with_tokens else []
    parts += [f"{counted(found.related, 'episode')} out of others"] if found.related else []
    where = _runs(found.runs, plan.report)
    click.echo(f"{cell(argument.name)} ({_files(plan.report)}): {', '.join(parts)} in {where}; nothing is written")
    _tell_files(found.by_file)
    _tell_columns(plan.report)
    for reason, number in found.reasons.most_common():
        name, position, message = found.faults[reason]
        click.echo(f"{number:,} {reason}, first {cell(name)}, record {position}: {_short(message)}")
    _tell_skipped(plan.report)
    for record in found.examples:
        click.echo(f"\n{shown(record)}")


def _tell(file: str, report: "Report", lake_uri: str) -> None:
    """Print what became of what was named."""
    scores = f"{counted(report.scores, 'score')}, " if report.scores else ""
    files = f" from {counted(report.files, 'file')} ({report.format})"
    several = files if report.files > 1 or report.skipped else ""
    click.echo(
        f"{cell(file)}: {counted(report.new, 'episode')}, {counted(report.steps, 'step')}, {scores}"
        f"{counted(report.rejected, 'reject')} "
        f"({report.present} already present){several} in {_runs(report.runs, report)}"
    )
    _tell_files(report.by_file)
    _tell_columns(report)
    if report.replaced:
        click.echo(f"{counted(report.replaced, 'episode')} had gone on, and replaced what was read before", err=True)
    _tell_skipped(report)
    target = f"--lake {shlex.quote(lake_uri)}"
    if report.new and report.copies:
        without = f"trajlake select distinct --filter dedup:by=decisions,within=group {target}"
        click.echo(f"{report.copies}; leave them out with `{without}`", err=True)
    if report.rejected:
        if report.first_fault is not None:
            name, position, message = report.first_fault
            place = file if report.files == 1 and not report.skipped else name
            click.echo(f"{cell(place)}, record {position}: {_short(message)}", err=True)
        hint = f"trajlake sql {target} 'SELECT position, reason, message FROM rejects ORDER BY position'"
        was = "was" if report.rejected == 1 else "were"
        click.echo(f"{report.rejected} of {counted(report.records, 'record')} {was} rejected; see: {hint}", err=True)


def _tell_files(files: "dict[str, Taken]") -> None:
    """A line for each of several files."""
    if len(files) < 2:
        return
    for name, file in list(files.items())[:_FILES_NAMED]:
        counts = f"{counted(file.episodes, 'episode')}, {counted(file.rejected, 'reject')}"
        runs = f" in {_named_runs(file.runs)}" if file.runs else ""
        click.echo(f"  {cell(name)} ({file.format}): {counts}{runs}")
    if len(files) > _FILES_NAMED:
        click.echo(f"  and {counted(len(files) - _FILES_NAMED, 'more file')}")


def _tell_columns(report: "Report") -> None:
    if report.columns:
        click.echo(cell(report.columns), err=True)


def _tell_skipped(report: "Report") -> None:
    """Which files were left out, by reason; the keys that one of them has are told where it is named alone."""
    if not report.skipped:
        return
    by_reason: dict[str, list[str]] = {}
    for name, why in report.skipped.items():
        by_reason.setdefault(_DETAILS.sub("", why), []).append(cell(name))
    reasons = list(by_reason.items())
    listed = "; ".join(f"{_some(names)}: {_short(why, 160)}" for why, names in reasons[:_REASONS_NAMED])
    rest = sum(len(names) for _, names in reasons[_REASONS_NAMED:])
    more = f"; and {rest} more" if rest else ""
    click.echo(f"{counted(len(report.skipped), 'file')} left out ({listed}{more})", err=True)


def _some(names: list[str]) -> str:
    more = len(names) - _SKIPPED_NAMED
    return ", ".join(names[:_SKIPPED_NAMED]) + (f" and {more} more" if more > 0 else "")


def _files(report: "Report") -> str:
    return report.format if report.files == 1 else f"{report.files} files ({report.format})"


def _runs(runs: set[str], report: "Report") -> str:
    return _named_runs(runs or {report.run_id or report.source})


def _named_runs(runs: set[str]) -> str:
    names = sorted(map(cell, runs))
    more = ", ..." if len(names) > _RUNS_NAMED else ""
    return f"run {names[0]}" if len(names) == 1 else f"{len(names)} runs ({', '.join(names[:_RUNS_NAMED])}{more})"


def _short(message: str, most: int = _SHOWN) -> str:
    text = cell(message)
    return f"{text[:most]}..." if len(text) > most else text
