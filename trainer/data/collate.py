"""Lays ragged token arrays out in packed buffers, without a Python loop over rows.

A whole optimizer step is laid out at once, with every number relative to its micro-batch. The micro-batches are views
of it, so each tensor is written once.

Axes: `_M` members (token rows inside sequences, in buffer order), `_Q` sequences, `_T` tokens, `_C` context tokens,
`_A` action tokens, `_N` trained tokens, `_S` trained steps, `_U` units, `_B` micro-batches.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch  # noqa: TID253 - a script that does nothing without it

from trainer.data.batch import Ints, PackedBatch, compute_starts, expand_ranges

Floats = npt.NDArray[np.float32]
Allocate = Callable[[int, npt.DTypeLike], npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class MemberColumns:
    """Scalars of each member."""

    n_context_M: Ints
    n_action_M: Ints
    trained_M: npt.NDArray[np.bool_]
    """Whether its action carries loss."""
    loss_tokens_M: Ints
    """Number of its tokens that carry loss."""
    step_index_M: npt.NDArray[np.int32] | None = None
    """Index of its step in the episode."""
    advantage_M: Floats | None = None
    temperature_M: Floats | None = None
    staleness_M: Floats | None = None
    """Age of its step in policy versions."""
    value_target_M: Floats | None = None
    """Target of its step's value; None without a value head."""

    def take(self, positions: Ints) -> "MemberColumns":
        """Return the members at some positions, in this order."""
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        rows: dict[str, Any] = {name: None if column is None else column[positions] for name, column in columns.items()}
        return MemberColumns(**rows)


@dataclass(frozen=True, slots=True)
class MemberWeights:
    """Weights and units that the plan gives the members of one optimizer step; see `trainer.losses.base`."""

    weight_M: Floats
    """Factor of each of its tokens' losses."""
    unit_M: Ints | None = None
    """Number of its unit in the buffer, ascending, without gaps over members that carry loss. None: the unit is the
    token."""
    unit_weight: float = 1.0
    """1 / number of units of the whole optimizer step."""
    pair_U: Ints | None = None
    """Number of each unit's pair in the buffer, ascending without gaps; None without pairs."""
    sign_U: Floats | None = None
    """+1 or -1 for each unit; None without preferences."""
    value_weight: float = 0.0
    """1 / number of trained steps of the whole optimizer step."""


@dataclass(frozen=True, slots=True)
class TokenArrays:
    """Tokens of all members, end to end in member order."""

    context_C: npt.NDArray[np.int32]
    action_A: npt.NDArray[np.int32]
    mask_A: npt.NDArray[np.bool_] | None
    """Whether the policy sampled each action token. None: it sampled all."""
    logprobs_A: Floats | None
    """Behaviour log-probability of each action token."""


def collate(
    members: MemberColumns,
    members_Q: Ints,
    tokens: TokenArrays,
    weights: MemberWeights,
    sequences_B: Sequence[int],
    *,
    pinned: bool = False,
    allocate: Allocate = np.empty,
) -> list[PackedBatch]:
    """Lay sequences end to end in micro-batches (on the CPU) and mark the tokens that carry loss.

    Masks come from lengths and from the stored action mask, never from token ids: padding often shares the id of the
    end token. Tensors share memory where they can, also with `tokens`.

    Args:
        members_Q: number of members of each sequence, at least 1.
        sequences_B: number of sequences of each micro-batch, at least 1; the sum is the number of sequences.
        pinned: put the batches into page-locked memory.
        allocate: returns memory for a count of numbers of a type.
    """
    first_M = compute_starts(members.n_context_M + members.n_action_M)
    member_Q, sequence_B = compute_starts(members_Q), compute_starts(sequences_B)
    token_Q, member_B = first_M[member_Q], member_Q[sequence_B]
    length_Q = np.diff(token_Q)
    counting = np.arange(length_Q.max(), dtype=np.int32)
    positions = [counting[:length] for length in length_Q.tolist()]
    # Token ids: the context of each member, then its action.
    lengths_M2 = np.stack([members.n_context_M, members.n_action_M], axis=1)
    is_action_T = np.repeat(np.tile([False, True], len(lengths_M2)), lengths_M2.ravel())
    ids_T = allocate(len(is_action_T), np.int32)
    ids_T[is_action_T] = tokens.action_A
    ids_T[np.logical_not(is_action_T, out=is_action_T)] = tokens.context_C
    columns = {
        "input_ids_T": ids_T,
        "position_ids_T": np.concatenate(positions, out=allocate(int(length_Q.sum()), np.int32)),
        **_build_trained_columns(members, tokens, weights, first_M, member_B, allocate),
    }
    sizes = {"T": np.diff(token_Q[sequence_B]), "N": np.diff(compute_starts(members.loss_tokens_M)[member_B])}
    if weights.unit_M is not None:
        unit_columns, sizes["U"] = _build_unit_columns(members, weights.unit_M, weights, member_B, allocate)
        columns |= unit_columns
    if members.value_target_M is not None:
        state_M = _subtract_origin(first_M[1:] - members.n_action_M - 1, first_M[member_B[:-1]], member_B)
        columns["state_S"] = state_M[members.trained_M]
        columns["value_target_S"] = members.value_target_M[members.trained_M]
        columns["value_weight_S"] = np.full(len(columns["state_S"]), weights.value_weight, np.float32)
        sizes["S"] = np.diff(compute_starts(members.trained_M)[member_B])
    views: dict[str, Any] = {}
    for name, column in columns.items():
        tensor = torch.from_numpy(column)
        views[name] = torch.split(tensor.pin_memory() if pinned else tensor, sizes[name[-1]].tolist())
    edges = token_Q.tolist()
    return [
        PackedBatch(
            boundaries=[edge - edges[low] for edge in edges[low : high + 1]],
            **{name: tensors[number] for name, tensors in views.items()},
        )
        for number, (low, high) in enumerate(pairwise(sequence_B.tolist()))
    ]


def _build_trained_columns(
    members: MemberColumns,
    tokens: TokenArrays,
    weights: MemberWeights,
    first_M: Ints,
    member_B: Ints,
    allocate: Allocate,
) -> dict[str, npt.NDArray[Any]]:
    """Build the columns of trained tokens, except their units."""
    before_M = first_M[1:] - members.n_action_M - 1
    predictor_A = expand_ranges(_subtract_origin(before_M, first_M[member_B[:-1]], member_B), members.n_action_M)
    # A slice avoids copies in the usual case that all action tokens carry loss.
    with_loss: slice | npt.NDArray[np.bool_] = slice(None)
    if tokens.mask_A is not None or not members.trained_M.all():
        with_loss = np.repeat(members.trained_M, members.n_action_M)
        with_loss = with_loss if tokens.mask_A is None else with_loss & tokens.mask_A

    def copy(values: npt.NDArray[Any], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        out = allocate(len(values), dtype)
        out[:] = values
        return out

    columns = {
        "predictor_N": copy(predictor_A[with_loss], np.int64),
        "target_N": copy(tokens.action_A[with_loss], np.int64),
    }
    if tokens.logprobs_A is not None:
        columns["behaviour_logprobs_N"] = tokens.logprobs_A[with_loss]
    member_columns = {
        "weight_N": weights.weight_M,
        "step_index_N": members.step_index_M,
        "advantages_N": members.advantage_M,
        "temperature_N": members.temperature_M,
        "staleness_N": members.staleness_M,
    }
    for name, value_M in member_columns.items():
        if value_M is not None:
            columns[name] = copy(np.repeat(value_M, members.loss_tokens_M), value_M.dtype)
    return columns


def _build_unit_columns(
    members: MemberColumns, unit_M: Ints, weights: MemberWeights, member_B: Ints, allocate: Allocate
) -> tuple[dict[str, npt.NDArray[Any]], Ints]:
    """Build the columns of units, which count from 0 in each micro-batch; also return the units per micro-batch."""
    has_loss_M = members.loss_tokens_M > 0
    unit_of_loss = unit_M[has_loss_M]
    units = int(unit_of_loss[-1]) + 1 if len(unit_of_loss) else 0
    unit_B = np.append(unit_of_loss, units)[compute_starts(has_loss_M)[member_B]]
    unit_N = allocate(int(members.loss_tokens_M.sum()), np.int64)
    unit_N[:] = np.repeat(_subtract_origin(unit_M, unit_B[:-1], member_B), members.loss_tokens_M)
    columns = {"unit_N": unit_N, "weight_U": np.full(units, weights.unit_weight, np.float32)}
    if weights.pair_U is not None:
        columns["pair_U"] = _subtract_origin(weights.pair_U, weights.pair_U[unit_B[:-1]], unit_B)
    if weights.sign_U is not None:
        columns["sign_U"] = weights.sign_U
    return columns, np.diff(unit_B)


def _subtract_origin(values: npt.NDArray[Any], origin_B: npt.NDArray[Any], edges: Ints) -> npt.NDArray[Any]:
    """Subtract from each value the origin of its micro-batch; `edges` bound the micro-batches."""
    return np.asarray(values - np.repeat(origin_B, np.diff(edges)))


def make_dummy(
    members: MemberColumns, *, logprobs: bool, units: bool, pairs: bool = False, signs: bool = False
) -> PackedBatch:
    """Build a batch of one sequence with weight 0, for a rank without a micro-batch where other ranks have one.

    It has the columns that `members` has, and the behaviour log-probabilities, units, pairs and signs of the run's
    batches.
    """
    unity, zero, count = np.ones(1, np.float32), np.zeros(1, np.float32), np.ones(1, np.int64)
    single = MemberColumns(
        n_context_M=count,
        n_action_M=count,
        trained_M=np.ones(1, np.bool_),
        loss_tokens_M=count,
        step_index_M=None if members.step_index_M is None else np.zeros(1, np.int32),
        advantage_M=None if members.advantage_M is None else zero,
        temperature_M=None if members.temperature_M is None else unity,
        staleness_M=None if members.staleness_M is None else zero,
        value_target_M=None if members.value_target_M is None else zero,
    )
    token = np.zeros(1, np.int32)
    tokens = TokenArrays(token, token, mask_A=None, logprobs_A=zero if logprobs else None)
    first = np.zeros(1, np.int64)
    weights = MemberWeights(
        weight_M=zero,
        unit_M=first if units else None,
        unit_weight=0.0,
        pair_U=first if pairs else None,
        sign_U=unity if signs else None,
    )
    (batch,) = collate(single, count, tokens, weights, [1])
    return replace(batch, dummy=True)
