"""Diagnostics of estimators before any training, from rollouts of the start weights.

The start weights play the same worlds twice, as two runs with other samples. Each estimator credits both. A step's
advantage should say which action is better than the others from its state, whichever siblings were drawn. So advantages
minus their mean over the actions of the state are correlated between the runs, over equal (task, state, action). An
estimator whose correlation is low mostly passes on noise.

    python -m benchmarks.learning.beforehand --out build/learning --environment taxi
"""

import argparse
import os
import shutil
from pathlib import Path
from typing import Literal

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import polars as pl
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

import lake
from benchmarks.learning import exit_plainly, hold_folder
from benchmarks.learning.arms import ARMS
from benchmarks.learning.play import play
from benchmarks.learning.settings import ENVIRONMENTS, TUNING_SEEDS, Environment
from benchmarks.learning.start import start_weights
from lake.errors import UsageError
from lake.lake import Lake
from lake.settings import describe_faults
from lake.storage.atomic import write_atomically
from pipelines.credit.estimators import find_estimator
from pipelines.credit.job import run_credit

RUNS = ("first", "second")
"""The two runs, whose seeds differ."""
WORLDS = 32
"""Worlds that both runs play."""
_PAIRS = """
WITH means AS (
    SELECT e.run_id, e.seed AS world, s.state_hash, s.action, avg(a.advantage) AS mean, count(*) AS steps
    FROM advantages AS a JOIN steps AS s USING (episode_id, step_index) JOIN episodes AS e USING (episode_id)
    WHERE a.job_id = ? AND a.advantage IS NOT NULL GROUP BY ALL
)
SELECT run_id, world, state_hash, action, steps,
       mean - sum(mean * steps) OVER state / sum(steps) OVER state AS advantage
FROM means WINDOW state AS (PARTITION BY run_id, world, state_hash)
QUALIFY count(*) OVER state > 1
"""
_SHARES = """
SELECT avg((anchor_episodes >= 2)::INT) AS shared,
       avg((anchor_episodes >= 2 AND abs(a_step) > 1e-9)::INT) AS meaningful,
       avg((NOT contains(flags, 'dead_group'))::INT) AS live
FROM advantages WHERE job_id = ?
"""


class Forecast(BaseModel):
    """An estimator on rollouts of the start weights."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    environment: str
    arm: Literal["grpo", "rloo", "gigpo", "gigpo-step", "hgpo"]
    """An estimator without a model."""
    agreement: float = Field(ge=-1, le=1)
    """Correlation between two runs over equal (task, state, action), of advantages minus their mean over the actions of
    the state, weighted by steps."""
    pairs: int = Field(ge=0)
    """Number of (task, state, action) that both runs hold, from states with several actions."""
    shared: float | None = Field(ge=0, le=1)
    """Share of steps whose state a sibling visited; None for estimators without anchors."""
    meaningful: float | None = Field(ge=0, le=1)
    """Share of steps in such a state with a step advantage that is not 0."""
    live: float = Field(ge=0, le=1)
    """Share of steps in groups whose siblings did not all score the same."""


_FORECASTS = TypeAdapter(list[Forecast])


def forecast(out: Path, environment: Environment) -> list[Forecast]:
    """Return the diagnostics of every estimator that needs no training; they are stored as JSON.

    Args:
        out: folder of the study, whose start weights play.
        environment: environment of the study.
    """
    regime = environment.regime({})
    model = start_weights(out, environment, regime, TUNING_SEEDS[0])
    folder = out / "beforehand" / environment.name
    shutil.rmtree(folder, ignore_errors=True)
    lk = lake.open(folder / "lake", create=True)
    for number, run in enumerate(RUNS):
        play(lk, environment, model, run, split="train", worlds=WORLDS, siblings=regime.group_size, seed=number)
    rows = []
    for arm in ARMS:
        # bc-exp weighs by GiGPO's step advantage, and a value head has learned nothing yet.
        if arm.name not in ("bc-exp", "gae"):
            estimator = find_estimator(arm.estimator).model_validate(arm.options)
            report = run_credit(lk, estimator)
            rows.append(_measure(lk, environment.name, arm.name, report.job_id))
    shutil.rmtree(folder)
    write_forecasts(out, environment.name, rows)
    return rows


def write_forecasts(out: Path, environment: str, rows: list[Forecast]) -> None:
    """Store the diagnostics of an environment."""
    path = _find_file(out, environment)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, _FORECASTS.dump_json(rows, indent=1))


def read_forecasts(out: Path, environment: str) -> list[Forecast]:
    """Return the stored diagnostics of an environment; none if they were not computed.

    Raises:
        UsageError: the file is damaged.
    """
    path = _find_file(out, environment)
    if not path.exists():
        return []
    try:
        return _FORECASTS.validate_json(path.read_bytes())
    except ValidationError as error:
        raise UsageError(
            f"{path} is damaged ({describe_faults(error)}); remove it, and restore or repeat it"
        ) from error


def _find_file(out: Path, environment: str) -> Path:
    return out / "beforehand" / f"{environment}.json"


def _measure(lk: Lake, environment: str, arm: str, job_id: int) -> Forecast:
    means = lk.sql(_PAIRS, [job_id])
    first, second = (means.filter(run_id=run).drop("run_id") for run in RUNS)
    pairs = first.join(second, on=["world", "state_hash", "action"], suffix="_2")
    shared, meaningful, live = lk.sql(_SHARES, [job_id]).row(0)
    has_anchors = bool(lk.sql("SELECT count(anchor_key) FROM advantages WHERE job_id = ?", [job_id]).item())
    return Forecast(
        environment=environment,
        arm=arm,
        agreement=round(correlate(pairs), 4),
        pairs=pairs.height,
        shared=round(shared, 4) if has_anchors else None,
        meaningful=round(meaningful, 4) if has_anchors else None,
        live=round(live, 4),
    )


def correlate(pairs: pl.DataFrame) -> float:
    """Return the weighted correlation of `advantage` and `advantage_2`; weights are `steps` times `steps_2`, root."""
    values_P2 = pairs.select("advantage", "advantage_2").to_numpy()
    weights_P = np.sqrt((pairs["steps"] * pairs["steps_2"]).to_numpy())
    centred_P2 = values_P2 - np.average(values_P2, axis=0, weights=weights_P)
    covariance = (weights_P[:, None] * centred_P2).T @ centred_P2
    return float(covariance[0, 1] / np.sqrt(covariance[0, 0] * covariance[1, 1]))


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the study")
    parser.add_argument("--environment", choices=tuple(ENVIRONMENTS), required=True)
    arguments = parser.parse_args()
    with exit_plainly(parser.prog), hold_folder(arguments.out):
        for row in forecast(arguments.out, ENVIRONMENTS[arguments.environment]):
            print(row.model_dump_json())


if __name__ == "__main__":
    main()
