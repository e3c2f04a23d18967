"""prime-rl token exports, `token_exports/step_N/rank_R.jsonl`: the sequences that a trainer trained on, token by token.

.. code-block:: text

    schema_version                   1
    step, export_step                trainer step; of several runs in one trainer, the run's own (export_step)
    rank, micro_step, micro_sequence_idx, export_sequence_idx, run_id, env_name, training_mode
    token_ids, position_ids, loss_mask, advantages, losses, rewards, inference_logprobs, trainer_logprobs, entropy, ...
                                     a value for each token; null where it is not known
    tokens [{id, position, loss_mask, advantage, reward, inference_logprob, ...}]
                                     instead of those lists, in the first version

Episode: a row, the sequence of a branch of a rollout. It names neither task nor rollout nor text. So each is a separate
task, named by its environment, rank and number; the traces (`verifiers_traces`) have the texts.
Step: a run of trained tokens (`loss_mask`; with losses of several kinds, those of `rl`). Its text is unknown and
empty. Its ids and the log-probabilities of the engine (`inference_logprobs`) are exact.
Reward: `env_return`, which the trainer repeats at every token. Numbers of the trainer are in `extra`, as long as the
sequence.

Source: prime-rl (Prime Intellect, Apache-2.0), src/prime_rl/trainer/rl/token_export.py, May to October 2026.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from lake.formats.base.fields import parse_count
from lake.formats.base.format import FileHead, Format, Item, find_folder_above
from lake.formats.base.rows import ShapeError, UnsupportedError, convert_values, omit_fields, read_values
from lake.formats.base.source import Input
from lake.records import EpisodeRecord, Index, StepRecord, TokensRecord

NAME = "prime_rl_tokens"
_NEWEST = 1
_LOGPROBS = "inference_logprobs"
_MAPPED_KEYS = ("schema_version", "env_name", "run_id", "token_ids", "tokens", "loss_mask", "rewards", _LOGPROBS)
_COLUMNS = {"id": "token_ids", "position": "position_ids", "advantage": "advantages", "reward": "rewards"} | {
    f"{source}_logprob": f"{source}_logprobs" for source in ("inference", "trainer")
}
"""Names of the lists of newer versions, by the field of a token in the first version."""


class _TokenRow(msgspec.Struct):
    token_ids: list[Index]
    loss_mask: list[bool]
    schema_version: int = 1
    step: int | None = None
    export_step: int | None = None
    run_id: str | None = None
    env_name: str | None = None
    rewards: list[float | None] | None = None
    inference_logprobs: list[float | None] | None = None
    losses: list[dict[str, Any]] | None = None


def recognise(look: FileHead) -> bool:
    """Return whether rows are sequences of a trainer's micro batches."""
    return look.has("schema_version", "micro_step", "micro_sequence_idx")


def read(file: Input) -> Iterator[Item]:
    """Yield records and rejects of a file, with line numbers from 1."""
    return convert_values(read_values(file, by_line=True), NAME, lambda value: [_build_record(value, file)])


def _build_record(value: Any, file: Input) -> EpisodeRecord:
    if isinstance(value, dict) and isinstance(value.get("tokens"), list):
        tokens = value["tokens"]
        fields = dict.fromkeys(name for token in tokens for name in token if name != "index")
        lists = {_COLUMNS.get(name, name): [token.get(name) for token in tokens] for name in fields}
        value = {**value, **lists, "tokens": None}
    row = msgspec.convert(value, _TokenRow)
    if not 1 <= row.schema_version <= _NEWEST:
        raise UnsupportedError(f"`schema_version` is {row.schema_version}; known: {_NEWEST}. Use a newer trajlake")
    length = len(row.token_ids)
    for name in ("loss_mask", "rewards", _LOGPROBS, "losses"):
        if (items := getattr(row, name)) is not None and len(items) != length:
            raise ShapeError(f"`{name}` has {len(items)} entries for {length} token ids")
    rewards = {reward for reward in row.rewards or () if reward is not None}
    training_round = parse_count(row.step if row.export_step is None else row.export_step)
    names = (row.env_name or "sequence", value.get("rank"), value.get("export_sequence_idx"))
    task = "/".join("-" if name is None else str(name) for name in names)
    is_counted = value.get("position_ids") == list(range(length))
    extra = omit_fields(value, *_MAPPED_KEYS, *(("position_ids",) if is_counted else ())) or {}
    if len(rewards) > 1:
        extra["rewards"] = row.rewards
    return EpisodeRecord(
        task_id=task,
        run_id=row.run_id or None,
        collection_round=training_round,
        rollout_index=file.next_index(NAME, row.run_id, training_round, task),
        environment=row.env_name or None,
        env_return=next(iter(rewards)) if len(rewards) == 1 else None,
        source_version=str(row.schema_version),
        steps=_build_steps(row),
        extra=extra or None,
    )


def _build_steps(row: _TokenRow) -> list[StepRecord]:
    """Return the runs of trained tokens; tokens after the last run belong to no step."""
    mask, logprobs = row.loss_mask, row.inference_logprobs or []
    if row.losses is not None and any("rl" in losses for losses in row.losses):
        mask = [isinstance(loss := losses.get("rl"), dict) and loss.get("mask") is True for losses in row.losses]
    steps: list[StepRecord] = []
    end = at = 0
    while True in mask[at:]:
        start = mask.index(True, at)
        at = mask.index(False, start) if False in mask[start:] else len(mask)
        numbers = [logprob for logprob in logprobs[start:at] if logprob is not None]
        tokens = TokensRecord(
            context_ids=row.token_ids[end:start],
            action_ids=row.token_ids[start:at],
            action_logprobs=numbers if len(numbers) == at - start else None,
            prefix_step_index=len(steps) - 1 if steps else None,
        )
        steps.append(StepRecord(state=None, action="", tokens=tokens))
        end = at
    return steps


_FOLDER = find_folder_above(r"step_\d+")
FORMAT = Format(NAME, "prime-rl token exports (step_N/rank_R.jsonl)", recognise, read, by_line=True, run_folder=_FOLDER)
