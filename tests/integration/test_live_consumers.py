"""Tools that run agents by themselves, recorded through their own hooks: as files of theirs are read, and undisturbed.

Each tool is installed once per machine in its own environment, which takes minutes; `make test-slow`.
"""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

import lake
from testkit import engine_server as engines
from testkit.consumers import massgen_python, said_by, with_packages
from testkit.copies import empty_lake
from testkit.engine_server import engine_server
from testkit.round_trips import assert_same, records, there_and_back
from testkit.shared import CHECKOUT

pytestmark = pytest.mark.slow

EVAL_PROTOCOL = ("eval-protocol==0.3.33",)
PAGES = Path(CHECKOUT, "docs", "guides", "record")


def test_eval_protocols_rollouts_are_recorded_as_its_rows_are_read(tmp_path: Path) -> None:
    python = with_packages("eval_protocol", EVAL_PROTOCOL)
    empty_lake(tmp_path / "lake")
    with engine_server() as engine:
        report = said_by(python, "live_eval_protocol", CHECKOUT, tmp_path / "lake", tmp_path / "spool", engine.url, 3)
    assert report["troubles"] == 0
    recorded = records(lake.open(tmp_path / "lake"))
    assert "not-to-be-stored" not in str(recorded)
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in report["rows"]["policy"]), "utf-8")
    other_lake = empty_lake(tmp_path / "other")
    assert other_lake.ingest(path, run_id="agent").rejected == 0
    first = {key: record for key, record in recorded.items() if record.task_id.startswith("policy")}
    assert_same(first, records(other_lake))
    assert len(first) == 3
    retried = [record for record in recorded.values() if record.task_id.startswith("flaky")]
    assert [(record.status, record.error) for record in retried] == [("completed", None)] * 3
    refused = [row["rollout_status"]["code"] for row in report["rows"]["error-500"]]
    assert refused == [13] * 3, "it hears of errors as without a recorder"


def test_the_page_of_eval_protocol_runs_under_its_own_test_runner(tmp_path: Path) -> None:
    python = with_packages("eval_protocol", EVAL_PROTOCOL)
    page = (PAGES / "rollout-workers.md").read_text("utf-8")
    _, program = re.findall(r"^```python\n(.+?)^```$", page, re.MULTILINE | re.DOTALL)
    with engine_server() as engine:
        file = tmp_path / "test_page.py"
        file.write_text(program.replace("http://127.0.0.1:8000/v1", engine.url), "utf-8")
        env = {"HOME": str(tmp_path), "PYTHONPATH": str(CHECKOUT), "TRAJLAKE_SPOOL": str(tmp_path / "spool")}
        env |= {"PATH": os.environ["PATH"], "OPENAI_API_KEY": "unused", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        command = [str(python), "-W", "ignore", "-m", "pytest", "-q", "-p", "no:cacheprovider", file.name]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout
        answered = [call.text for call in engine.calls]
    records_read = records(lake.open(tmp_path / "L")).values()
    assert len(records_read) == 2
    assert sorted(record.steps[0].action for record in records_read) == sorted(answered)
    assert len({record.task_id for record in records_read}) == len({record.run_id for record in records_read}) == 1


def _works_in_a_team(body: dict[str, Any], number: int) -> tuple[str, list[dict[str, Any]]]:
    """Answers with MassGen's tool, votes for the first agent once it is shown answers, and presents."""
    tools = [tool["function"]["name"] for tool in body.get("tools") or ()]
    prompt = json.dumps(body["messages"])
    if "vote" in tools and "Paris, says" in prompt:
        name, arguments = "vote", {"agent_id": "agent1", "reason": "It is right."}
    elif "new_answer" in tools and "Paris, says" not in prompt:
        name, arguments = "new_answer", {"content": "Paris, says an agent."}
    else:
        return "It is Paris.", []
    function = {"name": name, "arguments": json.dumps(arguments)}
    return "I think.", [{"id": f"call_{number}", "type": "function", "function": function}]


def test_a_massgen_team_is_recorded_as_its_traces_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = massgen_python()
    monkeypatch.setattr(engines, "_answer", _works_in_a_team)
    recorded = empty_lake(tmp_path / "lake")
    with engine_server() as engine:
        arguments = (CHECKOUT, PAGES / "massgen.md", engine.url, tmp_path / "lake", tmp_path / "spool")
        report = said_by(python, "live_massgen", *arguments)
    assert report["troubles"] == 0
    plain, watched = report["streams"]
    assert watched == plain, "chunk by chunk"
    assert "It is Paris." in report["team"]
    read, _ = there_and_back(recorded, tmp_path, "massgen", run_id="team-v1")
    assert_same(records(recorded), read)
    assert "not-to-be-stored" not in str(read)
    (team,) = (record for record in read.values() if record.agent_id == "orchestrator")
    attributes = [span.attributes or {} for span in team.spans]
    votes = {
        span["action_data"]["voter"]: span["action_data"]["voted_for"]
        for span in attributes
        if span["action_type"] == "vote"
    }
    assert votes == {"a": "a", "b": "a"}
    assert {span["action_type"] for span in attributes} >= {"new_answer", "restart", "final_agent", "final_answer"}
    assert team.prompt_tokens == sum(
        record.prompt_tokens or 0 for record in read.values() if record.agent_id in ("a", "b")
    )
    agents = [record for record in read.values() if record.agent_id in ("a", "b")]
    assert {record.status for record in agents} == {"completed"}
    assert all(
        record.policy == "policy" and (record.initial_messages or ())[0]["role"] == "system" for record in agents
    )
    (left_record,) = (record for record in read.values() if record.agent_id == "left")
    assert (left_record.status, left_record.steps[0].action) == ("aborted", "It i")
