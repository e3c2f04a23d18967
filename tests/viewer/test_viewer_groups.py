"""The list of groups: its filters, facets and scores against what plain Python finds among the episodes."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from statistics import fmean
from typing import Any
from urllib.parse import parse_qs

import polars as pl
import pytest

from lake import Lake, ids
from lake.judgements.selections import read_grouping
from lake.records import EpisodeRecord
from lake.write.scores import Annotation, annotate
from pipelines.groupings import Grouping, MergeRuns, run_grouping
from testkit.lakes import RUN, add_credit, build_lake, rollout
from testkit.streamlit_pages import column, columns, links, open_page, show, words
from viewer.queries import ListWindow, Sort, groups
from viewer.queries.episodes import FACETS, EpisodeFilter
from viewer.queries.groups import GroupFilter, Signal
from viewer.reader import Reader

ALL = ListWindow(1000)


@dataclass(frozen=True)
class Played:
    """An episode, and all that a facet may say of it."""

    task: str
    index: int
    outcome: float | None
    tool: str | None = None
    error: str | None = None
    judge: float | None = None
    tag: str | None = None
    says: str = "nothing"
    round: int = 0

    def record(self) -> EpisodeRecord:
        fields: dict[str, Any] = {"error": "gone", "status": "failed"} if self.error == "rollout" else {}
        made = rollout(self.task, self.index, self.outcome, collection_round=self.round, **fields)
        made.steps[0].action = self.says
        if self.tool is not None:
            made.steps[0].tool_calls = [{"function": {"name": self.tool, "arguments": "{}"}}]
        made.steps[1].state_is_error = self.error == "state"
        return made


EPISODES = [
    Played("both", 0, 1.0, tool="find", judge=0.25, tag="odd", says="the lamp"),
    Played("both", 1, 0.0, tool="pay", error="state", judge=0.5),
    Played("dead", 0, 1.0, tool="find", judge=1.0, says="a lamp and a key"),
    Played("dead", 1, 1.0, tool="find", error="state"),
    Played("later", 0, 0.0, tool="pay", round=1, says="the key"),
    Played("later", 1, 1.0, error="rollout", round=1, tag="odd"),
    Played("dead", 0, 0.0, tool="pay", judge=0.0, round=1, says="the lamp"),
    Played("alone", 0, None, tag="even", judge=0.75),
    Played("alone", 1, 0.5, says="the lamp"),
]
FILTERS = [
    EpisodeFilter(),
    EpisodeFilter(run=RUN),
    EpisodeFilter(run="nobody"),
    EpisodeFilter(task="*e*", collection_round=1),
    EpisodeFilter(low=0.5),
    EpisodeFilter(unscored=True),
    EpisodeFilter(status=("failed",)),
    EpisodeFilter(tool="find"),
    EpisodeFilter(tool="find", tag="odd"),
    EpisodeFilter(tool="pay", tag="odd"),
    EpisodeFilter(failed="pay"),
    EpisodeFilter(error="state"),
    EpisodeFilter(scorer="judge", high=0.0),
    EpisodeFilter(flag="dead_group"),
    EpisodeFilter(text="lamp"),
    EpisodeFilter(text="lamp", tool="find"),
    EpisodeFilter(text="key", sql="SELECT episode_id FROM episodes WHERE task_id <> 'dead'"),
]


@dataclass
class World:
    """The lake, and of each of its episodes the group, the values of each facet, and what was played."""

    lk: Lake
    reader: Reader
    played: dict[int, Played] = field(default_factory=dict)
    groups: dict[int, list[int]] = field(default_factory=dict)
    merged: dict[int, list[int]] = field(default_factory=dict)
    flags: dict[int, set[str]] = field(default_factory=dict)

    def values(self, episode: int, facet: str) -> set[str]:
        """What a facet says of an episode."""
        one = self.played[episode]
        said = {
            "tool": one.tool,
            "failed": one.tool if one.error == "state" else None,
            "error": one.error,
            "scorer": None if one.judge is None else "judge",
            "tag": one.tag,
        }
        return self.flags[episode] if facet == "flag" else {value for value in (said[facet],) if value}

    def is_wanted(self, episode: int, wanted: EpisodeFilter) -> bool:
        """Whether an episode is on the list of episodes."""
        one = self.played[episode]
        return (
            wanted.run in (None, RUN)
            and (wanted.task is None or wanted.task.strip("*") in one.task)
            and wanted.collection_round in (None, one.round)
            and (wanted.low is None or (one.outcome is not None and one.outcome >= wanted.low))
            and (wanted.high is None or (one.outcome is not None and one.outcome <= wanted.high))
            and (not wanted.unscored or one.outcome is None)
            and (not wanted.status or one.error == "rollout")
            and all(getattr(wanted, facet) in (None, *self.values(episode, facet)) for facet in FACETS)
            and (wanted.text is None or wanted.text in one.says)
            and (wanted.sql is None or one.task != "dead")
        )

    def listed(self, wanted: GroupFilter) -> Iterator[int]:
        """The groups of a list."""
        for group, members in (self.merged if wanted.grouping else self.groups).items():
            outcomes = [self.played[one].outcome for one in members if self.played[one].outcome is not None]
            signal = "unjudged" if len(outcomes) < 2 else "live" if len(set(outcomes)) > 1 else "dead"
            if wanted.signal in (None, signal) and any(self.is_wanted(one, wanted.having) for one in members):
                yield group


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    lk = build_lake(tmp_path_factory.mktemp("groups"), [one.record() for one in EPISODES])
    add_credit(lk)
    facts = lk.sql("SELECT run_id, group_id, episode_id, task_id, rollout_index, collection_round FROM episodes")
    rows = facts.to_dicts()
    by_name = {(one.task, one.index, one.round): one for one in EPISODES}
    played = {row["episode_id"]: by_name[row["task_id"], row["rollout_index"], row["collection_round"]] for row in rows}
    judged = facts.with_columns(value=pl.Series([played[one].judge for one in facts["episode_id"]], dtype=pl.Float64))
    with lk.job(kind="score", run_id=RUN) as job:
        names = {"scorer": pl.lit("judge"), "scorer_version": pl.lit("1"), "step_index": pl.lit(None, pl.Int32)}
        scores = judged.select("run_id", "group_id", "episode_id", "value").drop_nulls().with_columns(**names)
        job.write("scores", scores)
    labelled = {one: made.tag for one, made in played.items() if made.tag}
    annotate(lk, [Annotation(episode_id=one, label=tag, text="x") for one, tag in labelled.items()], "ann")
    run_grouping(lk, Grouping(name="merged", steps=(MergeRuns(),)))
    found = World(lk, Reader(lk.snapshot()), played)
    for row in rows:
        found.groups.setdefault(row["group_id"], []).append(row["episode_id"])
    for row in read_grouping(lk.snapshot(), "merged").iter_rows(named=True):
        found.merged.setdefault(row["group_id"], []).append(row["episode_id"])
    for episode, flags in lk.sql("SELECT episode_id, flags FROM current_advantages").iter_rows():
        found.flags.setdefault(episode, set()).update(filter(None, flags.split(",")))
    return found


def lists(every: bool) -> list[GroupFilter]:
    """Each filter of episodes with every signal, as collected and merged; or with none and one of the others."""
    ways = list(product((None, *Signal), (None, "merged")))
    return [
        GroupFilter(having, signal, grouping)
        for number, having in enumerate(FILTERS)
        for signal, grouping in (ways if every else (ways[0], ways[1 + number % (len(ways) - 1)]))
    ]


EVERY = [False, pytest.param(True, marks=pytest.mark.slow("every filter of groups with every signal and grouping"))]


@pytest.mark.parametrize("every", EVERY)
def test_a_group_is_listed_for_an_episode_that_matches(world: World, every: bool) -> None:
    for wanted in lists(every):
        grouping = wanted.grouping
        expected = sorted(world.listed(wanted))
        found = groups.read_page(world.reader, wanted, ALL)
        assert sorted(found["group_id"]) == expected, wanted
        assert groups.count_groups(world.reader, wanted) == len(expected)
        members = world.merged if grouping else world.groups
        assert all(row["size"] == len(members[row["group_id"]]) for row in found.to_dicts()), "of all siblings"


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("facet", FACETS)
def test_a_facet_counts_groups_and_narrows_to_them(world: World, facet: str, every: bool) -> None:
    values = {value for one in world.played for value in world.values(one, facet)}
    thirds = [GroupFilter(), *lists(every)[list(FACETS).index(facet) % 3 :: 3]]
    for wanted in lists(every) if every else thirds:
        if getattr(wanted.having, facet) is None:
            narrowed = {value: replace(wanted, having=replace(wanted.having, **{facet: value})) for value in values}
            expected = {value: len(list(world.listed(one))) for value, one in narrowed.items()}
            found = dict(groups.count_group_facet_values(world.reader, facet, wanted).frame.iter_rows())
            assert found == {value: number for value, number in expected.items() if number}, wanted


def test_scores_of_a_group_are_means_of_its_siblings(world: World) -> None:
    for grouping, members in ((None, world.groups), ("merged", world.merged)):
        found = groups.read_mean_scores(world.reader, GroupFilter(grouping=grouping), tuple(members))
        expected = {}
        for group, episodes in members.items():
            if known := [score for one in episodes if (score := world.played[one].judge) is not None]:
                expected[group, "judge"] = fmean(known)
        assert {(row["group_id"], row["scorer"]): row["value"] for row in found.to_dicts()} == pytest.approx(expected)


def test_the_pages_of_a_list_are_it_in_its_order(world: World) -> None:
    wanted = GroupFilter(EpisodeFilter(text="lamp"))
    for sort in (None, *(Sort(name, descending=True) for name in ("mean_return", "ways_in"))):
        whole = groups.read_page(world.reader, wanted, ALL, sort)
        pages = [groups.read_page(world.reader, wanted, ListWindow(1, at), sort) for at in range(whole.height)]
        assert pl.concat(pages).equals(whole)
    tasks = groups.read_page(world.reader, GroupFilter(), ALL)["task_id"].to_list()
    assert tasks == ["alone", "both", "dead", "dead", "later"], "by round, then task"


def test_the_page_has_chips_facets_and_scores(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    show(world.lk, monkeypatch)
    at = open_page("groups", tool="find", signal="live", facets="true")
    assert column(at, "groups", "task_id") == ["both"]
    assert column(at, "groups", "score-0") == ["0.375"]
    assert "Mean judge" in words(at)
    for chip in ("tool: find", "signal: live", "clear all", "odd 1"):
        assert f">{chip}" in words(at)
    assert links(at, "groups") == [f"/group?group={column(at, 'groups', 'group_id')[0]}"]
    assert "score-0" not in columns(open_page("groups", score="judge"), "groups"), "the outcome has a column already"


def test_a_search_without_words_and_a_query_without_rows_are_explained(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    show(world.lk, monkeypatch)
    assert "needs a letter" in open_page("groups", text="...").warning[0].value
    assert "has no result" in open_page("groups", sql="SELECT nothing").warning[0].value


def test_episodes_that_pages_show_are_a_list_of_their_own(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Siblings, those that passed a state, in one group and in all."""
    show(world.lk, monkeypatch)
    group = next(group for group, members in world.groups.items() if world.played[members[0]].task == "both")
    anchor, groups_ = world.lk.sql(
        "SELECT anchor_key, list(DISTINCT group_id) FROM current_advantages "
        "WHERE anchor_episodes > 1 AND step_index = 0 GROUP BY ALL"
    ).row(0)
    assert len(groups_) > 1
    everywhere = {one for each in groups_ for one in world.groups[each]}
    for page, address, expected in (
        ("group", {"group": group}, set(world.groups[group])),
        ("group", {"group": group, "anchor": anchor}, set(world.groups[group])),
        ("anchors", {"anchor": anchor}, everywhere),
    ):
        led = as_lists(open_page(page, **address))
        assert len(led) == (2 if len(address) == 2 else 1)
        for given in led:
            shown = column(open_page("episodes", **given), "episodes", "episode_id")
            assert sorted(shown) == sorted(map(ids.to_text, expected))


def as_lists(at: Any) -> list[dict[str, str]]:
    """What the links to lists of episodes ask for."""
    found = re.findall(r"\[As a list of episodes\]\(/episodes\?([^)]*)\)", words(at))
    return [{name: values[0] for name, values in parse_qs(one).items()} for one in found]
