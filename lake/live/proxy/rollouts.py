"""An episode that is open in the proxy, and what is said of it when it ends."""

import time
from typing import Any

import msgspec

from lake.formats.chat.messages import Message
from lake.live.proxy.keys import Address
from lake.live.proxy.steps import Call
from lake.records import EpisodeRecord, ScoreRecord


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


class Rollout:
    """An open episode."""

    def __init__(self, key: bytes, address: Address, record: EpisodeRecord) -> None:
        self.key, self.address, self.record = key, address, record
        self.frames = 0
        self.steps = 0
        self.failed = 0
        """Calls."""
        self.unanswered: Call | None = None
        """The last call that failed, while none was answered."""
        self.prompts: set[bytes] = set()
        """Hashes of prompts that may be tried again."""
        self.tokens: list[tuple[int | None, int | None]] = []
        """Of each step: tokens of its prompt and of its answer, as the engine billed them."""
        self.trace_id: str | None = None
        """Of the trace that it is."""
        self.is_settling = False
        """The root of its trace has ended."""
        self.is_lost = False
        self.touched = time.monotonic()
