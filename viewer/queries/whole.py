"""A filtered list as a whole: its rows part by part, and the predicate that names them elsewhere."""

import re
from collections.abc import Iterator

import polars as pl

from lake.cli.options import readable
from lake.judgements.scores import ENV_RETURN
from viewer.queries import Reads, Sort, literal, outcomes
from viewer.queries.episodes import EpisodeFilter, conditions, listed, with_facts

PART = 20_000
"""Rows that are in memory at a time."""
_MOST_IDS = 500
"""Found episodes that a predicate still names one by one."""
_LEFT_OUT = (
    "write_id, content_hash, blob_ids, initial_messages, final_observation, tools, ground_truth, sampling, extra"
)
_PARAMETER = re.compile(r"\$(\w+)")


def parts(lake: Reads, wanted: EpisodeFilter, order: Sort | None) -> Iterator[pl.DataFrame]:
    """The rows of a list in its order: what `episodes` says without its documents, and `outcome`; ids as text.

    Of a search, also `found_step` and `found_steps` (`lake.search.find.holding`). There is one part at least.
    """
    episodes = listed(lake, wanted, order)
    judged, params = outcomes.judged(lake, wanted.score, wanted.run)
    query = f"""
        SELECT episode_id, outcome, * EXCLUDE (episode_id, outcome, {_LEFT_OUT})
        FROM {judged} WHERE episode_id IN (SELECT unnest($ids::BIGINT[]))
        """
    for first in range(0, max(len(episodes), 1), PART):
        part = episodes.slice(first, PART)
        facts = lake.sql(query, params | {"ids": part.to_list()})
        yield readable(with_facts(lake, wanted, part, facts))


def predicate(lake: Reads, wanted: EpisodeFilter) -> str | None:
    """The filter as SQL over `episodes`, for commands; "" if it filters nothing, None if no predicate is short enough.

    What a search or a query found has no predicate: the episodes are named, if they are few.
    """
    if wanted.is_looked_up:
        return by_ids(lake, wanted)
    clauses, params = conditions(wanted)
    spelled = " ".join(" AND ".join(clauses).split()).replace("e.outcome", "$outcome").replace("e.", "")
    values = {name: literal(value) for name, value in params.items()} | {"outcome": _outcome(lake, wanted)}
    # In one pass: what looks like SQL of ours inside a value stays as it is.
    return _PARAMETER.sub(lambda found: values[found[1]], spelled)


def by_ids(lake: Reads, wanted: EpisodeFilter) -> str | None:
    """The episodes of a list, each by its id, as SQL over `episodes`; None if they are too many."""
    ids = listed(lake, wanted, None)
    return None if len(ids) > _MOST_IDS else f"episode_id IN ({', '.join(map(str, ids)) or 'NULL'})"


def _outcome(lake: Reads, wanted: EpisodeFilter) -> str:
    """An episode's outcome as SQL over `episodes`."""
    given = wanted.score or outcomes.of_credit(lake)
    score = given if wanted.run is None else outcomes.of_run(lake, wanted.run, given)
    if score == ENV_RETURN:
        return ENV_RETURN
    condition = "WHERE s.episode_id = episodes.episode_id AND s.step_index IS NULL"
    value = f"SELECT s.value FROM current_scores AS s {condition}"
    if score is not None:
        name, at, version = score.partition("@")
        if at:
            value = f"SELECT s.value FROM latest_scores AS s {condition} AND s.scorer_version = {literal(version)}"
        return f"({value} AND s.scorer = {literal(name)})"
    own = outcomes.own(lake)
    if not own:
        return ENV_RETURN
    pairs = ", ".join(f"({literal(run)}, {literal(scorer)})" for run, scorer in own.items())
    return f"coalesce({ENV_RETURN}, ({value} AND (s.run_id, s.scorer) IN ({pairs})))"
