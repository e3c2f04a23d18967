"""The debugging tasks: each answer follows from the prepared lake by its SQL, and is the one that was planted."""

from typing import Any

import pytest

from benchmarks.debugging_cases import plan
from benchmarks.debugging_cases.cases import CASES
from benchmarks.debugging_cases.history import build
from lake import Lake

PLANTED: dict[str, dict[str, Any]] = {
    "reward_fell": {"tool": "track_parcel", "first_round": plan.NORDPOST_FAILS_FROM, "tasks": "parcel-2"},
    "false_anchor": {"state": "[]", "ways_in": "find_order search_help"},
    "tool_began_to_fail": {"tool": "verify_customer", "first_round": plan.IDENTITY_FAILS_FROM},
    "update_17": {"groups_with_signal": 1, "smallest_gradient": plan.DEAD_UPDATE},
    "length_hacking": {"run": "shop-judge", "first_round": plan.PADDING_FROM},
    "two_runs": {"setting": "max_steps", "of_shop": "10", "of_shop_short": "6", "family": "exchange"},
    "sibling_step": {"step": 2, "better": "check_stock", "worse": "refund", "states": 1},
    "scorer_against_people": {"scorer": "empathy"},
    "stale_update": {"update": plan.STALE_UPDATE, "played_in_round": plan.STALE_ROUND},
    "stale_credit": {
        "retracted_of": plan.RETRACTED,
        "retracted": 3,
        "replaced_of": plan.RETRIED,
        "replaced": 2,
        "round": plan.SPOILED_ROUND,
        "groups": 2,
    },
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    return build(tmp_path_factory.mktemp("cases"), plan.SMALL, seed=0)


def test_each_answer_is_what_was_planted_and_nothing_else_comes_close(prepared: Lake) -> None:
    assert set(PLANTED) == {case.name for case in CASES}
    snapshot = prepared.snapshot()
    for case in CASES:
        (row,) = snapshot.sql(case.sql).iter_rows(named=True)
        assert row | PLANTED[case.name] == row, case.name
        if case.figure is not None:
            assert row[case.figure] > 2 * abs(row[f"next_{case.figure}"]), (case.name, row)
