"""No matter what happened before: a run calls exactly what its version has not scored, and every episode has one score.

Histories of episodes that come and go, and of runs over parts of the lake that fail here and there, against a model
that is a dictionary.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from lake import Lake
from lake.errors import UsageError
from pipelines.score.functions import ScoreConfig
from pipelines.score.job import run_score
from pipelines.score.rollouts import RolloutInput
from testkit.copies import empty_lake
from testkit.examples import examples
from testkit.score_lakes import InProcess, conversation

TASKS = 3
ALL = list(range(TASKS))
COMMIT = st.integers(1, 5)
EVENTS = st.one_of(
    st.tuples(st.just("add"), st.integers(0, TASKS - 1)),
    st.tuples(st.just("remove"), st.integers(0, 20), st.booleans()),
    st.tuples(
        st.just("score"),
        st.sampled_from(["new", "retry", "force"]),
        st.sets(st.integers(0, TASKS - 1), min_size=1).map(sorted),
        st.sets(st.integers(0, 6)),
        COMMIT,
    ),
)


class History:
    """A lake, what is in it, and what one scorer has made of it."""

    def __init__(self, folder: Path, *, grouped: bool) -> None:
        self.lk: Lake = empty_lake(folder)
        self.grouped = grouped
        self.places: dict[int, tuple[int, int]] = {}
        """episode_id -> task and number."""
        self.next = [0] * TASKS
        self.done: dict[int, bool] = {}
        """Pointwise: episode -> its newest score failed."""
        self.groups: dict[int, tuple[set[int], bool]] = {}
        """Group-wise: task -> the siblings of its newest score, and whether it failed."""
        self.add(*range(TASKS))

    def add(self, *tasks: int) -> None:
        """A new episode of each task."""
        added = {(f"t{task}", self.next[task]): task for task in tasks}
        self.lk.append([conversation(name, number, turns=1) for name, number in added], run_id="r")
        episodes = self.lk.scan("episodes").select("episode_id", "task_id", "rollout_index").collect()
        for episode_id, name, number in episodes.iter_rows():
            if (name, number) in added:
                self.places[episode_id] = (added[name, number], number)
        for task in tasks:
            self.next[task] += 1

    def remove(self, which: int, forget: bool) -> None:
        if len(self.places) > 1:
            removed = sorted(self.places)[which % len(self.places)]
            (self.lk.forget if forget else self.lk.retract)([removed])
            del self.places[removed]

    def members(self, task: int) -> set[int]:
        return {episode for episode, slot in self.places.items() if slot[0] == task}

    def expected(self, how: str, tasks: Sequence[int]) -> set[int]:
        episode_ids = {episode for task in tasks for episode in self.members(task)}
        if self.grouped:

            def is_wanted(task: int) -> bool:
                siblings, failed = self.groups.get(task, (set(), False))
                same = siblings == self.members(task)
                return how == "force" or (same and failed if how == "retry" else not same)

            return {episode for task in tasks if is_wanted(task) for episode in self.members(task)}
        if how == "force":
            return episode_ids
        return (
            {e for e in episode_ids if self.done.get(e) is True} if how == "retry" else episode_ids - self.done.keys()
        )

    def score(self, how: str, tasks: Sequence[int], failing: set[int], commit: int) -> None:
        expected = self.expected(how, tasks)

        def call(rollouts: Sequence[RolloutInput]) -> list[Any]:
            numbers = [self.places[rollout.episode_id][1] for rollout in rollouts]
            if self.grouped and failing & set(numbers):
                msg = "on purpose"
                raise RuntimeError(msg)
            return [{"error": "on purpose"} if number in failing else float(number) for number in numbers]

        scorer = InProcess(call, grouped=self.grouped)
        where = f"task_id IN ({', '.join(repr(f't{task}') for task in tasks)})"
        if not any(self.members(task) for task in tasks):
            return
        try:
            report = run_score(
                self.lk, scorer, where=where, retry_failed=how == "retry", force=how == "force",
                config=ScoreConfig(commit_episodes=commit),
            )  # fmt: skip
        except UsageError:  # nothing of this version was scored yet
            assert (how, expected, scorer.calls) == ("retry", set(), [])
            return
        called = [episode for unit in scorer.calls for episode in unit]
        assert len(called) == len(set(called))
        assert set(called) == expected
        assert (report.scored, report.overtaken) == (len(expected), 0)
        assert report.present == report.selected - len(expected)
        for unit in scorer.calls:
            numbers = {self.places[episode][1] for episode in unit}
            if self.grouped:
                task = self.places[unit[0]][0]
                assert set(unit) == self.members(task), "whole groups"
                self.groups[task] = (set(unit), bool(failing & numbers))
            for episode in unit:
                number = self.places[episode][1]
                self.done[episode] = bool(failing & numbers) if self.grouped else number in failing

    def check(self) -> None:
        rows = self.lk.sql("SELECT episode_id, value, error FROM latest_scores WHERE step_index IS NULL").to_dicts()
        failures = {row["episode_id"]: row["error"] is not None for row in rows}
        assert len(failures) == len(rows), "one score each"
        assert failures == {episode: failed for episode, failed in self.done.items() if episode in self.places}
        for row in rows:
            expected = None if failures[row["episode_id"]] else float(self.places[row["episode_id"]][1])
            assert row["value"] == expected


@pytest.mark.parametrize("grouped", [False, True], ids=["pointwise", "group-wise"])
@settings(max_examples=examples(3), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events=st.lists(EVENTS, min_size=2, max_size=7))
@example(events=[("score", "new", ALL, {0}, 2), *[("score", "retry", ALL, set(), 2)] * 2])
@example(events=[*[("add", task) for task in ALL], ("score", "new", ALL, set(), 5), ("remove", 0, True)])
def test_a_run_scores_what_is_not_scored(
    events: list[tuple[Any, ...]], grouped: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    history = History(tmp_path_factory.mktemp("lake") / "lake", grouped=grouped)
    actions: dict[str, Callable[..., None]] = {"add": history.add, "remove": history.remove, "score": history.score}
    for name, *arguments in [*events, ("score", "new", list(range(TASKS)), set(), 2)]:
        actions[name](*arguments)
    history.check()
    assert history.expected("new", range(TASKS)) == set(), "the last run left nothing over"
