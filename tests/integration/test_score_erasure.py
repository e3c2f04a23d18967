"""`trajlake forget` and the judges' answers: what concerned the episode goes, also where it stands for its siblings."""

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import lake
from lake import Lake, ids
from lake.care import removal
from pipelines.score.rows import make_response_rows, read_answers
from testkit.copies import copied
from testkit.examples import mostly_slow
from testkit.score_lakes import conversations

AT = datetime(2026, 1, 1, tzinfo=UTC)
SECRET = "xylograph"


class KilledError(Exception):
    """Stands for the death of a process."""


def answered(lk: Lake, *requests: tuple[int, str, list[int]], fail: bool = False) -> None:
    """One job with the answers to some requests: number, text, episodes."""
    frames = [
        make_response_rows([{"request_id": ids.to_text(number), "answer": text, "model": "m"}], episodes, AT)
        for number, text, episodes in requests
    ]
    with lk.job(kind="score") as job:
        job.write("responses", pl.concat(frames))
        if fail:
            raise KilledError


def holders(lk: Lake) -> set[str]:
    """Files below the lake that hold the secret."""
    files = Path(lk.uri).rglob("*.parquet")
    return {path.parent.name for path in files if SECRET in str(pl.read_parquet(path).to_dicts())}


def read_stored_answers(lk: Lake) -> list[tuple[int, int, str]]:
    columns = lk.scan("responses").select("request_id", "episode_id", "answer").collect()
    return sorted(columns.rows())


@pytest.fixture
def lk(tmp_path: Path) -> Lake:
    """Episodes e0 (to be forgotten), e1, e2; answers alone and together, compacted, dead, and in old versions."""
    return copied("answers", answers, tmp_path / "lake")


def answers(folder: Path) -> None:
    lk = conversations(folder, 1, 3)
    e0, e1, e2 = episodes(lk)
    answered(lk, (1, f"{SECRET} alone", [e0]), (2, f"{SECRET} of two", [e0, e1]), (3, "of others", [e1, e2]))
    answered(lk, (2, f"{SECRET} of two", [e1]), (4, "alone", [e2]))
    lk.compact("responses")
    answered(lk, (5, f"{SECRET} of all", [e0, e1, e2]))
    answered(lk, (5, f"{SECRET} of all", [e2]))
    with pytest.raises(KilledError):
        answered(lk, (6, f"{SECRET} in a job that failed", [e0, e2]), fail=True)


def episodes(lk: Lake) -> list[int]:
    return lk.sql("SELECT episode_id FROM episodes ORDER BY rollout_index")["episode_id"].to_list()


def test_answers_that_concerned_it_go_with_all_their_rows(lk: Lake) -> None:
    e0, e1, e2 = episodes(lk)
    assert holders(lk) == {"responses"}
    assert len(read_stored_answers(lk)) == 1 + 2 + 2 + 1 + 3
    done = lk.forget([e0])
    assert holders(lk) == set()
    assert read_stored_answers(lk) == sorted([(3, e1, "of others"), (3, e2, "of others"), (4, e2, "alone")])
    # Live rows, written twice where the same answer was stored twice, dead ones too.
    assert done.rows["responses"] == 1 + 2 + 1 + 3 + 1 + 2
    assert done.unreadable == []
    answered(lk, (7, "later", [e1]))
    assert sum(lk.forget([e0]).rows.values()) == 0


def test_an_episode_without_answers_takes_none_with_it(lk: Lake) -> None:
    *_, e2 = episodes(lk)
    with lk.job(kind="score"):
        pass
    other_turns = conversations(Path(lk.uri).parent / "other", 1, 2)
    first, second = episodes(other_turns)
    answered(other_turns, (1, "a", [second]))
    other_turns.forget([first])
    assert read_stored_answers(other_turns) == [(1, second, "a")]
    assert e2 in episodes(lk)


def dying(call: Callable[..., Any], countdown: list[int]) -> Callable[..., Any]:
    def act(*args: Any, **options: Any) -> Any:
        if not countdown[0]:
            raise KilledError
        countdown[0] -= 1
        return call(*args, **options)

    return act


def vacuumed(lk: Lake) -> None:
    """What a vacuum leaves, long after: no file that is not live."""
    live = {entry.name for entry in lk.snapshot().entries("responses")}
    for path in (Path(lk.uri) / "responses").glob("*.parquet"):
        if path.name not in live:
            path.unlink()


USUAL = ((6, True), (10, False))
"""A commit in the middle, the last one; and whether a vacuum comes in between."""


@pytest.mark.parametrize(
    ("commits", "late"),
    [
        pytest.param(commits, late, marks=[] if (commits, late) in USUAL else pytest.mark.slow)
        for commits in range(2, 11)
        for late in (False, True)
    ],
)
def test_killed_between_any_two_commits_and_run_again(
    lk: Lake, commits: int, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    e0, e1, e2 = episodes(lk)
    with monkeypatch.context() as patch:
        patch.setattr(lk._store, "_commit", dying(lk._store._commit, [commits]))
        with pytest.raises(KilledError):
            lk.forget([e0])
    again = lake.open(lk.uri)
    if late:
        vacuumed(again)
    again.forget([e0])
    assert holders(again) == set()
    assert read_stored_answers(again) == sorted([(3, e1, "of others"), (3, e2, "of others"), (4, e2, "alone")])


@pytest.mark.parametrize("deletions", mostly_slow(range(6), 3))
def test_killed_between_two_deletions_and_run_again(lk: Lake, deletions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    e0, *_ = episodes(lk)
    with monkeypatch.context() as patch:
        patch.setattr(lk._store.objects, "delete", dying(lk._store.objects.delete, [deletions]))
        with pytest.raises(KilledError):
            lk.forget([e0])
    assert holders(lk)
    lake.open(lk.uri).forget([e0])
    assert holders(lk) == set()


def test_files_that_tell_what_is_doomed_go_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of writers that were killed before their commit: only one names the episode, and it is listed first."""
    lk = conversations(tmp_path / "lake", 1, 2)
    e0, e1 = episodes(lk)
    folder = tmp_path / "lake" / "responses"
    folder.mkdir()
    for name, concerned in (("a", [e0, e1]), ("b", [e1])):
        rows = make_response_rows([{"request_id": ids.to_text(1), "answer": SECRET, "model": "m"}], concerned, AT)
        rows.with_columns(job_id=pl.lit(1, pl.Int64), write_id=pl.lit(2, pl.Int64)).write_parquet(
            folder / f"{name}.parquet"
        )
    listed, delete = lk._store.objects.list, lk._store.objects.delete
    deleted: list[str] = []

    def one_alone(paths: list[str]) -> None:
        if deleted:
            raise KilledError
        deleted.extend(paths)
        delete(paths)

    with monkeypatch.context() as patch:
        patch.setattr(lk._store.objects, "list", lambda *a, **b: sorted(listed(*a, **b), key=lambda file: file.path))
        patch.setattr(lk._store.objects, "delete", lambda paths: "responses" in paths[0] and one_alone(paths))
        with pytest.raises(KilledError):
            lk.forget([e0])
    assert deleted == ["responses/b.parquet"]
    lake.open(lk.uri).forget([e0])
    assert holders(lk) == set()


def test_a_file_that_cannot_be_read_is_reported_once(lk: Lake) -> None:
    (Path(lk.uri) / "responses" / "half.parquet").write_bytes(b"PAR1 and then nothing")
    assert lk.forget(episodes(lk)[:1]).unreadable == ["responses/half.parquet"]


def test_answers_are_known_by_the_episodes_they_concern(lk: Lake) -> None:
    e0, e1, e2 = episodes(lk)
    answers = read_answers(lk.snapshot(), pl.Series("episode_id", [e1, e2]))
    requests_of_first = {ids.from_text(request): answer for request, answer in answers[e1].items()}
    assert requests_of_first == {2: f"{SECRET} of two", 3: "of others", 5: f"{SECRET} of all"}
    assert set(answers) == {e1, e2}
    assert set(read_answers(lk.snapshot(), pl.Series("episode_id", [e0]))) == {e0}


def test_rows_are_made_of_answers_and_of_nothing_else() -> None:
    good = {"request_id": ids.to_text(9), "answer": "a", "model": "m", "prompt_tokens": 3, "completion_tokens": -1}
    rows = make_response_rows([good], [11, 12], AT).to_dicts()
    assert [(row["request_id"], row["episode_id"], row["answer"]) for row in rows] == [(9, 11, "a"), (9, 12, "a")]
    assert (rows[0]["prompt_tokens"], rows[0]["completion_tokens"], rows[0]["at"]) == (3, None, AT)
    assert make_response_rows([good | {"about": [1]}], [11, 12], AT)["episode_id"].to_list() == [12]
    odd: list[dict[str, Any]] = [{}, good | {"request_id": 9}, good | {"request_id": "x"}, good | {"answer": None}]
    odd += [good | {"about": [2, -1, "0", None, 0.0]}]
    assert make_response_rows(odd, [11, 12], AT).is_empty()


def test_nothing_else_of_erasure_changed() -> None:
    """The doomed rows of other tables are reported by nothing but themselves."""
    episode_ids = pl.Series("episode_id", [1], dtype=pl.Int64)
    assert removal._remove_episodes("scores", episode_ids).identifies is None
    assert removal._remove_answers(pl.Series([2]), episode_ids).identifies is not None
