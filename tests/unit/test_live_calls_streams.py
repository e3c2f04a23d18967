"""Streams are taken apart no matter where a connection cuts them, and what they say is what the whole answer says."""

import json
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lake.formats.base.rows import ShapeError
from lake.formats.chat.completions import Completion
from lake.formats.chat.messages import build_decision
from lake.live.calls.apis import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    EventParser,
    StreamEvent,
    new_assembler,
    parse_answer,
)
from lake.records import StepRecord
from testkit.model_answers import TEXTS, Answer, Piece, answers, events, whole_answer

ASKED = {"return_token_ids": True, "logprobs": True}
SAID = st.dictionaries(TEXTS, TEXTS | st.integers(), max_size=2)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    """A stream in pieces."""
    ends = [0, *sorted(position % (len(data) + 1) for position in places), len(data)]
    return [data[start:end] for start, end in pairwise(ends)]


@given(
    st.lists(st.tuples(SAID | st.just("[DONE]") | st.none(), st.booleans()), max_size=5),
    st.sampled_from([b"\n", b"\r\n", b"\r"]),
    st.lists(st.integers(0, 10_000), max_size=12),
    st.binary(max_size=4).filter(lambda rest: b"\n" not in rest and b"\r" not in rest),
)
def test_events_are_the_same_wherever_they_are_cut(
    events_sent: list[tuple[Any, bool]], end: bytes, places: list[int], rest: bytes
) -> None:
    written = []
    for data, is_named in events_sent:
        lines = [b"event: some"] if is_named else []
        lines += [b": a comment" if data is None else b"data: " + (b"[DONE]" if data == "[DONE]" else dumps(data))]
        written.append(end.join([*lines, b"", b""]))
    stream = b"".join(written) + rest
    events_read, parser = [], EventParser()
    for piece in cut(stream, places):
        events_read += parser.feed(piece)
    assert [event.data for event in events_read] == [data for data, _ in events_sent]
    assert b"".join(event.raw for event in events_read) == b"".join(written)
    assert parser.unparsed == rest


def test_an_event_may_have_its_data_on_several_lines_and_no_json() -> None:
    (event, broken_event) = EventParser().feed(b'data: {"a":\ndata:  1}\n\ndata: {no\n\n')
    assert event.data == {"a": 1}
    assert broken_event.data is None


def test_other_data_leaves_the_rest_of_an_event() -> None:
    event = StreamEvent(b'id: 7\nevent: x\ndata: {"a": 1}\n\n', {"a": 1})
    assert event.with_data({"a": 2}) == b'id: 7\nevent: x\ndata: {"a":2}\n\n'


@pytest.mark.parametrize("api", [CHAT, COMPLETIONS, RESPONSES, MESSAGES])
@given(data=st.data())
def test_a_gathered_answer_is_the_whole_one(api: str, data: st.DataObject) -> None:
    is_plain = api == COMPLETIONS
    most = 2 if api in (CHAT, COMPLETIONS) else 1
    samples = data.draw(st.lists(answers(has_calls=not is_plain), min_size=1, max_size=most))
    gathered = new_assembler(api)
    for event in events(api, ASKED, samples, [5, 6]):
        assert not gathered.is_whole
        gathered.add(event)
    assert gathered.is_whole
    assert meaning(parse_answer(api, gathered.answer())) == meaning(
        parse_answer(api, whole_answer(api, ASKED, samples, [5, 6]))
    )


@pytest.mark.parametrize("api", [CHAT, RESPONSES, MESSAGES])
def test_what_came_of_an_answer_that_is_cut_is_told(api: str) -> None:
    answer = Answer([Piece("The door ", [1], [-1.0]), Piece("is shut.", [2], [-1.0]), Piece("", [3], [0.0])])
    gathered = new_assembler(api)
    for event in list(events(api, ASKED, [answer], [5]))[:4]:
        gathered.add(event)
    assert not gathered.is_whole
    message = parse_answer(api, {key: v for key, v in (gathered.answer() or {}).items() if key != "status"}).message
    assert message is not None
    assert message["content"].startswith("T")
    assert answer.text.startswith(message["content"])


@pytest.mark.parametrize("api", [CHAT, COMPLETIONS, RESPONSES, MESSAGES])
def test_an_error_in_a_stream_is_one(api: str) -> None:
    with pytest.raises(ShapeError, match="no room"):
        new_assembler(api).add({"type": "error", "error": {"message": "no room"}})


@pytest.mark.parametrize("status", ["failed", "cancelled", "queued", "in_progress"])
def test_a_response_that_is_no_answer_is_refused(status: str) -> None:
    with pytest.raises(ShapeError, match=status):
        parse_answer(RESPONSES, {"status": status, "output": [], "error": None})


def meaning(answer: Completion) -> tuple[StepRecord | None, list[Any], Any]:
    """What an answer says, without the ways of writing nothing."""
    step = build_decision(answer.message, [], is_first=True) if answer.message else None
    about = [answer.model, answer.finish_reason, answer.prompt_ids, answer.action_ids, answer.logprobs]
    other_choices = [
        choice | {"message": choice["message"] and build_decision(choice["message"], [], is_first=True)}
        for choice in answer.extra.pop("choices", ())
    ]
    return step, [*about, answer.prompt_tokens, answer.completion_tokens, other_choices], answer.extra


def dumps(data: Any) -> bytes:
    return json.dumps(data).encode() if len(str(data)) % 2 else msgspec.json.encode(data)
