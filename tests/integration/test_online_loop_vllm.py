"""`trajlake loop` through a real vLLM on the CPU: three rounds with weight reloads, by three seeds.

In the second round of the first seed the engine is killed (kill -9) and started again. Every sampled token carries the
version of its round, under which transformers gives it the recorded log-probability. The final policies are as good as
those of the loop with the model in its process; declared beforehand: of 300 held-out attempts each, over three seeds,
Fisher's exact test does not tell them apart (two-sided, p >= 0.001), and tells both from the first weights (p < 0.001).
Four minutes; the engine's environment is made once per machine.
"""

from math import comb
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

import lake
from testkit.demo_models import warm_policy
from testkit.vllm_commands import (
    PATIENCE,
    TOLERANCE,
    Process,
    differences,
    running,
    trajlake,
    wait_for,
    wait_for_tokens,
)
from trainer.policy.model_files import load_model

SEEDS, ROUNDS, GROUPS, SIBLINGS, HELD_OUT = (0, 1, 2), 3, 8, 8, 100
LEVEL = 0.001
CONFIG = f"""
[loop]
rounds = {ROUNDS}
[loop.collect]
groups = {GROUPS}
group_size = {SIBLINGS}
[loop.collect.player]
env = "house"
sampling = {{ max_tokens = 4 }}
[loop.evaluation]
tasks = {HELD_OUT}
every = {ROUNDS}
env_args = {{ split = "held_out" }}
[trainer]
loss = {{ name = "ppo", entropy_coefficient = 0.02 }}
minibatches = 4
learning_rate = 3e-4
tokens = "engine"
threads = 1
"""


def fisher(successes: int, misses: int, trials: int) -> float:
    """Two-sided p of Fisher's exact test, for two groups of as many trials."""
    total = successes + misses
    weight = [
        comb(trials, hits) * comb(trials, total - hits)
        for hits in range(max(0, total - trials), min(total, trials) + 1)
    ]
    draws = comb(trials, successes) * comb(trials, misses)
    return sum(each for each in weight if each <= draws) / sum(weight)


def test_the_test_tells_what_differs_from_what_does_not() -> None:
    assert fisher(3, 0, 3) == pytest.approx(0.1)  # 2 of the 20 ways to choose 3 of 6
    assert fisher(150, 150, 300) == 1.0
    assert fisher(195, 165, 300) > LEVEL > fisher(200, 155, 300)


def words(file: Path, folder: Path, model: Path, seed: int) -> list[str]:
    options = ["--out", str(folder / f"run{seed}"), "--lake", str(folder / f"lake{seed}"), "--run", "house"]
    return ["loop", "--config", str(file), *options, "--set", f"trainer.model={model}", "--set", f"trainer.seed={seed}"]


def successes(uri: str) -> list[int]:
    """Of the held-out attempts, before and after."""
    rows = lake.open(uri).sql(
        "SELECT count(*) AS attempts, count(*) FILTER (env_return >= 1) AS good FROM episodes "
        "WHERE run_id = 'house-eval' GROUP BY collection_round ORDER BY collection_round"
    )
    assert rows["attempts"].to_list() == [HELD_OUT, HELD_OUT]
    return rows["good"].to_list()


def kill_in_second_round(loop: Process, serving: Process, url: str) -> None:
    """Kill the engine once the loop collects its second round."""
    wait_for(lambda: f"round 1/{ROUNDS}" in loop.err.read_text(), "the second round", loop.process)
    wait_for_tokens(url, loop.process)
    assert f"round 2/{ROUNDS}" not in loop.err.read_text()
    serving.kill_engine()


@pytest.mark.slow
def test_the_loop_through_an_engine_is_the_loop_in_process(tmp_path: Path) -> None:
    model, file = warm_policy(tmp_path), tmp_path / "loop.toml"
    file.write_text(CONFIG)
    first_folder, second_folder = tmp_path / "here", tmp_path / "there"
    with running(tmp_path, "serve", "serve", model, "--port", 0) as serving:
        for seed in SEEDS:
            trajlake(*words(file, first_folder, model, seed))
        url = serving.until_it_serves()
        engines = ("--set", f'loop.collect.player.engines=["{url}"]')
        port = url.rpartition(":")[2]
        with running(tmp_path, "loop", *words(file, second_folder, model, SEEDS[0]), *engines) as loop:
            kill_in_second_round(loop, serving, url)
            with running(tmp_path, "serve-again", "serve", model, "--port", port):
                assert loop.process.wait(PATIENCE) == 0, loop.err.read_text()[-4000:]
                for seed in SEEDS[1:]:
                    trajlake(*words(file, second_folder, model, seed), *engines)
    in_process = np.sum([successes(str(first_folder / f"lake{seed}")) for seed in SEEDS], axis=0)
    by_engine = np.sum([successes(str(second_folder / f"lake{seed}")) for seed in SEEDS], axis=0)
    trials = HELD_OUT * len(SEEDS)
    p = fisher(int(by_engine[1]), int(in_process[1]), trials)
    print(f"held-out successes of {trials}: in process {in_process}, through the engine {by_engine}; p = {p:.3g}")
    assert p >= LEVEL
    for first, last in (in_process, by_engine):
        assert last > first
        assert fisher(int(last), int(first), trials) < LEVEL
    for seed in SEEDS:
        check_tables(str(second_folder / f"lake{seed}"), model, second_folder / f"weights{seed}")


def weights_by_version(uri: str, model: Path, folder: Path) -> dict[int, Path]:
    """Folders of the weights that the checkpoints hold, by version; those that the run started from are version 0."""
    folders = {0: model}
    for version, uri_of in lake.open(uri).sql("SELECT policy_version, uri FROM checkpoints").iter_rows():
        policy = load_model(model)
        # A weight that is tied to another is there under one of its names.
        unknown = policy.load_state_dict(load_file(Path(uri_of, "weights.safetensors")), strict=False).unexpected_keys
        assert not unknown
        folders[version] = folder / f"v{version}"
        policy.save_pretrained(folders[version])
    return folders


def check_tables(uri: str, model: Path, folder: Path) -> None:
    """Whole rounds, each under its version, and log-probabilities that transformers gives, too."""
    lk = lake.open(uri)
    rows = lk.sql(
        "SELECT collection_round, tokens.policy_version, version_spans, count(DISTINCT episode_id) AS episodes "
        "FROM tokens JOIN episodes USING (episode_id) WHERE episodes.run_id = 'house' GROUP BY ALL ORDER BY 1"
    )
    assert rows.rows() == [(number, number, None, GROUPS * SIBLINGS) for number in range(ROUNDS)]
    pushes = lk.sql(
        "SELECT status, parameters::JSON->>'version' AS version FROM job_runs WHERE kind = 'push' ORDER BY 2"
    )
    assert pushes.rows() == [("succeeded", str(version)) for version in range(ROUNDS + 1)]
    wrong, mixed = differences(uri, weights_by_version(uri, model, folder))
    for version, values in sorted(wrong.items()):
        print(f"version {version}: {len(values)} tokens, |d| max {max(values):.2g}, mean {np.mean(values):.2g}")
    assert set(wrong) == set(range(ROUNDS + 1))
    assert max(max(values) for values in wrong.values()) <= TOLERANCE
    assert not mixed
