"""Preferences: pairs of sibling episodes, pairs of steps that share an anchor, or desirable and undesirable episodes.

The credit job provides the outcomes of episodes and steps. The pairs follow from its rows alone, never from the order
of files. A pair has two sides, the chosen one (sign +1) and the rejected one (-1). A side is a whole episode, or one
action after everything before it in its training sequence. Losses on pairs take the log-probability of an action given
its context. Both actions of a pair of steps must therefore have the same context, token by token. A shared anchor is
not enough, because it hashes the state without the history. `graft` puts both actions onto the chosen one's context.

Matching goes group by group, over rows that are ordered from best to worst. The best row is paired with the worst row
that conditions allow, then the next best that is still free, and so on. If only a margin limits the choice, the i-th
best is paired with the i-th worst. Groups are small (siblings of a task, steps that share an anchor), so all pairs of a
group are examined. This also counts how many pairs each condition leaves.

Steps without a pair or a label carry no loss. The members of a pair are arranged side by side: the chosen side, then
the rejected one. A side of a pair of steps is the step's training sequence up to and including its action; only that
action carries loss. A grafted side ends in two rows of other steps: the context of the chosen step without its action,
then the rejected action without its context.

Axes: `_N` rows, group after group; `_I` rows of one group.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from lake import ids
from lake.errors import NoPairsError
from lake.judgements.scores import is_success, read_episode_scores
from trainer.data.refusals import Drop
from trainer.data.sequences import hash_contexts
from trainer.losses.base import PairsConfig

if TYPE_CHECKING:
    from lake.read.snapshot import Snapshot
    from trainer.config import TrainConfig
    from trainer.losses import Needs

Bools = npt.NDArray[np.bool_]
Numbers = npt.NDArray[Any]
Condition = Callable[[slice], Bools]
"""Maps the rows of a group to whether row i may be chosen over row j, bool [I, I]. Only i < j is used."""


@dataclass(frozen=True, slots=True)
class MatchedPairs:
    """Pairs, and the counts that led to them."""

    pairs: list[tuple[int, int]]
    """Chosen and rejected row of each pair."""
    possible: dict[str, tuple[int, int]]
    """For each condition: pairs of rows that satisfy it and all before it, and groups that have such a pair."""


def compare_rows(first_N: Numbers, second_N: Numbers, operator: Callable[..., Any]) -> Condition:
    """Build a condition on a number of the chosen row and one of the rejected row."""
    return lambda rows: np.asarray(operator(first_N[rows][:, None], second_N[rows][None, :]))


def _require_margin(value_N: Numbers, margin: float) -> Condition:
    """Require that the chosen row's value is larger, and by at least a margin."""
    return compare_rows(value_N, value_N, lambda upper, lower: (upper - lower > 0) & (upper - lower >= margin))


def match_pairs(
    group_N: npt.NDArray[np.generic], conditions: Mapping[str, Condition], limit: int | None = None
) -> MatchedPairs:
    """Pair the rows of each group.

    Args:
        group_N: group of each row; the rows of a group are neighbours, the best first.
        conditions: conditions on a pair, by name, in the order in which the remaining pairs are counted.
        limit: maximum pairs of a group; None: no limit.
    """
    edges = [0, *(np.flatnonzero(group_N[1:] != group_N[:-1]) + 1).tolist(), len(group_N)]
    pairs_found: list[tuple[int, int]] = []
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
            pairs_found += [(low + i, low + j) for i, j in pair_best_with_worst(allowed_II, limit)]
    return MatchedPairs(pairs_found, possible)


def pair_best_with_worst(allowed_II: Bools, limit: int | None = None) -> list[tuple[int, int]]:
    """Pair rows (i, j) ordered from best to worst; each row is in at most one pair.

    allowed_II is whether row i may be chosen over row j, bool [I, I]; False unless i < j.
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
_STEP_COLUMNS = ["episode_id", "step_index"]


class CandidateCount(NamedTuple):
    """How many candidates a condition left."""

    name: str
    number: int
    """Pairs that satisfy it and the ones before it; or episodes."""
    note: str
    """Unit of the number, and the number of groups."""


@dataclass(frozen=True, slots=True)
class Preferences:
    """The pairs or labels to train on."""

    kind: Literal["label", "episode", "step"]
    """Labelled episodes, pairs of episodes, or pairs of steps."""
    sides: pl.DataFrame
    """pair, sign, episode_id, step_index, context_episode_id, context_step_index (NULL where a side is a whole episode;
    pair NULL where sides are not paired). The context is that of the step unless it is grafted."""
    candidate_counts: list[CandidateCount]
    """How many candidates each condition left."""


def pair_episodes(outcomes: pl.DataFrame, config: PairsConfig, cut: pl.Series | None = None) -> Preferences:
    """Pair siblings: in each group the best with the worst, the next best with the next worst, and so on.

    Args:
        outcomes: episode_id, group_id, source (position in a mixture), outcome: a row for each episode. Rows without a
            finite outcome are in no pair.
        cut: episodes from which max_length removes an action, int64. Their outcome depends on that action, so they are
            in no pair. None: no such episodes.
    """
    keys = ["group_id", "source"]
    rows = outcomes.filter(pl.col("outcome").is_finite())
    rows = rows.sort(*keys, "outcome", "episode_id", descending=[False, False, True, False])
    episode_N = rows["episode_id"].to_numpy()
    conditions = {
        "scored siblings": compare_rows(episode_N, episode_N, np.not_equal),
        "margin": _require_margin(rows["outcome"].to_numpy(), config.margin),
    }
    if cut is not None and len(cut):
        whole_N = ~rows["episode_id"].is_in(cut.implode()).to_numpy()
        conditions["whole within max_length"] = compare_rows(whole_N, whole_N, np.logical_and)
    group_N = rows.select(pl.struct(keys).rle_id()).to_series().to_numpy()
    matches = match_pairs(group_N, conditions, config.per_group)
    sides = _build_sides(rows.with_columns(step_index=pl.lit(None, pl.Int32)), matches, graft=False)
    return Preferences("episode", sides, _count_candidates(matches, "groups"))


def pair_steps(
    snapshot: "Snapshot", members: pl.DataFrame, returns: pl.DataFrame, config: PairsConfig, max_length: int
) -> Preferences:
    """Pair steps of different episodes that share an anchor and have different actions.

    Args:
        members: judged members of sequences; only `trained` steps are compared.
        returns: episode_id, step_index, group_id, source (position in a mixture), anchor_key, return_to_go. Rows
            without an anchor or a finite return are in no pair.
        max_length: maximum tokens of a grafted side.
    """
    keys = ["group_id", "source", "anchor_key"]
    rows = returns.drop_nulls("anchor_key").filter(pl.col("return_to_go").is_finite())
    rows = rows.join(members.filter("trained").select(*_STEP_COLUMNS, "n_action"), on=_STEP_COLUMNS)
    rows = rows.filter(pl.col("episode_id").n_unique().over(keys) > 1)
    # The members that lead to these steps; `wanted` marks the steps.
    marks = rows.select(*_STEP_COLUMNS, wanted=pl.lit(value=True))
    paths = members.join(marks, on=_STEP_COLUMNS, how="left", maintain_order="left")
    paths = paths.with_columns(wanted=pl.col("wanted").fill_null(value=False) & pl.col("trained"))
    last = pl.col("step_index").filter(pl.col("wanted")).max().over("episode_id", "sequence")
    hashes = hash_contexts(snapshot, paths.filter(pl.col("step_index") <= last))
    rows = rows.join(hashes, on=_STEP_COLUMNS)
    rows = rows.sort(*keys, "return_to_go", *_STEP_COLUMNS, descending=[False, False, False, True, False, False])
    episode_N, action_N, context_N = (rows[name].to_numpy() for name in ("episode_id", "action_hash", "context_hash"))
    conditions = {
        "same anchor, other episode": compare_rows(episode_N, episode_N, np.not_equal),
        "distinct actions": compare_rows(action_N, action_N, np.not_equal),
        "margin": _require_margin(rows["return_to_go"].to_numpy(), config.margin),
    }
    if config.graft:
        before_N, n_action_N = (rows[name].to_numpy().astype(np.int64) for name in ("context_tokens", "n_action"))
        conditions["grafted within max_length"] = compare_rows(
            before_N, n_action_N, lambda before, action: before + action <= max_length
        )
    else:
        conditions["identical contexts"] = compare_rows(context_N, context_N, np.equal)
    group_N = rows.select(pl.struct(keys).rle_id()).to_series().to_numpy()
    matches = match_pairs(group_N, conditions, config.per_group)
    counts = _count_candidates(matches, "anchors")
    if config.graft:
        alike = sum(bool(context_N[winner] == context_N[rejected]) for winner, rejected in matches.pairs)
        counts.append(CandidateCount("identical contexts anyway", alike, "of the pairs"))
    return Preferences("step", _build_sides(rows, matches, graft=config.graft), counts)


def label_episodes(outcomes: pl.DataFrame, threshold: float | None) -> Preferences:
    """Label episodes as desirable or undesirable, without pairs.

    Args:
        outcomes: episode_id, outcome: a row for each episode. Rows without a finite outcome get no label.
        threshold: outcomes from here on are desirable, lower ones undesirable. None: positive is desirable, negative
            undesirable, 0 neither.
    """
    finite = outcomes.filter(pl.col("outcome").is_finite())
    outcome = pl.col("outcome")
    sign = outcome.sign() if threshold is None else pl.when(is_success(outcome, threshold)).then(1).otherwise(-1)
    labels = finite.with_columns(sign=sign.cast(pl.Int8)).filter(pl.col("sign") != 0).sort("episode_id")
    sides = labels.select(
        pair=pl.lit(None, pl.Int64),
        sign="sign",
        episode_id="episode_id",
        step_index=pl.lit(None, pl.Int32),
        context_episode_id="episode_id",
        context_step_index=pl.lit(None, pl.Int32),
    )
    good = int((labels["sign"] > 0).sum())
    counts = {"desirable": good, "undesirable": labels.height - good, "neither": outcomes.height - labels.height}
    return Preferences("label", sides, [CandidateCount(name, n, "episodes") for name, n in counts.items()])


def _build_sides(rows: pl.DataFrame, matches: MatchedPairs, *, graft: bool) -> pl.DataFrame:
    """Return both sides of each pair, under an id that is a 63-bit hash of the two sides."""
    chosen_rows, rejected = (rows.select(_STEP_COLUMNS)[[pair[side] for pair in matches.pairs]] for side in (0, 1))
    key_P = np.zeros(chosen_rows.height, np.uint64)
    for side in (chosen_rows, rejected):
        for name in _STEP_COLUMNS:
            # A whole episode counts as step -1.
            key_P = ids.splitmix64(key_P ^ side[name].fill_null(-1).to_numpy().astype(np.int64).astype(np.uint64))
    pair = pl.Series("pair", (key_P & np.uint64(ids.MASK)).astype(np.int64))
    sides = []
    for sign, side, context in ((1, chosen_rows, chosen_rows), (-1, rejected, chosen_rows if graft else rejected)):
        sides.append(
            side.with_columns(
                pair=pair,
                sign=pl.lit(sign, pl.Int8),
                context_episode_id=context["episode_id"],
                context_step_index=context["step_index"],
            ).select(*SIDES)
        )
    return pl.concat(sides).cast(SIDES).sort("pair", "sign", descending=[False, True])  # type: ignore[arg-type]


def _count_candidates(matches: MatchedPairs, groups: str) -> list[CandidateCount]:
    counts = [
        CandidateCount(name, pairs, f"possible, in {of:,} {groups}") for name, (pairs, of) in matches.possible.items()
    ]
    return [*counts, CandidateCount("chosen", len(matches.pairs), "pairs")]


_ADVICE = {
    "scored siblings": "no group has two episodes with an outcome that can be trained on: score siblings and compute "
    "credit again, or widen --where",
    "margin": "equal outcomes are never paired: lower loss.pairs.margin, or collect where outcomes differ",
    "same anchor, other episode": "no two episodes share an anchor: choose a credit job with anchors (`trajlake credit "
    "gigpo`), or compare whole episodes with loss.pairs.kind = episode",
    "distinct actions": "episodes that share an anchor took the same action there; collect at a higher temperature, or "
    "compare whole episodes with loss.pairs.kind = episode",
    "identical contexts": "the histories before a shared anchor differ: set loss.pairs.graft to put both actions onto "
    "the chosen one's context, or compare whole episodes with loss.pairs.kind = episode",
    "grafted within max_length": "raise max_length",
    "whole within max_length": "max_length cuts an episode of each pair, which changes its outcome: raise it",
}
"""Advice to the user if a condition leaves nothing."""
_OUT = r"(^|,)(masked|excluded)(,|$)"
"""Flags of steps that the credit job excludes from the loss, for example truncated ones."""


def find_preferences(
    snapshot: "Snapshot",
    members: pl.DataFrame,
    credit: pl.DataFrame | None,
    config: "TrainConfig",
    needs: "Needs",
    sources: pl.DataFrame | None,
) -> Preferences:
    """Find pairs or labels for the trained steps of a selection.

    Args:
        credit: result of `read_advantages` with the columns of `list_credit_columns`; required for pairs, and for
            labels without a threshold.
        sources: episode_id, source of a mixture; None without one. A pair is within one source.

    Raises:
        NoPairsError: no pair satisfies the conditions; the message counts what each condition left.
    """
    pairs, rule = needs.pairs, needs.labels
    trained = members.filter("trained").select("episode_id").unique()
    if rule is not None and rule.threshold is not None:
        scores = read_episode_scores(snapshot, rule.score).rename({"score": "outcome"})
        return label_episodes(trained.join(scores, on="episode_id", how="left"), rule.threshold)
    if credit is None:
        raise ValueError("preferences need a credit job: pass its source")
    credit = credit.filter(~pl.col("flags").str.contains(_OUT)).join(trained, on="episode_id", how="semi")
    credit = credit.with_columns(source=0) if sources is None else credit.join(sources, on="episode_id")
    if pairs is not None and pairs.kind == "step":
        preferences = pair_steps(snapshot, members, credit, pairs, config.fitted_length)
    else:
        # The outcome is the largest A_E of an episode's steps; credit may lower A_E for single actions.
        outcomes = credit.group_by("episode_id", "group_id", "source").agg(outcome=pl.col("a_episode").max())
        if pairs is None:
            return label_episodes(outcomes, None)
        cut = members.filter(pl.col("reason") == Drop.OVER_LENGTH)["episode_id"].unique()
        preferences = pair_episodes(outcomes, pairs, cut)
    if preferences.sides.is_empty():
        counts = preferences.candidate_counts
        empty = next(count.name for count in counts if not count.number)
        listed = "; ".join(f"{count.name}: {count.number:,} {count.note}" for count in counts)
        raise NoPairsError(f"{config.loss.name} refused (no_pairs): {listed}. {_ADVICE[empty]}")
    return preferences


def list_credit_columns(needs: "Needs") -> tuple[str, ...]:
    """List the columns of `advantages` from which preferences are made."""
    if needs.pairs is not None and needs.pairs.kind == "step":
        return ("anchor_key", "return_to_go")
    return ("a_episode",) if needs.pairs or needs.labels else ()


def drop_uncompared(members: pl.DataFrame, preferences: Preferences, reason: str) -> pl.DataFrame:
    """Train only the compared members; the others get a reason, unless they have one already."""
    keys = _STEP_COLUMNS if preferences.kind == "step" else ["episode_id"]
    compared = preferences.sides.select(*keys, compared=pl.lit(value=True)).unique()
    members = members.join(compared, on=keys, how="left", maintain_order="left")
    is_uncompared = pl.col("compared").is_null()
    return members.with_columns(
        reason=pl.coalesce("reason", pl.when(is_uncompared).then(pl.lit(reason))),
        trained=pl.col("trained") & ~is_uncompared,
        loss_tokens=pl.when(is_uncompared).then(0).otherwise(pl.col("loss_tokens")),
    ).drop("compared")


def arrange_sides(members: pl.DataFrame, preferences: Preferences) -> pl.DataFrame:
    """Arrange the members of the sides, for sequences with a trained step, after `drop_uncompared`.

    Labels: the members and `sign`. Pairs: the members of each side and `pair`, `sign`, sorted by pair, chosen side
    first. If a side is grafted, also `takes_context` and `takes_action`: the parts of the row that belong to the side.
    """
    sides = preferences.sides
    if preferences.kind == "step":
        return _arrange_step_sides(members, sides)
    if preferences.kind == "label":
        return members.join(sides.select("episode_id", "sign"), on="episode_id", maintain_order="left")
    rows = members.join(sides.select("pair", "sign", "episode_id"), on="episode_id", maintain_order="left")
    return rows.sort("pair", "sign", descending=[False, True], maintain_order=True)


def _arrange_step_sides(members: pl.DataFrame, sides: pl.DataFrame) -> pl.DataFrame:
    """Arrange the members of sides that are steps."""
    grafted = pl.any_horizontal(pl.col(f"context_{name}") != pl.col(name) for name in _STEP_COLUMNS)
    sides = sides.with_columns(grafted=grafted)
    home = members.filter("trained").select(*_STEP_COLUMNS, "sequence", before=pl.col("end") - pl.col("n_action"))
    sides = sides.join(home, left_on=[f"context_{name}" for name in _STEP_COLUMNS], right_on=_STEP_COLUMNS)
    on_path = sides.select(
        "pair", "sign", "sequence", "grafted", last="context_step_index", episode_id="context_episode_id"
    )
    path = members.join(on_path, on=["episode_id", "sequence"]).filter(pl.col("step_index") <= pl.col("last"))
    is_last = pl.col("step_index") == pl.col("last")
    compared = is_last & ~pl.col("grafted")
    cut = is_last & pl.col("grafted")
    path = path.with_columns(
        trained=compared,
        loss_tokens=pl.when(compared).then("loss_tokens").otherwise(0),
        end=pl.col("end") - pl.when(cut).then("n_action").otherwise(0),
        takes_context=pl.lit(value=True),
        takes_action=~cut,
        rank=pl.lit(0),
    )
    action = members.filter("trained").drop("sequence").join(sides.filter("grafted"), on=_STEP_COLUMNS)
    action = action.with_columns(
        end=pl.col("before") + pl.col("n_action"),
        takes_context=pl.lit(value=False),
        takes_action=pl.lit(value=True),
        rank=pl.lit(1),
    )
    rows = pl.concat([path.select(columns := path.drop("grafted", "last").columns), action.select(columns)])
    rows = rows.sort("pair", "sign", "rank", "step_index", descending=[False, True, False, False]).drop("rank")
    return rows if action.height else rows.drop("takes_context", "takes_action")
