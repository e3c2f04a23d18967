"""The plan: which episodes each optimizer step consumes, decided before anything is read, from lengths alone.

An optimizer step is a fixed set of whole episodes, or of pairs of episodes or steps. Their order in an epoch is that of
a stable hash of (seed, epoch, id), so it does not depend on file layout, token budget, number of ranks or machine;
packing into micro-batches is mechanical below it. What each token weighs (`trainer.data.stream.aggregation`) is known
from the plan too.

Axes: `_M` members (a token row inside a sequence), `_Q` sequences, `_E` entries: episodes, or the sides of pairs, where
the chosen side is followed by the rejected one.
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
from lake.read.text_table import counted
from trainer.config import TrainConfig
from trainer.data.plan.packing import spread
from trainer.data.select.mixture import draw, order_keys
from trainer.data.select.refusals import Drop
from trainer.data.select.selection import Selection
from trainer.data.stream.aggregation import Atom, Unit
from trainer.data.stream.batch import Ints, ranges, starts

_PREFERENCES = ("pair", "sign", "takes_context", "takes_action")
"""Columns of members of losses on preferences (`trainer.data.select.preferences`)."""


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """What one update consumes."""

    index: int
    """0, 1, ... over the whole run."""
    epoch: int
    """Pass over the data."""
    episodes_E: Ints
    """Positions in `Plan.episode_ids_E`; of pairs both sides, one after the other."""
    loss_tokens: int
    """Trained tokens."""
    tokens: int
    """Tokens of all its sequences."""
    squared_lengths: int
    """Sum over its sequences of the squared number of tokens: what attention costs."""
    units: int
    """Units that the loss is averaged over; the trained tokens where that is the token."""


class Plan:
    """Every optimizer step of a run; a DataRefusedError where nothing is left to train on."""

    def __init__(self, selection: Selection, config: TrainConfig) -> None:
        members = selection.members
        if members.is_empty():
            reasons = ", ".join(f"{row['reason']} {row['steps']}" for row in selection.drops.iter_rows(named=True))
            most = selection.drops.sort("steps", descending=True, maintain_order=True)["reason"].head(1).to_list()
            advice = "Widen --where"
            if most == [Drop.OVER_LENGTH] and selection.too_long is not None:
                advice = f"Raise --max-length, now {selection.max_length}: {selection.too_long.every} leaves out none"
            raise DataRefusedError(
                f"nothing is left to train on: {counted(selection.episodes, 'episode')} selected, "
                f"steps dropped: {reasons}. "
                f"{advice}, or see what each reason means in docs/guides/training.md"
            )
        self.members = members
        self.config = config.model_copy(update={"max_length": selection.max_length})
        """What it was made for."""
        self.weighting = config.loss.weighting(self.config.fitted_length)
        """How the loss is averaged."""
        self.paired = "pair" in members.columns
        """Whether an entry of the plan is one side of a pair, and no whole episode; the other side comes next to it."""
        self._keys = ["pair", "sign"] if self.paired else ["episode_id"]
        sequences = members.group_by(*self._keys, "sequence", maintain_order=True).agg(
            members=pl.len(),
            # Of a grafted action, which comes last, where all before it is another episode's.
            owner=pl.col("episode_id").last(),
            tokens=pl.col("end").max(),
            loss_tokens=pl.col("loss_tokens").sum(),
            turns=pl.col("trained").sum(),
        )
        episodes = sequences.group_by(self._keys, maintain_order=True).agg(
            pl.col("tokens", "loss_tokens", "turns").sum(),
            pl.col("owner").last(),
            squared=(pl.col("tokens") ** 2).sum(),
            sequences=pl.len(),
        )
        self.member_starts_Q = starts(sequences["members"])
        """Sequence q has the members [starts[q], starts[q + 1])."""
        self.sequence_starts_E = starts(episodes["sequences"])
        """Episode e has the sequences [starts[e], starts[e + 1])."""
        self.trained_M = members["trained"].to_numpy()
        """Whether each member's action carries loss."""
        self.loss_tokens_M = members["loss_tokens"].to_numpy()
        """Trained tokens of each member."""
        self.sign_M = members["sign"].to_numpy().astype(np.float32) if "sign" in members.columns else None
        """+1 where its side is chosen or its episode desirable, -1 where not; None without preferences."""
        self.tokens_Q = sequences["tokens"].to_numpy().astype(np.int64)
        self.episode_ids_E = episodes["owner"].to_numpy().astype(np.int64)
        self._order_ids_E = episodes[self._keys[0]].to_numpy().astype(np.int64)
        self._tokens_E = episodes["tokens"].to_numpy().astype(np.int64)
        self._squared_E = episodes["squared"].to_numpy().astype(np.int64)
        self._loss_tokens_E = episodes["loss_tokens"].to_numpy().astype(np.int64)
        units = {Unit.TOKEN: "loss_tokens", Unit.TURN: "turns", Unit.SEQUENCE: "sequences"}.get(self.weighting.unit)
        self._units_E = np.ones(episodes.height, np.int64) if units is None else episodes[units].to_numpy()
        self.source_E = self._sources(selection)
        """Position in the mixture of each episode's source, int32 [E]; None without a mixture."""
        self.steps = [step for epoch in range(config.epochs) for step in self._epoch(epoch)]

    def _epoch(self, epoch: int) -> Iterator[OptimizerStep]:
        """The optimizer steps of one epoch."""
        order = self._order(epoch)
        sides = 2 if self.paired else 1
        wanted = self.config.minibatches or -(-len(order) // max(1, self.config.episodes_per_step // sides))
        count = min(wanted, len(order))
        # As `np.array_split` cuts: the first parts have one more where it does not come out even.
        sizes = np.full(count, len(order) // count) + (np.arange(count) < len(order) % count)
        order_E = (sides * order[:, None] + np.arange(sides)).ravel()
        bounds = sides * starts(sizes)
        columns = (self._loss_tokens_E, self._tokens_E, self._squared_E, self._units_E)
        sums = [np.add.reduceat(values_E[order_E], bounds[:-1]).tolist() for values_E in columns]
        for number, (low, high) in enumerate(pairwise(bounds.tolist())):
            loss_tokens, tokens, squared, units = (values[number] for values in sums)
            yield OptimizerStep(epoch * count + number, epoch, order_E[low:high], loss_tokens, tokens, squared, units)

    def members_of(self, sequences_Q: Ints) -> tuple[Ints, Ints]:
        """Members of sequences, end to end, and how many each sequence has."""
        first_Q = self.member_starts_Q[sequences_Q]
        members_Q = self.member_starts_Q[sequences_Q + 1] - first_Q
        return ranges(first_Q, members_Q), members_Q

    def _order(self, epoch: int) -> Ints:
        """Positions of the epoch's episodes in their order; of its pairs, where it has pairs."""
        seed, every = self.config.seed, slice(None, None, 2 if self.paired else 1)
        ids = self._order_ids_E[every]
        if self.source_E is None:
            return np.argsort(order_keys(ids, seed, epoch), kind="stable")
        return draw(ids, self.source_E[every], [source.weight for source in self.config.mixture], seed, epoch)

    def _sources(self, selection: Selection) -> npt.NDArray[np.int32] | None:
        """The mixture's source of each episode; a DataRefusedError where a source has nothing to train on."""
        if selection.sources is None:
            return None
        ids_E = pl.DataFrame({"episode_id": self.episode_ids_E})
        source_E = ids_E.join(selection.sources, on="episode_id", how="left", maintain_order="left")["source"]
        for number, source in enumerate(self.config.mixture):
            if number not in source_E:
                msg = f"mixture source {number} ({source.describe()}) has nothing left to train on; --plan says why"
                raise DataRefusedError(msg)
        return source_E.to_numpy()

    def micro_batches(self, step: OptimizerStep, world_size: int = 1) -> list[list[list[int]]]:
        """Sequence numbers of each micro-batch of an optimizer step, by rank, the costliest first.

        Cost is the sum of squared sequence lengths. Atoms stay whole and in order. Every rank has the same number of
        micro-batches; the last ones may be empty.
        """
        sequences_Q, firsts = self._atoms(step)
        lengths_Q = self.tokens_Q[sequences_Q]
        tokens, costs = (np.add.reduceat(values_Q, firsts).tolist() for values_Q in (lengths_Q, lengths_Q**2))
        sequences = sequences_Q.tolist()
        atoms = [sequences[low:high] for low, high in pairwise([*firsts.tolist(), len(sequences)])]
        ranks = spread(tokens, costs, self.config.token_budget, world_size)
        return [[[q for item in items for q in atoms[item]] for items in bins] for bins in ranks]

    def _atoms(self, step: OptimizerStep) -> tuple[Ints, Ints]:
        """The optimizer step's sequence numbers, and where among them each group begins that must stay together."""
        first_E = self.sequence_starts_E[step.episodes_E]
        counts_E = self.sequence_starts_E[step.episodes_E + 1] - first_E
        sequences_Q = ranges(first_E, counts_E)
        if self.weighting.atom is Atom.SEQUENCE:
            return sequences_Q, np.arange(len(sequences_Q))
        return sequences_Q, (np.cumsum(counts_E) - counts_E)[:: 2 if self.paired else 1]

    def consumed(self, step: OptimizerStep) -> pl.DataFrame:
        """What an optimizer step consumes: a row for each entry, with its first and last trained step."""
        return self._trained[step.episodes_E].with_columns(
            optimizer_step=pl.lit(step.index, pl.Int64), epoch=pl.lit(step.epoch, pl.Int32)
        )

    @cached_property
    def _trained(self) -> pl.DataFrame:
        """One row per entry, in the plan's order: each has at least one trained step."""
        trained = self.members.filter(pl.col("trained"))
        rows = trained.group_by(self._keys, maintain_order=True).agg(
            owner=pl.col("episode_id").first(),
            first_step=pl.col("step_index").min(),
            last_step=pl.col("step_index").max(),
            action_tokens=pl.col("loss_tokens").sum(),
        )
        return rows.select(pl.col("owner").alias("episode_id"), "first_step", "last_step", "action_tokens")

    @cached_property
    def plan_hash(self) -> int:
        """Hash of the order, the sequences, their lengths, what is trained, and the advantages.

        Independent of files and rows, so compaction leaves it as it is.
        """
        columns = ["episode_id", "sequence", "step_index", "n_context", "n_action", "loss_tokens", "advantage"]
        columns += [name for name in _PREFERENCES if name in self.members.columns]
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
        return len(np.unique(self.episode_ids_E))

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
