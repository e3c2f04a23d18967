"""Which earlier call a prompt goes on from: by the messages that it repeats, by its text, or by its tokens.

Every call of an agent repeats its conversation. A prompt goes on from the call whose prompt and answer it begins with;
of several such calls the one with the longest prompt counts. What it holds behind that is new.

Messages are compared twice. First as they were said. Then, because clients rewrite what was answered (they cut words,
rename calls), without the words of the assistant: that tells where in a conversation a prompt is, and counts only if
all calls that fit are of one episode, or if tokens tell them apart. Texts and tokens are compared exactly.

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

from lake.formats.chat.messages import INSTRUCTIONS, Message, is_assistant, text_of
from lake.live.calls.shapes import Asked

_BYTES = 16
_ENCODE = msgspec.json.Encoder(order="deterministic").encode


class Heads(msgspec.Struct, frozen=True):
    """A conversation up to a place: the hash of what was said, and that without the assistant's words."""

    exact: bytes = b""
    loose: bytes = b""

    def then(self, *messages: Message) -> "Heads":
        """With some messages more."""
        return self.along(messages)[-1]

    def along(self, messages: Iterable[Message]) -> list["Heads"]:
        """This one, and with each further message."""
        found = [self]
        for message in messages:
            words = _ENCODE(_said(message))
            is_answer = is_assistant(message)
            shape = _ENCODE(["assistant", len(message.get("tool_calls") or ())]) if is_answer else words
            found.append(Heads(_hash(found[-1].exact, words), _hash(found[-1].loose, shape)))
        return found


class Run(msgspec.Struct, frozen=True):
    """Bytes that later ones may begin with: their hash, which can be added to, and how many they are."""

    hash: Any
    length: int

    @classmethod
    def of(cls, data: bytes, before: "Run | None" = None) -> "Run":
        """Some bytes, behind earlier ones."""
        found = hashlib.blake2b(digest_size=_BYTES) if before is None else before.hash.copy()
        found.update(data)
        return cls(found, (before.length if before else 0) + len(data))


class Known(msgspec.Struct, eq=False, kw_only=True):
    """A call that prompts may go on from; of a call with several samples, one of these."""

    owner: bytes
    """Key of its episode."""
    step: int
    choice: int = 0
    """Which sample."""
    end: Heads
    """The conversation, its answer included."""
    instructions: bytes = b""
    """Hash of its system prompt."""
    tokens: Run | None = None
    """All its tokens so far, if they are known."""
    text: Run | None = None
    """The text of its prompt and its answer, if that is what it was asked."""
    names: tuple[str, ...] = ()
    """Ids by which later calls name it: of its answer, of its conversation."""
    times: int = 0
    """How often a prompt went on from it."""


class Prompt:
    """What a call was given, ready to be compared."""

    def __init__(self, asked: Asked, prompt_ids: Sequence[int]) -> None:
        self.messages, self.previous = asked.messages, asked.previous
        self.heads = Heads().along(asked.messages)
        """Of none of its messages, of the first, of the first two, ..."""
        self.text = None if asked.text is None else as_bytes(asked.text)
        self.tokens = as_bytes(prompt_ids)

    @property
    def exact(self) -> bytes:
        """Hash of all of it."""
        return self.heads[-1].exact

    def behind(self, match: "Match") -> list[Message]:
        """Its messages that are new."""
        if self.text is not None:
            rest = self.text[match.length :].decode("utf-8", "surrogatepass")
            return [{"role": "user", "content": rest}] if rest else []
        return self.messages[match.length :]


class Match(msgspec.Struct, frozen=True):
    """Where a prompt goes on."""

    known: Known
    length: int
    """Messages, or bytes of the text, that are not new."""
    is_exact: bool = True
    """The prompt has the answer as it was said."""


class Prefixes:
    """The calls of some episodes."""

    def __init__(self) -> None:
        self._exact: dict[bytes, list[Known]] = {}
        self._loose: dict[bytes, list[Known]] = {}
        self._tokens, self._texts = _Runs(), _Runs()
        self._names: dict[str, Known] = {}
        self._of: dict[bytes, dict[int, list[Known]]] = {}
        """Of each episode: its steps' samples."""

    def add(self, samples: list[Known]) -> None:
        """A call that was answered, by its samples."""
        self._of.setdefault(samples[0].owner, {})[samples[0].step] = samples
        for known in samples:
            self._exact.setdefault(known.end.exact, []).append(known)
            self._loose.setdefault(known.end.loose, []).append(known)
            self._names |= dict.fromkeys(known.names, known)
            for runs, run in ((self._tokens, known.tokens), (self._texts, known.text)):
                if run is not None:
                    runs.add(run, known)

    @property
    def has_calls(self) -> bool:
        """Whether it knows any."""
        return bool(self._of)

    def forget(self, owner: bytes) -> None:
        """Drop the calls of an episode."""
        for known in (known for samples in self._of.pop(owner, {}).values() for known in samples):
            _drop(self._exact, known.end.exact, known)
            _drop(self._loose, known.end.loose, known)
            for name in known.names:
                if self._names.get(name) is known:
                    del self._names[name]
            for runs, run in ((self._tokens, known.tokens), (self._texts, known.text)):
                if run is not None:
                    runs.drop(run, known)

    def known(self, owner: bytes, step: int, choice: int = 0) -> Known:
        """A sample of a step. Raises LookupError: there is none."""
        return self._of[owner][step][choice]

    def by_name(self, name: str) -> Known | None:
        """The call whose answer, or the last one whose conversation, has this id."""
        return self._names.get(name)

    def by_prompt(self, prompt: Prompt, owner: bytes | None = None) -> Match | None:
        """The call that a prompt goes on from; `owner`: only calls of this episode count."""
        if prompt.previous is not None:
            known = self.by_name(prompt.previous)
            if known is None or owner not in (None, known.owner):
                return None
            is_repeated = instructions_of(prompt.messages) == known.instructions != b""
            return Match(known, int(is_repeated))
        if prompt.text is not None:
            return self._texts.longest(prompt.text, owner)
        if not prompt.messages:
            found = self.by_tokens(prompt, owner)
            return found and Match(found.known, 0)
        return self._by_messages(prompt, owner)

    def _by_messages(self, prompt: Prompt, owner: bytes | None) -> Match | None:
        for length in range(len(prompt.messages), 0, -1):
            head = prompt.heads[length]
            if not is_assistant(prompt.messages[length - 1]) or not (
                fits := _of_owner(self._loose.get(head.loose, ()), owner)
            ):
                continue
            if exact := _of_owner(self._exact.get(head.exact, ()), owner):
                return Match(_chosen(exact), length)
            by_tokens = self.by_tokens(prompt, owner)
            if by_tokens is not None and by_tokens.known in fits:
                return Match(by_tokens.known, length, is_exact=False)
            is_plain = len({known.owner for known in fits}) == 1
            return Match(_chosen(fits), length, is_exact=False) if is_plain else None
        return None

    def by_tokens(self, prompt: Prompt, owner: bytes | None = None) -> Match | None:
        """The call whose tokens a prompt begins with; `owner`: only calls of this episode count.

        The length of the match is in bytes.
        """
        return self._tokens.longest(prompt.tokens, owner)


class _Runs:
    """Runs of bytes: which of them others begin with."""

    def __init__(self) -> None:
        self._lengths: list[int] = []
        self._of_length: dict[int, dict[bytes, list[Known]]] = {}

    def add(self, run: Run, known: Known) -> None:
        if run.length not in self._of_length:
            insort(self._lengths, run.length)
        self._of_length.setdefault(run.length, {}).setdefault(run.hash.digest(), []).append(known)

    def drop(self, run: Run, known: Known) -> None:
        of_length = self._of_length[run.length]
        _drop(of_length, run.hash.digest(), known)
        if not of_length:
            del self._of_length[run.length]
            del self._lengths[bisect_left(self._lengths, run.length)]

    def longest(self, data: bytes, owner: bytes | None) -> Match | None:
        found: Match | None = None
        sofar, done = hashlib.blake2b(digest_size=_BYTES), 0
        for length in self._lengths:
            if length > len(data):
                break
            sofar.update(data[done:length])
            done = length
            if fits := _of_owner(self._of_length[length].get(sofar.digest(), ()), owner):
                found = Match(_chosen(fits), length)
        return found


def as_bytes(sequence: Sequence[int] | str) -> bytes:
    """Token ids, or a text, as what is hashed; 4 bytes an id, so that no id is the beginning of another."""
    if isinstance(sequence, str):
        return sequence.encode("utf-8", "surrogatepass")
    return array("i", sequence).tobytes()


def instructions_of(messages: Sequence[Message]) -> bytes:
    """Hash of the system prompt that messages begin with; empty if there is none."""
    return Heads().then(messages[0]).exact if messages and messages[0]["role"] in INSTRUCTIONS else b""


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
