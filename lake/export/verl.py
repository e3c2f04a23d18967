"""The training data and rollout data of verl.

.. code-block:: text

    verl            Parquet, as verl's RLHFDataset loads it: {data_source, prompt: messages, ability, reward_model:
                    {style, ground_truth}, extra_info: {index, split, run_id, task_id, ...}}; one row for all siblings
                    with the same prompt; index: the episode's number, by which verl distinguishes prompts
    verl-rollouts   JSONL, as the trainer writes it: {input, output, gts, score, step, ...}; a row per episode; score:
                    the return; further scores: see `lake.formats.chat.data_sets` says

`lake.formats.verl` has the specification of the rollout data. Episodes that were read from such lines give the same
lines. For other episodes, input and output are the text of the messages before the first decision and of the rest: a
line with the role, then the content.

Source: verl 0.9.1, utils/dataset/rl_dataset.py and trainer/ppo/ray_trainer.py.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from lake import ids
from lake.export.target import (
    Choices,
    Exported,
    Losses,
    Row,
    Target,
    build_conversation,
    build_first_prompt,
    build_name_columns,
    build_return_columns,
    build_score_columns,
    sort_by_rollout,
)
from lake.formats.base.fields import is_score_name
from lake.formats.chat.messages import join_text
from lake.formats.verl import NAME, ROW_KEYS
from lake.write.rows import encode_json
from lake.write.scores import RECORDED


def _build_training_rows(group: Sequence[Exported], _: Choices, losses: Losses) -> Iterator[Row]:
    prompts: set[str] = set()
    for exported in group:
        record = exported.record
        prompt = [
            {"role": message["role"], "content": join_text(message.get("content"), "\n")}
            for message in build_first_prompt(record)
        ]
        truth = record.ground_truth
        key = encode_json(prompt) or ""
        if key in prompts:
            losses.add("siblings with the same prompt")
            continue
        prompts.add(key)
        yield {
            "data_source": record.environment or record.run_id,
            "prompt": prompt,
            "ability": record.environment,
            "reward_model": {
                "style": "rule",
                "ground_truth": truth if truth is None or isinstance(truth, str) else encode_json(truth),
            },
            "extra_info": {
                "index": exported.episode.episode_id,
                "split": record.split,
                "id": ids.to_text(exported.episode.episode_id),
                "run_id": record.run_id,
                "task_id": record.task_id,
                "rollout_index": record.rollout_index,
                "score": exported.score,
                "tools": encode_json(record.tools),
            },
        }


def _build_rollout_rows(group: Sequence[Exported], choices: Choices, losses: Losses) -> Iterator[Row]:
    for exported in sort_by_rollout(group):
        record = exported.record
        is_own = record.source_format == NAME
        prompt = build_first_prompt(record)
        answer = build_conversation(record)[len(prompt) :]
        if not is_own and len(record.steps) > 1:
            losses.add("turns, which are one text", len(record.steps))
        scores = build_score_columns(exported, losses, NAME, _make_name_check(is_from_verl=is_own))
        row = {
            "input": _format_messages(prompt),
            "output": _format_messages(answer),
            "gts": record.ground_truth,
            "score": _find_logged_score(exported) if is_own else exported.score,
            "step": record.collection_round or 0,
        } | ({} if is_own else build_return_columns(record, choices.score))
        further = (record.extra or {} if is_own else build_name_columns(exported)) | scores
        yield row | {key: value for key, value in further.items() if key not in row}


def _make_name_check(*, is_from_verl: bool) -> Callable[[str], bool]:
    """Return which names score columns may have: those that are read as scores. `score` is reserved unless verl's."""
    return lambda name: is_score_name(name) and (is_from_verl or name not in ROW_KEYS)


def _find_logged_score(exported: Exported) -> float | None:
    """Return the score of the original line, which differs from the return for further outputs."""
    scores = (
        score.value for version, score in exported.source_scores if (version, score.scorer) == (RECORDED, "score")
    )
    return next(scores, exported.record.env_return)


def _format_messages(messages: Sequence[Row]) -> str:
    """Return the text of a single message, or of several with their roles."""
    if len(messages) == 1:
        return join_text(messages[0].get("content"), "\n")
    paragraphs = []
    for message in messages:
        calls = message.get("tool_calls")
        text = join_text(message.get("content"), "\n") + (msgspec.json.encode(calls).decode() if calls else "")
        paragraphs.append(f"{message['role']}\n{text}")
    return "\n".join(paragraphs)


def _build_schema() -> Any:
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
    Target(
        "verl",
        "verl's training data: prompts with ground truth (Parquet)",
        "parquet",
        _build_training_rows,
        _build_schema,
    ),
    Target("verl-rollouts", "verl's rollout data: input, output, score (JSONL)", "jsonl", _build_rollout_rows),
)
