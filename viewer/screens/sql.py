"""SQL: one SELECT over the lake as the session sees it, in a locked process; rows that name episodes lead to them.

The address holds the query, so a link can bring any: see `viewer.locked_sql` for why it may be run at once.
"""

from pathlib import Path

import polars as pl
import streamlit as st  # noqa: TID253 - this is a Streamlit page

from lake import ids
from lake.errors import QueryError, TrajlakeError
from lake.locked.query import SECONDS
from lake.read.text_table import counted
from lake.tables import ID_COLUMNS
from viewer import components as ui
from viewer import pinned, tables, taking
from viewer.links import Page, given
from viewer.locked_sql import MOST_ROWS
from viewer.navigation import changed, chip_link, go, href
from viewer.plain import number, visible
from viewer.queries import Row, sql

_PAGE = 50
_MOST_COLUMNS = 60
_MOST_ASKED = 20
_ASKED = "sql-asked"
_EXAMPLE = """SELECT run_id, collection_round, avg(env_return) AS mean_return, avg(num_steps) AS mean_steps
FROM episodes GROUP BY ALL ORDER BY ALL"""
_COMPLETION = st.components.v2.component(
    "trajlake_completion", js=Path(__file__).parents[1].joinpath("completion.js").read_text()
)


def show() -> None:
    """The page."""
    ui.header("SQL")
    names = pinned.read(sql.names)
    _schema(names)
    query = _query(names)
    if query is None:
        return
    try:
        frame = pinned.read(sql.rows, query)
    except TrajlakeError as error:
        st.error("The query has no result.", icon=":material/error:")
        st.code(_told(error, query), language=None, wrap_lines=True)
        return
    _draw(frame, query)


def _query(names: sql.Names) -> str | None:
    """The query that the address holds, in a field to change it; None: it holds none yet."""
    query = given("q")
    if query != st.session_state.get("query-of-address") or "query" not in st.session_state:
        # A link, or Back, brought another one.
        st.session_state["query-of-address"] = query
        st.session_state["query"] = query or _EXAMPLE
    st.text_area(
        "One SELECT (Ctrl+Enter runs it)",
        height=150,
        key="query",
        on_change=_remember,
        help="In a process of its own that can only read this lake: "
        f"{SECONDS:g} s, {MOST_ROWS:,} rows; `trajlake sql` has no such limits. Names are offered while you type "
        "(Ctrl+Space asks for them, Tab or Enter takes one, Escape closes).",
    )
    with st.container(key="completion"):
        _COMPLETION(
            key="completion-script",
            data={"tables": names.tables, "functions": names.functions, "keywords": names.keywords},
        )
    with st.container(horizontal=True):
        st.button("Run", type="primary", on_click=_remember)
        _asked(query)
    return query


def _asked(query: str | None) -> None:
    """The queries of this session, the last one first."""
    before: list[str] = [one for one in st.session_state.get(_ASKED, []) if one != query]
    st.session_state[_ASKED] = ([query, *before] if query else before)[:_MOST_ASKED]
    if before:
        with st.popover("Asked before", icon=":material/history:"):
            links = (chip_link(one, changed(q=one, page=None)) for one in before)
            st.html(f'<div class="trajlake-chips">{"".join(links)}</div>')


def _remember() -> None:
    query = st.session_state["query-of-address"] = st.session_state["query"].strip() or _EXAMPLE
    go(q=query, page=None)


def _told(error: TrajlakeError, query: str) -> str:
    """What is wrong with a query, and where, if that is known."""
    said = visible(str(error))
    if not isinstance(error, QueryError) or error.place is None:
        return said
    line, character = error.place
    text = visible(query.split("\n")[line - 1][: character - 1])
    rest = visible(query.split("\n")[line - 1][character - 1 :])
    return f"{said}\n\nline {line}, character {character}:\n{text}{rest}\n{' ' * len(text)}^"


def _draw(frame: pl.DataFrame, query: str) -> None:
    shown = frame.select(frame.columns[:_MOST_COLUMNS])
    if frame.width > _MOST_COLUMNS:
        st.caption(f"The first {_MOST_COLUMNS} of {number(frame.width)} columns.")
    window = ui.pager(shown.height, "rows", rows=_PAGE)
    if not shown.height:
        return
    if sql.names_episodes(frame):
        episodes = counted(pinned.read(sql.named, query).height, "episode")
        ui.link(Page.EPISODES, f"Open as list: {episodes}", "format_list_bulleted", sql=query)
    if (drawn := _chart_columns(shown)) is not None:
        x, ys = drawn
        if st.toggle("Chart", key="chart", bind="query-params"):
            st.line_chart(shown, x=x, y=ys)
    columns = {name: _column(name, shown[name]) for name in shown.columns}
    rows = shown.slice(window.offset, window.limit)
    tables.table(rows, columns, label="Rows", href=_episode if "episode_id" in columns else None)
    taking.rows("sql", None, q=query)


def _column(name: str, values: pl.Series) -> tables.Column:
    if name in ID_COLUMNS and values.dtype == pl.Int64:
        return tables.ident(visible(name))
    if values.dtype.is_numeric():
        return tables.value(visible(name))
    return tables.time(visible(name)) if values.dtype == pl.Datetime else tables.text(visible(name))


def _chart_columns(frame: pl.DataFrame) -> tuple[str, list[str]] | None:
    """The first column that is a number or a time, and the numbers beside it; None without two such columns."""
    numbers = [name for name, kind in frame.schema.items() if kind.is_numeric() and name not in ID_COLUMNS]
    times = [name for name, kind in frame.schema.items() if kind.is_temporal()]
    x = next((name for name in frame.columns if name in numbers or name in times), None)
    ys = [name for name in numbers if name != x][:5]
    return None if x is None or not ys else (x, ys)


def _episode(row: Row) -> str:
    step = row.get("step_index")
    is_id = isinstance(row["episode_id"], str) and ids.is_text(row["episode_id"])
    return href(Page.EPISODE, episode=row["episode_id"], step=step) if is_id else href(Page.EPISODES)


def _schema(names: sql.Names) -> None:
    with st.expander("Tables and columns", icon=":material/table:", key="schema", on_change="rerun") as schema:
        if schema.open:
            columns = {"name": tables.text("Table or view"), "columns": tables.wide("Columns")}
            rows = {name: ", ".join(f"{column} {kind}" for column, kind in of) for name, of in names.tables.items()}
            frame = pl.DataFrame({"name": list(rows), "columns": list(rows.values())})
            tables.table(frame, columns, label="Tables and columns")


show()
