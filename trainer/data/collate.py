"""From ragged token arrays to packed buffers, without a Python loop over rows.

A whole optimizer step is laid out at once and then cut into micro-batches, which are views: the cost is that of copying
the tokens.

Axes: `_M` members (token rows inside sequences, in buffer order), `_Q` sequences, `_T` tokens, `_N` trained tokens,
`_A` action tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch  # noqa: TID253 - loaded by commands only when they train

from trainer.data.batch import PackedBatch
from trainer.data.ranges import Ints, ranges

Floats = npt.NDArray[np.float32]
Allocate = Callable[[int, npt.DTypeLike], npt.NDArray[Any]]


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
    """What the plan makes the members of one optimizer step count; see `trainer.data.aggregation`."""

    weight_M: Floats
    """Factor of each of its tokens' losses."""
    unit_M: Ints | None = None
    """Number of its unit in the buffer, ascending; over members that carry loss without gaps. None: the token."""
    unit_weight: float = 1.0
    """1 / number of units of the whole optimizer step."""
    pair_U: Ints | None = None
    """Number of each unit's pair in the buffer, ascending without gaps; None without pairs."""
    sign_U: Floats | None = None
    """+1 or -1 for each unit; None without preferences."""


@dataclass(frozen=True, slots=True)
class TokenArrays:
    """Tokens of all members, end to end in member order."""

    ids_T: npt.NDArray[np.int32]
    """Token ids: of each member its context, then its action."""
    mask_A: npt.NDArray[np.bool_] | None
    """Of each action token: the policy sampled it. None: of all."""
    logprobs_A: Floats | None
    """Of each action token: its behaviour log-probability."""


def collate(
    members: Members, members_Q: Ints, tokens: TokenArrays, shares: Shares, allocate: Allocate = np.empty
) -> PackedBatch:
    """Lay sequences end to end and mark the tokens that carry loss.

    Masks come from lengths and from the stored action mask, never from token ids: padding often shares the id of the
    end token.

    Args:
        members: members of all sequences, in order.
        members_Q: how many belong to each sequence.
        tokens: their tokens; the batch takes their memory over.
        shares: what they count.
        allocate: gives memory for so many numbers of a type.

    Returns:
        The packed buffer, on the CPU.
    """
    length_M = members.n_context_M + members.n_action_M
    length_Q = np.add.reduceat(length_M, np.cumsum(members_Q) - members_Q)
    counting = np.arange(length_Q.max(), dtype=np.int32)
    action_at = ranges(np.cumsum(length_M) - members.n_action_M, members.n_action_M)
    kept = _with_loss(members, tokens.mask_A)
    target_at = action_at[kept]

    def kept_as(values: npt.NDArray[Any], dtype: npt.DTypeLike) -> torch.Tensor:
        out = allocate(len(values), dtype)
        out[:] = values
        return torch.from_numpy(out)

    def spread(value_M: npt.NDArray[Any]) -> torch.Tensor:
        return kept_as(np.repeat(value_M, members.loss_tokens_M), value_M.dtype)

    def spread_known(value_M: Floats | None) -> torch.Tensor | None:
        return None if value_M is None else spread(value_M)

    unit_N = None if shares.unit_M is None else spread(shares.unit_M)
    units = 0 if unit_N is None or not len(unit_N) else int(unit_N[-1]) + 1
    positions_T = np.concatenate(
        [counting[:length] for length in length_Q.tolist()], out=allocate(len(tokens.ids_T), np.int32)
    )
    return PackedBatch(
        input_ids_T=torch.from_numpy(tokens.ids_T),
        position_ids_T=torch.from_numpy(positions_T),
        boundaries=[0, *np.cumsum(length_Q).tolist()],
        predictor_N=kept_as(target_at - 1, np.int64),
        target_N=kept_as(tokens.ids_T[target_at], np.int64),
        weight_N=spread(shares.weight_M),
        unit_N=unit_N,
        weight_U=None if unit_N is None else torch.full((units,), shares.unit_weight),
        pair_U=None if shares.pair_U is None else torch.from_numpy(shares.pair_U),
        sign_U=None if shares.sign_U is None else torch.from_numpy(shares.sign_U),
        step_index_N=spread(members.step_index_M),
        advantages_N=spread_known(members.advantage_M),
        behaviour_logprobs_N=None if tokens.logprobs_A is None else kept_as(tokens.logprobs_A[kept], np.float32),
        temperature_N=spread_known(members.temperature_M),
        staleness_N=spread_known(members.staleness_M),
    )


def _with_loss(members: Members, mask_A: npt.NDArray[np.bool_] | None) -> slice | npt.NDArray[np.bool_]:
    """Which action tokens carry loss; a slice in the usual case that all do, which needs no copies."""
    if mask_A is None and members.trained_M.all():
        return slice(None)
    kept_A: npt.NDArray[np.bool_] = np.repeat(members.trained_M, members.n_action_M)
    return kept_A if mask_A is None else kept_A & mask_A


def cut(
    batch: PackedBatch, counts: Sequence[int], *, pinned: bool = False, allocate: Allocate = np.empty
) -> list[PackedBatch]:
    """Consecutive parts of a packed buffer.

    Args:
        batch: the buffer.
        counts: sequences of each part.
        pinned: put the parts into page-locked memory.
        allocate: gives memory for so many numbers of a type.

    Returns:
        One buffer per part; together they hold every sequence once. Tensors share memory where they can.
    """
    firsts = np.cumsum([0, *counts])
    edges = np.array(batch.boundaries)[firsts]
    edges_N = np.searchsorted(batch.predictor_N.numpy(), edges)
    sizes_N = np.diff(edges_N)

    def relative(values: npt.NDArray[Any], origins: npt.NDArray[Any]) -> torch.Tensor:
        out = allocate(len(values), np.int64)
        return torch.from_numpy(np.subtract(values, np.repeat(origins, sizes_N), out=out))

    whole = replace(batch, predictor_N=relative(batch.predictor_N.numpy(), edges[:-1]))
    sizes_U: list[int] = []
    if batch.unit_N is not None and batch.weight_U is not None:
        unit_N = batch.unit_N.numpy()
        edges_U = np.append(unit_N, len(batch.weight_U))[edges_N]
        sizes_U = np.diff(edges_U).tolist()
        whole = replace(whole, unit_N=relative(unit_N, edges_U[:-1]))
        if batch.pair_U is not None:
            pair_U = batch.pair_U.numpy()
            whole = replace(whole, pair_U=torch.from_numpy(pair_U - np.repeat(pair_U[edges_U[:-1]], sizes_U)))
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


def dummy(members: Members, *, logprobs: bool, units: bool, pairs: bool = False, signs: bool = False) -> PackedBatch:
    """A buffer of one sequence that counts nothing: for a rank that has no micro-batch where others have one.

    Args:
        members: of the run; only which columns it has matters.
        logprobs: the run's batches hold behaviour log-probabilities.
        units: the run's batches hold units.
        pairs: and which pair they are of.
        signs: and which of them are preferred.
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
    tokens = TokenArrays(np.zeros(2, np.int32), mask_A=None, logprobs_A=zero if logprobs else None)
    first = np.zeros(1, np.int64)
    shares = Shares(
        weight_M=zero,
        unit_M=first if units else None,
        unit_weight=0.0,
        pair_U=first if pairs else None,
        sign_U=one if signs else None,
    )
    return replace(collate(single, number, tokens, shares), dummy=True)
