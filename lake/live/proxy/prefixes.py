"""Which earlier call a prompt goes on from: by the messages that it repeats, and by its tokens.

Every call of an agent repeats its conversation. A prompt goes on from the call whose prompt and answer it begins with;
of several such calls the one with the longest prompt counts. What it holds behind that is new.

Messages are compared twice. First as they were said. Then, because clients rewrite what was answered (they cut
reasoning, strip spaces, parse arguments), without the words of the assistant: that tells where in a conversation a
prompt is, and counts only if all calls that fit are of one episode. Tokens are compared exactly.

Conversations are kept as hashes, 16 bytes a prefix, and not as text: an agent's calls repeat each other, so that their
texts would grow with the square of its turns.
"""

import hashlib
from array import array
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from lake.formats.chat.messages import Message, is_assistant, text_of

_BYTES = 16
_ENCODE = msgspec.json.Encoder(order="deterministic").encode


class Heads(msgspec.Struct, frozen=True):
    """A conversation up to a place: the hash of what was said, and that without the assistant's words."""

    exact: bytes = b""
    loose: bytes = b""

    def then(self, messages: Iterable[Message]) -> "Heads":
        """With some messages more."""
        head = self
        for message in messages:
            words = _ENCODE(_said(message))
            is_answer = is_assistant(message)
            shape = _ENCODE(["assistant", len(message.get("tool_calls") or ())]) if is_answer else words
            head = Heads(_hash(head.exact, words), _hash(head.loose, shape))
        return head


class Known(msgspec.Struct, eq=False):
    """A call that prompts may go on from."""

    owner: bytes
    """Key of its episode."""
    step: int
    end: Heads
    """The conversation, its answer included."""
    tokens: Any = None
    """Hash of all its tokens so far, which can be added to; None where they are not known."""
    length: int = 0
    """How many tokens those are."""
    response: str | None = None
    times: int = 0
    """How often a prompt went on from it."""


class Match(msgspec.Struct, frozen=True):
    """Where a prompt goes on."""

    known: Known
    length: int
    """Messages, or tokens, of the prompt that are not new."""
    is_exact: bool = True


class Prefixes:
    """The calls of some episodes."""

    def __init__(self) -> None:
        self._exact: dict[bytes, list[Known]] = {}
        self._loose: dict[bytes, list[Known]] = {}
        self._tokens: dict[int, dict[bytes, list[Known]]] = {}
        self._lengths: list[int] = []
        self._responses: dict[str, Known] = {}
        self._of: dict[bytes, list[Known]] = {}

    def add(self, known: Known) -> None:
        """A call that was answered."""
        self._of.setdefault(known.owner, []).append(known)
        self._exact.setdefault(known.end.exact, []).append(known)
        self._loose.setdefault(known.end.loose, []).append(known)
        if known.response is not None:
            self._responses[known.response] = known
        if known.tokens is not None:
            if known.length not in self._tokens:
                insort(self._lengths, known.length)
            of_length = self._tokens.setdefault(known.length, {})
            of_length.setdefault(known.tokens.digest(), []).append(known)

    @property
    def has_calls(self) -> bool:
        """Whether it knows any."""
        return bool(self._of)

    def forget(self, owner: bytes) -> None:
        """Drop the calls of an episode."""
        for known in self._of.pop(owner, ()):
            _drop(self._exact, known.end.exact, known)
            _drop(self._loose, known.end.loose, known)
            if known.response is not None and self._responses.get(known.response) is known:
                del self._responses[known.response]
            if known.tokens is not None:
                of_length = self._tokens[known.length]
                _drop(of_length, known.tokens.digest(), known)
                if not of_length:
                    del self._tokens[known.length]
                    del self._lengths[bisect_left(self._lengths, known.length)]

    def known(self, owner: bytes, step: int) -> Known:
        """A step's call."""
        return self._of[owner][step]

    def by_response(self, response: str) -> Known | None:
        """The call that gave an answer of this id."""
        return self._responses.get(response)

    def by_messages(self, messages: Sequence[Message], owner: bytes | None = None) -> Match | None:
        """The call that a prompt goes on from; `owner`: only calls of this episode count."""
        hits: list[tuple[int, Heads]] = []
        head = Heads()
        for index, message in enumerate(messages):
            head = head.then((message,))
            if is_assistant(message) and head.loose in self._loose:
                hits.append((index + 1, head))
        for length, head in reversed(hits):
            if exact := _of_owner(self._exact.get(head.exact, ()), owner):
                return Match(_chosen(exact), length)
            loose = _of_owner(self._loose[head.loose], owner)
            if len({known.owner for known in loose}) == 1:
                return Match(_chosen(loose), length, is_exact=False)
        return None

    def by_tokens(self, prompt_ids: Sequence[int], owner: bytes | None = None) -> Match | None:
        """The call whose tokens a prompt begins with; `owner`: only calls of this episode count."""
        found: Match | None = None
        sofar, done = hashlib.blake2b(digest_size=_BYTES), 0
        for length in self._lengths:
            if length > len(prompt_ids):
                break
            sofar.update(as_bytes(prompt_ids[done:length]))
            done = length
            if fits := _of_owner(self._tokens[length].get(sofar.digest(), ()), owner):
                found = Match(_chosen(fits), length)
        return found


def token_hash(before: Known | None, new_ids: Sequence[int]) -> Any:
    """The hash of a sequence: the tokens of an earlier call, and those behind them."""
    found = hashlib.blake2b(digest_size=_BYTES) if before is None else before.tokens.copy()
    found.update(as_bytes(new_ids))
    return found


def as_bytes(token_ids: Sequence[int]) -> bytes:
    """Token ids as what is hashed: 4 bytes each, so that no id is the beginning of another."""
    return array("i", token_ids).tobytes()


def _said(message: Message) -> list[Any]:
    """What makes a message the same as another one."""
    text = text_of(message.get("content"), "\n").strip()
    if is_assistant(message):
        return ["assistant", text, [_call(call) for call in message.get("tool_calls") or ()]]
    parts = message.get("content")
    others = (
        [part for part in parts if isinstance(part, dict) and "text" not in part] if isinstance(parts, list) else []
    )
    return [message["role"], text, message.get("tool_call_id"), others]


def _call(call: Any) -> list[Any]:
    """A tool call without the ways of spelling its arguments."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return [call]
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(msgspec.MsgspecError, RecursionError):
            arguments = msgspec.json.decode(arguments)
    return [call.get("id"), function.get("name"), arguments]


def _hash(head: bytes, words: bytes) -> bytes:
    return hashlib.blake2b(head + words, digest_size=_BYTES).digest()


def _of_owner(known: Iterable[Known], owner: bytes | None) -> list[Known]:
    return [one for one in known if owner is None or one.owner == owner]


def _chosen(fits: list[Known]) -> Known:
    """Of calls that are told apart by nothing: one that no prompt went on from, and the newest of these."""
    return min(reversed(fits), key=lambda known: known.times)


def _drop(table: dict[bytes, list[Known]], key: bytes, known: Known) -> None:
    table[key].remove(known)
    if not table[key]:
        del table[key]
