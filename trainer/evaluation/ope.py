"""Off-policy evaluation: what stored episodes of one policy say of another's value, and whether they may say it.

A value is told only if the weights are even enough and add up to what they must (`reliability`); otherwise the row says
why not and what there is. Values rank policies; they are no success rates, which only playing gives.
"""

import math
from dataclasses import dataclass

import polars as pl

from lake.errors import DataRefusedError, UsageError
from lake.read.snapshot import Snapshot
from trainer.evaluation.estimators import Estimator, all_estimators
from trainer.evaluation.ope_data import read_turns
from trainer.evaluation.scored import STORED, Scored, find_scored
from trainer.evaluation.turns import Turns

MAX_MISMATCH = 0.1
"""Mean |log-ratio| per token up to which a checkpoint can be the one that acted; bfloat16 engines come to 0.04."""
ROWS = pl.Schema(
    {
        "estimator": pl.String(),
        "value": pl.Float64(),
        "low": pl.Float64(),
        "high": pl.Float64(),
        "episodes": pl.Int64(),
        "tasks": pl.Int64(),
        "ess": pl.Float64(),
        "ess_share": pl.Float64(),
        "max_share": pl.Float64(),
        "mean_weight": pl.Float64(),
        "bias": pl.String(),
        "refused": pl.String(),
    }
)
"""One row per estimator: value and 95 % interval over tasks, all NULL where refused; effective sample size, its share
of the weights, the largest weight's share of their sum, the mean weight (1 in expectation before clipping), where the
estimate errs, and why it is refused."""
_GAPS = """
SELECT episode_id, policy_version, abs_difference, tokens
FROM rescored_steps WHERE series_id = ? AND log_ratio IS NOT NULL
"""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """An off-policy evaluation."""

    rows: pl.DataFrame
    """Rows of `ROWS`."""
    left_out: dict[str, int]
    """Episodes that take no part, by reason."""
    notes: list[str]
    """What a user should know."""


def evaluate(
    snapshot: Snapshot,
    target: str,
    behaviour: str,
    *,
    score: str = "env_return",
    where: str | None = None,
    gamma: float = 1.0,
    clip: float = 2.0,
    ridge: float = 1.0,
) -> Evaluation:
    """Estimate the value of a policy from another one's episodes.

    Args:
        snapshot: the data; both checkpoints have scored it (`trajlake rescore`).
        behaviour: the checkpoint that acted, or `stored`: its log-probabilities as the engine recorded them.
        score: see `trainer.evaluation.ope_data.read_turns`.

    Raises:
        UsageError: a checkpoint that has scored nothing, a wrong predicate or scorer, options out of range.
        DataRefusedError: the episodes cannot support importance weights, or the behaviour checkpoint did not act.
    """
    if not (0 < gamma <= 1 and clip >= 1 and 0 < ridge < math.inf):
        msg = f"gamma {gamma}, clip {clip}, ridge {ridge}: valid are 0 < gamma <= 1, clip >= 1, finite ridge > 0"
        raise UsageError(msg)
    wanted = find_scored(snapshot, target)
    acted = None if behaviour == STORED else find_scored(snapshot, behaviour)
    notes = ["values rank policies; a success rate takes playing (trajlake eval)"]
    if acted is None:
        notes.append("the engine's log-probabilities differ from the trainer's by arithmetic alone: see view mismatch")
    elif wanted.code_hash != acted.code_hash:
        raise DataRefusedError(
            f"{wanted.checkpoint!r} and {acted.checkpoint!r} were scored by different versions of trajlake, so that "
            "their difference is not one of policies alone; run trajlake rescore again with both"
        )
    data = read_turns(snapshot, wanted, acted, score=score, where=where, gamma=gamma)
    if acted is not None:
        notes.append(_compared_with_recorded(snapshot, acted, data.episode_ids_E))
    estimators = all_estimators(clip=clip, ridge=ridge)
    rows = [_row(estimator, data.turns) for estimator in estimators]
    return Evaluation(pl.DataFrame(rows, schema=ROWS, orient="row"), data.left_out, notes)


def _row(estimator: Estimator, turns: Turns) -> tuple[object, ...]:
    weights, told = estimator.reliability(turns), estimator.told(turns)
    return (
        estimator.name,
        told.value,
        told.low,
        told.high,
        turns.episodes,
        int(turns.task_E.max()) + 1,
        weights.ess,
        weights.ess / weights.n,
        weights.max_share,
        weights.mean,
        estimator.bias(turns),
        told.refused,
    )


def _compared_with_recorded(snapshot: Snapshot, acted: Scored, episode_ids: pl.Series) -> str:
    """How far the behaviour checkpoint is from what was recorded of the policy that acted, for the user.

    Raises:
        DataRefusedError: farther than arithmetic explains.
    """
    mine = snapshot.sql(_GAPS, [acted.series_id]).filter(pl.col("episode_id").is_in(episode_ids.implode()))
    gaps = mine.group_by("policy_version").agg(gap=pl.col("abs_difference").sum() / pl.col("tokens").sum()).sort("gap")
    if gaps.is_empty():
        return f"nothing was recorded that could tell whether {acted.checkpoint!r} is the policy that acted"
    version, gap = gaps.row(-1)
    if gap > MAX_MISMATCH:
        raise DataRefusedError(
            f"{acted.checkpoint!r} is not the policy that acted at policy_version {version}: its log-probabilities "
            f"differ from the recorded ones by {gap:.3f} nats per token, allowed are {MAX_MISMATCH}; name the "
            "checkpoint that acted, narrow --where to its episodes, or take --behaviour stored"
        )
    return f"{acted.checkpoint!r} differs from the recorded log-probabilities by {gap:.2g} nats per token"
