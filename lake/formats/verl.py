"""verl rollout and validation data: `{step}.jsonl` of `trainer.rollout_data_dir` and `trainer.validation_data_dir`.

.. code-block:: text

    input, output   decoded prompt and response without special tokens     state and action of the one decision
    score           sum of the token-level scores                          return, and the score `score`
    gts             ground truth; absent from older files                  ground truth
    step            training step                                          collection round
    uid             {prompt}_{session}_{output}; newer files               the group, and the session of an output
    <further>       of the reward function: acc, pred, ...; request_id     scores where named like one, else extra
    scores          numbers of scorers, in Trajlake's own export           a score each

Episode: a line, with one step, because a response is one text even if it holds turns of tools. Siblings have the same
input and prompt of the `uid`, without one the same ground truth. The task is the hash of the input; they are numbered
in file order. Rows with the `uid` of the trainer's padding are no rollouts. Further outputs of a session (an
agent loop that rewrote its history) continue the previous one. A score of NaN, which Python writes into JSON, is not a
return. Refused: lines whose fields have wrong types.

Source: verl 0.9.1, trainer/ppo/ray_trainer.py and v1/trainer_base.py.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from lake.formats.base.fields import (
    ScoreList,
    as_text,
    is_score_name,
    make_prompt_task_id,
    parse_finite,
    parse_number,
    split_group,
)
from lake.formats.base.format import FileHead, Format, Item, get_parent_folder
from lake.formats.base.rows import convert_values, make_episode_text_id, omit_fields, read_line_values
from lake.formats.base.source import Input
from lake.formats.chat.data_sets import (
    EPISODE_COLUMNS,
    apply_episode_names,
    get_return,
    has_episode_names,
    list_outcome_columns,
    pop_scores,
)
from lake.formats.chat.messages import parse_chat
from lake.records import EpisodeRecord, Index

NAME = "verl"
ROW_KEYS = ("input", "output", "score", "step", "gts")


class _VerlRow(msgspec.Struct):
    input: str
    output: str
    score: float | None
    step: Index
    gts: Any = None


def recognise(look: FileHead) -> bool:
    """Return whether lines have an input, an output and a score of a step, and both are texts."""
    return look.kind in ("lines", "object") and any(
        value.keys() >= {"input", "output", "score", "step"}
        and isinstance(value["input"], str)
        and isinstance(value["output"], str)
        for value in look.objects
    )


def read(file: Input) -> Iterator[Item]:
    """Yield records and rejects of a file, with line numbers from 1."""
    return convert_values(read_line_values(file, constants=True), NAME, lambda value: [build_record(value, file)])


def build_record(value: Any, file: Input) -> EpisodeRecord:
    """Return a line as an episode. Raises msgspec.ValidationError: wrong keys or types."""
    row = msgspec.convert(value, _VerlRow)
    messages = [{"role": "user", "content": row.input}, {"role": "assistant", "content": row.output}]
    chat = parse_chat(messages)
    scores = ScoreList()
    extra_fields = omit_fields(value, *ROW_KEYS) or {}
    if not (is_exported := has_episode_names(extra_fields)):
        scores.add("score", row.score)
    pop_scores(extra_fields, scores)
    raw_return = get_return(value, "score") if is_exported else row.score
    for key in list_outcome_columns(value) if is_exported else ():
        extra_fields.pop(key, None)
    score_keys = [key for key, score in extra_fields.items() if is_score_name(key) and parse_number(score) is not None]
    for key in score_keys:
        scores.add(key, extra_fields.pop(key))
    session, output = _parse_uid(value.get("uid"))
    group = session.rpartition("_")[0] or as_text(value.get("uid"))
    task = make_prompt_task_id(row.input)
    if not is_exported:
        task = split_group(file, task, within=row.step, key=group, truth=row.gts)
    extra = {key: field for key, field in extra_fields.items() if not is_exported or key not in EPISODE_COLUMNS}
    record = EpisodeRecord(
        task_id=task,
        collection_round=row.step,
        env_return=parse_finite(raw_return),
        ground_truth=row.gts,
        initial_messages=chat.initial_messages,
        steps=chat.steps,
        scores=scores.records,
        extra=extra or None,
    )
    if is_exported:
        apply_episode_names(record, extra_fields)
        return record
    first, last, last_session = file.memory.get("session", (None, None, None))
    if output > 0 and last_session == (row.step, session):
        record.task_id, record.rollout_index = first.task_id, first.rollout_index
        record.agent_id = f"output {file.next_index('output', row.step, first.task_id, first.rollout_index) + 1}"
        record.env_return = None  # the return is the session's, and its first output has it
        record.relation, record.parent_step_index = "continuation", 0
        record.root_episode_id, record.parent_episode_id = (make_episode_text_id(r, file) for r in (first, last))
    else:
        record.rollout_index = file.next_index(row.step, task)
        first = record
    if session:
        file.memory["session"] = (first, record, (row.step, session))
    return record


def _parse_uid(uid: Any) -> tuple[str, int]:
    """Return the session of an output and its number there; an empty session if its name has none."""
    prompt, *numbers = uid.rsplit("_", 2) if isinstance(uid, str) else [""]
    if len(numbers) == 2 and all(number.isdecimal() and len(number) < 10 for number in numbers):
        return f"{prompt}_{numbers[0]}", int(numbers[1])
    return "", 0


FORMAT = Format(NAME, "verl rollout data ({step}.jsonl)", recognise, read, by_line=True, run_folder=get_parent_folder)
