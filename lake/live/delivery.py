"""Deliver episodes from spools to the lake, each exactly once, and adopt the spools of dead processes.

`EpisodeLog` knows which episodes of a spool are open or finished. It has the positions of their frames in memory, a few
bytes per frame, and leaves the frames on disk.

A batch is recorded in one job, and then marked as delivered in the spool. If the process dies in between, the process
that adopts the spool delivers the episodes again, and the lake's writer recognises them. If a lake cannot be reached,
delivery retries with growing pauses, and the spool keeps the episodes.

The next process that records for a lake adopts its spools, even if the lake was moved. Spools of a deleted lake do not
belong to the lake that is at its address now. They stay where they are, and the log says so. `trajlake spools` lists,
delivers and deletes them.
"""

import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from lake.errors import LakeAccessError, TrajlakeError, UsageError
from lake.live.frames import (
    DELIVERED,
    HEAD,
    LAST,
    LOST,
    NO_KEY,
    SOURCE_FORMAT,
    DeliveredFrame,
    EndFrame,
    Frame,
    FrameError,
    LostFrame,
    assemble_frames,
    decode,
    encode,
)
from lake.live.owners import (
    LOCK,
    Owner,
    get_owner,
    is_orphan,
    lock_root,
    may_adopt,
    read_owner,
    spool_base,
    spool_root,
    write_owner,
)
from lake.live.spool import START, SUFFIX, Position, Spool, WakeupSignal
from lake.records import EpisodeRecord, Reject, excerpt, format_record
from lake.retries import compute_pause
from lake.storage.locks import hold_file_lock

if TYPE_CHECKING:
    from lake.lake import Lake

BATCH_SECONDS = 2.0
BATCH_EPISODES = 512
BATCH_BYTES = 64 << 20
CLOSING_SECONDS = 60.0
ADOPT_SECONDS = 30.0
"""Seconds between two searches for spools of dead processes."""
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0
"""Seconds between two tries to reach a lake."""
_DIED = "recorder_died"
"""`stop_reason` of episodes whose process died before their end."""
_SOURCE = "recorder"
"""`source_uri` of rejects."""
_SYNC_SECONDS = 5.0
"""How long a thread waits for a disk that may be full."""
_log = logging.getLogger("trajlake")
_reported_orphans: set[Path] = set()

Unfinished = Literal["record", "drop"]
"""Episodes whose process died before their end are recorded as `aborted`, or left out and counted."""


# ------------------------------------------------------------ the episodes of a spool


class _SpooledEpisode(msgspec.Struct):
    """Positions of an episode's frames by number."""

    positions: dict[int, Position] = {}
    is_finished: bool = False

    @property
    def first(self) -> Position:
        return min(self.positions.values())


class EpisodeLog:
    """The episodes of one spool. Not thread-safe."""

    def __init__(self, spool: Spool) -> None:
        self.spool = spool
        self.lost = 0
        """Episodes that were left out because a frame was lost."""
        self._at = START
        self._episodes: dict[bytes, _SpooledEpisode] = {}

    @property
    def finished(self) -> list[bytes]:
        """Keys of the episodes that are finished and not delivered, in the order in which they began."""
        return [key for key, episode in self._episodes.items() if episode.is_finished]

    @property
    def open(self) -> list[bytes]:
        """Keys of the episodes that are not finished."""
        return [key for key, episode in self._episodes.items() if not episode.is_finished]

    def refresh(self) -> None:
        """Read the new frames on disk. Raises OSError."""
        for position, payload in self.spool.frames(self._at):
            self._at = position
            kind, key, number = HEAD.unpack_from(payload)
            if kind == DELIVERED:
                delivered = decode(payload)
                for delivered_key in delivered.keys if isinstance(delivered, DeliveredFrame) else ():
                    self._episodes.pop(delivered_key, None)
            elif kind == LOST:
                self.lost += self._episodes.pop(key, None) is not None
            else:
                episode = self._episodes.setdefault(key, _SpooledEpisode())
                episode.positions[number] = position
                episode.is_finished |= kind in LAST

    def size(self, key: bytes) -> int:
        """Return the bytes of an episode's frames."""
        return sum(position.length for position in self._episodes[key].positions.values())

    def payloads(self, key: bytes) -> list[bytes]:
        """Return an episode's encoded frames in order. Raises OSError."""
        return [self.spool.payload(position) for _, position in sorted(self._episodes[key].positions.items())]

    def frames(self, key: bytes) -> list[Frame]:
        """Return an episode's frames in order. Raises FrameError, OSError."""
        return [decode(payload) for payload in self.payloads(key)]

    def has_beginning(self, key: bytes) -> bool:
        """Return whether an episode's first frame exists."""
        return 0 in self._episodes[key].positions

    def count_missing(self, key: bytes) -> int:
        """Return the number of frames before an episode's last one that the disk has lost."""
        positions = self._episodes[key].positions
        return max(positions) + 1 - len(positions)

    def append_final(self, frames: Mapping[bytes, Frame]) -> bool:
        """Append the last frames of episodes, and return whether they are on disk. Raises SpoolFullError."""
        for key, frame in frames.items():
            number = max(self._episodes[key].positions) + 1
            self.spool.append(encode(key, number, frame), is_reserved=True)
        return self.spool.sync(_SYNC_SECONDS)

    def release(self, keys: Sequence[bytes]) -> None:
        """Mark episodes as delivered in the spool, and delete the segments that are no longer needed.

        This does not wait for the disk: a full disk must not keep delivered frames, and the lake recognises episodes
        that arrive twice. If the mark is lost, the rest of these episodes has no first frame.

        Raises:
            SpoolFullError: the spool is closed.
            OSError: a segment cannot be deleted.
        """
        self.spool.append(encode(NO_KEY, 0, DeliveredFrame(keys=list(keys))), is_reserved=True)
        for key in keys:
            self._episodes.pop(key, None)
        self.trim()

    def trim(self) -> None:
        """Delete the segments before the first frame that is needed. Raises OSError."""
        read = Position(self._at.segment, self._at.offset + self._at.length, 0)
        self.spool.trim(min((episode.first for episode in self._episodes.values()), default=read))

    def carry(self) -> None:
        """Append the frames of the oldest open episodes again, so that the log can be trimmed.

        Otherwise an episode that stays open would keep all segments since it began. Raises OSError.
        """
        needed = sum(map(self.size, self._episodes))
        if self.spool.problem is not None:
            if self.spool.is_disk_full and needed < min(self.spool.disk_bytes, BATCH_BYTES):
                self._make_room()
            return
        oldest = min((episode.first.segment for episode in self._episodes.values()), default=0)
        old = [key for key in self.open if self._episodes[key].first.segment == oldest]
        if self.spool.is_roomy or 2 * needed > self.spool.size or not old:
            return
        if self.copy(old, self.spool):
            self.refresh()
            self.trim()

    def _make_room(self) -> None:
        """Move the frames of all episodes to memory, because the disk takes no copies of them. Raises OSError."""
        payloads = [payload for key in self._episodes for payload in self.payloads(key)]
        if self.spool.move_to_memory(payloads, self._at, _SYNC_SECONDS):
            self._episodes.clear()

    def copy(self, keys: Iterable[bytes], spool: Spool) -> bool:
        """Append the frames of episodes to a spool, and return whether they are on disk.

        Raises SpoolFullError: the spool is closed; OSError: frames cannot be read.
        """
        for key in keys:
            for payload in self.payloads(key):
                spool.append(payload, is_reserved=True)
        return spool.sync(_SYNC_SECONDS)


# ------------------------------------------------------------ spools of dead processes


class SpoolStatus(NamedTuple):
    """The status of a spool on disk."""

    folder: Path
    owner: Owner | None
    """None if an earlier version wrote the spool."""
    is_in_use: bool
    """A process records into it."""
    is_orphan: bool
    """It belongs to a lake whose address another lake has now."""
    finished: int | None
    """Finished episodes that are not marked as delivered; None if it is in use or cannot be read."""
    open: int | None
    """Episodes that are not finished."""
    bytes: int


def adopt_spools(root: Path, owner: Owner) -> list[Spool]:
    """Take over the spools of a lake whose processes are dead: those below a root, and those at its former addresses.

    Orphans below the root are logged once per process.
    """
    spools = Spool.adopt(root, owner=owner)
    for spool in spools:
        if spool.owner is None:
            _log.warning("the spool %s does not name its lake; it is taken to belong to this lake", spool.folder)
    for former_root in _find_former_roots(root, owner):
        for spool in Spool.adopt(former_root, owner=owner):
            _log.warning("the lake was moved: %s, which was recorded for it before, is taken over", spool.folder)
            spools.append(spool)
    _report_orphans(root, owner)
    return spools


def list_spools(owner: Owner) -> list[SpoolStatus]:
    """Return the spools on this machine for a lake, or for a lake that had its address before.

    Spools in the folder of a `--spool` option are not listed.
    """
    base = spool_base()
    root = spool_root(owner.address, "")
    spools = []
    for folder in sorted({path.parent for path in base.rglob(f"*{SUFFIX}")}):
        try:
            spool_owner = read_owner(folder)
        except OSError:
            spool_owner = None
        is_own = root in folder.parents if spool_owner is None else may_adopt(owner, spool_owner)
        if is_own or is_orphan(owner, spool_owner):
            spools.append(_inspect(folder, owner, spool_owner))
    return spools


def _inspect(folder: Path, owner: Owner, spool_owner: Owner | None) -> SpoolStatus:
    size = sum(path.stat().st_size for path in folder.glob(f"*{SUFFIX}"))
    finished = unfinished = None
    with lock_root(folder.parent), hold_file_lock(folder / LOCK, wait=False) as lock:
        if lock is not None:
            try:
                log = EpisodeLog(Spool.read_only(folder))
                log.refresh()
                finished, unfinished = len(log.finished), len(log.open)
            except (TrajlakeError, OSError):
                pass  # the counts stay unknown
    return SpoolStatus(folder, spool_owner, lock is None, is_orphan(owner, spool_owner), finished, unfinished, size)


def _find_former_roots(root: Path, owner: Owner) -> list[Path]:
    """Return the roots of the same program at other addresses that have spools of this lake."""
    base = spool_base()
    if owner.lake is None or base not in root.parents:
        return []
    name, *program = root.relative_to(base).parts
    former_roots = []
    for candidate in (path.joinpath(*program) for path in _list_folders(base) if path.name != name):
        for folder in _list_folders(candidate):
            try:
                spool_owner = read_owner(folder)
            except OSError:
                continue
            if spool_owner is not None and spool_owner.lake == owner.lake:
                former_roots.append(candidate)
                break
    return former_roots


def _list_folders(root: Path) -> list[Path]:
    return sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else []


def _report_orphans(root: Path, owner: Owner) -> None:
    """Log the orphans below a root, and delete those without undelivered episodes."""
    for folder in _list_folders(root):
        try:
            spool_owner = read_owner(folder)
            if folder in _reported_orphans or not is_orphan(owner, spool_owner):
                continue
            spool = _inspect(folder, owner, spool_owner)
            if (spool.finished, spool.open) == (0, 0):
                delete_spool(spool)
                continue
        except OSError as error:
            _log.warning("the spool %s cannot be read: %s", folder, error)
            continue
        if spool.is_in_use:
            continue
        _reported_orphans.add(folder)
        _log.warning(
            "%s holds episodes (%s finished, %s open) of a lake that was at %s before. They are not delivered to the "
            "lake that is there now, and stay where they are: `trajlake spools --lake %s` lists them, and delivers or "
            "deletes them on request",
            folder,
            "?" if spool.finished is None else spool.finished,
            "?" if spool.open is None else spool.open,
            owner.address,
            owner.address,
        )


def delete_spool(spool: SpoolStatus) -> bool:
    """Delete a spool with its episodes; False if a process records into it. Raises OSError."""
    with lock_root(spool.folder.parent), hold_file_lock(spool.folder / LOCK, wait=False) as lock:
        if lock is None:
            return False
        shutil.rmtree(spool.folder)
    return True


# ------------------------------------------------------------ delivery


class DeliveryCounts(msgspec.Struct):
    """Numbers of delivered episodes by outcome."""

    new: int = 0
    present: int = 0
    """Episodes that a process recorded and could not mark before it died."""
    rejected: int = 0
    """Episodes in the table `rejects`, with the reason."""
    aborted: int = 0
    """Unfinished episodes of dead processes."""
    left_out: int = 0
    """Episodes without a step, unfinished ones that are dropped, those with a lost frame, and traces of no agent."""
    problem: str | None = None
    """Why nothing can be delivered now."""


class Delivery:
    """A thread that delivers the spool of this process, and the spools of dead processes below the same root.

    Args:
        open_lake: opens the lake; called until it succeeds once.
        spool: spool of this process; the caller closes it after the delivery.
        root: folder of spools; None adopts none.
        identify: returns the lake's id, or None without a lake; called while `spool` does not know it.
        unfinished: treatment of the unfinished episodes of dead processes.
        batch_seconds: seconds that a finished episode waits for others.
        batch_episodes: maximum episodes of a commit.
    """

    def __init__(
        self,
        open_lake: Callable[[], "Lake"],
        spool: Spool,
        *,
        root: Path | None = None,
        identify: Callable[[], str | None] = lambda: None,
        unfinished: Unfinished = "record",
        batch_seconds: float = BATCH_SECONDS,
        batch_episodes: int = BATCH_EPISODES,
    ) -> None:
        self.counts = DeliveryCounts()
        self._open_lake, self._identify = open_lake, identify
        self._lake: Lake | None = None
        self._log = EpisodeLog(spool)
        self._root, self._unfinished = root, unfinished
        self._adopted: list[EpisodeLog] = []
        self._batch_seconds, self._batch_episodes = batch_seconds, batch_episodes
        self._wakeup, self._is_closing = WakeupSignal(), False
        self._turn = threading.Condition()
        self._requested = self._completed = 0
        """Numbers of calls of `flush`."""
        self._warnings: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="trajlake-delivery", daemon=True)

    def start(self) -> None:
        """Start the thread. It begins with the spools of dead processes."""
        self._thread.start()

    def wake(self) -> None:
        """Deliver now."""
        self._wakeup.notify()

    def flush(self, timeout: float | None = None) -> bool | None:
        """Deliver the finished episodes of the spool; return whether that succeeded, None after `timeout` seconds."""
        with self._turn:
            self._requested += 1
            request = self._requested
            self._wakeup.notify()
            self._turn.wait_for(lambda: self._completed >= request or not self._thread.is_alive(), timeout)
            return self.counts.problem is None if self._completed >= request else None

    def close(self, timeout: float = CLOSING_SECONDS) -> bool:
        """Deliver the finished episodes and stop; return whether the spool of this process is empty.

        A lake that cannot be reached is tried once. The remaining episodes are delivered at the next start.
        """
        self._is_closing = True
        self._wakeup.notify()
        self._thread.join(timeout)
        if self._thread.is_alive():
            return False
        for log in self._adopted:
            log.spool.close()
        # Frames that could not be read are not known to be delivered.
        return self.counts.problem is None and not self._log.finished and not self._log.open

    def _run(self) -> None:
        failures, adopted_at = 0, -ADOPT_SECONDS
        while True:
            is_last, request = self._is_closing, self._requested
            if is_last or time.monotonic() - adopted_at > ADOPT_SECONDS:
                adopted_at = time.monotonic()
                self._adopt()
            problem = None
            for log in [*self._adopted, self._log]:
                try:
                    self._deliver_log(log)
                except (TrajlakeError, OSError) as error:
                    problem = f"{error}"
                except Exception as error:
                    # A bug must not end the thread. Everything would stay in the spool without notice.
                    _log.exception("delivery failed")
                    problem = f"{type(error).__name__}: {error}"
            if problem is not None and self.counts.problem is None:
                _log.warning("nothing can be delivered at the moment, and it is tried again: %s", problem)
            self.counts.problem = problem
            with self._turn:
                self._completed = request
                self._turn.notify_all()
            if is_last:
                return
            failures = 0 if problem is None else failures + 1
            pause = compute_pause(failures, first=_SHORTEST_PAUSE, longest=_LONGEST_PAUSE)
            self._wakeup.wait(max(pause, self._batch_seconds))

    def _adopt(self) -> None:
        """Take over the spools of dead processes: of earlier ones, and of forked children."""
        if self._root is None:
            return
        try:
            self._learn_owner()
            owner = self._log.spool.owner
            spools = Spool.adopt(self._root) if owner is None else adopt_spools(self._root, owner)
            self._adopted += [EpisodeLog(spool) for spool in spools]
        except OSError as error:
            self._warn_once(f"the spools in {self._root} cannot be read: {error}")

    def _learn_owner(self) -> None:
        """Look up the id of a lake in a bucket, once it is open, or other spools or frames exist. Raises OSError."""
        spool = self._log.spool
        if spool.owner is None or spool.owner.lake is not None or self._root is None:
            return
        has_others = any(path.is_dir() and path != spool.folder for path in self._root.iterdir())
        if self._lake is None and not has_others and not spool.size:
            return
        try:
            lake_id = self._identify() if self._lake is None else self._lake.identity
        except TrajlakeError:
            return  # the lake cannot be reached; delivery reports why
        if lake_id is not None:
            spool.assign(msgspec.structs.replace(spool.owner, lake=lake_id))

    def _deliver_log(self, log: EpisodeLog) -> None:
        """Deliver one spool. Raises TrajlakeError, OSError."""
        log.refresh()
        is_own = log is self._log
        if not is_own and log.open:
            # End the open episodes of a dead process durably, so that each try delivers the same.
            last: dict[bytes, Frame] = {}
            for key in log.open:
                is_recorded = self._unfinished == "record" and log.has_beginning(key)
                last[key] = (
                    EndFrame(status="aborted", stop_reason=_DIED) if is_recorded else LostFrame(reason="unfinished")
                )
            if not log.append_final(last):
                raise LakeAccessError(f"the spool {log.spool.folder} cannot be written: {log.spool.problem}")
            log.refresh()
        while keys := self._choose_batch(log):
            self._deliver_batch(log, keys)
        if is_own:
            if not self._is_closing:
                log.carry()
            log.trim()
        else:
            self.counts.left_out += log.lost
            log.spool.close(remove=True)
            self._adopted.remove(log)

    def _choose_batch(self, log: EpisodeLog) -> list[bytes]:
        size, keys = 0, []
        for key in log.finished[: self._batch_episodes]:
            keys.append(key)
            size += log.size(key)
            if size > BATCH_BYTES:
                break
        return keys

    def _deliver_batch(self, log: EpisodeLog, keys: Sequence[bytes]) -> None:
        """Record a batch, then release it. Raises TrajlakeError, OSError."""
        records: list[EpisodeRecord] = []
        rejects: list[Reject] = []
        for key in keys:
            if not log.has_beginning(key):
                # It was delivered and its first segment deleted, before a full disk stored the mark.
                self.counts.left_out += log.spool.cut_bytes > 0
                continue
            items = _assemble(log, key)
            self.counts.left_out += not items
            for item in items:
                if isinstance(item, Reject):
                    rejects.append(item)
                elif item.steps:
                    records.append(item)
                else:
                    self.counts.left_out += 1
                    self._warn_once("an episode without a step was left out: credit and training are about decisions")
        if self._lake is None:
            self._lake = self._open_lake()
            self._learn_owner()
        if records:
            self._record(self._lake, records)
            self.counts.aborted += sum(record.stop_reason == _DIED for record in records)
        if rejects:
            self._reject(self._lake, rejects)
        log.release(keys)

    def _record(self, lake: "Lake", records: Sequence[EpisodeRecord]) -> None:
        """Record episodes; one by one after an unexpected error."""
        try:
            runs = {record.run_id for record in records}
            counts = lake.append(records, run_id=runs.pop() if len(runs) == 1 else None)
        except (TrajlakeError, OSError, MemoryError):
            raise
        except Exception as error:
            if len(records) > 1:
                for record in records:
                    self._record(lake, [record])
                return
            message = f"it could not be recorded: {type(error).__name__}: {error}"
            self._reject(lake, [_build_reject(message, format_record(records[0]), records[0].run_id)])
            return
        self.counts.new += counts.new
        self.counts.present += counts.present
        if counts.first_reject is not None:
            self._count_rejects(counts.rejected, counts.first_reject.message)

    def _reject(self, lake: "Lake", rejects: Sequence[Reject]) -> None:
        """Write episodes that cannot be recorded to `rejects`."""
        with lake.job(kind="record") as job:
            job.reject(rejects, _SOURCE, SOURCE_FORMAT)
            job.counts["rows_dropped"] = len(rejects)
        for reject in rejects:
            self._count_rejects(1, reject.message)

    def _count_rejects(self, new: int, message: str) -> None:
        """Count rejects, and log the first, the tenth, the hundredth, ..."""
        before = self.counts.rejected
        self.counts.rejected += new
        if len(str(self.counts.rejected)) > len(str(before)) or not before:
            are = "episode is" if self.counts.rejected == 1 else "episodes are"
            _log.warning("%d %s in `rejects` so far: %s", self.counts.rejected, are, message)

    def _warn_once(self, message: str) -> None:
        if message not in self._warnings and len(self._warnings) < 100:
            self._warnings.add(message)
            _log.warning("%s", message)


def _assemble(log: EpisodeLog, key: bytes) -> list[EpisodeRecord | Reject]:
    """Return the records of a finished episode, or the reject. Raises TrajlakeError, OSError: it cannot be read."""
    if missing := log.count_missing(key):
        message = f"{missing} of its frames are missing: the disk damaged the spool that held them"
        return [_build_reject(message, format_record(log.payloads(key)))]
    try:
        return assemble_frames(log.frames(key))
    except (TrajlakeError, OSError, MemoryError):
        raise
    except FrameError as error:
        return [_build_reject(str(error), format_record(log.payloads(key)))]
    except Exception as error:
        # It would fail at every try, and block all other episodes.
        message = f"it could not be assembled: {type(error).__name__}: {error}"
        return [_build_reject(message, format_record(log.payloads(key)))]


def _build_reject(message: str, raw: str, run_id: str | None = None) -> Reject:
    return Reject(position=0, reason="invalid", message=excerpt(message), raw=excerpt(raw), run_id=run_id)


def deliver_spool(spool: SpoolStatus, lake: "Lake") -> DeliveryCounts:
    """Deliver a spool of a dead process to any lake. Open episodes are recorded as aborted.

    Spools for the same lake in the same folder are delivered too.

    Raises:
        UsageError: a process records into it.
        LakeAccessError: the lake or the spool cannot be reached; nothing is lost.
    """
    root, owner = spool.folder.parent, get_owner(lake)
    with lock_root(root), hold_file_lock(spool.folder / LOCK, wait=False) as lock:
        if lock is None:
            raise UsageError(f"{spool.folder}: a process records into it, and delivers its episodes")
        write_owner(spool.folder, owner)
    empty_spool = Spool.create(root, owner=owner)
    delivery = Delivery(lambda: lake, empty_spool, root=root, unfinished="record")
    delivery.start()
    is_all = delivery.flush()
    delivery.close()
    empty_spool.close(remove=True)
    if not is_all:
        raise LakeAccessError(f"the recorded episodes are still in {root}: {delivery.counts.problem}")
    return delivery.counts
