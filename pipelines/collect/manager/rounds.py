"""Rounds: what a round plays, which round is next, which of its rollouts are missing, and what can happen to them.

Rounds follow from the lake: the parameters of a `collect` job hold the plan of its round, and `episodes` holds the
finished rollouts. `TRANSITIONS` is the complete table of what can happen to a rollout in one process.

Siblings, the rollouts of one task in one round, must start with equal messages; otherwise none of them is compared.
With oversampling, the first that finish are kept (`keep` is first), or all until a selection picks the best.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum, auto
from typing import Any, Literal, NamedTuple

import msgspec
import polars as pl

from lake import ids
from lake.errors import UsageError
from lake.lake import Lake
from lake.read.episode_text import make_printable
from lake.read.episodes import KEYS, read_rows
from lake.read.parquet import collect_rows
from lake.read.snapshot import Snapshot
from lake.records import EpisodeRecord, StepRecord
from pipelines.collect.environments import Task
from pipelines.collect.players import EPISODE_TIMEOUT, SURPLUS, Ending, StartError, StepTotals
from pipelines.collect.settings import Keep, RunSettings
from pipelines.collect.tasks import Cursor, TaskSet, advance_cursor, take_tasks

KIND = "collect"
STARTS_DIFFER = "starts_differ"
"""`stop_reason` of rollouts whose group started with different messages; a retry would not help."""

REPLAY_DIFFERS = "replay_differs"
"""`stop_reason` of interrupted rollouts that could not resume; they are played again as another attempt."""

STOPPED = "stopped"
"""`stop_reason` of an agent's rollouts that ran when the collection stopped: an agent cannot resume."""


UNOPENED = ""
"""`environment` of rollouts whose environment did not start."""


class Group(NamedTuple):
    """The siblings of a task in a round."""

    number: int
    """Number of the round."""
    seed: int
    """Seed of the task."""


class Slot(NamedTuple):
    """One rollout of a group, for all its attempts."""

    group: Group
    rollout: int
    """Index among the siblings."""


class RoundPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a round plays, as stored in the parameters of its job."""

    round: int
    epoch: int
    offset: int
    tasks: int
    """Number of tasks, taken from the epoch from `offset` on."""
    group_size: int
    """Siblings to keep of each task."""
    siblings: int
    """Siblings to play; more than `group_size` if some are left out."""
    of_tasks: str
    """Fingerprint of the complete task set."""
    seed: int
    """Seed of the task order and the samples."""

    def draw_tasks(self, tasks: TaskSet) -> list[Task]:
        """Return the tasks of the round."""
        return take_tasks(tasks, self.seed, Cursor(self.epoch, self.offset), self.tasks)

    @property
    def title(self) -> str:
        """A title for messages."""
        last = self.offset + self.tasks - 1
        return f"round {self.round}: tasks {self.offset}..{last} of epoch {self.epoch}"


class NextRound(msgspec.Struct, frozen=True):
    """The next round of a run."""

    plan: RoundPlan
    job_id: int | None
    """Job of an earlier process that did not finish the round."""


_MAY_CHANGE = frozenset(
    (
        *("engines", "api", "agent_python", "parallel_calls", "requests_per_second", "tokens_per_second"),
        *("step_seconds", "call_seconds"),
    )
)
"""Options of a player that change where and how fast it plays, but not what it samples."""


def find_next_round(lake: Lake, tasks: TaskSet, run_settings: RunSettings, settings: Mapping[str, Any]) -> NextRound:
    """Return the first unfinished round of a run, or plan a new one.

    Args:
        lake: the lake with the earlier rounds.
        tasks: the tasks of the run.
        run_settings: sizes of a new round.
        settings: `limits` and `player`, as the round's job stores them.

    Raises:
        UsageError: the run was collected from other tasks, with other settings, or by another tool.
    """
    rows = lake.sql(
        "SELECT job_id, status, parameters FROM job_runs WHERE kind = ? AND run_id = ? ORDER BY started_at",
        [KIND, run_settings.run],
    )
    rounds: dict[int, tuple[RoundPlan, int, bool]] = {}
    parameters = ""
    for job_id, status, parameters in rows.iter_rows():
        plan = _parse_plan(parameters, run_settings.run)
        done = status == "succeeded" or (plan.round in rounds and rounds[plan.round][2])
        rounds[plan.round] = (plan, job_id, done)
    fingerprint = ids.to_text(tasks.fingerprint)
    if not rounds:
        return NextRound(_make_plan(0, Cursor(), tasks, run_settings), None)
    plan, job_id, done = rounds[max(rounds)]
    if plan.of_tasks != fingerprint or plan.seed != run_settings.seed:
        difference = "other tasks" if plan.of_tasks != fingerprint else f"--seed {plan.seed}"
        raise UsageError(
            f"run {run_settings.run!r} was collected with {difference}, which determine its rounds; pass the same, "
            "or another --run"
        )
    _refuse_other_settings(msgspec.json.decode(parameters), run_settings, settings)
    if not done:
        return NextRound(plan, job_id)
    cursor = advance_cursor(tasks, Cursor(plan.epoch, plan.offset), plan.tasks)
    return NextRound(_make_plan(plan.round + 1, cursor, tasks, run_settings), None)


def _refuse_other_settings(before: dict[str, Any], run_settings: RunSettings, settings: Mapping[str, Any]) -> None:
    """Raise UsageError if the settings that decide samples, or which are kept, differ from earlier rounds."""
    plan = {"group_size": run_settings.group_size, "siblings": run_settings.group_size + run_settings.oversample}
    then, now = _settings_of(before), _settings_of({**settings, "plan": plan})
    changes = [name for name in then if name in now and then[name] != now[name]]
    if changes:
        description = ", ".join(f"{name.replace('_', ' ')} {then[name]!r} (now {now[name]!r})" for name in changes)
        raise UsageError(
            f"run {run_settings.run!r} was collected with {description}; episodes of a run must be "
            "comparable: pass the same again, or another --run"
        )


def _settings_of(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a job that must not change during a run, by name."""
    plan, player = parameters["plan"], parameters.get("player", {})
    return {
        "group_size": plan["group_size"],
        "oversample": plan["siblings"] - plan["group_size"],
        "keep": parameters.get("limits", {}).get("keep"),
        **select_fixed_options(player),
    }


def select_fixed_options(player: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a player that decide what is sampled, by name."""
    fixed = {name: option for name, option in player.items() if name not in _MAY_CHANGE and name != "sampling"}
    return {**fixed, **player.get("sampling", {})}


def _make_plan(number: int, cursor: Cursor, tasks: TaskSet, run_settings: RunSettings) -> RoundPlan:
    return RoundPlan(
        round=number,
        epoch=cursor.epoch,
        offset=cursor.offset,
        tasks=min(run_settings.groups, len(tasks.tasks) - cursor.offset),
        group_size=run_settings.group_size,
        siblings=run_settings.group_size + run_settings.oversample,
        of_tasks=ids.to_text(tasks.fingerprint),
        seed=run_settings.seed,
    )


def _parse_plan(parameters: str, run: str) -> RoundPlan:
    try:
        return msgspec.convert(msgspec.json.decode(parameters).get("plan"), RoundPlan)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise UsageError(f"run {run!r} was not collected by `trajlake collect`; choose another --run") from error


class RecordedAttempt(msgspec.Struct, frozen=True):
    """The newest attempt of a rollout in the lake."""

    attempt: int
    status: str
    stop_reason: str | None

    def is_over(self, retries: int) -> bool:
        """Return whether no further attempt follows."""
        if self.stop_reason in (REPLAY_DIFFERS, STOPPED):
            return False
        return self.status != "failed" or self.stop_reason == STARTS_DIFFER or self.attempt >= retries


_GROUP = ["collection_round", "seed"]
_COLUMNS = ["collection_round", "seed", "rollout_index", "attempt", "status", "stop_reason"]


def read_attempts(snapshot: Snapshot, run: str, rounds: Sequence[int]) -> dict[Slot, RecordedAttempt]:
    """Return the newest attempts of some rounds, retracted ones included: they are not played again."""
    rows = snapshot.scan_all("episodes").filter(run_id=run).filter(pl.col("collection_round").is_in(list(rounds)))
    attempts: dict[Slot, RecordedAttempt] = {}
    for number, seed, index, attempt, status, why in collect_rows(rows.select(_COLUMNS).sort("attempt")).iter_rows():
        attempts[Slot(Group(number, seed), index)] = RecordedAttempt(attempt, status, why)
    return attempts


class GroupStart(NamedTuple):
    """How all rollouts of a group start."""

    hash: int
    """Hash of the policy's first messages and tools."""
    task_id: str
    """The environment's name of the task."""


def read_starts(snapshot: Snapshot, run: str, number: int) -> dict[Group, GroupStart]:
    """Return the starts of a round's groups, for groups with a started rollout in the lake."""
    rows = snapshot.scan("episodes").filter(run_id=run, collection_round=number)
    # One per group is enough: siblings that start differently are never played.
    rows = rows.filter(pl.col("initial_messages").is_not_null(), pl.col("num_steps") > 0)
    rows = rows.filter(pl.col("environment") != UNOPENED)
    part = collect_rows(rows.select(*KEYS, "seed", "task_id", "stop_reason"))
    part = part.filter(pl.col("stop_reason").ne_missing(STARTS_DIFFER)).unique("seed", keep="first")
    if part.is_empty():
        return {}
    documents = ("initial_messages", "tools")
    documents_of = read_rows(snapshot, "episodes", part, ("seed", "task_id", *documents), documents)
    return {
        Group(number, seed): GroupStart(
            _hash(msgspec.json.decode(messages), None if tools is None else msgspec.json.decode(tools)), task_id
        )
        for seed, task_id, messages, tools in documents_of.select("seed", "task_id", *documents).iter_rows()
    }


def describe_total_failure(lake: Lake, where: str) -> str | None:
    """Return a message with the first error if all rollouts of a predicate failed, else None."""
    failed, not_failed, error = lake.sql(
        "SELECT count(*) FILTER (status = 'failed'), count(*) FILTER (status <> 'failed'), "
        f"min_by(error, episode_id) FILTER (status = 'failed') FROM episodes WHERE {where}"
    ).row(0)
    if not_failed or not failed:
        return None
    which = "the rollout" if failed == 1 else f"all {failed:,} rollouts"
    first = "" if failed == 1 else ", the first of them"
    return f"{which} of {where} failed{first}: {make_printable(error or 'no error is recorded')}"


def retract_broken(lake: Lake, run: str) -> int:
    """Retract earlier siblings of groups that later started differently; return the number of episodes.

    It covers all rounds: the sibling may have been carried over, or an earlier process may have crashed before this
    step.
    """
    rows = lake.snapshot().scan("episodes").filter(run_id=run).select("episode_id", *_GROUP, "stop_reason")
    refused = pl.col("stop_reason").eq_missing(STARTS_DIFFER)
    broken = rows.filter(refused).select(_GROUP).unique()
    siblings = collect_rows(rows.filter(~refused).join(broken, on=_GROUP, how="semi", nulls_equal=True))
    if siblings.is_empty():
        return 0
    return lake.retract(siblings["episode_id"].to_list(), reason="a sibling of its group began differently")


def compute_start(record: EpisodeRecord) -> GroupStart:
    """Return how a rollout started."""
    return GroupStart(_hash(record.initial_messages, record.tools), record.task_id)


def _hash(messages: object, tools: object) -> int:
    return ids.bytes_hash(msgspec.json.encode([messages, tools or None], order="sorted"))


class OpenRollout(msgspec.Struct):
    """An unfinished episode of an earlier process."""

    key: bytes
    record: EpisodeRecord
    """The episode as it started, without steps."""
    steps: list[StepRecord]

    @property
    def slot(self) -> Slot:
        """The rollout it belongs to."""
        return Slot(Group(self.record.collection_round or 0, self.record.seed or 0), self.record.rollout_index)


class State(StrEnum):
    """State of a rollout. The value of a `CUT_` state is the `stop_reason` of its attempt."""

    QUEUED = auto()
    """It waits for a permit. A crash, or a process that stopped, may have left its first steps in the spool."""
    ADMITTED = auto()
    """It has a permit, and its next attempt has not begun."""
    PLAYING = auto()
    """The player plays it. Only now can it be interrupted."""
    CUT_SURPLUS = SURPLUS
    CUT_START = STARTS_DIFFER
    CUT_TIMEOUT = EPISODE_TIMEOUT
    CUT_STOPPED = STOPPED
    ENDING = auto()
    """Its siblings know its status, and it is being recorded."""
    ENDED = auto()
    LEFT_OUT = auto()
    """Not recorded, because enough siblings have finished."""
    LOST = auto()
    """The proxy that records it died. Later the lake shows whether it was recorded."""
    UNFINISHED = auto()
    """The next process resumes it, or plays it if the spool has no step of it."""


CUT = frozenset((State.CUT_SURPLUS, State.CUT_START, State.CUT_TIMEOUT, State.CUT_STOPPED))
"""States of rollouts whose player was asked to stop."""


class Event(StrEnum):
    """What happens to a rollout. The value of an event that ends an attempt is the attempt's `stop_reason`."""

    PERMIT = auto()
    """Fewer than `parallel` rollouts are in flight, and the disk keeps up."""
    STOP = auto()
    """The first Ctrl-C, a lost claim, or engines that are gone: nothing new starts, and running rollouts may finish."""
    BEGIN = auto()
    ENOUGH = SURPLUS
    """`keep` is first, and enough siblings have finished. With `carry_over`, only queued rollouts receive it: running
    ones play on while the next round plays."""
    DIFFER = STARTS_DIFFER
    """Its group started with different messages."""
    TIMEOUT = EPISODE_TIMEOUT
    LEAVE = STOPPED
    """The second Ctrl-C, the end of the grace period, engines that are gone, or the end of the last round."""
    CANCELLED = auto()
    """The player stopped as it was asked to; `UNSEEN` if that was before the first step."""
    UNSEEN = auto()
    DONE = auto()
    """The player returned or raised, or is about to record the end itself."""
    NO_REPLAY = REPLAY_DIFFERS
    ENGINE_ERROR = auto()
    ENGINE_GONE = auto()
    LOSE = auto()
    DATA_REFUSED = auto()
    """No table holds the data, or a template cannot write it."""
    ERROR = auto()
    """Any other fault of the environment, the agent or the policy."""
    RETRY = auto()
    """The attempt is recorded, and another may follow."""
    RECORDED = auto()
    """The last attempt is recorded."""


Action = Literal["", "start", "cancel", "failed", "aborted", "truncated", "again", "count", "stop all"]
"""What the scheduler does: start the rollout's task; ask its player to stop; end its attempt with this status; begin
its next attempt; count it, because no attempt follows; or leave all rollouts to the next process."""

TRANSITIONS: dict[tuple[State, Event], tuple[State, Action]] = {
    (State.QUEUED, Event.PERMIT): (State.ADMITTED, "start"),
    (State.QUEUED, Event.ENOUGH): (State.LEFT_OUT, "count"),
    (State.QUEUED, Event.STOP): (State.UNFINISHED, ""),
    (State.ADMITTED, Event.BEGIN): (State.PLAYING, ""),
    (State.ADMITTED, Event.ENOUGH): (State.ENDING, "aborted"),
    (State.ADMITTED, Event.DIFFER): (State.ENDING, "failed"),
    (State.ADMITTED, Event.LEAVE): (State.UNFINISHED, ""),
    (State.PLAYING, Event.ENOUGH): (State.CUT_SURPLUS, "cancel"),
    (State.PLAYING, Event.DIFFER): (State.CUT_START, "cancel"),
    (State.PLAYING, Event.TIMEOUT): (State.CUT_TIMEOUT, "cancel"),
    (State.PLAYING, Event.LEAVE): (State.CUT_STOPPED, "cancel"),
    (State.CUT_SURPLUS, Event.UNSEEN): (State.LEFT_OUT, "count"),
    (State.CUT_SURPLUS, Event.CANCELLED): (State.ENDING, "aborted"),
    (State.CUT_START, Event.CANCELLED): (State.ENDING, "failed"),
    (State.CUT_TIMEOUT, Event.CANCELLED): (State.ENDING, "truncated"),
    (State.CUT_STOPPED, Event.CANCELLED): (State.UNFINISHED, ""),
    # A player that was asked to stop may return an ending all the same. It counts like any other.
    **{(state, Event.DONE): (State.ENDING, "") for state in (State.PLAYING, *sorted(CUT), State.ENDING)},
    # The player raised, or its siblings do not need what it returned.
    **{(State.ENDING, event): (State.ENDING, "aborted") for event in (Event.ENOUGH, Event.NO_REPLAY)},
    **{
        (State.ENDING, event): (State.ENDING, "failed")
        for event in (Event.DIFFER, Event.ENGINE_ERROR, Event.DATA_REFUSED, Event.ERROR)
    },
    (State.ENDING, Event.ENGINE_GONE): (State.UNFINISHED, "stop all"),
    (State.ENDING, Event.LOSE): (State.LOST, "count"),
    (State.ENDING, Event.RETRY): (State.ADMITTED, "again"),
    (State.ENDING, Event.RECORDED): (State.ENDED, "count"),
}
"""(state, event) -> (next state, action). No other pair is legal: looking it up raises KeyError."""


FINISHED = ("completed", "truncated")
"""`status` of rollouts that were played to their end."""


class Siblings(msgspec.Struct, kw_only=True):
    """A group in play."""

    group: Group
    task: Task
    total: int
    """Rollouts that will end, with or without success."""
    expected: int | None = None
    """Group size that credit will see."""
    enough: int | None = None
    """Rollouts that must finish; running ones are then surplus. None: all are played to their end."""
    start: GroupStart | None = None
    """How the group starts, once known."""
    members: list["ScheduledRollout"] = []
    """Rollouts that this process plays."""
    ended: int = 0
    finished: set[int] = msgspec.field(default_factory=set)
    """Indexes of the rollouts that were played to their end."""
    unnamed: list[Callable[[], None]] = []
    """Callbacks that record failures of unopened environments, once the task's name is known."""
    returns: list[float] = []
    """Returns of rollouts that finished in this process."""
    broken: str | None = None
    """Why the rewards of the group cannot be compared."""

    @property
    def is_full(self) -> bool:
        """Whether the running rollouts are surplus."""
        return self.enough is not None and len(self.finished) >= self.enough

    def finish(self, rollout: int, status: str) -> None:
        """Note that a rollout ended with `status`, before it is on disk, so that the next decision sees it."""
        if status in FINISHED:
            self.finished.add(rollout)
        else:
            self.finished.discard(rollout)

    def check(self, record: EpisodeRecord) -> None:
        """Compare a rollout's start with its siblings. Raises StartError."""
        start = compute_start(record)
        if self.start is None:
            self.start = start
        elif start.hash != self.start.hash:
            hashes = ids.to_text(start.hash), ids.to_text(self.start.hash)
            self.broken = (
                f"task {record.task_id!r} (seed {self.group.seed}) started differently in rollout "
                f"{record.rollout_index} of round {self.group.number}: the hash of its first messages and tools is "
                f"{hashes[0]}, and that of its siblings {hashes[1]}; their rewards cannot be compared. The "
                "environment's `reset` must answer equal tasks equally, in every process"
            )
            raise StartError(self.broken)


@dataclass(eq=False, slots=True)
class ScheduledRollout:
    """A rollout that this process plays: its state and what belongs to it. It joins its siblings."""

    slot: Slot
    siblings: Siblings
    attempt: int = 0
    opened: OpenRollout | None = None
    """Its unfinished episode of an earlier process."""
    state: State = State.QUEUED
    sums: StepTotals = field(default_factory=StepTotals)
    """Totals of its newest attempt."""
    ending: Ending = field(default_factory=Ending)
    """How its newest attempt ended, once it has."""

    def __post_init__(self) -> None:
        self.siblings.members.append(self)


def build_group(plan: RoundPlan, task: Task, keep: Keep, starts: Mapping[Group, GroupStart]) -> Siblings:
    """Build the group of a task in a round."""
    group = Group(plan.round, task.seed)
    return Siblings(
        group=group,
        task=task,
        total=plan.siblings,
        expected=plan.siblings if keep == "all" else plan.group_size,
        enough=plan.group_size if keep == "first" else None,
        start=starts.get(group),
    )


def list_carried(opened: Iterable[OpenRollout], tasks: Mapping[int, Task]) -> list[ScheduledRollout]:
    """Return unfinished rollouts of earlier rounds, which the current round does not wait for.

    Args:
        opened: their unfinished episodes.
        tasks: tasks by seed.
    """
    groups: dict[Group, Siblings] = {}
    todo: list[ScheduledRollout] = []
    for opened_rollout in opened:
        group = opened_rollout.slot.group
        if group not in groups:
            expected = opened_rollout.record.expected_group_size
            groups[group] = Siblings(
                group=group,
                task=tasks[group.seed],
                total=0,
                expected=expected,
                start=compute_start(opened_rollout.record),
            )
        groups[group].total += 1
        todo.append(ScheduledRollout(opened_rollout.slot, groups[group], opened_rollout.record.attempt, opened_rollout))
    return todo


def list_missing(
    siblings: Siblings, attempts: Mapping[Slot, RecordedAttempt], opened: Mapping[Slot, OpenRollout], retries: int
) -> list[ScheduledRollout]:
    """Return the missing rollouts of a group, unfinished ones first, and note the finished ones in it.

    Args:
        siblings: the group.
        attempts: newest attempts in the lake.
        opened: unfinished episodes of earlier processes.
        retries: attempts after a failure.
    """
    going: list[ScheduledRollout] = []
    fresh: list[ScheduledRollout] = []
    for number in range(siblings.total):
        slot = Slot(siblings.group, number)
        attempt, opened_rollout = attempts.get(slot), opened.get(slot)
        if opened_rollout is not None:
            siblings.start = siblings.start or compute_start(opened_rollout.record)
            going.append(ScheduledRollout(slot, siblings, opened_rollout.record.attempt, opened_rollout))
        elif attempt is None:
            fresh.append(ScheduledRollout(slot, siblings))
        elif attempt.is_over(retries):
            siblings.finish(number, attempt.status)
            siblings.ended += 1
        else:
            fresh.append(ScheduledRollout(slot, siblings, attempt.attempt + 1))
    return going + fresh
