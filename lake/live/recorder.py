"""The recorder: records agents of this process while they run, and delivers the episodes in the background.

    with lake.recorder("my.lake", run="agent-v3") as recorder:
        with recorder.episode("airline-12") as episode:
            with episode.step(context=[{"role": "user", "content": "..."}]) as step:
                step.action("I look it up.")
                with step.tool_call("search", {"q": "flights"}) as call:
                    call.result(search("flights"))
            episode.reward(1.0)

Every event goes to a spool on local disk at once, and the episode goes to the lake when it has ended. An episode whose
context was left gets into the lake exactly once, even if this process dies afterwards: the next recorder of the same
lake on this machine delivers the spools of dead processes.

A forked process records too. This process or the next one delivers its episodes.
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
from lake.live.delivery import BATCH_EPISODES, BATCH_SECONDS, CLOSING_SECONDS, Delivery, Unfinished
from lake.live.episode import Episode
from lake.live.frames import (
    SOURCE_FORMAT,
    BeginFrame,
    EpisodeFrame,
    FrameError,
    RejectFrame,
    encode,
    new_key,
    split_misfits,
    to_plain,
)
from lake.live.null_recorder import OFF
from lake.live.owners import look_up_lake_id, open_owners_lake, prepare_lake_folder, resolve_owner, spool_root
from lake.live.sink import CLOSED, Sink, guarded
from lake.live.spool import MAX_BYTES, Spool, TimeLimit
from lake.records import EpisodeRecord, Reject, excerpt
from lake.secrets import redact

if TYPE_CHECKING:
    from lake.lake import Lake

_OF_EPISODES = frozenset(EpisodeRecord.__struct_fields__) - {
    *("task_id", "run_id", "steps", "spans", "scores", "source_format")
}
"""Fields of `EpisodeRecord` that the caller may set."""
_FULL_DISK_SECONDS = 3.0
_UNLOCK_SECONDS = 0.1
"""How long closing waits for the spool's thread if no time is left."""
_TASKS_SHOWN = 5
_log = logging.getLogger("trajlake")
_recorders: "weakref.WeakSet[Recorder]" = weakref.WeakSet()


class Stats(msgspec.Struct, kw_only=True):
    """Numbers of a recorder so far."""

    begun: int
    """Episodes that began in this process."""
    finished: int
    delivered: int
    """Episodes in the lake, including those of dead processes."""
    aborted: int
    """Delivered episodes that dead processes had not finished."""
    rejected: int
    """Episodes in the table `rejects`, with the reason."""
    left_out: int
    """Episodes without a step, unfinished ones that are dropped, and those that did not fit into the spool."""
    steps_left_out: int
    """Steps that were left without an action and without tool calls."""
    troubles: int
    """Calls that could not be recorded as intended; the log has advice."""
    spool_bytes: int
    problem: str | None
    """Why the spool cannot be written, or the lake not be reached, now."""


class Recorder:
    """Records episodes into a lake. As a context, it delivers the rest when it is left. Thread-safe.

    Args:
        uri: folder or address of the lake; a missing lake is created. A bucket is first contacted when there is
        something
            to deliver.
        run: run of the episodes.
        on_full: `drop` leaves out and counts an episode that finds the spool full; `block` makes the agent wait.
        durable: whether leaving an episode waits until it is on disk (some milliseconds, at most a second).
        unfinished: `record` episodes whose process died before their end (as `aborted`), or `drop` them.
        spool: folder for undelivered episodes. Default: below TRAJLAKE_SPOOL, or the user's state.
        max_bytes: maximum bytes of the spool.
        batch_seconds: seconds that a finished episode waits for others before it is delivered.
        batch_episodes: maximum episodes that are delivered together.
        storage_options: options of the lake's object store; see `lake.open`.
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
        if not isinstance(run, str) or not run.strip():
            raise UsageError(f"`run` is {run!r}; valid: a name that is not blank")
        for name, option, valid in (
            ("on_full", on_full, ("drop", "block")),
            ("unfinished", unfinished, ("record", "drop")),
        ):
            if option not in valid:
                raise UsageError(f"`{name}` is {option!r}; valid: {', '.join(valid)}")
        if unknown := sorted(defaults.keys() - _OF_EPISODES):
            raise UsageError(f"a recorder has no {unknown}; valid: its options, and {', '.join(sorted(_OF_EPISODES))}")
        self.run = run
        self._uri, self._storage_options = str(uri), storage_options
        self._root = spool_root(self._uri, "recorder") if spool is None else Path(spool)
        self._max_bytes, self._defaults = max_bytes, defaults
        self._wait = threading.TIMEOUT_MAX if on_full == "block" else 0.0
        self._is_durable = durable
        with prepare_lake_folder(self._uri):
            self._owner = resolve_owner(self._uri)
            self._sink = self._create_sink()
        self._delivery: Delivery | None = Delivery(
            self._open_lake,
            self._sink.spool,
            root=self._root,
            identify=lambda: look_up_lake_id(self._uri, self._storage_options),
            unfinished=unfinished,
            batch_seconds=batch_seconds,
            batch_episodes=batch_episodes,
        )
        self._batch_episodes, self._unsent = batch_episodes, 0
        self._sink.on_finished = self._count_finished
        self._delivery.start()
        _recorders.add(self)

    @guarded(OFF)
    def episode(
        self, task: str | int, *, parent: Episode | str | None = None, rollout_index: int | None = None, **fields: Any
    ) -> Episode:
        """Begin an episode: a context that is recorded when it is left.

        Args:
            task: the task. Episodes of one task and run are siblings, whose rewards are compared.
            parent: the episode, or its id, that calls this one as a sub-agent.
            rollout_index: number among its siblings. Default: a random one. A number that is used again needs a higher
                `attempt`; otherwise it is a conflict.
            fields: more fields of `lake.EpisodeRecord`: seed, attempt, collection_round, environment, tools, ...
        """
        self._require_open()
        if parent is not None:
            parent_id = parent.id if isinstance(parent, Episode) else parent
            root_id = parent.record.root_episode_id if isinstance(parent, Episode) else None
            relation = {"relation": "subagent", "parent_episode_id": parent_id, "root_episode_id": root_id or parent_id}
            fields = relation | fields
        fields = self._defaults | fields
        extra = {name: to_plain(value) for name, value in fields.items() if name not in _OF_EPISODES}
        if extra:
            valid = ", ".join(sorted(_OF_EPISODES))
            self._sink.report_trouble(f"an episode has no {list(extra)}, so they went to its `extra`; valid: {valid}")
        record = EpisodeRecord(
            task_id=str(task),
            run_id=self.run,
            steps=[],
            source_format=SOURCE_FORMAT,
            rollout_index=secrets.randbits(31) if rollout_index is None else rollout_index,
            **{name: value for name, value in fields.items() if name in _OF_EPISODES},
        )
        if extra:
            record.extra = (record.extra or {}) | extra
        try:
            encode(new_key(), 0, BeginFrame(episode=record))
        except FrameError:
            record, misfits = split_misfits(record)
            record.extra = (record.extra or {}) | {"not_taken": misfits}
            self._sink.report_trouble(
                f"values of an episode are of the wrong type and went to its `extra`: {list(misfits)}"
            )
        self._sink.count("started")
        return Episode(self._sink, record)

    @guarded()
    def record(self, record: EpisodeRecord) -> None:
        """Record a finished episode, durably like the others. The recorder's defaults fill its missing fields."""
        self._require_open()
        self._sink.count("started")
        fields = {"run_id": self.run} | self._defaults
        missing = {name: value for name, value in fields.items() if getattr(record, name) is None}
        if self._append(EpisodeFrame(episode=msgspec.structs.replace(record, **missing))):
            self._sink.count("finished")

    @guarded()
    def reject(self, reject: Reject) -> None:
        """Record an input that is not an episode, with the reason, in the table `rejects`."""
        self._require_open()
        texts = {"message": redact(reject.message), "raw": excerpt(redact(reject.raw))}
        self._append(RejectFrame(reject=msgspec.structs.replace(reject, run_id=reject.run_id or self.run, **texts)))

    def _require_open(self) -> None:
        if self._sink.is_closed:
            raise UsageError(f"the recorder is closed and records nothing more. {CLOSED}")

    def _append(self, frame: EpisodeFrame | RejectFrame) -> bool:
        """Append a finished episode or reject, and return whether there was room."""
        has_room = self._sink.append(new_key(), 0, frame)
        if has_room:
            self._sink.on_finished()
            self._sink.sync()
        return has_room

    def stats(self) -> Stats:
        """Return the numbers of recorded, delivered and left-out episodes so far."""
        counts = self._sink.counts
        delivery = None if self._delivery is None else self._delivery.counts
        return Stats(
            begun=counts.started,
            finished=counts.finished,
            delivered=0 if delivery is None else delivery.new + delivery.present,
            aborted=0 if delivery is None else delivery.aborted,
            rejected=0 if delivery is None else delivery.rejected,
            left_out=counts.lost + (0 if delivery is None else delivery.left_out),
            steps_left_out=counts.undecided,
            troubles=counts.troubles,
            spool_bytes=self._sink.spool.size,
            problem=self._sink.spool.problem or (None if delivery is None else delivery.problem),
        )

    def flush(self, timeout: float | None = None) -> bool:
        """Deliver the finished episodes now; return whether all are in the lake or `rejects` in `timeout` seconds."""
        limit = TimeLimit(timeout)
        is_synced = self._sink.spool.sync(limit.remaining)
        return self._delivery is not None and bool(self._delivery.flush(limit.remaining)) and is_synced

    def close(self, timeout: float = CLOSING_SECONDS) -> bool:
        """Deliver the finished episodes and stop within `timeout` seconds; return whether the spool is empty.

        Open episodes are logged and end as they stand: `aborted`, with the `stop_reason` `never_left`. A lake that
        cannot be reached does not hold up the agent: the next recorder delivers the rest.
        """
        if self._sink.is_closed:
            return True
        self._sink.is_closed = True
        _recorders.discard(self)
        limit = TimeLimit(timeout)
        self._sink.spool.limit = limit
        tasks = [episode.record.task_id for episode in list(self._sink.open.values()) if episode._stop(limit.remaining)]
        if tasks:
            named = ", ".join(map(repr, tasks[:_TASKS_SHOWN])) + (", ..." if len(tasks) > _TASKS_SHOWN else "")
            _log.warning(
                "episodes that were never left: %d (of task %s); they are recorded as they stood (aborted, "
                "never_left). Use `with recorder.episode(...)`, or call `episode.end()`",
                len(tasks),
                named,
            )
        if undecided := self._sink.counts.undecided:
            _log.warning("steps that were left out, without an action and without tool calls: %d", undecided)
        spool = self._sink.spool
        # A full disk is tried again, because frames in memory are lost with this process.
        remaining = limit.remaining
        is_synced = spool.sync(remaining if spool.problem is None else min(remaining, _FULL_DISK_SECONDS))
        is_empty = self._delivery is not None and self._delivery.close(limit.remaining) and is_synced
        is_written = spool.close(remove=is_empty, timeout=max(limit.remaining, _UNLOCK_SECONDS))
        if not is_written and spool.unwritten_bytes:
            self._sink.warn_once(
                f"{spool.unwritten_bytes:,} bytes of episodes were lost: the disk of the spool accepts no data"
            )
        if not is_empty and self._delivery is not None:
            problem = self.stats().problem or "it was not done in time"
            _log.warning(
                "could not deliver all episodes: %s. They remain in %s. The next recorder of this lake and spool on "
                "this machine delivers them: lake.recorder(%r, ...)",
                problem,
                self._root,
                self._uri,
            )
        return is_empty

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open_lake(self) -> "Lake":
        return open_owners_lake(self._owner, self._uri, self._storage_options)

    def _create_sink(self) -> Sink:
        spool = Spool.create(self._root, owner=self._owner, max_bytes=self._max_bytes)
        return Sink(spool, wait=self._wait, is_durable=self._is_durable)

    def _count_finished(self) -> None:
        """Wake the delivery when a batch is complete."""
        self._unsent += 1
        if self._unsent >= self._batch_episodes and self._delivery is not None:
            self._unsent = 0
            self._delivery.wake()

    def _move_to_child(self) -> None:
        """Give a forked child its own spool. It does not deliver, because its libraries do not survive a fork."""
        self._sink.is_forked = True
        self._sink.spool.abandon()
        self._delivery = None
        self._sink = self._create_sink()


# Threads of the program may record until the exit. By then, executors accept no work and cannot be imported for the
# first time. A lake in a bucket needs them, so the next recorder delivers to it.
@atexit.register
def _close_all() -> None:
    for recorder in list(_recorders):
        recorder.close()


def _move_all_to_child() -> None:
    for recorder in list(_recorders):
        recorder._move_to_child()


os.register_at_fork(after_in_child=_move_all_to_child)
