"""The scheduler: rollouts in flight, their attempts, siblings and counts, and how it stops.

Each rollout is a task of one `asyncio.TaskGroup`. No rollout waits for the slowest: one starts when another ends, and
carried-over rollouts keep running while the next round starts.
"""

import asyncio
import math
import time
from collections.abc import Iterable, Mapping
from functools import partial
from math import isfinite
from types import TracebackType
from typing import Literal, Self

import msgspec

from lake.errors import DataRefusedError, TrajlakeError
from lake.live.sink import format_exception
from lake.read.text_table import count_noun
from lake.records import EpisodeRecord
from pipelines.collect.engines import EngineError, EngineGoneError
from pipelines.collect.environments import Outcome, Task
from pipelines.collect.manager.rounds import (
    FINISHED,
    REPLAY_DIFFERS,
    STARTS_DIFFER,
    UNOPENED,
    Group,
    GroupStart,
    Keep,
    OpenRollout,
    QueuedRollout,
    RecordedAttempt,
    RoundPlan,
    Siblings,
    Slot,
    build_group,
    list_carried,
    list_missing,
)
from pipelines.collect.manager.spool import RolloutRecording, RolloutSpool
from pipelines.collect.players import (
    EPISODE_TIMEOUT,
    SURPLUS,
    Ending,
    Player,
    ReplayError,
    Rollout,
    StartError,
    build_episode,
    derive_rollout_seed,
)
from pipelines.collect.policies import PolicyCard
from pipelines.collect.user_code import FAULTS, is_cancellation


class RolloutCounts(msgspec.Struct):
    """Counts of a round, or of all rounds of a process."""

    planned: int = 0
    present: int = 0
    """Rollouts that had ended before."""
    finished: int = 0
    """Completed or truncated rollouts."""
    failed: int = 0
    """Rollouts whose last attempt failed."""
    aborted: int = 0
    retried: int = 0
    """Attempts that failed, or could not resume, and were retried."""
    left_out: int = 0
    """Rollouts not played because enough siblings had finished."""
    resumed: int = 0
    """Rollouts of an earlier process that resumed."""
    steps: int = 0
    tokens: int = 0
    """Sampled tokens."""
    rewarded: int = 0
    """Finished rollouts with a return."""
    returns: float = 0.0
    """Sum of these returns."""
    seconds: float = 0.0
    first_error: str | None = None

    def add(self, ending: Ending, *, is_last: bool) -> None:
        """Count an ended attempt; `is_last`: no retry follows."""
        self.steps += ending.num_steps
        self.tokens += ending.completion_tokens or 0
        if ending.error is not None and self.first_error is None:
            self.first_error = ending.error
        if not is_last:
            self.retried += 1
        elif ending.status in FINISHED:
            self.finished += 1
            if ending.env_return is not None:
                self.rewarded += 1
                self.returns += ending.env_return
        elif ending.status == "failed":
            self.failed += 1
        else:
            self.aborted += 1

    def merge(self, counts: "RolloutCounts") -> None:
        """Add the counts of another round or process."""
        for name in self.__struct_fields__:
            if name != "first_error":
                setattr(self, name, getattr(self, name) + getattr(counts, name))
        self.first_error = self.first_error or counts.first_error

    @property
    def ended(self) -> int:
        """Rollouts without further attempts, including those that had ended before."""
        return self.present + self.finished + self.failed + self.aborted + self.left_out

    @property
    def mean_return(self) -> float | None:
        """Mean return of finished rollouts; None if none was rewarded, or the sum overflows."""
        return self.returns / self.rewarded if self.rewarded and math.isfinite(self.returns) else None

    def metrics(self, player_metrics: Mapping[str, float]) -> dict[str, float | None]:
        """Return the rows for the table `metrics`."""
        metrics = {
            name: float(getattr(self, name))
            for name in ("finished", "failed", "aborted", "retried", "resumed", "steps", "tokens", "seconds")
        }
        return {
            **metrics,
            "return": self.mean_return,
            **{name: float(number) for name, number in player_metrics.items()},
        }

    def summary(self) -> str:
        """Return the summary line."""
        phrases = [
            f"{count_noun(self.finished, 'episode')} finished",
            f"{self.failed} failed",
            f"{self.aborted} aborted",
        ]
        for name, words in (("present", "there before"), ("retried", "tried again"), ("left_out", "superfluous")):
            if value := getattr(self, name):
                phrases.append(f"{value} {words}")
        phrases.append(f"{count_noun(self.steps, 'step')}, {count_noun(self.tokens, 'token')} in {self.seconds:.0f} s")
        if self.mean_return is not None:
            phrases.append(f"return {self.mean_return:.2f}")
        return ", ".join(phrases)


class ProgressMeter:
    """Computes rates between two progress lines."""

    def __init__(self) -> None:
        self._at, self._steps, self._tokens = time.monotonic(), 0, 0

    def line(
        self,
        figures: RolloutCounts,
        *,
        steps: int,
        tokens: int,
        running: int,
        mean_return: float | None,
        player: Mapping[str, float],
        problem: str | None,
    ) -> str:
        """Return a progress line of a round.

        Args:
            figures: counts of the round.
            steps: decisions of this process so far, including running rollouts.
            tokens: tokens sampled by this process so far, including running rollouts.
            running: rollouts in flight.
            mean_return: mean return of complete groups; None before the first.
            player: `Player.figures`.
            problem: why nothing progresses, if so.
        """
        now = time.monotonic()
        seconds = max(now - self._at, 1e-3)
        phrases = [
            f"{figures.ended}/{figures.planned} episodes",
            f"{figures.failed} failed",
            f"{running} in flight",
            f"{(steps - self._steps) / seconds:,.0f} steps/s",
            f"{(tokens - self._tokens) / seconds:,.0f} tokens/s",
        ]
        if slots := player.get("slots"):
            phrases.append(f"engines {min(1.0, player.get('in_flight', 0.0) / slots):.0%} busy")
        if mean_return is not None:
            phrases.append(f"return {mean_return:.2f}")
        if problem is not None:
            phrases.append(f"waiting: {problem}")
        self._at, self._steps, self._tokens = now, steps, tokens
        return ", ".join(phrases)


_LOOK_SECONDS = 0.05
InterruptReason = Literal["surplus", "starts_differ", "stopped", "episode_timeout"]
"""Why a running rollout is interrupted."""


class RolloutLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of how rollouts are played."""

    keep: Keep = "all"
    carry_over: bool = False
    parallel: int = 256
    retries: int = 1
    episode_seconds: float | None = None
    grace: float = 60.0
    """Seconds that rollouts may continue after the first Ctrl-C."""


class Scheduler:
    """Plays rounds with one player. A context: leaving it interrupts running rollouts, which stay open.

    Args:
        run: name of the run.
        seed: seed of the samples.
        tasks: all tasks of the run, by seed.
        player: plays the rollouts; its owner closes it.
        store: spool of the rollouts.
        limits: limits of the rollouts.
    """

    def __init__(
        self, run: str, seed: int, tasks: Mapping[int, Task], player: Player, store: RolloutSpool, limits: RolloutLimits
    ) -> None:
        self.run, self.player, self.store = run, player, store
        self._seed, self._tasks_by_seed, self._limits = seed, tasks, limits
        self._permits = asyncio.Semaphore(limits.parallel)
        self._admitted = 0
        """Rollouts that have a permit."""
        self._is_beginning = False
        self._tasks = asyncio.TaskGroup()
        self._running: dict[Slot, asyncio.Task[None]] = {}
        self._reasons: dict[Slot, InterruptReason] = {}
        self._playing: set[Slot] = set()
        """Rollouts that can be interrupted: started, and not waiting for the disk."""
        self._changed = asyncio.Event()
        self.figures = RolloutCounts()
        """Counts of the current round."""
        self._groups: list[Siblings] = []
        """Groups of the current round."""
        self.stopped_by: str | Exception | None = None
        """Why no new rollout starts."""
        self._ended_slots: set[Slot] = set()
        """Rollouts without further attempts."""
        self.lost_by: TrajlakeError | None = None
        """Last error of a player that records its own rollouts."""
        self.broken: list[str] = []
        """Messages about groups that started differently."""

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
            # Concurrent faults have the same cause, so raise only the first.
            raise group.exceptions[0] from None

    def count_lost(self, plan: RoundPlan, attempts: Mapping[Slot, RecordedAttempt]) -> int:
        """Count ended rollouts of a round that are missing from the lake's `attempts`."""
        slots = [slot for slot in self._ended_slots if slot.group.number == plan.round]
        return sum(slot not in attempts or not attempts[slot].is_over(self._limits.retries) for slot in slots)

    @property
    def mean_return(self) -> float | None:
        """Mean return of the round's complete groups; None before the first.

        Short rollouts end first, so the mean over rollouts alone would be biased.
        """
        returns = [
            episode_return for group in self._groups if group.ended == group.total for episode_return in group.returns
        ]
        total = sum(returns)
        return total / len(returns) if returns and isfinite(total) else None

    @property
    def in_flight(self) -> int:
        """Number of running rollouts."""
        return len(self._running)

    def stop(self, reason: str | Exception) -> None:
        """Start nothing new; let running rollouts finish within the grace period."""
        if self.stopped_by is None:
            self.stopped_by = reason
            self._changed.set()
            asyncio.get_running_loop().call_later(self._limits.grace, self.abort)

    def abort(self) -> None:
        """Interrupt running rollouts; they stay open for the next process."""
        self.store.is_leaving = True
        for slot in self._running:
            self._interrupt(slot, "stopped")

    async def play(
        self,
        plan: RoundPlan,
        tasks: Iterable[Task],
        attempts: Mapping[Slot, RecordedAttempt],
        starts: Mapping[Group, GroupStart],
    ) -> RolloutCounts:
        """Play a round until none of its rollouts is missing, or the scheduler is stopped.

        Args:
            plan: the round.
            tasks: tasks of the round, in order.
            attempts: newest attempts in the lake, of this round and of rounds with carried-over rollouts.
            starts: starts of the round's groups, where known.
        """
        groups = [build_group(plan, task, self._limits.keep, starts) for task in tasks]
        self._groups = groups
        self.figures = RolloutCounts(planned=sum(siblings.total for siblings in groups))
        self._ended_slots.clear()
        began = asyncio.get_running_loop().time()
        opened = self._select_open(attempts)
        if self.player.plays_together and self._forget_partial_round(plan, groups, attempts, opened):
            attempts = {}
        todo = list_carried(
            [rollout for slot, rollout in opened.items() if slot.group.number != plan.round], self._tasks_by_seed
        )
        for siblings in groups:
            todo += list_missing(siblings, attempts, opened, self._limits.retries)
            self.figures.present += siblings.ended
        self.player.gather(self._is_filling)
        await self._begin(todo)
        while not self._is_over(groups):
            self._changed.clear()
            await self._changed.wait()
        self.figures.seconds = asyncio.get_running_loop().time() - began
        return self.figures

    def _forget_partial_round(
        self,
        plan: RoundPlan,
        groups: Iterable[Siblings],
        attempts: Mapping[Slot, RecordedAttempt],
        opened: dict[Slot, OpenRollout],
    ) -> bool:
        """Forget a partially played round and return True if it must be played again completely.

        In this process, the last bits of a model's logits depend on the other rollouts of the batch. A rollout that is
        replayed with its complete round comes out as before, and one that is in the lake is not written twice. Rollouts
        carried over from earlier rounds stay open: an undisturbed run would have played them in the same way.
        """
        slots = [Slot(group.group, number) for group in groups for number in range(plan.siblings)]
        over = [slot for slot in slots if slot in attempts and attempts[slot].is_over(self._limits.retries)]
        opened_here = [rollout for slot, rollout in opened.items() if slot.group.number == plan.round]
        if len(over) == len(slots) or not (over or opened_here):
            return False
        for rollout in opened_here:
            self.store.forget(rollout, "its round is played again as a whole")
            del opened[rollout.slot]
        return True

    def _is_filling(self, opened: int) -> bool:
        """Whether more conversations are about to open than the `opened` ones."""
        return self._admitted > opened or (self._is_beginning and self._admitted < self._limits.parallel)

    def _is_over(self, groups: Iterable[Siblings]) -> bool:
        if self.stopped_by is not None:
            return not self._running
        does_carry = self._limits.carry_over
        return all(
            group.ended == group.total or (does_carry and group.is_full and not group.unwritten) for group in groups
        )

    def _select_open(self, attempts: Mapping[Slot, RecordedAttempt]) -> dict[Slot, OpenRollout]:
        """Return usable unfinished rollouts of earlier processes; forget the others."""
        useful: dict[Slot, OpenRollout] = {}
        for opened in self.store.opened:
            attempt = attempts.get(opened.slot)
            is_new = attempt is None or attempt.attempt < opened.record.attempt
            if is_new and opened.slot not in useful and opened.slot.group.seed in self._tasks_by_seed:
                useful[opened.slot] = opened
            else:
                self.store.forget(opened, "recorded by now")
        self.store.opened = []
        return useful

    async def _begin(self, todo: Iterable[QueuedRollout]) -> None:
        """Start rollouts as permits become free."""
        self._is_beginning = True
        for rollout in todo:
            await self._permits.acquire()
            self._admitted += 1
            while self.stopped_by is None and not self.store.is_calm:
                await asyncio.sleep(_LOOK_SECONDS)
            if self.stopped_by is not None:
                self._release_permit()
                break
            if rollout.siblings.is_full and rollout.opened is None:
                self._release_permit()
                self._leave_out(rollout.siblings)
                continue
            self._running[rollout.slot] = self._tasks.create_task(self._play(rollout))
        self._is_beginning = False

    def _release_permit(self) -> None:
        """Make room for another rollout."""
        self._admitted -= 1
        self._permits.release()

    async def _play(self, todo: QueuedRollout) -> None:
        """Play one rollout with its attempts."""
        try:
            while True:
                ending = await self._attempt(todo)
                if ending is None:
                    return
                is_last = not self._is_retried(todo, ending)
                self.figures.add(ending, is_last=is_last)
                if is_last:
                    if ending.status in FINISHED and ending.env_return is not None:
                        todo.siblings.returns.append(ending.env_return)
                    self._ended_slots.add(todo.slot)
                    self._count_ended(todo.siblings)
                    return
                todo.attempt += 1
                todo.opened = None
        finally:
            del self._running[todo.slot]
            self._playing.discard(todo.slot)
            self._reasons.pop(todo.slot, None)
            self._release_permit()
            self._changed.set()

    def _is_retried(self, todo: QueuedRollout, ending: Ending) -> bool:
        if self.stopped_by is not None or todo.siblings.is_closed:
            return False
        return not RecordedAttempt(todo.attempt, ending.status, ending.stop_reason).is_over(self._limits.retries)

    async def _attempt(self, todo: QueuedRollout) -> Ending | None:
        """Play and record one attempt; return None if it is left out or stays open."""
        slot, siblings = todo.slot, todo.siblings
        if self._reasons.get(slot) == "stopped":
            return None
        rollout = Rollout(
            run_id=self.run,
            task=siblings.task,
            rollout_index=slot.rollout,
            attempt=todo.attempt,
            collection_round=slot.group.number,
            expected_group_size=siblings.expected,
            seed=derive_rollout_seed(self._seed, slot.group.number, slot.group.seed, slot.rollout, todo.attempt),
        )
        takes = partial(self._takes, slot, siblings)
        recording = RolloutRecording(self.store, partial(self._check_start, siblings), takes, todo.opened)
        self.figures.resumed += todo.opened is not None
        ending = self._find_early_ending(siblings, recording)
        self._playing.add(slot)
        try:
            ending = ending or await self._play_attempt(rollout, recording, siblings)
            if ending is None:
                self._ended_slots.add(slot)
                siblings.finish(slot.rollout, "failed")
                self._count_ended(siblings)
                return None
        except asyncio.CancelledError:
            why = self._reasons.get(slot)
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
            else:  # the sibling that made it surplus may be lost since
                aborted = recording.sums.ending("aborted", terminated=False, stop_reason=why)
                ending = self._find_early_ending(siblings, recording) or aborted
        if self.player.is_recorder:
            siblings.finish(slot.rollout, ending.status)  # the proxy may have refused the first status
            return ending
        if not takes(ending.status):
            ending = self._find_early_ending(siblings, recording) or ending
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

    async def _record(self, rollout: Rollout, ending: Ending, recording: RolloutRecording, siblings: Siblings) -> None:
        """Write an ended rollout to disk; one whose task has no name yet waits for the name."""
        has_name = recording.record is not None or rollout.task.name is not None or siblings.start is not None
        if not has_name:
            siblings.unnamed.append(lambda: recording.end(ending, _build_unopened_episode(rollout, siblings)))
            return
        siblings.unwritten += 1
        recording.end(ending, _build_unopened_episode(rollout, siblings))
        await self.store.wait_for_sync()
        siblings.unwritten -= 1

    def _check_start(self, siblings: Siblings, record: EpisodeRecord) -> None:
        """Check a rollout's start. Raises StartError: its siblings started differently."""
        siblings.check(record)
        self._record_unnamed(siblings)

    def _record_unnamed(self, siblings: Siblings) -> None:
        """Record the waiting failures: the task's name is known, or no rollout will supply one."""
        for record in siblings.unnamed:
            record()
        siblings.unnamed.clear()

    def _find_early_ending(self, siblings: Siblings, recording: RolloutRecording) -> Ending | None:
        """Return how a rollout ends because of its siblings, or None if it may continue."""
        if siblings.broken is not None:
            return recording.sums.ending("failed", stop_reason=STARTS_DIFFER, error=siblings.broken)
        if siblings.is_full and not self._limits.carry_over:
            return recording.sums.ending("aborted", terminated=False, stop_reason=SURPLUS)
        return None

    async def _play_attempt(self, rollout: Rollout, recording: RolloutRecording, siblings: Siblings) -> Ending | None:
        """Play, and convert faults to endings. Return None if a player could not record its own rollout."""
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
            self._reasons.setdefault(slot, "stopped")
            self.stop(error)
            self.abort()
            raise asyncio.CancelledError from error
        except (EngineError, DataRefusedError) as error:  # the template cannot write an image, say
            is_engines = isinstance(error, EngineError)
            if is_engines and self.player.is_recorder:
                self.lost_by = error
                return None
            return sums.ending(
                "failed", stop_reason="engine_error" if is_engines else "data_refused", error=format_exception(error)
            )
        except TrajlakeError:
            raise  # affects all rollouts: a missing package, a closed spool
        except FAULTS as error:
            if is_cancellation(error):
                raise
            return sums.ending("failed", stop_reason="error", error=format_exception(error))
        finally:
            if late is not None:
                late.cancel()

    def _leave_out(self, siblings: Siblings) -> None:
        self.figures.left_out += 1
        self._count_ended(siblings)

    def _count_ended(self, siblings: Siblings) -> None:
        """Count a rollout that gets no further attempt."""
        siblings.ended += 1
        if siblings.ended == siblings.total:
            self._record_unnamed(siblings)

    def _interrupt_siblings(self, survivor: Slot, why: InterruptReason) -> None:
        for slot in self._running:
            if slot.group == survivor.group and slot != survivor:
                self._interrupt(slot, why)

    def _interrupt(self, slot: Slot, why: InterruptReason) -> None:
        if slot not in self._reasons:
            self._reasons[slot] = why
            if slot in self._playing:
                self._running[slot].cancel(why)  # a self-recording player stores the reason


def _build_unopened_episode(rollout: Rollout, siblings: Siblings) -> EpisodeRecord:
    """Build the record of a rollout whose environment did not start, in the group of its siblings."""
    seed = rollout.task.seed
    name = rollout.task.name or (f"seed {seed}" if siblings.start is None else siblings.start.task_id)
    return build_episode(
        rollout, Outcome(messages=[], task_id=name), PolicyCard(name=""), environment=UNOPENED, split=None
    )
