"""Weights from GPU to GPU: one NCCL broadcast that every worker of every vLLM server receives.

vLLM's trainer side (`vllm.distributed.weight_transfer`, since 0.28) opens the group, gathers sharded parameters and
packs them. This module drives several servers through it as if they were one. Start the servers with
`--weight-transfer-config '{"backend": "nccl"}'` and `VLLM_SERVER_DEV_MODE=1`. A round is: pause (calls in flight are
kept), start, update while rank 0 broadcasts, finish with the version, reset the prefix cache, resume.

The broadcast leaves no copy on disk. An engine that restarted has its initial weights until the next push, and is not
used before. A broadcast that fails leaves a mixture of two policies, so the engines stay paused and must be restarted.

The project's tests do not run this on GPUs. They check vLLM 0.32's trainer side against a server of the four routes,
and replace only the NCCL communicator.
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
from trainer.policy.model import PackedPolicy
from trainer.sync.targets import Push, Reference, SyncTargets, Weights

_CALL_SECONDS = 600
"""Timeout of a call in seconds: the answer waits for the broadcast of a large model."""


class NcclSync:
    """Pushes a policy's weights by NCCL. All ranks of a sharded policy make the same calls.

    Args:
        targets: the engines; empty on ranks other than 0.
        policy: on a GPU; its parameters are sent unchanged, without adapters.
        address: this machine's address, as the engines reach it.
        reference: see `DiskSync`.
        packed: send many parameters in one buffer.

    Raises:
        UsageError: vLLM is not installed in the trainer's environment, or the policy has adapters.
    """

    def __init__(
        self,
        targets: SyncTargets,
        policy: PackedPolicy,
        address: str,
        *,
        ranks: Ranks = ALONE,
        reference: Callable[[], Reference] | None = None,
        packed: bool = True,
    ) -> None:
        if policy.num_trained < policy.num_parameters:
            raise UsageError("a policy with LoRA is pushed through a folder: whole and merged, or its adapters alone")
        import_weight_transfer()
        self._targets, self._policy, self._address, self._ranks = targets, policy, address, ranks
        self._reference, self._packed = reference, packed
        self._control = VllmServers([engine.url for engine in targets.engines])
        self._trainer: Any = None
        self._last_push: Push | None = None

    @property
    def version(self) -> int | None:
        """Return the version that was pushed last."""
        current = self._targets.current
        return None if current is None else current.version

    async def push(self, version: int) -> None:
        """Send the weights to every engine; return when all have them, since the live parameters are sent."""
        reference = None if self._reference is None else await asyncio.to_thread(self._reference)
        sending = asyncio.create_task(asyncio.to_thread(self._send, version))

        async def load(_: Engine) -> None:
            await asyncio.shield(sending)

        try:
            self._last_push = await self._targets.deliver(Weights(version=version), reference, load)
        finally:
            # Perhaps no engine reached `load`, but the trainer changes its weights as soon as this returns.
            await asyncio.wait([sending])
        if (error := sending.exception()) is not None and not self._last_push.failed:
            raise error

    async def wait(self) -> Push | None:
        """Return the outcome of the last push."""
        return self._last_push

    def _send(self, version: int) -> None:
        """Run one round; open the group before the first round, and again after a failed one."""
        self._control.version = version
        trainer, self._trainer = self._trainer or self._open(), None
        try:
            trainer.send_weights()
        except Exception as error:
            raise EngineError(f"the transfer failed: {error}; restart the engines, they are paused") from error
        self._trainer = trainer

    def _open(self) -> Any:
        factory, init_info, source = import_weight_transfer()
        try:
            with socket.socket() as free_socket:
                free_socket.bind(("", 0))
                port = int(free_socket.getsockname()[1])
            return factory.trainer_init(
                init_info(
                    rank=self._ranks.rank,
                    master_address=self._address,
                    master_port=port,
                    world_size=1 + sum(self._control.world_sizes()),
                    packed=self._packed,
                ),
                client=self._control,
                source=source(self._policy.model),
            )
        except Exception as error:
            raise EngineError(f"the NCCL group could not be opened: {error}; restart the engines") from error


class VllmServers:
    """Control plane of several vLLM servers, with the interface that `TrainerWeightTransferEngine` calls.

    vLLM calls it from its own threads, and the calls block.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        self.urls = list(urls)
        self.version = 0
        """Version of the weights that are sent next."""

    def world_sizes(self) -> list[int]:
        """Return the number of workers of each server; each worker is a rank of the NCCL group."""
        return [int(answer["world_size"]) for answer in self._all("get_world_size", method="GET")]

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Let all servers join the group, each with the ranks after those of the previous server."""
        offset, bodies = int(init_info["rank_offset"]), []
        for size in self.world_sizes():
            bodies.append({"init_info": init_info | {"rank_offset": offset}})
            offset += size
        self._all("init_weight_transfer_engine", bodies)

    def start_weight_update(self) -> None:
        """Pause sampling, and start the update."""
        self._all("pause?mode=keep")
        self._all("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Let all servers receive the broadcast."""
        self._all("update_weights", [{"update_info": update_info}] * len(self.urls))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Activate the weights and their version, and resume sampling."""
        version = str(self.version) if weight_version is None else weight_version
        self._all("finish_weight_update", [{"weight_version": version}] * len(self.urls))
        self._all("reset_prefix_cache")
        self._all("resume")

    def _all(self, path: str, bodies: Sequence[Any] | None = None, method: str = "POST") -> list[Any]:
        """Call all servers at once; return their answers, or raise the first EngineError."""
        if not self.urls:
            return []
        bodies = bodies or [None] * len(self.urls)
        with ThreadPoolExecutor(len(self.urls)) as threads:
            addresses = [f"{url}/{path}" for url in self.urls]
            return list(threads.map(call_server, addresses, bodies, [method] * len(bodies)))


def call_server(url: str, body: Any, method: str) -> Any:
    """Send a JSON request and return the decoded answer. Raises EngineError: no answer, or an HTTP error."""
    content = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, content, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=_CALL_SECONDS) as response:
            return json.loads(response.read() or b"null")
    except OSError as error:
        answer = error.read(2000).decode(errors="replace") if isinstance(error, urllib.request.HTTPError) else ""
        raise EngineError(f"{url}: {error} {answer}".rstrip()) from error


def import_weight_transfer() -> tuple[Any, Any, Any]:
    """Import vLLM's factory of trainer engines, its NCCL settings, and its reader of a module's parameters."""
    try:
        from vllm.distributed.weight_transfer import ModuleSource, WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
    except ImportError as error:
        raise UsageError('pushing by NCCL needs vLLM on the trainer, too: pip install "trajlake[vllm]"') from error
    return WeightTransferTrainerFactory, NCCLTrainerInitInfo, ModuleSource
