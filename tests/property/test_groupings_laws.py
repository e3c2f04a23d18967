"""Laws of counterfactual groups, and every step against a slow, obvious one."""

from collections import defaultdict
from typing import Any

import polars as pl
from hypothesis import given, settings
from hypothesis import strategies as st

from lake import ids
from lake.judgements.selections import draw_lots
from pipelines.groupings import DropFailed, Grouping, MergeRuns, StalenessCap, Subsample, regroup
from testkit.examples import examples

Row = dict[str, Any]
SCHEMA = {
    "episode_id": pl.Int64,
    "group_id": pl.Int64,
    "status": pl.String,
    "policy": pl.String,
    "policy_version": pl.Int64,
    "environment": pl.String,
    "task_id": pl.String,
    "seed": pl.Int64,
    "first_context": pl.String,
}


def frame(rows: list[Row]) -> pl.DataFrame:
    return pl.DataFrame(rows, schema=SCHEMA)


@st.composite
def collections(draw: st.DrawFn) -> list[Row]:
    """Up to 14 episodes in up to four groups."""
    return [
        {
            "episode_id": draw(st.integers(0, 1 << 57)) * 16 + number,
            "group_id": (group := draw(st.integers(0, 3))),
            "status": draw(st.sampled_from(["completed", "truncated", "aborted", "failed"])),
            "policy": draw(st.sampled_from(["p", "p", None])),
            "policy_version": draw(st.none() | st.integers(0, 3)),
            "environment": None,
            "task_id": "t" if group < 3 else "u",
            "seed": None if group else 7,
            "first_context": draw(st.sampled_from(["a", "a", "a", "b", None])),
        }
        for number in range(draw(st.integers(1, 14)))
    ]


STEPS = st.one_of(
    st.builds(
        Subsample,
        size=st.integers(1, 4),
        draws=st.integers(1, 3),
        seed=st.integers(0, 2),
        short=st.sampled_from(["drop", "keep"]),
    ),
    st.builds(DropFailed, statuses=st.sampled_from([("failed",), ("failed", "aborted", "truncated")])),
    st.builds(
        MergeRuns,
        context=st.sampled_from(["identical", "any"]),
        also_equal=st.sampled_from([(), ("policy",), ("policy_version", "policy")]),
    ),
    st.builds(StalenessCap, max_behind=st.integers(0, 2), unknown=st.sampled_from(["drop", "keep"])),
)


# ---------------------------------------------------------------- the obvious steps

Groups = dict[tuple[Any, int], list[Row]]
"""(group, draw) -> members."""


def obvious(step: Any, groups: Groups) -> Groups:
    groups_made: Groups = defaultdict(list)
    for (group, draw), members in groups.items():
        if isinstance(step, Subsample):
            if len(members) < step.size and step.short == "drop":
                continue
            for number in range(step.draws):
                groups_made[group, draw * step.draws + number] = drawn(members, step, number)
        elif isinstance(step, DropFailed):
            groups_made[group, draw] = [row for row in members if row["status"] not in step.statuses]
        elif isinstance(step, StalenessCap):
            newest = max((row["policy_version"] for row in members if row["policy_version"] is not None), default=0)
            for row in members:
                version = row["policy_version"]
                if step.unknown == "keep" if version is None else newest - version <= step.max_behind:
                    groups_made[group, draw].append(row)
        else:
            context = ("first_context",) if step.context == "identical" else ()
            starts = {
                tuple(row[n] for n in ("environment", "task_id", "seed", *context, *step.also_equal)) for row in members
            }
            alike = len(starts) == 1 and not (context and members[0]["first_context"] is None)
            groups_made[ids.key_hash("merge_runs", *starts.pop()) if alike else group, draw] += members
    return groups_made


def drawn(members: list[Row], step: Subsample, number: int) -> list[Row]:
    def lot(row: Row) -> tuple[int, int]:
        alone = pl.Series([row["episode_id"]], dtype=pl.Int64)
        return draw_lots(alone, "subsample", step.seed, number)[0], row["episode_id"]

    return sorted(members, key=lot)[: step.size]


def as_rows(groups: Groups, definition: str) -> set[tuple[int, int, int, int]]:
    return {
        (row["episode_id"], ids.key_hash("grouping", definition, group, draw), draw, row["group_id"])
        for (group, draw), members in groups.items()
        for row in members
    }


@settings(max_examples=examples(30))
@given(st.lists(STEPS, min_size=1, max_size=3), collections())
def test_steps_in_order_make_the_groups_of_the_obvious_ones(steps: list[Any], rows: list[Row]) -> None:
    grouping = Grouping(name="g", steps=tuple(steps))
    groups: Groups = defaultdict(list)
    for row in rows:
        groups[row["group_id"], 0].append(row)
    for step in steps:
        groups = obvious(step, groups)
    grouping_members = regroup(grouping, frame(rows))
    members = grouping_members.rows.select("episode_id", "group_id", "draw", "collected_group_id").rows()
    assert len(members) == len(set(members))
    assert set(members) == as_rows(groups, grouping.definition())
    assert grouping_members.rows["draw"].is_between(0, grouping.draws - 1).all()
    assert all(count > 0 for _, _, count in grouping_members.notes)


# ---------------------------------------------------------------- laws


@settings(max_examples=examples(20))
@given(st.lists(STEPS, min_size=1, max_size=3), collections(), st.randoms(use_true_random=False))
def test_the_order_of_rows_does_not_matter(steps: list[Any], rows: list[Row], rng: Any) -> None:
    grouping = Grouping(name="g", steps=tuple(steps))
    shuffled = rows.copy()
    rng.shuffle(shuffled)
    assert regroup(grouping, frame(rows)).rows.equals(regroup(grouping, frame(shuffled)).rows)


@settings(max_examples=examples(20))
@given(st.builds(Subsample, size=st.integers(1, 4), draws=st.integers(1, 3)), collections(), collections())
def test_a_draw_is_not_disturbed_by_unrelated_episodes(step: Subsample, rows: list[Row], unrelated: list[Row]) -> None:
    grouping = Grouping(name="g", steps=(step,))
    elsewhere = [row | {"group_id": row["group_id"] + 10, "episode_id": row["episode_id"] + 2**62} for row in unrelated]
    alone = regroup(grouping, frame(rows)).rows
    together = regroup(grouping, frame(rows + elsewhere)).rows.filter(pl.col("collected_group_id") < 10)
    assert together.equals(alone)


@settings(max_examples=examples(20))
@given(st.integers(1, 4), collections())
def test_a_new_sibling_displaces_at_most_one(size: int, rows: list[Row]) -> None:
    grouping = Grouping(name="g", steps=(Subsample(size=size, short="keep"),))
    *before, new = rows
    drawn_before = set(regroup(grouping, frame(before)).rows["episode_id"])
    drawn_after = set(regroup(grouping, frame(rows)).rows["episode_id"])
    assert len(drawn_before - drawn_after) <= 1
    assert drawn_after - drawn_before <= {new["episode_id"]}


@settings(max_examples=examples(20))
@given(st.lists(STEPS, min_size=1, max_size=3), collections())
def test_an_episode_is_in_one_group_of_a_draw_and_groups_keep_to_their_draw(steps: list[Any], rows: list[Row]) -> None:
    members = regroup(Grouping(name="g", steps=tuple(steps)), frame(rows)).rows
    assert members.select("episode_id", "draw").is_unique().all()
    assert members.group_by("group_id").agg(pl.col("draw").n_unique())["draw"].eq(1).all()
    collected = {row["episode_id"]: row["group_id"] for row in rows}
    assert all(collected[e] == g for e, g in members.select("episode_id", "collected_group_id").rows())


@settings(max_examples=examples(30))
@given(collections(), st.sampled_from(["identical", "any"]))
def test_merging_never_tears_a_group_apart(rows: list[Row], context: Any) -> None:
    members = regroup(Grouping(name="g", steps=(MergeRuns(context=context),)), frame(rows)).rows
    assert members.height == len(rows)
    assert members.group_by("collected_group_id").agg(pl.col("group_id").n_unique())["group_id"].eq(1).all()
    if context == "any":
        tasks = {(row["task_id"], row["seed"]) for row in rows}
        assert members["group_id"].n_unique() == len(tasks)


@settings(max_examples=examples(20))
@given(collections(), st.integers(1, 4))
def test_a_subsample_has_the_size_that_was_asked_for(rows: list[Row], size: int) -> None:
    members = regroup(Grouping(name="g", steps=(Subsample(size=size, draws=2),)), frame(rows)).rows
    assert members.group_by("group_id").len()["len"].eq(size).all()
    twice = Grouping(name="g", steps=(Subsample(size=size), Subsample(size=size)))
    once = Grouping(name="g", steps=(Subsample(size=size),))
    assert set(regroup(twice, frame(rows)).rows["episode_id"]) == set(regroup(once, frame(rows)).rows["episode_id"])


@given(st.lists(STEPS, min_size=1, max_size=3))
def test_a_definition_is_the_same_after_a_round_trip_and_under_another_name(steps: list[Any]) -> None:
    grouping = Grouping(name="g", steps=tuple(steps))
    again = Grouping.model_validate_json(grouping.model_dump_json())
    assert again == grouping
    assert Grouping(name="h", steps=tuple(steps)).definition() == grouping.definition()
    assert len(grouping.names) == grouping.draws
    assert grouping.names == (["g"] if grouping.draws == 1 else [f"g/{n}" for n in range(grouping.draws)])
