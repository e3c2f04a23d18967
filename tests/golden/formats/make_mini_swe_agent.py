"""Write runs of mini-swe-agent with the real tool, against scripted models; each version in its own environment:

    python -m venv /tmp/env-mini && /tmp/env-mini/bin/pip install mini-swe-agent==2.4.6
    /tmp/env-mini/bin/python tests/golden/formats/make_mini_swe_agent.py

2.4.6 writes calls.traj.json, responses.traj.json and limit.traj.json (1.1); 1.17.5 writes text.traj.json (1).
"""

import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import minisweagent
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models import test_models

FOLDER = Path(__file__).parent / "mini_swe_agent"
CLOCK = itertools.count(1_780_000_000)
PROMPTS = {"system_template": "You use a shell.", "instance_template": "Task: {{task}}"}
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo '+ a line'"


def called(text: str | None, *commands: str) -> dict[str, Any]:
    """An answer that calls bash."""
    calls = [
        {"id": f"call_{n}", "type": "function", "function": {"name": "bash", "arguments": json.dumps({"command": c})}}
        for n, c in enumerate(commands)
    ]
    actions = [{"command": command, "tool_call_id": f"call_{n}"} for n, command in enumerate(commands)]
    made = test_models.make_toolcall_output(text, calls, actions)
    usage = {"prompt_tokens": 11, "completion_tokens": 4, "total_tokens": 15}
    message = {"role": "assistant", "content": text, "tool_calls": calls, "reasoning_content": "Which command?"}
    made["extra"]["response"] = {
        "id": f"chatcmpl-{len(commands)}",
        "created": 1_780_000_000,
        "model": "scripted-1",
        "object": "chat.completion",
        "choices": [{"finish_reason": "tool_calls", "index": 0, "message": message}],
        "usage": usage,
    }
    return made


def run(name: str, model: Any, **settings: Any) -> None:
    """Run an agent, and write its trajectory as the SWE-bench runner does."""
    agent = DefaultAgent(model, LocalEnvironment(env={"PAGER": "cat"}), **PROMPTS, **settings)
    agent.run("Say hello.")
    agent.save(FOLDER / name, {"instance_id": f"hello__{name.partition('.')[0]}"})


def run_first(name: str) -> None:
    """The same with the tool's first version."""
    from minisweagent.run.utils.save import save_traj

    answers = ["No command here.", "I look.\n```bash\necho hello\n```", f"Done.\n```bash\n{SUBMIT}\n```"]
    agent = DefaultAgent(test_models.DeterministicModel(outputs=answers), LocalEnvironment(), **PROMPTS)
    status, result = agent.run("Say hello.")
    kept = {"instance_id": "hello__text"}
    save_traj(agent, FOLDER / name, print_path=False, exit_status=status, result=result, **kept)


time.time = lambda: float(next(CLOCK))  # type: ignore[assignment]
FOLDER.mkdir(exist_ok=True)
if minisweagent.__version__.startswith("1."):
    run_first("text.traj.json")
    sys.exit()
answers = [called("I look.", "echo hello", "false"), called(None, SUBMIT)]
run("calls.traj.json", test_models.DeterministicToolcallModel(outputs=answers))
items = [
    test_models.make_response_api_output("I look.", [{"command": "echo hello", "tool_call_id": "call_0"}]),
    test_models.make_response_api_output(None, [{"command": SUBMIT, "tool_call_id": "call_1"}]),
]
run("responses.traj.json", test_models.DeterministicResponseAPIToolcallModel(outputs=items))
run("limit.traj.json", test_models.DeterministicToolcallModel(outputs=answers), step_limit=1)
