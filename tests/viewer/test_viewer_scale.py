"""A lake of 100,000 episodes: every list is a page of it, for any size."""

from pathlib import Path

import polars as pl
import pytest

import lake
from lake.judgements.credit import find_covering, find_jobs
from lake.records import EpisodeRecord, StepRecord
from testkit.lakes import add_credit
from viewer.queries import ListWindow, Sort, anchors, episodes, groups, lineage, runs, training, transcripts
from viewer.queries.episodes import EpisodeFilter
from viewer.queries.groups import GroupFilter, Signal
from viewer.reader import Reader

EPISODES, SIBLINGS, BATCH = 100_000, 8, 10_000

pytestmark = pytest.mark.slow


def record(number: int) -> EpisodeRecord:
    """Episode `number`: odd ones succeed, every hundredth says `needle`."""
    group, index = divmod(number, SIBLINGS)
    text = "a needle in the hay" if number % 100 == 0 else "hay"
    return EpisodeRecord(
        task_id=str(group),
        rollout_index=index,
        collection_round=number // BATCH,
        env_return=float(index % 2),
        steps=[StepRecord(state="start", action=f"{text} {number}", reward=float(index % 2))],
    )


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    lk = lake.open(Path(tmp_path_factory.mktemp("scale")), create=True)
    with lk.job(kind="collect", run_id="big") as job:
        for first in range(0, EPISODES, BATCH):
            job.record([record(number) for number in range(first, first + BATCH)])
    add_credit(lk)
    scores = lk.sql("SELECT run_id, group_id, episode_id, collection_round / 10 AS value FROM episodes ORDER BY ALL")
    with lk.job(kind="score", run_id="big") as job:
        names = {"scorer": pl.lit("judge"), "scorer_version": pl.lit("1"), "step_index": pl.lit(None, pl.Int32)}
        job.write("scores", scores.with_columns(**names))
    return Reader(lk.snapshot())


def test_the_list_has_a_last_page(reader: Reader) -> None:
    everything = EpisodeFilter()
    assert episodes.compute_totals(reader, everything)["episodes"] == EPISODES
    last = episodes.read_page(reader, everything, None, ListWindow.page(EPISODES // 25))
    assert last.height == 25
    position_found = episodes.find_position(reader, everything, None, last["episode_id"][-1])
    assert position_found is not None
    assert (position_found.position, position_found.total, position_found.next) == (EPISODES, EPISODES, None)


def test_a_text_is_found_among_all_steps(reader: Reader) -> None:
    condition = EpisodeFilter(text="NEEDLE")
    assert episodes.compute_totals(reader, condition)["episodes"] == EPISODES // 100
    assert episodes.read_page(reader, condition, Sort("outcome", descending=True), ListWindow(25, 975)).height == 25
    assert episodes.compute_totals(reader, EpisodeFilter(text="hay"))["episodes"] == EPISODES


def test_runs_and_groups(reader: Reader) -> None:
    facts = runs.read_overview(reader)
    assert (facts["episodes"], facts["groups"], facts["dead_groups"]) == (EPISODES, EPISODES // SIBLINGS, 0)
    assert runs.read_curve(reader, "big", "collection_round", 1.0)["success"].to_list() == [0.5] * 10
    assert runs.read_tasks(reader, "big", 1.0, ListWindow(12)).height == 12
    assert groups.count_groups(reader, GroupFilter(signal=Signal.LIVE)) == EPISODES // SIBLINGS
    assert groups.read_page(reader, GroupFilter(), ListWindow.page(400)).height == 25


def test_episodes_by_what_a_scorer_says(reader: Reader) -> None:
    condition = EpisodeFilter(score="judge", low=0.5)
    assert episodes.compute_totals(reader, condition)["episodes"] == EPISODES // 2
    assert set(
        episodes.read_page(reader, condition, Sort("outcome", descending=True), ListWindow.page(1))["outcome"]
    ) == {0.9}
    assert runs.read_page(reader, 0.5, ListWindow(), "judge")["success"].to_list() == [0.5]
    assert groups.count_groups(reader, GroupFilter(EpisodeFilter(score="judge"), Signal.DEAD)) == EPISODES // SIBLINGS


def test_one_episode_and_its_group(reader: Reader) -> None:
    row = episodes.read_page(reader, EpisodeFilter(), None, ListWindow(1, EPISODES // 2)).row(0, named=True)
    (credit,) = [cover.credit for cover in find_covering(reader, episode_id=row["episode_id"])]
    assert training.read_advantages(reader, row["episode_id"], credit).height == 1
    assert transcripts.read_outline(reader, row["episode_id"], ListWindow(10)).height == 1
    assert groups.read_siblings(reader, row["group_id"], credit, ListWindow()).height == SIBLINGS
    assert anchors.read_page(reader, row["group_id"], credit, ListWindow())["episodes"].to_list() == [SIBLINGS]
    assert training.summarise_credit(reader, find_jobs(reader, credit)[0])["steps"] == EPISODES
    assert lineage.count_jobs(reader, None, None) == 3
