"""The rollout manager in this process: attempts, siblings, oversampling, what is carried over, how it stops."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import lake
from lake.records import EpisodeRecord
from pipelines.collect import tasks
from pipelines.collect.environments import Outcome, Task
from pipelines.collect.environments.games import GameEnvironment
from pipelines.collect.environments.house import House, HouseScript
from pipelines.collect.manager.rounds import Wanted
from pipelines.collect.manager.run import Collection, collect
from pipelines.collect.manager.scheduler import Limits
from pipelines.collect.play_environment import EnvironmentPlayer
from pipelines.collect.policies import Decision, Message, PolicyCard
from pipelines.collect.policies.lockstep import LockStepSpeaker
from pipelines.collect.rollouts import GroupConfig, collect_groups
from testkit.copies import empty_lake


@pytest.fixture(autouse=True)
def _spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAJLAKE_SPOOL", str(tmp_path / "spool"))


class Countdown:
    """An environment that ends after as many steps as its task's seed says, plus one; `faults` make it fail."""

    name, split = "countdown", None

    def __init__(self, faults: Callable[[str, int], None] = lambda place, seed: None) -> None:
        self._faults = faults

    async def reset(self, task: Task) -> Outcome:
        self._left, self._seed = task.seed + 1, task.seed
        self._faults("reset", task.seed)
        return Outcome(messages=[{"role": "user", "content": f"{self._left} left"}], task_id=f"count-{task.seed}")

    async def step(self, action: Message) -> Outcome:
        self._left -= 1
        self._faults("step", self._seed)
        done = self._left == 0
        said = [{"role": "user", "content": f"{self._left} left"}]
        return Outcome(messages=said, reward=float(done), terminated=done)

    async def close(self) -> None:
        pass


class Speaks:
    """A speaker whose decisions follow from its seed; `before` is awaited before each."""

    def __init__(self, before: Callable[[int, int], Any] | None = None) -> None:
        self.card = PolicyCard(name="speaks", version=0)
        self.counts: dict[str, int] = {}
        self._before = before
        self.opened = 0

    def open(self, seed: int, *, key: str, tools: Sequence[dict[str, Any]] | None = None) -> "_Speaking":
        self.opened += 1
        return _Speaking(self._before, seed, self.opened)

    async def close(self) -> None:
        pass


class _Speaking:
    def __init__(self, before: Callable[[int, int], Any] | None, seed: int, number: int) -> None:
        self._before, self._random, self._number, self._turn = before, random.Random(seed), number, 0

    async def decide(self, messages: Sequence[Message], *, admissible: Sequence[str] = ()) -> Decision:
        if self._before is not None:
            await self._before(self._number, self._turn)
        self._turn += 1
        return Decision(action=str(self._random.random()), finish_reason="stop")

    def resume(self, turns: Sequence[tuple[Sequence[Message], Decision]]) -> None:
        for _ in turns:
            self._random.random()
            self._turn += 1

    def close(self) -> None:
        pass


def run(
    folder: Path,
    environment: Callable[[], Any] = Countdown,
    speaker: Any = None,
    *,
    count: int = 4,
    rounds: int = 1,
    group_size: int = 3,
    oversample: int = 0,
    player: dict[str, Any] | None = None,
    record_only: Callable[[EpisodeRecord], bool] | None = None,
    **limits: Any,
) -> tuple[Any, list[str]]:
    """Collect rounds of two tasks each, of `count`; what came of it, and what was said."""
    said: list[str] = []
    lk = lake.open(folder / "lake", create=True)
    done = collect(
        lk,
        EnvironmentPlayer(environment, speaker or Speaks(), **player or {}),
        tasks.seeds(0, count),
        Collection(
            wanted=Wanted(run="r", groups=2, group_size=group_size, oversample=oversample),
            limits=Limits(**limits),
            rounds=rounds,
        ),
        say=said.append,
        progress=lambda line: None,
        record_only=record_only,
    )
    return done, said


def rows(folder: Path, columns: str = "seed, rollout_index, attempt, status, env_return, num_steps") -> list[Any]:
    found = lake.open(folder / "lake").sql(f"SELECT {columns} FROM episodes ORDER BY collection_round, 1, 2, 3")
    return found.rows()


def test_rollouts_of_a_game_are_the_episodes_that_lock_step_plays(tmp_path: Path) -> None:
    """Both ways to play write one episode as one record: the second one is present, not a conflict."""
    empty_lake(tmp_path / "lake")
    script = HouseScript(0.5)
    chosen = tasks.take(tasks.seeds(0, 4), 0, tasks.Cursor(), 2)
    groups = collect_groups(
        House, script, [t.seed for t in chosen], config=GroupConfig(group_size=3), run_seed=0, collection_round=0
    )
    lk = lake.open(tmp_path / "lake")
    assert lk.append([record for group in groups for record in group], run_id="r").new == 6
    other = tmp_path / "other"
    done, _ = run(other, lambda: GameEnvironment(House()), LockStepSpeaker(script))
    assert done.figures.finished == 6
    columns = "episode_id, content_hash, source_id"
    assert rows(other, columns) == rows(tmp_path, columns)
