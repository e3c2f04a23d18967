"""Tasks: seeds, or rows of a file, and the order in which rounds take them.

The order of an epoch is a pure function of (seed, epoch). So three numbers determine a round: epoch, offset, and number
of tasks. A round ends at the end of its epoch, so its last round may be smaller, and no round holds a task twice.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import msgspec

from lake import ids
from lake.errors import FormatError
from lake.formats.base.rows import ShapeError
from lake.formats.chat.messages import check_message
from lake.records import Json, printable
from pipelines.collect.environments import Task
from pipelines.collect.settings import TaskConfig

_KNOWN = frozenset(("name", "prompt", "messages", "ground_truth", "seed"))
"""Columns with a meaning here; others go to `Task.data`."""


@dataclass(frozen=True)
class TaskSet:
    """Tasks in a fixed order."""

    tasks: Sequence[Task]
    fingerprint: int
    """Hash of the tasks: another set has another number."""
    rejected: Sequence[str] = ()
    """Invalid rows of the file, with reasons."""

    @cached_property
    def by_seed(self) -> dict[int, Task]:
        """The tasks by their seeds; a loop reads it in each of its rounds."""
        return {task.seed: task for task in self.tasks}


@lru_cache(maxsize=2)  # A loop checks its tasks, then reads them; a million take seconds.
def list_seed_tasks(first: int, count: int) -> TaskSet:
    """Return tasks for `count` seeds from `first` on; an environment draws its starts from them."""
    return TaskSet(
        [Task(seed=seed) for seed in range(first, first + count)], ids.key_hash("list_seed_tasks", first, count)
    )


def load_tasks(config: TaskConfig, *, are_shown: bool) -> TaskSet:
    """Return the tasks of a setting; `are_shown`: they are prompts for the policy.

    Raises FormatError: the file has no task.
    """
    if config.prompts is None:
        return list_seed_tasks(config.first_seed, config.tasks)
    return read_tasks(config.prompts, are_shown=are_shown)


def read_tasks(path: str | Path, *, are_shown: bool = False) -> TaskSet:
    """Read tasks from a JSONL or Parquet file.

    A row has `prompt` (text) or `messages` (of a chat), or neither if the environment knows the task by `name` or
    `seed`. Optional are `ground_truth` for reward functions, `seed` (default: the row's number), and other columns,
    which the environment reads from `Task.data`.

    Args:
        path: the file.
        are_shown: reject rows without a prompt, because no environment knows them by name or seed.

    Raises:
        FormatError: the file does not exist, has another format, or has no valid row.
    """
    tasks: list[Task] = []
    rejected: list[str] = []
    seeds_of, names_of = dict[int, str](), dict[str, tuple[str, Task]]()
    for number, row in _read_rows(Path(path)):
        location = f"line {number + 1}" if isinstance(row, bytes) else f"row {number}"
        try:
            task = _parse_task(number, row)
            msgspec.json.encode(task)  # detects values that are nested too deep
            _register_task(task, location, seeds_of, names_of, are_shown=are_shown)
        except (ShapeError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            rejected.append(f"{path}: {location}: {printable(str(error))}")
            continue
        tasks.append(task)
    if not tasks:
        why = f": {rejected[0]}" if rejected else ", and has no rows"
        raise FormatError(f'{path} holds no task{why}; a row is {{"prompt": ..., "ground_truth": ...}}')
    return build_task_set(tasks, rejected)


def build_task_set(tasks: Sequence[Task], rejected: Sequence[str] = ()) -> TaskSet:
    """Build a set of tasks that already have distinct seeds."""
    return TaskSet(tasks, ids.bytes_hash(msgspec.json.encode(tasks, order="sorted")), rejected)


def _read_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield rows with their numbers from 0; rows of JSONL as bytes."""
    try:
        if path.suffix == ".parquet":
            import polars as pl

            yield from enumerate(pl.read_parquet(path).iter_rows(named=True))
            return
        with path.open("rb") as lines:
            yield from ((number, line) for number, line in enumerate(lines) if line.strip())
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror or error}; give a file of tasks, JSONL or Parquet") from error
    except Exception as error:
        # Errors of Polars about a damaged file share no base class.
        raise FormatError(f"{path} cannot be read as Parquet: {error}") from error


def _parse_task(number: int, row: Any) -> Task:
    """Parse one row. Raises ShapeError, MsgspecError."""
    fields = msgspec.json.decode(row) if isinstance(row, bytes) else row
    if not isinstance(fields, dict):
        raise ShapeError(f"a task must be an object, not {type(fields).__name__}")
    task_fields: dict[str, Json] = {name: value for name, value in fields.items() if value is not None}
    prompt, messages, seed, name = (task_fields.get(key) for key in ("prompt", "messages", "seed", "name"))
    if prompt is not None and messages is not None:
        raise ShapeError("it has `prompt` and `messages`; give one of them")
    if prompt is not None:
        if not isinstance(prompt, str | list):
            raise ShapeError("`prompt` is not a text")
        if not (prompt.strip() if isinstance(prompt, str) else prompt):
            raise ShapeError("`prompt` is empty")
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if messages is not None and not isinstance(messages, list):
        raise ShapeError("`messages` is not a list; valid: messages of a chat")
    if messages is None and seed is None and name is None:
        raise ShapeError("it has no `prompt`, no `messages`, no `name` and no `seed`; give one of them")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63):
        raise ShapeError(f"`seed` is {seed!r}; valid: a whole number from 0 to 2^63 - 1")
    if name is not None and not (isinstance(name, str | int) and str(name).strip()):
        raise ShapeError(f"`name` is {name!r}; valid: a text that is not blank")
    return Task(
        seed=number if seed is None else seed,
        name=None if name is None else str(name),
        messages=[check_message(message, f"messages[{index}]") for index, message in enumerate(messages or ())],
        ground_truth=task_fields.get("ground_truth"),
        data={key: value for key, value in task_fields.items() if key not in _KNOWN},
    )


def _register_task(
    task: Task, location: str, seeds_of: dict[int, str], names_of: dict[str, tuple[str, Task]], *, are_shown: bool
) -> None:
    """Check a task against earlier ones and register it. Raises ShapeError: no prompt, or a duplicate seed or name."""
    if are_shown and not task.messages:
        raise ShapeError("it has no `prompt` and no `messages`, and without --env the policy gets nothing else")
    if task.seed in seeds_of:
        raise ShapeError(f"`seed` {task.seed} is that of {seeds_of[task.seed]} too; every task has its own")
    if task.name is not None:
        before, same = names_of.setdefault(task.name, (location, task))
        if same.messages != task.messages:
            raise ShapeError(f"`name` {task.name!r} is that of {before} too, whose prompt is another one")
    seeds_of[task.seed] = location


@dataclass(frozen=True, slots=True, order=True)
class Cursor:
    """The position of a run in its tasks."""

    epoch: int = 0
    offset: int = 0
    """Tasks of the epoch that earlier rounds took."""


@lru_cache(maxsize=1)  # A loop draws from the same epoch in each of its rounds.
def draw_order(count: int, seed: int, epoch: int) -> Sequence[int]:
    """Return the order of an epoch: each of 0 to count - 1 once, equal on every machine."""
    import numpy as np

    numbers_N = np.arange(count, dtype=np.uint64) + np.uint64(ids.key_hash("epoch", seed, epoch))
    return tuple(ids.splitmix64(numbers_N).argsort().tolist())


def take_tasks(tasks: TaskSet, seed: int, cursor: Cursor, count: int) -> list[Task]:
    """Return the next 1 to `count` tasks, up to the end of the epoch."""
    indices = draw_order(len(tasks.tasks), seed, cursor.epoch)[cursor.offset : cursor.offset + count]
    return [tasks.tasks[index] for index in indices]


def advance_cursor(tasks: TaskSet, cursor: Cursor, task_count: int) -> Cursor:
    """Return the position after a round of `task_count` tasks."""
    offset = cursor.offset + task_count
    return Cursor(cursor.epoch + 1, 0) if offset >= len(tasks.tasks) else Cursor(cursor.epoch, offset)
