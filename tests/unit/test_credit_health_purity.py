"""What is seen at shared anchors: hashed while it is read, in the rows' order or not, with the same figures."""

from collections.abc import Mapping

import polars as pl
from polars.testing import assert_frame_equal

from lake.ids import text_hash
from pipelines.credit import GiGPO
from pipelines.credit.health import measure_purity, select_step_facts
from testkit.credit_strategies import frame

COLUMNS = ("action", "tool_calls", "state_is_error", "state_hash")
WALKS = {0: "aab", 1: "ab", 2: "ba", 3: "zz"}


def advantages() -> pl.DataFrame:
    rows = [
        {"episode_id": e, "group_id": e // 3, "step_index": n, "state": letter, "episode_score": float(e % 2)}
        for e, walk in WALKS.items()
        for n, letter in enumerate(walk)
    ]
    return GiGPO(step_source="terminal_score").advantages(frame(rows).drop("state_hash").lazy()).collect()


def steps(texts: Mapping[str, str | None]) -> pl.DataFrame:
    """The steps of the walks; `texts` has the state behind a letter, where it is not the letter itself."""
    rows = [
        {
            **{"episode_id": e, "step_index": n, "action": f"go {e % 2}", "tool_calls": None},
            "state_is_error": letter == "b",
            "state_hash": None if (text := texts.get(letter, letter)) is None else text_hash(text),
        }
        for e, walk in WALKS.items()
        for n, letter in enumerate(walk)
    ]
    schema = {"episode_id": pl.Int64, "step_index": pl.Int32, "action": pl.String, "tool_calls": pl.String}
    return pl.DataFrame(rows, schema=schema | {"state_is_error": pl.Boolean, "state_hash": pl.Int64})


def select_facts(present: tuple[str, ...] = COLUMNS, **texts: str | None) -> pl.DataFrame:
    return steps(texts).select("episode_id", "step_index", *select_step_facts(present))


def test_figures_by_hand() -> None:
    """`a` is a first state and entered by one action, `b` is a first state and entered by two, and an error text."""
    purity = measure_purity(advantages(), select_facts())
    assert purity.to_dicts() == [
        {
            "group_id": 0,
            "one_action_anchors": 0,
            "last_actions_mean": (1 + 2) / 2,
            "error_anchors": 1,
            "error_steps": 3,
            "empty_steps": 0,
        }
    ]


def test_steps_in_empty_states_are_those_of_anchors_that_say_nothing_and_are_no_errors() -> None:
    assert measure_purity(advantages(), select_facts(a=""))["empty_steps"].to_list() == [4]
    assert measure_purity(advantages(), select_facts(a="[]", b="null"))["empty_steps"].to_list() == [4], (
        "`b` counts as an error text"
    )
    without_marks = select_facts(("state_hash",), a="said", b=" null")
    assert measure_purity(advantages(), without_marks)["empty_steps"].to_list() == [3]
    assert measure_purity(advantages(), select_facts(a=None, b=None))["empty_steps"].to_list() == [0], (
        "not known, so not empty"
    )


def test_an_anchor_of_several_texts_is_empty_only_if_all_that_are_known_are() -> None:
    nothing, is_first = text_hash(""), pl.col("episode_id") == 0
    facts = select_facts(a="")
    unknown = facts.with_columns(state_hash=pl.when(is_first).then(pl.lit(None, pl.Int64)).otherwise("state_hash"))
    assert unknown.filter(state_hash=nothing).height == 2
    assert measure_purity(advantages(), unknown)["empty_steps"].to_list() == [4]
    hashed = facts.with_columns(state_hash=pl.when(is_first).then(pl.lit(text_hash("a"))).otherwise("state_hash"))
    assert measure_purity(advantages(), hashed)["empty_steps"].to_list() == [0]


def test_the_order_of_the_steps_does_not_matter() -> None:
    rows, facts = advantages(), select_facts()
    assert_frame_equal(measure_purity(rows, facts.reverse()), measure_purity(rows, facts))
    doubled = pl.concat([facts, facts.with_columns(episode_id=pl.col("episode_id") + 10)])
    assert_frame_equal(measure_purity(rows, doubled), measure_purity(rows, facts))


def test_what_was_read_as_a_hash_is_taken_as_it_is() -> None:
    hashed = select_facts()
    assert hashed.schema["taken"] == pl.UInt64
    again = hashed.select("episode_id", "step_index", *select_step_facts(hashed.columns))
    assert again.equals(hashed)


def test_only_what_was_looked_at_has_figures() -> None:
    assert measure_purity(advantages(), select_facts(("action",))).columns == [
        "group_id",
        "one_action_anchors",
        "last_actions_mean",
    ]
    assert measure_purity(advantages(), select_facts(("state_is_error",))).columns == [
        "group_id",
        "error_anchors",
        "error_steps",
    ]
    assert measure_purity(advantages(), select_facts(("state_hash",))).columns == ["group_id", "empty_steps"]
    alone = advantages().filter(pl.col("group_id") == 1)
    assert measure_purity(alone, select_facts()).is_empty(), "nobody shares a state"
    assert measure_purity(alone, select_facts()).columns == measure_purity(advantages(), select_facts()).columns
