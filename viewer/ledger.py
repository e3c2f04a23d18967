"""The ledger beside a step: its reward, return-to-go and advantage terms as small diverging bars, and its flags.

Everything that reaches the HTML is a number formatted here. A value that is not known is a dashed line and the word
`unknown`; a 0 is the bare centre line and the digit.
"""

from dataclasses import dataclass
from html import escape

import streamlit as st  # noqa: TID253 - loaded by the viewer's process only

from viewer.components import badge
from viewer.plain import number, signed, slug
from viewer.queries import Row
from viewer.theme import ACCENT, NEGATIVE, POSITIVE, UNKNOWN

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
    "constant_step": (
        "constant step",
        "gray",
        "All that it is compared with have the same return: A is exactly 0.",
    ),
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


def draw(reward: float | None, credit: Row | None, scale: Scale, *, is_credited: bool) -> None:
    """Draw the ledger of a step. `credit`: the step's row of `advantages`; None if the chosen job gave it none."""
    lines = [_line("reward", number(reward), reward, scale.reward)]
    if credit is None:
        st.html(_sheet(lines))
        if is_credited:
            st.caption("The chosen credit has no row for this step.")
        return
    go, whole = credit["return_to_go"], scale.advantage
    lines.append(_line("return-to-go", number(go), go, scale.reward))
    for name, column in (("A<sub>E</sub> episode", "a_episode"), ("A<sub>S</sub> step", "a_step")):
        lines.append(_line(name, signed(credit[column]), credit[column], whole))
    lines.append(_line("A advantage", signed(credit["advantage"]), credit["advantage"], whole, strong=True))
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
