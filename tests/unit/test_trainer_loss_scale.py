"""Training with dtype float16: the loss scale keeps small gradients, and an overflow skips an update."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch  # noqa: TID253 - a script that does nothing without it

from lake.errors import ContractError
from testkit.training import random_batch, random_model
from testkit.wording import Wording
from trainer.backends.base import SingleDevice
from trainer.config import Dtype, LossScaleConfig, OptimizerConfig
from trainer.data.batch import PackedBatch
from trainer.losses import LOSSES
from trainer.policy.model import PackedPolicy, check_policy
from trainer.runs.checkpoint import State, load_checkpoint, save_checkpoint

LENGTHS = [7, 1, 30, 2, 13]
OVERFLOW = 2.0**40
POSITION = State(optimizer_step=3, epoch=0, plan_hash="0123456789abc", snapshot={}, config={})


def backend_of(
    dtype: Dtype = "float16",
    *,
    scale: float = 65536.0,
    max_grad_norm: float = 1e9,
    device: str = "cpu",
    **scaler: Any,
) -> SingleDevice:
    """A backend on a random model; unless a norm is given, it clips nothing."""
    policy = PackedPolicy(random_model().to(device), dtype=dtype)
    scaling = LossScaleConfig(initial=scale, **scaler)
    return SingleDevice(policy, OptimizerConfig(max_grad_norm=max_grad_norm, loss_scale=scaling))


def with_weights(batch: PackedBatch, factor: float) -> PackedBatch:
    return replace(batch, weight_N=batch.weight_N * factor)


def update(backend: SingleDevice, batch: PackedBatch, loss: str = "sft") -> tuple[float, torch.Tensor]:
    """One update: the norm that it reports, and the gradient that AdamW is given; empty if it is given none."""
    gradients = []

    def remember(*_: object) -> None:
        parameters = backend.policy.model.parameters()
        gradients.append(torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]))

    hook = backend.optimizer.register_step_pre_hook(remember)
    backend.forward_backward(batch, LOSSES[loss]())
    norm = backend.optim_step(1e-2)
    hook.remove()
    return norm, torch.cat(gradients) if gradients else torch.empty(0)


def relative_error(gradient: torch.Tensor, exact: torch.Tensor) -> float:
    return float((gradient - exact).norm() / exact.norm())


def tensors_of(backend: SingleDevice) -> dict[str, torch.Tensor]:
    return {name: t.clone() for name, t in (backend.get_weights() | backend.get_local_optimizer_state()).items()}


def test_float16_products_leave_float32_behind() -> None:
    """Weights, gradients, log-probabilities and losses are float32; products are closer than those of bfloat16."""
    batch = random_batch(LENGTHS)
    exact_N, _ = PackedPolicy(random_model()).logprobs(batch)
    differences: dict[Dtype, float] = {}
    dtypes: tuple[Dtype, ...] = ("bfloat16", "float16")
    for dtype in dtypes:
        backend = backend_of(dtype)
        check_policy(backend.policy)
        narrow_N, entropy_N = backend.policy.logprobs(batch, entropy=True)
        assert entropy_N is not None
        assert narrow_N.dtype == entropy_N.dtype == torch.float32
        differences[dtype] = float((narrow_N - exact_N).detach().abs().mean())
        sums = backend.forward_backward(batch, LOSSES["ppo"]())
        assert sums["loss"].dtype == torch.float32
        assert {p.grad.dtype for p in backend.policy.model.parameters()} == {torch.float32}
    assert 0 < differences["float16"] < differences["bfloat16"] / 2


@pytest.mark.parametrize("loss", ["sft", "awr", "ppo"])
def test_the_optimizer_gets_the_gradient_of_the_loss_as_it_is(loss: str) -> None:
    """For any fixed scale, and with several micro-batches: the gradient of float32, up to float16's rounding."""
    batch = random_batch(LENGTHS)
    norm, exact = update(backend_of("float32"), batch, loss)
    for scale in (1.0, 64.0, 4096.0):
        backend = backend_of(scale=scale)
        float16_norm, gradient = update(backend, batch, loss)
        assert float16_norm == pytest.approx(norm, rel=0.01)
        assert relative_error(gradient, exact) < 0.01
        assert backend.loss_scale == scale


def test_a_small_gradient_is_there_with_the_scale_and_vanishes_without() -> None:
    batch = with_weights(random_batch(LENGTHS), 1e-7)
    _, exact = update(backend_of("float32"), batch)
    _, with_scale = update(backend_of(), batch)
    _, without_scale = update(backend_of(scale=1.0), batch)
    assert relative_error(with_scale, exact) < 0.01
    assert relative_error(without_scale, exact) > 0.5


def test_gradients_are_clipped_after_they_are_unscaled() -> None:
    norms, sizes = [], []
    for scale in (1.0, 65536.0):
        norm, gradient = update(backend_of(scale=scale, max_grad_norm=0.1), random_batch(LENGTHS))
        norms.append(norm)
        sizes.append(float(gradient.norm()))
    assert norms[0] > 0.1
    assert norms == [pytest.approx(norms[0], rel=0.01)] * 2
    assert sizes == [pytest.approx(0.1, rel=1e-3)] * 2


def test_micro_batches_and_dummies_of_an_update_have_one_scale() -> None:
    batch = random_batch(LENGTHS)
    _, expected = update(backend_of(), batch)
    backend = backend_of()
    backend.forward_backward(replace(batch, dummy=True), LOSSES["sft"]())
    backend.forward_backward(with_weights(batch, 0.25), LOSSES["sft"]())
    _, gradient = update(backend, with_weights(batch, 0.75))
    assert relative_error(gradient, expected) < 0.01


def test_an_overflow_skips_the_update_and_halves_the_scale() -> None:
    backend = backend_of(scale=OVERFLOW)
    before = tensors_of(backend)
    norm, gradient = update(backend, random_batch(LENGTHS))
    assert not math.isfinite(norm)
    assert not len(gradient)
    assert backend.loss_scale == OVERFLOW / 2
    assert all(torch.equal(before[name], tensor) for name, tensor in tensors_of(backend).items())
    assert all(p.grad is None for p in backend.policy.model.parameters())


def test_skipped_updates_end_where_the_scale_fits_and_train_from_there() -> None:
    """The weights are then those of a run that began with this scale."""
    late = backend_of(scale=OVERFLOW, max_consecutive_skips=40)
    updates = 1
    while not math.isfinite(update(late, random_batch(LENGTHS))[0]):
        updates += 1
    assert late.loss_scale == OVERFLOW / 2 ** (updates - 1)
    early = backend_of(scale=late.loss_scale)
    update(early, random_batch(LENGTHS))
    assert early.digest() == late.digest()


def test_the_scale_doubles_after_updates_without_overflow() -> None:
    backend = backend_of(scale=1024.0, growth_interval=3)
    scales = []
    for seed in range(7):
        update(backend, random_batch(LENGTHS, seed))
        scales.append(backend.loss_scale)
    assert scales == [1024, 1024, 2048, 2048, 2048, 4096, 4096]


def test_too_many_skipped_updates_in_a_row_stop_the_run(wording: Wording) -> None:
    backend = backend_of(scale=OVERFLOW, max_consecutive_skips=3)
    before = backend.digest()
    for _ in range(2):
        update(backend, random_batch(LENGTHS))
    with pytest.raises(ContractError, match=r"3 updates in a row .*dtype bfloat16 or float32") as error:
        update(backend, random_batch(LENGTHS))
    wording(error.value)
    assert backend.digest() == before


def test_an_update_in_between_begins_the_count_anew() -> None:
    backend = backend_of(scale=65536.0, max_consecutive_skips=2)
    for overflows in (True, False, True, False):
        batch = random_batch(LENGTHS)
        norm, _ = update(backend, with_weights(batch, 1e9 if overflows else 1.0))
        assert math.isfinite(norm) != overflows


def test_gradients_that_are_not_finite_are_an_error_with_other_types() -> None:
    dtypes: tuple[Dtype, ...] = ("float32", "bfloat16")
    for dtype in dtypes:
        backend = backend_of(dtype)
        assert backend.loss_scale is None
        backend.forward_backward(random_batch(LENGTHS), LOSSES["sft"]())
        next(backend.policy.model.parameters()).grad[0] = float("inf")
        with pytest.raises(ContractError, match="norm is"):
            backend.optim_step(1e-3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_unscales_and_skips_as_a_cpu_does() -> None:
    """There AdamW is one fused kernel, which is not called for a skipped update."""
    batch = random_batch(LENGTHS)
    _, exact = update(backend_of("float32"), batch)
    backend = backend_of(device="cuda", scale=1024.0)
    norm, _ = update(backend, with_weights(batch, 1e9))
    assert not math.isfinite(norm)
    assert backend.get_local_optimizer_state() == {}
    _, gradient = update(backend, batch)
    assert relative_error(gradient.cpu(), exact) < 0.02
    assert backend.loss_scale == 512


def test_a_resumed_run_has_the_scale_of_the_undisturbed_one(tmp_path: Path) -> None:
    """Of the scale, of the updates since it changed, and of those skipped in a row."""
    options: dict[str, Any] = {"growth_interval": 2, "max_consecutive_skips": 3}
    original = backend_of(scale=2.0**12, **options)
    batches = [random_batch(LENGTHS, seed) for seed in (0, 2, 3, 4)]
    update(original, with_weights(batches[0], 1e9))
    update(original, batches[1])
    save_checkpoint(tmp_path / "growth", original, POSITION)
    second = backend_of(scale=8.0, **options)
    load_checkpoint(tmp_path / "growth", second)
    for backend in (original, second):
        update(backend, batches[2])
        assert backend.loss_scale == 2.0**12
    assert original.digest() == second.digest()
    for _ in range(2):
        update(original, with_weights(batches[3], 1e9))
    save_checkpoint(tmp_path / "skips", original, POSITION)
    third = backend_of(**options)
    load_checkpoint(tmp_path / "skips", third)
    assert third.loss_scale == original.loss_scale
    with pytest.raises(ContractError, match="3 updates in a row"):
        update(third, with_weights(batches[3], 1e9))


def test_a_checkpoint_of_another_type_leaves_the_scale_alone(tmp_path: Path) -> None:
    state = save_checkpoint(tmp_path / "c", backend_of("float32"), POSITION)
    assert state.loss_scale is None
    backend = backend_of(scale=512.0)
    load_checkpoint(tmp_path / "c", backend)
    assert backend.loss_scale == 512
