"""examples/rubric_manager by the commands of its README, in a copy."""

import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import lake
from testkit.processes import COMMAND, environment
from testkit.shared import CHECKOUT
from testkit.vllm_server import vllm_python

EXAMPLE = Path(CHECKOUT, "examples", "rubric_manager")
PAGE = (EXAMPLE / "README.md").read_text("utf-8")
_SECONDS = 1800


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(EXAMPLE, tmp_path / "example", ignore=shutil.ignore_patterns("__pycache__")))


def run(folder: Path, beginning: str) -> str:
    """What the page's command of that beginning prints, on stdout and stderr."""
    (command,) = re.findall(rf"^\$ ({re.escape(beginning)}.*)$", PAGE, re.MULTILINE)
    script = f"""python() {{ "$0" "$@"; }}\ntrajlake() {{ "$0" -c '{COMMAND[2]}' "$@"; }}\n{command}"""
    done = subprocess.run(
        ["bash", "-c", script, COMMAND[0]],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout + done.stderr


def prepared(folder: Path) -> None:
    """The commands before the engine, which print what the page says."""
    for beginning in ("python script.py", "trajlake ingest", "trajlake init-model"):
        for line in run(folder, beginning).splitlines():
            assert line in PAGE.splitlines()


def test_what_the_page_prints_before_the_engine_is_started(folder: Path) -> None:
    prepared(folder)


@pytest.fixture
def port(folder: Path) -> Iterator[int]:
    """Of an engine that serves the folder's fresh model."""
    prepared(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number = free.getsockname()[1]
    words = [*COMMAND, "serve", "fresh", "--port", str(number), "--max-len", "512", "--python", str(vllm_python())]
    own = environment(VLLM_CPU_KVCACHE_SPACE="1")
    process = subprocess.Popen(words, cwd=folder, stdout=subprocess.PIPE, text=True, env=own)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("serving "), line
    yield number
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=_SECONDS)


@pytest.mark.slow
def test_the_loop_runs_as_the_page_says_and_earns_more(folder: Path, port: int) -> None:
    config = folder / "loop.toml"
    config.write_text(config.read_text("utf-8").replace(":8000", f":{port}"), "utf-8")
    said = run(folder, "trajlake loop")
    assert "sft: 76 updates, run/sft/final" in said
    assert "8 rounds, 8 updates; ended by rounds; the model is in run/final" in said
    lk = lake.open(folder / "L")
    answers, constrained, questions = lk.sql((folder / "answers.sql").read_text("utf-8")).row(0)
    assert answers == constrained > questions > 0
    before, after = lk.sql((folder / "quality.sql").read_text("utf-8")).to_dicts()
    assert after["reward"] > before["reward"]
    assert after["agreement_f1"] is not None
