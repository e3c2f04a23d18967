"""From ragged token arrays to packed buffers, without a Python loop over rows.

A whole optimizer step is laid out at once and then cut into micro-batches, which are views: the cost is that of copying
the tokens.

Axes: `_M` members (token rows inside sequences, in buffer order), `_Q` sequences, `_T` tokens, `_N` trained tokens,
`_A` action tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
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
    loss_tokens_M: Ints
    """Tokens of it that carry loss."""
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
    action_A: npt.NDArray[np.int32]
    """Action token ids."""
    mask_A: npt.NDArray[np.bool_] | None
    """Of each action token: the policy sampled it. None: of all."""
    logprobs_A: Floats | None
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
    lengths_M2 = np.stack([members.n_context_M, members.n_action_M], axis=1)
    is_action_T = np.repeat(np.tile([False, True], len(lengths_M2)), lengths_M2.ravel())
    ids_T = np.empty(len(is_action_T), np.int32)
    ids_T[~is_action_T] = tokens.context_T
    ids_T[is_action_T] = tokens.action_A
    starts_Q = np.cumsum(members_Q) - members_Q
    length_Q = np.add.reduceat(lengths_M2.sum(axis=1), starts_Q)
    counting = np.arange(length_Q.max(), dtype=np.int32)

    # The usual case, that every action token carries loss, needs no copies.
    kept: slice | npt.NDArray[np.bool_] = slice(None)
    if tokens.mask_A is not None or not members.trained_M.all():
        kept = np.repeat(members.trained_M, members.n_action_M)
        if tokens.mask_A is not None:
            kept &= tokens.mask_A
    target_at = np.flatnonzero(is_action_T)[kept]

    def spread(value_M: Floats | None) -> torch.Tensor | None:
        return None if value_M is None else torch.from_numpy(np.repeat(value_M, members.loss_tokens_M))

    return PackedBatch(
        input_ids_T=torch.from_numpy(ids_T),
        position_ids_T=torch.from_numpy(np.concatenate([counting[:length] for length in length_Q])),
        boundaries=[0, *np.cumsum(length_Q).tolist()],
        predictor_N=torch.from_numpy(target_at - 1),
        target_N=torch.from_numpy(tokens.action_A[kept].astype(np.int64)),
        advantages_N=spread(members.advantage_M),
        behaviour_logprobs_N=None if tokens.logprobs_A is None else torch.from_numpy(tokens.logprobs_A[kept]),
        temperature_N=spread(members.temperature_M),
    )


def cut(batch: PackedBatch, counts: Sequence[int]) -> list[PackedBatch]:
    """Consecutive parts of a packed buffer.

    Args:
        batch: the buffer.
        counts: sequences of each part.

    Returns:
        One buffer per part; together they hold every sequence once.
    """
    firsts = np.cumsum([0, *counts])
    edges = np.array(batch.boundaries)[firsts]
    edges_N = np.searchsorted(batch.predictor_N.numpy(), edges)
    parts = []
    for (first, last), (low, high), (low_N, high_N) in zip(*map(_pairs, (firsts, edges, edges_N)), strict=True):
        per_token: dict[str, Any] = {
            name: None if (value := getattr(batch, name)) is None else value[low_N:high_N]
            for name in ("target_N", "advantages_N", "behaviour_logprobs_N", "temperature_N")
        }
        parts.append(
            PackedBatch(
                input_ids_T=batch.input_ids_T[low:high],
                position_ids_T=batch.position_ids_T[low:high],
                boundaries=[edge - low for edge in batch.boundaries[first : last + 1]],
                predictor_N=batch.predictor_N[low_N:high_N] - low,
                **per_token,
            )
        )
    return parts


def _pairs(values: Ints) -> Iterator[tuple[int, int]]:
    return pairwise(values.tolist())
