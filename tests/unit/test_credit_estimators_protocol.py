"""What all estimators share: the registry, the columns they ask for, the refusals, the checks of what they read."""

import ast
import inspect
import subprocess
import sys
from typing import Any

import polars as pl
import pytest
from pydantic import ValidationError

from lake.errors import ContractError, UsageError
from pipelines.credit.estimators import ESTIMATORS, REFUSED, find_estimator, needs_siblings
from pipelines.credit.estimators.protocol import Estimator
from pipelines.credit.steps import InputNeeds, make_output_schema
from testkit.estimator_strategies import IN_BATCHES, INCREMENTAL, NAMES, wide_frame

ROWS = [
    {"episode_id": e, "group_id": 1, "step_index": i, "state_hash": i, "reward": float(e), "episode_score": float(e)}
    | {"value_estimate": 0.5, "final_value_estimate": 0.0, "completion_tokens": 5, "policy_version": 3}
    | {"score_a": float(e), "score_b": 1.0}
    for e in range(2)
    for i in range(2)
]


def make_estimator(name: str, **options: Any) -> Estimator:
    needed: dict[str, Any] = {"batch_key": "policy_version"} if name in IN_BATCHES else {}
    if name == "gdpo":
        needed["components"] = {"a": 1.0, "b": 2.0}
    return find_estimator(name)(**{**needed, **options})


# ---------------------------------------------------------------- registry and refusals


def test_every_registered_name_is_a_class_of_that_name() -> None:
    assert len(ESTIMATORS) == len(NAMES) == 14
    for name, estimator in ESTIMATORS.items():
        assert issubclass(estimator, Estimator)
        assert estimator.name == name
        assert "code-block" in (estimator.__doc__ or ""), name


def test_listing_estimators_imports_none_of_them() -> None:
    code = (
        "import sys; from pipelines.credit.estimators import ESTIMATORS; list(ESTIMATORS);"
        "print(*(m for m in sys.modules if m.startswith('pipelines.credit.estimators.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lazy = {f"pipelines.credit.estimators.{name}" for name in NAMES} - {"pipelines.credit.estimators.gigpo"}
    assert not lazy & set(done.stdout.split())


@pytest.mark.parametrize("name", NAMES)
def test_what_needs_siblings_gives_a_lone_episode_nothing(name: str) -> None:
    """Two groups of one episode each, in one batch."""
    rows = [{**row, "group_id": row["episode_id"]} for row in ROWS]
    estimator = make_estimator(name)
    advantage_values = estimator.advantages(wide_frame(rows).lazy()).collect()["advantage"]
    assert needs_siblings(estimator) == (advantage_values.fill_null(0.0).abs().max() == 0)
    if "singleton" in type(estimator).model_fields:
        assert not needs_siblings(make_estimator(name, singleton="raw"))


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_refusal_says_why_and_what_instead(name: str) -> None:
    with pytest.raises(UsageError, match=rf"{name} is not offered: .+ Instead: .+\.") as refused:
        find_estimator(name)
    assert REFUSED[name] in str(refused.value)
    assert name not in ESTIMATORS


def test_token_level_methods_are_refused() -> None:
    with pytest.raises(UsageError, match=r"forward pass.*value_estimate"):
        find_estimator("token_gae")
    with pytest.raises(UsageError, match=r"part of the loss.*`kl_in_reward` .*`ratios`"):
        find_estimator("token_kl")


def test_an_unknown_name_lists_what_is_valid() -> None:
    with pytest.raises(UsageError, match=r"no estimator 'gigpoo'; valid: batch_std, .*, rloo"):
        find_estimator("gigpoo")


# ---------------------------------------------------------------- options


@pytest.mark.parametrize("name", NAMES)
def test_a_configuration_survives_json_and_is_frozen(name: str) -> None:
    config = make_estimator(name, truncated="mask")
    assert type(config).model_validate_json(config.model_dump_json()) == config
    with pytest.raises(ValidationError, match="frozen"):
        config.truncated = "keep"
    with pytest.raises(ValidationError, match="extra"):
        make_estimator(name, no_such_option=1)


@pytest.mark.parametrize("name", NAMES)
def test_every_option_is_documented_under_its_field(name: str) -> None:
    """A docstring under each field of each class that brings one."""
    for home in ESTIMATORS[name].__mro__:
        if not home.__module__.startswith("pipelines.credit.estimators"):
            continue
        tree = ast.parse(inspect.getsource(sys.modules[home.__module__]))
        (body,) = (node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == home.__name__)
        for statement, following in zip(body, [*body[1:], None], strict=True):
            if isinstance(statement, ast.AnnAssign) and "ClassVar" not in ast.unparse(statement.annotation):
                assert isinstance(following, ast.Expr), (home, ast.unparse(statement))
                assert isinstance(following.value, ast.Constant)


@pytest.mark.parametrize("name", IN_BATCHES)
@pytest.mark.parametrize(("key", "words"), [(None, "none is given"), ("status", "'status' cannot be one")])
def test_a_batch_must_be_named(name: str, key: str | None, words: str) -> None:
    with pytest.raises(ValidationError, match=f"{name} normalises over a batch .*{words}.*batch_key=all"):
        make_estimator(name, batch_key=key)
    assert ESTIMATORS[name].incremental is False


def test_the_others_are_incremental() -> None:
    assert INCREMENTAL
    assert all(ESTIMATORS[name].incremental for name in INCREMENTAL)
    assert all(getattr(make_estimator(name), "batch_key", None) is None for name in INCREMENTAL)


# ---------------------------------------------------------------- needed columns


@pytest.mark.parametrize(
    ("name", "options", "needs"),
    [
        ("grpo", {}, InputNeeds(episode_score=True)),
        ("grpo", {"episode_source": "sum_rewards"}, InputNeeds(step_columns=("reward",))),
        ("opo", {}, InputNeeds(episode_columns=("completion_tokens",), episode_score=True)),
        ("opo", {"length": "steps"}, InputNeeds(episode_score=True)),
        ("batch_std", {}, InputNeeds(episode_columns=("policy_version",), episode_score=True)),
        ("batch_std", {"batch_key": "all"}, InputNeeds(episode_score=True)),
        ("gdpo", {}, InputNeeds(episode_columns=("policy_version",), components=("a", "b"))),
        ("reinforce_pp", {"batch_key": "all"}, InputNeeds(step_columns=("reward",))),
        (
            "gae",
            {},
            InputNeeds(step_columns=("reward", "value_estimate"), episode_columns=("final_value_estimate",)),
        ),
        (
            "gae",
            {"step_source": "terminal_score"},
            InputNeeds(step_columns=("value_estimate",), episode_columns=("final_value_estimate",), episode_score=True),
        ),
        (
            "hgpo",
            {},
            InputNeeds(step_columns=("reward",), anchor_columns=("state_hash",), episode_score=True),
        ),
    ],
)
def test_needed_columns(name: str, options: dict[str, Any], needs: InputNeeds) -> None:
    assert make_estimator(name, **options).input_needs() == needs


@pytest.mark.parametrize("name", NAMES)
def test_what_is_needed_is_enough_and_none_of_it_can_be_missing(name: str) -> None:
    estimator = make_estimator(name)
    steps = wide_frame(ROWS)
    required = estimator.input_needs(steps.columns).required
    actual = estimator.advantages(steps.select(required).lazy()).collect()
    assert actual.schema == make_output_schema(steps.schema)
    assert actual["advantage"].null_count() == 0
    for column in required:
        column_asked = "state" if column == "state_hash" else column  # without the hash, the text would do
        with pytest.raises(ContractError, match=rf"column {column_asked} is missing.*reads .*{column_asked}"):
            estimator.advantages(steps.select(required).drop(column).lazy())


def test_the_column_of_a_component_is_named_after_its_scorer() -> None:
    assert make_estimator("gdpo").input_needs().of_episodes == ("policy_version", "score_a", "score_b")


@pytest.mark.parametrize("name", NAMES)
def test_the_code_of_an_estimator_is_its_classes(name: str) -> None:
    names = [module.__name__ for module in ESTIMATORS[name].code()]
    assert f"pipelines.credit.estimators.{name}" in names
    assert "pipelines.credit.estimators.protocol" in names
    assert names == sorted(set(names))


def test_no_rows_give_no_rows() -> None:
    for name in NAMES:
        actual = make_estimator(name).advantages(wide_frame([]).lazy()).collect()
        assert actual.is_empty()
        assert actual.schema == make_output_schema(wide_frame([]).schema)


# ---------------------------------------------------------------- checks of what only some estimators read


@pytest.mark.parametrize(
    ("name", "column", "values", "words"),
    [
        ("gae", "value_estimate", [0.0, float("nan"), 0.0, 0.0], "step_index 1: value_estimate nan is not a finite"),
        ("gae", "final_value_estimate", [0.0, 0.0, 1e101, 1e101], "episode 1, .*final_value_estimate 1e[+]101 is not"),
        ("gae", "final_value_estimate", [0.0, 1.0, 0.0, 0.0], "step_index 1: final_value_estimate 1.0 differs"),
        ("gdpo", "score_a", [0.0, None, 0.0, 0.0], "score_a None differs from the step before"),
        ("batch_std", "policy_version", [3, 3, 3, 4], "episode 1, step_index 1: policy_version 4 differs"),
        ("opo", "completion_tokens", [5, 6, 5, 5], "completion_tokens 6.0 differs"),
    ],
)
def test_faults_of_further_columns_name_the_episode(name: str, column: str, values: list[Any], words: str) -> None:
    steps = wide_frame(ROWS).with_columns(pl.Series(column, values))
    with pytest.raises(ContractError, match=words):
        make_estimator(name).advantages(steps.lazy()).collect()


def test_inactive_rows_are_not_looked_at() -> None:
    steps = wide_frame(ROWS).with_columns(
        is_active=pl.col("step_index") == 0,
        value_estimate=pl.when(pl.col("step_index") == 1).then(float("nan")).otherwise(0.0),
    )
    assert make_estimator("gae").advantages(steps.lazy()).collect()["advantage"].to_list() == [0.0, 1.0]


def test_a_column_of_a_wrong_type_is_refused_at_once() -> None:
    steps = wide_frame(ROWS).with_columns(value_estimate=pl.lit("0.5"))
    with pytest.raises(ContractError, match="value_estimate has type String, expected number"):
        make_estimator("gae").advantages(steps.lazy())
    steps = wide_frame(ROWS).with_columns(score_b=pl.lit("high"))
    with pytest.raises(ContractError, match="score_b has type String, expected number"):
        make_estimator("gdpo").advantages(steps.lazy())


def test_a_batch_key_may_be_text() -> None:
    steps = wide_frame(ROWS).with_columns(round_name=pl.lit("first"))
    actual = make_estimator("reinforce_pp", batch_key="round_name").advantages(steps.lazy()).collect()
    assert actual["advantage"].null_count() == 0
