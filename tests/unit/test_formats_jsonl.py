"""Our JSONL: an episode a line; a bad line is a reject with its number, reason and text, and the rest continues."""

import json
import tracemalloc
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

import lake
from lake.errors import FormatError
from lake.formats.base import source
from lake.formats.base.source import Meter
from lake.formats.registry import FORMATS, choose_format
from lake.records import EpisodeRecord, Reject, identify
from lake.write.ingest import ingest
from lake.write.rows import inline_blobs
from testkit.episodes import episode, line, write_lines

GOOD = line(episode("good"))


def read(path: Path, content: bytes) -> list[tuple[int, EpisodeRecord] | Reject]:
    path.write_bytes(content)
    return list(FORMATS["jsonl"].read(path))


def read_one(path: Path, text: bytes) -> EpisodeRecord:
    """The one record of a file."""
    (item,) = read(path, text)
    assert isinstance(item, tuple), item
    return item[1]


def rejected(path: Path, text: bytes) -> Reject:
    """The reject that a file's second line becomes; the lines around it are read."""
    first, second, third = read(path, GOOD + text + GOOD)
    assert isinstance(first, tuple)
    assert isinstance(third, tuple)
    assert isinstance(second, Reject), second
    assert second.position == 2
    return second


def test_a_record_comes_back_as_it_was_written(tmp_path: Path) -> None:
    record = episode(
        "t", 3, steps=3, tokens=True, env_return=-0.5, started_at=datetime(2026, 1, 2, tzinfo=UTC), seed=2**62
    )
    record.extra = {"nested": [1, {"x": None}], "text": "\u00e9\U0001f600"}
    assert read_one(tmp_path / "f", line(record)) == record


def test_lines_are_numbered_from_one_and_blank_ones_are_skipped(tmp_path: Path) -> None:
    items = read(tmp_path / "f", b"\n" + GOOD + b"  \t\r\n\n" + GOOD + b"\n")
    assert [item[0] for item in items if isinstance(item, tuple)] == [2, 5]


@pytest.mark.parametrize("ending", [b"\n", b"\r\n", b""], ids=["unix", "dos", "none"])
def test_line_endings_and_a_byte_order_mark_are_no_content(tmp_path: Path, ending: bytes) -> None:
    assert read_one(tmp_path / "f", b"\xef\xbb\xbf" + GOOD.rstrip(b"\n") + ending) == episode("good")


def test_keys_may_come_in_any_order_and_numbers_in_any_spelling(tmp_path: Path) -> None:
    text = b'{"steps": [{"action": "a", "state": "s", "reward": 1}], "env_return": 1E0, "task_id": "t", "seed": 7}\n'
    record = read_one(tmp_path / "f", text)
    assert (record.env_return, record.steps[0].reward, record.seed) == (1.0, 1.0, 7)


@pytest.mark.parametrize("cut", range(1, len(GOOD) - 1))
def test_a_last_line_cut_anywhere_is_truncated(tmp_path: Path, cut: int) -> None:
    first, second = read(tmp_path / "f", GOOD + GOOD[:cut])
    assert isinstance(first, tuple)
    assert isinstance(second, Reject)
    assert (second.position, second.reason) == (2, "truncated")
    assert second.raw == GOOD[:cut].decode()


@pytest.mark.parametrize(
    "tail", [b'{"task_id": "t\xc3', b'{"rollout_index": -', b'{"env_return": 1.', b'{"env_return": 2e+']
)
def test_a_cut_inside_a_character_or_a_number_is_truncated_too(tmp_path: Path, tail: bytes) -> None:
    reject = read(tmp_path / "f", GOOD + tail)[1]
    assert isinstance(reject, Reject)
    assert reject.reason == "truncated"


@pytest.mark.parametrize(
    ("text", "reason", "says"),
    [
        (b"not JSON\n", "malformed", "not JSON"),
        (b'{"task_id": "t", "steps": [\n', "malformed", "truncated"),
        (b'{"task_id": "t", "steps": []} x\n', "malformed", "trailing"),
        (b"{'task_id': 't'}\n", "malformed", "not JSON"),
        (b'{"task_id": "caf\xe9", "steps": []}\n', "malformed", "utf-8"),
        (b'{"task_id": "\\ud800", "steps": []}\n', "malformed", "surrogate"),
        (b'{"task_id": NaN}\n', "malformed", "`$.task_id` is NaN, which JSON does not have; valid: a finite number"),
        (b'{"task_id": "t", "extra": {"a": [1, -Infinity]}}\n', "malformed", "`$.extra.a[1]` is -Infinity, which JSON"),
        (b'{"task_id": "t", "steps": [{"state": "s", "state": "t"}]}\n', "invalid", "missing required field `action`"),
        (b'{"task_id": "t", "extra": {"x": ' + b"[" * 5000 + b"]" * 5000 + b"}}\n", "malformed", "recursion"),
        (b"[]\n", "invalid", "Expected `object`, got `array`"),
        (b"null\n", "invalid", "Expected `object`, got `null`"),
        (b"{}\n", "invalid", "missing required field `task_id`"),
        (b'{"task_id": 1.5, "steps": []}\n', "invalid", "Expected `int | str`, got `float` - at `$.task_id`"),
        (b'{"task_id": true, "steps": []}\n', "invalid", "Expected `int | str`, got `bool` - at `$.task_id`"),
        (b'{"task_id": "t", "steps": []}\n', "invalid", '`{"state": null, "action": "", "trainable": false}`'),
        (b'{"task_id": "t", "env_return": 1.0}\n', "invalid", "missing required field `steps`"),
        (
            b'{"task_id": "t", "steps": [{"state": "s", "action": "a"}, {"state": "end", "reward": 1.0}]}\n',
            "invalid",
            "at `$.steps[1]`. Observations after the last action belong into `final_observation`. A reward at the end",
        ),
        (
            b'{"task_id": "t", "steps": [{"state": "s"}]}\n',
            "invalid",
            "missing required field `action` - at `$.steps[0]`",
        ),
        (b'{"task_id": "t", "steps": [], "rewrad": 1}\n', "invalid", "unknown field `rewrad`"),
        (b'{"task_id": "t", "steps": [], "env_return": 1e999}\n', "invalid", "out of range - at `$.env_return`"),
        (
            b'{"task_id": "t", "steps": [], "seed": 9223372036854775808}\n',
            "invalid",
            "<= 9223372036854775807 - at `$.seed`",
        ),
        (b'{"task_id": "t", "steps": [], "rollout_index": 2147483648}\n', "invalid", "at `$.rollout_index`"),
        (b'{"task_id": "t", "steps": [], "rollout_index": 1.5}\n', "invalid", "at `$.rollout_index`"),
        (b'{"task_id": "t", "steps": [], "started_at": "soon"}\n', "invalid", "at `$.started_at`"),
    ],
)
def test_a_bad_line_says_what_is_wrong_with_it(tmp_path: Path, text: bytes, reason: str, says: str) -> None:
    reject = rejected(tmp_path / "f", text)
    assert reject.reason == reason
    assert says in reject.message
    assert reject.raw == text.decode("utf-8", "backslashreplace").rstrip("\n")


def test_json_as_deep_as_a_reader_can_take_is_read_and_the_rest_rejected(tmp_path: Path) -> None:
    """There is no depth at which a line passes and what comes later fails on it."""
    reasons = []
    for depth in (10, 100, 300, 400, 450, 480, 500, 700, 900, 1000, 2000):
        text = json.dumps(msgspec.to_builtins(episode("deep")))[:-1].encode()
        items = read(tmp_path / "f", text + b', "extra": {"a": ' + b"[" * depth + b"]" * depth + b"}}\n" + GOOD)
        assert isinstance(items[1], tuple), "the next line is read"
        reasons.append(items[0].reason if isinstance(items[0], Reject) else "")
    assert reasons == sorted(reasons, key=bool), "deeper is never better"
    assert reasons[:3] == ["", "", ""]
    assert reasons[-1] == "malformed"


def test_a_time_outside_of_the_calendar_in_utc_is_rejected(tmp_path: Path) -> None:
    text = GOOD.replace(b'"task_id"', b'"started_at":"0001-01-01T00:00:00+14:00","task_id"')
    assert "`started_at` is 0001-01-01" in rejected(tmp_path / "f", text).message
    step = GOOD.replace(b'"state"', b'"started_at":"9999-12-31T23:00:00-14:00","state"', 1)
    assert "steps[0]: `started_at` is 9999-12-31" in rejected(tmp_path / "f", step).message


def test_a_record_that_was_exported_keeps_the_format_that_it_first_came_from(tmp_path: Path) -> None:
    assert read_one(tmp_path / "f", line(episode("t", source_format="elsewhere"))).source_format == "elsewhere"
    assert read_one(tmp_path / "f", line(episode("t"))).source_format == "jsonl"


# ---------------------------------------------------------------- keys that are there twice

STEP = '{"state": "s: {}", "action": "a", "extra": {"k": {"x": 1}}}'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"task_id": "t", "task_id": "u", "steps": [%s]}', "the object at `$` has the key 'task_id' twice"),
        ('{"task_id": "t", "steps": [%s], "env_return": 1, "env_return": 1}', "`$` has the key 'env_return' twice"),
        (
            '{"task_id": "t", "steps": [%s, {"state": "s", "action": "a", "action": "b"}]}',
            "at `$.steps[1]` has the key",
        ),
        ('{"task_id": "t", "steps": [%s], "extra": {"a": [{"b:": 1, "b:": 2}]}}', "at `$.extra.a[0]` has the key 'b:'"),
        ('{"task_id": "t", "steps": [%s], "extra": {"a": 1, "\\u0061": 2}}', "at `$.extra` has the key 'a' twice"),
    ],
)
def test_an_object_with_a_key_twice_is_rejected_with_its_place(tmp_path: Path, text: str, says: str) -> None:
    reject = rejected(tmp_path / "f", (text % STEP).encode() + b"\n")
    assert reject.reason == "invalid"
    assert says in reject.message


@pytest.mark.parametrize("colon", [":", "\\u003a", "\\u003A"])
def test_a_colon_in_a_text_is_no_key(tmp_path: Path, colon: str) -> None:
    text = r'{"task_id": "t#", "steps": [{"state": "a#b\": {", "action": "\\"}]}'.replace("#", colon)
    record = read_one(tmp_path / "f", text.encode())
    assert (record.task_id, record.steps[0].state, record.steps[0].action) == ("t:", 'a:b": {', "\\")


# ---------------------------------------------------------------- what people's files hold


def test_a_task_may_be_a_number_which_is_the_same_task_as_its_digits(tmp_path: Path) -> None:
    text = '{"task_id": %s, "steps": [{"state": "s", "action": "a"}]}'
    first, second = (read_one(tmp_path / "f", (text % task).encode()) for task in ("44", '"44"'))
    assert first.task_id == "44"
    assert identify(first, "run") == identify(second, "run")


def test_an_unknown_state_is_spelled_null_and_must_be_spelled(tmp_path: Path) -> None:
    assert (
        read_one(tmp_path / "f", b'{"task_id": "t", "steps": [{"state": null, "action": "a"}]}').steps[0].state is None
    )
    reject = rejected(tmp_path / "f", b'{"task_id": "t", "steps": [{"action": "a"}]}\n')
    assert "missing required field `state`" in reject.message


def test_cost_and_token_counts_have_fields_of_their_own(tmp_path: Path) -> None:
    step = '{"state": "s", "action": "a", "prompt_tokens": 7, "completion_tokens": 3, "cost": 0.01}'
    record = read_one(tmp_path / "f", f'{{"task_id": "t", "cost": 0.5, "steps": [{step}]}}'.encode())
    assert (record.cost, record.steps[0].cost) == (0.5, 0.01)
    assert (record.steps[0].prompt_tokens, record.steps[0].completion_tokens) == (7, 3)


def test_images_in_messages_stay_parts_and_large_ones_move_to_blobs(tmp_path: Path) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 100_000}}
    message = {"role": "user", "content": [{"type": "text", "text": "look"}, image]}
    record = episode("t", initial_messages=[message])
    lk = lake.open(tmp_path / "lake", create=True)
    assert ingest(lk, write_lines(tmp_path / "f.jsonl", [record])).new == 1
    stored = lk.scan("episodes").select("initial_messages").collect()
    assert "AAAA" not in stored.item()
    assert lk.sql("SELECT media_type FROM blobs").item() == "image/png"
    assert json.loads(inline_blobs(lk.snapshot(), stored, ["initial_messages"]).item()) == [message]


def test_a_line_above_the_limit_is_a_reject_and_is_never_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "LINE_LIMIT", 1 << 20)
    path = tmp_path / "f"
    path.write_bytes(GOOD + b'{"task_id": "' + b"x" * (32 << 20) + b'"}\n' + GOOD)
    meter = Meter()
    tracemalloc.start()
    first, second, third = FORMATS["jsonl"].read(path, meter)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert isinstance(first, tuple)
    assert isinstance(third, tuple)
    assert isinstance(second, Reject)
    assert (second.position, second.reason) == (2, "invalid")
    assert "longer than 64 MB; " in second.message
    assert meter.done == path.stat().st_size
    assert peak < 12 << 20


# ---------------------------------------------------------------- telling formats apart


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (GOOD, "jsonl"),
        (b"\xef\xbb\xbf\n\n  " + GOOD, "jsonl"),
        (b'{"task_id": "t", "steps": [{"cut', "jsonl"),
        (b'{"task_id": "t", "steps": \xff\n', "jsonl"),
        (b' [\n {"task_id": 0, "traj": []}]', "tau_bench"),
        (b'\xef\xbb\xbf[{"task_id": 0, "traj": [', "tau_bench"),
        (b'[{"task_id": 0, "traj": ["\xff', "tau_bench"),
    ],
)
def test_a_file_is_known_by_the_keys_of_its_first_values(tmp_path: Path, content: bytes, name: str) -> None:
    path = tmp_path / "anything.txt"
    path.write_bytes(content)
    assert choose_format(path).name == name


@pytest.mark.parametrize(
    "content",
    [
        b"hello",
        b"[1, 2]",
        b"task,reward\n1,2\n",
        b"\x00" * 9,
        b'{"a": 1}',
        b'{"a": 1, "b": [{"c"',
    ],
)
def test_a_file_of_no_known_format_is_an_error_that_lists_them(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "unknown"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=r"has no known format.*--query.*--format.*; known: .*tau_bench.*jsonl"):
        choose_format(path)
    assert choose_format(path, "jsonl") is FORMATS["jsonl"], "who is sure may name it"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"\xff\xfe{\x00", "is text in UTF-16; save it as UTF-8"),
        (b"PAR1", "is a file of parquet that is cut or damaged: Parquet file size is 4 bytes"),
        (
            b"[" + line(episode("t")) + b"]",
            "is an array of episodes of our own format; write each of them on a separate line",
        ),
    ],
)
def test_what_is_nearly_of_a_known_format_is_told_what_to_do(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(FormatError, match=says):
        choose_format(tmp_path / "f")


def test_a_file_of_another_format_than_named_is_refused_before_each_line_is(tmp_path: Path) -> None:
    path = tmp_path / "tau.json"
    path.write_text('[\n{"task_id": 0, "traj": [], "reward": 1.0}\n]')
    with pytest.raises(FormatError, match=r"tau\.json looks like tau_bench, not like jsonl; leave --format out"):
        choose_format(path, "jsonl")


@pytest.mark.parametrize("spelled_out", [False, True])
def test_a_lost_key_is_found_whether_lines_spell_defaults_out_or_not(tmp_path: Path, spelled_out: bool) -> None:
    template = '{"task_id": "t", "steps": [{"state": "s: %d", "action": "a"%s}]}'
    twice = '{"task_id": "t", "steps": [{"state": "s", "action": "a", "action": "b"%s}]}'
    extra = ', "reward": null, "is_active": true' if spelled_out else ""
    path = tmp_path / "lines.jsonl"
    path.write_text(
        "\n".join([template % (0, ""), template % (1, extra), twice % extra, template % (3, extra), twice % "", ""])
    )
    items_read = list(FORMATS["jsonl"].read(path))
    assert [item.position for item in items_read if isinstance(item, Reject)] == [3, 5]
    assert [item[0] for item in items_read if isinstance(item, tuple)] == [1, 2, 4]


@pytest.mark.parametrize("name", [None, "jsonl"])
@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "No such file"), (b"", "is empty"), (b" \n\n", "is empty"), (b"[ ]\n", "is empty"), (b"[", "is empty")],
)
def test_a_file_with_nothing_in_it_is_an_error(tmp_path: Path, name: str | None, content: Any, says: str) -> None:
    path = tmp_path / "nothing.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(FormatError, match=says) as raised:
        choose_format(path, name)
    assert str(path) in str(raised.value)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="directory"):
        choose_format(tmp_path)


def test_an_unknown_name_is_an_error_that_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="no format 'parquet'; known: tau_bench"):
        choose_format(write_lines(tmp_path / "f", [GOOD]), "parquet")
