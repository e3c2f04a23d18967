"""`trajlake show`: an episode to read, no matter what stands in it."""

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from lake import Lake, TokensRecord, ids
from lake.cli import trajlake
from lake.errors import DataRefusedError, UsageError
from lake.judgements.credit import describe_outdated, find_changed_groups, find_credit
from lake.judgements.selections import select_where
from lake.read import episode_text
from lake.read.episode_text import find_named
from pipelines.credit.estimators.grpo import GRPO
from pipelines.credit.job import run_credit
from pipelines.score.job import run_score
from testkit.command_line import runner
from testkit.copies import empty_lake
from testkit.episodes import episode
from testkit.lakes import add_credit, build_lake, rollout, siblings
from testkit.score_lakes import InProcess
from testkit.wording import Wording

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31mred\r\n\u202egnp.exe\x00\ud7ff"


@pytest.fixture(scope="module")
def lk(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    lk = empty_lake(tmp_path_factory.mktemp("show") / "lake")
    tools = [{"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": "door"}'}}]
    special = rollout("hostile", 0, None, status="failed", error=f"broke {HOSTILE}")
    special.steps[0].state = f"state {HOSTILE}\n" + "long line\n" * 50
    special.steps[0].tool_calls = tools
    special.steps[1].action = "x" * 5000
    special.steps[1].is_action_valid = False
    special.steps[1].reasoning = None
    with lk.job(kind="collect", run_id="run") as job:
        job.record([*siblings("maze", [1.0, 0.0, 0.0]), special])
    add_credit(lk, gamma=0.5)
    add_credit(lk, gamma=1.0)
    first = lk.sql("SELECT episode_id, group_id, run_id FROM episodes WHERE task_id = 'maze' AND rollout_index = 0")
    with lk.job(kind="score") as job:
        scores = pl.concat([first.with_columns(step_index=pl.lit(n, pl.Int32)) for n in (None, 1)])
        job.write(
            "scores",
            scores.with_columns(
                scorer=pl.lit("judge"), scorer_version=pl.lit("1"), value=pl.Series([0.25, None]), error=pl.lit(HOSTILE)
            ),
        )
    return lk


def episode_of(lk: Lake, task: str, index: int = 0) -> int:
    return int(lk.sql("SELECT episode_id FROM episodes WHERE task_id = ? AND rollout_index = ?", [task, index]).item())


def group_of(lk: Lake, episode_id: int) -> int:
    return int(lk.sql("SELECT group_id FROM episodes WHERE episode_id = ?", [episode_id]).item())


def text_of(lk: Lake, episode_id: int, **options: Any) -> str:
    return "\n".join(
        line for _, line in episode_text.format_episode(episode_text.read_episode(lk.snapshot(), episode_id), **options)
    )


def run(lk: Lake, *arguments: str) -> str:
    result = CliRunner().invoke(trajlake, ["show", *arguments, "--lake", lk.uri], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


# ---------------------------------------------------------------- what is shown


def test_every_number_of_a_step_is_there(lk: Lake) -> None:
    episode_id = episode_of(lk, "maze")
    credit = lk.sql(
        "SELECT a.* FROM latest_advantages AS a JOIN job_runs USING (job_id) WHERE episode_id = ? "
        "QUALIFY ended_at = max(ended_at) OVER () ORDER BY step_index",
        [episode_id],
    )
    shown_episode = episode_text.read_episode(lk.snapshot(), episode_id)
    assert [step["step_index"] for step in shown_episode["steps"]] == [0, 1, 2]
    for name in ("return_to_go", "a_episode", "a_step", "advantage", "flags"):
        assert [step[name] for step in shown_episode["steps"]] == credit[name].to_list()
    assert [step["reward"] for step in shown_episode["steps"]] == [0.0, 0.0, 1.0]
    assert shown_episode["credit"]["title"] == find_credit(lk.snapshot()).title
    assert len(shown_episode["credit"]["others"]) == 1
    assert shown_episode["scores"][0]["value"] == 0.25
    assert [step["scores"] for step in shown_episode["steps"]] == [[], shown_episode["steps"][1]["scores"], []]
    text = text_of(lk, episode_id)
    head = text.splitlines()[0]
    for part in (ids.to_text(episode_id), "run run", "task maze", "completed", "return 1", "3 steps"):
        assert part in head
    first = next(line for line in text.splitlines() if line.startswith("step 0"))
    row = credit.row(0, named=True)
    assert first.startswith(
        f"step 0   reward 0   return-to-go {row['return_to_go']:.6g}   A_E {row['a_episode']:.6g}   "
        f"A_S {row['a_step']:.6g}   A {row['advantage']:.6g}"
    )
    assert "score judge: 0.25" in text
    assert "score judge: -" in text
    assert "You are at the gate." in text
    assert "after the last step" in text


def test_another_series_can_be_chosen(lk: Lake) -> None:
    episode_id = episode_of(lk, "maze")
    series = lk.sql("SELECT DISTINCT series_id FROM latest_advantages")["series_id"].to_list()
    gathered = [episode_text.read_episode(lk.snapshot(), episode_id, ids.to_text(series_id)) for series_id in series]
    assert [shown_episode["credit"]["series_id"] for shown_episode in gathered] == series
    assert gathered[0]["steps"][0]["return_to_go"] != gathered[1]["steps"][0]["return_to_go"]
    with pytest.raises(UsageError, match="--credit 'grpo' names no"):
        episode_text.read_episode(lk.snapshot(), episode_id, "grpo")


def test_advantages_that_are_older_than_the_data_are_told(tmp_path: Path, wording: Wording) -> None:
    lk = empty_lake(tmp_path / "lake")
    with lk.job(kind="collect", run_id="run") as job:
        job.record([*siblings("maze", [1.0, 0.0, 0.0]), *siblings("tower", [1.0, 0.0])])
    mazes = [episode_of(lk, "maze", index) for index in range(3)]

    def read_outdated(episode_id: int) -> str | None:
        snapshot = lk.snapshot()
        gathered = episode_text.read_episode(snapshot, episode_id)
        outdated: str | None = gathered["credit"]["outdated"]
        assert outdated is None or outdated in "\n".join(line for _, line in episode_text.format_episode(gathered))
        return outdated

    def changed() -> list[tuple[int, ...]]:
        return find_changed_groups(lk.snapshot(), find_credit(lk.snapshot())).rows()

    add_credit(lk)
    assert read_outdated(mazes[0]) is None
    assert changed() == []
    lk.retract([mazes[2]])
    assert changed() == [(group_of(lk, mazes[0]), 1, 0, 0)]
    message = wording(read_outdated(mazes[0]))
    assert "1 group lost episodes" in message
    assert "`trajlake credit gigpo ...` again" in message
    assert describe_outdated(lk.snapshot(), find_credit(lk.snapshot()), group_id=group_of(lk, mazes[0])) == message
    assert read_outdated(episode_of(lk, "tower")) is None, "another group's business"
    assert describe_outdated(lk.snapshot(), find_credit(lk.snapshot())) == message
    add_credit(lk)
    assert read_outdated(mazes[0]) is None
    with lk.job(kind="collect", run_id="run") as job:
        job.record(siblings("maze", [0.0] * 4)[3:])
    assert changed() == [(group_of(lk, mazes[0]), 0, 1, 0)]
    assert "1 episode joined a group" in str(read_outdated(mazes[0]))
    add_credit(lk)
    assert read_outdated(mazes[0]) is None
    with lk.job(kind="collect", run_id="run") as job:
        job.record(siblings("tower", [1.0, 1.0], attempt=1)[1:])
    assert changed() == [(group_of(lk, episode_of(lk, "tower")), 1, 1, 1)], "a retry takes the place of another"
    named = find_credit(lk.snapshot(), ids.to_text(lk.sql("SELECT any_value(job_id) FROM advantages").item()))
    assert find_changed_groups(lk.snapshot(), named).is_empty(), "that job was asked for"


def test_advantages_of_an_earlier_version_of_a_score_are_told(tmp_path: Path, wording: Wording) -> None:
    lk = empty_lake(tmp_path / "lake")
    lk.append(siblings("maze", [1.0, 0.0, 0.0]), run_id="run")
    for version in ("1", "2"):
        work = InProcess(lambda rollouts: [float(n) for n, _ in enumerate(rollouts)], name="judge", version=version)
        run_score(lk, work)
        if version == "1":
            run_credit(lk, GRPO(), score="judge")
            assert describe_outdated(lk.snapshot(), find_credit(lk.snapshot())) is None
    sentence = wording(describe_outdated(lk.snapshot(), find_credit(lk.snapshot())))
    assert "judge is at version 2" in sentence
    assert "`trajlake credit grpo ...` again" in sentence
    run_credit(lk, GRPO(), score="judge@1")
    assert describe_outdated(lk.snapshot(), find_credit(lk.snapshot())) is None, "that version was asked for"


def test_unknown_is_a_dash_and_never_zero(lk: Lake) -> None:
    text = text_of(lk, episode_of(lk, "hostile"))
    assert "return -" in text.splitlines()[0]
    assert "step 0   reward -   return-to-go -   A_E -   A_S -   A -" in text
    assert "invalid action]" in text.split("step 1")[1].splitlines()[0]


def test_long_texts_are_cut_unless_asked_for(lk: Lake) -> None:
    episode_id = episode_of(lk, "hostile")
    cut, full = text_of(lk, episode_id), text_of(lk, episode_id, full=True)
    assert cut.count("long line") < 50 == full.count("long line")
    assert "x" * 5000 not in cut
    assert "x" * 5000 in full
    assert "4,400 more characters (--full)" in cut
    assert "(--full)" not in full


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        (None, []),
        ("[]", []),
        ('[{"function": {"name": "f", "arguments": "{\\"a\\": 1}"}}]', ['f({"a": 1})']),
        ('[{"name": "f", "arguments": {"a": 1}}]', ['f({"a": 1})']),
        ('{"name": "f"}', ["f(null)"]),
        ("[1, null]", ["1", "null"]),
        ("not json", ["not json"]),
        ('[{"function": 3}]', ['{"function": 3}']),
    ],
)
def test_tool_calls_of_any_form_are_shown(calls: str | None, expected: list[str]) -> None:
    assert episode_text.format_tool_calls(calls) == expected


def test_payloads_that_were_moved_out_are_shown_in_their_place(tmp_path: Path) -> None:
    lk = empty_lake(tmp_path / "lake")
    big = rollout("t", 0, 1.0)
    big.steps[0].tool_calls = [{"name": "write", "arguments": "y" * 100_000}]
    big.final_observation = [{"role": "tool", "content": "z" * 100_000}]
    with lk.job(kind="collect", run_id="run") as job:
        job.record([big])
    assert lk.scan("blobs").collect().height == 2
    text = text_of(lk, episode_of(lk, "t"), full=True)
    assert "write(" + "y" * 100_000 + ")" in text
    assert "z" * 100_000 in text
    assert "blob:sha256:" not in text


# ---------------------------------------------------------------- hostile text


@given(st.text())
def test_no_character_that_steers_a_terminal_gets_through(text: str) -> None:
    assert all(char == "\n" or char.isprintable() for char in episode_text.make_printable(text))


def test_what_can_be_read_stays_as_it_is() -> None:
    assert (
        episode_text.make_printable("a b\n\u00e9 \u4f60 \U0001f600 <b>[red]")
        == "a b\n\u00e9 \u4f60 \U0001f600 <b>[red]"
    )
    assert episode_text.make_printable("a\r\nb\tc") == "a\nb    c"


@pytest.mark.parametrize("options", [[], ["--full"]])
def test_hostile_texts_do_not_reach_the_terminal(lk: Lake, options: list[str]) -> None:
    for task in ("hostile", "maze"):
        output = run(lk, ids.to_text(episode_of(lk, task)), *options)
        assert all(char == "\n" or char.isprintable() for char in output)
    assert "owned" in output or "judge" in output


def test_an_error_with_the_text_of_others_is_harmless_too(lk: Lake, tmp_path: Path) -> None:
    other_lake = empty_lake(tmp_path / "lake")
    with other_lake.job(kind="collect", run_id="run") as job:
        job.record([rollout("t", 0, 1.0)])
    episode_id = episode_of(other_lake, "t")
    other_lake.retract([episode_id], HOSTILE)
    with pytest.raises(UsageError) as raised:
        episode_text.find_episode(other_lake.snapshot(), ids.to_text(episode_id))
    assert "\x1b" not in str(raised.value)
    assert "retracted (" in str(raised.value)


# ---------------------------------------------------------------- finding it


def test_the_beginning_of_an_id_will_do_if_it_is_the_only_one(lk: Lake) -> None:
    snapshot = lk.snapshot()
    all_ids = [ids.to_text(episode_id) for episode_id in snapshot.sql("SELECT episode_id FROM episodes")["episode_id"]]
    for text in all_ids:
        assert episode_text.find_episode(snapshot, text) == ids.from_text(text)
        assert episode_text.find_episode(snapshot, f" {text.upper()} ") == ids.from_text(text)
        for length in range(1, len(text)):
            matching = [id_text for id_text in all_ids if id_text.startswith(text[:length])]
            if len(matching) == 1:
                assert episode_text.find_episode(snapshot, text[:length]) == ids.from_text(text)
            else:
                with pytest.raises(UsageError, match="begins several episodes"):
                    episode_text.find_episode(snapshot, text[:length])


def test_an_episode_is_found_by_the_names_of_its_task_and_run_and_its_number(lk: Lake) -> None:
    episodes = lk.sql("SELECT run_id, task_id, rollout_index, collection_round, episode_id FROM episodes")
    for row in episodes.iter_rows(named=True):
        same = episodes.filter(task_id=row["task_id"], rollout_index=row["rollout_index"])
        names = {"task": row["task_id"], "rollout": row["rollout_index"], "run": row["run_id"]}
        if same.height == 1:
            assert find_named(lk.snapshot(), **names) == row["episode_id"]
        else:
            with pytest.raises(UsageError, match=f"means {same.height} episodes"):
                find_named(lk.snapshot(), **names)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--task", "nowhere"], "there is no episode of task nowhere; tasks are "),
        (
            ["--task", "maze", "--rollout", "9"],
            "rollouts of task maze are 0, 1, 2; `trajlake sql 'FROM episodes' --lake ",
        ),
        (["--task", "nowhere", "--rollout", "3"], "there is no episode of task nowhere, rollout 3; tasks are "),
        (["--rollout", "99"], "there is no episode of rollout 99; `trajlake sql"),
        ([], "name one episode by its id (or its beginning) or by --task, --rollout and --run"),
        (["0", "--task", "t"], "name one episode by its id (or its beginning) or by --task, --rollout and --run"),
    ],
)
def test_names_that_mean_no_episode_say_which_would(
    lk: Lake, arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in runner(monkeypatch, capsys)("show", *arguments, "--lake", lk.uri).fault


def test_names_that_mean_several_episodes_say_what_to_add(tmp_path: Path) -> None:
    lk = build_lake(tmp_path / "lake", [episode("t", n, run_id=run) for run in "ab" for n in range(2)], run_id="own")
    with pytest.raises(UsageError, match=r"task t means 4 episodes \(.*\); add --run and --rollout$"):
        find_named(lk.snapshot(), task="t", rollout=None, run=None)
    with pytest.raises(UsageError, match=r"task t, rollout 1 means 2 episodes .*; add --run$"):
        find_named(lk.snapshot(), task="t", rollout=1, run=None)
    episode_id = find_named(lk.snapshot(), task="t", rollout=1, run="b")
    named = lk.sql("SELECT run_id, rollout_index, episode_id FROM episodes").filter(run_id="b", rollout_index=1)
    assert named["episode_id"].item() == episode_id


@pytest.mark.parametrize("text", ["", "u", "8", "z", "0" * 14, "a b", "'; DROP"])
def test_what_is_no_id_is_misuse(lk: Lake, text: str) -> None:
    with pytest.raises(UsageError, match="not an episode id"):
        episode_text.find_episode(lk.snapshot(), text)


def test_an_unknown_id_says_where_the_known_ones_are(lk: Lake, wording: Wording) -> None:
    with pytest.raises(UsageError, match=r"'0000000000000'; .*--task.*`trajlake sql") as unknown:
        episode_text.find_episode(lk.snapshot(), "0" * 13)
    wording(unknown.value)


def test_an_episode_that_a_retry_replaced_says_so(tmp_path: Path) -> None:
    lk = empty_lake(tmp_path / "lake")
    for attempt in (0, 1):
        with lk.job(kind="collect", run_id="run") as job:
            job.record([rollout("t", 0, 1.0, attempt=attempt)])
    (remaining_id,) = lk.sql("SELECT episode_id FROM episodes")["episode_id"]
    (retracted_id,) = lk.sql("SELECT episode_id FROM retractions")["episode_id"]
    with pytest.raises(UsageError, match=f"is superseded; {ids.to_text(remaining_id)} took its place"):
        episode_text.find_episode(lk.snapshot(), ids.to_text(retracted_id))


# ---------------------------------------------------------------- the command


def test_the_command_prints_text_or_json(lk: Lake) -> None:
    id_text = ids.to_text(episode_of(lk, "maze"))
    assert run(lk, id_text).splitlines()[0].startswith(f"episode {id_text}   run run   task maze")
    document = json.loads(run(lk, id_text, "--format", "json"))
    assert document["episode"]["episode_id"] == id_text
    assert document["episode"]["env_return"] == 1.0
    assert [step["step_index"] for step in document["steps"]] == [0, 1, 2]
    assert ids.is_text(document["credit"]["series_id"])
    other_document = json.loads(run(lk, id_text, "--format", "json", "--credit", document["credit"]["series_id"]))
    assert other_document["credit"]["series_id"] == document["credit"]["series_id"]
    with pytest.raises(UsageError, match="--credit"):
        run(lk, id_text, "--credit", "nonsense")


def test_an_older_state_shows_what_is_gone_since(tmp_path: Path) -> None:
    lk = empty_lake(tmp_path / "lake")
    with lk.job(kind="collect", run_id="run") as job:
        job.record([rollout("t", 0, 1.0)])
    episode_id = episode_of(lk, "t")
    lk.name_snapshot("before")
    lk.retract([episode_id], "wrong")
    for naming in ([ids.to_text(episode_id)], ["--task", "t"], ["--task", "t", "--rollout", "0"]):
        with pytest.raises(UsageError, match=rf"episode {ids.to_text(episode_id)} is retracted \(wrong\)"):
            run(lk, *naming)
    with pytest.raises(DataRefusedError, match=r"retracted \(1\)"):
        select_where(lk.snapshot(), ["episode_id"], None)
    assert "task t" in run(lk, ids.to_text(episode_id), "--as-of", "before")


# ---------------------------------------------------------------- saved episodes


def sampled_lake(folder: Path) -> Lake:
    """Two siblings with tokens, estimates, a step score and advantages."""
    lk = empty_lake(folder)
    records = siblings("maze", [1.0, 0.0])
    for record in records:
        record.steps[0].value_estimate = 0.75
        record.steps[0].tokens = TokensRecord(
            context_ids=[1], action_ids=[2, 3], action_logprobs=[-0.25, -9.0], action_mask=[True, False]
        )
    lk.append(records, run_id="run")
    of_steps = lk.sql("SELECT episode_id, step_index, step_index / 4 AS value FROM steps")
    lk.add_scores(of_steps, name="judge")
    add_credit(lk, gamma=0.5)
    return lk


def test_a_saved_file_has_steps_scores_and_advantages_and_is_printed_without_the_lake(tmp_path: Path) -> None:
    lk = sampled_lake(tmp_path / "lake")
    saved = tmp_path / "saved.jsonl"
    saved.write_text(run(lk, "--where", "true", "--format", "jsonl", "--with", "advantages"))
    lines = [json.loads(line) for line in saved.read_text().splitlines()]
    rows = lk.sql("SELECT * FROM current_advantages ORDER BY episode_id, step_index").to_dicts()
    steps = [step for line in lines for step in line["steps"]]
    assert len(lines) == 2
    for name in ("return_to_go", "a_episode", "a_step", "advantage", "anchor_size"):
        assert [step[name] for step in steps] == [row[name] for row in rows]
    assert [step["anchor_key"] for step in steps] == [ids.to_text(row["anchor_key"]) for row in rows]
    assert [[score["value"] for score in step["scores"]] for step in steps] == [[row["step_index"] / 4] for row in rows]
    first = lines[0]["steps"][0]
    assert (first["value_estimate"], first["logprob"], first["n_trained"]) == (0.75, -0.25, 1)
    assert "action_ids" not in first
    command = CliRunner().invoke(trajlake, ["show", str(saved)], env={"TRAJLAKE_LAKE": None}, catch_exceptions=False)
    texts = [text_of(lk, ids.from_text(line["episode"]["episode_id"])) for line in lines]
    assert command.stdout.split() == "\n".join(texts).split()
    assert {"-0.25", "0.75"} <= set(command.stdout.split())
    document = tmp_path / "one.json"
    document.write_text(run(lk, lines[0]["episode"]["episode_id"], "--format", "json"))
    again = CliRunner().invoke(trajlake, ["show", str(document)], catch_exceptions=False)
    assert again.stdout.split() == texts[0].split()


def test_what_is_told_of_steps_is_chosen(tmp_path: Path) -> None:
    lk = sampled_lake(tmp_path / "lake")
    options = ("--task", "maze", "--rollout", "0", "--format", "jsonl")
    (first, *_) = json.loads(run(lk, *options, "--with", "tokens"))["steps"]
    assert (first["action_ids"], first["action_logprobs"], first["action_mask"]) == (
        [2, 3],
        [-0.25, -9.0],
        [True, False],
    )
    assert "advantage" not in first
    step = json.loads(run(lk, *options, "--with", "tokens", "--with", "advantages"))["steps"][0]
    assert {"action_ids", "advantage"} <= step.keys()


def test_a_saved_hostile_episode_prints_no_control_character(lk: Lake, tmp_path: Path) -> None:
    saved = tmp_path / "saved.jsonl"
    saved.write_text(run(lk, "--task", "hostile", "--format", "jsonl"))
    printed = CliRunner().invoke(trajlake, ["show", str(saved)], catch_exceptions=False).stdout
    assert all(character.isprintable() or character == "\n" for character in printed)
    assert printed.split() == text_of(lk, episode_of(lk, "hostile")).split()


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"task_id": "t", "steps": []}',
        '{"episode": {"episode_id": "no id", "group_id": "0000000000000"}, "steps": []}',
        '{"episode": {"episode_id": "0000000000000", "group_id": "0000000000000"}, "steps": [{"step_index": "x"}]}',
    ],
)
def test_a_file_of_something_else_is_refused_by_its_line(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "saved.jsonl"
    path.write_text(f"\n{text}\n")
    fault = runner(monkeypatch, capsys)("show", str(path)).fault
    assert f"{path}, line 2" in fault


def test_an_id_needs_a_lake(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("TRAJLAKE_LAKE", raising=False)
    assert "--lake" in runner(monkeypatch, capsys)("show", "0000000000000").err
