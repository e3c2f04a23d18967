"""What the disk, or an agent's judgement, does to a recording is reported, and costs no more than it has to."""

import errno
from pathlib import Path
from typing import Any

import pytest

import lake
from lake.live.delivery import EpisodeLog
from lake.live.frames import (
    BeginFrame,
    EndFrame,
    Frame,
    RewardFrame,
    ScoreFrame,
    StepFrame,
    assemble_frames,
    encode,
    new_key,
)
from lake.live.spool import Spool
from lake.records import EpisodeRecord, Reject, ScoreRecord, StepRecord
from testkit.copies import empty_lake


def begin() -> BeginFrame:
    return BeginFrame(episode=EpisodeRecord(task_id="t", run_id="r", rollout_index=1, steps=[], source_format="live"))


def step(index: int) -> StepFrame:
    return StepFrame(index=index, step=StepRecord(state="s", action=f"a{index}"))


def record_of(*frames: Frame) -> EpisodeRecord:
    (record,) = assemble_frames([begin(), *frames])
    assert isinstance(record, EpisodeRecord)
    return record


def rows(folder: Path, query: str) -> list[tuple[Any, ...]]:
    return lake.open(folder / "lake").sql(query).rows()


def test_a_spool_that_cannot_be_read_at_the_end_is_kept_for_the_next_recorder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty_lake(tmp_path / "lake")
    options = {"run": "r", "spool": tmp_path / "spool", "batch_seconds": 3600}
    recorder = lake.recorder(tmp_path / "lake", **options)
    with recorder.episode("t") as episode, episode.step(state="s") as step_frame:
        step_frame.action("a")

    def broken(_: EpisodeLog) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(EpisodeLog, "refresh", broken)
        assert not recorder.close()
    with lake.recorder(tmp_path / "lake", **options):
        pass
    assert rows(tmp_path, "SELECT task_id, num_steps FROM episodes") == [("t", 1)]


def test_an_episode_that_lost_a_frame_to_the_disk_is_a_reject_and_never_half(tmp_path: Path) -> None:
    empty_lake(tmp_path / "lake")
    spool, damaged, undamaged = Spool.create(tmp_path / "spool"), new_key(), new_key()
    for number, frame in ((0, begin()), (1, step(0)), (3, step(2)), (4, EndFrame())):
        spool.append(encode(damaged, number, frame))
    other_begin = begin()
    other_begin.episode.task_id = "other"
    for number, frame in enumerate((other_begin, step(0), EndFrame())):
        spool.append(encode(undamaged, number, frame))
    assert spool.sync(10)
    spool.close()
    with lake.recorder(tmp_path / "lake", run="r", spool=tmp_path / "spool") as recorder:
        assert recorder.flush()
        assert recorder.stats().rejected == 1
    assert rows(tmp_path, "SELECT task_id FROM episodes") == [("other",)]
    ((message,),) = rows(tmp_path, "SELECT message FROM rejects")
    assert message.startswith("1 of its frames")


def test_a_spool_whose_files_are_deleted_says_so_and_goes_on(tmp_path: Path) -> None:
    spool = Spool.create(tmp_path / "spool")
    spool.append(encode(new_key(), 0, begin()))
    assert spool.sync(10)
    for segment in spool.folder.glob("*.frames"):
        segment.unlink()
    spool.append(encode(new_key(), 0, begin()))
    assert spool.sync(10), "into another file"
    assert list(spool.folder.glob("*.frames"))
    spool.close(remove=True)


def test_a_judgement_of_a_step_that_was_not_recorded_is_not_the_episodes() -> None:
    stray = ScoreFrame(score=ScoreRecord(scorer="judge", value=-1.0, step_index=7))
    score_frame = ScoreFrame(score=ScoreRecord(scorer="judge", value=1.0))
    record = record_of(step(0), RewardFrame(value=3.0, step_index=7), stray, score_frame, EndFrame())
    assert [(score.value, score.step_index) for score in record.scores] == [(1.0, None)]
    assert (record.env_return, record.steps[0].reward) == (None, None)
    assert record.extra is not None
    assert record.extra["scores_of_no_step"][0]["step_index"] == 7


@pytest.mark.parametrize("scorer", ["", " ", "judge@v2"])
def test_a_score_that_is_none_does_not_cost_the_episode(scorer: str) -> None:
    record = record_of(step(0), ScoreFrame(score=ScoreRecord(scorer=scorer, value=1.0)), EndFrame())
    assert record.scores == []
    assert record.extra is not None
    assert record.extra["not_taken"]["scores"][0]["scorer"] == scorer


def test_what_is_said_of_an_episode_and_is_not_valid_is_kept_beside_it() -> None:
    record = record_of(step(0), EndFrame(status="success", cost=float("inf"), env_return=float("nan")))
    assert (record.status, record.cost, record.env_return) == ("completed", None, None)
    assert record.extra is not None
    assert set(record.extra["not_taken"]) == {"status", "cost", "env_return"}


def test_ids_of_tool_calls_that_are_no_text_cost_nothing() -> None:
    step_record = StepRecord(state="s", action="a", context=[{"role": "tool", "content": "x", "tool_call_id": ["l"]}])
    assert not isinstance(record_of(step(0), StepFrame(index=1, step=step_record), EndFrame()), Reject)
