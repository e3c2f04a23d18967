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
        record = rollout(self.task, self.index, self.outcome, collection_round=self.round, **fields)
        record.steps[0].action = self.says
        if self.tool is not None:
            record.steps[0].tool_calls = [{"function": {"name": self.tool, "arguments": "{}"}}]
        record.steps[1].state_is_error = self.error == "state"
        return record


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
        made_episode = self.played[episode]
        values_of_facets = {
            "tool": made_episode.tool,
            "failed": made_episode.tool if made_episode.error == "state" else None,
            "error": made_episode.error,
            "scorer": None if made_episode.judge is None else "judge",
            "tag": made_episode.tag,
        }
        return self.flags[episode] if facet == "flag" else {value for value in (values_of_facets[facet],) if value}

    def is_wanted(self, episode: int, condition: EpisodeFilter) -> bool:
        """Whether an episode is on the list of episodes."""
        made_episode = self.played[episode]
        return (
            condition.run in (None, RUN)
            and (condition.task is None or condition.task.strip("*") in made_episode.task)
            and condition.collection_round in (None, made_episode.round)
            and (condition.low is None or (made_episode.outcome is not None and made_episode.outcome >= condition.low))
            and (
                condition.high is None or (made_episode.outcome is not None and made_episode.outcome <= condition.high)
            )
            and (not condition.unscored or made_episode.outcome is None)
            and (not condition.status or made_episode.error == "rollout")
            and all(getattr(condition, facet) in (None, *self.values(episode, facet)) for facet in FACETS)
            and (condition.text is None or condition.text in made_episode.says)
            and (condition.sql is None or made_episode.task != "dead")
        )

    def listed(self, condition: GroupFilter) -> Iterator[int]:
        """The groups of a list."""
        for group, members in (self.merged if condition.grouping else self.groups).items():
            outcomes = [self.played[member].outcome for member in members if self.played[member].outcome is not None]
            signal = "unjudged" if len(outcomes) < 2 else "live" if len(set(outcomes)) > 1 else "dead"
            if condition.signal in (None, signal) and any(
                self.is_wanted(member, condition.having) for member in members
            ):
                yield group


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    lk = build_lake(tmp_path_factory.mktemp("groups"), [made_episode.record() for made_episode in EPISODES])
    add_credit(lk)
    facts = lk.sql("SELECT run_id, group_id, episode_id, task_id, rollout_index, collection_round FROM episodes")
    rows = facts.to_dicts()
    by_name = {(made_episode.task, made_episode.index, made_episode.round): made_episode for made_episode in EPISODES}
    played = {row["episode_id"]: by_name[row["task_id"], row["rollout_index"], row["collection_round"]] for row in rows}
    judged = facts.with_columns(
        value=pl.Series([played[episode_id].judge for episode_id in facts["episode_id"]], dtype=pl.Float64)
    )
    with lk.job(kind="score", run_id=RUN) as job:
        names = {"scorer": pl.lit("judge"), "scorer_version": pl.lit("1"), "step_index": pl.lit(None, pl.Int32)}
        scores = judged.select("run_id", "group_id", "episode_id", "value").drop_nulls().with_columns(**names)
        job.write("scores", scores)
    labelled = {episode_id: made_episode.tag for episode_id, made_episode in played.items() if made_episode.tag}
    annotate(
        lk, [Annotation(episode_id=episode_id, label=tag, text="x") for episode_id, tag in labelled.items()], "ann"
    )
    run_grouping(lk, Grouping(name="merged", steps=(MergeRuns(),)))
    world = World(lk, Reader(lk.snapshot()), played)
    for row in rows:
        world.groups.setdefault(row["group_id"], []).append(row["episode_id"])
    for row in read_grouping(lk.snapshot(), "merged").iter_rows(named=True):
        world.merged.setdefault(row["group_id"], []).append(row["episode_id"])
    for episode, flags in lk.sql("SELECT episode_id, flags FROM current_advantages").iter_rows():
        world.flags.setdefault(episode, set()).update(filter(None, flags.split(",")))
    return world


def lists(is_everything: bool) -> list[GroupFilter]:
    """Each filter of episodes with every signal, as collected and merged; or with none and one of the others."""
    ways = list(product((None, *Signal), (None, "merged")))
    return [
        GroupFilter(having, signal, grouping)
        for number, having in enumerate(FILTERS)
        for signal, grouping in (ways if is_everything else (ways[0], ways[1 + number % (len(ways) - 1)]))
    ]


EVERY = [False, pytest.param(True, marks=pytest.mark.slow("every filter of groups with every signal and grouping"))]


@pytest.mark.parametrize("is_everything", EVERY)
def test_a_group_is_listed_for_an_episode_that_matches(world: World, is_everything: bool) -> None:
    for condition in lists(is_everything):
        grouping = condition.grouping
        expected = sorted(world.listed(condition))
        frame = groups.read_page(world.reader, condition, ALL)
        assert sorted(frame["group_id"]) == expected, condition
        assert groups.count_groups(world.reader, condition) == len(expected)
        members = world.merged if grouping else world.groups
        assert all(row["size"] == len(members[row["group_id"]]) for row in frame.to_dicts()), "of all siblings"


@pytest.mark.parametrize("is_everything", EVERY)
@pytest.mark.parametrize("facet", FACETS)
def test_a_facet_counts_groups_and_narrows_to_them(world: World, facet: str, is_everything: bool) -> None:
    values = {value for episode_id in world.played for value in world.values(episode_id, facet)}
    thirds = [GroupFilter(), *lists(is_everything)[list(FACETS).index(facet) % 3 :: 3]]
    for condition in lists(is_everything) if is_everything else thirds:
        if getattr(condition.having, facet) is None:
            narrowed = {
                value: replace(condition, having=replace(condition.having, **{facet: value})) for value in values
            }
            expected = {value: len(list(world.listed(condition))) for value, condition in narrowed.items()}
            counts = dict(groups.count_group_facet_values(world.reader, facet, condition).frame.iter_rows())
            assert counts == {value: number for value, number in expected.items() if number}, condition


def test_scores_of_a_group_are_means_of_its_siblings(world: World) -> None:
    for grouping, members in ((None, world.groups), ("merged", world.merged)):
        frame = groups.read_mean_scores(world.reader, GroupFilter(grouping=grouping), tuple(members))
        expected = {}
        for group, episodes in members.items():
            if scores := [score for episode_id in episodes if (score := world.played[episode_id].judge) is not None]:
                expected[group, "judge"] = fmean(scores)
        assert {(row["group_id"], row["scorer"]): row["value"] for row in frame.to_dicts()} == pytest.approx(expected)


def test_the_pages_of_a_list_are_it_in_its_order(world: World) -> None:
    condition = GroupFilter(EpisodeFilter(text="lamp"))
    for sort in (None, *(Sort(name, descending=True) for name in ("mean_return", "ways_in"))):
        frame = groups.read_page(world.reader, condition, ALL, sort)
        pages = [groups.read_page(world.reader, condition, ListWindow(1, at), sort) for at in range(frame.height)]
        assert pl.concat(pages).equals(frame)
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
    everywhere = {episode_id for each in groups_ for episode_id in world.groups[each]}
    for page, address, expected in (
        ("group", {"group": group}, set(world.groups[group])),
        ("group", {"group": group, "anchor": anchor}, set(world.groups[group])),
        ("anchors", {"anchor": anchor}, everywhere),
    ):
        led = as_lists(open_page(page, **address))
        assert len(led) == (2 if len(address) == 2 else 1)
        for parameters in led:
            shown_ids = column(open_page("episodes", **parameters), "episodes", "episode_id")
            assert sorted(shown_ids) == sorted(map(ids.to_text, expected))


def as_lists(at: Any) -> list[dict[str, str]]:
    """What the links to lists of episodes ask for."""
    queries = re.findall(r"\[As a list of episodes\]\(/episodes\?([^)]*)\)", words(at))
    return [{name: values[0] for name, values in parse_qs(query).items()} for query in queries]
