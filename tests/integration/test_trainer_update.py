"""The update phase of an online loop: PPO on engine tokens of one credit job."""

from pathlib import Path
from typing import Any

import polars as pl
import pytest

from lake.errors import DataRefusedError
from lake.judgements.credit import find_credit
from lake.records import EpisodeRecord
from testkit.lakes import add_credit
from testkit.training import (
    config,
    gradients,
    random_backend,
    random_model,
    token_episodes,
    token_lake,
)
from trainer.backends.base import tensor_digest
from trainer.config import TrainConfig
from trainer.data.plan import Plan
from trainer.data.selection import select
from trainer.data.stream import Stream
from trainer.losses import LOSSES
from trainer.runs.loop import Update, train_round


def settings(**fields: Any) -> TrainConfig:
    return config(
        "ppo", **({"epochs": 2, "minibatches": 4, "schedule": {"shape": "constant", "warmup_fraction": 0}} | fields)
    )


def scored(episodes: list[EpisodeRecord], seed: int = 0) -> list[EpisodeRecord]:
    """The episodes with the log-probabilities that the random model gives their tokens."""
    import torch

    model = random_model(seed)
    for episode in episodes:
        sequence: list[int] = []
        for step in episode.steps:
            tokens = step.tokens
            assert tokens is not None
            sequence += tokens.context_ids + tokens.action_ids
            with torch.inference_mode():
                logprobs = model(torch.tensor([sequence])).logits[0].log_softmax(-1)
            start = len(sequence) - len(tokens.action_ids)
            tokens.action_logprobs = [float(logprobs[start - 1 + n, i]) for n, i in enumerate(tokens.action_ids)]
    return episodes


def run(lk: Any, backend: Any, **fields: Any) -> Update:
    snapshot = lk.snapshot()
    return train_round(backend, snapshot, find_credit(snapshot, None), settings(**fields), learning_rate=1e-3)


def test_on_policy_the_first_minibatch_has_ratio_one(tmp_path: Path) -> None:
    lk = token_lake(tmp_path, scored(token_episodes()))
    add_credit(lk)
    done = run(lk, random_backend())
    first = done.reports[0].metrics
    assert first["ratio"] == pytest.approx(1, abs=1e-5)
    assert first["kl_k3"] == pytest.approx(0, abs=1e-6)
    assert (first["clipped_high"], first["clipped_low"]) == (0, 0)
    assert len(done.reports) == 8
    assert done.reports[-1].metrics["kl_k3"] > 0


def test_on_policy_the_gradient_is_that_of_reinforce(tmp_path: Path) -> None:
    """Through the whole chain: lake, plan, stream, model, loss."""
    lk = token_lake(tmp_path, scored(token_episodes()))
    add_credit(lk)
    snapshot = lk.snapshot()
    options = settings(minibatches=1, epochs=1)
    needs = LOSSES["ppo"]().needs
    plan = Plan(select(snapshot, options, needs, source=find_credit(snapshot, None)), options)
    backend = random_backend()
    with Stream(snapshot, plan, needs, options) as stream:
        ((step, batches),) = stream.steps()
    for batch in batches:
        backend.forward_backward(batch, options.loss)
    actual = gradients(backend)
    for batch in batches:
        logprobs_N, _ = backend.policy.logprobs(batch)
        assert batch.advantages_N is not None
        (-(batch.advantages_N * logprobs_N).sum() / step.loss_tokens).backward()
    for name, gradient in gradients(backend).items():
        assert (actual[name] - gradient).abs().max() < 1e-6, name


def test_it_makes_good_actions_likelier_and_bad_ones_rarer(tmp_path: Path) -> None:
    lk = token_lake(tmp_path, scored(token_episodes(tasks=2, siblings=8, max_steps=2)))
    add_credit(lk)
    backend = random_backend()
    for _ in range(2):
        done = run(lk, backend, epochs=2)
    rows = done.selection.members.filter(pl.col("trained"))
    snapshot = lk.snapshot()
    options = settings(minibatches=1, epochs=1)
    plan = Plan(done.selection, options)
    change = {True: 0.0, False: 0.0}
    with Stream(snapshot, plan, LOSSES["ppo"]().needs, options) as stream:
        for _, batches in stream.steps():
            for batch in batches:
                assert batch.advantages_N is not None
                assert batch.behaviour_logprobs_N is not None
                moved_N = backend.policy.logprobs(batch)[0].detach() - batch.behaviour_logprobs_N
                for good in change:
                    change[good] += float(moved_N[(batch.advantages_N > 0) == good].sum())
    assert rows.height > 0
    assert change[True] > 0 > change[False]


def test_rows_for_the_lake_count_through(tmp_path: Path) -> None:
    lk = token_lake(tmp_path)
    add_credit(lk)
    snapshot = lk.snapshot()
    backend = random_backend()
    with lk.job(kind="train", run_id="online") as job:
        for phase in range(2):
            source = find_credit(snapshot, None)
            done = train_round(
                backend, snapshot, source, settings(seed=phase), learning_rate=1e-3, first_step=8 * phase
            )
            job.write("batches", done.batches)
            job.write("metrics", done.metrics)
    steps = lk.sql("SELECT DISTINCT optimizer_step AS s FROM trained_batches ORDER BY s")["s"].to_list()
    assert steps == list(range(16))
    assert lk.sql("SELECT count(DISTINCT step) AS n FROM run_metrics WHERE name = 'ratio'")["n"][0] == 16


def test_only_episodes_with_credit_are_trained(tmp_path: Path) -> None:
    lk = token_lake(tmp_path, token_episodes(tasks=2))
    add_credit(lk)
    snapshot = lk.snapshot()
    covered = set(snapshot.scan("episodes").collect()["episode_id"])
    source = find_credit(snapshot, None)
    token_lake(tmp_path, token_episodes(tasks=4)[8:])
    assert lk.sql("SELECT count(*) AS n FROM episodes")["n"][0] == 16
    done = train_round(random_backend(), lk.snapshot(), source, settings(), learning_rate=1e-3)
    assert set(done.selection.members["episode_id"]) <= covered
    assert done.selection.drops.filter(reason="no_advantage")["episodes"].item() == 8


def test_moments_carry_over_between_phases(tmp_path: Path) -> None:
    """Two phases on one backend differ from two phases with a fresh optimizer between them."""
    lk = token_lake(tmp_path)
    add_credit(lk)
    unchanged_backend = random_backend()
    run(lk, unchanged_backend)
    fresh = random_backend()
    fresh.load_weights(unchanged_backend.get_weights())
    digests = []
    for backend in (unchanged_backend, fresh):
        run(lk, backend)
        digests.append(tensor_digest(backend.get_weights()))
    assert digests[0] != digests[1]


def test_data_that_cannot_support_a_ratio_is_refused(tmp_path: Path) -> None:
    episodes = token_episodes()
    tokens = episodes[1].steps[0].tokens
    assert tokens is not None
    tokens.temperature = 0.0
    lk = token_lake(tmp_path, episodes)
    add_credit(lk)
    with pytest.raises(DataRefusedError, match="greedily"):
        run(lk, random_backend())
