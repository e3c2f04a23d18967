"""From ragged token arrays to packed buffers, without a Python loop over rows.

A whole optimizer step is laid out at once and then cut into micro-batches, which are views: the cost is that of copying
the tokens.

Axes: `_M` members (token rows inside sequences, in buffer order), `_Q` sequences, `_T` tokens, `_N` trained tokens,
`_A` action tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
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
    step_index_M: npt.NDArray[np.int32]
    """Its step in the episode."""
    advantage_M: Floats | None = None
    """Advantage of its step."""
    temperature_M: Floats | None = None
    """Sampling temperature of its step."""
    staleness_M: Floats | None = None
    """Policy versions its step is behind."""

    def take(self, chosen: Ints) -> "Members":
        """Some of the members, in the given order."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        taken: dict[str, Any] = {name: None if value is None else value[chosen] for name, value in values.items()}
        return Members(**taken)


@dataclass(frozen=True, slots=True)
class Shares:
    """What the plan makes the members of one optimizer step count; see `trainer.aggregation`."""

    weight_M: Floats
    """Factor of each of its tokens' losses."""
    unit_M: Ints | None = None
    """Number of its unit in the buffer, ascending; over members that carry loss without gaps. None: the token."""
    unit_weight: float = 1.0
    """1 / number of units of the whole optimizer step."""


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


def collate(members: Members, members_Q: Ints, tokens: TokenArrays, shares: Shares) -> PackedBatch:
    """Lay sequences end to end and mark the tokens that carry loss.

    Masks come from lengths and from the stored action mask, never from token ids: padding often shares the id of the
    end token.

    Args:
        members: members of all sequences, in order.
        members_Q: how many belong to each sequence.
        tokens: their tokens.
        shares: what they count.

    Returns:
        The packed buffer, on the CPU.
    """
    lengths_M2 = np.stack([members.n_context_M, members.n_action_M], axis=1)
    is_action_T = np.repeat(np.tile([False, True], len(lengths_M2)), lengths_M2.ravel())
    action_at = np.flatnonzero(is_action_T)
    ids_T = np.empty(len(is_action_T), np.int32)
    ids_T[~is_action_T] = tokens.context_T
    ids_T[action_at] = tokens.action_A
    starts_Q = np.cumsum(members_Q) - members_Q
    length_Q = np.add.reduceat(lengths_M2.sum(axis=1), starts_Q)
    counting = np.arange(length_Q.max(), dtype=np.int32)

    # The usual case, that every action token carries loss, needs no copies.
    kept: slice | npt.NDArray[np.bool_] = slice(None)
    if tokens.mask_A is not None or not members.trained_M.all():
        kept = np.repeat(members.trained_M, members.n_action_M)
        if tokens.mask_A is not None:
            kept &= tokens.mask_A
    target_at = action_at[kept]

    def spread(value_M: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(np.repeat(value_M, members.loss_tokens_M))

    def spread_known(value_M: Floats | None) -> torch.Tensor | None:
        return None if value_M is None else spread(value_M)

    unit_N = None if shares.unit_M is None else spread(shares.unit_M)
    units = 0 if unit_N is None or not len(unit_N) else int(unit_N[-1]) + 1
    return PackedBatch(
        input_ids_T=torch.from_numpy(ids_T),
        position_ids_T=torch.from_numpy(np.concatenate([counting[:length] for length in length_Q])),
        boundaries=[0, *np.cumsum(length_Q).tolist()],
        predictor_N=torch.from_numpy(target_at - 1),
        target_N=torch.from_numpy(tokens.action_A[kept].astype(np.int64)),
        weight_N=spread(shares.weight_M),
        unit_N=unit_N,
        weight_U=None if unit_N is None else torch.full((units,), shares.unit_weight),
        step_index_N=spread(members.step_index_M),
        advantages_N=spread_known(members.advantage_M),
        behaviour_logprobs_N=None if tokens.logprobs_A is None else torch.from_numpy(tokens.logprobs_A[kept]),
        temperature_N=spread_known(members.temperature_M),
        staleness_N=spread_known(members.staleness_M),
    )


def cut(batch: PackedBatch, counts: Sequence[int], *, pinned: bool = False) -> list[PackedBatch]:
    """Consecutive parts of a packed buffer.

    Args:
        batch: the buffer.
        counts: sequences of each part.
        pinned: put the parts into page-locked memory.

    Returns:
        One buffer per part; together they hold every sequence once. Tensors share memory where they can.
    """
    firsts = np.cumsum([0, *counts])
    edges = np.array(batch.boundaries)[firsts]
    edges_N = np.searchsorted(batch.predictor_N.numpy(), edges)
    sizes_N = np.diff(edges_N)
    whole = replace(batch, predictor_N=batch.predictor_N - torch.from_numpy(np.repeat(edges[:-1], sizes_N)))
    sizes_U: list[int] = []
    if batch.unit_N is not None and batch.weight_U is not None:
        unit_N = batch.unit_N.numpy()
        edges_U = np.append(unit_N, len(batch.weight_U))[edges_N]
        sizes_U = np.diff(edges_U).tolist()
        whole = replace(whole, unit_N=torch.from_numpy(unit_N - np.repeat(edges_U[:-1], sizes_N)))
    if pinned:
        whole = whole.pinned()
    sizes = {"T": np.diff(edges).tolist(), "N": sizes_N.tolist(), "U": sizes_U}
    columns: dict[str, Any] = {
        field.name: torch.split(tensor, sizes[field.name[-1]])
        for field in fields(whole)
        if isinstance(tensor := getattr(whole, field.name), torch.Tensor)
    }
    return [
        PackedBatch(
            boundaries=[edge - edges[part] for edge in batch.boundaries[first : last + 1]],
            **{name: parts[part] for name, parts in columns.items()},
        )
        for part, (first, last) in enumerate(pairwise(firsts.tolist()))
    ]


def dummy(members: Members, *, logprobs: bool, units: bool) -> PackedBatch:
    """A buffer of one sequence that counts nothing: for a rank that has no micro-batch where others have one.

    Args:
        members: of the run; only which columns it has matters.
        logprobs: the run's batches hold behaviour log-probabilities.
        units: the run's batches hold units.
    """
    one, zero, number = np.ones(1, np.float32), np.zeros(1, np.float32), np.ones(1, np.int64)
    single = Members(
        n_context_M=number,
        n_action_M=number,
        trained_M=np.ones(1, np.bool_),
        loss_tokens_M=number,
        step_index_M=np.zeros(1, np.int32),
        advantage_M=None if members.advantage_M is None else zero,
        temperature_M=None if members.temperature_M is None else one,
        staleness_M=None if members.staleness_M is None else zero,
    )
    token = np.zeros(1, np.int32)
    tokens = TokenArrays(token, token, mask_A=None, logprobs_A=zero if logprobs else None)
    shares = Shares(zero, np.zeros(1, np.int64) if units else None, unit_weight=0.0)
    return replace(collate(single, number, tokens, shares), dummy=True)
