"""What credit was made of, step by step, as DEBUG records of the logger `trajlake.credit`.

Per group the scores R that are compared; per episode its R; per step what was observed and done, with the
log-probability, the value estimate and what tools gave back, and G, A_E, A_S and A; per anchor state its hash and the
returns of all its steps. All of it is read from the lake after the job, so it is what training reads.
"""

import logging
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import polars as pl

from lake import ids
from lake.errors import UsageError
from lake.judgements.credit import find_credit
from lake.judgements.predicates import select_where
from lake.judgements.scores import episode_scores
from lake.read.episodes import KEYS, Episode, parts, read_episodes
from lake.read.parquet import collected
from lake.read.show import number, one_line, tool_calls
from lake.read.snapshot import Snapshot
from lake.read.text_table import counted
from lake.records import StepRecord
from lake.write.rows import json_text
from pipelines.credit.incremental import newest_groups

LOG = logging.getLogger("trajlake.credit")
_GROUPS = 2
"""Groups that are logged unless episodes are chosen."""
_CHARACTERS = 200
"""Of a text."""
_MEMBERS = 32
"""Steps of an anchor whose figures are listed."""
_ROWS = """
    SELECT episode_id, step_index, group_id, anchor_key, return_to_go, a_episode, a_step, advantage, anchor_size,
           anchor_episodes, flags
    FROM {rows} WHERE group_id = $group ORDER BY episode_id, step_index
"""
_COVERED = "SELECT DISTINCT episode_id, group_id AS compared FROM {rows} WHERE {column} IN (SELECT unnest($values))"


def log_steps(snapshot: Snapshot, series_id: int, *, score: str, where: str | None = None) -> None:
    """Log the steps of chosen episodes and the credit of a series for them; O(steps of their groups).

    Args:
        snapshot: the lake after the job.
        series_id: whose advantages.
        score: the episode score that was compared: `env_return`, or a scorer or reward as NAME@VERSION.
        where: SQL predicate over `episodes`; None takes those of the first groups.

    Raises:
        UsageError: a bad predicate, or one that no episode with credit fulfils.
    """
    for line in lines(snapshot, series_id, score=score, where=where):
        LOG.debug("%s", line)


def lines(snapshot: Snapshot, series_id: int, *, score: str, where: str | None = None) -> Iterator[str]:
    """The lines that `log_steps` logs, without control characters; see there."""
    rows = find_credit(snapshot, ids.to_text(series_id)).rows
    figures = _figures(snapshot, series_id)
    first = figures["group_id"].head(_GROUPS)
    chosen = select_where(snapshot, (*KEYS, "num_steps"), where, "--log-episodes", empty=True)
    condition, values = ("episode_id", chosen["episode_id"]) if where is not None else ("group_id", first)
    covered = snapshot.sql(_COVERED.format(rows=rows, column=condition), {"values": values.to_list()})
    chosen = chosen.join(covered, on="episode_id", how="inner").sort("compared", "episode_id")
    if chosen.is_empty():
        raise UsageError(
            f"--log-episodes {where!r} chooses no episode that has credit; valid: a predicate over `episodes`"
        )
    scores = dict(episode_scores(snapshot, score).iter_rows())
    by_group = {row["group_id"]: row for row in figures.iter_rows(named=True)}
    for (group_id,), siblings in chosen.group_by("compared", maintain_order=True):
        yield from _Group(snapshot, rows, by_group[group_id], scores).lines(siblings.drop("compared"))
    if where is None and figures.height > _GROUPS:
        rest = counted(figures.height - _GROUPS, "further group")
        yield f"{rest} not logged; --log-episodes chooses episodes by a SQL predicate"


def _figures(snapshot: Snapshot, series_id: int) -> pl.DataFrame:
    """What is known of the scores of each group of a series, by group_id."""
    newest = newest_groups(snapshot, series_id).filter(pl.col("steps") > 0)
    figures = snapshot.scan("credit_groups").filter(pl.col("series_id") == series_id)
    columns = ("group_id", "episodes", "scored", "score_mean", "score_std")
    kept = figures.join(newest.lazy(), on=["group_id", "job_id"], how="semi").select(columns)
    return collected(kept).sort("group_id")


class _Group:
    """The rows of `advantages` of one group, and the lines about it."""

    def __init__(self, snapshot: Snapshot, rows: str, figures: dict[str, Any], scores: dict[int, float | None]) -> None:
        self._snapshot, self._figures, self._scores = snapshot, figures, scores
        found = snapshot.sql(_ROWS.format(rows=rows), {"group": figures["group_id"]})
        self._credit: dict[tuple[int, int], dict[str, Any]] = {}
        self._members: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for row in found.iter_rows(named=True):
            self._credit[row["episode_id"], row["step_index"]] = row
            if row["anchor_key"] is not None:
                self._members[row["anchor_key"]].append(row)

    def lines(self, chosen: pl.DataFrame) -> Iterator[str]:
        """The lines about the group, its chosen episodes, and the anchors that these visit."""
        figures = self._figures
        yield (
            f"group {ids.to_text(figures['group_id'])}: {counted(figures['episodes'], 'episode')}, "
            f"{figures['scored']} scored; R mean {number(figures['score_mean'])}, deviation "
            f"{number(figures['score_std'])}"
        )
        states: dict[int, str | None] = {}
        for part in parts(chosen):
            for episode in read_episodes(self._snapshot, part, scores=False):
                yield from self._of_episode(episode, states)
        for key, state in states.items():
            yield from self._of_anchor(key, state)

    def _of_episode(self, episode: Episode, states: dict[int, str | None]) -> Iterator[str]:
        record = episode.record
        yield (
            f"  episode {ids.to_text(episode.episode_id)}: task {one_line(record.task_id)}, rollout "
            f"{record.rollout_index}, {record.status}, R {number(self._scores.get(episode.episode_id))}"
        )
        for index, step in enumerate(record.steps):
            credit = self._credit.get((episode.episode_id, index))
            yield f"    step {index}: observation {_shown(step.state)}"
            yield f"      action {_shown(step.action)}; {_sampled(step)}; reward {number(step.reward)}"
            for line in _tools(episode, index):
                yield f"      {line}"
            if credit is None:
                yield "      no credit: the step is not active, or its episode does not take part"
                continue
            key = credit["anchor_key"]
            if key is not None:
                states.setdefault(key, step.state)
            where = "none" if key is None else f"{ids.to_text(key)} ({credit['anchor_size']} steps)"
            flags = f", {credit['flags']}" if credit["flags"] else ""
            yield (
                f"      G {number(credit['return_to_go'])}, A_E {number(credit['a_episode'])}, anchor {where}, "
                f"A_S {number(credit['a_step'])}, A {number(credit['advantage'])}{flags}"
            )

    def _of_anchor(self, key: int, state: str | None) -> Iterator[str]:
        members = self._members[key]
        first = members[0]
        hashed = "-" if state is None else ids.to_text(ids.text_hash(state))
        yield (
            f"  anchor {ids.to_text(key)}: state {_shown(state)} (hash of the text {hashed}), "
            f"{counted(first['anchor_size'], 'step')} of {counted(first['anchor_episodes'], 'episode')}"
        )
        for row in members[:_MEMBERS]:
            yield (
                f"    {ids.to_text(row['episode_id'])} step {row['step_index']}: G {number(row['return_to_go'])}, "
                f"A_S {number(row['a_step'])}"
            )
        if len(members) > _MEMBERS:
            yield f"    {counted(len(members) - _MEMBERS, 'further step')}"


def _shown(text: str | None) -> str:
    return "-" if text is None else repr(one_line(text, _CHARACTERS))


def _sampled(step: StepRecord) -> str:
    """The log-probability of an action, and what the critic said."""
    value = number(step.value_estimate)
    tokens = step.tokens
    if tokens is None or tokens.action_logprobs is None:
        return f"log-probability -, value {value}"
    mask = tokens.action_mask or [True] * len(tokens.action_logprobs)
    logprob = sum(value for value, is_sampled in zip(tokens.action_logprobs, mask, strict=True) if is_sampled)
    return f"log-probability {number(logprob)} over {counted(sum(mask), 'token')}, value {value}"


def _tools(episode: Episode, index: int) -> Iterator[str]:
    """The tool calls of a step, each with what it gave back: the message that answers it, else the tool's span."""
    record = episode.record
    step = record.steps[index]
    after = record.steps[index + 1].context if index + 1 < len(record.steps) else record.final_observation or []
    answers = {m.get("tool_call_id"): m for m in after if m.get("role") == "tool"}
    spans = [span for span in record.spans if span.kind == "tool" and span.step_index == index]
    for call, said in zip(step.tool_calls or (), tool_calls(json_text(step.tool_calls)), strict=False):
        call_id = call.get("id") if isinstance(call, dict) else None
        line = f"tool {one_line(said, _CHARACTERS)}"
        if (answer := answers.get(call_id)) is not None:
            content = answer.get("content")
            text = content if isinstance(content, str) else json_text(content) or ""
            yield f"{line} -> {'error ' if answer.get('is_error') else ''}{_shown(text)}"
        elif (span := next((span for span in spans if span.span_id == call_id), None)) is not None:
            result = json_text((span.attributes or {}).get("result"))
            yield f"{line} -> {_shown(result) if span.error is None else f'error {_shown(span.error)}'}"
        else:
            yield f"{line} -> no result is recorded"
