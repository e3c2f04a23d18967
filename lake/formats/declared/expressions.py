"""Expressions of declarations: JMESPath (jmespath.org) with functions, and the fields that an expression reads.

`omit_paths` returns what expressions leave of a value, so that a reader can keep it.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jmespath
import msgspec
from jmespath.exceptions import JMESPathError
from jmespath.functions import Functions, signature

from lake.formats.base.entries import split_agents, split_rewinds, split_runs, split_threads, split_tree
from lake.formats.base.fields import as_object, make_prompt_task_id
from lake.formats.base.rows import ShapeError
from lake.formats.base.source import get_name, get_stem
from lake.formats.chat.messages import join_text, make_tool_call

FieldPath = tuple[str, ...]
"""Keys from a value to a field in it; `*` stands for each element of a list."""
ROOT = "\0root"
"""The first key of the path to a field of the whole value, from the rollout in it."""
_LEAVES: dict[str, FieldPath] = {"current": (), "identity": (), "slice": (), "index": ("*",)}
"""Paths of the nodes that have no children."""
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
        """Return `name`, `stem`, `folder` (its name) or `parent` (the name of the folder above that) of the file."""
        folder = self.path.absolute().parent
        names = {"name": get_name(self.path), "stem": get_stem(self.path), "folder": folder.name}
        return folder.parent.name if part == "parent" else names.get(part)

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
        """Return a call of a tool; null if it has no name. Raises ShapeError: its name or id is an object or a list."""
        for part, argument in (("name", name), ("id", call_id)):
            if isinstance(argument, dict | list):
                raise ShapeError(f"call(name, arguments, id) got the {part} {argument!r}; valid: text, null")
        return make_tool_call(name, arguments, call_id) if isinstance(name, str) else None

    @_takes(_ANY)
    def _func_pairs(self, fields: Any) -> list[dict[str, Any]]:
        """Return the fields of an object as objects of `key` and `value`; none for another value."""
        return [{"key": key, "value": field} for key, field in as_object(fields).items()]

    @_takes({"types": ["object"]})
    def _func_rows(self, columns: dict[str, Any]) -> list[dict[str, Any]]:
        """Return an object of lists as a list of objects. Raises ShapeError: the lists have different lengths."""
        lists = {key: column for key, column in columns.items() if isinstance(column, list)}
        if len({len(column) for column in lists.values()}) > 1:
            lengths = ", ".join(f"{key} {len(column)}" for key, column in lists.items())
            raise ShapeError(f"columns have different lengths: {lengths}")
        return [dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True)]

    @_takes({"types": ["array"]}, {"types": ["number"]})
    def _func_last(self, elements: list[Any], count: int) -> list[Any]:
        """Return the last elements of a list."""
        return elements[max(len(elements) - count, 0) :]

    @_takes({"types": ["array"]}, {"types": ["number"]})
    def _func_drop_last(self, elements: list[Any], count: int) -> list[Any]:
        """Return a list without its last elements."""
        return elements[: max(len(elements) - count, 0)]

    @_takes({"types": [], "variadic": True})
    def _func_concat(self, *arguments: Any) -> list[Any]:
        """Return the elements of lists and other values in one list, without nulls."""
        lists = (part if isinstance(part, list) else [part] for part in arguments)
        return [element for elements in lists for element in elements if element is not None]

    @_takes(_ANY)
    def _func_task(self, text: Any) -> str | None:
        """Return the task of a prompt: the hash of its text; null without one."""
        return make_prompt_task_id(text) if text else None

    @_takes(_LIST, _FIELD)
    def _func_runs(self, entries: list[Any], is_start: Any) -> list[Any]:
        """Return `entries` of each run of a list; a run begins at each entry for which the field is true."""
        return split_runs(entries, lambda entry: is_true(_read(is_start)(entry)))

    @_takes(_LIST, _FIELD, _ANY, _ANY)
    def _func_between(self, entries: list[Any], key: Any, first: Any, end: Any) -> list[Any]:
        """Return the entries from the one with the key `first` up to the one before the key `end`."""
        keys = [_read(key)(entry) for entry in entries]
        if first not in keys:
            return []
        start = keys.index(first)
        return entries[start : keys.index(end, start) if end in keys[start:] else None]

    @_takes(_LIST, _FIELD, _FIELD)
    def _func_threads(self, entries: list[Any], thread: Any, is_decision: Any) -> list[Any]:
        """Return `entries` of the main agent, then those of each other one; the field names it."""
        return split_threads(entries, _read(thread), lambda entry: is_true(_read(is_decision)(entry)))

    @_takes(_LIST, _FIELD, _FIELD)
    def _func_agents(self, entries: list[Any], agent: Any, is_decision: Any) -> list[Any]:
        """Return `agent` and `entries`, those of the agent with `own`, for each agent that decides in a list."""
        return split_agents(entries, _read(agent), lambda entry: is_true(_read(is_decision)(entry)))

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
        self.location = location
        reads: set[FieldPath] = set()
        try:
            self._compiled = jmespath.compile(text)
            results = _find_paths(self._compiled.parsed, reads)
        except JMESPathError as error:
            reason = str(error).partition("\n")[0]
            raise ShapeError(f"`{location}` is {text!r}, no expression of JMESPath: {reason}") from error
        self.paths = frozenset(reads | set(results))

    def search(self, value: Any, functions: ExpressionFunctions) -> Any:
        """Return what the expression gives. Raises ShapeError: a value in it has the wrong type."""
        try:
            return self._compiled.search(value, options=functions.options)
        except (JMESPathError, ShapeError) as error:
            reason = str(error).partition("\n")[0]
            raise ShapeError(f"`{self.location}`, {self.text!r}, does not fit the file: {reason}") from error


def _find_paths(node: dict[str, Any], reads: set[FieldPath]) -> list[FieldPath]:  # noqa: PLR0911 - kinds of nodes
    """Return the paths that a node of an expression gives; what it reads besides is added to `reads`."""
    kind, children = node["type"], node["children"]
    if kind == "field":
        return [(node["value"],)]
    if kind in _LEAVES:
        return [_LEAVES[kind]]
    if kind in ("subexpression", "pipe", "index_expression", "projection", "value_projection", "filter_projection"):
        paths = _find_paths(children[0], reads)
        mark: FieldPath = ("*",) if kind.endswith("projection") else ()
        for child in children[1:]:
            inner: set[FieldPath] = set()
            ends = _find_paths(child, inner)
            if kind == "filter_projection" and child is children[2]:
                inner |= set(ends)
                ends = []
            reads |= {path + mark + end for path in paths for end in inner}
            if child is children[1]:
                results = [path + mark + end for path in paths for end in ends]
            elif ends:
                results = [path + end for path in results for end in ends]
        return results
    if kind == "function_expression" and _check_function(node["value"]) == "root":
        return [(ROOT,)]
    if kind == "flatten":
        return _find_paths(children[0], reads) if children else [()]
    if kind == "or_expression":
        return [path for child in children for path in _find_paths(child, reads)]
    for child in children:  # an object, a list, a call, a comparison: a new value
        reads |= set(_find_paths(child, reads))
    return []


def _check_function(name: str) -> str:
    """Return the name of a function. Raises JMESPathError: there is none of this name."""
    if name not in (functions := ExpressionFunctions.FUNCTION_TABLE):
        raise JMESPathError(f"there is no function {name}(); valid: {', '.join(sorted(functions))}")
    return name


def omit_paths(value: Any, paths: frozenset[FieldPath]) -> Any:
    """Return what is left of a value without the fields at some paths and without nulls; None if nothing is."""
    if () in paths or value is None:
        return None
    if isinstance(value, dict):
        rest = {}
        for key, field in value.items():
            inner = frozenset(path[1:] for path in paths if path[0] in (key, "*"))
            if (remainder := omit_paths(field, inner) if inner else field) is not None:
                rest[key] = remainder
        return rest or None
    if isinstance(value, list):
        inner = frozenset(path[1:] for path in paths if path[0] == "*")
        remainders = [omit_paths(element, inner) for element in value] if inner else value
        return remainders if any(remainder is not None for remainder in remainders) else None
    return value
