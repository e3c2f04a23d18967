"""A transcript: each step's state, reasoning, action and tool calls, with the ledger of its credit beside it.

All text is foreign. It is shown by `st.code` and `st.text`, which interpret nothing, cut at first, and at most up to
`ALL` characters.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import polars as pl
import streamlit as st  # noqa: TID253 - loaded by the viewer's process only

from lake import ids
from viewer import ledger, plain
from viewer.components import badge, link
from viewer.links import Page
from viewer.pinned import read
from viewer.plain import chip, visible, word
from viewer.queries import Row, episodes
from viewer.theme import ACCENT

ALL = 500_000
"""Characters that `show all` shows at most."""
COLOURED = 20_000
"""Longer documents are not coloured: it takes the browser too long."""
TOOL_OUTPUT = 700
"""Longer tool output is collapsed."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the reader wants to see."""

    reasoning: bool = True
    tools: bool = True
    credit: str | None = None
    """The chosen credit job, for links; None without one."""


def step(episode_id: int, row: Row, credit: Row | None, scale: ledger.Scale, options: Options) -> None:
    """One step of a transcript."""
    index = row["step_index"]
    with st.container(border=True, key=f"step-{index}"):
        left, right = st.columns([3, 1.15], gap="medium")
        with left.container(gap="xsmall"):
            _title(row)
            _context(episode_id, row)
            _state(episode_id, row)
            if row["reasoning"] and options.reasoning:
                _label("reasoning", "psychology")
                with st.container(key=f"reasoning-{index}"):
                    _step_text(episode_id, row, "reasoning", prose=True)
            with st.container(key=f"action-{index}", gap="xsmall"):
                if row["action"] or not row["tool_calls"]:
                    _label("action", "bolt")
                    _step_text(episode_id, row, "action", prose=True)
                if row["tool_calls"] and options.tools:
                    _tool_calls(episode_id, row)
        with right:
            ledger.draw(row["reward"], credit, scale, is_credited=options.credit is not None)
            if credit is not None and credit["anchor_key"] is not None and credit["anchor_episodes"] > 1:
                link(
                    Page.GROUP,
                    f"State shared: {credit['anchor_size']} steps of {credit['anchor_episodes']} siblings",
                    "hub",
                    group=ids.to_text(credit["group_id"]),
                    anchor=ids.to_text(credit["anchor_key"]),
                    credit=options.credit,
                )


def mark(index: int) -> None:
    """Outline the step that the address names and scroll to it."""
    st.html(f"<style>.st-key-step-{index} {{ outline: 2px solid {ACCENT}; border-radius: 8px; }}</style>")
    st.html(
        f"<script>document.querySelector('.st-key-step-{index}')?.scrollIntoView({{block: 'center'}});</script>",
        unsafe_allow_javascript=True,
    )


def messages(found: list[Any], key: str) -> None:
    """Chat messages outside the steps: system prompts collapsed, long ones cut."""
    for position, message in enumerate(found):
        role, text = plain.role(message), plain.content(message)
        if role == "system":
            with st.expander(f"System prompt ({len(text):,} characters)", icon=":material/settings:"):
                _text(text, len(text), f"{key}-{position}")
        else:
            _label(word(role), "chat")
            _text(text, len(text), f"{key}-{position}")


def scale_of(credit: pl.DataFrame, rewards: pl.DataFrame) -> ledger.Scale:
    """The scale of an episode's bars."""

    def largest(frame: pl.DataFrame, *columns: str) -> float:
        values = [frame[name].abs().max() for name in columns if frame.height]
        return max((float(v) for v in values if isinstance(v, int | float)), default=0.0)

    return ledger.Scale(
        advantage=largest(credit, "advantage", "a_episode", "a_step"),
        reward=max(largest(rewards, "reward"), largest(credit, "return_to_go")),
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


def _context(episode_id: int, row: Row) -> None:
    """Messages since the last decision that are not the state itself."""
    found = plain.listed(row["context"], row["context_length"])
    if found is None:
        _label("messages since the last step", "chat")
        _step_text(episode_id, row, "context")
        return
    state = _squeezed(row["state"] or "")
    for position, message in enumerate(found):
        text = plain.content(message)
        # The state at hand may be cut: the first half of what a page shows decides whether a message is part of it.
        if _squeezed(text[: episodes.TEXT])[: episodes.TEXT // 2] not in state:
            _label(f"message {chip(plain.role(message))}", "chat")
            _text(text, len(text), f"context-{ids.to_text(episode_id)}-{row['step_index']}-{position}")


def _state(episode_id: int, row: Row) -> None:
    role = row["state_role"]
    _label("state" + (f" ({word(role)})" if role else ""), "visibility")
    if role == "tool" and row["state_length"] > TOOL_OUTPUT:
        with st.expander(f"{chip(row['state'], 90)} {row['state_length']:,} characters", type="compact"):
            _step_text(episode_id, row, "state")
    else:
        _step_text(episode_id, row, "state")


def _tool_calls(episode_id: int, row: Row) -> None:
    """Tool calls of an action: name and arguments of each."""
    calls = plain.listed(row["tool_calls"], row["tool_calls_length"])
    if calls is None:
        _label("tool calls", "build")
        _step_text(episode_id, row, "tool_calls")
        return
    for position, call in enumerate(calls):
        name, arguments = plain.call(call)
        _label(f"tool call {chip(name)}", "build")
        key = f"call-{ids.to_text(episode_id)}-{row['step_index']}-{position}"
        _text(arguments, len(arguments), key, language="json")


def _step_text(episode_id: int, row: Row, column: episodes.TextColumn, *, prose: bool = False) -> None:
    """A text of a step, of which the page has read no more than it shows at first."""
    index = row["step_index"]
    _text(
        row[column] or "",
        row[f"{column}_length"],
        f"{column}-{ids.to_text(episode_id)}-{index}",
        lambda: read(episodes.text, episode_id, index, column, ALL),
        prose=prose,
    )


def _text(
    text: str,
    length: int,
    key: str,
    load: Callable[[], str] | None = None,
    *,
    prose: bool = False,
    language: str | None = None,
) -> None:
    """A foreign text, cut at first; a switch shows all, which `load` gives if it is not at hand."""
    shown = text[: episodes.TEXT]
    height: int | Literal["content"] = "content"
    if length > episodes.TEXT and st.toggle(f"Show all {length:,} characters", key=f"all-{key}"):
        shown, height = (load() if load else text)[:ALL], 480
        if length > ALL:
            st.caption(f"The first {ALL:,} of {length:,} characters; `trajlake sql` has the rest.")
    if not shown:
        st.caption("(empty)")
    elif prose and len(shown) <= episodes.TEXT:
        st.text(visible(shown))
    else:
        coloured = language if len(shown) <= COLOURED else None
        st.code(visible(shown), language=coloured, wrap_lines=True, height=height)


def _label(text: str, icon: str) -> None:
    st.caption(f":material/{icon}: {text}")


def _squeezed(text: str) -> str:
    """The text with every run of white space as one space."""
    return " ".join(text.split())
