"""A file that cannot be read is named with its table, no matter what Polars and pyarrow say about it."""

from collections.abc import Callable
from pathlib import Path

import polars as pl
import pyarrow.parquet as pq
import pytest

from lake import Lake
from lake.errors import LakeAccessError
from lake.read.parquet import collect_rows, damaged_file_error
from testkit.copies import copied
from testkit.training import token_episodes, token_lake

DAMAGE: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "empty": lambda file: file.write_bytes(b""),
    "cut": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "no end": lambda file: file.write_bytes(file.read_bytes()[:-8] + b"\xff" * 8),
    "middle": lambda file: file.write_bytes(file.read_bytes()[:100] + b"\xff" * 400 + file.read_bytes()[500:]),
}


def lake_with_four_files(folder: Path) -> tuple[Lake, Path]:
    """A lake, and the third of its four files of tokens."""
    lk = copied(
        "four files of tokens", lambda template: token_lake(template, token_episodes(), writes=4), folder / "my lake"
    )
    return lk, Path(lk.snapshot().files("tokens")[2].path)


@pytest.mark.parametrize("damage", DAMAGE)
def test_the_file_and_its_table_are_named(tmp_path: Path, damage: str) -> None:
    lk, file = lake_with_four_files(tmp_path)
    DAMAGE[damage](file)
    with pytest.raises(LakeAccessError) as error:
        collect_rows(lk.snapshot().scan("tokens"))
    message = str(error.value)
    assert message.startswith(f"table `tokens`: {file} cannot be read: ")
    assert "`trajlake doctor`" in message
    assert "\n" not in message
    assert message.count(str(file)) == 1


def test_a_join_names_the_table_that_is_damaged(tmp_path: Path) -> None:
    lk, file = lake_with_four_files(tmp_path)
    DAMAGE["middle"](file)
    snapshot = lk.snapshot()
    frame = snapshot.scan("episodes").join(snapshot.scan("tokens"), on="episode_id")
    with pytest.raises(LakeAccessError, match="table `tokens`: "):
        collect_rows(frame)


def test_where_no_file_is_found_to_be_damaged_the_tables_are_named(tmp_path: Path) -> None:
    lk, _ = lake_with_four_files(tmp_path)
    frame = lk.snapshot().scan("tokens").with_columns(pl.col("provenance").cast(pl.Int64))
    with pytest.raises(LakeAccessError, match="a file of `tokens` cannot be read: conversion from `str` to `i64`"):
        collect_rows(frame)


def test_a_plan_that_cannot_be_shown_is_told_as_polars_tells_it(tmp_path: Path) -> None:
    file = tmp_path / "x.parquet"
    file.write_bytes(b"none")
    with pytest.raises(LakeAccessError, match=r"^a file cannot be read: .*`trajlake doctor`"):
        collect_rows(pl.scan_parquet(file).select("a"))


def test_pyarrows_errors_are_told_alike(tmp_path: Path) -> None:
    file = tmp_path / "steps" / "gone.parquet"
    with pytest.raises(FileNotFoundError) as error:
        pq.ParquetFile(file)
    message = str(damaged_file_error(str(file), error.value))
    assert message.startswith(f"table `steps`: {file} cannot be read: ")
    assert "no such file. " in message
