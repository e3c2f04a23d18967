"""Pushing by NCCL, as far as it goes without GPUs: what vLLM's servers are asked, in which order, and when it fails.

vLLM is not installed here: a stand-in for its factory does a round as its trainer engine of 0.32 does, without tensors.
`tests/integration/test_sync_nccl_vllm.py` runs vLLM's own.
"""

import asyncio
import gc
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from lake.errors import UsageError
from pipelines.collect.engines import Engine, EngineError
from testkit.training import random_model
from testkit.weight_transfer import WeightTransferServer, weight_transfer_server
from trainer.config import LoRAConfig
from trainer.policy.model import PackedPolicy, add_adapters
from trainer.sync.nccl import NcclSync
from trainer.sync.targets import SyncTargets

ROUND = ["/pause?mode=keep", "/start_weight_update", "/update_weights", "/finish_weight_update"]
ROUND += ["/reset_prefix_cache", "/resume"]


class StandIn:
    """A round of vLLM's NCCL trainer engine, and its factory: the calls, and no broadcast."""

    made: list["StandIn"]

    def __init__(self, init_info: Any, *, client: Any, source: Any) -> None:
        self.init_info, self.client, self.source = init_info, client, source
        request = {"master_address": init_info.master_address, "master_port": init_info.master_port, "rank_offset": 1}
        client.init_weight_transfer_engine(request | {"world_size": init_info.world_size, "packed": init_info.packed})
        StandIn.made.append(self)

    @classmethod
    def trainer_init(cls, init_info: Any, *, client: Any, source: Any) -> "StandIn":
        return cls(init_info, client=client, source=source)

    def send_weights(self) -> None:
        names = [name for name, _ in self.source.named_parameters()]
        self.client.start_weight_update()
        self.client.update_weights({"names": names})
        self.client.finish_weight_update()


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[WeightTransferServer]]:
    """Two, of two workers and of one; and the stand-in for vLLM."""
    StandIn.made = []
    package, nccl = ModuleType("vllm.distributed.weight_transfer"), ModuleType("nccl_engine")
    package.WeightTransferTrainerFactory = StandIn  # type: ignore[attr-defined]
    package.ModuleSource = lambda module: module  # type: ignore[attr-defined]
    nccl.NCCLTrainerInitInfo = SimpleNamespace  # type: ignore[attr-defined]
    for name, module in {
        "vllm": ModuleType("vllm"),
        "vllm.distributed": ModuleType("d"),
        package.__name__: package,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, f"{package.__name__}.nccl_engine", nccl)
    with ExitStack() as stack:
        yield [stack.enter_context(weight_transfer_server(workers)) for workers in (2, 1)]


class Silent:
    """An engine that a push asks for nothing but its version."""

    def __init__(self, server: WeightTransferServer) -> None:
        self.url = server.url
        self.number: int | None = None

    async def version(self) -> int | None:
        return self.number


def sync_to(servers: list[WeightTransferServer]) -> tuple[NcclSync, SyncTargets]:
    engines: list[Any] = [Silent(server) for server in servers]
    fleet = SyncTargets(engines)
    return NcclSync(fleet, PackedPolicy(random_model()), "127.0.0.1"), fleet


def test_servers_join_one_group_and_take_each_round_together(servers: list[WeightTransferServer]) -> None:
    sync, _ = sync_to(servers)

    async def run() -> None:
        for version in (4, 5):
            await sync.push(version)
            push = await sync.wait()
            assert push is not None
            assert (push.version, push.failed) == (version, ())

    asyncio.run(run())
    assert [server.paths for server in servers] == [["/init_weight_transfer_engine", *ROUND, *ROUND]] * 2
    joined = [server.asked[0][1]["init_info"] for server in servers]
    # The trainer is rank 0, the workers of the first server 1 and 2, that of the second 3.
    assert [(request["rank_offset"], request["world_size"]) for request in joined] == [(1, 4), (3, 4)]
    for server in servers:
        bodies = [body for path, body in server.asked if path == "/finish_weight_update"]
        assert bodies == [{"weight_version": "4"}, {"weight_version": "5"}]
    (trainer,) = StandIn.made
    assert trainer.init_info.rank == 0


def test_a_round_that_breaks_off_leaves_the_engines_paused_and_unused(servers: list[WeightTransferServer]) -> None:
    sync, fleet = sync_to(servers)
    servers[1].fails_at = "/update_weights"

    async def run() -> None:
        await sync.push(4)
        push = await sync.wait()
        assert push is not None
        assert len(push.failed) == 2
        assert "out of memory" in str(push.failed[0].error)
        for engine in fleet.engines:
            with pytest.raises(EngineError, match="with the next push"):
                await fleet.refresh(engine)

    asyncio.run(run())
    assert all("/resume" not in server.paths for server in servers)
    servers[1].fails_at = None
    asyncio.run(sync.push(5))
    # The group was lost with the round.
    assert len(StandIn.made) == 2
    assert all(server.paths[-7:] == ["/init_weight_transfer_engine", *ROUND] for server in servers)


def test_weights_are_all_sent_when_a_push_returns_also_where_no_engine_answers(
    servers: list[WeightTransferServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer changes its weights as soon as a push returns."""

    async def fail(_: Silent) -> int | None:
        raise EngineError("gone")

    send = StandIn.send_weights

    def slowly(trainer: StandIn) -> None:
        time.sleep(0.3)
        send(trainer)

    monkeypatch.setattr(Silent, "version", fail)
    monkeypatch.setattr(StandIn, "send_weights", slowly)
    sync, _ = sync_to(servers)

    async def run() -> list[list[str]]:
        await sync.push(4)
        push = await sync.wait()
        assert push is not None
        assert len(push.failed) == 2
        return [list(server.paths) for server in servers]

    assert asyncio.run(run()) == [["/init_weight_transfer_engine", *ROUND]] * 2


def test_a_transfer_that_breaks_off_unseen_is_no_forgotten_exception(
    servers: list[WeightTransferServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(_: Silent) -> int | None:
        raise EngineError("gone")

    forgotten: list[dict[str, Any]] = []
    monkeypatch.setattr(Silent, "version", fail)
    servers[0].fails_at = "/update_weights"
    sync, _ = sync_to(servers)

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: forgotten.append(context))
        await sync.push(4)
        gc.collect()

    asyncio.run(run())
    gc.collect()
    assert forgotten == []


def test_an_engine_that_was_restarted_is_not_used_before_the_next_push(servers: list[WeightTransferServer]) -> None:
    sync, fleet = sync_to(servers)

    async def refreshed(engine: Engine) -> None:
        await fleet.refresh(engine)

    async def run() -> None:
        await sync.push(4)
        engine: Any = fleet.engines[0]
        engine.number = 4
        await refreshed(engine)
        engine.number = None
        with pytest.raises(EngineError, match="does not have version 4"):
            await refreshed(engine)

    asyncio.run(run())


def test_a_policy_with_adapters_is_refused() -> None:
    policy = PackedPolicy(random_model())
    add_adapters(policy.model, LoRAConfig(rank=2), seed=0)
    with pytest.raises(UsageError, match="through a folder"):
        NcclSync(SyncTargets([]), policy, "127.0.0.1")


def test_without_vllm_it_says_what_to_install() -> None:
    with pytest.raises(UsageError, match=r'pip install "trajlake\[vllm\]"'):
        NcclSync(SyncTargets([]), PackedPolicy(random_model()), "127.0.0.1")
