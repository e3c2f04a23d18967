"""Checkpoints: everything that a run needs to continue bit for bit, in one folder that is complete or absent.

    weights.safetensors    what is trained: the model, tied weights once; with LoRA the adapters alone
    optimizer.safetensors  AdamW's state, named parameter/field
    proximal.safetensors   inside the period of a proximal policy (`trainer.losses.policy`): its copy of the weights
    state.json             position, pinned data, configuration, loss scale, random state, environment, digests of all

Several ranks write folders `weights`, `optimizer` and `proximal` instead, with a file per rank. Any number of ranks
reads either kind. Nothing is pickled. Digests are verified on loading, so a damaged checkpoint is an error and never a
wrong model.
"""

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch  # noqa: TID253 - a script that does nothing without it
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from lake.errors import CheckpointError, ContractError
from trainer.backends.base import PolicyBackend, ScalerState, file_digest, tensor_digest
from trainer.backends.sharded import load_shards, open_shared_folder, read_shapes, save_shards
from trainer.train_settings import check_stored_layout

WEIGHTS, OPTIMIZER, STATE = "weights.safetensors", "optimizer.safetensors", "state.json"
PROXIMAL = "proximal.safetensors"
WEIGHT_SHARDS, OPTIMIZER_SHARDS, PROXIMAL_SHARDS = "weights", "optimizer", "proximal"


class State(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a checkpoint that is not tensors."""

    optimizer_step: int
    """Number of updates done; index of the next one."""
    epoch: int
    """Epoch of the next update."""
    plan_hash: str
    """Hash of the plan, 13 characters."""
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
    """sha256 of each rank's files; empty for a single process."""
    loss_scale: ScalerState | None = None
    """The loss scale and its history; None unless dtype is float16."""
    torch_rng: str = ""
    """Torch's CPU random state, hexadecimal."""
    environment: dict[str, str | int] = {}
    """Versions and hardware that exact repetition depends on."""
    validations: list[tuple[int, float]] = []
    """Measurements on held-out episodes so far: updates done, negative log-likelihood."""
    alarm_figures: dict[str, float] = {}
    """Figures of the updates so far that alarms compare with."""
    standing_alarms: list[str] = []
    """Alarms that were active at the last update."""


def environment(ranks: int = 1) -> dict[str, str | int]:
    """Return the versions and hardware that exact repetition on one machine depends on."""
    return {
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
        "ranks": ranks,
    }


def save_checkpoint(folder: Path, backend: PolicyBackend, state: State) -> State:
    """Write a checkpoint, replacing an earlier one; return its state as written. Across ranks all call it.

    Fills in digests, loss scale, random state and environment of the state.
    """
    tensors_of = {WEIGHT_SHARDS: backend.policy.trained_state(), OPTIMIZER_SHARDS: backend.get_local_optimizer_state()}
    if backend.proximal is not None:
        tensors_of[PROXIMAL_SHARDS] = backend.proximal
    full = msgspec.structs.replace(
        state,
        weights_sha256=backend.digest(),
        optimizer_sha256=backend.digest_of(tensors_of[OPTIMIZER_SHARDS]),
        proximal_sha256="" if backend.proximal is None else backend.digest_of(backend.proximal),
        base_sha256=backend.base_digest(),
        loss_scale=None if backend.scaler is None else backend.scaler.state(),
        torch_rng=bytes(torch.get_rng_state().tolist()).hex(),
        environment=environment(backend.world_size),
    )
    with open_shared_folder(folder, backend.ranks) as partial:
        for name, tensors in tensors_of.items():
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
    """Load a checkpoint into a backend (weights, optimizer, proximal policy, loss scale), restore the random state.

    Returns:
        Its state.

    Raises:
        CheckpointError: missing, damaged, or of another model.
    """
    state = _verified(folder, backend)
    backend.drop_proximal()
    if state.proximal_sha256:
        # Loaded through the trained weights, which get their values next.
        _fill(folder, PROXIMAL_SHARDS, state, state.proximal_sha256, backend)
        backend.keep_proximal()
    _fill_weights(folder, state, backend)
    with _name_checkpoint(folder):
        if state.files:
            moments = _empty_moments(folder, backend)
            load_shards(folder / OPTIMIZER_SHARDS, moments, backend.ranks)
            backend.adopt_optimizer_state({n: t[0] if n.endswith("/step") else t for n, t in moments.items()})
        else:
            backend.load_optimizer_state(_load(folder / OPTIMIZER, state.optimizer_sha256))
    if backend.scaler is not None and state.loss_scale is not None:
        backend.scaler.load_state(state.loss_scale)
    torch.set_rng_state(torch.tensor(list(bytes.fromhex(state.torch_rng)), dtype=torch.uint8))
    return state


def load_weights(folder: Path, backend: PolicyBackend) -> State:
    """Load only the weights of a checkpoint; return its state.

    Raises:
        CheckpointError: missing, damaged, of another model, or adapters of another base model.
    """
    state = _verified(folder, backend)
    _fill_weights(folder, state, backend)
    return state


def _verified(folder: Path, backend: PolicyBackend) -> State:
    """Read the state of a checkpoint, and verify the files of its ranks."""
    state = read_state(folder)
    if state.files:
        backend.ranks.on_rank_zero(lambda: _verify_files(folder, state))
    return state


def _fill_weights(folder: Path, state: State, backend: PolicyBackend) -> None:
    """Load the trained weights; a CheckpointError where they belong to another base model."""
    _fill(folder, WEIGHT_SHARDS, state, state.weights_sha256, backend)
    with _name_checkpoint(folder):
        if backend.base_digest() != state.base_sha256:
            raise ContractError("its adapters were trained on another base model than this one")


def _fill(folder: Path, section: str, state: State, sha256: str, backend: PolicyBackend) -> None:
    """Load a section of the checkpoint into the trained weights; a CheckpointError if damaged or of another model."""
    with _name_checkpoint(folder):
        if state.files:
            load_shards(folder / section, backend.policy.trained_state(), backend.ranks)
            backend.policy.cast_weights()
        else:
            backend.load_weights(_load(folder / f"{section}.safetensors", sha256))


def changed_environment(state: State, ranks: int = 1) -> list[str]:
    """Return a sentence for each difference from the environment of a checkpoint."""
    now = environment(ranks)
    return [
        f"the checkpoint was written with {name} {before} and training continues with {now.get(name)}: the result will "
        f"agree with an undisturbed run's closely, not bit for bit"
        for name, before in state.environment.items()
        if now.get(name) != before
    ]


@contextmanager
def _name_checkpoint(folder: Path) -> Iterator[None]:
    """Turn faults of weights and states into CheckpointErrors with the checkpoint's name."""
    try:
        yield
    except ContractError as error:
        raise CheckpointError(f"checkpoint {folder}: {error}") from error


def _empty_moments(folder: Path, backend: PolicyBackend) -> dict[str, torch.Tensor]:
    """Return empty tensors for the optimizer state of a checkpoint's shards, laid out like the parameters."""
    parameters = dict(backend.policy.model.named_parameters())
    empty: dict[str, torch.Tensor] = {}
    for key, (size, dtype) in read_shapes(folder / OPTIMIZER_SHARDS).items():
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
    """Refuse (CheckpointError) files of ranks that are missing or changed."""
    for name, expected in state.files.items():
        path = folder / name
        digest = file_digest(path) if path.is_file() else "missing"
        if digest != expected:
            raise CheckpointError(
                f"checkpoint {folder}: {name} is damaged ({digest[:16]}, recorded was {expected[:16]}); restore it, or "
                f"train again into another --out"
            )


def read_state(folder: Path) -> State:
    """Read the state of a checkpoint.

    Raises:
        CheckpointError: it is missing or damaged, or has the layout of an earlier version.
    """
    try:
        state = msgspec.json.decode((folder / STATE).read_bytes(), type=State)
    except OSError as error:
        msg = f"checkpoint {folder} cannot be read: {error.strerror}; restore it, or train again into another --out"
        raise CheckpointError(msg) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        msg = f"checkpoint {folder}: {STATE} is damaged ({error}); restore it, or train again into another --out"
        raise CheckpointError(msg) from error
    check_stored_layout(state.config, f"checkpoint {folder}")
    return state


def _load(path: Path, expected: str) -> dict[str, torch.Tensor]:
    try:
        tensors: dict[str, torch.Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"checkpoint {path.parent}: {path.name} is damaged ({error}); restore it, or train again into another --out"
        ) from error
    digest = tensor_digest(tensors)
    if digest != expected:
        raise CheckpointError(
            f"checkpoint {path.parent}: {path.name} is damaged: its contents have sha256 {digest[:16]}..., recorded "
            f"was {expected[:16]}...; restore it, or train again into another --out"
        )
    return tensors
