"""Annotations: the last word of each author counts, and numbers are scores that credit can use."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from lake import EpisodeRecord, Lake, StepRecord, ids
from lake.cli import trajlake
from lake.errors import UsageError
from lake.write import scores
from lake.write.scores import HUMAN, Annotation, annotate
from pipelines.credit import GiGPO
from pipelines.credit.job import run_credit
from testkit.copies import copied, empty_lake
from testkit.examples import examples

Said = list[tuple[str, int, int | None, str, float | None]]


def copy_lake(folder: Path) -> Lake:
    def make(template: Path) -> None:
        steps = [StepRecord(state="s", action="a"), StepRecord(state="t", action="b")]
        records = [EpisodeRecord(task_id="t", rollout_index=n, steps=steps) for n in range(3)]
        empty_lake(template).append(records, run_id="a")

    return copied("three episodes to annotate", make, folder / "lake")


def episodes(lk: Lake) -> list[int]:
    return lk.sql("SELECT episode_id FROM episodes ORDER BY rollout_index")["episode_id"].to_list()


@settings(max_examples=examples(5), suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(
    annotations=[("ann", 0, None, "rating", 1.0), ("bob", 0, None, "rating", 0.0), ("ann", 0, None, "rating", -2.5)]
)
@given(
    annotations=st.lists(
        st.tuples(
            st.sampled_from(["ann", "bob"]),
            st.integers(0, 1),
            st.sampled_from([None, 0]),
            st.sampled_from(["rating", "honest"]),
            st.sampled_from([None, 0.0, 1.0, -2.5]),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_scores_are_the_means_of_each_authors_last_number(
    annotations: Said, tmp_path_factory: pytest.TempPathFactory
) -> None:
    lk = copy_lake(tmp_path_factory.mktemp("said"))
    names = episodes(lk)
    last: dict[Any, dict[str, float | None]] = defaultdict(dict)
    for author, number, step, label, value in annotations:
        note = Annotation(episode_id=names[number], step_index=step, label=label, value=value)
        assert annotate(lk, [note], author) == 1
        scorer = "human" if label == "rating" else f"human.{label}"
        last[names[number], step, scorer][author] = value
    expected = {
        pair: sum(values_known) / len(values_known)
        for pair, values in last.items()
        if (values_known := [value for value in values.values() if value is not None])
    }
    rows = lk.sql("SELECT episode_id, step_index, scorer, value FROM current_scores WHERE value IS NOT NULL")
    assert {row[:3]: row[3] for row in rows.iter_rows()} == pytest.approx(expected)
    assert lk.sql("SELECT count(*) FROM annotations").item() == len(annotations), "nothing is ever changed"


def test_one_call_may_say_many_things_and_its_last_word_counts(tmp_path: Path) -> None:
    lk = copy_lake(tmp_path)
    first, second, _ = episodes(lk)
    annotations = [Annotation(episode_id=first, value=1), Annotation(episode_id=first, value=3)]
    assert annotate(lk, [*annotations, Annotation(episode_id=second, label="why", text="loops")], "ann") == 2
    assert lk.sql("SELECT value, text FROM latest_annotations ORDER BY label").rows() == [(3.0, None), (None, "loops")]
    assert lk.sql("SELECT scorer, value FROM current_scores").rows() == [(HUMAN, 3.0)], "words alone are no score"


def test_credit_goes_by_what_people_say(tmp_path: Path) -> None:
    lk = copy_lake(tmp_path)
    for number, episode in enumerate(episodes(lk)):
        annotate(lk, [Annotation(episode_id=episode, value=float(number))], "ann")
    report = run_credit(lk, GiGPO(step_source="terminal_score"), score=HUMAN)
    assert report.summary.live_groups == 1
    episode_ids = lk.sql("SELECT episode_id FROM latest_advantages GROUP BY episode_id ORDER BY avg(advantage)")
    assert episode_ids["episode_id"].to_list() == episodes(lk)


def test_who_was_killed_before_the_score_is_made_up_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lk = copy_lake(tmp_path)
    first, second, _ = episodes(lk)
    with monkeypatch.context() as killed:
        killed.setattr(scores, "_derive_scores", lambda *_: None)
        annotate(lk, [Annotation(episode_id=first, value=3.0)], "ann")
    assert lk.sql("SELECT count(*) FROM scores").item() == 0
    annotate(lk, [Annotation(episode_id=second, value=1.0)], "bob")
    rows = lk.sql("SELECT episode_id, value FROM current_scores").rows()
    assert sorted(rows) == sorted([(first, 3.0), (second, 1.0)])


def test_words_take_no_score_back_that_came_from_a_file(tmp_path: Path) -> None:
    lk = copy_lake(tmp_path)
    first = episodes(lk)[0]
    lk.add_scores(pl.DataFrame({"episode_id": [first], "value": [0.5]}), name=HUMAN)
    annotate(lk, [Annotation(episode_id=first, text="clumsy")], "ann")
    assert lk.sql("SELECT value FROM current_scores").rows() == [(0.5,)]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"episode_id": 7}, "the lake holds no episode 0000000000007"),
        ({"step_index": 2, "value": 1.0}, "has 2 steps, counted from 0, and no step 2"),
        ({"value": float("inf")}, "inf cannot be averaged"),
        ({"value": float("nan")}, "nan cannot be averaged"),
        ({"label": " ", "text": "x"}, "is not a name of a label"),
        ({"label": "a@b", "text": "x"}, "is not a name of a label"),
    ],
)
def test_what_cannot_be_said_is_refused_whole(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    lk = copy_lake(tmp_path)
    fine = Annotation(episode_id=episodes(lk)[0], value=1.0)
    with pytest.raises(UsageError, match=message):
        annotate(lk, [fine, Annotation(**({"episode_id": fine.episode_id} | fields))], "ann")
    with pytest.raises(UsageError, match="name of an author"):
        annotate(lk, [fine], "a\nb")
    assert lk.sql("SELECT count(*) FROM annotations").item() == 0


def test_the_command(tmp_path: Path) -> None:
    lk = copy_lake(tmp_path)
    first = ids.to_text(episodes(lk)[0])

    def run(*words: str) -> str:
        command = CliRunner().invoke(trajlake, ["annotate", "--lake", lk.uri, *words])
        return command.output if command.exception is None else str(command.exception)

    assert run("--where", "rollout_index > 0", "--value", "0.5", "--author", "ann") == "2 annotations written\n"
    assert run(first, "--step", "1", "--label", "why", "--text", "loops", "--author", "ann") == "1 annotation written\n"
    assert run(first, "--step", "1", "--label", "why", "--take-back", "--author", "ann") == "1 annotation taken back\n"
    assert "--value, --text" in run(first)
    assert "no episodes are named" in run("--value", "1")
    assert lk.sql("SELECT count(*), min(value) FROM latest_annotations").row(0) == (2, 0.5)
