"""OpenHands: event lists of V0, event logs of V1, outputs of evaluations, and logs of single completions.

.. code-block:: text

    V0              [{id, source, action | observation, ...}]                            lake.formats.openhands.v0
    V1              lines (or a list) of {id, source, kind, ...}                         lake.formats.openhands.v1
    of the server   either as {trajectory: [...]}, {events: [...]} or {items: [...]}
    events folder   events/event-00000-<id>.json (V1) or events/0.json (V0), one event a file; the first one is read
                    with all others, and base_state.json beside the folder; also in an archive
    output.jsonl    lines of {instance_id, instruction, history [events], test_result, metadata, metrics, error};
                    of the resolver: {issue, instruction, history, git_patch, success, metrics, error}
    completion log  {messages | input, response, kwargs | args, cost, timestamp, latency_sec, ...}, one call a file

A file of events is an episode, and one more for each agent that it delegates to. Its task is a hash of the first user
message: no event says what is worked on. Its sibling number is a hash of the conversation's id, or of its first event.
A line of an output is an episode with its instance as the task. The verdict that its evaluation wrote in `test_result`
(`resolved` of the report, or what others call it) is the return, and each is a score.
A completion log is an episode of one decision: the chat before it is what it saw, and is no decision again.

Source: the event serialisation of OpenHands 0.x, openhands-sdk 1.58.2, and files of both.
"""

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from lake.formats.base.documents import gathered, problem_of
from lake.formats.base.fields import Scores, moment, number, prompt_task, sibling_number
from lake.formats.base.format import Format
from lake.formats.base.json_array import Element
from lake.formats.base.look import Look
from lake.formats.base.rows import Item, ShapeError, explained, items_of, rest
from lake.formats.base.secrets import without_secrets
from lake.formats.base.source import Input
from lake.formats.chat.answers import of_input, of_output, tell
from lake.formats.chat.messages import Message, conversation, text_of
from lake.formats.chat.tokens import Lineage
from lake.formats.openhands import v0 as openhands_v0
from lake.formats.openhands import v1 as openhands_v1
from lake.formats.openhands.places import is_archive, is_folder, placed, run_folder, siblings, state_of
from lake.formats.openhands.talk import NAME
from lake.records import EpisodeRecord, Reject

_KIND = re.compile(r"(?:[\w.]*\.)?(?:\w+Event|Condensation|CondensationRequest|UserRejectObservation)\Z")
_TEXT_V0 = re.compile(r'"source"\s*:\s*"(?:agent|user|environment)"')
_IN_COLUMNS = (
    *("messages", "input", "instructions", "response", "kwargs", "tools"),
    *("cost", "latency_sec", "timestamp", "usage_summary"),
)
_VERDICTS = ("resolved", "reward", "score", "success", "result", "passed")
"""What evaluations call their verdict on a rollout; the first one is the return."""
_LOGGED = ("kwargs", "args", "latency_sec", "usage_summary", "context_window", "cost")


def recognise(look: Look) -> bool:
    """Whether a file holds events, outputs or a completion log."""
    if look.kind not in ("array", "lines", "object"):
        return is_archive(look)
    if any(_is_event(v) or _is_output(v) or _is_log(v) or _wrapped(v) is not None for v in look.objects):
        return True
    keys = look.first.keys()
    is_bare = bool(keys) and all(value is None for value in look.first.values())
    return (
        is_bare
        and {"id", "source"} <= keys
        and bool(keys & {"action", "observation", "llm_response_id"})
        and (_TEXT_V0.search(look.text) is not None)
    )


def no_trajectory(look: Look) -> str | None:
    """What an event in a file of its own is, and the state beside a conversation's events."""
    first = look.first
    if look.path.name == "base_state.json" and {"agent", "execution_status"} & first.keys():
        return "it is the state of an OpenHands conversation and is read with events/; ingest that folder"
    if not is_folder(look.path) or not _is_event(first):
        return None
    first_file = next(iter(siblings(look.path)), look.path)
    if first_file.name == look.path.name:
        return None
    return f"it is one event of an OpenHands conversation, which is read from {first_file.name} beside it on"


def read(file: Input) -> Iterator[Item]:
    """Records and rejects of a file."""
    events: list[tuple[int, Element]] = []
    lost = 0
    for item in placed(file):
        if isinstance(item, Reject):
            lost += 1
            yield item
        elif (problem := problem_of(item)) is not None:
            lost += 1
            item.problem = problem
            yield from items_of(item, NAME, lambda _: ())
        elif _is_output(item.value):
            yield from items_of(item, NAME, lambda value: _output(value, file))
        elif _is_log(item.value):
            yield from items_of(item, NAME, lambda value: [_completion(value)])
        elif (inner := _wrapped(item.value)) is not None:
            events += [(at, gathered(value)) for at, value in enumerate(inner)]
        else:
            events.append((item.index, item))
    if events:
        yield from _conversation(events, file, lost, *state_of(file.path))


def _conversation(
    events: list[tuple[int, Element]], file: Input, lost: int, state: Any, problem: str | None
) -> Iterator[Item]:
    """The episodes of events; an event of the wrong shape is a reject, and the others are taken."""
    found = [element.value for _, element in events if isinstance(element.value, dict)]
    talk = _begun(found, state)
    for position, element in events:
        fault = _added(talk, element.value)
        if fault is not None:
            lost += 1
            yield Reject(position=position, reason="invalid", message=fault, raw=element.raw)

    def build(_: Any) -> list[EpisodeRecord]:
        records = talk.records(file, state) if isinstance(talk, openhands_v1.Events) else talk.records(file)
        notes = ({"lost_events": lost} if lost else {}) | ({"unreadable": problem} if problem else {})
        if notes:
            records[0].extra = (records[0].extra or {}) | notes
        return records

    whole = gathered(found[:1])
    whole.index = events[0][0]
    yield from items_of(whole, NAME, build)


def _begun(events: list[dict[str, Any]], state: Any = None) -> openhands_v0.Events | openhands_v1.Events:
    """What takes events of their version; it is called by the conversation's id, or by its first event."""
    first = events[0] if events else {}
    is_v1 = any("kind" in event for event in events)
    ids = [state.get("id")] if isinstance(state, dict) else []
    ids += [v.get("id") for e in events if e.get("key") == "full_state" and isinstance(v := e.get("value"), dict)]
    ids += [found] if isinstance(found := first.get("id"), str) and len(found) > len("00000") else []
    marks = f"{first.get('id')} {first.get('timestamp')}"
    if marks == "None None":
        marks = str(sibling_number(gathered(events).raw))
    name = next((str(found) for found in ids if found), marks)
    return openhands_v1.Events(name) if is_v1 else openhands_v0.Events(name)


def _added(talk: openhands_v0.Events | openhands_v1.Events, value: Any) -> str | None:
    """Add an event, or say what is wrong with it."""
    if not isinstance(value, dict):
        return f"Expected `object`, got `{type(value).__name__}`"
    if "kind" not in value and "action" not in value and "observation" not in value:
        return "it is no event: it has neither `kind` (V1) nor `action` or `observation` (V0)"
    try:
        talk.add(value)
    except (msgspec.MsgspecError, ValueError, RecursionError, TypeError, LookupError, AttributeError) as error:
        return explained(error)
    return None


def _output(value: dict[str, Any], file: Input) -> list[EpisodeRecord]:
    """A line of an evaluation's output; its history is a list of events, or of pairs of an action and a result."""
    history = value["history"] if isinstance(value.get("history"), list) else []
    events = [openhands_v0.spread(event) for item in history for event in (item if isinstance(item, list) else [item])]
    talk = _begun([event for event in events if isinstance(event, dict)])
    issue = _object(value.get("issue"))
    talk.task = str(value.get("instance_id") or f"{issue.get('owner')}/{issue.get('repo')}#{issue.get('number')}")
    for index, event in enumerate(events):
        if (fault := _added(talk, event)) is not None:
            raise ShapeError(f"{fault} - at `$.history[{index}]`")
    records = talk.records(file)
    main = records[0]
    metadata = _object(value.get("metadata"))
    model = _object(metadata.get("llm_config") or metadata.get("llm")).get("model")
    main.environment = dataset if isinstance(dataset := metadata.get("dataset"), str) else None
    main.policy = model if isinstance(model, str) else main.policy
    if main.cost is None:
        main.cost = number(_object(value.get("metrics")).get("accumulated_cost"))
    if isinstance(error := value.get("error"), str) and error:
        main.status, main.error = "failed", error
    main.extra = (main.extra or {}) | without_secrets(rest(value, "instance_id", "history") or {})
    _judge(main, value)
    _ask(main, value.get("instruction"))
    return records


def _judge(record: EpisodeRecord, value: dict[str, Any]) -> None:
    """The return and the scores that an output has; each evaluation has its own names for them."""
    result = _object(value.get("test_result"))
    report = _object(result.get("report")) or _object(value.get("report")) or _object(result.get("result"))
    verdicts = {key: said for key in _VERDICTS if (said := report.get(key, result.get(key))) is not None}
    scores = Scores()
    for name, score in (report | verdicts).items():
        if isinstance(score, bool) or (name in verdicts and number(score) is not None):
            scores.add(name, score)
    for name, score in _object(result.get("final_score")).items():
        scores.add(f"final_score.{name}", score)
    if isinstance(value.get("success"), bool):
        # What the resolver's own model says of its work, which is no verdict of the environment.
        scores.add("success", value["success"], reason=value.get("result_explanation"))
    record.scores = scores.records
    record.env_return = next((found for said in verdicts.values() if (found := number(said)) is not None), None)


def _ask(record: EpisodeRecord, instruction: Any) -> None:
    """Begin an episode with what was asked, where the history begins with the first action."""
    if not isinstance(instruction, str) or not record.steps or record.steps[0].state is not None:
        return
    record.initial_messages = [*(record.initial_messages or ()), {"role": "user", "content": instruction}]
    first = record.steps[0]
    first.state, first.state_role, first.state_is_error = instruction, "user", False


def _completion(value: dict[str, Any]) -> EpisodeRecord:
    """One call: the messages that were sent, and the answer."""
    sent = value["messages"] if isinstance(value.get("messages"), list) else value.get("input") or []
    if not isinstance(sent, list):
        raise ShapeError(f"`input` is {type(sent).__name__}; valid: a list of items")
    messages = [of_input(message, f"messages[{index}]") for index, message in enumerate(sent)]
    if isinstance(prompt := value.get("instructions"), str) and prompt:
        messages.insert(0, {"role": "system", "content": prompt})
    answer = value["response"]
    acted = _acted(answer)
    chat = conversation([*messages, acted], is_decision=lambda message: message is acted)
    step = chat.steps[0]
    step.started_at = moment(value.get("timestamp"))
    left = tell(step, answer, Lineage(), 0)
    step.cost, step.latency = number(value.get("cost")), number(value.get("latency_sec"))
    step.extra = (step.extra or {}) | ({"response": left} if left else {}) or None
    settings = _object(value.get("kwargs"))
    tools = value.get("tools") or settings.get("tools")
    asked = next((text_of(m.get("content"), "\n") for m in messages if m["role"] == "user"), "")
    answer_id = answer.get("id")
    return EpisodeRecord(
        task_id=prompt_task(asked),
        rollout_index=sibling_number(f"{answer_id} {value.get('timestamp')}"),
        policy=step.model,
        steps=chat.steps,
        initial_messages=chat.initial_messages,
        tools=tools if isinstance(tools, list) else None,
        sampling=without_secrets(rest(settings, "tools", "messages")),
        started_at=step.started_at,
        prompt_tokens=step.prompt_tokens,
        completion_tokens=step.completion_tokens,
        cost=step.cost,
        extra=without_secrets(rest(value, *_IN_COLUMNS)),
    )


def _acted(answer: dict[str, Any]) -> Message:
    if isinstance(answer.get("output"), list):
        return of_output(answer["output"], "response.output")
    choices = answer.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(message, dict):
        raise ShapeError("`response.choices[0].message` is missing; valid: the message that was answered")
    kept = ("content", "tool_calls", "reasoning_content")
    return {key: message[key] for key in kept if message.get(key)} | {"role": "assistant"}


def _is_event(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    if isinstance(kind := value.get("kind"), str):
        return "source" in value and _KIND.match(kind) is not None
    said = value.get("action", value.get("observation"))
    is_named = isinstance(said, str) and ("args" in value or "extras" in value or "content" in value)
    is_told = "id" in value or "message" in value
    return is_named and is_told and value.get("source") in ("agent", "user", "environment")


def _is_output(value: Any) -> bool:
    if not isinstance(value, dict) or "history" not in value or "info" in value:
        return False
    if {"issue", "git_patch"} <= value.keys():
        return True
    return "instance_id" in value and bool({"test_result", "metadata", "metrics"} & value.keys())


def _is_log(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("response"), dict):
        return False
    asked = "messages" in value or "input" in value
    return asked and "timestamp" in value and any(key in value for key in _LOGGED) and "rollout" not in value


def _wrapped(value: Any) -> list[Any] | None:
    """The events of an answer of the tool's own server."""
    for key in ("trajectory", "events", "items"):
        inner = value.get(key) if isinstance(value, dict) else None
        if isinstance(inner, list) and any(_is_event(event) for event in inner[:5]):
            return inner
    return None


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


FORMAT = Format(
    NAME,
    "OpenHands events, outputs and completion logs",
    recognise,
    read,
    no_trajectory,
    is_whole=True,
    run_folder=run_folder,
)
