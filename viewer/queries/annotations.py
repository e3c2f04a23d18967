"""Annotations: what people said of episodes and steps, what is left to say, and how far two of them agree."""

from dataclasses import dataclass, replace

import polars as pl

from lake.judgements.scores import ENV_RETURN
from lake.write.annotations import HUMAN
from viewer.queries import EXCERPT, Reads, Sort, Window, count, literal, order_by, themselves
from viewer.queries.episodes import EpisodeFilter, listed

ORDERS = themselves("at", "author", "label", "value", "run_id", "rollout_index", "step_index") | {
    "task_id": ("TRY_CAST(task_id AS BIGINT)", "task_id")
}
"""Columns that may order the list."""


@dataclass(frozen=True, slots=True)
class Queue:
    """What is left of a list whose filter is `unlabelled`, as seen from one of its episodes."""

    left: int
    total: int
    """Episodes of the list without that filter."""
    first: int | None
    """The first that is left; None: none is."""
    previous: int | None
    """The nearest that is left before the episode, and after it, in the order of the list."""
    next: int | None


def queue(lake: Reads, wanted: EpisodeFilter, order: Sort | None, episode_id: int | None = None) -> Queue:
    """What is left to label; an episode that has its label meanwhile still has neighbours."""
    left = listed(lake, wanted, order)
    every = listed(lake, replace(wanted, unlabelled=None), order)
    first = left[0] if len(left) else None
    at = None if episode_id is None else every.index_of(episode_id)
    if at is None:
        return Queue(len(left), len(every), first, None, None)
    is_left = every.is_in(left.implode())
    before, after = every[:at].filter(is_left[:at]), every[at + 1 :].filter(is_left[at + 1 :])
    return Queue(
        len(left),
        len(every),
        first,
        before[-1] if len(before) else None,
        after[0] if len(after) else None,
    )


def answers(lake: Reads, label: str, limit: int = 9) -> list[float] | list[str]:
    """What is said under a label most often: its numbers, or else its words; in their order."""
    found = lake.sql(
        """
        SELECT value, CASE WHEN value IS NULL THEN text END AS words, count(*) AS times FROM latest_annotations
        WHERE label = ? GROUP BY ALL ORDER BY times DESC, value, words
        """,
        [label],
    )
    values = found["value"].drop_nulls().head(limit).sort().to_list()
    return values or found["words"].drop_nulls().head(limit).sort().to_list()


def of_episode(lake: Reads, episode_id: int) -> pl.DataFrame:
    """What counts of an episode and its steps: step_index, label, value, text (cut), author, at; by step."""
    query = f"""
        SELECT step_index, label, value, left(text, {EXCERPT}) AS text, author, "at"
        FROM latest_annotations WHERE episode_id = ? ORDER BY step_index NULLS FIRST, label, author
        """
    return lake.sql(query, [episode_id])


def total(lake: Reads) -> int:
    """Number of annotations that count."""
    return count(lake, "SELECT count(*) FROM latest_annotations")


def page(lake: Reads, window: Window, sort: Sort | None = None) -> pl.DataFrame:
    """A page of the annotations that count, each with its episode; the newest first if nothing else is asked for."""
    query = f"""
        SELECT a."at", a.author, a.label, a.value, left(a.text, {EXCERPT}) AS text, e.run_id, e.task_id,
               e.rollout_index, a.step_index, a.episode_id
        FROM latest_annotations AS a JOIN episodes AS e USING (episode_id)
        ORDER BY {order_by(sort, ORDERS, 'a."at" DESC, a.annotation_id')} LIMIT $limit OFFSET $offset
        """
    return lake.sql(query, window.params())


def labels(lake: Reads, limit: int = 100) -> list[str]:
    """Labels in use, those of most annotations first."""
    query = "SELECT label FROM latest_annotations GROUP BY label ORDER BY count(*) DESC, label LIMIT ?"
    return lake.sql(query, [limit])["label"].to_list()


_PEOPLE = f"(scorer = '{HUMAN}' OR starts_with(scorer, '{HUMAN}.'))"


def scorers(lake: Reads, limit: int = 100) -> pl.DataFrame:
    """How far each scorer agrees with what people said of whole episodes, those that contradict them most first.

    people (the scorer that stands for a label: `human`, `human.LABEL`), scorer (`env_return` too), episodes (that both
    judged); same and kappa as in `agreement`, of two answers: at least the middle of its range on these episodes, or
    less, with the middles people_from and scorer_from; rank is Spearman's correlation. All three are NULL where a side
    says the same of all episodes: then nothing tells its high from its low.
    """
    query = f"""
        WITH said AS MATERIALIZED (
            SELECT episode_id, scorer AS people, value AS p FROM current_scores
            WHERE {_PEOPLE} AND step_index IS NULL AND value IS NOT NULL
        ),
        machines AS (
            SELECT episode_id, scorer, value FROM current_scores
            WHERE NOT {_PEOPLE} AND step_index IS NULL AND value IS NOT NULL AND scorer <> '{ENV_RETURN}'
            UNION ALL SELECT episode_id, '{ENV_RETURN}', {ENV_RETURN} FROM episodes WHERE {ENV_RETURN} IS NOT NULL
        ),
        pairs AS (
            SELECT people, scorer, p, s,
                   (min(p) OVER every + max(p) OVER every) / 2 AS people_from,
                   (min(s) OVER every + max(s) OVER every) / 2 AS scorer_from,
                   rank() OVER by_people + (count(*) OVER (PARTITION BY people, scorer, p) - 1) / 2 AS p_rank,
                   rank() OVER by_scorer + (count(*) OVER (PARTITION BY people, scorer, s) - 1) / 2 AS s_rank
            FROM (SELECT people, scorer, p, value AS s FROM said JOIN machines USING (episode_id))
            WINDOW every AS (PARTITION BY people, scorer), by_people AS (PARTITION BY people, scorer ORDER BY p),
                   by_scorer AS (PARTITION BY people, scorer ORDER BY s)
        )
        SELECT people, scorer, episodes, same, (same - c) / nullif(1 - c, 0) AS kappa, rank, people_from, scorer_from
        FROM (
            SELECT people, scorer, count(*) AS episodes,
                   CASE WHEN min(p) < max(p) AND min(s) < max(s) THEN avg((is_high = is_up)::INT) END AS same,
                   corr(p_rank, s_rank) AS rank,
                   avg(is_high::INT) * avg(is_up::INT) + (1 - avg(is_high::INT)) * (1 - avg(is_up::INT)) AS c,
                   any_value(people_from) AS people_from, any_value(scorer_from) AS scorer_from
            FROM (SELECT *, p >= people_from AS is_high, s >= scorer_from AS is_up FROM pairs) GROUP BY people, scorer
        ) ORDER BY rank NULLS LAST, same, people, scorer LIMIT ?
        """
    found = lake.sql(query, [limit])
    # DuckDB's correlation of what does not vary is no number.
    return found.with_columns(pl.col("kappa", "rank").fill_nan(None))


def disagreed(people: str, scorer: str, people_from: float, scorer_from: float) -> str:
    """A SELECT of the episodes of which a row of `scorers` says that the two disagree, for a list (`sql=`)."""
    machine = (
        f"SELECT episode_id, {ENV_RETURN} AS value FROM episodes"
        if scorer == ENV_RETURN
        else f"SELECT episode_id, value FROM current_scores WHERE scorer = {literal(scorer)} AND step_index IS NULL"
    )
    return (
        f"SELECT p.episode_id FROM current_scores AS p JOIN ({machine}) AS s USING (episode_id) "
        f"WHERE p.scorer = {literal(people)} AND p.step_index IS NULL "
        f"AND (p.value >= {people_from!r}) <> (s.value >= {scorer_from!r}) ORDER BY p.episode_id"
    )


def agreement(lake: Reads, limit: int = 100) -> pl.DataFrame:
    """How far two authors agree, by label: label, first, second, places, same, kappa; those of most places first.

    places are the episodes and steps that both put the label on, same the share of them with the same answer (the
    number, or else the words). kappa is what is left of it beyond chance, (same - c) / (1 - c), where c is the share
    that two would have in common who answer as often as these but at random (Cohen 1960); NULL where c is 1.
    """
    query = """
        WITH said AS (
            SELECT episode_id, coalesce(step_index, -1) AS step, label, author,
                   coalesce(value::VARCHAR, text) AS answer FROM latest_annotations
        ),
        pairs AS (
            SELECT label, a.author AS first, b.author AS second, a.answer AS one, b.answer AS other
            FROM said AS a JOIN said AS b USING (episode_id, step, label) WHERE a.author < b.author
        ),
        compared AS (
            SELECT label, first, second, count(*) AS places, avg((one = other)::INT) AS same FROM pairs GROUP BY ALL
        ),
        ones AS (SELECT label, first, second, one AS answer, count(*) AS times FROM pairs GROUP BY ALL),
        others AS (SELECT label, first, second, other AS answer, count(*) AS times FROM pairs GROUP BY ALL),
        chances AS (
            SELECT label, first, second, sum(ones.times * others.times)::DOUBLE AS met
            FROM ones JOIN others USING (label, first, second, answer) GROUP BY ALL
        )
        SELECT label, first, second, places, same, (same - c) / nullif(1 - c, 0) AS kappa
        FROM (
            SELECT *, coalesce(met, 0) / (places * places) AS c
            FROM compared LEFT JOIN chances USING (label, first, second)
        ) ORDER BY places DESC, label, first, second LIMIT ?
        """
    return lake.sql(query, [limit])
