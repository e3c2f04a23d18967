"""Pins: names that stay until they are dropped, leases that stay while their holder lives."""

import threading
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest

import lake
from lake import Lake
from lake.care.pins import Pin
from lake.errors import LakeAccessError, UsageError
from testkit.copies import empty_lake
from testkit.episodes import assert_whole, episode
from testkit.moving_clock import MovingClock

HOUR = timedelta(hours=1)


@pytest.fixture
def clock() -> MovingClock:
    return MovingClock()


@pytest.fixture
def lk(tmp_path: Path, clock: MovingClock) -> Lake:
    lk = empty_lake(tmp_path / "lake", clock=clock)
    lk.append([episode("a")], run_id="run")
    return lk


def leases(lk: Lake) -> list[Path]:
    return list((Path(lk.uri) / "_trajlake" / "leases").glob("*"))


def read(path: Path) -> Pin:
    return msgspec.json.decode(path.read_bytes(), type=Pin)


# ---------------------------------------------------------------- names


def test_a_named_snapshot_is_listed_found_and_dropped(lk: Lake, clock: MovingClock) -> None:
    first = lk.name_snapshot("first")
    clock.forward(days=1)
    lk.append([episode("b")], run_id="run")
    second = lk.name_snapshot("Second_2.0-rc", lk.snapshot())
    assert [pin.name for pin in lake.open(lk.uri).snapshots()] == ["first", "Second_2.0-rc"]
    assert lk.snapshots() == [first, second]
    assert first.expires_at is None
    assert second.created_at - first.created_at >= timedelta(days=1)
    assert assert_whole(lk.at("first")) == 1
    assert assert_whole(lk.at("Second_2.0-rc")) == 2
    lk.drop_snapshot("first")
    assert [pin.name for pin in lk.snapshots()] == ["Second_2.0-rc"]
    with pytest.raises(UsageError, match=r"no snapshot 'first'; there are: Second_2.0-rc"):
        lk.at("first")


def test_an_older_snapshot_can_be_named(lk: Lake) -> None:
    old = lk.snapshot()
    lk.append([episode("b")], run_id="run")
    assert lk.name_snapshot("old", old).versions == old.versions
    assert assert_whole(lk.at("old")) == 1


def test_a_name_that_could_be_something_else_is_refused(lk: Lake) -> None:
    names = ["", " ", "a b", "../x", "a/b", ".hidden", "-x", "n" * 101, "ünï", "12", "2026-11-20", "2026-11-20T10:00"]
    for name in names:
        with pytest.raises(UsageError, match="valid: letters, digits"):
            lk.name_snapshot(name)
    assert lk.snapshots() == []
    assert not (Path(lk.uri) / "_trajlake" / "snapshots").exists()


def test_a_name_is_given_once(lk: Lake) -> None:
    lk.name_snapshot("x")
    lk.append([episode("b")], run_id="run")
    with pytest.raises(UsageError, match="a snapshot 'x' already; choose another name"):
        lk.name_snapshot("x")
    assert assert_whole(lk.at("x")) == 1


def test_of_processes_that_want_one_name_one_gets_it(lk: Lake) -> None:
    barrier, outcomes = threading.Barrier(4), []

    def name() -> None:
        mine = lake.open(lk.uri)
        barrier.wait()
        try:
            outcomes.append(mine.name_snapshot("x").name)
        except UsageError:
            outcomes.append("taken")

    threads = [threading.Thread(target=name) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["taken"] * 3 + ["x"]


@pytest.mark.parametrize("operation", ["drop_snapshot", "at"])
def test_a_name_that_nobody_gave_is_refused_with_those_there_are(lk: Lake, operation: str) -> None:
    with pytest.raises(UsageError, match="there is no snapshot 'x'; there are: none yet"):
        getattr(lk, operation)("x")


def test_a_damaged_name_is_said_to_be_damaged(lk: Lake) -> None:
    lk.name_snapshot("x")
    (Path(lk.uri) / "_trajlake" / "snapshots" / "x.json").write_text("{}")
    for look in (lk.snapshots, lambda: lk.at("x")):
        with pytest.raises(LakeAccessError, match=r"x.json is damaged \(.*name.*\); .*delete it"):
            look()


# ---------------------------------------------------------------- what is gone cannot be pinned


def test_versions_whose_files_are_gone_cannot_be_pinned(lk: Lake, clock: MovingClock) -> None:
    lk.append([episode("b")], run_id="run")
    old = lk.snapshot()
    lk.compact("steps")
    clock.forward(days=8)
    lk.vacuum()
    with pytest.raises(LakeAccessError, match=r"cannot be kept: 2 files of `steps` at version 2 are gone, for example"):
        lk.name_snapshot("x", old)
    assert lk.snapshots() == []
    with pytest.raises(LakeAccessError, match="cannot be read: 2 files of `steps` at version 2 are gone"):
        lk.lease(old, "a trainer").__enter__()
    assert leases(lk) == []
    lk.name_snapshot("x")


def test_beside_a_running_vacuum_only_what_is_live_is_pinned(lk: Lake, clock: MovingClock) -> None:
    """It may have read the pins already."""
    lk.append([episode("b")], run_id="run")
    old = lk.snapshot()
    lk.compact("steps")
    with lk._pins.announce_vacuum():
        with pytest.raises(LakeAccessError, match=r"a vacuum is running .*; try again"):
            lk.name_snapshot("old", old)
        lk.name_snapshot("new")
        clock.forward(days=2)
        lk.name_snapshot("old", old)
    assert [pin.name for pin in lk.snapshots()] == ["new", "old"], "a vacuum of two days ago was killed"


# ---------------------------------------------------------------- leases


def test_a_lease_pins_while_it_is_held(lk: Lake, clock: MovingClock) -> None:
    before = clock()
    with lk.lease(lk.snapshot(), "trainer 7"):
        (path,) = leases(lk)
        pin = read(path)
        assert (pin.name, pin.versions) == ("trainer 7", lk.snapshot().versions)
        assert pin.expires_at is not None
        assert HOUR <= pin.expires_at - before <= 2 * HOUR
        assert [active.name for active in lk._pins.list_active()] == ["trainer 7"]
        assert lk.snapshots() == [], "it is no name"
    assert leases(lk) == []
    assert lk._pins.list_active() == []


def test_a_lease_whose_holder_was_killed_expires(lk: Lake, clock: MovingClock) -> None:
    lease = lk.lease(lk.snapshot(), "killed", HOUR)
    lease._renew()  # entered, and never left
    clock.forward(minutes=59)
    assert [pin.name for pin in lk._pins.list_active()] == ["killed"]
    clock.forward(minutes=2)
    assert lk._pins.list_active() == []


def test_a_jobs_next_attempt_takes_over_the_lease_of_the_killed_one(lk: Lake) -> None:
    lk.lease(lk.snapshot(), "train run", job_id=7)._renew()  # killed
    with lk.lease(lk.snapshot(), "train run", job_id=7):
        assert [pin.name for pin in lk._pins.list_active()] == ["train run"]
    assert leases(lk) == []


def beat(lk: Lake, clock: MovingClock) -> bool:
    """Whether a lease is renewed before long."""
    (path,) = leases(lk)
    for _ in range(1000):
        expires = read(path).expires_at
        if expires is not None and expires > clock():
            return True
        threading.Event().wait(0.01)
    return False


def test_a_heartbeat_keeps_a_lease_alive_for_years(lk: Lake, clock: MovingClock) -> None:
    with lk.lease(lk.snapshot(), "long", timedelta(seconds=1)):
        for _ in range(3):
            clock.forward(days=300)
            assert beat(lk, clock)


def test_a_heartbeat_that_fails_is_tried_again(lk: Lake, clock: MovingClock, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = []
    put = lk._store.objects.put

    def failing(path: str, data: bytes) -> None:
        if len(failures) < 2:
            failures.append(path)
            msg = "no network"
            raise LakeAccessError(msg)
        put(path, data)

    with lk.lease(lk.snapshot(), "unlucky", timedelta(seconds=1)):
        monkeypatch.setattr(lk._store.objects, "put", failing)
        clock.forward(days=1)
        assert beat(lk, clock)
    assert len(failures) == 2


def test_a_lease_is_given_back_when_its_holder_fails(lk: Lake) -> None:
    class OnPurposeError(Exception):
        pass

    with pytest.raises(OnPurposeError), lk.lease(lk.snapshot(), "fails"):
        raise OnPurposeError
    assert leases(lk) == []
