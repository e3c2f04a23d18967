"""Why advantages are unknown: counted by flag, said with what to do."""

from collections import Counter
from pathlib import Path

import polars as pl
import pytest

from lake import Lake
from lake.errors import DataRefusedError
from pipelines.credit.estimators import find_estimator
from pipelines.credit.estimators.protocol import Flag, count_unknown, describe_unknown
from pipelines.credit.job import run_credit
from testkit.lakes import build_lake, siblings
from testkit.wording import Wording


def test_steps_without_an_advantage_count_for_each_reason() -> None:
    rows = pl.DataFrame(
        {
            "advantage": [None, None, 1.0, None, None],
            "flags": ["unscored", "unknown_length,unscored", "unscored", "dead_group,unknown_value", ""],
        }
    )
    assert count_unknown(rows) == Counter(unscored=2, unknown_length=1, unknown_value=1)


def test_every_flag_that_leaves_an_advantage_unknown_has_its_remedy(wording: Wording) -> None:
    leaving = [flag.value for flag in Flag if flag.startswith("un") and flag is not Flag.UNKNOWN_STATE]
    lines = describe_unknown(dict.fromkeys(leaving, 3))
    assert len(lines) == len(leaving)
    first, second = map(wording, describe_unknown({"unscored": 1, "unknown_length": 2}))
    assert "in 2 steps, unknown_length: " in first
    assert "--set length=steps" in first
    assert "in 1 step, unscored: " in second
    assert "`trajlake score`" in second


def test_an_unknown_reward_names_the_option_that_takes_the_score() -> None:
    (line,) = describe_unknown({"unknown_return": 1})
    assert "--set step_source=terminal_score" in line


def test_recorded_scores_of_episodes_without_one_are_named_with_the_option(tmp_path: Path) -> None:
    lk = build_lake(tmp_path / "lake", siblings("a", [None, None]), run_id="chats")
    rows = lk.sql("SELECT episode_id, group_id, run_id FROM episodes ORDER BY episode_id")
    named = {"scorer": pl.lit("reward"), "scorer_version": pl.lit("1"), "step_index": pl.lit(None, pl.Int32)}
    with lk.job(kind="score") as job:
        job.write("scores", rows.with_columns(value=pl.Series([0.0, 1.0]), **named))
    grpo = find_estimator("grpo")()
    with pytest.raises(DataRefusedError, match=r"recorded scores .*: --score reward"):
        run_credit(lk, grpo)
    assert run_credit(lk, grpo, score="reward").other_scores == ()
    lk.append(siblings("b", [0.0, 1.0]), run_id="returns")
    (line,) = run_credit(lk, grpo).other_scores
    assert line.endswith("--score reward")


@pytest.fixture(scope="module")
def lk(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """A lake without value estimates and token counts."""
    return build_lake(tmp_path_factory.mktemp("unknowns") / "lake")


@pytest.mark.parametrize(
    ("name", "options", "flag"),
    [
        ("gae", {}, "unknown_value"),
        ("opo", {}, "unknown_length"),
        ("batch_std", {"batch_key": "completion_tokens"}, "unknown_batch"),
    ],
)
def test_a_job_that_misses_everything_is_refused_with_what_it_missed(
    lk: Lake, name: str, options: dict[str, str], flag: str
) -> None:
    pattern = rf"{name} defines none of (\d+) advantages .*advantages unknown in \1 steps, {flag}: "
    with pytest.raises(DataRefusedError, match=pattern):
        run_credit(lk, find_estimator(name)(**options), force=True)
    assert lk.sql("SELECT count(*) FROM advantages").item() == 0


def test_the_environments_return_is_a_component(lk: Lake) -> None:
    gdpo = find_estimator("gdpo")(batch_key="all", components={"env_return": 1.0})
    report = run_credit(lk, gdpo, force=True)
    assert report.summary.undefined_steps < report.summary.steps
