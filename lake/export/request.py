"""What is asked of an export, and what is written down of it while it runs and when it is done."""

import hashlib
from pathlib import Path
from typing import Any

import msgspec

from lake.export.files import SUFFIXES
from lake.export.target import Choices, Target
from lake.write.jobs import package_version

SHARD_EPISODES = 10_000


class Request(msgspec.Struct, frozen=True):
    """What a person asks for."""

    target: Target
    out: Path
    """A file (one shard), or a folder."""
    where: str | None = None
    selection: str | None = None
    run_id: str | None = None
    credit: str | None = None
    """Whose advantages: an estimator, series or job; None: the current one, if there is any; `none`: nobody's."""
    choices: Choices = Choices()
    shard_episodes: int = SHARD_EPISODES

    @property
    def is_one_file(self) -> bool:
        """Whether it is written to one file, and not to a folder."""
        return self.out.suffix == SUFFIXES.get(self.target.container)

    @property
    def asked(self) -> str:
        """Hash of what is asked for, wherever it is written to."""
        names = (self.target.name, self.where, self.selection, self.run_id, self.credit, package_version())
        asked = msgspec.json.encode([*names, self.choices, self.shard_episodes])
        return hashlib.sha256(asked).hexdigest()


class Shard(msgspec.Struct):
    """A finished file; of a tree, the files of some episodes together."""

    name: str
    episodes: int
    rows: int
    bytes: int
    sha256: str


class State(msgspec.Struct):
    """What a killed export left: where to go on."""

    asked: str
    """Hash of what is asked for."""
    fingerprint: str
    """Hash of that and of the episodes that it means."""
    snapshot: dict[str, int]
    shards: list[Shard] = []
    left_out: dict[str, int] = {}
    names: dict[str, list[str]] = {}


class Manifest(msgspec.Struct):
    """What was exported."""

    format: str
    package_version: str
    snapshot: dict[str, int]
    where: str | None
    selection: str | None
    run_id: str | None
    choices: dict[str, Any]
    score: str | None
    """Which score counts, its version, and the credit that it is of; None if no row depends on one."""
    jobs: dict[str, Any]
    """The credit series and its jobs, and the select job; by name, as people see ids."""
    episodes: int
    steps: int
    rows: int
    left_out: dict[str, int]
    """What the format has no place for, or what no row could be made of."""
    names: dict[str, list[str]]
    """Of what is left out and has names: some of them."""
    shards: list[Shard]
