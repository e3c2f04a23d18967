"""Every page of the viewer, run by Streamlit itself without a browser, on real lakes."""

import json
import re
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from html import unescape
from html.parser import HTMLParser
from itertools import product
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from markdown_it import MarkdownIt

import lake
from lake import Lake, ids, search
from lake.storage.local_cache import CACHE_VARIABLE
from lake.write.run_labels import note_run, rename_run, tag_run
from lake.write.scores import Annotation, annotate
from testkit import planted_keys
from testkit.examples import mostly_slow, mostly_slow_cases
from testkit.lakes import RUN, add_credit, add_training, build_lake, judged_lake, rollout
from testkit.streamlit_pages import (
    SCREENS,
    assert_sound,
    charts,
    column,
    columns,
    elements,
    episode_id,
    facts,
    go_to,
    job_choice,
    links,
    open_page,
    opened,
    show,
    transcript,
    words,
)
from testkit.wording import Wording
from viewer import plain
from viewer.queries import episodes, training
from viewer.reader import ViewedLake
from viewer.server import ENVIRONMENT

UNKNOWN_ID = "0000000000000"
UNKNOWN = "\N{EN DASH}"
"""What is not known, in a table."""


@pytest.fixture
def lk(shared_lake: Lake, monkeypatch: pytest.MonkeyPatch) -> Lake:
    """The full lake, shown; tests only read it."""
    return show(shared_lake, monkeypatch)


def group_id(lk: Lake, task: str, round_: int = 0) -> int:
    query = "SELECT DISTINCT group_id FROM episodes WHERE task_id = ? AND collection_round = ?"
    return int(lk.sql(query, [task, round_]).item())


def job_id(lk: Lake, kind: str) -> int:
    return int(lk.sql("SELECT arg_max(job_id, started_at) FROM job_runs WHERE kind = ?", [kind]).item())


# ---------------------------------------------------------------- every page


@pytest.mark.parametrize("name", SCREENS)
def test_every_page_opens(lk: Lake, name: str) -> None:
    at = open_page(name)
    assert [heading.value for heading in at.header] == [
        {"change": "What changed", "sql": "SQL"}.get(name, name.capitalize())
    ]
    assert [warning.value for warning in at.warning] == []


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    return lake.open(tmp_path_factory.mktemp("empty"), create=True)


@pytest.mark.parametrize("name", [name for name in SCREENS if name != "sql"])
def test_an_empty_lake_gives_friendly_pages(empty: Lake, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    show(empty, monkeypatch)
    at = open_page(name)
    assert len(at.dataframe) == 0
    assert len(at.info) + len(at.success) == 1
    if name != "rejects":
        assert at.code[0].value.startswith("trajlake ")


WRONG = (None, "zzz", UNKNOWN_ID, "![x](http://evil.example)", "9" * 5000)


@pytest.mark.parametrize(
    ("name", "value"),
    mostly_slow_cases(
        product(("episode", "group", "job"), WRONG),
        *product(("episode",), WRONG),
        *product(("group", "job"), (None, UNKNOWN_ID)),
    ),
)
def test_a_wrong_or_forgotten_id_gets_a_sentence_and_a_way_back(lk: Lake, name: str, value: str | None) -> None:
    at = open_page(name, **({} if value is None else {name: value}))
    assert len(at.warning) == 1
    assert len(at.header) == 0
    assert f"(/{name}s)" in words(at)


def test_a_viewer_without_a_lake_says_how_to_start_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    at = open_page("runs")
    assert "trajlake view --lake" in at.code[0].value


def test_a_lake_that_vanished_is_an_error_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    lk = show(build_lake(tmp_path / "lake"), monkeypatch)
    at = open_page("episodes")
    shutil.rmtree(lk.uri)
    monkeypatch.setattr(ViewedLake, "era_seconds", (0.0, 0.0))
    at.text_input(key="text").set_value("anything new")
    assert_sound(at.run())
    wording(at.error[0].value)
    at.button[-1].click()
    assert_sound(at.run())
    assert "does not exist" in wording(at.code[-1].value)


# ---------------------------------------------------------------- jobs and credit


def test_two_jobs_and_two_runs_are_compared_by_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lk = show(build_lake(tmp_path, [rollout("t", 0, 1.0)], run_id="before"), monkeypatch)
    told: dict[str, Any] = {"same": [1, 2], "config": {"gamma": 0.5, "only": HOSTILE}, "limit": 3}
    with lk.job(kind="collect", run_id="a", parameters=told) as one:
        one.record([rollout("t", 0, 1.0)])
    with lk.job(kind="collect", run_id="b", parameters={"same": [1, 2], "config": {"gamma": 1.0}, "limit": 3}) as other:
        other.record([rollout("t", 0, 0.0)])
    at = open_page("job", job=one.job_id, beside=ids.to_text(other.job_id))
    assert column(at, "settings", "setting") == ["config.gamma", "config.only", "limit", "same"]
    assert column(at, "settings", "a")[0::3] == ["0.5", "[1, 2]"]
    assert column(at, "settings", "b") == ["1.0", UNKNOWN, "3", "[1, 2]"]
    assert "2 of 4 parameters differ" in words(at)
    assert UNKNOWN_ID in open_page("job", job=one.job_id, beside=UNKNOWN_ID).warning[0].value
    runs = open_page("change", a_run="a", b_run="b")
    assert column(runs, "settings_that_differ", "setting") == ["config.gamma", "config.only"]
    target = f"/job?job={ids.to_text(one.job_id)}&beside={ids.to_text(other.job_id)}"
    assert links(runs, "settings_that_differ") == [target] * 2


def test_groups_that_make_a_credit_stale_are_named_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lk = show(build_lake(tmp_path), monkeypatch)
    job = add_credit(lk)
    lk.retract([episode_id(lk, "mixed", 0)], HOSTILE)
    for at in (open_page("anchors"), open_page("job", job=job)):
        assert column(at, "changed_groups", "task_id") == ["mixed"]
        assert column(at, "changed_groups", "lost") == ["1"]
        assert links(at, "changed_groups") == [f"/group?group={ids.to_text(group_id(lk, 'mixed'))}"]
        assert "1 episode retracted: " in words(at)
        (why,) = column(at, "changed_groups", "why")
        assert why.startswith("retracted: ")
    for at in (open_page("runs"), open_page("change", a_run=RUN, b_run=HOSTILE)):
        assert '<a href="/anchors">1 group changed since</a>' in words(at)
    add_credit(lk)
    assert "Taken back" not in words(open_page("anchors"))
    assert "older than the data" not in words(open_page("runs"))


# ---------------------------------------------------------------- runs


def test_runs_show_figures_curves_and_metrics(lk: Lake) -> None:
    at = open_page("runs")
    figures = facts(at)
    assert (figures["Episodes"], figures["Groups"], figures["Dead groups"], figures["Unscored"]) == (
        "24",
        "6",
        "33 %",
        "2",
    )
    assert column(at, "runs", "name") == [RUN]
    assert charts(at) == 5 + 2 + 1 + 2, (
        "curves over rounds, failed and unscored ones among them, tasks by success, training metrics"
    )
    assert column(at, "tasks", "task_id") == ["partial", "mixed", "dead"]


def test_labels_of_runs_are_shown_and_filter_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lk = build_lake(tmp_path, [rollout("a", index, 1.0) for index in range(2)], run_id="first")
    with lk.job(kind="collect", run_id="second") as job:
        job.record([rollout("b", 0, 1.0)])
    rename_run(lk, "first", "<b>best</b>")
    note_run(lk, "first", "*why*")
    tag_run(lk, "first", ["paper"])
    show(lk, monkeypatch)
    at = open_page("runs", run="<b>best</b>", tag="paper")
    assert column(at, "runs", "name") == ["<b>best</b>"]
    assert column(at, "runs", "tags") == ["paper"]
    assert {"Its id is `first`.", "`*why*`"} <= set(words(at).split("\n"))
    assert float(column(at, "runs", "megabytes")[0]) > 0
    listed = open_page("episodes", run_tag="paper")
    assert len(column(listed, "episodes", "episode_id")) == 2


def test_runs_are_ordered_by_what_the_list_has_no_room_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lk = build_lake(tmp_path, [rollout("a", index, 1.0) for index in range(2)], run_id="dead")
    with lk.job(kind="collect", run_id="live") as job:
        job.record([rollout(task, index, float(index)) for task in "ab" for index in range(2)])
    show(lk, monkeypatch)
    at = open_page("runs", sort="-dead_share")
    assert column(at, "runs", "name") == ["dead", "live"]
    assert column(at, "runs", "dead_share") == ["1.00", "0.00"], "what orders the list is a column of it"
    box = next(box for box in at.selectbox if box.label == "Order by")
    at = assert_sound(box.select("tasks").run())
    assert (at.query_params["sort"], column(at, "runs", "tasks")) == ("-tasks", ["2", "1"])


def test_the_axis_and_the_threshold_of_success_are_in_the_address(lk: Lake) -> None:
    at = open_page("runs", run=RUN, over="Policy version", success="2.0")
    assert at.get("button_group")[0].value == "Policy version"
    assert column(at, "runs", "success") == ["0.00"]


def test_an_unknown_run_is_named_and_another_shown(lk: Lake) -> None:
    at = open_page("runs", run="no *such* run")
    assert "no run `no *such* run`" in at.warning[0].value
    assert at.subheader[0].value == f"Run `{RUN}`"


def test_a_run_of_one_round_says_that_there_is_no_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    show(build_lake(tmp_path, [rollout("a", 0, None)]), monkeypatch)
    at = open_page("runs")
    assert "there are no curves" in words(at)
    assert "run is scored" in words(at)


# ---------------------------------------------------------------- episodes


def test_every_filter_comes_from_the_address(lk: Lake) -> None:
    at = open_page("episodes", run=RUN, task="m*", status=["completed", "failed"], round=1, min=0.5, sort="outcome")
    assert column(at, "episodes", "task_id") == ["mixed", "mixed"]
    assert column(at, "episodes", "outcome") == ["1", "1"]
    assert at.multiselect(key="status").value == ["completed", "failed"]
    assert "1 to 2 of 2 episodes in 1 group, mean outcome 1" in words(at)


def test_a_text_is_searched_in_all_that_a_person_reads(lk: Lake) -> None:
    searches = [('"HALL 1"', 12), ('"plan 2 of rollout 0"', 6), ("left", 24), ("walk through", 24), ("nowhere", None)]
    for text, number in searches:
        at = open_page("episodes", text=text)
        if number is None:
            assert "No episode matches" in at.info[0].value
        else:
            assert f"of {number} episodes" in words(at), text


@pytest.fixture(scope="module")
def sixty(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """An episode for each of 60 tasks, of rising outcome."""
    records = [rollout(f"{n}", 0, n / 60, num_steps=1) for n in range(60)]
    return build_lake(tmp_path_factory.mktemp("sixty"), records)


def test_the_list_is_paged_on_the_server(sixty: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    show(sixty, monkeypatch)
    first, last = open_page("episodes"), open_page("episodes", page=3)
    assert column(first, "episodes", "task_id") == [str(n) for n in range(25)]
    assert column(last, "episodes", "task_id") == [str(n) for n in range(50, 60)]
    assert "51 to 60 of 60 episodes" in words(last)
    beyond = open_page("episodes", page=99)
    assert len(links(beyond, "episodes")) == 10


def test_a_new_filter_starts_at_the_first_page(sixty: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    show(sixty, monkeypatch)
    at = open_page("episodes", page=2)
    at.text_input(key="task").set_value("*")
    assert_sound(at.run())
    assert column(at, "episodes", "task_id")[0] == "0"


def test_turning_a_page_writes_it_into_the_address(sixty: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    show(sixty, monkeypatch)
    at = open_page("episodes")
    at.get("pagination")[0].set_value(2)
    assert_sound(at.run())
    assert at.query_params["page"] in ("2", ["2"])
    assert column(at, "episodes", "task_id")[0] == "25"


def test_the_whole_list_is_ordered_not_the_page(sixty: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    show(sixty, monkeypatch)
    highest = open_page("episodes", sort="-outcome", page=2)
    assert column(highest, "episodes", "task_id") == [str(n) for n in range(34, 9, -1)]
    assert column(open_page("episodes", sort="task_id"), "episodes", "task_id")[:3] == ["0", "1", "2"]
    assert column(open_page("episodes", sort="no such"), "episodes", "task_id")[0] == "0"


def test_a_heading_turns_the_order_round_and_back_to_the_usual(lk: Lake) -> None:
    """Numbers begin with the largest; the address keeps its filter, and a new order begins at the first page."""
    for order, following in ((None, "-outcome"), ("-outcome", "outcome"), ("outcome", None)):
        given = {} if order is None else {"sort": order}
        target = "?task=m%2A" + ("" if following is None else f"&amp;sort={following}")
        shown = words(open_page("episodes", task="m*", page=1, **given))
        assert f'<a href="{target}">Outcome' in shown, order


def test_rows_are_links_and_the_opened_one_is_marked(lk: Lake) -> None:
    at = open_page("episodes", task="mixed", sort="-num_steps", opened=ids.to_text(episode_id(lk, "mixed", 2)))
    shown = column(at, "episodes", "episode_id")
    assert links(at, "episodes")[0] == f"/episode?episode={shown[0]}&list=task%3Dmixed%26sort%3D-num_steps"
    assert [shown[row] for row in opened(at, "episodes")] == [ids.to_text(episode_id(lk, "mixed", 2))]


def test_the_way_back_leads_to_the_page_of_the_list(sixty: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    lk = show(sixty, monkeypatch)
    last = ids.to_text(episode_id(lk, "59", 0))
    at = open_page("episode", episode=last, list=f"run={RUN}")
    assert f'<a href="/episodes?page=3&amp;run={RUN}&amp;opened={last}">Back to the list</a>' in words(at)


def test_unscored_episodes_are_dashes_and_can_be_listed(lk: Lake) -> None:
    at = open_page("episodes", unscored="true")
    assert column(at, "episodes", "status") == ["failed", "failed"]
    assert set(column(at, "episodes", "outcome")) == {UNKNOWN}


def test_wrong_values_in_the_address_are_said(lk: Lake, wording: Wording) -> None:
    at = open_page(
        "episodes",
        **{"run": "nobody", "group": "zzz", "min": "much", "round": -1, "status": ["completed", "odd"]},
        **{"job": "zzz", "update": 1, "page": "x", "sort": "-nothing"},
    )
    said = " ".join(wording(warning.value) for warning in at.warning)
    assert "no run `nobody`" in said
    for name in ("zzz", "min=much", "round=-1", "page=x", "status=odd", "sort=-nothing"):
        assert f"`{name}`" in said, name
    assert said.count("`zzz`") == 2, "of a group, and of a job"
    for valid in ("`min` takes a number", "`round` takes a whole number", "one of completed, truncated"):
        assert valid in said
    assert len(links(at, "episodes")) == 22, "the completed ones"


def test_an_update_needs_a_job_to_name_a_batch(lk: Lake, wording: Wording) -> None:
    (warning,) = open_page("episodes", update=7).warning
    assert "`update=7`" in wording(warning.value)
    assert "`job` and `update` together" in warning.value
    assert not open_page("episodes", job=job_id(lk, "train"), update=0, round=0, sort="-num_steps").warning


def test_a_search_without_room_for_its_index_leaves_the_lake_out_of_it(
    lk: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    search.index_path(lk.uri).mkdir()
    at = open_page("episodes", text="key")
    assert not at.error
    assert re.search("the search index .* cannot be used: .*another folder in TRAJLAKE_CACHE", at.warning[0].value)


def test_the_batch_of_an_update_is_a_list(lk: Lake) -> None:
    at = open_page("episodes", job=job_id(lk, "train"), update=0)
    assert len(links(at, "episodes")) == 6
    assert "Batch of update 0" in words(at)
    assert chips(at)["update: 0"] == "?"


def chips(at: Any) -> dict[str, str]:
    """Chips of the page: label (without the cross) -> address."""
    found = re.findall(r'<a href="([^"]*)"(?: class=chosen)?>([^<]*)</a>', "".join(html_of(at, "trajlake-chips")))
    return {unescape(label).removesuffix(" \N{MULTIPLICATION SIGN}"): unescape(address) for address, label in found}


def html_of(at: Any, mark: str) -> list[str]:
    return [el.proto.body for el in elements(at) if el.type == "html" and f'class="{mark}"' in el.proto.body]


def test_every_filter_is_a_chip_that_takes_it_off(lk: Lake) -> None:
    at = open_page("episodes", run=RUN, status=["completed", "failed"], round=1, error="rollout", page=2)
    assert chips(at) == {
        f"run: {RUN}": "?status=completed&status=failed&round=1&error=rollout",
        "status: completed": f"?run={RUN}&status=failed&round=1&error=rollout",
        "status: failed": f"?run={RUN}&status=completed&round=1&error=rollout",
        "round: 1": f"?run={RUN}&status=completed&status=failed&error=rollout",
        "error: failed rollout": f"?run={RUN}&status=completed&status=failed&round=1",
        "clear all": "?",
    }


def test_facets_are_shown_with_counts_when_they_are_asked_for(lk: Lake) -> None:
    assert html_of(open_page("episodes"), "trajlake-chips") == []
    shown = chips(open_page("episodes", facets="true"))
    assert shown["failed rollout 2"] == "?facets=true&error=rollout"
    assert "dead group 8" in shown, "flags have their names"


def test_what_a_facet_does_not_show_is_a_click_away(lk: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episodes, "FIRST_VALUES", 1)
    few = chips(open_page("episodes", facets="true"))
    (more,) = [label for label, target in few.items() if target.endswith("&values=flag")]
    every = chips(open_page("episodes", facets="true", values="flag"))
    assert int(re.findall(r"\d+", more)[0]) == len([one for one in every if one != "fewer"]) - len(few) + 1
    assert every["fewer"] == "?facets=true"


def test_scores_are_columns_and_what_is_never_known_is_none(lk: Lake) -> None:
    (table,) = html_of(open_page("episodes"), "trajlake-table")
    names = re.findall(r'data-column="([^"]*)"', table)
    assert names[-2:] == ["episode_id", "group_id"]
    assert "stop_reason" not in names
    assert "collection_round" in names


# ---------------------------------------------------------------- an outcome that a scorer says


def test_a_run_that_only_a_scorer_judged_shows_its_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lk = show(judged_lake(tmp_path), monkeypatch)
    at = open_page("runs")
    assert [column(at, "runs", name) for name in ("success", "mean_return")] == [["0.50"], ["0.625"]]
    assert facts(at)["Outcome"] == "judge"
    listed = open_page("episodes", sort="-outcome", run=RUN)
    (choice,) = [box for box in listed.selectbox if box.label == "Outcome"]
    assert choice.options == ["judge (usual)", "env_return", "judge"]
    assert column(listed, "episodes", "outcome") == ["1.000", "0.250"]
    assert column(open_page("group", group=group_id(lk, "t")), "siblings", "outcome") == ["0.250", "1.000"]
    choice.set_value("env_return")
    for recorded in (assert_sound(listed.run()), open_page("episodes", score="env_return")):
        assert recorded.query_params["score"] in ("env_return", ["env_return"])
        assert set(column(recorded, "episodes", "outcome")) == {UNKNOWN}


# ---------------------------------------------------------------- groups


def test_groups_are_filtered_by_signal(lk: Lake) -> None:
    assert column(open_page("groups", signal="dead"), "groups", "task_id") == ["dead", "dead"]
    at = open_page("groups", task="nothing")
    assert "No group matches" in at.info[0].value


def test_a_group_shows_its_siblings_and_their_shared_states(lk: Lake) -> None:
    at = open_page("group", group=group_id(lk, "mixed", 1))
    assert ":green-badge[live group]" in words(at)
    figures = facts(at)
    assert (figures["Siblings"], figures["Mean outcome"], figures["Std"]) == ("4", "0.5", "0.577")
    assert column(at, "siblings", "outcome") == ["1", "0", "0", "1"]
    assert column(at, "anchors", "state")[0] == "You are at the gate."
    assert column(at, "anchors", "episodes") == ["4", "2", "2"]
    shares = next(line for line in words(at).splitlines() if "67 %" in line)
    assert "of 12 steps" in shares
    assert "33 %" in shares


def test_a_dead_group_and_one_that_lost_siblings_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [rollout("t", n, 1.0, expected_group_size=8, policy_version=n) for n in range(3)]
    lk = show(build_lake(tmp_path, records), monkeypatch)
    at = open_page("group", group=group_id(lk, "t"))
    shown = words(at)
    assert ":orange-badge[dead group]" in shown
    assert ":orange-badge[3 of 8 siblings]" in shown
    assert ":red-badge[mixes policy versions]" in shown
    assert "No credit job" in shown


def test_an_anchor_is_a_deep_link(lk: Lake, wording: Wording) -> None:
    group = group_id(lk, "mixed", 1)
    anchor = lk.sql("SELECT anchor_key FROM advantages WHERE group_id = ? AND anchor_size = 4 LIMIT 1", [group]).item()
    at = open_page("group", group=group, anchor=anchor)
    assert at.code[0].value == "You are at the gate."
    assert column(at, "visits", "action") == ["go right", "go left", "go right", "go left"]
    for wrong in (UNKNOWN_ID, "zzz"):
        assert wrong in wording(open_page("group", group=group, anchor=wrong).warning[0].value)


# ---------------------------------------------------------------- training


def test_training_leads_from_a_metric_to_the_batch_and_its_advantages(lk: Lake) -> None:
    at = open_page("training", update=1)
    assert charts(at) == 2 + 3 + 1, "metrics, what the updates consumed, signs"
    figures = facts(at)
    assert figures == {"versions behind": "0", "loss": "0.5", "kl": "0.01"}
    assert len(links(at, "batch")) == 6
    assert set(column(at, "batch", "mean_advantage")) != {UNKNOWN}
    assert at.subheader[0].value == "Update 1"
    assert 'href="?update=2"' in words(at)


def test_any_update_is_reached_by_its_number(lk: Lake) -> None:
    at = open_page("training", update=1)
    assert (at.number_input[0].label, at.number_input[0].value) == ("Update, 0 to 3", 1)
    at.number_input[0].set_value(3)
    assert_sound(at.run())
    assert at.subheader[0].value == "Update 3"


def test_curves_of_other_jobs_stand_beside_and_names_are_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lk = show(build_lake(tmp_path), monkeypatch)
    other = add_training(lk, run_id=HOSTILE)
    with lk.job(kind="train", run_id=RUN) as job:
        at_time = datetime(2026, 1, 1, tzinfo=UTC)
        values = {"loss": 1.0, "entropy": 2.0, "alarms": 1.0, "mine": 0.5}
        rows = [{"step": step, "name": n, "value": v, "at": at_time} for step in (0, 1) for n, v in values.items()]
        job.write("metrics", pl.DataFrame(rows))
    at = open_page("training", job=ids.to_text(job.job_id), beside=ids.to_text(other))
    assert at.multiselect[0].value == [ids.to_text(other)]
    assert "trajlake-legend" in words(at)
    assert "an active alarm (2 updates)" in words(at)
    explained = {element.value: element.proto.help for element in at.markdown if element.value.startswith("**")}
    assert explained["**`loss`**"].startswith("The loss of")
    assert explained["**`mine`**"] == "", "only what is ours is explained"


def test_a_metric_that_could_not_be_computed_is_a_dash(lk: Lake) -> None:
    assert facts(open_page("training", update=0))["kl"] == "\u2013"


def test_metrics_beyond_the_first_six_are_drawn_when_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lk = show(build_lake(tmp_path, [rollout("a", 0, 1.0)]), monkeypatch)
    with lk.job(kind="train", run_id=RUN) as job:
        rows = [{"step": 0, "name": f"m{n}", "value": 1.0, "at": datetime(2026, 1, 1, tzinfo=UTC)} for n in range(9)]
        job.write("metrics", pl.DataFrame(rows))
    at = open_page("training")
    assert at.expander[0].label == "3 more metrics"
    assert charts(at) == 6
    assert "recorded no batches" in words(at)


def test_a_learning_rate_that_jumps_is_with_the_first_metrics_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a run whose evaluated task was trained on says so."""
    records = [rollout("a", 0, 1.0), rollout("a", 1, 1.0, split="test")]
    lk = show(build_lake(tmp_path, records), monkeypatch)
    rates, row = (1e-6, 1e-6, 1e-5), lk.sql("SELECT episode_id FROM episodes WHERE split IS NULL").row(0, named=True)
    values = [*[(f"loss{n}", (1.0, 1.0, 1.0)) for n in range(9)], ("learning_rate", rates), ("alarms", (0.0, 0.0, 0.0))]
    at = {"at": datetime(2026, 1, 1, tzinfo=UTC)}
    rows = [{"step": step, "name": name, "value": of[step]} | at for name, of in values for step in range(3)]
    batch = {"optimizer_step": 0, "first_step": 0, "last_step": 2, "action_tokens": 5, "epoch": 0}
    with lk.job(kind="train", run_id=RUN) as job:
        job.write("metrics", pl.DataFrame(rows))
        job.write("batches", pl.DataFrame([row | batch]))
    page = open_page("training")
    assert [one.value for one in page.markdown if one.value == "**`learning_rate`**"], "outside of what is folded"
    assert "2 (1e-06 to 1e-05)" in words(page)
    (warning,) = open_page("runs", run=RUN).warning
    assert "1 of 1, `a`" in warning.value


def test_wrong_training_addresses(lk: Lake) -> None:
    assert "no update 99" in open_page("training", update=99).warning[0].value
    at = open_page("training", job=UNKNOWN_ID)
    assert "no training job" in at.warning[0].value


def test_training_before_any_credit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lk = show(build_lake(tmp_path), monkeypatch)
    add_training(lk)
    at = open_page("training", update=0)
    assert "only outcomes" in words(at)
    assert "mean_advantage" not in columns(at, "batch"), "nothing is known of it"


def test_what_is_cut_or_put_together_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lk = show(build_lake(tmp_path), monkeypatch)
    add_training(lk)
    assert "mean of" not in words(open_page("training"))
    monkeypatch.setattr(training, "POINTS", 2)
    monkeypatch.setattr(training, "JOBS", 1)
    add_training(lk)
    said = words(open_page("training"))
    assert "mean of 2 updates" in said
    assert "1 of 2 jobs" in said


@pytest.mark.parametrize("most", mostly_slow([1, 2], 2))
def test_a_job_that_the_address_names_is_shown_however_old_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    lk = show(build_lake(tmp_path), monkeypatch)
    older, old, _ = add_training(lk), add_training(lk, updates=6, episodes_per_update=4), add_training(lk)
    monkeypatch.setattr(training, "JOBS", most)
    assert job_choice(open_page("training", job=older)).value == ids.to_text(older)
    at = open_page("training", job=older, update=2)
    assert any(heading.value == "Update 2" for heading in at.subheader)
    assert job_choice(open_page("training", update=4)).value == ids.to_text(old), "the newest that has such an update"
    assert not open_page("training", update=4).warning
    assert "no training job" in open_page("training", job=UNKNOWN_ID).warning[0].value


def test_a_job_beside_another_is_drawn_however_old_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lk = show(build_lake(tmp_path), monkeypatch)
    older, _, newest = (add_training(lk) for _ in range(3))
    monkeypatch.setattr(training, "JOBS", 2)
    at = open_page("training", job=newest, beside=ids.to_text(older))
    assert at.multiselect[0].value == [ids.to_text(older)]


def test_the_newest_of_several_training_jobs_is_shown_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lk = show(build_lake(tmp_path), monkeypatch)
    old, new = add_training(lk), add_training(lk, updates=2)
    with pytest.raises(ZeroDivisionError), lk.job(kind="train", run_id=RUN):
        raise ZeroDivisionError
    assert job_choice(open_page("training")).value == ids.to_text(new)
    at = open_page("training", job=old, update=3)
    assert job_choice(at).value == ids.to_text(old)
    job_choice(at).set_value(ids.to_text(new))
    assert_sound(at.run())
    assert [heading.value for heading in at.subheader] == ["Consumed episodes"], "the update belonged to the other"


def test_an_update_without_a_job_says_of_which_it_is_and_offers_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lk = show(build_lake(tmp_path), monkeypatch)
    add_credit(lk)
    old, other, new = add_training(lk), add_training(lk, run_id=HOSTILE), add_training(lk, updates=2)
    at = open_page("training", update=3)
    assert job_choice(at).value == ids.to_text(other), "the newest job has no update 3"
    assert "has an update 3:" in words(at)
    assert f'href="?update=3&amp;job={ids.to_text(old)}"' in words(at)
    assert ids.to_text(new) not in "".join(line for line in words(at).splitlines() if "Others:" in line)
    named = open_page("training", update=0, job=ids.to_text(new))
    assert "Of the newest job" not in words(named)
    assert len(column(named, "batch_groups", "task_id")) == 2
    assert "The batch is of 2 groups, 1 of them dead" in words(named)
    assert "by policy version 0, 0 versions behind" in words(named)
    assert "its neighbour's by 0." in words(named)


def test_a_job_that_has_not_ended_is_not_said_to_have_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed one looks the same: what it wrote last tells."""
    lk = show(build_lake(tmp_path), monkeypatch)
    job = lk.job(kind="train", run_id=RUN).__enter__()
    at_time = datetime(2026, 1, 1, 12, 30, tzinfo=UTC)
    job.write("metrics", pl.DataFrame([{"step": 0, "name": "loss", "value": 1.0, "at": at_time}]))
    assert (
        "not ended, last metrics 01 Jan 12:30:00"
        in job_choice(open_page("training", job=ids.to_text(job.job_id))).options[0]
    )
    at = open_page("jobs", state="not ended")
    assert set(column(at, "jobs", "status")) == {"not ended"}


def test_runs_that_only_trained_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lk = show(build_lake(tmp_path), monkeypatch)
    add_training(lk)
    assert "Trained on" not in words(open_page("runs")), "its run has episodes"
    add_training(lk, run_id="offline")
    newest = add_training(lk, run_id="offline", updates=2)
    at = open_page("runs")
    assert column(at, "trained runs", "run_id") == ["offline"]
    assert column(at, "trained runs", "updates") == ["2"]
    assert links(at, "trained runs") == [f"/training?job={ids.to_text(newest)}"]
    said = words(open_page("runs", run="offline"))
    assert "run has no episodes" in said
    assert f"/training?job={ids.to_text(newest)}" in said
    assert "has no run" not in said


def test_an_episode_that_was_taken_back_says_when_and_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lk = show(build_lake(tmp_path), monkeypatch)
    gone = int(lk.sql("SELECT min(episode_id) FROM episodes").item())
    lk.retract([gone], reason="leaked <b>answer</b>")
    (warning,) = open_page("episode", episode=ids.to_text(gone)).warning
    assert f"{ids.to_text(gone)}` was retracted at 20" in warning.value
    assert "`leaked <b>answer</b>`" in warning.value
    assert "--as-of" in warning.value
    beside = lk.sql("SELECT episode_id FROM episodes ORDER BY ALL LIMIT 2")["episode_id"].to_list()
    at = open_page("compare", episode=list(map(ids.to_text, [gone, *beside])))
    assert [one.value for one in at.warning] == [warning.value]


def test_a_group_that_was_taken_back_says_when_and_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lk = show(build_lake(tmp_path), monkeypatch)
    group = int(lk.sql("SELECT min(group_id) FROM episodes").item())
    members = lk.sql("SELECT episode_id FROM episodes WHERE group_id = ?", [group])["episode_id"].to_list()
    lk.retract(members[:1])
    assert not open_page("group", group=group).warning
    lk.retract(members[1:], reason="leaked <b>answer</b>")
    (warning,) = open_page("group", group=group).warning
    assert f"{ids.to_text(group)}` was taken back: 3 episodes retracted at 20" in warning.value
    assert "`leaked <b>answer</b>`; 1 episode retracted at 20" in warning.value
    assert "holds no group" in open_page("group", group="0" * 13).warning[0].value


# ---------------------------------------------------------------- lineage


def test_jobs_and_one_job(lk: Lake) -> None:
    assert column(open_page("jobs"), "jobs", "kind") == ["train", "credit", "collect"]
    assert column(open_page("jobs", kind="credit"), "jobs", "kind") == ["credit"]
    at = open_page("job", job=job_id(lk, "credit"))
    assert '"gamma": 0.95' in at.code[0].value
    figures = facts(at)
    assert (figures["Groups"], figures["Dead groups"]) == ("6", "33 %")
    assert re.search(r"<li><b>\d+</b> steps in a state", words(at))
    assert "Metrics and batches" in words(open_page("job", job=job_id(lk, "train")))


def test_a_failed_job_shows_its_error_and_a_killed_one_its_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lk = show(build_lake(tmp_path), monkeypatch)
    with pytest.raises(ZeroDivisionError, match="bold"), lk.job(kind="credit"):
        raise ZeroDivisionError("boom **bold**")
    lk.job(kind="train").__enter__()
    failed = open_page("job", job=job_id(lk, "credit"))
    assert failed.error[0].value == "The job failed."
    assert failed.code[0].value == "ZeroDivisionError: boom **bold**"
    assert "running or killed" in words(open_page("job", job=job_id(lk, "train")))


def test_rejects_with_their_raw_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lk = show(build_lake(tmp_path, [rollout("a", 0, 1.0)]), monkeypatch)
    with lk.job(kind="collect", run_id=RUN) as job:
        job.record([rollout("a", 0, 0.0), rollout("b", 0, float("nan"))])
    at = open_page("rejects")
    assert sorted(column(at, "rejects", "reason")) == ["conflict", "invalid"]
    reject = lk.sql("SELECT reject_id FROM rejects WHERE reason = 'invalid'").item()
    at = open_page("rejects", reason="invalid", reject=reject)
    assert "EpisodeRecord(" in at.code[0].value
    assert "env_return" in at.text[0].value
    assert "holds no reject" in open_page("rejects", reject="zzz").warning[0].value


# ---------------------------------------------------------------- pinned


def test_a_session_stays_on_its_snapshot_until_refreshed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lk = show(build_lake(tmp_path), monkeypatch)
    at = open_page("runs")
    with lk.job(kind="collect", run_id=RUN) as job:
        job.record([rollout("new", 0, 1.0)])
    assert_sound(at.run())
    assert facts(at)["Episodes"] == "24"
    at.button(key="refresh").click()
    assert_sound(at.run())
    assert facts(at)["Episodes"] == "25"
    assert facts(open_page("runs"))["Episodes"] == "25", "a new session starts at the newest"


def test_an_older_state_is_chosen_by_name_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lk = show(build_lake(tmp_path), monkeypatch)
    lk.name_snapshot("before")
    with lk.job(kind="collect", run_id=RUN) as job:
        job.record([rollout("new", 0, 1.0)])
    at = open_page("runs", as_of="before")
    assert facts(at)["Episodes"] == "24"
    assert "as_of=before" in words(at), "its links stay there"
    at.button(key="refresh").click()
    assert_sound(at.run())
    assert facts(at)["Episodes"] == "25"
    at = open_page("runs", as_of="nowhere")
    for _ in range(2):
        assert "nowhere" in at.code[0].value, "nothing else is shown for it before the reader asks for that"
        assert_sound(at.run())
    next(button for button in at.button if button.label == "Try again with the newest data").click()
    assert_sound(at.run())
    assert facts(at)["Episodes"] == "25"


def test_newer_episodes_are_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lk = show(build_lake(tmp_path), monkeypatch)
    at = open_page("runs")
    with lk.job(kind="collect", run_id=RUN) as job:
        job.record([rollout("new", 0, 1.0)])
    assert_sound(at.run())
    assert at.button(key="news").label == "1 new episode"
    assert facts(at)["Episodes"] == "24", "the page stays as it is"
    at.button(key="news").click()
    assert_sound(at.run())
    assert facts(at)["Episodes"] == "25"


# ---------------------------------------------------------------- hostile text

HOSTILE = (
    "<script>alert(1)</script> ![b](http://evil.example/x.png) [c](javascript:alert(1)) "
    "`` ` $x$ :red[r] \x1b[31m \u202e"
)


@pytest.fixture(scope="module")
def hostile_lake(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """A lake in which every text that a source can choose is hostile."""
    record = rollout(
        HOSTILE,
        0,
        1.0,
        num_steps=2,
        environment=HOSTILE,
        policy=HOSTILE,
        stop_reason=HOSTILE,
        error=HOSTILE,
        initial_messages=[{"role": "system", "content": HOSTILE}, {"role": HOSTILE, "content": HOSTILE}],
        final_observation=[{"role": "user", "content": HOSTILE}, {"role": 7, "content": {"a": HOSTILE}}],
    )
    for step in record.steps:
        step.state = step.action = step.reasoning = HOSTILE
        step.state_role = HOSTILE
        step.context = [{"role": HOSTILE, "content": "other " + HOSTILE}]
        step.tool_calls = [{"function": {"name": HOSTILE, "arguments": HOSTILE}}, HOSTILE, {"function": HOSTILE}]
    folder = tmp_path_factory.mktemp("hostile")
    lk = build_lake(folder, [record], run_id=HOSTILE)
    add_credit(lk, singleton="raw")
    add_training(lk, updates=1, episodes_per_update=1, run_id=HOSTILE)
    with lk.job(kind=HOSTILE, run_id=HOSTILE) as job:
        job.record([rollout(HOSTILE, 1, float("nan"))])
    label = HOSTILE.encode("ascii", "ignore").decode().replace("@", "").replace("\n", " ")
    label = "".join(filter(str.isprintable, label))[:100]
    said = Annotation(episode_id=lk.sql("SELECT episode_id FROM episodes").item(), label=label, text=HOSTILE, value=1)
    annotate(lk, [said], label)
    annotate(lk, [said], f"{label}!")
    return lk


def markdown_texts(at: Any) -> Iterator[str]:
    """Everything on the page that Streamlit reads as Markdown: texts, and the labels of all widgets."""
    for element in elements(at):
        if element.type in ("markdown", "caption", "header", "subheader", "info", "warning", "error", "success"):
            yield element.value
        elif isinstance(label := getattr(element, "label", None), str):
            yield label


def hostile_pages(lk: Lake) -> Iterator[tuple[str, dict[str, Any]]]:
    (row,) = lk.sql("SELECT episode_id, group_id FROM episodes").to_dicts()
    anchor = lk.sql("SELECT anchor_key FROM advantages LIMIT 1").item()
    yield "runs", {"run": HOSTILE}
    yield "runs", {}
    yield "episodes", {"run": HOSTILE, "task": HOSTILE, "text": "<script>"}
    yield "episodes", {"run": "x" + HOSTILE, "group": HOSTILE}
    yield "episode", {"episode": row["episode_id"], "credit": HOSTILE, "list": HOSTILE}
    yield "groups", {"task": HOSTILE}
    yield "group", {"group": row["group_id"], "anchor": anchor}
    yield "group", {"group": row["group_id"], "anchor": HOSTILE}
    yield "compare", {"episode": row["episode_id"]}
    yield "compare", {"episode": HOSTILE}
    yield "anchors", {"anchor": anchor}
    yield "anchors", {"anchor": HOSTILE, "credit": HOSTILE}
    yield "change", {"a_run": HOSTILE, "b_rounds": HOSTILE, "b_version": HOSTILE, "b_credit": HOSTILE}
    yield "annotations", {}
    yield "sql", {"q": 'SELECT action AS "<b>[x](javascript:alert(1)) :red[r]", episode_id FROM steps'}
    yield "sql", {"q": HOSTILE}
    yield "training", {"update": 0}
    yield "training", {"job": HOSTILE}
    yield "jobs", {}
    for job in lk.sql("SELECT job_id FROM job_runs")["job_id"]:
        yield "job", {"job": job}
    yield "rejects", {"reject": lk.sql("SELECT reject_id FROM rejects").item()}
    yield "rejects", {"reject": HOSTILE}


PAGE_ADDRESS = re.compile(
    r"(/(episodes?|groups?|anchors|annotations|compare|change|download|since|sql|training|jobs?|rejects)?)?(\?[A-Za-z0-9_.~%&=+-]*)?$"
)
"""What links lead to: pages of the viewer, with everything foreign encoded."""


class Harmless(HTMLParser):
    """Refuses HTML that is not the viewer's own: other elements, attributes or addresses, foreign text in a script."""

    tags = frozenset(
        [
            "a",
            "b",
            "br",
            "dd",
            "details",
            "div",
            "dl",
            "dt",
            "h1",
            "li",
            "mark",
            "script",
            "small",
            "span",
            "style",
            "table",
            "tbody",
            "td",
            "th",
            "thead",
            "tr",
            "p",
            "section",
            "summary",
            "ul",
            # Of a drawn reason (rendering.py).
            *("blockquote", "code", "em", "hr", "ol", "pre", "s", "strong"),
        ]
    )
    attributes = frozenset(
        [
            *("class", "title", "role", "scope", "href", "download", "style", "hidden", "open", "start", "tabindex"),
            *("data-cell", "data-column", "data-opened", "data-key"),
        ]
    )

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in self.tags, tag
        for name, value in attrs:
            assert name in self.attributes or name.startswith("aria-"), (tag, name)
            assert name != "style" or "alert" not in str(value), value
            assert name != "href" or PAGE_ADDRESS.match(str(value)), value

    def handle_data(self, data: str) -> None:
        assert self.lasttag not in ("style", "script") or "alert" not in data


def test_hostile_text_is_never_read_as_markdown_or_html(hostile_lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    show(hostile_lake, monkeypatch)
    parser = MarkdownIt("commonmark")
    allowed = {"text", "code_inline", "strong_open", "strong_close", "softbreak", "em_open", "em_close", "link_close"}
    for name, address in hostile_pages(hostile_lake):
        at = open_page(name, **address)
        for text in markdown_texts(at):
            for block in parser.parse(text):
                assert block.type in ("paragraph_open", "inline", "paragraph_close"), (name, text)
                for token in block.children or ():
                    is_ours = token.type == "link_open" and PAGE_ADDRESS.match(str(token.attrs["href"]))
                    assert is_ours or token.type in allowed, (name, text)
                    if token.type == "text":
                        assert "script" not in token.content, (name, text)
                        assert "red[r]" not in token.content, (name, text)
        for element in elements(at):
            if element.type == "html":
                Harmless().feed(element.proto.body)


def test_hostile_text_is_shown_in_full_where_it_is_safe(hostile_lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """No control character reaches the transcript."""
    show(hostile_lake, monkeypatch)
    hostile = hostile_lake.sql("SELECT episode_id FROM episodes").item()
    ready = transcript(open_page("episode", episode=hostile, step=0))["ready"]
    (step,) = [step for step in ready if step["index"] == 0]
    texts = {block["name"]: block["text"] for block in step["blocks"]}
    assert texts["action"] == texts["reasoning"] == texts["state"] == plain.visible(HOSTILE)
    assert "\u202e" not in texts["action"]
    assert r"\u202e" in texts["action"]


def test_half_a_character_in_stored_json_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON can spell a lone surrogate in ASCII; a page could not be sent with it."""
    record = rollout("t", 0, 1.0, num_steps=1)
    record.steps[0].tool_calls = [{"function": {"name": "f", "arguments": '{"half": "\\ud83d"}'}}]
    lk = show(build_lake(tmp_path, [record]), monkeypatch)
    ready = transcript(open_page("episode", episode=episode_id(lk, "t", 0), step=0))["ready"]
    (step,) = [step for step in ready if step["index"] == 0]
    assert r"\ud83d" in step["blocks"][-1]["html"]


def test_the_menus_training_opens_the_job_of_the_run_that_one_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lk = show(build_lake(tmp_path), monkeypatch)
    mine, other = add_training(lk), add_training(lk, run_id=HOSTILE)
    assert job_choice(open_page("training")).value == ids.to_text(other), "nobody looked at a run yet"
    at = open_page("episodes", run=RUN)
    go_to(at, "training")
    at.query_params.clear()
    assert_sound(at.run())
    assert job_choice(at).value == ids.to_text(mine)
    assert "job" not in at.query_params, "Back would lead here again"
    at.number_input[0].set_value(2)
    assert_sound(at.run())
    assert (at.query_params["job"], at.query_params["update"]) == (ids.to_text(mine), "2")


def test_no_page_shows_a_key_that_a_record_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = planted_keys.PlantedKeys()
    file = tmp_path / "episodes.jsonl"
    record = planted_keys.record(places, {"context_ids": [5], "action_ids": [7]})
    reject = {"task_id": 1, "steps": [], "error": places.issued("reject")}
    file.write_text(json.dumps(record) + "\n" + json.dumps(reject) + "\n")
    lk = show(lake.open(tmp_path / "lake", create=True), monkeypatch)
    lk.ingest(file)
    (episode,) = lk.sql("SELECT episode_id FROM episodes")["episode_id"]
    pages = {name: open_page(name) for name in SCREENS} | {"episode": open_page("episode", episode=episode)}
    texts = {name: words(page) for name, page in pages.items()}
    texts["transcript"] = json.dumps(transcript(pages["episode"]))
    assert {name: where for name, text in texts.items() if (where := places.readable(text))} == {}
    assert "[redacted]" in texts["transcript"]
    assert [name for name in SCREENS if "[redacted]" in texts[name]]
