"""Which rollout a call belongs to, by the names that it gives; `lake.live.proxy.keys` reads them from a request."""

from contextlib import suppress
from urllib.parse import parse_qsl, urlencode

import msgspec

_SCHEME = "proxy:"


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout, by the names that a call gives it; hashable, and the same for every call of the rollout."""

    run: str | None = None
    task: str | None = None
    rollout: int | None = None
    attempt: int | None = None
    agent: str | None = None
    split: str | None = None
    collection_round: int | None = None
    seed: int | None = None
    """Of the environment."""
    parent: "Address | None" = None

    @property
    def is_named(self) -> bool:
        """Whether it says which rollout it is; else the prompt of the call has to."""
        return self.task is not None

    def of_rollout(self, run: str) -> "Address":
        """The same for all addresses of one row of the lake; `run` is that of those that name none."""
        return msgspec.structs.replace(self, run=self.run or run, attempt=self.attempt or 0, split=None, parent=None)

    def is_part_of(self, other: "Address") -> bool:
        """Whether it is the same rollout, or that of an agent of it."""
        return self.task == other.task and (self == other or msgspec.structs.replace(self, agent=None) == other)

    @property
    def uri(self) -> str:
        """It as `source_uri`, from which `of_uri` reads it back; the parent is left out."""
        said = {name: getattr(self, name) for name in _FIELDS if getattr(self, name) is not None}
        return f"{_SCHEME}{urlencode(said)}"

    @classmethod
    def of_uri(cls, uri: str | None) -> "Address":
        """The address that a `source_uri` says; one without names if it says none."""
        if uri is None or not uri.startswith(_SCHEME):
            return cls()
        with suppress(msgspec.ValidationError):
            return msgspec.convert(dict(parse_qsl(uri.removeprefix(_SCHEME))), cls, strict=False)
        return cls()


_FIELDS = tuple(name for name in Address.__struct_fields__ if name != "parent")
