"""The credit job: compute the advantages of changed groups with an estimator and write them to `advantages`.

`run_credit` resolves the configuration, reads the inputs (`inputs.py`), computes the changed groups range by range in
bounded memory on an executor, and writes. Each range commits under a separate write_id. The job's terminal row makes
all of them visible; without it none is visible. A range may run in another process or on another machine, and more than
once. Its task holds all its inputs, and its rows count when the job takes its result.
"""

import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl
from pydantic import BaseModel, Field, SerializeAsAny, ValidationError

from lake.errors import DataRefusedError, UsageError
from lake.execution.executor import Executor
from lake.execution.local import LocalExecutor
from lake.judgements.credit import find_current_series
from lake.judgements.scores import ENV_RETURN, read_episode_scores
from lake.judgements.selections import select_where
from lake.lake import Lake
from lake.locked.query import parse_size
from lake.progress import track
from lake.read.parquet import collect_rows
from lake.read.text_table import count_noun
from lake.settings import describe_faults, read_section
from lake.write.jobs import Job, JobPart, WrittenRows
from pipelines.credit.estimators import find_estimator
from pipelines.credit.estimators.protocol import PRESETS, Estimator, Flag, count_unknown, describe_unknown
from pipelines.credit.health import (
    DIAGNOSED,
    CreditDiagnosis,
    IntegrityConfig,
    IntegrityReport,
    check_groups,
    diagnose,
    diagnose_groups,
    select_step_facts,
)
from pipelines.credit.inputs import (
    ENV_REWARD,
    MEMORY_GB,
    REWARD_JOB,
    VALUE_JOB,
    CreditConfig,
    CreditInputs,
    GroupChanges,
    Range,
    SiblingChoice,
    Sources,
    arrange_steps,
    cut_ranges,
    find_changes,
    hash_inputs,
    make_empty_rows,
    measure_episodes,
    read_inputs,
    read_rows,
    suggest_scores,
)
from pipelines.credit.step_log import LOG, log_steps
from pipelines.credit.steps import COMPONENT, InputNeeds

KIND = "credit"
_START = "initial_messages"
_CHECKED = ("task_id", "expected_group_size", "policy", "policy_version", _START)
"""Columns of `episodes` that the integrity checks look at."""
_PURITY_COLUMNS = ("state_is_error", "state_hash", "action", "tool_calls")
"""Columns of `steps` for the quality of shared anchors; texts are hashed while they are read."""
_HAS_EPISODES = pl.when(pl.col("steps") > 0).then("episodes").otherwise(0).alias("episodes")


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

    A group has changed if its newest rows in the series have other episodes, scores, parameters or checks. An
    estimator with a `batch_key` computes all groups if any changed.

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
        siblings: compared episodes of a group collected with `oversample`: those that `keep` kept, or all.
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
    sources = Sources(where=where, only=only, score=score, rewards=rewards, grouping=grouping, siblings=siblings)
    config = CreditConfig.resolve(estimator, sources, integrity or IntegrityConfig(), purity=purity)
    inputs = read_inputs(lake.snapshot(), config, notice)
    if log_episodes is not None:
        # Report an invalid predicate before the computation.
        select_where(inputs.snapshot, ("episode_id",), log_episodes, "--log-episodes", may_be_empty=True)
    job = _open_job(lake, config, inputs)
    changes = find_changes(inputs.snapshot, job.series_id, inputs.groups, partial=only is not None, force=force)
    if changes.is_empty:
        report = _report_unchanged(job, config, inputs, changes)
    else:
        executor = executor or LocalExecutor()
        with job:
            task = RangeTask(
                estimator=config.estimator,
                needs=config.needs,
                step_columns=config.step_columns,
                episode_columns=config.episode_columns,
                rewards=config.sources.rewards,
                integrity=config.integrity,
                purity=config.purity and hasattr(config.estimator, "anchors"),
                part=job.part(),
            )
            parts = cut_ranges(config, inputs, changes.changed, executor.workers, memory_gb, notice)
            ranges = []
            with track(f"advantages by {estimator.name}", changes.changed.height, "groups") as stage:
                for computed in executor.map(run_range, ((task, part) for part in parts)):
                    if computed.written is not None:
                        job.take(computed.written)
                    ranges.append(computed)
                    stage.advance(computed.groups.height)
            report = _finish(job, config, inputs, changes, ranges)
    if LOG.isEnabledFor(logging.DEBUG):
        snapshot = lake.snapshot()
        scores = inputs.scores
        if scores is None:
            scores = read_episode_scores(snapshot, ENV_RETURN)
        log_steps(snapshot, report.series_id, scores, where=log_episodes)
    return report


def _open_job(lake: Lake, config: CreditConfig, inputs: CreditInputs) -> Job:
    sources, estimator = config.sources, config.estimator
    series = {
        "estimator": estimator.name,
        "config": estimator.model_dump(mode="json"),
        "score": sources.score,
        "rewards": sources.rewards,
        "grouping": sources.grouping,
        # Another version of a reward is another series: values of two versions are never mixed.
        "scorer_versions": inputs.scorer_versions,
        "where": sources.where,
    }
    if sources.siblings != "kept":
        # The default is omitted, so that series from before this option stay the same.
        series["siblings"] = sources.siblings
    return lake.job(
        kind=KIND,
        parameters=series | {"only": sources.only, "options": estimator.model_dump(mode="json", exclude_defaults=True)},
        series=series,
        code=config.code,
        fingerprint=hash_inputs(inputs.groups, where=sources.where, only=sources.only),
        snapshot=inputs.snapshot,
    )


@dataclass(frozen=True, slots=True)
class RangeTask:
    """Parameters that all ranges of a job share; they may travel to other processes."""

    estimator: Estimator
    needs: InputNeeds
    step_columns: tuple[str, ...]
    episode_columns: tuple[str, ...]
    rewards: str
    """Source of the step rewards: `env_reward`, or a scorer."""
    integrity: IntegrityConfig
    purity: bool
    part: JobPart


@dataclass(frozen=True, slots=True)
class RangeResult:
    """Result of a range."""

    written: WrittenRows | None
    groups: pl.DataFrame
    """Rows of `credit_groups` without `health.JOB_COLUMNS`."""
    integrity: IntegrityReport
    unknown: Counter[str]
    """Steps without an advantage, by reason."""


def run_range(item: tuple[RangeTask, Range]) -> RangeResult:
    """Compute and write the advantages of a range; ContractError for steps that break the estimator's contract."""
    task, part = item
    steps, episodes = read_range(task, part)
    rows = task.estimator.advantages(steps.lazy()).collect()
    compared = episodes
    if task.needs.components:
        # These are compared, whether or not the episodes have a return: one of them missing leaves an episode unscored.
        total = pl.sum_horizontal([COMPONENT + name for name in task.needs.components], ignore_nulls=False)
        compared = episodes.with_columns(episode_score=total)
    report = check_groups(compared.lazy(), measure_episodes(steps).lazy(), task.integrity)
    runs = episodes["run_id"].unique()
    if len(runs) == 1:
        rows_of_runs = rows.with_columns(run_id=pl.lit(runs[0]))
    else:
        run_ids = episodes.select("episode_id", "run_id")
        rows_of_runs = rows.join(run_ids, on="episode_id", how="left", maintain_order="left")
    written = task.part.write("advantages", rows_of_runs.with_columns(defined=pl.col("advantage").is_not_null()))
    facts = None
    if task.purity and rows["anchor_key"].null_count() < rows.height:
        facts = steps.lazy().select("episode_id", "step_index", *select_step_facts(steps.columns))
    groups = diagnose_groups(rows.lazy(), episodes.lazy(), facts, report.findings)
    return RangeResult(written, collect_rows(groups), report, count_unknown(rows))


def read_range(task: RangeTask, part: Range) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Read the estimator's input, and the range's episodes with the columns that checks need."""
    options = task.part.objects.polars_options
    episodes = part.episodes
    extras = [name for name in dict.fromkeys((*task.episode_columns, *_CHECKED)) if name not in episodes.columns]
    # Hash while reading to hold no text. The hash is valid in this range only.
    start_hash = pl.when(pl.col(_START).is_not_null()).then(pl.col(_START).hash()).alias(_START)
    expressions = [start_hash if name == _START and name not in task.episode_columns else name for name in extras]
    read = read_rows("episodes", part.files["episodes"], options, ("episode_id", *expressions), episodes)
    episodes = episodes.join(read, on="episode_id", how="left", maintain_order="left")
    facts = select_step_facts(_PURITY_COLUMNS) if task.purity else []
    fact_names = [expression.meta.output_name() for expression in facts]
    of_steps = [name for name in task.step_columns if name not in fact_names]
    steps = read_rows("steps", part.files["steps"], options, (*of_steps, *facts), episodes)
    episode_columns = ["episode_score", *(COMPONENT + name for name in task.needs.components), *task.episode_columns]
    if (episodes["status"] != "completed").any():  # an absent column means completed
        episode_columns.append("status")
    steps = arrange_steps(steps, episodes, list(dict.fromkeys(episode_columns)))
    of_rewards = None if task.rewards == ENV_REWARD else task.rewards
    for column, scorer, job in (("reward", of_rewards, REWARD_JOB), ("value_estimate", task.needs.values, VALUE_JOB)):
        if scorer is None:
            continue
        # A scorer's scores replace the column; NULL for steps without a score.
        scores = read_rows(
            "scores",
            part.files["scores"],
            options,
            ("episode_id", "step_index", "job_id", "value"),
            part.episodes,
            keep=(pl.col("scorer") == scorer.partition("@")[0]) & pl.col("step_index").is_not_null(),
        )
        jobs = part.episodes.select("episode_id", job_id=job)
        scores = scores.join(jobs, on=["episode_id", "job_id"], how="semi")
        scores = scores.select("episode_id", "step_index", pl.col("value").alias(column))
        steps = steps.drop(column).join(scores, on=["episode_id", "step_index"], how="left", maintain_order="left")
    return steps, episodes


def _finish(
    job: Job, config: CreditConfig, inputs: CreditInputs, changes: GroupChanges, ranges: list[RangeResult]
) -> CreditReport:
    """Write the rows of `credit_groups` and report; DataRefusedError if a check refuses or no advantage is defined."""
    report = IntegrityReport.merge([computed.integrity for computed in ranges])
    report.raise_refused()
    unknown = sum((computed.unknown for computed in ranges), Counter[str]())
    group_frames = [computed.groups for computed in ranges]
    if group_frames:
        hashes = changes.changed.select("group_id", "input_fingerprint")
        # A group without rows in `advantages` counts as a group without episodes.
        job.write("credit_groups", pl.concat(group_frames).join(hashes, on="group_id").with_columns(_HAS_EPISODES))
    job.write("credit_groups", make_empty_rows(changes.removed))
    summary = _summarise_groups(pl.concat([frame.select(DIAGNOSED) for frame in (changes.unchanged, *group_frames)]))
    has_alternatives = Flag.UNSCORED in unknown and not getattr(config.estimator, "components", None)
    alternatives = tuple(suggest_scores(inputs.snapshot, inputs.episodes)) if has_alternatives else ()
    if summary.steps and summary.undefined_steps == summary.steps:
        why = "".join(f"{line}. " for line in ("; ".join(describe_unknown(unknown)), *alternatives) if line)
        msg = (
            f"{config.estimator.name} defines none of {count_noun(summary.steps, 'advantage')} in "
            f"{count_noun(summary.groups, 'group')}, so the job failed and its rows do not count. "
            f"{why}Give the estimator what it needs, or take another: `trajlake credit -h`"
        )
        raise DataRefusedError(msg)
    rows_out = sum(computed.written.rows for computed in ranges if computed.written is not None)
    done = CreditReport(
        job_id=job.job_id,
        series_id=job.series_id,
        skipped=False,
        estimator=config.estimator,
        scorer_versions=inputs.scorer_versions,
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


def _report_unchanged(job: Job, config: CreditConfig, inputs: CreditInputs, changes: GroupChanges) -> CreditReport:
    """Report unchanged groups; make the series current if another one is, because it ran last."""
    is_current = find_current_series(inputs.snapshot) == job.series_id
    if not is_current:
        with job:
            job.counts |= {"rows_in": 0, "rows_out": 0, "groups_computed": 0, "groups_kept": changes.unchanged.height}
    return CreditReport(
        job_id=int(changes.unchanged.sort("ended")["job_id"][-1]),
        series_id=job.series_id,
        skipped=True,
        estimator=config.estimator,
        scorer_versions=inputs.scorer_versions,
        summary=_summarise_groups(changes.unchanged),
        groups_kept=changes.unchanged.height,
        made_current=not is_current,
    )


def _summarise_groups(groups: pl.DataFrame) -> CreditDiagnosis:
    """Add up a job's figures from one row of `credit_groups` per group."""
    return diagnose(groups.lazy().filter(pl.col("steps") > 0))


def choose_step_source(
    lake: Lake, estimator: Estimator, where: str | None, score: str, rewards: str = ENV_REWARD
) -> Estimator:
    """Return the estimator with the step source that the recorded data supports.

    If no step of the episodes has a reward, the episode score becomes the reward of the last step, for the whole job.
    An estimator without this option is returned unchanged.
    """
    if "step_source" not in type(estimator).model_fields:
        return estimator
    if rewards == ENV_REWARD:
        snapshot = lake.snapshot()
        episodes = select_where(snapshot, ("episode_id",), where)
        rewarded = snapshot.scan("steps").filter(pl.col("reward").is_not_null()).select("episode_id")
        if collect_rows(rewarded.join(episodes.lazy(), on="episode_id", how="semi").head(1)).is_empty():
            return estimator.model_copy(update={"step_source": "terminal_score"})
    return estimator.model_copy(update={"step_source": "rewards"})


@dataclass(frozen=True, slots=True)
class ChosenCredit:
    """Options of a credit job, resolved from settings, a file and the recorded data."""

    estimator: Estimator
    integrity: IntegrityConfig
    is_terminal: bool
    """Whether no step has a reward, so that the episode score becomes the last step's reward."""


_ANCHORS = (
    ". A definition of anchors is easier to write in a file: anchors = {...} under [credit.NAME] for --config FILE; "
    "`trajlake anchors --anchors FILE` tests one, as JSON"
)


def configure_credit(
    lake: Lake,
    name: str,
    settings: Mapping[str, Any],
    *,
    config_file: str | None = None,
    preset: str | None = None,
    checks: Mapping[str, Any] | None = None,
    where: str | None = None,
    score: str = ENV_RETURN,
    rewards: str = ENV_REWARD,
) -> ChosenCredit:
    """Resolve the options of an estimator: settings over the file over a preset over what the data supports.

    Args:
        name: the estimator.
        settings: its options.
        config_file: TOML file with [credit.NAME] and [credit.integrity].
        preset: options of other code.
        checks: actions of integrity checks.

    Raises:
        UsageError: an unknown estimator, preset or option, or a wrong value.
    """
    model = find_estimator(name)
    options = _read_options(config_file, name, settings, list(model.model_fields))
    below: Mapping[str, Any] = {}
    if preset is not None:
        presets = PRESETS.get(name, {})
        if preset not in presets:
            raise UsageError(f"{name} has no preset {preset!r}; valid: {', '.join(presets) or 'none'}")
        below = presets[preset]
    estimator: Estimator = _validate_model(model, {**below, **options}, name)
    actions = _read_options(config_file, "integrity", checks or {}, list(IntegrityConfig.model_fields))
    integrity: IntegrityConfig = _validate_model(IntegrityConfig, actions, "credit.integrity")
    if "step_source" in options or options.get("episode_source", "score") != "score":
        return ChosenCredit(estimator, integrity, is_terminal=False)
    estimator = choose_step_source(lake, estimator, where, score, rewards)
    is_terminal = getattr(estimator, "step_source", None) == "terminal_score"
    if is_terminal:
        # A preset's sum of rewards would then be the score.
        estimator = estimator.model_copy(update={"episode_source": "score"})
    return ChosenCredit(estimator, integrity, is_terminal)


def _read_options(
    config_file: str | None, section: str, settings: Mapping[str, Any], valid: list[str]
) -> dict[str, Any]:
    """Read options from the file, overridden by settings."""
    options = read_section(config_file, ("credit", section)) if config_file else {}
    if unknown := set(options) - set(valid):
        msg = f"{config_file}: [credit.{section}] has unknown options {sorted(unknown)}; valid: {', '.join(valid)}"
        raise UsageError(msg)
    return options | dict(settings)


def _validate_model(model: Any, options: dict[str, Any], name: str) -> Any:
    try:
        return model.model_validate(options)
    except ValidationError as error:
        advice = _ANCHORS if any("anchors" in fault["loc"] for fault in error.errors()) else ""
        msg = f"{name}: {describe_faults(error)}. Options: {', '.join(model.model_fields)}{advice}"
        raise UsageError(msg) from error


def parse_gigabytes(limit: str) -> float:
    """Convert a size to GB (10^9 bytes); a bare number is in GB. Raises UsageError: no size, or not above 0."""
    gigabytes = parse_size(f"{limit}GB" if re.fullmatch(r"[\d.]+", limit) else limit) / 1e9
    if not gigabytes:
        raise UsageError(f"--memory-limit {limit} is not above 0; write for example 2GB")
    return gigabytes
