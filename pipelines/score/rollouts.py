"""From the lake's rows to the arguments of a reward function, as JSON, in bounded memory; and their check.

Episodes come in the parts of `lake.read.episodes`. A conversation is put together from texts that are JSON already:
nothing is decoded but to be counted.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import polars as pl

from lake import ids
from lake.errors import LakeAccessError, UsageError
from lake.read.episodes import rows_of
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
"""What a function is called with; batch- and group-wise ones get a list of each, two under names of their own."""
RENAMED = {"messages": "rollouts_messages", "ground_truth": "ground_truth_list"}
"""Arguments that batch- and group-wise functions know under another name."""
_ENCODER = msgspec.json.Encoder()
_LIST = msgspec.json.Decoder(list[msgspec.Raw])


@dataclass(frozen=True, slots=True)
class Rollout:
    """One episode, ready to be scored."""

    episode_id: int
    group_id: int
    run_id: str
    steps_S: tuple[int, ...]
    """Numbers of its active steps."""
    messages_S: tuple[int, ...]
    """Index in `messages` of each step's assistant message."""
    arguments: dict[str, Any]
    """Argument -> value; JSON as `msgspec.Raw`."""


def read_rollouts(snapshot: Snapshot, part: pl.DataFrame, wanted: Collection[str]) -> list[Rollout]:
    """The episodes of a part, in its order, with the wanted `ARGUMENTS`; LakeAccessError for a file that is damaged."""
    documents = [*_CHAT, *(name for name in _DOCUMENTS if name in wanted)]
    heads = rows_of(snapshot, "episodes", part, ("episode_id", "group_id", *_PLAIN, *documents), documents)
    heads = part.select("episode_id").join(heads, on="episode_id", how="inner", maintain_order="left")
    steps = rows_of(snapshot, "steps", part, ("is_active", *_STEP_COLUMNS), ("context", "tool_calls")).filter(
        "is_active"
    )
    of_episode: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in steps.sort("episode_id", "step_index").iter_rows(named=True):
        of_episode[row["episode_id"]].append(row)
    return [_rollout(head, of_episode[head["episode_id"]], wanted) for head in heads.iter_rows(named=True)]


def one_call(rollout: Rollout, arguments: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of a pointwise call: the lake's, and the user's."""
    return rollout.arguments | arguments


def joint_call(rollouts: Sequence[Rollout], arguments: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of a batch- or group-wise call: a list of each, in one order."""
    names = rollouts[0].arguments if rollouts else {}
    lists = {name: [rollout.arguments[name] for rollout in rollouts] for name in names}
    return {RENAMED.get(name, name): values for name, values in lists.items()} | arguments


def _rollout(head: dict[str, Any], rows: list[dict[str, Any]], wanted: Collection[str]) -> Rollout:
    try:
        messages, places = _conversation(head, rows)
    except msgspec.DecodeError as error:
        msg = f"episode {ids.to_text(head['episode_id'])} has messages that are no JSON list: {error}"
        raise LakeAccessError(msg) from error
    steps_S = tuple(row["step_index"] for row in rows)
    values: dict[str, Any] = {"messages": _array(messages)}
    values |= {name: ids.to_text(head[name]) for name in _IDS}
    values |= {name: head[name] for name in _PLAIN}
    values |= {n: msgspec.Raw((head[n] or "null").encode()) for n in _DOCUMENTS if n in wanted}
    if "steps" in wanted:
        values["steps"] = _array([_step(row, place) for row, place in zip(rows, places, strict=True)])
    arguments = {name: value for name, value in values.items() if name in wanted}
    return Rollout(head["episode_id"], head["group_id"], head["run_id"], steps_S, tuple(places), arguments)


def _conversation(head: dict[str, Any], rows: list[dict[str, Any]]) -> tuple[list[bytes | msgspec.Raw], list[int]]:
    """All messages, and where the assistant's are. A source that kept no messages has its states for the user's."""
    messages: list[bytes | msgspec.Raw] = _listed(head["initial_messages"])
    places = []
    for position, row in enumerate(rows):
        added = _listed(row["context"])
        messages += added
        if row["state"] and not added and (position or not messages):
            messages.append(_ENCODER.encode({"role": row["state_role"] or "user", "content": row["state"]}))
        places.append(len(messages))
        messages.append(_answer(row))
    return messages + _listed(head["final_observation"]), places


def _answer(row: dict[str, Any]) -> bytes:
    message: dict[str, Any] = {"role": "assistant", "content": row["action"]}
    if row["reasoning"]:
        message["reasoning_content"] = row["reasoning"]
    if row["tool_calls"]:
        message["tool_calls"] = msgspec.Raw(row["tool_calls"].encode())
    return _ENCODER.encode(message)


def _step(row: dict[str, Any], place: int) -> bytes:
    return _ENCODER.encode(
        {
            "index": row["step_index"],
            "message_index": place,
            "state": row["state"],
            "action": row["action"],
            "reward": row["reward"],
            "is_action_valid": row["is_action_valid"],
        }
    )


def _listed(text: str | None) -> list[Any]:
    return _LIST.decode(text) if text else []


def _array(items: Sequence[bytes | msgspec.Raw]) -> msgspec.Raw:
    return msgspec.Raw(b"[" + b",".join(bytes(item) for item in items) + b"]")


def given_arguments(mode: Mode) -> frozenset[str]:
    """Names that a call of this mode fills from the lake."""
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
    """Refuse a call that cannot be made, and say what may not be meant.

    Args:
        name: of the function, for messages.
        mode: what one call judges.
        arguments: the user's.
        parameters: names that the function takes.
        required: those of them without a default, the messages aside.
        takes_all: it has `**kwargs`.
        fixed: names that a `functools.partial` has filled for good.

    Returns:
        Sentences for the user: arguments that go to `**kwargs`.

    Raises:
        UsageError: a parameter that nothing fills, also one with a default whose name is nearly one that a rollout
            gives; a function that takes nothing of a rollout; an argument that the function does not take or the lake
            gives.
    """
    given = given_arguments(mode)
    if taken := sorted(arguments.keys() & (given | {KNOWN_ANSWERS})):
        msg = f"{_named(taken)} of `{name}` comes from the lake and cannot be set; take another name for yours"
        raise UsageError(msg)
    unknown = sorted(arguments.keys() - set(parameters))
    own = ", ".join(each for each in parameters if each not in given) or "none"
    if filled := sorted(arguments.keys() & set(fixed)):
        msg = f"{_named(filled)} of `{name}` is filled by functools.partial; leave it out there to set it"
        raise UsageError(msg)
    if unknown and not takes_all:
        msg = f"`{name}` takes no {_named(unknown)}, and has no **kwargs; its own arguments: {own}"
        raise UsageError(msg)
    if missing := [each for each in required if each not in given and each not in arguments]:
        flags = " ".join(f"--arg {each}=..." for each in missing)
        msg = (
            f"`{name}` needs {_named(missing)}: without a default, and of no name that a rollout gives; those are "
            f"{_names_of(mode)}. For a value of yours add {flags}"
        )
        raise UsageError(msg)
    for each in sorted(set(parameters) - given - arguments.keys()):
        if (near := _near(each, given - set(parameters))) is not None:
            count = "each rollout" if mode != "pointwise" else "its rollout"
            msg = (
                f"`{name}` takes `{each}`, which a {mode} call does not fill: it would silently have its default. The "
                f"value of {count} is in `{near}`; rename the parameter, or set a value of yours with --arg {each}=..."
            )
            raise UsageError(msg)
    if not takes_all and given.isdisjoint(parameters):
        msg = (
            f"`{name}` takes nothing of a rollout: name what it judges by as parameters. A rollout gives "
            f"{_names_of(mode)}"
        )
        raise UsageError(msg)
    return [
        f"{_named([each])} is no parameter of `{name}`: it goes to **kwargs, and each value of it makes a version of "
        f"its own; its own arguments: {own}"
        for each in unknown
    ]


def _near(parameter: str, given: Collection[str]) -> str | None:
    """The name that a rollout gives, which a parameter of another spelling most likely means; None if there is none."""
    alike = (RENAMED.get(parameter), parameter.removesuffix("s"), parameter.removesuffix("_list"))
    return next((name for name in alike if name in given), None)


def _names_of(mode: Mode) -> str:
    """What a call of this mode can take by name, in the order of the guide."""
    return ", ".join(ARGUMENTS if mode == "pointwise" else (RENAMED.get(name, name) for name in ARGUMENTS))


def _named(names: Sequence[str]) -> str:
    return f"{'argument' if len(names) == 1 else 'arguments'} {', '.join(f'`{each}`' for each in names)}"
