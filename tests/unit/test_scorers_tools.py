"""tool_success, coordination, voting and restart: MassGen's constants, and which result belongs to which call."""

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from pydantic import ValidationError

from pipelines.score.scorers import Coordination, Restart, ToolSuccess, Voting
from testkit.scorer_frames import (
    answer,
    call,
    coordination,
    reason,
    says,
    score_episode,
    scored,
    span,
    tool_step,
    values,
    vote,
)

AT = datetime(2026, 1, 1, tzinfo=UTC)
LONG = "x" * 101

# (tool, result, reward): the same whether a message or a span tells it
CONSTANTS: list[tuple[str, Any, float]] = [
    ("book", "done", 1.0),
    ("book", "", 1.0),
    ("book", None, -0.5),
    ("book", {"error": "x"}, 1.0),
    ("web_search", "", 0.0),
    ("web_search", {}, 0.0),
    ("web_search", [], 0.0),
    ("web_search", {"error": "x"}, 0.3),
    ("web_search", {"error": "x", "results": [1]}, 0.3),
    ("web_search", {"error": None, "results": [1]}, 1.0),
    ("web_search", {"error": "", "articles": ["a"]}, 1.0),
    ("web_search", {"results": []}, 0.5),
    ("web_search", {"other": 1}, 0.5),
    ("web_search", ["a"], 0.5),
    ("web_search", LONG, 1.0),
    ("web_search", LONG[:-1], 0.7),
    ("web_search", "short", 0.7),
    ("web_search", None, -0.5),
    ("SEARCH_FLIGHTS", "short", 0.7),
    ("run_code", "", 0.0),
    ("run_code", {}, 0.0),
    ("run_code", {"error": "x"}, 0.2),
    ("run_code", {"output": "1"}, 1.0),
    ("run_code", {"stdout": "1"}, 1.0),
    ("run_code", {"output": ""}, 0.5),
    ("run_code", {"exit": 0}, 0.5),
    ("run_code", ["a"], 0.5),
    ("run_code", "no ERROR at all", 0.3),
    ("Execute", "an Exception came", 0.3),
    ("Execute", "42", 1.0),
    ("vote", "agent1", 0.5),
    ("submit_new_answer", "ok", 0.5),
    ("search_code", "short", 0.7),
    ("vote", None, -0.5),
]


@pytest.mark.parametrize(("tool", "result", "reward"), CONSTANTS)
def test_constants_over_messages(tool: str, result: Any, reward: float) -> None:
    content = result if isinstance(result, str) or result is None else json.dumps(result)
    steps = [tool_step(0, [call(tool)]), tool_step(1, None, [answer(content)])]
    scores = scored(ToolSuccess(), [{"episode_id": 1}], steps=steps)
    assert values(scores) == {(1, None): reward, (1, 0): reward}
    assert scores["reason"].to_list() == [None, f"{tool}: {reward}"]


@pytest.mark.parametrize(("tool", "result", "reward"), CONSTANTS)
def test_constants_over_spans(tool: str, result: Any, reward: float) -> None:
    tool_span = span("tool", {"tool_name": tool, "result": result, "success": True, "error": None}, step_index=2)
    assert values(scored(ToolSuccess(source="spans"), [{"episode_id": 1}], spans=[tool_span])) == {
        (1, None): reward,
        (1, 2): reward,
    }


@pytest.mark.parametrize(
    ("content", "is_exception"),
    [
        ("Error: no such flight", True),
        ("  ERROR", True),
        ("Exception in thread", True),
        ("Traceback (most recent call last)", True),
        ("Errors were made", False),
        ("no error", False),
        ('{"error": "x"}', False),
    ],
)
def test_texts_that_are_exceptions(content: str, is_exception: bool) -> None:
    steps = [tool_step(0, [call("book")]), tool_step(1, None, [answer(content)])]
    assert score_episode(ToolSuccess(), steps=steps) == (-1.0 if is_exception else 1.0)
    assert score_episode(ToolSuccess(error_pattern="^never$"), steps=steps) == 1.0
    assert score_episode(ToolSuccess(error_objects=True), steps=steps) == (
        -1.0 if is_exception or content[0] == "{" else 1.0
    )


@pytest.mark.parametrize(
    ("fields", "attributes", "reward"),
    [
        ({"error": "boom"}, {"result": "x"}, -1.0),
        ({}, {"result": "x", "success": False}, -1.0),
        ({}, {"result": "x", "error": "boom"}, -1.0),
        ({}, {"result": "x", "error": "", "success": True}, 1.0),
        ({}, {"success": True}, -0.5),
        ({}, None, -0.5),
        ({}, "not json", -0.5),
        ({"error": "boom"}, None, -1.0),
    ],
)
def test_spans_that_are_exceptions(fields: dict[str, Any], attributes: Any, reward: float) -> None:
    assert score_episode(ToolSuccess(source="spans"), spans=[span("tool", attributes, **fields)]) == reward


def test_a_null_result_may_be_unknown() -> None:
    spans = [span("tool", {"tool_name": "book", "result": None})]
    assert score_episode(ToolSuccess(source="spans", null_result=None), spans=spans) is None
    assert "1 of 1 tool calls" in str(reason(ToolSuccess(source="spans", null_result=None), spans=spans))


def test_a_step_gets_the_mean_and_so_does_the_episode() -> None:
    steps = [
        tool_step(0, [call("book", "a"), call("web_search", "b")]),
        tool_step(1, [call("book", "a")], [answer("fine", "b"), answer("Error", "a")]),
        tool_step(2, None, [answer("done", "a")]),
    ]
    scores = scored(ToolSuccess(), [{"episode_id": 1}], steps=steps)
    assert values(scores) == {(1, None): (-1.0 + 0.7 + 1.0) / 3, (1, 0): (-1.0 + 0.7) / 2, (1, 1): 1.0}
    episode_rows = scores.filter(scores["step_index"].is_null())
    assert json.loads(episode_rows["metrics"].item()) == {"calls": 3, "exceptions": 1, "nulls": 0, "unknown": 0}


def test_results_after_the_last_step_are_in_the_final_observation() -> None:
    episode = {"final_observation": json.dumps([answer("done")])}
    assert score_episode(ToolSuccess(), episode, steps=[tool_step(0, [call("book")])]) == 1.0
    assert reason(ToolSuccess(), steps=[tool_step(0, [call("book")])]).startswith("1 of 1 tool calls ")
    inside = [tool_step(0, [call("book")]), tool_step(1, None)]
    assert score_episode(ToolSuccess(), episode, steps=inside) is None


def test_calls_without_ids_are_matched_by_their_order() -> None:
    steps = [
        tool_step(0, [call("web_search", None), call("book", None)]),
        tool_step(1, None, [answer("short", None), {"role": "user", "content": "x"}, answer("Error", None)]),
    ]
    assert values(scored(ToolSuccess(), [{"episode_id": 1}], steps=steps))[1, 0] == pytest.approx((0.7 - 1.0) / 2)


def test_a_result_of_another_call_is_not_taken() -> None:
    steps = [tool_step(0, [call("book", "a")]), tool_step(1, None, [answer("done", "z")])]
    assert score_episode(ToolSuccess(), steps=steps) is None


def test_other_shapes_of_calls_and_contents() -> None:
    flat = [{"name": "web_search", "id": "c"}]
    content = answer([{"type": "text", "text": "a"}, {"type": "text", "text": LONG}])
    assert score_episode(ToolSuccess(), steps=[tool_step(0, flat), tool_step(1, None, [content])]) == 1.0
    objects = answer({"results": [1]})
    assert score_episode(ToolSuccess(), steps=[tool_step(0, flat), tool_step(1, None, [objects])]) == 1.0
    old = {"role": "function", "name": "book", "content": "ok"}
    assert score_episode(ToolSuccess(), steps=[tool_step(0, [{"name": "book"}]), tool_step(1, None, [old])]) == 1.0
    numbers = [{"id": 7, "function": {"name": 5}}]
    assert score_episode(ToolSuccess(), steps=[tool_step(0, numbers), tool_step(1, None, [answer("ok", None)])]) == 1.0


@pytest.mark.parametrize("calls", [None, "[]", "{}", "null", "not json", '["text", 3]', "[" * 5000])
def test_what_is_no_call_is_none(calls: str | None) -> None:
    steps = [tool_step(0, calls), tool_step(1, None, [answer("stray")])]
    assert str(reason(ToolSuccess(), steps=steps)).endswith("calls no tool")


def test_inactive_steps_call_nothing_but_their_context_counts() -> None:
    steps = [tool_step(0, [call("book")]), tool_step(1, [call("book")], [answer("ok")], is_active=False)]
    assert values(scored(ToolSuccess(), [{"episode_id": 1}], steps=steps)) == {(1, None): 1.0, (1, 0): 1.0}


def test_an_error_pattern_that_is_none_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"error_pattern '\(' .*regular expression"):
        ToolSuccess(error_pattern="(")


# ---------------------------------------------------------------- voting


def test_votes_for_the_winner_are_right() -> None:
    spans = [vote("a", "x", step_index=0), vote("b", "x", step_index=0), vote("c", "y", step_index=1)]
    scores = scored(Voting(), [{"episode_id": 1, "extra": None}], spans=spans)
    assert values(scores) == {(1, None): pytest.approx(0.5), (1, 0): 1.0, (1, 1): -0.5}
    episode_rows = scores.filter(scores["step_index"].is_null())
    assert json.loads(episode_rows["metrics"].item()) == {"winner": "x", "votes": 3, "right": 2}


def test_a_voters_last_vote_counts_for_the_episode_and_every_vote_for_its_step() -> None:
    spans = [
        vote("a", "y", 1, started_at=AT, step_index=0),
        vote("a", "x", 2, started_at=AT, step_index=1),
        vote("b", "x", 1, started_at=AT),
    ]
    assert values(scored(Voting(), [{"episode_id": 1}], spans=spans)) == {(1, None): 1.0, (1, 0): -0.5, (1, 1): 1.0}


def test_a_tie_has_no_winner_unless_someone_says_so() -> None:
    spans = [vote("a", "x", step_index=0), vote("b", "y", step_index=1)]
    assert "there is no winner: " in str(reason(Voting(), spans=spans))
    named = {"extra": json.dumps({"selected_agent": "y"})}
    actual = values(scored(Voting(winner="extra"), [{"episode_id": 1, **named}], spans=spans))
    assert actual == {(1, None): 0.25, (1, 0): -0.5, (1, 1): 1.0}
    assert score_episode(Voting(winner="extra"), {"extra": "{}"}, spans=spans) is None
    fields = {"extra": json.dumps({"w": {"id": "x"}})}
    assert score_episode(Voting(winner="extra", winner_path="$.w.id", right=2.0, wrong=0.0), fields, spans=spans) == 1.0


@pytest.mark.parametrize("path", ["$[", "selected", ""])
def test_a_path_that_is_none_is_refused(path: str) -> None:
    with pytest.raises(ValidationError, match="is not a JSONPath"):
        Voting(winner="extra", winner_path=path)


def test_votes_that_are_none() -> None:
    assert reason(Voting()) == "no vote is recorded"
    spans = [vote("a", None), coordination("new_answer", {"agent_id": "a"}), span("tool", {"action_type": "vote"})]
    assert reason(Voting(), spans=spans) == "no vote is recorded"


def test_orchestrators_that_spell_votes_otherwise() -> None:
    spans = [coordination("vote", {"agent_id": "a", "for_agent_id": "x"})]
    assert score_episode(Voting(), spans=spans) == 1.0


# ---------------------------------------------------------------- coordination


def tokens(count: int) -> dict[str, int]:
    return {"prompt_tokens": count - 1, "completion_tokens": 1}


AGREE = [vote("a", "x"), vote("b", "x")]
SPLIT = [vote("a", "x"), vote("b", "y"), vote("c", "x")]


@pytest.mark.parametrize(
    ("spans", "count", "quality", "expected"),
    [
        (AGREE, 10_000, 0.7, 1.4 + 1.0),
        (AGREE, 10_000, 0.71, 1.42 + 1.0 + 0.5),
        (AGREE, 10_100, 0.7, 1.4 + 1.0 - 0.1),
        (AGREE, 1_010_000, 0.7, 1.4 + 1.0 - 1000.0),
        (SPLIT, 100, 0.9, 1.8 - 0.5),
        ([*AGREE, vote("c", "x", 2)], 100, 0.9, 1.8 + 1.0 + 0.5),
        ([*AGREE, vote("c", "x", 3)], 100, 0.9, 1.8 + 1.0),
        ([*AGREE, vote("c", "x", 5)], 100, 0.9, 1.8 + 1.0 - 0.2),
        ([*AGREE, coordination("agent_status", {}, 6)], 100, 0.0, 1.0 - 0.3),
        ([vote("a", "x", 0)], 100, 0.9, 1.8 + 1.0 + 0.5),
    ],
)
def test_coordination(spans: list[Any], count: int, quality: float, expected: float) -> None:
    assert score_episode(Coordination(quality=quality), tokens(count), spans=spans) == pytest.approx(
        expected, abs=1e-12
    )


def test_consensus_may_be_a_plurality() -> None:
    assert score_episode(Coordination(consensus="plurality"), tokens(1), spans=SPLIT) == pytest.approx(2.4)
    tied = [vote("a", "x"), vote("b", "y")]
    assert score_episode(Coordination(consensus="plurality"), tokens(1), spans=tied) == pytest.approx(0.9)


def test_the_quality_may_be_that_of_the_answer() -> None:
    text = "x" * 200
    assert score_episode(Coordination(quality="answer"), tokens(1), steps=says(text), spans=AGREE) == pytest.approx(
        2 * (0.3 * 0.1 + 0.4 * 0.4) + 1.0
    )
    strict = Coordination(quality="answer", missing="null")
    assert reason(strict, tokens(1), spans=AGREE) == "unknown: quality"
    assert score_episode(Coordination(quality="answer"), tokens(1), spans=AGREE) == pytest.approx(1.4 + 1.0)
    assert score_episode(Coordination(quality="answer", no_answer=0.0), tokens(1), spans=AGREE) == pytest.approx(1.0)


def test_the_quality_of_the_answer_is_that_of_the_newest_final_answer_span() -> None:
    text, step = "x" * 200, says("A short answer of some step.")
    for key in ("answer", "content", "final_answer"):
        early, late, empty = (
            coordination("final_answer", {"agent_id": "x", key: text_part}, started_at=AT.replace(minute=minute))
            for minute, text_part in enumerate(("First.", text, " "))
        )
        spans = [late, early, empty, *AGREE]
        score = score_episode(Coordination(quality="answer", missing="null"), tokens(1), steps=step, spans=spans)
        assert score == pytest.approx(2 * (0.3 * 0.1 + 0.4 * 0.4) + 1.0)


@pytest.mark.parametrize(
    ("episode", "spans", "value", "missing"),
    [
        ({}, AGREE, 1.4 + 1.0, ["tokens"]),
        ({"completion_tokens": 10_100}, AGREE, 1.4 + 1.0 - 0.1, ["tokens"]),
        (tokens(1), [coordination("new_answer", {}, 4)], 1.4 - 0.5 - 0.1, ["consensus"]),
        ({}, [coordination("new_answer", {}, 1)], 1.4 - 0.5, ["tokens", "consensus"]),
        (tokens(1), AGREE, 1.4 + 1.0, []),
    ],
)
def test_what_is_not_recorded_has_its_default_or_makes_the_score_unknown(
    episode: dict[str, int], spans: list[Any], value: float, missing: list[str]
) -> None:
    (row,) = scored(Coordination(), [{"episode_id": 1} | episode], spans=spans).rows(named=True)
    assert row["value"] == pytest.approx(value)
    assert json.loads(row["metrics"])["missing"] == missing
    assert [name for name in ("tokens", "consensus") if name in (row["reason"] or "")] == missing
    assert (score_episode(Coordination(missing="null"), episode, spans=spans) is None) == bool(missing)


def test_what_is_not_known_is_named() -> None:
    strict = Coordination(missing="null")
    assert reason(strict, {"prompt_tokens": 3}, spans=AGREE) == "unknown: tokens"
    assert reason(strict, tokens(1), spans=[coordination("new_answer", {}, 1)]) == "unknown: consensus"


def test_an_episode_without_coordination_has_no_score() -> None:
    for scorer in (Coordination(), Coordination(missing="null")):
        assert score_episode(scorer, tokens(1)) is None
        assert reason(scorer, tokens(1)) == "no coordination is recorded"


# ---------------------------------------------------------------- restart


@pytest.mark.parametrize(
    ("restarts", "before", "after", "reward"),
    [
        (False, 0.71, None, 0.5),
        (False, 0.7, None, -0.3),
        (False, 0.0, 1.0, -0.3),
        (True, 0.5, None, 0.0),
        (True, 0.0, 0.21, 1.0),
        (True, 0.0, 0.2, 0.5),
        (True, 0.5, 0.5, -0.5),
        (True, 0.5, 0.1, -0.5),
        (True, None, 0.9, None),
        (False, None, None, None),
        (None, 0.5, 0.5, None),
    ],
)
def test_restart(restarts: bool | None, before: float | None, after: float | None, reward: float | None) -> None:
    data = {"should_restart": restarts, "previous_quality": before, "new_quality": after}
    actual = values(
        scored(Restart(), [{"episode_id": 1}], spans=[coordination("restart_decision", data, step_index=4)])
    )
    assert actual == {(1, None): reward, (1, 4): reward}


def test_restart_says_what_is_missing() -> None:
    assert "no decision to restart" in str(reason(Restart()))
    massgen = coordination("restart_decision", {"should_restart": True, "reason": "x", "current_attempt": 0})
    assert "1 of 1 decisions" in str(reason(Restart(), spans=[massgen]))
    pending = coordination("restart_decision", {"should_restart": True, "previous_quality": 0.5})
    assert score_episode(Restart(pending=None), spans=[pending]) is None
