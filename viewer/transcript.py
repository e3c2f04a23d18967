"""A transcript: each step's state, reasoning, action and tool calls, with the ledger of its credit beside it.

All text is foreign. It is shown by `st.code` and `st.text`, which interpret nothing, cut at first, and at most up to
`ALL` characters.

The ledger beside a step has its reward, return-to-go and advantage terms as small diverging bars. Everything of it that
reaches the HTML is a number formatted here. A value that is not known is a dashed line and the word `unknown`; a 0 is
the bare centre line and the digit.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import Any, Literal

import polars as pl
import streamlit as st  # noqa: TID253 - loaded by the viewer's process only

from lake import ids
from viewer import plain
from viewer.components import badge, fact, link
from viewer.links import Page
from viewer.pinned import read
from viewer.plain import chip, number, seconds, signed, slug, visible, word
from viewer.queries import Row, episodes
from viewer.theme import ACCENT, NEGATIVE, POSITIVE, UNKNOWN

ALL = 500_000
"""Characters that `show all` shows at most."""
COLOURED = 20_000
"""Longer documents are not coloured: it takes the browser too long."""
TOOL_OUTPUT = 700
"""Longer tool output is collapsed."""
_FLAGS = {
    "dead_group": ("dead group", "orange", "All scored siblings scored the same: A_E is exactly 0."),
    "singleton_group": ("alone in group", "orange", "The only scored rollout of its group: nothing to compare with."),
    "singleton_anchor": ("singleton anchor", "gray", "No other step was taken from this state: A_S is exactly 0."),
    "constant_anchor": ("constant anchor", "gray", "All steps from this state have the same score: A_S is exactly 0."),
    "unscored": ("unscored", "red", "The episode has no score: A_E is unknown."),
    "unknown_return": ("return unknown", "red", "A reward here or later is not known: so is the return-to-go."),
    "unknown_state": ("state unknown", "red", "The state is not known, so no step shares it: A_S is 0."),
    "truncated": ("truncated", "orange", "The episode was cut off by a limit."),
    "masked": ("masked", "orange", "Truncated: counts in the statistics, has no advantage of its own."),
    "excluded": ("excluded", "red", "The episode takes part in nothing."),
    "left_out": ("left out", "gray", "The anchor definition leaves this state out: A_S is exactly 0."),
    "constant_step": ("constant step", "gray", "All that it is compared with have the same return: A is exactly 0."),
    "singleton_step": ("singleton step", "gray", "No sibling has this step: A is exactly 0."),
    "constant_batch": ("constant batch", "gray", "All returns of the batch are the same: A is exactly 0."),
    "singleton_batch": ("singleton batch", "gray", "The batch has one step: nothing to compare it with."),
    "unknown_batch": ("batch unknown", "red", "The episode's batch key is not known: it belongs to no batch."),
    "unknown_length": ("length unknown", "red", "The episode's length is not known, so it has no weight."),
    "unknown_value": ("value unknown", "red", "A value estimate here or later is not known."),
    "revisit": ("revisit", "gray", "A later visit to the anchor; only the first counts."),
}


@dataclass(frozen=True, slots=True)
class Scale:
    """The largest sizes on the page: bars of one kind are comparable between steps."""

    advantage: float
    """Largest of |A|, |A_E| and |A_S|."""
    reward: float
    """Largest of |reward| and |return-to-go|."""
    rewarded: bool
    """A step of the episode has a reward: where none has, none is missing."""


def draw(reward: float | None, credit: Row | None, scale: Scale, options: "Options") -> None:
    """Draw the ledger of a step. `credit`: the step's row of `advantages`; None if the chosen job gave it none."""
    lines = [_line("reward", number(reward), reward, scale.reward)] if scale.rewarded else []
    if credit is None:
        st.html(_sheet(lines))
        if options.credit is not None:
            st.caption("The chosen credit has no row for this step.")
        return
    go, whole = credit["return_to_go"], scale.advantage
    lines.append(_line("return-to-go", number(go), go, scale.reward))
    for name, column in (("A<sub>E</sub> episode", "a_episode"), ("A<sub>S</sub> step", "a_step")):
        lines.append(_line(name, signed(credit[column]), credit[column], whole))
    whole_name = "A advantage" if options.formula is None else _subscripts(options.formula)
    lines.append(_line(whole_name, signed(credit["advantage"]), credit["advantage"], whole, strong=True))
    st.html(_sheet(lines, marked=disagree(credit)))
    with st.container(horizontal=True, gap="xsmall"):
        if disagree(credit):
            badge(
                "terms disagree",
                "violet",
                icon=":material/call_split:",
                explanation="A_E and A_S have opposite signs: the episode did better than its siblings and the step "
                "worse than others from the same state, or the other way round.",
            )
        for flag in filter(None, credit["flags"].split(",")):
            label, colour, explanation = _FLAGS.get(flag, (slug(flag), "gray", None))
            badge(label, colour, explanation=explanation)


def disagree(credit: Row) -> bool:
    """Whether the two terms of an advantage have opposite signs."""
    a_episode, a_step = credit["a_episode"], credit["a_step"]
    return a_episode is not None and a_step is not None and a_episode * a_step < 0


def _subscripts(formula: str) -> str:
    """A formula as HTML."""
    return re.sub(r"_([A-Z])", r"<sub>\1</sub>", escape(formula))


def _sheet(lines: list[str], *, marked: bool = False) -> str:
    edge = f"border-left:3px solid {ACCENT};padding-left:8px;" if marked else ""
    grid = "display:grid;grid-template-columns:auto auto minmax(40px,1fr);gap:3px 10px;align-items:center;"
    return f'<div style="{grid}{edge}font-size:0.86rem;line-height:1.3">{"".join(lines)}</div>'


def _line(label: str, shown: str, value: float | None, largest: float, *, strong: bool = False) -> str:
    """Three cells: label, number, bar. The label is our own markup."""
    weight = "font-weight:650;" if strong else ""
    text = "unknown" if value is None else shown
    tint = f"color:{UNKNOWN};font-style:italic;" if value is None else ""
    number_style = f"{weight}{tint}text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap"
    return (
        f'<span style="{weight}opacity:0.75;white-space:nowrap">{label}</span>'
        f'<span style="{number_style}">{escape(text)}</span>{_bar(value, largest)}'
    )


def _bar(value: float | None, largest: float) -> str:
    """A bar from the centre: right and blue above 0, left and orange below, dashed where unknown."""
    if value is None:
        return f'<span style="border-top:1px dashed {UNKNOWN};height:0;opacity:0.8"></span>'
    share = 0.0 if largest <= 0 else min(abs(value) / largest, 1.0) * 50
    start, colour = (50.0, POSITIVE) if value >= 0 else (50.0 - share, NEGATIVE)
    place = f"left:{start:.2f}%;width:{share:.2f}%;top:1px;bottom:1px"
    fill = f"position:absolute;{place};background:{colour};border-radius:1px"
    centre = f"position:absolute;left:50%;top:-2px;bottom:-2px;width:1px;background:{UNKNOWN};opacity:0.7"
    track = f"position:relative;height:9px;background:color-mix(in srgb,{UNKNOWN} 12%,transparent);border-radius:2px"
    return f'<span style="{track}"><span style="{fill}"></span><span style="{centre}"></span></span>'


@dataclass(frozen=True, slots=True)
class Options:
    """What the reader wants to see."""

    reasoning: bool = True
    tools: bool = True
    credit: str | None = None
    """The chosen credit job, for links; None without one."""
    formula: str | None = None
    """How its terms make an advantage (`Credit.formula`)."""


def step(episode_id: int, row: Row, credit: Row | None, scale: Scale, options: Options) -> None:
    """One step of a transcript."""
    index = row["step_index"]
    with st.container(border=True, key=f"step-{index}"):
        has_ledger = scale.rewarded or options.credit is not None
        left, right = st.columns([3, 1.15], gap="medium") if has_ledger else (st.container(), None)
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
        if right is None:
            return
        with right:
            draw(row["reward"], credit, scale, options)
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
                passage(text, len(text), f"{key}-{position}")
        else:
            _label(word(role), "chat")
            passage(text, len(text), f"{key}-{position}")


def scale_of(credit: pl.DataFrame, rewards: pl.DataFrame) -> Scale:
    """The scale of an episode's bars."""

    def largest(frame: pl.DataFrame, *columns: str) -> float:
        values = [frame[name].abs().max() for name in columns if frame.height]
        return max((float(v) for v in values if isinstance(v, int | float)), default=0.0)

    return Scale(
        advantage=largest(credit, "advantage", "a_episode", "a_step"),
        reward=max(largest(rewards, "reward"), largest(credit, "return_to_go")),
        rewarded=rewards["reward"].count() > 0,
    )


def _title(row: Row) -> None:
    with st.container(horizontal=True, gap="xsmall", vertical_alignment="center"):
        st.markdown(f"**Step {row['step_index']}**", width="content")
        if row["latency"] is not None:
            fact("latency", seconds(row["latency"]))
        if row["state_is_error"]:
            badge("state is an error", "red")
        if row["state_is_empty"]:
            badge("state is empty", "orange", explanation="Anything may lead to it: siblings that share it may differ.")
        if row["is_action_valid"] is False:
            badge("malformed action", "red", explanation="The action could not be parsed.")
        if not row["is_active"]:
            badge("inactive", explanation="Padding after the end: takes part in nothing.")
        if not row["trainable"]:
            badge("not trained", explanation="Another policy decided, or tokens do not say what it saw.")
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
            passage(text, len(text), f"context-{ids.to_text(episode_id)}-{row['step_index']}-{position}")


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
        passage(arguments, len(arguments), key, language="json")


def _step_text(episode_id: int, row: Row, column: episodes.TextColumn, *, prose: bool = False) -> None:
    """A text of a step, of which the page has read no more than it shows at first."""
    index = row["step_index"]
    passage(
        row[column] or "",
        row[f"{column}_length"],
        f"{column}-{ids.to_text(episode_id)}-{index}",
        lambda: read(episodes.text, episode_id, index, column, ALL),
        prose=prose,
    )


def passage(
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
