"""Export: what each format holds of an episode, and that the same export is the same bytes, however it was reached."""

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
import pytest
from click.testing import CliRunner

import lake
from lake import EpisodeRecord, Lake, StepRecord, ids
from lake.cli import trajlake
from lake.errors import DataRefusedError, FormatError, UsageError
from lake.execution.local import LocalExecutor
from lake.export import TARGETS, find_target
from lake.export import job as export_files
from lake.export.job import MANIFEST, STATE, ExportRequest, Manifest, export
from lake.export.target import Choices
from lake.formats.registry import choose_format
from lake.records import ScoreRecord, SpanRecord, TokensRecord, identify
from testkit.copies import copied, empty_lake
from testkit.examples import mostly_slow
from testkit.round_trips import there_and_back
from testkit.wording import Wording

CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": "door"}'}}
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Open the door."},
    {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "a door"},
    {"role": "assistant", "content": "Done."},
    {"role": "user", "content": "Thanks."},
]


def rollout(task: str = "door", index: int = 0, reward: float | None = 1.0, last: str = "Done.") -> EpisodeRecord:
    """Two decisions; the second is `last`."""
    return EpisodeRecord(
        task_id=task,
        rollout_index=index,
        env_return=reward,
        tokenizer="tiny",
        initial_messages=CHAT[:2],
        final_observation=CHAT[5:],
        steps=[
            StepRecord(
                state="Open the door.",
                state_role="user",
                action="I look.",
                reasoning="hm",
                tool_calls=[CALL],
                tokens=TokensRecord(context_ids=[1, 2], action_ids=[3], action_logprobs=[-0.1]),
            ),
            StepRecord(state="a door", state_role="tool", context=[CHAT[3]], action=last, reward=0.5),
        ],
        spans=[SpanRecord(trace_id="t", span_id="s", kind="tool", name="look")],
        scores=[
            ScoreRecord(scorer="judge", value=0.25, reason="fair"),
            ScoreRecord(scorer="judge", value=1, step_index=1),
        ],
        extra={"model": "m"},
    )


def two_groups(folder: Path) -> Lake:
    """Two groups: one with different returns, one with equal ones."""

    def make(template: Path) -> None:
        records = [rollout(), rollout(index=1, reward=0.0, last="No."), rollout("other"), rollout("other", 1)]
        empty_lake(template).append(records, run_id="a")

    return copied("two groups to export", make, folder)


@pytest.fixture(scope="module")
def lk(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """Two groups, which nothing here writes to."""
    return two_groups(tmp_path_factory.mktemp("shared") / "lake")


@pytest.fixture
def own_lake(tmp_path: Path) -> Lake:
    """Two groups, for a test that writes to them."""
    return two_groups(tmp_path / "lake")


def exported(lk: Lake, out: Path, name: str, **options: Any) -> tuple[list[dict[str, Any]], Manifest]:
    """The rows of an export, and its manifest."""
    manifest = export(lk, ExportRequest(find_target(name), out, **options))
    rows: list[dict[str, Any]] = []
    for shard in manifest.shards:
        path = (out if out.is_dir() else out.parent) / shard.name
        if path.suffix == ".parquet":
            rows += pl.read_parquet(path).to_dicts()
        else:
            rows += [json.loads(text) for text in path.read_text("utf-8").splitlines()]
    assert manifest.rows == len(rows)
    return rows, manifest


# ---------------------------------------------------------------- formats


def test_our_own_lines_are_ingested_as_the_same_rows(own_lake: Lake, tmp_path: Path) -> None:
    exported(own_lake, tmp_path / "out.jsonl", "jsonl")
    other_lake = empty_lake(tmp_path / "other")
    report = other_lake.ingest(tmp_path / "out.jsonl")
    assert (report.new, report.scores, report.rejected) == (4, 8, 0)
    for name in ("episodes", "steps", "tokens", "spans"):
        elsewhere = ["write_id", *(["source_uri"] if name == "episodes" else [])]
        before, after = (lk.scan(name).drop(elsewhere).collect() for lk in (own_lake, other_lake))
        keys = [column for column in ("episode_id", "step_index", "span_id") if column in before.columns]
        assert before.sort(keys).equals(after.sort(keys)), name
    columns = ["episode_id", "step_index", "scorer", "value", "reason", "scorer_version"]
    score_frames = [
        lk.sql("FROM current_scores").select(columns).sort(columns[:2], nulls_last=False)
        for lk in (own_lake, other_lake)
    ]
    assert score_frames[0].equals(score_frames[1])
    assert own_lake.ingest(tmp_path / "out.jsonl").present == 4, "and the lake it came from knows them"


def test_a_rewritten_history_is_a_chat_of_its_own(tmp_path: Path, wording: Wording) -> None:
    """Step 1 is asked with its own prompt, 2 continues from step 0: no answer is learned after what it never saw."""
    notes: list[dict[str, Any]] = [{}, {"history": "rewritten"}, {"follows": 0}]
    steps = [
        StepRecord(state=f"Q{at}", context=[{"role": "user", "content": f"Q{at}"}], action=f"A{at}", extra=note)
        for at, note in enumerate(notes)
    ]
    lk = empty_lake(tmp_path / "lake")
    lk.append([EpisodeRecord(task_id="t", env_return=1.0, steps=steps)], run_id="a")

    def list_contents(messages: list[dict[str, Any]]) -> list[str]:
        return [message["content"] for message in messages]

    rows, _ = exported(lk, tmp_path / "each.jsonl", "prompt-completion")
    assert [list_contents(row["prompt"] + row["completion"]) for row in rows] == [
        ["Q0", "A0"],
        ["Q1", "A1"],
        ["Q0", "A0", "Q2", "A2"],
    ]
    ((row,), manifest) = exported(lk, tmp_path / "whole.jsonl", "messages")
    assert (list_contents(row["messages"]), row["prompt_messages"]) == (["Q0", "A0", "Q2", "A2"], 1)
    (reason,) = [name for name in manifest.left_out if name.startswith("steps of")]
    assert manifest.left_out[wording(reason)] == 1


def test_a_chat_is_whole_and_says_where_it_comes_from(lk: Lake, tmp_path: Path) -> None:
    rows, manifest = exported(lk, tmp_path / "out", "messages", where="task_id = 'door' AND rollout_index = 0")
    (row,) = rows
    arguments = {"at": "door"}
    tidy = [*CHAT]
    tidy[2] = CHAT[2] | {"tool_calls": [CALL | {"function": {"name": "look", "arguments": arguments}}]}
    assert row["messages"] == tidy
    assert (row["run_id"], row["task_id"], row["rollout_index"], row["reward"]) == ("a", "door", 0, 1.0)
    assert row["scores"] == {"judge": 0.25}
    assert manifest.left_out == {"episodes' extra": 1, "spans": 1, "step scores": 1, "tokens": 1}


def test_a_decision_has_the_chat_before_it_as_prompt(lk: Lake, tmp_path: Path) -> None:
    rows, _ = exported(lk, tmp_path / "out", "prompt-completion", where="task_id = 'door' AND rollout_index = 0")
    assert [len(row["prompt"]) for row in rows] == [2, 4]
    assert [row["completion"][0]["content"] for row in rows] == ["I look.", "Done."]
    assert [(row["reward"], row["step_reward"]) for row in rows] == [(1.0, None), (1.0, 0.5)]


def test_steps_that_are_not_the_policys_are_prompt_and_no_completion(tmp_path: Path, wording: Wording) -> None:
    lk = empty_lake(tmp_path / "lake")
    record = rollout()
    record.steps[0].trainable = False
    record.steps[0].tokens = None
    lk.append([record], run_id="a")
    rows, manifest = exported(lk, tmp_path / "out", "prompt-completion")
    assert [row["step_index"] for row in rows] == [1]
    assert rows[0]["prompt"][2]["content"] == "I look."
    (reason,) = [name for name in manifest.left_out if name.startswith("steps that")]
    assert manifest.left_out[wording(reason)] == 1


def test_the_better_of_two_siblings_is_chosen(lk: Lake, tmp_path: Path, wording: Wording) -> None:
    rows, manifest = exported(lk, tmp_path / "out", "preference")
    (row,) = rows
    assert len(row["prompt"]) == 4, "as far as they are the same"
    assert [row["chosen"][0]["content"], row["rejected"][0]["content"]] == ["Done.", "No."]
    assert (row["chosen_score"], row["rejected_score"]) == (1.0, 0.0)
    (reason,) = [name for name in manifest.left_out if name.startswith("groups")]
    assert manifest.left_out[wording(reason)] == 1


def test_each_episode_stands_in_one_pair_and_ties_in_none(tmp_path: Path) -> None:
    lk = empty_lake(tmp_path / "lake")
    lk.append([rollout(index=n, reward=r, last=str(n)) for n, r in enumerate([1.0, 0.5, 0.5, 0.0, 0.75])], run_id="a")
    rows, _ = exported(lk, tmp_path / "out", "preference")
    assert sorted((row["chosen_score"], row["rejected_score"]) for row in rows) == [(0.75, 0.5), (1.0, 0.0)]
    assert len({row[side] for row in rows for side in ("chosen_id", "rejected_id")}) == 4


def test_decisions_in_one_anchor_state_are_compared_by_step_advantage(own_lake: Lake, tmp_path: Path) -> None:
    with pytest.raises(DataRefusedError, match="no advantages"):
        exported(own_lake, tmp_path / "none", "preference", choices=Choices(pairs="anchors"))
    run = CliRunner().invoke(
        trajlake, ["credit", "gigpo", "--lake", own_lake.uri, "--set", "step_source=terminal_score"]
    )
    assert run.exit_code == 0, run.output
    rows, manifest = exported(own_lake, tmp_path / "out", "preference", choices=Choices(pairs="anchors"))
    (row,) = rows
    assert [message["content"] for message in row["prompt"]] == ["Be brief.", "Open the door.", "I look.", "a door"]
    assert (row["chosen"][0]["content"], row["rejected"][0]["content"]) == ("Done.", "No.")
    assert (row["chosen_step"], row["rejected_step"]) == (1, 1)
    assert manifest.jobs["credit"]["estimator"] == "gigpo"


def test_a_label_says_whether_the_score_is_above_the_border(lk: Lake, tmp_path: Path) -> None:
    rows, _ = exported(lk, tmp_path / "mean", "unpaired")
    assert [(row["rollout_index"], row["label"]) for row in rows] == [(0, True), (1, False)]
    rows, _ = exported(lk, tmp_path / "fixed", "unpaired", choices=Choices(threshold=0.5))
    assert [row["label"] for row in sorted(rows, key=lambda r: (r["task_id"], r["rollout_index"]))] == [1, 0, 1, 1]
    rows, _ = exported(lk, tmp_path / "judge", "unpaired", choices=Choices(score="judge", threshold=0.5))
    assert [row["label"] for row in rows] == [False] * 4


@pytest.mark.parametrize(
    "name", mostly_slow([name for name in TARGETS if f"{name}-parquet" in TARGETS], "messages", "preference")
)
def test_a_parquet_file_has_the_rows_of_the_lines(lk: Lake, tmp_path: Path, name: str) -> None:
    lines, _ = exported(lk, tmp_path / "lines", name)
    rows, _ = exported(lk, tmp_path / "rows", f"{name}-parquet")
    assert len(lines) == len(rows) > 0
    for line, row in zip(lines, rows, strict=True):
        plain = [key for key in line if key not in ("messages", "prompt", "completion", "chosen", "rejected", "scores")]
        assert {key: line[key] for key in plain} == {key: row[key] for key in plain}
        for key in set(line) - set(plain) - {"scores"}:
            assert [m["content"] for m in line[key]] == [m["content"] for m in row[key]]


def test_scout_has_inspects_messages_and_the_episodes_columns(lk: Lake, tmp_path: Path) -> None:
    rows, _ = exported(lk, tmp_path / "out", "scout", where="task_id = 'door' AND rollout_index = 0")
    (row,) = rows
    messages = json.loads(row["messages"])
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool", "assistant", "user"]
    assert messages[2]["tool_calls"] == [
        {"id": "1", "function": "look", "arguments": {"at": "door"}, "type": "function"}
    ]
    assert messages[2]["content"][0] == {"type": "reasoning", "reasoning": "hm"}
    assert len({message["id"] for message in messages}) == 6
    assert (row["task_id"], row["env_return"], json.loads(row["scores"])) == ("door", 1.0, {"judge": 0.25})


def test_arguments_are_objects_in_every_line_also_those_that_are_no_json(tmp_path: Path) -> None:
    lk = empty_lake(tmp_path / "lake")
    argument_texts = ['{"at": "door"}', "{broken", "[1]", '{"_raw": "x"}']
    calls = [
        {"id": "1", "type": "function", "function": {"name": "look", "arguments": text}} for text in argument_texts
    ]
    lk.append([EpisodeRecord(task_id="t", steps=[StepRecord(state="s", action="", tool_calls=calls)])], run_id="a")
    ((row,), _) = exported(lk, tmp_path / "out", "messages")
    assert row["messages"][-1]["content"] is None
    arguments = [call["function"]["arguments"] for call in row["messages"][-1]["tool_calls"]]
    assert arguments == [{"at": "door"}, *({"_raw": text} for text in argument_texts[1:])]
    for name in ("messages", "messages-parquet"):
        after, _ = there_and_back(lk, tmp_path / name, name)
        (step,) = next(iter(after.values())).steps
        back = [call["function"]["arguments"] for call in step.tool_calls or ()]
        assert back[1:] == argument_texts[1:], "the very text"


NAMED = ("score", "reward", "input", "step", "prompt", "advantage", "human", "scores", "prompt_score", "task_id")


@pytest.mark.parametrize(
    "name", mostly_slow(["verl-rollouts", "trl-completions", "messages"], "trl-completions", "messages")
)
def test_scorers_that_are_called_like_columns_come_back_and_never_become_the_return(name: str, tmp_path: Path) -> None:
    lk = empty_lake(tmp_path / "lake")
    scores = [ScoreRecord(scorer=scorer, value=0.25 + index) for index, scorer in enumerate(NAMED)]
    records = [rollout(reward=None), rollout(index=1, reward=1.0), rollout(index=2), rollout(index=2)]
    records[0].scores, records[1].scores, records[2].scores = [], scores, [ScoreRecord(scorer="human", value=None)]
    records[3].agent_id, records[3].seed = "helper", 0
    lk.append(records, run_id="a")
    after, _ = there_and_back(lk, tmp_path, name)
    assert [record.seed for record in after.values() if record.agent_id == "helper"] == [0]
    records_by_rollout = {record.rollout_index: record for record in after.values() if record.agent_id is None}
    assert {(record.run_id, record.task_id) for record in records_by_rollout.values()} == {("a", "door")}
    assert [records_by_rollout[index].env_return for index in range(3)] == [None, 1.0, 1.0]
    expected = {score.scorer: score.value for score in scores}
    assert [{score.scorer: score.value for score in records_by_rollout[index].scores} for index in (0, 1)] == [
        {},
        expected,
    ]
    assert [score.value for score in records_by_rollout[2].scores] == ([] if name == "messages" else [None]), (
        "it scored nothing"
    )


def test_a_scorer_called_reward_is_told_where_the_return_has_its_name(tmp_path: Path, wording: Wording) -> None:
    lk = empty_lake(tmp_path / "lake")
    record = rollout(reward=None)
    record.scores = [ScoreRecord(scorer="reward", value=0.5)]
    lk.append([record], run_id="a")
    after, manifest = there_and_back(lk, tmp_path, "atif")
    assert [record.env_return for record in after.values()] == [None]
    (reason,) = [name for name in manifest.left_out if "`reward`" in name]
    assert manifest.left_out[wording(reason)] == 1


@pytest.mark.parametrize(
    "name",
    mostly_slow(
        ["prompt-completion", "preference", "unpaired", "preference-parquet"], "prompt-completion", "preference"
    ),
)
def test_rows_for_trainers_are_read_as_the_episodes_that_they_are_of(lk: Lake, tmp_path: Path, name: str) -> None:
    after, _ = there_and_back(lk, tmp_path, name, where="task_id = 'door'")
    names = {(record.run_id, record.task_id, record.rollout_index, record.agent_id) for record in after.values()}
    agents = ("step 0", "step 1") if name == "prompt-completion" else (None,)
    assert names == {("a", "door", index, agent) for index in (0, 1) for agent in agents}
    if name == "prompt-completion":
        returns = {(record.rollout_index, record.env_return) for record in after.values()}
        assert returns == {(0, 1.0), (1, 0.0)}
        assert 0.5 in {record.steps[-1].reward for record in after.values()}


def test_a_table_of_scout_is_refused_by_its_name(lk: Lake, tmp_path: Path) -> None:
    exported(lk, tmp_path / "out.parquet", "scout")
    with pytest.raises(FormatError, match="database of Inspect Scout"):
        choose_format(tmp_path / "out.parquet")


def test_a_score_that_nobody_gave_is_refused_with_those_that_there_are(lk: Lake, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no scores of 'nonsense' for episodes; valid: env_return, judge"):
        export(lk, ExportRequest(find_target("preference"), tmp_path / "out", choices=Choices(score="nonsense")))
    unrated_lake = empty_lake(tmp_path / "unrated")
    unrated_lake.append([rollout(reward=None), rollout(index=1, reward=None)], run_id="a")
    with pytest.raises(DataRefusedError, match=r".env_return.; valid: --score judge$"):
        export(unrated_lake, ExportRequest(find_target("preference"), tmp_path / "out"))


def test_a_row_that_no_chat_template_takes_is_left_out(tmp_path: Path, wording: Wording) -> None:
    lk = empty_lake(tmp_path / "lake")
    empty = EpisodeRecord(task_id="empty", env_return=1.0, steps=[StepRecord(state=None, action="Hello.")])
    record = EpisodeRecord(
        task_id="told",
        env_return=1.0,
        initial_messages=CHAT[:1],
        steps=[StepRecord(state="", action="Hello.")],
    )
    lk.append([empty, record, rollout()], run_id="a")
    rows, manifest = exported(lk, tmp_path / "out", "unpaired", choices=Choices(threshold=0.5))
    assert [row["task_id"] for row in rows] == ["door"]
    (reason,) = [name for name in manifest.left_out if name.startswith("rows whose prompt")]
    assert manifest.left_out[wording(reason)] == 2


# ---------------------------------------------------------------- what is exported, and where to


def test_one_file_is_one_shard_however_many_episodes_there_are(
    lk: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lake.export.job.SHARD_EPISODES", 1)
    rows, _ = exported(lk, tmp_path / "out.jsonl", "jsonl", shard_episodes=1)
    assert len(rows) == 4


def test_the_help_lists_the_formats() -> None:
    help_text = " ".join(CliRunner().invoke(trajlake, ["export", "-h"]).stdout.split()).replace("- ", "-")
    listed = help_text.partition("--format TEXT Output format: ")[2].partition(". Append -parquet")[0]
    names = re.findall(r"[a-z]+(?:-[a-z]+)*", listed)
    assert names == [name for name in TARGETS if not name.endswith("-parquet")]


def test_what_is_left_out_has_names(tmp_path: Path) -> None:
    lk = empty_lake(tmp_path / "lake")
    message = {"role": "user", "content": "Hi."} | {f"key_{number}": 1 for number in range(7)}
    lk.append([msgspec.structs.replace(rollout(), initial_messages=[message])], run_id="a")
    command = ["export", "--lake", lk.uri, "--format", "prompt-completion", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(trajlake, command)
    assert "keys of messages (7: key_0, key_1, key_2, key_3, key_4)" in done.stderr
    command = ["export", "--lake", lk.uri, "--format", "atif", "--out", str(tmp_path / "tree")]
    assert ": 2 files of 1 episode (2 steps) as atif" in CliRunner().invoke(trajlake, command).stdout


FILES = [name for name, target in TARGETS.items() if target.container != "tree"]


@pytest.mark.parametrize("name", mostly_slow(FILES, "jsonl", "messages-parquet", "eval-protocol-db"))
def test_the_same_export_is_the_same_bytes_whatever_the_files_of_the_lake(lk: Lake, tmp_path: Path, name: str) -> None:
    def make(template: Path) -> None:
        lk = empty_lake(template)
        for record in [rollout("other", 1), rollout(index=1, reward=0.0, last="No."), rollout("other"), rollout()]:
            lk.append([record], run_id="a")

    export(lk, ExportRequest(find_target(name), tmp_path / "one"))
    other_lake = copied("two groups to export, a file for each rollout", make, tmp_path / "other")
    export(other_lake, ExportRequest(find_target(name), tmp_path / "two"))
    files = sorted(path.name for path in Path(tmp_path, "one").iterdir())
    for file in set(files) - {MANIFEST}:
        assert Path(tmp_path, "one", file).read_bytes() == Path(tmp_path, "two", file).read_bytes()


def test_what_is_retracted_or_forgotten_is_never_exported(own_lake: Lake, tmp_path: Path) -> None:
    first, second = own_lake.sql("SELECT episode_id FROM episodes WHERE task_id = 'door' ORDER BY 1")["episode_id"]
    own_lake.retract([first])
    assert exported(own_lake, tmp_path / "pairs", "preference")[0] == [], "nor is it a sibling of another one"
    own_lake.forget([second])
    rows, manifest = exported(own_lake, tmp_path / "out.jsonl", "jsonl")
    assert {row["task_id"] for row in rows} == {"other"}
    assert manifest.episodes == 2


def test_shards_hold_whole_groups_and_are_one_export_together(lk: Lake, tmp_path: Path) -> None:
    lines_whole, _ = exported(lk, tmp_path / "whole", "jsonl")
    lines_in_parts, manifest = exported(lk, tmp_path / "parts", "jsonl", shard_episodes=1)
    assert lines_in_parts == lines_whole
    assert [shard.name for shard in manifest.shards] == ["00000.jsonl", "00001.jsonl"]
    assert [shard.episodes for shard in manifest.shards] == [2, 2]


def test_an_export_that_was_stopped_goes_on_where_it_was(
    own_lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported(own_lake, tmp_path / "whole", "jsonl", shard_episodes=1)
    write = export_files.write_lines
    written: list[Path] = []

    def once(path: Path, rows: Any) -> int:
        if written:
            raise KeyboardInterrupt
        written.append(path)
        return write(path, rows)

    request = ExportRequest(find_target("jsonl"), tmp_path / "out", shard_episodes=1)
    monkeypatch.setattr(export_files, "write_lines", once)
    with pytest.raises(KeyboardInterrupt):
        export(own_lake, request)
    assert sorted(path.name for path in request.out.iterdir()) == ["00000.jsonl", STATE]
    first = Path(request.out, "00000.jsonl").stat().st_mtime_ns
    own_lake.append([rollout("later")], run_id="a")
    monkeypatch.setattr(export_files, "write_lines", write)
    export(own_lake, request)
    assert Path(request.out, "00000.jsonl").stat().st_mtime_ns == first, "it was there"
    for file in ("00000.jsonl", "00001.jsonl"):
        assert Path(request.out, file).read_bytes() == Path(tmp_path, "whole", file).read_bytes()
    assert not Path(request.out, STATE).exists()


def test_what_is_retracted_while_an_export_is_stopped_is_not_in_it(
    own_lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(path: Path, rows: Any) -> int:
        raise KeyboardInterrupt

    request = ExportRequest(find_target("jsonl"), tmp_path / "out", shard_episodes=1)
    with monkeypatch.context() as patch:
        patch.setattr(export_files, "write_lines", never)
        with pytest.raises(KeyboardInterrupt):
            export(own_lake, request)
    own_lake.retract(own_lake.sql("SELECT episode_id FROM episodes WHERE task_id = 'door'")["episode_id"])
    rows, _ = exported(own_lake, tmp_path / "out", "jsonl", shard_episodes=1)
    assert {row["task_id"] for row in rows} == {"other"}


def test_a_place_that_holds_something_else_is_refused(lk: Lake, tmp_path: Path) -> None:
    Path(tmp_path, "full").mkdir()
    Path(tmp_path, "full", "mine.txt").write_text("mine")
    Path(tmp_path, "there.jsonl").write_text("mine")
    with pytest.raises(UsageError, match="full exists already"):
        export(lk, ExportRequest(find_target("jsonl"), tmp_path / "full"))
    with pytest.raises(UsageError, match=r"there\.jsonl exists already"):
        export(lk, ExportRequest(find_target("jsonl"), tmp_path / "there.jsonl"))
    with pytest.raises(UsageError, match=r"is a file; scout .* \.parquet"):
        export(lk, ExportRequest(find_target("scout"), tmp_path / "there.jsonl"))
    assert Path(tmp_path, "there.jsonl").read_text() == "mine"
    with pytest.raises(UsageError, match=r"new\.parquet .*; messages .* a folder"):
        export(lk, ExportRequest(find_target("messages"), tmp_path / "new.parquet"))


def test_a_bucket_is_refused_and_no_folder_of_its_name_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(trajlake, ["export", "--lake", "L", "--out", "s3://bucket/out"])
    assert isinstance(done.exception, UsageError)
    assert wording(done.exception).startswith("s3://bucket/out: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("steps", mostly_slow([(1, 1), (1, 8192)], (1, 1)))
def test_the_parts_that_a_lake_is_read_in_do_not_show(
    lk: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: tuple[int, int]
) -> None:
    lines_whole, _ = exported(lk, tmp_path / "whole", "jsonl")
    monkeypatch.setattr("lake.export.job.STEPS_PER_BATCH", steps)
    monkeypatch.setattr("lake.export.job.BYTES_PER_BATCH", 0)
    assert exported(lk, tmp_path / "parts", "jsonl")[0] == lines_whole


def test_nothing_chosen_and_unknown_names_are_refused(lk: Lake, tmp_path: Path) -> None:
    with pytest.raises(DataRefusedError, match=r"no episode matches; .*: a"):
        export(lk, ExportRequest(find_target("jsonl"), tmp_path / "out", run_id="b"))
    with pytest.raises(UsageError, match="invalid export format 'csv'; valid: jsonl = "):
        find_target("csv")
    assert not Path(tmp_path, "out").exists()


def test_the_command_says_what_was_written_and_what_not(lk: Lake, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    done = CliRunner().invoke(trajlake, ["export", "--lake", lk.uri, "--format", "messages", "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert done.stdout == f"{out}: 4 rows of 4 episodes (8 steps) as messages\n"
    assert done.stderr.splitlines() == [
        "score: env_return",
        "not exported: episodes' extra (4), spans (4), step scores (4), tokens (4)",
    ]
    assert lake.open(lk.uri).sql("SELECT count(*) AS n FROM episodes").item() == 4


# ---------------------------------------------------------------- formats of others


def test_a_trial_of_harbor_holds_the_chat_the_tokens_the_rewards_and_the_advantages(
    own_lake: Lake, tmp_path: Path
) -> None:
    run = CliRunner().invoke(trajlake, ["credit", "rloo", "--lake", own_lake.uri])
    assert run.exit_code == 0, run.output
    manifest = export(
        own_lake, ExportRequest(find_target("atif"), tmp_path / "out", where="task_id = 'door' AND rollout_index = 0")
    )
    assert manifest.left_out == {"spans": 1}
    (path,) = (tmp_path / "out").glob("a/door__*/agent/trajectory.json")
    document = json.loads(path.read_text("utf-8"))
    assert [step["source"] for step in document["steps"]] == ["system", "user", "agent", "agent", "user"]
    first, second = document["steps"][2:4]
    assert first["tool_calls"] == [{"tool_call_id": "1", "function_name": "look", "arguments": {"at": "door"}}]
    assert first["observation"] == {"results": [{"source_call_id": "1", "content": "a door"}]}
    assert first["metrics"] == {"prompt_token_ids": [1, 2], "completion_token_ids": [3], "logprobs": [-0.1]}
    assert (first["reasoning_content"], second["message"]) == ("hm", "Done.")
    assert second["extra"]["trajlake"] == {"advantage": 1.0, "reward": 0.5, "state_role": "tool"}
    ours = document["extra"]["trajlake"]
    assert (ours["run_id"], ours["task_id"], ours["rollout_index"]) == ("a", "door", 0)
    result = json.loads((path.parents[1] / "result.json").read_text("utf-8"))
    assert result["verifier_result"] == {"rewards": {"reward": 1.0, "judge": 0.25}}
    assert (result["task_name"], result["agent_result"]) == ("door", {})


def test_sub_agents_are_embedded_and_continuations_are_files_beside(tmp_path: Path) -> None:
    lk = empty_lake(tmp_path / "lake")
    root = rollout()
    episode_id = ids.to_text(identify(root, "a").episode_id)
    related = [
        msgspec.structs.replace(
            rollout(), agent_id=name, relation=name, parent_episode_id=episode_id, parent_step_index=0
        )
        for name in ("subagent", "continuation", "fork")
    ]
    lk.append([root, *related], run_id="a")
    export(lk, ExportRequest(find_target("atif"), tmp_path / "out"))
    (folder,) = (tmp_path / "out" / "a").glob(f"door__{episode_id}")
    document = json.loads((folder / "agent" / "trajectory.json").read_text("utf-8"))
    (inner,) = document["subagent_trajectories"]
    refs = {"subagent_trajectory_ref": [{"trajectory_id": inner["trajectory_id"]}]}
    assert refs in document["steps"][2]["observation"]["results"]
    assert document["continued_trajectory_ref"] == "trajectory.cont.json"
    assert (folder / "agent" / "trajectory.cont.json").exists()
    assert len(list((tmp_path / "out" / "a").iterdir())) == 2, "a fork stands for itself"


def test_a_row_of_eval_protocol_holds_what_it_can(lk: Lake, tmp_path: Path) -> None:
    rows, manifest = exported(lk, tmp_path / "out", "eval-protocol", where="task_id = 'door' AND rollout_index = 0")
    (row,) = rows
    assert [message["role"] for message in row["messages"]] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
        "user",
    ]
    assert row["messages"][2]["tool_calls"] == [CALL]
    assert row["input_metadata"] == {"row_id": "door", "completion_params": {}}
    assert row["rollout_status"] == {"code": 100, "message": "Rollout finished", "details": []}
    result = row["evaluation_result"]
    assert (result["score"], result["is_score_valid"], result["metrics"]["judge"]["score"]) == (1.0, True, 0.25)
    assert result["step_outputs"] == [{"step_index": 1, "base_reward": 0.5, "terminated": False, "metrics": {}}]
    turn = {"prompt_token_ids": [1, 2], "completion_token_ids": [3]}
    (payload,) = row["execution_metadata"]["extra"]["assistant_turn_payloads"]
    assert payload | turn == payload
    assert row["execution_metadata"]["experiment_id"] == "a"
    assert manifest.left_out == {"spans": 1, "step scores": 1}


def test_trls_table_has_a_column_for_each_scorer(lk: Lake, tmp_path: Path) -> None:
    rows, _ = exported(lk, tmp_path / "out", "trl-completions", where="task_id = 'door'")
    assert [(row["rollout_index"], row["reward"], row["judge"], row["step"]) for row in rows] == [
        (0, 1.0, 0.25, 0),
        (1, 0.0, 0.25, 0),
    ]
    assert [message["role"] for message in rows[0]["prompt"]] == ["system", "user"]
    assert [message["role"] for message in rows[0]["completion"]] == ["assistant", "tool", "assistant", "user"]
    assert rows[0]["advantage"] is None


def test_what_is_not_learned_from_has_no_weight(tmp_path: Path) -> None:
    lk = empty_lake(tmp_path / "lake")
    record = rollout()
    record.steps[0].trainable = False
    lk.append([record], run_id="a")
    (row,), _ = exported(lk, tmp_path / "messages", "messages")
    assert [message.get("weight") for message in row["messages"]] == [None, None, 0, None, None, None]
    (row,), _ = exported(lk, tmp_path / "rows", "eval-protocol")
    assert [message.get("weight") for message in row["messages"]] == [None, None, 0, None, None, None]


def test_scores_of_elsewhere_leave_with_our_lines_also_where_a_scorer_of_their_name_has_run(
    own_lake: Lake, tmp_path: Path
) -> None:
    job = tmp_path / "judge.py"
    code = "@reward_function\ndef judge(messages, **kwargs):\n    return 0.75\n"
    job.write_text(f"from pipelines.score import reward_function\n\n\n{code}")
    done = CliRunner().invoke(trajlake, ["score", f"{job}:judge", "--lake", own_lake.uri])
    assert done.exit_code == 0, done.output
    scores = own_lake.sql("SELECT step_index, value FROM current_scores").filter(pl.col("step_index").is_null())
    assert set(scores["value"]) == {0.75}
    rows, manifest = exported(own_lake, tmp_path / "out", "jsonl")
    values = {score["value"] for row in rows for score in row["scores"] if "step_index" not in score}
    assert values == {0.25}
    assert manifest.left_out == {"scores of functions": 4}


# ---------------------------------------------------------------- executors


def test_processes_write_the_same_bytes(tmp_path: Path) -> None:
    lk = empty_lake(tmp_path / "lake")
    lk.append([rollout(f"t{n}", index) for n in range(3) for index in range(2)], run_id="r")
    folders = {name: tmp_path / name for name in ("here", "there")}
    for name, folder in folders.items():
        executor = LocalExecutor(1, processes=True) if name == "there" else None
        export(lk, ExportRequest(find_target("messages"), folder, shard_episodes=2), executor=executor)
    files_here, files_there = (
        {file.name: file.read_bytes() for file in folder.iterdir()} for folder in folders.values()
    )
    assert len(files_here) == 4, "three shards and their manifest"
    assert files_there == files_here


def test_a_tree_is_written_by_one_process(tmp_path: Path) -> None:
    lk = empty_lake(tmp_path / "lake")
    lk.append([rollout()], run_id="r")
    with pytest.raises(UsageError, match="writes: use --executor local"):
        export(lk, ExportRequest(find_target("atif"), tmp_path / "out"), executor=LocalExecutor(1, processes=True))
