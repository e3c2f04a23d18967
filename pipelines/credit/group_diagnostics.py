"""What a credit job found in each group: the rows of `credit_groups`.

Three questions per group. Do its outcomes differ (a dead group teaches nothing)? Do its steps meet in the same states
(a step alone in its state has no step advantage)? And are those states what they seem? Where everyone took the same
action nothing is compared, a text reached by many different actions is hardly one situation, an error text is none.

Columnar, over one range of a job at a time. The last question needs texts (actions) of the steps that share a state,
and is answered only if they are given.
"""

from collections.abc import Iterator

import polars as pl

from lake.tables import TABLES
from pipelines.credit import group_figures
from pipelines.credit.purity import purity, seen_at_steps

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
    """Figures of each group, over whole groups.

    Args:
        advantages: rows as an estimator returns them, sorted by (group_id, episode_id, step_index).
        episodes: `episode_id`, `group_id` (the one the estimator used), `episode_score`, and where known `run_id` and
            `policy_version`. `score_*` are figures of `episode_score`, also where the estimator used another score.
        steps: `episode_id`, `step_index`, and any of `action`, `tool_calls` and `state_is_error`, or what
            `pipelines.credit.purity.seen_at_steps` makes of them; what is not there is not read, and the figures that
            need it are NULL.
        findings: `group_id` and `findings`, as `check_groups` gives them.

    Returns:
        One row per group of `episodes`, sorted by group_id: the columns of the table `credit_groups` without those the
        job fills in.
    """
    rows = advantages.collect()
    groups = _outcomes(group_figures.of_episodes(rows).lazy(), episodes)
    counted = ("steps", "defined_steps", "anchors", "singleton_steps", "shared_steps", "sign_disagreements")
    groups = groups.join(group_figures.of_steps(rows).lazy(), on="group_id", how="left")
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
        if name in ("one_action_anchors", "error_anchors", "error_steps") and name in present:
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
