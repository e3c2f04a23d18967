"""NeMo RL logs: `train_data_step{N}.jsonl` and `val_data_step{N}.jsonl`, batches of one sample a line.

.. code-block:: text

    idx                   number of the line; every other value is a list of one      extra
    content               texts of the messages, or messages with roles (validation)  decisions, observations
    rewards, accuracy     the environment's reward; further ones                      return, scores
    token_ids, token_loss_mask, generation_logprobs, input_lengths                    exact tokens of decisions
    step, sample_id, metadata, prompt_ids     newer dumps, which have no content      round; extra; task; extra
    agent_ref             {name}                                                      agent
    advantages, prev_logprobs, sample_loss_mask, ...                                  extra: computed in training

A run of masked tokens is what was sampled by one call. Texts have no roles: they alternate as the mask does, observed
and sampled, and what they are more is prompt. Where there are fewer texts than runs, the sample is one decision without
text, with its tokens; without a mask, texts are sampled by turns from the second on. Observed texts are told as the
user's. Tokens beyond `input_lengths` are padding and cut off.

There are no groups: equal prompts are siblings, and the task is the hash of the prompt. Older files name their training
step only in their file name, from which it is read. Source: NVIDIA-NeMo/RL, algorithms/grpo.py and utils/logger.py
(7ea279abf), utils/train_data_dump.py (55af33fcb).
"""

import re
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import msgspec

from lake.formats.base.fields import Scores, is_score_name, number, prompt_task, whole
from lake.formats.base.format import Format, its_folder
from lake.formats.base.look import Look
from lake.formats.base.rows import Item, ShapeError, items_of, line_values
from lake.formats.base.source import Input, stem
from lake.formats.chat.messages import Conversation, Message, conversation, text_of
from lake.records import EpisodeRecord, Index, StepRecord, TokensRecord

NAME = "nemo_rl"
_NAMED = re.compile(r"(train|val)_data_step(\d{1,9})")
_BATCHED = ("content", "token_ids", "rewards", "input_lengths", "token_loss_mask", "generation_logprobs")
Run = tuple[bool, int, int]
"""Whether tokens were sampled, and the first and the one behind the last of them."""


def recognise(look: Look) -> bool:
    """Whether lines are batches of one: `idx`, and lists of one beside it."""
    return look.kind in ("lines", "object") and any(
        "idx" in value
        and ("content" in value or "token_ids" in value)
        and sum(isinstance(value.get(key), list) and len(value[key]) == 1 for key in _BATCHED) > 1
        for value in look.objects
    )


def read(file: Input) -> Iterator[Item]:
    """Records and rejects of a file, with line numbers from 1."""
    for item in line_values(file):
        yield from items_of(item, NAME, lambda value: [to_record(value, file)])


def to_record(value: Any, file: Input) -> EpisodeRecord:
    """A line as an episode.

    Raises:
        ShapeError, msgspec.ValidationError: a batch of several; tokens, mask and logprobs of different lengths.
    """
    row = {key: _one(key, batch) for key, batch in msgspec.convert(value, dict[str, Any]).items()}
    sequence = _sequence(row)
    chat = _chat(row.get("content"), sequence.runs)
    if chat is None:
        if "content" in row:
            sequence.runs = sequence.joined()
        chat = Conversation(steps=[StepRecord(state=None, action="") for _ in sequence.sampled()])
    else:
        del row["content"]
    if sequence.ids and len(chat.steps) == len(sequence.sampled()):
        row = sequence.tell(chat.steps, row)
    scores = Scores()
    if row.get("rewards") is not None:
        scores.add("reward", row["rewards"])
    env_return = number(row.pop("rewards", None))
    for key in [key for key, score in row.items() if is_score_name(key) and number(score) is not None]:
        scores.add(key, row.pop(key))
    named = _NAMED.fullmatch(stem(file.path))
    asked = [text_of(message.get("content")) for message in chat.initial_messages]
    task = prompt_task(asked or row.get("prompt_ids") or sequence.prompt())
    agent_id = agent.get("name") if isinstance(agent := row.get("agent_ref"), dict) else None
    if isinstance(agent_id, str) and isinstance(agent, dict) and agent.keys() == {"name"}:
        del row["agent_ref"]
    step = whole(row.pop("step", None))
    return EpisodeRecord(
        task_id=task,
        rollout_index=file.next_index(step, task),
        agent_id=agent_id if isinstance(agent_id, str) else None,
        collection_round=int(named[2]) if step is None and named else step,
        split=named[1] if named else None,
        env_return=env_return,
        initial_messages=chat.initial_messages,
        final_observation=chat.final_observation,
        steps=chat.steps,
        scores=scores.records,
        extra={key: item for key, item in row.items() if item is not None} or None,
    )


class _Sequence(msgspec.Struct):
    """The tokens of a sample, without padding."""

    ids: list[Index] = []
    mask: list[bool] = []
    logprobs: list[float] | None = None
    runs: list[Run] = []

    def sampled(self) -> list[Run]:
        """The runs that were sampled."""
        return [run for run in self.runs if run[0]]

    def joined(self) -> list[Run]:
        """All that was sampled, and what was observed between, as one run."""
        sampled = self.sampled()
        return [(True, sampled[0][1], sampled[-1][2])] if sampled else []

    def prompt(self) -> list[Index]:
        """The tokens before the first that was sampled."""
        return self.ids[: next((start for _, start, _ in self.sampled()), None)]

    def tell(self, steps: list[StepRecord], row: dict[str, Any]) -> dict[str, Any]:
        """Tell steps their tokens, and the row what is left of its own."""
        end = 0
        for step, (_, start, behind) in zip(steps, self.sampled(), strict=True):
            mask = self.mask[start:behind]
            step.tokens = TokensRecord(
                context_ids=self.ids[end:start],
                action_ids=self.ids[start:behind],
                action_logprobs=None if self.logprobs is None else self.logprobs[start:behind],
                action_mask=None if all(mask) else mask,
            )
            end = behind
        told = ("token_ids", "token_loss_mask", "generation_logprobs", "input_lengths")
        left = {key: item for key, item in row.items() if key not in told}
        return left | {"final_token_ids": self.ids[end:]} if self.ids[end:] else left


def _sequence(row: dict[str, Any]) -> _Sequence:
    """The tokens of a sample; what is beyond its length is cut from all lists of the row."""
    lists = {key: row[key] for key in ("token_ids", "token_loss_mask", "generation_logprobs") if row.get(key)}
    if len({len(msgspec.convert(item, list[Any])) for item in lists.values()}) > 1:
        lengths = ", ".join(f"`{key}` has {len(item)}" for key, item in lists.items())
        raise ShapeError(f"{lengths} entries; valid: one for each token")
    padded = len(next(iter(lists.values()), ()))
    length = whole(row.get("input_lengths"))
    if length is not None and length < padded:
        for key, item in row.items():
            if isinstance(item, list) and len(item) == padded:
                row[key] = item[:length]
    mask = [weight != 0 for weight in msgspec.convert(row.get("token_loss_mask") or [], list[float])]
    found = _Sequence(mask=mask)
    if mask:
        found.ids = msgspec.convert(row.get("token_ids") or [], list[Index])
        found.logprobs = msgspec.convert(row.get("generation_logprobs") or None, list[float] | None)
    start = 0
    for acts, tokens in groupby(mask):
        behind = start + sum(1 for _ in tokens)
        found.runs.append((acts, start, behind))
        start = behind
    return found


def _chat(content: Any, runs: list[Run]) -> Conversation | None:
    """The decisions of a sample's texts; None if nobody can say which of them were sampled."""
    if not isinstance(content, list) or not content:
        return None
    if not all(isinstance(text, str) for text in content):
        return conversation(content, place="content")
    acts = [run[0] for run in runs] or [bool(place % 2) for place in range(len(content))]
    behind: list[bool] = []
    while len(acts) + len(behind) < len(content) and acts[-1] and content[-1 - len(behind)] == "":
        behind.append(False)  # observations without text have no token
    more = len(content) - len(acts) - len(behind)
    if more < 0 or (more > 0 and acts[0]):
        return None
    messages: list[Message] = [
        {"role": "assistant" if is_sampled else "user", "content": text}
        for is_sampled, text in zip([False] * more + acts + behind, content, strict=True)
    ]
    return conversation(messages)


def _one(key: str, batch: Any) -> Any:
    """The value of a batch of one."""
    if isinstance(batch, list) and len(batch) == 1:
        return batch[0]
    if key in _BATCHED and batch is not None:
        shown = f"a list of {len(batch)}" if isinstance(batch, list) else type(batch).__name__
        raise ShapeError(f"`{key}` is {shown}; valid: a list of one")
    return batch


FORMAT = Format(NAME, "NeMo RL train_data_step and val_data_step logs", recognise, read, run_folder=its_folder)
