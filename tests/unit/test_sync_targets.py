"""Pushing weights: every engine gets them once, whole, and an engine that does not have them is not used."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import torch  # noqa: TID253 - a script that does nothing without it

from pipelines.collect.engines import EngineError, EngineGoneError
from testkit.model_engine import ModelEngine
from testkit.training import VOCABULARY, random_model
from trainer.online.demo import build_tokenizer
from trainer.policy.model import PackedPolicy, load_policy
from trainer.sync.folders import DiskSync
from trainer.sync.targets import (
    ParityError,
    ProbeConfig,
    Push,
    Reference,
    SyncTargets,
    Weights,
    draw_random_sequences,
    score_reference,
)


def model_folder(folder: Path, seed: int) -> Path:
    random_model(seed).save_pretrained(folder)
    build_tokenizer(["word"]).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Models of different weights."""
    return [model_folder(tmp_path_factory.mktemp("models") / f"m{seed}", seed) for seed in range(4)]


def reference(folder: Path) -> Reference:
    return score_reference(load_policy(folder), draw_random_sequences(VOCABULARY, ProbeConfig()))


def same_weights(policy: PackedPolicy, folder: Path) -> bool:
    expected = load_policy(folder).state()
    return all(torch.equal(tensor, expected[name]) for name, tensor in policy.state().items())


async def delivered(fleet: SyncTargets, folder: Path, version: int, *, probe: bool = True) -> Push:
    weights = Weights(version=version, folder=folder)
    return await fleet.deliver(weights, reference(folder) if probe else None)


def test_every_engine_gets_the_weights_and_agrees_with_the_trainer(models: list[Path]) -> None:
    engines = [ModelEngine(f"http://e{number}", models[0]) for number in range(3)]
    push = asyncio.run(delivered(SyncTargets(engines), models[1], 7))
    assert not push.failed
    assert [delivery.url for delivery in push.deliveries] == ["http://e0", "http://e1", "http://e2"]
    assert all(delivery.before is None and delivery.parity is not None for delivery in push.deliveries)
    assert all(delivery.parity is not None and delivery.parity.largest == 0 for delivery in push.deliveries)
    assert all(same_weights(engine.policy, models[1]) for engine in engines)
    metrics = push.metrics()
    assert metrics.pop("sync/seconds") >= 0
    assert metrics == {"sync/failed": 0, "sync/logprob_diff_max": 0, "sync/logprob_diff_mean": 0}


def test_weights_of_another_model_are_refused_before_the_engine_reads_them(tmp_path: Path, models: list[Path]) -> None:
    engine = ModelEngine("http://e", models[0])
    random_model(1, num_hidden_layers=1).save_pretrained(tmp_path)
    failed = asyncio.run(delivered(SyncTargets([engine]), tmp_path, 1, probe=False)).failed
    assert "num_hidden_layers 1 (it serves 2)" in str(failed[0].error)
    assert same_weights(engine.policy, models[0])


def test_engines_load_at_the_same_time(models: list[Path]) -> None:
    """Each waits in its loading until the others are there, too."""
    engines = [ModelEngine(f"http://e{number}", models[0]) for number in range(3)]

    async def run() -> Push:
        for engine in engines:
            engine.gate.clear()
        pushing = asyncio.create_task(delivered(SyncTargets(engines), models[1], 1, probe=False))
        async with asyncio.timeout(60):
            while not all(engine.loaded for engine in engines):
                await asyncio.sleep(0)
            for engine in engines:
                engine.gate.set()
            return await pushing

    assert not asyncio.run(run()).failed


def test_an_engine_that_fails_is_told_and_the_others_go_on(models: list[Path]) -> None:
    engines = [ModelEngine(f"http://e{number}", models[0]) for number in range(3)]
    engines[0].error = EngineError("http://e0: out of memory")
    engines[2].is_gone = True
    fleet = SyncTargets(engines)

    async def run() -> None:
        push = await delivered(fleet, models[1], 2)
        assert [(failed.url, failed.error) for failed in push.failed] == [
            ("http://e0", "http://e0: out of memory"),
            ("http://e2", "http://e2 cannot be reached"),
        ]
        assert await engines[1].version() == 2
        # Still not to be used, and so for as long as it cannot take the weights.
        with pytest.raises(EngineError, match="out of memory"):
            await fleet.refresh(engines[0])
        engines[0].error = None
        assert await fleet.refresh(engines[0])
        assert same_weights(engines[0].policy, models[1])
        assert not await fleet.refresh(engines[0])

    asyncio.run(run())


def test_an_engine_that_was_restarted_gets_the_current_weights_once(models: list[Path]) -> None:
    engine = ModelEngine("http://e", models[0])
    fleet = SyncTargets([engine])

    async def run() -> None:
        assert not await fleet.refresh(engine), "nothing was pushed yet"
        await delivered(fleet, models[1], 1)
        await delivered(fleet, models[2], 2)
        engine.is_gone = True
        with pytest.raises(EngineGoneError):
            await fleet.refresh(engine)
        engine.restart()
        assert same_weights(engine.policy, models[0])
        assert [await fleet.refresh(engine) for _ in range(2)] == [True, False]
        assert same_weights(engine.policy, models[2])
        assert [version for _, version in engine.loaded] == [1, 2, 2]

    asyncio.run(run())


def test_an_engine_that_comes_back_in_the_middle_of_a_push_ends_with_the_newest(models: list[Path]) -> None:
    """It is being given version 1 while version 2 is pushed."""
    engine = ModelEngine("http://e", models[0])
    fleet = SyncTargets([engine])

    async def run() -> None:
        await delivered(fleet, models[1], 1, probe=False)
        engine.restart()
        engine.gate.clear()
        refreshing = asyncio.create_task(fleet.refresh(engine))
        while len(engine.loaded) < 2:
            await asyncio.sleep(0)
        pushing = asyncio.create_task(delivered(fleet, models[2], 2, probe=False))
        await asyncio.sleep(0)
        engine.gate.set()
        await asyncio.gather(refreshing, pushing)
        assert await engine.version() == 2
        assert same_weights(engine.policy, models[2])

    asyncio.run(run())


@pytest.mark.parametrize(("dtype", "error", "is_refused"), [
    ("float32", 5e-5, False),
    ("float32", 2e-4, True),
    ("bfloat16", 0.05, False),
    ("bfloat16", 0.2, True),
    (None, 0.05, False),
    ("float32", float("nan"), True),
])  # fmt: skip
def test_an_engine_that_computes_something_else_is_refused(
    models: list[Path], dtype: str | None, error: float, is_refused: bool
) -> None:
    engine = ModelEngine("http://e", models[0], dtype=dtype)
    engine.error_in_logprobs = error
    fleet = SyncTargets([engine])

    async def run() -> None:
        push = await delivered(fleet, models[1], 1)
        assert bool(push.failed) is is_refused
        if is_refused:
            assert push.deliveries[0].parity is not None
            with pytest.raises(ParityError, match=r"differ by .* nats at most"):
                await fleet.refresh(engine)
        else:
            assert not await fleet.refresh(engine)

    asyncio.run(run())


def test_an_engine_with_other_weights_than_it_says_is_found(models: list[Path]) -> None:
    async def run() -> Push:
        fleet = SyncTargets([ModelEngine("http://e", models[0])])
        return await fleet.deliver(Weights(version=1, folder=models[1]), reference(models[2]))

    (failed,) = asyncio.run(run()).failed
    assert failed.parity is not None
    assert failed.parity.largest > 0.1


def test_a_limit_can_be_set_and_a_difference_only_told(models: list[Path]) -> None:
    engine = ModelEngine("http://e", models[0])
    engine.error_in_logprobs = 0.01
    assert asyncio.run(delivered(SyncTargets([engine], ProbeConfig(limit=0.005)), models[1], 1)).failed
    assert not asyncio.run(delivered(SyncTargets([engine], ProbeConfig(limit=0.02)), models[1], 1)).failed
    push = asyncio.run(delivered(SyncTargets([engine], ProbeConfig(refuse=False)), models[1], 1))
    assert not push.failed
    assert push.deliveries[0].parity is not None
    assert not push.deliveries[0].parity.is_met


def test_a_watched_engine_gets_its_weights_again(models: list[Path]) -> None:
    engine, lines = ModelEngine("http://e", models[0]), list[str]()
    fleet = SyncTargets([engine])

    async def run() -> None:
        await delivered(fleet, models[1], 3, probe=False)
        watching = asyncio.create_task(fleet.watch(lines.append, seconds=0))
        engine.is_gone = True
        for _ in range(5):
            await asyncio.sleep(0)
        assert not lines
        engine.restart()
        async with asyncio.timeout(60):
            while not lines:
                await asyncio.sleep(0)
        assert await engine.version() == 3
        # What someone else pushes since is left alone.
        await engine.load_weights(models[2], 4)
        assert not await fleet.refresh(engine)
        assert await engine.version() == 4
        watching.cancel()

    asyncio.run(run())
    assert lines == ["http://e: came back, version 3 again"]


def pushed_through(folder: Path, engine: ModelEngine, act: Callable[[DiskSync, PackedPolicy], Awaitable[None]]) -> None:
    policy = PackedPolicy(random_model(3))

    def write(folder: Path) -> None:
        policy.model.save_pretrained(folder)

    async def run() -> None:
        await act(DiskSync(SyncTargets([engine]), write, folder), policy)

    asyncio.run(run())


def test_the_newest_two_folders_stay(tmp_path: Path, models: list[Path]) -> None:
    engine = ModelEngine("http://e", models[0])
    (tmp_path / "pushed" / ".v9.partial").mkdir(parents=True)

    async def act(sync: DiskSync, policy: PackedPolicy) -> None:
        assert await sync.wait() is None
        for version in (10, 9, 11):
            await sync.push(version)
        push = await sync.wait()
        assert push is not None
        assert not push.failed
        assert push.version == 11

    pushed_through(tmp_path / "pushed", engine, act)
    assert {path.name for path in (tmp_path / "pushed").iterdir()} == {"v9", "v11"}
    assert [version for _, version in engine.loaded] == [10, 9, 11]


def test_the_trainer_goes_on_once_its_weights_are_written(tmp_path: Path, models: list[Path]) -> None:
    """What it changes afterwards does not reach the engine, and the next push waits for this one."""
    engine = ModelEngine("http://e", models[0])

    async def act(sync: DiskSync, policy: PackedPolicy) -> None:
        before = {name: tensor.clone() for name, tensor in policy.state().items()}
        engine.gate.clear()
        await sync.push(1)
        for tensor in policy.state().values():
            tensor.add_(1.0)
        following = asyncio.create_task(sync.push(2))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not (tmp_path / "v2").exists()
        engine.gate.set()
        async with asyncio.timeout(60):
            while await engine.version() != 1:
                await asyncio.sleep(0)
            assert all(torch.equal(tensor, before[name]) for name, tensor in engine.policy.state().items())
            await following
            await sync.wait()
        assert all(torch.equal(tensor, policy.state()[name]) for name, tensor in engine.policy.state().items())

    pushed_through(tmp_path, engine, act)
