"""The conversation: each message of real files once and in order; what is quiet; the head; files of several."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import lake
from lake import Lake, ids
from lake.errors import UsageError
from lake.records import EpisodeRecord, StepRecord
from testkit.command_line import runner
from testkit.lakes import build_lake, rollout
from viewer import plain
from viewer.navigation import Page
from viewer.queries import ListWindow, transcripts
from viewer.reader import Reader
from viewer.transcript import head, outline, page
from viewer.transcript.blocks import list_message_blocks
from viewer.transcript.view_model import (
    EpisodeTranscript,
    answer_questions,
    describe_lines,
    describe_steps,
    load_transcript,
)

FORMATS = Path(__file__).resolve().parents[1] / "golden" / "formats"
Message = tuple[str, str]
"""Role and the beginning of the text, without white space."""
LETTERS = 50


def load(reader: Reader, episode_id: int) -> EpisodeTranscript:
    def link(page: Page, /, **parameters: Any) -> str:
        return f"{page}?{parameters}"

    transcript = load_transcript(reader.read, link, episode_id, None)
    assert transcript is not None
    return transcript


def shorten(text: str) -> str:
    return "".join(text.split())[:LETTERS]


def read_conversation(transcript: EpisodeTranscript) -> list[tuple[int | None, dict[str, Any]]]:
    """The blocks that the conversation shows, with the numbers of their messages."""
    drawn = describe_lines(transcript, ListWindow(1000), None)
    numbers = {line["index"]: line["number"] for line in (*drawn["lines"], *drawn["ends"])}
    order = sorted(numbers)
    return [
        (None if block["place"] is None else numbers[step["index"]] + block["place"], block)
        for first in range(0, len(order), 12)
        for step in describe_steps(transcript, order[first : first + 12])
        for block in step["blocks"]
        if not block["is_repeated"]
    ]


def list_recorded(reader: Reader, episode_id: int) -> Iterator[tuple[Message, list[str]]]:
    """An oracle from the rows alone: the messages of an episode in order, decisions with the tools that they call."""

    def parse(document: str | None) -> Iterator[tuple[Message, list[str]]]:
        for message in json.loads(document or "[]"):
            content = message.get("content")
            if isinstance(content, list):
                content = "".join(part.get("text", "") for part in content)
            yield (message["role"], shorten(content or "")), []

    documents = "SELECT initial_messages, final_observation FROM episodes WHERE episode_id = ?"
    first, last = reader.sql(documents, [episode_id]).row(0)
    yield from parse(first)
    columns = "context, state, state_role, action, reasoning, tool_calls"
    rows = reader.sql(f"SELECT {columns} FROM steps WHERE episode_id = ? ORDER BY step_index", [episode_id])
    for index, row in enumerate(rows.iter_rows(named=True)):
        messages = list(parse(row["context"]))
        if not messages and row["state"] is not None and (index or first in (None, "[]")):
            messages = [((row["state_role"] or "environment", shorten(row["state"])), [])]
        yield from messages
        calls = [call.get("function", call)["name"] for call in json.loads(row["tool_calls"] or "[]")]
        action = row["action"] or ""
        if row["reasoning"] and action.lstrip().startswith("<think>"):
            action = action.partition("</think>")[2]
        yield ("assistant", shorten(action)), calls
    yield from parse(last)


@pytest.fixture(scope="module")
def lk(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """Episodes of the files that tools wrote."""
    lk = lake.open(tmp_path_factory.mktemp("conversation") / "lake", create=True)
    for name in ("claude_code", "codex", "inspect", "harbor", "mini_swe_agent", "openai_agents"):
        lk.ingest(FORMATS / name)
    return lk


def test_each_message_of_real_files_is_shown_once_and_in_order(lk: Lake) -> None:
    """Sorted by their numbers, the messages are those of the record; results stand behind their calls."""
    reader = Reader(lk.snapshot())
    episodes = reader.sql("SELECT episode_id FROM episodes ORDER BY source_format, episode_id")["episode_id"]
    calls = 0
    for episode_id in episodes:
        recorded = list(list_recorded(reader, episode_id))
        shown: dict[int, tuple[str, str, list[str]]] = {}
        for number, block in read_conversation(load(reader, episode_id)):
            assert number is not None
            role, text, tools = shown.get(number, (block["role"], "", []))
            if block["kind"] == "call":
                tools = [*tools, block["label"]]
            elif block["kind"] != "reasoning":
                assert not text, f"message {number} is shown twice"
                text = shorten(block["text"])
            shown[number] = (role, text, tools)
        assert sorted(shown) == list(range(1, len(recorded) + 1)), ids.to_text(episode_id)
        for number, ((role, text), tools) in enumerate(recorded, start=1):
            shown_role, shown_text, shown_tools = shown[number]
            assert (shown_role, shown_tools) == (role, tools)
            assert shown_text == text or "[image:" in shown_text
        calls += sum(len(tools) for _, tools in recorded)
    assert len(episodes) > 10
    assert calls > 20


def test_the_users_first_words_are_open_and_what_codex_adds_to_them_is_folded(lk: Lake) -> None:
    documents = lk.sql("SELECT initial_messages FROM episodes WHERE source_format = 'codex'")["initial_messages"]
    blocks = [block for text in documents for block in list_message_blocks(json.loads(text or "[]"), "before")]
    user = [(block.text.split("\n")[0], block.is_folded) for block in blocks if block.role == "user"]
    assert {text[:21] for text, is_folded in user if is_folded} == {"<environment_context>", "# AGENTS.md instructi"}
    assert {text for text, is_folded in user if not is_folded} >= {"run two commands", "first", "Greet."}
    assert not any(text.startswith(("<", "#")) for text, is_folded in user if not is_folded)


def test_a_state_that_no_message_holds_is_a_message(tmp_path: Path) -> None:
    """Games have states and no messages; a state that the first messages hold is not shown again."""
    record = rollout("t", 0, 1.0, num_steps=2)
    record.steps[1].state = "A hall."
    plain_game = EpisodeRecord(
        task_id="game", rollout_index=0, status="completed", steps=[StepRecord(state="A gate.", action="go")] * 2
    )
    lk = build_lake(tmp_path, [record, plain_game])
    for task, numbers in (("t", [1, 2, 3, 3, 4, 5, 5]), ("game", [1, 2, 3, 4])):
        episode_id = lk.sql("SELECT episode_id FROM episodes WHERE task_id = ?", [task]).item()
        blocks = read_conversation(load(Reader(lk.snapshot()), episode_id))
        assert [number for number, _ in blocks][: len(numbers)] == numbers
        state = next(block["text"] for _, block in blocks if block["kind"] == "state")
        assert state == {"t": "A hall.", "game": "A gate."}[task]
        first_state = f'"{record.steps[0].state}"'
        answers = [
            answer_questions(load(Reader(lk.snapshot()), episode_id), {"find": text})
            for text in (first_state, f'"{state}"', ids.to_text(episode_id), f"No {task}")
        ]
        hits = [answer["find"] for answer in answers]
        assert hits == ([[-1], [1], [], []] if task == "t" else [[], [0, 1], [], []]), "a text is found as it is shown"
        assert [answer["is_name"] for answer in answers] == [False, False, True, False], "the list finds ids too"


def test_long_texts_leave_messages_calls_and_results_what_they_are(tmp_path: Path) -> None:
    """Each text has its true length, wherever the lake stores it."""
    long = 300_000
    arguments = json.dumps({"text": "a" * long})
    call = {"id": "c", "function": {"name": "write", "arguments": arguments}}
    parts = [{"role": "tool", "content": str(number) + "r" * 20_000} for number in range(5)]
    steps = [
        StepRecord(state="u" * long, action="", tool_calls=[call]),
        StepRecord(state="r" * long, state_role="tool", action="Done."),
        StepRecord(state="x", action="Done.", context=parts),
    ]
    steps[1].context = [{"role": "tool", "tool_call_id": "c", "content": "r" * long, "length": 10**40}]
    first = [{"role": "system", "content": "s" * long}, {"role": "user", "content": "u" * long}]
    record = EpisodeRecord(task_id="t", rollout_index=0, status="completed", steps=steps, initial_messages=first)
    lk = build_lake(tmp_path, [record])
    reader = Reader(lk.snapshot())
    episode_id = lk.sql("SELECT episode_id FROM episodes").item()
    blocks = [(number, block) for number, block in read_conversation(load(reader, episode_id)) if number is not None]
    assert [(number, block["label"], block["length"]) for number, block in blocks] == [
        (1, "system", long),
        (2, "user", long),
        (3, "write", len(plain.format_json(arguments))),
        (4, "result", long),
        (5, "action", len("Done.")),
        *((number, "tool", 20_001) for number in range(6, 11)),
        (11, "action", len("Done.")),
    ]
    assert all(block["shown"] <= transcripts.TEXT for _, block in blocks)
    (beyond,) = list_message_blocks(plain.parse_messages("[{", 9_000_000), "before")
    assert beyond.length == 9_000_000, "a document beyond the limit says how long it is"


def test_what_says_nothing_new_is_quiet(tmp_path: Path) -> None:
    """Replies of a tool that are all empty have one grey mark; without advantages there is no column for them."""
    steps = [
        StepRecord(
            state="" if index else "Go.", action="", tool_calls=[{"function": {"name": "log", "arguments": "{}"}}]
        )
        for index in range(5)
    ]
    for index, step in enumerate(steps[1:]):
        step.context = [{"role": "tool", "content": ""}]
        step.state_role, step.finish_reason = "tool", "length" if index else None
    steps[4].is_action_valid = False
    lk = build_lake(tmp_path, [EpisodeRecord(task_id="t", rollout_index=0, status="completed", steps=steps)])
    transcript = load(Reader(lk.snapshot()), lk.sql("SELECT episode_id FROM episodes").item())
    drawn = describe_lines(transcript, ListWindow(10), None)
    marks = [[mark[:2] for mark in line["marks"]] for line in drawn["lines"]]
    assert marks == [[(outline.EMPTY_REPLY, "gray")], [], [], [], [("malformed action", "red")]]
    assert "only empty replies" in drawn["lines"][0]["marks"][0][2]
    assert (drawn["credited"], drawn["rewarded"]) == (False, False)
    described = describe_steps(transcript, range(5))
    badges = [step["badges"] for step in described]
    assert [[label for label, _, _ in marks] for marks in badges] == [[], [], *([["cut at the limit"]] * 3)]
    (call,) = (block for block in described[4]["blocks"] if block["kind"] == "call")
    assert [label for label, _, _ in call["badges"]] == ["malformed action"], "an error of the only call stands there"


def test_the_head_names_task_answer_and_why_it_was_scored_so(tmp_path: Path) -> None:
    record = rollout("t", 0, 1.0)
    record.initial_messages = [
        {"role": "user", "content": "<environment_context>x</environment_context>"},
        {"role": "user", "content": "**Find** the [<b>key</b>](https://a.example/b_(c)_d)."},
    ]
    record.steps[-1].action = "<think>Hm.</think>**Here** it is."
    record.ground_truth = {"actions": ["<u>open</u>"]}
    record.extra = {"info": {"reward_info": {"r_actions": 0.25}}}
    lk = build_lake(tmp_path, [record])
    row = lk.sql("SELECT episode_id, group_id, run_id FROM episodes").row(0, named=True)
    judged = {"scorer": "judge", "scorer_version": "1", "step_index": None, "value": 0.5}
    judged |= {"reason": "**Half** <i>done</i>.", "metrics": '{"checks": ["<b>door</b>"]}'}
    with lk.job(kind="score") as job:
        job.write("scores", pl.DataFrame([row | judged], schema_overrides={"step_index": pl.Int32}))
    transcript = load(Reader(lk.snapshot()), row["episode_id"])
    assert head.describe_words(transcript) == ("Find the <b>key</b>.", "Here it is.")
    html = head.render_head(transcript)
    assert "<span>Find the &lt;b&gt;key&lt;/b&gt;.</span>" in html
    assert "<summary>judge <b>0.5</b> <span>Half &lt;i&gt;done&lt;/i&gt;.</span></summary>" in html
    assert "<strong>Half</strong>" in html, "the whole reason is Markdown"
    _, expected, outcome, judge = re.split(r'<details class="(?=[^"]*fold)', html)
    assert "&lt;u&gt;open" in expected.partition("</summary>")[0]
    assert outcome.startswith('fold good"')
    assert "r_actions" in outcome.partition("</summary>")[2], "an environment says how it computed its reward"
    assert "&lt;b&gt;door" in judge.partition("</summary>")[2]
    assert "<i>" not in html


def test_a_file_holds_what_began_at_the_steps_of_its_episodes(tmp_path: Path) -> None:
    """Sub-agents of sub-agents are in the file but in no index, and none beyond the limit of episodes."""
    lk = build_lake(tmp_path, [rollout("t", 0, 0.5)])
    parent = chosen = lk.sql("SELECT episode_id FROM episodes").item()
    for task in ("part", "part of the part"):
        with lk.job(kind="collect", run_id="demo") as job:
            born: dict[str, Any] = {"parent_episode_id": ids.to_text(parent), "relation": "subagent"}
            job.record([rollout(task, 0, None, agent_id="helper " * 30, **born)])
        parent = lk.sql("SELECT episode_id FROM episodes WHERE task_id = ?", [task]).item()
    reader = Reader(lk.snapshot())
    loaded = page.load_episodes(reader.read, None, [chosen])
    assert [(transcript.facts["task_id"], transcript.is_below) for transcript in loaded] == [
        ("t", False),
        ("part", True),
        ("part of the part", True),
    ]
    html = page.render_html(loaded).decode()
    assert html.count("<header id=") == 3
    assert '<span class="middling">outcome <b>0.5' in html, "its colour is that of the list"
    assert '<table class="index">' not in html
    ((branch,),) = loaded[1].branches.values()
    assert branch["href"] == f"#episode-{ids.to_text(parent)}"
    assert ", 3 steps, completed, " in branch["text"]
    assert branch["text"].endswith("unknown step"), "the note is never cut off"


def test_a_file_of_chosen_episodes_has_an_index_and_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chats = [rollout(f"task {number}", 0, float(number % 2)) for number in range(51)]
    lk = build_lake(tmp_path, chats)
    command = runner(monkeypatch, capsys)
    out = tmp_path / "chosen.html"
    assert command("page", "--lake", lk.uri, "--where", "env_return = 1", "--out", str(out)).code == 0
    html = out.read_text()
    assert html.count("<tr><td><a href=") == 25
    assert 'class="words">' in html
    assert "default-src 'none'" in html
    refused = command("page", "--lake", lk.uri, "--where", "true", "--out", str(out))
    assert refused.code == UsageError("").exit_code
    assert "51 episodes match" in refused.err
    for wrong in ((), ("--where", "false"), ("--selection", "nope"), ("x", "--task", "task 1")):
        assert command("page", "--lake", lk.uri, *wrong, "--out", str(out)).code == UsageError("").exit_code
