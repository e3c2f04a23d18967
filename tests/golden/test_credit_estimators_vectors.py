"""What the vectors of the reference implementation of GiGPO say about its relatives: GRPO, Dr. GRPO, and returns.

That code made the vectors, in float32. test_credit_estimators_gigpo_vectors.py says what is compared, and what differs
on purpose.
"""

import json
from typing import Any

import polars as pl
import pytest

from pipelines.credit.estimators import ESTIMATORS
from testkit.shared import shared_data

VECTORS = ["01_basic_sparse", "02_edges_dense", "04_similarity_0p9"]
ATOL = 5e-6
Key = tuple[str, int]


def load(name: str) -> tuple[dict[str, Any], dict[Key, dict[str, Any]]]:
    """Parameters, and the active rows by (trajectory, step)."""
    document = json.loads(shared_data("gigpo_golden", f"{name}.json").read_text())
    rows = {(row["traj_id"], row["step_index"]): row for row in document["rows"]}
    return document["meta"]["params"], rows


def run(estimator: str, rows: dict[Key, dict[str, Any]], **options: Any) -> dict[Key, dict[str, Any]]:
    steps = pl.DataFrame(
        [
            {
                "episode_id": row["traj_id"],
                "group_id": row["group_id"],
                "step_index": row["step_index"],
                "reward": row["reward"],
                "is_active": row["active"],
                "is_action_valid": row["valid"],
                "value_estimate": 0.0,
                "final_value_estimate": None,
            }
            for row in rows.values()
        ]
    )
    frame = ESTIMATORS[estimator](**options).advantages(steps.lazy()).collect()
    return {(row["episode_id"], row["step_index"]): row for row in frame.iter_rows(named=True)}


@pytest.mark.parametrize(("estimator", "norm"), [("grpo", "mean_std_norm"), ("dr_grpo", "mean_norm")])
@pytest.mark.parametrize("name", VECTORS)
def test_grpo_over_rows_is_the_references_episode_advantage(name: str, estimator: str, norm: str) -> None:
    params, rows = load(name)
    advantages = run(
        estimator,
        rows,
        episode_source="sum_rewards",
        baseline="rows",
        singleton="raw",
        invalid_action_penalty=params["invalid_action_penalty_coef"],
    )
    assert set(advantages) == {key for key, row in rows.items() if row["active"]}
    for key, ours in advantages.items():
        theirs = rows[key]
        if not (theirs["constant_episode_group"] and norm == "mean_std_norm"):
            assert ours["advantage"] == pytest.approx(theirs[f"A_E_{norm}"], abs=ATOL, rel=0)
        assert ours["advantage"] == pytest.approx(theirs[f"A_E_{norm}_f64"], abs=1e-6, rel=0)


@pytest.mark.parametrize("name", VECTORS)
def test_returns_are_the_references(name: str) -> None:
    params, rows = load(name)
    gamma = params["gamma"]
    for key, ours in run("discounted_grpo", rows, gamma=gamma).items():
        assert ours["return_to_go"] == pytest.approx(rows[key]["discounted_return"], abs=ATOL, rel=0)
    # A critic that knows nothing leaves the return.
    for key, ours in run("gae", rows, gamma=gamma).items():
        assert ours["advantage"] == pytest.approx(rows[key]["discounted_return"], abs=ATOL, rel=0)
        assert ours["advantage"] == ours["return_to_go"]
