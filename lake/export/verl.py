"""verl: its training data, and its rollout data.

.. code-block:: text

    verl            Parquet, as verl's RLHFDataset loads it: {data_source, prompt: messages, ability, reward_model:
                    {style, ground_truth}, extra_info: {index, split, run_id, task_id, ...}}; an episode a row, or where
                    siblings begin alike one for all of them
    verl-rollouts   JSONL, as the trainer writes it: {input, output, gts, score, step, ...}; an episode a row

`lake.formats.verl` has the spec of the rollout data. Episodes that were read from such lines come out as the same
lines. Of others, input and output are the messages before and from the first decision on as text: a line with the role,
then the content.

Source: verl 0.9.1, utils/dataset/rl_dataset.py and trainer/ppo/ray_trainer.py.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from lake import ids
from lake.export.target import Choices, Exported, Losses, Row, Target, by_rollout, conversation, first_prompt
from lake.formats.chat.messages import text_of
from lake.formats.verl import NAME
from lake.write.rows import json_text


def _training(group: Sequence[Exported], choices: Choices, losses: Losses) -> Iterator[Row]:
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
                "index": len(seen) - 1,
                "split": record.split,
                "id": ids.to_text(exported.episode.episode_id),
                "run_id": record.run_id,
                "task_id": record.task_id,
                "rollout_index": record.rollout_index,
                "score": exported.score(choices.score),
                "tools": json_text(record.tools),
            },
        }


def _rollouts(group: Sequence[Exported], _: Choices, losses: Losses) -> Iterator[Row]:
    for exported in by_rollout(group):
        record = exported.record
        prompt = first_prompt(record)
        answer = conversation(record)[len(prompt) :]
        if record.source_format != NAME and len(record.steps) > 1:
            losses.add("turns, which are one text", len(record.steps))
        scores = _scores(exported, losses)
        row = {
            "input": _as_text(prompt),
            "output": _as_text(answer),
            "gts": record.ground_truth,
            "score": scores.pop("score", record.env_return),
            "step": record.collection_round or 0,
        }
        further = (record.extra or {} if record.source_format == NAME else {}) | scores
        yield row | {key: value for key, value in further.items() if key not in row}


def _scores(exported: Exported, losses: Losses) -> Row:
    """Of the episode as a whole: of verl's own lines, those that stood in it."""
    is_own = exported.record.source_format == NAME
    if is_own:
        losses.add("scores of functions", len(exported.computed))
    found = exported.came_with if is_own else exported.episode.scores
    losses.add("step scores", sum(score.step_index is not None for _, score in found))
    return {score.scorer: score.value for _, score in found if score.step_index is None}


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
