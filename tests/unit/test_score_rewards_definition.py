"""Rewards from TOML: what is taken, what is refused, and what a version tells apart."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from lake.errors import UsageError
from pipelines.score.rewards import Component, RewardDefinition, load_reward, make_rubric_agreement

PAGE = """
[score]
batch_size = 3

[reward.helpful]
components = ["judge", { scorer = "tool_success@v1", weight = 0.5, name = "tools" }]
on_null = "renormalise"
level = "both"

[reward.rubric]
components = [{ scorer = "a-judge", name = "one" }, { scorer = "a-judge@2", name = "other" }]
sql = "-power(one - other, 2)"

[reward.broken]
components = []

[reward]
plain = 3
"""


@pytest.fixture
def page(tmp_path: Path) -> str:
    path = tmp_path / "rewards.toml"
    path.write_text(PAGE.replace("\n[reward]\nplain = 3\n", ""))
    return str(path)


def test_a_weighted_reward(page: str) -> None:
    definition = load_reward(page, "helpful")
    assert definition == RewardDefinition(
        name="helpful",
        components=(Component(scorer="judge"), Component(scorer="tool_success@v1", weight=0.5, name="tools")),
        on_null="renormalise",
        level="both",
    )
    assert [(part.alias, part.scorer_name, part.version, part.of) for part in definition.components] == [
        ("judge", "judge", None, "same"),
        ("tools", "tool_success", "v1", "same"),
    ]


def test_a_reward_in_sql(page: str) -> None:
    definition = load_reward(page, "rubric")
    assert definition.sql == "-power(one - other, 2)"
    assert [part.alias for part in definition.components] == ["one", "other"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "has no reward 'nothing'; it has broken, helpful, rubric"),
        ("broken", r"\[reward.broken\]: `components` is \[\]; valid: at least 1"),
    ],
)
def test_a_section_that_is_none(page: str, name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_reward(page, name)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a TOML file"):
        load_reward(str(tmp_path / "missing.toml"), "x")
    path = tmp_path / "x.toml"
    path.write_text("[reward\n")
    with pytest.raises(UsageError, match="is not TOML"):
        load_reward(str(path), "x")
    path.write_text("x = " + "[" * 5000)
    with pytest.raises(UsageError, match="too deeply"):
        load_reward(str(path), "x")
    path.write_text("reward = 3\n")
    with pytest.raises(UsageError, match="'reward' is not a section"):
        load_reward(str(path), "x")
    path.write_text("[reward]\nx = 3\n")
    with pytest.raises(UsageError, match=r"x = 3 .*a section \[reward.x\]"):
        load_reward(str(path), "x")
    path.write_text("[reward]\nx = 3\n[reward.y]\n")
    with pytest.raises(UsageError, match=r"has no reward 'z'; it has y$"):
        load_reward(str(path), "z")
    path.write_text('[reward.x]\ncomponents = [{scorer = "one", weight = "1"}]\n')
    with pytest.raises(UsageError, match=r"`components\.0\.weight` is '1'; valid: a number"):
        load_reward(str(path), "x")
    path.write_text('[reward.x]\ncomponents = ["one"]\nsql = "(SELECT 1)"\n')
    with pytest.raises(UsageError, match=r"\[reward.x\]: sql '\(SELECT 1\)': it uses SUBQUERY"):
        load_reward(str(path), "x")
    path.write_text('[reward.x]\ncomponents = [{scorer = "one", weight = 2}]\n')
    assert load_reward(str(path), "x").components[0].weight == 2.0
    path.write_text("[score]\n")
    with pytest.raises(UsageError, match=r"it has none; write \[reward.NAME\]"):
        load_reward(str(path), "x")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"components": []}, "at least 1 item"),
        ({"components": ["judge"], "name": "tool_success"}, "'tool_success' is the name of a built-in scorer"),
        ({"components": ["r"]}, "'r' would be a component of itself"),
        ({"components": ["r@1"]}, "'r' would be a component of itself"),
        ({"components": ["a", "a"]}, "have equal names"),
        ({"components": ["a", {"scorer": "b", "name": "A"}]}, "have equal names"),
        ({"components": ["a@1", "a@2"]}, "have equal names"),
        ({"components": [{"scorer": "a", "weight": 0}]}, "a component of weight 0 changes nothing"),
        ({"components": [{"scorer": "a", "weight": -1}], "on_null": "renormalise"}, "needs positive weights"),
        ({"components": [{"scorer": "a", "weight": float("nan")}]}, "finite number"),
        ({"components": ["@1"]}, "is not a scorer; write NAME or NAME@VERSION"),
        ({"components": ["a@"]}, "is not a scorer; write NAME or NAME@VERSION"),
        ({"components": [""]}, "at least 1 character"),
        ({"components": [{"scorer": "a", "name": "value"}]}, "cannot be called 'value'"),
        ({"components": [{"scorer": "a", "name": "a b"}]}, "string_pattern_mismatch|pattern"),
        ({"components": [{"scorer": "a", "wieght": 1}]}, "Extra inputs are not permitted"),
        ({"components": ["a"], "on_nul": "null"}, "Extra inputs are not permitted"),
        ({"components": ["a"], "name": "x y"}, "pattern"),
        ({"components": ["a"], "level": "step"}, "'episode' or 'both'"),
        ({"components": [{"scorer": "a", "of": "episode"}], "level": "both"}, "no component scores steps"),
        ({"components": ["a"], "sql": "b"}, "it names 'b'; valid: the components a"),
        ({"components": ["a"], "sql": "a +"}, "syntax error"),
        ({"components": ["a-b"], "sql": "1"}, r"cannot name the components \['a-b'\]"),
        ({"components": [{"scorer": "value"}], "sql": "1"}, r"cannot name the components \['value'\]"),
        ({"components": [{"scorer": "a", "weight": 2}], "sql": "a"}, "sets the weights"),
        ({"components": ["a"], "sql": "a", "on_null": "renormalise"}, "leave out `weight` and `on_null`"),
    ],
)
def test_a_definition_that_cannot_be_meant_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RewardDefinition.model_validate({"name": "r"} | settings)


def test_a_version_is_of_the_definition_and_of_its_components() -> None:
    definition = RewardDefinition(name="r", components=(Component(scorer="a"), Component(scorer="b")))
    versions = {"a": "1", "b": "2"}
    assert definition.hash_versions(versions) == definition.hash_versions(dict(reversed(versions.items())))
    variants = [
        definition.model_copy(update={"name": "s"}),
        definition.model_copy(update={"on_null": "renormalise"}),
        definition.model_copy(update={"level": "both"}),
        definition.model_copy(update={"components": tuple(reversed(definition.components))}),
        definition.model_copy(update={"components": (Component(scorer="a", weight=2.0), Component(scorer="b"))}),
    ]
    hashes = {
        definition.hash_versions(versions),
        definition.hash_versions({"a": "1", "b": "3"}),
        *(variant.hash_versions(versions) for variant in variants),
    }
    assert len(hashes) == 7
    assert all(len(version) == 13 for version in hashes)


def test_rubric_agreement_is_a_reward_over_two_scorers() -> None:
    squared = make_rubric_agreement(generated="judge@1", true="judge@2")
    assert squared.sql.replace(" ", "") == "-power(generated-true_score,2)"
    assert [part.scorer for part in squared.components] == ["judge@1", "judge@2"]
    full = make_rubric_agreement("r", distance="absolute", terms="rubric_terms", terms_weight=0.5)
    assert full.sql.replace(" ", "") == "-abs(generated-true_score)+0.5*terms"
    assert [part.alias for part in full.components] == ["generated", "true_score", "terms"]
