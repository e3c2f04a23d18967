"""The lines of a transcript, and what its page may ask: against small lakes with everything in them."""

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lake import Lake
from lake.records import TokensRecord
from lake.write.rows import LIMIT
from testkit.lakes import add_training, build_lake, rollout
from viewer.queries import ListWindow, transcripts
from viewer.reader import Reader
from viewer.transcript import calls, outline, tokens
from viewer.transcript.view_model import describe_steps, load_transcript

ALL = ListWindow(10_000)


def only_episode(lk: Lake) -> int:
    return int(lk.sql("SELECT episode_id FROM episodes").item())


def spans(began: list[float | None], took: list[float | None]) -> list[tuple[float, float] | None]:
    """The bars of a waterfall of calls."""
    schema = {"began": pl.Float64, "took": pl.Float64}
    others = pl.lit("call").alias("kind"), pl.lit("m").alias("name"), pl.lit(None, pl.String).alias("error")
    rows = pl.DataFrame({"began": began, "took": took}, schema).with_row_index("step_index").with_columns(others)
    return [bar["span"] for bar in calls.build_waterfall(rows, [])["bars"]]


@pytest.mark.parametrize(
    ("tool", "arguments", "summary"),
    [
        (None, None, "go left"),
        ("f", '{"command": "ls\\n-la", "n": 2}', "command: ls -la, n: 2"),
        ("f", '{"cut', '{"cut'),
        ("f", '{"path": "a.py", "text": "x = \\"1\\"\\n  cut', 'path: a.py, text: x = "1" cut'),
        ("f", "[1, 2]", "[1, 2]"),
        ("f", None, ""),
    ],
)
def test_what_a_step_did(tool: str | None, arguments: str | None, summary: str) -> None:
    row = {"tool": tool, "arguments": arguments, "action": "go\nleft", "command": "go\nleft"}
    assert outline.describe_action(row) == summary


def test_a_line_shows_the_command_behind_much_prose(tmp_path: Path) -> None:
    prose = "I look into the folder that the issue names, " * 9
    actions = {
        f"{prose}\n```\ncd a\n```\nthen\n```bash\nls -F\n```\nIt may fail.": "ls -F",
        f"<think>{prose}</think>\n<action>go left</action>": "go left",
        f"{prose}<function=bash>\n<parameter=command>ls": "bash> <parameter=command>ls",
        "Look.\n```\nls\n```\nIt may fail.": "Look. ``` ls ``` It may fail.",
        prose: "issue names, I look into",
    }
    record = rollout("t", 0, 0.0, num_steps=len(actions))
    for step, action in zip(record.steps, actions, strict=True):
        step.action = action
    lk = build_lake(tmp_path, [record])
    rows = transcripts.read_outline(lk.snapshot(), only_episode(lk), ALL).iter_rows(named=True)
    for row, (action, command) in zip(rows, actions.items(), strict=True):
        line = outline.describe_action(row)
        assert command in line
        assert line[:39] == action[:39].replace("\n", " ")


def test_calls_with_known_starts_are_where_they_were() -> None:
    assert spans([0.0, 5.0, None], [2.0, 5.0, 1.0]) == [(0.0, 20.0), (50.0, 50.0), None]


def test_without_starts_calls_are_laid_end_to_end() -> None:
    assert spans([None, None, None], [1.0, None, 3.0]) == [(0.0, 25.0), None, (25.0, 75.0)]
    assert spans([None, None], [None, None]) == [], "a note says that the source has no times"
    assert spans([0.0, None], [None, None]) == [None, None], "unknown is no bar"


@given(st.lists(st.tuples(st.none() | st.floats(0, 1e6), st.none() | st.floats(0, 1e4)), min_size=1))
def test_every_bar_stays_in_its_track(timeline: list[tuple[float | None, float | None]]) -> None:
    bars = spans([start for start, _ in timeline], [length for _, length in timeline])
    for bar, (_, length) in zip(bars, timeline, strict=bool(bars)):
        assert length is not None or bar is None, "no length, no bar"
        assert bar is None or (bar[0] >= 0 and bar[1] >= 0 and sum(bar) <= 100.02)


def test_a_repeat_ends_where_the_reward_or_the_state_differs(tmp_path: Path) -> None:
    record = rollout("t", 0, 0.0, num_steps=8)
    for step in record.steps:
        step.action = "look"
    record.steps[6].reward = 1.0
    lk = build_lake(tmp_path, [record])
    outline_rows = transcripts.read_outline(lk.snapshot(), only_episode(lk), ALL)
    assert outline.find_repeats(outline_rows) == [{"first": 0, "last": 5, "period": 1, "times": 6}]


def test_a_failed_call_is_told_on_its_own_step_and_the_next_is_not_said_to_have_failed(tmp_path: Path) -> None:
    """In a line, on a page that ends there, in the opened step, and next to siblings the same."""
    record = rollout("t", 0, 0.0, num_steps=4)
    record.steps[1].state, record.steps[1].state_is_error = "Error: 404", True
    record.steps[3].state, record.steps[3].state_is_error = "", False
    lk = build_lake(tmp_path, [record])
    snapshot, episode = lk.snapshot(), only_episode(lk)
    messages = [
        [("failed: error", "red")],
        [("came from an error", "gray")],
        [("empty reply", "orange")],
        [("came from an empty reply", "gray")],
    ]
    listed = transcripts.read_outline(snapshot, episode, ALL)
    pages = pl.concat([transcripts.read_outline(snapshot, episode, ListWindow(1, page)) for page in range(4)])
    beside = transcripts.read_step_texts(snapshot, [(episode, step) for step in range(4)]).sort("step_index")
    for frame in (listed, pages, beside):
        assert [
            [mark[:2] for mark in outline.list_reply_faults(row, {})] for row in frame.iter_rows(named=True)
        ] == messages


@pytest.mark.parametrize(
    "failure",
    [
        {"role": "tool", "content": "No exact match found for `x`."},
        {"role": "tool", "content": "It did not run.", "is_error": True},
        {"role": "tool", "content": "It ran.", "is_error": False, "observation": {"exit_code": 1}},
        {"role": "tool", "content": "Exit code 1\nno such file", "is_error": False},
        {"role": "tool", "content": "Exit code 1\n" + "x" * LIMIT},
        {"role": "tool", "content": [{"type": "text", "text": "x\n[The command completed with exit code 12.]\n"}]},
        {"content": 'Error: "no" {}', "name": "run", "role": "tool"},
        {"role": "user", "content": "OBSERVATION:\n[No exact match found in a.py", "message_type": "observation"},
    ],
)
def test_both_views_mark_a_failed_call_also_of_the_last_step(tmp_path: Path, failure: dict[str, Any]) -> None:
    """The failed call is not the last of its step; a quoted failure is none."""
    record = rollout("t", 0, 0.0, num_steps=3)
    quoted = {"role": "tool", "content": json.dumps({"is_error": True, "exit_code": 1})}
    for step in record.steps:
        step.tool_calls = [{"function": {"name": "run", "arguments": "{}"}}] * 2
    record.steps[1].context = record.final_observation = [failure, {"role": "tool", "content": "Done."}]
    record.steps[2].context = [quoted, {"role": "tool", "content": "Done with exit code 0"}]
    lk = build_lake(tmp_path, [record])
    snapshot, episode = lk.snapshot(), only_episode(lk)
    beside = transcripts.read_step_texts(snapshot, [(episode, step) for step in range(3)]).sort("step_index")
    for frame in (transcripts.read_outline(snapshot, episode, ALL), beside):
        faults = [outline.list_reply_faults(row, {}) for row in frame.iter_rows(named=True)]
        assert faults == [[outline.FAILED], [], [outline.FAILED]]
    transcript = load_transcript(Reader(snapshot).read, lambda *_, **__: "", episode, None)
    assert transcript is not None
    steps = describe_steps(transcript, [0, 1, 2])
    assert [outline.FAILED in step["marks"] for step in steps] == [True, False, True]
    results = [block for step in steps for block in step["blocks"]]
    assert [block["is_failed"] for block in results if block["kind"] == "result"] == [True, *[False] * 3, True, False]


@pytest.fixture(scope="module")
def lk(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """An episode whose texts hide in every column, in escapes, and in a blob; with tokens of its first step."""
    record = rollout("t", 0, 1.0, num_steps=7)
    record.steps[0].tokens = TokensRecord(
        context_ids=[1], action_ids=[5, 6, 7], action_logprobs=[-0.5, -1.0, 0.0], action_mask=[True, True, False]
    )
    record.steps[1].action = 'Say "HELLO"\nnow'
    record.steps[2].reasoning = "hello there"
    record.steps[3].tool_calls = [{"function": {"name": "f", "arguments": json.dumps({"q": 'say "hello"\nnow'})}}]
    record.steps[4].context = [{"role": "user", "content": "x" * LIMIT + " hello from a blob"}]
    record.steps[5].context = [{"role": "user", "content": "Grüße"}]
    return build_lake(tmp_path_factory.mktemp("outline"), [record])


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("hello", [1, 2, 3, 4]),
        ("HELLO FROM", [4]),
        ('say "hello"\nnow', [1, 3]),
        ("grüße", [5]),
        ("GRÜSSE Grüße", []),
        ("blob hello", [4]),
        ('"from a blob" x hello', [4]),
        ('"blob hello"', []),
        ("there hello", [2]),
        ("%", []),
        ("nowhere", []),
    ],
)
def test_a_text_is_found_wherever_a_person_would_read_it(lk: Lake, text: str, steps: list[int]) -> None:
    assert transcripts.find_steps(lk.snapshot(), only_episode(lk), text) == steps


def test_a_line_names_the_tool_and_its_arguments(lk: Lake) -> None:
    row = transcripts.read_outline(lk.snapshot(), only_episode(lk), ALL).row(3, named=True)
    assert (row["tool"], row["calls"], outline.describe_action(row)) == ("f", 1, 'q: say "hello" now')


def test_how_often_a_step_was_trained_on(tmp_path: Path) -> None:
    lk = build_lake(tmp_path, [rollout("t", 0, 1.0)])
    assert transcripts.count_training_uses(lk.snapshot(), only_episode(lk)).is_empty()
    add_training(lk, updates=1)
    assert transcripts.count_training_uses(lk.snapshot(), only_episode(lk)).to_dicts()[2] == {
        "step_index": 2,
        "times": 1,
        "uses": [{"run": "demo", "updates": [0]}],
    }


def rescore(lk: Lake, checkpoint: str, logprobs: list[float], log_ratio: float | None) -> None:
    keys = lk.sql("SELECT episode_id, step_index, encoding_id, group_id, run_id FROM tokens").row(0, named=True)
    row = {"checkpoint": checkpoint, "temperature": 1.0, "n_action": 3, "log_ratio": log_ratio, "logprobs": logprobs}
    with lk.job(kind="rescore") as job:
        job.write("ratios", pl.DataFrame([keys | row], schema_overrides={"log_ratio": pl.Float64}))


def strips(lk: Lake, step: int) -> list[dict[str, Any]]:
    snapshot, episode = lk.snapshot(), only_episode(lk)
    queries = (transcripts.read_tokens, transcripts.read_rescored_tokens)
    return tokens.build_strips(*(query(snapshot, episode, step).to_dicts() for query in queries))


def test_a_token_strip_has_what_is_stored_and_says_what_is_not(lk: Lake) -> None:
    (strip,) = strips(lk, 0)
    assert (strip["ids"], strip["sampled"]) == ([5, 6, 7], [True, True, False])
    assert [(track["label"], track["values"]) for track in strip["tracks"]] == [
        ("behaviour log-probability", [-0.5, -1.0, 0.0])
    ]
    assert "No checkpoint rescored" in strip["notes"][0]
    assert strips(lk, 1) == [], "no tokens are not a strip of zeros"


def test_checkpoints_stand_beside_the_policy_that_sampled(tmp_path: Path) -> None:
    record = rollout("t", 0, 1.0, num_steps=1)
    record.steps[0].tokens = TokensRecord(context_ids=[1], action_ids=[5, 6, 7], action_logprobs=[-0.5, -1.0, 0.0])
    lk = build_lake(tmp_path, [record])
    rescore(lk, "now", [-9.0, -9.0, -9.0], -25.5)
    rescore(lk, "now", [-0.25, -1.5, 0.0], -0.25)
    rescore(lk, "other", [-1.0, -2.0, -3.0], None)
    (strip,) = strips(lk, 0)
    assert [(track["label"], track["values"]) for track in strip["tracks"][1:]] == [
        ("now: log-probability", [-0.25, -1.5, 0.0]),
        ("now: log ratio to behaviour", [0.25, -0.5, 0.0]),
        ("other: log-probability", [-1.0, -2.0, -3.0]),
    ]
    assert any("No ratio to other" in note for note in strip["notes"])


def test_without_the_policys_own_there_is_no_ratio() -> None:
    encoding = {"encoding_id": 1, "provenance": "rendered", "n_action": 1, "n_trained": 1, "action_ids": [4]}
    unknown = ("policy_version", "temperature", "logprobs_mode", "engine", "version_spans", "constrained")
    row = encoding | {"action_mask": [True], "action_logprobs": None} | dict.fromkeys(unknown)
    rescored = {"series_id": 1, "encoding_id": 1, "checkpoint": "now", "log_ratio": None, "logprobs": [-1.0]}
    rescored["entropies"] = None
    (strip,) = tokens.build_strips([row], [rescored, rescored | {"encoding_id": 2}])
    assert [track["label"] for track in strip["tracks"]] == ["now: log-probability"]
    assert "policy that sampled" in strip["notes"][0]
    assert strip["notes"][1].startswith("No entropy under now:")


def test_long_actions_are_cut(lk: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "MAX_TOKENS", 2)
    (strip,) = strips(lk, 0)
    assert [len(strip["ids"]), len(strip["sampled"]), len(strip["tracks"][0]["values"])] == [2, 2, 2]
    assert strip["notes"][0] == "Only the first 2 tokens are drawn."
