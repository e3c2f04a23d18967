"""The learning rate is a pure function of the step with the promised shape."""

import pytest

from trainer.config import ScheduleConfig, TrainConfig
from trainer.runs.factories import learning_rate, peak_learning_rate


def rates(total: int, **options: object) -> list[float]:
    return [learning_rate(step, total, 2.0, ScheduleConfig(**options)) for step in range(total)]  # type: ignore[arg-type]


def test_warm_up_rises_linearly_to_the_peak_from_above_zero() -> None:
    rates_N = rates(100, warmup_fraction=0.1, shape="constant")
    assert rates_N[:10] == pytest.approx([2.0 * (step + 1) / 11 for step in range(10)])
    assert rates_N[10:] == [2.0] * 90


@pytest.mark.parametrize("shape", ["cosine", "linear"])
def test_it_falls_from_the_peak_to_its_final_share_at_the_last_step(shape: str) -> None:
    rates_N = rates(50, shape=shape, warmup_fraction=0.1, final_fraction=0.2)
    falling = rates_N[5:]
    assert falling[0] == pytest.approx(2.0)
    assert falling == sorted(falling, reverse=True)
    assert falling[-1] == pytest.approx(0.4)


def test_halfway_cosine_and_linear_meet() -> None:
    options = {"warmup_fraction": 0.0, "final_fraction": 0.0}
    assert rates(11, shape="cosine", **options)[5] == pytest.approx(rates(11, shape="linear", **options)[5])


@pytest.mark.parametrize("shape", ["cosine", "linear", "constant"])
def test_a_run_of_one_step_trains_at_the_peak(shape: str) -> None:
    assert rates(1, shape=shape, warmup_fraction=0.0) == [2.0]


def test_default_falls_with_size_and_is_lower_for_a_loss_with_ratios() -> None:
    def peaks(loss: str, rate: float | None = None) -> list[float]:
        config = TrainConfig(model="model", loss=loss, learning_rate=rate)
        return [peak_learning_rate(config, size) for size in (10_000, 1_000_000, 30_000_000, 300_000_000, 10**10)]

    assert peaks("sft") == [3e-3, 1e-3, 1e-4, 1e-5, 1e-5]
    for loss in ("ppo", "gspo", "cispo"):
        assert peaks(loss) == [3e-4, 3e-4, 1e-4, 1e-5, 1e-5]
    assert peaks("ppo", 2e-3) == [2e-3] * 5
