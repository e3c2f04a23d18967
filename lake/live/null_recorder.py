"""A recorder that records nothing, for switched-off recording."""

from typing import Any, Self


class NullRecorder:
    """A recorder, episode, step and tool call in one object; every method does nothing."""

    id = index = None

    def _nothing(self, *_: object, **__: object) -> Self:
        return self

    async def _later(self, *_: object) -> Self:
        return self

    def _true(self, *_: object, **__: object) -> bool:
        return True

    episode = step = tool_call = _nothing
    record = reject = action = answer = result = failed = reward = score = span = observe = update = end = _nothing
    flush = close = _true
    __enter__ = _nothing
    __aenter__ = _later

    def stats(self) -> None:
        """Return None."""

    def __exit__(self, *_: object) -> None:
        """Let an exception pass."""

    async def __aexit__(self, *_: object) -> None:
        """Let an exception pass."""


OFF: Any = NullRecorder()
