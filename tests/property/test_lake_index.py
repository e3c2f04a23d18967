"""The index of a writer against a plain dictionary: for any batches, and for any merges of files in between."""

import itertools
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lake import ids
from lake.care.maintenance import compact
from lake.records import EpisodeRecord, Identity, identify
from lake.storage.objects import Objects
from lake.storage.store import Store
from lake.tables import TABLES
from lake.tables.contracts import conform
from lake.write.ledger import EpisodeIndex, LatestAttempt
from lake.write.rows import build_episodes_frame
from testkit.episodes import episode
from testkit.examples import examples

Key = tuple[int, int, int, str | None]
"""Task, rollout, attempt, agent."""
KEYS = st.tuples(st.integers(0, 4), st.integers(0, 3), st.integers(0, 2), st.sampled_from([None, "x", "y"]))
BATCHES = st.lists(st.lists(KEYS, min_size=1, max_size=12, unique=True), min_size=1, max_size=6)
COMPACTED, LOOKED_AT = st.sets(st.integers(0, 5)), st.sets(st.integers(0, 5))


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("index") / "empty"
    folder.mkdir()
    Store(Objects(folder)).create()
    return folder


def make_record(key: Key) -> tuple[EpisodeRecord, Identity]:
    task, rollout, attempt, agent = key
    record = episode(f"task {task}", rollout, steps=1, attempt=attempt, agent_id=agent, run_id="run")
    return record, identify(record, "run")


def row(key: Key, identity: Identity) -> tuple[Any, ...]:
    _, rollout, attempt, agent = key
    return (identity.episode_id, identity.content_hash, identity.group_id, rollout, agent, attempt)


def append(store: Store, keys: Sequence[Key]) -> None:
    records, identities = zip(*map(make_record, keys), strict=True)
    frame = build_episodes_frame(list(records), list(identities), ids.fresh_id())
    store.append("episodes", conform(frame, TABLES["episodes"]))


def assert_agree(index: EpisodeIndex, oracle: dict[int, tuple[Any, ...]]) -> None:
    """The index answers as the dictionary does, for present keys and for absent ones."""
    some = list(oracle)[::2]
    absent = [0, 1, ids.MASK]
    for keys_asked in ([], absent, [*oracle, *absent, *oracle], some):
        contents = {key: content for key, (content, _) in index.look_up(keys_asked, ()).contents.items()}
        assert contents == {key: oracle[key][1] for key in keys_asked if key in oracle}
    groups = {value[2] for value in oracle.values()}
    for groups_asked in ([], absent, list(groups), [*absent, *list(groups)[:1]]):
        newest: dict[tuple[Any, ...], LatestAttempt] = {}
        for episode_id, content, *slot, attempt in sorted(oracle.values(), key=lambda value: value[-1]):
            if slot[0] in groups_asked:
                newest[tuple(slot)] = LatestAttempt(attempt, episode_id, content)
        assert index.look_up((), groups_asked).newest == newest


@settings(max_examples=examples(15))
@given(batches=BATCHES, compacted=COMPACTED, looked_at=LOOKED_AT)
def test_it_answers_as_a_dictionary_does(
    empty: Path, batches: list[list[Key]], compacted: set[int], looked_at: set[int], tmp_path_factory: Any
) -> None:
    store = Store(Objects(shutil.copytree(empty, tmp_path_factory.mktemp("lake") / "lake")))
    index, oracle = EpisodeIndex(store), dict[int, tuple[Any, ...]]()
    for number, keys in enumerate(batches):
        append(store, keys)
        oracle |= {make_record(key)[1].episode_id: row(key, make_record(key)[1]) for key in keys}
        if number in compacted:
            compact(store, "episodes")
        if number in looked_at:
            assert index.refresh() == store.refresh("episodes")
            assert_agree(index, oracle)
    for reader in (index, EpisodeIndex(store)):
        reader.refresh()
        assert_agree(reader, oracle)


def test_its_runs_stay_few(empty: Path, tmp_path: Path) -> None:
    """Each at least twice as long as the next: a lookup costs the logarithm of the size."""
    store = Store(Objects(shutil.copytree(empty, tmp_path / "lake")))
    index = EpisodeIndex(store)
    for number in range(20):
        append(store, [(number, 0, 0, None)])
        index.refresh()
        sizes = [run.rows_E.height for run in index._runs]
        assert sum(sizes) == number + 1
        assert all(before >= 2 * after for before, after in itertools.pairwise(sizes))


def test_an_empty_lake_holds_nothing(empty: Path) -> None:
    index = EpisodeIndex(Store(Objects(empty)))
    assert index.refresh() == 0
    assert_agree(index, {})
    assert index.look_up([1], [1]).forgotten == set()
