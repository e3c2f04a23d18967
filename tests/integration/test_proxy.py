"""The recording proxy as a process, before a small engine: what is in the lake is what the engine saw and sampled."""

import json
import os
import shutil
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest

import lake
from testkit.commands import trajlake
from testkit.engine_server import engine_server
from testkit.object_store import unused_endpoint
from testkit.proxy_process import Client, Proxy, command, proxy, proxy_here

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
SECRET = "sk-do-not-store-1234567890"


def turn(at: Client, path: str, messages: list[Any], *, stream: bool, **headers: str) -> list[Any]:
    """One call of an agent with a tool, and the messages that its next call sends."""
    body = {"model": "policy", "messages": messages, "tools": TOOLS, "stream": stream}
    text = at.post(path, body, **headers)
    assert '_ids": [' not in text, "the client did not ask for them"
    if stream:
        chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
        message = {"role": "assistant", "content": "".join(delta.get("content") or "" for delta in deltas) or None}
        message |= {"tool_calls": [{k: v for k, v in c.items() if k != "index"} for c in calls]} if calls else {}
    else:
        message = json.loads(text)["choices"][0]["message"]
    results = [{"role": "tool", "tool_call_id": c["id"], "content": "a door"} for c in message.get("tool_calls", ())]
    return [*messages, message, *results]


def wait_for_spool(folder: Path) -> None:
    """Return when the first answer is on the disk."""
    while not any(SPOOLED in file.read_bytes() for file in folder.rglob("*.frames")):
        os.sched_yield()


def test_the_lake_has_the_tokens_that_the_engine_saw_and_sampled(tmp_path: Path) -> None:
    """Of agents that name their episode, and of those that do not."""
    paths = {"door-1": "/ep/door-1/v1/chat/completions", "unnamed": "/v1/chat/completions"}
    with engine_server() as engine, proxy_here(engine, tmp_path) as at:
        for path in paths.values():
            messages: list[Any] = [{"role": "user", "content": f"find the key by {path}"}]
            for stream in (False, True, True):
                messages = turn(
                    at, path, messages, stream=stream, Authorization=f"Bearer {SECRET}", Cookie=f"s={SECRET}"
                )
        at.end()
    rows = lake.open(at.lake).sql(
        "SELECT task_id = 'door-1' AS is_named, num_steps, t.* FROM tokens t JOIN episodes USING (episode_id) "
        "ORDER BY is_named DESC, step_index"
    )
    assert rows.select("is_named", "num_steps").rows() == [(True, 3)] * 3 + [(False, 3)] * 3
    sequence: list[int] = []
    for row, sampled in zip(rows.to_dicts(), engine.calls, strict=True):
        sequence = sequence if row["step_index"] else []
        assert sequence + row["context_ids"] == sampled.prompt_ids
        assert row["action_ids"] == sampled.action_ids
        assert row["action_logprobs"] == pytest.approx(sampled.logprobs)
        sequence = [*sampled.prompt_ids, *sampled.action_ids]
    assert all(call.headers["Authorization"] == f"Bearer {SECRET}" for call in engine.calls)
    stored = [file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()]
    assert not [data for data in stored if SECRET.encode() in data]


def test_a_killed_proxy_goes_on_with_the_episode_also_behind_a_start_that_failed(tmp_path: Path) -> None:
    path = "/ep/door-1/v1/chat/completions"
    port_option = ("--port", unused_endpoint().rpartition(":")[2])
    with engine_server() as engine:
        with proxy(engine, tmp_path, *port_option) as at:
            messages = turn(at, path, [{"role": "user", "content": "find the key"}], stream=False)
            wait_for_spool(tmp_path)
            at.end(signal.SIGKILL)
        with socket.create_server(("127.0.0.1", at.port)):
            refused = trajlake(*command(engine, tmp_path, *port_option))
        assert (refused.returncode, "choose another --port" in refused.stderr) == (2, True), refused.stderr
        with proxy(engine, tmp_path, *port_option) as at:
            turn(at, path, messages, stream=True)
            at.post("/ep/door-1/v1/end", {"reward": 1.0})
            at.end(signal.SIGKILL)
        with proxy(engine, tmp_path, *port_option) as at:
            at.end()
    recorded = lake.open(at.lake)
    assert recorded.sql("SELECT num_steps, env_return, status FROM episodes").rows() == [(2, 1.0, "completed")]
    prefixes = recorded.sql("SELECT prefix_step_index FROM tokens ORDER BY step_index")
    assert prefixes["prefix_step_index"].to_list() == [None, 0]


def test_a_proxy_knows_nothing_of_a_deleted_lake_at_its_place(tmp_path: Path) -> None:
    """Neither open rollouts, nor finished ones, nor the names of ended ones come back when it was killed."""
    names = {task: f"/run/r/task/{task}/rollout/0/v1" for task in ("open", "ended", "delivered")}
    port_option = ("--port", unused_endpoint().rpartition(":")[2])
    hello = [{"role": "user", "content": "find the key"}]

    def play(at: Proxy, *tasks: str) -> None:
        for task in tasks:
            turn(at, f"{names[task]}/chat/completions", hello, stream=False)
            if task != "open":
                at.post(f"{names[task]}/end", {"reward": 1.0})

    with engine_server() as engine:
        with proxy(engine, tmp_path, *port_option) as at:
            play(at, "delivered")
            at.post("/v1/flush", {})
            play(at, "ended", "open")
            wait_for_spool(tmp_path)
            time.sleep(1.5)  # names of ended rollouts are kept every second
            at.end(signal.SIGKILL)
        shutil.rmtree(tmp_path / "lake")
        with proxy(engine, tmp_path, *port_option) as at:
            play(at, "delivered", "ended")
            turn(at, f"{names['open']}/chat/completions", hello, stream=False)
            at.post(f"{names['open']}/end", {"reward": 0.5})
            at.end()
    recorded = lake.open(at.lake)
    rows = recorded.sql("SELECT task_id, num_steps, env_return, relation FROM episodes ORDER BY task_id")
    assert rows.rows() == [("delivered", 1, 1.0, None), ("ended", 1, 1.0, None), ("open", 1, 0.5, None)]
    assert recorded.sql("SELECT * FROM rejects").is_empty()
    assert "trajlake spools" in at.log.read_text()
    assert len(list((tmp_path / "spool").rglob("*.frames"))) == 1


def test_what_a_proxy_left_open_can_be_dropped_and_played_anew(tmp_path: Path) -> None:
    """Under the same names, whether it was killed or stopped; what had ended is there, delivered when asked for."""
    names = {task: f"/run/r/round/1/task/{task}/seed/7/rollout/0/v1" for task in ("killed", "stopped", "ended")}
    hello = [{"role": "user", "content": "find the key"}]
    drop = ("--set", "unfinished=drop")

    def play(at: Proxy, task: str, turns: int, reward: float | None = None) -> None:
        messages: list[Any] = hello
        for _ in range(turns):
            messages = turn(at, f"{names[task]}/chat/completions", messages, stream=False)
        if reward is not None:
            at.post(f"{names[task]}/end", {"reward": reward})

    with engine_server() as engine:
        with proxy(engine, tmp_path, *drop) as at:
            play(at, "killed", 1)
            play(at, "ended", 1, 1.0)
            assert json.loads(at.post("/v1/flush", {})) == {"delivered": True}
            assert [row[0] for row in lake.open(at.lake).sql("SELECT task_id FROM episodes").rows()] == ["ended"]
            at.end(signal.SIGKILL)
        with proxy(engine, tmp_path, *drop) as at:
            play(at, "killed", 2, 2.0)
            play(at, "stopped", 1)
            at.end(signal.SIGTERM)
        with proxy(engine, tmp_path, *drop) as at:
            play(at, "stopped", 2, 3.0)
            at.end()
    rows = lake.open(at.lake).sql(
        "SELECT task_id, collection_round, seed, num_steps, env_return, relation FROM episodes ORDER BY task_id"
    )
    assert rows.rows() == [
        ("ended", 1, 7, 1, 1.0, None),
        ("killed", 1, 7, 2, 2.0, None),
        ("stopped", 1, 7, 2, 3.0, None),
    ]


def test_after_ctrl_c_a_rollout_goes_on_as_a_continuation_and_one_that_was_ended_takes_nothing(tmp_path: Path) -> None:
    cut, ended = "/run/r/task/cut/rollout/3/v1", "/run/r/task/ended/rollout/3/v1"
    call = {"model": "policy", "messages": [{"role": "user", "content": "find the key"}]}
    with engine_server() as engine:
        with proxy(engine, tmp_path) as at:
            for path in (cut, ended):
                at.post(f"{path}/chat/completions", call)
            response = at.post(f"{ended}/end", {"reward": 0.0})
            assert "1 open episode ended with the proxy" in at.end()
        with proxy(engine, tmp_path) as at:
            assert at.post(f"{ended}/end", {"reward": 0.0}) == response
            spans = json.dumps({"resourceSpans": []}).encode()
            for path, body in (("chat/completions", json.dumps(call).encode()), ("traces", spans), ("end", b"{}")):
                headers = {"Content-Type": "application/json"}
                status, answered, payload = at.ask("POST", f"{ended}/{path}", body, **headers)
                assert (status, answered["x-should-retry"]) == (409, "false")
                assert (
                    f"rollout 3 of task ended in run r has ended, as episode {json.loads(response)['episode_id']}"
                    in (json.loads(payload)["error"]["message"])
                )
            at.post(f"{cut}/chat/completions", call)
            at.post(f"{cut}/end", {"reward": 1.0})
            assert "0 rejected" in at.end()
    assert len(engine.calls) == 3
    rows = lake.open(at.lake).sql(
        "SELECT task_id, env_return, stop_reason, relation FROM episodes ORDER BY task_id, relation NULLS FIRST"
    )
    assert [tuple(row.values()) for row in rows.to_dicts()] == [
        ("cut", None, "proxy_stopped", None),
        ("cut", 1.0, None, "continuation"),
        ("ended", 0.0, None, None),
    ]


SPOOLED = b"cmpl-0"
"""Id of the first answer."""
