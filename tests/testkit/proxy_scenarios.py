"""Agents whose conversations take turns that are hard to record, and the rows that came of them, for golden files.

Each scenario is played twice, as two rollouts with the rewards 1 and 0, so that it can be trained on. What is random or
of the clock is left out of the rows, and tokens are shown as the text that they are, `~` at the end of a turn.
"""

import json
import urllib.error
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lake
from lake.live.proxy.relay import CallSettings
from testkit.engine_server import EOS, engine_server
from testkit.proxy_process import Client, proxy_here

GOLDEN = Path(__file__).parents[1] / "golden" / "proxy"
CHAT = "/v1/chat/completions"
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"properties": {"at": {}}}}}]
Message = dict[str, Any]


class Agent:
    """An agent with a tool, in one rollout or without a name."""

    def __init__(self, at: Client, task: str, base: str, **headers: str) -> None:
        self._at, self._base, self._headers = at, base, headers
        self.messages: list[Message] = [
            {"role": "system", "content": "You open doors."},
            {"role": "user", "content": f"Open the door of {task}."},
        ]
        self.last = ""
        """Id of its last answer."""

    def turn(self, *messages: Message, model: str = "policy") -> Message:
        """Ask once, and keep the answer; what the tool gave, or what is said, before that."""
        self.messages += messages
        body = {"model": model, "messages": self.messages, "tools": TOOLS, "temperature": 1.0}
        answer = json.loads(self._at.post(self._base + CHAT, body, **self._headers))
        message: Message = answer["choices"][0]["message"]
        self.last = answer["id"]
        self.messages = [*self.messages, message]
        return message

    def look(self, text: str) -> Message:
        """What the tool says to its last call."""
        (call,) = self.messages[-1]["tool_calls"]
        return {"role": "tool", "tool_call_id": call["id"], "content": text}

    def end(self, reward: float) -> None:
        """End its episode, by its name or by its last answer."""
        self._at.post(f"{self._base}/v1/end", {"reward": reward, "response_id": self.last}, **self._headers)


def rewritten(at: Client, base: str, reward: float) -> None:
    """The harness cuts what the tool said first, while the agent works."""
    agent = Agent(at, "rewritten", base)
    agent.turn()
    agent.turn(agent.look("a long corridor, and a door at its end"))
    agent.messages[3] = agent.messages[3] | {"content": "(cut)"}
    agent.turn(agent.look("the door is locked"))
    agent.end(reward)


def fork(at: Client, base: str, reward: float) -> None:
    """Two continuations of the same beginning; then the first one continues."""
    agent = Agent(at, "fork", base)
    agent.turn()
    beginning = list(agent.messages)
    agent.turn(agent.look("a door on the left"))
    messages_left, agent.messages = agent.messages, beginning
    agent.turn(agent.look("a door on the right"))
    agent.messages = messages_left
    agent.turn(agent.look("it is open"))
    agent.end(reward)


def retry(at: Client, base: str, reward: float) -> None:
    """The engine refuses each prompt once, and the agent asks again."""
    agent = Agent(at, f"retry, try {reward}", base)
    messages: list[Message] = []
    for _ in range(2):
        try:
            agent.turn(*messages, model="flaky")
            raise AssertionError("it was refused")
        except urllib.error.HTTPError as error:
            error.close()
        agent.turn(model="flaky")
        messages = [agent.look("it is open")]
    agent.end(reward)


def compacted(at: Client, base: str, reward: float) -> None:
    """When its context is full, the agent continues from a summary."""
    agent = Agent(at, "compacted", base)
    agent.turn()
    agent.turn(agent.look("a corridor"))
    agent.messages = [agent.messages[0], {"role": "user", "content": "So far: you looked twice. Open the door."}]
    agent.turn()
    agent.turn(agent.look("it is open"))
    agent.end(reward)


def interleaved(at: Client, base: str, reward: float) -> None:
    """An agent and its sub-agent take turns in one rollout, and nothing tells one from the other."""
    boss, child = Agent(at, "interleaved", base), Agent(at, "interleaved, as a helper", base)
    _take_turns(boss, child)
    boss.end(reward)


def told_apart(at: Client, base: str, reward: float) -> None:
    """The same, where the sub-agent names itself and its parent."""
    boss = Agent(at, "told apart", base)
    headers = {"X-Trajlake-Agent": "helper", "X-Trajlake-Parent": base}
    child = Agent(at, "told apart, as a helper", base, **headers)
    _take_turns(boss, child)
    child.end(reward)
    boss.end(reward)


def unnamed(at: Client, base: str, reward: float) -> None:
    """The same, where no call says whose it is."""
    del base
    boss, child = Agent(at, "unnamed", ""), Agent(at, "unnamed, as a helper", "")
    _take_turns(boss, child)
    child.end(reward)
    boss.end(reward)


def _take_turns(boss: Agent, child: Agent) -> None:
    boss.turn()
    child.turn()
    boss.turn(boss.look("a corridor"))
    child.turn(child.look("a key"))


SCENARIOS: dict[str, Callable[[Client, str, float], None]] = {
    play.__name__: play for play in (rewritten, fork, retry, compacted, interleaved, told_apart, unnamed)
}


def play_all(folder: Path) -> lake.Lake:
    """All scenarios through one proxy; the lake that it recorded into."""
    settings = CallSettings(logprobs_mode="processed")
    with engine_server() as engine, proxy_here(engine, folder, settings=settings) as at:
        for name, play in SCENARIOS.items():
            for rollout, reward in enumerate((1.0, 0.0)):
                play(at, f"/run/{name}/task/door/rollout/{rollout}" if name != "unnamed" else "", reward)
        at.end()
    return lake.open(at.lake)


def rows(lk: lake.Lake, name: str) -> list[dict[str, Any]]:
    """The episodes of a scenario's first rollout, with their steps, tokens and spans."""
    mine = "run_id = 'live'" if name == "unnamed" else f"run_id = '{name}'"
    episodes = lk.sql(f"SELECT * FROM episodes WHERE {mine} AND env_return = 1 ORDER BY started_at").to_dicts()
    names = {row["episode_id"]: number for number, row in enumerate(episodes)}
    return [_episode(lk, row, names) for row in episodes]


def _episode(lk: lake.Lake, row: dict[str, Any], names: dict[int, int]) -> dict[str, Any]:
    mine = f"WHERE episode_id = {row['episode_id']}"
    parent = row["parent_episode_id"]
    about = ("agent_id", "relation", "status", "stop_reason", "error", "env_return", "num_steps", "extra")
    episode = {key: row[key] for key in about} | {"parent": names.get(parent, parent)}
    tokens = {t["step_index"]: t for t in lk.sql(f"SELECT * FROM tokens {mine}").to_dicts()}
    steps = lk.sql(f"SELECT * FROM steps {mine} ORDER BY step_index").to_dicts()
    spans = lk.sql(f"SELECT kind, name, step_index, error FROM spans {mine} ORDER BY span_id").to_dicts()
    return {
        **_short(episode),
        "initial_messages": json.loads(row["initial_messages"]),
        "steps": [_step(step, tokens.get(step["step_index"])) for step in steps],
        **_short({"spans": [_short(span) for span in spans] or None}),
    }


def _step(step: dict[str, Any], tokens: dict[str, Any] | None) -> dict[str, Any]:
    extra = {key: value for key, value in json.loads(step["extra"] or "{}").items() if key != "created"}
    calls = json.loads(step["tool_calls"] or "null")
    context = json.loads(step["context"])
    outcome = {
        "state": step["state"],
        "context": context or None,
        "action": step["action"] or None,
        "tool_calls": calls and [[call["id"], call["function"]["arguments"]] for call in calls],
        "agent_id": step["agent_id"],
        "trainable": None if step["trainable"] else False,
        "extra": extra,
    }
    return _short(outcome | ({} if tokens is None else {"tokens": _tokens(tokens)}))


def _tokens(tokens: dict[str, Any]) -> dict[str, Any]:
    assert len(tokens["action_logprobs"]) == len(tokens["action_ids"])
    return {
        "extends": tokens["prefix_step_index"],
        "context": _decoded(tokens["context_ids"]),
        "action": _decoded(tokens["action_ids"]),
    }


def _decoded(ids: list[int]) -> str:
    return "".join("~" if token == EOS else chr(token - 3) for token in ids)


def _short(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if value is not None}


def golden_text(lk: lake.Lake, name: str) -> str:
    """A scenario's rows as its golden file has them."""
    return json.dumps(rows(lk, name), indent=1, ensure_ascii=False) + "\n"
