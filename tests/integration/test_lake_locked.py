"""SQL of strangers: what it does in an open connection, and that it does none of it in locked mode."""

import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import pytest

import lake
from lake import Lake
from lake.errors import LakeAccessError, QueryError, UsageError
from lake.locked import isolation
from lake.locked.query import LockedReader, parse_size
from lake.storage.objects import Objects
from testkit.episodes import episode
from testkit.examples import mostly_slow
from testkit.wording import Wording

pytestmark = pytest.mark.skipif(
    bool(isolation.find_missing_layers()), reason=f"no strong isolation here: {isolation.find_missing_layers()}"
)
SECRET = "the secret of another program"


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@dataclass(frozen=True)
class World:
    """A lake, another lake, a file outside, and an open connection in which the lake's tables answer as well."""

    lake: Lake
    other: Lake
    root: Path

    def fill(self, query: str) -> str:
        """The query with the places of this world."""
        data = self.lake.snapshot().files("episodes")[0].path
        path = self.other.snapshot().files("episodes")[0].path
        return query.format(
            root=self.root, lake=self.lake.uri, data=data, other=path, outside=self.root / "outside.csv"
        )

    def open_connection(self) -> duckdb.DuckDBPyConnection:
        """DuckDB without settings."""
        connection = duckdb.connect()
        for name in ("episodes", "steps"):
            files = [file.path for file in self.lake.snapshot().files(name)]
            connection.execute(f"CREATE VIEW {name} AS FROM read_parquet({files})")
        return connection


@pytest.fixture(scope="module")
def blueprint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("locked")
    for name in ("lake", "other"):
        lk = lake.open(root / name, create=True)
        with lk.job(kind="collect", run_id="run") as job:
            job.record([episode("a", n, env_return=float(n), steps=n + 1) for n in range(3)])
    (root / "outside.csv").write_text(f"text\n{SECRET}\n")
    return root


@pytest.fixture
def world(blueprint: Path, tmp_path: Path) -> World:
    """A copy, for what an open connection does to it."""
    root = tmp_path / "world"
    shutil.copytree(blueprint, root)
    return World(lake.open(root / "lake"), lake.open(root / "other"), root)


@pytest.fixture(scope="module")
def reader(blueprint: Path) -> LockedReader:
    return LockedReader(lake.open(blueprint / "lake").snapshot())


def refused(blueprint: Path, reader: LockedReader, query: str) -> str:
    """The message with which locked mode refuses a query; nothing on disk has changed."""
    world = World(lake.open(blueprint / "lake"), lake.open(blueprint / "other"), blueprint)
    before = contents(blueprint)
    with pytest.raises(QueryError) as raised:
        reader.sql(world.fill(query))
    assert contents(blueprint) == before
    assert SECRET not in str(raised.value)
    return str(raised.value)


# ---------------------------------------------------------------- what it is for


def test_a_locked_query_answers_as_an_open_one(blueprint: Path, reader: LockedReader) -> None:
    snapshot = lake.open(blueprint / "lake").snapshot()
    assert reader.isolation == "strong"
    for query in (
        "SELECT * FROM trajectory ORDER BY episode_id, step_index",
        "SELECT id_text(episode_id) AS e, INTERVAL 1 DAY AS d, 1 AS a, 2 AS a FROM episodes ORDER BY e",
        "SELECT 1 AS a WHERE false",
    ):
        assert reader.sql(query).equals(snapshot.sql(query)), query
    table = reader.arrow("FROM steps WHERE step_index >= $low", {"low": 1})
    assert table.column_names == snapshot.sql("FROM steps").columns
    assert table.num_rows == 3
    assert reader.sql("SELECT ? AS v", ["'; DROP"]).item() == "'; DROP"


def test_retracted_episodes_are_hidden(world: World) -> None:
    hidden_id = world.lake.scan("episodes").collect()["episode_id"][0]
    world.lake.retract([hidden_id], "wrong task")
    with LockedReader(world.lake.snapshot()) as reader:
        episode_ids = reader.sql("SELECT episode_id FROM trajectory JOIN episodes USING (episode_id)")["episode_id"]
    assert hidden_id not in episode_ids
    assert episode_ids.n_unique() == 2


# ---------------------------------------------------------------- reading what it must not


READS = {
    "a text outside": "SELECT content FROM read_text('{outside}')",
    "a table outside": "SELECT * FROM read_csv('{outside}')",
    "a file as a table": "SELECT * FROM '{outside}'",
    "bytes outside": "SELECT content::VARCHAR FROM read_blob('{outside}')",
    "in a subquery": "SELECT (SELECT content FROM read_text('{outside}'))",
    "through a text": "SELECT * FROM query('SELECT content FROM read_text(''{outside}'')')",
    "by way of the lake": "SELECT content FROM read_text('{lake}/../outside.csv')",
    "another lake": "SELECT task_id FROM read_parquet('{other}')",
    "the lake's own log": "SELECT content FROM read_text('{lake}/episodes/_delta_log/00000000000000000000.json')",
    "passwords": "SELECT content FROM read_text('/etc/passwd')",
    "the environment": "SELECT content FROM read_text('/proc/self/environ')",
    "names of files": "SELECT file FROM glob('/etc/*')",
    "names of the lake's files": "SELECT file FROM glob('{lake}/*/*')",
    "the shape of a file": "SELECT Columns FROM sniff_csv('{outside}')",
    "the metadata of a file": "SELECT * FROM parquet_metadata('{other}')",
}


@pytest.mark.parametrize("name", mostly_slow(READS, "a text outside", "by way of the lake", "the environment"))
def test_nothing_but_the_snapshot_is_read(world: World, blueprint: Path, reader: LockedReader, name: str) -> None:
    with world.open_connection() as connection:
        assert connection.execute(world.fill(READS[name])).fetchall()
    assert "Permission Error" in refused(blueprint, reader, READS[name])


# ---------------------------------------------------------------- changing anything


def wrote(world: World, before: dict[str, bytes], _: duckdb.DuckDBPyConnection) -> bool:
    return contents(world.root) != before


def set_one_thread(_: World, __: Any, connection: duckdb.DuckDBPyConnection) -> bool:
    return connection.execute("SELECT current_setting('threads')").fetchall() == [(1,)]


def holds(query: str) -> Callable[..., bool]:
    """The connection answers what it did not before."""
    return lambda _, __, connection: bool(connection.execute(query).fetchall())


Effect = Callable[[World, dict[str, bytes], duckdb.DuckDBPyConnection], bool]
CHANGES: dict[str, tuple[str, Effect]] = {
    "over a file of the lake": ("COPY (SELECT 1 AS a) TO '{data}' (FORMAT parquet)", wrote),
    "a new file in the lake": ("COPY (SELECT 1 AS a) TO '{lake}/evil.csv'", wrote),
    "over a file outside": ("COPY (SELECT 1 AS a) TO '{outside}'", wrote),
    "many files": ("COPY (SELECT 1 AS a, 2 AS b) TO '{lake}/evil' (FORMAT parquet, PARTITION_BY (b))", wrote),
    "behind EXPLAIN": ("EXPLAIN ANALYZE COPY (SELECT 1 AS a) TO '{lake}/evil.csv'", wrote),
    "after a SELECT": ("SELECT 1; COPY (SELECT 1 AS a) TO '{lake}/evil.csv'", wrote),
    "an export": ("EXPORT DATABASE '{lake}/evil'", wrote),
    "a database": ("ATTACH '{lake}/evil.db'; CREATE TABLE evil.t AS SELECT 1 AS a; CHECKPOINT evil", wrote),
    "only attached": ("ATTACH '{root}/evil.db' AS evil", holds("SHOW DATABASES")),
    "a setting": ("SET threads = 1", set_one_thread),
    "a pragma": ("PRAGMA threads = 1", set_one_thread),
    "a table": ("CREATE TABLE evil AS SELECT 1 AS a", holds("FROM evil")),
    "a view over another": ("CREATE OR REPLACE VIEW episodes AS SELECT 1 AS evil", holds("SELECT evil FROM episodes")),
    "a macro": ("CREATE MACRO evil() AS 1", holds("SELECT evil()")),
    "a prepared statement": ("PREPARE evil AS SELECT 1", holds("EXECUTE evil")),
    "a variable": ("SET VARIABLE evil = 1", holds("SELECT getvariable('evil') WHERE getvariable('evil') = 1")),
    "rows": ("CREATE TABLE t (a INT); INSERT INTO t VALUES (1)", holds("FROM t")),
    "a dropped view": (
        "DROP VIEW steps",
        holds("SELECT 1 WHERE 'steps' NOT IN (SELECT view_name FROM duckdb_views())"),
    ),
}


@pytest.mark.parametrize("name", mostly_slow(CHANGES, "over a file of the lake", "behind EXPLAIN", "after a SELECT"))
def test_nothing_is_changed(world: World, blueprint: Path, reader: LockedReader, name: str) -> None:
    query, effect = CHANGES[name]
    before = contents(world.root)
    with world.open_connection() as connection:
        for statement in duckdb.extract_statements(world.fill(query)):
            connection.execute(statement.query)
        assert effect(world, before, connection)
    assert "exactly one SELECT" in refused(blueprint, reader, query)


@pytest.mark.parametrize(
    "query",
    mostly_slow(
        [
            "INSTALL '{root}/evil.duckdb_extension'",
            "LOAD '{root}/evil.duckdb_extension'",
            "SELECT * FROM read_csv('http://127.0.0.1:9/x.csv')",
            "SELECT * FROM read_parquet('s3://bucket/x.parquet')",
        ],
        "LOAD '{root}/evil.duckdb_extension'",
        "SELECT * FROM read_csv('http://127.0.0.1:9/x.csv')",
    ),
)
def test_nothing_is_fetched_or_loaded(world: World, blueprint: Path, reader: LockedReader, query: str) -> None:
    (world.root / "evil.duckdb_extension").write_bytes(b"no extension")
    with world.open_connection() as connection:
        connection.execute("SET autoinstall_known_extensions = false")
        with pytest.raises(duckdb.Error) as raised:
            connection.execute(world.fill(query))
    # An open connection tries: what it lacks here is the extension, not the permission.
    assert not isinstance(raised.value, duckdb.PermissionException)
    assert "extension" in str(raised.value).lower()
    message = refused(blueprint, reader, query)
    assert "Permission Error" in message or "exactly one SELECT" in message


# ---------------------------------------------------------------- running without end


FOREVER = {
    "a cross join": "SELECT count(*) FROM range(10000000) a, range(10000000) b WHERE a.range + b.range = -1",
    "a recursion": "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r) SELECT count(*) FROM r WHERE n < 0",
}
BOMBS = {
    "a list": "SELECT list(range) FROM range(1000000000)",
    "a recursion": "WITH RECURSIVE r(n) AS (SELECT repeat('x', 1000) UNION ALL SELECT n || n FROM r) SELECT n FROM r",
    "a constant": "SELECT list_sum(range(900000000))",
    "a sort": "SELECT * FROM (SELECT range AS n, repeat('x', 1000) AS t FROM range(100000000)) ORDER BY t, n DESC",
}


@pytest.mark.parametrize("name", mostly_slow(FOREVER, "a cross join"))
def test_no_query_runs_for_ever(blueprint: Path, name: str) -> None:
    with duckdb.connect(config={"threads": 1}) as connection:
        program = f"import duckdb; duckdb.execute('SET threads = 1'); duckdb.execute({FOREVER[name]!r})"
        process = subprocess.Popen([sys.executable, "-c", program])
        time.sleep(0.5)
        assert process.poll() is None
        process.kill()
        process.wait()
        assert connection.execute("SELECT 1").fetchall() == [(1,)]
    with LockedReader(lake.open(blueprint / "lake").snapshot(), timeout=1) as reader:
        assert "stopped after 1 s" in refused(blueprint, reader, FOREVER[name])


@pytest.mark.parametrize("name", mostly_slow(BOMBS, "a list"))
def test_no_query_takes_all_memory(blueprint: Path, name: str) -> None:
    most = 400 << 20
    process = subprocess.Popen(
        [sys.executable, "-c", f"import duckdb; duckdb.execute({BOMBS[name]!r}).fetchall()"], stderr=subprocess.DEVNULL
    )
    while process.poll() is None and resident(process.pid) < most:
        time.sleep(0.02)
    assert process.poll() is None
    process.kill()
    process.wait()
    with LockedReader(lake.open(blueprint / "lake").snapshot(), memory_limit="200MB", timeout=60) as reader:
        message = refused(blueprint, reader, BOMBS[name])
        assert "emory" in message
        assert reader.sql("SELECT 1 AS a").item() == 1


def resident(pid: int) -> int:
    """Bytes of memory that a process holds."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * 4096


def test_a_result_that_is_too_big_is_an_error_that_says_so(blueprint: Path) -> None:
    snapshot = lake.open(blueprint / "lake").snapshot()
    with LockedReader(snapshot, max_rows=2) as reader:
        assert reader.sql("SELECT * FROM episodes LIMIT 2").height == 2
        assert "more than 2 rows" in refused(blueprint, reader, "SELECT * FROM episodes")
    with LockedReader(snapshot, max_bytes=100_000) as reader:
        assert "larger than 100,000 bytes" in refused(blueprint, reader, "SELECT repeat('x', 1000000) AS t")


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("query", "says"),
    [
        pytest.param("SELEC 1", "syntax error", marks=pytest.mark.slow),
        pytest.param("SELECT nothing FROM episodes", "trajlake tables --columns", marks=pytest.mark.slow),
        ("SELECT at FROM jobs", 'write the column "at"'),
        pytest.param("SELECT error('boom\n' || chr(27))", "boom", marks=pytest.mark.slow),
        pytest.param("", "this is nothing", marks=pytest.mark.slow),
    ],
)
def test_an_error_is_told_as_in_an_open_session(blueprint: Path, reader: LockedReader, query: str, says: str) -> None:
    assert says in refused(blueprint, reader, query)


def test_a_damaged_lake_is_told(world: World) -> None:
    snapshot = world.lake.snapshot()
    path = Path(snapshot.files("steps")[0].path)
    path.write_bytes(path.read_bytes()[:100])
    with LockedReader(snapshot) as reader, pytest.raises(LakeAccessError, match="trajlake doctor"):
        reader.sql("SELECT * FROM steps")


def test_an_error_cannot_steer_a_terminal(blueprint: Path, reader: LockedReader) -> None:
    message = refused(blueprint, reader, "SELECT error('red' || chr(27) || '[31m' || chr(155) || chr(8238))")
    assert "red" in message
    assert message.isprintable()


@pytest.mark.parametrize(
    ("text", "size"), [("1GB", 10**9), ("512MiB", 512 << 20), ("1.5 gb", 1_500_000_000), ("100", 100), ("2K", 2000)]
)
def test_sizes_are_read_as_duckdb_reads_them(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "much", "-1GB", "1XB"])
def test_what_is_no_size_is_misuse(blueprint: Path, text: str) -> None:
    with pytest.raises(UsageError, match="is not a size"):
        LockedReader(lake.open(blueprint / "lake").snapshot(), memory_limit=text)


def test_too_little_isolation_is_refused_unless_it_is_accepted(
    blueprint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = lake.open(blueprint / "lake").snapshot()
    monkeypatch.setattr(isolation, "find_missing_layers", lambda: {"landlock": "it is off"})
    with pytest.raises(UsageError, match=r"needs strong isolation, here it is basic \(no landlock: it is off\)"):
        LockedReader(snapshot)
    with pytest.raises(UsageError, match="valid: none, basic, strong"):
        LockedReader(snapshot, require="some")
    with LockedReader(snapshot, require="basic") as reader:
        assert reader.isolation == "basic"
        assert reader.sql("SELECT count(*) AS n FROM episodes").item() == 3
        # DuckDB's own lock still holds.
        with pytest.raises(QueryError, match="Permission Error"):
            reader.sql("SELECT * FROM read_text('/etc/passwd')")


def test_a_lake_in_a_bucket_is_refused(blueprint: Path, monkeypatch: pytest.MonkeyPatch, wording: Wording) -> None:
    snapshot = lake.open(blueprint / "lake").snapshot()
    monkeypatch.setattr(Objects, "folder", property(lambda _: None))
    with pytest.raises(UsageError, match="has no network") as caught:
        LockedReader(snapshot)
    wording(caught.value, LAKE=snapshot.objects.root)


def test_a_child_that_cannot_be_locked_in_does_not_run(blueprint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = LockedReader(lake.open(blueprint / "lake").snapshot())
    monkeypatch.setattr(isolation, "list_runtime_folders", lambda: ("/no/such/folder",))
    with pytest.raises(LakeAccessError, match="not run: cannot lock"):
        reader.sql("SELECT 1")
