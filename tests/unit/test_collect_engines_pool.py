"""Several engines behind one client: each call is answered as if nothing had gone wrong, or says what did.

Numbered, so that each is a promise of its own:

1. The calls of a rollout go to one engine; new rollouts go to the engine that has the fewest calls.
2. An engine has no more calls at once than it may have, and gets none while it asks to be left alone; where that is
   long, its calls go to another one.
3. Faults are tried again, and the answers are those of an undisturbed run; what a further try would not mend is not.
4. An engine that is gone gets no calls, and is used again when it is back.
5. No answer is used that was sampled under older weights than are wanted; an engine that was restarted gets the current
   ones first.
6. A call that is cancelled leaves nothing behind.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lake.errors import UsageError
from pipelines.collect.engines import (
    Engine,
    EngineError,
    EngineFailedError,
    EngineGoneError,
    EngineRefusedError,
    Generation,
    Request,
    Sampling,
)
from pipelines.collect.engines.pool import EnginePool, PoolConfig, RateLimit, ServerPool
from pipelines.collect.engines.vllm import VllmEngine
from testkit.examples import examples
from testkit.token_engine import Fault, TokenEngine, logprob, token_engine

OLD, NEW = Path("/weights/1"), Path("/weights/2")
QUICK = {"first_pause": 0.01, "longest_pause": 0.05, "patience": 120}


@pytest.fixture
def servers() -> Iterator[list[TokenEngine]]:
    with ExitStack() as stack:
        yield [stack.enter_context(token_engine()) for _ in range(2)]


def pooled(
    servers: list[TokenEngine], do: Callable[[EnginePool], Awaitable[Any]], *, refresh: Any = None, **options: Any
) -> Any:
    """What a coroutine gives that is handed a pool of clients."""

    async def open_and_run() -> Any:
        engines = [VllmEngine(server.url, timeout=60) for server in servers]
        async with EnginePool(engines, PoolConfig(**(QUICK | options)), refresh=refresh) as pool:
            return await do(pool)

    return asyncio.run(open_and_run())


def asking(number: int, key: str = "") -> Request:
    return Request(prompt_ids=[5, 6, number + 3], sampling=Sampling(max_tokens=8), seed=number, key=key)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not condition():
            await asyncio.sleep(0.005)


def is_usable(pool: EnginePool, number: int) -> bool:
    return pool.counts().members[number].problem is None


# ---------------------------------------------------------------- 1, 2: who is called


def test_1_a_rollouts_calls_go_to_one_engine_and_rollouts_to_the_idlest(servers: list[TokenEngine]) -> None:
    for server in servers:
        server.seconds = 0.02

    async def play(pool: EnginePool) -> None:
        async def rollout(key: int) -> None:
            for turn in range(3):
                await pool.generate(asking(key * 10 + turn, key=f"r{key}"))

        await asyncio.gather(*(rollout(key) for key in range(6)))

    pooled(servers, play)
    homes = [{call.seed // 10 for call in server.calls if call.seed is not None} for server in servers]
    assert not homes[0] & homes[1]
    assert [len(keys) for keys in homes] == [3, 3]


def test_1_a_rollout_stays_with_its_engine_however_busy_that_is(servers: list[TokenEngine]) -> None:
    async def play(pool: EnginePool) -> None:
        await pool.generate(asking(1, key="r"))
        home, away_server = servers if servers[0].calls else servers[::-1]
        home.seconds = away_server.seconds = 600
        waits = [asyncio.create_task(pool.generate(asking(number))) for number in (2, 3)]
        await until(lambda: home.running == away_server.running == 1)
        waits.pop(0 if away_server.calls[0].seed == 2 else 1).cancel()
        await until(lambda: away_server.running == 0)
        home.seconds = away_server.seconds = 0
        await pool.generate(asking(4, key="r"))
        assert [call.seed for call in away_server.calls] == [away_server.calls[0].seed]
        waits[0].cancel()

    pooled(servers, play)


def test_2_an_engine_has_no_more_calls_at_once_than_it_may(servers: list[TokenEngine]) -> None:
    servers[0].seconds = 0.02

    async def play(pool: EnginePool) -> float:
        calls = asyncio.gather(*(pool.generate(asking(number)) for number in range(9)))
        await until(lambda: (servers[0].running, pool.counts().waiting) == (3, 6))
        counts = pool.counts()
        assert (counts.running, counts.waiting) == (3, 6)
        await calls
        counts = pool.counts()
        assert (counts.calls, counts.running, counts.waiting, counts.retries) == (9, 0, 0, 0)
        assert counts.tokens == sum(len(call.samples[0].ids) for call in servers[0].calls)
        return counts.members[0].saturation

    saturation = pooled(servers[:1], play, most_calls=3)
    assert servers[0].most_running == 3
    assert 0 < saturation <= 1


def test_2_an_engine_that_asks_to_be_left_alone_is(servers: list[TokenEngine]) -> None:
    servers[0].fail(Fault(status=429, retry_after="0.3"))

    async def play(pool: EnginePool) -> float:
        await pool.describe()
        began = asyncio.get_running_loop().time()
        calls = [asyncio.create_task(pool.generate(asking(number))) for number in range(3)]
        await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        first = asyncio.get_running_loop().time() - began
        await asyncio.gather(*calls)
        return first

    # The first call is refused; the others, which wait for the one place, are not sent meanwhile either.
    assert pooled(servers[:1], play, most_calls=1) >= 0.3


def test_2_a_pause_longer_than_patience_is_an_error_and_nobody_waits_so_long(servers: list[TokenEngine]) -> None:
    servers[0].fail(Fault(status=429, retry_after="86400"))

    async def play(pool: EnginePool) -> None:
        with pytest.raises(EngineGoneError, match=r"asks to wait 86400 s.* \(120 s\): .*429"):
            await pool.generate(asking(1))
        assert pool.members[0].rests_until - asyncio.get_running_loop().time() <= 120
        assert "asks to wait" in str(pool.problem)
        pool.members[0].rests_until = 0
        assert pool.problem is None

    pooled(servers[:1], play)


async def bound(pool: EnginePool, servers: list[TokenEngine]) -> tuple[TokenEngine, TokenEngine]:
    """The server that rollout `r` is bound to, and the other."""
    await pool.generate(asking(1, key="r"))
    return (servers[0], servers[1]) if servers[0].calls else (servers[1], servers[0])


def test_2_calls_of_an_engine_that_rests_for_long_go_to_another(servers: list[TokenEngine]) -> None:
    """Also those that wait for a place there; the rollout then stays with the other, which has its prefix now."""

    async def play(pool: EnginePool) -> list[list[Generation]]:
        home, away_server = await bound(pool, servers)
        home.fail(Fault(status=429, retry_after="100"))
        async with asyncio.timeout(60):
            generations = await asyncio.gather(*(pool.generate(asking(number, key="r")) for number in (2, 3, 4)))
            pool.members[servers.index(home)].rests_until = 0
            generations.append(await pool.generate(asking(5, key="r")))
        assert [len(server.calls) for server in (home, away_server)] == [1, 4]
        return generations

    moved = pooled(servers, play, most_calls=1)
    alone = pooled(
        servers[:1], lambda pool: asyncio.gather(*(pool.generate(asking(number)) for number in (2, 3, 4, 5)))
    )
    assert moved == alone


def test_2_a_short_rest_is_waited_for(servers: list[TokenEngine]) -> None:
    async def play(pool: EnginePool) -> None:
        home, away_server = await bound(pool, servers)
        home.fail(Fault(status=429, retry_after="0.05"))
        await pool.generate(asking(2, key="r"))
        assert [len(server.calls) for server in (home, away_server)] == [2, 0]

    pooled(servers, play)


def test_2_a_call_that_waits_for_the_end_of_a_rest_moves_once_another_engine_is_back(
    servers: list[TokenEngine],
) -> None:
    async def play(pool: EnginePool) -> None:
        home, away_server = await bound(pool, servers)
        away_server.stop()
        pool.take_out(pool.members[servers.index(away_server)], "gone")
        pool.members[servers.index(home)].rest(100)
        waiting = asyncio.create_task(pool.generate(asking(2, key="r")))
        await until(lambda: pool.counts().waiting == 1)
        away_server.start()
        await asyncio.wait_for(waiting, 60)
        assert [len(server.calls) for server in (home, away_server)] == [1, 1]

    pooled(servers, play)


@settings(max_examples=examples(40))
@given(st.lists(st.integers(0, 5), min_size=1, max_size=20))
def test_2_units_are_used_no_faster_than_the_limit(units: list[int]) -> None:
    async def begins() -> list[float]:
        limit = RateLimit(1000.0)
        return [limit.charge(unit) for unit in units]

    times = asyncio.run(begins())
    for index in range(1, len(times)):
        # Between two starts lies at least what was used by the first.
        assert times[index] - times[index - 1] >= units[index - 1] / 1000 - 1e-9


def test_2_requests_and_tokens_are_limited(servers: list[TokenEngine]) -> None:
    async def play(pool: EnginePool) -> float:
        await pool.describe()
        began = asyncio.get_running_loop().time()
        await asyncio.gather(*(pool.generate(asking(number)) for number in range(5)))
        return asyncio.get_running_loop().time() - began

    assert pooled(servers[:1], play, requests_per_second=20) >= 4 / 20
    assert pooled(servers[:1], play, tokens_per_second=100) >= 4 * 3 / 100


# ---------------------------------------------------------------- 3: faults

MENDED = [
    Fault(status=429, retry_after="0.01"),
    Fault(status=503),
    Fault(status=500),
    Fault(cut=True),
    Fault(ends=True),
    Fault(wrong="logprobs"),
    Fault(wrong="ids"),
    Fault(wrong="samples"),
]


def test_3_answers_amid_faults_are_those_of_an_undisturbed_run(servers: list[TokenEngine]) -> None:
    async def play(pool: EnginePool) -> list[Generation]:
        generations = await asyncio.gather(
            *(pool.generate(asking(number, key=str(number % 7))) for number in range(40))
        )
        return [generation for (generation,) in generations]

    undisturbed = pooled(servers, play)
    drawn = random.Random(0)
    for server in servers:
        server.fail(*(drawn.choice(MENDED) for _ in range(20)))
    while any(server.faults for server in servers):  # one that is gone for a moment may get no further call
        assert pooled(servers, play, tries=60) == undisturbed


@pytest.mark.parametrize("status", [400, 401, 404])
def test_3_what_a_further_try_would_not_mend_is_not_tried(servers: list[TokenEngine], status: int) -> None:
    servers[0].always = Fault(status=status)
    with pytest.raises(EngineRefusedError):
        pooled(servers[:1], lambda pool: pool.generate(asking(1)))
    assert sum(path.startswith("POST") for path in servers[0].asked) == 1


def test_3_who_fails_every_time_is_given_up(servers: list[TokenEngine]) -> None:
    servers[0].always = Fault(status=500)

    async def play(pool: EnginePool) -> int:
        with pytest.raises(EngineFailedError, match="refused with 500"):
            await pool.generate(asking(1))
        return pool.counts().retries

    assert pooled(servers[:1], play, tries=3) == 3


# ---------------------------------------------------------------- 4: gone and back


def test_4_calls_go_elsewhere_while_an_engine_is_gone(servers: list[TokenEngine]) -> None:
    async def play(pool: EnginePool) -> None:
        await pool.generate(asking(1, key="r"))
        first = 0 if servers[0].calls else 1
        servers[first].stop()
        await pool.generate(asking(2, key="r"))
        assert servers[1 - first].calls[-1].seed == 2
        assert not is_usable(pool, first)
        assert pool.counts().members[first].problem
        servers[first].start()
        await until(lambda: is_usable(pool, first))
        servers[1 - first].seconds = 600
        waits = asyncio.create_task(pool.generate(asking(3, key="r")))
        await until(lambda: servers[1 - first].running == 1)
        await pool.generate(asking(4, key="s"))
        assert servers[first].calls[-1].seed == 4
        waits.cancel()

    pooled(servers, play)


def test_4_calls_wait_for_the_only_engine(servers: list[TokenEngine]) -> None:
    async def play(pool: EnginePool) -> list[Generation]:
        await pool.generate(asking(1))
        servers[0].stop()
        calls = [asyncio.create_task(pool.generate(asking(number))) for number in range(5)]
        await until(lambda: not is_usable(pool, 0))
        servers[0].start()
        return [generation for call in calls for generation in await call]

    generations = pooled(servers[:1], play)
    assert len(generations) == 5


def test_4_calls_that_wait_for_a_place_are_not_lost_with_their_engine(servers: list[TokenEngine]) -> None:
    """Only the call that was being answered spent its try."""
    servers[0].seconds = 600

    async def play(pool: EnginePool) -> list[Any]:
        calls = [asyncio.create_task(pool.generate(asking(number))) for number in range(4)]
        await until(lambda: servers[0].running == 1)
        servers[0].stop()
        await until(lambda: not is_usable(pool, 0))
        servers[0].seconds = 0
        servers[0].start()
        return await asyncio.gather(*calls, return_exceptions=True)

    outcomes = pooled(servers[:1], play, most_calls=1, tries=1)
    assert [isinstance(outcome, EngineGoneError) for outcome in outcomes].count(True) == 1


def test_4_an_engine_whose_health_is_bad_is_left_out(servers: list[TokenEngine]) -> None:
    """vLLM answers 500 to everybody once its core died: that costs one call its try, and not all of them."""

    async def play(pool: EnginePool) -> None:
        await pool.describe()
        servers[0].is_sick, servers[0].always = True, Fault(status=500)
        await asyncio.gather(*(pool.generate(asking(number)) for number in range(4)))
        assert not is_usable(pool, 0)

    pooled(servers, play)
    assert len(servers[1].calls) == 4


def test_4_patience_ends_with_what_is_wrong_with_each(servers: list[TokenEngine]) -> None:
    for server in servers:
        server.stop()
    with pytest.raises(EngineGoneError, match=r" for 0.2 s: nothing answers at .*; nothing"):
        pooled(servers, lambda pool: pool.generate(asking(1)), patience=0.2, tries=99)
    for server in servers:
        server.start()


class DeadServer:
    """A server that answers after 2,000 probes."""

    url, probes = "http://127.0.0.1:1", 0

    async def is_healthy(self) -> bool:
        self.probes += 1
        return self.probes > 2000

    async def close(self) -> None: ...


def test_4_an_engine_is_probed_for_as_long_as_it_is_gone() -> None:
    """Pauses double; the number of seconds of the 1,025th exceeds every float if nothing limits it."""

    async def probe() -> None:
        async with ServerPool([DeadServer()], PoolConfig(first_pause=1e-9, longest_pause=1e-9)) as pool:
            (member,) = pool.members
            pool.take_out(member, "gone")
            assert member.probe is not None
            await member.probe
            assert member.problem is None

    asyncio.run(probe())


# ---------------------------------------------------------------- 5: weights


def test_5_an_engine_that_was_restarted_gets_the_current_weights_first(servers: list[TokenEngine]) -> None:
    async def play(pool: EnginePool) -> list[Generation]:
        await pool.load_weights(OLD, 1)
        await pool.load_weights(NEW, 2)
        assert await pool.version() == 2
        servers[0].restart()  # between two calls: no connection breaks
        return [
            generation for number in range(6) for generation in await pool.generate(asking(number, key=str(number)))
        ]

    generations = pooled(servers[:1], play)
    for number, generation in enumerate(generations):
        assert generation.versions == [(2, 0, len(generation.ids) - 1)]
        ids = [5, 6, number + 3, *generation.ids]
        assert generation.logprobs == [logprob(ids, 3 + index, str(NEW)) for index in range(len(generation.ids))]


def test_5_without_versions_an_engine_that_serves_another_folder_is_not_used(
    servers: list[TokenEngine], caplog: pytest.LogCaptureFixture
) -> None:
    """That nobody knows the version is told once."""

    async def play(pool: EnginePool) -> None:
        await pool.describe()
        await pool.generate(asking(1))
        await pool.generate(asking(2))
        servers[0].stop()
        servers[0].folder = "/other/weights"
        servers[0].start()
        servers[0].fail(Fault(cut=True), Fault(cut=True))
        call = asyncio.create_task(pool.generate(asking(3)))
        await until(lambda: "/other/weights now, and served" in str(pool.problem))
        assert not call.done()
        call.cancel()

    pooled(servers[:1], play)
    assert caplog.text.count("policy_version will be NULL") == 1


def test_5_so_does_one_that_does_not_tell_the_version_of_each_token() -> None:
    """A call that began before another found the engine out, and ends when it has the weights, is sampled again too."""
    server = TokenEngine(scale_out=False)

    async def play(pool: EnginePool) -> list[Generation]:
        await pool.load_weights(NEW, 2)
        server.restart()
        server.answer = lambda prompt, seed, most: [9] * most
        server.seconds_per_token, sampled = 0.01, server.sampled
        long = Request(prompt_ids=[5], sampling=Sampling(max_tokens=60), seed=1)
        calls = [asyncio.create_task(pool.generate(long))]
        await until(lambda: server.sampled > sampled)
        calls += [asyncio.create_task(pool.generate(asking(number))) for number in range(3)]
        return [generation for call in calls for generation in await call]

    with token_engine(server):
        generations = pooled([server], play)
    assert {version for generation in generations for version, _, _ in generation.versions} == {2}


def test_5_an_answer_counts_by_the_weights_that_were_wanted_when_it_was_asked_for(servers: list[TokenEngine]) -> None:
    """Newer ones that another engine has by then make it no answer of an engine that was restarted."""
    servers[0].seconds = 0.05

    async def play(pool: EnginePool) -> list[Generation]:
        await pool.load_weights(OLD, 1)
        call = asyncio.create_task(pool.generate(asking(1)))
        await until(lambda: servers[0].running == 1)
        pool.wanted_version = 2
        answers: list[Generation] = await call
        assert is_usable(pool, 0)
        return answers

    (answer,) = pooled(servers[:1], play, patience=0.5)
    assert {version for version, _, _ in answer.versions} == {1}


def test_5_whoever_pushes_is_asked_to_refresh_it(servers: list[TokenEngine]) -> None:
    refreshed: list[str] = []

    async def refresh(engine: Engine) -> None:
        refreshed.append(engine.url)
        await engine.load_weights(NEW, 2)

    async def play(pool: EnginePool) -> list[Generation]:
        for member in pool.members:
            await member.server.load_weights(NEW, 2)
        pool.wanted_version = 2
        servers[0].restart()
        return [generation for number in range(4) for generation in await pool.generate(asking(number))]

    generations = pooled(servers[:1], play, refresh=refresh)
    assert refreshed == [servers[0].url]
    assert {generation.versions[0][0] for generation in generations} == {2}


def test_5_stale_weights_that_nobody_mends_are_told(servers: list[TokenEngine]) -> None:
    async def play(pool: EnginePool) -> None:
        await pool.members[0].server.load_weights(OLD, 1)
        pool.wanted_version = 2
        call = asyncio.create_task(pool.generate(asking(1)))
        await until(lambda: "whose folder is unknown" in (pool.counts().members[0].problem or ""))
        call.cancel()

    pooled(servers[:1], play)


def test_5_an_engine_that_cannot_load_says_so_and_the_others_have(servers: list[TokenEngine]) -> None:
    servers[0].fail(Fault(status=500, path="collective_rpc"))

    async def play(pool: EnginePool) -> None:
        with pytest.raises(EngineFailedError, match="collective_rpc"):
            await pool.load_weights(NEW, 2)

    pooled(servers, play)
    assert (servers[1].weights, servers[1].version) == (str(NEW), "2")


def test_5_a_fault_of_the_refreshing_code_is_not_swallowed(servers: list[TokenEngine]) -> None:
    async def refresh(_: Engine) -> None:
        raise ZeroDivisionError("of the user's own")

    async def play(pool: EnginePool) -> None:
        pool.wanted_version = 2
        await pool.generate(asking(1))

    with pytest.raises(ZeroDivisionError, match="of the user's own"):
        pooled(servers[:1], play, refresh=refresh)


# ---------------------------------------------------------------- 6: cancelling, and the rest


MOMENTS = ["answering", "waiting for a place", "resting", "pausing", "waiting for an engine"]


@pytest.mark.parametrize("moment", MOMENTS)
def test_6_a_cancelled_call_leaves_nothing_behind(servers: list[TokenEngine], moment: str) -> None:
    server = servers[0]

    async def play(pool: EnginePool) -> None:
        await pool.describe()
        server.seconds = 600
        waiting = []
        if moment == "waiting for a place":
            waiting = [asyncio.create_task(pool.generate(asking(2)))]
            await until(lambda: server.running == 1)
        elif moment == "resting":
            pool.members[0].rest(600)
        elif moment == "pausing":
            server.always = Fault(status=429, retry_after="100")
        elif moment == "waiting for an engine":
            server.stop()
        reached: dict[str, Callable[[], bool]] = {
            "answering": lambda: server.running == 1,
            "waiting for a place": lambda: pool.counts().waiting == 1,
            "resting": lambda: pool.counts().waiting == 1,
            "pausing": lambda: pool.counts().retries == 1,
            "waiting for an engine": lambda: not is_usable(pool, 0),
        }
        call = asyncio.create_task(pool.generate(asking(1)))
        await until(reached[moment])
        for task in (call, *waiting):
            task.cancel()
        await asyncio.gather(call, *waiting, return_exceptions=True)
        await until(lambda: server.running == 0)
        assert (pool.counts().running, pool.counts().waiting) == (0, 0)
        # The place is free: there is only one.
        server.always, server.seconds, pool.members[0].rests_until = None, 0, 0
        if moment == "waiting for an engine":
            server.start()
        await asyncio.wait_for(pool.generate(asking(3)), 120)

    pooled(servers[:1], play, most_calls=1)


def test_6_a_pool_that_is_closed_leaves_nothing_behind(servers: list[TokenEngine]) -> None:
    servers[0].seconds = 600

    async def open_and_close() -> set[Any]:
        pool = EnginePool([VllmEngine(servers[0].url)], PoolConfig(**QUICK))
        call = asyncio.create_task(pool.generate(asking(1)))
        await until(lambda: servers[0].running == 1)
        await pool.close()
        with pytest.raises(EngineGoneError):
            await asyncio.wait_for(call, 60)
        return asyncio.all_tasks() - {asyncio.current_task()}

    assert asyncio.run(open_and_close()) == set()


def test_engines_that_are_not_alike_are_no_pool(servers: list[TokenEngine]) -> None:
    servers[1].dev_mode = False
    servers[1].restart()
    with pytest.raises(EngineError, match="differ in logprobs_mode: None, processed"):
        pooled(servers, lambda pool: pool.describe())


def test_a_pool_takes_what_its_shortest_engine_takes(servers: list[TokenEngine]) -> None:
    servers[1].max_model_len = 99
    assert pooled(servers, lambda pool: pool.describe()).max_tokens == 99


def test_no_engine_and_one_engine_twice_are_refused() -> None:
    with pytest.raises(UsageError, match="no engine given"):
        EnginePool([])
    with pytest.raises(UsageError, match="given twice"):
        EnginePool([VllmEngine("http://127.0.0.1:1"), VllmEngine("http://127.0.0.1:1/v1")])
