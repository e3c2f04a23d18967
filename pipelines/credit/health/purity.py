"""What was done at each step, and what that shows of shared anchors and of siblings.

Texts are hashed while they are read, so that none is kept, and rows are gathered by anchor the way estimators gather
them: a join and a group-by would cost twice what the advantages cost.

Axes: `_N` rows in canonical order, `_S` those in a shared anchor, `_M` the same gathered by anchor, `_K` anchors,
`_E` episodes.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
import polars as pl

from pipelines.credit.estimators.anchor_groups import gathered
from pipelines.credit.inputs import batch
from pipelines.credit.inputs.batch import Segments

_STEP = ["episode_id", "step_index"]
_ODD = np.array([0xD6E8FEB86659FD93, 0xA0761D6478BD642F, 0xE7037ED1A0B428DB], np.uint64)
"""Odd numbers with about as many ones as zeros: a product with one keeps every bit of what it is made of."""
_FIGURES = {"taken": ("one_action_anchors", "last_actions_mean"), "state_is_error": ("error_anchors", "error_steps")}


def seen_at_steps(present: Sequence[str]) -> list[pl.Expr]:
    """What to select from `steps`, where it is present: `taken` (UInt64, maybe there already) and `state_is_error`."""
    found = []
    if "taken" in present:
        found.append(pl.col("taken"))
    elif "action" in present or "tool_calls" in present:
        found.append(choice(list(present)).alias("taken"))
    if "state_is_error" in present:
        found.append(pl.col("state_is_error").cast(pl.Boolean))
    return found


def purity(rows: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """Figures of the shared anchors: one row for each group that has one.

    group_id, with `taken` one_action_anchors and last_actions_mean, with `state_is_error` error_anchors and
    error_steps. Rows are advantages in canonical order; the steps have episode_id, step_index and what `seen_at_steps`
    gives, inactive ones included: fastest in the order of the rows.
    """
    shared_N = rows.select((pl.col("anchor_episodes") >= 2) & pl.col("anchor_key").is_not_null()).to_series()
    facts, rows = _beside(rows, steps).drop(_STEP), rows.select("group_id", "anchor_key")
    if not shared_N.all():
        rows, facts = rows.filter(shared_N), facts.filter(shared_N)
    if rows.is_empty():
        names = [name for column, figures in _FIGURES.items() if column in facts.columns for name in figures]
        return rows.select("group_id", *(pl.lit(None, pl.Float64).alias(name) for name in names))
    opens_S = rows.select(pl.col("group_id").ne_missing(pl.col("group_id").shift())).to_series().to_numpy()
    groups = Segments.opening_at(opens_S)
    order_M, opens_M = gathered(groups, rows["anchor_key"])
    anchors = Segments.opening_at(opens_M)
    opens_group_M = np.zeros(len(opens_M), np.bool_)
    opens_group_M[groups.starts_K] = True  # gathering leaves the rows of a group together, and groups in their order
    of_group = Segments.opening_at(opens_group_M[anchors.starts_K])
    figures = {"group_id": rows["group_id"].gather(groups.starts_K)}
    if "taken" in facts.columns:
        taken_M, led_M = (facts[name].fill_null(0).to_numpy()[order_M] for name in ("taken", "led_here"))
        differs_M = np.append(False, taken_M[1:] != taken_M[:-1]) & ~opens_M
        ways_K = batch.distinct(led_M, anchors).astype(np.float64)
        figures["one_action_anchors"] = pl.Series(of_group.count(~anchors.any(differs_M)))
        figures["last_actions_mean"] = pl.Series(of_group.sum(ways_K) / of_group.lengths_K)
    if "state_is_error" in facts.columns:
        error_K = anchors.any(facts["state_is_error"].fill_null(value=False).to_numpy()[order_M])
        figures["error_anchors"] = pl.Series(of_group.count(error_K))
        figures["error_steps"] = pl.Series(of_group.sum(np.where(error_K, anchors.lengths_K, 0).astype(np.float64)))
    return pl.DataFrame(figures)


def decisions(steps: pl.DataFrame) -> pl.DataFrame:
    """What each episode saw and did, as one hash: equal for exact copies, and by chance for one pair in 2^64.

    Takes active steps: `episode_id`, `state_hash` and `taken`; the rows of an episode together, in step order. Gives
    episode_id and decisions (UInt64, good for one process): NULL where a state or an action is not known, for what is
    unknown equals nothing.
    """
    if steps.is_empty():
        return pl.DataFrame(schema={"episode_id": steps.schema["episode_id"], "decisions": pl.UInt64})
    opens_N = steps.select(pl.col("episode_id").ne_missing(pl.col("episode_id").shift())).to_series().to_numpy()
    episodes = Segments.opening_at(opens_N)
    unknown_N = (steps["state_hash"].is_null() | steps["taken"].is_null()).to_numpy()
    state_N = steps["state_hash"].fill_null(0).to_numpy().astype(np.uint64)
    place_N = (np.arange(len(steps)) - episodes.spread(episodes.starts_K)).astype(np.uint64)
    mixed_N = state_N * _ODD[0] + steps["taken"].fill_null(0).to_numpy() * _ODD[1] + place_N * _ODD[2]
    mixed_N ^= mixed_N >> np.uint64(31)  # or a sum over steps would not see which state and action belong together
    mixed_N *= _ODD[0]
    mixed_N ^= mixed_N >> np.uint64(29)
    found_E = pl.Series(np.add.reduceat(mixed_N, episodes.starts_K))
    return pl.DataFrame(
        {
            "episode_id": steps["episode_id"].gather(episodes.starts_K),
            "decisions": found_E.set(pl.Series(episodes.any(unknown_N)), None) if unknown_N.any() else found_E,
        }
    )


def choice(present: list[str]) -> pl.Expr:
    """A hash, good for one process, of what a step did: its text and its tool calls, without the ids of the calls."""
    parts = []
    if "action" in present:
        parts.append(pl.col("action").hash())
    if "tool_calls" in present:
        calls = pl.col("tool_calls").map_batches(without_call_ids, return_dtype=pl.String, is_elementwise=True)
        parts.append(calls.hash())
    return pl.struct(parts).hash()


def without_call_ids(tool_calls_S: pl.Series) -> pl.Series:
    """Tool calls without their ids, which a server draws at random: with them every call differs from every other.

    What is no JSON list of calls stays as it is.
    """
    with_ids = tool_calls_S.filter(tool_calls_S.str.contains('"id"', literal=True)).unique()
    if with_ids.is_empty():
        return tool_calls_S
    return tool_calls_S.replace(with_ids, pl.Series([_without_ids(text) for text in with_ids], dtype=pl.String))


def _without_ids(text: str) -> str:
    try:
        calls = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text
    if not isinstance(calls, list):
        return text
    kept = [{k: v for k, v in call.items() if k != "id"} if isinstance(call, dict) else call for call in calls]
    return msgspec.json.encode(kept).decode()


def _beside(rows: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """The facts of each row, in the rows' order, and `led_here`: what was done at the step before, NULL at step 0."""
    keys = rows.select(_STEP)
    if keys.equals(steps.select(_STEP)):
        return _with_ways_in(steps)
    return keys.join(_with_ways_in(steps.sort(_STEP)), on=_STEP, how="left", maintain_order="left")


def _with_ways_in(steps: pl.DataFrame) -> pl.DataFrame:
    if "taken" not in steps.columns:
        return steps
    episode, index = (pl.col(name) for name in _STEP)
    follows = (episode == episode.shift()) & (index == index.shift() + 1)
    return steps.with_columns(led_here=pl.when(follows).then(pl.col("taken").shift()))
