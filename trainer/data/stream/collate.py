"""From ragged token arrays to packed buffers, without a Python loop over rows.

A whole optimizer step is laid out at once, every number already relative to its micro-batch; the micro-batches are
views of it. So the cost is that of writing each tensor once.

Axes: `_M` members (token rows inside sequences, in buffer order), `_Q` sequences, `_T` tokens, `_C` context tokens,
`_A` action tokens, `_N` trained tokens, `_U` units, `_B` micro-batches.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch  # noqa: TID253 - loaded by commands only when they train

from trainer.data.stream.batch import Ints, PackedBatch, ranges, starts

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
    step_index_M: npt.NDArray[np.int32] | None = None
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
    """What the plan makes the members of one optimizer step count; see `trainer.data.stream.aggregation`."""

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

    context_C: npt.NDArray[np.int32]
    """Ids of context tokens."""
    action_A: npt.NDArray[np.int32]
    """Ids of action tokens."""
    mask_A: npt.NDArray[np.bool_] | None
    """Of each action token: the policy sampled it. None: of all."""
    logprobs_A: Floats | None
    """Of each action token: its behaviour log-probability."""


def collate(
    members: Members,
    members_Q: Ints,
    tokens: TokenArrays,
    shares: Shares,
    sequences_B: Sequence[int],
    *,
    pinned: bool = False,
    allocate: Allocate = np.empty,
) -> list[PackedBatch]:
    """Lay sequences end to end in micro-batches (on the CPU) and mark the tokens that carry loss.

    Masks come from lengths and from the stored action mask, never from token ids: padding often shares the id of the
    end token. Tensors share memory where they can, also with `tokens`.

    Args:
        members_Q: how many belong to each sequence, at least 1.
        sequences_B: how many sequences each micro-batch has, at least 1; together all of them.
        pinned: put the batches into page-locked memory.
        allocate: gives memory for so many numbers of a type.
    """
    first_M = starts(members.n_context_M + members.n_action_M)
    member_Q, sequence_B = starts(members_Q), starts(sequences_B)
    token_Q, member_B = first_M[member_Q], member_Q[sequence_B]
    columns = {
        "input_ids_T": _interleaved(members, tokens, allocate),
        "position_ids_T": _positions(np.diff(token_Q), allocate),
        **_trained_columns(members, tokens, shares, first_M, member_B, allocate),
    }
    sizes = {"T": np.diff(token_Q[sequence_B]), "N": np.diff(starts(members.loss_tokens_M)[member_B])}
    if shares.unit_M is not None:
        of_units, sizes["U"] = _unit_columns(members, shares.unit_M, shares, member_B, allocate)
        columns |= of_units
    split: dict[str, Any] = {name: _split(values, sizes[name[-1]], pinned=pinned) for name, values in columns.items()}
    edges = token_Q.tolist()
    return [
        PackedBatch(
            boundaries=[edge - edges[low] for edge in edges[low : high + 1]],
            **{name: parts[number] for name, parts in split.items()},
        )
        for number, (low, high) in enumerate(pairwise(sequence_B.tolist()))
    ]


def _interleaved(members: Members, tokens: TokenArrays, allocate: Allocate) -> npt.NDArray[np.int32]:
    """Token ids: of each member its context, then its action."""
    lengths_M2 = np.stack([members.n_context_M, members.n_action_M], axis=1)
    is_action_T = np.repeat(np.tile([False, True], len(lengths_M2)), lengths_M2.ravel())
    ids_T = allocate(len(is_action_T), np.int32)
    ids_T[is_action_T] = tokens.action_A
    ids_T[np.logical_not(is_action_T, out=is_action_T)] = tokens.context_C
    return ids_T


def _positions(length_Q: Ints, allocate: Allocate) -> npt.NDArray[np.int32]:
    """0, 1, ... in each sequence."""
    counting = np.arange(length_Q.max(), dtype=np.int32)
    parts = [counting[:length] for length in length_Q.tolist()]
    return np.concatenate(parts, out=allocate(int(length_Q.sum()), np.int32))


def _trained_columns(
    members: Members, tokens: TokenArrays, shares: Shares, first_M: Ints, member_B: Ints, allocate: Allocate
) -> dict[str, npt.NDArray[Any]]:
    """The columns of trained tokens, but for their units."""
    before_M = first_M[1:] - members.n_action_M - 1
    predictor_A = ranges(_relative(before_M, first_M[member_B[:-1]], member_B), members.n_action_M)
    kept = _with_loss(members, tokens.mask_A)

    def laid_out(values: npt.NDArray[Any], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        out = allocate(len(values), dtype)
        out[:] = values
        return out

    columns = {
        "predictor_N": laid_out(predictor_A[kept], np.int64),
        "target_N": laid_out(tokens.action_A[kept], np.int64),
    }
    if tokens.logprobs_A is not None:
        columns["behaviour_logprobs_N"] = tokens.logprobs_A[kept]
    of_members = {
        "weight_N": shares.weight_M,
        "step_index_N": members.step_index_M,
        "advantages_N": members.advantage_M,
        "temperature_N": members.temperature_M,
        "staleness_N": members.staleness_M,
    }
    for name, value_M in of_members.items():
        if value_M is not None:
            columns[name] = laid_out(np.repeat(value_M, members.loss_tokens_M), value_M.dtype)
    return columns


def _with_loss(members: Members, mask_A: npt.NDArray[np.bool_] | None) -> slice | npt.NDArray[np.bool_]:
    """Which action tokens carry loss; a slice in the usual case that all do, which needs no copies."""
    if mask_A is None and members.trained_M.all():
        return slice(None)
    kept_A: npt.NDArray[np.bool_] = np.repeat(members.trained_M, members.n_action_M)
    return kept_A if mask_A is None else kept_A & mask_A


def _unit_columns(
    members: Members, unit_M: Ints, shares: Shares, member_B: Ints, allocate: Allocate
) -> tuple[dict[str, npt.NDArray[Any]], Ints]:
    """The columns that units have, numbered from 0 in each micro-batch, and how many units each of these has."""
    has_loss_M = members.loss_tokens_M > 0
    unit_of_loss = unit_M[has_loss_M]
    units = int(unit_of_loss[-1]) + 1 if len(unit_of_loss) else 0
    unit_B = np.append(unit_of_loss, units)[starts(has_loss_M)[member_B]]
    unit_N = allocate(int(members.loss_tokens_M.sum()), np.int64)
    unit_N[:] = np.repeat(_relative(unit_M, unit_B[:-1], member_B), members.loss_tokens_M)
    columns = {"unit_N": unit_N, "weight_U": np.full(units, shares.unit_weight, np.float32)}
    if shares.pair_U is not None:
        columns["pair_U"] = _relative(shares.pair_U, shares.pair_U[unit_B[:-1]], unit_B)
    if shares.sign_U is not None:
        columns["sign_U"] = shares.sign_U
    return columns, np.diff(unit_B)


def _relative(values: npt.NDArray[Any], origin_B: npt.NDArray[Any], edges: Ints) -> npt.NDArray[Any]:
    """Values minus the origin of the micro-batch they are in, which begins and ends at two edges."""
    return np.asarray(values - np.repeat(origin_B, np.diff(edges)))


def _split(values: npt.NDArray[Any], sizes_B: Ints, *, pinned: bool) -> tuple[torch.Tensor, ...]:
    """Views of the parts of a column, after a copy into page-locked memory if that is wanted."""
    tensor = torch.from_numpy(values)
    return torch.split(tensor.pin_memory() if pinned else tensor, sizes_B.tolist())


def dummy(members: Members, *, logprobs: bool, units: bool, pairs: bool = False, signs: bool = False) -> PackedBatch:
    """A buffer of one sequence that counts nothing: for a rank that has no micro-batch where others have one.

    It has the columns that `members` has, and behaviour log-probabilities, units, pairs and signs as the run's batches.
    """
    one, zero, number = np.ones(1, np.float32), np.zeros(1, np.float32), np.ones(1, np.int64)
    single = Members(
        n_context_M=number,
        n_action_M=number,
        trained_M=np.ones(1, np.bool_),
        loss_tokens_M=number,
        step_index_M=None if members.step_index_M is None else np.zeros(1, np.int32),
        advantage_M=None if members.advantage_M is None else zero,
        temperature_M=None if members.temperature_M is None else one,
        staleness_M=None if members.staleness_M is None else zero,
    )
    token = np.zeros(1, np.int32)
    tokens = TokenArrays(token, token, mask_A=None, logprobs_A=zero if logprobs else None)
    first = np.zeros(1, np.int64)
    shares = Shares(
        weight_M=zero,
        unit_M=first if units else None,
        unit_weight=0.0,
        pair_U=first if pairs else None,
        sign_U=one if signs else None,
    )
    (batch,) = collate(single, number, tokens, shares, [1])
    return replace(batch, dummy=True)
