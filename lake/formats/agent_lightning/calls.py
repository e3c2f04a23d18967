"""Model calls and rewards in spans of agent-lightning 0.x: what their attributes say, by whom they were recorded.

.. code-block:: text

    a call      the span's name holds `openai.chat.completion` (the agent's client, by AgentOps or Weave), or is
                `litellm_request` or `raw_gen_ai_request` (the proxy)
    said        gen_ai.prompt.N.*, gen_ai.completion.N.*, gen_ai.request.*       (AgentOps, litellm_request)
                agentlightning.operation.input.*, agentlightning.operation.output.*                      (Weave)
                llm.PROVIDER.messages, llm.PROVIDER.choices as text of Python literals         (raw_gen_ai_request)
    tokens      prompt_token_ids, response_token_ids, those of the response (Weave, proxy); logprobs.content
    rewards     agentlightning.reward.N.{name, value}, the first of which counts                       (0.3)
                attribute `reward` of a span agentlightning.reward or agentlightning.annotation        (0.2)
                agentops.task.output, agentops.entity.output: {"type": "reward", "value": number}      (0.1)

Text of literals is parsed as literals, never evaluated.
"""

import ast
import re
from typing import Any

import msgspec

from lake.formats.base.fields import number
from lake.formats.base.rows import ShapeError
from lake.formats.chat.chat_completions import Completion, completion, logprobs_of
from lake.formats.otlp import genai as otlp_genai
from lake.formats.tracing.attributes import flattened, name_in, numeric
from lake.formats.tracing.payloads import decoded
from lake.formats.tracing.shapes import messages_of
from lake.formats.tracing.tree import Call, Tool
from lake.records import Index

_CALL = re.compile(r"openai\.chat\.completion|^(?:raw_gen_ai_request|litellm_request)$")
_INPUT, _OUTPUT = "agentlightning.operation.input", "agentlightning.operation.output"
_REWARD = "agentlightning.reward"
_REWARD_SPANS = (_REWARD, "agentlightning.annotation")
_SETTINGS = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "stop")
_NO_SETTING = ("type", "streaming", "stream")
_OF_A_RESPONSE = ("messages", "choices", "prompt_token_ids", "response_token_ids", "usage", "id", "model", "tools")
_LONGEST_LITERAL = 16 << 20
_NOT_LITERAL = (ValueError, SyntaxError, TypeError, MemoryError, RecursionError)


class Tokens(msgspec.Struct):
    """The exact tokens of a call."""

    prompt: list[int]
    action: list[int]
    logprobs: list[float] | None = None


class Recorded(msgspec.Struct):
    """A call as one span recorded it."""

    call: Call
    response_id: str | None = None
    tokens: Tokens | None = None
    is_exact: bool = False
    """As the provider has it, and no tracer's idea of it."""

    @property
    def is_whole(self) -> bool:
        """Whether it tells both what was asked and what was answered."""
        return bool(self.call.prompt and self.call.answers)


def is_call(name: str) -> bool:
    """Whether a span of this name is a model call."""
    return _CALL.search(name) is not None


def recorded(said: dict[str, Any]) -> Recorded:
    """The call that attributes tell of; what becomes messages and tokens is taken out of them."""
    raw = _raw(said)
    woven = {key: flattened(said, key) for key in (f"{_INPUT}.messages", f"{_OUTPUT}.choices") if _begins(said, key)}
    functions = [tool for key in ("functions", "tools") for tool in flattened(said, f"gen_ai.request.{key}")]
    found = otlp_genai.call_of(said, [])
    found.tools = found.tools or [_opened(tool) for tool in functions] or _listed(raw.get("tools"))
    found.sampling = {name: value for name, value in found.sampling.items() if name not in _NO_SETTING}
    found.sampling = found.sampling or {name: raw[name] for name in _SETTINGS if raw.get(name) is not None}
    response_id = name_in(said, "gen_ai.response.id", f"{_OUTPUT}.id") or _text(raw.get("id"))
    for source in (raw, woven):
        prompt = source.get("messages", source.get(f"{_INPUT}.messages"))
        choices = source.get("choices", source.get(f"{_OUTPUT}.choices"))
        if isinstance(prompt, list) and not found.prompt:
            found.prompt = [message for item in prompt for message in messages_of(item, "user")] or None
        if isinstance(choices, list) and not found.answers:
            found = _answered(found, {**raw, "choices": choices})
    found.model = found.model or name_in(said, f"{_OUTPUT}.model", f"{_INPUT}.model")
    tokens = _tokens(said, raw, woven.get(f"{_OUTPUT}.choices"))
    if tokens is not None and not found.answers:
        # Its tokens are known, its text is not.
        found.answers = [{"role": "assistant", "content": ""}]
    return Recorded(found, response_id, tokens, is_exact="choices" in raw)


def rewards(name: str, said: dict[str, Any]) -> list[tuple[str, Any]]:
    """The rewards that a span holds, by name, the one that counts first; the value may be null."""
    listed = flattened(dict(said), _REWARD) if _begins(said, _REWARD) else []
    if listed:
        return [
            (_text(item.get("name")) or "reward", numeric(item.get("value")))
            for item in listed
            if isinstance(item, dict) and "value" in item
        ]
    for key in ("agentops.task.output", "agentops.entity.output"):
        output = decoded(said.get(key))
        if isinstance(output, dict) and output.get("type") == "reward":
            return [("reward", numeric(output.get("value")))]
    return [("reward", numeric(said["reward"]))] if name in _REWARD_SPANS and "reward" in said else []


def is_reward(name: str, said: dict[str, Any]) -> bool:
    """Whether a span computes or holds a reward: calls inside it are a judge's."""
    return bool(rewards(name, said)) or said.get("agentlightning.operation.name") == _REWARD


def agent_of(name: str, said: dict[str, Any]) -> str | None:
    """The agent that a span is, as the tracers that the tool knows name it."""
    is_agent = _is_kind(said, "agent"), said.get("type") == "agent"
    keys = ["agent.name", "recipient_agent_type", "langchain.chain.type", "executor.id"]
    keys += ["operation.name"] * is_agent[0] + [f"{_INPUT}.name"] * is_agent[1]
    keys += ["lc_name"] * name.startswith("langchain.Chain.")
    return name_in(said, *keys)


def tool_of(name: str, said: dict[str, Any]) -> Tool | None:
    """The execution of a tool that a span is."""
    called = name_in(said, "tool.name", "gen_ai.tool.name")
    if called is None and not _is_kind(said, "tool"):
        return None
    result = said.get("tool.result", said.get("gen_ai.tool.call.result"))
    return Tool(
        name=called or name_in(said, "operation.name") or name,
        call_id=name_in(said, "tool.call.id", "tool.call_id", "gen_ai.tool.call.id"),
        arguments=said.get("tool.parameters", said.get("gen_ai.tool.call.arguments")),
        result=None if result is None else result if isinstance(result, str) else msgspec.json.encode(result).decode(),
    )


def links(said: dict[str, Any]) -> list[tuple[str, Any]]:
    """What a span says it is about: attributes of other spans, and their values."""
    given = flattened(dict(said), "agentlightning.link") if _begins(said, "agentlightning.link") else []
    pairs = [(item.get("key_match"), item.get("value_match")) for item in given if isinstance(item, dict)]
    return [(key, value) for key, value in pairs if isinstance(key, str)]


def literal(text: Any) -> Any:
    """What text of a Python literal or of JSON says; other text, and other values, as they are."""
    opened = decoded(text)
    if not isinstance(opened, str) or len(opened) > _LONGEST_LITERAL:
        return opened
    try:
        return ast.literal_eval(opened)
    except _NOT_LITERAL:
        return opened


def _raw(said: dict[str, Any]) -> dict[str, Any]:
    """What the proxy wrote down of a request and its response as the provider has them, taken out."""
    found = {}
    for key in [key for key in said if key.startswith("llm.") and key.count(".") == 2]:
        name = key.rpartition(".")[2]
        if name in _OF_A_RESPONSE:
            found[name] = literal(said.pop(key))
        elif name in _SETTINGS:
            found[name] = said[key]
    return found


def _answered(call: Call, response: dict[str, Any]) -> Call:
    """A call with the answer of a response."""
    try:
        answer = completion(response)
    except ShapeError:
        call.extra["choices"] = response["choices"]
        return call
    call.answers = [answer.message] if answer.message else []
    call.model = call.model or answer.model
    call.finish_reason = call.finish_reason or answer.finish_reason
    call.prompt_tokens = answer.prompt_tokens if call.prompt_tokens is None else call.prompt_tokens
    call.completion_tokens = answer.completion_tokens if call.completion_tokens is None else call.completion_tokens
    more = {key: value for key, value in answer.extra.items() if key in ("choices", "choice", "usage")}
    call.extra |= more
    return call


def _tokens(said: dict[str, Any], raw: dict[str, Any], choices: list[Any] | None) -> Tokens | None:
    answer = Completion()
    for given in (raw.get("choices"), choices):
        try:
            answer = completion({"choices": given}) if isinstance(given, list) and not answer.action_ids else answer
        except ShapeError:
            continue
    listed = raw.get("response_token_ids")
    prompt = [said.pop("prompt_token_ids", None), said.pop(f"{_OUTPUT}.prompt_token_ids", None)]
    action = [said.pop("response_token_ids", None), said.pop(f"{_OUTPUT}.response_token_ids.0", None)]
    action += [listed[0] if isinstance(listed, list) and listed else None, answer.action_ids]
    found = [
        next((ids for value in values if (ids := _ids(literal(value)))), None)
        for values in ([*prompt, raw.get("prompt_token_ids"), answer.prompt_ids], action)
    ]
    if found[0] is None or found[1] is None:
        return None
    logprobs = logprobs_of({"content": decoded(said.get("logprobs.content"))}, len(found[1]))
    if logprobs is not None:
        del said["logprobs.content"]
    elif answer.logprobs is not None and len(answer.logprobs) == len(found[1]):
        logprobs = answer.logprobs
    return Tokens(found[0], found[1], logprobs)


def _is_kind(said: dict[str, Any], kind: str) -> bool:
    """Whether AgentOps says so; it also writes the name of its enumeration."""
    return str(said.get("agentops.span.kind")).rpartition(".")[2].lower() == kind


def _opened(tool: Any) -> Any:
    """A tool that was offered, its parameters as an object."""
    return {key: decoded(value) for key, value in tool.items()} if isinstance(tool, dict) else tool


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _ids(value: Any) -> list[int] | None:
    try:
        return msgspec.convert(value, list[Index]) or None
    except msgspec.ValidationError:
        return None


def _begins(said: dict[str, Any], prefix: str) -> bool:
    return any(key == prefix or key.startswith(f"{prefix}.") for key in said)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def seconds(value: Any) -> float | None:
    """A time in seconds; some tracers write nanoseconds."""
    found = number(value)
    return None if not found or found < 0 else found / 1e9 if found > 1e12 else found
