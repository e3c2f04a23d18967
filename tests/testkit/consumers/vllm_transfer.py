"""Pushes a small model by NCCL and by CUDA IPC with vLLM's own trainer side, on a machine without GPUs.

In place of NCCL's communicator stands one that notes what is broadcast, and a handle of memory is the tensor's shape.
Prints what was broadcast, and the model's parameters.
"""

import asyncio
import json
import sys
from types import SimpleNamespace

packages, root, *urls = sys.argv[1:]
sys.path[:0] = [root]
sys.path.append(packages)

import torch  # noqa: E402, TID253
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402, TID253
from vllm.distributed.weight_transfer import ipc_engine, nccl_engine  # noqa: E402, TID253

from trainer.policy.model import PackedPolicy  # noqa: E402
from trainer.sync.targets import SyncTargets  # noqa: E402
from trainer.sync.transfer import WeightTransfer  # noqa: E402


class Communicator:
    def __init__(self) -> None:
        self.sent: list[tuple[list[int], str]] = []

    def broadcast(self, tensor: torch.Tensor, src: int, stream: object) -> None:
        assert src == 0
        self.sent.append((list(tensor.shape), str(tensor.dtype).removeprefix("torch.")))


class Server:
    def __init__(self, url: str) -> None:
        self.url = url

    async def version(self) -> None:
        return None


async def main() -> None:
    communicator = Communicator()
    nccl_engine.open_trainer_endpoint = lambda _: communicator
    torch.cuda.current_stream = lambda: None
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=40, tie_word_embeddings=True, **shape))
    torch.accelerator.current_device_index = lambda: 0
    torch.cuda.get_device_properties = lambda _: SimpleNamespace(uuid="GPU-0")
    torch.cuda.ipc_collect = lambda: None
    ipc_engine.reduce_tensor = lambda tensor: (None, (list(tensor.shape),))
    errors = []
    for version, backend in ((7, "nccl"), (8, "ipc")):
        transfer = WeightTransfer(urls, PackedPolicy(model), backend, packed=False)
        push = await transfer.push(SyncTargets([Server(url) for url in urls]), version)
        errors += [delivery.error for delivery in push.failed]
    parameters = [[name, str(p.dtype).removeprefix("torch."), list(p.shape)] for name, p in model.named_parameters()]
    print(json.dumps({"sent": communicator.sent, "parameters": parameters, "errors": errors}))


asyncio.run(main())
