"""format_validity, length, kl_in_reward and rubric_terms: every rule, every limit, every reason."""

import json
import re
from typing import Any

import pytest
from pydantic import ValidationError

from pipelines.score.scorers import FormatValidity, KlInReward, LengthPenalty, RubricTerms
from pipelines.score.scorers.forms import build_validator, find_schema_fault
from testkit.scorer_frames import call, reason, says, score_episode, scored, values


def validity(rule: dict[str, Any], text: str, **options: Any) -> float | None:
    return score_episode(FormatValidity(rule=rule, **options), steps=says(text))


# ---------------------------------------------------------------- rules


@pytest.mark.parametrize(
    ("pattern", "full", "text", "expected"),
    [
        ("[0-9]+", False, "x 12", 1.0),
        ("[0-9]+", True, "x 12", 0.0),
        ("[0-9]+", True, "12", 1.0),
        ("[0-9]+", True, "12\n", 0.0),
        ("a|b", True, "ab", 0.0),
        ("(?i)YES", False, "yes", 1.0),
        ("^b", False, "a\nb", 0.0),
        ("(?m)^b", False, "a\nb", 1.0),
    ],
)
def test_regex(pattern: str, full: bool, text: str, expected: float) -> None:
    assert validity({"kind": "regex", "pattern": pattern, "full": full}, text) == expected


@pytest.mark.parametrize(
    ("type_", "text", "expected"),
    [
        ("any", "1", 1.0),
        ("any", " null ", 1.0),
        ("object", '{"a": 1}', 1.0),
        ("object", "[1]", 0.0),
        ("array", "[1]", 1.0),
        ("any", "NaN", 0.0),
        ("any", "{'a': 1}", 0.0),
        ("any", "[1,]", 0.0),
        ("any", "```json\n1\n```", 0.0),
        ("any", "[" * 50_000, 0.0),
        ("any", '"\\ud800"', 0.0),
    ],
)
def test_json(type_: str, text: str, expected: float) -> None:
    assert validity({"kind": "json", "type": type_}, text) == expected


def test_json_in_a_fence_is_extracted() -> None:
    fence = r"(?s)```json\n(.*?)\n```"
    assert validity({"kind": "json"}, 'so:\n```json\n{"a": 1}\n```\n', extract=fence) == 1.0
    assert validity({"kind": "json"}, "so", extract=fence) is None
    assert validity({"kind": "json"}, "so", extract=fence, no_answer=0.0) == 0.0


SCHEMA = {
    "type": "object",
    "required": ["name", "tags"],
    "additionalProperties": False,
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 5},
        "age": {"type": ["integer", "null"], "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "minItems": 1, "maxItems": 2, "items": {"enum": ["a", "b", 1]}},
        "kind": {"const": {"x": [True]}},
    },
}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"name": "ann", "tags": ["a"]}, True),
        ({"name": "ann", "tags": ["a", 1.0], "age": 7, "kind": {"x": [True]}}, True),
        ({"name": "ann", "tags": ["a"], "age": None}, True),
        ({"name": "ann", "tags": ["a"], "age": 7.0}, True),
        ({"name": "ann", "tags": ["a"], "age": 7.5}, False),
        ({"name": "ann", "tags": ["a"], "age": True}, False),
        ({"name": "ann", "tags": ["a"], "age": -1}, False),
        ({"name": "ann", "tags": ["a"], "age": 151}, False),
        ({"name": "ann"}, False),
        ({"name": "", "tags": ["a"]}, False),
        ({"name": "annabel", "tags": ["a"]}, False),
        ({"name": "ann", "tags": []}, False),
        ({"name": "ann", "tags": ["a", "a", "a"]}, False),
        ({"name": "ann", "tags": ["c"]}, False),
        ({"name": "ann", "tags": [True]}, False),
        ({"name": "ann", "tags": ["a"], "other": 1}, False),
        ({"name": "ann", "tags": ["a"], "kind": {"x": [1]}}, False),
        (["ann"], False),
        ("ann", False),
    ],
)
def test_json_schema(value: Any, expected: bool) -> None:
    assert validity({"kind": "json_schema", "schema": SCHEMA}, json.dumps(value)) == float(expected)


@pytest.mark.parametrize(
    ("text", "schema", "expected"),
    [
        ("1" + "0" * 400, {"type": "integer", "minimum": 0}, True),
        ("0.5", {"type": "integer"}, False),
        ("1.0", {"const": 1}, True),
        ("true", {"const": 1}, False),
        ("[1, {}]", {"enum": [[1.0, {}]]}, True),
        ('{"a": true}', {"enum": [{"a": 1}]}, False),
        ("null", {"enum": [0, False]}, False),
        ('"1"', {"enum": [1]}, False),
        ('"a"', {"minItems": 2, "minimum": 7, "required": ["b"]}, True),
        ('"\U0001f5dd"', {"maxLength": 1}, True),
        ("[" * 900 + "]" * 900, {"items": {"type": "array"}}, True),
    ],
)
def test_json_values_are_compared_as_json(text: str, schema: dict[str, Any], expected: bool) -> None:
    assert validity({"kind": "json_schema", "schema": schema}, text) == float(expected)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ([], "schema: .* is not of type 'object'"),
        ({"pattern": "^(a+)+$"}, r"schema: .*'pattern' was unexpected.*; valid keywords: type, enum, const"),
        ({"properties": {"a": {"$ref": "#"}}}, r"schema\.properties\.a: .*'\$ref' was unexpected"),
        ({"$ref": "http://127.0.0.1:9/schema.json"}, r"'\$ref' was unexpected"),
        ({"$schema": "http://127.0.0.1:9/schema.json"}, r"'\$schema' was unexpected"),
        ({"allOf": [{}]}, "'allOf' was unexpected"),
        ({"items": 3}, r"schema\.items: 3 is not of type 'object'"),
        ({"items": True}, r"schema\.items: True is not of type 'object'"),
        ({"type": "text"}, r"schema\.type: 'text' is not one of \['object', 'array'"),
        ({"type": ["text"]}, r"schema\.type\.0: 'text' is not one of"),
        ({"type": []}, r"schema\.type: \[\] "),
        ({"enum": []}, r"schema\.enum: \[\] "),
        ({"required": "a"}, r"schema\.required: 'a' is not of type 'array'"),
        ({"required": [1]}, r"schema\.required\.0: 1 is not of type 'string'"),
        ({"properties": []}, r"schema\.properties: "),
        ({"additionalProperties": {}}, r"schema\.additionalProperties: {} is not of type 'boolean'"),
        ({"minItems": -1}, r"schema\.minItems: -1 is less than"),
        ({"maxLength": True}, r"schema\.maxLength: True is not of type 'integer'"),
        ({"minimum": "1"}, r"schema\.minimum: '1' is not of type 'number'"),
        (nested(100_000), "the schema is nested too deeply"),
    ],
)
def test_a_schema_that_is_none_is_refused(schema: Any, message: str) -> None:
    assert re.search(message, find_schema_fault(schema) or "")


def test_a_schema_that_is_none_is_refused_as_an_option() -> None:
    with pytest.raises(ValidationError, match="'pattern' was unexpected"):
        FormatValidity(rule={"kind": "json_schema", "schema": {"pattern": "x"}})


@pytest.mark.parametrize("address", ["http://127.0.0.1:9/schema.json", "file:///etc/passwd", "urn:example:a"])
def test_no_reference_is_fetched_even_if_a_schema_got_so_far(address: str) -> None:
    from referencing.exceptions import Unresolvable

    with pytest.raises(Unresolvable):
        build_validator({"$ref": address}).is_valid(1)


@pytest.mark.parametrize(
    ("text", "only", "expected"),
    [
        ("<think>x</think><answer>y</answer>", True, 1.0),
        (" <think>\nx\n</think>\n\n<answer></answer>\n", True, 1.0),
        ("so <think>x</think><answer>y</answer>", True, 0.0),
        ("so <think>x</think> then <answer>y</answer> end", False, 1.0),
        ("<answer>y</answer><think>x</think>", False, 0.0),
        ("<think>x</think>", False, 0.0),
        ("<think>x<think></think><answer>y</answer>", False, 0.0),
        ("<think><answer>x</think></answer>", False, 0.0),
        ("</think><think><answer>y</answer>", False, 0.0),
        ("<think>x</think><answer>y", False, 0.0),
        ("<THINK>x</THINK><answer>y</answer>", False, 0.0),
    ],
)
def test_tags(text: str, only: bool, expected: float) -> None:
    assert validity({"kind": "tags", "only": only}, text) == expected


def test_a_tags_dot_is_a_dot() -> None:
    assert validity({"kind": "tags", "tags": ["a.b"]}, "<a.b>x</a.b>") == 1.0
    assert validity({"kind": "tags", "tags": ["a.b"]}, "<axb>x</axb>") == 0.0


@pytest.mark.parametrize(
    "rule",
    [
        {"kind": "regex", "pattern": "("},
        {"kind": "tags", "tags": []},
        {"kind": "tags", "tags": ["a", "a"]},
        {"kind": "tags", "tags": ["a>b"]},
        {"kind": "tags", "tags": [""]},
        {"kind": "xml"},
        {"kind": "json", "type": "text"},
        {},
    ],
)
def test_a_rule_that_is_none_is_refused(rule: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        FormatValidity(rule=rule)


def test_every_action_may_be_checked() -> None:
    calls = json.dumps([call("book")])
    steps = [
        *says("1", "x", ""),
        {"episode_id": 1, "step_index": 3, "action": " ", "is_active": True, "tool_calls": calls},
        {"episode_id": 1, "step_index": 4, "action": "2", "is_active": True, "tool_calls": calls},
        {"episode_id": 1, "step_index": 5, "action": "x", "is_active": True, "is_copied_context": True},
        {"episode_id": 1, "step_index": 6, "action": "x", "is_active": False},
    ]
    scorer = FormatValidity(rule={"kind": "regex", "pattern": "[0-9]"}, of="actions")
    scores = scored(scorer, [{"episode_id": 1}, {"episode_id": 2}], steps=steps)
    assert values(scores) == {(1, None): 0.5, (2, None): None, (1, 0): 1.0, (1, 1): 0.0, (1, 2): 0.0, (1, 4): 1.0}
    assert json.loads(scores["metrics"].drop_nulls().item()) == {"actions": 4, "valid": 2}
    assert scores.filter(scores["episode_id"] == 2)["reason"].item() == "no action has text"


# ---------------------------------------------------------------- length


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (0, -1.0),
        (1, -0.5),
        (2, 0.0),
        (16, 0.0),
        (17, -0.25),
        (18, -0.5),
        (19, -0.75),
        (20, -1.0),
        (21, -1.0),
        (999, -1.0),
    ],
)
def test_soft_overlong_punishment(length: int, expected: float) -> None:
    scorer = LengthPenalty(max_length=20, cache=4, min_length=2, unit="characters")
    assert score_episode(scorer, steps=says("x" * length)) == expected


def test_the_limits_of_dapo() -> None:
    scorer = LengthPenalty(max_length=20480, cache=4096, unit="characters", of="answer")
    for length, expected in ((16384, 0.0), (16385, -1 / 4096), (18432, -0.5), (20480, -1.0), (20481, -1.0)):
        assert score_episode(scorer, steps=says("x" * length)) == expected


def test_a_hard_limit() -> None:
    scorer = LengthPenalty(max_length=3, unit="words")
    assert [score_episode(scorer, steps=says(text)) for text in ("a b c", "a b  c\nd", "")] == [0.0, -1.0, 0.0]


@pytest.mark.parametrize(
    "options",
    [
        {"max_length": 0},
        {"max_length": 5, "cache": 6},
        {"max_length": 5, "cache": 2, "min_length": 4},
        {"max_length": 5, "of": "answer"},
        {"max_length": 5, "cache": -1},
        {},
    ],
)
def test_limits_that_do_not_fit_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        LengthPenalty(**options)


def counted(step: int, n: int, *, provenance: str = "engine", encoding: int = 1) -> dict[str, Any]:
    return {"episode_id": 1, "step_index": step, "encoding_id": encoding, "provenance": provenance, "n_action": n}


def test_tokens_are_the_engines() -> None:
    steps = says("a", "b")
    tokens = [counted(0, 6), counted(1, 12), counted(1, 99, provenance="rendered", encoding=2)]
    assert score_episode(LengthPenalty(max_length=20, cache=4), steps=steps, tokens=tokens) == -0.5
    scores = scored(LengthPenalty(max_length=12, cache=4, of="steps"), [{"episode_id": 1}], steps=steps, tokens=tokens)
    assert values(scores) == {(1, None): -0.5, (1, 0): 0.0, (1, 1): -1.0}


def test_tokens_that_are_not_known() -> None:
    scorer = LengthPenalty(max_length=20, of="steps")
    rendered = [counted(0, 6), counted(1, 12, provenance="rendered")]
    scores = scored(scorer, [{"episode_id": 1}], steps=says("a", "b"), tokens=rendered)
    assert values(scores) == {(1, None): None, (1, 0): 0.0, (1, 1): None}
    reasons = sorted(scores["reason"].drop_nulls())
    assert [text.rpartition(" for ")[2] for text in reasons] == ["some step", "the step"]
    assert all(text.startswith("no tokens of the ") for text in reasons)
    twice = [counted(0, 6), counted(0, 7, encoding=2)]
    assert score_episode(LengthPenalty(max_length=20), steps=says("a"), tokens=twice) is None
    assert (
        score_episode(LengthPenalty(max_length=20), steps=says("a"), tokens=[counted(0, 6), counted(0, 6, encoding=2)])
        == 0.0
    )


def test_length_says_what_is_missing() -> None:
    assert reason(LengthPenalty(max_length=9, unit="words")) == "no active step"
    assert str(reason(LengthPenalty(max_length=9, unit="words", of="answer"))).endswith("has no answer")
    assert score_episode(LengthPenalty(max_length=9, unit="words", of="answer", no_answer=-1.0)) == -1.0


# ---------------------------------------------------------------- KL in the reward


def ratio(step: int, value: float | None, checkpoint: str = "ref", **fields: Any) -> dict[str, Any]:
    return {"episode_id": 1, "step_index": step, "checkpoint": checkpoint, "log_ratio": value, **fields}


def test_kl_is_a_penalty_where_the_policy_is_surer_than_the_reference() -> None:
    """The policy gave its tokens a log-probability of -1, the reference -3: k1 = 2, the reward -beta 2."""
    scores = scored(
        KlInReward(checkpoint="ref", beta=0.5), [{"episode_id": 1}], steps=says("a"), ratios=[ratio(0, -2.0)]
    )
    assert values(scores) == {(1, None): -1.0, (1, 0): -1.0}


def test_kl_of_another_checkpoint_or_version_counts_nothing() -> None:
    ratios = [ratio(0, -2.0, policy_version=1), ratio(0, -4.0, policy_version=2), ratio(0, -9.0, "other")]
    assert score_episode(KlInReward(checkpoint="ref", policy_version=2), steps=says("a"), ratios=ratios) == -4.0
    clash = scored(KlInReward(checkpoint="ref"), [{"episode_id": 1}], steps=says("a"), ratios=ratios)
    first, second = clash["error"]
    assert "1 of 1 steps" in first
    assert "`ratios` has 2 different rows" in second
    assert "name a policy_version" in second
    assert score_episode(KlInReward(checkpoint="ref"), steps=says("a"), ratios=[ratio(0, -2.0), ratio(0, -2.0)]) == -2.0


def test_kl_that_is_not_known() -> None:
    scores = scored(
        KlInReward(checkpoint="ref"),
        [{"episode_id": 1}],
        steps=says("a", "b", "c"),
        ratios=[ratio(0, 1.0), ratio(1, None)],
    )
    assert values(scores) == {(1, None): None, (1, 0): 1.0, (1, 1): None, (1, 2): None}
    complete, partly_known, unrecorded, absent = scores["error"]
    assert "2 of 3 steps" in complete
    assert partly_known is None
    assert "behaviour policy's log-probabilities" in unrecorded
    assert "no row of checkpoint 'ref'" in absent
    assert "no step of the" in str(reason(KlInReward(checkpoint="ref")))


# ---------------------------------------------------------------- rubrics


def rubric(*criteria: Any) -> str:
    return json.dumps({"criteria": list(criteria)})


@pytest.mark.parametrize(
    ("count", "quality"), [(0, -1.0), (2, -1 / 3), (3, 0.0), (10, 0.0), (11, -0.1), (15, -0.5), (20, -1.0), (40, -1.0)]
)
def test_too_few_and_too_many_criteria(count: int, quality: float) -> None:
    scorer = RubricTerms(coverage_weight=0.0)
    assert score_episode(scorer, steps=says(rubric(*["be brief"] * count))) == pytest.approx(quality)


@pytest.mark.parametrize(("turns", "efficiency"), [(0, 0.0), (3, 0.0), (4, -1 / 3), (6, -1.0), (9, -1.0)])
def test_too_many_questions(turns: int, efficiency: float) -> None:
    scorer = RubricTerms(coverage_weight=0.0, min_criteria=1)
    assert score_episode(scorer, steps=says(*["which?"] * turns, rubric("be brief"))) == pytest.approx(efficiency)


def test_coverage_is_of_the_true_criteria() -> None:
    scorer = RubricTerms(min_criteria=1, threshold=0.5)
    true = {"ground_truth": json.dumps(["be brief", {"description": "cite Sources"}, "say why"])}
    written = rubric({"criterion": "Be brief"}, "cite sources well", "x")
    scores = scored(scorer, [{"episode_id": 1, **true}], steps=says(written))
    assert json.loads(scores["metrics"].item()) == {"quality": 0.0, "efficiency": 0.0, "coverage": pytest.approx(2 / 3)}
    assert scores["value"].item() == pytest.approx(2 / 3)
    weighted = RubricTerms(min_criteria=1, coverage_weight=3.0, quality_weight=0.5)
    assert score_episode(weighted, true, steps=says(written)) == pytest.approx(2.0)


@pytest.mark.parametrize("text", ["no json", "3", '{"other": []}', '{"criteria": [1]}', '["a", {"x": 1}]', "[" * 5000])
def test_what_is_no_rubric(text: str) -> None:
    scorer = RubricTerms()
    assert str(reason(scorer, {"ground_truth": '["a"]'}, steps=says(text))).startswith("the answer is not ")
    assert "ground truth is not " in str(reason(scorer, {"ground_truth": text}, steps=says(rubric("a"))))


def test_rubric_options() -> None:
    with pytest.raises(ValidationError, match="min_criteria is 5, above max_criteria, 4"):
        RubricTerms(min_criteria=5, max_criteria=4)
    assert str(reason(RubricTerms(), {"ground_truth": '["a"]'})).endswith("has no answer")
    assert score_episode(RubricTerms(no_answer=-2.0), {"ground_truth": '["a"]'}) == -2.0
    named = RubricTerms(criteria_key="rules", min_criteria=1)
    assert score_episode(named, {"ground_truth": '{"rules": ["a"]}'}, steps=says('{"rules": ["a"]}')) == 1.0
