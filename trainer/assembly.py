"""From a plan's optimizer step and decoded row groups to one rank's micro-batches.

Axes: `_M` members, `_Q` sequences, `_U` units.
"""

import numpy as np
import numpy.typing as npt
import polars as pl

from trainer.aggregation import Unit, unit_numbers
from trainer.batch import PackedBatch
from trainer.collate import Members, Shares, TokenArrays, collate, cut, dummy
from trainer.losses import Needs, Temperature
from trainer.plan import OptimizerStep, Plan
from trainer.ranges import Ints, ranges
from trainer.windows import Locations, Window


class Assembler:
    """Lays out optimizer steps.

    Args:
        plan: what is trained.
        needs: of the loss: which columns come along.
        locations: where its tokens lie.
        rank: whose micro-batches to lay out.
        world_size: number of ranks.
        pinned: put batches into page-locked memory.
    """

    def __init__(
        self, plan: Plan, needs: Needs, locations: Locations, *, rank: int, world_size: int, pinned: bool
    ) -> None:
        self._plan, self._needs, self._locations = plan, needs, locations
        self._rank, self._world_size, self._pinned = rank, world_size, pinned
        self._columns = _member_columns(plan.members, needs)
        self._opens_Q = np.isin(np.arange(plan.sequences), plan.sequence_starts_E[:-1])

    def batches(self, step: OptimizerStep, window: Window) -> list[PackedBatch]:
        """This rank's micro-batches of an optimizer step."""
        bins = self._plan.micro_batches(step, self._world_size)[self._rank]
        full = [items for items in bins if items]
        batches = self._laid_out(step, full, window) if full else []
        missing = len(bins) - len(full)
        if missing:
            units = self._plan.weighting.unit is not Unit.TOKEN
            batches += [dummy(self._columns, logprobs=self._needs.behaviour_logprobs, units=units)] * missing
        return batches

    def _laid_out(self, step: OptimizerStep, bins: list[list[int]], window: Window) -> list[PackedBatch]:
        starts_Q = self._plan.member_starts_Q
        sequences_Q = np.concatenate([np.array(items) for items in bins])
        first_Q = starts_Q[sequences_Q]
        members_Q = starts_Q[sequences_Q + 1] - first_Q
        chosen_M = ranges(first_Q, members_Q)
        columns = self._columns.take(chosen_M)
        shares = self._shares(step, columns, members_Q, self._opens_Q[sequences_Q])
        batch = collate(columns, members_Q, self._tokens(chosen_M, window), shares)
        return cut(batch, [len(items) for items in bins], pinned=self._pinned)

    def _shares(self, step: OptimizerStep, columns: Members, members_Q: Ints, opens_Q: npt.NDArray[np.bool_]) -> Shares:
        """What each member's tokens weigh: atoms are whole, so every unit is all here or not at all."""
        weighting = self._plan.weighting
        unit_M = unit_numbers(weighting.unit, columns.trained_M, members_Q, opens_Q)
        trained = columns.trained_M
        tokens_U = np.bincount(unit_M[trained], columns.loss_tokens_M[trained]).astype(np.int64)
        weight_U = weighting.weights(tokens_U, tokens=step.loss_tokens, units=step.units)
        # Members before the first trained one have no unit yet; they have no tokens that carry loss either.
        weight_M = np.where(trained, weight_U[np.maximum(unit_M, 0)], 0.0).astype(np.float32)
        if weighting.unit is Unit.TOKEN:
            return Shares(weight_M)
        return Shares(weight_M, unit_M, 1.0 / step.units)

    def _tokens(self, chosen_M: Ints, window: Window) -> TokenArrays:
        """Tokens of members, end to end; neighbours in a row group are one slice."""
        group_M, row_M = self._locations.group_M[chosen_M], self._locations.row_M[chosen_M]
        kept = {number: window.rows(number) for number in np.unique(group_M).tolist()}
        firsts = np.flatnonzero(np.diff(group_M, prepend=-1) | (np.diff(row_M, prepend=-2) != 1))
        lasts = np.append(firsts[1:], len(chosen_M)) - 1
        context, action, masks, logprobs = [], [], [], []
        runs = zip(group_M[firsts].tolist(), row_M[firsts].tolist(), row_M[lasts].tolist(), strict=True)
        for number, low, high in runs:
            group, first = kept[number].group, kept[number].at(low)
            last = first + high - low + 1
            context.append(group.context_T[group.context_starts[first] : group.context_starts[last]])
            span = slice(group.action_starts[first], group.action_starts[last])
            action.append(group.action_A[span])
            if group.mask_A is not None:
                masks.append(group.mask_A[span])
            if group.logprobs_A is not None:
                logprobs.append(group.logprobs_A[span])
        return TokenArrays(
            context_T=np.concatenate(context),
            action_A=np.concatenate(action),
            mask_A=np.concatenate(masks) if masks else None,
            logprobs_A=np.concatenate(logprobs) if logprobs else None,
        )


def _member_columns(members: pl.DataFrame, needs: Needs) -> Members:
    temperatures = members["temperature"].filter(members["trained"])
    scaled = needs.temperature is Temperature.AS_SAMPLED and bool((temperatures != 1).any())
    return Members(
        n_context_M=members["n_context"].to_numpy().astype(np.int64),
        n_action_M=members["n_action"].to_numpy().astype(np.int64),
        trained_M=members["trained"].to_numpy(),
        loss_tokens_M=members["loss_tokens"].to_numpy(),
        step_index_M=members["step_index"].to_numpy(),
        advantage_M=members["advantage"].cast(pl.Float32).to_numpy() if needs.advantages else None,
        temperature_M=members["temperature"].cast(pl.Float32).to_numpy() if scaled else None,
    )
