"""Options and output shared by every command: --lake, --as-of, --format, help in sections, and how rows are printed.

Ids are printed as 13 base32 characters and times as ISO 8601; a table cuts long texts, the other forms never do.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import click
from click.core import ParameterSource

from lake import ids
from lake.errors import UsageError
from lake.read import text_table
from lake.read.text_table import Rows
from lake.tables import ID_COLUMNS

if TYPE_CHECKING:
    import polars as pl
    import pyarrow as pa
    from pydantic import BaseModel

    from lake.lake import Lake
    from lake.read.snapshot import Snapshot


class SectionedCommand(click.Command):
    """A command whose help lists its options under headings; options that stand in none come last."""

    def __init__(self, *, sections: Mapping[str, Sequence[str]], **given: Any) -> None:
        super().__init__(**given)
        self.sections = sections

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, section by section."""
        left = {parameter.name: parameter for parameter in self.get_params(ctx)}
        sections = [(heading, [left.pop(name) for name in names]) for heading, names in self.sections.items()]
        for heading, parameters in (*sections, ("Options", list(left.values()))):
            records = [record for parameter in parameters if (record := parameter.get_help_record(ctx)) is not None]
            with formatter.section(heading):
                formatter.write_dl(records)


class ConfiguredCommand(click.Command):
    """A command whose help also lists the fields of configuration classes, under headings, after its options.

    Args:
        models: gives heading -> class, a heading of one line or with text below; called only when the help is shown, so
            that nothing is imported before.
    """

    def __init__(self, *, models: Callable[[], Mapping[str, type[BaseModel]]], **given: Any) -> None:
        super().__init__(**given)
        self.models = models

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Options of the command, then the fields of each class with default and meaning."""
        super().format_options(ctx, formatter)
        for heading, model in self.models().items():
            title, _, text = heading.partition("\n")
            with formatter.section(title):
                if text:
                    formatter.write_text(text)
                    formatter.write_paragraph()
                formatter.write_dl(list(_fields(model)), col_max=24)


def _fields(model: type[BaseModel]) -> Iterator[tuple[str, str]]:
    """Each field with its meaning, the docstring under it, its words if it is one of a few, and its default."""
    from pydantic import BaseModel

    meanings: dict[str, str] = {}
    for owner in reversed(model.__mro__):
        if issubclass(owner, BaseModel) and owner is not BaseModel:
            meanings |= _field_docstrings(owner)
    for name, field in model.model_fields.items():
        if name == "kind":
            continue  # the tag that tells classes apart
        words = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
        valid = f"  [{'|'.join(words)}]" if words else ""
        value = None if field.is_required() else field.get_default(call_default_factory=True)
        default = "  [required]" if field.is_required() else f"  [default: {_in_words(value)}]"
        if meanings[name].endswith("Required.") or isinstance(value, BaseModel):
            default = ""  # it is there to be refused in words, or has a heading of its own
        yield name, f"{meanings[name]}{valid}{default}"


def _in_words(value: Any) -> str:
    """A default as it is written for --set."""
    from pydantic_core import to_json

    if value is None:
        return "none"
    return value if isinstance(value, str) else to_json(value).decode()


def _field_docstrings(owner: type) -> dict[str, str]:
    """The docstring under each field of a class, which Python throws away, from its source."""
    import ast
    import inspect
    import textwrap

    (node,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
    assert isinstance(node, ast.ClassDef)
    found = {}
    for field, below in zip(node.body, node.body[1:], strict=False):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = " ".join(text.split())
    return found


Command = Callable[..., Any]


def lake_option(function: Command) -> Command:
    """Add --lake (environment variable TRAJLAKE_LAKE)."""

    def remember(context: click.Context, parameter: click.Parameter, uris: tuple[str, ...]) -> str:
        if len(uris) > 1:  # click would take the last, and a lake that was named would be left as it is without a word
            raise click.UsageError(f"{context.command_path} works on one lake, and --lake names {', '.join(uris)}")
        if context.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE:
            context.meta[TYPED_LAKE] = uris[0]
        return uris[0]

    return click.option(
        "--lake",
        "lake_uri",
        required=True,
        multiple=True,
        cls=_OneInTheEnvironment,
        envvar="TRAJLAKE_LAKE",
        show_envvar=True,
        callback=remember,
        help="Folder or URI of the lake.",
    )(function)


def lakes_option(function: Command) -> Command:
    """Add --lake for one lake or several that are read as one: a text, or a tuple of them."""
    return _lakes(function, required=True)


def lakes_option_if_any(function: Command) -> Command:
    """Add --lake as `lakes_option` does, for a command that may work without: then it is an empty tuple."""
    return _lakes(function, required=False)


def _lakes(function: Command, *, required: bool) -> Command:
    def remember(context: click.Context, parameter: click.Parameter, uris: tuple[str, ...]) -> Lakes:
        given = uris[0] if len(uris) == 1 else uris
        if uris and context.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE:
            context.meta[TYPED_LAKE] = given
        return given

    return click.option(
        "--lake",
        "lake_uri",
        required=required,
        multiple=True,
        cls=_OneInTheEnvironment,
        envvar="TRAJLAKE_LAKE",
        show_envvar=True,
        callback=remember,
        help="Folder or URI of the lake; several are read as one.",
    )(function)


class _OneInTheEnvironment(click.Option):
    """An option that may be given several times, and of which the environment variable holds one value, blanks too."""

    def value_from_envvar(self, ctx: click.Context) -> tuple[str, ...] | None:
        """The one value."""
        value = self.resolve_envvar_value(ctx)
        return None if value is None else (value,)


Lakes = str | tuple[str, ...]
"""A lake's address, or the addresses of several."""
TYPED_LAKE = "trajlake.lake"
"""Key of a context's `meta`: the lake, if it was named on the command line."""
_QUOTED = re.compile(r"`trajlake (?!convert-model)[^`]*`")


def lake_flags(uri: Lakes) -> str:
    """`--lake A --lake B`, as a shell takes it."""
    return " ".join(f"--lake {shlex.quote(one)}" for one in ((uri,) if isinstance(uri, str) else uri))


def with_lake(message: str, uri: Lakes) -> str:
    """A message whose commands in backticks name the lake, as they have to where no environment variable does."""
    options = lake_flags(uri)

    def complete(quoted: re.Match[str]) -> str:
        command = quoted[0]
        return command if "--lake" in command or command.endswith(" -h`") else f"{command[:-1]} {options}`"

    return _QUOTED.sub(complete, message)


def format_option(function: Command) -> Command:
    """Add --format table|line|json|csv."""
    return click.option(
        "--format",
        "output_format",
        type=click.Choice(["table", "line", "json", "csv"]),
        default="table",
        show_default=True,
        help="How rows are printed; line: one value per line, also used for a table wider than the terminal.",
    )(function)


def as_of_option(function: Command) -> Command:
    """Add --as-of: an older state of the lake."""
    return click.option(
        "--as-of",
        metavar="WHEN",
        help="An older state: a snapshot's name, a version of `episodes`, or a time (ISO 8601).  [default: the newest]",
    )(function)


def opened(uri: Lakes, as_of: str | None = None) -> Snapshot:
    """A snapshot of a lake, or of several as one: the newest, or an older one; says if a `forget` cut an older one."""
    from lake.opening import open as open_lake

    found = open_lake(uri)
    if as_of is None:
        return found.snapshot()
    snapshot = found.at(int(as_of) if as_of.isdecimal() else as_of)
    if snapshot.forgotten:
        lost = text_table.counted(snapshot.forgotten, "episode")
        click.echo(f"{as_of} is not whole: {lost} forgotten since", err=True)
    return snapshot


def echo_stream(reader: pa.RecordBatchReader, output_format: str) -> None:
    """Print rows to stdout as they come: json, csv, or arrow (an IPC stream)."""
    import pyarrow as pa
    from pyarrow import ipc

    from lake.read.query_results import frame

    if output_format == "arrow":
        with ipc.new_stream(sys.stdout.buffer, reader.schema) as out:
            for batch in reader:
                out.write_batch(batch)
        return
    frames = (frame(pa.Table.from_batches([batch])) for batch in reader if batch.num_rows)
    if output_format == "csv":
        click.echo(_csv(frame(reader.schema.empty_table())), nl=False)
        for rows in frames:
            click.echo(_csv(rows, header=False), nl=False)
        return
    before = b"["
    for rows in frames:
        click.echo(before + _json(rows), nl=False)
        before = b",\n"
    click.echo(b"[]" if before == b"[" else b"]")


def echo_rows(rows: pl.DataFrame | Rows | Sequence[Mapping[str, Any]], output_format: str) -> None:
    """Print rows to stdout: a frame, mappings with one set of names, or plain rows (as text only)."""
    if output_format in ("table", "line"):
        _echo_text(_plain(rows), as_lines=output_format == "line")
        return
    import polars as pl

    assert not isinstance(rows, Rows)
    frame = rows if isinstance(rows, pl.DataFrame) else pl.DataFrame(rows)
    if output_format == "csv":
        click.echo(_csv(frame), nl=False)
    else:
        click.echo(b"[" + _json(frame) + b"]")


def as_json(value: Any, *, indent: int = 2) -> bytes:
    """Nested rows as JSON: ids as base32, by their names. `indent`: -1 writes one line."""
    import msgspec

    def readable_ids(part: Any, name: str = "") -> Any:
        if isinstance(part, dict):
            return {key: readable_ids(inner, key) for key, inner in part.items()}
        if isinstance(part, list):
            return [readable_ids(inner, name) for inner in part]
        return ids.to_text(part) if isinstance(part, int) and _is_id(name) else part

    return msgspec.json.format(msgspec.json.encode(readable_ids(value)), indent=indent)


def _csv(frame: pl.DataFrame, *, header: bool = True) -> bytes:
    """As bytes: click takes escape sequences out of text, and these are data."""
    return flat(readable(frame)).write_csv(include_header=header).encode()


def _json(frame: pl.DataFrame) -> bytes:
    """Rows as JSON objects, one a line, commas between them."""
    import msgspec

    encoder = msgspec.json.Encoder(decimal_format="number")
    return b",\n".join(encoder.encode(row) for row in readable(frame).iter_rows(named=True))


def readable(frame: pl.DataFrame) -> pl.DataFrame:
    """The rows as people see them: ids as base32.

    No function of ours is handed to Polars: its threads would wait for the interpreter, which another thread that
    converts a frame holds while it waits for theirs.
    """
    import polars as pl

    columns = [name for name, dtype in frame.schema.items() if _is_id(name) and dtype == pl.Int64]
    lists = [name for name, dtype in frame.schema.items() if name in ID_COLUMNS and dtype == pl.List(pl.Int64)]
    texts = {name: [v if v is None else ids.to_text(v) for v in frame[name].to_list()] for name in columns}
    texts_of_lists = {name: [v and list(map(ids.to_text, v)) for v in frame[name].to_list()] for name in lists}
    return frame.with_columns(
        *(pl.Series(name, values, dtype=pl.String) for name, values in texts.items()),
        *(pl.Series(name, values) for name, values in texts_of_lists.items()),
    )


def _is_id(name: str) -> bool:
    """Whether a column holds ids: by its name, or by what its name ends with (credit_group_id)."""
    return name in ID_COLUMNS or name.endswith(("_group_id", "_episode_id"))


def flat(frame: pl.DataFrame) -> pl.DataFrame:
    """Lists and structs as JSON text, bytes as base64, durations as ISO 8601: CSV has none of them."""
    import msgspec
    import polars as pl

    nested = [name for name, dtype in frame.schema.items() if dtype.is_nested()]
    return frame.with_columns(
        *(
            pl.Series(name, [v if v is None else msgspec.json.encode(v).decode() for v in frame[name].to_list()])
            for name in nested
        ),
        pl.col(pl.Binary).bin.encode("base64"),
        pl.col(pl.Duration).dt.to_string("iso"),
    )


def _plain(rows: pl.DataFrame | Rows | Sequence[Mapping[str, Any]]) -> Rows:
    if isinstance(rows, Rows):
        return rows
    if isinstance(rows, Sequence):
        names = list(rows[0]) if rows else []
        values = [tuple(row.values()) for row in rows]
        kinds = [{type(row[place]) for row in values} for place in range(len(names))]
        return Rows(names, values, [kind <= {int, float, type(None)} for kind in kinds])
    return Rows(rows.columns, rows.rows(), [dtype.is_numeric() for dtype in rows.dtypes])


def _echo_text(rows: Rows, *, as_lines: bool) -> None:

    ids = [place for place, name in enumerate(rows.names) if _is_id(name)]
    numbers = [is_number and place not in ids for place, is_number in enumerate(rows.numbers)]
    whole = [is_number or place in ids for place, is_number in enumerate(numbers)]
    values = [[_id_text(value) if place in ids else value for place, value in enumerate(row)] for row in rows.values]
    # Into a pipe nothing is squeezed: whoever reads it may want every column.
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    printed = None if as_lines else text_table.table(rows.names, values, numbers, whole, width)
    if printed is None:
        printed = list(text_table.lines(rows.names, values))
    else:
        printed[0] = click.style(printed[0], bold=True)
    click.echo("\n".join(printed))


def _id_text(value: Any) -> Any:
    """An id, or a list of ids, as people see it; what is no id stays."""
    if isinstance(value, list):
        return [_id_text(inner) for inner in value]
    return ids.to_text(value) if isinstance(value, int) and 0 <= value <= ids.MASK else value


def quiet() -> None:
    """Keep transformers' own progress bars off the terminal, without importing it for that."""
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    if (transformers := sys.modules.get("transformers")) is not None:
        transformers.utils.logging.disable_progress_bar()


def chosen_episodes(
    target: Lake, episodes: tuple[str, ...], where: str | None, *, retracted_too: bool = False
) -> list[int]:
    """Ids from the command line, each once."""
    try:
        chosen = [ids.from_text(text) for text in episodes]
    except ValueError as error:
        raise UsageError(str(error)) from error
    if where is not None:
        from lake.judgements.predicates import bracketed

        inside = bracketed(where)
        with target.snapshot().session(retracted_too=retracted_too) as session:
            chosen += session.query(f"SELECT episode_id FROM episodes WHERE {inside}")["episode_id"].to_list()
    return sorted(set(chosen))
