"""What comes under the name of a rollout that has ended: refused, gone on with, or answered as before; restarts too."""

import errno
import os
import stat
from pathlib import Path

import msgspec
import pytest

from lake import ids
from lake.errors import UsageError
from lake.live.calls.address import RolloutAddress
from lake.live.frames import TraceFrame
from lake.live.proxy import sessions as ends_module
from lake.live.proxy.sessions import ENDED_FILE, EndedError, EndedRollout, EndedRollouts, EndRequest
from lake.records import ScoreRecord, identify, make_episode_id
from testkit.agent_calls import START, Recording, answer_of, chat
from testkit.wording import Wording

THIRD = RolloutAddress(run="r", task="door", rollout=3)
KEY = RolloutAddress(task="door")
USER = {"role": "user", "content": "open the door"}


def recording_in(folder: Path) -> Recording:
    """A proxy that is started in a folder."""
    return Recording(ended_file=folder / ENDED_FILE)


def stopped(recording: Recording) -> None:
    recording.registry.stop(START)
    recording.registry.ended.save()


def call(recording: Recording, address: RolloutAddress, number: int = 0) -> None:
    recording.registry.check_open(address)
    recording.registry.record_call(chat(address, [USER], answer_of("push"), number=number))


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_numbered_rollout_that_its_agent_ended_takes_no_more_calls(
    tmp_path: Path, is_restarted: bool, wording: Wording
) -> None:
    recording = recording_in(tmp_path)
    call(recording, THIRD)
    ended = recording.registry.end(THIRD, EndRequest(reward=1.0), START)
    if is_restarted:
        stopped(recording)
        recording = recording_in(tmp_path)
    with pytest.raises(EndedError) as error:
        call(recording, THIRD)
    text = wording(error.value, EPISODE=ended["episode_id"])
    assert "rollout 3 of task door" in text
    assert f"as episode {ended['episode_id']}; " in text
    assert "rollout or attempt" in text
    for end_request in (
        RolloutAddress(run="r", task="door", rollout=4),
        RolloutAddress(run="r", task="door", rollout=3, attempt=1),
        RolloutAddress(run="s", task="door", rollout=3),
        RolloutAddress(run="r", task="door", rollout=3, agent="critic"),
    ):
        call(recording, end_request)
    with pytest.raises(EndedError):
        recording.registry.check_open(RolloutAddress(run="r", task="door", rollout=3, attempt=0, split="train"))


def test_a_name_without_a_run_is_of_the_run_of_the_proxy() -> None:
    recording = Recording(run="r")
    call(recording, RolloutAddress(task="door", rollout=3))
    recording.registry.end(RolloutAddress(task="door", rollout=3), EndRequest(), START)
    with pytest.raises(EndedError):
        call(recording, THIRD)


def test_a_call_that_was_under_way_when_its_rollout_ended_is_kept_as_a_continuation() -> None:
    recording = Recording()
    call(recording, THIRD)
    ended = recording.registry.end(THIRD, EndRequest(), START)
    recording.registry.record_call(chat(THIRD, [USER], answer_of("late"), number=1))
    first, second = recording.records()
    assert (second.relation, second.parent_episode_id) == ("continuation", ended["episode_id"])
    assert second.rollout_index != first.rollout_index


def test_a_name_without_a_number_begins_a_sibling() -> None:
    recording = Recording()
    for number in range(2):
        call(recording, KEY, number)
        recording.registry.end(KEY, EndRequest(reward=float(number)), START)
    first, second = recording.records()
    assert first.rollout_index != second.rollout_index
    assert (first.relation, second.relation) == (None, None)


@pytest.mark.parametrize("address", [THIRD, KEY])
@pytest.mark.parametrize("is_restarted", [False, True])
def test_what_the_proxy_ended_is_gone_on_with(tmp_path: Path, address: RolloutAddress, is_restarted: bool) -> None:
    before = recording = recording_in(tmp_path)
    call(recording, address)
    stopped(recording)
    assert recording.registry.counts.stopped == 1
    if is_restarted:
        recording = recording_in(tmp_path)
    with pytest.raises(EndedError, match=r"ended by the proxy.*add_scores"):
        recording.registry.end(address, EndRequest(reward=1.0), START)
    call(recording, address, 1)
    ended = recording.registry.end(address, EndRequest(reward=1.0), START)
    first, second = before.records()[0], recording.records()[-1]
    assert (first.stop_reason, first.env_return) == ("proxy_stopped", None)
    assert (second.relation, second.env_return, ended["steps"]) == ("continuation", 1.0, 1)
    assert second.parent_episode_id == ids.to_text(make_episode_id(first, first.run_id or "live"))
    assert second.rollout_index != first.rollout_index


@pytest.mark.parametrize("address", [THIRD, KEY])
@pytest.mark.parametrize("is_restarted", [False, True])
def test_the_same_end_again_is_answered_the_same_and_another_one_refused(
    tmp_path: Path, address: RolloutAddress, is_restarted: bool
) -> None:
    recording = recording_in(tmp_path)
    call(recording, address)
    first = recording.registry.end(address, EndRequest(reward=1.0), START)
    frames = sum(map(len, recording.frames.values()))
    if is_restarted:
        stopped(recording)
        recording = recording_in(tmp_path)
    assert recording.registry.end(address, EndRequest(reward=1.0), START) == first
    with pytest.raises(EndedError, match=f"has ended, as episode {first['episode_id']}; .*add_scores"):
        recording.registry.end(address, EndRequest(reward=0.0), START)
    assert sum(map(len, recording.frames.values())) == (0 if is_restarted else frames), "nothing was recorded"


def test_an_end_tells_the_steps_that_are_recorded() -> None:
    recording = Recording()
    recording.registry.record_call(chat(KEY, [USER], number=0, error="HTTP 500"))
    recording.registry.record_call(chat(KEY, [USER], number=1, error="HTTP 500"))
    ended = recording.registry.end(KEY, EndRequest(), START)
    assert ended["steps"] == len(recording.records()[0].steps) == 1


def test_an_end_of_spans_tells_how_many_came_across_a_kill() -> None:
    recording = Recording()
    spans = TraceFrame(
        trace_id="t", document={"resourceSpans": [{"scopeSpans": [{"spans": [{}, {}]}, {"spans": [{}]}]}]}
    )
    recording.registry.record_spans(THIRD, spans, START, is_over=False)
    recording = recording.resumed()
    logs = TraceFrame(trace_id="t", document={"resourceLogs": [{"scopeLogs": [{"logRecords": [{}]}]}]})
    recording.registry.record_spans(THIRD, logs, START, is_over=False)
    ended = recording.registry.end(THIRD, EndRequest(), START)
    assert (ended["spans"], "steps" in ended) == (3, False)


def test_an_end_that_closes_ends_the_sub_agents_too_and_nothing_comes_after_it() -> None:
    recording = Recording()
    critic = RolloutAddress(run="r", task="door", rollout=3, agent="critic")
    call(recording, THIRD)
    call(recording, critic, 1)
    ended = recording.registry.end(THIRD, EndRequest(reward=1.0, closes=True, status="truncated"), START)
    assert (ended["steps"], ended["calls"]) == (1, 1)
    for address in (THIRD, critic, RolloutAddress(run="r", task="door", rollout=3, agent="another")):
        with pytest.raises(EndedError, match="has ended"):
            recording.registry.check_open(address)
    recording.registry.check_open(RolloutAddress(run="r", task="door", rollout=4, agent="critic"))
    assert [(record.agent_id, record.status, record.env_return) for record in recording.records()] == [
        (None, "truncated", 1.0),
        ("critic", "truncated", None),
    ]


def test_the_end_of_a_sub_agent_that_closes_leaves_its_siblings_open() -> None:
    recording = Recording()
    agents = [msgspec.structs.replace(THIRD, agent=agent) for agent in (None, "critic", "helper")]
    for address in agents:
        call(recording, address)
    recording.registry.end(agents[1], EndRequest(closes=True, status="truncated"), START)
    statuses = {record.agent_id: record.status for record in recording.records()}
    assert statuses == {None: "completed", "critic": "truncated", "helper": "completed"}


def test_a_rollout_without_a_call_is_recorded_if_its_end_closes_it() -> None:
    recording = Recording()
    closing = EndRequest(
        reward=0.5, closes=True, expected_group_size=4, environment="e", split="train", initial_messages=[USER]
    )
    ended = recording.registry.end(THIRD, closing, START)
    assert (ended["steps"], ended["calls"], ended["completion_tokens"]) == (1, 0, 0)
    assert recording.registry.end(THIRD, closing, START) == ended
    with pytest.raises(EndedError):
        recording.registry.end(THIRD, EndRequest(closes=True), START)
    (record,) = recording.records()
    assert [(step.state, step.action, step.trainable) for step in record.steps] == [("open the door", "", False)]
    assert (record.status, record.env_return, record.expected_group_size) == ("completed", 0.5, 4)
    assert (record.environment, record.split) == ("e", "train")


INVALID = {
    "status": EndRequest(status="nonsense", closes=True),
    "step_rewards": EndRequest(step_rewards=[1.0] * 3, closes=True),
    "scores": EndRequest(scores=[ScoreRecord(scorer="judge", value=1.0)] * 2, closes=True),
    "scorer": EndRequest(scores=[ScoreRecord(scorer=" ", value=1.0)], closes=True),
    "step_index": EndRequest(scores=[ScoreRecord(scorer="judge", value=1.0, step_index=2)], closes=True),
}


@pytest.mark.parametrize("field", INVALID)
@pytest.mark.parametrize("is_begun", [False, True])
def test_an_end_that_is_refused_changes_nothing(tmp_path: Path, field: str, is_begun: bool) -> None:
    """A right end of the same rollout counts afterwards, also at another start of the proxy."""
    recording = recording_in(tmp_path)
    if is_begun:
        call(recording, THIRD)
    frames, counts = sum(map(len, recording.frames.values())), msgspec.structs.replace(recording.registry.counts)
    for check in (recording.registry.check_end, lambda *arguments: recording.registry.end(*arguments, START)):
        with pytest.raises(UsageError, match=f"`{'scores' if field in ('scorer', 'step_index') else field}`"):
            check(THIRD, INVALID[field])
    assert (sum(map(len, recording.frames.values())), recording.registry.counts) == (frames, counts)
    if not is_begun:
        stopped(recording)
        recording = recording_in(tmp_path)
    ended = recording.registry.end(THIRD, EndRequest(reward=1.0, closes=True), START)
    (record,) = recording.records()
    assert (record.env_return, record.status, ended["rollout_index"]) == (1.0, "completed", 3)


def test_an_end_is_checked_with_the_calls_that_are_under_way() -> None:
    """The agent may have what is to be a step, although the proxy has not its end."""
    recording = Recording()
    row_address, two = recording.registry.as_row(THIRD), EndRequest(step_rewards=[1.0, 2.0], closes=True)
    call(recording, THIRD)
    with pytest.raises(UsageError, match="step_rewards"):
        recording.registry.check_end(row_address, two)
    with recording.registry.under_way.track(row_address, lambda: None):
        recording.registry.check_end(row_address, two)
        with pytest.raises(UsageError, match="status"):
            recording.registry.check_end(row_address, INVALID["status"])
    recording.registry.end(THIRD, EndRequest(closes=True), START)
    with pytest.raises(EndedError):
        recording.registry.check_end(row_address, two)


def test_one_task_of_two_rounds_or_seeds_is_as_many_groups() -> None:
    recording = Recording()
    addresses = [
        RolloutAddress(run="r", task="door", rollout=3, collection_round=index, seed=seed)
        for index in range(2)
        for seed in range(2)
    ]
    for number, address in enumerate(addresses):
        call(recording, address, number)
        recording.registry.end(address, EndRequest(), START)
    keys = {identify(record, "r").group_id for record in recording.records()}
    assert len(keys) == 4


# ------------------------------------------------------------ the file


def ends_of(file: Path, *, most: int = 3) -> EndedRollouts:
    return EndedRollouts("live", file, most=most)


def list_remembered(ends: EndedRollouts) -> list[int]:
    return [
        number for number in range(30) if ends.previous_episode_id(RolloutAddress(task="t", rollout=number)) is not None
    ]


def add(ends: EndedRollouts, number: int) -> None:
    ends.add(RolloutAddress(task="t", rollout=number), f"id{number}", EndRequest(), {})
    ends.save()


def test_the_file_is_bounded_and_its_owners_alone(tmp_path: Path) -> None:
    file = tmp_path / ENDED_FILE
    ends = ends_of(file)
    most = 0
    for number in range(20):
        add(ends, number)
        most = max(most, len(file.read_bytes().splitlines()))
    assert list_remembered(ends) == [17, 18, 19]
    assert most <= 7
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert list_remembered(ends_of(file)) == [17, 18, 19]
    assert len(file.read_bytes().splitlines()) == 3, "compacted"


@pytest.mark.parametrize(
    "junk", [b'{"name": "proxy:ta', b"\xff\xfe\n", b"[]\n", b'{"name": 1}\n', b"\0" * 99, b"[" * 9999]
)
def test_lines_that_cannot_be_read_are_skipped(tmp_path: Path, junk: bytes) -> None:
    file = tmp_path / ENDED_FILE
    add(ends_of(file), 1)
    file.write_bytes(junk.rstrip(b"\n") + b"\n" + file.read_bytes() + junk)
    ends = ends_of(file)
    assert list_remembered(ends) == [1]
    add(ends, 2)
    assert list_remembered(ends_of(file)) == [1, 2]


def test_a_file_that_cannot_be_written_disturbs_nothing_and_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / ENDED_FILE).mkdir()
    ends = ends_of(tmp_path / ENDED_FILE)
    add(ends, 1)
    add(ends, 2)
    assert list_remembered(ends) == [1, 2]
    assert ["names of ended rollouts" in record.message for record in caplog.records] == [True]


def test_the_file_of_ends_names_no_task(tmp_path: Path) -> None:
    """It outlives what `forget` erases; the same end again is answered as it was, before and after a restart."""
    recording, named = recording_in(tmp_path), RolloutAddress(task="private words", rollout=1)
    call(recording, named)
    reply = recording.registry.end(named, EndRequest(reward=1.0), START)
    assert reply["task_id"] == named.task
    recording.registry.ended.save()
    assert b"private" not in (tmp_path / ENDED_FILE).read_bytes()
    assert recording_in(tmp_path).registry.end(named, EndRequest(reward=1.0), START) == reply


def test_a_disk_that_was_full_for_a_while_loses_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does the part of a line that it took spoil the next one."""
    file, write = tmp_path / ENDED_FILE, ends_module._put

    def full(file: Path, ends: list[EndedRollout], flag: int) -> None:
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
    assert list_remembered(ends_of(file, most=9)) == [0, 1, 2]
    add(ends, 3)
    assert len(file.read_bytes().splitlines()) == 4
    assert list_remembered(ends_of(file, most=9)) == [0, 1, 2, 3]


def test_what_is_said_of_an_unknown_rollout_names_it() -> None:
    with pytest.raises(UsageError, match=r"attempt 2 of rollout 3 of task door in run r .*\(5 episodes are open\)"):
        EndedRollouts("live").repeat_reply(RolloutAddress(run="r", task="door", rollout=3, attempt=2), EndRequest(), 5)
