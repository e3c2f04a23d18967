"""An environment that a model from nothing scores in: it asks for a word three times, and rewards an answer with it."""

import random
from pathlib import Path

from pipelines.collect.environments import Outcome, Task
from pipelines.collect.policies import Message
from trainer.online.demo import TinyPolicyConfig, save_policy

COLOURS = ("blue", "green", "red", "white")
TARGET = f"{__file__}:make"
"""For --env."""


class Asking:
    """One episode."""

    name = "asking"

    def __init__(self, split: str) -> None:
        self.split = split
        self._asked = ""
        self._draws = random.Random()
        self._left = 3

    def reset(self, task: Task) -> Outcome:
        self._draws = random.Random(f"{self.split} {task.seed}")
        return Outcome(messages=[self._ask()])

    def step(self, action: Message) -> Outcome:
        reward = float(self._asked in (action["content"] or "").split())
        self._left -= 1
        return Outcome(messages=[self._ask()], reward=reward, terminated=self._left == 0)

    def close(self) -> None:
        """It holds nothing."""

    def _ask(self) -> Message:
        self._asked = self._draws.choice(COLOURS)
        return {"role": "user", "content": f"say {self._asked}"}


def make(split: str = "train") -> Asking:
    """Make one."""
    return Asking(split)


def save_model(folder: Path) -> Path:
    """A random model that knows the words."""
    save_policy(folder, ("say", *COLOURS), TinyPolicyConfig(), seed=0)
    return folder
