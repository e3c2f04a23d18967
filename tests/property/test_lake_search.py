"""Full-text search against a loop over texts; and an index that is cut short, shared, outdated, damaged, forgotten."""

import random
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import lake
from lake import Lake, search
from lake.errors import LakeAccessError, SearchIndexError
from lake.records import EpisodeRecord, StepRecord
from lake.search import Index, search_episodes
from lake.storage.local_cache import CACHE_VARIABLE
from lake.storage.locks import hold_file_lock
from lake.write.ingest import ingest
from lake.write.scores import Annotation, annotate
from testkit.copies import copied
from testkit.examples import examples
from testkit.lakes import build_lake
from testkit.shared import shared_data

CODEC = pa.Codec("zstd")

RUN = "search"
PARTS = ["key", "Keys", "gold_key", "ключ", "鍵", "straße", "x1", "x12", "a", '"', "{", "...", "-", "\n", "\t ", "\\n"]
QUERIES = ["key", "KEYS", "ke", "ключ", "鍵", "x1", "a", "ОЧ", "raß", '"key key"', '"gold_key x1"', "key-", '"x12 a"']


def episode(task: str, *texts: str, index: int = 0) -> EpisodeRecord:
    """A step for each text: in its state, or in a call's arguments, or in a message, in turns."""
    steps = []
    for number, text in enumerate(texts):
        step = StepRecord(state="", action="look")
        if number % 3 == 0:
            step.state = text
        elif number % 3 == 1:
            step.tool_calls = [{"id": "zz", "type": "function", "function": {"name": "use", "arguments": text}}]
        else:
            step.context = [{"role": "tool", "content": [{"type": "text", "text": text}]}]
        steps.append(step)
    return EpisodeRecord(task_id=task, rollout_index=index, env_return=0.0, steps=steps)


def add(lk: Lake, *episodes: EpisodeRecord) -> None:
    with lk.job(kind="collect", run_id=RUN) as job:
        job.record(list(episodes))


def tasks(lk: Lake, text: str) -> list[str]:
    """Tasks of the episodes that hold a text, through the one function that readers use; None of a hidden episode."""
    names = lk.sql("SELECT episode_id, task_id FROM episodes")
    return search_episodes(lk.snapshot(), text).join(names, on="episode_id", how="left")["task_id"].sort().to_list()


def vocabulary(path: Path) -> set[str]:
    """All words of an index."""
    query = "SELECT numbers, data FROM arrays WHERE name = 'vocabulary'"
    with closing(sqlite3.connect(path)) as connection:
        texts_held = [CODEC.decompress(data, length, asbytes=True) for length, data in connection.execute(query)]
    return set(b"".join(texts_held).decode().split())


def says(text: str, term: search.Term) -> bool:
    """Whether a text holds a term; what an escaped line break separates is two words."""
    plain = " ".join(text.lower().replace("\\n", " ").split())
    if len(term.text) == 1 and term.text.isascii():
        return term.text in plain.translate({ord(c): " " for c in '"{.-'}).split()
    return term.text in plain


@pytest.fixture
def lk(tmp_path: Path) -> Lake:
    doors = [episode("one", "a red door"), episode("two", "a green door")]
    return copied("two doors", lambda template: build_lake(template, doors, run_id=RUN), tmp_path / "lake")


@pytest.fixture(scope="module")
def texts() -> dict[str, list[str]]:
    """Task -> text of each step."""
    rng = random.Random(0)
    glue = ["", " ", " "]
    return {
        str(task): [rng.choice(glue).join(rng.choices(PARTS, k=rng.randrange(6))) for _ in range(rng.randrange(1, 5))]
        for task in range(120)
    }


@pytest.fixture(scope="module")
def many(texts: dict[str, list[str]], tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """An episode a task, of several writes."""
    lk = build_lake(tmp_path_factory.mktemp("many") / "lake", [episode("none", "nothing")], run_id=RUN)
    for first in range(0, 120, 40):
        add(lk, *(episode(task, *words_of_steps) for task, words_of_steps in list(texts.items())[first : first + 40]))
    return lk


@settings(max_examples=examples(40))
@given(st.lists(st.sampled_from(QUERIES), min_size=1, max_size=3).map(" ".join))
@example('"key x1"')
@example("old_ x")
@example('"gold_key"')
@example("key key")
@example("ключ x1")
def test_what_is_found_is_what_a_loop_over_the_texts_finds(many: Lake, texts: dict[str, list[str]], query: str) -> None:
    terms = search.parse_terms(query)
    holds = {
        task: [all(says(text, term) for term in terms) for text in words_of_steps]
        for task, words_of_steps in texts.items()
    }
    expected = [(task, steps.index(True), sum(steps)) for task, steps in holds.items() if any(steps)]
    facts = many.sql("SELECT episode_id, task_id FROM episodes")
    hits = search_episodes(many.snapshot(), query).join(facts, on="episode_id")
    assert sorted(hits.select("task_id", "step_index", "steps").iter_rows()) == sorted(expected)


@pytest.mark.parametrize(
    ("query", "terms"),
    [
        ("Red DOOR", ["red door"]),
        ('"red door', ["red door"]),
        ('one "two  three" one', ["one", "two three"]),
        ('""x', ["x"]),
        ("a.b@c", ["a.b@c"]),
    ],
)
def test_what_a_query_asks_for(query: str, terms: list[str]) -> None:
    texts_parsed = [term.text for term in search.parse_terms(query)]
    assert texts_parsed == (["red", "door"] if query == "Red DOOR" else terms)


def test_a_document_is_read_as_its_contents() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "book", "arguments": '{"seat": "12A"}'}}
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hello"}, image]}, {"tool_calls": [call]}]
    text = search.document_text(msgspec.json.encode(messages).decode())
    assert text == 'Hello\nimage_url\nurl\nbook\n{"seat": "12A"}'
    assert search.document_text("[]") is search.document_text(None) is None
    assert search.document_text("no JSON") == "no JSON"


def test_only_what_is_new_is_read(lk: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tasks(lk, "door") == ["one", "two"]
    add(lk, episode("three", "a blue door"))
    words = Index(search.index_path(lk.uri))
    assert {piece.rows for piece in words.missing(lk.snapshot())} == {1}
    positions: list[int] = []
    words.update(lk.snapshot(), lambda _done, of: positions.append(of))
    assert set(positions) == {2}, "a step and an episode"
    assert words.missing(lk.snapshot()) == []
    assert tasks(lk, "door") == ["one", "three", "two"]


def test_an_earlier_snapshot_finds_what_it_holds(lk: Lake) -> None:
    before = lk.snapshot()
    add(lk, episode("three", "a blue door"))
    assert tasks(lk, "door") == ["one", "three", "two"]
    assert search_episodes(before, "door").height == 2
    assert search_episodes(before, "blue").height == 0


def test_many_small_writes_become_one_segment(lk: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "_FEW", 3)
    for number in range(10):
        add(lk, episode(str(number), f"a door to {number}"))
        if number % 3 == 0:
            assert len(tasks(lk, "door")) == number + 3
    with closing(sqlite3.connect(search.index_path(lk.uri))) as connection:
        # Of steps and of episodes.
        assert connection.execute("SELECT count(*) FROM segments").fetchone()[0] <= 2 * 4
    assert tasks(lk, "door") == sorted(["one", "two", *map(str, range(10))])


def test_a_compacted_lake_is_searched_as_before(lk: Lake) -> None:
    add(lk, episode("three", "a blue door"))
    assert tasks(lk, "door") == ["one", "three", "two"]
    lk.compact("steps")
    assert tasks(lk, "door") == ["one", "three", "two"]


def test_whoever_stops_an_update_loses_no_segment(lk: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "SEGMENT_ROWS", 1)
    progress: list[int] = []

    def stop(done: int, of: int) -> None:
        progress.append(done)
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search_episodes(lk.snapshot(), "door", stop)
    assert progress == [0, 1, 2]
    assert len(Index(search.index_path(lk.uri)).missing(lk.snapshot())) == 2
    assert tasks(lk, "door") == ["one", "two"]


def test_several_build_it_at_once(lk: Lake) -> None:
    """Threads with one index each, as processes have."""
    for number in range(5):
        add(lk, episode(str(number), f"a door to {number}"))
    path, gate = search.index_path(lk.uri), threading.Barrier(6)

    def build(_: int) -> int:
        words = Index(path)
        gate.wait()
        words.update(lk.snapshot())
        hits = words.find(lk.snapshot(), search.parse_terms("door"))
        assert hits is not None
        return int(hits["steps"].sum())

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(build, range(6))) == [7] * 6


def test_a_process_waits_while_another_one_creates_it(tmp_path: Path) -> None:
    """SQLite waits for no lock while it changes the journal of a new file, so the second one would fail."""
    path = tmp_path / "index"
    with ThreadPoolExecutor(1) as pool:
        with hold_file_lock(tmp_path / "lock"):
            waiting = pool.submit(Index, path)
            with pytest.raises(TimeoutError):
                waiting.result(timeout=0.2)
            assert not path.exists()
        waiting.result()
    assert path.stat().st_size


def test_what_another_process_took_apart_is_put_together_again(lk: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tasks(lk, "door") == ["one", "two"]
    update, countdown = Index.update, [2]

    def and_lost(self: Index, *args: Any) -> None:
        update(self, *args)
        if countdown[0]:
            countdown[0] -= 1
            with closing(sqlite3.connect(search.index_path(lk.uri))) as connection, connection:
                connection.execute("DELETE FROM pieces")

    monkeypatch.setattr(Index, "update", and_lost)
    assert tasks(lk, "door") == ["one", "two"]
    assert countdown == [0]


def test_an_index_that_cannot_be_used_is_told(lk: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    path = search.index_path(lk.uri)
    lock = path.with_name("lock")
    lock.mkdir()
    with pytest.raises(SearchIndexError, match="TRAJLAKE_CACHE"):
        tasks(lk, "door")
    lock.rmdir()
    path.mkdir()
    with pytest.raises(SearchIndexError, match="TRAJLAKE_CACHE"):
        tasks(lk, "door")
    with pytest.raises(LakeAccessError, match=f"{path} holds texts of .*delete it yourself"):
        search.delete_index(lk.uri)


def test_a_cache_that_cannot_be_written_leaves_a_folder_of_the_process_alone(
    lk: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that others know beforehand could be theirs."""
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file"))
    assert tasks(lk, "door") == ["one", "two"]
    path = search.index_path(lk.uri)
    assert path.parent.stat().st_mode & 0o077 == 0
    assert search.index_path(lk.uri) == path, "it is searched again there"
    lk.forget(lk.sql("SELECT episode_id FROM episodes")["episode_id"])
    assert not path.exists()


def test_a_damaged_index_is_made_anew(lk: Lake) -> None:
    path = search.index_path(lk.uri)
    path.write_bytes(b"no database, and longer than its first page would be" * 100)
    assert tasks(lk, "door") == ["one", "two"]


def test_retracted_and_forgotten_episodes_are_not_found_and_leave_no_word(lk: Lake) -> None:
    assert tasks(lk, "door") == ["one", "two"]
    lost_id, other_id = lk.sql("SELECT episode_id FROM episodes ORDER BY task_id")["episode_id"]
    path = search.index_path(lk.uri)
    lk.retract([other_id], reason="wrong")
    assert tasks(lk, "door") == ["one"]
    lk.forget([lost_id])
    assert not path.exists()
    assert tasks(lk, "door") == []


def test_words_that_another_machine_forgot_go_with_the_next_search(lk: Lake, tmp_path: Path) -> None:
    assert tasks(lk, "door") == ["one", "two"]
    path = search.index_path(lk.uri)
    content = path.read_bytes()
    lk.forget([lk.sql("SELECT episode_id FROM episodes WHERE task_id = 'one'")["episode_id"].item()])
    path.write_bytes(content)  # as it would lie there
    assert tasks(lk, "door") == ["two"]
    assert "red" not in vocabulary(path)
    assert "green" in vocabulary(path)


def test_nothing_is_written_into_the_lake(lk: Lake) -> None:
    before = sorted(Path(lk.uri).rglob("*"))
    assert tasks(lk, "door") == ["one", "two"]
    assert sorted(Path(lk.uri).rglob("*")) == before
    assert search.index_path(lk.uri).stat().st_mode & 0o77 == 0


def test_calls_of_the_real_tau_bench_file_are_found(tmp_path: Path) -> None:
    lk = lake.open(tmp_path / "lake", create=True)
    ingest(lk, shared_data("tau_bench", "gpt-4o-airline.json"))
    query = "SELECT DISTINCT episode_id FROM steps WHERE contains(tool_calls, 'get_reservation_details')"
    assert set(search_episodes(lk.snapshot(), "GET_reservation_details")["episode_id"]) == set(
        lk.sql(query)["episode_id"]
    )
    assert search_episodes(lk.snapshot(), "get_reservation_details").height == 165


def test_what_was_said_is_found_as_long_as_it_counts(lk: Lake) -> None:
    rows = lk.sql("SELECT episode_id, group_id, run_id FROM episodes ORDER BY task_id")
    first, second = rows["episode_id"]

    def judge(version: str, reason: str, step: int | None) -> None:
        named = {"scorer": pl.lit("judge"), "scorer_version": pl.lit(version), "reason": pl.lit(reason)}
        step_index = pl.lit(step, pl.Int32)
        with lk.job(kind="score") as job:
            job.write("scores", rows.head(1).with_columns(value=pl.lit(0.0), step_index=step_index, **named))

    judge("1", "It GUESSED\n the lock's   code, twice", None)
    assert tasks(lk, '"guessed the lock"') == tasks(lk, "code guess") == ["one"]
    assert tasks(lk, "door guess") == [], "of two texts"
    judge("2", "It asked for the code", 0)
    assert tasks(lk, "guessed") == [], "a version that no longer counts"
    assert search_episodes(lk.snapshot(), "asked").rows() == [(first, 0, 1)]
    note = Annotation(episode_id=second, label="note", text="Asked nobody")
    annotate(lk, [note], "me")
    assert search_episodes(lk.snapshot(), "asked").select("episode_id").to_series().sort().to_list() == sorted(
        (first, second)
    )
    annotate(lk, [msgspec.structs.replace(note, text=None)], "me")
    assert tasks(lk, "nobody") == []
    assert tasks(lk, "red") == ["one"]


def test_what_should_have_been_done_is_not_found_as_if_it_had(lk: Lake) -> None:
    truth = episode("three", "a blue door")
    truth.ground_truth = {"answer": "the hatch"}
    add(lk, truth)
    assert tasks(lk, "hatch") == []
