"""What changed since an older state, in words and links; the rounds of jobs, and the settings in which jobs differ."""

from pathlib import Path

import polars as pl
import pytest

from lake import Lake, ids
from lake.judgements.credit import find_credit
from lake.write.scores import Annotation, annotate
from testkit.lakes import RUN, add_credit, add_training, build_lake, rollout
from testkit.streamlit_pages import assert_sound, column, facts, go_to, open_page, show, words
from viewer.queries import lineage
from viewer.queries.compare import Side
from viewer.queries.lineage import compare_states
from viewer.reader import Reader


@pytest.fixture
def lk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lake:
    """A lake in which after the snapshot `before` an episode came, one went, and two scores changed."""
    lk = show(build_lake(tmp_path), monkeypatch)
    first, second, third = lk.sql("SELECT episode_id FROM episodes ORDER BY 1 LIMIT 3")["episode_id"].to_list()
    annotate(lk, [Annotation(episode_id=first, value=1.0)], "ann")
    lk.name_snapshot("before")
    with lk.job(kind="collect", run_id=RUN) as job:
        job.record([rollout("new", 0, 1.0)])
    annotate(lk, [Annotation(episode_id=episode_id, value=0.0) for episode_id in (first, second)], "ann")
    lk.retract([third], "odd")
    return lk


def test_changes_are_counted_by_table_and_series(lk: Lake) -> None:
    changes = compare_states(lk.at("before"), lk.snapshot())
    assert changes.episodes.added["task_id"].to_list() == ["new"]
    assert changes.episodes.removed.height == 1
    assert changes.series.select("scorer", "new", "gone", "other").rows() == [("human", 1, 0, 1)]
    counted = {row["table"]: row["after"] - row["before"] for row in changes.tables.iter_rows(named=True)}
    assert (counted["episodes"], counted["steps"], counted["annotations"], counted["retractions"]) == (1, 3, 2, 1)
    assert compare_states(lk.snapshot(), lk.snapshot()).tables.is_empty()


def test_its_page_leads_to_the_episodes_and_ends_the_older_state(lk: Lake) -> None:
    at = open_page("since", since="before")
    new = lk.sql("SELECT episode_id FROM episodes WHERE task_id = 'new'").item()
    assert f'href="/episode?episode={ids.to_text(new)}"' in words(at)
    assert list(facts(at).values()) == ["1", "1", "2", "0"]

    at = open_page("episodes", as_of="before")
    assert 'href="/since?since=before"' in words(at), "from an older state a link leads here"
    go_to(at, "since")
    at.query_params.pop("as_of")
    at.query_params["since"] = "before"
    assert_sound(at.run())
    assert f'href="/episode?episode={ids.to_text(new)}"' in words(at), "links lead to where the episode is"

    at = open_page("since", since="nowhere")
    assert "nowhere" in at.warning[0].value


@pytest.fixture
def resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lake:
    """A run of three rounds, the last with other settings; a reward of rounds 0 and 1, and a run of one round."""
    lk = build_lake(tmp_path, [rollout("t", 0, 1.0, collection_round=number) for number in (0, 1)])
    for run, number, limit in ((RUN, 2, 30), ("planned", 5, 30)):
        parameters = {"environment": "maze", "max_tokens": limit} | ({"plan": {"round": 5}} if run == "planned" else {})
        with lk.job(kind="collect", run_id=run, parameters=parameters) as job:
            job.record([rollout("t", 0, 0.0, collection_round=number)])
    with lk.job(kind="score", run_id=RUN, parameters={"scorer": "brief"}) as job:
        rows = lk.sql("SELECT episode_id, group_id, run_id FROM episodes WHERE collection_round < 2")
        names = {"scorer": pl.lit("brief"), "scorer_version": pl.lit("1"), "step_index": pl.lit(None, pl.Int32)}
        job.write("scores", rows.with_columns(**names, value=pl.lit(1.0)))
    add_training(lk, updates=1, episodes_per_update=2)
    with lk.job(kind="label_run", run_id=RUN):
        pass
    return show(lk, monkeypatch)


def test_a_job_names_the_rounds_that_it_collected_or_read(resumed: Lake) -> None:
    at = open_page("jobs")
    rounds = zip(column(at, "jobs", "kind"), column(at, "jobs", "rounds"), strict=True)
    dash = "\N{EN DASH}"
    expected = [("label_run", dash), ("train", dash), ("score", dash), ("collect", "5"), ("collect", "2")]
    assert list(rounds) == [*expected, ("collect", f"0{dash}1")], "the list has those that a job recorded"
    jobs = resumed.sql("SELECT kind, id_text(job_id) FROM job_runs WHERE kind IN ('train', 'score', 'label_run')")
    for kind, job in jobs.iter_rows():
        assert ("unknown" if kind == "label_run" else f"0{dash}1") in words(open_page("job", job=job)), kind


def test_rounds_of_one_run_differ_in_the_settings_of_their_jobs(resumed: Lake) -> None:
    at = open_page("change", a_run=RUN, a_rounds="1", b_run=RUN, b_rounds="2")
    assert column(at, "settings_that_differ", "setting") == ["max_tokens"]
    assert column(at, "settings_that_differ", "b") == ["30"]
    snapshot = Reader(resumed.snapshot())
    pairs = lineage.pair_newest_jobs(snapshot, Side(RUN, (0, 0)), Side(RUN, (1, 1)))
    assert [(row["kind"], row["a"] == row["b"]) for row in pairs.iter_rows(named=True)] == [
        *(("collect", True), ("score", True), ("train", True))
    ], "a job of unknown rounds is of no side"


def test_two_credits_differ_in_the_settings_of_their_jobs(tmp_path: Path) -> None:
    lk = build_lake(tmp_path)
    series = [
        ids.to_text(lk.sql("SELECT series_id FROM job_runs WHERE job_id = ?", [job]).item())
        for job in (add_credit(lk, gamma=0.9), add_credit(lk, gamma=0.5))
    ]
    snapshot = Reader(lk.snapshot())
    (row,) = lineage.pair_newest_jobs(
        snapshot, *(Side(credit=find_credit(snapshot, text)) for text in series)
    ).iter_rows(named=True)
    settings = lineage.compare_run_settings(row, None, None)
    assert settings.filter(setting="config.gamma").select("a", "b").rows() == [("0.9", "0.5")]
