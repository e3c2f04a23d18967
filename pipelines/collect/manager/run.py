"""Collect a run: rounds, one `collect` job each, in this process or split among Ray tasks.

Finished episodes are delivered before the lake is queried for missing ones. So after a crash the same command plays
exactly the missing rollouts.

With Ray, each shard of a round is a separate manager with its own spool. If the machine of a shard dies, another task
plays the shard again: delivered rollouts stay, and the rest is played.
"""

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, Self

import msgspec
import polars as pl

import lake
from lake.care.pins import Claim
from lake.errors import LakeAccessError, TrajlakeError, WorkerLostError
from lake.execution.on_ray import RayExecutor
from lake.judgements.scores import ENV_RETURN
from lake.lake import Lake
from lake.live.delivery import DeliveryCounts
from lake.live.owners import spool_root
from lake.progress import ProgressStage, track
from lake.read.runs import describe_collection
from lake.read.text_table import count_noun
from lake.records import EpisodeRecord
from lake.write.jobs import Job
from pipelines.collect.engines import EngineGoneError
from pipelines.collect.environments import Task
from pipelines.collect.factory import build_player, load_record_filter
from pipelines.collect.manager.rounds import (
    KIND,
    NextRound,
    RoundPlan,
    find_next_round,
    read_attempts,
    read_starts,
    retract_broken,
)
from pipelines.collect.manager.scheduler import RolloutCounts, Scheduler
from pipelines.collect.manager.spool import FolderLock, RolloutSpool
from pipelines.collect.players import Player, StartError
from pipelines.collect.settings import PlayerOptions, RolloutLimits, RunSettings
from pipelines.collect.tasks import TaskSet
from pipelines.select import Selection, Status, TopQ, run_select

_log = logging.getLogger("trajlake")

INTERRUPTED = "Ctrl-C"
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SAID = (
    "stopping: running rollouts may finish; press Ctrl-C again to leave them for a later resume",
    "leaving running rollouts for a later resume; press Ctrl-C again to end this process at once",
    "ended at once; rollouts on disk can be resumed",
)


class Interrupts:
    """A context in which Ctrl-C and SIGTERM stop a scheduler; before one is set they raise KeyboardInterrupt.

    The first signal lets rollouts finish, the second leaves them open, the third ends the process. The handler is
    Python's and not the event loop's. Otherwise an environment that blocks the loop, or swallows its cancellation,
    would keep the process alive. Outside the main thread it does nothing.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._count = 0
        self._scheduler: Scheduler | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle_signal) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def reach(self, scheduler: Scheduler) -> None:
        """Stop this scheduler of the running loop from now on."""
        self._scheduler, self._loop = scheduler, asyncio.get_running_loop()

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        if self._scheduler is None or self._loop is None:
            raise KeyboardInterrupt
        self._count += 1
        with suppress(RuntimeError):  # the signal interrupted the output of a line
            self._say(_SAID[min(self._count, len(_SAID)) - 1])
        if self._count == len(_SAID):
            os._exit(128 + number)
        with suppress(RuntimeError):  # the loop has ended
            if self._count == 1:
                self._loop.call_soon_threadsafe(self._scheduler.stop, INTERRUPTED)
            else:
                self._loop.call_soon_threadsafe(self._scheduler.abort)


Say = Callable[[str], None]
_LOOK_SECONDS = 1.0
"""Interval of the progress, and of the check whether the run may continue."""
_FRUITLESS = 2
"""Maximum replays of a round in a row that bring no rollout into the lake."""


class StoppedError(TrajlakeError, RuntimeError):
    """A signal stopped the run, or its engines are gone.

    Args:
        reason: why it stopped.
        advice: how to resume; loops with their own rounds replace it.
    """

    def __init__(self, reason: str, advice: str = "") -> None:
        super().__init__(reason + advice)
        self.reason = reason


class CollectionReport(msgspec.Struct):
    """What a process collected."""

    figures: RolloutCounts
    delivered: DeliveryCounts
    rounds: int = 0
    """Rounds finished by this process."""
    dropped: int = 0
    """Episodes that `record_only` rejected."""


class Collection(msgspec.Struct, frozen=True, kw_only=True):
    """What to collect, and how."""

    run_settings: RunSettings
    limits: RolloutLimits
    rounds: int
    """Total rounds of the run."""
    settings: dict[str, Any] = {}
    """Settings of the player, stored in the jobs' parameters."""
    chooses_best: bool = True
    """With `keep = "best"`: select the best by return. A loop selects by its training score instead."""
    next_step: str | None = None
    """How carried-over rollouts are finished. None: by another run of the command."""

    @property
    def parameters(self) -> dict[str, Any]:
        """Parameters of the job of each round."""
        return {"limits": msgspec.to_builtins(self.limits), "player": self.settings}


def collect(
    lake: Lake,
    player: Player,
    tasks: TaskSet,
    collection: Collection,
    *,
    say: Say,
    record_only: Callable[[EpisodeRecord], bool] | None = None,
    lost: Callable[[], str | None] = lambda: None,
) -> CollectionReport:
    """Collect in this process until the run has the requested rounds.

    Args:
        lake: target lake.
        player: plays the rollouts; closed at the end.
        tasks: tasks of the run.
        collection: what to collect.
        say: called with a line per round.
        record_only: decides which finished episodes are recorded. Default: all.
        lost: polled for a reason to stop; None: continue.

    Raises:
        UsageError: another process collects the run, or it was collected from other tasks or with other settings.
        StartError: siblings started differently.
        StoppedError: Ctrl-C, or an engine is gone; all finished episodes are recorded.
    """
    run = collection.run_settings.run
    with (
        RolloutSpool(lake, run, record_only=record_only) as store,
        claim_run(lake, run, store.folder_id) as claim,
        Interrupts(say) as interrupts,
    ):
        collector = _Collector(
            lake=lake,
            player=player,
            tasks=tasks,
            collection=collection,
            store=store,
            outcome=CollectionReport(RolloutCounts(), store.counts),
            say=say,
            lost=lambda: claim.lost or lost(),
        )
        try:
            asyncio.run(collector.collect(interrupts))
        finally:
            collector.outcome.dropped = store.dropped
    return collector.outcome


@dataclass(frozen=True, kw_only=True)
class _Collector:
    """State of `collect`."""

    lake: Lake
    player: Player
    tasks: TaskSet
    collection: Collection
    store: RolloutSpool
    outcome: CollectionReport
    say: Say
    lost: Callable[[], str | None]

    async def collect(self, interrupts: Interrupts) -> None:
        """Play all rounds, then close the player."""
        run_settings = self.collection.run_settings
        try:
            await self.player.settle()
            async with Scheduler(
                run_settings.run, run_settings.seed, self.tasks.by_seed, self.player, self.store, self.collection.limits
            ) as scheduler:
                interrupts.reach(scheduler)
                try:
                    await self._rounds(scheduler)
                finally:
                    in_flight = scheduler.in_flight
            if in_flight:
                following = (
                    self.collection.next_step or f"run again with --rounds {self.collection.rounds + 1} to finish them"
                )
                self.say(f"{in_flight} rollouts are carried over; {following}")
        finally:
            await self.player.close()

    async def _rounds(self, scheduler: Scheduler) -> None:
        lake, collection = self.lake, self.collection
        while (
            planned := find_next_round(lake, self.tasks, collection.run_settings, collection.parameters)
        ).plan.round < collection.rounds:
            plan = planned.plan
            self.say(plan.title if planned.job_id is None else f"{plan.title}, unfinished")
            await self._round(scheduler, planned)
            self.outcome.rounds += 1
            if collection.limits.keep == "best" and collection.chooses_best:
                self.say(select_best(lake, collection.run_settings.run, plan))
            if scheduler.broken:
                raise StartError("; ".join(scheduler.broken))

    async def _round(self, scheduler: Scheduler, planned: NextRound) -> None:
        """Play one round as its job. Raises StoppedError: it is incomplete."""
        plan = planned.plan
        with open_job(self.lake, planned, self.collection) as job, track("collect", unit="episodes") as stage:
            watching = asyncio.create_task(self._watch(scheduler, stage))
            try:
                figures = await play_round(self.lake, scheduler, plan, plan.draw_tasks(self.tasks))
            finally:
                watching.cancel()
            stage.update(figures.ended, total=figures.planned)
            self.outcome.figures.merge(figures)
            if scheduler.stopped_by is not None:
                raise _build_stop_error(scheduler, figures)
            if retracted := retract_broken(self.lake, self.collection.run_settings.run):
                self.say(f"{count_noun(retracted, 'episode')} of groups that started differently are retracted")
            write_counts(job, plan, figures, {**self.player.count_work(), "carried": scheduler.in_flight})

    async def _watch(self, scheduler: Scheduler, stage: ProgressStage) -> None:
        """Report progress at intervals; stop if the run's claim or a required resource is lost."""
        meter = ProgressMeter(scheduler)
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            if (why := self.lost()) is not None:
                scheduler.stop(why)
                scheduler.abort()
            stage.update(scheduler.figures.ended, total=scheduler.figures.planned, note=meter.describe())


class ProgressMeter:
    """Describes the progress of a scheduler's round, with rates since the previous description."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._at, self._steps, self._tokens = time.monotonic(), 0, 0

    def describe(self) -> str:
        """Return the figures of the round, without the number of episodes."""
        scheduler, store = self._scheduler, self._scheduler.store
        figures, player = scheduler.figures, scheduler.player.count_work()
        now = time.monotonic()
        seconds = max(now - self._at, 1e-3)
        # The spool also counts steps of running rollouts; agents' steps are known only at their end.
        steps = store.steps or figures.steps
        tokens = int(player.get("tokens", store.tokens or figures.tokens))
        phrases = [
            f"{figures.failed} failed",
            f"{scheduler.in_flight} in flight",
            f"{(steps - self._steps) / seconds:,.0f} steps/s",
            f"{(tokens - self._tokens) / seconds:,.0f} tokens/s",
        ]
        if slots := player.get("slots"):
            phrases.append(f"engines {min(1.0, player.get('in_flight', 0.0) / slots):.0%} busy")
        if (mean_return := scheduler.mean_return) is not None:
            phrases.append(f"return {mean_return:.2f}")
        if (problem := store.problem or scheduler.player.problem) is not None:
            phrases.append(f"waiting: {problem}")
        self._at, self._steps, self._tokens = now, steps, tokens
        return ", ".join(phrases)


async def play_round(lake: Lake, scheduler: Scheduler, plan: RoundPlan, tasks: Sequence[Task]) -> RolloutCounts:
    """Play a round until the lake has every ended rollout, or the scheduler is stopped.

    A player that records its own rollouts can lose some (its proxy crashed). These are played again as the same
    attempt.

    Args:
        lake: queried for finished rollouts.
        scheduler: plays them.
        plan: the round.
        tasks: tasks of the round for this process.
    """
    run, player, store = scheduler.run, scheduler.player, scheduler.store
    total, fewest, fruitless = RolloutCounts(), len(tasks) * plan.siblings + 1, 0
    try:
        player.store_tokenizer(lake.snapshot().objects)
    except LakeAccessError as error:
        _log.warning("the viewer cannot show the text of the tokens of %s: %s", run, error)
    while True:
        snapshot = lake.snapshot()
        attempts = read_attempts(snapshot, run, [*store.carried, plan.round])
        figures = await scheduler.play(plan, tasks, attempts, read_starts(snapshot, run, plan.round))
        await asyncio.to_thread(store.flush)
        try:
            await player.settle()
        except EngineGoneError as error:
            scheduler.stop(error)
        if total.planned:
            figures.planned = figures.present = 0  # the first pass counted them
            total.left_out = 0  # they are left out again
        total.merge(figures)
        if scheduler.stopped_by is not None or not player.is_recorder:
            return total
        lost = scheduler.count_lost(read_attempts(lake.snapshot(), run, [plan.round]))
        if not lost:
            return total
        fruitless = 0 if lost < fewest else fruitless + 1
        fewest = min(fewest, lost)
        if fruitless == _FRUITLESS:
            why = scheduler.lost_by or "the table `rejects` may say why"
            scheduler.stop(f"{count_noun(lost, 'rollout')} of round {plan.round} cannot be recorded: {why}")
            return total


def claim_run(lake: Lake, run: str, folder_id: str) -> Claim:
    """Claim a run for the process that holds the folder's lock; a context. Raises UsageError."""
    return lake.claim(describe_collection(run), folder_id)


def open_job(lake: Lake, planned: NextRound, collection: Collection) -> Job:
    """Open the job of a round: a new one, or the unfinished one of an earlier process."""
    parameters = {"plan": msgspec.to_builtins(planned.plan), **collection.parameters}
    return lake.job(kind=KIND, run_id=collection.run_settings.run, parameters=parameters, job_id=planned.job_id)


def write_counts(job: Job, plan: RoundPlan, figures: RolloutCounts, player_metrics: dict[str, float]) -> None:
    """Write the counts of a round to its job, and its metrics by round number."""
    job.counts |= {"rows_in": figures.planned, "rows_out": figures.finished + figures.present} | {
        name: count for name, count in msgspec.to_builtins(figures).items() if count is not None
    }
    write_metrics(job, plan.round, figures.metrics(player_metrics))


def write_metrics(job: Job, step: int, metrics: Mapping[str, float | None]) -> None:
    """Write metrics of a job, by name, for one of its steps."""
    rows = {"step": [step] * len(metrics), "name": list(metrics), "value": list(metrics.values())}
    frame = pl.DataFrame(rows, schema={"step": pl.Int64, "name": pl.String, "value": pl.Float64})
    job.write("metrics", frame.with_columns(at=pl.lit(job.now())))


def build_best_selection(run: str, group_size: int) -> Selection:
    """Build the selection of the best `group_size` episodes of each group of a run."""
    best = TopQ(count=group_size, within="group")
    # The view `left_out_siblings` finds the selection by this name.
    return Selection(name=f"best-{run}", filters=(Status(), best))


def select_best(lake: Lake, run: str, plan: RoundPlan) -> str:
    """Select the best siblings of all groups of a run so far, and return a line about it."""
    selection = build_best_selection(run, plan.group_size)
    quoted = run.replace("'", "''")
    # Siblings are selected before any scorer runs, so the return decides.
    report = run_select(lake, selection, where=f"run_id = '{quoted}'", score=ENV_RETURN)
    return (
        f"selection {selection.name}: {report.kept_episodes} of {report.episodes} episodes are the best of their groups"
    )


def _build_stop_error(scheduler: Scheduler, figures: RolloutCounts) -> StoppedError:
    missing = figures.planned - figures.ended
    reason = scheduler.stopped_by
    how = "stopped" if reason == INTERRUPTED else str(reason).rstrip(".")
    rest = f"{missing} of {figures.planned} rollouts of the round are missing" if missing else "the round is complete"
    return StoppedError(f"{how}; all finished rollouts are recorded, {rest}", "; rerun the same command to resume")


class RoundShard(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a round that one Ray task plays."""

    number: int
    lake_uri: str
    plan: RoundPlan
    tasks: Sequence[Task]
    collection: Collection
    options: PlayerOptions
    record_only: str | None


class ShardReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a shard collected."""

    figures: RolloutCounts
    delivered: DeliveryCounts
    dropped: int
    broken: list[str]
    counts: dict[str, float]
    """The player's counts."""


def collect_with_ray(
    lk: Lake,
    options: PlayerOptions,
    tasks: TaskSet,
    collection: Collection,
    record_only: str | None,
    executor: RayExecutor,
    *,
    say: Say,
) -> CollectionReport:
    """Collect like `collect`, with the groups of each round split among Ray tasks.

    Args:
        lk: target lake; every machine must reach it.
        options: options of the player; every task builds one.
        tasks: tasks of the run.
        collection: what to collect.
        record_only: FILE:function or module:function; every machine needs it.
        executor: runs the tasks.
        say: called with a line per round.

    Raises:
        UsageError: see `collect`.
        StartError: siblings started differently.
        StoppedError: another process took over the run.
        WorkerLostError: tasks died repeatedly.
    """
    outcome, run = CollectionReport(RolloutCounts(), DeliveryCounts()), collection.run_settings.run
    with ExitStack() as stack:
        lock = FolderLock(spool_root(lk.uri, f"collect-{run}"), run)
        stack.callback(lock.release)
        claim = stack.enter_context(claim_run(lk, run, lock.folder_id))
        while (
            planned := find_next_round(lk, tasks, collection.run_settings, collection.parameters)
        ).plan.round < collection.rounds:
            if claim.lost is not None:
                raise StoppedError(claim.lost)
            plan = planned.plan
            say(f"{plan.title}, by {executor.workers} workers")
            drawn = plan.draw_tasks(tasks)
            task_lists = [drawn[number :: executor.workers] for number in range(min(executor.workers, len(drawn)))]
            shares = [
                RoundShard(
                    number=number,
                    lake_uri=lk.uri,
                    plan=plan,
                    tasks=part,
                    collection=collection,
                    options=options,
                    record_only=record_only,
                )
                for number, part in enumerate(task_lists)
            ]
            broken = _round(lk, planned, collection, executor, shares, outcome)
            if collection.limits.keep == "best":
                say(select_best(lk, run, plan))
            if broken:
                raise StartError("; ".join(broken))
    return outcome


def _round(
    lk: Lake,
    planned: NextRound,
    collection: Collection,
    executor: RayExecutor,
    shares: Sequence[RoundShard],
    outcome: CollectionReport,
) -> list[str]:
    """Play the shards of a round as its job, and return the groups that started differently."""
    figures, counts, broken = RolloutCounts(), dict[str, float](), list[str]()
    with open_job(lk, planned, collection) as job:
        began = time.monotonic()
        episodes = sum(len(share.tasks) for share in shares) * planned.plan.siblings
        with track("collect", episodes, "episodes") as stage:
            for shared in executor.map(play_shard, shares):
                figures.merge(shared.figures)
                outcome.dropped += shared.dropped
                outcome.delivered.rejected += shared.delivered.rejected
                broken += shared.broken
                for name, count in shared.counts.items():
                    counts[name] = counts.get(name, 0.0) + count
                stage.update(figures.ended)
        figures.seconds = time.monotonic() - began  # the shards ran concurrently
        outcome.figures.merge(figures)
        retract_broken(lk, collection.run_settings.run)
        write_counts(job, planned.plan, figures, counts)
    outcome.rounds += 1
    return broken


def play_shard(share: RoundShard) -> ShardReport:
    """Play a shard in a Ray task; another task may repeat it."""
    return asyncio.run(_play(share))


async def _play(share: RoundShard) -> ShardReport:
    run, plan = share.collection.run_settings.run, share.plan
    lk = lake.open(share.lake_uri)
    part = f"{run}-{share.number}"
    with RolloutSpool(lk, part, record_only=load_record_filter(share.record_only)) as store:
        player = build_player(share.options, share.lake_uri, part)
        try:
            await player.settle()
            of = {task.seed: task for task in share.tasks}
            async with Scheduler(run, plan.seed, of, player, store, share.collection.limits) as scheduler:
                figures = await play_round(lk, scheduler, plan, share.tasks)
                if scheduler.stopped_by is not None:
                    raise WorkerLostError(f"{scheduler.stopped_by}; rerun the same command to resume")
                return ShardReport(
                    figures=figures,
                    delivered=store.counts,
                    dropped=store.dropped,
                    broken=scheduler.broken,
                    counts=player.count_work(),
                )
        finally:
            await player.close()
