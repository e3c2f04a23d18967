"""What changed since an older state: counted by table and series, each episode a link."""

from pathlib import Path

import pytest

from lake import Lake, ids
from lake.write.scores import Annotation, annotate
from testkit.lakes import RUN, build_lake, rollout
from testkit.streamlit_pages import assert_sound, facts, go_to, open_page, show, words
from viewer.queries.lineage import compare_states


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
