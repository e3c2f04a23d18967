"""Rollout workers and eval-protocol's rollout processors, recorded as their rollouts end.

    hook = RolloutHook(recorder)
    for steps, messages, ground_truth in worker.run(tasks):          # a worker of one's own
        hook.episode(steps, messages, ground_truth, task="airline-12")

    @evaluation_test(rollout_processor=hook.around(SingleTurnRolloutProcessor()), ...)

What a row means is said by `lake.formats.eval_protocol.reader`, which reads files of them too; what a worker yields is
made into the row that says it. Evaluations come later: they are added by reward functions, or by `Lake.add_scores`.

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
from lake.formats.base.fields import as_object, finite, whole
from lake.formats.base.rows import finished
from lake.formats.base.source import Input
from lake.formats.eval_protocol.reader import NAME, to_record
from lake.live.contexts import beside_the_loop
from lake.live.frames import plain
from lake.live.off import OFF
from lake.live.sink import Sink, guarded, told
from lake.records import EpisodeRecord, Reject, ScoreRecord, episode_id

if TYPE_CHECKING:
    from lake.live.recorder import Recorder

_RUNNING, _INTERNAL, _CANCELLED = 101, 13, 1
"""Codes of a row's status: what nobody has set, what the tool sets when a rollout fails, and google.rpc's."""
_FINISHED = {"code": 100, "message": "Rollout finished", "details": []}
_OF_STEPS = frozenset(
    ("observation_data", "resulting_messages_history", "policy_logprobs", "policy_value_estimate", "base_reward")
)
"""Fields of a worker's step that have a place of their own."""


class RolloutHook:
    """Records what rollout workers and rollout processors yield; never raises into them. Thread-safe.

    Args:
        recorder: of `lake.recorder`; closing it is left to its owner.
    """

    def __init__(self, recorder: "Recorder") -> None:
        self._recorder = recorder
        self._is_on = recorder is not OFF
        self._failed: dict[str, int] = {}
        """Of rollouts that failed, by their ids: how often."""

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
        """Record what a rollout worker yields of one episode, when it has ended.

        Args:
            steps: of reward-kit's `StepData`, as objects or mappings, one for each assistant message in their order, or
                by `step_info["assistant_turn_index"]`: `observation_data` (text becomes the state), `policy_logprobs`
                (`prompt_token_ids`, `completion_token_ids` and `completion_logprobs` are the exact tokens),
                `policy_value_estimate`, `is_done`, `base_reward` (a score). What else is said of a step is kept.
            messages: the whole conversation, as the reward function is given it.
            ground_truth: what the reward function compares with.
            task: what is tried; episodes of one task and run are siblings.
            rollout_id: the worker's name of it. Its number among the siblings is made of that, else it is random, so
                that workers that know nothing of each other never share one; `trajlake show --rollout 0` counts them.
            rollout_index: its number among the siblings, where the worker counts them over all processes.
            completion_params: how the policy was asked: model, temperature, top_p, ... Ratio losses (ppo, grpo, gspo)
                need the temperature; it may also stand in `input_metadata`, `execution_metadata` or `policy_logprobs`.
            row: further fields of an `EvaluationRow`: tools, input_metadata, rollout_status, execution_metadata, ...

        Returns:
            The episode's id, for `Lake.add_scores`; None if it cannot be recorded.
        """
        if not self._is_on:
            return None
        if completion_params is not None:
            row["input_metadata"] = dict(row.get("input_metadata") or {}) | {"completion_params": completion_params}
        return self._episode(list(steps), messages, ground_truth, task, rollout_id, rollout_index, row)

    def row(self, row: Any, *, attempt: int = 0) -> str | None:
        """Record an `EvaluationRow`, an object or a mapping, as it is now; its episode's id.

        Args:
            row: of eval-protocol.
            attempt: how many tries of this rollout came before; a rollout that is recorded again needs a higher one.
        """
        return self._row(row, attempt) if self._is_on else None

    def around(self, processor: Any) -> Any:
        """A rollout processor that does what another one does, and records each row when its task is done.

        A rollout that fails is recorded as failed as far as its row is known, and its retry as a further attempt.

        Args:
            processor: any of eval-protocol's: called with rows and a configuration, it returns a task for each row.
        """
        return _Processor(self, processor) if self._is_on else processor

    @guarded()
    def _episode(
        self,
        steps: list[Any],
        messages: Sequence[Any],
        ground_truth: Any,
        task: str | int,
        rollout_id: str | None,
        rollout_index: int | None,
        row: dict[str, Any],
    ) -> str | None:
        given = [as_object(plain(step)) for step in steps]
        turns = [_turn(data, place) for place, data in enumerate(given)]
        payloads = [{"assistant_turn_index": turn} | _payload(data) for turn, data in zip(turns, given, strict=True)]
        whole_row: dict[str, Any] = plain(row) | {
            "messages": plain(list(messages)),
            "ground_truth": plain(ground_truth),
        }
        whole_row["input_metadata"] = {"row_id": str(task)} | as_object(whole_row.get("input_metadata"))
        execution = {"rollout_id": rollout_id} | as_object(whole_row.get("execution_metadata"))
        extra = as_object(execution.get("extra")) | {"assistant_turn_payloads": payloads}
        record = self._converted(whole_row | {"execution_metadata": execution | {"extra": extra}})
        if rollout_index is not None:
            record.rollout_index = rollout_index
        for turn, data in zip(turns, given, strict=True):
            if turn >= len(record.steps):
                self._sink.trouble(f"step data of turn {turn}: the conversation has {len(record.steps)}")
                continue
            _complete(record, turn, data)
        return self._take(record, whole_row)

    @guarded()
    def _row(self, row: Any, attempt: int) -> str | None:
        said = _said(row)
        record = self._converted(said)
        record.attempt = attempt
        return self._take(record, said)

    @guarded()
    def _tried(self, row: Any, error: BaseException | None) -> None:
        """A task is done: its row, or why there is none."""
        said = _said(row)
        name = str(as_object(said.get("execution_metadata")).get("rollout_id"))
        attempt = self._failed.get(name, 0)
        if error is not None:
            self._failed[name] = attempt + 1
            code = _INTERNAL if isinstance(error, Exception) else _CANCELLED
            said |= {"rollout_status": {"code": code, "message": told(error), "details": []}}
        else:
            self._failed.pop(name, None)
            if as_object(said.get("rollout_status")).get("code") == _RUNNING:
                # The tool sets it when the task is done, unless the processor has said how it ended.
                said |= {"rollout_status": _FINISHED}
        self._row(said, attempt)

    def _converted(self, row: dict[str, Any]) -> EpisodeRecord:
        return to_record(row, _Live(Path(), self._recorder.run))

    def _take(self, record: EpisodeRecord, row: dict[str, Any]) -> str | None:
        problem = finished(record, NAME)
        if problem is not None and record.steps:
            raw = msgspec.json.encode(row).decode()
            self._recorder.reject(Reject(position=0, reason="invalid", message=problem, raw=raw, source_format=NAME))
            return None
        self._recorder.record(record)
        return ids.to_text(episode_id(record, record.run_id or self._recorder.run)) if record.steps else None

    async def _watched(self, task: "asyncio.Future[Any]", row: Any) -> Any:
        """What a task gives, recorded before anyone else has it."""
        try:
            result = await task
        except BaseException as error:
            await beside_the_loop(self._tried, row, error)
            raise
        await beside_the_loop(self._tried, result, None)
        return result

    @guarded()
    def _watch(self, tasks: Sequence[Any], rows: Sequence[Any]) -> list[Any]:
        """Tasks that are done when these are, and their rows recorded."""
        if len(tasks) != len(rows):
            raise UsageError(f"a rollout processor gave {len(tasks)} tasks for {len(rows)} rows; valid: one for each")
        watched = [asyncio.ensure_future(self._watched(task, row)) for task, row in zip(tasks, rows, strict=True)]
        for task, inner in zip(watched, tasks, strict=True):
            # One that is cancelled before it has begun never gets to tell the other.
            task.add_done_callback(partial(_cancel_too, inner))
        return watched


class _Live(Input):
    """Rows that come one by one, from wherever: what has no name of its own has a random number."""

    def next_index(self, *key: Any) -> int:
        return secrets.randbits(31)


class _Processor:
    """A rollout processor around another one, which it passes for."""

    def __init__(self, hook: RolloutHook, processor: Any) -> None:
        self.__dict__.update(_hook=hook, _processor=processor)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._processor)

    def __call__(self, rows: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        given = list(rows)
        tasks = self._processor(rows, *args, **kwargs)
        return self._hook._watch(tasks, given) or tasks

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_processor"], name)


def _cancel_too(inner: "asyncio.Future[Any]", done: "asyncio.Future[Any]") -> None:
    if done.cancelled():
        inner.cancel()


def _said(row: Any) -> dict[str, Any]:
    """A row as plain values, as the tool's own log has it."""
    dump = getattr(row, "model_dump", None)
    return as_object(dump(mode="json", exclude_none=True) if callable(dump) else plain(row))


def _turn(data: dict[str, Any], place: int) -> int:
    turn = whole(as_object(data.get("step_info")).get("assistant_turn_index"))
    return place if turn is None else turn


def _payload(data: dict[str, Any]) -> dict[str, Any]:
    """What is said of a turn: its tokens, and what has no column."""
    said = {key: value for key, value in data.items() if key not in _OF_STEPS}
    left = {key: value for key, value in said.items() if value not in (None, {}, []) and value is not False}
    return left | as_object(data.get("policy_logprobs"))


def _complete(record: EpisodeRecord, turn: int, data: dict[str, Any]) -> None:
    """Put what the policy said of a step, and nobody else knows, into its columns."""
    step = record.steps[turn]
    step.value_estimate = finite(data.get("policy_value_estimate"))
    if isinstance(seen := data.get("observation_data"), str):
        step.state = seen
    if data.get("is_done") is True and record.terminated is None:
        record.terminated = True
    if (reward := finite(data.get("base_reward"))) is not None:
        record.scores.append(ScoreRecord(scorer="base_reward", value=reward, step_index=turn))
