"""Anchors over a whole credit: every figure against plain loops over the rows, and the page without a browser."""

import json
import random
import shlex
from collections import defaultdict
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from click.testing import CliRunner

from lake import Lake, ids
from lake.cli import trajlake
from lake.cli.options import format_ids
from lake.judgements.credit import find_credit
from testkit.lakes import RUN, add_credit, build_lake, rollout
from testkit.streamlit_pages import column, links, open_page, words
from viewer import download
from viewer.queries import ListWindow, Sort, anchors
from viewer.reader import Reader
from viewer.server import ENVIRONMENT

ALL = ListWindow(1000)
TEXTS = ["[]", "Error: no such room", "room 0", "room 1", "room 2"]


@pytest.fixture(scope="module")
def lk(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """Three groups of four rollouts that wander through the same few states."""
    draw = random.Random(3)
    records = []
    for task in range(3):
        for index in range(4):
            record = rollout(f"t{task}", index, float(draw.randint(0, 2)), num_steps=6)
            for step in record.steps:
                step.state = draw.choice(TEXTS)
                step.state_is_error = step.state.startswith("Error")
                step.action = f"go {draw.randint(0, 30)}"
            records.append(record)
    lk = build_lake(tmp_path_factory.mktemp("anchors"), records)
    add_credit(lk)
    return lk


@pytest.fixture(scope="module")
def snap(lk: Lake) -> Reader:
    return Reader(lk.snapshot())


@pytest.fixture(scope="module")
def visits(lk: Lake) -> dict[int, list[dict[str, Any]]]:
    """By anchor, the steps taken from it in groups whose siblings share it, with the text and the action before."""
    steps = {(row["episode_id"], row["step_index"]): row for row in lk.snapshot().scan("steps").collect().to_dicts()}
    by_group = defaultdict(list)
    for row in lk.snapshot().scan("advantages").collect().to_dicts():
        key = (row["episode_id"], row["step_index"])
        before = steps.get((key[0], key[1] - 1))
        fields = {"state": steps[key]["state"], "action": steps[key]["action"]}
        led = {"led_here": None if before is None else before["action"]}
        by_group[row["anchor_key"], row["group_id"]].append(row | fields | led)
    visits_by_state: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for (anchor, _), rows in by_group.items():
        if len({row["episode_id"] for row in rows}) > 1:
            visits_by_state[anchor] += rows
    return visits_by_state


def by_group(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    visits_by_state = defaultdict(list)
    for row in rows:
        visits_by_state[row["group_id"]].append(row)
    return list(visits_by_state.values())


def spread(rows: list[dict[str, Any]]) -> float:
    returns = [row["return_to_go"] for row in rows]
    return float(max(returns) - min(returns))


def weight(rows: list[dict[str, Any]]) -> float:
    return float(sum(abs(row["a_step"]) for row in rows))


def test_every_figure_of_a_state(snap: Reader, visits: dict[int, list[dict[str, Any]]]) -> None:
    frame = anchors.read_states(snap, find_credit(snap), ALL)
    assert frame["share"].to_list() == sorted(frame["share"], reverse=True)
    assert sorted(frame["anchor_key"]) == sorted(visits)
    total = sum(map(weight, visits.values()))
    for row in frame.to_dicts():
        mine = visits[row["anchor_key"]]
        groups = by_group(mine)
        assert row["state"] == mine[0]["state"]
        assert (row["groups"], row["size"], row["episodes"]) == (
            len(groups),
            len(mine),
            len({visit["episode_id"] for visit in mine}),
        )
        assert row["spread"] == pytest.approx(sum(map(spread, groups)) / len(groups))
        assert row["share"] == pytest.approx(weight(mine) / total)
        assert row["actions"] == len({visit["action"] for visit in mine})
        assert row["ways_in"] == len({visit["led_here"] for visit in mine} - {None})
        assert row["states"] == 1
        assert row["doubt"] == {"[]": "empty", "Error: no such room": "error text"}.get(row["state"])


def test_how_much_is_shared(lk: Lake, snap: Reader, visits: dict[int, list[dict[str, Any]]]) -> None:
    assert anchors.count_states(snap, find_credit(snap)) == {
        "anchors": len(visits),
        "steps": lk.snapshot().scan("advantages").collect().height,
        "shared": sum(map(len, visits.values())),
    }


class Counting(Reader):
    """A reader that knows what it was asked."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.asked: list[str] = []

    def sql(self, query: str, params: Any = None) -> pl.DataFrame:
        self.asked.append(query)
        return super().sql(query, params)


@pytest.mark.parametrize("order", ["", "-spread", "ways_in"])
def test_a_whole_list_goes_through_the_advantages_once(
    lk: Lake, snap: Reader, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    monkeypatch.setitem(download.LISTS, "anchors", 2)
    reader = Counting(lk.snapshot())
    frames = list(download.read_list(reader, "anchors", {"credit": "gigpo", "sort": order}))
    assert [part.height for part in frames] == [2, 2, 1], "five states"
    expected = anchors.read_states(snap, find_credit(snap), ALL, Sort.parse(order))
    assert pl.concat(frames).equals(format_ids(expected))
    through_all = [query for query in reader.asked if "GROUP BY anchor_key, group_id" in query]
    assert len(through_all) == 1


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("name", [*anchors.STATE_ORDERS, *anchors.TEXT_ORDERS])
def test_states_are_ordered_and_paged_on_the_server(snap: Reader, name: str, descending: bool) -> None:
    credit, sort = find_credit(snap), Sort(name, descending)
    values = anchors.read_states(snap, credit, ALL, sort)[name]
    assert values.to_list() == values.sort(descending=descending, nulls_last=True).to_list()
    assert anchors.read_states(snap, credit, ListWindow(2, 1), sort)[name].to_list() == values.to_list()[1:3]


def test_the_groups_of_a_state(snap: Reader, visits: dict[int, list[dict[str, Any]]]) -> None:
    credit = find_credit(snap)
    for anchor, mine in visits.items():
        expected = {rows[0]["group_id"]: rows for rows in by_group(mine)}
        actual = anchors.read_groups(snap, credit, anchor, ALL).to_dicts()
        assert anchors.count_siblings(snap, credit, anchor)["groups"] == len(actual)
        for row in actual:
            steps = anchors.read_visits(snap, row["group_id"], anchor, credit, ALL)
            assert anchors.count_visits(snap, row["group_id"], anchor, credit) == steps.height == row["size"]
        assert {row["group_id"] for row in actual} == expected.keys()
        assert [row["weight"] for row in actual] == sorted((row["weight"] for row in actual), reverse=True)
        for row in actual:
            rows = expected[row["group_id"]]
            assert (row["run_id"], row["size"]) == (RUN, len(rows))
            assert row["weight"] == pytest.approx(weight(rows))
            assert row["spread"] == pytest.approx(spread(rows))
    for name in anchors.GROUP_ORDERS:
        values = anchors.read_groups(snap, credit, next(iter(visits)), ALL, Sort(name))[name]
        assert values.to_list() == values.sort(nulls_last=True).to_list()


def test_a_frequent_state_is_judged_by_a_sample(
    snap: Reader, visits: dict[int, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(anchors, "SAMPLE", 1)
    for row in anchors.read_states(snap, find_credit(snap), ALL).to_dicts():
        assert (row["actions"], row["states"]) == (1, 1)
        assert row["size"] == len(visits[row["anchor_key"]]), "what needs no text is of all steps"


def test_from_a_state_to_the_steps_of_a_group(lk: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, lk.uri)
    at = open_page("anchors")
    first = column(at, "states", "anchor_key")[0]
    assert links(at, "states")[0] == f"?anchor={first}"
    assert f"trajlake anchors --keep --lake {lk.uri}" in [code.value for code in at.code]
    at = open_page("anchors", anchor=first)
    groups = column(at, "groups_of_a_state", "group_id")
    series = ids.to_text(find_credit(lk.snapshot()).series_id)
    assert links(at, "groups_of_a_state")[0] == f"/group?group={groups[0]}&anchor={first}&credit={series}"


def test_other_definitions_are_shown_as_they_were_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lk = build_lake(tmp_path)
    add_credit(lk)
    anchors_command = ["anchors", "--lake", lk.uri, "--groups", "3", "--format", "json"]
    before = lk.snapshot().versions
    figures = json.loads(CliRunner().invoke(trajlake, anchors_command, catch_exceptions=False).stdout)
    assert lk.snapshot().versions == before, "nothing is kept unasked"
    CliRunner().invoke(trajlake, [*anchors_command, "--keep"], catch_exceptions=False)
    monkeypatch.setenv(ENVIRONMENT, lk.uri)
    at = open_page("anchors")
    assert column(at, "definitions", "anchors") == [row["anchors"] for row in figures]
    assert column(at, "definitions", "shared") == [f"{row['shared']:.2f}" for row in figures]
    assert f"trajlake anchors --keep --lake {lk.uri} --groups 3" in [code.value for code in at.code]
    assert "Episodes were recorded since" not in words(at)
    spelled = dict(zip(column(at, "definitions", "anchors"), column(at, "definitions", "definition"), strict=True))
    with lk.job(kind="collect", run_id="later") as job:
        job.record([rollout("later", 0, 1.0)])
        job.counts |= {"rows_out": 1}
    at = open_page("anchors", definition="no errors")
    assert "Episodes were recorded since" in words(at)
    command = next(code.value for code in at.code if code.value.startswith("trajlake credit"))
    assert shlex.split(command)[1:] == ["credit", "gigpo", "--lake", lk.uri, "--set", f"anchors={spelled['no errors']}"]
    assert CliRunner().invoke(trajlake, shlex.split(command)[1:], catch_exceptions=False).exit_code == 0


@pytest.mark.parametrize(
    ("parameters", "fragment"),
    [
        ({"anchor": "x"}, "is not the id of an anchor."),
        ({"anchor": "0000000000000"}, "No siblings share a state"),
        ({"credit": "nobody"}, "names no credit"),
    ],
)
def test_wrong_addresses_are_answered_in_words(
    lk: Lake, monkeypatch: pytest.MonkeyPatch, parameters: dict[str, str], fragment: str
) -> None:
    monkeypatch.setenv(ENVIRONMENT, lk.uri)
    assert any(fragment in warning.value for warning in open_page("anchors", **parameters).warning)


def test_a_lake_without_credit_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, build_lake(tmp_path).uri)
    assert "holds no advantages" in words(open_page("anchors"))
