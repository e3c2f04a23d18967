"""Training: metrics of a job, what each of its optimizer steps consumed, and advantages: named, by step, in figures.

Which rows a choice of credit means is decided in `lake.judgements.credit`, as for every other reader of the lake.
"""

from collections.abc import Sequence
from dataclasses import replace

import polars as pl

from lake.documents import json_object
from lake.errors import DataRefusedError, UsageError
from lake.judgements.credit import Credit, find_credit
from lake.read.online_runs import LOOP
from viewer.queries import Params, Reads, Row, Sort, Window, only_row, outcomes

_SOME = 50
"""Episodes of a job that are looked at first, as nearly always all of them have advantages or none."""
_NO_ADVANTAGES = "(SELECT * FROM advantages WHERE false)"
GROUPS = 8
"""Groups of a batch that are listed at most."""
POINTS = 1000
"""Points of a curve at most: beyond, neighbouring steps are put together by their mean."""


JOBS = 500
"""Training jobs that can be chosen at most."""


def jobs(lake: Reads, named: Sequence[int] = (), limit: int = JOBS) -> pl.DataFrame:
    """Jobs with metrics or batches: updates with a batch, names of metrics, and when the last metric was written.

    Training comes first, the newest in front; total is the number of jobs. Those that are `named` are among them
    however old they are. An online run is the one of its training job, and told by its state.
    """
    query = f"""
        SELECT r.job_id, r.kind, r.run_id, r.parameters, coalesce(l.status, r.status) AS status, r.started_at,
               r.seconds, l.status IS NOT NULL AS online, coalesce(b.updates, 0) AS updates,
               coalesce(m.metrics, 0) AS metrics, m.last_at, count(*) OVER () AS total,
               row_number() OVER (
                   ORDER BY r.kind = 'train' OR b.updates > 0 DESC, r.started_at DESC, r.job_id
               ) AS place
        FROM job_runs AS r
        LEFT JOIN (
            SELECT job_id, count(DISTINCT optimizer_step) AS updates FROM trained_batches GROUP BY job_id
        ) AS b USING (job_id)
        LEFT JOIN (
            SELECT job_id, count(DISTINCT name) AS metrics, max("at") AS last_at FROM run_metrics GROUP BY job_id
        ) AS m USING (job_id)
        LEFT JOIN (
            SELECT json_extract_string(parameters, '$.train_job') AS train_job, status FROM job_runs
            WHERE kind = '{LOOP}'
        ) AS l ON l.train_job = id_text(r.job_id)
        WHERE r.kind <> '{LOOP}' AND (r.kind = 'train' OR b.updates > 0 OR m.metrics > 0)
        ORDER BY list_contains($named::BIGINT[], r.job_id) DESC, place LIMIT $limit
        """
    return lake.sql(query, {"named": list(named), "limit": limit}).sort("place").drop("place")


def metrics(lake: Reads, job_id: int) -> pl.DataFrame:
    """Curves of a job: name, step (the first of the point), value (NULL where none could be computed); in order."""
    return _curves(lake, "job_id = $job", {"job": job_id})


def alarms(lake: Reads, job_id: int, limit: int = 200) -> tuple[list[tuple[int, int]], int]:
    """Stretches of updates at which an alarm was active: first and last step of each, in order, at most `limit`.

    And the number of all of them.
    """
    query = """
        WITH active AS (
            SELECT step, value > 0 AS is_on, row_number() OVER (ORDER BY step) AS place
            FROM run_metrics WHERE job_id = $job AND name = 'alarms'
        ),
        on_now AS (SELECT step, place - row_number() OVER (ORDER BY step) AS stretch FROM active WHERE is_on)
        SELECT min(step), max(step), count(*) OVER () AS total FROM on_now GROUP BY stretch ORDER BY 1 LIMIT $limit
        """
    rows = lake.sql(query, {"job": job_id, "limit": limit}).rows()
    return [(int(first), int(last)) for first, last, _ in rows], int(rows[0][2]) if rows else 0


def metrics_of_rounds(lake: Reads, run: str) -> pl.DataFrame:
    """The same of the rounds that were collected for a run, each by a job of its own."""
    return _curves(lake, "kind = 'collect' AND run_id = $run", {"run": run})


def _curves(lake: Reads, where: str, params: Params) -> pl.DataFrame:
    query = f"""
        WITH mine AS (SELECT name, step, value FROM run_metrics WHERE {where}),
        span AS (SELECT min(step) AS first, greatest(1, ceil((max(step) - min(step) + 1) / {POINTS}))::BIGINT AS width
                 FROM mine)
        SELECT name, first + (step - first) // width * width AS step, avg(value) AS value
        FROM mine, span GROUP BY ALL ORDER BY name, step
        """
    return lake.sql(query, params)


def jobs_of_run(lake: Reads, run: str, limit: int = 50) -> pl.DataFrame:
    """Jobs of a run that have metrics: job_id, kind, parameters, status, started_at, metrics.

    The online run comes first, then training, then others; the newest of each in front.
    """
    query = f"""
        SELECT r.job_id, r.kind, r.parameters, r.status, r.started_at, count(DISTINCT m.name) AS metrics
        FROM job_runs AS r JOIN run_metrics AS m USING (job_id)
        WHERE r.run_id = $run GROUP BY r.job_id, r.kind, r.parameters, r.status, r.started_at
        ORDER BY r.kind = '{LOOP}' DESC, r.kind = 'train' DESC, r.started_at DESC, r.job_id LIMIT $limit
        """
    return lake.sql(query, {"run": run, "limit": limit})


def credit_of(lake: Reads, job_id: int) -> Credit | None:
    """The advantages that a training job read; None if none of its episodes had any.

    What its parameters name (`advantages`), else what was current: in the snapshot that the job read, or, for a loop
    that computes credit as it goes, when it ended.
    """
    query = "SELECT parameters, input_snapshot, sequence FROM job_runs WHERE job_id = ?"
    row = only_row(lake.sql(query, [job_id]))
    if row is None:
        return None
    named = json_object(row["parameters"]).get("advantages")
    read = json_object(row["input_snapshot"]).get("jobs", row["sequence"])
    credit = credit_named(lake, named if isinstance(named, str) else None, read)
    if credit is None:
        return None
    if credit.before is None:
        credit = replace(credit, before=read)
    consumed = f"SELECT DISTINCT episode_id FROM trained_batches WHERE job_id = {job_id}"
    some = lake.sql(f"{consumed} LIMIT {_SOME}")["episode_id"]
    for rows in (credit.rows_of(lake, some), f"(SELECT * FROM {credit.rows} WHERE episode_id IN ({consumed}))"):
        if lake.sql(f"SELECT EXISTS (SELECT 1 FROM {rows})").item():
            return credit
    return None


def consumption(lake: Reads, job_id: int, credit: Credit | None) -> pl.DataFrame:
    """What the updates of a job consumed, in order, at most `POINTS` points; NULL where there is no credit.

    mean_return is of the outcomes by which the runs go. dead_share, positive, negative and undefined are shares of the
    steps; mean_size is the mean |advantage|.
    """
    mine = f"""
        WITH mine AS (SELECT * FROM trained_batches WHERE job_id = $job),
        span AS (SELECT min(optimizer_step) AS first,
                        greatest(1, ceil((max(optimizer_step) - min(optimizer_step) + 1) / {POINTS}))::BIGINT AS width
                 FROM mine),
        binned AS (SELECT *, first + (optimizer_step - first) // width * width AS step FROM mine, span)
        """
    judged, params = outcomes.judged(lake, None)
    of_episodes = f"""{mine}
        SELECT step, count(*) AS episodes, count(DISTINCT e.group_id) AS groups,
               sum(b.action_tokens)::BIGINT AS action_tokens, avg(e.outcome) AS mean_return
        FROM binned AS b LEFT JOIN {judged} AS e USING (episode_id) GROUP BY step ORDER BY step
        """
    # Apart from the episodes: it goes through all advantages, and its answer outlives a commit of episodes. They are
    # thinned out first, or the join would hold all of them.
    rows = credit.rows if credit else _NO_ADVANTAGES
    of_steps = f"""{mine},
        sums AS (
            SELECT step, count(*) AS credited, count(a.advantage) AS defined,
                   count(*) FILTER (list_contains(string_split(a.flags, ','), 'dead_group')) AS dead,
                   sum(abs(a.advantage)) AS total_size, count(*) FILTER (a.advantage > 0) AS positive,
                   count(*) FILTER (a.advantage < 0) AS negative
            FROM (FROM {rows} WHERE episode_id IN (SELECT episode_id FROM mine)) AS a JOIN binned AS b
                ON a.episode_id = b.episode_id AND a.step_index BETWEEN b.first_step AND b.last_step
            GROUP BY step
        )
        SELECT step, dead / credited AS dead_share, total_size / nullif(defined, 0) AS mean_size,
               positive / credited AS positive, negative / credited AS negative,
               (credited - defined) / credited AS undefined
        FROM sums
        """
    episodes = lake.sql(of_episodes, params | {"job": job_id})
    steps = lake.sql(of_steps, {"job": job_id})
    return episodes.join(steps, on="step", how="left", maintain_order="left")


BATCH_ORDERS = (
    *("run_id", "task_id", "rollout_index", "policy_version", "status", "outcome", "action_tokens"),
    *("undefined", "dead", "a_episode", "mean_advantage", "lowest", "highest"),
)
"""Columns that may order a batch."""
_BATCH = (
    *("episode_id", "group_id", "run_id", "task_id", "rollout_index", "policy_version", "status", "outcome"),
    *("first_step", "last_step", "action_tokens", "credit_job", "a_episode", "mean_advantage", "lowest", "highest"),
    *("mean_size", "undefined", "dead"),
)


def batch(
    lake: Reads, job_id: int, update: int, credit: Credit | None, window: Window, sort: Sort | None = None
) -> pl.DataFrame:
    """Episodes that an optimizer step consumed; credit_job computed their advantages.

    The largest mean |advantage| comes first if nothing else is asked for.
    """
    by, falls = ["mean_size", "episode_id"], [True, False]
    if sort is not None and sort.column in BATCH_ORDERS:
        first = ["task_number", "task_id"] if sort.column == "task_id" else [sort.column]
        by, falls = first + by, [sort.descending] * len(first) + falls
    rows = _of_update(lake, job_id, update, credit).sort(by, descending=falls, nulls_last=True)
    return rows.slice(window.offset, window.limit).select(_BATCH)


def batch_groups(lake: Reads, job_id: int, update: int, credit: Credit | None, limit: int = GROUPS) -> pl.DataFrame:
    """Groups of the episodes that an optimizer step consumed, those with the largest mean |advantage| first.

    group_id, run_id, task_id, collection_round, policy_version (the oldest), episodes, mean_return (an episode that was
    consumed in several spans counts once), mean_size,
    action_tokens, dead (by the advantages, whose group it is, and not only of what the step consumed); total is the
    number of groups, dead_total of dead ones.
    """
    defined = pl.col("defined").sum()
    rows = _of_update(lake, job_id, update, credit).filter(pl.col("group_id").is_not_null())
    groups = rows.group_by("group_id").agg(
        pl.col("run_id", "task_id", "collection_round").drop_nulls().first(),
        pl.col("policy_version").min(),
        episodes=pl.col("episode_id").n_unique().cast(pl.Int64),
        mean_return=pl.col("outcome").filter(pl.col("episode_id").is_first_distinct()).mean(),
        mean_size=pl.when(defined > 0).then(pl.col("total_size").sum() / defined),
        action_tokens=pl.col("action_tokens").sum(),
        dead=pl.col("dead").any(),
    )
    found = groups.sort("mean_size", "task_id", "group_id", descending=[True, False, False], nulls_last=True)
    return found.with_columns(
        total=pl.lit(groups.height, pl.Int64), dead_total=pl.lit(int(groups["dead"].sum()), pl.Int64)
    ).head(limit)


def batch_total(lake: Reads, job_id: int, update: int, credit: Credit | None) -> int:
    """Rows that an optimizer step consumed."""
    return _of_update(lake, job_id, update, credit).height


def _of_update(lake: Reads, job_id: int, update: int, credit: Credit | None) -> pl.DataFrame:
    """What an optimizer step consumed: rows of `_consumed`, and task_number, mean_size, undefined, dead (whether).

    Its advantages lie all over their table, so the questions about a batch share this one.
    """
    chosen = _NO_ADVANTAGES
    if credit is not None:
        of_update = "SELECT episode_id FROM trained_batches WHERE job_id = $job AND optimizer_step = $update"
        chosen = credit.rows_of(lake, lake.sql(of_update, {"job": job_id, "update": update})["episode_id"])
    consumed, params = _consumed(lake, job_id, chosen, "AND b.optimizer_step = $update")
    query = f"""
        SELECT * REPLACE (dead > 0 AS dead), TRY_CAST(task_id AS BIGINT) AS task_number,
               total_size / nullif(defined, 0) AS mean_size, nullif(credited, 0) - defined AS undefined
        FROM ({consumed})
        """
    return lake.sql(query, params | {"update": update})


def update_range(lake: Reads, job_id: int) -> tuple[int, int] | None:
    """First and last optimizer step of a job that has a batch; None without any."""
    query = "SELECT min(optimizer_step), max(optimizer_step) FROM trained_batches WHERE job_id = ?"
    first, last = lake.sql(query, [job_id]).row(0)
    return None if first is None else (int(first), int(last))


def with_update(lake: Reads, update: int) -> list[int]:
    """Training jobs that have a batch of an optimizer step, the newest first."""
    query = """
        SELECT job_id FROM job_runs WHERE job_id IN (SELECT job_id FROM trained_batches WHERE optimizer_step = ?)
        ORDER BY started_at DESC, job_id
        """
    return lake.sql(query, [update])["job_id"].to_list()


CHECKPOINTS = 200
"""Checkpoints of a job that are listed at most."""


def checkpoints(lake: Reads, job_id: int, limit: int = CHECKPOINTS) -> pl.DataFrame:
    """Saved states of a job, the last first: optimizer_step, attempt, policy_version, at, uri, sha256; total."""
    query = """
        SELECT optimizer_step, attempt, policy_version, "at", uri, sha256, count(*) OVER () AS total FROM checkpoints
        WHERE job_id = ? ORDER BY optimizer_step DESC, attempt DESC LIMIT ?
        """
    return lake.sql(query, [job_id, limit])


def updates_of_a_point(lake: Reads, job_id: int) -> int:
    """How many neighbouring updates a point of `metrics` is the mean of; 1: each has its own."""
    query = "SELECT max(step) - min(step) + 1 FROM run_metrics WHERE job_id = ?"
    return max(1, -(-(lake.sql(query, [job_id]).item() or 1) // POINTS))


def metrics_at(lake: Reads, job_id: int, step: int) -> Row:
    """Metrics of a job at one step, by name."""
    rows = lake.sql("SELECT name, value FROM run_metrics WHERE job_id = ? AND step = ? ORDER BY name", [job_id, step])
    return dict(rows.iter_rows())


def _consumed(lake: Reads, job_id: int, chosen: str, where: str = "") -> tuple[str, Params]:
    """SQL of one row per batch row with its episode and the advantages of its steps, and its parameters.

    `chosen`: the advantages, as SQL.
    """
    judged, params = outcomes.judged(lake, None)
    query = f"""
        SELECT b.optimizer_step, b.episode_id, b.first_step, b.last_step, b.action_tokens, e.group_id, e.run_id,
               e.task_id, e.rollout_index, e.collection_round, e.policy_version, e.status, e.outcome,
               any_value(a.job_id) AS credit_job,
               arg_min(a.a_episode, a.step_index) AS a_episode, avg(a.advantage) AS mean_advantage,
               min(a.advantage) AS lowest, max(a.advantage) AS highest, sum(abs(a.advantage)) AS total_size,
               count(a.episode_id) AS credited, count(a.advantage) AS defined,
               count(*) FILTER (a.advantage > 0) AS positive, count(*) FILTER (a.advantage < 0) AS negative,
               count(*) FILTER (list_contains(string_split(a.flags, ','), 'dead_group')) AS dead
        FROM trained_batches AS b
        LEFT JOIN {judged} AS e ON e.episode_id = b.episode_id
        LEFT JOIN {chosen} AS a
            ON a.episode_id = b.episode_id AND a.step_index BETWEEN b.first_step AND b.last_step
        WHERE b.job_id = $job {where}
        GROUP BY ALL
        """
    return query, params | {"job": job_id}


def credit_named(lake: Reads, wanted: str | None = None, before: int | None = None) -> Credit | None:
    """The advantages that a text names (the current ones for None), also as of a version of `jobs`; None if none do."""
    try:
        return find_credit(lake, wanted, before=before)
    except (UsageError, DataRefusedError):
        return None


def advantages(lake: Reads, episode_id: int, credit: Credit) -> pl.DataFrame:
    """Advantages of an episode's steps: step_index and the columns of `advantages`, by step."""
    query = f"""
        SELECT step_index, group_id, defined, anchor_key, return_to_go, a_episode, a_step, advantage, group_size,
               anchor_size, anchor_episodes, flags
        FROM {credit.rows_of(lake, [episode_id])} ORDER BY step_index
        """
    return lake.sql(query)


def credit_summary(lake: Reads, job_id: int) -> Row:
    """What the advantages that a credit job computed look like.

    undefined counts NULL, shared the steps whose anchor holds two episodes or more; mean_size is the mean |advantage|.
    """
    query = """
        SELECT count(*) AS steps, count(*) FILTER (NOT defined) AS undefined,
               count(*) FILTER (advantage > 0) AS positive, count(*) FILTER (advantage < 0) AS negative,
               count(*) FILTER (advantage = 0) AS zero, count(DISTINCT group_id) AS groups,
               count(DISTINCT group_id) FILTER (list_contains(string_split(flags, ','), 'dead_group')) AS dead_groups,
               count(*) FILTER (anchor_episodes > 1) AS shared, avg(abs(advantage)) AS mean_size
        FROM advantages WHERE job_id = $job
        """
    return lake.sql(query, {"job": job_id}).row(0, named=True)
