"""Lines of a transcript, repeats among them, and the credit ledger of a step.

The ledger has the reward, the return-to-go and the terms of the advantage, as numbers and as diverging bars. An unknown
value is the word `unknown` and a dashed line; a 0 is the digit and the bare centre line.
"""

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import polars as pl

from lake import ids
from lake.read.text_table import format_count
from viewer import plain
from viewer.navigation import Page
from viewer.plain import number, signed, slug
from viewer.queries import Row
from viewer.queries.anchors import SAMPLE

LONGEST_PERIOD = 4
"""Maximum steps of a repeated part."""
MIN_REPEATS = 3
"""Minimum consecutive repeats of a part to fold."""


@dataclass(frozen=True, slots=True)
class Fold:
    """A part of `period` steps that repeats `times` times from position `first` on."""

    first: int
    period: int
    times: int

    @property
    def end(self) -> int:
        """Position after the last step."""
        return self.first + self.period * self.times


def find_folds(steps: Sequence[Hashable], longest: int = LONGEST_PERIOD, fewest: int = MIN_REPEATS) -> list[Fold]:
    """Return the repeats of a sequence from the left: each covers most, and of equals has the shortest part.

    They do not overlap. Between them nothing repeats `fewest` times.
    """
    folds: list[Fold] = []
    position = 0
    while position < len(steps):
        fold = _find_longest_fold(steps, position, longest)
        if fold.times >= fewest:
            folds.append(fold)
            position = fold.end
        else:
            position += 1
    return folds


def _find_longest_fold(steps: Sequence[Hashable], first: int, longest: int) -> Fold:
    """Return the repeat at a position that covers most; `times` is 1 where nothing repeats."""
    best = Fold(first, 1, 1)
    for period in range(1, longest + 1):
        end = first + period
        while end < len(steps) and steps[end] == steps[end - period]:
            end += 1
        times = (end - first) // period
        if times > 1 and times * period > best.times * best.period:
            best = Fold(first, period, times)
    return best


UNKNOWN = "unknown"
EMPTY_REPLY = "empty reply"
Mark = tuple[str, str, str | None]
"""A label, its colour's name (`transcript.css`), and its explanation."""
_ALWAYS_EMPTY: Mark = (EMPTY_REPLY, "gray", "The tool has only empty replies in this episode: its first call shows it.")
FAILED: Mark = ("failed: error", "red", "The reply, or the result of a call, says that it is an error.")

FLAGS: dict[str, Mark] = {
    "dead_group": ("dead group", "orange", "All scored siblings scored the same: A_E is exactly 0."),
    "singleton_group": ("alone in group", "orange", "The only scored rollout of its group: nothing to compare with."),
    "singleton_anchor": ("singleton anchor", "gray", "No other step was taken from this state: A_S is exactly 0."),
    "constant_anchor": ("constant anchor", "gray", "All steps from this state have the same score: A_S is exactly 0."),
    "unscored": ("unscored", "red", "The episode has no score: A_E is unknown."),
    "unknown_return": ("return unknown", "red", "A reward here or later is not known: so is the return-to-go."),
    "unknown_state": ("state unknown", "red", "The state is not known, so no step shares it: A_S is 0."),
    "truncated": ("truncated", "orange", "The episode was cut off by a limit."),
    "masked": ("masked", "orange", "Truncated: counts in the statistics, has no separate advantage."),
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
    """Largest values of an episode, so that bars of one kind are comparable between its steps."""

    advantage: float
    """Largest of |A|, |A_E| and |A_S|."""
    reward: float
    """Largest of |reward| and |return-to-go|."""
    rewarded: bool
    """Whether any step of the episode has a reward; without one, no reward is missing."""


def compute_scale(credit: pl.DataFrame, largest_reward: float, *, rewarded: bool) -> Scale:
    """Return the scale of an episode's bars; `credit` has its rows of `advantages`, or none."""

    def largest(*columns: str) -> float:
        values = [credit[name].abs().max() for name in columns if credit.height]
        return max((float(v) for v in values if isinstance(v, int | float)), default=0.0)

    return Scale(
        advantage=largest("advantage", "a_episode", "a_step"),
        reward=max(largest_reward, largest("return_to_go")),
        rewarded=rewarded,
    )


def compute_bar(value: float | None, largest: float) -> tuple[float, float] | None:
    """Return the left edge and width of a bar in percent of its track; None for an unknown value."""
    if value is None:
        return None
    width = 0.0 if largest <= 0 else min(abs(value) / largest, 1.0) * 50
    return (50.0 if value >= 0 else round(50.0 - width, 2)), round(width, 2)


def terms_disagree(credit: Row) -> bool:
    """Return whether the two terms of an advantage have opposite signs."""
    a_episode, a_step = credit["a_episode"], credit["a_step"]
    return a_episode is not None and a_step is not None and a_episode * a_step < 0


def list_marks(credit: Row | None, *, is_last: bool = True) -> list[Mark]:
    """Return the flags of a step's credit as marks; only the last step of an episode says that this was cut off."""
    if credit is None:
        return []
    names = [flag for flag in credit["flags"].split(",") if flag and (is_last or flag != "truncated")]
    flags = [FLAGS.get(flag, (slug(flag), "gray", None)) for flag in names]
    return [_DISAGREE, *flags] if terms_disagree(credit) else flags


def build_ledger(reward: float | None, credit: Row | None, scale: Scale, formula: str | None) -> list[dict[str, Any]]:
    """Return the lines of a step's ledger, the advantage last: label, number, bar.

    Args:
        credit: the step's row of `advantages`; None if the credit job gave it none.
        formula: how the terms make the advantage (`Credit.formula`).
    """
    lines = [_build_ledger_line("reward", number(reward), reward, scale.reward)] if scale.rewarded else []
    if credit is None:
        return lines
    go = credit["return_to_go"]
    lines.append(_build_ledger_line("return-to-go", number(go), go, scale.reward))
    for label, name in (("A_E episode", "a_episode"), ("A_S step", "a_step"), (formula or "A advantage", "advantage")):
        lines.append(_build_ledger_line(label, signed(credit[name]), credit[name], scale.advantage))
    return lines


def link_shared_state(
    credit: Row | None, credit_name: str | None, link: Callable[..., str], state_texts: Row | None = None
) -> dict[str, str] | None:
    """Return a link to the steps that siblings took from the same state, if there are any.

    Args:
        credit: the step's row of `advantages`.
        credit_name: the credit in addresses.
        link: function from a page to its address.
        state_texts: row of `anchors.read_texts` for the state, if it was read: why it may stand for several situations.
    """
    if credit is None or credit["anchor_key"] is None or credit["anchor_episodes"] <= 1:
        return None
    address = link(
        Page.GROUP, group=ids.to_text(credit["group_id"]), anchor=ids.to_text(credit["anchor_key"]), credit=credit_name
    )
    count, siblings = format_count(credit["anchor_size"], "step"), format_count(credit["anchor_episodes"], "sibling")
    text = f"State shared: {count} of {siblings}"
    if state_texts is not None:
        least = "at least " if credit["anchor_size"] > SAMPLE else ""
        ways = f"{format_count(state_texts['ways_in'], 'way')} in" if state_texts["ways_in"] else None
        text = "; ".join(filter(None, [text, ways and f"{least}{ways}", state_texts["doubt"]]))
    return {"text": text, "href": address}


def _build_ledger_line(label: str, text: str, value: float | None, largest: float) -> dict[str, Any]:
    return {"label": label, "number": UNKNOWN if value is None else text, "bar": compute_bar(value, largest)}


MAX_LINE = 200
"""Maximum characters of the action in a line."""
_MAX_PROSE = 40
"""Maximum characters of the text before a command that the line would not show."""
MAX_CHIPS = 3
"""Maximum marks of a line; the opened step has all marks."""


def build_lines(
    outline: pl.DataFrame,
    credit: Mapping[int, Row],
    scores: Mapping[int, Sequence[Row]],
    scale: Scale,
    branches: Mapping[int, Sequence[Any]],
    count_before: int = 0,
) -> list[dict[str, Any]]:
    """Return a line for each row of `transcripts.read_outline`.

    Args:
        credit: rows of `advantages` by step.
        scores: rows of `transcripts.read_step_scores` by step.
        branches: the episodes that began at a step.
        count_before: messages before the first step.
    """
    quiet = find_quiet_steps(outline)
    marks = [list_marks(step_credit) for step_credit in credit.values()]
    # A line does not repeat the marks that every step of the episode has.
    usual = [mark for mark in marks[0] if all(mark in step_marks for step_marks in marks)] if len(marks) > 1 else []
    lines = []
    for row in outline.iter_rows(named=True):
        index = row["step_index"]
        step_credit = credit.get(index)
        chips: list[Mark] = []
        if count := len(branches.get(index, ())):
            text = f"{count} branch{'' if count == 1 else 'es'}"
            chips.append((text, "violet", "Episodes that began at this step."))
        chips += list_facts(row, quiet)
        # The head says that the episode was cut off.
        chips += [mark for mark in list_marks(step_credit, is_last=False) if mark[1] != "gray" and mark not in usual]
        advantage = None
        if step_credit is not None:
            value = step_credit["advantage"]
            text = UNKNOWN if value is None else plain.signed(value)
            advantage = {"number": text, "value": value, "bar": compute_bar(value, scale.advantage)}
        lines.append(
            {
                "index": index,
                "number": row["number"] + count_before + 1,
                "tool": None if row["tool"] is None else plain.one_line(row["tool"]),
                "text": describe_action(row),
                "more": max(0, row["calls"] - 1),
                "marks": chips[:MAX_CHIPS],
                "scores": [
                    (plain.one_line(score["scorer"], 24), plain.number(score["value"]))
                    for score in scores.get(index, ())
                ],
                "reward": None if row["reward"] is None else plain.number(row["reward"]),
                "advantage": advantage,
                "size": (row["said"], row["replied"]),
            }
        )
    return lines


def find_repeats(outline: pl.DataFrame) -> list[dict[str, Any]]:
    """Return runs of steps that repeat: first, last, period and times.

    Steps are equal if their full action, their reward and their faults are equal.
    """
    names = ("doing", "reward", "is_action_valid", "state_is_error", "is_active", "agent_id")
    # A step without a reply counts as one whose reply has no fault.
    replies = pl.col("reply_is_error", "reply_is_empty").fill_null(value=False)
    folds = find_folds(list(outline.select(*names, replies).iter_rows()))
    indices = outline["step_index"].to_list()
    return [
        {"first": indices[fold.first], "last": indices[fold.end - 1], "period": fold.period, "times": fold.times}
        for fold in folds
    ]


def describe_action(row: Row) -> str:
    """Return the action of a step in one line: the arguments of its first call, else its text, its command in view."""
    if row["tool"] is None:
        text, command = (plain.one_line(row[name] or "", MAX_LINE) for name in ("action", "command"))
        is_far = command[:_MAX_PROSE] not in text[: 2 * _MAX_PROSE]
        return plain.one_line(f"{plain.one_line(text, _MAX_PROSE)} {command}", MAX_LINE) if is_far else text
    written, values = row["arguments"] or "", None
    for end in ("", '"}'):  # the excerpt may be cut within a text
        with suppress(ValueError, RecursionError):
            values = values or json.loads(written + end)
    if not isinstance(values, Mapping):
        return plain.one_line(written, MAX_LINE)
    arguments = (f"{name}: {value if isinstance(value, str) else json.dumps(value)}" for name, value in values.items())
    return plain.one_line(", ".join(arguments), MAX_LINE)


def find_quiet_steps(outline: pl.DataFrame) -> dict[int, list[Mark]]:
    """Return the steps whose tool has only empty replies, each with its mark for that: the first step of each tool."""
    is_empty = pl.col("reply_is_empty")
    empty = outline.filter(is_empty, is_empty.all().over("tool"), pl.col("tool").is_not_null())
    steps = empty.select("step_index", pl.col("tool").is_first_distinct())
    return {step: [_ALWAYS_EMPTY] * is_first for step, is_first in steps.iter_rows()}


def list_facts(row: Row, quiet: Mapping[int, Sequence[Mark]]) -> list[Mark]:
    """Return marks for the unusual facts of a step; `quiet` is of `find_quiet_steps`."""
    marks = list_reply_faults(row, quiet)
    if row["is_action_valid"] is False:
        marks.append(("malformed action", "red", "The action could not be parsed."))
    if not row["is_active"]:
        marks.append(("inactive", "gray", "Padding after the end: takes part in nothing."))
    if not row["trainable"]:
        marks.append(("not trained", "gray", "Another policy decided, or tokens do not say what it saw."))
    if row["is_copied_context"]:
        marks.append(("copied context", "gray", "Repeated from an earlier episode: never trained on."))
    return marks


def list_reply_faults(row: Row, quiet: Mapping[int, Sequence[Mark]]) -> list[Mark]:
    """Return marks for a failed call on its step, and grey ones on the step whose state is its reply."""
    marks: list[Mark] = [FAILED] if row["reply_is_error"] else []
    if row["step_index"] in quiet:
        marks += quiet[row["step_index"]]
    elif row["reply_is_empty"]:
        marks.append((EMPTY_REPLY, "orange", "The reply, which is the state of the next step, is empty."))
    if row["state_is_error"]:
        marks.append(("came from an error", "gray", "The state is an error text, which anything may lead to."))
    if row["state_is_empty"] and row["step_index"] - 1 not in quiet:
        explanation = "The state says nothing. Anything may lead to it: siblings that share it may differ."
        marks.append(("came from an empty reply", "gray", explanation))
    return marks
