"""examples/rubric_manager by the commands of its README, in a copy."""

import asyncio
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import lake
from pipelines.collect.environments import Task
from pipelines.collect.environments.loading import load_environment
from testkit.example_pages import Example, free_port
from testkit.judge_server import serving
from testkit.vllm_server import vllm_python

SCORES = ("rubrics.py:written", "rubrics.py:truth", "rubrics.py:f1", "rubric_terms", "--reward")


def prepared(example: Example) -> None:
    """The commands before the engine, which print what the page says."""
    for beginning in ("python script.py", "trajlake ingest", "trajlake init-model"):
        example.prints_as_the_page_says(beginning)


def quality(example: Example, run: str) -> list[dict[str, Any]]:
    """The page's table of what the reward is worth, of one run."""
    rows = lake.open(example.folder / "L").sql((example.folder / "quality.sql").read_text("utf-8"))
    return rows.filter(pl.col("run") == run).to_dicts()


def test_what_the_page_prints_before_the_engine_is_started(tmp_path: Path) -> None:
    """The script's rubrics are judged on texts of the worker: a better rubric earns more."""
    example = Example("rubric_manager", tmp_path / "example")
    prepared(example)
    for target in SCORES:
        example.run(f"trajlake score {target}")
    (worth,) = quality(example, "script")
    assert (worth["rubrics"], worth["reward"], worth["f1"]) == (600, -0.096, 0.52)
    assert worth["reward_f1"] > 0.6
    assert worth["agreement_f1"] > 0.5
    example.prints_as_the_page_says("trajlake show")


def test_a_model_behind_a_url_writes_the_texts_that_are_judged(tmp_path: Path) -> None:
    """By the manager's criteria, each under its own seed."""
    folder = Example("rubric_manager", tmp_path / "example").folder
    rubric = {"role": "assistant", "content": '{"criteria": ["steps", "costs"]}'}

    async def played(url: str) -> list[Any]:
        arguments = {"worker": url, "worker_model": "writer", "texts": 2}
        environment = load_environment(f"{folder / 'environment.py'}:make", arguments)()
        await environment.reset(Task(seed=7))
        return (await environment.step(rubric)).messages

    with serving(lambda body: f"text {body['seed']}") as server:
        outcome = asyncio.run(played(server.url.removesuffix("/v1")))
    assert outcome == [{"role": "user", "name": "worker", "content": f"text {seed}"} for seed in (700, 701)]
    assert [body["model"] for body in server.requests] == ["writer"] * 2
    assert all("steps, costs" in body["messages"][0]["content"] for body in server.requests)


@pytest.mark.slow
def test_the_loop_runs_as_the_page_says_and_earns_more(tmp_path: Path) -> None:
    port = free_port()
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "TRAJLAKE_ENGINE_PYTHON": str(vllm_python())}
    example = Example("rubric_manager", tmp_path / "example", settings=settings, ports={8000: port})
    prepared(example)
    config = example.folder / "loop.toml"
    config.write_text(config.read_text("utf-8").replace(":8000", f":{port}"), "utf-8")
    with example.running("trajlake serve"):
        printed = example.run("trajlake loop")
    assert "sft: 76 updates, run/sft/final" in printed
    assert "8 rounds, 8 updates; ended by rounds; the model is in run/final" in printed
    lk = lake.open(example.folder / "L")
    rounds = lk.sql((example.folder / "answers.sql").read_text("utf-8")).to_dicts()
    assert [row["round"] for row in rounds] == list(range(8))
    for row in rounds:
        assert row["constrained"] == row["tokens"] > 0, "every token was sampled under the grammar"
        assert 0 < row["questions"] < row["answers"]
        assert row["episodes"] == 128
    before, after = quality(example, "run-eval")
    assert after["reward"] > before["reward"]
    assert before["reward_f1"] > 0.3, "a better rubric earns more on what the worker wrote by it"
