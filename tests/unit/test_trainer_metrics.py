"""Metrics: means over the whole optimizer step, and a log that survives a kill."""

import pytest

from testkit.training import config, random_backend, random_batch
from trainer.losses import LOSSES
from trainer.metrics import METRICS, from_sums, metrics_frame


def test_sums_become_token_means() -> None:
    assert from_sums({"loss": 6.0, "ratio": 3.0}, 4) == {"loss": 1.5, "ratio": 0.75}


def test_squares_become_the_effective_sample_size() -> None:
    weights = [1.0, 2.0, 3.0]
    found = from_sums({"weight": sum(weights), "weight_squared": sum(w * w for w in weights)}, 3)
    assert found["weight_ess"] == pytest.approx(36 / 14 / 3)
    assert from_sums({"weight": 0.0, "weight_squared": 0.0}, 3)["weight_ess"] == 0.0


@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_every_metric_of_every_loss_is_documented(loss: str) -> None:
    batch = random_batch([20])
    sums = random_backend().forward_backward(batch, LOSSES[loss], config(loss)).result()
    assert set(from_sums({name: float(value) for name, value in sums.items()}, 10)) <= set(METRICS)


def test_rows_are_one_per_step_and_metric() -> None:
    frame = metrics_frame([(4, {"loss": 1.0, "ratio": 2.0}), (5, {"loss": 3.0})])
    assert frame.select("step", "name", "value").rows() == [(4, "loss", 1.0), (4, "ratio", 2.0), (5, "loss", 3.0)]
