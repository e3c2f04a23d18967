"""Many calls at once through the recording proxy: none is lost, none is there twice, each is of its episode."""

import asyncio
import json
from collections import Counter
from pathlib import Path

import aiohttp
import pytest

import lake
from testkit.engine_server import engine_server
from testkit.proxy_process import Proxy, proxy

CHAT = "/v1/chat/completions"
TASKS = 64


def read_words(text: str) -> str:
    """What an answer says, whole or streamed."""
    if text.startswith("{"):
        return str(json.loads(text)["choices"][0]["message"]["content"])
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)


async def calls_at_once(at: Proxy, count: int) -> dict[str, str]:
    """The answers to calls of 64 episodes that are all under way together, by what they asked."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def call(number: int) -> tuple[str, str]:
            question = f"question {number}"
            messages = [{"role": "user", "content": question}]
            body = {"model": "slow-10", "messages": messages, "stream": number % 2 == 1, "temperature": 1.0}
            async with session.post(f"{at.base}/ep/task-{number % TASKS}{CHAT}", json=body) as response:
                assert response.status == 200
                return question, read_words(await response.text())

        return dict(await asyncio.gather(*map(call, range(count))))


@pytest.mark.parametrize("count", [200, pytest.param(1000, marks=pytest.mark.slow)])
def test_of_many_calls_at_once_none_is_lost_and_none_is_there_twice(count: int, tmp_path: Path) -> None:
    with engine_server() as engine, proxy(engine, tmp_path) as at:
        answers = asyncio.run(calls_at_once(at, count))
        printed = at.end()
        assert at.log.read_text() == ""
    assert f"{count} calls: {count} steps, 0 failed; {TASKS} episodes new" in printed
    rows = lake.open(at.lake).sql("SELECT task_id, action FROM steps JOIN episodes USING (episode_id)").rows()
    expected = [(f"task-{int(question.split()[1]) % TASKS}", text) for question, text in answers.items()]
    assert Counter(rows) == Counter(expected)
    assert len(set(rows)) == count, "the engine numbers its answers"
    tokens = lake.open(at.lake).sql("SELECT action_ids FROM tokens")["action_ids"].to_list()
    assert Counter(map(tuple, tokens)) == Counter(tuple(call.action_ids) for call in engine.calls)
