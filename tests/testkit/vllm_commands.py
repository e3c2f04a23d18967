"""Our commands as processes next to a real vLLM, and what its tokens must agree with: transformers, by version."""

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import torch  # noqa: TID253 - a script that does nothing without it

import lake
from testkit.vllm_server import vllm_python
from trainer.policy.model_files import load_model

_TRAJLAKE = (sys.executable, "-c", "from lake.cli import main; main()")
TOLERANCE = 5e-5
"""Nats, in float32 on both sides; 1.4e-5 was the largest difference seen, at 12,511 tokens."""
PATIENCE = 1800.0
"""Seconds that a process is waited for."""


def wait_for(condition: Callable[[], Any], of: str, *processes: subprocess.Popen[str]) -> Any:
    """What a condition gives once it is true; fails if one of the processes ends before."""
    deadline = time.monotonic() + PATIENCE
    while not (value_met := condition()):
        ended = [each.args for each in processes if each.poll() is not None]
        assert not ended, f"{ended} ended before {of}"
        assert time.monotonic() < deadline, of
        time.sleep(0.2)
    return value_met


class Process:
    """A command of ours, whose output is read from files."""

    def __init__(self, folder: Path, name: str, *words: object) -> None:
        self.out, self.err = folder / f"{name}.out", folder / f"{name}.err"
        settings = {key: value for key, value in os.environ.items() if not key.startswith("TRAJLAKE_")}
        settings["TRAJLAKE_ENGINE_PYTHON"] = str(vllm_python())
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = subprocess.Popen(
                [*_TRAJLAKE, *map(str, words)], stdout=out, stderr=err, text=True, env=settings
            )

    def says(self, text: str) -> bool:
        return text in self.out.read_text()

    def wait_until_it_says(self, text: str) -> None:
        try:
            wait_for(lambda: self.says(text), f"{text!r}", self.process)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.out.read_text()[-2000:]} {self.err.read_text()[-4000:]}") from None

    def until_it_serves(self) -> str:
        """The URL of the engine, once it answers."""
        self.wait_until_it_says("serving")
        match = re.search(r"http://127\.0\.0\.1:\d+", self.out.read_text())
        assert match is not None
        return match[0]

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
        assert "it was killed" in self.err.read_text()


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


def wait_for_tokens(url: str, collecting: subprocess.Popen[str], expected: int = 200) -> None:
    """Until the engine has sampled so many more."""
    first = sampled_tokens(url)
    wait_for(lambda: sampled_tokens(url) >= first + expected, f"{expected} tokens", collecting)


def trajlake(*words: object) -> str:
    done = subprocess.run([*_TRAJLAKE, *map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def differences(uri: str, folders: dict[int, Path]) -> tuple[dict[int, list[float]], int]:
    """Absolute differences between recorded and transformers' log-probabilities by version; episodes of several."""
    rows = lake.open(uri).sql(
        "SELECT episode_id, step_index, prefix_step_index, policy_version, version_spans, context_ids, action_ids, "
        "action_logprobs, provenance FROM tokens ORDER BY episode_id, step_index"
    )
    sequences_by_version: dict[int, list[tuple[list[int], list[tuple[int, int, float]]]]] = defaultdict(list)
    for row in rows.iter_rows(named=True):
        assert row["provenance"] == "engine"
        if row["prefix_step_index"] is None:
            sequences_by_version[row["episode_id"]].append(([], []))
        ids, sampled = sequences_by_version[row["episode_id"]][-1]
        ids += row["context_ids"]
        spans = json.loads(row["version_spans"]) if row["version_spans"] else None
        spans = spans or [[row["policy_version"], 0, len(row["action_ids"]) - 1]]
        assert [at for _, first, last in spans for at in range(first, last + 1)] == list(range(len(row["action_ids"])))
        for version, first, last in spans:
            sampled += [(len(ids) + at, version, row["action_logprobs"][at]) for at in range(first, last + 1)]
        ids += row["action_ids"]
    models = {version: load_model(folder).eval() for version, folder in folders.items()}
    differences: dict[int, list[float]] = defaultdict(list)
    for sequences in sequences_by_version.values():
        for ids, sampled in sequences:
            ids_T = torch.tensor([ids])
            for version in {version for _, version, _ in sampled}:
                with torch.no_grad():
                    logprobs_TV = models[version](ids_T).logits[0].float().log_softmax(-1)
                differences[version] += [
                    abs(value - float(logprobs_TV[at - 1, ids[at]])) for at, mine, value in sampled if mine == version
                ]
    mixed = sum(
        len({version for _, sampled in each for _, version, _ in sampled}) > 1 for each in sequences_by_version.values()
    )
    return differences, mixed
