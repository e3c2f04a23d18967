"""What integrity checks found: by finding for people, by group for the table `credit_groups`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import polars as pl
from pydantic import BaseModel, ConfigDict

from lake.errors import DataRefusedError

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
        lambda row: f"{row['episodes']} for {row['expected']}",
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


class Problem(BaseModel):
    """One finding, over all groups."""

    model_config = ConfigDict(frozen=True, extra="forbid")

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
        """The finding in words.

        Args:
            episodes: that were looked at.
        """
        finding = FINDINGS[self.finding]
        what = finding.what.format(counted=self.counted, episodes=episodes)
        more = ", ..." if self.groups > len(self.examples) else ""
        named = f" ({', '.join(self.examples)}{more})" if self.examples else ""
        groups = "1 group" if self.groups == 1 else f"{self.groups} groups"
        return f"{self.finding}: {what}, in {groups}{named}. {finding.then}"


@dataclass(frozen=True)
class IntegrityReport:
    """What the checks found.

    Attributes:
        checked: groups looked at.
        episodes: their episodes.
        problems: the findings that some group has, by name.
        findings: `group_id`, and `findings`: names joined by commas, sorted. Groups without any are left out. Sorted
            by group_id.
    """

    checked: int
    episodes: int
    problems: tuple[Problem, ...]
    findings: pl.DataFrame

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
        """Stop if a check that refuses has found something.

        Raises:
            DataRefusedError: names the findings, their groups and what to do.
        """
        refused = [problem for problem in self.problems if problem.action == "refuse"]
        if refused:
            told = ". ".join(problem.line(self.episodes) for problem in refused)
            checks = sorted({FINDINGS[problem.finding].check for problem in refused})
            options = " ".join(f"--check {check}=warn" for check in checks)
            msg = f"of {self.checked} groups: {told}. To compute all the same: {options}"
            raise DataRefusedError(msg)


def _joined(problems: list[Problem]) -> Problem:
    """One finding of several reports; as many examples as the report with the most."""
    shown = max(len(problem.examples) for problem in problems)
    examples = [example for problem in problems for example in problem.examples]
    examples.sort(key=lambda example: example.partition(": ")[0])
    groups, counted = (sum(getattr(problem, name) for problem in problems) for name in ("groups", "counted"))
    return problems[0].model_copy(update={"groups": groups, "counted": counted, "examples": tuple(examples[:shown])})
