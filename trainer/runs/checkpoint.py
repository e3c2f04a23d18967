"""Checkpoints: everything a run needs to go on bit for bit, in one folder that is there in full or not at all.

    weights.safetensors    what is trained: the model, tied weights once; with LoRA the adapters alone
    optimizer.safetensors  AdamW's state, named parameter/field
    proximal.safetensors   inside the period of a proximal policy (`trainer.losses.correction`): its copy of the weights
    state.json             position, pinned data, configuration, random state, environment, and the digests of all

Several ranks write folders `weights`, `optimizer` and `proximal` instead, with a file per rank. Either kind is read by
any number of ranks. Nothing is pickled. Digests are verified on loading, so a damaged checkpoint is an error, never a
wrong model.
"""

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch  # noqa: TID253 - loaded by commands only when they train
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from lake.errors import CheckpointError, ContractError
from trainer.backends.base import PolicyBackend, file_digest, tensor_digest
from trainer.backends.sharded import load_shards, save_shards, shapes_in, shared_folder

WEIGHTS, OPTIMIZER, STATE = "weights.safetensors", "optimizer.safetensors", "state.json"
PROXIMAL = "proximal.safetensors"
WEIGHT_SHARDS, OPTIMIZER_SHARDS, PROXIMAL_SHARDS = "weights", "optimizer", "proximal"


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
    proximal_sha256: str = ""
    """Digest of the proximal policy's weights; empty between periods, and where the loss has none."""
    base_sha256: str = ""
    """Digest of the weights that are not trained; empty if all are."""
    files: dict[str, str] = {}
    """sha256 of each rank's files, where there are several."""
    torch_rng: str = ""
    """Torch's CPU random state, hexadecimal."""
    environment: dict[str, str | int] = {}
    """What exact repetition depends on."""
    validations: list[tuple[int, float]] = []
    """Measurements on held-out episodes so far: updates done, negative log-likelihood."""
    first_entropy: float | None = None
    """Entropy at the run's first update, which the alarm compares with."""
    standing_alarms: list[str] = []
    """Alarms that were on at the last update."""


def environment(ranks: int = 1) -> dict[str, str | int]:
    """What exact repetition on one machine depends on."""
    return {
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
        "ranks": ranks,
    }


def save_checkpoint(folder: Path, backend: PolicyBackend, state: State) -> State:
    """Write a checkpoint in place of any there is, and return its state as written; across ranks all call it.

    Digests, random state and environment of the state are filled in.
    """
    parts = {WEIGHT_SHARDS: backend.policy.trained_state(), OPTIMIZER_SHARDS: backend.local_optimizer_state()}
    if backend.proximal is not None:
        parts[PROXIMAL_SHARDS] = backend.proximal
    full = msgspec.structs.replace(
        state,
        weights_sha256=backend.digest(),
        optimizer_sha256=backend.digest_of(parts[OPTIMIZER_SHARDS]),
        proximal_sha256="" if backend.proximal is None else backend.digest_of(backend.proximal),
        base_sha256=backend.base_digest(),
        torch_rng=bytes(torch.get_rng_state().tolist()).hex(),
        environment=environment(backend.world_size),
    )
    with shared_folder(folder, backend.ranks) as partial:
        for name, tensors in parts.items():
            if backend.ranks.joined:
                save_shards(partial / name, tensors, backend.ranks)
            else:
                save_file({key: t.contiguous() for key, t in tensors.items()}, partial / f"{name}.safetensors")
        if backend.ranks.joined:
            backend.ranks.wait()
            digests = backend.ranks.on_rank_zero(
                lambda: {str(p.relative_to(partial)): file_digest(p) for p in sorted(partial.rglob("*.safetensors"))}
            )
            full = msgspec.structs.replace(full, files=digests)
        if backend.rank == 0:
            (partial / STATE).write_bytes(msgspec.json.encode(full))
    return full


def load_checkpoint(folder: Path, backend: PolicyBackend) -> State:
    """Load a checkpoint into a backend (weights, optimizer, proximal policy), restore the random state; its state.

    Raises:
        CheckpointError: missing, damaged, or of another model.
    """
    state = _verified(folder, backend)
    backend.drop_proximal()
    if state.proximal_sha256:
        # By way of the weights that are trained, which get their own values next.
        _fill(folder, PROXIMAL_SHARDS, state, state.proximal_sha256, backend)
        backend.keep_proximal()
    _fill_weights(folder, state, backend)
    with _of(folder):
        if state.files:
            moments = _empty_moments(folder, backend)
            load_shards(folder / OPTIMIZER_SHARDS, moments, backend.ranks)
            backend.adopt_optimizer_state({n: t[0] if n.endswith("/step") else t for n, t in moments.items()})
        else:
            backend.load_optimizer_state(_load(folder / OPTIMIZER, state.optimizer_sha256))
    torch.set_rng_state(torch.tensor(list(bytes.fromhex(state.torch_rng)), dtype=torch.uint8))
    return state


def load_weights(folder: Path, backend: PolicyBackend) -> State:
    """Load the weights of a checkpoint alone; its state.

    Raises:
        CheckpointError: missing, damaged, of another model, or adapters of another base model.
    """
    state = _verified(folder, backend)
    _fill_weights(folder, state, backend)
    return state


def _verified(folder: Path, backend: PolicyBackend) -> State:
    """The state of a checkpoint whose shards, where it has any, are as they were written."""
    state = read_state(folder)
    if state.files:
        backend.ranks.on_rank_zero(lambda: _verify_files(folder, state))
    return state


def _fill_weights(folder: Path, state: State, backend: PolicyBackend) -> None:
    """Load the trained weights, for the base model that they belong to."""
    _fill(folder, WEIGHT_SHARDS, state, state.weights_sha256, backend)
    with _of(folder):
        if backend.base_digest() != state.base_sha256:
            raise ContractError("its adapters were trained on another base model than this one")


def _fill(folder: Path, part: str, state: State, sha256: str, backend: PolicyBackend) -> None:
    """Put a part of the checkpoint into the trained weights; a CheckpointError if damaged, or of another model."""
    with _of(folder):
        if state.files:
            load_shards(folder / part, backend.policy.trained_state(), backend.ranks)
        else:
            backend.load_weights(_load(folder / f"{part}.safetensors", sha256))


def changed_environment(state: State, ranks: int = 1) -> list[str]:
    """What differs from the environment a checkpoint was written in, as sentences; empty if nothing does."""
    now = environment(ranks)
    return [
        f"the checkpoint was written with {name} {before} and training goes on with {now.get(name)}: the result will "
        f"agree with an undisturbed run's closely, not bit for bit"
        for name, before in state.environment.items()
        if now.get(name) != before
    ]


@contextmanager
def _of(folder: Path) -> Iterator[None]:
    """Faults of weights and states, with the checkpoint's name."""
    try:
        yield
    except ContractError as error:
        raise CheckpointError(f"checkpoint {folder}: {error}") from error


def _empty_moments(folder: Path, backend: PolicyBackend) -> dict[str, torch.Tensor]:
    """Tensors for the optimizer state that a checkpoint's shards hold, laid out like the parameters."""
    parameters = dict(backend.policy.model.named_parameters())
    empty: dict[str, torch.Tensor] = {}
    for key, (size, dtype) in shapes_in(folder / OPTIMIZER_SHARDS).items():
        name, _, field = key.rpartition("/")
        if name not in parameters:
            raise ContractError(f"the optimizer state is of another model: it names parameter {name}")
        parameter = parameters[name].detach()
        # A fused AdamW keeps its step counter on the GPU.
        device = parameter.device if parameter.is_cuda else torch.device("cpu")
        is_scalar = field == "step"
        empty[key] = (
            torch.zeros(size, dtype=dtype, device=device) if is_scalar else torch.zeros_like(parameter, dtype=dtype)
        )
    return empty


def _verify_files(folder: Path, state: State) -> None:
    """Refuse (CheckpointError) files of ranks that are missing, or not as they were written."""
    for name, expected in state.files.items():
        path = folder / name
        found = file_digest(path) if path.is_file() else "missing"
        if found != expected:
            raise CheckpointError(
                f"checkpoint {folder}: {name} is damaged ({found[:16]}, recorded was {expected[:16]}); restore it, or "
                f"train again into another --out"
            )


def read_state(folder: Path) -> State:
    """The state of a checkpoint; a CheckpointError where it is missing or damaged."""
    try:
        return msgspec.json.decode((folder / STATE).read_bytes(), type=State)
    except OSError as error:
        msg = f"checkpoint {folder} cannot be read: {error.strerror}; restore it, or train again into another --out"
        raise CheckpointError(msg) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        msg = f"checkpoint {folder}: {STATE} is damaged ({error}); restore it, or train again into another --out"
        raise CheckpointError(msg) from error


def _load(path: Path, expected: str) -> dict[str, torch.Tensor]:
    try:
        tensors: dict[str, torch.Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"checkpoint {path.parent}: {path.name} is damaged ({error}); restore it, or train again into another --out"
        ) from error
    found = tensor_digest(tensors)
    if found != expected:
        raise CheckpointError(
            f"checkpoint {path.parent}: {path.name} is damaged: its contents have sha256 {found[:16]}..., recorded was "
            f"{expected[:16]}...; restore it, or train again into another --out"
        )
    return tensors
