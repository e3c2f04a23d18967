"""Commands `sql`, `tables`, `history` and `doctor`: everything that only reads."""

import sys

import click

from lake.cli_options import echo_rows, format_option, lake_option


@click.command()
@click.argument("query")
@lake_option
@format_option
@click.option("--param", "params", multiple=True, metavar="NAME=VALUE", help="Value of $NAME in the query (text).")
def sql(query: str, lake_uri: str, output_format: str, params: tuple[str, ...]) -> None:
    """Run one SELECT over the newest snapshot. `-` reads the query from stdin.

    Every table is a view of its name. Also: job_runs, latest_advantages, trained_batches, run_metrics, and the macros
    id('13 characters') and id_text(int).
    """
    import lake
    from lake.errors import UsageError

    values: dict[str, str] = {}
    for param in params:
        name, equals, value = param.partition("=")
        if not equals:
            msg = f"--param {param!r} has no value; write NAME=VALUE"
            raise UsageError(msg)
        values[name] = value
    text = sys.stdin.read() if query == "-" else query
    echo_rows(lake.open(lake_uri).sql(text, values or None), output_format)


@click.command()
@lake_option
@format_option
@click.option("--columns", is_flag=True, help="List every column with its type and meaning.")
def tables(lake_uri: str, output_format: str, columns: bool) -> None:
    """List the tables of a lake: version, visible rows, files, bytes."""
    import polars as pl

    import lake
    from lake.tables import TABLES

    snapshot = lake.open(lake_uri).snapshot()
    if columns:
        rows: list[dict[str, object]] = [
            {"table": t.name, "column": c.name, "type": c.type.value, "null": not c.required, "meaning": c.meaning}
            for t in TABLES.values()
            for c in t.columns
        ]
    else:
        rows = []
        for name in TABLES:
            files, n_rows, n_bytes = snapshot.size(name)
            version = snapshot.versions[name]
            rows.append({"table": name, "version": version, "rows": n_rows, "files": files, "bytes": n_bytes})
    echo_rows(pl.DataFrame(rows), output_format)


@click.command()
@click.argument("table", required=False)
@lake_option
@format_option
@click.option(
    "--limit", type=click.IntRange(min=1), default=20, show_default=True, help="Commits a table, newest first."
)
def history(table: str | None, lake_uri: str, output_format: str, limit: int) -> None:
    """List the commits of TABLE, or of every table, newest first."""
    import lake
    from lake.maintenance import commits

    echo_rows(commits(lake.open(lake_uri), table, limit), output_format)


@click.command()
@lake_option
@format_option
def doctor(lake_uri: str, output_format: str) -> None:
    """Check a lake and this installation; exit status 1 if something is wrong."""
    import lake
    from lake.maintenance import examine

    findings = examine(lake.open(lake_uri))
    echo_rows(findings, output_format)
    if (findings["verdict"] == "wrong").any():
        sys.exit(1)
