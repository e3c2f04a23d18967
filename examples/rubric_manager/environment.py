"""A manager is asked for a rubric: it may ask back, then writes the criteria. A worker writes texts by them.

What has to be in the rubric depends on the subject, which the task says, and on the readers, which only a question
brings to light. An answer is JSON, either {"ask": ...} or {"criteria": [...]}; `loop.toml` holds the engine to that.
"""

import json
import random
from itertools import product

from worker import written_by_model, written_by_script

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
    """One rubric, and the texts that a worker writes by it."""

    name = "rubrics"

    def __init__(self, split: str, turns: int, texts: int, worker: str | None, worker_model: str) -> None:
        self.split = split
        self._turns, self._texts = turns, texts
        self._worker, self._worker_model = worker, worker_model

    async def reset(self, task: Task) -> Outcome:
        """Draw a subject and its readers."""
        self._seed = task.seed or 0
        rng = random.Random(f"{self.split} {task.seed}")
        pair = rng.choice([pair for pair in PAIRS if (pair in HELD_OUT) == (self.split != "train")])
        self._subject, self._readers = pair
        self._left = self._turns
        truth = {"criteria": [*SUBJECTS[self._subject], *READERS[self._readers]]}
        question = f"Write a rubric for texts about {self._subject}."
        return Outcome(messages=[{"role": "user", "content": question}], ground_truth=truth)

    async def step(self, action: Message) -> Outcome:
        """Answer a question, or have the worker write by a rubric: that is the end, and is judged in `rubrics.py`."""
        self._left -= 1
        try:
            said = json.loads(action["content"])
        except ValueError:
            said = {}
        if said.get("criteria"):
            texts = [await self._written(said["criteria"], number) for number in range(self._texts)]
            shown = [{"role": "user", "name": "worker", "content": text} for text in texts]
            return Outcome(messages=shown, terminated=True, is_action_valid=True)
        answer = QUESTIONS.get(said.get("ask"), "That is no answer.").format(self._readers)
        return Outcome(
            messages=[{"role": "user", "content": answer}], truncated=self._left == 0, is_action_valid="ask" in said
        )

    async def _written(self, criteria: list[str], number: int) -> str:
        if self._worker is not None:
            seed = 100 * self._seed + number
            return await written_by_model(self._worker, self._worker_model, self._subject, criteria, seed)
        # Siblings that write one rubric get the same texts: what differs between them is the rubric.
        rng = random.Random(f"{self.split} {self._seed} {number}")
        return written_by_script(criteria, list(SUBJECTS[self._subject]), rng)


def make(
    split: str = "train", turns: int = 5, texts: int = 3, worker: str | None = None, worker_model: str = "worker"
) -> Rubrics:
    """Tasks of a split, train or held_out.

    Args:
        split: of the pairs of subject and readers.
        turns: answers that there may be, the rubric included.
        texts: that the worker writes by a rubric.
        worker: base URL of the model that is the worker; the stand-in unless given.
        worker_model: the name that it is served by.
    """
    return Rubrics(split, turns, texts, worker, worker_model)
