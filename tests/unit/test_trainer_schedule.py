"""The learning rate is a pure function of the step with the promised shape."""

import pytest

from trainer.config import ScheduleConfig
from trainer.losses.cispo import CISPO
from trainer.losses.gspo import GSPO
from trainer.losses.ppo import PPO
from trainer.losses.sft import SFT
from trainer.runs.factories import default_learning_rate, learning_rate


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
    sizes = [10_000, 1_000_000, 30_000_000, 300_000_000, 8_000_000_000]
    assert [default_learning_rate(size, SFT()) for size in sizes] == [3e-3, 1e-3, 1e-4, 1e-5, 1e-5]
    for loss in (PPO(), GSPO(), CISPO()):
        assert [default_learning_rate(size, loss) for size in sizes] == [3e-4, 3e-4, 1e-4, 1e-5, 1e-5]
