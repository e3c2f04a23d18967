"""Checkpoints: everything a run needs to go on bit for bit, in one folder that is there in full or not at all.

    weights.safetensors    the model, tied weights once
    optimizer.safetensors  AdamW's state, named parameter/field
    state.json             position, pinned data, configuration, random state, environment, and the digests of both

Nothing is pickled. Digests are verified on loading, so a damaged checkpoint is an error and never a wrong model.
"""

import platform
from pathlib import Path
from typing import Any

import msgspec
import torch  # noqa: TID253 - loaded by commands only when they train
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from lake.errors import CheckpointError, ContractError
from trainer.atomic import atomic_folder
from trainer.backends.single import SingleDevice
from trainer.digest import tensor_digest

WEIGHTS, OPTIMIZER, STATE = "weights.safetensors", "optimizer.safetensors", "state.json"


class State(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a checkpoint that is not tensors."""

    optimizer_step: int
    """Updates done; the next one to do."""
    epoch: int
    """Pass over the data that the next update belongs to."""
    plan_hash: str
    """Of `Plan.plan_hash`, as 13 characters."""
    snapshot: dict[str, int]
    """Table versions that the run reads."""
    config: dict[str, Any]
    """The resolved TrainConfig."""
    weights_sha256: str = ""
    """Digest of the weights."""
    optimizer_sha256: str = ""
    """Digest of the optimizer state."""
    torch_rng: str = ""
    """Torch's CPU random state, hexadecimal."""
    environment: dict[str, str | int] = {}
    """What exact repetition depends on."""
    validations: list[tuple[int, float]] = []
    """Measurements on held-out episodes so far: updates done, negative log-likelihood."""


def environment() -> dict[str, str | int]:
    """What exact repetition on one machine depends on."""
    return {
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
    }


def save_checkpoint(folder: Path, backend: SingleDevice, state: State) -> State:
    """Write a checkpoint.

    Args:
        folder: its place; replaced if there is one.
        backend: weights and optimizer.
        state: position and data; digests, random state and environment are filled in.

    Returns:
        The state as written.
    """
    weights, moments = backend.get_weights(), backend.get_optimizer_state()
    full = msgspec.structs.replace(
        state,
        weights_sha256=tensor_digest(weights),
        optimizer_sha256=tensor_digest(moments),
        torch_rng=bytes(torch.get_rng_state().tolist()).hex(),
        environment=environment(),
    )
    with atomic_folder(folder) as partial:
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, partial / WEIGHTS)
        save_file({name: tensor.contiguous() for name, tensor in moments.items()}, partial / OPTIMIZER)
        (partial / STATE).write_bytes(msgspec.json.encode(full))
    return full


def load_checkpoint(folder: Path, backend: SingleDevice) -> State:
    """Load a checkpoint into a backend and restore the random state.

    Args:
        folder: its place.
        backend: gets weights and optimizer state.

    Returns:
        Its state.

    Raises:
        CheckpointError: missing, damaged, or of another model.
    """
    state = read_state(folder)
    weights = _load(folder / WEIGHTS, state.weights_sha256)
    moments = _load(folder / OPTIMIZER, state.optimizer_sha256)
    try:
        backend.load_weights(weights)
        backend.load_optimizer_state(moments)
    except ContractError as error:
        msg = f"checkpoint {folder}: {error}"
        raise CheckpointError(msg) from error
    torch.set_rng_state(torch.tensor(list(bytes.fromhex(state.torch_rng)), dtype=torch.uint8))
    return state


def changed_environment(state: State) -> list[str]:
    """What differs from the environment a checkpoint was written in, as sentences; empty if nothing does."""
    now = environment()
    return [
        f"the checkpoint was written with {name} {before} and training goes on with {now.get(name)}: the result will "
        f"agree with an undisturbed run's closely, not bit for bit"
        for name, before in state.environment.items()
        if now.get(name) != before
    ]


def read_state(folder: Path) -> State:
    """The state of a checkpoint.

    Raises:
        CheckpointError: missing or damaged.
    """
    try:
        return msgspec.json.decode((folder / STATE).read_bytes(), type=State)
    except OSError as error:
        msg = f"checkpoint {folder} cannot be read: {error.strerror}; restore it, or train again into another --out"
        raise CheckpointError(msg) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        msg = f"checkpoint {folder}: {STATE} is damaged ({error}); restore it, or train again into another --out"
        raise CheckpointError(msg) from error


def _load(path: Path, expected: str) -> dict[str, torch.Tensor]:
    try:
        tensors: dict[str, torch.Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        msg = (
            f"checkpoint {path.parent}: {path.name} is damaged ({error}); restore it, or train again into another --out"
        )
        raise CheckpointError(msg) from error
    found = tensor_digest(tensors)
    if found != expected:
        msg = (
            f"checkpoint {path.parent}: {path.name} is damaged: its contents have sha256 {found[:16]}..., recorded was "
            f"{expected[:16]}...; restore it, or train again into another --out"
        )
        raise CheckpointError(msg)
    return tensors
