"""The page of configuration objects, read from their source.

Read, not imported: the docstring under a field, which Python throws away, is the field's documentation, and nothing
heavy is loaded.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from lake.care.doctor import LAYERS

ROOT = Path(__file__).resolve().parents[2]


def config_page() -> str:
    """Every configuration object with its keys."""
    intro = (
        "# Configuration\n\nEvery configuration object, its keys, types, defaults and limits. All are frozen, and an "
        "unknown key is an error. The\nresolved values of a job stand in its row of `jobs`.\n"
    )
    modules = [
        (path.relative_to(ROOT).with_suffix("").as_posix().replace("/", "."), ast.parse(path.read_text("utf-8")))
        for layer in LAYERS
        for path in sorted((ROOT / layer).rglob("*.py"))
    ]
    aliases = {name: value for _, tree in modules for name, value in _aliases(tree)}
    sections = []
    for layer in LAYERS:
        own = [(module, tree) for module, tree in modules if module.partition(".")[0] == layer]
        classes = _classes(modules) | _classes(own)  # two layers may use a name: a base is sought in one's own first
        sections += [
            _config_section(node, module, aliases, _all_fields(node, classes))
            for module, tree in own
            for node in tree.body
            if isinstance(node, ast.ClassDef) and _is_config(node, classes)
        ]
    return "\n".join([intro, *sections])


def _classes(modules: list[tuple[str, ast.Module]]) -> dict[str, ast.ClassDef]:
    return {node.name: node for _, tree in modules for node in tree.body if isinstance(node, ast.ClassDef)}


def _aliases(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Names of closed vocabularies, spelled out: `Norm = Literal[...]`, or a StrEnum."""
    for node in tree.body:
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=ast.Subscript(value=ast.Name(id="Literal")) as value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.Subscript(value=ast.Name(id="Literal")) as value)
            ):
                yield name, value
            case ast.ClassDef(name=name, bases=[ast.Name(id="StrEnum")]):
                words = [ast.unparse(item.value) for item in node.body if isinstance(item, ast.Assign)]
                yield name, ast.parse(f"Literal[{', '.join(words)}]", mode="eval").body


def _is_config(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> bool:
    """A pydantic model that can be built from defaults (reports have none), and is no mere base of others."""
    based = any("BaseModel" in _base_names(ancestor) for ancestor in _ancestry(node, classes))
    fields = _all_fields(node, classes) if based and "ABC" not in _base_names(node) else []
    return any(field.value is not None for field, _ in fields)


def _base_names(node: ast.ClassDef) -> list[str]:
    return [base.id for base in node.bases if isinstance(base, ast.Name)]


def _ancestry(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> list[ast.ClassDef]:
    """The class and its bases in method resolution order (C3)."""
    bases = [classes[name] for name in _base_names(node) if name in classes and classes[name] is not node]
    lines = [_ancestry(base, classes) for base in bases] + [bases]
    order = [node]
    while lines := [line for line in lines if line]:
        head = next(line[0] for line in lines if not any(line[0] in other[1:] for other in lines))
        order.append(head)
        lines = [[found for found in line if found is not head] for line in lines]
    return order


def _all_fields(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> list[tuple[ast.AnnAssign, str]]:
    """Fields in pydantic's order: inherited ones first, each in its last version, with the last meaning given."""
    found: dict[str, tuple[ast.AnnAssign, str]] = {}
    for ancestor in reversed(_ancestry(node, classes)):
        for field, meaning in _fields(ancestor):
            name = ast.unparse(field.target)
            found[name] = field, meaning or (found[name][1] if name in found else "")
    return [pair for pair in found.values() if "ClassVar" not in ast.unparse(pair[0].annotation)]


def _fields(node: ast.ClassDef) -> Iterator[tuple[ast.AnnAssign, str]]:
    """Fields of a class with the docstring under each."""
    for position, statement in enumerate(node.body):
        if isinstance(statement, ast.AnnAssign):
            match node.body[position + 1 : position + 2]:
                case [ast.Expr(value=ast.Constant(value=str(text)))]:
                    yield statement, " ".join(text.split())
                case _:
                    yield statement, ""


def _config_section(
    node: ast.ClassDef, module: str, aliases: dict[str, ast.expr], fields: list[tuple[ast.AnnAssign, str]]
) -> str:
    summary = (ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " ")
    rows = []
    for field, meaning in fields:
        default, limits = _default_and_limits(field.value)
        kind = ast.unparse(_Expand(aliases).visit(field.annotation))
        cells = (f"`{ast.unparse(field.target)}`", f"`{kind}`", default, limits, meaning)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    head = ["| key | type | default | limits | meaning |", "| --- | --- | --- | --- | --- |"]
    return "\n".join([f"## {module}.{node.name}\n", f"{summary}\n", *head, *rows, ""])


class _Expand(ast.NodeTransformer):
    """Put closed vocabularies in the place of their names."""

    def __init__(self, aliases: dict[str, ast.expr]) -> None:
        self.aliases = aliases

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self.aliases.get(node.id, node)


_LIMITS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


def _default_and_limits(value: ast.expr | None) -> tuple[str, str]:
    """Default and limits of a field, from `= value` or `= Field(value, ge=...)`."""
    if value is None:
        return "required", ""
    if not (isinstance(value, ast.Call) and ast.unparse(value.func) == "Field"):
        return f"`{ast.unparse(value)}`", ""
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in value.keywords}
    if value.args:
        given["default"] = ast.unparse(value.args[0])
    if "default_factory" in given:
        given["default"] = f"{given['default_factory']}()"
    limits = ", ".join(f"{sign} {given[name]}" for name, sign in _LIMITS.items() if name in given)
    return (f"`{given['default']}`" if given.get("default", "...") != "..." else "required"), limits
