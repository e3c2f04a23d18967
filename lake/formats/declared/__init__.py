"""Declarations: a format that only maps a tool's file to episodes is one TOML file.

`docs/guides/bring-your-trajectories.md` explains the keys with an example, and this folder holds the declarations that
come with Trajlake. `reader` reads the files of all declared formats; it is imported when a file may be one of theirs.
"""

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from lake.errors import FormatError
from lake.formats.base.format import (
    FileHead,
    Format,
    Item,
    RunFolder,
    find_folder_above,
    get_parent_folder,
    get_rollouts_folder,
)
from lake.formats.base.rows import ShapeError
from lake.formats.base.source import Input, get_name
from lake.formats.declared.document import DeclarationDocument, Recognition
from lake.records import EpisodeRecord

if TYPE_CHECKING:
    from lake.formats.declared.reader import CompiledDeclaration

FOLDER = Path(__file__).parent
_EPISODE_FIELDS = (frozenset(EpisodeRecord.__struct_fields__) | {"identity", "group", "parent"}) - {
    "steps",
    "spans",
    "scores",
    "source_format",
}
_SPAN_FIELDS = frozenset(
    (
        *("list", "trace", "id", "parent", "name", "kind", "start", "end", "error", "input", "output", "agent"),
        *("model", "tools", "sampling", "prompt_tokens", "completion_tokens", "cost", "call_id", "scores"),
    )
)
_RUN_FOLDERS: dict[str | None, RunFolder | None] = {
    None: None,
    "parent": get_parent_folder,
    "rollouts": get_rollouts_folder,
}


class Declaration:
    """A declared format. Raises FormatError: the declaration is not valid."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.document = msgspec.toml.decode(path.read_bytes(), type=DeclarationDocument)
        except OSError as error:
            raise FormatError(f"the declaration {path} cannot be read: {error.strerror}") from error
        except (msgspec.MsgspecError, ValueError) as error:
            raise FormatError(f"the declaration {path} is not valid: {error}; see the guide on own formats") from error
        for section, names, valid_names in (
            ("episode", self.document.episode, _EPISODE_FIELDS),
            ("spans", self.document.spans, _SPAN_FIELDS),
        ):
            unknown = next((name for name in names if name not in valid_names), None)
            if unknown is not None:
                valid = ", ".join(sorted(valid_names))
                raise FormatError(f"the declaration {path} has `{section}.{unknown}`; valid: {valid}")
        if self.document.spans and not self.document.spans.keys() >= {"list", "trace", "id"}:
            raise FormatError(
                f"the declaration {path} has no `spans.list`, `spans.trace` or `spans.id`; give all three"
            )

    @cached_property
    def compiled(self) -> "CompiledDeclaration":
        """The compiled expressions. Raises FormatError: one is not valid."""
        from lake.formats.declared.reader import CompiledDeclaration

        try:
            return CompiledDeclaration(self.document)
        except ShapeError as error:
            raise FormatError(f"the declaration {self.path} is not valid: {error}") from error

    def make_format(self, location: str | None = None) -> Format:
        """Return the format. `location` names the declaration to a worker, if it does not come with Trajlake."""
        run = self.document.run
        return Format(
            self.document.name,
            self.document.description,
            self.recognise,
            self.read,
            self.find_without,
            is_whole=self.document.whole,
            has_copies=self.document.whole,
            run_folder=_RUN_FOLDERS[run] if run in _RUN_FOLDERS else find_folder_above(str(run)),
            location=location,
        )

    def recognise(self, head: FileHead) -> bool:
        """Return whether a file looks like this format."""
        recognise = self.document.recognise
        return any(self._fits(head, form) for form in (recognise if isinstance(recognise, list) else [recognise]))

    def find_without(self, head: FileHead) -> str | None:
        """Return a sentence about a file of the same tool without trajectories; None if it may hold some."""
        return next((without.says for without in self.document.without if self._fits(head, without)), None)

    def _fits(self, head: FileHead, recognition: Recognition) -> bool:
        kind = "text" if head.kind == "other" else head.kind
        is_lone = head.kind == "lines" and len(head.values) == 1 and "object" in recognition.kinds
        has_kind = kind in recognition.kinds or is_lone
        has_name = recognition.file is None or fnmatchcase(get_name(head.path), recognition.file)
        has_text = recognition.text is None or re.search(recognition.text, head.text, re.MULTILINE) is not None
        if not (has_kind and has_name and has_text):
            return False
        if head.kind in ("parquet", "sqlite"):
            return set(head.names).issuperset(recognition.keys)
        if recognition.keys and not head.has(*recognition.keys):
            return False
        if recognition.where is None:
            return bool(recognition.keys or recognition.file or recognition.text)
        return self.compiled.fits(head, recognition)

    def read(self, file: Input) -> Iterator[Item]:
        """Read the records and rejects of a file."""
        return self.compiled.read(file)


def load_declared() -> list[Format]:
    """Return the declared formats that come with Trajlake, by name."""
    return [Declaration(path).make_format() for path in sorted(FOLDER.glob("*.toml"))]


def load_declaration(path: Path) -> Format:
    """Return the format of a user's declaration. Raises FormatError: the declaration is not valid."""
    declaration = Declaration(path)
    _ = declaration.compiled
    return declaration.make_format(str(path.absolute()))
