"""Files with all columns: read as they are, so that DuckDB knows their rows; any other names its schema, as before."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import duckdb
import polars as pl
import pyarrow.parquet as pq
import pytest

from lake.read import query_views
from lake.read.parquet import DataFile
from lake.read.query_views import table_sql
from lake.tables import TABLES
from testkit.lakes import build_lake

EPISODES = TABLES["episodes"]
QUERY = "SELECT episode_id, task_id, split FROM ({}) ORDER BY episode_id"


@pytest.fixture
def file(tmp_path: Path) -> DataFile:
    (file,) = build_lake(tmp_path / "lake").snapshot().files("episodes")
    return file


def damaged(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


def older(path: Path) -> None:
    pq.write_table(pq.read_table(path).drop_columns(["split"]), path)


def of_another_type(path: Path) -> None:
    pl.read_parquet(path).with_columns(pl.col("num_steps").cast(pl.Int64)).write_parquet(path)


@pytest.mark.parametrize("change", [older, of_another_type, damaged, Path.unlink])
def test_a_file_that_lacks_something_is_not_whole(
    file: DataFile, tmp_path: Path, change: Callable[[Path], object]
) -> None:
    other_file = tmp_path / "other.parquet"
    other_file.write_bytes(Path(file.path).read_bytes())
    change(other_file)
    files = [file, replace(file, path=str(other_file))]
    connection = duckdb.connect()
    assert query_views.find_complete(connection, EPISODES, files[:1]) == {file.path}
    assert query_views.find_complete(connection, EPISODES, files) == {file.path}
    if change is older:
        body = table_sql(EPISODES, files, complete={file.path})
        assert "schema = MAP" in body
        rows = connection.sql(QUERY.format(body)).fetchall()
        assert rows == connection.sql(QUERY.format(table_sql(EPISODES, files))).fetchall()
        assert len(rows) == 2 * file.rows


def test_duckdb_knows_how_many_rows_whole_files_have(file: DataFile) -> None:
    body = table_sql(EPISODES, [file], complete={file.path})
    assert f"~{file.rows} rows" in duckdb.sql(f"EXPLAIN SELECT episode_id FROM ({body})").fetchall()[0][1]


def test_of_too_many_files_it_is_not_asked(file: DataFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(query_views, "MOST_FOOTERS", 1)
    assert query_views.find_complete(duckdb.connect(), EPISODES, [file, file]) == frozenset()
