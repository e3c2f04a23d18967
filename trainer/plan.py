"""The plan: which episodes each optimizer step consumes, decided before anything is read, from lengths alone.

An optimizer step is a fixed set of whole episodes. Their order in an epoch is that of a stable hash of (seed, epoch,
episode_id), so it does not depend on file layout, token budget, number of ranks or machine; packing into micro-batches
is mechanical below it. What each token weighs (`trainer.aggregation`) is known from the plan too.

Axes: `_M` members (a token row inside a sequence), `_Q` sequences, `_E` episodes.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import polars as pl

from lake import ids
from lake.errors import DataRefusedError
from trainer.aggregation import Atom, Unit, weighting
from trainer.config import TrainConfig
from trainer.losses import LOSSES
from trainer.packing import pack, spread
from trainer.ranges import Ints, ranges, starts
from trainer.selection import Selection


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
    """Trained tokens."""
    tokens: int
    """Tokens of all its sequences."""
    squared_lengths: int
    """Sum over its sequences of the squared number of tokens: what attention costs."""
    units: int
    """Units that the loss is averaged over (`trainer.aggregation.Unit`); the trained tokens where that is the token."""


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
        self.weighting = weighting(config, LOSSES[config.loss].needs)
        """How the loss is averaged."""
        sequences = members.group_by("episode_id", "sequence", maintain_order=True).agg(
            members=pl.len(),
            tokens=pl.col("end").max(),
            loss_tokens=pl.col("loss_tokens").sum(),
            turns=pl.col("trained").sum(),
        )
        episodes = sequences.group_by("episode_id", maintain_order=True).agg(
            pl.col("tokens", "loss_tokens", "turns").sum(), squared=(pl.col("tokens") ** 2).sum(), sequences=pl.len()
        )
        self.member_starts_Q = starts(sequences["members"])
        """Sequence q has the members [starts[q], starts[q + 1])."""
        self.sequence_starts_E = starts(episodes["sequences"])
        """Episode e has the sequences [starts[e], starts[e + 1])."""
        self.tokens_Q = sequences["tokens"].to_numpy().astype(np.int64)
        self.episode_ids_E = episodes["episode_id"].to_numpy().astype(np.int64)
        self._tokens_E = episodes["tokens"].to_numpy().astype(np.int64)
        self._squared_E = episodes["squared"].to_numpy().astype(np.int64)
        self._loss_tokens_E = episodes["loss_tokens"].to_numpy().astype(np.int64)
        units = {Unit.TOKEN: "loss_tokens", Unit.TURN: "turns", Unit.SEQUENCE: "sequences"}.get(self.weighting.unit)
        self._units_E = np.ones(episodes.height, np.int64) if units is None else episodes[units].to_numpy()
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
                squared_lengths=int(self._squared_E[part_E].sum()),
                units=int(self._units_E[part_E].sum()),
            )

    def micro_batches(self, step: OptimizerStep, world_size: int = 1) -> list[list[list[int]]]:
        """Sequence numbers of each micro-batch of an optimizer step, by rank.

        Atoms stay whole and in order. Every rank has the same number of micro-batches; the last ones may be empty.

        Args:
            step: the optimizer step.
            world_size: number of ranks.

        Returns:
            For each rank its micro-batches, the costliest first (cost: the sum of squared sequence lengths).
        """
        sequences_Q, firsts = self._atoms(step)
        lengths_Q = self.tokens_Q[sequences_Q]
        tokens, costs = (np.add.reduceat(values_Q, firsts).tolist() for values_Q in (lengths_Q, lengths_Q**2))
        sequences = sequences_Q.tolist()
        atoms = [sequences[low:high] for low, high in pairwise([*firsts.tolist(), len(sequences)])]
        ranks = spread(pack(tokens, self._config.token_budget), costs, world_size)
        return [[[q for item in items for q in atoms[item]] for items in bins] for bins in ranks]

    def _atoms(self, step: OptimizerStep) -> tuple[Ints, Ints]:
        """The optimizer step's sequence numbers, and where among them each group begins that must stay together."""
        first_E = self.sequence_starts_E[step.episodes_E]
        counts_E = self.sequence_starts_E[step.episodes_E + 1] - first_E
        sequences_Q = ranges(first_E, counts_E)
        if self.weighting.atom is Atom.SEQUENCE:
            return sequences_Q, np.arange(len(sequences_Q))
        return sequences_Q, np.cumsum(counts_E) - counts_E

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
