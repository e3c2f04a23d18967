"""Filters: states that are nobody's anchor become unknown, which is not the same as alone."""

import polars as pl
import pytest
from pydantic import ValidationError

from lake.ids import text_hash
from pipelines.credit import GiGPO
from pipelines.credit.anchors import NoErrors, ToolResults
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


def test_a_filtered_step_has_no_step_advantage_while_a_lonely_one_has_0() -> None:
    rows = [{"state": "a", "state_is_error": True}, {"state": "b", "state_is_error": False}]
    steps = steps_frame(rows).with_columns(reward=pl.lit(1.0), episode_score=pl.lit(1.0))
    found = GiGPO(anchors=NoErrors()).advantages(steps.lazy()).collect()
    assert found["a_step"].to_list() == [None, 0.0]
    assert found["advantage"].to_list() == [None, 0.0]
    assert ["unknown_state" in flags for flags in found["flags"]] == [True, False]
