"""Laws of aggregation: what the tokens of an optimizer step weigh, against a slow count; under any cut into parts."""

from collections import Counter
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from testkit.examples import examples, mostly_slow_cases
from testkit.plans import EPISODES, Episodes, episode_of, plan_of, selection_of
from testkit.training import config
from trainer.data.collate import MemberWeights
from trainer.data.plan import OptimizerStep, Plan
from trainer.data.stream import compute_weights
from trainer.losses.base import Aggregation, Atom, Unit
from trainer.runs.loop import build_batch_rows

MODES = [("token_mean", unit) for unit in ("token", "turn", "sequence", "episode")] + [
    (mode, unit)
    for mode in ("unit_mean_token_mean", "unit_mean_token_sum", "unit_mean_token_sum_norm")
    for unit in ("turn", "sequence", "episode")
]
CONSTANT = 7.0

Key = tuple[int, int, int]
"""Episode, sequence number in the plan, member number in the plan."""


def unit_of(key: Key, unit: str) -> Any:
    """What a member's tokens are averaged with."""
    episode, sequence, member = key
    return {"turn": member, "sequence": sequence, "episode": episode}[unit]


def trained_tokens(plan: Plan, step: OptimizerStep) -> dict[Key, int]:
    """Members of an optimizer step that carry loss, with their trained tokens."""
    weights_by_name = {}
    for e in step.episodes_E:
        for q in range(plan.sequence_starts_E[e], plan.sequence_starts_E[e + 1]):
            for m in range(plan.member_starts_Q[q], plan.member_starts_Q[q + 1]):
                if plan.trained_M[m]:
                    weights_by_name[int(plan.episode_ids_E[e]), int(q), int(m)] = int(plan.loss_tokens_M[m])
    return weights_by_name


def slow_weights(tokens: dict[Key, int], mode: str, unit: str) -> dict[Key, Fraction]:
    """The definitions, one token row at a time."""
    if mode == "token_mean":
        return {key: Fraction(1, sum(tokens.values())) for key in tokens}
    per_unit: Counter[Any] = Counter()
    for key, count in tokens.items():
        per_unit[unit_of(key, unit)] += count
    share = Fraction(1, len(per_unit))
    if mode == "unit_mean_token_sum":
        return dict.fromkeys(tokens, share)
    if mode == "unit_mean_token_sum_norm":
        return dict.fromkeys(tokens, share / int(CONSTANT))
    return {key: share / per_unit[unit_of(key, unit)] for key in tokens}


def planned(episodes: Episodes, mode: str, unit: str, **fields: Any) -> Plan:
    return plan_of(
        episodes,
        options={"aggregation": mode, "unit": unit, "aggregation_constant": CONSTANT},
        episodes_per_step=5,
        **fields,
    )


def parts_of(plan: Plan, step: OptimizerStep, ranks: int) -> list[tuple[list[int], MemberWeights]]:
    """Sequences and shares of each rank."""
    dealt = [[q for items in bins for q in items] for bins in plan.pack_micro_batches(step, ranks)]
    return [(mine, compute_weights(plan, step, np.array(mine))) for mine in dealt if mine]


@pytest.mark.parametrize(("mode", "unit"), MODES)
@settings(max_examples=examples(40))
@given(episodes=EPISODES, budget=st.integers(1, 100), ranks=st.integers(1, 4))
def test_each_token_weighs_what_the_definition_says_on_any_number_of_ranks(
    mode: str, unit: str, episodes: Episodes, budget: int, ranks: int
) -> None:
    plan = planned(episodes, mode, unit, token_budget=budget)
    for step in plan.steps:
        tokens = trained_tokens(plan, step)
        expected = slow_weights(tokens, mode, unit)
        weights: dict[Key, float] = {}
        for sequences, shares in parts_of(plan, step, ranks):
            chosen_M, members_Q = plan.list_members(np.array(sequences))
            of_member = np.repeat(sequences, members_Q).tolist()
            for q, m, weight in zip(of_member, chosen_M.tolist(), shares.weight_M.tolist(), strict=True):
                if plan.trained_M[m]:
                    weights[episode_of(plan, q), q, m] = weight
                else:
                    assert weight == 0
        assert weights.keys() == expected.keys()
        assert all(weights[key] == pytest.approx(float(expected[key]), rel=1e-6) for key in weights)
        total = sum(weights[key] * tokens[key] for key in weights)
        if mode in ("token_mean", "unit_mean_token_mean"):
            assert total == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize("unit", ["turn", "sequence", "episode"])
@settings(max_examples=examples(50))
@given(episodes=EPISODES, ranks=st.integers(1, 4))
def test_units_are_numbered_in_order_and_counted_over_all_ranks(unit: str, episodes: Episodes, ranks: int) -> None:
    plan = planned(episodes, "unit_mean_token_mean", unit)
    for step in plan.steps:
        tokens = trained_tokens(plan, step)
        assert step.units == len({unit_of(key, unit) for key in tokens})
        n_seen = 0
        for sequences, shares in parts_of(plan, step, ranks):
            chosen_M, members_Q = plan.list_members(np.array(sequences))
            assert shares.unit_M is not None
            assert shares.unit_weight == 1 / step.units
            trained_M = plan.trained_M[chosen_M]
            numbers = shares.unit_M[trained_M].tolist()
            keys = zip(np.repeat(sequences, members_Q).tolist(), chosen_M.tolist(), strict=True)
            owners = [unit_of((episode_of(plan, q), q, m), unit) for q, m in keys if plan.trained_M[m]]
            order = list(dict.fromkeys(owners))
            assert numbers == [order.index(owner) for owner in owners]
            n_seen += len(order)
        assert n_seen == step.units, "no unit is cut"


@settings(max_examples=examples(50))
@given(EPISODES)
def test_without_units_nothing_is_numbered(episodes: Episodes) -> None:
    plan = planned(episodes, "token_mean", "token")
    for step in plan.steps:
        assert step.units == step.loss_tokens
        for _, shares in parts_of(plan, step, 2):
            assert shares.unit_M is None


def test_a_repeated_episode_is_two_units() -> None:
    """A mixture may draw an episode twice into one optimizer step."""
    plan = planned({1: [[(2, True)], [(3, True)]]}, "unit_mean_token_mean", "episode")
    shares = compute_weights(plan, plan.steps[0], np.array([0, 1, 0, 1]))
    assert shares.unit_M is not None
    assert shares.unit_M.tolist() == [0, 0, 1, 1]


def test_the_options_override_what_the_loss_has_by_default() -> None:
    weighting = config("grpo").loss.weighting(max_length=70)
    assert (weighting.unit, weighting.aggregation) == (Unit.EPISODE, Aggregation.UNIT_MEAN_TOKEN_MEAN)
    assert (weighting.atom, weighting.constant) == (Atom.EPISODE, None)
    assert config("dr_grpo").loss.weighting(max_length=70).constant == 70
    constant = {"unit": "turn", "aggregation": "unit_mean_token_sum_norm", "aggregation_constant": 5}
    weighting = config("grpo", constant).loss.weighting(max_length=70)
    assert (weighting.unit, weighting.atom, weighting.constant) == (Unit.TURN, Atom.SEQUENCE, 5)
    assert weighting.describe() == "unit_mean_token_sum_norm over turns, C = 5"
    assert config("sft").loss.weighting(max_length=70).describe() == "token_mean"
    assert config("dpo").loss.weighting(max_length=70).atom is Atom.PAIR


def test_a_mean_over_units_needs_a_unit() -> None:
    with pytest.raises(ValidationError, match=r"unit_mean_token_sum .* set loss.unit to"):
        config("sft", {"aggregation": "unit_mean_token_sum"})


RECORDED = [("token_mean", "token"), ("unit_mean_token_mean", "episode"), ("unit_mean_token_sum_norm", "sequence")]


@pytest.mark.parametrize(("mode", "unit"), mostly_slow_cases(MODES, *RECORDED))
@settings(max_examples=examples(50))
@given(episodes=EPISODES)
def test_what_each_step_weighed_is_on_record(mode: str, unit: str, episodes: Episodes) -> None:
    selection = selection_of(episodes)
    in_order = pl.int_range(pl.len(), dtype=pl.Int32).over("episode_id")
    members = selection.members.with_columns(step_index=in_order)
    averaged = {"aggregation": mode, "unit": unit, "aggregation_constant": CONSTANT}
    plan = Plan(replace(selection, members=members), config(options=averaged, episodes_per_step=5))
    steps = members["step_index"].to_list()
    for step in plan.steps:
        weights = slow_weights(trained_tokens(plan, step), mode, unit)
        rows = build_batch_rows(plan, [step])
        for row in rows.iter_rows(named=True):
            mine = {steps[m]: float(weight) for (e, _, m), weight in weights.items() if e == row["episode_id"]}
            span = range(row["first_step"], row["last_step"] + 1)
            assert row["token_weights"] == pytest.approx([mine.get(index, 0.0) for index in span])
        assert rows["loss_weight"].sum() == pytest.approx(
            sum(float(weights[key]) * count for key, count in trained_tokens(plan, step).items())
        )
