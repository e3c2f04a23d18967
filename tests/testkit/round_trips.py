"""There and back: what a lake holds is exported, and read into a new one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from lake import Lake
from lake.export import find_target
from lake.export.job import ExportRequest, Manifest, export
from lake.read.episodes import KEYS, read_episodes
from lake.records import EpisodeRecord
from testkit.copies import empty_lake


def records(lk: Lake) -> dict[int, EpisodeRecord]:
    """The episodes of a lake by their ids, with the scores that came with them."""
    snapshot = lk.snapshot()
    differences = {}
    for episode in read_episodes(snapshot, snapshot.scan("episodes").select(*KEYS, "num_steps").collect().sort(*KEYS)):
        episode.record.scores = [score for version, score in episode.scores if version in ("recorded", "imported")]
        episode.record.source_uri = None
        differences[episode.episode_id] = episode.record
    return differences


def exported(lk: Lake, out: Path, name: str, **options: Any) -> Manifest:
    """Export in the format of a name."""
    return export(lk, ExportRequest(find_target(name), out, **options))


def there_and_back(
    lk: Lake, tmp_path: Path, name: str, run_id: str | None = None, **options: Any
) -> tuple[dict[int, EpisodeRecord], Manifest]:
    """The episodes of a new lake that read what was exported; nothing of it may be rejected."""
    manifest = exported(lk, tmp_path / "out", name, **options)
    other_lake = empty_lake(tmp_path / "other")
    report = other_lake.ingest(tmp_path / "out", run_id=run_id)
    assert report.rejected == 0, report.first_fault
    return records(other_lake), manifest


def assert_same(
    before: dict[int, EpisodeRecord],
    after: dict[int, EpisodeRecord],
    alike: Callable[[Any], Any] = lambda value: value,
) -> None:
    """Lakes hold the same episodes, field by field; `alike` makes what may differ the same."""
    assert before.keys() == after.keys(), "the same keys: format, run, round, task, seed, rollout, attempt, agent"
    for episode_id, record in before.items():
        mine, read_back = (alike(msgspec.to_builtins(plain)) for plain in (record, after[episode_id]))
        different = {name for name in mine.keys() | read_back.keys() if mine.get(name) != read_back.get(name)}
        assert {name: mine.get(name) for name in different} == {name: read_back.get(name) for name in different}
