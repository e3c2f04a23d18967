"""Calls that each report their whole prompt, as decisions: which call each goes on from, and what was new to it.

Logs of requests repeat the history in every call. A prompt goes on from the call whose own prompt it begins with,
followed by an assistant's message; what comes behind is what the policy saw since. Of several such calls the one with
the longest prompt counts. That message is not compared with what was answered, because clients rewrite it (they cut
reasoning, strip spaces, parse arguments). A prompt that goes on from no call opens a new conversation (the history was
cut, or another agent called): all of it is the context, and what stands behind its last assistant's message the state.
"""

from collections.abc import Sequence
from typing import Any

from lake.formats.chat.messages import Message, checked, decision, is_assistant, text_of
from lake.records import StepRecord


class Calls:
    """The decisions of an episode, call by call."""

    def __init__(self) -> None:
        self.initial_messages: list[Message] = []
        self.steps: list[StepRecord] = []
        self.follows: list[int | None] = []
        """Of each step: the step that its prompt goes on from; None if it opens a conversation."""
        self._prompts: dict[int, int] = {}
        """Hashes of the prompts so far, and the step of each."""

    def add(self, prompt: Sequence[Any], answer: Any, *, place: str = "messages") -> StepRecord:
        """The decision of one call.

        Args:
            prompt: the messages of its request; `lake.formats.chat.messages` says what they look like.
            answer: the assistant's message.
            place: what the prompt is called in its source, for what is said of a wrong message.

        Raises:
            ShapeError: a message is not of that form.
        """
        messages = [checked(message, f"{place}[{index}]") for index, message in enumerate(prompt)]
        start, so_far, follows = 0, 0, None
        for index, message in enumerate(messages):
            if is_assistant(message) and so_far in self._prompts:
                start, follows = index + 1, self._prompts[so_far]
            so_far = hash((so_far, _key(message)))
        self._prompts[so_far] = len(self.steps)
        self.follows.append(follows)
        is_first = not self.steps
        if is_first:
            self.initial_messages = messages
        step = step_of(messages, start, checked(answer, f"the answer to {place}"), is_first=is_first)
        self.steps.append(step)
        return step


def step_of(messages: list[Message], start: int, answer: Message, *, is_first: bool) -> StepRecord:
    """The decision of a call, the messages of whose prompt are known up to `start`; 0 if it opens a conversation.

    Answers in what is new, which no call gave, are history: the state is what stands behind them.
    """
    since = messages[start:]
    if is_first:
        return decision(answer, since, is_first=True)
    end = len(since)
    while end and is_assistant(since[end - 1]):  # the beginning of the answer, put into its mouth
        end -= 1
    behind = max((index + 1 for index in range(end) if is_assistant(since[index])), default=0)
    step = decision(answer, since[behind:], is_first=False)
    step.context = since
    return step


def _key(message: Message) -> tuple[Any, ...]:
    """What a message must share with another to be the same: an assistant's text is left out, as clients rewrite it."""
    if is_assistant(message):
        return ("assistant", len(message.get("tool_calls") or ()))
    return message["role"], text_of(message.get("content"), "\n"), str(message.get("tool_call_id"))
