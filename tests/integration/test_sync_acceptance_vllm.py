"""A real vLLM on the CPU serves the demo's policy; `trajlake collect` plays 256 episodes of the house with it.

In the meantime weights are pushed three times, and the engine is killed (kill -9) and started again. Every sampled
token carries the version of the weights that made it: under these, transformers gives it the log-probability that the
engine recorded. PPO then trains on what was collected. Minutes; the engine's environment is made once per machine.
"""

import asyncio
import re
import subprocess
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

import lake
from pipelines.collect.engines.find import connect_engine
from testkit.demo_models import near, warm_policy
from testkit.vllm_commands import PATIENCE, TOLERANCE, differences, running, trajlake, wait_for, wait_for_tokens
from trainer.policy.model import load_policy
from trainer.policy.model_files import write_model
from trainer.sync.targets import ProbeConfig, SyncTargets, Weights, draw_random_sequences, score_reference

EPISODES, GROUPS, SIBLINGS = 256, 32, 8


def came_back(lines: list[str], *processes: subprocess.Popen[str]) -> None:
    """Until the fleet has said that the engine has its weights again."""
    wait_for(lambda: any("came back, version 3 again" in line for line in lines), "the engine's return", *processes)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Version -> weights."""
    root = tmp_path_factory.mktemp("demo")
    warm = warm_policy(root)
    folders = {version: near(warm, root / f"near{version}", version) for version in (2, 3, 4)}
    for version, folder in folders.items():
        write_model(folder, root / f"w{version}", tied=True)
    return {1: warm} | {version: root / f"w{version}" for version in folders}


@pytest.mark.slow
def test_collecting_while_weights_are_pushed_and_the_engine_dies(tmp_path: Path, folders: dict[int, Path]) -> None:
    uri = str(tmp_path / "lake")
    references = {
        version: score_reference(
            load_policy(folder), draw_random_sequences(load_policy(folder).vocabulary, ProbeConfig())
        )
        for version, folder in folders.items()
    }
    serve = ("serve", folders[1], "--port")
    with running(tmp_path, "serve", *serve, 0) as engine:
        url = engine.until_it_serves()
        port = url.rpartition(":")[2]
        trajlake("push", folders[1], "--engine", url, "--version", 1)
        collect = ("collect", "--env", "house", "--engine", url, "--model", folders[1], "--lake", uri, "--run", "house")
        sizes = ("--groups", GROUPS, "--group-size", SIBLINGS, "--parallel", 64, "--max-tokens", 4)
        with running(tmp_path, "collect", *collect, *sizes) as collecting:

            async def train() -> None:
                """What a trainer does: it pushes its weights now and then, and looks after the engine all the time."""
                lines: list[str] = []
                fleet = SyncTargets([connect_engine(url)])
                async with asyncio.TaskGroup() as group:
                    watching = group.create_task(fleet.watch(lines.append))
                    for version in (2, 3, 4):
                        await asyncio.to_thread(wait_for_tokens, url, collecting.process)
                        done = await fleet.deliver(
                            Weights(version=version, folder=folders[version]), references[version]
                        )
                        assert not done.failed, done
                        assert done.deliveries[0].before == version - 1
                        if version == 3:
                            await asyncio.to_thread(engine.kill_engine)
                            again = stack.enter_context(running(tmp_path, "serve-again", *serve, port))
                            await asyncio.to_thread(came_back, lines, again.process, collecting.process)
                    watching.cancel()
                await fleet.engines[0].close()

            with ExitStack() as stack:
                asyncio.run(train())
                assert collecting.process.wait(PATIENCE) == 0, collecting.err.read_text()[-4000:]
    check_lake(uri, folders)
    check_training(uri, folders[1], tmp_path / "run")


def check_lake(uri: str, folders: dict[int, Path]) -> None:
    lk = lake.open(uri)
    statuses = lk.sql("SELECT status FROM episodes")["status"].to_list()
    assert len(statuses) == EPISODES
    assert set(statuses) <= {"completed", "truncated"}
    wrong, mixed = differences(uri, folders)
    for version, values in sorted(wrong.items()):
        print(f"version {version}: {len(values)} tokens, |d| max {max(values):.2g}, mean {np.mean(values):.2g}")
    print(f"episodes of several versions: {mixed}")
    assert set(wrong) == {1, 2, 3, 4}
    assert max(max(values) for values in wrong.values()) <= TOLERANCE
    assert mixed


def check_training(uri: str, model: Path, out: Path) -> None:
    trajlake("credit", "gigpo", "--lake", uri)
    printed = trajlake("train", "--lake", uri, "--model", model, "--loss", "ppo", "--out", out, "--lr", "1e-4")
    assert re.search(r"\b[1-9]\d* optimizer steps", printed), printed
    assert (out / "final" / "model.safetensors").is_file()
