"""The recorder: agents of this process, recorded while they run, delivered in the background.

    with lake.recorder("my.lake", run="agent-v3") as recorder:
        with recorder.episode("airline-12") as episode:
            with episode.step(context=[{"role": "user", "content": "..."}]) as step:
                step.action("I look it up.")
                with step.tool_call("search", {"q": "flights"}) as call:
                    call.result(search("flights"))
            episode.reward(1.0)

What happens is put into a spool on the disk of this machine at once, and goes to the lake when its episode has ended.
An episode whose context has been left comes to be in the lake once, whatever happens to this process afterwards: what a
dead process left is delivered by the next recorder of the same lake on the same machine.

A process that was forked from this one records too; what it has recorded is delivered by this one, or the next.
"""

import atexit
import concurrent.futures.thread  # noqa: F401 - see `_close_all`
import logging
import os
import secrets
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import msgspec

from lake.errors import UsageError
from lake.formats.base.secrets import redacted
from lake.live.bell import TimeLimit
from lake.live.delivery import BATCH_EPISODES, BATCH_SECONDS, CLOSING_SECONDS, Delivery, Unfinished
from lake.live.episode import Episode
from lake.live.frames import SOURCE_FORMAT, Begin, FrameError, Refused, Whole, encode, fitted, new_key, plain
from lake.live.off import OFF
from lake.live.owners import identity_at, open_owned, owner_at
from lake.live.places import checked_place, root_of
from lake.live.sink import CLOSED, Sink, guarded
from lake.live.spool import MAX_BYTES, Spool
from lake.records import EpisodeRecord, Reject, excerpt

if TYPE_CHECKING:
    from lake.lake import Lake

_OWN = frozenset(("task_id", "run_id", "steps", "spans", "scores", "source_format"))
_OF_EPISODES = frozenset(EpisodeRecord.__struct_fields__) - _OWN
_FULL_DISK_SECONDS = 3.0
_LETTING_GO_SECONDS = 0.1
"""How long the end of the thread that writes the spool is waited for, if no time is left."""
_TASKS_TOLD = 5
_log = logging.getLogger("trajlake")
_recorders: "weakref.WeakSet[Recorder]" = weakref.WeakSet()


class Stats(msgspec.Struct, kw_only=True):
    """What a recorder has done so far."""

    begun: int
    """Episodes, in this process."""
    finished: int
    delivered: int
    """Episodes that the lake has, those that dead processes left among them."""
    aborted: int
    """Of these: episodes that dead processes had not finished."""
    rejected: int
    """Episodes that are in the table `rejects`, with the reason."""
    left_out: int
    """Episodes without a step, unfinished ones that were not wanted, and those that did not fit into the spool."""
    steps_left_out: int
    """Steps that were left without an action and without tool calls."""
    troubles: int
    """Calls that could not be taken as they were meant; the log says what to do."""
    spool_bytes: int
    problem: str | None
    """Why the spool cannot be written, or the lake not be reached, at the moment."""


class Recorder:
    """Records episodes into a lake; a context that delivers what is left when it is left. Thread-safe.

    Args:
        uri: the lake's folder or address; it is made if it is missing. A bucket is first asked when there is something
            to deliver.
        run: the run of the episodes.
        on_full: what becomes of an episode when the spool has no room: `drop` leaves it out and counts it, `block` lets
            the agent wait.
        durable: whether leaving an episode waits until it is on the disk (some milliseconds, at most a second).
        unfinished: what becomes of episodes whose process died before their end: `record` (as `aborted`), or `drop`.
        spool: folder for what is not delivered yet; below TRAJLAKE_SPOOL, or the user's state, unless given.
        max_bytes: of the spool.
        batch_seconds: how long a finished episode waits for others before it is delivered.
        batch_episodes: how many are delivered together at most.
        storage_options: of the lake's object store; see `lake.open`.
        defaults: fields of `lake.EpisodeRecord` that all episodes share: environment, policy, policy_version, ...

    Raises:
        UsageError: options that are not valid.
        LakeAccessError: the lake's folder, or that of the spool, cannot be made or written.
    """

    def __init__(
        self,
        uri: str | Path,
        *,
        run: str,
        on_full: Literal["drop", "block"] = "drop",
        durable: bool = True,
        unfinished: Unfinished = "record",
        spool: str | Path | None = None,
        max_bytes: int = MAX_BYTES,
        batch_seconds: float = BATCH_SECONDS,
        batch_episodes: int = BATCH_EPISODES,
        storage_options: dict[str, str] | None = None,
        **defaults: Any,
    ) -> None:
        _check(run, on_full, unfinished, defaults)
        self.run = run
        self._uri, self._storage_options = str(uri), storage_options
        self._root = root_of(self._uri, "recorder") if spool is None else Path(spool)
        self._max_bytes, self._defaults = max_bytes, defaults
        self._wait = threading.TIMEOUT_MAX if on_full == "block" else 0.0
        self._is_durable = durable
        with checked_place(self._uri):
            self._owner = owner_at(self._uri)
            self._sink = self._new_sink()
        self._delivery: Delivery | None = Delivery(
            self._open_lake,
            self._sink.spool,
            root=self._root,
            identify=lambda: identity_at(self._uri, self._storage_options),
            unfinished=unfinished,
            batch_seconds=batch_seconds,
            batch_episodes=batch_episodes,
        )
        self._batch_episodes, self._unsent = batch_episodes, 0
        self._sink.on_finished = self._finished
        self._delivery.start()
        _recorders.add(self)

    @guarded(OFF)
    def episode(
        self,
        task: str | int,
        *,
        parent: Episode | str | None = None,
        rollout_index: int | None = None,
        **fields: Any,
    ) -> Episode:
        """An episode begins: a context, which is recorded when it is left.

        Args:
            task: what is tried; episodes of one task and run are siblings, whose rewards are compared.
            parent: the episode that this one is a part of, or its id: this one is its sub-agent's.
            rollout_index: its number among its siblings; a random one unless given. A number that is used again needs
                a higher `attempt`: it is a conflict otherwise.
            fields: further ones of `lake.EpisodeRecord`: seed, attempt, collection_round, environment, tools, ...
        """
        self._require_open()
        if parent is not None:
            own = parent.id if isinstance(parent, Episode) else parent
            root = parent.record.root_episode_id if isinstance(parent, Episode) else None
            fields = {"relation": "subagent", "parent_episode_id": own, "root_episode_id": root or own} | fields
        given = self._defaults | fields
        extra = {name: plain(value) for name, value in given.items() if name not in _OF_EPISODES}
        if extra:
            valid = ", ".join(sorted(_OF_EPISODES))
            self._sink.trouble(f"an episode has no {list(extra)}, so they went to its `extra`; valid: {valid}")
        record = EpisodeRecord(
            task_id=str(task),
            run_id=self.run,
            steps=[],
            source_format=SOURCE_FORMAT,
            rollout_index=secrets.randbits(31) if rollout_index is None else rollout_index,
            **{name: value for name, value in given.items() if name in _OF_EPISODES},
        )
        if extra:
            record.extra = (record.extra or {}) | extra
        try:
            encode(new_key(), 0, Begin(episode=record))
        except FrameError:
            record, wrong = fitted(record)
            record.extra = (record.extra or {}) | {"not_taken": wrong}
            self._sink.trouble(f"values of an episode are of the wrong type and went to its `extra`: {list(wrong)}")
        self._sink.count("begun")
        return Episode(self._sink, record)

    @guarded()
    def record(self, record: EpisodeRecord) -> None:
        """Take a finished episode, durably like the others; the recorder's defaults are for what it does not say."""
        self._require_open()
        self._sink.count("begun")
        given = {"run_id": self.run} | self._defaults
        unsaid = {name: value for name, value in given.items() if getattr(record, name) is None}
        if self._take(Whole(episode=msgspec.structs.replace(record, **unsaid))):
            self._sink.count("finished")

    @guarded()
    def reject(self, reject: Reject) -> None:
        """Take what is no episode, and why, durably like the others; it goes to the table `rejects`."""
        self._require_open()
        texts = {"message": redacted(reject.message), "raw": excerpt(redacted(reject.raw))}
        self._take(Refused(reject=msgspec.structs.replace(reject, run_id=reject.run_id or self.run, **texts)))

    def _require_open(self) -> None:
        """Raise UsageError if it is closed."""
        if self._sink.is_closed:
            raise UsageError(f"the recorder is closed and takes nothing more. {CLOSED}")

    def _take(self, frame: Whole | Refused) -> bool:
        """Take what is finished in one frame; whether there was room for it."""
        is_taken = self._sink.take(new_key(), 0, frame)
        if is_taken:
            self._sink.on_finished()
            self._sink.sync()
        return is_taken

    def stats(self) -> Stats:
        """What was recorded, delivered and left out so far."""
        counts = self._sink.counts
        done = None if self._delivery is None else self._delivery.counts
        return Stats(
            begun=counts.begun,
            finished=counts.finished,
            delivered=0 if done is None else done.new + done.present,
            aborted=0 if done is None else done.aborted,
            rejected=0 if done is None else done.rejected,
            left_out=counts.lost + (0 if done is None else done.left_out),
            steps_left_out=counts.undecided,
            troubles=counts.troubles,
            spool_bytes=self._sink.spool.size,
            problem=self._sink.spool.problem or (None if done is None else done.problem),
        )

    def flush(self, timeout: float | None = None) -> bool:
        """Deliver what is finished now; whether it is all in the lake, or in `rejects`, within `timeout` seconds."""
        limit = TimeLimit(timeout)
        is_synced = self._sink.spool.sync(limit.left)
        return self._delivery is not None and self._delivery.flush(limit.left) and is_synced

    def close(self, timeout: float = CLOSING_SECONDS) -> bool:
        """Deliver what is finished and end within `timeout` seconds; whether nothing is left in the spool.

        Episodes that were never left are told, and end as they stand: `aborted`, with the `stop_reason` `never_left`.
        A lake that cannot be reached does not hold the agent up: what is left is delivered by the next recorder.
        """
        if self._sink.is_closed:
            return True
        self._sink.is_closed = True
        _recorders.discard(self)
        limit = TimeLimit(timeout)
        self._sink.spool.limit = limit
        self._stop_open(limit)
        if undecided := self._sink.counts.undecided:
            _log.warning("steps that were left out, without an action and without tool calls: %d", undecided)
        spool = self._sink.spool
        # A disk that was full is tried once more, for what is only in memory is lost with this process.
        left = limit.left
        is_synced = spool.sync(left if spool.problem is None else min(left, _FULL_DISK_SECONDS))
        is_empty = self._delivery is not None and self._delivery.close(limit.left) and is_synced
        if not spool.close(remove=is_empty, timeout=max(limit.left, _LETTING_GO_SECONDS)) and spool.held_bytes:
            self._sink.tell(f"{spool.held_bytes:,} bytes of episodes were lost: the disk of the spool takes nothing")
        if not is_empty and self._delivery is not None:
            problem = self.stats().problem or "it was not done in time"
            _log.warning(
                "episodes are left in %s, for they could not be delivered: %s. The next recorder of this lake and "
                "spool on this machine delivers them: lake.recorder(%r, ...)",
                self._root,
                problem,
                self._uri,
            )
        return is_empty

    def _stop_open(self, limit: TimeLimit) -> None:
        """End the episodes that nobody has left, and say which they were."""
        tasks = []
        for episode in list(self._sink.open.values()):
            if episode._stop(limit.left):
                tasks.append(episode.record.task_id)
        if tasks:
            named = ", ".join(map(repr, tasks[:_TASKS_TOLD])) + (", ..." if len(tasks) > _TASKS_TOLD else "")
            _log.warning(
                "episodes that were never left: %d (of task %s); they are recorded as they stood (aborted, "
                "never_left). Use `with recorder.episode(...)`, or call `episode.end()`",
                len(tasks),
                named,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open_lake(self) -> "Lake":
        return open_owned(self._owner, self._uri, self._storage_options)

    def _new_sink(self) -> Sink:
        spool = Spool.create(self._root, owner=self._owner, max_bytes=self._max_bytes)
        return Sink(spool, wait=self._wait, is_durable=self._is_durable)

    def _finished(self) -> None:
        """Wake the delivery when there is a batch."""
        self._unsent += 1
        if self._unsent >= self._batch_episodes and self._delivery is not None:
            self._unsent = 0
            self._delivery.wake()

    def _forked(self) -> None:
        """In the child: a spool of its own, and no delivery, as the libraries behind it do not survive a fork."""
        self._sink.is_left = True
        self._sink.spool.abandon()
        self._delivery = None
        self._sink = self._new_sink()


def _check(run: str, on_full: str, unfinished: str, defaults: dict[str, Any]) -> None:
    """Raise UsageError for options that cannot be meant: before the agent runs there is somebody to mend them."""
    if not isinstance(run, str) or not run.strip():
        raise UsageError(f"`run` is {run!r}; valid: a name that is not blank")
    for name, value, valid in (("on_full", on_full, ("drop", "block")), ("unfinished", unfinished, ("record", "drop"))):
        if value not in valid:
            raise UsageError(f"`{name}` is {value!r}; valid: {', '.join(valid)}")
    if unknown := sorted(defaults.keys() - _OF_EPISODES):
        raise UsageError(f"a recorder has no {unknown}; valid: its options, and {', '.join(sorted(_OF_EPISODES))}")


# Threads of the program may record until then. Executors take nothing any more, and cannot be imported for the first
# time: a lake in a bucket, which needs them, is delivered to by the next recorder.
@atexit.register
def _close_all() -> None:
    for recorder in list(_recorders):
        recorder.close()


def _forked() -> None:
    for recorder in list(_recorders):
        recorder._forked()


os.register_at_fork(after_in_child=_forked)
