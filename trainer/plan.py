"""The plan: which episodes each optimizer step consumes, decided before anything is read, from lengths alone.

An optimizer step is a fixed set of whole episodes. Their order in an epoch is that of a stable hash of (seed, epoch,
episode_id), so it does not depend on file layout, token budget or machine; packing into micro-batches is mechanical
below it. The denominator of a step's loss is its number of trained tokens, known from the plan.

Axes: `_M` members (a token row inside a sequence), `_Q` sequences, `_E` episodes.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import polars as pl

from lake import ids
from lake.errors import DataRefusedError
from trainer.config import TrainConfig
from trainer.packing import pack
from trainer.selection import Selection

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """What one update consumes."""

    index: int
    """0, 1, ... over the whole run."""
    epoch: int
    """Pass over the data."""
    episodes_E: Ints
    """Positions in `Plan.episode_ids_E`."""
    loss_tokens: int
    """Denominator of the loss."""
    tokens: int
    """Tokens of all its sequences."""


class Plan:
    """Every optimizer step of a run.

    Args:
        selection: what is trained on.
        config: epochs, order, step size, token budget.

    Raises:
        DataRefusedError: nothing is left to train on.
    """

    def __init__(self, selection: Selection, config: TrainConfig) -> None:
        members = selection.members
        if members.is_empty():
            reasons = ", ".join(f"{row['reason']} {row['steps']}" for row in selection.drops.iter_rows(named=True))
            msg = (
                f"nothing is left to train on: {selection.episodes} episodes selected, steps dropped: {reasons}. "
                f"Widen --where, or see what each reason means in docs/guides/training.md"
            )
            raise DataRefusedError(msg)
        self.members = members
        self._config = config
        sequences = members.group_by("episode_id", "sequence", maintain_order=True).agg(
            members=pl.len(), tokens=pl.col("end").max(), loss_tokens=pl.col("loss_tokens").sum()
        )
        episodes = sequences.group_by("episode_id", maintain_order=True).agg(
            sequences=pl.len(), tokens=pl.col("tokens").sum(), loss_tokens=pl.col("loss_tokens").sum()
        )
        self.member_starts_Q = _starts(sequences["members"])
        """Sequence q has the members [starts[q], starts[q + 1])."""
        self.sequence_starts_E = _starts(episodes["sequences"])
        """Episode e has the sequences [starts[e], starts[e + 1])."""
        self.tokens_Q = sequences["tokens"].to_numpy().astype(np.int64)
        self.episode_ids_E = episodes["episode_id"].to_numpy().astype(np.int64)
        self._tokens_E = episodes["tokens"].to_numpy().astype(np.int64)
        self._loss_tokens_E = episodes["loss_tokens"].to_numpy().astype(np.int64)
        self.steps = [step for epoch in range(config.epochs) for step in self._epoch(epoch)]

    def _epoch(self, epoch: int) -> Iterator[OptimizerStep]:
        """The optimizer steps of one epoch."""
        order_E = np.argsort(order_keys(self.episode_ids_E, self._config.seed, epoch), kind="stable")
        wanted = self._config.minibatches or -(-len(order_E) // self._config.episodes_per_step)
        count = min(wanted, len(order_E))
        for number, part_E in enumerate(np.array_split(order_E, count)):
            yield OptimizerStep(
                index=epoch * count + number,
                epoch=epoch,
                episodes_E=part_E,
                loss_tokens=int(self._loss_tokens_E[part_E].sum()),
                tokens=int(self._tokens_E[part_E].sum()),
            )

    def micro_batches(self, step: OptimizerStep) -> list[list[int]]:
        """Sequence numbers of each micro-batch of an optimizer step."""
        starts_E = self.sequence_starts_E
        sequences = [q for e in step.episodes_E for q in range(starts_E[e], starts_E[e + 1])]
        bins = pack([int(self.tokens_Q[q]) for q in sequences], self._config.token_budget)
        return [[sequences[item] for item in items] for items in bins]

    def consumed(self, step: OptimizerStep) -> pl.DataFrame:
        """What `batches` records of an optimizer step: one row per episode, with its first and last trained step."""
        return self._trained[step.episodes_E].with_columns(
            optimizer_step=pl.lit(step.index, pl.Int64), epoch=pl.lit(step.epoch, pl.Int32)
        )

    @cached_property
    def _trained(self) -> pl.DataFrame:
        """One row per plan episode, in the plan's order: each has at least one trained step."""
        trained = self.members.filter(pl.col("trained"))
        return trained.group_by("episode_id", maintain_order=True).agg(
            first_step=pl.col("step_index").min(),
            last_step=pl.col("step_index").max(),
            action_tokens=pl.col("loss_tokens").sum(),
        )

    @cached_property
    def plan_hash(self) -> int:
        """Hash of the order, the sequences, their lengths, what is trained, and the advantages.

        Independent of files and rows, so compaction leaves it as it is.
        """
        columns = ("episode_id", "sequence", "step_index", "n_context", "n_action", "loss_tokens", "advantage")
        digest = hashlib.blake2b(digest_size=8)
        for name in columns:
            values = self.members[name].fill_null(float("nan")) if name == "advantage" else self.members[name]
            digest.update(np.ascontiguousarray(values.to_numpy()).tobytes())
        for step in self.steps:
            digest.update(self.episode_ids_E[step.episodes_E].tobytes())
            digest.update(step.epoch.to_bytes(8, "little"))
        return int.from_bytes(digest.digest(), "little") & ids.MASK

    @property
    def episodes(self) -> int:
        """Episodes with something to train on."""
        return len(self.episode_ids_E)

    @property
    def sequences(self) -> int:
        """Training sequences of an epoch."""
        return len(self.tokens_Q)

    @property
    def tokens(self) -> int:
        """Tokens of an epoch."""
        return int(self.tokens_Q.sum())

    @property
    def loss_tokens(self) -> int:
        """Trained tokens of an epoch."""
        return int(self._loss_tokens_E.sum())


def order_keys(episode_ids_E: Ints, seed: int, epoch: int) -> npt.NDArray[np.uint64]:
    """Sort keys of the episodes in one epoch: SplitMix64 (Steele et al. 2014) of (seed, epoch, episode_id).

    Args:
        episode_ids_E: int64 [E].
        seed: of the run.
        epoch: 0, 1, ...

    Returns:
        uint64 [E]; equal ids have equal keys on every machine.
    """
    with np.errstate(over="ignore"):
        salt = _splitmix(_splitmix(np.array([seed], np.uint64)) + np.uint64(epoch))
        return _splitmix(episode_ids_E.astype(np.uint64) ^ salt)


def _splitmix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _starts(counts: pl.Series) -> Ints:
    """Running starts of consecutive ranges: [0, c0, c0 + c1, ...]."""
    return np.concatenate([[0], np.cumsum(counts.to_numpy())]).astype(np.int64)
