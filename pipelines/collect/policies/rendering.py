"""Text of chats: prompts by the tokenizer's chat template, and tool calls in a model's answers.

Tokens are append-only: sampled tokens stay, and only the text that the template adds after them is tokenised. Decoding
and encoding a conversation again is not the identity. A template that rewrites earlier turns would start a new sequence
with every turn.

Formats of tool calls:

* `hermes`: JSON objects {"name", "arguments"}, each between <tool_call> and </tool_call> (Qwen, Hermes, SmolLM);
* `llama`: the complete answer is one JSON object {"name", "parameters"}, or several separated by semicolons, optionally
after <|python_tag|> (Llama 3).

A call that cannot be parsed is a reported fault, not an exception: its text stays in the answer for the environment.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import msgspec

from lake import ids
from lake.errors import DataRefusedError, UsageError
from lake.formats.chat.messages import decode_arguments, join_text
from lake.records import printable
from lake.storage.objects import Objects
from lake.write.tokenizers import store_tokenizer
from pipelines.collect.policies import Message
from pipelines.collect.settings import ToolFormat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PROBE: list[Message] = [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}]
_MARK = "eb1f7c"
"""Content of an answer whose end is searched; no template writes this text."""
_CACHED_CHARACTERS = 8192
"""Longer texts (complete conversations) are not cached, since they rarely repeat."""
_EXCERPT = 300
"""Maximum characters of a text in a message."""


class ContextRenderer:
    """A fast tokenizer and its chat template.

    Raises:
        DataRefusedError: it has no chat template.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        if not tokenizer.chat_template:
            msg = (
                f"the tokenizer of `{tokenizer.name_or_path}` has no chat template; put one that leaves earlier turns "
                "as they were generated into the model's folder, as chat_template.jinja"
            )
            raise DataRefusedError(msg)
        self.tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer  # the wrapper around it is slower than the tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        longest_first = sorted(filter(None, tokenizer.all_special_tokens), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        swallowing = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.rstrip}
        leads = [token for token in tokenizer.all_special_tokens if token not in swallowing]
        self._lead: str = leads[0] if leads else ""
        self._lead_ids = self._raw(self._lead) if leads else []
        self._short = lru_cache(maxsize=4096)(self._encode)
        self._context = lru_cache(maxsize=1 << 16)(self._render)
        self.end = self._end_of_turn()
        self.end_id = self._raw(self.end)[0]
        """Token that ends a turn: the template's marker, which may differ from the tokenizer's end token."""
        self.opening = self._opening()

    @cached_property
    def identity(self) -> str:
        """Identity of the tokenizer: equal for equal encodings. Computing it is slow."""
        return ids.to_text(ids.text_hash(self.tokenizer.backend_tokenizer.to_str()))

    def store_tokenizer(self, objects: Objects) -> None:
        """Store the tokenizer in a lake, under the encoding of the tokens that policies record with it."""
        encoding_id = ids.hash_engine_encoding(self.identity, str(self.tokenizer.chat_template))
        store_tokenizer(objects, self.tokenizer.backend_tokenizer.to_str(), [encoding_id])

    def text(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None = None, *, prompts: bool = True
    ) -> str:
        """Render a conversation with the template, plus the assistant's opening if it `prompts`.

        Convert messages with `for_template` first, once each: the conversation is rendered again with every turn.

        Raises:
            DataRefusedError: the template cannot write it.
        """
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    list(messages),
                    tools=list(tools) if tools else None,
                    add_generation_prompt=prompts,
                    tokenize=False,
                )
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            roles = ", ".join(str(message.get("role")) for message in messages[-4:])
            msg = (
                f"the chat template of `{self.tokenizer.name_or_path}` cannot write this conversation (its last roles: "
                f"{roles}): {error}; use roles that the template knows, or put another template into "
                "the model's folder as chat_template.jinja"
            )
            raise DataRefusedError(msg) from error

    def encode(self, text: str, *, is_inside: bool) -> list[int]:
        """Return token ids of a text; `is_inside`: it continues a sequence, so no leading token is added."""
        return list((self._short if len(text) <= _CACHED_CHARACTERS else self._encode)(text, is_inside))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, markers included."""
        return str(self._backend.decode(token_ids, skip_special_tokens=False))

    def context(self, messages: Sequence[Message], is_first: bool) -> list[int]:
        """Return token ids of new messages plus the generation prompt. Raises DataRefusedError: the template rewrites.

        It only knows whether the conversation has started. This suits templates that write a turn equally at every
        position.
        """
        return list(self._context(msgspec.json.encode(messages, order="deterministic"), is_first))

    def _render(self, encoded: bytes, is_first: bool) -> tuple[int, ...]:
        messages = [for_template(message) for message in msgspec.json.decode(encoded)]
        text = self.text(messages if is_first else [*_PROBE, *messages])
        if not is_first:
            generated = self.text(_PROBE[:1]) + str(self.tokenizer.eos_token)
            if not text.startswith(generated):
                msg = (
                    f"the chat template of `{self.tokenizer.name_or_path}` does not continue a generated turn: after "
                    f"an empty answer it renders {text!r}, which does not start with {generated!r}; "
                    "use a template that leaves earlier turns as they were generated"
                )
                raise DataRefusedError(msg)
            text = text[len(generated) :]
        return self._encode(text, is_inside=not is_first)

    def _encode(self, text: str, is_inside: bool) -> tuple[int, ...]:
        # Some tokenizers prepend a space to every text, but not after a marker. So add a marker and drop its tokens.
        if is_inside and self._lead:
            return tuple(self._raw(self._lead + text)[len(self._lead_ids) :])
        return tuple(self._raw(text))

    def _raw(self, text: str) -> list[int]:
        try:
            return list(self._backend.encode(text, add_special_tokens=False).ids)
        except Exception as error:
            # Rust code raises Exception itself, here for a word outside a closed vocabulary.
            folder, excerpt = self.tokenizer.name_or_path, text if len(text) <= _EXCERPT else f"{text[:_EXCERPT]}..."
            raise ValueError(f"the tokenizer in {folder} has no tokens for the text {excerpt!r} ({error})") from error

    def _end_of_turn(self) -> str:
        """Return the first marker that the template writes after an answer, else the tokenizer's end token."""
        try:
            text = self.text([{"role": "user", "content": ""}, {"role": "assistant", "content": _MARK}], prompts=False)
        except DataRefusedError:
            text = ""
        match = self._special.search(text, text.rfind(_MARK) + len(_MARK)) if _MARK in text else None
        return match.group() if match else str(self.tokenizer.eos_token)

    def _opening(self) -> str:
        """Return the template's text before an answer, from its last marker on."""
        try:
            text = self.text([{"role": "user", "content": _MARK}])
        except DataRefusedError:
            return ""
        behind = text[text.rfind(_MARK) + len(_MARK) :]
        markers = list(self._special.finditer(behind))
        return behind[markers[-1].start() :] if markers else behind


def for_template(message: Message) -> Message:
    """Convert a message for templates: no nulls, joined text parts, tool-call arguments as objects.

    Raises:
        DataRefusedError: the content is not text, such as an image.
    """
    fields = {key: value for key, value in message.items() if value is not None}
    content = fields.get("content", "")
    if isinstance(content, list):
        if any(isinstance(part, dict) and "text" not in part for part in content):
            kinds = sorted({str(part.get("type")) for part in content if isinstance(part, dict)})
            msg = f"a message contains content other than text ({', '.join(kinds)}); models receive only text here"
            raise DataRefusedError(msg)
        content = join_text(content, "\n")
    fields["content"] = content
    if isinstance(fields.get("tool_calls"), list):
        fields["tool_calls"] = [decode_arguments(call) for call in fields["tool_calls"]]
    return fields


def read_token_ids(file: Path) -> dict[str, int]:
    """Return the ids of a tokenizer.json by token, in any of its layouts; {} if the file is invalid."""
    try:
        tokenizer = json.loads(file.read_bytes())
        vocabulary = tokenizer["model"]["vocab"]
        pairs = vocabulary.items() if isinstance(vocabulary, dict) else [(v[0], n) for n, v in enumerate(vocabulary)]
        return dict(pairs) | {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or ()}
    except (OSError, ValueError, LookupError, TypeError):
        return {}


_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_HERMES_END, _LLAMA_LEAD = "</tool_call>", "<|python_tag|>"
_THINKING, _THOUGHT = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """A parsed answer."""

    text: str
    """The answer without reasoning and without parsed calls."""
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    """Calls as in an OpenAI message, without ids."""
    fault: str | None = None
    """Why a call cannot be parsed."""


class _UnreadableError(Exception):
    """A call that cannot be parsed."""


def resolve_tool_format(name: ToolFormat, chat_template: str) -> ToolFormat:
    """Return the format of tool calls; `auto`: the one that the chat template writes.

    Raises:
        UsageError: `auto`, and the template writes neither format.
    """
    if name != "auto":
        return name
    if "<tool_call>" in chat_template:
        return "hermes"
    if _LLAMA_LEAD in chat_template or '"parameters": ' in chat_template:
        return "llama"
    raise UsageError(
        "the chat template does not show the format of tool calls; pass --set player.tool_format=hermes, llama, "
        "or none to leave calls in the text"
    )


def parse_answer_text(text: str, tool_format: ToolFormat, *, is_thinking: bool = False) -> ParsedAnswer:
    """Split an answer into reasoning, text and calls.

    Args:
        text: the answer without its end marker.
        tool_format: format of calls; `none`: do not parse calls.
        is_thinking: the prompt already opened the reasoning, so the answer starts inside it.
    """
    reasoning, rest = _split_reasoning(text, is_thinking=is_thinking)
    if tool_format not in _READERS:
        return ParsedAnswer(rest, reasoning)
    try:
        answer_text, calls = _READERS[tool_format](rest)
    except _UnreadableError as error:
        return ParsedAnswer(rest, reasoning, fault=str(error))
    return ParsedAnswer(answer_text, reasoning, calls)


def _split_reasoning(text: str, *, is_thinking: bool) -> tuple[str | None, str]:
    """Split an answer into reasoning and the text after it."""
    opened = text.lstrip()
    if not is_thinking and not opened.startswith(_THINKING):
        return None, text
    thought, closed, rest = opened.removeprefix(_THINKING).partition(_THOUGHT)
    return thought.strip("\n"), rest.lstrip("\n") if closed else ""


def _parse_hermes(text: str) -> tuple[str, list[dict[str, Any]]]:
    matches = list(_HERMES.finditer(text))
    for match in matches:
        if not match.group().endswith(_HERMES_END):
            raise _UnreadableError(f"a <tool_call> is not closed by {_HERMES_END}")
    calls = [_parse_call(_decode_object(match.group(1)), "arguments") for match in matches]
    return (_HERMES.sub("", text).strip() if calls else text), calls


def _parse_llama(text: str) -> tuple[str, list[dict[str, Any]]]:
    body = text.strip()
    is_marked = body.startswith(_LLAMA_LEAD)
    body = body.removeprefix(_LLAMA_LEAD).strip()
    if not is_marked and not body.startswith("{"):
        return text, []
    try:
        objects = list(_iterate_objects(body))
    except _UnreadableError:
        if is_marked or '"name"' in body:
            raise
        return text, []
    if not is_marked and not all(isinstance(value, dict) and "name" in value for value in objects):
        return text, []  # a JSON answer is not a call
    return "", [_parse_call(value, "parameters") for value in objects]


def _iterate_objects(body: str) -> Iterator[Any]:
    """Yield JSON values separated by semicolons."""
    rest = body
    while rest:
        try:
            value, end = _DECODER.raw_decode(rest)
        except (ValueError, RecursionError) as error:
            raise _UnreadableError(f"a tool call is not JSON: {error}") from error
        rest = rest[end:].lstrip()
        if rest and not rest.startswith(";"):
            raise _UnreadableError("the text after a tool call is not a tool call")
        yield value
        rest = rest[1:].lstrip()


def _decode_object(text: str) -> Any:
    values = list(_iterate_objects(text.strip()))
    if len(values) != 1:
        raise _UnreadableError(f"a tool call is {len(values)} JSON values instead of one")
    return values[0]


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _parse_call(value: Any, arguments: str) -> dict[str, Any]:
    """Return a call as in an OpenAI message; accept the other format's name for the arguments too."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        raise _UnreadableError("a tool call names no function")
    alternative = "parameters" if arguments == "arguments" else "arguments"
    call_arguments = value.get(arguments, value.get(alternative, {}))
    if isinstance(call_arguments, str):
        call_arguments = _decode_object(call_arguments)
    if not isinstance(call_arguments, dict):
        raise _UnreadableError(f"the arguments of a call of {value['name']!r} are not an object")
    written = json.dumps(call_arguments, ensure_ascii=False)
    if printable(written + value["name"]) != written + value["name"]:
        raise _UnreadableError(f"a call of {printable(value['name'])!r} holds half a character")
    return {"type": "function", "function": {"name": value["name"], "arguments": written}}


_DECODER = json.JSONDecoder(parse_constant=_no_constant)
_READERS: dict[str, Callable[[str], tuple[str, list[dict[str, Any]]]]] = {
    "hermes": _parse_hermes,
    "llama": _parse_llama,
}
