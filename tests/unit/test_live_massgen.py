"""MassGen's mixins: nothing of the stream changes, and what is recorded is what a folder of its traces would be."""

import asyncio
import gc
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

import lake
from lake.cli import trajlake
from lake.live.massgen import RecordedAgent, RecordedOrchestrator
from lake.live.recorder import Recorder
from lake.records import EpisodeRecord
from testkit.copies import empty_lake
from testkit.examples import examples
from testkit.round_trips import assert_same, records, there_and_back

QUESTION = {"role": "user", "content": "Which city is the capital of France?"}


def chunk(kind: str, **fields: Any) -> SimpleNamespace:
    """A chunk of a stream, with every field of the tool's."""
    names = ("content", "tool_calls", "complete_message", "error", "source", "status", "tool_call_id")
    names += ("reasoning_delta", "reasoning_text", "reasoning_summary_delta", "reasoning_summary_text")
    return SimpleNamespace(**(dict.fromkeys(names) | {"type": kind} | fields))


def call(name: str, arguments: str, call_id: str | None) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def ran(status: str, text: str) -> SimpleNamespace:
    """A chunk of a tool that the backend runs."""
    return chunk("custom_tool_status", status=status, content=text, source="custom_look", tool_call_id="c7")


WORKED = [
    chunk("reasoning", content="shown: Hm.", reasoning_delta="Hm."),
    chunk("content", content="I "),
    chunk("content", content="look."),
    ran("custom_tool_called", "Calling look..."),
    ran("function_call", 'Arguments for Calling look: {"at": "map"}'),
    ran("function_call_output", "Results for Calling look: Paris,\nin the north"),
    chunk("content", content="Paris."),
    chunk("tool_calls", tool_calls=[call("new_answer", '{"content": "Paris"}', "c8")]),
    chunk("tool_calls", tool_calls=[{"type": "function_call", "call_id": "c8", "name": "new_answer"} | {
        "arguments": '{"content": "Paris"}', "id": "fc_1"}]),
    chunk("complete_message", complete_message={"role": "assistant", "content": "Paris."}),
    chunk("done"),
]  # fmt: skip


class Backend:
    """A model of the tool's."""

    def __init__(self) -> None:
        self.config = {"model": "gpt-x"}
        self.token_usage = SimpleNamespace(input_tokens=100, output_tokens=10)

    def get_provider_name(self) -> str:
        return "OpenAI"


class Agent:
    """The tool's agent as far as its mixin knows it; `chunks` is what its stream gives, exceptions are raised."""

    def __init__(self, agent_id: str, chunks: list[Any]) -> None:
        self.agent_id, self.chunks, self.backend = agent_id, chunks, Backend()
        self.conversation_history: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}]
        self.told: list[Any] = []
        """What reached the stream from outside."""

    async def chat(self, messages: list[Any], tools: Any = None, reset_chat: bool = False) -> AsyncIterator[Any]:
        self.conversation_history = [] if reset_chat else self.conversation_history
        self.conversation_history += messages
        for chunk in self.chunks:
            await asyncio.sleep(0)
            try:
                if isinstance(chunk, BaseException):
                    raise chunk  # noqa: TRY301 - the stream's own
                self.told.append((yield chunk))
            except BaseException as error:
                self.told.append(error)
                raise
            self.backend.token_usage.input_tokens += 5


class Recorded(RecordedAgent, Agent):
    pass


@contextmanager
def recording(tmp_path: Path) -> Iterator[Recorder]:
    if not (tmp_path / "lake").exists():
        empty_lake(tmp_path / "lake")
    with lake.recorder(tmp_path / "lake", run="agent", spool=tmp_path / "spool", batch_seconds=3600) as recorder:
        yield recorder


def episodes(tmp_path: Path) -> list[EpisodeRecord]:
    episodes_read = records(lake.open(tmp_path / "lake")).values()
    return sorted(episodes_read, key=lambda record: (record.started_at is None, record.started_at))


async def drained(stream: Any) -> list[Any]:
    return [chunk async for chunk in stream]


def test_an_agents_call_is_an_episode(tmp_path: Path) -> None:
    with recording(tmp_path) as recorder:
        agent = Recorded("a", WORKED, recorder=recorder)
        assert asyncio.run(drained(agent.chat([QUESTION], tools=[{}]))) == WORKED
        assert agent.trace is not None
        assert agent.trace.id is not None
        assert recorder.stats().troubles == 0
    (episode,) = episodes(tmp_path)
    assert lake.open(tmp_path / "lake").sql("SELECT id_text(episode_id) FROM episodes").rows() == [(agent.trace.id,)]
    assert (episode.source_format, episode.run_id, episode.agent_id) == ("massgen_traces", "agent", "a")
    assert (episode.task_id, episode.status, episode.policy) == (QUESTION["content"], "completed", "gpt-x")
    assert (episode.prompt_tokens, episode.completion_tokens) == (5 * len(WORKED), None)
    assert episode.initial_messages == [{"role": "system", "content": "Be brief."}, QUESTION]
    assert [(step.reasoning, step.action) for step in episode.steps] == [("Hm.", "I look."), (None, "Paris.")]
    assert [len(step.tool_calls or ()) for step in episode.steps] == [1, 1], "a call that is told twice is one"
    (message,) = episode.steps[1].context
    assert (message["role"], message["tool_call_id"], message["content"]) == ("tool", "c7", "Paris,\nin the north")


def test_the_context_is_the_conversation_so_far(tmp_path: Path) -> None:
    answer = {"role": "assistant", "content": "Paris."}
    with recording(tmp_path) as recorder:
        agent = Recorded("a", [chunk("content", content="Yes.")], recorder=recorder)
        agent.conversation_history += [QUESTION, answer]
        asyncio.run(drained(agent.chat([{"role": "user", "content": "Sure?"}])))
        asyncio.run(drained(agent.chat("Again?", reset_chat=True)))
    first, second = episodes(tmp_path)
    assert [message["role"] for message in first.initial_messages or ()] == ["system", "user", "assistant", "user"]
    assert len(first.steps) == 1, "an earlier answer is no decision of this call"
    assert second.initial_messages == [{"role": "user", "content": "Again?"}]


FAULTS: list[tuple[Any, str, str | None]] = [
    (ValueError("bad key"), "failed", "ValueError: bad key"),
    (asyncio.CancelledError(), "aborted", "CancelledError: "),
    (KeyboardInterrupt(), "aborted", "KeyboardInterrupt: "),
    (chunk("error", error="rate limit"), "failed", "rate limit"),
]


def test_an_error_is_recorded_and_goes_on(tmp_path: Path) -> None:
    async def run(agent: Any) -> tuple[list[Any], BaseException | None]:
        chunks_out = []
        try:
            async for chunk in agent.chat([QUESTION]):
                chunks_out.append(chunk)
        except BaseException as raised:
            return chunks_out, raised
        return chunks_out, None

    with recording(tmp_path) as recorder:
        for number, (fault, _, _) in enumerate(FAULTS):
            chunks = [chunk("content", content="I"), fault]
            chunks_out, raised = asyncio.run(run(Recorded(f"agent-{number}", chunks, recorder=recorder)))
            assert [*chunks_out, raised][:2] == chunks, "the same exception"
    recorded = {record.agent_id: (record.status, (record.error or "").strip()) for record in episodes(tmp_path)}
    assert recorded == {
        f"agent-{number}": (status, (error or "").strip()) for number, (_, status, error) in enumerate(FAULTS)
    }


def test_a_stream_that_is_left_is_closed_and_recorded_as_aborted(tmp_path: Path) -> None:
    async def leave(agent: Any) -> None:
        stream = agent.chat([QUESTION])
        await stream.__anext__()
        await stream.aclose()
        assert [type(signal) for signal in agent.told] == [GeneratorExit], "before aclose returns"
        with pytest.raises(StopAsyncIteration):
            await stream.__anext__()

    async def forget(agent: Any) -> None:
        async for _ in agent.chat([QUESTION]):
            break
        gc.collect()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert [type(signal) for signal in agent.told] == [GeneratorExit]

    with recording(tmp_path) as recorder:
        asyncio.run(leave(Recorded("left", WORKED[1:], recorder=recorder)))
        asyncio.run(forget(Recorded("forgotten", WORKED[1:], recorder=recorder)))
    assert [(record.agent_id, record.status, record.steps[0].action) for record in episodes(tmp_path)] == [
        ("left", "aborted", "I "),
        ("forgotten", "aborted", "I "),
    ]


MOVES = st.lists(st.sampled_from(("next", "send", "throw", "close", "cancel")), max_size=6)


class Thrown(Exception):
    """What is thrown into a stream."""


class Stubborn(Agent):
    """Goes on after an exception that is thrown into it, and answers a value with it."""

    async def chat(self, messages: list[Any], tools: Any = None) -> AsyncIterator[Any]:
        value: Any = None
        for number in range(4):
            try:
                value = yield chunk("content", content=f"{number} after {value}")
                self.told.append(value)
            except Thrown as error:
                self.told.append(error)
                value = "Thrown"
                if number == 2:
                    raise
        if messages == "fault":
            raise LookupError("at the end")


class RecordedStubborn(RecordedAgent, Stubborn):
    pass


async def _driven(agent: Any, moves: list[str], messages: Any) -> list[Any]:
    """What a caller sees of a stream, move by move."""
    stream, chunks_out = agent.chat(messages), []
    factories: dict[str, Callable[[], Any]] = {
        "next": stream.__anext__,
        "send": lambda: stream.asend("value"),
        "throw": lambda: stream.athrow(Thrown("x")),
        "cancel": lambda: stream.athrow(asyncio.CancelledError()),
        "close": stream.aclose,
    }
    for move in moves:
        try:
            got = await factories[move]()
            chunks_out.append((move, getattr(got, "content", got)))
        except BaseException as error:
            chunks_out.append((move, traceback.format_exception_only(error)))
    await stream.aclose()
    return [*chunks_out, *map(repr, agent.told)]


@given(MOVES, st.sampled_from((None, "fault")))
@settings(max_examples=examples(150), deadline=None)
def test_a_caller_cannot_tell_a_recorded_stream_from_the_agents_own(moves: list[str], messages: Any) -> None:
    with shared() as recorder:
        mine = asyncio.run(_driven(RecordedStubborn("a", [], recorder=recorder), moves, messages))
    assert mine == asyncio.run(_driven(Stubborn("a", []), moves, messages))


@contextmanager
def shared() -> Iterator[Any]:
    """A recorder that takes and keeps nothing, for what is not about records."""
    sink = SimpleNamespace(report_trouble=lambda _: None)
    yield SimpleNamespace(_sink=sink, run="agent", record=lambda _: None)


def test_off_it_is_the_agents_own_stream(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRAJLAKE_RECORD", "off")
    for recorder in (None, lake.recorder(tmp_path / "lake", run="agent")):
        agent = Recorded("a", WORKED, recorder=recorder)
        stream = agent.chat([QUESTION])
        assert stream.ag_code is Agent.chat.__code__
        assert asyncio.run(drained(stream)) == WORKED
        assert agent.trace is None
    assert not (tmp_path / "lake").exists()


@pytest.mark.parametrize(
    "broken",
    [
        {"agent_id": 7, "backend": None, "conversation_history": None},
        {"backend": SimpleNamespace(get_provider_name=lambda: 1 / 0)},
        {"conversation_history": ["no message", 3]},
        {"chunks": [None, SimpleNamespace(), chunk("content", content=b"x"), chunk("tool_calls", tool_calls=[3])]},
        {"chunks": [chunk("tool_calls", tool_calls=[call("f", "{", None)]), chunk(None, content="x")]},
    ],
)
def test_collecting_never_breaks_the_agent(broken: dict[str, Any]) -> None:
    class Plain(Agent):
        async def chat(self, messages: Any, tools: Any = None) -> AsyncIterator[Any]:
            for chunk in self.chunks:
                yield chunk

    class Both(RecordedAgent, Plain):
        pass

    with shared() as recorder:
        agent = Both("a", WORKED, recorder=recorder)
        for name, value in broken.items():
            setattr(agent, name, value)
        assert asyncio.run(drained(agent.chat([QUESTION]))) == agent.chunks


def test_a_chat_that_is_no_stream_is_left_alone(tmp_path: Path) -> None:
    class Asked(Agent):
        async def chat(self, messages: Any) -> Any:  # type: ignore[override]
            return messages

    class RecordedAsked(RecordedAgent, Asked):
        pass

    with recording(tmp_path) as recorder:
        assert asyncio.run(RecordedAsked("a", [], recorder=recorder).chat("Hello")) == "Hello"


def test_a_trace_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lake.live.massgen.MAX_SPANS", 2)
    with recording(tmp_path) as recorder:
        asyncio.run(drained(Recorded("a", [chunk("content", content="x")] * 5, recorder=recorder).chat([QUESTION])))
    (episode,) = episodes(tmp_path)
    assert episode.steps[0].action == "xx"
    assert (episode.extra or {})["massgen"]["trace"]["metadata"]["spans_left_out"] == 3


class Team:
    """The tool's orchestrator as far as its mixin knows it; chunks may change its state."""

    def __init__(self, agents: dict[str, Any], script: list[Callable[["Team"], Any]]) -> None:
        self.orchestrator_id, self.agents, self.script = "orchestrator", agents, script
        self.agent_states = {name: SimpleNamespace(has_voted=False, answer=None) for name in agents}
        self.coordination_tracker = SimpleNamespace(events=[], answers_by_agent={}, final_answers={}, max_round=0)
        self.max_attempts, self.current_attempt, self.restart_pending = 2, 0, False
        self.restart_reason = self._selected_agent = None

    def note(self, kind: str, agent: str | None, **context: Any) -> None:
        event = SimpleNamespace(timestamp=1.76e9, event_type=kind, agent_id=agent, details="", context=context)
        self.coordination_tracker.events.append(event)

    async def chat(self, messages: list[Any], tools: Any = None) -> AsyncIterator[Any]:
        for act in self.script:
            if (decision := act(self)) is not None:
                yield decision


class RecordedTeam(RecordedOrchestrator, Team):
    pass


def _answers(team: Team) -> Any:
    answer = SimpleNamespace(content="Paris. " * 50, label="agent1.1")
    team.coordination_tracker.answers_by_agent["a"] = [answer]
    team.agent_states["a"].answer = answer.content
    team.note("new_answer", "a", label="agent1.1", round=0)
    team.note("restart_triggered", "a", affected_agents=["a", "b"], round=0)
    team.note("status_change", "a", round=0)
    team.agents["a"].backend.token_usage.output_tokens += 7
    return chunk("content", content="a answered")


def _votes(team: Team) -> Any:
    for voter in ("a", "b"):
        team.note("vote_cast", voter, voted_for="a", voted_for_label="agent1.1", reason="Best.", round=1)
        team.agent_states[voter].has_voted = True
    return chunk("agent_status", status="voted", source="b")


def _chooses(team: Team) -> None:
    team._selected_agent = "a"
    team.note("final_agent_selected", "a", round=1)
    team.coordination_tracker.final_answers["a"] = SimpleNamespace(content="It is Paris.")
    team.note("final_answer", "a", label="agent1.final", round=1)


def test_a_coordination_is_an_episode_of_votes_answers_and_restarts(tmp_path: Path) -> None:
    with recording(tmp_path) as recorder:
        agents = {name: Agent(name, []) for name in ("a", "b")}
        team = RecordedTeam(agents, [_answers, _votes, _chooses], recorder=recorder)
        team.note("vote_cast", "a", voted_for="b", reason="of the turn before", round=0)
        asyncio.run(drained(team.chat([QUESTION])))
        assert recorder.stats().troubles == 0
    (episode,) = episodes(tmp_path)
    assert (episode.task_id, episode.agent_id) == (f"coordination: {QUESTION['content']}", "orchestrator")
    massgen, by_id = (episode.extra or {})["massgen"], {span.span_id: span.attributes or {} for span in episode.spans}
    span_attributes = [by_id[span_id] for span_id in massgen["spans"]]
    assert [span["action_type"] for span in span_attributes] == [
        "new_answer",
        "restart",
        "vote",
        "vote",
        "agent_status",
        "final_agent",
        "final_answer",
        "restart_decision",
    ]
    assert span_attributes[0]["action_data"] == {
        "agent_id": "a",
        "answer_summary": ("Paris. " * 50)[:200],
        "label": "agent1.1",
    }
    assert span_attributes[0]["agent_states"]["a"] == {"has_voted": False, "has_answer": True}
    assert (span_attributes[2]["action_data"]["voter"], span_attributes[2]["action_data"]["voted_for"]) == ("a", "a")
    assert span_attributes[6]["action_data"]["answer"] == "It is Paris."
    assert span_attributes[7]["action_data"]["should_restart"] is False
    assert massgen["trace"]["metadata"]["selected_agent"] == "a"
    assert (episode.prompt_tokens, episode.completion_tokens) == (None, 7)


def test_rewards_of_a_coordination_are_computed_from_what_was_recorded(tmp_path: Path) -> None:
    with recording(tmp_path) as recorder:
        team = RecordedTeam({name: Agent(name, []) for name in "ab"}, [_answers, _uses, _votes], recorder=recorder)
        asyncio.run(drained(team.chat([QUESTION])))
    for name in ("voting", "coordination"):
        done = CliRunner().invoke(trajlake, ["score", name, "--lake", str(tmp_path / "lake")])
        assert done.exit_code == 0, done.output
    scores = lake.open(tmp_path / "lake").sql("SELECT scorer, value FROM scores WHERE step_index IS NULL")
    # Both vote for the one who leads; no round too many, the default quality of 0.7, 1 for the agreement.
    assert dict(scores.rows()) == {"voting": 1.0, "coordination": pytest.approx(2 * 0.7 + 1)}


def test_a_coordination_goes_on_without_an_agent_and_ends_without_its_tracker(tmp_path: Path) -> None:
    def loses(team: Team) -> Any:
        return chunk("error", error="rate limit", source="b")

    def breaks(team: Team) -> Any:
        del team.coordination_tracker
        return chunk("content", content="on")

    with recording(tmp_path) as recorder:
        agents = {name: Agent(name, []) for name in "ab"}
        for script in ([_answers, loses, _votes], [_answers, breaks], [_answers, lambda _: chunk("error", error="no")]):
            asyncio.run(drained(RecordedTeam(agents, script, recorder=recorder).chat([QUESTION])))
        assert recorder.stats().troubles == 2, "without the tracker: a chunk and the end"
    assert [(record.status, record.error, len(record.spans) > 1) for record in episodes(tmp_path)] == [
        ("completed", None, True),
        ("completed", None, True),
        ("failed", "no", True),
    ]


def _uses(team: Team) -> None:
    team.agents["b"].backend.token_usage.input_tokens += 100


def test_a_reward_is_the_episodes(tmp_path: Path) -> None:
    async def run(agent: Any) -> None:
        async for chunk in agent.chat([QUESTION]):
            if chunk.type == "content":
                agent.trace.add("reward", reward=0.5, reward_type="human", reason="Well.")
        agent.trace.add("reward", reward=1.0, reward_type="human")

    with recording(tmp_path) as recorder:
        asyncio.run(run(Recorded("a", WORKED, recorder=recorder)))
        assert recorder.stats().troubles == 1, "one came after the end"
    (episode,) = episodes(tmp_path)
    assert episode.env_return == 1.5
    assert [(score.scorer, score.value, score.step_index) for score in episode.scores] == [
        ("human", 1.0, 0),
        ("human", 0.5, 1),
    ]


TEXT = st.text(max_size=5)
CALLS = st.builds(
    call,
    st.sampled_from(("f", "g")),
    st.sampled_from(('{"a": 1}', "{", "", "[1]")),
    st.sampled_from(("c1", "c2", None)),
)
CHUNKS = st.one_of(
    st.builds(lambda text: chunk("content", content=text, source="x"), TEXT),
    st.builds(lambda text: chunk("reasoning", reasoning_delta=text), TEXT),
    st.builds(lambda calls: chunk("tool_calls", tool_calls=calls), st.lists(CALLS, max_size=2)),
    st.sampled_from([*WORKED, chunk("error", error="e"), chunk("done"), ran("custom_tool_error", "Failed")]),
)  # fmt: skip


def test_what_is_recorded_is_what_a_folder_of_the_traces_would_be(tmp_path: Path) -> None:
    streams: list[tuple[list[Any], list[Any]]] = []

    @given(st.lists(CHUNKS, max_size=8), st.lists(st.sampled_from((QUESTION, {"role": "assistant", "content": "A"}))))
    @settings(max_examples=examples(60), deadline=None)
    def collect(chunks: list[Any], messages: list[Any]) -> None:
        streams.append((chunks, messages))

    collect()
    with recording(tmp_path) as recorder:
        for chunks, messages in streams:
            asyncio.run(drained(Recorded("a", chunks, recorder=recorder).chat(messages, reset_chat=True)))
        team = RecordedTeam({name: Agent(name, []) for name in "ab"}, [_answers, _votes, _chooses], recorder=recorder)
        asyncio.run(drained(team.chat([QUESTION])))
        assert recorder.flush()
        assert recorder.stats().rejected == 0
    recorded = lake.open(tmp_path / "lake")
    read, manifest = there_and_back(recorded, tmp_path, "massgen", run_id="agent")
    assert_same(records(recorded), read)
    assert manifest.rows == len(read) > len(streams) // 3
