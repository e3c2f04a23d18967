"""`trajlake prompts` with a model in this process: a tiny one with random weights, whose returns are what they are."""

import json
from pathlib import Path

import pytest

import lake
from testkit.chat_models import tokenizer_of
from testkit.command_line import runner
from testkit.training import random_model


def test_a_model_in_this_process_is_told_each_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cli = runner(monkeypatch, capsys)
    monkeypatch.setenv("TRAJLAKE_SPOOL", str(tmp_path / "spool"))
    tokenizer = tokenizer_of("chatml")
    tokenizer.save_pretrained(tmp_path / "tiny")
    random_model(vocabulary=len(tokenizer)).save_pretrained(tmp_path / "tiny")
    options = ["--lake", tmp_path / "lake", "--env", "house", "--env-arg", "horizon=3", "--model", tmp_path / "tiny"]
    options += ["--max-tokens", "4", "--starts", "2", "--held-out", "2", "--group-size", "2", "--run", "s"]
    found = cli("prompts", *options, "--first", "", "--candidate", "Find the key first.")
    assert found.code == 0, found.err
    rows = lake.open(tmp_path / "lake").sql(
        "SELECT policy, initial_messages[1:60] AS said, env_return, policy_version FROM episodes ORDER BY policy, said"
    )
    assert rows.height == 8
    assert rows["policy"].n_unique() == 2
    assert all(name.startswith("tiny+") for name in rows["policy"])
    assert rows["said"].str.contains('"system"').sum() == 4
    assert rows["env_return"].null_count() == 0
    counts = lake.open(tmp_path / "lake").sql("SELECT counts FROM job_runs WHERE kind = 'prompts'")["counts"][0]
    assert [one["mean"] for one in json.loads(counts)["standings"]] == [0.0, 0.0]
