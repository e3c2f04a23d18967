"""TRL completion logs: what GRPOTrainer writes with `log_completions`, `completions/completions_{step}.parquet`.

.. code-block:: text

    step                 int, or its digits; the training step           collection round
    prompt, completion   text, or messages (newer versions)              one episode; decisions are the completion's
    <reward function>    float, a column each; null: it did not apply    a score each
    <extra>              what `log_extra` was given                      extra
    advantage            float (newer versions)                          extra: it is computed, no fact
    scores               JSON text, which our own export has             a score each

Equal prompts of a step are siblings: the task is the hash of the prompt, and they are numbered as they stand. The total
reward is a weighted sum whose weights are not in the file, so the return is known only where there is one reward (or a
column `reward`). Source: TRL 1.16, trainer/grpo_trainer.py.
"""

from collections.abc import Iterator
from typing import Any

from lake.formats.base.fields import Scores, finite, prompt_task, whole
from lake.formats.base.format import Format, above
from lake.formats.base.look import Look
from lake.formats.base.rows import Item, ShapeError, items_of, parquet_rows, rest
from lake.formats.base.source import Input
from lake.formats.chat.data_rows import chats_of
from lake.formats.chat.exported_rows import (
    CALLED,
    names_its_episode,
    outcome_columns,
    return_of,
    take_scores,
    tell_its_name,
)
from lake.records import EpisodeRecord

NAME = "trl_completions"
_COLUMNS = ("step", "prompt", "completion")
_RETURN = "reward"


def recognise(look: Look) -> bool:
    """Whether a Parquet file has a training step beside each prompt and completion."""
    return look.kind == "parquet" and set(look.names).issuperset(_COLUMNS)


def read(file: Input) -> Iterator[Item]:
    """Records and rejects of a file, with indices from 0."""
    rewards = _rewards(file)
    for item in parquet_rows(file):
        yield from items_of(item, NAME, lambda row: [to_record(row, rewards, file)])


def to_record(row: dict[str, Any], rewards: list[str], file: Input) -> EpisodeRecord:
    """A row as an episode; `rewards` are the columns of reward functions.

    Raises:
        ShapeError: no step; a prompt or a completion that is neither text nor messages.
    """
    given = row.get("step")
    step = int(given) if isinstance(given, str) and given.isdecimal() and len(given) < 10 else whole(given)
    if step is None:
        raise ShapeError(f"`step` is {given!r}; valid: a whole number")
    (chat,) = chats_of({key: row.get(key) for key in ("prompt", "completion")}).chats
    task = prompt_task(row["prompt"])
    others = rest(row, *_COLUMNS, *rewards) or {}
    is_named = names_its_episode(others)
    ours = outcome_columns(row) if is_named else []
    others = {key: value for key, value in others.items() if key not in ours}
    total = _RETURN if is_named or _RETURN in rewards else rewards[0] if len(rewards) == 1 else ""
    scores = Scores()
    for name in rewards:
        # A row of ours has the columns of all others too, and its return is no score.
        if not is_named or (name not in (_RETURN, *ours) and row.get(name) is not None):
            scores.add(name, row.get(name))
    take_scores(others, scores)
    record = EpisodeRecord(
        task_id=task,
        rollout_index=file.next_index(step, task),
        collection_round=step,
        env_return=finite(return_of(row, total) if is_named else row.get(total)),
        initial_messages=chat.initial_messages,
        final_observation=chat.final_observation,
        steps=chat.steps,
        scores=scores.records,
    )
    if is_named:
        tell_its_name(record, others)
        others = {key: value for key, value in others.items() if key not in (*CALLED, "advantage")}
    record.extra = others or None
    return record


def _rewards(file: Input) -> list[str]:
    """The columns of reward functions: rewards come out of tensors, so they are floats."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        schema = pq.read_schema(file.path)
    except (OSError, ValueError):
        return []  # reading the rows says why
    others = (*_COLUMNS, "advantage")
    return [field.name for field in schema if pa.types.is_floating(field.type) and field.name not in others]


FORMAT = Format(NAME, "TRL completion logs (Parquet)", recognise, read, run_folder=above("completions"))
