"""A manager is asked for a rubric: it may ask back, then writes the criteria that texts are judged by.

What has to be in the rubric depends on the subject, which the task says, and on the readers, which only a question
brings to light. An answer is JSON, either {"ask": ...} or {"criteria": [...]}; `loop.toml` holds the engine to that.
"""

import json
import random
from itertools import product

from judge import SIGNS

from pipelines.collect.environments import Outcome, Task
from pipelines.collect.policies import Message

SUBJECTS = {
    "vaccines": ("sources", "risks"),
    "bridges": ("numbers", "drawings"),
    "recipes": ("steps", "amounts"),
    "contracts": ("clauses", "dates"),
}
READERS = {"children": ("examples", "pictures"), "experts": ("terms", "proofs"), "managers": ("costs", "summary")}
QUESTIONS = {"readers": "They are for {}.", "length": "Any length will do.", "language": "In English."}
PAIRS = list(product(SUBJECTS, READERS))
HELD_OUT = {("bridges", "managers"), ("recipes", "experts"), ("contracts", "children")}
"""Pairs that no training task has."""


class Rubrics:
    """One rubric."""

    name = "rubrics"
    runs_inline = True

    def __init__(self, split: str, turns: int) -> None:
        """Tasks of a split, train or held_out; `turns` is how many answers there may be, the rubric included."""
        self.split = split
        self._turns = turns

    def reset(self, task: Task) -> Outcome:
        """Draw a subject, its readers, and a text that both rubrics will be applied to."""
        rng = random.Random(f"{self.split} {task.seed}")
        subject, self._readers = rng.choice([pair for pair in PAIRS if (pair in HELD_OUT) == (self.split != "train")])
        self._left = self._turns
        text = " ".join(sign for sign in SIGNS.values() if rng.random() < 0.5)
        truth = {"criteria": [*SUBJECTS[subject], *READERS[self._readers]], "text": text}
        question = f"Write a rubric for texts about {subject}."
        return Outcome(messages=[{"role": "user", "content": question}], ground_truth=truth)

    def step(self, action: Message) -> Outcome:
        """Answer a question; a rubric is the end, and is judged elsewhere (`rubrics.py`)."""
        self._left -= 1
        try:
            said = json.loads(action["content"])
        except ValueError:
            said = {}
        if "criteria" in said:
            return Outcome(messages=[], terminated=True, is_action_valid=True)
        answer = QUESTIONS.get(said.get("ask"), "That is no answer.").format(self._readers)
        return Outcome(
            messages=[{"role": "user", "content": answer}], truncated=self._left == 0, is_action_valid="ask" in said
        )


def make(split: str = "train", turns: int = 5) -> Rubrics:
    return Rubrics(split, turns)
