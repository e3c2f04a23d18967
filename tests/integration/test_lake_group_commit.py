"""Writers of one machine whose batches a committer commits together, and committers that die.

1. Killed anywhere: between any two lines of a round, and as real processes at random moments; nothing is lost and
   nothing is there twice, and each writer hears once that its batch is new.
2. Without a committer: alone, no room for one, one that does not answer.
3. A committer that takes long and is waited for.
4. Writers that say what no one can read, or do not read.

The rule by which attempts are accepted together is in test_lake_ledger.
"""

import itertools
import json
import os
import random
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

import lake
from lake import EpisodeRecord
from lake.errors import UsageError
from lake.records import identify
from lake.storage.commits import CommitLostError
from lake.storage.objects import Objects
from lake.storage.store import Store
from lake.write.group_commit import client, protocol, server
from lake.write.group_commit.client import Committer, GroupCommit
from lake.write.group_commit.protocol import (
    SEATS,
    AttemptReply,
    AttemptRequest,
    FailureReply,
    LookupReply,
    LookupRequest,
    MeetingPoint,
    WorkingReply,
)
from lake.write.ledger import EpisodeLookup, Ledger
from lake.write.writer import EpisodeWriter
from testkit.committers import DyingCommitter, committer_of, killing, start_committer
from testkit.copies import copied, empty_lake
from testkit.episodes import assert_whole, episode
from testkit.fault_log import Faults
from testkit.object_store import Store as Bucket
from testkit.processes import Forked, at_the_gate
from testkit.wording import Wording

BATCHES, SIZE = 4, 3
PATIENCE = 600.0
"""Seconds that a writer may take: those whose committers are killed race each other, and a bucket here is slow."""
NOTHING = EpisodeLookup(0, {}, {}, set())


def start_writers(objects: Objects, number: int, writers: int) -> Callable[[], None]:
    """Let writers loose on a lake; what waits for their end: each heard once that its batch is new."""
    options = json.dumps(objects.options)
    names = [f"fleet {number} writer {n}" for n in range(writers)]
    workers = [Forked("testkit.group_commit_worker", objects.root, options, name, BATCHES, SIZE) for name in names]
    at_the_gate(*workers)

    def finished() -> None:
        for worker in workers:
            assert worker.finish(PATIENCE) == str(BATCHES * SIZE)

    return finished


def assert_all_there(objects: Objects, writers: int) -> None:
    """All that fleets recorded is there once, their jobs among it."""
    snapshot = lake.open(objects.root, storage_options=objects.options).snapshot()
    assert assert_whole(snapshot) == writers * BATCHES * SIZE
    rollouts = snapshot.scan("episodes").select("task_id", "rollout_index").collect()
    assert rollouts.n_unique() == writers * BATCHES * SIZE
    tokens = snapshot.scan("tokens").select("episode_id", "step_index").collect()
    assert tokens.n_unique() == tokens.height == writers * BATCHES * SIZE * 2
    assert snapshot.sql("SELECT status FROM job_runs")["status"].to_list() == ["succeeded"] * writers


def records(task: str, count: int = SIZE, **fields: Any) -> list[EpisodeRecord]:
    """Episodes with tokens, in a run."""
    return [episode(task, n, tokens=True, run_id="run", **fields) for n in range(count)]


# ---------------------------------------------------------------- 1. killed


def another(store: Store, batch: list[EpisodeRecord]) -> AttemptRequest:
    """A write attempt as another writer would hand it over."""
    identities = [identify(record, "run") for record in batch]
    ledger, writer = Ledger(store), EpisodeWriter(store)
    lookup = ledger.look_up([i.episode_id for i in identities], [i.group_id for i in identities])
    return AttemptRequest.from_attempt(writer._stage(list(zip(batch, identities, strict=True)), None, lookup))


def before(folder: Path) -> None:
    """A lake with episodes that there are retries of."""
    lake.open(folder, create=True).append(records("before", attempt=0), run_id="run")


def died_at(folder: Path, line: int) -> DyingCommitter:
    """Let the committer of two batches die at a line, and look at the lake when the writer is done."""
    lk = copied("before", before, folder)
    store = lk._store
    retries = records("before", attempt=1)
    fleet = DyingCommitter(store.objects, another(Store(store.objects), records("beside")), line)
    outcome = EpisodeWriter(store, fleet).write([*retries, *records("new")])  # type: ignore[arg-type]
    assert (outcome.new, outcome.new_steps, outcome.present) == (2 * SIZE, 4 * SIZE, 0)
    snapshot = lk.snapshot()
    beside = snapshot.scan("episodes").filter(task_id="beside").collect().height
    assert beside in (0, SIZE), "a batch is there as a whole or not at all"
    assert assert_whole(snapshot) == 2 * SIZE + beside
    assert set(outcome.write_ids) <= snapshot.accepted_write_ids
    return fleet


@pytest.mark.parametrize("share", [0.01, pytest.param(0.2, marks=pytest.mark.slow)])
def test_killed_between_any_two_lines_of_a_round(tmp_path: Path, share: float) -> None:
    """Of two batches, one with retries: no matter what was committed, the writer hears once that its episodes are
    new."""
    undisturbed = died_at(tmp_path / "undisturbed", 0)
    assert not undisturbed.died
    assert undisturbed.lines > 100
    lines = range(1, undisturbed.lines + 1)
    with Faults() as faults:
        for line in random.Random(1).sample(lines, round(share * len(lines))):
            assert died_at(tmp_path / str(line), line).died
            faults.inject("committer killed between two lines of a round")


@pytest.mark.parametrize(
    ("where", "writers", "kills"),
    [
        ("folder", 4, 2),
        pytest.param("bucket", 2, 1, marks=pytest.mark.slow),
        pytest.param("folder", 8, 50, marks=pytest.mark.slow),
        pytest.param("bucket", 8, 50, marks=pytest.mark.slow),
    ],
)
def test_killed_at_random_moments(tmp_path: Path, s3: Bucket, where: str, writers: int, kills: int) -> None:
    root, options = (str(tmp_path / "lake"), {}) if where == "folder" else (s3.root, s3.options)
    lake.open(root, create=True, storage_options=options)
    objects, rng, killed, fleets = Objects(root, options), random.Random(kills), 0, 0
    present = MeetingPoint(objects).register_writer()
    with Faults() as faults:
        while killed < kills:
            start_committer(objects)
            finished, done = start_writers(objects, fleets, writers), threading.Event()
            with ThreadPoolExecutor(1) as pool:
                killer = pool.submit(killing, objects, kills - killed, done, rng)
                try:
                    finished()
                finally:
                    done.set()
            faults.inject("committer killed at a random moment", killer.result())
            killed, fleets = killed + killer.result(), fleets + 1
            assert_all_there(objects, fleets * writers)
    os.close(present)


def test_a_batch_that_loses_again_and_again_goes_to_the_committer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lk = empty_lake(tmp_path / "lake")
    near, lost = DyingCommitter(lk._store.objects), list[int]()

    class LateCommitter:
        @contextmanager
        def connect(self, lost_races: int) -> Iterator[DyingCommitter | None]:
            lost.append(lost_races)
            yield near if lost_races else None

    def too_late(*_: Any) -> None:
        raise CommitLostError

    monkeypatch.setattr(lk._store, "append_episodes", too_late)
    outcome = EpisodeWriter(lk._store, LateCommitter()).write(records("task"))  # type: ignore[arg-type]
    assert (outcome.new, len(outcome.write_ids), lost) == (SIZE, 1, [0, 3])
    assert assert_whole(lk.snapshot()) == SIZE


def test_each_request_of_a_round_has_its_own_answer(tmp_path: Path) -> None:
    """First come, first served: of two attempts with the same episodes the second is not accepted."""
    lk = empty_lake(tmp_path / "lake")
    lk.append(records("there"), run_id="run")
    attempts = [another(Store(lk._store.objects), records("task")) for _ in range(2)]
    stored, task = (identify(records(name)[0], "run") for name in ("there", "task"))
    looks = [LookupRequest([identity.episode_id], [identity.group_id]) for identity in (stored, task)]
    *done, first_look, second_look = server.answer_requests(Ledger(lk._store), [*attempts, *looks])
    assert done == [AttemptReply(is_accepted=True), AttemptReply(is_accepted=False)]
    for answer, identity in ((first_look, stored), (second_look, task)):
        assert isinstance(answer, LookupReply)
        assert answer.lookup.contents.keys() == {identity.episode_id}
        assert {slot[0] for slot in answer.lookup.newest} == {identity.group_id}


def test_a_commit_whose_acknowledgement_is_lost_is_told_as_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = empty_lake(tmp_path / "lake")._store
    bring = another(Store(store.objects), records("task"))
    append = store.append_episodes

    def unheard(*args: Any) -> None:
        append(*args)
        raise CommitLostError

    monkeypatch.setattr(store, "append_episodes", unheard)
    assert server.answer_requests(Ledger(store), [bring]) == [AttemptReply(is_accepted=True)]


# ---------------------------------------------------------------- 2. without


def test_a_writer_that_is_alone_asks_nobody(tmp_path: Path) -> None:
    lk = empty_lake(tmp_path / "lake")
    fleet = GroupCommit(lk._store.objects)
    with fleet.connect(lost_races=1) as far:
        assert far is None
    other_client = GroupCommit(lk._store.objects)
    start_committer(lk._store.objects)
    with other_client.connect(lost_races=0), fleet.connect(lost_races=1) as far:
        assert far is not None, "there is another writer, and a committer"


def test_one_of_many_starts_a_committer_before_it_loses_a_race(tmp_path: Path) -> None:
    """Those who came first have seats; the next one that finds none free has not lost any."""
    objects = empty_lake(tmp_path / "lake")._store.objects
    fleets = [GroupCommit(objects) for _ in range(SEATS + 2)]
    with ExitStack() as stack:
        *few, last = (stack.enter_context(fleet.connect(lost_races=0)) for fleet in fleets)
        # The first is alone, and takes no seat.
        assert (few, last is None) == ([None] * (SEATS + 1), False)
    assert committer_of(objects) is not None


def test_where_there_is_no_room_for_one_each_writer_commits_by_itself_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, wording: Wording
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "file"))
    lk = empty_lake(tmp_path / "lake")
    for task in ("a", "b"):
        assert lk.append(records(task), run_id="run").new == SIZE
    (message,) = [wording(record.getMessage()) for record in caplog.records]
    assert message.startswith(f"{lk.uri}: ")
    assert "commits its batches locally" in message
    assert "Not a directory" in message
    assert "set XDG_RUNTIME_DIR" in message


def test_a_committer_that_stands_still_holds_writers_up_for_a_while_and_doubles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lk, second = (lake.open(tmp_path / "lake", create=True) for _ in range(2))
    second.append(records("other"), run_id="run")
    pid = start_committer(lk._store.objects)
    assert lk.append(records("before"), run_id="run").new == SIZE
    os.kill(pid, signal.SIGSTOP)
    monkeypatch.setattr(client, "ANSWER_SECONDS", 0.2)
    assert lk.append(records("task"), run_id="run").new == SIZE
    assert lk.append(records("after"), run_id="run").new == SIZE
    assert "does not answer" in caplog.text
    os.kill(pid, signal.SIGCONT)
    monkeypatch.undo()
    assert second.append([*records("task"), *records("later")], run_id="run").new == SIZE
    assert assert_whole(lk.snapshot()) == 5 * SIZE
    assert committer_of(lk._store.objects) == pid


@pytest.mark.parametrize(
    ("setting", "chosen_setting", "is_on"),
    [(None, None, True), ("off", None, False), ("on", False, False), ("off", True, True)],
)
def test_writers_find_committers_unless_somebody_turns_it_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str | None, chosen_setting: bool | None, is_on: bool
) -> None:
    if setting is not None:
        monkeypatch.setenv("TRAJLAKE_GROUP_COMMIT", setting)
    lk = empty_lake(tmp_path / "lake", group_commit=chosen_setting)
    assert (lk._writer._group_commit is not None) == is_on


@pytest.mark.parametrize("text", ["yes", ""])
def test_a_wrong_setting_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("TRAJLAKE_GROUP_COMMIT", text)
    with pytest.raises(UsageError, match="valid: on, off"):
        lake.open(tmp_path / "lake", create=True)


# ---------------------------------------------------------------- 3. a round that takes long


class BusyLedger(Ledger):
    """Looks only when it may."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.may = threading.Event()

    def look_up(self, *args: Any) -> EpisodeLookup:
        assert self.may.wait(60)
        return super().look_up(*args)


def test_a_committer_that_is_at_work_for_long_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both to those in the round and to those who came in the meantime."""
    monkeypatch.setattr(server, "WORKING_SECONDS", 0.0)
    monkeypatch.setattr(server, "_POLL_SECONDS", 0.01)
    lk = empty_lake(tmp_path / "lake")
    ledger, meeting_point = BusyLedger(lk._store), MeetingPoint(lk._store.objects)
    with ThreadPoolExecutor(1) as pool, ExitStack() as stack:
        stack.callback(os.close, meeting_point.register_writer())
        stack.callback(ledger.may.set)
        serving = pool.submit(server.CommitServer(meeting_point, ledger).run)
        first, second = (stack.enter_context(connected(meeting_point)) for _ in range(2))
        for far in (first, second):
            far.sendall(protocol.pack(LookupRequest([1], [])))
            assert answer_to(far) == WorkingReply()
        ledger.may.set()
        for far in (first, second):
            while (answer := answer_to(far)) == WorkingReply():
                pass
            assert isinstance(answer, LookupReply)
    serving.result()


def test_a_writer_waits_as_long_as_it_is_told_that_its_committer_is_at_work() -> None:
    near, far = socket.socketpair()
    with near, far:
        far.sendall(
            b"".join(
                map(
                    protocol.pack,
                    (WorkingReply(), WorkingReply(), LookupReply(NOTHING), WorkingReply(), LookupReply(NOTHING)),
                )
            )
        )
        committer = Committer(near)
        assert [committer.look_up([], []) for _ in range(2)] == [NOTHING] * 2


# ---------------------------------------------------------------- 4. writers that misbehave


@contextmanager
def serving(ledger: Ledger) -> Iterator[MeetingPoint]:
    """Where a committer serves that is in a thread of this process."""
    meeting_point = MeetingPoint(ledger._store.objects)
    present = meeting_point.register_writer()
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(server.CommitServer(meeting_point, ledger).run)
        try:
            yield meeting_point
        finally:
            os.close(present)
            ended.result(60)


def ask_committer(meeting_point: MeetingPoint, data: bytes) -> Any:
    """What a committer says to bytes that are whole messages, or should be."""
    with connected(meeting_point) as connection:
        connection.sendall(struct.pack(">I", len(data)) + data)
        return answer_to(connection)


START = datetime(2026, 1, 1, tzinfo=UTC)
ODD = (None, True, -1, 2**63, 2**64 - 1, -(2**63), 0.5, "", "../x", "\0", b"\xff", [], [[]], {}, {"a": {}}, [None])


def parts_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values in a value, and its own."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, item in items:
        yield from parts_of(item, (*path, key))


def changed(value: Any, path: tuple[Any, ...], odd: Any) -> Any:
    """A value with another one at a path."""
    if not path:
        return odd
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = changed(copy[path[0]], path[1:], odd)
    return copy


def test_no_value_of_any_field_of_a_message_ends_a_committer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is answered, and anyone who asks next has an answer."""
    monkeypatch.setattr(server, "_POLL_SECONDS", 0.01)
    lk = empty_lake(tmp_path / "lake", group_commit=False)
    lk.append(records("there"), run_id="run")
    good = protocol.pack(LookupRequest([1], []))[4:]
    attempt = another(Store(lk._store.objects), records("new", 1))
    # Files that are too old to be relied on: where it is understood nothing is committed.
    files = {name: msgspec.structs.replace(file, at=START) for name, file in attempt.files.items() if name != "tokens"}
    bring, look = (
        msgspec.msgpack.decode(msgspec.msgpack.encode(message))
        for message in (msgspec.structs.replace(attempt, files=files), LookupRequest([1], [2]))
    )
    with serving(Ledger(lk._store)) as meeting_point:
        for message in (bring, look):
            for path, odd in itertools.product(list(parts_of(message)), ODD):
                ask_committer(meeting_point, msgspec.msgpack.encode(changed(message, path, odd)))
        for data in (b"", b"\xc1", b"\x81" * 100_000, good[:-1], msgspec.msgpack.encode(look | {"more": 1})):
            assert isinstance(ask_committer(meeting_point, data), FailureReply | LookupReply)
        for wrong in (look | {"episode_ids": [2**64 - 1]}, bring | {"files": {}}, look | {"type": "x"}):
            assert isinstance(ask_committer(meeting_point, msgspec.msgpack.encode(wrong)), FailureReply)
        assert isinstance(ask_committer(meeting_point, good), LookupReply)
    assert assert_whole(lk.snapshot()) == SIZE


class FullLedger(Ledger):
    """Knows more of every episode than a socket takes at once; one that is asked for next to no others is known."""

    def look_up(self, episode_ids: Any, group_ids: Any) -> EpisodeLookup:
        del group_ids
        return EpisodeLookup(0, {episode_id: (episode_id, episode_id) for episode_id in episode_ids}, {}, set())


def test_writers_that_do_not_read_hold_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor are they let go: one that was stopped for a while has the whole of its answer afterwards."""
    monkeypatch.setattr(server, "_POLL_SECONDS", 0.01)
    large, small = LookupRequest(list(range(2**40, 2**40 + 20_000)), []), LookupRequest([1], [])
    with serving(FullLedger(empty_lake(tmp_path / "lake")._store)) as meeting_point, ExitStack() as stack:
        stopped = [stack.enter_context(connected(meeting_point)) for _ in range(10)]
        for connection in stopped:
            connection.sendall(protocol.pack(large))
        began = time.monotonic()
        for _ in range(20):
            assert ask_committer(meeting_point, protocol.pack(small)[4:]) == LookupReply(
                EpisodeLookup(0, {1: (1, 1)}, {}, set())
            )
        assert time.monotonic() - began < 5
        for connection in stopped:
            data = protocol.receive(connection, bytearray())
            assert data is not None
            answer = protocol.REPLY_DECODER.decode(data)
            assert isinstance(answer, LookupReply)
            assert answer.lookup.contents.keys() == set(large.episode_ids)


def test_a_round_that_fails_for_a_reason_nobody_thought_of_ends_no_committer(tmp_path: Path) -> None:
    class BrokenLedger(Ledger):
        def look_up(self, *_: Any) -> EpisodeLookup:
            raise OverflowError("int too big to convert")

    ledger = BrokenLedger(empty_lake(tmp_path / "lake")._store)
    answers = server.answer_requests(ledger, [LookupRequest([1], []), LookupRequest([2], [])])
    assert [type(answer) for answer in answers] == [FailureReply, FailureReply]


def test_lakes_that_are_read_as_one_commit_in_groups_as_the_first_of_them_does(tmp_path: Path) -> None:
    uris = [lake.open(tmp_path / name, create=True).uri for name in ("a", "b")]
    for is_on in (True, False):
        joined = lake.open(uris, group_commit=is_on)
        assert (joined._writer._group_commit is not None) == is_on


def connected(meeting_point: MeetingPoint) -> socket.socket:
    """A connection to a committer that is about to listen."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(20)
    while True:
        try:
            connection.connect(meeting_point.socket)
        except (FileNotFoundError, ConnectionRefusedError):
            time.sleep(0.01)
        else:
            return connection


def answer_to(connection: socket.socket) -> Any:
    """What the committer says next."""
    buffer = bytearray()
    while (data := protocol.unpack(buffer)) is None:
        buffer += connection.recv(1)
    return protocol.REPLY_DECODER.decode(data)
