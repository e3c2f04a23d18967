"""`trajlake prompts` before a scripted endpoint that plays the demo's game as well as its prompt is, and reflects.

The endpoint stands in for two models (`testkit.prompt_server`); everything else is real: processes, HTTP, the lake.
"""

import json
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl
import pytest

import lake
from testkit.judge_server import JudgeServer
from testkit.processes import Forked
from testkit.prompt_server import prompt_server

FIRST = "Answer with one short sentence."
DEADLINE = 600
OWN = ("write_id", "job_id", "series_id", "at")
"""Columns that say who wrote a row, and when."""


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    with prompt_server() as server:
        yield server


def playing(server: JudgeServer, folder: Path) -> list[str]:
    """Options of a small search."""
    options = ["--lake", str(folder / "lake"), "--env", "house", "--env-arg", "rooms=2", "--env-arg", "horizon=8"]
    options += ["--engine", server.url, "--model", "player", "--first", FIRST]
    options += ["--set", "player.api=chat", "--set", "player.sampling.max_tokens=8"]
    return [*options, "--set", "starts=4", "--set", "held_out=6", "--set", "group_size=2", "--run", "s"]


def reflecting(server: JudgeServer) -> list[str]:
    options = ["--reflect", server.url, "--set", "reflection.model=reflector", "--rounds", "2"]
    return [*options, "--set", "candidates=3", "--set", "beam=2"]


def content(folder: Path) -> dict[str, pl.DataFrame]:
    """All that a search's tables say, but who wrote it."""
    lk = lake.open(folder / "lake")
    tables = {}
    for name, keys in (("episodes", ["episode_id"]), ("steps", ["episode_id", "step_index"])):
        tables[name] = lk.scan(name).collect().drop(*OWN, strict=False).sort(keys)
    columns = "run_id, status, parameters, counts"
    tables["jobs"] = lk.sql(f"SELECT {columns} FROM job_runs WHERE kind = 'prompts' ORDER BY started_at")
    return tables


def decided(folder: Path) -> list[dict[str, Any]]:
    """Counts of the search's jobs, in their order."""
    return [json.loads(counts) for counts in content(folder)["jobs"]["counts"]]


def first_turn(body: dict[str, Any]) -> bool:
    return len(body["messages"]) == 2 and body["model"] == "player"


def same(candidate: dict[str, Any], out: Path) -> bool:
    return bool(candidate["text"] == out.read_text("utf-8").strip())


class Searching(Forked):
    """A search in a process of its own."""

    def __init__(self, folder: Path, *options: str) -> None:
        super().__init__("testkit.collect_worker", folder / "spool", "prompts", *options)

    def ended(self) -> str:
        """What it printed; waits for its end, which has to be a good one."""
        lines = []
        while (line := self.hear(DEADLINE)) is not None:
            lines.append(line)
        assert self.wait() == 0, self.error
        return "\n".join(lines)


def after_requests(server: JudgeServer, count: int, process: Searching) -> None:
    """Wait until the server was asked so often more, or the process has ended."""
    goal, pause = len(server.requests) + count, threading.Event()
    while len(server.requests) < goal and process.running:
        pause.wait(0.002)


def usual(server: JudgeServer, folder: Path) -> list[str]:
    return [*playing(server, folder), *reflecting(server)]


def small(server: JudgeServer, folder: Path) -> list[str]:
    """Options of a search that is as small as one with decisions can be."""
    sizes = ["--set", "starts=2", "--set", "held_out=3", "--set", "candidates=2", "--rounds", "1"]
    return [*usual(server, folder), *sizes]


def asked_to_reflect(server: JudgeServer) -> int:
    return sum(body["model"] == "reflector" for body in server.requests)


@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_at_random_moments_a_search_ends_as_if_nothing_had_happened(
    kills: int, server: JudgeServer, tmp_path: Path
) -> None:
    undisturbed, killed = tmp_path / "whole", tmp_path / "killed"

    def searching(folder: Path) -> Searching:
        return Searching(folder, *(small(server, folder) if kills == 1 else usual(server, folder)))

    ending = searching(undisturbed).ended()
    requests, reflections = len(server.requests), asked_to_reflect(server)
    draw = random.Random(kills)
    for _ in range(kills):
        process = searching(killed)
        after_requests(server, draw.randrange(1, 2 * requests // (kills + 1)), process)
        process.kill()
    assert searching(killed).ended() == ending
    frames = content(killed)
    for name, frame in content(undisturbed).items():
        assert frames[name].equals(frame), name
    # What was answered is not asked again, but for what was under way at each kill: a round asks for 2 prompts at once,
    # and the 8 rollouts of a candidate (12 of held-out starts) have a decision each under way.
    assert 0 <= asked_to_reflect(server) - 2 * reflections <= 2 * kills
    assert 0 <= len(server.requests) - 2 * requests <= 2 * 12 * kills


class Rounds(NamedTuple):
    """A search whose command ran for one round, the same again, and for one more round."""

    folder: Path
    server: JudgeServer
    said: list[str]
    """By each command."""
    asked: list[int]
    """Requests until the end of each."""


@pytest.fixture(scope="module")
def rounds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rounds]:
    folder = tmp_path_factory.mktemp("rounds")
    with prompt_server() as server:
        search = Rounds(folder, server, [], [])
        for count in ("1", "1", "2"):
            options = (*usual(server, folder), "--rounds", count, "--out", str(folder / "best.txt"))
            search.said.append(Searching(folder, *options).ended())
            search.asked.append(len(server.requests))
        yield search


def test_what_is_done_is_not_done_again_and_more_rounds_go_on(rounds: Rounds) -> None:
    assert rounds.said[1] == rounds.said[0]
    assert rounds.asked[1] == rounds.asked[0] < rounds.asked[2]
    compared = [row["best"] for row in decided(rounds.folder) if "best" in row]
    assert len(compared) == 2, "after each number of rounds that was wanted"
    assert ("one after the other" in rounds.said[2]) is (len(set(compared)) > 1)


def test_reflection_finds_a_better_prompt_and_everything_is_rows(rounds: Rounds) -> None:
    tmp_path, server, out = rounds.folder, rounds.server, rounds.folder / "best.txt"
    first, second, _, third, held_out = decided(tmp_path)
    best = third["standings"][0]
    assert best["difference"] > 0
    assert best["candidate"] in rounds.said[2]
    assert held_out["best"] == best["candidate"]
    assert held_out["difference"] > 0
    assert held_out["test"] == "exact"
    assert "held out, 6 starts" in rounds.said[2]
    (text,) = [
        candidate["text"] for each in (first, second, third) for candidate in each["candidates"] if same(candidate, out)
    ]
    assert text.startswith(FIRST)

    lk = lake.open(tmp_path / "lake")
    runs = lk.sql(
        "SELECT run_id, policy, count(*) AS n, any_value(initial_messages) AS said FROM episodes GROUP BY ALL"
    )
    of_run = {row["run_id"]: row for row in runs.to_dicts()}
    for each in (first, second, third):
        for candidate in each["candidates"]:
            key = lake.ids.to_text(lake.ids.text_hash(candidate["text"]))
            row = of_run[f"s.{key}"]
            assert row["policy"] == f"player+{key}"
            assert row["n"] == 8
            assert json.loads(row["said"])[0] == {"role": "system", "content": candidate["text"]}
    seeds = lk.sql("SELECT DISTINCT run_id, list(seed ORDER BY seed) AS seeds FROM episodes GROUP BY run_id")
    of_search = seeds.filter(pl.col("run_id").str.starts_with("s.") & ~pl.col("run_id").str.contains("reflect|held"))
    assert of_search["seeds"].n_unique() == 1, "all candidates play the same starts"
    of_held_out = seeds.filter(pl.col("run_id").str.contains("held-out"))
    assert of_held_out["seeds"].n_unique() == 1
    assert not set(of_held_out["seeds"][0]) & set(of_search["seeds"][0])
    sampled = [
        {
            body["seed"]
            for body in server.requests
            if body["messages"][0]["content"] == candidate["text"] and first_turn(body)
        }
        for each in (first, second, third)
        for candidate in each["candidates"]
    ]
    assert set.intersection(*sampled) == min(sampled, key=len), "with the same seeds"
    assert len(min(sampled, key=len)) == 8
    metrics = lk.sql("SELECT name FROM metrics WHERE name LIKE '%best' OR name LIKE 'held_out%'")["name"].to_list()
    assert sorted(metrics) == [*["held_out/difference"] * 2, *["held_out/p"] * 2, *["return/best"] * 3]
