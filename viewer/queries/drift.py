"""How far a policy has moved from the ones that sampled what a job trained on, by how stale that was.

Of the steps that the job consumed and `trajlake rescore` read with one of the job's own checkpoints, so many at most,
drawn by a hash of their ids. What the clip does is told by the rule of the losses (`lake.read.ratio_limits`).
"""

import polars as pl

from lake.documents import json_object
from lake.read.ratio_limits import Fate, RatioLimits, limits_of
from viewer.queries import Params, Reads
from viewer.queries.staleness import STALENESS
from viewer.queries.training import credit_of

STEPS = 5000
"""Steps that are looked at, at most."""
_STOPPED = (Fate.MASKED, Fate.ABOVE, Fate.BELOW, Fate.DUAL)


def by_staleness(lake: Reads, job_id: int, series_id: int) -> pl.DataFrame:
    """Log-ratios of a policy to the ones that sampled, by staleness (NULL: unknown), the freshest first.

    staleness, steps, tokens, mean, q05, q50, q95 (of the log-ratio of a token), ess (effective sample size of the
    ratios, as a share of the tokens), stopped and limited (shares of the tokens whose gradient the clip or a mask
    stops, and whose weight is at its limit; NULL where the loss has no such limit or its advantages are not known).
    """
    credit = credit_of(lake, job_id)
    advantage = "NULL::DOUBLE" if credit is None else "a.advantage"
    joined = "" if credit is None else f"LEFT JOIN {credit.rows} AS a USING (episode_id, step_index)"
    query = f"""{STALENESS},
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
    params: Params = {"job": job_id, "series": series_id, "most": STEPS}
    tokens = lake.sql(query, params).explode("new", "old", "sampled").filter("sampled")
    tokens = tokens.with_columns(d=pl.col("new").cast(pl.Float64) - pl.col("old"))
    ratio, limits = pl.col("d").exp(), _limits(lake, job_id)
    fates = [] if limits is None else _fates(limits, ratio)
    stopped = [where for fate, where in fates if fate in _STOPPED]
    limited = [where for fate, where in fates if fate is Fate.LIMITED]
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


def clip(lake: Reads, job_id: int) -> str | None:
    """Why the shares that a job's clip stops are not told; None where they are."""
    limits = _parsed(lake, job_id)
    if isinstance(limits, str):
        return limits
    if limits == RatioLimits():
        return "its loss limits no ratio"
    return None if limits.unit in {"token", "turn"} else f"its ratio is that of the whole {limits.unit}"


def _limits(lake: Reads, job_id: int) -> RatioLimits | None:
    limits = _parsed(lake, job_id)
    return limits if isinstance(limits, RatioLimits) and clip(lake, job_id) is None else None


def _parsed(lake: Reads, job_id: int) -> RatioLimits | str:
    parameters = lake.sql("SELECT parameters FROM job_runs WHERE job_id = ?", [job_id])["parameters"]
    return limits_of(json_object(parameters[0]).get("loss") if len(parameters) else None)


def _fates(limits: RatioLimits, ratio: pl.Expr) -> list[tuple[Fate, pl.Expr]]:
    of_unit = ratio if limits.unit == "token" else pl.col("d").mean().over("step").exp()
    return limits.fates(ratio, of_unit, pl.col("advantage"))
