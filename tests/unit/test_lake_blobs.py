"""Big payloads: out of the row, stored once, back byte for byte, and gone when their last episode is."""

import base64
import json
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lake
from lake import EpisodeRecord, Lake, StepRecord, ids
from lake.write.rows import LIMIT, inline_blobs
from testkit.copies import empty_lake
from testkit.episodes import episode
from testkit.examples import examples

LONG = "a text of many words, " * 4000
IMAGE = "data:image/png;base64," + base64.b64encode(bytes(range(256)) * 300).decode()
MANY_TOOLS = [{"type": "function", "function": {"name": f"tool {n}", "description": "d" * 100}} for n in range(700)]


@pytest.fixture
def lk(tmp_path: Path) -> Lake:
    return empty_lake(tmp_path / "lake")


def with_context(content: Any, **fields: Any) -> EpisodeRecord:
    step = StepRecord(state="s", action="a", context=[{"role": "user", "content": content}])
    return EpisodeRecord(task_id="t", steps=[step], **fields)


def stored(lk: Lake, name: str, column: str) -> str:
    return str(lk.scan(name).select(column).collect().item())


def back(lk: Lake, name: str, column: str) -> Any:
    snapshot = lk.snapshot()
    frame = inline_blobs(snapshot, snapshot.scan(name).select(column).collect(), (column,))
    return msgspec.json.decode(frame.item())


@pytest.mark.parametrize(("text", "media_type"), [(LONG, "text/plain"), (IMAGE, "image/png")])
def test_a_long_text_moves_out_and_comes_back(lk: Lake, text: str, media_type: str) -> None:
    lk.append(
        [with_context([{"type": "text", "text": "short"}, {"type": "image_url", "image_url": {"url": text}}])],
        run_id="run",
    )
    assert len(stored(lk, "steps", "context")) < 300
    (blob,) = lk.scan("blobs").collect().to_dicts()
    assert (blob["media_type"], blob["payload"].decode(), blob["n_bytes"]) == (media_type, text, len(text))
    assert back(lk, "steps", "context")[0]["content"][1]["image_url"]["url"] == text
    assert lk.scan("episodes").collect()["blob_ids"].to_list() == [[blob["blob_id"]]]


def test_a_long_document_of_short_texts_moves_out_whole(lk: Lake) -> None:
    lk.append([episode("t", tools=MANY_TOOLS)], run_id="run")
    assert stored(lk, "episodes", "tools").startswith('"blob:sha256:')
    assert back(lk, "episodes", "tools") == MANY_TOOLS


def test_what_fits_stays(lk: Lake) -> None:
    text = "x" * (LIMIT - 100)
    lk.append([with_context(text)], run_id="run")
    assert json.loads(stored(lk, "steps", "context"))[0]["content"] == text
    assert lk.scan("blobs").collect().is_empty()
    assert lk.scan("episodes").collect()["blob_ids"].to_list() == [None]


def test_the_state_stays_in_the_row_whatever_its_length(lk: Lake) -> None:
    lk.append([EpisodeRecord(task_id="t", steps=[StepRecord(state=LONG, action=LONG)])], run_id="run")
    assert stored(lk, "steps", "state") == LONG


def test_a_write_stores_a_payload_once_and_readers_see_it_once(lk: Lake) -> None:
    for number in range(2):
        lk.append([episode("t", 2 * number + index, tools=MANY_TOOLS) for index in range(2)], run_id="run")
        assert sum(file.rows for file in lk.snapshot().files("blobs")) == number + 1
    assert lk.scan("blobs").collect().height == 1
    lk.compact("blobs")
    assert lk.scan("blobs").collect().height == 1


def test_a_replay_is_a_replay(lk: Lake) -> None:
    assert lk.append([with_context(LONG)], run_id="run").new == 1
    assert lake.open(lk.uri).append([with_context(LONG)], run_id="run").present == 1


def test_a_text_that_looks_like_a_reference_stays_what_it_is(lk: Lake) -> None:
    lk.append([with_context("blob:sha256:" + "0" * 64)], run_id="run")
    assert back(lk, "steps", "context")[0]["content"] == "blob:sha256:" + "0" * 64


def test_forgetting_takes_the_blobs_that_nobody_else_refers_to(lk: Lake) -> None:
    lk.append([episode("a", tools=MANY_TOOLS, extra={"log": LONG})], run_id="run")
    lk.append([episode("b", tools=MANY_TOOLS)], run_id="run")
    first = lk.scan("episodes").filter(pl.col("task_id") == "a").collect()["episode_id"].to_list()
    lk.forget(first)
    assert back(lk, "episodes", "tools") == MANY_TOOLS, "the other one still has its tools"
    assert [len(payload) for payload in lk.scan("blobs").collect()["payload"]] == [len(msgspec.json.encode(MANY_TOOLS))]
    needle = LONG[:2000].encode()
    assert not [path for path in Path(lk.uri).rglob("*") if path.is_file() and needle in path.read_bytes()]


def test_ids_are_of_the_hash(lk: Lake) -> None:
    lk.append([with_context(LONG)], run_id="run")
    (blob,) = lk.scan("blobs").collect().to_dicts()
    assert blob["blob_id"] == int(blob["sha256"][:16], 16) & ids.MASK


leaves = st.one_of(
    st.none(),
    st.integers(-5, 5),
    st.text(max_size=5),
    st.integers(LIMIT - 3, LIMIT + 3).map(lambda n: "é" * (n // 2)),
    st.just(LONG),
)
documents = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner)
)


@settings(max_examples=examples(25), deadline=None)
@given(document=documents)
def test_whatever_goes_in_comes_out(document: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    lk = empty_lake(tmp_path_factory.mktemp("blobs") / "lake")
    lk.append([episode("t", extra={"document": document})], run_id="run")
    assert back(lk, "episodes", "extra") == {"document": document}
