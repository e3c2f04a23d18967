"""Downloads: a whole filtered list as a file, written as it is sent, so that its size costs no memory; and transcripts.

The address holds the format, which versions of the lake the page showed (`of`), and the list's filter: of episodes
`list`, as the episode page has it, of any other list its name (`rows`) and what its page's address has
(`viewer.lists`). Of transcripts it holds the episode or group, and the credit. Nothing is made before it is asked for.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from io import BytesIO

import polars as pl
import pyarrow.parquet as pq
from polars import selectors
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from lake.cli.options import flat
from lake.errors import TrajlakeError
from viewer.queries import whole
from viewer.same_origin import NO_OTHER_PAGE

PATH = "/download"
HTML = "html"
"""Format of transcripts."""


_RUN_BY_SPREADSHEETS = r"^([=+\-@\t\r\n\uFF1D\uFF0B\uFF0D\uFF20])"
"""First characters of a formula, in full width too."""


def csv(parts: Iterable[pl.DataFrame]) -> Iterator[bytes]:
    """Rows as CSV with one line of names.

    Texts are foreign, those of names and categories too: one that begins as a formula does in a spreadsheet has an
    apostrophe before it.
    """
    texts = selectors.string(include_categorical=True) | selectors.enum()
    harmless = texts.cast(pl.String).str.replace(_RUN_BY_SPREADSHEETS, "'$1")
    for number, part in enumerate(parts):
        # The names are a row here: two columns may bear one name once it has its apostrophe.
        names = pl.DataFrame({str(column): [name] for column, name in enumerate(part.columns)})
        lines = [names] * (number == 0) + [flat(part)]
        yield b"".join(line.with_columns(harmless).write_csv(include_header=False).encode() for line in lines)


def jsonl(parts: Iterable[pl.DataFrame]) -> Iterator[bytes]:
    """Rows as lines of JSON."""
    for part in parts:
        yield part.write_ndjson().encode()


def parquet(parts: Iterable[pl.DataFrame]) -> Iterator[bytes]:
    """Rows as a Parquet file with a row group for each part."""
    sink = _Sink()
    writer: pq.ParquetWriter | None = None
    for part in parts:
        table = part.to_arrow()
        writer = writer or pq.ParquetWriter(sink, table.schema, compression="zstd")
        writer.write_table(table.cast(writer.schema))
        yield sink.taken()
    if writer is not None:
        writer.close()
    yield sink.taken()


class _Sink(BytesIO):
    """Hands over what was written and forgets it; the writer counts positions itself."""

    def taken(self) -> bytes:
        """What was written since the last call."""
        data = self.getvalue()
        self.seek(0)
        self.truncate()
        return data


FORMATS: dict[str, tuple[str, Callable[[Iterable[pl.DataFrame]], Iterator[bytes]]]] = {
    "csv": ("text/csv; charset=utf-8", csv),
    "jsonl": ("application/x-ndjson", jsonl),
    "parquet": ("application/vnd.apache.parquet", parquet),
}
"""Media type and writer, by what a file's name ends in."""


def rows(request: Request) -> Response:
    """A list as a file: of episodes, or another one."""
    # Streamlit's caches, which these declare, need the server that this is a route of.
    from viewer import choices, lists, pinned

    given = request.query_params
    ending, name = given.get("format", ""), given.get("rows", "episodes")
    if ending not in FORMATS:
        return PlainTextResponse(f"There is no format {ending!r}; valid: {', '.join(FORMATS)}\n", 400, NO_OTHER_PAGE)
    media_type, write = FORMATS[ending]
    try:
        lake = pinned.named(given.get("of", ""))
        if name == "episodes":
            parts = whole.parts(lake, *choices.unpacked(given.get(choices.LIST)))
        else:
            parts = lists.parts(lake, name, given)
        # What can go wrong goes wrong with the first rows, before anything is sent.
        first = next(parts)
    except (TrajlakeError, ValueError) as error:
        return PlainTextResponse(f"{error}\n", 400, NO_OTHER_PAGE)

    def chained() -> Iterator[pl.DataFrame]:
        yield first
        yield from parts

    disposition = {"Content-Disposition": f'attachment; filename="{name}.{ending}"'}
    return StreamingResponse(write(chained()), media_type=media_type, headers=NO_OTHER_PAGE | disposition)


def transcripts(request: Request) -> Response:
    """An episode, or the siblings of a group, as one HTML file (`viewer.transcript.page`).

    Status 404 for what the lake does not hold, 400 where an id is none or the lake cannot be read.
    """
    # Streamlit's caches, which these declare, need the server that this is a route of.
    from viewer import pinned
    from viewer.queries import training
    from viewer.transcript import page
    from viewer.transcript.route import ask

    given = request.query_params
    try:
        lake = pinned.named(given.get("of", ""))
        credit = training.credit_named(lake, given.get("credit"))
        named = None if credit is None else credit.text
        found = page.of(partial(ask, lake), named, given.get("episode"), given.get("group"))
        sent = page.html(found)
    except LookupError:
        return PlainTextResponse("There is no such episode or group.\n", 404, NO_OTHER_PAGE)
    except (TrajlakeError, ValueError) as error:
        return PlainTextResponse(f"{error}\n", 400, NO_OTHER_PAGE)
    disposition = {"Content-Disposition": 'attachment; filename="trajlake.html"'}
    return Response(sent, media_type="text/html; charset=utf-8", headers=NO_OTHER_PAGE | disposition)


def answered(request: Request) -> Response:
    """The file that an address asks for."""
    return transcripts(request) if request.query_params.get("format") == HTML else rows(request)


ROUTES = [Route(PATH, answered, methods=["GET"])]
