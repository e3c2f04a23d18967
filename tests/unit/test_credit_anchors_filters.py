"""Filters: states that are no one's anchor get A_S = 0, which is not the same as unknown."""

import polars as pl
import pytest
from pydantic import ValidationError

from lake.ids import text_hash
from pipelines.credit import GiGPO
from pipelines.credit.anchors import NoErrors, ToolResults
from pipelines.credit.estimators.anchored import AnchoredEstimator
from pipelines.credit.estimators.gigpo_loo import GiGPOLOO
from pipelines.credit.estimators.hgpo import HGPO
from testkit.anchor_keys import keys_of, steps_frame, texts


def test_only_tool_results_have_a_key() -> None:
    roles = ["tool", "user", None, "function", "tool"]
    frame = steps_frame([{"state": "s", "state_role": role} for role in roles])
    key = text_hash("s")
    assert keys_of(ToolResults(), frame) == [key, None, None, None, key]
    assert keys_of(ToolResults(roles=("tool", "function")), frame) == [key, None, None, key, key]


def test_tool_results_read_no_text() -> None:
    assert ToolResults().columns(["state", "state_hash", "state_role"]) == ("state_hash", "state_role")
    rows = [{"state_hash": 5, "state_role": "tool"}, {"state_hash": 5, "state_role": "user"}]
    assert keys_of(ToolResults(), steps_frame(rows)) == [5, None]


def test_marked_errors_have_no_key_and_an_unknown_mark_is_no_error() -> None:
    frame = steps_frame([{"state": "s", "state_is_error": mark} for mark in (True, False, None)])
    assert keys_of(NoErrors(), frame) == [None, text_hash("s"), text_hash("s")]


def test_a_column_of_nothing_but_nulls_marks_no_error() -> None:
    frame = steps_frame(texts("s")).with_columns(state_is_error=pl.lit(None))
    assert keys_of(NoErrors(), frame) == [text_hash("s")]


def test_errors_by_their_text() -> None:
    frame = steps_frame(texts("Error: no", "fine", "an error", None, ""))
    fine, an_error, empty = map(text_hash, ("fine", "an error", ""))
    assert keys_of(NoErrors(pattern="^Error"), frame) == [None, fine, an_error, None, empty]
    assert keys_of(NoErrors(pattern="(?i)error"), frame) == [None, fine, None, None, empty]
    assert keys_of(NoErrors(pattern="^$"), frame)[-1] is None


def test_a_pattern_reads_texts_and_leaves_the_mark_alone() -> None:
    assert NoErrors(pattern="x").columns(["state", "state_hash"]) == ("state_hash", "state")
    assert NoErrors().columns(["state", "state_hash"]) == ("state_hash", "state_is_error")


def test_bad_patterns_and_no_roles_are_refused() -> None:
    with pytest.raises(ValidationError, match="look-around"):
        NoErrors(pattern="(?!a)")
    with pytest.raises(ValidationError, match="at least 1"):
        NoErrors(pattern="")
    with pytest.raises(ValidationError, match="at least 1"):
        ToolResults(roles=())


@pytest.mark.parametrize("estimator", [GiGPO, GiGPOLOO, HGPO])
def test_a_state_that_is_left_out_gives_0_and_so_does_one_that_was_not_recorded(
    estimator: type[AnchoredEstimator],
) -> None:
    rows = [
        {"state": "a", "state_is_error": True},
        {"state": "b", "state_is_error": False},
        {"state": None, "state_is_error": None},
    ]
    steps = steps_frame(rows).with_columns(reward=pl.lit(1.0), episode_score=pl.lit(1.0))
    actual = estimator(anchors=NoErrors()).advantages(steps.lazy()).collect()
    assert actual["a_step"].to_list() == [0.0, 0.0, 0.0]
    assert actual["advantage"].to_list() == [0.0, 0.0, 0.0]
    assert actual["anchor_key"].is_null().to_list() == [True, False, True]
    flags = actual["flags"].str.split(",")
    assert flags.list.contains("left_out").to_list() == [True, False, False]
    assert flags.list.contains("unknown_state").to_list() == [False, False, True]


def test_a_state_that_is_left_out_without_a_known_return_is_unknown_all_the_same() -> None:
    rows = [{"state": "a", "state_is_error": True}]
    steps = steps_frame(rows).with_columns(reward=pl.lit(None, pl.Float64), episode_score=pl.lit(1.0))
    actual = GiGPO(anchors=NoErrors()).advantages(steps.lazy()).collect()
    assert actual["a_step"].to_list() == [None]
