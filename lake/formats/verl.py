"""verl rollout and validation data: `{step}.jsonl` of `trainer.rollout_data_dir` and `trainer.validation_data_dir`.

.. code-block:: text

    input, output   decoded prompt and response, special tokens left out   state and action of the one decision
    score           sum of the token-level scores                          return, and the score `score`
    gts             ground truth; absent from older files                  ground truth
    step            training step                                          collection round
    uid             {prompt}_{session}_{output}; newer files               which outputs are of one session
    <further>       of the reward function: acc, pred, ...; request_id     scores where named like one, else extra
    scores          numbers of scorers, which our own export has           a score each

A response is one text even if it holds turns of tools: it cannot be taken apart. Equal inputs of a step are siblings;
the task is the hash of the input, and they are numbered as they stand. Further outputs of a session (an agent loop that
rewrote its history) continue the one before. A score of NaN, which Python writes into JSON, is no return. Source: verl
0.9.1, trainer/ppo/ray_trainer.py and v1/trainer_base.py.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from lake.formats.base.fields import Scores, finite, is_score_name, number, prompt_task
from lake.formats.base.format import Format, its_folder
from lake.formats.base.look import Look
from lake.formats.base.rows import Item, episode_text_id, items_of, line_values, rest
from lake.formats.base.source import Input
from lake.formats.chat.exported_rows import (
    CALLED,
    names_its_episode,
    outcome_columns,
    return_of,
    take_scores,
    tell_its_name,
)
from lake.formats.chat.messages import conversation
from lake.records import EpisodeRecord, Index

NAME = "verl"
KEYS = ("input", "output", "score", "step", "gts")


class _Row(msgspec.Struct):
    input: str
    output: str
    score: float | None
    step: Index
    gts: Any = None


def recognise(look: Look) -> bool:
    """Whether lines have an input, an output and a score of a step, and both are texts."""
    return look.kind in ("lines", "object") and any(
        value.keys() >= {"input", "output", "score", "step"}
        and isinstance(value["input"], str)
        and isinstance(value["output"], str)
        for value in look.objects
    )


def read(file: Input) -> Iterator[Item]:
    """Records and rejects of a file, with line numbers from 1."""
    for item in line_values(file, constants=True):
        yield from items_of(item, NAME, lambda value: [to_record(value, file)])


def to_record(value: Any, file: Input) -> EpisodeRecord:
    """A line as an episode. Raises msgspec.ValidationError: wrong keys or types."""
    row = msgspec.convert(value, _Row)
    messages = [{"role": "user", "content": row.input}, {"role": "assistant", "content": row.output}]
    chat = conversation(messages)
    scores = Scores()
    others = rest(value, *KEYS) or {}
    if not (is_named := names_its_episode(others)):
        scores.add("score", row.score)
    take_scores(others, scores)
    given = return_of(value, "score") if is_named else row.score
    for key in outcome_columns(value) if is_named else ():
        others.pop(key, None)
    named = [key for key, score in others.items() if is_score_name(key) and number(score) is not None]
    for key in named:
        scores.add(key, others.pop(key))
    task = prompt_task(row.input)
    extra = {key: item for key, item in others.items() if not is_named or key not in CALLED}
    record = EpisodeRecord(
        task_id=task,
        collection_round=row.step,
        env_return=finite(given),
        ground_truth=row.gts,
        initial_messages=chat.initial_messages,
        steps=chat.steps,
        scores=scores.records,
        extra=extra or None,
    )
    if is_named:
        tell_its_name(record, others)
        return record
    session, output = _session(value.get("uid"))
    first, last, known = file.memory.get("session", (None, None, None))
    if output > 0 and known == (row.step, session):
        record.task_id, record.rollout_index = first.task_id, first.rollout_index
        record.agent_id = f"output {file.next_index('output', row.step, first.task_id, first.rollout_index) + 1}"
        record.env_return = None  # of the session, which its first output tells
        record.relation, record.parent_step_index = "continuation", 0
        record.root_episode_id, record.parent_episode_id = (episode_text_id(one, file) for one in (first, last))
    else:
        record.rollout_index = file.next_index(row.step, task)
        first = record
    if session:
        file.memory["session"] = (first, record, (row.step, session))
    return record


def _session(uid: Any) -> tuple[str, int]:
    """The session of an output and its number there; no session if its name does not say."""
    parts = uid.rsplit("_", 2) if isinstance(uid, str) else []
    if len(parts) == 3 and all(part.isdecimal() and len(part) < 10 for part in parts[1:]):
        return f"{parts[0]}_{parts[1]}", int(parts[2])
    return "", 0


FORMAT = Format(NAME, "verl rollout data ({step}.jsonl)", recognise, read, by_line=True, run_folder=its_folder)
