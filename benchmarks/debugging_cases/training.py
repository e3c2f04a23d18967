"""What a trainer writes of an update: its batch, its metrics, now and then a checkpoint.

No weights are trained here. What can be derived from the lake is (the return of a batch, the size of its advantages,
how many versions old it is); losses and seconds are drawn around usual values.
"""

import hashlib
import random
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

import polars as pl

from benchmarks.debugging_cases.plan import DEAD_UPDATE, STALE_ROUND, STALE_UPDATE, Size
from lake import Lake
from lake.read.training import STALENESS_BUCKETS

_BEGAN = datetime(2026, 3, 2, 8, 50, tzinfo=UTC)
_EVERY = 5
"""Updates between two checkpoints."""
_GROUPS = """
    SELECT e.run_id, e.group_id, e.collection_round, bool_or(g.is_dead) AS is_dead
    FROM episodes AS e JOIN credit_groups AS g USING (group_id)
    WHERE g.job_id = (SELECT job_id FROM credit_series WHERE is_current)
    GROUP BY ALL ORDER BY ALL
    """
_EPISODES = """
    SELECT e.episode_id, e.group_id, e.num_steps, e.env_return, e.policy_version, e.completion_tokens,
           avg(a.advantage) AS advantage, avg(abs(a.advantage)) AS size
    FROM episodes AS e JOIN current_advantages AS a USING (episode_id) GROUP BY ALL ORDER BY ALL
    """


def train(lake: Lake, size: Size, seed: int, rounds: Mapping[str, int], unstable: Mapping[str, int]) -> None:
    """One update after each round of each run, from groups of that round.

    Args:
        lake: with current credit.
        size: says how many groups an update has.
        seed: of what is drawn.
        rounds: of each run.
        unstable: the update of a run whose learning rate is ten times as high from then on; the policy collapses.
    """
    snapshot = lake.snapshot()
    groups, episodes = snapshot.sql(_GROUPS), snapshot.sql(_EPISODES)
    for arm, n_rounds in rounds.items():
        rng = random.Random(f"train {arm} {seed}")
        of_arm = groups.filter(pl.col("run_id") == arm)
        batches, metrics = _updates(of_arm, episodes, arm, n_rounds, size, rng, unstable.get(arm))
        parameters = {"loss": "ppo", "advantages": None, "clip": 0.2, "learning_rate": 1e-6, "epochs": 1}
        with lake.job(kind="train", run_id=arm, parameters=parameters, snapshot=snapshot) as job:
            job.write("batches", batches)
            job.write("metrics", metrics)
            saved = [_checkpoint(arm, done) for done in range(_EVERY, n_rounds + 1, _EVERY)]
            job.write("checkpoints", pl.DataFrame(saved))
            job.counts["rows_out"] = batches.height


def _updates(
    groups: pl.DataFrame,
    episodes: pl.DataFrame,
    arm: str,
    n_rounds: int,
    size: Size,
    rng: random.Random,
    unstable: int | None,
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Rows for `batches`, and for `metrics`, of the updates of a run."""
    batches, metrics = [], []
    for update in range(n_rounds):
        group_ids = choose_groups(groups, arm, update, size.groups_per_update, rng)
        trained = episodes.filter(pl.col("group_id").is_in(group_ids))
        batches.append(
            trained.select(
                "episode_id",
                optimizer_step=pl.lit(update, pl.Int64),
                first_step=pl.lit(0, pl.Int32),
                last_step=pl.col("num_steps") - 1,
                action_tokens=pl.col("completion_tokens"),
                epoch=pl.lit(0, pl.Int32),
            )
        )
        at = _BEGAN + timedelta(hours=update)
        values = _metrics(trained, update, rng)
        if unstable is not None and update >= unstable:
            factors = {"learning_rate": 10, "entropy": 0.2, "kl_k3": 60, "log_ratio_abs": 8, "grad_norm": 6}
            values |= {name: values[name] * factor for name, factor in factors.items()}
        metrics += [{"step": update, "name": name, "value": value, "at": at} for name, value in values.items()]
    return pl.concat(batches), pl.DataFrame(metrics)


def choose_groups(groups: pl.DataFrame, arm: str, update: int, n_groups: int, rng: random.Random) -> list[int]:
    """Groups of an update: live ones, with a dead one among them now and then."""
    number, n_dead = update, int(update % 4 == 2)
    if arm == "shop" and update == STALE_UPDATE:
        number, n_dead = STALE_ROUND, 0
    if arm == "shop" and update == DEAD_UPDATE:
        n_dead = n_groups - 1
    round_groups = groups.filter(pl.col("collection_round") == number)
    dead, live = (round_groups.filter(pl.col("is_dead") == is_dead)["group_id"].to_list() for is_dead in (True, False))
    return rng.sample(dead, n_dead) + rng.sample(live, n_groups - n_dead)


def _metrics(trained: pl.DataFrame, update: int, rng: random.Random) -> dict[str, float]:
    """Metrics of an update; ratios and clipping grow with the age of its batch."""
    age = trained.select((update - pl.col("policy_version")).mean()).item()
    tokens = int(trained["completion_tokens"].sum())
    drift = 0.012 + 0.02 * age + rng.uniform(0, 0.003)
    buckets = {name: float(first <= age <= last) for name, first, last in STALENESS_BUCKETS}
    return {
        "loss": -0.02 + 0.3 * trained["size"].mean() * rng.uniform(0.02, 0.05),
        "logprob": -0.62 + 0.012 * update + rng.uniform(-0.02, 0.02),
        "entropy": 0.58 - 0.009 * update + rng.uniform(-0.01, 0.01),
        "reward": trained["env_return"].mean(),
        "advantage": trained["advantage"].mean(),
        "grad_norm": 0.08 + 0.9 * trained["size"].mean() * rng.uniform(0.95, 1.05),
        "learning_rate": 1e-6,
        "action_tokens": float(tokens),
        "tokens": float(tokens * 6),
        "seconds": tokens / 900 + rng.uniform(2, 4),
        "ratio": 1 + drift / 8,
        "ratio_ess": max(0.05, 1 - 4 * drift),
        "log_ratio_abs": drift,
        "kl_k3": drift**2 / 2,
        "clipped_high": 0.008 + 0.028 * age + rng.uniform(0, 0.004),
        "clipped_low": 0.006 + 0.021 * age + rng.uniform(0, 0.004),
        "logprobs_missing": 0.0,
        **buckets,
    }


def _checkpoint(arm: str, done: int) -> dict[str, object]:
    return {
        "optimizer_step": done,
        "run_id": arm,
        "policy_version": done,
        "uri": f"checkpoints/{arm}/{done}",
        "sha256": hashlib.sha256(f"{arm} {done}".encode()).hexdigest(),
        "at": _BEGAN + timedelta(hours=done),
        "data_snapshot": "{}",
        "cursor": "{}",
    }
