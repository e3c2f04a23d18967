"""What a judge knows of the run that it works for: the answers that the lake has, and those it got anew.

A function that requires the network runs in a worker process, which has no lake. Its call brings the stored answers of
its episodes along, and its result takes the new ones back; the user's function sees neither.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

ARGUMENT = "judge_known"
"""Keyword argument that brings stored answers: request id (text) -> answer. `RewardFunction` takes it out."""
RESULT = "judge_answers"
"""Key of the result that takes the new answers back."""


@dataclass
class Run:
    """Answers known before the call, and got during it."""

    known: dict[str, str] = field(default_factory=dict)
    """request id -> answer."""
    fresh: list[dict[str, Any]] = field(default_factory=list)
    """New answers: request_id, model, answer, about, prompt_tokens, completion_tokens."""


_CURRENT: ContextVar[Run | None] = ContextVar("trajlake_judging", default=None)


def current() -> Run | None:
    """The run that a judge is asked in; None where the function was called by hand."""
    return _CURRENT.get()


@contextmanager
def judging(known: dict[str, str]) -> Iterator[Run]:
    """A run around one call."""
    run = Run(known=dict(known))
    token = _CURRENT.set(run)
    try:
        yield run
    finally:
        _CURRENT.reset(token)
