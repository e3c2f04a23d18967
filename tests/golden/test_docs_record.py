"""docs/guides/record.md and what of its pages needs no other package: programs record what is said of them."""

import re
import shlex
from pathlib import Path

import openai
import pytest
from click.testing import CliRunner

import lake
from lake.cli import trajlake
from testkit.engine_server import engine_server
from testkit.shared import CHECKOUT

GUIDES = Path(CHECKOUT, "docs", "guides")


@pytest.mark.parametrize("name", ["record.md", "record/opentelemetry.md"])
def test_the_programs_record_what_the_query_shows(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client of OpenAI's API calls a small engine on this machine."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRAJLAKE_SPOOL", str(tmp_path / "spool"))
    page = (GUIDES / name).read_text("utf-8")
    programs = re.findall(r"^```python\n(.+?)^```$", page, re.MULTILINE | re.DOTALL)
    assert programs
    with engine_server() as engine:
        monkeypatch.setenv("OPENAI_BASE_URL", engine.url)
        monkeypatch.setenv("OPENAI_API_KEY", "of nobody")
        names: dict[str, object] = {}
        for program in programs:
            exec(compile(program, name, "exec"), names)
        for value in names.values():
            if isinstance(value, openai.OpenAI):
                value.close()
    (block,) = re.findall(r"^```console\n\$ trajlake (sql.+?)^```$", page, re.MULTILINE | re.DOTALL)
    command, _, printed = block.partition("\n")
    done = CliRunner().invoke(trajlake, shlex.split(command))
    assert done.output.split() == printed.split()


def test_the_program_of_a_rollout_worker_records_its_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRAJLAKE_SPOOL", str(tmp_path / "spool"))
    page = (GUIDES / "record" / "rollout-workers.md").read_text("utf-8")
    program, of_eval_protocol = re.findall(r"^```python\n(.+?)^```$", page, re.MULTILINE | re.DOTALL)
    exec(compile(program, "rollout-workers.md", "exec"), {})
    compile(of_eval_protocol, "rollout-workers.md", "exec")
    rows = lake.open("L").sql(
        "SELECT task_id, policy, terminated, action, value_estimate, context_ids, action_ids FROM episodes "
        "JOIN steps USING (episode_id) JOIN tokens USING (episode_id, step_index) ORDER BY task_id"
    )
    assert rows.rows() == [(task, "tiny", True, "Paris", 0.75, [5, 6, 7], [9]) for task in ("France", "Spain")]


RL_CONFIG = (
    *("enable_rl", "enable_tool_rewards", "enable_answer_quality_rewards", "enable_coordination_rewards"),
    *("enable_human_feedback", "collect_only", "checkpoint_dir", "log_dir", "store_config", "algorithm_config"),
    *("type", "path", "host", "port", "algorithm", "learning_rate", "batch_size", "num_epochs", "optimizer"),
    *("gamma", "lambda_gae", "clip_epsilon", "num_prompt_candidates", "prompt_diversity_threshold"),
)
"""Fields of RLConfig, StoreConfig and AlgorithmConfig in massgen/rl/config.py."""


def test_every_flag_of_massgens_configuration_has_a_row() -> None:
    page = (GUIDES / "record" / "massgen.md").read_text("utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith("| ---")]
    named = " ".join(row.split("|")[1] for row in rows)
    for flag in RL_CONFIG:
        assert re.search(rf"\b{flag}\b", named), flag
    for plan in ("LightningRL", "Hierarchical RL"):
        assert f"* **{plan}**" in page
