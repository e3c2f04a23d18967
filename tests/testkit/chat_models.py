"""What a policy over an engine meets: chat templates of every manner, their tokenizer, an engine in this process."""

from collections.abc import Callable, Sequence
from functools import cache

from pipelines.collect.engines import EngineCard, Generation, Request
from trainer.policy.tiny_model import CHAT_TEMPLATE, build_tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "tools": CHAT_TEMPLATE,
    "default system": "{% if messages[0].role != 'system' %}<|im_start|>system\nBe brief.<|im_end|>\n{% endif %}"
    + CHATML,
    "opens reasoning": CHATML.replace("assistant\n{% endif", "assistant\n<think>\n{% endif").replace(
        "\n{{ m.content }}", "\n{% if m.role == 'assistant' %}<think>\n{% endif %}{{ m.content }}"
    ),
    "drops reasoning": CHATML.replace(
        "{{ m.content }}",
        "{{ m.content.split('</think>')[-1] if m.role == 'assistant' and not loop.last else m.content }}",
    ),
    "trims": CHATML.replace("{{ m.content }}", "{{ m.content | trim }}"),
    "shouts": CHATML.replace("{{ m.content }}", "{{ m.content | upper if m.role == 'assistant' else m.content }}"),
    "counts": CHATML.replace("<|im_start|>{{", "{% if loop.first %}{{ messages | length }}: {% endif %}<|im_start|>{{"),
    "other end": CHATML.replace("<|im_end|>", "<|turn|>"),
    "no markers": "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}",
    "calls before answers": (
        "{% for m in messages %}{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}"
        "{{ raise_exception('an answer of a tool follows no call') }}{% endif %}<|im_start|>{{ m.role }}\n"
        "{{ m.content }}{% for c in m.tool_calls or [] %}[{{ c.function.name }}"
        "{{ c.function.arguments | tojson }}]{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
}
"""Chat templates by their manner. Those that rewrite earlier turns: drops reasoning, trims, shouts, counts."""
APPENDING = ("chatml", "tools", "default system", "opens reasoning", "other end", "no markers")
"""Templates that leave earlier turns as they were generated."""
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@cache
def tokenizer_of(manner: str):
    """A byte-level tokenizer with one of the templates."""
    texts = ["Room attic. You see nothing. Exits east west", "go east", "<think> hm </think>", "assistant: user: "]
    tokenizer = build_tokenizer(texts * 5, 360)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|turn|>"]})
    tokenizer.chat_template = TEMPLATES[manner]
    return tokenizer


class ToyEngine:
    """An engine in this process, which answers from a script, and keeps what it was asked."""

    url = "toy"

    def __init__(self, answer: Callable[[Request], Generation], *, max_tokens: int | None = None) -> None:
        self._answer, self._max_tokens = answer, max_tokens
        self.seen: list[tuple[Request, Generation]] = []

    async def describe(self) -> EngineCard:
        return EngineCard(
            engine="toy 1", model="policy", max_tokens=self._max_tokens, logprobs_mode="processed", dtype="float32"
        )

    async def generate(self, request: Request) -> list[Generation]:
        self.seen.append((request, self._answer(request)))
        return [self.seen[-1][1]]


def generated(ids: Sequence[int], finish_reason: str = "stop", version: int | None = 3, **fields) -> Generation:
    """An answer whose log-probabilities tell its tokens' places."""
    spans = [(version, 0, len(ids) - 1)] if ids else []
    logprobs = [-float(index + 1) for index in range(len(ids))]
    return Generation(
        **({"ids": list(ids), "logprobs": logprobs, "finish_reason": finish_reason, "versions": spans} | fields)
    )


def saying(tokenizer, *texts: str, end: str = "<|im_end|>") -> Callable[[Request], Generation]:
    """Answers these texts in turn, each with its end; one that ends with ... is cut off there."""
    waiting = list(texts)

    def answer(_: Request) -> Generation:
        text = waiting.pop(0)
        if text.endswith("..."):
            return generated(tokenizer.encode(text[:-3], add_special_tokens=False), "length")
        return generated(tokenizer.encode(text + end, add_special_tokens=False))

    return answer
