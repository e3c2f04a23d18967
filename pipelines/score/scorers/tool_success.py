"""Scorer of tool calls by their results: a reward per call, for steps and for the episode.

The result of a call is in the messages after it, or in the tracer's spans. Messages are JSON without a fixed schema.
Python decodes them row by row, only for steps that call tools; all later computation is in expressions. O(messages).
"""

from collections.abc import Iterator
from typing import Any, ClassVar, Literal, Self

import msgspec
import polars as pl
from pydantic import model_validator

from pipelines.score.scorers.protocol import Scorer, ScorerColumns, ScorerInputs, find_pattern_fault

_NOTHING = ("", "0", "0.0", "-0.0", "false", "[]", "{}")
"""JSON values that are false in Python, as Polars' JSONPath writes them; it does not return null."""


def rate_calls(calls: pl.DataFrame) -> pl.DataFrame:
    """Add `quality`, 0 to 1 (MassGen's factors), by tool and result; only search and code results are parsed."""
    tool = pl.col("tool").str.to_lowercase().fill_null("")
    judge = (
        pl.when(tool.str.contains("search", literal=True))
        .then(pl.lit("search"))
        .when(tool.str.contains("code|execute"))
        .then(pl.lit("code"))
        .when(tool.str.contains("vote|new_answer"))
        .then(pl.lit("neutral"))
        .otherwise(pl.lit("other"))
    )
    # One frame per judge: in one when/then every branch would parse every result.
    numbered = calls.with_row_index("place").with_columns(judge=judge)
    rated = [numbered.filter(pl.col("judge") == name).with_columns(quality=rating) for name, rating in _RATINGS.items()]
    return pl.concat(rated).sort("place").drop("place", "judge")


def has_entry(column: str, key: str) -> pl.Expr:
    """Return whether a JSON object has a value under a key that is not null, false, 0 or empty."""
    text = pl.col(column).str.json_path_match(f"$.{key}")
    return (~text.is_in(_NOTHING)).fill_null(False)


def is_object(column: str) -> pl.Expr:
    """Return whether a text is a JSON object."""
    return _is_json(column, "{")


def _is_json(column: str, opening: str) -> pl.Expr:
    text = pl.col(column)
    begins = text.str.strip_chars_start().str.starts_with(opening)
    return (begins & text.str.json_path_match("$").is_not_null()).fill_null(False)


def _rate_result(error: float, useful: tuple[str, str], text: pl.Expr) -> pl.Expr:
    """Return the quality of a result: empty 0, an object by its keys, a list 0.5, a text as in `text`."""
    empty = (pl.col("result") == "") | pl.col("result").str.replace_all(r"\s+", "").is_in(["{}", "[]"])
    is_useful = has_entry("result", useful[0]) | has_entry("result", useful[1])
    of_object = pl.when(has_entry("result", "error")).then(error).when(is_useful).then(1.0).otherwise(0.5)
    return (
        pl.when(empty)
        .then(0.0)
        .when(is_object("result"))
        .then(of_object)
        .when(_is_json("result", "["))
        .then(0.5)
        .otherwise(text)
    )


_IS_LONG = pl.col("result").str.len_chars() > 100
_IS_FAULTY = pl.col("result").str.to_lowercase().str.contains("error|exception")
_RATINGS: dict[str, pl.Expr] = {
    "search": _rate_result(0.3, ("results", "articles"), pl.when(_IS_LONG).then(1.0).otherwise(0.7)),
    "code": _rate_result(0.2, ("output", "stdout"), pl.when(_IS_FAULTY).then(0.3).otherwise(1.0)),
    "neutral": pl.lit(0.5),
    "other": pl.lit(1.0),
}


_CALLS = pl.Schema({"row": pl.UInt32, "call": pl.Int32, "call_id": pl.String, "tool": pl.String})
_ANSWERS = pl.Schema(
    {"row": pl.UInt32, "answer": pl.Int32, "call_id": pl.String, "null": pl.Boolean, "text": pl.String}
)


def read_message_calls(steps: pl.DataFrame, episodes: pl.DataFrame, error_pattern: str) -> pl.DataFrame:
    """Return calls of active steps with the tool messages that follow: by id, those without an id by position.

    After an episode's last step the messages are in `final_observation`. One row per call: episode_id, step_index, call
    (index in the step), tool, outcome, result. outcome: `result` (as text or JSON), `none` (a null result), `exception`
    (the result matches `error_pattern`), or `unknown` (no result recorded).
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
    calls = pl.DataFrame(list(_list_calls(rows)), schema=_CALLS, orient="row")
    answers = pl.DataFrame(list(_list_answers(rows)), schema=_ANSWERS, orient="row")
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
        _pair_answers(calls, answers)
        .join(rows.select("row", "episode_id", "step_index"), on="row", how="left", maintain_order="left")
        .select("episode_id", "step_index", "call", "tool", outcome=outcome, result="text")
    )


def read_span_calls(spans: pl.DataFrame) -> pl.DataFrame:
    """Return calls from tool spans: an error, or `success: false`, is an exception; a null result is `none`.

    attributes has `tool_name`, `result`, `success`, `error`; started_at orders the calls of a step.
    """
    attribute = pl.col("attributes").str.json_path_match
    failed = pl.col("error").is_not_null() | (attribute("$.success") == "false") | has_entry("attributes", "error")
    result_text = attribute("$.result")
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
            .when(result_text.is_null())
            .then(pl.lit("none"))
            .otherwise(pl.lit("result")),
            result=result_text,
        )
    )


def _pair_answers(calls: pl.DataFrame, answers: pl.DataFrame) -> pl.DataFrame:
    """Pair calls with answers: the n-th call of an id with its n-th answer; calls and answers without ids in order."""
    by_id = ["row", "call_id", "n"]
    nth = pl.int_range(pl.len()).over("row", "call_id")
    numbered = calls.with_columns(n=nth)
    named = answers.filter(pl.col("call_id").is_not_null()).with_columns(n=nth)
    paired = numbered.join(named, on=by_id, how="left", maintain_order="left")
    order = pl.int_range(pl.len()).over("row")
    unpaired = paired.filter(pl.col("answer").is_null()).select(*calls.columns).with_columns(n=order)
    unnamed = answers.filter(pl.col("call_id").is_null()).drop("call_id").with_columns(n=order)
    unpaired = unpaired.join(unnamed, on=["row", "n"], how="left", maintain_order="left")
    paired = paired.filter(pl.col("answer").is_not_null())
    columns = [*calls.columns, "answer", "null", "text"]
    return pl.concat([paired.select(columns), unpaired.select(columns)]).sort("row", "call")


def _list_calls(rows: pl.DataFrame) -> Iterator[tuple[int, int, str | None, str | None]]:
    for row, text in rows.select("row", "tool_calls").iter_rows():
        for index, call in enumerate(_parse_objects(text)):
            function = call.get("function")
            name = function.get("name") if isinstance(function, dict) else call.get("name")
            yield row, index, _to_text(call.get("id")), _to_text(name)


def _list_answers(rows: pl.DataFrame) -> Iterator[tuple[int, int, str | None, bool, str | None]]:
    for row, text in rows.select("row", "messages").iter_rows():
        for index, message in enumerate(_parse_objects(text)):
            if message.get("role") in ("tool", "function"):
                content = message.get("content")
                yield row, index, _to_text(message.get("tool_call_id")), content is None, _join_content(content)


def _parse_objects(text: str | None) -> list[dict[str, Any]]:
    """Return the objects of a JSON array; an empty list for any other text."""
    if text is None:
        return []
    try:
        array = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return []
    return [element for element in array if isinstance(element, dict)] if isinstance(array, list) else []


def _to_text(field: Any) -> str | None:
    return field if field is None or isinstance(field, str) else msgspec.json.encode(field).decode()


def _join_content(content: Any) -> str | None:
    """Return a message's content as text: text blocks joined, anything else as JSON."""
    if isinstance(content, list) and all(
        isinstance(block, dict) and isinstance(block.get("text"), str) for block in content
    ):
        return "\n".join(block["text"] for block in content)
    return _to_text(content)


_MESSAGES = ScorerColumns(episodes=("final_observation",), steps=("tool_calls", "context", "is_active"))
_SPANS = ScorerColumns(spans=("step_index", "kind", "name", "started_at", "error", "attributes"))


class ToolSuccess(Scorer):
    """Reward of a tool call, and its mean over the calls of a step and of an episode.

    .. code-block:: text

        exception                                                    -1.0
        null result                                                  -0.5
        result                                                       1.0 * quality
        quality, name contains `search`:    empty 0, object: error 0.3, results or articles 1, other 0.5;
                                            text above 100 characters 1, shorter 0.7; any other 0.5
        quality, contains `code`, `execute`: empty 0, object: error 0.2, output or stdout 1, other 0.5;
                                            text with `error` or `exception` 0.3, other 1; any other 0.5
        quality, contains `vote`, `new_answer`: 0.5
        quality, all others                 1

    Source: MassGen's RewardComputer. It sees Python's exceptions; messages hold texts, so a result that
    matches `error_pattern` is an exception, and a text with a JSON object is an object. A step gets a row if it calls a
    tool, an episode always. A call without any recorded result is unknown, and so is every mean it is part of.
    O(characters of the messages).
    """

    name: ClassVar[str] = "tool_success"
    columns: ClassVar[ScorerColumns] = ScorerColumns(
        episodes=_MESSAGES.episodes, steps=_MESSAGES.steps, spans=_SPANS.spans
    )

    source: Literal["messages", "spans"] = "messages"
    """Source of the results: the tool messages after a step, or the tracer's tool spans."""
    error_pattern: str = r"^\s*(?i:error|exception|traceback)\b"
    """Regular expression (Rust's syntax) for messages that report an exception."""
    error_objects: bool = False
    """Treat an object with a non-empty `error` as an exception, for every tool."""
    null_result: float | None = -0.5
    """Reward of a null result. None: unknown (a tracer may write the span before the result exists)."""

    @model_validator(mode="after")
    def _check_pattern(self) -> Self:
        if (fault := find_pattern_fault(self.error_pattern)) is not None:
            msg = f"error_pattern {self.error_pattern!r} is not a regular expression: {fault}"
            raise ValueError(msg)
        return self

    def reads(self) -> ScorerColumns:
        """Return the columns of messages or spans."""
        return _MESSAGES if self.source == "messages" else _SPANS

    def _score(self, inputs: ScorerInputs) -> pl.DataFrame:
        if self.source == "messages":
            calls = read_message_calls(inputs.steps, inputs.episodes, self.error_pattern)
        else:
            calls = read_span_calls(inputs.spans)
        rewarded = self._reward_calls(calls)
        steps = _average_calls(rewarded.drop_nulls("step_index"), ["episode_id", "step_index"]).sort(
            "episode_id", "step_index"
        )
        episodes = inputs.episodes.select("episode_id").join(
            _average_calls(rewarded, ["episode_id"]), on="episode_id", how="left", maintain_order="left"
        )
        idle = pl.lit("the episode calls no tool")
        episodes = episodes.with_columns(reason=pl.when(pl.col("metrics").is_null()).then(idle).otherwise("missing"))
        return pl.concat([episodes, steps], how="diagonal").drop("missing")

    def _reward_calls(self, calls: pl.DataFrame) -> pl.DataFrame:
        """Add `reward`, NULL where no result is recorded, and set `outcome` to what counted."""
        if self.error_objects:
            failed = is_object("result") & has_entry("result", "error")
            calls = calls.with_columns(outcome=pl.when(failed).then(pl.lit("exception")).otherwise("outcome"))
        return rate_calls(calls).with_columns(
            reward=pl.when(pl.col("outcome") == "exception")
            .then(-1.0)
            .when(pl.col("outcome") == "none")
            .then(pl.lit(self.null_result, pl.Float64))
            .when(pl.col("outcome") == "result")
            .then("quality")
        )


def _average_calls(calls: pl.DataFrame, keys: list[str]) -> pl.DataFrame:
    """Return keys, value (mean of the calls' rewards), reason, missing (why it is unknown) and metrics."""
    reward, outcome = pl.col("reward"), pl.col("outcome")
    listed = pl.format("{}: {}", pl.col("tool").fill_null("?"), pl.coalesce(reward.cast(pl.String), pl.lit("unknown")))
    return calls.group_by(keys).agg(
        value=pl.when(reward.null_count() == 0).then(reward.mean()),
        reason=listed.sort_by("call").str.join(", "),
        missing=pl.when(reward.null_count() > 0).then(
            pl.format("{} of {} tool calls have no recorded result", reward.null_count(), pl.len())
        ),
        metrics=pl.struct(
            calls=pl.len(),
            exceptions=(outcome == "exception").sum(),
            nulls=(outcome == "none").sum(),
            unknown=(outcome == "unknown").sum(),
        ).struct.json_encode(),
    )
