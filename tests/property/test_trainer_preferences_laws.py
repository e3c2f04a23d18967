"""Laws of pairing: against a slow oracle; no one twice; margins hold; order and layout of the input do not matter."""

from collections import Counter
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import settings as limited
from hypothesis import strategies as st

from lake import Lake
from lake.errors import DataRefusedError
from lake.judgements.credit import find_credit
from testkit.examples import examples, mostly_slow
from testkit.pair_worlds import (
    Rule,
    Step,
    meeting_episodes,
    slow_counts,
    slow_episode_pairs,
    slow_step_pairs,
    steps_of,
    world,
)
from testkit.plans import EPISODES, Episodes, episode_of, selection_of
from testkit.training import config
from trainer.data.plan import Plan
from trainer.data.preferences import PairsConfig, label_episodes, match_pairs, pair_episodes
from trainer.data.selection import TrainingSelection, select
from trainer.data.stream import compute_weights

OUTCOMES = st.dictionaries(
    st.integers(0, 2**63 - 1), st.sampled_from([0.0, 0.25, 1.0, 1.5, None, float("nan")]), max_size=12
)
MARGINS = st.sampled_from([0.0, 0.25, 0.5, 1.0])
GROUPS = st.lists(OUTCOMES, max_size=3).map(
    lambda groups: [{key // 4 * 4 + number: value for key, value in of.items()} for number, of in enumerate(groups)]
)
"""An episode is in one group."""


def frame_of(groups: list[dict[int, float | None]]) -> pl.DataFrame:
    rows = [(episode, group, 0, value) for group, outcomes in enumerate(groups) for episode, value in outcomes.items()]
    schema = {"episode_id": pl.Int64, "group_id": pl.Int64, "source": pl.Int32, "outcome": pl.Float64}
    return pl.DataFrame(rows, schema=schema, orient="row")


def pairs_of(sides: pl.DataFrame) -> set[tuple[int, int]]:
    """Chosen and rejected episode of each pair."""
    winners, rejected = (sides.filter(sign=sign).select("pair", "episode_id") for sign in (1, -1))
    joined = winners.join(rejected, on="pair", suffix="_rejected")
    assert joined.height * 2 == sides.height
    return set(joined.select("episode_id", "episode_id_rejected").rows())


def drop_unknown(outcomes: dict[int, float | None]) -> dict[int, float]:
    return {key: value for key, value in outcomes.items() if value is not None and not np.isnan(value)}


@limited(max_examples=examples(50))
@given(GROUPS, MARGINS)
def test_episodes_are_paired_as_the_slow_oracle_pairs_them(
    groups: list[dict[int, float | None]], margin: float
) -> None:
    pairs = pair_episodes(frame_of(groups), PairsConfig(margin=margin))
    expected = [pair for outcomes in groups for pair in slow_episode_pairs(drop_unknown(outcomes), margin)]
    assert len(expected) == pairs.sides.height // 2 == pairs.candidate_counts[-1].number
    assert pairs_of(pairs.sides) == set(expected)


@limited(max_examples=examples(50))
@given(GROUPS, MARGINS, st.sets(st.integers(0, 40)))
def test_episodes_that_are_cut_might_as_well_not_be_there(
    groups: list[dict[int, float | None]], margin: float, cut: set[int]
) -> None:
    pairs = pair_episodes(frame_of(groups), PairsConfig(margin=margin), pl.Series(sorted(cut), dtype=pl.Int64))
    remaining = [{key: value for key, value in outcomes.items() if key not in cut} for outcomes in groups]
    assert pairs_of(pairs.sides) == pairs_of(pair_episodes(frame_of(remaining), PairsConfig(margin=margin)).sides)


@limited(max_examples=examples(50))
@given(OUTCOMES, MARGINS, st.integers(1, 3))
def test_no_episode_is_in_two_pairs_and_the_best_pairs_are_kept(
    outcomes: dict[int, float | None], margin: float, limit: int
) -> None:
    everything = slow_episode_pairs(drop_unknown(outcomes), margin)
    sides = pair_episodes(frame_of([outcomes]), PairsConfig(margin=margin, per_group=limit)).sides
    assert sides["episode_id"].is_unique().all()
    assert pairs_of(sides) == set(everything[:limit])
    for winner, rejected in pairs_of(sides):
        assert drop_unknown(outcomes)[winner] - drop_unknown(outcomes)[rejected] >= max(margin, 1e-9)


@limited(max_examples=examples(50))
@given(GROUPS, st.randoms(use_true_random=False))
def test_the_order_of_rows_does_not_matter(groups: list[dict[int, float | None]], random: Any) -> None:
    frame = frame_of(groups)
    order = list(range(frame.height))
    random.shuffle(order)
    assert pair_episodes(frame[order], PairsConfig()).sides.equals(pair_episodes(frame, PairsConfig()).sides)


@limited(max_examples=examples(50))
@given(OUTCOMES, OUTCOMES)
def test_another_group_or_source_changes_nothing(
    first: dict[int, float | None], second: dict[int, float | None]
) -> None:
    second = {key: value for key, value in second.items() if key not in first}
    alone, together = (pair_episodes(frame_of(groups), PairsConfig()).sides for groups in ([first], [first, second]))
    assert alone.join(together, on=alone.columns, how="anti", nulls_equal=True).is_empty()
    apart = pl.concat([frame_of([first]), frame_of([second]).with_columns(source=pl.lit(1, pl.Int32))])
    assert pair_episodes(apart, PairsConfig()).sides.equals(together)


@given(
    st.integers(0, 9).flatmap(
        lambda n: st.lists(st.lists(st.booleans(), min_size=n, max_size=n), min_size=n, max_size=n)
    )
)
def test_matching_leaves_nothing_that_could_be_paired(rows: list[list[bool]]) -> None:
    allowed_II = np.array(rows, bool).reshape(len(rows), len(rows))
    matched = match_pairs(np.zeros(len(rows), np.int64), {"any": lambda part: allowed_II[part, part]})
    possible = [(i, j) for i, j in combinations(range(len(rows)), 2) if allowed_II[i, j]]
    assert matched.possible["any"] == (len(possible), int(bool(possible)))
    assert set(matched.pairs) <= set(possible)
    used = [row for pair in matched.pairs for row in pair]
    assert len(set(used)) == len(used)
    assert not [pair for pair in possible if not set(pair) & set(used)]


@given(OUTCOMES, st.sampled_from([None, 0.0, 0.25, 1.0]))
def test_labels_are_the_sign_or_the_threshold(outcomes: dict[int, float | None], threshold: float | None) -> None:
    labels = label_episodes(frame_of([outcomes]), threshold)
    signs = {key: (value > 0) - (value < 0) for key, value in drop_unknown(outcomes).items()}
    if threshold is not None:
        signs = {key: 1 if value >= threshold else -1 for key, value in drop_unknown(outcomes).items()}
    expected = {key: sign for key, sign in signs.items() if sign}
    assert dict(labels.sides.select("episode_id", "sign").iter_rows()) == expected
    good = sum(sign > 0 for sign in expected.values())
    assert [f.number for f in labels.candidate_counts] == [good, len(expected) - good, len(outcomes) - len(expected)]


# ---------------------------------------------------------------- steps, on lakes


def selected(lk: Lake, **pairs: Any) -> TrainingSelection:
    settings = config("dpo", options={"pairs": {"kind": "step", **pairs}})
    snapshot = lk.snapshot()
    return select(snapshot, settings, settings.loss.needs, source=find_credit(snapshot, None))


def compared(members: pl.DataFrame, sign: int) -> dict[int, tuple[int, int]]:
    """Of each pair the step that is compared on one side."""
    rows = members.filter(pl.col("trained") & (pl.col("sign") == sign)).select("pair", "episode_id", "step_index")
    return {pair: (episode, step) for pair, episode, step in rows.iter_rows()}


def rules_of(margin: float, *, graft: bool) -> dict[str, Rule]:
    rules: dict[str, Rule] = {
        "same anchor, other episode": lambda a, b: a.episode != b.episode,
        "distinct actions": lambda a, b: a.action != b.action,
        "margin": lambda a, b: a.value > b.value and a.value - b.value >= margin,  # type: ignore[operator]
    }
    if graft:
        return rules | {"grafted within max_length": lambda a, b: True}
    return rules | {"identical contexts": lambda a, b: a.context == b.context}


@pytest.mark.parametrize("seed", mostly_slow(range(6), 0, 3))
def test_steps_are_paired_as_the_slow_oracle_pairs_them(tmp_path: Path, seed: int) -> None:
    episodes = meeting_episodes(seed, siblings=6)
    lk = world(tmp_path, episodes, gamma=0.5)
    steps = steps_of(lk, episodes)
    numbers = [assert_paired(lk, steps, 0.0, None, graft=graft) for graft in (False, True)]
    assert numbers[0] < numbers[1], "identical contexts, and others"
    for graft in (False, True):
        assert_paired(lk, steps, 0.5, 1, graft=graft)


def assert_paired(lk: Lake, steps: list[Step], margin: float, limit: int | None, *, graft: bool) -> int:
    """The pairs are those of the oracle, and so are the counts; their number."""
    rules = rules_of(margin, graft=graft)
    expected = slow_step_pairs(steps, rules, limit)
    if not expected:
        with pytest.raises(DataRefusedError, match="no_pairs"):
            selected(lk, margin=margin, per_group=limit, graft=graft)
        return 0
    selection = selected(lk, margin=margin, per_group=limit, graft=graft)
    winners, rejected = (compared(selection.members, sign) for sign in (1, -1))
    assert winners.keys() == rejected.keys()
    pairs_made = {(*winners[pair], *rejected[pair]) for pair in winners}
    assert pairs_made == {(a.episode, a.index, b.episode, b.index) for a, b in expected}
    numbers = {finding.name: finding.number for finding in selection.candidate_counts}
    for name, (pairs, groups) in slow_counts(steps, rules).items():
        assert numbers[name] == pairs
        assert f"in {groups} anchors" in next(f.note for f in selection.candidate_counts if f.name == name)
    assert numbers["chosen"] == len(expected)
    if graft:
        assert numbers["identical contexts anyway"] == sum(a.context == b.context for a, b in expected)
    return len(expected)


def test_layout_and_order_of_the_lake_do_not_matter(tmp_path: Path) -> None:
    episodes = meeting_episodes(1, siblings=6)
    lakes = world(tmp_path / "a", episodes), world(tmp_path / "b", episodes[::-1], writes=2)
    for graft in (False, True):
        settings = config("dpo", options={"pairs": {"kind": "step", "graft": graft}})
        first, second = (selected(lk, graft=graft) for lk in lakes)
        assert first.members.height
        assert first.members.drop("file", "row").equals(second.members.drop("file", "row"))
        assert Plan(first, settings).plan_hash == Plan(second, settings).plan_hash


def test_a_side_is_all_before_the_action_and_the_action(tmp_path: Path) -> None:
    episodes = meeting_episodes(2, siblings=6)
    lk = world(tmp_path, episodes)
    by_key = {(step.episode, step.index): step for step in steps_of(lk, episodes)}
    for graft in (False, True):
        members = selected(lk, graft=graft).members
        winners = compared(members, 1)
        for (pair, sign), side in members.group_by("pair", "sign", maintain_order=True):
            (trained,) = side.filter("trained").iter_rows(named=True)
            assert side.row(-1, named=True)["trained"], "the compared action comes last"
            step = by_key[trained["episode_id"], trained["step_index"]]
            context = by_key[winners[pair]].context if graft else step.context  # type: ignore[index]
            assert trained["end"] == len(context) + len(step.action)
            assert side["loss_tokens"].to_list() == [0] * (side.height - 1) + [len(step.action)]
            if graft:
                cut = [True] * (side.height - 2) + [False, True] if sign == -1 else [True] * side.height
                assert side["takes_action"].to_list() == cut
                assert side["takes_context"].to_list() == [True] * (side.height - 1) + [sign == 1]


# ---------------------------------------------------------------- plans of pairs


def paired(episodes: Episodes) -> TrainingSelection:
    """Made-up episodes in pairs, in the order of their ids; an odd one is left out."""
    selection = selection_of(episodes)
    ids = sorted(episodes)[: len(episodes) // 2 * 2]
    rows = [(key, 1000 - number // 2, 1 - 2 * (number % 2)) for number, key in enumerate(ids)]
    schema = {"episode_id": pl.Int64, "pair": pl.Int64, "sign": pl.Int8}
    members = selection.members.join(pl.DataFrame(rows, schema=schema, orient="row"), on="episode_id")
    return replace(selection, members=members.sort("pair", "sign", "sequence", "step_index", descending=PAIR_FIRST))


PAIR_FIRST = [False, True, False, False]
TWO_OR_MORE = EPISODES.filter(lambda episodes: len(episodes) > 1)


@limited(max_examples=examples(50))
@given(TWO_OR_MORE, st.integers(1, 60), st.integers(1, 3), st.integers(1, 7), st.integers(1, 2))
def test_pairs_are_whole_on_one_rank_and_in_one_step(
    episodes: Episodes, budget: int, ranks: int, per_step: int, epochs: int
) -> None:
    settings = config("dpo", token_budget=budget, episodes_per_step=per_step, epochs=epochs)
    plan = Plan(paired(episodes), settings)
    number = len(episodes) // 2
    ids = sorted(episodes)
    partner = dict(zip(ids[::2], ids[1::2], strict=False))
    uses: Counter[int] = Counter()
    for step in plan.steps:
        consumed = plan.episode_ids_E[step.episodes_E].tolist()
        uses.update(consumed)
        assert [partner[key] for key in consumed[::2]] == consumed[1::2]
        assert len(consumed) <= max(2, per_step)
        assert step.units == len(consumed)
        for bins in plan.pack_micro_batches(step, ranks):
            for items in bins:
                owners = list(dict.fromkeys(episode_of(plan, q) for q in items))
                assert [partner[key] for key in owners[::2]] == owners[1::2]
                if items:
                    shares = compute_weights(plan, step, np.array(items))
                    assert shares.pair_U is not None
                    assert shares.sign_U is not None
                    assert shares.pair_U.tolist() == [unit // 2 for unit in range(len(owners))]
                    assert shares.sign_U.tolist() == [1.0, -1.0] * (len(owners) // 2)
                    assert shares.unit_weight == 1 / len(consumed)
    assert set(uses.values()) == {epochs}
    assert len(uses) == 2 * number


@limited(max_examples=examples(50))
@given(TWO_OR_MORE, st.integers(0, 3))
def test_the_order_of_pairs_is_their_own(episodes: Episodes, seed: int) -> None:
    """Leaving one pair out leaves the others in their order."""
    settings = config("dpo", seed=seed, episodes_per_step=1)
    selection = paired(episodes)
    rest = selection.members.filter(pl.col("pair") != 1000)
    orders = [
        [int(plan.episode_ids_E[step.episodes_E[0]]) for step in plan.steps]
        for plan in (
            Plan(replace(selection, members=members), settings) for members in (selection.members, rest) if len(members)
        )
    ]
    left_out = sorted(episodes)[:2]
    assert [key for key in orders[0] if key not in left_out] == (orders[1] if len(orders) > 1 else [])
