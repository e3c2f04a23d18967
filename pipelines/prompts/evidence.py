"""Evidence: what a candidate did at its best and at its worst, as transcripts of bounded length."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec
import polars as pl

from lake.export.target import conversation
from lake.read.episodes import KEYS, read_episodes
from lake.read.snapshot import Snapshot
from lake.read.text_table import counted
from pipelines.collect.policies import Message
from pipelines.prompts.ranking import read_outcomes

_LEAST_SHOWN = 80
"""Characters of a message below which it is left out rather than cut further."""


class Attempt(msgspec.Struct, frozen=True):
    """A rollout."""

    value: float
    """Its return."""
    messages: list[Message]


class Contrast(msgspec.Struct, frozen=True, kw_only=True):
    """Two rollouts of a candidate."""

    better: Attempt
    worse: Attempt
    is_same_start: bool
    """They are siblings."""

    @property
    def names(self) -> tuple[str, str]:
        """What the two are to one another."""
        return ("the better attempt", "the worse one") if self.better.value > self.worse.value else ("one", "the other")


class Row(msgspec.Struct, frozen=True):
    """A rollout by its number."""

    seed: int
    episode_id: int
    value: float


def contrasts(snapshot: Snapshot, run: str, prompt: str, *, score: str, first: int, count: int) -> list[Contrast]:
    """The best and the worst sibling of some groups of a run, those that are furthest apart first.

    Where no group has siblings of different returns, rollouts of different starts are set side by side.

    Args:
        snapshot: of the lake.
        run: the candidate's.
        prompt: its text, which is not repeated in transcripts.
        score: env_return, or the scorer that returns are by.
        first: how many contrasts to pass over: other requests show them. After the last one it begins again.
        count: how many, at most.
    """
    frame = read_outcomes(snapshot, run, score).drop_nulls("return").sort("seed", "rollout_index", "episode_id")
    found = [Row(*row) for row in frame.select("seed", "episode_id", "return").iter_rows()]
    pairs = ordered_pairs(found)
    chosen = [pairs[(first + place) % len(pairs)] for place in range(min(count, len(pairs)))]
    wanted = {row.episode_id for pair in chosen for row in pair}
    if not wanted:
        return []
    part = frame.filter(pl.col("episode_id").is_in(list(wanted))).select(KEYS)
    read = read_episodes(snapshot, part, tokens=False, spans=False, scores=False)
    told = {one.episode_id: _without_prompt(conversation(one.record), prompt) for one in read}
    return [
        Contrast(
            better=Attempt(better.value, told[better.episode_id]),
            worse=Attempt(worse.value, told[worse.episode_id]),
            is_same_start=better.seed == worse.seed,
        )
        for better, worse in chosen
    ]


def ordered_pairs(rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    """(better, worse), furthest apart first; equal ones in the order of `rows`.

    Pairs of siblings, one a group. If all siblings are alike, the best rollout with the worst, the second best with
    the second worst, and so on; if everything is alike, the first rollout with the last.
    """
    groups: Mapping[int, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.seed].append(row)
    pairs = [_ends(group) for group in groups.values()]
    apart = [pair for pair in pairs if _gap(pair) > 0]
    if not apart and rows:
        ranked = sorted(rows, key=lambda row: -row.value)
        pairs = [(ranked[place], ranked[-1 - place]) for place in range(len(ranked) // 2)]
        apart = [pair for pair in pairs if _gap(pair) > 0] or [(rows[0], rows[-1])]
    return sorted(apart, key=lambda pair: -_gap(pair))


def _ends(group: Sequence[Row]) -> tuple[Row, Row]:
    return max(group, key=lambda row: row.value), min(group, key=lambda row: row.value)


def _gap(pair: tuple[Row, Row]) -> float:
    return float(pair[0].value - pair[1].value)


def _without_prompt(messages: list[Message], prompt: str) -> list[Message]:
    is_prompt = bool(messages) and messages[0].get("role") == "system" and messages[0].get("content") == prompt
    return messages[1:] if is_prompt else messages


def shortened(messages: Sequence[Message], limit: int) -> str:
    """Messages as JSON, one a line, in `limit` characters at most: the longest are cut, then those in the middle go.

    Beginning and end are what is kept: the task is told first, and how it ended last.
    """
    lines = [_line(message, None) for message in messages]
    most = limit
    while _size(lines) > limit and most > _LEAST_SHOWN:
        most //= 2
        lines = [_line(message, most) for message in messages]
    if _size(lines) <= limit:
        return "\n".join(lines)
    head: list[str] = []
    tail: list[str] = []
    room = limit - len(_left_out(len(lines))) - 1
    low, high = 0, len(lines) - 1
    while low <= high:
        line = lines[low] if len(head) <= len(tail) else lines[high]
        if (room := room - len(line) - 1) < 0:
            break
        if len(head) <= len(tail):
            head.append(line)
            low += 1
        else:
            tail.insert(0, line)
            high -= 1
    return "\n".join([*head, _left_out(high - low + 1), *tail])[: max(0, limit)]


def _size(lines: Sequence[str]) -> int:
    return sum(map(len, lines)) + max(0, len(lines) - 1)


def _left_out(count: int) -> str:
    return f"({counted(count, 'message')} left out)"


def _line(message: Message, most: int | None) -> str:
    """A message as a JSON object; its content cut after so many characters, with a word that it was."""
    shown = {key: message[key] for key in ("role", "name", "content", "tool_calls") if message.get(key) is not None}
    content = shown.get("content")
    if most is not None and content is not None:
        text = content if isinstance(content, str) else msgspec.json.encode(content).decode()
        shown["content"] = text if len(text) <= most else f"{text[:most]} ... ({len(text) - most} characters left out)"
    if most is not None and len(calls := msgspec.json.encode(shown.get("tool_calls", "")).decode()) > most:
        shown["tool_calls"] = f"{calls[:most]} ..."
    return msgspec.json.encode(shown).decode()
