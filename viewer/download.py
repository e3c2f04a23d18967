"""Download lists as files and transcripts as HTML, and show the commands that act on the episodes of a list.

A list is written while it is sent, so its size costs no memory. The address names the format, the versions that the
page showed (`of`) and the filter. For episodes the filter is `list`, as on the page of an episode. For another list the
address has its name (`rows`) and the parameters of its page. For transcripts it has the episode or group, and the
credit. A file is made when its link is followed.

Commands are shown to be copied and never run here. A page cannot retract by mistake, and the reader's shell history
has the command.
"""

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from io import BytesIO
from itertools import chain

import polars as pl
import pyarrow.parquet as pq
import streamlit as st  # noqa: TID253 - loaded by the viewer's process only
from polars import selectors
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from lake import ids
from lake.cli.options import flatten_columns, format_ids
from lake.errors import TrajlakeError, UsageError
from lake.export import TARGETS
from lake.export.job import NO_CREDIT
from lake.judgements.credit import Credit
from lake.read.text_table import format_count
from viewer import components as ui
from viewer import filters, session
from viewer.navigation import Page, Value, anchor, build_query
from viewer.queries import LakeReader, ListWindow, Sort, anchors, annotations, episodes, groups, lineage, sql, training
from viewer.queries.episodes import EpisodeFilter
from viewer.queries.groups import GroupFilter, Signal
from viewer.reader import Reader
from viewer.server import NO_OTHER_PAGE
from viewer.session import read
from viewer.transcript import page

PATH = "/download"
"""Path of downloads; `viewer.launch` routes it to `answer_request`."""
HTML = "html"
"""Format of transcripts."""
LISTS: Mapping[str, int] = {
    "groups": 10_000,
    "siblings": 10_000,
    "shared-states": 10_000,
    # The texts of a sample of each state's steps lie all over their table, so larger parts would not be faster.
    "anchors": 1_000,
    "jobs": 10_000,
    "annotations": 10_000,
    "rejects": 10_000,
    "sql": 10_000,
}
"""Names of the lists besides that of episodes, with the rows that are in memory at a time."""
ReadRows = Callable[[ListWindow, Sort | None], pl.DataFrame]
"""Return the rows of a window of a list, in an order."""


def read_list(lake: LakeReader, name: str, parameters: Mapping[str, str]) -> Iterator[pl.DataFrame]:
    """Yield the rows of a list in one or more parts, with ids as text.

    Raises:
        UsageError: there is no such list, or no such credit.
        ValueError: an id is invalid.
    """
    if name not in LISTS:
        raise UsageError(f"there is no list {name!r}; valid: {', '.join(LISTS)}")
    read_rows, limit = _open_list(lake, name, parameters), LISTS[name]
    order = Sort.parse(parameters.get("sort"))
    offset, height = 0, limit
    while height == limit:
        part = read_rows(ListWindow(limit, offset), order)
        height, offset = part.height, offset + limit
        if height or offset == limit:
            yield format_ids(part)


def _open_list(lake: LakeReader, name: str, parameters: Mapping[str, str]) -> ReadRows:
    """Return the reader of a list for the parameters of its page's address."""
    get = parameters.get
    match name:
        case "jobs":
            return lambda window, order: lineage.read_jobs(lake, get("kind"), get("state"), window, order)
        case "rejects":
            return lambda window, order: lineage.read_rejects(lake, get("reason"), get("run"), window, order)
        case "annotations":
            return lambda window, order: annotations.read_page(lake, window, order)
        case "sql":
            rows = sql.read_rows(lake, get("q", ""))
            return lambda window, _: rows.slice(window.offset, window.limit)
        case "groups":
            episode_filter, _ = filters.unpack_filter(get(filters.LIST))
            signal = get("signal")
            group_filter = GroupFilter(episode_filter, None if signal is None else Signal(signal), get("grouping"))
            return lambda window, order: groups.read_page(lake, group_filter, window, order)
        case _:
            return _open_credit_list(lake, name, get)


def _open_credit_list(lake: LakeReader, name: str, get: Callable[[str], str | None]) -> ReadRows:
    """Return the reader of a list with advantages; siblings are listed without a credit too."""
    credit = training.look_up_credit(lake, get("credit")) if name != "siblings" or get("credit") else None
    if credit is None and (name != "siblings" or get("credit")):
        raise UsageError(f"this lake holds no credit {get('credit') or ''!r}")
    if credit is not None and name == "anchors":
        # The states need a scan of all advantages: one for the list, not one for each part.
        states = anchors.list_states(lake, credit, Sort.parse(get("sort")))
        return lambda window, _: anchors.add_texts(lake, credit, states.slice(window.offset, window.limit))
    group_id = ids.from_text(get("group") or "")
    if credit is not None and name == "shared-states":
        return lambda window, order: anchors.read_page(lake, group_id, credit, window, order)
    return lambda window, order: groups.read_siblings(lake, group_id, credit, window, get("score"), order)


_RUN_BY_SPREADSHEETS = r"^([=+\-@\t\r\n\uFF1D\uFF0B\uFF0D\uFF20])"
"""First characters of a formula, in full width too."""


def write_csv(frames: Iterable[pl.DataFrame]) -> Iterator[bytes]:
    """Write rows as CSV with one header line.

    Texts are foreign, those of names and categories too. A text that a spreadsheet would run as a formula gets an
    apostrophe in front.
    """
    texts = selectors.string(include_categorical=True) | selectors.enum()
    harmless = texts.cast(pl.String).str.replace(_RUN_BY_SPREADSHEETS, "'$1")
    for position, part in enumerate(frames):
        # The header is written as a row: two columns may have the same name once the apostrophe is added.
        header = pl.DataFrame({str(column): [name] for column, name in enumerate(part.columns)})
        lines = [header] * (position == 0) + [flatten_columns(part)]
        yield b"".join(line.with_columns(harmless).write_csv(include_header=False).encode() for line in lines)


def write_jsonl(frames: Iterable[pl.DataFrame]) -> Iterator[bytes]:
    """Write rows as lines of JSON."""
    for part in frames:
        yield part.write_ndjson().encode()


def write_parquet(frames: Iterable[pl.DataFrame]) -> Iterator[bytes]:
    """Write rows as a Parquet file with a row group for each part."""
    sink = _ByteSink()
    writer: pq.ParquetWriter | None = None
    for part in frames:
        table = part.to_arrow()
        writer = writer or pq.ParquetWriter(sink, table.schema, compression="zstd")
        writer.write_table(table.cast(writer.schema))
        yield sink.pop()
    if writer is not None:
        writer.close()
    yield sink.pop()


class _ByteSink(BytesIO):
    """Buffer that is emptied after each part; the Parquet writer counts positions itself."""

    def pop(self) -> bytes:
        """Return the bytes since the last call, and drop them."""
        written = self.getvalue()
        self.seek(0)
        self.truncate()
        return written


FORMATS: dict[str, tuple[str, Callable[[Iterable[pl.DataFrame]], Iterator[bytes]]]] = {
    "csv": ("text/csv; charset=utf-8", write_csv),
    "jsonl": ("application/x-ndjson", write_jsonl),
    "parquet": ("application/vnd.apache.parquet", write_parquet),
}
"""Media type and writer for each extension."""


def answer_request(request: Request) -> Response:
    """Send the file that an address names.

    Status 404: the lake does not hold the episode or group. 400: the format, list, credit or an id is invalid, or the
    lake cannot be read.
    """
    parameters = request.query_params
    try:
        viewed = session.get_viewed_lake()
        reader = viewed.find_reader(parameters.get("of", "")) or viewed.get_reader(viewed.get_newest_versions())
        return (_send_transcripts if parameters.get("format") == HTML else _send_list)(reader, parameters)
    except (TrajlakeError, ValueError) as error:
        return PlainTextResponse(f"{error}\n", 400, NO_OTHER_PAGE)


def _send_list(lake: Reader, parameters: Mapping[str, str]) -> Response:
    extension, name = parameters.get("format", ""), parameters.get("rows", "episodes")
    if extension not in FORMATS:
        raise UsageError(f"There is no format {extension!r}; valid: {', '.join(FORMATS)}")
    media_type, write = FORMATS[extension]
    if name == "episodes":
        frames = episodes.read_parts(lake, *filters.unpack_filter(parameters.get(filters.LIST)))
    else:
        frames = read_list(lake, name, parameters)
    # A fault appears with the first rows, before anything is sent.
    rows = chain([next(frames)], frames)
    headers = NO_OTHER_PAGE | {"Content-Disposition": f'attachment; filename="{name}.{extension}"'}
    return StreamingResponse(write(rows), media_type=media_type, headers=headers)


def _send_transcripts(lake: Reader, parameters: Mapping[str, str]) -> Response:
    """Send an episode, or the siblings of a group, as one HTML file (`viewer.transcript.page`)."""
    credit = training.look_up_credit(lake, parameters.get("credit"))
    credit_name = None if credit is None else credit.text
    try:
        transcripts = page.load_transcripts(lake.read, credit_name, parameters.get("episode"), parameters.get("group"))
    except LookupError:
        return PlainTextResponse("There is no such episode or group.\n", 404, NO_OTHER_PAGE)
    headers = NO_OTHER_PAGE | {"Content-Disposition": 'attachment; filename="trajlake.html"'}
    return Response(page.render_html(transcripts), media_type="text/html; charset=utf-8", headers=headers)


def draw_download_menu(episode_filter: EpisodeFilter, order: Sort | None, total: int) -> None:
    """Draw the menu with a list of episodes as a file, and the commands that act on its episodes."""
    with st.popover("Download", icon=":material/download:"):
        of, packed = session.get_session().name_versions(), filters.pack_filter(episode_filter, order)
        links = [anchor(name, PATH + build_query(format=name, of=of, list=packed)) for name in FORMATS]
        _draw_line(f"The list, {format_count(total, 'row')}, as {', '.join(links)}")
        st.caption("The columns of the tables for each episode, in the order of the list, without documents.")
        target = st.selectbox("Or the episodes themselves, as", list(TARGETS), key="export")
        st.caption(TARGETS[target].description)
        _draw_commands(episode_filter, target)


def draw_csv_link(name: str, order: Sort | None, **parameters: Value) -> None:
    """Draw the link to a list of `LISTS` as CSV, in the order of its page."""
    sort = None if order is None else str(order)
    address = build_query(format="csv", rows=name, of=session.get_session().name_versions(), sort=sort, **parameters)
    _draw_line(anchor("The whole list as CSV", PATH + address))


def draw_list_link(**parameters: Value) -> None:
    """Draw the link from the episodes of a page to the page of episodes, which has facets and downloads."""
    ui.draw_link(Page.EPISODES, "As a list of episodes", "format_list_bulleted", **parameters)


def draw_html_link(credit: Credit | None, **parameters: str) -> None:
    """Draw the link to an `episode`, or the siblings of a `group`, as one HTML file with the page's advantages."""
    name = NO_CREDIT if credit is None else credit.text
    address = build_query(format=HTML, of=session.get_session().name_versions(), credit=name, **parameters)
    _draw_line(anchor("Save as HTML", PATH + address))


def _draw_line(content: str) -> None:
    st.html(f'<span class="trajlake-turn">{content}</span>', width="content")


def _draw_commands(episode_filter: EpisodeFilter, target: str) -> None:
    """Show the command lines for exactly the list's episodes.

    Of several lakes there is one `retract` for each, because each lake hides only its own rows. There the episodes are
    named by id: the score of an episode may stand in another lake, so a predicate can match other episodes in one lake
    than in all.
    """
    predicate = read(episodes.build_predicate, episode_filter)
    if predicate is None:
        st.caption("No command can name so many episodes that a search or a query found: find fewer.")
        return
    addresses = session.get_viewed_lake().addresses
    lakes = [word for address in addresses for word in ("--lake", address)]
    score = ["--score", episode_filter.score] if episode_filter.score is not None else []
    where = ["--where", predicate] if predicate else []
    export = ["trajlake", "export", *lakes, "--format", target, "--out", f"exported-{target}", *score, *where]
    st.code(shlex.join(export), language="bash", wrap_lines=True)
    # A filter without limits drops nothing; the reader adds limits to it.
    select = ["trajlake", "select", "chosen", *lakes, "--filter", "length", *score, *where]
    st.caption("Or name them for training, as a selection; further filters drop more:")
    st.code(shlex.join(select), language="bash", wrap_lines=True)
    if predicate and len(addresses) > 1:
        predicate = read(episodes.build_id_predicate, episode_filter)
        if predicate is None:
            st.caption("To hide them, find fewer, or open their lake alone: no command can name so many episodes.")
    if predicate:
        st.caption("Or hide them from every later snapshot, for a reason; `trajlake restore` takes it back:")
        for address in addresses:
            retract = ["trajlake", "retract", "--lake", address, "--where", predicate, "--reason", "why"]
            st.code(shlex.join(retract), language="bash", wrap_lines=True)
    st.caption("Commands read the newest state of the lake when they run.")
