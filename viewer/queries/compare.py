"""Comparison of two sets of episodes: runs, ranges of rounds, versions of a policy, credit jobs, and their tools.

Figures are by task, because tasks differ more than policies do: a mean over episodes moves when other tasks are drawn.
A task without a value on one side is NULL there and is left out of the figure; it does not count as 0.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from lake.judgements import outcomes
from lake.judgements.credit import Credit
from lake.judgements.scores import ENV_RETURN, current_scores_sql
from lake.statistics import TAIL, Floats, spread_of_mean, t_quantile
from viewer.queries import LakeReader, ListWindow, Params, Row, Sort, bin_spans
from viewer.queries.runs import Axis

BINS = 12
"""Largest number of bins of outcome against length."""
_FALLS = 5
"""Falls of a run that are tested, the largest first."""

_FAULTS = """
    SELECT episode_id, judged_actions AS judged, active_invalid AS invalid, judged_states AS seen,
           active_errors AS errors
    FROM episode_steps
    """
"""SQL of faulty steps by episode, and of the number of steps for which each fault is recorded."""


@dataclass(frozen=True, slots=True)
class Side:
    """A set of episodes; None leaves none out."""

    run: str | None = None
    rounds: tuple[int, int] | None = None
    """The first and the last."""
    policy_version: int | None = None
    credit: Credit | None = None
    """Only episodes with these advantages; None: all, with the advantages of the current credit."""

    def episodes(self, lake: LakeReader, score: str | None = None) -> tuple[str, Params]:
        """Return SQL of the episodes with their outcome, and its parameters."""
        relation, params = outcomes.build_relation(lake, score)
        clauses = ["true"]
        if self.run is not None:
            clauses.append("run_id = $run")
            params |= {"run": self.run}
        if self.rounds is not None:
            clauses.append("collection_round BETWEEN $first AND $last")
            params |= {"first": self.rounds[0], "last": self.rounds[1]}
        if self.policy_version is not None:
            clauses.append("policy_version = $version")
            params |= {"version": self.policy_version}
        if self.credit is not None:
            clauses.append(f"episode_id IN (SELECT episode_id FROM {self.credit.rows})")
        return f"SELECT * FROM {relation} WHERE {' AND '.join(clauses)}", params


FIGURES = (
    *("outcome", "num_steps", "failed", "truncated", "invalid", "tool_errors", "completion_tokens", "disagree", "size"),
)
"""Figures of a task, each over the episodes or steps that record it.

Mean outcome and steps; shares of failed and of truncated episodes, of steps with an invalid action, and of steps whose
state is an error text; mean completion tokens; share of steps whose A_E and A_S have opposite signs; mean |A|.
"""


def read_tasks(lake: LakeReader, side: Side, current: Credit | None, score: str | None = None) -> pl.DataFrame:
    """Return a side's tasks: task_id, episodes, scored, deviation, lowest, highest, worst, best, and `FIGURES`.

    deviation, lowest and highest are of the outcome; worst and best are episodes.

    Args:
        current: the advantages of a side without a credit.
    """
    mine, params = side.episodes(lake, score)
    credit = side.credit or current
    advantages = credit.rows if credit else "(SELECT * FROM advantages WHERE false)"
    query = f"""
        WITH mine AS MATERIALIZED ({mine}),
        walked AS ({_FAULTS} WHERE episode_id IN (SELECT episode_id FROM mine)),
        weighed AS (
            SELECT episode_id, count(a_episode * a_step) AS signed,
                   count(*) FILTER (a_episode * a_step < 0) AS disagree,
                   count(advantage) AS known, sum(abs(advantage)) AS size
            FROM {advantages} WHERE episode_id IN (SELECT episode_id FROM mine) GROUP BY episode_id
        )
        SELECT task_id, count(*) AS episodes, count(outcome) AS scored, stddev_samp(outcome) AS deviation,
               min(outcome) AS lowest, max(outcome) AS highest,
               arg_min(episode_id, (outcome, episode_id)) FILTER (outcome IS NOT NULL) AS worst,
               arg_max(episode_id, (outcome, episode_id)) FILTER (outcome IS NOT NULL) AS best,
               avg(outcome) AS outcome, avg(num_steps) AS num_steps, avg((status = 'truncated')::INT) AS truncated,
               avg((status = 'failed')::INT) AS failed,
               sum(invalid) / nullif(sum(judged), 0) AS invalid, sum(errors) / nullif(sum(seen), 0) AS tool_errors,
               avg(completion_tokens) AS completion_tokens, sum(disagree) / nullif(sum(signed), 0) AS disagree,
               sum(size) / nullif(sum(known), 0) AS size
        FROM mine LEFT JOIN walked USING (episode_id) LEFT JOIN weighed USING (episode_id)
        GROUP BY task_id ORDER BY task_id
        """
    return lake.sql(query, params or None)


def read_scores(lake: LakeReader, side: Side) -> pl.DataFrame:
    """Return the mean current scores of a side's episodes: task_id, scorer, value."""
    mine, params = side.episodes(lake)
    query = f"""
        SELECT e.task_id, s.scorer, avg(s.value) AS value
        FROM ({mine}) AS e JOIN {current_scores_sql(lake)} AS s USING (episode_id)
        WHERE s.step_index IS NULL AND s.value IS NOT NULL GROUP BY ALL ORDER BY ALL
        """
    return lake.sql(query, params or None)


Frames = tuple[pl.DataFrame, pl.DataFrame]


def compare_figures(tasks_AB: Frames, scores_AB: Frames) -> pl.DataFrame:
    """Return each figure on both sides: figure, a, b, difference (b - a), low, high, df, tasks, only_a, only_b, ...

    Each task counts once. If both sides have the figure for P >= 2 tasks, it is paired: a and b are means over these
    tasks. The 95 % interval is d +- t s / sqrt(P), with d the mean and s the sample deviation of the tasks'
    differences, and t Student's quantile with the degrees of freedom of `lake.statistics.spread_of_mean`.

    Otherwise, as where each round draws other tasks, a and b are means over each side's own n tasks. The interval is d
    +- t sqrt(s_a^2 / n_a + s_b^2 / n_b) with the degrees of freedom of Welch (1947). It is wider, because tasks differ.

    A side without a value is NULL. There is no interval where nothing differs or values are too few. Figures without a
    value on both sides are left out. tasks counts the tasks of both sides, only_a and only_b the others.

    Args:
        tasks_AB: of `read_tasks`.
        scores_AB: of `read_scores`; they come last, as `score NAME`.
    """
    values_AB: list[dict[str, dict[str, float]]] = []
    for tasks, scores in zip(tasks_AB, scores_AB, strict=True):
        values = {
            name: dict(tasks.select("task_id", pl.col(name).cast(pl.Float64)).drop_nulls().iter_rows())
            for name in FIGURES
        }
        for task, scorer, score in scores.iter_rows():
            values.setdefault(f"score {scorer}", {})[task] = score
        values_AB.append(values)
    a, b = values_AB
    rows = [_compare_figure(name, a.get(name, {}), b.get(name, {})) for name in a | b]
    types: list[tuple[tuple[str, ...], type[pl.DataType]]] = [
        (("figure",), pl.String),
        (("a", "b", "difference", "low", "high", "df"), pl.Float64),
        (("tasks", "only_a", "only_b"), pl.Int64),
        (("is_paired",), pl.Boolean),
    ]
    schema = {name: dtype for names, dtype in types for name in names}
    return pl.DataFrame([row for row in rows if row["a"] is not None or row["b"] is not None], schema=schema)


TASK_ORDERS = ("task_id", "a", "b", "difference", "p", "a_episodes", "b_episodes", "a_steps", "b_steps")
"""Columns that may order tasks."""


def compare_tasks(tasks_AB: Frames, window: ListWindow, sort: Sort | None = None) -> pl.DataFrame:
    """Return a page of the tasks that both sides have, the largest falls first.

    task_id; a and b, the mean outcomes, of a_episodes and b_episodes; difference (b - a) with its 95 % interval d +- t
    sqrt(s_a^2 / n_a + s_b^2 / n_b), where s are sample deviations, n the scored episodes, and t has the degrees of
    freedom of Welch (1947). The interval is NULL with fewer than two episodes on a side, or where none differ. a_steps
    and b_steps are means. a_episode and b_episode show the difference most.

    p is that of a test of the task, adjusted for all tasks (Holm 1979). Where the outcome has two values the test is
    Fisher's exact one (1935), which needs no variance within a side; otherwise it is Welch's. fell and rose count the
    tasks, of all pages, that fell and rose with p below 0.05.
    """
    order = sort if sort is not None and sort.column in TASK_ORDERS else Sort("difference")
    number = pl.col("task_id").cast(pl.Int64, strict=False)
    first = [number, pl.col("task_id")] if order.column == "task_id" else [pl.col(order.column)]
    keys = [*first, pl.col("difference"), number, pl.col("task_id")]
    falls = [order.descending] * len(first) + [False] * 3
    tasks = _join_tasks(tasks_AB)
    tasks = tasks.with_columns(p=adjust_for_many([test_task(row) for row in tasks.iter_rows(named=True)]))
    is_clear = pl.col("p") < 2 * TAIL
    tasks = tasks.with_columns(
        fell=(is_clear & (pl.col("difference") < 0)).sum(), rose=(is_clear & (pl.col("difference") > 0)).sum()
    )
    page = tasks.sort(keys, descending=falls, nulls_last=True).slice(window.offset, window.limit)
    ends = [
        _compute_welch_interval(
            row["difference"], *((row[f"{side}_deviation"], row[f"{side}_scored"]) for side in "ab")
        )
        for row in page.iter_rows(named=True)
    ]
    low, high = ([pair[side] for pair in ends] for side in (0, 1))
    return page.with_columns(pl.Series("low", low, dtype=pl.Float64), pl.Series("high", high, dtype=pl.Float64))


def test_task(row: Row) -> float | None:
    """Return the two-sided p of the difference of a task's mean outcomes; None if it cannot be tested.

    Args:
        row: scored, outcome, deviation, lowest and highest of each side, with the side before the name.
    """
    count_a, count_b, mean_a, mean_b = (row[f"{side}_{name}"] for name in ("scored", "outcome") for side in "ab")
    if mean_a is None or mean_b is None:
        return None
    low, high = (pick(row["a_" + name], row["b_" + name]) for pick, name in ((min, "lowest"), (max, "highest")))
    if low == high:
        return 1.0
    # No sample between two ends varies more than one that has only these two values (Bhatia, Davis 2000).
    sides = [(count_a, mean_a, row["a_deviation"]), (count_b, mean_b, row["b_deviation"])]
    between = [
        (mean - low) * (high - mean) - (deviation or 0.0) ** 2 * (count - 1) / count for count, mean, deviation in sides
    ]
    if max(between) <= 1e-9 * (high - low) ** 2:
        wins_a, wins_b = (round(count * (mean - low) / (high - low)) for count, mean, _ in sides)
        return _compute_fisher_p(wins_a, count_a, wins_b, count_b)
    a, b = ((deviation or 0.0) ** 2 / count for count, _, deviation in sides)
    if min(count_a, count_b) < 2 or a + b == 0:
        return None
    df = max(1.0, (a + b) ** 2 / (a**2 / (count_a - 1) + b**2 / (count_b - 1)))
    # With t = sqrt(df) tan(angle) the density is proportional to cos(angle)^(df - 1).
    angle_N = np.linspace(math.atan(abs(mean_b - mean_a) / math.sqrt((a + b) * df)), math.pi / 2, 2001)
    whole = math.sqrt(math.pi) / 2 * math.exp(math.lgamma(df / 2) - math.lgamma((df + 1) / 2))
    return min(1.0, float(np.trapezoid(np.cos(angle_N) ** (df - 1), angle_N)) / whole)


def _compute_fisher_p(wins_a: int, count_a: int, wins_b: int, count_b: int) -> float:
    """Return the two-sided p of Fisher's exact test: the probability of all splits as rare as the observed one."""
    wins = wins_a + wins_b
    first, last = max(0, wins - count_b), min(wins, count_a)
    split_N = np.arange(first, last)
    odds_N = (wins - split_N) * (count_a - split_N) / ((split_N + 1.0) * (count_b - wins + split_N + 1.0))
    log_N = np.concatenate([[0.0], np.cumsum(np.log(odds_N))])
    share_N = np.exp(log_N - log_N.max())
    return float(min(1.0, share_N[share_N <= share_N[wins_a - first] * (1 + 1e-7)].sum() / share_N.sum()))


def adjust_for_many(values: Sequence[float | None]) -> pl.Series:
    """Return p of several tests, adjusted so that any error among all has the level of one (Holm 1979)."""
    order = sorted((value, position) for position, value in enumerate(values) if value is not None)
    adjusted: list[float | None] = [None] * len(values)
    largest = 0.0
    for rank, (value, position) in enumerate(order):
        adjusted[position] = largest = max(largest, min(1.0, (len(order) - rank) * value))
    return pl.Series("p", adjusted, dtype=pl.Float64)


def list_one_sided_tasks(tasks_AB: Frames) -> pl.DataFrame:
    """Return the tasks that only one side has: task_id, side (A, B), episodes, outcome (mean); by side and task."""
    a, b = (frame.select("task_id", "episodes", "outcome") for frame in tasks_AB)
    rests = ((side, frame.join(other, on="task_id", how="anti")) for side, frame, other in (("A", a, b), ("B", b, a)))
    return pl.concat([rest.with_columns(side=pl.lit(side)) for side, rest in rests]).sort("side", "task_id")


def _join_tasks(tasks_AB: Frames) -> pl.DataFrame:
    names = ("episodes", "scored", "deviation", "lowest", "highest", "worst", "best", "outcome", "num_steps")
    a, b = (
        frame.select("task_id", *(pl.col(name).alias(f"{side}_{name}") for name in names))
        for side, frame in zip("ab", tasks_AB, strict=True)
    )
    rose = pl.col("b_outcome") > pl.col("a_outcome")
    return a.join(b, on="task_id").with_columns(
        a=pl.col("a_outcome"),
        b=pl.col("b_outcome"),
        difference=pl.col("b_outcome") - pl.col("a_outcome"),
        a_steps=pl.col("a_num_steps"),
        b_steps=pl.col("b_num_steps"),
        a_episode=pl.when(rose).then("a_worst").otherwise("a_best"),
        b_episode=pl.when(rose).then("b_best").otherwise("b_worst"),
    )


def find_range(lake: LakeReader, run: str, axis: Axis) -> tuple[int, int] | None:
    """Return the first and the last round, or policy version, of a run; None if it has none."""
    query = f"SELECT min({axis}) AS first, max({axis}) AS last FROM episodes WHERE run_id = ?"
    first, last = lake.sql(query, [run]).row(0)
    return None if first is None else (first, last)


def find_steepest_falls(lake: LakeReader, runs: Sequence[str], score: str | None = None) -> pl.DataFrame:
    """Return the largest fall of each run's mean outcome between two rounds: run_id, before, after, fall (> 0).

    Rounds without a scored episode are skipped. Of the `_FALLS` largest falls of a run, the first one beyond chance
    counts: its interval, as in `compare_figures`, is below 0 at a level of 5 % divided by the number of possible falls
    (Bonferroni), because the largest of many differences is large by chance. A run without such a fall is left out.
    """
    relation, params = outcomes.build_relation(lake, score)
    query = f"""
        SELECT run_id, before, collection_round AS after, fall, pairs FROM (
            SELECT run_id, collection_round, lag(collection_round) OVER w AS before,
                   lag(avg(outcome)) OVER w - avg(outcome) AS fall, count(*) OVER (PARTITION BY run_id) - 1 AS pairs
            FROM {relation} WHERE run_id IN (SELECT unnest($run_ids::VARCHAR[])) AND collection_round IS NOT NULL
            GROUP BY run_id, collection_round HAVING count(outcome) > 0
            WINDOW w AS (PARTITION BY run_id ORDER BY collection_round)
        )
        WHERE fall > 0
        QUALIFY row_number() OVER (PARTITION BY run_id ORDER BY fall DESC, after) <= {_FALLS}
        ORDER BY run_id, fall DESC, after
        """
    falls = lake.sql(query, params | {"run_ids": list(runs)})
    fallen_runs: set[str] = set()
    is_first = []
    for row in falls.iter_rows(named=True):
        is_first.append(row["run_id"] not in fallen_runs and _has_fallen(lake, row, score))
        fallen_runs |= {row["run_id"]} if is_first[-1] else set()
    return falls.filter(pl.Series(is_first, dtype=pl.Boolean)).drop("pairs")


def _has_fallen(lake: LakeReader, fall: Row, score: str | None) -> bool:
    """Return whether the interval of a fall (run_id, before, after; one of `pairs`) is below 0.

    If all tasks of both rounds fell by the same amount, there is no interval and the fall is certain.
    """
    relation, params = outcomes.build_relation(lake, score, fall["run_id"])
    query = f"""
        SELECT task_id, avg(outcome) FILTER (collection_round = $before) AS before,
               avg(outcome) FILTER (collection_round = $after) AS after
        FROM {relation} WHERE run_id = $run AND collection_round IN ($before, $after) GROUP BY task_id
        """
    means = lake.sql(query, params | {"run": fall["run_id"], "before": fall["before"], "after": fall["after"]})
    before, after = (dict(means.select("task_id", name).drop_nulls().iter_rows()) for name in ("before", "after"))
    row = _compare_figure("outcome", before, after, tail=TAIL / fall["pairs"])
    high = row.get("high")
    return high < 0 if high is not None else bool(row["is_paired"]) and row["difference"] < 0


def list_runs_sharing_tasks(lake: LakeReader, runs: Sequence[str]) -> list[tuple[str, str]]:
    """Return pairs of runs with two or more common tasks, most tasks first; each pair in the order of `runs`."""
    query = """
        WITH mine AS (
            SELECT DISTINCT run_id, task_id, list_position($run_ids::VARCHAR[], run_id) AS place FROM episodes
            WHERE run_id IN (SELECT unnest($run_ids::VARCHAR[]))
        )
        SELECT a.run_id, b.run_id FROM mine AS a JOIN mine AS b ON a.task_id = b.task_id AND a.place < b.place
        GROUP BY ALL HAVING count(*) >= 2 ORDER BY count(*) DESC, min(a.place), min(b.place)
        """
    return lake.sql(query, {"run_ids": list(runs)}).rows()


def read_figures_over(lake: LakeReader, run: str, axis: Axis, score: str | None = None) -> pl.DataFrame:
    """Return a run along an axis, in order: x, episodes, and the `FIGURES` that take no advantages; NULL: unknown."""
    relation, params = outcomes.build_relation(lake, score, run)
    query = f"""
        WITH mine AS MATERIALIZED (SELECT * FROM {relation} WHERE run_id = $run AND {axis} IS NOT NULL),
        walked AS ({_FAULTS} WHERE run_id = $run)
        SELECT {axis} AS x, count(*) AS episodes, avg(outcome) AS outcome,
               avg(completion_tokens) AS completion_tokens, avg(num_steps) AS num_steps,
               avg((status = 'failed')::INT) AS failed,
               avg((status = 'truncated')::INT) AS truncated, sum(invalid) / nullif(sum(judged), 0) AS invalid,
               sum(errors) / nullif(sum(seen), 0) AS tool_errors
        FROM mine LEFT JOIN walked USING (episode_id) GROUP BY x ORDER BY x
        """
    return lake.sql(query, params | {"run": run})


def read_scores_over(lake: LakeReader, run: str, axis: Axis) -> pl.DataFrame:
    """Return mean scores of a run along an axis: scorer, x and last (equal, or the ends of a span), value, episodes."""
    query = f"""
        SELECT s.scorer, e.{axis} AS x, avg(s.value) AS value, count(*) AS episodes
        FROM episodes AS e JOIN {current_scores_sql(lake)} AS s USING (episode_id)
        WHERE e.run_id = $run AND e.{axis} IS NOT NULL AND s.step_index IS NULL AND s.value IS NOT NULL
        GROUP BY ALL ORDER BY ALL
        """
    spans = bin_spans(lake.sql(query, {"run": run}))
    mean = (pl.col("value") * pl.col("episodes")).sum() / pl.col("episodes").sum()
    return spans.group_by("scorer", "x", "last").agg(mean, pl.col("episodes").sum()).sort("scorer", "x")


def read_unscored_over(lake: LakeReader, run: str, axis: Axis) -> pl.DataFrame:
    """Return the episodes of a run that each score lacks: scorer, x, last, episodes (all), unscored, share; by scorer.

    `env_return` is a score here. Scores that no episode has, or that no episode lacks, are left out.
    """
    query = f"""
        WITH mine AS MATERIALIZED (
            SELECT episode_id, {ENV_RETURN}, {axis} AS x FROM episodes WHERE run_id = $run AND {axis} IS NOT NULL
        ),
        given AS (
            SELECT s.scorer, m.x, count(s.value) AS scored FROM mine AS m JOIN {current_scores_sql(lake)} AS s
            USING (episode_id) WHERE s.step_index IS NULL GROUP BY ALL
            UNION ALL SELECT '{ENV_RETURN}', x, count({ENV_RETURN}) FROM mine GROUP BY x
        )
        SELECT scorer, x, episodes, episodes - coalesce(scored, 0) AS unscored
        FROM (SELECT scorer FROM given GROUP BY scorer HAVING sum(scored) > 0)
        CROSS JOIN (SELECT x, count(*) AS episodes FROM mine GROUP BY x) LEFT JOIN given USING (scorer, x)
        """
    sums = bin_spans(lake.sql(query, {"run": run})).group_by("scorer", "x", "last").agg(pl.sum("episodes", "unscored"))
    lacking = sums.filter(pl.col("unscored").sum().over("scorer") > 0).sort("scorer", "x")
    return lacking.with_columns(share=pl.col("unscored") / pl.col("episodes"))


def read_outcome_by_length(lake: LakeReader, side_a: Side, side_b: Side, score: str | None = None) -> pl.DataFrame:
    """Return the mean outcome by length: side (A, B), steps, last, episodes, outcome (of those scored; NULL of none).

    steps and last are the ends of at most `BINS` bins of equal width.
    """
    frames = []
    for side in (side_a, side_b):
        mine, params = side.episodes(lake, score)
        sums = "num_steps, count(*) AS episodes, count(outcome) AS scored, sum(outcome) AS total"
        frames.append(lake.sql(f"SELECT {sums} FROM ({mine}) GROUP BY num_steps", params or None))
    lengths = pl.concat(frames)["num_steps"].cast(pl.Int64)
    low = int(lengths.min() or 0)  # type: ignore[arg-type]
    width = -(-(int(lengths.max() or 0) - low + 1) // BINS)  # type: ignore[arg-type]
    steps = (low + (pl.col("num_steps").cast(pl.Int64) - low) // width * width).alias("steps")
    scored = pl.col("scored").sum()
    of_sides = [
        frame.group_by(steps).agg(
            pl.lit(side).alias("side"),
            (steps.first() + width - 1).alias("last"),
            pl.col("episodes").sum(),
            pl.when(scored > 0).then(pl.col("total").sum() / scored).alias("outcome"),
        )
        for side, frame in zip("AB", frames, strict=True)
    ]
    return pl.concat(of_sides).select("side", "steps", "last", "episodes", "outcome").sort("steps", "side")


def count_flips(lake: LakeReader, credit_a: Credit, credit_b: Credit) -> Row:
    """Compare two credits step by step: steps (with an advantage in both), flipped (those of opposite signs)."""
    query = f"""
        SELECT count(*) AS steps, count(*) FILTER (a.advantage * b.advantage < 0) AS flipped
        FROM {credit_a.rows} AS a JOIN {credit_b.rows} AS b
        ON a.episode_id = b.episode_id AND a.step_index = b.step_index
        WHERE a.advantage IS NOT NULL AND b.advantage IS NOT NULL
        """
    return lake.sql(query).row(0, named=True)


def _compare_figure(name: str, values_a: dict[str, float], values_b: dict[str, float], *, tail: float = TAIL) -> Row:
    """Return a row of `compare_figures` from values by task; `tail` is the probability outside on each side."""
    common = sorted(values_a.keys() & values_b.keys())
    counts = {"tasks": len(common), "only_a": len(values_a) - len(common), "only_b": len(values_b) - len(common)}
    is_paired = len(common) >= 2
    a_P, b_P = (
        np.array([values[task] for task in (common if is_paired else sorted(values))])
        for values in (values_a, values_b)
    )
    a, b = (float(value_P.mean()) if len(value_P) else None for value_P in (a_P, b_P))
    row: Row = {"figure": name, "a": a, "b": b, "is_paired": is_paired} | counts
    if a is None or b is None:
        return row
    if is_paired:
        spread = spread_of_mean(b_P - a_P)
        low, high = (spread and spread.interval(tail)) or (None, None)
        row["df"] = spread.df if spread is not None and low is not None else None
    else:
        low, high = _compute_welch_interval(b - a, _describe_sample(a_P), _describe_sample(b_P), tail=tail)
    return row | {"difference": b - a, "low": low, "high": high}


def _describe_sample(value_P: Floats) -> tuple[float | None, int]:
    """Return the sample deviation (None of fewer than two values) and the number of values."""
    return (float(value_P.std(ddof=1)) if len(value_P) > 1 else None), len(value_P)


def _compute_welch_interval(
    difference: float | None,
    sample_a: tuple[float | None, int],
    sample_b: tuple[float | None, int],
    *,
    tail: float = TAIL,
) -> tuple[float | None, float | None]:
    """Return the interval of a difference of two means (Welch 1947, Biometrika 34), from deviations and sizes."""
    (deviation_a, count_a), (deviation_b, count_b) = sample_a, sample_b
    if difference is None or deviation_a is None or deviation_b is None:
        return None, None
    a, b = deviation_a**2 / count_a, deviation_b**2 / count_b
    if a + b == 0:
        return None, None
    df = (a + b) ** 2 / (a**2 / (count_a - 1) + b**2 / (count_b - 1))
    half = t_quantile(max(1.0, df), tail) * math.sqrt(a + b)
    return difference - half, difference + half


TOOL_SAMPLE = 20_000
"""Largest number of episodes whose calls are read; more are sampled by a hash of their ids."""


def read_tools_over(lake: LakeReader, run: str, axis: Axis) -> pl.DataFrame:
    """Return the tools of a run along an axis: x, last, tool, calls, failed, share; by x, then tool.

    A run with more than `TOOL_SAMPLE` episodes is sampled. On a long axis x and last are the ends of a span.
    """
    mine = f"SELECT episode_id, {axis} AS x FROM episodes WHERE run_id = $run AND {axis} IS NOT NULL"
    spans = bin_spans(_read_shares(lake, mine, {"run": run}, "x, tool", "s.run_id = $run AND n.run_id = $run"))
    sums = spans.group_by("x", "last", "tool").agg(pl.col("calls", "failed").sum()).sort("x", "tool")
    return sums.with_columns(share=pl.col("failed") / pl.col("calls"))


def read_tools(lake: LakeReader, side: Side) -> pl.DataFrame:
    """Return the tools of a set of episodes, of at most `TOOL_SAMPLE`: tool, calls, failed, share."""
    mine, params = side.episodes(lake)
    where = "true" if side.run is None else "s.run_id = $run AND n.run_id = $run"
    return _read_shares(lake, f"SELECT episode_id FROM ({mine})", params, "tool", where)


def compare_tools(tools_a: pl.DataFrame, tools_b: pl.DataFrame) -> pl.DataFrame:
    """Compare the tools of two sets (`read_tools`), the largest rise of failures first.

    tool, a_calls, a_share, b_calls, b_share, difference (b_share - a_share; NULL if one side never calls the tool).
    """
    a, b = (
        frame.select("tool", *(pl.col(name).alias(f"{side}_{name}") for name in ("calls", "share")))
        for side, frame in zip("ab", (tools_a, tools_b), strict=True)
    )
    return (
        a.join(b, on="tool", how="full", coalesce=True)
        .with_columns(difference=pl.col("b_share") - pl.col("a_share"))
        .sort(["difference", "b_share", "tool"], descending=[True, True, False], nulls_last=True)
    )


def sum_tools(over_rounds: pl.DataFrame) -> pl.DataFrame:
    """Sum the tools of a run, most failures first: tool, calls, failed, share, first (first x with a failure).

    Args:
        over_rounds: of `read_tools_over`.
    """
    calls_, failed = pl.col("calls").sum(), pl.col("failed").sum()
    first = pl.col("x").filter(pl.col("failed") > 0).min()
    tools = over_rounds.group_by("tool").agg(calls_, failed, (failed / calls_).alias("share"), first.alias("first"))
    return tools.sort(["failed", "calls", "tool"], descending=[True, True, False])


def _read_shares(lake: LakeReader, mine: str, params: Params, by: str, where: str) -> pl.DataFrame:
    """Return calls, failed and share of tools; `where` is a condition on the step of a call, `s`, and the next, `n`.

    The state after a step (`steps.state_is_error`) is its last reply. So the last call of a step counts, and only where
    the next step records whether its state is an error: never for the last step of an episode.
    """
    paths = ("function.name", "name")
    names = ", ".join(f"json_extract_string(s.tool_calls, '$[#-1].{path}')" for path in paths)
    query = f"""
        WITH drawn AS MATERIALIZED ({mine} ORDER BY hash(episode_id) LIMIT {TOOL_SAMPLE})
        SELECT {by}, count(*) AS calls, count(*) FILTER (failed) AS failed, avg(failed::INT) AS share
        FROM drawn JOIN (
            SELECT s.episode_id, coalesce({names}) AS tool, n.state_is_error AS failed
            FROM steps AS s JOIN steps AS n ON n.episode_id = s.episode_id AND n.step_index = s.step_index + 1
            WHERE s.tool_calls <> '[]' AND n.state_is_error IS NOT NULL AND {where}
        ) USING (episode_id)
        WHERE tool IS NOT NULL GROUP BY {by} ORDER BY {by}
        """
    return lake.sql(query, params or None)
