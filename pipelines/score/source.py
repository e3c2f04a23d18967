"""Where a reward function's source is, and its version, read without running a line of it.

The version is a hash of the module's text and of every module that it imports, directly or not, from its own folder,
found by parsing. Line ends are made equal: the same files have the same version on every machine and in every checkout,
and any other change makes a new version, a comment's too: deciding which changes matter is left to nobody's guess. Not
seen: imports by computed names, installed packages, and data files.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from lake import ids
from lake.errors import UsageError


@dataclass(frozen=True)
class Source:
    """A user's function in a module's file."""

    path: Path
    """The module, absolute."""
    name: str
    """The function."""
    files: tuple[tuple[str, str], ...]
    """Paths relative to the module's folder, and texts: the module (with an empty path), then what it imports;
    sorted."""

    @property
    def hash(self) -> str:
        """Hash of the function's name and of all texts, as 13 characters."""
        return ids.to_text(ids.key_hash("source", self.name, *(part for file in self.files for part in file)))

    def placed(self, folder: Path) -> "Source":
        """The same source in a folder, into which its files are written: on a machine that does not have them."""
        module = folder / self.path.name
        for name, text in self.files:
            file = folder / name if name else module
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, "utf-8")
        return replace(self, path=module)


def find_source(target: str) -> Source:
    """The source behind `module.py:function`; UsageError if there is none, or it has a syntax error."""
    file, colon, name = target.rpartition(":")
    if not colon or not file.endswith(".py") or not name.isidentifier():
        msg = f"{target!r} names no reward function; write module.py:function"
        raise UsageError(msg if not target.endswith(".py") else f"{msg}. {_functions_of(Path(target))}")
    path = Path(file).resolve()
    tree, text = _parsed(path, file)
    bound = set(_bound(tree))
    if name not in bound and "*" not in bound:
        msg = f"{file} has no function `{name}`. {_functions_of(path)}"
        raise UsageError(msg)
    return Source(path, name, (("", text), *sorted(_imported(path.parent, tree, path).items())))


def _functions_of(path: Path) -> str:
    tree, _ = _parsed(path.resolve(), str(path))
    names = [n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    return f"Its functions: {', '.join(names)}" if names else "It has no functions"


def _parsed(path: Path, shown: str) -> tuple[ast.Module, str]:
    try:
        text = path.read_text("utf-8-sig")
    except OSError as error:
        msg = f"{shown}: {error.strerror}; give the path of a Python file, as in module.py:function"
        raise UsageError(msg) from error
    except UnicodeDecodeError as error:
        msg = f"{shown} is not UTF-8 text: {error}"
        raise UsageError(msg) from error
    # read_text has made all line ends \n.
    try:
        return ast.parse(text), text
    except (SyntaxError, ValueError, RecursionError) as error:
        place = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        fault = error.msg if isinstance(error, SyntaxError) else str(error)
        msg = f"{shown}{place}: {fault}"
        raise UsageError(msg) from error


def _bound(tree: ast.Module) -> Iterator[str]:
    """Names that a module's top level binds, also inside `if` and `try`; `*` if it imports everything of another."""
    for node in _statements(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name))


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child
            if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield from _statements(child)
        elif isinstance(child, ast.ExceptHandler):
            yield from _statements(child)


def _imported(folder: Path, tree: ast.Module, path: Path) -> dict[str, str]:
    """Relative path -> text of all modules of a folder that one of it imports, directly or not, functions included."""
    found: dict[str, str] = {}
    queue = [(tree, path)]
    while queue:
        tree, importer = queue.pop()
        for module in _modules(tree, importer.parent, folder):
            place = module.relative_to(folder).as_posix()
            if place not in found and module != path:
                inner, found[place] = _parsed(module, str(module))
                queue.append((inner, module))
    return found


def _modules(tree: ast.Module, here: Path, folder: Path) -> Iterator[Path]:
    """Files under a folder that a module's import statements may load."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _chain(folder, alias.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            start = folder
            if node.level:
                start = here.joinpath(*[".."] * (node.level - 1)).resolve()
                if start != folder and folder not in start.parents:
                    continue
            parts = node.module.split(".") if node.module else []
            for alias in node.names:
                yield from _chain(start, [*parts, alias.name])


def _chain(start: Path, parts: list[str]) -> Iterator[Path]:
    """Files that importing a dotted name loads: packages on the way, and the module."""
    place = start
    for part in parts:
        place = place / part
        for file in (place / "__init__.py", place.with_name(f"{part}.py")):
            if file.is_file():
                yield file
                break
        if not place.is_dir():
            return
