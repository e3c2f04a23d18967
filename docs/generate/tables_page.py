"""The page of tables, from `lake.tables`."""

from lake.tables import TABLES


def tables_page() -> str:
    """Every table with its columns."""
    intro = (
        "# Tables\n\nEvery table of a lake, as `lake/tables` spells it. Types: `id` is a 63-bit hash in an int64, "
        "shown as 13 base32\ncharacters; `word` is text of few distinct values; `json` is a JSON document; `timestamp` "
        "is UTC in microseconds.\nNULL means unknown or not scored, never 0.\n\n"
    )
    return intro + "\n".join(table.markdown() for table in TABLES.values())
