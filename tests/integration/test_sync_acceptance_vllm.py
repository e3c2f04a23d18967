"""A real vLLM on the CPU serves the demo's policy; `trajlake collect` plays 256 episodes of the house with it.

Meanwhile weights are pushed three times, and the engine is killed (kill -9) and started again. Every sampled token
carries the version of the weights that made it: under these, transformers gives it the log-probability that the engine
recorded. PPO then trains on what was collected. Minutes; the engine's environment is made once per machine.
"""

import asyncio
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch  # noqa: TID253

import lake
from pipelines.collect.engines.find import engine_at
from testkit.demo_models import near, warm_policy
from testkit.vllm_server import vllm_python
from trainer.policy.model import load_policy
from trainer.policy.model_files import load_model, write_model
from trainer.sync import Weights
from trainer.sync.fleet import Fleet
from trainer.sync.probe import ProbeConfig, random_sequences, score

TRAJLAKE = (sys.executable, "-c", "from lake.cli import main; main()")
EPISODES, GROUPS, SIBLINGS = 256, 32, 8
TOLERANCE = 5e-5
"""Nats, in float32 on both sides; 1.4e-5 was the largest difference seen, at 12,511 tokens."""
_PATIENCE = 1800.0


def wait_for(condition: Callable[[], Any], of: str, *processes: subprocess.Popen[str]) -> Any:
    """What a condition gives once it is true; fails if one of the processes ends before."""
    deadline = time.monotonic() + _PATIENCE
    while not (found := condition()):
        ended = [each.args for each in processes if each.poll() is not None]
        assert not ended, f"{ended} ended before {of}"
        assert time.monotonic() < deadline, of
        time.sleep(0.2)
    return found


class Process:
    """A command of ours, whose output is read from files."""

    def __init__(self, folder: Path, name: str, *words: object) -> None:
        self.out, self.err = folder / f"{name}.out", folder / f"{name}.err"
        settings = {key: value for key, value in os.environ.items() if not key.startswith("TRAJLAKE_")}
        settings["TRAJLAKE_ENGINE_PYTHON"] = str(vllm_python())
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = subprocess.Popen(
                [*TRAJLAKE, *map(str, words)], stdout=out, stderr=err, text=True, env=settings
            )

    def says(self, text: str) -> bool:
        return text in self.out.read_text()

    def wait_until_it_says(self, text: str) -> None:
        try:
            wait_for(lambda: self.says(text), f"{text!r}", self.process)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.out.read_text()[-2000:]} {self.err.read_text()[-4000:]}") from None

    def kill(self) -> None:
        """Kill the command, if it still runs."""
        with suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait(120)

    def kill_engine(self) -> None:
        """Kill the server that `trajlake serve` started; the command ends what is left of the engine, and itself."""
        (guard,) = psutil.Process(self.process.pid).children()
        (server,) = guard.children()
        server.kill()
        assert self.process.wait(120) != 0
        assert "vLLM has ended: it was killed" in self.err.read_text()


@contextmanager
def running(folder: Path, name: str, *words: object) -> Iterator[Process]:
    process = Process(folder, name, *words)
    try:
        yield process
    finally:
        process.kill()


def sampled_tokens(url: str) -> float:
    """How many tokens an engine has sampled since it started; 0 while it is away."""
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:
            text = response.read().decode()
    except OSError:
        return 0.0
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith("vllm:generation_tokens_total"))


def wait_for_tokens(url: str, collecting: subprocess.Popen[str], wanted: int = 200) -> None:
    """Until the engine has sampled so many more."""
    first = sampled_tokens(url)
    wait_for(lambda: sampled_tokens(url) >= first + wanted, f"{wanted} tokens", collecting)


def came_back(said: list[str], *processes: subprocess.Popen[str]) -> None:
    """Until the fleet has said that the engine has its weights again."""
    wait_for(lambda: any("came back, version 3 again" in line for line in said), "the engine's return", *processes)


def trajlake(*words: object) -> str:
    done = subprocess.run([*TRAJLAKE, *map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def differences(uri: str, folders: dict[int, Path]) -> tuple[dict[int, list[float]], int]:
    """Absolute differences between recorded and transformers' log-probabilities by version; episodes of several."""
    rows = lake.open(uri).sql(
        "SELECT episode_id, step_index, prefix_step_index, policy_version, version_spans, context_ids, action_ids, "
        "action_logprobs, provenance FROM tokens ORDER BY episode_id, step_index"
    )
    whole: dict[int, list[tuple[list[int], list[tuple[int, int, float]]]]] = defaultdict(list)
    for row in rows.iter_rows(named=True):
        assert row["provenance"] == "engine"
        if row["prefix_step_index"] is None:
            whole[row["episode_id"]].append(([], []))
        ids, sampled = whole[row["episode_id"]][-1]
        ids += row["context_ids"]
        spans = json.loads(row["version_spans"]) if row["version_spans"] else None
        spans = spans or [[row["policy_version"], 0, len(row["action_ids"]) - 1]]
        assert [at for _, first, last in spans for at in range(first, last + 1)] == list(range(len(row["action_ids"])))
        for version, first, last in spans:
            sampled += [(len(ids) + at, version, row["action_logprobs"][at]) for at in range(first, last + 1)]
        ids += row["action_ids"]
    models = {version: load_model(folder).eval() for version, folder in folders.items()}
    found: dict[int, list[float]] = defaultdict(list)
    for sequences in whole.values():
        for ids, sampled in sequences:
            ids_T = torch.tensor([ids])
            for version in {version for _, version, _ in sampled}:
                with torch.no_grad():
                    logprobs_TV = models[version](ids_T).logits[0].float().log_softmax(-1)
                found[version] += [
                    abs(value - float(logprobs_TV[at - 1, ids[at]])) for at, mine, value in sampled if mine == version
                ]
    mixed = sum(len({version for _, sampled in each for _, version, _ in sampled}) > 1 for each in whole.values())
    return found, mixed


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Version -> weights."""
    root = tmp_path_factory.mktemp("demo")
    warm = warm_policy(root)
    others = {version: near(warm, root / f"near{version}", version) for version in (2, 3, 4)}
    for version, folder in others.items():
        write_model(folder, root / f"w{version}", tied=True)
    return {1: warm} | {version: root / f"w{version}" for version in others}


@pytest.mark.slow
def test_collecting_while_weights_are_pushed_and_the_engine_dies(tmp_path: Path, folders: dict[int, Path]) -> None:
    uri = str(tmp_path / "lake")
    references = {
        version: score(load_policy(folder), random_sequences(load_policy(folder).vocabulary, ProbeConfig()))
        for version, folder in folders.items()
    }
    serve = ("serve", folders[1], "--port")
    with running(tmp_path, "serve", *serve, 0) as engine:
        engine.wait_until_it_says("serving")
        url = re.search(r"http://127\.0\.0\.1:\d+", engine.out.read_text())[0]  # type: ignore[index]
        port = url.rpartition(":")[2]
        trajlake("push", folders[1], "--engine", url, "--version", 1)
        collect = ("collect", "--env", "house", "--engine", url, "--model", folders[1], "--lake", uri, "--run", "house")
        sizes = ("--groups", GROUPS, "--group-size", SIBLINGS, "--parallel", 64, "--max-tokens", 4)
        with running(tmp_path, "collect", *collect, *sizes) as collecting:

            async def train() -> None:
                """What a trainer does: it pushes its weights now and then, and looks after the engine all the time."""
                said: list[str] = []
                fleet = Fleet([engine_at(url)])
                async with asyncio.TaskGroup() as group:
                    watching = group.create_task(fleet.watch(said.append))
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
                            await asyncio.to_thread(came_back, said, again.process, collecting.process)
                    watching.cancel()
                await fleet.engines[0].close()

            with ExitStack() as stack:
                asyncio.run(train())
                assert collecting.process.wait(_PATIENCE) == 0, collecting.err.read_text()[-4000:]
    check_lake(uri, folders)
    check_training(uri, folders[1], tmp_path / "run")


def check_lake(uri: str, folders: dict[int, Path]) -> None:
    lk = lake.open(uri)
    statuses = lk.sql("SELECT status FROM episodes")["status"].to_list()
    assert len(statuses) == EPISODES
    assert set(statuses) <= {"completed", "truncated"}
    found, mixed = differences(uri, folders)
    for version, values in sorted(found.items()):
        print(f"version {version}: {len(values)} tokens, |d| max {max(values):.2g}, mean {np.mean(values):.2g}")
    print(f"episodes of several versions: {mixed}")
    assert set(found) == {1, 2, 3, 4}
    assert max(max(values) for values in found.values()) <= TOLERANCE
    assert mixed


def check_training(uri: str, model: Path, out: Path) -> None:
    trajlake("credit", "gigpo", "--lake", uri)
    said = trajlake("train", "--lake", uri, "--model", model, "--loss", "ppo", "--out", out, "--lr", "1e-4")
    assert re.search(r"\b[1-9]\d* optimizer steps", said), said
    assert (out / "final" / "model.safetensors").is_file()
