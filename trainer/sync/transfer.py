"""Weights from GPU to GPU, without a folder: NCCL, or CUDA IPC where trainer and engine share a GPU.

    nccl    one broadcast that every worker of every server receives; every process has a GPU of its own
    ipc     every server reads the memory of the trainer's weights

vLLM's trainer side (`vllm.distributed.weight_transfer`, since 0.28) opens the transfer, and packs parameters. This
module drives several servers through it as if they were one; docs/guides/loop.md says how to start them. A round is:
pause (calls in flight are kept), start, update, finish with the version, reset the prefix cache, resume.

A transfer leaves no copy on disk. A server that restarted has other weights until the next push, and is not used
before. With nccl it has left the group, so that push fails, and the one after it opens a new group. A transfer that
fails leaves a mixture of two policies, so the engines stay paused and must be restarted.

The project's tests do not run this on GPUs. They check vLLM 0.32's trainer side against a server of its routes, and
replace only the NCCL communicator.
"""

import asyncio
import base64
import json
import pickle
import socket
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any, Literal
from urllib.parse import urlsplit

from lake.errors import UsageError
from pipelines.collect.engines import Engine, EngineError
from trainer.policy.model import PackedPolicy
from trainer.sync.targets import Push, Reference, SyncTargets, Weights

_CALL_SECONDS = 600
"""Timeout of a call in seconds: the answer waits for the transfer of a large model."""


class WeightTransfer:
    """Sends a policy's weights to vLLM servers.

    Args:
        urls: base URLs of the servers.
        policy: on a GPU; its parameters are sent unchanged, without adapters.
        backend: the way.
        packed: send many parameters in one buffer.

    Raises:
        UsageError: vLLM is not installed in the trainer's environment, or the policy has adapters.
    """

    def __init__(
        self, urls: Sequence[str], policy: PackedPolicy, backend: Literal["nccl", "ipc"], *, packed: bool = True
    ) -> None:
        if policy.num_trained < policy.num_parameters:
            raise UsageError("a policy with LoRA is pushed through a folder: whole and merged, or its adapters alone")
        import_weight_transfer(backend)
        self._policy, self._backend, self._packed = policy, backend, packed
        self._control = VllmServers(urls)
        self._trainer: Any = None

    async def push(self, targets: SyncTargets, version: int, reference: Reference | None = None) -> Push:
        """Send the weights to every engine; return when all have them, since the live parameters are sent."""
        sending = asyncio.create_task(asyncio.to_thread(self._send, version))

        async def load(_: Engine) -> None:
            await asyncio.shield(sending)

        try:
            push = await targets.deliver(Weights(version=version), reference, load)
        finally:
            # Perhaps no engine reached `load`, but the trainer changes its weights as soon as this returns.
            await asyncio.wait([sending])
        if (error := sending.exception()) is not None and not push.failed:
            raise error
        return push

    def _send(self, version: int) -> None:
        """Run one round; open the transfer before the first one, after a failed one, and for ipc each time."""
        self._control.version = version
        trainer, self._trainer = self._trainer or self._open(), None
        try:
            trainer.send_weights()
        except Exception as error:
            raise EngineError(f"the transfer failed: {error}; restart the engines, they are paused") from error
        if self._backend == "nccl":
            self._trainer = trainer

    def _open(self) -> Any:
        factory, init_info, source = import_weight_transfer(self._backend)
        try:
            options: dict[str, Any] = {}
            if self._backend == "nccl":
                address, port = _find_own_address(self._control.urls[0])
                options = {"master_address": address, "master_port": port}
                options["world_size"] = 1 + sum(self._control.world_sizes())
            return factory.trainer_init(
                init_info(rank=0, packed=self._packed, **options),
                client=self._control,
                source=source(self._policy.model),
            )
        except Exception as error:
            raise EngineError(
                f"the {self._backend} transfer could not be opened: {error}; restart the engines"
            ) from error


def _find_own_address(url: str) -> tuple[str, int]:
    """Return this machine's address as a server sees it, and a free port."""
    server = urlsplit(url)
    with socket.create_connection((server.hostname or "", server.port or 80), timeout=_CALL_SECONDS) as connection:
        address = str(connection.getsockname()[0])
    with socket.create_server((address, 0)) as free_socket:
        return address, int(free_socket.getsockname()[1])


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
        """Let all servers join; in a group each has the ranks after those of the previous server."""
        bodies = [{"init_info": dict(init_info)} for _ in self.urls]
        if "rank_offset" in init_info:
            offset = int(init_info["rank_offset"])
            for body, size in zip(bodies, self.world_sizes(), strict=True):
                body["init_info"]["rank_offset"] = offset
                offset += size
        self._all("init_weight_transfer_engine", bodies)

    def start_weight_update(self) -> None:
        """Pause sampling, and start the update."""
        self._all("pause?mode=keep")
        self._all("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Let all servers receive the parameters, or a part of them; JSON takes handles of memory as a pickle."""
        update_info = {name: setting for name, setting in update_info.items() if setting is not None}
        if (handles := update_info.pop("ipc_handles", None)) is not None:
            update_info["ipc_handles_pickled"] = base64.b64encode(pickle.dumps(handles)).decode()
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


def import_weight_transfer(backend: str) -> tuple[Any, Any, Any]:
    """Import vLLM's factory of trainer engines, the settings of a backend, and its reader of a module's parameters."""
    try:
        from vllm.distributed.weight_transfer import ModuleSource, WeightTransferTrainerFactory

        module = import_module(f"vllm.distributed.weight_transfer.{backend}_engine")
    except ImportError as error:
        raise UsageError(
            f'sending weights by {backend} needs vLLM on the trainer, too: pip install "trajlake[vllm]"'
        ) from error
    return WeightTransferTrainerFactory, getattr(module, f"{backend.upper()}TrainerInitInfo"), ModuleSource
