"""What decides about the rounds of `trajlake loop`: what ends a run, the best version, what an update is given."""

from typing import Any

import pytest

from testkit.loops import run_of, write_config
from trainer.online.learner import build_round_config
from trainer.online.settings import read_config


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("config")
    return str(write_config(folder, folder / "model"))


@pytest.mark.parametrize(
    ("loop", "number", "ends"),
    [
        ({"rounds": 3}, 2, None),
        ({"rounds": 3}, 3, "rounds"),
        ({"mode": "sft", "sft": {}}, 0, "rounds"),
        ({"tokens": 30}, 2, "tokens"),
        ({"tokens": 31}, 2, None),
        ({"hours": 1.0}, 2, "hours"),
        ({"hours": 1.01}, 2, None),
    ],
)
def test_rounds_tokens_and_hours_end_a_run_once_they_are_used_up(
    file: str, loop: dict[str, Any], number: int, ends: str | None
) -> None:
    """Two rounds of 10 and 20 tokens, of half an hour each."""
    metrics = {
        0: {"loop/tokens": 10.0, "loop/seconds": 1800.0},
        1: {"loop/tokens": 20.0, "loop/seconds": 1800.0, "eval/score": 0.5},
    }
    assert run_of(read_config(file, {"loop": loop}), metrics, {})._used_up(number) == ends


@pytest.mark.parametrize(
    ("evaluation", "scores", "ends"),
    [
        ({}, [0.5, 0.1, 0.1, 0.1], None),
        ({"patience": 2}, [0.5, 0.1], None),
        ({"patience": 2}, [0.5, 0.1, 0.5], "patience"),
        ({"patience": 2}, [0.5, 0.1, 0.6], None),
        ({"patience": 2, "min_improvement": 0.2}, [0.5, 0.6, 0.6], "patience"),
        ({"patience": 2, "min_improvement": 0.2}, [0.5, 0.6, 0.8], None),
    ],
)
def test_evaluations_in_a_row_without_improvement_end_a_run(
    file: str, evaluation: dict[str, Any], scores: list[float], ends: str | None
) -> None:
    config = read_config(file, {"loop": {"evaluation": evaluation}})
    assert run_of(config, {}, {2 * index: score for index, score in enumerate(scores)})._patience_lost() == ends


def test_the_best_version_has_the_highest_score_and_is_the_earliest_of_equal_ones(file: str) -> None:
    config = read_config(file, {})
    assert run_of(config, {}, {0: 0.25, 2: 0.75, 4: 0.75, 5: 0.5})._best_version() == 2


def test_each_round_has_an_order_of_its_own_and_one_learning_rate_throughout(file: str) -> None:
    trainer = read_config(file, {"trainer": {"seed": 3}}).trainer
    first, second = (build_round_config(trainer, f"collection_round = {number}", number) for number in range(2))
    assert (first.seed, second.seed) == (3_000_000, 3_000_001)
    assert (first.where, second.where) == ("collection_round = 0", "collection_round = 1")
    assert (second.schedule.shape, second.schedule.warmup_fraction) == ("constant", 0.0)
