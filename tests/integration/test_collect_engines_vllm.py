"""A real vLLM, over both of its routes, against transformers: the same tokens, the same numbers, the right version.

vLLM is installed once per machine in its own environment (3.4 GB); `make test-slow`.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from pipelines.collect.engines import (
    ContextFullError,
    Engine,
    EngineError,
    EngineRefusedError,
    Generation,
    Request,
    Sampling,
)
from pipelines.collect.engines.pool import EnginePool
from pipelines.collect.engines.vllm import VllmEngine
from testkit.vllm_server import Vllm, talking_model, vllm_server

pytestmark = pytest.mark.slow

PROMPT = list(range(5, 40))
ROUTES = ["/inference/v1/generate", "/v1/completions"]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CLOSE = 2e-4
"""Nats between vLLM and transformers, float32; 4.7e-6 was the most that was seen here."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Versions 1 and 2 of the policy, whose tied heads are written out, as they have to be for vLLM on a CPU."""
    from trainer.policy.model_files import write_model

    folder = tmp_path_factory.mktemp("models")
    for seed in range(2):
        write_model(talking_model(folder / f"tied-{seed}", seed=seed), folder / str(seed), tied=True)
    return [folder / str(seed) for seed in range(2)]


@pytest.fixture(scope="module")
def server(models: list[Path]) -> Iterator[Vllm]:
    flags = ("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm", "--enable-scale-out")
    with vllm_server(models[0], *flags) as started:
        yield started


@pytest.fixture(params=ROUTES)
def route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The route that is taken: without the first, as without --enable-scale-out, it is the second."""
    if request.param == ROUTES[1]:
        monkeypatch.setattr("pipelines.collect.engines.vllm.GENERATE", "/no/such/route")
    return str(request.param)


def run(server: Vllm, do: Callable[[VllmEngine], Awaitable[Any]]) -> Any:
    async def open_and_run() -> Any:
        engine = VllmEngine(server.base)
        try:
            return await do(engine)
        finally:
            await engine.close()

    return asyncio.run(open_and_run())


def asking(**fields: Any) -> Request:
    return Request(**({"prompt_ids": PROMPT, "sampling": Sampling(max_tokens=60), "seed": 3} | fields))


def truth(folder: Path, ids: Sequence[int], temperature: float = 1.0) -> list[float]:
    """Log-probabilities of all ids but the first, by transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        logprobs = (model(torch.tensor([ids])).logits[0, :-1] / temperature).log_softmax(-1)
    return [float(value) for value in logprobs.gather(1, torch.tensor(ids)[1:, None])[:, 0]]


def furthest(logprobs: Sequence[float], expected: Sequence[float]) -> float:
    return max(abs(ours - theirs) for ours, theirs in zip(logprobs, expected, strict=True))


def test_it_says_what_it_is(server: Vllm, models: list[Path]) -> None:
    card = run(server, lambda engine: engine.describe())
    assert card.engine.startswith("vllm 0.")
    assert (card.model, card.folder, card.max_tokens) == ("policy", str(models[0]), 2048)
    assert (card.logprobs_mode, card.dtype) == ("processed", "float32")
    assert run(server, lambda engine: engine.is_healthy())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_tokens_and_log_probabilities_are_those_of_the_model(
    server: Vllm, models: list[Path], route: str, temperature: float
) -> None:
    async def play(engine: VllmEngine) -> list[Generation]:
        await engine.load_weights(models[0], 1)
        sampling = Sampling(max_tokens=200, temperature=temperature)
        return await engine.generate(asking(sampling=sampling, samples=3))

    generations = run(server, play)
    assert len({tuple(generation.ids) for generation in generations}) == 3
    for generation in generations:
        expected = truth(models[0], [*PROMPT, *generation.ids], temperature)[len(PROMPT) - 1 :]
        assert furthest(generation.logprobs, expected) < CLOSE
        assert generation.versions == [(1, 0, len(generation.ids) - 1)]
        assert generation.finish_reason == ("length" if len(generation.ids) == 200 else "stop")


def test_both_routes_sample_the_same(server: Vllm, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run(server, lambda engine: engine.generate(asking(samples=2)))
    monkeypatch.setattr("pipelines.collect.engines.vllm.GENERATE", "/no/such/route")
    second = run(server, lambda engine: engine.generate(asking(samples=2)))
    assert [each.ids for each in first] == [each.ids for each in second]
    assert [each.logprobs for each in first] == [each.logprobs for each in second]


def test_given_tokens_have_the_log_probabilities_of_the_model(server: Vllm, models: list[Path]) -> None:
    async def play(engine: VllmEngine) -> list[float]:
        await engine.load_weights(models[1], 2)
        return await engine.logprobs(PROMPT)

    assert furthest(run(server, play), truth(models[1], PROMPT)) < CLOSE


def test_an_answer_is_held_to_a_schema(server: Vllm, models: list[Path], route: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models[0])
    (generation,) = run(
        server, lambda engine: engine.generate(asking(schema=SCHEMA, sampling=Sampling(max_tokens=1500)))
    )
    assert generation.finish_reason == "stop"
    assert isinstance(json.loads(tokenizer.decode(generation.ids, skip_special_tokens=True))["a"], int)
    assert generation.constrained == [True] * len(generation.ids)
    assert 0.0 in generation.logprobs  # what the grammar left no choice about


def test_texts_and_tokens_end_an_answer(server: Vllm, models: list[Path], route: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models[0])
    sampling = Sampling(max_tokens=300, temperature=1.5, stop=("e",))
    (text,) = run(server, lambda engine: engine.generate(asking(sampling=sampling)))
    assert "e" in tokenizer.decode(text.ids[-1:])
    assert "e" not in tokenizer.decode(text.ids[:-1])
    ends = list(range(20, 60))
    sampling = Sampling(max_tokens=300, temperature=1.5)
    (token,) = run(server, lambda engine: engine.generate(asking(sampling=sampling, stop_ids=ends)))
    assert token.ids[-1] in ends
    assert not set(token.ids[:-1]) & set(ends)
    assert (text.finish_reason, token.finish_reason) == ("stop", "stop")


def counted(server: Vllm, name: str) -> float:
    """A figure of the engine's own."""
    lines = [line for line in server.get("/metrics").splitlines() if line.startswith(f"vllm:{name}")]
    return sum(float(line.split()[-1]) for line in lines)


def test_under_load_every_token_is_of_the_weights_that_its_version_says(server: Vllm, models: list[Path]) -> None:
    """Calls continue through pushes, and what they sample then is what the new weights say of the whole prefix."""

    async def play(engine: VllmEngine) -> list[Generation]:
        await engine.load_weights(models[0], 1)
        sampling = Sampling(max_tokens=1500, temperature=1.5)
        async with asyncio.TaskGroup() as group:
            calls = [group.create_task(engine.generate(asking(sampling=sampling, seed=seed))) for seed in range(16)]
            for version in (2, 3):
                sampled = await asyncio.to_thread(counted, server, "generation_tokens_total")
                while await asyncio.to_thread(counted, server, "generation_tokens_total") < sampled + 100:
                    await asyncio.sleep(0.01)
                await engine.load_weights(models[1 - version % 2], version)
        return [generation for call in calls for generation in call.result()]

    generations = run(server, play)
    assert max(len(generation.versions) for generation in generations) == 3
    largest = 0.0
    for generation in generations:
        ids = [*PROMPT, *generation.ids]
        expected = [truth(folder, ids, 1.5)[len(PROMPT) - 1 :] for folder in models]
        assert furthest(expected[0], expected[1]) > 0.1  # the versions differ
        for version, first, last in generation.versions:
            assert version is not None
            part = slice(first, last + 1)
            largest = max(largest, furthest(generation.logprobs[part], expected[1 - version % 2][part]))
    print(f"largest difference to transformers across pushes: {largest:.1e}")
    assert largest < CLOSE


def test_a_cancelled_call_is_aborted(server: Vllm) -> None:
    async def play(engine: VllmEngine) -> None:
        sampling = Sampling(max_tokens=2000, temperature=1.5)
        call = asyncio.create_task(engine.generate(asking(sampling=sampling, samples=8)))
        async with asyncio.timeout(300):
            while not await asyncio.to_thread(counted, server, "num_requests_running"):
                assert not call.done()
                await asyncio.sleep(0.01)
            call.cancel()
            while await asyncio.to_thread(counted, server, "num_requests_running"):
                await asyncio.sleep(0.05)

    run(server, play)


def test_what_it_refuses_it_says_why(server: Vllm, route: str) -> None:
    with pytest.raises(ContextFullError, match="2048"):
        run(server, lambda engine: engine.generate(asking(prompt_ids=[5] * 2048)))
    with pytest.raises(EngineRefusedError, match="vocab"):
        run(server, lambda engine: engine.generate(asking(prompt_ids=[999_999])))
    with pytest.raises(EngineRefusedError, match="does not exist"):
        run(server, lambda engine: engine.generate(asking(adapter="nobody")))
    (generation,) = run(server, lambda engine: engine.generate(asking(prompt_ids=[5] * 2047)))
    assert len(generation.ids) == 1


def test_a_pool_of_it_is_an_engine(server: Vllm, models: list[Path]) -> None:
    async def play() -> list[Generation]:
        async with EnginePool([VllmEngine(server.base)]) as pool:
            engine: Engine = pool
            await engine.load_weights(models[0], 7)
            calls = await asyncio.gather(*(engine.generate(asking(seed=seed, key=str(seed))) for seed in range(16)))
            assert pool.counts().calls == 16
            return [generation for (generation,) in calls]

    generations = asyncio.run(play())
    assert {version for generation in generations for version, _, _ in generation.versions} == {7}


def test_weights_that_cannot_be_read_leave_it_without_a_version(server: Vllm, models: list[Path]) -> None:
    """The last test: vLLM 0.32 has no whole weights then, and ends at its next token."""

    async def play(engine: VllmEngine) -> None:
        await engine.load_weights(models[0], 1)
        with pytest.raises(EngineError, match=r"collective_rpc.*restart it"):
            await engine.load_weights(Path("/nowhere"), 2)
        assert await engine.version() is None

    run(server, play)
