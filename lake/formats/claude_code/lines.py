"""The lines of a Claude Code session, typed."""

from datetime import datetime
from typing import Any

import msgspec

from lake.formats.base.fields import moment
from lake.formats.base.rows import ShapeError
from lake.formats.chat.sessions import Line, is_content, known_version

NEWEST = 2
"""Major version."""
SYNTHETIC = "<synthetic>"
"""The model of assistant messages that no model wrote."""
MAIN = ""
"""The chain of the person's own conversation."""
_SPOKEN = frozenset(("user", "assistant"))
_CHAINED = frozenset((*_SPOKEN, "system", "attachment", "progress"))


class Part(msgspec.Struct, gc=False):
    """A part of a message's content."""

    type: str
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    name: str | None = None
    tool_use_id: str | None = None
    is_error: bool | None = None
    content: Any = None

    @property
    def is_tool_use(self) -> bool:
        """Whether it calls a tool: one of the client's, or of the API's own."""
        return self.type.endswith("tool_use")


class Message(msgspec.Struct, gc=False):
    """What the API sent or was sent."""

    content: str | list[Part] | None = None
    id: str | None = None
    model: str | None = None
    stop_reason: str | None = None
    usage: dict[str, Any] | None = None

    @property
    def parts(self) -> list[Part]:
        """The parts of the content; none of a text."""
        return self.content if isinstance(self.content, list) else []


class Said(msgspec.Struct, gc=False):
    """What has to be of its type in a line."""

    type: str
    uuid: str | None = None
    parentUuid: str | None = None
    logicalParentUuid: str | None = None
    isSidechain: bool | None = None
    agentId: str | None = None
    parent_tool_use_id: str | None = None
    sessionId: str | None = None
    session_id: str | None = None
    requestId: str | None = None
    cwd: str | None = None
    version: str | None = None
    claude_code_version: str | None = None
    subtype: str | None = None
    message: Message | None = None
    isMeta: bool | None = None
    isCompactSummary: bool | None = None
    isApiErrorMessage: bool | None = None
    forkedFrom: dict[str, Any] | None = None


class Event(msgspec.Struct, gc=False):
    """A line and its place in the tree."""

    number: int
    value: dict[str, Any]
    said: Said
    at: datetime | None
    chain: str = MAIN
    parent: int = -1
    """Index of the line before."""
    node: int = -1
    """-1 of a line that has none."""

    @property
    def session(self) -> str | None:
        """The session that wrote the line first."""
        return self.said.sessionId or self.said.session_id

    @property
    def version(self) -> str | None:
        """Of the tool."""
        return self.said.version or self.said.claude_code_version

    @property
    def parts(self) -> list[Part]:
        """The parts of its message; none of a text."""
        return self.said.message.parts if self.said.message is not None else []

    @property
    def is_call(self) -> bool:
        """Whether a model wrote it."""
        said = self.said
        is_spoken = said.type == "assistant" and said.message is not None and said.message.model != SYNTHETIC
        return is_spoken and not said.isApiErrorMessage

    @property
    def is_typed(self) -> bool:
        """Whether a person wrote it."""
        said = self.said
        if said.type != "user" or said.isMeta or said.isCompactSummary:
            return False
        return not self.parts or any(part.type != "tool_result" for part in self.parts)


def event_of(line: Line) -> Event:
    """A line, typed. Raises msgspec.ValidationError, ShapeError: it is of the wrong shape; UnsupportedError."""
    said = msgspec.convert(line[1], Said)
    event = Event(line[0], line[1], said, moment(line[1].get("timestamp")))
    known_version(event.version, NEWEST, "Claude Code")
    if said.type in _SPOKEN and said.message is None:
        raise ShapeError("Object missing required field `message`")
    for index, part in enumerate(event.parts):
        if part.is_tool_use and part.name is None:
            raise ShapeError(f"Object missing required field `name` - at `$.message.content[{index}]`")
        if part.type == "tool_result" and not is_content(part.content):
            kind = type(part.content).__name__
            raise ShapeError(f"`message.content[{index}].content` is {kind}; valid: text, a list of parts, or null")
    return event


def is_chained(value: dict[str, Any]) -> bool:
    """Whether a line is part of the tree; the others are about the session."""
    kind = value.get("type")
    return (isinstance(kind, str) and kind in _CHAINED) or ("uuid" in value and "parentUuid" in value)
