"""Episode-level RLOO over multi-turn trajectories, from stored episodes to the gradient, against the definition.

Leave-one-out baselines over the group; per episode the sum of its action tokens' log-probabilities over all turns times
its advantage; the mean over the episodes of the optimizer step.
"""

from pathlib import Path

import torch  # noqa: TID253 - a script that does nothing without it

from lake.judgements.credit import find_credit
from lake.records import EpisodeRecord
from pipelines.credit.estimators import ESTIMATORS
from pipelines.credit.job import run_credit
from testkit.training import config, gradients, random_backend, random_model, token_episodes, token_lake
from trainer.data.plan import Plan
from trainer.data.selection import select
from trainer.data.stream import Stream


def slow_gradient(groups: list[list[EpisodeRecord]]) -> dict[str, torch.Tensor]:
    """Full logits, one episode at a time."""
    model = random_model()
    losses = []
    for group in groups:
        returns = [float(episode.env_return or 0.0) for episode in group]
        for number, episode in enumerate(group):
            other_returns = returns[:number] + returns[number + 1 :]
            advantage = returns[number] - sum(other_returns) / len(other_returns)
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
            losses.append(-advantage * torch.stack([logprobs[at, token] for at, token in targets]).sum())
    torch.stack(losses).mean().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_it_is_the_mean_over_episodes_of_advantage_times_log_probability(tmp_path: Path) -> None:
    episodes = token_episodes(tasks=2, siblings=4)
    episodes[1].env_return = episodes[1].steps[-1].reward = 0.25
    lk = token_lake(tmp_path, episodes)
    run_credit(lk, ESTIMATORS["rloo"](), force=True)
    # Without a correction, so that the random behaviour log-probabilities stay out of it; dead groups count too.
    options = {"correction": {"method": "none"}}
    settings = config("reinforce", options=options, minibatches=1, live_only=False, token_budget=60)
    loss, snapshot = settings.loss, lk.snapshot()
    plan = Plan(select(snapshot, settings, loss.needs, source=find_credit(snapshot, None)), settings)
    backend = random_backend()
    with Stream(snapshot, plan, loss.needs, settings) as stream:
        ((_, batches),) = list(stream.steps())
        assert len(batches) > 1
        for batch in batches:
            backend.forward_backward(batch, loss)
    actual, expected = gradients(backend), slow_gradient([episodes[:4], episodes[4:]])
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, atol=1e-5, rtol=1e-3, msg=name)
