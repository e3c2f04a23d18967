"""The debugging tasks: each answer follows from the prepared lake by its SQL, and is the one that was planted."""

from pathlib import Path
from typing import Any

import polars as pl
import pytest

from benchmarks.debugging_cases import plan, second_plan
from benchmarks.debugging_cases.cases import CASES, Case
from benchmarks.debugging_cases.history import build
from benchmarks.debugging_cases.second_answers import FINDERS, Tables
from benchmarks.debugging_cases.second_cases import SECOND_CASES
from benchmarks.debugging_cases.second_plan import build_second
from lake import Lake
from lake.write.scores import Annotation, annotate
from testkit.judged_lake import score_rows
from testkit.lakes import build_lake, rollout

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

SECOND_PLANTED: dict[str, dict[str, Any]] = {
    "cut_answers": {
        "first_round": second_plan.CUT_FROM,
        "max_tokens_before": "512",
        "max_tokens_after": str(second_plan.MOST_TOKENS),
    },
    "paid_for_nothing": {"task": second_plan.LAX, "first_round": second_plan.LAX_FROM},
    "known_customer": {"task": second_plan.LEAKED, "first_round": second_plan.LEAKED_FROM},
    "silent_scorer": {"scorer": second_plan.SILENT, "first_round": second_plan.SILENT_FROM},
    "never_solved": {"task": second_plan.IMPOSSIBLE, "tool": "check_stock", "tasks": 1, "best_of_all_runs": 0.0},
    "broken_off": {"run": "desk-small", "tool": "search_help", "all_ask_for_claims": True},
    "careless": {"task": second_plan.CARELESS, "rule": second_plan.RULE.strip("; "), "next_success_with": 0.0},
    "again_and_again": dict(
        zip(("round", "task", "rollout_index"), second_plan.REPEATED, strict=True), tool="find_order"
    ),
    "undone": {
        "failed": 1,
        "rollout_index": second_plan.UNDONE[2],
        "second_changes": 1,
        "street_before": "14 Harbour Street",
        "street": "41 Harbour Street",
    },
    "out_of_hand": {
        "run": "desk",
        "update": second_plan.UNSTABLE_UPDATE,
        "rate_before": 1e-6,
        "learning_rate": pytest.approx(1e-5),
    },
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    return build(tmp_path_factory.mktemp("cases"), plan.SMALL, seed=0)


def test_each_answer_is_what_was_planted_and_nothing_else_comes_close(prepared: Lake) -> None:
    _check_answers(prepared, CASES, PLANTED)


def test_the_second_set_has_one_answer_each_too(tmp_path: Path) -> None:
    assert not {case.name for case in SECOND_CASES} & {case.name for case in CASES}
    _check_answers(build_second(tmp_path, plan.SMALL, seed=0), SECOND_CASES, SECOND_PLANTED)


def _check_answers(lk: Lake, cases: tuple[Case, ...], planted: dict[str, dict[str, Any]]) -> None:
    assert set(planted) == {case.name for case in cases}
    snapshot = lk.snapshot()
    for case in cases:
        (row,) = snapshot.sql(case.sql).iter_rows(named=True)
        assert row | planted[case.name] == row, case.name
        if case.figure is not None:
            assert row[case.figure] > 2 * abs(row[f"next_{case.figure}"]), (case.name, row)


def test_a_second_script_finds_the_same_answers(prepared: Lake) -> None:
    """It reads the tables with Polars, not the views with SQL."""
    assert set(FINDERS) == {case.name for case in CASES}
    snapshot = prepared.snapshot()
    tables = Tables(snapshot)
    for case in CASES:
        (row,) = snapshot.sql(case.sql).iter_rows(named=True)
        second = FINDERS[case.name](tables)
        missing = {name for name in row if name not in second and not name.startswith("next_")}
        assert not missing, (case.name, missing)
        for name, answer in second.items():
            assert answer == (pytest.approx(row[name]) if isinstance(answer, float) else row[name]), (case.name, name)


def test_a_scorer_that_says_one_value_is_no_answer(tmp_path: Path) -> None:
    """Its correlation with people is NaN, which sorted first."""
    lk = build_lake(tmp_path, [rollout("t", n, float(n % 2)) for n in range(4)])
    rows = lk.sql("SELECT episode_id, group_id, run_id, env_return FROM episodes").to_dicts()
    values = {"constant": [0.5] * 4, "contrary": [1 - row["env_return"] for row in rows]}
    scores = pl.concat([score_rows(rows, scorer, said) for scorer, said in values.items()])
    with lk.job(kind="score") as job:
        job.write("scores", scores)
    annotate(lk, [Annotation(episode_id=row["episode_id"], value=row["env_return"]) for row in rows], "ann")
    (case,) = (case for case in CASES if case.name == "scorer_against_people")
    (row,) = lk.snapshot().sql(case.sql).iter_rows(named=True)
    assert (row["scorer"], row["against"], row["next_against"]) == ("contrary", 1.0, None)
