"""Results: a JSON file for each run, so that the study can be stopped and goes on with what is missing."""

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict


class Task(BaseModel):
    """A run: an arm on a game, with a seed and a learning rate, evaluated on a fold that it does not train on."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    game: str
    arm: str
    seed: int
    learning_rate: float
    """0: the start weights as they are."""
    fold: Literal["dev", "test"]
    """dev: chooses learning rates. test: is compared."""

    @property
    def name(self) -> str:
        """Of its file, and of its run in the lake."""
        return f"{self.game}-{self.arm}-{self.seed}-{self.learning_rate:g}-{self.fold}"


class Round(BaseModel):
    """A round of a run: its rollouts, before the update that they were for."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tokens: int
    """Collected, prompts and answers."""
    success: float
    """Share of the rollouts."""
    live_groups: int
    """Groups whose siblings did not all score the same."""


class Result(BaseModel):
    """What a run came to."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    task: Task
    successes: int
    """Of the final weights, on worlds that nobody trained on."""
    worlds: int
    rounds: list[Round] = []
    optimizer_steps: int = 0
    seconds: float = 0.0
    """On the clock, other work beside it included."""
    cpu_seconds: float = 0.0
    """Of this process; the games' own process is not counted."""

    @property
    def tokens(self) -> int:
        """Collected."""
        return sum(each.tokens for each in self.rounds)

    @property
    def success(self) -> float:
        """Of the final weights."""
        return self.successes / self.worlds

    @property
    def area(self) -> float:
        """Success of the collected rollouts, averaged over the collected tokens."""
        return sum(each.tokens * each.success for each in self.rounds) / self.tokens


class Results:
    """The files of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, task: Task) -> Result | None:
        """What a run came to; None if it has not ended."""
        path = self._folder / f"{task.name}.json"
        return Result.model_validate_json(path.read_text()) if path.exists() else None

    def read_ended(self, task: Task) -> Result:
        """What a run came to. Raises ValueError: it has not ended."""
        stored = self.get(task)
        if stored is None:
            raise ValueError(f"run {task.name} is missing; run the study again")
        return stored

    def missing(self, tasks: Iterable[Task]) -> list[Task]:
        """Those that have not ended, in order."""
        return [task for task in tasks if self.get(task) is None]

    def add(self, result: Result) -> None:
        """Keep a result; a kill leaves the whole file or none."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{result.task.name}.json"
        partial = path.with_suffix(".partial")
        partial.write_text(result.model_dump_json(indent=1) + "\n")
        partial.replace(path)
