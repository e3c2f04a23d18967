"""The spool of running rollouts on this machine, its lock, and its delivery to the lake.

An episode starts in the spool with its first decision and ends with its last frame. Its end is on disk before any later
step relies on it. At the start, a process takes over the spools of dead ones. It delivers their finished episodes
before it queries the lake, and resumes the unfinished ones.
"""

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Self

from lake import ids
from lake.errors import LakeAccessError, UsageError
from lake.lake import Lake
from lake.live.delivery import Delivery, DeliveryCounts, EpisodeLog, adopt_spools
from lake.live.frames import BeginFrame, EndFrame, Frame, LostFrame, StepFrame, assemble_episode, encode, new_key
from lake.live.owners import get_owner, spool_root
from lake.live.sink import format_exception
from lake.live.spool import GroupSync, Spool
from lake.records import EpisodeRecord, StepRecord
from lake.storage.locks import try_lock_file
from pipelines.collect.manager.rounds import OpenRollout
from pipelines.collect.players import Ending, StepTotals, count_sampled_tokens
from pipelines.collect.user_code import FAULTS

_OWNER = "collect"
"""File in the folder with the folder's unique id and the process that holds the lock."""


class FolderLock:
    """The lock of a folder of spools: one process of this machine at a time. Held until release or process end.

    Args:
        root: the folder; created if missing.
        part: name of the run, for messages.

    Raises:
        UsageError: another process holds it.
        LakeAccessError: the folder cannot be created.
    """

    def __init__(self, root: Path, part: str) -> None:
        owner = root / _OWNER
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = try_lock_file(owner)
            words = owner.read_text(errors="replace").split()
        except OSError as error:
            raise LakeAccessError(f"{root}: {error.strerror or error}; set TRAJLAKE_SPOOL to another folder") from error
        if file is None:
            raise UsageError(
                f"run {part!r} is being collected into this lake by process {words[-1] if words else '?'}; wait for "
                "it, or choose another --run"
            )
        self._file = file
        self.folder_id = words[0] if len(words) == 2 else ids.to_text(ids.fresh_id())
        """Unique id of the folder, by which a lock holder recognises claims of earlier processes."""
        written = os.pwrite(self._file, f"{self.folder_id} {os.getpid()}\n".encode(), 0)
        os.ftruncate(self._file, written)

    def release(self) -> None:
        """Release the lock."""
        os.close(self._file)


MAX_BYTES = 2 << 30
"""Size of a spool above which no further rollout starts until the lake has taken some."""
_LOOK_SECONDS = 0.05
_TURN_SECONDS = 1.0
_COPYING_SECONDS = 120.0
_log = logging.getLogger("trajlake")


class RolloutSpool:
    """The spool of one process that collects a run, and its delivery.

    Args:
        part: name of the run, plus the number of the shard that this process plays.
        record_only: decides which finished episodes are recorded. Default: all.
        batch_seconds: how long an ended episode waits for others.

    Raises:
        UsageError: another process collects the run.
        LakeAccessError: the folder cannot be created, or its contents cannot be delivered.
    """

    def __init__(
        self,
        lake: Lake,
        part: str,
        *,
        record_only: Callable[[EpisodeRecord], bool] | None = None,
        batch_seconds: float = 2.0,
    ) -> None:
        self.root = spool_root(lake.uri, f"collect-{part}")
        self.record_only = record_only
        self.steps = 0
        """Decisions taken in this process."""
        self.tokens = 0
        """Sampled tokens of these decisions, if counted."""
        self.dropped = 0
        """Episodes that `record_only` rejected."""
        self.is_leaving = False
        """Whether to stop waiting for a full disk. Frames in memory are written at close, or lost."""
        self._lock = FolderLock(self.root, part)
        self._owner = get_owner(lake)
        self._spool = Spool.create(self.root, owner=self._owner, max_bytes=MAX_BYTES)
        self.opened = self._take_over()
        """Unfinished rollouts of dead processes."""
        # Episodes that are still open in their spools lack frames and are played again.
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
    def counts(self) -> DeliveryCounts:
        """Counts of delivered episodes."""
        return self._delivery.counts

    @property
    def problem(self) -> str | None:
        """Why rollouts wait for the disk or the lake, or None."""
        return self._spool.problem or self.counts.problem

    @property
    def folder_id(self) -> str:
        """See `FolderLock.folder_id`."""
        return self._lock.folder_id

    @property
    def carried(self) -> set[int]:
        """Rounds of unfinished rollouts of dead processes."""
        return {rollout.slot.group.number for rollout in self.opened}

    def flush(self, turns: int = 60) -> None:
        """Deliver all ended episodes to the lake. Raises LakeAccessError: the lake or the disk refuses them."""
        # Many short waits: a stop of this process (Ctrl-Z, a suspended job) costs one of them.
        if not any(self._spool.sync(_TURN_SECONDS, unless_refused=self.is_leaving) for _ in range(turns)):
            raise LakeAccessError(
                f"{self._spool.folder} cannot be written: {self.problem or 'the disk is too slow'}; ended rollouts "
                "that are not on disk are played again: free disk space and rerun the same command"
            )
        if not next((done for _ in range(turns) if (done := self._delivery.flush(_TURN_SECONDS)) is not None), False):
            raise LakeAccessError(
                f"the lake does not accept ended rollouts: {self.problem or 'it is too slow'}; no data is lost: it is "
                f"in {self._spool.folder}; rerun the same command to resume"
            )

    def close(self) -> None:
        """Deliver ended episodes and release the lock; unfinished ones stay for the next process."""
        self._spool.sync(10.0)
        self._spool.close(remove=self._delivery.close())
        self._lock.release()

    def append(self, key: bytes, number: int, frame: Frame) -> None:
        """Append a frame in memory; it reaches the disk soon. Raises FrameError: no table can hold it."""
        self._spool.append(encode(key, number, frame), is_reserved=True)

    async def wait_for_room(self) -> None:
        """Wait while the disk refuses writes and memory fills."""
        while self._spool.is_busy:
            await asyncio.sleep(_LOOK_SECONDS)

    @property
    def is_calm(self) -> bool:
        """Whether the disk and the lake keep up."""
        return not self._spool.is_busy and self._spool.size <= MAX_BYTES

    async def wait_for_sync(self) -> None:
        """Wait until appended frames are on disk, or the process is leaving; concurrent waits share a sync."""
        await self._group.wait()

    def _sync(self) -> bool:
        while not (is_synced := self._spool.sync(_TURN_SECONDS)) and not self.is_leaving:
            pass
        return is_synced

    def is_recorded(self, record: EpisodeRecord) -> bool:
        """Return whether an episode is recorded. Raises UsageError: `record_only` failed."""
        try:
            return self.record_only is None or bool(self.record_only(record))
        except FAULTS as error:
            raise UsageError(f"record_only failed for an episode: {format_exception(error)}") from error

    def forget(self, opened: OpenRollout, reason: str) -> None:
        """Drop an open episode that is not needed any more."""
        self.append(opened.key, len(opened.steps) + 1, LostFrame(reason=reason))

    def _take_over(self) -> list[OpenRollout]:
        """Move unfinished episodes of dead processes into this spool; finished ones are delivered from theirs.

        After a crash in between, both spools hold an episode under the same keys and numbers, which counts once.
        """
        opened: dict[bytes, OpenRollout] = {}
        for old in adopt_spools(self.root, self._owner):
            try:
                log = EpisodeLog(old)
                log.refresh()
                keys = [key for key in log.open if log.has_beginning(key) and not log.count_missing(key)]
                for rollout in [_read_open_rollout(key, log) for key in keys]:
                    if rollout.key not in opened or len(opened[rollout.key].steps) < len(rollout.steps):
                        opened[rollout.key] = rollout
                if not log.copy(keys, self._spool) and not self._spool.sync(_COPYING_SECONDS, unless_refused=True):
                    raise LakeAccessError(
                        f"{self._spool.folder} cannot be written: {self._spool.problem or 'the disk is too slow'}; "
                        "free disk space, or set TRAJLAKE_SPOOL to another folder"
                    )
                log.release(keys)
            except (OSError, ValueError) as error:
                _log.warning("the spool %s cannot be read: %s", old.folder, error)
            finally:
                old.close()
        return list(opened.values())


def _read_open_rollout(key: bytes, log: EpisodeLog) -> OpenRollout:
    first, *following = log.frames(key)
    assert isinstance(first, BeginFrame)
    return OpenRollout(key, first.episode, [frame.step for frame in following if isinstance(frame, StepFrame)])


class RolloutRecording:
    """The log of one rollout: the player writes to it, and the manager ends it.

    Args:
        check: called with the episode at its start; raises StartError if a sibling started differently.
        takes: see `RolloutLog.takes`.
        opened: its unfinished episode of an earlier process.
    """

    def __init__(
        self,
        store: RolloutSpool,
        check: Callable[[EpisodeRecord], None],
        takes: Callable[[str], bool],
        opened: OpenRollout | None = None,
    ) -> None:
        self._store, self._check, self._opened = store, check, opened
        self.takes = takes
        """See `RolloutLog.takes`."""
        self._key = new_key() if opened is None else opened.key
        self.steps: list[StepRecord] = [] if opened is None else opened.steps
        """Steps recorded by an earlier process."""
        self.sums = StepTotals()
        """Totals of the steps so far."""
        self.record: EpisodeRecord | None = None
        """The episode as it started; None before."""
        for step in self.steps:
            self.sums.add(step)
        self._is_begun = opened is not None
        """Whether its first frame is in the spool."""
        self._frames: list[Frame] = []
        """Collected only if `record_only` will need the episode."""

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
            self._remember(BeginFrame(episode=self.record))
            for index, step in enumerate(self.steps):
                self._remember(StepFrame(index=index, step=step))

    async def step(self, record: StepRecord) -> None:
        """See `RolloutLog.step`."""
        self._append_step(record)
        self._store.steps += 1
        self._store.tokens += count_sampled_tokens(record) or 0
        await self._store.wait_for_room()

    def _append_step(self, step: StepRecord) -> None:
        assert self.record is not None, "a rollout begins before its first step"
        if not self._is_begun:
            if self.record.policy_version is None:
                self.record.policy_version = step.policy_version
            self._append(0, BeginFrame(episode=self.record))
            self._is_begun = True
        self._append(self.count + 1, StepFrame(index=self.count, step=step))
        self.sums.add(step)

    def end(self, ending: Ending, otherwise: EpisodeRecord) -> None:
        """End the episode; it is on disk after `RolloutSpool.wait_for_sync`.

        Args:
            ending: how it ended.
            otherwise: the episode to record if it failed before its start.
        """
        end = EndFrame(
            status=ending.status,
            terminated=ending.terminated,
            stop_reason=ending.stop_reason,
            error=ending.error,
            env_return=ending.env_return,
            completion_tokens=ending.completion_tokens,
            final_observation=ending.final_observation,
        )
        if not self.count:
            # An episode needs at least one step; this one records that there was no decision.
            self.record = self.record or otherwise
            self._append_step(StepRecord(state=None, action="", trainable=False))
        if self._store.record_only is not None:
            self._frames.append(end)
            # The assembled record shares memory with the frames, which are already in the spool.
            if not self._store.is_recorded(assemble_episode(self._frames)):
                self._store.dropped += 1
                if self._is_begun:
                    self._store.append(self._key, self.count + 1, LostFrame(reason="record_only"))
                return
        self._append(self.count + 1, end)

    def _append(self, number: int, frame: Frame) -> None:
        self._store.append(self._key, number, frame)
        self._remember(frame)

    def _remember(self, frame: Frame) -> None:
        if self._store.record_only is not None:
            self._frames.append(frame)
