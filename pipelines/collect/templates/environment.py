"""An environment of your own: a number has to be guessed.

Try it with `trajlake collect --env THIS_FILE.py:make`; then put your own task in its place. It runs in the collecting
process, with all that your shell may do. Docs: docs/guides/collect/own-environment.md.
"""

import random
import re

from pipelines.collect.environments import Outcome, Task
from pipelines.collect.policies import Message


class Guessing:
    """One episode. Each rollout gets an object of its own, so what an episode remembers is simply kept in `self`."""

    name = "guessing"  # as the episodes will be called
    split = "train"  # or None

    def __init__(self, highest: int, guesses: int) -> None:
        """Keep what `make` was given."""
        self._highest = highest
        self._guesses = guesses
        self._left = guesses
        self._number = 0

    async def reset(self, task: Task) -> Outcome:
        """Begin. Draw everything from the task's seed: siblings have it in common and must begin in equal words."""
        self._number = random.Random(task.seed).randint(1, self._highest)
        self._left = self._guesses
        opening = f"I think of a number from 1 to {self._highest}. Guess it: answer with a number."
        # What a reward function may look at later, and the model never sees, is the ground truth.
        return Outcome(messages=[{"role": "user", "content": opening}], ground_truth=self._number)

    async def step(self, action: Message) -> Outcome:
        """Take the model's message. Whatever it says is answered, never raised: an exception is a failed rollout."""
        self._left -= 1
        numbers = re.findall(r"\d+", action["content"] or "")
        guess = int(numbers[-1][:9]) if numbers else None
        if guess is None:
            said = "That is no number."
        elif guess == self._number:
            said = "Right."
        else:
            said = "Too high." if guess > self._number else "Too low."
        is_right = guess == self._number
        return Outcome(
            messages=[{"role": "user", "content": said}],
            reward=1.0 if is_right else 0.0,  # None where nothing rewards a step
            terminated=is_right,  # the task is over, well or badly
            truncated=not is_right and self._left == 0,  # a limit was reached
            is_action_valid=guess is not None,
        )

    async def close(self) -> None:
        """Let go of what the episode holds: files, processes, connections. Called once, whatever happened."""


# Without `async`, every method may block: the environment is then played in a thread of its own.


def make(highest: int = 100, guesses: int = 8) -> Guessing:
    """Make one environment; `--env-arg highest=10` gives the arguments."""
    return Guessing(highest, guesses)
