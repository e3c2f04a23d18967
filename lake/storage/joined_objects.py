"""The files of several lakes, for whoever reads them together.

Engines take one set of storage options for all files of a scan, and one file system for a scheme. So the lakes lie all
in local folders, or all in buckets of one kind that the same options reach; they may be different buckets.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lake.errors import UsageError
from lake.storage.objects import Objects

if TYPE_CHECKING:
    from lake.storage.bucket_files import BucketFiles


class JoinedObjects(Objects):
    """Where several lakes lie, for reading; it stands for the first of them otherwise.

    Raises:
        UsageError: lakes in folders and in buckets, or in buckets of several kinds or with several sets of options.
    """

    def __init__(self, members: Sequence[Objects]) -> None:
        self._members = tuple(members)
        first = self._members[0]
        super().__init__(first.root, first.options)
        kinds = {one.root.partition("://")[0] if one.folder is None else "" for one in self._members}
        if len(kinds) > 1 or any(one.options != first.options for one in self._members):
            raise UsageError(
                f"{', '.join(self.roots)} cannot be read together: they have to lie all in local folders, or all in "
                "buckets of one kind that the same options reach; copy one of them"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        """By its members."""
        return JoinedObjects, (self._members,)

    @property
    def roots(self) -> tuple[str, ...]:
        """The roots of all of them."""
        return tuple(one.root for one in self._members)

    @property
    def folder(self) -> Path | None:
        """The first one's folder; None in an object store."""
        return self._members[0].folder

    def filesystem(self, sizes: Mapping[str, int]) -> "BucketFiles | None":
        """See `Objects.filesystem`: one for the files of all of them."""
        systems = {one.root: one.filesystem(sizes) for one in self._members}
        first = systems[self._members[0].root]
        if first is None:
            return None
        from lake.storage.bucket_files import BucketFiles

        def read(uri: str, start: int, end: int) -> bytes:
            # The longest root that it lies under: a lake may lie in a folder of another one's bucket.
            root = max((root for root in systems if uri.startswith(f"{root}/")), key=len)
            system = systems[root]
            assert system is not None, "all of them are in buckets"
            return system.read(uri, start, end)

        return BucketFiles(first.protocol, sizes, read)
