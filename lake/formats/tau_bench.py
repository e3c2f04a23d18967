"""tau-bench historical trajectories: a JSON array of {task_id, trial, reward, info, traj}.

Episode: an element of the array. Siblings are the trials of a task. The file names neither run nor model.
Step: an assistant turn. Its state is the text of the messages since the previous turn, without system prompts.
Reward: the return of the episode. The file has no step rewards, so these stay NULL.
A rollout that the runner could not finish has a return of 0, no messages, and its `error` in `info`.

Source: the historical_trajectories folder of the tau-bench repository (Yao et al. 2024, arXiv 2406.12045).
"""

from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from lake.formats.base.fields import as_text
from lake.formats.base.format import FileHead, Format, Item
from lake.formats.base.rows import convert_values, read_array_values
from lake.formats.base.source import Input
from lake.formats.chat.messages import parse_chat
from lake.formats.tracing.payloads import report_unknown_keys
from lake.records import EpisodeRecord

NAME = "tau_bench"


class _TauInfo(msgspec.Struct):
    task: dict[str, Any] | None = None
    source: str | None = None
    """The tool that answered last, or `user`: it ended the rollout, unless a limit did."""
    reward_info: dict[str, Any] | UnsetType | None = UNSET
    """NULL if the environment never ended: the runner's limit of turns stopped it."""
    error: Any = None


class _TauRow(msgspec.Struct):
    task_id: int | str
    trial: Annotated[int, Meta(ge=0, le=2**31 - 1)]
    reward: float | None
    traj: list[Any]
    """Messages. Typed as objects, msgspec would copy them all."""
    info: _TauInfo | None = None


def recognise(look: FileHead) -> bool:
    """Return whether a file is a JSON array of rollouts with their `traj`."""
    return look.kind == "array" and look.has("traj", "task_id")


def read(file: Input) -> Iterator[Item]:
    """Yield records and rejects of a file, with indices from 0."""

    def convert(value: Any) -> list[EpisodeRecord]:
        record = build_record(value)
        for message in value["traj"]:
            report_unknown_keys(file, message)
        return [record]

    return convert_values(read_array_values(file), NAME, convert)


def build_record(value: Any) -> EpisodeRecord:
    """Return one element of the array as an episode. Raises ShapeError, msgspec.ValidationError: another shape."""
    row = msgspec.convert(value, _TauRow)
    chat = parse_chat(row.traj, location="traj")
    info = row.info or _TauInfo()
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
        **chat.fields,
        extra={"info": value["info"]} if row.info else None,
    )


FORMAT = Format(NAME, "tau-bench historical trajectories (a JSON array)", recognise, read)
