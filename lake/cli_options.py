"""Options and output shared by every command: --lake, --format, and how rows are printed.

Ids are printed as 13 base32 characters and times as ISO 8601; a table cuts long cells, JSON and CSV never do.
"""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    import polars as pl

Command = Callable[..., Any]


def lake_option(function: Command) -> Command:
    """Add --lake (environment variable TRAJLAKE_LAKE)."""
    option = click.option(
        "--lake", "lake_uri", required=True, envvar="TRAJLAKE_LAKE", show_envvar=True, help="Folder of the lake."
    )
    return option(function)


def format_option(function: Command) -> Command:
    """Add --format table|json|csv."""
    return click.option(
        "--format",
        "output_format",
        type=click.Choice(["table", "json", "csv"]),
        default="table",
        show_default=True,
        help="How rows are printed.",
    )(function)


def echo_rows(frame: "pl.DataFrame", output_format: str) -> None:
    """Print rows to stdout."""
    shown = readable(frame)
    if output_format == "csv":
        # As bytes: click takes escape sequences out of text, and these are data.
        click.echo(_flat(shown).write_csv().encode(), nl=False)
    elif output_format == "json":
        import msgspec

        encoder = msgspec.json.Encoder(decimal_format="number")
        click.echo(b"[" + b",\n".join(encoder.encode(row) for row in shown.iter_rows(named=True)) + b"]")
    else:
        _print_table(shown)


def readable(frame: "pl.DataFrame") -> "pl.DataFrame":
    """The rows as people see them: ids as base32."""
    import polars as pl

    from lake import ids
    from lake.tables import ID_COLUMNS

    columns = [name for name, dtype in frame.schema.items() if name in ID_COLUMNS and dtype == pl.Int64]
    lists = [name for name, dtype in frame.schema.items() if name in ID_COLUMNS and dtype == pl.List(pl.Int64)]
    return frame.with_columns(
        *(pl.col(name).map_elements(ids.to_text, return_dtype=pl.String) for name in columns),
        *(pl.Series(name, [v and list(map(ids.to_text, v)) for v in frame[name].to_list()]) for name in lists),
    )


def _flat(frame: "pl.DataFrame") -> "pl.DataFrame":
    """Lists and structs as JSON text, bytes as base64: CSV has neither."""
    import msgspec
    import polars as pl

    nested = [name for name, dtype in frame.schema.items() if dtype.is_nested()]
    return frame.with_columns(
        *(
            pl.Series(name, [v if v is None else msgspec.json.encode(v).decode() for v in frame[name].to_list()])
            for name in nested
        ),
        pl.col(pl.Binary).bin.encode("base64"),
    )


def _print_table(frame: "pl.DataFrame") -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, dtype in frame.schema.items():
        table.add_column(name, justify="right" if dtype.is_numeric() else "left", overflow="ellipsis", max_width=60)
    for values in frame.rows():
        # Text, not markup: what a model wrote must not style the terminal.
        table.add_row(*(Text(_cell(value)) for value in values))
    # Into a pipe nothing is squeezed: whoever reads it may want to paste an id.
    width = None if sys.stdout.isatty() else 100_000
    Console(width=width, highlight=False).print(table)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.6g}"
    text = " ".join(str(value).split())
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
