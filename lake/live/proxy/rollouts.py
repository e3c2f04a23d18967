"""An episode that is open in the proxy, and what is said of it when it ends."""

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec

from lake.errors import UsageError
from lake.formats.chat.messages import Message
from lake.live.calls.address import Address
from lake.live.calls.prefixes import Heads
from lake.live.frames import Span, Traced
from lake.records import EpisodeRecord, ScoreRecord
from lake.tables import STATUSES


class EndedError(UsageError):
    """The rollout has ended: no more calls and spans of it are taken, nor another end."""


class Ending(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What is said of an episode that ends: the body of `POST .../v1/end`. Fields are those of `EpisodeRecord`."""

    reward: float | None = None
    """`env_return`."""
    step_rewards: list[float | None] = []
    """Of its steps, in their order; null is none."""
    scores: list[ScoreRecord] = []
    status: str = "completed"
    terminated: bool | None = None
    stop_reason: str | None = None
    error: str | None = None
    ground_truth: Any = None
    final_observation: list[Message] | None = None
    response_id: str | None = None
    """An answer of the episode, where no path and no header names it."""

    def hidden(self, hide: Callable[[str], str]) -> "Ending":
        """It with what is said of errors and reasons, which quote exceptions, passed through `hide`."""
        said = {name: getattr(self, name) for name in ("stop_reason", "error")}
        scores = [
            msgspec.structs.replace(
                score, reason=score.reason and hide(score.reason), error=score.error and hide(score.error)
            )
            for score in self.scores
        ]
        return msgspec.structs.replace(
            self, scores=scores, **{name: text and hide(text) for name, text in said.items()}
        )

    def check(self, steps: int) -> None:
        """Raise UsageError for what cannot be said of an episode of so many steps."""
        if self.status not in STATUSES:
            raise UsageError(f"`status` is {self.status!r}; valid: {', '.join(STATUSES)}")
        if len(self.step_rewards) > steps:
            raise UsageError(f"`step_rewards` has {len(self.step_rewards)} entries; the episode has {steps} steps")
        scorers = Counter((score.scorer, score.step_index) for score in self.scores)
        if twice := [scorer for (scorer, _), count in scorers.items() if count > 1]:
            raise UsageError(
                f"`scores` has scorer {twice[0]!r} more than once for the same step or episode; valid: once"
            )
        if bad := [score.step_index for score in self.scores if (score.step_index or 0) >= max(steps, 1)]:
            raise UsageError(f"`scores` names step {bad[0]}; the episode has {steps} steps, counted from 0")


class Rollout:
    """An open episode."""

    def __init__(self, key: bytes, address: Address, record: EpisodeRecord) -> None:
        self.key, self.address, self.record = key, address, record
        self.frames = 0
        self.steps = 0
        self.failed = 0
        """Calls."""
        self.spans: int | None = None
        """That an exporter sent; None if none did."""
        self.problem: str | None = None
        """Why its last call failed; None if that was answered."""
        self.trace_id: str | None = None
        """Of the trace that it is."""
        self.is_settling = False
        """The root of its trace has ended."""
        self.is_lost = False
        self.touched = time.monotonic()

    def count_step(self) -> None:
        """A call was answered."""
        self.steps += 1
        self.problem = None

    def count_failed(self, span: Span) -> None:
        """A call failed."""
        self.failed += 1
        self.problem = span.span.error

    def count_spans(self, found: Traced) -> None:
        """An exporter sent something."""
        scopes = [scope for resource in found.document.get("resourceSpans", ()) for scope in resource["scopeSpans"]]
        self.spans = (self.spans or 0) + sum(len(scope["spans"]) for scope in scopes)

    def counted(self) -> dict[str, int]:
        """What of it will be in the lake, as far as that is known: which spans are steps is found when it is read."""
        steps = self.steps or int(self.failed > 0)  # of calls that were never answered, one step is recorded
        spans = {} if self.spans is None else {"spans": self.spans}
        return spans if spans and not steps else {"steps": steps} | spans

    @property
    def first_prompt(self) -> bytes | None:
        """Hash of the prompt that it began with, while that was not answered."""
        messages = self.record.initial_messages
        return None if self.steps or not messages else Heads().then(*messages).exact
