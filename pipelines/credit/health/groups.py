"""What a credit job found in each group: the rows of `credit_groups`.

Three questions per group. Do its outcomes differ (a dead group teaches nothing)? Do its steps meet in the same states
(a step alone in its state has no step advantage)? And are those states what they seem? Where everyone took the same
action nothing is compared, a text reached by many different actions is hardly one situation, an error text is none, nor
is a state that says nothing. The last question needs texts (actions) of the steps that share a state, and is answered
only if they are given.

By segment reductions, and rows gathered by anchor as estimators gather them: group-bys and joins would cost several
times the advantages themselves. Texts are hashed while they are read, so that none is kept.

Axes: `_N` rows, `_E` episodes, `_P` groups, `_S` rows in a shared anchor, `_M` these gathered by anchor, `_K` anchors.
"""

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import polars as pl

from lake.read.empty_states import EMPTY_STATES
from lake.tables import TABLES
from pipelines.credit.estimators.anchor_groups import gathered
from pipelines.credit.flags import Flag
from pipelines.credit.inputs import batch
from pipelines.credit.inputs.batch import Bools, Floats, Segments, floats

_STEP = ["episode_id", "step_index"]
_ODD = np.array([0xD6E8FEB86659FD93, 0xA0761D6478BD642F, 0xE7037ED1A0B428DB], np.uint64)
"""Odd numbers with about as many ones as zeros: a product with one keeps every bit of what it is made of."""
_CALL_IDS = ("id", "call_id")
_FIGURES = {
    "taken": ("one_action_anchors", "last_actions_mean"),
    "state_is_error": ("error_anchors", "error_steps"),
    "state_hash": ("empty_steps",),
}
_COUNTS = ("one_action_anchors", "error_anchors", "error_steps", "empty_steps")


def seen_at_steps(present: Sequence[str]) -> list[pl.Expr]:
    """What to select of `steps`, where it is there: `taken` (UInt64, maybe already), `state_is_error`, `state_hash`."""
    found = []
    if "taken" in present:
        found.append(pl.col("taken"))
    elif "action" in present or "tool_calls" in present:
        found.append(choice(list(present)).alias("taken"))
    if "state_is_error" in present:
        found.append(pl.col("state_is_error").cast(pl.Boolean))
    if "state_hash" in present:
        found.append(pl.col("state_hash"))
    return found


def purity(rows: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """Figures of the shared anchors: one row for each group that has one.

    group_id, with `taken` one_action_anchors and last_actions_mean, with `state_is_error` error_anchors and
    error_steps, with `state_hash` empty_steps. Rows are advantages in canonical order; the steps have episode_id,
    step_index and what `seen_at_steps` gives, inactive ones included: fastest in the order of the rows.
    """
    shared_N = rows.select((pl.col("anchor_episodes") >= 2) & pl.col("anchor_key").is_not_null()).to_series()
    facts, rows = _beside(rows, steps).drop(_STEP), rows.select("group_id", "anchor_key")
    if not shared_N.all():
        rows, facts = rows.filter(shared_N), facts.filter(shared_N)
    if rows.is_empty():
        names = [name for column, figures in _FIGURES.items() if column in facts.columns for name in figures]
        return rows.select("group_id", *(pl.lit(None, pl.Float64).alias(name) for name in names))
    groups = Segments.of(rows, "group_id")
    order_M, opens_M = gathered(groups, rows["anchor_key"])
    anchors = Segments.opening_at(opens_M)
    opens_group_M = np.zeros(len(opens_M), np.bool_)
    opens_group_M[groups.starts_K] = True  # gathering leaves the rows of a group together, and groups in their order
    of_group = Segments.opening_at(opens_group_M[anchors.starts_K])
    figures = {"group_id": rows["group_id"].gather(groups.starts_K)}
    if "taken" in facts.columns:
        taken_M, led_M = (facts[name].fill_null(0).to_numpy()[order_M] for name in ("taken", "led_here"))
        differs_M = np.append(False, taken_M[1:] != taken_M[:-1]) & ~opens_M
        began_M = facts["led_here"].is_null().to_numpy()[order_M]
        # No action led to the first state of an episode: the value that stands for NULL is no way in.
        ways_K = (batch.distinct(led_M, anchors) - anchors.any(began_M)).astype(np.float64)
        figures["one_action_anchors"] = pl.Series(of_group.count(~anchors.any(differs_M)))
        figures["last_actions_mean"] = pl.Series(of_group.sum(ways_K) / of_group.lengths_K)
    error_K = np.zeros(len(anchors.lengths_K), np.bool_)
    if "state_is_error" in facts.columns:
        error_K = anchors.any(facts["state_is_error"].fill_null(value=False).to_numpy()[order_M])
        figures["error_anchors"] = pl.Series(of_group.count(error_K))
        figures["error_steps"] = _steps_of(error_K, anchors, of_group)
    if "state_hash" in facts.columns:
        known_M = facts["state_hash"].is_not_null().to_numpy()[order_M]
        empty_M = facts["state_hash"].is_in(EMPTY_STATES).fill_null(value=False).to_numpy()[order_M]
        empty_K = anchors.any(empty_M) & ~anchors.any(known_M & ~empty_M) & ~error_K
        figures["empty_steps"] = _steps_of(empty_K, anchors, of_group)
    return pl.DataFrame(figures)


def _steps_of(chosen_K: Bools, anchors: Segments, of_group: Segments) -> pl.Series:
    """How many steps of each group are in some of its anchors."""
    return pl.Series(of_group.sum(np.where(chosen_K, anchors.lengths_K, 0).astype(np.float64)))


def decisions(steps: pl.DataFrame) -> pl.DataFrame:
    """What each episode saw and did, as one hash: equal for exact copies, and by chance for one pair in 2^64.

    Takes active steps: `episode_id`, `state_hash` and `taken`; the rows of an episode together, in step order. Gives
    episode_id and decisions (UInt64, good for one process): NULL where a state or an action is not known, for what is
    unknown equals nothing.
    """
    if steps.is_empty():
        return pl.DataFrame(schema={"episode_id": steps.schema["episode_id"], "decisions": pl.UInt64})
    episodes = Segments.of(steps, "episode_id")
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

    What is no JSON list of calls stays as it is. The macro `without_call_ids` has the same rule for SQL.
    """
    with_ids = tool_calls_S.filter(tool_calls_S.str.contains('id"', literal=True)).unique()
    if with_ids.is_empty():
        return tool_calls_S
    return tool_calls_S.replace(with_ids, pl.Series([_without_ids(text) for text in with_ids], dtype=pl.String))


def _without_ids(text: str) -> str:
    try:
        calls = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text
    if not isinstance(calls, list):
        return text
    kept = [{k: v for k, v in call.items() if k not in _CALL_IDS} if isinstance(call, dict) else call for call in calls]
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


def of_steps(rows: pl.DataFrame) -> pl.DataFrame:
    """Per group of rows in canonical order: its advantages and its anchors.

    group_id, is_dead, steps, defined_steps, advantage_mean, _std, _min, _max, anchors, singleton_steps, shared_steps,
    anchor_episodes_mean, sign_disagreements; NULL where there is nothing to take a figure of. An anchor of n member
    rows is counted as n times 1/n: no grouping by anchor is needed.
    """
    groups = Segments.of(rows, "group_id")
    advantage_N, a_step_N = floats(rows["advantage"]), floats(rows["a_step"])
    size_N, episodes_N = rows["anchor_size"].to_numpy(), rows["anchor_episodes"].to_numpy()
    member_N = ~np.isnan(a_step_N) & (size_N > 0) & ~_carry(rows["flags"], Flag.REVISIT)
    shared_N = episodes_N >= 2
    part_N = np.where(member_N, 1.0 / np.maximum(size_N, 1), 0.0)
    shared_part_N = np.where(shared_N, part_N, 0.0)
    shared_P = np.round(groups.sum(shared_part_N))
    met_P = np.round(groups.sum(shared_part_N * episodes_N))
    disagree_N = floats(rows["a_episode"]) * a_step_N < 0
    return pl.DataFrame(
        {
            "group_id": rows["group_id"].gather(groups.starts_K),
            "is_dead": _carry(rows["flags"].gather(groups.starts_K), Flag.DEAD_GROUP),
            "steps": groups.lengths_K,
            "defined_steps": groups.count(~np.isnan(advantage_N)),
            **_spread_of(advantage_N, groups),
            "anchors": np.round(groups.sum(part_N)),
            "singleton_steps": groups.count(member_N & (size_N == 1)),
            "shared_steps": groups.count(shared_N),
            "anchor_episodes_mean": _known(met_P / np.maximum(shared_P, 1.0), shared_P > 0),
            "sign_disagreements": groups.count(disagree_N),
        }
    )


def of_episodes(rows: pl.DataFrame) -> pl.DataFrame:
    """Per episode: episode_id, and takes_part (scored, not excluded, and the estimator found out anything of it)."""
    episodes = Segments.of(rows, "episode_id")
    first = rows.select("episode_id", "flags")[episodes.starts_K]
    found_N = rows.select(pl.any_horizontal(pl.col("a_episode", "a_step", "advantage").is_not_null())).to_series()
    takes_part_E = episodes.any(found_N.to_numpy()) & ~_carry(first["flags"], Flag.EXCLUDED, Flag.UNSCORED)
    return first.select("episode_id", pl.Series("takes_part", takes_part_E))


def _carry(texts_N: pl.Series, *flags: Flag) -> Bools:
    """Whether each row has one of some flags; every distinct text is looked at once, and most often none has."""
    flagged = [text for text in texts_N.unique() if not set(flags).isdisjoint(text.split(","))]
    carry_N: Bools = texts_N.is_in(flagged).to_numpy() if flagged else np.zeros(len(texts_N), np.bool_)
    return carry_N


def _spread_of(values_N: Floats, groups: Segments) -> dict[str, pl.Series]:
    """Mean, sample deviation, smallest and largest of the known values of each group."""
    known_N = ~np.isnan(values_N)
    count_P = groups.count(known_N)
    mean_P = groups.sum(np.where(known_N, values_N, 0.0)) / np.maximum(count_P, 1)
    square_N = np.where(known_N, values_N - groups.spread(mean_P), 0.0) ** 2
    std_P = np.sqrt(groups.sum(square_N) / np.maximum(count_P - 1, 1))
    return {
        "advantage_mean": _known(mean_P, count_P > 0),
        "advantage_std": _known(std_P, count_P > 1),
        "advantage_min": _known(groups.min(np.where(known_N, values_N, np.inf)), count_P > 0),
        "advantage_max": _known(groups.max(np.where(known_N, values_N, -np.inf)), count_P > 0),
    }


def _known(values_P: Floats, known_P: Bools) -> pl.Series:
    return pl.Series(np.where(known_P, values_P, np.nan), nan_to_null=True)


FILLED_IN_BY_THE_JOB = ("job_id", "series_id", "write_id", "input_fingerprint")
"""Columns of `credit_groups` that are not found out here."""
SCHEMA = pl.Schema({k: v for k, v in TABLES["credit_groups"].polars().items() if k not in FILLED_IN_BY_THE_JOB})
"""Columns of the result."""


def group_diagnostics(
    advantages: pl.LazyFrame,
    episodes: pl.LazyFrame,
    steps: pl.LazyFrame | None = None,
    findings: pl.DataFrame | None = None,
) -> pl.LazyFrame:
    """Figures of each group, over whole groups: the columns of `credit_groups` but those the job fills in, by group_id.

    Args:
        advantages: rows as an estimator returns them, sorted by (group_id, episode_id, step_index).
        episodes: `episode_id`, `group_id` (the one the estimator used), `episode_score`, and where known `run_id` and
            `policy_version`. `score_*` are figures of `episode_score`, also where the estimator used another score.
        steps: `episode_id`, `step_index`, and any of `action`, `tool_calls`, `state_is_error` and `state_hash`, or
            what `seen_at_steps` makes of them; figures that need what is not there are NULL.
        findings: `group_id` and `findings`, as `check_groups` gives them.
    """
    rows = advantages.collect()
    groups = _outcomes(of_episodes(rows).lazy(), episodes)
    counted = ("steps", "defined_steps", "anchors", "singleton_steps", "shared_steps", "sign_disagreements")
    groups = groups.join(of_steps(rows).lazy(), on="group_id", how="left")
    is_dead = pl.col("is_dead") & (pl.col("scored") >= 2)
    groups = groups.with_columns(is_dead.fill_null(value=False), *(pl.col(n).fill_null(0) for n in counted))
    if findings is None:
        groups = groups.with_columns(findings=pl.lit(""))
    else:
        groups = groups.join(findings.lazy(), on="group_id", how="left").with_columns(pl.col("findings").fill_null(""))
    if steps is not None:
        seen = seen_at_steps(steps.collect_schema().names())
        shown = purity(rows, steps.select("episode_id", "step_index", *seen).collect())
        groups = groups.join(shown.lazy(), on="group_id", how="left")
    return groups.select(_typed(groups.collect_schema().names())).sort("group_id")


def _typed(present: list[str]) -> Iterator[pl.Expr]:
    """The columns of the result; NULL where something was not read."""
    for name, dtype in SCHEMA.items():
        # A group that shares no state has no error anchors: 0, if they were looked for.
        value = pl.col(name) if name in present else pl.lit(None)
        if name in _COUNTS and name in present:
            value = pl.col(name).fill_null(0)
        yield (value if name == "group_id" else value.cast(dtype)).alias(name)


def _outcomes(fates: pl.LazyFrame, episodes: pl.LazyFrame) -> pl.LazyFrame:
    """Per group: its episodes and the scores of those that take part, which `fates` says by episode."""
    present = episodes.collect_schema().names()
    takes_part = pl.col("takes_part").fill_null(value=False)
    score = pl.col("episode_score").filter(takes_part)
    versions = pl.col("policy_version").filter(takes_part).drop_nulls().n_unique()
    run = pl.when(pl.col("run_id").n_unique() == 1).then(pl.col("run_id").first())
    return (
        episodes.join(fates, on="episode_id", how="left")
        .group_by("group_id")
        .agg(
            (run if "run_id" in present else pl.lit(None, pl.String)).alias("run_id"),
            pl.len().alias("episodes"),
            takes_part.sum().alias("scored"),
            (versions if "policy_version" in present else pl.lit(0)).alias("policy_versions"),
            score.mean().alias("score_mean"),
            score.std().alias("score_std"),
            score.min().alias("score_min"),
            score.max().alias("score_max"),
        )
    )
