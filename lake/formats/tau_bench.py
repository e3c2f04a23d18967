"""tau-bench historical trajectories: a JSON array of {task_id, trial, reward, info, traj}.

One step per assistant turn. The state is what the policy saw last: the contents of the messages since its previous
turn, system prompts left out. Siblings are the trials of a task. The file names neither run nor model. It records the
return of the episode only, so step rewards stay NULL.

Source: the historical_trajectories folder of the tau-bench repository (Yao et al. 2024, arXiv 2406.12045).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from lake.formats.json_array import Damage, read_array
from lake.formats.source import Meter
from lake.records import EpisodeRecord, Reject, StepRecord, check

NAME = "tau_bench"
Message = dict[str, Any]


class _Info(msgspec.Struct):
    """What the runner says about the end of a rollout."""

    task: dict[str, Any] | None = None
    source: str | None = None
    """The tool that answered last, or `user`: what ended the rollout, if anything did."""
    reward_info: dict[str, Any] | UnsetType | None = UNSET
    """NULL if the environment never came to its end: the runner's limit of turns stopped it."""


class _Row(msgspec.Struct):
    """One element of the array."""

    task_id: int | str
    trial: Annotated[int, Meta(ge=0, le=2**31 - 1)]
    reward: float | None
    traj: list[Any]
    """Messages; typed as objects they would all be copied."""
    info: _Info | None = None


def recognise(head: str) -> bool:
    """Whether a file is a JSON array of objects (the only format here that is one)."""
    text = head.lstrip()
    return text.startswith("[") and text[1:].lstrip()[:1] in ("{", "]", "")


def read(path: Path, meter: Meter | None = None) -> Iterator[tuple[int, EpisodeRecord] | Reject]:
    """Records and rejects of a file, with indices from 0."""
    for item in read_array(path, meter):
        if isinstance(item, Damage):
            reason = "truncated" if item.at_end else "malformed"
            yield Reject(position=item.index, reason=reason, message=item.message, raw=item.raw)
            continue
        problem = item.problem
        if problem is None:
            try:
                record = to_record(item.value)
                problem = check(record, is_plain=item.is_plain)
            except (msgspec.ValidationError, ValueError, RecursionError) as error:
                problem = str(error)
        if problem is None:
            yield item.index, record
        else:
            yield Reject(position=item.index, reason="invalid", message=problem, raw=item.raw)


class _ShapeError(ValueError):
    """A chat that is no chat."""


def to_record(value: Any) -> EpisodeRecord:
    """One element of the array as an episode.

    Raises:
        msgspec.ValidationError: wrong keys or types.
        ValueError: a message that has no role, or whose content is no text.
    """
    row = msgspec.convert(value, _Row)
    steps: list[StepRecord] = []
    since: list[Message] = []
    first: list[Message] = []
    for index, message in enumerate(row.traj):
        if not isinstance(message, dict):
            raise _ShapeError(f"Expected `object`, got `{type(message).__name__}` - at `$.traj[{index}]`")
        role = message.get("role")
        if not isinstance(role, str):
            raise _ShapeError(f"`traj[{index}].role` is {role!r}; valid: system, user, assistant, tool")
        if role != "assistant":
            since.append(message)
            continue
        if not steps:
            first = since
        steps.append(_step(message, since, is_first=not steps, index=index))
        since = []
    info = row.info or _Info()
    task = info.task or {}
    terminated = None if info.reward_info is UNSET else info.reward_info is not None
    return EpisodeRecord(
        task_id=str(row.task_id),
        rollout_index=row.trial,
        environment="tau_bench",
        env_return=row.reward,
        status="truncated" if terminated is False else "completed",
        terminated=terminated,
        stop_reason=None if terminated is False else info.source,
        ground_truth={key: task[key] for key in ("actions", "outputs") if key in task} or None,
        initial_messages=first,
        final_observation=since,
        steps=steps,
        source_format=NAME,
        extra={"info": value["info"]} if row.info else None,
    )


def _step(message: Message, since: list[Message], *, is_first: bool, index: int) -> StepRecord:
    calls = message.get("tool_calls")
    if not isinstance(calls, list | None):
        raise _ShapeError(f"`traj[{index}].tool_calls` is {type(calls).__name__}; valid: a list")
    texts = [_text(m, index) for m in since if m["role"] != "system"]
    role = next((m["role"] for m in reversed(since) if m["role"] != "system"), None)
    state = texts[0] if len(texts) == 1 else "\n".join(texts)
    return StepRecord(
        state=state,
        state_role=role,
        state_is_error=role == "tool" and state.startswith("Error"),
        context=[] if is_first else since,
        action=_text(message, index),
        tool_calls=calls,
    )


def _text(message: Message, index: int) -> str:
    content = message.get("content")
    if isinstance(content, str | None):
        return content or ""
    kind = type(content).__name__
    raise _ShapeError(f"the content of a {message.get('role')!r} message near `traj[{index}]` is {kind}; valid: text")
