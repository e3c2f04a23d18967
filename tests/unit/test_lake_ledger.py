"""Which write attempts may be accepted together: first come, first served, and nothing twice."""

from datetime import UTC, datetime
from typing import Any

from lake.storage.data_files import DataFileWrite, StagedRows, WriteReport
from lake.write.ledger import Attempt, EpisodeLookup, LatestAttempt, NewEpisode, find_successors, select_acceptable

NOTHING = EpisodeLookup(0, {}, {}, set())


def claim(episode: int, *, rollout: int = 0, attempt: int = 0) -> NewEpisode:
    return NewEpisode(episode, 100 + episode, 7, rollout, None, attempt)


def attempt(write_id: int, *claims: NewEpisode, lookup: EpisodeLookup = NOTHING) -> Attempt:
    file = StagedRows(None, DataFileWrite.of(WriteReport("file", 1, 0, "{}", len(claims), datetime.now(UTC))))
    return Attempt(write_id, list(claims), find_successors(lookup.newest, claims), {}, file)


def accepted_ids(*attempts: Attempt, lookup: EpisodeLookup = NOTHING, revoked: Any = ()) -> list[int]:
    return [attempt_accepted.write_id for attempt_accepted in select_acceptable(attempts, lookup, revoked)]


def test_of_two_that_bring_the_same_episode_the_first_is_taken() -> None:
    first, second, third = (attempt(n, claim(episode, rollout=episode)) for n, episode in ((1, 5), (2, 5), (3, 6)))
    assert accepted_ids(first, second, third) == [1, 3]
    assert accepted_ids(second, first, third) == [2, 3]


def test_what_is_there_forgotten_or_revoked_is_not_taken() -> None:
    batch = attempt(1, claim(5), claim(6, rollout=1))
    assert accepted_ids(batch) == [1]
    assert accepted_ids(batch, lookup=EpisodeLookup(0, {6: (106, 9)}, {}, set())) == []
    assert accepted_ids(batch, lookup=EpisodeLookup(0, {}, {}, {5})) == []
    assert accepted_ids(batch, revoked={1}) == []


def test_a_retry_is_not_taken_with_the_predecessor_that_it_does_not_know_of() -> None:
    """Its retractions would lack the predecessor: it has to look again."""
    first, retry = attempt(1, claim(5)), attempt(2, claim(6, attempt=1))
    assert accepted_ids(first, retry) == [1]
    lookup = EpisodeLookup(1, {5: (105, 1)}, {(7, 0, None): LatestAttempt(0, 5, 105)}, set())
    assert accepted_ids(retry, lookup=lookup) == []
    assert accepted_ids(attempt(3, claim(6, attempt=1), lookup=lookup), lookup=lookup) == [3]


def test_a_late_predecessor_is_replaced_by_the_retry_that_is_there() -> None:
    assert find_successors({(7, 0, None): LatestAttempt(2, 9, 0)}, [claim(5), claim(6, attempt=3)]) == {5: 9, 9: 6}
