"""From the messages added since the last decision to the token ids added since the last decision.

Tokens are append-only: what was sampled is kept as it was sampled, and only what the chat template writes after it is
tokenised. Decoding and encoding a whole conversation again is not the identity, and templates that rewrite earlier
turns would make every turn a sequence of its own.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec

from lake.errors import DataRefusedError
from pipelines.collect.policies.protocol import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PROBE: list[Message] = [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}]


class ContextRenderer:
    """Renders new messages with a tokenizer's chat template."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        self._context = lru_cache(maxsize=1 << 16)(self._render)

    def context(self, messages: Sequence[Message], is_first: bool) -> list[int]:
        """Token ids that the messages and the generation prompt add.

        Args:
            messages: Messages since the last decision.
            is_first: They open the conversation.

        Raises:
            DataRefusedError: the template does not render an earlier assistant turn as it was generated.
        """
        return list(self._context(msgspec.json.encode(messages, order="deterministic"), is_first))

    def _render(self, encoded: bytes, is_first: bool) -> tuple[int, ...]:
        messages: list[Message] = msgspec.json.decode(encoded)
        text = self._text(messages if is_first else [*_PROBE, *messages])
        if not is_first:
            generated = self._text(_PROBE[:1]) + self._tokenizer.eos_token
            if not text.startswith(generated):
                msg = (
                    f"the chat template of `{self._tokenizer.name_or_path}` does not continue a generated turn: after "
                    f"an empty answer it renders {text!r}, which does not start with {generated!r}; "
                    "use a template that leaves earlier turns as they were generated"
                )
                raise DataRefusedError(msg)
            text = text[len(generated) :]
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def _text(self, messages: list[Message]) -> str:
        return str(self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
