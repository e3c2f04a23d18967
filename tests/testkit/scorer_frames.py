"""Frames for scorers, from rows that name only what matters."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from lake.tables import TABLES
from pipelines.score.scorers import Scorer, ScorerInputs

Row = Mapping[str, Any]
Score = tuple[int, int | None]
"""Episode and step (None: the episode)."""


def inputs(scorer: Scorer, episodes: Sequence[Row], **tables: Sequence[Row]) -> ScorerInputs:
    """What a scorer reads, columns that a row does not name being NULL."""
    tables_given: dict[str, Sequence[Row]] = {"episodes": episodes, **tables}
    frames = {}
    for name, columns in scorer.reads().tables().items():
        schema = TABLES[name].polars()
        rows = [[row.get(column) for column in columns] for row in tables_given.get(name, ())]
        frames[name] = pl.DataFrame(rows, schema={column: schema[column] for column in columns}, orient="row")
    return ScorerInputs(**frames)


def scored(scorer: Scorer, episodes: Sequence[Row], **tables: Sequence[Row]) -> pl.DataFrame:
    """Scores, after a look at what must hold of all: every episode once, keys unique, and why for what is unknown."""
    frame = scorer.scores(inputs(scorer, episodes, **tables))
    assert_sound(frame, [row["episode_id"] for row in episodes])
    return frame


def assert_sound(frame: pl.DataFrame, episode_ids: Sequence[int]) -> None:
    episode_rows = frame.filter(pl.col("step_index").is_null())
    assert episode_rows["episode_id"].to_list() == list(episode_ids)
    assert not frame.select("episode_id", "step_index").is_duplicated().any()
    rows_known, unknown = (frame.filter(pl.col("value").is_not_null() == is_known) for is_known in (True, False))
    assert rows_known["error"].is_null().all(), frame
    assert unknown.filter(pl.coalesce("error", "reason").is_null()).is_empty(), frame
    assert frame["value"].is_finite().all()
    assert all(isinstance(json.loads(text), dict) for text in frame["metrics"].drop_nulls())


def values(frame: pl.DataFrame) -> dict[Score, float | None]:
    """(episode, step) -> value."""
    rows = frame.select("episode_id", "step_index", "value").iter_rows()
    return {(episode, step): value for episode, step, value in rows}


def score_episode(scorer: Scorer, episode: Row | None = None, **tables: Sequence[Row]) -> float | None:
    """The score of a single episode."""
    return values(scored(scorer, [{"episode_id": 1, **(episode or {})}], **tables))[1, None]


def error(scorer: Scorer, episode: Row | None = None, **tables: Sequence[Row]) -> str | None:
    """What failed where a single episode has no score."""
    return _text("error", scored(scorer, [{"episode_id": 1, **(episode or {})}], **tables))


def reason(scorer: Scorer, episode: Row | None = None, **tables: Sequence[Row]) -> str | None:
    """Why there is nothing to score in a single episode; None if something failed, or nothing did."""
    return _text("reason", scored(scorer, [{"episode_id": 1, **(episode or {})}], **tables))


def _text(column: str, frame: pl.DataFrame) -> str | None:
    text: str | None = frame.filter(pl.col("step_index").is_null())[column].item()
    return text


def says(*actions: str, **fields: Any) -> list[dict[str, Any]]:
    """Steps of episode 1, by their actions."""
    return [
        {"episode_id": 1, "step_index": index, "action": action, "is_active": True, **fields}
        for index, action in enumerate(actions)
    ]


def tool_step(index: int, calls: Any, context: Any = (), episode: int = 1, **fields: Any) -> dict[str, Any]:
    """A step that calls tools after it got the messages of its context."""
    texts = [value if isinstance(value, str) or value is None else json.dumps(value) for value in (calls, context)]
    keys = {"episode_id": episode, "step_index": index, "is_active": True, "action": ""}
    return keys | {"tool_calls": texts[0], "context": texts[1] if texts[1] is not None else "[]"} | fields


def call(name: str, call_id: str | None = "c") -> dict[str, Any]:
    """An OpenAI tool call."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": "{}"}}


def answer(content: Any, call_id: str | None = "c") -> dict[str, Any]:
    """A tool message."""
    return {"role": "tool", "content": content} | ({} if call_id is None else {"tool_call_id": call_id})


def span(kind: str, attributes: Any, *, episode: int = 1, **fields: Any) -> dict[str, Any]:
    """A span; attributes as JSON."""
    text = attributes if isinstance(attributes, str) or attributes is None else json.dumps(attributes)
    return {"episode_id": episode, "kind": kind, "name": kind, "attributes": text, **fields}


def coordination(action_type: str, data: Any, round_number: Any = 1, **fields: Any) -> dict[str, Any]:
    """A coordination span, as MassGen writes it."""
    return span(
        "coordination",
        {"action_type": action_type, "action_data": data, "agent_states": None, "coordination_round": round_number},
        **fields,
    )


def vote(voter: str, voted_for: str | None, round_number: int = 1, **fields: Any) -> dict[str, Any]:
    """A vote."""
    return coordination("vote", {"voter": voter, "voted_for": voted_for}, round_number, **fields)
