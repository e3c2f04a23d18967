"""Anchor states: the states that siblings of a group share, why one may be false, and other definitions of a state.

An anchor is false if its steps stand for several situations: A_S then compares what cannot be compared. Any situation
can lead to an error text or an empty state. A state that many different actions lead to is suspicious as well. Sums of
|A_S| measure how much of the step advantages an anchor contributes.
"""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import polars as pl

from lake.documents import parse_json_object
from lake.judgements import outcomes
from lake.judgements.credit import Credit
from lake.judgements.scores import ENV_RETURN
from viewer.queries import (
    EXCERPT,
    LakeReader,
    ListWindow,
    Row,
    Sort,
    build_action_sql,
    build_id_list,
    build_sort_terms,
    count,
    get_first_row,
    order_by,
)

ORDERS = (
    *("size", "episodes", "actions", "spread", "lowest", "highest"),
    *("mean_step", "ways_in", "states", "share", "doubt"),
)
"""Columns that may order anchor states."""
SHARED_ANCHORS = """
    SELECT group_id, anchor_key, count(*) AS size,
           anchor_key IS NOT NULL AND min(episode_id) < max(episode_id) AS is_shared
    FROM {rows} GROUP BY group_id, anchor_key
    """
"""SQL of the anchors of groups. Two episodes share one, scored or not: a credit's counts leave the unscored out."""


def compute_shares(lake: LakeReader, group_id: int, credit: Credit) -> Row:
    """Return how a group's steps divide into anchors: steps, shared (two episodes or more), alone (one step).

    doubted counts the shared steps from an error text or an empty state. doubted_weight is their share of the sum of
    |A_S|, NULL if that is 0.
    """
    steps = _read_visited_steps(lake, group_id, credit)
    is_doubted = pl.col("is_shared") & pl.any_horizontal("state_is_error", "state_is_empty").fill_null(value=False)
    weight = pl.col("a_step").abs()
    figures = steps.select(
        steps=pl.len(),
        shared=pl.col("is_shared").sum(),
        alone=(pl.col("anchor_key").is_not_null() & (pl.len().over("anchor_key") == 1)).sum(),
        doubted=is_doubted.sum(),
        doubted_weight=pl.when(weight.sum() > 0).then(weight.filter(is_doubted).sum() / weight.sum()),
    )
    return figures.row(0, named=True)


def read_page(
    lake: LakeReader, group_id: int, credit: Credit, window: ListWindow, sort: Sort | None = None
) -> pl.DataFrame:
    """Return the anchor states that two or more episodes of a group passed, the most shared first.

    size counts steps, actions the distinct actions from the state, ways_in those that led to it, and states its
    distinct texts. lowest, highest and spread are of the return-to-go. share is of the group's sum of |A_S|. doubt is
    the reason why the state may stand for several: an error text, or empty.
    """
    steps = _read_visited_steps(lake, group_id, credit)
    total_weight = steps["a_step"].abs().sum() or None
    returns, weight, empty = pl.col("return_to_go"), pl.col("a_step"), pl.col("state_is_empty")
    groups = steps.filter("is_shared").group_by("anchor_key")
    states = groups.agg(
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
        share=pl.when(weight.count() > 0).then(weight.abs().sum() / total_weight),
        doubt=pl.when(pl.col("state_is_error").any())
        .then(pl.lit("error text"))
        .when(empty.all() & (empty.count() > 0))
        .then(pl.lit("empty")),
    )
    by, falls = ["episodes", "size", "anchor_key"], [True, True, False]
    if sort is not None and sort.column in ORDERS:
        by, falls = [sort.column, *by], [sort.descending, *falls]
    return states.sort(by, descending=falls, nulls_last=True).slice(window.offset, window.limit)


def count_anchors(lake: LakeReader, group_id: int, credit: Credit) -> int:
    """Count the rows of `read_page`."""
    return _read_visited_steps(lake, group_id, credit).filter("is_shared")["anchor_key"].n_unique()


def _read_visited_steps(lake: LakeReader, group_id: int, credit: Credit) -> pl.DataFrame:
    """Return the steps of a group that a credit covers. A page about the group reads this frame three times.

    episode_id, step_index; of the credit anchor_key, is_shared, return_to_go, a_step; of the state its beginning,
    state_hash, state_is_error, state_is_empty. Equal actions have equal `taken`, and equal actions before the step have
    equal `led_here`.
    """
    query = f"""
        WITH visits AS (SELECT * FROM {credit.rows} WHERE group_id = $group)
        SELECT a.episode_id, a.step_index, a.anchor_key, c.is_shared, a.return_to_go, a.a_step,
               left(s.state, {EXCERPT}) AS state, s.state_hash, s.state_is_error,
               is_empty_state(s.state_hash) AS state_is_empty, hash({build_action_sql("s")}) AS taken, s.led_here
        FROM visits AS a
        JOIN {_build_steps_sql(lake, group_id)} AS s ON s.episode_id = a.episode_id AND s.step_index = a.step_index
        JOIN ({SHARED_ANCHORS.format(rows="visits")}) AS c ON c.anchor_key IS NOT DISTINCT FROM a.anchor_key
        """
    return lake.sql(query, {"group": group_id})


def read_visits(
    lake: LakeReader, group_id: int, anchor_key: int, credit: Credit, window: ListWindow, score: str | None = None
) -> pl.DataFrame:
    """Return a group's steps from an anchor state, by rollout and step; texts are cut."""
    relation, params = outcomes.build_relation(lake, score)
    query = f"""
        SELECT a.episode_id, e.rollout_index, a.step_index, left(s.action, {EXCERPT}) AS action,
               left(s.tool_calls, {EXCERPT}) AS tool_calls, s.reward, a.return_to_go, a.a_step, a.advantage,
               e.outcome
        FROM {credit.rows} AS a
        JOIN {_build_steps_sql(lake, group_id)} AS s ON s.episode_id = a.episode_id AND s.step_index = a.step_index
        JOIN {relation} AS e ON e.episode_id = a.episode_id
        WHERE a.group_id = $group AND a.anchor_key = $anchor
        ORDER BY e.rollout_index, e.attempt, a.episode_id, a.step_index LIMIT $limit OFFSET $offset
        """
    return lake.sql(query, params | {"group": group_id, "anchor": anchor_key} | window.params())


def count_visits(lake: LakeReader, group_id: int, anchor_key: int, credit: Credit) -> int:
    """Count a group's steps from an anchor state."""
    query = f"SELECT count(*) FROM {credit.rows} WHERE group_id = $group AND anchor_key = $anchor"
    return count(lake, query, {"group": group_id, "anchor": anchor_key})


STATE_ORDERS = build_sort_terms("groups", "size", "episodes", "spread", "share")
"""Columns that may order the states of a whole credit."""
TEXT_ORDERS = ("actions", "ways_in")
"""Further sort columns of at most `MOST_STATES_BY_TEXT` states, because they take the texts of all these states."""
MOST_STATES_BY_TEXT = 300
SAMPLE = 400
"""Steps of a state, drawn by a hash, whose texts a row of `read_states` reads."""
_ALL = ListWindow(2**62)
_STATES = """
    SELECT anchor_key, count(*) AS groups, sum(size)::BIGINT AS size, sum(episodes)::BIGINT AS episodes,
           avg(spread) AS spread, sum(weight) / nullif(sum(sum(weight)) OVER (), 0) AS share
    FROM (
        SELECT anchor_key, group_id, count(*) AS size, count(DISTINCT episode_id) AS episodes,
               max(return_to_go) - min(return_to_go) AS spread, sum(abs(a_step)) AS weight
        FROM {rows} WHERE anchor_key IS NOT NULL AND anchor_episodes > 1 GROUP BY anchor_key, group_id
    ) GROUP BY anchor_key
    """


def read_states(lake: LakeReader, credit: Credit, window: ListWindow, sort: Sort | None = None) -> pl.DataFrame:
    """Return the states that siblings share, over all groups of a credit, by their share of the step advantages.

    anchor_key; groups in which siblings share it, with its size in steps and its episodes there; spread (the mean over
    groups of largest minus smallest return-to-go); share (of the sum of |A_S|). The other columns are of at most
    `SAMPLE` of its steps: state, states (distinct texts), actions (distinct actions from it), ways_in (distinct actions
    that led to it), doubt (why it may stand for several situations: an error text, or empty).
    """
    return add_texts(lake, credit, list_states(lake, credit, sort, window))


def list_states(lake: LakeReader, credit: Credit, sort: Sort | None, window: ListWindow = _ALL) -> pl.DataFrame:
    """Return `read_states` without the columns of texts, unless they order the states."""
    text_sort = sort if sort is not None and sort.column in TEXT_ORDERS else None
    if text_sort is not None and count_states(lake, credit)["anchors"] > MOST_STATES_BY_TEXT:
        sort = text_sort = None
    order = order_by(None if text_sort else sort, STATE_ORDERS, "share DESC NULLS LAST, size DESC, anchor_key")
    states = lake.sql(
        f"SELECT * FROM ({_STATES.format(rows=credit.rows)}) ORDER BY {order} LIMIT $limit OFFSET $offset",
        (ListWindow(MOST_STATES_BY_TEXT) if text_sort else window).params(),
    )
    if text_sort is None:
        return states
    frame = add_texts(lake, credit, states)
    frame = frame.sort(text_sort.column, descending=text_sort.descending, nulls_last=True, maintain_order=True)
    return frame.slice(window.offset, window.limit)


def add_texts(lake: LakeReader, credit: Credit, states: pl.DataFrame) -> pl.DataFrame:
    """Add the columns of texts to rows of `list_states`."""
    if "doubt" in states.columns:
        return states
    texts = read_texts(lake, credit, states["anchor_key"].to_list())
    return states.join(texts, on="anchor_key", how="left", maintain_order="left")


def count_states(lake: LakeReader, credit: Credit) -> Row:
    """Return figures of a credit: anchors (rows of `read_states`), steps, shared (steps from one of these states)."""
    query = f"""
        SELECT count(DISTINCT anchor_key) FILTER (anchor_episodes > 1) AS anchors, count(*) AS steps,
               count(*) FILTER (anchor_key IS NOT NULL AND anchor_episodes > 1) AS shared
        FROM {credit.rows}
        """
    return lake.sql(query).row(0, named=True)


GROUP_ORDERS = build_sort_terms("run_id", "collection_round", "size", "episodes", "spread", "weight") | {
    "task_id": ("TRY_CAST(task_id AS BIGINT)", "task_id")
}
"""Columns that may order the groups of a state."""


def read_groups(
    lake: LakeReader, credit: Credit, anchor_key: int, window: ListWindow, sort: Sort | None = None
) -> pl.DataFrame:
    """Return the groups whose siblings share a state, those with the largest sum of |A_S| (weight) first.

    group_id, run_id, task_id, collection_round, size, episodes, spread. Names of a grouping's group are those of any of
    its episodes.
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


def count_siblings(lake: LakeReader, credit: Credit, anchor_key: int) -> Row:
    """Count the siblings that share a state: groups, episodes."""
    query = f"""
        SELECT count(DISTINCT group_id) AS groups, count(DISTINCT episode_id) AS episodes
        FROM {credit.rows} WHERE anchor_key = $anchor AND anchor_episodes > 1
        """
    return lake.sql(query, {"anchor": anchor_key}).row(0, named=True)


def build_visitors_sql(credit: Credit, anchor_key: int, group_id: int | None = None) -> str:
    """Return a SELECT of the episodes that passed a state, in one group or in all groups, for a list (`sql=`)."""
    where = "anchor_episodes > 1" if group_id is None else f"group_id = {group_id}"
    return f"SELECT DISTINCT episode_id FROM {credit.rows} WHERE anchor_key = {anchor_key} AND {where} ORDER BY ALL"


def read_texts(
    lake: LakeReader, credit: Credit, anchor_keys: Sequence[int], group_id: int | None = None
) -> pl.DataFrame:
    """Return the columns of states that come from texts, from at most `SAMPLE` steps of each, in one group or in all.

    anchor_key, state, states, actions, ways_in, doubt; see `read_states`.
    """
    within = "" if group_id is None else f"AND group_id = {group_id}"
    drawn = lake.sql(
        f"""
        SELECT anchor_key, episode_id, step_index FROM {credit.rows}
        WHERE anchor_key IN ({build_id_list(anchor_keys)}) AND anchor_episodes > 1 {within}
        QUALIFY row_number() OVER (PARTITION BY anchor_key ORDER BY hash(episode_id, step_index)) <= {SAMPLE}
        """
    )
    query = f"""
        WITH drawn AS (SELECT unnest($anchors::BIGINT[]) AS anchor_key, unnest($episodes::BIGINT[]) AS episode_id,
                              unnest($steps::INTEGER[]) AS step_index),
        there AS (
            SELECT * FROM steps
            WHERE episode_id IN ({build_id_list(drawn["episode_id"].unique().sort())})
        )
        SELECT d.anchor_key, left(arg_min(s.state, (d.episode_id, d.step_index)), {EXCERPT}) AS state,
               count(DISTINCT s.state_hash) AS states, count(DISTINCT {build_action_sql("s")}) AS actions,
               count(DISTINCT {build_action_sql("b")}) FILTER (b.step_index IS NOT NULL) AS ways_in,
               CASE WHEN bool_or(s.state_is_error) THEN 'error text'
                    WHEN bool_and(is_empty_state(s.state_hash)) THEN 'empty' END AS doubt
        FROM drawn AS d JOIN there AS s ON s.episode_id = d.episode_id AND s.step_index = d.step_index
        LEFT JOIN there AS b ON b.episode_id = d.episode_id AND b.step_index = d.step_index - 1
        GROUP BY d.anchor_key
        """
    named = {"anchors": "anchor_key", "episodes": "episode_id", "steps": "step_index"}
    return lake.sql(query, {name: drawn[column].to_list() for name, column in named.items()})


def _build_steps_sql(lake: LakeReader, group_id: int) -> str:
    """Return SQL of a group's steps, each with the action before it as `led_here`."""
    members, _ = outcomes.build_group_relation(lake, group_id, ENV_RETURN)
    episode_ids = lake.sql(f"SELECT episode_id FROM {members} WHERE group_id = ?", [group_id])["episode_id"]
    return f"""(
        SELECT *, lag(hash({build_action_sql("steps")})) OVER (PARTITION BY episode_id ORDER BY step_index) AS led_here
        FROM steps WHERE episode_id IN ({build_id_list(episode_ids)})
    )"""


_SHARES = ("known", "shared", "singleton", "errors", "ways_in")


@dataclass(frozen=True, slots=True)
class DefinitionMeasurement:
    """Figures of definitions of a state, stored by `trajlake anchors --keep`."""

    job_id: int
    ended_at: datetime
    options: str
    """The measured part of the lake, as options of the command."""
    is_outdated: bool
    """Whether episodes were recorded after it."""
    figures: pl.DataFrame
    """A row for each definition: anchors (its name), definition (as JSON), steps (measured), states, and the shares
    of the steps that are known, shared and singleton, errors (of the shared steps) and ways_in; NULL: unknown."""


def read_measurement(lake: LakeReader) -> DefinitionMeasurement | None:
    """Return the newest measurement; None if none was stored."""
    query = """
        SELECT job_id, ended_at, parameters, counts FROM job_runs WHERE kind = 'anchors' AND status = 'succeeded'
        ORDER BY ended_at DESC, job_id LIMIT 1
        """
    row = get_first_row(lake.sql(query))
    if row is None:
        return None
    settings = parse_json_object(row["parameters"])
    definitions, shares = settings.pop("definitions", None), parse_json_object(row["counts"]).get("definitions")
    if not isinstance(definitions, dict) or not isinstance(shares, list):
        return None
    texts = {name: json.dumps(value, separators=(",", ":")) for name, value in definitions.items()}
    options = " ".join(f"--{name} {shlex.quote(str(value))}" for name, value in sorted(settings.items()))
    types: dict[str, type[pl.DataType]] = {"anchors": pl.String, "steps": pl.Int64, "states": pl.Int64}
    figures = pl.DataFrame(shares, strict=False, schema=types | dict.fromkeys(_SHARES, pl.Float64))
    later = """
        SELECT count(*) FROM job_runs WHERE kind IN ('collect', 'ingest') AND rows_out > 0 AND started_at > $since
        """
    return DefinitionMeasurement(
        row["job_id"],
        row["ended_at"],
        options,
        count(lake, later, {"since": row["ended_at"]}) > 0,
        figures.with_columns(definition=pl.col("anchors").replace_strict(texts, default=None, return_dtype=pl.String)),
    )
