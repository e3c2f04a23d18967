"""What every format out is made of: an episode with its judgements, and what turns groups of them into rows."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from lake import ids
from lake.formats.chat.chat_messages import decoded
from lake.read.conversations import Origin, predecessors
from lake.read.episodes import Episode
from lake.records import EpisodeRecord, ScoreRecord, StepRecord
from lake.write.rows import json_text
from lake.write.scores import IMPORTED, RECORDED

_UNSAFE = re.compile(r"[^A-Za-z0-9._=-]")
_LONGEST_NAME = 80
_MARKED = re.compile(rf"-[a-z0-9]{{{ids.TEXT_LENGTH}}}\Z")
_NOT_READ = frozenset(("manifest.json", "venv", "node_modules", "__pycache__"))
"""Names that mean something else to whoever reads a folder."""
NAMES_TOLD = 5
"""Most names that are told of what is left out."""
_UNFINISHED = (".part", ".partial", ".tmp", ".crdownload", "~")
FROM_ELSEWHERE = (RECORDED, IMPORTED)
"""Versions of scores that nobody computed here."""
Container = Literal["jsonl", "parquet", "sqlite", "tree"]
Row = dict[str, Any]
_Made = TypeVar("_Made")
_WRONG = (AttributeError, LookupError, TypeError, ValueError, OverflowError, RecursionError)
"""What comes of a value of the wrong shape."""


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
    came_with: list[tuple[str, ScoreRecord]] = []
    """What came with it or was imported, with the version; also where a scorer of that name has run since."""
    score: float | None = None
    """What the score that counts (`Choices.score`) says of the whole episode; None if it is not known."""

    @property
    def record(self) -> EpisodeRecord:
        """The episode as a record."""
        return self.episode.record

    @property
    def computed(self) -> list[ScoreRecord]:
        """The scores that were computed here."""
        return [score for version, score in self.episode.scores if version not in FROM_ELSEWHERE]

    def is_learned_from(self, index: int) -> bool:
        """Whether a step is a decision of the policy that may be learned from."""
        step = self.record.steps[index]
        return step.trainable and step.is_active and not step.is_copied_context and index not in self.dropped_S

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

    score: str | None = None
    """The score that counts: of pairs, of labels, and in a format's own column of the score. None takes the credit's,
    or `env_return` without credit (`lake.judgements.scores.find_score`)."""
    pairs: Literal["siblings", "anchors"] = "siblings"
    """Preference pairs of whole episodes of a group, or of the decisions taken in one anchor state."""
    threshold: float | None = None
    """Label of an unpaired row: the score reaches it; None: the score is above the mean of its group."""


@dataclass
class Losses:
    """What a format has no place for: what -> how often."""

    counts: Counter[str] = field(default_factory=Counter)
    names: dict[str, list[str]] = field(default_factory=dict)
    """Of what has names: some of them."""

    def add(self, what: str, number: int = 1) -> None:
        """Count something that is left out."""
        if number:
            self.counts[what] += number

    def add_names(self, what: str, names: Iterable[str]) -> None:
        """Count things that have names."""
        known = self.names.setdefault(what, [])
        for name in sorted(names):
            self.add(what)
            if name not in known and len(known) < NAMES_TOLD:
                known.append(name)

    def update(self, other: "Losses") -> None:
        """Add what another one has counted."""
        self.counts.update(other.counts)
        for what, names in other.names.items():
            self.names[what] = list(dict.fromkeys((*self.names.get(what, ()), *names)))[:NAMES_TOLD]


Convert = Callable[[Sequence[Exported], Choices, Losses], Iterable[Row]]
"""The rows of one group of siblings, in order."""


@dataclass(frozen=True)
class Target:
    """One format out."""

    name: str
    description: str
    container: Container
    """jsonl: a row is a line. parquet, sqlite: of a table. tree: {"path": below the folder, "text": of a file, "id": of
    its episode}."""
    convert: Convert
    schema: Callable[[], Any] | None = None
    """Of a Parquet file (an Arrow schema), or of SQLite (statements, the last of which inserts a row)."""
    schema_of: Callable[[Iterable[Row]], tuple[Any, Callable[[Row], Row]]] | None = None
    """Of a Parquet file whose columns are what its rows have; and how a row is made to fit them."""
    holds: frozenset[str] = frozenset()
    """Which of tokens, spans and advantages have a place in it; the others are not read, and told as left out."""
    has_score: bool = True
    """Whether its rows depend on the score that counts; facts do not."""
    goes_by_score: bool = False
    """No row can be made of episodes without the score that was chosen."""
    finish: Callable[[Path], None] | None = None
    """What a tree needs once all of its files are there: an index."""


def each(convert: Callable[[Exported, Losses], Row | None]) -> Convert:
    """A target whose rows are episodes."""

    def rows(group: Sequence[Exported], _: Choices, losses: Losses) -> Iterable[Row]:
        for exported in group:
            if (row := convert(exported, losses)) is not None:
                yield row

    return rows


def put_back(
    make: Callable[[Sequence[Exported], Losses], _Made], episodes: Sequence[Exported], losses: Losses
) -> _Made:
    """What a target makes of episodes that came from its own format, of which it puts back what the reader kept.

    Lines of ours may name any format and hold anything in its place. What is not what the reader keeps is written like
    an episode of another source.
    """
    told = Losses()
    try:
        made = make(episodes, told)
    except _WRONG:
        told = Losses()
        made = make([_stranger(exported) for exported in episodes], told)
    losses.update(told)
    return made


def _stranger(exported: Exported) -> Exported:
    """The same episode, of no known source."""
    replace = msgspec.structs.replace
    record = replace(exported.record, source_format="unknown")
    return replace(exported, episode=replace(exported.episode, record=record))


def file_name(text: str) -> str:
    """A text of a source as a part of a path; different texts have different names.

    What a path may not hold is `_`, and what is long is cut; what was changed has a hash of the text behind it.
    """
    clean = _UNSAFE.sub("_", text)[:_LONGEST_NAME].strip(".")
    is_read = clean not in _NOT_READ and not clean.startswith("_") and not clean.endswith(_UNFINISHED)
    if clean == text and clean and is_read and not _MARKED.search(clean):
        return clean
    return f"{clean.lstrip('._') or 'x'}-{ids.to_text(ids.text_hash(text))}"


class Call(NamedTuple):
    """A tool call, whichever shape its source has."""

    id: str | None
    name: str | None
    raw: Any
    """Its arguments as they are."""

    @property
    def arguments(self) -> Any:
        """The arguments, decoded if they are JSON text."""
        said = decoded(self.raw) if isinstance(self.raw, str) else None
        return self.raw if said is None else said


def call_of(call: Any) -> Call:
    """What a tool call says."""
    outer: Row = call if isinstance(call, dict) else {}
    inner: Row = next((outer[part] for part in ("function", "custom") if isinstance(outer.get(part), dict)), outer)
    call_id, name = outer.get("id"), inner.get("name")
    raw = inner.get("arguments", inner.get("input"))
    return Call(call_id if isinstance(call_id, str) else None, name if isinstance(name, str) else None, raw)


def by_rollout(group: Iterable[Exported]) -> list[Exported]:
    """Siblings by their numbers: readers of formats that have no place for these count them as they come."""
    return sorted(group, key=lambda one: (one.record.rollout_index, one.record.attempt, one.record.agent_id or ""))


def answer(step: StepRecord) -> Row:
    """A decision as the assistant's message that it was."""
    extra = dict(step.extra or {})
    message: Row = {"role": "assistant", "content": extra.pop("content", step.action)}
    if step.reasoning is not None:
        message["reasoning_content"] = step.reasoning
    if step.tool_calls is not None:
        message["tool_calls"] = step.tool_calls
    return _well_formed(extra | message)


def prompts(record: EpisodeRecord) -> list[list[Row]]:
    """Of every step: the messages that were added before it, since the step that it goes on from."""
    added = []
    for index, step in enumerate(record.steps):
        since = [*(record.initial_messages or []), *step.context] if index == 0 else step.context
        if not since and step.state:
            since = [{"role": step.state_role or "user", "content": step.state}]
        added.append([_well_formed(message) for message in since])
    return added


def befores(record: EpisodeRecord) -> list[int | None]:
    """Of every step: the one that it goes on from; None where a conversation begins.

    Agents that take turns are one chat here, unless a step's notes say what it goes on from.
    """
    origins = [Origin.of(step.extra or {}) for step in record.steps]
    if not any(origin.opens or origin.follows is not None for origin in origins):
        return [index - 1 if index else None for index in range(len(origins))]
    return predecessors((index, step.agent_id, origins[index]) for index, step in enumerate(record.steps))


def path(record: EpisodeRecord) -> list[int]:
    """The steps of the conversation that the last step ends, in order: all of them, unless a history was rewritten."""
    before = befores(record)
    found = []
    index = len(before) - 1 if before else None
    while index is not None:
        found.append(index)
        index = before[index]
    return found[::-1]


def _well_formed(message: Row) -> Row:
    """A message as chats have them: lines of ours may hold any object in its place."""
    role, content = message.get("role"), message.get("content")
    calls, reasoning = message.get("tool_calls"), message.get("reasoning_content")
    is_plain = isinstance(role, str) and isinstance(content, str | None) and isinstance(reasoning, str | None)
    if is_plain and isinstance(calls, list | None):
        return message
    made = message | {"role": role if isinstance(role, str) else "user"}
    if isinstance(content, list):
        made["content"] = [part if _is_part(part) else {"type": "text", "text": json_text(part)} for part in content]
    elif not isinstance(content, str | None):
        made["content"] = json_text(content)
    if not isinstance(calls, list):
        made.pop("tool_calls", None)
    if not isinstance(reasoning, str | None):
        made["reasoning_content"] = json_text(reasoning)
    return made


def _is_part(part: Any) -> bool:
    return isinstance(part, str) or (isinstance(part, dict) and isinstance(part.get("type", "text"), str))


def first_prompt(record: EpisodeRecord) -> list[Row]:
    """The messages before the first decision of the chat."""
    return prompts(record)[path(record)[0]]


def last_words(record: EpisodeRecord) -> list[Row]:
    """The messages after the last decision."""
    return [_well_formed(message) for message in record.final_observation or ()]


def is_decision(step: StepRecord) -> bool:
    """Whether a step is one, and does not only stand for an outcome."""
    return step.trainable or bool(step.action) or bool(step.tool_calls)


def conversation(record: EpisodeRecord) -> list[Row]:
    """The chat of an episode as it stood in the end."""
    messages: list[Row] = []
    since = prompts(record)
    for index in path(record):
        messages += since[index]
        if is_decision(record.steps[index]):
            messages.append(answer(record.steps[index]))
    return messages + last_words(record)


def learned(exported: Exported, losses: Losses) -> list[int | None]:
    """Of every message of the chat: 0 if it is a decision that is not learned from; tells of steps with another."""
    weights: list[int | None] = []
    record = exported.record
    since, chosen = prompts(record), path(record)
    losses.add("steps of conversations that were left", len(record.steps) - len(chosen))
    for index in chosen:
        weights += [None] * len(since[index])
        if is_decision(record.steps[index]):
            weights.append(None if exported.is_learned_from(index) else 0)
    return weights + [None] * len(last_words(record))
