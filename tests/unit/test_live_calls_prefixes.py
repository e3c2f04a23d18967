"""Which call a prompt continues from, against an oracle that keeps all conversations, texts and tokens as they are."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lake.live.calls.apis import ModelRequest
from lake.live.calls.prefixes import (
    ConversationHash,
    EarlierCall,
    HashedPrompt,
    Match,
    PrefixHash,
    PrefixIndex,
    to_bytes,
)

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SAID = st.sampled_from(["a", "b", "c"])
NEW = st.sampled_from([{"role": "user", "content": "u"}] * 2 + [{"role": "tool", "content": "t", "tool_call_id": "c"}])
ANSWERS = st.builds(
    lambda text, has_call: {"role": "assistant", "content": text} | ({"tool_calls": [CALL]} if has_call else {}),
    SAID,
    st.sampled_from([False, False, True]),
)


class Kept(msgspec.Struct):
    """A call as the oracle keeps it."""

    known: EarlierCall
    conversation: list[Any]
    tokens: list[int] | None
    text: str | None


def tokens_of(messages: Sequence[Any]) -> list[int]:
    """Two ids a message, which do not tell all words apart."""
    return [token for message in messages for token in (len(message["role"]), sum(map(ord, str(message))) % 2)]


def loosely(conversation: Sequence[Any]) -> list[Any]:
    """A conversation without the assistant's words."""
    return [len(m.get("tool_calls", ())) if m["role"] == "assistant" else m for m in conversation]


def choose_call(fits: list[Kept]) -> EarlierCall:
    least = min(entry.known.continuations for entry in fits)
    return next(entry.known for entry in reversed(fits) if entry.known.continuations == least)


def longest_tokens(calls: list[Kept], prompt_ids: list[int]) -> EarlierCall | None:
    fits = [entry for entry in calls if entry.tokens is not None and prompt_ids[: len(entry.tokens)] == entry.tokens]
    longest = max((len(entry.tokens or ()) for entry in fits), default=0)
    return choose_call([entry for entry in fits if len(entry.tokens or ()) == longest]) if fits else None


def expected(calls: list[Kept], messages: list[Any], prompt_ids: list[int]) -> tuple[EarlierCall, int, bool] | None:
    """What the module says of messages, in its words."""
    for length in range(len(messages), 0, -1):
        start = messages[:length]
        if start[-1]["role"] != "assistant":
            continue
        fits = [entry for entry in calls if loosely(entry.conversation) == loosely(start)]
        if not fits:
            continue
        if exact := [entry for entry in fits if entry.conversation == start]:
            return choose_call(exact), length, True
        by_tokens = longest_tokens(calls, prompt_ids)
        if any(entry.known is by_tokens for entry in fits):
            assert by_tokens is not None
            return by_tokens, length, False
        return (choose_call(fits), length, False) if len({entry.known.owner for entry in fits}) == 1 else None
    return None


def match_fields(match: Match | None) -> tuple[EarlierCall, int, bool] | None:
    return None if match is None else (match.call, match.length, match.is_exact)


@given(data=st.data())
def test_messages_and_tokens_find_what_the_oracle_finds(data: st.DataObject) -> None:
    prefixes, calls = PrefixIndex(), list[Kept]()
    for _ in range(data.draw(st.integers(6, 12))):
        base = data.draw(st.sampled_from([None, *calls[:1], *calls[-3:]]))
        history = list(base.conversation) if base else []
        if history and data.draw(st.booleans()):  # the same prompt again
            history = history[:-1]
        answered = [index for index, message in enumerate(history) if message["role"] == "assistant"]
        if answered and data.draw(st.booleans()):  # a client that rewrites an answer
            history[data.draw(st.sampled_from(answered))] = data.draw(ANSWERS)
        messages = [*history, *data.draw(st.lists(NEW, max_size=1))]
        prompt_ids = data.draw(st.sampled_from([tokens_of(messages), []]))
        prompt = HashedPrompt(ModelRequest(messages=messages), prompt_ids)
        owners = sorted({entry.known.owner for entry in calls})
        for owner in (None, *owners):
            own_calls = [entry for entry in calls if owner in (None, entry.known.owner)]
            by_tokens = prefixes.match_tokens(prompt, owner)
            assert (by_tokens and by_tokens.call) == longest_tokens(own_calls, prompt_ids)
            by_prompt = match_fields(prefixes.match_prompt(prompt, owner))
            if messages:
                assert by_prompt == expected(own_calls, messages, prompt_ids)
            else:
                assert by_prompt == (by_tokens and (by_tokens.call, 0, True))
        owner = data.draw(st.sampled_from([b"a", b"b"]))
        answer = data.draw(ANSWERS)
        ids = [*prompt_ids, *tokens_of([answer])] if prompt_ids else None
        earlier = EarlierCall(
            owner=owner,
            step=sum(entry.known.owner == owner for entry in calls),
            end=ConversationHash().extend(*messages, answer),
            tokens=None if ids is None else PrefixHash.of(to_bytes(ids)),
            continuations=data.draw(st.integers(0, 1)),
        )
        prefixes.add([earlier])
        calls.append(Kept(earlier, [*messages, answer], ids, None))
        if data.draw(st.integers(0, 5)) == 0:
            prefixes.forget(owner)
            calls = [entry for entry in calls if entry.known.owner != owner]
    for owner in {entry.known.owner for entry in calls}:
        prefixes.forget(owner)
    assert not prefixes.has_calls
    assert [vars(runs) for runs in (prefixes._tokens, prefixes._texts)] == [{"_lengths": [], "_of_length": {}}] * 2


@given(st.lists(st.tuples(st.text("ab\u00e9", max_size=4), st.text("ab\u00e9", max_size=3)), max_size=6), st.data())
def test_texts_find_what_the_oracle_finds(calls: list[tuple[str, str]], data: st.DataObject) -> None:
    prefixes, entries = PrefixIndex(), list[Kept]()
    for step, (new, answer) in enumerate(calls):
        base = data.draw(st.sampled_from([None, *entries]))
        text = (base.text or "" if base else "") + new
        match = prefixes.match_prompt(
            prompt := HashedPrompt(ModelRequest(messages=[{"role": "user", "content": text}], text=text), [])
        )
        fits = [entry for entry in entries if text.startswith(entry.text or "")]
        longest = [entry for entry in fits if len(entry.text or "") == max(len(fit.text or "") for fit in fits)]
        assert (match and match.call) == (choose_call(longest) if fits else None)
        if match is not None:
            rest = text.removeprefix(longest[0].text or "")
            assert prompt.new_messages(match) == ([{"role": "user", "content": rest}] if rest else [])
        earlier = EarlierCall(
            owner=b"a", step=step, end=ConversationHash(), text=PrefixHash.of(to_bytes(text + answer))
        )
        prefixes.add([earlier])
        entries.append(Kept(earlier, [], None, text + answer))


@given(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=5), min_size=1, max_size=4))
def test_a_run_that_is_added_to_is_the_run_of_all(pieces: list[list[int]]) -> None:
    run = None
    for part in pieces:
        run = PrefixHash.of(to_bytes(part), run)
    prefix = PrefixHash.of(to_bytes([token for part in pieces for token in part]))
    assert run is not None
    assert (run.hash.digest(), run.length) == (prefix.hash.digest(), prefix.length)


@pytest.mark.parametrize(
    ("first_answer", "again", "is_same"),
    [
        ({"content": "x"}, {"content": " x\n"}, True),
        ({"content": "x", "reasoning_content": "y"}, {"content": [{"type": "text", "text": "x"}]}, True),
        ({"content": None, "tool_calls": [CALL]}, {"content": "", "tool_calls": [CALL]}, True),
        (
            {"tool_calls": [CALL | {"function": {"name": "f", "arguments": '{"a": 1}'}}]},
            {"tool_calls": [CALL | {"function": {"name": "f", "arguments": {"a": 1}}}]},
            True,
        ),
        ({"content": "x"}, {"content": "y"}, False),
        ({"tool_calls": [CALL]}, {"tool_calls": [CALL | {"id": "other"}]}, False),
    ],
)
def test_an_answer_is_the_same_however_a_client_spells_it(
    first_answer: dict[str, Any], again: dict[str, Any], is_same: bool
) -> None:
    first, second = (ConversationHash().extend({"role": "assistant"} | message) for message in (first_answer, again))
    assert (first.exact == second.exact) == is_same
    assert first.loose == second.loose


def test_tokens_tell_apart_what_a_client_tells_in_other_words() -> None:
    """A client gives calls its own ids, which no template shows to the model."""
    prefixes, user = PrefixIndex(), {"role": "user", "content": "u"}
    messages = [{"role": "assistant", "content": text, "tool_calls": [CALL]} for text in ("x", "y")]
    first, second = (
        EarlierCall(
            owner=owner,
            step=0,
            end=ConversationHash().extend(user, message),
            tokens=PrefixHash.of(to_bytes([1, 2, token])),
        )
        for owner, message, token in ((b"a", messages[0], 3), (b"b", messages[1], 4))
    )
    prefixes.add([first])
    prefixes.add([second])
    again = [user, messages[0] | {"tool_calls": [CALL | {"id": "mine"}]}, {"role": "tool", "content": "t"}]
    match = prefixes.match_prompt(HashedPrompt(ModelRequest(messages=again), [1, 2, 3, 5]))
    assert match is not None
    assert (match.call, match.length, match.is_exact) == (first, 2, False)
    assert prefixes.match_prompt(HashedPrompt(ModelRequest(messages=again), [])) is None, "nothing tells whose it is"


def test_an_answer_is_named_by_its_id_and_by_its_conversation() -> None:
    prefixes = PrefixIndex()
    first = EarlierCall(
        owner=b"a",
        step=0,
        end=ConversationHash(),
        instructions=ConversationHash().extend(SYSTEM).exact,
        names=("r1", "conv"),
    )
    second = EarlierCall(owner=b"a", step=1, end=ConversationHash(), names=("r2", "conv"))
    prefixes.add([first])
    prefixes.add([second])
    user = {"role": "user", "content": "u"}

    def goes_on(previous: str, *messages: Any, owner: bytes | None = None) -> tuple[EarlierCall, int, bool] | None:
        return match_fields(
            prefixes.match_prompt(HashedPrompt(ModelRequest(messages=list(messages), previous=previous), []), owner)
        )

    assert goes_on("r1", user) == (first, 0, True)
    assert goes_on("conv", user) == (second, 0, True)
    assert goes_on("r1", SYSTEM, user) == (first, 1, True), "instructions that are said again are not new"
    assert goes_on("r2", SYSTEM, user) == (second, 0, True)
    assert goes_on("r1", user, owner=b"b") is None
    assert goes_on("r3", user) is None
    prefixes.forget(b"a")
    assert goes_on("conv", user) is None


SYSTEM = {"role": "system", "content": "You open doors."}
