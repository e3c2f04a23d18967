"""examples/rubric_manager by the commands of its README, in a copy."""

from pathlib import Path

import pytest

import lake
from testkit.example_pages import Example, free_port
from testkit.vllm_server import vllm_python


def prepared(example: Example) -> None:
    """The commands before the engine, which print what the page says."""
    for beginning in ("python script.py", "trajlake ingest", "trajlake init-model"):
        example.prints_as_the_page_says(beginning)


def test_what_the_page_prints_before_the_engine_is_started(tmp_path: Path) -> None:
    prepared(Example("rubric_manager", tmp_path / "example"))


@pytest.mark.slow
def test_the_loop_runs_as_the_page_says_and_earns_more(tmp_path: Path) -> None:
    port = free_port()
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "TRAJLAKE_ENGINE_PYTHON": str(vllm_python())}
    example = Example("rubric_manager", tmp_path / "example", settings=settings, ports={8000: port})
    prepared(example)
    config = example.folder / "loop.toml"
    config.write_text(config.read_text("utf-8").replace(":8000", f":{port}"), "utf-8")
    with example.running("trajlake serve"):
        said = example.run("trajlake loop")
    assert "sft: 76 updates, run/sft/final" in said
    assert "8 rounds, 8 updates; ended by rounds; the model is in run/final" in said
    lk = lake.open(example.folder / "L")
    answers, constrained, questions = lk.sql((example.folder / "answers.sql").read_text("utf-8")).row(0)
    assert answers == constrained > questions > 0
    before, after = lk.sql((example.folder / "quality.sql").read_text("utf-8")).to_dicts()
    assert after["reward"] > before["reward"]
    assert after["agreement_f1"] is not None
