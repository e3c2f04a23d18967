"""A dry run counts what an ingest of the same would, shows three episodes as they would be, and writes nothing."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lake import EpisodeRecord, StepRecord, TokensRecord
from lake.errors import UsageError
from lake.formats.base.source import Input
from lake.formats.registry import FORMATS
from lake.records import ScoreRecord
from lake.write.ingest import ingest
from lake.write.preview import Facts, Preview, explain, explain_record, preview, render_episode
from lake.write.sources import File, PlannedFile, locate_arguments, plan_ingest
from testkit.command_line import Cli, runner
from testkit.copies import empty_lake
from testkit.episodes import episode, line, write_lines
from testkit.examples import examples


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Cli:
    monkeypatch.chdir(tmp_path)
    return runner(monkeypatch, capsys)


def previewed(path: Path) -> Preview:
    with locate_arguments([str(path)], None) as (argument,):  # type: ignore[arg-type]
        return preview(plan_ingest(argument))


def rich(index: int) -> EpisodeRecord:
    """An episode with all that a dry run counts."""
    tokens = TokensRecord(context_ids=[1], action_ids=[2])
    calls = [{"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}]
    return EpisodeRecord(
        task_id="rich",
        rollout_index=index,
        relation="subagent",
        steps=[
            StepRecord(state="s", action="a", tokens=tokens, tool_calls=calls * 2),
            StepRecord(state="s", action="b"),
        ],
        scores=[ScoreRecord(scorer="judge", value=0.5), ScoreRecord(scorer="other", value=None, error="late")],
    )


ITEMS: list[EpisodeRecord | bytes] = [
    rich(0),
    episode("a"),
    b"nonsense\n",
    b"{}\n",
    episode("a"),
    episode("a", steps=3),
    rich(1),
    b'{"task_id": "cut',
]


def explained(path: Path, number: int | None = None, **options: Any) -> Facts:
    with locate_arguments([str(path)], None) as (argument,):  # type: ignore[arg-type]
        return explain(plan_ingest(argument, **options), number)


# ---------------------------------------------------------------- one record


def test_an_explanation_says_what_one_record_was_read_as(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "f.jsonl", ITEMS)
    facts = explained(path)
    assert (facts["record"], facts["position"], facts["format"]["name"]) == (1, 1, "jsonl")
    identity = facts["identity"]
    assert (identity["task_id"], identity["rollout_index"], identity["relation"]) == ("rich", 0, "subagent")
    assert (identity["run_id"], identity["run_from"]) == ("f", "location")
    first, second = facts["steps"]
    assert (first["calls"], first["trained"], first["exact_tokens"]["sampled"]) == (["look({})"] * 2, True, 1)
    assert "exact_tokens" not in second
    assert [score["scorer"] for score in facts["outcome"]["scores"]] == ["judge", "other"]
    assert explained(path, 7)["identity"]["rollout_index"] == 1
    assert explained(path, 3)["reject"]["reason"] == "malformed"
    with pytest.raises(UsageError, match="no record 9; the file has 8"):
        explained(path, 9)


def test_an_explanation_counts_the_file_as_an_ingest_does(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "f.jsonl", ITEMS)
    counted = explained(path)["all"]
    report = ingest(empty_lake(tmp_path / "lake"), path)
    assert (counted["episodes"], counted["steps"], counted["scores"]) == (report.new, report.steps, report.scores)
    assert sum(counted["rejects"].values()) == report.rejected
    assert (counted["groups"], counted["repeated"]) == (2, report.present)


def test_steps_that_are_not_trained_on_say_why() -> None:
    steps = [
        StepRecord(state="s", action="a", is_copied_context=True, trainable=False),
        StepRecord(state=None, action="", trainable=False),
        StepRecord(state="s", action="a", trainable=False, extra={"not_recorded": ["answer"], "history": "rewritten"}),
        StepRecord(state="s", action="a", trainable=False),
    ]
    record = EpisodeRecord(
        task_id="t", run_id="r", steps=steps, env_return=1.0, scores=[ScoreRecord(scorer="x", value=1)]
    )
    planned = PlannedFile(File(Path("f"), "f", Path("f")), FORMATS["jsonl"], Input(Path("f"), "r"), is_run_given=True)
    facts = explain_record(record, planned)
    reasons = ["copied", "only the outcome is known", "not recorded: answer", "excluded by the source"]
    assert [step["why_not"] for step in facts["steps"]] == reasons
    assert [step.get("begins_context") for step in facts["steps"]] == [None, None, True, None]
    assert facts["identity"]["run_from"] == "--run"


@pytest.mark.parametrize("option", [[], ["--format", "json"]])
def test_an_explanation_needs_no_lake_and_fits_a_terminal(tmp_path: Path, cli: Cli, option: list[str]) -> None:
    write_lines(tmp_path / "f.jsonl", [episode(f"task {n}", steps=40) for n in range(3)])
    out = cli("ingest", "--explain", "f.jsonl", *option).out
    if option:
        facts = json.loads(out)
        assert (len(facts["steps"]), facts["all"]["episodes"]) == (40, 3)
    else:
        assert max(map(len, out.splitlines())) <= 80
        assert "16 more" in out
        assert "task      task 0, " in out
    assert list(tmp_path.iterdir()) == [tmp_path / "f.jsonl"]


# ---------------------------------------------------------------- counts


def test_everything_in_a_file_is_counted(tmp_path: Path) -> None:
    preview_read = previewed(write_lines(tmp_path / "f.jsonl", ITEMS))
    assert (preview_read.records, preview_read.episodes, preview_read.present) == (8, 3, 1)
    assert preview_read.records == preview_read.episodes + preview_read.present + sum(preview_read.reasons.values())
    assert (
        preview_read.steps,
        preview_read.tool_calls,
        preview_read.scores,
        preview_read.with_tokens,
        preview_read.related,
    ) == (6, 4, 4, 2, 2)
    assert preview_read.reasons == {"malformed": 1, "invalid": 1, "conflict": 1, "truncated": 1}
    assert preview_read.faults["malformed"][:2] == ("f.jsonl", 3)
    key = "run 'f', task 'a', rollout 0, attempt 0"
    why = f"{key} is present with other content; give it another --run or a higher attempt"
    assert preview_read.faults["conflict"] == ("f.jsonl", 6, why)
    assert preview_read.runs == {"f"}
    assert [record.task_id for record in preview_read.examples] == ["rich", "a", "rich"]


LINES = st.lists(
    st.sampled_from([*(item if isinstance(item, bytes) else line(item) for item in ITEMS[:-1]), b"\n"]), max_size=8
)


@settings(
    max_examples=examples(12),
    suppress_health_check=[HealthCheck.too_slow],
)
@given(lines=st.lists(LINES, min_size=1, max_size=3))
def test_a_dry_run_says_what_an_ingest_then_does(
    lines: list[list[bytes]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("any")
    for number, some in enumerate(lines):
        write_lines(folder / f"{number}.jsonl", [line(episode(f"first of {number}", run_id="one")), *some])
    preview_read = previewed(folder)
    report = ingest(empty_lake(folder / "lake"), folder)
    assert (preview_read.records, preview_read.episodes, preview_read.present, sum(preview_read.reasons.values())) == (
        report.records,
        report.new,
        report.present,
        report.rejected,
    )
    assert (preview_read.steps, preview_read.scores, preview_read.runs) == (report.steps, report.scores, report.runs)


# ---------------------------------------------------------------- examples


def test_an_example_reads_as_it_would_in_the_lake(tmp_path: Path, cli: Cli) -> None:
    path = write_lines(tmp_path / "f.jsonl", [rich(0)])
    (example,) = previewed(path).examples
    text = render_episode(example)
    assert cli("ingest", path, "--lake", "lake").code == 0
    shown_text = cli("show", "--task", "rich", "--lake", "lake").out
    assert text.splitlines() == shown_text.rstrip("\n").splitlines()


def test_two_attempts_of_a_rollout_can_both_be_shown(tmp_path: Path) -> None:
    records = [episode("t"), episode("t", attempt=1, steps=1)]
    preview_read = previewed(write_lines(tmp_path / "f.jsonl", records))
    assert ["\nstep 1 " in render_episode(record) for record in preview_read.examples] == [True, False]


def test_examples_are_of_different_formats_then_of_different_files(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        write_lines(tmp_path / f"{name}.jsonl", [episode(name, number) for number in range(4)])
    (tmp_path / "d.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}], "task_id": "d"}\n'
    )
    assert [record.task_id for record in previewed(tmp_path).examples] == ["a", "d", "b"]


# ---------------------------------------------------------------- the command


def test_the_command_says_what_would_be_and_leaves_no_trace(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "in").mkdir()
    write_lines(tmp_path / "in" / "f.jsonl", ITEMS)
    (tmp_path / "in" / "notes.txt").write_text("hello")
    before = sorted(tmp_path.rglob("*"))
    done = cli("ingest", "in", "--dry-run", "--lake", "new/lake")
    assert done.code == 0
    first, *rest = done.out.splitlines()
    assert first == (
        "in (jsonl): 3 episodes, 6 steps, 4 tool calls, 4 scores, 4 rejects, 1 repeated, "
        "2 steps with exact tokens, 2 related episodes in run f; nothing is written"
    )
    assert "1 malformed, first f.jsonl, record 3: not JSON" in rest[0]
    assert sum(text.startswith("episode ") for text in rest) == 3
    assert "A_E" not in done.out, "nothing is credited in a dry run"
    assert done.err.startswith("1 file left out (notes.txt: has no known format")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_dry_run_into_a_lake_that_is_there_does_not_touch_it(tmp_path: Path, cli: Cli) -> None:
    path = write_lines(tmp_path / "f.jsonl", [episode("a")])
    assert cli("ingest", path, "--lake", "lake").code == 0

    def files() -> dict[str, Any]:
        return {str(file): file.stat().st_mtime_ns for file in sorted((tmp_path / "lake").rglob("*"))}

    before = files()
    assert "1 episode, 2 steps" in cli("ingest", path, "--dry-run", "--lake", "lake").out
    assert files() == before


def test_records_of_several_arguments_are_compared(tmp_path: Path, cli: Cli) -> None:
    path_of_one = write_lines(tmp_path / "one.jsonl", [episode("a", run_id="r")])
    two = write_lines(tmp_path / "two.jsonl", [episode("a", run_id="r"), episode("a", run_id="r", steps=3)])
    out = cli("ingest", path_of_one, two, path_of_one, "--dry-run", "--lake", "lake").out
    assert "two.jsonl (jsonl): 0 episodes, 0 steps, 0 tool calls, 0 scores, 1 reject, 1 repeated in run two" in out


def test_packed_files_and_standard_input_can_be_looked_at(tmp_path: Path, cli: Cli) -> None:
    packed = tmp_path / "f.jsonl.gz"
    packed.write_bytes(gzip.compress(line(episode("a"))))
    assert "1 episode, 2 steps" in cli("ingest", packed, "--dry-run", "--lake", "lake").out
    assert "- (jsonl): 1 episode" in cli("ingest", "-", "--dry-run", "--lake", "lake", stdin=line(episode("a"))).out


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "hello.txt").write_text("hello")
    assert "has no known format" in cli("ingest", "hello.txt", "--dry-run", "--lake", "lake").fault
    assert not (tmp_path / "lake").exists()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--watch", "--dry-run"], "--watch cannot be combined with --dry-run"),
        (["--dry-run", "--explain"], "--dry-run cannot be combined with --explain"),
        (["--record", "2"], "--record names"),
        (["--watch", "--query"], "--watch cannot be combined with --query"),
        (["--query", "--format", "jsonl"], "--query cannot be combined with --format"),
        (["--watch", "--format", "unheard"], "there is no format 'unheard'"),
        (["--watch", "--run", " "], "the run's name is empty"),
        (["--run", " "], "the run's name is empty"),
    ],
)
def test_options_that_cannot_be_meant_together_are_refused(
    tmp_path: Path, cli: Cli, flags: list[str], says: str
) -> None:
    write_lines(tmp_path / "f.jsonl", [episode()])
    assert says in cli("ingest", "f.jsonl", *flags, "--lake", "lake").fault
    assert not (tmp_path / "lake").exists()


@pytest.mark.parametrize("name", ["-", "s3://bucket/x", "pipe"])
def test_what_nothing_can_be_appended_to_cannot_be_watched(tmp_path: Path, cli: Cli, name: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "cannot be watched" in cli("ingest", name, "--watch", "--lake", "lake").fault
