"""Where rollouts begin: seeds, or the rows of a file, and the order in which rounds take them.

The order of an epoch is a pure function of (seed, epoch), so what a round plays follows from three numbers: epoch,
offset, and how many tasks a round takes. A round does not reach beyond its epoch (its last one may be smaller), so that
no round holds a task twice.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from lake import ids
from lake.errors import FormatError
from lake.formats.base.rows import ShapeError
from lake.formats.chat.messages import checked
from lake.records import Json, printable
from pipelines.collect.environments import Task

_KNOWN = frozenset(("name", "prompt", "messages", "ground_truth", "seed"))
"""Columns of a file of tasks that mean something here; all others go to `Task.data`."""


@dataclass(frozen=True, slots=True)
class TaskSet:
    """Tasks in a fixed order."""

    tasks: Sequence[Task]
    fingerprint: int
    """Of what they are: another set gives another number."""
    rejected: Sequence[str] = ()
    """Rows of the file that are no tasks, and why."""


def seeds(first: int, count: int) -> TaskSet:
    """The tasks of `count` seeds from `first` on; an environment draws its starts from them."""
    return TaskSet([Task(seed=seed) for seed in range(first, first + count)], ids.key_hash("seeds", first, count))


def read_tasks(path: str | Path, *, are_shown: bool = False) -> TaskSet:
    """The rows of a file of prompts: JSONL, or Parquet.

    Args:
        path: the file.
        are_shown: a row without a prompt is no task, as there is no environment that knows it by its name or seed.

    A row has `prompt` (text) or `messages` (of a chat), or neither where the environment knows by `name` or `seed`;
    `ground_truth` for reward functions; `seed`, else the row's number; and whatever else the environment reads from
    `Task.data`.

    Raises:
        FormatError: no such file, none of these formats, or no row of it is a task.
    """
    tasks: list[Task] = []
    rejected: list[str] = []
    seeds_of, names_of = dict[int, str](), dict[str, tuple[str, Task]]()
    for number, row in _rows(Path(path)):
        place = f"line {number + 1}" if isinstance(row, bytes) else f"row {number}"
        try:
            task = _task(number, row)
            msgspec.json.encode(task)  # what is nested too deep is found here
            _compare(task, place, seeds_of, names_of, are_shown=are_shown)
        except (ShapeError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            rejected.append(f"{path}: {place}: {printable(str(error))}")
            continue
        tasks.append(task)
    if not tasks:
        why = f": {rejected[0]}" if rejected else ", and has no rows"
        raise FormatError(f'{path} holds no task{why}; a row is {{"prompt": ..., "ground_truth": ...}}')
    return listed(tasks, rejected)


def listed(tasks: Sequence[Task], rejected: Sequence[str] = ()) -> TaskSet:
    """Tasks that somebody made, each with a seed of its own."""
    return TaskSet(tasks, ids.bytes_hash(msgspec.json.encode(tasks, order="sorted")), rejected)


def _rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Rows with their numbers from 0; of what is no JSON, the bytes."""
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
        # Polars' own errors of a damaged file have no base class of ours.
        raise FormatError(f"{path} cannot be read as Parquet: {error}") from error


def _task(number: int, row: Any) -> Task:
    """One row. Raises ShapeError, MsgspecError."""
    given = msgspec.json.decode(row) if isinstance(row, bytes) else row
    if not isinstance(given, dict):
        raise ShapeError(f"a task is an object, and this is {type(given).__name__}")
    found: dict[str, Json] = {name: value for name, value in given.items() if value is not None}
    prompt, messages, seed, name = (found.get(key) for key in ("prompt", "messages", "seed", "name"))
    if prompt is not None and messages is not None:
        raise ShapeError("it has `prompt` and `messages`; give one of them")
    if prompt is not None:
        if not isinstance(prompt, str | list):
            raise ShapeError("`prompt` is no text")
        if not (prompt.strip() if isinstance(prompt, str) else prompt):
            raise ShapeError("`prompt` is empty")
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if messages is not None and not isinstance(messages, list):
        raise ShapeError("`messages` is no list; valid: messages of a chat")
    if messages is None and seed is None and name is None:
        raise ShapeError("it has no `prompt`, no `messages`, no `name` and no `seed`; give one of them")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63):
        raise ShapeError(f"`seed` is {seed!r}; valid: a whole number from 0 to 2^63 - 1")
    if name is not None and not (isinstance(name, str | int) and str(name).strip()):
        raise ShapeError(f"`name` is {name!r}; valid: a text that is not blank")
    return Task(
        seed=number if seed is None else seed,
        name=None if name is None else str(name),
        messages=[checked(message, f"messages[{index}]") for index, message in enumerate(messages or ())],
        ground_truth=found.get("ground_truth"),
        data={key: value for key, value in found.items() if key not in _KNOWN},
    )


def _compare(
    task: Task, place: str, seeds_of: dict[int, str], names_of: dict[str, tuple[str, Task]], *, are_shown: bool
) -> None:
    """Take a task in beside those before it. Raises ShapeError: it shows nothing, or its seed or name is taken."""
    if are_shown and not task.messages:
        raise ShapeError("it has no `prompt` and no `messages`, and without --env nothing else is shown")
    if task.seed in seeds_of:
        raise ShapeError(f"`seed` {task.seed} is that of {seeds_of[task.seed]} too; every task has its own")
    if task.name is not None:
        before, same = names_of.setdefault(task.name, (place, task))
        if same.messages != task.messages:
            raise ShapeError(f"`name` {task.name!r} is that of {before} too, whose prompt is another one")
    seeds_of[task.seed] = place


@dataclass(frozen=True, slots=True, order=True)
class Cursor:
    """Where in its tasks a run stands."""

    epoch: int = 0
    offset: int = 0
    """Tasks of the epoch that earlier rounds took."""


def order(count: int, seed: int, epoch: int) -> list[int]:
    """The order of an epoch: each of 0 to count - 1 once, the same on every machine."""
    import numpy as np

    numbers_N = np.arange(count, dtype=np.uint64) + np.uint64(ids.key_hash("epoch", seed, epoch))
    found: list[int] = ids.splitmix64(numbers_N).argsort().tolist()
    return found


def take(tasks: TaskSet, seed: int, cursor: Cursor, count: int) -> list[Task]:
    """The next tasks, `count` at most and at least one: none beyond the end of the epoch."""
    chosen = order(len(tasks.tasks), seed, cursor.epoch)[cursor.offset : cursor.offset + count]
    return [tasks.tasks[place] for place in chosen]


def after(tasks: TaskSet, cursor: Cursor, taken: int) -> Cursor:
    """Where a run stands after a round that took so many."""
    offset = cursor.offset + taken
    return Cursor(cursor.epoch + 1, 0) if offset >= len(tasks.tasks) else Cursor(cursor.epoch, offset)
