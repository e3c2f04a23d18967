"""Tasks without an environment: a prompt, one answer.

Nobody rewards it here. What a reward function says of the answer and the task's ground truth comes afterwards, from the
sandbox that all reward functions run in (`trajlake score`).
"""

from lake.errors import UsageError
from pipelines.collect.environments import Outcome, Task
from pipelines.collect.policies import Message


class Prompt:
    """One prompt."""

    name = "prompts"
    split = None

    async def reset(self, task: Task) -> Outcome:
        """Show the task's messages. Raises UsageError: it has none."""
        if not task.messages:
            raise UsageError(f"the task {task.name or task.seed} has no messages to show; valid: at least one")
        return Outcome(messages=task.messages, task_id=task.name)

    async def step(self, action: Message) -> Outcome:
        """Any answer is the end."""
        return Outcome(messages=[], terminated=True)

    async def close(self) -> None:
        """A prompt holds nothing."""
