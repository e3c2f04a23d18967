"""Alarms: when they begin, when they are silent, what they say about data."""

from typing import cast

import pytest

from lake.read.snapshot import Snapshot
from trainer.config import AlarmConfig
from trainer.monitor import Alarms


def test_an_alarm_is_told_once_until_it_has_recovered() -> None:
    alarms = Alarms(AlarmConfig(entropy=0.1, entropy_share=None, entropy_rise=None))
    messages = [alarms.check({"entropy": value}) for value in (1.0, 0.05, 0.04, 0.5, 0.05)]
    assert [len(sentences) for sentences in messages] == [0, 1, 0, 0, 1]
    assert "entropy 0.05 nats, below 0.1" in messages[1][0]
    assert alarms.active == {"entropy"}


def test_entropy_is_compared_with_the_first_update() -> None:
    alarms = Alarms(AlarmConfig(entropy=None, entropy_share=0.5))
    assert alarms.check({"entropy": 2.0}) == []
    assert alarms.check({"entropy": 1.01}) == []
    assert len(alarms.check({"entropy": 0.99})) == 1


def test_a_rise_is_compared_with_the_lowest_so_far_and_noise_of_a_certain_policy_is_none() -> None:
    alarms = Alarms(AlarmConfig(entropy=None, entropy_share=None))
    messages = [alarms.check({"entropy": value}) for value in (0.7, 0.29, 0.57, 0.73, float("nan"), 0.5)]
    assert [len(sentences) for sentences in messages] == [0, 0, 0, 1, 0, 0]
    assert "0.73" in messages[3][0]
    assert "(0.29)" in messages[3][0]
    resumed = Alarms(AlarmConfig(entropy=None, entropy_share=None), alarms.figures)
    assert len(resumed.check({"entropy": 0.6})) == 1
    certain = Alarms(AlarmConfig(entropy=None, entropy_share=None))
    assert [certain.check({"entropy": value}) for value in (0.01, 0.19)] == [[], []]


def ratios(outside: float, change: float) -> dict[str, float]:
    """Return the metrics of the ratios to the policy that sampled the rollouts."""
    return {"outside_half_two": outside, "log_ratio_abs": change}


# The figures of both tests are those of Taxi's pilots in docs/lab-log.md.
def test_a_jump_is_a_rise_since_the_first_update_on_the_rollouts() -> None:
    healthy, jumping = (0.0, 0.080, 0.032, 0.026), (0.0, 0.205, 0.213, 0.234)
    for shares, expected in ((healthy, [0, 0, 0, 0]), (jumping, [0, 1, 0, 0])):
        alarms = Alarms(AlarmConfig())
        messages = [alarms.check(ratios(share, 0.4), index) for index, share in enumerate(shares)]
        assert [len(sentences) for sentences in messages] == expected
    assert all(figure in messages[1][0] for figure in ("20%", "15%", "lower --lr"))
    stale = Alarms(AlarmConfig())
    assert [stale.check(ratios(share, 0.4), index) for index, share in enumerate((0.3, 0.44))] == [[], []]
    assert len(Alarms(AlarmConfig(), stale.figures).check(ratios(0.46, 0.4), 2)) == 1


def test_a_policy_stands_still_if_none_of_eight_updates_after_the_first_of_a_round_moved_it() -> None:
    still, moving = (2.6e-7, 0.0016, 0.0026, 0.0035), (2.6e-7, 0.012, 0.020, 0.030)
    for changes, expected in ((still, [0] * 10 + [1, 0]), (moving, [0] * 12)):
        alarms = Alarms(AlarmConfig())
        messages = [alarms.check(ratios(0.0, changes[number % 4]), number % 4) for number in range(12)]
        assert [len(sentences) for sentences in messages] == expected
        assert ("policy_standstill" in alarms.active) == (1 in expected)
        if 1 in expected:
            assert all(figure in messages[10][0] for figure in ("0.0035", " 8 ", "0.005", "raise --lr"))
            assert alarms.check(ratios(0.0, 2.6e-7), 0) == []


def test_one_update_a_round_says_nothing_of_how_far_the_policy_moves() -> None:
    alarms = Alarms(AlarmConfig())
    assert [alarms.check(ratios(0.0, 2.6e-7)) for _ in range(20)] == [[]] * 20


def test_of_two_floors_the_higher_one_counts() -> None:
    for floor, share in ((0.1, 0.5), (1.0, 0.05)):
        alarms = Alarms(AlarmConfig(entropy=floor, entropy_share=share))
        assert alarms.check({"entropy": 2.0}) == []
        assert len(alarms.check({"entropy": 0.5})) == 1


def test_any_effective_sample_size_is_looked_at() -> None:
    alarms = Alarms(AlarmConfig(effective_sample_size=0.2))
    first_alarms = alarms.check({"ratio_ess": 0.1, "weight_ess": 0.3, "loss": 0.0})
    assert len(first_alarms) == 1
    assert first_alarms[0].startswith("ratio_ess 0.1, below 0.2")


def test_none_switches_an_alarm_off() -> None:
    alarms = Alarms(AlarmConfig.model_validate(dict.fromkeys(AlarmConfig.model_fields)))
    rows = [{"entropy": value, "ratio_ess": 0.0, **ratios(value / 9, 0.0)} for value in [0.0, *[9.0] * 9]]
    assert [alarms.check(row, index) for index, row in enumerate(rows)] == [[]] * 10


def test_losses_without_entropy_raise_no_alarm() -> None:
    assert Alarms(AlarmConfig()).check({"loss": 1.0}) == []


NO_LAKE = cast("Snapshot", None)
"""Without credit no lake is read."""


@pytest.mark.parametrize(("dead", "expected"), [(9, 1), (8, 0), (0, 0)])
def test_dead_groups_are_told_before_the_next_update(dead: int, expected: int) -> None:
    sentences = Alarms(AlarmConfig(dead_groups=0.8)).check_data(NO_LAKE, None, dead, 10)
    assert len(sentences) == expected
    assert all(f"{dead} of 10 groups are dead" in sentence for sentence in sentences)


def test_a_run_without_advantages_has_no_groups() -> None:
    assert Alarms(AlarmConfig()).check_data(NO_LAKE, None, None, None) == []


def test_an_alarm_of_the_data_lasts_until_the_data_recover_whatever_the_updates_say() -> None:
    alarms = Alarms(AlarmConfig(entropy=0.1, entropy_share=None, entropy_rise=None))
    rounds = [alarms.check_data(NO_LAKE, None, 10, 10), alarms.check({"entropy": 1.0})]
    rounds += [alarms.check_data(NO_LAKE, None, 9, 10), alarms.check({"entropy": 0.01})]
    assert [len(sentences) for sentences in rounds] == [1, 0, 0, 1]
    assert alarms.active == {"dead_groups", "entropy"}
    assert alarms.check_data(NO_LAKE, None, 1, 10) == []
    assert alarms.active == {"entropy"}
    assert len(alarms.check_data(NO_LAKE, None, 10, 10)) == 1
