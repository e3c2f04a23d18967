"""What an agent's function returned, or raised, as the end of its rollout."""

import math
import numbers
from typing import Any

import msgspec

from lake.formats.base.secrets import redacted
from lake.live.sink import told
from lake.tables.facts import STATUSES
from pipelines.collect.agents import Result
from pipelines.collect.players import Ending, Rollout

_NAME_LIMIT, _SHOWN = 256, 80
"""Characters of a scorer's name, and of what a message quotes."""
_VALID = "valid: None, a list of messages, a number (its reward), or a Result"


def result_of(value: Any) -> Result:
    """What an agent returned, as a `Result`.

    Raises:
        ValueError: it is none of what an agent may return, or holds what no row of the lake can.
    """
    if isinstance(value, Result):
        result = value
    elif value is None or (isinstance(value, list) and all(isinstance(one, dict) for one in value)):
        result = Result()
    elif isinstance(value, numbers.Real):
        result = Result(reward=float(value))
    else:
        raise ValueError(f"the agent returned {type(value).__name__}; {_VALID}")
    if wrong := _wrong(result):
        raise ValueError(f"the agent returned {wrong}")
    return result


def _wrong(result: Result) -> str | None:
    """What of a result no row of the lake can hold, and what is valid; None: nothing."""
    if result.status not in STATUSES:
        return f"status = {_excerpt(result.status)}; valid: {', '.join(STATUSES)}"
    for place, text in {"stop_reason": result.stop_reason, "error": result.error}.items():
        if not isinstance(text, str | None):
            return f"{place} = {_excerpt(text)}; valid: a text, or None"
    if not isinstance(result.scores, dict):
        return f"scores = {_excerpt(result.scores)}; valid: numbers by scorer"
    for name in result.scores:
        if not isinstance(name, str) or not name.strip() or "@" in name or len(name) > _NAME_LIMIT:
            valid = f"as the scorer's name a text of 1 to {_NAME_LIMIT} characters without @"
            return f"a score of {_excerpt(name)}; valid: {valid}"
    for name, number in {"reward": result.reward, **result.scores}.items():
        if not isinstance(number, numbers.Real | None) or (number is not None and not math.isfinite(number)):
            return f"{name} = {_excerpt(number)}; valid: a finite number"
    return None


def _excerpt(value: Any) -> str:
    """What a value looks like, cut short, and without a value's own code failing us."""
    try:
        text = repr(value)
    except Exception:
        text = f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def failure_of(error: BaseException) -> Result:
    """An exception of an agent: its text without keys, shortened; `stop_reason` is its type."""
    return Result(status="failed", stop_reason=type(error).__name__, error=told(error))


def end_body(result: Result, rollout: Rollout, environment: str | None) -> bytes:
    """The body of the proxy's `/end`.

    Raises:
        TypeError: the ground truth has no form in JSON.
    """
    task = rollout.task
    said = {
        "closes": True,
        "reward": None if result.reward is None else float(result.reward),
        "scores": [{"scorer": name, "value": float(value)} for name, value in result.scores.items()],
        "status": result.status,
        "stop_reason": result.stop_reason,
        "error": result.error and redacted(result.error),
        "ground_truth": task.ground_truth if result.ground_truth is None else result.ground_truth,
        "environment": environment,
        "expected_group_size": rollout.expected_group_size,
        "initial_messages": task.messages or None,
    }
    return msgspec.json.encode(said)


def least_body(result: Result) -> bytes:
    """The body of `/end` that says no more than how it went: nothing of it can be refused."""
    said = {"closes": True, "status": result.status, "stop_reason": result.stop_reason, "error": result.error}
    return msgspec.json.encode(said)


def ending_of(result: Result, reply: dict[str, Any]) -> Ending:
    """What the manager hears, with what the proxy told of the episode."""
    return Ending(
        status=result.status,
        stop_reason=result.stop_reason,
        error=result.error,
        env_return=result.reward,
        num_steps=reply.get("steps", 0),
        completion_tokens=reply.get("completion_tokens"),
    )
