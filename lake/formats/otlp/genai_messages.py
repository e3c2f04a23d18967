"""Where GenAI conventions put what was said to a model and by it; `lake.formats.otlp.genai` lists the places."""

from typing import Any

from lake.formats.chat.messages import Message
from lake.formats.tracing.attributes import flattened
from lake.formats.tracing.payloads import Payload, answers, decoded, instructions, joined, prompt
from lake.formats.tracing.shapes import messages_of, text

Event = dict[str, Any]
"""name, time, attributes."""
DETAILS = "gen_ai.client.inference.operation.details"
_CONTENT = ("gen_ai.content.prompt", "gen_ai.content.completion")
_ROLES = {f"gen_ai.{role}.message": role for role in ("system", "user", "assistant", "tool")}
_PAIRS = (
    ("gen_ai.prompt", "gen_ai.completion"),
    ("llm.prompts", "llm.completions"),
    ("request_data", "response_data"),
    ("gcp.vertex.agent.llm_request", "gcp.vertex.agent.llm_response"),
    ("mlflow.spanInputs", "mlflow.spanOutputs"),
)
_HEADS = ("gen_ai.input.messages", "gen_ai.output.messages", *(key for pair in _PAIRS for key in pair))
_OF_PARTS = frozenset(("text", "toolUse", "toolResult", "reasoningContent", "image"))


def speaks(said: dict[str, Any]) -> bool:
    """Whether some attribute holds messages."""
    return "events" in said or any(key.startswith(_HEADS) for key in said)


def messages_in(said: dict[str, Any], events: list[Event]) -> tuple[Payload, Payload]:
    """The prompt of a call, and the messages of its output; they are taken out of its attributes and events."""
    for event in [e for e in events if e["name"] in (DETAILS, *_CONTENT)]:
        said.update({key: value for key, value in event["attributes"].items() if key not in said})
        events.remove(event)
    system = said.pop("gen_ai.system_instructions", None)
    given = prompt(said.pop("gen_ai.input.messages", None))
    answered = Payload(_output(said.pop("gen_ai.output.messages", None)))
    for asked, told in _PAIRS:
        if not given.messages:
            given = prompt(said.pop(asked)) if asked in said else Payload(joined(_numbered(said, asked, "user")))
        if not answered.messages:
            answered = answers(said.pop(told)) if told in said else Payload(_numbered(said, told, "assistant"))
    if not given.messages and not answered.messages:
        given, answered = _of_events(said, events)
    if system is not None and not any(message["role"] == "system" for message in given.messages):
        given.messages = [instructions(system), *given.messages]
    return given, answered


def _output(value: Any) -> list[Message]:
    """The messages of an output, each of which may be a choice."""
    opened = decoded(value)
    items = opened if isinstance(opened, list) else [] if opened is None else [opened]
    return [message for item in items for message in messages_of(item, "assistant")]


def _numbered(said: dict[str, Any], prefix: str, role: str) -> list[Message]:
    """Messages of numbered attributes."""
    found = []
    for item in flattened(said, prefix):
        message = {k: v for k, v in item.items() if v is not None} if isinstance(item, dict) else item
        if isinstance(message, dict) and isinstance(content := message.get("content"), str):
            message["content"] = _parts(content)
        if isinstance(message, dict) and message.get("role") == "thinking":
            message = {"role": "assistant", "reasoning_content": text(message.get("content", ""))}
        found += messages_of(message, role)
    return found


def _parts(content: str) -> Any:
    """Content that is JSON text of the parts of a message, as these; text that only looks like JSON stays text."""
    opened = decoded(content) if content.startswith("[{") else content
    is_parts = isinstance(opened, list) and all(
        isinstance(p, dict) and ("type" in p or p.keys() & _OF_PARTS) for p in opened
    )
    return opened if is_parts else content


def _whole(said: dict[str, Any]) -> dict[str, Any]:
    """What an event says, also where one attribute holds all of it."""
    inner = decoded(said.get("gen_ai.event.content"))
    return said | (inner if isinstance(inner, dict) else {} if inner is None else {"content": inner})


def _of_events(said: dict[str, Any], events: list[Event]) -> tuple[Payload, Payload]:
    """Events that are a message each."""
    own = [event for event in events if event["name"] in _ROLES or event["name"] == "gen_ai.choice"]
    for event in own:
        events.remove(event)
    told = [(event["name"], event["attributes"]) for event in own]
    listed = decoded(said.get("events"))
    if not told and isinstance(listed, list) and all(isinstance(event, dict) for event in listed):
        told = [(str(event.get("event.name")), event) for event in listed]
        said.pop("events")
    given: list[Message] = []
    answered: list[Message] = []
    for name, attributes in told:
        body = _whole(attributes)
        is_choice = name == "gen_ai.choice"
        inner = decoded(body.get("message")) if is_choice else None
        message: Message = {"role": _ROLES.get(name, "assistant")}
        message |= {k: v for k, v in body.items() if k not in ("message", "index") and "." not in k}
        message |= inner if isinstance(inner, dict) else {} if inner is None else {"content": inner}
        if isinstance(message.get("content"), str):
            message["content"] = _parts(message["content"])
        if isinstance(calls := decoded(message.get("tool_calls")), list):
            message["tool_calls"] = calls
        (answered if is_choice else given).extend(messages_of(message, message["role"]))
    return Payload(joined(given)), Payload(answered)
