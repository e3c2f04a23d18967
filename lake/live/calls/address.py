"""Which rollout a call belongs to, by the names that it gives; `lake.live.proxy.keys` reads them from a request."""

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
    parent: "Address | None" = None

    @property
    def is_named(self) -> bool:
        """Whether it says which rollout it is; else the prompt of the call has to."""
        return self.task is not None

    def of_rollout(self, run: str) -> "Address":
        """The same for all addresses of one row of the lake; `run` is that of those that name none."""
        return msgspec.structs.replace(self, run=self.run or run, attempt=self.attempt or 0, split=None, parent=None)

    @property
    def uri(self) -> str:
        """It as `source_uri`, from which `of_uri` reads it back; the parent is left out."""
        said = {name: getattr(self, name) for name in _FIELDS if getattr(self, name) is not None}
        return f"{_SCHEME}{urlencode(said)}"

    @classmethod
    def of_uri(cls, uri: str) -> "Address":
        """The address that a `source_uri` says. Raises ValueError: it says none."""
        if not uri.startswith(_SCHEME):
            raise ValueError(f"{uri!r} is no address of a call; valid: {_SCHEME}task=T, for example")
        return msgspec.convert(dict(parse_qsl(uri.removeprefix(_SCHEME))), cls, strict=False)


_FIELDS = tuple(name for name in Address.__struct_fields__ if name != "parent")
