"""Weights from GPU to GPU: one NCCL broadcast that every worker of every vLLM server receives.

vLLM's own trainer side (`vllm.distributed.weight_transfer`, since 0.28) opens the group, gathers sharded parameters and
packs them; this module drives several servers through it as if they were one. Servers are started with
`--weight-transfer-config '{"backend": "nccl"}'` and `VLLM_SERVER_DEV_MODE=1`. A round is: pause (calls in flight are
kept), start, update while rank 0 broadcasts, finish with the version, forget cached prefixes, resume.

Nothing stays behind: an engine that was restarted has its first weights until the next push, and is not used before. A
broadcast that breaks off leaves a mixture of two policies, so the engines stay paused: restart them.

Not run on GPUs by the project's tests. They check vLLM 0.32's trainer side against a server of the four routes, with
the NCCL communicator, and nothing else, stood in for.
"""

import asyncio
import json
import socket
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lake.errors import UsageError
from pipelines.collect.engines import Engine, EngineError
from trainer.backends.ranks import ALONE, Ranks
from trainer.policy.model import Policy
from trainer.sync import Push, Weights
from trainer.sync.fleet import Fleet
from trainer.sync.probe import Reference

_SECONDS = 600
"""What a call may take: a large model is broadcast while one waits for its answer."""


class NcclSync:
    """Pushes a policy's weights by NCCL. Across ranks of a sharded policy all make the same calls.

    Args:
        fleet: the engines; other ranks than 0 have none.
        policy: on a GPU; its parameters are sent as they are, without adapters.
        address: of this machine, as the engines reach it.
        ranks: of the trainer.
        reference: see `DiskSync`.
        packed: send many parameters in one buffer.

    Raises:
        UsageError: vLLM is not installed beside the trainer, or the policy has adapters.
    """

    def __init__(
        self,
        fleet: Fleet,
        policy: Policy,
        address: str,
        *,
        ranks: Ranks = ALONE,
        reference: Callable[[], Reference] | None = None,
        packed: bool = True,
    ) -> None:
        if policy.num_trained < policy.num_parameters:
            raise UsageError("a policy with LoRA is pushed through a folder: whole and merged, or its adapters alone")
        _weight_transfer()
        self._fleet, self._policy, self._address, self._ranks = fleet, policy, address, ranks
        self._reference, self._packed = reference, packed
        self._control = Servers([engine.url for engine in fleet.engines])
        self._trainer: Any = None
        self._done: Push | None = None

    @property
    def version(self) -> int | None:
        """Version that was pushed last."""
        current = self._fleet.current
        return None if current is None else current.version

    async def push(self, version: int) -> None:
        """Send the weights to every engine; returns when all have them, since they are sent from where they are."""
        reference = None if self._reference is None else await asyncio.to_thread(self._reference)
        sending = asyncio.create_task(asyncio.to_thread(self._send, version))

        async def load(_: Engine) -> None:
            await asyncio.shield(sending)

        try:
            self._done = await self._fleet.deliver(Weights(version=version), reference, load)
        finally:
            # No engine may have come as far as to wait for it; the trainer changes its weights as soon as this returns.
            await asyncio.wait([sending])
        if (error := sending.exception()) is not None and not self._done.failed:
            raise error

    async def wait(self) -> Push | None:
        """What the last push came to."""
        return self._done

    def _send(self, version: int) -> None:
        """One round; the group is opened before the first, and again after one that failed."""
        self._control.version = version
        trainer, self._trainer = self._trainer or self._open(), None
        try:
            trainer.send_weights()
        except Exception as error:
            raise EngineError(f"the transfer broke off: {error}; restart the engines, they are paused") from error
        self._trainer = trainer

    def _open(self) -> Any:
        factory, init_info, source = _weight_transfer()
        try:
            return factory.trainer_init(
                init_info(
                    rank=self._ranks.rank,
                    master_address=self._address,
                    master_port=_free_port(),
                    world_size=1 + sum(self._control.world_sizes()),
                    packed=self._packed,
                ),
                client=self._control,
                source=source(self._policy.model),
            )
        except Exception as error:
            raise EngineError(f"the NCCL group could not be opened: {error}; restart the engines") from error


class Servers:
    """The control plane of several vLLM servers as one, as `TrainerWeightTransferEngine` asks for it.

    Its calls come from vLLM's threads and block.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        self.urls = list(urls)
        self.version = 0
        """Of the weights that are sent next."""

    def world_sizes(self) -> list[int]:
        """Workers of each server, which are as many ranks of the NCCL group."""
        return [int(answer["world_size"]) for answer in self._all("get_world_size", method="GET")]

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Let all join the group, each server's workers behind those of the one before."""
        offset, bodies = int(init_info["rank_offset"]), []
        for size in self.world_sizes():
            bodies.append({"init_info": init_info | {"rank_offset": offset}})
            offset += size
        self._all("init_weight_transfer_engine", bodies)

    def start_weight_update(self) -> None:
        """Stop sampling, and begin."""
        self._all("pause?mode=keep")
        self._all("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive what is broadcast meanwhile."""
        self._all("update_weights", [{"update_info": update_info}] * len(self.urls))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Take over the weights and their version, and sample again."""
        version = str(self.version) if weight_version is None else weight_version
        self._all("finish_weight_update", [{"weight_version": version}] * len(self.urls))
        self._all("reset_prefix_cache")
        self._all("resume")

    def _all(self, path: str, bodies: Sequence[Any] | None = None, method: str = "POST") -> list[Any]:
        """Call all servers at once; their answers, or the first EngineError."""
        if not self.urls:
            return []
        given = bodies or [None] * len(self.urls)
        with ThreadPoolExecutor(len(self.urls)) as threads:
            places = [f"{url}/{path}" for url in self.urls]
            return list(threads.map(_call, places, given, [method] * len(given)))


def _call(url: str, body: Any, method: str) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=_SECONDS) as response:
            return json.loads(response.read() or b"null")
    except OSError as error:
        said = error.read(2000).decode(errors="replace") if isinstance(error, urllib.request.HTTPError) else ""
        raise EngineError(f"{url}: {error} {said}".rstrip()) from error


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        return int(free.getsockname()[1])


def _weight_transfer() -> tuple[Any, Any, Any]:
    """The factory of vLLM's trainer engines, what it is told of NCCL, and its source of a module's parameters."""
    try:
        from vllm.distributed.weight_transfer import ModuleSource, WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
    except ImportError as error:
        raise UsageError('pushing by NCCL needs vLLM beside the trainer: pip install "trajlake[vllm]"') from error
    return WeightTransferTrainerFactory, NCCLTrainerInitInfo, ModuleSource
