"""What became of each tool call: the result in the messages after it, or in the tracer's spans.

Messages are JSON of no fixed shape. They are decoded row by row in Python, only where a step calls tools or a message
is a tool's; everything after that is expressions. O(messages).
"""

from collections.abc import Iterator
from typing import Any

import msgspec
import polars as pl

from pipelines.score.scorers.tool_quality import has

RESULTS = pl.Schema(
    {
        "episode_id": pl.Int64,
        "step_index": pl.Int32,
        "call": pl.Int32,
        "tool": pl.String,
        "outcome": pl.String,
        "result": pl.String,
    }
)
"""One row per call, `call` counting within the step. outcome: `result` (as text or JSON), `none` (it answered null),
`exception`, or `unknown` (nothing is recorded)."""
_CALLS = pl.Schema({"row": pl.UInt32, "call": pl.Int32, "call_id": pl.String, "tool": pl.String})
_ANSWERS = pl.Schema(
    {"row": pl.UInt32, "answer": pl.Int32, "call_id": pl.String, "null": pl.Boolean, "text": pl.String}
)


def from_messages(steps: pl.DataFrame, episodes: pl.DataFrame, error_pattern: str) -> pl.DataFrame:
    """Calls of `steps.tool_calls` with the tool messages that follow: by id, those without an id by position.

    Args:
        steps: episode_id, step_index, tool_calls, context, is_active (inactive steps call nothing).
        episodes: episode_id, final_observation: the messages after the last step.
        error_pattern: regular expression of a result that is an exception.
    """
    ordered = steps.sort("episode_id", "step_index").join(
        episodes.select("episode_id", "final_observation"), on="episode_id", how="left", maintain_order="left"
    )
    is_last = pl.col("step_index").shift(-1).over("episode_id").is_null()
    after = pl.when(is_last).then("final_observation").otherwise(pl.col("context").shift(-1).over("episode_id"))
    rows = ordered.with_columns(messages=after).filter(
        pl.col("is_active").fill_null(True) & pl.col("tool_calls").is_not_null()
    )
    rows = rows.with_row_index("row")
    calls = pl.DataFrame(list(_calls(rows)), schema=_CALLS, orient="row")
    answers = pl.DataFrame(list(_answers(rows)), schema=_ANSWERS, orient="row")
    text = pl.col("text")
    outcome = (
        pl.when(pl.col("answer").is_null())
        .then(pl.lit("unknown"))
        .when("null")
        .then(pl.lit("none"))
        .when(text.str.contains(error_pattern))
        .then(pl.lit("exception"))
        .otherwise(pl.lit("result"))
    )
    return (
        _paired(calls, answers)
        .join(rows.select("row", "episode_id", "step_index"), on="row", how="left", maintain_order="left")
        .select("episode_id", "step_index", "call", "tool", outcome=outcome, result="text")
    )


def from_spans(spans: pl.DataFrame) -> pl.DataFrame:
    """Tool spans: an error, or `success: false`, is an exception; a null result answered nothing.

    Args:
        spans: episode_id, step_index, kind, name, error, attributes (`tool_name`, `result`, `success`, `error`), and
            started_at, which orders the calls of a step.
    """
    attribute = pl.col("attributes").str.json_path_match
    failed = pl.col("error").is_not_null() | (attribute("$.success") == "false") | has("attributes", "error")
    result = attribute("$.result")
    return (
        spans.filter(pl.col("kind") == "tool")
        .sort("episode_id", "step_index", "started_at", maintain_order=True)
        .select(
            "episode_id",
            "step_index",
            call=pl.int_range(pl.len(), dtype=pl.Int32).over("episode_id", "step_index"),
            tool=pl.coalesce(attribute("$.tool_name"), "name"),
            outcome=pl.when(failed.fill_null(False))
            .then(pl.lit("exception"))
            .when(result.is_null())
            .then(pl.lit("none"))
            .otherwise(pl.lit("result")),
            result=result,
        )
    )


def _paired(calls: pl.DataFrame, answers: pl.DataFrame) -> pl.DataFrame:
    """Calls with their answers: the n-th of an id with the n-th of that id; the others in their order."""
    by_id = ["row", "call_id", "n"]
    nth = pl.int_range(pl.len()).over("row", "call_id")
    numbered = calls.with_columns(n=nth)
    named = answers.filter(pl.col("call_id").is_not_null()).with_columns(n=nth)
    found = numbered.join(named, on=by_id, how="left", maintain_order="left")
    order = pl.int_range(pl.len()).over("row")
    rest = found.filter(pl.col("answer").is_null()).select(*calls.columns).with_columns(n=order)
    unnamed = answers.filter(pl.col("call_id").is_null()).drop("call_id").with_columns(n=order)
    rest = rest.join(unnamed, on=["row", "n"], how="left", maintain_order="left")
    known = found.filter(pl.col("answer").is_not_null())
    columns = [*calls.columns, "answer", "null", "text"]
    return pl.concat([known.select(columns), rest.select(columns)]).sort("row", "call")


def _calls(rows: pl.DataFrame) -> Iterator[tuple[int, int, str | None, str | None]]:
    for row, text in rows.select("row", "tool_calls").iter_rows():
        for place, call in enumerate(_objects(text)):
            function = call.get("function")
            name = function.get("name") if isinstance(function, dict) else call.get("name")
            yield row, place, _text(call.get("id")), _text(name)


def _answers(rows: pl.DataFrame) -> Iterator[tuple[int, int, str | None, bool, str | None]]:
    for row, text in rows.select("row", "messages").iter_rows():
        for place, message in enumerate(_objects(text)):
            if message.get("role") in ("tool", "function"):
                content = message.get("content")
                yield row, place, _text(message.get("tool_call_id")), content is None, _content(content)


def _objects(text: str | None) -> list[dict[str, Any]]:
    """The objects of a JSON array; none of a text that is no such array."""
    if text is None:
        return []
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return []
    return [part for part in value if isinstance(part, dict)] if isinstance(value, list) else []


def _text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else _json(value)


def _content(value: Any) -> str | None:
    """A message's content as text: text parts joined, anything else as JSON."""
    if isinstance(value, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in value):
        return "\n".join(part["text"] for part in value)
    return _text(value)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
