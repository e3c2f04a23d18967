"""A frame against its table: what is filled in, what is cast, and what is refused with table, column and row key."""

from datetime import UTC, date, datetime, timedelta, timezone
from typing import Any

import polars as pl
import pytest

from lake import ids
from lake.errors import ContractError
from lake.tables import TABLES
from lake.tables.contracts import conform

METRICS, TOKENS, SCORES = TABLES["metrics"], TABLES["tokens"], TABLES["scores"]
AT = datetime(2026, 1, 1, tzinfo=UTC)
METRIC: dict[str, Any] = {
    "job_id": 1,
    "attempt": 0,
    "step": 5,
    "name": "loss",
    "value": 0.5,
    "at": AT,
    "write_id": 2,
}
TOKEN: dict[str, Any] = {
    "episode_id": 1,
    "step_index": 0,
    "encoding_id": 3,
    "group_id": 4,
    "run_id": "run",
    "write_id": 5,
    "provenance": "engine",
    "n_context": 1,
    "n_action": 1,
    "n_trained": 1,
    "has_logprobs": True,
    "prefix_length": 0,
    "context_ids": [1],
    "action_ids": [2],
    "action_logprobs": [-0.5],
    "action_mask": [True],
}


def metric(**values: Any) -> pl.DataFrame:
    return pl.DataFrame([METRIC | values])


def token(**values: Any) -> pl.DataFrame:
    return pl.DataFrame([TOKEN | values])


def refused(frame: pl.DataFrame, name: str, *says: str) -> None:
    """The frame is refused, and the message holds every text."""
    with pytest.raises(ContractError) as raised:
        conform(frame, TABLES[name])
    for text in (f"`{name}`", *says):
        assert text in str(raised.value)
    assert "\n" not in str(raised.value)


# ---------------------------------------------------------------- columns


def test_columns_come_in_the_order_and_with_the_types_of_the_spec() -> None:
    frame = conform(metric().select(reversed(METRIC)), METRICS)
    assert frame.schema == METRICS.polars()
    assert frame.to_dicts() == [METRIC]


def test_columns_that_may_be_unknown_may_be_left_out() -> None:
    frame = conform(token().drop("action_logprobs"), TOKENS)
    assert frame.schema == TOKENS.polars()
    assert frame.select("action_logprobs", "temperature", "version_spans").row(0) == (None, None, None)


def test_a_frame_without_rows_conforms() -> None:
    assert conform(metric().head(0), METRICS).schema == METRICS.polars()


def test_an_unknown_column_is_refused_with_the_known_ones() -> None:
    refused(metric(lr=1.0, extra=2), "metrics", "no column `lr`, `extra`", "its columns: `job_id`, `attempt`")


def test_a_missing_column_is_refused() -> None:
    refused(metric().drop("name", "at"), "metrics", "needs column `name`, `at`", "the frame has `job_id`")


# ---------------------------------------------------------------- types


@pytest.mark.parametrize(
    ("column", "value", "dtype", "expected"),
    [
        ("step", 5, pl.UInt8, 5),
        ("step", 5, pl.Int128, 5),
        ("attempt", 2**31 - 1, pl.Int64, 2**31 - 1),
        ("value", 1, pl.Int64, 1.0),
        ("value", 0.5, pl.Float32, 0.5),
        ("value", None, pl.Null, None),
        ("name", "loss", pl.Categorical, "loss"),
        ("name", "loss", pl.Enum(["loss"]), "loss"),
        ("at", datetime(2026, 1, 1), pl.Datetime("ms"), AT),  # noqa: DTZ001 - a time without a zone is UTC
        ("at", date(2026, 1, 1), pl.Date, AT),
    ],
)
def test_a_cast_that_keeps_the_value_is_made(column: str, value: Any, dtype: Any, expected: Any) -> None:
    frame = metric().with_columns(pl.Series(column, [value], dtype=dtype))
    assert conform(frame, METRICS).to_dicts() == [METRIC | {column: expected}]


def test_a_time_in_another_zone_is_the_same_moment() -> None:
    elsewhere = AT.astimezone(timezone(timedelta(hours=-5)))
    assert conform(metric(at=elsewhere), METRICS)["at"].to_list() == [AT]


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("step", 2.5),
        ("step", 2.0),
        ("step", "5"),
        ("step", True),
        ("value", "0.5"),
        ("value", True),
        ("name", 5),
        ("name", b"loss"),
        ("at", 5),
        ("at", "2026-01-01"),
        ("value", [0.5]),
        ("value", object()),
    ],
)
def test_a_cast_that_could_change_the_value_is_refused(column: str, value: Any) -> None:
    refused(metric(**{column: value}), "metrics", f"column `{column}`: the frame has", "valid:")


@pytest.mark.parametrize(
    ("column", "value"),
    [("context_ids", [1.5]), ("context_ids", "1"), ("action_mask", [1]), ("action_logprobs", ["x"])],
)
def test_elements_of_lists_are_held_to_the_same_rule(column: str, value: Any) -> None:
    refused(token(**{column: value}), "tokens", f"column `{column}`: the frame has", "valid: List")


@pytest.mark.parametrize(("column", "value"), [("attempt", 2**31), ("attempt", -(2**31) - 1)])
def test_a_number_out_of_range_is_refused(column: str, value: int) -> None:
    refused(metric(**{column: value}), "metrics", column, str(value))


def test_an_id_beyond_int64_is_refused() -> None:
    frame = metric().with_columns(pl.Series("job_id", [2**63], dtype=pl.UInt64))
    refused(frame, "metrics", "job_id")


def test_a_token_id_out_of_range_is_refused() -> None:
    refused(token(context_ids=[2**31]), "tokens", str(2**31))


@pytest.mark.parametrize("value", [[], [0, 2**31 - 1]])
def test_lists_may_be_empty_and_hold_any_token_id(value: list[int]) -> None:
    assert conform(token(context_ids=value), TOKENS)["context_ids"].to_list() == [value]


# ---------------------------------------------------------------- values


@pytest.mark.parametrize("column", [column.name for column in METRICS.columns if column.required])
def test_a_null_where_a_value_is_needed_is_refused(column: str) -> None:
    refused(metric(**{column: None}), "metrics", f"column `{column}`", "is NULL in 1 row", "NULL is not allowed")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_is_refused(value: float) -> None:
    refused(metric(value=value), "metrics", "column `value`", f"({value})", "or NULL if unknown")
    refused(token(action_logprobs=[value]), "tokens", "column `action_logprobs`", "not finite")


def test_a_number_that_float32_cannot_hold_is_refused() -> None:
    refused(token(action_logprobs=[-1e300]), "tokens", "column `action_logprobs`", "not finite")


@pytest.mark.parametrize(
    ("column", "value"),
    [("context_ids", [1, None]), ("action_logprobs", [None, -0.5]), ("action_mask", [None, True])],
)
def test_a_null_inside_a_list_is_refused(column: str, value: list[Any]) -> None:
    refused(token(**{column: value}), "tokens", f"column `{column}`", "holds a NULL")


def test_a_word_outside_of_its_vocabulary_is_refused() -> None:
    refused(token(provenance="guessed"), "tokens", "column `provenance`", "('guessed')", "valid: engine, rendered")
    assert conform(token(logprobs_mode=None), TOKENS)["logprobs_mode"].to_list() == [None]


# ---------------------------------------------------------------- messages


def test_the_message_names_the_first_bad_row_by_its_key_and_counts_the_rest() -> None:
    good, bad = METRIC, METRIC | {"job_id": 77, "step": 9, "value": float("nan")}
    refused(
        pl.DataFrame([good, bad, bad | {"step": 10}]),
        "metrics",
        f"job_id={ids.to_text(77)}, name=loss, step=9",
        "in 2 rows",
    )


def test_a_key_that_is_null_itself_is_shown() -> None:
    row = {"episode_id": None, "group_id": 1, "run_id": "r", "job_id": 1, "series_id": 1, "write_id": 1}
    frame = pl.DataFrame([row | {"scorer": "s", "scorer_version": "1"}])
    refused(frame, "scores", "row episode_id=None, step_index=None, scorer=s")
    assert conform(frame.with_columns(episode_id=pl.lit(1)), SCORES)["step_index"].to_list() == [None]


def test_a_long_value_is_cut() -> None:
    with pytest.raises(ContractError) as raised:
        conform(token(context_ids=[*range(10_000), None]), TOKENS)
    assert len(str(raised.value)) < 400
