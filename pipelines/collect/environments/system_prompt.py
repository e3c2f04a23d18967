"""A system prompt before what an environment says: the same task for a policy that is told more, or something else.

The prompt is part of the episode's first messages, so a lake says of each episode what its policy was told. One system
message comes of a prompt and an environment that has one of its own: many chat templates take no second one.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from lake.errors import UsageError
from pipelines.collect.environments import Environment, Outcome, Task
from pipelines.collect.policies import Message


class SystemPrompted:
    """An environment whose first message is a system prompt.

    Args:
        inner: the environment.
        text: of the prompt.
    """

    def __init__(self, inner: Environment, text: str) -> None:
        self._inner, self._text = inner, text

    @property
    def name(self) -> str:
        """The environment's own: its rewards are those of any other prompt."""
        return self._inner.name

    @property
    def split(self) -> str | None:
        """The environment's own."""
        return self._inner.split

    async def reset(self, task: Task) -> Outcome:
        """Begin the task, with the prompt first."""
        first = await self._inner.reset(task)
        return replace(first, messages=with_system_prompt(first.messages, self._text))

    async def step(self, action: Message) -> Outcome:
        """As the environment answers."""
        return await self._inner.step(action)

    async def close(self) -> None:
        """Close the environment."""
        await self._inner.close()


def with_system_prompt(messages: list[Message], text: str) -> list[Message]:
    """Messages that open with a system prompt; a system message that they open with goes on after it."""
    if not messages or messages[0].get("role") != "system":
        return [{"role": "system", "content": text}, *messages]
    own, *others = messages
    content = own.get("content")
    if isinstance(content, list):
        return [{**own, "content": [{"type": "text", "text": text}, *content]}, *others]
    return [{**own, "content": f"{text}\n\n{content}" if content else text}, *others]


def prompting(make: Callable[[], Environment], text: str | None) -> Callable[[], Environment]:
    """A factory of environments that open with a system prompt; without one, those of `make`."""
    return make if text is None else lambda: SystemPrompted(make(), text)


def prompt_text(path: str | Path) -> str:
    """The system prompt in a file. Raises UsageError: it cannot be read, or says nothing."""
    try:
        text = Path(path).read_text("utf-8").strip()
    except (OSError, ValueError) as error:
        raise UsageError(f"the system prompt {path} cannot be read: {error}") from error
    if not text:
        raise UsageError(f"the system prompt {path} is empty; write what the policy is to be told")
    return text
