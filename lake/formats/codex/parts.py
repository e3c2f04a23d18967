"""What a Codex rollout is made of: decisions, messages, other events, and parts that were taken back."""

from datetime import datetime
from typing import Any, NamedTuple

import msgspec

from lake.formats.chat.messages import Message


class Meta(msgspec.Struct):
    """What has to be of its type in what a session says of itself."""

    id: str
    cwd: str | None = None
    cli_version: str | None = None
    forked_from_id: str | None = None
    parent_thread_id: str | None = None


class Place(NamedTuple):
    """Where a line stands, and when it was written."""

    number: int
    time: datetime | None
    timestamp: Any
    """As the line says it."""


class Decision(msgspec.Struct):
    """A run of model items."""

    started_at: datetime | None
    model: str | None
    is_copied: bool
    content: list[Any] = []
    thoughts: list[str] = []
    summaries: list[str] = []
    calls: list[dict[str, Any]] = []
    waiting: list[str] = []
    """Calls whose output is to follow."""
    items: list[dict[str, Any]] = []
    extra: dict[str, Any] = {}
    usage: dict[str, Any] | None = None

    def message(self) -> Message:
        """It as a message."""
        extra = self.extra | {"items": self.items or None, "usage": self.usage}
        if self.thoughts and self.summaries:
            extra["reasoning_summary"] = "\n\n".join(self.summaries)
        return extra | {
            "role": "assistant",
            "content": self.content,
            "tool_calls": self.calls or None,
            "reasoning_content": "\n\n".join(self.thoughts or self.summaries) or None,
        }


class Event(msgspec.Struct):
    """An event that is no message."""

    kind: str
    name: str
    number: int
    """Its line."""
    started_at: datetime | None
    error: str | None
    attributes: dict[str, Any]


Entry = dict[str, Any] | Decision | Event


class Part(msgspec.Struct):
    """The session, or a part of it that was taken back."""

    position: int
    entries: list[Entry] = []
    of: "Part | None" = None
    """What it was taken from."""
    at: int = 0
    """Entries of that before it."""
    number: int = 0

    @property
    def step(self) -> int | None:
        """The last step before it."""
        before = self.of.entries[: self.at] if self.of is not None else []
        steps = sum(isinstance(entry, Decision) for entry in before)
        return steps - 1 if steps else None

    @property
    def lead(self) -> list[Entry]:
        """What came since that step."""
        found: list[Entry] = []
        for entry in reversed(self.of.entries[: self.at] if self.of is not None else []):
            if isinstance(entry, Decision):
                return found[::-1]
            if isinstance(entry, dict):
                found.append(entry)
        return (self.of.lead if self.of is not None else []) + found[::-1]
