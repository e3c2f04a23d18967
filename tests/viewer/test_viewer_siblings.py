"""A group of many siblings: all outcomes at a glance, the list in pages; what credit says of doubtful anchors."""

import re
from pathlib import Path

import polars as pl
import pytest

from lake import Lake, ids
from lake.judgements.credit import find_credit
from lake.judgements.selections import read_grouping
from lake.write.scores import Annotation, annotate
from pipelines.credit import ESTIMATORS, GiGPO
from pipelines.credit.job import run_credit
from pipelines.groupings import Grouping, Subsample, run_grouping
from testkit.lakes import add_credit, build_lake, rollout, siblings
from testkit.streamlit_pages import column, columns, facts, open_page, show, words
from testkit.wording import Wording
from viewer.queries import ListWindow, Sort, anchors, episodes, groups
from viewer.queries.episodes import EpisodeFilter
from viewer.queries.groups import GroupFilter
from viewer.reader import Reader
from viewer.server import ENVIRONMENT
from viewer.side_by_side import MAX_OUTCOME_MARKS, render_outcomes

MANY = 300


def outcomes(values: list[float | None]) -> pl.DataFrame:
    size = len(values)
    data = {"episode_id": range(size), "rollout_index": range(size), "attempt": [0] * size, "outcome": values}
    return pl.DataFrame(data, schema_overrides={"outcome": pl.Float64})


def marks(html: str) -> list[tuple[str, str, float | None]]:
    """(kind, title, height in percent) of the marks."""
    strips = re.findall(r'<a class="(\w+)" href="[^"]*" title="([^"]*)"[^>]*?(?:--up:([\d.]+)%)?"?>', html)
    return [(kind, title, float(up) if up else None) for kind, title, up in strips]


def drawn(values: list[float | None], mean: float | None, deviation: float | None) -> str:
    return render_outcomes(outcomes(values), mean, deviation, lambda row: f"/episode?episode={row['episode_id']}")


def test_a_strip_has_a_mark_for_each_outcome_and_its_mean() -> None:
    html = drawn([-1.0, 0.0, 3.0, None], 1.0, 1.5)
    assert marks(html) == [
        ("below", "rollout 0: \N{MINUS SIGN}1", 0.0),
        ("below", "rollout 1: 0", 25.0),
        ("above", "rollout 2: 3", 100.0),
        ("unscored", "rollout 3: \N{EN DASH}", None),
    ]
    assert 'class="mean" style="bottom:50.00%"' in html
    assert 'class="deviation" style="bottom:12.50%;height:75.00%"' in html


@pytest.mark.parametrize("values", [[None, None], [0.0, 0.0], [2.0]])
def test_a_strip_of_equal_or_unknown_outcomes(values: list[float | None]) -> None:
    values_known = [value for value in values if value is not None]
    html = drawn(values, values_known[0] if values_known else None, None)
    assert len(marks(html)) == len(values)
    assert ('class="mean"' in html) == bool(values_known)


def test_a_strip_of_very_many_says_that_it_draws_some() -> None:
    html = drawn([0.5] * (2 * MAX_OUTCOME_MARKS), 0.5, 0.0)
    assert len(marks(html)) == MAX_OUTCOME_MARKS
    assert "One sibling in 2 is drawn." in html


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    lk = build_lake(tmp_path_factory.mktemp("large"), siblings("t", [n / MANY for n in range(MANY)], num_steps=1))
    add_credit(lk)
    return lk


def test_three_hundred_siblings_have_pages(large: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, large.uri)
    group = large.sql("SELECT any_value(group_id) FROM episodes").item()
    at = open_page("group", group=group, siblings=12, sort="-outcome")
    assert column(at, "siblings", "rollout_index") == [str(n) for n in range(24, -1, -1)]
    text = words(at)
    assert "276 to 300 of 300 siblings" in text
    assert len(marks(text)) >= MANY
    (heading,) = set(re.findall(r'data-column="num_steps"[^>]*><a href="([^"]*)"', text))
    assert "siblings=" not in heading, "another order begins at the first page"


def doubtful(folder: Path) -> Lake:
    """Two rollouts that meet at the gate, in an empty state and in an error text; the group beside it is sound."""
    records = siblings("sound", [0.0, 1.0])
    for index in range(2):
        record = rollout("false", index, float(index), num_steps=4)
        record.steps[1].state = "[]"
        record.steps[2].state = "Error: no such room"
        record.steps[2].state_is_error = True
        records.append(record)
    lk = build_lake(folder, records)
    add_credit(lk)
    return lk


def test_without_anchors_nothing_is_known_of_shared_states(tmp_path: Path) -> None:
    lk = doubtful(tmp_path)
    run_credit(lk, ESTIMATORS["rloo"]())
    frame = groups.read_page(Reader(lk.snapshot()), GroupFilter(), ListWindow())
    assert frame["shared_share"].to_list() == [None, None]


def test_doubtful_anchors_are_weighed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wording: Wording) -> None:
    lk = doubtful(tmp_path)
    snap = lk.snapshot()
    frame = groups.read_page(Reader(snap), GroupFilter(), ListWindow(), Sort("error_share", descending=True))
    assert frame["task_id"].to_list() == ["false", "sound"]
    assert frame["error_share"].to_list() == pytest.approx([1 / 3, 0.0])
    assert frame["empty_share"].to_list() == pytest.approx([1 / 3, 0.0])
    assert frame["shared_share"].to_list() == pytest.approx([6 / 8, 2 / 6])
    group = frame["group_id"][0]
    rows = snap.sql("SELECT * FROM advantages WHERE group_id = ?", [group])
    by_step = {row["step_index"]: abs(row["a_step"]) for row in rows.filter(pl.col("a_step") != 0).to_dicts()}
    shares = anchors.compute_shares(snap, group, find_credit(snap))
    assert (shares["shared"], shares["doubted"]) == (6, 4)
    assert shares["doubted_weight"] == pytest.approx((by_step[1] + by_step[2]) / (by_step[0] + by_step[1] + by_step[2]))
    weights = {
        row["state"]: row["share"] for row in anchors.read_page(snap, group, find_credit(snap), ListWindow()).to_dicts()
    }
    assert weights["[]"] == pytest.approx(by_step[1] / sum(by_step.values()))
    monkeypatch.setenv(ENVIRONMENT, lk.uri)
    assert column(open_page("groups", sort="-empty_share"), "groups", "empty_share") == ["0.33", "0.00"]
    (warning,) = open_page("group", group=group).warning
    assert "4 of 6 shared steps" in wording(warning.value)
    assert f" {100 * shares['doubted_weight']:.0f} % " in warning.value


def test_unscored_siblings_share_states_and_have_answers_and_scores_but_no_chart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A credit compares none of their steps."""
    records = [rollout("t", index, None, num_steps=2) for index in range(3)]
    for index, record in enumerate(records):
        record.steps[1].action = f"answer {index}"
    scored = [rollout("scored", index, float(index)) for index in range(2)]
    lk = show(build_lake(tmp_path, [*records, *scored]), monkeypatch)
    add_credit(lk)
    query = "SELECT group_id, episode_id FROM episodes WHERE task_id = 't' AND rollout_index = 1"
    group, episode = lk.sql(query).row(0)
    annotate(lk, [Annotation(episode_id=episode, label="tidy", value=0.25)], "ann")
    shares = anchors.compute_shares(lk.snapshot(), group, find_credit(lk.snapshot()))
    assert (shares["steps"], shares["shared"], shares["alone"]) == (6, 5, 1)
    frame = groups.read_page(Reader(lk.snapshot()), GroupFilter(), ListWindow(), Sort("shared_share", descending=True))
    assert frame.select("task_id", "shared_share").rows() == [("t", pytest.approx(5 / 6)), ("scored", 2 / 6)]
    at = open_page("group", group=group, score="env_return")
    assert "83 % of 6 steps" in words(at)
    assert "trajlake-strip" not in words(at)
    assert column(at, "siblings", "answer") == ["answer 0", "answer 1", "answer 2"]
    assert column(at, "siblings", "score-0")[1] == "0.250"


def test_dead_groups_have_one_denominator_on_every_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups with two or more scored siblings: here one dead, one live; a third has one scored sibling."""
    values_of_tasks: dict[str, list[float | None]] = {"dead": [1.0, 1.0], "live": [1.0, 0.0], "unjudged": [1.0, None]}
    records = [rollout(task, *pair) for task, values in values_of_tasks.items() for pair in enumerate(values)]
    lk = show(build_lake(tmp_path, records), monkeypatch)
    run_credit(lk, ESTIMATORS["rloo"]())
    job = lk.sql("SELECT id_text(job_id) FROM job_runs WHERE kind = 'credit'").item()
    assert [facts(at)["Dead groups"] for at in (open_page("runs"), open_page("job", job=job))] == ["50 %"] * 2


def test_lists_have_no_columns_of_which_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But the one that they are ordered by."""
    lk = show(build_lake(tmp_path), monkeypatch)
    frame = groups.read_page(Reader(lk.snapshot()), GroupFilter(), ListWindow())
    of_credit = ("shared_share", "error_share", "empty_share", "ways_in")
    assert all(frame[name].null_count() == frame.height == 6 for name in of_credit)
    assert not set(of_credit) & set(columns(open_page("groups"), "groups"))
    assert "ways_in" in columns(open_page("groups", sort="-ways_in"), "groups")
    assert "mean_advantage" not in columns(open_page("group", group=frame["group_id"][0]), "siblings")
    assert columns(open_page("jobs"), "jobs")[-1] == "job_id"
    assert "error" not in columns(open_page("jobs"), "jobs")


def test_only_the_newest_job_of_the_current_credit_counts(tmp_path: Path) -> None:
    """A group that gained a sibling since shares less; the shared state is now also known as an error text."""
    lk = build_lake(tmp_path, [rollout("t", index, float(index), num_steps=1) for index in range(2)])
    for _ in range(2):
        add_credit(lk)
        add_credit(lk, omega=0.5)
        alone = rollout("t", 2, 0.0, num_steps=2)
        alone.steps[1].state, alone.steps[0].state = str(alone.steps[0].state), "elsewhere"
        alone.steps[1].state_is_error = True
        lk.append([alone], run_id="demo")
    (group,) = groups.read_page(Reader(lk.snapshot()), GroupFilter(), ListWindow()).to_dicts()
    assert (group["size"], group["shared_share"], group["error_share"]) == (3, pytest.approx(3 / 4), 1.0)


def test_a_group_of_a_grouping_has_a_page_of_its_members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A credit with a grouping names groups that no episode was collected in."""
    lk = build_lake(tmp_path)
    monkeypatch.setenv(ENVIRONMENT, lk.uri)
    run_grouping(lk, Grouping(name="pairs", steps=(Subsample(size=2, draws=1),)))
    report = run_credit(lk, GiGPO(step_source="terminal_score"), grouping="pairs")
    row = lk.sql(
        "SELECT group_id, list(DISTINCT episode_id) AS members FROM advantages "
        "WHERE job_id = ? AND anchor_episodes > 1 "
        "GROUP BY group_id ORDER BY group_id LIMIT 1",
        [report.job_id],
    ).row(0, named=True)
    assert row["group_id"] not in lk.sql("SELECT group_id FROM episodes")["group_id"]
    at = open_page("group", group=ids.to_text(row["group_id"]), credit=ids.to_text(report.job_id))
    assert set(column(at, "siblings", "episode_id")) == {ids.to_text(episode_id) for episode_id in row["members"]}
    assert column(at, "anchors", "size"), "and its shared states"
    members = [ids.from_text(id_text) for id_text in column(at, "siblings", "episode_id")]
    position_found = episodes.find_position(
        Reader(lk.snapshot()), EpisodeFilter(group=row["group_id"]), None, members[0]
    )
    assert position_found is not None, "previous and next walk through it"
    assert position_found.total == len(members)


def test_the_groups_of_a_grouping_are_a_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lk = build_lake(tmp_path)
    monkeypatch.setenv(ENVIRONMENT, lk.uri)
    assert "Grouping" not in words(open_page("groups"))
    for draws in (1, 2):  # the draws of the older definition are gone
        run_grouping(lk, Grouping(name="pairs", steps=(Subsample(size=2, draws=draws),)))
    assert groups.list_groupings(lk.snapshot()) == ["pairs/0", "pairs/1"]
    members = read_grouping(lk.snapshot(), "pairs/1")
    at = open_page("groups", grouping="pairs/1")
    assert set(column(at, "groups", "group_id")) == set(map(ids.to_text, members["group_id"]))
    sizes = dict(members.group_by("group_id").len().iter_rows())
    pairs = groups.read_page(Reader(lk.snapshot()), GroupFilter(grouping="pairs/1"), ListWindow())
    for row in pairs.iter_rows(named=True):
        assert row["size"] == sizes[row["group_id"]]
    at = open_page("groups", grouping="nobody")
    assert len(column(at, "groups", "group_id")) == 6
    assert "no grouping `nobody`" in at.warning[0].value
