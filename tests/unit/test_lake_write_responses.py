"""Responses that several files hold; `tests/property/test_formats_sessions_laws.py` has the law."""

import json
from pathlib import Path

import pytest

from lake.write.ingest import ingest
from testkit.copies import empty_lake
from testkit.shared import shared_data
from unit import declared_inputs_agents as agents


def test_ids_that_a_server_gave_two_sessions_show_no_copies(tmp_path: Path) -> None:
    """The sessions have the ids of all responses in common, and the second response; their first ones differ."""
    lk = empty_lake(tmp_path / "lake")
    ingest(lk, shared_data("cases", "right", "07_placeholder"))
    ingest(lk, shared_data("cases", "right", "24b_queued"))
    assert lk.sql("SELECT count(*), count(*) FILTER (trainable AND NOT is_copied_context) FROM steps").row(0) == (6, 6)


def claude_lines(answers: int) -> str:
    """A session of Claude Code with some answers, each to one prompt."""
    lines = []
    for number in range(answers):
        shared = {"sessionId": "11111111-2222-4333-8444-555555555555", "cwd": "/shop", "version": "2.1.0"}
        time = {"timestamp": f"2026-01-02T10:00:{number:02}.000Z"}
        parent = f"a{number - 1}" if number else None
        prompt = {"role": "user", "content": f"prompt {number}"}
        usage = {"input_tokens": 5, "output_tokens": 10}
        answer = {"id": f"msg_{number}", "role": "assistant", "model": "m", "usage": usage}
        answer["content"] = [{"type": "text", "text": f"answer {number}"}]
        lines.append({"type": "user", "uuid": f"u{number}", "parentUuid": parent, "message": prompt} | shared | time)
        lines.append(
            {"type": "assistant", "uuid": f"a{number}", "parentUuid": f"u{number}", "message": answer} | shared | time
        )
    return "".join(json.dumps(line) + "\n" for line in lines)


@pytest.mark.parametrize("is_one_ingest", [True, False])
@pytest.mark.parametrize("counts", [(2, 4), (4, 2), (3, 3)])
def test_a_session_that_was_renamed_while_it_grew_holds_no_copies(
    tmp_path: Path, counts: tuple[int, int], is_one_ingest: bool
) -> None:
    lk = empty_lake(tmp_path / "lake")
    folder = tmp_path / "shop"
    folder.mkdir()
    for name, count in zip(("a.jsonl", "b.jsonl"), counts, strict=True):
        (folder / name).write_text(claude_lines(count))
        if not is_one_ingest:
            ingest(lk, folder / name)
    ingest(lk, folder)
    rows = lk.sql("SELECT action, trainable AND NOT is_copied_context AS is_own FROM steps ORDER BY step_index").rows()
    assert rows == [(f"answer {number}", True) for number in range(max(counts))]
    assert lk.sql("SELECT sum(completion_tokens) FROM episodes").item() == 10 * max(counts)


@pytest.mark.parametrize("count", [1, 2])
def test_a_session_that_was_renamed_before_a_rewind_holds_no_copies(tmp_path: Path, count: int) -> None:
    lk = empty_lake(tmp_path / "lake")
    folder = tmp_path / "shop"
    folder.mkdir()
    rewound = claude_lines(3).replace('"parentUuid": "a1"', '"parentUuid": "a0"')
    for name, text in (("a.jsonl", claude_lines(count)), ("b.jsonl", rewound)):
        (folder / name).write_text(text)
        ingest(lk, folder)
    rows = lk.sql("SELECT action, trainable AND NOT is_copied_context AS is_own FROM steps ORDER BY action").rows()
    assert rows == [(f"answer {number}", True) for number in range(3)]


@pytest.mark.parametrize("name", ["kimi_cli", "copilot_cli"])
def test_a_history_in_another_sessions_file_of_the_same_name_is_a_copy(tmp_path: Path, name: str) -> None:
    """The files differ only in their folder, and the task of a session is its prompt."""
    lk = empty_lake(tmp_path / "lake")
    original = next(case for case in agents.INPUTS if case.format == name)
    copy = original._replace(file=original.file.replace(agents.SESSION, agents.OTHER))
    copy = copy._replace(text=original.text.replace(agents.SESSION, agents.OTHER))
    for case in (original, copy):
        case.write(tmp_path / "files")
        ingest(lk, tmp_path / "files")
    rows = lk.sql("SELECT action, list(is_copied_context ORDER BY is_copied_context) FROM steps GROUP BY action").rows()
    assert {tuple(marks) for _, marks in rows} == {(False, True)}
