"""The policy over HTTP: a whole game through a pool of engines that fail, and what they saw is what is recorded."""

import asyncio
from contextlib import closing
from functools import partial

from pipelines.collect.engines import Sampling
from pipelines.collect.engines.pool import EnginePool
from pipelines.collect.engines.vllm import VllmEngine
from pipelines.collect.environments import Task
from pipelines.collect.environments.games import GameEnvironment
from pipelines.collect.environments.house import House, HouseConfig, list_vocabulary
from pipelines.collect.policies.engine_policy import EnginePolicy, EnginePolicyOptions
from testkit.token_engine import Fault, TokenEngine, any_answer, token_engine
from trainer.online.demo import build_tokenizer


async def play(policy: EnginePolicy, seed: int):
    house = GameEnvironment(House(HouseConfig(horizon=5)))
    now = await house.reset(Task(seed=seed))
    decisions = []
    with closing(policy.open(seed, key=f"house/{seed}")) as talk:
        while not now.done:
            decisions.append(await talk.decide(now.messages, admissible=now.admissible))
            now = await house.step(decisions[-1].message)
    return decisions


async def play_all(urls: list[str], tokenizer, count: int):
    pool = EnginePool([VllmEngine(url) for url in urls])
    options = EnginePolicyOptions(sampling=Sampling(max_tokens=6))
    policy = EnginePolicy(pool, tokenizer, name="house", options=options)
    try:
        return await asyncio.gather(*(play(policy, seed) for seed in range(count)))
    finally:
        await policy.close()
        await pool.close()


def test_faults_change_nothing_of_what_is_recorded():
    tokenizer = build_tokenizer(list_vocabulary())

    def engine() -> TokenEngine:
        return TokenEngine(partial(any_answer, vocabulary=len(tokenizer), end=tokenizer.eos_token_id))

    with token_engine(engine()) as first, token_engine(engine()) as second:
        undisturbed = asyncio.run(play_all([first.url], tokenizer, 6))
        first.fail(Fault(status=429, retry_after="0.01"), Fault(status=500), Fault(cut=True), Fault(wrong="logprobs"))
        second.fail(Fault(status=503), Fault(ends=True))
        episodes = asyncio.run(play_all([first.url, second.url], tokenizer, 6))
        sample_by_tokens = {
            (*call.prompt_ids, *call.samples[0].ids): call.samples[0] for call in (*first.calls, *second.calls)
        }
    assert [[each.tokens for each in episode] for episode in episodes] == [
        [each.tokens for each in episode] for episode in undisturbed
    ]
    for episode in episodes:
        ids: list[int] = []
        for decision in episode:
            ids += [*decision.tokens.context_ids, *decision.tokens.action_ids]
            assert decision.tokens.action_logprobs == sample_by_tokens[tuple(ids)].logprobs
            assert decision.extra is None or set(decision.extra["drift"]) == {"retokenised"}
