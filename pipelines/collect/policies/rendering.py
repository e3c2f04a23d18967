"""Rendering: what a tokenizer's chat template writes, as text, and the token ids of what is new of it.

Tokens are append-only: what was sampled is kept, and only what the template writes after it is tokenised. Decoding and
encoding a conversation again is not the identity, and a template that rewrites earlier turns would make every turn a
sequence of its own.
"""

import json
import re
from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import msgspec

from lake import ids
from lake.errors import DataRefusedError
from lake.formats.chat.messages import text_of
from lake.formats.chat.templates import with_objects
from pipelines.collect.policies import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PROBE: list[Message] = [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}]
_MARK = "eb1f7c"
"""Content of an answer whose end is looked for: nothing that a template writes by itself."""
_CACHED_CHARACTERS = 8192
"""Longer texts (whole conversations) are encoded each time: they are rarely the same."""
_EXCERPT = 300
"""Characters of a text that a message shows."""


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
        self._backend = tokenizer.backend_tokenizer  # without what surrounds it, which takes longer than it does
        self._backend.no_truncation()
        self._backend.no_padding()
        self._special = re.compile("|".join(map(re.escape, _longest_first(tokenizer.all_special_tokens))) or "(?!)")
        swallowing = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.rstrip}
        leads = [token for token in tokenizer.all_special_tokens if token not in swallowing]
        self._lead: str = leads[0] if leads else ""
        self._lead_ids = self._raw(self._lead) if leads else []
        self._short = lru_cache(maxsize=4096)(self._encode)
        self._context = lru_cache(maxsize=1 << 16)(self._render)
        self.end = self._end_of_turn()
        self.end_id = self._raw(self.end)[0]
        """The token that ends a turn: the template's marker, which is not always the tokenizer's end token."""
        self.opening = self._opening()

    @cached_property
    def identity(self) -> str:
        """Identity of the tokenizer: equal for equal encodings. It is written out for that, which takes a while."""
        return ids.to_text(ids.text_hash(self.tokenizer.backend_tokenizer.to_str()))

    def text(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None = None, *, prompts: bool = True
    ) -> str:
        """What the template writes of a conversation, up to where the assistant begins if it `prompts`.

        Messages are as `for_template` makes them: once each, as a conversation is written anew with every turn.

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
                f"{roles}): {error}; have the environment speak in roles that it knows, or put another template into "
                "the model's folder, as chat_template.jinja"
            )
            raise DataRefusedError(msg) from error

    def encode(self, text: str, *, is_inside: bool) -> list[int]:
        """Token ids of a text; `is_inside`: it goes on a sequence, so the tokenizer puts nothing before it."""
        return list((self._short if len(text) <= _CACHED_CHARACTERS else self._encode)(text, is_inside))

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, markers included."""
        return str(self._backend.decode(token_ids, skip_special_tokens=False))

    def context(self, messages: Sequence[Message], is_first: bool) -> list[int]:
        """Token ids that the new messages and the generation prompt add; DataRefusedError if the template rewrites.

        It knows nothing of the conversation but whether it has begun: right for templates that write every turn the
        same wherever it stands.
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
        # Some tokenizers put a space before every text: behind a marker, which is taken off again, there is none.
        if is_inside and self._lead:
            return tuple(self._raw(self._lead + text)[len(self._lead_ids) :])
        return tuple(self._raw(text))

    def _raw(self, text: str) -> list[int]:
        try:
            return list(self._backend.encode(text, add_special_tokens=False).ids)
        except Exception as error:
            # The class of errors in Rust code is Exception itself: here, a word that is not in a closed vocabulary.
            folder, said = self.tokenizer.name_or_path, text if len(text) <= _EXCERPT else f"{text[:_EXCERPT]}..."
            raise ValueError(f"the tokenizer in {folder} has no tokens for the text {said!r} ({error})") from error

    def _end_of_turn(self) -> str:
        """The first marker that the template writes behind an answer; the tokenizer's end token if it writes none."""
        try:
            said = self.text([{"role": "user", "content": ""}, {"role": "assistant", "content": _MARK}], prompts=False)
        except DataRefusedError:
            said = ""
        found = self._special.search(said, said.rfind(_MARK) + len(_MARK)) if _MARK in said else None
        return found.group() if found else str(self.tokenizer.eos_token)

    def _opening(self) -> str:
        """What the template writes before an answer, from its last marker on."""
        try:
            asked = self.text([{"role": "user", "content": _MARK}])
        except DataRefusedError:
            return ""
        behind = asked[asked.rfind(_MARK) + len(_MARK) :]
        markers = list(self._special.finditer(behind))
        return behind[markers[-1].start() :] if markers else behind


def for_template(message: Message) -> Message:
    """A message as templates take it: no nulls, text for parts of text, tool-call arguments as objects.

    Raises:
        DataRefusedError: content that is no text, such as an image.
    """
    kept = {key: value for key, value in message.items() if value is not None}
    content = kept.get("content", "")
    if isinstance(content, list):
        if any(isinstance(part, dict) and "text" not in part for part in content):
            kinds = sorted({str(part.get("type")) for part in content if isinstance(part, dict)})
            msg = f"a message holds content that is no text ({', '.join(kinds)}); models are shown text alone here"
            raise DataRefusedError(msg)
        content = text_of(content, "\n")
    kept["content"] = content
    if isinstance(kept.get("tool_calls"), list):
        kept["tool_calls"] = [with_objects(call) for call in kept["tool_calls"]]
    return kept


def token_ids(file: Path) -> dict[str, int]:
    """The ids of a tokenizer.json by their tokens, however it was written; empty if it is none."""
    try:
        said = json.loads(file.read_bytes())
        vocabulary = said["model"]["vocab"]
        pairs = vocabulary.items() if isinstance(vocabulary, dict) else [(v[0], n) for n, v in enumerate(vocabulary)]
        return dict(pairs) | {token["content"]: token["id"] for token in said.get("added_tokens") or ()}
    except (OSError, ValueError, LookupError, TypeError):
        return {}


def _longest_first(tokens: Sequence[str]) -> list[str]:
    return sorted((token for token in tokens if token), key=len, reverse=True)
