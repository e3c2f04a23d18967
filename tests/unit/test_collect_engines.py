"""Engines give exactly what was sampled, or one of the errors that a pool knows what to do with.

vLLM over both of its routes, and SGLang. SGLang cannot run here: a small server stands in for it, as it does for vLLM,
whose real one `test_collect_vllm.py` asks.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest

from lake.errors import UsageError
from pipelines.collect.engines import (
    ContextFullError,
    Engine,
    EngineAnswerError,
    EngineBusyError,
    EngineError,
    EngineFailedError,
    EngineGoneError,
    EngineRefusedError,
    Generation,
    Request,
    Sampling,
)
from pipelines.collect.engines.http import ListedModel, ModelList, find_model, parse_retry_after, read_key
from pipelines.collect.engines.sglang import SglangEngine
from pipelines.collect.engines.vllm import VllmEngine
from testkit.token_engine import Fault, TokenEngine, logprob, token_engine

GENERATE, COMPLETIONS, SGLANG = "vllm /inference/v1/generate", "vllm /v1/completions", "sglang"
PROMPT = [5, 6, 7, 8]
NEW = Path("/new/weights")
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.fixture(params=[GENERATE, COMPLETIONS, SGLANG])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def server(kind: str) -> Iterator[TokenEngine]:
    speaks = "sglang" if kind == SGLANG else "vllm"
    with token_engine(TokenEngine(speaks=speaks, scale_out=kind == GENERATE)) as running:
        yield running


def client(server: TokenEngine, **options: Any) -> Engine:
    return (SglangEngine if server.speaks == "sglang" else VllmEngine)(server.url, **options)


def run(server: TokenEngine, do: Callable[[Engine], Awaitable[Any]], **options: Any) -> Any:
    """What a coroutine gives that is handed a client of the server."""

    async def open_and_run() -> Any:
        engine = client(server, **options)
        try:
            return await do(engine)
        finally:
            await engine.close()

    return asyncio.run(open_and_run())


def asking(**fields: Any) -> Request:
    return Request(**({"prompt_ids": PROMPT, "sampling": Sampling(max_tokens=12), "seed": 3} | fields))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not condition():
            await asyncio.sleep(0.005)


# ---------------------------------------------------------------- tokens


def test_it_gives_what_was_sampled(server: TokenEngine) -> None:
    generations: list[Generation] = run(server, lambda engine: engine.generate(asking(samples=3)))
    sampled = [sample for call in server.calls for sample in call.samples]
    assert len(sampled) == 3
    assert len({tuple(sample.ids) for sample in sampled}) > 1
    for generation, sample in zip(generations, sampled, strict=True):
        assert (generation.ids, generation.logprobs, generation.finish_reason) == (
            sample.ids,
            sample.logprobs,
            sample.finish_reason,
        )
        assert generation.versions == [(None, 0, len(generation.ids) - 1)]
        assert generation.constrained is None


def test_equal_seeds_give_equal_answers_and_others_others(server: TokenEngine) -> None:
    async def play(engine: Engine) -> list[list[int]]:
        return [(await engine.generate(asking(seed=seed)))[0].ids for seed in (3, 3, 4)]

    first, second, third = run(server, play)
    assert first == second != third


def test_nothing_of_the_sampling_is_left_to_the_engine(server: TokenEngine) -> None:
    sampling = Sampling(max_tokens=9, temperature=0.5, top_p=0.9, top_k=0, min_p=0.1, stop=("x",))
    run(server, lambda engine: engine.generate(asking(sampling=sampling, stop_ids=[11])))
    body = server.calls[0].body
    request_sampling = body.get("sampling_params", body)
    request_sampling = request_sampling[0] if isinstance(request_sampling, list) else request_sampling
    named = {
        name: request_sampling[name] for name in ("temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids")
    }
    off = -1 if server.speaks == "sglang" else 0
    assert named == {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": off,
        "min_p": 0.1,
        "stop": ["x"],
        "stop_token_ids": [11],
    }
    assert request_sampling["max_new_tokens" if server.speaks == "sglang" else "max_tokens"] == 9


def test_a_cut_answer_says_so(server: TokenEngine) -> None:
    (generation,) = run(server, lambda engine: engine.generate(asking(sampling=Sampling(max_tokens=1), seed=1)))
    assert (len(generation.ids), generation.finish_reason) == (1, "length")


def test_an_answer_gets_no_more_room_than_there_is(server: TokenEngine) -> None:
    server.max_model_len = len(PROMPT) + 2
    (generation,) = run(server, lambda engine: engine.generate(asking()))
    assert len(generation.ids) <= 2
    server.max_model_len = len(PROMPT)
    with pytest.raises(ContextFullError, match="4 tokens"):
        run(server, lambda engine: engine.generate(asking()))


def test_tokens_under_a_grammar_are_marked(server: TokenEngine) -> None:
    (generation,) = run(server, lambda engine: engine.generate(asking(schema=SCHEMA)))
    assert generation.constrained == [True] * len(generation.ids)
    assert "properties" in str(server.calls[0].body)


def test_log_probabilities_of_given_tokens(server: TokenEngine) -> None:
    ids = [9, 3, 17, 4]
    logprobs_read = run(server, lambda engine: engine.logprobs(ids))
    assert logprobs_read == [logprob(ids, position, server.weights) for position in range(1, len(ids))]


def test_it_describes_itself(server: TokenEngine) -> None:
    card = run(server, lambda engine: engine.describe())
    assert (card.model, card.folder, card.max_tokens) == ("policy", server.folder, 4096)
    if server.speaks == "vllm":
        assert (card.engine, card.logprobs_mode, card.dtype) == ("vllm 0.32.0", "processed", "float32")
    else:
        assert (card.engine, card.logprobs_mode, card.dtype) == ("sglang 0.5.23", None, None)


def test_a_model_that_is_not_served_is_named() -> None:
    with token_engine() as server, pytest.raises(EngineError, match=r"'other', and the engine serves policy"):
        run(server, lambda engine: engine.describe(), model="other")


# ---------------------------------------------------------------- weights and adapters


def test_every_token_is_of_the_weights_that_its_version_says(server: TokenEngine, kind: str) -> None:
    server.answer = lambda prompt, seed, most: [9] * most

    async def play(engine: Engine) -> list[Generation]:
        await engine.load_weights(NEW / "1", 1)
        server.seconds_per_token = 0.005
        async with asyncio.TaskGroup() as group:
            call = group.create_task(engine.generate(asking(sampling=Sampling(max_tokens=40))))
            await until(lambda: server.sampled > 3)
            await engine.load_weights(NEW / "2", 2)
        assert await engine.version() == 2
        return call.result()

    (generation,) = run(server, play)
    ids = [*PROMPT, *generation.ids]
    if kind == COMPLETIONS:  # it tells nothing of single tokens
        assert generation.versions == [(None, 0, 39)]
        return
    assert [version for version, _, _ in generation.versions] == [1, 2]
    assert generation.versions[0][2] + 1 == generation.versions[1][1]
    for version, first, last in generation.versions:
        for attempt in range(first, last + 1):
            assert generation.logprobs[attempt] == logprob(ids, len(PROMPT) + attempt, str(NEW / str(version)))


def test_weights_that_stay_are_told_for_every_token(server: TokenEngine) -> None:
    async def play(engine: Engine) -> list[Generation]:
        await engine.load_weights(NEW, 7)
        return await engine.generate(asking())

    (generation,) = run(server, play)
    assert generation.versions == [(7, 0, len(generation.ids) - 1)]


@pytest.mark.parametrize("failing", ["reload", "version"])
def test_an_engine_goes_on_after_a_failed_load_and_has_no_version(failing: str) -> None:
    async def play(engine: Engine) -> int | None:
        await engine.load_weights(NEW, 1)
        paths = {"reload": "collective_rpc", "version": "reset_prefix_cache"}
        server.fail(Fault(status=500, path=paths[failing]))
        with pytest.raises(EngineFailedError, match=paths[failing]):
            await engine.load_weights(NEW, 2)
        return await engine.version()

    with token_engine() as server:
        assert run(server, play) is None
        assert not server.is_paused


def test_sglang_keeps_its_weights_where_others_cannot_be_read() -> None:
    async def play(engine: Engine) -> int | None:
        await engine.load_weights(NEW, 1)
        with pytest.raises(EngineError, match="Failed to get weights"):
            await engine.load_weights(Path("/nowhere"), 2)
        return await engine.version()

    with token_engine(TokenEngine(speaks="sglang")) as server:
        assert run(server, play) == 1
        assert not server.is_paused


def test_prefixes_that_stay_in_the_cache_are_told() -> None:
    """vLLM answers 200 where it could not forget them: the next prompt would be read with the earlier weights."""
    with token_engine() as server:
        server.keeps_prefixes = True
        with pytest.raises(EngineError, match="keeps prefixes"):
            run(server, lambda engine: engine.load_weights(NEW, 1))


def test_without_the_developer_mode_it_is_told_how_to_start_vllm() -> None:
    with token_engine(TokenEngine(dev_mode=False)) as server:
        with pytest.raises(EngineRefusedError, match="VLLM_SERVER_DEV_MODE=1"):
            run(server, lambda engine: engine.load_weights(NEW, 1))
        assert run(server, lambda engine: engine.version()) is None
        (generation,) = run(server, lambda engine: engine.generate(asking()))
        assert generation.versions == [(None, 0, len(generation.ids) - 1)]


def test_an_adapter_is_called_by_its_name(server: TokenEngine) -> None:
    async def play(engine: Engine) -> None:
        with pytest.raises(EngineRefusedError, match="style"):
            await engine.generate(asking(adapter="style"))
        await engine.load_adapter("style", Path("/adapters/1"))
        await engine.load_adapter("style", Path("/adapters/2"))
        await engine.generate(asking(adapter="style"))

    run(server, play)
    assert server.adapters == {"style": "/adapters/2"}
    body = server.calls[-1].body
    assert (body.get("lora_path") or body["model"]) == "style"


# ---------------------------------------------------------------- faults

FAULTS: dict[str, tuple[Fault, type[EngineError]]] = {
    "429": (Fault(status=429, retry_after="3"), EngineBusyError),
    "503": (Fault(status=503), EngineBusyError),
    "500": (Fault(status=500), EngineFailedError),
    "502, a gateway's page": (Fault(status=502, text="<html>\x1b[31mbad gateway"), EngineFailedError),
    "401": (Fault(status=401), EngineRefusedError),
    "a redirect": (Fault(status=307), EngineRefusedError),
    "cut": (Fault(cut=True), EngineGoneError),
    "ends early": (Fault(ends=True), EngineAnswerError),
    "another form": (Fault(wrong="shape"), EngineAnswerError),
    "too few samples": (Fault(wrong="samples"), EngineAnswerError),
    "too few ids": (Fault(wrong="ids"), EngineAnswerError),
    "too many log-probabilities": (Fault(wrong="logprobs"), EngineAnswerError),
    "infinite": (Fault(wrong="number"), EngineAnswerError),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_one_of_the_errors_and_names_the_engine(server: TokenEngine, name: str) -> None:
    fault, error = FAULTS[name]

    async def play(engine: Engine) -> EngineError:
        await engine.describe()
        await engine.version()
        server.always = fault
        with pytest.raises(error) as caught:
            await engine.generate(asking(samples=2))
        assert type(caught.value) is error
        return caught.value

    answers = run(server, play)
    assert server.url in str(answers)
    assert str(answers).isprintable()
    assert len(str(answers)) < 1000
    if isinstance(answers, EngineBusyError):
        assert answers.seconds == (3 if name == "429" else None)


@pytest.mark.parametrize(("speaks", "wrong"), [("vllm", "spans"), ("sglang", "spans"), ("completions", "prompt")])
def test_an_answer_that_contradicts_itself_is_refused(speaks: str, wrong: str) -> None:
    settings = TokenEngine(speaks="sglang" if speaks == "sglang" else "vllm", scale_out=speaks == "vllm")
    with token_engine(settings) as server:
        server.always = Fault(wrong=wrong)
        with pytest.raises(EngineAnswerError, match=r"versions of weights|another prompt"):
            run(server, lambda engine: engine.generate(asking()))


def test_an_engine_that_hangs_is_given_up(server: TokenEngine) -> None:
    async def play(engine: Engine) -> None:
        server.always = Fault(hang=True)
        while not server.left:  # on a slow machine it may be given up before it is asked
            with pytest.raises(EngineGoneError, match=r"did not answer within 0.3 s"):
                await engine.generate(asking())
            await asyncio.sleep(0.05)

    run(server, play, timeout=0.3)


def test_a_cancelled_call_leaves_the_engine(server: TokenEngine) -> None:
    server.seconds = 600

    async def play(engine: Engine) -> None:
        call = asyncio.create_task(engine.generate(asking()))
        await until(lambda: server.running == 1)
        call.cancel()
        await until(lambda: server.left == 1)

    run(server, play)


def test_an_engine_that_died_is_asked_anew_what_it_is(server: TokenEngine) -> None:
    async def play(engine: Engine) -> int | None:
        await engine.generate(asking())
        server.stop()
        with pytest.raises(EngineGoneError, match="nothing answers at"):
            await engine.generate(asking())
        assert not await engine.is_healthy()
        server.max_model_len = 99
        server.start()
        assert await engine.is_healthy()
        await engine.generate(asking())
        return (await engine.describe()).max_tokens

    assert run(server, play) == 99


def test_calls_that_begin_together_ask_once_what_it_is(server: TokenEngine) -> None:
    run(server, lambda engine: asyncio.gather(*(engine.generate(asking(seed=seed)) for seed in range(8))))
    assert sum(path == "GET /v1/models" for path in server.asked) == 1


def test_a_sick_engine_is_not_healthy(server: TokenEngine) -> None:
    server.is_sick = True
    assert not run(server, lambda engine: engine.is_healthy())


# ---------------------------------------------------------------- addresses and keys


def test_no_message_holds_a_key(server: TokenEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    key = "sk-abcdefghijklmnop"
    monkeypatch.setenv("ENGINE_KEY", key)
    server.always = Fault(status=401, text=f'{{"error": {{"message": "no access with Bearer {key}"}}}}')
    with pytest.raises(EngineRefusedError, match=r"no access with") as error:
        run(server, lambda engine: engine.generate(asking()), key=read_key("ENGINE_KEY"))
    assert key not in str(error.value)


def test_a_key_that_is_not_there_is_asked_for() -> None:
    with pytest.raises(UsageError, match="NO_SUCH_KEY is not set"):
        read_key("NO_SUCH_KEY")
    assert read_key(None) is None


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://a", "http://a/v1/completions"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="--engine is"):
        VllmEngine(url)


def test_the_pause_that_is_asked_for() -> None:
    assert parse_retry_after("3") == 3
    assert parse_retry_after("-1") == 0
    for retry_after in (None, "soon", "nan", "inf"):
        assert parse_retry_after(retry_after) is None
    later = parse_retry_after(format_datetime(datetime.now(UTC) + timedelta(seconds=90), usegmt=True))
    assert later is not None
    assert 0 < later <= 90
    assert parse_retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0


def test_several_names_of_one_model_are_one_and_two_models_are_not() -> None:
    """`trajlake serve` gives a model two names; which of two models is meant, no one can know."""
    names = [
        ListedModel(id="policy", root="/m"),
        ListedModel(id="m", root="/m"),
        ListedModel(id="pi", root="/a", parent="policy"),
    ]
    assert find_model(ModelList(names), None).id == "policy"
    assert find_model(ModelList(names), "m").id == "m"
    with pytest.raises(EngineError, match="not an adapter"):
        find_model(ModelList([*names, ListedModel(id="other", root="/o")]), None)
