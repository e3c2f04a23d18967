"""Whether tools answered, and with what: a reward per call, for steps and for the episode.

What became of each call is in the messages after it, or in the tracer's spans. Messages are JSON of no fixed shape.
They are decoded row by row in Python, only where a step calls tools or a message is a tool's; everything after that is
expressions. O(messages).
"""

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, ClassVar, Literal, Self

import msgspec
import polars as pl
from pydantic import model_validator

from pipelines.score.scorers import texts
from pipelines.score.scorers.protocol import Columns, Scorer, ScorerInputs
from pipelines.score.scorers.texts import pattern_fault

_NOTHING = ("", "0", "0.0", "-0.0", "false", "[]", "{}")
"""JSON values that Python counts as false, as Polars' JSONPath spells them; null it does not spell at all."""


def quality(calls: pl.DataFrame) -> pl.DataFrame:
    """Calls with `quality`, 0 to 1 (MassGen's factors), by tool and result; only search and code results are parsed."""
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
    placed = calls.with_row_index("place").with_columns(judge=judge)
    rated = [placed.filter(pl.col("judge") == name).with_columns(quality=rating()) for name, rating in _RATINGS.items()]
    return pl.concat(rated).sort("place").drop("place", "judge")


def has(column: str, key: str) -> pl.Expr:
    """Whether a JSON object has something under a key: not null, false, 0 or empty."""
    value = pl.col(column).str.json_path_match(f"$.{key}")
    return (~value.is_in(_NOTHING)).fill_null(False)


def is_object(column: str) -> pl.Expr:
    """Whether a text is a JSON object."""
    return _is_json(column, "{")


def _is_json(column: str, opening: str) -> pl.Expr:
    text = pl.col(column)
    begins = text.str.strip_chars_start().str.starts_with(opening)
    return (begins & text.str.json_path_match("$").is_not_null()).fill_null(False)


def _search() -> pl.Expr:
    long = pl.col("result").str.len_chars() > 100
    return _rated(0.3, ("results", "articles"), pl.when(long).then(1.0).otherwise(0.7))


def _code() -> pl.Expr:
    faulty = pl.col("result").str.to_lowercase().str.contains("error|exception")
    return _rated(0.2, ("output", "stdout"), pl.when(faulty).then(0.3).otherwise(1.0))


def _rated(error: float, useful: tuple[str, str], text: pl.Expr) -> pl.Expr:
    """Quality of a result: nothing 0, an object by what it has, a list 0.5, a text as given."""
    result = pl.col("result")
    empty = (result == "") | result.str.replace_all(r"\s+", "").is_in(["{}", "[]"])
    found = has("result", useful[0]) | has("result", useful[1])
    of_object = pl.when(has("result", "error")).then(error).when(found).then(1.0).otherwise(0.5)
    return (
        pl.when(empty)
        .then(0.0)
        .when(is_object("result"))
        .then(of_object)
        .when(_is_json("result", "["))
        .then(0.5)
        .otherwise(text)
    )


_RATINGS: dict[str, Callable[[], pl.Expr]] = {
    "search": _search,
    "code": _code,
    "neutral": lambda: pl.lit(0.5),
    "other": lambda: pl.lit(1.0),
}


_CALLS = pl.Schema({"row": pl.UInt32, "call": pl.Int32, "call_id": pl.String, "tool": pl.String})
_ANSWERS = pl.Schema(
    {"row": pl.UInt32, "answer": pl.Int32, "call_id": pl.String, "null": pl.Boolean, "text": pl.String}
)


def from_messages(steps: pl.DataFrame, episodes: pl.DataFrame, error_pattern: str) -> pl.DataFrame:
    """Calls of active steps with the tool messages that follow: by id, those without an id by position.

    After an episode's last step they are in `final_observation`. One row per call: episode_id, step_index, call (in
    the step), tool, outcome, result. outcome: `result` (as text or JSON), `none` (it answered null), `exception`
    (`error_pattern` finds the result), or `unknown` (nothing is recorded).
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

    attributes has `tool_name`, `result`, `success`, `error`; started_at orders the calls of a step.
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
    return value if value is None or isinstance(value, str) else msgspec.json.encode(value).decode()


def _content(value: Any) -> str | None:
    """A message's content as text: text parts joined, anything else as JSON."""
    if isinstance(value, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in value):
        return "\n".join(part["text"] for part in value)
    return _text(value)


_MESSAGES = Columns(episodes=("final_observation",), steps=("tool_calls", "context", "is_active"))
_SPANS = Columns(spans=("step_index", "kind", "name", "started_at", "error", "attributes"))


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
    `error_pattern` finds is an exception, and a text that is a JSON object is one. A step gets a row if it calls a
    tool, an episode always. A call without any recorded result is unknown, and so is every mean it is part of.
    O(characters of the messages).
    """

    name: ClassVar[str] = "tool_success"
    columns: ClassVar[Columns] = Columns(episodes=_MESSAGES.episodes, steps=_MESSAGES.steps, spans=_SPANS.spans)
    helpers: ClassVar[tuple[ModuleType, ...]] = (texts,)

    source: Literal["messages", "spans"] = "messages"
    """Where results are: in the tool messages after a step, or in the tracer's tool spans."""
    error_pattern: str = r"^\s*(?i:error|exception|traceback)\b"
    """Regular expression (Rust's syntax) of a message that reports an exception."""
    error_objects: bool = False
    """An object with a non-empty `error` is an exception, whatever the tool."""
    null_result: float | None = -0.5
    """Reward of a null result. None: unknown (a tracer may write the span before the result is there)."""

    @model_validator(mode="after")
    def _finds_errors(self) -> Self:
        if (fault := pattern_fault(self.error_pattern)) is not None:
            msg = f"error_pattern {self.error_pattern!r} is no regular expression: {fault}"
            raise ValueError(msg)
        return self

    def reads(self) -> Columns:
        """Messages or spans."""
        return _MESSAGES if self.source == "messages" else _SPANS

    def _score(self, inputs: ScorerInputs) -> pl.DataFrame:
        if self.source == "messages":
            calls = from_messages(inputs.steps, inputs.episodes, self.error_pattern)
        else:
            calls = from_spans(inputs.spans)
        rewarded = self._rewarded(calls)
        steps = _means(rewarded.drop_nulls("step_index"), ["episode_id", "step_index"]).sort("episode_id", "step_index")
        episodes = inputs.episodes.select("episode_id").join(
            _means(rewarded, ["episode_id"]), on="episode_id", how="left", maintain_order="left"
        )
        idle = pl.lit("the episode calls no tool")
        episodes = episodes.with_columns(reason=pl.when(pl.col("metrics").is_null()).then(idle).otherwise("missing"))
        return pl.concat([episodes, steps], how="diagonal").drop("missing")

    def _rewarded(self, calls: pl.DataFrame) -> pl.DataFrame:
        """Calls with `reward`, NULL where nothing is known, and `outcome` as it counted."""
        if self.error_objects:
            failed = is_object("result") & has("result", "error")
            calls = calls.with_columns(outcome=pl.when(failed).then(pl.lit("exception")).otherwise("outcome"))
        return quality(calls).with_columns(
            reward=pl.when(pl.col("outcome") == "exception")
            .then(-1.0)
            .when(pl.col("outcome") == "none")
            .then(pl.lit(self.null_result, pl.Float64))
            .when(pl.col("outcome") == "result")
            .then("quality")
        )


def _means(calls: pl.DataFrame, keys: list[str]) -> pl.DataFrame:
    """keys, value, reason, missing (why it is unknown) and metrics: the mean of the calls' rewards."""
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
