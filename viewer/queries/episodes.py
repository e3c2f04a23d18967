"""The list of episodes (filter, order, pages, neighbours), and one episode: facts, documents, a text in full."""

from dataclasses import asdict, dataclass, replace
from typing import Literal

import polars as pl

from lake.judgements.scores import scores_of as scores_now
from lake.write.rows import put_back
from viewer.queries import Params, Reads, Row, Sort, Window, like, only_row, order_by, outcomes, sql
from viewer.queries.once import once

TEXT = 3000
"""Characters of a text that a transcript shows at first."""
JSON = 200_000
"""Longest JSON document that is taken apart; a longer one is shown as text."""

TextColumn = Literal["state", "action", "reasoning", "context", "tool_calls"]
_SHOWN = ("ground_truth", "initial_messages", "final_observation")
"""Documents that every episode's page shows."""
EpisodeColumn = Literal["initial_messages", "final_observation", "tools", "ground_truth", "sampling", "extra", "error"]


def episode(lake: Reads, episode_id: int) -> Row | None:
    """An episode's facts without its documents; None if there is no such episode."""
    # Tokens and cost of an episode that only its calls tell: their sum, if every call does.
    told = ("prompt_tokens", "completion_tokens", "cost")
    sums = ", ".join(f"if(count({name}) = count(*), sum({name}), NULL) AS {name}" for name in told)
    query = f"""
        SELECT e.episode_id, e.group_id, e.run_id, e.task_id, e.rollout_index, e.attempt, e.collection_round,
               e.environment, e.split, e.agent_id, e.policy, e.policy_version, e.status, e.terminated, e.stop_reason,
               e.env_return, e.num_steps, {", ".join(f"coalesce(e.{name}, s.{name}) AS {name}" for name in told)},
               e.seed, e.expected_group_size, e.started_at, e.ended_at, epoch(e.ended_at - e.started_at) AS seconds,
               e.source_format, e.source_uri, e.source_id, left(e.error, $text) AS error
        FROM episodes AS e CROSS JOIN (SELECT {sums} FROM steps WHERE episode_id = $episode) AS s
        WHERE e.episode_id = $episode
        """
    return only_row(lake.sql(query, {"episode": episode_id, "text": TEXT}))


def related(lake: Reads, episode_id: int) -> pl.DataFrame:
    """The episode that this one came out of, then those that came out of it, by step; `is_parent` tells them apart.

    A parent that readers no longer see has its id alone.
    """
    query = """
        SELECT r.episode_id = $episode AS is_parent, r.relation, r.parent_step_index,
               CASE WHEN r.episode_id = $episode THEN r.parent_episode_id ELSE r.episode_id END AS episode_id,
               e.run_id, e.task_id, e.rollout_index, e.collection_round, e.attempt, e.agent_id
        FROM related_episodes AS r
        LEFT JOIN episodes AS e
        ON e.episode_id = CASE WHEN r.episode_id = $episode THEN r.parent_episode_id ELSE r.episode_id END
        WHERE $episode IN (r.episode_id, r.parent_episode_id)
        ORDER BY is_parent DESC, r.parent_step_index NULLS LAST, e.rollout_index, e.agent_id, episode_id
        """
    return lake.sql(query, {"episode": episode_id})


def document(lake: Reads, episode_id: int, column: EpisodeColumn, limit: int = JSON) -> tuple[str | None, int]:
    """A document of an episode, cut after `limit` characters, and its whole length."""
    # What a page shows of them is read together: the second one is remembered then.
    read = _SHOWN if column in _SHOWN else (column,)
    cut = ", ".join(f"left({name}, $limit) AS {name}, coalesce(length({name}), 0) AS {name}_length" for name in read)
    found = lake.sql(f"SELECT {cut} FROM episodes WHERE episode_id = $e", {"e": episode_id, "limit": limit})
    row = whole(lake, found, {column: f"{column}_length"}, limit).row(0, named=True)
    return row[column], int(row[f"{column}_length"])


def whole(lake: Reads, frame: pl.DataFrame, lengths: dict[str, str], limit: int) -> pl.DataFrame:
    """Documents with what was moved to `blobs` put back, cut again, and their whole lengths."""

    def find(hashes: list[str]) -> pl.DataFrame:
        return lake.sql("SELECT sha256, media_type, payload FROM blobs WHERE list_contains($h, sha256)", {"h": hashes})

    back = put_back(frame, list(lengths), find)
    for column, length in lengths.items():
        # What was cut in SQL holds no reference: those documents are short.
        is_back = back[column].ne_missing(frame[column])
        whole = pl.when(is_back).then(pl.col(column).str.len_chars()).otherwise(pl.col(length))
        back = back.with_columns(whole.alias(length), pl.col(column).str.slice(0, limit))
    return back


def text(lake: Reads, episode_id: int, step_index: int, column: TextColumn, limit: int) -> str:
    """A text of a step, cut after `limit` characters."""
    query = f"SELECT left({column}, $limit) AS t, 0 AS n FROM steps WHERE episode_id = $episode AND step_index = $step"
    found = lake.sql(query, {"episode": episode_id, "step": step_index, "limit": limit})
    return str(whole(lake, found, {"t": "n"}, limit)["t"].item() or "") if found.height else ""


def scores(lake: Reads, episode_id: int) -> pl.DataFrame:
    """What scorers say, each under its current version, the whole episode first: scorer, step_index, value, reason.

    error says why there is no value.
    """
    found = scores_now(lake, [episode_id], ("value", "reason", "error"))
    ended = lake.sql("SELECT job_id, ended_at FROM job_runs")
    first = found.with_columns(pl.col("reason", "error").str.slice(0, JSON)).join(ended, on="job_id", how="left")
    ordered = first.sort(
        *(pl.col("step_index").is_not_null(), "ended_at", "scorer", "step_index"),
        descending=[False, True, False, False],
        nulls_last=True,
    )
    return ordered.select("scorer", "step_index", "value", "reason", "error").head(200)


def outcome(lake: Reads, episode_id: int, run: str) -> tuple[str, float | None]:
    """What the episode's run goes by (`env_return`, or a scorer), and what it says of the episode; NULL if unknown."""
    name = outcomes.of_run(lake, run, None)
    judged, params = outcomes.judged(lake, name)
    value = lake.sql(f"SELECT outcome FROM {judged} WHERE episode_id = $episode", params | {"episode": episode_id})
    return name, value.item()


_TASK_ORDER = "TRY_CAST(e.task_id AS BIGINT) NULLS LAST, e.task_id"
_USUAL_ORDER = "b.block, e.rollout_index, e.attempt, e.episode_id"
# Runs, rounds and tasks are few, and numbers are quicker to order than texts.
_BLOCKS = f"""(
    SELECT run_id, collection_round, task_id,
           row_number() OVER (ORDER BY e.run_id, e.collection_round NULLS FIRST, {_TASK_ORDER}) AS block
    FROM (SELECT DISTINCT run_id, collection_round, task_id FROM episodes) AS e
)"""
_SAME = "b.{0} IS NOT DISTINCT FROM e.{0}"
_OF_BLOCK = " AND ".join(map(_SAME.format, ("run_id", "collection_round", "task_id")))


ORDERS = {
    name: (f"e.{name}",) for name in ("run_id", "rollout_index", "status", "outcome", "num_steps", "stop_reason")
} | {
    "task_id": ("TRY_CAST(e.task_id AS BIGINT)", "e.task_id"),
    "collection_round": ("e.collection_round", "e.policy_version"),
    "policy_version": ("e.policy_version", "e.collection_round"),
}
"""Columns that may order the list; a round's episodes are ordered by version too."""

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
"""Pairs of an episode and a value, by facet: tools it calls, tools of which a call failed, where it has an error (its
end, a state that is an error text, a malformed action), who scores it, flags of the current credit, labels that people
gave."""
EACH_ONCE = {"tool", "failed", "error"}
"""Facets that name no pair twice."""

RANGES = {"steps": "num_steps", "round": "collection_round", "version": "policy_version"}
"""Columns of whole numbers that are filtered from and to, by the name that their ends have in a filter."""

_CLAUSES = {
    "run": "e.run_id = $run",
    "task": r"e.task_id LIKE $task ESCAPE '\'",
    "status": "e.status IN (SELECT unnest($status))",
    "group": """(e.group_id = $group OR e.episode_id IN (
        SELECT episode_id FROM groupings WHERE group_id = $group
    ))""",
    "low": "e.outcome >= $low",
    "high": "e.outcome <= $high",
    "collection_round": "e.collection_round = $collection_round",
    "policy_version": "e.policy_version = $policy_version",
    **{f"{name}_from": f"e.{column} >= ${name}_from" for name, column in RANGES.items()},
    **{f"{name}_to": f"e.{column} <= ${name}_to" for name, column in RANGES.items()},
    "update": """e.episode_id IN (
        SELECT episode_id FROM trained_batches WHERE job_id = $job AND optimizer_step = $update
    )""",
} | {
    name: f"e.episode_id IN (SELECT episode_id FROM ({pairs}) WHERE value = ${name})" for name, pairs in FACETS.items()
}
_CLAUSES["tool"] = "e.episode_id IN (SELECT episode_id FROM episode_steps WHERE list_contains(tools_called, $tool))"


@dataclass(frozen=True, slots=True)
class EpisodeFilter:
    """Which episodes; None filters nothing."""

    run: str | None = None
    task: str | None = None
    """Exact, or with `*` for anything."""
    status: tuple[str, ...] = ()
    """Any of these."""
    group: int | None = None
    """As collected, or of a grouping."""
    score: str | None = None
    """The outcome that the list shows, filters and orders by (`viewer.queries.outcomes`); it leaves no episode out."""
    low: float | None = None
    """Smallest outcome; leaves unscored episodes out."""
    high: float | None = None
    """Largest outcome; leaves unscored episodes out."""
    unscored: bool = False
    """Only episodes without an outcome."""
    text: str | None = None
    """Words that a step, or the messages of the episode, hold (`lake.search.find.holding`)."""
    collection_round: int | None = None
    policy_version: int | None = None
    update: tuple[int, int] | None = None
    """(training job, optimizer step): the episodes that the update consumed."""
    tool: str | None = None
    """The value of this facet, as of those that follow (`FACETS`)."""
    failed: str | None = None
    error: str | None = None
    scorer: str | None = None
    flag: str | None = None
    tag: str | None = None
    unlabelled: tuple[str, str | None] | None = None
    """(label, author): episodes on which, or on whose steps, the author has not put the label; None: nobody has."""
    sql: str | None = None
    """A SELECT whose rows name the episodes (`viewer.queries.sql.named`)."""
    about: str | None = None
    """What that SELECT asks for, in words; filters nothing."""
    steps_from: int | None = None
    """The smallest number of steps; the other ends of `RANGES` follow, each included."""
    steps_to: int | None = None
    round_from: int | None = None
    round_to: int | None = None
    version_from: int | None = None
    version_to: int | None = None

    @property
    def is_looked_up(self) -> bool:
        """Whether a part of it is no SQL over the lake's tables: the episodes must be found before it can be."""
        return self.text is not None or self.sql is not None

    @property
    def narrows(self) -> bool:
        """Whether it asks for anything that an episode may lack."""
        return replace(self, score=None, about=None) != EpisodeFilter()


@dataclass(frozen=True, slots=True)
class Place:
    """Position of an episode in a filtered list."""

    position: int
    """From 1."""
    total: int
    previous: int | None
    next: int | None


def page(lake: Reads, wanted: EpisodeFilter, order: Sort | None, window: Window) -> pl.DataFrame:
    """A page of the list; of a search, `found_step` is the first step that holds the text, NULL in messages."""
    is_near = window.offset + window.limit <= FIRST and not wanted.is_looked_up
    shown = (first if is_near else listed)(lake, wanted, order).slice(window.offset, window.limit)
    judged, params = outcomes.judged(lake, wanted.score, wanted.run)
    params |= {f"id{number}": value for number, value in enumerate(shown)}
    query = f"""
        SELECT episode_id, outcome, group_id, run_id, task_id, rollout_index, attempt, collection_round, policy,
               policy_version, status, num_steps, completion_tokens, stop_reason
        FROM {judged} WHERE episode_id IN ({", ".join(f"$id{number}" for number in range(len(shown))) or "NULL"})
        """
    return with_facts(lake, wanted, shown, lake.sql(query, params or None))


def with_facts(lake: Reads, wanted: EpisodeFilter, shown: pl.Series, facts: pl.DataFrame) -> pl.DataFrame:
    """Episodes in their order with what is known of each; of a search, with `found_step` and `found_steps`."""
    if wanted.text is not None:
        found = lake.holding(wanted.text).rename({"step_index": "found_step", "steps": "found_steps"})
        facts = facts.join(found, on="episode_id", how="left")
    return shown.to_frame().join(facts, on="episode_id", how="left", maintain_order="left")


def known(lake: Reads) -> frozenset[str]:
    """Columns of the list of which any episode has a value."""
    always = ("run_id", "task_id", "rollout_index", "status", "outcome", "num_steps")
    maybe = ("collection_round", "policy_version", "stop_reason")
    found = lake.sql(f"SELECT {', '.join(f'count({name}) > 0 AS {name}' for name in maybe)} FROM episodes")
    return frozenset(always) | {name for name, has in found.row(0, named=True).items() if has}


def scores_of(lake: Reads, episode_ids: tuple[int, ...]) -> pl.DataFrame:
    """What each scorer says of whole episodes now: episode_id, scorer, value."""
    found = scores_now(lake, episode_ids)
    return found.filter(pl.col("step_index").is_null()).select("episode_id", "scorer", "value")


@once(64)
def totals(lake: Reads, wanted: EpisodeFilter) -> Row:
    """Figures of all episodes of a filter: episodes, groups, scored, mean_return, mean_steps (NULL of none)."""
    judged, params, where = _filtered(lake, wanted)
    if not wanted.is_looked_up:
        query = f"""
            SELECT count(*) AS episodes, count(DISTINCT e.group_id) AS groups, count(e.outcome) AS scored,
                   avg(e.outcome) AS mean_return, avg(e.num_steps) AS mean_steps
            FROM {judged} AS e WHERE {where}
            """
        return lake.sql(query, params or None).row(0, named=True)
    query = f"SELECT e.episode_id, e.group_id, e.outcome, e.num_steps FROM {judged} AS e WHERE {where}"
    found = looked_up(lake, wanted, lake.sql(query, params or None))
    figures = found.select(
        pl.len().alias("episodes"),
        pl.col("group_id").n_unique().alias("groups"),
        pl.col("outcome").count().alias("scored"),
        pl.col("outcome").mean().alias("mean_return"),
        pl.col("num_steps").mean().alias("mean_steps"),
    )
    return figures.row(0, named=True)


def place(lake: Reads, wanted: EpisodeFilter, order: Sort | None, episode_id: int) -> Place | None:
    """Position of an episode in the list; None if the filter leaves it out."""
    if not wanted.is_looked_up:
        ids = first(lake, wanted, order)
        at = ids.index_of(episode_id)
        if len(ids) < FIRST or (at is not None and at + 1 < FIRST):
            return _place(ids, at, len(ids) if len(ids) < FIRST else totals(lake, wanted)["episodes"])
    ids = listed(lake, wanted, order)
    return _place(ids, ids.index_of(episode_id), len(ids))


def _place(ids: pl.Series, at: int | None, total: int) -> Place | None:
    if at is None:
        return None
    return Place(at + 1, total, ids[at - 1] if at else None, ids[at + 1] if at + 1 < len(ids) else None)


FIRST = 1000
"""Episodes that are found without ordering the whole list, which takes three times as long: most look no further."""


@once(16)
def first(lake: Reads, wanted: EpisodeFilter, order: Sort | None) -> pl.Series:
    """The first `FIRST` of `listed`, of a filter that is SQL alone (not `is_looked_up`)."""
    return _ordered(lake, wanted, order, f"LIMIT {FIRST}")["episode_id"]


@once(8)
def listed(lake: Reads, wanted: EpisodeFilter, order: Sort | None) -> pl.Series:
    """The episodes of the whole list in order, int64 [E]: its pages and the neighbours of its episodes.

    The usual order of episodes that a query names is the query's.

    Raises:
        QueryError: the query of the filter has no result.
    """
    found = looked_up(lake, wanted, _ordered(lake, wanted, order))
    if wanted.sql is not None and order is None:
        found = sql.named(lake, wanted.sql).join(found, on="episode_id", how="semi", maintain_order="left")
    return found["episode_id"]


def _ordered(lake: Reads, wanted: EpisodeFilter, order: Sort | None, limit: str = "") -> pl.DataFrame:
    judged, params, where = _filtered(lake, wanted)
    query = f"""
        SELECT e.episode_id FROM {judged} AS e JOIN {_BLOCKS} AS b ON {_OF_BLOCK}
        WHERE {where} ORDER BY {order_by(order, ORDERS, _USUAL_ORDER)} {limit}
        """
    return lake.sql(query, params or None)


def looked_up(lake: Reads, wanted: EpisodeFilter, rows: pl.DataFrame) -> pl.DataFrame:
    """Those of rows (`episode_id` among their columns) whose episodes the text and the query of a filter find, too.

    Raises:
        QueryError: the query has no result.
    """
    if wanted.text is not None:
        rows = rows.join(lake.holding(wanted.text), on="episode_id", how="semi", maintain_order="left")
    if wanted.sql is not None:
        rows = rows.join(sql.named(lake, wanted.sql), on="episode_id", how="semi", maintain_order="left")
    return rows


def _filtered(lake: Reads, wanted: EpisodeFilter) -> tuple[str, Params, str]:
    """Episodes with `outcome` as SQL, the parameters of a query with them, and the filter, but for its text, on `e`."""
    judged, of_outcome = outcomes.judged(lake, wanted.score, wanted.run)
    clauses, params = conditions(wanted)
    return judged, params | of_outcome, " AND ".join(clauses) or "true"


def conditions(wanted: EpisodeFilter) -> tuple[list[str], Params]:
    """The filter as SQL about `e`, which is `episodes` with `outcome`, and its parameters; without text and query."""
    job, update = wanted.update or (None, None)
    values: Params = asdict(wanted) | {
        "task": None if wanted.task is None else like(wanted.task),
        "status": list(wanted.status) or None,
        "update": update,
    }
    params = {name: values[name] for name in _CLAUSES if values[name] is not None}
    clauses = [_CLAUSES[name] for name in params]
    if update is not None:
        params["job"] = job
    if wanted.unscored:
        clauses.append("e.outcome IS NULL")
    if wanted.unlabelled is not None:
        label, author = wanted.unlabelled
        params |= {"label": label} | ({} if author is None else {"author": author})
        by = "" if author is None else " AND author = $author"
        labelled = f"SELECT episode_id FROM latest_annotations WHERE label = $label{by}"
        clauses.append(f"e.episode_id NOT IN ({labelled})")
    return clauses, params
