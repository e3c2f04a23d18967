"""Mixtures over a lake: whose an episode is, what an epoch draws, and that a repeated episode is trained as often."""

from collections import Counter
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch  # noqa: TID253 - a script that does nothing without it

from lake import Lake
from lake.errors import DataRefusedError, UsageError
from testkit.copies import copied, empty_lake
from testkit.training import config, token_episodes
from testkit.wording import Wording
from trainer.config import MixtureSource
from trainer.data.plan import Plan
from trainer.data.selection import TrainingSelection, select
from trainer.data.stream import Stream
from trainer.losses import Needs


@pytest.fixture
def lk(tmp_path: Path) -> Lake:
    """Run "one" with 12 episodes of tasks t0..t2, run "o'two" with 4 of t0."""

    def make(template: Path) -> None:
        lk = empty_lake(template)
        for run, tasks in (("one", 3), ("o'two", 1)):
            with lk.job(kind="collect", run_id=run) as job:
                job.record(token_episodes(tasks=tasks, seed=len(run)))

    return copied("two runs", make, tmp_path)


def planned(lk: Lake, *sources: dict[str, Any], **fields: Any) -> tuple[TrainingSelection, Plan]:
    settings = config(mixture=sources, **fields)
    selection = select(lk.snapshot(), settings, Needs())
    return selection, Plan(selection, settings)


def drawn_by(lk: Lake, plan: Plan, column: str) -> list[Counter[str]]:
    """How often an epoch draws each value of a column of `episodes`."""
    values = dict(lk.scan("episodes").select("episode_id", column).collect().iter_rows())
    epochs: dict[int, Counter[str]] = {}
    for step in plan.steps:
        drawn_values = [values[e] for e in plan.episode_ids_E[step.episodes_E].tolist()]
        epochs.setdefault(step.epoch, Counter()).update(drawn_values)
    return list(epochs.values())


def test_an_epoch_is_as_long_as_one_pass_and_shared_by_weight(lk: Lake) -> None:
    selection, plan = planned(lk, {"run": "one", "weight": 1}, {"run": "o'two", "weight": 3}, epochs=2)
    assert selection.episodes == 16
    assert drawn_by(lk, plan, "run_id") == [{"one": 4, "o'two": 12}] * 2


def test_an_episode_belongs_to_the_first_source_that_has_it_and_is_left_out_of_none(lk: Lake) -> None:
    sources = ({"where": "task_id = 't0'", "weight": 1}, {"run": "one", "where": "task_id <> 't2'", "weight": 1})
    selection, plan = planned(lk, *sources)
    assert selection.sources is not None
    tasks = selection.sources.join(lk.scan("episodes").collect(), on="episode_id").group_by("source", "task_id").len()
    assert sorted(tasks.rows()) == [(0, "t0", 8), (1, "t1", 4)]
    assert drawn_by(lk, plan, "task_id") == [{"t0": 6, "t1": 6}]


def test_the_common_predicate_holds_for_all_sources(lk: Lake) -> None:
    _, plan = planned(lk, {"weight": 1}, where="task_id = 't1'")
    assert drawn_by(lk, plan, "task_id") == [{"t1": 4}]


def test_a_source_may_be_a_selection_with_its_dropped_steps(lk: Lake) -> None:
    """A selection that kept the episodes of task t0 and dropped the first step of each."""
    steps = lk.scan("steps").join(lk.scan("episodes").filter(pl.col("task_id") == "t0"), on="episode_id", how="semi")
    keys = ["episode_id", "group_id", "run_id"]
    rows = steps.filter(pl.col("step_index") == 0).select(*keys, "step_index", kept=pl.lit(value=False)).collect()
    undivided = rows.with_columns(step_index=pl.lit(None, pl.Int32), kept=pl.lit(value=True))
    with lk.job(kind="select") as job:
        job.write("selections", pl.concat([undivided, rows]).with_columns(selection=pl.lit("later steps")))
    sources = ({"selection": "later steps", "weight": 1}, {"where": "task_id = 't1'", "weight": 1})
    selection, plan = planned(lk, *sources)
    filtered = selection.members.filter(~pl.col("trained"))
    assert set(filtered["step_index"]) == {0}
    assert dict(selection.drops.select("reason", "steps").iter_rows()) == {"filtered": 8}
    (drawn,) = drawn_by(lk, plan, "task_id")
    assert set(drawn) == {"t0", "t1"}


def test_a_repeated_episode_is_trained_as_often(lk: Lake) -> None:
    settings = config(
        mixture=[{"where": "task_id = 't1'", "weight": 9}, {"weight": 7}], episodes_per_step=16, token_budget=64
    )
    selection = select(lk.snapshot(), settings, Needs())
    plan = Plan(selection, settings)
    with Stream(lk.snapshot(), plan, Needs(), settings) as stream:
        ((step, batches),) = stream.steps()
    rows = plan.list_consumed(step)
    assert Counter(rows.group_by("episode_id").len()["len"].to_list())[3] == 1, "9 draws of 4 episodes"
    assert rows["action_tokens"].sum() == step.loss_tokens == sum(len(batch.target_N) for batch in batches)
    assert float(torch.cat([batch.weight_N for batch in batches]).double().sum()) == pytest.approx(1, abs=1e-6)


def test_sources_that_cannot_be_are_refused(lk: Lake, wording: Wording) -> None:
    with pytest.raises(DataRefusedError, match=r"source 1 \(run nobody\) has no episode"):
        planned(lk, {"weight": 1, "run": "one"}, {"weight": 1, "run": "nobody"})
    with pytest.raises(DataRefusedError, match=r"source 1 \(everything\) has no") as caught:
        planned(lk, {"weight": 1}, {"weight": 1})
    wording(caught.value)
    with pytest.raises(UsageError, match="is not a predicate"):
        planned(lk, {"weight": 1, "where": "nonsense = 1"})
    with pytest.raises(DataRefusedError, match=r"source 0 \(run o'two\) .*--plan") as caught:
        planned(lk, {"weight": 1, "run": "o'two"}, {"weight": 1}, max_length=4)
    wording(caught.value)


def test_where_and_run_hold_together() -> None:
    assert MixtureSource(weight=1).predicate is None
    assert MixtureSource(weight=1, run="a'b").predicate == "run_id = 'a''b'"
    assert MixtureSource(weight=1, where="x OR y", run="r").predicate == "(\nx OR y\n) AND run_id = 'r'"
