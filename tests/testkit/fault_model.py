"""What a lake must show, as plain dictionaries of Python values: the oracle of the fault tests.

An episode is its key (task, rollout, attempt) and its content, a tuple of steps. `Truth` holds every content that was
offered for a key and the one that must be visible; `harm` compares a snapshot with it.
"""

import random
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import polars as pl

from lake import EpisodeRecord, Lake, Snapshot
from testkit.episodes import episode, line
from testkit.fault_log import Harm

Key = tuple[str, int, int]
Step = tuple[str, str, float | None, tuple[int, ...] | None]
"""State, action, reward, action ids."""
Content = tuple[Step, ...]
BAD_LINES = (b"not JSON\n", b'{"task_id": "no steps"}\n')


def key(record: EpisodeRecord) -> Key:
    """What a record is called."""
    return record.task_id, record.rollout_index, record.attempt


def content(record: EpisodeRecord) -> Content:
    """What a record holds."""
    return tuple(
        (s.state, s.action, s.reward, None if s.tokens is None else tuple(s.tokens.action_ids)) for s in record.steps
    )


def rollouts(rng: random.Random, name: str, count: int) -> list[EpisodeRecord]:
    """Episodes of one to five steps, four siblings a task."""
    return [
        episode(f"{name}.{n // 4}", n % 4, steps=rng.randint(1, 5), tokens=True, env_return=float(rng.randint(0, 1)))
        for n in range(count)
    ]


def resampled(record: EpisodeRecord, rng: random.Random) -> EpisodeRecord:
    """Another rollout under the same key, as after a crash of the sampler of the first."""
    other_episode = episode(
        record.task_id,
        record.rollout_index,
        steps=rng.randint(1, 6),
        tokens=True,
        attempt=record.attempt,
        env_return=record.env_return,
    )
    for step in other_episode.steps:
        step.action += " otherwise"
    return other_episode


def write_file(path: Path, items: Iterable[EpisodeRecord | bytes], rng: random.Random) -> tuple[Path, int]:
    """A JSONL file of records, raw lines as they are, and bad lines among them; the file and how many were added."""
    bad = 0
    with path.open("wb") as file:
        for item in items:
            file.write(item if isinstance(item, bytes) else line(item))
            if rng.random() < 0.1:
                file.write(rng.choice(BAD_LINES))
                bad += 1
    return path, bad


@dataclass
class Truth:
    """Every content offered for a key, and the one that is known to stand."""

    offered: dict[Key, set[Content]] = field(default_factory=dict)
    stands: dict[Key, Content] = field(default_factory=dict)

    def offer(self, records: Iterable[EpisodeRecord]) -> None:
        """Records may have become visible from now on."""
        for record in records:
            self.offered.setdefault(key(record), set()).add(content(record))

    def took(self, records: Iterable[EpisodeRecord]) -> None:
        """Records were written to the end: what did not stand before stands now."""
        records = list(records)
        self.offer(records)
        for record in records:
            self.stands.setdefault(key(record), content(record))

    def saw(self, view: "View") -> None:
        """What was visible once stays."""
        for name, shown_episode in view.episodes.items():
            self.stands.setdefault(name, shown_episode)


@dataclass
class View:
    """What a snapshot shows."""

    episodes: dict[Key, Content]
    duplicated: int
    """Rows too many in `episodes`, `steps` and `tokens`."""
    broken: int
    """Episodes without some of their steps, and steps and tokens without their episode."""


def view(snapshot: Snapshot) -> View:
    """Read a snapshot row by row."""
    names = ("episode_id", "task_id", "rollout_index", "attempt", "num_steps")
    episodes = snapshot.scan("episodes").select(names).collect().rows()
    steps = snapshot.scan("steps").select("episode_id", "step_index", "state", "action", "reward").collect().rows()
    engine = snapshot.scan("tokens").filter(pl.col("provenance") == "engine")
    tokens = engine.select("episode_id", "step_index", "action_ids").collect().rows()
    action_ids = {(episode_id, index): tuple(ids) for episode_id, index, ids in tokens}
    steps_of: dict[int, dict[int, Step]] = {row[0]: {} for row in episodes}
    keys = Counter((episode_id, index) for episode_id, index, *_ in steps)
    duplicated = len(episodes) - len(steps_of) + keys.total() - len(keys) + len(tokens) - len(action_ids)
    broken = len(
        {episode_id for episode_id, _ in keys if episode_id not in steps_of} | (action_ids.keys() - keys.keys())
    )
    for episode_id, index, state, action, reward in steps:
        if episode_id in steps_of:
            steps_of[episode_id][index] = (state, action, reward, action_ids.get((episode_id, index)))
    shown_episodes = {}
    for episode_id, task, rollout, attempt, num_steps in episodes:
        steps_of_one = steps_of[episode_id]
        broken += sorted(steps_of_one) != list(range(num_steps))
        duplicated += (task, rollout, attempt) in shown_episodes
        shown_episodes[task, rollout, attempt] = tuple(steps_of_one[index] for index in sorted(steps_of_one))
    return View(shown_episodes, duplicated, broken)


def harm(state: View, truth: Truth, erased: Collection[Key] = ()) -> Harm:
    """What a view shows that it should not, and does not show that it should.

    Args:
        state: what a snapshot shows.
        truth: what must be visible, and what may be.
        erased: keys that were retracted or forgotten and must not be visible.
    """
    must: Mapping[Key, Content] = {name: text for name, text in truth.stands.items() if name not in erased}
    lost = sum(state.episodes.get(name) != text for name, text in must.items())
    half = sum(text not in truth.offered.get(name, ()) or name in erased for name, text in state.episodes.items())
    return Harm(lost, state.duplicated, half + state.broken)


def accounted(lk: Lake) -> None:
    """Every job that ended says of each row that came in whether it was new, present or rejected."""
    jobs = lk.scan("jobs").filter((pl.col("event") == "succeeded") & (pl.col("kind") == "ingest")).collect()
    for row in jobs.iter_rows(named=True):
        present = msgspec.json.decode(row["counts"])["already_present"]
        assert row["rows_in"] == row["rows_out"] + present + row["rows_dropped"], row


def conflicts(lk: Lake) -> set[tuple[Key, Content]]:
    """Episodes that were turned away because their key was present with other content."""
    raw = lk.scan("rejects").filter(pl.col("reason") == "conflict").select("raw").collect()["raw"]
    records = [msgspec.json.decode(text, type=EpisodeRecord) for text in raw]
    return {(key(record), content(record)) for record in records}
