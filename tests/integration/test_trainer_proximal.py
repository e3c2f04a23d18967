"""Decoupled PPO's proximal policy, the weights some optimizer steps ago: training, resumption, ranks and kills."""

import copy
import os
import shutil
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch  # noqa: TID253 - a script that does nothing without it

from lake import Lake
from lake.errors import ContractError
from testkit import rank_tasks
from testkit.commands import Command
from testkit.examples import mostly_slow
from testkit.lakes import add_credit
from testkit.offline_runs import configured, interrupted
from testkit.ranks import on_ranks
from testkit.sampled_lake import play, recorded, save_model
from testkit.training import config, random_backend, token_episodes, token_lake
from trainer.backends.base import FrozenPolicy, SingleDevice, loss_rows
from trainer.backends.ranks import ALONE
from trainer.config import OptimizerConfig
from trainer.data.stream import Stream
from trainer.policy.model import load_policy
from trainer.runs.checkpoint import PROXIMAL
from trainer.runs.factories import learning_rate
from trainer.runs.loop import StepReport, run_steps
from trainer.runs.offline import resume, train

LIMIT = 1e30
"""Weights that nothing limits."""


def decoupled(refresh: int | None, **correction: Any) -> dict[str, Any]:
    return {"correction": {"method": "token_truncate", "decoupled": True, "proximal_every": refresh, **correction}}


FIELDS: dict[str, Any] = {"loss": "ppo", "epochs": 2, "episodes_per_step": 2, "token_budget": 40}
FOUR = FIELDS | {"options": decoupled(4)}


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    lk = token_lake(tmp_path_factory.mktemp("lake") / "lake", token_episodes(4, 4))
    add_credit(lk)
    return lk.uri


def trained(uri: str, peak: float = 1e-2, **fields: Any) -> tuple[SingleDevice, list[StepReport]]:
    settings = config(**(FIELDS | fields))
    snapshot, plan = rank_tasks.planned(uri, settings)
    backend = random_backend()
    return backend, list(run_steps(backend, snapshot, plan, settings, peak=peak))


def slowly_trained(uri: str, refresh: int, peak: float = 1e-2, **fields: Any) -> SingleDevice:
    """The same with a whole second model instead of a copy of weights that takes turns."""
    settings = config(**(FIELDS | fields))
    snapshot, plan = rank_tasks.planned(uri, settings)
    loss, backend, earlier = settings.loss, random_backend(), random_backend()
    with Stream(snapshot, plan, loss.needs, settings) as stream:
        for step, batches in stream.steps():
            if step.index % refresh == 0:
                earlier = copy.deepcopy(backend)
            for batch in batches:
                proximal_N = FrozenPolicy(earlier.policy).logprobs(batch)
                lp_N, entropy_N = backend.policy.logprobs(batch, entropy=True)
                rows = replace(loss_rows(batch, loss, lp_N, entropy_N), proximal_logprobs_N=proximal_N)
                loss.compute(rows).total.backward()  # type: ignore[no-untyped-call]
            backend.optim_step(learning_rate(step.index, len(plan.steps), peak, settings.schedule))
    return backend


@pytest.mark.parametrize("refresh", mostly_slow([1, 3, 100], 3))
def test_weights_are_those_of_training_beside_a_second_model(uri: str, refresh: int) -> None:
    backend, reports = trained(uri, options=decoupled(refresh))
    assert len(reports) > 4
    assert backend.digest() == slowly_trained(uri, refresh, options=decoupled(refresh)).digest()
    assert backend.proximal is None, "freed at the end"


def test_the_ratio_is_one_where_a_period_begins_and_the_clip_acts_inside(uri: str) -> None:
    _, reports = trained(uri, options=decoupled(1))
    for report in reports:
        assert report.metrics["log_ratio_abs_proximal"] == 0
        assert report.metrics["clipped_high"] == report.metrics["clipped_low"] == 0
    _, reports = trained(uri, options=decoupled(4))
    moved = [report.metrics["log_ratio_abs_proximal"] for report in reports]
    clipped = [report.metrics["clipped_high"] + report.metrics["clipped_low"] for report in reports]
    for number, (distance, share) in enumerate(zip(moved, clipped, strict=True)):
        assert (distance > 1e-3) == (number % 4 != 0), number
        assert number % 4 != 0 or share == 0
    assert max(clipped) > 0.05


def test_an_epoch_is_a_period_where_minibatches_cut_it(uri: str) -> None:
    cut = {"minibatches": 3, "epochs": 2}
    digest = trained(uri, options=decoupled(None), **cut)[0].digest()
    assert digest == trained(uri, options=decoupled(3), **cut)[0].digest()
    assert digest != trained(uri, options=decoupled(4), **cut)[0].digest()
    assert trained(uri, options=decoupled(None))[0].digest() == trained(uri, options=decoupled(4))[0].digest()


def test_a_normalised_correction_is_taken_to_the_proximal_policy(uri: str) -> None:
    """Where all weights are equal after normalisation nothing remains of them: the loss is PPO against the copy."""
    for refresh in (1, 4):
        _, reports = trained(uri, options=decoupled(refresh, normalise=True, high=1e-6))
        for report in reports:
            assert report.metrics["correction_weight"] == pytest.approx(1.0)


# ---------------------------------------------------------------- data of the policy itself


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Lake, Path]:
    """Games of a model, with credit, and the model."""
    folder = tmp_path_factory.mktemp("world")
    save_model(folder / "model")
    lk = recorded(folder / "lake", play(folder / "model", tasks=4, siblings=6))
    add_credit(lk)
    return lk, folder / "model"


def run_fields(**fields: Any) -> dict[str, Any]:
    return {"loss": "ppo", "episodes_per_step": 4, "learning_rate": 1e-3, "options": decoupled(4)} | fields


def test_it_is_ppo_where_the_behaviour_policy_is_the_proximal_one(world: tuple[Lake, Path]) -> None:
    """The games are the model's own, and one period lasts the whole run: rho is 1, and r is PPO's ratio."""
    lk, model = world
    weights: dict[str, dict[str, torch.Tensor]] = {}
    losses: dict[str, list[float]] = {}
    for name, options in {"ppo": {}, "decoupled": decoupled(1000, high=LIMIT), "other": decoupled(1)}.items():
        settings = configured(model, **run_fields(options=options))
        snapshot, plan = rank_tasks.planned(lk.uri, settings)
        backend = SingleDevice(load_policy(model), OptimizerConfig())
        losses[name] = [step.metrics["loss"] for step in run_steps(backend, snapshot, plan, settings, peak=1e-3)]
        weights[name] = backend.get_weights()
    assert len(losses["ppo"]) > 8
    for name, tensor in weights["ppo"].items():
        torch.testing.assert_close(weights["decoupled"][name], tensor, atol=1e-5, rtol=0)
    assert losses["decoupled"] == pytest.approx(losses["ppo"], abs=1e-5)
    assert losses["other"] != pytest.approx(losses["ppo"], abs=1e-4)


@pytest.fixture(scope="module")
def straight(world: tuple[Lake, Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    lk, model = world
    return train(lk, configured(model, **run_fields()), tmp_path_factory.mktemp("straight") / "out", run_id="straight")


@pytest.mark.parametrize("stops", [[6, 2, 3], *(pytest.param([stop], marks=pytest.mark.slow) for stop in (3, 4, 5, 7))])
@pytest.mark.parametrize("checkpoint_every", mostly_slow([1, 3], 3))
def test_an_interrupted_run_ends_with_the_same_weights(
    world: tuple[Lake, Path], straight: Any, tmp_path: Path, stops: list[int], checkpoint_every: int
) -> None:
    """Whether a checkpoint falls on the beginning of a period or into it."""
    lk, model = world
    settings = configured(model, **run_fields(checkpoint_every=checkpoint_every))
    for after in stops:
        interrupted(lk, settings, tmp_path / "out", after)
    assert resume(lk, tmp_path / "out").weights_sha256 == straight.weights_sha256


def test_a_checkpoint_holds_the_copy_inside_a_period_alone(
    world: tuple[Lake, Path], straight: Any, tmp_path: Path
) -> None:
    lk, model = world
    out = tmp_path / "out"
    train(lk, configured(model, **run_fields(checkpoint_every=1)), out, run_id="each")
    folders = {int(path.name.split("-")[1]): path for path in (out / "checkpoints").iterdir()}
    last = max(folders)
    assert last == straight.optimizer_steps > 8
    for done, folder in folders.items():
        assert (folder / PROXIMAL).is_file() == (done % 4 != 0 and done != last), done
    damaged = tmp_path / "damaged"
    shutil.copytree(folders[2], damaged)
    content = bytearray((damaged / PROXIMAL).read_bytes())
    content[-5] ^= 1
    (damaged / PROXIMAL).write_bytes(content)
    refusal = rank_tasks.refused(ALONE, str(damaged), {})
    assert refusal is not None
    assert f"{PROXIMAL} is damaged" in refusal


def test_adapters_alone_are_copied(world: tuple[Lake, Path], tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="needs trajlake[lora]")
    lk, model = world
    fields = run_fields(lora={"rank": 2}, learning_rate=3e-2, checkpoint_every=2, epochs=1)
    undisturbed = train(lk, configured(model, **fields), tmp_path / "whole", run_id="lora")
    interrupted(lk, configured(model, **fields), tmp_path / "out", 3)
    assert resume(lk, tmp_path / "out").weights_sha256 == undisturbed.weights_sha256
    from safetensors.torch import load_file

    (folder,) = (tmp_path / "out" / "checkpoints").glob("step-00000002-*0")
    assert all(".lora_" in name for name in load_file(folder / PROXIMAL))


@pytest.mark.slow
def test_a_run_killed_inside_a_period_ends_with_the_same_weights(world: tuple[Lake, Path], tmp_path: Path) -> None:
    lk, model = world
    settings = tmp_path / "x.toml"
    settings.write_text(
        f"""
        [trainer]
        model = "{model}"
        episodes_per_step = 4
        epochs = 8
        learning_rate = 1e-3
        checkpoint_every = 3
        [trainer.loss]
        name = "ppo"
        [trainer.loss.correction]
        method = "token_truncate"
        decoupled = true
        """
    )
    undisturbed = train(lk, configured(model, **run_fields(epochs=8)), tmp_path / "whole", run_id="whole")
    out = tmp_path / "out"
    options = ["train", "--lake", lk.uri, "--config", str(settings), "--out", str(out)]
    process = Command(options, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not list(out.glob("checkpoints/step-00000006-*")):
        assert process.poll() is None
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    resumed = resume(lk, out)
    assert resumed.weights_sha256 == undisturbed.weights_sha256


# ---------------------------------------------------------------- ranks


def test_ranks_keep_their_shards_of_the_copy_and_miss_a_lost_one(uri: str, tmp_path: Path) -> None:
    expected = rank_tasks.trajectory(ALONE, uri, "ppo", without_loss(FOUR), {})
    on_two = on_ranks(2, rank_tasks.trajectory, uri, "ppo", without_loss(FOUR), {})[0]
    for name, value in expected["weights"].items():
        np.testing.assert_allclose(on_two["weights"][name], value, atol=1e-5, rtol=0, err_msg=name)
    for metric, expected_metric in zip(on_two["metrics"], expected["metrics"], strict=True):
        distance = expected_metric["log_ratio_abs_proximal"]
        assert metric["log_ratio_abs_proximal"] == pytest.approx(distance, rel=1e-3, abs=1e-6)
    folder = str(tmp_path / "c")
    on_ranks(2, rank_tasks.saved, uri, folder, FOUR, {})
    assert {path.name for path in (tmp_path / "c").iterdir()} >= {"weights", "optimizer", "proximal", "state.json"}
    resumed = on_ranks(2, rank_tasks.resumed, uri, folder, FOUR, {})[0][1]
    alone = rank_tasks.resumed(ALONE, uri, folder, FOUR, {})[1]
    for name, value in on_two["weights"].items():
        assert np.array_equal(resumed[name], value), f"{name}: bit for bit on as many ranks"
        np.testing.assert_allclose(alone[name], value, atol=1e-5, rtol=0, err_msg=name)
    sorted((tmp_path / "c" / "proximal").iterdir())[0].unlink()
    complaint = rank_tasks.refused(ALONE, folder, {})
    assert complaint is not None
    assert f"checkpoint {folder}: proximal/shard" in complaint
    assert "is damaged" in complaint


def without_loss(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name != "loss"}


@pytest.mark.slow
def test_adapters_on_ranks_too(uri: str, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="needs trajlake[lora]")
    policy = {"lora": True}
    folder = str(tmp_path / "c")
    weights = on_ranks(2, rank_tasks.trajectory, uri, "ppo", without_loss(FOUR), policy)[0]["weights"]
    on_ranks(2, rank_tasks.saved, uri, folder, FOUR, policy)
    resumed = on_ranks(2, rank_tasks.resumed, uri, folder, FOUR, policy)[0][1]
    for name, value in weights.items():
        assert np.array_equal(resumed[name], value), name


def test_a_run_from_the_middle_of_a_period_needs_the_copy(uri: str) -> None:
    settings = config(**FOUR)
    snapshot, plan = rank_tasks.planned(uri, settings)
    steps = run_steps(random_backend(), snapshot, plan, settings, peak=1e-3, first=3)
    with pytest.raises(ContractError, match="no proximal policy"):
        next(steps)
