"""The scheduler: many rollouts in flight, their attempts, their siblings, and how it stops.

Each rollout is a task of one `asyncio.TaskGroup`. Nothing waits for the slowest: rollouts begin as others end, and
those that are carried over run on while the next round begins.
"""

import asyncio
from collections.abc import Iterable, Mapping
from functools import partial
from math import isfinite
from types import TracebackType
from typing import Literal, Self

import msgspec

from lake.errors import DataRefusedError, TrajlakeError
from lake.live.sink import told
from lake.records import EpisodeRecord
from pipelines.collect.engines import EngineError, EngineGoneError
from pipelines.collect.environments import Outcome, Task
from pipelines.collect.episode_records import begun, rollout_seed
from pipelines.collect.manager.figures import Figures
from pipelines.collect.manager.rounds import REPLAY_DIFFERS, STARTS_DIFFER, UNOPENED, Group, Plan, Played, Slot, Start
from pipelines.collect.manager.siblings import FINISHED, Keep, Siblings
from pipelines.collect.manager.store import Opened, Recording, Store
from pipelines.collect.manager.todo import Todo, carried, missing, siblings_of
from pipelines.collect.players import EPISODE_TIMEOUT, SURPLUS, Ending, Player, ReplayError, Rollout, StartError
from pipelines.collect.policies import PolicyCard
from pipelines.collect.user_code import FAULTS, is_cancellation

_LOOK_SECONDS = 0.05
Why = Literal["surplus", "starts_differ", "stopped", "episode_timeout"]
"""Why a running rollout is interrupted."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """How rollouts are played."""

    keep: Keep = "all"
    carry_over: bool = False
    parallel: int = 256
    retries: int = 1
    episode_seconds: float | None = None
    grace: float = 60.0
    """Seconds that rollouts may go on after the first Ctrl-C."""


class Scheduler:
    """Plays rounds with one player. A context: leaving it interrupts what still runs, which stays open.

    Args:
        run: the run's name.
        seed: of the samples.
        tasks: all that the run is about, by their seeds.
        player: who plays; closing it is left to its owner.
        store: where it is kept.
        limits: how.
    """

    def __init__(
        self, run: str, seed: int, tasks: Mapping[int, Task], player: Player, store: Store, limits: Limits
    ) -> None:
        self.run, self.player, self.store = run, player, store
        self._seed, self._of, self._limits = seed, tasks, limits
        self._permits = asyncio.Semaphore(limits.parallel)
        self._admitted = 0
        """Rollouts that have a permit."""
        self._is_beginning = False
        self._tasks = asyncio.TaskGroup()
        self._running: dict[Slot, asyncio.Task[None]] = {}
        self._why: dict[Slot, Why] = {}
        self._playing: set[Slot] = set()
        """Rollouts that can be interrupted: begun, and not ended and waiting for the disk."""
        self._changed = asyncio.Event()
        self.figures = Figures()
        """Of the round that is played."""
        self._groups: list[Siblings] = []
        """Of that round."""
        self.stopped_by: str | Exception | None = None
        """Why nothing new begins."""
        self._ended: set[Slot] = set()
        """Rollouts of which nothing more is tried."""
        self.lost_by: TrajlakeError | None = None
        """What became of the newest rollout that such a player could not record."""
        self.broken: list[str] = []
        """Groups that began differently."""

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()
        try:
            await self._tasks.__aexit__(kind, error, trace)
        except BaseExceptionGroup as group:
            # Of several faults that came at once the first is told; they are alike.
            raise group.exceptions[0] from None

    def lost(self, plan: Plan, found: Mapping[Slot, Played]) -> int:
        """How many rollouts of a round have ended and the lake has not got, of what it has (`found`)."""
        own = [slot for slot in self._ended if slot.group.number == plan.round]
        return sum(slot not in found or not found[slot].is_over(self._limits.retries) for slot in own)

    @property
    def mean_return(self) -> float | None:
        """Of the groups of the round of which nothing is played any more; None if there is none.

        Short rollouts end first. Their mean alone would say another thing than that of the round.
        """
        returns = [value for one in self._groups if one.ended == one.total for value in one.returns]
        total = sum(returns)
        return total / len(returns) if returns and isfinite(total) else None

    @property
    def in_flight(self) -> int:
        """Rollouts that run."""
        return len(self._running)

    def stop(self, reason: str | Exception) -> None:
        """Begin nothing new; let run what runs, for the grace period."""
        if self.stopped_by is None:
            self.stopped_by = reason
            self._changed.set()
            asyncio.get_running_loop().call_later(self._limits.grace, self.abort)

    def abort(self) -> None:
        """Interrupt what runs; it stays open, for the next process."""
        self.store.is_leaving = True
        for slot in self._running:
            self._interrupt(slot, "stopped")

    async def play(
        self, plan: Plan, tasks: Iterable[Task], found: Mapping[Slot, Played], starts: Mapping[Group, Start]
    ) -> Figures:
        """Play a round until nothing of it is missing, or somebody stops it.

        Args:
            plan: the round.
            tasks: those of the round, in their order.
            found: what the lake has, of this round and of those whose rollouts were carried over.
            starts: how groups of the round began, where the lake knows.
        """
        groups = [siblings_of(plan, task, self._limits.keep, starts) for task in tasks]
        self._groups = groups
        self.figures = Figures(planned=sum(siblings.total for siblings in groups))
        self._ended.clear()
        began = asyncio.get_running_loop().time()
        opened = self._opened(found)
        if self.player.plays_together and self._forget_part(plan, groups, found, opened):
            found = {}
        todo = carried([one for slot, one in opened.items() if slot.group.number != plan.round], self._of)
        for siblings in groups:
            todo += missing(siblings, found, opened, self._limits.retries)
            self.figures.present += siblings.ended
        self.player.gather(self._is_filling)
        await self._begin(todo)
        while not self._is_over(groups):
            self._changed.clear()
            await self._changed.wait()
        self.figures.seconds = asyncio.get_running_loop().time() - began
        return self.figures

    def _forget_part(
        self, plan: Plan, groups: Iterable[Siblings], found: Mapping[Slot, Played], opened: dict[Slot, Opened]
    ) -> bool:
        """Whether a part of a round is there and the whole is played again; what was open of it is forgotten.

        What a model samples in this process depends, in the last bits of its logits, on the rollouts that it decides
        for at once. Played again as a whole, a rollout comes out as before, and one that is there is not written twice.
        Those that were carried over from earlier rounds stay open: no undisturbed run had played them otherwise.
        """
        slots = [Slot(one.group, number) for one in groups for number in range(plan.siblings)]
        over = [slot for slot in slots if slot in found and found[slot].is_over(self._limits.retries)]
        begun = [one for slot, one in opened.items() if slot.group.number == plan.round]
        if len(over) == len(slots) or not (over or begun):
            return False
        for one in begun:
            self.store.forget(one, "its round is played again as a whole")
            del opened[one.slot]
        return True

    def _is_filling(self, opened: int) -> bool:
        """Whether rollouts are about to open conversations, beside so many that are open."""
        return self._admitted > opened or (self._is_beginning and self._admitted < self._limits.parallel)

    def _is_over(self, groups: Iterable[Siblings]) -> bool:
        if self.stopped_by is not None:
            return not self._running
        does_carry = self._limits.carry_over
        return all(one.ended == one.total or (does_carry and one.is_full and not one.unwritten) for one in groups)

    def _opened(self, found: Mapping[Slot, Played]) -> dict[Slot, Opened]:
        """What earlier processes left open and is of use."""
        useful: dict[Slot, Opened] = {}
        for one in self.store.opened:
            known = found.get(one.slot)
            is_new = known is None or known.attempt < one.record.attempt
            if is_new and one.slot not in useful and one.slot.group.seed in self._of:
                useful[one.slot] = one
            else:
                self.store.forget(one, "recorded by now")
        self.store.opened = []
        return useful

    async def _begin(self, todo: Iterable[Todo]) -> None:
        """Begin rollouts as there is room for them."""
        self._is_beginning = True
        for one in todo:
            await self._permits.acquire()
            self._admitted += 1
            while self.stopped_by is None and not self.store.is_calm:
                await asyncio.sleep(_LOOK_SECONDS)
            if self.stopped_by is not None:
                self._leave()
                break
            if one.siblings.is_full and one.opened is None:
                self._leave()
                self._leave_out(one.siblings)
                continue
            self._running[one.slot] = self._tasks.create_task(self._play(one))
        self._is_beginning = False

    def _leave(self) -> None:
        """Make room for another rollout."""
        self._admitted -= 1
        self._permits.release()

    async def _play(self, todo: Todo) -> None:
        """One rollout, with its attempts."""
        try:
            while True:
                ending = await self._attempt(todo)
                if ending is None:
                    return
                is_last = not self._is_tried_again(todo, ending)
                self.figures.add(ending, is_last=is_last)
                if is_last:
                    if ending.status in FINISHED and ending.env_return is not None:
                        todo.siblings.returns.append(ending.env_return)
                    self._ended.add(todo.slot)
                    self._count(todo.siblings)
                    return
                todo.attempt += 1
                todo.opened = None
        finally:
            del self._running[todo.slot]
            self._playing.discard(todo.slot)
            self._why.pop(todo.slot, None)
            self._leave()
            self._changed.set()

    def _is_tried_again(self, todo: Todo, ending: Ending) -> bool:
        if self.stopped_by is not None or todo.siblings.is_closed:
            return False
        return not Played(todo.attempt, ending.status, ending.stop_reason).is_over(self._limits.retries)

    async def _attempt(self, todo: Todo) -> Ending | None:
        """Play and record one attempt; None if it is left out, or stays open."""
        slot, siblings = todo.slot, todo.siblings
        if self._why.get(slot) == "stopped":
            return None
        rollout = Rollout(
            run_id=self.run,
            task=siblings.task,
            rollout_index=slot.rollout,
            attempt=todo.attempt,
            collection_round=slot.group.number,
            expected_group_size=siblings.expected,
            seed=rollout_seed(self._seed, slot.group.number, slot.group.seed, slot.rollout, todo.attempt),
        )
        takes = partial(self._takes, slot, siblings)
        recording = Recording(self.store, partial(self._begins, siblings), takes, todo.opened)
        self.figures.resumed += todo.opened is not None
        ending = self._ended_already(siblings, recording)
        self._playing.add(slot)
        try:
            ending = ending or await self._played(rollout, recording, siblings)
            if ending is None:
                self._ended.add(slot)
                siblings.finish(slot.rollout, "failed")
                self._count(siblings)
                return None
        except asyncio.CancelledError:
            why = self._why.get(slot)
            if why is None:
                raise
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()
            if why == "stopped":
                return None
            if why == SURPLUS and not recording.count and not self.player.is_recorder:
                self._leave_out(siblings)
                return None
            if why == EPISODE_TIMEOUT:
                ending = recording.sums.ending("truncated", terminated=False, stop_reason=why)
            else:  # whoever made it superfluous may have got lost since
                aborted = recording.sums.ending("aborted", terminated=False, stop_reason=why)
                ending = self._ended_already(siblings, recording) or aborted
        if self.player.is_recorder:
            siblings.finish(slot.rollout, ending.status)  # which the proxy may have refused
            return ending
        if not takes(ending.status):
            ending = self._ended_already(siblings, recording) or ending
        await self._record(rollout, ending, recording, siblings)
        return ending

    def _takes(self, slot: Slot, siblings: Siblings, status: str) -> bool:
        """See `RolloutLog.takes`."""
        self._playing.discard(slot)
        does_carry = self._limits.carry_over
        if status in FINISHED and (siblings.broken is not None or (siblings.is_full and not does_carry)):
            return False
        siblings.finish(slot.rollout, status)
        if siblings.is_full and not does_carry:
            self._interrupt_siblings(slot, SURPLUS)
        return True

    async def _record(self, rollout: Rollout, ending: Ending, recording: Recording, siblings: Siblings) -> None:
        """Have a rollout that has ended on the disk; one whose task has no name yet waits for it."""
        has_name = recording.record is not None or rollout.task.name is not None or siblings.start is not None
        if not has_name:
            siblings.unnamed.append(lambda: recording.end(ending, _never_begun(rollout, siblings)))
            return
        siblings.unwritten += 1
        recording.end(ending, _never_begun(rollout, siblings))
        await self.store.synced()
        siblings.unwritten -= 1

    def _begins(self, siblings: Siblings, record: EpisodeRecord) -> None:
        """A rollout begins. Raises StartError: its siblings began otherwise."""
        siblings.check(record)
        self._record_unnamed(siblings)

    def _record_unnamed(self, siblings: Siblings) -> None:
        """Record failures that waited: it is known what the environment calls the task, or nobody is going to say."""
        for record in siblings.unnamed:
            record()
        siblings.unnamed.clear()

    def _ended_already(self, siblings: Siblings, recording: Recording) -> Ending | None:
        """How a rollout ends for its siblings' sake; None if it may go on."""
        if siblings.broken is not None:
            return recording.sums.ending("failed", stop_reason=STARTS_DIFFER, error=siblings.broken)
        if siblings.is_full and not self._limits.carry_over:
            return recording.sums.ending("aborted", terminated=False, stop_reason=SURPLUS)
        return None

    async def _played(self, rollout: Rollout, recording: Recording, siblings: Siblings) -> Ending | None:
        """Play; whatever goes wrong is an ending, too. None: whoever records it could not."""
        slot = Slot(siblings.group, rollout.rollout_index)
        sums, seconds = recording.sums, self._limits.episode_seconds
        loop = asyncio.get_running_loop()
        late = None if seconds is None else loop.call_later(seconds, self._interrupt, slot, EPISODE_TIMEOUT)
        try:
            return await self.player.play(rollout, recording)
        except StartError as error:
            self.broken.append(str(error))
            self._interrupt_siblings(slot, "starts_differ")
            return sums.ending("failed", stop_reason=STARTS_DIFFER, error=str(error))
        except ReplayError as error:
            return sums.ending("aborted", terminated=False, stop_reason=REPLAY_DIFFERS, error=str(error))
        except EngineGoneError as error:
            self._why.setdefault(slot, "stopped")
            self.stop(error)
            self.abort()
            raise asyncio.CancelledError from error
        except (EngineError, DataRefusedError) as error:  # no template writes what the task says: an image, say
            is_engines = isinstance(error, EngineError)
            if is_engines and self.player.is_recorder:
                self.lost_by = error
                return None
            return sums.ending(
                "failed", stop_reason="engine_error" if is_engines else "data_refused", error=told(error)
            )
        except TrajlakeError:
            raise  # of all rollouts: a package is not installed, the spool is closed
        except FAULTS as error:
            if is_cancellation(error):
                raise
            return sums.ending("failed", stop_reason="error", error=told(error))
        finally:
            if late is not None:
                late.cancel()

    def _leave_out(self, siblings: Siblings) -> None:
        self.figures.left_out += 1
        self._count(siblings)

    def _count(self, siblings: Siblings) -> None:
        """Nothing more is tried of one of them."""
        siblings.ended += 1
        if siblings.ended == siblings.total:
            self._record_unnamed(siblings)

    def _interrupt_siblings(self, own: Slot, why: Why) -> None:
        for slot in self._running:
            if slot.group == own.group and slot != own:
                self._interrupt(slot, why)

    def _interrupt(self, slot: Slot, why: Why) -> None:
        if slot not in self._why:
            self._why[slot] = why
            if slot in self._playing:
                self._running[slot].cancel(why)  # a player that records by itself says why


def _never_begun(rollout: Rollout, siblings: Siblings) -> EpisodeRecord:
    """What is recorded of a rollout whose environment did not open: in the group of those siblings that did."""
    seed = rollout.task.seed
    name = rollout.task.name or (f"seed {seed}" if siblings.start is None else siblings.start.task_id)
    return begun(rollout, Outcome(messages=[], task_id=name), PolicyCard(name=""), environment=UNOPENED, split=None)
