"""A transcript: each step's state, reasoning, action and tool calls, with the ledger of its credit beside it.

All text is foreign. It is shown by `st.code` and `st.text`, which interpret nothing, cut at first, and at most up to
`ALL` characters.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl
import streamlit as st  # noqa: TID253 - loaded by the viewer's process only

from lake import ids
from viewer import ledger
from viewer.components import badge
from viewer.links import Page, parameters
from viewer.pinned import read
from viewer.plain import chip, one_line, visible
from viewer.queries import episode as queries
from viewer.queries.base import Row
from viewer.theme import ACCENT

ALL = 500_000
"""Characters that `show all` shows at most."""
TOOL_OUTPUT = 700
"""Longer tool output is collapsed."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the reader wants to see."""

    reasoning: bool = True
    tools: bool = True
    credit: str | None = None
    """The chosen credit job or series, for links."""
    selected: int | None = None
    """The step that is marked."""


def step(episode_id: int, row: Row, credit: Row | None, scale: ledger.Scale, options: Options) -> None:
    """One step of a transcript."""
    index = row["step_index"]
    with st.container(border=True, key=f"step-{index}"):
        left, right = st.columns([3, 1.15], gap="medium")
        with left.container(gap="xsmall"):
            _title(row)
            _context(row)
            _state(episode_id, row)
            if row["reasoning"] and options.reasoning:
                _label("reasoning", ":material/psychology:")
                with st.container(key=f"reasoning-{index}"):
                    long_text(episode_id, row, "reasoning", prose=True)
            with st.container(key=f"action-{index}", gap="xsmall"):
                if row["action"] or not row["tool_calls"]:
                    _label("action", ":material/bolt:")
                    long_text(episode_id, row, "action", prose=True)
                if row["tool_calls"] and options.tools:
                    tool_calls(row["tool_calls"], row["tool_calls_length"])
        with right:
            ledger.draw(row["reward"], credit, scale, is_credited=options.credit is not None)
            if credit is not None and credit["anchor_key"] is not None and credit["anchor_episodes"] > 1:
                _anchor_link(credit, options)


def mark(index: int) -> None:
    """Outline the step that the address names and scroll to it."""
    st.html(f"<style>.st-key-step-{index} {{ outline: 2px solid {ACCENT}; border-radius: 8px; }}</style>")
    st.html(
        f"<script>document.querySelector('.st-key-step-{index}')?.scrollIntoView({{block: 'center'}});</script>",
        unsafe_allow_javascript=True,
    )


def messages(found: list[Any], *, collapse_system: bool = True) -> None:
    """Chat messages outside the steps: system prompts collapsed, the others cut."""
    for message in found:
        role, text = _role(message), content(message)
        if role == "system" and collapse_system:
            with st.expander(f"System prompt ({len(text):,} characters)", icon=":material/settings:"):
                st.code(visible(text[:ALL]), language=None, wrap_lines=True)
        else:
            _label(chip(role) if not role.isalpha() else role, ":material/chat:")
            st.code(visible(text[: queries.TEXT]), language=None, wrap_lines=True)


def long_text(episode_id: int, row: Row, column: queries.TextColumn, *, prose: bool = False) -> None:
    """A text of a step; what is longer than the page shows at first has a switch that shows all."""
    text, length = row[column] or "", row[f"{column}_length"]
    if length > len(text):
        show_all = st.toggle(
            f"Show all {length:,} characters", key=f"all-{column}-{ids.to_text(episode_id)}-{row['step_index']}"
        )
        if show_all:
            text = read(queries.text, episode_id, row["step_index"], column, ALL)
            if length > ALL:
                st.caption(f"The first {ALL:,} of {length:,} characters; the rest: `trajlake sql`.")
    if not text:
        st.caption("(empty)")
    elif prose and len(text) <= queries.TEXT:
        st.text(visible(text))
    else:
        st.code(visible(text), language=None, wrap_lines=True, height=420 if len(text) > queries.TEXT else "content")


def tool_calls(document: str, length: int) -> None:
    """Tool calls of an action: name and arguments of each."""
    calls = _parsed(document, length)
    if calls is None:
        _label("tool calls", ":material/build:")
        st.code(visible(document[: queries.TEXT]), language=None, wrap_lines=True)
        return
    for call in calls:
        function = call.get("function", call) if isinstance(call, Mapping) else {}
        function = function if isinstance(function, Mapping) else {}
        _label(f"tool call {chip(function.get('name', '?'))}", ":material/build:")
        st.code(visible(_pretty(function.get("arguments", call))[:ALL]), language="json", wrap_lines=True)


def content(message: Any) -> str:
    """The text of a chat message, whatever its shape."""
    value = message.get("content") if isinstance(message, Mapping) else message
    if isinstance(value, str):
        return value
    return "" if value is None else json.dumps(value, ensure_ascii=False, indent=1)


def parsed_messages(document: str | None, length: int) -> list[Any]:
    """Chat messages of a JSON document; one message that holds the text if it cannot be taken apart."""
    if not document:
        return []
    found = _parsed(document, length)
    return [{"role": "messages", "content": document}] if found is None else found


def scale_of(ledger_rows: pl.DataFrame, rewards: pl.DataFrame) -> ledger.Scale:
    """The scale of an episode's bars."""

    def largest(frame: pl.DataFrame, *columns: str) -> float:
        values = [frame[name].abs().max() for name in columns if frame.height]
        return max((float(v) for v in values if isinstance(v, int | float)), default=0.0)

    return ledger.Scale(
        advantage=largest(ledger_rows, "advantage", "a_episode", "a_step"),
        reward=max(largest(rewards, "reward"), largest(ledger_rows, "return_to_go")),
    )


def _title(row: Row) -> None:
    with st.container(horizontal=True, gap="xsmall", vertical_alignment="center"):
        st.markdown(f"**Step {row['step_index']}**", width="content")
        if row["state_is_error"]:
            badge("state is an error", "red")
        if row["is_action_valid"] is False:
            badge("malformed action", "red", explanation="The action could not be parsed.")
        if not row["is_active"]:
            badge("inactive", explanation="Padding after the end: takes part in nothing.")
        if not row["trainable"]:
            badge("not trained", explanation="Another policy took this decision.")
        if row["is_copied_context"]:
            badge("copied context", explanation="Repeated from an earlier episode: never trained on.")


def _context(row: Row) -> None:
    """Messages since the last decision that are not the state itself."""
    state = row["state"] or ""
    for message in parsed_messages(row["context"], row["context_length"]):
        text = content(message)
        if text and text not in state and one_line(text, 200) not in one_line(state, len(state) + 1):
            _label(f"message {chip(_role(message))}", ":material/chat:")
            st.code(visible(text[: queries.TEXT]), language=None, wrap_lines=True)


def _state(episode_id: int, row: Row) -> None:
    role = row["state_role"]
    _label("state" + (f" ({role if role.isalpha() else chip(role)})" if role else ""), ":material/visibility:")
    if role == "tool" and row["state_length"] > TOOL_OUTPUT:
        shown = one_line(row["state"], 90)
        with st.expander(f"{chip(shown, 100)} {row['state_length']:,} characters", type="compact"):
            long_text(episode_id, row, "state")
    else:
        long_text(episode_id, row, "state")


def _anchor_link(credit: Row, options: Options) -> None:
    st.page_link(
        Page.GROUP,
        label=f"State shared: {credit['anchor_size']} steps of {credit['anchor_episodes']} siblings",
        icon=":material/hub:",
        query_params=parameters(
            group=ids.to_text(credit["group_id"]), anchor=ids.to_text(credit["anchor_key"]), credit=options.credit
        ),
    )


def _label(text: str, icon: str) -> None:
    st.caption(f"{icon} {text}")


def _role(message: Any) -> str:
    role = message.get("role") if isinstance(message, Mapping) else None
    return str(role or "message")


def _parsed(document: str, length: int) -> list[Any] | None:
    """A JSON list; None if the document is cut or is something else."""
    if length > len(document):
        return None
    try:
        found = json.loads(document)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, list) else None


def _pretty(value: Any) -> str:
    """JSON with line breaks; text that holds JSON is taken apart first."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return str(value)
    return json.dumps(value, ensure_ascii=False, indent=2)
