"""The page of an episode, run by Streamlit without a browser: what its transcript is given, and what is above it."""

import re
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import polars as pl
import pytest

from lake import Lake, ids
from testkit.lakes import add_credit, build_lake, judged_lake, rollout
from testkit.streamlit_pages import assert_sound, elements, episode_id, open_page, show, transcript, words
from viewer.navigation import href
from viewer.reader import Reader
from viewer.transcript import page, view_model
from viewer.transcript.view_model import MAX_STEPS, answer_questions, load_transcript


@pytest.fixture
def lk(shared_lake: Lake, monkeypatch: pytest.MonkeyPatch) -> Lake:
    """The full lake, shown; tests only read it."""
    return show(shared_lake, monkeypatch)


def opened(at: Any) -> dict[str, Any]:
    """What the step of a page's address shows."""
    page_data = transcript(at)
    (step,) = [step for step in page_data["ready"] if step["index"] == page_data["selected"]]
    return dict(step)


def credit_box(at: Any) -> Any:
    (box,) = [box for box in at.selectbox if box.label == "Credit"]
    return box


def texts(step: dict[str, Any]) -> dict[str, str]:
    return {block["name"]: block["text"] for block in step["blocks"]}


def ledger(step: dict[str, Any]) -> dict[str, str]:
    return {line["label"]: line["number"] for line in step["ledger"]}


def test_every_step_has_a_line_and_none_is_open(lk: Lake) -> None:
    found = transcript(open_page("episode", episode=episode_id(lk, "mixed", 0, round_=1)))
    assert [(line["index"], line["text"], line["advantage"]["number"]) for line in found["lines"]] == [
        (0, "go right", "+1.732"),
        (1, "go left", "+1.573"),
        (2, "go right", "+0.866"),
    ]
    assert found["selected"] is None
    assert [line["number"] for line in found["lines"]] == [3, 4, 6], "the first message of each step"
    assert [end["text"] for end in found["ends"]] == [
        "Before the first step: system, user",
        "After the last step: user",
    ]


def test_an_opened_step_has_its_texts_and_its_ledger(lk: Lake) -> None:
    step = opened(open_page("episode", episode=episode_id(lk, "mixed", 0, round_=1), step=0))
    assert texts(step) == {"state": "You are at the gate.", "reasoning": "Plan 0 of rollout 0.", "action": "go right"}
    assert ledger(step) == {
        "reward": "0",
        "return-to-go": "0.902",
        "A_E episode": "+0.866",
        "A_S step": "+0.866",
        "A = A_E + A_S": "+1.732",
    }
    assert step["shared"]["text"] == "State shared: 4 steps of 4 siblings"
    assert step["shared"]["href"].startswith("/group?group=")


def test_a_shared_state_says_how_many_ways_lead_there_and_what_makes_it_doubtful(tmp_path: Path) -> None:
    """Two of three siblings come to an empty state by different actions."""
    siblings = [rollout("t", index, float(index)) for index in range(3)]
    for index, sibling in enumerate(siblings[:2]):
        sibling.steps[0].action = f"go {index}"
        sibling.steps[1].state = "[]"
    lk = build_lake(tmp_path, siblings)
    add_credit(lk)
    snapshot = lk.snapshot()
    credit = ids.to_text(lk.sql("SELECT series_id FROM credit_series").item(0, 0))
    found = load_transcript(lambda query, *args: query(snapshot, *args), href, episode_id(lk, "t", 0), credit)
    assert found is not None
    said = [(answer_questions(found, {"shared": str(index)})["shared"] or {}).get("text") for index in range(2)]
    assert said == [
        "State shared: 3 steps of 3 siblings",
        "State shared: 2 steps of 2 siblings; 2 ways in; empty",
    ]


def test_unknown_is_a_word_and_zero_is_a_digit(lk: Lake) -> None:
    unknown = ledger(opened(open_page("episode", episode=episode_id(lk, "partial", 3), step=0)))
    assert set(unknown.values()) == {"unknown"}
    assert "reward" not in unknown, "no step of it has a reward: none is missing"
    zero = ledger(opened(open_page("episode", episode=episode_id(lk, "dead", 0), step=0)))
    assert list(zero.values()) == ["0", "0.902", "0", "0", "0"]


def test_an_episode_shows_its_scores_and_what_it_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lk = show(judged_lake(tmp_path), monkeypatch)
    at = open_page("episode", episode=episode_id(lk, "t", 0), step=0)
    shown = words(at)
    for said in ("judge <b>0.25</b>", "really failed.", "<b>Expected</b>", "42"):
        assert said in shown, said
    for said in ("duration <b>1 min 30 s</b>", "tokens <b>1,234 out</b>", "cost <b>0.5</b>"):
        assert said in shown, said
    assert re.search(r'title="[^"]+"><span class="">duration', shown), "what the duration covers"
    assert ["latency", "2.5 s"] in opened(at)["facts"]
    assert transcript(at)["rewarded"] is False


def test_scores_of_a_step_stand_in_its_line_and_in_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lk = show(build_lake(tmp_path, [rollout("t", 0, 1.0)]), monkeypatch)
    row = lk.sql("SELECT episode_id, group_id, run_id FROM episodes").row(0, named=True)
    said = {"scorer": "clear", "scorer_version": "1", "step_index": 1, "value": 0.5, "reason": "Half of it."}
    with lk.job(kind="score") as job:
        job.write("scores", pl.DataFrame([row | said]))
    at = open_page("episode", episode=row["episode_id"], step=1)
    assert [line["scores"] for line in transcript(at)["lines"]] == [[], [["clear", "0.5"]], []]
    assert opened(at)["scores"] == [{"scorer": "clear", "value": "0.5", "why": "Half of it."}]


def test_a_step_says_how_often_it_was_trained_on(lk: Lake) -> None:
    add = {"episode": episode_id(lk, "dead", 0), "step": 1}
    facts = dict(opened(open_page("episode", **add))["facts"])
    assert facts["trained on"] == "1 time (demo: update 0)"


def test_what_came_out_of_a_step_branches_off_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lk = show(build_lake(tmp_path, [rollout("t", 0, 1.0)]), monkeypatch)
    parent = episode_id(lk, "t", 0)
    born: dict[str, Any] = {"parent_episode_id": ids.to_text(parent), "parent_step_index": 1, "relation": "subagent"}
    with lk.job(kind="collect", run_id="demo") as job:
        job.record([rollout("part", 0, None, agent_id="`helper`", **born)])
    at = open_page("episode", episode=parent, step=1)
    child = ids.to_text(episode_id(lk, "part", 0))
    text = "subagent: `helper`, 3 steps, completed"
    (branch,) = opened(at)["branches"]
    assert branch.pop("words").startswith("You are at the gate.")
    assert branch == {"text": text, "href": f"/episode?episode={child}", "episode": child}
    assert [[label for label, _, _ in line["marks"]] for line in transcript(at)["lines"]] == [[], ["1 branch"], []]


def test_what_a_page_asks_is_bounded_and_nonsense_is_left_out(lk: Lake) -> None:
    snapshot = lk.snapshot()
    told_ = load_transcript(lambda query, *args: query(snapshot, *args), href, episode_id(lk, "mixed", 0), None)
    assert told_ is not None

    def ask(**asked: str) -> dict[str, Any]:
        return answer_questions(told_, asked)

    found = ask(steps="0,one,99,-7,2,-1,3,")["steps"]
    assert [step["index"] for step in found] == [0, 2, -1, 3]
    assert [block["role"] for block in found[2]["blocks"]] == ["system", "user"]
    assert len(ask(steps="0," * 1000)["steps"]) == MAX_STEPS
    assert ask(steps="") == {"steps": []}
    for nonsense in ({"whole": "x"}, {"whole": "99", "block": "action"}, {"tokens": "-2"}, {"other": "1"}, {}):
        assert ask(**nonsense) == {}
    assert ask(whole="0", block="action")["whole"]["text"] == "go right"
    assert ask(whole="0", block="none") == {"whole": None}
    assert ask(find="HALL") == {"find": [1], "is_name": False}
    assert ask(tokens="0") == {"tokens": []}
    assert ask(shared="0") == {"shared": None}, "no credit"


def test_flags_are_explained_in_the_step_and_what_all_steps_are_stays_out_of_the_lines(lk: Lake) -> None:
    at = open_page("episode", episode=episode_id(lk, "dead", 0), step=0)
    assert "dead group" in words(at)
    found = {label: explanation for label, _, explanation in opened(at)["marks"]}
    assert {"dead group", "constant anchor"} <= set(found)
    assert all(found.values())
    assert [line["marks"] for line in transcript(at)["lines"]] == [[], [], []]


def test_a_page_is_quiet_where_there_is_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No credit of a group without a score, no siblings of a lone episode; a limit is named where it cut."""
    pair = [rollout("pair", number, float(number), status="truncated") for number in range(2)]
    short = [rollout("short", number, float(number), status="truncated", num_steps=1) for number in range(2)]
    lk = show(build_lake(tmp_path, [*pair, *short, rollout("lone", 0, None, num_steps=1)]), monkeypatch)
    add_credit(lk)
    lone = open_page("episode", episode=episode_id(lk, "lone", 0), step=0)
    assert "Compare with siblings" not in words(lone)
    assert (opened(lone)["ledger"], opened(lone)["marks"]) == ([], [])
    assert [line["marks"] for line in transcript(lone)["lines"]] == [[]]
    one = open_page("episode", episode=episode_id(lk, "pair", 0), step=0)
    assert "Compare with siblings" in words(one)
    marked = [step["index"] for step in transcript(one)["ready"] if "truncated" in str(step.get("marks"))]
    assert marked == [2], "the last step"
    one = open_page("episode", episode=episode_id(lk, "short", 0), step=0)
    assert ([line["marks"] for line in transcript(one)["lines"]], opened(one)["marks"][0][0]) == ([[]], "truncated")


def test_terms_of_opposite_signs_are_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two winners pass one hall, one of them late: its episode is good, its step is worse than the other's."""
    quick, lost, slow = rollout("t", 0, 1.0, num_steps=3), rollout("t", 1, 0.0), rollout("t", 2, 1.0, num_steps=9)
    lk = show(build_lake(tmp_path, [quick, lost, slow]), monkeypatch)
    add_credit(lk)
    at = open_page("episode", episode=episode_id(lk, "t", 2), step=1)
    assert opened(at)["disagree"] is True
    marked = [line["index"] for line in transcript(at)["lines"] if "terms disagree" in str(line["marks"])]
    assert marked == [1]
    assert ":gray[Terms disagree] **1**" in words(at)


def test_the_bar_says_the_outcome_that_the_run_goes_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lk = show(build_lake(tmp_path, [rollout("a", n, None) for n in range(2)]), monkeypatch)
    rows = lk.sql("SELECT run_id, group_id, episode_id FROM episodes ORDER BY rollout_index LIMIT 1")
    with lk.job(kind="score") as job:
        names = {"scorer": pl.lit("<judge>"), "scorer_version": pl.lit("1"), "step_index": pl.lit(None, pl.Int32)}
        job.write("scores", rows.with_columns(**names, value=0.25))
    every = lk.sql("SELECT episode_id FROM episodes ORDER BY rollout_index")["episode_id"]
    for episode, said in zip(every, ("0.25", "\N{EN DASH}"), strict=True):
        assert f"<span>&lt;judge&gt; {said}</span>" in words(open_page("episode", episode=ids.to_text(episode)))
    group = ids.to_text(rows["group_id"][0])
    sent = page.render_html(page.load_transcripts(Reader(lk.snapshot()).read, None, None, group)).decode()
    assert "<th>Outcome</th>" in sent
    assert "&lt;judge&gt; <b>0.25</b>" in sent
    for said, colour in (("0.25", "middling"), ("\N{EN DASH}", "")):
        assert f'<td>completed</td><td class="{colour}">{said}</td><td>3</td>' in sent


def test_the_bar_says_where_the_episode_belongs(lk: Lake) -> None:
    at = open_page("episode", episode=episode_id(lk, "mixed", 2))
    (bar,) = [e.proto.body for e in elements(at) if e.type == "html" and "trajlake-bar" in e.proto.body[:40]]
    for said in (
        '<a href="/?run=demo">demo</a>',
        '<a href="/episodes?run=demo&amp;task=mixed">mixed</a>',
        '<a href="/group?group=',
        "<span>rollout 2, round 0</span>",
        "<span>completed</span><span>outcome 0</span>",
    ):
        assert said in bar, said


def test_previous_and_next_follow_the_filtered_list(lk: Lake) -> None:
    """The first has none before it; each leads on with its key, the filter and the rest of the address."""
    found = [ids.to_text(episode_id(lk, "mixed", index)) for index in range(4)]
    for position, one in enumerate(found):
        text = words(open_page("episode", episode=one, step=1, list="task=mixed&round=0&sort=-num_steps"))
        assert f"{position + 1} of 4 episodes that match the filter" in text
        for label, key, other in (("\u2039 Previous", "p", position - 1), ("Next \u203a", "n", position + 1)):
            if other in range(4):
                address = f"?episode={found[other]}&amp;list=task%3Dmixed%26round%3D0%26sort%3D-num_steps"
                assert f'<a href="{address}" data-key="{key}" title="key {key}">{label}</a>' in text
            else:
                assert f"<span>{label}</span>" in text


def test_a_list_of_one_has_no_plural(lk: Lake) -> None:
    only = episode_id(lk, "mixed", 0)
    query = f"SELECT episode_id FROM episodes WHERE episode_id = {only}"
    text = words(open_page("episode", episode=only, list=urlencode({"sql": query})))
    assert "1 of 1 episode that matches the filter" in text


def test_an_episode_outside_the_list_is_shown_all_the_same(lk: Lake) -> None:
    at = open_page("episode", episode=episode_id(lk, "mixed", 0), list="task=dead")
    assert "in the filtered list" in words(at)
    assert len(transcript(at)["lines"]) == 3


def test_reasoning_and_tool_calls_can_be_hidden(lk: Lake) -> None:
    here = {"episode": episode_id(lk, "mixed", 0)}
    assert transcript(open_page("episode", **here))["hidden"] == []
    assert transcript(open_page("episode", reasoning="false", tools="false", **here))["hidden"] == [
        "reasoning",
        "tools",
    ]


def test_a_step_is_a_deep_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lk = show(build_lake(tmp_path, [rollout("t", 0, 1.0, num_steps=25)]), monkeypatch)
    here = {"episode": episode_id(lk, "t", 0)}
    found = transcript(open_page("episode", step=17, **here))
    assert found["selected"] == 17
    assert [step["index"] for step in found["ready"]] == [16, 17, 18, 19, 20], "the conversation around it"
    assert "no step 99" in open_page("episode", step=99, **here).warning[0].value
    assert transcript(open_page("episode", step="one", **here))["selected"] is None


def test_a_very_long_episode_has_pages_of_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_model, "MAX_LINES", 10)
    record = rollout("t", 0, 1.0, num_steps=25)
    record.steps[20].is_action_valid = False
    record.steps[22].tool_calls, record.steps[23].state = [{"function": {"name": "find", "arguments": "{}"}}], ""
    lk = show(build_lake(tmp_path, [record]), monkeypatch)
    here = {"episode": episode_id(lk, "t", 0)}
    at = open_page("episode", step=17, **here)
    assert [line["index"] for line in transcript(at)["lines"]] == list(range(10, 20))
    assert transcript(at)["ends"] == []
    at.get("pagination")[0].set_value(3)
    assert_sound(at.run())
    assert [line["index"] for line in transcript(at)["lines"]] == list(range(20, 25))
    malformed = [[mark[0] for mark in step["marks"]].count("malformed action") for step in transcript(at)["ready"][:3]]
    assert malformed == [0, 1, 0]
    views = transcript(at)["lines"][2], transcript(at)["ready"][3]
    empty = [[mark[:2] for mark in step["marks"] if mark[0] == "empty reply"] for step in views]
    assert empty == [[["empty reply", "gray"]]] * 2


def test_the_credit_is_chosen_by_job_or_series(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lk = show(build_lake(tmp_path), monkeypatch)
    old, new = add_credit(lk, omega=0.0), add_credit(lk)
    series, current = (lk.sql("SELECT series_id FROM job_runs WHERE job_id = ?", [job]).item() for job in (old, new))
    here = {"episode": episode_id(lk, "mixed", 0), "step": 0}

    def chosen(**address: Any) -> tuple[str, dict[str, str]]:
        at = open_page("episode", **here, **address)
        return credit_box(at).value, ledger(opened(at))

    newest, by_job, by_series = chosen(), chosen(credit=old), chosen(credit=series)
    assert newest[0] == ids.to_text(current)
    assert (by_job[0], by_series[0]) == (ids.to_text(old), ids.to_text(series))
    assert by_job[1] == by_series[1]
    assert by_job[1]["A = A_E"] == "+1.500"
    assert newest[1] != by_job[1]
    wrong = open_page("episode", credit="zzz", **here)
    assert "Credit `zzz` does not cover this" in wrong.warning[0].value
    assert credit_box(wrong).value == ids.to_text(current)
    credit_box(wrong).set_value(ids.to_text(series))
    assert_sound(wrong.run())
    assert ledger(opened(wrong)) == by_job[1]


def test_an_episode_without_credit_is_shown_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lk = show(build_lake(tmp_path, [rollout("t", 0, 1.0)]), monkeypatch)
    at = open_page("episode", episode=episode_id(lk, "t", 0))
    assert [box for box in at.selectbox if box.label == "Credit"] == []
    found = transcript(at)
    assert found["credited"] is False
    assert [line["text"] for line in found["lines"]] == ["go right", "go left", "go right"]
