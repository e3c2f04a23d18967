"""From what a function returned for a rollout to rows of `scores`, and judges' answers in `responses`.

Every rollout gets one row for the episode, whatever happened, and one for every step that was rewarded. An unknown
score is NULL. `error` says why something is missing: the function failed or said so itself, or its step outputs match
no step; a row with an error is what `--retry-failed` takes up.

`StepOutput.step_index` is the step's number (0, 1, 2, ...) or the index of its assistant message in `messages`: people
write both. A function may declare which (`step_index="step"` or `"message"`); otherwise whatever fits all outputs of an
episode is taken, and where both do or neither does, nothing is guessed: the outputs are reported. So is every output
that means no step, or a step that has one already.

An answer stands once for every episode that its question told something of: erasing any of them finds it.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import msgspec
import polars as pl

from lake import ids
from lake.read.parquet import collected
from lake.read.snapshot import Snapshot
from lake.records import printable
from pipelines.score.results import EvaluateResult, StepOutput, checked
from pipelines.score.reward_function import StepIndex
from pipelines.score.rollouts import Rollout

EXAMPLES = 5
"""Faults of an episode that are spelled out."""


@dataclass(frozen=True, slots=True)
class Aligned:
    """Step outputs by the step they mean."""

    outputs: dict[int, StepOutput] = field(default_factory=dict)
    """step_index -> its output."""
    faults: list[str] = field(default_factory=list)
    """One sentence per output that means no step."""

    @property
    def error(self) -> str | None:
        """The faults as one text."""
        if not self.faults:
            return None
        rest = len(self.faults) - EXAMPLES
        more = f"; and {rest} more" if rest > 0 else ""
        return f"{len(self.faults)} step outputs match no step: {'; '.join(self.faults[:EXAMPLES])}{more}"


def align(
    outputs: Sequence[StepOutput], steps_S: Sequence[int], messages_S: Sequence[int], meaning: StepIndex = "auto"
) -> Aligned:
    """Map the step outputs of an episode to its active steps, by their number or assistant message's index."""
    numbers = [_number(output.step_index) for output in outputs]
    of_message = dict(zip(messages_S, steps_S, strict=True))
    of_step = {step: step for step in steps_S}
    known = [number for number in numbers if number is not None]
    table: dict[int, int] | None = {"step": of_step, "message": of_message}.get(meaning)
    if meaning == "auto":
        hits = sum(n in of_step for n in known), sum(n in of_message for n in known)
        if hits[0] == hits[1] and any(of_step.get(n) != of_message.get(n) for n in known):
            pairs = zip(outputs, numbers, strict=True)
            unclear = (
                _unknown(o.step_index, steps_S, messages_S) if n is None else _ambiguous(n, of_step, of_message)
                for o, n in pairs
            )
            return Aligned(faults=list(unclear))
        table = of_message if hits[1] > hits[0] else of_step
    found = Aligned()
    for output, number in zip(outputs, numbers, strict=True):
        step = None if number is None else (table or {}).get(number)
        if step is None:
            found.faults.append(_unknown(output.step_index, steps_S, messages_S))
        elif step in found.outputs:
            found.faults.append(f"step_index {output.step_index} means step {step}, which has an output already")
        else:
            found.outputs[step] = output
    return found


def _number(step_index: object) -> int | None:
    if isinstance(step_index, bool):
        return None
    if isinstance(step_index, int):
        return step_index
    return int(step_index) if isinstance(step_index, str) and step_index.isascii() and step_index.isdecimal() else None


def _ambiguous(number: int, of_step: dict[int, int], of_message: dict[int, int]) -> str:
    meanings = []
    if number in of_step:
        meanings.append(f"step {number}")
    if number in of_message:
        meanings.append(f"message {number} (step {of_message[number]})")
    told = " or ".join(meanings) or "no step at all"
    return f'step_index {number} may mean {told}: declare @reward_function(step_index="step") or "message"'


def _unknown(step_index: object, steps_S: Sequence[int], messages_S: Sequence[int]) -> str:
    if not steps_S:
        return f"step_index {step_index!r}: the episode has no steps"
    shown = f"{', '.join(map(str, messages_S[:EXAMPLES]))}{', ...' if len(messages_S) > EXAMPLES else ''}"
    return f"step_index {step_index!r}: valid are steps {steps_S[0]} to {steps_S[-1]}, or messages {shown}"


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
"""Columns of `scores` without scorer, version and what the job fills in."""
LONGEST_TEXT = 8192
"""Characters of a reason or an error that are kept."""
DEFAULT_REASON = "default step reward"
SIBLINGS = "siblings"
"""Key of the metrics that holds how many rollouts a group-wise call judged."""
_EXTRAS = ("trajectory_info", "final_control_plane_info", "agg_score", "standard_error")


@dataclass
class Scored:
    """Rows of some episodes, and what became of them."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    """As `SCHEMA`."""
    episodes: int = 0
    unmatched: int = 0
    """Step outputs that match no step."""
    examples: list[str] = field(default_factory=list)
    """The first few errors, each with its episode."""
    frames: list[pl.DataFrame] = field(default_factory=list)
    """More rows, as frames."""
    responses: list[pl.DataFrame] = field(default_factory=list)
    """Rows of `responses`."""
    answers: int = 0
    """Answers of judges in them; the same question asked in two calls has two."""

    def frame(self) -> pl.DataFrame:
        """All rows."""
        return pl.concat([pl.DataFrame(self.rows, schema=SCHEMA, orient="row"), *self.frames])


@dataclass(frozen=True, slots=True)
class Reading:
    """How results are read."""

    step_index: StepIndex = "auto"
    default_step_reward: float | None = None
    """Reward of active steps without an output, if the user said so."""
    isolation: str | None = None


def add_result(
    scored: Scored,
    rollout: Rollout,
    value: Any,
    error: str | None,
    reading: Reading,
    siblings: int | None = None,
) -> None:
    """Add the rows of one rollout, from what the function returned for it (JSON data) or why it returned nothing.

    `siblings`: how many rollouts a group-wise call judged. Kept with the metrics: a group that has lost one, even one
    that was forgotten, is another group.
    """
    try:
        result = EvaluateResult(error=error) if error is not None else checked(value)
    except (TypeError, ValueError) as fault_of_value:
        result = EvaluateResult(error=f"the function {fault_of_value}")
    fault = result.error
    if fault is None and not result.is_score_valid:
        fault = "the function says that its score is not valid" + (f": {result.reason}" if result.reason else "")
    found = align(
        (not result.error and result.step_outputs) or (), rollout.steps_S, rollout.messages_S, reading.step_index
    )
    keys = {"episode_id": rollout.episode_id, "group_id": rollout.group_id, "run_id": rollout.run_id}
    keys["isolation"] = reading.isolation
    score = None if fault is not None else result.score
    told = "; ".join(text for text in (fault, found.error) if text) or None
    row = keys | {"step_index": None, "value": score, "reason": _text(result.reason), "error": _text(told)}
    extras = {name: value for name in _EXTRAS if (value := getattr(result, name)) is not None}
    if siblings is not None:
        extras[SIBLINGS] = siblings
    scored.rows.append(row | {"metrics": _json(dict(result.metrics) | extras)})
    outputs = dict(found.outputs)
    if result.error is None and reading.default_step_reward is not None:
        default = reading.default_step_reward
        outputs |= {
            step: StepOutput(step, default, reason=DEFAULT_REASON) for step in rollout.steps_S if step not in outputs
        }
    for step in sorted(outputs):
        output = outputs[step]
        values = {"step_index": step, "value": output.base_reward, "reason": _text(output.reason), "error": None}
        scored.rows.append(keys | values | {"metrics": _json(output.metrics)})
    scored.episodes += 1
    scored.unmatched += len(found.faults)
    if told is not None and len(scored.examples) < EXAMPLES:
        scored.examples.append(example(rollout.episode_id, told))


def example(episode_id: int, error: str) -> str:
    """An error with its episode, for a summary."""
    return f"episode {ids.to_text(episode_id)}: {error}"


def _json(value: Any) -> str | None:
    return printable(msgspec.json.encode(value).decode()) if value else None


def _text(text: Any) -> str | None:
    if text is None:
        return None
    shown = printable(str(text))
    return shown if len(shown) <= LONGEST_TEXT else f"{shown[:LONGEST_TEXT]} ... [{len(shown)} characters]"


RESPONSES: dict[str, pl.DataType | type[pl.DataType]] = {
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
    return pl.DataFrame(rows, schema=RESPONSES, orient="row")


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and 0 <= value < 2**63 else None
