"""Every loss from stored tokens to gradients: how a step is cut and spread over ranks does not matter, nor do dummies.

The whole chain of the loop on a random model: selection, plan, stream, first pass, loss. Losses on pairs and labels
need their own data and are checked with the data.
"""

import math
from typing import Any

import pytest
import torch  # noqa: TID253 - a script that does nothing without it

from lake import Lake
from lake.judgements.credit import find_credit
from lake.read.training import METRICS
from testkit.examples import mostly_slow_cases
from testkit.lakes import add_credit
from testkit.training import config, gradients, random_backend, random_model, token_episodes, token_lake
from trainer.backends.base import FrozenPolicy
from trainer.data.plan import Plan
from trainer.data.selection import select
from trainer.data.stream import Stream
from trainer.policy.model import PackedPolicy
from trainer.runs.loop import fill_batches, run_steps

LOSSES: list[tuple[str, dict[str, Any]]] = [
    ("reinforce", {}),
    ("reinforce", {"correction": {"method": "sequence_truncate", "normalise": True}}),
    ("grpo", {"kl": {"coefficient": 0.1}}),
    ("dr_grpo", {}),
    ("ppo", {"correction": {"method": "sequence_mask", "high": 1e6}}),
    ("dapo", {"correction": {"method": "token_truncate", "decoupled": True, "normalise": True}}),
    ("gspo", {"clip_low": 0.9, "clip_high": 9.0}),
    ("cispo", {}),
    ("dro", {"entropy_coefficient": 0.01}),
    ("bc_exp", {}),
]


def gradient(
    lk: Lake, loss_name: str, options: dict[str, Any], world_size: int, **fields: Any
) -> dict[str, torch.Tensor]:
    """Gradient of the first optimizer step; ranks one after the other, their statistics those of all."""
    settings = config(loss_name, options, minibatches=2, **fields)
    loss = settings.loss
    snapshot = lk.snapshot()
    plan = Plan(select(snapshot, settings, loss.needs, source=find_credit(snapshot, None)), settings)
    reference = FrozenPolicy(PackedPolicy(random_model(seed=7)))
    backend = random_backend()
    of_all_ranks = []
    for rank in range(world_size):
        with Stream(snapshot, plan, loss.needs, settings, rank=rank, world_size=world_size) as stream:
            _, batches = next(stream.steps())
            of_all_ranks += batches
    filled, statistics = fill_batches(backend, reference, loss, of_all_ranks)
    for batch in filled:
        backend.forward_backward(batch, loss, statistics)
    return gradients(backend)


@pytest.fixture(scope="module")
def lk(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    lk = token_lake(tmp_path_factory.mktemp("lake"), token_episodes(tasks=3))
    add_credit(lk)
    return lk


@pytest.mark.parametrize(("name", "options"), mostly_slow_cases(LOSSES, *(LOSSES[at] for at in (1, 2, 5, 6, 8))))
def test_cuts_and_ranks_do_not_matter(lk: Lake, name: str, options: dict[str, Any]) -> None:
    undivided = gradient(lk, name, options, 1, token_budget=100_000)
    assert max(float(tensor.abs().max()) for tensor in undivided.values()) > 1e-4
    gradients_cut = gradient(lk, name, options, 7, token_budget=40)
    for parameter, tensor in undivided.items():
        torch.testing.assert_close(gradients_cut[parameter], tensor, atol=1e-6, rtol=1e-3, msg=parameter)


@pytest.mark.parametrize(("name", "options"), [("sft", {}), ("awr", {}), *LOSSES])
def test_every_loss_trains_and_reports_what_is_documented(lk: Lake, name: str, options: dict[str, Any]) -> None:
    settings = config(name, options, episodes_per_step=4)
    snapshot, needs = lk.snapshot(), settings.loss.needs
    plan = Plan(select(snapshot, settings, needs, source=find_credit(snapshot, None)), settings)
    backend = random_backend()
    before = backend.digest()
    reference = FrozenPolicy(PackedPolicy(random_model(seed=7)))
    reports = list(run_steps(backend, snapshot, plan, settings, peak=1e-3, reference=reference))
    assert len(reports) == len(plan.steps) > 1
    assert backend.digest() != before
    for report in reports:
        assert set(report.metrics) <= set(METRICS)
        assert all(math.isfinite(value) for value in report.metrics.values())
        assert ("kl_reference" in report.metrics) == ("kl" in options)
        assert ("ratio_ess" in report.metrics) == needs.behaviour_logprobs
        assert ("correction_weight" in report.metrics) == (name == "reinforce" or "correction" in options)
