"""Every fault of an input is an error that names the episode; NULL is no fault."""

import math
from typing import Any

import polars as pl
import pytest

from lake.errors import ContractError
from pipelines.credit import GiGPO
from testkit.credit_strategies import frame

CONFIG = GiGPO(episode_source="sum_rewards")


def episode(number: int, steps: int, **columns: Any) -> list[dict[str, Any]]:
    return [{"episode_id": number, "group_id": 1, "step_index": i, **columns} for i in range(steps)]


def error(steps: pl.DataFrame, config: GiGPO = CONFIG) -> str:
    """The message; it comes when the result is collected, not before."""
    lazy = config.advantages(steps.lazy())
    with pytest.raises(ContractError) as caught:
        lazy.collect()
    return str(caught.value)


def test_a_duplicate_step_names_the_episode() -> None:
    message = error(frame([*episode(7, 3), *episode(8, 3), episode(8, 3)[1]]))
    assert message.startswith("steps: episode 8, step_index 1: duplicate")


@pytest.mark.parametrize("present", [[0, 2], [1, 2], [-1, 0]])
def test_a_gap_names_the_episode(present: list[int]) -> None:
    rows = [{"episode_id": 8, "group_id": 1, "step_index": i} for i in present]
    message = error(frame([*episode(7, 2), *rows]))
    assert message.startswith(f"steps: episode 8, step_index {present[present[0] == 0]}: duplicate, missing")
    assert "0, 1, 2, ..." in message


def test_inactive_steps_count_for_the_numbering() -> None:
    rows = episode(7, 3)
    rows[1]["is_active"] = False
    assert CONFIG.advantages(frame(rows).lazy()).collect()["step_index"].to_list() == [0, 2]
    assert "episode 7" in error(frame([rows[0], rows[2]]))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e101])
def test_a_reward_that_is_no_number(value: float) -> None:
    rows = [*episode(7, 2), *episode(8, 2)]
    rows[3]["reward"] = value
    message = error(frame(rows))
    assert message.startswith(f"steps: episode 8, step_index 1: reward {value}")
    assert "Write NULL" in message
    rows[3]["is_active"] = False
    assert CONFIG.advantages(frame(rows).lazy()).collect().height == 3


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_score_that_is_no_number(value: float) -> None:
    message = error(frame([*episode(7, 2, episode_score=1.0), *episode(8, 2, episode_score=value)]), GiGPO())
    assert message.startswith(f"steps: episode 8: episode_score {value}")


def test_an_episode_in_two_groups() -> None:
    rows = [*episode(7, 2), *({**row, "group_id": 2} for row in episode(7, 2))]
    assert error(frame([*rows, *episode(8, 1)])).startswith("steps: episode 7 is in 2 groups (1, 2)")


@pytest.mark.parametrize("status", ["done", "Completed", None])
def test_an_unknown_status(status: str | None) -> None:
    message = error(frame([*episode(7, 1), *episode(8, 1, status=status)]))
    assert message.startswith(
        f"steps: episode 8, step_index 0: status {status!r} is invalid; valid: completed, truncated"
    )


@pytest.mark.parametrize(("column", "values"), [("status", ["completed", "failed"]), ("episode_score", [1.0, None])])
def test_what_belongs_to_the_episode_may_not_change_within_it(column: str, values: list[Any]) -> None:
    rows = episode(8, 2)
    for row, value in zip(rows, values, strict=True):
        row[column] = value
    message = error(frame([*episode(7, 1), *rows]), GiGPO())
    assert message.startswith("steps: episode 8, step_index 1: ")
    assert column in message
    assert "the step before" in message


@pytest.mark.parametrize("key", ["episode_id", "group_id", "step_index"])
def test_a_null_key(key: str) -> None:
    rows = episode(7, 2)
    rows[1][key] = None
    assert error(frame(rows)).startswith(f"steps: {key} is NULL in 1 rows")


def test_text_ids_are_named_as_text() -> None:
    steps = frame(episode(8, 2)).with_columns(episode_id=pl.lit("run/8"), step_index=pl.lit(0))
    assert error(steps).startswith("steps: episode 'run/8', step_index 0: duplicate")


@pytest.mark.parametrize(
    ("config", "column"),
    [
        (GiGPO(), "episode_score"),
        (GiGPO(), "reward"),
        (GiGPO(episode_source="sum_rewards"), "reward"),
        (GiGPO(episode_source="sum_rewards", step_source="terminal_score"), "reward"),
        (GiGPO(episode_source="sum_rewards", step_source="terminal_score"), "episode_score"),
        (GiGPO(episode_source="sum_rewards", step_source="rewards_plus_terminal"), "episode_score"),
        (GiGPO(), "step_index"),
        (GiGPO(anchors={"kind": "similarity"}), "state"),
    ],
)
def test_a_missing_column_is_told_at_once(config: GiGPO, column: str) -> None:
    with pytest.raises(ContractError, match=f"column {column} is missing"):
        config.advantages(frame(episode(7, 1)).drop(column).lazy())


def test_without_any_state_the_message_names_state() -> None:
    with pytest.raises(ContractError, match="column state is missing"):
        CONFIG.advantages(frame(episode(7, 1)).drop("state", "state_hash").lazy())


@pytest.mark.parametrize(
    ("config", "columns"),
    [
        (CONFIG, ["episode_score", "status", "is_active", "is_action_valid", "state"]),
        (GiGPO(step_source="terminal_score"), ["reward", "status", "is_active", "is_action_valid", "state"]),
    ],
)
def test_columns_that_are_not_needed_may_be_absent(config: GiGPO, columns: list[str]) -> None:
    steps = frame([*episode(7, 2, episode_score=1.0, state_hash=4), *episode(8, 1, episode_score=0.0, state_hash=4)])
    absent = config.advantages(steps.drop(columns).lazy()).collect()
    assert absent.equals(config.advantages(steps.lazy()).collect())


@pytest.mark.parametrize(
    ("column", "dtype"),
    [("step_index", pl.Float64), ("reward", pl.String), ("is_active", pl.Int8), ("group_id", pl.Float64)],
)
def test_a_wrong_type_is_told_at_once(column: str, dtype: pl.DataType) -> None:
    with pytest.raises(ContractError, match=f"column {column} has type {dtype}, expected"):
        CONFIG.advantages(frame(episode(7, 1)).with_columns(pl.lit(None, dtype).alias(column)).lazy())


def test_narrow_and_untyped_columns_are_taken() -> None:
    steps = frame(episode(7, 2, reward=0.5)).with_columns(pl.col("reward").cast(pl.Float32), is_active=pl.lit(None))
    actual = CONFIG.advantages(steps.lazy()).collect()
    assert actual["return_to_go"].to_list() == [0.5 + 0.95 * 0.5, 0.5]
    unknown = CONFIG.advantages(steps.with_columns(reward=pl.lit(None)).lazy()).collect()
    assert unknown["return_to_go"].null_count() == 2


def test_no_rows_and_no_active_rows_give_an_empty_result() -> None:
    steps = frame(episode(7, 2, is_active=False))
    for empty in (steps, steps.clear()):
        actual = CONFIG.advantages(empty.lazy()).collect()
        assert actual.is_empty()
        assert actual.schema == CONFIG.advantages(frame(episode(7, 1)).lazy()).collect().schema
