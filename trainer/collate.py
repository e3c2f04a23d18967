"""From ragged token arrays to one packed buffer, without a Python loop over rows.

Axes: `_M` members (token rows inside sequences, in buffer order), `_Q` sequences, `_T` tokens, `_N` trained tokens.
"""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch  # noqa: TID253 - loaded by commands only when they train

from trainer.batch import PackedBatch

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Members:
    """Scalars of each member."""

    n_context_M: Ints
    """Context tokens."""
    n_action_M: Ints
    """Action tokens."""
    trained_M: npt.NDArray[np.bool_]
    """Its action carries loss."""
    advantage_M: Floats | None
    """Advantage of its step."""
    temperature_M: Floats | None
    """Sampling temperature of its step."""

    def take(self, chosen: Ints) -> "Members":
        """Some of the members, in the given order."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        taken: dict[str, Any] = {name: None if value is None else value[chosen] for name, value in values.items()}
        return Members(**taken)


@dataclass(frozen=True, slots=True)
class TokenArrays:
    """Tokens of all members, end to end in member order."""

    context_T: npt.NDArray[np.int32]
    """Context token ids."""
    action_T: npt.NDArray[np.int32]
    """Action token ids."""
    mask_T: npt.NDArray[np.bool_]
    """Of each action token: the policy sampled it."""
    logprobs_T: Floats | None
    """Of each action token: its behaviour log-probability."""


def collate(members: Members, members_Q: Ints, tokens: TokenArrays) -> PackedBatch:
    """Lay sequences end to end and mark the tokens that carry loss.

    Masks come from lengths and from the stored action mask, never from token ids: padding often shares the id of the
    end token.

    Args:
        members: members of all sequences, in order.
        members_Q: how many belong to each sequence.
        tokens: their tokens.

    Returns:
        The packed buffer, on the CPU.
    """
    length_M = members.n_context_M + members.n_action_M
    start_M = _exclusive_sum(length_M)
    context_at = _ranges(start_M, members.n_context_M)
    action_at = _ranges(start_M + members.n_context_M, members.n_action_M)
    ids_T = np.empty(int(length_M.sum()), np.int64)
    ids_T[context_at] = tokens.context_T
    ids_T[action_at] = tokens.action_T

    length_Q = np.add.reduceat(length_M, _exclusive_sum(members_Q))
    start_Q = _exclusive_sum(length_Q)
    positions_T = np.arange(len(ids_T)) - np.repeat(start_Q, length_Q)

    carries_A = tokens.mask_T & np.repeat(members.trained_M, members.n_action_M)
    target_at = action_at[carries_A]

    def spread(value_M: Floats | None) -> torch.Tensor | None:
        return None if value_M is None else torch.from_numpy(np.repeat(value_M, members.n_action_M)[carries_A])

    return PackedBatch(
        input_ids_T=torch.from_numpy(ids_T),
        position_ids_T=torch.from_numpy(positions_T),
        boundaries=[0, *np.cumsum(length_Q).tolist()],
        predictor_N=torch.from_numpy(target_at - 1),
        target_N=torch.from_numpy(ids_T[target_at]),
        advantages_N=spread(members.advantage_M),
        behaviour_logprobs_N=None if tokens.logprobs_T is None else torch.from_numpy(tokens.logprobs_T[carries_A]),
        temperature_N=spread(members.temperature_M),
    )


def _exclusive_sum(counts: Ints) -> Ints:
    """[0, c0, c0 + c1, ...] without the total."""
    return np.cumsum(counts) - counts


def _ranges(starts: Ints, lengths: Ints) -> Ints:
    """Concatenation of [start, start + length) for each pair."""
    return np.repeat(starts - _exclusive_sum(lengths), lengths) + np.arange(int(lengths.sum()))
