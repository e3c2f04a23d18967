"""Declarations: a format that only maps a tool's file to episodes is one TOML file, and this is the reader of all.

`docs/guides/bring-your-trajectories.md` explains the keys with an example, and `lake/formats/declared` holds the
declarations that come with Trajlake. Expressions are JMESPath (jmespath.org), with the functions of `_Functions`.

An entry of a rollout becomes messages by the first rule that takes it; messages become decisions by the one rule of
`lake.formats.chat.messages`. Whatever no expression mentions is kept: fields of a rollout in `extra` of its episode,
fields of an entry in `extra` of its step or with its message. An entry that no rule takes is reported as unknown.
"""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from fnmatch import fnmatchcase
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import jmespath
import msgspec
from jmespath.exceptions import JMESPathError
from jmespath.functions import Functions, signature

from lake.errors import FormatError
from lake.formats.base.archives import connect_read_only
from lake.formats.base.fields import (
    ScoreList,
    as_object,
    choose_rollout_index,
    hash_rollout_index,
    make_prompt_task_id,
    parse_finite,
    parse_number,
    parse_time,
)
from lake.formats.base.format import FileHead, Format, Item, RunFolder, find_folder_above, get_parent_folder
from lake.formats.base.format import get_rollouts_folder as get_rollouts
from lake.formats.base.json_array import Element
from lake.formats.base.rows import (
    ShapeError,
    convert_value,
    group_pieces,
    make_element,
    read_companion,
    read_values,
    read_with_partial,
    report_unknown,
)
from lake.formats.base.source import Input, get_stem, read_lines
from lake.formats.chat.data_sets import normalise_messages, parse_answers_from
from lake.formats.chat.messages import Message, join_text, make_tool_call
from lake.formats.chat.sessions import set_chat_fields
from lake.records import EpisodeRecord, Reject, StepRecord, TokensRecord

FOLDER = Path(__file__).with_name("declared")
_COMPANIONS = 20_000
"""Files that a declaration may read next to one file."""
_UNKNOWN_SHOWN = 8

# ---------------------------------------------------------------- the keys of a declaration


class _Mapped(msgspec.Struct, forbid_unknown_fields=True, rename={"source": "from"}):
    """An expression whose text is replaced by a name of the lake's."""

    source: str
    map: dict[str, Any]
    default: Any = None


class _Recognition(msgspec.Struct, forbid_unknown_fields=True):
    kinds: list[Literal["lines", "array", "object", "parquet", "sqlite", "text"]]
    keys: list[str] = []
    where: str | None = None
    file: str | None = None
    text: str | None = None
    """A regular expression that the beginning of a text file has."""


class _Companion(msgspec.Struct, forbid_unknown_fields=True):
    into: str
    files: str
    of: str = "@"


class _Reading(msgspec.Struct, forbid_unknown_fields=True):
    unit: Literal["value", "file"] = "value"
    each: str = "@"
    group: str | None = None
    query: str | None = None
    record: str | None = None
    entry: str | None = None
    companions: list[_Companion] = []


class _Rule(msgspec.Struct, forbid_unknown_fields=True):
    make: list[str] = []
    where: str = "@"
    skip: bool = False
    context: Literal["new"] | None = None


class _Messages(msgspec.Struct, forbid_unknown_fields=True, rename={"entries": "list"}):
    entries: str = "messages"
    prompt: str | None = None
    rules: list[_Rule] = []


class _Document(msgspec.Struct, forbid_unknown_fields=True):
    """A declaration as its file has it."""

    name: str
    description: str
    source: str
    recognise: _Recognition
    messages: _Messages = msgspec.field(default_factory=_Messages)
    read: _Reading = msgspec.field(default_factory=_Reading)
    episode: dict[str, str | _Mapped] = {}
    scores: dict[str, str] = {}
    whole: bool = False
    run: str | None = None


_EPISODE_FIELDS = frozenset(EpisodeRecord.__struct_fields__) - {"steps", "spans", "scores", "source_format"}
_STEP_FIELDS = frozenset(StepRecord.__struct_fields__) - {"context", "extra", "state", "action"}
_FUNCTION_NAMES = "call, concat, decode, file, if, match, root, scale, texts"

# ---------------------------------------------------------------- expressions

FieldPath = tuple[str, ...]
"""Keys from a value to a field in it; `*` stands for each element of a list."""
_Method = TypeVar("_Method", bound=Callable[..., Any])
_EMPTY: tuple[Any, ...] = (None, False, "", [], {})
"""Values that JMESPath takes for false; a number is true."""
_ANY: dict[str, Any] = {"types": []}


def _takes(*arguments: dict[str, Any]) -> Callable[[_Method], _Method]:
    """Declare the types of a function's arguments."""
    return signature(*arguments)  # type: ignore[no-any-return]


def _is_true(value: Any) -> bool:
    return not any(value is empty or (type(value) is type(empty) and value == empty) for empty in _EMPTY)


class _Functions(Functions):  # type: ignore[misc]
    """The functions that expressions have besides JMESPath's own."""

    def __init__(self) -> None:
        self.file: Path | None = None
        self.root: Any = None

    @_takes({"types": ["string"]})
    def _func_file(self, part: str) -> str | None:
        """Return `name`, `stem` or `folder` (its name) of the file."""
        if self.file is None:
            return None
        names = {"name": self.file.name, "stem": get_stem(self.file), "folder": self.file.absolute().parent.name}
        return names.get(part)

    @_takes()
    def _func_root(self) -> Any:
        """Return the whole value in which the rollout is."""
        return self.root

    @_takes(_ANY)
    def _func_decode(self, text: Any) -> Any:
        """Return the value of JSON text; null for another text, and a value that is no text as it is."""
        if not isinstance(text, str):
            return text
        try:
            return msgspec.json.decode(text)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return None

    @_takes(_ANY, _ANY, _ANY)
    def _func_if(self, condition: Any, positive: Any, negative: Any) -> Any:
        """Return the second argument if the first is true in JMESPath's sense, else the third."""
        return positive if _is_true(condition) else negative

    @_takes({"types": ["number", "null"]}, {"types": ["number"]})
    def _func_scale(self, number: float | None, factor: float) -> float | None:
        """Return a number times a factor: milliseconds as seconds."""
        return None if number is None else number * factor

    @_takes(_ANY, {"types": ["string"]})
    def _func_match(self, text: Any, pattern: str) -> str | None:
        """Return the first group, or the match without groups, of a regular expression; null without a match."""
        match = re.search(pattern, text) if isinstance(text, str) else None
        return match and (match[1] if match.re.groups else match[0])

    @_takes(_ANY)
    def _func_texts(self, content: Any) -> str:
        """Return the joined text of a message's content."""
        return join_text(content, "\n") if isinstance(content, str | list) else ""

    @_takes(_ANY, _ANY, _ANY)
    def _func_call(self, name: Any, arguments: Any, call_id: Any) -> dict[str, Any] | None:
        """Return a call of a tool; null if it has no name."""
        return make_tool_call(name, arguments, call_id) if isinstance(name, str) else None

    @_takes({"types": [], "variadic": True})
    def _func_concat(self, *parts: Any) -> list[Any]:
        """Return the elements of lists and other values in one list, without nulls."""
        lists = (part if isinstance(part, list) else [part] for part in parts)
        return [element for elements in lists for element in elements if element is not None]


class _Expression:
    """A compiled expression, and the paths of the fields that it reads."""

    def __init__(self, text: str, location: str) -> None:
        self.text = text
        try:
            self._compiled = jmespath.compile(text)
        except JMESPathError as error:
            reason = str(error).partition("\n")[0]
            raise ShapeError(f"`{location}` is {text!r}, no expression of JMESPath: {reason}") from error
        taken: set[FieldPath] = set()
        results = _find_paths(self._compiled.parsed, taken)
        self.paths = frozenset(taken | set(results))

    def search(self, value: Any, options: Any) -> Any:
        """Return what the expression gives. Raises ShapeError: a value in it has the wrong type."""
        try:
            return self._compiled.search(value, options=options)
        except JMESPathError as error:
            reason = str(error).partition("\n")[0]
            raise ShapeError(f"the declaration's expression {self.text!r} does not fit: {reason}") from error


def _find_paths(node: dict[str, Any], taken: set[FieldPath]) -> list[FieldPath]:  # noqa: PLR0911 - kinds of nodes
    """Return the paths that a node of an expression gives; what it reads besides is added to `taken`."""
    kind, children = node["type"], node["children"]
    if kind == "field":
        return [(node["value"],)]
    if kind in ("current", "identity"):
        return [()]
    if kind == "index":
        return [("*",)]
    if kind in ("subexpression", "pipe", "index_expression", "projection", "value_projection", "filter_projection"):
        paths = _find_paths(children[0], taken)
        mark: FieldPath = ("*",) if kind.endswith("projection") else ()
        for child in children[1:]:
            inner: set[FieldPath] = set()
            ends = _find_paths(child, inner)
            if kind == "filter_projection" and child is children[2]:
                inner |= set(ends)
                ends = []
            taken |= {path + mark + end for path in paths for end in inner}
            if child is children[1]:
                results = [path + mark + end for path in paths for end in ends]
            elif ends:
                results = [path + end for path in results for end in ends]
        return results
    if kind in ("flatten", "slice"):
        return _find_paths(children[0], taken) if children else [()]
    if kind == "or_expression":
        return [path for child in children for path in _find_paths(child, taken)]
    for child in children:  # an object, a list, a call, a comparison: a new value
        taken |= set(_find_paths(child, taken))
    return []


def omit_paths(value: Any, paths: frozenset[FieldPath]) -> Any:
    """Return what is left of a value without the fields at some paths and without nulls; None if nothing is."""
    if () in paths or value is None:
        return None
    if isinstance(value, dict):
        rest = {}
        for key, field in value.items():
            inner = frozenset(path[1:] for path in paths if path[0] in (key, "*"))
            if (left := omit_paths(field, inner) if inner else field) is not None:
                rest[key] = left
        return rest or None
    if isinstance(value, list):
        inner = frozenset(path[1:] for path in paths if path[0] == "*")
        lefts = [omit_paths(element, inner) for element in value] if inner else value
        return lefts if any(left is not None for left in lefts) else None
    return value


# ---------------------------------------------------------------- reading


class Declaration:
    """A declared format. Raises FormatError: the declaration is not valid."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.document = msgspec.toml.decode(path.read_bytes(), type=_Document)
        except OSError as error:
            raise FormatError(f"the declaration {path} cannot be read: {error.strerror}") from error
        except (msgspec.MsgspecError, ValueError) as error:
            raise FormatError(f"the declaration {path} is not valid: {error}; see the guide on own formats") from error
        names = [name for name in self.document.episode if name not in _EPISODE_FIELDS | {"identity"}]
        if names:
            valid = ", ".join(sorted(_EPISODE_FIELDS | {"identity"}))
            raise FormatError(f"the declaration {path} has `episode.{names[0]}`; valid: {valid}")
        self._functions = _Functions()
        self._options = jmespath.Options(custom_functions=self._functions)

    @property
    def format(self) -> Format:
        """The format that the declaration describes."""
        run = self.document.run
        folders: dict[str | None, RunFolder | None] = {
            None: None,
            "parent": get_parent_folder,
            "rollouts": get_rollouts,
        }
        return Format(
            self.document.name,
            self.document.description,
            self.recognise,
            self.read,
            is_whole=self.document.whole,
            run_folder=folders[run] if run in folders else find_folder_above(str(run)),
        )

    def check(self) -> None:
        """Compile all expressions. Raises FormatError: one is not valid."""
        try:
            _ = self._compiled
        except ShapeError as error:
            raise FormatError(f"the declaration {self.path} is not valid: {error}") from error

    @cached_property
    def _where(self) -> _Expression | None:
        where = self.document.recognise.where
        return None if where is None else _Expression(where, "recognise.where")

    @cached_property
    def _compiled(self) -> "_Compiled":
        return _Compiled(self.document)

    def recognise(self, head: FileHead) -> bool:
        """Return whether a file looks like this format."""
        recognition = self.document.recognise
        kind = "text" if head.kind == "other" else head.kind
        is_lone = head.kind == "lines" and len(head.values) == 1 and "object" in recognition.kinds
        has_kind = kind in recognition.kinds or is_lone
        has_name = recognition.file is None or fnmatchcase(head.path.name, recognition.file)
        has_text = recognition.text is None or re.search(recognition.text, head.text, re.MULTILINE) is not None
        if not (has_kind and has_name and has_text):
            return False
        if head.kind in ("parquet", "sqlite"):
            return set(head.names).issuperset(recognition.keys)
        if self._where is None:
            return head.has(*recognition.keys) if recognition.keys else recognition != _Recognition(recognition.kinds)
        self._functions.file = head.path
        values = (value for value in head.objects if value.keys() >= set(recognition.keys))
        try:
            return any(_is_true(self._where.search(value, self._options)) for value in values)
        except ShapeError:
            return False

    def read(self, file: Input) -> Iterator[Item]:
        """Read the records and rejects of a file."""
        self._functions.file = file.path
        for item, is_partial in self._read_values(file):
            convert = partial(self._build_records, file=file, is_partial=is_partial)
            yield from convert_value(item, self.document.name, convert)

    def _read_values(self, file: Input) -> Iterator[tuple[Element | Reject, bool]]:
        """Read the values of a file, each with whether it is the readable part of a cut document."""
        reading = self.document.read
        items: Iterator[Element | Reject]
        if reading.query is not None:
            items = _read_query(file, reading.query)
        elif reading.record is not None:
            items = _read_text(file, re.compile(reading.record), re.compile(reading.entry or "(?P<text>.*)"))
        elif reading.group is not None:
            items = self._read_groups(file)
        elif reading.unit == "file":
            items = _read_lines(file)
        elif self.document.whole:
            yield from read_with_partial(file, *sorted({path[0] for path in self._compiled.entries.paths if path}))
            return
        else:
            items = read_values(file)
        yield from ((item, False) for item in items)

    def _read_groups(self, file: Input) -> Iterator[Element | Reject]:
        """Read the lines of each group, which may be anywhere in the file, as one value `{lines: [...]}`."""
        group = self._compiled.group
        rejects: list[Element | Reject] = []

        def split() -> Iterator[tuple[str, bytes]]:
            for item in read_values(file):
                key = None if isinstance(item, Reject) or item.problem else group.search(item.value, self._options)
                if isinstance(item, Element) and key is not None:
                    yield json.dumps(key), msgspec.json.encode((item.index, item.value))
                else:
                    rejects.append(item)

        for _, pieces in group_pieces(split()):
            lines = [msgspec.json.decode(piece) for piece in pieces]
            yield Element(lines[0][0], {"lines": [line for _, line in lines]}, source=None)
        for item in rejects:
            yield (
                item
                if isinstance(item, Reject)
                else Element(item.index, item.value, item.problem or f"`{group.text}` gives no group", source=item.raw)
            )

    def _build_records(self, value: Any, *, file: Input, is_partial: bool) -> list[EpisodeRecord]:
        self._functions.root = value
        for companion, of in self._compiled.companions:
            targets = of.search(value, self._options)
            for target in targets if isinstance(targets, list) else [targets]:
                if isinstance(target, dict):
                    target[companion.into] = _read_companions(file.path.parent, companion.files, target)
        rollouts = self._compiled.each.search(value, self._options)
        is_nested = self.document.read.each != "@"
        outside = omit_paths(value, self._compiled.each.paths) if is_nested else None
        records: list[EpisodeRecord] = []
        for rollout in rollouts if isinstance(rollouts, list) and is_nested else [rollouts]:
            record = self._build_record(rollout, file)
            if is_partial:
                record.status, record.extra = "aborted", (record.extra or {}) | {"is_cut": True}
            if outside is not None and not records:
                record.extra = (record.extra or {}) | {"document": outside}
            records.append(record)
        return records

    def _build_record(self, rollout: Any, file: Input) -> EpisodeRecord:
        compiled, options = self._compiled, self._options
        entries = compiled.entries.search(rollout, options)
        if entries is not None and not isinstance(entries, list):
            raise ShapeError(f"`{compiled.entries.text}` is {type(entries).__name__}; valid: a list")
        messages, skipped, unknown = self._make_messages(entries or [], file)
        prompt = compiled.prompt.search(rollout, options) if compiled.prompt else None
        prompt_messages = normalise_messages(prompt, "the prompt") if prompt else []
        chat = parse_answers_from([*prompt_messages, *messages], len(prompt_messages), location=compiled.entries.text)
        for step in chat.steps:
            _set_step_fields(step)
        extra = as_object(omit_paths(rollout, compiled.paths))
        extra |= {"events": skipped} if skipped else {}
        extra |= {"unknown_entries": unknown} if unknown else {}
        fields = {name: self._read_field(name, rollout) for name in compiled.episode}
        identity = fields.pop("identity", None)
        record = EpisodeRecord(task_id="", steps=[], extra=extra or None)
        for name, field in fields.items():
            if field is not None:
                setattr(record, name, _convert_field(EpisodeRecord, name, field))
        set_chat_fields(record, chat)
        scores = ScoreList()
        for scorer, expression in compiled.scores.items():
            score = expression.search(rollout, options)
            pairs = as_object(score).items() if scorer == "*" else [(scorer, score)]
            for name, number in pairs:
                if number is not None:
                    scores.add(name, number)
        record.scores = scores.records
        if fields.get("task_id") is None:
            question = next(
                (join_text(m.get("content"), "\n") for m in chat.initial_messages if m["role"] == "user"), ""
            )
            record.task_id = make_prompt_task_id(question)
        if identity is not None:
            record.rollout_index = hash_rollout_index(identity if isinstance(identity, str) else json.dumps(identity))
        elif not self.document.whole:
            record.rollout_index = choose_rollout_index(
                file, fields.get("rollout_index"), record.run_id, record.collection_round, record.task_id
            )
        return record

    def _read_field(self, name: str, rollout: Any) -> Any:
        expression, mapped = self._compiled.episode[name]
        field = expression.search(rollout, self._options)
        if mapped is None:
            return field
        key = field if isinstance(field, str) else json.dumps(field)
        return mapped.map.get(key, mapped.default)

    def _make_messages(self, entries: list[Any], file: Input) -> tuple[list[Message], list[Any], list[Any]]:
        """Return the messages of entries, the entries that are known to be none, and the unknown ones."""
        rules = self._compiled.rules
        if not rules:
            return normalise_messages(entries, self._compiled.entries.text, file), [], []
        messages: list[Message] = []
        skipped, unknown = [], []
        for index, entry in enumerate(entries):
            rule = next((r for r in rules if _is_true(r.where.search(entry, self._options))), None)
            if rule is None:
                fields = as_object(entry)
                kind = fields.get("type", fields.get("role"))
                report_unknown(file, "entry", [f"of type {kind}"] if isinstance(kind, str) else sorted(fields))
                unknown.append(entry)
                continue
            if rule.skip:
                skipped.append(entry)
                continue
            made = [
                message for expression in rule.make for message in _as_list(expression.search(entry, self._options))
            ]
            rest = as_object(omit_paths(entry, rule.paths))
            for position, message in enumerate(made):
                fields = {key: field for key, field in message.items() if field is not None}
                step = fields.pop("step", None)
                normalised = normalise_messages(fields, f"{self._compiled.entries.text}[{index}]")
                target = next((m for m in normalised if m.get("role") == "assistant"), normalised[0])
                target |= (rest if position == 0 else {}) | ({"step": step} if step else {})
                messages += normalised
        return messages, skipped, unknown


class _CompiledRule(msgspec.Struct):
    where: _Expression
    make: list[_Expression]
    skip: bool
    context: str | None
    paths: frozenset[FieldPath]


class _Compiled:
    """The compiled expressions of a declaration."""

    def __init__(self, document: _Document) -> None:
        self.each = _Expression(document.read.each, "read.each")
        self.group = _Expression(document.read.group or "null", "read.group")
        self.entries = _Expression(document.messages.entries, "messages.list")
        prompt = document.messages.prompt
        self.prompt = None if prompt is None else _Expression(prompt, "messages.prompt")
        self.companions = [
            (companion, _Expression(companion.of, "read.companions.of")) for companion in document.read.companions
        ]
        self.episode: dict[str, tuple[_Expression, _Mapped | None]] = {}
        for name, field in document.episode.items():
            mapped = field if isinstance(field, _Mapped) else None
            text = field.source if isinstance(field, _Mapped) else field
            self.episode[name] = _Expression(text, f"episode.{name}"), mapped
        self.scores = {name: _Expression(text, f"scores.{name}") for name, text in document.scores.items()}
        self.rules = [self._compile_rule(rule, index) for index, rule in enumerate(document.messages.rules)]
        expressions = [self.entries, *(pair[0] for pair in self.episode.values()), *self.scores.values()]
        expressions += [] if self.prompt is None else [self.prompt]
        self.paths = frozenset(path for expression in expressions for path in expression.paths)

    def _compile_rule(self, rule: _Rule, index: int) -> _CompiledRule:
        where = _Expression(rule.where, f"messages.rules[{index}].where")
        make = [_Expression(text, f"messages.rules[{index}].make") for text in rule.make]
        paths = frozenset(path for expression in (where, *make) for path in expression.paths if path)
        return _CompiledRule(where, make, rule.skip, rule.context, paths)


def _as_list(made: Any) -> list[dict[str, Any]]:
    messages = made if isinstance(made, list) else [made]
    return [message for message in messages if isinstance(message, dict)]


def _set_step_fields(step: StepRecord) -> None:
    """Set the columns that a rule's `step` names on a step."""
    extra = step.extra or {}
    fields = as_object(extra.pop("step", None))
    for name, field in fields.items():
        if field is None:
            continue
        if name in _STEP_FIELDS:
            setattr(step, name, _convert_field(StepRecord, name, field))
        else:
            extra[name] = field
    step.extra = extra or None


_TIMES = frozenset(("started_at", "ended_at"))
_REALS = frozenset(("env_return", "reward", "cost", "latency", "value_estimate", "final_value_estimate"))


def _convert_field(record: type, name: str, field: Any) -> Any:
    """Return a field with the type of its column. Raises ShapeError: it has another type."""
    converted: Any = None
    if name in _TIMES:
        converted = parse_time(field)
    elif name in _REALS:
        converted = parse_finite(field)
        if converted is None and parse_number(field) is not None:
            return None  # NaN is no return
    elif name == "tokens":
        return msgspec.convert(field, TokensRecord)
    else:
        column = next(f for f in msgspec.structs.fields(record) if f.name == name)
        is_text = not isinstance(field, str) and isinstance(field, int) and "str" in str(column.type)
        try:
            return msgspec.convert(str(field) if is_text else field, column.type)
        except msgspec.ValidationError as error:
            raise ShapeError(f"`{name}` is {field!r}: {error}") from error
    if converted is None:
        raise ShapeError(f"`{name}` is {field!r}; valid: {'a time' if name in _TIMES else 'a number'}")
    return converted


def _read_companions(folder: Path, pattern: str, target: dict[str, Any]) -> list[Any]:
    """Return the JSON documents of the files that belong to an object, in the order of their names."""

    def fill(match: re.Match[str]) -> str:
        name = str(target.get(match[1], ""))
        if not name or name in (".", "..") or re.search(r"[/\\*?\[\x00]", name):
            raise ShapeError(f"`{match[1]}` is {name!r}, which names no file of {pattern}")
        return name

    steps, _, name = re.sub(r"\{(\w+)\}", fill, pattern).rpartition("/")
    documents = []
    for path in sorted((folder / steps).glob(name))[: _COMPANIONS + 1]:
        document, fault = read_companion(path)
        if fault is not None:
            raise ShapeError(fault)
        documents.append(document)
    if len(documents) > _COMPANIONS:
        raise ShapeError(f"more than {_COMPANIONS:,} files match {pattern}; read the export of the tool instead")
    return documents


def _read_lines(file: Input) -> Iterator[Element | Reject]:
    """Read the rejects of a file's lines, and all other lines as one value."""
    lines, lost = [], 0
    for item in read_values(file, by_line=True):
        if isinstance(item, Element) and item.problem is None and isinstance(item.value, dict):
            lines.append(item.value)
            continue
        lost += 1
        if isinstance(item, Element):
            problem = item.problem or f"Expected `object`, got `{type(item.value).__name__}`"
            item = Reject(position=item.index, reason="invalid", message=problem, raw=item.raw)  # noqa: PLW2901
        yield item
    if lines or not lost:
        yield make_element({"lines": lines} | ({"lost_lines": lost} if lost else {}))


def _read_query(file: Input, query: str) -> Iterator[Element | Reject]:
    """Read the rows of a query of an SQLite file as objects."""
    import sqlite3

    index = 0
    try:
        with closing(connect_read_only(file.path)) as database:
            database.text_factory = lambda content: content.decode("utf-8", "replace")
            cursor = database.execute(query)
            names = [column[0] for column in cursor.description]
            for row in cursor:
                yield Element(index, dict(zip(names, row, strict=True)), source=None)
                index += 1
    except (sqlite3.Error, OSError) as error:
        message = f"the SQLite file cannot be read from row {index} on: {error}"
        yield Reject(position=index, reason="malformed", message=message, raw="")


def _read_text(file: Input, record: re.Pattern[str], entry: re.Pattern[str]) -> Iterator[Element | Reject]:
    """Read a text file: a line that matches `record` begins a value, whose other lines are its entries.

    Lines of one kind in a row are one entry.
    """
    value: dict[str, Any] | None = None
    start = 0
    for item in read_lines(file):
        if isinstance(item, Reject):
            yield item
            continue
        number, raw = item
        line = raw.decode("utf-8", "replace").rstrip("\r\n")
        if (match := record.match(line)) is not None:
            if value is not None:
                yield Element(start, value, source=json.dumps(value))
            value, start = match.groupdict() | {"entries": []}, number
        elif value is not None and (match := entry.match(line)) is not None:
            fields = match.groupdict()
            text = fields.pop("text", "") or ""
            entries = value["entries"]
            if entries and all(entries[-1].get(key) == field for key, field in fields.items()):
                entries[-1]["text"] += f"\n{text}"
            else:
                entries.append(fields | {"text": text})
    if value is not None:
        yield Element(start, value, source=json.dumps(value))


def load_declared() -> list[Format]:
    """Return the declared formats that come with Trajlake, by name."""
    return [Declaration(path).format for path in sorted(FOLDER.glob("*.toml"))]


def load_declaration(path: Path) -> Format:
    """Return the format of a user's declaration. Raises FormatError: the declaration is not valid."""
    declaration = Declaration(path)
    declaration.check()
    return declaration.format
