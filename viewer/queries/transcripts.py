"""What a transcript reads: a line for each step, opened steps in full, where a text occurs, and what trained on it.

The lines hold excerpts alone, so that a thousand steps with texts of megabytes are a small answer. The texts of a step
are read when it is opened.
"""

import json
from collections.abc import Sequence

import polars as pl

from lake.judgements.scores import scores_of
from viewer.queries import Params, Reads, Window, replies, taken
from viewer.queries.episodes import JSON, TEXT, whole

HEAD = 240
"""Characters of an action in the line of its step."""
ENCODINGS, CHECKPOINTS = 4, 8
"""Encodings of a step, and checkpoints that were asked about it, at most."""
SCORES = 10_000
"""Scores of steps at most."""
UPDATES = 20
"""Updates of a training run that are named."""


def outline(lake: Reads, episode_id: int, window: Window) -> pl.DataFrame:
    """A line for each step of a window, in order: excerpts, reward, times, and what is wrong with it.

    `tool` and `arguments` are of the first of `calls` tool calls. `doing` is equal where the whole action is. `began`
    is in seconds after the episode's first known start.
    """
    query = f"""
        WITH mine AS (
            SELECT *, if(json_valid(tool_calls) AND tool_calls NOT LIKE '"blob:%', tool_calls, NULL) AS called
            FROM steps WHERE episode_id = $episode ORDER BY step_index LIMIT $limit OFFSET $offset
        )
        SELECT m.step_index, reward, is_action_valid, is_active, trainable, is_copied_context, state_is_error,
               is_empty_state(state_hash) AS state_is_empty, r.is_error AS reply_is_error,
               r.is_empty AS reply_is_empty, latency, agent_id, left(action, $head) AS action,
               coalesce(called ->> '$[0].function.name', called ->> '$[0].name') AS tool,
               left(coalesce(called ->> '$[0].function.arguments', called ->> '$[0].arguments'), $head) AS arguments,
               coalesce(if(json_type(called) = 'ARRAY', json_array_length(called), NULL), 0)::INTEGER AS calls,
               hash({taken("m")})::VARCHAR AS doing,
               epoch(started_at - min(started_at) OVER ()) AS began
        FROM mine AS m LEFT JOIN {replies("episode_id = $episode")} AS r USING (episode_id, step_index)
        ORDER BY m.step_index
        """
    return lake.sql(query, {"episode": episode_id, "head": HEAD} | window.params())


def scales(lake: Reads, episode_id: int) -> tuple[float, bool]:
    """The largest |reward| of an episode's steps (0 without any), and whether any step has one."""
    query = "SELECT coalesce(max(abs(reward)), 0), count(reward) > 0 FROM steps WHERE episode_id = ?"
    largest, is_any = lake.sql(query, [episode_id]).row(0)
    return float(largest), bool(is_any)


def steps(lake: Reads, episode_id: int, indices: Sequence[int], limit: int = TEXT) -> pl.DataFrame:
    """Some of an episode's steps in order, with their texts cut after `limit` characters.

    The whole length of each text is in `*_length`. Documents are read up to `JSON` characters, or `limit` if that is
    more.
    """
    limits = {"state": "text", "action": "text", "reasoning": "text", "context": "json", "tool_calls": "json"}
    cut = ", ".join(
        f"left({name}, ${limit}) AS {name}, coalesce(length({name}), 0) AS {name}_length"
        for name, limit in limits.items()
    )
    query = f"""
        SELECT s.step_index, reward, is_action_valid, is_active, trainable, is_copied_context, state_role,
               state_is_error, is_empty_state(state_hash) AS state_is_empty, r.is_error AS reply_is_error,
               r.is_empty AS reply_is_empty, model, policy_version, finish_reason,
               value_estimate, latency, prompt_tokens, completion_tokens, {cut}
        FROM steps AS s
        LEFT JOIN {replies("episode_id = $episode AND list_contains($indices::INTEGER[], step_index - 1)")} AS r
        USING (episode_id, step_index)
        WHERE episode_id = $episode AND list_contains($indices::INTEGER[], s.step_index) ORDER BY s.step_index
        """
    longest = max(JSON, limit)
    params: Params = {"episode": episode_id, "indices": list(indices), "text": limit, "json": longest}
    lengths = {"context": "context_length", "tool_calls": "tool_calls_length"}
    return whole(lake, lake.sql(query, params), lengths, longest)


def find(lake: Reads, episode_id: int, text: str) -> list[int]:
    """Steps that hold a text in what a person reads of them, whatever the case.

    In stored JSON a text may stand escaped, once as a string, or twice inside the arguments of a call.
    """
    once = json.dumps(text)[1:-1]
    forms = list(dict.fromkeys([text, json.dumps(text, ensure_ascii=False)[1:-1], once, json.dumps(once)[1:-1]]))
    columns = ("action", "state", "reasoning", "context", "tool_calls")
    found = " OR ".join(f"contains(lower({c}), f)" for c in columns)
    query = f"""
        WITH forms AS (SELECT lower(unnest($forms::VARCHAR[])) AS f),
        moved AS (
            SELECT DISTINCT b.sha256 FROM blobs AS b, forms
            WHERE list_contains((SELECT blob_ids FROM episodes WHERE episode_id = $episode), b.blob_id)
            AND NOT starts_with(b.media_type, 'image/') AND contains(lower(TRY_CAST(b.payload AS VARCHAR)), f)
        )
        SELECT step_index FROM steps
        WHERE episode_id = $episode AND (
            EXISTS (SELECT 1 FROM forms WHERE {found})
            OR EXISTS (SELECT 1 FROM moved WHERE contains(context, sha256) OR contains(tool_calls, sha256))
        )
        ORDER BY step_index
        """
    return [int(index) for index in lake.sql(query, {"episode": episode_id, "forms": forms})["step_index"]]


def trained(lake: Reads, episode_id: int) -> pl.DataFrame:
    """How often each step was trained on: step_index, times, runs (a list of run and its first updates).

    Steps that no update took are left out.
    """
    query = f"""
        SELECT step_index, sum(times)::BIGINT AS times,
               list({{'run': run_id, 'updates': optimizer_steps[:{UPDATES}]}} ORDER BY run_id, job_id) AS runs
        FROM step_seen WHERE episode_id = ? GROUP BY step_index ORDER BY step_index
        """
    return lake.sql(query, [episode_id])


def scores(lake: Reads, episode_id: int) -> pl.DataFrame:
    """What scorers say of steps, each under its current version: step_index, scorer, value, reason, error."""
    found = scores_of(lake, [episode_id], ("value", "reason", "error")).filter(pl.col("step_index").is_not_null())
    shown = found.sort("step_index", "scorer").head(SCORES)
    return shown.select(
        "step_index", "scorer", "value", pl.col("reason").str.slice(0, HEAD), pl.col("error").str.slice(0, HEAD)
    )


def tokens(lake: Reads, episode_id: int, step_index: int) -> pl.DataFrame:
    """The tokens of a step's action, an encoding a row, the engine's own first: ids, log-probabilities, masks."""
    query = """
        SELECT encoding_id, any_value(COLUMNS(* EXCLUDE (encoding_id))) FROM (
            SELECT encoding_id, provenance, n_action, n_trained, policy_version, temperature, logprobs_mode, engine,
                   version_spans, action_ids, action_logprobs, action_mask, constrained
            FROM tokens WHERE episode_id = $episode AND step_index = $step
        ) GROUP BY encoding_id ORDER BY 2, encoding_id LIMIT $most
        """
    found = lake.sql(query, {"episode": episode_id, "step": step_index, "most": ENCODINGS})
    return found.rename({name: name.removeprefix("any_value(").removesuffix(")") for name in found.columns})


def rescored(lake: Reads, episode_id: int, step_index: int) -> pl.DataFrame:
    """What checkpoints think of the same tokens, of each the newest.

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
