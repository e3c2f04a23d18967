"""Answers to what the page of a transcript asks: opened steps, a whole text, tokens, where a text occurs."""

from collections.abc import Mapping
from typing import Any

from viewer.links import whole
from viewer.queries import transcripts
from viewer.queries.episodes import TEXT
from viewer.transcript import opened
from viewer.transcript.told import Told

STEPS = 12
"""Steps that an answer holds at most."""


def answer(told: Told, asked: Mapping[str, str]) -> dict[str, Any]:
    """The answer to the questions of an address, each under its name; what makes no sense in them is left out.

    Args:
        told: what the transcript is of.
        asked: of `steps` (indices to open, with commas), `whole` (a step) with `block` (the name of a block of it),
            `shared` (a step, whose state siblings share), `tokens` (a step) and `find` (a text) those that are wanted.
    """
    found: dict[str, Any] = {}
    if "steps" in asked:
        wanted = [_step(told, one) for one in asked["steps"].split(",", STEPS)[:STEPS]]
        found["steps"] = opened.steps(told, [one for one in wanted if one is not None])
    if (index := _step(told, asked.get("whole"))) is not None:
        found["whole"] = opened.whole(told, index, asked.get("block", ""))
    if (index := _step(told, asked.get("shared"))) is not None:
        found["shared"] = opened.shared(told, index)
    if (index := _step(told, asked.get("tokens"))) is not None:
        found["tokens"] = opened.tokens(told, index)
    if "find" in asked:
        text = asked["find"][:TEXT]
        found["find"] = told.read(transcripts.find, told.episode_id, text) if text else []
    return found


def _step(told: Told, text: str | None) -> int | None:
    """A step's index, or one of those that stand for the messages outside the steps; None of any other text."""
    index = opened.BEFORE if text == str(opened.BEFORE) else whole(text)
    return index if index is not None and index <= told.count else None
