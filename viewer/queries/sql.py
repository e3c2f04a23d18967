"""SQL of the reader's own: its rows, the episodes that they name, and what a query may mention."""

from dataclasses import dataclass

import polars as pl

from lake import ids
from lake.errors import QueryError
from viewer.queries import Reads

EPISODE = "episode_id"
"""The column whose values name episodes."""


@dataclass(frozen=True, slots=True)
class Names:
    """What a query may mention, each in alphabetical order."""

    tables: dict[str, list[tuple[str, str]]]
    """Tables and views, each with its columns and their types."""
    functions: list[str]
    """Functions and macros, those of the lake among them."""
    keywords: list[tuple[str, bool]]
    """Words of SQL itself, in capitals, and whether one must be quoted to be a name."""


def rows(lake: Reads, query: str) -> pl.DataFrame:
    """Rows of one SELECT, run in a locked process. Raises QueryError: it has no result (`viewer.locked_sql`)."""
    return lake.locked(query)


def named(lake: Reads, query: str) -> pl.DataFrame:
    """The episodes that the rows of a query name, in the order of their first rows: episode_id.

    Raises:
        QueryError: the query has no result, or no column `episode_id` of ids.
    """
    found = lake.locked(query)
    if not names_episodes(found):
        raise QueryError("rows name episodes by a column `episode_id` of ids; add it to what the query selects")
    values = found[EPISODE]
    if values.dtype == pl.String:
        texts = [text for text in values.to_list() if text is not None and ids.is_text(text)]
        values = pl.Series(EPISODE, [ids.from_text(text) for text in texts], dtype=pl.Int64)
    return values.drop_nulls().unique(maintain_order=True).to_frame()


def names_episodes(found: pl.DataFrame) -> bool:
    """Whether rows have a column that can name episodes: numbers, or ids as people see them."""
    return found.schema.get(EPISODE) in (pl.Int64, pl.String)


def names(lake: Reads) -> Names:
    """What a query of this lake may mention."""
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
    return Names(tables, functions.to_series().to_list(), keywords.rows())
