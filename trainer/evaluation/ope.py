"""Off-policy evaluation: what stored episodes of one policy say of another's value, and whether they may say it.

A turn is an active step. Its ratio is that of the tokens the policy sampled: 1 where another policy decided, where the
step was copied from an earlier episode (its choice is given), or where nothing was sampled. An episode is left out, and
counted, where its outcome is not known or where a step has no log-probabilities.

A value is told only if the weights are even enough and their mean is what it must be (`reliability`); otherwise the row
says why not. Values rank policies; they are no success rates, which only playing gives.
"""

import math
from dataclasses import dataclass

import numpy as np
import polars as pl

from lake import ids
from lake.errors import DataRefusedError, UsageError
from lake.judgements.scores import ENV_RETURN, find_score
from lake.read.parquet import collected
from lake.read.snapshot import Snapshot
from trainer.evaluation.estimators import all_estimators
from trainer.evaluation.estimators.base import Estimator, Turns
from trainer.evaluation.estimators.fitted import FQE_RIDGE
from trainer.evaluation.ratios import STORED, Scored, check_support, find_scored, token_facts
from trainer.evaluation.success import read_attempts

ENV_REWARD = "env_reward"
_KEYS = ("episode_id", "step_index")
_SCORED = "SELECT episode_id, step_index, encoding_id, logprob, log_ratio FROM rescored_steps WHERE series_id = ?"


@dataclass(frozen=True, slots=True)
class OpeData:
    """What can be evaluated, and what cannot."""

    turns: Turns
    episode_ids_E: pl.Series
    """int64 [E]: of which episodes."""
    left_out: dict[str, int]
    """Episodes by reason."""


def read_turns(
    snapshot: Snapshot,
    target: Scored,
    behaviour: Scored | None,
    *,
    score: str | None = None,
    where: str | None = None,
    gamma: float = 1.0,
) -> OpeData:
    """The turns of the selected episodes.

    Args:
        behaviour: the policy that acted; None takes its log-probabilities as the engine recorded them.
        score: env_return or a scorer of episodes (one reward, at the last turn), or env_reward (recorded step rewards);
            None takes the current credit's score of episodes, or env_return without credit.

    Raises:
        UsageError: a wrong predicate or scorer.
        DataRefusedError: the episodes cannot support importance weights, or none is left.
    """
    attempts = read_attempts(snapshot, by="run_id", score=ENV_RETURN if score == ENV_REWARD else score, where=where)
    left_out = {"came out of another episode": int(attempts["nested"].sum())}
    attempts = attempts.filter(~pl.col("nested"))
    if score != ENV_REWARD:
        left_out["no score"] = attempts["score"].null_count()
        attempts = attempts.filter(pl.col("score").is_not_null())
    steps = _steps(snapshot, attempts["episode_id"])
    chosen = _with_ratios(snapshot, steps, target, behaviour)
    whole = chosen.group_by("episode_id").agg(
        scored=pl.col("log_ratio").is_not_null().all(), rewarded=pl.col("reward").is_not_null().all()
    )
    left_out["a step not scored"] = int((~whole["scored"]).sum())
    if score == ENV_REWARD:
        whole = whole.filter("scored")
        left_out["a reward unknown"] = int((~whole["rewarded"]).sum())
        whole = whole.filter("rewarded")
    whole = whole.filter("scored").select("episode_id")
    attempts = attempts.join(whole, on="episode_id", how="semi", maintain_order="left")
    if attempts.is_empty():
        told = ", ".join(f"{reason}: {count}" for reason, count in left_out.items() if count)
        raise DataRefusedError(
            f"no episode is left to evaluate ({told}); score them first: `trajlake rescore {target.checkpoint}`"
            f"{'' if behaviour is None else f', `trajlake rescore {behaviour.checkpoint}`'}"
        )
    turns = _arrays(attempts, chosen, from_steps=score == ENV_REWARD, gamma=gamma)
    return OpeData(turns, attempts["episode_id"], {reason: count for reason, count in left_out.items() if count})


def _steps(snapshot: Snapshot, episode_ids: pl.Series) -> pl.DataFrame:
    """Active steps in order, and whether the policy decided there."""
    mine = pl.col("episode_id").is_in(episode_ids.implode())
    decided = pl.col("trainable") & ~pl.col("is_copied_context")
    steps = snapshot.scan("steps").filter(mine & pl.col("is_active"))
    return collected(steps.select(*_KEYS, "state_hash", "reward", decided=decided).sort(_KEYS))


def _with_ratios(snapshot: Snapshot, steps: pl.DataFrame, target: Scored, behaviour: Scored | None) -> pl.DataFrame:
    """The steps with `log_ratio`: target minus behaviour, 0 where the policy sampled nothing, NULL if not known."""
    scored = snapshot.sql(_SCORED, [target.series_id])
    facts = token_facts(snapshot, steps["episode_id"].unique(), scored)
    decided = steps.filter("decided").select(_KEYS).join(facts, on=_KEYS)
    check_support(decided, stored=behaviour is None)
    if behaviour is None:
        known = scored.select(*_KEYS, "encoding_id", ratio="log_ratio")
    else:
        other = snapshot.sql(_SCORED, [behaviour.series_id]).select(*_KEYS, "encoding_id", behaved="logprob")
        known = scored.join(other, on=[*_KEYS, "encoding_id"]).select(
            *_KEYS, "encoding_id", ratio=pl.col("logprob") - pl.col("behaved")
        )
    decided = decided.join(known, on=[*_KEYS, "encoding_id"], how="left")
    repeated = decided.filter(pl.struct(_KEYS).is_duplicated())
    if repeated.height:
        row = repeated.row(0, named=True)
        raise DataRefusedError(
            f"the checkpoint has scored two encodings of episode_id={ids.to_text(row['episode_id'])}, "
            f"step_index={row['step_index']}; one evaluation takes one: narrow --where"
        )
    found = decided.select(*_KEYS, "ratio", "n_trained")
    nothing = ~pl.col("decided") | (pl.col("n_trained") == 0).fill_null(value=False)
    return steps.join(found, on=_KEYS, how="left", maintain_order="left").with_columns(
        log_ratio=pl.when(nothing).then(0.0).otherwise(pl.col("ratio"))
    )


def _arrays(attempts: pl.DataFrame, steps: pl.DataFrame, *, from_steps: bool, gamma: float) -> Turns:
    """Rectangular arrays of the episodes that take part, in their order."""
    numbered = attempts.select("episode_id", "task", "score").with_row_index("episode")
    rows = steps.join(numbered, on="episode_id").sort("episode", "step_index")
    episode_N = rows["episode"].to_numpy().astype(np.int64)
    length_E = np.bincount(episode_N, minlength=attempts.height)
    turn_N = np.arange(rows.height) - (np.cumsum(length_E) - length_E)[episode_N]
    shape = (attempts.height, int(length_E.max()))

    log_ratio_EH, reward_EH, state_EH = np.zeros(shape), np.zeros(shape), np.full(shape, -1)
    log_ratio_EH[episode_N, turn_N] = rows["log_ratio"].to_numpy()
    # A state that is not known is nobody else's.
    own = pl.when(pl.col("state_hash").is_null()).then(rows.height + pl.int_range(pl.len()))
    state = own.otherwise(pl.struct("task", "state_hash").rank("dense").cast(pl.Int64))
    state_EH[episode_N, turn_N] = rows.select(state.alias("state")).to_series().to_numpy()
    if from_steps:
        reward_EH[episode_N, turn_N] = rows["reward"].to_numpy()
    else:
        reward_EH[np.arange(attempts.height), length_E - 1] = attempts["score"].to_numpy()
    task_E = attempts["task"].rank("dense").to_numpy().astype(np.int64) - 1
    return Turns(log_ratio_EH, reward_EH, length_E.astype(np.int64), state_EH, task_E, gamma)


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
    score: str | None = None,
    where: str | None = None,
    gamma: float = 1.0,
    clip: float = 2.0,
    ridge: float = FQE_RIDGE,
) -> Evaluation:
    """Estimate the value of a policy from another one's episodes.

    Args:
        snapshot: the data; both checkpoints have scored it (`trajlake rescore`).
        behaviour: the checkpoint that acted, or `stored`: its log-probabilities as the engine recorded them.
        score: see `trainer.evaluation.ope.read_turns`.

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
            "their difference is not one of policies alone; run `trajlake rescore` again with both"
        )
    counted = find_score(snapshot, score)
    notes.append(f"score: {counted.title}")
    data = read_turns(snapshot, wanted, acted, score=counted.name, where=where, gamma=gamma)
    if acted is not None:
        notes.append(_compared_with_recorded(snapshot, acted, data.episode_ids_E))
    estimators = all_estimators(clip=clip, ridge=ridge)
    rows = [_row(estimator, data.turns) for estimator in estimators]
    return Evaluation(pl.DataFrame(rows, schema=ROWS, orient="row"), data.left_out, notes)


def _row(estimator: Estimator, turns: Turns) -> tuple[object, ...]:
    weights, found = estimator.reliability(turns), estimator.estimate(turns)
    return (
        estimator.name,
        found.value,
        found.low,
        found.high,
        turns.episodes,
        int(turns.task_E.max()) + 1,
        weights.ess,
        weights.ess / weights.n,
        weights.max_share,
        weights.mean,
        estimator.bias(turns),
        found.refused,
    )


def _compared_with_recorded(snapshot: Snapshot, acted: Scored, episode_ids: pl.Series) -> str:
    """How far the behaviour checkpoint is from what was recorded of the policy that acted, for the user.

    A DataRefusedError where that is farther than arithmetic explains.
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
