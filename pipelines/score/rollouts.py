"""Read a reward function's arguments from the lake, as JSON and in bounded memory, and check its parameters.

Episodes come in the batches of `lake.read.episodes`. A conversation is joined from texts that are JSON already; they
are decoded only to be counted.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import polars as pl

from lake import ids
from lake.errors import LakeAccessError, UsageError
from lake.read.episodes import read_rows
from lake.read.snapshot import Snapshot
from pipelines.score.reward_function import KNOWN_ANSWERS, TRUTHS, Mode

_IDS = ("episode_id", "group_id")
_PLAIN = (
    "run_id",
    "task_id",
    "rollout_index",
    "attempt",
    "environment",
    "split",
    "agent_id",
    "policy",
    "policy_version",
    "seed",
    "status",
    "terminated",
    "stop_reason",
    "env_return",
    "num_steps",
)
_DOCUMENTS = ("ground_truth", "tools", "extra")
_CHAT = ("initial_messages", "final_observation")
_STEP_COLUMNS = (
    "episode_id",
    "step_index",
    "state",
    "state_role",
    "context",
    "action",
    "reasoning",
    "tool_calls",
    "reward",
    "is_action_valid",
)
ARGUMENTS = ("messages", "ground_truth", *_IDS, *_PLAIN, "tools", "extra", "steps")
"""Arguments of a function; batch- and group-wise functions get a list of each, two of them under other names."""
RENAMED = {"messages": "rollouts_messages", "ground_truth": "ground_truth_list"}
"""Other names of arguments in batch- and group-wise functions."""
_ENCODER = msgspec.json.Encoder()
_LIST = msgspec.json.Decoder(list[msgspec.Raw])


@dataclass(frozen=True, slots=True)
class RolloutInput:
    """One episode, ready to be scored."""

    episode_id: int
    group_id: int
    run_id: str
    steps_S: tuple[int, ...]
    """Numbers of the active steps."""
    messages_S: tuple[int, ...]
    """Index in `messages` of each step's assistant message."""
    arguments: dict[str, Any]
    """Argument -> value; JSON as `msgspec.Raw`."""


def read_rollouts(snapshot: Snapshot, batch: pl.DataFrame, names: Collection[str]) -> list[RolloutInput]:
    """Return the episodes of a batch, in its order, with the arguments `names`; LakeAccessError for a damaged file."""
    documents = [*_CHAT, *(name for name in _DOCUMENTS if name in names)]
    heads = read_rows(snapshot, "episodes", batch, ("episode_id", "group_id", *_PLAIN, *documents), documents)
    heads = batch.select("episode_id").join(heads, on="episode_id", how="inner", maintain_order="left")
    steps = read_rows(snapshot, "steps", batch, ("is_active", *_STEP_COLUMNS), ("context", "tool_calls")).filter(
        "is_active"
    )
    of_episode: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in steps.sort("episode_id", "step_index").iter_rows(named=True):
        of_episode[row["episode_id"]].append(row)
    return [_read_rollout(head, of_episode[head["episode_id"]], names) for head in heads.iter_rows(named=True)]


def make_call(rollout: RolloutInput, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of a pointwise call: from the lake and from the user."""
    return rollout.arguments | arguments


def make_joint_call(rollouts: Sequence[RolloutInput], arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of a batch- or group-wise call: a list of each, in the order of the rollouts."""
    names = rollouts[0].arguments if rollouts else {}
    lists = {name: [rollout.arguments[name] for rollout in rollouts] for name in names}
    return {RENAMED.get(name, name): arguments_list for name, arguments_list in lists.items()} | arguments


def _read_rollout(head: dict[str, Any], rows: list[dict[str, Any]], names: Collection[str]) -> RolloutInput:
    try:
        messages, indices = _build_messages(head, rows)
    except msgspec.DecodeError as error:
        msg = f"episode {ids.to_text(head['episode_id'])} has messages that are not a JSON list: {error}"
        raise LakeAccessError(msg) from error
    steps_S = tuple(row["step_index"] for row in rows)
    arguments: dict[str, Any] = {"messages": msgspec.Raw(b"[" + b",".join(map(bytes, messages)) + b"]")}
    arguments |= {name: ids.to_text(head[name]) for name in _IDS}
    arguments |= {name: head[name] for name in _PLAIN}
    arguments |= {name: msgspec.Raw((head[name] or "null").encode()) for name in _DOCUMENTS if name in names}
    if "steps" in names:
        fields = ("state", "action", "reward", "is_action_valid")
        steps = [
            {"index": row["step_index"], "message_index": index} | {name: row[name] for name in fields}
            for row, index in zip(rows, indices, strict=True)
        ]
        arguments["steps"] = msgspec.Raw(_ENCODER.encode(steps))
    arguments = {name: argument for name, argument in arguments.items() if name in names}
    return RolloutInput(head["episode_id"], head["group_id"], head["run_id"], steps_S, tuple(indices), arguments)


def _build_messages(head: dict[str, Any], rows: list[dict[str, Any]]) -> tuple[list[bytes | msgspec.Raw], list[int]]:
    """Return all messages, and the indices of the assistant's. States stand in for messages that a source lacks."""
    messages: list[bytes | msgspec.Raw] = _split_array(head["initial_messages"])
    indices = []
    for position, row in enumerate(rows):
        added = _split_array(row["context"])
        messages += added
        if row["state"] and not added and (position or not messages):
            messages.append(_ENCODER.encode({"role": row["state_role"] or "user", "content": row["state"]}))
        indices.append(len(messages))
        answer: dict[str, Any] = {"role": "assistant", "content": row["action"]}
        if row["reasoning"]:
            answer["reasoning_content"] = row["reasoning"]
        if row["tool_calls"]:
            answer["tool_calls"] = msgspec.Raw(row["tool_calls"].encode())
        messages.append(_ENCODER.encode(answer))
    return messages + _split_array(head["final_observation"]), indices


def _split_array(text: str | None) -> list[Any]:
    return _LIST.decode(text) if text else []


def list_arguments(mode: Mode) -> frozenset[str]:
    """Return the names that a call of this mode fills from the lake."""
    if mode == "pointwise":
        return frozenset(ARGUMENTS)
    return frozenset(RENAMED.get(name, name) for name in ARGUMENTS) | frozenset(TRUTHS)


def check_arguments(
    name: str,
    mode: Mode,
    arguments: Mapping[str, Any],
    *,
    parameters: Sequence[str],
    required: Sequence[str],
    takes_all: bool,
    fixed: Collection[str] = (),
) -> list[str]:
    """Check that a call can be made, and return hints about arguments that may be misspelled.

    Args:
        name: name of the function, for messages.
        mode: what one call judges.
        arguments: the user's arguments.
        parameters: names that the function takes.
        required: those of them without a default, the messages excluded.
        takes_all: whether it has `**kwargs`.
        fixed: names that a `functools.partial` fills.

    Returns:
        Sentences for the user: arguments that go to `**kwargs`.

    Raises:
        UsageError: a parameter that nothing fills (also one with a default whose name resembles an argument from the
            lake); a function that takes nothing from a rollout; an argument that the function does not take or that
            comes from the lake.
    """
    from_lake = list_arguments(mode)
    if clashes := sorted(arguments.keys() & (from_lake | {KNOWN_ANSWERS})):
        msg = f"{_quote_names(clashes)} of `{name}` comes from the lake and cannot be set; use another name for yours"
        raise UsageError(msg)
    unknown = sorted(arguments.keys() - set(parameters))
    own_names = ", ".join(parameter for parameter in parameters if parameter not in from_lake) or "none"
    if filled := sorted(arguments.keys() & set(fixed)):
        msg = f"{_quote_names(filled)} of `{name}` is filled by functools.partial; leave it out there to set it"
        raise UsageError(msg)
    if unknown and not takes_all:
        msg = f"`{name}` takes no {_quote_names(unknown)}, and has no **kwargs; its own arguments: {own_names}"
        raise UsageError(msg)
    # The names in the order of the guide.
    offered_names = ", ".join(ARGUMENTS if mode == "pointwise" else (RENAMED.get(name, name) for name in ARGUMENTS))
    if missing := [parameter for parameter in required if parameter not in from_lake and parameter not in arguments]:
        flags = " ".join(f"--arg {parameter}=..." for parameter in missing)
        msg = (
            f"`{name}` needs {_quote_names(missing)}: it has no default, and a rollout gives no argument of that name. "
            f"A rollout gives {offered_names}. For a value of yours add {flags}"
        )
        raise UsageError(msg)
    for parameter in sorted(set(parameters) - from_lake - arguments.keys()):
        similar = (RENAMED.get(parameter), parameter.removesuffix("s"), parameter.removesuffix("_list"))
        free = from_lake - set(parameters)
        if (near := next((candidate for candidate in similar if candidate in free), None)) is not None:
            owner = "each rollout" if mode != "pointwise" else "its rollout"
            msg = (
                f"`{name}` takes `{parameter}`, which a {mode} call does not fill: it would silently have its default. "
                f"The value of {owner} is in `{near}`; rename the parameter, or set a value with --arg {parameter}=..."
            )
            raise UsageError(msg)
    if not takes_all and from_lake.isdisjoint(parameters):
        msg = (
            f"`{name}` takes nothing from a rollout: name what it judges by as parameters. A rollout gives "
            f"{offered_names}"
        )
        raise UsageError(msg)
    return [
        f"{_quote_names([argument])} is not a parameter of `{name}`: it goes to **kwargs, and each value of it makes "
        f"another version; its own arguments: {own_names}"
        for argument in unknown
    ]


def _quote_names(names: Sequence[str]) -> str:
    return f"{'argument' if len(names) == 1 else 'arguments'} {', '.join(f'`{name}`' for name in names)}"
