"""The lake as it was: by time, by version of `episodes`, by name; whole no matter what the clocks said."""

import random
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest

import lake
from lake import Lake
from lake.errors import ContractError, LakeAccessError, UsageError
from lake.tables import TABLES
from testkit.copies import empty_lake
from testkit.episodes import assert_same, assert_whole, contents, episode
from testkit.examples import mostly_slow
from testkit.full_lake import advantages
from testkit.moving_clock import MovingClock


@pytest.fixture
def clock() -> MovingClock:
    return MovingClock()


@pytest.fixture
def lk(tmp_path: Path, clock: MovingClock) -> Lake:
    return empty_lake(tmp_path / "lake", clock=clock)


def days(lk: Lake, clock: MovingClock, count: int, start: int = 0) -> list[datetime]:
    """An episode a day; the noon after each."""
    noons = []
    for number in range(start, start + count):
        lk.append([episode(f"day {number}", tokens=True)], run_id="run")
        clock.forward(hours=12)
        noons.append(clock())
        clock.forward(hours=12)
    return noons


def tasks(snapshot: lake.Snapshot) -> list[str]:
    assert_whole(snapshot)
    return sorted(snapshot.scan("episodes").collect()["task_id"])


def test_a_moment_shows_what_had_been_committed_by_then(lk: Lake, clock: MovingClock) -> None:
    noons = days(lk, clock, 3)
    for count, noon in enumerate(noons, 1):
        expected = [f"day {number}" for number in range(count)]
        assert tasks(lk.at(noon)) == expected
        assert tasks(lk.at(noon.isoformat())) == expected
        assert tasks(lk.at(noon.replace(tzinfo=None))) == expected, "UTC unless it says otherwise"
        assert tasks(lk.at(noon.astimezone(timezone(timedelta(hours=9))))) == expected
    assert tasks(lk.at(clock() + timedelta(days=1000))) == tasks(lk.snapshot())
    assert lk.at(noons[0]).sql("SELECT count(*) AS n FROM steps").item() == 2


def test_a_version_of_episodes_shows_what_it_held(lk: Lake, clock: MovingClock) -> None:
    days(lk, clock, 3)
    for version in range(4):
        assert len(tasks(lk.at(version))) == version
        assert len(tasks(lk.at(str(version)))) == version


@pytest.mark.parametrize("version", [-1, 3, "3", 10**6])
def test_a_version_that_is_not_there_is_refused(lk: Lake, clock: MovingClock, version: int | str) -> None:
    days(lk, clock, 2)
    with pytest.raises(UsageError, match=f"`episodes` has no version {version}; valid: 0 to 2"):
        lk.at(version)


def test_a_name_shows_what_was_named(lk: Lake, clock: MovingClock) -> None:
    days(lk, clock, 1)
    lk.name_snapshot("first-day")
    days(lk, clock, 1, start=1)
    assert tasks(lk.at("first-day")) == ["day 0"]


@pytest.mark.parametrize("when", ["yesterday", "2026-13-01", "10:00", ""])
def test_what_is_no_time_and_no_name_is_refused(lk: Lake, when: str) -> None:
    with pytest.raises(UsageError, match=r"there is no snapshot|cannot name a snapshot"):
        lk.at(when)


def test_before_the_lake_existed_there_is_nothing_to_see(lk: Lake, clock: MovingClock) -> None:
    says = r"did not exist at 2001-01-01T00:00:00\+00:00; it was made at 20"
    for when in (datetime(2001, 1, 1, tzinfo=UTC), "2001-01-01"):
        with pytest.raises(UsageError, match=says):
            lk.at(when)


def test_judgements_are_seen_from_the_end_of_their_job(lk: Lake, clock: MovingClock) -> None:
    days(lk, clock, 1)
    with lk.job(kind="credit") as job:
        job.write("advantages", advantages(lk.scan("steps").collect()))
        clock.forward(hours=1)
        during = clock()
        clock.forward(hours=1)
    assert lk.at(during).scan("advantages").collect().is_empty()
    assert lk.at(clock()).scan("advantages").collect().height == 2


def test_retractions_are_seen_from_their_time(lk: Lake, clock: MovingClock) -> None:
    noons = days(lk, clock, 2)
    lk.append([episode("day 0", steps=1, attempt=1)], run_id="run")
    lk.retract(lk.scan("episodes").filter(task_id="day 1").collect()["episode_id"].to_list())
    for name in TABLES:
        lk.compact(name)
    now = lk.scan("episodes").collect()
    assert (now["task_id"].to_list(), now["attempt"].to_list()) == (["day 0"], [1])
    then = lk.at(noons[1]).scan("episodes").sort("task_id").collect()
    assert (then["task_id"].to_list(), then["attempt"].to_list()) == (["day 0", "day 1"], [0, 0])


def test_compaction_changes_nothing_of_the_past(lk: Lake, clock: MovingClock) -> None:
    noons = days(lk, clock, 3)
    expected = [contents(lk.at(noon)) for noon in noons]
    for name in TABLES:
        lk.compact(name)
    for noon, frames in zip(noons, expected, strict=True):
        assert_same(contents(lk.at(noon)), frames)


@pytest.mark.parametrize("seed", mostly_slow(range(2), 0))
def test_clocks_that_jump_between_commits_tear_no_episode_from_its_steps(tmp_path: Path, seed: int) -> None:
    """Every commit is dated by a clock that is up to a hundred hours off."""
    rng = random.Random(seed)

    def jumping() -> datetime:
        return datetime.now(UTC) + timedelta(hours=rng.uniform(-100, 100))

    lk = empty_lake(tmp_path / "lake", clock=jumping)
    for number in range(3):
        lk.append([episode(f"{number}.{index}", steps=3, tokens=True) for index in range(2)], run_id="run")
        lk.append([episode(f"{number}.0", steps=2, attempt=1, tokens=True)], run_id="run")
        if number == 1:
            for name in ("episodes", "steps", "tokens", "retractions"):
                lk.compact(name)
    newest = lk.snapshot().versions["episodes"]
    for version in range(newest + 1):
        assert_whole(lk.at(version))
    now = datetime.now(UTC)
    states = set()
    for hours in range(0, 121, 30):
        states.add(assert_whole(lk.at(now + timedelta(hours=hours))))
    assert assert_whole(lk.at(now + timedelta(hours=200))) == 6
    assert max(states) > 0


def test_a_job_whose_clock_is_behind_shows_no_steps_before_their_episode(lk: Lake, clock: MovingClock) -> None:
    """What a forgotten episode's write brought for another is accepted by the job that forgets."""
    clock.forward(days=10)
    lk.append([episode("forgotten"), episode("stays")], run_id="run")
    clock.forward(days=-9)
    lk.forget(lk.scan("episodes").filter(task_id="forgotten").collect()["episode_id"].to_list())
    clock.forward(days=4)
    assert tasks(lk.at(clock())) == []
    clock.forward(days=20)
    assert tasks(lk.at(clock())) == ["stays"]


def test_a_version_dated_before_the_lake_was_made_can_be_seen(lk: Lake, clock: MovingClock) -> None:
    clock.forward(days=-10)
    lk.append([episode("a")], run_id="run")
    assert tasks(lk.at(1)) == ["a"]


def test_after_a_vacuum_the_past_says_that_it_is_gone(lk: Lake, clock: MovingClock) -> None:
    noons = days(lk, clock, 2)
    lk.name_snapshot("kept")
    days(lk, clock, 1, start=2)
    for name in TABLES:
        lk.compact(name)
    clock.forward(days=20)
    lk.vacuum()
    assert tasks(lk.at("kept")) == ["day 0", "day 1"]
    lk.drop_snapshot("kept")
    lk.vacuum()
    says = r"at .*: \d files of `\w+` at version \d+ are gone, for example .*\. A vacuum removed them"
    for when in (noons[1], noons[1].isoformat(), 2):
        with pytest.raises(LakeAccessError, match=says):
            lk.at(when)
    assert len(tasks(lk.at(clock()))) == 3


def test_a_mapping_is_taken_as_it_is(lk: Lake, clock: MovingClock) -> None:
    days(lk, clock, 1)
    versions = lk.snapshot().versions
    days(lk, clock, 1, start=1)
    assert tasks(lk.at(versions)) == ["day 0"]
    with pytest.raises(ContractError, match="unknown tables"):
        lk.at({"nothing": 1})


@pytest.mark.parametrize("when", [None, 1.5, [], b"now"])
def test_what_is_of_no_such_type_is_refused(tmp_path: Path, when: object) -> None:
    lk = empty_lake(tmp_path / "lake")
    with pytest.raises(UsageError, match=r"invalid state of .*valid: a datetime, a"):
        lk.at(when)  # type: ignore[arg-type]
