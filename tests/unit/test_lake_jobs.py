"""Jobs: a started row, exactly one terminal row, and what of their writing exists for readers."""

import json
import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from lake import Lake, ids
from lake.errors import ConflictError, ContractError, LakeAccessError, UsageError
from lake.tables import TABLES
from lake.write import jobs
from lake.write.jobs import Job, hash_code, hash_series
from testkit.copies import copied, empty_lake
from testkit.episodes import episode
from testkit.full_lake import (
    OnPurposeError,
    advantages,
    batch,
    checkpoint,
    full_lake,
    give_up,
    metric,
    rendered,
    scores,
)


@pytest.fixture
def lk(tmp_path: Path) -> Lake:
    return empty_lake(tmp_path / "lake")


@pytest.fixture
def steps(lk: Lake, tmp_path: Path) -> pl.DataFrame:
    """Steps of two groups of one episode each, recorded."""

    def make(template: Path) -> None:
        with empty_lake(template).job(kind="collect", run_id="run") as job:
            job.record([episode("a"), episode("b")])

    # Into the folder of `lk`, which is a copy of the same empty lake: as if another process had recorded them.
    copied("two groups of one episode each", make, tmp_path / "lake")
    return lk.scan("steps").sort("group_id", "step_index").collect()


def events(lk: Lake, job: Job) -> list[dict[str, Any]]:
    """The rows of a job in `jobs`, started first."""
    rows = lk.scan("jobs").filter(pl.col("job_id") == job.job_id).collect().to_dicts()
    return sorted(rows, key=lambda row: (row["event"] != "started", row["at"]))


def run(lk: Lake, job: Job) -> dict[str, Any]:
    """A job as `job_runs` shows it."""
    (row,) = lk.sql("SELECT * FROM job_runs WHERE job_id = ?", [job.job_id]).to_dicts()
    return row


# ---------------------------------------------------------------- rows of a job


def test_a_job_has_a_started_row_while_it_runs_and_a_terminal_row_after(lk: Lake) -> None:
    with lk.job(kind="credit", run_id="run", parameters={"b": 1, "a": None}, snapshot=lk.snapshot()) as job:
        assert [row["event"] for row in events(lk, job)] == ["started"]
        assert run(lk, job)["status"] == "started"
        assert run(lk, job)["ended_at"] is None
        job.counts |= {"rows_in": 5, "rows_out": 3, "rows_dropped": 2, "dead groups": 1}
    started, ended = events(lk, job)
    assert ended["event"] == "succeeded"
    assert (ended["rows_in"], ended["rows_out"], ended["rows_dropped"]) == (5, 3, 2)
    assert json.loads(ended["counts"]) == {"dead groups": 1}
    assert started["counts"] is None
    for key in ("series_id", "kind", "run_id", "parameters", "input_snapshot", "code_hash", "package_version"):
        assert started[key] == ended[key]
    assert json.loads(started["parameters"]) == {"a": None, "b": 1}
    assert json.loads(started["input_snapshot"])["episodes"] == 0
    rows_seen = run(lk, job)
    assert (rows_seen["status"], rows_seen["rows_out"], rows_seen["run_id"]) == ("succeeded", 3, "run")
    assert rows_seen["ended_at"] >= rows_seen["started_at"]
    assert rows_seen["seconds"] >= 0


def test_a_job_that_raises_fails_with_the_reason_and_the_error_goes_on(lk: Lake) -> None:
    job = lk.job(kind="credit")
    job.counts["rows_in"] = 7
    with pytest.raises(ZeroDivisionError), job:
        _ = 1 / 0
    _, ended = events(lk, job)
    assert (ended["event"], ended["error"]) == ("failed", "ZeroDivisionError: division by zero")
    assert (ended["rows_in"], ended["accepted_write_ids"]) == (7, [])
    assert run(lk, job)["status"] == "failed"


def test_the_reason_of_a_users_fault_is_its_message(lk: Lake) -> None:
    message = "there is no such thing"
    with pytest.raises(UsageError), lk.job(kind="credit") as job:
        raise UsageError(message)
    assert run(lk, job)["error"] == message


def test_a_reason_that_is_no_utf8_is_stored_all_the_same(lk: Lake) -> None:
    with pytest.raises(ValueError, match="lone"), lk.job(kind="credit") as job:
        raise ValueError("lone \ud800")
    assert run(lk, job)["error"] == "ValueError: lone \\ud800"


def test_an_interrupted_job_fails_too(lk: Lake) -> None:
    with pytest.raises(KeyboardInterrupt), lk.job(kind="credit") as job:
        raise KeyboardInterrupt
    assert run(lk, job)["status"] == "failed"


def test_when_not_even_the_terminal_row_can_be_written_the_first_error_is_the_one_shown(
    lk: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise LakeAccessError("the disk is full")

    job = lk.job(kind="credit")
    job.__enter__()
    first = LakeAccessError("first")
    with monkeypatch.context() as patch:
        patch.setattr(lk._store, "append_terminal", full)
        assert not job.__exit__(LakeAccessError, first, None), "the error goes on"
    assert "the disk is full" in first.__notes__[0]
    assert run(lk, job)["status"] == "started", "as if it had been killed"


def test_the_context_that_is_left_open_is_a_job_that_was_killed(lk: Lake) -> None:
    job = lk.job(kind="credit")
    job.__enter__()
    assert run(lk, job)["status"] == "started"


# ---------------------------------------------------------------- what exists for readers


@pytest.mark.parametrize("name", ["advantages", "scores", "tokens"])
def test_judgements_exist_once_their_job_has_succeeded(lk: Lake, steps: pl.DataFrame, name: str) -> None:
    make = {"advantages": advantages, "scores": scores, "tokens": rendered}[name]
    with lk.job(kind="judge") as job:
        job.write(name, make(steps.head(2)))
        job.write(name, make(steps.tail(2)))
        assert lk.scan(name).collect().is_empty()
        assert lk.sql(f"SELECT * FROM {name}").is_empty()
        assert len(lk.snapshot().dead_write_ids) == 2
    rows = lk.scan(name).collect()
    assert rows.height == 4
    assert set(events(lk, job)[1]["accepted_write_ids"]) == set(rows["write_id"])
    assert lk.snapshot().dead_write_ids == frozenset()
    if name != "tokens":
        assert set(rows["job_id"]) == {job.job_id}
        assert set(rows["series_id"]) == {job.series_id}


@pytest.mark.parametrize("end", ["failed", "killed"])
def test_judgements_of_a_job_that_failed_or_was_killed_never_exist(lk: Lake, steps: pl.DataFrame, end: str) -> None:
    job = lk.job(kind="judge")
    job.__enter__()
    job.write("advantages", advantages(steps))
    if end == "failed":
        job.__exit__(ValueError, ValueError("no"), None)
    assert lk.scan("advantages").collect().is_empty()
    assert [row["accepted_write_ids"] for row in events(lk, job)] == [[]] * (2 if end == "failed" else 1)
    with lk.job(kind="judge") as again:
        again.write("advantages", advantages(steps))
    rows = lk.scan("advantages").collect()
    assert rows.height == steps.height, "run again, listed once"
    assert set(rows["job_id"]) == {again.job_id}


@pytest.mark.parametrize(("event", "rows_seen"), [("started", 0), ("failed", 0), ("succeeded", 4)])
def test_only_the_word_of_a_job_that_succeeded_counts(
    lk: Lake, steps: pl.DataFrame, event: str, rows_seen: int
) -> None:
    """Anything that another program wrote into the row of a job that did not."""
    job = lk.job(kind="judge")
    job.__enter__()
    job.write("advantages", advantages(steps))
    (started,) = lk.scan("jobs").filter(pl.col("job_id") == job.job_id).collect().to_dicts()
    row = started | {"event": event, "accepted_write_ids": list(lk.snapshot().dead_write_ids)}
    lk._store.append("jobs", pl.DataFrame([row], schema=TABLES["jobs"].polars()))
    assert lk.scan("advantages").collect().height == rows_seen
    assert lk.sql("SELECT count(*) AS n FROM advantages").item() == rows_seen


def test_episodes_of_a_job_that_failed_are_facts_all_the_same(lk: Lake) -> None:
    job = lk.job(kind="collect", run_id="run")
    with suppress(OnPurposeError), job:
        job.record([episode()])
        give_up()
    assert run(lk, job)["status"] == "failed"
    assert lk.scan("episodes").collect().height == 1
    assert lk.scan("steps").collect().height == 2


def test_lineage_exists_at_once(lk: Lake) -> None:
    """Anyone who watches a training run sees its metrics while it runs, and what a killed one consumed stays known."""
    job = lk.job(kind="train", run_id="run")
    job.__enter__()
    job.write("metrics", pl.DataFrame([metric(0)]))
    job.write("batches", pl.DataFrame([batch(1)]))
    job.write("checkpoints", pl.DataFrame([checkpoint()]))
    for name in ("metrics", "batches", "checkpoints"):
        (row,) = lk.scan(name).collect().to_dicts()
        assert (row["job_id"], row["attempt"]) == (job.job_id, 0)


def test_a_job_that_wrote_nothing_accepts_nothing(lk: Lake) -> None:
    with lk.job(kind="judge") as job:
        job.write("advantages", pl.DataFrame())
    assert events(lk, job)[1]["accepted_write_ids"] == []
    assert lk.snapshot().versions["advantages"] == -1


@pytest.mark.parametrize("name", ["episodes", "steps", "jobs", "step"])
def test_tables_that_are_not_written_this_way_are_refused(lk: Lake, name: str) -> None:
    frame = pl.DataFrame({"episode_id": [1]})
    with (
        pytest.raises(ContractError, match=f"no table `{name}`; valid: tokens, spans, rejects, retractions, scores"),
        lk.job(kind="x") as job,
    ):
        job.write(name, frame)


def test_a_frame_that_breaks_its_contract_writes_nothing(lk: Lake, steps: pl.DataFrame) -> None:
    with pytest.raises(ContractError, match="not finite"), lk.job(kind="judge") as job:
        job.write("advantages", advantages(steps, math.nan))
    assert lk.snapshot().versions["advantages"] == -1
    assert "not finite" in run(lk, job)["error"]


# ---------------------------------------------------------------- records that are wrong


WRONG: list[tuple[Any, str]] = [
    (episode(steps=0), "at least one step"),
    (episode(env_return="0.5"), "Expected `float | null`, got `str` - at `$.env_return`"),
    (episode(env_return=math.inf), "`env_return` is inf"),
    (episode(seed=2**70), "at `$.seed`"),
    (episode(policy_version=True), "at `$.policy_version`"),
    (episode(status="done"), "`status` is 'done'; valid: completed"),
    (episode(extra={"a": object()}), "object"),
    (episode(extra={"a": 10**5000}), "digits"),
    (episode(task="lone \udcff"), "UTF-8"),
    ({"task_id": "t"}, "missing required field `steps`"),
    (None, "Expected `object`, got `null`"),
]


def test_records_that_are_wrong_are_rejected_and_the_others_are_recorded(lk: Lake) -> None:
    with lk.job(kind="collect", run_id="run") as job:
        counts = job.record([episode("before"), *(record for record, _ in WRONG), episode("after")])
    assert (counts.new, counts.rejected) == (2, len(WRONG))
    rejects = lk.scan("rejects").sort("position").collect().to_dicts()
    for position, (reject, (_, says)) in enumerate(zip(rejects, WRONG, strict=True), 1):
        assert (reject["position"], reject["reason"], reject["source_uri"]) == (position, "invalid", "recorder")
        assert says in reject["message"]
        assert reject["run_id"] == "run"
    assert set(lk.scan("episodes").collect()["task_id"]) == {"before", "after"}


def test_numbers_are_stored_as_a_file_would_give_them(lk: Lake) -> None:
    """An integer reward is the float that JSON would give: a live record and its file are replays of each other."""
    live, decoded = episode(env_return=1), episode(env_return=1.0)
    live.steps[0].reward, decoded.steps[0].reward = 0, 0.0
    with lk.job(kind="collect", run_id="run") as job:
        assert job.record([live]).new == 1
        assert job.record([decoded]).present == 1


def test_positions_of_conflicts_count_all_records_of_the_batch(lk: Lake) -> None:
    with lk.job(kind="collect", run_id="run") as job:
        job.record([episode(steps=1)])
        counts = job.record([episode(steps=0), episode("new"), episode(steps=3)])
    assert (counts.new, counts.rejected) == (1, 2)
    reason_by_position = dict(lk.scan("rejects").select("position", "reason").collect().iter_rows())
    assert reason_by_position == {0: "invalid", 2: "conflict"}


# ---------------------------------------------------------------- series, fingerprints, skipping


def helper() -> int:
    return 1


def other_helper() -> int:
    return 2


def test_a_series_is_kind_parameters_and_code(lk: Lake) -> None:
    def of(kind: str, parameters: dict[str, Any], *code: jobs.Code) -> int:
        series_id = lk.job(kind=kind, parameters=parameters, code=code).series_id
        assert series_id == hash_series(kind, parameters, code)
        return series_id

    same = of("credit", {"a": 1, "b": [1, {"x": 1, "y": 2}]}, helper)
    assert of("credit", {"b": [1, {"y": 2, "x": 1}], "a": 1}, helper) == same, "the order of keys means nothing"
    changes = {
        of("score", {"a": 1, "b": [1, {"x": 1, "y": 2}]}, helper),
        of("credit", {"a": 2, "b": [1, {"x": 1, "y": 2}]}, helper),
        of("credit", {"a": 1, "b": [{"x": 1, "y": 2}, 1]}, helper),
        of("credit", {"a": 1, "b": [1, {"x": 1, "y": 2}]}, other_helper),
        of("credit", {"a": 1, "b": [1, {"x": 1, "y": 2}]}, helper, other_helper),
        of("credit", {"a": 1, "b": [1, {"x": 1, "y": 2}]}),
    }
    assert len(changes | {same}) == 7


def test_code_may_be_a_module_a_class_or_a_function() -> None:
    hashes = {hash_code([part]) for part in (jobs, Job, helper)}
    assert len(hashes) == 3
    assert all(ids.is_text(text) for text in hashes)


def test_a_finished_job_is_found_by_what_it_read_and_how(lk: Lake) -> None:
    def finish(fingerprint: int, *, fail: bool = False) -> Job:
        job = lk.job(kind="credit", parameters={"a": 1}, fingerprint=fingerprint)
        with suppress(OnPurposeError), job:
            if fail:
                give_up()
        return job

    job = finish(7)
    assert lk.find_job("credit", job.series_id, 7) == job.job_id
    assert lk.find_job("credit", job.series_id, 8) is None
    assert lk.find_job("score", job.series_id, 7) is None
    assert lk.find_job("credit", job.series_id + 1, 7) is None
    again = finish(7)
    assert lk.find_job("credit", job.series_id, 7) == again.job_id, "the newest"
    finish(9, fail=True)
    assert lk.find_job("credit", job.series_id, 9) is None, "a failed job is no result"
    lk.job(kind="credit", parameters={"a": 1}, fingerprint=10).__enter__()
    assert lk.find_job("credit", job.series_id, 10) is None, "neither is one that was killed"


# ---------------------------------------------------------------- the shipped views


def credit(lk: Lake, steps: pl.DataFrame, value: float, *, fail: bool = False, **parameters: Any) -> int:
    job = lk.job(kind="credit", parameters=parameters)
    with suppress(OnPurposeError), job:
        job.write("advantages", advantages(steps, value))
        if fail:
            give_up()
    return job.job_id


def latest(lk: Lake) -> set[tuple[Any, ...]]:
    """(job, group, value) of every row of `latest_advantages`, which holds no row twice."""
    rows = lk.sql("SELECT * FROM latest_advantages")
    assert not rows.select("series_id", "episode_id", "step_index").is_duplicated().any()
    return set(rows.select("job_id", "group_id", "advantage").unique().iter_rows())


def test_the_latest_advantages_are_of_the_newest_succeeded_job_of_each_series_and_group(
    lk: Lake, steps: pl.DataFrame
) -> None:
    first_half, two = steps.head(2), steps.tail(2)
    a, b = steps["group_id"][0], steps["group_id"][2]
    first = credit(lk, steps, 1.0)
    assert latest(lk) == {(first, a, 1.0), (first, b, 1.0)}
    second = credit(lk, two, 2.0)
    assert latest(lk) == {(first, a, 1.0), (second, b, 2.0)}, "a group that the newer job left out keeps its own"
    credit(lk, steps, 3.0, fail=True)
    assert latest(lk) == {(first, a, 1.0), (second, b, 2.0)}, "a failed job is none"
    other_series = credit(lk, first_half, 4.0, gamma=0.5)
    assert latest(lk) == {(first, a, 1.0), (second, b, 2.0), (other_series, a, 4.0)}, "series stand side by side"
    third = credit(lk, steps, 5.0)
    assert latest(lk) == {(third, a, 5.0), (third, b, 5.0), (other_series, a, 4.0)}


def test_which_job_is_the_newest_is_its_end_not_its_start(lk: Lake, steps: pl.DataFrame) -> None:
    slow = lk.job(kind="credit")
    slow.__enter__()
    slow.write("advantages", advantages(steps, 1.0))
    credit(lk, steps, 2.0)
    slow.__exit__(None, None, None)
    assert {job_id for job_id, _, _ in latest(lk)} == {slow.job_id}


def attempts(lk: Lake) -> Iterator[Job]:
    """A training job and its resumed attempts: attempt n continues from the update that a checkpoint holds."""
    first = lk.job(kind="train", run_id="trained")
    first.__enter__()
    yield first
    for number in (1, 2):
        again = lk.job(kind="train", run_id="trained", job_id=first.job_id, attempt=number)
        again.__enter__()
        yield again


def test_a_resumed_attempt_replaces_what_the_one_before_did_after_the_checkpoint(lk: Lake) -> None:
    """Updates 0-3, killed; resumed at 2, killed at once; resumed at 2 again, and on to 5."""
    plan = [(range(4), 100), (range(2, 3), 200), (range(2, 6), 300)]
    for job, (updates, mark) in zip(attempts(lk), plan, strict=True):
        for update in updates:
            job.write("batches", pl.DataFrame([batch(mark + update, update)]))
            job.write("metrics", pl.DataFrame([metric(update, float(mark + update))]))
    job.__exit__(None, None, None)
    expected = [100, 101, 302, 303, 304, 305]
    batches = lk.sql("SELECT optimizer_step, episode_id, attempt FROM trained_batches ORDER BY optimizer_step")
    assert batches["optimizer_step"].to_list() == list(range(6))
    assert batches["episode_id"].to_list() == expected
    assert batches["attempt"].to_list() == [0, 0, 2, 2, 2, 2]
    values = lk.sql("SELECT step, value, run_id, kind FROM run_metrics ORDER BY step")
    assert values["value"].to_list() == [float(number) for number in expected]
    assert set(values["run_id"]) == {"trained"}
    assert set(values["kind"]) == {"train"}
    assert lk.scan("batches").collect().height == 9, "what killed attempts consumed stays on record"


def test_a_resumed_job_has_one_started_and_one_terminal_row(lk: Lake) -> None:
    *_, last = attempts(lk)
    last.__exit__(None, None, None)
    assert [row["event"] for row in events(lk, last)] == ["started", "succeeded"]
    assert run(lk, last)["status"] == "succeeded"


def test_metrics_of_one_name_do_not_replace_those_of_another_job(lk: Lake) -> None:
    for value in (1.0, 2.0):
        with lk.job(kind="train", run_id=f"run {value}") as job:
            job.write("metrics", pl.DataFrame([metric(0, value), metric(0, None, "kl")]))
    rows = lk.sql("SELECT run_id, name, value FROM run_metrics ORDER BY run_id, name").rows()
    assert rows == [
        ("run 1.0", "kl", None),
        ("run 1.0", "loss", 1.0),
        ("run 2.0", "kl", None),
        ("run 2.0", "loss", 2.0),
    ]


def test_every_job_of_a_full_lake_is_one_row_of_job_runs(tmp_path: Path) -> None:
    lk = full_lake(tmp_path / "full")
    rows = lk.sql("SELECT job_id, kind, status FROM job_runs")
    assert rows["job_id"].is_unique().all()
    assert rows.group_by("kind", "status").len().sort("kind", "status").rows() == [
        ("collect", "succeeded", 3),
        ("credit", "failed", 1),
        ("credit", "succeeded", 2),
        ("train", "succeeded", 3),
    ]
    assert TABLES["jobs"].key == ("job_id", "event")


def test_a_guard_that_refuses_makes_the_job_fail_and_its_rows_stay_unseen(lk: Lake, steps: pl.DataFrame) -> None:
    def refuse() -> None:
        raise ConflictError("somebody was first")

    with pytest.raises(ConflictError, match="somebody was first"), lk.job(kind="score", guard=refuse) as job:
        job.write("advantages", advantages(steps))
    (row,) = lk.scan("jobs").filter(pl.col("job_id") == job.job_id, pl.col("event") != "started").collect().to_dicts()
    assert (row["event"], row["error"], row["accepted_write_ids"]) == ("failed", "somebody was first", [])
    assert lk.scan("advantages").filter(pl.col("job_id") == job.job_id).collect().is_empty()


def test_a_guard_sees_every_job_that_ended_before(lk: Lake) -> None:
    """It runs again when another terminal row comes between: of two that exclude each other one succeeds."""
    looks = []

    def alone() -> None:
        ended = lk.scan("jobs").filter(event="succeeded", kind="score").collect().height
        looks.append(ended)
        if ended:
            raise ConflictError("scored already")
        if len(looks) == 1:
            with lk.job(kind="other"):
                """Its terminal row comes between the look and the commit."""

    with lk.job(kind="score", guard=alone):
        pass
    assert looks == [0, 0]
    with pytest.raises(ConflictError), lk.job(kind="score", guard=alone):
        pass


def test_a_job_that_failed_asks_no_guard(lk: Lake) -> None:
    requests = []
    with pytest.raises(ZeroDivisionError), lk.job(kind="score", guard=lambda: requests.append(1)):
        raise ZeroDivisionError
    assert requests == []
