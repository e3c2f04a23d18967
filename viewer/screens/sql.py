"""SQL: one SELECT over the lake as the session sees it, in a locked process; rows that name an episode lead to it."""

import polars as pl
import streamlit as st  # noqa: TID253 - this is a Streamlit page

import lake
from lake import ids
from lake.errors import TrajlakeError
from lake.locked.query import SECONDS, LockedReader
from lake.tables import ID_COLUMNS
from viewer import components as ui
from viewer import pinned, tables
from viewer.links import Page, given
from viewer.navigation import href
from viewer.plain import number, visible
from viewer.queries import Row, lineage

_MOST_ROWS = 10_000
_PAGE = 50
_MOST_COLUMNS = 60
_EXAMPLE = """SELECT run_id, collection_round, avg(env_return) AS mean_return, avg(num_steps) AS mean_steps
FROM episodes GROUP BY ALL ORDER BY ALL"""


def show() -> None:
    """The page."""
    ui.header("SQL")
    _schema()
    st.text_area(
        "One SELECT (Ctrl+Enter runs it)",
        value=given("q") or _EXAMPLE,
        height=150,
        key="query",
        on_change=_remember,
        help="In a process of its own that can only read this lake: "
        f"{SECONDS:g} s, {_MOST_ROWS:,} rows; `trajlake sql` has no such limits.",
    )
    if (query := given("q")) is None:
        st.button("Run", type="primary", on_click=_remember)
        return
    try:
        frame = _answer(pinned.uri(), pinned.versions(), query)
    except TrajlakeError as error:
        st.error("The query has no result.", icon=":material/error:")
        st.code(visible(str(error)), language=None, wrap_lines=True)
        return
    _draw(frame)


def _remember() -> None:
    ui.first_page()
    st.query_params["q"] = st.session_state["query"].strip() or _EXAMPLE


@st.cache_data(show_spinner="Running", max_entries=50)
def _answer(folder: str, versions: tuple[tuple[str, int], ...], query: str) -> pl.DataFrame:
    """Rows of the query. Raises QueryError: there are more than a page of this kind takes."""
    return LockedReader(lake.open(folder).at(dict(versions)), max_rows=_MOST_ROWS).sql(query)


def _draw(frame: pl.DataFrame) -> None:
    shown = frame.select(frame.columns[:_MOST_COLUMNS])
    if frame.width > _MOST_COLUMNS:
        st.caption(f"The first {_MOST_COLUMNS} of {number(frame.width)} columns.")
    window = ui.pager(shown.height, "rows", rows=_PAGE)
    if not shown.height:
        return
    if (drawn := _chart_columns(shown)) is not None:
        x, ys = drawn
        if st.toggle("Chart", key="chart", bind="query-params"):
            st.line_chart(shown, x=x, y=ys)
    columns = {name: _column(name, shown[name]) for name in shown.columns}
    rows = shown.slice(window.offset, window.limit)
    tables.table(rows, columns, label="Rows", href=_episode if "episode_id" in columns else None)


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


def _schema() -> None:
    with st.expander("Tables and columns", icon=":material/table:", key="schema", on_change="rerun") as schema:
        if schema.open:
            columns = {"name": tables.text("Table or view"), "columns": tables.wide("Columns")}
            tables.table(pinned.read(lineage.schema), columns, label="Tables and columns")


show()
