"""Hypothesis strategies for every estimator: rows with all columns that any of them reads, and configurations."""

from functools import cache
from typing import Any

import polars as pl
from hypothesis import strategies as st

from pipelines.credit.estimators import ESTIMATORS
from pipelines.credit.estimators.protocol import Estimator
from testkit.credit_strategies import SCHEMA, configs, frame, step_rows

EXTRA_SCHEMA = {
    "value_estimate": pl.Float64,
    "final_value_estimate": pl.Float64,
    "completion_tokens": pl.Int64,
    "policy_version": pl.Int64,
    "score_a": pl.Float64,
    "score_b": pl.Float64,
}
SCORES_NOT_NEGATIVE = st.sampled_from([0.0, 1.0, 0.5, 10.0])
NAMES = sorted(ESTIMATORS)
INCREMENTAL = [name for name in NAMES if ESTIMATORS[name].incremental]
IN_BATCHES = [name for name in NAMES if not ESTIMATORS[name].incremental]
OF_EPISODES = ["batch_std", "dr_grpo", "gdpo", "grpo", "maxrl", "opo", "reinforce_pp_baseline", "rloo"]


def wide_frame(rows: list[dict[str, Any]]) -> pl.DataFrame:
    """A frame with every column that any estimator reads; missing ones are NULL or say nothing special."""
    extras = pl.DataFrame(
        [{name: row.get(name) for name in EXTRA_SCHEMA} for row in rows], schema=EXTRA_SCHEMA, orient="row"
    )
    usual = frame([{name: value for name, value in row.items() if name in SCHEMA} for row in rows])
    return pl.concat([usual, extras], how="horizontal")


_OF_EPISODE = {
    "final_value_estimate": st.sampled_from([0.0, 1.0, -0.5, 2.25]),
    "completion_tokens": st.sampled_from([0, 10, 25, 300]),
    "policy_version": st.integers(0, 1),
    "score_a": st.sampled_from([0.0, 1.0]),
    "score_b": st.sampled_from([0.0, 0.5, 4.0]),
    "episode_score": SCORES_NOT_NEGATIVE,
}
_MAYBE_OF_EPISODE = {name: st.none() | values for name, values in _OF_EPISODE.items()}

# NULLs at every second place leave little to compare: in half of all cases a column has none.
_FILL = {"reward": 0.25, "episode_score": 0.5, "state_hash": 7, "state": "cellar", "value_estimate": 0.75}
_FILL |= {"final_value_estimate": 1.5, "completion_tokens": 40, "policy_version": 1, "score_a": 1.0, "score_b": 4.0}
_FILLED = st.integers(0, (1 << len(_FILL)) - 1)


@st.composite
def wide_rows(draw: st.DrawFn, *, nulls: bool = True, positive: bool = False, **limits: Any) -> list[dict[str, Any]]:
    """Rows as `step_rows` draws them, with the further columns.

    Args:
        draw: given by hypothesis.
        nulls: anything may be NULL that may.
        positive: no score is negative.
        limits: see `step_rows`.
    """
    rows = draw(step_rows(nulls=nulls, **limits))
    columns = _MAYBE_OF_EPISODE if nulls else _OF_EPISODE
    names = [name for name in columns if positive or name != "episode_score"]
    of_episode: dict[int, dict[str, Any]] = {}
    for episode in sorted({row["episode_id"] for row in rows}):
        of_episode[episode] = {name: draw(columns[name]) for name in names}
    values = columns["final_value_estimate"]
    rows = [{**row, **of_episode[row["episode_id"]], "value_estimate": draw(values)} for row in rows]
    filled = draw(_FILLED)
    fill = {name: value for bit, (name, value) in enumerate(_FILL.items()) if filled >> bit & 1}
    return [{name: fill.get(name) if value is None else value for name, value in row.items()} for row in rows]


_EPISODE = {"episode_source": st.sampled_from(["score", "sum_rewards"])}
_REWARDS = {
    "default_step_reward": st.sampled_from([None, 0.0, -0.5]),
    "truncated": st.sampled_from(["keep", "mask", "exclude"]),
}
_RETURNS = {
    "gamma": st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    "step_source": st.sampled_from(["rewards", "terminal_score", "rewards_plus_terminal"]),
}
_NORM = st.sampled_from(["mean_norm", "mean_std_norm"])
_BATCH = {"batch_key": st.sampled_from(["all", "policy_version", "group_id"])}
_PENALTY = {"invalid_action_penalty": st.sampled_from([0.0, 0.1, 2.0])}
_UNIT = {"baseline": st.sampled_from(["trajectories", "rows"])}
_PENALISED = {**_EPISODE, **_PENALTY, **_UNIT, "singleton": st.sampled_from(["zero", "raw"])}
_ANCHORED = {**_EPISODE, **_RETURNS, **_PENALTY, "revisits": st.sampled_from(["keep", "first"])}
_OPTIONS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "batch_std": {**_EPISODE, **_BATCH},
    "discounted_grpo": {**_RETURNS, "compare": st.sampled_from(["same_step", "all_steps"]), "norm": _NORM},
    "dr_grpo": _PENALISED,
    "gae": {**_RETURNS, "lam": st.sampled_from([0.0, 0.5, 0.95, 1.0])},
    "gdpo": {**_BATCH, "components": st.sampled_from([{"a": 1.0}, {"a": 1.0, "b": 0.5}, {"b": 2.0, "a": -1.0}])},
    "gigpo_loo": {
        **_ANCHORED,
        "omega": st.sampled_from([0.0, 0.3, 1.0]),
        "combination": st.sampled_from(["sum", "convex"]),
    },
    "grpo": _PENALISED,
    "hgpo": {
        **_ANCHORED,
        **_UNIT,
        "history": st.integers(0, 3),
        "alpha": st.sampled_from([0.0, 1.0, 2.0]),
        "norm": _NORM,
        "zeros": st.sampled_from(["skip", "count"]),
        "episode_level": st.booleans(),
    },
    "maxrl": {"episode_source": st.just("score")},
    "opo": {**_EPISODE, "length": st.sampled_from(["tokens", "steps"])},
    "reinforce_pp": {**_RETURNS, **_BATCH},
    "reinforce_pp_baseline": {**_EPISODE, **_BATCH},
    "rloo": _EPISODE,
}


@cache
def estimators(name: str, **fixed: Any) -> st.SearchStrategy[Estimator]:
    """Any configuration of an estimator; `fixed` options are as given."""
    if name == "gigpo":
        return configs(**fixed)
    options = {**_REWARDS, **_OPTIONS[name], **{key: st.just(value) for key, value in fixed.items()}}
    return st.fixed_dictionaries(options).map(lambda values_chosen: ESTIMATORS[name](**values_chosen))
