"""How a rollout of eval-protocol ended, what its environment gave, and what its evaluation says of it.

`lake.formats.eval_protocol.reader` says which of them is what.
"""

from bisect import bisect_right
from collections.abc import Iterator
from typing import Any

import msgspec

from lake.formats.base.fields import Scores, as_object, as_text, number, whole
from lake.formats.base.rows import rest
from lake.formats.chat.messages import Conversation
from lake.records import ScoreRecord

_LIMITS = frozenset(("max_steps", "length"))
_ENDED = frozenset(("control_plane_signal", "user_stop", "stop", "tool_calls"))
_ERRORS = frozenset(("skippable_error", "non_skippable_error"))
_CODES = {
    0: "completed",
    1: "aborted",
    4: "truncated",
    10: "aborted",
    100: "completed",
    101: "aborted",
    102: "completed",
}
"""google.rpc codes, and the tool's own; all others are errors. A rollout that is running never came to its end."""
_STATUSES = {"finished": "completed", "running": "aborted", "stopped": "aborted", "error": "failed"}
"""Of 2025."""


class Result(msgspec.Struct):
    """What has to be of its type in an `evaluation_result`."""

    score: Any = None
    is_score_valid: bool = True
    reason: Any = None
    error: Any = None
    metrics: dict[str, Any] | None = None
    step_outputs: list[dict[str, Any]] | None = None


def control_of(message: dict[str, Any]) -> dict[str, Any] | None:
    """What the control plane said after a step; in recordings of 2025 it is the metadata of the tool's answer."""
    said, older = message.get("control_plane_step"), message.get("metadata")
    if isinstance(said, dict):
        return said
    return older if isinstance(older, dict) and older.keys() >= {"reward", "terminated"} else None


def _control(messages: list[Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """What the control plane said after each step, and the place of the message that it stands on."""
    for index, message in enumerate(messages):
        if (said := control_of(message)) is not None:
            yield index, said


def rewards(messages: list[Any], chat: Conversation, extra: dict[str, Any]) -> float | None:
    """The return of the environment, and to each step its rewards; those that were used are taken out of `extra`."""
    total: float | None = None
    for index, said in _control(messages):
        if (reward := number(said.get("reward"))) is None:
            continue
        total = (total or 0.0) + reward
        if (place := bisect_right(chat.places, index) - 1) >= 0:
            chat.steps[place].reward = (chat.steps[place].reward or 0.0) + reward
    listed = extra.get("step_rewards")
    if total is None and isinstance(listed, list) and listed:
        rewards = [reward for value in listed if (reward := number(value)) is not None]
        total = sum(rewards)
        if len(rewards) == len(listed) == len(chat.steps):
            del extra["step_rewards"]
            for step, reward in zip(chat.steps, rewards, strict=True):
                step.reward = reward
    return total


def ending(
    status: dict[str, Any] | None, messages: list[Any], *, is_scored: bool
) -> tuple[str, str | None, str | None]:
    """How a rollout ended: its status, the reason, and the error if there was one."""
    status = status or {}
    said = [
        as_text(status.get("termination_reason")),
        *(as_text(step.get("termination_reason")) for _, step in _control(messages)),
    ]
    error = None
    for detail in status.get("details") or () if isinstance(status.get("details"), list) else ():
        told = as_object(as_object(detail).get("metadata"))
        said.append(as_text(told.get("termination_reason")))
        error = error or as_text(told.get("error_message"))
    reason = next((text.rpartition(".")[2].lower() for text in reversed(said) if text), None)
    code = status.get("code")
    old = str(status.get("status"))
    how = _CODES.get(code, "failed") if isinstance(code, int) else _STATUSES.get(old, "completed")
    if (code == 101 or old == "running") and is_scored:
        how = "completed"  # what nobody sets says that it is running
    if how not in ("completed", "aborted") or code in (1, 10):
        error = error or as_text(status.get("message")) or as_text(status.get("error_message"))
    if (
        how == "completed"
        and reason in _LIMITS
        and not any(step.get("terminated") is True for _, step in _control(messages))
    ):
        how = "truncated"
    return "failed" if reason in _ERRORS else how, reason, error


def terminated(messages: list[Any], reason: str | None) -> bool | None:
    """Whether the environment or the agent ended a rollout; False if a limit did, None if that is not known."""
    if any(step.get("terminated") is True for _, step in _control(messages)):
        return True
    return False if reason in _LIMITS else True if reason in _ENDED else None


def scores(
    result: Result | None, given: dict[str, Any], name: str | None, count: int
) -> tuple[list[ScoreRecord], dict[str, Any] | None]:
    """What an evaluation says, and what of it is no score."""
    if result is None:
        return [], None
    scores, unmatched = Scores(), []
    name = name or "evaluation_result"
    about = {key: given[key] for key in ("agg_score", "standard_error") if given.get(key) is not None}
    if result.score is not None or result.error is not None:
        _add(scores, name, given | {"data": about or None}, None)
    for metric, said in (result.metrics or {}).items():
        _add(scores, metric, said if isinstance(said, dict) else {"score": said}, None)
    for output in result.step_outputs or ():
        place = output.get("step_index")
        index = int(place) if isinstance(place, str) and place.isdecimal() and len(place) < 9 else whole(place)
        if index is None or index >= count:
            unmatched.append(output)
            continue
        left = {key: item for key, item in output.items() if item not in (None, {}, False)}
        left = rest(left, "step_index", "base_reward", "reason") or {}
        scores.add(name, output.get("base_reward"), step_index=index, reason=output.get("reason"), metrics=left)
    left = rest(given, *Result.__struct_fields__, *about) or {}
    return scores.records, left | ({"step_outputs": unmatched} if unmatched else {})


def _add(scores: Scores, name: str, said: dict[str, Any], step_index: int | None) -> None:
    """A score with what stands beside it; one that is marked as invalid has no value."""
    is_valid = said.get("is_score_valid") is not False
    metrics = dict(as_object(said.get("data"))) | (
        {} if is_valid else {"is_score_valid": False, "score": said.get("score")}
    )
    value = said.get("score") if is_valid else None
    scores.add(name, value, step_index=step_index, reason=said.get("reason"), error=said.get("error"), metrics=metrics)
