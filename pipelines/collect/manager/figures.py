"""What a collection comes to: counts of its rollouts, and the line that tells how far it is."""

import math
import time
from collections.abc import Mapping

import msgspec

from lake.read.text_table import counted
from pipelines.collect.manager.siblings import FINISHED
from pipelines.collect.players import Ending


class Figures(msgspec.Struct):
    """Of a round, or of all rounds of a process."""

    planned: int = 0
    present: int = 0
    """Rollouts that had ended before."""
    finished: int = 0
    """Completed or truncated."""
    failed: int = 0
    """Of which nothing more is tried."""
    aborted: int = 0
    retried: int = 0
    """Attempts that failed, or could not go on, and were followed by another."""
    left_out: int = 0
    """Not played: enough of their siblings had finished."""
    resumed: int = 0
    """Went on after an earlier process."""
    steps: int = 0
    tokens: int = 0
    """Sampled."""
    rewarded: int = 0
    """Finished rollouts that have a return."""
    returns: float = 0.0
    """Sum of these returns."""
    seconds: float = 0.0
    first_error: str | None = None

    def add(self, ending: Ending, *, is_last: bool) -> None:
        """Count an attempt that has ended; `is_last`: no other one follows."""
        self.steps += ending.num_steps
        self.tokens += ending.completion_tokens or 0
        if ending.error is not None and self.first_error is None:
            self.first_error = ending.error
        if not is_last:
            self.retried += 1
        elif ending.status in FINISHED:
            self.finished += 1
            if ending.env_return is not None:
                self.rewarded += 1
                self.returns += ending.env_return
        elif ending.status == "failed":
            self.failed += 1
        else:
            self.aborted += 1

    def merge(self, other: "Figures") -> None:
        """Add those of another round, or of another process."""
        for name in self.__struct_fields__:
            if name != "first_error":
                setattr(self, name, getattr(self, name) + getattr(other, name))
        self.first_error = self.first_error or other.first_error

    @property
    def ended(self) -> int:
        """Rollouts of which nothing more is tried, those that had ended before among them."""
        return self.present + self.finished + self.failed + self.aborted + self.left_out

    @property
    def mean_return(self) -> float | None:
        """Of what finished; None if nothing was rewarded, or the sum is beyond all floats."""
        return self.returns / self.rewarded if self.rewarded and math.isfinite(self.returns) else None

    def metrics(self, more: Mapping[str, float]) -> dict[str, float | None]:
        """For the table `metrics`."""
        own = {
            name: float(getattr(self, name))
            for name in ("finished", "failed", "aborted", "retried", "resumed", "steps", "tokens", "seconds")
        }
        return {**own, "return": self.mean_return, **{name: float(value) for name, value in more.items()}}

    def summary(self) -> str:
        """The line at the end."""
        parts = [f"{counted(self.finished, 'episode')} finished", f"{self.failed} failed", f"{self.aborted} aborted"]
        for name, words in (("present", "there before"), ("retried", "tried again"), ("left_out", "superfluous")):
            if value := getattr(self, name):
                parts.append(f"{value} {words}")
        parts.append(f"{counted(self.steps, 'step')}, {counted(self.tokens, 'token')} in {self.seconds:.0f} s")
        if self.mean_return is not None:
            parts.append(f"return {self.mean_return:.2f}")
        return ", ".join(parts)


class Meter:
    """Rates between two looks."""

    def __init__(self) -> None:
        self._at, self._steps, self._tokens = time.monotonic(), 0, 0

    def line(
        self,
        figures: Figures,
        *,
        steps: int,
        tokens: int,
        running: int,
        mean_return: float | None,
        player: Mapping[str, float],
        problem: str | None,
    ) -> str:
        """How far a round is.

        Args:
            figures: of the round.
            steps: decisions of this process so far, those of running rollouts among them.
            tokens: sampled by this process so far, those of running rollouts among them.
            running: rollouts in flight.
            mean_return: of whole groups; None before there is one.
            player: `Player.figures`.
            problem: why nothing goes on, if so.
        """
        now = time.monotonic()
        seconds = max(now - self._at, 1e-3)
        parts = [
            f"{figures.ended}/{figures.planned} episodes",
            f"{figures.failed} failed",
            f"{running} in flight",
            f"{(steps - self._steps) / seconds:,.0f} steps/s",
            f"{(tokens - self._tokens) / seconds:,.0f} tokens/s",
        ]
        if slots := player.get("slots"):
            parts.append(f"engines {min(1.0, player.get('in_flight', 0.0) / slots):.0%} busy")
        if mean_return is not None:
            parts.append(f"return {mean_return:.2f}")
        if problem is not None:
            parts.append(f"waiting: {problem}")
        self._at, self._steps, self._tokens = now, steps, tokens
        return ", ".join(parts)
