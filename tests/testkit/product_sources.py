"""What guards look at in the sources: each file is parsed once a process, and its tree is not kept."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lake.care.doctor import LAYERS
from lake.write.ingest import pause_gc

ROOT = Path(__file__).resolve().parents[2]
WORDS = 5
"""So many words in a row make a sentence of the product."""
_SQL = frozenset(("SELECT", "FROM", "WHERE", "GROUP", "ORDER", "JOIN", "AS", "DISTINCT", "NULL"))
"""What has one of these words is a query, and no sentence."""
_WORD = re.compile(r"[A-Za-z0-9_`-]+(?:'[A-Za-z0-9_]+)*")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

Sentence = tuple[str, ...]


@dataclass(frozen=True)
class Source:
    """Facts of a file.

    Attributes:
        lines: of the file.
        docstring: whether its module has one.
        functions: (name, lines of the body without the docstring).
        sentences: of its string literals, without docstrings and queries.
    """

    lines: int
    docstring: bool
    functions: tuple[tuple[str, int], ...]
    sentences: frozenset[Sentence]


@cache
def product() -> dict[str, Source]:
    """The files of the layers, by their path from the root."""
    paths = [path for layer in LAYERS for path in sorted((ROOT / layer).rglob("*.py"))]
    with pause_gc():
        return {path.relative_to(ROOT).as_posix(): _source(path.read_text("utf-8")) for path in paths}


def _source(text: str) -> Source:
    tree = ast.parse(text)
    functions: list[tuple[str, int]] = []
    sentences: set[Sentence] = set()
    nodes: list[ast.AST] = [tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Constant):
            if isinstance(node.value, str) and len(node.value.split()) >= WORDS:
                sentences.update(sentences_of(node.value))
            continue
        if isinstance(node, (ast.Module, ast.ClassDef, *_FUNCTIONS)):
            body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
            if isinstance(node, _FUNCTIONS):
                functions.append((node.name, (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0))
                nodes += [node.args, *node.decorator_list]
            nodes += body
            continue
        nodes += ast.iter_child_nodes(node)
    docstring = ast.get_docstring(tree, clean=False) is not None
    spoken = frozenset(sentence for sentence in sentences if _SQL.isdisjoint(sentence))
    return Source(len(text.splitlines()), docstring, tuple(functions), spoken)


def sentences_of(text: str) -> Iterator[Sentence]:
    """Every five words in a row."""
    words = _WORD.findall(text.replace("\\", ""))
    return zip(*(words[first:] for first in range(WORDS)), strict=False)


def asserted_sentences(text: str, sentences_known: frozenset[Sentence]) -> Iterator[tuple[int, str]]:
    """Lines of asserts, and of `match=`, of a test file that hold a known sentence; each with the sentence."""
    # Most files hold none at all: parsing them is what costs.
    spoken = re.sub(r"""\\[nt]|\b[rRfFbB]{1,2}(?=["'])""", " ", text)
    if sentences_known.isdisjoint(sentences_of(spoken)):
        return
    with pause_gc():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Assert):
                compared: ast.expr = node.test
            elif isinstance(node, ast.keyword) and node.arg == "match":
                compared = node.value
            else:
                continue
            for part in ast.walk(compared):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    for sentence in sorted(sentences_known.intersection(sentences_of(part.value)))[:1]:
                        yield part.lineno, " ".join(sentence)
