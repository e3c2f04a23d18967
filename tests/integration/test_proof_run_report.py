"""The report of the proof run: figures that agree with what the loop decided by, and a page in step with them."""

import json
from pathlib import Path

import pytest

import lake
from benchmarks.ladder.report import BEGIN, END
from benchmarks.proof_run.figures import figures
from benchmarks.proof_run.report import tables, write_report
from benchmarks.proof_run.start import SFT
from lake.errors import UsageError
from testkit.loops import looped, write_config
from testkit.word_game import save_model
from trainer.config import TrainConfig
from trainer.online.settings import read_config
from trainer.runs.offline import train

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_figures_are_those_of_the_loop(tmp_path: Path) -> None:
    """On a word game, played and trained in this process."""
    model = save_model(tmp_path / "random")
    settings = {"rounds": 2, "evaluation": {"every": 1000}}
    done = looped(tmp_path, read_config(str(write_config(tmp_path, model)), {"loop": settings}))
    lk = lake.open(tmp_path / "lake")
    sft = TrainConfig(model=str(model), loss="sft", where="run_id = 'asking'", threads=1)
    trained = train(lk, sft, tmp_path / "sft", run_id=SFT)
    actual = figures(lk, "asking")
    of, (first, last) = actual["evaluation"], (done.evaluations[0], done.evaluations[2])
    assert (of["starts"], of["before"], of["after"]) == (6, first.success * 6, last.success * 6)
    assert of["after"] - of["before"] == of["gained"] - of["lost"] == pytest.approx(6 * of["difference"])
    assert sum(row["updates"] for row in actual["rounds"]) == done.optimizer_steps
    assert sum(row["tokens"] for row in actual["rounds"]) == actual["tokens"]["rounds"]["tokens"]
    assert actual["sft"]["updates"] == trained.optimizer_steps
    assert (actual["attempts"], actual["weights_sha256"]) == (1, done.weights_sha256)
    assert f"| after the rounds | {of['after']} of 6 |" in tables(json.loads(json.dumps(actual)))


def test_a_run_that_has_not_ended_has_no_report(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has not ended"):
        figures(lake.open(tmp_path / "lake", create=True), "proof")


def test_the_page_is_in_step_with_its_figures(tmp_path: Path) -> None:
    for name in ("proof-run.md", "proof-run.json"):
        (tmp_path / name).write_text((DOCS / name).read_text())
    write_report(None, tmp_path / "proof-run.md")
    assert (tmp_path / "proof-run.md").read_text() == (DOCS / "proof-run.md").read_text()


def test_a_page_without_a_place_for_tables_is_refused(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("# Nothing\n")
    with pytest.raises(ValueError, match=f"{BEGIN} and {END}"):
        write_report(None, tmp_path / "page.md")
