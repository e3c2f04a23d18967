"""What every format out is made of: an episode with its judgements, and what turns groups of them into rows."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from lake.read.episodes import Episode
from lake.records import EpisodeRecord, StepRecord

_UNSAFE = re.compile(r"[^A-Za-z0-9._=-]")
_LONGEST_NAME = 80
Container = Literal["jsonl", "parquet", "tree"]
Row = dict[str, Any]


class Credit(msgspec.Struct, frozen=True):
    """What a credit series says of a step; NULL as in the table."""

    advantage: float | None
    a_episode: float | None
    a_step: float | None
    return_to_go: float | None
    anchor_key: int | None


class Exported(msgspec.Struct, frozen=True):
    """An episode on its way out."""

    episode: Episode
    credit_S: dict[int, Credit]
    """step_index -> its credit; empty if no series covers the episode."""
    dropped_S: frozenset[int] = frozenset()
    """Steps that the selection dropped out of it."""

    @property
    def record(self) -> EpisodeRecord:
        """The episode as a record."""
        return self.episode.record

    def is_learned_from(self, index: int) -> bool:
        """Whether a step is a decision of the policy that may be learned from."""
        step = self.record.steps[index]
        return step.trainable and step.is_active and not step.is_copied_context and index not in self.dropped_S

    def score(self, name: str) -> float | None:
        """The score of the whole episode by `env_return` or a scorer; None if there is none."""
        if name == "env_return":
            return self.record.env_return
        whole = (score for _, score in self.episode.scores if score.step_index is None and score.scorer == name)
        return next((score.value for score in whole), None)

    def advantages(self) -> list[float | None] | None:
        """Of every step; None if no series covers the episode."""
        if not self.credit_S:
            return None
        return [
            None if (credit := self.credit_S.get(index)) is None else credit.advantage
            for index in range(len(self.record.steps))
        ]


@dataclass(frozen=True)
class Choices:
    """What a person may decide about the rows; a target reads those that concern it."""

    score: str = "env_return"
    """The score that pairs and labels go by."""
    pairs: Literal["siblings", "anchors"] = "siblings"
    """Preference pairs of whole episodes of a group, or of the decisions taken in one anchor state."""
    threshold: float | None = None
    """Label of an unpaired row: the score is above it; None: above the mean of its group."""


@dataclass
class Losses:
    """What a format has no place for: what -> how often."""

    counts: Counter[str] = field(default_factory=Counter)

    def add(self, what: str, number: int = 1) -> None:
        """Count something that is left out."""
        if number:
            self.counts[what] += number


Convert = Callable[[Sequence[Exported], Choices, Losses], Iterable[Row]]
"""The rows of one group of siblings, in order."""


@dataclass(frozen=True)
class Target:
    """One format out."""

    name: str
    description: str
    container: Container
    """jsonl: a row is a line. parquet: of a table. tree: {"path": below the folder, "text": of a file}."""
    convert: Convert
    schema: Callable[[], Any] | None = None
    """Of a Parquet file (an Arrow schema)."""
    holds: frozenset[str] = frozenset()
    """Which of tokens, spans and advantages have a place in it; the others are not read, and told as left out."""
    finish: Callable[[Path], None] | None = None
    """What a tree needs once all of its files are there: an index."""


def each(convert: Callable[[Exported, Losses], Row | None]) -> Convert:
    """A target whose rows are episodes."""

    def rows(group: Sequence[Exported], _: Choices, losses: Losses) -> Iterable[Row]:
        for exported in group:
            if (row := convert(exported, losses)) is not None:
                yield row

    return rows


def file_name(text: str) -> str:
    """A text of a source as a part of a path: what it may not hold is `_`, and what is long is cut."""
    return _UNSAFE.sub("_", text)[:_LONGEST_NAME].lstrip(".") or "_"


def answer(step: StepRecord) -> Row:
    """A decision as the assistant's message that it was."""
    extra = dict(step.extra or {})
    message: Row = {"role": "assistant", "content": extra.pop("content", step.action)}
    if step.reasoning is not None:
        message["reasoning_content"] = step.reasoning
    if step.tool_calls is not None:
        message["tool_calls"] = step.tool_calls
    return message | extra


def prompts(record: EpisodeRecord) -> list[list[Row]]:
    """Of every step: the messages that were added before it, since the step before. Lists are not copied."""
    added = []
    for index, step in enumerate(record.steps):
        since = [*(record.initial_messages or []), *step.context] if index == 0 else step.context
        if not since and step.state:
            since = [{"role": step.state_role or "user", "content": step.state}]
        added.append(since)
    return added


def first_prompt(record: EpisodeRecord) -> list[Row]:
    """The messages before the first decision."""
    return list(prompts(record)[0]) if record.steps else list(record.initial_messages or ())


def conversation(record: EpisodeRecord) -> list[Row]:
    """The whole chat of an episode."""
    messages: list[Row] = []
    for step, since in zip(record.steps, prompts(record), strict=True):
        messages += since
        if step.trainable or step.action or step.tool_calls:
            messages.append(answer(step))
    return messages + (record.final_observation or [])
