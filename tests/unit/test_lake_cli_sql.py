"""`trajlake sql`: rows as they come, older states, limits, and SQL that no one vouches for."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner, Result
from pyarrow import ipc

import lake
from lake import Lake, ids
from lake.cli import options, trajlake
from lake.errors import QueryError, UsageError
from lake.locked import isolation
from lake.read.query_views import read_views
from testkit.episodes import episode

ROWS = 100_000


@pytest.fixture(scope="module")
def lk(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    lk = lake.open(tmp_path_factory.mktemp("command") / "lake", create=True)
    with lk.job(kind="collect", run_id="run") as job:
        job.record([episode("a", n, env_return=float(n)) for n in range(3)])
    return lk


def run(lk: Lake, *arguments: Any) -> Result:
    done = CliRunner().invoke(trajlake, ["sql", *map(str, arguments), "--lake", lk.uri], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done


# ---------------------------------------------------------------- streams


def test_json_and_csv_of_many_batches_are_one_document(lk: Lake) -> None:
    query = f"SELECT range AS n, 'text, \"' || range || '\"' AS text FROM range({ROWS})"
    rows = json.loads(run(lk, query, "--format", "json").stdout)
    assert [row["n"] for row in rows] == list(range(ROWS))
    assert rows[-1]["text"] == f'text, "{ROWS - 1}"'
    csv_rows = list(csv.DictReader(io.StringIO(run(lk, query, "--format", "csv").stdout)))
    assert [row["text"] for row in csv_rows] == [row["text"] for row in rows]


@pytest.mark.parametrize(("output_format", "expected"), [("json", "[]\n"), ("csv", "a,b\n")])
def test_no_rows_are_a_document_too(lk: Lake, output_format: str, expected: str) -> None:
    assert run(lk, "SELECT 1 AS a, 2 AS b WHERE false", "--format", output_format).stdout == expected


def test_arrow_is_a_stream_of_numbers(lk: Lake) -> None:
    query = f"SELECT range AS n, INTERVAL 1 HOUR AS pause, episode_id FROM range({ROWS}), (FROM episodes LIMIT 1)"
    done = run(lk, query, "--format", "arrow")
    with ipc.open_stream(done.stdout_bytes) as reader:
        assert reader.schema.types == [pa.int64(), pa.duration("us"), pa.int64()]
        batches = list(reader)
    assert len(batches) > 1
    assert sum(batch.num_rows for batch in batches) == ROWS


def test_rows_are_printed_before_the_last_is_there(lk: Lake) -> None:
    """What was printed before an error stays printed: the result was never held as a whole."""
    query = f"SELECT CASE WHEN range = {ROWS * 30} THEN error('boom') ELSE range END AS n FROM range({ROWS * 60})"
    done = CliRunner().invoke(trajlake, ["sql", query, "--format", "csv", "--lake", lk.uri])
    assert isinstance(done.exception, QueryError)
    assert "boom" in str(done.exception)
    assert done.stdout.startswith("n\n0\n1\n")


def test_ids_are_shown_as_ids_wherever_their_names_say_so(lk: Lake) -> None:
    query = "SELECT episode_id, group_id AS credit_group_id, episode_id AS number FROM episodes LIMIT 1"
    (row,) = json.loads(run(lk, query, "--format", "json").stdout)
    assert ids.from_text(row["episode_id"]) == row["number"]
    assert ids.is_text(row["credit_group_id"])
    assert json.loads(options.encode_json({"a": [{"group_id": 1, "n": 1}], "episode_id": None, "defined": True})) == {
        "a": [{"group_id": ids.to_text(1), "n": 1}],
        "episode_id": None,
        "defined": True,
    }


def test_neither_a_name_nor_an_error_of_a_query_styles_the_terminal(lk: Lake) -> None:
    printed = run(lk, 'SELECT 1 AS "[red]a\x1b[31m"').stdout
    assert "[red]a" in printed
    assert "\x1b" not in printed
    with pytest.raises(QueryError) as raised:
        run(lk, "SELECT error('boom' || chr(27) || chr(155))")
    assert str(raised.value).isprintable()


# ---------------------------------------------------------------- older states, limits


def test_an_older_state_can_be_asked(tmp_path: Path) -> None:
    lk = lake.open(tmp_path / "lake", create=True)
    for number in range(2):
        with lk.job(kind="collect", run_id="run") as job:
            job.record([episode("a", number)])
        if not number:
            lk.name_snapshot("first")
            version = lk.snapshot().versions["episodes"]
    query = "SELECT count(*) AS n FROM steps"
    assert run(lk, query, "--format", "csv").stdout == "n\n4\n"
    assert run(lk, query, "--format", "csv", "--as-of", "first").stdout == "n\n2\n"
    assert run(lk, query, "--format", "csv", "--as-of", version).stdout == "n\n2\n"
    assert run(lk, query, "--format", "csv", "--as-of", "first", "--locked").stdout == "n\n2\n"


def test_limits_stop_a_query(lk: Lake) -> None:
    forever = "SELECT count(*) FROM range(10000000) a, range(10000000) b WHERE a.range + b.range = -1"
    with pytest.raises(QueryError, match=r"stopped after 0\.2 s"):
        run(lk, forever, "--timeout", "0.2")
    with pytest.raises(QueryError, match="Out of Memory"):
        run(lk, "SELECT list(range) FROM range(1000000000)", "--memory-limit", "40MB")


@pytest.mark.skipif(
    bool(isolation.find_missing_layers()), reason=f"no strong isolation here: {isolation.find_missing_layers()}"
)
def test_a_locked_query_prints_as_an_open_one(lk: Lake) -> None:
    query = "SELECT task_id, env_return, episode_id FROM episodes ORDER BY env_return"
    for output_format in ("table", "arrow"):
        opened, locked = (
            run(lk, query, "--format", output_format, *extra_options) for extra_options in ([], ["--locked"])
        )
        if output_format == "arrow":
            tables = [ipc.open_stream(done.stdout_bytes).read_all() for done in (opened, locked)]
            assert tables[0].equals(tables[1])
        else:
            assert opened.stdout == locked.stdout
    with pytest.raises(QueryError, match="Permission Error"):
        run(lk, "FROM read_text('/etc/passwd')", "--locked")
    with pytest.raises(QueryError, match="more than 2 rows"):
        run(lk, query, "--locked", "--max-rows", 2)
    with pytest.raises(UsageError, match="is not a size"):
        run(lk, query, "--locked", "--memory-limit", "much")


# ---------------------------------------------------------------- contents


def test_tables_lists_the_columns_of_tables_and_views(lk: Lake) -> None:
    done = CliRunner().invoke(
        trajlake, ["tables", "--columns", "--format", "json", "--lake", lk.uri], catch_exceptions=False
    )
    listed = json.loads(done.stdout)
    for name in ("episodes", *read_views()):
        columns = [row["column"] for row in listed if row["table"] == name]
        assert columns == lk.sql(f"SELECT * FROM {name} LIMIT 0").columns, name
