"""The keys of a declaration, the TOML file of a format (docs/guides/bring-your-trajectories.md explains them)."""

from typing import Any, Literal

import msgspec


class MappedField(msgspec.Struct, forbid_unknown_fields=True, rename={"source": "from"}):
    """An expression whose text is replaced by a name of the lake's."""

    source: str
    map: dict[str, Any]
    default: Any = None


class Recognition(msgspec.Struct, forbid_unknown_fields=True):
    """What a file of the format has; all that is given must hold."""

    kinds: list[Literal["lines", "array", "object", "parquet", "sqlite", "text"]]
    keys: list[str] = []
    where: str | None = None
    file: str | None = None
    text: str | None = None
    """A regular expression that the beginning of a text file has."""


class FileWithout(Recognition, kw_only=True, forbid_unknown_fields=True):
    """A file of the same tool without trajectories, and the sentence that says so."""

    says: str


class Companion(msgspec.Struct, forbid_unknown_fields=True):
    """JSON files next to a file: the object to which they belong, its new field, and their pattern."""

    into: str
    files: str
    of: str = "@"


class FilesBeside(msgspec.Struct, forbid_unknown_fields=True):
    """Files of lines next to a file, whose lines join its groups; `where` holds for one of their first lines."""

    files: str
    where: str


class Reading(msgspec.Struct, forbid_unknown_fields=True):
    """The values of a file, and the rollouts in them."""

    unit: Literal["value", "file"] = "value"
    each: str = "@"
    group: str | None = None
    pieces: str = "@"
    beside: FilesBeside | None = None
    query: str | None = None
    record: str | None = None
    entry: str | None = None
    companions: list[Companion] = []


class MessageRule(msgspec.Struct, forbid_unknown_fields=True):
    """The messages of an entry for which `where` holds."""

    make: list[str] = []
    where: str = "@"
    skip: bool = False
    omit: list[str] = []
    """Fields that are not kept."""
    context: Literal["new"] | None = None


class EntrySplit(msgspec.Struct, rename={"entries": "list"}, forbid_unknown_fields=True):
    """A list in an entry; each of its elements for which `where` holds begins another entry."""

    entries: str
    where: str


class MessageMapping(msgspec.Struct, forbid_unknown_fields=True, rename={"entries": "list"}):
    """The entries of a rollout, and the rules that turn them into messages."""

    entries: str = "messages"
    split: EntrySplit | None = None
    prompt: str | None = None
    rules: list[MessageRule] = []
    omit: list[str] = []
    """Fields of the rollout that are not kept: its entries have them."""


class CallMapping(msgspec.Struct, forbid_unknown_fields=True, rename={"entries": "list"}):
    """The calls of a rollout, each with its complete prompt."""

    entries: str
    prompt: str
    answer: str
    step: str = "`{}`"


class DeclarationDocument(msgspec.Struct, forbid_unknown_fields=True):
    """A declaration as its file has it."""

    name: str
    description: str
    source: str
    recognise: Recognition | list[Recognition]
    messages: MessageMapping = msgspec.field(default_factory=MessageMapping)
    read: Reading = msgspec.field(default_factory=Reading)
    episode: dict[str, str | MappedField] = {}
    scores: dict[str, str] = {}
    calls: CallMapping | None = None
    capture: str | None = None
    """What to do so that prompts and answers are in the file, for the report of the ingest."""
    spans: dict[str, str] = {}
    whole: bool = False
    run: str | None = None
    without: list[FileWithout] = []
