"""The plan: which episodes each optimizer step consumes, decided before anything is read, from lengths alone.

An optimizer step is a fixed set of whole episodes, or of pairs of episodes or steps. Their order in an epoch is that of
a stable hash of (seed, epoch, id), so it does not depend on file layout, token budget, number of ranks or machine;
packing into micro-batches is mechanical below it. What each token weighs (`trainer.data.stream.aggregation`) is known
from the plan too.

Axes: `_M` members (a token row inside a sequence), `_Q` sequences, `_E` entries: episodes, or the sides of pairs, where
the chosen side is followed by the rejected one.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

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
from trainer.data.stream.batch import Ints, Positions, ranges, starts

_HASHED: dict[str, type[np.generic]] = {
    "episode_id": np.int64,
    "sequence": np.int32,
    "step_index": np.int32,
    "n_context": np.int32,
    "n_action": np.int32,
    "loss_tokens": np.int64,
    "advantage": np.float64,
    "pair": np.int64,
    "sign": np.int8,
    "takes_context": np.bool_,
    "takes_action": np.bool_,
}
"""Columns of members that decide what is trained; the last four are those of losses on preferences. The hash is one of
numbers of these types, whatever types they are held in."""
_ROWS = 1 << 18
"""Rows that are looked at together."""


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """What one update consumes."""

    index: int
    """0, 1, ... over the whole run."""
    epoch: int
    """Pass over the data."""
    episodes_E: Positions
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
        assert members.height < 2**31, "positions are int32"
        self.members = members
        self.source = selection.source
        """Where advantages come from; None without."""
        self.config = config.model_copy(update={"max_length": selection.max_length})
        """What it was made for."""
        self.weighting = config.loss.weighting(self.config.fitted_length)
        """How the loss is averaged."""
        self.paired = "pair" in members.columns
        """Whether an entry of the plan is one side of a pair, and no whole episode; the other side comes next to it."""
        self.trained_M = self._column("trained")
        """Whether each member's action carries loss."""
        self.loss_tokens_M = self._column("loss_tokens")
        """Trained tokens of each member."""
        self.sign_M = self._column("sign").astype(np.float32) if "sign" in members.columns else None
        """+1 where its side is chosen or its episode desirable, -1 where not; None without preferences."""
        opens_entry_M = self._changes(["pair", "sign"] if self.paired else ["episode_id"])
        opens_sequence_M = opens_entry_M | self._changes(["sequence"])
        self.member_starts_Q = _starts(opens_sequence_M)
        """Sequence q has the members [starts[q], starts[q + 1])."""
        self.sequence_starts_E = _starts(opens_entry_M[self.member_starts_Q[:-1]])
        """Episode e has the sequences [starts[e], starts[e + 1])."""
        self.tokens_Q = np.maximum.reduceat(self._column("end"), self.member_starts_Q[:-1]).astype(np.int32)
        """Tokens of each sequence; int32, which their squares are not."""
        # Of a grafted action, which comes last, all before it is another episode's.
        self.episode_ids_E = self._column("episode_id")[self.member_starts_Q[self.sequence_starts_E[1:]] - 1]
        self.source_E = self._sources(selection)
        """Position in the mixture of each episode's source, int32 [E]; None without a mixture."""
        self.steps = [step for epoch in range(config.epochs) for step in self._epoch(epoch)]

    def _column(self, name: str) -> npt.NDArray[Any]:
        """Values of the members. `members[name]` would lay out for good a column that is held as one value."""
        return self.members.select(name).to_series().to_numpy()

    def _changes(self, names: Sequence[str]) -> npt.NDArray[np.bool_]:
        """Whether a member differs in some column from the one before it, bool [M]."""
        changes_M = np.zeros(self.members.height, np.bool_)
        changes_M[0] = True
        for name in names:
            values_M = self._column(name)
            changes_M[1:] |= values_M[1:] != values_M[:-1]
        return changes_M

    def _epoch(self, epoch: int) -> Iterator[OptimizerStep]:
        """The optimizer steps of one epoch."""
        order = self._order(epoch)
        sides = 2 if self.paired else 1
        wanted = self.config.minibatches or -(-len(order) // max(1, self.config.episodes_per_step // sides))
        count = min(wanted, len(order))
        # As `np.array_split` cuts: the first parts have one more where it does not come out even.
        sizes = np.full(count, len(order) // count) + (np.arange(count) < len(order) % count)
        order_E = order if sides == 1 else (sides * order[:, None] + np.arange(sides, dtype=np.int32)).ravel()
        bounds = (sides * starts(sizes)).tolist()
        together = max(1, _ROWS // bounds[1])
        for first in range(0, count, together):
            edges = bounds[first : first + together + 1]
            amounts = self._amounts(order_E[edges[0] : edges[-1]], np.array(edges[:-1]) - edges[0])
            for number, (low, high, *sums) in enumerate(zip(edges, edges[1:], *amounts, strict=False), first):
                yield OptimizerStep(epoch * count + number, epoch, order_E[low:high], *sums)

    def _amounts(self, entries_E: Positions, firsts: Ints) -> Iterator[list[int]]:
        """Trained tokens, tokens, their squares, and units of some optimizer steps, given where their entries begin."""
        sequences_Q, sequences_E = self._sequences_of(entries_E)
        members_M, members_Q = self.members_of(sequences_Q)
        first_sequences = starts(sequences_E)[firsts]
        first_members = starts(members_Q)[first_sequences]
        tokens_Q = self.tokens_Q[sequences_Q].astype(np.int64)
        loss_tokens = np.add.reduceat(self.loss_tokens_M[members_M], first_members, dtype=np.int64).tolist()
        yield loss_tokens
        yield np.add.reduceat(tokens_Q, first_sequences).tolist()
        yield np.add.reduceat(tokens_Q**2, first_sequences).tolist()
        if self.weighting.unit is Unit.TOKEN:
            yield loss_tokens
        elif self.weighting.unit is Unit.TURN:
            yield np.add.reduceat(self.trained_M[members_M], first_members, dtype=np.int64).tolist()
        elif self.weighting.unit is Unit.SEQUENCE:
            yield np.add.reduceat(sequences_E, firsts, dtype=np.int64).tolist()
        else:
            yield np.diff(firsts, append=len(entries_E)).tolist()

    def _sequences_of(self, entries_E: Positions) -> tuple[Ints, Positions]:
        """Sequences of entries, end to end, and how many each entry has."""
        first_E = self.sequence_starts_E[entries_E]
        sequences_E = self.sequence_starts_E[entries_E + 1] - first_E
        return ranges(first_E, sequences_E), sequences_E

    def members_of(self, sequences_Q: Ints) -> tuple[Ints, Ints]:
        """Members of sequences, end to end, and how many each sequence has."""
        first_Q = self.member_starts_Q[sequences_Q]
        members_Q = self.member_starts_Q[sequences_Q + 1] - first_Q
        return ranges(first_Q, members_Q), members_Q

    def _order(self, epoch: int) -> Positions:
        """Positions of the epoch's episodes in their order; of its pairs, where it has pairs."""
        seed, every = self.config.seed, slice(None, None, 2 if self.paired else 1)
        order_ids = self.episode_ids_E
        if self.paired:
            order_ids = self._column("pair")[self.member_starts_Q[self.sequence_starts_E[:-1:2]]]
        if self.source_E is None:
            order = np.argsort(order_keys(order_ids, seed, epoch), kind="stable")
        else:
            weights = [source.weight for source in self.config.mixture]
            order = draw(order_ids, self.source_E[every], weights, seed, epoch)
        return order.astype(np.int32)

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
        lengths_Q = self.tokens_Q[sequences_Q].astype(np.int64)
        tokens, costs = (np.add.reduceat(values_Q, firsts).tolist() for values_Q in (lengths_Q, lengths_Q**2))
        sequences = sequences_Q.tolist()
        atoms = [sequences[low:high] for low, high in pairwise([*firsts.tolist(), len(sequences)])]
        ranks = spread(tokens, costs, self.config.token_budget, world_size)
        return [[[q for item in items for q in atoms[item]] for items in bins] for bins in ranks]

    def _atoms(self, step: OptimizerStep) -> tuple[Ints, Ints]:
        """The optimizer step's sequence numbers, and where among them each group begins that must stay together."""
        sequences_Q, counts_E = self._sequences_of(step.episodes_E)
        if self.weighting.atom is Atom.SEQUENCE:
            return sequences_Q, np.arange(len(sequences_Q))
        return sequences_Q, (np.cumsum(counts_E) - counts_E)[:: 2 if self.paired else 1]

    def consumed(self, step: OptimizerStep) -> pl.DataFrame:
        """What an optimizer step consumes: a row for each entry, with its first and last trained step."""
        first_E = self.member_starts_Q[self.sequence_starts_E[step.episodes_E]]
        members_E = self.member_starts_Q[self.sequence_starts_E[step.episodes_E + 1]] - first_E
        members_M = ranges(first_E, members_E)
        trained_M = self.trained_M[members_M]
        step_M = self.members[members_M[trained_M], "step_index"].to_numpy()
        loss_tokens_M = self.loss_tokens_M[members_M[trained_M]]
        # Each entry has a trained step.
        firsts = starts(np.add.reduceat(trained_M, starts(members_E)[:-1], dtype=np.int64))[:-1]
        return pl.DataFrame(
            {
                "episode_id": self.episode_ids_E[step.episodes_E],
                "first_step": np.minimum.reduceat(step_M, firsts),
                "last_step": np.maximum.reduceat(step_M, firsts),
                "action_tokens": np.add.reduceat(loss_tokens_M, firsts, dtype=np.int64),
            }
        ).with_columns(optimizer_step=pl.lit(step.index, pl.Int64), epoch=pl.lit(step.epoch, pl.Int32))

    @cached_property
    def plan_hash(self) -> int:
        """Hash of the order, the sequences, their lengths, what is trained, and the advantages.

        Independent of files and rows, so compaction leaves it as it is.
        """
        digest = hashlib.blake2b(digest_size=8)
        for name, dtype in _HASHED.items():
            if name in self.members.columns:
                for part in self.members.select(name).iter_slices(_ROWS):
                    values = part.to_series()
                    filled = values.fill_null(float("nan")) if name == "advantage" else values
                    digest.update(np.ascontiguousarray(filled.to_numpy(), dtype).data)
        for step in self.steps:
            digest.update(self.episode_ids_E[step.episodes_E].tobytes())
            digest.update(step.epoch.to_bytes(8, "little"))
        return int.from_bytes(digest.digest(), "little") & ids.MASK

    @property
    def episodes(self) -> int:
        """Episodes with something to train on."""
        return len(np.unique(self.episode_ids_E)) if self.paired else len(self.episode_ids_E)

    @property
    def sequences(self) -> int:
        """Training sequences of an epoch."""
        return len(self.member_starts_Q) - 1

    @property
    def tokens(self) -> int:
        """Tokens of an epoch."""
        return int(self.tokens_Q.sum())

    @property
    def loss_tokens(self) -> int:
        """Trained tokens of an epoch."""
        return int(self.loss_tokens_M.sum())


def _starts(opens: npt.NDArray[np.bool_]) -> Positions:
    """Where parts begin, each of which is opened by the rows in question, and where the last one ends."""
    return np.append(np.flatnonzero(opens).astype(np.int32), np.int32(len(opens)))
