"""A Harbor job with everything in it that ATIF has: what an export has to write such that it reads as before."""

import json
from pathlib import Path
from typing import Any

AGENT = {"name": "demo", "version": "1", "model_name": "m", "extra": {"temperature": 0.5, "kind": "x"}}


def write(path: Path, value: Any) -> None:
    """A JSON file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2), "utf-8")


def step(number: int, source: str, message: Any, **fields: Any) -> dict[str, Any]:
    """A step."""
    return {"step_id": number, "source": source, "message": message} | fields


def call(call_id: str, **fields: Any) -> dict[str, Any]:
    """A call of a tool."""
    return {"tool_call_id": call_id, "function_name": "run", "arguments": {"cmd": "ls"}} | fields


def document(steps: list[Any], **fields: Any) -> dict[str, Any]:
    """A document."""
    return {"schema_version": "ATIF-v1.8", "session_id": "s", "agent": AGENT, "steps": steps} | fields


def result(name: str, **fields: Any) -> dict[str, Any]:
    """The result of a trial."""
    return {
        "id": f"id-of-{name}",
        "task_name": "org/task",
        "trial_name": name,
        "trial_uri": f"file:///jobs/{name}",
        "task_id": {"path": "tasks/task"},
        "source": "bench",
        "config": {"job_id": "job-1", "trials_dir": "jobs/nightly", "agent": {"api_key": "hidden", "name": "demo"}},
        "agent_info": {"name": "demo", "version": "1", "model_info": {"name": "m"}},
        "agent_result": {"n_input_tokens": 30, "n_output_tokens": 7, "cost_usd": 0.25, "metadata": {"retries": 1}},
        "verifier_result": {"rewards": {"reward": 1.0, "style": 0.5}},
        "started_at": "2026-01-01T00:00:00Z",
        "finished_at": "2026-01-01T00:01:00Z",
        "agent_execution": {"started_at": "2026-01-01T00:00:10Z", "finished_at": "2026-01-01T00:00:50Z"},
        "step_results": None,
    } | fields


def sub_agent(name: str, **fields: Any) -> dict[str, Any]:
    """The document of a sub-agent."""
    steps = [step(1, "user", "Look it up."), step(2, "agent", f"{name} found it.", metrics={"prompt_tokens": 4})]
    agent = {"name": "helper", "version": "1"}
    return {"schema_version": "ATIF-v1.8", "trajectory_id": name, "agent": agent, "steps": steps} | fields


def main_document() -> dict[str, Any]:
    """Times, parts, reasoning, copies, dispatches, results of many kinds, tokens that were cut, sub-agents."""
    image = {"type": "image", "source": {"media_type": "image/png", "path": "images/a.png"}}
    refs = [{"trajectory_id": "sub-1"}, {"trajectory_path": "agent/helper-log.json"}]
    many = [
        {"source_call_id": "c1", "content": "a b", "extra": {"exit": 0}},
        {"source_call_id": "c2", "content": [{"type": "text", "text": "see"}, image]},
        {"content": "the screen"},
        {"subagent_trajectory_ref": refs, "extra": {"why": "asked"}},
    ]
    metrics = {"prompt_tokens": 3, "completion_tokens": 2, "cached_tokens": 1, "cost_usd": 0.125}
    tokens = {"prompt_token_ids": [1, 2, 3], "completion_token_ids": [4, 5], "logprobs": [-0.125, -0.25]}
    grown = {"prompt_token_ids": [1, 2, 3, 4, 5, 6], "completion_token_ids": [7], "logprobs": [-0.5]}
    cut = {"prompt_token_ids": [1, 9], "completion_token_ids": [8]}
    hidden = {"prompt_tokens": 9, "prompt_token_ids": [1, 2], "completion_token_ids": [3, 4]}
    when = "2026-01-01T00:00:{:02}Z".format
    steps = [
        step(1, "system", "Be short.", timestamp=when(11)),
        step(2, "user", [{"type": "text", "text": "Look."}, image], timestamp=when(12), extra={"from": "cli"}),
        step(
            3,
            "agent",
            "I look.",
            timestamp=when(13),
            reasoning_content="hm",
            reasoning_effort="high",
            model_name="m2",
            tool_calls=[call("c1", extra={"k": 1}), call("c2", arguments={})],
            observation={"results": many},
            metrics=metrics | tokens,
            extra={"turn": 1},
        ),
        step(4, "agent", "", timestamp="yesterday", observation={"results": [{"content": "ok"}]}, metrics=grown),
        step(5, "user", "Go on.", timestamp=when(15)),
        step(6, "agent", "copied", is_copied_context=True, timestamp=when(16)),
        step(7, "agent", "dispatch", llm_call_count=0),
        step(8, "user", "No time on this one."),
        step(9, "agent", "After the cut.", metrics=cut, timestamp=when(19), llm_call_count=1),
        step(10, "agent", "Two in one.", metrics=hidden, llm_call_count=2),
        step(11, "system", "The end.", observation={"results": [{"content": "closed"}]}),
    ]
    nested = sub_agent("sub-2", subagent_trajectories=[sub_agent("sub-3")])
    nameless = {key: value for key, value in sub_agent("unnamed").items() if key != "trajectory_id"}
    totals = {"total_prompt_tokens": 12, "total_completion_tokens": 6, "total_steps": 11, "extra": {"peak": 9}}
    return document(
        steps,
        trajectory_id="main",
        notes="A note.",
        final_metrics=totals,
        continued_trajectory_ref="trajectory.cont-1.json",
        subagent_trajectories=[sub_agent("sub-1"), nested, nameless],
        extra={"policy_version": 3, "tags": ["a"]},
    )


def write_job(folder: Path) -> Path:
    """Trials of every kind."""
    tools = {"agent": AGENT | {"tool_definitions": [{"type": "function", "function": {"name": "run"}}]}}
    write(folder / "whole" / "agent" / "trajectory.json", main_document() | tools)
    continued = document([step(1, "user", "Summary."), step(2, "agent", "Continued.")], trajectory_id="cont-1")
    write(folder / "whole" / "agent" / "trajectory.cont-1.json", continued)
    write(folder / "whole" / "agent" / "helper-log.json", sub_agent("in-a-file"))
    user = document([step(1, "agent", "Please look.")])
    write(folder / "whole" / "user-agent" / "trajectory.json", user | {"agent": {"name": "persona", "version": "1"}})
    detail = {"prompt_token_ids": [[1], [2]], "completion_token_ids": [[3], [4]]}
    own_tokens = {"completion_token_ids": [[4, 5], [7], [8], [3, 4]]}
    agent_result = result("x")["agent_result"] | {"rollout_details": [own_tokens, detail]}
    write(folder / "whole" / "result.json", result("whole", agent_result=agent_result))

    # Tokens that only the trial has, with what stands next to them for each turn.
    turns = {"prompt_token_ids": [[1, 2], [1, 2, 3, 4]], "completion_token_ids": [[3], [5]]}
    turns |= {"logprobs": [[-0.5], [-0.75]], "extra": {"routed": [[0], [1]], "rare": [None, "x"]}}
    two = [step(1, "user", "Go."), step(2, "agent", "One."), step(3, "user", "On."), step(4, "agent", "Two.")]
    write(folder / "details" / "agent" / "trajectory.json", document(two))
    fault = {"exception_type": "AgentTimeoutError", "exception_message": "too long", "exception_traceback": ""}
    with_turns = {"rollout_details": [turns, detail]}
    write(folder / "details" / "result.json", result("details", agent_result=with_turns, exception_info=fault))

    # Of two steps, each with its own agent and rewards.
    steps = [
        {"step_name": name, "verifier_result": {"rewards": {"reward": reward}}, "agent_result": {"cost_usd": 0.5}}
        for name, reward in (("first", 0.0), ("second", 1.0))
    ]
    for name in ("first", "second"):
        write(folder / "steps" / "steps" / name / "agent" / "trajectory.json", document(two, session_id=name))
    several = {"step_results": steps, "agent_result": None, "verifier_result": {"mean": 0.5}}
    write(folder / "steps" / "result.json", result("steps", **several))

    # Without a trajectory: the outcome, and the tokens of two histories; the outcome alone.
    bare = {"rollout_details": [turns, detail], "n_input_tokens": 4}
    write(folder / "tokens-only" / "result.json", result("tokens-only", agent_result=bare))
    stopped = {"exception_type": "CancelledError", "exception_message": "stopped"}
    write(folder / "outcome" / "result.json", result("outcome", agent_result=None, exception_info=stopped))

    # Outside of trials.
    write(folder / "beside" / "agent" / "trajectory.json", document(two, session_id="beside"))
    write(folder / "beside" / "verifier" / "reward.json", {"reward": 0.5, "format": 1})
    write(folder / "bare.json", document(two, session_id="bare", extra={"reward": 0.75, "task_id": "named"}))
    same = [json.dumps(document([step(1, "user", "Go."), step(2, "agent", text)])) for text in ("a", "b")]
    (folder / "two.jsonl").write_text("\n".join(same) + "\n", "utf-8")
    write(folder / "no-agent.json", document([step(1, "user", "Hello?")], session_id="no", extra={"reward": 0}))
    return folder
