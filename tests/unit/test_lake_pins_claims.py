"""Claims: one process at a time has one, on whichever machine, and one that was killed does not keep it for ever."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest

from lake import Lake
from lake.care.pins import CLAIM, Claim
from lake.errors import LakeAccessError, UsageError
from testkit.copies import empty_lake
from testkit.moving_clock import MovingClock

WHAT = "run 'r' is being collected into this lake"


@pytest.fixture
def clock() -> MovingClock:
    return MovingClock()


@pytest.fixture
def lk(tmp_path: Path, clock: MovingClock) -> Lake:
    return empty_lake(tmp_path / "lake", clock=clock)


def entries(lk: Lake) -> list[Path]:
    return list((Path(lk.uri) / "_trajlake" / "claims").rglob("*.json"))


def killed(lk: Lake, point: str) -> None:
    """Leave a claim as a process does that was killed."""
    assert lk.claim(WHAT, point)._try_claim()


def test_a_second_process_elsewhere_is_refused_until_the_first_has_left(lk: Lake) -> None:
    with lk.claim(WHAT, "here"):
        with pytest.raises(
            UsageError, match=r"^run 'r' is being collected .* by process \d+ on .*; wait until it ends"
        ):
            lk.claim(WHAT, "there").__enter__()
        with lk.claim("something else", "there"):
            pass
    assert entries(lk) == []
    with lk.claim(WHAT, "there"):
        pass


def test_what_a_killed_one_left_is_taken_over_there_at_once_and_elsewhere_when_it_expires(
    lk: Lake, clock: MovingClock
) -> None:
    killed(lk, "here")
    with lk.claim(WHAT, "here"):
        pass
    killed(lk, "here")
    clock.forward(seconds=CLAIM.total_seconds() - 60)
    with pytest.raises(UsageError, match=r"on another host in \d\d s"):
        lk.claim(WHAT, "there").__enter__()
    clock.forward(seconds=60)
    with lk.claim(WHAT, "there"):
        assert len(entries(lk)) == 1
    assert entries(lk) == []


def test_of_many_that_come_at_once_one_has_it(lk: Lake, clock: MovingClock) -> None:
    """Whether no one had it before, or one that is dead."""
    for _ in range(30):

        def tried(number: int) -> bool:
            try:
                return lk.claim(WHAT, f"place {number}")._try_claim()
            except UsageError:
                return False

        with ThreadPoolExecutor(8) as pool:
            assert sum(pool.map(tried, range(8))) == 1
        clock.forward(days=1)


def until_lost(claim: Claim) -> str:
    for _ in range(6000):
        if claim.lost is not None:
            return claim.lost
        threading.Event().wait(0.01)
    raise AssertionError("it does not notice")


def test_one_that_slept_for_too_long_learns_who_has_it(lk: Lake, clock: MovingClock) -> None:
    claim = Claim(lk._store, WHAT, "here", timedelta(seconds=1))
    with claim:
        killed(lk, "here")  # a later number; as if the claim had expired and someone else had come
        assert "it was taken over by process" in until_lost(claim)
    assert len(entries(lk)) == 1, "it is not ours to end"


def is_alive(lk: Lake) -> bool:
    looker = lk.claim(WHAT, "there")
    (number,) = looker._list_numbers()
    entry = looker._read(number)
    return entry is not None and entry.expires_at > lk._store.clock()


def test_one_that_lives_is_renewed(lk: Lake, clock: MovingClock) -> None:
    with Claim(lk._store, WHAT, "here", timedelta(seconds=1)):
        for _ in range(3):
            clock.forward(days=300)
            assert any(is_alive(lk) or threading.Event().wait(0.01) for _ in range(6000))


class LaggingClaim(Claim):
    """Sees what a listing showed some looks ago."""

    looks = 0

    def _list_numbers(self) -> list[int]:
        self.looks += 1
        return [] if self.looks <= self.lag else super()._list_numbers()

    lag = 0


def test_a_store_that_lists_late_is_asked_again_with_pauses_and_not_for_ever(
    lk: Lake, clock: MovingClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed(lk, "here")
    pauses: list[float] = []
    monkeypatch.setattr("lake.care.pins.time.sleep", pauses.append)
    claim = LaggingClaim(lk._store, WHAT, "here")
    claim.lag = 5
    with claim:
        assert (len(pauses), pauses[0] < pauses[-1] <= 1) == (5, True)
    monkeypatch.undo()
    monkeypatch.setattr("lake.care.pins._LISTING_SECONDS", 0.2)
    with lk.claim(WHAT, "here"):
        late = LaggingClaim(lk._store, WHAT, "there")
        late.lag = 10**9
        with pytest.raises(LakeAccessError, match="_trajlake/claims"):
            late.__enter__()
        assert late.looks < 20


def test_a_damaged_entry_is_named(lk: Lake) -> None:
    killed(lk, "here")
    (path,) = entries(lk)
    path.write_text("{")
    with pytest.raises(LakeAccessError, match=r"0\.json is damaged .* delete it"):
        lk.claim(WHAT, "here").__enter__()
