"""Erasure: after `forget` the text of an episode is nowhere under the lake's folder; all else is as it was."""

import shutil
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
import pytest

import lake
from lake import EpisodeRecord, Lake
from lake.care import removal
from lake.care.doctor import examine
from lake.errors import UsageError
from lake.tables import RESOLUTION_ORDER, TABLES
from testkit.copies import copied, empty_lake
from testkit.episodes import assert_whole, episode
from testkit.examples import mostly_slow
from testkit.full_lake import AT, full_lake
from testkit.moving_clock import MovingClock
from testkit.wording import Wording

SECRET = "xylograph"
"""Stands in every text of the episode that is forgotten, and nowhere else."""
LONG = {"log": SECRET * 8000}
SHARED = {"manual": "y" * 70_000}
"""Payloads that go to `blobs`: of the secret episode alone, and of another one too."""


class KilledError(Exception):
    """Stands for the death of a process."""


def secret(index: int = 0, steps: int = 2, **fields: Any) -> EpisodeRecord:
    extra = {SECRET: SECRET} | LONG | SHARED
    record = episode(SECRET, index, steps=steps, tokens=True, error=SECRET, extra=extra, **fields)
    record.initial_messages = [{"role": "user", "content": SECRET}]
    for step in record.steps:
        step.reasoning = f"{SECRET} because"
        step.context = [{"role": "tool", "content": SECRET}]
    return record


def small(folder: Path, **options: Any) -> Lake:
    """Two ordinary episodes and a secret one, in two commits."""

    def make(template: Path) -> None:
        lk = empty_lake(template)
        lk.append([episode("a", tokens=True, extra=SHARED), secret()], run_id="run")
        lk.append([episode("b", tokens=True)], run_id="run")

    return copied("a secret", make, folder, **options)


def id_of(lk: Lake, task: str = SECRET) -> int:
    episode_ids = lk.snapshot().scan_all("episodes").filter(pl.col("task_id") == task).collect()["episode_id"]
    return int(episode_ids[0])


def holders(lk: Lake, word: str = SECRET) -> set[str]:
    """Files under the lake's folder that hold a word: in their bytes, or in a value of a Parquet file."""
    texts = set()
    for path in Path(lk.uri).rglob("*"):
        if path.is_file():
            values = str(pl.read_parquet(path).to_dicts()) if path.suffix == ".parquet" else ""
            if word.encode() in path.read_bytes() or word in values:
                texts.add(path.relative_to(lk.uri).parts[0])
    return texts


def rest(snapshot: lake.Snapshot, episode_id: int) -> dict[str, list[str]]:
    """Every row of every table that is not the secret episode's, nor says what was done to it."""
    rows = {}
    for name, table in TABLES.items():
        if name not in ("jobs", "retractions"):
            frame = snapshot.scan(name).collect()
            if "episode_id" in table.names:
                frame = frame.filter(pl.col("episode_id").ne_missing(episode_id))
            if name == "blobs":
                frame = frame.filter(~pl.col("payload").bin.contains(SECRET.encode()))
            rows[name] = sorted(map(str, frame.rows()))
    return rows


def test_nothing_of_it_is_left_and_nothing_else_is_touched(tmp_path: Path) -> None:
    lk = small(tmp_path / "lake")
    episode_id = id_of(lk)
    expected = rest(lk.snapshot(), episode_id)
    assert holders(lk) == {"episodes", "steps", "blobs"}
    assert lk.scan("blobs").collect().height == 2
    done = lk.forget([episode_id], "the user asked")
    assert holders(lk) == set()
    assert holders(lk, "b.0 sees 0") == {"steps"}, "the search finds what is there"
    assert (done.episodes, done.unreadable) == (1, [])
    removed = {name: count for name, count in done.rows.items() if count}
    assert removed == {"blobs": 1, "episodes": 1, "steps": 2, "tokens": 2}
    assert done.deleted_files == 4
    assert lk.scan("blobs").collect()["payload"].to_list() == [b"y" * 70_000]
    assert rest(lk.snapshot(), episode_id) == expected
    assert rest(lake.open(lk.uri).snapshot(), episode_id) == expected
    assert assert_whole(lk.snapshot()) == 2
    (row,) = lk.scan("retractions").collect().rows(named=True)
    assert (row["episode_id"], row["kind"], row["reason"]) == (episode_id, "forgotten", "the user asked")


def test_it_is_gone_from_every_table_that_names_episodes(tmp_path: Path) -> None:
    lk = full_lake(tmp_path / "lake")
    episode_id = int(lk.scan("annotations").collect()["episode_id"].min())  # type: ignore[arg-type]
    for name in ("steps", "scores"):
        lk.compact(name)
    expected = rest(lk.snapshot(), episode_id)
    done = lk.forget([episode_id])
    naming = {name for name, table in TABLES.items() if "episode_id" in table.names} - {"retractions", "rejects"}
    assert {name for name, count in done.rows.items() if count} == naming
    assert rest(lk.snapshot(), episode_id) == expected
    for name in naming:
        for path in (Path(lk.uri) / name).glob("*.parquet"):
            assert episode_id not in pl.read_parquet(path)["episode_id"], path
    verdicts = examine(lk)
    assert verdicts.filter(pl.col("verdict") == "wrong").is_empty()


def test_an_answer_about_several_episodes_goes_with_the_first_of_them(tmp_path: Path) -> None:
    """With its rows of the others, which hold the same text."""
    lk = small(tmp_path / "lake")
    erased_id, sibling = id_of(lk), id_of(lk, "a")
    requests = [(1, erased_id), (1, sibling), (2, sibling)]
    rows = [
        {"request_id": request, "episode_id": episode_id, "model": "m", "at": AT, "answer": f"answer {request}"}
        for request, episode_id in requests
    ]
    with lk.job(kind="score") as job:
        job.write("responses", pl.DataFrame(rows))
    done = lk.forget([erased_id])
    assert done.rows["responses"] == 2
    assert lk.scan("responses").select("request_id", "episode_id").collect().rows() == requests[2:]
    assert holders(lk, "answer 1") == set()


def test_a_payload_that_was_written_twice_stays_as_the_other_episode_has_it(tmp_path: Path) -> None:
    lk = empty_lake(tmp_path / "lake")
    lk.append([secret()], run_id="run")
    lk.append([episode("b", extra=SHARED)], run_id="run")
    done = lk.forget([id_of(lk)])
    assert done.rows["blobs"] == 2, "the secret one, and its copy of the shared one"
    assert lk.snapshot().scan_all("blobs").select("payload").collect()["payload"].to_list() == [b"y" * 70_000]
    assert assert_whole(lk.snapshot()) == 1


def test_it_is_not_taken_again_and_the_reject_has_no_text(tmp_path: Path, wording: Wording) -> None:
    lk = small(tmp_path / "lake")
    lk.forget([id_of(lk)])
    for again in (lk, lake.open(lk.uri)):
        counts = again.append([secret(), episode("b", tokens=True), secret(1)], run_id="run")
        assert (counts.present, counts.rejected) == (1 + (again is not lk), 1)
    (reject,) = lk.scan("rejects").collect().rows(named=True)
    assert (reject["reason"], reject["raw"], reject["position"]) == ("forgotten", "", 0)
    assert "`trajlake forget`" in wording(reject["message"])
    assert sorted(lk.scan("episodes").collect()["task_id"]) == ["a", "b", SECRET], "another rollout is another episode"


def test_it_stays_forgotten_after_compaction_and_a_vacuum_years_later(tmp_path: Path) -> None:
    clock = MovingClock()
    lk = small(tmp_path / "lake", clock=clock)
    lk.forget([id_of(lk)])
    for name in TABLES:
        lk.compact(name)
    clock.forward(days=1000)
    lk.vacuum()
    assert lake.open(lk.uri).append([secret()], run_id="run").rejected == 1
    assert assert_whole(lk.snapshot()) == 2


def test_rejects_of_the_episode_go_and_all_others_stay(tmp_path: Path) -> None:
    lk = small(tmp_path / "lake")
    other_record = secret(steps=3)
    bad: Any = {"task_id": "wrong", "steps": []}
    assert lk.append([other_record, bad], run_id="run").rejected == 2
    lk.append([episode("b", steps=7)], run_id="run")
    assert "rejects" in holders(lk)
    lk.compact("rejects")
    lk.forget([id_of(lk)])
    assert holders(lk) == set()
    rejects = lk.scan("rejects").sort("position").collect()
    assert sorted(rejects["reason"]) == ["conflict", "invalid"]
    assert rejects.filter(pl.col("reason") == "conflict")["episode_id"].to_list() == [id_of(lk, "b")]


def test_retracted_dead_and_orphaned_copies_go_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a killed writer left of it, in committed files and in files of no commit."""
    lk = small(tmp_path / "lake")

    def dead(*_: Any, **__: Any) -> None:
        raise KilledError

    reader = lake.open(lk.uri)
    index = reader._writer._ledger._index
    look_up = index.look_up
    with monkeypatch.context() as patch:
        patch.setattr(
            index, "look_up", lambda *ids_asked: msgspec.structs.replace(look_up(*ids_asked), contents={}, newest={})
        )
        patch.setattr(reader._store, "append_episodes", dead)
        with pytest.raises(KilledError):
            reader.append([secret()], run_id="run")
    assert len(lk.snapshot().dead_write_ids) == 1
    copy = next((tmp_path / "lake" / "steps").glob("*.parquet"))
    shutil.copy(copy, copy.with_name("orphan.parquet"))
    lk.retract([id_of(lk)])
    lk.forget([id_of(lk)])
    assert holders(lk) == set()
    assert assert_whole(lk.snapshot()) == 2


def test_files_that_cannot_be_read_are_said_to_be_there(tmp_path: Path) -> None:
    lk = small(tmp_path / "lake")
    (tmp_path / "lake" / "steps" / "half.parquet").write_bytes(b"PAR1 and then nothing")
    assert lk.forget([id_of(lk)]).unreadable == ["steps/half.parquet"]


def test_a_snapshot_from_before_keeps_the_rest_and_says_how_much_was_taken(tmp_path: Path) -> None:
    """By name, by time and by version; the rest is exactly what it was, in every table."""
    lk = small(tmp_path / "lake")
    episode_id = id_of(lk)
    versions = lk.name_snapshot("before").versions
    moment = MovingClock()()
    expected = rest(lk.at("before"), episode_id)
    lk.append([episode("later")], run_id="run")
    lk.forget([episode_id])
    lk.name_snapshot("after")
    for again, ways in ((lk, ["before"]), (lake.open(lk.uri), ["before", versions, versions["episodes"], moment])):
        for when in ways:
            cut = again.at(when)
            assert (assert_whole(cut), cut.forgotten) == (2, 1), when
            assert rest(cut, episode_id) == expected
        assert (assert_whole(again.at("after")), again.at("after").forgotten) == (3, 0)
        assert again.snapshot().forgotten == 0
    lk.forget([id_of(lk, "a"), id_of(lk, "later")])
    cut = lake.open(lk.uri).at("before")
    assert (assert_whole(cut), cut.forgotten) == (1, 2), "of the third there was nothing in it"
    assert cut.sql("SELECT task_id FROM episodes").rows() == [("b",)]
    verdicts = examine(lk)
    assert verdicts.filter(pl.col("verdict") == "wrong").is_empty()
    assert "before: 2 of 3 episodes" in verdicts.filter(pl.col("check") == "named snapshots are readable")["detail"][0]


def test_files_that_compaction_replaced_keep_their_rest_for_the_snapshots_that_need_them(tmp_path: Path) -> None:
    """Vacuum keeps what is read in their place as well, for as long as the snapshot is named."""
    clock = MovingClock()
    lk = small(tmp_path / "lake", clock=clock)
    episode_id = id_of(lk)
    lk.name_snapshot("scattered")
    for name in ("episodes", "steps", "tokens", "blobs"):
        lk.compact(name)
    lk.name_snapshot("compacted")
    expected = rest(lk.at("scattered"), episode_id)
    lk.forget([episode_id])
    assert holders(lk) == set()
    clock.forward(days=40)
    lk.vacuum()
    for name in ("scattered", "compacted"):
        cut = lake.open(lk.uri).at(name)
        assert (assert_whole(cut), cut.forgotten) == (2, 1)
        assert rest(cut, episode_id) == expected
    for name in ("scattered", "compacted"):
        lk.drop_snapshot(name)
    assert sum(table.deleted_files for table in lk.vacuum()) > 0


def test_a_predecessor_does_not_come_back_in_an_earlier_snapshot(tmp_path: Path) -> None:
    """Its retraction was accepted by the retry's row, which is gone there too."""
    lk = empty_lake(tmp_path / "lake")
    lk.append([episode("a"), secret(attempt=0)], run_id="run")
    lk.append([secret(attempt=1)], run_id="run")
    retry = int(lk.scan("episodes").filter(task_id=SECRET).collect()["episode_id"].item())
    lk.name_snapshot("before")
    lk.forget([retry])
    cut = lake.open(lk.uri).at("before")
    assert cut.scan("episodes").collect()["task_id"].to_list() == ["a"]
    assert (assert_whole(cut), cut.forgotten) == (1, 1)


def test_a_predecessor_stays_retracted_when_its_retry_is_forgotten(tmp_path: Path) -> None:
    """The retraction came with the retry's write attempt, and outlives it."""
    lk = empty_lake(tmp_path / "lake")
    lk.append([episode("a"), secret(attempt=0)], run_id="run")
    lk.append([secret(attempt=1)], run_id="run")
    lk.forget(lk.scan("episodes").filter(pl.col("task_id") == SECRET).collect()["episode_id"].to_list())
    assert lk.scan("episodes").collect()["task_id"].to_list() == ["a"]
    assert assert_whole(lk.snapshot()) == 1
    assert lake.open(lk.uri).append([secret(attempt=1)], run_id="run").rejected == 1


def test_several_at_once_and_again(tmp_path: Path) -> None:
    lk = small(tmp_path / "lake")
    first, second = id_of(lk, "a"), id_of(lk)
    assert lk.forget([first, second, second]).episodes == 2
    assert lk.scan("episodes").collect()["task_id"].to_list() == ["b"]
    again = lk.forget([first, second])
    assert (sum(again.rows.values()), again.deleted_files) == (0, 0)
    with pytest.raises(UsageError, match="holds no episode"):
        lk.forget([first, 1])


# ---------------------------------------------------------------- killed, and next to writers


def dying(call: Callable[..., Any], countdown: list[int]) -> Callable[..., Any]:
    def act(*args: Any, **options: Any) -> Any:
        if not countdown[0]:
            raise KilledError
        countdown[0] -= 1
        return call(*args, **options)

    return act


@pytest.mark.parametrize("commits", mostly_slow(range(9), 5))
def test_killed_between_any_two_commits_and_run_again(
    tmp_path: Path, commits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lk = small(tmp_path / "lake")
    episode_id = id_of(lk)
    lk.name_snapshot("before")
    expected = rest(lk.snapshot(), episode_id)
    countdown = [commits]
    with monkeypatch.context() as patch:
        patch.setattr(lk._store, "_commit", dying(lk._store._commit, countdown))
        # Not even the terminal row of the job that dies is written.
        with pytest.raises(KilledError):
            lk.forget([episode_id])
    assert countdown == [0]
    again = lake.open(lk.uri)
    assert rest(again.snapshot(), episode_id) == expected
    assert rest(again.at("before"), episode_id) == expected
    again.forget([episode_id])
    assert holders(again) == set()
    assert rest(again.at("before"), episode_id) == expected
    assert rest(again.snapshot(), episode_id) == expected
    assert assert_whole(again.snapshot()) == 2
    assert lake.open(lk.uri).append([secret()], run_id="run").rejected == 1


@pytest.mark.parametrize("deletions", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 2))])
def test_killed_between_two_deletions_and_run_again(
    tmp_path: Path, deletions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lk = small(tmp_path / "lake")
    episode_id = id_of(lk)
    lk.name_snapshot("before")
    expected = rest(lk.at("before"), episode_id)
    with monkeypatch.context() as patch:
        patch.setattr(lk._store.objects, "delete", dying(lk._store.objects.delete, [deletions]))
        with pytest.raises(KilledError):
            lk.forget([episode_id])
    assert holders(lk)
    assert rest(lk.at("before"), episode_id) == expected
    lake.open(lk.uri).forget([episode_id])
    assert holders(lk) == set()
    assert rest(lk.at("before"), episode_id) == expected


@pytest.mark.parametrize("moving", mostly_slow(RESOLUTION_ORDER, "episodes"))
def test_a_snapshot_resolved_while_it_is_being_erased_is_whole(
    tmp_path: Path, moving: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows are gone from all tables, and no file is deleted yet, when the reader comes to one of the tables."""
    lk = small(tmp_path / "lake")
    number = id_of(lk)
    before = datetime.now(UTC)
    began: list[bool] = []
    resolve = lk._store.read_log

    def erased_meanwhile(name: str, version: int | None = None) -> object:
        if name == moving and not began:
            began.append(True)
            with monkeypatch.context() as patch:
                patch.setattr(removal, "_replace_files", dying(removal._replace_files, [0]))
                with pytest.raises(KilledError):
                    lake.open(tmp_path / "lake").forget([number])
        return resolve(name, version)

    with monkeypatch.context() as patch:
        patch.setattr(lk._store, "read_log", erased_meanwhile)
        snapshot = lk.snapshot()
    # An earlier moment takes `episodes` as it was, and `steps` as it is: they must not disagree either.
    for reader in (snapshot, lk.at(before)):
        assert assert_whole(reader) == 2
        assert set(reader.scan("tokens").collect()["episode_id"]) == set(
            reader.scan("episodes").collect()["episode_id"]
        )
        assert reader.sql("FROM steps")["episode_id"].n_unique() == 2


def test_a_writer_that_was_about_to_bring_it_gives_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its children are committed; another process brings the same episode and forgets it; then it continues."""
    lk, second = empty_lake(tmp_path / "lake"), lake.open(tmp_path / "lake")
    commit = lk._store.append_episodes

    def meanwhile(*args: Any, **options: Any) -> None:
        monkeypatch.undo()
        second.append([secret()], run_id="run")
        second.forget([id_of(second)])
        assert holders(second) <= {"episodes"}, "a file that no commit names yet"
        commit(*args, **options)

    monkeypatch.setattr(lk._store, "append_episodes", meanwhile)
    counts = lk.append([episode("a", tokens=True, extra=SHARED), secret()], run_id="run")
    assert (counts.new, counts.rejected) == (1, 1)
    assert lk.scan("episodes").collect()["task_id"].to_list() == ["a"]
    assert assert_whole(lk.snapshot()) == 1
    assert holders(lk) <= {"episodes", "rejects"}
    assert lk.scan("blobs").collect()["payload"].to_list() == [b"y" * 70_000]


@pytest.mark.slow("A payload that went with an erased episode is written again by whoever has it, in one process.")
@pytest.mark.parametrize("during", [True, False], ids=["during its write", "between two writes"])
def test_a_payload_that_went_with_an_erased_episode_is_there_for_those_who_write_it_again(
    tmp_path: Path, during: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lk, second = empty_lake(tmp_path / "lake"), lake.open(tmp_path / "lake")
    lk.append([secret()], run_id="run")
    commit = lk._store.append_episodes

    def meanwhile(*args: Any, **options: Any) -> None:
        monkeypatch.undo()
        second.forget([id_of(second)])
        assert holders(second) == set()
        commit(*args, **options)

    if during:
        monkeypatch.setattr(lk._store, "append_episodes", meanwhile)
    else:
        second.forget([id_of(second)])
    assert lk.append([episode("a", tokens=True, extra=SHARED)], run_id="run").new == 1
    assert assert_whole(lk.snapshot()) == 1
    assert lk.scan("blobs").collect()["payload"].to_list() == [b"y" * 70_000]


def test_a_payload_that_a_writer_is_about_to_refer_to_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its children are committed after `episodes` was rewritten, its episode after the payloads were looked at."""
    lk, second = empty_lake(tmp_path / "lake"), lake.open(tmp_path / "lake")
    lk.append([secret()], run_id="run")
    erase, commit = removal._erase_blobs, lk._store.append_episodes
    used = []

    def wait_for_forget(*args: Any) -> pl.DataFrame:
        def goes_on(*ours: Any, **options: Any) -> None:
            monkeypatch.undo()
            used.append(erase(*args))
            commit(*ours, **options)

        monkeypatch.setattr(lk._store, "append_episodes", goes_on)
        assert lk.append([episode("a", tokens=True, extra=SHARED)], run_id="run").new == 1
        return used[0]

    monkeypatch.setattr(removal, "_erase_blobs", wait_for_forget)
    second.forget([id_of(second)])
    assert assert_whole(lk.snapshot()) == 1
    assert lk.scan("blobs").collect()["payload"].to_list() == [b"y" * 70_000]
    assert holders(lk) == set()


def test_beside_a_writer_nothing_is_lost_and_nothing_comes_back(tmp_path: Path) -> None:
    lk = small(tmp_path / "lake")
    ended, errors = threading.Event(), []

    def write() -> None:
        try:
            mine = lake.open(lk.uri)
            for index in range(3):
                mine.append([secret(), episode("c", index, tokens=True)], run_id="run")
        except BaseException as error:
            errors.append(error)
        ended.set()

    thread = threading.Thread(target=write)
    thread.start()
    lk.forget([id_of(lk)])
    while not ended.is_set():
        assert_whole(lk.snapshot())
    thread.join()
    assert errors == []
    assert assert_whole(lk.snapshot()) == 2 + 3
    assert SECRET not in set(lk.scan("episodes").collect()["task_id"])
