"""An engine that a loop starts: it is started again when it dies, with the newest weights, and ends with the loop.

vLLM itself is stood in for (`testkit.vllm_stand_in`); the loop with a real one is `test_online_loop_vllm.py`.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

import lake
from lake.errors import UsageError
from pipelines.collect.engines import EngineError
from pipelines.collect.factory import PlayedWeights
from pipelines.collect.manager.run import StoppedError
from testkit.processes import environment
from testkit.vllm_stand_in import is_running, model_folder, noted, stand_in
from trainer.online.engines import Engines, LoopEngine
from trainer.online.settings import EngineConfig, SyncConfig

_SECONDS = 240
KEEPER = """
import sys, time
from pathlib import Path
from trainer.online.engines import LoopEngine
from trainer.online.settings import EngineConfig, SyncConfig
with LoopEngine(EngineConfig(serve=True, python=sys.argv[1]), Path(sys.argv[2]), SyncConfig(), print):
    print("runs", flush=True)
    time.sleep(3600)
"""


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def called(model: Path) -> list[list[object]]:
    """What the stand-in was asked to do: paths and bodies."""
    return [json.loads(line) for line in model.with_name("calls.jsonl").read_text().splitlines()]


def until_all_have_ended(pids: list[int]) -> None:
    until(lambda: not any(is_running(pid) for pid in pids))


def options(model: Path) -> dict[str, str]:
    words = noted(model)["argv"]
    return dict(pairwise(words))


def test_it_is_started_again_with_the_newest_weights_and_ends_with_the_block(tmp_path):
    model, lines = model_folder(tmp_path), []
    newer = shutil.copytree(model, tmp_path / "newer")
    config = EngineConfig(serve=True, python=str(stand_in(tmp_path)), dtype="bfloat16", options=("--seed", "7"))
    sync = SyncConfig(sleep=True, transfer="ipc")
    with LoopEngine(config, model, sync, lines.append) as engine:
        first, began = options(model), noted(model)["pids"]
        assert first["--dtype"] == "bfloat16"
        assert first["--seed"] == "7"
        assert "--enable-sleep-mode" in noted(model)["argv"]
        assert json.loads(first["--weight-transfer-config"]) == {"backend": "ipc"}
        assert noted(model)["environment"]["VLLM_ALLOW_INSECURE_SERIALIZATION"] == "1"
        engine.weights = PlayedWeights(newer, 7)
        os.kill(began[1], signal.SIGKILL)
        until(lambda: f"{engine.url} is back" in lines)
        second, pids = options(model), noted(model)["pids"]
        assert second["--model"] == str(newer)
        assert ["/update_weight_version", {"new_version": "7"}] in called(model)
        assert second["--port"] == first["--port"] == engine.url.rpartition(":")[2]
        until_all_have_ended(began)
        assert all(is_running(pid) for pid in pids)
    until_all_have_ended(pids)
    assert any("was killed" in line and line.endswith("restarting it") for line in lines)


def test_one_that_does_not_start_again_is_given_up(tmp_path, wording):
    model, lines = model_folder(tmp_path), []
    config = EngineConfig(serve=True, python=str(stand_in(tmp_path)))
    with LoopEngine(config, model, SyncConfig(), lines.append) as engine:
        (model / "dies").write_text("ValueError: no room")
        os.kill(noted(model)["pids"][1], signal.SIGKILL)
        until(lambda: engine.failure is not None)
        assert "does not start again (" in engine.failure
        assert "no room" in engine.failure
        engines = Engines({engine.url: "vllm"}, SyncConfig(probe=False), engine)
        with pytest.raises(StoppedError, match=r"no room.*: mend that; .* with --resume continues"):
            engines.push(lake.open(tmp_path / "lake", create=True), "r", PlayedWeights(model, 1), None, lines.append)
    assert sum("no room" in line for line in lines) == 3
    assert wording(lines[-1]).endswith("given up")


def test_one_that_does_not_start_at_all_says_why(tmp_path):
    model = model_folder(tmp_path, dies="ValueError: no room")
    config = EngineConfig(serve=True, python=str(stand_in(tmp_path)))
    with pytest.raises(EngineError, match="no room"), LoopEngine(config, model, SyncConfig(), print):
        pass
    with pytest.raises(UsageError, match="no such folder"), LoopEngine(config, tmp_path / "none", SyncConfig(), print):
        pass


def test_nothing_outlives_a_kill_of_the_loop(tmp_path):
    model, python = model_folder(tmp_path), stand_in(tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-c", KEEPER, str(python), str(model)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment(TMPDIR=str(tmp_path)),
    )
    try:
        assert process.stdout is not None
        assert any(line == "runs\n" for line in process.stdout)
        pids = noted(model)["pids"]
        assert all(is_running(pid) for pid in pids)
    finally:
        process.kill()
        process.communicate(timeout=_SECONDS)
    until_all_have_ended(pids)
