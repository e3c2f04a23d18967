"""Training data in a bucket: the same batches as from a folder, bit for bit."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch  # noqa: TID253 - a script that does nothing without it

import lake
from lake import Lake
from lake.errors import LakeAccessError
from lake.judgements.credit import find_credit
from lake.storage.buckets import Bucket
from lake.storage.local_cache import CACHE_VARIABLE
from testkit.examples import mostly_slow
from testkit.lakes import add_credit
from testkit.object_store import Store, new_bucket
from testkit.training import config, token_episodes
from trainer.config import TrainConfig
from trainer.data.plan import Plan
from trainer.data.selection import select
from trainer.data.stream import RankShare, Stream, Window
from trainer.losses import LOSSES

PPO, SFT = LOSSES["ppo"]().needs, LOSSES["sft"]().needs


def filled(lk: Lake) -> Lake:
    """Three files of tokens, and their advantages."""
    for part in np.array_split(np.arange(16), 3):
        episodes = token_episodes(tasks=4)
        with lk.job(kind="collect", run_id="demo") as job:
            job.record([episodes[i] for i in part])
    add_credit(lk)
    return lk


@pytest.fixture(scope="module")
def bucket(s3_server: str) -> Lake:
    """Such a lake in a bucket; to be read only."""
    store = new_bucket(s3_server)
    return filled(lake.open(store.root, create=True, storage_options=store.options))


def streamed(lk: Lake, settings: TrainConfig) -> tuple[int, list[dict[str, Any]]]:
    """The plan's hash, and every field of every batch."""
    snapshot = lk.snapshot()
    plan = Plan(select(snapshot, settings, PPO, source=find_credit(snapshot, None)), settings)
    with Stream(snapshot, plan, PPO, settings) as stream:
        batches = [batch for _, batches in stream.steps() for batch in batches]
    return plan.plan_hash, [{name: getattr(batch, name) for name in type(batch).__slots__} for batch in batches]


@pytest.mark.parametrize("cache_bytes", mostly_slow([0, 1 << 30], 1 << 30))
def test_a_bucket_gives_the_same_batches_as_a_folder(tmp_path: Path, bucket: Lake, cache_bytes: int) -> None:
    settings = config("ppo", episodes_per_step=3, token_budget=40, cache_bytes=cache_bytes, options={"unit": "episode"})
    local = streamed(filled(lake.open(tmp_path, create=True)), settings)
    remote = streamed(bucket, settings)
    assert local[0] == remote[0]
    assert len(local[1]) == len(remote[1]) > 3
    for first, second in zip(local[1], remote[1], strict=True):
        for name, value in first.items():
            same = torch.equal(value, second[name]) if isinstance(value, torch.Tensor) else value == second[name]
            assert same, name


def test_a_row_group_is_one_request(bucket: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns that lie side by side are asked for together, and a footer once."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    snapshot = bucket.snapshot()
    settings = config("ppo", episodes_per_step=3)
    plan = Plan(select(snapshot, settings, PPO, source=find_credit(snapshot, None)), settings)
    paths: list[str] = []
    read = Bucket.read

    def counted(self: Bucket, path: str, start: int, end: int) -> bytes:
        paths.append(path)
        return read(self, path, start, end)

    monkeypatch.setattr(Bucket, "read", counted)
    with Stream(snapshot, plan, PPO, settings) as stream:
        footers = len(paths)
        assert len(list(stream.steps())) == len(plan.steps)
    assert footers <= 2 * 3, "a footer's length, then the footer"
    assert len(paths) - footers == 3


def test_what_a_machine_has_on_its_disk_is_not_fetched_again(
    bucket: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by a later pass, another rank, or a resumed run; and the batches are the same."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    lk = bucket
    cached_paths: list[str] = []
    read = Bucket.read

    def counted(self: Bucket, path: str, start: int, end: int) -> bytes:
        cached_paths.extend([path] * path.startswith("tokens/"))
        return read(self, path, start, end)

    monkeypatch.setattr(Bucket, "read", counted)
    small = config("ppo", episodes_per_step=3, token_budget=40, epochs=2, cache_bytes=0)
    direct = streamed(lk, small.model_copy(update={"disk_cache_bytes": 0}))
    assert not list(tmp_path.rglob("*.part"))
    requests = len(cached_paths)
    cached_paths.clear()
    cached = streamed(lk, small)
    assert len(cached_paths) <= 3 * 3 < requests, "of each file the footer, in two requests at most, and its row group"
    cached_paths.clear()
    again = streamed(lk, small)
    assert not cached_paths
    for first, second, last in zip(direct[1], cached[1], again[1], strict=True):
        for name, value in first.items():
            for batch in (second[name], last[name]):
                assert torch.equal(value, batch) if isinstance(value, torch.Tensor) else value == batch, name


def test_a_slow_bucket_is_read_while_the_model_works(bucket: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model takes a step; what the next windows need is fetched in the meantime, and then not waited for."""
    snapshot = bucket.snapshot()
    fields = {"cache_bytes": 800, "disk_cache_bytes": 0, "prefetch": 1, "read_threads": 1}
    settings = config("sft", episodes_per_step=1, epochs=3, **fields)
    plan = Plan(select(snapshot, settings, SFT), settings)
    windows: list[Window] = []
    changed, is_open = threading.Condition(), threading.Event()
    is_open.set()
    read, begin = Bucket.read, Window.begin

    def slow(self: Bucket, path: str, start: int, end: int) -> bytes:
        assert is_open.wait(30)
        return read(self, path, start, end)

    def noted(self: Window) -> None:
        begin(self)
        with changed:
            windows.append(self)
            changed.notify_all()

    monkeypatch.setattr(Bucket, "read", slow)
    monkeypatch.setattr(Window, "begin", noted)
    with Stream(snapshot, plan, SFT, settings) as stream:
        steps = stream.steps()
        next(steps)
        with changed:
            assert changed.wait_for(lambda: len(windows) > 1, 30), "while the model is busy with its first step"
            windows_before = list(windows)
        assert sum(window.bytes for window in windows_before) <= settings.cache_bytes
        for window in windows_before:
            window.wait_for_rows(np.concatenate([RankShare(plan).list_members(step) for step in window.steps]))
        is_open.clear()
        ahead = sum(len(window.steps) for window in windows_before)
        indices = [0, *(next(steps)[0].index for _ in range(ahead - 1))]
        assert indices == [step.index for window in windows_before for step in window.steps], (
            "none of them waits for the bucket"
        )
        assert ahead < len(plan.steps)
        is_open.set()
        assert ahead + len(list(steps)) == len(plan.steps)


@pytest.mark.slow("a data file that is gone from a bucket is an error of the lake")
def test_a_file_that_is_gone_is_an_error_of_the_lake(s3: Store) -> None:
    lk = filled(lake.open(s3.root, create=True, storage_options=s3.options))
    snapshot = lk.snapshot()
    settings = config("ppo", episodes_per_step=3)
    plan = Plan(select(snapshot, settings, PPO, source=find_credit(snapshot, None)), settings)
    with Stream(snapshot, plan, PPO, settings) as stream:
        path = snapshot.files("tokens")[0].path
        snapshot.objects.delete([path.removeprefix(f"{snapshot.objects.root}/")])
        with pytest.raises(LakeAccessError, match=r"tokens/"):
            list(stream.steps())
