"""What is written to a lake is what is read from it, no matter what the records hold, however they are batched and
ordered.

Records are drawn over all their fields: unknown, empty, zero, huge and any text. The oracle is the record itself.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from lake import EpisodeRecord, Lake, StepRecord, TokensRecord
from lake.records import RELATIONS, STATUSES, identify
from lake.tables import EPISODES, STEPS, TOKENS
from lake.write.ingest import ingest
from testkit.copies import empty_lake
from testkit.episodes import assert_same, assert_whole, contents, line, write_lines
from testkit.examples import examples

# Not shrunk: an example costs a lake, and a failing one is small enough to read.
EXAMPLES = settings(
    max_examples=examples(12),
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow],
)
INT32, INT64 = st.integers(0, 2**31 - 1), st.integers(-(2**63), 2**63 - 1)
TEXT = st.text(max_size=12)
FLOAT = st.floats(allow_nan=False, allow_infinity=False)
FLOAT32 = st.floats(allow_nan=False, allow_infinity=False, width=32)
TIME = st.datetimes(min_value=datetime(1, 1, 2), max_value=datetime(9999, 12, 30), timezones=st.just(UTC))  # noqa: DTZ001
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | FLOAT | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=4,
)
OBJECT = st.dictionaries(TEXT, JSON, max_size=2)


def maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


@st.composite
def tokens_records(draw: st.DrawFn) -> TokensRecord:
    """Tokens that open their own sequence, so that any step may have them or not."""
    n = draw(st.integers(0, 4))
    return TokensRecord(
        context_ids=draw(st.lists(INT32, max_size=4)),
        action_ids=draw(st.lists(INT32, min_size=n, max_size=n)),
        action_logprobs=draw(maybe(st.lists(FLOAT32.map(lambda value: -abs(value)), min_size=n, max_size=n))),
        action_mask=draw(maybe(st.lists(st.booleans(), min_size=n, max_size=n))),
        constrained=draw(maybe(st.lists(st.booleans(), min_size=n, max_size=n))),
        prefix_step_index=None,
        temperature=draw(maybe(FLOAT)),
        top_k=draw(maybe(INT32)),
        logprobs_mode=draw(st.sampled_from([None, "raw", "processed"])),
        engine=draw(maybe(TEXT)),
        policy_version=draw(maybe(INT64)),
        version_spans=draw(maybe(st.lists(st.tuples(INT64, INT32, INT32), max_size=2))),
    )


STEP = st.builds(
    StepRecord,
    state=TEXT,
    action=TEXT,
    context=st.lists(OBJECT, max_size=2),
    reward=maybe(FLOAT),
    state_role=maybe(TEXT),
    state_is_error=maybe(st.booleans()),
    reasoning=maybe(TEXT),
    tool_calls=maybe(st.lists(JSON, max_size=2)),
    is_action_valid=maybe(st.booleans()),
    is_active=st.booleans(),
    trainable=st.booleans(),
    is_copied_context=st.booleans(),
    policy_version=maybe(INT64),
    value_estimate=maybe(FLOAT),
    started_at=maybe(TIME),
    latency=maybe(FLOAT),
    tokens=maybe(tokens_records()),
    extra=maybe(OBJECT),
)
EPISODE = st.builds(
    EpisodeRecord,
    task_id=TEXT.filter(str.strip),
    steps=st.lists(STEP, min_size=1, max_size=3),
    rollout_index=INT32,
    attempt=INT32,
    agent_id=maybe(TEXT),
    collection_round=maybe(INT32),
    split=maybe(TEXT),
    policy_version=maybe(INT64),
    status=st.sampled_from(STATUSES),
    relation=st.sampled_from([None, *RELATIONS]),
    terminated=maybe(st.booleans()),
    env_return=maybe(FLOAT),
    seed=maybe(INT64),
    started_at=maybe(TIME),
    prompt_tokens=maybe(INT64),
    error=maybe(TEXT),
    ground_truth=JSON,
    tools=maybe(st.lists(JSON, max_size=2)),
    initial_messages=maybe(st.lists(OBJECT, max_size=2)),
    final_value_estimate=maybe(FLOAT),
    tokenizer=maybe(TEXT),
    extra=maybe(OBJECT),
)


def episode_id(record: EpisodeRecord) -> int:
    return identify(record, "run").episode_id


EPISODES_OF_ONE_RUN = st.lists(EPISODE, min_size=1, max_size=5, unique_by=episode_id)


@contextmanager
def fresh_lake() -> Iterator[Lake]:
    """A separate lake for every example."""
    with tempfile.TemporaryDirectory(prefix="round-trip-") as folder:
        yield empty_lake(Path(folder, "lake"))


def record_in(lk: Lake, *batches: list[EpisodeRecord]) -> None:
    with lk.job(kind="collect", run_id="run") as job:
        for batch in batches:
            job.record(batch)


def stored(value: Any) -> Any:
    """A field of a record as its column holds it, if JSON: as text."""
    return None if value is None else msgspec.json.encode(value).decode()


def same(row: dict[str, Any], record: msgspec.Struct, columns: list[str], json: set[str]) -> None:
    for name in columns:
        value = getattr(record, name)
        assert row[name] == (stored(value) if name in json else value), name


def fields_of(struct: type[msgspec.Struct], names: list[str]) -> list[str]:
    return [name for name in names if name in struct.__struct_fields__]


EPISODE_JSON = {"ground_truth", "tools", "initial_messages", "final_observation", "sampling", "extra"}
COLUMNS_E = [
    name for name in fields_of(EpisodeRecord, EPISODES.names) if not name.endswith("_episode_id") and name != "run_id"
]
COLUMNS_S = fields_of(StepRecord, STEPS.names)
COLUMNS_T = [name for name in fields_of(TokensRecord, TOKENS.names) if name != "action_mask"]


@EXAMPLES
@given(records=EPISODES_OF_ONE_RUN)
def test_every_field_is_read_as_it_was_written(records: list[EpisodeRecord]) -> None:
    with fresh_lake() as lk:
        record_in(lk, records)
        snapshot = lk.snapshot()
        assert assert_whole(snapshot) == len(records)
        episodes = {row["episode_id"]: row for row in snapshot.scan("episodes").collect().to_dicts()}
        steps = {(row["episode_id"], row["step_index"]): row for row in snapshot.scan("steps").collect().to_dicts()}
        tokens = {(row["episode_id"], row["step_index"]): row for row in snapshot.scan("tokens").collect().to_dicts()}
        queried = snapshot.sql("SELECT * FROM steps").cast(dict(STEPS.polars()))
        assert queried.sort("episode_id", "step_index").equals(
            snapshot.scan("steps").collect().sort("episode_id", "step_index")
        )
        for record in records:
            key = episode_id(record)
            assert episodes[key]["num_steps"] == len(record.steps)
            same(episodes[key], record, COLUMNS_E, EPISODE_JSON)
            for index, step in enumerate(record.steps):
                same(steps[key, index], step, COLUMNS_S, {"context", "tool_calls", "extra"})
                assert ((key, index) in tokens) == (step.tokens is not None)
                if step.tokens is not None:
                    row = tokens[key, index]
                    same(row, step.tokens, COLUMNS_T, {"version_spans"})
                    mask = step.tokens.action_mask
                    assert row["action_mask"] == ([True] * len(step.tokens.action_ids) if mask is None else mask)
                    assert row["n_trained"] == sum(row["action_mask"])


@EXAMPLES
@given(records=EPISODES_OF_ONE_RUN, data=st.data())
def test_any_batching_in_any_order_with_any_repeats_shows_the_same(
    records: list[EpisodeRecord], data: st.DataObject
) -> None:
    again = data.draw(st.permutations(records + data.draw(st.lists(st.sampled_from(records), max_size=3))))
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(again) - 1)), max_size=4)))
    batches = [again[start:end] for start, end in zip([0, *cuts], [*cuts, len(again)], strict=True)]
    with fresh_lake() as first_lake, fresh_lake() as second_lake:
        record_in(first_lake, records)
        record_in(second_lake, *batches)
        record_in(second_lake, records)
        assert_same(contents(second_lake.snapshot()), contents(first_lake.snapshot()))
        counts = second_lake.sql("SELECT count(*) AS n FROM episodes").item()
        assert counts == len(records)


@EXAMPLES
@given(records=EPISODES_OF_ONE_RUN, batch_size=st.integers(1, 6))
def test_a_file_of_records_is_a_replay_of_the_records(records: list[EpisodeRecord], batch_size: int) -> None:
    with fresh_lake() as live, fresh_lake() as read:
        path = write_lines(Path(live.uri).parent / "file.jsonl", records)
        for record, text in zip(records, path.read_bytes().splitlines(keepends=True), strict=True):
            assert line(msgspec.json.decode(text, type=EpisodeRecord)) == line(record)
        report = ingest(read, path, run_id="run", batch_size=batch_size)
        assert (report.new, report.present, report.rejected) == (len(records), 0, 0)
        record_in(live, records)
        assert_same(contents(read.snapshot()), contents(live.snapshot()))
        again = ingest(live, path, run_id="run", batch_size=batch_size)
        assert (again.new, again.present, again.rejected) == (0, len(records), 0)


CONFLICTS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=9)


@EXAMPLES
@given(keys=CONFLICTS, size=st.integers(1, 9))
def test_the_first_content_of_a_key_wins_in_any_batching(keys: list[tuple[int, int]], size: int) -> None:
    """The oracle is a dictionary."""
    records = [
        EpisodeRecord(task_id=f"t{task}", steps=[StepRecord(state="s", action=f"content {content}")])
        for task, content in keys
    ]
    first: dict[int, int] = {}
    expected = {"new": 0, "present": 0, "rejected": 0}
    for task, content in keys:
        if task not in first:
            first[task] = content
            expected["new"] += 1
        else:
            expected["present" if first[task] == content else "rejected"] += 1
    with fresh_lake() as lk:
        path = write_lines(Path(lk.uri).parent / "file.jsonl", records)
        report = ingest(lk, path, batch_size=size)
        assert {name: getattr(report, name) for name in expected} == expected
        steps = lk.scan("steps").join(lk.scan("episodes"), on="episode_id").select("task_id", "action").collect()
        assert dict(steps.iter_rows()) == {f"t{task}": f"content {content}" for task, content in first.items()}
        rejects = lk.scan("rejects").select(pl.col("reason").unique()).collect()["reason"].to_list()
        assert rejects == (["conflict"] if expected["rejected"] else [])
        assert lk.scan("rejects").collect().height == expected["rejected"]
