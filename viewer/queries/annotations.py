"""Annotations: what people said of episodes and steps, and how far two of them agree."""

import polars as pl

from viewer.queries import EXCERPT, Reads, Sort, Window, count, order_by, themselves

ORDERS = themselves("at", "author", "label", "value", "run_id", "rollout_index", "step_index") | {
    "task_id": ("TRY_CAST(task_id AS BIGINT)", "task_id")
}
"""Columns that may order the list."""


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
