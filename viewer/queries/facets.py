"""Facets: what steps and judgements say of a list's episodes, by value, with counts; a value narrows the list."""

from dataclasses import dataclass

import polars as pl

from viewer.queries import Params, Reads, outcomes
from viewer.queries.episodes import EACH_ONCE, FACETS, EpisodeFilter, conditions, listed

MOST = 12
"""Values of a facet that are shown at first."""
ALL = 500
"""Those that are shown when they are asked for."""


@dataclass(frozen=True, slots=True)
class Values:
    """Values of a facet among the episodes of a list, the most frequent first."""

    frame: pl.DataFrame
    """value, episodes."""
    total: int
    """How many values there are."""


def values(lake: Reads, facet: str, wanted: EpisodeFilter, most: int = MOST) -> Values:
    """How many episodes of a filter have each value of a facet; one with several values counts for each of them.

    At most so many values, the most frequent first.
    """
    if not wanted.is_looked_up:
        judged, params = outcomes.judged(lake, wanted.score, wanted.run)
        clauses, more = conditions(wanted)
        among = f"SELECT e.episode_id FROM {judged} AS e WHERE {' AND '.join(clauses)}" if clauses else None
        params = params | more if among else Params()
    else:
        among = "SELECT unnest($ids::BIGINT[])"
        params = {"ids": listed(lake, wanted, None).to_list()}
    # Of millions of pairs a count of distinct episodes would take seconds.
    pairs = FACETS[facet] if facet in EACH_ONCE else f"SELECT DISTINCT episode_id, value FROM ({FACETS[facet]})"
    query = f"""
        SELECT value, count(*) AS episodes, count(*) OVER () AS total
        FROM ({pairs}) WHERE value <> '' {f"AND episode_id IN ({among})" if among else ""}
        GROUP BY value ORDER BY episodes DESC, value LIMIT {most}
        """
    found = lake.sql(query, params or None)
    return Values(found.drop("total"), int(found["total"][0]) if found.height else 0)
