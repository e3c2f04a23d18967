"""Traces as episodes: which calls are decisions, whose they are, and what is new to each."""

from pathlib import Path
from typing import Any

import pytest

from lake.formats.base.rows import ShapeError, complete_record, make_episode_text_id
from lake.formats.base.source import Input
from lake.formats.tracing.episodes import ModelCall, Score, Span, SpanTree, Tool, Trace, build_episodes, group_traces
from lake.records import EpisodeRecord, Reject

SYSTEM = {"role": "system", "content": "Be kind."}
OTHER = {"role": "system", "content": "Be strict."}
HELLO = {"role": "user", "content": "Hello."}
MORE = {"role": "user", "content": "More."}
SECOND = 10**9
FILE = Input(Path("f"), "run")


def model_message(text: str, *calls: str) -> dict[str, Any]:
    """An answer."""
    tool_calls = [{"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}} for name in calls]
    return {"role": "assistant", "content": text} | ({"tool_calls": tool_calls} if tool_calls else {})


def back(name: str, text: str = "ok") -> dict[str, Any]:
    """A tool's result in a prompt."""
    return {"role": "tool", "tool_call_id": name, "content": text}


def call(
    span_id: str, at: int, prompt: list[Any] | None, *answers: dict[str, Any], parent: str | None = None, **fields: Any
) -> Span:
    """A span of a call that takes a second."""
    error = fields.pop("error", None)
    model_call = ModelCall(prompt=prompt, answers=list(answers), **fields)
    return Span(
        id=span_id, parent=parent, kind="llm", start=at * SECOND, end=(at + 1) * SECOND, error=error, call=model_call
    )


def agent(span_id: str, at: int, parent: str | None = None, **fields: Any) -> Span:
    """An agent that is called like its span."""
    return Span(id=span_id, parent=parent, kind="agent", name=span_id, agent=span_id, start=at * SECOND, **fields)


def tool(name: str, at: int, parent: str | None = None, result: str = "ok", **fields: Any) -> Span:
    """The execution of a tool whose call has the same id as its name."""
    span_tool = Tool(
        name=name, call_id=fields.pop("call_id", name), arguments="{}", result=result, is_error=fields.pop("bad", None)
    )
    return Span(id=f"t-{name}-{at}", parent=parent, kind="tool", name=name, start=at * SECOND, tool=span_tool, **fields)


def read(*spans: Span, **fields: Any) -> list[EpisodeRecord]:
    """The episodes of a trace, which can all be stored."""
    records = build_episodes(Trace(id="trace", spans=list(spans), task_id="task", **fields), FILE, "otlp")
    for record in records:
        assert complete_record(record, "otlp") is None
    return records


# ---------------------------------------------------------------- decisions and what was new to them


def test_calls_are_decisions_in_order_of_their_start_and_see_what_is_new() -> None:
    prompt = [SYSTEM, HELLO]
    (record,) = read(
        call("b", 2, [*prompt, model_message("Hi."), MORE], model_message("Bye.")),
        call("a", 1, prompt, model_message("Hi.")),
    )
    assert record.initial_messages == prompt
    assert [(s.state, s.context, s.action) for s in record.steps] == [("Hello.", [], "Hi."), ("More.", [MORE], "Bye.")]
    assert [s.latency for s in record.steps] == [1.0, 1.0]
    assert record.steps[0].extra == {"span_id": "a"}


def test_a_prompt_that_goes_on_from_no_call_is_kept_whole_and_said_to_be_rewritten() -> None:
    (record,) = read(call("a", 1, [HELLO], model_message("Hi.")), call("b", 2, [SYSTEM, MORE], model_message("Bye.")))
    step = record.steps[1]
    assert (step.context, step.state) == ([SYSTEM, MORE], "More.")
    assert step.extra == {"span_id": "b", "history": "rewritten"}


def test_a_call_that_goes_on_from_an_earlier_one_says_which() -> None:
    (record,) = read(
        call("a", 1, [HELLO], model_message("Hi.")),
        call("b", 2, [SYSTEM, MORE], model_message("Yes.")),
        call("c", 3, [HELLO, model_message("Hi."), MORE], model_message("Bye.")),
    )
    assert record.steps[2].context == [MORE]
    assert record.steps[2].extra == {"span_id": "c", "follows": 0}


def test_what_clients_rewrite_of_an_answer_does_not_make_a_history_new() -> None:
    answer = model_message("Let me look.", "get") | {"reasoning_content": "Hm."}
    again = model_message("Let me look.", "get")
    (record,) = read(call("a", 1, [HELLO], answer), call("b", 2, [HELLO, again, back("get")], model_message("Done.")))
    assert record.steps[0].reasoning == "Hm."
    assert record.steps[1].context == [back("get")]


def test_further_choices_settings_and_counts_are_kept() -> None:
    (record,) = read(
        call(
            "a",
            1,
            [HELLO],
            model_message("Hi."),
            model_message("Hey."),
            sampling={"temperature": 1},
            prompt_tokens=3,
            cost=0.5,
            model="m",
        ),
        call(
            "b", 2, [HELLO], model_message("Ho."), sampling={"temperature": 0}, prompt_tokens=4, tools=[{"name": "x"}]
        ),
    )
    assert record.steps[0].extra == {"span_id": "a", "choices": [model_message("Hey.")]}
    assert (record.sampling, record.policy, record.prompt_tokens, record.cost) == ({"temperature": 1}, "m", 7, None)
    assert record.steps[1].extra == {"span_id": "b", "history": "rewritten", "sampling": {"temperature": 0}}
    assert record.tools == [{"name": "x"}]


def test_a_failed_call_is_no_decision_but_is_counted_and_its_span_kept() -> None:
    (record,) = read(
        Span(id="root"),
        call("a", 1, [HELLO], parent="root", error="503"),
        call("b", 2, [HELLO], model_message("Hi."), parent="root"),
    )
    assert [step.action for step in record.steps] == ["Hi."]
    assert record.extra == {"trace_id": "trace", "failed_calls": 1}
    assert [(s.span_id, s.error, s.step_index) for s in record.spans] == [
        ("root", None, None),
        ("a", "503", None),
        ("b", None, 0),
    ]
    assert record.status == "completed"


def test_what_was_not_recorded_is_said_and_not_trained_on() -> None:
    (record,) = read(call("a", 1, None, model_message("Hi.")), call("b", 2, [HELLO]))
    first, second = record.steps
    assert (first.state, first.action, first.trainable) == (None, "Hi.", True)
    assert (second.state, second.action, second.trainable) == ("Hello.", "", False)
    assert [step.extra and step.extra["not_recorded"] for step in record.steps] == [["prompt"], ["answer"]]


def test_a_trace_fails_with_its_root_or_its_last_agent() -> None:
    hello = call("a", 1, [HELLO], model_message("Hi."), parent="x")
    (record,) = read(Span(id="x", error="boom"), hello)
    assert (record.status, record.error) == ("failed", "boom")
    (record,) = read(Span(id="root"), agent("x", 0, "root", error="too long"), hello)
    assert (record.status, record.error) == ("failed", "too long")
    (record,) = read(Span(id="root"), agent("w", 0, "root", error="caught"), agent("x", 1, "root"), hello)
    assert record.status == "completed"


# ---------------------------------------------------------------- wrappers


def test_of_a_call_inside_a_call_the_inner_one_counts() -> None:
    (record,) = read(
        call("outer", 1, [HELLO], model_message("Hi.")),
        Span(id="http", parent="outer"),
        call("inner", 1, [SYSTEM, HELLO], model_message("Hi."), parent="http"),
    )
    assert [step.extra and step.extra["span_id"] for step in record.steps] == ["inner"]
    assert {(span.span_id, span.step_index) for span in record.spans} == {("outer", 0), ("http", None), ("inner", 0)}


def test_the_outer_call_counts_where_only_it_recorded_what_was_said() -> None:
    (record,) = read(call("outer", 1, [HELLO], model_message("Hi.")), call("inner", 1, None, parent="outer", model="m"))
    assert [step.extra and step.extra["span_id"] for step in record.steps] == ["outer"]


def test_the_outer_call_counts_where_only_it_says_who_said_what() -> None:
    words = [{"role": "user", "content": "system: Be kind.\nuser: Hello."}]
    (record,) = read(
        call("outer", 1, [SYSTEM, HELLO], model_message("Hi.")),
        call("inner", 1, words, model_message("Hi."), parent="outer"),
    )
    assert [step.extra and step.extra["span_id"] for step in record.steps] == ["outer"]


def test_retries_inside_a_wrapper_are_one_decision() -> None:
    (record,) = read(
        call("outer", 1, [HELLO], model_message("Hi.")),
        call("first", 1, [HELLO], parent="outer", error="503"),
        call("second", 2, [HELLO], model_message("Hi."), parent="outer"),
    )
    assert [step.extra and step.extra["span_id"] for step in record.steps] == ["second"]
    assert record.extra == {"trace_id": "trace", "failed_calls": 1}


def test_a_wrapper_that_succeeded_where_its_client_failed_counts() -> None:
    (record,) = read(
        call("outer", 1, [HELLO], model_message("Hi.")), call("in", 1, [HELLO], parent="outer", error="503")
    )
    assert [step.extra and step.extra["span_id"] for step in record.steps] == ["outer"]


# ---------------------------------------------------------------- agents


def test_an_agent_inside_a_tool_is_a_sub_agent_of_the_step_that_called_the_tool() -> None:
    main, sub = read(
        agent("host", 0),
        call("a", 1, [SYSTEM, HELLO], model_message("", "ask"), parent="host"),
        tool("ask", 2, "host"),
        agent("expert", 3, "t-ask-2"),
        call("b", 4, [OTHER, MORE], model_message("Sunny."), parent="expert"),
        call(
            "c", 6, [SYSTEM, HELLO, model_message("", "ask"), back("ask")], model_message("It is sunny."), parent="host"
        ),
    )
    assert [step.action for step in main.steps] == ["", "It is sunny."]
    assert [step.agent_id for step in main.steps] == ["host", "host"]
    assert [step.action for step in sub.steps] == ["Sunny."]
    assert (sub.agent_id, sub.relation, sub.parent_step_index) == ("expert", "subagent", 0)
    assert sub.parent_episode_id == sub.root_episode_id == make_episode_text_id(main, FILE)
    assert [span.span_id for span in main.spans] == ["host", "a", "t-ask-2", "c"]
    assert [span.span_id for span in sub.spans] == ["expert", "b"]


def test_calls_of_a_tool_itself_are_a_sub_agent_too() -> None:
    main, sub = read(
        call("a", 1, [HELLO], model_message("", "summarise")),
        tool("summarise", 2),
        call("b", 3, [MORE], model_message("Short."), parent="t-summarise-2"),
    )
    assert (sub.agent_id, sub.parent_step_index) == ("summarise", 0)
    assert [span.span_id for span in main.spans] == ["a", "t-summarise-2"]
    assert main.final_observation == [
        {"role": "tool", "content": "ok", "name": "summarise", "tool_call_id": "summarise"}
    ]


def test_an_agent_inside_an_agent_is_a_sub_agent_if_its_instructions_are_others() -> None:
    spans = [agent("a", 0), call("1", 1, [SYSTEM, HELLO], model_message("Hi."), parent="a"), agent("b", 2, "a")]
    assert len(read(*spans, call("2", 3, [OTHER, MORE], model_message("Yes."), parent="b"))) == 2
    (record,) = read(
        *spans, call("2", 3, [SYSTEM, HELLO, model_message("Hi."), MORE], model_message("Yes."), parent="b")
    )
    assert [step.agent_id for step in record.steps] == ["a", "b"]


def test_agents_side_by_side_are_one_episode() -> None:
    (record,) = read(
        Span(id="root"),
        agent("a", 0, "root"),
        call("1", 1, [SYSTEM, HELLO], model_message("Hi."), parent="a"),
        agent("b", 2, "root"),
        call("2", 3, [OTHER, HELLO], model_message("Yes."), parent="b"),
    )
    assert [step.agent_id for step in record.steps] == ["a", "b"]
    assert record.agent_id is None


def test_a_conversation_that_goes_on_inside_a_tool_is_no_sub_agent() -> None:
    """Spans that are nested by mistake: the tool's was not closed."""
    (record,) = read(
        call("a", 1, [HELLO], model_message("", "get")),
        tool("get", 2),
        call("b", 3, [HELLO, model_message("", "get"), back("get")], model_message("Done."), parent="t-get-2"),
    )
    assert len(record.steps) == 2


def test_a_sub_agent_that_is_called_again_has_a_name_of_its_own_and_may_have_sub_agents() -> None:
    def ask(at: int, parent: str | None) -> list[Span]:
        return [tool("ask", at, parent), agent(f"x{at}", at, f"t-ask-{at}")]

    spans = [call("a", 1, [HELLO], model_message("", "ask"))]
    for at in (2, 5):
        spans += [
            tool("ask", at),
            Span(id=f"x{at}", parent=f"t-ask-{at}", kind="agent", agent="expert", start=at * SECOND),
        ]
        spans.append(call(f"c{at}", at + 1, [MORE], model_message("", "deep"), parent=f"x{at}"))
    spans += [tool("deep", 7, "x5"), call("d", 8, [OTHER], model_message("Deep."), parent="t-deep-7")]
    main, first, second, deep = read(*spans)
    assert [record.agent_id for record in (main, first, second, deep)] == [None, "expert", "expert 2", "deep"]
    assert deep.parent_episode_id == make_episode_text_id(second, FILE)
    assert deep.root_episode_id == make_episode_text_id(main, FILE)


# ---------------------------------------------------------------- tools


def test_a_tool_whose_result_no_prompt_repeats_is_the_last_observation() -> None:
    (record,) = read(
        call("a", 1, [HELLO], model_message("", "get")),
        tool("get", 2),
        call("b", 3, [HELLO, model_message("", "get"), back("get")], model_message("", "submit")),
        tool("submit", 4, result="accepted", bad=False),
        tool("audit", 5),
    )
    assert record.final_observation == [
        {"role": "tool", "content": "accepted", "name": "submit", "tool_call_id": "submit", "is_error": False}
    ]
    assert [(span.name, span.step_index) for span in record.spans if span.kind == "tool"] == [
        ("get", 0),
        ("submit", 1),
        ("audit", 1),
    ]


def test_a_tool_without_the_id_of_its_call_answers_the_only_one_of_its_name() -> None:
    (record,) = read(call("a", 1, [HELLO], model_message("", "get")), tool("get", 2, call_id=None))
    assert record.final_observation == [{"role": "tool", "content": "ok", "name": "get", "tool_call_id": "get"}]


def test_a_result_is_an_error_if_its_tool_failed() -> None:
    (record,) = read(
        call("a", 1, [HELLO], model_message("", "get")),
        tool("get", 2, result="no such city", bad=True, error="no such city"),
        call("b", 3, [HELLO, model_message("", "get"), back("get", "no such city")], model_message("Sorry.")),
    )
    assert record.steps[1].state_is_error is True
    assert record.steps[1].context == [back("get", "no such city") | {"is_error": True}]


def test_calls_that_recorded_nothing_have_the_tools_that_ran_after_them() -> None:
    (record,) = read(call("a", 1, None), tool("get", 2), call("b", 3, None))
    first, second = record.steps
    assert first.tool_calls == [{"id": "get", "type": "function", "function": {"name": "get", "arguments": "{}"}}]
    assert (first.state, first.trainable, second.state, second.trainable) == (None, False, "ok", False)
    assert second.context == [{"role": "tool", "content": "ok", "name": "get", "tool_call_id": "get"}]


# ---------------------------------------------------------------- scores


def test_scores_are_of_the_step_of_their_span_or_of_the_episode() -> None:
    (record,) = read(
        Span(id="root", scores=[Score(scorer="whole", value=1)]),
        call("a", 1, [HELLO], model_message("", "get"), parent="root"),
        tool("get", 2, "root", scores=[Score(scorer="tool", value=True)]),
        scores=[Score(scorer="whole", value=0.5), Score(scorer="p@5", value="good", reason="why")],
    )
    assert [(s.scorer, s.value, s.step_index, s.reason) for s in record.scores] == [
        ("whole", 0.5, None, None),
        ("p_5", None, None, "why"),
        ("whole#2", 1.0, None, None),
        ("tool", 1.0, 0, None),
    ]


def test_a_score_of_a_wrapper_is_of_the_call_inside() -> None:
    outer = call("outer", 1, [HELLO], model_message("Hi."))
    outer.scores = [Score(scorer="good", value=1)]
    (record,) = read(outer, call("inner", 1, [HELLO], model_message("Hi."), parent="outer"))
    assert [(s.scorer, s.step_index) for s in record.scores] == [("good", 0)]


def test_an_outcome_without_calls_is_kept() -> None:
    (record,) = read(Span(id="root", scores=[Score(scorer="good", value=1)]))
    assert [(step.trainable, step.action) for step in record.steps] == [(False, "")]


# ---------------------------------------------------------------- traces that are no episode, and odd ones


@pytest.mark.parametrize(
    ("spans", "says"),
    [
        (
            [Span(id="a", kind="server"), Span(id="b", kind="client")],
            "no call of a model: its 2 spans are of kind client",
        ),
        ([call("a", 1, [HELLO], error="401")], "all 1 calls of a model in trace 'trace' failed; the last: 401"),
        ([call("a", 1, None, model="m")], "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"),
    ],
)
def test_a_trace_of_which_nothing_can_be_learnt_says_why(spans: list[Span], says: str) -> None:
    with pytest.raises(ShapeError, match=says.replace("(", ".")):
        read(*spans)


def test_spans_in_circles_and_without_parents_are_read() -> None:
    (record,) = read(
        Span(id="x", parent="y"),
        Span(id="y", parent="x"),
        call("a", 1, [HELLO], model_message("Hi."), parent="gone"),
        Span(id="s", parent="s"),
    )
    assert len(record.spans) == 4
    assert record.extra == {"trace_id": "trace", "missing_parents": 3}


def test_a_span_that_comes_twice_counts_once_as_it_came_last() -> None:
    (record,) = read(call("a", 1, [HELLO], model_message("Hi.")), call("a", 1, [HELLO], model_message("Ho.")))
    assert [step.action for step in record.steps] == ["Ho."]


def test_depth_and_number_of_spans_cost_no_more_than_their_number() -> None:
    """Twenty thousand spans inside one another, every other one an agent or a call."""
    kinds = ("agent", "llm", "tool", "span")
    spans = [
        Span(
            id=str(n),
            parent=str(n - 1) if n else None,
            kind=kinds[n % 4],
            start=n,
            call=ModelCall(prompt=[HELLO], answers=[model_message("Hi.")]) if n % 4 == 1 else None,
        )
        for n in range(20_000)
    ]
    tree = SpanTree(spans)
    assert len(tree.decisions) == 5_000
    assert len(tree.split_runs()) == 5_000


def test_pieces_of_traces_come_together_and_rejects_where_they_stand() -> None:
    bad = Reject(position=2, reason="malformed", message="m", raw="r")
    items: list[Any] = [("a", 0, {"n": 1}), ("b", 1, {"n": 2}), bad, ("a", 3, {"n": 3}), ("c", 4, {"s": "\ud800"})]
    first, second, third, fourth = group_traces(items)
    assert isinstance(first, tuple)
    assert (first[0], first[1].index, first[1].value) == ("a", 0, [{"n": 1}, {"n": 3}])
    assert isinstance(second, tuple)
    assert third == bad
    assert isinstance(fourth, Reject)
    assert (fourth.position, fourth.reason) == (4, "invalid")
    assert "UTF-8" in fourth.message
