"""Which tools fail: figures against plain loops over the records, and the pages that show them."""

import random
from collections import defaultdict
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from lake import Lake
from lake.records import EpisodeRecord
from testkit.lakes import RUN, build_lake, rollout
from testkit.streamlit_pages import column, links, open_page, show, words
from viewer.queries import compare
from viewer.queries.compare import Side
from viewer.queries.episodes import EpisodeFilter, compute_totals
from viewer.reader import Reader

NAMES = ("find", "book", 'odd "name"', "pay")


def played(seed: int) -> list[EpisodeRecord]:
    """Three rounds of episodes whose steps call some tools or none, in both shapes; `pay` fails in the last round."""
    draw = random.Random(seed)
    records = []
    for round_ in range(3):
        for index in range(12):
            record = rollout(f"t{index % 3}", index, 1.0, num_steps=draw.randint(1, 5), collection_round=round_)
            names = [draw.choices(NAMES, k=draw.randint(0, 3)) for _ in record.steps]
            for step, called in zip(record.steps, names, strict=True):
                step.tool_calls = [
                    {"function": {"name": name}} if draw.random() < 0.5 else {"name": name} for name in called
                ]
            for step, called in zip(record.steps[1:], names, strict=False):
                fails = called[-1:] == ["pay"] and round_ == 2 and draw.random() < 0.7
                step.state_is_error = draw.choice([None, fails, fails, fails])
            records.append(record)
    return records


EPISODES = played(3)


@pytest.fixture(scope="module")
def lk(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    return build_lake(tmp_path_factory.mktemp("tools"), EPISODES)


@pytest.fixture(scope="module")
def snap(lk: Lake) -> Reader:
    return Reader(lk.snapshot())


def calls(episodes: list[EpisodeRecord]) -> dict[tuple[int, str], list[bool]]:
    """By round and tool, whether each call failed whose end is known: the last of its step, and no last step's."""
    calls_by_key = defaultdict(list)
    for episode in episodes:
        for step, after in zip(episode.steps, episode.steps[1:], strict=False):
            if step.tool_calls and after.state_is_error is not None:
                last: dict[str, Any] = step.tool_calls[-1]
                name = last.get("function", last)["name"]
                calls_by_key[episode.collection_round or 0, name].append(after.state_is_error)
    return calls_by_key


def test_tools_over_rounds(snap: Reader) -> None:
    expected = calls(EPISODES)
    rows = compare.read_tools_over(snap, RUN, "collection_round").to_dicts()
    assert {(row["x"], row["tool"]) for row in rows} == set(expected)
    for row in rows:
        failed = expected[row["x"], row["tool"]]
        assert (row["calls"], row["failed"], row["share"]) == (
            len(failed), sum(failed), pytest.approx(sum(failed) / len(failed))
        )  # fmt: skip


def test_the_tool_that_failed_most_comes_first_with_the_round_in_which_it_began(snap: Reader) -> None:
    first, *rest = compare.sum_tools(compare.read_tools_over(snap, RUN, "collection_round")).to_dicts()
    assert (first["tool"], first["first"]) == ("pay", 2)
    assert {row["first"] for row in rest} == {None}
    assert sum(row["calls"] for row in (first, *rest)) == sum(map(len, calls(EPISODES).values()))


def test_tools_of_two_sides(snap: Reader) -> None:
    sides = [compare.read_tools(snap, Side(RUN, (0, 1))), compare.read_tools(snap, Side(RUN, (2, 2)))]
    expected = calls(EPISODES)
    for frame, rounds in zip(sides, ((0, 1), (2,)), strict=True):
        for row in frame.to_dicts():
            failed = [is_error for round_ in rounds for is_error in expected[round_, row["tool"]]]
            assert (row["calls"], row["failed"]) == (len(failed), sum(failed))
    top = compare.compare_tools(*sides).row(0, named=True)
    share = expected[2, "pay"]
    assert (top["tool"], top["a_share"]) == ("pay", 0.0)
    assert top["difference"] == pytest.approx(sum(share) / len(share))
    alone = compare.compare_tools(sides[0].filter(tool="find"), sides[0].filter(tool="book"))
    assert alone["difference"].to_list() == [None, None], "a tool that one side never calls is not compared"


def test_of_many_episodes_some_are_drawn(snap: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    total = compare.read_tools_over(snap, RUN, "collection_round")["calls"].sum()
    monkeypatch.setattr(compare, "TOOL_SAMPLE", 10)
    some = compare.read_tools_over(snap, RUN, "collection_round")
    assert 0 < some["calls"].sum() < total
    assert some.equals(compare.read_tools_over(snap, RUN, "collection_round")), "the same ones every time"


def test_nothing_is_told_of_calls_whose_end_nobody_looked_at(tmp_path: Path) -> None:
    blind = rollout("t", 0, 1.0)
    blind.steps[0].tool_calls = [{"name": "find"}]
    assert compare.read_tools_over(build_lake(tmp_path, [blind]).snapshot(), RUN, "collection_round").is_empty()


def test_pages_name_the_tool_and_the_round_and_open_its_episodes(lk: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    show(lk, monkeypatch)
    at = open_page("runs", run=RUN)
    assert column(at, "tools", "tool")[0] == "pay"
    assert column(at, "tools", "first")[0] == "2"
    target = urlsplit(str(links(at, "tools")[0]))
    assert (target.path, parse_qs(target.query)) == ("/episodes", {"run": [RUN], "failed": ["pay"]})
    failing = {
        id(episode)
        for episode in EPISODES
        if (episode.collection_round, "pay") and any(calls([episode]).get((2, "pay"), ()))
    }
    assert compute_totals(Reader(lk.snapshot()), EpisodeFilter(run=RUN, failed="pay"))["episodes"] == len(failing)
    assert "failed call: pay" in words(open_page("episodes", run=RUN, failed="pay"))
    page = open_page("change", a_run=RUN, a_rounds="0-1", b_run=RUN, b_rounds="2")
    assert column(page, "tools_of_both_sides", "tool")[0] == "pay"
    assert parse_qs(urlsplit(str(links(page, "tools_of_both_sides")[0])).query) == {
        "run": [RUN], "round": ["2"], "failed": ["pay"]
    }  # fmt: skip
    assert links(page, "tools_of_both_sides")[1] is None, "no episode to open where no call failed"
