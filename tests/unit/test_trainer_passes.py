"""What an optimizer step computes before its gradient."""

from dataclasses import replace
from typing import Any

import pytest
import torch  # noqa: TID253 - a script that does nothing without it

from lake.errors import ContractError
from testkit.plans import plan_of
from testkit.rank_tasks import CENTRED, dummy_batch
from testkit.training import config, random_backend, random_batch, sequences_of
from trainer.backends.base import loss_rows, tensor_digest
from trainer.losses import LOSSES, LossRows
from trainer.runs.loop import fill_batches, find_proximal_period


class Counted:
    """A backend that counts its passes without gradient."""

    def __init__(self, seed: int = 0) -> None:
        self.backend = random_backend(seed)
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    def logprobs(self, batch: Any, **options: Any) -> Any:
        self.calls += 1
        return self.backend.logprobs(batch, **options)


def test_a_loss_without_needs_costs_no_pass() -> None:
    backend: Any = Counted()
    batches = sequences_of(random_batch([9, 4, 7]))
    filled, statistics = fill_batches(backend, None, config("ppo").loss, batches)
    assert [id(batch) for batch in filled] == [id(batch) for batch in batches]
    assert (backend.calls, dict(statistics)) == (0, {})


def test_reference_log_probabilities_are_the_frozen_models() -> None:
    settings = config("ppo", options={"kl": {"coefficient": 0.1}})
    loss = settings.loss
    assert loss.needs.reference_logprobs
    backend, reference = random_backend(), random_backend(seed=4)
    batches = sequences_of(random_batch([9, 4], temperature=0.7))
    filled, _ = fill_batches(backend, reference, loss, batches)
    for batch in filled:
        expected_N, _ = reference.policy.logprobs(batch)
        assert batch.reference_logprobs_N is not None
        assert torch.equal(batch.reference_logprobs_N, expected_N)
        assert not batch.reference_logprobs_N.requires_grad
        assert batch.proximal_logprobs_N is None


def test_statistics_are_of_the_whole_step_under_the_weights_at_its_start() -> None:
    """However it is cut, and with any dummies in it."""
    batch = random_batch([9, 4, 7])
    reference = random_backend(seed=4)
    lp_N = random_backend().logprobs(batch)
    expected = {"gap": float((2 * lp_N - reference.logprobs(batch)).sum()), "tokens": float(len(lp_N))}
    for batches in ([batch], sequences_of(batch), [*sequences_of(batch), dummy_batch()]):
        backend: Any = Counted()
        filled, statistics = fill_batches(backend, reference, CENTRED, batches)
        assert statistics == pytest.approx(expected, rel=1e-5)
        assert backend.calls == len(batches)
        assert all(part.proximal_logprobs_N is None for part in filled), "it is the policy itself"


def test_the_proximal_policy_is_the_copy_that_was_kept() -> None:
    """However the weights have moved since; statistics are of the weights as they are."""
    batch, reference = random_batch([9, 4, 7]), random_backend(seed=4)
    backend: Any = Counted()
    before_N = backend.backend.logprobs(batch)
    backend.keep_proximal()
    backend.forward_backward(batch, LOSSES["sft"]())
    backend.optim_step(1e-2)
    now_N = backend.backend.logprobs(batch)
    assert not torch.equal(now_N, before_N)
    (filled,), statistics = fill_batches(backend, reference, CENTRED, [batch], proximal=True)
    assert backend.calls == 2
    assert filled.proximal_logprobs_N is not None
    assert torch.equal(filled.proximal_logprobs_N, before_N)
    assert torch.equal(backend.backend.logprobs(batch), now_N), "the weights are back"
    gap = before_N - reference.logprobs(batch) + now_N
    assert statistics["gap"] == pytest.approx(float(gap.sum()), rel=1e-5)


def test_a_copy_that_was_never_kept_is_an_error() -> None:
    backend = random_backend()
    for _ in range(2):
        with pytest.raises(ContractError, match="no proximal policy"):
            fill_batches(backend, None, LOSSES["sft"](), [random_batch([9])], proximal=True)
        backend.keep_proximal()
        backend.drop_proximal()


def test_the_weights_come_back_from_a_pass_that_fails() -> None:
    backend = random_backend()
    backend.keep_proximal()
    backend.forward_backward(random_batch([9]), LOSSES["sft"]())
    backend.optim_step(1e-2)
    digest, copy = backend.digest(), dict(backend.proximal or {})
    with pytest.raises(AttributeError), backend.use_proximal():
        backend.logprobs(None)  # type: ignore[arg-type]
    assert backend.digest() == digest
    assert tensor_digest(copy) == tensor_digest(random_backend().get_weights())


@pytest.mark.parametrize(
    ("fields", "period"),
    [
        ({}, 4),
        ({"proximal_every": 1}, 1),
        ({"proximal_every": 7}, 7),
    ],
)
def test_how_long_a_proximal_policy_stays(fields: dict[str, int], period: int) -> None:
    decoupled = {"correction": {"method": "token_truncate", "decoupled": True, **fields}}
    episodes = {number: [[(3, True)]] for number in range(10)}
    for minibatches, expected in ((None, period), (3, fields.get("proximal_every", 3)), (99, period if fields else 10)):
        settings = config("ppo", options=decoupled, minibatches=minibatches, epochs=2)
        assert find_proximal_period(settings.loss, settings, plan_of(episodes, minibatches=minibatches)) == expected
    plain = config("ppo", minibatches=3)
    assert find_proximal_period(plain.loss, plain, plan_of(episodes)) == 1


def test_a_rank_of_dummies_adds_nothing() -> None:
    _, statistics = fill_batches(random_backend(), random_backend(), CENTRED, [dummy_batch()])
    assert statistics == {}


def test_without_log_probabilities_of_its_own_the_proximal_policy_is_the_policy_itself() -> None:
    batch = random_batch([9])
    lp_N = random_backend().policy.logprobs(batch)[0]
    proximal_N = loss_rows(batch, CENTRED, lp_N, None).proximal_logprobs_N
    assert proximal_N is not None
    assert torch.equal(proximal_N, lp_N)
    assert not proximal_N.requires_grad
    assert loss_rows(batch, LOSSES["ppo"](), lp_N, None).proximal_logprobs_N is None
    stored_N = torch.zeros(len(lp_N))
    assert loss_rows(replace(batch, proximal_logprobs_N=stored_N), CENTRED, lp_N, None).proximal_logprobs_N is stored_N


def test_a_loss_sees_every_tensor_of_its_batch() -> None:
    batch = random_batch([9, 5])
    size = len(batch.target_N)
    full = replace(
        batch,
        unit_N=torch.zeros(size, dtype=torch.int64),
        weight_U=torch.ones(1),
        step_index_N=torch.zeros(size, dtype=torch.int32),
        staleness_N=torch.ones(size),
        reference_logprobs_N=torch.zeros(size),
    )
    rows = loss_rows(full, LOSSES["sft"](), torch.zeros(size), torch.ones(size), {"z": 2.0})
    names = {"weight_N", "advantages_N", "behaviour_logprobs_N", "unit_N", "weight_U", "step_index_N", "staleness_N"}
    for name in names | {"reference_logprobs_N"}:
        assert getattr(rows, name) is getattr(full, name), name
    assert rows.statistics == {"z": 2.0}
    assert isinstance(rows, LossRows)


def test_a_dummy_gives_a_gradient_of_zero_and_no_sums() -> None:
    backend = random_backend()
    assert backend.forward_backward(dummy_batch(), LOSSES["sft"]()) == {}
    for parameter in backend.policy.model.parameters():
        assert parameter.grad is not None
        assert not parameter.grad.any()
