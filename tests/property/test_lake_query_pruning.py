"""Leaving files out never changes an answer: random conditions over a real lake, against DuckDB on rows in memory."""

from collections.abc import Iterator

import duckdb
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lake
from lake import Lake, Snapshot, ids
from lake.read import query_pruning, query_views
from lake.read.query import QuerySession
from lake.read.query_pruning import Condition, get_planner, parse_condition
from lake.tables import TABLES
from testkit.episodes import episode
from testkit.examples import examples
from testkit.full_lake import rendered
from testkit.lakes import add_credit, add_training

ROUNDS = 10


@pytest.fixture(scope="module")
def lk(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """Ten writes of two runs, the first half compacted, one episode retried, with credit, training, rendered tokens."""
    lk = lake.open(tmp_path_factory.mktemp("pruning") / "lake", create=True)
    for number in range(ROUNDS):
        with lk.job(kind="collect", run_id=f"run {number % 2}", parameters={"round": number}) as job:
            job.record(
                [
                    episode(f"task {task}", index, tokens=True, collection_round=number, env_return=float(index % 2))
                    for task in range(2)
                    for index in range(3)
                ]
            )
        if number == ROUNDS // 2:
            for name in ("episodes", "steps", "tokens"):
                lk.compact(name)
    with lk.job(kind="collect", run_id="run 1") as job:
        job.record([episode("task 0", 0, tokens=True, collection_round=ROUNDS - 1, attempt=1)])
    add_credit(lk)
    add_credit(lk, gamma=0.5)
    add_training(lk)
    with lk.job(kind="render") as job:
        job.write("tokens", rendered(lk.scan("steps").collect()))
    return lk


@pytest.fixture(scope="module")
def pruning(lk: Lake) -> Iterator[QuerySession]:
    """A session that takes every chance to leave files out, however little there is to read."""
    few = query_pruning.FEW_FILES
    query_pruning.FEW_FILES = 0
    with lk.snapshot().session() as session:
        yield session
    query_pruning.FEW_FILES = few


@pytest.fixture(scope="module")
def oracle(lk: Lake) -> Iterator[duckdb.DuckDBPyConnection]:
    """Every table as a table of visible rows, and the shipped views over them."""
    connection = duckdb.connect()
    snapshot = lk.snapshot()
    for name in TABLES:
        frame = snapshot.scan(name).collect()
        connection.register("frame", frame.to_arrow())
        connection.execute(f"CREATE TABLE {name} AS FROM frame")
    for text in [*query_views.read_macros(), *query_views.read_views().values()]:
        connection.execute(text)
    yield connection
    connection.close()


def facts(lk: Lake) -> dict[str, list[int | str]]:
    """Values that columns have, and some that they have not."""
    episodes = lk.snapshot().scan_all("episodes").collect()
    return {
        "episode_id": [*episodes["episode_id"].unique(maintain_order=True), 0, 2**63 - 1],
        "group_id": [*episodes["group_id"].unique(maintain_order=True), 5],
        "run_id": ["run 0", "run 1", "run", "run 10", "it's"],
    }


SOURCES = (
    "steps",
    "episodes",
    "tokens",
    "advantages",
    "trajectory",
    "step_ledger",
    "(SELECT DISTINCT * EXCLUDE (job_id, series_id) FROM latest_advantages)",
    "(SELECT e.* FROM episodes e JOIN steps s ON s.episode_id = e.episode_id)",
    "(SELECT s.* FROM steps s LEFT JOIN episodes e ON e.episode_id = s.episode_id AND e.run_id = 'run 0')",
    "(SELECT e.* FROM episodes e SEMI JOIN steps s ON s.episode_id = e.episode_id AND s.step_index = 1)",
    "(SELECT * FROM steps UNION ALL SELECT * FROM steps WHERE run_id = 'run 1')",
    "(WITH w AS (SELECT * FROM steps WHERE run_id >= 'run 0') SELECT a.* FROM w a JOIN w b USING (episode_id))",
    "(SELECT e.* FROM episodes e WHERE (SELECT count(*) FROM steps s WHERE s.group_id = e.group_id) > 5)",
)


@st.composite
def conditions(draw: st.DrawFn, values: dict[str, list[int | str]]) -> str:
    column = draw(st.sampled_from(sorted(values)))
    first, second = (literal(draw(st.sampled_from(values[column])), draw(st.booleans())) for _ in range(2))
    return draw(
        st.sampled_from(
            [
                f"{column} = {first}",
                f"{column} IN ({first}, {second})",
                f"{column} BETWEEN {first} AND {second}",
                f"{column} >= {first}",
                f"{column} < {first}",
                f"{column} <> {first}",
                f"({column} = {first} OR {column} = {second})",
                f"({column} = {first} OR run_id = 'run 1')",
                f"NOT ({column} = {first})",
                f"{column} = (SELECT max({column}) FROM episodes)",
                f"{column} IN (SELECT {column} FROM episodes WHERE {column} = {first})",
            ]
        )
    )


def literal(value: int | str, is_printed: bool) -> str:
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    return f"id('{ids.to_text(value)}')" if is_printed else str(value)


@settings(max_examples=examples(40))
@given(data=st.data())
def test_pruned_answers_are_the_answers(
    lk: Lake, pruning: QuerySession, oracle: duckdb.DuckDBPyConnection, data: st.DataObject
) -> None:
    source = data.draw(st.sampled_from(SOURCES))
    wheres = data.draw(st.lists(conditions(facts(lk)), min_size=1, max_size=3))
    query = f"SELECT * FROM {source} WHERE {' AND '.join(wheres)}"
    expected = oracle.sql(query).to_arrow_table()
    frame = pruning.query(query)
    assert rows(frame) == rows(pl.from_arrow(expected.rename_columns(frame.columns)))


def rows(frame: pl.DataFrame) -> list[str]:
    return sorted(map(repr, frame.rows()))


@settings(max_examples=examples(40))
@given(data=st.data())
def test_parameters_prune_as_literals_do(
    lk: Lake, pruning: QuerySession, oracle: duckdb.DuckDBPyConnection, data: st.DataObject
) -> None:
    values = facts(lk)
    constants = {name: data.draw(st.sampled_from(values[name])) for name in values}
    query = "SELECT episode_id, step_index, state FROM steps"
    query += " WHERE episode_id = $episode_id OR (group_id = $group_id AND run_id = $run_id)"
    if data.draw(st.booleans()):
        query = query.replace(" OR ", " AND ")
    expected = oracle.sql(query, params=constants).to_arrow_table()
    assert rows(pruning.query(query, constants)) == rows(pl.from_arrow(expected))


# ---------------------------------------------------------------- that files are left out at all


def opened(lk: Lake, query: str) -> dict[str, int]:
    """Files of each table that a query binds."""
    with lk.snapshot().session() as session:
        session.query(query)
        return {name: len(paths or ()) for name, (paths, *_) in session._views.tables.items()}


def total(snapshot: Snapshot, name: str) -> int:
    return len(snapshot.files(name))


@pytest.mark.parametrize(
    "source", ["steps", "trajectory", "(SELECT s.* FROM steps s JOIN episodes e USING (episode_id, group_id))"]
)
def test_a_point_query_opens_the_files_of_its_episode(lk: Lake, pruning: QuerySession, source: str) -> None:
    snapshot = lk.snapshot()
    assert total(snapshot, "steps") >= ROUNDS // 2
    episodes = snapshot.scan("episodes").collect()
    for number in range(0, ROUNDS, 3):
        row = episodes.filter(pl.col("collection_round") == number).row(0, named=True)
        # The file of its write (a group's retry came in its own write), and the compacted one, whose range of
        # groups may take it in.
        assert 1 <= opened(lk, f"SELECT * FROM {source} WHERE episode_id = {row['episode_id']}")["steps"] <= 2
        assert 1 <= opened(lk, f"SELECT * FROM {source} WHERE group_id = {row['group_id']}")["steps"] <= 3


def test_tokens_that_a_job_rendered_are_found_too(lk: Lake, pruning: QuerySession) -> None:
    episode_id = lk.scan("episodes").collect()["episode_id"][0]
    frame = pruning.query(f"SELECT provenance, count(*) AS n FROM tokens WHERE episode_id = {episode_id} GROUP BY ALL")
    assert sorted(frame.rows()) == [("engine", 2), ("rendered", 2)]


def test_a_run_opens_the_files_of_its_run(lk: Lake, pruning: QuerySession) -> None:
    snapshot = lk.snapshot()
    bound = opened(lk, "SELECT count(*) FROM steps WHERE run_id = 'run 0'")["steps"]
    assert 0 < bound < total(snapshot, "steps")
    assert opened(lk, "SELECT count(*) FROM steps WHERE run_id = 'no such run'")["steps"] == 0


# ---------------------------------------------------------------- reading conditions


@pytest.mark.parametrize(
    ("text", "condition"),
    [
        ("(k = 5)", Condition("k", frozenset((5,)))),
        ("(k = -5)", Condition("k", frozenset((-5,)))),
        ("(k = 'a''b')", Condition("k", frozenset(("a'b",)))),
        ("(k = '')", Condition("k", frozenset(("",)))),
        ("(k > 5)", Condition("k", low=5)),
        ("(k <= 'x')", Condition("k", high="x")),
        ("((k >= 4) AND (k <= 5))", Condition("k", low=4, high=5)),
        ("(k IN (1, -2, 3))", Condition("k", frozenset((1, -2, 3)))),
        ("optional: (k IN ('x', 'y, z'))", Condition("k", frozenset(("x", "y, z")))),
        ("(k = 'a') OR (x = 'b')", None),
        ("(k = 5.5)", None),
        ("(k != 5)", None),
        ("(CAST(k AS VARCHAR) = '5')", None),
        ("((k >= 4) AND (x <= 5))", None),
        ("((k >= 4) OR (k <= 5))", None),
        ("(k IS NOT NULL)", None),
        ("k", None),
        ("", None),
        (f"(k = '{'x' * 1000}')", None),
    ],
)
def test_a_condition_is_read_as_it_is_meant_or_not_at_all(text: str, condition: Condition | None) -> None:
    assert parse_condition(text) == condition


@given(st.text(max_size=60), st.integers(-(2**63), 2**63 - 1))
def test_what_duckdb_prints_is_what_was_asked(text: str, number: int) -> None:
    scans = get_planner().plan("SELECT * FROM steps WHERE run_id = ? AND episode_id = ?", [text, number]).scans
    (scan,) = scans["steps"]
    values_by_column = {condition.column: condition.values for condition in scan}
    assert values_by_column.get("episode_id") == {number}
    assert values_by_column.get("run_id") in ({text}, None)


ORDER = st.one_of(st.integers(-5, 5), st.text("ab\u00e9\U0001f600", max_size=2))


@given(st.lists(ORDER, min_size=1, max_size=5), ORDER, ORDER)
def test_a_file_is_excluded_only_if_none_of_its_values_will_do(
    inside: list[int | str], low: int | str, high: int | str
) -> None:
    kind = type(inside[0])
    values = [value for value in inside if type(value) is kind]
    bounds = min(values), max(values)
    for condition, holds in (
        (Condition("k", frozenset((low, high))), lambda v: v in (low, high)),
        (Condition("k", low=low), lambda v: type(low) is not kind or v >= low),
        (Condition("k", high=high), lambda v: type(high) is not kind or v <= high),
    ):
        if condition.excludes(*bounds):
            assert not any(map(holds, values))


def test_a_query_that_cannot_be_planned_leaves_nothing_out() -> None:
    for query in ("SELEC 1", "SELECT * FROM nowhere", "SELECT * FROM read_text('/etc/passwd')", "SELECT error('x')"):
        assert not any(scan for scans in get_planner().plan(query).scans.values() for scan in scans)
