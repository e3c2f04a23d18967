"""Diagnostics of a credit job before training: its figures with warnings, figures per group, and integrity checks.

Diagnosis. A dead group teaches nothing about the outcome. A step whose state no sibling shares has no step advantage.
Healthy GiGPO training has fewer than 35 % singleton anchors. If almost no state is shared, normalise the texts first.

Groups (rows of `credit_groups`). They answer whether a group's outcomes differ, whether its steps share states, and
whether shared states are real situations. A state with one action gives no comparison. A text that many different
actions lead to, an error text and an empty text are hardly one situation. These figures need actions and error marks of
the steps, which are hashed while they are read. Segment reductions replace group-bys and joins, which would take
several times as long as the advantages.

Integrity. Each check is off, a warning or a refusal, and its findings go to `credit_groups` too. A baseline over the
wrong siblings raises no error elsewhere. A check whose columns are absent or NULL finds nothing.

Axes: `_N` rows, `_E` episodes, `_P` groups, `_S` rows in a shared anchor, `_M` these gathered by anchor, `_K` anchors.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np
import polars as pl
from pydantic import BaseModel, Field

from lake import ids
from lake.errors import DataRefusedError
from lake.read.query_views import EMPTY_STATES
from lake.read.text_table import count_noun
from lake.tables import TABLES
from pipelines.credit.estimators.normalise import gather_anchors
from pipelines.credit.estimators.protocol import Flag
from pipelines.credit.steps import Bools, Floats, Segments, count_distinct, to_floats


class CreditSummary(BaseModel, frozen=True, extra="forbid"):
    """Counts over the rows of one credit job."""

    episodes: int
    """Distinct episodes."""
    steps: int
    """Rows."""
    undefined_steps: int
    """Rows whose advantage is NULL."""
    groups: int
    """Task groups: the sum of live, dead, singleton and unscored groups."""
    live_groups: int
    """Groups of two or more scored siblings with different scores."""
    dead_groups: int
    """Groups of two or more scored siblings, all with the same score."""
    singleton_groups: int
    """Groups with one scored sibling."""
    unscored_groups: int
    """Groups without a scored sibling."""
    shared_steps: int
    """Steps whose anchor state two or more trajectories of the group visited."""
    singleton_steps: int
    """Steps whose anchor state no other step has."""

    @property
    def shared_fraction(self) -> float | None:
        """Return the fraction of steps that share their anchor state with a sibling; None without steps."""
        return self.shared_steps / self.steps if self.steps else None


def summarise(advantages: pl.LazyFrame) -> CreditSummary:
    """Count groups and steps by kind over the advantages that an estimator returned."""
    # Comparing with the distinct values is cheaper than splitting each row.
    texts = advantages.select(pl.col("flags").unique()).collect()["flags"].to_list()
    dead, single = (
        pl.col("flags").is_in([text for text in texts if flag.value in text.split(",")])
        for flag in (Flag.DEAD_GROUP, Flag.SINGLETON_ANCHOR)
    )
    groups = advantages.group_by("group_id").agg(pl.col("group_size").first(), dead.any().alias("dead"))
    rows = advantages.select(
        pl.col("episode_id").n_unique().alias("episodes"),
        pl.len().alias("steps"),
        pl.col("advantage").is_null().sum().alias("undefined_steps"),
        (pl.col("anchor_episodes") >= 2).sum().alias("shared_steps"),
        single.sum().alias("singleton_steps"),
    )
    by_group = groups.select(
        pl.len().alias("groups"),
        ((pl.col("group_size") >= 2) & ~pl.col("dead")).sum().alias("live_groups"),
        pl.col("dead").sum().alias("dead_groups"),
        (pl.col("group_size") == 1).sum().alias("singleton_groups"),
        (pl.col("group_size") == 0).sum().alias("unscored_groups"),
    )
    return CreditSummary.model_validate(pl.concat([rows, by_group], how="horizontal").collect().row(0, named=True))


HEALTHY_SINGLETONS = 0.35
"""Share of singleton steps below which GiGPO trains well (arXiv 2505.10978)."""
MOSTLY = 0.5
MANY_DOUBTED = 0.05
_ADDED = ("episodes", "steps", "shared_steps", "singleton_steps", "anchors", "sign_disagreements")
_KNOWN = ("one_action_anchors", "error_anchors", "error_steps", "empty_steps")
DIAGNOSED = (*_ADDED, *_KNOWN, "defined_steps", "scored", "is_dead", "score_min")
"""The columns of `credit_groups` that a diagnosis reads."""


class CreditDiagnosis(CreditSummary):
    """Counts of a credit job, with the quality of its anchors."""

    has_anchors: bool
    """Whether the estimator compared steps."""
    anchors: int
    """Distinct anchor states."""
    one_action_anchors: int | None
    """Shared anchors with one action; None if actions were not read."""
    error_anchors: int | None
    """Shared anchors whose state is an error text; None if the marks were not read."""
    error_steps: int | None
    """Steps in `error_anchors`."""
    empty_steps: int | None
    """Steps in shared anchors with empty states; None if states were not read."""
    sign_disagreements: int
    """Steps where A_E and A_S have opposite signs."""
    dead_score: float | None
    """Score of most dead groups, the lower of equally frequent ones; None without dead groups."""
    dead_groups_at_score: int
    """Dead groups with `dead_score`."""

    def warnings(self) -> list[str]:
        """Return a line per suspicious figure, with the command to run next (LAKE: the lake)."""
        lines = []
        scored_groups = self.live_groups + self.dead_groups
        if self.groups and self.unscored_groups + self.singleton_groups > MOSTLY * self.groups:
            alone = self.unscored_groups + self.singleton_groups
            lines.append(
                f"{alone} of {self.groups} groups have fewer than two episodes with a score: nothing is compared "
                "there. Score them: `trajlake score FILE.py:FUNCTION --lake LAKE`"
            )
        if scored_groups and self.dead_groups > MOSTLY * scored_groups:
            lines.append(
                f"In {self.dead_groups} of {scored_groups} groups all episodes have the same score, so A_E is 0 there; "
                f"in {self.dead_groups_at_score} of them the score is {self.dead_score:g}. Easier or harder tasks, "
                "more siblings or a finer score would tell more: `trajlake score FILE.py:FUNCTION --lake LAKE`"
            )
        if self.steps and self.undefined_steps > MOSTLY * self.steps:
            lines.append(
                f"{self.undefined_steps} of {self.steps} advantages are unknown (NULL). Their flags say why: `trajlake "
                "sql 'SELECT flags, count(*) FROM latest_advantages WHERE NOT defined GROUP BY ALL' --lake LAKE`"
            )
        if not (self.has_anchors and self.steps):
            return lines
        singletons = self.singleton_steps / self.steps
        if singletons > HEALTHY_SINGLETONS:
            lines.append(
                f"{singletons:.0%} of the steps are in a state that no other step of their group has, so they get no "
                f"step advantage (usual: below {HEALTHY_SINGLETONS:.0%}). See what makes the states differ: "
                "`trajlake anchors --lake LAKE`"
            )
        doubtful = {
            "error texts, which say little of the situation. See what leaving them out would give": self.error_steps,
            "empty states (blank, [] or null), which anything may lead to. See how many ways did": self.empty_steps,
        }
        lines.extend(
            f"{steps} of the {self.shared_steps} steps with a shared state are at {kind}: "
            "`trajlake anchors --lake LAKE`"
            for kind, steps in doubtful.items()
            if steps and steps > MANY_DOUBTED * self.shared_steps
        )
        if self.shared_steps and self.empty_steps is None and self.error_steps is not None:
            lines.append(
                f"How many of the {self.shared_steps} steps with a shared state are at empty states is unknown: an "
                "older version computed some of the groups. Count them: `trajlake credit ... --force --lake LAKE`"
            )
        return lines


def diagnose(groups: pl.LazyFrame) -> CreditDiagnosis:
    """Add up the `DIAGNOSED` columns of `credit_groups` over groups with episodes, one row per group.

    A figure of actions, error texts or empty states becomes None if a group with shared states lacks it, because an
    older job computed the group.
    """

    def add_if_known(name: str) -> pl.Expr:
        is_read = pl.col(name).is_not_null()
        is_known = is_read.any() & (is_read | (pl.col("shared_steps") == 0)).all()
        return pl.when(is_known).then(pl.col(name).cast(pl.Int64).sum()).alias(name)

    scored, dead = pl.col("scored"), pl.col("is_dead")
    dead_score = pl.col("score_min").filter(dead).mode().min()
    row = (
        groups.filter(pl.col("episodes") > 0)
        .select(
            pl.col(*_ADDED).cast(pl.Int64).sum(),  # sums of 32-bit integers would wrap
            (pl.col("steps") - pl.col("defined_steps")).cast(pl.Int64).sum().alias("undefined_steps"),
            pl.len().alias("groups"),
            ((scored >= 2) & ~dead).sum().alias("live_groups"),
            dead.sum().alias("dead_groups"),
            (scored == 1).sum().alias("singleton_groups"),
            (scored == 0).sum().alias("unscored_groups"),
            (pl.col("anchors") > 0).any().alias("has_anchors"),
            *(add_if_known(name) for name in _KNOWN),
            dead_score.alias("dead_score"),
            (dead & (pl.col("score_min") == dead_score)).sum().alias("dead_groups_at_score"),
        )
        .collect()
        .row(0, named=True)
    )
    return CreditDiagnosis.model_validate(row)


_STEP = ["episode_id", "step_index"]
_ODD = np.array([0xD6E8FEB86659FD93, 0xA0761D6478BD642F, 0xE7037ED1A0B428DB], np.uint64)
"""Odd multipliers with about as many ones as zeros: a product keeps all information of its factor."""
_CALL_IDS = ("id", "call_id")
_FIGURES = {
    "taken": ("one_action_anchors", "last_actions_mean"),
    "state_is_error": ("error_anchors", "error_steps"),
    "state_hash": ("empty_steps",),
}


def select_step_facts(present: Sequence[str]) -> list[pl.Expr]:
    """Select `taken` (UInt64 hash of the action), `state_is_error` and `state_hash` from the present columns."""
    columns = []
    if "taken" in present:
        columns.append(pl.col("taken"))
    elif "action" in present or "tool_calls" in present:
        columns.append(hash_action(list(present)).alias("taken"))
    if "state_is_error" in present:
        columns.append(pl.col("state_is_error").cast(pl.Boolean))
    if "state_hash" in present:
        columns.append(pl.col("state_hash"))
    return columns


def measure_purity(rows: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """Compute the figures of shared anchors, one row for each group that has one.

    Columns: group_id; with `taken` one_action_anchors and last_actions_mean; with `state_is_error` error_anchors and
    error_steps; with `state_hash` empty_steps. Rows are advantages in canonical order. The steps, inactive ones
    included, have episode_id, step_index and the columns of `select_step_facts`; the order of the rows is fastest.
    """
    shared_N = rows.select((pl.col("anchor_episodes") >= 2) & pl.col("anchor_key").is_not_null()).to_series()
    facts, rows = _align_steps(rows, steps).drop(_STEP), rows.select("group_id", "anchor_key")
    if not shared_N.all():
        rows, facts = rows.filter(shared_N), facts.filter(shared_N)
    if rows.is_empty():
        names = [name for column, figures in _FIGURES.items() if column in facts.columns for name in figures]
        return rows.select("group_id", *(pl.lit(None, pl.Float64).alias(name) for name in names))
    groups = Segments.of(rows, "group_id")
    order_M, opens_M = gather_anchors(groups, rows["anchor_key"])
    anchors = Segments.opening_at(opens_M)
    opens_group_M = np.zeros(len(opens_M), np.bool_)
    opens_group_M[groups.starts_K] = True  # gathering keeps groups and their order
    of_group = Segments.opening_at(opens_group_M[anchors.starts_K])
    figures = {"group_id": rows["group_id"].gather(groups.starts_K)}
    if "taken" in facts.columns:
        taken_M, led_M = (facts[name].fill_null(0).to_numpy()[order_M] for name in ("taken", "led_here"))
        differs_M = np.append(False, taken_M[1:] != taken_M[:-1]) & ~opens_M
        began_M = facts["led_here"].is_null().to_numpy()[order_M]
        # No action led to the first state of an episode: do not count the replacement of NULL.
        ways_K = (count_distinct(led_M, anchors) - anchors.any(began_M)).astype(np.float64)
        figures["one_action_anchors"] = pl.Series(of_group.count(~anchors.any(differs_M)))
        figures["last_actions_mean"] = pl.Series(of_group.sum(ways_K) / of_group.lengths_K)
    error_K = np.zeros(len(anchors.lengths_K), np.bool_)
    if "state_is_error" in facts.columns:
        error_K = anchors.any(facts["state_is_error"].fill_null(value=False).to_numpy()[order_M])
        figures["error_anchors"] = pl.Series(of_group.count(error_K))
        figures["error_steps"] = _count_steps(error_K, anchors, of_group)
    if "state_hash" in facts.columns:
        known_M = facts["state_hash"].is_not_null().to_numpy()[order_M]
        empty_M = facts["state_hash"].is_in(EMPTY_STATES).fill_null(value=False).to_numpy()[order_M]
        empty_K = anchors.any(empty_M) & ~anchors.any(known_M & ~empty_M) & ~error_K
        figures["empty_steps"] = _count_steps(empty_K, anchors, of_group)
    return pl.DataFrame(figures)


def _count_steps(marked_K: Bools, anchors: Segments, of_group: Segments) -> pl.Series:
    return pl.Series(of_group.sum(np.where(marked_K, anchors.lengths_K, 0).astype(np.float64)))


def hash_decisions(steps: pl.DataFrame) -> pl.DataFrame:
    """Hash the states and actions of each episode: equal for exact copies, and by chance for one pair in 2^64.

    Takes active steps with `episode_id`, `state_hash` and `taken`, the rows of an episode together in step order.
    Returns episode_id and decisions (UInt64, valid in this process), NULL if a state or action is unknown.
    """
    if steps.is_empty():
        return pl.DataFrame(schema={"episode_id": steps.schema["episode_id"], "decisions": pl.UInt64})
    episodes = Segments.of(steps, "episode_id")
    unknown_N = (steps["state_hash"].is_null() | steps["taken"].is_null()).to_numpy()
    state_N = steps["state_hash"].fill_null(0).to_numpy().astype(np.uint64)
    place_N = (np.arange(len(steps)) - episodes.spread(episodes.starts_K)).astype(np.uint64)
    mixed_N = state_N * _ODD[0] + steps["taken"].fill_null(0).to_numpy() * _ODD[1] + place_N * _ODD[2]
    mixed_N ^= mixed_N >> np.uint64(31)  # ties the state to its action in the sum over steps
    mixed_N *= _ODD[0]
    mixed_N ^= mixed_N >> np.uint64(29)
    found_E = pl.Series(np.add.reduceat(mixed_N, episodes.starts_K))
    return pl.DataFrame(
        {
            "episode_id": steps["episode_id"].gather(episodes.starts_K),
            "decisions": found_E.set(pl.Series(episodes.any(unknown_N)), None) if unknown_N.any() else found_E,
        }
    )


def hash_action(present: list[str]) -> pl.Expr:
    """Hash a step's action text and tool calls without call ids; valid in this process."""
    hashes = []
    if "action" in present:
        hashes.append(pl.col("action").hash())
    if "tool_calls" in present:
        calls = pl.col("tool_calls").map_batches(drop_call_ids, return_dtype=pl.String, is_elementwise=True)
        hashes.append(calls.hash())
    return pl.struct(hashes).hash()


def drop_call_ids(tool_calls_S: pl.Series) -> pl.Series:
    """Remove the ids of tool calls, which a server draws at random, so that equal calls are equal.

    A text that is not a JSON list of calls stays unchanged. The macro `drop_call_ids` has the same rule for SQL.
    """
    with_ids = tool_calls_S.filter(tool_calls_S.str.contains('id"', literal=True)).unique()
    if with_ids.is_empty():
        return tool_calls_S
    return tool_calls_S.replace(with_ids, pl.Series([_drop_ids(text) for text in with_ids], dtype=pl.String))


def _drop_ids(text: str) -> str:
    try:
        calls = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text
    if not isinstance(calls, list):
        return text
    calls_without_ids = [
        {k: v for k, v in call.items() if k not in _CALL_IDS} if isinstance(call, dict) else call for call in calls
    ]
    return msgspec.json.encode(calls_without_ids).decode()


def _align_steps(rows: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """Return the steps' facts in row order, with `led_here`: the action of the step before, NULL at step 0."""
    keys = rows.select(_STEP)
    in_order = keys.equals(steps.select(_STEP))
    steps = steps if in_order else steps.sort(_STEP)
    if "taken" in steps.columns:
        episode, index = (pl.col(name) for name in _STEP)
        follows = (episode == episode.shift()) & (index == index.shift() + 1)
        steps = steps.with_columns(led_here=pl.when(follows).then(pl.col("taken").shift()))
    return steps if in_order else keys.join(steps, on=_STEP, how="left", maintain_order="left")


def summarise_steps(rows: pl.DataFrame) -> pl.DataFrame:
    """Compute each group's figures of advantages and anchors, from rows in canonical order.

    Columns: group_id, is_dead, steps, defined_steps, advantage_mean, _std, _min, _max, anchors, singleton_steps,
    shared_steps, anchor_episodes_mean, sign_disagreements; NULL without data. An anchor of n member rows counts n times
    1/n, which needs no grouping by anchor.
    """
    groups = Segments.of(rows, "group_id")
    advantage_N, a_step_N = to_floats(rows["advantage"]), to_floats(rows["a_step"])
    size_N, episodes_N = rows["anchor_size"].to_numpy(), rows["anchor_episodes"].to_numpy()
    member_N = ~np.isnan(a_step_N) & (size_N > 0) & ~_has_flag(rows["flags"], Flag.REVISIT)
    shared_N = episodes_N >= 2
    part_N = np.where(member_N, 1.0 / np.maximum(size_N, 1), 0.0)
    shared_part_N = np.where(shared_N, part_N, 0.0)
    shared_P = np.round(groups.sum(shared_part_N))
    met_P = np.round(groups.sum(shared_part_N * episodes_N))
    disagree_N = to_floats(rows["a_episode"]) * a_step_N < 0
    return pl.DataFrame(
        {
            "group_id": rows["group_id"].gather(groups.starts_K),
            "is_dead": _has_flag(rows["flags"].gather(groups.starts_K), Flag.DEAD_GROUP),
            "steps": groups.lengths_K,
            "defined_steps": groups.count(~np.isnan(advantage_N)),
            **_summarise_values(advantage_N, groups),
            "anchors": np.round(groups.sum(part_N)),
            "singleton_steps": groups.count(member_N & (size_N == 1)),
            "shared_steps": groups.count(shared_N),
            "anchor_episodes_mean": _mask_unknown(met_P / np.maximum(shared_P, 1.0), shared_P > 0),
            "sign_disagreements": groups.count(disagree_N),
        }
    )


def find_participants(rows: pl.DataFrame) -> pl.DataFrame:
    """Return episode_id and takes_part: the episode is scored, not excluded and has some advantage."""
    episodes = Segments.of(rows, "episode_id")
    first = rows.select("episode_id", "flags")[episodes.starts_K]
    defined_N = rows.select(pl.any_horizontal(pl.col("a_episode", "a_step", "advantage").is_not_null())).to_series()
    takes_part_E = episodes.any(defined_N.to_numpy()) & ~_has_flag(first["flags"], Flag.EXCLUDED, Flag.UNSCORED)
    return first.select("episode_id", pl.Series("takes_part", takes_part_E))


def _has_flag(texts_N: pl.Series, *flags: Flag) -> Bools:
    texts_with_flag = [text for text in texts_N.unique() if not set(flags).isdisjoint(text.split(","))]
    carry_N: Bools = texts_N.is_in(texts_with_flag).to_numpy() if texts_with_flag else np.zeros(len(texts_N), np.bool_)
    return carry_N


def _summarise_values(values_N: Floats, groups: Segments) -> dict[str, pl.Series]:
    """Return mean, sample deviation, minimum and maximum of the known values of each group."""
    known_N = ~np.isnan(values_N)
    count_P = groups.count(known_N)
    mean_P = groups.sum(np.where(known_N, values_N, 0.0)) / np.maximum(count_P, 1)
    square_N = np.where(known_N, values_N - groups.spread(mean_P), 0.0) ** 2
    std_P = np.sqrt(groups.sum(square_N) / np.maximum(count_P - 1, 1))
    return {
        "advantage_mean": _mask_unknown(mean_P, count_P > 0),
        "advantage_std": _mask_unknown(std_P, count_P > 1),
        "advantage_min": _mask_unknown(groups.min(np.where(known_N, values_N, np.inf)), count_P > 0),
        "advantage_max": _mask_unknown(groups.max(np.where(known_N, values_N, -np.inf)), count_P > 0),
    }


def _mask_unknown(values_P: Floats, known_P: Bools) -> pl.Series:
    return pl.Series(np.where(known_P, values_P, np.nan), nan_to_null=True)


JOB_COLUMNS = ("job_id", "series_id", "write_id", "input_fingerprint")
"""Columns of `credit_groups` that the job fills in."""
SCHEMA = pl.Schema({k: v for k, v in TABLES["credit_groups"].polars().items() if k not in JOB_COLUMNS})
"""Columns of the result of `diagnose_groups`."""


def diagnose_groups(
    advantages: pl.LazyFrame,
    episodes: pl.LazyFrame,
    steps: pl.LazyFrame | None = None,
    findings: pl.DataFrame | None = None,
) -> pl.LazyFrame:
    """Compute the columns of `credit_groups` except `JOB_COLUMNS`, over whole groups, sorted by group_id.

    Args:
        advantages: rows as an estimator returns them, sorted by (group_id, episode_id, step_index).
        episodes: `episode_id`, `group_id` (the one the estimator used), `episode_score`, and where known `run_id` and
            `policy_version`. `score_*` are figures of `episode_score`, even if the estimator used another score.
        steps: `episode_id`, `step_index`, and any of `action`, `tool_calls`, `state_is_error` and `state_hash`, or the
            result of `select_step_facts`. Figures without their columns are NULL.
        findings: `group_id` and `findings` of `check_groups`.
    """
    rows = advantages.collect()
    groups = _summarise_scores(find_participants(rows).lazy(), episodes)
    counted = ("steps", "defined_steps", "anchors", "singleton_steps", "shared_steps", "sign_disagreements")
    groups = groups.join(summarise_steps(rows).lazy(), on="group_id", how="left")
    is_dead = pl.col("is_dead") & (pl.col("scored") >= 2)
    groups = groups.with_columns(is_dead.fill_null(value=False), *(pl.col(n).fill_null(0) for n in counted))
    if findings is None:
        groups = groups.with_columns(findings=pl.lit(""))
    else:
        groups = groups.join(findings.lazy(), on="group_id", how="left").with_columns(pl.col("findings").fill_null(""))
    if steps is not None:
        facts = select_step_facts(steps.collect_schema().names())
        figures = measure_purity(rows, steps.select("episode_id", "step_index", *facts).collect())
        groups = groups.join(figures.lazy(), on="group_id", how="left")
    present = groups.collect_schema().names()
    # A group without shared states has 0 error anchors if the marks were read, else NULL.
    present_columns = {name: pl.col(name).fill_null(0) if name in _KNOWN else pl.col(name) for name in present}
    columns = {name: present_columns.get(name, pl.lit(None)) for name in SCHEMA}
    casts = {name: column if name == "group_id" else column.cast(SCHEMA[name]) for name, column in columns.items()}
    return groups.select(**casts).sort("group_id")


def _summarise_scores(participants: pl.LazyFrame, episodes: pl.LazyFrame) -> pl.LazyFrame:
    """Count each group's episodes and summarise the scores of its participants (`find_participants`)."""
    present = episodes.collect_schema().names()
    takes_part = pl.col("takes_part").fill_null(value=False)
    score = pl.col("episode_score").filter(takes_part)
    versions = pl.col("policy_version").filter(takes_part).drop_nulls().n_unique()
    run = pl.when(pl.col("run_id").n_unique() == 1).then(pl.col("run_id").first())
    return (
        episodes.join(participants, on="episode_id", how="left")
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


Action: TypeAlias = Literal["off", "warn", "refuse"]


class FindingText(NamedTuple):
    """Texts of a finding."""

    check: str
    """Check of the finding: an option of `IntegrityConfig`."""
    fault: str
    """Fault of the groups, with the fields {counted} and {episodes}."""
    figures: Callable[[dict[str, Any]], str]
    """Figures of one group, for examples."""
    then: str
    """Remedy, with a command or an option. LAKE stands for the lake."""
    counted: str = ""
    """Figure of a group that {counted} adds up."""


FINDINGS = {
    "broken_steps": FindingText(
        "contiguous",
        "episodes with missing or repeated steps",
        lambda row: f"{row['broken']} of {row['episodes']} episodes",
        "Ingest those episodes whole: `trajlake ingest FILE --lake LAKE`",
    ),
    "copied_siblings": FindingText(
        "copied_siblings",
        "{counted} of {episodes} episodes are exact copies of a sibling (the same states and actions)",
        lambda row: f"{row['copies']} of {row['episodes']}",
        "They count in means and deviations as if they were independent. To train on one of each: "
        "`trajlake select distinct --filter dedup:by=decisions,within=group --lake LAKE`",
        counted="copies",
    ),
    "incomplete": FindingText(
        "complete",
        "fewer episodes than were meant to run",
        lambda row: f"{row['episodes']} of {row['expected']}",
        "Collect the rest, or compute without this check: --check complete=off",
    ),
    "mixed_policies": FindingText(
        "mixed_policies",
        "several policies or versions of their weights",
        lambda row: f"{row['policies']} among {row['episodes']} episodes",
        "Usual where collection and training overlap (--check mixed_policies=off). To compare within one version: "
        "`trajlake group fresh --step staleness_cap:max_behind=0 --lake LAKE`, then --grouping fresh",
    ),
    "oversized": FindingText(
        "complete",
        "more episodes than were meant to run",
        lambda row: f"{row['episodes']} for {row['meant']}",
        "Look for a run that was ingested twice under two names: "
        "`trajlake sql 'SELECT run_id, count(*) FROM episodes GROUP BY ALL' --lake LAKE`",
    ),
    "several_starts": FindingText(
        "one_start",
        "episodes that begin differently (other initial messages, or another first state)",
        lambda row: f"{row['starts']} beginnings of {row['episodes']} episodes",
        "Expected where a simulated user speaks first (--check one_start=off). Otherwise they should not be compared: "
        "--check one_start=refuse",
    ),
    "several_tasks": FindingText(
        "one_task",
        "episodes of different tasks",
        lambda row: f"{row['tasks']} tasks",
        "Scores of different tasks are not comparable: leave --grouping out, or group by task (`trajlake group -h`)",
    ),
    "singleton": FindingText(
        "singleton",
        "fewer than two scored episodes, so no baseline",
        lambda row: f"{row['scored']} scored of {row['episodes']}",
        "Score them (`trajlake score FILE.py:FUNCTION --lake LAKE`), collect siblings, or compare across runs: "
        "`trajlake group merged --step merge_runs --lake LAKE`, then --grouping merged",
    ),
}
"""All findings, in alphabetical order."""


_NO_FINDINGS = pl.DataFrame(schema={"group_id": pl.Int64, "findings": pl.String})


class Problem(BaseModel, frozen=True, extra="forbid"):
    """One finding, over all groups."""

    finding: str
    """Name of the finding."""
    action: Action
    """Configured action."""
    groups: int
    """Groups with the finding."""
    counted: int = 0
    """Sum of the finding's figure over these groups; 0 without one."""
    examples: tuple[str, ...]
    """First groups by id: the task, and the figures."""

    def line(self, episodes: int) -> str:
        """Describe the finding over `episodes` checked episodes."""
        finding = FINDINGS[self.finding]
        fault = finding.fault.format(counted=self.counted, episodes=episodes)
        ellipsis = ", ..." if self.groups > len(self.examples) else ""
        names = f" ({', '.join(self.examples)}{ellipsis})" if self.examples else ""
        return f"{self.finding}: {fault}, in {count_noun(self.groups, 'group')}{names}. {finding.then}"


@dataclass(frozen=True)
class IntegrityReport:
    """Findings of the checks."""

    checked: int
    """Checked groups."""
    episodes: int
    problems: tuple[Problem, ...]
    """Findings of at least one group, by name."""
    findings: pl.DataFrame
    """`group_id` and `findings` (sorted names, joined by commas) of the groups with a finding, sorted by group_id."""

    @classmethod
    def merge(cls, reports: Sequence["IntegrityReport"]) -> "IntegrityReport":
        """Merge reports over different groups; without reports, return an empty one."""
        by_finding: dict[str, list[Problem]] = {}
        for problem in (problem for report in reports for problem in report.problems):
            by_finding.setdefault(problem.finding, []).append(problem)
        return cls(
            checked=sum(report.checked for report in reports),
            episodes=sum(report.episodes for report in reports),
            problems=tuple(_merge_problems(by_finding[name]) for name in sorted(by_finding)),
            findings=pl.concat([report.findings for report in reports] or [_NO_FINDINGS]).sort("group_id"),
        )

    def counts(self) -> dict[str, int]:
        """Return the number of groups per finding, and the sums of the findings' figures (`copies`: episodes)."""
        counted = {FINDINGS[problem.finding].counted: problem.counted for problem in self.problems if problem.counted}
        return {problem.finding: problem.groups for problem in self.problems} | counted

    def lines(self) -> list[str]:
        """Describe each finding."""
        return [problem.line(self.episodes) for problem in self.problems]

    def raise_refused(self) -> None:
        """Raise DataRefusedError with the findings and remedies if a refusing check has findings."""
        refusals = [problem for problem in self.problems if problem.action == "refuse"]
        if refusals:
            lines = ". ".join(problem.line(self.episodes) for problem in refusals)
            checks = sorted({FINDINGS[problem.finding].check for problem in refusals})
            options = " ".join(f"--check {check}=warn" for check in checks)
            msg = f"of {count_noun(self.checked, 'group')}: {lines}. To compute anyway: {options}"
            raise DataRefusedError(msg)


def _merge_problems(problems: list[Problem]) -> Problem:
    """Merge one finding of several reports, with the largest number of examples among them."""
    limit = max(len(problem.examples) for problem in problems)
    examples = [example for problem in problems for example in problem.examples]
    examples.sort(key=lambda example: example.partition(": ")[0])
    groups, counted = (sum(getattr(problem, name) for problem in problems) for name in ("groups", "counted"))
    return problems[0].model_copy(update={"groups": groups, "counted": counted, "examples": tuple(examples[:limit])})


_UNKNOWN = pl.lit(None, pl.UInt32)
_WRONG = {
    "broken_steps": pl.col("broken") > 0,
    "copied_siblings": pl.col("copies") > 0,
    "incomplete": pl.col("episodes") < pl.col("expected"),
    "mixed_policies": pl.col("policies") > 1,
    "oversized": pl.col("episodes") > pl.col("meant"),
    "several_starts": pl.col("starts") > 1,
    "several_tasks": pl.col("tasks") > 1,
    "singleton": pl.col("scored") < 2,
}
"""Finding -> condition on the group's figures."""
_NAMING = (pl.when(pl.col("task").is_null()).then(0).when(pl.col("tasks") == 1).then(1).otherwise(2), pl.col("task"))
"""Sort keys that order groups by their `_name_group`."""


class IntegrityConfig(BaseModel, frozen=True, extra="forbid"):
    """Integrity checks with their actions."""

    complete: Action = "warn"
    """The group has as many episodes as planned (`expected_group_size`). Findings: `incomplete`, `oversized`."""
    one_task: Action = "refuse"
    """All episodes of the group are of one task. Finding: `several_tasks`."""
    one_start: Action = "warn"
    """All episodes start with the same messages and the same first state. Finding: `several_starts`."""
    singleton: Action = "warn"
    """Two or more episodes have a score; fewer give no baseline. Finding: `singleton`."""
    contiguous: Action = "refuse"
    """Steps are 0, 1, 2, ... and as many as `num_steps`. Estimators always refuse the first gap; this check names all
    groups with one. Finding: `broken_steps`."""
    copied_siblings: Action = "warn"
    """No episode has the same states and actions, in order, as a sibling. Needs an estimator with anchors and
    `--purity`. Finding: `copied_siblings`."""
    mixed_policies: Action = "warn"
    """All episodes come from one policy and one version of its weights. Finding: `mixed_policies`."""
    expected_group_size: int | None = Field(default=None, ge=1)
    """Size of every group, which replaces the recorded one."""
    examples: int = Field(default=3, ge=0)
    """Groups named per finding."""


def check_groups(
    episodes: pl.LazyFrame, steps: pl.LazyFrame | None = None, config: IntegrityConfig | None = None
) -> IntegrityReport:
    """Check whole groups of a credit job; `IntegrityReport.merge` merges the reports of several calls.

    Args:
        episodes: one row per episode: `episode_id`, `group_id` (the one the job uses), and where known `task_id`,
            `expected_group_size`, `spare` (planned siblings beyond that size), `policy`, `policy_version`,
            `num_steps`, `initial_messages`, `episode_score`.
        steps: all their steps, inactive ones included: `episode_id`, `step_index`, and where known `state_hash`; or the
            result of `inputs.measure_episodes`, which the check for copies needs.
        config: what to check.
    """
    config = config or IntegrityConfig()
    groups = _measure_groups(episodes, steps, config).collect().sort("group_id")
    actions: dict[str, Action] = {name: getattr(config, finding.check) for name, finding in FINDINGS.items()}
    problems = []
    for name in (name for name, action in actions.items() if action != "off"):
        affected = groups.filter(_WRONG[name])
        if affected.height:
            rows = affected.sort(*_NAMING, "group_id").head(config.examples).iter_rows(named=True)
            examples = tuple(f"{_name_group(row)}: {FINDINGS[name].figures(row)}" for row in rows)
            counted = FINDINGS[name].counted
            problems.append(
                Problem(
                    finding=name,
                    action=actions[name],
                    groups=affected.height,
                    counted=int(affected[counted].sum()) if counted else 0,
                    examples=examples,
                )
            )
    names = [pl.when(_WRONG[problem.finding]).then(pl.lit(problem.finding)) for problem in problems]
    joined_names = pl.concat_str(pl.lit(None, pl.String), *names, separator=",", ignore_nulls=True).alias("findings")
    findings = groups.select("group_id", joined_names).filter(pl.col("findings") != "")
    return IntegrityReport(groups.height, int(groups["episodes"].sum()), tuple(problems), findings)


def _measure_groups(episodes: pl.LazyFrame, steps: pl.LazyFrame | None, config: IntegrityConfig) -> pl.LazyFrame:
    """Compute the figures that the checks compare, one row per group; NULL where unknown."""
    table = _add_step_faults(episodes, steps)
    present = table.collect_schema().names()

    def count_distinct_values(*names: str) -> pl.Expr:
        """Return the largest number of distinct known values among the columns."""
        counts = [pl.col(name).drop_nulls().n_unique() for name in names if name in present]
        return pl.max_horizontal(*counts) if counts else _UNKNOWN

    known_decisions = pl.col("decisions").drop_nulls()
    expected = pl.col("expected_group_size").max() if "expected_group_size" in present else _UNKNOWN
    if config.expected_group_size is not None:
        expected = pl.lit(config.expected_group_size)
    is_oversampled = config.expected_group_size is None and "spare" in present
    spare = pl.col("spare").max().fill_null(0) if is_oversampled else pl.lit(0)
    return table.group_by("group_id").agg(
        pl.len().alias("episodes"),
        expected.alias("expected"),
        (expected.cast(pl.Int64) + spare.cast(pl.Int64)).alias("meant"),
        (pl.col("broken").sum() if "broken" in present else _UNKNOWN).alias("broken"),
        count_distinct_values("policy", "policy_version").alias("policies"),
        count_distinct_values("initial_messages", "first_state").alias("starts"),
        count_distinct_values("task_id").alias("tasks"),
        (pl.col("task_id").drop_nulls().min() if "task_id" in present else pl.lit(None, pl.String)).alias("task"),
        (known_decisions.len() - known_decisions.n_unique() if "decisions" in present else _UNKNOWN).alias("copies"),
        (pl.col("episode_score").count() if "episode_score" in present else pl.len()).alias("scored"),
    )


def _add_step_faults(episodes: pl.LazyFrame, steps: pl.LazyFrame | None) -> pl.LazyFrame:
    """Add, where known, `first_state` and `broken`: whether the steps differ from 0, 1, 2, ..."""
    if steps is not None:
        episodes = episodes.join(_measure_steps(steps), on="episode_id", how="left")
    present = episodes.collect_schema().names()
    if "initial_messages" in present:
        # Hash now to hold no text (NULL has a hash too). The hash is valid in this query only.
        messages = pl.col("initial_messages")
        episodes = episodes.with_columns(pl.when(messages.is_not_null()).then(messages.hash()))
    if steps is not None:
        count = pl.col("count").fill_null(0)
        broken = (count > 0) & ((pl.col("first") != 0) | (pl.col("last") + 1 != count) | (pl.col("distinct") != count))
        if "num_steps" in present:
            broken |= (count != pl.col("num_steps")).fill_null(value=False)
        episodes = episodes.with_columns(broken.alias("broken"))
    return episodes


def _measure_steps(steps: pl.LazyFrame) -> pl.LazyFrame:
    """Measure each episode's step numbers and the hash of its first state, unless this is done already."""
    if "distinct" in steps.collect_schema():
        return steps
    index = pl.col("step_index")
    figures = [
        pl.len().alias("count"),
        index.min().alias("first"),
        index.max().alias("last"),
        index.n_unique().alias("distinct"),
    ]
    if "state_hash" in steps.collect_schema():
        steps = steps.with_columns(pl.when(index == 0).then("state_hash").alias("first_state"))
        figures.append(pl.col("first_state").max())
    return steps.group_by("episode_id").agg(figures)


def _name_group(row: dict[str, Any]) -> str:
    """Name a group by its task, or by its id if the task is unknown."""
    if row["task"] is not None:
        return f"task {row['task']}" if row["tasks"] == 1 else f"tasks {row['task']}, ..."
    group_id = row["group_id"]
    return f"group {ids.to_text(group_id) if isinstance(group_id, int) and 0 <= group_id <= ids.MASK else group_id}"
