"""What the engine is asked for beside what the client asked, and how the client gets no more than that.

Engines tell which tokens they saw and sampled only when asked (vLLM: `return_token_ids`, `logprobs`), and vendors
refuse fields that they do not know. So it is asked of an engine that is known to answer, and taken out of the answer.
The Responses API and Anthropic's messages have no field for token ids, in vLLM either: their calls are recorded as
text.
"""

from typing import Any

from lake.live.proxy.shapes import CHAT, COMPLETIONS

_ENGINES = ("vllm",)
"""Engines that answer what is asked here."""
_IDS = ("prompt_token_ids", "token_ids")


Added = frozenset[str]
"""Names of what the client did not ask for: return_token_ids, logprobs, usage."""


def asking(api: str, body: dict[str, Any]) -> tuple[dict[str, Any], Added]:
    """A request that also asks for tokens, and what was added to it."""
    if api not in (CHAT, COMPLETIONS) or body.get("echo"):
        return body, Added()
    more: dict[str, Any] = {}
    if not body.get("return_token_ids"):
        more["return_token_ids"] = True
    if not body.get("logprobs") and (api == CHAT or body.get("logprobs") is None):
        more["logprobs"] = True if api == CHAT else 1
    added = set(more)
    options = body.get("stream_options") or {}
    if body.get("stream") and isinstance(options, dict) and not options.get("include_usage"):
        more["stream_options"] = options | {"include_usage": True}
        added.add("usage")
    return body | more, Added(added)


def answers_tokens(engine: str | None) -> bool:
    """Whether an engine, as its name and version, tells token ids when it is asked."""
    return engine is not None and engine.partition(" ")[0] in _ENGINES


def stripped(answer: Any, added: Added) -> Any:
    """An answer, or a chunk of one, without what the client did not ask for; None if nothing of it is left."""
    if not added or not isinstance(answer, dict):
        return answer
    found = dict(answer)
    choices = [_choice(choice, added) for choice in found.get("choices") or ()]
    if "return_token_ids" in added:
        found.pop("prompt_token_ids", None)
    if "usage" in added and "usage" in found and str(found.get("object")).endswith(("chunk", "text_completion")):
        if not choices:
            return None
        del found["usage"]
    return found | ({"choices": choices} if "choices" in found else {})


def _choice(choice: Any, added: Added) -> Any:
    if not isinstance(choice, dict):
        return choice
    found = dict(choice)
    if "return_token_ids" in added:
        for key in _IDS:
            found.pop(key, None)
    if "logprobs" in added and "logprobs" in found:
        found["logprobs"] = None
    return found
