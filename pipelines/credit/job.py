"""The credit job: compute the advantages of changed groups with an estimator and write them to `advantages`.

The job computes groups range by range in bounded memory on an executor. Each range commits under a separate write_id.
The job's terminal row makes all of them visible; without it none is visible. A range may run in another process or on
another machine, and more than once. Its task holds all its inputs, and its rows count when the job takes its result.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import polars as pl
from pydantic import BaseModel, Field, SerializeAsAny

from lake import ids
from lake.errors import DataRefusedError, UsageError
from lake.execution.executor import Executor
from lake.execution.local import LocalExecutor
from lake.judgements.credit import find_current_series
from lake.judgements.scores import ENV_RETURN
from lake.judgements.selections import select_where
from lake.lake import Lake
from lake.read.parquet import collect_rows
from lake.read.snapshot import Snapshot
from lake.read.text_table import count_noun
from lake.tables import TABLES
from lake.write.jobs import Job, JobPart, WrittenRows
from pipelines.credit.estimators import needs_siblings, suggest_for_lone_episodes
from pipelines.credit.estimators.protocol import ALL, Estimator, Flag, count_unknown, describe_unknown
from pipelines.credit.health import (
    DIAGNOSED,
    CreditDiagnosis,
    IntegrityConfig,
    IntegrityReport,
    check_groups,
    diagnose_groups,
    select_step_facts,
)
from pipelines.credit.inputs import (
    ENV_REWARD,
    MEMORY_GB,
    REWARD_JOB,
    GroupChanges,
    Range,
    SiblingChoice,
    Sources,
    arrange_steps,
    compute_budget_rows,
    compute_rows_per_range,
    estimate_bytes_per_step,
    find_batch_units,
    find_changes,
    find_deciding_modules,
    find_scorer_versions,
    has_step_rewards,
    hash_groups,
    hash_inputs,
    make_empty_rows,
    measure_episodes,
    measure_longest_unit,
    plan_ranges,
    read_rows,
    select_episodes,
    suggest_scores,
    summarise_groups,
    warn_of_empty_scores,
    warn_of_namesakes,
)
from pipelines.credit.step_log import LOG, log_steps
from pipelines.credit.steps import COMPONENT, InputNeeds

_START = "initial_messages"
_CHECKED = ("task_id", "expected_group_size", "policy", "policy_version", _START)
"""Columns of `episodes` that the integrity checks look at."""
PURITY_COLUMNS = ("state_is_error", "state_hash", "action", "tool_calls")
"""Columns of `steps` for the quality of shared anchors; texts are hashed while they are read."""
_STEP_COLUMNS = ("episode_id", "step_index", "reward", "is_active", "is_action_valid")


@dataclass(frozen=True, slots=True)
class RangeTask:
    """Parameters that all ranges of a job share."""

    estimator: Estimator
    integrity: IntegrityConfig
    rewards: str
    """Source of the step rewards: `env_reward`, or a scorer."""
    purity: bool
    """Whether to read the actions and error marks of shared anchors."""
    part: JobPart

    @property
    def looks_at_anchors(self) -> bool:
        """Return whether to read actions and error marks: on request, for estimators with anchors."""
        return self.purity and hasattr(self.estimator, "anchors")


@dataclass(frozen=True, slots=True)
class RangeResult:
    """Result of a range."""

    written: WrittenRows | None
    groups: pl.DataFrame
    """Rows of `credit_groups` without `health.JOB_COLUMNS`."""
    integrity: IntegrityReport
    unknown: Counter[str]
    """Steps without an advantage, by reason."""


@dataclass(frozen=True, slots=True)
class InputColumns:
    """Columns of a lake that an estimator reads."""

    needs: InputNeeds
    of_steps: tuple[str, ...]
    of_episodes: tuple[str, ...]


def find_columns(estimator: Estimator) -> InputColumns:
    """Find the columns of `steps` and `episodes` that an estimator needs; UsageError for an unknown column.

    A name in both tables means the step's column, unless the estimator lists it under `episode_columns`.
    """
    in_steps = TABLES["steps"].names
    needs = estimator.input_needs([*in_steps, *(name for name in TABLES["episodes"].names if name not in in_steps)])
    names = dict.fromkeys((*needs.step_columns, *needs.anchor_columns))
    of_steps = [name for name in names if name in in_steps and name not in needs.episode_columns]
    of_episodes = [*(name for name in names if name not in of_steps), *needs.episode_columns]
    if unknown := [name for name in of_episodes if name not in TABLES["episodes"].names]:
        msg = f"{estimator.name}: no column {', '.join(unknown)}; valid: {', '.join(TABLES['episodes'].names)}"
        raise UsageError(msg)
    return InputColumns(
        needs,
        tuple(dict.fromkeys((*_STEP_COLUMNS, "state_hash", *of_steps))),
        tuple(name for name in dict.fromkeys(of_episodes) if name not in (*_STEP_COLUMNS, "group_id")),
    )


def run_range(item: tuple[RangeTask, Range]) -> RangeResult:
    """Compute and write the advantages of a range; ContractError for steps that break the estimator's contract."""
    task, part = item
    steps, episodes = read_range(task, part)
    rows = task.estimator.advantages(steps.lazy()).collect()
    report = check_groups(episodes.lazy(), measure_episodes(steps).lazy(), task.integrity)
    runs = episodes["run_id"].unique()
    if len(runs) == 1:
        rows_of_runs = rows.with_columns(run_id=pl.lit(runs[0]))
    else:
        run_ids = episodes.select("episode_id", "run_id")
        rows_of_runs = rows.join(run_ids, on="episode_id", how="left", maintain_order="left")
    written = task.part.write("advantages", rows_of_runs.with_columns(defined=pl.col("advantage").is_not_null()))
    facts = None
    if task.looks_at_anchors and rows["anchor_key"].null_count() < rows.height:
        facts = steps.lazy().select("episode_id", "step_index", *select_step_facts(steps.columns))
    groups = diagnose_groups(rows.lazy(), episodes.lazy(), facts, report.findings)
    return RangeResult(written, collect_rows(groups), report, count_unknown(rows))


def read_range(task: RangeTask, part: Range) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Read the estimator's input, and the range's episodes with the columns that checks need."""
    options = task.part.objects.polars_options
    columns = find_columns(task.estimator)
    episodes = part.episodes
    extras = [name for name in dict.fromkeys((*columns.of_episodes, *_CHECKED)) if name not in episodes.columns]
    # Hash while reading to hold no text. The hash is valid in this range only.
    start_hash = pl.when(pl.col(_START).is_not_null()).then(pl.col(_START).hash()).alias(_START)
    expressions = [start_hash if name == _START and name not in columns.of_episodes else name for name in extras]
    read = read_rows("episodes", part.files["episodes"], options, ("episode_id", *expressions), episodes)
    episodes = episodes.join(read, on="episode_id", how="left", maintain_order="left")
    facts = select_step_facts(PURITY_COLUMNS) if task.looks_at_anchors else []
    of_steps = [
        name for name in columns.of_steps if name not in [expression.meta.output_name() for expression in facts]
    ]
    steps = read_rows("steps", part.files["steps"], options, (*of_steps, *facts), episodes)
    episode_columns = ["episode_score", *(COMPONENT + name for name in columns.needs.components), *columns.of_episodes]
    if (episodes["status"] != "completed").any():  # an absent column means completed
        episode_columns.append("status")
    steps = arrange_steps(steps, episodes, list(dict.fromkeys(episode_columns)))
    if task.rewards != ENV_REWARD:
        steps = _replace_rewards(task, part, steps)
    return steps, episodes


def _replace_rewards(task: RangeTask, part: Range, steps: pl.DataFrame) -> pl.DataFrame:
    """Return the steps with a scorer's values as rewards; NULL for steps without a value."""
    reward_jobs = part.episodes.select("episode_id", pl.col(REWARD_JOB).alias("job_id"))
    scores = read_rows(
        "scores",
        part.files["scores"],
        task.part.objects.polars_options,
        ("episode_id", "step_index", "job_id", "value"),
        part.episodes,
        keep=(pl.col("scorer") == task.rewards.partition("@")[0]) & pl.col("step_index").is_not_null(),
    )
    values = scores.join(reward_jobs, on=["episode_id", "job_id"], how="semi").select(
        "episode_id", "step_index", "value"
    )
    rewarded_steps = steps.drop("reward").join(
        values, on=["episode_id", "step_index"], how="left", maintain_order="left"
    )
    return rewarded_steps.rename({"value": "reward"})


KIND = "credit"
_EPISODES = pl.when(pl.col("steps") > 0).then("episodes").otherwise(0).alias("episodes")


class CreditReport(BaseModel, frozen=True, arbitrary_types_allowed=True):
    """Result of a credit job."""

    job_id: int
    """The job that ran; if all groups were unchanged, the newest job with their advantages."""
    series_id: int
    skipped: bool
    """Whether all groups were unchanged: their rows have the same inputs and options."""
    estimator: SerializeAsAny[Estimator]
    """Configuration of the estimator."""
    scorer_versions: dict[str, str]
    """Name of each scorer or reward, as in the options -> version."""
    summary: CreditDiagnosis
    """Figures over all selected groups, those of earlier jobs included."""
    groups_computed: int = 0
    groups_kept: int = 0
    """Unchanged groups, whose earlier rows count."""
    groups_ended: int = 0
    """Groups that have lost all episodes: their rows no longer count."""
    made_current: bool = False
    """Whether this series replaced another as the current credit although all groups were unchanged."""
    steps_computed: int = 0
    findings: tuple[str, ...] = ()
    """Findings of the integrity checks in the computed groups."""
    unknown: dict[str, int] = Field(default_factory=dict)
    """Steps of the computed groups without an advantage, by reason."""
    other_scores: tuple[str, ...] = ()
    """Lines about scorers with values for episodes without a score."""


@dataclass(frozen=True, slots=True)
class _Plan:
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
    """Compute the advantages of changed groups and write them to `advantages`.

    A group has changed if its newest rows in the series have other episodes, scores, parameters or checks. A
    batch-normalised estimator (`estimator.incremental` is False) computes all groups if any changed.

    Args:
        lake: lake to read and write.
        estimator: configuration of the estimator.
        where: SQL predicate over `episodes` that selects the episodes of the series; None takes all. It is part of the
            series, so another series keeps its advantages.
        only: SQL predicate over `episodes`: update the whole groups with such an episode and leave the rest unchanged;
            None updates all groups.
        score: source of the episode score: `env_return`, or a scorer's or reward's name.
        rewards: source of the step rewards: `env_reward`, or a scorer's or reward's name.
        grouping: name of a grouping in `groupings`; None compares episodes in their collected groups.
        siblings: compared episodes of a group collected with `--oversample`: those that `--keep` kept, or all.
        integrity: actions of the integrity checks.
        purity: read and hash the actions and error marks of shared anchors, for `credit_groups`.
        force: compute all groups.
        executor: executor of the ranges; None uses threads of this process.
        memory_gb: memory of all concurrent ranges together, in GB (10^9 bytes).
        notice: receives warnings before the computation: of a group or batch beyond the memory, and of a scorer without
            a value for any selected episode.
        log_episodes: SQL predicate over `episodes` whose steps are logged if the logger `trajlake.credit` takes DEBUG
            records. None takes the episodes of the first groups.

    Raises:
        DataRefusedError: no episode is selected, no advantage is defined, or a refusing check has a finding.
        UsageError: a bad predicate, an unknown scorer or grouping.
        ContractError: steps that break the estimator's contract, naming the episode.
        WorkerLostError: worker processes died repeatedly.
    """
    integrity = integrity or IntegrityConfig()
    checks = ids.key_hash("checks", integrity.model_dump_json(exclude={"examples"}), purity)
    sources = Sources(where=where, only=only, score=score, rewards=rewards, grouping=grouping, siblings=siblings)
    plan = _make_plan(lake.snapshot(), estimator, sources, checks, notice)
    if log_episodes is not None:
        # Report an invalid predicate before the computation.
        select_where(plan.snapshot, ("episode_id",), log_episodes, "--log-episodes", may_be_empty=True)
    job = _open_job(lake, plan)
    changes = find_changes(plan.snapshot, job.series_id, plan.groups, partial=only is not None, force=force)
    if changes.is_empty:
        report = _report_unchanged(plan, job, changes)
    else:
        report = _compute_groups(job, plan, changes, integrity, purity, executor or LocalExecutor(), memory_gb, notice)
    if LOG.isEnabledFor(logging.DEBUG):
        name, at, _ = score.partition("@")
        version = report.scorer_versions.get(score)
        score_version = score if at or version is None else f"{name}@{version}"
        log_steps(lake.snapshot(), report.series_id, score=score_version, where=log_episodes)
    return report


def _compute_groups(
    job: Job,
    plan: _Plan,
    changes: GroupChanges,
    integrity: IntegrityConfig,
    purity: bool,
    executor: Executor,
    memory_gb: float,
    notice: Callable[[str], None] | None,
) -> CreditReport:
    with job:
        task = RangeTask(plan.estimator, integrity, plan.sources.rewards, purity, job.part())
        changed_episodes = plan.episodes.join(changes.changed, on="group_id", how="semi", maintain_order="left")
        results = []
        for result in executor.map(run_range, _cut_ranges(plan, task, changed_episodes, executor, memory_gb, notice)):
            if result.written is not None:
                job.take(result.written)
            results.append(result)
        return _finish(job, plan, changes, results)


def _make_plan(
    snapshot: Snapshot, estimator: Estimator, sources: Sources, checks: int, notice: Callable[[str], None] | None
) -> _Plan:
    """Select episodes, hash the groups' inputs, and warn about the scores."""
    if anchors := getattr(estimator, "anchors", None):
        estimator = estimator.model_copy(update={"anchors": anchors.pin_version()})
    components = find_columns(estimator).needs.components
    episodes = select_episodes(snapshot, sources, components)
    group_count = episodes["group_id"].n_unique()
    if group_count == episodes.height and needs_siblings(estimator):
        raise DataRefusedError(
            f"none of {count_noun(group_count, 'group')} holds two episodes, and {estimator.name} compares siblings: "
            "every advantage would be 0. Collect several episodes of a task (`trajlake collect --group-size 8`), "
            "compare by other groups (`trajlake group -h`, --grouping), or use "
            f"{suggest_for_lone_episodes(estimator)}"
        )
    groups = hash_groups(episodes, of_batch=not estimator.incremental, checks=checks)
    versions = find_scorer_versions(snapshot, sources, components)
    if notice is not None:
        for line in (
            *warn_of_namesakes(snapshot, sources),
            *warn_of_empty_scores(snapshot, sources, episodes, versions, components),
        ):
            notice(line)
    return _Plan(snapshot, sources, estimator, episodes, groups, versions)


def choose_step_source(
    lake: Lake, estimator: Estimator, where: str | None, score: str, rewards: str = ENV_REWARD
) -> Estimator:
    """Return the estimator with the step source that the recorded data supports.

    If no step has a reward, the episode score becomes the reward of the last step, for the whole job. An estimator
    without this option is returned unchanged.
    """
    if "step_source" not in type(estimator).model_fields:
        return estimator
    has_rewards = has_step_rewards(lake.snapshot(), Sources(where=where, score=score, rewards=rewards))
    return estimator.model_copy(update={"step_source": "rewards" if has_rewards else "terminal_score"})


def _open_job(lake: Lake, plan: _Plan) -> Job:
    sources, estimator = plan.sources, plan.estimator
    series = {
        "estimator": estimator.name,
        "config": estimator.model_dump(mode="json"),
        "score": sources.score,
        "rewards": sources.rewards,
        "grouping": sources.grouping,
        # Another version of a reward is another series: values of two versions are never mixed.
        "scorer_versions": plan.scorer_versions,
        "where": sources.where,
    }
    if sources.siblings != "kept":
        # The default is omitted, so that series from before this option stay the same.
        series["siblings"] = sources.siblings
    return lake.job(
        kind=KIND,
        parameters=series | {"only": sources.only, "options": estimator.model_dump(mode="json", exclude_defaults=True)},
        series=series,
        code=find_deciding_modules(*type(estimator).code()),
        fingerprint=hash_inputs(plan.groups, where=sources.where, only=sources.only),
        snapshot=plan.snapshot,
    )


def _cut_ranges(
    plan: _Plan,
    task: RangeTask,
    episodes: pl.DataFrame,
    executor: Executor,
    memory_gb: float,
    notice: Callable[[str], None] | None,
) -> Iterator[tuple[RangeTask, Range]]:
    if episodes.is_empty():
        return
    key = getattr(plan.estimator, "batch_key", None)
    step_bytes = estimate_bytes_per_step(plan.snapshot, find_columns(plan.estimator).of_steps)
    budget = compute_budget_rows(step_bytes, memory_gb, executor.workers)
    steps = int(episodes["num_steps"].sum())
    rows = None if key == ALL else compute_rows_per_range(steps, budget, executor.workers)
    units = None if key in (None, ALL) else find_batch_units(plan.snapshot, episodes, key)
    judgements = () if task.rewards == ENV_REWARD else ("scores",)
    longest = measure_longest_unit(episodes, units) if rows is not None else steps
    if longest > budget and notice is not None:
        unit = "group" if key is None else "batch"
        notice(
            f"the largest {unit} has {longest:,} steps and is computed whole: about {longest * step_bytes / 1e9:.2g} "
            f"GB, more than the {memory_gb / executor.workers:.2g} GB that --memory leaves each worker. If the machine "
            f"has less, give fewer --workers, or take a smaller {unit}"
        )
    yield from ((task, part) for part in plan_ranges(plan.snapshot, episodes, rows, judgements, units))


def _finish(job: Job, plan: _Plan, changes: GroupChanges, results: list[RangeResult]) -> CreditReport:
    report = IntegrityReport.merge([result.integrity for result in results])
    report.raise_refused()
    unknown = sum((result.unknown for result in results), Counter[str]())
    group_frames = [result.groups for result in results]
    if group_frames:
        hashes = changes.changed.select("group_id", "input_fingerprint")
        # A group without rows in `advantages` counts as a group without episodes.
        job.write("credit_groups", pl.concat(group_frames).join(hashes, on="group_id").with_columns(_EPISODES))
    job.write("credit_groups", make_empty_rows(changes.removed))
    summary = summarise_groups(pl.concat([frame.select(DIAGNOSED) for frame in (changes.unchanged, *group_frames)]))
    alternatives = tuple(suggest_scores(plan.snapshot, plan.episodes)) if Flag.UNSCORED in unknown else ()
    if summary.steps and summary.undefined_steps == summary.steps:
        why = "".join(f"{line}. " for line in ("; ".join(describe_unknown(unknown)), *alternatives) if line)
        msg = (
            f"{plan.estimator.name} defines none of {count_noun(summary.steps, 'advantage')} in "
            f"{count_noun(summary.groups, 'group')}, so the job failed and its rows do not count. "
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
        groups_kept=changes.unchanged.height,
        groups_ended=changes.removed.height,
        steps_computed=rows_out,
        findings=tuple(report.lines()),
        unknown=dict(unknown),
        other_scores=alternatives,
    )
    figures = done.model_dump(mode="json", include={"groups_computed", "groups_kept", "groups_ended"})
    job.counts |= {"rows_in": rows_out, "rows_out": rows_out, "rows_dropped": 0, **figures}
    job.counts |= {**summary.model_dump(mode="json"), **report.counts()}
    return done


def _report_unchanged(plan: _Plan, job: Job, changes: GroupChanges) -> CreditReport:
    """Report unchanged groups; make the series current if another one is, because it ran last."""
    is_current = find_current_series(plan.snapshot) == job.series_id
    if not is_current:
        with job:
            job.counts |= {"rows_in": 0, "rows_out": 0, "groups_computed": 0, "groups_kept": changes.unchanged.height}
    return CreditReport(
        job_id=int(changes.unchanged.sort("ended")["job_id"][-1]),
        series_id=job.series_id,
        skipped=True,
        estimator=plan.estimator,
        scorer_versions=plan.scorer_versions,
        summary=summarise_groups(changes.unchanged),
        groups_kept=changes.unchanged.height,
        made_current=not is_current,
    )
