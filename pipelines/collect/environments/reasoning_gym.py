"""Data sets of reasoning-gym: a question, one answer, a score from the data set's own scorer.

A seed draws the question. The package runs in the sandbox of reward functions, since its scorers evaluate what the
model wrote; importing it there takes half a minute, once. An answer that its scorer cannot read, or that the sandbox
had to stop, scores 0.

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
from lake.settings import validated
from pipelines.collect.environments import Outcome, Task
from pipelines.collect.environments.locked import reasoning_questions
from pipelines.collect.policies import Message

if TYPE_CHECKING:
    from pipelines.score.sandbox.pool import Sandbox

_log = logging.getLogger("trajlake")
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
PROMPT = "Put nothing but your final answer between <answer> and </answer>."


class ReasoningGymSettings(BaseModel, frozen=True, extra="allow"):
    """Settings of `--env reasoning-gym:DATASET`; any other `--env-arg` is one of the data set."""

    prompt: str = PROMPT
    """System message; empty for none. An answer without tags is taken as a whole."""
    workers: int = Field(default=1, ge=1)
    """Processes that draw questions and score."""


def maker(what: str, arguments: Mapping[str, Any]) -> Callable[[], "ReasoningGym"]:
    """Makes environments of a data set; the package is imported now.

    Raises:
        MissingExtraError: the package is not installed.
        SandboxUnavailableError: this machine cannot isolate its scorers.
        UsageError: no such data set, or settings that it does not take.
    """
    settings = validated(ReasoningGymSettings, arguments, "--env-arg of reasoning-gym: ")
    own = json.dumps(settings.model_extra or {}, sort_keys=True)
    if find_spec("reasoning_gym") is None:
        raise MissingExtraError('the package reasoning-gym is not installed: pip install "trajlake[reasoning]"')
    sandbox = _started(settings.workers)
    first = sandbox.call([{"dataset": what, "settings": own, "seed": 0}])[0]
    if first.error is not None:
        raise UsageError(f"--env reasoning-gym:{what} with the settings {own}: {first.error}")
    return lambda: ReasoningGym(sandbox, what, own, settings.prompt)


@cache
def _started(workers: int) -> "Sandbox":
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

    def __init__(self, sandbox: "Sandbox", what: str, settings: str, prompt: str) -> None:
        self.name = f"reasoning-gym:{what}"
        self._sandbox = sandbox
        self._ask: dict[str, Any] = {"dataset": what, "settings": settings}
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
        said = str(action.get("content") or "")
        tagged = _TAGGED.findall(said)
        answer = (tagged[-1] if tagged else said).strip()
        scored = self._sandbox.call([{**self._ask, "answer": answer}])[0]
        return Outcome(
            messages=[],
            reward=0.0 if scored.value is None else scored.value["score"],
            terminated=True,
            is_action_valid=scored.value is not None,
            extra={"scorer_error": scored.error} if scored.error else None,
        )

    def close(self) -> None:
        """An answered question holds nothing."""
