"""How a loss is averaged: what each trained token of an optimizer step weighs, decided by the plan alone.

The loss of an optimizer step is the weighted sum of its tokens' losses. Weights come from lengths after drops and never
from run-time masks, so gradients simply add up over micro-batches and ranks (verl #5798, transformers #34191 are what
happens otherwise). For the means the weights of a step sum to 1.

Axes: `_U` units of one optimizer step, `_N` trained tokens, `_M` members.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Weights = npt.NDArray[np.float64]


class Unit(StrEnum):
    """Over what a loss is averaged, and over what a sequence-level loss takes its ratio."""

    TOKEN = "token"
    """Every trained token for itself."""
    TURN = "turn"
    """The action of one step."""
    SEQUENCE = "sequence"
    """What was trained in one training sequence: an append-only episode, or a fork of one."""
    EPISODE = "episode"
    """All sequences of an episode."""


class Aggregation(StrEnum):
    """How tokens' losses become one number; n trained tokens, U units, n_u trained tokens of unit u."""

    TOKEN_MEAN = "token_mean"
    """1 / n: long units weigh more (DAPO, arXiv 2503.14476)."""
    UNIT_MEAN_TOKEN_MEAN = "unit_mean_token_mean"
    """1 / (U n_u): units weigh the same, tokens of long units less (GRPO, arXiv 2402.03300; GSPO)."""
    UNIT_MEAN_TOKEN_SUM = "unit_mean_token_sum"
    """1 / U: the log-probability of a unit is that of all its tokens (REINFORCE)."""
    UNIT_MEAN_TOKEN_SUM_NORM = "unit_mean_token_sum_norm"
    """1 / (U C) with a constant C (Dr. GRPO, arXiv 2503.20783)."""


class Atom(StrEnum):
    """What must share a micro-batch."""

    SEQUENCE = "sequence"
    """A training sequence."""
    EPISODE = "episode"
    """All sequences of an episode: its forks."""
    PAIR = "pair"
    """Both sides of a pair."""


def unit_numbers(unit: Unit, trained_M: npt.NDArray[np.bool_], members_Q: Ints, opens_Q: npt.NDArray[np.bool_]) -> Ints:
    """Which unit each member belongs to, counted through a buffer: int64 [M], ascending, without gaps where trained.

    Args:
        unit: the unit; for TOKEN all members of a sequence get one number, which no weight depends on.
        trained_M: the member carries loss, bool [M]. Only numbers of such members mean anything.
        members_Q: members of each sequence, int64 [Q]; each sequence has a trained one.
        opens_Q: the sequence is the first of an episode, bool [Q].
    """
    if unit is Unit.TURN:
        return np.cumsum(trained_M) - 1
    number_Q = np.cumsum(opens_Q) - 1 if unit is Unit.EPISODE else np.arange(len(members_Q))
    return np.repeat(number_Q, members_Q)


@dataclass(frozen=True, slots=True)
class Weighting:
    """How a run's loss is averaged, resolved."""

    aggregation: Aggregation
    unit: Unit
    atom: Atom
    constant: float | None
    """C of unit_mean_token_sum_norm; None where nothing is divided by it."""

    def weights(self, tokens_U: Ints, *, tokens: int, units: int) -> Weights:
        """What each trained token of some units (tokens_U of them each, int64 [U]) weighs, float64 [U].

        `tokens` and `units` are those of the whole optimizer step, over all ranks.
        """
        if self.aggregation is Aggregation.UNIT_MEAN_TOKEN_MEAN:
            return 1.0 / (units * tokens_U.astype(np.float64))
        divisor: float = tokens if self.aggregation is Aggregation.TOKEN_MEAN else units
        if self.aggregation is Aggregation.UNIT_MEAN_TOKEN_SUM_NORM:
            assert self.constant is not None
            divisor = units * self.constant
        return np.full(len(tokens_U), 1.0 / divisor)

    def describe(self) -> str:
        """For people: `unit_mean_token_mean over episode`."""
        over = "" if self.unit is Unit.TOKEN else f" over {self.unit}s"
        norm = f", C = {self.constant:g}" if self.aggregation is Aggregation.UNIT_MEAN_TOKEN_SUM_NORM else ""
        return f"{self.aggregation}{over}{norm}"
