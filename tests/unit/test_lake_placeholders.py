"""Tokens of an image are placeholders: from it on, steps are not trained on, and the row says why."""

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner

import lake
from lake.cli import trajlake
from lake.formats.base.rows import mark_untrainable_steps
from lake.read.episode_text import format_episode, read_episode
from lake.records import EpisodeRecord, StepRecord, TokensRecord

TEXT = {"role": "user", "content": [{"type": "text", "text": "what is it?"}, {"type": "input_text", "text": "say"}]}
IMAGE = {"role": "user", "content": [TEXT["content"][0], {"type": "image_url", "image_url": {"url": "data:,x"}}]}  # type: ignore[index]
TOKENS = TokensRecord(context_ids=[1], action_ids=[2])


def steps(*step_fields: dict[str, Any]) -> list[StepRecord]:
    return [
        StepRecord(**{"state": "what is it?", "action": "a cat", "tokens": TOKENS, **fields}) for fields in step_fields
    ]


def marks(*fields: dict[str, Any], first: Any = TEXT) -> list[bool]:
    return [
        step.trainable
        for step in mark_untrainable_steps(EpisodeRecord(task_id="t", initial_messages=[first], steps=steps(*fields)))
    ]


def test_from_the_first_image_on_no_step_with_tokens_is_trained_on() -> None:
    assert marks({}, {"context": [TEXT]}, {}) == [True, True, True]
    assert marks({}, {"context": [TEXT, IMAGE]}, {"context": [TEXT]}) == [True, False, False]
    assert marks({}, {}, first=IMAGE) == [False, False]
    assert marks({"extra": {"content": [{"type": "input_audio"}]}}, {}) == [False, False]
    assert marks({"tokens": None}, {}, first=IMAGE) == [True, False], "rendering refuses the first"


def test_what_is_read_is_marked_says_why_and_leaves_as_the_same_episode(tmp_path: Path) -> None:
    tokens = {"context_ids": [1], "action_ids": [2]}
    step = {"state": "what is it?", "action": "a cat", "tokens": tokens, "extra": {"id": "x"}}
    (tmp_path / "a.jsonl").write_text(json.dumps({"task_id": "t", "initial_messages": [IMAGE], "steps": [step]}))
    lk = lake.open(tmp_path / "lake", create=True)
    lk.ingest(tmp_path / "a.jsonl", run_id="r")
    (row,) = lk.sql("SELECT trainable, extra FROM steps").to_dicts()
    assert not row["trainable"]
    extra = json.loads(row["extra"])
    assert "'image_url'" in extra.pop("not_trainable")
    assert extra == {"id": "x"}
    done = CliRunner().invoke(trajlake, ["export", "--lake", str(tmp_path / "lake"), "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert lk.ingest(tmp_path / "out", run_id="r").present == 1
    lines = [
        line
        for _, line in format_episode(read_episode(lk.snapshot(), lk.sql("SELECT episode_id FROM episodes").item()))
    ]
    assert "    [image_url]" in lines
