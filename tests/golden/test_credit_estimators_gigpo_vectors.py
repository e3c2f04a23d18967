"""Parity with the reference implementation, on vectors made by running it (float32), and our deviations from it.

01, 02 and 04 must agree within 5e-6. Deviations: groups of equal values give exactly 0 here (float noise there); under
`baseline="trajectories"` the reference lets each trajectory's first row bring its penalty into the group's statistics,
so only groups without an invalid first row and without tied scores can be compared. 03 holds rows that were copied at
random before the statistics were taken; that is not reproduced.
"""

import json
from collections import defaultdict
from typing import Any

import polars as pl
import pytest

from pipelines.credit import GiGPO
from testkit.shared import shared_data

VECTORS = ["01_basic_sparse", "02_edges_dense", "04_similarity_0p9"]
NORMS = ["mean_norm", "mean_std_norm"]
ATOL = 5e-6
Key = tuple[str, int]


def load(name: str) -> tuple[dict[str, Any], dict[Key, dict[str, Any]]]:
    """Parameters, and the rows by (trajectory, step)."""
    document = json.loads(shared_data("gigpo_golden", f"{name}.json").read_text())
    return document["meta"]["params"], {(row["traj_id"], row["step_index"]): row for row in document["rows"]}


def run(params: dict[str, Any], rows: dict[Key, dict[str, Any]], norm: str, baseline: str) -> dict[Key, dict[str, Any]]:
    """Our advantages of the active rows, under the parameters the vector was made with."""
    similar = {"kind": "similarity", "threshold": params["similarity_thresh"]}
    config = GiGPO(
        gamma=params["gamma"],
        omega=params["step_advantage_w"],
        invalid_action_penalty=params["invalid_action_penalty_coef"],
        anchors=similar if params["enable_similarity"] else {"kind": "exact"},
        episode_norm=norm,
        step_norm=norm,
        baseline=baseline,
        singleton="raw",
        episode_source="sum_rewards",
    )
    steps = pl.DataFrame(
        [
            {
                "episode_id": row["traj_id"],
                "group_id": row["group_id"],
                "step_index": row["step_index"],
                "state": row["state"],
                "reward": row["reward"],
                "is_active": row["active"],
                "is_action_valid": row["valid"],
            }
            for row in rows.values()
        ]
    )
    frame = config.advantages(steps.lazy()).collect()
    return {(row["episode_id"], row["step_index"]): row for row in frame.iter_rows(named=True)}


def comparable_groups(rows: dict[Key, dict[str, Any]]) -> set[str]:
    """Groups in which no trajectory's first row is invalid and trajectory scores are not tied."""
    totals: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    spoiled = set()
    for row in rows.values():
        if row["active"]:
            totals[row["group_id"]][row["traj_id"]] += row["reward"]
            if row["step_index"] == 0 and not row["valid"]:
                spoiled.add(row["group_id"])
    tied = {g for g, scores in totals.items() if len(scores) > 1 and max(scores.values()) == min(scores.values())}
    return set(totals) - spoiled - tied


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", VECTORS)
def test_rows_baseline(name: str, norm: str) -> None:
    params, rows = load(name)
    advantages = run(params, rows, norm, "rows")
    assert set(advantages) == {key for key, row in rows.items() if row["active"]}
    for key, ours in advantages.items():
        theirs = rows[key]
        noisy_episode = theirs["constant_episode_group"] and norm == "mean_std_norm"
        noisy_step = theirs["constant_step_group"] and norm == "mean_std_norm"
        assert ours["return_to_go"] == pytest.approx(theirs["discounted_return"], abs=ATOL, rel=0)
        if not noisy_episode:
            assert ours["a_episode"] == pytest.approx(theirs[f"A_E_{norm}"], abs=ATOL, rel=0)
        if not noisy_step:
            assert ours["a_step"] == pytest.approx(theirs[f"A_S_{norm}"], abs=ATOL, rel=0)
        if not (noisy_episode or noisy_step):
            assert ours["advantage"] == pytest.approx(theirs[f"A_{norm}"], abs=ATOL, rel=0)
        # The vectors' own float64 column (from float32 rewards) forces constant groups to 0: nothing is excused there.
        assert ours["a_episode"] == pytest.approx(theirs[f"A_E_{norm}_f64"], abs=1e-6, rel=0)
        assert ours["a_step"] == pytest.approx(theirs[f"A_S_{norm}_f64"], abs=1e-6, rel=0)
        assert ours["advantage"] == pytest.approx(theirs[f"A_{norm}_f64"], abs=1e-6, rel=0)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", VECTORS)
def test_trajectories_baseline(name: str, norm: str) -> None:
    params, rows = load(name)
    advantages = run(params, rows, norm, "trajectories")
    compared = comparable_groups(rows)
    assert compared
    for key, ours in advantages.items():
        theirs = rows[key]
        if theirs["group_id"] not in compared:
            continue
        assert ours["a_episode"] == pytest.approx(theirs[f"A_E_per_traj_{norm}"], abs=ATOL, rel=0)
        if not theirs["constant_step_group"]:
            assert ours["a_step"] == pytest.approx(theirs[f"A_S_{norm}"], abs=ATOL, rel=0)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", VECTORS)
def test_constant_groups_are_exactly_zero(name: str, norm: str) -> None:
    params, rows = load(name)
    for key, ours in run(params, rows, norm, "rows").items():
        if rows[key]["constant_episode_group"]:
            assert ours["a_episode"] == 0.0
        if rows[key]["constant_step_group"]:
            assert ours["a_step"] == 0.0


@pytest.mark.parametrize("name", VECTORS)
def test_anchor_groups_are_the_reference_partition(name: str) -> None:
    params, rows = load(name)
    theirs, ours = defaultdict(set), defaultdict(set)
    for key, row in run(params, rows, "mean_norm", "rows").items():
        theirs[rows[key]["step_group"]].add(key)
        ours[row["group_id"], row["anchor_key"]].add(key)
    assert sorted(map(sorted, ours.values())) == sorted(map(sorted, theirs.values()))


def test_noise_group_shows_why_constant_groups_are_forced_to_zero() -> None:
    params, rows = load("02_edges_dense")
    noise = {key for key, row in rows.items() if row["group_id"] == "noise_9.9"}
    assert min(abs(rows[key]["A_E_mean_std_norm"]) for key in noise) > 0.4  # seven equal scores of 9.9
    advantages = run(params, rows, "mean_std_norm", "rows")
    assert {advantages[key]["advantage"] for key in noise} == {0.0}
