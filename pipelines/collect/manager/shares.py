"""A round over several machines: its groups are split among Ray tasks, each a manager of its own.

A share has a spool of its own where it runs and delivers to the same lake. A share whose machine dies is played again
by another one: what had been delivered is there, and the rest is played.
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import ExitStack

import msgspec

import lake
from lake.errors import WorkerLostError
from lake.execution.on_ray import RayExecutor
from lake.lake import Lake
from lake.live.delivery import Deliveries
from lake.live.places import root_of
from pipelines.collect.environments import Task
from pipelines.collect.manager.figures import Figures
from pipelines.collect.manager.folder_lock import FolderLock
from pipelines.collect.manager.rounds import Plan, Planned, next_round, retract_broken
from pipelines.collect.manager.run import (
    Collection,
    Outcome,
    Say,
    StoppedError,
    begun_job,
    claimed,
    keep_best,
    play_round,
    write_figures,
)
from pipelines.collect.manager.scheduler import Scheduler
from pipelines.collect.manager.store import Store
from pipelines.collect.players import StartError
from pipelines.collect.tasks import TaskSet
from pipelines.collect.wiring import PlayerOptions, player_of, recorded_only


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """What one Ray task plays."""

    number: int
    lake_uri: str
    plan: Plan
    tasks: Sequence[Task]
    what: Collection
    options: PlayerOptions
    record_only: str | None


class Shared(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a share."""

    figures: Figures
    delivered: Deliveries
    dropped: int
    broken: list[str]
    counts: dict[str, float]
    """The player's."""


def collect_with_ray(
    lk: Lake,
    options: PlayerOptions,
    tasks: TaskSet,
    what: Collection,
    record_only: str | None,
    executor: RayExecutor,
    *,
    say: Say,
) -> Outcome:
    """As `run.collect`, with the groups of each round split among Ray tasks.

    Args:
        lk: where to; every machine has to reach it.
        options: who plays; every task makes a player of its own.
        tasks: where rollouts begin.
        what: how many, and how.
        record_only: FILE:function or module:function, which every machine has.
        executor: runs the tasks.
        say: called with a line for each round.

    Raises:
        UsageError: as `run.collect`.
        StartError: siblings began differently.
        StoppedError: another process took the run over.
        WorkerLostError: tasks died again and again.
    """
    outcome, run = Outcome(Figures(), Deliveries()), what.wanted.run
    with ExitStack() as held:
        lock = FolderLock(root_of(lk.uri, f"collect-{run}"), run)
        held.callback(lock.release)
        claim = held.enter_context(claimed(lk, run, lock.place))
        while (planned := next_round(lk, tasks, what.wanted, what.parameters)).plan.round < what.rounds:
            if claim.lost is not None:
                raise StoppedError(claim.lost)
            plan = planned.plan
            say(f"{plan.title}, by {executor.workers} workers")
            parts = _parts(plan.drawn(tasks), executor.workers)
            shares = [
                Share(
                    number=number,
                    lake_uri=lk.uri,
                    plan=plan,
                    tasks=part,
                    what=what,
                    options=options,
                    record_only=record_only,
                )
                for number, part in enumerate(parts)
            ]
            broken = _round(lk, planned, what, executor, shares, outcome)
            if what.limits.keep == "best":
                say(keep_best(lk, run, plan))
            if broken:
                raise StartError("; ".join(broken))
    return outcome


def _round(
    lk: Lake, planned: Planned, what: Collection, executor: RayExecutor, shares: Sequence[Share], outcome: Outcome
) -> list[str]:
    """Have the shares of a round played, as its job; which groups began differently."""
    figures, counts, broken = Figures(), dict[str, float](), list[str]()
    with begun_job(lk, planned, what) as job:
        began = time.monotonic()
        for shared in executor.map(play_share, shares):
            figures.merge(shared.figures)
            outcome.dropped += shared.dropped
            outcome.delivered.rejected += shared.delivered.rejected
            broken += shared.broken
            for name, value in shared.counts.items():
                counts[name] = counts.get(name, 0.0) + value
        figures.seconds = time.monotonic() - began  # they ran at once
        outcome.figures.merge(figures)
        retract_broken(lk, what.wanted.run)
        write_figures(job, planned.plan, figures, counts)
    outcome.rounds += 1
    return broken


def _parts(tasks: Sequence[Task], count: int) -> list[Sequence[Task]]:
    """Tasks dealt out in turns; none of the parts is empty."""
    return [tasks[number::count] for number in range(min(count, len(tasks)))]


def play_share(share: Share) -> Shared:
    """What one Ray task does; it may be done again by another one."""
    return asyncio.run(_play(share))


async def _play(share: Share) -> Shared:
    run, plan = share.what.wanted.run, share.plan
    lk = lake.open(share.lake_uri)
    part = f"{run}-{share.number}"
    with Store(lk, part, record_only=recorded_only(share.record_only)) as store:
        player = player_of(share.options, share.lake_uri, part)
        try:
            await player.settle()
            of = {task.seed: task for task in share.tasks}
            async with Scheduler(run, plan.seed, of, player, store, share.what.limits) as scheduler:
                figures = await play_round(lk, scheduler, plan, share.tasks)
                if scheduler.stopped_by is not None:
                    raise WorkerLostError(f"{scheduler.stopped_by}; the same command goes on with what is missing")
                return Shared(
                    figures=figures,
                    delivered=store.counts,
                    dropped=store.dropped,
                    broken=scheduler.broken,
                    counts=player.figures(),
                )
        finally:
            await player.close()
