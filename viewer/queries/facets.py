"""Facets: what steps and judgements say of the episodes of a list, or of its groups, by value, with counts.

A value narrows the list to what it counts.
"""

from dataclasses import dataclass

import polars as pl

from viewer.queries import Params, Reads, groups, outcomes
from viewer.queries.episodes import EACH_ONCE, FACETS, EpisodeFilter, conditions, listed
from viewer.queries.groups import GroupFilter

MOST = 12
"""Values of a facet that are shown at first."""
ALL = 500
"""Those that are shown when they are asked for."""


@dataclass(frozen=True, slots=True)
class Values:
    """Values of a facet among the rows of a list, the most frequent first."""

    frame: pl.DataFrame
    """value, number (of episodes, or groups)."""
    total: int
    """How many values there are."""


def values(lake: Reads, facet: str, wanted: EpisodeFilter, most: int = MOST) -> Values:
    """How many episodes of a filter have each value of a facet; one with several values counts for each of them.

    At most so many values, the most frequent first.

    Raises:
        QueryError: the query of the filter has no result.
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
    if among:
        pairs = f"SELECT value FROM ({pairs}) WHERE episode_id IN ({among})"
    return _counted(lake, pairs, params, most)


def of_groups(lake: Reads, facet: str, wanted: GroupFilter, most: int = MOST) -> Values:
    """As `values`, of the groups of a list: how many have an episode of the filter with each value.

    Raises:
        QueryError: the query of the filter has no result.
    """
    among, params = groups.among(lake, wanted)
    pairs = f"SELECT group_id, value FROM ({FACETS[facet]}) JOIN ({among}) USING (episode_id)"
    return _counted(lake, pairs, params, most, "count(DISTINCT group_id)")


def _counted(lake: Reads, pairs: str, params: Params, most: int, number: str = "count(*)") -> Values:
    query = f"""
        SELECT value, {number} AS number, count(*) OVER () AS total FROM ({pairs}) WHERE value <> ''
        GROUP BY value ORDER BY number DESC, value LIMIT {most}
        """
    found = lake.sql(query, params or None)
    return Values(found.drop("total"), int(found["total"][0]) if found.height else 0)
