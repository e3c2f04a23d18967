"""The credit job over a real lake: what it writes, when it skips, what it refuses."""

from collections.abc import Sequence
from pathlib import Path

import polars as pl
import pytest
from deltalake import DeltaTable, write_deltalake
from polars.testing import assert_frame_equal

import lake
from lake import EpisodeRecord, StepRecord
from lake.errors import DataRefusedError, UsageError
from lake.lake import Lake
from lake.storage.objects import Objects
from lake.storage.store import FORMAT_KEY, Store
from pipelines.credit import GiGPO, summarise
from pipelines.credit.estimators.batch_std import BatchStd
from pipelines.credit.health import IntegrityConfig
from pipelines.credit.job import choose_step_source, run_credit
from testkit.copies import copied, empty_lake

TERMINAL = GiGPO(step_source="terminal_score")


def record(
    task: str, rollout: int, score: float | None, states: Sequence[str], run: str = "r", reward: float | None = None
) -> EpisodeRecord:
    steps = [StepRecord(state=state, action=f"a{rollout}", reward=reward) for state in states]
    return EpisodeRecord(run_id=run, task_id=task, rollout_index=rollout, env_return=score, steps=steps)


def fill(target: Lake, records: list[EpisodeRecord]) -> None:
    with target.job(kind="ingest") as job:
        job.record(records)


def credit_jobs(target: Lake) -> list[str]:
    """How each credit job of the lake ended."""
    return target.sql("SELECT status FROM job_runs WHERE kind = 'credit'")["status"].to_list()


@pytest.fixture
def target(tmp_path: Path) -> Lake:
    """Two groups of run r (one mixed, one dead) and one mixed group of run s."""

    def make(template: Path) -> None:
        lk = empty_lake(template)
        fill(lk, [record("t", i, float(i % 2), "abc"[: i + 1]) for i in range(3)])
        fill(lk, [record("dead", i, 1.0, "xy") for i in range(2)])
        fill(lk, [record("t", i, float(i), "ab", run="s") for i in range(2)])

    return copied("three groups of two runs", make, tmp_path / "lake")


def test_every_step_gets_a_row_with_its_run_and_lineage(target: Lake) -> None:
    report = run_credit(target, TERMINAL)
    rows = target.scan("advantages").collect()
    steps = target.scan("steps").collect()
    keys = ["episode_id", "step_index", "group_id", "run_id"]
    assert_frame_equal(rows.select(keys), steps.select(keys), check_row_order=False)
    assert rows["job_id"].unique().to_list() == [report.job_id]
    assert rows["series_id"].unique().to_list() == [report.series_id]
    assert (rows["defined"] == rows["advantage"].is_not_null()).all()
    assert (report.summary.live_groups, report.summary.dead_groups) == (2, 1)
    run = target.sql("SELECT status, rows_in, rows_out, parameters FROM job_runs WHERE kind = 'credit'").row(
        0, named=True
    )
    assert (run["status"], run["rows_in"], run["rows_out"]) == ("succeeded", steps.height, steps.height)
    assert '"step_source":"terminal_score"' in run["parameters"]


def test_the_table_equals_the_estimator_on_the_same_frame(target: Lake) -> None:
    run_credit(target, TERMINAL)
    episodes = target.scan("episodes").select("episode_id", "status", pl.col("env_return").alias("episode_score"))
    direct = TERMINAL.advantages(target.scan("steps").join(episodes, on="episode_id")).collect()
    stored = target.scan("advantages").select(direct.columns).sort("group_id", "episode_id", "step_index").collect()
    assert_frame_equal(stored, direct, check_exact=True)


def test_a_second_run_does_nothing_and_says_so(target: Lake) -> None:
    first = run_credit(target, TERMINAL)
    second = run_credit(target, TERMINAL)
    assert second.skipped
    assert not first.skipped
    assert second.job_id == first.job_id
    assert second.summary == first.summary
    assert len(credit_jobs(target)) == 1


def test_force_new_data_and_other_parameters_run_again(target: Lake) -> None:
    first = run_credit(target, TERMINAL)
    assert not run_credit(target, TERMINAL, force=True).skipped
    repeated = run_credit(target, TERMINAL.model_copy(update={"omega": 0.5}))
    assert not repeated.skipped
    assert repeated.series_id != first.series_id
    fill(target, [record("new", i, float(i), "q") for i in range(2)])
    grown = run_credit(target, TERMINAL)
    assert not grown.skipped
    assert grown.series_id == first.series_id


def test_data_that_a_filter_leaves_out_does_not_wake_a_job(target: Lake) -> None:
    run_credit(target, TERMINAL, where="run_id = 's'")
    fill(target, [record("new", i, float(i), "q") for i in range(2)])
    assert run_credit(target, TERMINAL, where="run_id = 's'").skipped


def test_latest_advantages_shows_each_group_once_per_series(target: Lake) -> None:
    run_credit(target, TERMINAL)
    run_credit(target, TERMINAL, only="run_id = 's'")
    newest = run_credit(target, TERMINAL, only="run_id = 's'", force=True)
    run_credit(target, GiGPO(step_source="terminal_score", omega=0.0))
    latest = target.sql("SELECT * FROM latest_advantages")
    assert latest.group_by("series_id", "episode_id", "step_index").len()["len"].max() == 1
    assert latest["series_id"].n_unique() == 2
    of_s = latest.filter((pl.col("run_id") == "s") & (pl.col("series_id") == newest.series_id))
    assert of_s["job_id"].unique().to_list() == [newest.job_id]


def test_a_failed_job_leaves_no_advantages_and_its_reason(target: Lake) -> None:
    # The same visible step a second time: what a damaged lake looks like, since no writer can do this.
    Store(Objects(target.uri)).append("steps", target.scan("steps").head(1).collect())
    with pytest.raises(lake.errors.ContractError, match="episode"):
        run_credit(target, TERMINAL)
    assert target.scan("advantages").collect().is_empty()
    assert credit_jobs(target) == ["failed"]


def test_scores_of_a_scorer_replace_the_environment_return(target: Lake) -> None:
    episodes = target.scan("episodes").collect()
    scores = episodes.select(
        "episode_id", "group_id", "run_id", value=pl.col("rollout_index").cast(pl.Float64)
    ).with_columns(scorer=pl.lit("judge"), scorer_version=pl.lit("1"))
    with target.job(kind="score") as job:
        job.write("scores", scores.filter(pl.col("value") < 2))
    report = run_credit(target, TERMINAL, score="judge")
    rows = target.scan("advantages").collect()
    unscored = episodes.filter(pl.col("rollout_index") == 2)["episode_id"].to_list()
    assert rows.filter(pl.col("episode_id").is_in(unscored))["advantage"].null_count() == 3
    assert report.summary.undefined_steps == 3
    assert report.summary.dead_groups == 0
    with target.job(kind="score") as job:
        job.write("scores", scores)
    assert run_credit(target, TERMINAL, score="judge").summary.undefined_steps == 0


def test_step_source_follows_what_was_recorded(target: Lake) -> None:
    assert choose_step_source(target, GiGPO(), None, "env_return").step_source == "terminal_score"
    fill(target, [record("dense", i, 1.0, "ab", reward=0.5) for i in range(2)])
    assert choose_step_source(target, GiGPO(), None, "env_return").step_source == "rewards"
    assert choose_step_source(target, GiGPO(), "task_id = 't'", "env_return").step_source == "terminal_score"


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"where": "task_id = 'nobody'"}, DataRefusedError, "no episode satisfies"),
        ({"where": "no_such_column = 1"}, UsageError, "no_such_column"),
        ({"where": "1); DROP TABLE episodes; --"}, UsageError, "predicate"),
        ({"score": "judge"}, UsageError, "valid: env_return"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    target: Lake, options: dict[str, str], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        run_credit(target, TERMINAL, **options)
    assert credit_jobs(target) == []


def test_an_empty_lake_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataRefusedError, match="holds no episodes"):
        run_credit(empty_lake(tmp_path / "empty"), GiGPO())


def test_summary_of_a_skipped_job_equals_the_first(target: Lake) -> None:
    report = run_credit(target, TERMINAL)
    counted = summarise(target.scan("advantages")).model_dump()
    assert report.summary.model_dump(include=set(counted)) == counted


def test_what_shared_anchors_are_worth_is_a_row_per_group_unless_nobody_asks(target: Lake) -> None:
    looked = ["one_action_anchors", "last_actions_mean", "error_anchors", "error_steps", "empty_steps"]
    report = run_credit(target, TERMINAL)
    groups = target.scan("credit_groups").filter(job_id=report.job_id).collect()
    assert groups.select(looked).null_count().sum_horizontal().item() == 0
    # Rollout i of a task takes action "a<i>" everywhere, so no shared state saw one action alone.
    assert report.summary.one_action_anchors == 0
    unasked = run_credit(target, TERMINAL, purity=False, force=True)
    groups_again = target.scan("credit_groups").filter(job_id=unasked.job_id).collect()
    assert groups_again.select(looked).null_count().sum_horizontal().item() == len(looked) * groups.height
    assert unasked.summary.one_action_anchors is None
    assert unasked.series_id == report.series_id
    same = [name for name in groups.columns if name not in (*looked, "job_id", "write_id", "input_fingerprint")]
    assert_frame_equal(groups_again.select(same), groups.select(same), check_row_order=False)


def without_column(folder: Path, table: str, column: str, format_version: int) -> None:
    """The lake as a package of an older format wrote it: a column does not exist in one of its tables."""
    handle = DeltaTable(folder / table)
    rows, configuration = handle.to_pyarrow_table().drop_columns([column]), handle.metadata().configuration
    write_deltalake(handle, rows, mode="overwrite", schema_mode="overwrite")
    configuration = configuration | {FORMAT_KEY: str(format_version)}
    DeltaTable(folder / table).alter.set_table_properties(configuration, raise_if_not_exists=False)


def test_groups_of_a_lake_that_did_not_count_empty_states_are_unknown_until_they_are_computed(target: Lake) -> None:
    fill(target, [record("empty", i, float(i), ["", "x"]) for i in range(2)])
    assert run_credit(target, TERMINAL).summary.empty_steps == 2
    without_column(Path(target.uri), "credit_groups", "empty_steps", 6)
    old = lake.open(target.uri)
    assert old.scan("credit_groups").select("error_steps", "empty_steps").collect().null_count().row(0) == (0, 4)
    assert run_credit(old, TERMINAL).summary.empty_steps is None
    fill(old, [record("new", i, float(i), ["", "x"]) for i in range(2)])
    mixed = run_credit(old, TERMINAL)
    assert (mixed.groups_computed, mixed.groups_kept) == (1, 4)
    assert mixed.summary.empty_steps is None, "what four of five groups did not count is not 0"
    assert run_credit(old, TERMINAL, force=True).summary.empty_steps == 4


def test_a_batch_key_that_is_no_column_is_refused(target: Lake) -> None:
    with pytest.raises(UsageError, match="no column nope; valid: episode_id, "):
        run_credit(target, BatchStd(batch_key="nope"))


def test_checks_that_were_not_made_are_made_of_groups_that_stand(target: Lake) -> None:
    run_credit(target, TERMINAL)
    with pytest.raises(DataRefusedError, match=r"incomplete"):
        run_credit(target, TERMINAL, integrity=IntegrityConfig(complete="refuse", expected_group_size=5))
    assert run_credit(target, TERMINAL).skipped, "a job that refused has changed nothing"
    assert run_credit(target, TERMINAL, integrity=IntegrityConfig(examples=1)).skipped, "how much is told is no check"
    assert run_credit(target, TERMINAL, integrity=IntegrityConfig(complete="off")).groups_computed == 3
