"""The list of episodes: its filter, order, pages, neighbours and facets, its excerpts of a search, and its download."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from itertools import product
from typing import Any

import polars as pl

from lake import ids
from lake.cli.options import format_ids
from lake.judgements import outcomes
from lake.judgements.scores import ENV_RETURN, read_scores_of
from lake.search import document_text, parse_terms, quote_words, search_reasons
from viewer.plain import describe_calls
from viewer.queries import (
    EXCERPT,
    LakeReader,
    ListWindow,
    Params,
    Row,
    Sort,
    build_id_list,
    build_like_pattern,
    order_by,
    quote_literal,
    sql,
)

FACETS = {
    "tool": "SELECT episode_id, unnest(tools_called) AS value FROM episode_steps",
    "failed": "SELECT episode_id, unnest(tools_failed) AS value FROM episode_steps",
    "error": """
        SELECT episode_id, 'rollout' AS value FROM episodes WHERE error IS NOT NULL
        UNION ALL SELECT episode_id, 'state' FROM episode_steps WHERE error_states > 0
        UNION ALL SELECT episode_id, 'action' FROM episode_steps WHERE invalid_actions > 0
    """,
    "scorer": "SELECT episode_id, scorer AS value FROM current_scores",
    "flag": "SELECT episode_id, unnest(string_split(flags, ',')) AS value FROM current_advantages WHERE flags <> ''",
    "tag": "SELECT episode_id, label AS value FROM latest_annotations",
}
"""SQL of (episode_id, value) by facet.

tool and failed are called tools and tools with a failed call. error says where an episode has one: its end, a state
that is an error text, or a malformed action. flag is of the current credit, tag a label that a person gave.
"""
UNIQUE_FACETS = {"tool", "failed", "error"}
"""Facets whose SQL holds each pair once."""


class FieldKind(StrEnum):
    """How a value of a filter is written in an address."""

    TEXT = "text"
    PATTERN = "pattern"
    """A text with `*` for any characters."""
    ID = "id"
    """13 characters of base32."""
    COUNT = "count"
    """A whole number from 0."""
    NUMBER = "number"
    """A finite number."""
    FLAG = "flag"
    """`true`; otherwise left out."""
    STATUSES = "statuses"
    """Any of `lake.tables.STATUSES`; the parameter repeats."""


@dataclass(frozen=True, slots=True)
class FilterParameter:
    """A query parameter of an address that holds a filter, and the name of a bound value in its SQL."""

    name: str
    kind: FieldKind = FieldKind.TEXT
    label: str | None = None
    """The words of its chip; None: the chip of another parameter covers it."""
    optional_sql: str | None = None
    """Replaces `{NAME}` in the condition of its field where the parameter has a value; None: the value is required."""


@dataclass(frozen=True, slots=True)
class FilterField:
    """One field of `EpisodeFilter`: its SQL, its parameters and its labels."""

    name: str
    condition: str | None
    """SQL about `e`, which is `episodes` with `outcome`; None: the field is no condition on a column."""
    parameters: tuple[FilterParameter, ...]
    """Several for a field that holds a tuple."""
    has_input: bool
    """Whether the page draws a number field for it from this table."""


def _define(
    condition: str | None,
    *parameters: FilterParameter,
    kind: FieldKind = FieldKind.TEXT,
    key: str | None = None,
    label: str | None = None,
    default: Any = None,
    has_input: bool = False,
) -> Any:
    """Define a field of `EpisodeFilter` and its row of `FIELDS`; the default of key and label is the field's name."""
    row = {"condition": condition, "parameters": parameters, "has_input": has_input}
    return field(default=default, metadata=row | {"kind": kind, "key": key, "label": label})


def _define_facet(facet: str, label: str | None = None) -> Any:
    pairs = f"SELECT episode_id FROM ({FACETS[facet]}) WHERE value = ${facet}"
    if facet == "tool":  # list_contains is faster than a search among unnested elements.
        pairs = "SELECT episode_id FROM episode_steps WHERE list_contains(tools_called, $tool)"
    return _define(f"e.episode_id IN ({pairs})", label=label)


@dataclass(frozen=True, slots=True)
class EpisodeFilter:
    """Conditions on episodes; None leaves none out. Each line is the one description of its field (`FIELDS`)."""

    run: str | None = _define("e.run_id = $run")
    run_tag: str | None = _define(
        "e.run_id IN (SELECT run_id FROM run_labels WHERE list_contains(tags, $run_tag))", label="run tag"
    )
    """A tag of runs (`trajlake runs tag`)."""
    task: str | None = _define(r"e.task_id LIKE $task ESCAPE '\'", kind=FieldKind.PATTERN)
    status: tuple[str, ...] = _define("e.status IN (SELECT unnest($status))", kind=FieldKind.STATUSES, default=())
    """Any of these."""
    group: int | None = _define(
        "(e.group_id = $group OR e.episode_id IN (SELECT episode_id FROM groupings WHERE group_id = $group))",
        kind=FieldKind.ID,
    )
    """A collected group or one of a grouping."""
    score: str | None = _define(None, label="outcome")
    """The outcome that the list shows, filters and orders by (`lake.judgements.outcomes`). It leaves no episode out."""
    low: float | None = _define(
        "e.outcome >= $min", kind=FieldKind.NUMBER, key="min", label="outcome from", has_input=True
    )
    """Smallest outcome; leaves unscored episodes out."""
    high: float | None = _define(
        "e.outcome <= $max", kind=FieldKind.NUMBER, key="max", label="outcome to", has_input=True
    )
    """Largest outcome; leaves unscored episodes out."""
    unscored: bool = _define("e.outcome IS NULL", kind=FieldKind.FLAG, default=False)
    """Only episodes without an outcome."""
    text: str | None = _define(None)
    """Words that a step, or the messages of the episode, hold (`lake.search`)."""
    collection_round: int | None = _define(
        "e.collection_round = $round", kind=FieldKind.COUNT, key="round", has_input=True
    )
    policy_version: int | None = _define(
        "e.policy_version = $version", kind=FieldKind.COUNT, key="version", label="policy version", has_input=True
    )
    tool: str | None = _define_facet("tool")
    """A value of the facet of this name (`FACETS`), as for the next five fields."""
    failed: str | None = _define_facet("failed", "failed call")
    error: str | None = _define_facet("error")
    scorer: str | None = _define_facet("scorer")
    flag: str | None = _define_facet("flag")
    tag: str | None = _define_facet("tag")
    steps_from: int | None = _define(
        "e.num_steps >= $steps_from", kind=FieldKind.COUNT, label="steps from", has_input=True
    )
    """Smallest number of steps. Both ends of each range are included."""
    steps_to: int | None = _define("e.num_steps <= $steps_to", kind=FieldKind.COUNT, label="steps to", has_input=True)
    round_from: int | None = _define("e.collection_round >= $round_from", kind=FieldKind.COUNT, label="round from")
    round_to: int | None = _define("e.collection_round <= $round_to", kind=FieldKind.COUNT, label="round to")
    version_from: int | None = _define("e.policy_version >= $version_from", kind=FieldKind.COUNT, label="version from")
    version_to: int | None = _define("e.policy_version <= $version_to", kind=FieldKind.COUNT, label="version to")
    update: tuple[int, int] | None = _define(
        "e.episode_id IN (SELECT episode_id FROM trained_batches WHERE job_id = $job AND optimizer_step = $update)",
        FilterParameter("job", FieldKind.ID),
        FilterParameter("update", FieldKind.COUNT, "update"),
    )
    """(training job, optimizer step): the episodes that the update consumed."""
    unlabelled: tuple[str, str | None] | None = _define(
        "e.episode_id NOT IN (SELECT episode_id FROM latest_annotations WHERE label = $unlabelled{by})",
        FilterParameter("unlabelled", label="without label"),
        FilterParameter("by", label="label by", optional_sql=" AND author = $by"),
    )
    """(label, author): episodes on which, or on whose steps, the author has not put the label; None: no author has."""
    sql: str | None = _define(None)
    """A SELECT whose rows name the episodes (`viewer.queries.sql.list_named_episodes`)."""
    about: str | None = _define(None, label="query")
    """The subject of that SELECT in words; leaves no episode out."""

    @property
    def has_lookup(self) -> bool:
        """Whether a search or a query must find the episodes first, because the lake's tables have no column for it."""
        return self.text is not None or self.sql is not None

    @property
    def narrows(self) -> bool:
        """Whether the filter can leave an episode out."""
        return replace(self, score=None, about=None) != EpisodeFilter()


FIELDS = tuple(
    FilterField(
        column.name,
        column.metadata["condition"],
        column.metadata["parameters"]
        or (FilterParameter(key, column.metadata["kind"], column.metadata["label"] or key),),
        column.metadata["has_input"],
    )
    for column in fields(EpisodeFilter)
    for key in (column.metadata["key"] or column.name,)
)
"""The table of the fields of `EpisodeFilter`: SQL, addresses, chips and number fields all come from it."""


def build_conditions(episode_filter: EpisodeFilter) -> tuple[list[str], Params]:
    """Return the filter as conditions on `e` (`episodes` with `outcome`) and their parameters, without its lookups."""
    clauses: list[str] = []
    params: Params = {}
    for row in FIELDS:
        value = getattr(episode_filter, row.name)
        if row.condition is None or value is None or value is False or value == ():
            continue
        condition = row.condition
        for parameter, part in zip(row.parameters, value if len(row.parameters) > 1 else (value,), strict=True):
            if parameter.optional_sql is not None:
                condition = condition.replace(f"{{{parameter.name}}}", "" if part is None else parameter.optional_sql)
            if parameter.kind is FieldKind.PATTERN:
                params[parameter.name] = build_like_pattern(part)
            elif parameter.kind is FieldKind.STATUSES:
                params[parameter.name] = list(part)
            elif parameter.kind is not FieldKind.FLAG and part is not None:
                params[parameter.name] = part
        clauses.append(condition)
    return clauses, params


def apply_lookups(lake: LakeReader, episode_filter: EpisodeFilter, rows: pl.DataFrame) -> pl.DataFrame:
    """Return the rows (with a column `episode_id`) whose episodes the filter's search and query find.

    Raises:
        QueryError: the query has no result.
    """
    if episode_filter.text is not None:
        rows = rows.join(lake.holding(episode_filter.text), on="episode_id", how="semi", maintain_order="left")
    if episode_filter.sql is not None:
        named = sql.list_named_episodes(lake, episode_filter.sql)
        rows = rows.join(named, on="episode_id", how="semi", maintain_order="left")
    return rows


def find_named_episodes(lake: LakeReader, text: str, within: str = "true") -> pl.DataFrame:
    """Return the rows of `LakeReader.holding` for episodes with a text as their id, their group's or their task's."""
    query = f"""
        SELECT episode_id, NULL::INTEGER AS step_index, 0::BIGINT AS steps FROM episodes
        WHERE {within} AND ($id IN (episode_id, group_id) OR lower(task_id) = $name
        OR (length($name) > 2 AND starts_with(lower(task_id), $name)))
        """
    name = text.strip('" ').lower()
    return lake.sql(query, {"name": name, "id": ids.from_text(name) if ids.is_text(name) else None})


def _find_phrases(lake: LakeReader, text: str) -> pl.DataFrame:
    """Return the rows of `LakeReader.holding` for words side by side; none if the words find more than `FIRST`."""
    hits, phrase = lake.holding(text), quote_words(text)
    return hits.clear() if phrase is None or len(hits) > FIRST else lake.holding(phrase)


_TASK_ORDER = "TRY_CAST(e.task_id AS BIGINT) NULLS LAST, e.task_id"
_DEFAULT_ORDER = "b.block, e.rollout_index, e.attempt, e.episode_id"
# A lake has few runs, rounds and tasks, and numbers sort faster than texts.
_BLOCKS = f"""(
    SELECT run_id, collection_round, task_id,
           row_number() OVER (ORDER BY e.run_id, e.collection_round NULLS FIRST, {_TASK_ORDER}) AS block
    FROM (SELECT DISTINCT run_id, collection_round, task_id FROM episodes) AS e
)"""
_SAME_BLOCK = " AND ".join(
    f"b.{name} IS NOT DISTINCT FROM e.{name}" for name in ("run_id", "collection_round", "task_id")
)
ORDERS = {
    name: (f"e.{name}",) for name in ("run_id", "rollout_index", "status", "outcome", "num_steps", "stop_reason")
} | {
    "task_id": ("TRY_CAST(e.task_id AS BIGINT)", "e.task_id"),
    "collection_round": ("e.collection_round", "e.policy_version"),
    "policy_version": ("e.policy_version", "e.collection_round"),
}
"""Columns that may order the list. Episodes of one round are ordered by version too."""
FIRST = 1000
"""Episodes that are found without ordering the whole list, which takes three times as long."""


def list_first_episodes(lake: LakeReader, episode_filter: EpisodeFilter, order: Sort | None) -> pl.Series:
    """Return the first `FIRST` ids of `list_episodes`, for a filter without a lookup."""
    return _order_episodes(lake, episode_filter, order, f"LIMIT {FIRST}")["episode_id"]


def list_episodes(lake: LakeReader, episode_filter: EpisodeFilter, order: Sort | None) -> pl.Series:
    """Return the ids of the list in order, int64 [E].

    Without a sort column, the order of a query stays, and texts in which the words of a search are adjacent come first.

    Raises:
        QueryError: the query of the filter has no result.
    """
    rows = apply_lookups(lake, episode_filter, _order_episodes(lake, episode_filter, order))
    if episode_filter.sql is not None and order is None:
        named = sql.list_named_episodes(lake, episode_filter.sql)
        rows = named.join(rows, on="episode_id", how="semi", maintain_order="left")
    elif episode_filter.text is not None and order is None:
        is_phrase = pl.col("episode_id").is_in(_find_phrases(lake, episode_filter.text)["episode_id"].implode())
        rows = rows.sort(is_phrase, descending=True, maintain_order=True)
    return rows["episode_id"]


def _order_episodes(
    lake: LakeReader, episode_filter: EpisodeFilter, order: Sort | None, limit: str = ""
) -> pl.DataFrame:
    relation, params, where = _build_filtered_relation(lake, episode_filter)
    query = f"""
        SELECT e.episode_id FROM {relation} AS e JOIN {_BLOCKS} AS b ON {_SAME_BLOCK}
        WHERE {where} ORDER BY {order_by(order, ORDERS, _DEFAULT_ORDER)} {limit}
        """
    return lake.sql(query, params or None)


def _build_filtered_relation(lake: LakeReader, episode_filter: EpisodeFilter) -> tuple[str, Params, str]:
    """Return episodes with `outcome` as SQL, the parameters, and the filter as a condition on `e`, without lookups."""
    relation, outcome_params = outcomes.build_relation(lake, episode_filter.score, episode_filter.run)
    clauses, params = build_conditions(episode_filter)
    return relation, params | outcome_params, " AND ".join(clauses) or "true"


def compute_totals(lake: LakeReader, episode_filter: EpisodeFilter) -> Row:
    """Return figures of all episodes of a filter: episodes, groups, scored, mean_return, mean_steps (NULL of none)."""
    relation, params, where = _build_filtered_relation(lake, episode_filter)
    if not episode_filter.has_lookup:
        query = f"""
            SELECT count(*) AS episodes, count(DISTINCT e.group_id) AS groups, count(e.outcome) AS scored,
                   avg(e.outcome) AS mean_return, avg(e.num_steps) AS mean_steps
            FROM {relation} AS e WHERE {where}
            """
        return lake.sql(query, params or None).row(0, named=True)
    query = f"SELECT e.episode_id, e.group_id, e.outcome, e.num_steps FROM {relation} AS e WHERE {where}"
    figures = apply_lookups(lake, episode_filter, lake.sql(query, params or None)).select(
        pl.len().alias("episodes"),
        pl.col("group_id").n_unique().alias("groups"),
        pl.col("outcome").count().alias("scored"),
        pl.col("outcome").mean().alias("mean_return"),
        pl.col("num_steps").mean().alias("mean_steps"),
    )
    return figures.row(0, named=True)


DEMONSTRATION = "Here is a demonstration of how to "
"""Beginning of the example that SWE-agent puts in front of the task."""
PREAMBLE = rf"^\s*(?:<[a-z][\w-]*[ >]|# AGENTS\.md|Caveat: The messages below|{DEMONSTRATION})"
"""Pattern of user messages that tools write before the user's own: environments, instructions, demonstrations."""
ISSUE_FRAME = (
    r"(?s)^\s*(?:<uploaded_files>|We're currently solving |Please fix the following issue ).{0,999}?"
    r"(?:ISSUE:|# Problem Statement|<(?:pr|issue)_description>)\s*"
)
"""Pattern of the sentences that SWE-agent and OpenHands write in front of an issue."""


def build_message_texts_sql(roles: str, length: int) -> str:
    """Return SQL of the texts (cut) of the messages of some roles before the first decision; NULL without messages.

    Demonstrations are left out.

    Args:
        roles: a list of SQL.
    """
    return f"""
    list_transform(
        list_filter(
            json_transform(if(json_valid(initial_messages), initial_messages, NULL),
                           '[{{"role": "VARCHAR", "is_demo": "VARCHAR", "content": "JSON"}}]'),
            lambda message: message.role IN {roles} AND coalesce(message.is_demo, '') <> 'true'
        ),
        lambda message: left(if(
            json_type(message.content) = 'ARRAY', array_to_string(message.content ->> '$[*].text', ' '),
            message.content ->> '$'
        ), {length})
    )
    """


_REQUESTS = f"""
    list_transform({build_message_texts_sql("('user')", 2000)},
                   lambda text: left(regexp_replace(text, $frame, ''), {EXCERPT}))
    """


REASONING = r"(?s)^.*?</think(?:ing)?>\s*|^\s*<think(?:ing)?>.*"
"""Pattern of reasoning in front of an answer; without an end, there is no answer."""
_CALLED = "if(json_valid(tool_calls), tool_calls, NULL)"
_FINISH = f"""
    if(coalesce({_CALLED} ->> '$[0].function.name', {_CALLED} ->> '$[0].name') IN (
           'finish', 'submit', 'final_answer', 'final_result', 'submit_answer', 'attempt_completion'),
       list_filter(try_cast(coalesce({_CALLED} ->> '$[0].function.arguments', {_CALLED} ->> '$[0].arguments') AS JSON)
                   ->> ['$.message', '$.answer', '$.final_answer', '$.result', '$.text'], lambda text: text <> '')[1],
       NULL)
    """
"""SQL of the text of a call that ends an episode; NULL for other calls."""


def read_page(lake: LakeReader, episode_filter: EpisodeFilter, order: Sort | None, window: ListWindow) -> pl.DataFrame:
    """Return a page of the list. A search adds `found_step`, the first step that holds the text (NULL: a message).

    request is the beginning of the first text of the user, NULL without messages; answer that of the last action, or of
    its calls. seconds is the duration.
    """
    is_near = window.offset + window.limit <= FIRST and not episode_filter.has_lookup
    episode_ids = lake.read(list_first_episodes if is_near else list_episodes, episode_filter, order)
    episode_ids = episode_ids.slice(window.offset, window.limit)
    relation, params = outcomes.build_relation(lake, episode_filter.score, episode_filter.run)
    id_params = {f"id{number}": value for number, value in enumerate(episode_ids)}
    query = f"""
        SELECT * EXCLUDE (requests), coalesce(
                   list_filter(requests, lambda text: text <> '' AND NOT regexp_matches(text, $preamble))[1],
                   list_filter(requests, lambda text: text <> '')[1]) AS request
        FROM (
            SELECT episode_id, outcome, group_id, run_id, task_id, rollout_index, attempt, collection_round, policy,
                   policy_version, status, num_steps, completion_tokens, stop_reason, started_at,
                   epoch(ended_at - started_at) AS seconds, {_REQUESTS} AS requests
            FROM {relation} WHERE episode_id IN ({", ".join(f"${name}" for name in id_params) or "NULL"})
        )
        """
    facts = lake.sql(query, params | id_params | {"preamble": PREAMBLE, "frame": ISSUE_FRAME})
    facts = facts.with_columns(request=_restore_requests(lake, facts["request"])).join(
        read_answers(lake, tuple(facts.select("episode_id", "num_steps").iter_rows())), on="episode_id", how="left"
    )
    return _join_facts(lake, episode_filter, episode_ids, facts)


def _restore_requests(lake: LakeReader, requests: pl.Series) -> pl.Series:
    """Return texts with the beginnings of those that `blobs` holds."""
    prefix = "blob:sha256:"
    hashes = requests.drop_nulls().filter(requests.drop_nulls().str.starts_with(prefix)).str.strip_prefix(prefix)
    if hashes.is_empty():
        return requests
    query = "SELECT sha256, left(try(decode(payload)), $cut) FROM blobs WHERE list_contains($hashes, sha256)"
    texts = dict(lake.sql(query, {"hashes": hashes.to_list(), "cut": EXCERPT}).iter_rows())
    restored = [texts.get((text or "").removeprefix(prefix)) or text for text in requests]
    return pl.Series("request", restored, dtype=pl.String)


def read_answers(lake: LakeReader, ends: tuple[tuple[int, int], ...], limit: int = EXCERPT) -> pl.DataFrame:
    """Return episode_id and answer: the beginning of the last action without its reasoning, else its calls' text.

    Args:
        ends: the id of each episode, and its number of steps.
        limit: maximum characters of an answer.
    """
    # Calls are read only for episodes that end with one: they are most of the bytes of a step.
    frame = pl.DataFrame(schema={"episode_id": pl.Int64, "answer": pl.String})
    schema = {"episode_id": pl.Int64, "step_index": pl.Int32}
    last_steps = pl.DataFrame([(episode, count - 1) for episode, count in ends if count], schema=schema, orient="row")
    for columns in (
        f"left(regexp_replace(action, $reasoning, ''), {limit}) AS answer, NULL AS calls",
        f"left({_FINISH}, {limit}) AS answer, left(tool_calls, {10 * limit}) AS calls",
    ):
        missing = last_steps.join(frame, on="episode_id", how="anti")
        if missing.is_empty():
            break
        query = f"""
            SELECT episode_id, step_index, {columns} FROM steps
            WHERE episode_id IN ({build_id_list(missing["episode_id"])})
            AND step_index IN ({build_id_list(missing["step_index"].unique().sort())})
            """
        params = {"reasoning": REASONING} if "$reasoning" in query else None
        rows = lake.sql(query, params).join(missing, on=["episode_id", "step_index"], how="semi")
        answers = [
            answer if (answer or "").strip() else describe_calls(calls, limit) if (calls or "").strip() else None
            for answer, calls in rows.select("answer", "calls").iter_rows()
        ]
        answered = rows.select("episode_id", answer=pl.Series(answers, dtype=pl.String)).drop_nulls()
        frame = pl.concat([frame, answered])
    return frame


def _join_facts(
    lake: LakeReader, episode_filter: EpisodeFilter, episode_ids: pl.Series, facts: pl.DataFrame
) -> pl.DataFrame:
    """Return episodes in order with their facts and, for a search, with `found_step` and `found_steps`."""
    if episode_filter.text is not None:
        steps = _find_phrases(lake, episode_filter.text).drop("steps")
        hits = lake.holding(episode_filter.text).update(steps, on="episode_id", include_nulls=True)
        hits = hits.rename({"step_index": "found_step", "steps": "found_steps"})
        facts = facts.join(hits, on="episode_id", how="left")
    return episode_ids.to_frame().join(facts, on="episode_id", how="left", maintain_order="left")


def read_scores(lake: LakeReader, episode_ids: tuple[int, ...]) -> pl.DataFrame:
    """Return the current scores of whole episodes: episode_id, scorer, value."""
    scores = read_scores_of(lake, episode_ids)
    return scores.filter(pl.col("step_index").is_null()).select("episode_id", "scorer", "value")


@dataclass(frozen=True, slots=True)
class ListPosition:
    """Position of an episode in a filtered list."""

    position: int
    """From 1."""
    total: int
    previous: int | None
    """The episode before it."""
    next: int | None
    """The episode after it."""


def find_position(
    lake: LakeReader, episode_filter: EpisodeFilter, order: Sort | None, episode_id: int
) -> ListPosition | None:
    """Return the position of an episode in the list; None if the filter leaves it out."""
    total = None
    if not episode_filter.has_lookup:
        ids = lake.read(list_first_episodes, episode_filter, order)
        offset = ids.index_of(episode_id)
        if len(ids) < FIRST or (offset is not None and offset + 1 < FIRST):
            total = len(ids) if len(ids) < FIRST else lake.read(compute_totals, episode_filter)["episodes"]
    if total is None:
        ids = lake.read(list_episodes, episode_filter, order)
        offset, total = ids.index_of(episode_id), len(ids)
    if offset is None:
        return None
    following = ids[offset + 1] if offset + 1 < len(ids) else None
    return ListPosition(offset + 1, total, ids[offset - 1] if offset else None, following)


FIRST_VALUES = 12
"""Values of a facet that are shown at first."""
ALL_VALUES = 500
"""Values that are shown on request."""


@dataclass(frozen=True, slots=True)
class FacetValues:
    """Values of a facet among the rows of a list, the most frequent first."""

    frame: pl.DataFrame
    """value, number (of episodes, or groups)."""
    total: int
    """Number of values."""


def count_facet_values(
    lake: LakeReader, facet: str, episode_filter: EpisodeFilter, limit: int = FIRST_VALUES
) -> FacetValues:
    """Count the episodes of a filter by value of a facet. An episode with several values counts for each.

    Raises:
        QueryError: the query of the filter has no result.
    """
    params: Params = {}
    if episode_filter.has_lookup:
        among = "SELECT unnest($ids::BIGINT[])"
        params = {"ids": lake.read(list_episodes, episode_filter, None).to_list()}
    else:
        relation, params, where = _build_filtered_relation(lake, episode_filter)
        among = f"SELECT e.episode_id FROM {relation} AS e WHERE {where}"
        if where == "true":
            among, params = "", {}
    # A count of distinct episodes would take seconds on millions of pairs.
    pairs = FACETS[facet] if facet in UNIQUE_FACETS else f"SELECT DISTINCT episode_id, value FROM ({FACETS[facet]})"
    if among:
        pairs = f"SELECT value FROM ({pairs}) WHERE episode_id IN ({among})"
    return count_values(lake, pairs, params, limit)


def count_values(lake: LakeReader, pairs: str, params: Params, limit: int, number: str = "count(*)") -> FacetValues:
    """Count rows by value. `pairs` is SQL with a column `value`; `number` is what counts."""
    query = f"""
        SELECT value, {number} AS number, count(*) OVER () AS total FROM ({pairs}) WHERE value <> ''
        GROUP BY value ORDER BY number DESC, value LIMIT {limit}
        """
    frame = lake.sql(query, params or None)
    return FacetValues(frame.drop("total"), int(frame["total"][0]) if frame.height else 0)


PART_ROWS = 20_000
"""Rows of a download that are in memory at a time."""
_MOST_IDS = 500
"""Largest number of episodes that a predicate names by id."""
_OMITTED = "write_id, content_hash, blob_ids, initial_messages, final_observation, tools, ground_truth, sampling, extra"
_PARAMETER = re.compile(r"\$(\w+)")


def read_parts(lake: LakeReader, episode_filter: EpisodeFilter, order: Sort | None) -> Iterator[pl.DataFrame]:
    """Yield the rows of the list in order: columns of `episodes` without its documents, and `outcome`; ids as text.

    A search adds `found_step` and `found_steps`. There is at least one part.
    """
    episodes = lake.read(list_episodes, episode_filter, order)
    relation, params = outcomes.build_relation(lake, episode_filter.score, episode_filter.run)
    query = f"""
        SELECT episode_id, outcome, * EXCLUDE (episode_id, outcome, {_OMITTED})
        FROM {relation} WHERE episode_id IN (SELECT unnest($ids::BIGINT[]))
        """
    for first in range(0, max(len(episodes), 1), PART_ROWS):
        part = episodes.slice(first, PART_ROWS)
        facts = lake.sql(query, params | {"ids": part.to_list()})
        yield format_ids(_join_facts(lake, episode_filter, part, facts))


def build_predicate(lake: LakeReader, episode_filter: EpisodeFilter) -> str | None:
    """Return the filter as SQL over `episodes`, for commands; "" without conditions, None if it would be too long.

    Episodes that a search or a query found are named by id if they are few.
    """
    if episode_filter.has_lookup:
        return build_id_predicate(lake, episode_filter)
    clauses, params = build_conditions(episode_filter)
    predicate = " ".join(" AND ".join(clauses).split()).replace("e.outcome", "$outcome").replace("e.", "")
    values = {name: quote_literal(value) for name, value in params.items()}
    values["outcome"] = _build_outcome_sql(lake, episode_filter)
    # One pass over the text: SQL inside a value stays as it is.
    return _PARAMETER.sub(lambda match: values[match[1]], predicate)


def build_id_predicate(lake: LakeReader, episode_filter: EpisodeFilter) -> str | None:
    """Return the episodes of a list by their ids as SQL over `episodes`; None for more than `_MOST_IDS`."""
    ids = lake.read(list_episodes, episode_filter, None)
    return None if len(ids) > _MOST_IDS else f"episode_id IN ({build_id_list(ids)})"


def _build_outcome_sql(lake: LakeReader, episode_filter: EpisodeFilter) -> str:
    """Return an episode's outcome as SQL over `episodes`."""
    score = episode_filter.score or outcomes.find_score_of_credit(lake)
    if episode_filter.run is not None:
        score = outcomes.choose_score_of_run(lake, episode_filter.run, score)
    if score == ENV_RETURN:
        return ENV_RETURN
    condition = "WHERE s.episode_id = episodes.episode_id AND s.step_index IS NULL"
    value = f"SELECT s.value FROM current_scores AS s {condition}"
    if score is not None:
        name, separator, version = score.partition("@")
        if separator:
            condition += f" AND s.scorer_version = {quote_literal(version)}"
            value = f"SELECT s.value FROM latest_scores AS s {condition}"
        return f"({value} AND s.scorer = {quote_literal(name)})"
    scorers = outcomes.find_scorers_of_runs(lake)
    if not scorers:
        return ENV_RETURN
    pairs = ", ".join(f"({quote_literal(run)}, {quote_literal(scorer)})" for run, scorer in scorers.items())
    return f"coalesce({ENV_RETURN}, ({value} AND (s.run_id, s.scorer) IN ({pairs})))"


_STEP_TEXTS = {
    "action": "action",
    "tool_calls": "tool call",
    "reasoning": "reasoning",
    "state": "state",
    "context": "message",
}
"""Columns of a step from the most to the least telling, and their names in a list."""
_EPISODE_TEXTS = {"error": "error", "initial_messages": "first messages", "final_observation": "last messages"} | {
    "task_id": "task id"
}
_CONTEXT = 60
"""Characters of an excerpt before the hit."""
_DOCUMENTS = frozenset({"tool_calls", "context", "initial_messages", "final_observation"})


def compile_hits(text: str) -> re.Pattern[str]:
    """Return the pattern of what excerpts mark: words, adjacent ones together. Raises UsageError: nothing to search."""
    terms = [term.text for term in parse_terms(f"{quote_words(text) or ''} {text}")]
    # A letter among words is in every text.
    terms = [term for term in terms if len(term) > 1 or not term.isascii()] or terms
    return re.compile("|".join(map(re.escape, terms)), re.IGNORECASE)


def read_excerpts(lake: LakeReader, text: str, hits: tuple[tuple[int, int | None], ...]) -> pl.DataFrame:
    """Return episode_id, found_in (the kind of text) and excerpt (around the first hit) for hits of `read_page`.

    Args:
        hits: episode_id and found_step of each.
    """
    pattern = compile_hits(text)
    patterns = (compile_hits(quote_words(text) or text), pattern)
    page = pl.DataFrame(hits, schema={"episode_id": pl.Int64, "found_step": pl.Int32}, orient="row")
    rows = [
        *_read_hit_texts(lake, page, "steps", _STEP_TEXTS),
        *_read_hit_texts(lake, page, "episodes", _EPISODE_TEXTS),
    ]
    excerpts: dict[int, tuple[str, str | None] | None] = {}
    for row in rows:
        excerpts[row["episode_id"]] = None
        for hit, (name, label) in product(patterns, (_STEP_TEXTS | _EPISODE_TEXTS).items()):
            column = row.get(name)
            column_text = document_text(column) if name in _DOCUMENTS else column
            if (excerpt := _cut_excerpt(column_text, hit)) is not None:
                excerpts[row["episode_id"]] = label, excerpt
                break
    reasons = search_reasons(lake, parse_terms(text), page["episode_id"].to_list())
    without_step = set(page.filter(pl.col("found_step").is_null())["episode_id"])
    for row in reasons.iter_rows(named=True):
        episode = row["episode_id"]
        if episode in without_step or excerpts.get(episode) is None:
            excerpts[episode] = f"said by {row['by']}", _cut_excerpt(row["text"], pattern)
    schema = {"episode_id": pl.Int64, "found_in": pl.String, "excerpt": pl.String}
    columns = [(episode, *(excerpt or (None, None))) for episode, excerpt in excerpts.items()]
    return pl.DataFrame(columns, schema=schema, orient="row")


def _read_hit_texts(lake: LakeReader, page: pl.DataFrame, table: str, columns: dict[str, str]) -> list[Row]:
    """Return the texts of steps, or of whole episodes, in which the search found a hit."""
    is_step = table == "steps"
    hits = page.filter(pl.col("found_step").is_not_null() if is_step else pl.col("found_step").is_null())
    if hits.is_empty():
        return []
    where = f"episode_id IN ({build_id_list(hits['episode_id'])})"
    params: Params = {}
    if is_step:
        where += " AND (episode_id, step_index) IN (SELECT (unnest($episodes::BIGINT[]), unnest($steps::INTEGER[])))"
        params = {"episodes": hits["episode_id"].to_list(), "steps": hits["found_step"].to_list()}
    query = f"SELECT episode_id, {', '.join(columns)} FROM {table} WHERE {where}"
    return lake.sql(query, params or None).to_dicts()


def _cut_excerpt(text: str | None, pattern: re.Pattern[str]) -> str | None:
    """Return the text around its first hit; None without one."""
    flat = " ".join((text or "").split())
    match = pattern.search(flat)
    if match is None:
        return None
    begin = max(match.start() - _CONTEXT, 0)
    before = "\N{HORIZONTAL ELLIPSIS}" if begin else ""
    after = "\N{HORIZONTAL ELLIPSIS}" if len(flat) > begin + EXCERPT else ""
    return before + flat[begin : begin + EXCERPT] + after
