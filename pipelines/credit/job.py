"""The credit job: an estimator over a lake's episodes into `advantages`, with lineage, for the groups that changed.

Groups are computed range by range in bounded memory, on whatever executor is given; each range commits under a
write_id of its own, and all of them become visible with the job's terminal row, or none does.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import polars as pl
from pydantic import BaseModel, Field, SerializeAsAny

from lake import ids
from lake.errors import DataRefusedError
from lake.execution.executor import Executor
from lake.execution.local import LocalExecutor
from lake.judgements.credit import current_series
from lake.judgements.predicates import select_where
from lake.judgements.scores import ENV_RETURN
from lake.lake import Lake
from lake.read.snapshot import Snapshot
from lake.read.text_table import counted
from lake.write.jobs import Job
from pipelines.credit.estimators import for_lone_episodes, needs_siblings
from pipelines.credit.estimators.options import ALL
from pipelines.credit.estimators.protocol import Estimator
from pipelines.credit.flags import Flag, in_words
from pipelines.credit.health.diagnosis import DIAGNOSED, CreditDiagnosis
from pipelines.credit.health.integrity import IntegrityConfig, IntegrityReport
from pipelines.credit.incremental import (
    Changes,
    deciding_modules,
    empty_rows,
    find_changes,
    group_fingerprints,
    summary_of,
    total_fingerprint,
)
from pipelines.credit.inputs.episodes import (
    ENV_REWARD,
    SiblingChoice,
    Sources,
    namesakes,
    other_scores,
    records_step_rewards,
    scorer_versions,
    select_episodes,
    unvalued,
)
from pipelines.credit.inputs.ranges import (
    MEMORY_GB,
    Range,
    batch_units,
    beyond_budget,
    budget_rows,
    bytes_per_step,
    longest_unit,
    plan_ranges,
    rows_per_range,
)
from pipelines.credit.range_task import RangeResult, Task, columns_read, run_range
from pipelines.credit.step_log import LOG, log_steps

KIND = "credit"
_EPISODES = pl.when(pl.col("steps") > 0).then("episodes").otherwise(0).alias("episodes")


class CreditReport(BaseModel, frozen=True, arbitrary_types_allowed=True):
    """What a credit job did."""

    job_id: int
    """The job that ran; where every group was unchanged, the newest of those that hold the groups' advantages."""
    series_id: int
    skipped: bool
    """Every group was unchanged: its rows were computed from the same inputs and options."""
    estimator: SerializeAsAny[Estimator]
    """The configuration that was used."""
    scorer_versions: dict[str, str]
    """Which version of each scorer or reward its inputs are of: name as it was given -> version."""
    summary: CreditDiagnosis
    """Figures over all selected groups, whichever job computed them."""
    groups_computed: int = 0
    groups_kept: int = 0
    """Groups that were unchanged: their earlier rows count."""
    groups_ended: int = 0
    """Groups that have no episodes any more: their rows no longer count."""
    made_current: bool = False
    """Another series was current: this one is now, although every group was unchanged."""
    steps_computed: int = 0
    findings: tuple[str, ...] = ()
    """What the integrity checks found in the computed groups, in words."""
    unknown: dict[str, int] = Field(default_factory=dict)
    """Steps of the computed groups that have no advantage, by the flag that says why."""
    other_scores: tuple[str, ...] = ()
    """What scorers say of episodes that have no score, in words."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """What a job is going to do."""

    snapshot: Snapshot
    sources: Sources
    estimator: Estimator
    episodes: pl.DataFrame
    groups: pl.DataFrame
    scorer_versions: dict[str, str]


def run_credit(
    lake: Lake,
    estimator: Estimator,
    *,
    where: str | None = None,
    only: str | None = None,
    score: str = ENV_RETURN,
    rewards: str = ENV_REWARD,
    grouping: str | None = None,
    siblings: SiblingChoice = "kept",
    integrity: IntegrityConfig | None = None,
    purity: bool = True,
    force: bool = False,
    executor: Executor | None = None,
    memory_gb: float = MEMORY_GB,
    notice: Callable[[str], None] | None = None,
    log_episodes: str | None = None,
) -> CreditReport:
    """Compute advantages of all steps of the selected episodes whose groups changed, and write them to `advantages`.

    A group is computed if its newest rows in the series come from other episodes, scores, parameters or checks than it
    has now; a batch-normalised estimator (`estimator.incremental` is False) computes all groups if any changed.

    Args:
        lake: where to read and write.
        estimator: the configuration.
        where: SQL predicate over `episodes`: for the series the others do not exist. It is one of the options that make
            a series, so no episode of another one loses its advantages. None takes all.
        only: SQL predicate over `episodes`: the groups that hold such an episode are brought up to date, whole; the
            others keep what they have. None looks at all groups.
        score: source of the episode score: `env_return`, or a scorer's or reward's name.
        rewards: source of the step rewards: `env_reward`, or a scorer's or reward's name.
        grouping: name of a definition in `groupings`; None compares episodes in the groups they were collected with.
        siblings: of a group that was collected with `--oversample`: the episodes that `--keep` kept, or all.
        integrity: which checks warn, and which refuse.
        purity: look at the actions and error texts of shared anchors, for `credit_groups`; they are read and hashed.
        force: compute all groups.
        executor: where ranges run; threads of this process unless given.
        memory_gb: what the ranges that run at once may take together, in GB (10^9 bytes).
        notice: told, before anything is computed, of a group or batch that needs more than that, and of a scorer that
            has no value for any chosen episode.
        log_episodes: SQL predicate over `episodes`: whose steps are logged afterwards, where the logger
            `trajlake.credit` takes DEBUG records. None takes the episodes of the first groups.

    Raises:
        DataRefusedError: no episode is selected, no advantage is defined, or a check that refuses found something.
        UsageError: a bad predicate, an unknown scorer or grouping.
        ContractError: steps that break the estimator's contract, naming the episode.
        WorkerLostError: worker processes died again and again.
    """
    integrity = integrity or IntegrityConfig()
    checks = ids.key_hash("checks", integrity.model_dump_json(exclude={"examples"}), purity)
    sources = Sources(where=where, only=only, score=score, rewards=rewards, grouping=grouping, siblings=siblings)
    plan = _planned(lake.snapshot(), estimator, sources, checks, notice)
    if log_episodes is not None:
        # A predicate that is none is told before anything is computed.
        select_where(plan.snapshot, ("episode_id",), log_episodes, "--log-episodes", empty=True)
    job = _job(lake, plan)
    changes = find_changes(plan.snapshot, job.series_id, plan.groups, partial=only is not None, force=force)
    if changes.nothing:
        report = _unchanged(plan, job, changes)
    else:
        report = _computed(job, plan, changes, integrity, purity, executor or LocalExecutor(), memory_gb, notice)
    if LOG.isEnabledFor(logging.DEBUG):
        name, at, _ = score.partition("@")
        version = report.scorer_versions.get(score)
        pinned = score if at or version is None else f"{name}@{version}"
        log_steps(lake.snapshot(), report.series_id, score=pinned, where=log_episodes)
    return report


def _computed(
    job: Job,
    plan: _Plan,
    changes: Changes,
    integrity: IntegrityConfig,
    purity: bool,
    executor: Executor,
    memory_gb: float,
    notice: Callable[[str], None] | None,
) -> CreditReport:
    """Compute the groups that changed, range by range, and end the job."""
    with job:
        task = Task(plan.estimator, integrity, plan.sources.rewards, purity, job.part())
        todo = plan.episodes.join(changes.changed, on="group_id", how="semi", maintain_order="left")
        results = []
        for result in executor.map(run_range, _ranges(plan, task, todo, executor, memory_gb, notice)):
            if result.written is not None:
                job.take(result.written)
            results.append(result)
        return _finish(job, plan, changes, results)


def _planned(
    snapshot: Snapshot, estimator: Estimator, sources: Sources, checks: int, notice: Callable[[str], None] | None
) -> _Plan:
    """The selected episodes, what each group is computed from, and what to say of their scores."""
    if anchors := getattr(estimator, "anchors", None):
        estimator = estimator.model_copy(update={"anchors": anchors.pinned()})
    components = columns_read(estimator).needs.components
    episodes = select_episodes(snapshot, sources, components)
    _refuse_lone(estimator, episodes)
    groups = group_fingerprints(episodes, of_batch=not estimator.incremental, checks=checks)
    versions = scorer_versions(snapshot, sources, components)
    if notice is not None:
        for line in (*namesakes(snapshot, sources), *unvalued(snapshot, sources, episodes, versions, components)):
            notice(line)
    return _Plan(snapshot, sources, estimator, episodes, groups, versions)


def _refuse_lone(estimator: Estimator, episodes: pl.DataFrame) -> None:
    """Raise DataRefusedError: no episode has a sibling, and the estimator compares siblings."""
    groups = episodes["group_id"].n_unique()
    if groups == episodes.height and needs_siblings(estimator):
        raise DataRefusedError(
            f"none of {counted(groups, 'group')} holds two episodes, and {estimator.name} compares siblings: every "
            f"advantage would be 0. Collect several episodes of a task (`trajlake collect --group-size 8`), compare by "
            f"other groups (`trajlake group -h`, --grouping), or use {for_lone_episodes(estimator)}"
        )


def with_step_source(
    lake: Lake, estimator: Estimator, where: str | None, score: str, rewards: str = ENV_REWARD
) -> Estimator:
    """The estimator with the step source that the recorded data supports.

    If the environment recorded no step reward at all, the episode score stands as the reward of the last step; one
    choice for the whole job, recorded in its parameters. An estimator without that option stays as it is.
    """
    if "step_source" not in type(estimator).model_fields:
        return estimator
    recorded = records_step_rewards(lake.snapshot(), Sources(where=where, score=score, rewards=rewards))
    return estimator.model_copy(update={"step_source": "rewards" if recorded else "terminal_score"})


def _job(lake: Lake, plan: _Plan) -> Job:
    sources, estimator = plan.sources, plan.estimator
    series = {
        "estimator": estimator.name,
        "config": estimator.model_dump(mode="json"),
        "score": sources.score,
        "rewards": sources.rewards,
        "grouping": sources.grouping,
        # Another version of a reward is another reward: what it says of some groups never stands beside the old one's.
        "scorer_versions": plan.scorer_versions,
        "where": sources.where,
    }
    if sources.siblings != "kept":
        # The usual is not said, so that the series of lakes where nothing was left out stay the same.
        series["siblings"] = sources.siblings
    return lake.job(
        kind=KIND,
        parameters=series | {"only": sources.only, "options": estimator.model_dump(mode="json", exclude_defaults=True)},
        series=series,
        code=deciding_modules(*type(estimator).code()),
        fingerprint=total_fingerprint(plan.groups, where=sources.where, only=sources.only),
        snapshot=plan.snapshot,
    )


def _ranges(
    plan: _Plan,
    task: Task,
    episodes: pl.DataFrame,
    executor: Executor,
    memory_gb: float,
    notice: Callable[[str], None] | None,
) -> Iterator[tuple[Task, Range]]:
    if episodes.is_empty():
        return
    key = getattr(plan.estimator, "batch_key", None)
    step_bytes = bytes_per_step(plan.snapshot, columns_read(plan.estimator).of_steps)
    budget = budget_rows(step_bytes, memory_gb, executor.workers)
    rows = None if key == ALL else rows_per_range(int(episodes["num_steps"].sum()), budget, executor.workers)
    units = None if key in (None, ALL) else batch_units(plan.snapshot, episodes, key)
    judgements = () if task.rewards == ENV_REWARD else ("scores",)
    longest = longest_unit(episodes, units) if rows is not None else int(episodes["num_steps"].sum())
    if longest > budget and notice is not None:
        what = "group" if key is None else "batch"
        notice(beyond_budget(longest, step_bytes, memory_gb, executor.workers, what=what))
    yield from ((task, part) for part in plan_ranges(plan.snapshot, episodes, rows, judgements, units))


def _finish(job: Job, plan: _Plan, changes: Changes, results: list[RangeResult]) -> CreditReport:
    """Write what was found of the groups, and the figures of the terminal row."""
    report = IntegrityReport.merged([result.integrity for result in results])
    report.raise_refused()
    unknown = sum((result.unknown for result in results), Counter[str]())
    computed = [result.groups for result in results]
    if computed:
        hashes = changes.changed.select("group_id", "input_fingerprint")
        # A group none of whose episodes has a row in `advantages` counts as one without episodes.
        job.write("credit_groups", pl.concat(computed).join(hashes, on="group_id").with_columns(_EPISODES))
    job.write("credit_groups", empty_rows(changes.removed))
    summary = summary_of(pl.concat([frame.select(DIAGNOSED) for frame in (changes.kept, *computed)]))
    others = tuple(other_scores(plan.snapshot, plan.episodes)) if Flag.UNSCORED in unknown else ()
    if summary.steps and summary.undefined_steps == summary.steps:
        why = "".join(f"{line}. " for line in ("; ".join(in_words(unknown)), *others) if line)
        msg = (
            f"{plan.estimator.name} defines none of {counted(summary.steps, 'advantage')} in "
            f"{counted(summary.groups, 'group')}, so the job failed and nothing of it counts. "
            f"{why}Give the estimator what it needs, or take another: `trajlake credit -h`"
        )
        raise DataRefusedError(msg)
    rows_out = sum(result.written.rows for result in results if result.written is not None)
    done = CreditReport(
        job_id=job.job_id,
        series_id=job.series_id,
        skipped=False,
        estimator=plan.estimator,
        scorer_versions=plan.scorer_versions,
        summary=summary,
        groups_computed=changes.changed.height,
        groups_kept=changes.kept.height,
        groups_ended=changes.removed.height,
        steps_computed=rows_out,
        findings=tuple(report.lines()),
        unknown=dict(unknown),
        other_scores=others,
    )
    figures = done.model_dump(mode="json", include={"groups_computed", "groups_kept", "groups_ended"})
    job.counts |= {"rows_in": rows_out, "rows_out": rows_out, "rows_dropped": 0, **figures}
    job.counts |= {**summary.model_dump(mode="json"), **report.counts()}
    return done


def _unchanged(plan: _Plan, job: Job, changes: Changes) -> CreditReport:
    """Nothing to compute. The series becomes the current one if another is: it is what was run last."""
    is_current = current_series(plan.snapshot) == job.series_id
    if not is_current:
        with job:
            job.counts |= {"rows_in": 0, "rows_out": 0, "groups_computed": 0, "groups_kept": changes.kept.height}
    return CreditReport(
        job_id=int(changes.kept.sort("ended")["job_id"][-1]),
        series_id=job.series_id,
        skipped=True,
        estimator=plan.estimator,
        scorer_versions=plan.scorer_versions,
        summary=summary_of(changes.kept),
        groups_kept=changes.kept.height,
        made_current=not is_current,
    )
