"""The judges' answers in the lake, each once for every episode that its question told something of.

So erasing any of them finds it.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import polars as pl

from lake import ids
from lake.read.parquet import collected
from lake.read.snapshot import Snapshot

SCHEMA: dict[str, pl.DataType | type[pl.DataType]] = {
    "request_id": pl.Int64,
    "episode_id": pl.Int64,
    "model": pl.String,
    "at": pl.Datetime("us", "UTC"),
    "prompt_tokens": pl.Int64,
    "completion_tokens": pl.Int64,
    "answer": pl.String,
}


def known_answers(snapshot: Snapshot, episode_ids: pl.Series) -> dict[int, dict[str, str]]:
    """Stored answers by the episode they concern: request id (text) -> answer."""
    rows = snapshot.scan("responses").filter(pl.col("episode_id").is_in(episode_ids.implode()))
    found: dict[int, dict[str, str]] = defaultdict(dict)
    for episode_id, request_id, answer in collected(rows.select("episode_id", "request_id", "answer")).iter_rows():
        found[episode_id][ids.to_text(request_id)] = answer
    return dict(found)


def response_rows(answers: Sequence[Mapping[str, Any]], episode_ids: Sequence[int], at: datetime) -> pl.DataFrame:
    """Rows of `responses` for the new answers of one call; what is no answer is left out: workers may say anything."""
    rows = []
    for answer in answers:
        request_id, text, model = (answer.get(name) for name in ("request_id", "answer", "model"))
        if not (isinstance(request_id, str) and ids.is_text(request_id) and isinstance(text, str)):
            continue
        concerned = answer.get("about")
        if not isinstance(concerned, list):
            concerned = range(len(episode_ids))
        for position in concerned:
            if isinstance(position, int) and 0 <= position < len(episode_ids):
                rows.append(
                    {
                        "request_id": ids.from_text(request_id),
                        "episode_id": episode_ids[position],
                        "model": str(model),
                        "at": at,
                        "prompt_tokens": _count(answer.get("prompt_tokens")),
                        "completion_tokens": _count(answer.get("completion_tokens")),
                        "answer": text,
                    }
                )
    return pl.DataFrame(rows, schema=SCHEMA, orient="row")


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and 0 <= value < 2**63 else None
