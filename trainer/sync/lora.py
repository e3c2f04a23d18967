"""LoRA adapters by name: megabytes instead of a model, and both versions at hand while episodes change over.

An adapter's name carries its version, since engines version the base model alone: calls that were made under the
version before go on with it, and every call names the one it wants (`Request.adapter`). vLLM needs `--enable-lora` and
`VLLM_ALLOW_RUNTIME_LORA_UPDATING=True`; on a CPU it decodes several times slower with adapters, where whole models,
merged, are the better way.
"""

from collections.abc import Callable
from pathlib import Path

from lake.errors import UsageError
from lake.storage.atomic import atomic_folder
from trainer.backends.base import PolicyBackend
from trainer.config import TrainConfig
from trainer.policy.lora import save_adapters


def adapter_name(name: str, version: int) -> str:
    """What requests call the adapters of a version by."""
    return f"{name}-v{version}"


def adapter_writer(backend: PolicyBackend, config: TrainConfig) -> Callable[[Path], None]:
    """Writes a policy's adapters as they are now, in peft's layout; across ranks all call it, and rank 0 writes.

    Raises:
        UsageError: the policy has no adapters.
    """
    options = config.lora
    if options is None:
        raise UsageError(f"{config.model} was trained without LoRA and has no adapters; push it without --adapter")

    def write(folder: Path) -> None:
        weights = backend.get_weights()
        if backend.rank == 0:
            with atomic_folder(folder) as partial:
                save_adapters(partial, weights, options, base=config.model)
        backend.ranks.wait()

    return write
