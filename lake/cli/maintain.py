"""Commands that look after a lake: `compact`, `vacuum`, `retract`, `restore`, `forget`, `snapshot`, `diff`."""

import shlex
import sys
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import click

import lake
from lake import ids
from lake.cli.executor_options import executor_of, executor_options
from lake.cli.options import Lakes, chosen_episodes, echo_rows, format_option, lake_option, lakes_option, opened
from lake.errors import UsageError
from lake.read.text_table import counted
from lake.tables import TABLES

if TYPE_CHECKING:
    import polars as pl

    from lake.care.erasure import Cut
    from lake.care.retraction import Consequences
    from lake.read.snapshot import Snapshot


@click.command()
@click.argument("tables", nargs=-1)
@lake_option
@format_option
@click.option("--z-order", help="Columns to interleave, comma-separated.  [default: the table's own order]")
@click.option("--target-mb", type=click.IntRange(min=1), default=128, show_default=True, help="Size of a merged file.")
@executor_options("Merged files")
def compact(
    tables: tuple[str, ...],
    lake_uri: str,
    output_format: str,
    z_order: str | None,
    target_mb: int,
    executor: str,
    workers: int | None,
) -> None:
    """Merge the small files of TABLES (all of them unless named) into sorted ones. Safe beside writers and readers."""
    import polars as pl

    target = lake.open(lake_uri)
    columns = [name.strip() for name in z_order.split(",")] if z_order else []
    there = executor_of(executor, workers)
    merge = partial(target.compact, z_order=columns, target_bytes=target_mb << 20, executor=there)
    done = [merge(name) for name in tables or TABLES]
    _echo_done(pl.DataFrame(done), output_format, "no table has small files to merge")


@click.command()
@lake_option
@format_option
@click.option("--days", type=float, default=7, show_default=True, help="How long what nobody needs stays.")
@click.option("--dry-run", is_flag=True, help="Say what would be deleted, and change nothing.")
def vacuum(lake_uri: str, output_format: str, days: float, dry_run: bool) -> None:
    """Drop dead writes and delete files that nobody needs.

    Kept are the newest versions, those of the last DAYS, and everything that named snapshots and running trainers pin.
    """
    import polars as pl

    from lake.care.vacuum import SHORTEST_RETENTION

    try:
        retention = timedelta(days=days)
    except (OverflowError, ValueError) as error:
        raise UsageError(f"--days {days} is no length of time; valid: 0.05 or more") from error
    if retention < SHORTEST_RETENTION:
        raise UsageError(f"--days {days:g} is less than the hour that running readers may need; valid: 0.05 or more")
    done = lake.open(lake_uri).vacuum(retention=retention, dry_run=dry_run)
    nothing = f"there is nothing to delete; what is replaced or dead stays for {days:g} days (--days)"
    _echo_done(pl.DataFrame(done), output_format, nothing)
    if dry_run:
        click.echo("nothing was changed: this was a dry run", err=True)


def _echo_done(done: "pl.DataFrame", output_format: str, nothing: str) -> None:
    """Print what was done to each table; to read, only those to which something was."""
    import polars as pl

    if output_format in ("table", "line"):
        done = done.filter(pl.any_horizontal(pl.exclude("table") > 0))
        if done.is_empty():
            click.echo(nothing, err=True)
            return
    echo_rows(done, output_format)


@click.command()
@click.argument("episodes", nargs=-1)
@lake_option
@click.option(
    "--where", help="SQL on `episodes`, as \"task_id = '12' AND status = 'failed'\".  [default: none but EPISODES]"
)
@click.option("--reason", help="Why, for whoever asks later.  [default: none]")
@click.option("--dry-run", is_flag=True, help="Say what would be hidden, and change nothing.")
def retract(episodes: tuple[str, ...], lake_uri: str, where: str | None, reason: str | None, dry_run: bool) -> None:
    """Hide EPISODES from every later snapshot. The rows stay, and older snapshots still show them.

    `trajlake restore` shows them again.
    """
    from lake.care import retraction

    target = lake.open(lake_uri)
    chosen = chosen_episodes(target, episodes, where)
    if where is not None and not chosen:
        click.echo("0 episodes retracted: no visible one meets the condition")
        return
    done = retraction.retract(target, chosen, reason, dry_run=dry_run)
    already = f"(already retracted: {len(done.unchanged)})"
    if dry_run:
        click.echo(f"{counted(len(done.changed), 'episode')} would be retracted {already}")
        _echo_consequences(retraction.consequences(target.snapshot(), done.changed), "hidden")
        return
    click.echo(f"{counted(len(done.changed), 'episode')} retracted {already}")
    if done.job_id is not None:
        back = ["trajlake", "restore", "--lake", target.uri, "--job", ids.to_text(done.job_id)]
        click.echo(f"to show them again: {shlex.join(back)}", err=True)


@click.command()
@click.argument("episodes", nargs=-1)
@lake_option
@click.option("--where", help="SQL on `episodes`, of retracted ones.  [default: none but EPISODES]")
@click.option("--job", "job", help="What this job of `trajlake retract` hid: its id.  [default: none but EPISODES]")
@click.option("--reason", help="Why, for whoever asks later.  [default: none]")
@click.option("--dry-run", is_flag=True, help="Say what would be shown again, and change nothing.")
def restore(
    episodes: tuple[str, ...], lake_uri: str, where: str | None, job: str | None, reason: str | None, dry_run: bool
) -> None:
    """Show EPISODES, which were retracted, in every later snapshot again. Older snapshots stay as they are.

    An episode that a later attempt replaced stays hidden: of the attempts at a rollout the last one counts. What was
    erased with `trajlake forget` cannot be restored.
    """
    from lake.care import retraction

    target = lake.open(lake_uri)
    before = target.snapshot()
    chosen = chosen_episodes(target, episodes, None) + _hidden_ones(target, before, where, job)
    if not chosen and not episodes and (where is not None or job is not None):
        click.echo("0 episodes restored: no retracted one meets the condition")
        return
    done = retraction.restore(target, chosen, reason, dry_run=dry_run)
    counts = f"(already shown: {len(done.unchanged)}; replaced by a later attempt: {len(done.replaced)})"
    click.echo(f"{counted(len(done.changed), 'episode')} {'would be restored' if dry_run else 'restored'} {counts}")
    if dry_run:
        _echo_consequences(retraction.consequences(before, done.changed), "shown")


def _hidden_ones(target: lake.Lake, snapshot: "Snapshot", where: str | None, job: str | None) -> list[int]:
    """The episodes that readers do not see, of those that meet a condition, and of those that a job hid."""
    from lake.care.retraction import retracted_by

    try:
        of_job = [] if job is None else retracted_by(snapshot, ids.from_text(job))
    except ValueError as error:
        raise UsageError(f"--job: {error}") from error
    met = [] if where is None else chosen_episodes(target, (), where, retracted_too=True)
    hidden = set(snapshot.retracted)
    return [one for one in (*of_job, *met) if one in hidden]


def _echo_consequences(found: "Consequences", becoming: str) -> None:
    """Print what readers lose or get back, on stderr."""
    whole = "would be empty" if becoming == "hidden" else "would come back as a whole"
    rows = ", ".join(f"{name} {count:,}" for name, count in found.rows.items())
    click.echo(f"groups: {found.groups:,}, of which {found.whole_groups:,} {whole}", err=True)
    click.echo(f"rows that would be {becoming}: {rows or 'none'}", err=True)
    if found.credit_groups:
        click.echo(
            f"the current credit ({found.credit}) has {counted(found.credit_groups, 'group')} of these: run the same "
            f"`trajlake credit {found.credit} ...` again afterwards",
            err=True,
        )
    click.echo("nothing was changed: this was a dry run", err=True)


@click.command()
@click.argument("episodes", nargs=-1)
@lake_option
@click.option("--where", help="SQL on `episodes`, retracted ones included.  [default: none but EPISODES]")
@click.option("--reason", help="Why; it is kept.  [default: none]")
@click.option("--yes", is_flag=True, help="Do not ask before erasing.")
def forget(episodes: tuple[str, ...], lake_uri: str, where: str | None, reason: str | None, yes: bool) -> None:
    """Erase EPISODES: from every table, from the disk, from snapshots taken before. There is no way back.

    Says first which named snapshots, running readers and interrupted runs lose some of them, and asks; snapshots keep
    the rest of what they held. Without a terminal it takes --yes.

    They are not taken again either: a later ingest rejects them. Records that were rejected for faults of their own
    have no key to find them by: look in `rejects`.
    """
    target = lake.open(lake_uri)
    chosen = chosen_episodes(target, episodes, where, retracted_too=True)
    if where is not None and not chosen:
        click.echo("0 episodes erased: none meets the condition")
        return
    for cut in target.cuts(chosen):
        click.echo(_in_words(cut), err=True)
    question = f"Erase {counted(len(chosen), 'episode')} of {target.uri} for good?"
    if not yes and not sys.stdin.isatty():
        raise UsageError(f"{question} There is no terminal to ask on: add --yes if you mean it. Nothing was changed")
    if not yes:
        click.confirm(question, abort=True, err=True)
    done = target.forget(chosen, reason)
    rows = ", ".join(f"{name} {count}" for name, count in done.rows.items() if count)
    erased, deleted = counted(done.episodes, "episode"), counted(done.deleted_files, "old file")
    views = f"; saved views deleted: {', '.join(done.views)}" if done.views else ""
    click.echo(f"{erased} erased; rows: {rows or 'none left'}; {deleted} deleted{views}")
    _echo_spools(target)
    if done.unreadable:
        click.echo(
            f"{len(done.unreadable)} half-written files of killed or running writers cannot be looked into, for "
            f"example {done.unreadable[0]}; run this again when no writer is at work, or `trajlake vacuum` in a week",
            err=True,
        )


def _echo_spools(target: lake.Lake) -> None:
    """Name the folders on this machine where more of what was erased may lie, on stderr."""
    from lake.live.adoption import spools_of
    from lake.live.owners import owner_of

    for member in target.members:
        for held in spools_of(owner_of(member)):
            what = "a recorder keeps here what it recorded lately; stop it, which deletes it"
            if not held.is_in_use:
                what = f"what was recorded lately is still here; `trajlake spools --lake {member.uri}` tells more"
            click.echo(f"{held.folder}: {what}", err=True)


def _in_words(cut: "Cut") -> str:
    """What somebody who keeps an earlier snapshot loses, and what stays."""
    lost = f"loses {cut.forgotten} of {counted(cut.episodes, 'episode')}"
    if cut.kind == "snapshot":
        return f"snapshot {cut.name} {lost}; the other {cut.episodes - cut.forgotten} stay readable"
    if cut.kind == "lease":
        return f"{cut.name} is running and {lost}: it may stop with an error, and cannot be resumed"
    return f"{cut.name} is not finished and {lost}: it cannot be resumed"


@click.group()
def snapshot() -> None:
    """Name the lake as it is now, list the names, drop one."""


@snapshot.command("create")
@click.argument("name")
@lakes_option
def snapshot_create(name: str, lake_uri: Lakes) -> None:
    """Keep the newest versions of all tables readable as NAME until it is dropped."""
    pin = lake.open(lake_uri).name_snapshot(name)
    click.echo(f"{pin.name}: episodes at version {pin.versions['episodes']}; read it with --as-of {pin.name}")


@snapshot.command("list")
@lakes_option
@format_option
def snapshot_list(lake_uri: Lakes, output_format: str) -> None:
    """List named snapshots, oldest first: the episodes that each shows, and how many were forgotten since."""
    import polars as pl

    from lake.errors import LakeAccessError
    from lake.read.parquet import collected

    target = lake.open(lake_uri)
    rows: list[dict[str, Any]] = []
    for pin in target.snapshots():
        row = {"name": pin.name, "created_at": pin.created_at, "episodes_version": pin.versions.get("episodes")}
        with suppress(LakeAccessError):  # damaged: not known, and no reason to hide the others
            shown = target.at(pin.versions)
            row["episodes"] = len(collected(shown.scan("episodes").select("episode_id")))
            row["forgotten"] = shown.forgotten
        rows.append(row)
    schema: dict[str, pl.DataType] = {
        "name": pl.String(),
        "created_at": pl.Datetime("us", "UTC"),
        "episodes_version": pl.Int64(),
        "episodes": pl.Int64(),
        "forgotten": pl.Int64(),
    }
    echo_rows(pl.DataFrame(rows, schema=schema), output_format)


@snapshot.command("drop")
@click.argument("name")
@lakes_option
def snapshot_drop(name: str, lake_uri: Lakes) -> None:
    """Take NAME back. What only it needed is deleted by the next vacuum."""
    lake.open(lake_uri).drop_snapshot(name)
    click.echo(f"{name} dropped")


@click.command()
@click.argument("before")
@click.argument("after", required=False)
@lakes_option
@format_option
@click.option(
    "--show",
    type=click.Choice(["summary", "added", "removed", "scores", "flips"]),
    default="summary",
    show_default=True,
    help="How much of what changed, or the rows themselves.",
)
def diff(before: str, after: str | None, lake_uri: Lakes, output_format: str, show: str) -> None:
    """Say what changed from BEFORE to AFTER (now, unless given).

    Each is the name of a snapshot, a time (2026-11-20T10:00, UTC), or a version of `episodes`.
    """
    from lake.read.history import difference

    change = difference(opened(lake_uri, before), opened(lake_uri, after))
    echo_rows(change.summary() if show == "summary" else getattr(change, show), output_format)
