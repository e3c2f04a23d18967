"""What changed between two sets of episodes: runs, ranges of rounds, versions of a policy, credit jobs.

Everything is by task, because tasks differ more than policies do: a mean over episodes moves when other tasks are
drawn. What one side does not know of a task is NULL, and the task is then left out of that figure, not counted as 0.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from lake.judgements.credit import Credit
from lake.judgements.scores import current_rows
from lake.statistics.intervals import TAIL, Floats, spread_of_mean, t_quantile
from viewer.queries import Params, Reads, Row, Sort, Window, in_spans, outcomes
from viewer.queries.runs import Axis

BINS = 12
"""Points of reward against length at most."""
_FALLS = 5
"""Falls of a run that are looked into, the largest first."""

_WALKED = """
    SELECT episode_id, judged_actions AS judged, active_invalid AS invalid, judged_states AS seen,
           active_errors AS errors
    FROM episode_steps
    """
"""SQL of what is wrong with an episode's steps, each figure beside how many steps it is known of."""


@dataclass(frozen=True, slots=True)
class Side:
    """A set of episodes; None filters nothing."""

    run: str | None = None
    rounds: tuple[int, int] | None = None
    """The first and the last."""
    policy_version: int | None = None
    credit: Credit | None = None
    """Episodes that these advantages cover; without one, the advantages of the current credit are read."""

    def episodes(self, lake: Reads, score: str | None = None) -> tuple[str, Params]:
        """SQL of the episodes with their outcome, and its parameters."""
        judged, params = outcomes.judged(lake, score)
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
        return f"SELECT * FROM {judged} WHERE {' AND '.join(clauses)}", params


FIGURES = ("outcome", "num_steps", "truncated", "invalid", "tool_errors", "completion_tokens", "disagree", "size")
"""Figures of a task: mean outcome and steps; shares of truncated episodes, of steps with an invalid action, and of
steps whose state is an error text, each among those where it is known; mean completion tokens; by the advantages, the
share of steps whose A_E and A_S have opposite signs, and the mean |A|."""


def by_task(lake: Reads, side: Side, current: Credit | None, score: str | None = None) -> pl.DataFrame:
    """A side's tasks: task_id, episodes, scored, deviation (of the outcome), worst, best (episodes), and `FIGURES`.

    Args:
        current: the advantages of a side that names none.
    """
    mine, params = side.episodes(lake, score)
    credit = side.credit or current
    advantages = credit.rows if credit else "(SELECT * FROM advantages WHERE false)"
    query = f"""
        WITH mine AS MATERIALIZED ({mine}),
        walked AS ({_WALKED} WHERE episode_id IN (SELECT episode_id FROM mine)),
        weighed AS (
            SELECT episode_id, count(a_episode * a_step) AS signed,
                   count(*) FILTER (a_episode * a_step < 0) AS disagree,
                   count(advantage) AS known, sum(abs(advantage)) AS size
            FROM {advantages} WHERE episode_id IN (SELECT episode_id FROM mine) GROUP BY episode_id
        )
        SELECT task_id, count(*) AS episodes, count(outcome) AS scored, stddev_samp(outcome) AS deviation,
               arg_min(episode_id, (outcome, episode_id)) FILTER (outcome IS NOT NULL) AS worst,
               arg_max(episode_id, (outcome, episode_id)) FILTER (outcome IS NOT NULL) AS best,
               avg(outcome) AS outcome, avg(num_steps) AS num_steps, avg((status = 'truncated')::INT) AS truncated,
               sum(invalid) / nullif(sum(judged), 0) AS invalid, sum(errors) / nullif(sum(seen), 0) AS tool_errors,
               avg(completion_tokens) AS completion_tokens, sum(disagree) / nullif(sum(signed), 0) AS disagree,
               sum(size) / nullif(sum(known), 0) AS size
        FROM mine LEFT JOIN walked USING (episode_id) LEFT JOIN weighed USING (episode_id)
        GROUP BY task_id ORDER BY task_id
        """
    return lake.sql(query, params or None)


def scores(lake: Reads, side: Side) -> pl.DataFrame:
    """What scorers say of a side's episodes, under their current versions: task_id, scorer, value (their mean)."""
    mine, params = side.episodes(lake)
    query = f"""
        SELECT e.task_id, s.scorer, avg(s.value) AS value
        FROM ({mine}) AS e JOIN {current_rows(lake)} AS s USING (episode_id)
        WHERE s.step_index IS NULL AND s.value IS NOT NULL GROUP BY ALL ORDER BY ALL
        """
    return lake.sql(query, params or None)


Frames = tuple[pl.DataFrame, pl.DataFrame]


def figures(tasks_AB: Frames, scores_AB: Frames) -> pl.DataFrame:
    """Each figure on both sides: figure, a, b, difference (b - a), low, high, tasks, only_a, only_b, is_paired.

    Each task counts once. If both sides know the figure of P >= 2 tasks, it is paired: a and b are means over these,
    and the 95 % interval is d +- t s / sqrt(P), with d the mean and s the sample deviation of the tasks' differences,
    and t Student's quantile with the degrees of freedom of `lake.statistics.intervals.spread_of_mean`. If not, as where
    each round draws other tasks, a and b are means over each side's own n tasks, and the interval is
    d +- t sqrt(s_a^2 / n_a + s_b^2 / n_b) with the degrees of freedom of Welch (1947): wider, as tasks differ.

    NULL where a side knows nothing; no interval where nothing differs or too little is known. Figures that nobody knows
    are left out. tasks counts those that both sides know, only_a and only_b the others.

    Args:
        tasks_AB: of `by_task`.
        scores_AB: of `scores`; they come last, as `score NAME`.
    """
    one, other = (
        {name: _known(frame, name) for name in FIGURES} | _by_scorer(said)
        for frame, said in zip(tasks_AB, scores_AB, strict=True)
    )
    rows = [_compared(name, one.get(name, {}), other.get(name, {})) for name in one | other]
    types: list[tuple[tuple[str, ...], type[pl.DataType]]] = [
        (("figure",), pl.String),
        (("a", "b", "difference", "low", "high"), pl.Float64),
        (("tasks", "only_a", "only_b"), pl.Int64),
        (("is_paired",), pl.Boolean),
    ]
    schema = {name: dtype for names, dtype in types for name in names}
    return pl.DataFrame([row for row in rows if row["a"] is not None or row["b"] is not None], schema=schema)


TASK_ORDERS = ("task_id", "a", "b", "difference", "a_episodes", "b_episodes", "a_steps", "b_steps")
"""Columns that may order tasks."""


def tasks(tasks_AB: Frames, window: Window, sort: Sort | None = None) -> pl.DataFrame:
    """A page of the tasks of both sides, those that fell most first, those of one side last.

    task_id; a and b, the mean outcomes, of a_episodes and b_episodes; difference (b - a) with its 95 % interval
    d +- t sqrt(s_a^2 / n_a + s_b^2 / n_b), where s are sample deviations, n the scored episodes, and t has the degrees
    of freedom of Welch (1947); NULL with fewer than two on a side, or where none differ. a_steps and b_steps are
    means. a_episode and b_episode are the two to look at: those that show the difference most.
    """
    page = _ordered(_beside(tasks_AB), sort).slice(window.offset, window.limit)
    ends = [
        _welch(row["difference"], *((row[f"{side}_deviation"], row[f"{side}_scored"]) for side in "ab"))
        for row in page.iter_rows(named=True)
    ]
    low, high = ([pair[side] for pair in ends] for side in (0, 1))
    return page.with_columns(pl.Series("low", low, dtype=pl.Float64), pl.Series("high", high, dtype=pl.Float64))


def _beside(tasks_AB: Frames) -> pl.DataFrame:
    names = ("episodes", "scored", "deviation", "worst", "best", "outcome", "num_steps")
    a, b = (
        frame.select("task_id", *(pl.col(name).alias(f"{side}_{name}") for name in names))
        for side, frame in zip("ab", tasks_AB, strict=True)
    )
    rose = pl.col("b_outcome") > pl.col("a_outcome")
    return a.join(b, on="task_id", how="full", coalesce=True).with_columns(
        a=pl.col("a_outcome"),
        b=pl.col("b_outcome"),
        difference=pl.col("b_outcome") - pl.col("a_outcome"),
        a_steps=pl.col("a_num_steps"),
        b_steps=pl.col("b_num_steps"),
        a_episode=pl.when(rose).then("a_worst").otherwise("a_best"),
        b_episode=pl.when(rose).then("b_best").otherwise("b_worst"),
    )


def _ordered(frame: pl.DataFrame, sort: Sort | None) -> pl.DataFrame:
    """By what is asked for, what is not known last, then by the difference and the task's name."""
    asked = sort if sort is not None and sort.column in TASK_ORDERS else Sort("difference")
    number = pl.col("task_id").cast(pl.Int64, strict=False)
    first = [number, pl.col("task_id")] if asked.column == "task_id" else [pl.col(asked.column)]
    keys = [*first, pl.col("difference"), number, pl.col("task_id")]
    falls = [asked.descending] * len(first) + [False] * 3
    return frame.sort(keys, descending=falls, nulls_last=True)


def rounds(lake: Reads, run: str) -> tuple[int, int] | None:
    """The first and the last round of a run; None if none is known."""
    query = "SELECT min(collection_round) AS first, max(collection_round) AS last FROM episodes WHERE run_id = ?"
    first, last = lake.sql(query, [run]).row(0)
    return None if first is None else (first, last)


def versions(lake: Reads, run: str) -> tuple[int, int] | None:
    """The first and the last version of the policy that played a run; None if none is known."""
    query = "SELECT min(policy_version) AS first, max(policy_version) AS last FROM episodes WHERE run_id = ?"
    first, last = lake.sql(query, [run]).row(0)
    return None if first is None else (first, last)


def steepest(lake: Reads, runs: Sequence[str], score: str | None = None) -> pl.DataFrame:
    """Where the mean outcome of each run fell most from a round to the next: run_id, before, after, fall (> 0).

    Rounds without a scored episode are passed over. Of the largest `_FALLS` falls of a run the first counts that is
    beyond chance: its interval, that of `figures`, is below 0 also at a level of 5 % by the number of falls that there
    could have been (Bonferroni), for the largest of many differences is large by itself. A run without one is left out.
    """
    judged, params = outcomes.judged(lake, score)
    query = f"""
        SELECT run_id, before, collection_round AS after, fall, pairs FROM (
            SELECT run_id, collection_round, lag(collection_round) OVER w AS before,
                   lag(avg(outcome)) OVER w - avg(outcome) AS fall, count(*) OVER (PARTITION BY run_id) - 1 AS pairs
            FROM {judged} WHERE run_id IN (SELECT unnest($runs::VARCHAR[])) AND collection_round IS NOT NULL
            GROUP BY run_id, collection_round HAVING count(outcome) > 0
            WINDOW w AS (PARTITION BY run_id ORDER BY collection_round)
        )
        WHERE fall > 0
        QUALIFY row_number() OVER (PARTITION BY run_id ORDER BY fall DESC, after) <= {_FALLS}
        ORDER BY run_id, fall DESC, after
        """
    found = lake.sql(query, params | {"runs": list(runs)})
    seen: set[str] = set()
    fell = []
    for row in found.iter_rows(named=True):
        fell.append(row["run_id"] not in seen and _has_fallen(lake, row, score))
        seen |= {row["run_id"]} if fell[-1] else set()
    return found.filter(pl.Series(fell, dtype=pl.Boolean)).drop("pairs")


def _has_fallen(lake: Reads, fall: Row, score: str | None) -> bool:
    """Whether the interval of a fall of a run's outcome (run_id, before, after; one of `pairs`) is below 0.

    Where all tasks of both rounds fell by the same there is no interval, and no doubt.
    """
    judged, params = outcomes.judged(lake, score, fall["run_id"])
    query = f"""
        SELECT task_id, avg(outcome) FILTER (collection_round = $before) AS before,
               avg(outcome) FILTER (collection_round = $after) AS after
        FROM {judged} WHERE run_id = $run AND collection_round IN ($before, $after) GROUP BY task_id
        """
    asked = {"run": fall["run_id"], "before": fall["before"], "after": fall["after"]}
    means = lake.sql(query, params | asked)
    one, other = (dict(means.select("task_id", name).drop_nulls().iter_rows()) for name in ("before", "after"))
    row = _compared("outcome", one, other, tail=TAIL / fall["pairs"])
    high = row.get("high")
    return high < 0 if high is not None else bool(row["is_paired"]) and row["difference"] < 0


def sharing_tasks(lake: Reads, runs: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs of runs that have two tasks or more in common, those of most first; of each the one named first leads."""
    query = """
        WITH mine AS (
            SELECT DISTINCT run_id, task_id, list_position($runs::VARCHAR[], run_id) AS place FROM episodes
            WHERE run_id IN (SELECT unnest($runs::VARCHAR[]))
        )
        SELECT a.run_id, b.run_id FROM mine AS a JOIN mine AS b ON a.task_id = b.task_id AND a.place < b.place
        GROUP BY ALL HAVING count(*) >= 2 ORDER BY count(*) DESC, min(a.place), min(b.place)
        """
    return lake.sql(query, {"runs": list(runs)}).rows()


def over(lake: Reads, run: str, axis: Axis, score: str | None = None) -> pl.DataFrame:
    """A run along an axis, in order: x, episodes, and those of `FIGURES` that take no advantages.

    NULL where nothing is known.
    """
    judged, params = outcomes.judged(lake, score, run)
    query = f"""
        WITH mine AS MATERIALIZED (SELECT * FROM {judged} WHERE run_id = $run AND {axis} IS NOT NULL),
        walked AS ({_WALKED} WHERE run_id = $run)
        SELECT {axis} AS x, count(*) AS episodes, avg(outcome) AS outcome,
               avg(completion_tokens) AS completion_tokens, avg(num_steps) AS num_steps,
               avg((status = 'truncated')::INT) AS truncated, sum(invalid) / nullif(sum(judged), 0) AS invalid,
               sum(errors) / nullif(sum(seen), 0) AS tool_errors
        FROM mine LEFT JOIN walked USING (episode_id) GROUP BY x ORDER BY x
        """
    return lake.sql(query, params | {"run": run})


def scores_over(lake: Reads, run: str, axis: Axis) -> pl.DataFrame:
    """Means of a run's scores along an axis: scorer, x and last (equal, or the ends of a span), value, episodes."""
    query = f"""
        SELECT s.scorer, e.{axis} AS x, avg(s.value) AS value, count(*) AS episodes
        FROM episodes AS e JOIN {current_rows(lake)} AS s USING (episode_id)
        WHERE e.run_id = $run AND e.{axis} IS NOT NULL AND s.step_index IS NULL AND s.value IS NOT NULL
        GROUP BY ALL ORDER BY ALL
        """
    found = in_spans(lake.sql(query, {"run": run}))
    mean = (pl.col("value") * pl.col("episodes")).sum() / pl.col("episodes").sum()
    return found.group_by("scorer", "x", "last").agg(mean, pl.col("episodes").sum()).sort("scorer", "x")


def by_length(lake: Reads, one: Side, other: Side, score: str | None = None) -> pl.DataFrame:
    """Mean outcome against length: side (A, B), steps, last, episodes, outcome (of those scored; NULL of none).

    steps and last are the ends of a bin; the bins are at most `BINS` of equal width.
    """
    frames = []
    for side in (one, other):
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


def flips(lake: Reads, one: Credit, other: Credit) -> Row:
    """Two credits, step by step: steps (with an advantage in both), flipped (those of opposite signs)."""
    query = f"""
        SELECT count(*) AS steps, count(*) FILTER (a.advantage * b.advantage < 0) AS flipped
        FROM {one.rows} AS a JOIN {other.rows} AS b ON a.episode_id = b.episode_id AND a.step_index = b.step_index
        WHERE a.advantage IS NOT NULL AND b.advantage IS NOT NULL
        """
    return lake.sql(query).row(0, named=True)


def _known(frame: pl.DataFrame, name: str) -> dict[str, float]:
    return dict(frame.select("task_id", pl.col(name).cast(pl.Float64)).drop_nulls().iter_rows())


def _by_scorer(frame: pl.DataFrame) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for task, scorer, value in frame.iter_rows():
        found.setdefault(f"score {scorer}", {})[task] = value
    return found


def _compared(name: str, one: dict[str, float], other: dict[str, float], *, tail: float = TAIL) -> Row:
    """A row of `figures`, of values by task; `tail` is the probability outside on each side of the interval."""
    common = sorted(one.keys() & other.keys())
    counts = {"tasks": len(common), "only_a": len(one) - len(common), "only_b": len(other) - len(common)}
    is_paired = len(common) >= 2
    a_P, b_P = (
        np.array([values[task] for task in (common if is_paired else sorted(values))]) for values in (one, other)
    )
    a, b = (float(value_P.mean()) if len(value_P) else None for value_P in (a_P, b_P))
    row: Row = {"figure": name, "a": a, "b": b, "is_paired": is_paired} | counts
    if a is None or b is None:
        return row
    if is_paired:
        found = spread_of_mean(b_P - a_P)
        low, high = (found and found.interval(tail)) or (None, None)
    else:
        low, high = _welch(b - a, _sample(a_P), _sample(b_P), tail=tail)
    return row | {"difference": b - a, "low": low, "high": high}


def _sample(value_P: Floats) -> tuple[float | None, int]:
    """The sample deviation, None of fewer than two values, and how many there are."""
    return (float(value_P.std(ddof=1)) if len(value_P) > 1 else None), len(value_P)


def _welch(
    difference: float | None, one: tuple[float | None, int], other: tuple[float | None, int], *, tail: float = TAIL
) -> tuple[float | None, float | None]:
    """The interval of a difference of two means (Welch 1947, Biometrika 34), of deviations and sizes."""
    if difference is None or one[0] is None or other[0] is None:
        return None, None
    a, b = one[0] ** 2 / one[1], other[0] ** 2 / other[1]
    if a + b == 0:
        return None, None
    df = (a + b) ** 2 / (a**2 / (one[1] - 1) + b**2 / (other[1] - 1))
    half = t_quantile(max(1.0, df), tail) * math.sqrt(a + b)
    return difference - half, difference + half
