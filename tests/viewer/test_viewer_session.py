"""What a browser session reads: one snapshot, shared by threads, answered once per question and version."""

import gc
import shutil
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import polars as pl
import pytest

import lake
from lake import Lake
from lake.errors import QueryError, UsageError
from lake.read.column_cache import ColumnCache
from lake.write.scores import Annotation, annotate
from testkit.lakes import RUN, add_credit, build_lake, rollout
from viewer import session
from viewer.navigation import Page, href
from viewer.queries import LakeReader, bin_spans, runs
from viewer.reader import AnswerCache, Reader, ViewedLake
from viewer.server import ENVIRONMENT


@pytest.fixture
def lk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lake]:
    """A lake that this process shows, as one session."""
    lk = build_lake(tmp_path, [rollout("a", 0, 1.0)])
    monkeypatch.setenv(ENVIRONMENT, lk.uri)
    session.refresh()
    yield lk
    session.refresh()


def add(lk: Lake, task: str) -> None:
    with lk.job(kind="collect", run_id=RUN) as job:
        job.record([rollout(task, 0, 0.0)])


asked: list[str] = []


def tasks(reader: LakeReader, prefix: str = "") -> list[str]:
    """A query that counts how often it is asked."""
    asked.append(prefix)
    query = "SELECT DISTINCT task_id FROM episodes WHERE starts_with(task_id, $prefix) ORDER BY task_id"
    return reader.sql(query, {"prefix": prefix})["task_id"].to_list()


def steps_of_all(reader: LakeReader) -> int:
    return int(reader.sql("SELECT count(*) FROM steps").item())


def test_a_question_is_answered_once_per_version(lk: Lake) -> None:
    asked.clear()
    assert [session.read(tasks), session.read(tasks), session.read(tasks, "b"), session.read(tasks, prefix="b")] == [
        ["a"],
        ["a"],
        [],
        [],
    ]
    assert asked == ["", "b", "b"], "arguments by position and by name are other questions, equal ones are not"
    add(lk, "b")
    assert session.read(tasks) == ["a"], "still the old versions"
    session.refresh()
    assert session.read(tasks) == ["a", "b"]
    assert asked == ["", "b", "b", ""]


def test_an_answer_that_a_page_changes_is_not_changed_for_others(lk: Lake) -> None:
    session.read(tasks).append("mine")
    assert session.read(tasks) == ["a"]
    frame = session.read(runs.read_page, 1.0, runs.ListWindow())
    frame[0, "run_id"] = "mine"
    assert session.read(runs.read_page, 1.0, runs.ListWindow())["run_id"].to_list() == [RUN]


def test_a_failed_read_is_not_remembered(lk: Lake) -> None:
    broken = [True]

    def once(lake: LakeReader) -> int:
        return int(lake.sql("SELECT nonsense" if broken[0] else "SELECT 7").item())

    with pytest.raises(QueryError):
        session.read(once)
    broken[0] = False
    assert session.read(once) == 7


def test_the_versions_are_those_of_a_snapshot(lk: Lake) -> None:
    assert dict(session.get_session().versions) == lk.snapshot().versions
    before = session.get_session().pinned_at
    session.refresh()
    assert session.get_session().pinned_at > before


def test_an_older_state_is_shown_until_the_newest_is_asked_for(lk: Lake) -> None:
    lk.name_snapshot("before")
    add(lk, "b")
    session.refresh()
    session.pin("before")
    assert (session.read(tasks), session.get_older_state()) == (["a"], "before")
    assert parse_qs(urlsplit(href(Page.JOBS)).query) == {"as_of": ["before"]}, "links lead to the same state"
    with pytest.raises(UsageError, match="nowhere"):
        session.pin("nowhere")
    assert (session.read(tasks), session.get_older_state()) == (["a"], "before"), "what was shown is shown"
    session.refresh()
    assert (session.read(tasks), session.get_older_state()) == (["a", "b"], None)
    assert href(Page.JOBS) == "/jobs"


def test_newer_episodes_are_counted_and_not_shown_before_they_are_asked_for(lk: Lake) -> None:
    assert session.read(tasks) == ["a"]
    assert session.get_session().describe_newer_data() is None
    add(lk, "b")
    add(lk, "c")
    assert (session.get_session().describe_newer_data(), session.read(tasks)) == ("2 new episodes", ["a"])
    session.refresh()
    assert (session.get_session().describe_newer_data(), session.read(tasks)) == (None, ["a", "b", "c"])


def test_whatever_a_page_would_show_otherwise_is_news(lk: Lake) -> None:
    """More episodes that were taken back than added hide none; without new ones, all else that differs is named."""

    def read_anew() -> None:
        session.refresh()
        assert session.get_session().describe_newer_data() is None

    add(lk, "b")
    add(lk, "c")
    read_anew()
    a, b, c = lk.sql("SELECT episode_id FROM episodes ORDER BY task_id")["episode_id"]
    add(lk, "d")
    lk.retract([a, b])
    assert session.get_session().describe_newer_data() == "1 new episode"
    read_anew()
    lk.retract([c])
    assert session.get_session().describe_newer_data() == "1 episode taken back"
    read_anew()
    annotate(lk, [Annotation(episode_id=lk.sql("SELECT episode_id FROM episodes").item(), label="ok", text="x")], "ann")
    assert session.get_session().describe_newer_data() == "newer annotations"
    add_credit(lk, singleton="raw")
    assert session.get_session().describe_newer_data() == "newer credit, newer annotations"
    read_anew()
    lk.compact("annotations")
    with lk.job(kind="check"):
        pass
    assert session.get_session().describe_newer_data() is None, "no page shows anything else"


def test_a_lake_is_opened_once_for_all_pages_until_it_is_read_anew(lk: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    opening = lake.open

    def counting(folder: str) -> Lake:
        opened.append(folder)
        return opening(folder)

    monkeypatch.setattr(lake, "open", counting)
    for _ in range(3):  # what every page asks for
        assert (
            session.read(tasks),
            session.get_session().describe_newer_data(),
            session.get_session().is_outdated(),
        ) == (
            ["a"],
            None,
            False,
        )
    assert opened == [lk.uri]
    shutil.rmtree(lk.uri)
    add(build_lake(Path(lk.uri), [rollout("made", 0, 1.0)]), "anew")
    session.refresh()
    assert session.read(tasks) == ["anew", "made"]


def test_a_lake_that_was_made_anew_with_the_same_versions_is_another(lk: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ViewedLake, "era_seconds", (0.0, 0.0))
    assert session.read(tasks) == ["a"]
    name, before = session.get_session().name_versions(), session.get_session().versions
    shutil.rmtree(lk.uri)
    assert lake.open(build_lake(Path(lk.uri), [rollout("b", 0, 1.0)]).uri).snapshot().versions == dict(before)
    assert session.get_viewed_lake().find_reader(name) is None
    assert session.read(tasks) == ["b"], "in a session that stays open"


def test_what_was_forgotten_is_gone_from_older_states_and_from_memory(
    lk: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ViewedLake, "era_seconds", (0.0, 0.0))
    add(lk, "b")
    lk.name_snapshot("before")
    session.pin("before")
    assert session.read(tasks) == ["a", "b"]
    reader = weakref.ref(session.get_session().reader)
    lk.forget(lk.sql("SELECT episode_id FROM episodes WHERE task_id = 'a'")["episode_id"], reason="asked")
    for _ in range(2):  # in the same session, then in a new one
        assert (session.read(tasks), session.get_older_state()) == (["b"], "before")
        assert session.read(steps_of_all) == lk.at("before").sql("SELECT count(*) FROM steps").item()
        session.refresh()
        session.pin("before")
    gc.collect()
    assert reader() is None


def test_two_lakes_in_one_process_do_not_mix(lk: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert session.read(tasks) == ["a"]
    other = build_lake(tmp_path / "other", [rollout("z", 0, 1.0)])
    monkeypatch.setenv(ENVIRONMENT, other.uri)
    session.refresh()
    assert session.read(tasks) == ["z"]


def test_without_a_lake_the_way_to_name_one_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    with pytest.raises(UsageError, match="trajlake view --lake"):
        session.get_viewed_lake()


def test_sessions_that_ask_at_the_same_time_get_their_own_answers(tmp_path: Path) -> None:
    """One DuckDB connection, many browser tabs."""
    reader = Reader(build_lake(tmp_path).snapshot())
    gate = threading.Barrier(8)

    def ask(thread: int) -> list[int]:
        gate.wait()
        query = "SELECT $thread * 1000 + count(*) AS n FROM episodes WHERE rollout_index >= $least"
        return [int(reader.sql(query, {"thread": thread, "least": n % 4}).item()) for n in range(20)]

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(8)))
    assert answers == [[thread * 1000 + 24 - 6 * (n % 4) for n in range(20)] for thread in range(8)]


class Slow:
    """Stands for a snapshot whose first query takes until someone else has an answer."""

    objects = None

    def __init__(self) -> None:
        self.versions: dict[str, int] = {}
        self.answered = threading.Event()
        self.began = threading.Event()

    def session(self, **_: object) -> "Slow":
        return self

    def query(self, query: str, _: object) -> pl.DataFrame:
        if query == "slow":
            self.began.set()
            assert self.answered.wait(60)
        return pl.DataFrame({"episode_id": [query]})


@pytest.mark.parametrize("what", ["query", "search"])
def test_no_session_waits_for_what_another_asks(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow()
    monkeypatch.setattr("viewer.reader.search_episodes", lambda _snapshot, text, _report: slow.query(text, None))
    # The search of ids finds what the search of texts has found.
    monkeypatch.setattr("viewer.reader.find_named_episodes", lambda reader, text: reader.sql(text))
    reader = Reader(slow)  # type: ignore[arg-type]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(reader.sql if what == "query" else reader.holding, "slow")
        assert slow.began.wait(60)
        assert reader.sql("quick").item() == "quick"
        slow.answered.set()
        assert waiting.result().item() == "slow"


def test_a_search_is_answered_once_and_again_after_a_refresh(lk: Lake) -> None:
    told: list[int] = []
    session.get_session().reader.holding("gate", lambda done, _of: told.append(done))
    assert told
    told.clear()
    session.get_session().reader.holding("gate", lambda done, _of: told.append(done))
    assert told == []
    add(lk, "b")
    session.refresh()
    session.get_session().reader.holding("gate", lambda done, _of: told.append(done))
    assert told


def test_a_query_within_a_query_is_answered_once_too(lk: Lake) -> None:
    asked.clear()
    reader = session.get_session().reader

    def count_tasks(lake: LakeReader) -> int:
        return len(lake.read(tasks))

    assert (session.read(count_tasks), reader.read(tasks), asked) == (1, ["a"], [""])


def test_threads_with_one_question_wait_for_one_answer() -> None:
    answers, began, waited = AnswerCache(), threading.Event(), threading.Event()
    computed: list[int] = []

    def compute() -> int:
        computed.append(len(computed))
        began.set()
        assert waited.wait(60)
        return computed[-1]

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(answers.get, "question", compute)
        assert began.wait(60)
        second = threads.submit(answers.get, "question", compute)
        waited.set()
        assert (first.result(), second.result(), computed) == (0, 0, [0])


def test_answers_outlive_commits_of_what_they_do_not_read_and_no_others(
    lk: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions = (
        "SELECT count(*) FROM episodes",
        "SELECT count(*), sum(value) FROM scores",
        "SELECT count(*) FROM steps",
        "SELECT count(*), min(status) FROM job_runs",
        "SELECT sum(value) FROM current_scores JOIN episodes USING (episode_id)",
        "SELECT count(*) FROM retractions",
    )
    asked: list[str] = []
    whole = Reader._run
    monkeypatch.setattr(Reader, "_run", lambda self, query, params: asked.append(query) or whole(self, query, params))
    columns, answers = ColumnCache(lk.snapshot().objects), AnswerCache()

    def again() -> set[int]:
        """Which questions are asked of the lake again; all answers are the newest."""
        asked.clear()
        snapshot = lk.snapshot()
        reader = Reader(snapshot, columns, answers)
        for question in questions:
            assert reader.sql(question).equals(snapshot.sql(question)), question
        return {questions.index(question) for question in asked}

    assert again() == set(range(6))
    assert again() == set()
    add(lk, "b")
    assert again() == {0, 2, 3, 4}
    rows = lk.sql("SELECT run_id, group_id, episode_id FROM episodes")
    named = {"scorer": pl.lit("judge"), "scorer_version": pl.lit("1"), "step_index": pl.lit(None, pl.Int32)}
    with lk.job(kind="score") as job:
        job.write("scores", rows.with_columns(value=pl.lit(0.5), **named))
    assert again() == {1, 3, 4}
    lk.retract(rows["episode_id"].head(1), reason="wrong")
    assert again() >= {0, 1, 2, 4, 5}, "hidden rows are in the same files"
    lk.forget(rows["episode_id"].head(1), reason="asked")
    again()


def test_a_long_axis_is_cut_into_spans() -> None:
    frame = pl.DataFrame({"x": [3, 4, 7, 12], "value": [1, 2, 3, 4]})
    assert bin_spans(frame, 100).equals(frame.with_columns(last=pl.col("x")))
    assert bin_spans(frame, 5).select("x", "last").rows() == [(3, 4), (3, 4), (7, 8), (11, 12)]
    assert bin_spans(frame.clear(), 5).is_empty()


def test_a_reader_takes_one_select_and_nothing_else(tmp_path: Path) -> None:
    reader = Reader(build_lake(tmp_path).snapshot())
    for query in ("DELETE FROM episodes", "SELECT 1; SELECT 2", "COPY episodes TO 'x.csv'", "ATTACH 'x.db'"):
        with pytest.raises(QueryError):
            reader.sql(query)
    assert reader.sql("SELECT count(*) FROM episodes").item() == 24


def test_many_sessions_name_their_versions_at_once(lk: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that forget the oldest name do not get in each other's way."""
    viewed = ViewedLake(lk.uri)
    monkeypatch.setattr(ViewedLake, "get_reader", lambda _, versions: versions)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def name_many(first: int) -> None:
        for version in range(first, first + 1000):
            viewed.name_versions((("episodes", version),))

    try:
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(name_many, range(0, 80_000, 10_000)))
    finally:
        sys.setswitchinterval(interval)
    newest = (("episodes", -1),)
    assert viewed.find_reader(viewed.name_versions(newest)) == newest


def test_the_last_answers_are_cached_up_to_a_number_of_bytes() -> None:
    """An answer above a quarter of the limit would evict too many others."""
    answers = AnswerCache(4000)
    frames = [pl.DataFrame({"n": pl.int_range(100, eager=True)}) for _ in range(6)]  # 800 bytes each
    for number, frame in enumerate(frames):
        answers.get(number, lambda frame=frame: frame)  # type: ignore[misc]
    assert [number in answers for number in range(6)] == [False, True, True, True, True, True]
    answers.get("large", lambda: "x" * 1001)
    assert "large" not in answers
