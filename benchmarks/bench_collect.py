"""How busy collecting keeps an engine: tokens per second of multi-turn episodes, beside the engine's own.

    trajlake serve MODEL                       # a real vLLM, in another terminal
    python benchmarks/bench_collect.py --engine http://127.0.0.1:8000 --model MODEL [--episodes 256] [--parallel 64]

Episodes of the demo's house are collected into a lake by the manager, so many at once. Then the same calls (prompts and
lengths of answers, in the order of each episode, as many episodes at once) are sent to the engine by a bare aiohttp
client that does nothing else: no environment, no template, no tokenizer, no spool, no lake. Both start with an empty
prefix cache. Prints a Markdown table for docs/benchmarks.md, which states the machine.
"""

import argparse
import asyncio
import os
import platform
import tempfile
import time
from collections import defaultdict

import aiohttp

import lake
from pipelines.collect.engines import Sampling
from pipelines.collect.manager.rounds import Wanted
from pipelines.collect.manager.run import Collection, collect
from pipelines.collect.manager.scheduler import Limits
from pipelines.collect.tasks import seeds
from pipelines.collect.wiring import PlayerOptions, player_of

Call = tuple[list[int], int]
"""Prompt, and tokens of the answer."""
SIBLINGS = 8


async def forget(url: str) -> None:
    """Empty the engine's prefix cache."""
    async with aiohttp.ClientSession() as session, session.post(f"{url}/reset_prefix_cache") as response:
        response.raise_for_status()


def collected(uri: str, url: str, model: str, episodes: int, parallel: int, most: int) -> float:
    """Seconds of a round of the house."""
    options = PlayerOptions(env="house", engines=(url,), model=model, sampling=Sampling(max_tokens=most))
    what = Collection(
        wanted=Wanted(run="bench", groups=episodes // SIBLINGS, group_size=SIBLINGS),
        limits=Limits(parallel=parallel),
        rounds=1,
        progress_seconds=3600.0,
    )
    player = player_of(options, uri, "bench")
    done = collect(lake.open(uri, create=True), player, seeds(0, 10_000), what, say=print, progress=print)
    return done.figures.seconds


def calls_of(uri: str) -> list[list[Call]]:
    """The calls of each episode, in order."""
    rows = lake.open(uri).sql(
        "SELECT episode_id, prefix_step_index, context_ids, action_ids FROM tokens ORDER BY episode_id, step_index"
    )
    calls: defaultdict[int, list[Call]] = defaultdict(list)
    known: list[int] = []
    for episode, prefix, context, action in rows.iter_rows():
        known = [*([] if prefix is None else known), *context]
        calls[episode].append((known, len(action)))
        known = [*known, *action]
    return list(calls.values())


async def bare(url: str, episodes: list[list[Call]], parallel: int) -> float:
    """Seconds of the same calls without anything around them."""
    waiting = iter(episodes)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def client() -> None:
            for episode in waiting:
                for number, (prompt, length) in enumerate(episode):
                    sampling = {"max_tokens": length, "ignore_eos": True, "temperature": 1.0, "logprobs": 0}
                    body = {
                        "token_ids": prompt,
                        "sampling_params": sampling | {"seed": number},
                        "output_mode": "tokens",
                    }
                    async with session.post(f"{url}/inference/v1/generate", json=body) as response:
                        answer = await response.json()
                        assert len(answer["choices"][0]["token_ids"]) == length

        began = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(parallel)))
        return time.perf_counter() - began


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", required=True, help="URL of a vLLM that `trajlake serve` started")
    parser.add_argument("--model", required=True, help="the folder that it serves")
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--parallel", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=4)
    parser.add_argument("--runs", type=int, default=2, help="of each kind, in turn; the best counts")
    given = parser.parse_args()
    ours, theirs = [], []
    for _ in range(given.runs):
        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(forget(given.engine))
            uri = f"{folder}/lake"
            sizes = (given.episodes, given.parallel, given.max_tokens)
            seconds = collected(uri, given.engine, given.model, *sizes)
            episodes = calls_of(uri)
            tokens = sum(length for episode in episodes for _, length in episode)
            ours.append(tokens / seconds)
            asyncio.run(forget(given.engine))
            theirs.append(tokens / asyncio.run(bare(given.engine, episodes, given.parallel)))
    calls = sum(map(len, episodes))
    print(f"machine: {os.cpu_count()} cores ({platform.machine()}), load {os.getloadavg()[0]:.1f}\n")
    head = ("episodes", "at once", "calls", "bare, tokens/s", "collected, tokens/s", "ratio")
    print(f"| {' | '.join(head)} |\n|{' --- |' * len(head)}")
    best = max(ours), max(theirs)
    cells = (
        len(episodes),
        given.parallel,
        f"{calls:,}",
        f"{best[1]:,.0f}",
        f"{best[0]:,.0f}",
        f"{best[0] / best[1]:.2f}",
    )
    print(f"| {' | '.join(map(str, cells))} |")


if __name__ == "__main__":
    main()
