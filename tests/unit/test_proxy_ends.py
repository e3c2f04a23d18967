"""What comes under the name of a rollout that has ended: refused, gone on with, or answered as before; restarts too."""

import errno
import os
import stat
from pathlib import Path

import msgspec
import pytest

from lake import ids
from lake.errors import UsageError
from lake.live.calls.address import Address
from lake.live.frames import Traced
from lake.live.proxy import ends as ends_module
from lake.live.proxy.ends import FILE, Ended, Ends
from lake.live.proxy.rollouts import EndedError, Ending
from lake.records import ScoreRecord, episode_id, identify
from testkit.agent_calls import START, Recording, answer_of, chat
from testkit.wording import Wording

THIRD = Address(run="r", task="door", rollout=3)
KEY = Address(task="door")
USER = {"role": "user", "content": "open the door"}


def recording_in(folder: Path) -> Recording:
    """A proxy that is started in a folder."""
    return Recording(ended=folder / FILE)


def stopped(recording: Recording) -> None:
    recording.book.stop(START)
    recording.book.ends.save()


def call(recording: Recording, address: Address, number: int = 0) -> None:
    recording.book.check(address)
    recording.book.add(chat(address, [USER], answer_of("push"), number=number))


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_numbered_rollout_that_its_agent_ended_takes_no_more_calls(
    tmp_path: Path, is_restarted: bool, wording: Wording
) -> None:
    recording = recording_in(tmp_path)
    call(recording, THIRD)
    ended = recording.book.end(THIRD, Ending(reward=1.0), START)
    if is_restarted:
        stopped(recording)
        recording = recording_in(tmp_path)
    with pytest.raises(EndedError) as found:
        call(recording, THIRD)
    text = wording(found.value, EPISODE=ended["episode_id"])
    assert "rollout 3 of task door" in text
    assert f"as episode {ended['episode_id']}; " in text
    assert "rollout or attempt" in text
    for other in (
        Address(run="r", task="door", rollout=4),
        Address(run="r", task="door", rollout=3, attempt=1),
        Address(run="s", task="door", rollout=3),
        Address(run="r", task="door", rollout=3, agent="critic"),
    ):
        call(recording, other)
    with pytest.raises(EndedError):
        recording.book.check(Address(run="r", task="door", rollout=3, attempt=0, split="train"))


def test_a_name_without_a_run_is_of_the_run_of_the_proxy() -> None:
    recording = Recording(run="r")
    call(recording, Address(task="door", rollout=3))
    recording.book.end(Address(task="door", rollout=3), Ending(), START)
    with pytest.raises(EndedError):
        call(recording, THIRD)


def test_a_call_that_was_under_way_when_its_rollout_ended_is_kept_as_a_continuation() -> None:
    recording = Recording()
    call(recording, THIRD)
    ended = recording.book.end(THIRD, Ending(), START)
    recording.book.add(chat(THIRD, [USER], answer_of("late"), number=1))
    first, second = recording.records()
    assert (second.relation, second.parent_episode_id) == ("continuation", ended["episode_id"])
    assert second.rollout_index != first.rollout_index


def test_a_name_without_a_number_begins_a_sibling() -> None:
    recording = Recording()
    for number in range(2):
        call(recording, KEY, number)
        recording.book.end(KEY, Ending(reward=float(number)), START)
    first, second = recording.records()
    assert first.rollout_index != second.rollout_index
    assert (first.relation, second.relation) == (None, None)


@pytest.mark.parametrize("address", [THIRD, KEY])
@pytest.mark.parametrize("is_restarted", [False, True])
def test_what_the_proxy_ended_is_gone_on_with(tmp_path: Path, address: Address, is_restarted: bool) -> None:
    before = recording = recording_in(tmp_path)
    call(recording, address)
    stopped(recording)
    assert recording.book.counts.stopped == 1
    if is_restarted:
        recording = recording_in(tmp_path)
    with pytest.raises(EndedError, match=r"ended by the proxy.*add_scores"):
        recording.book.end(address, Ending(reward=1.0), START)
    call(recording, address, 1)
    ended = recording.book.end(address, Ending(reward=1.0), START)
    first, second = before.records()[0], recording.records()[-1]
    assert (first.stop_reason, first.env_return) == ("proxy_stopped", None)
    assert (second.relation, second.env_return, ended["steps"]) == ("continuation", 1.0, 1)
    assert second.parent_episode_id == ids.to_text(episode_id(first, first.run_id or "live"))
    assert second.rollout_index != first.rollout_index


@pytest.mark.parametrize("address", [THIRD, KEY])
@pytest.mark.parametrize("is_restarted", [False, True])
def test_the_same_end_again_is_answered_the_same_and_another_one_refused(
    tmp_path: Path, address: Address, is_restarted: bool
) -> None:
    recording = recording_in(tmp_path)
    call(recording, address)
    first = recording.book.end(address, Ending(reward=1.0), START)
    frames = sum(map(len, recording.frames.values()))
    if is_restarted:
        stopped(recording)
        recording = recording_in(tmp_path)
    assert recording.book.end(address, Ending(reward=1.0), START) == first
    with pytest.raises(EndedError, match=f"has ended, as episode {first['episode_id']}; .*add_scores"):
        recording.book.end(address, Ending(reward=0.0), START)
    assert sum(map(len, recording.frames.values())) == (0 if is_restarted else frames), "nothing was recorded"


def test_an_end_tells_the_steps_that_are_recorded() -> None:
    recording = Recording()
    recording.book.add(chat(KEY, [USER], number=0, error="HTTP 500"))
    recording.book.add(chat(KEY, [USER], number=1, error="HTTP 500"))
    ended = recording.book.end(KEY, Ending(), START)
    assert ended["steps"] == len(recording.records()[0].steps) == 1


def test_an_end_of_spans_tells_how_many_came_across_a_kill() -> None:
    recording = Recording()
    spans = Traced(trace_id="t", document={"resourceSpans": [{"scopeSpans": [{"spans": [{}, {}]}, {"spans": [{}]}]}]})
    recording.book.receive(THIRD, spans, START, is_over=False)
    recording = recording.resumed()
    logs = Traced(trace_id="t", document={"resourceLogs": [{"scopeLogs": [{"logRecords": [{}]}]}]})
    recording.book.receive(THIRD, logs, START, is_over=False)
    ended = recording.book.end(THIRD, Ending(), START)
    assert (ended["spans"], "steps" in ended) == (3, False)


def test_an_end_that_closes_ends_the_sub_agents_too_and_nothing_comes_after_it() -> None:
    recording = Recording()
    critic = Address(run="r", task="door", rollout=3, agent="critic")
    call(recording, THIRD)
    call(recording, critic, 1)
    ended = recording.book.end(THIRD, Ending(reward=1.0, closes=True, status="truncated"), START)
    assert (ended["steps"], ended["calls"]) == (1, 1)
    for address in (THIRD, critic, Address(run="r", task="door", rollout=3, agent="another")):
        with pytest.raises(EndedError, match="has ended"):
            recording.book.check(address)
    recording.book.check(Address(run="r", task="door", rollout=4, agent="critic"))
    assert [(record.agent_id, record.status, record.env_return) for record in recording.records()] == [
        (None, "truncated", 1.0),
        ("critic", "truncated", None),
    ]


def test_the_end_of_a_sub_agent_that_closes_leaves_its_siblings_open() -> None:
    recording = Recording()
    agents = [msgspec.structs.replace(THIRD, agent=agent) for agent in (None, "critic", "helper")]
    for address in agents:
        call(recording, address)
    recording.book.end(agents[1], Ending(closes=True, status="truncated"), START)
    statuses = {record.agent_id: record.status for record in recording.records()}
    assert statuses == {None: "completed", "critic": "truncated", "helper": "completed"}


def test_a_rollout_without_a_call_is_recorded_if_its_end_closes_it() -> None:
    recording = Recording()
    closing = Ending(
        reward=0.5, closes=True, expected_group_size=4, environment="e", split="train", initial_messages=[USER]
    )
    ended = recording.book.end(THIRD, closing, START)
    assert (ended["steps"], ended["calls"], ended["completion_tokens"]) == (1, 0, 0)
    assert recording.book.end(THIRD, closing, START) == ended
    with pytest.raises(EndedError):
        recording.book.end(THIRD, Ending(closes=True), START)
    (record,) = recording.records()
    assert [(step.state, step.action, step.trainable) for step in record.steps] == [("open the door", "", False)]
    assert (record.status, record.env_return, record.expected_group_size) == ("completed", 0.5, 4)
    assert (record.environment, record.split) == ("e", "train")


INVALID = {
    "status": Ending(status="nonsense", closes=True),
    "step_rewards": Ending(step_rewards=[1.0] * 3, closes=True),
    "scores": Ending(scores=[ScoreRecord(scorer="judge", value=1.0)] * 2, closes=True),
    "scorer": Ending(scores=[ScoreRecord(scorer=" ", value=1.0)], closes=True),
    "step_index": Ending(scores=[ScoreRecord(scorer="judge", value=1.0, step_index=2)], closes=True),
}


@pytest.mark.parametrize("field", INVALID)
@pytest.mark.parametrize("is_begun", [False, True])
def test_an_end_that_is_refused_changes_nothing(tmp_path: Path, field: str, is_begun: bool) -> None:
    """A right end of the same rollout counts afterwards, also at another start of the proxy."""
    recording = recording_in(tmp_path)
    if is_begun:
        call(recording, THIRD)
    frames, counts = sum(map(len, recording.frames.values())), msgspec.structs.replace(recording.book.counts)
    for check in (recording.book.check_end, lambda *said: recording.book.end(*said, START)):
        with pytest.raises(UsageError, match=f"`{'scores' if field in ('scorer', 'step_index') else field}`"):
            check(THIRD, INVALID[field])
    assert (sum(map(len, recording.frames.values())), recording.book.counts) == (frames, counts)
    if not is_begun:
        stopped(recording)
        recording = recording_in(tmp_path)
    ended = recording.book.end(THIRD, Ending(reward=1.0, closes=True), START)
    (record,) = recording.records()
    assert (record.env_return, record.status, ended["rollout_index"]) == (1.0, "completed", 3)


def test_an_end_is_checked_with_the_calls_that_are_under_way() -> None:
    """The agent may have what is to be a step, although the proxy has not its end."""
    recording = Recording()
    own, two = recording.book.own(THIRD), Ending(step_rewards=[1.0, 2.0], closes=True)
    call(recording, THIRD)
    with pytest.raises(UsageError, match="step_rewards"):
        recording.book.check_end(own, two)
    with recording.book.under_way.call(own, lambda: None):
        recording.book.check_end(own, two)
        with pytest.raises(UsageError, match="status"):
            recording.book.check_end(own, INVALID["status"])
    recording.book.end(THIRD, Ending(closes=True), START)
    with pytest.raises(EndedError):
        recording.book.check_end(own, two)


def test_one_task_of_two_rounds_or_seeds_is_as_many_groups() -> None:
    recording = Recording()
    addresses = [
        Address(run="r", task="door", rollout=3, collection_round=place, seed=seed)
        for place in range(2)
        for seed in range(2)
    ]
    for number, address in enumerate(addresses):
        call(recording, address, number)
        recording.book.end(address, Ending(), START)
    keys = {identify(record, "r").group_id for record in recording.records()}
    assert len(keys) == 4


# ------------------------------------------------------------ the file


def ends_of(file: Path, *, most: int = 3) -> Ends:
    return Ends("live", file, most=most)


def known(ends: Ends) -> list[int]:
    return [number for number in range(30) if ends.before(Address(task="t", rollout=number)) is not None]


def add(ends: Ends, number: int) -> None:
    ends.add(Address(task="t", rollout=number), f"id{number}", Ending(), {})
    ends.save()


def test_the_file_is_bounded_and_its_owners_alone(tmp_path: Path) -> None:
    file = tmp_path / FILE
    ends = ends_of(file)
    most = 0
    for number in range(20):
        add(ends, number)
        most = max(most, len(file.read_bytes().splitlines()))
    assert known(ends) == [17, 18, 19]
    assert most <= 7
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert known(ends_of(file)) == [17, 18, 19]
    assert len(file.read_bytes().splitlines()) == 3, "compacted"


@pytest.mark.parametrize(
    "junk", [b'{"name": "proxy:ta', b"\xff\xfe\n", b"[]\n", b'{"name": 1}\n', b"\0" * 99, b"[" * 9999]
)
def test_lines_that_cannot_be_read_are_skipped(tmp_path: Path, junk: bytes) -> None:
    file = tmp_path / FILE
    add(ends_of(file), 1)
    file.write_bytes(junk.rstrip(b"\n") + b"\n" + file.read_bytes() + junk)
    ends = ends_of(file)
    assert known(ends) == [1]
    add(ends, 2)
    assert known(ends_of(file)) == [1, 2]


def test_a_file_that_cannot_be_written_disturbs_nothing_and_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FILE).mkdir()
    ends = ends_of(tmp_path / FILE)
    add(ends, 1)
    add(ends, 2)
    assert known(ends) == [1, 2]
    assert ["names of ended rollouts" in record.message for record in caplog.records] == [True]


def test_the_file_of_ends_names_no_task(tmp_path: Path) -> None:
    """It outlives what `forget` erases; the same end once more is answered as it was, before and after a restart."""
    recording, named = recording_in(tmp_path), Address(task="private words", rollout=1)
    call(recording, named)
    reply = recording.book.end(named, Ending(reward=1.0), START)
    assert reply["task_id"] == named.task
    recording.book.ends.save()
    assert b"private" not in (tmp_path / FILE).read_bytes()
    assert recording_in(tmp_path).book.end(named, Ending(reward=1.0), START) == reply


def test_a_disk_that_was_full_for_a_while_loses_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does the part of a line that it took spoil the next one."""
    file, write = tmp_path / FILE, ends_module._put

    def full(file: Path, ends: list[Ended], flag: int) -> None:
        write(file, ends, flag)
        os.truncate(file, file.stat().st_size - 5)
        raise OSError(errno.ENOSPC, "No space left on device")

    ends = ends_of(file, most=9)
    add(ends, 0)
    with monkeypatch.context() as patched:
        patched.setattr(ends_module, "_put", full)
        add(ends, 1)
        add(ends, 2)
    ends.save()
    assert known(ends_of(file, most=9)) == [0, 1, 2]
    add(ends, 3)
    assert len(file.read_bytes().splitlines()) == 4
    assert known(ends_of(file, most=9)) == [0, 1, 2, 3]


def test_what_is_said_of_an_unknown_rollout_names_it() -> None:
    with pytest.raises(UsageError, match=r"attempt 2 of rollout 3 of task door in run r .*\(5 episodes are open\)"):
        Ends("live").again(Address(run="r", task="door", rollout=3, attempt=2), Ending(), 5)
