"""The episodes that are open, and what each call adds to them.

A call that names its rollout is a step of that one. A call that names none belongs to the episode whose conversation it
goes on with (`prefixes`); if it goes on with none, an episode begins. Inside an episode, a prompt that goes on with no
earlier call opens a conversation of its own, as `lake.formats.chat.calls` has it for files: a rewritten history or
another agent. `steps` says how that is told.

A call that failed, or whose answer did not get through, is no decision: it is a span, with the reason and with what of
the answer was there. An episode of which nothing but such calls is known has one step that is not trained on.

Spans that an exporter of OpenTelemetry sends belong to the rollout that its address names, else a trace is an episode,
which ends once its root has ended and nothing more of it came for a while.

What a record needs and nobody says (the number of an unnamed rollout) is chosen when the episode begins, and is in its
first frame. Nothing here waits: frames are put into memory, and the spool brings them to the disk. What is kept of an
open episode is some hashes a step; when too many are open, the one that was silent for longest ends.
"""

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from lake import ids
from lake.errors import UsageError
from lake.formats.base.rows import ShapeError
from lake.formats.chat.chat_completions import Completion
from lake.live.calls.address import Address
from lake.live.calls.prefixes import Prefixes, Prompt
from lake.live.calls.steps import Call, Made, begun_by, known_step, made_step, span_of, unanswered_step
from lake.live.frames import (
    SOURCE_FORMAT,
    Begin,
    End,
    Frame,
    FrameError,
    Lost,
    Span,
    Step,
    Traced,
    new_key,
)
from lake.live.proxy.counts import Counts
from lake.live.proxy.ends import Ends
from lake.live.proxy.rollouts import Ending, Rollout, named_record
from lake.live.proxy.under_way import UnderWay
from lake.live.spool import SpoolFullError
from lake.records import EpisodeRecord, episode_id

DEFAULT_RUN = "live"
MOST_HELD = 200_000
"""Open episodes and their steps, together."""
MOST_TRACES = 10_000
"""Open ones that name no rollout: services that write many crowd out each other."""
SETTLING_SECONDS = 10.0
"""How long a trace whose root has ended waits for spans of other processes and batches: they are sent every 5 s."""
Emit = Callable[[bytes, int, Frame, bool], None]
"""Takes a frame: key, number, frame, whether it is taken even where there is no room. Raises SpoolFullError."""


class Book:
    """The open episodes. Not thread-safe: the event loop's.

    Args:
        emit: where frames go.
        run: of calls that name none.
        most_held: how many open episodes and steps of them there may be, together.
        ended: file of the rollouts that have ended; None keeps them in memory.
    """

    def __init__(
        self, emit: Emit, *, run: str = DEFAULT_RUN, most_held: int = MOST_HELD, ended: Path | None = None
    ) -> None:
        self.counts = Counts()
        self.ends = Ends(run, ended)
        self._emit, self._run, self._most_held = emit, run, most_held
        self._open: dict[bytes, Rollout] = {}
        """The one that was silent for longest first."""
        self._held = 0
        """Open episodes and their steps."""
        self._named: dict[Address, Rollout] = {}
        self._traced: dict[tuple[Address, str], Rollout] = {}
        """Traces that name no rollout."""
        self._prefixes: dict[Address, Prefixes] = {}
        """By what calls say of themselves: those that name no rollout share one."""
        self._waiting: dict[tuple[Address, bytes], bytes] = {}
        """First prompts that failed, by their hash, and the unnamed episodes that they began."""
        self.under_way = UnderWay()

    # ------------------------------------------------------------ calls

    def check(self, address: Address) -> None:
        """Raise EndedError for an address whose calls and spans are not taken any more."""
        if self.own(address) not in self._named:
            self.ends.check(address)

    def own(self, address: Address) -> Address:
        """The address by which a rollout is known here."""
        return address.of_rollout(self._run)

    def add(self, call: Call) -> bool:
        """Record a call; whether there was room for it."""
        self.counts.calls += 1
        address = self.own(call.address)
        prefixes = self._prefixes.setdefault(address, Prefixes())
        answer = call.answer
        if answer is not None and answer.message is None and not answer.action_ids:
            answer = None
        prompt = Prompt(call.asked, answer.prompt_ids if answer else ())
        rollout = self._named.get(address) or (None if address.is_named else self._continued(prompt, address, prefixes))
        rollout = rollout or self._begin(call.address, **begun_by(call, answer))
        self._touch(rollout)
        if answer is None:
            self._add_failed(rollout, call)
        else:
            self._add_step(rollout, call, answer, prompt, prefixes)
        self._make_room()
        return not rollout.is_lost

    def receive(self, address: Address, found: Traced, at: datetime, *, is_over: bool) -> None:
        """Record spans that were received; `is_over`: the root of their trace is among them. Raises EndedError."""
        self.check(address)  # its agent may have ended it while they were unpacked
        own = self.own(address)
        rollout = self._named.get(own) if own.is_named else self._traced.get((own, found.trace_id))
        if rollout is None:
            rollout = self._begin(address, address.task or found.trace_id, is_trace=not own.is_named, started_at=at)
        self._touch(rollout)
        rollout.is_settling |= is_over and not own.is_named
        rollout.count_spans(found)
        self._take(rollout, found)
        self._make_room()

    def _continued(self, prompt: Prompt, address: Address, prefixes: Prefixes) -> Rollout | None:
        """The open episode that a call without a name goes on with."""
        match = prefixes.by_prompt(prompt)
        key = match.known.owner if match else self._waiting.get((address, prompt.exact))
        return None if key is None else self._open.get(key)

    def _begin(self, address: Address, task_id: str, *, is_trace: bool = False, **fields: Any) -> Rollout:
        """Begin an episode; `is_trace`: its task is a trace of its own, as in files of traces."""
        key, own = new_key(), self.own(address)
        number = 0 if is_trace else int.from_bytes(key[:4], "little") >> 1
        after = self.ends.before(own) if own.is_named else None
        record = EpisodeRecord(
            task_id=task_id,
            steps=[],
            run_id=address.run or self._run,
            rollout_index=number if address.rollout is None or after else address.rollout,
            attempt=address.attempt or 0,
            agent_id=address.agent,
            collection_round=address.collection_round,
            seed=address.seed,
            split=address.split,
            source_format=SOURCE_FORMAT,
            source_version="proxy",
            source_uri=msgspec.structs.replace(address, parent=None).uri,
            parent_episode_id=after,
            relation="continuation" if after else None,
            **fields,
        )
        if address.parent is not None and self.own(address.parent) != own and not after:
            self._name_parent(record, address.parent)
        rollout = Rollout(key, own, record)
        rollout.trace_id = task_id if is_trace else None
        self._place(rollout)
        self.counts.episodes += 1
        self._take(rollout, Begin(episode=record))
        return rollout

    def _place(self, rollout: Rollout) -> None:
        self._open[rollout.key] = rollout
        self._held += 1
        if rollout.address.is_named:
            self._named[rollout.address] = rollout
        elif rollout.trace_id is not None:
            self._traced[rollout.address, rollout.trace_id] = rollout

    def _touch(self, rollout: Rollout) -> None:
        rollout.touched = time.monotonic()
        self._open[rollout.key] = self._open.pop(rollout.key)

    def _name_parent(self, record: EpisodeRecord, parent: Address) -> None:
        """Say whose sub-agent an episode is; by its name alone, where which of its rollouts it is cannot be known."""
        record.relation = "subagent"
        record.parent_episode_id = self._id_of(parent)
        if record.parent_episode_id is None:
            record.extra = {"parent": parent.uri}

    def _id_of(self, address: Address) -> str | None:
        """The id of an episode that calls name; a name leaves out the agent."""
        address = self.own(address)
        named = self._named.get(address)
        for known, rollout in () if named else self._named.items():
            if known.task == address.task and msgspec.structs.replace(known, agent=None) == address:
                named = rollout
        if named is not None:
            return self._text_id(named.record)
        if (ended := self.ends.before(address)) is not None or address.rollout is None:
            return ended
        return self._text_id(named_record(address))

    def _text_id(self, record: EpisodeRecord) -> str:
        return ids.to_text(episode_id(record, record.run_id or self._run))

    def _add_failed(self, rollout: Rollout, call: Call) -> None:
        self.counts.failed += 1
        span = Span(span=span_of(call, f"call-{rollout.frames}", rollout.steps))
        rollout.count_failed(span)
        self._take(rollout, span)
        self._wait(rollout)

    def _wait(self, rollout: Rollout) -> None:
        """Expect the first prompt of an unnamed episode once more."""
        if not rollout.address.is_named and (first := rollout.first_prompt) is not None:
            self._waiting[rollout.address, first] = rollout.key

    def _add_step(self, rollout: Rollout, call: Call, answer: Completion, prompt: Prompt, prefixes: Prefixes) -> None:
        try:
            index = rollout.steps
            made = made_step(call, answer, prompt, rollout.record, prefixes, rollout.key, index, is_first=not index)
        except ShapeError as error:
            self._add_failed(rollout, msgspec.structs.replace(call, error=f"the answer cannot be read: {error}"))
            return
        if self._take(rollout, made.frame):
            self._waiting.pop((rollout.address, rollout.first_prompt or b""), None)
            self.counts.steps += 1
            self._keep(rollout, made, prefixes)

    def _keep(self, rollout: Rollout, made: Made, prefixes: Prefixes) -> None:
        """Let later prompts go on from a step."""
        rollout.count_step(made.frame)
        prefixes.add(made.samples)
        if made.before is not None:
            made.before.times += 1
        self._held += 1

    # ------------------------------------------------------------ ends

    def check_end(self, address: Address, ending: Ending) -> None:
        """Raise what `end` would, before the calls of the rollout are waited for or broken off; nothing changes."""
        address = self.own(address)
        rollout, coming = self._ended_by(address, ending), self.under_way.of(address)
        if rollout is None and not coming and not self._may_begin(address, ending):
            self.ends.again(address, ending, len(self._open))
        else:
            ending.check((rollout.steps if rollout else 0) + coming)

    def end(self, address: Address, ending: Ending, at: datetime) -> dict[str, Any]:
        """End an episode, and say which it was. The same end of a named rollout once more is answered as it was.

        Raises:
            EndedError: it has ended, and something else was said of it.
            UsageError: there is no such episode, or what is said of it is not valid; nothing has changed.
        """
        address = self.own(address)
        rollout = self._ended_by(address, ending)
        if rollout is None and not self._may_begin(address, ending):
            return self.ends.again(address, ending, len(self._open))
        ending.check(rollout.steps if rollout else 0)
        if rollout is None:
            begun = ending.initial_messages or []
            rollout = self._begin(address, str(address.task), started_at=at, initial_messages=begun)
        frames, last = ending.frames(at)
        for frame in frames:
            self._take(rollout, frame)
        reply = rollout.told() | {"episode_id": self._text_id(rollout.record)}
        self._finish(rollout, last, is_told=ending.closes)
        if address.is_named:
            self.ends.add(address, str(reply["episode_id"]), ending, reply)
        for other in [one for one in self._named.values() if ending.closes and one.address.is_part_of(address)]:
            self._finish(other, End(ended_at=at, status=ending.status, stop_reason=ending.stop_reason))
        return reply

    def _ended_by(self, address: Address, ending: Ending) -> Rollout | None:
        """The open episode that an end is of; None: a named rollout is not open. Raises UsageError: it names none."""
        rollout = self._named.get(address)
        if rollout is None and ending.response_id is not None and not address.is_named:
            known = self._prefixes.get(address, Prefixes()).by_name(ending.response_id)
            rollout = self._open.get(known.owner) if known else None
        if rollout is None and not address.is_named:
            found = f"no rollout, and no `response_id` of an open episode ({len(self._open)} are open)"
            raise UsageError(f"the call names {found}; valid: .../ep/KEY/v1/end, for example")
        return rollout

    def _may_begin(self, address: Address, ending: Ending) -> bool:
        """Whether an end records a rollout of which no call came."""
        return ending.closes and not self.ends.is_known(address)

    def expire(self, at: datetime, idle: float) -> None:
        """End the episodes of which no call was heard for `idle` seconds."""
        now = time.monotonic()
        for rollout in list(self._open.values()):
            silent = now - rollout.touched
            if silent < min(idle, SETTLING_SECONDS):
                break
            if rollout.is_settling:
                self._finish(rollout, End(ended_at=at))
            elif silent >= idle and not self.under_way.may_be_of(rollout, idle):
                self._give_up(rollout, at, "idle")

    def stop(self, at: datetime, *, drop: bool = False) -> None:
        """End all episodes: agents cannot go on without the proxy. `drop`: they are to be played anew, and left out."""
        self.counts.left_out, self.counts.stopped = (len(self._open), 0) if drop else (0, len(self._open))
        for rollout in list(self._open.values()):
            if drop:
                self._lose(rollout, "unfinished")
                self._forget(rollout)
            else:
                self._give_up(rollout, at, "proxy_stopped")

    def _make_room(self) -> None:
        """End episodes that were silent for longest while too much is held."""
        while (are_traces := len(self._traced) > MOST_TRACES) or self._held > self._most_held:
            crowd = self._traced.values() if are_traces else self._open.values()
            oldest = next(iter(crowd))
            # A call that names no rollout may belong to any; the worst that comes of it is another episode.
            is_idle = (one for one in crowd if not (one.address.is_named and self.under_way.of(one.address)))
            self.counts.crowded_out += 1
            self._give_up(next(is_idle, oldest), datetime.now(UTC), "crowded_out")

    def _give_up(self, rollout: Rollout, at: datetime, reason: str) -> None:
        """End an episode whose end nobody told."""
        status = "completed" if rollout.problem is None else "failed"
        self._finish(rollout, End(ended_at=at, stop_reason=reason, status=status, error=rollout.problem))
        if rollout.address.is_named:
            self.ends.add(rollout.address, self._text_id(rollout.record))

    def _finish(self, rollout: Rollout, end: End, *, is_told: bool = False) -> None:
        """The last of an episode; `is_told`: it is one even if no call was made."""
        if not rollout.steps and (rollout.failed or (is_told and rollout.spans is None)):
            begun = rollout.record
            self._take(rollout, unanswered_step(begun.initial_messages or [], begun.policy, begun.started_at))
            if end.status == "completed" and rollout.failed:
                end.status, end.error = "failed", end.error or rollout.problem
        end.extra = {"failed_calls": rollout.failed} if rollout.failed else None
        self._take(rollout, end, is_reserved=True)
        self.counts.ended += 1
        self._forget(rollout)

    def _forget(self, rollout: Rollout) -> None:
        del self._open[rollout.key]
        self._held -= 1 + rollout.steps
        self._named.pop(rollout.address, None)
        if rollout.trace_id is not None:
            del self._traced[rollout.address, rollout.trace_id]
        self._waiting.pop((rollout.address, rollout.first_prompt or b""), None)
        prefixes = self._prefixes.get(rollout.address)
        if prefixes is not None:
            prefixes.forget(rollout.key)
            if not prefixes.has_calls:
                del self._prefixes[rollout.address]

    # ------------------------------------------------------------ frames

    def resume(self, key: bytes, frames: Iterable[Frame]) -> None:
        """Go on with an episode that an earlier process left open."""
        found = list(frames)
        if not found or not isinstance(found[0], Begin):
            return
        record = found[0].episode
        address = Address.of_uri(record.source_uri).of_rollout(record.run_id or self._run)
        rollout = Rollout(key, address, record)
        rollout.frames = len(found)
        if not address.is_named and any(isinstance(frame, Traced) for frame in found):
            rollout.trace_id = record.task_id
        self._place(rollout)
        prefixes = self._prefixes.setdefault(address, Prefixes())
        for frame in found:
            if isinstance(frame, Step):
                self._keep(rollout, known_step(rollout.key, frame, prefixes), prefixes)
            elif isinstance(frame, Span):
                rollout.count_failed(frame)
            elif isinstance(frame, Traced):
                rollout.count_spans(frame)
        self._wait(rollout)

    def _take(self, rollout: Rollout, frame: Frame, *, is_reserved: bool = False) -> bool:
        """Hand a frame on; whether it was taken. An episode that lacks one is left out, and counted."""
        if rollout.is_lost:
            return False
        try:
            self._emit(rollout.key, rollout.frames, frame, is_reserved)
        except (SpoolFullError, FrameError) as error:
            self.counts.dropped += 1
            self._lose(rollout, str(error))
            return False
        rollout.frames += 1
        return True

    def _lose(self, rollout: Rollout, reason: str) -> None:
        rollout.is_lost = True
        with suppress(SpoolFullError):
            self._emit(rollout.key, rollout.frames, Lost(reason=reason), True)
