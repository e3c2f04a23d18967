"""One episode: its facts, a page of its steps, and one text in full."""

from typing import Literal

import polars as pl

from lake.blobs import put_back
from viewer.queries.base import Reads, Row, Window, only_row

TEXT = 3000
"""Characters of a text that a transcript shows at first."""
JSON = 200_000
"""Longest JSON document that is taken apart; a longer one is shown as text."""

TextColumn = Literal["state", "action", "reasoning", "context", "tool_calls"]
EpisodeColumn = Literal["initial_messages", "final_observation", "tools", "ground_truth", "sampling", "extra", "error"]


def episode(lake: Reads, episode_id: int) -> Row | None:
    """An episode's facts without its documents; None if there is no such episode."""
    query = """
        SELECT episode_id, group_id, run_id, task_id, rollout_index, attempt, collection_round, environment, split,
               agent_id, policy, policy_version, status, terminated, stop_reason, env_return, num_steps, prompt_tokens,
               completion_tokens, seed, expected_group_size, parent_episode_id, parent_step_index, relation, started_at,
               ended_at, source_format, source_uri, source_id, left(error, $text) AS error
        FROM episodes WHERE episode_id = $episode
        """
    return only_row(lake.sql(query, {"episode": episode_id, "text": TEXT}))


def document(lake: Reads, episode_id: int, column: EpisodeColumn, limit: int = JSON) -> tuple[str | None, int]:
    """A document of an episode, cut after `limit` characters, and its whole length."""
    query = (
        f"SELECT left({column}, $limit) AS d, coalesce(length({column}), 0) AS n FROM episodes WHERE episode_id = $e"
    )
    row = _whole(lake, lake.sql(query, {"e": episode_id, "limit": limit}), {"d": "n"}, limit).row(0)
    return row[0], int(row[1])


def steps(lake: Reads, episode_id: int, window: Window) -> pl.DataFrame:
    """A page of an episode's steps in order.

    Returns:
        step_index, facts of the step, and its texts state, action, reasoning, context, tool_calls, each cut, with its
        whole length in `*_length`.
    """
    cut = ", ".join(
        f"left({name}, ${limit}) AS {name}, coalesce(length({name}), 0) AS {name}_length"
        for name, limit in [
            ("state", "text"),
            ("action", "text"),
            ("reasoning", "text"),
            ("context", "json"),
            ("tool_calls", "json"),
        ]
    )
    query = f"""
        SELECT step_index, state_hash, reward, is_action_valid, is_active, trainable, is_copied_context, state_role,
               state_is_error, model, policy_version, finish_reason, value_estimate, latency, {cut}
        FROM steps WHERE episode_id = $episode ORDER BY step_index LIMIT $limit OFFSET $offset
        """
    found = lake.sql(query, {"episode": episode_id, "text": TEXT, "json": JSON} | window.params())
    return _whole(lake, found, {"context": "context_length", "tool_calls": "tool_calls_length"}, JSON)


def _whole(lake: Reads, frame: pl.DataFrame, lengths: dict[str, str], limit: int) -> pl.DataFrame:
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
    return str(_whole(lake, found, {"t": "n"}, limit)["t"].item() or "") if found.height else ""


def rewards(lake: Reads, episode_id: int) -> pl.DataFrame:
    """Rewards of an episode's steps: step_index, reward."""
    return lake.sql("SELECT step_index, reward FROM steps WHERE episode_id = ? ORDER BY step_index", [episode_id])


def scores(lake: Reads, episode_id: int) -> pl.DataFrame:
    """What scorers say of an episode, each under its current version: scorer, step_index, value, reason, error."""
    query = """
        SELECT s.scorer, s.step_index, s.value, left(s.reason, $text) AS reason, left(s.error, $text) AS error
        FROM current_scores AS s JOIN job_runs AS r USING (job_id)
        WHERE s.episode_id = $episode ORDER BY r.ended_at DESC, s.scorer, s.step_index NULLS FIRST LIMIT 200
        """
    return lake.sql(query, {"episode": episode_id, "text": TEXT})
