"""SQL over a snapshot: one SELECT, inside the lake only, whose ids are the ids of Python."""

import datetime
import re
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lake import Lake, ids
from lake.errors import LakeAccessError, QueryError
from lake.read.query import QuerySession
from lake.read.query_views import EMPTY_STATES, read_macros, read_views
from lake.tables import TABLES
from testkit.copies import empty_lake
from testkit.episodes import episode
from testkit.examples import mostly_slow


@pytest.fixture(scope="module")
def lk(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    lk = empty_lake(tmp_path_factory.mktemp("sql") / "lake")
    with lk.job(kind="collect", run_id="run") as job:
        job.record([episode("a", n, env_return=float(n), steps=n + 1) for n in range(3)] + [episode("b")])
    return lk


@pytest.fixture(scope="module")
def session(lk: Lake) -> Iterator[QuerySession]:
    with lk.snapshot().session() as session:
        yield session


def value(session: QuerySession, query: str, params: Any = None) -> Any:
    """The one value of a query."""
    return session.query(query, params).item()


# ---------------------------------------------------------------- reading


def test_a_select_is_answered(session: QuerySession) -> None:
    query = "SELECT task_id, avg(env_return) AS mean, count(*) AS n FROM episodes GROUP BY task_id ORDER BY task_id"
    assert session.query(query).rows() == [("a", 1.0, 3), ("b", None, 1)]


@pytest.mark.parametrize(
    "query",
    [
        "select 1",
        "  -- a comment\n SELECT 1 ; ",
        "WITH t AS (SELECT 1) SELECT * FROM t",
        "FROM episodes",
        "VALUES (1)",
        "DESCRIBE episodes",
        "SUMMARIZE episodes",
        "SHOW TABLES",
        "(SELECT 1) UNION ALL (SELECT 2)",
    ],
)
def test_whatever_only_reads_is_answered(session: QuerySession, query: str) -> None:
    assert session.query(query).height > 0


def test_every_table_and_every_shipped_view_answers(session: QuerySession) -> None:
    names = {*TABLES, *read_views()}
    assert set(session.query("SHOW TABLES")["name"]) == names
    for name in names:
        session.query(f"SELECT * FROM {name}")


def test_every_shipped_file_says_what_it_is() -> None:
    assert len(read_macros()) == 4
    assert all(text.startswith("-- ") for text in read_macros())
    for name, text in read_views().items():
        assert text.startswith(f"-- {name}: "), name
        assert re.search(r"^-- Grain: one row per ", text, re.M), name
        assert f"CREATE VIEW {name} AS" in text


def test_parameters_are_values_and_never_sql(session: QuerySession) -> None:
    hostile = "a'; DROP VIEW episodes; --"
    assert value(session, "SELECT ? AS v", [hostile]) == hostile
    assert value(session, "SELECT $v AS v", {"v": hostile}) == hostile
    count = "SELECT count(*) FROM episodes WHERE "
    assert value(session, f"{count} task_id = $task", {"task": "a"}) == 3
    assert value(session, f"{count} num_steps > ? AND task_id = ?", [1, "a"]) == 2
    assert value(session, f"{count} rollout_index = $n", {"n": "2"}) == 1


def test_time_is_utc(session: QuerySession) -> None:
    assert value(session, "SELECT TIMESTAMPTZ '2026-01-01 12:00:00+02:00'") == datetime.datetime(
        2026, 1, 1, 10, tzinfo=datetime.UTC
    )


# ---------------------------------------------------------------- nothing but reading


@pytest.mark.parametrize(
    ("query", "kind"),
    [
        ("", "nothing"),
        (" ; ", "nothing"),
        ("-- only a comment", "nothing"),
        ("SELECT 1; SELECT 2", "SELECT, SELECT"),
        ("SELECT 1; DROP VIEW episodes", "SELECT, DROP"),
        ("DROP VIEW episodes", "DROP"),
        ("CREATE TABLE t (a INT)", "CREATE"),
        ("CREATE OR REPLACE VIEW episodes AS SELECT 1", "CREATE"),
        ("INSERT INTO episodes SELECT * FROM episodes", "INSERT"),
        ("DELETE FROM jobs", "DELETE"),
        ("UPDATE jobs SET kind = ''", "UPDATE"),
        ("COPY (SELECT 1) TO '{lake}/evil.csv'", "COPY"),
        ("EXPORT DATABASE '{lake}/evil'", "EXPORT"),
        ("ATTACH '{lake}/evil.db'", "ATTACH"),
        ("INSTALL httpfs", "LOAD"),
        ("SET threads = 1", "SET"),
        ("PRAGMA database_list", "PRAGMA"),
        ("CALL pragma_version()", "CALL"),
        ("EXPLAIN SELECT 1", "EXPLAIN"),
        ("EXPLAIN ANALYZE COPY (SELECT 1) TO '{lake}/evil.csv'", "EXPLAIN"),
        ("EXPLAIN ANALYZE DROP VIEW episodes", "EXPLAIN"),
        ("BEGIN", "TRANSACTION"),
        ("PIVOT episodes ON task_id USING count(*)", "MULTI"),
    ],
)
def test_anything_but_one_select_is_refused_and_does_nothing(
    session: QuerySession, lk: Lake, query: str, kind: str
) -> None:
    before = {path: path.stat().st_mtime_ns for path in Path(lk.uri).rglob("*")}
    with pytest.raises(QueryError, match=rf"one SELECT; this is {kind}"):
        session.query(query.format(lake=lk.uri))
    assert {path: path.stat().st_mtime_ns for path in Path(lk.uri).rglob("*")} == before
    assert value(session, "SELECT count(*) FROM episodes") == 4


@pytest.mark.parametrize(
    "query",
    [
        "SELECT * FROM read_text('{outside}')",
        "SELECT * FROM read_csv('{outside}')",
        "SELECT * FROM '{outside}'",
        "SELECT * FROM read_text('{lake}/../outside.csv')",
        "SELECT * FROM glob('{lake}/../*')",
        "SELECT * FROM glob('/etc/*')",
        "SELECT * FROM read_text('{lake}-too/inside.csv')",
        "SELECT * FROM sniff_csv('{outside}')",
        "SELECT * FROM read_parquet('http://localhost:1/x.parquet')",
        "SELECT (SELECT content FROM read_text('{outside}'))",
    ],
)
def test_no_file_outside_of_the_lake_is_read(session: QuerySession, lk: Lake, query: str) -> None:
    root = Path(lk.uri)
    outside, sibling = root.parent / "outside.csv", Path(f"{root}-too")
    outside.write_text("secret\n1\n")
    sibling.mkdir(exist_ok=True)
    (sibling / "inside.csv").write_text("secret\n1\n")
    with pytest.raises(QueryError, match="Permission Error"):
        session.query(query.format(outside=outside, lake=root))


def test_files_of_the_lake_may_be_read(session: QuerySession, lk: Lake) -> None:
    log = f"{lk.uri}/episodes/_delta_log/00000000000000000000.json"
    assert "protocol" in value(session, f"SELECT content FROM read_text('{log}')")


def test_python_variables_are_no_tables(session: QuerySession) -> None:
    frame = pl.DataFrame({"secret": [1]})
    for name in ("frame", "query", "params", "statements", "pl"):
        with pytest.raises(QueryError, match="does not exist"):
            session.query(f"SELECT * FROM {name}")
    assert frame.height == 1


@pytest.mark.parametrize(
    ("query", "params", "says"),
    [
        ("SELEC 1", None, 'syntax error at or near "SELEC"'),
        ("SELECT nothing FROM episodes", None, "nothing"),
        ("SELECT * FROM episode", None, 'Did you mean "episodes'),
        ("SELECT 'a'::INT", None, "Could not convert string 'a'"),
        ("SELECT error('boom')", None, "boom"),
        ("SELECT ?", None, "Values were not provided"),
        ("SELECT ?", [1, 2], "count mismatch"),
        ("SELECT $a", {"b": 1}, "Values were not provided"),
        ("SELECT ?", [object()], "Unable to transform python value"),
        ("SELECT INTERVAL 1 MONTH AS pause", None, "months has no fixed length; cast it to VARCHAR"),
        ("SELECT [INTERVAL 1 DAY] AS pauses", None, "cast it"),
        ("SELECT TIMESTAMP 'infinity' AS forever", None, "forever holds times outside of the years 1 to 9999"),
        ("SELECT DATE '10000-01-01' AS far", None, "far holds times outside of the years 1 to 9999"),
        ("SELECT at FROM jobs", None, 'write the column "at" in double quotes'),
        ("SELECT * FROM jobs WHERE at > now()", None, 'write the column "at" in double quotes'),
        ("SELECT * FROM episodes WHERE episode_id = '0k3'", None, "compare with id('0k3')"),
    ],
)
def test_sql_that_cannot_be_run_is_one_line_that_says_where_to_look(
    session: QuerySession, query: str, params: Any, says: str
) -> None:
    with pytest.raises(QueryError) as raised:
        session.query(query, params)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


# ---------------------------------------------------------------- results


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ("SELECT 1 AS a, 2 AS a", ["a", "a_1"]),
        ("SELECT 1 AS a, 2 AS a, 3 AS a_1, 4 AS a", ["a", "a_2", "a_1", "a_3"]),
        ("SELECT 1 AS a_1, 2 AS a, 3 AS a", ["a_1", "a", "a_2"]),
    ],
)
def test_columns_of_one_name_are_numbered(session: QuerySession, query: str, names: list[str]) -> None:
    frame = session.query(query)
    assert frame.columns == names
    assert sorted(frame.row(0)) == list(range(1, len(names) + 1))


def test_a_join_of_all_columns_is_answered(session: QuerySession) -> None:
    frame = session.query("SELECT * FROM episodes JOIN steps USING (episode_id)")
    assert frame.height == 8
    assert {"run_id", "run_id_1"} <= set(frame.columns)


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("(SELECT sum(num_steps) FROM episodes)", 8),
        ("9223372036854775807::HUGEINT", 2**63 - 1),
        ("9223372036854775808::HUGEINT", Decimal(2**63)),
        ("1.50::DECIMAL(5, 2)", Decimal("1.50")),
        ("NULL::HUGEINT", None),
        ("MAP {'a': 1}", {"a": 1}),
        ("[1, NULL]", [1, None]),
        ("'x'::BLOB", b"x"),
        ("DATE '9999-12-31'", datetime.date(9999, 12, 31)),
        ("TIMESTAMPTZ '0001-01-01 00:00:00Z'", datetime.datetime(1, 1, 1, tzinfo=datetime.UTC)),
        ("TIMESTAMP_NS '2200-01-01' > TIMESTAMP_NS '1700-01-01'", True),
        ("NULL::TIMESTAMP", None),
    ],
)
def test_values_are_those_of_python_and_sums_integers_where_they_fit(
    session: QuerySession, expression: str, expected: Any
) -> None:
    value_read = value(session, f"SELECT {expression} AS v")
    if isinstance(value_read, pl.Series):
        value_read = value_read.to_list()
    assert value_read == expected
    assert type(value_read) is type(expected) or isinstance(value_read, dict)


# ---------------------------------------------------------------- states that say nothing


@pytest.mark.parametrize(
    ("state", "is_empty"),
    [
        *((text, True) for text in ("", " ", "\n", "[]", "{}", '""', "null", "None", " []\n", "null\r\n")),
        *((text, False) for text in ("0", "no", "[1]", "nothing", "NULL and void")),
        (None, None),
    ],
)
def test_a_state_that_says_nothing_is_known_by_its_hash(
    session: QuerySession, state: str | None, is_empty: bool | None
) -> None:
    state_hash = None if state is None else ids.text_hash(state)
    assert value(session, "SELECT is_empty_state(?::BIGINT)", [state_hash]) is is_empty
    assert pl.Series([state_hash], dtype=pl.Int64).is_in(EMPTY_STATES).to_list() == [is_empty]


# ---------------------------------------------------------------- ids


@given(st.integers(0, 2**63 - 1))
def test_the_macros_are_the_ids_of_python(session: QuerySession, number: int) -> None:
    text = ids.to_text(number)
    frame = session.query(
        "SELECT id_text(?::BIGINT) AS text, id(?) AS number, id(?) AS upper", [number, text, text.upper()]
    )
    assert frame.row(0) == (text, number, number)
    assert ids.from_text(text) == number


@pytest.mark.parametrize("number", [0, 1, 31, 32, 2**62, 2**63 - 1])
def test_the_macros_hold_at_the_edges(session: QuerySession, number: int) -> None:
    assert value(session, f"SELECT id_text({number})") == ids.to_text(number)
    assert value(session, f"SELECT id('{ids.to_text(number)}')") == number


def test_an_episode_is_found_by_the_id_that_people_see(session: QuerySession, lk: Lake) -> None:
    id_texts = [ids.to_text(number) for number in lk.scan("episodes").collect()["episode_id"]]
    for text in id_texts:
        assert value(
            session,
            "SELECT count(*) FROM steps JOIN episodes USING (episode_id) WHERE episode_id = id($e)",
            {"e": text},
        )
    assert session.query("SELECT id_text(episode_id) AS e FROM episodes")["e"].sort().to_list() == sorted(id_texts)


@pytest.mark.parametrize("text", ["", "0", "0" * 12, "0" * 14, "u" * 13, "0" * 12 + "-", "episode"])
def test_what_is_no_id_is_an_error(session: QuerySession, text: str) -> None:
    with pytest.raises(QueryError, match="is not an id: it has 13 characters of 0123"):
        session.query("SELECT * FROM episodes WHERE episode_id = id(?)", [text])


def test_no_id_is_no_id(session: QuerySession) -> None:
    assert session.query("SELECT id(NULL) AS a, id_text(NULL) AS b").row(0) == (None, None)


# ---------------------------------------------------------------- odd places


ODD_NAMES = ["a b", "\u00e9\U0001f600", "it's", 'say "hi"', "a%b", "#1", "q?", "s*", "{a,b}", "a;b", "$x", "run_id=5"]


@pytest.mark.parametrize("name", mostly_slow(ODD_NAMES, "it's", "a%b", "{a,b}", "run_id=5"))
def test_a_lake_may_lie_in_an_oddly_named_folder(tmp_path: Path, name: str) -> None:
    for attempt in range(2):
        lk = empty_lake(tmp_path / name)
        with lk.job(kind="collect", run_id="run") as job:
            counts = job.record([episode()])
        assert (counts.new, counts.present) == (1 - attempt, attempt)
        assert lk.sql("SELECT count(*) AS n FROM steps").item() == lk.scan("steps").collect().height == 2
        assert lk.sql("SELECT DISTINCT run_id FROM steps").item() == "run", "a folder's name gives no column"


def test_a_damaged_file_is_a_one_line_error(tmp_path: Path) -> None:
    lk = empty_lake(tmp_path / "lake")
    with lk.job(kind="ingest", run_id="r") as job:
        job.record([episode("t", 0)])
    snapshot = lk.snapshot()
    Path(snapshot.files("steps")[0].path).unlink()
    with pytest.raises(LakeAccessError, match="trajlake doctor"):
        snapshot.sql("SELECT count(*) FROM steps")


def test_a_query_opens_no_file_of_a_table_it_does_not_name(tmp_path: Path) -> None:
    lk = empty_lake(tmp_path / "lake")
    with lk.job(kind="ingest", run_id="r") as job:
        job.record([episode("t", 0)])
    snapshot = lk.snapshot()
    Path(snapshot.files("steps")[0].path).unlink()
    assert snapshot.sql("SELECT count(*) FROM episodes").item() == 1
    assert snapshot.sql("SELECT count(*) FROM groups").item() == 1
    with pytest.raises(LakeAccessError, match="trajlake doctor"):
        snapshot.sql("SELECT count(*) FROM trajectory")
