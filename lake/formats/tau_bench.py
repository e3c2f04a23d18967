"""tau-bench historical trajectories: a JSON array of {task_id, trial, reward, info, traj}.

One step per assistant turn. The state is what the policy saw last: the contents of the messages since its previous
turn, system prompts left out. Siblings are the trials of a task. The file names neither run nor model. It records the
return of the episode only, so step rewards stay NULL. A rollout that the runner could not finish has a return of 0, no
messages, and its `error` in `info`.

Source: the historical_trajectories folder of the tau-bench repository (Yao et al. 2024, arXiv 2406.12045).
"""

from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from lake.formats.base.fields import as_text
from lake.formats.base.format import Format
from lake.formats.base.look import Look
from lake.formats.base.rows import Item, array_values, converted
from lake.formats.base.source import Input
from lake.formats.chat.messages import conversation
from lake.records import EpisodeRecord

NAME = "tau_bench"


class _Info(msgspec.Struct):
    """What the runner says about the end of a rollout."""

    task: dict[str, Any] | None = None
    source: str | None = None
    """The tool that answered last, or `user`: what ended the rollout, if anything did."""
    reward_info: dict[str, Any] | UnsetType | None = UNSET
    """NULL if the environment never came to its end: the runner's limit of turns stopped it."""
    error: Any = None


class _Row(msgspec.Struct):
    """One element of the array."""

    task_id: int | str
    trial: Annotated[int, Meta(ge=0, le=2**31 - 1)]
    reward: float | None
    traj: list[Any]
    """Messages; typed as objects they would all be copied."""
    info: _Info | None = None


def recognise(look: Look) -> bool:
    """Whether a file is a JSON array of rollouts with their `traj`."""
    return look.kind == "array" and look.has("traj", "task_id")


def read(file: Input) -> Iterator[Item]:
    """Records and rejects of a file, with indices from 0."""
    return converted(array_values(file), NAME, lambda value: [to_record(value)])


def to_record(value: Any) -> EpisodeRecord:
    """One element of the array as an episode.

    Raises:
        msgspec.ValidationError: wrong keys or types.
        ShapeError: a message that has no role, or whose content is no text.
    """
    row = msgspec.convert(value, _Row)
    chat = conversation(row.traj, place="traj")
    info = row.info or _Info()
    task = info.task or {}
    terminated = None if info.reward_info is UNSET else info.reward_info is not None
    return EpisodeRecord(
        task_id=str(row.task_id),
        rollout_index=row.trial,
        environment="tau_bench",
        env_return=row.reward,
        status="failed" if info.error else "truncated" if terminated is False else "completed",
        error=as_text(info.error),
        terminated=terminated,
        stop_reason=None if terminated is False else info.source,
        ground_truth={key: task[key] for key in ("actions", "outputs") if key in task} or None,
        initial_messages=chat.initial_messages,
        final_observation=chat.final_observation,
        steps=chat.steps,
        extra={"info": value["info"]} if row.info else None,
    )


FORMAT = Format(NAME, "tau-bench historical trajectories (a JSON array)", recognise, read)
