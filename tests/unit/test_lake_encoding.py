"""How files are written: every value comes back, the statistics are exact, groups and encodings are as said."""

import io
import math
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lake.storage import encoding
from lake.storage.encoding import FileStatistics
from lake.tables import TABLES
from lake.tables.columns import Column, Table, Type, Visibility
from testkit.examples import examples

EVERY_TABLE = pytest.mark.parametrize("table", TABLES.values(), ids=list(TABLES))
_INT64 = st.integers(-(2**63), 2**63 - 1)
_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
VALUES: dict[Type, st.SearchStrategy[Any]] = {
    Type.ID: st.integers(0, 2**63 - 1),
    Type.INT: _INT64,
    Type.SMALL_INT: st.integers(-(2**31), 2**31 - 1),
    Type.FLOAT: st.floats(),
    Type.BOOL: st.booleans(),
    Type.TEXT: _TEXT,
    Type.WORD: st.sampled_from(["", "a", "b", "\u00e9 \U0001f600"]) | _TEXT,
    Type.JSON: st.just('{"a": [1, null]}'),
    Type.TIME: st.datetimes(datetime(1, 1, 2), datetime(9999, 12, 30), timezones=st.just(UTC)),  # noqa: DTZ001
    Type.BYTES: st.binary(max_size=20),
    Type.IDS: st.lists(_INT64, max_size=4),
    Type.TOKENS: st.lists(st.integers(0, 2**31 - 1), max_size=4),
    Type.FLOATS: st.lists(st.floats(width=32), max_size=4),
    Type.MASK: st.lists(st.booleans(), max_size=4),
}


def table_of(*columns: Column, row_bytes: int = 64) -> Table:
    names = tuple(column.name for column in columns)
    return Table("made_up", "One row.", names[:1], names[:1], row_bytes, columns, Visibility.ALWAYS)


ONE_OF_EACH = table_of(*(Column(type_.name.lower(), type_, "A column.") for type_ in Type))
KEYED = table_of(
    Column("write_id", Type.ID, "With statistics."),
    Column("run_id", Type.WORD, "With statistics."),
    Column("other", Type.INT, "Without."),
)


def written(frame: pl.DataFrame, table: Table, rows_a_batch: int = 10**9) -> tuple[bytes, FileStatistics]:
    """The bytes of a file, and what is said of it."""
    table_written = encoding.to_arrow(frame, table)
    sink = io.BytesIO()
    starts = range(0, table_written.num_rows, rows_a_batch)
    statistics = encoding.write_parquet(sink, (table_written.slice(start, rows_a_batch) for start in starts), table)
    return sink.getvalue(), statistics


def spelled(frame: pl.DataFrame) -> str:
    """Rows as text: NaN equals NaN, and -0.0 is not 0.0."""
    return repr(frame.rows())


@settings(max_examples=examples(60))
@given(
    rows=st.lists(st.fixed_dictionaries({c.name: st.none() | VALUES[c.type] for c in ONE_OF_EACH.columns}), max_size=8),
    rows_a_batch=st.integers(1, 9),
)
def test_every_value_of_every_type_comes_back(rows: list[dict[str, Any]], rows_a_batch: int) -> None:
    frame = pl.DataFrame(rows, schema=ONE_OF_EACH.polars())
    data, statistics = written(frame, ONE_OF_EACH, rows_a_batch)
    assert statistics.rows == len(rows)
    assert spelled(pl.read_parquet(io.BytesIO(data))) == spelled(frame)
    stored = pq.read_table(io.BytesIO(data))
    assert stored.schema.equals(ONE_OF_EACH.arrow())
    assert stored.num_rows == len(rows)


@EVERY_TABLE
def test_an_empty_frame_of_every_table_can_be_written(table: Table) -> None:
    data, statistics = written(pl.DataFrame(schema=table.polars()), table)
    assert pq.read_schema(io.BytesIO(data)).equals(table.arrow())
    assert statistics == FileStatistics(0, {}, {}, {}, set())


_WORDS = st.sampled_from(["", "a", "z", "\u00e9", "\U0001f600", "\uffff", "z" * 64, "z" * 65, "a" * 65])


@settings(max_examples=examples(100))
@given(
    rows=st.lists(st.tuples(st.none() | VALUES[Type.ID], st.none() | _WORDS, st.none() | _INT64), max_size=12),
    rows_a_batch=st.integers(1, 5),
)
def test_what_is_said_of_a_file_is_exact_or_not_said(rows: list[tuple[Any, ...]], rows_a_batch: int) -> None:
    """A range may be unknown, never wrong: files are skipped by it. Long words have none."""
    frame = pl.DataFrame(rows, schema=KEYED.polars(), orient="row")
    _, statistics = written(frame, KEYED, rows_a_batch)
    assert statistics.rows == len(rows)
    assert "other" not in statistics.low | statistics.high | statistics.nulls
    for position, name in enumerate(("write_id", "run_id")):
        values = [row[position] for row in rows if row[position] is not None]
        for value_written, true in (
            (statistics.low.get(name), min(values, default=None)),
            (statistics.high.get(name), max(values, default=None)),
        ):
            assert value_written == true or (
                value_written is None and any(isinstance(v, str) and len(v) > 64 for v in values)
            )
        if rows:
            assert statistics.nulls[name] == len(rows) - len(values)


def test_a_word_of_64_characters_has_a_range_and_a_longer_one_has_none() -> None:
    for length, bound in ((64, "z" * 64), (65, None)):
        frame = pl.DataFrame([(1, "z" * length, 1), (2, "b", 1)], schema=KEYED.polars(), orient="row")
        _, statistics = written(frame, KEYED, 1)
        assert statistics.low["run_id"] == "b"
        assert statistics.high["run_id"] == bound


# ---------------------------------------------------------------- row groups


def groups(data: bytes) -> list[pq.RowGroupMetaData]:
    metadata = pq.ParquetFile(io.BytesIO(data)).metadata
    return [metadata.row_group(number) for number in range(metadata.num_row_groups)]


def wide(rows: int, width: int) -> pl.DataFrame:
    """Rows of one text each, none like another."""
    texts = pl.select(pl.int_range(rows).cast(pl.String).str.pad_start(width, "x").alias("text")).to_series()
    return pl.DataFrame([texts])


TEXTS = table_of(Column("text", Type.TEXT, "Of any width."))


@pytest.mark.parametrize("width", [10, 300, 5000])
@pytest.mark.parametrize("rows_a_batch", [1, 7, 100, 10**9])
def test_row_groups_are_of_one_size_whatever_the_width_and_the_pieces(
    width: int, rows_a_batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 1 << 16
    monkeypatch.setattr(encoding, "ROW_GROUP_BYTES", size)
    rows = 5 * size // width
    # A piece of a table counts whole in pyarrow's figures: small ones come as DuckDB hands them over, by themselves.
    table_written = encoding.to_arrow(wide(rows, width), TEXTS)
    pieces = (pa.Table.from_pylist(part.to_pylist(), TEXTS.arrow()) for part in cut(table_written, rows_a_batch))
    sink = io.BytesIO()
    encoding.write_parquet(sink, pieces, TEXTS)
    counts = [group.num_rows * width for group in groups(sink.getvalue())]
    assert sum(counts) == rows * width
    assert all(bytes_ <= 1.5 * size for bytes_ in counts)
    assert all(bytes_ >= 0.5 * size for bytes_ in counts[:-1])


def cut(table_written: pa.Table, rows: int) -> Iterator[pa.Table]:
    return (table_written.slice(start, rows) for start in range(0, table_written.num_rows, rows))


def test_a_row_larger_than_a_group_is_a_group_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "ROW_GROUP_BYTES", 1000)
    data, _ = written(wide(3, 5000), TEXTS)
    assert [group.num_rows for group in groups(data)] == [1, 1, 1]


def test_row_groups_are_about_16_mb() -> None:
    assert encoding.ROW_GROUP_BYTES == 16 << 20
    data, _ = written(wide(40_000, 1000), TEXTS)
    assert [group.num_rows for group in groups(data)] == pytest.approx([40_000 / 3] * 3, abs=2)


# ---------------------------------------------------------------- encodings


def sample(table: Table) -> pl.DataFrame:
    """A few rows with a value in every column."""
    values = {
        Type.FLOAT: 0.5,
        Type.BOOL: True,
        Type.TEXT: "t",
        Type.WORD: "w",
        Type.JSON: "{}",
        Type.TIME: datetime(2026, 1, 1, tzinfo=UTC),
        Type.BYTES: b"b",
        Type.IDS: [1],
        Type.TOKENS: [1],
        Type.FLOATS: [-0.5],
        Type.MASK: [True],
    }
    row = {column.name: values.get(column.type, 1) for column in table.columns}
    return pl.DataFrame([row] * 4, schema=table.polars())


@EVERY_TABLE
def test_every_column_is_encoded_as_its_type_says(table: Table) -> None:
    (group,) = groups(written(sample(table), table)[0])
    assert group.num_columns == len(table.columns)
    for number, column in enumerate(table.columns):
        stored = group.column(number)
        encodings = set(stored.encodings)
        assert stored.path_in_schema.split(".")[0] == column.name
        narrow = table.row_bytes < 1024
        assert stored.compression == ("LZ4" if narrow and column.type is Type.FLOAT else "ZSTD"), column
        assert ("BYTE_STREAM_SPLIT" in encodings) == (column.type in (Type.FLOAT, Type.FLOATS)), column
        assert ("RLE_DICTIONARY" in encodings) == (column.type is Type.WORD), column
        has_range = column.type in (
            Type.ID, Type.INT, Type.SMALL_INT, Type.FLOAT, Type.BOOL, Type.WORD, Type.TIME
        )  # fmt: skip
        assert stored.is_stats_set == has_range, column


def test_numbers_that_floats_have_and_numbers_have_not_come_back() -> None:
    table = table_of(Column("x", Type.FLOAT, "A number."), Column("p", Type.FLOATS, "Numbers."))
    odd = [math.nan, math.inf, -math.inf, -0.0, 5e-324, 1.7976931348623157e308]
    frame = pl.DataFrame({"x": odd, "p": [[value] for value in odd]}, schema=table.polars())
    data, _ = written(frame, table)
    assert spelled(pl.read_parquet(io.BytesIO(data))) == spelled(frame)
