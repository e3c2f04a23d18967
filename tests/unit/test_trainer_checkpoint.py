"""Checkpoints restore bit for bit, and a damaged one is an error that says which part."""

import json
from pathlib import Path

import msgspec
import pytest
import torch  # noqa: TID253 - a script that does nothing without it

from lake.errors import CheckpointError
from lake.storage.atomic import FILES
from testkit.training import random_backend, random_batch
from trainer.backends.base import SingleDevice, tensor_digest
from trainer.losses import LOSSES
from trainer.runs.checkpoint import (
    OPTIMIZER,
    STATE,
    WEIGHTS,
    State,
    changed_environment,
    load_checkpoint,
    load_weights,
    save_checkpoint,
)

POSITION = State(
    optimizer_step=3, epoch=1, plan_hash="0123456789abc", snapshot={"tokens": 4}, config={"loss": {"name": "sft"}}
)


def trained(seed: int = 0, steps: int = 2) -> SingleDevice:
    backend = random_backend(seed)
    for number in range(steps):
        batch = random_batch([9, 14], number)
        backend.forward_backward(batch, LOSSES["sft"]())
        backend.optim_step(1e-2)
    return backend


def test_a_loaded_checkpoint_goes_on_exactly_like_the_original(tmp_path: Path) -> None:
    original, restored = trained(), random_backend(seed=5)
    save_checkpoint(tmp_path / "c", original, POSITION)
    state = load_checkpoint(tmp_path / "c", restored)
    assert (state.optimizer_step, state.epoch, state.snapshot) == (3, 1, {"tokens": 4})
    for backend in (original, restored):
        batch = random_batch([20], 77)
        backend.forward_backward(batch, LOSSES["sft"]())
        backend.optim_step(1e-2)
    assert tensor_digest(original.get_weights()) == tensor_digest(restored.get_weights())
    assert tensor_digest(original.get_local_optimizer_state()) == tensor_digest(restored.get_local_optimizer_state())


def test_a_checkpoint_before_the_first_update_has_no_moments(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c", random_backend(), POSITION)
    restored = trained(seed=3)
    load_checkpoint(tmp_path / "c", restored)
    assert restored.get_local_optimizer_state() == {}


def test_the_random_state_is_restored(tmp_path: Path) -> None:
    backend = random_backend()
    torch.manual_seed(11)
    save_checkpoint(tmp_path / "c", backend, POSITION)
    drawn = torch.rand(5)
    torch.rand(100)
    load_checkpoint(tmp_path / "c", backend)
    assert torch.equal(torch.rand(5), drawn)


@pytest.mark.parametrize("name", [WEIGHTS, OPTIMIZER])
def test_a_flipped_bit_is_found(tmp_path: Path, name: str) -> None:
    save_checkpoint(tmp_path / "c", trained(), POSITION)
    path = tmp_path / "c" / name
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"checkpoint .*c: {name} is damaged: .*restore it"):
        load_checkpoint(tmp_path / "c", random_backend())


@pytest.mark.parametrize("name", [WEIGHTS, OPTIMIZER, STATE])
def test_a_torn_file_is_found(tmp_path: Path, name: str) -> None:
    save_checkpoint(tmp_path / "c", trained(), POSITION)
    path = tmp_path / "c" / name
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(CheckpointError, match=rf"{name} is damaged"):
        load_checkpoint(tmp_path / "c", random_backend())


@pytest.mark.parametrize("name", [WEIGHTS, OPTIMIZER, STATE])
def test_a_missing_file_is_found(tmp_path: Path, name: str) -> None:
    save_checkpoint(tmp_path / "c", trained(), POSITION)
    (tmp_path / "c" / name).unlink()
    with pytest.raises(CheckpointError, match=r"checkpoint .*c"):
        load_checkpoint(tmp_path / "c", random_backend())


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    backend = trained()
    save_checkpoint(tmp_path / "c", backend, POSITION)
    from testkit.training import random_model
    from trainer.config import OptimizerConfig
    from trainer.policy.model import PackedPolicy

    deeper = SingleDevice(PackedPolicy(random_model(num_hidden_layers=3)), OptimizerConfig())
    with pytest.raises(CheckpointError, match="of another model"):
        load_checkpoint(tmp_path / "c", deeper)


def test_weights_can_be_loaded_alone(tmp_path: Path) -> None:
    """What scoring needs: neither moments nor random state."""
    original, other_backend = trained(), random_backend(seed=5)
    save_checkpoint(tmp_path / "c", original, POSITION)
    torch.manual_seed(3)
    drawn = torch.rand(2)
    torch.manual_seed(3)
    assert load_weights(tmp_path / "c", other_backend).optimizer_step == 3
    assert other_backend.digest() == original.digest()
    assert other_backend.get_local_optimizer_state() == {}
    assert torch.equal(torch.rand(2), drawn)


def test_digests_are_those_of_the_tensors(tmp_path: Path) -> None:
    backend = trained()
    state = save_checkpoint(tmp_path / "c", backend, POSITION)
    assert state.weights_sha256 == tensor_digest(backend.get_weights()) == backend.model_digest()
    assert state.optimizer_sha256 == tensor_digest(backend.get_local_optimizer_state())
    assert (state.base_sha256, state.files) == ("", {})
    assert state.environment["ranks"] == 1


def test_another_number_of_ranks_is_told(tmp_path: Path) -> None:
    state = save_checkpoint(tmp_path / "c", random_backend(), POSITION)
    (change,) = changed_environment(state, ranks=4)
    assert "written with ranks 1" in change
    assert "continues with 4" in change


def test_nothing_is_pickled(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c", trained(), POSITION)
    assert {path.name for path in (tmp_path / "c").iterdir()} == {WEIGHTS, OPTIMIZER, STATE, FILES}
    json.loads((tmp_path / "c" / STATE).read_text())


def test_a_changed_environment_is_told(tmp_path: Path) -> None:
    state = save_checkpoint(tmp_path / "c", random_backend(), POSITION)
    assert changed_environment(state) == []
    other_state = msgspec.structs.replace(state, environment={**state.environment, "threads": 99})
    (change,) = changed_environment(other_state)
    assert "threads 99" in change
    assert "not bit for bit" in change


def test_a_digest_knows_names_dtypes_shapes_and_bytes_and_no_order() -> None:
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(1.0)}
    digest = tensor_digest(tensors)
    assert tensor_digest({"b": tensors["b"], "a": tensors["a"]}) == digest
    assert tensor_digest({"a": tensors["a"].T.contiguous().T, "b": tensors["b"]}) == digest
    for changed in (
        {"c": tensors["a"], "b": tensors["b"]},
        {"a": tensors["a"].view(3, 2), "b": tensors["b"]},
        {"a": tensors["a"].double(), "b": tensors["b"]},
        {"a": tensors["a"] + torch.tensor([[0.0, 0, 0], [0, 0, 1e-6]]), "b": tensors["b"]},
    ):
        assert tensor_digest(changed) != digest
