"""No matter what a file holds, reading it raises nothing and loses nothing: each record is taken or rejected.

1. Bytes: a good file with random bytes changed, removed and put in.
2. Values: a good record with random fields replaced by values of every kind, most of them wrong.
3. What a reader lets pass can be stored: its frames keep their tables' contracts, and what is stored can be read back.
"""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lake
from lake.formats.base import json_array
from lake.formats.base.format import Item
from lake.formats.jsonl import Lines
from lake.formats.registry import FORMATS
from lake.records import EpisodeRecord, Reject, identify
from lake.tables import TABLES
from lake.tables.contracts import conform
from lake.write.ingest import ingest
from lake.write.rows import build_episodes_frame, build_steps_frame, build_tokens_frame
from testkit.copies import empty_lake
from testkit.episodes import assert_whole, episode, line
from testkit.examples import examples

RELAXED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
CHAT = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hi \u00e9\U0001f600"},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]},
    {"role": "tool", "content": 'Error: \\ " \n'},
    {"role": "assistant", "content": "Bye."},
]
INFO = {"task": {"actions": [1], "outputs": []}, "source": "user", "reward_info": {"reward": 1.0}}
ROWS = [{"task_id": n, "trial": n, "reward": 0.5 * n, "info": INFO, "traj": CHAT} for n in range(3)]
GOOD = {
    "jsonl": b"".join(
        line(episode("t", n, tokens=True, env_return=0.5, extra={"a": [1, {"b": None}]})) for n in range(3)
    ),
    "tau_bench": json.dumps(ROWS, ensure_ascii=False, indent=1).encode(),
}
FRAGMENTS = b"""{ } [ ] " \\ , : - NaN null 1e999 \\ud800 \x00 \xff \xc3 \r \xef\xbb\xbf \xe2\x80\xa8""".split(b" ")
LONG = [b"9" * 30, b"9" * 5000, b"[" * 2000, b'{"a":' * 600]
SPLINTERS = st.sampled_from([b"", b"\n", *FRAGMENTS, *LONG])
CHANGES = st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 30), SPLINTERS), min_size=1, max_size=4)


def damaged(content: bytes, changes: list[tuple[int, int, bytes]]) -> bytes:
    """Some bytes at some places replaced."""
    for offset, length, splinter in changes:
        start = offset % len(content) if content else 0
        content = content[:start] + splinter + content[start + length :]
    return content


def read(name: str, path: Path, content: bytes) -> list[Item]:
    path.write_bytes(content)
    items = list(FORMATS[name].read(path))
    for item in items:
        if isinstance(item, Reject):
            assert item.reason in ("malformed", "invalid", "truncated")
            item.raw.encode()
            item.message.encode()
        else:
            storable(item[1])
    return items


def storable(record: EpisodeRecord) -> None:
    """The record's frames keep the contracts of their tables."""
    record.run_id = "run"
    for name, make in (
        ("episodes", build_episodes_frame),
        ("steps", build_steps_frame),
        ("tokens", build_tokens_frame),
    ):
        frame = conform(make([record], [identify(record, "run")], 1), TABLES[name])
        assert name != "steps" or frame.height == len(record.steps)


@RELAXED
@given(changes=CHANGES)
def test_every_line_of_a_damaged_file_is_a_record_or_a_reject(
    changes: list[tuple[int, int, bytes]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = damaged(GOOD["jsonl"], changes)
    items = read("jsonl", tmp_path_factory.getbasetemp() / "damaged.jsonl", content)
    lines = [number for number, text in enumerate(content.split(b"\n"), start=1) if text.strip()]
    assert [item.position if isinstance(item, Reject) else item[0] for item in items] == lines


@RELAXED
@given(changes=CHANGES, window=st.sampled_from([1, 17, 1 << 20]))
def test_every_element_of_a_damaged_array_is_a_record_or_a_reject(
    changes: list[tuple[int, int, bytes]], window: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = damaged(GOOD["tau_bench"], changes)
    path = tmp_path_factory.getbasetemp() / "damaged.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_array, "_CHUNK", window)
        items = read("tau_bench", path, content)
    positions = [item.position if isinstance(item, Reject) else item[0] for item in items]
    assert positions == list(range(len(items)))
    assert all(isinstance(item, tuple) or item.reason == "invalid" for item in items[:-1]), "damage comes last"
    assert [msgspec.structs.asdict(item) if isinstance(item, Reject) else item for item in items] == [
        msgspec.structs.asdict(item) if isinstance(item, Reject) else (item[0], item[1])
        for item in read("tau_bench", path, content)
    ], "the window changes nothing"


WRONG: list[Any] = [
    *(None, True, False, 0, -1, 1, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64, 10**30),
    *(0.0, -0.0, 1.5, 1e308, -1e308, 5e-324, 3.5e38, "", "x", "\x00", "\u2028", "completed", "failed", "fork", "raw"),
    *("2026-01-01T00:00:00Z", "0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", "0" * 13, "u" * 13, "O" * 13),
    *([], {}, [None], [[]], [0], [1.5], [-0.25], [True], [2**31], [-1], ["x"], [{}], {"a": None}, {"": [{}]}),
    *([[1, 0, 0]], [[1, 0]], [1, 2, 3], [0.5, 0.5], [True, False]),
]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value."""
    paths = [path] if path else []
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        paths += places(child, (*path, key))
    return paths


def every_field() -> dict[str, Any]:
    """A record in which every field is spelled out."""
    record = msgspec.to_builtins(episode("t", tokens=True))
    spelled = spell_out(lake.EpisodeRecord, record)
    spelled["steps"] = [spell_out(lake.StepRecord, step) for step in record["steps"]]
    for step in spelled["steps"]:
        step["tokens"] = spell_out(lake.TokensRecord, step["tokens"])
    return spelled


def spell_out(struct: type[msgspec.Struct], fields: dict[str, Any]) -> dict[str, Any]:
    """A struct's fields with their defaults where they are not given."""
    plain = (field for field in msgspec.structs.fields(struct) if field.default is not msgspec.UNSET)
    defaults = {field.name: [] if field.default is msgspec.NODEFAULT else field.default for field in plain}
    return defaults | fields


@RELAXED
@given(data=st.data())
def test_a_record_with_any_value_in_any_place_is_stored_or_rejected(data: st.DataObject) -> None:
    record = every_field()
    assert isinstance(Lines().read(1, json.dumps(record).encode()), tuple)
    for _ in range(data.draw(st.integers(1, 3))):
        *path, last = data.draw(st.sampled_from(places(record)))
        parent = record
        for key in path:
            parent = parent[key]
        parent[last] = deepcopy(data.draw(st.sampled_from(WRONG)))
    item = Lines().read(1, json.dumps(record).encode())
    if isinstance(item, Reject):
        assert item.reason in ("invalid", "malformed")
        return
    storable(item[1])


@settings(RELAXED, max_examples=examples(12))
@given(changes=CHANGES, name=st.sampled_from(sorted(GOOD)), batch_size=st.integers(1, 4))
def test_a_damaged_file_is_ingested_to_its_end_and_accounted_for(
    changes: list[tuple[int, int, bytes]], name: str, batch_size: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    path = folder / "file"
    path.write_bytes(damaged(GOOD[name], changes) or b" \n{}")
    lk = empty_lake(folder / "lake")
    first = ingest(lk, path, format_name=name, batch_size=batch_size)
    assert first.records == first.new + first.present + first.rejected
    assert assert_whole(lk.snapshot()) == first.new
    assert lk.scan("rejects").collect().height == first.rejected
    again = ingest(lk, path, format_name=name, batch_size=5 - batch_size)
    assert (again.new, again.rejected) == (0, first.rejected)
    assert lk.sql("SELECT count(*) AS n FROM rejects").item() == first.rejected
