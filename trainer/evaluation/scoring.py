"""Compute a policy's log-probabilities and entropies of stored actions, and a value head's values of stored states.

Both take the plan and the stream of training.

Every token of a scored action gets both, sampled or not; the table's action mask marks the sampled ones. The
distribution is that of the stored sampling temperature, or of temperature 1 if that is unknown or 0.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import polars as pl
import torch  # noqa: TID253 - a script that does nothing without it

from lake.read.snapshot import Snapshot
from trainer.config import TrainConfig
from trainer.data.batch import PackedBatch
from trainer.data.plan import OptimizerStep, Plan, pack
from trainer.data.selection import VALUE_TARGET, TrainingSelection
from trainer.data.stream import Stream
from trainer.evaluation.ratios import KEYS
from trainer.losses import Needs, Temperature
from trainer.policy.model import check_vocabulary, pack_sequences

if TYPE_CHECKING:
    from trainer.policy.model import PackedPolicy

CHUNKS = 64
CHUNK_TOKENS = 32_768, 1_000_000
"""Size of a chunk, whose tokens are planned and read together: 1 / `CHUNKS` of all tokens, within these bounds. A chunk
holds neighbours in the files, in any order of the plan. It is the same on every executor, because the composition of a
batch can change the last bits of a log-probability."""
_NEEDS = Needs(temperature=Temperature.AS_SAMPLED)


def select_pending(selection: TrainingSelection, done: pl.DataFrame) -> TrainingSelection:
    """Mark all action tokens of the steps that are not `done` as trained, and unmark the others.

    Each sequence ends with its last marked step. The selection has no members if all steps are done.
    """
    marks = done.select(KEYS).unique().with_columns(done=pl.lit(value=True))
    members = selection.members.join(marks, on=KEYS, how="left", maintain_order="left")
    is_pending = pl.col("trained") & pl.col("done").is_null()
    members = members.with_columns(
        trained=is_pending,
        n_trained=pl.col("n_action"),
        loss_tokens=pl.when(is_pending).then(pl.col("n_action")).otherwise(0).cast(pl.Int32),
        temperature=pl.when(pl.col("temperature") > 0).then(pl.col("temperature")).otherwise(1.0),
    ).drop("done")
    last = pl.col("step_index").filter(pl.col("trained")).max().over("episode_id", "sequence")
    return replace(selection, members=members.filter(pl.col("step_index") <= last))


def split_chunks(selection: TrainingSelection) -> Iterator[TrainingSelection]:
    """Split a selection into chunks of complete episodes that are neighbours in the files, by number of tokens."""
    sizes = selection.members.group_by("episode_id").agg(
        file=pl.col("file").min(),
        row=pl.col("row").min(),
        tokens=pl.sum_horizontal(pl.col("n_context", "n_action").cast(pl.Int64)).sum(),
    )
    min_tokens, max_tokens = CHUNK_TOKENS
    tokens = min(max_tokens, max(min_tokens, int(sizes["tokens"].sum()) // CHUNKS))
    sizes = sizes.sort("file", "row", "episode_id").with_columns(
        chunk=((pl.col("tokens").cum_sum() - pl.col("tokens")) // tokens).cast(pl.Int64)
    )
    for part in sizes.partition_by("chunk", maintain_order=True):
        in_chunk = pl.col("episode_id").is_in(part["episode_id"].implode())
        yield replace(selection, members=selection.members.filter(in_chunk))


def score_actions(
    policy: "PackedPolicy", snapshot: Snapshot, selection: TrainingSelection, config: TrainConfig
) -> Iterator[pl.DataFrame]:
    """Score the trained steps of a selection.

    Yields a frame per plan step: `KEYS`, n_action, temperature, logprobs and entropies (lists of float32, one per token
    of the action).

    Raises:
        ContractError: a token id is outside the policy's vocabulary.
    """
    plan = Plan(selection, config)
    with Stream(snapshot, plan, _NEEDS, config) as stream, torch.no_grad():
        for step, batches in stream.steps():
            frames = []
            for batch in batches:
                check_vocabulary(batch, policy.vocabulary)
                logprobs_N, entropies_N = policy.logprobs(batch.to(policy.device), entropy=True)
                assert entropies_N is not None
                # Rounding can make the entropy of a certain token slightly negative.
                columns_N = {"logprobs": logprobs_N, "entropies": entropies_N.clamp(min=0)}
                frames.append(
                    pl.DataFrame({name: tokens_N.float().cpu().numpy() for name, tokens_N in columns_N.items()})
                )
            yield collect_action_rows(plan, step, pl.concat(frames))


def collect_action_rows(plan: Plan, step: OptimizerStep, tokens_N: pl.DataFrame) -> pl.DataFrame:
    """Group the scored tokens of a plan step by action; they are in the order of its micro-batches."""
    members = list_trained_members(plan, step).select(*KEYS, "n_action", "temperature")
    ends = members["n_action"].cast(pl.Int64).cum_sum()
    numbered = np.searchsorted(ends.to_numpy(), np.arange(tokens_N.height), side="right")
    lists = tokens_N.with_columns(row=pl.Series(numbered)).group_by("row", maintain_order=True).all()
    return members.with_columns(lists["logprobs"], lists["entropies"])


def list_trained_members(plan: Plan, step: OptimizerStep) -> pl.DataFrame:
    """List the trained members of a plan step in the order of its micro-batches."""
    (bins,) = plan.pack_micro_batches(step)
    starts_Q = plan.member_starts_Q
    members_M = np.concatenate([np.arange(starts_Q[q], starts_Q[q + 1]) for part in bins for q in part])
    return plan.members[members_M].filter(pl.col("trained"))


def score_states(
    policy: "PackedPolicy", snapshot: Snapshot, selection: TrainingSelection, config: TrainConfig
) -> pl.DataFrame:
    """Score the states before the trained steps of a selection by the value head: episode_id, step_index, value.

    Raises:
        ContractError: a token id is outside the policy's vocabulary.
    """
    members = selection.members.with_columns(pl.lit(None, pl.Float64).alias(VALUE_TARGET))
    plan = Plan(replace(selection, members=members), config)
    frames = []
    with Stream(snapshot, plan, Needs(), config) as stream:
        for step, batches in stream.steps():
            for batch in batches:
                check_vocabulary(batch, policy.vocabulary)
            values = np.concatenate([_read_values(policy, batch) for batch in batches])
            rows = list_trained_members(plan, step).select("episode_id", "step_index")
            frames.append(rows.with_columns(value=pl.Series(values, dtype=pl.Float64)))
    return pl.concat(frames)


def score_prompts(policy: "PackedPolicy", prompts: list[list[int]], budget: int) -> list[float]:
    """Score the states after some prompts of at least two token ids by the value head, in passes of `budget` tokens."""
    value_of: dict[int, float] = {}
    for numbers in pack([len(prompt) for prompt in prompts], budget):
        batch = pack_sequences([prompts[number] for number in numbers])
        batch = replace(batch, state_S=torch.tensor(batch.boundaries[1:]) - 1)
        value_of |= dict(zip(numbers, _read_values(policy, batch).tolist(), strict=True))
    return [value_of[number] for number in range(len(prompts))]


def _read_values(policy: "PackedPolicy", batch: PackedBatch) -> npt.NDArray[np.float32]:
    """Return the values of a batch's states; the head scores one token, which it needs."""
    single = replace(batch, predictor_N=batch.predictor_N[:1], target_N=batch.target_N[:1], temperature_N=None)
    with torch.no_grad():
        value_S = policy.score(single.to(policy.device))[2]
    assert value_S is not None
    return value_S.cpu().numpy()
