"""Training data: the episodes that a job consumed, how stale they were, how far the policy moved, and uses of a step.

Shares are of the loss: the summed weight of an episode's tokens in the updates (`batches.loss_weight`), or of the
trained tokens where no weight is recorded.

The digest of its weights identifies a policy. A rescored checkpoint belongs to a job if the job saved these weights. It
is the policy of an update if it was saved right before the update; no other checkpoint stands in for that policy.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, Literal

import polars as pl

from lake import ids
from lake.documents import parse_json_object
from lake.read.training import ClipFlag, RatioLimits, read_limits
from viewer.queries import LakeReader, Params, Row, get_first_row
from viewer.queries.training import find_credit_of_job

MOST_ROWS = 50
"""Largest number of rows of a breakdown."""

MixtureColumn = Literal["run_id", "task_id", "collection_round", "policy_version", "source_format"]
"""Columns that break a mixture down."""


def count_repeats(lake: LakeReader, job_id: int) -> pl.DataFrame:
    """Count the episodes of a job by how often it trained on their most trained step: times, episodes."""
    query = f"""
        SELECT times::BIGINT AS times, count(*) AS episodes
        FROM (SELECT episode_id, max(times) AS times FROM step_seen WHERE job_id = $job GROUP BY episode_id)
        GROUP BY times ORDER BY times LIMIT {MOST_ROWS}
        """
    return lake.sql(query, {"job": job_id})


def build_repeats_sql(job_id: int, times: int) -> str:
    """Return a query that names the episodes that a job trained on so many times."""
    mine = f"SELECT episode_id FROM step_seen WHERE job_id = id('{ids.to_text(job_id)}')"
    return f"{mine} GROUP BY episode_id HAVING max(times) = {times}"


def read_mixture(lake: LakeReader, job_id: int, by: MixtureColumn) -> pl.DataFrame:
    """Return the data of a job by the values of a column, the largest share first.

    value (NULL: unknown), episodes, rows, action_tokens, share.
    """
    query = f"""
        WITH mine AS (
            SELECT b.episode_id, b.action_tokens, b.loss_weight, e.{by}::VARCHAR AS value
            FROM trained_batches AS b LEFT JOIN episodes AS e USING (episode_id) WHERE b.job_id = $job
        ),
        total AS (SELECT sum(loss_weight) AS weight, count(*) = count(loss_weight) AS is_weighed,
                         sum(action_tokens) AS tokens FROM mine)
        SELECT value, count(DISTINCT episode_id) AS episodes, count(*) AS rows,
               sum(action_tokens)::BIGINT AS action_tokens,
               if(any_value(is_weighed), sum(loss_weight) / any_value(weight), sum(action_tokens) / any_value(tokens))
               AS share
        FROM mine, total GROUP BY value ORDER BY share DESC, value LIMIT {MOST_ROWS}
        """
    return lake.sql(query, {"job": job_id})


def has_weights(lake: LakeReader, job_id: int) -> bool:
    """Return whether the lake has the weights of all rows that a job consumed."""
    query = "SELECT count(*) = count(loss_weight) FROM trained_batches WHERE job_id = $job"
    return bool(lake.sql(query, {"job": job_id}).item())


@dataclass(frozen=True, slots=True)
class FunnelStage:
    """A line of the funnel."""

    name: str
    episodes: int | None
    """None if the stage counts only steps."""
    steps: int | None
    sql: str | None
    """A query that names its episodes; None if no query can."""
    is_drop: bool = False
    """Whether the stage is a reason for dropped data."""


def read_funnel(lake: LakeReader, job_id: int) -> list[FunnelStage]:
    """Return the stages from the episodes of the lake to the trained ones, in order, without unrecorded stages.

    Drops by reason come between the selected and the trained episodes.
    """
    row = get_first_row(lake.sql("SELECT parameters, counts FROM job_runs WHERE job_id = ?", [job_id]))
    if row is None:
        return []
    parameters, counts = (parse_json_object(row[name]) for name in ("parameters", "counts"))
    query = "SELECT count(DISTINCT episode_id), count(*) FROM step_seen WHERE job_id = ?"
    episodes, steps = lake.sql(query, [job_id]).row(0)
    mine = f"SELECT episode_id FROM trained_batches WHERE job_id = id('{ids.to_text(job_id)}')"
    terms = [f"where {parameters['where']}"] if parameters.get("where") else []
    terms += [f"selection {parameters['selection']}"] if parameters.get("selection") else []
    terms += ["mixture"] if parameters.get("mixture") else []
    selection: str | None = f"SELECT episode_id FROM episodes WHERE (\n{parameters.get('where') or 'true'}\n)"
    if parameters.get("selection") or parameters.get("mixture") or parameters.get("validation"):
        selection = None  # more than a predicate selected the episodes
    stages = (
        [FunnelStage("In the lake", counts["episodes_in_lake"], None, None)] if "episodes_in_lake" in counts else []
    )
    job_counts = get_first_row(lake.sql("SELECT rows_in, rows_dropped FROM job_runs WHERE job_id = ?", [job_id])) or {}
    selected, empty = job_counts.get("rows_in"), job_counts.get("rows_dropped")
    if selected is not None:
        stages.append(FunnelStage(f"Selected ({', '.join(terms) or 'all'})", selected, None, selection))
    stages += _list_drops(lake, job_id, counts, selection)
    if empty:
        sql = None if selection is None else f"{selection} AND episode_id NOT IN ({mine})"
        stages.append(FunnelStage("Nothing left to train on", empty, None, sql, is_drop=True))
    return [*stages, FunnelStage("Trained on", episodes, steps, f"SELECT DISTINCT {mine.removeprefix('SELECT ')}")]


_OF_STEPS = {"inactive": "NOT is_active", "copied_context": "is_copied_context", "not_trainable": "NOT trainable"}
"""Reasons that follow from a column of `steps`."""
_OF_CREDIT = {
    "dead_group": "list_has_any(string_split(flags, ','), ['dead_group', 'singleton_group'])",
    "no_advantage": "advantage IS NULL",
}
"""Reasons that follow from the credit."""


def _list_drops(lake: LakeReader, job_id: int, counts: Row, selection: str | None) -> list[FunnelStage]:
    """Return the steps without loss by reason, the most frequent first."""
    drops = {name.removeprefix("dropped_"): n for name, n in counts.items() if name.startswith("dropped_")}
    credit = find_credit_of_job(lake, job_id) if drops.keys() & _OF_CREDIT.keys() else None
    stages = []
    for reason, steps in sorted(drops.items(), key=lambda drop: -drop[1]):
        episodes = None
        if reason in _OF_STEPS:
            episodes = f"SELECT episode_id FROM steps WHERE {_OF_STEPS[reason]}"
        elif reason in _OF_CREDIT and credit is not None:
            episodes = f"SELECT episode_id FROM {credit.rows} WHERE {_OF_CREDIT[reason]}"
        sql = None if episodes is None or selection is None else f"{selection} AND episode_id IN ({episodes})"
        stages.append(FunnelStage(reason.replace("_", " "), None, steps, sql, is_drop=True))
    return stages


MOST_AGES = 50
"""Largest number of listed ages."""

STALENESS_SQL = """
    WITH versions AS (
        SELECT optimizer_step, max(policy_version) AS version FROM checkpoints
        WHERE job_id = $job AND "cursor" ->> '$.round' IS NOT NULL GROUP BY optimizer_step
    ),
    consumed AS (
        SELECT b.*, coalesce(e.run_id = (SELECT run_id FROM job_runs WHERE job_id = $job), false) AS is_own,
               e.run_id, e.policy_version
        FROM trained_batches AS b LEFT JOIN episodes AS e USING (episode_id) WHERE b.job_id = $job
    ),
    numbering AS (
        SELECT coalesce((SELECT bool_and(policy_version = optimizer_step) FROM checkpoints WHERE job_id = $job), false)
               AND coalesce(bool_and(policy_version <= optimizer_step) FILTER (is_own), false) AS is_of_updates
        FROM consumed
    ),
    stale AS (
        SELECT c.*, CASE WHEN NOT c.is_own THEN max(c.policy_version) OVER (PARTITION BY c.run_id)
                         WHEN EXISTS (FROM versions) THEN coalesce(v.version, 0)
                         WHEN n.is_of_updates THEN c.optimizer_step
                         ELSE max(c.policy_version) OVER (PARTITION BY c.run_id ORDER BY c.optimizer_step)
                    END - c.policy_version AS staleness
        FROM consumed AS c CROSS JOIN numbering AS n
        ASOF LEFT JOIN versions AS v ON c.optimizer_step >= v.optimizer_step
    )
    """
"""WITH clauses: `stale` has the rows of `batches` of $job with `staleness` in policy versions; NULL: unknown.

Staleness is the version of the update minus the version of the rollout. For rollouts of the job's run, the version of
an update is the one in the checkpoints of a loop. Without a loop it is the index of the update, if all checkpoints
number versions by updates and no rollout is newer than its update. Otherwise it is the newest version consumed up to
the update. Rollouts of another run are compared with the newest version of that run that the job consumed, as in the
trainer's metrics.
"""


def count_by_staleness(lake: LakeReader, job_id: int) -> pl.DataFrame:
    """Count a job's data by staleness: staleness (NULL: unknown), episodes, rows, action_tokens."""
    query = f"""{STALENESS_SQL}
        SELECT staleness, count(DISTINCT episode_id) AS episodes, count(*) AS rows,
               sum(action_tokens)::BIGINT AS action_tokens
        FROM stale GROUP BY staleness ORDER BY staleness NULLS LAST LIMIT {MOST_AGES}
        """
    return lake.sql(query, {"job": job_id})


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """The lowest and highest policy version of the episodes of an update, and of their staleness."""

    versions: tuple[int, int]
    behind: tuple[int, int]


def read_versions_around(lake: LakeReader, job_id: int, update: int) -> dict[int, VersionSpan]:
    """Return the versions of an update and its neighbours, by update; updates without known versions are left out."""
    query = f"""{STALENESS_SQL}
        SELECT optimizer_step, min(policy_version), max(policy_version), min(staleness), max(staleness) FROM stale
        WHERE policy_version IS NOT NULL GROUP BY optimizer_step ORDER BY optimizer_step
        """
    # One query for all updates, because each reads the same rows: the next update finds the answer in the cache.
    played = lake.sql(query, {"job": job_id})
    rows = played.filter(pl.col("optimizer_step").is_between(update - 1, update + 1)).iter_rows()
    return {step: VersionSpan((oldest, newest), (least, most)) for step, oldest, newest, least, most in rows}


DRIFT_STEPS = 5000
"""Largest number of steps that are read."""
_STOP_FLAGS = (ClipFlag.MASKED, ClipFlag.ABOVE, ClipFlag.BELOW, ClipFlag.DUAL)


def read_drift(lake: LakeReader, job_id: int, series_id: int) -> pl.DataFrame:
    """Return log-ratios of a policy to the policies that sampled a job's data, by staleness, freshest first.

    The data are at most `DRIFT_STEPS` consumed steps that `trajlake rescore` read with the job's checkpoint, drawn by a
    hash of their ids. Columns: staleness (NULL: unknown), steps, tokens; mean, q05, q50, q95 of the log-ratio of a
    token; ess, the effective sample size of the ratios as a share of the tokens. stopped and limited are shares of the
    tokens whose gradient the clip or a mask stops, and whose weight is at its limit. They follow the rule of the losses
    (`lake.read.training`) and are NULL where the loss has no such limit or the advantages are unknown.
    """
    credit = find_credit_of_job(lake, job_id)
    advantage = "NULL::DOUBLE" if credit is None else "a.advantage"
    joined = "" if credit is None else f"LEFT JOIN {credit.rows} AS a USING (episode_id, step_index)"
    query = f"""{STALENESS_SQL},
        seen AS (SELECT episode_id, step_index FROM step_seen WHERE job_id = $job),
        age AS (SELECT episode_id, min(staleness) AS staleness FROM stale GROUP BY episode_id),
        chosen AS (
            SELECT r.episode_id, r.step_index, r.encoding_id, r.logprobs
            FROM ratios AS r SEMI JOIN seen USING (episode_id, step_index)
            WHERE r.series_id = $series AND r.log_ratio IS NOT NULL
            ORDER BY hash(r.episode_id, r.step_index, r.encoding_id) LIMIT $most
        )
        SELECT row_number() OVER () AS step, g.staleness, {advantage} AS advantage, c.logprobs AS new,
               t.action_logprobs AS old, t.action_mask AS sampled
        FROM chosen AS c
        JOIN tokens AS t USING (episode_id, step_index, encoding_id)
        JOIN age AS g USING (episode_id) {joined}
        """
    params: Params = {"job": job_id, "series": series_id, "most": DRIFT_STEPS}
    tokens = lake.sql(query, params).explode("new", "old", "sampled").filter("sampled")
    tokens = tokens.with_columns(d=pl.col("new").cast(pl.Float64) - pl.col("old"))
    ratio, limits = pl.col("d").exp(), _read_job_limits(lake, job_id)
    flags: list[tuple[ClipFlag, pl.Expr]] = []
    if isinstance(limits, RatioLimits) and explain_missing_clip(lake, job_id) is None:
        unit_ratio = ratio if limits.unit == "token" else pl.col("d").mean().over("step").exp()
        flags = limits.clip_flags(ratio, unit_ratio, pl.col("advantage"))
    stopped = [condition for flag, condition in flags if flag in _STOP_FLAGS]
    limited = [condition for flag, condition in flags if flag is ClipFlag.LIMITED]
    return (
        tokens.with_columns(
            stopped=pl.any_horizontal(stopped) if stopped else pl.lit(None, pl.Boolean),
            limited=pl.any_horizontal(limited) if limited else pl.lit(None, pl.Boolean),
        )
        .group_by("staleness")
        .agg(
            steps=pl.col("step").n_unique(),
            tokens=pl.len(),
            mean=pl.col("d").mean(),
            q05=pl.col("d").quantile(0.05, "linear"),
            q50=pl.col("d").quantile(0.5, "linear"),
            q95=pl.col("d").quantile(0.95, "linear"),
            ess=ratio.sum() ** 2 / ratio.pow(2).sum() / pl.len(),
            stopped=pl.col("stopped").mean(),
            limited=pl.col("limited").mean(),
        )
        .sort("staleness", nulls_last=True)
    )


def explain_missing_clip(lake: LakeReader, job_id: int) -> str | None:
    """Return why a job has no shares of clipped tokens; None if it has."""
    limits = _read_job_limits(lake, job_id)
    if isinstance(limits, str):
        return limits
    if limits == RatioLimits():
        return "its loss limits no ratio"
    return None if limits.unit in {"token", "turn"} else f"its ratio is that of the whole {limits.unit}"


def _read_job_limits(lake: LakeReader, job_id: int) -> RatioLimits | str:
    parameters = lake.sql("SELECT parameters FROM job_runs WHERE job_id = ?", [job_id])["parameters"]
    return read_limits(_get_loss(parse_json_object(parameters[0])) if len(parameters) else None)


def _get_loss(parameters: Row) -> Any:
    """Return the options of a job's loss; training jobs of older loops have them under its name, `ppo`."""
    return parameters.get("loss") or parameters.get("ppo")


JOBS, UPDATES = 4, 20
"""Largest number of listed jobs (the newest) and of listed updates of each (the first)."""
WITH_REFERENCE = {"dpo", "dmpo", "kto"}
"""Losses that always take a reference policy."""
Policies = dict[int, int]
"""Series of `ratios` -> updates after which its weights were the job's."""


@dataclass(frozen=True, slots=True)
class StepUse:
    """The use of a step by one training job."""

    run: str | None
    loss: str
    averaged: str | None
    """How the loss averages; None if its options do not say."""
    limits: RatioLimits | str
    """Its limits of importance ratios, or why they are unknown."""
    times: int
    """Rows of `batches` that hold the step."""
    updates: list[int]
    """The first updates that used the step."""
    weights: tuple[float, float] | None
    """Smallest and largest weight of a token of the step in an update; None if not recorded."""
    credit: str | None
    """The source of its advantages."""
    advantage: float | None
    policies: Policies
    """Policies of the job that were rescored."""
    references: frozenset[int]
    """Series of its reference policy."""
    unit_log_ratios: dict[tuple[int, int], float | None] = field(default_factory=dict)
    """Mean log-ratio of the step's unit by series and encoding, for losses that clip units; None if unknown."""


def read_step_uses(lake: LakeReader, episode_id: int, step_index: int) -> list[StepUse]:
    """Return the uses of a step by training jobs, the newest first."""
    query = f"""
        WITH mine AS (
            SELECT *, token_weights[$step - first_step + 1] AS weight FROM trained_batches
            WHERE episode_id = $episode AND $step BETWEEN first_step AND last_step
        )
        SELECT m.job_id, r.run_id, r.parameters, count(*) AS times,
               list(m.optimizer_step ORDER BY m.optimizer_step)[:{UPDATES}] AS updates,
               min(m.weight) AS lightest, max(m.weight) AS heaviest,
               arg_min(m.first_step, m.optimizer_step) AS first_step,
               arg_min(m.last_step, m.optimizer_step) AS last_step,
               arg_min(m.token_weights, m.optimizer_step) AS token_weights
        FROM mine AS m JOIN job_runs AS r USING (job_id)
        WHERE m.weight IS NULL OR m.weight > 0
        GROUP BY m.job_id, r.run_id, r.parameters, r.started_at ORDER BY r.started_at DESC, m.job_id LIMIT {JOBS}
        """
    rows = lake.sql(query, {"episode": episode_id, "step": step_index}).to_dicts()
    if not rows:
        return []
    query = f"""
        SELECT DISTINCT r.encoding_id, {_SERIES} FROM ratios AS r JOIN job_runs AS j USING (job_id)
        WHERE r.episode_id = $episode AND r.step_index = $step LIMIT 100
        """
    scored = lake.sql(query, {"episode": episode_id, "step": step_index})
    policies, initial = _find_policies(lake, [row["job_id"] for row in rows], scored)
    return [
        _build_step_use(lake, row, episode_id, step_index, scored, policies[row["job_id"]], initial) for row in rows
    ]


def list_rescored_policies(lake: LakeReader, job_id: int) -> dict[int, tuple[str, int]]:
    """Return a job's policies that were rescored on any data, in order of updates: series -> name, updates done."""
    scored = lake.sql(
        f"SELECT DISTINCT {_SERIES} FROM job_runs AS j WHERE j.kind = 'rescore' AND j.status = 'succeeded'"
    )
    policies, _ = _find_policies(lake, [job_id], scored)
    names = dict(scored.select("series_id", "checkpoint").iter_rows())
    return {
        series: (names[series], done) for series, done in sorted(policies[job_id].items(), key=lambda policy: policy[1])
    }


_SERIES = """
    j.series_id, j.parameters ->> '$.checkpoint' AS checkpoint, j.parameters ->> '$.weights_sha256' AS sha256,
    j.parameters ->> '$.path' AS path, j.parameters ->> '$.spelled' AS spelled
    """


def _find_policies(
    lake: LakeReader, job_ids: list[int], scored: pl.DataFrame
) -> tuple[dict[int, Policies], dict[int, frozenset[int]]]:
    """Return the jobs' policies among those that scored, and the series of each job's initial weights."""
    query = """
        SELECT DISTINCT job_id, optimizer_step AS done, sha256 FROM checkpoints WHERE list_contains($jobs, job_id)
        UNION
        SELECT DISTINCT job_id, 0, "cursor" ->> '$.model_sha256' FROM checkpoints WHERE list_contains($jobs, job_id)
        """
    saved = lake.sql(query, {"jobs": job_ids}).join(scored.select("series_id", "sha256").unique(), on="sha256")
    policies: dict[int, Policies] = defaultdict(dict)
    for row in saved.sort("done").iter_rows(named=True):
        policies[row["job_id"]].setdefault(row["series_id"], row["done"])
    initial = {
        job: frozenset(series for series, done in updates.items() if done == 0) for job, updates in policies.items()
    }
    return policies, initial


def _build_step_use(
    lake: LakeReader,
    row: Row,
    episode_id: int,
    step_index: int,
    scored: pl.DataFrame,
    policies: Policies,
    initial: dict[int, frozenset[int]],
) -> StepUse:
    parameters = parse_json_object(row["parameters"])
    loss = _get_loss(parameters)
    options = loss if isinstance(loss, dict) else {}
    limits = read_limits(loss)
    credit = find_credit_of_job(lake, row["job_id"])
    advantage = None
    if credit is not None:
        query = f"SELECT advantage FROM {credit.rows} WHERE episode_id = $episode AND step_index = $step"
        advantages = lake.sql(query, {"episode": episode_id, "step": step_index})
        advantage = advantages["advantage"].item() if advantages.height == 1 else None
    of_units: dict[tuple[int, int], float | None] = {}
    if isinstance(limits, RatioLimits) and limits.unit in {"turn", "episode"}:
        weights = row["token_weights"]
        span = range(row["first_step"], row["last_step"] + 1)
        steps = [n for n, weight in zip(span, weights or [1.0] * len(span), strict=True) if weight > 0]
        steps = steps if limits.unit == "episode" else [step_index]
        mine = scored.filter(pl.col("series_id").is_in(list(policies)))
        of_units = _read_unit_log_ratios(
            lake, episode_id, steps, mine, is_complete=weights is not None or limits.unit == "turn"
        )
    return StepUse(
        run=row["run_id"],
        loss=str(options.get("name") or loss or "an unknown loss"),
        averaged=options.get("aggregation"),
        limits=limits,
        times=row["times"],
        updates=row["updates"],
        weights=None if row["lightest"] is None else (row["lightest"], row["heaviest"]),
        credit=None if credit is None else credit.title,
        advantage=advantage,
        policies=policies,
        references=_find_references(parameters, options, scored, initial.get(row["job_id"], frozenset())),
        unit_log_ratios=of_units,
    )


def _read_unit_log_ratios(
    lake: LakeReader, episode_id: int, steps: list[int], mine: pl.DataFrame, *, is_complete: bool
) -> dict[tuple[int, int], float | None]:
    """Return the mean log-ratio of a unit's tokens by series and encoding; None where it is incomplete.

    Args:
        is_complete: whether the steps are known to be all steps of the unit.
    """
    query = """
        SELECT series_id, encoding_id, if(count(log_ratio) = $wanted, sum(log_ratio) / sum(tokens), NULL) AS mean
        FROM rescored_steps
        WHERE episode_id = $episode AND list_contains($steps, step_index) AND list_contains($series, series_id)
        GROUP BY series_id, encoding_id
        """
    params = {"episode": episode_id, "steps": steps, "series": mine["series_id"].to_list(), "wanted": len(steps)}
    rows = lake.sql(query, params).iter_rows()
    return {(series, encoding): mean if is_complete else None for series, encoding, mean in rows}


def _find_references(parameters: Row, options: Row, scored: pl.DataFrame, initial: frozenset[int]) -> frozenset[int]:
    """Return the series of a job's reference policy, if any: the model its loss names, or the initial weights."""
    if not (options.get("kl") or {}).get("coefficient") and options.get("name") not in WITH_REFERENCE:
        return frozenset()
    named = parameters.get("reference")
    if named is None:
        return initial
    return frozenset(scored.filter((pl.col("spelled") == named) | (pl.col("path") == named))["series_id"])
