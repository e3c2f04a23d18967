"""From the lake to turns: whose actions, with which ratios, rewards and states.

A turn is an active step. Its ratio is that of the tokens the policy sampled: 1 where another policy decided, where the
step was copied from an earlier episode (its choice is given), or where nothing was sampled. An episode is left out, and
counted, where its outcome is not known or where a step has no log-probabilities.
"""

from dataclasses import dataclass

import numpy as np
import polars as pl

from lake import ids
from lake.errors import DataRefusedError
from lake.judgements.scores import ENV_RETURN
from lake.read.parquet import collected
from lake.read.snapshot import Snapshot
from trainer.evaluation.scored import Scored
from trainer.evaluation.success import read_attempts
from trainer.evaluation.support import check_support, token_facts
from trainer.evaluation.turns import Turns

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
    score: str = ENV_RETURN,
    where: str | None = None,
    gamma: float = 1.0,
) -> OpeData:
    """The turns of the selected episodes.

    Args:
        behaviour: the policy that acted; None takes its log-probabilities as the engine recorded them.
        score: env_return or a scorer of episodes (one reward, at the last turn), or env_reward (recorded step rewards).

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
            f"no episode is left to evaluate ({told}); score them first: trajlake rescore {target.checkpoint}"
            f"{'' if behaviour is None else f', trajlake rescore {behaviour.checkpoint}'}"
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
