"""Frames of an episode as its record.

The record follows from the frames alone, so whoever makes it, however often, makes the same one: the writer knows a
replay by that.

Spans that were received are the episode where nothing else says its steps, read as files of them are
(`lake.formats.otlp`). Where its calls were recorded too, they are rows of its spans.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from lake import ids
from lake.formats.base.secrets import TOKENS_SPELL_KEY
from lake.formats.base.unseen import marked
from lake.formats.chat.messages import Message, decision
from lake.live.frames import (
    SOURCE_FORMAT,
    Begin,
    End,
    Frame,
    FrameError,
    Refused,
    Reward,
    Score,
    Span,
    Step,
    Tool,
    Traced,
    Whole,
    plain,
)
from lake.records import EpisodeRecord, Json, Reject, ScoreRecord, SpanRecord, StepRecord
from lake.tables import RELATIONS, STATUSES


def assembled(frames: Iterable[Frame]) -> list[EpisodeRecord | Reject]:
    """What the frames of an episode say: its record, and those of the sub-agents in its trace; or why it is none.

    Nothing of a trace without a call of a model: services write many.

    Raises:
        FrameError: the episode has no beginning.
    """
    found = list(frames)
    if found and isinstance(found[0], Refused):
        return [found[0].reject]
    if not (documents := [frame.document for frame in found if isinstance(frame, Traced)]):
        return [assemble(found)]
    from lake.formats.otlp.reader import read_rollout, span_records
    from lake.formats.tracing.episodes import NO_CALL

    if any(isinstance(frame, Step) for frame in found):
        record = assemble(found)
        record.spans += _placed(span_records(documents), record.steps)
        return [record]
    if not isinstance(found[0], Begin):
        raise FrameError("an episode without its first frame")
    begun = found[0].episode
    read = [item if isinstance(item, Reject) else item[1] for item in read_rollout(documents, begun)]
    items = [item for item in read if not (isinstance(item, Reject) and NO_CALL in item.message)]
    records = [item for item in items if isinstance(item, EpisodeRecord)]
    for record in records:
        record.source_uri = begun.source_uri
    if records:
        own = records[0]
        own.parent_episode_id, own.relation = begun.parent_episode_id, begun.relation
        _judge(own, found, {index: index for index in range(len(own.steps))})
        _close(own, _last(found))
    return items


def _placed(spans: Iterable[SpanRecord], steps: Sequence[StepRecord]) -> list[SpanRecord]:
    """Spans with the steps whose answers they name."""
    answers = {(step.extra or {}).get("id"): index for index, step in enumerate(steps)}
    found = list(spans)
    for span in found:
        named = (span.attributes or {}).get("gen_ai.response.id")
        span.step_index = None if named is None else answers.get(named)
    return found


def assemble(frames: Iterable[Frame]) -> EpisodeRecord:
    """The record that the frames of an episode say, in the order of their numbers.

    Raises:
        FrameError: the episode has no beginning.
    """
    found = list(frames)
    if found and isinstance(found[0], Whole):
        return found[0].episode
    if not found or not isinstance(found[0], Begin):
        raise FrameError("an episode without its first frame")
    record = found[0].episode
    steps = {frame.index: frame for frame in found if isinstance(frame, Step)}
    order = sorted(steps)
    place = {index: number for number, index in enumerate(order)}
    tools = sorted((frame for frame in found if isinstance(frame, Tool)), key=lambda tool: tool.number)
    end = _last(found)
    shown_results = _observe([steps[index] for index in order], tools, end)
    record.steps = [steps[index].step for index in order]
    record.initial_messages = next(
        (steps[index].initial_messages for index in order if steps[index].initial_messages is not None),
        record.initial_messages,
    )
    for number, step in enumerate(record.steps):
        _renumber_prefix(step, place, record.steps[:number])
        _renumber_history(step, number, place)
    spans = {(f.span.trace_id, f.span.span_id): f.span for f in found if isinstance(f, Span)}
    record.spans = [*record.spans, *(_span(tool, tool.number in shown_results) for tool in tools), *spans.values()]
    for span in record.spans:
        span.step_index = None if span.step_index is None else place.get(span.step_index)
    _judge(record, found, place)
    _close(record, end)
    record.steps = marked(record)
    return record


def _judge(record: EpisodeRecord, frames: Sequence[Frame], place: Mapping[int, int]) -> None:
    """Give a record its rewards and scores; `place` tells where in it a step is, by the number in its frame."""
    for reward in (frame for frame in frames if isinstance(frame, Reward)):
        if reward.step_index is None:
            record.env_return = reward.value
        elif reward.step_index in place:
            record.steps[place[reward.step_index]].reward = reward.value
    scores = {(f.score.scorer, f.score.step_index): f.score for f in frames if isinstance(f, Score)}
    stray = []
    for score in scores.values():
        if score.step_index is None or score.step_index in place:
            score.step_index = None if score.step_index is None else place[score.step_index]
            record.scores.append(score)
        else:
            stray.append(msgspec.to_builtins(score))  # of a call that failed, say: it is not the episode's
    if stray:
        record.extra = (record.extra or {}) | {"scores_of_no_step": stray}


def _renumber_prefix(step: StepRecord, place: Mapping[int, int], earlier: Sequence[StepRecord]) -> None:
    """Tokens that extend those of a step that is not there would be read as the wrong text, so they are left out."""
    if step.tokens is None or (prefix := step.tokens.prefix_step_index) is None:
        return
    if isinstance(prefix, int):
        if prefix not in place:
            step.tokens = None
            step.extra = (step.extra or {}) | {"tokens_left_out": f"they extend step {prefix}, which was not recorded"}
            return
        step.tokens.prefix_step_index = prefix = place[prefix]
    number = prefix if isinstance(prefix, int) else len(earlier) - 1
    extended = earlier[number] if 0 <= number < len(earlier) else None
    if extended is not None and (extended.extra or {}).get("tokens_left_out") == TOKENS_SPELL_KEY:
        step.tokens = None
        step.extra = (step.extra or {}) | {"tokens_left_out": TOKENS_SPELL_KEY}


def _renumber_history(step: StepRecord, number: int, place: Mapping[int, int]) -> None:
    """`extra.follows` names the step that a prompt goes on from, unless that is the step before."""
    follows = (step.extra or {}).get("follows")
    if not isinstance(follows, int) or follows not in place:
        return
    extra = {key: value for key, value in (step.extra or {}).items() if key != "follows"}
    if place[follows] != number - 1:
        extra["follows"] = place[follows]
    step.extra = extra or None


def _observe(steps: Sequence[Step], tools: Sequence[Tool], end: End) -> set[int]:
    """Give each step that saw the results of tools these as its context; the numbers of those that stand somewhere.

    A step sees the results of tools that were called in the steps before it and that no step has seen.
    """
    used: set[int] = set()
    for place, frame in enumerate(steps):
        if not frame.saw_results:
            said = [m.get("tool_call_id") for m in [*frame.step.context, *(frame.initial_messages or ())]]
            used |= {tool.number for tool in tools if tool.call_id is not None and tool.call_id in said}
            continue
        since = [tool for tool in tools if tool.number not in used and _is_before(tool, frame.index)]
        used |= {tool.number for tool in since}
        seen = decision({"role": "assistant", "content": ""}, [_message(tool) for tool in since], is_first=not place)
        step = frame.step
        step.state = seen.state if since else None
        step.state_role, step.state_is_error = seen.state_role, seen.state_is_error
        step.context = [_message(tool) for tool in since]
    left = [tool for tool in tools if tool.number not in used]
    if end.final_observation is None and left:
        end.final_observation = [_message(tool) for tool in left]
        used |= {tool.number for tool in left}
    return used


def _is_before(tool: Tool, index: int) -> bool:
    return tool.step_index is not None and tool.step_index < index


def _message(tool: Tool) -> Message:
    """What a tool gave back, as a message."""
    said: Message = {"role": "tool", "content": tool.error if tool.result is None else _text(tool.result)}
    more = {"name": tool.name, "tool_call_id": tool.call_id, "is_error": True if tool.error is not None else None}
    return said | {key: value for key, value in more.items() if value is not None}


def _text(result: Json) -> str:
    return result if isinstance(result, str) else msgspec.json.encode(result).decode()


def _span(tool: Tool, is_shown: bool) -> SpanRecord:
    """A tool call as a span; its result only where no message has it."""
    attributes = {
        "gen_ai.tool.call.id": tool.call_id,
        "gen_ai.tool.call.arguments": tool.arguments,
        "gen_ai.tool.call.result": None if is_shown else tool.result,
    }
    return SpanRecord(
        trace_id=SOURCE_FORMAT,
        span_id=f"tool-{tool.number}",
        kind="tool",
        name=tool.name,
        step_index=tool.step_index,
        started_at=tool.started_at,
        ended_at=tool.ended_at,
        error=tool.error,
        attributes={key: value for key, value in attributes.items() if value is not None} or None,
    )


def _last(frames: Sequence[Frame]) -> End:
    return next((frame for frame in frames if isinstance(frame, End)), End())


def _close(record: EpisodeRecord, end: End) -> None:
    """Give a record what its end says; of a trace, its spans tell when it ended, and whether it failed.

    Its numbers of tokens are those of its steps if nobody says them.
    """
    if end.status != "completed":
        record.status = end.status
    record.ended_at = record.ended_at or end.ended_at
    for name in ("prompt_tokens", "completion_tokens"):
        counts = [getattr(step, name) for step in record.steps]
        if getattr(record, name) is None and counts and None not in counts:
            setattr(record, name, sum(counts))
    for name in End.__struct_fields__:
        if name not in ("status", "ended_at", "extra") and (value := getattr(end, name)) is not None:
            setattr(record, name, value)
    if end.extra:
        record.extra = (record.extra or {}) | end.extra
    if wrong := _taken_out(record):
        extra = record.extra or {}
        record.extra = extra | {"not_taken": (extra.get("not_taken") or {}) | wrong}


def _taken_out(record: EpisodeRecord) -> dict[str, Json]:
    """What would make the writer refuse the whole episode and is no part of what the agent did; it is taken out."""
    wrong: dict[str, Json] = {}
    valid: dict[str, Callable[[Any], bool]] = {
        "status": lambda value: value in STATUSES,
        "relation": lambda value: value in RELATIONS,
        "parent_episode_id": ids.is_text,
        "root_episode_id": ids.is_text,
        "cost": math.isfinite,
        "env_return": math.isfinite,
        "final_value_estimate": math.isfinite,
    }
    for name, is_valid in valid.items():
        value = getattr(record, name)
        if value is not None and not is_valid(value):
            wrong[name] = plain(value)
            setattr(record, name, "completed" if name == "status" else None)
    bad = [score for score in record.scores if not is_score(score)]
    if bad:
        wrong["scores"] = [plain(score) for score in bad]
        record.scores = [score for score in record.scores if is_score(score)]
    return wrong


def is_score(score: ScoreRecord) -> bool:
    """Whether the writer takes it."""
    return bool(score.scorer.strip()) and "@" not in score.scorer and math.isfinite(score.value or 0.0)
