"""An episode that is open in the proxy, and what is said of it when it ends."""

import time
from collections import Counter
from datetime import datetime
from typing import Annotated, Any

import msgspec

from lake.errors import UsageError
from lake.formats.base.secrets import Secrets
from lake.formats.chat.messages import Message
from lake.live.assembly import is_score
from lake.live.calls.address import Address
from lake.live.calls.prefixes import Heads
from lake.live.frames import SOURCE_FORMAT, End, Frame, Reward, Score, Span, Step, Traced
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
    environment: str | None = None
    split: str | None = None
    expected_group_size: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    response_id: str | None = None
    """An answer of the episode, where no path and no header names it."""
    closes: bool = False
    """The rollout takes nothing more, from none of its agents: calls that are under way are broken off, the episodes
    of its sub-agents end as well, and it is recorded even if no call of it came."""
    initial_messages: list[Message] | None = None
    """What such a rollout was to begin with."""

    def without_keys(self, secrets: Secrets) -> "Ending":
        """It without keys, whichever field holds one."""
        said = msgspec.to_builtins(self)
        kept = {name: secrets.without_keys(value, name) for name, value in said.items()}
        return self if kept == said else msgspec.convert(kept, Ending)

    def frames(self, at: datetime) -> tuple[list[Frame], End]:
        """What it says, as frames, and the last one."""
        steps = enumerate(self.step_rewards)
        found: list[Frame] = [Reward(value=value, step_index=index) for index, value in steps if value is not None]
        if self.reward is not None:
            found.append(Reward(value=self.reward))
        found += [Score(score=score) for score in self.scores]
        said = {name: getattr(self, name) for name in _OF_END}
        return found, End(ended_at=at, **said)

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
        if nameless := [score.scorer for score in self.scores if not is_score(score)]:
            raise UsageError(f"`scores` has scorer {nameless[0]!r}; valid: a name that is not blank and has no @")
        if bad := [score.step_index for score in self.scores if (score.step_index or 0) >= max(steps, 1)]:
            raise UsageError(f"`scores` names step {bad[0]}; the episode has {steps} steps, counted from 0")


_OF_END = tuple(name for name in Ending.__struct_fields__ if name in End.__struct_fields__)


def named_record(address: Address) -> EpisodeRecord:
    """A record with the id of the rollout that a name with a number stands for."""
    return EpisodeRecord(
        task_id=address.task or "",
        steps=[],
        run_id=address.run,
        rollout_index=address.rollout or 0,
        attempt=address.attempt or 0,
        collection_round=address.collection_round,
        seed=address.seed,
        source_format=SOURCE_FORMAT,
    )


class Rollout:
    """An open episode."""

    def __init__(self, key: bytes, address: Address, record: EpisodeRecord) -> None:
        self.key, self.address, self.record = key, address, record
        self.frames = 0
        self.steps = 0
        self.completion_tokens = 0
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

    def count_step(self, frame: Step) -> None:
        """A call was answered."""
        self.steps += 1
        self.completion_tokens += frame.step.completion_tokens or 0
        self.problem = None

    def count_failed(self, span: Span) -> None:
        """A call failed."""
        self.failed += 1
        self.problem = span.span.error

    def count_spans(self, found: Traced) -> None:
        """An exporter sent something."""
        scopes = [scope for resource in found.document.get("resourceSpans", ()) for scope in resource["scopeSpans"]]
        self.spans = (self.spans or 0) + sum(len(scope["spans"]) for scope in scopes)

    def told(self) -> dict[str, Any]:
        """Which it is, and what of it will be in the lake; which spans are steps is found when it is read."""
        record = self.record
        names = {"run_id": record.run_id, "task_id": record.task_id, "rollout_index": record.rollout_index}
        calls = {"calls": self.steps + self.failed, "completion_tokens": self.completion_tokens}
        spans = {} if self.spans is None else {"spans": self.spans}
        # Of calls that were never answered, or never made, one step is recorded.
        steps = {} if spans and not calls["calls"] else {"steps": max(self.steps, 1)} | calls
        return names | steps | spans

    @property
    def first_prompt(self) -> bytes | None:
        """Hash of the prompt that it began with, while that was not answered."""
        messages = self.record.initial_messages
        return None if self.steps or not messages else Heads().then(*messages).exact
