"""Check the limits of the house: names, shared class names, phrases, circles of files, and a budget for each folder.

    python .ci/house_limits.py [--places]

Reads `.ci/house_limits.toml`, prints each figure next to its limit, and exits with 1 if a figure is above it. With
`--places` it also lists the places of every figure that is above its limit. CONTRIBUTING.md says what to do then.
"""

import ast
import re
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[1]
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class PythonFile:
    """One file of a layer: its path in the repository, text and syntax tree."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree."""
        return ast.parse(self.text, self.path)

    @property
    def lines(self) -> int:
        """Number of lines."""
        return self.text.count("\n")

    def assigned_names(self) -> Iterator[tuple[str, int]]:
        """Yield names of variables, fields and parameters, with their lines."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id, node.lineno
            elif isinstance(node, ast.arg):
                yield node.arg, node.lineno

    def prose(self) -> Iterator[tuple[str, int]]:
        """Yield the lines of comments and strings, with their numbers."""
        kinds = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1)}
        lines = iter(self.text.splitlines(keepends=True))
        for token in tokenize.generate_tokens(lambda: next(lines, "")):
            if token.type in kinds:
                for offset, line in enumerate(token.string.split("\n")):
                    yield line, token.start[0] + offset


@dataclass
class Figure:
    """A measured figure with its limit and the places that count for it."""

    name: str
    measured: float
    limit: float
    places: Sequence[str] = field(default_factory=list)

    @property
    def is_above(self) -> bool:
        """Whether the figure breaks its limit."""
        return self.measured > self.limit

    def line(self) -> str:
        """Return one line of the report."""
        return f"{self.name:40} {self.measured:>10,.6g}  limit {self.limit:>9,.6g}{'  ABOVE' if self.is_above else ''}"


def tracked(pattern: str) -> list[str]:
    """Return the paths of tracked files that exist."""
    listing = subprocess.run(["git", "ls-files", pattern], cwd=ROOT, capture_output=True, text=True, check=True)
    return [path for path in listing.stdout.splitlines() if (ROOT / path).is_file()]


def measure_names(files: Sequence[PythonFile], words: dict[str, list[str]], limits: dict[str, float]) -> list[Figure]:
    """Measure the share of assigned names that say nothing, and count functions with such a name."""
    vague, generic = set(words["vague"]), set(words["generic"])
    counts: Counter[str] = Counter()
    vague_places, vague_functions = [], []
    for file in files:
        for name, line in file.assigned_names():
            counts[name] += 1
            if name in vague:
                vague_places.append(f"{file.path}:{line} {name}")
        vague_functions += [
            f"{file.path}:{node.lineno} {node.name}"
            for node in ast.walk(file.tree)
            if isinstance(node, FUNCTIONS) and node.name.lstrip("_") in vague
        ]
    percent = 100 / max(1, counts.total())
    generic_share = percent * sum(counts[name] for name in generic)
    return [
        Figure("vague names, %", percent * len(vague_places), limits["vague_names_percent"], vague_places),
        Figure("generic names, %", generic_share, limits["generic_names_percent"]),
        Figure("vague functions", len(vague_functions), limits["vague_functions"], vague_functions),
    ]


def measure_classes(files: Sequence[PythonFile], limit: float) -> Figure:
    """Measure the share of class names that several classes bear."""
    places = defaultdict(list)
    for file in files:
        for node in ast.walk(file.tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{file.path}:{node.lineno}")
    shared = [f"{name}: {', '.join(at)}" for name, at in sorted(places.items()) if len(at) > 1]
    return Figure("shared class names, %", 100 * len(shared) / max(1, len(places)), limit, shared)


def measure_phrases(name: str, lines: Sequence[tuple[str, str]], total: int, phrases: str, limit: float) -> Figure:
    """Count banned phrases in (place, line) pairs, per 1,000 of `total` lines."""
    pattern = re.compile(rf"\b(?:{phrases})", re.IGNORECASE)
    places = [f"{place} {line.strip()}" for place, line in lines for _ in pattern.findall(line)]
    return Figure(name, 1000 * len(places) / max(1, total), limit, places)


def circles(layers: Sequence[str]) -> list[str]:
    """Return the groups of modules that import each other, type-checking and function-level imports included."""
    graph = grimp.build_graph(*layers, cache_dir=None)
    imported = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    # Modules that import nothing left, or that nothing left imports, are in no circle.
    while True:
        targets = set().union(*imported.values()) if imported else set()
        outside = {module for module, others in imported.items() if not others or module not in targets}
        if not outside:
            break
        imported = {module: others - outside for module, others in imported.items() if module not in outside}
    groups: list[set[str]] = []
    for module in sorted(imported):
        ahead, queue = {module}, [module]
        while queue:
            queue += (fresh := imported[queue.pop()] - ahead)
            ahead |= fresh
        groups.append(ahead)
    reachable = dict(zip(sorted(imported), groups, strict=True))
    circle_of = {
        module: frozenset(other for other in ahead if module in reachable[other] and other != module) | {module}
        for module, ahead in reachable.items()
    }
    return [", ".join(sorted(group)) for group in sorted(set(circle_of.values()), key=sorted) if len(group) > 1]


def measure_folder(folder: str, files: Sequence[PythonFile], budget: dict[str, int]) -> list[Figure]:
    """Compare a folder's files and lines with its budget."""
    inside = [file for file in files if file.path.startswith(f"{folder}/")]
    return [
        Figure(f"{folder}: files", len(inside), budget["files"]),
        Figure(f"{folder}: lines", sum(file.lines for file in inside), budget["lines"]),
    ]


def main() -> None:
    """Print all figures; exit with 1 if one is above its limit."""
    settings = tomllib.loads((ROOT / ".ci/house_limits.toml").read_text("utf-8"))
    limits, words, folders = settings["limits"], settings["words"], settings["folders"]
    layers = sorted({folder.split("/")[0] for folder in folders})
    files = [
        PythonFile(path, (ROOT / path).read_text("utf-8")) for layer in layers for path in tracked(f"{layer}/*.py")
    ]
    lines = sum(file.lines for file in files)
    functions = sum(isinstance(node, FUNCTIONS) for file in files for node in ast.walk(file.tree))
    pages = {path: (ROOT / path).read_text("utf-8").splitlines() for path in tracked("*.md")}
    pages = {path: text for path, text in pages.items() if path.startswith("docs/") or "/" not in path}
    pages.pop("CHANGELOG.md", None)
    phrases = "|".join(words["phrases"])
    code_prose = [(f"{file.path}:{number}", line) for file in files for line, number in file.prose()]
    page_lines = [(f"{path}:{number}", line) for path, text in pages.items() for number, line in enumerate(text, 1)]
    groups = circles(layers)
    figures = [
        *measure_names(files, words, limits),
        measure_classes(files, limits["shared_classes_percent"]),
        measure_phrases("phrases in code, per 1,000", code_prose, lines, phrases, limits["phrases_in_code"]),
        measure_phrases("phrases in docs, per 1,000", page_lines, len(page_lines), phrases, limits["phrases_in_docs"]),
        Figure("functions per 1,000 lines", 1000 * functions / max(1, lines), limits["functions_per_1000_lines"]),
        Figure("circles of files", len(groups), limits["circles"], groups),
    ]
    for folder, budget in folders.items():
        figures += measure_folder(folder, files, budget)
    above = [figure for figure in figures if figure.is_above]
    for figure in figures:
        sys.stdout.write(f"{figure.line()}\n")
    if "--places" in sys.argv[1:]:
        for figure in above:
            sys.stdout.write("".join(f"{figure.name}: {place}\n" for place in figure.places))
    if above:
        sys.stdout.write("Above a limit: see CONTRIBUTING.md, `Limits of the house`; --places lists the places.\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
