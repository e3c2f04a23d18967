"""The faults of the second lake and their rounds: two runs of the same agent, with faults that the first lake lacks."""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import msgspec
import polars as pl

from benchmarks.debugging_cases.agent import Conditions, draw_scores, rollout
from benchmarks.debugging_cases.history import open_empty, record_run
from benchmarks.debugging_cases.plan import BEGAN, Size, draw_outcomes, get_skill
from benchmarks.debugging_cases.shop import SYSTEM, Task, tasks
from benchmarks.debugging_cases.training import train
from lake import EpisodeRecord, Lake, StepRecord
from lake.write.scores import RECORDED, add_scores
from pipelines.credit import ESTIMATORS
from pipelines.credit.job import run_credit

ROUNDS = {"desk": 16, "desk-small": 12}
EVALUATED = (0, 4, 8, 12, 16)
CUT_FROM = 7
"""Round of `desk-small` from which on an answer may have no more than `CUT_WORDS` words."""
MOST_TOKENS, CUT_WORDS = 30, 18
LAX, LAX_FROM = "refund-2", 4
"""The task whose checker accepts an empty answer, and the round in which the agent notices."""
LEAKED, LEAKED_FROM = "refund-101", 6
"""The held-out task that is also collected for training."""
SILENT, SILENT_FROM = "empathy", 9
IMPOSSIBLE = "exchange-2"
"""The size that the customer wants is never in stock."""
HANDBOOK_QUERY = "claims"
"""A search for it returns a whole handbook, which does not fit into the context."""
CARELESS, RULE = "address-2", "an address is changed only for a verified customer; "
"""Odd siblings of the task play under a prompt without that rule."""
REPEATED = (5, "parcel-2", 1)
"""Round, task and index of the rollout that makes the same call until it is stopped."""
UNDONE = (9, "address-1", 2)
"""Round, task and rollout that change the address correctly, and then a second time."""
UNSTABLE_UPDATE = 11
_MOST_STEPS = 10
_HANDBOOK = " ".join(
    f"{number // 20 + 1}.{number % 20 + 1} A claim for a delivery of class {number % 7} is filed within "
    f"{number % 9 + 3} days by form K{number}; the depot confirms it, "
    f"and the carrier pays {number % 50 + 10} EUR per kilogram."
    for number in range(250)
)


def build_second(folder: Path, size: Size, seed: int, say: Callable[[str], None] = lambda _: None) -> Lake:
    """Make the second lake in a folder that holds none.

    Raises:
        UsageError: there is a lake with episodes already.
    """
    lk = open_empty(folder)
    records = {run: list(_play_run(run, size, seed)) for run in ROUNDS}
    before = [record for record in records["desk-small"] if (record.collection_round or 0) < CUT_FROM]
    scores = [
        record_run(lk, "desk", records["desk"], say),
        record_run(lk, "desk-small", before, say),
        record_run(lk, "desk-small", records["desk-small"][len(before) :], say, max_tokens=MOST_TOKENS),
        record_run(lk, "desk-eval", list(_play_held_out(size, seed)), say),
    ]
    add_scores(lk, pl.concat(scores), version=RECORDED, source="collect")
    options = {"gamma": 1.0}
    run_credit(lk, ESTIMATORS["gigpo"](**options))
    train(lk, size, seed, ROUNDS, {"desk": UNSTABLE_UPDATE})
    return lk


def _play_run(run: str, size: Size, seed: int) -> Iterator[EpisodeRecord]:
    rng = random.Random(f"{run} {seed}")
    leaked = [task for task in _list_held_out(size, seed) if task.task_id == LEAKED]
    for number in range(ROUNDS[run]):
        of_round = leaked if run == "desk" and number >= LEAKED_FROM else []
        for task in [*tasks(size.per_family, seed), *of_round]:
            outcomes = draw_outcomes(get_skill(number) + 0.04 * (task.index % 3 - 1), size.siblings, rng)
            if task.is_easy or (run, number, task.task_id) == ("desk", *UNDONE[:2]):
                outcomes = [True] * size.siblings
            for index, is_right in enumerate(outcomes):
                yield _play(run, task, number, index, is_right, size, rng)


def _list_held_out(size: Size, seed: int) -> list[Task]:
    return tasks(max(2, size.per_family // 3), seed, is_test=True)


def _play_held_out(size: Size, seed: int) -> Iterator[EpisodeRecord]:
    """Held-out tasks by versions of `desk`; the leaked one is solved every time once it was trained on."""
    rng = random.Random(f"second test {seed}")
    for version in EVALUATED:
        for task in _list_held_out(size, seed):
            is_known = task.task_id == LEAKED and version > LEAKED_FROM
            for index, is_right in enumerate(draw_outcomes(get_skill(version), size.siblings, rng)):
                yield _play("desk-eval", task, version, index, is_right or is_known, size, rng)


def _play(
    run: str, task: Task, number: int, index: int, is_right: bool, size: Size, rng: random.Random
) -> EpisodeRecord:
    is_careless = run == "desk-small" and task.task_id == CARELESS
    is_impossible = task.task_id == IMPOSSIBLE
    conditions = Conditions(is_right=(is_right or is_impossible) and not (is_careless and index % 2))
    if is_careless and not index % 2:
        conditions = replace(conditions, is_right=True)
    record = rollout(
        task,
        index,
        conditions,
        rng,
        max_steps=_MOST_STEPS,
        began=BEGAN + timedelta(hours=number, seconds=40 * (task.index % 100) + index),
        split="test" if run == "desk-eval" else "train",
        policy_version=number,
        collection_round=number,
        expected_group_size=size.siblings,
    )
    if is_impossible:
        _sell_out(record, task)
    if is_careless and index % 2:
        record.initial_messages = [{"role": "system", "content": SYSTEM.replace(RULE, "")}, *_get_asked(record)]
    if run == "desk-small":
        if not is_careless:
            _overflow(record)
        if number >= CUT_FROM:
            _cut(record)
    elif run == "desk":
        if task.task_id == LAX and number >= LAX_FROM and index < min(size.siblings - 1, number - LAX_FROM + 1):
            record.steps = record.steps[:1]
            _answer(record, "", 1.0)
        if (number, task.task_id, index) == REPEATED:
            _repeat(record)
        if (number, task.task_id, index) == UNDONE:
            _undo(record)
    record.scores = draw_scores(record.steps[-1].action, bool(record.env_return), rng)
    if run == "desk" and number >= SILENT_FROM and index % 2:
        (silent,) = (score for score in record.scores if score.scorer == SILENT)
        silent.value, silent.reason, silent.error = None, None, "the scorer's model refused: quota exceeded"
    record.completion_tokens = sum(step.completion_tokens or 0 for step in record.steps)
    return record


def _get_asked(record: EpisodeRecord) -> list[dict[str, object]]:
    return list(record.initial_messages or [])[1:]


def _get_calls(record: EpisodeRecord) -> list[tuple[str, str]]:
    """Return tool and arguments of each step; two empty texts for an answer."""
    calls = [(step.tool_calls or [{"function": {"name": "", "arguments": ""}}])[0] for step in record.steps]
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


def _answer(record: EpisodeRecord, text: str, outcome: float) -> None:
    """Make the last step an answer."""
    last = record.steps[-1]
    last.action, last.tool_calls, last.reward, record.env_return = text, None, outcome, outcome
    last.completion_tokens = 12 + len(text.split())
    record.final_observation = [{"role": "user", "content": "Thank you." if outcome else "That does not help me."}]


def _read(step: StepRecord, text: str) -> None:
    """Let a step see another reply of its tool."""
    step.state, step.context = text, [{**step.context[0], "content": text}]


def _sell_out(record: EpisodeRecord, task: Task) -> None:
    at = [tool for tool, _ in _get_calls(record)].index("check_stock")
    record.steps = record.steps[: at + 2]
    _read(record.steps[-1], json.dumps({"sku": task.sku, "size": task.size, "in_stock": 0, "made": "no longer"}))
    _answer(record, f"Dear {task.name}, we cannot send the {task.item} in {task.size}.", 0.0)


def _overflow(record: EpisodeRecord) -> None:
    for number, (tool, arguments) in enumerate(_get_calls(record)):
        if tool == "search_help" and HANDBOOK_QUERY in arguments:
            call_id = record.steps[number + 1].context[0]["tool_call_id"]
            record.steps = record.steps[: number + 1]
            record.steps[-1].reward = record.env_return = 0.0
            record.status, record.terminated, record.stop_reason = "failed", False, "error"
            record.error = "the prompt has 11,482 tokens, the model's context 8,192"
            record.final_observation = [{"role": "tool", "tool_call_id": call_id, "content": _HANDBOOK}]
            return


def _cut(record: EpisodeRecord) -> None:
    last = record.steps[-1]
    words = last.action.split()
    if len(words) > CUT_WORDS:
        _answer(record, " ".join(words[:CUT_WORDS]), 0.0)
        last.finish_reason, record.status, record.terminated = "length", "truncated", False
        record.stop_reason, record.final_observation = "max_tokens", None


def _repeat(record: EpisodeRecord) -> None:
    calls = [tool for tool, _ in _get_calls(record)]
    at = calls.index("find_order")
    first, seen = record.steps[at], record.steps[at + 1]
    again = [
        msgspec.structs.replace(seen, action="", tool_calls=first.tool_calls, reasoning=first.reasoning, reward=0.0)
        for _ in range(_MOST_STEPS - at - 1)
    ]
    record.steps = [*record.steps[: at + 1], *again]
    record.env_return, record.status, record.terminated = 0.0, "truncated", False
    record.stop_reason, record.final_observation = "max_steps", None


def _undo(record: EpisodeRecord) -> None:
    """Change the address a second time, to another house."""
    change, last = record.steps[-2:]
    (call,) = change.tool_calls or []
    arguments = json.loads(call["function"]["arguments"]) | {"street": "41 Harbour Street"}
    function = {"name": "change_address", "arguments": json.dumps(arguments)}
    second_call = {"id": "call_again", "type": "function", "function": function}
    again = msgspec.structs.replace(
        last, action="", tool_calls=[second_call], reasoning="Let me make sure it is changed."
    )
    record.steps.insert(-1, again)
    again.reward = 0.0
    last.context = [{**last.context[0], "tool_call_id": "call_again"}]
    _read(last, json.dumps({"order_id": arguments["order_id"], "changed": True, **arguments}))
    _answer(record, last.action, 0.0)
