"""Several lakes in the viewer: queries answer as over one lake, and what is written goes to the lake it is about."""

import importlib
import inspect
import pkgutil
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from datetime import datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import lake
from lake import Lake, ids
from lake.care.saved_views import read_saved_views, save_view
from lake.errors import UsageError
from lake.judgements.credit import find_credit
from lake.records import EpisodeRecord
from lake.write.scores import Annotation, annotate
from testkit.command_line import runner
from testkit.commands import trajlake
from testkit.examples import mostly_slow
from testkit.lakes import RUN, add_credit, add_training, build_lake, sample_episodes, siblings
from testkit.streamlit_pages import SCREENS, assert_sound, open_page, words
from viewer import queries, server, session
from viewer.queries import ListWindow, training
from viewer.queries.compare import Side
from viewer.queries.episodes import EpisodeFilter
from viewer.queries.groups import GroupFilter
from viewer.reader import Reader

EPISODES = [*sample_episodes(), *siblings("late", [0.0, 1.0, 1.0], run_id="other", collection_round=2)]
SIBLINGS_APART = [EPISODES[0::2], EPISODES[1::2]]
_OF_A_WRITE = {"write_id", "sequence", "seconds", "files", "bytes", "data_snapshot", "content_hash", "before"}
_UNORDERED = {
    *("annotations.read_page", "episodes.read_scores", "groups.read_mean_scores"),
    *("episodes.read_excerpts", "transcripts.read_facts"),
}
"""What comes in no order that two lakes could share: none, or that of a random id."""
_SQL = "SELECT episode_id, task_id FROM episodes ORDER BY ALL"


def filled(lk: Lake) -> Lake:
    """What people and jobs say of the episodes that are there."""
    add_credit(lk)
    add_credit(lk, omega=0.25)
    add_training(lk)
    rows = lk.sql("SELECT run_id, group_id, episode_id, rollout_index / 4 AS value FROM episodes ORDER BY ALL")
    with lk.job(kind="score") as job:
        names = {"scorer": pl.lit("judge"), "scorer_version": pl.lit("1"), "step_index": pl.lit(None, pl.Int32)}
        job.write("scores", rows.with_columns(**names))
    with lk.job(kind="loop", run_id="looped") as job:
        names = ["loop/return", "loop/episodes", "loop/tokens", "loop/seconds"]
        at = pl.lit(job.now())
        job.write(
            "metrics", pl.DataFrame({"step": [0] * 4, "name": names, "value": [0.5, 8, 90, 2]}).with_columns(at=at)
        )
    annotate(lk, [Annotation(episode_id=one, value=0.5) for one in rows["episode_id"].head(3)], "ann")
    return lk


def parts(folder: Path, spread: list[list[EpisodeRecord]]) -> list[str]:
    """Lakes that hold the episodes between them."""
    return [build_lake(folder / "ab"[number], mine).uri for number, mine in enumerate(spread)]


@dataclass(frozen=True)
class World:
    """A lake, or several as one, and what the viewer's queries are asked about it."""

    lk: Lake

    @cached_property
    def reader(self) -> Reader:
        return Reader(self.lk.snapshot())

    @cached_property
    def jobs(self) -> dict[int, str]:
        """Names of the jobs, each told by its kind and its place among those of its kind; ids differ between worlds."""
        rows = self.lk.sql("SELECT job_id, kind FROM job_runs WHERE kind <> 'collect' ORDER BY started_at, job_id")
        seen: list[str] = []
        for kind in rows["kind"]:
            seen.append(f"{kind} {sum(one.startswith(kind) for one in seen)}")
        return dict(zip(rows["job_id"], seen, strict=True))

    @cached_property
    def written(self) -> dict[str, str]:
        """Names of the jobs by their ids as texts have them."""
        jobs = self.jobs.items()
        return {ids.to_text(job): name for job, name in jobs} | {str(job): name for job, name in jobs}

    def job(self, name: str) -> int:
        return next(job for job, known in self.jobs.items() if known == name)

    def of(self, task: str, column: str = "episode_id") -> int:
        query = (
            f"SELECT {column} FROM episodes WHERE task_id = ? AND run_id = ? ORDER BY rollout_index, episode_id LIMIT 1"
        )
        return int(self.lk.sql(query, [task, RUN]).item())

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """A value for each parameter that queries have, by its name; `module.function.name` before it."""
        snapshot = self.lk.snapshot()
        current, older = find_credit(snapshot, None), find_credit(snapshot, ids.to_text(self.job("credit 0")))
        train, episode = self.job("train 0"), self.of("mixed")
        anchor = self.lk.sql("SELECT anchor_key FROM advantages WHERE anchor_size > 1 ORDER BY 1 LIMIT 1").item()
        shown = self.lk.sql("SELECT episode_id FROM episodes ORDER BY 1 LIMIT 5")["episode_id"]
        everything = EpisodeFilter(score="judge", low=0.0)
        return {
            "anchor_key": anchor, "anchor_keys": [anchor], "axis": "collection_round", "by": "task_id",
            "required_id": None, "first": None, "before": None, "column": "initial_messages",
            "transcripts.read_text.column": "state",
            "credit": current, "current": current, "credit_a": current, "credit_b": older, "episode_id": episode,
            "side_a": Side(run=RUN), "side_b": Side(run="other"),
            "episode_ids": tuple(shown), "ends": ((episode, 1),), "first_state": 0, "job_ids": [train],
            "facet": "scorer",
            "pairs": "SELECT run_id AS value FROM episodes", "params": {}, "episodes.count_values.number": "count(*)",
            "rows": shown.to_frame(),
            "frame": pl.DataFrame({"t": ["hall"], "n": [4]}), "lengths": {"t": "n"},
            "page": shown.to_frame(), "tag": None, "encoding_id": 1, "token_ids": (1, 2),
            "hits": tuple((episode_id, 1) for episode_id in shown),
            "group_id": self.of("mixed", "group_id"),
            "group_ids": tuple(self.of(task, "group_id") for task in ("mixed", "dead")),
            "indices": [0, 1], "job_id": train, "kind": "credit",
            "training.summarise_credit.job_id": self.job("credit 1"),
            "label": "rating", "states": pl.DataFrame({"anchor_key": [anchor]}),
            "loop": training.Loop(self.job("loop 0"), train, "looped", "started", None, {}, {}),
            "number": 0, "runs": [RUN, "other"],
            "run_a": "looped", "run_b": "looped", "job_a": self.job("credit 0"), "job_b": self.job("credit 1"),
            "name": RUN, "order": None, "steps": [(episode, 0), (episode, 1)], "query": _SQL, "reason": None,
            "reject_id": 1, "run": RUN, "score": "judge", "series_id": 1, "side": Side(run=RUN), "sort": None,
            "status": None, "step": 1, "step_index": 1, "success_at": 1.0, "text": "hall", "update": 1,
            "episode_filter": everything, "group_filter": GroupFilter(everything), "within": "true",
            "training.look_up_credit.text": None, "named": (), "limit": 50, "window": ListWindow(1000),
        }  # fmt: skip

    def told(self, value: Any) -> Any:
        """An answer without what differs between two lakes that were written one after the other."""
        if isinstance(value, pl.DataFrame):
            return [self.told(row) for row in value.to_dicts()]
        if is_dataclass(value) and not isinstance(value, type):
            return self.told({name: getattr(value, name) for name in asdict(value)})
        if isinstance(value, Mapping):
            return {self.told(key): self.told(of) for key, of in value.items() if key not in _OF_A_WRITE}
        if isinstance(value, str):
            for text, name in self.written.items():
                value = value.replace(text, name)
            return value
        if isinstance(value, Iterable):
            return [self.told(one) for one in value]
        if isinstance(value, datetime | timedelta):
            return type(value)
        if isinstance(value, float):
            return float(f"{value:.9g}")  # sums may go through the files in another order
        return self.jobs.get(value, value) if isinstance(value, int) else value


QUERIES: dict[str, Callable[..., Any]] = {
    f"{module.name}.{name}": function
    for module in pkgutil.iter_modules(queries.__path__)
    for name, function in vars(importlib.import_module(f"{queries.__name__}.{module.name}")).items()
    if inspect.isfunction(function)
    and function.__module__ == f"{queries.__name__}.{module.name}"
    and not name.startswith("_")
    and name != "read_sizes"  # files of lakes that were written apart have other sizes
    and next(iter(inspect.signature(function).parameters), None) == "lake"
}


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> tuple[World, World]:
    """Two lakes as one, siblings apart, and one lake with the same episodes."""
    folder = tmp_path_factory.mktemp("several")
    joined = lake.open(parts(folder, SIBLINGS_APART))
    return World(filled(joined)), World(filled(build_lake(folder / "whole", EPISODES)))


class FromFiles(Reader):
    """A reader that holds nothing in memory."""

    def _run(self, query: str, params: Any = None) -> pl.DataFrame:
        with self._snapshot.session() as session:
            return session.query(query, params)


def answer_of(world: World, reader: Reader, name: str) -> Any:
    known, query = world.arguments, QUERIES[name]
    wanted = list(inspect.signature(query).parameters)[1:]
    assert set(wanted) <= known.keys(), "a value for each parameter of the query belongs into `World.arguments`"
    answer = world.told(query(reader, **{one: known.get(f"{name}.{one}", known.get(one)) for one in wanted}))
    return sorted(answer, key=repr) if name in _UNORDERED else answer


@pytest.mark.parametrize("name", mostly_slow(QUERIES, *list(QUERIES)[::6]))
def test_a_query_answers_from_memory_as_from_files(worlds: tuple[World, World], name: str) -> None:
    whole = worlds[1]
    assert answer_of(whole, whole.reader, name) == answer_of(whole, FromFiles(whole.lk.snapshot()), name)


@pytest.mark.parametrize("name", mostly_slow(QUERIES, *list(QUERIES)[::2]))
def test_a_query_over_two_lakes_is_that_over_one_with_the_same_episodes(worlds: tuple[World, World], name: str) -> None:
    answers = [answer_of(world, world.reader, name) for world in worlds]
    assert answers[0] == answers[1]


@pytest.fixture
def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Lake, Lake]:
    """Two lakes, with a run in each, that this process shows as one."""
    uris = parts(tmp_path, [sample_episodes(), siblings("late", [0.0, 1.0], run_id="other")])
    monkeypatch.setenv(server.ENVIRONMENT, "")
    server.set_lakes(tuple(uris))
    session.refresh()
    return lake.open(uris[0]), lake.open(uris[1])


def test_pages_open_on_two_lakes_and_write_where_the_row_is(
    shown: tuple[Lake, Lake], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = shown
    for name in SCREENS:
        open_page(name)
    late = second.sql("SELECT min(episode_id) FROM episodes").item()
    at = open_page("episode", episode=late)
    at.session_state["annotations"] = True
    at.run()
    at.number_input(key="annotation-value").set_value(0.25)
    next(button for button in at.button if button.label == "Add").click()
    assert_sound(at.run())
    written = "SELECT episode_id, value FROM annotations"
    assert (first.sql(written).rows(), second.sql(written).rows()) == ([], [(late, 0.25)])
    with pytest.raises(UsageError, match="shows episode"):
        session.get_viewed_lake().lake.home(1)

    save_view(second.snapshot().objects, "theirs", "/groups", "bob")
    at = open_page("groups", task="m*")
    at.session_state["views"] = True
    assert_sound(at.run())
    assert "theirs" in words(at)
    for name, label in (("ours", "Save this page"), ("theirs", "Remove the name")):
        at.text_input(key="view-name").set_value(name)
        next(button for button in at.button if button.label == label).click()
        assert_sound(at.run())
    assert [view.name for view in read_saved_views(first.snapshot().objects)] == ["ours"]
    assert read_saved_views(second.snapshot().objects) == []

    lines = [shlex.split(code.value) for code in open_page("episodes", run="other", min="0.5").code]
    printed = {(line[1], *line[2:6:2]): line[1:] for line in lines}
    assert [line[1] for line in lines] == ["export", "select", "retract", "retract"]
    run = runner(monkeypatch, capsys)
    for line in lines[1:]:
        assert run(*line[1:]).code == 0, printed
    assert first.sql("SELECT count(*) FROM selections WHERE kept").item() == 1
    assert first.sql("SELECT count(*) FROM episodes").item() == len(sample_episodes())
    assert second.sql("SELECT env_return FROM episodes WHERE run_id = 'other'")["env_return"].to_list() == [0.0]


def test_the_command_takes_several_lakes_and_names_a_missing_one(tmp_path: Path) -> None:
    build_lake(tmp_path / "a")
    ended = trajlake("view", "--lake", str(tmp_path / "a"), "--lake", str(tmp_path / "b"), "--no-browser")
    assert ended.returncode == 1
    assert f"{tmp_path / 'b'} does not exist" in ended.stderr
