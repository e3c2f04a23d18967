"""Weights by way of a folder: written once, whole or not at all, and read by every engine that shares the file system.

The slowest way, and the one that asks nothing of the engines but a reload: it works on CPUs and with any number of
engines, and one that was away is given the same folder when it comes back. Adapters (`lora.py`) go the same way.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

from lake.storage.atomic import recover, remove_folder
from trainer.sync import Push, Weights
from trainer.sync.fleet import Fleet
from trainer.sync.probe import Reference

KEPT = 2
"""Folders that stay: the newest, and the one before, for whoever still reads it."""


class DiskSync:
    """Pushes through folders `v1`, `v2`, ... of a folder.

    Args:
        fleet: the engines.
        write: writes the policy's weights as they are now into a folder of a given name, in one piece. Runs in a thread
            while the event loop goes on.
        folder: of the folders; the engines read it, too.
        reference: scores the probe's sequences with the policy as it is now; None: parity is not measured.
        adapter: what adapters are called in requests, for a version; None: the folders hold whole models.
    """

    def __init__(
        self,
        fleet: Fleet,
        write: Callable[[Path], object],
        folder: Path,
        *,
        reference: Callable[[], Reference] | None = None,
        adapter: Callable[[int], str] | None = None,
    ) -> None:
        self._fleet = fleet
        self._write = write
        self._folder = folder.absolute()
        self._reference = reference
        self._adapter = adapter
        self._delivery: asyncio.Task[Push] | None = None

    @property
    def version(self) -> int | None:
        """Version that was pushed last."""
        current = self._fleet.current
        return None if current is None else current.version

    async def push(self, version: int) -> None:
        """Write the weights, and begin to load them into the engines; see `WeightSync`."""
        await self.wait()
        place = self._folder / f"v{version}"
        await asyncio.to_thread(self._write, place)
        reference = None if self._reference is None else await asyncio.to_thread(self._reference)
        _prune(self._folder, keep=place)
        name = None if self._adapter is None else self._adapter(version)
        weights = Weights(version=version, folder=place, adapter=name)
        self._delivery = asyncio.create_task(self._fleet.deliver(weights, reference))

    async def wait(self) -> Push | None:
        """What the last push came to."""
        return None if self._delivery is None else await self._delivery


def _prune(folder: Path, keep: Path) -> None:
    """Remove all but the newest folders, and what a killed push left half written or half removed."""
    recover(folder)
    written = sorted((path for path in folder.glob("v*") if path != keep), key=lambda path: path.stat().st_mtime_ns)
    for old in written[: len(written) + 1 - KEPT]:
        remove_folder(old)
