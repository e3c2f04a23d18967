"""What is preferred to what: pairs of sibling episodes, pairs of steps that share an anchor, or good and bad episodes.

The credit job says how episodes and steps came out; who is paired with whom follows from its rows alone, never from the
order of files. A pair has two sides, the chosen one (sign +1) and the rejected one (-1). A side is a whole episode, or
one action after everything before it in its training sequence. Losses on pairs take the log-probability of an action
given its context, so both actions of a pair of steps must have been taken in the same context, token by token; a shared
anchor is not enough, since it is a hash of the state without the history. `graft` puts both onto the chosen one's.

Matching goes group by group, over rows that are ordered from best to worst.

The best row is paired with the worst that it may be compared with, then the next best that is still free, and so on. If
only a margin limits the choice, that is the i-th best with the i-th worst. Groups are small (siblings of a task, steps
that share an anchor), so all their pairs are looked at, which also tells how many pairs each condition leaves.

Axes: `_N` rows, group after group; `_I` rows of one group.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from lake import ids
from lake.judgements.scores import is_success
from trainer.data.select.sequences import fingerprints
from trainer.data.stream.batch import Ints
from trainer.losses.base import PairsConfig

if TYPE_CHECKING:
    from lake.read.snapshot import Snapshot

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Condition = Callable[[slice], Bools]
"""Of the rows of a group: whether row i may be chosen over row j, bool [I, I]. Only i < j is looked at."""


@dataclass(frozen=True, slots=True)
class Matched:
    """Pairs, and what led to them."""

    pairs: list[tuple[int, int]]
    """Chosen and rejected row."""
    possible: dict[str, tuple[int, int]]
    """By condition: pairs of rows that satisfy it and all before it, and groups that have such a pair."""


def differ(value_N: Ints) -> Condition:
    """Their values are not the same."""
    return lambda rows: value_N[rows][:, None] != value_N[rows][None, :]


def same(value_N: Ints) -> Condition:
    """Their values are the same."""
    return lambda rows: value_N[rows][:, None] == value_N[rows][None, :]


def both(value_N: Bools) -> Condition:
    """It holds for both."""
    return lambda rows: value_N[rows][:, None] & value_N[rows][None, :]


def apart(value_N: Floats, margin: float) -> Condition:
    """The chosen one's value is larger, and by at least a margin."""

    def condition(rows: slice) -> Bools:
        difference_II = value_N[rows][:, None] - value_N[rows][None, :]
        return np.asarray((difference_II > 0) & (difference_II >= margin))

    return condition


def together(chosen_N: Ints, rejected_N: Ints, limit: int) -> Condition:
    """A number of the chosen row and one of the rejected row add up to a limit at most."""
    return lambda rows: chosen_N[rows][:, None] + rejected_N[rows][None, :] <= limit


def match(group_N: npt.NDArray[np.generic], conditions: Mapping[str, Condition], limit: int | None = None) -> Matched:
    """Pair the rows of each group.

    Args:
        group_N: group of each row; the rows of a group lie together, the best first.
        conditions: what a pair must satisfy, by name, in the order in which what is left is counted.
        limit: pairs of a group at most; None: as many as there are.
    """
    edges = [0, *(np.flatnonzero(group_N[1:] != group_N[:-1]) + 1).tolist(), len(group_N)]
    found: list[tuple[int, int]] = []
    possible = dict.fromkeys(conditions, (0, 0))
    for low, high in pairwise(edges):
        if high - low < 2:
            continue
        allowed_II = np.triu(np.ones((high - low, high - low), np.bool_), 1)
        for name, condition in conditions.items():
            allowed_II &= condition(slice(low, high))
            count = int(allowed_II.sum())
            if not count:
                break
            pairs, groups = possible[name]
            possible[name] = (pairs + count, groups + 1)
        else:
            found += [(low + i, low + j) for i, j in best_with_worst(allowed_II, limit)]
    return Matched(found, possible)


def best_with_worst(allowed_II: Bools, limit: int | None = None) -> list[tuple[int, int]]:
    """Pairs (i, j) of rows ordered from best to worst: each row in one at most.

    allowed_II says whether row i may be chosen over row j, bool [I, I]; False unless i < j.
    """
    free_I = np.ones(len(allowed_II), np.bool_)
    pairs: list[tuple[int, int]] = []
    for i in range(len(allowed_II)):
        if limit is not None and len(pairs) >= limit:
            break
        partners = np.flatnonzero(allowed_II[i] & free_I)
        if free_I[i] and len(partners):
            pairs.append((i, int(partners[-1])))
            free_I[list(pairs[-1])] = False
    return pairs


SIDES = {
    "pair": pl.Int64,
    "sign": pl.Int8,
    "episode_id": pl.Int64,
    "step_index": pl.Int32,
    "context_episode_id": pl.Int64,
    "context_step_index": pl.Int32,
}
"""Columns of `Preferences.sides`."""
_STEP = ["episode_id", "step_index"]


class Finding(NamedTuple):
    """How many candidates a condition left."""

    name: str
    """Of the condition."""
    number: int
    """Pairs that satisfy it and the ones before it; or episodes."""
    note: str
    """What is counted, and in how many groups it is found."""


@dataclass(frozen=True, slots=True)
class Preferences:
    """What is compared."""

    kind: Literal["label", "episode", "step"]
    """Labelled episodes, pairs of episodes, pairs of steps."""
    sides: pl.DataFrame
    """pair, sign, episode_id, step_index, context_episode_id, context_step_index (NULL where a side is a whole episode;
    pair NULL where sides are not paired). The context is that of the step itself unless it is grafted."""
    findings: list[Finding]
    """How many candidates each condition left."""


def episode_pairs(outcomes: pl.DataFrame, config: PairsConfig, cut: pl.Series | None = None) -> Preferences:
    """Pairs of siblings: of each group the best with the worst, the next best with the next worst, and so on.

    Args:
        outcomes: episode_id, group_id, source (position in a mixture), outcome: a row for each episode. Rows without a
            finite outcome are in no pair.
        cut: episodes of which max_length takes an action away, int64; they came out as they did with it, so they are in
            no pair. None: there are none.
    """
    keys = ["group_id", "source"]
    rows = outcomes.filter(pl.col("outcome").is_finite())
    rows = rows.sort(*keys, "outcome", "episode_id", descending=[False, False, True, False])
    episode_N = rows["episode_id"].to_numpy()
    conditions = {"scored siblings": differ(episode_N), "margin": apart(rows["outcome"].to_numpy(), config.margin)}
    if cut is not None and len(cut):
        conditions["whole within max_length"] = both(~rows["episode_id"].is_in(cut.implode()).to_numpy())
    matched = match(_numbered(rows, keys), conditions, config.per_group)
    sides = _sides(rows.with_columns(step_index=pl.lit(None, pl.Int32)), matched, graft=False)
    return Preferences("episode", sides, _findings(matched, "groups"))


def step_pairs(
    snapshot: "Snapshot", members: pl.DataFrame, returns: pl.DataFrame, config: PairsConfig, max_length: int
) -> Preferences:
    """Pairs of steps of different episodes that share an anchor and did different things there.

    Args:
        members: judged members of sequences; `trained` says which steps can be compared.
        returns: episode_id, step_index, group_id, source (position in a mixture), anchor_key, return_to_go. Rows
            without an anchor or a finite return are in no pair.
        max_length: tokens of a grafted side at most.
    """
    keys = ["group_id", "source", "anchor_key"]
    rows = returns.drop_nulls("anchor_key").filter(pl.col("return_to_go").is_finite())
    rows = rows.join(members.filter("trained").select(*_STEP, "n_action"), on=_STEP)
    rows = rows.filter(pl.col("episode_id").n_unique().over(keys) > 1)
    rows = rows.join(fingerprints(snapshot, _paths(members, rows)), on=_STEP)
    rows = rows.sort(*keys, "return_to_go", *_STEP, descending=[False, False, False, True, False, False])
    episode_N, action_N, context_N = (rows[name].to_numpy() for name in ("episode_id", "action_hash", "context_hash"))
    conditions = {
        "same anchor, other episode": differ(episode_N),
        "distinct actions": differ(action_N),
        "margin": apart(rows["return_to_go"].to_numpy(), config.margin),
    }
    if config.graft:
        before_N, n_action_N = (rows[name].to_numpy().astype(np.int64) for name in ("context_tokens", "n_action"))
        conditions["grafted within max_length"] = together(before_N, n_action_N, max_length)
    else:
        conditions["identical contexts"] = same(context_N)
    matched = match(_numbered(rows, keys), conditions, config.per_group)
    findings = _findings(matched, "anchors")
    if config.graft:
        alike = sum(bool(context_N[chosen] == context_N[rejected]) for chosen, rejected in matched.pairs)
        findings.append(Finding("identical contexts anyway", alike, "of the pairs"))
    return Preferences("step", _sides(rows, matched, graft=config.graft), findings)


def labels(outcomes: pl.DataFrame, threshold: float | None) -> Preferences:
    """Good and bad episodes, not paired.

    Args:
        outcomes: episode_id, outcome: a row for each episode. Rows without a finite outcome get no label.
        threshold: reached is good, not reached is bad; None: positive is good, negative is bad, 0 is neither.
    """
    known = outcomes.filter(pl.col("outcome").is_finite())
    outcome = pl.col("outcome")
    sign = outcome.sign() if threshold is None else pl.when(is_success(outcome, threshold)).then(1).otherwise(-1)
    signed = known.with_columns(sign=sign.cast(pl.Int8)).filter(pl.col("sign") != 0).sort("episode_id")
    sides = signed.select(
        pair=pl.lit(None, pl.Int64),
        sign="sign",
        episode_id="episode_id",
        step_index=pl.lit(None, pl.Int32),
        context_episode_id="episode_id",
        context_step_index=pl.lit(None, pl.Int32),
    )
    good = int((signed["sign"] > 0).sum())
    findings = [
        ("desirable", good),
        ("undesirable", signed.height - good),
        ("neither", outcomes.height - signed.height),
    ]
    return Preferences("label", sides, [Finding(name, count, "episodes") for name, count in findings])


def _numbered(rows: pl.DataFrame, keys: list[str]) -> Ints:
    """Number of each row's group, for rows that lie together by their keys."""
    return rows.select(pl.struct(keys).rle_id()).to_series().to_numpy()


def _paths(members: pl.DataFrame, rows: pl.DataFrame) -> pl.DataFrame:
    """The members that lead to some steps, and `wanted`: whether it is one of the steps."""
    marks = rows.select(*_STEP, wanted=pl.lit(value=True))
    marked = members.join(marks, on=_STEP, how="left", maintain_order="left")
    marked = marked.with_columns(wanted=pl.col("wanted").fill_null(value=False) & pl.col("trained"))
    last = pl.col("step_index").filter(pl.col("wanted")).max().over("episode_id", "sequence")
    return marked.filter(pl.col("step_index") <= last)


def _sides(rows: pl.DataFrame, matched: Matched, *, graft: bool) -> pl.DataFrame:
    """Both sides of each pair, under an id that is a hash of what is compared."""
    chosen, rejected = (rows.select(_STEP)[[pair[side] for pair in matched.pairs]] for side in (0, 1))
    pair = _pair_ids(chosen, rejected)
    parts = []
    for sign, side, context in ((1, chosen, chosen), (-1, rejected, chosen if graft else rejected)):
        parts.append(
            side.with_columns(
                pair=pair,
                sign=pl.lit(sign, pl.Int8),
                context_episode_id=context["episode_id"],
                context_step_index=context["step_index"],
            ).select(*SIDES)
        )
    return pl.concat(parts).cast(SIDES).sort("pair", "sign", descending=[False, True])  # type: ignore[arg-type]


def _pair_ids(chosen: pl.DataFrame, rejected: pl.DataFrame) -> pl.Series:
    """63-bit hashes; a whole episode counts as step -1."""
    key_P = np.zeros(chosen.height, np.uint64)
    for side in (chosen, rejected):
        for name in _STEP:
            key_P = ids.splitmix64(key_P ^ side[name].fill_null(-1).to_numpy().astype(np.int64).astype(np.uint64))
    return pl.Series("pair", (key_P & np.uint64(ids.MASK)).astype(np.int64))


def _findings(matched: Matched, groups: str) -> list[Finding]:
    found = [Finding(name, pairs, f"possible, in {of:,} {groups}") for name, (pairs, of) in matched.possible.items()]
    return [*found, Finding("chosen", len(matched.pairs), "pairs")]
