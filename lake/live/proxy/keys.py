"""Which rollout a call belongs to, as its path and its headers say.

.. code-block:: text

    path      /v1/...                                                         what the headers say
              /ep/KEY/v1/...                                                  task KEY
              /run/R/round/C/task/T/seed/S/rollout/N/attempt/A/v1/...         each part may be left out
              /proxy/rollout/ID/attempt/A/mode/MODE/openai/v1/...             agent-lightning: task ID, split MODE
    headers   X-Trajlake-Run, -Round, -Task, -Seed, -Rollout, -Attempt,       the columns of `episodes` of these names
              -Agent
              X-Trajlake-Group                                                a name: the task, where none is named; a
                                                                              number: the collection round, as -Round
              X-Trajlake-Parent                                               the key of the rollout that called it as a
                                                                              sub-agent, as its path or its task
              X-Session-ID                                                    the task, where nothing else names one

The path counts before the headers, and both before the session. A call that names none of these belongs where its
prompt says: `lake.live.calls.prefixes`. A rollout is a number; any other name stands for a number made of it.

What is wrong with a name is said, and the call refused: were it forwarded, its record would be somebody else's.
"""

import re
from collections.abc import Mapping
from urllib.parse import unquote_to_bytes

import msgspec

from lake.errors import UsageError
from lake.formats.base.fields import sibling_number
from lake.live.calls.address import Address

NAME_LIMIT = 256
"""Characters of a name."""
TOKEN_HEADER = "X-Trajlake-Token"
"""The proxy's own token, which is no part of an address."""
_INT32, _INT64 = (1 << 31) - 1, (1 << 63) - 1
_LIKE_A_NUMBER = re.compile(r"[+-]?\d+")
_HEADER = "x-trajlake-"
_HEADERS = ("run", "round", "task", "seed", "rollout", "attempt", "agent", "group", "parent")
_PLACES = r"(?:/(?:ep|run|round|task|seed|rollout|attempt)/[^/]+)*"
_LIGHTNING = r"/proxy/rollout/[^/]+/attempt/[^/]+/mode/[^/]+/openai"
_PATH = re.compile(rf"({_LIGHTNING}|{_PLACES})(/v1(?:/.*)?)", re.DOTALL)
_KNOWN = frozenset(("ep", "run", "round", "task", "seed", "rollout", "attempt", "mode"))
_PATHS = (
    "/v1/..., /ep/KEY/v1/..., /run/R/round/C/task/T/seed/S/rollout/N/attempt/A/v1/..., each of the six once or left out"
)
_TRAVERSAL = re.compile(r"(^|/)\.{1,2}(/|$)")


def addressed(raw_path: str, headers: Mapping[str, str]) -> tuple[Address, str]:
    """The rollout that a request belongs to, and the path that is asked of the upstream, from `/v1` on.

    Args:
        raw_path: as it stands in the request line, still percent-encoded, without the query.
        headers: by their names, in any case.

    Raises:
        UsageError: a name or a path that is not valid; the message says which and what is.
    """
    prefix, path = _divided(raw_path)
    said = {name: _name(value, f"X-Trajlake-{name.title()}") for name, value in _named_headers(headers)}
    said |= _of_path(prefix)
    group = said.get("group")
    if group is not None and group.isdecimal():
        said.setdefault("round", group)
    elif group is not None:
        if "task" in said:
            raise UsageError(f"X-Trajlake-Group is {group!r}; beside a task it is the number of a collection round")
        said["task"] = group
    session = headers.get("X-Session-ID")
    if "task" not in said and session is not None:
        said["task"] = _name(session, "X-Session-ID")
    address = _address(said)
    if (parent := said.get("parent")) is not None:
        named = _of_path(parent) if parent.startswith("/") else {"task": parent}
        if address.run is not None:
            named.setdefault("run", address.run)
        if address.collection_round is not None:
            named.setdefault("round", str(address.collection_round))
        address = msgspec.structs.replace(address, parent=_address(named))
    return address, path


def _address(said: Mapping[str, str]) -> Address:
    if "task" not in said and (stray := [name for name in ("seed", "rollout", "attempt") if name in said]):
        raise UsageError(
            f"the call names a {stray[0]} and no task; name the task too: /task/T/rollout/N/v1 as base URL"
        )
    rollout = said.get("rollout")
    number = None if rollout is None else _number(rollout)
    if rollout is not None and number is None and _LIKE_A_NUMBER.fullmatch(rollout):
        raise UsageError(f"the rollout is {rollout!r}; valid: a number from 0 to {_INT32}, or a name with letters")
    return Address(
        run=said.get("run"),
        task=said.get("task"),
        rollout=sibling_number(rollout) if rollout is not None and number is None else number,
        attempt=_counted(said, "attempt"),
        agent=said.get("agent"),
        split=said.get("mode"),
        collection_round=_counted(said, "round"),
        seed=_counted(said, "seed", _INT64),
    )


def _divided(raw_path: str) -> tuple[str, str]:
    """What names the rollout, and what is asked of the upstream."""
    if (found := _PATH.fullmatch(raw_path)) is None:
        raise UsageError(f"the path {raw_path[:NAME_LIMIT]!r} is unknown; valid: {_PATHS}")
    prefix, path = found.groups()
    decoded = unquote_to_bytes(path)
    # The upstream may decode a path once more than we do, and resolve dots after that.
    if b"\\" in decoded or b"%" in decoded or any(byte < 32 for byte in decoded):
        raise UsageError(f"the path {path[:NAME_LIMIT]!r} holds a backslash, a control character or %25")
    if _TRAVERSAL.search(decoded.decode("latin-1")) or b"//" in decoded:
        raise UsageError(f"the path {path[:NAME_LIMIT]!r} leads elsewhere than it says; name it without . and ..")
    return prefix, path


def _named_headers(headers: Mapping[str, str]) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for given, value in headers.items():
        name = given.lower()
        if not name.startswith(_HEADER):
            continue
        kind = name.removeprefix(_HEADER)
        if name == TOKEN_HEADER.lower():
            continue
        if kind not in _HEADERS or any(kind == known for known, _ in found):
            valid = ", ".join(f"X-Trajlake-{known.title()}" for known in _HEADERS)
            raise UsageError(f"header {given[:NAME_LIMIT]!r} is unknown or there twice; valid, once each: {valid}")
        found.append((kind, value))
    return found


def _of_path(prefix: str) -> dict[str, str]:
    """The names in a path such as `/run/R/task/T`."""
    is_lightning = prefix.startswith("/proxy/")
    parts = prefix.removeprefix("/proxy").removesuffix("/openai" if is_lightning else "").split("/")[1:]
    names = dict(zip(parts[::2], parts[1::2], strict=False))
    if len(names) * 2 != len(parts) or {"ep", "task"} <= names.keys() or not names.keys() <= _KNOWN:
        raise UsageError(f"the path {prefix[:NAME_LIMIT]!r} names no rollout; valid: {_PATHS}")
    said = {place: _decoded(value, place) for place, value in names.items()}
    if is_lightning:
        said["task"] = said.pop("rollout")
    elif "ep" in said:
        said["task"] = said.pop("ep")
    return said


def _decoded(value: str, place: str) -> str:
    try:
        return _name(unquote_to_bytes(value).decode(), f"`{place}` of the path")
    except UnicodeDecodeError as error:
        raise UsageError(f"`{place}` of the path is {value[:NAME_LIMIT]!r}; valid: percent-encoded UTF-8") from error


def _name(value: str, place: str) -> str:
    """A name that can be shown and typed. Raises UsageError."""
    if not value.strip() or len(value) > NAME_LIMIT or not value.isprintable():
        shown = value if len(value) <= NAME_LIMIT else value[:NAME_LIMIT] + "..."
        msg = f"{place} is {shown!r}; valid: a name of 1 to {NAME_LIMIT} printable characters that is not blank"
        raise UsageError(msg)
    return value.strip()


def _number(value: str, most: int = _INT32) -> int | None:
    is_short = len(value) <= len(str(most)) and value.isascii() and value.isdecimal()
    return number if is_short and (number := int(value)) <= most else None


def _counted(said: Mapping[str, str], place: str, most: int = _INT32) -> int | None:
    if (value := said.get(place)) is None:
        return None
    if (number := _number(value, most)) is None:
        raise UsageError(f"the {place} is {value!r}; valid: a number from 0 to {most}")
    return number
