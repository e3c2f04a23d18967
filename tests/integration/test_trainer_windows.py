"""Windows: row groups are read once for all the optimizer steps that fit into memory, and that changes nothing else."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch  # noqa: TID253 - a script that does nothing without it

from lake import Lake
from lake.errors import LakeAccessError
from testkit.examples import mostly_slow, mostly_slow_cases
from testkit.training import config, token_episodes, token_lake
from trainer.config import TrainConfig
from trainer.data.plan import Plan
from trainer.data.row_groups import RowGroup, RowGroupReader
from trainer.data.selection import select
from trainer.data.stream import Locations, RankShare, Stream, Window, Windows
from trainer.losses import LOSSES

SFT = LOSSES["sft"]().needs
WRITES = 4
LIMITS = [0, 600, 1500, 1 << 30]


class Counting(RowGroupReader):
    """Counts what is read."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reads: Counter[tuple[int, int]] = Counter()

    def read(self, file: int, group: int) -> RowGroup:
        self.reads[file, group] += 1
        return super().read(file, group)


@contextmanager
def windows_of(lk: Lake, limit: int, ramp: int = 1, **fields: Any) -> Iterator[tuple[Plan, Windows, Counting]]:
    snapshot = lk.snapshot()
    settings = config(episodes_per_step=2, **fields)
    plan = Plan(select(snapshot, settings, SFT), settings)
    reader = Counting(snapshot.files("tokens"), snapshot.objects, masks=False, logprobs=False)
    with ThreadPoolExecutor(2) as pool:
        locations = Locations(plan, reader, pool)
        yield plan, Windows(plan, RankShare(plan), reader, locations, pool, limit=limit, ramp=ramp), reader


def bytes_of(plan: Plan, window: Window) -> int:
    """Of the tokens of its optimizer steps: int32 each."""
    return sum(4 * step.tokens for step in window.steps)


@pytest.fixture(scope="module")
def lk(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    return token_lake(tmp_path_factory.mktemp("windows"), token_episodes(tasks=6), writes=WRITES)


@pytest.mark.parametrize("limit", LIMITS)
def test_windows_hold_every_step_once_in_order_and_keep_the_limit(lk: Lake, limit: int) -> None:
    with windows_of(lk, limit, epochs=2) as (plan, windows, _):
        cut = list(windows.cut(plan.steps))
        assert [step.index for window in cut for step in window.steps] == [step.index for step in plan.steps]
        assert all(bytes_of(plan, window) <= limit // 2 or len(window.steps) == 1 for window in cut if limit < 1 << 30)
        assert (len(cut) == 1) == (limit == 1 << 30)
        assert list(windows.cut([])) == []


def test_the_first_windows_are_small(lk: Lake) -> None:
    with windows_of(lk, 1500, epochs=8) as (plan, windows, _):
        sizes = [len(window.steps) for window in itertools.islice(windows.cut(plan.steps), 3)]
        assert sizes[:2] == [1, 2]
        assert 2 < sizes[2] <= 4


def members_of(plan: Plan, window: Window) -> np.ndarray:
    """Members of its optimizer steps, each once."""
    episodes = sorted({e for step in window.steps for e in step.episodes_E.tolist()})
    sequences = [np.arange(plan.sequence_starts_E[e], plan.sequence_starts_E[e + 1]) for e in episodes]
    return plan.list_members(np.concatenate(sequences))[0]


@pytest.mark.parametrize("limit", mostly_slow(LIMITS, 600, 1 << 30))
def test_a_row_group_is_read_once_a_window_at_most(lk: Lake, limit: int) -> None:
    with windows_of(lk, limit, epochs=3) as (plan, windows, reader):
        for number, window in enumerate(windows.cut(plan.steps), 1):
            window.begin()
            window.wait_for_rows(members_of(plan, window))
            assert max(reader.reads.values()) <= number
        if limit == 1 << 30:
            assert set(reader.reads.values()) == {1}
            assert len(reader.reads) == WRITES


@pytest.mark.parametrize("limit", mostly_slow(LIMITS, 600))
def test_only_wanted_rows_are_kept_each_with_its_context_and_its_action(lk: Lake, limit: int) -> None:
    stored = {(row["episode_id"], row["step_index"]): row for row in lk.scan("tokens").collect().iter_rows(named=True)}
    with windows_of(lk, limit) as (plan, windows, _):
        for window in windows.cut(plan.steps):
            window.begin()
            expected = members_of(plan, window)
            rows = window.wait_for_rows(expected)
            assert sorted(rows.tolist()) == list(range(len(expected)))
            assert len(window.context_starts_R) == len(window.action_starts_R) == len(expected) + 1
            for member, at in zip(expected.tolist(), rows.tolist(), strict=True):
                row = stored[plan.members.row(member, named=True)["episode_id"], plan.members["step_index"][member]]
                context = slice(*window.context_starts_R[at : at + 2])
                action = slice(*window.action_starts_R[at : at + 2])
                assert window.context_C[context].tolist() == row["context_ids"]
                assert window.action_A[action].tolist() == row["action_ids"]
            assert window.mask_A is window.logprobs_A is None, "not asked for"


def same(settings: Callable[..., TrainConfig], lk: Lake, first: int, **fields: Any) -> list[dict[str, Any]]:
    """Every tensor of every batch."""
    snapshot = lk.snapshot()
    changed_settings = settings(**fields)
    plan = Plan(select(snapshot, changed_settings, SFT), changed_settings)
    with Stream(snapshot, plan, SFT, changed_settings) as stream:
        batches = [batch for _, batches in stream.steps(first) for batch in batches]
    return [
        {name: value for name in type(batch).__slots__ if isinstance(value := getattr(batch, name), torch.Tensor)}
        for batch in batches
    ]


BATCHES = [(limit, threads, first) for limit in LIMITS[:3] for threads in (1, 3) for first in (0, 3)]


@pytest.mark.parametrize(("limit", "threads", "first"), mostly_slow_cases(BATCHES, (0, 3, 0), (600, 3, 3)))
def test_batches_do_not_depend_on_the_cache(lk: Lake, limit: int, threads: int, first: int) -> None:
    def settings(**fields: Any) -> TrainConfig:
        return config(episodes_per_step=2, epochs=2, token_budget=40, **fields)

    expected = same(settings, lk, first)
    batches = same(settings, lk, first, cache_bytes=limit, read_threads=threads, prefetch=threads)
    assert len(batches) == len(expected)
    for batch, expected_batch in zip(batches, expected, strict=True):
        assert batch.keys() == expected_batch.keys()
        assert all(torch.equal(batch[name], expected_batch[name]) for name in batch)


def test_a_rank_reads_the_row_groups_of_its_own_micro_batches(tmp_path: Path) -> None:
    """An episode a row group: ranks read different ones, all of them together, and each only once."""
    episodes = token_episodes(tasks=2)
    lk = token_lake(tmp_path, episodes, writes=len(episodes))
    with windows_of(lk, 1) as (plan, _, reader):
        locations = Locations(plan, reader, pool := ThreadPoolExecutor(2))
        read: list[set[tuple[int, int]]] = []
        for rank in range(2):
            share, second_share = RankShare(plan, rank, 2), RankShare(plan, rank, 2)
            for window in Windows(plan, share, reader, locations, pool, limit=1, ramp=1).cut(plan.steps):
                window.begin()
                for step in window.steps:
                    window.wait_for_rows(second_share.list_members(step))
            read.append(set(reader.reads))
            assert set(reader.reads.values()) <= {1}
            reader.reads.clear()
        pool.shutdown()
    assert sum(map(len, read)) == len(set().union(*read)) == len(np.unique(locations.group_M))
    assert all(read), "every rank has a part"


@pytest.mark.parametrize("limit", mostly_slow(LIMITS[:3], 600))
def test_the_ranks_batches_together_are_those_whatever_the_windows(lk: Lake, limit: int) -> None:
    """Also of a rank that has nothing in some steps."""
    snapshot, settings = lk.snapshot(), config(episodes_per_step=1, epochs=2, token_budget=40)
    plan = Plan(select(snapshot, settings, SFT), settings)

    def batches(rank: int, cache_bytes: int, first: int = 0) -> list[list[list[int]]]:
        changed_settings = settings.model_copy(update={"cache_bytes": cache_bytes})
        with Stream(snapshot, plan, SFT, changed_settings, rank=rank, world_size=3) as stream:
            return [[batch.input_ids_T.tolist() for batch in of_step] for _, of_step in stream.steps(first)]

    for rank in range(3):
        expected = batches(rank, 1 << 30)
        assert batches(rank, limit) == expected
        assert batches(rank, limit, first=5) == expected[5:]


def test_a_file_that_goes_away_is_an_error_and_no_standstill(tmp_path: Path) -> None:
    lk = token_lake(tmp_path, token_episodes(tasks=4), writes=3)
    snapshot = lk.snapshot()
    settings = config(episodes_per_step=2, cache_bytes=0, read_threads=1)
    plan = Plan(select(snapshot, settings, SFT), settings)
    with Stream(snapshot, plan, SFT, settings) as stream:
        Path(snapshot.files("tokens")[1].path).unlink()
        with pytest.raises(LakeAccessError, match="no such file"):
            list(stream.steps())
