"""SQL that the reader writes: its rows, the episodes that they name, and the names that a query may use."""

from dataclasses import dataclass

import polars as pl

from lake import ids
from lake.errors import QueryError
from viewer.queries import LakeReader

EPISODE = "episode_id"
"""The column whose values name episodes."""


@dataclass(frozen=True, slots=True)
class SqlNames:
    """Names that a query may use, each list in alphabetical order."""

    tables: dict[str, list[tuple[str, str]]]
    """Tables and views with their columns and the types of these."""
    functions: list[str]
    """Functions and macros, including those of the lake."""
    keywords: list[tuple[str, bool]]
    """Keywords in capitals, and whether one must be quoted to be a name."""


def read_rows(lake: LakeReader, query: str) -> pl.DataFrame:
    """Return the rows of one SELECT, run in a locked process (`viewer.reader`). Raises QueryError: no result."""
    return lake.locked(query)


def list_named_episodes(lake: LakeReader, query: str) -> pl.DataFrame:
    """Return the episodes that the rows of a query name, in the order of their first rows: episode_id.

    Raises:
        QueryError: the query has no result, or no column `episode_id` of ids.
    """
    rows = lake.locked(query)
    if not has_episode_ids(rows):
        raise QueryError("rows name episodes by a column `episode_id` of ids; add it to what the query selects")
    episode_ids = rows[EPISODE]
    if episode_ids.dtype == pl.String:
        texts = [text for text in episode_ids.to_list() if text is not None and ids.is_text(text)]
        episode_ids = pl.Series(EPISODE, [ids.from_text(text) for text in texts], dtype=pl.Int64)
    return episode_ids.drop_nulls().unique(maintain_order=True).to_frame()


def has_episode_ids(rows: pl.DataFrame) -> bool:
    """Return whether rows have a column that can name episodes: numbers, or ids as text."""
    return rows.schema.get(EPISODE) in (pl.Int64, pl.String)


def list_names(lake: LakeReader) -> SqlNames:
    """Return the names that a query of this lake may use."""
    columns = lake.sql(
        """
        SELECT table_name, column_name, lower(data_type) FROM information_schema.columns
        WHERE table_schema = 'main' AND table_catalog <> 'temp'
        ORDER BY table_name, ordinal_position
        """
    )
    tables: dict[str, list[tuple[str, str]]] = {}
    for table, column, kind in columns.iter_rows():
        tables.setdefault(table, []).append((column, kind))
    functions = lake.sql(
        """
        SELECT DISTINCT function_name FROM duckdb_functions()
        WHERE function_type IN ('scalar', 'aggregate', 'macro', 'table_macro')
          AND schema_name = 'main' AND regexp_full_match(function_name, '[a-z][a-z0-9_]*')
        ORDER BY function_name
        """
    )
    keywords = lake.sql(
        """
        SELECT upper(keyword_name), bool_or(keyword_category <> 'unreserved') FROM duckdb_keywords()
        GROUP BY ALL ORDER BY ALL
        """
    )
    return SqlNames(tables, functions.to_series().to_list(), keywords.rows())
