"""One episode: its facts, documents and scores, the steps of its transcript, and episodes side by side.

The line of a step holds excerpts only, so that a thousand steps with megabytes of text are a small answer. Opening a
step reads its texts.
"""

import codecs
import json
import re
from collections.abc import Sequence
from typing import Literal

import polars as pl

from lake.errors import UsageError
from lake.judgements import outcomes
from lake.judgements.credit import Credit
from lake.judgements.scores import read_scores_of
from lake.search import parse_terms
from lake.write.rows import put_back
from viewer import plain
from viewer.queries import (
    EXCERPT,
    FAILURE,
    NO_ADVANTAGES,
    LakeReader,
    ListWindow,
    Params,
    Row,
    build_action_sql,
    build_id_list,
    build_replies_sql,
    get_first_row,
)
from viewer.queries.episodes import build_message_texts_sql

TEXT = 3000
"""Characters of a text that a transcript shows at first."""
LONG_REASONING = 1500
"""Longest reasoning that is not folded."""
DOCUMENT = 8_000_000
"""Characters of a JSON document with messages or calls that is parsed; a longer one is shown as text."""
JSON = 200_000
"""Characters of other JSON documents."""
HEAD = 240
"""Characters of an action in the line of its step."""
ENCODINGS, CHECKPOINTS = 4, 8
"""Largest number of encodings of a step, and of checkpoints that rescored it."""
SCORES, SCORES_SHOWN = 10_000, 500
"""Largest number of scores of steps, and of the whole episode."""
TERMS = 20
"""Largest number of words that are found in any order."""
UPDATES = 20
"""Updates of a training run that are listed."""

_BLOBS = "SELECT sha256, media_type, payload FROM blobs WHERE list_contains($h, sha256)"
_COMMAND = r"(?s).*(?:```[^\n`]*\n(.+?)```|<(?:action>|tool_call>|execute_|function=)(.+?)(?:</|$)).*"
"""Pattern of an action that is a text, with its last command: a block of code, or the contents of a tag."""
_INCOMING = f"""CASE
            WHEN context LIKE '"blob:%' THEN coalesce((
                SELECT if(count BETWEEN 1 AND {plain.MAX_ELEMENTS}, count, 1)::INTEGER FROM (
                    SELECT try(json_array_length(decode(payload))) AS count FROM blobs
                    WHERE list_contains((SELECT blob_ids FROM episodes WHERE episode_id = $episode), blob_id)
                    AND '"blob:sha256:' || sha256 || '"' = context
                )), 1)
            WHEN json_valid(context) AND json_type(context) = 'ARRAY' AND json_array_length(context) > 0
            THEN json_array_length(context)::INTEGER
            WHEN state_role IN ('tool', 'function') THEN 1
            WHEN step_index = 0 AND (
                SELECT coalesce(json_array_length(initial_messages) > 0 OR initial_messages LIKE '"blob:%', false)
                FROM episodes WHERE episode_id = $episode
            ) THEN 0
            WHEN state_hash IS NOT NULL THEN 1 ELSE 0 END"""
"""SQL: the messages between the last decision and this one; a state that no message holds is one."""

TextColumn = Literal["state", "action", "reasoning", "context", "tool_calls"]
EpisodeColumn = Literal["initial_messages", "final_observation", "tools", "ground_truth", "sampling", "extra", "error"]
_PAGE_DOCUMENTS = ("ground_truth", "initial_messages", "final_observation")
"""Documents that the page of every episode shows."""


def read_episode(lake: LakeReader, episode_id: int) -> Row | None:
    """Return an episode's facts without its documents; None for an unknown episode.

    Where the episode has no token counts or cost, they are the sums over its calls, if every call has them.
    """
    summed = ("prompt_tokens", "completion_tokens", "cost")
    sums = ", ".join(f"if(count({name}) = count(*), sum({name}), NULL) AS {name}" for name in summed)
    query = f"""
        SELECT e.episode_id, e.group_id, e.run_id, e.task_id, e.rollout_index, e.attempt, e.collection_round,
               e.environment, e.split, e.agent_id, e.policy, e.policy_version, e.status, e.terminated, e.stop_reason,
               e.env_return, e.num_steps, {", ".join(f"coalesce(e.{name}, s.{name}) AS {name}" for name in summed)},
               e.seed, e.expected_group_size, e.started_at, e.ended_at, epoch(e.ended_at - e.started_at) AS seconds,
               e.source_format, e.source_uri, e.source_id, left(e.error, $text) AS error
        FROM episodes AS e CROSS JOIN (SELECT {sums} FROM steps WHERE episode_id = $episode) AS s
        WHERE e.episode_id = $episode
        """
    return get_first_row(lake.sql(query, {"episode": episode_id, "text": TEXT}))


def has_siblings(lake: LakeReader, group_id: int) -> bool:
    """Return whether a group has several episodes."""
    return bool(lake.sql("SELECT count(*) > 1 FROM episodes WHERE group_id = ?", [group_id]).item())


def read_related_episodes(lake: LakeReader, episode_id: int) -> pl.DataFrame:
    """Return the parent of an episode (`is_parent`), then its children by step. A retracted parent has only its id."""
    query = """
        SELECT r.episode_id = $episode AS is_parent, r.relation, r.parent_step_index,
               CASE WHEN r.episode_id = $episode THEN r.parent_episode_id ELSE r.episode_id END AS episode_id,
               e.run_id, e.task_id, e.rollout_index, e.collection_round, e.attempt, e.agent_id, e.num_steps
        FROM related_episodes AS r
        LEFT JOIN episodes AS e
        ON e.episode_id = CASE WHEN r.episode_id = $episode THEN r.parent_episode_id ELSE r.episode_id END
        WHERE $episode IN (r.episode_id, r.parent_episode_id)
        ORDER BY is_parent DESC, r.parent_step_index NULLS LAST, e.rollout_index, e.agent_id, episode_id
        """
    return lake.sql(query, {"episode": episode_id})


def read_document(
    lake: LakeReader, episode_id: int, column: EpisodeColumn, limit: int = DOCUMENT
) -> tuple[str | None, int]:
    """Return a document of an episode, cut after `limit` characters, and its full length."""
    # One query reads all documents of a page, so that the next one comes from the cache of answers.
    columns = _PAGE_DOCUMENTS if column in _PAGE_DOCUMENTS else (column,)
    cut = ", ".join(f"left({name}, $limit) AS {name}, coalesce(length({name}), 0) AS {name}_length" for name in columns)
    frame = lake.sql(f"SELECT {cut} FROM episodes WHERE episode_id = $e", {"e": episode_id, "limit": limit})
    row = restore_documents(lake, frame, {column: f"{column}_length"}, limit).row(0, named=True)
    return row[column], int(row[f"{column}_length"])


def restore_documents(lake: LakeReader, frame: pl.DataFrame, lengths: dict[str, str], limit: int) -> pl.DataFrame:
    """Put the texts of `blobs` back into documents, cut them again, and set their full lengths.

    Args:
        lengths: the length column of each document column.
    """
    restored = put_back(frame, list(lengths), lambda hashes: lake.sql(_BLOBS, {"h": hashes}))
    for column, length in lengths.items():
        # Documents that SQL cut hold no reference: a document with references is short.
        is_restored = restored[column].ne_missing(frame[column])
        full_length = pl.when(is_restored).then(pl.col(column).str.len_chars()).otherwise(pl.col(length))
        restored = restored.with_columns(full_length.alias(length), pl.col(column).str.slice(0, limit))
    return restored


def _judge_long_replies(lake: LakeReader, rows: pl.DataFrame) -> pl.DataFrame:
    """Return rows of replies without `long_texts`; `reply_is_error` is also true if one of these is an error."""
    query = f"{_BLOBS} AND NOT starts_with(media_type, 'image/')"
    texts = put_back(rows, ["long_texts"], lambda hashes: lake.sql(query, {"h": hashes}))["long_texts"]
    is_failed = texts.str.contains(FAILURE).fill_null(value=False)
    return rows.drop("long_texts").with_columns(pl.col("reply_is_error") | is_failed)


def read_text(lake: LakeReader, episode_id: int, step_index: int, column: TextColumn, limit: int) -> str:
    """Return a text of a step, cut after `limit` characters."""
    query = f"SELECT left({column}, $limit) AS t, 0 AS n FROM steps WHERE episode_id = $episode AND step_index = $step"
    frame = lake.sql(query, {"episode": episode_id, "step": step_index, "limit": limit})
    return str(restore_documents(lake, frame, {"t": "n"}, limit)["t"].item() or "") if frame.height else ""


def read_all_scores(lake: LakeReader, episode_id: int) -> pl.DataFrame:
    """Return the current scores of the whole episode, the newest first: scorer, value, reason, error, metrics."""
    texts = ("reason", "error", "metrics")
    scores = read_scores_of(lake, [episode_id], ("value", *texts)).filter(pl.col("step_index").is_null())
    jobs = lake.sql("SELECT job_id, ended_at FROM job_runs")
    rows = scores.with_columns(pl.col(texts).str.slice(0, JSON)).join(jobs, on="job_id", how="left")
    ordered = rows.sort("ended_at", "scorer", descending=[True, False], nulls_last=True)
    return ordered.select("scorer", "value", *texts).head(SCORES_SHOWN)


def read_outcome(lake: LakeReader, episode_id: int, run: str) -> tuple[str, float | None]:
    """Return the score that is the outcome of the episode's run, and its value; None if unknown."""
    name = outcomes.choose_score_of_run(lake, run, None)
    relation, params = outcomes.build_relation(lake, name)
    value = lake.sql(f"SELECT outcome FROM {relation} WHERE episode_id = $episode", params | {"episode": episode_id})
    return name, value.item()


def read_outline(lake: LakeReader, episode_id: int, window: ListWindow) -> pl.DataFrame:
    """Return a line for each step of a window, in order: excerpts, reward, and faults.

    `tool` and `arguments` are of the first of `calls` tool calls; without calls, `command` is the text's. Steps
    with the same action have the same `doing`. `number` counts the messages of the steps before, and `incoming`
    those between the last decision and this one. `said` and `replied` are the characters of a step's texts and of
    the reply, from which the page estimates a height.
    """
    query = f"""
        WITH counted AS (SELECT *, {_INCOMING} AS incoming FROM steps WHERE episode_id = $episode),
        mine AS (
            SELECT *, (sum(incoming + 1) OVER (ORDER BY step_index) - incoming - 1)::INTEGER AS number,
                   state_role IN ('tool', 'function') OR (state_role = 'user' AND step_index > 0) AS is_reply,
                   coalesce(length(state), 0) AS heard,
                   coalesce(lead(if(is_reply, heard, 0)) OVER (ORDER BY step_index), 0)::INTEGER AS replied,
                   (least(coalesce(length(action), 0), {TEXT})
                    + if(length(reasoning) > {LONG_REASONING}, {HEAD} * 2, coalesce(length(reasoning), 0))
                    + least(coalesce(length(tool_calls), 0), {TEXT})
                    + if(is_reply OR incoming = 0, 0, least(heard, {TEXT})))::INTEGER AS said,
                   if(json_valid(tool_calls) AND tool_calls NOT LIKE '"blob:%', tool_calls, NULL) AS called
            FROM counted ORDER BY step_index LIMIT $limit OFFSET $offset
        )
        SELECT m.step_index, reward, is_action_valid, is_active, trainable, is_copied_context, state_is_error,
               is_empty_state(state_hash) AS state_is_empty,
               r.long_texts, r.is_error AS reply_is_error, r.is_empty AS reply_is_empty, agent_id, number, incoming,
               said, replied, left(action, $head) AS action, if(called IS NULL,
               left(regexp_replace(left(action, {3 * TEXT}), $command, '\\1\\2'), $head), NULL) AS command,
               coalesce(called ->> '$[0].function.name', called ->> '$[0].name') AS tool,
               left(coalesce(called ->> '$[0].function.arguments', called ->> '$[0].arguments'), $head) AS arguments,
               coalesce(if(json_type(called) = 'ARRAY', json_array_length(called), NULL), 0)::INTEGER AS calls,
               hash({build_action_sql("m")})::VARCHAR AS doing
        FROM mine AS m LEFT JOIN {build_replies_sql("episode_id = $episode")} AS r USING (episode_id, step_index)
        ORDER BY m.step_index
        """
    params: Params = {"episode": episode_id, "head": HEAD, "command": _COMMAND}
    return _judge_long_replies(lake, lake.sql(query, params | window.params()))


def read_reward_scale(lake: LakeReader, episode_id: int) -> tuple[float, bool]:
    """Return the largest |reward| of an episode's steps (0 without any), and whether any step has one."""
    query = "SELECT coalesce(max(abs(reward)), 0), count(reward) > 0 FROM steps WHERE episode_id = ?"
    largest, is_any = lake.sql(query, [episode_id]).row(0)
    return float(largest), bool(is_any)


def read_steps(lake: LakeReader, episode_id: int, indices: Sequence[int], limit: int = TEXT) -> pl.DataFrame:
    """Return the texts of some of an episode's steps in order, cut after `limit` characters, and what no line shows.

    `*_length` is the full length of each text. Documents are read up to `DOCUMENT` characters.
    """
    limits = {"state": "text", "action": "text", "reasoning": "text", "context": "json", "tool_calls": "json"}
    cut = ", ".join(
        f"left({name}, ${limit}) AS {name}, coalesce(length({name}), 0) AS {name}_length"
        for name, limit in limits.items()
    )
    query = f"""
        SELECT step_index, state_role, model, policy_version, finish_reason, value_estimate, latency, prompt_tokens,
               completion_tokens, {cut},
               (SELECT source_format FROM episodes WHERE episode_id = $episode) AS source_format
        FROM steps WHERE episode_id = $episode AND step_index BETWEEN $first AND $last
        AND list_contains($indices::INTEGER[], step_index) ORDER BY step_index
        """
    span = {"first": min(indices), "last": max(indices)}
    params: Params = {"episode": episode_id, "indices": list(indices), "text": limit, "json": DOCUMENT, **span}
    lengths = {"context": "context_length", "tool_calls": "tool_calls_length"}
    return restore_documents(lake, lake.sql(query, params), lengths, DOCUMENT)


def find_steps(lake: LakeReader, episode_id: int, text: str, first_state: int = 0) -> list[int]:
    """Return the steps whose visible texts hold all terms of a text (`list_terms`), as the list's search finds them.

    -1 stands for the messages before the first step, and the number of steps for those after the last. Stored JSON may
    escape a text once, as a string, or twice, inside the arguments of a call. The names of its fields match too. States
    of steps before `first_state` do not count: the messages before them show the same text.
    """
    terms = list_terms(text)
    forms: dict[str, int] = {}
    for position, term in enumerate(terms):
        escaped = json.dumps(term)[1:-1]
        written = (term, json.dumps(term, ensure_ascii=False)[1:-1], escaped, json.dumps(escaped)[1:-1])
        forms |= dict.fromkeys(written, position)
    columns = ("action", "if(step_index < $first, '', state)", "reasoning", "context", "tool_calls")
    match = " OR ".join(f"contains(lower({column}), f)" for column in columns)
    query = f"""
        WITH forms AS (SELECT lower(unnest($forms::VARCHAR[])) AS f, unnest($terms::INTEGER[]) AS term),
        moved AS (
            SELECT DISTINCT b.sha256, term FROM blobs AS b, forms
            WHERE list_contains((SELECT blob_ids FROM episodes WHERE episode_id = $episode), b.blob_id)
            AND NOT starts_with(b.media_type, 'image/') AND contains(lower(TRY_CAST(b.payload AS VARCHAR)), f)
        ),
        outside AS (
            SELECT unnest([-1, num_steps]) AS step_index, unnest([initial_messages, final_observation]) AS messages
            FROM episodes WHERE episode_id = $episode
        )
        SELECT step_index FROM (
            SELECT step_index, term FROM steps, forms WHERE episode_id = $episode AND ({match})
            UNION ALL SELECT step_index, term FROM steps, moved
            WHERE episode_id = $episode AND (contains(context, sha256) OR contains(tool_calls, sha256))
            UNION ALL SELECT step_index, term FROM outside, forms WHERE contains(lower(messages), f)
            UNION ALL SELECT step_index, term FROM outside, moved WHERE contains(messages, sha256)
        ) GROUP BY step_index HAVING count(DISTINCT term) = {len(terms)} ORDER BY step_index
        """
    params: Params = {"episode": episode_id, "forms": list(forms), "terms": list(forms.values()), "first": first_state}
    return [int(index) for index in lake.sql(query, params)["step_index"]] if terms else []


def list_terms(text: str) -> list[str]:
    """Return the terms of a text as the list's search reads it: words, and texts in quotes.

    A text without a letter, or of more than `TERMS` terms, is one term.
    """
    flat = " ".join(text.split())
    try:
        terms = [term.text for term in parse_terms(flat)]
    except UsageError:
        terms = []
    if not 0 < len(terms) <= TERMS:
        return [text] if flat else []
    # A term is in lower case; stored JSON may escape a capital letter, so a term stays as it is written.
    return [hit[0] if (hit := re.search(re.escape(term), flat, re.IGNORECASE)) else term for term in terms]


def count_training_uses(lake: LakeReader, episode_id: int) -> pl.DataFrame:
    """Count how often updates used each step: step_index, times, uses (a list of run and its first updates).

    Steps that no update used are left out.
    """
    query = f"""
        SELECT step_index, sum(times)::BIGINT AS times,
               list({{'run': run_id, 'updates': optimizer_steps[:{UPDATES}]}} ORDER BY run_id, job_id) AS uses
        FROM step_seen WHERE episode_id = ? GROUP BY step_index ORDER BY step_index
        """
    return lake.sql(query, [episode_id])


def read_step_scores(lake: LakeReader, episode_id: int) -> pl.DataFrame:
    """Return the current scores of steps: step_index, scorer, value, reason, error; the last two are cut."""
    scores = read_scores_of(lake, [episode_id], ("value", "reason", "error"))
    rows = scores.filter(pl.col("step_index").is_not_null()).sort("step_index", "scorer").head(SCORES)
    return rows.select(
        "step_index", "scorer", "value", pl.col("reason").str.slice(0, HEAD), pl.col("error").str.slice(0, HEAD)
    )


def read_tokens(lake: LakeReader, episode_id: int, step_index: int) -> pl.DataFrame:
    """Return the tokens of a step's action, one encoding a row, the engine's first: ids, log-probabilities, masks."""
    query = """
        SELECT encoding_id, any_value(COLUMNS(* EXCLUDE (encoding_id))) FROM (
            SELECT encoding_id, provenance, n_action, n_trained, policy_version, temperature, logprobs_mode, engine,
                   version_spans, action_ids, action_logprobs, action_mask, constrained
            FROM tokens WHERE episode_id = $episode AND step_index = $step
        ) GROUP BY encoding_id ORDER BY 2, encoding_id LIMIT $most
        """
    tokens = lake.sql(query, {"episode": episode_id, "step": step_index, "most": ENCODINGS})
    return tokens.rename({name: name.removeprefix("any_value(").removesuffix(")") for name in tokens.columns})


def read_token_texts(lake: LakeReader, encoding_id: int, token_ids: Sequence[int]) -> list[str] | None:
    """Return the text of each token; None if the lake has no tokenizer of the encoding.

    The text of a token that ends within a character is empty up to there; the token that ends the character has it.
    """
    if (vocabulary := lake.vocabulary(encoding_id)) is None:
        return None
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return [decoder.decode(vocabulary.get(token, b"\xef\xbf\xbd")) for token in token_ids]


def read_rescored_tokens(lake: LakeReader, episode_id: int, step_index: int) -> pl.DataFrame:
    """Return how checkpoints score the same tokens, the newest job of each checkpoint.

    series_id, encoding_id, checkpoint, log_ratio, logprobs, entropies (NULL where they were not computed).
    """
    query = """
        SELECT r.series_id, r.encoding_id, r.checkpoint, r.log_ratio, r.logprobs, r.entropies
        FROM ratios AS r JOIN job_runs AS j USING (job_id)
        WHERE r.episode_id = $episode AND r.step_index = $step
        QUALIFY row_number() OVER (PARTITION BY r.encoding_id, r.checkpoint ORDER BY j.sequence DESC) = 1
        ORDER BY r.encoding_id, r.checkpoint LIMIT $most
        """
    return lake.sql(query, {"episode": episode_id, "step": step_index, "most": CHECKPOINTS})


def read_call(lake: LakeReader, episode_id: int, step_index: int) -> Row | None:
    """Return the call of a step with its texts, cut after `JSON` characters; None without such a step.

    sampling and tools are of the episode. `*_length` is the full length of each text.
    """
    texts = ("s.context", "s.state", "s.action", "s.reasoning", "s.tool_calls", "s.extra", "e.sampling", "e.tools")
    names = [text.partition(".")[2] for text in texts]
    cut = ", ".join(
        f"left({text}, $limit) AS {name}, coalesce(length({text}), 0) AS {name}_length"
        for text, name in zip(texts, names, strict=True)
    )
    query = f"""
        SELECT s.model, s.policy_version, s.started_at, s.latency, s.prompt_tokens, s.completion_tokens, s.cost,
               s.finish_reason, {cut}
        FROM steps AS s JOIN episodes AS e USING (episode_id)
        WHERE s.episode_id = $episode AND s.step_index = $step
        """
    frame = lake.sql(query, {"episode": episode_id, "step": step_index, "limit": JSON})
    documents = {name: f"{name}_length" for name in names if name not in ("state", "action", "reasoning")}
    return get_first_row(restore_documents(lake, frame, documents, JSON))


def read_timeline(lake: LakeReader, episode_id: int) -> pl.DataFrame:
    """Return the calls and spans of an episode by their start: step_index, kind, name, began, took, error.

    began is in seconds of the clock, took in seconds; both NULL if unknown. kind of a step's call is `call`. Spans
    without a step have started_at and attributes too, until these have `DOCUMENT` characters.
    """
    query = """
        SELECT step_index, 'call' AS kind, coalesce(model, 'model call') AS name, epoch(started_at) AS began,
               latency AS took, NULL AS error, started_at, NULL AS attributes, 0 AS length
        FROM steps WHERE episode_id = $episode AND is_active
        UNION ALL
        SELECT step_index, kind, name, epoch(started_at), epoch(ended_at - started_at), left(error, $head), started_at,
               if(step_index IS NULL AND sum(length(attributes)) OVER (ORDER BY started_at, span_id) < $all,
                  left(attributes, $json), NULL), coalesce(length(attributes), 0)
        FROM spans WHERE episode_id = $episode
        ORDER BY began NULLS LAST, step_index NULLS FIRST, kind, name LIMIT $most
        """
    rows = lake.sql(query, {"episode": episode_id, "head": HEAD, "json": JSON, "all": DOCUMENT, "most": SCORES})
    return restore_documents(lake, rows, {"attributes": "length"}, JSON)


def read_judge_calls(lake: LakeReader, episode_id: int) -> pl.DataFrame:
    """Return what judges answered about an episode, by time: scorer, model, at, tokens, and the answer's beginning."""
    query = """
        SELECT coalesce(j.parameters ->> '$.scorer.name', j.parameters ->> '$.scorer', j.parameters ->> '$.reward')
               AS scorer, r.model, r."at", r.prompt_tokens, r.completion_tokens, left(r.answer, $text) AS answer
        FROM responses AS r LEFT JOIN job_runs AS j USING (job_id)
        WHERE r.episode_id = $episode ORDER BY r."at", r.request_id LIMIT $most
        """
    return lake.sql(query, {"episode": episode_id, "text": TEXT, "most": UPDATES})


MOST_SIDE_BY_SIDE = 8
"""Largest number of episodes side by side."""
CALLS = 2000
"""Characters of tool calls that are read; enough to parse the usual ones."""


def choose_contrast(
    lake: LakeReader, group_id: int, score: str | None, first: int | None = None, limit: int = 4
) -> list[int]:
    """Return the siblings that differ most: the best and the worst scored in turn, the unscored last.

    A group of at most `MOST_SIDE_BY_SIDE` is returned whole, a larger one up to the limit.

    Args:
        first: a sibling that always comes first.
    """
    relation, params = outcomes.build_group_relation(lake, group_id, score)
    query = f"""
        SELECT episode_id FROM (
            SELECT episode_id, outcome, rollout_index,
                   row_number() OVER (ORDER BY outcome DESC NULLS LAST, rollout_index, attempt, episode_id) AS falling,
                   row_number() OVER (ORDER BY outcome NULLS LAST, rollout_index, attempt, episode_id) AS rising
            FROM {relation} WHERE group_id = $group
        ) ORDER BY episode_id IS DISTINCT FROM $first, least(falling, rising), falling > rising, rollout_index
        """
    siblings = lake.sql(query, params | {"group": group_id, "first": first})["episode_id"].to_list()
    return siblings if len(siblings) <= MOST_SIDE_BY_SIDE else siblings[:limit]


def read_system_prompts(lake: LakeReader, episode_ids: Sequence[int]) -> dict[int, str]:
    """Return the system prompts (cut) of episodes, "" for an episode without; one without messages is left out."""
    texts = build_message_texts_sql("('system', 'developer')", JSON)
    query = f"""
        SELECT episode_id, array_to_string({texts}, chr(10)) AS prompt FROM episodes
        WHERE episode_id IN ({build_id_list(sorted(episode_ids))})
        """
    return dict(lake.sql(query).drop_nulls().iter_rows())


def read_facts(
    lake: LakeReader, episode_ids: Sequence[int], credit: Credit | None, score: str | None = None
) -> pl.DataFrame:
    """Return the facts above episodes side by side, in no order; a retracted episode has no row.

    group_id, run_id, task_id, rollout_index, attempt, collection_round, status, outcome, num_steps, policy_version;
    a_episode (of the first step) and mean_advantage, NULL without credit.
    """
    relation, params = outcomes.build_relation(lake, score)
    advantages = credit.rows_of(lake, episode_ids) if credit else NO_ADVANTAGES
    query = f"""
        SELECT e.episode_id, e.group_id, e.run_id, e.task_id, e.rollout_index, e.attempt, e.collection_round, e.status,
               e.outcome, e.num_steps, e.policy_version, a.a_episode, a.mean_advantage
        FROM {relation} AS e LEFT JOIN (
            SELECT episode_id, arg_min(a_episode, step_index) AS a_episode, avg(advantage) AS mean_advantage
            FROM {advantages} GROUP BY episode_id
        ) AS a USING (episode_id)
        WHERE e.episode_id IN ({build_id_list(sorted(set(episode_ids)))})
        """
    return lake.sql(query, params or None)


def read_walks(lake: LakeReader, episode_ids: Sequence[int], credit: Credit | None) -> pl.DataFrame:
    """Return the steps of episodes without texts, by episode and step.

    key is the state: the anchor of the credit, or the exact text without credit or anchors; NULL if unknown. Steps with
    the same action have the same `choice`. Further columns: episode_id, step_index, reward, advantage.
    """
    advantages = credit.rows_of(lake, episode_ids) if credit else NO_ADVANTAGES
    query = f"""
        SELECT s.episode_id, s.step_index,
               if(count(a.anchor_key) OVER () = 0, s.state_hash, a.anchor_key) AS key,
               hash({build_action_sql("s")}) AS choice, s.reward, a.advantage
        FROM steps AS s
        LEFT JOIN {advantages} AS a
        ON a.episode_id = s.episode_id AND a.step_index = s.step_index
        WHERE s.episode_id IN ({build_id_list(sorted(set(episode_ids)))}) ORDER BY s.episode_id, s.step_index
        """
    return lake.sql(query)


def read_step_texts(lake: LakeReader, steps: Sequence[tuple[int, int]]) -> pl.DataFrame:
    """Return states and actions of steps (episode, step), cut to an excerpt, and tool_calls, cut to `CALLS`.

    state_is_error and state_is_empty are of the state, reply_is_error and reply_is_empty of the reply.
    """
    is_wanted = f"episode_id IN ({build_id_list(sorted({episode for episode, _ in steps}))})"
    in_steps = "IN (SELECT (unnest($episodes::BIGINT[]), unnest($steps::INTEGER[])))"
    replies = build_replies_sql(is_wanted, f"(episode_id, step_index - 1) {in_steps}")
    query = f"""
        SELECT episode_id, step_index, left(state, {EXCERPT}) AS state, left(action, {EXCERPT}) AS action,
               left(tool_calls, {CALLS}) AS tool_calls, state_is_error, is_empty_state(state_hash) AS state_is_empty,
               r.long_texts, r.is_error AS reply_is_error, r.is_empty AS reply_is_empty
        FROM steps LEFT JOIN {replies} AS r USING (episode_id, step_index)
        WHERE {is_wanted} AND (episode_id, step_index) {in_steps}
        """
    params = {"episodes": [episode for episode, _ in steps], "steps": [step for _, step in steps]}
    return _judge_long_replies(lake, lake.sql(query, params))
