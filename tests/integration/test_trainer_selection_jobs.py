"""The trainer honours selections: what a select job dropped is not trained on, no matter what else is."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from click.testing import CliRunner, Result

from lake import Lake, ids
from lake.cli import trajlake
from lake.errors import DataRefusedError, UsageError
from lake.judgements.selections import read_selection
from lake.records import EpisodeRecord
from pipelines.select import DeadGroups, Filter, Length, MinReward, Selection, run_select
from testkit.copies import copied
from testkit.lakes import build_lake
from testkit.training import config, token_episodes, token_lake, token_step
from testkit.wording import Wording
from trainer.data.plan import Plan
from trainer.data.selection import TrainingSelection as Trained
from trainer.data.selection import select, select_episodes
from trainer.losses import LOSSES

RNG = np.random.default_rng(1)


def choose(lk: Lake, *filters: Filter, name: str = "clean") -> str:
    return ids.to_text(run_select(lk, Selection(name=name, filters=filters)).job_id)


def trained(lk: Lake, **fields: Any) -> Trained:
    return select(lk.snapshot(), config("sft", **fields), LOSSES["sft"]().needs)


def drops(found: Trained) -> dict[str, int]:
    return dict(found.drops.select("reason", "steps").rows())


@pytest.fixture
def lk(tmp_path: Path) -> Lake:
    return copied("token episodes of 4 tasks", lambda template: token_lake(template, token_episodes(tasks=4)), tmp_path)


def test_dropped_episodes_are_not_trained_on(lk: Lake) -> None:
    job = choose(lk, MinReward(at_least=0.5))
    good = set(lk.sql("SELECT episode_id FROM episodes WHERE env_return >= 0.5")["episode_id"])
    for wanted in ("clean", job, job[:8], f" {job.upper()} "):
        found = trained(lk, selection=wanted)
        assert set(found.members["episode_id"]) == good
        assert found.episodes == len(good)
        assert drops(found) == {}
    assert trained(lk).episodes == 16, "without `selection` the table is not read"


def test_where_and_selection_both_count(lk: Lake) -> None:
    choose(lk, MinReward(at_least=0.5))
    found = trained(lk, selection="clean", where="task_id = 't1'")
    expected = lk.sql("SELECT episode_id FROM episodes WHERE env_return >= 0.5 AND task_id = 't1'")
    assert set(found.members["episode_id"]) == set(expected["episode_id"])


def test_dropped_steps_carry_no_loss_and_stay_as_context(tmp_path: Path) -> None:
    steps = [token_step(RNG, 3, 2, step={"action": action}) for action in ("short", "far too long", "short")]
    lk = token_lake(tmp_path, [EpisodeRecord(task_id="t", steps=steps, env_return=1.0)])
    choose(lk, Length(max_action_characters=6))
    found = trained(lk, selection="clean")
    assert found.members.select("step_index", "trained").rows() == [(0, True), (1, False), (2, True)]
    assert drops(found) == {"filtered": 1}
    plan = Plan(found, config())
    assert (plan.tokens, plan.loss_tokens) == (15, 4), "all tokens are read, those of two actions are learned"


def test_every_step_of_the_kept_episodes_is_trained_or_has_one_reason(lk: Lake) -> None:
    choose(lk, DeadGroups())
    whole = read_selection(lk.snapshot(), "clean").episodes
    steps = lk.scan("steps").join(whole.lazy(), on="episode_id", how="semi").collect()
    with lk.job(kind="select") as job:
        keys = ["episode_id", "group_id", "run_id"]
        said = pl.concat(
            [
                steps.select(keys).unique().with_columns(step_index=pl.lit(None, pl.Int32), kept=pl.lit(value=True)),
                steps.filter(pl.col("step_index") == 0).select(*keys, "step_index", kept=pl.lit(value=False)),
            ]
        )
        job.write("selections", said.with_columns(selection=pl.lit("no first steps")))
    found = trained(lk, selection="no first steps", max_length=20)
    assert drops(found)["filtered"] == whole.height
    assert set(drops(found)) == {"filtered", "over_length"}
    assert found.members["trained"].sum() + sum(drops(found).values()) == steps.height


def test_a_name_means_its_newest_job_and_an_id_its_own(lk: Lake) -> None:
    first = choose(lk, MinReward(at_least=0.5))
    second = choose(lk, MinReward(at_least=-1.0))
    snapshot = lk.snapshot()
    assert read_selection(snapshot, "clean").job_id == ids.from_text(second)
    assert read_selection(snapshot, first).episodes.height < read_selection(snapshot, second).episodes.height == 16
    assert read_selection(snapshot, first).describe().startswith(f"clean (select job {first}): ")


def test_a_pinned_snapshot_keeps_the_selection_it_was_started_with(lk: Lake) -> None:
    """What a resumed run reads: a newer job of the name does not change it."""
    choose(lk, MinReward(at_least=0.5))
    pinned = lk.snapshot().versions
    choose(lk, MinReward(at_least=-1.0))
    assert read_selection(lk.at(pinned), "clean").episodes.height < 16


def test_an_episode_that_the_selection_never_saw_is_not_trained_on(lk: Lake) -> None:
    choose(lk, MinReward(at_least=-1.0))
    lk.append([EpisodeRecord(task_id="later", steps=[token_step(RNG, 3, 2)], env_return=1.0)], run_id="later")
    assert trained(lk).episodes == 17
    assert trained(lk, selection="clean").episodes == 16


@pytest.mark.parametrize("wanted", ["", "no such", "zzzzzz"])
def test_a_selection_that_is_none_is_refused_with_the_newest(lk: Lake, wanted: str, wording: Wording) -> None:
    with pytest.raises(UsageError) as caught:
        read_selection(lk.snapshot(), wanted)
    assert f"selection {wanted!r}" in wording(caught.value)
    assert "`trajlake select`" in str(caught.value)
    job = choose(lk, MinReward(at_least=0.5))
    with pytest.raises(UsageError, match=rf"the newest: clean \({job}\)"):
        read_selection(lk.snapshot(), wanted)


def test_nothing_in_common_is_refused_with_the_counts(lk: Lake) -> None:
    choose(lk, MinReward(at_least=0.5))
    kept = read_selection(lk.snapshot(), "clean")
    with pytest.raises(DataRefusedError, match=r"selection clean .* none of the \d+ episodes.*: widen --where"):
        select_episodes(lk.snapshot(), "env_return < 0.5", kept)


def test_the_command_trains_on_the_selection_and_resumes_with_it(tmp_path: Path) -> None:
    lk = build_lake(tmp_path / "lake")
    made = run("init-model", "--out", tmp_path / "model", "--hidden-size", 32, "--vocabulary", 300, lk=lk)
    assert made.exit_code == 0, made.output
    choose(lk, MinReward(at_least=0.5), name="good")
    arguments = ["train", "--model", tmp_path / "model", "--loss", "sft", "--set", "selection=good"]
    plan = run(*arguments, "--out", tmp_path / "plan", "--plan", "--format", "json", lk=lk)
    items = {row["item"]: row["value"] for row in json.loads(plan.stdout)}
    assert items["episodes selected"] == items["episodes trained"] == "13"
    assert "selection: good (select job" in plan.stderr
    first = run(*arguments, "--out", tmp_path / "out", lk=lk)
    assert first.exit_code == 0, first.output
    choose(lk, MinReward(at_least=-1.0), name="good")
    again = run("train", "--out", tmp_path / "out", "--resume", "--set", "selection=good", lk=lk)
    assert again.stdout.splitlines()[-1] == first.stdout.splitlines()[-1]
    other = run("train", "--out", tmp_path / "out", "--resume", "--set", "selection=other", lk=lk)
    assert "selection 'other' (the run has 'good')" in str(other.exception)
    parameters = lk.sql("SELECT parameters FROM job_runs WHERE kind = 'train'").item()
    assert json.loads(parameters)["selection"] == "good"


def run(*arguments: object, lk: Lake) -> Result:
    return CliRunner().invoke(trajlake, [*map(str, arguments), "--lake", lk.uri])


def test_a_selection_of_another_writer_counts_alike(lk: Lake) -> None:
    """Rows of `selections` are the interface, not the job that shipped with the project."""
    row = lk.sql("SELECT episode_id, group_id, run_id FROM episodes ORDER BY episode_id LIMIT 1")
    with lk.job(kind="anything") as job:
        job.write("selections", row.with_columns(selection=pl.lit("mine"), kept=pl.lit(value=True)))
    assert trained(lk, selection="mine").episodes == 1
