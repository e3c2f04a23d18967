"""The plan assigns episodes to optimizer steps before anything is read, from lengths alone.

An optimizer step is a fixed set of whole episodes, or of pairs of episodes or steps. A stable hash of (seed, epoch, id)
orders them within an epoch. The order therefore does not depend on file layout, token budget, number of ranks or
machine. Packing into micro-batches happens below it and is mechanical. The plan also determines the weight of each
token (`trainer.losses.base`).

Packing is best fit decreasing. The longest atom comes first; each atom goes into the fullest micro-batch that still has
room for it. An atom longer than the budget gets a separate micro-batch. Best fit decreasing needs at most 11/9 of the
optimal number plus a constant (Johnson 1974); TRL packs the same way. Ranks get equally many micro-batches, because
each one is a round of collectives. The rounds have about equal cost, because the slowest rank decides how long a round
takes.

An epoch of a weighted mixture is as long as one pass over all episodes. A source of weight w gets w / sum of weights of
its episodes, within one. If the source has more than that, each epoch draws a different subset. If it has fewer, it is
repeated completely and the remainder is drawn. Only hashes of (seed, epoch, episode_id) decide what is drawn.

Axes: `_M` members (a token row inside a sequence), `_Q` sequences, `_E` entries, `_D` draws (an episode as often as it
was drawn). Entries are episodes, or the sides of pairs, with the chosen side before the rejected one.
"""

import hashlib
from bisect import bisect_left, insort
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
from lake.ids import splitmix64
from lake.read.text_table import count_noun
from trainer.config import TrainConfig
from trainer.data.batch import Ints, Positions, compute_starts, expand_ranges
from trainer.data.refusals import Drop
from trainer.data.selection import TrainingSelection
from trainer.losses.base import Atom, Unit


def pack(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Pack items with these token counts into bins of `budget` tokens; every item is in exactly one bin.

    Bins are lists of item numbers, in the order in which they were opened.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)  # equal ones stay in order
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []
    for item in order:
        length = lengths[item]
        position = bisect_left(room, (length, -1))
        if position == len(room):
            number, free = len(bins), budget
            bins.append([])
        else:
            free, number = room.pop(position)
        bins[number].append(item)
        if free > length:
            insort(room, (free - length, number))
    return bins


def spread(lengths: Sequence[int], costs: Sequence[int], budget: int, ranks: int) -> list[list[list[int]]]:
    """Pack items into bins and give each rank equally many bins of about equal cost; every item is in exactly one bin.

    The number of rounds is the smallest that best fit decreasing allows. Where the budget permits it, items go to the
    cheapest bin with room, the costliest item first. Otherwise bins are split, the costliest first, until each rank has
    one in each round. Rounds are then dealt out in order of cost; in each round the costliest bin goes to the rank with
    the lowest load. Where there are too few items, ranks have empty bins at their end.
    """
    bins = pack(lengths, budget)
    bin_count = -(-len(bins) // ranks) * ranks
    if ranks > 1:
        bins = _balance(lengths, costs, budget, bin_count) or _split(bins, costs, bin_count)
    pieces = [(sum(costs[item] for item in items), items) for items in bins]
    pieces.sort(key=lambda piece: (-piece[0], piece[1]))
    pieces += [(0, [])] * (bin_count - len(pieces))
    load = [0] * ranks
    bins_of_ranks: list[list[list[int]]] = [[] for _ in range(ranks)]
    for first in range(0, bin_count, ranks):
        by_load = sorted(range(ranks), key=lambda rank: (load[rank], rank))
        for rank, (cost, items) in zip(by_load, pieces[first : first + ranks], strict=True):
            bins_of_ranks[rank].append(items)
            load[rank] += cost
    return bins_of_ranks


def _balance(lengths: Sequence[int], costs: Sequence[int], budget: int, count: int) -> list[list[int]]:
    """Build bins of about equal cost (longest processing time first, Graham 1969); empty if an item has no room."""
    bins: list[list[int]] = [[] for _ in range(count)]
    cost, tokens = [0] * count, [0] * count
    for item in sorted(range(len(lengths)), key=lambda item: (-costs[item], item)):
        room = [n for n in range(count) if not bins[n] or tokens[n] + lengths[item] <= budget]
        if not room:
            return []
        into = min(room, key=lambda n: (cost[n], n))
        bins[into].append(item)
        cost[into] += costs[item]
        tokens[into] += lengths[item]
    return [items for items in bins if items]


def _split(bins: list[list[int]], costs: Sequence[int], count: int) -> list[list[int]]:
    """Split bins in two until there are `count` of them, or one for each item."""
    bins = list(bins)
    while len(bins) < count and any(len(items) > 1 for items in bins):
        several = [n for n, items in enumerate(bins) if len(items) > 1]
        costliest = max(several, key=lambda n: (sum(costs[item] for item in bins[n]), -n))
        items = bins.pop(costliest)
        # No budget is needed: each half is smaller than the bin, which is within the budget.
        bins += _balance([0] * len(items), [costs[item] for item in items], 0, 2)
        bins[-2:] = [[items[at] for at in half] for half in bins[-2:]]
    return bins


_HASHED: dict[str, type[np.generic]] = {
    "episode_id": np.int64,
    "sequence": np.int32,
    "step_index": np.int32,
    "n_context": np.int32,
    "n_action": np.int32,
    "loss_tokens": np.int64,
    "advantage": np.float64,
    "value_target": np.float64,
    "pair": np.int64,
    "sign": np.int8,
    "takes_context": np.bool_,
    "takes_action": np.bool_,
}
"""Columns of members that decide what is trained, with the types in which they are hashed. `value_target` exists
only with a value head, and the last four only for losses on preferences."""
_ROWS_AT_A_TIME = 1 << 18
"""Rows that are processed together, to bound memory."""


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """The data that one update consumes."""

    index: int
    """Number of the update: 0, 1, ... over the whole run."""
    epoch: int
    episodes_E: Positions
    """Positions in `Plan.episode_ids_E`; for pairs the positions of both sides, one after the other."""
    loss_tokens: int
    tokens: int
    """Tokens of all its sequences."""
    squared_lengths: int
    """Sum over its sequences of the squared number of tokens: the cost of attention."""
    units: int
    """Units that the loss is averaged over; equals the trained tokens where the unit is the token."""


class Plan:
    """Every optimizer step of a run.

    Raises:
        DataRefusedError: nothing is left to train on.
    """

    def __init__(self, selection: TrainingSelection, config: TrainConfig) -> None:
        members = selection.members
        if members.is_empty():
            reasons = ", ".join(f"{row['reason']} {row['steps']}" for row in selection.drops.iter_rows(named=True))
            most = selection.drops.sort("steps", descending=True, maintain_order=True)["reason"].head(1).to_list()
            advice = "Widen --where"
            if most == [Drop.OVER_LENGTH] and selection.length_drops is not None:
                limit = selection.length_drops.limit_for_all
                advice = f"Raise max_length, now {selection.max_length}: {limit} leaves out none"
            raise DataRefusedError(
                f"nothing remains to train on: {count_noun(selection.episodes, 'episode')} selected, "
                f"steps dropped: {reasons}. "
                f"{advice}, or see what each reason means in docs/guides/training.md"
            )
        assert members.height < 2**31, "positions are int32"
        self.members = members
        self.source = selection.source
        """Credit job of the advantages; None without."""
        self.config = config.model_copy(update={"max_length": selection.max_length})
        """The configuration with the resolved max_length."""
        self.weighting = config.loss.weighting(self.config.fitted_length)
        """Average of the loss."""
        self.paired = "pair" in members.columns
        """Whether entries of the plan are sides of pairs, two neighbours each, rather than whole episodes."""
        self.trained_M = self._get_column("trained")
        """Whether each member's action carries loss."""
        self.loss_tokens_M = self._get_column("loss_tokens")
        """Trained tokens of each member."""
        self.sign_M = self._get_column("sign").astype(np.float32) if "sign" in members.columns else None
        """+1 where its side is chosen or its episode desirable, -1 where not; None without preferences."""
        opens_entry_M = self._find_changes(["pair", "sign"] if self.paired else ["episode_id"])
        opens_sequence_M = opens_entry_M | self._find_changes(["sequence"])
        self.member_starts_Q = _find_starts(opens_sequence_M)
        """Sequence q has the members [starts[q], starts[q + 1])."""
        self.sequence_starts_E = _find_starts(opens_entry_M[self.member_starts_Q[:-1]])
        """Episode e has the sequences [starts[e], starts[e + 1])."""
        self.tokens_Q = np.maximum.reduceat(self._get_column("end"), self.member_starts_Q[:-1]).astype(np.int32)
        """Tokens of each sequence, int32; their squares need int64."""
        # The last member names the episode: before a grafted action all members are another episode's.
        self.episode_ids_E = self._get_column("episode_id")[self.member_starts_Q[self.sequence_starts_E[1:]] - 1]
        self.source_E = self._find_sources(selection)
        """Position in the mixture of each episode's source, int32 [E]; None without a mixture."""
        self.steps = [step for epoch in range(config.epochs) for step in self._build_epoch(epoch)]

    def _get_column(self, name: str) -> npt.NDArray[Any]:
        """Return a column of the members. Unlike `members[name]` this does not expand a constant column permanently."""
        return self.members.select(name).to_series().to_numpy()

    def _find_changes(self, names: Sequence[str]) -> npt.NDArray[np.bool_]:
        """Return whether a member differs in some column from the one before it, bool [M]."""
        changes_M = np.zeros(self.members.height, np.bool_)
        changes_M[0] = True
        for name in names:
            values_M = self._get_column(name)
            changes_M[1:] |= values_M[1:] != values_M[:-1]
        return changes_M

    def _build_epoch(self, epoch: int) -> Iterator[OptimizerStep]:
        """Yield the optimizer steps of one epoch."""
        order = self._order_episodes(epoch)
        sides = 2 if self.paired else 1
        count = self.config.minibatches or -(-len(order) // max(1, self.config.episodes_per_step // sides))
        count = min(count, len(order))
        # Like `np.array_split`: the first steps get one more if the division has a remainder.
        sizes = np.full(count, len(order) // count) + (np.arange(count) < len(order) % count)
        order_E = order if sides == 1 else (sides * order[:, None] + np.arange(sides, dtype=np.int32)).ravel()
        bounds = (sides * compute_starts(sizes)).tolist()
        together = max(1, _ROWS_AT_A_TIME // bounds[1])
        for first in range(0, count, together):
            edges = bounds[first : first + together + 1]
            amounts = self._sum_steps(order_E[edges[0] : edges[-1]], np.array(edges[:-1]) - edges[0])
            for number, (low, high, *sums) in enumerate(zip(edges, edges[1:], *amounts, strict=False), first):
                yield OptimizerStep(epoch * count + number, epoch, order_E[low:high], *sums)

    def _sum_steps(self, entries_E: Positions, firsts: Ints) -> Iterator[list[int]]:
        """Yield four lists of sums per optimizer step: trained tokens, tokens, squared lengths and units.

        `firsts` are the positions in `entries_E` where the steps begin.
        """
        sequences_Q, sequences_E = self._list_sequences(entries_E)
        members_M, members_Q = self.list_members(sequences_Q)
        first_sequences = compute_starts(sequences_E)[firsts]
        first_members = compute_starts(members_Q)[first_sequences]
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

    def _list_sequences(self, entries_E: Positions) -> tuple[Ints, Positions]:
        """Return the sequences of entries, end to end, and the number of sequences of each entry."""
        first_E = self.sequence_starts_E[entries_E]
        sequences_E = self.sequence_starts_E[entries_E + 1] - first_E
        return expand_ranges(first_E, sequences_E), sequences_E

    def list_members(self, sequences_Q: Ints) -> tuple[Ints, Ints]:
        """Return the members of sequences, end to end, and the number of members of each sequence."""
        first_Q = self.member_starts_Q[sequences_Q]
        members_Q = self.member_starts_Q[sequences_Q + 1] - first_Q
        return expand_ranges(first_Q, members_Q), members_Q

    def _order_episodes(self, epoch: int) -> Positions:
        """Return the positions of the epoch's episodes, or of its pairs, in their order."""
        seed, sides = self.config.seed, slice(None, None, 2 if self.paired else 1)
        order_ids = self.episode_ids_E
        if self.paired:
            order_ids = self._get_column("pair")[self.member_starts_Q[self.sequence_starts_E[:-1:2]]]
        if self.source_E is None:
            order = np.argsort(compute_order_keys(order_ids, seed, epoch), kind="stable")
        else:
            weights = [source.weight for source in self.config.mixture]
            order = draw_episodes(order_ids, self.source_E[sides], weights, seed, epoch)
        return order.astype(np.int32)

    def _find_sources(self, selection: TrainingSelection) -> npt.NDArray[np.int32] | None:
        """Return the mixture's source of each episode.

        Raises:
            DataRefusedError: a source has nothing to train on.
        """
        if selection.sources is None:
            return None
        ids_E = pl.DataFrame({"episode_id": self.episode_ids_E})
        source_E = ids_E.join(selection.sources, on="episode_id", how="left", maintain_order="left")["source"]
        for number, source in enumerate(self.config.mixture):
            if number not in source_E:
                msg = (
                    f"mixture source {number} ({source.describe()}) has nothing to train on; run with --plan to see why"
                )
                raise DataRefusedError(msg)
        return source_E.to_numpy()

    def pack_micro_batches(self, step: OptimizerStep, world_size: int = 1) -> list[list[list[int]]]:
        """Return the sequence numbers of each micro-batch of an optimizer step, by rank, the costliest first.

        Cost is the sum of squared sequence lengths. Atoms stay whole and in order. Every rank has the same number of
        micro-batches; the last ones may be empty.
        """
        sequences_Q, counts_E = self._list_sequences(step.episodes_E)
        firsts = np.arange(len(sequences_Q))
        if self.weighting.atom is not Atom.SEQUENCE:
            firsts = (np.cumsum(counts_E) - counts_E)[:: 2 if self.paired else 1]
        lengths_Q = self.tokens_Q[sequences_Q].astype(np.int64)
        tokens, costs = (np.add.reduceat(values_Q, firsts).tolist() for values_Q in (lengths_Q, lengths_Q**2))
        sequences = sequences_Q.tolist()
        atoms = [sequences[low:high] for low, high in pairwise([*firsts.tolist(), len(sequences)])]
        ranks = spread(tokens, costs, self.config.micro_batch_tokens, world_size)
        return [[[q for item in items for q in atoms[item]] for items in bins] for bins in ranks]

    def list_consumed(self, step: OptimizerStep) -> pl.DataFrame:
        """Return a row for each entry that an optimizer step consumes, with its first and last trained step."""
        first_E = self.member_starts_Q[self.sequence_starts_E[step.episodes_E]]
        members_E = self.member_starts_Q[self.sequence_starts_E[step.episodes_E + 1]] - first_E
        members_M = expand_ranges(first_E, members_E)
        trained_M = self.trained_M[members_M]
        step_M = self.members[members_M[trained_M], "step_index"].to_numpy()
        loss_tokens_M = self.loss_tokens_M[members_M[trained_M]]
        # Each entry has a trained step.
        firsts = compute_starts(np.add.reduceat(trained_M, compute_starts(members_E)[:-1], dtype=np.int64))[:-1]
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

        The hash does not depend on files and rows, so compaction does not change it.
        """
        digest = hashlib.blake2b(digest_size=8)
        for name, dtype in _HASHED.items():
            if name in self.members.columns:
                for rows in self.members.select(name).iter_slices(_ROWS_AT_A_TIME):
                    column = rows.to_series()
                    filled = column.fill_null(float("nan")) if dtype is np.float64 else column
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


def _find_starts(opens: npt.NDArray[np.bool_]) -> Positions:
    """Return the positions where parts open, and the end of the last part."""
    return np.append(np.flatnonzero(opens).astype(np.int32), np.int32(len(opens)))


_KEYS_AT_A_TIME = 1 << 20
"""Keys that are computed together; the computation takes several times the memory of the keys."""
_DRAW_SALT = np.uint64(0x2545F4914F6CDD1D)
"""Salt that makes the keys of drawing differ from the keys of ordering."""


def compute_order_keys(episode_ids_E: Ints, seed: int, epoch: int) -> npt.NDArray[np.uint64]:
    """Return the sort keys of episodes (int64 [E]) in one epoch: a hash of (seed, epoch, episode_id), uint64 [E].

    Equal ids have equal keys on every machine.
    """
    salt = splitmix64(splitmix64(np.array([seed], np.uint64)) + np.uint64(epoch))
    keys_E = episode_ids_E.astype(np.uint64)
    for first in range(0, len(keys_E), _KEYS_AT_A_TIME):
        keys = keys_E[first : first + _KEYS_AT_A_TIME]
        keys[:] = splitmix64(keys ^ salt)
    return keys_E


def apportion(total: int, weights: Sequence[float]) -> list[int]:
    """Split a total into integer parts in proportion to weights, by the method of the largest remainder.

    Each part is within one of its exact share. Ties favour earlier parts.
    """
    exact = [total * weight / sum(weights) for weight in weights]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: (counts[i] - exact[i], i))
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    return counts


def draw_episodes(
    episode_ids_E: Ints, source_E: npt.NDArray[np.int32], weights: Sequence[float], seed: int, epoch: int
) -> Ints:
    """Return the episodes of an epoch, in order, from their ids (int64 [E]) and sources (int32 [E], each occurs).

    The positions in episode_ids_E are int64 [D] with D = E. Positions repeat where a source is drawn more than once.
    """
    keys_E = compute_order_keys(episode_ids_E, seed, epoch)
    draws, keys = [], []
    for source, count in enumerate(apportion(len(episode_ids_E), weights)):
        mine = np.flatnonzero(source_E == source)
        by_draw = mine[np.lexsort((episode_ids_E[mine], splitmix64(keys_E[mine] ^ _DRAW_SALT)))]
        positions = np.resize(by_draw, count)
        key_D = keys_E[positions]
        for again in range(1, -(-count // len(mine))):
            later = slice(again * len(mine), None)
            key_D[later] = splitmix64(key_D[later])
        draws.append(positions)
        keys.append(key_D)
    position_D, key_D = np.concatenate(draws), np.concatenate(keys)
    order_D = np.lexsort((episode_ids_E[position_D], key_D))
    return np.asarray(position_D[order_D], np.int64)
