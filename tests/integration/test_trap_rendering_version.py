"""Trap: text that an older version tokenised otherwise stays in the lake, and must not be trained on as our own."""

from pathlib import Path

import pytest

from lake.errors import DataRefusedError
from testkit.lakes import build_lake
from testkit.offline_runs import configured, interrupted
from testkit.wording import Wording
from trainer.data import render
from trainer.policy.tiny_model import TinyModelConfig, make_tiny_model
from trainer.runs.offline import resume, train


def test_text_is_tokenised_again_after_its_rendering_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    lk = build_lake(tmp_path / "lake")
    model = tmp_path / "model"
    make_tiny_model(lk.snapshot(), model, TinyModelConfig(vocabulary=300, hidden_size=32))
    now = render.RENDERING
    monkeypatch.setattr(render, "RENDERING", now - 1)
    interrupted(lk, configured(model, checkpoint_every=1), tmp_path / "old", 2)
    monkeypatch.setattr(render, "RENDERING", now)
    with pytest.raises(DataRefusedError, match="another version of trajlake") as caught:
        resume(lk, tmp_path / "old")
    wording(str(caught.value).partition(") ")[2])
    result = train(lk, configured(model), tmp_path / "new", run_id="new")
    assert result.notes == ["rendered: 24 rendered, 0 present"]
    rows = lk.sql("SELECT count(*) AS rows FROM tokens GROUP BY encoding_id")["rows"].to_list()
    assert len(rows) == 2
    assert rows[0] == rows[1]
