"""The page of configuration objects, read from their source.

Read, not imported: the docstring under a field, which Python throws away, is the field's documentation, and nothing
heavy is loaded.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from lake.rivals import LAYERS

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
    sections = [
        _config_section(node, module, aliases)
        for module, tree in modules
        for node in tree.body
        if isinstance(node, ast.ClassDef) and _is_config(node)
    ]
    return "\n".join([intro, *sections])


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


def _is_config(node: ast.ClassDef) -> bool:
    """A pydantic model that can be built from defaults (reports have none)."""
    based = any(isinstance(base, ast.Name) and base.id == "BaseModel" for base in node.bases)
    return based and any(field.value is not None for field, _ in _fields(node))


def _fields(node: ast.ClassDef) -> Iterator[tuple[ast.AnnAssign, str]]:
    """Fields of a class with the docstring under each."""
    for position, statement in enumerate(node.body):
        if isinstance(statement, ast.AnnAssign):
            match node.body[position + 1 : position + 2]:
                case [ast.Expr(value=ast.Constant(value=str(text)))]:
                    yield statement, " ".join(text.split())
                case _:
                    yield statement, ""


def _config_section(node: ast.ClassDef, module: str, aliases: dict[str, ast.expr]) -> str:
    summary = (ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " ")
    rows = []
    for field, meaning in _fields(node):
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
