"""Synchronous environments side by side: each in its own thread, none held up by another."""

import asyncio
import threading
from typing import Any

import pytest

from pipelines.collect.environments import Outcome, Task
from pipelines.collect.policies import Message
from pipelines.collect.user_code import ThreadEnvironment

SAID: Message = {"role": "assistant", "content": ""}


def question() -> Outcome:
    return Outcome(messages=[{"role": "user", "content": "?"}])


class Watched:
    """Notes the threads that it lives in."""

    def __init__(self) -> None:
        self.threads = [threading.get_ident()]
        self.is_closed = threading.Event()

    def reset(self, task: Task) -> Outcome:
        self.threads.append(threading.get_ident())
        return question()

    def step(self, action: Message) -> Outcome:
        self.threads.append(threading.get_ident())
        return question()

    def close(self) -> None:
        self.threads.append(threading.get_ident())
        self.is_closed.set()


def in_thread(environment: Any) -> ThreadEnvironment:
    return ThreadEnvironment(lambda: environment, name="watched", split=None)


def test_an_environment_lives_in_one_thread_and_not_in_the_loops() -> None:
    environments_made: list[Watched] = []

    def make() -> Watched:
        environments_made.append(Watched())
        return environments_made[-1]

    async def play() -> None:
        environments = [ThreadEnvironment(make, name="watched", split=None) for _ in range(20)]
        for environment in environments:
            await environment.reset(Task())
        await asyncio.gather(*(environment.step(SAID) for environment in environments))
        for environment in environments:
            await environment.close()

    asyncio.run(play())
    assert all(len(set(watched.threads)) == 1 and len(watched.threads) == 4 for watched in environments_made)
    threads = {watched.threads[0] for watched in environments_made}
    assert threading.get_ident() not in threads


def test_many_block_at_once_and_the_loop_goes_on() -> None:
    """All wait for each other: with fewer threads than environments none would come back."""
    together = threading.Barrier(64)

    class Meeting(Watched):
        def step(self, action: Message) -> Outcome:
            together.wait(120)
            return question()

    async def play() -> None:
        environments = [in_thread(Meeting()) for _ in range(64)]
        await asyncio.gather(*(environment.reset(Task()) for environment in environments))
        await asyncio.gather(*(environment.step(SAID) for environment in environments))
        await asyncio.gather(*(environment.close() for environment in environments))

    asyncio.run(play())


def test_one_that_hangs_is_given_up_and_closed_when_it_returns() -> None:
    release = threading.Event()
    entered = threading.Event()

    class Hanging(Watched):
        def step(self, action: Message) -> Outcome:
            entered.set()
            release.wait(120)
            return question()

    hanging = Hanging()

    async def play() -> None:
        environment = in_thread(hanging)
        await environment.reset(Task())
        step = asyncio.ensure_future(environment.step(SAID))
        while not entered.is_set():
            await asyncio.sleep(0)
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        await environment.close()  # comes back although the step has not
        assert not hanging.is_closed.is_set()

    asyncio.run(play())
    release.set()
    assert hanging.is_closed.wait(120)


def test_a_fault_is_raised_where_it_is_awaited() -> None:
    class Faulty(Watched):
        def step(self, action: Message) -> Outcome:
            raise KeyError("chest")

    async def play() -> None:
        environment = in_thread(Faulty())
        await environment.reset(Task())
        try:
            await environment.step(SAID)
        finally:
            await environment.close()

    with pytest.raises(KeyError, match="chest"):
        asyncio.run(play())


def test_one_that_was_never_begun_has_no_thread() -> None:
    before = set(threading.enumerate())  # one of them, left by an earlier test, may end during this one
    asyncio.run(in_thread(Watched()).close())
    assert not set(threading.enumerate()) - before
