"""A session: streams, limits, what it binds, and files of every age and state."""

import datetime
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import lake
from lake import Lake
from lake.errors import QueryError
from lake.read.parquet import DataFile
from lake.read.query import QueryLimits, QuerySession
from lake.read.query_views import find_mentioned, read_views
from lake.read.text_table import Rows, format_cell
from lake.storage.objects import Objects
from lake.tables import TABLES
from testkit.episodes import episode


@pytest.fixture(scope="module")
def lk(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    lk = lake.open(tmp_path_factory.mktemp("sql") / "lake", create=True)
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


# ---------------------------------------------------------------- intervals


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("INTERVAL 90 MINUTE", datetime.timedelta(minutes=90)),
        ("TIMESTAMP '2026-01-03 01:00:00' - TIMESTAMP '2026-01-01'", datetime.timedelta(days=2, hours=1)),
        ("-INTERVAL 1 DAY", -datetime.timedelta(days=1)),
        ("NULL::INTERVAL", None),
    ],
)
def test_an_interval_is_a_duration(session: QuerySession, expression: str, expected: Any) -> None:
    assert value(session, f"SELECT {expression} AS v") == expected
    streamed = session.stream(f"SELECT {expression} AS v, {expression} AS v").read_all()
    assert streamed.column_names == ["v", "v_1"]
    assert streamed["v_1"].to_pylist() == [expected]


# ---------------------------------------------------------------- streams and limits


def test_a_stream_has_the_rows_of_the_query_in_batches(session: QuerySession) -> None:
    query = "SELECT range AS n, 'row ' || range AS text FROM range(10_000) WHERE n >= $low"
    reader = session.stream(query, {"low": 10}, rows=1000)
    sizes = [batch.num_rows for batch in reader]
    assert sizes == [1000] * 9 + [990]
    assert pl.from_arrow(session.stream(query, {"low": 10}).read_all()).equals(session.query(query, {"low": 10}))


def test_streams_and_queries_may_run_side_by_side(session: QuerySession) -> None:
    first = session.stream("SELECT range AS n FROM range(100_000)", rows=1000)
    first.read_next_batch()
    assert value(session, "SELECT count(*) FROM episodes") == 4
    second = session.stream("SELECT episode_id FROM episodes")
    assert second.read_all().num_rows == 4
    assert sum(batch.num_rows for batch in first) == 99_000


def test_an_error_in_the_middle_of_a_stream_is_the_lakes_error(session: QuerySession) -> None:
    reader = session.stream("SELECT CASE WHEN range = 500_000 THEN error('boom') ELSE range END FROM range(1_000_000)")
    with pytest.raises(QueryError, match="boom"):
        reader.read_all()
    assert value(session, "SELECT 1") == 1


def limited(lk: Lake, **limits: Any) -> QuerySession:
    snapshot = lk.snapshot()
    return snapshot.session(QueryLimits(**limits))


FOREVER = "SELECT count(*) FROM range(10_000_000) a, range(10_000_000) b WHERE a.range + b.range = -1"


def test_a_query_that_takes_too_long_is_stopped(lk: Lake) -> None:
    with limited(lk, seconds=0.2) as session:
        with pytest.raises(QueryError, match=r"stopped after 0\.2 s"):
            session.query(FOREVER)
        with pytest.raises(QueryError, match=r"stopped after 0\.2 s"):
            session.stream(FOREVER.replace("count(*)", "*")).read_all()
        assert value(session, "SELECT count(*) FROM episodes") == 4


def test_a_query_that_takes_too_much_memory_is_stopped(lk: Lake) -> None:
    with limited(lk, memory="50MB", spill=False) as session:
        with pytest.raises(QueryError, match=r"Out of Memory.*raise the memory limit"):
            session.query("SELECT list(range) FROM range(100_000_000)")
        assert value(session, "SELECT count(*) FROM episodes") == 4


def test_settings_stay_as_they_are(session: QuerySession) -> None:
    settings = {
        "enable_external_access": False,
        "lock_configuration": True,
        "autoload_known_extensions": False,
        "autoinstall_known_extensions": False,
        "python_enable_replacements": False,
    }
    for name, expected in settings.items():
        assert value(session, f"SELECT current_setting('{name}')") is expected


# ---------------------------------------------------------------- names


def test_only_what_is_mentioned_is_bound(lk: Lake) -> None:
    names: list[str] = []
    snapshot = lk.snapshot()

    def files(name: str) -> list[DataFile]:
        names.append(name)
        return snapshot.files(name)

    with QuerySession(files, snapshot.objects, lambda _: snapshot.retracted) as session:
        session.query("SELECT 1 AS one")
        assert not names
        session.query('SELECT * FROM "Episodes" AS steps_of')
        assert set(names) == {"episodes"}
        session.query("SELECT * FROM trajectory")
        assert set(names) == {"episodes", "steps"}
        # No word of the text is the name of the table.
        assert value(session, "SELECT count(*) FROM query_table('job' || 's')") == 2


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ("SELECT * FROM episodes", {"episodes"}),
        ("select * from STEPS join Episodes using (episode_id)", {"steps", "episodes"}),
        ('SELECT * FROM "steps"', {"steps"}),
        ("SELECT * FROM main.steps", {"steps"}),
        ("SELECT * FROM job_runs", {"job_runs", "jobs"}),
        (
            "SELECT * FROM latest_advantages",
            # `episodes` is a column of `credit_groups` here: a word is all that is looked at.
            {"latest_advantages", "advantages", "credit_groups", "episodes", "job_runs", "jobs"},
        ),
        ("SELECT 'jobs'", {"jobs"}),
        ("SELECT steps_of FROM my_steps", set()),
        ("SHOW TABLES", {*TABLES, *read_views()}),
        ("DESCRIBE", {*TABLES, *read_views()}),
        ("SELECT * FROM duckdb_views()", {*TABLES, *read_views()}),
        ("SELECT * FROM information_schema.columns", {*TABLES, *read_views()}),
    ],
)
def test_names_are_found_in_the_text(query: str, names: set[str]) -> None:
    assert find_mentioned(query) == names


# ---------------------------------------------------------------- files of other ages, rows that are hidden


def data_file(path: Path, rows: int, dead: frozenset[int] = frozenset()) -> DataFile:
    return DataFile(str(path), rows, path.stat().st_size, dead)


def session_over(folder: Path, files: dict[str, list[DataFile]], retracted: Sequence[int] = ()) -> QuerySession:
    hidden = pl.Series("episode_id", retracted, dtype=pl.Int64)
    return QuerySession(lambda name: files.get(name, []), Objects(folder), lambda _: hidden)


def test_columns_that_a_file_is_too_old_for_read_as_null(lk: Lake, tmp_path: Path) -> None:
    rows = lk.scan("episodes").sort("episode_id").collect()
    older = rows.head(2).drop("seed", "blob_ids", "status", "extra")
    newer = rows.tail(2).with_columns(seed=pl.lit(7), invented=pl.lit("later than this program"))
    files = []
    for name, frame in (("older", older), ("newer", newer), ("oldest", rows.head(0).select("episode_id"))):
        frame.write_parquet(tmp_path / f"{name}.parquet")
        files.append(data_file(tmp_path / f"{name}.parquet", frame.height))
    for order in (files, files[::-1]):
        with session_over(tmp_path, {"episodes": order}) as session:
            episodes_read = session.query("SELECT * FROM episodes ORDER BY episode_id")
            assert episodes_read.schema == TABLES["episodes"].polars()
            assert episodes_read["seed"].to_list() == [None, None, 7, 7]
            assert episodes_read["status"].to_list() == [None, None, *rows["status"].tail(2)]
            assert session.query("SELECT task_id FROM episodes WHERE seed IS NULL").height == 2
            assert session.query("SELECT task_id FROM episodes WHERE seed = 7").height == 2
            assert value(session, "SELECT count(seed) FROM episodes") == 2


def test_rows_of_dead_writes_are_left_out(lk: Lake, tmp_path: Path) -> None:
    rows = lk.scan("steps").collect()
    frames = [rows.with_columns(write_id=pl.lit(n, pl.Int64)) for n in (1, 2, 3)]
    files = []
    for n, (frame, dead) in enumerate(
        [
            (frames[0], frozenset[int]()),
            (pl.concat(frames[1:]), frozenset((2,))),
            (pl.concat(frames), frozenset((1, 3))),
        ]
    ):
        frame.write_parquet(tmp_path / f"{n}.parquet")
        files.append(data_file(tmp_path / f"{n}.parquet", frame.height, dead))
    with session_over(tmp_path, {"steps": files}) as session:
        counts = session.query("SELECT write_id, count(*) AS n FROM steps GROUP BY write_id ORDER BY write_id")
        assert counts.rows() == [(1, rows.height), (2, rows.height), (3, rows.height)]


def test_retracted_episodes_are_hidden_where_the_table_says_so(lk: Lake, tmp_path: Path) -> None:
    snapshot = lk.snapshot()
    first_id, *other_ids = snapshot.scan("episodes").collect()["episode_id"].to_list()
    files = {name: snapshot.files(name) for name in ("episodes", "steps", "jobs")}
    with session_over(Path(lk.uri), files, [first_id]) as session:
        assert set(session.query("SELECT episode_id FROM episodes")["episode_id"]) == set(other_ids)
        assert first_id not in session.query("FROM steps")["episode_id"]
        assert first_id not in session.query("SELECT DISTINCT episode_id FROM trajectory")["episode_id"]
        assert session.query(f"SELECT * FROM episodes WHERE episode_id = {first_id}").is_empty()
        assert session.query("SELECT * FROM jobs").height == 2
        for name in ("episodes", "steps"):
            assert session.query(f"SELECT * FROM {name}").schema == TABLES[name].polars()


def test_rows_of_a_set_are_one_row_per_key(tmp_path: Path) -> None:
    table = TABLES["blobs"]
    rows = pl.DataFrame(
        {
            "blob_id": [1, 2, 1, 1],
            "write_id": [10, 10, 11, 9],
            "sha256": "0",
            "media_type": "text/plain",
            "n_bytes": 1,
            "payload": b"x",
        },
        schema=table.polars(),
    )
    rows.head(2).write_parquet(tmp_path / "a.parquet")
    rows.tail(2).write_parquet(tmp_path / "b.parquet")
    files = [data_file(tmp_path / f"{name}.parquet", 2) for name in "ab"]
    with session_over(tmp_path, {"blobs": files}) as session:
        frame = session.query("SELECT blob_id, write_id FROM blobs ORDER BY blob_id")
        assert frame.rows() == [(1, 9), (2, 10)]


# ---------------------------------------------------------------- plain rows


@pytest.mark.parametrize(
    "query",
    [
        "SELECT 1 AS a, -2::TINYINT, 3::HUGEINT, 1.5::DOUBLE, 0.1::FLOAT, 'x', true, NULL::VARCHAR, 'b'::BLOB",
        "SELECT DATE '2026-02-28' AS d, TIMESTAMPTZ '2026-02-28 23:59:59.5+02' AS d, NULL::TIMESTAMPTZ",
        "SELECT episode_id, group_id, run_id, env_return, num_steps FROM episodes ORDER BY 1",
        "SELECT 1 AS a WHERE false",
        "SELECT [1, 2] AS list, {'a': 1} AS struct, INTERVAL 3 DAY AS days, 1.25::DECIMAL(5, 2) AS price",
        "SELECT sum(num_steps) AS steps FROM episodes",
    ],
)
def test_what_is_shown_is_what_a_query_gives(session: QuerySession, query: str) -> None:
    frame, plain_rows = session.query(query), session.query_plain(query)
    if isinstance(plain_rows, Rows):
        assert plain_rows.names == frame.columns
        assert [list(map(format_cell, row)) for row in plain_rows.values] == [
            list(map(format_cell, row)) for row in frame.rows()
        ]
        assert plain_rows.numbers == [dtype.is_numeric() for dtype in frame.dtypes]
    else:
        assert plain_rows.equals(frame)
    assert isinstance(plain_rows, Rows) == ("[1, 2]" not in query)


@pytest.mark.parametrize("time", ["'infinity'::TIMESTAMPTZ", "'-infinity'::DATE", "'200000-01-01'::TIMESTAMPTZ"])
def test_times_outside_of_the_calendar_are_refused_as_by_a_query(session: QuerySession, time: str) -> None:
    with pytest.raises(QueryError, match="years 1 to 9999"):
        session.query_plain(f"SELECT {time} AS t")


# ---------------------------------------------------------------- one after the other


def test_a_session_shows_its_own_snapshot_whatever_the_one_before_it_read(tmp_path: Path) -> None:
    """Sessions over a folder hand their connection on, but none of their files, retractions and faults."""
    lk = lake.open(tmp_path / "lake", create=True)
    tasks = "SELECT task_id FROM episodes ORDER BY task_id"
    lk.append([episode("a"), episode("b")], run_id="run")
    before = lk.snapshot()
    assert before.sql(tasks)["task_id"].to_list() == ["a", "b"]
    (episode_id,) = before.sql("SELECT episode_id FROM episodes WHERE task_id = 'a'")["episode_id"]
    lk.retract([episode_id], reason="test")
    lk.append([episode("c")], run_id="run")
    for _ in range(2):
        with pytest.raises(QueryError):
            lk.sql("SELECT nothing FROM episodes")
        assert lk.sql(tasks)["task_id"].to_list() == ["b", "c"]
        assert lk.sql("SELECT count(*) FROM steps JOIN episodes USING (episode_id) WHERE task_id = 'a'").item() == 0
        assert before.sql(tasks)["task_id"].to_list() == ["a", "b"]
        assert lk.sql("SELECT count(*) FROM query_table('epi' || 'sodes')").item() == 2, "its name is not in the text"
        with lk.snapshot().session(retracted_too=True) as session:
            assert session.query(tasks)["task_id"].to_list() == ["a", "b", "c"]
