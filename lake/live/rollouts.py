"""Rollout workers and eval-protocol's rollout processors, recorded when their rollouts end.

    hook = RolloutHook(recorder)
    for steps, messages, ground_truth in worker.run(tasks):          # a custom worker
        hook.episode(steps, messages, ground_truth, task="airline-12")

    @evaluation_test(rollout_processor=hook.around(SingleTurnRolloutProcessor()), ...)

`lake.formats.eval_protocol` reads files of rows the same way. Steps of a worker are converted to such a row.
Evaluations come later, from reward functions or `Lake.add_scores`.

Source: pytest/rollout_processor.py, agent/models.py and models.py of the eval-protocol package, 0.3.33.
"""

import asyncio
import secrets
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from lake import ids
from lake.errors import UsageError
from lake.formats.base.fields import as_object, parse_count, parse_finite
from lake.formats.base.rows import complete_record
from lake.formats.base.source import Input
from lake.formats.eval_protocol import NAME, build_record
from lake.live.frames import to_plain
from lake.live.null_recorder import OFF
from lake.live.sink import Sink, format_exception, guarded, run_off_loop
from lake.records import EpisodeRecord, Reject, ScoreRecord, make_episode_id

if TYPE_CHECKING:
    from lake.live.recorder import Recorder

_RUNNING, _INTERNAL, _CANCELLED = 101, 13, 1
"""Status codes of a row: the default, eval-protocol's for a failed rollout, and google.rpc's for a cancelled one."""
_FINISHED = {"code": 100, "message": "Rollout finished", "details": []}
_STEP_FIELDS = frozenset(
    ("observation_data", "resulting_messages_history", "policy_logprobs", "policy_value_estimate", "base_reward")
)
"""Fields of a worker's step that are not copied into the row's payloads."""


class RolloutHook:
    """Records the rollouts of workers and rollout processors; never raises into them. Thread-safe.

    Args:
        recorder: recorder of `lake.recorder`; the caller closes it.
    """

    def __init__(self, recorder: "Recorder") -> None:
        self._recorder = recorder
        self._is_on = recorder is not OFF
        self._failures: dict[str, int] = {}
        """Id of a rollout -> number of failed tries."""

    @property
    def _sink(self) -> Sink:
        return self._recorder._sink

    def episode(
        self,
        steps: Iterable[Any],
        messages: Sequence[Any],
        ground_truth: Any = None,
        *,
        task: str | int,
        rollout_id: str | None = None,
        rollout_index: int | None = None,
        completion_params: Mapping[str, Any] | None = None,
        **row: Any,
    ) -> str | None:
        """Record a finished episode of a rollout worker.

        Args:
            steps: reward-kit's `StepData` as objects or mappings, one for each assistant message in order, or numbered
                by `step_info["assistant_turn_index"]`. Its fields are `observation_data` (text becomes the state),
                `policy_logprobs` (`prompt_token_ids`, `completion_token_ids` and `completion_logprobs` are the exact
                tokens), `policy_value_estimate`, `is_done` and `base_reward` (a score). Other fields are kept.
            messages: the whole conversation, as the reward function gets it.
            ground_truth: the reference for the reward function.
            task: the task; episodes of one task and run are siblings.
            rollout_id: the worker's name of the rollout. Its number among the siblings is a hash of this name. Without
                a name it is random, so that independent workers never share a number; `trajlake show --rollout 0`
                counts the siblings.
            rollout_index: number among the siblings, if the worker counts them over all processes.
            completion_params: sampling of the policy: model, temperature, top_p, ... Ratio losses (ppo, grpo, gspo)
                need the temperature. It may also be in `input_metadata`, `execution_metadata` or `policy_logprobs`.
            row: more fields of an `EvaluationRow`: tools, input_metadata, rollout_status, execution_metadata, ...

        Returns:
            The episode's id, for `Lake.add_scores`; None if it cannot be recorded.
        """
        if not self._is_on:
            return None
        if completion_params is not None:
            row["input_metadata"] = dict(row.get("input_metadata") or {}) | {"completion_params": completion_params}
        return self._record_steps(list(steps), messages, ground_truth, task, rollout_id, rollout_index, row)

    def row(self, row: Any, *, attempt: int = 0) -> str | None:
        """Record an `EvaluationRow` as it is now, and return its episode's id.

        Args:
            row: eval-protocol's row, an object or a mapping.
            attempt: number of earlier tries; a rollout that is recorded again needs a higher one.
        """
        return self._record_row(row, attempt) if self._is_on else None

    def around(self, processor: Any) -> Any:
        """Return a rollout processor that does the same and records each row when its task is done.

        A failed rollout is recorded as failed, as far as its row is known, and its retry as another attempt.

        Args:
            processor: a processor of eval-protocol: called with rows and a configuration, it returns a task per row.
        """
        return _Processor(self, processor) if self._is_on else processor

    @guarded()
    def _record_steps(
        self,
        steps: list[Any],
        messages: Sequence[Any],
        ground_truth: Any,
        task: str | int,
        rollout_id: str | None,
        rollout_index: int | None,
        row: dict[str, Any],
    ) -> str | None:
        turns: list[tuple[int, dict[str, Any]]] = []
        for position, step in enumerate(steps):
            fields = as_object(to_plain(step))
            turn = parse_count(as_object(fields.get("step_info")).get("assistant_turn_index"))
            turns.append((position if turn is None else turn, fields))
        payloads = []
        for turn, fields in turns:
            copied = {name: value for name, value in fields.items() if name not in _STEP_FIELDS}
            copied = {
                name: value for name, value in copied.items() if value not in (None, {}, []) and value is not False
            }
            payloads.append({"assistant_turn_index": turn} | copied | as_object(fields.get("policy_logprobs")))
        full_row: dict[str, Any] = to_plain(row) | {
            "messages": to_plain(list(messages)),
            "ground_truth": to_plain(ground_truth),
        }
        full_row["input_metadata"] = {"row_id": str(task)} | as_object(full_row.get("input_metadata"))
        execution = {"rollout_id": rollout_id} | as_object(full_row.get("execution_metadata"))
        extra = as_object(execution.get("extra")) | {"assistant_turn_payloads": payloads}
        record = self._convert(full_row | {"execution_metadata": execution | {"extra": extra}})
        if rollout_index is not None:
            record.rollout_index = rollout_index
        for turn, fields in turns:
            if turn >= len(record.steps):
                self._sink.report_trouble(f"step data of turn {turn}: the conversation has {len(record.steps)}")
                continue
            step = record.steps[turn]
            step.value_estimate = parse_finite(fields.get("policy_value_estimate"))
            if isinstance(observation := fields.get("observation_data"), str):
                step.state = observation
            if fields.get("is_done") is True and record.terminated is None:
                record.terminated = True
            if (reward := parse_finite(fields.get("base_reward"))) is not None:
                record.scores.append(ScoreRecord(scorer="base_reward", value=reward, step_index=turn))
        return self._record(record, full_row)

    @guarded()
    def _record_row(self, row: Any, attempt: int) -> str | None:
        plain_row = _dump_row(row)
        record = self._convert(plain_row)
        record.attempt = attempt
        return self._record(record, plain_row)

    @guarded()
    def _record_try(self, row: Any, error: BaseException | None) -> None:
        """Record the row of a task that is done or failed."""
        plain_row = _dump_row(row)
        name = str(as_object(plain_row.get("execution_metadata")).get("rollout_id"))
        attempt = self._failures.get(name, 0)
        if error is not None:
            self._failures[name] = attempt + 1
            code = _INTERNAL if isinstance(error, Exception) else _CANCELLED
            plain_row |= {"rollout_status": {"code": code, "message": format_exception(error), "details": []}}
        else:
            self._failures.pop(name, None)
            if as_object(plain_row.get("rollout_status")).get("code") == _RUNNING:
                # eval-protocol does the same when the task is done, unless the processor has set a status.
                plain_row |= {"rollout_status": _FINISHED}
        self._record_row(plain_row, attempt)

    def _convert(self, row: dict[str, Any]) -> EpisodeRecord:
        return build_record(row, _LiveInput(Path(), self._recorder.run))

    def _record(self, record: EpisodeRecord, row: dict[str, Any]) -> str | None:
        problem = complete_record(record, NAME)
        if problem is not None and record.steps:
            raw = msgspec.json.encode(row).decode()
            self._recorder.reject(Reject(position=0, reason="invalid", message=problem, raw=raw, source_format=NAME))
            return None
        self._recorder.record(record)
        return ids.to_text(make_episode_id(record, record.run_id or self._recorder.run)) if record.steps else None

    async def _watch(self, task: "asyncio.Future[Any]", row: Any) -> Any:
        """Return a task's row after recording it."""
        try:
            finished_row = await task
        except BaseException as error:
            await run_off_loop(self._record_try, row, error)
            raise
        await run_off_loop(self._record_try, finished_row, None)
        return finished_row

    @guarded()
    def _watch_all(self, tasks: Sequence[Any], rows: Sequence[Any]) -> list[Any]:
        """Return tasks that finish when the given ones do and their rows are recorded."""
        if len(tasks) != len(rows):
            raise UsageError(f"a rollout processor gave {len(tasks)} tasks for {len(rows)} rows; valid: one for each")
        watched = [asyncio.ensure_future(self._watch(task, row)) for task, row in zip(tasks, rows, strict=True)]
        for task, inner in zip(watched, tasks, strict=True):
            # A task that is cancelled before it starts never gets to cancel the inner one.
            task.add_done_callback(partial(_cancel_inner, inner))
        return watched


class _LiveInput(Input):
    """Rows that arrive one at a time. A rollout without a name gets a random number."""

    def next_index(self, *key: Any) -> int:
        return secrets.randbits(31)


class _Processor:
    """A rollout processor around another one, with the other's class and attributes."""

    def __init__(self, hook: RolloutHook, processor: Any) -> None:
        self.__dict__.update(_hook=hook, _processor=processor)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._processor)

    def __call__(self, rows: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        listed_rows = list(rows)
        tasks = self._processor(rows, *args, **kwargs)
        return self._hook._watch_all(tasks, listed_rows) or tasks

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_processor"], name)


def _cancel_inner(inner: "asyncio.Future[Any]", outer: "asyncio.Future[Any]") -> None:
    if outer.cancelled():
        inner.cancel()


def _dump_row(row: Any) -> dict[str, Any]:
    """Return a row as plain values, as in eval-protocol's log."""
    dump = getattr(row, "model_dump", None)
    return as_object(dump(mode="json", exclude_none=True) if callable(dump) else to_plain(row))
