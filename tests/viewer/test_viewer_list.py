"""The list of episodes tells what happened: request, answer, outcome; its ids lead on; it is quiet where empty."""

import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from lake import Lake, ids
from pipelines.credit import GiGPO
from pipelines.credit.job import run_credit
from testkit.lakes import RUN, build_lake, rollout
from testkit.streamlit_pages import column, columns, elements, id_links, links, open_page, show, words
from viewer.plain import one_line
from viewer.queries import EXCERPT, ListWindow, episodes
from viewer.queries.episodes import EpisodeFilter
from viewer.reader import Reader
from viewer.transcript import blocks, head
from viewer.transcript.view_model import load_transcript

HTML = "<script>alert(1)</script> [x](javascript:alert(1)) \x1b[31m \u202e"
AT = datetime(2026, 3, 1, tzinfo=UTC)
LONG = "long " * 20_000
"""A text that the lake stores apart, in `blobs`."""
MESSAGES: dict[str, Any] = {
    "plain": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "find my flight"}],
    "harness": [
        {"role": "user", "content": "# AGENTS.md instructions for /x"},
        {"role": "user", "content": "<environment_context>\n<cwd>/x</cwd>"},
        {"role": "user", "content": "make a joke"},
    ],
    "demo": [
        {"role": "user", "is_demo": True, "content": "Fix another issue."},
        {"role": "user", "content": "Here is a demonstration of how to correctly accomplish this task. ISSUE: x"},
        {"role": "user", "content": "We're currently solving the following issue.\nISSUE:\nA colon is missing."},
    ],
    "issue": [{"role": "user", "content": "<uploaded_files>\n/x\n</uploaded_files>\n<pr_description>\nIt fails."}],
    "resolver": [
        {
            "role": "user",
            "content": "Please fix the following issue for the repository in /x.\n\n# Problem Statement\nNo.",
        }
    ],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "look at"}, {"type": "text", "text": "this"}]}],
    "only harness": [{"role": "user", "content": "<reminder>be kind"}],
    "hostile": [{"role": "user", "content": HTML}],
    "long": [{"role": "user", "content": LONG}],
    "nobody": [{"role": "system", "content": "be brief"}],
    "odd": [{"role": "user"}, 5, {"role": "user", "content": ""}, {"role": "user", "content": {"a": 1}}],
}
EXPECTED = {
    "plain": "find my flight",
    "harness": "make a joke",
    "demo": "A colon is missing.",
    "issue": "It fails.",
    "resolver": "No.",
    "parts": "look at this",
    "only harness": "<reminder>be kind",
    "hostile": HTML,
    "long": LONG[:EXCERPT],
    "nobody": None,
    "odd": '{"a":1}',
}
ANSWERS: dict[str, tuple[str, dict[str, str] | None, str | None]] = {
    "plain": ("<think>\nA flight?\n</think>\n\nHere.", None, "Here."),
    "demo": ("<think>Done", None, None),
    "issue": ("<think>Done.</think>", {"name": "finish", "arguments": '{"message": "42"}'}, "42"),
    "parts": ("", {"name": "finish", "arguments": "{}"}, "finish({})"),
}
"""The last action of a task, its call, and the answer."""


@pytest.fixture(scope="module")
def lk(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    records = []
    for number, (task, messages) in enumerate(MESSAGES.items()):
        record = rollout(task, 0, [0.0, 1.0, 0.5, None][number % 4], num_steps=1 + number % 3)
        record.initial_messages = messages
        record.started_at, record.ended_at = AT, AT + timedelta(seconds=number)
        if task == "hostile":
            record.steps[-1].action = HTML
        if task in ANSWERS:
            action, call = ANSWERS[task][:2]
            record.steps[-1].action, record.steps[-1].tool_calls = action, [{"function": call}] if call else None
        if task == "harness":
            record.steps[-1].action = " "
            record.steps[-1].tool_calls = [{"function": {"name": "write", "arguments": '{"path": "a"}'}}]
        records.append(record)
    return build_lake(tmp_path_factory.mktemp("list"), records)


@pytest.fixture
def shown(lk: Lake, monkeypatch: pytest.MonkeyPatch) -> Lake:
    return show(lk, monkeypatch)


def test_a_row_has_the_first_text_of_the_user_and_the_last_action(lk: Lake) -> None:
    """Against the rows of the tables."""
    page = episodes.read_page(Reader(lk.snapshot()), EpisodeFilter(), None, ListWindow(100))
    steps = lk.snapshot().scan("steps").sort("step_index").collect()
    for row in page.iter_rows(named=True):
        last = steps.filter(episode_id=row["episode_id"]).row(-1, named=True)
        said = 'write({ "path": "a" })' if row["task_id"] == "harness" else last["action"]
        said = ANSWERS.get(row["task_id"], (said,))[-1]
        assert (row["task_id"], row["request"], row["answer"]) == (row["task_id"], EXPECTED[row["task_id"]], said)
        assert row["seconds"] == list(MESSAGES).index(row["task_id"])
        if row["task_id"] in ("harness", "demo", "issue", "resolver"):
            assert head.find_task(blocks.merge_demonstrations(MESSAGES[row["task_id"]]), None) == row["request"], (
                "the head"
            )
        transcript = load_transcript(Reader(lk.snapshot()).read, lambda *_, **__: "", row["episode_id"], None)
        assert transcript is not None
        answer = (row["answer"] or "").replace("[x](javascript:alert(1))", "x")
        assert head.describe_words(transcript)[1] == one_line(answer, head.MAX_WORDS), "the head"
    few = episodes.read_page(Reader(lk.snapshot()), EpisodeFilter(task="plain"), None, ListWindow(1))
    assert few["request"].to_list() == ["find my flight"]


def test_a_search_of_loose_words_tells_what_quotes_do(shown: Lake) -> None:
    for text, expected in (("my flight", True), ('"my flight"', False), ("flight", False)):
        captions = [caption.value for caption in open_page("episodes", text=text).caption]
        assert any("quotes" in caption for caption in captions) is expected


def test_the_list_tells_what_happened_and_ends_with_ids_that_lead_on(shown: Lake) -> None:
    at = open_page("episodes", task="plain")
    names = columns(at, "episodes")
    assert names[:4] == ["request", "answer", "outcome", "status"]
    assert names[-2:] == ["episode_id", "group_id"]
    assert column(at, "episodes", "seconds") == ["0 s"]
    assert column(at, "episodes", "started_at") == ["2026-03-01 00:00:00"]
    (episode,), (group,) = column(at, "episodes", "episode_id"), column(at, "episodes", "group_id")
    assert id_links(at, "episodes") == [[links(at, "episodes")[0], f"/group?group={group}"]]
    assert links(at, "episodes") == [f"/episode?episode={episode}&list=task%3Dplain"], "the list goes along"
    outcomes = [html for html in tables(open_page("episodes")) if "outcome" in html]
    assert all(f'<span class="{colour}">' in outcomes[0] for colour in ("good", "bad", "middling"))


def tables(at: Any) -> list[str]:
    return [element.proto.body for element in elements(at) if element.type == "html" and "<table" in element.proto.body]


def test_hostile_texts_of_every_column_are_texts(shown: Lake) -> None:
    at = open_page("episodes", task="hostile")
    (html,) = tables(at)
    assert column(at, "episodes", "request") == column(at, "episodes", "answer")
    assert r"\x1b[31m \u202e" in column(at, "episodes", "request")[0]
    assert not re.search("<script|\x1b|\u202e", html)


def test_a_list_without_scores_has_no_outcome_and_no_credit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [rollout("t", n, None) for n in range(3)]
    for record in records:
        record.steps[-1].action = ""
    lk = show(build_lake(tmp_path, records), monkeypatch)
    listed = open_page("episodes")
    assert "answer" in columns(listed, "episodes"), "that no episode has an answer is a finding"
    assert not {"outcome", "seconds"} & set(columns(listed, "episodes"))
    assert "mean outcome" not in words(listed)
    assert "outcome" in columns(open_page("episodes", unscored="true"), "episodes"), "asked for"
    group = ids.to_text(lk.sql("SELECT any_value(group_id) FROM episodes").item())
    episode = lk.sql("SELECT list(episode_id) FROM episodes").item()[:2]
    for page, address in (("group", {"group": group}), ("compare", {"episode": list(map(ids.to_text, episode))})):
        at = open_page(page, **address)
        assert "Credit" not in [box.label for box in at.selectbox], page
        assert "A_E" not in words(at), page
    assert "Success rate" not in json.dumps([chart.proto.spec for chart in open_page("runs").get("vega_lite_chart")])


def test_the_runs_page_opens_on_the_largest_scored_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lk = show(build_lake(tmp_path, [rollout("t", n, 1.0) for n in range(4)]), monkeypatch)
    for run, outcome, number in (("unscored", None, 9), ("newest", 1.0, 1)):
        with lk.job(kind="collect", run_id=run) as job:
            job.record([rollout("t", n, outcome) for n in range(number)])
    assert open_page("runs").subheader[0].value == f"Run `{RUN}`"


def test_the_choice_of_a_credit_names_no_filter_of_another_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caption names the job that computed this group, with its filter."""
    records = [rollout("t", n, float(n), collection_round=round_) for round_ in (2, 29) for n in range(2)]
    lk = show(build_lake(tmp_path, records), monkeypatch)
    for round_ in (2, 29):
        run_credit(lk, GiGPO(), only=f"collection_round = {round_}")
    jobs = lk.sql("SELECT job_id FROM job_runs WHERE kind = 'credit' ORDER BY sequence")["job_id"]
    group = lk.sql("SELECT any_value(group_id) FROM episodes WHERE collection_round = 2").item()
    at = open_page("group", group=group)
    (choice,) = [box for box in at.selectbox if box.label == "Credit"]
    assert not [label for label in choice.options if "29" in label.split("  ")[0]]
    assert f"Job [`{ids.to_text(jobs[0])}`]" in words(at)
    assert "`collection_round = 2`" in words(at)


def test_counts_of_a_page_are_bounded(lk: Lake) -> None:
    """A page reads the messages and last steps of its own rows only."""
    queries: list[str] = []

    class Watched(Reader):
        def sql(self, query: str, params: Any = None) -> pl.DataFrame:
            queries.append(query)
            return super().sql(query, params)

    page = episodes.read_page(Watched(lk.snapshot()), EpisodeFilter(), None, ListWindow(2))
    assert page.height == 2
    assert all("episode_id IN (" in query for query in queries if "FROM steps" in query or "initial_messages" in query)
