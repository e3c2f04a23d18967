"""Hypothesis strategies for credit inputs: small groups with everything that can happen to a step.

Numbers lie on a coarse grid, so that values are either equal or well apart: parity tests compare formulas, not the
last digit of a difference of nearly equal numbers.
"""

from typing import Any

import polars as pl
from hypothesis import strategies as st

from pipelines.credit import GiGPO

SCHEMA = {
    "episode_id": pl.Int64,
    "group_id": pl.Int64,
    "step_index": pl.Int32,
    "state": pl.String,
    "state_hash": pl.Int64,
    "reward": pl.Float64,
    "episode_score": pl.Float64,
    "status": pl.String,
    "is_active": pl.Boolean,
    "is_action_valid": pl.Boolean,
}

REWARDS = st.sampled_from([0.0, 0.0, 1.0, -0.5, 0.25, 3.0])
SCORES = st.sampled_from([0.0, 1.0, 0.5, -2.0, 10.0])
STATES = st.sampled_from(["start", "hall", "kitchen", "", " "])

# A strategy is built once and not at each draw, where that costs more than to draw from it.
_KNOWN = (REWARDS, SCORES, STATES)
_MAYBE = tuple(st.none() | values for values in _KNOWN)
_ENDS = st.sampled_from(["completed", "completed", "truncated", "aborted", "failed"])
_ACTIVE = st.sampled_from([True, True, None, False])
_VALID = st.sampled_from([True, None, False])
_SIBLINGS = st.integers(1, 4)


def frame(rows: list[dict[str, Any]]) -> pl.DataFrame:
    """A frame with every input column; missing ones take the value that says nothing special."""
    defaults = {
        "state": "start",
        "state_hash": None,
        "reward": 0.0,
        "episode_score": None,
        "status": "completed",
        "is_active": None,
        "is_action_valid": None,
    }
    return pl.DataFrame([{**defaults, **row} for row in rows], schema=SCHEMA, orient="row")


@st.composite
def step_rows(
    draw: st.DrawFn,
    *,
    nulls: bool = True,
    statuses: bool = True,
    invalid: bool = True,
    inactive: bool = True,
    max_groups: int = 3,
    max_steps: int = 5,
) -> list[dict[str, Any]]:
    """Rows of some task groups, in random order.

    Args:
        draw: given by hypothesis.
        nulls: rewards, scores and states may be NULL.
        statuses: episodes may be truncated, aborted or failed.
        invalid: actions may be malformed.
        inactive: steps may be inactive.
        max_groups: most groups.
        max_steps: most steps of an episode.
    """
    rewards, scores, states = _MAYBE if nulls else _KNOWN
    lengths = st.integers(1, max_steps)
    rows = []
    for group in range(draw(st.integers(1, max_groups))):
        for sibling in range(draw(_SIBLINGS)):
            score = draw(scores)
            status = draw(_ENDS) if statuses else "completed"
            for step in range(draw(lengths)):
                state = draw(states)
                rows.append(
                    {
                        "episode_id": 100 * group + sibling,
                        "group_id": 7 - group,
                        "step_index": step,
                        "state": state,
                        "state_hash": None if state is None else sum(map(ord, state)) - 300,
                        "reward": draw(rewards),
                        "episode_score": score,
                        "status": status,
                        "is_active": draw(_ACTIVE) if inactive else True,
                        "is_action_valid": draw(_VALID) if invalid else True,
                    }
                )
    return draw(st.permutations(rows))


_OMEGAS = {"sum": [0.0, 0.3, 1.0, 2.5], "convex": [0.0, 0.3, 1.0]}
_NORMS = st.sampled_from(["mean_norm", "mean_std_norm"])
_OPTIONS = st.fixed_dictionaries(
    {
        "gamma": st.sampled_from([0.0, 0.5, 0.9, 0.95, 1.0]),
        "weights": st.sampled_from([(name, omega) for name, omegas in _OMEGAS.items() for omega in omegas]),
        "episode_norm": _NORMS,
        "step_norm": _NORMS,
        "baseline": st.sampled_from(["trajectories", "rows"]),
        "singleton": st.sampled_from(["zero", "raw"]),
        "invalid_action_penalty": st.sampled_from([0.0, 0.1, 2.0]),
        "episode_source": st.sampled_from(["score", "sum_rewards"]),
        "step_source": st.sampled_from(["rewards", "terminal_score", "rewards_plus_terminal"]),
        "default_step_reward": st.sampled_from([None, 0.0, -0.5]),
        "truncated": st.sampled_from(["keep", "mask", "exclude"]),
        "revisits": st.sampled_from(["keep", "first"]),
    }
)


def configs(**fixed: Any) -> st.SearchStrategy[GiGPO]:
    """Any configuration with exact anchors; `fixed` options are as given."""

    def config(options: dict[str, Any]) -> GiGPO:
        combination, omega = options.pop("weights")
        return GiGPO(**{**options, "combination": combination, "omega": omega, **fixed})

    return _OPTIONS.map(config)
