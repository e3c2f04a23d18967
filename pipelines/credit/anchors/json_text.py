"""JSON-canonical states: tool results that say the same in another order or spelling."""

from typing import Literal, Self

from pydantic import Field, model_validator

from pipelines.credit.anchors.canonical_json import canonical_json
from pipelines.credit.anchors.definition import Definition
from pipelines.credit.anchors.states import States, map_distinct


class CanonicalJson(Definition):
    """Two steps share an anchor if their states are the same JSON value: order of keys, spaces and 1 or 1.0 aside."""

    kind: Literal["json"] = "json"
    """Name of the definition."""
    drop: tuple[str, ...] = Field(default=())
    """Fields to leave out: `name` wherever it occurs, or `$.a.b` at one place (`*` for any key or list item)."""
    otherwise: Literal["text", "unknown"] = "text"
    """A state that is not JSON counts by its exact text, or as unknown."""

    @model_validator(mode="after")
    def _droppable(self) -> Self:
        for field in self.drop:
            if not field or (field.startswith("$") and (field[1:2] != "." or "" in field[2:].split("."))):
                msg = f"drop: {field!r} is no field. Write a key, or a path such as $.meta.time or $.rows.*.id"
                raise ValueError(msg)
        return self

    @property
    def reads_text(self) -> bool:
        """Texts are rewritten."""
        return True

    def apply(self, states: States) -> States:
        """Each distinct text in canonical form."""
        return states.rewritten(lambda texts_V: map_distinct(texts_V, self._canonical))

    def _canonical(self, texts: list[str]) -> list[str | None]:
        names = frozenset(field for field in self.drop if not field.startswith("$"))
        paths = [tuple(field[2:].split(".")) for field in self.drop if field.startswith("$")]
        found = (canonical_json(text, names, paths) for text in texts)
        if self.otherwise == "unknown":
            return list(found)
        return [text if form is None else form for text, form in zip(texts, found, strict=True)]
