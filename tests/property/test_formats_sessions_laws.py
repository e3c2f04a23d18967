"""Sessions that share a history: every response counts once, in any order of ingest, and a context ends where it ends.

Families of sessions are drawn, each with a part of another one's history, and written as several tools write them.
"""

import json
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lake.export.target import list_new_messages, list_predecessors
from lake.formats.registry import choose_format
from lake.records import EpisodeRecord, Reject
from lake.write import ingest as ingest_module
from lake.write.ingest import ingest
from testkit.copies import empty_lake
from testkit.examples import examples
from testkit.pickling_executor import PicklingExecutor

BEGAN = datetime(2026, 1, 2, 10, tzinfo=UTC)
DECLARATION = """
name = "family"
description = "sessions of a test"
source = "this test"
whole = true

[recognise]
kinds = ["object"]
keys = ["family_session", "events"]

[episode]
task_id = "family_session"
run_id = "project"

[messages]
list = "events"

[[messages.rules]]
where = "by == 'person'"
make = ["{role: 'user', content: text}"]

[[messages.rules]]
where = "by == 'model'"
make = ['''{role: 'assistant', content: text,
    step: {response_id: id, started_at: at, prompt_tokens: tokens, completion_tokens: tokens}}''']

[[messages.rules]]
where = "by == 'summary'"
context = "new"
make = ["{role: 'user', content: text}"]
"""


class Turn(NamedTuple):
    """What a person wrote, and the response; a turn may begin with a cleared history."""

    name: str
    number: int
    is_cleared: bool

    @property
    def at(self) -> str:
        return (BEGAN + timedelta(seconds=self.number)).isoformat().replace("+00:00", "Z")


class Session(NamedTuple):
    """A session, which begins with the first turns of its parent."""

    name: str
    parent: "Session | None"
    copied: list[Turn]
    own: list[Turn]
    style: str

    @property
    def turns(self) -> list[Turn]:
        return self.copied + self.own


def name_id(number: int) -> str:
    """An id that begins with its time, as those of sessions and turns do."""
    milliseconds = f"{int(BEGAN.timestamp() * 1000) + number * 1000:012x}"
    return f"{milliseconds[:8]}-{milliseconds[8:]}-7000-8000-{number:012x}"


@st.composite
def families(draw: st.DrawFn, styles: tuple[str, ...]) -> list[Session]:
    """A session and those that copied from it or from each other; `styles` are the ways in which copies are written."""
    family: list[Session] = []
    number = 0
    for index in range(draw(st.integers(2, 4))):
        parent = draw(st.sampled_from(family)) if family else None
        copied = parent.turns[: draw(st.integers(1, len(parent.turns)))] if parent is not None else []
        number += 1
        session = name_id(number)
        own = []
        for _ in range(draw(st.integers(1, 3))):
            number += 1
            is_cleared = bool(own) and draw(st.booleans())
            own.append(Turn(f"answer {index}.{number}", number, is_cleared))
        style = draw(st.sampled_from(styles))
        family.append(Session(session, parent, copied, own, style))
    return family


def write_claude(folder: Path, session: Session) -> Path:
    """Lines with new uuids; what was copied may name its session, or is not told apart."""
    lines: list[dict[str, Any]] = []
    turns = [(turn, turn in session.copied) for turn in session.turns]
    if session.style == "twice":  # the same file begins again
        turns = [*((turn, turn in session.copied) for turn in session.copied[:1]), *turns]
    above: str | None = None
    for position, (turn, is_copied) in enumerate(turns):
        if session.style == "twice" and position == 1 and session.copied:
            above = None
        common: dict[str, Any] = {"sessionId": session.name, "cwd": "/home/user/shop", "version": "2.0.14"}
        common |= {"isSidechain": False, "timestamp": turn.at}
        if is_copied and session.parent is not None and session.style == "named":
            common["sessionId"] = session.parent.name
        if is_copied and session.parent is not None and session.style == "forked":
            common["forkedFrom"] = {"sessionId": session.parent.name, "messageUuid": "x"}
        texts = ["<command-name>/clear</command-name>"] if turn.is_cleared else []
        for text in [*texts, f"to {turn.name}"]:
            message = {"role": "user", "content": text}
            uuid = f"{session.name} {len(lines)}"
            lines.append(common | {"type": "user", "uuid": uuid, "parentUuid": above, "message": message})
            above = uuid
        answer = {"id": f"msg {turn.name}", "role": "assistant", "model": "m", "content": turn.name}
        answer["usage"] = {"input_tokens": turn.number, "output_tokens": turn.number}  # type: ignore[assignment]
        uuid = f"{session.name} {len(lines)}"
        lines.append(common | {"type": "assistant", "uuid": uuid, "parentUuid": above, "message": answer})
        above = uuid
    path = write_lines(folder / f"{session.name}.jsonl", lines)
    if session.style == "joined":
        other = write_claude(folder, make_other(session))
        path.write_text(other.read_text() + path.read_text())
        other.unlink()
    return path


def make_other(session: Session) -> Session:
    """A session without common history."""
    return Session(f"{session.name}-other", None, [], [Turn(f"beside {session.name}", 1, False)], "silent")


def write_codex(folder: Path, session: Session) -> Path:
    """What was copied has the times of the copy; ids of turns, the parent's metadata or a pause show where it ends."""
    start = session.own[0].number - 1
    lines: list[dict[str, Any]] = []

    def add(kind: str, seconds: float, **payload: Any) -> None:
        at = (BEGAN + timedelta(seconds=seconds)).isoformat().replace("+00:00", "Z")
        lines.append({"timestamp": at, "type": kind, "payload": payload})

    parent = session.parent.name if session.parent is not None else None
    add("session_meta", start, id=session.name, timestamp=BEGAN.isoformat(), cwd="/w/shop", forked_from_id=parent)
    if session.style == "metadata" and parent is not None:
        add("session_meta", start, id=parent, timestamp=BEGAN.isoformat(), cwd="/w/shop")
    total = 0
    for turn in session.turns:
        seconds = start if turn in session.copied else turn.number
        passed = {"turn_id": name_id(turn.number)}
        item = {"internal_chat_message_metadata_passthrough": passed} if session.style == "items" else {}
        if session.style == "turns":
            add("event_msg", seconds, type="task_started", **passed)
        content = [{"type": "input_text", "text": f"to {turn.name}"}]
        add("response_item", seconds, type="message", role="user", content=content, **item)
        answer = [{"type": "output_text", "text": turn.name}]
        add("response_item", seconds + 0.1, type="message", role="assistant", content=answer, **item)
        total += turn.number
        usage = {"input_tokens": turn.number, "output_tokens": turn.number}
        info = {"last_token_usage": usage, "total_token_usage": {"output_tokens": total}}
        add("event_msg", seconds + 0.1, type="token_count", info=info)
    return write_lines(folder / f"rollout-{session.name}.jsonl", lines)


def write_declared(folder: Path, session: Session) -> Path:
    """A document of a declared format, whose copies nothing tells apart."""
    events = []
    for turn in session.turns:
        by = "summary" if turn.is_cleared else "person"
        events.append({"by": by, "text": f"to {turn.name}"})
        answer = {"by": "model", "text": turn.name, "id": turn.name, "at": turn.at, "tokens": turn.number}
        events.append(answer)
    path = folder / f"{session.name}.json"
    path.write_text(json.dumps({"family_session": session.name, "project": "shop", "events": events}))
    return path


def write_lines(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


Write = Callable[[Path, Session], Path]
TOOLS: dict[str, tuple[Write, tuple[str, ...], bool]] = {
    "claude_code": (write_claude, ("silent", "named", "forked", "twice", "joined"), True),
    "codex": (write_codex, ("metadata", "turns", "items"), False),
    "family": (write_declared, ("silent",), True),
}
"""How each tool writes a session, its ways to write copies, and whether its history can be cleared."""


@pytest.mark.parametrize("tool", TOOLS)
@settings(max_examples=examples(10), deadline=None)
@given(data=st.data())
def test_each_response_of_a_family_counts_once_in_any_order(tool: str, data: st.DataObject) -> None:
    write, styles, _ = TOOLS[tool]
    family = data.draw(families(styles))
    beginnings = data.draw(st.lists(st.sampled_from(family), unique_by=lambda session: session.name))
    order = [session._replace(own=session.own[:1]) for session in beginnings] + data.draw(st.permutations(family))
    are_together, in_parts = data.draw(st.booleans(), label="one job"), data.draw(st.booleans(), label="in parts")
    with TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(ingest_module, "PART_BYTES", 1)
        folder, declaration = Path(name, "files"), Path(name, "family.toml")
        folder.mkdir()
        declaration.write_text(DECLARATION)
        fmt = str(declaration) if tool == "family" else None
        lk = empty_lake(Path(name, "lake"))
        for session in order:
            path = write(folder, session)
            if not are_together:
                ingest(lk, path, format_name=fmt)
        report = ingest(lk, folder, format_name=fmt, executor=PicklingExecutor() if in_parts else None)
        assert are_together or report.new == 0, "each was read before"
        steps = lk.sql("SELECT action, is_copied_context AS is_copied, trainable, completion_tokens FROM steps")
        totals = lk.sql("SELECT sum(completion_tokens) AS completion_tokens FROM episodes")
    occurrences = Counter(turn.name for session in family for turn in session.turns)
    if tool == "claude_code":
        occurrences += Counter(s.copied[0].name for s in family if s.style == "twice" and s.copied)
    others = [make_other(session) for session in family if session.style == "joined"]
    occurrences += Counter(turn.name for session in others for turn in session.own)
    responses = {turn.name: turn.number for session in [*family, *others] for turn in session.own}
    assert Counter(steps["action"]) == occurrences, "own and copied responses are all of them"
    assert Counter(steps.filter(~steps["is_copied"])["action"]) == Counter(list(responses))
    assert (steps["trainable"] == ~steps["is_copied"]).all()
    assert totals["completion_tokens"].item() == sum(responses.values())


@pytest.mark.parametrize("tool", [tool for tool, (_, _, clears) in TOOLS.items() if clears])
@settings(max_examples=examples(20), deadline=None)
@given(data=st.data())
def test_no_context_reaches_behind_the_point_where_it_was_cleared(tool: str, data: st.DataObject) -> None:
    (session, *_) = data.draw(families(("silent",)))
    with TemporaryDirectory() as name:
        declaration = Path(name, "family.toml")
        declaration.write_text(DECLARATION)
        path = TOOLS[tool][0](Path(name), session)
        fmt = choose_format(path, str(declaration) if tool == "family" else None)
        records = [item[1] for item in fmt.read(path) if not isinstance(item, Reject)]
    expected: dict[str, list[str]] = {}
    asked: list[str] = []
    for turn in session.turns:
        asked = [] if turn.is_cleared else asked
        asked.append(f"to {turn.name}")
        expected[turn.name] = list(asked)
    contexts = {
        step.action: list_questions(record, index) for record in records for index, step in enumerate(record.steps)
    }
    assert contexts == expected


def list_questions(record: EpisodeRecord, index: int) -> list[str]:
    """What a person asked in the prompt of a step."""
    messages, predecessors = list_new_messages(record), list_predecessors(record)
    questions: list[str] = []
    step: int | None = index
    while step is not None:
        texts = [message["content"] for message in messages[step] if message["role"] == "user"]
        questions = [text for text in texts if text.startswith("to ")] + questions
        step = predecessors[step]
    return questions
