"""Results: a JSON file for each run, so that the study can be stopped and goes on with what is missing."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from benchmarks.learning.arms import START
from lake.errors import UsageError
from lake.settings import describe_faults
from lake.storage.atomic import write_atomically

LANGUAGE = "language"
"""Folder in a study's folder: runs of a language model."""


class Task(BaseModel):
    """A run: an arm on an environment, with a seed and a learning rate, evaluated on a split it does not train on."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    environment: str
    arm: str
    seed: int = Field(ge=0)
    learning_rate: float = Field(ge=0)
    """0: the start weights as they are."""
    split: Literal["dev", "test"]
    """dev: pilots, learning rates and the gate. test: is compared."""
    changes: dict[str, Any] = {}
    """Fields of the regime that a pilot changes."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.arm == START) != (self.learning_rate == 0):
            raise ValueError("a run has a learning rate above 0, and only the start weights have 0")
        if not re.fullmatch(r"[\w.=+-]+", self.name):
            raise ValueError(f"{self.name!r} cannot be the name of a file: valid are letters, digits and . = + - _")
        return self

    @property
    def name(self) -> str:
        """Return the name of its file, and of its run in the lake."""
        changes = "".join(f"-{name}={value}" for name, value in sorted(self.changes.items()))
        return f"{self.environment}-{self.arm}-{self.seed}-{self.learning_rate:g}-{self.split}{changes}"


class Round(BaseModel):
    """A round of a run: its rollouts, and the update that they were for."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    tokens: int = Field(gt=0)
    """Collected, prompts and answers."""
    success: float = Field(ge=0, le=1)
    """Share of the rollouts."""
    live_groups: int = Field(ge=0)
    """Groups whose siblings did not all score the same."""
    steps: float | None = Field(None, ge=0)
    """Mean actions of a rollout."""
    entropy: float | None = Field(None, ge=0)
    """Of the policy at the first update of the round, in nats per token."""


class Result(BaseModel):
    """The outcome of a run."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    task: Task
    successes: int = Field(ge=0)
    """Of the final weights, on worlds that nobody trained on."""
    worlds: int = Field(gt=0)
    cold_successes: int | None = Field(None, ge=0)
    """The same at `Regime.cold_temperature`, if the run was measured there."""
    rounds: list[Round] = []
    """Empty for the start weights."""
    optimizer_steps: int = Field(0, ge=0)
    seconds: float = Field(0.0, ge=0)
    """On the clock, other work beside it included."""
    cpu_seconds: float = Field(0.0, ge=0)

    @model_validator(mode="after")
    def _check_counts(self) -> Self:
        if max(self.successes, self.cold_successes or 0) > self.worlds:
            raise ValueError(f"more successes than the {self.worlds} worlds")
        if self.task.arm != START and not self.rounds:
            raise ValueError("a run has rounds, and only the start weights have none")
        return self

    def repeats(self, other: Self) -> bool:
        """Whether another result is the same, except for its seconds."""
        same_seconds = {"seconds": self.seconds, "cpu_seconds": self.cpu_seconds}
        return self == other.model_copy(update=same_seconds)

    @property
    def tokens(self) -> int:
        """Return the collected tokens."""
        return sum(each.tokens for each in self.rounds)

    @property
    def success(self) -> float:
        """Return the success of the final weights."""
        return self.successes / self.worlds

    @property
    def cold_success(self) -> float:
        """Return the success at `Regime.cold_temperature`. Raises ValueError: the run was not measured there."""
        if self.cold_successes is None:
            raise ValueError(f"run {self.task.name} was not measured at a cold temperature")
        return self.cold_successes / self.worlds

    @property
    def area(self) -> float:
        """Return the success of the collected rollouts, averaged over the collected tokens."""
        return sum(each.tokens * each.success for each in self.rounds) / self.tokens

    @property
    def last_entropy(self) -> float | None:
        """Return the policy's entropy at the first update of the last round that had one; None if no round has it."""
        return next((each.entropy for each in reversed(self.rounds) if each.entropy is not None), None)

    def average_success(self, rounds: int) -> float:
        """Return the success of the collected rollouts, averaged over the first rounds."""
        return sum(each.success for each in self.rounds[:rounds]) / rounds


def read_result(path: Path) -> Result:
    """Read the outcome of a run. Raises UsageError: the file is damaged, or holds another run."""
    try:
        result = Result.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise UsageError(f"{path} is damaged ({describe_faults(error)}); remove it, and the run is repeated") from error
    if result.task.name != path.stem:
        raise UsageError(f"{path} holds the run {result.task.name}; remove it, and the run of its name is repeated")
    return result


class Results:
    """The files of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, task: Task) -> Result | None:
        """Return the outcome of a run; None if it has not ended."""
        path = self._folder / f"{task.name}.json"
        return read_result(path) if path.exists() else None

    def read_all(self) -> list[Result]:
        """Return the outcomes of all runs that have ended, by name."""
        return [read_result(path) for path in sorted(self._folder.glob("*.json"))]

    def read_ended(self, task: Task) -> Result:
        """Return the outcome of a run. Raises ValueError: it has not ended."""
        stored = self.get(task)
        if stored is None:
            raise ValueError(f"run {task.name} is missing; run the study again")
        return stored

    def missing(self, tasks: Iterable[Task]) -> list[Task]:
        """Return the runs that have not ended, in order."""
        return [task for task in tasks if self.get(task) is None]

    def add(self, result: Result) -> None:
        """Store a result; a kill leaves the whole file or none."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{result.task.name}.json"
        write_atomically(path, result.model_dump_json(indent=1).encode() + b"\n", sync=False)
