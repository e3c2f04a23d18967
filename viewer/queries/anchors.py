"""Anchor states: those that the siblings of a group share, and why one may be false.

An anchor is false if its steps stand for several situations: then A_S compares what cannot be compared. An error text
or an empty state is reached from anywhere; so is one that many different actions lead to. Sums of |A_S| say how much
of the step advantages an anchor makes.
"""

from collections.abc import Sequence

import polars as pl
from polars.dataframe.group_by import GroupBy

from lake.judgements.credit import Credit
from lake.judgements.scores import ENV_RETURN
from viewer.queries import EXCERPT, Reads, Row, Sort, Window, count, order_by, outcomes, taken, themselves

ORDERS = (
    *("size", "episodes", "actions", "spread", "lowest", "highest"),
    *("mean_step", "ways_in", "states", "share", "doubt"),
)
"""Columns that may order anchor states."""


def shares(lake: Reads, group_id: int, credit: Credit) -> Row:
    """How many steps of a group sit in which anchors: steps, shared (two episodes or more), alone (one step).

    doubted are shared steps from an error text or an empty state; doubted_weight is their share of the sum of |A_S|,
    NULL if that is 0.
    """
    steps = _visited(lake, group_id, credit)
    is_shared = (pl.col("anchor_episodes") > 1) & pl.col("anchor_key").is_not_null()
    is_doubted = is_shared & pl.any_horizontal(pl.col("state_is_error", "state_is_empty").fill_null(value=False))
    weight = pl.col("a_step").abs()
    found = steps.select(
        steps=pl.len(),
        shared=is_shared.sum(),
        alone=(pl.col("anchor_size") == 1).sum(),
        doubted=is_doubted.sum(),
        doubted_weight=pl.when(weight.sum() > 0).then(weight.filter(is_doubted).sum() / weight.sum()),
    )
    return found.row(0, named=True)


def page(lake: Reads, group_id: int, credit: Credit, window: Window, sort: Sort | None = None) -> pl.DataFrame:
    """Anchor states that two or more episodes of a group passed, the most shared first.

    size is in steps, actions are the distinct ones taken there, ways_in the distinct ones that led there, states the
    distinct texts; lowest, highest and spread are of the return-to-go; share is of the group's sum of |A_S|. doubt says
    why the state may stand for several: an error, or empty.
    """
    steps = _visited(lake, group_id, credit)
    whole = steps["a_step"].abs().sum() or None
    returns, weight, empty = pl.col("return_to_go"), pl.col("a_step"), pl.col("state_is_empty")
    found = _shared(steps).agg(
        size=pl.len().cast(pl.Int64),
        episodes=pl.col("episode_id").n_unique().cast(pl.Int64),
        actions=pl.col("taken").n_unique().cast(pl.Int64),
        lowest=returns.min(),
        highest=returns.max(),
        spread=returns.max() - returns.min(),
        mean_step=pl.col("step_index").mean(),
        state=pl.col("state").sort_by("step_index", "episode_id").drop_nulls().first(),
        ways_in=pl.col("led_here").drop_nulls().n_unique().cast(pl.Int64),
        states=pl.col("state_hash").drop_nulls().n_unique().cast(pl.Int64),
        share=pl.when(weight.count() > 0).then(weight.abs().sum() / whole),
        doubt=pl.when(pl.col("state_is_error").any())
        .then(pl.lit("error text"))
        .when(empty.all() & (empty.count() > 0))
        .then(pl.lit("empty")),
    )
    by, falls = ["episodes", "size", "anchor_key"], [True, True, False]
    if sort is not None and sort.column in ORDERS:
        by, falls = [sort.column, *by], [sort.descending, *falls]
    return found.sort(by, descending=falls, nulls_last=True).slice(window.offset, window.limit)


def total(lake: Reads, group_id: int, credit: Credit) -> int:
    """Number of rows of `page`."""
    return _shared(_visited(lake, group_id, credit)).len().height


def _visited(lake: Reads, group_id: int, credit: Credit) -> pl.DataFrame:
    """The steps of a group that a credit knows, one row each: what a page about the group asks three times.

    episode_id, step_index; of the credit anchor_key, anchor_size, anchor_episodes, return_to_go, a_step; of the state
    its beginning, state_hash, state_is_error, state_is_empty; taken and led_here, equal where the same was done there,
    and before it.
    """
    query = f"""
        SELECT a.episode_id, a.step_index, a.anchor_key, a.anchor_size, a.anchor_episodes, a.return_to_go, a.a_step,
               left(s.state, {EXCERPT}) AS state, s.state_hash, s.state_is_error,
               is_empty_state(s.state_hash) AS state_is_empty, hash({taken("s")}) AS taken, s.led_here
        FROM {credit.rows} AS a
        JOIN {_steps(lake, group_id)} AS s ON s.episode_id = a.episode_id AND s.step_index = a.step_index
        WHERE a.group_id = $group
        """
    return lake.sql(query, {"group": group_id})


def _shared(steps: pl.DataFrame) -> GroupBy:
    """The steps of each anchor that two or more episodes passed."""
    several = pl.col("episode_id").n_unique().over("anchor_key") > 1
    return steps.filter(pl.col("anchor_key").is_not_null()).filter(several).group_by("anchor_key")


def visits(
    lake: Reads, group_id: int, anchor_key: int, credit: Credit, window: Window, score: str | None = None
) -> pl.DataFrame:
    """The steps of a group that were taken from an anchor state, by rollout and step; texts are cut."""
    judged, params = outcomes.judged(lake, score)
    query = f"""
        SELECT a.episode_id, e.rollout_index, a.step_index, left(s.action, {EXCERPT}) AS action,
               left(s.tool_calls, {EXCERPT}) AS tool_calls, s.reward, a.return_to_go, a.a_step, a.advantage,
               e.outcome
        FROM {credit.rows} AS a
        JOIN {_steps(lake, group_id)} AS s ON s.episode_id = a.episode_id AND s.step_index = a.step_index
        JOIN {judged} AS e ON e.episode_id = a.episode_id
        WHERE a.group_id = $group AND a.anchor_key = $anchor
        ORDER BY e.rollout_index, e.attempt, a.episode_id, a.step_index LIMIT $limit OFFSET $offset
        """
    return lake.sql(query, params | {"group": group_id, "anchor": anchor_key} | window.params())


def visits_total(lake: Reads, group_id: int, anchor_key: int, credit: Credit) -> int:
    """Number of a group's steps that were taken from an anchor state."""
    query = f"SELECT count(*) FROM {credit.rows} WHERE group_id = $group AND anchor_key = $anchor"
    return count(lake, query, {"group": group_id, "anchor": anchor_key})


EXPLORED_ORDERS = themselves("groups", "size", "episodes", "spread", "share")
"""Columns that may order the states of a whole credit."""
SEEN_ORDERS = ("actions", "ways_in")
"""Columns that may order them, too, where there are at most `MOST_SEEN`: the texts of all of them are read for it."""
MOST_SEEN = 300
SAMPLE = 400
"""Steps of a state, drawn fairly, whose texts are read for a row of `explored`."""
_ALL = Window(2**62)
_STATES = """
    SELECT anchor_key, count(*) AS groups, sum(size)::BIGINT AS size, sum(episodes)::BIGINT AS episodes,
           avg(spread) AS spread, sum(weight) / nullif(sum(sum(weight)) OVER (), 0) AS share
    FROM (
        SELECT anchor_key, group_id, count(*) AS size, count(DISTINCT episode_id) AS episodes,
               max(return_to_go) - min(return_to_go) AS spread, sum(abs(a_step)) AS weight
        FROM {rows} WHERE anchor_key IS NOT NULL AND anchor_episodes > 1 GROUP BY anchor_key, group_id
    ) GROUP BY anchor_key
    """


def explored(lake: Reads, credit: Credit, window: Window, sort: Sort | None = None) -> pl.DataFrame:
    """The states that siblings share, over all groups of a credit, those that make most of the step advantages first.

    anchor_key; groups in which siblings share it, its size in steps and its episodes there, spread (the mean over
    groups of largest minus smallest return-to-go), share (of the sum of |A_S|). Of at most `SAMPLE` of its steps:
    state, states (distinct texts), actions (distinct ones taken there), ways_in (distinct ones that led there), doubt
    (why it may stand for several situations: an error, or empty).
    """
    return with_texts(lake, credit, explored_states(lake, credit, sort, window))


def explored_states(lake: Reads, credit: Credit, sort: Sort | None, window: Window = _ALL) -> pl.DataFrame:
    """`explored` without what texts tell, unless they are what the states are ordered by."""
    by_seen = sort if sort is not None and sort.column in SEEN_ORDERS else None
    if by_seen is not None and explored_total(lake, credit)["anchors"] > MOST_SEEN:
        sort = by_seen = None
    order = order_by(None if by_seen else sort, EXPLORED_ORDERS, "share DESC NULLS LAST, size DESC, anchor_key")
    listed = lake.sql(
        f"SELECT * FROM ({_STATES.format(rows=credit.rows)}) ORDER BY {order} LIMIT $limit OFFSET $offset",
        (Window(MOST_SEEN) if by_seen else window).params(),
    )
    if by_seen is None:
        return listed
    found = with_texts(lake, credit, listed)
    found = found.sort(by_seen.column, descending=by_seen.descending, nulls_last=True, maintain_order=True)
    return found.slice(window.offset, window.limit)


def with_texts(lake: Reads, credit: Credit, listed: pl.DataFrame) -> pl.DataFrame:
    """Rows of `explored_states` with what the texts of their states tell."""
    if "doubt" in listed.columns:
        return listed
    found = seen(lake, credit, listed["anchor_key"].to_list())
    return listed.join(found, on="anchor_key", how="left", maintain_order="left")


def explored_total(lake: Reads, credit: Credit) -> Row:
    """Figures of a credit: anchors (rows of `explored`), steps, shared (taken from one of them)."""
    query = f"""
        SELECT count(DISTINCT anchor_key) FILTER (anchor_episodes > 1) AS anchors, count(*) AS steps,
               count(*) FILTER (anchor_key IS NOT NULL AND anchor_episodes > 1) AS shared
        FROM {credit.rows}
        """
    return lake.sql(query).row(0, named=True)


GROUP_ORDERS = themselves("run_id", "collection_round", "size", "episodes", "spread", "weight") | {
    "task_id": ("TRY_CAST(task_id AS BIGINT)", "task_id")
}
"""Columns that may order the groups of a state."""


def groups_of(lake: Reads, credit: Credit, anchor_key: int, window: Window, sort: Sort | None = None) -> pl.DataFrame:
    """The groups whose siblings share a state, those with the largest sum of |A_S| (weight) first.

    group_id, run_id, task_id, collection_round, size, episodes, spread; of a grouping those of any of its episodes.
    """
    query = f"""
        SELECT * FROM (SELECT a.group_id, any_value(e.run_id) AS run_id, any_value(e.task_id) AS task_id,
               any_value(e.collection_round) AS collection_round, count(*) AS size,
               count(DISTINCT a.episode_id) AS episodes, max(a.return_to_go) - min(a.return_to_go) AS spread,
               sum(abs(a.a_step)) AS weight
        FROM {credit.rows} AS a JOIN episodes AS e ON e.episode_id = a.episode_id
        WHERE a.anchor_key = $anchor AND a.anchor_episodes > 1
        GROUP BY a.group_id) ORDER BY {order_by(sort, GROUP_ORDERS, "weight DESC NULLS LAST, size DESC, group_id")}
        LIMIT $limit OFFSET $offset
        """
    return lake.sql(query, {"anchor": anchor_key} | window.params())


def sharing(lake: Reads, credit: Credit, anchor_key: int) -> Row:
    """How many siblings share a state: groups, episodes."""
    query = f"""
        SELECT count(DISTINCT group_id) AS groups, count(DISTINCT episode_id) AS episodes
        FROM {credit.rows} WHERE anchor_key = $anchor AND anchor_episodes > 1
        """
    return lake.sql(query, {"anchor": anchor_key}).row(0, named=True)


def passed(credit: Credit, anchor_key: int, group_id: int | None = None) -> str:
    """A SELECT of the episodes that passed a state, in a group or wherever siblings share it, for a list (`sql=`)."""
    where = "anchor_episodes > 1" if group_id is None else f"group_id = {group_id}"
    return f"SELECT DISTINCT episode_id FROM {credit.rows} WHERE anchor_key = {anchor_key} AND {where} ORDER BY ALL"


def seen(lake: Reads, credit: Credit, anchor_keys: Sequence[int], group_id: int | None = None) -> pl.DataFrame:
    """What the texts of states tell, of at most `SAMPLE` of the steps of each, in one group or in all.

    anchor_key, state, states, actions, ways_in, doubt; see `explored`.
    """
    within = "" if group_id is None else f"AND group_id = {group_id}"
    # The episodes are named one by one, as in `_steps`.
    drawn = lake.sql(
        f"""
        SELECT anchor_key, episode_id, step_index FROM {credit.rows}
        WHERE anchor_key IN ({", ".join(map(str, anchor_keys)) or "NULL"}) AND anchor_episodes > 1 {within}
        QUALIFY row_number() OVER (PARTITION BY anchor_key ORDER BY hash(episode_id, step_index)) <= {SAMPLE}
        """
    )
    query = f"""
        WITH drawn AS (SELECT unnest($anchors::BIGINT[]) AS anchor_key, unnest($episodes::BIGINT[]) AS episode_id,
                              unnest($steps::INTEGER[]) AS step_index),
        there AS (
            SELECT * FROM steps
            WHERE episode_id IN ({", ".join(map(str, drawn["episode_id"].unique().sort())) or "NULL"})
        )
        SELECT d.anchor_key, left(arg_min(s.state, (d.episode_id, d.step_index)), {EXCERPT}) AS state,
               count(DISTINCT s.state_hash) AS states, count(DISTINCT {taken("s")}) AS actions,
               count(DISTINCT {taken("b")}) FILTER (b.step_index IS NOT NULL) AS ways_in,
               CASE WHEN bool_or(s.state_is_error) THEN 'error text'
                    WHEN bool_and(is_empty_state(s.state_hash)) THEN 'empty' END AS doubt
        FROM drawn AS d JOIN there AS s ON s.episode_id = d.episode_id AND s.step_index = d.step_index
        LEFT JOIN there AS b ON b.episode_id = d.episode_id AND b.step_index = d.step_index - 1
        GROUP BY d.anchor_key
        """
    named = {"anchors": "anchor_key", "episodes": "episode_id", "steps": "step_index"}
    return lake.sql(query, {name: drawn[column].to_list() for name, column in named.items()})


def _steps(lake: Reads, group_id: int) -> str:
    """SQL of a group's steps, each with the action before it as `led_here`.

    Its episodes are named one by one: their files are found, and no other is read.
    """
    members, _ = outcomes.of_group(lake, group_id, ENV_RETURN)
    found = lake.sql(f"SELECT episode_id FROM {members} WHERE group_id = ?", [group_id])["episode_id"]
    return f"""(
        SELECT *, lag(hash({taken("steps")})) OVER (PARTITION BY episode_id ORDER BY step_index) AS led_here
        FROM steps WHERE episode_id IN ({", ".join(map(str, found)) or "NULL"})
    )"""
