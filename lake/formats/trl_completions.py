"""TRL completion logs: `completions/completions_{step}.parquet`, from GRPOTrainer with `log_completions`.

.. code-block:: text

    step                 int, or its digits; the training step           collection round
    prompt, completion   text, or messages (newer versions)              one episode; decisions are the completion's
    <reward function>    float, a column each; null: it did not apply    a score each
    <extra>              fields from `log_extra`                         extra
    advantage            float (newer versions)                          extra, because it is computed
    scores               JSON text in Trajlake's own export              a score each

Episode: a row. Equal prompts of a step are siblings. Step: an assistant message of the completion.
Reward: each reward function gives a score. The total is a weighted sum whose weights are not in the file, so the return
is known only with one reward (or with a column `reward`).

Source: TRL 1.16, trainer/grpo_trainer.py.
"""

from collections.abc import Iterator
from typing import Any

from lake.formats.base.fields import ScoreList, make_prompt_task_id, parse_count, parse_finite, split_group
from lake.formats.base.format import FileHead, Format, Item, find_folder_above
from lake.formats.base.rows import ShapeError, convert_values, omit_fields, read_parquet_rows
from lake.formats.base.source import Input
from lake.formats.chat.data_sets import (
    EPISODE_COLUMNS,
    apply_episode_names,
    get_return,
    has_episode_names,
    list_outcome_columns,
    parse_row_chats,
    pop_scores,
)
from lake.records import EpisodeRecord

NAME = "trl_completions"
_COLUMNS = ("step", "prompt", "completion")
_RETURN = "reward"
_TRUTHS = ("ground_truth", "solution", "golden_answer", "expected_answer", "image", "images")
"""Columns of data sets that tell problems with the same prompt apart."""


def recognise(look: FileHead) -> bool:
    """Return whether a Parquet file has a training step, a prompt and a completion."""
    return look.kind == "parquet" and set(look.names).issuperset(_COLUMNS)


def read(file: Input) -> Iterator[Item]:
    """Yield records and rejects of a file, with indices from 0."""
    rewards = _list_reward_columns(file)
    yield from convert_values(read_parquet_rows(file), NAME, lambda row: [_build_record(row, rewards, file)])


def _build_record(row: dict[str, Any], rewards: list[str], file: Input) -> EpisodeRecord:
    raw_step = row.get("step")
    is_text = isinstance(raw_step, str) and raw_step.isdecimal() and len(raw_step) < 10
    step = parse_count(int(str(raw_step)) if is_text else raw_step)
    if step is None:
        raise ShapeError(f"`step` is {raw_step!r}; valid: a whole number")
    (chat,) = parse_row_chats({key: row.get(key) for key in ("prompt", "completion")}, file).chats
    columns = omit_fields(row, *_COLUMNS, *rewards) or {}
    is_exported = has_episode_names(columns)
    task = make_prompt_task_id(row["prompt"])
    if not is_exported:
        truth = {key: columns[key] for key in _TRUTHS if key in columns}
        task = split_group(file, task, within=step, truth=truth)
    outcome_columns = list_outcome_columns(row) if is_exported else []
    columns = {key: column for key, column in columns.items() if key not in outcome_columns}
    total = _RETURN if is_exported or _RETURN in rewards else rewards[0] if len(rewards) == 1 else ""
    scores = ScoreList()
    for name in rewards:
        # An exported row has the columns of all rows, and its return is not a score.
        if not is_exported or (name not in (_RETURN, *outcome_columns) and row.get(name) is not None):
            scores.add(name, row.get(name))
    pop_scores(columns, scores)
    record = EpisodeRecord(
        task_id=task,
        rollout_index=file.next_index(step, task),
        collection_round=step,
        env_return=parse_finite(get_return(row, total) if is_exported else row.get(total)),
        **chat.fields,
        scores=scores.records,
    )
    if is_exported:
        apply_episode_names(record, columns)
        columns = {key: field for key, field in columns.items() if key not in (*EPISODE_COLUMNS, "advantage")}
    record.extra = columns or None
    return record


def _list_reward_columns(file: Input) -> list[str]:
    """Return the columns of reward functions. Rewards come from tensors, so they are floats."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        schema = pq.read_schema(file.path)
    except (OSError, ValueError):
        return []  # reading the rows reports the fault
    other_columns = (*_COLUMNS, "advantage")
    return [field.name for field in schema if pa.types.is_floating(field.type) and field.name not in other_columns]


FORMAT = Format(NAME, "TRL completion logs (Parquet)", recognise, read, run_folder=find_folder_above("completions"))
