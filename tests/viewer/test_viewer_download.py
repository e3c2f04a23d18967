"""The commands that a list offers: what is printed, run as it stands, acts on the episodes of the list."""

import re
import shlex
from html import unescape
from pathlib import Path
from urllib.parse import parse_qs

import pytest

from lake import Lake, ids
from lake.write.scores import Annotation, annotate
from testkit.command_line import runner
from testkit.lakes import RUN, add_credit, build_lake, rollout
from testkit.streamlit_pages import column, open_page, show, words
from viewer import download
from viewer.queries import episodes
from viewer.queries.episodes import EpisodeFilter
from viewer.reader import Reader


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
    """An outcome, a wildcard, what no one labelled and a hostile name, through a shell's words."""
    some = lk.sql("SELECT min(episode_id) FROM episodes WHERE task_id = 'mixed'").item()
    annotate(lk, [Annotation(episode_id=some, label='it\'s "odd" $(x)', value=1.0)], "ann")
    condition = EpisodeFilter(task="m*", high=0.5, unlabelled=('it\'s "odd" $(x)', "ann"))
    listed = episodes.list_episodes(Reader(lk.snapshot()), condition, None)
    assert 0 < len(listed) < lk.sql("SELECT count(*) FROM episodes").item()
    printed = commands(task="m*", max="0.5", unlabelled='it\'s "odd" $(x)', by="ann")
    run = runner(monkeypatch, capsys)
    assert run(*printed["select"]).code == 0
    episode_ids = lk.sql("SELECT episode_id FROM selections WHERE kept AND selection = 'chosen'")["episode_id"]
    assert episode_ids.sort().to_list() == listed.sort().to_list()
    before = lk.sql("SELECT episode_id FROM episodes")
    assert run(*printed["retract"]).code == 0
    removed_ids = before.join(lk.sql("SELECT episode_id FROM episodes"), on="episode_id", how="anti")["episode_id"]
    assert removed_ids.sort().to_list() == listed.sort().to_list()


@pytest.fixture(scope="module")
def every_list(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """Something for every list; tests only read it."""
    lk = build_lake(tmp_path_factory.mktemp("lists"))
    add_credit(lk)
    episode = lk.sql("SELECT min(episode_id) FROM episodes WHERE task_id = 'mixed'").item()
    annotate(lk, [Annotation(episode_id=episode, label=label, text=f"={label}") for label in "abc"], "ann")
    with lk.job(kind="collect", run_id=RUN) as job:
        job.record([rollout("b", number, float("nan")) for number in range(3)])
    return lk


@pytest.mark.parametrize(
    ("page", "address", "of"),
    [
        ("groups", {"task": "*e*", "sort": "-mean_steps"}, {"groups": "group_id"}),
        ("groups", {"text": "tool server", "error": "rollout", "signal": "live"}, {"groups": "group_id"}),
        ("group", {}, {"siblings": "episode_id", "anchors": "anchor_key"}),
        ("anchors", {"sort": "size"}, {"states": "anchor_key"}),
        ("jobs", {"kind": "collect"}, {"jobs": "job_id"}),
        ("annotations", {"sort": "text"}, {"annotations": "text"}),
        ("rejects", {}, {"rejects": "reject_id"}),
        ("sql", {"q": "SELECT 1 AS things, ['=1'] AS list"}, {"answer": "things"}),
    ],
)
def test_a_list_is_taken_as_its_page_shows_it(
    every_list: Lake, page: str, address: dict[str, str], of: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link below a table leads to its rows, read part by part."""
    lk = show(every_list, monkeypatch)
    if page == "group":
        address = {"group": ids.to_text(lk.sql("SELECT min(group_id) FROM episodes WHERE task_id = 'mixed'").item())}
    at = open_page(page, **address)
    links = list(dict.fromkeys(re.findall(r'href="/download\?([^"]*)"[^>]*>The whole list', words(at))))
    assert len(links) == len(of)
    monkeypatch.setattr(download, "LISTS", dict.fromkeys(download.LISTS, 2))
    for link, (table, name) in zip(links, of.items(), strict=True):
        parameters = {key: values[0] for key, values in parse_qs(unescape(link)).items()}
        frames = list(download.read_list(Reader(lk.snapshot()), parameters["rows"], parameters))
        assert max(part.height for part in frames) <= 2
        listed = [str(value) for part in frames for value in part[name]]
        assert listed == column(at, table, name) != []
        sent = b"".join(download.write_csv(frames))
        assert len(sent.splitlines()) == len(listed) + 1
        assert b",=" not in sent


def test_nothing_offers_to_hide_a_whole_lake(lk: Lake) -> None:
    assert set(commands()) == {"export", "select"}
