"""The tables, spelled once: every rendering is pinned, and the renderings agree with each other and with the engines.

A golden file that no longer matches means that stored lakes change: raise FORMAT_VERSION and write a migration, or
take the change back. `make golden` writes the files again.
"""

import json
from datetime import UTC, datetime
from pathlib import Path

import duckdb
import polars as pl
import pytest
from deltalake import DeltaTable, Schema, write_deltalake

from lake.tables import ID_COLUMNS, RESOLUTION_ORDER, TABLES
from lake.tables.columns import Column, Table, Type, Visibility
from testkit.table_renderings import GOLDEN, RENDERINGS, golden_text

EVERY_TABLE = pytest.mark.parametrize("table", TABLES.values(), ids=list(TABLES))

VALUES: dict[Type, object] = {
    Type.ID: 2**63 - 1,
    Type.INT: -(2**63),
    Type.SMALL_INT: 2**31 - 1,
    Type.FLOAT: 0.1 + 0.2,
    Type.BOOL: False,
    Type.TEXT: "tab\t, quote ', \u00e9 \U0001f600",
    Type.WORD: "word",
    Type.JSON: '{"a": [1, null]}',
    Type.TIME: datetime(2026, 2, 28, 23, 59, 59, 999_999, tzinfo=UTC),
    Type.BYTES: b"\x00\xff",
    Type.IDS: [0, 2**63 - 1],
    Type.TOKENS: [],
    Type.FLOATS: [-0.5, -1.25],
    Type.MASK: [True, False],
}


def one_of_each(*, required: bool) -> Table:
    """A table with one column of every type."""
    return Table(
        name="one_of_each",
        grain="One row.",
        key=("id",),
        visibility=Visibility.ALWAYS,
        sort=("id",),
        row_bytes=64,
        columns=tuple(Column(type_.name.lower(), type_, "A column.", required=required) for type_ in Type),
    )


@pytest.mark.parametrize("file_name", RENDERINGS)
def test_each_rendering_equals_its_golden_file(file_name: str) -> None:
    assert golden_text(file_name) == (GOLDEN / file_name).read_text("utf-8"), "see this module's docstring"


def test_no_golden_file_is_left_over() -> None:
    assert {path.name for path in GOLDEN.iterdir()} == set(RENDERINGS)


@EVERY_TABLE
def test_the_reference_page_is_the_markdown_rendering(table: Table) -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "reference" / "tables.md"
    assert table.markdown() in page.read_text("utf-8"), "run `make docs`"


@EVERY_TABLE
def test_markdown_has_a_row_per_column_and_no_broken_cell(table: Table) -> None:
    lines = [line for line in table.markdown().splitlines() if line.startswith("| `")]
    assert [line.split("`")[1] for line in lines] == table.names
    assert all(line.count("|") == 5 for line in lines)


@EVERY_TABLE
def test_duckdb_takes_the_ddl_and_means_the_same_by_it(table: Table) -> None:
    with duckdb.connect() as connection:
        connection.execute(table.sql())
        columns = connection.execute(f"DESCRIBE {table.name}").fetchall()
    assert [(name, kind, nullable) for name, kind, nullable, *_ in columns] == [
        (column.name, column.sql_type, "NO" if column.required else "YES") for column in table.columns
    ]


@EVERY_TABLE
def test_an_empty_polars_frame_casts_to_the_arrow_schema(table: Table) -> None:
    arrow = pl.DataFrame(schema=table.polars()).to_arrow(compat_level=pl.CompatLevel.oldest()).cast(table.arrow())
    assert arrow.schema == table.arrow()
    assert pl.DataFrame(arrow).schema == table.polars()


@EVERY_TABLE
def test_delta_stores_the_schema_unchanged(table: Table) -> None:
    schema = Schema.from_arrow(table.arrow())
    assert Schema.from_json(schema.to_json()) == schema
    fields = json.loads(schema.to_json())["fields"]
    assert [(field["name"], field["nullable"]) for field in fields] == [(c.name, not c.required) for c in table.columns]


@pytest.mark.parametrize("is_known", [True, False], ids=["values", "nulls"])
def test_every_type_survives_the_way_through_delta_and_duckdb(is_known: bool, tmp_path: Path) -> None:
    table = one_of_each(required=False)
    row = {c.name: VALUES[c.type] if is_known else None for c in table.columns}
    frame = pl.DataFrame([row], schema=table.polars())
    write_deltalake(tmp_path, frame.to_arrow(compat_level=pl.CompatLevel.oldest()).cast(table.arrow()))
    stored = DeltaTable(tmp_path)

    assert stored.schema() == Schema.from_arrow(table.arrow())
    with duckdb.connect() as connection:
        relation = connection.sql("SELECT * FROM read_parquet(?)", params=[stored.file_uris()])
        assert [str(kind) for kind in relation.types] == [column.sql_type for column in table.columns]
        assert relation.pl().rows(named=True) == [row]
    assert pl.read_parquet(stored.file_uris()).rows(named=True) == [row]


def test_the_oldest_delta_protocol_stores_every_type(tmp_path: Path) -> None:
    table = DeltaTable.create(tmp_path, schema=Schema.from_arrow(one_of_each(required=True).arrow()))
    protocol = table.protocol()
    assert (protocol.min_reader_version, protocol.min_writer_version) == (1, 2)


def test_an_unknown_column_is_a_key_error() -> None:
    assert TABLES["steps"].column("reward").type is Type.FLOAT
    with pytest.raises(KeyError, match="rewards"):
        TABLES["steps"].column("rewards")


@EVERY_TABLE
def test_keys_and_sort_columns_exist_and_have_statistics(table: Table) -> None:
    """Delta keeps statistics of the first 32 columns; dead writes are found by those of `write_id`."""
    with_statistics = set(table.names[:32])
    assert set(table.key) | set(table.sort) | {"write_id"} <= with_statistics
    assert len(set(table.names)) == len(table.names)


@EVERY_TABLE
def test_key_columns_are_never_null(table: Table) -> None:
    unknown = {name for name in table.key if not table.column(name).required}
    whole_episodes = {"scores", "selections"}
    assert unknown == ({"step_index"} if table.name in whole_episodes else set()), "NULL is the whole episode"


@EVERY_TABLE
def test_every_column_says_what_it_means(table: Table) -> None:
    for column in table.columns:
        assert column.meaning.endswith("."), column
        assert not column.values or column.type is Type.WORD, column
    assert table.grain.endswith(".")


def test_a_column_that_two_tables_share_is_stored_alike() -> None:
    types: dict[str, set[str]] = {}
    for table in TABLES.values():
        for column in table.columns:
            types.setdefault(column.name, set()).add(column.sql_type)
    assert {name: kinds for name, kinds in types.items() if len(kinds) > 1} == {}


def test_snapshots_resolve_every_table_once_and_parents_before_children() -> None:
    assert sorted(RESOLUTION_ORDER) == sorted(TABLES)
    order = {name: position for position, name in enumerate(RESOLUTION_ORDER)}
    assert order["checkpoints"] < order["batches"] < order["jobs"] < order["advantages"] < order["episodes"]
    assert order["episodes"] < min(order["steps"], order["tokens"])


def test_id_columns_are_those_of_type_id() -> None:
    assert {"episode_id", "group_id", "write_id", "anchor_key", "content_hash"} <= ID_COLUMNS
    assert not {"step_index", "seed", "policy_version"} & ID_COLUMNS
