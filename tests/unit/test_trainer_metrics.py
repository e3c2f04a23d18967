"""Metrics: the outcome of sums over a whole optimizer step, and a meaning for every name."""

import pytest

from lake.read.training import METRICS
from testkit.loss_rows import evaluate, random_rows
from testkit.training import random_backend, random_batch
from trainer.losses import LOSSES
from trainer.runs.loop import TOTALS, build_metric_rows, compute_metrics


def test_sums_become_token_means() -> None:
    assert compute_metrics({"ratio": 3.0, "entropy": 6.0}, 4) == {"ratio": 0.75, "entropy": 1.5}


def test_squares_become_the_effective_sample_size() -> None:
    weights = [1.0, 2.0, 3.0]
    metrics = compute_metrics({"weight": sum(weights), "weight_squared": sum(w * w for w in weights)}, 3)
    assert metrics["weight_ess"] == pytest.approx(36 / 14 / 3)
    assert compute_metrics({"weight": 0.0, "weight_squared": 0.0}, 3)["weight_ess"] == 0.0


def test_a_sum_over_another_is_its_mean_and_nothing_where_there_is_nothing_to_average() -> None:
    sums = {"staleness_0": 2.0, "x/staleness_0": 3.0, "staleness_1": 0.0, "y/staleness_1": 0.0}
    assert compute_metrics(sums, 8) == {"staleness_0": 0.25, "x": 1.5, "staleness_1": 0.0}


def test_the_loss_and_counts_of_pairs_are_not_divided() -> None:
    metrics = compute_metrics({"loss": 0.5, "pairs": 3.0, "accuracy/pairs": 2.0}, 100)
    assert metrics == {"loss": 0.5, "pairs": 3.0, "accuracy": pytest.approx(2 / 3)}
    assert set(METRICS) >= TOTALS


EVERYTHING = {
    "correction": {"method": "icepop", "decoupled": True},
    "kl": {"coefficient": 0.1},
}


@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_every_metric_of_every_loss_is_documented(loss: str) -> None:
    options = EVERYTHING if loss in {"ppo", "grpo", "dr_grpo", "dapo", "gspo", "cispo"} else None
    sums = evaluate(loss, random_rows(4), options).sums
    metrics = compute_metrics({name: float(value) for name, value in sums.items()}, 10)
    assert set(metrics) <= set(METRICS)
    assert not any(value.requires_grad for value in sums.values())


def test_what_a_backend_reports_is_documented() -> None:
    sums = random_backend().forward_backward(random_batch([20]), LOSSES["ppo"]())
    assert {"loss", "logprob", "entropy"} <= set(sums)
    assert set(compute_metrics({name: float(value) for name, value in sums.items()}, 10)) <= set(METRICS)


def test_rows_are_one_per_step_and_metric() -> None:
    frame = build_metric_rows([(4, {"loss": 1.0, "ratio": 2.0}), (5, {"loss": 3.0})])
    assert frame.select("step", "name", "value").rows() == [(4, "loss", 1.0), (4, "ratio", 2.0), (5, "loss", 3.0)]
