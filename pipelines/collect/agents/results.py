"""What an agent's function returned, or raised, as the end of its rollout."""

import math
import numbers
from typing import Any

import msgspec

from lake.formats.base.secrets import redacted
from lake.live.sink import told
from pipelines.collect.agents import Result
from pipelines.collect.players import Ending, Rollout

_VALID = "valid: None, a list of messages, a number (its reward), or a Result"


def result_of(value: Any) -> Result:
    """What an agent returned, as a `Result`.

    Raises:
        ValueError: it is none of what an agent may return, or holds a number that is none.
    """
    if isinstance(value, Result):
        result = value
    elif value is None or (isinstance(value, list) and all(isinstance(one, dict) for one in value)):
        result = Result()
    elif isinstance(value, numbers.Real):
        result = Result(reward=float(value))
    else:
        raise ValueError(f"the agent returned {type(value).__name__}; {_VALID}")
    for name, number in {"reward": result.reward, **result.scores}.items():
        if not isinstance(number, numbers.Real | None) or (number is not None and not math.isfinite(number)):
            raise ValueError(f"the agent returned {name} = {number!r}; valid: a finite number")
    return result


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
