"""The commands that a list offers: what is printed, run as it stands, acts on the episodes of the list."""

import shlex
from pathlib import Path

import pytest

from lake import Lake
from lake.write.annotations import Annotation, annotate
from testkit.command_line import runner
from testkit.lakes import build_lake
from testkit.streamlit_pages import open_page, show
from viewer.pinned import Reader
from viewer.queries import episodes
from viewer.queries.episodes import EpisodeFilter


@pytest.fixture
def lk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lake:
    return show(build_lake(tmp_path), monkeypatch)


def commands(**address: str) -> dict[str, list[str]]:
    """Command lines of the list, by what they do."""
    lines = [shlex.split(code.value) for code in open_page("episodes", **address).code]
    return {words[1]: words[1:] for words in lines}


def test_the_printed_commands_select_and_retract_the_list(
    lk: Lake, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An outcome, a wildcard, what nobody labelled and a hostile name, through a shell's words."""
    some = lk.sql("SELECT min(episode_id) FROM episodes WHERE task_id = 'mixed'").item()
    annotate(lk, [Annotation(episode_id=some, label='it\'s "odd" $(x)', value=1.0)], "ann")
    wanted = EpisodeFilter(task="m*", high=0.5, unlabelled=('it\'s "odd" $(x)', "ann"))
    listed = episodes.listed(Reader(lk.snapshot()), wanted, None)
    assert 0 < len(listed) < lk.sql("SELECT count(*) FROM episodes").item()
    printed = commands(task="m*", max="0.5", unlabelled='it\'s "odd" $(x)', by="ann")
    run = runner(monkeypatch, capsys)
    assert run(*printed["select"]).code == 0
    kept = lk.sql("SELECT episode_id FROM selections WHERE kept AND selection = 'chosen'")["episode_id"]
    assert kept.sort().to_list() == listed.sort().to_list()
    before = lk.sql("SELECT episode_id FROM episodes")
    assert run(*printed["retract"]).code == 0
    gone = before.join(lk.sql("SELECT episode_id FROM episodes"), on="episode_id", how="anti")["episode_id"]
    assert gone.sort().to_list() == listed.sort().to_list()


def test_nothing_offers_to_hide_a_whole_lake(lk: Lake) -> None:
    assert set(commands()) == {"export", "select"}
