"""What training means here, in eight rules. A test that fails is a change of meaning: do not fix the test.

1. Only tokens that the trained policy sampled carry loss; everything else is context.
2. An optimizer step's loss is the sum over its trained tokens divided by their number in the whole step.
3. Cutting a step into other micro-batches does not change its gradient.
4. Two sequences in one buffer do not see each other.
5. An action is predicted from everything before it in its sequence, from nothing after it.
6. An unknown advantage is not 0: the step carries no loss and does not count in the denominator.
7. A dead group counts for nothing, not even in the denominator, unless it is asked for.
8. A ratio is taken at the temperature that the step was sampled at.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch  # noqa: TID253 - a script that does nothing without it

from lake import Lake
from lake.judgements.credit import find_credit
from lake.records import EpisodeRecord
from testkit.examples import mostly_slow, mostly_slow_cases
from testkit.lakes import add_credit
from testkit.training import config, gradients, random_backend, random_model, token_episodes, token_lake, token_step
from trainer.data.plan import Plan
from trainer.data.selection import select
from trainer.data.stream import Stream


def steps_of(lk: Lake, loss: str, **fields: Any) -> tuple[Plan, list[tuple[Any, list[Any]]]]:
    snapshot = lk.snapshot()
    settings = config(loss, **fields)
    needs = settings.loss.needs
    source = find_credit(snapshot, None) if needs.advantages else None
    plan = Plan(select(snapshot, settings, needs, source=source), settings)
    with Stream(snapshot, plan, needs, settings) as stream:
        return plan, list(stream.steps())


def gradient_of(lk: Lake, loss: str, **fields: Any) -> dict[str, torch.Tensor]:
    """Gradient of the first optimizer step, through the whole chain."""
    _, steps = steps_of(lk, loss, **fields)
    _, batches = steps[0]
    backend = random_backend()
    for batch in batches:
        backend.forward_backward(batch, config(loss, **fields).loss)
    return gradients(backend)


def slow_sft_gradient(episodes: list[EpisodeRecord]) -> dict[str, torch.Tensor]:
    """Rules 1, 2, 4 and 5 written out: full logits, one episode at a time, one mean over all sampled tokens."""
    model = random_model()
    losses = []
    for episode in episodes:
        ids: list[int] = []
        targets = []
        for step in episode.steps:
            tokens = step.tokens
            assert tokens is not None
            ids += tokens.context_ids
            for token in tokens.action_ids:
                targets.append((len(ids) - 1, token))
                ids.append(token)
        logprobs = model(torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)
        losses += [-logprobs[at, token] for at, token in targets]
    torch.stack(losses).mean().backward()
    return {name: p.grad for name, p in model.named_parameters()}


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, atol=1e-5, rtol=1e-3, msg=name)


def test_rules_1_2_4_5_the_gradient_is_that_of_the_plain_mean_over_sampled_tokens(tmp_path: Path) -> None:
    episodes = token_episodes(tasks=3)
    lk = token_lake(tmp_path, episodes)
    assert_same(gradient_of(lk, "sft", minibatches=1), slow_sft_gradient(episodes))


CUT = [(loss, budget) for loss in ("sft", "awr", "ppo") for budget in (1, 37, 150)]


@pytest.mark.parametrize(("loss", "token_budget"), mostly_slow_cases(CUT, ("sft", 1), ("ppo", 37)))
def test_rule_3_micro_batches_do_not_matter(tmp_path: Path, loss: str, token_budget: int) -> None:
    lk = token_lake(tmp_path, token_episodes(tasks=4))
    add_credit(lk)
    first, second = (gradient_of(lk, loss, minibatches=2, token_budget=budget) for budget in (100_000, token_budget))
    for name, gradient in first.items():
        torch.testing.assert_close(second[name], gradient, atol=1e-6, rtol=1e-3, msg=name)


def test_rule_6_an_unknown_advantage_does_not_count(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    episodes = token_episodes(tasks=1, siblings=2, max_steps=1)
    for episode in episodes:
        outcome = episode.env_return
        episode.steps = [token_step(rng, 3, 2, step={"reward": r}) for r in (0.0, None, outcome)]
    lk = token_lake(tmp_path, episodes)
    add_credit(lk)
    plan, steps = steps_of(lk, "awr", minibatches=1)
    ((step, batches),) = steps
    assert step.loss_tokens == 4
    assert sum(len(batch.target_N) for batch in batches) == 4
    assert plan.tokens == 30, "the tokens of the other steps stay as context"


def test_rule_7_a_dead_group_counts_for_nothing_unless_asked_for(tmp_path: Path) -> None:
    episodes = token_episodes(tasks=2)
    mixed = token_lake(tmp_path / "mixed", episodes[:4])
    joint_lake = token_lake(tmp_path / "both", episodes)
    for lk in (mixed, joint_lake):
        add_credit(lk)
    assert_same(gradient_of(joint_lake, "ppo", minibatches=1), gradient_of(mixed, "ppo", minibatches=1))
    all_groups = gradient_of(joint_lake, "ppo", minibatches=1, live_only=False)
    alone = gradient_of(mixed, "ppo", minibatches=1)
    norms = [sum(float(g.square().sum()) for g in grads.values()) for grads in (all_groups, alone)]
    assert norms[0] < 0.9 * norms[1], "zero advantages in the denominator shrink the step"


@pytest.mark.parametrize("temperature", mostly_slow([0.5, 1.0, 2.0], 0.5))
def test_rule_8_the_ratio_is_one_at_the_sampling_temperature(tmp_path: Path, temperature: float) -> None:
    episodes = token_episodes(tasks=2)
    model = random_model()
    for episode in episodes:
        ids: list[int] = []
        for step in episode.steps:
            tokens = step.tokens
            assert tokens is not None
            start = len(ids) + len(tokens.context_ids)
            ids += tokens.context_ids + tokens.action_ids
            with torch.inference_mode():
                logprobs = (model(torch.tensor([ids])).logits[0] / temperature).log_softmax(-1)
            tokens.temperature = temperature
            tokens.action_logprobs = [float(logprobs[start - 1 + n, t]) for n, t in enumerate(tokens.action_ids)]
    lk = token_lake(tmp_path, episodes)
    add_credit(lk)
    _, steps = steps_of(lk, "ppo", minibatches=1)
    backend = random_backend()
    for _, batches in steps:
        for batch in batches:
            logprobs_N, _ = backend.policy.logprobs(batch)
            assert batch.behaviour_logprobs_N is not None
            torch.testing.assert_close(logprobs_N.detach(), batch.behaviour_logprobs_N, atol=1e-4, rtol=0)
    _, likelihood = steps_of(lk, "sft")
    assert all(batch.temperature_N is None for _, batches in likelihood for batch in batches), "likelihoods: T = 1"
