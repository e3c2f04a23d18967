"""examples/massgen_loop by the commands of its README, in a copy: MassGen itself, and the real vLLM."""

import subprocess
from pathlib import Path

import pytest

import lake
from testkit.consumers import massgen_python
from testkit.example_pages import Example, free_port
from testkit.processes import environment
from testkit.shared import CHECKOUT
from testkit.vllm_server import vllm_python

pytestmark = pytest.mark.slow

NOBODY_THERE = """
import asyncio, sys
from team import Client, Task, ask
client = Client(base_url=f"http://127.0.0.1:{sys.argv[1]}/v1", model="m", sampling={"seed": 0})
asyncio.run(ask(Task(messages=[{"role": "user", "content": "Say in Esperanto: blue house"}]), client))
"""


def test_an_engine_that_does_not_answer_is_an_error_not_a_wrong_answer(tmp_path: Path) -> None:
    done = subprocess.run(
        [massgen_python(), "-c", NOBODY_THERE, str(free_port())],
        cwd=tmp_path,
        env=environment(PYTHONPATH=f"{CHECKOUT}:{CHECKOUT / 'examples' / 'massgen_loop'}", HOME=str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ConnectionError: Connection error."


def played(example: Example, run: str) -> None:
    """The held-out questions; what the sessions earn depends a little on what the engine computes together."""
    printed = example.run(f"trajlake collect --lake L --run {run}")
    assert f"run {run}: 1 round, 144 episodes finished, 0 failed, 0 aborted" in printed


def test_teams_are_better_after_training_on_what_earlier_ones_earned(tmp_path: Path) -> None:
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "TRAJLAKE_ENGINE_PYTHON": str(vllm_python())}
    example = Example(
        "massgen_loop",
        tmp_path / "example",
        python=massgen_python(),
        settings=settings,
        ports={8000: free_port(), 8001: free_port()},
    )
    example.run("python questions.py")
    with example.running("python script.py"):
        example.prints_as_the_page_says("trajlake collect --lake L --run script")
    for beginning in ("trajlake score calls.py", "trajlake credit", "trajlake init-model"):
        example.prints_as_the_page_says(beginning)
    example.run("cp chat_template.jinja")
    for out in ("imitation", "better"):
        example.prints_as_the_page_says(f"trajlake train --lake L --out {out}")
    with example.running("trajlake serve"):
        played(example, "before")
        example.run("trajlake push")
        played(example, "after")
    (success,) = (line.split() for line in example.run("trajlake eval").splitlines() if line.startswith("score "))
    low, test = float(success[4]), success[7]
    assert low > 0
    assert test == "exact"
    example.prints_as_the_page_says("trajlake score --lake L")
    query = (example.folder / "calls.sql").read_text("utf-8")
    script, before, after = lake.open(example.folder / "L").sql(query).to_dicts()
    assert (script["sessions"], before["sessions"], after["sessions"]) == (432, 144, 144)
    assert after["right_answers"] > before["right_answers"]
