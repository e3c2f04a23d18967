"""Data sets of reasoning-gym: one question, one answer, a score from the data set's scorer.

A seed draws the question. The package runs in the sandbox of reward functions, since its scorers evaluate the model's
text. Importing it there takes half a minute, once. An answer that the scorer cannot read, or that the sandbox stopped,
scores 0.

Facts: https://github.com/open-thought/reasoning-gym, version 0.1.25 (106 data sets; answers between <answer> tags).
"""

import json
import logging
import re
from collections.abc import Callable, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field

from lake.errors import MissingExtraError, UsageError
from lake.settings import validate
from pipelines.collect.environments import Outcome, Task
from pipelines.collect.environments.locked import reasoning_questions
from pipelines.collect.policies import Message

if TYPE_CHECKING:
    from pipelines.score.sandbox.pool import Sandbox

_log = logging.getLogger("trajlake")
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
PROMPT = "Put nothing but your final answer between <answer> and </answer>."


class ReasoningGymSettings(BaseModel, frozen=True, extra="allow"):
    """Settings of `--env reasoning-gym:DATASET`; any other `--env-arg` is a setting of the data set."""

    prompt: str = PROMPT
    """System message; empty for none. An answer without tags counts as a whole."""
    workers: int = Field(default=1, ge=1)
    """Processes that draw questions and score."""


def build_maker(dataset: str, arguments: Mapping[str, Any]) -> Callable[[], "ReasoningGym"]:
    """Return a function that makes environments of a data set; import the package now.

    Raises:
        MissingExtraError: the package is not installed.
        SandboxUnavailableError: this machine cannot isolate its scorers.
        UsageError: the data set does not exist, or rejects the settings.
    """
    settings = validate(ReasoningGymSettings, arguments, "--env-arg of reasoning-gym: ")
    dataset_settings = json.dumps(settings.model_extra or {}, sort_keys=True)
    if find_spec("reasoning_gym") is None:
        raise MissingExtraError('the package reasoning-gym is not installed: pip install "trajlake[reasoning]"')
    sandbox = _start_sandbox(settings.workers)
    first = sandbox.call([{"dataset": dataset, "settings": dataset_settings, "seed": 0}])[0]
    if first.error is not None:
        raise UsageError(f"--env reasoning-gym:{dataset} with the settings {dataset_settings}: {first.error}")
    return lambda: ReasoningGym(sandbox, dataset, dataset_settings, settings.prompt)


@cache
def _start_sandbox(workers: int) -> "Sandbox":
    from pipelines.score.sandbox.contract import FunctionSource, SandboxLimits
    from pipelines.score.sandbox.pool import Sandbox

    _log.info("importing reasoning-gym takes about half a minute")
    file = Path(reasoning_questions.__file__)
    source = FunctionSource(str(file), "ask", adapter=f"{reasoning_questions.__name__}:imported")
    limits = SandboxLimits(start_seconds=600, seconds_per_row=120, memory_mb=4096, workers=workers, rows_per_batch=1)
    return Sandbox(source, limits)


class ReasoningGym:
    """One question."""

    split = None

    def __init__(self, sandbox: "Sandbox", dataset: str, settings: str, prompt: str) -> None:
        self.name = f"reasoning-gym:{dataset}"
        self._sandbox = sandbox
        self._ask: dict[str, Any] = {"dataset": dataset, "settings": settings}
        self._system: list[Message] = [{"role": "system", "content": prompt}] if prompt else []

    def reset(self, task: Task) -> Outcome:
        """Draw the question of the task's seed. Raises RuntimeError: the data set cannot draw one."""
        self._ask["seed"] = task.seed
        drawn = self._sandbox.call([self._ask])[0]
        if drawn.value is None:
            raise RuntimeError(drawn.error)
        return Outcome(
            messages=[*self._system, {"role": "user", "content": drawn.value["question"]}],
            task_id=f"{self.name}/{task.seed}",
            ground_truth=drawn.value["answer"],
        )

    def step(self, action: Message) -> Outcome:
        """Score the answer."""
        text = str(action.get("content") or "")
        tagged = _TAGGED.findall(text)
        answer = (tagged[-1] if tagged else text).strip()
        scored = self._sandbox.call([{**self._ask, "answer": answer}])[0]
        return Outcome(
            messages=[],
            reward=0.0 if scored.value is None else scored.value["score"],
            terminated=True,
            is_action_valid=scored.value is not None,
            extra={"scorer_error": scored.error} if scored.error else None,
        )

    def close(self) -> None:
        """Do nothing: a question holds no resources."""
