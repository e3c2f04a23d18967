"""Calls of several agents at once become the episodes that a person would call right, across kills of the proxy too."""

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lake.errors import UsageError
from lake.formats.chat.completions import LOGPROBS_LEFT_OUT, Lineage, apply_answer
from lake.live.calls.address import RolloutAddress
from lake.live.calls.apis import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from lake.live.calls.steps import Call
from lake.live.proxy import sessions
from lake.live.proxy.sessions import EndRequest
from lake.records import EpisodeRecord, ScoreRecord, StepRecord, check
from testkit.agent_calls import (
    START,
    Message,
    Recording,
    answer_of,
    answered_call,
    chat,
    completion,
    prompt_ids,
    prompt_messages,
    result,
)
from testkit.engine_server import encoded, rendered
from testkit.model_answers import Answer, answers, whole_answer

NOBODY = RolloutAddress()
MOVES = ("go on", "go on", "fork", "fail", "edit", "elide", "rewrite", "compact", "sample", "sample")
"""What an agent does next; who has no name keeps what tells its conversation from others."""


class Agent:
    """An agent that remembers its conversations."""

    def __init__(self, name: str, *, is_named: bool) -> None:
        self.name, self.address = name, RolloutAddress(task=name) if is_named else NOBODY
        self.histories: list[list[Message]] = []
        """Of each of its answered calls: the prompt and the answer."""
        self.prompts: list[list[Message]] = []
        self.calls = 0

    def moves(self, move: str, number: int, pick: int) -> list[Call]:
        """Its next calls."""
        first = [{"role": "system", "content": "s"}, {"role": "user", "content": f"{self.name} opens the door"}]
        if not self.histories:
            messages = first
        else:
            history = list(self.histories[pick % len(self.histories)] if move == "fork" else self.histories[-1])
            messages = [*history, result(str(number), f"seen {number}")]
            if move == "edit":
                last = len(history) - 1
                messages[last] = messages[last] | {"content": f"in other words, {number}"}
            elif move == "elide":
                index = next((at for at, message in enumerate(history) if message["role"] == "tool"), None)
                if index is not None:
                    messages[index] = messages[index] | {"content": f"cut {number}"}
            elif move == "rewrite" and self.address.is_named:
                messages[1] = {"role": "user", "content": f"rewritten {number}"}
            elif move == "compact" and self.address.is_named:
                messages = [first[0], {"role": "user", "content": f"what happened before {number}"}]
        failed = [chat(self.address, messages, number=number, error="HTTP 500")] if move == "fail" else []
        samples = [answer_of(f"answer {number}", str(number))]
        samples += [answer_of(f"other {number}", str(number))] if move == "sample" else []
        self.histories.append([*messages, samples[-1]])
        self.prompts.append(messages)
        self.calls += len(failed) + 1
        return [*failed, chat(self.address, messages, *samples, number=number)]


AGENTS = st.lists(st.booleans(), min_size=1, max_size=3)
SCHEDULES = st.lists(st.tuples(st.integers(0, 2), st.sampled_from(MOVES), st.integers(0, 9)), min_size=5, max_size=14)


def agents_of(are_named: list[bool]) -> list[Agent]:
    return [Agent(f"agent-{index}", is_named=is_named) for index, is_named in enumerate(are_named)]


def scheduled(agents: list[Agent], schedule: list[tuple[int, str, int]]) -> list[Call]:
    turns = [
        agents[index % len(agents)].moves(move, number, pick) for number, (index, move, pick) in enumerate(schedule)
    ]
    return [call for turn in turns for call in turn]


def message_fields(message: Message) -> tuple[Any, ...]:
    calls = [(call["id"], call["function"]) for call in message.get("tool_calls") or ()]
    return message["role"], message["content"] or "", message.get("tool_call_id"), calls


def behind_the_last_answer(prompt: list[Message]) -> list[Message]:
    answered = max((index + 1 for index, message in enumerate(prompt) if message["role"] == "assistant"), default=0)
    return [message for message in prompt[answered:] if message["role"] != "system"]


@given(AGENTS, SCHEDULES)
def test_each_call_is_a_row_of_its_agents_episode(are_named: list[bool], schedule: list[tuple[int, str, int]]) -> None:
    agents, recording = agents_of(are_named), Recording()
    for call in scheduled(agents, schedule):
        recording.registry.record_call(call)
    records = recording.records()
    assert len(records) == sum(bool(agent.calls) for agent in agents)
    for agent in agents:
        own_records = [r for r in records if any(agent.name in str(m["content"]) for m in r.initial_messages or ())]
        if not agent.calls:
            assert not own_records
            continue
        (record,) = own_records
        assert len(record.steps) == len(agent.prompts)
        assert len(record.steps) + len(record.spans) == agent.calls
        for index, prompt in enumerate(agent.prompts):
            extra = record.steps[index].extra or {}
            words = [message_fields(m) for m in prompt_messages(record, index)], [message_fields(m) for m in prompt]
            if extra.get("history") == "edited":
                words = [w for w in words[0] if w[0] != "assistant"], [w for w in words[1] if w[0] != "assistant"]
            assert words[0] == words[1]
            assert prompt_ids(record, index) == rendered(prompt)
            assert record.steps[index].state == "\n".join(m["content"] for m in behind_the_last_answer(prompt))
            assert record.steps[index].trainable == ("choices" not in extra)


@given(AGENTS, SCHEDULES, st.integers(0, 20))
def test_a_proxy_that_was_killed_goes_on_as_if_it_had_not_been(
    are_named: list[bool], schedule: list[tuple[int, str, int]], killed_at: int
) -> None:
    records = []
    for is_killed in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            keys = iter(range(100))
            patch.setattr(sessions, "new_key", lambda keys=keys: next(keys).to_bytes(16, "little"))
            recording = Recording()
            for index, call in enumerate(scheduled(agents_of(are_named), schedule)):
                if is_killed and index == killed_at:
                    recording = recording.resumed()
                recording.registry.record_call(call)
            records.append(recording.records())
    assert records[0] == records[1]


# ------------------------------------------------------------ one conversation


def recorded(*calls: Call) -> EpisodeRecord:
    recording = Recording()
    for call in calls:
        recording.registry.record_call(call)
    (record,) = recording.records()
    return record


USER = {"role": "user", "content": "open the door"}
NAMED = RolloutAddress(task="door")


def test_several_samples_are_one_step_that_is_not_trained_on_and_any_may_be_gone_on_from() -> None:
    samples = [answer_of("push"), answer_of("pull"), answer_of("knock")]
    observation = {"role": "user", "content": "it opens"}
    record = recorded(
        chat(NOBODY, [USER], *samples, number=0, n=3),
        chat(NOBODY, [USER, samples[1], observation], answer_of("go in"), number=1),
    )
    first, second = record.steps
    assert (first.action, first.trainable, second.trainable) == ("push", False, True)
    choices = (first.extra or {})["choices"]
    assert [choice["message"]["content"] for choice in choices] == ["pull", "knock"]
    assert all(len(choice["token_ids"]) == len(choice["logprobs"]) for choice in choices)
    assert second.context == [observation]
    assert (second.extra or {})["follows_choice"] == 1
    assert second.tokens is not None
    assert second.tokens.prefix_step_index is None, "no row has the tokens of the other sample"
    assert first.completion_tokens == sum(len(s["content"]) + 1 for s in samples)


def test_a_text_prompt_goes_on_from_the_text_before() -> None:
    record = recorded(
        completion(NOBODY, "Q: 1+1? A:", " 2.", number=0),
        completion(NOBODY, "Q: 1+1? A: 2. Q: 2+2? A:", " 4.", number=1),
        completion(NOBODY, "Q: 1+1? A: 2. Q: 2+2? A: 4.", " Q", number=2),
    )
    assert [step.state for step in record.steps] == ["Q: 1+1? A:", " Q: 2+2? A:", ""]
    assert [step.context for step in record.steps] == [[], [{"role": "user", "content": " Q: 2+2? A:"}], []]
    assert [step.tokens and step.tokens.prefix_step_index for step in record.steps] == [None, 0, 1]
    assert all("history" not in (step.extra or {}) for step in record.steps)


def test_prompts_of_token_ids_go_on_from_the_tokens_before() -> None:
    record = recorded(
        completion(NAMED, [7, 8], "a", number=0),
        completion(NAMED, [7, 8, *encoded("a"), 9], "b", number=1),
        completion(NAMED, [5], "c", number=2),
    )
    assert [step.state for step in record.steps] == [None, None, None]
    assert [step.tokens and step.tokens.context_ids for step in record.steps] == [[7, 8], [9], [5]]
    assert [(step.extra or {}).get("history") for step in record.steps] == [None, None, "rewritten"]


@pytest.mark.parametrize("keeps_history", [False, True])
@given(st.lists(answers(), min_size=2, max_size=4))
def test_agents_of_the_responses_api_are_one_conversation(keeps_history: bool, given_answers: list[Answer]) -> None:
    """Whether they send the items of the answers again, or leave the history to the engine."""
    items: list[Any] = [USER]
    body: dict[str, Any] = {"instructions": "You open doors."}
    calls = []
    for number, answer in enumerate(given_answers):
        response = whole_answer(RESPONSES, {}, [answer], [1]) | {"id": f"r{number}"}
        output = response["output"] = response["output"] or [SAYS_NOTHING]
        calls.append(answered_call(RESPONSES, NOBODY, body | {"input": items}, response, number=number))
        observation = [{"type": "function_call_output", "call_id": "c", "output": f"seen {number}"}]
        items = observation if keeps_history else [*items, *output, *observation]
        body |= {"previous_response_id": f"r{number}"} if keeps_history else {}
    check_conversation(recorded(*calls), given_answers)


@given(st.lists(answers(), min_size=2, max_size=4))
def test_agents_of_anthropics_messages_are_one_conversation(given_answers: list[Answer]) -> None:
    messages: list[Any] = [USER]
    calls = []
    for number, answer in enumerate(given_answers):
        message = whole_answer(MESSAGES, {}, [answer], [1]) | {"id": f"m{number}"}
        message["content"] = message["content"] or [{"type": "text", "text": ""}]
        body = {"system": "You open doors.", "messages": messages}
        calls.append(answered_call(MESSAGES, NOBODY, body, message, number=number))
        observation = {"type": "tool_result", "tool_use_id": "c", "content": f"seen {number}"}
        own_message = {"role": "assistant", "content": message["content"]}
        messages = [*messages, own_message, {"role": "user", "content": [observation]}]
    check_conversation(recorded(*calls), given_answers)


def check_conversation(record: EpisodeRecord, given_answers: list[Answer]) -> None:
    """Each step continues from the one before, and saw no more than what the tool said."""
    assert [m["role"] for m in record.initial_messages or ()] == ["system", "user"]
    assert [(step.action, step.reasoning or "") for step in record.steps] == [
        (a.text, a.reasoning) for a in given_answers
    ]
    assert [len(step.tool_calls or ()) for step in record.steps] == [len(answer.calls) for answer in given_answers]
    later = record.steps[1:]
    assert [step.state for step in later] == [f"seen {number}" for number in range(len(later))]
    assert [[message["role"] for message in step.context] for step in later] == [["tool"]] * len(later)
    assert not {"history", "follows"} & {key for step in record.steps for key in step.extra or ()}


SAYS_NOTHING = {"type": "message", "id": "m", "role": "assistant", "content": [{"type": "output_text", "text": ""}]}


def test_an_echoed_prompt_is_no_part_of_the_answer() -> None:
    record = recorded(completion(NOBODY, "Q:", "Q: and A:", echo=True))
    assert record.steps[0].action == " and A:"


def test_a_prompt_that_cannot_be_read_is_not_trained_on() -> None:
    call = chat(NAMED, [USER], answer_of("push"))
    call.request.messages, call.extra = [], {"request_not_read": "it is a list of prompts"}
    step = recorded(call).steps[0]
    assert (step.state, step.trainable) == (None, False)


def test_what_an_answer_says_of_itself_does_not_pass_for_ours() -> None:
    call = chat(NAMED, [USER], answer_of("push"))
    assert call.answer is not None
    call.answer.extra |= {"follows": 99, "history": "rewritten", "content": ["x"]}
    step = recorded(call).steps[0]
    assert step.extra == {"id": "a0", "answer_follows": 99, "answer_history": "rewritten", "answer_content": ["x"]}


def test_two_that_said_the_same_so_far_are_told_apart_by_who_went_on() -> None:
    recording = Recording()
    for number in (0, 1):
        recording.registry.record_call(chat(NOBODY, [USER], answer_of("push"), number=number))
    for number in (2, 3):
        messages = [USER, answer_of("push"), {"role": "user", "content": f"locked {number}"}]
        recording.registry.record_call(chat(NOBODY, messages, answer_of("pull"), number=number))
    assert [len(record.steps) for record in recording.records()] == [2, 2]


def test_of_two_that_said_the_same_the_newer_one_is_gone_on_with() -> None:
    recording = Recording()
    for number in (0, 1):
        recording.registry.record_call(chat(NOBODY, [USER], answer_of("push"), number=number))
    recording.registry.record_call(
        chat(NOBODY, [USER, answer_of("push"), {"role": "user", "content": "locked"}], answer_of("pull"))
    )
    assert [len(record.steps) for record in recording.records()] == [1, 2]


# ------------------------------------------------------------ calls that fail


def test_an_unnamed_call_that_failed_is_tried_again_in_its_episode_and_others_are_not_taken_for_it() -> None:
    recording = Recording()
    recording.registry.record_call(chat(NOBODY, [USER], number=0, error="HTTP 500"))
    recording.registry.record_call(chat(NOBODY, [USER], answer_of("push"), number=1))
    recording.registry.record_call(chat(NOBODY, [USER], answer_of("pull"), number=2))
    first, second = recording.records()
    assert (len(first.steps), len(first.spans), first.status) == (1, 1, "completed")
    assert (len(second.steps), len(second.spans)) == (1, 0)


def test_an_episode_that_was_never_answered_has_what_was_asked() -> None:
    record = recorded(chat(NOBODY, [USER], number=0, error="HTTP 500"), chat(NOBODY, [USER], number=1, error="gone"))
    assert (record.status, record.error, len(record.spans)) == ("failed", "gone", 2)
    assert [(step.state, step.action, step.trainable) for step in record.steps] == [("open the door", "", False)]
    assert (record.prompt_tokens, record.extra) == (None, {"failed_calls": 2})


def test_an_episode_whose_last_call_failed_is_not_completed_unless_its_agent_says_so() -> None:
    calls = [chat(NAMED, [USER], answer_of("push")), chat(NAMED, [USER], number=1, error="HTTP 500")]
    assert (recorded(*calls).status, recorded(*calls).error) == ("failed", "HTTP 500")
    recording = Recording()
    for call in calls:
        recording.registry.record_call(call)
    recording.registry.end(NAMED, EndRequest(reward=1.0), START)
    (record,) = recording.records()
    assert (record.status, record.env_return) == ("completed", 1.0)


def test_an_answer_that_is_no_message_is_a_failed_call() -> None:
    call = chat(NAMED, [USER], answer_of("push"))
    assert call.answer is not None
    call.answer.message = {"role": "assistant", "content": 7}
    record = recorded(call)
    assert "content" in (record.spans[0].error or "")


# ------------------------------------------------------------ whose sub-agent


def test_a_sub_agent_names_its_parent() -> None:
    recording = Recording()
    boss = RolloutAddress(task="door", agent="boss")
    child = RolloutAddress(task="door", agent="child", parent=RolloutAddress(task="door"))
    recording.registry.record_call(chat(boss, [USER], answer_of("ask the child")))
    recording.registry.record_call(chat(child, [USER], answer_of("push"), number=1))
    recording.registry.record_call(
        chat(RolloutAddress(task="other", parent=RolloutAddress(task="nobody")), [USER], answer_of("x"), number=2)
    )
    recording.registry.record_call(
        chat(RolloutAddress(task="own", parent=RolloutAddress(task="own")), [USER], answer_of("x"), number=3)
    )
    ended = recording.registry.end(boss, EndRequest(), START)
    _, second, third, fourth = recording.records()
    assert (second.relation, second.parent_episode_id) == ("subagent", ended["episode_id"])
    assert (third.relation, third.parent_episode_id) == ("subagent", None)
    assert third.extra == {"parent": "proxy:task=nobody"}
    assert (fourth.relation, fourth.parent_episode_id) == (None, None)


def test_a_parent_with_a_number_is_known_before_its_first_call() -> None:
    recording = Recording()
    boss = RolloutAddress(run="r", task="door", rollout=3)
    recording.registry.record_call(chat(RolloutAddress(run="r", task="child", parent=boss), [USER], answer_of("push")))
    recording.registry.record_call(chat(boss, [USER], answer_of("well"), number=1))
    ended = recording.registry.end(boss, EndRequest(), START)
    assert recording.records()[0].parent_episode_id == ended["episode_id"]


# ------------------------------------------------------------ ends


class Clock:
    """A clock that the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("time.monotonic", lambda: self.now)


def test_an_unnamed_episode_ends_when_it_is_idle_however_busy_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, recording = Clock(monkeypatch), Recording()
    recording.registry.record_call(chat(NOBODY, [USER], answer_of("push")))
    clock.now += 5
    with recording.registry.under_way.track(recording.registry.as_row(NOBODY), bool):
        clock.now += 6
        recording.registry.expire(START, 10.0)
        assert recording.registry.counts.ended == 0, "the call under way may be the next one of this episode"
    with recording.registry.under_way.track(recording.registry.as_row(NOBODY), bool):
        recording.registry.expire(START, 10.0)
        assert recording.registry.counts.ended == 1, "this one came when it was idle for long"


def test_a_named_episode_with_a_call_under_way_is_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, recording = Clock(monkeypatch), Recording()
    recording.registry.record_call(chat(NAMED, [USER], answer_of("push")))
    clock.now += 100
    with recording.registry.under_way.track(recording.registry.as_row(NAMED), bool):
        recording.registry.expire(START, 10.0)
        assert recording.registry.counts.ended == 0
    recording.registry.expire(START, 10.0)
    assert recording.registry.counts.ended == 1
    recording.registry.record_call(chat(NAMED, [USER], answer_of("again"), number=1))
    first, second = recording.records()
    assert (first.stop_reason, second.relation) == ("idle", "continuation")


@pytest.mark.parametrize("are_named", [False, True])
def test_too_many_open_episodes_end_the_one_that_was_silent_for_longest(are_named: bool) -> None:
    recording = Recording(most_open=6)
    addresses = [RolloutAddress(task=f"t{number}") if are_named else NOBODY for number in range(5)]
    prompts = [[{"role": "user", "content": f"door {number}"}] for number in range(5)]
    for number in (0, 1, 2):
        recording.registry.record_call(chat(addresses[number], prompts[number], answer_of("push"), number=number))
    messages = [*prompts[0], answer_of("push"), {"role": "user", "content": "locked"}]
    recording.registry.record_call(chat(addresses[0], messages, answer_of("pull"), number=3))
    assert recording.registry.counts.crowded_out == 1
    recording.registry.record_call(chat(addresses[3], prompts[3], answer_of("push"), number=4))
    assert recording.registry.counts.crowded_out == 2
    records = recording.records()
    assert [record.stop_reason for record in records] == [
        "proxy_stopped",
        "crowded_out",
        "crowded_out",
        "proxy_stopped",
    ]
    assert [len(record.steps) for record in records] == [2, 1, 1, 1]


def test_a_rollout_with_a_call_under_way_is_not_crowded_out() -> None:
    recording = Recording(most_open=5)
    names = [RolloutAddress(task=f"task-{number}", rollout=0) for number in range(3)]
    with recording.registry.under_way.track(recording.registry.as_row(names[0]), lambda: None):
        for address in names:
            recording.registry.record_call(chat(address, [USER], answer_of("push")))
    reasons = {record.task_id: record.stop_reason for record in recording.records()}
    assert reasons == {"task-0": "proxy_stopped", "task-1": "crowded_out", "task-2": "proxy_stopped"}


def test_failing_calls_are_bounded_too() -> None:
    recording = Recording(most_open=10)
    for number in range(30):
        recording.registry.record_call(
            chat(NOBODY, [{"role": "user", "content": str(number)}], number=number, error="HTTP 500")
        )
    assert recording.registry.counts.crowded_out == 20


def test_what_is_said_of_an_end_is_checked() -> None:
    recording = Recording()
    with pytest.raises(UsageError, match=r"task door in run live \(0 episodes"):
        recording.registry.end(NAMED, EndRequest(), START)
    with pytest.raises(UsageError, match=r"no `response_id` of .*\(0 are open\)"):
        recording.registry.end(NOBODY, EndRequest(response_id="a4"), START)
    recording.registry.record_call(chat(NAMED, [USER], answer_of("push")))
    for ending, reason in (
        (EndRequest(status="done"), "valid: completed"),
        (EndRequest(step_rewards=[1.0, 2.0]), "2 entries"),
        (
            EndRequest(scores=[ScoreRecord(scorer="judge", value=value) for value in (0.0, 1.0)]),
            "'judge' more than once",
        ),
    ):
        with pytest.raises(UsageError, match=reason):
            recording.registry.end(NAMED, ending, START)
    ended = recording.registry.end(NAMED, EndRequest(reward=2.0, step_rewards=[1.0]), START + timedelta(seconds=9))
    (record,) = recording.records()
    assert (ended["task_id"], ended["steps"]) == ("door", 1)
    assert (record.env_return, record.steps[0].reward, record.ended_at) == (2.0, 1.0, START + timedelta(seconds=9))


def test_an_unnamed_episode_is_ended_by_an_answer_of_it() -> None:
    recording = Recording()
    recording.registry.record_call(chat(NOBODY, [USER], answer_of("push"), number=4))
    ended = recording.registry.end(NOBODY, EndRequest(response_id="a4", reward=1.0), START)
    assert ended["steps"] == 1


def test_a_text_that_was_answered_with_nothing_is_no_beginning_of_others() -> None:
    recording = Recording()
    for number, text in enumerate(["", " 2.", " two"]):
        choice = {"index": 0, "text": text, "finish_reason": "stop"}
        body = {"model": "policy", "prompt": "Q: 1+1? A:"}
        recording.registry.record_call(
            answered_call(COMPLETIONS, NOBODY, body, {"id": f"a{number}", "choices": [choice]}, number=number)
        )
    for number, (prompt, text) in enumerate([("", ""), ("Q: 2+2?", " 4")], 3):
        choice = {"index": 0, "text": text, "finish_reason": "stop"}
        body = {"model": "policy", "prompt": prompt}
        recording.registry.record_call(
            answered_call(COMPLETIONS, NOBODY, body, {"id": f"a{number}", "choices": [choice]}, number=number)
        )
    assert [[step.action for step in record.steps] for record in recording.records()] == [
        [""],
        [" 2."],
        [" two"],
        [""],
        [" 4"],
    ]


@pytest.mark.parametrize("lie", [5.0, 1e308, -1e308, 0.002])
def test_what_is_no_log_probability_is_left_out_and_told(lie: float) -> None:
    """The tokens stay, for losses without ratios, and what an engine merely rounded counts."""
    for value, expected in ((lie, None), (0.0005, 0.0)):
        content = [{"logprob": -1.0}, {"logprob": value}]
        choice = {
            "index": 0,
            "message": answer_of("push"),
            "finish_reason": "stop",
            "token_ids": [7, 8],
            "logprobs": {"content": content},
        }
        body = {"model": "policy", "messages": [USER]}
        answer = {"id": "a", "prompt_token_ids": [1, 2], "choices": [choice]}
        recording = Recording()
        recording.registry.record_call(answered_call(CHAT, NAMED, body, answer))
        (record,) = recording.records()
        read = StepRecord(state=None, action="push")
        problems = apply_answer(read, answer, Lineage(), 0) or {}
        for step, extra in ((record.steps[0], record.steps[0].extra or {}), (read, problems)):
            assert step.tokens is not None
            assert step.tokens.action_ids == [7, 8]
            assert step.tokens.action_logprobs == (None if expected is None else [-1.0, expected])
            assert (str(value) in extra.get(LOGPROBS_LEFT_OUT, "")) == (expected is None)
        assert check(record) is None


def test_names_of_one_row_of_the_lake_are_one_rollout() -> None:
    recording, spelled = (
        Recording(),
        [
            RolloutAddress(task="t", rollout=1),
            RolloutAddress(task="t", rollout=1, attempt=0),
            RolloutAddress(task="t", rollout=1, run="live"),
            RolloutAddress(task="t", rollout=1, split="train"),
        ],
    )
    for number, address in enumerate(spelled):
        recording.registry.record_call(
            chat(address, [{"role": "user", "content": f"{number}"}], answer_of("a"), number=number)
        )
    (record,) = recording.records()
    assert len(record.steps) == 4
