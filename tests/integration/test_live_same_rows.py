"""The law of the two ways in: the same calls, recorded through the proxy and in process, are the same rows.

Agents make their calls once through a proxy, and once to an engine of the same answers with a recorder next to it; each
is an episode of the task with its name.
"""

import json
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import lake
from lake.live.episode import Episode
from testkit.engine_server import Engine, engine_server
from testkit.proxy_process import proxy_here

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
SYSTEM = {"role": "system", "content": "You find keys."}
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions", "responses": "/v1/responses"}
PATHS["messages"] = "/v1/messages"
STEPS = "SELECT * EXCLUDE (episode_id, group_id, write_id, started_at, latency) FROM steps {mine} ORDER BY step_index"
TOKENS = "SELECT * EXCLUDE (episode_id, group_id, write_id, engine) FROM tokens {mine} ORDER BY step_index"
EPISODE = (
    "SELECT task_id, run_id, status, env_return, num_steps, policy, tools, sampling, initial_messages, "
    "final_observation, prompt_tokens, completion_tokens, error IS NOT NULL AS failed, terminated, agent_id "
    "FROM episodes {mine}"
)
SPANS = (
    "SELECT kind, name, step_index, error IS NOT NULL AS failed, attributes->>'$.model' AS model, "
    "attributes->>'$.messages' AS messages FROM spans {mine} ORDER BY started_at"
)
"""What a client makes of a refusal is not what the engine wrote, so texts of errors are not compared."""
Ask = Callable[[str, dict[str, Any]], Any]
"""Makes a call; its answer, as the list of its events if it was streamed."""
Agent = Callable[[Ask], None]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def chat(messages: list[Any], **options: Any) -> dict[str, Any]:
    return {"model": "policy", "messages": list(messages), "temperature": 0.5, **options}


def read_message(answer: Any) -> dict[str, Any]:
    """The message of an answer of chat completions, put together as agents do."""
    if isinstance(answer, dict):
        return dict(answer["choices"][0]["message"])
    deltas = [choice["delta"] for chunk in answer for choice in chunk["choices"]]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    calls = [{key: value for key, value in call.items() if key != "index"} for call in calls]
    text = "".join(delta.get("content") or "" for delta in deltas)
    return {"role": "assistant", "content": text or None} | ({"tool_calls": calls} if calls else {})


def results(message: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "tool", "tool_call_id": c["id"], "content": "a door"} for c in message.get("tool_calls", ())]


def with_tools(ask: Ask) -> None:
    """Two tools, then an answer; every other call streams."""
    messages: list[Any] = [SYSTEM, user("find the key")]
    for turn in range(4):
        message = read_message(ask("chat", chat(messages, tools=TOOLS, stream=turn % 2 == 1)))
        messages += [message, *results(message)] if message.get("tool_calls") else [message, user(f"more {turn}")]


def that_compacts(ask: Ask) -> None:
    """Rewrites its history after two calls, and continues with the new one, then with the old one."""
    old = [SYSTEM, user("find the key")]
    for _ in range(2):
        old = [*old, read_message(ask("chat", chat(old))), user("go on")]
    new = [SYSTEM, user("so far: a door; go on")]
    new = [*new, read_message(ask("chat", chat(new))), user("and now?")]
    ask("chat", chat(new))
    ask("chat", chat(old))


def of_two(ask: Ask) -> None:
    """Two sub-agents that take turns, and a fork of one of them; tools and settings that change on the way."""
    first, second = [user("be one")], [user("be the other")]
    for turn in range(2):
        first = [*first, read_message(ask("chat", chat(first))), user(f"{turn}")]
        second = [*second, read_message(ask("chat", chat(second, tools=TOOLS, temperature=0.1))), user(f"{turn}")]
    ask("chat", chat([*first[:-1], user("fork")]))


def that_cuts_reasoning(ask: Ask) -> None:
    messages = [user("think")]
    for _ in range(3):
        message = read_message(ask("chat", chat(messages, model="think", seed=3)))
        messages = [*messages, {"role": "assistant", "content": f" {message['content']} "}, user("more")]


def of_failures(ask: Ask) -> None:
    """Calls that are refused, before, between and behind those that are answered; and one that is tried again."""
    with suppress(OSError):
        ask("chat", chat([user("a")], model="error-500"))
    message = read_message(ask("chat", chat([user("a")])))
    with suppress(OSError):
        ask("chat", chat([user("a"), message, user("b")], model="flaky"))
    ask("chat", chat([user("a"), message, user("b")], model="flaky"))


def whose_calls_all_fail(ask: Ask) -> None:
    for _ in range(2):
        with suppress(OSError):
            ask("chat", chat([user("a")], model="error-429"))


def of_responses(ask: Ask) -> None:
    items: list[Any] = [user("find the key")]
    for stream in (False, True, False):
        answer = ask("responses", {"model": "policy", "instructions": "Look.", "input": list(items), "stream": stream})
        output = answer["output"] if isinstance(answer, dict) else answer[-1]["response"]["output"]
        items += [*output, user("go on")]
    ask("responses", {"model": "policy", "input": "and now?", "previous_response_id": "resp_2"})


def of_messages(ask: Ask) -> None:
    messages: list[Any] = [user("find the key")]
    for stream in (False, True, False):
        body = {"model": "policy", "system": "Look.", "max_tokens": 9, "messages": list(messages), "stream": stream}
        answer = ask("messages", body)
        text = answer["content"][0]["text"] if isinstance(answer, dict) else f"answer 1 to {len(messages)} messages"
        messages += [{"role": "assistant", "content": [{"type": "text", "text": text}]}, user("go on")]


def of_completions(ask: Ask) -> None:
    text = "a door is"
    for stream in (False, True):
        answer = ask("completions", {"model": "policy", "prompt": text, "max_tokens": 9, "stream": stream})
        chunks = [answer] if isinstance(answer, dict) else answer
        text += "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) + " and"


def posted(url: str, body: dict[str, Any]) -> Any:
    """The answer to a call. Raises OSError: it was refused."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        text = response.read().decode()
    if not body.get("stream"):
        return json.loads(text)
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def engine_of_both() -> Engine:
    """In process no one can ask the engine how it samples."""
    engine = Engine()
    engine.says_sampling = False
    return engine


AGENTS: list[Agent] = [
    with_tools,
    that_compacts,
    of_two,
    that_cuts_reasoning,
    of_failures,
    whose_calls_all_fail,
    of_responses,
    of_messages,
    of_completions,
]


def through_the_proxy(folder: Path) -> None:
    with engine_server(engine_of_both()) as engine, proxy_here(engine, folder, run="agent") as at:
        for agent in AGENTS:
            base = f"/ep/{agent.__name__}"
            agent(lambda api, body, base=base: posted(f"{at.base}{base}{PATHS[api]}", body))
            at.post(f"{base}/v1/end", {"reward": 0.5})
        at.end()


def in_process(folder: Path) -> None:
    """The engine is asked for tokens as the proxy asks it."""
    with (
        engine_server(engine_of_both()) as engine,
        lake.recorder(folder / "lake", run="agent", spool=folder / "spool") as recorder,
    ):
        for agent in AGENTS:
            with recorder.episode(agent.__name__, rollout_index=0) as episode:
                agent(beside(episode, engine))
                episode.reward(0.5)
    assert recorder.stats().troubles == 0


def beside(episode: Episode, engine: Engine) -> Ask:
    """Calls to the engine itself, which the agent tells to the recorder."""

    def ask(api: str, body: dict[str, Any]) -> Any:
        options = {"return_token_ids": True, "logprobs": True} if api in ("chat", "completions") else {}
        options |= {"stream_options": {"include_usage": True}} if options and body.get("stream") else {}
        arguments = body | ({"extra_body": options} if options else {})
        with episode.step(request=arguments, policy_version=7) as step:
            answer = posted(engine.url.removesuffix("/v1") + PATHS[api], body | options)
            step.answer(answer)
        return answer

    return ask


@pytest.fixture(scope="module")
def lakes(tmp_path_factory: pytest.TempPathFactory) -> tuple[lake.Lake, lake.Lake]:
    """What the proxy recorded, and the recorder."""
    outside, inside = tmp_path_factory.mktemp("outside"), tmp_path_factory.mktemp("inside")
    through_the_proxy(outside)
    in_process(inside)
    return lake.open(outside / "lake"), lake.open(inside / "lake")


def tables(recorded: lake.Lake, task: str) -> dict[str, Any]:
    ((episode_id,),) = recorded.sql(f"SELECT episode_id FROM episodes WHERE task_id = '{task}'").rows()
    queries = {"episode": EPISODE, "steps": STEPS, "tokens": TOKENS, "spans": SPANS}
    mine = f"WHERE episode_id = {episode_id}"
    return {name: recorded.sql(query.format(mine=mine)).to_dicts() for name, query in queries.items()}


@pytest.mark.parametrize("agent", AGENTS)
def test_the_same_calls_are_the_same_rows(agent: Agent, lakes: tuple[lake.Lake, lake.Lake]) -> None:
    outside, inside = (tables(recorded, agent.__name__) for recorded in lakes)
    for name in outside:
        assert inside[name] == outside[name], name
    assert inside["steps"]
