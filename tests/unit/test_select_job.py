"""Selections on real lakes: what is read, what is written, what is skipped, what is refused."""

from pathlib import Path
from typing import Any

import msgspec
import polars as pl
import pytest

from lake import Lake, ids
from lake.errors import DataRefusedError, UsageError
from lake.judgements.selections import find_selection_job, read_selection
from lake.records import EpisodeRecord, StepRecord, TokensRecord
from pipelines.credit.estimators import ESTIMATORS
from pipelines.credit.job import run_credit
from pipelines.select import (
    Combined,
    DeadGroups,
    Dedup,
    Diversity,
    Filter,
    Length,
    MinReward,
    OverLong,
    Selection,
    SelectReport,
    Staleness,
    Status,
    TopQ,
    run_select,
)
from pipelines.select.filters import OF_EPISODES, OF_STEPS, OF_TOKENS, read_episodes, read_facts
from testkit.judged_lake import score_rows
from testkit.lakes import add_credit, build_lake, rollout, siblings


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """24 episodes: live, dead and partly scored groups in two rounds. Selections of other names may be added."""
    lk = build_lake(tmp_path_factory.mktemp("select") / "lake")
    add_credit(lk)
    return lk


def make_selection(name: str, *filters: Filter) -> Selection:
    return Selection(name=name, filters=filters)


def rows_of(lk: Lake, report: SelectReport) -> pl.DataFrame:
    return lk.scan("selections").filter(pl.col("job_id") == report.job_id).collect()


def selected_ids(lk: Lake, report: SelectReport) -> set[int]:
    rows = rows_of(lk, report).filter(pl.col("kept") & pl.col("step_index").is_null())
    return set(rows["episode_id"])


# ---------------------------------------------------------------- what is written


def test_every_episode_has_a_row_and_every_drop_a_reason(shared: Lake) -> None:
    report = run_select(
        shared, make_selection("rows", Status(), DeadGroups(), MinReward(at_least=0.5)), where="seed = 7"
    )
    rows = rows_of(shared, report)
    assert sorted(rows["episode_id"]) == sorted(shared.scan("episodes").collect()["episode_id"])
    assert set(rows["selection"]) == {"rows"}
    counts = rows.group_by("filter", "reason").len().sort("filter", "reason", nulls_last=True).rows()
    assert counts == [
        ("dead_groups", "4 scored siblings, all at 1", 8),
        ("min_reward", "score 0 < 0.5", 9),
        ("status", "status failed", 2),
        (None, None, 5),
    ]


def test_a_row_carries_the_collected_group_and_its_run(shared: Lake) -> None:
    report = run_select(shared, make_selection("keys", Status()), credit=ids.to_text(credit_job(shared)))
    keys = ["episode_id", "group_id", "run_id"]
    rows = rows_of(shared, report).select(keys).sort(keys)
    assert rows.equals(shared.scan("episodes").select(keys).sort(keys).collect())


def test_the_job_row_records_the_filters_in_order_and_the_counts(shared: Lake) -> None:
    report = run_select(shared, make_selection("lineage", Status(), TopQ(count=1)), where="env_return IS NULL OR true")
    row = shared.sql("SELECT * FROM job_runs WHERE job_id = ?", [report.job_id]).row(0, named=True)
    parameters, counts = msgspec.json.decode(row["parameters"]), msgspec.json.decode(row["counts"])
    assert [part["kind"] for part in parameters["filters"]] == ["status", "top_q"]
    assert parameters["filters"][1] | {"seed": 0} == {
        "kind": "top_q",
        "fraction": None,
        "count": 1,
        "within": "task",
        "seed": 0,
        "unknown": "drop",
    }
    assert (parameters["score"], parameters["where"]) == ("env_return", "env_return IS NULL OR true")
    assert (row["rows_in"], row["rows_out"], row["rows_dropped"]) == (24, 3, 21)
    assert counts["filters"] == report.report.to_dicts()


def test_order_matters(shared: Lake) -> None:
    low, best = MinReward(at_least=0.5), TopQ(fraction=0.5)
    first = run_select(shared, make_selection("order", low, best))
    second = run_select(shared, make_selection("order", best, low))
    assert (first.kept_episodes, second.kept_episodes) == (7, 9)
    assert first.series_id != second.series_id


def test_a_single_step_is_dropped_out_of_a_kept_episode(shared: Lake) -> None:
    report = run_select(shared, make_selection("steps", Length(max_action_characters=7)))
    rows = rows_of(shared, report)
    steps = rows.filter(pl.col("step_index").is_not_null())
    assert steps.height == 36
    assert set(steps["reason"]) == {"8 > 7 characters of the action"}
    assert not steps["kept"].any()
    assert rows.filter(pl.col("step_index").is_null())["kept"].all()
    assert report.report.row(0) == ("length", 0, 36, 24, 36)
    read = read_selection(shared.snapshot(), "steps").dropped_steps
    assert sorted(read.rows()) == sorted(steps.select("episode_id", "step_index").rows())


# ---------------------------------------------------------------- facts


def text_lake(folder: Path) -> Lake:
    """Two episodes that do the same with calls whose ids differ, one whose arguments differ, one with engine tokens."""

    def call(number: int, argument: str) -> list[dict[str, Any]]:
        return [{"id": f"call_{number}", "type": "function", "function": {"name": "f", "arguments": argument}}]

    def step(state: str, number: int = 0, argument: str = '{"id": 1}', **fields: Any) -> StepRecord:
        return StepRecord(state=state, action="see", tool_calls=call(number, argument), **fields)

    tokens = TokensRecord(context_ids=[1], action_ids=[2, 3, 4])
    records = [
        EpisodeRecord(task_id="t", rollout_index=0, steps=[step("a", 1), step("b", 2, policy_version=2)]),
        EpisodeRecord(task_id="t", rollout_index=1, steps=[step("a", 3), step("c", 4, reasoning="hm")]),
        EpisodeRecord(task_id="t", rollout_index=2, steps=[step("a", 5, '{"id": 2}')], completion_tokens=9),
        EpisodeRecord(
            task_id="t",
            rollout_index=3,
            steps=[
                StepRecord(state="a", action="", tokens=tokens),
                StepRecord(state="-", action="pad", is_active=False, tokens=tokens),
            ],
        ),
    ]
    return build_lake(folder, records)


def test_facts_are_those_of_the_rows(tmp_path: Path) -> None:
    lk = text_lake(tmp_path)
    snapshot = lk.snapshot()
    needed = frozenset(OF_EPISODES | OF_STEPS | OF_TOKENS)
    facts = read_facts(snapshot, read_episodes(snapshot, None), needed)
    order = lk.sql("SELECT episode_id FROM episodes ORDER BY rollout_index")
    rows = order.join(facts, on="episode_id", how="left", maintain_order="left").to_dicts()
    calls = [
        len(text)
        for text in lk.sql(
            "SELECT replace(tool_calls::VARCHAR, '\"id\":\"call_0\",', '') AS t FROM steps WHERE tool_calls IS NOT NULL"
        )["t"]
    ]
    assert calls
    without_id = len('[{"type":"function","function":{"name":"f","arguments":"{\\"id\\": 1}"}}]')
    assert [row["characters"] for row in rows] == [2 * (3 + without_id), 2 * (3 + without_id) + 2, 3 + without_id, 0]
    assert [row["oldest_version"] for row in rows] == [2, None, None, None]
    assert [(row["completion_tokens"], row["engine_tokens"]) for row in rows] == [
        (None, None),
        (None, None),
        (9, None),
        (None, 6),
    ]
    assert rows[0]["actions"] == rows[1]["actions"], "ids of calls are no difference"
    assert rows[0]["decisions"] != rows[1]["decisions"], "states are"
    assert len({row["actions"] for row in rows}) == 3, "arguments are"


def test_facts_of_some_episodes_are_those_of_all(tmp_path: Path) -> None:
    snapshot = text_lake(tmp_path).snapshot()
    needed = frozenset(OF_EPISODES | OF_STEPS | OF_TOKENS)
    facts_whole = read_facts(snapshot, read_episodes(snapshot, None), needed, everything=True)
    some = read_episodes(snapshot, "rollout_index > 1")
    assert read_facts(snapshot, some, needed).equals(
        facts_whole.filter(pl.col("episode_id").is_in(some["episode_id"].implode()))
    )


def test_a_predicate_that_rolls_dice_is_asked_once(tmp_path: Path) -> None:
    """Every chosen episode has its facts, so 99 of 100 characters too many are found in each."""
    lk = build_lake(tmp_path, [rollout(f"t{n}", 0, 1.0) for n in range(40)])
    filters = (Combined(filters=(Length(max_characters=0), Status()), keep="any"), Length(min_characters=1))
    report = run_select(lk, make_selection("dice", *filters), where="random() < 0.5")
    assert 0 < report.kept_episodes == report.episodes < 40


def test_facts_that_no_filter_needs_are_not_read(tmp_path: Path) -> None:
    snapshot = text_lake(tmp_path).snapshot()
    episodes = read_episodes(snapshot, None)
    assert read_facts(snapshot, episodes, frozenset()).columns == episodes.columns
    assert make_selection("s", Status(), Combined(filters=(Dedup(), Diversity()))).facts == {"actions"}


def test_copies_and_uniform_groups_are_found_in_the_text(tmp_path: Path) -> None:
    lk = text_lake(tmp_path)
    report = run_select(lk, make_selection("d", Dedup()))
    assert report.report.row(0)[:2] == ("dedup", 1)
    assert run_select(lk, make_selection("d", Dedup(by="decisions"))).kept_episodes == 4
    with pytest.raises(DataRefusedError, match=r"'v' leaves none of 4 episodes \(dropped: diversity 4\); loosen"):
        run_select(lk, make_selection("v", Diversity(min_distinct=4)))


def test_generations_that_were_cut_are_found(tmp_path: Path) -> None:
    steps = [StepRecord(state="a", action="b", finish_reason=reason) for reason in ("stop", "length", None)]
    lk = build_lake(tmp_path, [EpisodeRecord(task_id="t", steps=steps), rollout("u", 0, 1.0, status="truncated")])
    report = run_select(lk, make_selection("cut", OverLong()))
    dropped = rows_of(lk, report).filter(~pl.col("kept")).sort("step_index", nulls_last=True)
    assert dropped["step_index"].to_list() == [1, None]
    assert dropped["reason"].to_list() == ["generation cut: finish_reason length", "truncated after 3 steps"]


# ---------------------------------------------------------------- where rewards come from


def add_scores(lk: Lake, values: list[float | None], version: str = "1", scorer: str = "judge", **where: Any) -> None:
    episodes = lk.sql("SELECT * FROM episodes ORDER BY task_id, rollout_index").to_dicts()
    with lk.job(kind="score", parameters={"version": version}) as job:
        frame = score_rows(episodes[: len(values)], scorer, values)
        job.write("scores", frame.with_columns(scorer_version=pl.lit(version)))


def test_a_scorer_may_be_the_reward(tmp_path: Path) -> None:
    lk = build_lake(tmp_path, siblings("t", [1.0, 0.0, 1.0, 0.0]))
    with pytest.raises(UsageError, match="no scores of 'judge' for episodes; valid: env_return"):
        run_select(lk, make_selection("s", MinReward(at_least=0.5)), score="judge")
    add_scores(lk, [0.2, 0.7, None])
    report = run_select(lk, make_selection("s", MinReward(at_least=0.5)), score="judge")
    reasons = rows_of(lk, report).filter(~pl.col("kept"))["reason"].sort().to_list()
    assert reasons == ["score 0.2 < 0.5", "unscored", "unscored"], "one was scored NULL, one not at all"
    assert (
        run_select(lk, make_selection("s", MinReward(at_least=0.5, unknown="keep")), score="judge").kept_episodes == 3
    )


def test_scores_come_from_one_version_of_the_scorer(tmp_path: Path) -> None:
    """Siblings that different code scored cannot be compared: what only the older version scored is unscored."""
    lk = build_lake(tmp_path, siblings("t", [1.0, 0.0, 1.0, 0.0]))
    add_scores(lk, [1.0, 1.0, 1.0, 1.0], version="1")
    add_scores(lk, [1.0, 0.0], version="2")
    add_scores(lk, [0.0, 0.8], version="2")
    report = run_select(lk, make_selection("s", MinReward(at_least=0.5)), score="judge")
    counts = dict(rows_of(lk, report).select("reason", "kept").group_by("reason").len().rows())
    assert counts == {"score 0 < 0.5": 1, "unscored": 2, None: 1}


def test_a_selection_counts_the_score_of_the_current_credit(tmp_path: Path) -> None:
    lk = build_lake(tmp_path, siblings("t", [None, None, None, None]))
    add_scores(lk, [1.0, 0.0, 1.0, 0.0], scorer="booked")
    run_credit(lk, ESTIMATORS["rloo"](), score="booked")
    report = run_select(lk, make_selection("live", DeadGroups()))
    assert (report.kept_episodes, report.score.name, report.score.version, report.score.estimator) == (
        4,
        "booked",
        "1",
        "rloo",
    )
    with pytest.raises(DataRefusedError, match="env_return") as refusal:
        run_select(lk, make_selection("live", DeadGroups()), score="env_return")
    assert "--score booked" in str(refusal.value)
    assert "unknown=keep" not in str(refusal.value)


def credit_job(lk: Lake) -> int:
    return int(lk.sql("SELECT job_id FROM job_runs WHERE kind = 'credit' ORDER BY ended_at LIMIT 1").item())


def test_a_credit_job_says_which_groups_are_dead(shared: Lake) -> None:
    job = ids.to_text(credit_job(shared))
    report = run_select(shared, make_selection("credited", DeadGroups()), credit=job[:6])
    assert report.report["filter"].to_list() == ["credit", "dead_groups"]
    assert report.report["dropped_episodes"].to_list() == [0, 8]
    (why,) = set(rows_of(shared, report)["reason"].drop_nulls())
    assert "group is dead" in why
    series = ids.to_text(shared.sql("SELECT series_id FROM jobs WHERE job_id = ?", [credit_job(shared)]).item(0, 0))
    assert selected_ids(
        shared, run_select(shared, make_selection("credited", DeadGroups()), credit=series[:9])
    ) == selected_ids(shared, report)


def test_what_the_credit_job_did_not_cover_is_dropped_for_that(tmp_path: Path) -> None:
    lk = build_lake(tmp_path, siblings("t", [1.0, 0.0]))
    job = ids.to_text(add_credit(lk))
    with lk.job(kind="collect", run_id="later") as later:
        later.record(siblings("u", [1.0, 0.0, 1.0]))
    report = run_select(lk, make_selection("s", Status()), credit=job)
    assert report.report.rows() == [("credit", 3, 9, 2, 6), ("status", 0, 0, 2, 6)]
    assert set(rows_of(lk, report)["reason"].drop_nulls()) == {f"gigpo (credit {job}) did not cover it"}
    with pytest.raises(DataRefusedError, match="covered none of the 3 selected episodes"):
        run_select(lk, make_selection("s", Status()), credit=job, where="run_id = 'later'")


# ---------------------------------------------------------------- skipping


def test_the_same_again_is_skipped_until_something_changes(tmp_path: Path) -> None:
    lk = build_lake(tmp_path, siblings("t", [1.0, 0.0, 1.0]))
    add_scores(lk, [0.9, 0.9, 0.1])
    ask = {"score": "judge"}
    first = run_select(lk, make_selection("s", MinReward(at_least=0.5)), **ask)
    again = run_select(lk, make_selection("s", MinReward(at_least=0.5)), **ask)
    assert (first.skipped, again.skipped, again.job_id) == (False, True, first.job_id)
    assert again.report.equals(first.report)
    assert not run_select(lk, make_selection("s", MinReward(at_least=0.5)), force=True, **ask).skipped
    second = run_select(lk, make_selection("s", MinReward(at_least=0.2)), **ask)
    assert not second.skipped
    back = run_select(lk, make_selection("s", MinReward(at_least=0.5)), **ask)
    assert not back.skipped, "the newest job of the name has other filters: readers would take those"
    assert find_selection_job(lk.snapshot(), "s") == back.job_id
    add_scores(lk, [0.1])
    rescored = run_select(lk, make_selection("s", MinReward(at_least=0.5)), **ask)
    assert (rescored.skipped, rescored.kept_episodes) == (False, 1)
    lk.append(siblings("u", [1.0]), run_id="more")
    assert not run_select(lk, make_selection("s", MinReward(at_least=0.5)), **ask).skipped


def test_a_failed_job_selects_nothing(tmp_path: Path) -> None:
    lk = build_lake(tmp_path, siblings("t", [0.0, 0.0]))
    with pytest.raises(DataRefusedError):
        run_select(lk, make_selection("s", DeadGroups()))
    assert lk.scan("selections").collect().is_empty()
    assert find_selection_job(lk.snapshot(), "s") is None


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "where",
    [
        "true) UNION ALL SELECT 1, 2, 'x', 'x', 3, 'completed', 1, 1.0, 2 --",
        "true) OR episode_id IN (SELECT 1); DROP TABLE episodes --",
        "colour = 'red'",
        "",
    ],
)
def test_a_hostile_or_wrong_predicate_is_refused(shared: Lake, where: str) -> None:
    before = shared.snapshot().versions
    with pytest.raises(UsageError, match="--where"):
        run_select(shared, make_selection("hostile", Status()), where=where)
    assert shared.snapshot().versions == before


def test_an_empty_choice_says_so(shared: Lake, tmp_path: Path) -> None:
    with pytest.raises(DataRefusedError, match="--where 'false'"):
        run_select(shared, make_selection("none", Status()), where="false")
    with pytest.raises(DataRefusedError, match="holds no episodes"):
        run_select(build_lake(tmp_path, []), make_selection("none", Status()))


def test_nothing_left_is_refused_with_the_count_of_every_filter(shared: Lake) -> None:
    filters = (Status(), MinReward(at_least=0.5), Staleness(max_behind=0, now=99))
    with pytest.raises(
        DataRefusedError, match=r"none of 24 episodes \(dropped: status 2, min_reward 9, staleness 13\)"
    ):
        run_select(shared, make_selection("nothing", *filters))
