"""What training adds to verifiers traces: on their nodes, and in prime-rl's `annotations` beside them.

An annotation is a line {version, trace_id, info, branches: [{index, advantages, trainer_logprobs, entropies, ...}]}; a
stream has an entry for each token of the branch, null where nothing is known. Files stand in `annotations/` in the
folder of the traces or the one above, one for each producer, or a folder of chunks for each.

See `lake.formats.verifiers.traces`.
"""

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from lake.formats.base.fields import Scores
from lake.formats.base.rows import line_values
from lake.formats.base.source import Input, stem
from lake.formats.verifiers.graph import Node, leaf_paths
from lake.formats.verifiers.messages import as_object
from lake.records import Reject

LATER = ("advantages", "reference_logprobs", "trainer_logprobs", "entropies", "loss_weights", "is_masked")
"""Fields of a node that training fills; null is no zero."""
STAMPED = ("advantage", "train", "eval")
"""What prime-rl writes into a trace's `info` when it trains on it."""
_SCORER = "training"
_encode, _decode = msgspec.json.encode, msgspec.json.decode


class Told(msgspec.Struct):
    """What is known about one trace: by scorer, for the whole of it and for its nodes."""

    about: dict[str, dict[str, Any]] = {}
    nodes: dict[str, dict[int, dict[str, Any]]] = {}

    def add(self, scores: Scores, decisions: list[int], *, is_trunk: bool) -> None:
        """Scores without a value for the decisions of a branch; of the trunk also what is about all of the trace."""
        steps = {at: step for step, at in enumerate(decisions)}
        for scorer in dict.fromkeys([*self.about, *self.nodes]):
            nodes = self.nodes.get(scorer, {})
            if is_trunk and (about := self.about.get(scorer)):
                scores.add(scorer, None, metrics=about)
            for at, fields in nodes.items():
                if at in steps:
                    scores.add(scorer, None, step_index=steps[at], metrics=fields)


class Annotations:
    """The annotations beside a file, by trace; read on demand from a temporary database, as they may be big."""

    def __init__(self, file: Input) -> None:
        self._spool: sqlite3.Connection | None = None
        self._files = list(_files(file.path))

    def __enter__(self) -> Self:
        if self._files:
            self._spool = sqlite3.connect("", isolation_level=None, check_same_thread=False)
            self._spool.execute("PRAGMA journal_mode = OFF")
            self._spool.execute("CREATE TABLE lines (trace BLOB, producer TEXT, line BLOB)")
            self._spool.execute("BEGIN")
            for producer, path in self._files:
                for item in line_values(Input(path, "")):
                    # A damaged annotation loses no trajectory.
                    if not isinstance(item, Reject) and item.problem is None and isinstance(item.value, dict):
                        row = (_encode(str(item.value.get("trace_id"))), producer, _encode(item.value))
                        self._spool.execute("INSERT INTO lines VALUES (?, ?, ?)", row)
            self._spool.execute("CREATE INDEX by_trace ON lines (trace)")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._spool is not None:
            self._spool.close()

    def of(self, trace_id: str | None, nodes: list[Node], trace: dict[str, Any]) -> Told:
        """What is said about a trace: by itself, and by annotations in the order they were written."""
        told = Told()
        info = as_object(trace.get("info"))
        about = {name: info[name] for name in STAMPED if info.get(name) is not None}
        given = {
            at: fields
            for at, node in enumerate(trace["nodes"])
            if (fields := {name: node[name] for name in LATER if node.get(name) is not None})
        }
        others = {str(at): fields for at, fields in given.items() if not nodes[at].sampled}
        if trace.get("advantage") is not None:
            about["advantage"] = trace["advantage"]
        if others:
            about["nodes"] = others
        if about:
            told.about[_SCORER] = about
        if given:
            told.nodes[_SCORER] = given
        if self._spool is not None and trace_id is not None:
            paths = leaf_paths(nodes)
            query = "SELECT producer, line FROM lines WHERE trace = ? ORDER BY rowid"
            for producer, line in self._spool.execute(query, (_encode(trace_id),)):
                _fold(told, f"{_SCORER}.{producer}", _decode(line), nodes, paths)
        return told


def _fold(told: Told, scorer: str, update: dict[str, Any], nodes: list[Node], paths: list[list[int]]) -> None:
    if info := as_object(update.get("info")):
        told.about[scorer] = told.about.get(scorer, {}) | info
    for given in update["branches"] if isinstance(update.get("branches"), list) else ():
        branch = as_object(given)
        index = branch.get("index")
        if not isinstance(index, int) or not 0 <= index < len(paths):
            continue
        for name, stream in branch.items():
            if name == "index" or not isinstance(stream, list):
                continue
            for at, values in _by_node(stream, paths[index], nodes):
                told.nodes.setdefault(scorer, {}).setdefault(at, {})[name] = values


def _by_node(stream: list[Any], path: list[int], nodes: list[Node]) -> Iterator[tuple[int, list[Any]]]:
    """A stream over a path's tokens, of each sampled node the entries of its sampled tokens, if any is known."""
    start = 0
    for at in path:
        node = nodes[at]
        part = stream[start : start + len(node.token_ids)]
        start += len(node.token_ids)
        if len(part) < len(node.token_ids):
            return
        values = [value for value, is_sampled in zip(part, node.mask, strict=False) if is_sampled]
        if node.sampled and any(value is not None for value in values):
            yield at, values


def _files(path: Path) -> Iterator[tuple[str, Path]]:
    """Producers and their files, in a fixed order."""
    for folder in (path.parent / "annotations", path.parent.parent / "annotations"):
        if not folder.is_dir():
            continue
        for entry in sorted(folder.iterdir()):
            if entry.is_dir():
                yield from ((entry.name, part) for part in sorted(entry.iterdir()) if _is_lines(part))
            elif _is_lines(entry):
                yield stem(entry), entry
        return


def _is_lines(path: Path) -> bool:
    return path.is_file() and ".jsonl" in path.suffixes and "index" not in path.name
