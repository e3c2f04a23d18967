"""A lake to which things happen, and what a credit series must show after each: the oracle of incremental credit.

The oracle knows episodes, scores and groupings as dictionaries, computes everything from the start each time, and
predicts which groups a job may leave out: those whose members, as written and as scored, are what they were when the
series computed the group last.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import polars as pl

from lake import EpisodeRecord, Lake, StepRecord
from lake.errors import ConflictError
from lake.tables import TABLES
from pipelines.credit.estimators.protocol import Estimator
from pipelines.credit.health import IntegrityConfig
from pipelines.credit.job import CreditReport, run_credit
from testkit.copies import empty_lake

Inputs: TypeAlias = frozenset[tuple[int, float | None]]
"""A group as a job sees it: members and their scores."""
JUDGE = "judge"
GROUPING = "halves"
RUNS = ("a", "b")
TASKS = ("t", "u")


@dataclass(frozen=True)
class Choice:
    """What a credit job is asked for."""

    estimator: Estimator
    score: str = "env_return"
    grouping: str | None = None


@dataclass
class History:
    """A lake, and what the oracle remembers of it."""

    folder: Path
    random: random.Random
    judged: dict[int, float | None] = field(default_factory=dict)
    """Newest values of the judge; it has scored something once this is not empty."""
    grouped: dict[int, int] = field(default_factory=dict)
    attempts: dict[tuple[str, str, int], int] = field(default_factory=dict)
    computed: dict[tuple[Choice, int], Inputs] = field(default_factory=dict)
    """Per series and group, what its newest rows were computed from."""

    def __post_init__(self) -> None:
        self.lk: Lake = empty_lake(self.folder / "lake")

    # ------------------------------------------------------------ what happens

    def record(self) -> None:
        """A few rollouts: new ones, and retries of old ones, which take these back."""
        records: list[EpisodeRecord] = []
        for _ in range(self.random.randint(1, 4)):
            slot = (self.random.choice(RUNS), self.random.choice(TASKS), self.random.randrange(3))
            if any(slot == (r.run_id, r.task_id, r.rollout_index) for r in records):
                continue
            self.attempts[slot] = self.attempts.get(slot, -1) + 1
            records.append(self._rollout(*slot, self.attempts[slot]))
        self.lk.append(records)

    def _rollout(self, run: str, task: str, index: int, attempt: int) -> EpisodeRecord:
        steps = [
            StepRecord(
                state=self.random.choice("xyz"),
                action="go",
                reward=self.random.choice([0.0, 0.5, 1.0, None]),
                is_action_valid=self.random.random() < 0.8,
                is_active=self.random.random() < 0.9,
            )
            for _ in range(self.random.randint(1, 4))
        ]
        score = self.random.choice([0.0, 1.0, 1.0, None])
        return EpisodeRecord(
            run_id=run, task_id=task, rollout_index=index, attempt=attempt, env_return=score, steps=steps
        )

    def retract(self) -> None:
        """An episode is taken back, or all of a group."""
        episodes = self.episodes()
        if episodes.height:
            row = episodes.row(self.random.randrange(episodes.height), named=True)
            episode_ids = episodes.filter(pl.col("group_id") == row["group_id"])["episode_id"].to_list()
            self.lk.retract(episode_ids if self.random.random() < 0.3 else [row["episode_id"]])

    def judge(self) -> None:
        """Some episodes are scored (again): values come back, and NULL is one of them."""
        episodes = self.episodes()
        is_chosen = [self.random.random() < 0.6 for _ in range(episodes.height)]
        episodes = episodes.filter(pl.Series(is_chosen, dtype=pl.Boolean))
        values = [self.random.choice([0.0, 0.5, 1.0, None]) for _ in range(episodes.height)]
        rows = episodes.select("episode_id", "group_id", "run_id").with_columns(
            value=pl.Series(values, dtype=pl.Float64), scorer=pl.lit(JUDGE), scorer_version=pl.lit("1")
        )
        with self.lk.job(kind="score") as job:
            job.write("scores", rows)
        self.judged |= dict(zip(episodes["episode_id"], values, strict=True))

    def regroup(self) -> None:
        """A definition puts episodes into new groups, across runs, and leaves some out."""
        episodes = self.episodes()
        new = [self.random.choice([101, 102, 103, None]) for _ in range(episodes.height)]
        rows = episodes.select("episode_id", "run_id", collected_group_id="group_id").with_columns(
            group_id=pl.Series(new, dtype=pl.Int64), grouping=pl.lit(GROUPING)
        )
        rows = rows.filter(pl.col("group_id").is_not_null())
        if rows.height:
            with self.lk.job(kind="group") as job:
                job.write("groupings", rows)
            self.grouped = dict(rows.select("episode_id", "group_id").iter_rows())

    def compact(self) -> None:
        """Files are merged."""
        for name in TABLES:
            try:
                self.lk.compact(name)
            except ConflictError:
                continue

    # ------------------------------------------------------------ what must hold

    def episodes(self) -> pl.DataFrame:
        """Visible episodes."""
        columns = ["episode_id", "group_id", "run_id", "status", "env_return"]
        return self.lk.scan("episodes").select(columns).sort("episode_id").collect()

    def selected(self, choice: Choice) -> pl.DataFrame:
        """Visible episodes in their groups, with their scores, as the choice says."""
        episodes = self.episodes()
        if choice.grouping is not None:
            groups = pl.Series([self.grouped.get(e) for e in episodes["episode_id"]], dtype=pl.Int64)
            episodes = episodes.with_columns(group_id=groups).filter(pl.col("group_id").is_not_null())
        scores = episodes["env_return"]
        if choice.score == JUDGE:
            scores = pl.Series([self.judged.get(e) for e in episodes["episode_id"]], dtype=pl.Float64)
        return episodes.with_columns(episode_score=scores)

    def possible(self, choice: Choice) -> bool:
        """Whether the job would find something to compute, and an advantage in it: it is refused without one."""
        judged = choice.score != JUDGE or any(e in self.judged for e in self.episodes()["episode_id"])
        is_known = choice.grouping is None or self.lk.scan("groupings").collect().height > 0
        if not (judged and is_known and self.selected(choice).height > 0):
            return False
        advantages = self.expected(choice)["advantage"]
        return advantages.is_empty() or advantages.null_count() < len(advantages)

    def credit(self, choice: Choice, **options: Any) -> CreditReport:
        """Run the job and hold its work and its result against the oracle."""
        report = run_credit(
            self.lk,
            choice.estimator,
            score=choice.score,
            grouping=choice.grouping,
            integrity=IntegrityConfig(one_task="warn"),  # groupings put tasks together
            **options,
        )
        now = self.inputs(choice)
        before = {group: inputs for (of, group), inputs in self.computed.items() if of == choice}
        due = {group for group, inputs in now.items() if before.get(group) != inputs}
        if not choice.estimator.incremental and (now != before):
            due = set(now)
        if options.get("force"):
            due = set(now)
        assert report.groups_computed == len(due)
        assert report.skipped == (not due and before.keys() <= now.keys())
        for group in before.keys() - now.keys():
            del self.computed[choice, group]
        self.computed |= {(choice, group): inputs for group, inputs in now.items()}
        self.check(choice, report)
        return report

    def inputs(self, choice: Choice) -> dict[int, Inputs]:
        """Each group's members and scores."""
        members: dict[int, set[tuple[int, float | None]]] = {}
        for row in self.selected(choice).iter_rows(named=True):
            members.setdefault(row["group_id"], set()).add((row["episode_id"], row["episode_score"]))
        return {group: frozenset(members_of) for group, members_of in members.items()}

    def check(self, choice: Choice, report: CreditReport) -> None:
        """The series shows what the estimator says of everything there is, to the bit."""
        advantages = self.lk.sql("SELECT * FROM latest_advantages WHERE series_id = ?", [report.series_id])
        full = self.expected(choice)
        keys = ["group_id", "episode_id", "step_index"]
        assert advantages.select(full.columns).sort(keys).equals(full.sort(keys), null_equal=True)
        assert report.summary.steps == full.height
        assert report.summary.groups == full["group_id"].n_unique()
        assert report.summary.undefined_steps == full["advantage"].null_count()

    def expected(self, choice: Choice) -> pl.DataFrame:
        """All advantages, computed at once and from the start."""
        facts = self.selected(choice).select("episode_id", "group_id", "status", "episode_score")
        steps = self.lk.scan("steps").drop("group_id").join(facts.lazy(), on="episode_id")
        return choice.estimator.advantages(steps).collect()


Happening: TypeAlias = Callable[[History], None]
