"""The reader of declared formats: what is read, what is kept, and what is refused."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lake.errors import FormatError
from lake.formats.base.format import read_head
from lake.formats.base.source import Input
from lake.formats.declared import FOLDER, Declaration, load_declaration
from lake.formats.declared.expressions import Expression, omit_paths
from lake.formats.registry import choose_format
from lake.records import EpisodeRecord, Reject

HEAD = """
name = "trial"
description = "files of a test"
source = "this test"
"""
CHAT = """
[recognise]
kinds = ["object", "lines"]
keys = ["talk"]
where = "version == `2`"

[read]
{read}

[episode]
task_id = "goal.name"
env_return = "points"
started_at = "began"
status = {{from = "end", map = {{fine = "completed", late = "truncated"}}, default = "failed"}}

[scores]
polite = "marks.polite"

[messages]
list = "talk"

[[messages.rules]]
where = "by == 'person'"
make = ["{{role: 'user', content: words}}"]

[[messages.rules]]
where = "by == 'model'"
make = [
  '''{{role: 'assistant', content: words, tool_calls: uses[].call(tool, with, id),
       step: {{model: engine, prompt_tokens: cost.read}}}}''',
  "uses[].{{role: 'tool', tool_call_id: id, content: gave}}",
]

[[messages.rules]]
where = "by == 'clock'"
skip = true
"""
TALK = [
    {"by": "person", "words": "Add 2 and 3.", "mood": "calm"},
    {
        "by": "model",
        "words": "",
        "engine": "m-1",
        "uses": [{"tool": "add", "with": {"a": 2, "b": 3}, "id": "u1", "gave": "5", "seconds": 0.5}],
        "cost": {"read": 9, "wrote": 4},
    },
    {"by": "clock", "at": 3},
    {"by": "model", "words": "5", "engine": "m-1"},
]
DOCUMENT = {
    "version": 2,
    "goal": {"name": "sums", "level": 1},
    "points": 1,
    "began": "2026-01-02T03:04:05Z",
    "end": "late",
    "marks": {"polite": True, "short": 0.5},
    "talk": TALK,
}


def write(tmp_path: Path, text: str, name: str = "trial.toml") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def declare(tmp_path: Path, body: str, top: str = "") -> Path:
    return write(tmp_path, HEAD + top + body)


def read(declaration: Path, file: Path) -> tuple[list[EpisodeRecord], list[Reject]]:
    items = list(load_declaration(declaration).read(file))
    return (
        [item[1] for item in items if not isinstance(item, Reject)],
        [item for item in items if isinstance(item, Reject)],
    )


def test_entries_become_decisions_and_nothing_is_lost(tmp_path: Path) -> None:
    declaration = declare(tmp_path, CHAT.format(read=""))
    (record,), rejects = read(declaration, write(tmp_path, json.dumps(DOCUMENT), "a.json"))
    assert rejects == []
    assert (record.task_id, record.env_return, record.status) == ("sums", 1.0, "truncated")
    assert [(score.scorer, score.value) for score in record.scores] == [("polite", 1.0)]
    call, answer = record.steps
    assert call.tool_calls == [
        {"id": "u1", "type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
    ]
    assert (call.state, call.model, call.prompt_tokens) == ("Add 2 and 3.", "m-1", 9)
    assert (answer.state, answer.state_role, answer.action) == ("5", "tool", "5")
    # Whatever no expression mentions stays, in the place that it had.
    assert call.extra == {"uses": [{"seconds": 0.5}], "cost": {"wrote": 4}}
    assert record.initial_messages == [{"role": "user", "content": "Add 2 and 3.", "mood": "calm"}]
    assert record.extra == {
        "version": 2,
        "goal": {"level": 1},
        "marks": {"short": 0.5},
        "events": [{"by": "clock", "at": 3}],
    }


def test_a_file_is_recognised_by_keys_and_condition(tmp_path: Path) -> None:
    declared = load_declaration(declare(tmp_path, CHAT.format(read="")))
    for change, is_recognised in (({}, True), ({"version": 3}, False), ({"talk": None}, True)):
        file = write(tmp_path, json.dumps(DOCUMENT | change), "a.json")
        assert declared.recognise(read_head(file)) is is_recognised
    other = {key: field for key, field in DOCUMENT.items() if key != "talk"}
    assert not declared.recognise(read_head(write(tmp_path, json.dumps(other), "a.json")))


def test_a_cut_document_is_its_readable_part_and_a_reject(tmp_path: Path) -> None:
    declaration = declare(tmp_path, CHAT.format(read=""), "whole = true\n")
    (record,), (reject,) = read(declaration, write(tmp_path, json.dumps(DOCUMENT)[:-70], "a.json"))
    assert reject.reason == "truncated"
    assert record.status == "aborted"
    assert record.steps[0].tool_calls is not None


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"points": "many"}, "`env_return` is 'many'"),
        ({"began": [1]}, "`started_at` is [1]"),
        ({"talk": {"by": "model"}}, "`talk` is dict; valid: a list"),
        ({"talk": [{"by": "model", "words": 5}]}, "content"),
        ({"talk": []}, "no decision"),
    ],
)
def test_a_value_of_a_wrong_type_is_a_reject_that_names_it(tmp_path: Path, change: dict[str, Any], text: str) -> None:
    document = {key: field for key, field in (DOCUMENT | change).items() if change != {"talk": []} or key == "talk"}
    records, (reject,) = read(declare(tmp_path, CHAT.format(read="")), write(tmp_path, json.dumps(document), "a.json"))
    assert records == []
    assert reject.reason == "invalid"
    assert text in reject.message


@pytest.mark.parametrize(
    ("old", "new", "names"),
    [
        ("call(tool, with, id)", "call(tool, id, with)", ["messages.rules[1].make", "call(", "the id {"]),
        ("call(tool, with, id)", "call(with, tool, id)", ["messages.rules[1].make", "call(", "the name {"]),
        ("role: 'assistant'", "role: 'agent'", ["messages.rules[1].make", "talk[1]", "'agent'", "assistant"]),
        (', default = "failed"', "", ["episode.status", "'over'", "fine, late"]),
    ],
)
def test_an_expression_that_does_not_fit_a_file_is_named(tmp_path: Path, old: str, new: str, names: list[str]) -> None:
    declaration = declare(tmp_path, CHAT.format(read="").replace(old, new))
    records, (reject,) = read(declaration, write(tmp_path, json.dumps(DOCUMENT | {"end": "over"}), "a.json"))
    assert records == []
    assert [name for name in names if name not in reject.message] == []


def test_an_expression_that_gives_no_entries_is_named(tmp_path: Path) -> None:
    declaration = declare(tmp_path, CHAT.format(read="").replace('list = "talk"', 'list = "talks"'))
    file = Input(write(tmp_path, json.dumps(DOCUMENT), "a.json"), "a")
    ((_, record),) = load_declaration(declaration).reader(file)
    assert (record.env_return, [step.trainable for step in record.steps]) == (1, [False])
    (note,) = file.notes
    assert "`messages.list` is 'talks'" in note.subject
    without_outcome = write(tmp_path, json.dumps({"version": 2, "talk": TALK}), "b.json")
    _, (reject,) = read(declaration, without_outcome)
    assert "`messages.list` is 'talks'" in reject.message


def test_a_key_of_a_step_that_is_no_column_is_kept_and_reported(tmp_path: Path) -> None:
    declaration = declare(tmp_path, CHAT.format(read="").replace("prompt_tokens:", "usage: cost, promt_tokens:"))
    file = Input(write(tmp_path, json.dumps(DOCUMENT), "a.json"), "a")
    ((_, record),) = load_declaration(declaration).reader(file)
    assert (record.steps[0].extra or {})["promt_tokens"] == 9
    assert [(note.subject, note.name) for note in file.notes] == [("step key", "promt_tokens")]


def test_rollouts_inside_a_value_are_episodes_and_the_first_keeps_the_rest(tmp_path: Path) -> None:
    declaration = declare(tmp_path, CHAT.format(read='each = "runs[]"'))
    document = {"runs": [DOCUMENT, DOCUMENT], "machine": "m"}
    records, rejects = read(declaration, write(tmp_path, json.dumps(document), "a.json"))
    assert rejects == []
    assert [record.rollout_index for record in records] == [0, 1]
    assert [(record.extra or {}).get("document") for record in records] == [{"machine": "m"}, None]


def test_lines_of_a_file_or_of_a_group_are_one_episode(tmp_path: Path) -> None:
    lines = [entry | {"talk": 1, "version": 2, "of": name} for entry in TALK for name in ("x", "y")]
    file = write(tmp_path, "".join(json.dumps(line) + "\n" for line in lines), "a.jsonl")
    body = CHAT.replace('list = "talk"', 'list = "lines"').replace('"goal.name"', "\"lines[0].of || 'all'\"")
    grouped, _ = read(declare(tmp_path, body.format(read='group = "of"')), file)
    assert [(record.task_id, len(record.steps)) for record in grouped] == [("x", 2), ("y", 2)]
    whole, _ = read(declare(tmp_path, body.format(read='unit = "file"')), file)
    assert [len(record.steps) for record in whole] == [4]


def test_a_damaged_line_of_a_whole_file_is_a_reject_and_is_counted(tmp_path: Path) -> None:
    text = "".join(json.dumps(entry) + "\n" for entry in TALK[:3]) + '{"by": "mod\n' + json.dumps(TALK[3]) + "\n"
    body = CHAT.replace('list = "talk"', 'list = "lines"').format(read='unit = "file"')
    (record,), (reject,) = read(declare(tmp_path, body), write(tmp_path, text, "a.jsonl"))
    assert reject.position == 4
    assert len(record.steps) == 2
    assert (record.extra or {})["lost_lines"] == 1


def test_rows_of_a_query_of_sqlite_are_values(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE talks (name TEXT, talk TEXT)")
        database.execute("INSERT INTO talks VALUES ('sums', ?)", (json.dumps(TALK),))
        database.commit()
    body = CHAT.replace('list = "talk"', 'list = "decode(talk)"').replace('"goal.name"', '"name"')
    body = body.replace('["object", "lines"]', '["sqlite"]').replace('["talk"]', '["talks"]')
    declaration = declare(tmp_path, body.format(read='query = "SELECT name, talk FROM talks"'))
    assert load_declaration(declaration).recognise(read_head(path))
    (record,), rejects = read(declaration, path)
    assert rejects == []
    assert (record.task_id, len(record.steps)) == ("sums", 2)


def test_a_text_file_is_split_into_records_and_entries(tmp_path: Path) -> None:
    body = """
[recognise]
kinds = ["text"]
text = "^== talk of"

[read]
record = '^== talk of (?P<name>.+)$'
entry = '^(?P<by>[?!]) (?P<text>.*)$'

[episode]
task_id = "name"

[messages]
list = "entries"

[[messages.rules]]
make = ["{role: if(by == '?', 'user', 'assistant'), content: text}"]
"""
    file = write(tmp_path, "== talk of sums\n? Add 2\n? and 3.\n! 5\n== talk of names\n? Who?\n! Me.\n", "a.txt")
    declaration = declare(tmp_path, body)
    assert load_declaration(declaration).recognise(read_head(file))
    records, rejects = read(declaration, file)
    assert rejects == []
    assert [(record.task_id, record.steps[0].state, record.steps[0].action) for record in records] == [
        ("sums", "Add 2\nand 3.", "5"),
        ("names", "Who?", "Me."),
    ]


def test_companions_join_files_and_never_leave_their_folder(tmp_path: Path) -> None:
    body = CHAT.format(read='[[read.companions]]\ninto = "talk"\nfiles = "talks/{id}/*.json"\n')
    declaration = declare(tmp_path, body)
    folder = tmp_path / "talks" / "s1"
    folder.mkdir(parents=True)
    for index, entry in enumerate(TALK):
        write(folder, json.dumps(entry), f"{index}.json")
    (record,), _ = read(declaration, write(tmp_path, json.dumps(DOCUMENT | {"id": "s1"}), "a.json"))
    assert len(record.steps) == 2
    for hostile in ("..", "../talks/s1", "*", "", "a\\b"):
        records, (reject,) = read(declaration, write(tmp_path, json.dumps(DOCUMENT | {"id": hostile}), "a.json"))
        assert records == []
        assert "names no file" in reject.message
    (folder / "9.json").symlink_to(tmp_path / "a.json")
    records, (reject,) = read(declaration, write(tmp_path, json.dumps(DOCUMENT | {"id": "s1"}), "a.json"))
    assert records == []
    assert "is a link" in reject.message


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ('"goal.name"', '"goal."', "episode.task_id"),
        ("task_id =", "task =", "episode.task"),
        ('kinds = ["object", "lines"]', 'kinds = ["yaml"]', "yaml"),
        ("skip = true", "jump = true", "jump"),
        ("call(tool", "cal(tool", r"messages.rules\[1\].make.*no function cal\(\); valid: .*\bcall\b"),
        ("[recognise]", "[recognise", "not valid"),
    ],
)
def test_a_wrong_declaration_is_named_with_its_key(tmp_path: Path, old: str, new: str, text: str) -> None:
    path = declare(tmp_path, CHAT.format(read="").replace(old, new))
    with pytest.raises(FormatError, match=text) as error:
        load_declaration(path)
    assert str(path) in str(error.value)


def test_a_missing_declaration_is_no_traceback(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="cannot be read"):
        load_declaration(tmp_path / "none.toml")


def test_a_users_declaration_is_a_format(tmp_path: Path) -> None:
    file = write(tmp_path, json.dumps(DOCUMENT), "a.json")
    assert choose_format(file, str(declare(tmp_path, CHAT.format(read="")))).name == "trial"


def test_a_context_starts_again_and_a_copied_response_is_not_trained_on(tmp_path: Path) -> None:
    body = (
        CHAT.format(read="")
        + """
[[messages.rules]]
where = "by == 'summary'"
context = "new"
make = ["{role: 'user', content: words}"]
"""
    )
    body = body.replace("step: {model: engine,", "step: {model: engine, response_id: key,")
    again = [{"by": "model", "words": "5", "key": "r1"}, {"by": "person", "words": "Go on."}]
    talk = [
        TALK[0],
        *again,
        {"by": "summary", "words": "It was 5."},
        *again[:1],
        {"by": "model", "words": "6", "key": "r2"},
    ]
    path = write(tmp_path, json.dumps(DOCUMENT | {"talk": talk}), "a.json")
    (record,), _ = read(declare(tmp_path, body, "whole = true\n"), path)
    assert [(step.is_copied_context, step.trainable) for step in record.steps] == [
        (False, True),
        (True, False),
        (False, True),
    ]
    assert record.steps[1].state == "It was 5."
    assert (record.steps[1].extra or {})["history"] == "rewritten"


def test_an_entry_that_no_rule_takes_is_reported_kept_and_refused_if_strict(tmp_path: Path) -> None:
    declaration = declare(tmp_path, CHAT.format(read=""))
    document = DOCUMENT | {"talk": [{"by": "bird", "type": "song", "notes": 3}, *TALK]}
    path = write(tmp_path, json.dumps(document), "a.json")
    file = Input(path, "a")
    ((_, record),) = load_declaration(declaration).reader(file)
    assert (record.extra or {})["unknown_entries"] == [{"by": "bird", "type": "song", "notes": 3}]
    assert [note.name for note in file.notes.elements()] == ["type song"]
    (reject,) = load_declaration(declaration).reader(Input(path, "a", is_strict=True))
    assert reject.reason == "unsupported"


JSON = st.recursive(
    st.integers(-3, 3) | st.text("ab", max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)


def leaves(value: Any, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    if isinstance(value, dict):
        return [leaf for key, field in value.items() for leaf in leaves(field, (*path, key))]
    if isinstance(value, list):
        return [leaf for element in value for leaf in leaves(element, (*path, "*"))]
    return [(path, value)]


@given(
    value=st.dictionaries(st.sampled_from("abc"), JSON, max_size=3),
    paths=st.sets(st.sampled_from(["a", "b.c", "a[].b", "c[0].a"]), max_size=3),
)
def test_what_is_read_and_what_is_left_are_the_whole(value: dict[str, Any], paths: set[str]) -> None:
    taken = frozenset(path for text in paths for path in Expression(text, "a test").paths)
    left = omit_paths(value, taken) or {}
    is_taken = [any(path[: len(mark)] == mark for mark in taken) for path, _ in leaves(value)]
    kept = [leaf for leaf, covered in zip(leaves(value), is_taken, strict=True) if not covered]
    assert sorted(map(repr, kept)) == sorted(repr(leaf) for leaf in leaves(left) if leaf[1] is not None)


def test_every_declaration_of_the_product_compiles_and_names_its_source() -> None:
    for path in sorted(FOLDER.glob("*.toml")):
        declaration = Declaration(path)
        assert declaration.compiled
        assert declaration.document.name == path.stem
        assert len(declaration.document.source) > 10
