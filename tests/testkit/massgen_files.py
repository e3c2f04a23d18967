"""Files as MassGen writes them: traces of its RL branch with their index, session logs, coordination logs of 2025.

Built from the tool's documented structures alone, so that readers and writers of the formats can be tested with them.
Times are fixed. `write_traces` writes the very bytes that the tool writes: `json.dump` with an indent of two, in the
order of its dataclasses.
"""

import json
from pathlib import Path
from typing import Any

START = 1_762_000_000.25
"""Seconds; 1 November 2025 in UTC."""
TASK = "Which city is the capital of France?"


def span(kind: str, number: int, **fields: Any) -> dict[str, Any]:
    """A span, its keys in the order of the tool's dataclass of that type."""
    own_files: dict[str, dict[str, Any]] = {
        "prompt": {
            "input": "",
            "output": "",
            "model": "",
            "input_tokens": None,
            "output_tokens": None,
            "reasoning": None,
        },
        "tool": {
            "tool_name": "",
            "arguments": {},
            "result": None,
            "success": True,
            "execution_time": 0.0,
            "error": None,
        },
        "reward": {"reward": 0.0, "reward_type": "", "reason": None},
        "coordination": {"action_type": "", "action_data": {}, "agent_states": {}, "coordination_round": 0},
        "content": {"content": "", "source": "agent_a"},
        "reasoning": {"reasoning": "", "source": "agent_a"},
    }
    common = {"span_id": f"span-{number}", "span_type": kind, "timestamp": START + number / 8}
    return common | own_files.get(kind, {}) | fields


def trace(trace_id: str, spans: list[Any], agent: str = "agent_a", **fields: Any) -> dict[str, Any]:
    """A trace, its keys in the order of the tool; the total is the sum of its reward spans, as the tool adds them."""
    rewards = [span["reward"] for span in spans if isinstance(span, dict) and span.get("span_type") == "reward"]
    metadata = {"agent_id": agent, "backend": "OpenAI", "model": "gpt-5-nano", "num_messages": 2, "has_tools": True}
    return {
        "trace_id": trace_id,
        "agent_id": agent,
        "task": TASK,
        "spans": spans,
        "metadata": metadata,
        "start_time": START,
        "end_time": START + 10.5,
        "duration": 10.5,
        "total_reward": sum(rewards) if rewards else None,
        "status": "completed",
    } | fields


def streamed() -> dict[str, Any]:
    """What the tool records of an agent today: pieces of a stream, calls without results, rewards."""
    return trace(
        "11111111-0000-4000-8000-000000000001",
        [
            span("reasoning", 0, reasoning="Let me "),
            span("reasoning", 1, reasoning="search."),
            span("content", 2, content="I will "),
            span("content", 3, content="look it up."),
            span("tool", 4, span_id="call_1", tool_name="search", arguments={"query": "capital", "a": 1}),
            span("tool", 5, span_id="call_2", tool_name="search", arguments={"raw": "{"}),
            span("reward", 6, reward=1.0, reward_type="tool", reason="Tool search execution reward"),
            span("reward", 7, reward=-0.5, reward_type="tool", reason="Tool search execution reward"),
            span("content", 8, content="Paris\u00e9."),
            span("tool", 9, span_id="call_1", tool_name="new_answer", arguments={"content": "Paris"}),
            span("reward", 10, reward=0.7, reward_type="answer_quality", reason="Answer quality"),
        ],
    )


def prompted() -> dict[str, Any]:
    """A trace with whole calls, and results of tools."""
    return trace(
        "11111111-0000-4000-8000-000000000002",
        [
            span(
                "prompt", 0, input="Q1", output="A1", model="gpt-x", input_tokens=10, output_tokens=3, reasoning="Hm."
            ),
            span("content", 1, content="A1"),
            span(
                "tool",
                2,
                span_id="call_1",
                tool_name="run",
                arguments={"code": "1/0"},
                success=False,
                error="ZeroDivision",
            ),
            span("tool", 3, span_id="call_2", tool_name="run", arguments={"code": "1"}, result={"output": 1}),
            span("prompt", 4, input="Q2", output="A2", model="gpt-x", input_tokens=20, output_tokens=4),
            span("reward", 5, reward=2.0, reward_type="human", reason=None),
        ],
        "agent_b",
    )


def coordinated() -> dict[str, Any]:
    """The orchestrator's trace of a session."""
    states = {"agent_a": {"has_voted": True, "has_answer": True}, "agent_b": {"has_voted": False, "has_answer": True}}
    vote = {"voter": "agent_a", "voted_for": "agent_b", "reasoning": "Better."}
    answer = {"agent_id": "agent_b", "answer_summary": "Paris"}
    return trace(
        "11111111-0000-4000-8000-000000000003",
        [
            span("coordination", 0, action_type="new_answer", action_data=answer, coordination_round=0),
            span("coordination", 1, action_type="vote", action_data=vote, agent_states=states, coordination_round=1),
            span("reward", 2, reward=1.9, reward_type="coordination", reason="Coordination completed in 1 rounds"),
            span("reward", 3, reward=1.0, reward_type="voting", reason="Agent agent_a voting accuracy reward"),
            span("reward", 4, reward=-0.5, reward_type="voting", reason="Agent agent_b voting accuracy reward"),
        ],
        "orchestrator",
        metadata={
            "orchestrator_id": "orchestrator",
            "num_agents": 2,
            "agent_ids": ["agent_a", "agent_b"],
            "coordination": True,
        },
    )


def failed() -> dict[str, Any]:
    """A trace that an error ended."""
    error = {"agent_id": "agent_a", "model": "gpt-5-nano", "error": "Connection lost"}
    spans = [span("content", 0, content="I")]
    return trace("11111111-0000-4000-8000-000000000004", spans, status="failed", metadata=error)


def write_traces(folder: Path, traces: list[dict[str, Any]], day: str = "20251101") -> list[Path]:
    """The tool's store: a file for each trace, and the index of all."""
    index: dict[str, Any] = {"traces": {}, "agents": {}}
    paths = []
    for value in traces:
        path = folder / "traces" / day / value["agent_id"] / f"{value['trace_id']}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(value, indent=2), "utf-8")
        paths.append(path)
        about = {key: value[key] for key in ("agent_id", "task", "start_time", "status", "total_reward")}
        index["traces"][value["trace_id"]] = about | {"task": value["task"][:100]}
        index["agents"].setdefault(value["agent_id"], []).append(value["trace_id"])
    (folder / "metadata").mkdir(parents=True, exist_ok=True)
    (folder / "metadata" / "trace_index.json").write_text(json.dumps(index, indent=2), "utf-8")
    return paths


def event(kind: str, number: int, agent: str | None = None, details: str = "", **context: Any) -> dict[str, Any]:
    """An event of a session."""
    return {
        "timestamp": START + number,
        "event_type": kind,
        "agent_id": agent,
        "details": details,
        "context": context | {"iteration": 1, "round": 0},
    }


def session_events() -> list[dict[str, Any]]:
    """Two agents answer, both vote for the second, which presents."""
    label = {"available_answer_labels": ["agent2.1"], "answer_count": 1}
    votes = {"voted_for": "agent_b", "voted_for_label": "agent2.1", "available_answers": ["agent1.1", "agent2.1"]}
    return [
        event("session_start", 0, details="Started with agents: ['agent_a', 'agent_b']"),
        event("context_received", 1, "agent_a", "Received context with 0 answers", answer_count=0),
        event("new_answer", 2, "agent_b", "Provided answer agent2.1", label="agent2.1"),
        event("new_answer", 3, "agent_a", "Provided answer agent1.1", label="agent1.1"),
        event("context_received", 4, "agent_a", "Received context with 1 answers", **label),
        event("vote_cast", 5, "agent_a", "Voted for agent2.1", reason="It is better.", **votes),
        event("vote_cast", 6, "agent_b", "Voted for agent2.1", reason="It is mine.", **votes),
        event("final_agent_selected", 7, "agent_b", "Selected as final presenter", vote_summary="2 votes"),
        event("final_answer", 8, "agent_b", "Presented final answer agent2.final", label="agent2.final"),
        event("session_end", 9, details="Session completed in 9.0s"),
    ]


def session(**fields: Any) -> dict[str, Any]:
    """The whole of a coordination_events.json."""
    about = {
        "user_prompt": TASK,
        "agent_ids": ["agent_a", "agent_b"],
        "start_time": START,
        "end_time": START + 9,
        "final_winner": "agent_b",
    }
    return {"session_metadata": about, "events": session_events()} | fields


def write_session(folder: Path, value: Any = None, *, with_mappings: bool = True) -> Path:
    """The log folder of a session; the path of its coordination_events.json."""
    texts = {
        "agent_b/20251101_120002_000000/answer.txt": "Paris.",
        "agent_a/20251101_120003_000000/answer.txt": "Lyon?",
        "agent_a/20251101_120005_000000/vote.json": json.dumps(
            {"voter_id": "agent_a", "voted_for": "agent_b", "reason": ""}
        ),
        "agent_a/20251101_120005_000000/context.txt": "CURRENT ANSWERS: <agent2.1> Paris.",
        "agent_b/20251101_120006_000000/vote.json": json.dumps(
            {"voter_id": "agent_b", "voted_for": "agent_b", "reason": ""}
        ),
        "final/agent_b/answer.txt": "It is Paris.",
    }
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    if with_mappings:
        labels = ("agent2.1", "agent1.1", "agent1.vote1", "", "agent2.vote1", "agent2.final")
        mappings = {
            label: {"type": "answer", "label": label, "agent_id": name.split("/")[0], "path": name}
            for label, name in zip(labels, texts, strict=True)
            if label
        }
        (folder / "snapshot_mappings.json").write_text(json.dumps(mappings, indent=2), "utf-8")
    path = folder / "coordination_events.json"
    path.write_text(json.dumps(session() if value is None else value, indent=2), "utf-8")
    return path
