"""The recorder in process: what an agent does becomes the rows that a person would write, and nothing disturbs it.

1. What is recorded: steps, tools, rewards, scores, tokens, sub-agents, async agents.
2. What is wrong is counted and told, and never raises: wrong use, values of any kind, a full spool, a broken agent.
3. Off.
4. Delivery: batches, processes that died, forks, a lake that is away.
"""

import asyncio
import inspect
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import lake
from lake import Lake, TokensRecord
from lake.errors import LakeAccessError, UsageError
from lake.live.episode import Episode, LiveStep, ToolCall
from lake.live.frames import (
    BeginFrame,
    EndFrame,
    EpisodeFrame,
    FrameError,
    LostFrame,
    RewardFrame,
    StepFrame,
    ToolFrame,
    assemble_episode,
    assemble_frames,
    decode,
    encode,
    new_key,
)
from lake.live.null_recorder import OFF
from lake.live.recorder import Recorder
from lake.live.spool import Spool
from lake.records import EpisodeRecord, Reject, StepRecord
from testkit.copies import empty_lake
from testkit.wording import Wording

Make = Callable[..., Recorder]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Recorders into one lake, which deliver on order."""
    empty_lake(tmp_path / "lake")
    recorders: list[Recorder] = []

    def recorder(**options: Any) -> Recorder:
        defaults = {"run": "agent", "spool": tmp_path / "spool", "batch_seconds": 3600}
        recorders.append(lake.recorder(tmp_path / "lake", **(defaults | options)))
        return recorders[-1]

    yield recorder
    for recorder_used in recorders:
        recorder_used.close()


@cache
def opened(folder: Path) -> Lake:
    return lake.open(folder / "lake")


def rows(folder: Path, query: str) -> list[tuple[Any, ...]]:
    return opened(folder).sql(query).rows()


def by_task(folder: Path, columns: str) -> list[tuple[Any, ...]]:
    """Columns of the episodes, which are in the order of their tasks."""
    return rows(folder, f"SELECT {columns} FROM episodes ORDER BY task_id")


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def agent(recorder: Recorder, task: str = "task", steps: int = 1) -> None:
    """One episode."""
    with recorder.episode(task) as episode:
        for number in range(steps):
            with episode.step(context=[user(f"sees {number}")]) as step:
                step.action(f"does {number}")


# ---------------------------------------------------------------- 1. what is recorded


def test_an_agent_with_tools_rewards_and_scores_is_rows_as_a_person_would_write_them(
    make: Make, tmp_path: Path
) -> None:
    system = {"role": "system", "content": "You book flights."}
    recorder = make(environment="airline", policy="gpt")
    with recorder.episode("airline-12", seed=7, rollout_index=3) as episode:
        with episode.step(context=[system, user("To Rome.")], model="gpt-5") as step:
            step.action("I look.", reasoning="Which ones are there?", finish_reason="tool_calls")
            with step.tool_call("search", {"to": "Rome"}) as call:
                call.result({"found": 2})
            step.reward(0.5)
        with episode.step() as second:
            second.action("Booked.")
        with episode.tool_call("book", {"id": 1}) as call:
            call.result("done")
        second.reward(1)
        second.score("judge", 0.25, reason="slow")
        episode.reward(1.0)
        episode.score("human", None)
        episode.update(stop_reason="user_stop", terminated=True)
    recorder.close()
    assert rows(
        tmp_path,
        "SELECT task_id, run_id, rollout_index, seed, environment, policy, status, stop_reason, terminated, env_return,"
        " num_steps, source_format, ended_at >= started_at FROM episodes",
    ) == [("airline-12", "agent", 3, 7, "airline", "gpt", "completed", "user_stop", True, 1.0, 2, "live", True)]
    assert rows(
        tmp_path, "SELECT state, state_role, action, reasoning, reward, model, finish_reason, tool_calls FROM steps"
    ) == [
        (
            "To Rome.",
            "user",
            "I look.",
            "Which ones are there?",
            0.5,
            "gpt-5",
            "tool_calls",
            '[{"id":"call-0-0","type":"function","function":{"name":"search","arguments":{"to":"Rome"}}}]',
        ),
        ('{"found":2}', "tool", "Booked.", None, 1.0, None, None, None),
    ]
    assert rows(tmp_path, "SELECT initial_messages, final_observation FROM episodes") == [
        (
            '[{"role":"system","content":"You book flights."},{"role":"user","content":"To Rome."}]',
            '[{"role":"tool","content":"done","name":"book"}]',
        )
    ]
    assert rows(
        tmp_path, "SELECT name, step_index, error, attributes->>'$.\"gen_ai.tool.call.result\"' FROM spans"
    ) == [
        ("search", 0, None, None),
        ("book", 1, None, None),
    ]
    scores = "SELECT scorer, step_index, value, reason FROM scores ORDER BY scorer"
    assert rows(tmp_path, scores) == [("human", None, None, None), ("judge", 1, 0.25, "slow")]


def test_tool_calls_answer_those_that_the_model_made_in_their_order(make: Make, tmp_path: Path) -> None:
    calls = [
        {"id": f"id-{n}", "type": "function", "function": {"name": name, "arguments": "{}"}}
        for n, name in enumerate(("look", "go", "look"))
    ]
    with make() as recorder, recorder.episode("t") as episode:
        with episode.step(context=[user("?")]) as step:
            step.action(tool_calls=calls)
            for name in ("look", "look", "go"):
                with step.tool_call(name) as call:
                    call.result(f"{call.call_id}: {name}")
        with episode.step() as step:
            step.action("done")
    (context,) = rows(tmp_path, "SELECT context FROM steps WHERE step_index = 1")[0]
    assert [m["content"] for m in msgspec.json.decode(context)] == ["id-0: look", "id-2: look", "id-1: go"]


def test_tool_calls_without_another_action_are_the_action(make: Make, tmp_path: Path) -> None:
    with make() as recorder, recorder.episode("t") as episode:
        with episode.step(context=[user("Where?")]) as step, step.tool_call("search", {"q": "x"}) as call:
            call.result("found")
        with episode.step(request={"model": "m", "messages": [user("And now?")]}) as live_step:
            live_step.tool_call("open", {"id": 1}).result("opened")
        assert recorder.stats().steps_left_out == 0
    template = '[{"id":"%s","type":"function","function":{"name":"%s","arguments":%s}}]'
    assert rows(tmp_path, "SELECT state, action, tool_calls FROM steps ORDER BY step_index") == [
        ("Where?", "", template % ("call-0-0", "search", '{"q":"x"}')),
        ("And now?", "", template % ("call-1-0", "open", '{"id":1}')),
    ]
    assert rows(tmp_path, "SELECT name, step_index FROM spans ORDER BY span_id") == [("search", 0), ("open", 1)]


def test_tokens_keep_what_they_extend_when_a_failed_step_is_left_out(make: Make, tmp_path: Path) -> None:
    with make() as recorder, recorder.episode("t") as episode:
        with episode.step(state="a") as first:
            first.action("x", tokens=TokensRecord(context_ids=[1, 2], action_ids=[3], action_logprobs=[-0.5]))
        with pytest.raises(TimeoutError), episode.step(state="b"):
            raise TimeoutError("the engine did not answer")
        with episode.step(state="b") as third:
            tokens = TokensRecord(context_ids=[4], action_ids=[5], prefix_step_index=first.index)
            third.action("y", tokens=tokens)
        with episode.step(state="c") as fourth:
            fourth.action("z", tokens=TokensRecord(context_ids=[6], action_ids=[7], prefix_step_index=1))
    query = "SELECT step_index, prefix_step_index, context_ids, action_ids FROM tokens ORDER BY 1"
    assert rows(tmp_path, query) == [(0, None, [1, 2], [3]), (1, 0, [4], [5])]
    assert rows(tmp_path, "SELECT extra->>'$.tokens_left_out' FROM steps WHERE step_index = 2") == [
        ("they extend step 1, which was not recorded",)
    ]


def test_a_sub_agent_names_the_episode_it_came_out_of(make: Make, tmp_path: Path) -> None:
    with make() as recorder, recorder.episode("t", agent_id="lead") as lead:
        with lead.step(state="s") as step:
            step.action("delegate")
        with recorder.episode("t", parent=lead, parent_step_index=0, agent_id="helper") as helper:
            with helper.step(state="s") as step:
                step.action("help")
            with recorder.episode("t", parent=helper, agent_id="third") as third, third.step(state="s") as step:
                step.action("help more")
    rows_read = rows(
        tmp_path,
        "SELECT c.agent_id, p.agent_id, r.agent_id, c.relation, c.parent_step_index FROM episodes c "
        "JOIN episodes p ON p.episode_id = c.parent_episode_id JOIN episodes r ON r.episode_id = c.root_episode_id "
        "ORDER BY 1",
    )
    assert rows_read == [("helper", "lead", "lead", "subagent", 0), ("third", "helper", "lead", "subagent", None)]


def test_many_async_agents_at_once_each_get_their_own_rows(make: Make, tmp_path: Path) -> None:
    async def agent(recorder: Recorder, number: int) -> None:
        async with recorder.episode(f"task-{number}") as episode:
            for turn in range(3):
                async with episode.step(context=[user(f"{number}.{turn}")]) as step:
                    await asyncio.sleep(0)
                    step.action(f"{number}.{turn}")
                    async with step.tool_call("tool") as call:
                        await asyncio.sleep(0)
                        call.result("ok")

    async def run(recorder: Recorder) -> None:
        await asyncio.gather(*(agent(recorder, number) for number in range(20)))

    with make() as recorder:
        asyncio.run(run(recorder))
    query = (
        "SELECT count(DISTINCT episode_id), count(*), bool_and(state = action), "
        "bool_and(action = task_id[6:] || '.' || step_index) FROM steps JOIN episodes USING (episode_id)"
    )
    assert rows(tmp_path, query) == [(20, 60, True, True)]


def test_threads_within_an_episode_lose_no_step(make: Make, tmp_path: Path) -> None:
    with make() as recorder, recorder.episode("t") as episode:

        def work(name: int) -> None:
            for number in range(20):
                with episode.step(state="s") as step:
                    step.action(f"{name}.{number}")
                    step.reward(name)

        threads = [threading.Thread(target=work, args=(name,)) for name in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    rows_read = rows(tmp_path, "SELECT count(*), count(DISTINCT action), max(step_index), sum(reward) FROM steps")
    assert rows_read == [(160, 160, 159, 20.0 * sum(range(8)))]


def test_an_agent_that_breaks_is_recorded_as_failed_and_its_exception_goes_on(make: Make, tmp_path: Path) -> None:
    def broken_agent(recorder: Recorder, error: BaseException) -> None:
        with recorder.episode(type(error).__name__) as episode, episode.step(state="s") as step:
            step.action("a")
            with step.tool_call("search"):
                raise error

    with make() as recorder:
        for error in (ValueError("no such flight"), KeyboardInterrupt()):
            with pytest.raises(type(error)):
                broken_agent(recorder, error)
    assert by_task(tmp_path, "task_id, status, error") == [
        ("KeyboardInterrupt", "aborted", "KeyboardInterrupt: "),
        ("ValueError", "failed", "ValueError: no such flight"),
    ]
    errors = rows(tmp_path, "SELECT error FROM spans ORDER BY error")
    assert errors[-1] == ("ValueError: no such flight",)
    assert errors.count(errors[-1]) == 1


def test_a_clock_that_is_set_back_reorders_nothing(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    now = iter(range(2_000_000_000, 0, -1_000_000))
    monkeypatch.setattr(time, "time", lambda: float(next(now)))
    with make() as recorder:
        agent(recorder, steps=3)
    query = (
        "SELECT bool_and(s.started_at BETWEEN e.started_at AND e.ended_at), "
        "list(s.step_index ORDER BY s.started_at) FROM steps s JOIN episodes e USING (episode_id)"
    )
    assert rows(tmp_path, query) == [(True, [0, 1, 2])]


# ---------------------------------------------------------------- 2. what is wrong

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.integers(), inner, max_size=3),
    max_leaves=8,
)
ANYTHING = JSON | st.binary() | st.just(object()) | st.builds(ValueError, st.text()) | st.sets(st.integers())


@given(ANYTHING)
def test_values_of_any_kind_can_be_put_into_a_frame_and_read_back(value: Any) -> None:
    frame = ToolFrame(number=0, name="tool", arguments=value, result={"inner": [value]})
    again = decode(encode(new_key(), 0, frame))
    assert isinstance(again, ToolFrame)
    msgspec.json.encode(again.result)


class Hostile:
    """An object that breaks anyone who looks at it."""

    def __repr__(self) -> str:
        raise RuntimeError("do not look at me")

    def model_dump(self) -> None:
        raise RuntimeError("do not dump me")


def test_wrong_use_never_raises_is_counted_and_loses_nothing_else(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cyclic: list[Any] = []
    cyclic.append(cyclic)
    with make() as recorder:
        with recorder.episode("t", seed="seven", colour="red") as episode:
            with episode.step(context="not messages", cost="much", taste="good") as step:
                step.action(12, tool_calls=[cyclic])
                step.reward("high")
                step.reward(float("nan"))
                with step.tool_call("look", Hostile()) as call:
                    call.result("\ud800 half a character")
            with episode.step() as empty:
                pass
            empty.action("too late")
            episode.score("judge@home", 1.0, nonsense=2)  # type: ignore[call-arg]
            episode.update(mood="fine", terminated="perhaps")
            episode.reward(1.0)
        episode.reward(2.0)
        with episode.step(state="s") as step:
            step.action("after the end")
        recorder.episode()  # type: ignore[call-arg]
        troubles = recorder.stats().troubles
    assert troubles >= 10
    assert "the episode has ended" in caplog.text
    assert "value_estimate; numbers are finite" in caplog.text
    assert "step.action(text)" in caplog.text
    assert "no `colour`" in caplog.text or "['colour']" in caplog.text
    rows_read = rows(tmp_path, "SELECT env_return, num_steps, seed, extra FROM episodes")
    assert [row[:3] for row in rows_read] == [(1.0, 1, None)]
    extra = msgspec.json.decode(rows_read[0][3])
    assert extra["colour"] == "red"
    assert extra["not_taken"] == {"terminated": "perhaps"} or extra["not_taken"] == {"seed": "seven"}
    (action, step_extra) = rows(tmp_path, "SELECT action, extra FROM steps")[0]
    assert action == "12"
    assert {"context_not_taken", "not_taken", "taste"} <= msgspec.json.decode(step_extra).keys()


def test_what_is_told_is_told_once(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    with make() as recorder:
        for _ in range(5):
            with recorder.episode("t") as episode, episode.step(state="s"):
                pass
        assert (recorder.stats().troubles, recorder.stats().steps_left_out) == (5, 5)
    assert caplog.text.count("a step without an") == 1
    assert "without tool calls: 5" in caplog.text


def test_what_is_begun_after_the_end_is_refused_with_the_right_advice(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = make()
    recorder.close()
    agent(recorder)
    recorder.record(EpisodeRecord(task_id="t", steps=[StepRecord(state="s", action="a")], source_format="live"))
    assert recorder.stats().troubles == 2
    assert "Recorder.episode: the recorder is closed" in caplog.text
    assert "Recorder.record: the recorder is closed" in caplog.text
    assert "max_bytes" not in caplog.text


def test_text_is_no_reward_and_leaves_what_was_given_before(make: Make, tmp_path: Path) -> None:
    with make() as recorder:
        with recorder.episode("t") as episode, episode.step(state="s") as step:
            step.action("a")
            step.reward("0.5")
            episode.reward(0.25)
            episode.reward("1.0")
            episode.score("judge", "1")
        assert recorder.stats().troubles == 3
    assert rows(tmp_path, "SELECT env_return, reward FROM episodes JOIN steps USING (episode_id)") == [(0.25, None)]
    assert rows(tmp_path, "SELECT count(*) FROM scores") == [(0,)]


def test_options_that_cannot_be_meant_are_refused_before_the_agent_runs(tmp_path: Path) -> None:
    for options, words in (
        ({"run": " "}, "`run` is ' '"),
        ({"run": "r", "on_full": "wait"}, "valid: drop, block"),
        ({"run": "r", "unfinished": "guess"}, "valid: record, drop"),
        ({"run": "r", "polcy": "p"}, r"no \['polcy'\]"),
    ):
        with pytest.raises(UsageError, match=words):
            lake.recorder(tmp_path, **options)
    (tmp_path / "file").write_text("")
    with pytest.raises(LakeAccessError, match="is a file, and"):
        lake.recorder(tmp_path / "file", run="r", spool=tmp_path / "spool")
    assert not (tmp_path / "spool").exists()
    with pytest.raises(LakeAccessError, match="name another folder"):
        lake.recorder(tmp_path / "lake", run="r", spool=tmp_path / "file")


def test_a_full_spool_leaves_whole_episodes_out_with_a_count(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with make(max_bytes=20_000) as recorder:
        for _ in range(20):
            agent(recorder, steps=10)
        stats = recorder.stats()
    assert 0 < stats.left_out < 20
    assert "Give a larger `max_bytes`" in caplog.text
    rows_read = rows(tmp_path, "SELECT count(*), min(num_steps) FROM episodes")
    assert rows_read == [(20 - stats.left_out, 10)]


def test_a_full_spool_can_hold_the_agent_until_there_is_room(make: Make, tmp_path: Path) -> None:
    with make(max_bytes=20_000, on_full="block", batch_seconds=0.01) as recorder:
        recorder._sink.spool._segment_bytes = 2_000
        for _ in range(20):
            agent(recorder, steps=10)
        assert recorder.stats().left_out == 0
    assert rows(tmp_path, "SELECT count(*), min(num_steps) FROM episodes") == [(20, 10)]


def test_closing_frees_an_agent_that_waits_for_room(make: Make, tmp_path: Path) -> None:
    recorder = make(max_bytes=20_000, on_full="block")
    (tmp_path / "lake").rename(tmp_path / "away")
    (tmp_path / "lake").write_text("nothing can be delivered")
    waiting = threading.Thread(target=lambda: [agent(recorder, steps=10) for _ in range(20)], daemon=True)
    waiting.start()
    waiting.join(0.5)
    assert waiting.is_alive()
    assert not recorder.close(0.1)
    waiting.join(30)
    assert not waiting.is_alive()


def test_a_timeout_holds_for_all_that_is_waited_for(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk and the lake hang, and an agent continues in an episode that no one has left."""
    may_go_on = threading.Event()
    recorder = make(durable=False)
    agent(recorder, "before")
    assert recorder.flush(30)
    monkeypatch.setattr("lake.live.spool._sync_data", lambda _: may_go_on.wait(60))
    monkeypatch.setattr(recorder._delivery, "_deliver_log", lambda _: may_go_on.wait(60))
    busy = recorder.episode("busy")
    with ThreadPoolExecutor(1) as pool, ExitStack() as stack:
        stack.callback(may_go_on.set)
        pool.submit(lambda: busy._lock.acquire() and may_go_on.wait(60) and busy._lock.release())
        agent(recorder, "meanwhile")
        for wait in (recorder.flush, recorder.close):
            began = time.monotonic()
            assert not wait(1.0)
            assert 1.0 <= time.monotonic() - began < 1.8


# ---------------------------------------------------------------- 3. off


@pytest.mark.parametrize("how", ["argument", "environment"])
def test_off_records_nothing_and_makes_nothing(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "environment":
        monkeypatch.setenv("TRAJLAKE_RECORD", "off")
    with lake.recorder(tmp_path / "lake", run="r", enabled=None if how == "environment" else False) as recorder:
        with recorder.episode("t") as episode, episode.step() as step:
            step.action("a")
            with step.tool_call("x") as call:
                call.result("y")
        assert recorder is OFF
        assert recorder.flush()
    assert list(tmp_path.iterdir()) == []


def test_off_can_do_all_that_is_public() -> None:
    for kind in (Recorder, Episode, LiveStep, ToolCall):
        for name, member in inspect.getmembers(kind, inspect.isfunction):
            if not name.startswith("_"):
                assert callable(getattr(OFF, name)), f"{kind.__name__}.{name}: {member}"


# ---------------------------------------------------------------- 4. delivery


def begin_episode(recorder_spool: Spool, task: str, frames: int = 2) -> bytes:
    """The first frames of an episode, synced."""
    key = new_key()
    record = EpisodeRecord(task_id=task, steps=[], run_id="agent", source_format="live")
    spoken = [
        BeginFrame(episode=record),
        StepFrame(index=0, step=StepRecord(state="s", action="a")),
        RewardFrame(value=1.0),
    ]
    for number, frame in enumerate(spoken[:frames]):
        recorder_spool.append(encode(key, number, frame))
    recorder_spool.sync(10)
    return key


def test_what_dead_processes_left_is_delivered_and_unfinished_episodes_are_aborted(make: Make, tmp_path: Path) -> None:
    dead = Spool.create(tmp_path / "spool")
    key = begin_episode(dead, "finished", 3)
    dead.append(encode(key, 3, EndFrame()))
    begin_episode(dead, "unfinished")
    begin_episode(dead, "without a step", 1)
    dead.close()
    with make() as recorder:
        assert recorder.flush(30)
        assert (recorder.stats().delivered, recorder.stats().aborted) == (2, 1)
    assert by_task(tmp_path, "task_id, status, env_return") == [
        ("finished", "completed", 1.0),
        ("unfinished", "aborted", None),
    ]
    assert [path.name for path in (tmp_path / "spool").iterdir()] == ["lock"]


def test_an_episode_that_lost_a_frame_before_its_process_died_is_left_out(make: Make, tmp_path: Path) -> None:
    dead = Spool.create(tmp_path / "spool")
    dead.append(encode(begin_episode(dead, "half"), 2, LostFrame(reason="full")))
    dead.close()
    with make() as recorder:
        assert recorder.flush(30)
        assert (recorder.stats().delivered, recorder.stats().left_out) == (0, 1)
    assert rows(tmp_path, "SELECT count(*) FROM episodes") == [(0,)]


def test_unfinished_episodes_can_be_left_out_with_a_count(make: Make, tmp_path: Path) -> None:
    dead = Spool.create(tmp_path / "spool")
    begin_episode(dead, "unfinished")
    dead.close()
    with make(unfinished="drop") as recorder:
        assert recorder.flush(30)
        assert (recorder.stats().delivered, recorder.stats().left_out) == (0, 1)
    assert rows(tmp_path, "SELECT count(*) FROM episodes") == [(0,)]


def test_delivered_and_killed_before_that_was_noted_is_there_once(make: Make, tmp_path: Path) -> None:
    """The same spool, delivered twice: as if the note had never reached the disk."""
    dead = Spool.create(tmp_path / "spool")
    for number in range(5):
        dead.append(encode(begin_episode(dead, f"t{number}", 3), 3, EndFrame()))
    dead.close()
    contents = {path: path.read_bytes() for path in dead.folder.iterdir()}
    make().flush(30)
    dead.folder.mkdir()
    for path, data in contents.items():
        path.write_bytes(data)
    with make() as recorder:
        assert recorder.flush(30)
        assert recorder.stats().delivered == 5
    assert rows(tmp_path, "SELECT count(*), sum(env_return) FROM episodes") == [(5, 5.0)]


def test_a_forked_child_records_and_its_parent_delivers(make: Make, tmp_path: Path) -> None:
    recorder = make()
    agent(recorder, "parent, before")
    with recorder.episode("parent, open") as open_episode, open_episode.step(state="s") as step:
        step.action("a")
        child = os.fork()
        if child == 0:
            open_episode.reward(5.0)
            agent(recorder, "child")
            os._exit(0)
        os.waitpid(child, 0)
    recorder.close()
    assert by_task(tmp_path, "task_id, env_return") == [
        ("child", None),
        ("parent, before", None),
        ("parent, open", None),
    ]


def test_episodes_that_were_never_left_end_as_they_stand_when_the_recorder_is_closed(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = make()
    open_episode = recorder.episode("with an open step")
    with open_episode.step(context=[user("a")]) as step:
        step.action("b")
    open_episode.step(context=[user("c")]).action("d")
    open_episode.step(context=[user("e")])
    open_episode.reward(1.0)
    open_episode.score("judge", 0.5)
    recorder.episode("nothing in it")
    agent(recorder, "left")
    assert recorder.close()
    open_episode.reward(2.0)
    open_episode.end()
    assert "never left: 2 (of task 'with an open step', 'nothing in it')" in caplog.text
    assert "the recorder was closed" in caplog.text
    assert (recorder.stats().steps_left_out, recorder.stats().left_out) == (1, 1)
    query = "SELECT task_id, status, stop_reason, env_return, num_steps FROM episodes ORDER BY 1"
    assert rows(tmp_path, query) == [
        ("left", "completed", None, None, 1),
        ("with an open step", "aborted", "never_left", 1.0, 2),
    ]
    assert rows(tmp_path, "SELECT scorer, value FROM scores") == [("judge", 0.5)]


def test_closing_beside_agents_that_go_on_raises_into_none_and_loses_no_finished_step(
    make: Make, tmp_path: Path
) -> None:
    recorder, raised, done = make(), [], [0] * 4
    started, stopped = threading.Barrier(5), threading.Event()

    def run(number: int) -> None:
        try:
            episode = recorder.episode(f"t{number}")
            while not stopped.wait(0.001):
                with episode.step(state="s", cost=1.0) as step:
                    step.action("a", model="m")
                    step.tool_call("look").result("seen")
                if not recorder._sink.open:
                    break
                done[number] += 1
                if done[number] == 5:
                    started.wait(30)
            episode.end()
        except Exception as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    started.wait(30)
    assert recorder.close()
    stopped.set()
    for thread in threads:
        thread.join(30)
    assert raised == []
    rows_read = rows(tmp_path, "SELECT status, num_steps FROM episodes ORDER BY task_id")
    assert [status for status, _ in rows_read] == ["aborted"] * 4
    assert all(steps >= 5 for _, steps in rows_read)


def test_conflicts_are_rejects_with_the_reason_and_told(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with make() as recorder:
        for answer in ("one", "two"):
            with recorder.episode("t", rollout_index=0) as episode, episode.step(state="s") as step:
                step.action(answer)
        recorder.flush(30)
        assert (recorder.stats().delivered, recorder.stats().rejected) == (1, 1)
    assert "another --run or a" in caplog.text
    assert rows(tmp_path, "SELECT reason, task FROM (SELECT reason, raw->>'$.task_id' AS task FROM rejects)") == [
        ("conflict", "t")
    ]


def test_how_many_rejects_there_are_is_told_at_each_power_of_ten(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with make() as recorder:
        for batch in (range(1), range(1, 3), range(3, 13), range(13, 15)):
            for number in batch:
                with recorder.episode("t", rollout_index=0) as episode, episode.step(state="s") as step:
                    step.action(str(number))
            recorder.flush(30)
    messages = [record.message.partition(": ")[0] for record in caplog.records if "rejects" in record.message]
    assert messages == ["2 episodes are in `rejects` so far", "12 episodes are in `rejects` so far"]


def test_an_episode_that_breaks_the_writer_is_a_reject_and_the_others_are_there(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = Lake.append

    def broken(self: Lake, records: Any, **options: Any) -> Any:
        if any(record.task_id == "poison" for record in records):
            raise ZeroDivisionError("a fault of ours")
        return append(self, records, **options)

    monkeypatch.setattr(Lake, "append", broken)
    with make() as recorder:
        for task in ("before", "poison", "after"):
            agent(recorder, task)
    assert by_task(tmp_path, "task_id") == [("after",), ("before",)]
    ((message,),) = rows(tmp_path, "SELECT message FROM rejects")
    assert "recorded: ZeroDivisionError: a fault" in message


def test_an_episode_that_cannot_be_assembled_is_a_reject_and_holds_up_no_other(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(frames: list[Any]) -> Any:
        if frames[0].episode.task_id == "poison":
            raise TypeError("a fault of ours")
        return assemble_frames(frames)

    monkeypatch.setattr("lake.live.delivery.assemble_frames", broken)
    with make() as recorder:
        for task in ("before", "poison", "after"):
            agent(recorder, task)
    assert by_task(tmp_path, "task_id") == [("after",), ("before",)]
    ((message,),) = rows(tmp_path, "SELECT message FROM rejects")
    assert "assembled: TypeError: a fault" in message


def test_what_is_no_episode_is_a_reject_once_and_without_its_keys(make: Make, tmp_path: Path) -> None:
    refused = Reject(
        position=0, reason="invalid", message="token=a, Bearer abc123def456", raw="api_key=b", source_format="f"
    )
    with make() as recorder:
        for _ in range(2):
            recorder.reject(refused)
        assert recorder.flush(30)
        assert (recorder.stats().rejected, recorder.stats().finished) == (2, 0)
    rows_read = rows(tmp_path, "SELECT run_id, reason, message, raw, source_format FROM rejects")
    assert rows_read == [("agent", "invalid", "token=a, Bearer [redacted]", "api_key=[redacted]", "f")]


def test_a_lake_that_goes_away_is_tried_again_and_not_made_anew(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("lake.live.delivery._LONGEST_PAUSE", 0.01)
    with make(batch_seconds=0.01) as recorder:
        agent(recorder, "before")
        assert recorder.flush(30)
        (tmp_path / "lake").rename(tmp_path / "away")
        agent(recorder, "meanwhile")
        assert not recorder.flush(0.5)
        assert recorder.stats().problem
        assert not (tmp_path / "lake").exists()
        (tmp_path / "away").rename(tmp_path / "lake")
        assert recorder.flush(30) or recorder.flush(30)
        assert recorder.stats().problem is None
    assert caplog.text.count("tried again") == 1
    assert by_task(tmp_path, "task_id") == [("before",), ("meanwhile",)]


def test_an_agent_is_not_held_up_by_a_lake_that_cannot_be_reached(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, wording: Wording
) -> None:
    recorder = lake.recorder(tmp_path / "lake", run="r", spool=tmp_path / "spool")
    (tmp_path / "lake").rename(tmp_path / "away")
    (tmp_path / "lake").write_text("a file, where the lake is meant to be")
    agent(recorder)
    assert not recorder.close(30)
    assert "is a file, and" in caplog.text
    sentence = wording(caplog.messages[-1])
    assert f"remain in {tmp_path / 'spool'}" in sentence
    assert "The next recorder" in sentence
    (tmp_path / "lake").unlink()
    (tmp_path / "away").rename(tmp_path / "lake")
    with lake.recorder(tmp_path / "lake", run="r", spool=tmp_path / "spool"):
        pass
    assert rows(tmp_path, "SELECT count(*) FROM episodes") == [(1,)]


def test_an_episode_that_stays_open_does_not_keep_the_spool_full(make: Make, tmp_path: Path) -> None:
    with make(max_bytes=30_000, batch_seconds=0.01, on_full="block") as recorder:
        recorder._sink.spool._segment_bytes = 4_000
        with recorder.episode("long") as long:
            with long.step(state="s") as step:
                step.action("first")
            for _ in range(20):
                agent(recorder, "short", steps=20)
            with long.step(state="s") as step:
                step.action("last")
    query = "SELECT task_id, count(*), sum(num_steps) FROM episodes GROUP BY 1 ORDER BY 1"
    assert rows(tmp_path, query) == [
        ("long", 1, 2),
        ("short", 20, 400),
    ]


# ---------------------------------------------------------------- frames


def test_an_episode_without_its_first_frame_is_none() -> None:
    with pytest.raises(FrameError, match="without its first frame"):
        assemble_episode([StepFrame(index=0, step=StepRecord(state="s", action="a")), EndFrame()])


def test_a_finished_record_is_taken_as_it_is_and_defaults_are_for_the_rest(make: Make, tmp_path: Path) -> None:
    record = EpisodeRecord(task_id="t", steps=[StepRecord(state="s", action="a")], source_format="otlp", policy="own")
    assert assemble_episode([EpisodeFrame(episode=record)]) == record
    with make(environment="airline", policy="other") as recorder:
        recorder.record(record)
    rows_read = rows(tmp_path, "SELECT task_id, run_id, source_format, environment, policy FROM episodes")
    assert rows_read == [("t", "agent", "otlp", "airline", "own")]
