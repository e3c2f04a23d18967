"""Convert the results of a reward function into rows of `scores`, and judges' answers into rows of `responses`.

Every rollout gets one row for the episode, even after a failure, and one row for every rewarded step. An unknown score
is NULL. `error` says why something is missing: the function failed or reported an error, or its step outputs match no
step. `--retry-failed` scores the rows with an error again.

`StepOutput.step_index` is either the step's number (0, 1, 2, ...) or the index of its assistant message in `messages`;
users write both. A function may declare which (`step_index="step"` or `"message"`). Otherwise the meaning that fits all
outputs of an episode counts. Where both meanings fit, or neither, the outputs are reported as errors, not guessed. The
same holds for an output that matches no step, or a step that already has one.

An answer has a row for every episode that its question concerned, so that the erasure of any of them finds it.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import msgspec
import polars as pl

from lake import ids
from lake.read.parquet import collect_rows
from lake.read.snapshot import Snapshot
from lake.records import printable
from pipelines.score.reward_function import EvaluateResult, StepIndex, StepOutput, read_result
from pipelines.score.rollouts import RolloutInput

EXAMPLES = 5
"""Number of faults of an episode to spell out."""


@dataclass(frozen=True, slots=True)
class StepAlignment:
    """Step outputs by the step that they mean."""

    outputs: dict[int, StepOutput] = field(default_factory=dict)
    """step_index -> its output."""
    faults: list[str] = field(default_factory=list)
    """One sentence per output that matches no step."""

    @property
    def error(self) -> str | None:
        """The faults as one text."""
        if not self.faults:
            return None
        hidden = len(self.faults) - EXAMPLES
        ending = f"; and {hidden} more" if hidden > 0 else ""
        return f"{len(self.faults)} step outputs match no step: {'; '.join(self.faults[:EXAMPLES])}{ending}"


def align_steps(
    outputs: Sequence[StepOutput], steps_S: Sequence[int], messages_S: Sequence[int], meaning: StepIndex = "auto"
) -> StepAlignment:
    """Map the step outputs of an episode to its active steps, by step number or by index of the assistant message."""
    numbers = [_parse_index(output.step_index) for output in outputs]
    of_message = dict(zip(messages_S, steps_S, strict=True))
    of_step = {step: step for step in steps_S}
    valid = [number for number in numbers if number is not None]
    table: dict[int, int] | None = {"step": of_step, "message": of_message}.get(meaning)
    if meaning == "auto":
        hits = sum(n in of_step for n in valid), sum(n in of_message for n in valid)
        if hits[0] == hits[1] and any(of_step.get(n) != of_message.get(n) for n in valid):
            pairs = zip(outputs, numbers, strict=True)
            unclear = (
                _describe_unknown(o.step_index, steps_S, messages_S)
                if n is None
                else _describe_ambiguity(n, of_step, of_message)
                for o, n in pairs
            )
            return StepAlignment(faults=list(unclear))
        table = of_message if hits[1] > hits[0] else of_step
    alignment = StepAlignment()
    for output, number in zip(outputs, numbers, strict=True):
        step = None if number is None else (table or {}).get(number)
        if step is None:
            alignment.faults.append(_describe_unknown(output.step_index, steps_S, messages_S))
        elif step in alignment.outputs:
            alignment.faults.append(f"step_index {output.step_index} means step {step}, which has an output already")
        else:
            alignment.outputs[step] = output
    return alignment


def _parse_index(step_index: object) -> int | None:
    if isinstance(step_index, bool):
        return None
    if isinstance(step_index, int):
        return step_index
    return int(step_index) if isinstance(step_index, str) and step_index.isascii() and step_index.isdecimal() else None


def _describe_ambiguity(number: int, of_step: dict[int, int], of_message: dict[int, int]) -> str:
    meanings = []
    if number in of_step:
        meanings.append(f"step {number}")
    if number in of_message:
        meanings.append(f"message {number} (step {of_message[number]})")
    joined = " or ".join(meanings) or "no step at all"
    return f'step_index {number} may mean {joined}: declare @reward_function(step_index="step") or "message"'


def _describe_unknown(step_index: object, steps_S: Sequence[int], messages_S: Sequence[int]) -> str:
    if not steps_S:
        return f"step_index {step_index!r}: the episode has no steps"
    valid = f"{', '.join(map(str, messages_S[:EXAMPLES]))}{', ...' if len(messages_S) > EXAMPLES else ''}"
    return f"step_index {step_index!r}: valid are steps {steps_S[0]} to {steps_S[-1]}, or messages {valid}"


SCHEMA = {
    "episode_id": pl.Int64,
    "step_index": pl.Int32,
    "group_id": pl.Int64,
    "run_id": pl.String,
    "value": pl.Float64,
    "isolation": pl.String,
    "reason": pl.String,
    "error": pl.String,
    "metrics": pl.String,
}
"""Columns of `scores` without the scorer, its version, and the columns that the job adds."""
LONGEST_TEXT = 8192
"""Maximum characters of a stored reason or error."""
DEFAULT_REASON = "default step reward"
SIBLINGS = "siblings"
"""Key of the metrics with the number of rollouts that a group-wise call judged."""
_EXTRAS = ("trajectory_info", "final_control_plane_info", "agg_score", "standard_error")


@dataclass
class ScoredEpisodes:
    """Rows of some episodes, with their figures."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    """Rows as in `SCHEMA`."""
    episodes: int = 0
    unmatched: int = 0
    """Step outputs that match no step."""
    examples: list[str] = field(default_factory=list)
    """The first few errors, each with its episode."""
    frames: list[pl.DataFrame] = field(default_factory=list)
    """Further rows, as frames."""
    responses: list[pl.DataFrame] = field(default_factory=list)
    """Rows of `responses`."""
    answers: int = 0
    """Judges' answers in `responses`; the same question in two calls counts twice."""

    def frame(self) -> pl.DataFrame:
        """Return all rows."""
        return pl.concat([pl.DataFrame(self.rows, schema=SCHEMA, orient="row"), *self.frames])


@dataclass(frozen=True, slots=True)
class ResultReading:
    """How to read results."""

    step_index: StepIndex = "auto"
    default_step_reward: float | None = None
    """Reward of active steps without an output, if the user set one."""
    isolation: str | None = None


def add_result(
    scored: ScoredEpisodes,
    rollout: RolloutInput,
    returned: Any,
    error: str | None,
    reading: ResultReading,
    siblings: int | None = None,
) -> None:
    """Add the rows of one rollout from the function's result (JSON data), or from the error instead of one.

    `siblings`: number of rollouts that a group-wise call judged. It is stored with the metrics, because a group that
    lost a sibling, even a forgotten one, is another group.
    """
    try:
        result = EvaluateResult(error=error) if error is not None else read_result(returned)
    except (TypeError, ValueError) as result_fault:
        result = EvaluateResult(error=f"the function {result_fault}")
    fault = result.error
    if fault is None and not result.is_score_valid:
        fault = "the function reports that its score is not valid" + (f": {result.reason}" if result.reason else "")
    alignment = align_steps(
        (not result.error and result.step_outputs) or (), rollout.steps_S, rollout.messages_S, reading.step_index
    )
    keys = {"episode_id": rollout.episode_id, "group_id": rollout.group_id, "run_id": rollout.run_id}
    keys["isolation"] = reading.isolation
    score = None if fault is not None else result.score
    message = "; ".join(text for text in (fault, alignment.error) if text) or None
    reason = _shorten_text(result.reason)
    row = keys | {"step_index": None, "value": score, "reason": reason, "error": _shorten_text(message)}
    extras = {name: extra for name in _EXTRAS if (extra := getattr(result, name)) is not None}
    if siblings is not None:
        extras[SIBLINGS] = siblings
    scored.rows.append(row | {"metrics": _encode_json(dict(result.metrics) | extras)})
    outputs = dict(alignment.outputs)
    if result.error is None and reading.default_step_reward is not None:
        default = reading.default_step_reward
        outputs |= {
            step: StepOutput(step, default, reason=DEFAULT_REASON) for step in rollout.steps_S if step not in outputs
        }
    for step, output in sorted(outputs.items()):
        reason = _shorten_text(output.reason)
        step_row = {"step_index": step, "value": output.base_reward, "reason": reason, "error": None}
        scored.rows.append(keys | step_row | {"metrics": _encode_json(output.metrics)})
    scored.episodes += 1
    scored.unmatched += len(alignment.faults)
    if message is not None and len(scored.examples) < EXAMPLES:
        scored.examples.append(format_example(rollout.episode_id, message))


def format_example(episode_id: int, error: str) -> str:
    """Return an error with its episode, for a summary."""
    return f"episode {ids.to_text(episode_id)}: {error}"


def _encode_json(metrics: Any) -> str | None:
    return printable(msgspec.json.encode(metrics).decode()) if metrics else None


def _shorten_text(text: Any) -> str | None:
    if text is None:
        return None
    clean = printable(str(text))
    return clean if len(clean) <= LONGEST_TEXT else f"{clean[:LONGEST_TEXT]} ... [{len(clean)} characters]"


RESPONSES: dict[str, pl.DataType | type[pl.DataType]] = {
    "request_id": pl.Int64,
    "episode_id": pl.Int64,
    "model": pl.String,
    "at": pl.Datetime("us", "UTC"),
    "prompt_tokens": pl.Int64,
    "completion_tokens": pl.Int64,
    "answer": pl.String,
}


def read_answers(snapshot: Snapshot, episode_ids: pl.Series) -> dict[int, dict[str, str]]:
    """Return stored answers by the episode that they concern: request id (text) -> answer."""
    rows = snapshot.scan("responses").filter(pl.col("episode_id").is_in(episode_ids.implode()))
    answers: dict[int, dict[str, str]] = defaultdict(dict)
    for episode_id, request_id, answer in collect_rows(rows.select("episode_id", "request_id", "answer")).iter_rows():
        answers[episode_id][ids.to_text(request_id)] = answer
    return dict(answers)


def make_response_rows(answers: Sequence[Mapping[str, Any]], episode_ids: Sequence[int], at: datetime) -> pl.DataFrame:
    """Return rows of `responses` for the new answers of one call, without malformed ones: workers may send anything."""
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
                        "prompt_tokens": _read_count(answer.get("prompt_tokens")),
                        "completion_tokens": _read_count(answer.get("completion_tokens")),
                        "answer": text,
                    }
                )
    return pl.DataFrame(rows, schema=RESPONSES, orient="row")


def _read_count(count: Any) -> int | None:
    return count if isinstance(count, int) and 0 <= count < 2**63 else None


_MAX_TEXTS = 100
"""Distinct errors and reasons of a commit to count; some functions never return the same text twice."""


@dataclass
class ScoreCounts:
    """Figures of scored episodes: of a part, or of a whole run, which sums up its commits and parts."""

    totals: Counter[str] = field(default_factory=Counter)
    """Counts of committed rows, see `count_scores`."""
    errors: Counter[str] = field(default_factory=Counter)
    """Errors of whole episodes, with their numbers of episodes."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Reasons of episodes without score and error, with their numbers of episodes."""
    unmatched: int = 0
    """Step outputs that match no step."""
    answers: int = 0
    """New answers of judges."""
    examples: list[str] = field(default_factory=list)
    """The first errors, each with its episode."""

    def add(self, scored: ScoredEpisodes) -> None:
        """Count scores that are not committed yet."""
        self.unmatched += scored.unmatched
        self.examples += scored.examples[: EXAMPLES - len(self.examples)]

    def commit(self, scores: pl.DataFrame, scored_count: int, answers: int) -> None:
        """Count rows (`SCHEMA`) that were committed, from `scored_count` scored episodes."""
        self.totals.update(count_scores(scores, scored_count))
        self.errors.update(_count_texts(scores, pl.col("error").is_not_null(), "error"))
        self.reasons.update(_count_texts(scores, pl.col("value").is_null() & pl.col("error").is_null(), "reason"))
        self.answers += answers

    def merge(self, part: "ScoreCounts", *, is_committed: bool = True) -> None:
        """Add the figures of a part, without those of `commit` if its rows are still to be committed."""
        self.unmatched += part.unmatched
        self.examples += part.examples[: EXAMPLES - len(self.examples)]
        if is_committed:
            self.totals.update(part.totals)
            self.errors.update(part.errors)
            self.reasons.update(part.reasons)
            self.answers += part.answers


def count_scores(scores: pl.DataFrame, scored_count: int) -> dict[str, int]:
    """Return the counts of a commit of `scored_count` scored episodes.

    `known` counts episodes with a score; for a scorer that judges only steps, those with a score of a step.
    """
    is_episode, has_score = pl.col("step_index").is_null(), pl.col("value").is_not_null()
    of_episodes = scores.filter(is_episode)
    of_steps = scores.join(of_episodes, on="episode_id", how="anti")
    with_score = pl.concat([rows.filter(has_score)["episode_id"].unique() for rows in (of_episodes, of_steps)])
    failed = scores.filter(pl.col("error").is_not_null())["episode_id"].unique()
    episodes = scores["episode_id"].n_unique()
    return {
        "known": len(with_score),
        "failed": len(failed),
        "unscored": episodes - pl.concat([with_score, failed]).n_unique(),
        "steps": scores["step_index"].count(),
        "known_steps": scores.filter(~is_episode & has_score).height,
        "overtaken": scored_count - episodes,
        "rows_in": episodes,
        "rows_out": len(scores),
    }


def _count_texts(scores: pl.DataFrame, condition: pl.Expr, column: str) -> dict[str, int]:
    """Return the most frequent texts of whole episodes that meet a condition, with their numbers."""
    rows = scores.filter(pl.col("step_index").is_null() & condition).drop_nulls(column)
    counts = rows.group_by(column, maintain_order=True).len().sort("len", descending=True, maintain_order=True)
    return dict(counts.head(_MAX_TEXTS).iter_rows())
