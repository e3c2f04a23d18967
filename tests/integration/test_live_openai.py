"""OpenAI's own client next to a recorder: the objects that it gives back become what the engine saw and sampled."""

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest

import lake
from testkit.engine_server import engine_server

TOOLS: Any = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
EXACT: Any = {"logprobs": True, "extra_body": {"return_token_ids": True}}


def query(folder: Path, text: str) -> list[tuple[Any, ...]]:
    return lake.open(folder / "lake").sql(text).rows()


@pytest.mark.parametrize("way", ["messages", "request"])
def test_an_agent_with_tools_has_the_tokens_that_the_engine_saw_and_sampled(way: str, tmp_path: Path) -> None:
    """Its history holds the client's objects; every other call streams."""
    with (
        engine_server() as engine,
        openai.OpenAI(base_url=engine.url, api_key="of nobody") as client,
        lake.recorder(tmp_path / "lake", run="r", spool=tmp_path / "spool") as recorder,
    ):
        with recorder.episode("door-1") as episode:
            messages: list[Any] = [{"role": "user", "content": "find the key"}]
            for turn in range(4):
                request: Any = {"model": "policy", "messages": messages, "tools": TOOLS, **EXACT}
                with episode.step(**({way: messages} if way == "messages" else {way: request})) as step:
                    if turn % 2:
                        chunks = list(client.chat.completions.create(**request, stream=True))
                        step.answer(chunks)
                        deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
                        calls = [call for delta in deltas for call in delta.tool_calls or ()]
                        text = "".join(delta.content or "" for delta in deltas)
                        tool_calls = [{"id": c.id, "type": "function", "function": c.function} for c in calls]
                        message: Any = {"role": "assistant", "content": text} | (
                            {"tool_calls": tool_calls} if tool_calls else {}
                        )
                    else:
                        response = client.chat.completions.create(**request)
                        step.answer(response)
                        message, calls = response.choices[0].message, response.choices[0].message.tool_calls or []
                    messages.append(message)
                    for call in calls:
                        with step.tool_call("look", call_id=call.id) as done:
                            done.result("a door")
                        messages.append({"role": "tool", "tool_call_id": call.id, "content": "a door"})
                    if not calls:
                        messages.append({"role": "user", "content": "go on"})
        assert recorder.stats().troubles == 0
    tokens = query(tmp_path, "SELECT context_ids, action_ids, action_logprobs FROM tokens ORDER BY step_index")
    sequence: list[int] = []
    for (context, action, logprobs), sampled in zip(tokens, engine.calls, strict=True):
        assert sequence + context == sampled.prompt_ids
        assert action == sampled.action_ids
        assert logprobs == pytest.approx(sampled.logprobs)
        sequence = [*sampled.prompt_ids, *sampled.action_ids]
    assert query(tmp_path, "SELECT count(*), count(*) FILTER (extra->>'$.history' IS NOT NULL) FROM steps") == [(4, 0)]
    tools = "SELECT count(*) FROM spans WHERE kind = 'tool' AND attributes->>'$.\"gen_ai.tool.call.result\"' IS NULL"
    assert query(tmp_path, tools) == [(2,)]


def test_async_agents_of_the_responses_api_are_each_their_own_episode(tmp_path: Path) -> None:
    async def agent(client: openai.AsyncOpenAI, recorder: Any, number: int) -> None:
        items: list[Any] = [{"role": "user", "content": f"{number}: find the key"}]
        async with recorder.episode(f"door-{number}") as episode:
            for turn in range(3):
                request: Any = {"model": "policy", "instructions": "Look.", "input": items}
                async with episode.step(request=request) as step:
                    if turn == 1:
                        events = [event async for event in await client.responses.create(**request, stream=True)]
                        step.answer(events)
                        output = events[-1].response.output
                    else:
                        response = await client.responses.create(**request)
                        step.answer(response)
                        output = response.output
                items += [*output, {"role": "user", "content": f"{number}: go on {turn}"}]

    async def run(url: str) -> None:
        async with openai.AsyncOpenAI(base_url=url, api_key="of nobody") as client:
            with lake.recorder(tmp_path / "lake", run="r", spool=tmp_path / "spool") as recorder:
                await asyncio.gather(*(agent(client, recorder, number) for number in range(6)))
                assert recorder.stats().troubles == 0

    with engine_server() as engine:
        asyncio.run(run(engine.url))
    rows = query(
        tmp_path,
        "SELECT count(DISTINCT episode_id), count(*), bool_and(starts_with(state, task_id[6:] || ':')), "
        "count(*) FILTER (steps.extra->>'$.history' IS NOT NULL) FROM steps JOIN episodes USING (episode_id)",
    )
    assert rows == [(6, 18, True, 0)]
