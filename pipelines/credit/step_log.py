"""Terms of the credit of each step, as DEBUG records of the logger `trajlake.credit`.

The log has the compared scores R of each group and episode. Per step it has the observation, the action with its
log-probability, the value estimate, the tool results, and G, A_E, A_S and A. Per anchor state it has the hash and the
returns of all its steps. It reads them from the lake after the job, as training does.
"""

import logging
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import polars as pl

from lake import ids
from lake.errors import UsageError
from lake.judgements.credit import find_credit
from lake.judgements.selections import select_where
from lake.read.episode_text import fit_line, format_number, format_tool_calls
from lake.read.episodes import KEYS, StoredEpisode, read_episodes, split_batches
from lake.read.parquet import collect_rows
from lake.read.snapshot import Snapshot
from lake.read.text_table import count_noun
from lake.records import StepRecord
from lake.write.rows import encode_json
from pipelines.credit.inputs import read_newest_groups

LOG = logging.getLogger("trajlake.credit")
_GROUPS = 2
"""Number of logged groups without --log-episodes."""
_CHARACTERS = 200
"""Maximum length of a logged text."""
_MEMBERS = 32
"""Maximum number of logged steps of an anchor."""
_ROWS = """
    SELECT episode_id, step_index, group_id, anchor_key, return_to_go, a_episode, a_step, advantage, anchor_size,
           anchor_episodes, flags
    FROM {rows} WHERE group_id = $group ORDER BY episode_id, step_index
"""
_FIGURES = ("group_id", "episodes", "scored", "score_mean", "score_std")
_COVERED = "SELECT DISTINCT episode_id, group_id AS compared FROM {rows} WHERE {column} IN (SELECT unnest($values))"


def log_steps(snapshot: Snapshot, series_id: int, scores: pl.DataFrame, *, where: str | None = None) -> None:
    """Log the selected episodes' steps with their credit in a series; O(steps of their groups).

    Args:
        snapshot: the lake after the job.
        series_id: series of the advantages.
        scores: compared scores: `episode_id` and `score`.
        where: SQL predicate over `episodes`; None takes those of the first groups.

    Raises:
        UsageError: a bad predicate, or one that selects no episode with credit.
    """
    rows = find_credit(snapshot, ids.to_text(series_id)).rows
    newest = read_newest_groups(snapshot, series_id).filter(pl.col("steps") > 0)
    group_rows = snapshot.scan("credit_groups").filter(pl.col("series_id") == series_id)
    group_rows = group_rows.join(newest.lazy(), on=["group_id", "job_id"], how="semi").select(_FIGURES)
    figures = collect_rows(group_rows).sort("group_id")
    first = figures["group_id"].head(_GROUPS)
    episodes = select_where(snapshot, (*KEYS, "num_steps"), where, "--log-episodes", may_be_empty=True)
    condition, values = ("episode_id", episodes["episode_id"]) if where is not None else ("group_id", first)
    covered = snapshot.sql(_COVERED.format(rows=rows, column=condition), {"values": values.to_list()})
    episodes = episodes.join(covered, on="episode_id", how="inner").sort("compared", "episode_id")
    if episodes.is_empty():
        raise UsageError(f"--log-episodes {where!r} selects no episode with credit; valid: a predicate over `episodes`")
    score_of = dict(scores.iter_rows())
    by_group = {row["group_id"]: row for row in figures.iter_rows(named=True)}
    for (group_id,), siblings in episodes.group_by("compared", maintain_order=True):
        group = _Group(snapshot, rows, by_group[group_id], score_of)
        for line in group.format_lines(siblings.drop("compared")):
            LOG.debug("%s", line)
    if where is None and figures.height > _GROUPS:
        further = count_noun(figures.height - _GROUPS, "further group")
        LOG.debug("%s not logged; --log-episodes selects episodes by a SQL predicate", further)


class _Group:
    """Rows of `advantages` of one group, with the log lines about it."""

    def __init__(self, snapshot: Snapshot, rows: str, figures: dict[str, Any], scores: dict[int, float | None]) -> None:
        self._snapshot, self._figures, self._scores = snapshot, figures, scores
        credit_rows = snapshot.sql(_ROWS.format(rows=rows), {"group": figures["group_id"]})
        self._credit: dict[tuple[int, int], dict[str, Any]] = {}
        self._members: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for row in credit_rows.iter_rows(named=True):
            self._credit[row["episode_id"], row["step_index"]] = row
            if row["anchor_key"] is not None:
                self._members[row["anchor_key"]].append(row)

    def format_lines(self, episodes: pl.DataFrame) -> Iterator[str]:
        """Yield the lines about the group, the selected episodes and their anchors."""
        figures = self._figures
        yield (
            f"group {ids.to_text(figures['group_id'])}: {count_noun(figures['episodes'], 'episode')}, "
            f"{figures['scored']} scored; R mean {format_number(figures['score_mean'])}, deviation "
            f"{format_number(figures['score_std'])}"
        )
        states: dict[int, str | None] = {}
        for part in split_batches(episodes):
            for episode in read_episodes(self._snapshot, part, scores=False):
                yield from self._format_episode(episode, states)
        for key, state in states.items():
            yield from self._format_anchor(key, state)

    def _format_episode(self, episode: StoredEpisode, states: dict[int, str | None]) -> Iterator[str]:
        record = episode.record
        yield (
            f"  episode {ids.to_text(episode.episode_id)}: task {fit_line(record.task_id)}, rollout "
            f"{record.rollout_index}, {record.status}, R {format_number(self._scores.get(episode.episode_id))}"
        )
        for index, step in enumerate(record.steps):
            credit = self._credit.get((episode.episode_id, index))
            yield f"    step {index}: observation {_quote(step.state)}"
            yield f"      action {_quote(step.action)}; {_format_sampling(step)}; reward {format_number(step.reward)}"
            for line in _format_tools(episode, index):
                yield f"      {line}"
            if credit is None:
                yield "      no credit: the step is inactive, or its episode is not compared"
                continue
            key = credit["anchor_key"]
            if key is not None:
                states.setdefault(key, step.state)
            where = "none" if key is None else f"{ids.to_text(key)} ({credit['anchor_size']} steps)"
            flags = f", {credit['flags']}" if credit["flags"] else ""
            yield (
                f"      G {format_number(credit['return_to_go'])}, A_E {format_number(credit['a_episode'])}, "
                f"anchor {where}, A_S {format_number(credit['a_step'])}, A {format_number(credit['advantage'])}{flags}"
            )

    def _format_anchor(self, key: int, state: str | None) -> Iterator[str]:
        members = self._members[key]
        first = members[0]
        text_hash = "-" if state is None else ids.to_text(ids.text_hash(state))
        yield (
            f"  anchor {ids.to_text(key)}: state {_quote(state)} (hash of the text {text_hash}), "
            f"{count_noun(first['anchor_size'], 'step')} of {count_noun(first['anchor_episodes'], 'episode')}"
        )
        for row in members[:_MEMBERS]:
            yield (
                f"    {ids.to_text(row['episode_id'])} step {row['step_index']}: "
                f"G {format_number(row['return_to_go'])}, A_S {format_number(row['a_step'])}"
            )
        if len(members) > _MEMBERS:
            yield f"    {count_noun(len(members) - _MEMBERS, 'further step')}"


def _quote(text: str | None) -> str:
    return "-" if text is None else repr(fit_line(text, _CHARACTERS))


def _format_sampling(step: StepRecord) -> str:
    """Format the log-probability of an action and the value estimate."""
    value = format_number(step.value_estimate)
    tokens = step.tokens
    if tokens is None or tokens.action_logprobs is None:
        return f"log-probability -, value {value}"
    mask = tokens.action_mask or [True] * len(tokens.action_logprobs)
    logprob = sum(value for value, is_sampled in zip(tokens.action_logprobs, mask, strict=True) if is_sampled)
    return f"log-probability {format_number(logprob)} over {count_noun(sum(mask), 'token')}, value {value}"


def _format_tools(episode: StoredEpisode, index: int) -> Iterator[str]:
    """Yield the tool calls of a step with their results, from the answering message or the tool's span."""
    record = episode.record
    step = record.steps[index]
    after = record.steps[index + 1].context if index + 1 < len(record.steps) else record.final_observation or []
    answers = {m.get("tool_call_id"): m for m in after if m.get("role") == "tool"}
    spans = [span for span in record.spans if span.kind == "tool" and span.step_index == index]
    for call, call_text in zip(step.tool_calls or (), format_tool_calls(encode_json(step.tool_calls)), strict=False):
        call_id = call.get("id") if isinstance(call, dict) else None
        line = f"tool {fit_line(call_text, _CHARACTERS)}"
        if (answer := answers.get(call_id)) is not None:
            content = answer.get("content")
            text = content if isinstance(content, str) else encode_json(content) or ""
            yield f"{line} -> {'error ' if answer.get('is_error') else ''}{_quote(text)}"
        elif (span := next((span for span in spans if span.span_id == call_id), None)) is not None:
            result = _quote(encode_json((span.attributes or {}).get("result")))
            outcome = f"error {_quote(span.error)}" if span.error is not None else result
            yield f"{line} -> {outcome}"
        else:
            yield f"{line} -> no recorded result"
