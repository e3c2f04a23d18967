"""One range of a credit job: its steps in, its advantages written, what it found out given back.

A range runs in the job's own process, in another one or on another machine, perhaps twice; nothing it needs is outside
its task, and nothing it writes counts before the job takes its answer.
"""

from collections import Counter
from dataclasses import dataclass

import polars as pl

from lake.errors import UsageError
from lake.read.parquet import collected
from lake.tables import TABLES
from lake.write.parts import JobPart, Written
from pipelines.credit.estimators.protocol import Estimator
from pipelines.credit.flags import count_unknown
from pipelines.credit.health.groups import group_diagnostics, seen_at_steps
from pipelines.credit.health.integrity import IntegrityConfig, IntegrityReport, check_groups
from pipelines.credit.inputs.columns import COMPONENT, InputNeeds
from pipelines.credit.inputs.episodes import ENV_REWARD, REWARD_JOB
from pipelines.credit.inputs.ranges import Range, arranged, episode_figures, read_rows

_START = "initial_messages"
_CHECKED = ("task_id", "expected_group_size", "policy", "policy_version", _START)
"""Columns of `episodes` that the integrity checks look at."""
PURITY_COLUMNS = ("state_is_error", "state_hash", "action", "tool_calls")
"""Columns of `steps` that tell what shared anchors are worth; texts among them are hashed while they are read."""
_STEP_COLUMNS = ("episode_id", "step_index", "reward", "is_active", "is_action_valid")


@dataclass(frozen=True, slots=True)
class Task:
    """What every range of a job shares."""

    estimator: Estimator
    integrity: IntegrityConfig
    rewards: str
    """Step rewards: `env_reward`, or the scorer whose values they are."""
    purity: bool
    """Look at the actions and error texts of shared anchors."""
    part: JobPart

    @property
    def looks_at_anchors(self) -> bool:
        """Whether what was done and seen at each step is asked for, and there are states to look at."""
        return self.purity and hasattr(self.estimator, "anchors")


@dataclass(frozen=True, slots=True)
class RangeResult:
    """What a range wrote and found."""

    written: Written | None
    groups: pl.DataFrame
    """Rows of `credit_groups`, without those columns that the job fills in."""
    integrity: IntegrityReport
    unknown: Counter[str]
    """Steps without an advantage, by reason."""


@dataclass(frozen=True, slots=True)
class Columns:
    """What is read of a lake for an estimator."""

    needs: InputNeeds
    of_steps: tuple[str, ...]
    of_episodes: tuple[str, ...]


def columns_read(estimator: Estimator) -> Columns:
    """The columns of `steps` and of `episodes` that an estimator needs; UsageError if there is no such column.

    A name that both tables have is the step's, unless the estimator asks for the episode's.
    """
    in_steps = TABLES["steps"].names
    needs = estimator.needed([*in_steps, *(name for name in TABLES["episodes"].names if name not in in_steps)])
    wanted = dict.fromkeys((*needs.step_columns, *needs.anchor_columns))
    of_steps = [name for name in wanted if name in in_steps and name not in needs.episode_columns]
    of_episodes = [*(name for name in wanted if name not in of_steps), *needs.episode_columns]
    if unknown := [name for name in of_episodes if name not in TABLES["episodes"].names]:
        msg = f"{estimator.name}: no column {', '.join(unknown)}; valid: {', '.join(TABLES['episodes'].names)}"
        raise UsageError(msg)
    return Columns(
        needs,
        tuple(dict.fromkeys((*_STEP_COLUMNS, "state_hash", *of_steps))),
        tuple(name for name in dict.fromkeys(of_episodes) if name not in (*_STEP_COLUMNS, "group_id")),
    )


def run_range(item: tuple[Task, Range]) -> RangeResult:
    """Compute and write the advantages of a range; ContractError for steps that break the estimator's contract."""
    task, part = item
    steps, episodes = read_range(task, part)
    rows = task.estimator.advantages(steps.lazy()).collect()
    report = check_groups(episodes.lazy(), episode_figures(steps).lazy(), task.integrity)
    written = task.part.write(
        "advantages", _with_runs(rows, episodes).with_columns(defined=pl.col("advantage").is_not_null())
    )
    seen = None
    if task.looks_at_anchors and rows["anchor_key"].null_count() < rows.height:
        seen = steps.lazy().select("episode_id", "step_index", *seen_at_steps(steps.columns))
    groups = group_diagnostics(rows.lazy(), episodes.lazy(), seen, report.findings)
    return RangeResult(written, collected(groups), report, count_unknown(rows))


def read_range(task: Task, part: Range) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The estimator's input, and the range's episodes with everything that is known of them."""
    options = task.part.objects.polars_options
    columns = columns_read(task.estimator)
    episodes = part.episodes
    extras = [name for name in dict.fromkeys((*columns.of_episodes, *_CHECKED)) if name not in episodes.columns]
    # Hashed while it is read, so that no text is kept. The hash serves within one range only.
    hashed = pl.when(pl.col(_START).is_not_null()).then(pl.col(_START).hash()).alias(_START)
    asked = [hashed if name == _START and name not in columns.of_episodes else name for name in extras]
    read = read_rows("episodes", part.files["episodes"], options, ("episode_id", *asked), episodes)
    episodes = episodes.join(read, on="episode_id", how="left", maintain_order="left")
    seen = seen_at_steps(PURITY_COLUMNS) if task.looks_at_anchors else []
    of_steps = [name for name in columns.of_steps if name not in [expression.meta.output_name() for expression in seen]]
    steps = read_rows("steps", part.files["steps"], options, (*of_steps, *seen), episodes)
    given = ["episode_score", *(COMPONENT + name for name in columns.needs.components), *columns.of_episodes]
    if (episodes["status"] != "completed").any():  # a column that is absent means completed
        given.append("status")
    steps = arranged(steps, episodes, list(dict.fromkeys(given)))
    if task.rewards != ENV_REWARD:
        steps = _with_scored_rewards(task, part, steps)
    return steps, episodes


def _with_scored_rewards(task: Task, part: Range, steps: pl.DataFrame) -> pl.DataFrame:
    """The steps with a scorer's values as rewards; NULL for steps that it did not score."""
    wanted = part.episodes.select("episode_id", pl.col(REWARD_JOB).alias("job_id"))
    scores = read_rows(
        "scores",
        part.files["scores"],
        task.part.objects.polars_options,
        ("episode_id", "step_index", "job_id", "value"),
        part.episodes,
        keep=(pl.col("scorer") == task.rewards.partition("@")[0]) & pl.col("step_index").is_not_null(),
    )
    values = scores.join(wanted, on=["episode_id", "job_id"], how="semi").select("episode_id", "step_index", "value")
    joined = steps.drop("reward").join(values, on=["episode_id", "step_index"], how="left", maintain_order="left")
    return joined.rename({"value": "reward"})


def _with_runs(rows: pl.DataFrame, episodes: pl.DataFrame) -> pl.DataFrame:
    runs = episodes["run_id"].unique()
    if len(runs) == 1:
        return rows.with_columns(run_id=pl.lit(runs[0]))
    of_episodes = episodes.select("episode_id", "run_id")
    return rows.join(of_episodes, on="episode_id", how="left", maintain_order="left")
