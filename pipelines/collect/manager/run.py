"""Collecting a run: rounds, one `collect` job each, until as many as are wanted are done.

What has ended is in the lake before it is asked what is missing, so that the same command, after a kill, plays what is
missing and nothing else.
"""

import asyncio
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import polars as pl

from lake.care.claims import Claim
from lake.errors import TrajlakeError
from lake.judgements.scores import ENV_RETURN
from lake.lake import Lake
from lake.live.delivery import Deliveries
from lake.read.text_table import counted
from lake.records import EpisodeRecord
from lake.write.jobs import Job
from pipelines.collect.environments import Task
from pipelines.collect.manager.figures import Figures, Meter
from pipelines.collect.manager.interrupts import INTERRUPTED, Interrupts
from pipelines.collect.manager.rounds import KIND, Plan, Planned, Wanted, next_round, played, retract_broken, starts
from pipelines.collect.manager.scheduler import Limits, Scheduler
from pipelines.collect.manager.store import Store
from pipelines.collect.players import Player, StartError
from pipelines.collect.tasks import TaskSet
from pipelines.select import Selection, Status, TopQ, run_select

Say = Callable[[str], None]
_LOOK_SECONDS = 1.0
"""Until it is asked again whether the run may go on."""
_FRUITLESS = 2
"""Times that a round is played again in a row although no rollout more got into the lake."""


class StoppedError(TrajlakeError, RuntimeError):
    """Somebody stopped it, or its engines are gone.

    Args:
        what: has happened.
        advice: how it goes on, which whoever collects in rounds of his own says otherwise.
    """

    def __init__(self, what: str, advice: str = "") -> None:
        super().__init__(what + advice)
        self.what = what


class Outcome(msgspec.Struct):
    """What a process collected."""

    figures: Figures
    delivered: Deliveries
    rounds: int = 0
    """Done by this process."""
    dropped: int = 0
    """Episodes that --record-only did not want."""


class Collection(msgspec.Struct, frozen=True, kw_only=True):
    """What is collected, and how."""

    wanted: Wanted
    limits: Limits
    rounds: int
    """That the run has in the end."""
    settings: dict[str, Any] = {}
    """Of the player: for the jobs' parameters."""
    chooses_best: bool = True
    """With `keep = "best"`: select the best by their return. A loop does it by the score that it trains on."""
    next_step: str | None = None
    """What becomes of rollouts that are carried over; None: another run of the command finishes them."""
    progress_seconds: float = msgspec.field(default_factory=lambda: 1.0 if sys.stderr.isatty() else 10.0)
    """Between two lines of progress: on a terminal each takes the place of the one before."""

    @property
    def parameters(self) -> dict[str, Any]:
        """Of the job of any of its rounds."""
        return {"limits": msgspec.to_builtins(self.limits), "player": self.settings}


def collect(
    lake: Lake,
    player: Player,
    tasks: TaskSet,
    what: Collection,
    *,
    say: Say,
    progress: Say,
    record_only: Callable[[EpisodeRecord], bool] | None = None,
    lost: Callable[[], str | None] = lambda: None,
) -> Outcome:
    """Collect in this process, until the run has as many rounds as are wanted.

    Args:
        lake: where to.
        player: who plays; it is closed at the end.
        tasks: where rollouts begin.
        what: how many, and how.
        say: called with a line for each round.
        progress: called with how far it is, every so often.
        record_only: which finished episodes are recorded; all of them unless given.
        lost: asked every so often why there is no going on (its caller may know); None: there is.

    Raises:
        UsageError: another process collects the run, or it was collected from other tasks or with other settings.
        StartError: siblings began differently.
        StoppedError: Ctrl-C, or an engine that is gone; all that has ended is recorded.
    """
    run = what.wanted.run
    with (
        Store(lake, run, record_only=record_only) as store,
        claimed(lake, run, store.place) as claim,
        Interrupts(say) as interrupts,
    ):
        collector = _Collector(
            lake=lake,
            player=player,
            tasks=tasks,
            what=what,
            store=store,
            outcome=Outcome(Figures(), store.counts),
            say=say,
            progress=progress,
            lost=lambda: claim.lost or lost(),
        )
        try:
            asyncio.run(collector.collect(interrupts))
        finally:
            collector.outcome.dropped = store.dropped
    return collector.outcome


@dataclass(frozen=True, kw_only=True)
class _Collector:
    """A run while this process collects it; see `collect`."""

    lake: Lake
    player: Player
    tasks: TaskSet
    what: Collection
    store: Store
    outcome: Outcome
    say: Say
    progress: Say
    lost: Callable[[], str | None]

    async def collect(self, interrupts: Interrupts) -> None:
        """Round after round, and at the end let go of the player."""
        wanted = self.what.wanted
        of = {task.seed: task for task in self.tasks.tasks}
        try:
            await self.player.settle()
            async with Scheduler(wanted.run, wanted.seed, of, self.player, self.store, self.what.limits) as scheduler:
                interrupts.reach(scheduler)
                watching = asyncio.create_task(self._watch(scheduler))
                try:
                    await self._rounds(scheduler)
                finally:
                    watching.cancel()
                    left = scheduler.in_flight
            if left:
                following = self.what.next_step or f"run again with --rounds {self.what.rounds + 1} to finish them"
                self.say(f"{left} rollouts are carried over; {following}")
        finally:
            await self.player.close()

    async def _rounds(self, scheduler: Scheduler) -> None:
        lake, what = self.lake, self.what
        while (planned := next_round(lake, self.tasks, what.wanted, what.parameters)).plan.round < what.rounds:
            plan = planned.plan
            self.say(plan.title if planned.job_id is None else f"{plan.title}, which is not done")
            await self._round(scheduler, planned)
            self.outcome.rounds += 1
            if what.limits.keep == "best" and what.chooses_best:
                self.say(keep_best(lake, what.wanted.run, plan))
            if scheduler.broken:
                raise StartError("; ".join(scheduler.broken))

    async def _round(self, scheduler: Scheduler, planned: Planned) -> None:
        """One round, as its job. Raises StoppedError: it is not whole."""
        plan = planned.plan
        with begun_job(self.lake, planned, self.what) as job:
            figures = await play_round(self.lake, scheduler, plan, plan.drawn(self.tasks))
            self.outcome.figures.merge(figures)
            if scheduler.stopped_by is not None:
                raise _stopped(scheduler, figures)
            if retracted := retract_broken(self.lake, self.what.wanted.run):
                self.say(f"{counted(retracted, 'episode')} of groups that began differently are retracted")
            write_figures(job, plan, figures, {**self.player.figures(), "carried": scheduler.in_flight})

    async def _watch(self, scheduler: Scheduler) -> None:
        """Tell every so often how far it is; stop once the run is somebody else's, or what it needs is given up."""
        meter, seconds = Meter(), self.what.progress_seconds
        said = time.monotonic()
        while True:
            await asyncio.sleep(min(seconds, _LOOK_SECONDS))
            if (why := self.lost()) is not None:
                scheduler.stop(why)
                scheduler.abort()
            if time.monotonic() - said < seconds:
                continue
            said = time.monotonic()
            problem = self.store.problem or self.player.problem
            # The store has the steps of running rollouts, too; agents' steps are known when they have ended.
            figures, player = scheduler.figures, self.player.figures()
            line = meter.line(
                figures,
                steps=self.store.steps or figures.steps,
                tokens=int(player.get("tokens", self.store.tokens or figures.tokens)),
                running=scheduler.in_flight,
                mean_return=scheduler.mean_return,
                player=player,
                problem=problem,
            )
            self.progress(line)


async def play_round(lake: Lake, scheduler: Scheduler, plan: Plan, tasks: Sequence[Task]) -> Figures:
    """Play a round until the lake has a row of each rollout that ended, or the scheduler is stopped.

    A player that records by itself may lose rollouts (its proxy was killed): what the lake then lacks is played again,
    as the same attempt.

    Args:
        lake: what was played is asked of it.
        scheduler: plays.
        plan: the round.
        tasks: those of the round that are played here.
    """
    run, player, store = scheduler.run, scheduler.player, scheduler.store
    total, fewest, fruitless = Figures(), len(tasks) * plan.siblings + 1, 0
    while True:
        snapshot = lake.snapshot()
        found = played(snapshot, run, [*store.carried, plan.round])
        figures = await scheduler.play(plan, tasks, found, starts(snapshot, run, plan.round))
        await asyncio.to_thread(store.flush)
        await player.settle()
        if total.planned:
            figures.planned = figures.present = 0  # the first pass counted them
            total.left_out = 0  # they are left out once more
        total.merge(figures)
        if scheduler.stopped_by is not None or not player.is_recorder:
            return total
        lost = scheduler.lost(plan, played(lake.snapshot(), run, [plan.round]))
        if not lost:
            return total
        fruitless = 0 if lost < fewest else fruitless + 1
        fewest = min(fewest, lost)
        if fruitless == _FRUITLESS:
            why = scheduler.lost_by or "the table `rejects` may say why"
            scheduler.stop(f"{counted(lost, 'rollout')} of round {plan.round} cannot be recorded: {why}")
            return total


def claimed(lake: Lake, run: str, place: str) -> Claim:
    """The right to collect a run, for a process that holds the lock of `place`; a context. Raises UsageError."""
    return lake.claim(f"run {run!r} is being collected into this lake", place)


def begun_job(lake: Lake, planned: Planned, what: Collection) -> Job:
    """The job of a round: another one, or the one that an earlier process did not end."""
    parameters = {"plan": msgspec.to_builtins(planned.plan), **what.parameters}
    return lake.job(kind=KIND, run_id=what.wanted.run, parameters=parameters, job_id=planned.job_id)


def write_figures(job: Job, plan: Plan, figures: Figures, more: dict[str, float]) -> None:
    """What a round came to: counts of its job, and metrics by the round's number."""
    job.counts |= {"rows_in": figures.planned, "rows_out": figures.finished + figures.present} | {
        name: value for name, value in msgspec.to_builtins(figures).items() if value is not None
    }
    write_metrics(job, plan.round, figures.metrics(more))


def write_metrics(job: Job, step: int, metrics: Mapping[str, float | None]) -> None:
    """Metrics of a job, by name, for one of its steps."""
    rows = {"step": [step] * len(metrics), "name": list(metrics), "value": list(metrics.values())}
    frame = pl.DataFrame(rows, schema={"step": pl.Int64, "name": pl.String, "value": pl.Float64})
    job.write("metrics", frame.with_columns(at=pl.lit(job.now())))


def best_siblings(run: str, group_size: int) -> Selection:
    """The selection of the best of each group of a run, so many."""
    best = TopQ(count=group_size, within="group")
    # The view `left_out_siblings` finds the selection by this name.
    return Selection(name=f"best-{run}", filters=(Status(), best))


def keep_best(lake: Lake, run: str, plan: Plan) -> str:
    """Select the best siblings of all groups of a run so far; what was chosen, as a line."""
    chosen = best_siblings(run, plan.group_size)
    quoted = run.replace("'", "''")
    # Siblings are chosen as they come, before any scorer has seen them.
    report = run_select(lake, chosen, where=f"run_id = '{quoted}'", score=ENV_RETURN)
    return f"selection {chosen.name}: {report.kept} of {report.episodes} episodes are the best of their groups"


def _stopped(scheduler: Scheduler, figures: Figures) -> StoppedError:
    missing = figures.planned - figures.ended
    reason = scheduler.stopped_by
    how = "stopped" if reason == INTERRUPTED else str(reason).rstrip(".")
    rest = f"{missing} of {figures.planned} rollouts of the round are missing" if missing else "the round is whole"
    return StoppedError(f"{how}; all that has ended is recorded, {rest}", ": the same command goes on")
