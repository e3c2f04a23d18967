"""The rollout manager in this process: attempts, siblings, oversampling, what is carried over, how it stops."""

import asyncio
import contextlib
import itertools
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import lake
from lake import ids
from lake.care.pins import Claim
from lake.errors import LakeAccessError, UsageError
from lake.judgements.credit import describe_outdated, find_credit
from lake.live.frames import BeginFrame
from lake.progress import ProgressRow, show_progress
from lake.records import EpisodeRecord, StepRecord
from pipelines.collect import tasks
from pipelines.collect.engines import EngineBusyError, EngineGoneError
from pipelines.collect.environments import Outcome, Task
from pipelines.collect.environments.games import GameEnvironment, GroupConfig, collect_groups
from pipelines.collect.environments.house import House, HouseScript
from pipelines.collect.environments.loading import build_factory
from pipelines.collect.manager.run import Collection, StoppedError, collect
from pipelines.collect.manager.spool import RolloutSpool
from pipelines.collect.play_environment import EnvironmentPlayer
from pipelines.collect.players import StartError
from pipelines.collect.policies import Decision, Message, PolicyCard
from pipelines.collect.policies.transformers_policy import LockStepClient
from pipelines.collect.settings import RolloutLimits, RunSettings
from pipelines.credit.estimators import find_estimator
from pipelines.credit.job import CreditReport, run_credit
from testkit.copies import empty_lake
from testkit.disks import disk
from testkit.processes import environment
from testkit.wording import Wording


@pytest.fixture(autouse=True)
def _spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAJLAKE_SPOOL", str(tmp_path / "spool"))


class Countdown:
    """An environment that ends after as many steps as its task's seed says, plus one; `faults` make it fail."""

    name, split = "countdown", None

    def __init__(self, faults: Callable[[str, int], None] = lambda where, seed: None) -> None:
        self._faults = faults

    async def reset(self, task: Task) -> Outcome:
        self._left, self._seed = task.seed + 1, task.seed
        self._faults("reset", task.seed)
        return Outcome(messages=[{"role": "user", "content": f"{self._left} left"}], task_id=f"count-{task.seed}")

    async def step(self, action: Message) -> Outcome:
        self._left -= 1
        self._faults("step", self._seed)
        done = self._left == 0
        messages = [{"role": "user", "content": f"{self._left} left"}]
        return Outcome(messages=messages, reward=float(done), terminated=done)

    async def close(self) -> None:
        pass


class Speaks:
    """A speaker whose decisions follow from its seed; `before` is awaited before each."""

    def __init__(self, before: Callable[[int, int], Any] | None = None, tokens: int | None = None) -> None:
        self.card = PolicyCard(name="speaks", version=0)
        self.counts: dict[str, int] = {}
        self._before, self._tokens = before, tokens
        self.opened = 0

    def open(self, seed: int, *, key: str, tools: Sequence[dict[str, Any]] | None = None) -> "_Speaking":
        self.opened += 1
        return _Speaking(self._before, seed, self.opened, self._tokens)

    async def close(self) -> None:
        pass


class _Speaking:
    def __init__(
        self, before: Callable[[int, int], Any] | None, seed: int, number: int, tokens: int | None = None
    ) -> None:
        self._before, self._random, self._number, self._turn = before, random.Random(seed), number, 0
        self._tokens = tokens

    async def decide(self, messages: Sequence[Message], *, admissible: Sequence[str] = ()) -> Decision:
        if self._before is not None:
            await self._before(self._number, self._turn)
        self._turn += 1
        return Decision(action=str(self._random.random()), finish_reason="stop", completion_tokens=self._tokens)

    def resume(self, turns: Sequence[tuple[Sequence[Message], Decision]]) -> None:
        for _ in turns:
            self._random.random()
            self._turn += 1

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelines.collect.manager.run._LOOK_SECONDS", 0.01)


def run(
    folder: Path,
    environment: Callable[[], Any] = Countdown,
    speaker: Any = None,
    *,
    count: int = 4,
    groups: int = 2,
    rounds: int = 1,
    group_size: int = 3,
    oversample: int = 0,
    player: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
    record_only: Callable[[EpisodeRecord], bool] | None = None,
    say: Callable[[str], None] | None = None,
    progress: Callable[[ProgressRow], None] = lambda _: None,
    **limits: Any,
) -> tuple[Any, list[str]]:
    """Collect rounds of `groups` tasks each, of `count`; what came of it, and what was said."""
    lines: list[str] = []
    lk = lake.open(folder / "lake") if (folder / "lake").exists() else empty_lake(folder / "lake")
    with show_progress(progress, seconds=0):
        done = collect(
            lk,
            EnvironmentPlayer(environment, speaker or Speaks(), **player or {}),
            tasks.list_seed_tasks(0, count),
            Collection(
                run_settings=RunSettings(run="r", groups=groups, group_size=group_size, oversample=oversample),
                limits=RolloutLimits(**limits),
                rounds=rounds,
                settings=settings or {},
            ),
            say=say or lines.append,
            record_only=record_only,
        )
    return done, lines


def rows(folder: Path, columns: str = "seed, rollout_index, attempt, status, env_return, num_steps") -> list[Any]:
    rows = lake.open(folder / "lake").sql(
        f"SELECT {columns} FROM episodes ORDER BY collection_round, seed, rollout_index"
    )
    return rows.rows()


def test_rollouts_of_a_game_are_the_episodes_that_lock_step_plays(tmp_path: Path) -> None:
    """Both ways to play write one episode as one record: the second one is present, not a conflict."""
    empty_lake(tmp_path / "lake")
    script = HouseScript(0.5)
    tasks_taken = tasks.take_tasks(tasks.list_seed_tasks(0, 4), 0, tasks.Cursor(), 2)
    groups = collect_groups(
        House, script, [t.seed for t in tasks_taken], config=GroupConfig(group_size=3), run_seed=0, collection_round=0
    )
    lk = lake.open(tmp_path / "lake")
    assert lk.append([record for group in groups for record in group], run_id="r").new == 6
    other_folder = tmp_path / "other"
    done, _ = run(other_folder, lambda: GameEnvironment(House()), LockStepClient(script))
    assert done.figures.finished == 6
    columns = "episode_id, content_hash, source_id"
    assert rows(other_folder, columns) == rows(tmp_path, columns)


def test_rounds_follow_from_the_lake_and_each_task_is_played_once_an_epoch(tmp_path: Path) -> None:
    """The last round of an epoch plays the tasks that are left, here one of three."""
    done, lines = run(tmp_path, rounds=3, count=3)
    assert (done.rounds, done.figures.finished) == (3, 15)
    assert [line for line in lines if line.startswith("round")] == [
        "round 0: tasks 0..1 of epoch 0",
        "round 1: tasks 2..2 of epoch 0",
        "round 2: tasks 0..1 of epoch 1",
    ]
    actual = rows(tmp_path, "collection_round, seed, rollout_index")
    assert sorted({seed for number, seed, _ in actual if number < 2}) == [0, 1, 2]
    # The same command again: there is nothing to do.
    again, _ = run(tmp_path, rounds=3, count=3)
    assert (again.rounds, rows(tmp_path, "collection_round, seed, rollout_index")) == (0, actual)
    metrics = lake.open(tmp_path / "lake").sql("SELECT step, value FROM metrics WHERE name = 'finished' ORDER BY 1")
    assert metrics.rows() == [(0, 6.0), (1, 3.0), (2, 6.0)]


def test_other_tasks_are_refused_for_a_run_that_is_there(tmp_path: Path) -> None:
    run(tmp_path)
    with pytest.raises(UsageError, match="other tasks"):
        run(tmp_path, count=5, rounds=2)


def test_other_settings_of_what_is_sampled_are_refused_and_where_it_plays_may_change(tmp_path: Path) -> None:
    """Two temperatures in one run would be compared as if they were one."""
    settings = {"env": "count", "env_args": {"n": 3}, "sampling": {"temperature": 1.0}, "engines": ["a"]}
    run(tmp_path, settings=settings)
    for changed, fragment in (
        ({"settings": settings | {"sampling": {"temperature": 0.5}}}, r"temperature 1.0 \(now 0.5\)"),
        ({"settings": settings | {"env_args": {"n": 4}}}, r"env args .*3.* \(now .*4"),
        ({"settings": settings, "group_size": 4}, r"group size 3 \(now 4\); .*another --run"),
        (
            {"settings": settings, "oversample": 1, "keep": "first"},
            r"oversample 0 \(now 1\), keep 'all' \(now 'first'\)",
        ),
    ):
        with pytest.raises(UsageError, match=fragment):
            run(tmp_path, rounds=2, **changed)
    done, _ = run(tmp_path, rounds=2, settings=settings | {"engines": ["b"], "call_seconds": 9}, parallel=1)
    assert done.rounds == 1


class Fails:
    """A fault that happens so often, per task."""

    def __init__(self, where: str, times: int, error: BaseException | None = None) -> None:
        self.place, self.left, self.error = (
            where,
            times,
            error or OSError("the tool server is away: key sk-" + "a" * 40),
        )

    def __call__(self, where: str, seed: int) -> None:
        if where == self.place and self.left:
            self.left -= 1
            raise self.error


@pytest.mark.parametrize("where", ["reset", "step"])
def test_what_an_environment_raises_is_a_failed_attempt_and_is_tried_again(where: str, tmp_path: Path) -> None:
    fault = Fails(where, 1)
    done, _ = run(tmp_path, lambda: Countdown(fault), parallel=1, group_size=2)
    assert (done.figures.finished, done.figures.failed, done.figures.retried) == (4, 0, 1)
    actual = rows(tmp_path, "attempt, status, num_steps")
    assert sorted(row[:2] for row in actual) == [(0, "completed")] * 3 + [(1, "completed")]
    # The failed attempt is recorded, without the key.
    with lake.open(tmp_path / "lake").snapshot().session(retracted_too=True) as session:
        failed = session.query("SELECT error, attempt, stop_reason FROM episodes WHERE status = 'failed'").rows()
    assert len(failed) == 1
    assert "the tool server is away" in failed[0][0]
    assert "sk-a" not in failed[0][0]
    assert failed[0][1:] == (0, "environment_error")


PROGRAM_ENDS = (asyncio.CancelledError, SystemExit, GeneratorExit)


def test_exceptions_that_end_programs_are_failures_of_their_own_rollout(tmp_path: Path) -> None:
    """Each task raises one of them, in one of the places, and only there."""
    raised = list(itertools.product(("reset", "step"), PROGRAM_ENDS))

    def fault(where: str, seed: int) -> None:
        if raised[seed][0] == where:
            raise raised[seed][1]("inner")

    done, _ = run(tmp_path, lambda: Countdown(fault), count=6, groups=6, group_size=1, retries=0)
    assert (done.figures.finished, done.figures.failed) == (0, 6)
    assert rows(tmp_path, "error") == [
        (f"{where if where == 'reset' else 'step 0'}: {error.__name__}: inner",) for where, error in raised
    ]


def test_what_closing_raises_takes_nothing_from_what_was_played(tmp_path: Path) -> None:
    class Odd(Countdown):
        async def close(self) -> None:
            raise PROGRAM_ENDS[self._seed]

    assert run(tmp_path, Odd, count=3, groups=3, group_size=2)[0].figures.finished == 6


def test_exits_in_a_thread_and_cancellation_by_a_speaker_are_failures(tmp_path: Path) -> None:
    class Exits:
        def reset(self, task: Task) -> Outcome:
            raise SystemExit(3)

        def step(self, action: Message) -> Outcome:
            raise NotImplementedError

    async def cancelled(number: int, turn: int) -> None:
        raise asyncio.CancelledError

    run(tmp_path / "thread", build_factory(Exits, "x.py:make", None), group_size=1, retries=0)
    assert {row[0] for row in rows(tmp_path / "thread", "status")} == {"failed"}
    run(tmp_path / "speaker", speaker=Speaks(cancelled), group_size=1, retries=0)
    assert set(rows(tmp_path / "speaker", "status, error")) == {("failed", "CancelledError: ")}


def test_a_judge_of_records_that_exits_is_told_in_one_line(tmp_path: Path) -> None:
    def leaves(record: EpisodeRecord) -> bool:
        raise SystemExit(3)

    with pytest.raises(UsageError, match=r"record_only .*: SystemExit: 3"):
        run(tmp_path, record_only=leaves)


UNFIT: list[tuple[dict[str, Any], str]] = [
    ({"extra": {"a": float("nan")}}, "`extra` that is not JSON"),
    ({"extra": [1]}, "`extra` that is an object of type list; valid: a dict"),
    ({"ground_truth": object()}, "`ground_truth` that is not JSON"),
    ({"reward": 10**400}, "the reward 1000"),
    ({"reward": 1e308}, "step 1: the sum of rewards is not finite"),
]


def test_outcomes_that_no_table_can_hold_are_failures(tmp_path: Path) -> None:
    class Odd(Countdown):
        async def step(self, action: Message) -> Outcome:
            return Outcome(messages=[{"role": "user", "content": "x"}], **UNFIT[self._seed][0])

    run(tmp_path, Odd, count=len(UNFIT), groups=len(UNFIT), group_size=1, retries=0)
    actual = rows(tmp_path, "status, error")
    assert [status for status, _ in actual] == ["failed"] * len(UNFIT)
    assert all(fragment in error for (_, fragment), (_, error) in zip(UNFIT, actual, strict=True)), actual


def test_returns_whose_sum_no_float_holds_have_no_mean(tmp_path: Path) -> None:
    class Rich(Countdown):
        async def step(self, action: Message) -> Outcome:
            return Outcome(messages=[], reward=1e308, terminated=True)

    done, _ = run(tmp_path, Rich)
    assert done.figures.finished == 6
    metric = lake.open(tmp_path / "lake").sql("SELECT value FROM metrics WHERE name = 'return'")
    assert metric.rows() == [(None,)]


class Pairs(Countdown):
    """Two steps; the task of seed 1 is rewarded at the end, and that of seed 0 is not."""

    async def reset(self, task: Task) -> Outcome:
        first = await super().reset(task)
        self._left = 2
        return first

    async def step(self, action: Message) -> Outcome:
        after = await super().step(action)
        return replace(after, reward=float(after.terminated and self._seed == 1))


async def until(event: threading.Event) -> None:
    for _ in range(300):
        if event.is_set():
            return
        await asyncio.sleep(0.01)


def test_tokens_are_counted_as_they_are_sampled_and_not_when_episodes_end(tmp_path: Path) -> None:
    is_counted = threading.Event()

    async def before(_: int, turn: int) -> None:
        if turn == 1:
            await until(is_counted)

    def progress(row: ProgressRow) -> None:
        if (row.done, row.total) == (0, 4) and row.note and " 0 tokens/s" not in row.note:
            is_counted.set()

    run(tmp_path, Pairs, Speaks(before, tokens=50), count=2, group_size=2, progress=progress)
    assert is_counted.is_set()


def test_a_return_is_of_whole_groups(tmp_path: Path) -> None:
    """One rollout of the second group is in the middle: its sibling, which has ended, is not in the mean."""
    seen: list[ProgressRow] = []
    is_seen = threading.Event()

    async def before(number: int, turn: int) -> None:
        if (number, turn) == (4, 1):
            await until(is_seen)

    def progress(row: ProgressRow) -> None:
        seen.append(row)
        if row.done == 3:
            is_seen.set()

    run(tmp_path, Pairs, Speaks(before), count=2, group_size=2, progress=progress)
    (mean_return,) = {row.note.partition("return ")[2][:4] for row in seen if row.done == 3}
    assert mean_return in ("0.00", "1.00")
    assert not any("return" in row.note for row in seen if row.done in (0, 1))


def test_a_failure_that_stays_is_recorded_and_its_siblings_go_on(tmp_path: Path) -> None:
    class Bad(Countdown):
        async def step(self, action: Message) -> Outcome:
            if self._seed == 1:
                raise ValueError("never works")
            return await super().step(action)

    done, _ = run(tmp_path, Bad, count=2, retries=2)
    assert (done.figures.finished, done.figures.failed, done.figures.retried) == (3, 3, 6)
    actual = rows(tmp_path, "seed, attempt, status, error")
    assert [row[1:3] for row in actual if row[0] == 1] == [(2, "failed")] * 3
    assert all(row[3] == "step 0: ValueError: never works" for row in actual if row[0] == 1)
    # Nothing is tried again by the next process.
    assert run(tmp_path, Bad, count=2, retries=2)[0].rounds == 0


def test_failures_to_open_stand_in_the_group_that_the_environment_names(tmp_path: Path) -> None:
    """Also those of rollouts that never begin, and of a process that stopped before the others had started."""
    attempts_left = {0: 2, 1: 2}

    def closed_at_first(where: str, seed: int) -> None:
        if where == "reset" and attempts_left[seed]:
            attempts_left[seed] -= 1
            raise RuntimeError("closed")

    async def gone_later(number: int, turn: int) -> None:
        if number == 2:
            raise EngineGoneError("gone")

    def play(speaker: Speaks) -> None:
        run(tmp_path, lambda: Countdown(closed_at_first), speaker, count=2, parallel=1)

    with pytest.raises(StoppedError):
        play(Speaks(gone_later))
    assert len(rows(tmp_path)) == 2
    play(Speaks())
    actual = rows(tmp_path, "seed, rollout_index, attempt, status, task_id")
    assert actual == [
        (seed, index, *((0, "completed") if index else (1, "failed")), f"count-{seed}")
        for seed in range(2)
        for index in range(3)
    ]
    all_attempts = lake.open(tmp_path / "lake").snapshot().scan_all("episodes").collect()
    assert (all_attempts["group_id"].n_unique(), all_attempts.height) == (2, 8)


def test_an_environment_that_never_opens_is_recorded_by_its_seed(tmp_path: Path) -> None:
    def closed(where: str, seed: int) -> None:
        raise RuntimeError("closed")

    done, _ = run(tmp_path, lambda: Countdown(closed), count=2)
    assert (done.figures.failed, done.figures.retried) == (6, 6)
    assert set(rows(tmp_path, "attempt, status, task_id")) == {(1, "failed", "seed 0"), (1, "failed", "seed 1")}


@pytest.mark.parametrize(
    ("player", "limits", "expected"),
    [
        ({"call_seconds": 0.01}, {}, ("failed", "call_timeout")),
        ({}, {"episode_seconds": 0.01}, ("truncated", "episode_timeout")),
    ],
)
def test_calls_and_episodes_that_take_too_long(
    player: dict[str, Any], limits: dict[str, Any], expected: tuple[str, str], tmp_path: Path
) -> None:
    """Who records rollouts alone hears why it is cancelled: what it records and what is counted are one."""
    heard = set()

    async def for_ever(number: int, turn: int) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError as cancelled:
            heard.add(str(cancelled))
            raise

    done, _ = run(tmp_path, speaker=Speaks(for_ever), player=player, retries=0, **limits)
    assert set(rows(tmp_path, "status, stop_reason")) == {expected}
    assert heard == {"episode_timeout" if limits else ""}
    assert (done.figures.finished, done.figures.failed) == ((6, 0) if limits else (0, 6))


def test_steps_that_take_too_long_and_answers_that_are_none(tmp_path: Path) -> None:
    class Odd(Countdown):
        async def step(self, action: Message) -> Outcome:
            if self._seed == 0:
                await asyncio.Event().wait()
            return Outcome(messages=[{"role": "user", "content": "x"}], reward=float("nan"))

    run(tmp_path, Odd, count=2, player={"step_seconds": 0.01}, retries=0)
    actual = {row[0]: row[1:] for row in rows(tmp_path, "seed, status, stop_reason, error")}
    assert actual[0][:2] == ("failed", "step_timeout")
    assert actual[1][:2] == ("failed", "environment_error")
    assert "the reward nan; valid: a finite number" in actual[1][2]


def test_an_engine_error_is_an_attempt(tmp_path: Path) -> None:
    async def busy_once(number: int, turn: int) -> None:
        if number == 1:
            raise EngineBusyError("http://127.0.0.1:1 asks to wait")

    done, _ = run(tmp_path, speaker=Speaks(busy_once))
    assert (done.figures.finished, done.figures.retried) == (6, 1)


def test_an_engine_that_is_gone_stops_the_run_and_the_same_command_goes_on(tmp_path: Path) -> None:
    """What is open stays open, and is the same in the end as if nothing had happened."""

    async def gone_later(number: int, turn: int) -> None:
        if number == 5 and turn == 1:
            raise EngineGoneError("http://127.0.0.1:1 is gone.")

    with pytest.raises(StoppedError, match=r"127.0.0.1:1 is gone; .* rerun the same command"):
        run(tmp_path, speaker=Speaks(gone_later), count=2, group_size=8)
    again, lines = run(tmp_path, count=2, group_size=8)
    assert "round 0: tasks 0..1 of epoch 0, unfinished" in lines
    assert again.figures.resumed >= 1
    run(tmp_path / "other", count=2, group_size=8)
    columns = "episode_id, content_hash"
    assert rows(tmp_path, columns) == rows(tmp_path / "other", columns)
    assert len(rows(tmp_path, columns)) == 16


def test_an_engine_that_is_gone_once_a_round_is_played_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled = itertools.count()

    async def settle(player: EnvironmentPlayer) -> None:
        if next(settled):
            raise EngineGoneError("http://127.0.0.1:1 is gone.")

    with monkeypatch.context() as patch:
        patch.setattr(EnvironmentPlayer, "settle", settle)
        with pytest.raises(StoppedError, match=r"127.0.0.1:1 is gone; .* rerun the same command"):
            run(tmp_path)
    assert run(tmp_path)[0].figures.present == 6


def test_an_environment_that_answers_otherwise_is_not_continued(tmp_path: Path, wording: Wording) -> None:
    """The interrupted rollout is recorded as aborted, and played anew as its next attempt."""

    async def gone_later(number: int, turn: int) -> None:
        if turn == 1:
            raise EngineGoneError("gone")

    with pytest.raises(StoppedError):
        run(tmp_path, speaker=Speaks(gone_later), count=2, group_size=1)

    class Changed(Countdown):
        async def step(self, action: Message) -> Outcome:
            return replace(await super().step(action), reward=0.25)

    done, _ = run(tmp_path, Changed, count=2, group_size=1, retries=0)
    assert (done.figures.resumed, done.figures.retried) == (1, 1)
    with lake.open(tmp_path / "lake").snapshot().session(retracted_too=True) as session:
        rows = session.query("SELECT attempt, status, stop_reason, error FROM episodes WHERE seed = 1 ORDER BY 1")
    aborted, again = rows.rows()
    assert aborted[:3] == (0, "aborted", "replay_differs")
    assert aborted[3].startswith("step 0 was replayed")
    assert "another `reward`: 0.0 was" in wording(aborted[3])
    assert again[:2] == (1, "completed")


def test_siblings_that_begin_differently_are_refused(tmp_path: Path) -> None:
    numbers = iter(range(1000))

    class Drifting(Countdown):
        async def reset(self, task: Task) -> Outcome:
            outcome = await super().reset(task)
            if task.seed == 1:
                outcome = Outcome(messages=[{"role": "user", "content": str(next(numbers))}], task_id="drifts")
            return outcome

    with pytest.raises(StartError, match=r"task 'drifts' \(seed 1\) started differently in rollout"):
        run(tmp_path, Drifting, count=2, retries=3)
    actual = rows(tmp_path, "seed, status, stop_reason")
    assert [row[1] for row in actual if row[0] == 0] == ["completed"] * 3
    assert "starts_differ" in {row[2] for row in actual if row[0] == 1}
    assert "completed" not in [row[1] for row in actual if row[0] == 1]


def test_siblings_that_had_finished_are_retracted_when_a_later_one_begins_differently(
    tmp_path: Path, wording: Wording
) -> None:
    opened: list[int] = []

    class Late(Countdown):
        async def reset(self, task: Task) -> Outcome:
            opened.append(task.seed)
            text = "other" if opened.count(1) == 3 and task.seed == 1 else "as ever"
            self._left, self._seed = 1, task.seed
            return Outcome(messages=[{"role": "user", "content": text}], task_id=str(task.seed))

    with pytest.raises(StartError, match="started differently in rollout 2"):
        run(tmp_path, Late, count=2, group_size=4, parallel=1)
    actual = rows(tmp_path, "seed, status")
    assert [status for seed, status in actual if seed == 0] == ["completed"] * 4
    assert {status for seed, status in actual if seed == 1} == {"failed"}
    reasons = lake.open(tmp_path / "lake").sql("SELECT reason FROM retractions")
    assert reasons.rows() == [(wording(reasons["reason"][0]),)] * 2
    # They are there and not played again.
    assert run(tmp_path, Late, count=2, group_size=4, parallel=1)[0].rounds == 0


def test_of_siblings_that_finish_together_no_more_are_kept_than_were_wanted(tmp_path: Path) -> None:
    done, _ = run(tmp_path, group_size=3, oversample=2, keep="first")
    assert (done.figures.finished, done.figures.aborted + done.figures.left_out) == (6, 4)
    actual = rows(tmp_path, "seed, status")
    assert all(actual.count((seed, "completed")) == 3 for seed, _ in actual)


def test_the_first_that_finish_are_kept_and_the_others_are_aborted(tmp_path: Path) -> None:
    async def some_wait(number: int, turn: int) -> None:
        if number % 5 in (3, 4) and turn:
            await asyncio.Event().wait()

    class Three(Countdown):
        async def reset(self, task: Task) -> Outcome:
            outcome = await super().reset(task)
            self._left = 3
            return outcome

    done, _ = run(tmp_path, Three, Speaks(some_wait), group_size=3, oversample=2, keep="first")
    assert (done.figures.finished, done.figures.aborted) == (6, 4)
    actual = rows(tmp_path, "status, stop_reason, num_steps, expected_group_size")
    assert sorted(set(actual)) == [("aborted", "surplus", 1, 3), ("completed", "environment", 3, 3)]
    assert len(actual) == 10


def test_those_that_are_carried_over_go_on_in_the_next_round_and_keep_their_own(tmp_path: Path) -> None:
    gate = asyncio.Event()

    async def until_next_round(number: int, turn: int) -> None:
        if number == 4:
            await gate.wait()
        if number > 8:
            gate.set()

    done, lines = run(
        tmp_path, speaker=Speaks(until_next_round), rounds=2, group_size=3, oversample=1, keep="first", carry_over=True
    )
    actual = rows(tmp_path, "collection_round, status")
    assert {status for _, status in actual} == {"completed"}
    assert len([1 for number, _ in actual if number == 0]) > 6
    assert done.rounds == 2
    assert all("carried" not in line or "run again with --rounds 3 to finish them" in line for line in lines)


def test_a_policy_of_this_process_goes_on_with_what_was_carried_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It plays a round that was broken off as a whole; rollouts of earlier rounds are no part of that."""

    class Two(Countdown):
        async def reset(self, task: Task) -> Outcome:
            outcome = await super().reset(task)
            self._left = 2
            return outcome

    async def the_last_two_wait(number: int, turn: int) -> None:
        if number % 4 in (3, 0) and turn:
            await asyncio.Event().wait()

    monkeypatch.setattr(EnvironmentPlayer, "plays_together", True)
    options: dict[str, Any] = {"group_size": 2, "oversample": 2, "keep": "first", "carry_over": True}
    run(tmp_path, Two, Speaks(the_last_two_wait), **options)
    assert len(rows(tmp_path, "rollout_index")) == 4
    run(tmp_path, Two, rounds=2, **options)
    assert rows(tmp_path, "collection_round, status").count((0, "completed")) == 8


def test_a_round_waits_for_what_has_ended_and_is_not_on_the_disk_where_others_are_carried_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both groups are full; the second to be written is so long after the first that a round could end in between."""
    synced, flush, numbers = RolloutSpool.wait_for_sync, RolloutSpool.flush, itertools.count()
    both_wait, first_is_written, flushing = asyncio.Event(), asyncio.Event(), threading.Event()

    async def one_after_the_other(store: RolloutSpool) -> None:
        if next(numbers):
            flushing.clear()
            both_wait.set()
            await first_is_written.wait()
            for _ in range(100):  # turns of the event loop, in which the first one ends
                await asyncio.sleep(0)
            while flushing.is_set() and not store.is_leaving:
                await asyncio.sleep(0.01)
        await both_wait.wait()
        await synced(store)
        first_is_written.set()

    def flushed(store: RolloutSpool) -> None:
        flushing.set()
        flush(store)

    async def the_second_of_each_group_waits(number: int, turn: int) -> None:
        if number % 2 == 0:
            await asyncio.Event().wait()

    monkeypatch.setattr(RolloutSpool, "wait_for_sync", one_after_the_other)
    monkeypatch.setattr(RolloutSpool, "flush", flushed)
    speaker = Speaks(the_second_of_each_group_waits)
    done, lines = run(tmp_path, speaker=speaker, group_size=1, oversample=1, keep="first", carry_over=True)
    assert done.figures.finished == 2
    assert lines[-1].startswith("2 rollouts are carried over")


def test_a_carried_rollout_that_begins_differently_takes_its_group_of_the_earlier_round_along(
    tmp_path: Path, wording: Wording
) -> None:
    class Two(Countdown):
        said = "as ever"

        async def reset(self, task: Task) -> Outcome:
            await super().reset(task)
            self._left = 2
            return Outcome(messages=[{"role": "user", "content": self.said}], task_id=str(task.seed))

    class Other(Two):
        said = "other"

    async def the_last_two_wait(number: int, turn: int) -> None:
        if number % 4 in (3, 0) and turn:
            await asyncio.Event().wait()

    options: dict[str, Any] = {"group_size": 2, "oversample": 2, "keep": "first", "carry_over": True}
    _, lines = run(tmp_path, Two, Speaks(the_last_two_wait), **options)
    assert wording(lines[-1]).startswith("4 rollouts are carried")
    assert "--rounds 2" in lines[-1]
    with pytest.raises(StartError, match=r"started differently in rollout [23] of round 0"):
        run(tmp_path, Other, rounds=2, **options)
    actual = rows(tmp_path, "collection_round, status, stop_reason")
    assert {row[1:] for row in actual if row[0] == 0} == {("failed", "starts_differ")}
    assert {row[1] for row in actual if row[0] == 1} == {"completed"}
    lk = lake.open(tmp_path / "lake")
    assert lk.sql("SELECT count(*) FROM retractions").rows() == [(4,)]


def test_the_best_of_each_group_are_a_selection_and_nothing_is_deleted(tmp_path: Path, wording: Wording) -> None:
    class Lottery(Countdown):
        async def step(self, action: Message) -> Outcome:
            return Outcome(messages=[], reward=float(str(action["content"])), terminated=True)

    _, lines = run(tmp_path, Lottery, group_size=2, oversample=2, keep="best")
    (selection_line,) = (line for line in lines if line.startswith("selection best-r"))
    assert "4 of 8 episodes" in wording(selection_line)
    lk = lake.open(tmp_path / "lake")
    members = lk.sql(
        "SELECT e.group_id, min(env_return) FILTER (WHERE kept) > max(env_return) FILTER (WHERE NOT kept) AS are_best, "
        "count(*) FILTER (WHERE kept) AS n FROM selections JOIN episodes AS e USING (episode_id) GROUP BY 1"
    )
    assert members.select("are_best", "n").rows() == [(True, 2)] * 2


class Draws(Countdown):
    """Two steps; the second is rewarded with the number that the speaker drew."""

    async def reset(self, task: Task) -> Outcome:
        start = await super().reset(task)
        self._left = 2
        return start

    async def step(self, action: Message) -> Outcome:
        self._left -= 1
        drawn = 0.0 if self._left else float(str(action["content"]))
        return Outcome(messages=[], reward=drawn, terminated=not self._left)


def credited(lk: lake.Lake, **options: Any) -> tuple[CreditReport, dict[int, float]]:
    """A credit job of leave-one-out baselines, and its advantages by episode."""
    report = run_credit(lk, find_estimator("rloo")(), **options)
    rows = lk.sql(
        f"SELECT DISTINCT episode_id, advantage FROM {find_credit(lk.snapshot(), ids.to_text(report.job_id)).rows}"
    )
    return report, dict(rows.iter_rows())


def left_one_out(groups: Iterable[dict[int, float]]) -> dict[int, float]:
    """Each return minus the mean of the others of its group, by the definition."""
    return {
        episode: value - statistics.fmean(sibling for key, sibling in group.items() if key != episode)
        for group in groups
        for episode, value in group.items()
    }


@pytest.mark.parametrize("keep", ["best", "first", "all"])
def test_credit_compares_the_siblings_that_a_collection_kept_or_all_of_them(tmp_path: Path, keep: str) -> None:
    """Neither is taken for a run that was ingested twice, and what was left out is not said to be missing."""

    async def the_last_two_of_each_group_wait(number: int, turn: int) -> None:
        if keep == "first" and turn and number % 5 in (3, 4):
            await asyncio.Event().wait()

    run(tmp_path, Draws, Speaks(the_last_two_of_each_group_wait), group_size=3, oversample=2, keep=keep)
    lk = lake.open(tmp_path / "lake")
    returns: dict[int, dict[int, float]] = {}
    for group, episode, value in lk.sql("SELECT group_id, episode_id, env_return FROM episodes").iter_rows():
        returns.setdefault(group, {})[episode] = value
    assert [len(group) for group in returns.values()] == [5, 5]
    scored = [{key: value for key, value in group.items() if value is not None} for group in returns.values()]
    best = [dict(sorted(group.items(), key=lambda item: -item[1])[:3]) for group in scored]
    members, advantages = credited(lk)
    assert advantages == pytest.approx(left_one_out(scored if keep == "all" else best))
    assert members.findings == ()
    assert describe_outdated(lk.snapshot(), find_credit(lk.snapshot(), ids.to_text(members.series_id))) is None
    assert run_credit(lk, find_estimator("rloo")()).skipped
    all_members, advantages = credited(lk, siblings="all")
    assert {key: value for key, value in advantages.items() if value is not None} == pytest.approx(left_one_out(scored))
    assert all_members.findings == ()
    assert len(advantages) == 10
    assert all_members.series_id != members.series_id
    assert find_credit(lk.snapshot(), ids.to_text(all_members.series_id)).title.count("siblings all") == 1


def test_a_group_of_more_episodes_than_were_played_is_oversized_whatever_was_left_out(tmp_path: Path) -> None:
    run(tmp_path, Draws, group_size=3, oversample=2, keep="best")
    lk = lake.open(tmp_path / "lake")
    first = lk.sql("SELECT source_format, run_id, collection_round, task_id, seed FROM episodes LIMIT 1").row(
        0, named=True
    )
    step = StepRecord(state=None, action="0.5", reward=0.5)
    again = [EpisodeRecord(**first, rollout_index=n, steps=[step], env_return=0.5) for n in (7, 8, 9)]
    lk.append(again, run_id="r")
    assert max(lk.sql("SELECT count(*) FROM episodes GROUP BY group_id").to_series()) == 8
    for siblings in ("kept", "all"):
        report, _ = credited(lk, siblings=siblings)
        assert [finding.partition(":")[0] for finding in report.findings] == ["oversized"]


def test_only_where_asked_something_is_not_recorded(tmp_path: Path) -> None:
    done, _ = run(tmp_path, record_only=lambda record: record.rollout_index > 0)
    assert done.dropped == 2
    assert {row[0] for row in rows(tmp_path, "rollout_index")} == {1, 2}


@pytest.mark.parametrize("name", ["", " ", "a/b", "..", ".a", "a\nb", "a\x00", "r" * 200])
def test_names_of_runs_that_no_path_can_hold_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"invalid --run .*; valid: up to 128"):
        RunSettings(run=name, groups=1, group_size=1)
    RunSettings(run="grpo-7b_v1.2@lr=1e-6", groups=1, group_size=1)


def test_what_is_not_on_the_disk_is_not_said_to_be_recorded(tmp_path: Path) -> None:
    lk = empty_lake(tmp_path / "lake")
    with disk(tmp_path / "disk", "100k") as small:
        (tmp_path / "spool").symlink_to(small)
        with RolloutSpool(lk, "r") as store:
            with contextlib.suppress(OSError), (small / "filler").open("wb", buffering=0) as file:
                while file.write(bytes(4096)):
                    pass
            store.append(bytes(16), 0, BeginFrame(episode=EpisodeRecord(task_id="t", steps=[])))
            store.is_leaving = True
            with pytest.raises(LakeAccessError, match=r"No space left on .* are not on disk"):
                store.flush()
            (small / "filler").unlink()


BLOCKED = """
import sys, time
from pathlib import Path
from test_collect_manager import Countdown, Speaks, run

class Blocks(Countdown):
    async def step(self, action):
        print("blocked", file=sys.stderr, flush=True)
        while True:
            time.sleep(3600)

run(Path(sys.argv[1]), Blocks, say=lambda line: print(line, file=sys.stderr, flush=True))
"""


def test_a_third_ctrl_c_ends_a_process_whose_environment_blocks(tmp_path: Path) -> None:
    folder = str(Path(__file__).parent)
    child = environment(TRAJLAKE_SPOOL=str(tmp_path / "spool"))
    child["PYTHONPATH"] += os.pathsep + folder
    with subprocess.Popen(
        [sys.executable, "-c", BLOCKED, str(tmp_path)], stderr=subprocess.PIPE, text=True, env=child
    ) as process:
        assert process.stderr is not None
        heard = [next(line for line in process.stderr if "blocked" in line)]
        for fragment in ("stopping: running rollouts", "leaving running rollouts", "ended at once; rollouts on disk"):
            process.send_signal(signal.SIGINT)
            heard.append(next(line for line in process.stderr if fragment in line))
        assert process.wait(600) == 128 + signal.SIGINT, heard


STOPPED = """
import sys, time
from lake.lake import Lake
from pipelines.collect.manager.spool import RolloutSpool
from testkit.copies import empty_lake
from testkit.lakes import rollout
from lake.live.frames import BeginFrame, EndFrame, StepFrame

lk = empty_lake(sys.argv[1] + "/lake")
append = Lake.append

def announced(*args, **options):
    print("appending", flush=True)
    time.sleep(0.3)
    return append(*args, **options)

Lake.append = announced
with RolloutSpool(lk, "r") as store:
    record = rollout("t", 0, 1.0, num_steps=1)
    record.run_id = "r"
    step, record.steps = record.steps[0], []
    store.append(bytes(16), 0, BeginFrame(episode=record))
    store.append(bytes(16), 1, StepFrame(index=0, step=step))
    store.append(bytes(16), 2, EndFrame(status="finished"))
    store.flush(turns=2)
print(lk.sql("SELECT count(*) FROM episodes").item())
"""


def test_a_process_that_is_stopped_while_it_delivers_goes_on(tmp_path: Path) -> None:
    """Stopped for longer than a delivery may take, as by Ctrl-Z or by a cluster that suspends a job."""
    child = environment(TRAJLAKE_SPOOL=str(tmp_path / "spool"))
    with subprocess.Popen([sys.executable, "-c", STOPPED, str(tmp_path)], stdout=subprocess.PIPE, env=child) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"appending\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(2.5)
        process.send_signal(signal.SIGCONT)
        assert process.stdout.read() == b"1\n"


def test_two_processes_cannot_collect_one_run(tmp_path: Path) -> None:
    lk = empty_lake(tmp_path / "lake")
    with RolloutSpool(lk, "r"), pytest.raises(UsageError, match=r"run 'r' is being .* by process \d+"):
        RolloutSpool(lk, "r")
    with RolloutSpool(lk, "r"):
        pass


def test_a_process_that_was_not_heard_of_for_too_long_stops_when_another_one_has_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def soon(lk: lake.Lake, name: str, where: str) -> Claim:
        return Claim(lk._store, name, where, timedelta(seconds=1))

    monkeypatch.setattr("pipelines.collect.manager.run.claim_run", soon)

    async def somebody_else_comes(number: int, turn: int) -> None:
        if number == 1:
            job_id = next((tmp_path / "spool").rglob("collect-r/collect")).read_text().split()[0]
            assert soon(lake.open(tmp_path / "lake"), "r", job_id)._try_claim()
        await asyncio.Event().wait()

    with pytest.raises(StoppedError, match=r"taken over by process \d+ on .* rerun the same command"):
        run(tmp_path, speaker=Speaks(somebody_else_comes))


def test_what_two_spools_hold_of_one_rollout_is_one(tmp_path: Path) -> None:
    """Killed while it took over another process's spool, a process leaves the same frames in both."""

    async def gone_later(number: int, turn: int) -> None:
        if turn == 1:
            raise EngineGoneError("gone")

    with pytest.raises(StoppedError):
        run(tmp_path, speaker=Speaks(gone_later), count=2, group_size=1)
    spool = next(path for path in (tmp_path / "spool").rglob("*") if path.is_dir() and path.name[0].isdigit())
    shutil.copytree(spool, spool.with_name("1-0"))
    done, _ = run(tmp_path, count=2, group_size=1)
    assert (done.figures.resumed, done.figures.finished) == (1, 2)
    assert [row[2:4] for row in rows(tmp_path)] == [(0, "completed")] * 2
    assert [path for path in spool.parent.iterdir() if path.is_dir()] == []
