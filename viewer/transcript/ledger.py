"""The ledger of a step: reward, return-to-go and the terms of its advantage, as numbers and as diverging bars.

A value that is not known is the word `unknown` and a dashed line; a 0 is the digit and the bare centre line.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import polars as pl

from lake import ids
from viewer.links import Page
from viewer.plain import number, signed, slug
from viewer.queries import Row
from viewer.queries.anchors import SAMPLE

UNKNOWN = "unknown"
Mark = tuple[str, str, str | None]
"""A label, its colour's name (`transcript.css`), and what it means."""

FLAGS: dict[str, Mark] = {
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
    "constant_batch": ("constant batch", "gray", "All scores or returns of the batch are the same: A is exactly 0."),
    "singleton_batch": ("singleton batch", "gray", "The batch has one scored episode or step: A is exactly 0."),
    "unknown_batch": ("batch unknown", "red", "The episode's batch key is not known: it belongs to no batch."),
    "unknown_length": ("length unknown", "red", "The episode's length is not known, so it has no weight."),
    "unknown_value": ("value unknown", "red", "A value estimate here or later is not known."),
    "revisit": ("revisit", "gray", "A later visit to the anchor; only the first counts."),
}
_DISAGREE: Mark = (
    "terms disagree",
    "violet",
    "A_E and A_S have opposite signs: the episode did better than its siblings and the step worse than others from the "
    "same state, or the other way round.",
)


@dataclass(frozen=True, slots=True)
class Scale:
    """The largest sizes of an episode: bars of one kind are comparable between its steps."""

    advantage: float
    """Largest of |A|, |A_E| and |A_S|."""
    reward: float
    """Largest of |reward| and |return-to-go|."""
    rewarded: bool
    """A step of the episode has a reward: where none has, none is missing."""


def scale_of(credit: pl.DataFrame, largest_reward: float, *, rewarded: bool) -> Scale:
    """The scale of an episode's bars. `credit`: its rows of `advantages`, or an empty frame."""

    def largest(*columns: str) -> float:
        values = [credit[name].abs().max() for name in columns if credit.height]
        return max((float(v) for v in values if isinstance(v, int | float)), default=0.0)

    return Scale(
        advantage=largest("advantage", "a_episode", "a_step"),
        reward=max(largest_reward, largest("return_to_go")),
        rewarded=rewarded,
    )


def bar(value: float | None, largest: float) -> tuple[float, float] | None:
    """Left edge and width of a bar from the centre of its track, in percent; None where the value is not known."""
    if value is None:
        return None
    width = 0.0 if largest <= 0 else min(abs(value) / largest, 1.0) * 50
    return (50.0 if value >= 0 else round(50.0 - width, 2)), round(width, 2)


def disagree(credit: Row) -> bool:
    """Whether the two terms of an advantage have opposite signs."""
    a_episode, a_step = credit["a_episode"], credit["a_step"]
    return a_episode is not None and a_step is not None and a_episode * a_step < 0


def marks(credit: Row | None) -> list[Mark]:
    """What the credit job says of a step besides numbers."""
    if credit is None:
        return []
    flags = [FLAGS.get(flag, (slug(flag), "gray", None)) for flag in filter(None, credit["flags"].split(","))]
    return [_DISAGREE, *flags] if disagree(credit) else flags


def lines(reward: float | None, credit: Row | None, scale: Scale, formula: str | None) -> list[dict[str, Any]]:
    """The lines of a step's ledger, the advantage last: label, number, bar.

    Args:
        credit: the step's row of `advantages`; None if the chosen job gave it none.
        formula: how the terms make the advantage (`Credit.formula`).
    """
    found = [_line("reward", number(reward), reward, scale.reward)] if scale.rewarded else []
    if credit is None:
        return found
    go = credit["return_to_go"]
    found.append(_line("return-to-go", number(go), go, scale.reward))
    for label, name in (("A_E episode", "a_episode"), ("A_S step", "a_step"), (formula or "A advantage", "advantage")):
        found.append(_line(label, signed(credit[name]), credit[name], scale.advantage))
    return found


def shared(
    credit: Row | None, chosen: str | None, link: Callable[..., str], seen: Row | None = None
) -> dict[str, str] | None:
    """A link to the steps that siblings took from the same state; None where none did.

    Args:
        credit: the step's row of `advantages`.
        chosen: what addresses call the credit.
        link: how pages are named.
        seen: the row of `anchors.seen` of the state in its group, if known: why it may stand for several situations.
    """
    if credit is None or credit["anchor_key"] is None or credit["anchor_episodes"] <= 1:
        return None
    address = link(
        Page.GROUP, group=ids.to_text(credit["group_id"]), anchor=ids.to_text(credit["anchor_key"]), credit=chosen
    )
    text = f"State shared: {credit['anchor_size']} steps of {credit['anchor_episodes']} siblings"
    if seen is not None:
        least = "at least " if credit["anchor_size"] > SAMPLE else ""
        ways = f"{seen['ways_in']} way{'' if seen['ways_in'] == 1 else 's'} in" if seen["ways_in"] else None
        text = "; ".join(filter(None, [text, ways and f"{least}{ways}", seen["doubt"]]))
    return {"text": text, "href": address}


def _line(label: str, shown: str, value: float | None, largest: float) -> dict[str, Any]:
    return {"label": label, "number": UNKNOWN if value is None else shown, "bar": bar(value, largest)}
