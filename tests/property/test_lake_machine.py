"""Any sequence of what people do to a lake, next to an oracle that is a few dictionaries.

Records come, come again, come with other content, are retried; episodes are retracted, restored and forgotten; tables
are compacted and vacuumed while days pass; snapshots are taken, named and reopened. After every step the lake shows
what the dictionaries say, and every old snapshot still shows what it showed, forgotten episodes aside.
"""

import os
import random
import tempfile
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import lake
from lake import EpisodeRecord, ids
from lake.errors import LakeAccessError
from pipelines.credit import GiGPO
from pipelines.credit.job import run_credit
from testkit.copies import empty_lake
from testkit.episodes import episode
from testkit.fault_model import Content, Key, content, key, resampled, view
from testkit.lake_worker import compact

SLOTS = st.tuples(st.integers(0, 1), st.integers(0, 2))
"""A task and one of its siblings: few, so that they meet."""
SEEDS = st.integers(0, 2**16)


def scored(task: int, index: int, **fields: Any) -> EpisodeRecord:
    """A rollout that credit can compare."""
    return episode(f"t{task}", index, env_return=float(index), **fields)


class LakeMachine(RuleBasedStateMachine):
    """The lake, and what it must show."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="machine")
        self.chance = pytest.MonkeyPatch()
        # Later than any clock that makes the tables' first versions, which are not the lake's.
        self.now = datetime(2126, 1, 1, tzinfo=UTC)
        self.lk = self.opened()
        self.stored: dict[Key, Content] = {}
        """No matter what was recorded and not forgotten."""
        self.replaced: set[Key] = set()
        """By a later attempt, permanently."""
        self.retracted: set[Key] = set()
        """By people, until they restore it."""
        self.forgotten: set[Key] = set()
        self.stamped: set[Path] = set()
        self.snapshots: list[tuple[dict[str, int], datetime, dict[Key, Content]]] = []
        self.named: dict[str, dict[Key, Content]] = {}

    def opened(self) -> lake.Lake:
        return empty_lake(Path(self.folder.name) / "lake", clock=self.clock, compact_above=12)

    def clock(self) -> datetime:
        """No two looks at it are the same."""
        self.now += timedelta(milliseconds=1)
        return self.now

    @initialize(number=SEEDS)
    def they_draw_ids(self, number: int) -> None:
        """Random ids from a seed: what depends on their order is found, and found again."""
        rng = random.Random(number)
        self.chance.setattr(ids, "fresh_id", lambda: rng.getrandbits(63))

    def stamp(self) -> None:
        """Give new files the time of our clock, by which vacuum takes them for old."""
        for file in set(Path(self.folder.name).rglob("*.parquet")) - self.stamped:
            os.utime(file, (self.now.timestamp(), self.now.timestamp()))
            self.stamped.add(file)

    def teardown(self) -> None:
        self.chance.undo()
        self.folder.cleanup()

    # ------------------------------------------------------------ the oracle

    @property
    def hidden(self) -> set[Key]:
        return self.replaced | self.retracted

    def visible(self) -> dict[Key, Content]:
        return {name: text for name, text in self.stored.items() if name not in self.hidden}

    def numbers(self, names: list[Key]) -> list[int]:
        rows = self.lk.snapshot().scan_all("episodes").collect()
        stored_names = rows.select("task_id", "rollout_index", "attempt", "episode_id").rows()
        return [number for *name, number in stored_names if tuple(name) in names]

    def took(self, records: list[EpisodeRecord]) -> tuple[int, int, int]:
        """What recording does to the dictionaries: new, present, rejected."""
        new = present = rejected = 0
        for record in records:
            name = key(record)
            if name in self.forgotten:
                rejected += 1
            elif name not in self.stored:
                new += 1
                self.stored[name] = content(record)
                self.one_attempt_per_slot(name)
            elif self.stored[name] == content(record):
                present += 1
            else:
                rejected += 1
        return new, present, rejected

    def one_attempt_per_slot(self, name: Key) -> None:
        """Of the attempts at one rollout the highest counts, in any order."""
        attempts = [attempt for attempt in self.stored if attempt[:2] == name[:2]]
        if name == max(attempts, key=lambda attempt: attempt[2]):
            self.replaced.update(attempt for attempt in attempts if attempt != name)
        else:
            self.replaced.add(name)

    def record(self, records: list[EpisodeRecord]) -> None:
        counts = self.lk.append(records, run_id="run")
        assert (counts.new, counts.present, counts.rejected) == self.took(records)

    # ------------------------------------------------------------ what people do

    @rule(slots=st.lists(SLOTS, min_size=1, max_size=4), attempt=st.integers(0, 2))
    def they_record(self, slots: list[tuple[int, int]], attempt: int) -> None:
        """New ones, replays, and retries, in any order."""
        self.record([scored(t, n, steps=1 + n, tokens=n % 2 == 0, attempt=attempt) for t, n in slots])

    @rule(slot=SLOTS, attempt=st.integers(0, 2), number=SEEDS)
    def they_record_other_content(self, slot: tuple[int, int], attempt: int, number: int) -> None:
        self.record([resampled(scored(*slot, attempt=attempt), random.Random(number))])

    @precondition(lambda self: self.stored)
    @rule(data=st.data())
    def they_retract(self, data: st.DataObject) -> None:
        self.retract(data.draw(st.lists(st.sampled_from(sorted(self.stored)), min_size=1, max_size=2, unique=True)))

    def retract(self, names: list[Key]) -> None:
        fresh = set(names) - self.hidden
        assert self.lk.retract(self.numbers(names), "a test") == len(fresh)
        self.retracted.update(fresh)

    @precondition(lambda self: self.stored)
    @rule(data=st.data())
    def they_restore(self, data: st.DataObject) -> None:
        some = sorted(self.retracted or self.stored)
        self.restore(data.draw(st.lists(st.sampled_from(some), min_size=1, max_size=2, unique=True)))

    def restore(self, names: list[Key]) -> None:
        back = (set(names) & self.retracted) - self.replaced
        assert self.lk.restore(self.numbers(names), "a test") == len(back)
        self.retracted -= back

    @precondition(lambda self: self.stored)
    @rule(data=st.data())
    def they_forget(self, data: st.DataObject) -> None:
        names = data.draw(st.lists(st.sampled_from(sorted(self.stored)), min_size=1, max_size=2, unique=True))
        self.lk.forget(self.numbers(names), "a test")
        for name in names:
            del self.stored[name]
        self.replaced.difference_update(names)
        self.retracted.difference_update(names)
        self.forgotten.update(names)

    @precondition(lambda self: self.visible())
    @rule()
    def they_credit(self) -> None:
        """The credit covers all that is seen, once, whichever job computed a group."""
        run_credit(self.lk, GiGPO(singleton="raw"))
        rows = self.lk.sql("SELECT task_id, rollout_index FROM current_advantages JOIN episodes USING (episode_id)")
        expected = Counter({(task, n): len(text) for (task, n, _), text in self.visible().items()})
        assert Counter(rows.rows()) == expected

    @rule()
    def they_compact(self) -> None:
        compact(self.lk)

    @rule()
    def they_vacuum(self) -> None:
        self.lk.vacuum()

    @rule(days=st.sampled_from([0.1, 5, 8, 40]))
    def days_pass(self, days: float) -> None:
        self.now += timedelta(days=days)

    @rule()
    def they_come_back(self) -> None:
        """In a new process, as far as the lake can tell."""
        self.lk = self.opened()

    @rule()
    def they_take_a_snapshot(self) -> None:
        self.snapshots.append((self.lk.snapshot().versions, self.clock(), self.visible()))

    @rule()
    def they_name_a_snapshot(self) -> None:
        name = f"s{len(self.named)}"
        self.lk.name_snapshot(name)
        self.named[name] = self.visible()

    # ------------------------------------------------------------ what must hold

    @invariant()
    def the_lake_shows_what_the_dictionaries_say(self) -> None:
        self.stamp()
        state = view(self.lk.snapshot())
        assert (state.duplicated, state.broken) == (0, 0)
        assert state.episodes == self.visible()
        in_sql = self.lk.sql("SELECT DISTINCT episode_id FROM current_retractions ORDER BY 1")["episode_id"]
        assert in_sql.to_list() == self.lk.snapshot().retracted.to_list()

    @rule()
    def old_snapshots_show_what_they_showed(self) -> None:
        for versions, at, contents in self.snapshots:
            if self.now - at < timedelta(days=7):
                self.compare(versions, contents)
                self.compare(at, contents)
        for name, contents in self.named.items():
            self.compare(name, contents)

    def compare(self, when: dict[str, int] | str | datetime, contents: dict[Key, Content]) -> None:
        """An old snapshot, unless something in it was forgotten: then its files are gone, and it says so."""
        if self.forgotten:
            try:
                state = view(self.lk.at(when))
            except (LakeAccessError, FileNotFoundError):
                return
            assert state.broken == state.duplicated == 0
            for name in state.episodes:
                assert name not in self.forgotten
        else:
            assert view(self.lk.at(when)).episodes == contents


def run(*, examples: int, steps: int, number: int) -> None:
    """Sequences that `number` draws. A failing one is shown as it is: to shrink it would take minutes."""
    options = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=False,
        database=None,
        phases=[Phase.generate],
    )
    run_state_machine_as_test(seed(number)(LakeMachine), settings=options)


def test_a_lake_is_a_few_dictionaries() -> None:
    run(examples=3, steps=20, number=0)


def test_the_dictionaries_say_what_is_restored() -> None:
    """A walk by hand, so that a short run meets restorations next to retries, snapshots and maintenance."""
    machine = LakeMachine()
    first, second, later = ("t0", 0, 0), ("t0", 1, 0), ("t0", 0, 1)
    events: list[Callable[[], object]] = [
        lambda: machine.they_draw_ids(1),
        lambda: machine.they_record([(0, 0), (0, 1)], attempt=0),
        machine.they_take_a_snapshot,
        lambda: machine.retract([first, second]),
        machine.they_name_a_snapshot,
        lambda: machine.restore([first]),
        machine.they_compact,
        lambda: machine.retract([first]),
        machine.they_vacuum,
        lambda: machine.they_record([(0, 0)], attempt=1),
        lambda: machine.restore([first, second]),
        machine.they_come_back,
        lambda: machine.retract([later]),
        lambda: machine.restore([first, later]),
        machine.they_credit,
        machine.old_snapshots_show_what_they_showed,
    ]
    try:
        for event in events:
            event()
            machine.the_lake_shows_what_the_dictionaries_say()
    finally:
        machine.teardown()


@pytest.mark.slow
@pytest.mark.parametrize("number", range(1, 21))
def test_a_lake_is_a_few_dictionaries_for_long(number: int) -> None:
    run(examples=6, steps=50, number=number)
