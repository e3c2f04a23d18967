"""Whether tools answered, and with what: a reward per call, for steps and for the episode."""

from types import ModuleType
from typing import ClassVar, Literal, Self

import polars as pl
from pydantic import model_validator

from pipelines.score.scorers import texts, tool_quality, tool_results
from pipelines.score.scorers.protocol import Columns, Scorer, ScorerInputs
from pipelines.score.scorers.texts import pattern_fault
from pipelines.score.scorers.tool_quality import has, is_object, quality

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
    helpers: ClassVar[tuple[ModuleType, ...]] = (texts, tool_quality, tool_results)

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
            calls = tool_results.from_messages(inputs.steps, inputs.episodes, self.error_pattern)
        else:
            calls = tool_results.from_spans(inputs.spans)
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
    told = pl.format("{}: {}", pl.col("tool").fill_null("?"), pl.coalesce(reward.cast(pl.String), pl.lit("unknown")))
    return calls.group_by(keys).agg(
        value=pl.when(reward.null_count() == 0).then(reward.mean()),
        reason=told.sort_by("call").str.join(", "),
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
