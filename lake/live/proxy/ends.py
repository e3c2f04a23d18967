"""Which rollouts have ended, so that what comes later under their names is not taken for them.

A name with a number is a row of the lake: once its agent has ended it, further calls are refused, for their episode
would be a conflict with the one that is there. One that the proxy ended itself is gone on with in another episode, its
continuation. A name without a number stands for as many rollouts as are ended.

It is kept in a file as well, for a proxy that is started again. Nothing depends on the file: a line that is lost or
cannot be read costs a conflict, which the lake notices. The file holds hashes of names: it outlives the episodes, and
`trajlake forget` does not reach it.
"""

import hashlib
import logging
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from lake.errors import UsageError
from lake.live.calls.address import Address
from lake.live.places import turn
from lake.live.proxy.rollouts import EndedError, Ending

FILE = "ended"
"""In the folder of a port's spools."""
REMEMBERED = 10_000
"""Names."""
_DIGEST = re.compile("[0-9a-f]{32}")
_log = logging.getLogger("trajlake")


class Ended(msgspec.Struct, frozen=True, omit_defaults=True):
    """The last episode of a name."""

    name: str
    """Hash of its address; the address itself in files of earlier versions."""
    episode_id: str
    said: str | None = None
    """Hash of what its agent said of its end; None if the proxy ended it."""
    reply: dict[str, Any] = {}
    """What the agent was told then, without the names that it gave."""
    closes: bool = False
    """It ended its sub-agents as well."""


class Ends:
    """The ends of named rollouts, the oldest forgotten first. `save` may run in a thread beside the rest.

    Args:
        run: of names without one.
        file: where they are kept; None keeps them in memory.
        most: how many.
    """

    def __init__(self, run: str, file: Path | None = None, *, most: int = REMEMBERED) -> None:
        self._run, self._file, self._most = run, file, most
        self._found: dict[str, Ended] = {}
        self._unsaved: list[Ended] = []
        self._lines = 0
        """Of the file."""
        self._is_torn = False
        """It may end in a part of a line, which the next line would go on."""
        self._has_warned = False
        if file is not None:
            with suppress(OSError):
                self._load(file)

    def add(
        self, address: Address, episode_id: str, ending: Ending | None = None, reply: Mapping[str, Any] | None = None
    ) -> None:
        """A rollout has ended; `ending` is None if the proxy ended it, else what its agent said, and was told."""
        said = None if ending is None else _hashed(ending)
        closes = ending is not None and ending.closes
        names = self._names(address)
        stored = {key: value for key, value in (reply or {}).items() if (key, value) not in names.items()}
        ended = Ended(self._name(address), episode_id, said, stored, closes)
        self._keep(ended)
        if self._file is not None:
            self._unsaved.append(ended)

    def is_known(self, address: Address) -> bool:
        """Whether a rollout has ended."""
        return self._name(address) in self._found

    def before(self, address: Address) -> str | None:
        """Id of the episode that a new one under the same name goes on with."""
        ended = self._found.get(self._name(address))
        return None if ended is None or (ended.said and address.rollout is None) else ended.episode_id

    def check(self, address: Address) -> None:
        """Raise EndedError for calls and spans of a numbered rollout that its agent has ended."""
        if address.rollout is None:
            return
        ended = self._found.get(self._name(address))
        if address.agent is not None and (ended is None or ended.said is None):
            above = self._found.get(self._name(msgspec.structs.replace(address, agent=None)))
            ended = above if above is not None and above.closes else ended
        if ended is not None and ended.said is not None:
            raise EndedError(
                f"{self._told(address)} has ended, as episode {ended.episode_id}; name another run, rollout or attempt"
            )

    def again(self, address: Address, ending: Ending, number_open: int) -> dict[str, Any]:
        """What is answered to an end of a named rollout that is not open: to the same one, the same.

        Raises:
            EndedError: the rollout has ended, and something else is said of it now.
            UsageError: no call of it is known.
        """
        ended = self._found.get(self._name(address))
        if ended is None:
            raise UsageError(
                f"no call has come under the name of {self._told(address)} ({number_open} episodes are open); end a "
                "rollout under the base URL, or with the headers, of its calls"
            )
        if ended.said == _hashed(ending):
            return self._names(address) | ended.reply
        how = "has ended" if ended.said else "was ended by the proxy"
        raise EndedError(
            f"{self._told(address)} {how}, as episode {ended.episode_id}; what is known later is added by "
            "Lake.add_scores"
        )

    def save(self) -> None:
        """Write what is new to the file; what a full disk does not take is tried again. Raises nothing."""
        ends = list(self._unsaved)
        if not ends or self._file is None:
            return
        try:
            with turn(self._file.parent):
                if self._is_torn or self._lines > 2 * self._most:
                    self._write(self._file)
                else:
                    _put(self._file, ends, os.O_APPEND)
                    self._lines += len(ends)
            self._is_torn = False
            del self._unsaved[: len(ends)]  # more may have come
        except OSError as error:
            self._is_torn = True
            del self._unsaved[: -self._most]
            if not self._has_warned:
                self._has_warned = True
                _log.warning("the names of ended rollouts cannot be kept for the next start: %s", error)

    def _name(self, address: Address) -> str:
        """The same for all addresses whose rollout is the same row of the lake."""
        return _digest(address.of_rollout(self._run).uri.encode())

    def _names(self, address: Address) -> dict[str, Any]:
        return {"run_id": address.run or self._run, "task_id": address.task}

    def _told(self, address: Address) -> str:
        rollout = "task" if address.rollout is None else f"rollout {address.rollout} of task"
        attempt = f"attempt {address.attempt} of " if address.attempt else ""
        agent = f" (agent {address.agent})" if address.agent else ""
        return f"{attempt}{rollout} {address.task} in run {address.run or self._run}{agent}"

    def _keep(self, ended: Ended) -> None:
        self._found.pop(ended.name, None)
        self._found[ended.name] = ended
        if len(self._found) > self._most:
            del self._found[next(iter(self._found))]

    def _load(self, file: Path) -> None:
        """Read the file, and leave in it what counts. Raises OSError."""
        with turn(file.parent), file.open("rb") as lines:
            for line in lines:
                with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                    ended = msgspec.json.decode(line, type=Ended)
                    if not _DIGEST.fullmatch(ended.name):
                        ended = msgspec.structs.replace(ended, name=_digest(ended.name.encode()))
                    self._keep(ended)
            self._write(file)

    def _write(self, file: Path) -> None:
        """Put all that is known into a new file in its place. Raises OSError."""
        new = file.with_suffix(".new")
        found = list(self._found.values())
        _put(new, found, os.O_TRUNC)
        new.replace(file)
        self._lines = len(found)


def _put(file: Path, ends: list[Ended], flag: int) -> None:
    """Write lines that their owner alone can read. Raises OSError."""
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | flag, 0o600), "wb") as out:
        out.write(b"".join(msgspec.json.encode(ended) + b"\n" for ended in ends))


def _hashed(ending: Ending) -> str:
    return _digest(msgspec.json.encode(ending))


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
