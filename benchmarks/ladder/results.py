"""Results as lines of a JSONL file: one for each run, so that a ladder goes on where it was stopped."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Task:
    """One run: an arm with a value of its knob and a seed, measured on validation or on held-out starts."""

    part: str
    """validation or held_out; edge for validation of a value beyond those tried."""
    arm: str
    seed: int
    knob: float | None
    """Value of the arm's knob; None for arms without."""
    learning_rate: float | None
    """Of the run; None without training."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a run came to."""

    task: Task
    successes: int
    starts: int
    tokens: int = 0
    """Through the model in training, context included."""
    action_tokens: int = 0
    """Of these, tokens that carried the loss."""
    optimizer_steps: int = 0
    seconds: float = 0.0

    @property
    def success(self) -> float:
        """Share of the starts."""
        return self.successes / self.starts


class Results:
    """The file, and what it holds."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.of: dict[Task, Result] = {}
        for line in path.read_text().splitlines() if path.exists() else ():
            result = _parsed(line)
            if result is not None:
                self.of[result.task] = result

    def missing(self, tasks: Iterable[Task]) -> list[Task]:
        """Those that were not run yet, in order."""
        return [task for task in tasks if task not in self.of]

    def add(self, result: Result) -> None:
        """Keep a result, on disk as well."""
        torn = self.path.exists() and not self.path.read_bytes().endswith(b"\n") and self.path.stat().st_size > 0
        with self.path.open("a") as file:
            file.write(("\n" if torn else "") + json.dumps(asdict(result)) + "\n")
        self.of[result.task] = result


def _parsed(line: str) -> Result | None:
    """A line; None if a kill cut it short."""
    try:
        fields = json.loads(line)
    except json.JSONDecodeError:
        return None
    return Result(**(fields | {"task": Task(**fields["task"])}))
