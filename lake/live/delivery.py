"""Delivery: what is finished in a spool goes to the lake, in batches, each episode exactly once.

A batch is recorded in one job, and only then said to be delivered, in the spool itself. Killed in between, the same
episodes are recorded again at the next start, by whoever adopts the spool, and the lake's writer knows them as present.
A lake that cannot be reached is tried again with growing pauses; the spool keeps everything until then.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from lake.errors import LakeAccessError, TrajlakeError, UsageError
from lake.live.adoption import Held, adopted, locked
from lake.live.assembly import assembled
from lake.live.bell import Bell
from lake.live.frames import SOURCE_FORMAT, End, Frame, FrameError, Lost
from lake.live.log import EpisodeLog
from lake.live.owners import owner_of, write_owner
from lake.live.places import turn
from lake.live.spool import Spool
from lake.records import EpisodeRecord, Reject, excerpt, shown

if TYPE_CHECKING:
    from lake.lake import Lake

BATCH_SECONDS = 2.0
BATCH_EPISODES = 512
BATCH_BYTES = 64 << 20
CLOSING_SECONDS = 60.0
ADOPT_SECONDS = 30.0
"""How often it is looked whether processes have died."""
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0
"""Seconds between two tries to reach a lake."""
_DIED = "recorder_died"
"""`stop_reason` of episodes whose process died before their end."""
_PLACE = "recorder"
"""`source_uri` of rejects."""
_log = logging.getLogger("trajlake")

Unfinished = Literal["record", "drop"]
"""What becomes of episodes whose process died before their end: recorded as `aborted`, or left out and counted."""


class Deliveries(msgspec.Struct):
    """What became of finished episodes so far."""

    new: int = 0
    present: int = 0
    """Recorded before, by a process that was killed before it could say so."""
    rejected: int = 0
    """In the table `rejects`, with the reason."""
    aborted: int = 0
    """Of dead processes: ended before they were finished."""
    left_out: int = 0
    """Without a step, or unfinished and not wanted, or with a frame that could not be taken; traces of no agent."""
    problem: str | None = None
    """Why nothing can be delivered at the moment."""


class Delivery:
    """A thread that delivers the spool of this process, and those that dead processes left below the same root.

    Args:
        open_lake: opens the lake; asked until it succeeds once, and never again.
        identify: tells the lake's id, None if there is no lake yet, while that is not known of `spool`.
        spool: of this process; whoever made it closes it after the delivery.
        root: folder of spools; None adopts none.
        unfinished: what becomes of the episodes of dead processes that were not finished.
        batch_seconds: how long a finished episode waits for others.
        batch_episodes: as many in a commit at most.
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
        self.counts = Deliveries()
        self._open_lake, self._identify = open_lake, identify
        self._lake: Lake | None = None
        self._own = EpisodeLog(spool)
        self._root, self._unfinished = root, unfinished
        self._adopted: list[EpisodeLog] = []
        self._batch_seconds, self._batch_episodes = batch_seconds, batch_episodes
        self._bell, self._is_closing = Bell(), False
        self._turn = threading.Condition()
        self._asked = self._answered = 0
        """Calls of `flush`, and how many of them have been served."""
        self._told: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="trajlake-delivery", daemon=True)

    def start(self) -> None:
        """Begin, with what dead processes left."""
        self._thread.start()

    def wake(self) -> None:
        """Deliver now: enough is finished."""
        self._bell.ring()

    def flush(self, timeout: float | None = None) -> bool:
        """Deliver what is in the spool and finished; whether that succeeded within `timeout` seconds."""
        with self._turn:
            self._asked += 1
            asked = self._asked
            self._bell.ring()
            self._turn.wait_for(lambda: self._answered >= asked or not self._thread.is_alive(), timeout)
            return self._answered >= asked and self.counts.problem is None

    def close(self, timeout: float = CLOSING_SECONDS) -> bool:
        """Deliver what is finished and end; whether nothing is left in the spool of this process.

        A lake that cannot be reached is tried once: what is left is delivered at the next start.
        """
        self._is_closing = True
        self._bell.ring()
        self._thread.join(timeout)
        if self._thread.is_alive():
            return False
        for log in self._adopted:
            log.spool.close()
        # What could not be read is not known to be delivered.
        return self.counts.problem is None and not self._own.finished and not self._own.open

    def _run(self) -> None:
        """What the thread does."""
        pause, adopted_at = 0.0, -ADOPT_SECONDS
        while True:
            is_last, asked = self._is_closing, self._asked
            if is_last or time.monotonic() - adopted_at > ADOPT_SECONDS:
                adopted_at = time.monotonic()
                self._adopt()
            problem = self._deliver([*self._adopted, self._own])
            if problem is not None and self.counts.problem is None:
                _log.warning("nothing can be delivered at the moment, and it is tried again: %s", problem)
            self.counts.problem = problem
            with self._turn:
                self._answered = asked
                self._turn.notify_all()
            if is_last:
                return
            pause = 0.0 if problem is None else min(max(2 * pause, _SHORTEST_PAUSE), _LONGEST_PAUSE)
            self._bell.wait(max(pause, self._batch_seconds))

    def _adopt(self) -> None:
        """Take over what dead processes left: those before this one, and its own forked children."""
        if self._root is None:
            return
        try:
            self._learn_owner()
            owner = self._own.spool.owner
            spools = Spool.adopt(self._root) if owner is None else adopted(self._root, owner)
            self._adopted += [EpisodeLog(spool) for spool in spools]
        except OSError as error:
            self._tell(f"the spools in {self._root} cannot be looked at: {error}")

    def _learn_owner(self) -> None:
        """Find out the id of a lake in a bucket, once something may be of another lake. Raises OSError."""
        spool = self._own.spool
        if spool.owner is None or spool.owner.lake is not None or self._root is None:
            return
        beside = any(path.is_dir() and path != spool.folder for path in self._root.iterdir())
        if self._lake is None and not beside and not spool.size:
            return
        try:
            found = self._identify() if self._lake is None else self._lake.identity
        except TrajlakeError:
            return  # it cannot be reached; what is delivered says why
        if found is not None:
            spool.assign(msgspec.structs.replace(spool.owner, lake=found))

    def _deliver(self, logs: Sequence[EpisodeLog]) -> str | None:
        """Deliver all that is finished; what is in the way of it."""
        problem = None
        for log in logs:
            try:
                self._deliver_log(log)
            except (TrajlakeError, OSError) as error:
                problem = f"{error}"
            except Exception as error:
                # A fault of ours must not end the thread: everything would stay in the spool, and nobody would know.
                _log.exception("delivery failed")
                problem = f"{type(error).__name__}: {error}"
        return problem

    def _deliver_log(self, log: EpisodeLog) -> None:
        """Deliver one spool. Raises TrajlakeError, OSError."""
        log.refresh()
        is_own = log is self._own
        if not is_own and log.open:
            self._end_open(log)
        while keys := self._next_batch(log):
            self._deliver_batch(log, keys)
        if is_own:
            log.carry()
            log.trim()
        else:
            self.counts.left_out += log.lost
            log.spool.close(remove=True)
            self._adopted.remove(log)

    def _end_open(self, log: EpisodeLog) -> None:
        """End the episodes that their process left open, durably: what they are must be the same at every try."""
        last: dict[bytes, Frame] = {}
        for key in log.open:
            is_wanted = self._unfinished == "record" and log.is_begun(key)
            last[key] = End(status="aborted", stop_reason=_DIED) if is_wanted else Lost(reason="unfinished")
        if not log.append_last(last):
            raise LakeAccessError(f"the spool {log.spool.folder} cannot be written: {log.spool.problem}")
        log.refresh()

    def _next_batch(self, log: EpisodeLog) -> list[bytes]:
        size, keys = 0, []
        for key in log.finished[: self._batch_episodes]:
            keys.append(key)
            size += log.size(key)
            if size > BATCH_BYTES:
                break
        return keys

    def _deliver_batch(self, log: EpisodeLog, keys: Sequence[bytes]) -> None:
        """Record a batch, then let go of it. Raises TrajlakeError, OSError."""
        records: list[EpisodeRecord] = []
        rejects: list[Reject] = []
        for key in keys:
            if not log.is_begun(key):
                # It was delivered, and the segment with its beginning deleted, before a full disk took note of it.
                self.counts.left_out += log.spool.cut_bytes > 0
                continue
            items = _assembled(log, key)
            self.counts.left_out += not items
            for item in items:
                if isinstance(item, Reject):
                    rejects.append(item)
                elif item.steps:
                    records.append(item)
                else:
                    self.counts.left_out += 1
                    self._tell("an episode without a step was left out: credit and training are about decisions")
        lake = self._opened()
        if records:
            self._record(lake, records)
            self.counts.aborted += sum(record.stop_reason == _DIED for record in records)
        if rejects:
            self._put_aside(lake, rejects)
        log.let_go(keys)

    def _opened(self) -> "Lake":
        if self._lake is None:
            self._lake = self._open_lake()
            self._learn_owner()
        return self._lake

    def _record(self, lake: "Lake", records: Sequence[EpisodeRecord]) -> None:
        """Record episodes, those that nobody expected to fail one by one."""
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
            self._put_aside(lake, [_reject(message, shown(records[0]), records[0].run_id)])
            return
        self.counts.new += counts.new
        self.counts.present += counts.present
        if counts.first_reject is not None:
            self._count_rejects(counts.rejected, counts.first_reject.message)

    def _put_aside(self, lake: "Lake", rejects: Sequence[Reject]) -> None:
        """Episodes that cannot be recorded go to `rejects`."""
        with lake.job(kind="record") as job:
            job.reject(rejects, _PLACE, SOURCE_FORMAT)
            job.counts["rows_dropped"] = len(rejects)
        for reject in rejects:
            self._count_rejects(1, reject.message)

    def _count_rejects(self, new: int, message: str) -> None:
        """Say in the log how many there are: at the first one, at ten, a hundred, ..."""
        before = self.counts.rejected
        self.counts.rejected += new
        if len(str(self.counts.rejected)) > len(str(before)) or not before:
            are = "episode is" if self.counts.rejected == 1 else "episodes are"
            _log.warning("%d %s in `rejects` so far: %s", self.counts.rejected, are, message)

    def _tell(self, message: str) -> None:
        """Say something in the log, once."""
        if message not in self._told and len(self._told) < 100:
            self._told.add(message)
            _log.warning("%s", message)


def _assembled(log: EpisodeLog, key: bytes) -> list[EpisodeRecord | Reject]:
    """What a finished episode is. Raises TrajlakeError, OSError: the spool cannot be read."""
    if missing := log.missing(key):
        message = f"{missing} of its frames are missing: the disk damaged the spool that held them"
        return [_reject(message, shown(log.payloads(key)))]
    try:
        return assembled(log.frames(key))
    except (TrajlakeError, OSError, MemoryError):
        raise
    except FrameError as error:
        return [_reject(str(error), shown(log.payloads(key)))]
    except Exception as error:
        # It would fail at every try, and no other episode would be delivered.
        message = f"it could not be assembled: {type(error).__name__}: {error}"
        return [_reject(message, shown(log.payloads(key)))]


def _reject(message: str, raw: str, run_id: str | None = None) -> Reject:
    return Reject(position=0, reason="invalid", message=excerpt(message), raw=excerpt(raw), run_id=run_id)


def deliver_spool(held: Held, lake: "Lake") -> Deliveries:
    """Deliver what dead processes left in a spool to a lake, whichever it was recorded for; open episodes as aborted.

    What waits beside it for the same lake is delivered with it.

    Raises:
        UsageError: a process records into it.
        LakeAccessError: the lake or the spool cannot be reached; nothing is lost.
    """
    root, owner = held.folder.parent, owner_of(lake)
    with turn(root), locked(held.folder) as lock:
        if lock is None:
            raise UsageError(f"{held.folder}: a process records into it; what it holds is delivered by that process")
        write_owner(held.folder, owner)
    own = Spool.create(root, owner=owner)
    delivery = Delivery(lambda: lake, own, root=root, unfinished="record")
    delivery.start()
    is_all = delivery.flush()
    delivery.close()
    own.close(remove=True)
    if not is_all:
        raise LakeAccessError(f"what was recorded is still in {root}: {delivery.counts.problem}")
    return delivery.counts
