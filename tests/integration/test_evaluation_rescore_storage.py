"""Where checkpoints and lakes may be: adapters, shards of several ranks, both, buckets; always the same numbers."""

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from polars.testing import assert_frame_equal

import lake
from lake import Lake
from testkit import rank_tasks
from testkit.command_line import Cli, runner
from testkit.object_store import Store
from testkit.ranks import on_ranks
from testkit.sampled_lake import one_by_one, play, recorded, save_model, save_near
from trainer.backends.ranks import ALONE
from trainer.evaluation.ope import evaluate
from trainer.evaluation.ratios import find_rescored
from trainer.evaluation.rescore import load_scoring_code, rescore

KEYS = ["episode_id", "step_index"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_near(folder / "e", save_model(folder / "b"), 0.004)
    return folder


@pytest.fixture
def lk(tmp_path: Path, models: Path) -> Lake:
    return recorded(tmp_path / "lake", play(models / "b", tasks=4, siblings=15))


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    return runner(monkeypatch, capsys)


def fields_of(models: Path, **fields: Any) -> dict[str, Any]:
    common = {"model": str(models / "b"), "loss": "sft", "episodes_per_step": 20, "threads": 1, "checkpoint_every": 2}
    return common | {"learning_rate": 1e-3} | fields


def assert_scored_like(lk: Lake, series_id: int, model: Path) -> None:
    """The rows of a series are what transformers alone computes with a model."""
    rows = lk.scan("ratios").filter(pl.col("series_id") == series_id).collect()
    expected = one_by_one(model, lk)
    assert set(rows.select(KEYS).iter_rows()) == expected.keys()
    for row in rows.iter_rows(named=True):
        assert row["logprobs"] == pytest.approx(expected[row["episode_id"], row["step_index"]], abs=1e-4)


def test_adapters(lk: Lake, models: Path, tmp_path: Path) -> None:
    """A checkpoint holds them alone; it is scored as the model that they are merged into."""
    pytest.importorskip("peft", reason="needs trajlake[lora]")
    fields = fields_of(models, lora={"rank": 2}, learning_rate=1e-4)
    rank_tasks.whole_run(ALONE, lk.uri, str(tmp_path / "adapted"), fields)
    report = rescore(lk, "adapted")
    assert report.checkpoint == "adapted@3"
    assert_scored_like(lk, report.series_id, tmp_path / "adapted" / "final")
    rescore(lk, str(models / "b"))
    assert report.series_id != find_rescored(lk.snapshot(), "b").series_id
    rows = evaluate(lk.snapshot(), "adapted", "b").rows.filter(estimator="pdis").to_dicts()
    assert rows[0]["value"] is not None
    assert rows[0]["ess_share"] < 1


@pytest.mark.parametrize("lora", [pytest.param(True, marks=pytest.mark.slow), False])
def test_shards_of_two_ranks(models: Path, tmp_path: Path, lora: bool) -> None:
    lk = recorded(tmp_path / "lake", play(models / "b", tasks=2, siblings=6))
    if lora:
        pytest.importorskip("peft", reason="needs trajlake[lora]")
    fields = fields_of(models, episodes_per_step=4, **({"lora": {"rank": 2}} if lora else {}))
    on_ranks(2, rank_tasks.whole_run, lk.uri, str(tmp_path / "sharded"), fields)
    (folder,) = (tmp_path / "sharded" / "checkpoints").glob("step-00000003-*")
    assert (folder / "weights").is_dir()
    report = rescore(lk, "sharded@3")
    assert_scored_like(lk, report.series_id, tmp_path / "sharded" / "final")
    assert rescore(lk, str(folder)).present == report.scored
    final = rescore(lk, str(tmp_path / "sharded"))
    assert (final.weights_sha256 == report.weights_sha256) == (not lora), "merged weights are other weights"


@pytest.mark.slow
def test_a_lake_in_a_bucket(models: Path, tmp_path: Path, s3: Store, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scored, evaluated and counted like one in a folder."""
    episodes = play(models / "b", tasks=4, siblings=15)
    local = recorded(tmp_path / "lake", episodes)
    remote = lake.open(s3.root, create=True, storage_options=s3.options)
    with remote.job(kind="collect", run_id="games") as job:
        job.record(episodes)
    report_rows = []
    for lk in (local, remote):
        reports = [rescore(lk, str(models / name)) for name in ("b", "e")]
        again = rescore(lk, str(models / "e"))
        assert (again.scored, again.present) == (0, reports[1].scored)
        rows = lk.scan("ratios").sort("series_id", *KEYS).select(*KEYS, "checkpoint", "logprobs", "log_ratio").collect()
        report_rows.append((rows, evaluate(lk.snapshot(), "e", "b").rows))
    assert report_rows[0][0].equals(report_rows[1][0])
    assert report_rows[0][1].equals(report_rows[1][1])
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    for command in (
        ["eval", "--k", "1,2"],
        ["ope", "--target", "e", "--behaviour", "b"],
        ["rescore", str(models / "e")],
    ):
        local_command, bucket_command = (
            cli(*command, "--lake", uri, "--format", "json") for uri in (local.uri, s3.root)
        )
        assert (local_command.code, bucket_command.code) == (0, 0), bucket_command.err
        # DuckDB's threads add in any order, so figures of the same rows differ in their last digits.
        ours, theirs = (pl.DataFrame(json.loads(result.out)) for result in (local_command, bucket_command))
        assert ours.height
        assert_frame_equal(theirs, ours, rel_tol=1e-9)


def test_a_series_is_of_all_code_that_decides_a_number() -> None:
    """An upgrade that changes attention, the model or what a token's context is must not mix with what was scored."""
    names = {module.__name__.removeprefix("trainer.") for module in load_scoring_code()}
    assert {"policy.attention", "policy.model", "policy.model_files"} <= names
    assert {"data.selection", "data.sequences", "data.stream", "data.collate"} <= names
    assert {"evaluation.scoring", "evaluation.ratios"} <= names
