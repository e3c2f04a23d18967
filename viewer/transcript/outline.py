"""The lines of a transcript: for each step what was done, its reward and advantage, what is wrong, its times."""

import json
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import polars as pl

from viewer import plain
from viewer.queries import Row
from viewer.transcript import ledger
from viewer.transcript.folds import folds
from viewer.transcript.ledger import Mark, Scale

LINE = 200
"""Characters of what a line says was done."""
CHIPS = 3
"""Marks that a line shows; the opened step has all."""


def lines(
    outline: pl.DataFrame,
    credit: Mapping[int, Row],
    scores: Mapping[int, Sequence[Row]],
    scale: Scale,
    branches: Mapping[int, Sequence[Any]],
) -> list[dict[str, Any]]:
    """A line for each row of `transcripts.outline`.

    Args:
        credit: rows of `advantages` by step.
        scores: rows of `transcripts.scores` by step.
        branches: the episodes that came out of a step.
    """
    spans = waterfall(outline)
    usual = _of_all(credit)
    found = []
    for row, span in zip(outline.iter_rows(named=True), spans, strict=True):
        index = row["step_index"]
        given = credit.get(index)
        chips = [
            *_branched(branches.get(index, ())),
            *facts(row),
            *(mark for mark in ledger.marks(given) if mark[1] != "gray" and mark not in usual),
        ]
        found.append(
            {
                "index": index,
                "tool": None if row["tool"] is None else plain.one_line(row["tool"]),
                "text": said(row),
                "more": max(0, row["calls"] - 1),
                "marks": chips[:CHIPS],
                "scores": [_score(one) for one in scores.get(index, ())],
                "reward": None if row["reward"] is None else plain.number(row["reward"]),
                "advantage": None if given is None else _advantage(given, scale),
                "latency": None if row["latency"] is None else plain.seconds(row["latency"]),
                "span": span,
            }
        )
    return found


def repeats(outline: pl.DataFrame) -> list[dict[str, Any]]:
    """Runs of steps that do the same again and again: first, last, period and times.

    Steps are the same if their whole action, their reward, and what is wrong with them are.
    """
    names = ("doing", "reward", "is_action_valid", "state_is_error", "is_active", "agent_id")
    # The last step has no reply: nothing is wrong with it, as with one whose reply is fine.
    replies = pl.col("reply_is_error", "reply_is_empty").fill_null(value=False)
    found = folds(list(outline.select(*names, replies).iter_rows()))
    indices = outline["step_index"].to_list()
    return [
        {"first": indices[fold.first], "last": indices[fold.end - 1], "period": fold.period, "times": fold.times}
        for fold in found
    ]


def said(row: Row) -> str:
    """What a step did, in one line: the arguments of its first call, else its action."""
    if row["tool"] is None:
        return plain.one_line(row["action"] or "", LINE)
    try:
        values = json.loads(row["arguments"] or "")
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, Mapping):
        return plain.one_line(row["arguments"] or "", LINE)
    shown = (f"{name}: {one if isinstance(one, str) else json.dumps(one)}" for name, one in values.items())
    return plain.one_line(", ".join(shown), LINE)


def facts(row: Row) -> list[Mark]:
    """What is unusual about a step."""
    found = answered(row)
    if row["is_action_valid"] is False:
        found.append(("malformed action", "red", "The action could not be parsed."))
    if not row["is_active"]:
        found.append(("inactive", "gray", "Padding after the end: takes part in nothing."))
    if not row["trainable"]:
        found.append(("not trained", "gray", "Another policy decided, or tokens do not say what it saw."))
    if row["is_copied_context"]:
        found.append(("copied context", "gray", "Repeated from an earlier episode: never trained on."))
    return found


def answered(row: Row) -> list[Mark]:
    """What went wrong with the call of a step, on the step itself; on the next one, in grey, where it came from."""
    found: list[Mark] = []
    if row["reply_is_error"]:
        found.append(("failed: error", "red", "What came back, the state of the next step, is an error text."))
    if row["reply_is_empty"]:
        found.append(("empty reply", "orange", "What came back, the state of the next step, says nothing."))
    if row["state_is_error"]:
        found.append(("came from an error", "gray", "The state is an error text, which anything may lead to."))
    if row["state_is_empty"]:
        explanation = "The state says nothing. Anything may lead to it: siblings that share it may differ."
        found.append(("came from an empty reply", "gray", explanation))
    return found


def waterfall(outline: pl.DataFrame) -> list[tuple[float, float] | None]:
    """Start and length of each step's call as shares of the window, in percent; None where either is not known.

    Where no start is known the calls are laid end to end.
    """
    began, took = outline["began"].to_list(), outline["latency"].to_list()
    if all(start is None for start in began):
        began = list(accumulate((one or 0.0 for one in took[:-1]), initial=0.0))
    known = [
        (start, length) for start, length in zip(began, took, strict=True) if start is not None and length is not None
    ]
    if not known:
        return [None] * outline.height
    first, last = min(start for start, _ in known), max(start + length for start, length in known)
    whole = (last - first) or 1.0
    return [
        None
        if start is None or length is None
        else (round(100 * (start - first) / whole, 2), round(100 * length / whole, 2))
        for start, length in zip(began, took, strict=True)
    ]


def _branched(branches: Sequence[Any]) -> list[Mark]:
    count = len(branches)
    return [(f"{count} branch{'' if count == 1 else 'es'}", "violet", "Episodes that came out of it.")] if count else []


def _of_all(credit: Mapping[int, Row]) -> list[Mark]:
    """What every step of an episode is: a line does not repeat it."""
    every = [ledger.marks(row) for row in credit.values()]
    return [mark for mark in every[0] if all(mark in others for others in every)] if len(every) > 1 else []


def _advantage(credit: Row, scale: Scale) -> dict[str, Any]:
    value = credit["advantage"]
    return {
        "number": ledger.UNKNOWN if value is None else plain.signed(value),
        "value": value,
        "bar": ledger.bar(value, scale.advantage),
    }


def _score(row: Row) -> tuple[str, str]:
    return plain.one_line(row["scorer"], 24), plain.number(row["value"])
