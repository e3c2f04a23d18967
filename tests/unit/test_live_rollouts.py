"""The rollout hook: what workers and processors yield is recorded as files of it are read; nothing disturbs them."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import lake
from lake.errors import UsageError
from lake.live.recorder import Recorder
from lake.live.rollouts import RolloutHook
from lake.read.episode_text import find_named
from testkit.copies import empty_lake
from testkit.eval_protocol_files import CALL, CHAT, END, MOVED, SYSTEM, USER, row, status
from testkit.round_trips import assert_same, records


class Row(SimpleNamespace):
    """A row as the tool's objects are: changed in place, and dumped for its log."""

    def model_dump(self, *, mode: str, exclude_none: bool) -> dict[str, Any]:
        assert (mode, exclude_none) == ("json", True), "as the tool's own log has it"
        dumped: dict[str, Any] = json.loads(json.dumps(vars(self)))
        return {key: value for key, value in dumped.items() if value is not None}


@contextmanager
def recording(tmp_path: Path) -> Iterator[Recorder]:
    empty_lake(tmp_path / "lake")
    with lake.recorder(tmp_path / "lake", run="agent", spool=tmp_path / "spool", batch_seconds=3600) as recorder:
        yield recorder


def ingested(tmp_path: Path, rows: Sequence[dict[str, Any]]) -> lake.Lake:
    """A lake that read rows from a file."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(eval_row) + "\n" for eval_row in rows), "utf-8")
    lk = empty_lake(tmp_path / "other")
    report = lk.ingest(path, run_id="agent")
    assert report.rejected == 0, report.first_fault
    return lk


class Processor:
    """A rollout processor: `act` makes of a row what comes of it, or raises."""

    is_set_up = False

    def __init__(self, act: Any) -> None:
        self.act = act
        self.made: list[asyncio.Task[Any]] = []

    def setup(self) -> None:
        self.is_set_up = True

    def __call__(self, rows: list[Any], config: Any) -> list[asyncio.Task[Any]]:
        async def process(eval_row: Any) -> Any:
            await asyncio.sleep(0)
            return await self.act(eval_row)

        self.made = [asyncio.create_task(process(eval_row)) for eval_row in rows]
        return self.made


async def played(eval_row: Any) -> Any:
    """A rollout that goes well; no one says that it is over."""
    eval_row.messages = CHAT
    return eval_row


def rows(count: int, **fields: Any) -> list[Row]:
    running = {"rollout_status": status(101, "Rollout is running"), "evaluation_result": None}
    return [Row(**(row([SYSTEM, USER], rollout=f"r-{number}") | running | fields)) for number in range(count)]


def test_rows_of_a_processor_are_recorded_as_a_file_of_them_is_read(tmp_path: Path) -> None:
    async def run(processor: Any) -> list[Any]:
        return await asyncio.gather(*processor(rows(3), "config"))

    with recording(tmp_path) as recorder:
        done = asyncio.run(run(RolloutHook(recorder).around(Processor(played))))
        assert (recorder.stats().finished, recorder.stats().troubles) == (3, 0)
    finished = {"rollout_status": status(100, "Rollout finished")}
    read = ingested(tmp_path, [eval_row.model_dump(mode="json", exclude_none=True) | finished for eval_row in done])
    recorded = records(lake.open(tmp_path / "lake"))
    assert_same(recorded, records(read))
    assert [record.status for record in recorded.values()] == ["completed"] * 3
    assert "hidden" not in str(recorded), "a key of an API"


def test_a_failed_rollout_is_an_attempt_and_its_retry_the_next(tmp_path: Path) -> None:
    tries = []

    async def act(eval_row: Any) -> Any:
        tries.append(eval_row)
        eval_row.messages = [SYSTEM, USER, CALL]
        if len(tries) == 1:
            raise ConnectionError("lost")
        return await played(eval_row)

    async def run(processor: Any) -> Any:
        (eval_row,) = rows(1)
        (task,) = processor([eval_row], None)
        with pytest.raises(ConnectionError, match="lost"):
            await task
        (task,) = processor([eval_row], None)
        assert await task is eval_row

    with recording(tmp_path) as recorder:
        asyncio.run(run(RolloutHook(recorder).around(Processor(act))))
        assert recorder.flush()
        assert recorder.stats().delivered == 2
    (record,) = records(lake.open(tmp_path / "lake")).values()
    assert (record.attempt, record.status) == (1, "completed"), "the one before is superseded"


def test_a_rollout_that_fails_for_good_is_recorded_as_failed(tmp_path: Path) -> None:
    async def act(eval_row: Any) -> Any:
        eval_row.messages = [SYSTEM, USER, CALL]
        raise ConnectionError("lost")

    async def run(processor: Any) -> None:
        tasks = processor(rows(2), None)
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert [str(outcome) for outcome in outcomes] == ["lost", "lost"]

    with recording(tmp_path) as recorder:
        asyncio.run(run(RolloutHook(recorder).around(Processor(act))))
    records_read = records(lake.open(tmp_path / "lake")).values()
    assert [(record.attempt, record.status, record.error) for record in records_read] == [
        (0, "failed", "ConnectionError: lost")
    ] * 2


@pytest.mark.parametrize("is_early", [True, False])
def test_cancelling_reaches_the_processors_task(tmp_path: Path, is_early: bool) -> None:
    async def never(_: Any) -> Any:
        await asyncio.sleep(3600)

    async def run(inner: Processor, processor: Any) -> None:
        (task,) = processor(rows(1), None)
        for _ in range(0 if is_early else 3):
            await asyncio.sleep(0)
        task.cancel("enough")
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(asyncio.CancelledError):
            await inner.made[0]

    with recording(tmp_path) as recorder:
        inner = Processor(never)
        asyncio.run(run(inner, RolloutHook(recorder).around(inner)))


def test_the_wrapped_processor_passes_for_the_other(tmp_path: Path) -> None:
    with recording(tmp_path) as recorder:
        inner = Processor(played)
        processor = RolloutHook(recorder).around(inner)
        assert isinstance(processor, Processor)
        processor.setup()
        assert inner.is_set_up
        assert processor.is_set_up


def test_off_nothing_is_wrapped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRAJLAKE_RECORD", "off")
    hook, processor = RolloutHook(lake.recorder(tmp_path / "lake", run="agent")), Processor(played)
    assert hook.around(processor) is processor
    assert hook.row(row()) is None
    assert hook.episode([], CHAT, task="t") is None


def test_collecting_never_breaks_a_processor(tmp_path: Path) -> None:
    async def same(eval_row: Any) -> Any:
        return eval_row

    async def run(processor: Any, odd: Any) -> list[Any]:
        return await asyncio.gather(*processor([odd], None))

    with recording(tmp_path) as recorder:
        hook = RolloutHook(recorder)
        for odd in (7, Row(messages="none"), Row(messages=[{"no": "role"}]), {"messages": [3]}):
            before = recorder.stats().troubles
            assert asyncio.run(run(hook.around(Processor(same)), odd)) == [odd]
            assert hook.row(odd) is None
            assert hook.episode([odd], [odd], task="t") is None
            assert recorder.stats().troubles >= before + 3
            assert hook.around(lambda *_: "no tasks")([odd]) == "no tasks"


def step(number: int, **fields: Any) -> dict[str, Any]:
    """A worker's step, as it dumps it."""
    empty = {"raw_policy_output": None, "policy_logprobs": None, "policy_value_estimate": None, "is_done": False}
    about = {"system_step_index": number, "observation_data": [], "action_taken": {"type": "text"}, "step_info": {}}
    return empty | about | {"resulting_messages_history": CHAT, "base_reward": None, "advantage": None} | fields


STEPS = [
    step(
        0,
        observation_data="at the start",
        policy_logprobs={
            "prompt_token_ids": [1, 2],
            "completion_token_ids": [3],
            "completion_logprobs": [-0.5],
        },
        policy_value_estimate=0.25,
    ),
    step(1, policy_logprobs={"sum": -2.5}, step_info={"assistant_turn_index": 1, "note": "n"}, base_reward=0.125),
    step(2, is_done=True),
]


def test_what_a_worker_yields_is_an_episode(tmp_path: Path) -> None:
    with recording(tmp_path) as recorder:
        hook = RolloutHook(recorder)
        episode_id = hook.episode(STEPS, CHAT, {"goal": "there"}, task="row-a", rollout_id="w-1")
        assert hook.episode(STEPS, CHAT, task="row-a") != hook.episode(STEPS, CHAT, task="row-a"), "without a name"
        assert (recorder.stats().finished, recorder.stats().troubles) == (3, 0)
    lk = lake.open(tmp_path / "lake")
    (record,) = (record_read for key, record_read in records(lk).items() if lake.ids.to_text(key) == episode_id)
    assert (record.task_id, record.run_id, record.ground_truth) == ("row-a", "agent", {"goal": "there"})
    assert (record.status, record.terminated, record.env_return) == ("completed", True, 1.25)
    first, second, last = record.steps
    assert (first.state, first.value_estimate) == ("at the start", 0.25)
    assert first.tokens is not None
    assert (first.tokens.context_ids, first.tokens.action_ids, first.tokens.action_logprobs) == ([1, 2], [3], [-0.5])
    assert second.tokens is None
    assert (second.extra or {})["payload"]["sum"] == -2.5, "not of tokens, but kept"
    assert (second.extra or {})["payload"]["step_info"] == {"assistant_turn_index": 1, "note": "n"}
    assert [(score.scorer, score.value, score.step_index) for score in record.scores] == [("base_reward", 0.125, 1)]
    assert (last.action, last.state) == (END["content"], "You are there.")
    assert record.initial_messages == [SYSTEM, USER]
    assert second.context == [{key: value for key, value in MOVED.items() if value is not None}]


@pytest.mark.parametrize(
    "where",
    [
        {"completion_params": {"model": "m", "temperature": 0.7, "top_p": 0.9}},
        {"input_metadata": {"completion_params": {"temperature": 0.7, "extra_body": {"top_p": 0.9}}}},
        {"execution_metadata": {"temperature": 0.7, "top_p": 0.9}},
        {"execution_metadata": {"extra": {"sampling_params": {"temperature": 0.7, "top_p": 0.9}}}},
        {"logprobs": {"temperature": 0.7, "top_p": 0.9}},
        {"step_info": {"completion_params": {"temperature": 0.7, "top_p": 0.9}}},
        {"logprobs": {"temperature": 0.7}, "completion_params": {"temperature": 0.2, "top_p": 0.9}},
    ],
    ids="-".join,
)
def test_tokens_have_the_temperature_wherever_a_worker_says_it(tmp_path: Path, where: dict[str, Any]) -> None:
    row = dict(where)
    logprobs = STEPS[0]["policy_logprobs"] | row.pop("logprobs", {})
    steps = [step(0, policy_logprobs=logprobs, step_info=row.pop("step_info", {})), *STEPS[1:]]
    with recording(tmp_path) as recorder:
        RolloutHook(recorder).episode(steps, CHAT, task="row-a", rollout_id="w-1", **row)
        assert recorder.stats().troubles == 0
    (record,) = records(lake.open(tmp_path / "lake")).values()
    tokens = record.steps[0].tokens
    assert tokens is not None
    assert (tokens.temperature, tokens.top_p, tokens.top_k) == (pytest.approx(0.7), pytest.approx(0.9), None)


def test_a_temperature_that_nobody_says_stays_unknown(tmp_path: Path) -> None:
    with recording(tmp_path) as recorder:
        RolloutHook(recorder).episode(STEPS, CHAT, task="row-a", completion_params={"model": "m", "temperature": None})
    (record,) = records(lake.open(tmp_path / "lake")).values()
    assert record.steps[0].tokens is not None
    assert record.steps[0].tokens.temperature is None


def test_rollouts_are_shown_by_their_place_or_their_own_number(tmp_path: Path) -> None:
    with recording(tmp_path) as recorder:
        hook = RolloutHook(recorder)
        named = [hook.episode(STEPS, CHAT, task="row-a", rollout_id=f"w-{number}") for number in range(3)]
        counted = [hook.episode(STEPS, CHAT, task="row-b", rollout_index=number) for number in (0, 2)]
    snapshot = lake.open(tmp_path / "lake").snapshot()

    def at(task: str, rollout: int) -> str:
        return lake.ids.to_text(find_named(snapshot, task=task, rollout=rollout, run=None))

    numbers = dict(snapshot.sql("SELECT id_text(episode_id), rollout_index FROM episodes").iter_rows())
    assert {at("row-a", index) for index in range(3)} == set(named)
    assert [at("row-a", index) for index in range(3)] == [at("row-a", numbers[at("row-a", p)]) for p in range(3)]
    assert [at("row-b", 0), at("row-b", 2)] == counted
    for task, rollout in (("row-a", 3), ("row-b", 1)):
        with pytest.raises(UsageError):
            at(task, rollout)


def test_a_workers_episode_is_the_row_that_says_it(tmp_path: Path) -> None:
    plain = [step(index) for index in range(3)]
    with recording(tmp_path) as recorder:
        RolloutHook(recorder).episode(plain, CHAT, "there", task="row-a", rollout_id="w-1", tools=[{"type": "x"}])
    spans = [
        {"assistant_turn_index": index, "action_taken": {"type": "text"}, "system_step_index": index}
        for index in range(3)
    ]
    fields = {
        "messages": CHAT,
        "ground_truth": "there",
        "tools": [{"type": "x"}],
        "input_metadata": {"row_id": "row-a"},
    }
    execution = {"rollout_id": "w-1", "extra": {"assistant_turn_payloads": spans}}
    assert_same(
        records(lake.open(tmp_path / "lake")), records(ingested(tmp_path, [fields | {"execution_metadata": execution}]))
    )


def test_a_worker_says_whether_the_episode_was_over(tmp_path: Path) -> None:
    with recording(tmp_path) as recorder:
        for is_done in (True, False):
            RolloutHook(recorder).episode([step(0, is_done=is_done)], [USER, END], task=f"done: {is_done}")
    episodes = lake.open(tmp_path / "lake").sql("SELECT task_id, terminated FROM episodes ORDER BY 1")
    assert episodes.rows() == [("done: False", None), ("done: True", True)]


def test_steps_that_no_message_belongs_to_are_told(tmp_path: Path) -> None:
    with recording(tmp_path) as recorder:
        steps = [*STEPS, step(3, policy_value_estimate=1.0)]
        assert RolloutHook(recorder).episode(steps, CHAT, task="row-a") is not None
        assert recorder.stats().troubles == 1
    (record,) = records(lake.open(tmp_path / "lake")).values()
    assert len(record.steps) == 3


def test_a_row_that_no_table_can_hold_is_a_reject_without_its_keys(tmp_path: Path) -> None:
    moved = MOVED | {"control_plane_step": {"step": 0, "reward": float("nan")}}
    with recording(tmp_path) as recorder:
        hook = RolloutHook(recorder)
        assert hook.row(row([USER, CALL, moved])) is None
        assert recorder.flush()
        assert (recorder.stats().rejected, recorder.stats().troubles) == (1, 0)
    (reject,) = lake.open(tmp_path / "lake").sql("SELECT message, raw, run_id, source_format FROM rejects").to_dicts()
    assert "env_return" in reject["message"]
    assert (reject["run_id"], reject["source_format"]) == ("agent", "eval_protocol")
    assert "Where to?" in reject["raw"]
    assert "hidden" not in reject["raw"]


def test_an_evaluated_row_is_recorded_with_its_scores(tmp_path: Path) -> None:
    with recording(tmp_path) as recorder:
        assert RolloutHook(recorder).row(row(rollout="e-1")) is not None
    assert_same(records(lake.open(tmp_path / "lake")), records(ingested(tmp_path, [row(rollout="e-1")])))
