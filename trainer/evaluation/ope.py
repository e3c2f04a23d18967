"""Off-policy evaluation: estimate a policy's value from stored episodes of another policy, or refuse to.

A turn is an active step. Its ratio is that of the tokens that the policy sampled. The ratio is 1 where another policy
decided, where the step was copied from an earlier episode, or where nothing was sampled. An episode is left out, and
counted, if its outcome is unknown or if a step has no log-probabilities.

A value is reported only if the weights are even enough and their mean is close to 1 (`OpeEstimator.reliability`).
Otherwise the row gives the reason. Values rank policies. They are not success rates, which need rollouts.
"""

import math
from dataclasses import dataclass

import numpy as np
import polars as pl

from lake import ids
from lake.errors import DataRefusedError, UsageError
from lake.judgements.credit import find_score
from lake.judgements.scores import ENV_RETURN
from lake.read.parquet import collect_rows
from lake.read.snapshot import Snapshot
from trainer.evaluation.estimators import all_estimators
from trainer.evaluation.estimators.fitted import FQE_RIDGE
from trainer.evaluation.estimators.importance import Turns
from trainer.evaluation.ratios import STORED, RescoredCheckpoint, check_support, find_rescored, read_sampling
from trainer.evaluation.success import read_attempts

ENV_REWARD = "env_reward"
_KEYS = ("episode_id", "step_index")
_RESCORED = "SELECT episode_id, step_index, encoding_id, logprob, log_ratio FROM rescored_steps WHERE series_id = ?"


@dataclass(frozen=True, slots=True)
class OpeData:
    """Turns of the episodes that can be evaluated, and counts of the others."""

    turns: Turns
    episode_ids_E: pl.Series
    """int64 [E]: episode_id of each episode in `turns`."""
    left_out: dict[str, int]
    """Number of episodes by the reason why they are left out."""


def read_turns(
    snapshot: Snapshot,
    target: RescoredCheckpoint,
    behaviour: RescoredCheckpoint | None,
    *,
    score: str | None = None,
    where: str | None = None,
    gamma: float = 1.0,
) -> OpeData:
    """Read the turns of the selected episodes.

    Args:
        behaviour: the policy that acted; None uses the log-probabilities that the engine recorded.
        score: env_return or a scorer of episodes (one reward, at the last turn), or env_reward (recorded step rewards);
            None takes the current credit's score of episodes, or env_return without credit.

    Raises:
        UsageError: a wrong predicate or scorer.
        DataRefusedError: the episodes cannot support importance weights, or all are left out.
    """
    attempts = read_attempts(snapshot, by="run_id", score=ENV_RETURN if score == ENV_REWARD else score, where=where)
    left_out = {"came out of another episode": int(attempts["nested"].sum())}
    attempts = attempts.filter(~pl.col("nested"))
    if score != ENV_REWARD:
        left_out["no score"] = attempts["score"].null_count()
        attempts = attempts.filter(pl.col("score").is_not_null())
    steps = read_active_steps(snapshot, attempts["episode_id"])
    turn_rows = add_log_ratios(snapshot, steps, target, behaviour)
    episodes = turn_rows.group_by("episode_id").agg(
        scored=pl.col("log_ratio").is_not_null().all(), rewarded=pl.col("reward").is_not_null().all()
    )
    left_out["a step not scored"] = int((~episodes["scored"]).sum())
    if score == ENV_REWARD:
        episodes = episodes.filter("scored")
        left_out["a reward unknown"] = int((~episodes["rewarded"]).sum())
        episodes = episodes.filter("rewarded")
    episodes = episodes.filter("scored").select("episode_id")
    attempts = attempts.join(episodes, on="episode_id", how="semi", maintain_order="left")
    if attempts.is_empty():
        reasons = ", ".join(f"{reason}: {count}" for reason, count in left_out.items() if count)
        commands = [f"`trajlake rescore {policy.checkpoint}`" for policy in (target, behaviour) if policy is not None]
        raise DataRefusedError(f"no episode is left to evaluate ({reasons}); score them first: {', '.join(commands)}")
    turns = build_turns(attempts, turn_rows, from_steps=score == ENV_REWARD, gamma=gamma)
    return OpeData(turns, attempts["episode_id"], {reason: count for reason, count in left_out.items() if count})


def read_active_steps(snapshot: Snapshot, episode_ids: pl.Series) -> pl.DataFrame:
    """Return active steps in order, with `decided`: whether the policy chose the action."""
    mine = pl.col("episode_id").is_in(episode_ids.implode())
    decided = pl.col("trainable") & ~pl.col("is_copied_context")
    steps = snapshot.scan("steps").filter(mine & pl.col("is_active"))
    return collect_rows(steps.select(*_KEYS, "state_hash", "reward", decided=decided).sort(_KEYS))


def add_log_ratios(
    snapshot: Snapshot, steps: pl.DataFrame, target: RescoredCheckpoint, behaviour: RescoredCheckpoint | None
) -> pl.DataFrame:
    """Add `log_ratio`: target minus behaviour, 0 where the policy sampled nothing, NULL if unknown."""
    scored = snapshot.sql(_RESCORED, [target.series_id])
    sampling = read_sampling(snapshot, steps["episode_id"].unique(), scored)
    decided = steps.filter("decided").select(_KEYS).join(sampling, on=_KEYS)
    check_support(decided, stored=behaviour is None)
    if behaviour is None:
        ratios = scored.select(*_KEYS, "encoding_id", ratio="log_ratio")
    else:
        behaved = snapshot.sql(_RESCORED, [behaviour.series_id]).select(*_KEYS, "encoding_id", behaved="logprob")
        ratios = scored.join(behaved, on=[*_KEYS, "encoding_id"]).select(
            *_KEYS, "encoding_id", ratio=pl.col("logprob") - pl.col("behaved")
        )
    decided = decided.join(ratios, on=[*_KEYS, "encoding_id"], how="left")
    repeated = decided.filter(pl.struct(_KEYS).is_duplicated())
    if repeated.height:
        row = repeated.row(0, named=True)
        raise DataRefusedError(
            f"the checkpoint has scored two encodings of episode_id={ids.to_text(row['episode_id'])}, "
            f"step_index={row['step_index']}; one evaluation takes one: narrow --where"
        )
    decided = decided.select(*_KEYS, "ratio", "n_trained")
    is_unsampled = ~pl.col("decided") | (pl.col("n_trained") == 0).fill_null(value=False)
    return steps.join(decided, on=_KEYS, how="left", maintain_order="left").with_columns(
        log_ratio=pl.when(is_unsampled).then(0.0).otherwise(pl.col("ratio"))
    )


def build_turns(attempts: pl.DataFrame, steps: pl.DataFrame, *, from_steps: bool, gamma: float) -> Turns:
    """Build padded arrays of the evaluated episodes, in the order of `attempts`."""
    numbered = attempts.select("episode_id", "task", "score").with_row_index("episode")
    rows = steps.join(numbered, on="episode_id").sort("episode", "step_index")
    episode_N = rows["episode"].to_numpy().astype(np.int64)
    length_E = np.bincount(episode_N, minlength=attempts.height)
    turn_N = np.arange(rows.height) - (np.cumsum(length_E) - length_E)[episode_N]
    shape = (attempts.height, int(length_E.max()))

    log_ratio_EH, reward_EH, state_EH = np.zeros(shape), np.zeros(shape), np.full(shape, -1)
    log_ratio_EH[episode_N, turn_N] = rows["log_ratio"].to_numpy()
    # An unknown state equals no other state.
    unique_state = pl.when(pl.col("state_hash").is_null()).then(rows.height + pl.int_range(pl.len()))
    state = unique_state.otherwise(pl.struct("task", "state_hash").rank("dense").cast(pl.Int64))
    state_EH[episode_N, turn_N] = rows.select(state.alias("state")).to_series().to_numpy()
    if from_steps:
        reward_EH[episode_N, turn_N] = rows["reward"].to_numpy()
    else:
        reward_EH[np.arange(attempts.height), length_E - 1] = attempts["score"].to_numpy()
    task_E = attempts["task"].rank("dense").to_numpy().astype(np.int64) - 1
    return Turns(log_ratio_EH, reward_EH, length_E.astype(np.int64), state_EH, task_E, gamma)


MAX_MISMATCH = 0.1
"""Maximum mean |log-ratio| per token of the checkpoint that acted; bfloat16 engines reach 0.04."""
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
"""One row per estimator: value and 95 % interval over tasks (NULL where refused), effective sample size, its share of
the weights, the largest weight's share of their sum, the mean weight (1 in expectation before clipping), the direction
of the bias, and the reason of a refusal."""
_GAPS = """
SELECT episode_id, policy_version, abs_difference, tokens
FROM rescored_steps WHERE series_id = ? AND log_ratio IS NOT NULL
"""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Outcome of an off-policy evaluation."""

    rows: pl.DataFrame
    """One row per estimator, with the schema `ROWS`."""
    left_out: dict[str, int]
    """Number of excluded episodes by reason."""
    notes: list[str]
    """Caveats for the user."""


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
        snapshot: the data, which both checkpoints have rescored (`trajlake rescore`).
        behaviour: the checkpoint that acted, or `stored`: the log-probabilities that the engine recorded.
        score: see `read_turns`.

    Raises:
        UsageError: a checkpoint that has rescored nothing, a wrong predicate or scorer, options out of range.
        DataRefusedError: the episodes cannot support importance weights, or the behaviour checkpoint did not act.
    """
    if not (0 < gamma <= 1 and clip >= 1 and 0 < ridge < math.inf):
        msg = f"gamma {gamma}, clip {clip}, ridge {ridge}: valid are 0 < gamma <= 1, clip >= 1, finite ridge > 0"
        raise UsageError(msg)
    evaluated = find_rescored(snapshot, target)
    acted = None if behaviour == STORED else find_rescored(snapshot, behaviour)
    notes = ["values rank policies; a success rate takes playing (trajlake eval)"]
    if acted is None:
        notes.append("the engine's log-probabilities differ from the trainer's by arithmetic alone: see view mismatch")
    elif evaluated.code_hash != acted.code_hash:
        raise DataRefusedError(
            f"{evaluated.checkpoint!r} and {acted.checkpoint!r} were scored by different versions of trajlake, so "
            "they differ by more than their policies; run `trajlake rescore` again with both"
        )
    used_score = find_score(snapshot, score)
    notes.append(f"score: {used_score.title}")
    data = read_turns(snapshot, evaluated, acted, score=used_score.name, where=where, gamma=gamma)
    if acted is not None:
        notes.append(check_behaviour(snapshot, acted, data.episode_ids_E))
    rows = []
    for estimator in all_estimators(clip=clip, ridge=ridge):
        weights, estimate = estimator.reliability(data.turns), estimator.estimate(data.turns)
        rows.append(
            (
                estimator.name,
                estimate.value,
                estimate.low,
                estimate.high,
                data.turns.episodes,
                int(data.turns.task_E.max()) + 1,
                weights.ess,
                weights.ess / weights.n,
                weights.max_share,
                weights.mean,
                estimator.bias(data.turns),
                estimate.refused,
            )
        )
    return Evaluation(pl.DataFrame(rows, schema=ROWS, orient="row"), data.left_out, notes)


def check_behaviour(snapshot: Snapshot, acted: RescoredCheckpoint, episode_ids: pl.Series) -> str:
    """Return a note with the behaviour checkpoint's distance from the recorded log-probabilities.

    Raises:
        DataRefusedError: the distance is larger than arithmetic explains.
    """
    mine = snapshot.sql(_GAPS, [acted.series_id]).filter(pl.col("episode_id").is_in(episode_ids.implode()))
    gaps = mine.group_by("policy_version").agg(gap=pl.col("abs_difference").sum() / pl.col("tokens").sum()).sort("gap")
    if gaps.is_empty():
        return f"no recorded log-probabilities can confirm that {acted.checkpoint!r} is the policy that acted"
    version, gap = gaps.row(-1)
    if gap > MAX_MISMATCH:
        raise DataRefusedError(
            f"{acted.checkpoint!r} is not the policy that acted at policy_version {version}: its log-probabilities "
            f"differ from the recorded ones by {gap:.3f} nats per token, at most {MAX_MISMATCH} are allowed; name the "
            "checkpoint that acted, narrow --where to its episodes, or take --behaviour stored"
        )
    return f"{acted.checkpoint!r} differs from the recorded log-probabilities by {gap:.2g} nats per token"
