"""Log-probabilities and entropies of a policy at stored actions, read through the plan and the stream of training.

Every token of a scored action gets both, sampled or not; the table's action mask says which were. The distribution is
that of the stored sampling temperature, and of temperature 1 where none is known or it was 0.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import polars as pl
import torch  # noqa: TID253 - loaded by commands only when they score

from lake.read.snapshot import Snapshot
from trainer.config import TrainConfig
from trainer.data.plan.plan import OptimizerStep, Plan
from trainer.data.select.selection import Selection
from trainer.data.stream.batch import PackedBatch
from trainer.data.stream.stream import Stream
from trainer.evaluation.ratios import KEYS
from trainer.losses import Needs, Temperature
from trainer.policy.model import check_vocabulary

if TYPE_CHECKING:
    from trainer.policy.model import Policy

CHUNKS = 64
CHUNK_TOKENS = 32_768, 1_000_000
"""Tokens that are planned and read together, neighbours in the files whatever the plan's order: a part of all of them,
and how few and how many at most. They do not depend on where the chunks are scored: what is batched together may show
in the last bits."""
_NEEDS = Needs(temperature=Temperature.AS_SAMPLED)


def pending(selection: Selection, done: pl.DataFrame) -> Selection:
    """A selection whose trained steps are those to score: all tokens of their actions, without what is `done`.

    It is cut after the last step to score of each sequence, and has no members if all is done.
    """
    marks = done.select(KEYS).unique().with_columns(done=pl.lit(value=True))
    members = selection.members.join(marks, on=KEYS, how="left", maintain_order="left")
    wanted = pl.col("trained") & pl.col("done").is_null()
    members = members.with_columns(
        trained=wanted,
        n_trained=pl.col("n_action"),
        loss_tokens=pl.when(wanted).then(pl.col("n_action")).otherwise(0).cast(pl.Int32),
        temperature=pl.when(pl.col("temperature") > 0).then(pl.col("temperature")).otherwise(1.0),
    ).drop("done")
    last = pl.col("step_index").filter(pl.col("trained")).max().over("episode_id", "sequence")
    return replace(selection, members=members.filter(pl.col("step_index") <= last))


def chunks(selection: Selection) -> Iterator[Selection]:
    """Parts of a selection: whole episodes that lie together in the files, up to a number of tokens."""
    sizes = selection.members.group_by("episode_id").agg(
        file=pl.col("file").min(),
        row=pl.col("row").min(),
        tokens=pl.sum_horizontal(pl.col("n_context", "n_action").cast(pl.Int64)).sum(),
    )
    least, most = CHUNK_TOKENS
    tokens = min(most, max(least, int(sizes["tokens"].sum()) // CHUNKS))
    sizes = sizes.sort("file", "row", "episode_id").with_columns(
        chunk=((pl.col("tokens").cum_sum() - pl.col("tokens")) // tokens).cast(pl.Int64)
    )
    for part in sizes.partition_by("chunk", maintain_order=True):
        mine = pl.col("episode_id").is_in(part["episode_id"].implode())
        yield replace(selection, members=selection.members.filter(mine))


def score(policy: "Policy", snapshot: Snapshot, selection: Selection, config: TrainConfig) -> Iterator[pl.DataFrame]:
    """Score the trained steps of a selection.

    Each plan step gives a frame: `KEYS`, n_action, temperature, logprobs and entropies (lists of float32, one per token
    of the action). A ContractError where a token id is outside the policy's vocabulary.
    """
    plan = Plan(selection, config)
    with Stream(snapshot, plan, _NEEDS, config) as stream, torch.no_grad():
        for step, batches in stream.steps():
            for batch in batches:
                check_vocabulary(batch, policy.vocabulary)
            yield _rows(plan, step, pl.concat(_of_batch(policy, batch) for batch in batches))


def _of_batch(policy: "Policy", batch: PackedBatch) -> pl.DataFrame:
    """Logprobs and entropies of a micro-batch's target tokens, in its order."""
    logprobs_N, entropies_N = policy.logprobs(batch.to(policy.device), entropy=True)
    assert entropies_N is not None
    # Rounding takes the entropy of a sure token a hair below 0.
    found_N = {"logprobs": logprobs_N, "entropies": entropies_N.clamp(min=0)}
    return pl.DataFrame({name: values_N.float().cpu().numpy() for name, values_N in found_N.items()})


def _rows(plan: Plan, step: OptimizerStep, found_N: pl.DataFrame) -> pl.DataFrame:
    """What was found of a plan step's tokens by row of `tokens`: they come in the order of its micro-batches."""
    (bins,) = plan.micro_batches(step)
    starts_Q = plan.member_starts_Q
    members_M = np.concatenate([np.arange(starts_Q[q], starts_Q[q + 1]) for part in bins for q in part])
    members = plan.members[members_M].filter(pl.col("trained")).select(*KEYS, "n_action", "temperature")
    ends = members["n_action"].cast(pl.Int64).cum_sum()
    numbered = np.searchsorted(ends.to_numpy(), np.arange(found_N.height), side="right")
    lists = found_N.with_columns(row=pl.Series(numbered)).group_by("row", maintain_order=True).all()
    return members.with_columns(lists["logprobs"], lists["entropies"])
