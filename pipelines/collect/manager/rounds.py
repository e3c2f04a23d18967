"""Rounds: what a round plays, which round is next, and what of it is there.

All of it follows from the lake: the plan of a round is in the parameters of its `collect` job, and what was played is
in `episodes`.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import polars as pl

from lake import ids
from lake.errors import UsageError
from lake.lake import Lake
from lake.read.episodes import KEYS, rows_of
from lake.read.parquet import collected
from lake.read.show import printable
from lake.read.snapshot import Snapshot
from lake.records import EpisodeRecord
from pipelines.collect.environments import Task
from pipelines.collect.tasks import Cursor, TaskSet, after, take

KIND = "collect"
STARTS_DIFFER = "starts_differ"
"""`stop_reason` of rollouts whose group began in different messages; trying again would not mend it."""

REPLAY_DIFFERS = "replay_differs"
"""`stop_reason` of rollouts that were interrupted and could not go on; they are played anew, as another attempt."""

STOPPED = "stopped"
"""`stop_reason` of an agent's rollouts that were running when the collection was stopped: an agent cannot go on."""


UNOPENED = ""
"""`environment` of rollouts whose environment did not open."""

_RUN = re.compile(r"[^\W_][\w.+=:@-]*")
"""Names of runs stand in paths of files and of addresses."""
_LONGEST_RUN = 128


class Group(NamedTuple):
    """The siblings of a task in a round."""

    number: int
    """Of the round."""
    seed: int
    """Of the task."""


class Slot(NamedTuple):
    """One rollout of a group, whatever its attempt."""

    group: Group
    rollout: int
    """Number among the siblings."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What a round plays, as its job's parameters say it."""

    round: int
    epoch: int
    offset: int
    tasks: int
    """How many of the epoch's, from `offset` on."""
    group_size: int
    """Siblings that are wanted of each."""
    siblings: int
    """Those that are played: more, where some are going to be left out."""
    of_tasks: str
    """Fingerprint of the whole set of tasks."""
    seed: int
    """Decides the order of tasks, and the samples."""

    def drawn(self, tasks: TaskSet) -> list[Task]:
        """The tasks of the round."""
        return take(tasks, self.seed, Cursor(self.epoch, self.offset), self.tasks)

    @property
    def title(self) -> str:
        """For people."""
        last = self.offset + self.tasks - 1
        return f"round {self.round}: tasks {self.offset}..{last} of epoch {self.epoch}"


class Planned(msgspec.Struct, frozen=True):
    """The round that is next."""

    plan: Plan
    job_id: int | None
    """Of an earlier process that did not finish it."""


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of the rounds to come."""

    run: str
    groups: int
    group_size: int
    oversample: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if not _RUN.fullmatch(self.run) or len(self.run.encode()) > _LONGEST_RUN:
            raise UsageError(
                f"--run {printable(self.run)!r} is no name of a run; valid: up to {_LONGEST_RUN} bytes of letters, "
                "digits and . _ - + = : @, beginning with a letter or a digit"
            )


_MAY_CHANGE = frozenset(
    (
        *("engines", "api", "agent_python", "parallel_calls", "requests_per_second", "tokens_per_second"),
        *("step_seconds", "call_seconds"),
    )
)
"""Options of a player that say where and how fast it plays, and not what is sampled."""


def next_round(lake: Lake, tasks: TaskSet, wanted: Wanted, settings: Mapping[str, Any]) -> Planned:
    """The first round of a run that is not done: planned before, and not ended well; else a new one.

    Args:
        lake: holds the rounds before.
        tasks: where rollouts begin.
        wanted: how many.
        settings: `limits` and `player`, as the parameters of the round's job will have them.

    Raises:
        UsageError: the run was collected from other tasks, with other settings, or by something else.
    """
    rows = lake.sql(
        "SELECT job_id, status, parameters FROM job_runs WHERE kind = ? AND run_id = ? ORDER BY started_at",
        [KIND, wanted.run],
    )
    known: dict[int, tuple[Plan, int, bool]] = {}
    parameters = ""
    for job_id, status, parameters in rows.iter_rows():
        plan = _plan_of(parameters, wanted.run)
        done = status == "succeeded" or (plan.round in known and known[plan.round][2])
        known[plan.round] = (plan, job_id, done)
    print_of = ids.to_text(tasks.fingerprint)
    if not known:
        return Planned(_plan(0, Cursor(), tasks, wanted), None)
    plan, job_id, done = known[max(known)]
    if plan.of_tasks != print_of or plan.seed != wanted.seed:
        what = "other tasks" if plan.of_tasks != print_of else f"--seed {plan.seed}"
        raise UsageError(
            f"run {wanted.run!r} was collected with {what}, and a round of it follows from them; give the same again, "
            "or another --run"
        )
    _refuse_other_settings(msgspec.json.decode(parameters), wanted, settings)
    if not done:
        return Planned(plan, job_id)
    cursor = after(tasks, Cursor(plan.epoch, plan.offset), plan.tasks)
    return Planned(_plan(plan.round + 1, cursor, tasks, wanted), None)


def _refuse_other_settings(before: dict[str, Any], wanted: Wanted, settings: Mapping[str, Any]) -> None:
    """Raise UsageError: what is sampled, or kept of it, would be something else than in the rounds before."""
    plan = {"group_size": wanted.group_size, "siblings": wanted.group_size + wanted.oversample}
    then, now = _settings_of(before), _settings_of({**settings, "plan": plan})
    others = [name for name in then if name in now and then[name] != now[name]]
    if others:
        said = ", ".join(f"{name.replace('_', ' ')} {then[name]!r} (now {now[name]!r})" for name in others)
        raise UsageError(
            f"run {wanted.run!r} was collected with {said}; the episodes of a run are comparable: give the same again, "
            "or another --run"
        )


def _settings_of(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a job's parameters that stay the same throughout a run, by name."""
    plan, player = parameters["plan"], parameters.get("player", {})
    return {
        "group_size": plan["group_size"],
        "oversample": plan["siblings"] - plan["group_size"],
        "keep": parameters.get("limits", {}).get("keep"),
        **fixed_options(player),
    }


def fixed_options(player: Mapping[str, Any]) -> dict[str, Any]:
    """Of a player's options, as a job's parameters say them, those that decide what is sampled, by name."""
    others = {name: value for name, value in player.items() if name not in _MAY_CHANGE and name != "sampling"}
    return {**others, **player.get("sampling", {})}


def _plan(number: int, cursor: Cursor, tasks: TaskSet, wanted: Wanted) -> Plan:
    return Plan(
        round=number,
        epoch=cursor.epoch,
        offset=cursor.offset,
        tasks=min(wanted.groups, len(tasks.tasks) - cursor.offset),
        group_size=wanted.group_size,
        siblings=wanted.group_size + wanted.oversample,
        of_tasks=ids.to_text(tasks.fingerprint),
        seed=wanted.seed,
    )


def _plan_of(parameters: str, run: str) -> Plan:
    try:
        return msgspec.convert(msgspec.json.decode(parameters).get("plan"), Plan)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise UsageError(
            f"run {run!r} was collected by something else than `trajlake collect`; choose another --run"
        ) from error


class Played(msgspec.Struct, frozen=True):
    """The newest attempt of a rollout that the lake has."""

    attempt: int
    status: str
    stop_reason: str | None

    def is_over(self, retries: int) -> bool:
        """Whether nothing more is tried."""
        if self.stop_reason in (REPLAY_DIFFERS, STOPPED):
            return False
        return self.status != "failed" or self.stop_reason == STARTS_DIFFER or self.attempt >= retries


_GROUP = ["collection_round", "seed"]
_COLUMNS = ["collection_round", "seed", "rollout_index", "attempt", "status", "stop_reason"]


def played(snapshot: Snapshot, run: str, rounds: Sequence[int]) -> dict[Slot, Played]:
    """What the lake has of some rounds, also what was retracted since: it is not played again."""
    rows = snapshot.scan_all("episodes").filter(run_id=run).filter(pl.col("collection_round").is_in(list(rounds)))
    found: dict[Slot, Played] = {}
    for number, seed, index, attempt, status, why in collected(rows.select(_COLUMNS).sort("attempt")).iter_rows():
        found[Slot(Group(number, seed), index)] = Played(attempt, status, why)
    return found


class Start(NamedTuple):
    """How the rollouts of a group begin, each of them."""

    hash: int
    """Of what the policy is shown: messages and tools."""
    task_id: str
    """As the environment names the task."""


def starts(snapshot: Snapshot, run: str, number: int) -> dict[Group, Start]:
    """How the groups of a round began, of those that the lake has a rollout of which began."""
    rows = snapshot.scan("episodes").filter(run_id=run, collection_round=number)
    # One of each group: siblings that began otherwise were never played.
    rows = rows.filter(pl.col("initial_messages").is_not_null(), pl.col("num_steps") > 0)
    rows = rows.filter(pl.col("environment") != UNOPENED)
    part = collected(rows.select(*KEYS, "seed", "task_id", "stop_reason"))
    part = part.filter(pl.col("stop_reason").ne_missing(STARTS_DIFFER)).unique("seed", keep="first")
    if part.is_empty():
        return {}
    documents = ("initial_messages", "tools")
    found = rows_of(snapshot, "episodes", part, ("seed", "task_id", *documents), documents)
    return {
        Group(number, seed): Start(
            _hash(msgspec.json.decode(messages), None if tools is None else msgspec.json.decode(tools)), task_id
        )
        for seed, task_id, messages, tools in found.select("seed", "task_id", *documents).iter_rows()
    }


def all_failed(lake: Lake, where: str) -> str | None:
    """That all rollouts of a predicate failed, and what the first says; None if one did not, or there is none."""
    failed, others, error = lake.sql(
        "SELECT count(*) FILTER (status = 'failed'), count(*) FILTER (status <> 'failed'), "
        f"min_by(error, episode_id) FILTER (status = 'failed') FROM episodes WHERE {where}"
    ).row(0)
    if others or not failed:
        return None
    which = "the rollout" if failed == 1 else f"all {failed:,} rollouts"
    first = "" if failed == 1 else ", the first of them"
    return f"{which} of {where} failed{first}: {printable(error or 'no error is recorded')}"


def retract_broken(lake: Lake, run: str) -> int:
    """Hide what was recorded of groups before a sibling of theirs began differently; how many episodes.

    Groups of all rounds: the sibling may be one that was carried over, or an earlier process was killed before this.
    """
    rows = lake.snapshot().scan("episodes").filter(run_id=run).select("episode_id", *_GROUP, "stop_reason")
    refused = pl.col("stop_reason").eq_missing(STARTS_DIFFER)
    broken = rows.filter(refused).select(_GROUP).unique()
    others = collected(rows.filter(~refused).join(broken, on=_GROUP, how="semi", nulls_equal=True))
    if others.is_empty():
        return 0
    return lake.retract(others["episode_id"].to_list(), reason="a sibling of its group began differently")


def start_of(record: EpisodeRecord) -> Start:
    """How a rollout began."""
    return Start(_hash(record.initial_messages, record.tools), record.task_id)


def _hash(messages: object, tools: object) -> int:
    return ids.bytes_hash(msgspec.json.encode([messages, tools or None], order="sorted"))
