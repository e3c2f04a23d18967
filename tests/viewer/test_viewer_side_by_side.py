"""Siblings side by side: what is read, what is drawn, and the page without a browser."""

import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lake import Lake, ids
from lake.judgements.credit import find_credit
from pipelines.credit.estimators.grpo import GRPO
from pipelines.credit.job import run_credit
from testkit.lakes import RUN, add_credit, build_lake, full_lake, rollout, siblings
from testkit.streamlit_pages import open_page, show, words
from viewer.queries import ListWindow, transcripts
from viewer.reader import Reader
from viewer.server import ENVIRONMENT
from viewer.side_by_side import describe_action, describe_prompts, mark_differences


@pytest.fixture(scope="module")
def shared_lake(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    return full_lake(tmp_path_factory.mktemp("beside"))


@pytest.fixture
def lk(shared_lake: Lake, monkeypatch: pytest.MonkeyPatch) -> Lake:
    monkeypatch.setenv(ENVIRONMENT, shared_lake.uri)
    return shared_lake


def group_of(lk: Lake, task: str, round_: int = 1) -> list[int]:
    query = "SELECT episode_id FROM episodes WHERE task_id = ? AND collection_round = ? ORDER BY rollout_index"
    return lk.sql(query, [task, round_])["episode_id"].to_list()


def group_id(lk: Lake, episode: int) -> int:
    return int(lk.sql("SELECT group_id FROM episodes WHERE episode_id = ?", [episode]).item())


def cells(html: str) -> list[str]:
    """Where the cells of the table lead."""
    return [unescape(link) for link in re.findall(r'<td class="[a-z]+"><a href="([^"]*)"', html)]


def table(at: Any) -> str:
    """The comparison that the page shows."""
    return re.findall(r'<div class="trajlake-beside".*?</table>', words(at), re.DOTALL)[0]


# ---------------------------------------------------------------- queries


def test_walks_have_the_keys_of_the_credit_or_of_the_exact_text(lk: Lake) -> None:
    snap, sibling_ids = Reader(lk.snapshot()), group_of(lk, "mixed")
    credit = find_credit(snap)
    steps = lk.snapshot().scan("steps").collect()
    judged = lk.snapshot().scan("advantages").collect()
    for given_credit, frame, name in ((credit, judged, "anchor_key"), (None, steps, "state_hash")):
        walks = transcripts.read_walks(snap, sibling_ids, given_credit)
        expected = {(row["episode_id"], row["step_index"]): row[name] for row in frame.iter_rows(named=True)}
        assert walks.height == 12
        assert walks["key"].to_list() == [expected[row] for row in walks.select("episode_id", "step_index").rows()]
    assert transcripts.read_walks(snap, sibling_ids, None)["advantage"].null_count() == 12


def test_a_credit_without_anchors_compares_exact_states(tmp_path: Path) -> None:
    lk = build_lake(tmp_path, siblings("t", [1.0, 0.0]))
    run_credit(lk, GRPO())
    snap, sibling_ids = Reader(lk.snapshot()), lk.sql("SELECT episode_id FROM episodes")["episode_id"].to_list()
    walks = transcripts.read_walks(snap, sibling_ids, find_credit(snap))
    assert walks["key"].null_count() == 0 < walks.height
    assert walks["key"].equals(transcripts.read_walks(snap, sibling_ids, None)["key"])
    assert walks["advantage"].null_count() == 0


def called(call_id: str, arguments: Any) -> list[Any]:
    return [{"id": call_id, "function": {"name": "find", "arguments": arguments}}]


@pytest.mark.parametrize(
    "calls",
    [
        (called("a1", "x"), called("b2", "x"), called("a1", "y")),
        (called("a1", {"id": "A"}), called("b2", {"id": "A"}), called("a1", {"id": "B"})),
        (called("a1", '{"id": "A"}'), called("b2", '{"id": "A"}'), called("a1", '{"id": "B"}')),
        ([{"call_id": "a", "name": "f"}], [{"call_id": "b", "name": "f"}], [{"call_id": "a", "name": "g"}]),
    ],
    ids=["words", "an id as argument", "an id in a document", "flat"],
)
def test_choices_are_equal_where_the_same_was_done_whatever_the_ids_of_calls(
    tmp_path: Path, calls: tuple[list[Any], ...]
) -> None:
    episodes = siblings("t", [1.0, 1.0, 1.0])
    for episode, tool_calls in zip(episodes, calls, strict=True):
        for step in episode.steps:
            step.action, step.tool_calls = "go", tool_calls
    lk = build_lake(tmp_path, episodes)
    episode_ids = lk.sql("SELECT episode_id FROM episodes ORDER BY rollout_index")["episode_id"].to_list()
    rows = transcripts.read_walks(lk.snapshot(), episode_ids, None).filter(step_index=0)
    first, same, third = (rows.filter(episode_id=episode)["choice"].item() for episode in episode_ids)
    assert first == same != third


def test_repeats_are_folded_whatever_the_ids_of_their_calls(tmp_path: Path) -> None:
    episode = rollout("t", 0, 1.0, num_steps=8)
    for number, step in enumerate(episode.steps):
        step.action, step.tool_calls = "", called(f"call_{number}", {"id": "A"})
    lk = build_lake(tmp_path, [episode])
    episode_id = lk.sql("SELECT episode_id FROM episodes").item()
    assert transcripts.read_outline(lk.snapshot(), episode_id, ListWindow())["doing"].n_unique() == 1


def test_facts_of_episodes(lk: Lake) -> None:
    snap, sibling_ids = Reader(lk.snapshot()), group_of(lk, "partial")
    rows = {
        row["rollout_index"]: row for row in transcripts.read_facts(snap, sibling_ids, find_credit(snap)).to_dicts()
    }
    assert [rows[i]["outcome"] for i in range(4)] == [1.0, 0.0, 0.0, None]
    assert rows[3]["status"] == "failed"
    assert (rows[0]["a_episode"] > 0, rows[3]["a_episode"], rows[3]["mean_advantage"]) == (True, None, None)
    assert transcripts.read_facts(snap, [1], None).is_empty()


@pytest.mark.parametrize(
    ("outcomes", "beside", "expected"),
    [
        ([0.1, 0.9, 0.5, 0.3, 0.7], None, [1, 0, 4, 3, 2]),
        ([0.1, 0.9, 0.5, 0.3, 0.7], 2, [2, 1, 0, 4, 3]),
        ([0.1, 0.9, 0.5, 0.3, 0.7, 0.2, 0.4, 0.6], None, [1, 0, 4, 5, 7, 3, 2, 6]),
        ([0.1, 0.9, 0.5, 0.3, 0.7, 0.2, 0.4, 0.6, 0.8], None, [1, 0, 8, 5]),
        ([None, 0.0, None, 1.0], None, [3, 1, 0, 2]),
        ([1.0, 0.0], 1, [1, 0]),
    ],
)
def test_the_siblings_that_say_most(
    tmp_path: Path, outcomes: list[float | None], beside: int | None, expected: list[int]
) -> None:
    lk = build_lake(tmp_path, siblings("t", outcomes))
    rows = lk.sql("SELECT episode_id, group_id FROM episodes ORDER BY rollout_index")
    episode_ids = rows["episode_id"].to_list()
    partner = None if beside is None else episode_ids[beside]
    contrast = transcripts.choose_contrast(lk.snapshot(), rows["group_id"][0], None, partner)
    assert [episode_ids.index(episode_id) for episode_id in contrast] == expected


# ---------------------------------------------------------------- what is drawn


@given(st.lists(st.text("ab <&> ", max_size=12), min_size=1, max_size=4))
def test_marks_change_no_text(texts: list[str]) -> None:
    for text, html in zip(texts, mark_differences(texts), strict=True):
        assert unescape(re.sub(r"</?mark>", "", html)) == text
        assert "<mark></mark>" not in html


def test_the_words_that_differ_are_marked() -> None:
    assert mark_differences(["go west now", "go north now", "go west now"]) == [
        "go <mark>west </mark>now",
        "go <mark>north </mark>now",
        "go <mark>west </mark>now",
    ]
    assert mark_differences(["take key", "go west"]) == ["<mark>take key</mark>", "<mark>go west</mark>"]
    assert mark_differences(["<b>", "<i>"]) == ["&lt;<mark>b</mark>&gt;", "&lt;<mark>i</mark>&gt;"]


@pytest.mark.parametrize(
    ("action", "calls", "summary"),
    [
        ("go left", '[{"function": {"name": "f", "arguments": "{}"}}]', "go left"),
        ("", '[{"id": "1", "function": {"name": "find", "arguments": "{\\"q\\": 1}"}}]', 'find({ "q": 1 })'),
        (" ", '[{"function": {"name": "f", "argu', '[{"function": {"name": "f", "argu'),
        (None, None, ""),
    ],
)
def test_what_a_step_did_in_a_line(action: str | None, calls: str | None, summary: str) -> None:
    assert describe_action(action, calls) == summary


# ---------------------------------------------------------------- the page


def test_an_episode_stands_next_to_its_siblings(lk: Lake) -> None:
    sibling_ids = group_of(lk, "mixed")
    at = open_page("compare", episode=sibling_ids[1])
    html = table(at)
    assert re.findall(r">(rollout \d)</a>", html) == ["rollout 1", "rollout 0", "rollout 3", "rollout 2"]
    assert html.index("First divergence") < html.index("You are at the gate.")
    assert html.count("<mark>") == 4, "at the gate two go left and two go right; in the halls all differ from nobody"
    for episode in sibling_ids:
        steps = [f"/episode?episode={ids.to_text(episode)}&step={n}&" for n in range(3)]
        assert [sum(cell.startswith(step) for cell in cells(html)) for step in steps] == [1, 1, 1]


def test_equal_stretches_are_folded_and_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = [rollout("t", index, float(index), num_steps=1) for index in range(2)]
    for index, episode in enumerate(long):
        first = episode.steps[0]
        first.state, first.action = "room 0", "on"
        episode.steps = [type(first)(state=f"room {n}", action="on", reward=0.0) for n in range(100)]
        episode.steps[60].action = f"turn {index}"
    lk = build_lake(tmp_path, long)
    monkeypatch.setenv(ENVIRONMENT, lk.uri)
    id_texts = [
        ids.to_text(episode_id) for episode_id in lk.sql("SELECT episode_id FROM episodes ORDER BY 1")["episode_id"]
    ]
    folded = open_page("compare", episode=id_texts)
    html = table(folded)
    assert "60 steps alike, steps 0 to 59" in html
    assert "39 steps alike, steps 61 to 99" in html
    assert len(cells(html)) == 2
    assert html.count("<mark>") == 2
    assert len(cells(table(open_page("compare", episode=id_texts, open="0")))) == 80, "a page has 40 lines"
    assert "step=99&" in cells(table(open_page("compare", episode=id_texts, open="all", page=3)))[-1] + "&"


def test_episodes_of_several_groups(lk: Lake) -> None:
    pair = [ids.to_text(group_of(lk, "mixed", round_)[0]) for round_ in (0, 1)]
    at = open_page("compare", episode=pair)
    html = table(at)
    assert "demo / mixed / 0, round 0" in html
    assert "demo / mixed / 0, round 1" in html
    assert ">all<" in html, "the credit tells states apart by their text, whichever group they are in"
    assert not at.multiselect


def test_a_lake_without_credit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty reply is marked as in the conversation: not of a tool whose replies are all empty."""
    calls = [("think", "Go."), ("find", ""), ("find", ""), ("think", "x")]
    pair = [rollout("mixed", index, float(index), num_steps=4, collection_round=1) for index in range(2)]
    for record in pair:
        for step, (tool, state) in zip(record.steps, calls, strict=True):
            step.tool_calls, step.state = [{"function": {"name": tool, "arguments": "{}"}}], state
    lk = build_lake(tmp_path, pair)
    monkeypatch.setenv(ENVIRONMENT, lk.uri)
    html = table(open_page("compare", episode=group_of(lk, "mixed")[0]))
    assert ">all<" in html
    assert "mean A" not in html
    assert html.count(">empty reply<") == 2, "the first step of `find` of each"


@pytest.mark.parametrize(
    ("id_texts", "fragment"),
    [([], "names no episodes"), (["zzz"], "invalid id"), (["0000000000000"], "holds no episode `0000000000000`")],
)
def test_wrong_addresses_are_answered_in_words(lk: Lake, id_texts: list[str], fragment: str) -> None:
    at = open_page("compare", episode=id_texts)
    assert [fragment in warning.value for warning in at.warning] == [True]


def test_an_episode_that_is_gone_is_said(lk: Lake) -> None:
    id_texts = [ids.to_text(episode_id) for episode_id in group_of(lk, "mixed")[:2]]
    at = open_page("compare", episode=[*id_texts, "0000000000000"])
    (warning,) = at.warning
    assert "holds no episode `0000000000000`" in warning.value
    assert table(at)


def test_from_the_group_to_its_best_and_worst(lk: Lake) -> None:
    sibling_ids = group_of(lk, "mixed")
    at = open_page("group", group=group_id(lk, sibling_ids[0]))
    (choice,) = at.multiselect
    assert choice.value == [sibling_ids[0], sibling_ids[1], sibling_ids[3], sibling_ids[2]]
    expected = "&".join(f"episode={ids.to_text(episode_id)}" for episode_id in choice.value)
    assert f"/compare?{expected}&score=env_return" in words(at)


def test_the_credit_of_all_is_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lk = build_lake(tmp_path)
    old, new = add_credit(lk), add_credit(lk, omega=0.5)
    monkeypatch.setenv(ENVIRONMENT, lk.uri)
    id_texts = [ids.to_text(episode_id) for episode_id in group_of(lk, "mixed")]
    pages = [open_page("compare", episode=id_texts, credit=ids.to_text(job)) for job in (old, new)]
    means = [re.findall(r"mean A <b>([^<]*)</b>", table(at)) for at in pages]
    assert means[0] != means[1]
    assert RUN in words(pages[0])


def test_a_system_prompt_that_differs_is_shown_from_its_first_other_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nine siblings: rollout 1 lacks a rule; four are preselected, and the page names the number of all."""
    records = siblings("t", [0.5, 1.0, *[0.0] * 7])
    for index, record in enumerate(records):
        rule = "" if index == 1 else "verify **who** asks; "
        system = {"role": "system", "content": [{"type": "text", "text": f"You sell shoes; {rule}be polite."}]}
        record.initial_messages = [system, {"role": "user", "content": f"I am customer {index}."}]
    lk = show(build_lake(tmp_path, records), monkeypatch)
    rows = lk.sql("SELECT episode_id, group_id FROM episodes ORDER BY rollout_index")
    at = open_page("group", group=rows["group_id"][0])
    assert len(at.multiselect[0].value) == 4
    assert "4 of 9" in at.multiselect[0].label
    first, other, third = map(ids.to_text, rows["episode_id"][:3])
    (note,) = open_page("compare", episode=[first, other, third]).info
    for part in ("character 16", "`verify **who** asks; be polite.`", "`be polite.`", "rollout 0, rollout 2"):
        assert part in note.value, part
    assert not open_page("compare", episode=[first, third]).info


@pytest.mark.parametrize(
    ("prompts", "fragment"),
    [(["a", "a"], None), (["", ""], None), (["Be kind.", ""], "character 0"), (["go on", "go"], "character 0")],
)
def test_prompts_that_are_alike_or_end_early(prompts: list[str], fragment: str | None) -> None:
    note = describe_prompts([(str(number), prompt) for number, prompt in enumerate(prompts)])
    assert (note is None) if fragment is None else (note is not None and fragment in note)
