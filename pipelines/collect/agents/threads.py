"""Agents that block, thousands at once: each in a thread of its own.

No pool: its threads would keep a process from ending while an agent that nobody waits for any more goes on.
"""

import asyncio
import contextvars
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

_R = TypeVar("_R")


async def in_thread(function: Callable[..., _R], *arguments: Any) -> _R:
    """What a function returns, or raises, called in a new thread; cancelled, the thread goes on and nobody hears of it.

    Raises:
        Exception: as the function does; SystemExit and KeyboardInterrupt, which are no Exception, as they are.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[tuple[bool, Any]] = loop.create_future()

    def tell(outcome: tuple[bool, Any]) -> None:
        if not ended.done():
            ended.set_result(outcome)

    def run() -> None:
        try:
            outcome: tuple[bool, Any] = True, context.run(function, *arguments)
        except BaseException as error:
            outcome = False, error  # no future takes a StopIteration
        with suppress(RuntimeError):  # the loop has been closed
            loop.call_soon_threadsafe(tell, outcome)

    context = contextvars.copy_context()
    threading.Thread(target=run, name="trajlake-agent", daemon=True).start()
    is_returned, value = await ended
    if not is_returned:
        raise value
    return value  # type: ignore[no-any-return]
