"""Sending weights from GPU to GPU, as far as it goes without one: what vLLM's servers are asked, and when it fails.

vLLM is not installed here: a stand-in for its factory does a round as its trainer engine of 0.32 does, without tensors.
`tests/integration/test_sync_transfer_vllm.py` runs vLLM's own.
"""

import asyncio
import base64
import gc
import pickle
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, Literal

import pytest

from lake.errors import UsageError
from pipelines.collect.engines import Engine, EngineError
from testkit.training import random_model
from testkit.weight_transfer import TrainerSide, WeightTransferServer, stand_in, weight_transfer_server
from trainer.config import LoRAConfig
from trainer.policy.model import PackedPolicy, add_adapters
from trainer.sync.targets import Push, SyncTargets
from trainer.sync.transfer import WeightTransfer

ROUND = ["/pause?mode=keep", "/start_weight_update", "/update_weights", "/finish_weight_update"]
ROUND += ["/reset_prefix_cache", "/resume"]


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[WeightTransferServer]]:
    """Two, of two workers and of one; and the stand-in for vLLM."""
    stand_in(monkeypatch)
    with ExitStack() as stack:
        yield [stack.enter_context(weight_transfer_server(workers)) for workers in (2, 1)]


class Silent:
    """An engine that a push asks for nothing but its version."""

    def __init__(self, server: WeightTransferServer) -> None:
        self.url = server.url
        self.number: int | None = None

    async def version(self) -> int | None:
        return self.number


def transfer_to(
    servers: list[WeightTransferServer], backend: Literal["nccl", "ipc"] = "nccl"
) -> tuple[WeightTransfer, SyncTargets]:
    engines: list[Any] = [Silent(server) for server in servers]
    urls = [server.url for server in servers]
    return WeightTransfer(urls, PackedPolicy(random_model()), backend), SyncTargets(engines)


async def push(transfer: WeightTransfer, fleet: SyncTargets, *versions: int) -> list[Push]:
    return [await transfer.push(fleet, version) for version in versions]


def test_servers_join_one_group_and_take_each_round_together(servers: list[WeightTransferServer]) -> None:
    pushes = asyncio.run(push(*transfer_to(servers), 4, 5))
    assert [(each.version, each.failed) for each in pushes] == [(4, ()), (5, ())]
    assert [server.paths for server in servers] == [["/init_weight_transfer_engine", *ROUND, *ROUND]] * 2
    joined = [server.asked[0][1]["init_info"] for server in servers]
    # The trainer is rank 0, the workers of the first server 1 and 2, that of the second 3.
    assert [(request["rank_offset"], request["world_size"]) for request in joined] == [(1, 4), (3, 4)]
    assert {request["master_address"] for request in joined} == {"127.0.0.1"}
    for server in servers:
        bodies = [body for path, body in server.asked if path == "/finish_weight_update"]
        assert bodies == [{"weight_version": "4"}, {"weight_version": "5"}]
    (trainer,) = TrainerSide.made
    assert trainer.init_info.rank == 0


def test_handles_of_memory_are_sent_as_a_pickle_to_servers_that_may_have_restarted(
    servers: list[WeightTransferServer],
) -> None:
    asyncio.run(push(*transfer_to(servers, "ipc"), 4, 5))
    assert [server.paths for server in servers] == [["/init_weight_transfer_engine", *ROUND] * 2] * 2
    bodies = dict(servers[0].asked)
    assert bodies["/init_weight_transfer_engine"] == {"init_info": {"packed": True}}
    update = bodies["/update_weights"]["update_info"]
    assert pickle.loads(base64.b64decode(update["ipc_handles_pickled"])) == {"GPU-0": (b"address", 4)}
    assert "ipc_handles" not in update


def test_a_round_that_breaks_off_leaves_the_engines_paused_and_unused(servers: list[WeightTransferServer]) -> None:
    transfer, fleet = transfer_to(servers)
    servers[1].fails_at = "/update_weights"

    async def run() -> None:
        outcome = await transfer.push(fleet, 4)
        assert len(outcome.failed) == 2
        assert "out of memory" in str(outcome.failed[0].error)
        for engine in fleet.engines:
            with pytest.raises(EngineError, match="with the next push"):
                await fleet.refresh(engine)

    asyncio.run(run())
    assert all("/resume" not in server.paths for server in servers)
    servers[1].fails_at = None
    asyncio.run(transfer.push(fleet, 5))
    # The group was lost with the round.
    assert len(TrainerSide.made) == 2
    assert all(server.paths[-7:] == ["/init_weight_transfer_engine", *ROUND] for server in servers)


def test_weights_are_all_sent_when_a_push_returns_also_where_no_engine_answers(
    servers: list[WeightTransferServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer changes its weights as soon as a push returns."""

    async def fail(_: Silent) -> int | None:
        raise EngineError("gone")

    send = TrainerSide.send_weights

    def slowly(trainer: TrainerSide) -> None:
        time.sleep(0.3)
        send(trainer)

    monkeypatch.setattr(Silent, "version", fail)
    monkeypatch.setattr(TrainerSide, "send_weights", slowly)
    transfer, fleet = transfer_to(servers)

    async def run() -> list[list[str]]:
        outcome = await transfer.push(fleet, 4)
        assert len(outcome.failed) == 2
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
    transfer, fleet = transfer_to(servers)

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: forgotten.append(context))
        await transfer.push(fleet, 4)
        gc.collect()

    asyncio.run(run())
    gc.collect()
    assert forgotten == []


def test_an_engine_that_was_restarted_is_not_used_before_the_next_push(servers: list[WeightTransferServer]) -> None:
    transfer, fleet = transfer_to(servers)

    async def refreshed(engine: Engine) -> None:
        await fleet.refresh(engine)

    async def run() -> None:
        await transfer.push(fleet, 4)
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
        WeightTransfer([], policy, "nccl")


def test_without_vllm_it_says_what_to_install() -> None:
    with pytest.raises(UsageError, match=r'pip install "trajlake\[vllm\]"'):
        WeightTransfer([], PackedPolicy(random_model()), "ipc")
