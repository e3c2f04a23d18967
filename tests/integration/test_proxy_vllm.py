"""A real vLLM behind the proxy, a real client before it: what is in the lake is what the engine saw and sampled.

vLLM is installed once per machine in its own environment (3.4 GB), starts in half a minute, and compiles for
another half at its first request; `make test-slow`.
"""

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from click.testing import CliRunner

import lake
from lake.cli import trajlake
from testkit.proxy_process import Proxy, proxy
from testkit.vllm_server import (
    ANSWER,
    ASKED,
    FOUND,
    GREETING,
    REPLY,
    TOOL,
    Vllm,
    talking_model,
    vllm_server,
)

pytestmark = pytest.mark.slow

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/chat/completions", "/completions", "/responses", "/messages"
UNKNOWN = "Tell me what the \N{SNOWMAN} wants, and why."
"""What the model was not trained on: it continues at random, through half characters too."""
GREETED = [{"role": "user", "content": GREETING}]
ASKING = [{"role": "user", "content": ASKED}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
STEPS = """
    SELECT e.task_id, e.rollout_index, e.status, s.step_index, s.action, s.tool_calls, s.finish_reason, s.prompt_tokens,
           s.completion_tokens, s.policy_version, s.extra ->> 'weight_versions' AS weight_versions, t.prefix_step_index,
           t.context_ids, t.action_ids, t.action_logprobs, t.constrained, t.engine, t.logprobs_mode, t.temperature,
           t.top_p, t.policy_version AS token_version
    FROM steps s JOIN episodes e USING (episode_id) LEFT JOIN tokens t USING (episode_id, step_index)
    ORDER BY e.task_id, e.rollout_index, s.step_index
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two versions of the policy."""
    folder = tmp_path_factory.mktemp("models")
    return talking_model(folder / "first"), talking_model(folder / "second", seed=1)


@pytest.fixture(scope="module")
def engine(models: tuple[Path, Path]) -> Iterator[Vllm]:
    with vllm_server(models[0], "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm") as started:
        yield started


def client(at: Proxy, path: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{at.base}{path}/v1", api_key="unused", max_retries=0, timeout=600)


def recorded(at: Proxy) -> list[dict[str, Any]]:
    """The lake's steps, once the proxy has ended."""
    at.end()
    return lake.open(at.lake).sql(STEPS).to_dicts()


def own_tokens(engine: Vllm, path: str, body: dict[str, Any]) -> tuple[list[int], list[int], list[float]]:
    """What the engine itself says: ids of the prompt and of the answer, and their log-probabilities."""
    response = engine.post(f"/v1{path}", body | {"return_token_ids": True, "logprobs": True if path == CHAT else 1})
    (choice,) = response["choices"]
    listed = choice["logprobs"]
    values = [token["logprob"] for token in listed["content"]] if path == CHAT else listed["token_logprobs"]
    return response.get("prompt_token_ids") or choice["prompt_token_ids"], choice["token_ids"], values


def rescored(engine: Vllm, prompt_ids: list[int], action_ids: list[int]) -> list[float]:
    """Log-probabilities of tokens that were given, at temperature 1."""
    body = {"model": "policy", "prompt": [*prompt_ids, *action_ids], "max_tokens": 1, "prompt_logprobs": 0}
    listed = engine.post("/v1/completions", body)["choices"][0]["prompt_logprobs"]
    ids = enumerate(action_ids, len(prompt_ids))
    return [listed[index][str(token)]["logprob"] for index, token in ids]


# ---------------------------------------------------------------- what the client sees

BASE = {"model": "policy", "max_tokens": 40, "temperature": 0}
RANDOM = {"temperature": 1, "seed": 5}
NAMED = {"type": "function", "function": {"name": "look"}}
CHATS: dict[str, dict[str, Any]] = {
    "tools": {"messages": ASKING, "tools": [TOOL]},
    "text": {"messages": GREETED},
    "random": {"messages": [{"role": "user", "content": UNKNOWN}], **RANDOM},
    "required": {"messages": GREETED, "tools": [TOOL], "tool_choice": "required"},
    "named": {"messages": GREETED, "tools": [TOOL], "tool_choice": NAMED},
    "schema": {"messages": GREETED, "response_format": FORM},
    "choice": {"messages": GREETED, "structured_outputs": {"choice": ["yes", "no"]}},
    "samples": {"messages": GREETED, "n": 2, **RANDOM},
    "log-probabilities": {"messages": GREETED, "logprobs": True, "top_logprobs": 2},
    "no log-probabilities": {"messages": GREETED, "logprobs": False},
    "ids": {"messages": GREETED, "return_token_ids": True},
    "stop": {"messages": GREETED, "stop": ["what"]},
    "refused": {"messages": GREETED, "max_tokens": -3},
}
TEXTS: dict[str, dict[str, Any]] = {
    "text": {"prompt": GREETING},
    "ids": {"prompt": [5, 6, 7, 8], **RANDOM},
    "ids in a list": {"prompt": [[5, 6, 7, 8]], **RANDOM},
    "samples": {"prompt": UNKNOWN, "n": 2, **RANDOM},
    "prompts": {"prompt": ["a", "b"], **RANDOM},
    "log-probabilities": {"prompt": GREETING, "logprobs": 2, **RANDOM},
    "chosen log-probabilities": {"prompt": GREETING, "logprobs": 0, **RANDOM},
    "echo": {"prompt": GREETING, "echo": True, **RANDOM},
}
ITEMS: dict[str, dict[str, Any]] = {
    "text": {"input": GREETING},
    "tools": {"input": ASKING, "tools": [{"type": "function", **TOOL["function"]}]},
    "instructions": {"input": GREETING, "instructions": "Be brief."},
}
BLOCKS: dict[str, dict[str, Any]] = {
    "text": {"messages": GREETED},
    "system": {"messages": GREETED, "system": "Be brief."},
    "tools": {
        "messages": ASKING,
        "tools": [{"name": "look", "description": "Look at a thing.", "input_schema": TOOL["function"]["parameters"]}],
    },
}
STREAMS: list[dict[str, Any]] = [
    {},
    {"stream": True},
    {"stream": True, "stream_options": {"include_usage": True}},
    {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
]


def normalise_answer(base: str, path: str, body: dict[str, Any]) -> tuple[Any, ...]:
    """An answer without its ids and times: status, type, and the lines of the body."""
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"{base}/v1{path}", data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=600) as response:
            status, kind, text = response.status, response.headers["Content-Type"], response.read().decode()
    except urllib.error.HTTPError as error:
        status, kind, text = error.code, error.headers["Content-Type"], error.read().decode()
    text = re.sub(r'"(id|call_id|item_id)":"[^"]*"', r'"\1":""', text)
    text = re.sub(r'"(created|created_at|completed_at|sequence_number)":[\d.]+', r'"\1":0', text)
    # What is in its cache changes the last digits of a log-probability.
    text = re.sub(r"-?\d+\.\d{4,}(e-\d+)?", lambda number: f"{float(number[0]):.2f}", text)
    return status, kind, streamed(text) if kind.startswith("text/event-stream") else text


GROWING = ("content", "text", "delta", "arguments", "name", "partial_json", "token_ids")
"""Keys under which the pieces of a stream add up."""


def streamed(text: str) -> tuple[dict[str, Any], set[str]]:
    """What a stream says, no matter where its chunks are cut: under each path what adds up, or every value that was
    there.

    And the chunks that add nothing to an answer and do not end it, as they are.
    """
    sequences_seen: dict[str, Any] = {}
    empty: set[str] = set()
    for line in text.splitlines():
        if not line.startswith("data: {"):
            sequences_seen[line.partition(":")[0]] = {line} | sequences_seen.get(line.partition(":")[0], set())
            continue
        event = json.loads(line.removeprefix("data: "))
        leaves = dict(leaves_of(event, str(event.get("type", "")).replace(".", "-")))
        if '"delta":{}' in line and '"finish_reason":"' not in line:
            empty.add(line)
        for path, value in leaves.items():
            if grows(path, value):
                sequences_seen[path] = sequences_seen[path] + value if path in sequences_seen else value
            elif "usage" in path:
                sequences_seen[path] = value
            else:
                sequences_seen[f"={path}"] = {json.dumps(value)} | sequences_seen.get(f"={path}", set())
    return sequences_seen, empty


def grows(path: str, value: Any) -> bool:
    return isinstance(value, str | list) and (path.rsplit(".", 1)[-1] in GROWING or ".logprobs." in path)


def leaves_of(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Values by their paths; choices, calls and blocks by their own numbers."""
    if isinstance(value, dict) and value:
        number = f"[{value['index']}]" if "index" in value else ""
        for key, inner in value.items():
            yield from leaves_of(inner, f"{path}{number}.{key}")
    elif value == {} and path.endswith(".delta"):
        return  # the end of a choice, alone or with the last piece
    elif isinstance(value, list) and value and isinstance(value[0], dict) and "index" in value[0]:
        for inner in value:
            yield from leaves_of(inner, path)
    else:
        yield path, value


@pytest.mark.parametrize("stream", STREAMS, ids=["whole", "stream", "usage", "continuous usage"])
def test_the_client_sees_what_it_would_see_without_the_proxy(
    engine: Vllm, tmp_path: Path, stream: dict[str, Any]
) -> None:
    calls = [(CHAT, BASE | body | stream) for body in CHATS.values()]
    calls += [(COMPLETIONS, BASE | body | stream) for body in TEXTS.values()]
    if "stream_options" not in stream:
        about = {"model": "policy", "max_output_tokens": 40, "temperature": 0}
        calls += [(RESPONSES, about | body | stream) for body in ITEMS.values()]
        calls += [(MESSAGES, BASE | body | stream) for body in BLOCKS.values()]
    with proxy(engine, tmp_path) as at:
        for path, body in calls:
            assert normalise_answer(at.base, path, body) == normalise_answer(engine.base, path, body), (path, body)


# ---------------------------------------------------------------- what is in the lake


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_with_a_tool(engine: Vllm, tmp_path: Path, stream: bool) -> None:
    with proxy(engine, tmp_path) as at:
        openai_client = client(at, "/ep/key-1")
        messages: list[Any] = list(ASKING)
        about: dict[str, Any] = {"model": "policy", "tools": [TOOL], "temperature": 0, "max_tokens": 60}
        prompts = [messages[:]]
        if stream:
            with openai_client.chat.completions.stream(messages=messages, **about) as events:
                for _ in events:
                    pass
                message = events.get_final_completion().choices[0].message
        else:
            message = openai_client.chat.completions.create(messages=messages, **about).choices[0].message
        assert message.tool_calls is not None
        (call,) = message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("look", {"at": "door"})
        messages += [message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"})]
        messages += [{"role": "tool", "tool_call_id": call.id, "content": FOUND}]
        prompts.append(messages[:])
        content = openai_client.chat.completions.create(messages=messages, **about).choices[0].message.content
        assert content == ANSWER
        openai_client.post("/end", body={"reward": 1.0}, cast_to=object)
        rows = recorded(at)
    assert [row["finish_reason"] for row in rows] == ["tool_calls", "stop"]
    assert rows[1]["action"] == ANSWER
    before: list[int] = []
    for row, prompt in zip(rows, prompts, strict=True):
        prompt_ids, action_ids, logprobs = own_tokens(engine, CHAT, about | {"messages": prompt})
        assert (before if row["prefix_step_index"] == 0 else []) + row["context_ids"] == prompt_ids
        assert row["action_ids"] == action_ids
        assert row["action_logprobs"] == pytest.approx(logprobs, abs=1e-5)
        assert (row["prompt_tokens"], row["completion_tokens"]) == (len(prompt_ids), len(action_ids))
        assert (row["constrained"], row["engine"]) == (None, "vllm 0.32.0")
        before = prompt_ids + action_ids
    # vLLM streams the line break before a call as content, and has none of it in a whole answer. Sent back, it is there
    # twice, so that the prompt does not begin with the tokens of the call.
    assert [row["prefix_step_index"] for row in rows] == [None, None if stream else 0]


@pytest.mark.parametrize("stream", [False, True])
def test_sampled_tokens_and_their_probabilities(engine: Vllm, tmp_path: Path, stream: bool) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []
    for seed in range(8):
        about = {"model": "policy", "seed": seed, "max_tokens": 64, "stream": stream}
        calls.append((CHAT, about | {"messages": [{"role": "user", "content": f"{UNKNOWN} {seed}"}]}))
        calls.append((COMPLETIONS, about | {"prompt": f"{UNKNOWN} {seed}"}))
        calls.append((COMPLETIONS, about | {"prompt": [5, 6, 7, 20 + seed]}))
    with proxy(engine, tmp_path) as at:
        for number, (path, body) in enumerate(calls):
            normalise_answer(f"{at.base}/ep/{number:02}", path, body)
        rows = recorded(at)
    assert len(rows) == len(calls)
    for row, (path, body) in zip(rows, calls, strict=True):
        prompt_ids, action_ids, logprobs = own_tokens(engine, path, body | {"stream": False})
        assert row["context_ids"] == prompt_ids
        assert row["action_ids"] == action_ids
        assert row["action_logprobs"] == pytest.approx(logprobs, abs=1e-5)
        assert row["action_logprobs"] == pytest.approx(rescored(engine, prompt_ids, action_ids), abs=1e-4)
        assert (row["temperature"], row["top_p"], row["logprobs_mode"]) == (1.0, 1.0, "processed"), "as the engine says"
    assert any("\N{REPLACEMENT CHARACTER}" in row["action"] for row in rows), "half characters too"


def test_what_a_grammar_restricts_is_marked(engine: Vllm, tmp_path: Path) -> None:
    strict = TOOL | {"function": TOOL["function"] | {"strict": True}}
    free = {"auto": {"tools": [TOOL]}, "no tools": {}}
    bound = {
        "required": {"tools": [TOOL], "tool_choice": "required"},
        "named": {"tools": [TOOL], "tool_choice": NAMED},
        "strict": {"tools": [strict]},
        "schema": {"response_format": FORM},
        "choice": {"structured_outputs": {"choice": ["yes", "no"]}},
        "bias": {"logit_bias": {"5": 3.0}},
    }
    with proxy(engine, tmp_path) as at:
        for name, settings in (free | bound).items():
            normalise_answer(f"{at.base}/ep/{name.replace(' ', '-')}", CHAT, BASE | {"messages": ASKING} | settings)
        rows = {row["task_id"]: row for row in recorded(at)}
    assert {name.replace(" ", "-") for name in free | bound} == rows.keys()
    for name, row in rows.items():
        assert row["constrained"] == ([True] * len(row["action_ids"]) if name in bound else None), name
    (yes_or_no,) = [row for name, row in rows.items() if name == "choice"]
    assert yes_or_no["action"] in ("yes", "no")


def test_the_other_apis_are_recorded_as_text(engine: Vllm, tmp_path: Path) -> None:
    with proxy(engine, tmp_path) as at:
        for stream in (False, True):
            about = {"model": "policy", "temperature": 0, "stream": stream}
            for name, body in ITEMS.items():
                normalise_answer(f"{at.base}/ep/responses-{name}-{stream}", RESPONSES, about | body)
            for name, body in BLOCKS.items():
                normalise_answer(f"{at.base}/ep/messages-{name}-{stream}", MESSAGES, about | {"max_tokens": 60} | body)
        rows = recorded(at)
    assert len(rows) == 12
    for row in rows:
        assert row["action_ids"] is None
        assert row["prompt_tokens"] > 0
        if "tools" in row["task_id"]:
            (call,) = json.loads(row["tool_calls"])
            arguments = call["function"]["arguments"]  # a text of JSON by the one API, an object by the other
            assert call["function"]["name"] == "look"
            assert (json.loads(arguments) if isinstance(arguments, str) else arguments) == {"at": "door"}
        elif "text" in row["task_id"]:
            assert row["action"] == REPLY


def test_the_version_of_the_weights(engine: Vllm, models: tuple[Path, Path], tmp_path: Path) -> None:
    first, second = models
    body = BASE | RANDOM | {"messages": [{"role": "user", "content": UNKNOWN}]}
    with proxy(engine, tmp_path) as at:
        for version, folder in (("v1", first), ("v2", second), ("v3", first)):
            engine.load(folder, version)
            normalise_answer(f"{at.base}/ep/{version}", CHAT, body)
        with client(at, "/ep/while").completions.create(
            model="policy", prompt=UNKNOWN, max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
        ) as answer:
            next(iter(answer))
            engine.post("/pause?mode=keep")
            engine.load(second, "v4")
            engine.post("/resume")
            for _ in answer:
                pass
        engine.load(first, "v1")
        rows = {row["task_id"]: row for row in recorded(at)}
    assert [rows[name]["policy_version"] for name in ("v1", "v2", "v3", "while")] == [1, 2, 3, None]
    assert json.loads(rows["while"]["weight_versions"]) == ["v3", "v4"]
    assert rows["v1"]["action_ids"] == rows["v3"]["action_ids"] != rows["v2"]["action_ids"]
    for row in rows.values():
        assert row["token_version"] == row["policy_version"]


def test_a_client_that_leaves(engine: Vllm, tmp_path: Path) -> None:
    with proxy(engine, tmp_path) as at:
        answer = client(at, "/ep/left").completions.create(
            model="policy", prompt=UNKNOWN, max_tokens=1900, stream=True, extra_body={"ignore_eos": True}
        )
        for _ in zip(range(3), answer, strict=False):
            pass
        answer.close()
        deadline = time.monotonic() + 60
        while not re.search(r"^vllm:num_requests_running\{[^}]*\} 0\.0$", engine.get("/metrics"), re.MULTILINE):
            assert time.monotonic() < deadline, "the engine goes on for nobody"
            time.sleep(0.1)
        (row,) = recorded(at)
        (span,) = lake.open(at.lake).sql("SELECT error FROM spans").to_dicts()
    assert (row["status"], row["action_ids"], row["action"]) == ("failed", None, "")
    assert "the client left" in span["error"]


# ---------------------------------------------------------------- training


def test_training_on_what_was_recorded(engine: Vllm, models: tuple[Path, Path], tmp_path: Path) -> None:
    with proxy(engine, tmp_path) as at:
        for task in range(4):
            for rollout in range(4):
                agent = client(at, f"/task/t{task}/rollout/{rollout}")
                messages: list[Any] = [{"role": "user", "content": f"{UNKNOWN} {task}"}]
                for turn in range(2):
                    answer = agent.chat.completions.create(
                        model="policy",
                        messages=messages,
                        max_tokens=48,
                        temperature=0.7 if task % 2 else 1.0,
                        seed=100 * task + 10 * rollout + turn,
                    )
                    content = answer.choices[0].message.content or ""
                    messages += [{"role": "assistant", "content": content}, {"role": "user", "content": f"And {turn}?"}]
                agent.post("/end", body={"reward": float(rollout % 2)}, cast_to=object)
        rows = recorded(at)
    assert len(rows) == 32
    assert {row["logprobs_mode"] for row in rows} == {"processed"}
    assert largest_difference(models[0], rows) < 1e-3

    def run(*words: object) -> str:
        done = CliRunner().invoke(trajlake, [str(word) for word in words], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.output

    run("credit", "rloo", "--lake", at.lake)
    out = tmp_path / "out"
    run("train", "--lake", at.lake, "--model", models[0], "--loss", "ppo", "--out", out, "--lr", 1e-3)
    first, *_ = [json.loads(line) for line in (out / "metrics.jsonl").read_text("utf-8").splitlines()]
    assert first["ratio"] == pytest.approx(1, abs=1e-4)
    assert first["log_ratio_abs"] < 1e-4
    assert first["action_tokens"] > 100


def largest_difference(model: Path, rows: list[dict[str, Any]]) -> float:
    """Between the engine's log-probabilities and those of the trainer's model, over all sampled tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    sequences: dict[tuple[str, int, int | None], list[int]] = {}
    worst = 0.0
    for row in rows:
        rollout = (row["task_id"], row["rollout_index"])
        prompt = sequences.get((*rollout, row["prefix_step_index"]), []) + row["context_ids"]
        sequence = sequences[*rollout, row["step_index"]] = prompt + row["action_ids"]
        with torch.inference_mode():
            logits = policy(torch.tensor([sequence])).logits[0, len(prompt) - 1 : -1] / row["temperature"]
        logprobs = logits.log_softmax(-1)[torch.arange(len(row["action_ids"])), torch.tensor(row["action_ids"])]
        worst = max(worst, float((logprobs - torch.tensor(row["action_logprobs"])).abs().max()))
    print(f"largest difference of log-probabilities: {worst:.2e}")
    return worst
