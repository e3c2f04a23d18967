"""No matter what an agent gives or does, nothing is raised into it, and each thing has an outcome that is counted.

1. Values: rewards, messages, objects that break anyone who looks at them.
2. Secrets in exceptions.
3. Order: steps inside steps, after the end, after the recorder was closed, cancelled, closed from outside.
"""

import asyncio
import itertools
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from lake.records import EpisodeRecord
from testkit.spooled_episodes import Spooled, spooled

SECRET = "sk-aB3dE5fG7hJ9kL1mN3pQ"


@pytest.fixture(scope="module")
def into(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spooled]:
    with spooled(tmp_path_factory.mktemp("spool")) as rollouts:
        yield rollouts


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


class Hostile(BaseException):
    """An object, and an exception, that breaks anyone who looks at it."""

    def __repr__(self) -> str:
        raise RuntimeError("do not look at me")

    __str__ = __repr__

    def __getattr__(self, name: str) -> Any:
        raise Worse


class Worse(Exception):
    """Cannot be shown either."""

    def __str__(self) -> str:
        raise Worse


class OfTensors:
    """A number as PyTorch has it: `float` works, and JSON does not know it."""

    def __float__(self) -> float:
        return 0.5

    def tolist(self) -> float:
        return 0.5


# ---------------------------------------------------------------- 1. values


NUMBERS = [0.5, np.float64(0.5), np.float32(0.5), np.array(0.5), OfTensors()]
NONE = [float("nan"), float("inf"), np.float32("-inf"), 10**400, "high", "0.5", None, [1], b"x", Hostile(), 1j, dict]


def test_a_reward_is_a_finite_number_or_it_is_told(into: Spooled) -> None:
    ones = [(value, 1.0) for value in (1, True, np.int64(1), np.bool_(True))]
    for reward_given, expected in [*((n, 0.5) for n in NUMBERS), *ones, (1e308, 1e308), *((n, None) for n in NONE)]:
        before = into.troubles
        with into.episode() as episode:
            with episode.step(state="s") as step:
                step.action("a")
                step.reward(reward_given)
            step.reward(reward_given)
            episode.reward(reward_given)
            episode.score("judge", reward_given)
        record = into.records()[-1]
        assert (record.steps[0].reward, record.env_return) == (expected, expected)
        n_troubles = (
            0 if expected is not None else 3 if reward_given is None else 4
        )  # a score may be no number: the judge failed
        assert into.troubles - before == n_troubles


def cycle(width: int) -> Any:
    """Containers that hold each other, as trees with links to their parents do."""
    nodes: list[dict[str, Any]] = [{"name": number} for number in range(width)]
    for node in nodes:
        node["others"] = nodes
    return nodes[0]


def deep() -> Any:
    value: Any = "bottom"
    for _ in range(10_000):
        value = [value]
    return value


VALUES = {
    "a lone surrogate": "half \ud800 a character",
    "bytes that are no UTF-8": b"\xff\xfe".decode("utf-8", "surrogateescape"),
    "bytes": b"\xff\x00",
    "a cycle": cycle(2),
    "a cycle with a million ways through it": cycle(12),
    "deep": deep(),
    "an object that cannot be shown": Hostile(),
    "keys that cannot be shown": {Hostile(): 1},
    "a number too long to be spelled": 10**5000,
    "NaN": float("nan"),
    "an array": np.arange(3),
    "a naive time": datetime(2026, 1, 1),  # noqa: DTZ001
    "a time of another zone": datetime(2026, 1, 1, tzinfo=timezone(timedelta(hours=9))),
    "a set": {1, 2},
    "a type": dict,
    "a function": print,
    "a generator": (n for n in range(3)),
    "a mapping with other keys": {1: "a", None: "b", (1, 2): "c"},
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_of_any_kind_has_a_place(into: Spooled, name: str) -> None:
    """The step and the episode are recorded; what could not be taken where it was meant stands in `extra`."""
    value = VALUES[name]
    with into.episode(extra={"given": value}) as episode:
        for way in ({"messages": [user(value)]}, {"context": [user(value)]}, {"state": value}, {}):
            with episode.step(**way, extra={"given": value}) as step:
                step.action(value)
                with step.tool_call("look", value) as call:
                    call.result(value)
        with episode.step(messages=value, request=value, context=value, cost=value, unknown=value) as step:
            step.action("last", tool_calls=value, reasoning=value, prompt_ids=value)
        with episode.step(state="s") as step:
            step.answer(value)
            step.answer({"choices": [{"message": {"role": "assistant", "content": value}}]})
        episode.update(ground_truth=value, stop_reason=value, unknown=value)
        episode.score("judge", 1.0, metrics={"given": value}, reason=value)
        episode.observe(value)
    record = into.records()[-1]
    assert len(record.steps) >= 4
    assert len(record.spans) >= 4
    msgspec.json.encode(record)


def test_what_is_of_the_wrong_type_stands_in_extra_by_its_name(into: Spooled) -> None:
    with into.episode() as episode:
        with episode.step(state="s", model=b"m", cost=float("nan")) as step:
            step.action("a")
        episode.update(stop_reason=b"r", terminated="perhaps", cost=float("inf"))
    record = into.records()[-1]
    (only_step,) = record.steps
    assert (only_step.model, only_step.cost, record.stop_reason, record.terminated, record.cost) == (None,) * 5
    assert only_step.extra == {"not_taken": {"model": "b'm'"}, "cost": "nan"}
    assert record.extra == {"not_taken": {"stop_reason": "b'r'", "terminated": "perhaps"}, "cost": "inf"}


def test_a_message_that_is_longer_than_the_memory_for_it_is_recorded(tmp_path: Path) -> None:
    """What comes behind it waits for the disk: memory that is full for a moment is no reason to lose an episode."""
    text = "x" * 5_000_000
    with spooled(tmp_path, buffer_bytes=1_000_000) as small_spool:
        for _ in range(3):
            with small_spool.episode() as episode, episode.step(messages=[user(text)]) as step:
                step.action("long")
            episode.reward(1.0)
        assert [record.steps[0].state for record in small_spool.records()] == [text] * 3
        assert small_spool.sink.counts.lost == 0


# ---------------------------------------------------------------- 2. secrets


def test_keys_in_exceptions_and_errors_of_tools_are_not_recorded(
    into: Spooled, caplog: pytest.LogCaptureFixture
) -> None:
    words = f"401 for https://me:{SECRET}@example.org/v1?key={SECRET}, Authorization: Bearer {SECRET}"

    def agent() -> None:
        with into.episode() as episode:
            with episode.step(state="s") as step:
                step.action("a")
                step.tool_call("search").failed(words)
                step.reward(f"Bearer {SECRET}")  # type: ignore[arg-type]
                with suppress(ValueError), step.tool_call("search"):
                    raise ValueError(words)
            with suppress(ValueError), episode.step(messages=[user("a")]):
                raise ValueError(words)
            raise ValueError(words)

    with pytest.raises(ValueError, match="401"):
        agent()
    record = into.records()[-1]
    assert SECRET.encode() not in msgspec.json.encode(record)
    assert SECRET not in caplog.text
    assert record.error == (
        "ValueError: 401 for https://[redacted]@example.org/v1?key=[redacted] Authorization: [redacted]"
    )


def test_an_exception_that_cannot_be_shown_is_recorded_by_its_name(into: Spooled) -> None:
    def agent() -> None:
        with into.episode() as episode, episode.step(state="s") as step:
            step.action("a")
            with step.tool_call("look"):
                raise Worse

    with pytest.raises(Worse):
        agent()
    record = into.records()[-1]
    assert (record.status, record.error, record.spans[0].error) == ("failed", "Worse: (Worse)", "Worse: (Worse)")


# ---------------------------------------------------------------- 3. order


def test_steps_inside_steps_are_each_recorded(into: Spooled) -> None:
    with into.episode() as episode, episode.step(messages=[user("outer")]) as outer:
        outer.action("asks")
        with episode.step(messages=[user("inner")]) as inner:
            inner.action("answers")
    record = into.records()[-1]
    assert [(step.state, step.action) for step in record.steps] == [("outer", "asks"), ("inner", "answers")]


def test_what_comes_after_the_end_is_told(into: Spooled) -> None:
    with into.episode() as episode, episode.step(state="s") as step:
        step.action("a")
    before = into.troubles
    with episode.step(messages=[user("late")]) as late:
        late.action("a")
        with late.tool_call("look") as call:
            call.result(1)
    step.reward(1.0)
    episode.reward(1.0)
    episode.score("judge", 1.0)
    episode.end()
    assert into.troubles - before == 5
    assert len(into.records()[-1].steps) == 1


def test_an_episode_goes_on_when_its_spool_was_closed(tmp_path: Path) -> None:
    """As after `Recorder.close`: the episode is left out, and counted once."""
    with spooled(tmp_path) as small_spool:
        episode = small_spool.episode()
        with episode.step(state="s") as step:
            step.action("a")
        small_spool.sink.spool.close()
        for _ in range(3):
            with episode.step(state="s") as step:
                step.action("a")
        episode.end()
        with small_spool.episode() as another, another.step(state="s") as step:
            step.action("a")
        assert (small_spool.sink.counts.lost, small_spool.sink.counts.finished) == (2, 0)


def test_a_step_that_is_cancelled_is_what_was_known_of_it(into: Spooled) -> None:
    async def agent(answers: bool, began: asyncio.Event) -> None:
        async with into.episode() as episode:
            async with episode.step(messages=[user("first")]) as step:
                step.action("first")
            async with episode.step(messages=[user("second")]) as step:
                if answers:
                    step.action("second")
                began.set()
                await asyncio.sleep(3600)

    async def run(answers: bool) -> None:
        began = asyncio.Event()
        task = asyncio.create_task(agent(answers, began))
        await began.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    for answers in (False, True):
        asyncio.run(run(answers))
        record = into.records()[-1]
        assert (record.status, record.error) == ("aborted", "CancelledError: ")
        assert [step.action for step in record.steps] == ["first", "second"][: 1 + answers]
        assert [span.error for span in record.spans] == [] if answers else ["CancelledError: "]
        if answers:
            assert (record.steps[1].extra or {})["error"] == "CancelledError: "


def test_a_generator_that_is_closed_leaves_an_aborted_episode(into: Spooled) -> None:
    def agent() -> Iterator[str]:
        with into.episode() as episode:
            for number in itertools.count():
                with episode.step(state=str(number)) as step:
                    step.action("a")
                    yield "a"

    running = agent()
    next(running), next(running)
    running.close()
    record: EpisodeRecord = into.records()[-1]
    assert (record.status, len(record.steps)) == ("aborted", 2)


def test_contexts_that_are_left_twice_or_never_entered_are_recorded_once(into: Spooled) -> None:
    episode = into.episode()
    step = episode.step(state="s")
    step.action("a")
    call = step.tool_call("look")
    call.result(1)
    step.__exit__(None, None, None)
    step.__exit__(None, None, None)
    episode.__exit__(None, None, None)
    episode.__exit__(None, None, None)
    record = into.records()[-1]
    assert (len(record.steps), len(record.spans)) == (1, 1)
