"""verl: its training data, and its rollout data.

.. code-block:: text

    verl            Parquet, as verl's RLHFDataset loads it: {data_source, prompt: messages, ability, reward_model:
                    {style, ground_truth}, extra_info: {index, split, run_id, task_id, ...}}; an episode a row, or where
                    siblings begin alike one for all of them; index: the episode's number, for verl tells prompts apart
                    by it
    verl-rollouts   JSONL, as the trainer writes it: {input, output, gts, score, step, ...}; an episode a row; score:
                    the return, and further scores as `lake.formats.chat.exported_rows` says

`lake.formats.verl` has the spec of the rollout data. Episodes that were read from such lines come out as the same
lines. Of others, input and output are the messages before and from the first decision on as text: a line with the role,
then the content.

Source: verl 0.9.1, utils/dataset/rl_dataset.py and trainer/ppo/ray_trainer.py.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from lake import ids
from lake.export.plain import named, return_beside, score_columns
from lake.export.target import Choices, Exported, Losses, Row, Target, by_rollout, conversation, first_prompt
from lake.formats.base.fields import is_score_name
from lake.formats.chat.messages import text_of
from lake.formats.verl import KEYS, NAME
from lake.write.rows import json_text
from lake.write.scores import RECORDED


def _training(group: Sequence[Exported], _: Choices, losses: Losses) -> Iterator[Row]:
    seen: set[str] = set()
    for exported in group:
        record = exported.record
        prompt = [
            {"role": message["role"], "content": text_of(message.get("content"), "\n")}
            for message in first_prompt(record)
        ]
        key = json_text(prompt) or ""
        if key in seen:
            losses.add("siblings with the same prompt")
            continue
        seen.add(key)
        yield {
            "data_source": record.environment or record.run_id,
            "prompt": prompt,
            "ability": record.environment,
            "reward_model": {"style": "rule", "ground_truth": _text(record.ground_truth)},
            "extra_info": {
                "index": exported.episode.episode_id,
                "split": record.split,
                "id": ids.to_text(exported.episode.episode_id),
                "run_id": record.run_id,
                "task_id": record.task_id,
                "rollout_index": record.rollout_index,
                "score": exported.score,
                "tools": json_text(record.tools),
            },
        }


def _rollouts(group: Sequence[Exported], choices: Choices, losses: Losses) -> Iterator[Row]:
    for exported in by_rollout(group):
        record = exported.record
        is_own = record.source_format == NAME
        prompt = first_prompt(record)
        answer = conversation(record)[len(prompt) :]
        if not is_own and len(record.steps) > 1:
            losses.add("turns, which are one text", len(record.steps))
        scores = score_columns(exported, losses, NAME, _fits(own=is_own))
        row = {
            "input": _as_text(prompt),
            "output": _as_text(answer),
            "gts": record.ground_truth,
            "score": _logged_score(exported) if is_own else exported.score,
            "step": record.collection_round or 0,
        } | ({} if is_own else return_beside(record, choices.score))
        further = (record.extra or {} if is_own else named(exported)) | scores
        yield row | {key: value for key, value in further.items() if key not in row}


def _fits(*, own: bool) -> Callable[[str], bool]:
    """Which names columns of scores may have: those that are read as scores. `score` is the return, unless verl's."""
    return lambda name: is_score_name(name) and (own or name not in KEYS)


def _logged_score(exported: Exported) -> float | None:
    """The score that a line of verl's had: of a further output, the return is not its own."""
    scores = (score.value for version, score in exported.came_with if (version, score.scorer) == (RECORDED, "score"))
    return next(scores, exported.record.env_return)


def _as_text(messages: Sequence[Row]) -> str:
    """One message's text, or all of them with their roles."""
    if len(messages) == 1:
        return text_of(messages[0].get("content"), "\n")
    parts = []
    for message in messages:
        calls = message.get("tool_calls")
        said = text_of(message.get("content"), "\n") + (msgspec.json.encode(calls).decode() if calls else "")
        parts.append(f"{message['role']}\n{said}")
    return "\n".join(parts)


def _text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else json_text(value)


def _schema() -> Any:
    import pyarrow as pa

    text = pa.string()
    about = dict.fromkeys(("split", "id", "run_id", "task_id", "tools"), text)
    about |= {"index": pa.int64(), "rollout_index": pa.int32(), "score": pa.float64()}
    return pa.schema(
        {
            "data_source": text,
            "prompt": pa.list_(pa.struct({"role": text, "content": text})),
            "ability": text,
            "reward_model": pa.struct({"style": text, "ground_truth": text}),
            "extra_info": pa.struct(about),
        }
    )


TARGETS = (
    Target("verl", "verl's training data: prompts with ground truth (Parquet)", "parquet", _training, _schema),
    Target("verl-rollouts", "verl's rollout data: input, output, score (JSONL)", "jsonl", _rollouts),
)
