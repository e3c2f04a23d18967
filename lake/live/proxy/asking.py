"""What the engine is asked for beside what the client asked, and how the client gets no more than that.

Engines tell which tokens they saw and sampled only when asked (vLLM and SGLang: `return_token_ids`, `logprobs`), and
vendors refuse fields that they do not know. So it is asked of an engine that is known to answer, and taken out of the
answer. What SGLang does is known from its pull request 30917, not from a running one.

Not asked: calls that echo their prompt, since vLLM answers another text to those who ask for ids, and those that search
beams, whose tokens were not sampled; of SGLang streams of chats, for which it gives no ids. The Responses API and
Anthropic's messages have no field for token ids, in vLLM either. All these are recorded as text.
"""

from typing import Any

import msgspec

from lake.live.calls.shapes import CHAT, COMPLETIONS

_VLLM, _SGLANG = "vllm", "sglang"
_ANSWERED = {"return_token_ids": ("prompt_token_ids", "token_ids"), "logprobs": ("logprobs",)}
"""What is asked for -> the keys under which it is answered."""


Added = frozenset[str]
"""Names of what the client did not ask for: return_token_ids, logprobs."""


def asking(api: str, body: dict[str, Any], engine: str | None = None) -> dict[str, Any]:
    """What is asked of an engine beside a request: fields of it, with their values.

    Usage is not asked for: vLLM moves `system_fingerprint` to the chunk that it adds for it, and ids can be counted.
    """
    if api not in (CHAT, COMPLETIONS) or body.get("echo") or body.get("use_beam_search"):
        return {}
    if api == CHAT and body.get("stream") and is_sglang(engine):
        return {}
    more: dict[str, Any] = {}
    if not body.get("return_token_ids"):
        more["return_token_ids"] = True
    # Of chats it is a flag, and top_logprobs without it stays refused; of completions the number of alternatives, where
    # 0 asks for the sampled token alone.
    if api == CHAT and not body.get("logprobs") and not body.get("top_logprobs"):
        more["logprobs"] = True
    if api == COMPLETIONS and body.get("logprobs") is None:
        more["logprobs"] = 0
    return more


def sent_with(raw: bytes, body: dict[str, Any], more: dict[str, Any]) -> bytes:
    """A request as it came, with more fields: what the client wrote stays as it wrote it, byte for byte.

    Args:
        raw: JSON of `body`.
        more: fields behind which others of their name do not count.
    """
    if body.keys() & more.keys():
        return msgspec.json.encode(body | more)
    return raw.rstrip()[:-1] + (b"," if body else b"") + msgspec.json.encode(more)[1:]


def answers_tokens(engine: str | None) -> bool:
    """Whether an engine, as its name and version, tells token ids when it is asked."""
    return engine is not None and engine.partition(" ")[0] in (_VLLM, _SGLANG)


def is_sglang(engine: str | None) -> bool:
    """Whether an engine is SGLang."""
    return engine is not None and engine.partition(" ")[0] == _SGLANG


def stripped(answer: Any, added: Added, engine: str | None = None) -> Any:
    """An answer, or a chunk of one, as the engine gives it if nothing is added; None for a chunk that it leaves out.

    vLLM has null where it was not asked for something, and sends no chunk of which there would be nothing but ids and
    log-probabilities. SGLang leaves out the ids that it was not asked for.
    """
    if not added or not isinstance(answer, dict):
        return answer
    gone = (
        frozenset(_ANSWERED["return_token_ids"]) if is_sglang(engine) and "return_token_ids" in added else frozenset()
    )
    found = _without(answer, added, gone)
    if isinstance(answer.get("choices"), list):
        found["choices"] = [_without(c, added, gone) if isinstance(c, dict) else c for c in answer["choices"]]
        if found["choices"] and all(_is_empty(choice, added) for choice in found["choices"]):
            return None
    return found


def _without(given: dict[str, Any], added: Added, gone: frozenset[str]) -> dict[str, Any]:
    """An answer or a choice, with null for what was added, and without what is to be gone."""
    hidden = {name for name in added for name in _ANSWERED[name]}
    return {key: None if key in hidden else value for key, value in given.items() if key not in gone}


def _is_empty(choice: Any, added: Added) -> bool:
    """Whether a chunk's choice has nothing that the client asked for."""
    if not isinstance(choice, dict) or choice.get("delta") != {} or choice.get("finish_reason") is not None:
        return False
    return added == _ANSWERED.keys()
