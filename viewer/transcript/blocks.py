r"""Texts of a step: its messages, state, reasoning, action, and calls with results.

A call's result is stored with the next step, whose state it is; it is shown with the call. The conversation shows the
blocks of all steps in order, without those that an earlier step has shown (`is_repeated`): so each message stands in it
once. A step in the outline shows all its blocks, because it is read alone.

Every text is foreign. It is first cut, its control characters are made visible, and `form` says how to draw it
(`viewer.transcript.rendering`).
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any, Literal

from lake.formats.codex import CLIENT_TEXT
from viewer import plain
from viewer.queries import FAILURE, Row
from viewer.queries.episodes import DEMONSTRATION
from viewer.queries.transcripts import LONG_REASONING, TEXT
from viewer.transcript import rendering
from viewer.transcript.rendering import RESULT_ROLES, Kind

LONG_OUTPUT = 700
"""Longest output of a tool that is not folded."""
IMAGE = 4_000_000
"""Maximum characters of an image's data URI."""
IMAGES = 8
"""Maximum images of a message."""

_IMAGE = re.compile("data:image/(?:png|jpeg|gif|webp);base64,[A-Za-z0-9+/=\\s]+")
_ACTING_IN_TEXT = ("swe_agent", "mini_swe_agent")
"""Formats of agents that act in their text, where messages of a user after the first step are observations."""
_OBSERVATION = re.compile(r"\s*(?:OBSERVATION:|Observation:|<returncode>)")
THOUGHT = re.compile(r"\s*<think>([\s\S]*?)</think>\s*")
"""Reasoning that a model wrote at the beginning of its message."""


@dataclass(frozen=True, slots=True)
class Block:
    """A text of a step."""

    name: str
    """Name of the block in its step: `state`, `call/0`."""
    kind: Literal["message", "state", "reasoning", "action", "call", "result"]
    label: str
    text: str
    length: int
    """Characters of the full text."""
    form: Kind = "text"
    is_folded: bool = False
    images: tuple[str, ...] = ()
    """Data URIs of images."""
    role: str = "assistant"
    """Role of the message that the block belongs to."""
    place: int | None = None
    """Position of that message from the first message of the step; None if no message holds the text."""
    is_repeated: bool = False
    """Whether an earlier step, or the messages before the first one, show the text."""
    language: str = ""
    """Language of the file that the text is from."""
    is_failed: bool = False
    """Whether the text is the result of a call or an action that failed."""

    def sent(self, limit: int = TEXT) -> dict[str, Any]:
        """What the page gets: the text cut after `limit` characters, and its markup, which may be of the whole text."""
        text = self.text[:limit]
        # A tree and a diff need the whole text.
        is_whole = self.form in ("json", "call", "diff") and len(self.text) <= rendering.MAX_OTHER
        markup = rendering.render(self.text if is_whole else text, self.form, self.language)
        sizes = {"shown": len(text), "is_whole": is_whole}
        return asdict(self) | sizes | {"text": plain.visible(text), "html": markup}


def list_step_blocks(
    row: Row, following: Sequence[Any], previous: Row | None = None, earlier: Sequence[Any] = ()
) -> list[Block]:
    """Return the blocks of a step.

    Args:
        row: a row of `transcripts.read_steps`.
        following: messages between this decision and the next one or the end; results of calls are among them.
        previous: the row of the step before, whose calls show their results.
        earlier: messages before the first step, for the first step.
    """
    blocks = list(_list_incoming_blocks(row, previous, earlier))
    reasoning, action = row["reasoning"], row["action"]
    if reasoning:
        is_folded = row["reasoning_length"] > LONG_REASONING
        blocks.append(replace(_build_column_block(row, "reasoning", "reasoning"), is_folded=is_folded))
    calls = list(_list_call_blocks(row, following))
    # A result stands below its call, or below the action, though this may be empty.
    has_call = any(block.kind == "call" for block in calls)
    if action or not has_call:
        block = _build_column_block(row, "action", "action")
        thought = THOUGHT.match(block.text)
        # Some models write their reasoning into the message, and the lake holds it separately too.
        if thought and reasoning and _squeeze(thought[1]) == _squeeze(reasoning):
            rest = block.text[thought.end() :]
            block = replace(block, text=rest, length=block.length - thought.end())
        if block.text or not has_call:
            blocks.append(block)
    return blocks + calls


def list_message_blocks(messages: Sequence[Any], name: str, results: Collection[int] = ()) -> list[Block]:
    """Return the blocks of chat messages outside the steps; system prompts, and what a client adds, are folded.

    Args:
        messages: the messages.
        name: prefix of the blocks' names.
        results: positions of the messages that a call shows as its result.
    """
    return [
        replace(_build_message_block(message, f"{name}/{place}"), place=place, is_repeated=place in results)
        for place, message in enumerate(messages)
    ]


def merge_demonstrations(messages: Sequence[Any]) -> list[Any]:
    """Return messages with each run of examples that stand in front of the task as one message."""
    if all(_is_demonstration(message) for message in messages if plain.get_role(message) == "user"):
        return list(messages)
    merged: list[Any] = []
    for is_example, run in groupby(messages, key=_is_demonstration):
        turns = list(run)
        texts = [extract_text(turn) for turn in turns]
        if len(turns) > 1:
            texts = [f"{plain.get_role(turn)}: {text}" for turn, text in zip(turns, texts, strict=True)]
        merged += [{"role": "demonstration", "content": "\n\n".join(texts)}] if is_example else turns
    return merged


def _is_demonstration(message: Any) -> bool:
    is_marked = isinstance(message, Mapping) and message.get("is_demo") is True
    return is_marked or (plain.get_role(message) == "user" and extract_text(message).startswith(DEMONSTRATION))


def list_following_messages(row: Row | None) -> list[Any]:
    """Return the messages that a step begins with, its state among them."""
    if row is None:
        return []
    messages = plain.parse_list(row["context"], row["context_length"]) or []
    is_there = any(plain.get_role(message) in RESULT_ROLES for message in messages)
    if row["state_role"] in RESULT_ROLES and not is_there:
        content = plain.CutText(row["state"] or "", row["state_length"])
        messages = [*messages, {"role": row["state_role"], "content": content}]
    return messages


def match_results(row: Row | None, following: Sequence[Any]) -> dict[int, int]:
    """Return the position of the message with the result of each call of a step: by its id, else by position.

    A step without calls may act in its text; the observation that a user's message holds is then result 0.
    """
    calls = None if row is None else plain.parse_list(row["tool_calls"], row["tool_calls_length"])
    if row is None or calls is None:
        return {}
    named: dict[str, int] = {}
    unnamed: list[int] = []
    for place, message in enumerate(following):
        if (calls and plain.get_role(message) in RESULT_ROLES) or _is_observation(message, row):
            if call_id := _get_string(message, "tool_call_id"):
                named[call_id] = place
            else:
                unnamed.append(place)
    matches: dict[int, int] = {}
    for position, call in enumerate(calls or [None]):
        call_id = _get_string(call, "id")
        if call_id in named:
            matches[position] = named.pop(call_id)
        elif position < len(unnamed):
            matches[position] = unnamed[position]
    return matches


def _is_observation(message: Any, row: Row) -> bool:
    """Return whether a message after a step is its result in the role of a user; OpenHands says what it observed."""
    if plain.get_role(message) != "user":
        return False
    is_marked = "observation" in (_get_string(message, "message_type"), *message)
    is_marked = is_marked or row.get("source_format") in _ACTING_IN_TEXT
    return is_marked or _OBSERVATION.match(extract_text(message)) is not None


def _build_column_block(row: Row, column: str, kind: Literal["state", "reasoning", "action"]) -> Block:
    text, length = row[column] or "", row[f"{column}_length"]
    role = {"action": "assistant", "reasoning": "reasoning"}.get(column, row["state_role"] or "")
    form = rendering.detect(text, role)
    return Block(column, kind, kind, text, length, form, place=row["incoming"])


def _list_incoming_blocks(row: Row, previous: Row | None, earlier: Sequence[Any]) -> Iterator[Block]:
    """Yield the messages since the last decision, and the state if no message holds it."""
    is_whole = plain.parse_list(row["context"], row["context_length"]) is not None
    messages = list_following_messages(row)
    if is_whole:
        results = set(match_results(previous, messages).values())
        for block in list_message_blocks(messages, "context", results):
            is_output = block.role in RESULT_ROLES and block.length > LONG_OUTPUT
            yield replace(block, is_folded=block.is_folded or is_output)
    else:
        label = "messages since the last step"
        yield Block("context", "message", label, row["context"], row["context_length"], role="user", place=0)
    if _holds_state(messages, row) or (row["state"] is None and messages):
        return
    block = _build_column_block(row, "state", "state")
    is_first = not row["context_length"] or not messages
    yield replace(
        block,
        label="state" + (f" ({plain.one_line(row['state_role'])})" if row["state_role"] else ""),
        role=plain.one_line(row["state_role"] or "environment"),
        place=0 if is_first and row["incoming"] else None,
        is_repeated=row["state"] is None or _holds_state(earlier, row),
        is_folded=row["state_role"] in RESULT_ROLES and block.length > LONG_OUTPUT,
    )


def _holds_state(messages: Sequence[Any], row: Row) -> bool:
    """Return whether the state is the text of a message, or of several in order; of a cut state, its beginning."""
    state = _squeeze(row["state"] or "")
    is_cut = row["state_length"] > len(row["state"] or "")
    texts = [text for text in map(_squeeze, map(_join_text_parts, messages)) if text]
    if not state:
        return len(texts) < len(messages)
    for first in range(len(texts)):
        joined = ""
        for text in texts[first:]:
            longer = f"{joined} {text}".lstrip()
            if longer == state or (is_cut and longer.startswith(state)):
                return True
            # Messages of other roles may stand between those of a state.
            if state.startswith(longer):
                joined = longer
            elif not joined:
                break
    return False


def _join_text_parts(message: Any) -> str:
    """Return the text of a message without its images and other parts."""
    contents = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(contents, list):
        return plain.get_text(message)
    return "\n".join(_get_string(part, "text") for part in contents)


def _list_call_blocks(row: Row, following: Sequence[Any]) -> Iterator[Block]:
    """Yield tool calls, each with its result."""
    calls, place = plain.parse_list(row["tool_calls"], row["tool_calls_length"]), row["incoming"]
    if calls is None:
        length = row["tool_calls_length"]
        yield Block("tool_calls", "call", "tool calls", row["tool_calls"], length, place=place)
        return
    matches = match_results(row, following)
    for position, call in enumerate(calls or [None]):
        name, arguments = ("", "") if call is None else plain.parse_call(call)
        if call is not None:
            label, form = plain.one_line(name), rendering.detect(arguments, "call")
            yield Block(f"call/{position}", "call", label, arguments, len(arguments), form, place=place)
        if (at := matches.get(position)) is not None:
            message = following[at]
            block = _build_message_block(message, f"result/{position}")
            form, language = rendering.detect(block.text, "tool", name), rendering.find_language(arguments)
            label = "result from user" if block.role == "user" else "result"  # a person may have written it
            block = replace(block, kind="result", label=label, is_folded=block.length > LONG_OUTPUT)
            is_failed = re.search(FAILURE, json.dumps(message, ensure_ascii=False)) is not None
            yield replace(block, form=form, language=language, is_failed=is_failed, place=place + 1 + at)


def _build_message_block(message: Any, name: str) -> Block:
    role, text = plain.one_line(plain.get_role(message)), extract_text(message)
    form = rendering.detect(text, role)
    is_folded = role in ("system", "developer", "demonstration") or (role == "user" and bool(CLIENT_TEXT.match(text)))
    length = text.length if isinstance(text, plain.CutText) else len(text)
    return Block(name, "message", role, str(text), length, form, is_folded, tuple(list_images(message)), role)


def extract_text(message: Any) -> str:
    """Return the text of a message, with a description in place of each image."""
    contents = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(contents, list) or not all(isinstance(part, Mapping) for part in contents):
        return plain.get_text(message)
    return "\n".join(_format_part(part) for part in contents)


def list_images(message: Any) -> list[str]:
    """Return the images of a message, as data URIs of formats that cannot hold a script."""
    contents = message.get("content") if isinstance(message, Mapping) else None
    parts = contents if isinstance(contents, list) else []
    addresses = [_get_image_address(part) for part in parts if isinstance(part, Mapping)]
    return [address for address in addresses if len(address) <= IMAGE and _IMAGE.fullmatch(address)][:IMAGES]


def _format_part(part: Mapping[Any, Any]) -> str:
    if isinstance(text := part.get("text"), str):
        return text
    if address := _get_image_address(part):
        kind = address[:80].partition(",")[0] if address.startswith("data:") else plain.one_line(address, 200)
        return f"[image: {kind}, {len(address):,} characters]" if address.startswith("data:") else f"[image: {kind}]"
    return json.dumps(part, ensure_ascii=False, indent=1)


def _get_image_address(part: Mapping[Any, Any]) -> str:
    """Return the address of an image; empty without one. Anthropic's `source` is returned as a data URI."""
    image, source = part.get("image_url", part.get("image")), part.get("source")
    if isinstance(image, Mapping):
        image = image.get("url")
    if isinstance(source, Mapping) and source.get("type") == "base64":
        return f"data:{source.get('media_type')};base64,{source.get('data')}"
    return image if isinstance(image, str) else ""


def _get_string(value: Any, name: str) -> str:
    text = value.get(name) if isinstance(value, Mapping) else None
    return text if isinstance(text, str) else ""


def _squeeze(text: str) -> str:
    """Return the text with each run of white space as one space."""
    return " ".join(text.split())
