"""examples/stepdata_to_ppo by the commands of its README, in a copy: StepData reaches a PPO update."""

import json
from pathlib import Path

import pytest

import lake
from testkit.example_pages import Example

pytestmark = pytest.mark.slow("StepData of a rollout worker becomes advantages and a PPO update")


def test_the_page_runs_from_step_data_to_an_update_that_earns_more(tmp_path: Path) -> None:
    example = Example("stepdata_to_ppo", tmp_path / "example", settings={"TRAJLAKE_SPOOL": str(tmp_path / "spool")})
    for beginning in (
        "python worker.py scripted",
        "trajlake init-model",
        "trajlake train --lake L --model fresh",
        "python worker.py play --run before",
        """trajlake score reward.py:treasure --lake L --where "run_id = 'before'\"""",
    ):
        example.prints_as_the_page_says(beginning)
    lk = lake.open(example.folder / "L")
    sampled = lk.sql("SELECT DISTINCT temperature, top_p, top_k FROM tokens WHERE run_id = 'before'")
    assert sampled.rows() == [(1.0, 1.0, 0)]
    example.prints_as_the_page_says("trajlake credit gigpo --lake")
    example.prints_as_the_page_says("trajlake credit gigpo --log-level debug")
    example.run("trajlake show --lake L")
    saved = [json.loads(line) for line in (example.folder / "saved.jsonl").read_text("utf-8").splitlines()]
    assert len(saved) == 32
    for step in (step for line in saved for step in line["steps"]):
        assert None not in (step["advantage"], step["a_step"], step["return_to_go"], step["logprob"])
        assert [score["scorer"] for score in step["scores"]] == ["treasure"]
    example.prints_as_the_page_says("trajlake show saved.jsonl")
    example.prints_as_the_page_says("trajlake train --lake L --model imitation/final")
    first = json.loads((example.folder / "updated" / "metrics.jsonl").read_text("utf-8").splitlines()[0])
    assert first["ratio"] == pytest.approx(1.0, abs=1e-4), "of what the worker sampled"
    assert first["logprobs_missing"] == 0
    example.prints_as_the_page_says("python worker.py play --run after")
    example.run("""trajlake score reward.py:treasure --lake L --where "run_id = 'after'\"""")
    before, after = json.loads(example.run("trajlake sql"))
    assert (before["run_id"], after["run_id"]) == ("before", "after")
    assert after["opened"] > before["opened"]
    assert after["score"] > before["score"]
