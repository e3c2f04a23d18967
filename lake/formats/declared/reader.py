"""The reader of all declared formats (`lake.formats.declared`).

Expressions are JMESPath (jmespath.org), with the functions of `ExpressionFunctions`. An entry of a rollout becomes
messages by the first rule that takes it; messages become decisions by the one rule of `lake.formats.chat.messages`.
Fields that no expression mentions are kept: those of a rollout in `extra` of its episode, those of an entry in `extra`
of its step or with its message. An entry that no rule takes is reported as unknown.
"""

import json
import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import jmespath
import msgspec
from jmespath.exceptions import JMESPathError
from jmespath.functions import Functions, signature

from lake.formats.base.archives import connect_read_only
from lake.formats.base.entries import split_rewinds, split_runs, split_threads, split_tree
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
from lake.formats.base.format import FileHead, Item
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
from lake.formats.chat.sessions import mark_copies, open_contexts, order_results, set_chat_fields
from lake.formats.declared.document import DeclarationDocument, MappedField, MessageRule, Recognition
from lake.records import EpisodeRecord, Reject, StepRecord, TokensRecord

_COMPANIONS = 20_000
"""Files that a declaration may read next to one file."""
_OPENS = "opens_context"
"""Key of a made message with which the context starts again."""
_STEP_FIELDS = frozenset(StepRecord.__struct_fields__) - {"context", "extra", "state", "action"}

# ---------------------------------------------------------------- expressions

FieldPath = tuple[str, ...]
"""Keys from a value to a field in it; `*` stands for each element of a list."""
_Method = TypeVar("_Method", bound=Callable[..., Any])
_EMPTY: tuple[Any, ...] = (None, False, "", [], {})
"""Values that JMESPath takes for false; a number is true."""
_ANY: dict[str, Any] = {"types": []}
_LIST: dict[str, Any] = {"types": ["array"]}
_FIELD: dict[str, Any] = {"types": ["expref"]}


def _takes(*arguments: dict[str, Any]) -> Callable[[_Method], _Method]:
    """Declare the types of a function's arguments."""
    return signature(*arguments)  # type: ignore[no-any-return]


def is_true(value: Any) -> bool:
    """Return whether a value is true in JMESPath's sense: not null, false, or empty."""
    return not any(value is empty or (type(value) is type(empty) and value == empty) for empty in _EMPTY)


class ExpressionFunctions(Functions):  # type: ignore[misc]
    """The functions that expressions have besides JMESPath's own, and what they know of the file that is read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.root: Any = None
        self.options = jmespath.Options(custom_functions=self)

    @_takes({"types": ["string"]})
    def _func_file(self, part: str) -> str | None:
        """Return `name`, `stem` or `folder` (its name) of the file."""
        names = {"name": self.path.name, "stem": get_stem(self.path), "folder": self.path.absolute().parent.name}
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
        return positive if is_true(condition) else negative

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

    @_takes(_ANY)
    def _func_task(self, text: Any) -> str | None:
        """Return the task of a prompt: the hash of its text; null without one."""
        return make_prompt_task_id(text) if text else None

    @_takes(_LIST, _FIELD)
    def _func_runs(self, entries: list[Any], is_start: Any) -> list[Any]:
        """Return `entries` of each run of a list; a run begins at each entry for which the field is true."""
        return split_runs(entries, lambda entry: is_true(_read(is_start)(entry)))

    @_takes(_LIST, _FIELD)
    def _func_threads(self, entries: list[Any], thread: Any) -> list[Any]:
        """Return `entries` of the main agent, then those of each other one; the field names it."""
        return split_threads(entries, _read(thread))

    @_takes(_LIST, _FIELD, _FIELD, _FIELD)
    def _func_tree(self, entries: list[Any], key: Any, parent: Any, is_decision: Any) -> list[Any]:
        """Return `entries` of each branch of a tree."""
        return split_tree(entries, _read(key), _read(parent), lambda entry: is_true(_read(is_decision)(entry)))

    @_takes(_LIST, _FIELD, _FIELD, _FIELD)
    def _func_rewinds(self, entries: list[Any], key: Any, target: Any, is_decision: Any) -> list[Any]:
        """Return `entries` as they are in the end, and of each history that an entry with a target undid."""
        return split_rewinds(entries, _read(key), _read(target), lambda entry: is_true(_read(is_decision)(entry)))


def _read(field: Any) -> Callable[[Any], Any]:
    """Return the function of a field that an expression names with `&`."""
    return lambda entry: field.visit(field.expression, entry)


class Expression:
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

    def search(self, value: Any, functions: ExpressionFunctions) -> Any:
        """Return what the expression gives. Raises ShapeError: a value in it has the wrong type."""
        try:
            return self._compiled.search(value, options=functions.options)
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


# ---------------------------------------------------------------- files


class _DeclaredFile:
    """A file of a declared format while it is read."""

    def __init__(self, declaration: "CompiledDeclaration", file: Input) -> None:
        self._declaration = declaration
        self._file = file
        self._functions = ExpressionFunctions(file.path)

    def read(self) -> Iterator[Item]:
        """Read the records and rejects of the file."""
        for item, is_partial in self._read_values():
            convert = partial(self._build_records, is_partial=is_partial)
            yield from convert_value(item, self._declaration.document.name, convert)

    def _read_values(self) -> Iterator[tuple[Element | Reject, bool]]:
        """Read the values of a file, each with whether it is the readable part of a cut document."""
        file, reading = self._file, self._declaration.document.read
        items: Iterator[Element | Reject]
        if reading.query is not None:
            items = _read_query(file, reading.query)
        elif reading.record is not None:
            items = _read_text(file, re.compile(reading.record), re.compile(reading.entry or "(?P<text>.*)"))
        elif reading.group is not None:
            items = self._read_groups()
        elif reading.unit == "file":
            items = _read_lines(file)
        elif self._declaration.document.whole:
            yield from read_with_partial(file, *sorted({path[0] for path in self._declaration.entries.paths if path}))
            return
        else:
            items = read_values(file)
        yield from ((item, False) for item in items)

    def _read_groups(self) -> Iterator[Element | Reject]:
        """Read the lines of each group, which may be anywhere in the file, as one value `{lines: [...]}`."""
        group = self._declaration.group
        rejects: list[Element | Reject] = []

        def split() -> Iterator[tuple[str, bytes]]:
            for item in read_values(self._file):
                key = None if isinstance(item, Reject) or item.problem else group.search(item.value, self._functions)
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

    def _build_records(self, value: Any, *, is_partial: bool) -> list[EpisodeRecord]:
        self._functions.root = value
        for companion, of in self._declaration.companions:
            targets = of.search(value, self._functions)
            for target in targets if isinstance(targets, list) else [targets]:
                if isinstance(target, dict):
                    target[companion.into] = _read_companions(self._file.path.parent, companion.files, target)
        rollouts = self._declaration.each.search(value, self._functions)
        is_nested = self._declaration.document.read.each != "@"
        outside = omit_paths(value, self._declaration.each.paths) if is_nested else None
        records: list[EpisodeRecord] = []
        for rollout in rollouts if isinstance(rollouts, list) and is_nested else [rollouts]:
            record = self._build_record(rollout)
            if is_partial:
                record.status, record.extra = "aborted", (record.extra or {}) | {"is_cut": True}
            if outside is not None and not records:
                record.extra = (record.extra or {}) | {"document": outside}
            records.append(record)
        if self._declaration.document.whole:
            mark_copies(records)
        return records

    def _build_record(self, rollout: Any) -> EpisodeRecord:
        compiled, functions = self._declaration, self._functions
        entries = compiled.entries.search(rollout, functions)
        if entries is not None and not isinstance(entries, list):
            raise ShapeError(f"`{compiled.entries.text}` is {type(entries).__name__}; valid: a list")
        messages, skipped, unknown = self._make_messages(entries or [])
        prompt = compiled.prompt.search(rollout, functions) if compiled.prompt else None
        prompt_messages = normalise_messages(prompt, "the prompt") if prompt else []
        messages = [*prompt_messages, *order_results(messages)]
        chat = parse_answers_from(messages, len(prompt_messages), location=compiled.entries.text)
        open_contexts(chat, lambda message: message.pop(_OPENS, False))
        for step in chat.steps:
            _set_step_fields(step)
        fields = {name: self._read_field(name, rollout) for name in compiled.episode}
        identity = fields.pop("identity", None)
        if not isinstance(identity, str | None):
            identity = json.dumps(identity)
        record = EpisodeRecord(task_id="", steps=[])
        set_chat_fields(record, chat)
        for name, field in fields.items():
            if field is not None:
                setattr(record, name, _convert_field(EpisodeRecord, name, field))
        extra = record.extra or {} if "extra" in fields else as_object(omit_paths(rollout, compiled.paths))
        extra |= {"events": skipped} if skipped else {}
        record.extra = extra | ({"unknown_entries": unknown} if unknown else {}) or None
        scores = ScoreList()
        for scorer, expression in compiled.scores.items():
            score = expression.search(rollout, functions)
            pairs = as_object(score).items() if scorer == "*" else [(scorer, score)]
            for name, number in pairs:
                if number is not None:
                    scores.add(name, number)
        record.scores = scores.records
        if not record.task_id:
            questions = (join_text(m.get("content"), "\n") for m in chat.initial_messages if m["role"] == "user")
            question = next(questions, "")
            record.task_id = make_prompt_task_id(question) if question else identity or get_stem(self._file.path)
        if identity is not None:
            record.rollout_index = hash_rollout_index(identity)
        elif not compiled.document.whole:
            record.rollout_index = choose_rollout_index(
                self._file, fields.get("rollout_index"), record.run_id, record.collection_round, record.task_id
            )
        return record

    def _read_field(self, name: str, rollout: Any) -> Any:
        expression, mapped = self._declaration.episode[name]
        field = expression.search(rollout, self._functions)
        if mapped is None:
            return field
        key = field if isinstance(field, str) else json.dumps(field)
        return mapped.map.get(key, mapped.default)

    def _make_messages(self, entries: list[Any]) -> tuple[list[Message], list[Any], list[Any]]:
        """Return the messages of entries, the entries that are known to be none, and the unknown ones."""
        rules = self._declaration.rules
        if not rules:
            return normalise_messages(entries, self._declaration.entries.text, self._file), [], []
        messages: list[Message] = []
        skipped, unknown = [], []
        opens: dict[str, Any] = {}
        for index, entry in enumerate(entries):
            rule = next((r for r in rules if is_true(r.where.search(entry, self._functions))), None)
            if rule is None:
                fields = as_object(entry)
                kind = fields.get("type", fields.get("role"))
                report_unknown(self._file, "entry", [f"of type {kind}"] if isinstance(kind, str) else sorted(fields))
                unknown.append(entry)
                continue
            if rule.context == "new":
                opens = {_OPENS: True}
            if rule.skip:
                skipped.append(entry)
                continue
            made = [
                message for expression in rule.make for message in _as_list(expression.search(entry, self._functions))
            ]
            rest = as_object(omit_paths(entry, rule.paths))
            for position, message in enumerate(made):
                fields = {key: field for key, field in message.items() if field is not None}
                step = fields.pop("step", None)
                normalised = normalise_messages(fields, f"{self._declaration.entries.text}[{index}]")
                target = next((m for m in normalised if m.get("role") == "assistant"), normalised[0])
                target |= (rest if position == 0 else {}) | ({"step": step} if step else {})
                normalised[0] |= opens
                opens = {}
                messages += normalised
        return messages, skipped, unknown


class _CompiledRule(msgspec.Struct):
    where: Expression
    make: list[Expression]
    skip: bool
    context: str | None
    paths: frozenset[FieldPath]


class CompiledDeclaration:
    """The compiled expressions of a declaration."""

    def __init__(self, document: DeclarationDocument) -> None:
        self.document = document
        recognise = document.recognise
        recognitions = [*(recognise if isinstance(recognise, list) else [recognise]), *document.without]
        self.where = {known.where: Expression(known.where, "recognise.where") for known in recognitions if known.where}
        self.each = Expression(document.read.each, "read.each")
        self.group = Expression(document.read.group or "null", "read.group")
        self.entries = Expression(document.messages.entries, "messages.list")
        prompt = document.messages.prompt
        self.prompt = None if prompt is None else Expression(prompt, "messages.prompt")
        self.companions = [
            (companion, Expression(companion.of, "read.companions.of")) for companion in document.read.companions
        ]
        self.episode: dict[str, tuple[Expression, MappedField | None]] = {}
        for name, field in document.episode.items():
            mapped = field if isinstance(field, MappedField) else None
            text = field.source if isinstance(field, MappedField) else field
            self.episode[name] = Expression(text, f"episode.{name}"), mapped
        self.scores = {name: Expression(text, f"scores.{name}") for name, text in document.scores.items()}
        self.rules = [self._compile_rule(rule, index) for index, rule in enumerate(document.messages.rules)]
        expressions = [self.entries, *(pair[0] for pair in self.episode.values()), *self.scores.values()]
        expressions += [] if self.prompt is None else [self.prompt]
        self.paths = frozenset(path for expression in expressions for path in expression.paths)

    def fits(self, head: FileHead, recognition: Recognition) -> bool:
        """Return whether the condition of a recognition holds for one of the first values with its keys."""
        functions, keys, where = (
            ExpressionFunctions(head.path),
            set(recognition.keys),
            self.where[str(recognition.where)],
        )
        try:
            return any(is_true(where.search(v, functions)) for v in head.objects if v.keys() >= keys)
        except ShapeError:
            return False

    def read(self, file: Input) -> Iterator[Item]:
        """Read the records and rejects of a file."""
        return _DeclaredFile(self, file).read()

    def _compile_rule(self, rule: MessageRule, index: int) -> _CompiledRule:
        where = Expression(rule.where, f"messages.rules[{index}].where")
        make = [Expression(text, f"messages.rules[{index}].make") for text in rule.make]
        paths = frozenset(path for expression in (where, *make) for path in expression.paths if path)
        return _CompiledRule(where, make, rule.skip, rule.context, paths)


def _as_list(made: Any) -> list[dict[str, Any]]:
    messages = made if isinstance(made, list) else [made]
    return [message for message in messages if isinstance(message, dict)]


def _set_step_fields(step: StepRecord) -> None:
    """Set the columns that a rule's `step` names on a step."""
    extra = step.extra or {}
    extra.pop(_OPENS, None)
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
