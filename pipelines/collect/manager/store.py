"""What is kept of rollouts while they run: a spool on this machine, and its delivery to the lake.

An episode is begun in the spool with its first decision and ended with its last word; that an episode has ended is on
the disk before anything counts on it. What a dead process left is taken over at the start: what had ended is delivered,
before the lake is asked what is there; what was open goes on.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Self

import msgspec

from lake.errors import LakeAccessError, UsageError
from lake.lake import Lake
from lake.live.adoption import adopted
from lake.live.assembly import assemble
from lake.live.bell import TimeLimit
from lake.live.delivery import Deliveries, Delivery
from lake.live.frames import Begin, End, Frame, Lost, Step, encode, new_key
from lake.live.group_sync import GroupSync
from lake.live.log import EpisodeLog
from lake.live.owners import owner_of
from lake.live.places import root_of
from lake.live.sink import told
from lake.live.spool import Spool
from lake.records import EpisodeRecord, StepRecord
from pipelines.collect.episode_records import Sums, sampled_tokens
from pipelines.collect.manager.folder_lock import FolderLock
from pipelines.collect.manager.rounds import Group, Slot
from pipelines.collect.players import Ending
from pipelines.collect.user_code import FAULTS

MAX_BYTES = 2 << 30
"""Of a spool; above it no further rollouts begin until the lake has taken some."""
_LOOK_SECONDS = 0.05
_COPYING_SECONDS = 120.0
_log = logging.getLogger("trajlake")


class Opened(msgspec.Struct):
    """An episode that an earlier process left open, as far as it got."""

    key: bytes
    record: EpisodeRecord
    """As it began, without steps."""
    steps: list[StepRecord]

    @property
    def slot(self) -> Slot:
        """Which rollout it is."""
        return Slot(Group(self.record.collection_round or 0, self.record.seed or 0), self.record.rollout_index)


class Store:
    """The spool of one process that collects a run, and its delivery.

    Args:
        part: names the run, and the share of it that this process plays.
        record_only: which finished episodes are recorded; all of them unless given.
        batch_seconds: how long an episode that has ended waits for others.

    Raises:
        UsageError: another process collects the run.
        LakeAccessError: the folder for the spool cannot be made, or what is in it cannot be delivered.
    """

    def __init__(
        self,
        lake: Lake,
        part: str,
        *,
        record_only: Callable[[EpisodeRecord], bool] | None = None,
        batch_seconds: float = 2.0,
    ) -> None:
        self.root = root_of(lake.uri, f"collect-{part}")
        self.record_only = record_only
        self.steps = 0
        """Decisions that were taken in this process."""
        self.tokens = 0
        """Sampled for these decisions, as far as they are counted."""
        self.dropped = 0
        """Episodes that `record_only` did not want."""
        self.is_leaving = False
        """Nobody waits for a disk that refuses: what is in memory is written when the store is closed, or lost."""
        self._lock = FolderLock(self.root, part)
        self._owner = owner_of(lake)
        self._spool = Spool.create(self.root, owner=self._owner, max_bytes=MAX_BYTES)
        self.opened = self._take_over()
        """What dead processes left open."""
        # What is still open in their spools lacks frames: it is played again.
        self._delivery = Delivery(
            lambda: lake, self._spool, root=self.root, unfinished="drop", batch_seconds=batch_seconds
        )
        self._group = GroupSync(self._sync)
        self._delivery.start()
        self.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def counts(self) -> Deliveries:
        """What became of the episodes that have ended."""
        return self._delivery.counts

    @property
    def problem(self) -> str | None:
        """Why rollouts wait, if they do: the disk or the lake takes nothing at the moment."""
        return self._spool.problem or self.counts.problem

    @property
    def place(self) -> str:
        """The spool's folder; see `FolderLock.place`."""
        return self._lock.place

    @property
    def carried(self) -> set[int]:
        """Rounds of what dead processes left open."""
        return {one.slot.group.number for one in self.opened}

    def flush(self, timeout: float = 60.0) -> None:
        """Have all that has ended in the lake. Raises LakeAccessError: it or the disk does not take it."""
        limit = TimeLimit(timeout)
        if not self._spool.sync(limit.left, unless_refused=self.is_leaving):
            raise LakeAccessError(
                f"{self._spool.folder} cannot be written: {self.problem or 'the disk is too slow'}; what has ended and "
                "is not on the disk is played again: make room, and the same command goes on"
            )
        if not self._delivery.flush(limit.left):
            raise LakeAccessError(
                f"the lake does not take what has ended: {self.problem or 'it is too slow'}; nothing is lost, it is "
                f"in {self._spool.folder}, and the same command goes on"
            )

    def close(self) -> None:
        """Deliver what has ended and let go; what is open stays for the next process."""
        self._spool.sync(10.0)
        is_all = self._delivery.close()
        self._spool.close(remove=is_all)
        self._lock.release()

    def append(self, key: bytes, number: int, frame: Frame) -> None:
        """Take a frame into memory; it is on the disk soon. Raises FrameError: it holds what no table can."""
        self._spool.append(encode(key, number, frame), is_reserved=True)

    async def room(self) -> None:
        """Wait while the disk refuses and memory fills."""
        while self._spool.is_busy:
            await asyncio.sleep(_LOOK_SECONDS)

    @property
    def is_calm(self) -> bool:
        """Whether the disk and the lake take what is played."""
        return not self._spool.is_busy and self._spool.size <= MAX_BYTES

    async def synced(self) -> None:
        """Wait until what was appended is on the disk, or nobody waits any more; waits of one time share a sync."""
        await self._group.wait()

    def _sync(self) -> bool:
        while not (is_synced := self._spool.sync(1.0)) and not self.is_leaving:
            pass
        return is_synced

    def wants(self, record: EpisodeRecord) -> bool:
        """Whether an episode is recorded. Raises UsageError: whoever decides that failed."""
        try:
            return self.record_only is None or bool(self.record_only(record))
        except FAULTS as error:
            raise UsageError(f"--record-only cannot say whether an episode is recorded: {told(error)}") from error

    def forget(self, opened: Opened, reason: str) -> None:
        """Leave out an open episode that is of no use any more."""
        self.append(opened.key, len(opened.steps) + 1, Lost(reason=reason))

    def _take_over(self) -> list[Opened]:
        """Move what dead processes left open into our spool; what had ended is delivered from theirs.

        Killed in between, it is in both, with the same keys and numbers: one episode all the same.
        """
        found: dict[bytes, Opened] = {}
        for old in adopted(self.root, self._owner):
            try:
                log = EpisodeLog(old)
                log.refresh()
                keys = [key for key in log.open if log.is_begun(key) and not log.missing(key)]
                for one in [_opened(key, log) for key in keys]:
                    if one.key not in found or len(found[one.key].steps) < len(one.steps):
                        found[one.key] = one
                if not log.copy(keys, self._spool) and not self._spool.sync(_COPYING_SECONDS, unless_refused=True):
                    raise LakeAccessError(
                        f"{self._spool.folder} cannot be written: {self._spool.problem or 'the disk is too slow'}; "
                        "make room, or set TRAJLAKE_SPOOL to another folder"
                    )
                log.let_go(keys)
            except (OSError, ValueError) as error:
                _log.warning("what is in %s cannot be read back: %s", old.folder, error)
            finally:
                old.close()
        return list(found.values())


def _opened(key: bytes, log: EpisodeLog) -> Opened:
    first, *others = log.frames(key)
    assert isinstance(first, Begin)
    return Opened(key, first.episode, [frame.step for frame in others if isinstance(frame, Step)])


class Recording:
    """The log of one rollout: what a player writes to, and how the manager ends it.

    Args:
        check: called with the episode as it begins; raises StartError where a sibling began otherwise.
        takes: see `RolloutLog.takes`.
        opened: what an earlier process left of it.
    """

    def __init__(
        self,
        store: Store,
        check: Callable[[EpisodeRecord], None],
        takes: Callable[[str], bool],
        opened: Opened | None = None,
    ) -> None:
        self._store, self._check, self._opened = store, check, opened
        self.takes = takes
        """See `RolloutLog.takes`."""
        self._key = new_key() if opened is None else opened.key
        self.steps: list[StepRecord] = [] if opened is None else opened.steps
        """Those that were there already."""
        self.sums = Sums()
        """Of the steps so far."""
        self.record: EpisodeRecord | None = None
        """As it began; None until then."""
        for step in self.steps:
            self.sums.add(step)
        self._is_begun = opened is not None
        """Whether its first frame is in the spool."""
        self._frames: list[Frame] = []
        """Kept only where somebody is going to be asked whether the episode is recorded."""

    @property
    def count(self) -> int:
        """Steps so far."""
        return self.sums.num_steps

    def begin(self, record: EpisodeRecord) -> None:
        """See `RolloutLog.begin`."""
        self._check(record)
        self.record = record
        if self._opened is not None:
            self.record = self._opened.record
            self._keep(Begin(episode=self.record))
            for index, step in enumerate(self.steps):
                self._keep(Step(index=index, step=step))

    async def step(self, record: StepRecord) -> None:
        """See `RolloutLog.step`."""
        self._put(record)
        self._store.steps += 1
        self._store.tokens += sampled_tokens(record) or 0
        await self._store.room()

    def _put(self, step: StepRecord) -> None:
        assert self.record is not None, "a rollout begins before its first step"
        if not self._is_begun:
            if self.record.policy_version is None:
                self.record.policy_version = step.policy_version
            self._append(0, Begin(episode=self.record))
            self._is_begun = True
        self._append(self.count + 1, Step(index=self.count, step=step))
        self.sums.add(step)

    def end(self, ending: Ending, otherwise: EpisodeRecord) -> None:
        """End the episode; it is on the disk after `Store.synced`.

        Args:
            ending: how.
            otherwise: the episode, if it failed before it began.
        """
        end = End(
            status=ending.status,
            terminated=ending.terminated,
            stop_reason=ending.stop_reason,
            error=ending.error,
            env_return=ending.env_return,
            completion_tokens=ending.completion_tokens,
            final_observation=ending.final_observation,
        )
        if not self.count:
            # The lake keeps no episode without a step; this one says that there was no decision.
            self.record = self.record or otherwise
            self._put(StepRecord(state=None, action="", trainable=False))
        if self._store.record_only is not None:
            self._frames.append(end)
            # The assembled record shares its parts with the frames, which are in the spool by now.
            if not self._store.wants(assemble(self._frames)):
                self._store.dropped += 1
                self.leave_out("--record-only")
                return
        self._append(self.count + 1, end)

    def leave_out(self, reason: str) -> None:
        """Let nothing of it be recorded."""
        if self._is_begun:
            self._store.append(self._key, self.count + 1, Lost(reason=reason))

    def _append(self, number: int, frame: Frame) -> None:
        self._store.append(self._key, number, frame)
        self._keep(frame)

    def _keep(self, frame: Frame) -> None:
        if self._store.record_only is not None:
            self._frames.append(frame)
