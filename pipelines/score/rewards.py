"""Rewards: scores of several scorers made one, written to `scores` under the reward's own name.

The components stay as they are. A reward's version is the hash of its definition and of its components' versions; its
metrics are the components' values. Only episodes whose components changed since the reward's last job are computed.
"""

import polars as pl
from pydantic import BaseModel, ConfigDict

from lake import ids, jobs
from lake.jobs import Job
from lake.lake import Lake
from lake.snapshot import Snapshot
from pipelines.predicates import select_where
from pipelines.score import reward_components, reward_definition, reward_expression, reward_values
from pipelines.score.reward_components import Resolved, component_rows, outdated, resolve
from pipelines.score.reward_definition import Component, RewardDefinition, load_reward
from pipelines.score.reward_values import rewarded

__all__ = ["Component", "RewardDefinition", "RewardReport", "load_reward", "rewarded", "run_reward"]

KIND = "reward"
EPISODES_A_PART = 50_000
"""Episodes that are computed at once."""
_KEYS = ("run_id", "group_id", "episode_id")


class RewardReport(BaseModel):
    """What a reward job did."""

    model_config = ConfigDict(frozen=True)

    job_id: int | None
    """The job; None if there was nothing to do."""
    series_id: int
    version: str
    """Version of the reward, as in `scores.scorer_version`."""
    components: dict[str, str]
    """Name of each component -> scorer@version."""
    skipped: bool
    """No component changed: nothing was written."""
    episodes: int
    """Episodes that were asked for."""
    unchanged: int
    """Those of them whose reward stands."""
    rows: int
    """Rows written, of episodes and of steps."""
    known: int
    """Rows with a value."""
    unknown: int
    """Rows without one."""


def run_reward(
    lake: Lake, definition: RewardDefinition, *, where: str | None = None, force: bool = False
) -> RewardReport:
    """Compose a reward and write it to `scores` under its name.

    Args:
        lake: where to read and write.
        definition: the reward.
        where: SQL predicate over `episodes`; None takes all.
        force: compute every episode, whether its components changed or not.

    Raises:
        UsageError: a bad predicate, or a component that has scored nothing.
        DataRefusedError: no episode is selected.
        ContractError: a score job wrote a component of an episode or step twice.
    """
    snapshot = lake.snapshot()
    episodes = select_where(snapshot, (*_KEYS, "write_id"), where).sort(_KEYS)
    resolved = resolve(snapshot, definition)
    series = {"reward": definition.name, "version": resolved.version}
    code = (reward_components, reward_definition, reward_expression, reward_values)
    series_id = jobs.series_id(KIND, series, code)
    todo = episodes if force else outdated(snapshot, resolved, series_id, episodes)
    report = RewardReport(
        job_id=None,
        series_id=series_id,
        version=resolved.version,
        components=resolved.spelled,
        skipped=todo.is_empty(),
        episodes=episodes.height,
        unchanged=episodes.height - todo.height,
        rows=0,
        known=0,
        unknown=0,
    )
    if todo.is_empty():
        return report
    parameters = series | {
        "definition": definition.model_dump(mode="json"),
        "components": resolved.spelled,
        "where": where,
        "force": force,
    }
    fingerprint = snapshot.fingerprint(todo, reward=resolved.version, scores=_state(resolved, todo))
    job = lake.job(
        kind=KIND, parameters=parameters, series=series, code=code, fingerprint=fingerprint, snapshot=snapshot
    )
    with job:
        rows, known = _write(job, snapshot, resolved, todo)
        job.counts |= {"rows_in": episodes.height, "rows_out": rows, "unchanged": report.unchanged, "known": known}
    return report.model_copy(update={"job_id": job.job_id, "rows": rows, "known": known, "unknown": rows - known})


def _write(job: Job, snapshot: Snapshot, resolved: Resolved, todo: pl.DataFrame) -> tuple[int, int]:
    """Rows written, and those with a value."""
    rows = known = 0
    for part in todo.iter_slices(EPISODES_A_PART):
        composed = rewarded(component_rows(snapshot, resolved, part), resolved.definition)
        frame = composed.join(part.select(_KEYS), on="episode_id", how="left", maintain_order="left").with_columns(
            scorer=pl.lit(resolved.definition.name), scorer_version=pl.lit(resolved.version)
        )
        job.write("scores", frame.sort("run_id", "group_id", "episode_id", "step_index", nulls_last=False))
        rows += frame.height
        known += frame.get_column("value").count()
    return rows, known


def _state(resolved: Resolved, todo: pl.DataFrame) -> int:
    """Hash of which jobs' scores are read."""
    used = resolved.newest.join(todo.select("episode_id"), on="episode_id", how="semi").sort(
        "scorer", "scorer_version", "episode_id"
    )
    versions = ",".join(f"{name}@{version}" for name, version in sorted(resolved.spelled.items()))
    pairs_E2 = used.select("episode_id", "job_id").to_numpy()
    return ids.key_hash(versions, ids.bytes_hash(pairs_E2.astype("<i8", order="C").tobytes()))
