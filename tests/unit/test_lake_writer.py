"""Recording facts exactly once: replays, conflicts, lost races, abandoned writes, and what readers see of them.

Races are made deterministic: a second lake handle writes at a chosen point of the first one's write.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from deltalake import DeltaTable

import lake
from lake import EpisodeRecord, Lake
from lake.storage.commits import CommitLostError
from lake.tables import TABLES
from lake.write.jobs import RecordCounts
from testkit.copies import empty_lake
from testkit.episodes import assert_same, assert_whole, contents, episode


@pytest.fixture
def lk(tmp_path: Path) -> Lake:
    return empty_lake(tmp_path / "lake")


def record(lk: Lake, *records: EpisodeRecord) -> RecordCounts:
    with lk.job(kind="collect", run_id="run") as job:
        return job.record(records)


def compact(lk: Lake, *names: str) -> None:
    """What a compaction leaves: one file, rows of several write attempts in it."""
    for name in names:
        DeltaTable(f"{lk.uri}/{name}").optimize.compact()


class Interrupted(Exception):
    """Stands for the death of a process."""


def die_before_episodes(lk: Lake, monkeypatch: pytest.MonkeyPatch, *records: EpisodeRecord) -> None:
    """Commit the children of episodes, and not the episodes."""

    def dead(*_: Any, **__: Any) -> None:
        raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(lk._store, "append_episodes", dead)
        with pytest.raises(Interrupted):
            record(lk, *records)


def meanwhile(lk: Lake, monkeypatch: pytest.MonkeyPatch, action: Callable[[], None]) -> None:
    """Let something happen once, after the next children were committed and before their episodes are."""
    commit = lk._store.append_episodes

    def interrupted(*args: Any, **options: Any) -> None:
        monkeypatch.undo()
        action()
        commit(*args, **options)

    monkeypatch.setattr(lk._store, "append_episodes", interrupted)


# ---------------------------------------------------------------- once


def test_a_new_episode_is_there_with_its_steps_and_tokens(lk: Lake) -> None:
    counts = record(lk, episode(steps=3, tokens=True))
    assert (counts.new, counts.steps, counts.present, counts.rejected) == (1, 3, 0, 0)
    snapshot = lk.snapshot()
    assert assert_whole(snapshot) == 1
    assert snapshot.scan("tokens").collect().height == 3
    (write_id,) = snapshot.scan("episodes").collect()["write_id"]
    for name in ("steps", "tokens"):
        assert set(snapshot.scan(name).collect()["write_id"]) == {write_id}


def test_the_same_episode_again_is_present(lk: Lake) -> None:
    record(lk, episode(steps=3))
    before = lk.snapshot()
    counts = record(lk, episode(steps=3))
    assert (counts.new, counts.steps, counts.present) == (0, 0, 1)
    after = lk.snapshot()
    assert before.versions | {"jobs": 0} == after.versions | {"jobs": 0}, "nothing was written"


def test_the_same_episode_from_another_process_is_present(lk: Lake) -> None:
    record(lk, episode())
    assert record(lake.open(lk.uri), episode()).present == 1


def test_other_content_under_the_same_key_is_a_conflict(lk: Lake) -> None:
    variants = [
        episode(steps=3),
        episode(env_return=1.0),
        episode(tokens=True),
        episode(extra={"a": None}),
        episode(status="failed"),
    ]
    record(lk, episode())
    before = contents(lk.snapshot(), ("episodes", "steps", "tokens"))
    counts = record(lk, *variants)
    assert (counts.new, counts.present, counts.rejected) == (0, 0, len(variants))
    rejects = lk.scan("rejects").collect().to_dicts()
    assert len(rejects) == len(variants)
    for reject in rejects:
        assert reject["reason"] == "conflict"
        assert "run 'run', task 'task', rollout 0, attempt 0" in reject["message"]
        assert "higher attempt" in reject["message"]
    assert_same(contents(lk.snapshot()), before)


def test_another_key_is_another_episode(lk: Lake) -> None:
    variants: list[dict[str, Any]] = [
        {"attempt": 1},
        {"index": 1},
        {"agent_id": "a"},
        {"collection_round": 0},
        {"seed": 0},
        {"run_id": "other"},
        {"task": "other"},
    ]
    record(lk, episode())
    assert record(lk, *(episode(**fields) for fields in variants)).new == len(variants)


def test_an_unknown_field_is_not_the_same_as_zero(lk: Lake) -> None:
    record(lk, episode(env_return=0.0))
    assert record(lk, episode(env_return=None)).rejected == 1


# ---------------------------------------------------------------- repeats inside a batch


def test_a_repeat_inside_a_batch_is_present(lk: Lake) -> None:
    counts = record(lk, episode(), episode(index=1), episode())
    assert (counts.new, counts.present, counts.rejected) == (2, 1, 0)
    assert assert_whole(lk.snapshot()) == 2


def test_the_first_of_a_key_in_a_batch_wins(lk: Lake) -> None:
    counts = record(lk, episode(steps=1), episode(steps=2), episode(steps=1), episode(steps=3))
    assert (counts.new, counts.present, counts.rejected) == (1, 1, 2)
    assert lk.scan("episodes").collect()["num_steps"].to_list() == [1]
    assert lk.scan("rejects").collect()["position"].sort().to_list() == [1, 3]


def test_what_a_repeat_is_does_not_depend_on_the_batch(tmp_path: Path) -> None:
    """The lake holds the second content of a key: the first is the conflict, not the second."""
    records = [episode(steps=1), episode(steps=2), episode(steps=1), episode(steps=2)]
    rows_found = []
    for batches in ([records], [[record_written] for record_written in records]):
        lk = lake.open(tmp_path / str(len(batches)), create=True)
        record(lk, episode(steps=2))
        counts = [record(lk, *batch) for batch in batches]
        rows_found.append((sum(c.new for c in counts), sum(c.present for c in counts), sum(c.rejected for c in counts)))
    assert rows_found == [(0, 2, 2)] * 2


def test_an_empty_batch_writes_nothing(lk: Lake) -> None:
    before = lk.snapshot().versions
    counts = record(lk)
    assert (counts.new, counts.present, counts.rejected) == (0, 0, 0)
    assert lk.snapshot().versions | {"jobs": 0} == before | {"jobs": 0}


def test_a_record_that_is_recorded_is_not_changed(lk: Lake) -> None:
    """So that it can be recorded again, under another run."""
    first = episode()
    record(lk, first)
    assert first == episode()
    with lk.job(kind="collect", run_id="other") as job:
        assert job.record([first]).new == 1
    assert set(lk.scan("episodes").collect()["run_id"]) == {"run", "other"}


def test_a_record_without_any_run_is_rejected(lk: Lake) -> None:
    with lk.job(kind="collect") as job:
        counts = job.record([episode(), episode("other", run_id="run")])
    assert (counts.new, counts.steps, counts.rejected, counts.refused_positions) == (1, 2, 1, ())
    assert counts.first_reject is not None
    assert counts.first_reject.position == 0
    (reject,) = lk.scan("rejects").collect().to_dicts()
    assert (reject["reason"], reject["position"]) == ("invalid", 0)
    assert "`run_id` is missing" in reject["message"]


# ---------------------------------------------------------------- lost races


def test_a_race_lost_to_other_episodes_costs_a_retry_and_nothing_else(
    lk: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = lake.open(lk.uri)
    meanwhile(lk, monkeypatch, lambda: record(reader, episode("theirs"), episode("theirs", 1)) and None)
    counts = record(lk, episode("mine"))
    assert counts.new == 1
    assert assert_whole(lk.snapshot()) == 3
    assert lk.snapshot().dead_write_ids == frozenset(), "the children that were written first are the ones accepted"


def test_a_race_lost_to_the_same_episodes_abandons_the_write(lk: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    second = lake.open(lk.uri)
    meanwhile(lk, monkeypatch, lambda: record(second, episode(tokens=True)) and None)
    counts = record(lk, episode(tokens=True))
    assert (counts.new, counts.present) == (0, 1)
    assert assert_whole(lk.snapshot()) == 1
    assert len(lk.snapshot().dead_write_ids) == 1


def test_a_race_lost_in_part_writes_the_rest_under_another_write_id(lk: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    second = lake.open(lk.uri)
    meanwhile(lk, monkeypatch, lambda: record(second, episode("a"), episode("b", steps=5)) and None)
    counts = record(lk, episode("a"), episode("b"), episode("c"), episode("d"))
    assert (counts.new, counts.present, counts.rejected) == (2, 1, 1)
    snapshot = lk.snapshot()
    assert assert_whole(snapshot) == 4
    write_ids = dict(snapshot.scan("episodes").select("task_id", "write_id").collect().iter_rows())
    assert write_ids["a"] == write_ids["b"] != write_ids["c"] == write_ids["d"]
    (dead,) = snapshot.dead_write_ids
    assert dead not in write_ids.values()
    assert snapshot.scan("steps").filter(pl.col("write_id") == dead).collect().is_empty()


def test_a_commit_that_arrived_although_it_was_reported_lost_is_found(
    lk: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An acknowledgement that never came: the writer finds its own episodes there and writes nothing again."""
    commit = lk._store.append_episodes

    def unacknowledged(*args: Any, **options: Any) -> None:
        monkeypatch.undo()
        commit(*args, **options)
        msg = "timed out"
        raise CommitLostError(msg)

    monkeypatch.setattr(lk._store, "append_episodes", unacknowledged)
    assert record(lk, episode(tokens=True)).new == 1
    assert assert_whole(lk.snapshot()) == 1
    assert lk.snapshot().dead_write_ids == frozenset()


def test_two_commits_checked_at_one_version_cannot_both_succeed(lk: Lake) -> None:
    """The compare-and-swap itself, below the writer: same version, disjoint episodes, two handles."""
    second = lake.open(lk.uri)
    frames = [prepared(record_given) for record_given in (episode("a"), episode("b"))]
    version = lk._store.refresh("episodes")
    assert second._store.refresh("episodes") == version
    lk._store.append_episodes([lk._store.stage("episodes", frames[0])], version)
    with pytest.raises(CommitLostError):
        second._store.append_episodes([second._store.stage("episodes", frames[1])], version)
    with pytest.raises(CommitLostError):
        lk._store.append_episodes([lk._store.stage("episodes", frames[1])], version)
    second._store.append_episodes([second._store.stage("episodes", frames[1])], second._store.refresh("episodes"))
    assert lk.scan("episodes").collect()["task_id"].sort().to_list() == ["a", "b"]


def prepared(record_given: EpisodeRecord) -> pl.DataFrame:
    from lake.records import identify
    from lake.tables.contracts import conform
    from lake.write.rows import build_episodes_frame

    record_given.run_id = "run"
    return conform(build_episodes_frame([record_given], [identify(record_given, "run")], 1), TABLES["episodes"])


# ---------------------------------------------------------------- dead writes


def test_children_without_their_episodes_do_not_exist(lk: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    record(lk, episode("alive"))
    die_before_episodes(lk, monkeypatch, episode("dead", tokens=True))
    snapshot = lk.snapshot()
    assert assert_whole(snapshot) == 1
    assert len(snapshot.files("steps")) == 1, "whole files of dead writes are not even listed"
    assert snapshot.files("tokens") == []
    assert snapshot.sql("SELECT (SELECT count(*) FROM steps) AS steps, (SELECT count(*) FROM tokens) AS tokens").row(
        0
    ) == (2, 0)
    assert len(snapshot.dead_write_ids) == 1


def test_what_died_is_written_by_the_next_attempt(lk: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [episode("a", tokens=True), episode("b")]
    die_before_episodes(lk, monkeypatch, *records)
    die_before_episodes(lk, monkeypatch, records[0])
    assert record(lk, *records).new == 2
    assert assert_whole(lk.snapshot()) == 2
    assert len(lk.snapshot().dead_write_ids) == 2


def test_dead_rows_in_a_compacted_file_are_filtered(lk: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    record(lk, episode("before", steps=1))
    die_before_episodes(lk, monkeypatch, episode("dead", steps=5, tokens=True))
    record(lk, episode("after", steps=3, tokens=True))
    expected = contents(lk.snapshot())
    compact(lk, "steps", "tokens", "episodes", "jobs")
    snapshot = lk.snapshot()
    (file,) = snapshot.files("steps")
    assert file.dead == snapshot.dead_write_ids
    assert file.rows == 1 + 5 + 3, "the dead rows are still in the file"
    assert assert_whole(snapshot) == 2
    assert_same(contents(snapshot), expected)
    assert snapshot.sql("SELECT count(*) AS n FROM steps").item() == 4
    assert snapshot.sql("SELECT count(*) AS n FROM tokens").item() == 3


def test_compaction_makes_nothing_new_and_nothing_lost(lk: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that indexed the old files, and one that never saw them, both know what is present."""
    records = [episode("t", n, tokens=True) for n in range(4)]
    for record_given in records:
        record(lk, record_given)
    die_before_episodes(lk, monkeypatch, episode("dead"))
    expected = contents(lk.snapshot(), ("episodes", "steps", "tokens"))
    compact(lk, "steps", "tokens", "episodes", "jobs")
    for writer in (lk, lake.open(lk.uri)):
        assert record(writer, *records, episode("t", 0, steps=9)).present == 4
    assert_same(contents(lk.snapshot()), expected)


def test_a_compaction_between_check_and_commit_changes_nothing(lk: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    record(lk, episode("a"))
    record(lk, episode("b"))
    meanwhile(lk, monkeypatch, lambda: compact(lk, "episodes"))
    assert record(lk, episode("c")).new == 1
    assert assert_whole(lk.snapshot()) == 3
    assert record(lake.open(lk.uri), episode("a"), episode("b"), episode("c")).present == 3


def test_a_checkpoint_of_the_log_keeps_what_writing_relies_on(lk: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Delta folds its log now and then; the transaction and the statistics of files must survive that."""
    record(lk, episode("a", tokens=True))
    die_before_episodes(lk, monkeypatch, episode("dead", tokens=True))
    for name in ("episodes", "steps", "tokens", "jobs"):
        DeltaTable(f"{lk.uri}/{name}").create_checkpoint()
    again = lake.open(lk.uri)
    assert again.snapshot().dead_write_ids == lk.snapshot().dead_write_ids != frozenset()
    meanwhile(again, monkeypatch, lambda: record(lk, episode("b")) and None)
    counts = record(again, episode("a", tokens=True), episode("b"), episode("c"))
    assert (counts.new, counts.present) == (1, 2)
    assert assert_whole(again.snapshot()) == 3


@pytest.mark.slow
def test_many_commits_pass_a_checkpoint_of_the_log(lk: Lake) -> None:
    """Delta makes a checkpoint every 100 commits alone."""
    for n in range(105):
        assert record(lk, episode("t", n, steps=1)).new == 1
    assert (Path(lk.uri) / "episodes" / "_delta_log" / "_last_checkpoint").exists()
    again = lake.open(lk.uri)
    assert record(again, *(episode("t", n, steps=1) for n in range(110))).present == 105
    assert assert_whole(again.snapshot()) == 110
    assert again.snapshot().dead_write_ids == frozenset()
