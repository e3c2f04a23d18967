"""Annotations in the viewer: the form writes what the command writes, and two authors are compared."""

import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from streamlit.testing.v1 import AppTest  # noqa: TID253 - the viewer's tests alone

from lake import Lake, ids
from lake.write.scores import Annotation, annotate
from testkit.copies import empty_lake
from testkit.lakes import build_lake, rollout
from testkit.streamlit_pages import assert_sound, column, links, open_page, show, words
from testkit.wording import Wording
from viewer.filters import pack_filter
from viewer.queries import ListWindow, Sort, annotations, episodes
from viewer.queries.episodes import EpisodeFilter
from viewer.reader import Reader
from viewer.server import READ_ONLY


@pytest.fixture
def lk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lake:
    return show(build_lake(tmp_path), monkeypatch)


def first(lk: Lake) -> int:
    return int(lk.sql("SELECT min(episode_id) FROM episodes").item())


def open_form(episode: str, **address: int) -> AppTest:
    """The page of an episode with its annotations unfolded."""
    at = open_page("episode", episode=episode, **address)
    at.session_state["annotations"] = True
    return assert_sound(at.run())


def author_of(at: AppTest) -> Any:
    """The field of the form that says who writes."""
    return next(field for field in at.text_input if field.label == "Author")


def test_what_is_said_in_the_form_is_written_and_shown(lk: Lake) -> None:
    episode = ids.to_text(first(lk))
    at = open_form(episode, step=1)
    at.number_input(key="annotation-value").set_value(0.5)
    at.text_input(key="annotation-text").set_value("<b>loops</b>")
    author_of(at).set_value("ann")
    next(button for button in at.button if button.label == "Add").click()
    assert_sound(at.run())
    row = lk.sql("SELECT episode_id, step_index, label, value, text, author FROM latest_annotations").row(0)
    assert row == (first(lk), 1, "rating", 0.5, "<b>loops</b>", "ann")
    scores = lk.sql("SELECT scorer, value FROM current_scores WHERE step_index = 1")
    assert scores.rows() == [("human", 0.5)]
    assert column(at, "annotations", "text") == ["<b>loops</b>"]
    assert author_of(at).value == "ann", "who writes once writes again"

    at = open_page("annotations")
    assert links(at, "annotations") == [f"/episode?episode={episode}&step=1"]

    at = open_form(episode, step=1)
    author_of(at).set_value("ann")
    next(button for button in at.button if button.label == "Take back").click()
    assert_sound(at.run())
    assert lk.sql("SELECT count(*) FROM latest_annotations").item() == 0


def test_what_cannot_be_said_is_told_and_not_written(lk: Lake, wording: Wording) -> None:
    at = open_form(ids.to_text(first(lk)))
    next(button for button in at.button if button.label == "Add").click()
    assert_sound(at.run())
    assert "words, or both" in wording(at.error[0].value)
    at.number_input(key="annotation-value").set_value(1.0)
    author_of(at).set_value(" ")
    next(button for button in at.button if button.label == "Add").click()
    assert_sound(at.run())
    assert "author" in wording(at.error[0].value)
    assert lk.sql("SELECT count(*) FROM annotations").item() == 0


def test_a_read_only_viewer_has_no_form(lk: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(READ_ONLY, "1")
    assert not [button for button in open_form(ids.to_text(first(lk))).button if button.label == "Add"]


def test_a_lake_without_annotations_says_how_they_are_made(lk: Lake) -> None:
    assert "trajlake annotate" in open_page("annotations").code[0].value
    assert words(open_page("annotations"))


# ---------------------------------------------------------------- a queue

SHORT_FIRST = Sort("rollout_index", descending=True)


def test_a_queue_is_what_nobody_or_an_author_has_not_labelled(lk: Lake) -> None:
    """Of any filter and in its order; a label on a step counts, another label or another author does not."""
    order = lambda: episodes.list_episodes(Reader(lk.snapshot()), EpisodeFilter(task="mixed"), SHORT_FIRST)  # noqa: E731
    mixed = order().to_list()
    annotate(lk, [Annotation(episode_id=mixed[1], label="ok", step_index=1, value=1.0)], "ann")
    annotate(lk, [Annotation(episode_id=mixed[2], label="ok", value=1.0)], "bob")
    annotate(lk, [Annotation(episode_id=mixed[3], label="other", value=1.0)], "ann")
    snap = Reader(lk.snapshot())
    for by, done in (("ann", [1]), ("bob", [2]), (None, [1, 2]), ("eve", [])):
        condition = EpisodeFilter(task="mixed", unlabelled=("ok", by))
        remaining = [episode_id for index, episode_id in enumerate(mixed) if index not in done]
        assert episodes.list_episodes(snap, condition, SHORT_FIRST).to_list() == remaining
        for index, episode_id in enumerate(mixed):
            queue = annotations.read_queue(snap, condition, SHORT_FIRST, episode_id)
            assert (queue.unlabelled, queue.total, queue.first) == (len(remaining), len(mixed), remaining[0])
            before = [earlier_id for earlier_id in mixed[:index] if earlier_id in remaining]
            after = [later_id for later_id in mixed[index + 1 :] if later_id in remaining]
            assert (queue.previous, queue.next) == (before[-1] if before else None, after[0] if after else None)


def test_a_list_leads_into_a_queue_that_goes_on_after_each_answer(lk: Lake) -> None:
    mixed = episodes.list_episodes(Reader(lk.snapshot()), EpisodeFilter(task="mixed"), None).to_list()
    at = open_page("episodes", task="mixed")
    at.session_state["annotate-these"] = True
    assert_sound(at.run())
    at.text_input(key="queue-author").set_value("ann")
    assert_sound(at.run())
    packed = pack_filter(EpisodeFilter(task="mixed", unlabelled=("rating", "ann")))
    assert packed is not None
    assert f"episode={ids.to_text(mixed[0])}&amp;list=" in words(at), "a link that can be copied"
    assert "8 of 8 episodes" in words(at)

    at = open_page("episode", episode=mixed[0], list=packed)
    assert "8 of 8 left to label" in words(at)
    at.button(key="answer-2").click()
    assert_sound(at.run())
    assert lk.sql("SELECT episode_id, label, value, author FROM latest_annotations").rows() == [
        (mixed[0], "rating", 1.0, "ann")
    ]
    assert at.query_params["episode"] == ids.to_text(mixed[1])
    assert "7 of 8 left to label" in words(at)
    at.text_input(key="annotation-text").set_value("loops")
    next(button for button in at.button if button.label == "Add, next").click()
    assert_sound(at.run())
    assert at.query_params["episode"] == ids.to_text(mixed[2])
    assert lk.sql("SELECT count(*) FROM latest_annotations WHERE text = 'loops'").item() == 1


def test_answers_given_before_are_offered(lk: Lake) -> None:
    episode_ids = lk.sql("SELECT episode_id FROM episodes ORDER BY ALL")["episode_id"].to_list()
    words_ = ["loops", "gives up", "loops"]
    annotate(
        lk, [Annotation(episode_id=e, label="why", text=w) for e, w in zip(episode_ids, words_, strict=False)], "ann"
    )
    annotate(
        lk, [Annotation(episode_id=e, label="n", value=v) for e, v in zip(episode_ids, (3.0, 2.5), strict=False)], "ann"
    )
    snap = Reader(lk.snapshot())
    assert annotations.list_answers(snap, "why") == ["gives up", "loops"]
    assert annotations.list_answers(snap, "n") == [2.5, 3.0]
    assert annotations.list_answers(snap, "nothing") == []


@pytest.fixture(scope="module")
def plain_lake(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    lk = empty_lake(tmp_path_factory.mktemp("agreement") / "lake")
    lk.append([rollout("t", n, 1.0) for n in range(6)], run_id="a")
    return lk


@settings(max_examples=3, deadline=None)
@given(answers=st.lists(st.tuples(*[st.sampled_from([0.0, 1.0, 2.0, None])] * 2), min_size=1, max_size=6))
def test_agreement_is_cohens(answers: list[tuple[float | None, float | None]], plain_lake: Lake) -> None:
    episodes = plain_lake.sql("SELECT episode_id FROM episodes ORDER BY rollout_index")["episode_id"].to_list()
    for author, index in (("ann", 0), ("bob", 1)):
        annotations_made = [
            Annotation(episode_id=episode_id, value=answer[index])
            for episode_id, answer in zip(episodes, answers, strict=False)
        ]
        annotations_made += [Annotation(episode_id=episode_id) for episode_id in episodes[len(answers) :]]
        annotate(plain_lake, annotations_made, author)
    both_answers = [pair for pair in answers if None not in pair]
    rows = annotations.compute_agreement(plain_lake.snapshot()).to_dicts()
    assert (
        annotations.count_annotations(plain_lake.snapshot())
        == annotations.read_page(plain_lake.snapshot(), ListWindow(100)).height
    )
    if not both_answers:
        assert rows == []
        return
    same = sum(first == second for first, second in both_answers) / len(both_answers)
    ones, second_counts = (Counter(pair[index] for pair in both_answers) for index in (0, 1))
    chance = sum(ones[answer] * second_counts[answer] for answer in ones) / len(both_answers) ** 2
    (row,) = rows
    assert (row["first"], row["second"], row["places"]) == ("ann", "bob", len(both_answers))
    assert row["same"] == pytest.approx(same)
    assert row["kappa"] == (None if chance == 1 else pytest.approx((same - chance) / (1 - chance)))


Pair = tuple[float, float]


def ranked(values: list[float]) -> list[float]:
    """Ranks from 1, equals sharing their mean."""
    return [
        sum(other_value < own_value for other_value in values) + (values.count(own_value) + 1) / 2
        for own_value in values
    ]


def cohens(pairs: list[Pair]) -> tuple[float | None, float | None, float | None]:
    """Share of the same answer, kappa and Spearman's correlation of what people and a scorer say, by loops."""
    if any(len(set(side)) == 1 for side in zip(*pairs, strict=True)):
        return None, None, None
    middles = [(min(side) + max(side)) / 2 for side in zip(*pairs, strict=True)]
    answers = [(p >= middles[0], s >= middles[1]) for p, s in pairs]
    same = sum(first == second for first, second in answers) / len(pairs)
    high = [sum(answer[side] for answer in answers) / len(pairs) for side in (0, 1)]
    chance = high[0] * high[1] + (1 - high[0]) * (1 - high[1])
    ranks = [ranked(list(side)) for side in zip(*pairs, strict=True)]
    return same, (same - chance) / (1 - chance), statistics.correlation(*ranks)


NUMBERS = st.sampled_from([0.0, 1.0, 2.5, 5.0])


@settings(max_examples=2, deadline=None)
@given(pairs=st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=6))
@example(pairs=[(0.0, 1.0), (2.5, 0.0), (5.0, 2.5), (1.0, 5.0)])
def test_a_scorer_against_people(pairs: list[Pair], plain_lake: Lake) -> None:
    """`env_return`, which is 1 everywhere, stands next to it; episodes that one side did not judge count for
    nothing."""
    episodes_ = plain_lake.sql("SELECT episode_id, group_id, run_id FROM episodes ORDER BY rollout_index")
    episode_ids = episodes_["episode_id"].to_list()
    annotate(plain_lake, [Annotation(episode_id=episode_id) for episode_id in episode_ids], "bob")
    annotations_made = [
        Annotation(episode_id=episode_id, value=pair[0]) for episode_id, pair in zip(episode_ids, pairs, strict=False)
    ]
    annotate(
        plain_lake,
        annotations_made + [Annotation(episode_id=episode_id) for episode_id in episode_ids[len(pairs) :]],
        "ann",
    )
    with plain_lake.job(kind="score", run_id="a") as job:
        values = [pair[1] for pair in pairs] + [9.0] * (len(episode_ids) - len(pairs))
        names = {"scorer": pl.lit("it's"), "scorer_version": pl.lit("1"), "step_index": pl.lit(None, pl.Int32)}
        job.write("scores", episodes_.with_columns(value=pl.Series(values), **names))
    snap = Reader(plain_lake.snapshot())
    rows = {row["scorer"]: row for row in annotations.compare_scorers(snap).to_dicts()}
    assert set(rows) == {"it's", "env_return"}
    for name, expected_pairs in (("it's", pairs), ("env_return", [(pair[0], 1.0) for pair in pairs])):
        row = rows[name]
        assert (row["people"], row["episodes"]) == ("human", len(pairs))
        assert (row["same"], row["kappa"], row["rank"]) == tuple(
            None if value is None else pytest.approx(value) for value in cohens(expected_pairs)
        )
        if row["same"] is None:
            continue
        query = annotations.build_disagreements_sql(row["people"], name, row["people_from"], row["scorer_from"])
        assert snap.sql(query).height == round((1 - row["same"]) * len(pairs)), "its list holds exactly them"


def test_the_page_puts_the_scorer_that_contradicts_people_first(lk: Lake) -> None:
    rows = lk.sql("SELECT episode_id, group_id, run_id, env_return FROM episodes WHERE env_return IS NOT NULL")
    annotate(lk, [Annotation(episode_id=e, value=v) for e, v in rows.select("episode_id", "env_return").rows()], "ann")
    with lk.job(kind="score") as job:
        names = {"scorer": pl.lit("upside down"), "scorer_version": pl.lit("1"), "step_index": pl.lit(None, pl.Int32)}
        job.write("scores", rows.with_columns(**names, value=1 - pl.col("env_return")).drop("env_return"))
    at = open_page("annotations")
    assert column(at, "scorers", "scorer") == ["upside down", "env_return"]
    assert column(at, "scorers", "kappa") == ["\N{MINUS SIGN}" + column(at, "scorers", "kappa")[0][1:], "+1.000"]
    first_, second = links(at, "scorers")
    assert str(first_).startswith("/episodes?sql=SELECT")
    assert second is None, "they agree on all"
