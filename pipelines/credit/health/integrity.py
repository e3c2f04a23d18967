"""Integrity of groups: what must hold before the members of a group are compared, checked and told.

A baseline over the wrong siblings is silent: groups of one made a whole framework's baseline vanish, and nobody could
see the groups. Each check is off, a warning or a refusal, and what it finds also lands in the group's row of
`credit_groups`. A check whose columns are not there, or are NULL, says nothing: unknown is not wrong.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import polars as pl
from pydantic import BaseModel, Field

from lake import ids
from lake.errors import DataRefusedError
from lake.read.text_table import counted

Action: TypeAlias = Literal["off", "warn", "refuse"]


class Finding(NamedTuple):
    """How a finding is told."""

    check: str
    """The check that makes it: an option of `IntegrityConfig`."""
    what: str
    """What is wrong with its groups; {counted} and {episodes} are filled in."""
    figures: Callable[[dict[str, Any]], str]
    """The figures of one group."""
    then: str
    """What to do, with a command or an option of the command. LAKE stands for the lake."""
    counted: str = ""
    """The figure of a group that {counted} adds up."""


FINDINGS = {
    "broken_steps": Finding(
        "contiguous",
        "episodes with missing or repeated steps",
        lambda row: f"{row['broken']} of {row['episodes']} episodes",
        "Ingest those episodes whole: `trajlake ingest FILE --lake LAKE`",
    ),
    "copied_siblings": Finding(
        "copied_siblings",
        "{counted} of {episodes} episodes are exact copies of a sibling (the same states and actions)",
        lambda row: f"{row['copies']} of {row['episodes']}",
        "They count in means and deviations as if they were independent. To train on one of each: "
        "`trajlake select distinct --filter dedup:by=decisions,within=group --lake LAKE`",
        counted="copies",
    ),
    "incomplete": Finding(
        "complete",
        "fewer episodes than were meant to run",
        lambda row: f"{row['episodes']} of {row['expected']}",
        "Collect the rest, or compute without this check: --check complete=off",
    ),
    "mixed_policies": Finding(
        "mixed_policies",
        "several policies or versions of their weights",
        lambda row: f"{row['policies']} among {row['episodes']} episodes",
        "Usual where collection and training overlap (--check mixed_policies=off). To compare within one version: "
        "`trajlake group fresh --step staleness_cap:max_behind=0 --lake LAKE`, then --grouping fresh",
    ),
    "oversized": Finding(
        "complete",
        "more episodes than were meant to run",
        lambda row: f"{row['episodes']} for {row['meant']}",
        "Look for a run that was ingested twice under two names: "
        "`trajlake sql 'SELECT run_id, count(*) FROM episodes GROUP BY ALL' --lake LAKE`",
    ),
    "several_starts": Finding(
        "one_start",
        "episodes that begin differently (other initial messages, or another first state)",
        lambda row: f"{row['starts']} beginnings of {row['episodes']} episodes",
        "Expected where a simulated user speaks first (--check one_start=off). Otherwise they should not be compared: "
        "--check one_start=refuse",
    ),
    "several_tasks": Finding(
        "one_task",
        "episodes of different tasks",
        lambda row: f"{row['tasks']} tasks",
        "Scores of different tasks are not comparable: leave --grouping out, or group by task (`trajlake group -h`)",
    ),
    "singleton": Finding(
        "singleton",
        "fewer than two scored episodes, so no baseline",
        lambda row: f"{row['scored']} scored of {row['episodes']}",
        "Score them (`trajlake score FILE.py:FUNCTION --lake LAKE`), collect siblings, or compare across runs: "
        "`trajlake group merged --step merge_runs --lake LAKE`, then --grouping merged",
    ),
}
"""Every finding, in alphabetical order."""


_NO_FINDINGS = pl.DataFrame(schema={"group_id": pl.Int64, "findings": pl.String})


class Problem(BaseModel, frozen=True, extra="forbid"):
    """One finding, over all groups."""

    finding: str
    """Its name."""
    action: Action
    """What the configuration says about it."""
    groups: int
    """Groups that have it."""
    counted: int = 0
    """Over these groups, what the finding counts beside groups; 0 if nothing."""
    examples: tuple[str, ...]
    """The first of them, by id: the task, and the figures."""

    def line(self, episodes: int) -> str:
        """The finding in words; `episodes` were looked at."""
        finding = FINDINGS[self.finding]
        what = finding.what.format(counted=self.counted, episodes=episodes)
        more = ", ..." if self.groups > len(self.examples) else ""
        named = f" ({', '.join(self.examples)}{more})" if self.examples else ""
        return f"{self.finding}: {what}, in {counted(self.groups, 'group')}{named}. {finding.then}"


@dataclass(frozen=True)
class IntegrityReport:
    """What the checks found."""

    checked: int
    """Groups looked at."""
    episodes: int
    problems: tuple[Problem, ...]
    """The findings that some group has, by name."""
    findings: pl.DataFrame
    """`group_id`, and `findings`: names joined by commas, sorted; groups without any left out. Sorted by group_id."""

    @classmethod
    def merged(cls, reports: Sequence["IntegrityReport"]) -> "IntegrityReport":
        """The report over all groups of several reports, of which no two share a group; of none, an empty one."""
        by_finding: dict[str, list[Problem]] = {}
        for problem in (problem for report in reports for problem in report.problems):
            by_finding.setdefault(problem.finding, []).append(problem)
        return cls(
            checked=sum(report.checked for report in reports),
            episodes=sum(report.episodes for report in reports),
            problems=tuple(_joined(by_finding[name]) for name in sorted(by_finding)),
            findings=pl.concat([report.findings for report in reports] or [_NO_FINDINGS]).sort("group_id"),
        )

    def counts(self) -> dict[str, int]:
        """Groups by finding, and what findings count beside them (`copies`: episodes)."""
        counted = {FINDINGS[problem.finding].counted: problem.counted for problem in self.problems if problem.counted}
        return {problem.finding: problem.groups for problem in self.problems} | counted

    def lines(self) -> list[str]:
        """One sentence per finding."""
        return [problem.line(self.episodes) for problem in self.problems]

    def raise_refused(self) -> None:
        """DataRefusedError if a check that refuses has found something: the findings, their groups, what to do."""
        refused = [problem for problem in self.problems if problem.action == "refuse"]
        if refused:
            lines = ". ".join(problem.line(self.episodes) for problem in refused)
            checks = sorted({FINDINGS[problem.finding].check for problem in refused})
            options = " ".join(f"--check {check}=warn" for check in checks)
            msg = f"of {counted(self.checked, 'group')}: {lines}. To compute all the same: {options}"
            raise DataRefusedError(msg)


def _joined(problems: list[Problem]) -> Problem:
    """One finding of several reports; as many examples as the report with the most."""
    shown = max(len(problem.examples) for problem in problems)
    examples = [example for problem in problems for example in problem.examples]
    examples.sort(key=lambda example: example.partition(": ")[0])
    groups, counted = (sum(getattr(problem, name) for problem in problems) for name in ("groups", "counted"))
    return problems[0].model_copy(update={"groups": groups, "counted": counted, "examples": tuple(examples[:shown])})


_UNKNOWN = pl.lit(None, pl.UInt32)
_WRONG = {
    "broken_steps": pl.col("broken") > 0,
    "copied_siblings": pl.col("copies") > 0,
    "incomplete": pl.col("episodes") < pl.col("expected"),
    "mixed_policies": pl.col("policies") > 1,
    "oversized": pl.col("episodes") > pl.col("meant"),
    "several_starts": pl.col("starts") > 1,
    "several_tasks": pl.col("tasks") > 1,
    "singleton": pl.col("scored") < 2,
}
"""Finding -> whether a group has it, by the group's figures."""
_NAMING = (pl.when(pl.col("task").is_null()).then(0).when(pl.col("tasks") == 1).then(1).otherwise(2), pl.col("task"))
"""The order of the names that `_named` gives."""


class IntegrityConfig(BaseModel, frozen=True, extra="forbid"):
    """What to check, and what to do about it."""

    complete: Action = "warn"
    """As many episodes as the collector meant to run (`expected_group_size`). Findings: `incomplete`, `oversized`."""
    one_task: Action = "refuse"
    """All episodes of the group are of one task. Finding: `several_tasks`."""
    one_start: Action = "warn"
    """All begin with the same messages and the same first state. Finding: `several_starts`."""
    singleton: Action = "warn"
    """Two or more episodes have a score: below that there is no baseline. Finding: `singleton`."""
    contiguous: Action = "refuse"
    """Steps are 0, 1, 2, ... and as many as the episode says. Estimators refuse the first gap they meet in any case;
    here all groups with one are named. Finding: `broken_steps`."""
    copied_siblings: Action = "warn"
    """No episode is the exact copy of a sibling: the same states and the same actions, in order. Looked at where an
    estimator with anchors reads the actions (`--purity`). Finding: `copied_siblings`."""
    mixed_policies: Action = "warn"
    """All episodes come from one policy and one version of its weights. Finding: `mixed_policies`."""
    expected_group_size: int | None = Field(default=None, ge=1)
    """Size every group must have, in place of what the collector recorded."""
    examples: int = Field(default=3, ge=0)
    """Groups named per finding."""


def check_groups(
    episodes: pl.LazyFrame, steps: pl.LazyFrame | None = None, config: IntegrityConfig | None = None
) -> IntegrityReport:
    """Check the groups of a credit job, whole ones at a time; reports of several calls can be merged.

    Args:
        episodes: one row per episode: `episode_id`, `group_id` (the one the job uses), and where known `task_id`,
            `expected_group_size`, `spare` (siblings beyond it that were meant to run as well), `policy`,
            `policy_version`, `num_steps`, `initial_messages`, `episode_score`.
        steps: all their steps, inactive ones included: `episode_id`, `step_index`, and where known `state_hash`; or
            `ranges.episode_figures` of them, which is needed to find copies.
        config: what to check.
    """
    config = config or IntegrityConfig()
    groups = _figures(episodes, steps, config).collect().sort("group_id")
    actions: dict[str, Action] = {name: getattr(config, finding.check) for name, finding in FINDINGS.items()}
    problems = []
    for name in (name for name, action in actions.items() if action != "off"):
        affected = groups.filter(_WRONG[name])
        if affected.height:
            rows = affected.sort(*_NAMING, "group_id").head(config.examples).iter_rows(named=True)
            shown = tuple(f"{_named(row)}: {FINDINGS[name].figures(row)}" for row in rows)
            counted = FINDINGS[name].counted
            problems.append(
                Problem(
                    finding=name,
                    action=actions[name],
                    groups=affected.height,
                    counted=int(affected[counted].sum()) if counted else 0,
                    examples=shown,
                )
            )
    names = [pl.when(_WRONG[problem.finding]).then(pl.lit(problem.finding)) for problem in problems]
    joined = pl.concat_str(pl.lit(None, pl.String), *names, separator=",", ignore_nulls=True).alias("findings")
    findings = groups.select("group_id", joined).filter(pl.col("findings") != "")
    return IntegrityReport(groups.height, int(groups["episodes"].sum()), tuple(problems), findings)


def _figures(episodes: pl.LazyFrame, steps: pl.LazyFrame | None, config: IntegrityConfig) -> pl.LazyFrame:
    """What the checks compare, one row per group; NULL where it is not known."""
    table = _episode_figures(episodes, steps)
    present = table.collect_schema().names()

    def distinct(*names: str) -> pl.Expr:
        """Most distinct known values of a column."""
        counts = [pl.col(name).drop_nulls().n_unique() for name in names if name in present]
        return pl.max_horizontal(*counts) if counts else _UNKNOWN

    known_decisions = pl.col("decisions").drop_nulls()
    expected = pl.col("expected_group_size").max() if "expected_group_size" in present else _UNKNOWN
    if config.expected_group_size is not None:
        expected = pl.lit(config.expected_group_size)
    is_oversampled = config.expected_group_size is None and "spare" in present
    spare = pl.col("spare").max().fill_null(0) if is_oversampled else pl.lit(0)
    return table.group_by("group_id").agg(
        pl.len().alias("episodes"),
        expected.alias("expected"),
        (expected.cast(pl.Int64) + spare.cast(pl.Int64)).alias("meant"),
        (pl.col("broken").sum() if "broken" in present else _UNKNOWN).alias("broken"),
        distinct("policy", "policy_version").alias("policies"),
        distinct("initial_messages", "first_state").alias("starts"),
        distinct("task_id").alias("tasks"),
        (pl.col("task_id").drop_nulls().min() if "task_id" in present else pl.lit(None, pl.String)).alias("task"),
        (known_decisions.len() - known_decisions.n_unique() if "decisions" in present else _UNKNOWN).alias("copies"),
        (pl.col("episode_score").count() if "episode_score" in present else pl.len()).alias("scored"),
    )


def _episode_figures(episodes: pl.LazyFrame, steps: pl.LazyFrame | None) -> pl.LazyFrame:
    """Episodes with, where known, `first_state` and `broken`: whether their steps are anything but 0, 1, 2, ..."""
    if steps is not None:
        episodes = episodes.join(_step_figures(steps), on="episode_id", how="left")
    present = episodes.collect_schema().names()
    if "initial_messages" in present:
        # Hashed at once, so that no text is kept (NULL has a hash too). The hash serves within this one query only.
        messages = pl.col("initial_messages")
        episodes = episodes.with_columns(pl.when(messages.is_not_null()).then(messages.hash()))
    if steps is not None:
        count = pl.col("count").fill_null(0)
        broken = (count > 0) & ((pl.col("first") != 0) | (pl.col("last") + 1 != count) | (pl.col("distinct") != count))
        if "num_steps" in present:
            broken |= (count != pl.col("num_steps")).fill_null(value=False)
        episodes = episodes.with_columns(broken.alias("broken"))
    return episodes


def _step_figures(steps: pl.LazyFrame) -> pl.LazyFrame:
    """Per episode: how its steps are numbered, and the hash of its first state; as it is, if that is what is given."""
    if "distinct" in steps.collect_schema():
        return steps
    index = pl.col("step_index")
    figures = [
        pl.len().alias("count"),
        index.min().alias("first"),
        index.max().alias("last"),
        index.n_unique().alias("distinct"),
    ]
    if "state_hash" in steps.collect_schema():
        steps = steps.with_columns(pl.when(index == 0).then("state_hash").alias("first_state"))
        figures.append(pl.col("first_state").max())
    return steps.group_by("episode_id").agg(figures)


def _named(row: dict[str, Any]) -> str:
    """A group as people call it: by its task, and by its id only where that is not known."""
    if row["task"] is not None:
        return f"task {row['task']}" if row["tasks"] == 1 else f"tasks {row['task']}, ..."
    group_id = row["group_id"]
    return f"group {ids.to_text(group_id) if isinstance(group_id, int) and 0 <= group_id <= ids.MASK else group_id}"
