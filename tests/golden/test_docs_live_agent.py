"""docs/guides/live-agent.md: its program and its commands run, in order, before an engine that samples from a model.

A small random model and a small engine stand for the page's; `tests/integration/test_proxy_vllm.py` has the real vLLM.
"""

import re
import runpy
import shlex
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

import lake
from lake.cli import trajlake
from lake.errors import NotALakeError
from testkit.engine_server import engine_server
from testkit.lakes import build_lake
from testkit.model_server import ModelEngine
from testkit.proxy_process import Proxy, proxy
from testkit.shared import CHECKOUT
from trainer.policy.tiny_model import TinyModelConfig, make_tiny_model

PAGE = Path(CHECKOUT, "docs", "guides", "live-agent.md").read_text("utf-8")
EPISODES = 8
"""Of the first of the page's four tasks."""


def commands(block: str) -> list[list[str]]:
    return [
        shlex.split(
            line.removeprefix("$ ").replace("episodes_per_step=32", f"episodes_per_step={EPISODES}"), comments=True
        )
        for line in block.splitlines()
    ]


def play(at: Proxy, run: str) -> None:
    """Run the agent of the page, and wait until the lake has its episodes."""
    (program,) = re.findall(r"^```python\n(.+?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert program.count("http://127.0.0.1:8484") == 1
    tasks = '["rain", "bread", "trains", "sleep"]'
    assert program.count(tasks) == 1
    Path("agent.py").write_text(program.replace("http://127.0.0.1:8484", at.base).replace(tasks, '["rain"]'))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["agent.py", run])
        runpy.run_path("agent.py")
    deadline = time.monotonic() + 60
    while recorded(at.lake, run) < EPISODES and time.monotonic() < deadline:
        time.sleep(0.2)


def recorded(uri: str, run: str) -> int:
    """Episodes of a run, 0 while the proxy still makes its lake."""
    try:
        return int(lake.open(uri).sql("SELECT count(*) FROM episodes WHERE run_id = ?", [run]).item())
    except NotALakeError:
        return 0


def done(command: list[str]) -> str:
    result = CliRunner().invoke(trajlake, command[1:])
    assert result.exit_code == 0, f"{command}: {result.output}"
    return result.output


def test_from_nothing_to_an_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny_model(build_lake(tmp_path / "texts").snapshot(), tmp_path / "model", TinyModelConfig())
    monkeypatch.chdir(tmp_path)
    (record,) = re.findall(r"^trajlake record --upstream http://127.0.0.1:8000 --lake L (.+)$", PAGE, re.MULTILINE)
    blocks = [commands(block) for block in re.findall(r"^```console\n(.+?)^```$", PAGE, re.MULTILINE | re.DOTALL)]
    first, look, credit, train, (second, view) = blocks
    assert [first, [second]] == [[["python", "agent.py", "first"]], [["python", "agent.py", "second"]]]
    assert view == ["trajlake", "view", "--lake", "L"]
    with engine_server(ModelEngine(tmp_path / "model")) as engine, proxy(engine, tmp_path, *shlex.split(record)) as at:
        Path("L").symlink_to(at.lake)
        play(at, "first")
        table, listing, _, trained = (done(command) for command in [*look, *credit, *train])
        at.end()
    assert re.search(rf"first\s+{EPISODES}\s+", table)
    assert "rain" in listing
    assert f"{EPISODES} episodes" in trained
    facts = lake.open("L")
    assert facts.sql("SELECT count(*) FROM steps").item() == facts.sql("SELECT count(*) FROM tokens").item() > EPISODES
    off = facts.sql("SELECT value FROM metrics WHERE name = 'log_ratio_abs'").item()
    assert off < 1e-4, "the tokens and log-probabilities are the engine's, so the first ratio is 1"
