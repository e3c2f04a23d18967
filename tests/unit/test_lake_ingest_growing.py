"""Sessions that continue: a reading replaces the one that counts only if it extends it, no matter who read it and
when."""

import random
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lake import EpisodeRecord, Lake, StepRecord, ids
from lake.formats import jsonl
from lake.formats.base.format import Format
from lake.formats.registry import FORMATS
from lake.records import ScoreRecord, identify
from lake.write.ingest import ingest
from lake.write.jobs import RecordCounts
from lake.write.preview import preview
from lake.write.sources import Report, locate_arguments, plan_ingest
from testkit.copies import empty_lake
from testkit.episodes import assert_whole, episode, write_lines
from testkit.examples import examples
from viewer.queries.transcripts import read_related_episodes

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def lk(tmp_path: Path) -> Lake:
    return empty_lake(tmp_path / "lake")


def session(
    steps: int, end: int | None = None, note: str = "", *, task: str = "session", **fields: Any
) -> EpisodeRecord:
    """A session after so many steps, which ended at some second; the note is what else may tell readings apart."""
    ended_at = None if end is None else BEGAN + timedelta(seconds=end)
    final = [{"role": "user", "content": note}] if note else None
    return episode(task, steps=steps, ended_at=ended_at, final_observation=final, **fields)


def read(lk: Lake, *records: EpisodeRecord) -> RecordCounts:
    """Record sessions as a reader of them would, in one batch."""
    for record in records:
        record.run_id = "run"
    with lk.job(kind="ingest", run_id="run") as job:
        return job.record_checked(records, range(len(records)), session_positions=range(len(records)))


def visible(lk: Lake) -> list[tuple[Any, ...]]:
    assert_whole(lk.snapshot())
    return lk.sql("SELECT task_id, attempt, num_steps, final_observation FROM episodes ORDER BY ALL").rows()


def counted(counts: RecordCounts) -> tuple[int, int, int, int]:
    return counts.new, counts.present, counts.replaced, counts.rejected


# ---------------------------------------------------------------- the rule


def test_a_longer_reading_replaces_the_one_before(lk: Lake) -> None:
    assert counted(read(lk, session(2))) == (1, 0, 0, 0)
    assert counted(read(lk, session(3))) == (1, 0, 1, 0)
    assert counted(read(lk, session(6))) == (1, 0, 1, 0)
    assert visible(lk) == [("session", 2, 6, None)]
    assert lk.sql("SELECT kind FROM retractions")["kind"].to_list() == ["superseded"] * 2


def test_the_same_again_is_present_whatever_came_since(lk: Lake) -> None:
    for steps in (2, 3, 6):
        read(lk, session(steps))
    for steps in (6, 3, 2):
        assert counted(read(lk, session(steps))) == (0, 1, 0, 0)
    assert visible(lk) == [("session", 2, 6, None)]


def test_an_older_copy_that_was_never_seen_changes_nothing(lk: Lake) -> None:
    read(lk, session(6))
    assert counted(read(lk, session(4))) == (0, 1, 0, 0)
    assert counted(read(lk, session(4, note="another"))) == (0, 1, 0, 0)
    assert visible(lk) == [("session", 0, 6, None)]


def test_of_as_many_steps_the_one_that_ended_later_counts(lk: Lake) -> None:
    read(lk, session(3, 10, "10"))
    assert counted(read(lk, session(3, 9, "9"))) == (0, 1, 0, 0)
    assert counted(read(lk, session(3, None, "no end"))) == (0, 1, 0, 0)
    assert counted(read(lk, session(3, 11, "11"))) == (1, 0, 1, 0)
    assert [row[3] for row in visible(lk)] == ['[{"role":"user","content":"11"}]']


def test_an_end_without_a_zone_is_compared_as_it_is_stored(lk: Lake) -> None:
    read(lk, session(3, 10, "10"))
    later = session(3, 0, "later")
    later.ended_at = (BEGAN + timedelta(seconds=11)).replace(tzinfo=None)
    assert counted(read(lk, later)) == (1, 0, 1, 0)
    assert counted(read(lk, session(3, 11, "the same moment"))) == (1, 0, 1, 0)


def test_an_outcome_that_is_known_only_later_is_taken_although_no_step_came(lk: Lake) -> None:
    """What runs agents often writes it last, and without a time."""
    read(lk, session(3))
    assert counted(read(lk, session(3, env_return=1.0))) == (1, 0, 1, 0)
    assert counted(read(lk, session(3))) == (0, 1, 0, 0), "that was before"
    assert counted(read(lk, session(3, env_return=1.0))) == (0, 1, 0, 0)
    assert lk.sql("SELECT env_return FROM episodes").item() == 1.0


def test_a_batch_may_hold_several_readings_in_any_order(lk: Lake, tmp_path: Path) -> None:
    readings = [session(n) for n in (3, 1, 3, 2, 5, 5)]
    assert counted(read(lk, *readings)) == (2, 4, 1, 0)
    assert visible(lk) == [("session", 1, 5, None)]
    other_lake = empty_lake(tmp_path / "other")
    tied = [session(2, note=note) for note in ("a", "b", "a", "b")]
    assert counted(read(other_lake, *tied)) == (2, 2, 1, 0)
    assert [row[3] for row in visible(other_lake)] == ['[{"role":"user","content":"b"}]']


def test_sessions_are_told_apart_by_task_and_agent(lk: Lake) -> None:
    read(lk, session(3), session(1, task="other"), session(2, agent_id="sub"))
    assert counted(read(lk, session(4), session(1, task="other"), session(3, agent_id="sub"))) == (2, 1, 2, 0)
    assert [(row[0], row[2]) for row in visible(lk)] == [("other", 1), ("session", 3), ("session", 4)]


def test_an_attempt_that_the_source_names_is_a_retry_of_its_own(lk: Lake) -> None:
    read(lk, session(5))
    assert counted(read(lk, session(2, attempt=1))) == (1, 0, 1, 0)
    assert counted(read(lk, session(3, attempt=1))) == (1, 0, 1, 0)
    assert visible(lk) == [("session", 2, 3, None)]


def test_records_that_do_not_grow_conflict_as_ever(lk: Lake) -> None:
    record = session(2, run_id="run")
    lk.append([record])
    assert lk.append([session(3, run_id="run")]).rejected == 1
    assert visible(lk) == [("session", 0, 2, None)]


@settings(max_examples=examples(15))
@given(data=st.data(), lengths=st.lists(st.integers(1, 6), min_size=1, max_size=8))
def test_whatever_is_read_in_whatever_batches_the_longest_counts(
    data: st.DataObject, lengths: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    lk = empty_lake(tmp_path_factory.mktemp("any") / "lake")
    lengths_left = list(lengths)
    total = RecordCounts()
    while lengths_left:
        size = data.draw(st.integers(1, len(lengths_left)))
        counts = read(lk, *(session(steps) for steps in lengths_left[:size]))
        assert counts.new + counts.present == size
        total.new += counts.new
        lengths_left = lengths_left[size:]
    assert visible(lk)[0][2] == max(lengths)
    assert total.new == len({max(lengths[: n + 1]) for n in range(len(lengths))})


# ---------------------------------------------------------------- what else depends on it


def scored(steps: int, value: float) -> EpisodeRecord:
    return session(steps, scores=[ScoreRecord(scorer="judge", value=value)])


@pytest.fixture
def reads_whole_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of our JSONL are sessions that continue."""
    fmt = Format("jsonl", "sessions", jsonl.recognise, jsonl.read, by_line=True, is_whole=True)
    monkeypatch.setitem(FORMATS, "jsonl", fmt)


def take(lk: Lake, folder: Path, *records: EpisodeRecord) -> Report:
    report = ingest(lk, write_lines(folder / "session.jsonl", records))
    assert report.records == report.new + report.present + report.rejected
    return report


def test_scores_follow_the_reading_that_they_came_with(lk: Lake, tmp_path: Path, reads_whole_files: None) -> None:
    def judged() -> list[tuple[Any, ...]]:
        return lk.sql("SELECT attempt, value FROM episodes JOIN current_scores USING (episode_id)").rows()

    assert take(lk, tmp_path, scored(2, 0.2)).scores == 1
    report = take(lk, tmp_path, scored(3, 0.3))
    assert (report.new, report.replaced, report.scores) == (1, 1, 1)
    assert judged() == [(1, 0.3)]
    assert take(lk, tmp_path, scored(3, 0.4)).scores == 1, "the same session, judged anew"
    assert judged() == [(1, 0.4)]
    assert take(lk, tmp_path, scored(2, 0.2)).scores == 0, "what an older copy says is older too"
    assert judged() == [(1, 0.4)]


def test_a_child_of_a_session_that_went_on_is_related_to_what_it_is_now(lk: Lake) -> None:
    def named(steps: int) -> EpisodeRecord:
        return session(steps, run_id="run")

    first = ids.to_text(identify(named(1), "run").episode_id)
    child = session(1, task="sub", relation="subagent", parent_episode_id=first, parent_step_index=0)
    read(lk, named(1), child)
    names = "p.task_id, p.attempt, r.relation, r.parent_step_index"
    parent = f"SELECT {names} FROM related_episodes AS r JOIN episodes AS p ON p.episode_id = r.parent_episode_id"
    for attempt, steps in enumerate((1, 2, 4)):
        read(lk, named(steps))
        assert lk.sql(parent).rows() == [("session", attempt, "subagent", 0)]
    above, below = (lk.sql("SELECT episode_id FROM episodes WHERE task_id = ?", [t]).item() for t in ("session", "sub"))
    for first_reading, second, is_parent in ((below, above, True), (above, below, False)):
        assert read_related_episodes(lk, first_reading).select("episode_id", "is_parent").rows() == [
            (second, is_parent)
        ]
    lk.retract([above])
    assert read_related_episodes(lk, below).select("episode_id", "task_id").rows() == [(above, None)], (
        "it is named by its id alone"
    )


def test_a_preview_counts_sessions_as_an_ingest_would(lk: Lake, tmp_path: Path, reads_whole_files: None) -> None:
    path = write_lines(tmp_path / "s.jsonl", [session(n) for n in (3, 1, 3, 4)])
    with locate_arguments([str(path)], None) as (argument,):  # type: ignore[arg-type]
        preview_read = preview(plan_ingest(argument))
    report = ingest(lk, path)
    assert (preview_read.episodes, preview_read.present) == (report.new, report.present) == (2, 2)


def walk(*actions: str, task: str = "session", file: str = "a.json", **fields: Any) -> EpisodeRecord:
    """A document with these decisions."""
    record = session(0, task=task, source_uri=file, run_id="run", **fields)
    record.steps = [StepRecord(state=None, action=action) for action in actions]
    return record


def id_of(record: EpisodeRecord) -> str:
    return ids.to_text(identify(record, "run").episode_id)


def walks(lk: Lake) -> list[tuple[str, ...]]:
    assert_whole(lk.snapshot())
    rows = lk.sql("SELECT list(action ORDER BY step_index) FROM steps GROUP BY episode_id").rows()
    return sorted(tuple(actions) for (actions,) in rows)


def test_a_document_with_other_decisions_is_a_sibling_and_what_came_out_of_it_follows(lk: Lake) -> None:
    def document(last: str, file: str) -> list[EpisodeRecord]:
        main = walk("look", last, file=file)
        parents = {"parent_episode_id": id_of(main), "root_episode_id": id_of(main), "file": file}
        helper = walk("help", agent_id="helper", relation="subagent", parent_step_index=0, **parents)
        nested = parents | {"parent_episode_id": id_of(helper)}
        return [main, helper, walk("nest", agent_id="nested", relation="subagent", **nested)]

    for last, file in (("left", "a.json"), ("right", "b.json"), ("left", "a.json"), ("right", "b.json")):
        counts = read(lk, *document(last, file))
    assert (counts.new, counts.present) == (0, 3)
    related = """
        SELECT c.agent_id, p.rollout_index = c.rollout_index, p.agent_id, r.rollout_index = c.rollout_index
        FROM episodes AS c JOIN episodes AS p ON p.episode_id = c.parent_episode_id
        JOIN episodes AS r ON r.episode_id = c.root_episode_id ORDER BY ALL
    """
    assert lk.sql(related).rows() == [("helper", True, None, True)] * 2 + [("nested", True, "helper", True)] * 2
    assert lk.sql("SELECT count(*), count(DISTINCT rollout_index) FROM episodes").row(0) == (6, 2)


def test_an_outcome_is_replaced_by_the_document_that_comes_later_in_another_file(lk: Lake) -> None:
    read(lk, walk("", file="result.json"))
    counts = read(lk, walk("look", "left", file="agent/trajectory.json"))
    assert (counts.new, counts.replaced, counts.siblings) == (1, 1, 0)
    assert counted(read(lk, walk("", file="result.json"))) == (0, 1, 0, 0)
    assert walks(lk) == [("look", "left")]


@pytest.mark.parametrize(
    ("main", "fork", "step"),
    [(("look", "left"), ("right", "on"), 0), (("begin", "again"), ("look", "right", "on"), None)],
)
def test_a_session_that_went_back_extends_what_it_abandoned(
    main: tuple[str, ...], fork: tuple[str, ...], step: int | None, lk: Lake
) -> None:
    """A fork without a step holds all from the beginning."""

    def document() -> list[EpisodeRecord]:
        head = walk(*main)
        fields = {"relation": "fork", "index": 1, "parent_episode_id": id_of(head), "parent_step_index": step}
        return [head, walk(*fork, **fields)]

    read(lk, walk("look", "right"))
    counts = read(lk, *document())
    assert (counts.new, counts.replaced, counts.siblings) == (2, 1, 0)
    assert walks(lk) == sorted([main, fork])
    assert counted(read(lk, *document())) == (0, 2, 0, 0)
    old_copy = read(lk, walk("look", "right"))
    assert (old_copy.new, old_copy.present, old_copy.shorter) == (0, 1, 0), "it was read before"
    other_copy = read(lk, walk("look", "right", "on", note="later"))
    assert (other_copy.new, other_copy.present, other_copy.shorter) == (0, 1, 1)


def test_a_fork_that_got_another_number_is_replaced_as_its_session_is(lk: Lake) -> None:
    def document(*forks: tuple[str, ...], main: tuple[str, ...]) -> list[EpisodeRecord]:
        head = walk(*main)
        parent = {"relation": "fork", "parent_episode_id": id_of(head), "parent_step_index": 0}
        return [head, *(walk(*fork, index=n, **parent) for n, fork in enumerate(forks, 1))]

    read(lk, *document(("right", "on", "on"), main=("look", "left")))
    counts = read(lk, *document(("left",), main=("look", "right", "on", "on", "end")))
    assert (counts.new, counts.replaced, counts.siblings) == (2, 2, 0)
    assert walks(lk) == [("left",), ("look", "right", "on", "on", "end")]


def test_siblings_that_two_processes_read_at_once_both_count(lk: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    import lake

    reader, commit = lake.open(lk.uri), lk._store.append_episodes
    read(lk, walk("first"))

    def interrupted(*args: Any, **options: Any) -> None:
        monkeypatch.undo()
        read(reader, walk("theirs", file="b.json"))
        commit(*args, **options)

    monkeypatch.setattr(lk._store, "append_episodes", interrupted)
    assert read(lk, walk("ours", file="c.json")).siblings == 1
    assert walks(lk) == [("first",), ("ours",), ("theirs",)]
    for name, action in (("b.json", "theirs"), ("c.json", "ours")):
        assert counted(read(reader, walk(action, file=name))) == (0, 1, 0, 0)


def test_a_sibling_that_was_forgotten_does_not_come_back_and_the_others_stay(lk: Lake) -> None:
    read(lk, walk("first"), walk("second", file="b.json"), walk("third", file="c.json"))
    (episode_id,) = lk.sql("SELECT episode_id FROM steps WHERE action = 'second'")["episode_id"]
    lk.forget([episode_id], reason="asked")
    counts = read(lk, walk("first"), walk("second", file="b.json"), walk("third", file="c.json"))
    assert (counts.present, counts.rejected) == (2, 1)
    assert walks(lk) == [("first",), ("third",)]


def test_a_session_that_was_forgotten_does_not_come_back_however_long_it_gets(lk: Lake) -> None:
    read(lk, session(1))
    read(lk, session(2))
    (episode_id,) = lk.sql("SELECT episode_id FROM episodes")["episode_id"]
    lk.forget([episode_id], reason="asked")
    for steps in (2, 3, 4):
        counts = read(lk, session(steps))
        assert (counts.new, counts.replaced, counts.rejected) == (0, 0, 1), steps
    assert lk.sql("SELECT DISTINCT reason FROM rejects").rows() == [("forgotten",)]


def test_readings_of_two_processes_end_with_the_longer_one(lk: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one commits between our look and our commit: once a longer reading, once a shorter one."""
    import lake

    for ours, theirs in ((4, 6), (9, 8)):
        reader = lake.open(lk.uri)
        commit = lk._store.append_episodes

        def interrupted(
            *args: Any, steps: int = theirs, at: Lake = reader, inner: Any = commit, **options: Any
        ) -> None:
            monkeypatch.undo()
            read(at, session(steps))
            inner(*args, **options)

        monkeypatch.setattr(lk._store, "append_episodes", interrupted)
        counts = read(lk, session(ours))
        assert counts.new + counts.present == 1
        assert [row[2] for row in visible(lk)] == [max(ours, theirs)]
    assert lk.sql("SELECT count(*) FROM episodes").item() == 1


def test_many_sessions_are_read_again_in_one_batch(lk: Lake) -> None:
    rng = random.Random(0)
    lengths = {f"s{n}": rng.randint(1, 5) for n in range(40)}
    read(lk, *(session(steps, task=task) for task, steps in lengths.items()))
    counts = read(lk, *(session(3, task=task) for task in lengths))
    longer = sum(steps < 3 for steps in lengths.values())
    assert counted(counts) == (longer, 40 - longer, longer, 0)
    assert {row[0]: row[2] for row in visible(lk)} == {task: max(3, n) for task, n in lengths.items()}
