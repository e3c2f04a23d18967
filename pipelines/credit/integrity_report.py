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
    """What is wrong with its groups."""
    figures: Callable[[dict[str, Any]], str]
    """The figures of one group."""
    then: str
    """What to do."""


FINDINGS = {
    "broken_steps": Finding(
        "contiguous",
        "episodes with missing or repeated steps",
        lambda row: f"{row['broken']} of {row['episodes']} episodes",
        "ingest those episodes whole",
    ),
    "incomplete": Finding(
        "complete",
        "fewer episodes than were meant to run",
        lambda row: f"{row['episodes']} of {row['expected']}",
        "collect the rest, or leave these groups out",
    ),
    "mixed_policies": Finding(
        "mixed_policies",
        "several policies or versions of their weights",
        lambda row: f"{row['policies']} among {row['episodes']} episodes",
        "usual in asynchronous collection; else group by version",
    ),
    "oversized": Finding(
        "complete",
        "more episodes than were meant to run",
        lambda row: f"{row['episodes']} for {row['expected']}",
        "look for a run that was ingested under two names",
    ),
    "several_starts": Finding(
        "one_start",
        "different beginnings",
        lambda row: f"{row['starts']} starts of {row['episodes']} episodes",
        "usual with a simulated user; else these are no siblings",
    ),
    "several_tasks": Finding(
        "one_task",
        "episodes of different tasks",
        lambda row: f"{row['tasks']} tasks",
        "group by task: scores of different tasks are not comparable",
    ),
    "singleton": Finding(
        "singleton",
        "fewer than two scored episodes, so no baseline",
        lambda row: f"{row['scored']} scored of {row['episodes']}",
        "score or collect siblings, or look at how the groups are keyed",
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
    examples: tuple[str, ...]
    """The first of them, by id: the id as people see it, and the figures."""

    def line(self) -> str:
        """The finding in words."""
        finding = FINDINGS[self.finding]
        more = ", ..." if self.groups > len(self.examples) else ""
        named = f" ({', '.join(self.examples)}{more})" if self.examples else ""
        groups = "1 group" if self.groups == 1 else f"{self.groups} groups"
        return f"{self.finding}: {finding.what}, in {groups}{named}; {finding.then}"


@dataclass(frozen=True)
class IntegrityReport:
    """What the checks found.

    Attributes:
        checked: groups looked at.
        problems: the findings that some group has, by name.
        findings: `group_id`, and `findings`: names joined by commas, sorted. Groups without any are left out. Sorted
            by group_id.
    """

    checked: int
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
            problems=tuple(_joined(by_finding[name]) for name in sorted(by_finding)),
            findings=pl.concat([report.findings for report in reports] or [_NO_FINDINGS]).sort("group_id"),
        )

    def counts(self) -> dict[str, int]:
        """Groups by finding."""
        return {problem.finding: problem.groups for problem in self.problems}

    def lines(self) -> list[str]:
        """One sentence per finding."""
        return [problem.line() for problem in self.problems]

    def raise_refused(self) -> None:
        """Stop if a check that refuses has found something.

        Raises:
            DataRefusedError: names the findings, their groups and what to do.
        """
        refused = [problem for problem in self.problems if problem.action == "refuse"]
        if refused:
            told = ". ".join(problem.line() for problem in refused)
            checks = sorted({FINDINGS[problem.finding].check for problem in refused})
            options = " ".join(f"--check {check}=warn" for check in checks)
            msg = f"of {self.checked} groups: {told}. To compute all the same: {options}"
            raise DataRefusedError(msg)


def _joined(problems: list[Problem]) -> Problem:
    """One finding of several reports; as many examples as the report with the most."""
    shown = max(len(problem.examples) for problem in problems)
    examples = sorted(example for problem in problems for example in problem.examples)
    groups = sum(problem.groups for problem in problems)
    return problems[0].model_copy(update={"groups": groups, "examples": tuple(examples[:shown])})
