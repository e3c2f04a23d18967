"""What each filter says about what it drops: the reason with its figures; what unknown facts become."""

import polars as pl
import pytest
from pydantic import ValidationError

from lake import ids
from pipelines.select import (
    FILTERS,
    Combined,
    DeadGroups,
    Dedup,
    Diversity,
    Filter,
    Length,
    MinReward,
    OverLong,
    Selection,
    Staleness,
    Status,
    SuccessBalance,
    TopQ,
    apply,
)
from testkit.selections import Row, episode_row, frames
from testkit.wording import Wording


def reasons(part: Filter, *episodes: Row, steps: list[Row] | None = None) -> dict[tuple[int, int | None], str]:
    drops = part.drops(*frames(episodes, steps))
    return {(episode, step): reason for episode, step, reason in drops.rows()}


def group(*scores: float | None, **fields: object) -> list[Row]:
    return [episode_row(n, score=score, **fields) for n, score in enumerate(scores)]


# ---------------------------------------------------------------- groups


def test_a_dead_group_is_dropped_with_its_size_and_its_score() -> None:
    reasons_read = reasons(DeadGroups(), *group(0.5, 0.5, 0.5))
    assert reasons_read == dict.fromkeys([(0, None), (1, None), (2, None)], "3 scored siblings, all at 0.5")


def test_scores_that_differ_by_a_rounding_error_are_dead() -> None:
    assert len(reasons(DeadGroups(), *group(0.1 + 0.2, 0.3))) == 2
    assert len(reasons(DeadGroups(), *group(1e9, 1e9 + 0.5))) == 2
    assert reasons(DeadGroups(), *group(0.3, 0.3 + 1e-6)) == {}


def test_an_unscored_sibling_is_no_zero() -> None:
    """Two ones and an unknown: with 0 for the unknown the group would be live."""
    reasons_read = reasons(DeadGroups(), *group(1.0, 1.0, None))
    assert reasons_read == {
        (0, None): "2 scored siblings, all at 1",
        (1, None): "2 scored siblings, all at 1",
        (2, None): "unscored",
    }
    assert (2, None) in reasons(DeadGroups(unknown="keep"), *group(1.0, 1.0, None)), "it goes with its group"
    assert reasons(DeadGroups(unknown="keep"), *group(1.0, 0.0, None)) == {}


def test_a_group_of_one_scored_sibling_has_nothing_to_compare_with(wording: Wording) -> None:
    ((key, why),) = reasons(DeadGroups(), *group(1.0)).items()
    assert key == (0, None)
    assert wording(why).startswith("1 scored sibling")
    assert reasons(DeadGroups(singletons="keep"), *group(1.0)) == {}


def test_with_a_credit_job_its_flags_decide(wording: Wording) -> None:
    """The scores say live; the estimator compared in other groups, and said otherwise."""
    states = ["live", "dead", "singleton", "unscored"]
    rows = [episode_row(n, score=float(n), credit_state=state) for n, state in enumerate(states)]
    why = reasons(DeadGroups(), *rows)
    assert set(why) == {(1, None), (2, None), (3, None)}
    assert "group is dead" in wording(why[1, None])
    assert "only scored one" in wording(why[2, None])
    assert "no scored sibling" in wording(why[3, None])
    assert list(reasons(DeadGroups(singletons="keep", unknown="keep"), *rows)) == [(1, None)]


def test_a_group_that_does_the_same_is_dropped_with_the_count() -> None:
    same = [episode_row(n, actions="left") for n in range(3)]
    assert set(reasons(Diversity(), *same).values()) == {"1 distinct responses of 3 siblings, below 2"}
    varied = [*same, episode_row(3, actions="right")]
    assert reasons(Diversity(), *varied) == {}
    share = set(reasons(Diversity(min_share=0.75), *varied).values())
    assert share == {"2 distinct responses of 4 siblings, below 0.75 of them"}


# ---------------------------------------------------------------- single episodes


def test_a_low_score_is_named_and_an_unknown_one_is_not_low() -> None:
    reasons_read = reasons(MinReward(at_least=0.5), *group(0.25, 0.5, None, -1.0))
    assert reasons_read == {(0, None): "score 0.25 < 0.5", (2, None): "unscored", (3, None): "score -1 < 0.5"}
    assert (2, None) not in reasons(MinReward(at_least=0.5, unknown="keep"), *group(0.25, None, None))


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"max_steps": 30}, "31 > 30 steps"),
        ({"min_steps": 40}, "31 < 40 steps"),
        ({"max_tokens": 19}, "20 > 19 tokens"),
        ({"min_tokens": 21}, "20 < 21 tokens"),
        ({"max_characters": 99}, "100 > 99 characters"),
        ({"min_characters": 101}, "100 < 101 characters"),
    ],
)
def test_a_length_outside_its_limit_is_named_with_both_figures(limits: dict[str, int], reason: str) -> None:
    assert reasons(Length(**limits), episode_row(num_steps=31)) == {(1, None): reason}


def test_a_length_on_its_limit_stays() -> None:
    limits = {f"{bound}_{unit}": n for unit, n in (("steps", 2), ("tokens", 20)) for bound in ("min", "max")}
    assert reasons(Length(**limits), episode_row()) == {}


def test_tokens_come_from_the_episode_else_from_the_engine_else_are_unknown() -> None:
    part = Length(max_tokens=10)
    assert reasons(part, episode_row(completion_tokens=11, engine_tokens=1)) == {(1, None): "11 > 10 tokens"}
    assert reasons(part, episode_row(completion_tokens=None, engine_tokens=12)) == {(1, None): "12 > 10 tokens"}
    unknown = episode_row(completion_tokens=None)
    assert reasons(part, unknown) == {(1, None): "number of tokens unknown"}
    assert reasons(Length(max_tokens=10, unknown="keep"), unknown) == {}
    assert reasons(Length(max_steps=10), unknown) == {}, "what is not limited need not be known"


def test_a_length_filter_reads_only_what_it_limits() -> None:
    assert Length(max_steps=3, max_action_characters=3).facts() == frozenset()
    assert Length(max_tokens=3, min_characters=1).facts() == {"completion_tokens", "engine_tokens", "characters"}


def test_single_steps_are_measured_in_characters_of_their_action() -> None:
    steps = [
        {"episode_id": 1, "step_index": n, "is_active": True, "action": action, "finish_reason": None}
        for n, action in enumerate(["\N{GREEK SMALL LETTER PHI}" * 3, "go", "gooo"])
    ]
    reasons_read = reasons(Length(min_action_characters=3, max_action_characters=3), episode_row(), steps=steps)
    assert reasons_read == {(1, 1): "2 < 3 characters of the action", (1, 2): "4 > 3 characters of the action"}


def test_what_a_limit_cut_off_is_over_long() -> None:
    rows = [episode_row(1, status="truncated"), episode_row(2)]
    steps = [
        {"episode_id": e, "step_index": n, "is_active": True, "action": "", "finish_reason": ["stop", "length"][n]}
        for e in (1, 2)
        for n in (0, 1)
    ]
    truncated, cut = "truncated after 2 steps", "generation cut: finish_reason length"
    assert reasons(OverLong(), *rows, steps=steps) == {(1, None): truncated, (2, 1): cut}
    assert reasons(OverLong(finish_reasons=()), *rows, steps=steps) == {(1, None): truncated}
    assert reasons(OverLong(episodes="keep"), *rows, steps=steps) == {(1, 1): cut, (2, 1): cut}


def test_staleness_counts_from_the_newest_of_the_run_by_the_oldest_part() -> None:
    rows = [
        episode_row(1, policy_version=9, oldest_version=None),
        episode_row(2, policy_version=9, oldest_version=4),
        episode_row(3, policy_version=None, oldest_version=None),
        episode_row(4, run_id="other", policy_version=2, oldest_version=2),
    ]
    reasons_read = reasons(Staleness(max_behind=4), *rows)
    assert reasons_read == {(2, None): "5 > 4 versions behind", (3, None): "policy version unknown"}
    assert (4, None) in reasons(Staleness(max_behind=4, within="all"), *rows)
    assert set(reasons(Staleness(max_behind=4, now=13, unknown="keep"), *rows)) == {(2, None), (4, None)}


def test_a_status_is_named() -> None:
    rows = [episode_row(n, status=status) for n, status in enumerate(["completed", "truncated", "aborted", "failed"])]
    assert reasons(Status(), *rows) == {(2, None): "status aborted", (3, None): "status failed"}


# ---------------------------------------------------------------- tasks


def test_the_more_frequent_outcome_of_a_task_is_cut_down() -> None:
    rows = group(*[1.0] * 5, 0.0, 0.0, None)
    reasons_read = reasons(SuccessBalance(max_ratio=1.5), *rows)
    assert reasons_read.pop((7, None)) == "unscored"
    assert set(reasons_read.values()) == {"5 successes for 2 of the other, above 1.5 to 1"}
    assert len(reasons_read) == 2, "3 of 5 stay: 1.5 for each of 2 failures"
    assert {episode for episode, _ in reasons_read} < set(range(5))


@pytest.mark.parametrize(("ratio", "n_kept"), [(1.0, 1), (1.5, 1), (1.99, 1), (2.0, 2), (9.0, 4)])
def test_a_ratio_is_never_exceeded(ratio: float, n_kept: int) -> None:
    assert len(reasons(SuccessBalance(max_ratio=ratio), *group(1.0, 1.0, 1.0, 1.0, 0.0))) == 4 - n_kept


def test_a_task_with_one_outcome_is_left_alone_unless_wanted() -> None:
    assert reasons(SuccessBalance(), *group(0.0, 0.0)) == {}
    reasons_read = reasons(SuccessBalance(one_sided="drop"), *group(0.0, 0.0))
    assert reasons_read == dict.fromkeys([(0, None), (1, None)], "its task has failures only")


def test_the_best_of_a_task_stay_and_the_others_know_their_place() -> None:
    rows = [*group(0.9, 0.1, 0.5, None), episode_row(9, task_id="other", score=0.0)]
    reasons_read = reasons(TopQ(count=2), *rows)
    assert reasons_read == {(1, None): "place 3 of 3 in its task with score 0.1, beyond 2", (3, None): "unscored"}
    assert set(reasons(TopQ(fraction=0.34, unknown="keep"), *rows)) == {(1, None)}, "2 of 3: rounded up"


def test_a_share_is_not_rounded_up_by_a_rounding_error() -> None:
    """10 x 0.3 is 3.0000000000000004 in floating point."""
    assert len(reasons(TopQ(fraction=0.3), *group(*map(float, range(10))))) == 7


def test_equal_scores_are_ordered_by_lots_of_their_own() -> None:
    ids_by_seed = {
        seed: {e for e in range(20) if (e, None) not in reasons(TopQ(count=5, seed=seed), *group(*[1.0] * 20))}
        for seed in range(4)
    }
    assert all(len(id_set) == 5 for id_set in ids_by_seed.values())
    assert len({frozenset(id_set) for id_set in ids_by_seed.values()}) > 1


def test_the_same_again_names_what_it_repeats() -> None:
    rows = [episode_row(n, actions="left", group_id=n % 2) for n in (4, 5, 6)]
    first = f"the same actions as {ids.to_text(4)}"
    assert reasons(Dedup(), *rows) == {(5, None): first, (6, None): first}
    assert list(reasons(Dedup(within="group"), *rows)) == [(6, None)]
    assert reasons(Dedup(by="decisions"), *rows) == {}
    unknown = [episode_row(n, actions=None) for n in (1, 2)]
    assert reasons(Dedup(), *unknown) == {}, "episodes without steps are not copies of each other"


# ---------------------------------------------------------------- several


def test_combined_filters_see_the_same_rows_and_give_all_their_reasons() -> None:
    filters = (MinReward(at_least=0.5), Status(keep=("completed",)))
    rows = [episode_row(1, score=0.0, status="failed"), episode_row(2, score=0.0), episode_row(3)]
    both_reasons = "min_reward: score 0 < 0.5; status: status failed"
    assert reasons(Combined(filters=filters), *rows) == {
        (1, None): both_reasons,
        (2, None): "min_reward: score 0 < 0.5",
    }
    assert reasons(Combined(filters=filters, keep="any"), *rows) == {(1, None): both_reasons}


def test_combined_any_drops_a_step_that_all_drop_in_part_or_whole() -> None:
    filters = (Length(max_action_characters=1), Status(keep=("failed",)))
    reasons_read = reasons(Combined(filters=filters, keep="any"), episode_row(1))
    assert set(reasons_read) == {(1, 0), (1, 1)}
    assert reasons_read[1, 0] == "length: 2 > 1 characters of the action; status: status completed"


def test_an_episode_that_loses_its_last_step_is_dropped() -> None:
    steps = [
        {"episode_id": e, "step_index": n, "is_active": n < 2, "action": "go" * e, "finish_reason": None}
        for e in (1, 2)
        for n in range(3)
    ]
    rows = [episode_row(1, num_steps=3), episode_row(2, num_steps=3)]
    outcome = apply(Selection(name="s", filters=(Length(max_action_characters=3),)), *frames(rows, steps))
    episode_rows = outcome.rows.filter(pl.col("step_index").is_null()).sort("episode_id")
    assert episode_rows["reason"].to_list() == [None, "length dropped the last 2 of its steps"]
    assert outcome.report.row(0) == ("length", 1, 3, 1, 3)


def test_a_step_that_is_gone_is_not_dropped_again() -> None:
    words = [("g", "stop"), ("gooo", "length"), ("g", "length")]
    steps = [
        {"episode_id": 1, "step_index": n, "is_active": True, "action": action, "finish_reason": finish}
        for n, (action, finish) in enumerate(words)
    ]
    selection = Selection(
        name="s", filters=(Length(max_action_characters=1), OverLong(), Length(max_action_characters=1))
    )
    outcome = apply(selection, *frames([episode_row(1, num_steps=3)], steps))
    assert outcome.rows.filter(~pl.col("kept")).select("step_index", "filter").rows() == [
        (1, "length"),
        (2, "over_long"),
    ]
    assert outcome.report["dropped_steps"].to_list() == [1, 1, 0]
    assert outcome.report["steps_left"].to_list() == [2, 1, 1]


def test_a_kind_that_is_used_twice_is_numbered() -> None:
    filters = (Length(max_steps=3), Status(), Length(min_steps=1))
    assert Selection(name="s", filters=filters).labels == ["length", "status", "length#2"]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("top_q", {}),
        ("top_q", {"fraction": 0.5, "count": 2}),
        ("top_q", {"fraction": 0.0}),
        ("success_balance", {"max_ratio": 0.5}),
        ("staleness", {"max_behind": -1}),
        ("status", {"keep": ["done"]}),
        ("status", {"keep": []}),
        ("combined", {"filters": []}),
        ("length", {"maximum": 3}),
    ],
)
def test_options_that_cannot_be_meant_are_refused(kind: str, options: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        FILTERS[kind].model_validate(options)


def test_every_filter_is_known_by_its_kind_and_explains_its_options() -> None:
    assert list(FILTERS) == [
        "dead_groups",
        "min_reward",
        "diversity",
        "length",
        "over_long",
        "staleness",
        "success_balance",
        "top_q",
        "dedup",
        "status",
        "combined",
    ]
    for kind, cls in FILTERS.items():
        assert cls.model_fields["kind"].default == kind
        assert cls.primary is None or cls.primary in cls.model_fields
