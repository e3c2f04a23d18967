"""Commands `sql`, `show`, `tables`, `history` and `doctor`: everything that only reads."""

import math
import sys
from collections.abc import Sequence
from pathlib import Path

import click

import lake
from lake.cli.options import (
    Lakes,
    as_json,
    as_of_option,
    echo_rows,
    echo_stream,
    format_option,
    lake_option,
    lakes_option,
    lakes_option_if_any,
    opened,
)
from lake.errors import UsageError
from lake.read.text_table import counted
from lake.tables import TABLES


@click.command()
@click.argument("query")
@lakes_option
@click.option(
    "--format",
    "output_format",
    type=click.Choice(["table", "line", "json", "csv", "arrow"]),
    default="table",
    show_default=True,
    help="How rows are printed; line: one value per line, also used for a table wider than the terminal; arrow: an IPC "
    "stream. json, csv and arrow print rows as they come.",
)
@click.option(
    "--param",
    "params",
    multiple=True,
    metavar="NAME=VALUE",
    help="Value of $NAME in the query, as text.  [default: none]",
)
@as_of_option
@click.option("--locked", is_flag=True, help="For SQL you did not write: run it in a process that is locked in.")
@click.option("--memory-limit", metavar="SIZE", help="Memory of the query, as 2GB.  [default: DuckDB's; locked: 1GB]")
@click.option(
    "--timeout",
    type=click.FloatRange(0, 1e6, min_open=True),
    metavar="SECONDS",
    help="Time of the query.  [default: no limit; locked: 30]",
)
@click.option("--max-rows", type=click.IntRange(min=0), help="Most rows of a locked query.  [default: 100000]")
def sql(
    query: str,
    lake_uri: Lakes,
    output_format: str,
    params: tuple[str, ...],
    as_of: str | None,
    locked: bool,
    memory_limit: str | None,
    timeout: float | None,
    max_rows: int | None,
) -> None:
    """Run one SELECT over the newest snapshot. `-` reads the query from stdin.

    Every table is a view of its name. So are trajectory, step_ledger, groups, anchors, funnel, reward_hygiene,
    step_seen, related_episodes, job_runs, credit_series, current_advantages, current_scores and the latest_... of
    advantages, scores and annotations (`trajlake tables --columns`); the macros are id('13 characters') and
    id_text(int).
    """
    text = sys.stdin.read() if query == "-" else query
    values = _arguments(params)
    if timeout is not None and math.isnan(timeout):
        raise click.UsageError("--timeout nan is no time; valid: seconds")
    snapshot = opened(lake_uri, as_of)
    if locked:
        from lake.locked.query import MEMORY, ROWS, SECONDS, LockedReader
        from lake.read.query_results import frame

        most = ROWS if max_rows is None else max_rows
        memory, seconds = memory_limit or MEMORY, timeout or SECONDS
        reader = LockedReader(snapshot, memory_limit=memory, timeout=seconds, max_rows=most)
        found = reader.arrow(text, values)
        if output_format in ("table", "line"):
            echo_rows(frame(found), output_format)
        else:
            echo_stream(found.to_reader(), output_format)
        return
    from lake.read.query import Limits

    with snapshot.session(Limits(memory=memory_limit, seconds=timeout)) as session:
        if output_format in ("table", "line"):
            echo_rows(session.shown(text, values), output_format)
        else:
            echo_stream(session.stream(text, values), output_format)


def _arguments(params: tuple[str, ...]) -> dict[str, str] | None:
    """Values of --param by name."""
    values = {}
    for param in params:
        name, equals, value = param.partition("=")
        if not equals:
            raise UsageError(f"--param {param!r} has no value; write NAME=VALUE")
        values[name] = value
    return values or None


@click.command()
@click.argument("episode", required=False, metavar="[EPISODE|FILE]")
@click.option("--task", help="The episode of this task, instead of EPISODE.  [default: any]")
@click.option(
    "--rollout",
    type=click.IntRange(min=0),
    help="Its number among the siblings; where they are named instead, its place from 0.  [default: the only one]",
)
@click.option("--run", help="Its run.  [default: the only one]")
@click.option(
    "--where", help="All episodes of this SQL predicate over `episodes`, instead of EPISODE.  [default: none]"
)
@lakes_option_if_any
@click.option("--full", is_flag=True, help="Do not cut long texts.")
@click.option(
    "--credit",
    help="Whose advantages: an estimator's name, or (part of) a credit series' or job's id.  [default: the current]",
)
@as_of_option
@click.option(
    "--format",
    "output_format",
    type=click.Choice(["text", "json", "jsonl"]),
    default="text",
    show_default=True,
    help="As text, as JSON, or as a line of JSON for each episode, which `show FILE` prints.",
)
@click.option(
    "--with",
    "parts",
    type=click.Choice(["advantages", "tokens"]),
    multiple=True,
    default=["advantages"],
    show_default=True,
    help="What is told of steps beside their data and scores; may be given twice. tokens: ids and log-probabilities.",
)
def show(
    episode: str | None,
    task: str | None,
    rollout: int | None,
    run: str | None,
    where: str | None,
    lake_uri: Lakes,
    full: bool,
    credit: str | None,
    as_of: str | None,
    output_format: str,
    parts: tuple[str, ...],
) -> None:
    """Print EPISODE to read: states, actions, rewards, advantages, scores.

    EPISODE is an id or its beginning; `--task 44 --rollout 3` names one as well. It may also be a file that
    `trajlake show --format jsonl` wrote, which needs no lake.
    """
    from lake.read import show as shown

    named = {"task": task, "rollout": rollout, "run": run}
    ways = [episode is not None, named != dict.fromkeys(named), where is not None]
    if sum(ways) != 1:
        raise UsageError(
            "name one episode: by its id (or its beginning), or by --task, --rollout and --run; or several with --where"
        )
    if episode is not None and (path := Path(episode)).is_file():
        gathered = shown.read_saved(path)
    else:
        if not lake_uri:
            context = click.get_current_context()
            raise click.MissingParameter(
                ctx=context, param=next(p for p in context.command.params if p.name == "lake_uri")
            )
        reader = opened(lake_uri, as_of)
        if where is not None:
            from lake.judgements.predicates import select_where

            found = select_where(reader, ("episode_id",), where)["episode_id"].to_list()
        elif episode is None:
            found = [shown.find_named(reader, task=task, rollout=rollout, run=run)]
        else:
            found = [shown.find(reader, episode)]
        told = {"advantages": "advantages" in parts, "tokens": "tokens" in parts}
        gathered = (shown.gather(reader, one, credit, **told) for one in found)
    if output_format != "text":
        for row in gathered:
            click.echo(as_json(row, indent=2 if output_format == "json" else -1))
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    for count, row in enumerate(gathered):
        for style, line in [("", "")] * bool(count) + list(shown.lines(row, full=full)):
            console.print(Text(line, style))


@click.command()
@click.argument("names", nargs=-1, metavar="[TABLE]...")
@lakes_option
@format_option
@click.option("--columns", is_flag=True, help="List columns with type and meaning instead.")
@click.option("--all", "show_all", is_flag=True, help="Empty tables too.")
def tables(names: tuple[str, ...], lake_uri: Lakes, output_format: str, columns: bool, show_all: bool) -> None:
    """List the tables of a lake: version, rows (those of retracted episodes too), files, bytes.

    With TABLE these tables or views alone. Without --columns, empty tables are left out unless they are named.
    """
    snapshot = opened(lake_uri)
    if columns:
        echo_rows(_columns(names), output_format)
        return
    rows: list[dict[str, object]] = []
    for name in _known(names, list(TABLES)) or TABLES:
        files, n_rows, n_bytes = snapshot.size(name)
        # A table that nothing was written to yet has no version.
        version = snapshot.versions[name] if snapshot.versions[name] >= 0 else None
        rows.append({"table": name, "version": version, "rows": n_rows, "files": files, "bytes": n_bytes})
    left = [row for row in rows if row["rows"] or names or show_all] or rows
    echo_rows(left, output_format)
    if len(left) < len(rows):
        click.echo(f"{counted(len(rows) - len(left), 'empty table')} not shown (--all)", err=True)


def _columns(names: tuple[str, ...]) -> list[dict[str, object]]:
    """The columns of tables and views, of all unless some are named."""
    from lake.read.query_pruning import planner
    from lake.read.query_views import meanings, views

    rows: list[dict[str, object]] = []
    for name in _known(names, [*TABLES, *views()]) or [*TABLES, *views()]:
        if name in TABLES:
            rows += [
                {"table": name, "column": c.name, "type": c.type.value, "null": not c.required, "meaning": c.meaning}
                for c in TABLES[name].columns
            ]
            continue
        rows += [
            {"table": name, "column": column, "type": kind.lower(), "null": True, "meaning": meanings()[name][column]}
            for column, kind in planner().columns(name)
        ]
    return rows


def _known(names: tuple[str, ...], valid: Sequence[str]) -> tuple[str, ...]:
    """The names, if all are valid."""
    if unknown := [name for name in names if name not in valid]:
        raise UsageError(f"there is no table {', '.join(unknown)}; valid: {', '.join(valid)}")
    return names


@click.command()
@click.argument("table", required=False)
@lake_option
@format_option
@click.option(
    "--limit", type=click.IntRange(1, 1_000_000), default=20, show_default=True, help="Commits a table, newest first."
)
def history(table: str | None, lake_uri: str, output_format: str, limit: int) -> None:
    """List the commits of TABLE, or of every table, newest first."""
    from lake.read.history import commits

    echo_rows(commits(lake.open(lake_uri), table, limit), output_format)


@click.command()
@lake_option
@format_option
def doctor(lake_uri: str, output_format: str) -> None:
    """Check a lake and this installation; exit status 1 if something is wrong."""
    from lake.care.doctor import diagnose

    findings = diagnose(lake_uri)
    echo_rows(findings, output_format)
    if (findings["verdict"] == "wrong").any():
        sys.exit(1)
