"""The call of a step as it was recorded, and the waterfall of an episode's calls, spans and judges over time.

A request is what the lake stores of it: the messages added since the step before, the options and the tools of the
episode. A judge that was asked after the episode has its own list, because its time is not the episode's.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import accumulate
from typing import Any

import polars as pl

from lake.documents import parse_json_object
from lake.read.text_table import format_count
from viewer import plain
from viewer.queries import Row
from viewer.queries.transcripts import TEXT
from viewer.transcript import rendering
from viewer.transcript.blocks import Block, list_message_blocks

MAX_ROWS = 400
"""Maximum rows of a waterfall."""
MAX_TEXT = 12_000
"""Maximum characters of a text of a span."""
_TICKS = 5
_STEPS_OF_AXIS = (1, 2, 5, 10)


def describe_call(row: Row) -> dict[str, Any]:
    """Return the facts of a step's call, and its request and response as texts (`transcripts.read_call`)."""
    tokens = [
        f"{plain.number(row[name])} {label}"
        for name, label in (("prompt_tokens", "in"), ("completion_tokens", "out"))
        if row[name] is not None
    ]
    facts = {
        "model": row["model"],
        "policy version": row["policy_version"],
        "started": _format_time(row["started_at"]),
        "latency": None if row["latency"] is None else plain.seconds(row["latency"]),
        "tokens": ", ".join(tokens) or None,
        "cost": None if row["cost"] is None else plain.number(row["cost"], 4),
        "finish reason": row["finish_reason"],
    }
    labels = {
        "sampling": "request: options",
        "tools": "request: tools",
        "context": "request: messages added since the step before",
        "state": "request: observation",
        "reasoning": "response: reasoning",
        "action": "response: text",
        "tool_calls": "response: tool calls",
        "extra": "as the source recorded it",
    }
    texts = [
        {"label": label, "text": plain.visible(plain.format_json(row[name])[:TEXT]), "length": row[f"{name}_length"]}
        for name, label in labels.items()
        if row[name] not in (None, "", "[]", "{}")
    ]
    return {"title": "Model call", "facts": _list_facts(facts), "texts": texts}


def _format_time(at: datetime | None) -> str | None:
    return None if at is None else f"{at:%Y-%m-%d %H:%M:%S.%f}"[:-3] + " UTC"


def _list_facts(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(name, "not recorded" if fact is None else plain.one_line(str(fact))) for name, fact in facts.items()]


def _describe_span(row: Row) -> dict[str, Any]:
    """Return a span without a step, such as a judge's call, as `describe_call` does."""
    attributes = parse_json_object(row["attributes"]) or {"as the source recorded it": row["attributes"]}
    facts = {"started": _format_time(row["started_at"]), "error": row["error"]}
    texts = []
    for name, attribute in attributes.items():
        label = plain.one_line(name)
        if isinstance(attribute, int | float):
            facts[label] = str(attribute)
            continue
        parts = list_message_blocks(_list_messages(attribute), name)
        if not parts and attribute:
            text = plain.format_json(attribute)
            parts = [Block(name, "message", "", text, len(text), rendering.detect(text))]
        texts += [part.sent(MAX_TEXT) | {"label": f"{label} {part.label}"} for part in parts]
    shown = _list_facts({name: fact for name, fact in facts.items() if fact is not None})
    return {"title": plain.one_line(row["name"] or row["kind"]), "facts": shown, "texts": texts}


def _list_messages(attribute: Any) -> list[Any]:
    """Return the chat messages of a request, or of a response with choices; empty for other data."""
    if isinstance(attribute, dict) and isinstance(choices := attribute.get("choices"), list):
        attribute = [choice.get("message") if isinstance(choice, dict) else None for choice in choices]
    is_chat = isinstance(attribute, list) and all(isinstance(part, dict) and "role" in part for part in attribute)
    return attribute if is_chat else []


def build_waterfall(rows: pl.DataFrame, judges: Sequence[Row]) -> dict[str, Any]:
    """Return the bars of a waterfall in percent of its axis, the ticks of the axis in seconds, and the total.

    Without any time only the calls of judges are left, which open theirs.

    Args:
        rows: rows of `transcripts.read_timeline`.
        judges: rows of `transcripts.read_judge_calls`.
    """
    began, took = rows["began"].to_list(), rows["took"].to_list()
    notes = []
    if all(start is None for start in began) and any(length is not None for length in took):
        began = list(accumulate((length or 0.0 for length in took[:-1]), initial=0.0))
        notes.append("Start times are not recorded: the calls are laid end to end.")
    timed = [(start, length or 0.0) for start, length in zip(began, took, strict=True) if start is not None]
    first = min((start for start, _ in timed), default=0.0)
    total = max((start + length for start, length in timed), default=0.0) - first
    bars = []
    for row, start, length in zip(rows.head(MAX_ROWS).iter_rows(named=True), began, took, strict=False):
        if not timed and row["step_index"] is not None:
            continue
        span = None
        if start is not None and length is not None and total > 0:
            span = (round(100 * (start - first) / total, 3), round(100 * length / total, 3))
        bars.append(
            {
                "step": row["step_index"],
                "kind": plain.one_line(row["kind"], 24),
                "name": plain.one_line(row["name"] or row["kind"]),
                "span": span,
                "took": "unknown" if length is None else plain.seconds(length),
                "error": row["error"] and plain.one_line(row["error"], 200),
                "call": _describe_span(row) if row["step_index"] is None else None,
            }
        )
    if rows.height > MAX_ROWS:
        notes.append(f"The first {MAX_ROWS:,} of {rows.height:,} rows.")
    if not timed:
        notes.append("The source has no times of this episode.")
    return {
        "bars": bars,
        "ticks": [(plain.seconds(tick), round(100 * tick / total, 3)) for tick in _list_ticks(total)],
        "total": plain.seconds(total) if timed else None,
        "notes": notes,
        "judges": [_describe_judge(row) for row in judges],
    }


def _list_ticks(total: float) -> list[float]:
    """Return round seconds from 0 up to a total, at most `_TICKS` steps of 1, 2 or 5 times a power of ten."""
    if total <= 0:
        return []
    power = 1e-6
    while power * 10 * _TICKS < total:
        power *= 10
    step = next(power * factor for factor in _STEPS_OF_AXIS if power * factor * _TICKS >= total)
    return [step * place for place in range(int(total / step) + 1)]


def _describe_judge(row: Row) -> dict[str, str]:
    counts = [row["prompt_tokens"], row["completion_tokens"]]
    tokens = "tokens unknown" if None in counts else f"{format_count(counts[0], 'token')} in, {counts[1]:,} out"
    name = plain.one_line(row["scorer"] or "judge")
    head = f"{name}: {plain.one_line(row['model'])}, {row['at']:%Y-%m-%d %H:%M:%S} UTC, {tokens}"
    markup = rendering.render(row["answer"], rendering.detect(row["answer"], "assistant"))
    return {"head": head, "answer": plain.visible(row["answer"]), "html": markup}
