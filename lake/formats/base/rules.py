"""Rules that hold for the records of every format, whichever reader built them.

**Errors.** A framework gives a rollout that it could not finish a reward too, mostly 0. That is no measurement: the
reward is kept as a score, and the episode has no return, unless the user asks for it (`ingest --errors-count`). A limit
that a rollout ran into is no such error.

**Loss.** A row says that it, or some of its messages, are not trained on, under one of many names. The decision of an
excluded message is `lake.formats.chat.messages.build_decision`'s; here are the names, and the lists and flags of rows.
A name like these whose meaning is unknown is reported, because training may rely on it.

**Padding.** Trainers fill batches with synthetic rows, which are no rollouts.
"""

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from lake.formats.base.source import Input, Note
from lake.records import EpisodeRecord, ScoreRecord

WEIGHTS = (
    *("weight", "loss_weight", "loss_scale", "train", "training", "trainable", "loss"),
    *("loss_mask", "step_loss_mask", "sample_loss_mask"),
)
"""Keys whose 0 or false excludes a message or a row from training; a list has an entry for each message."""
IGNORES = ("ignore", "ignored", "masked", "is_masked")
"""Keys whose 1 or true excludes it."""
EXCLUSIONS = frozenset((*WEIGHTS, *IGNORES))
_LOSS_WORDS = {
    *("loss", "mask", "masks", "masked", "unmasked", "train", "trained", "trainable", "ignore"),
    *("learn", "learned", "skip", "skipped", "exclude", "excluded"),
}
_OTHER_MASKS = frozenset(
    # Of tokens, or written after training; and a setting of engines.
    (
        *("token_loss_mask", "attention_mask", "completion_mask", "prompt_mask", "response_mask", "action_mask"),
        *("pre_seq_error_sample_loss_mask", "skip_special_tokens"),
    )
)
_TAGS = ("metadata", "tags", "tag", "extra_info")
"""Keys of a row for an object with marks of a trainer."""
_LEFT_OUT = Note("rule", "left out, because a trainer made them to fill its batches", "row")
_LOGGED = Note("rule", "trained on, because their `loss` is a decimal number that a trainer logged, no flag", "episode")
_SET_ASIDE = Note("rule", "no returns but scores, because the rollouts failed (--errors-count: returns)", "reward")
_PADDING = re.compile(r"pad[0-9a-f]{32}(_\d+){0,2}")


def apply_rules(record: EpisodeRecord, file: Input) -> bool:
    """Apply the rules to a record of a file; return whether it is a rollout."""
    extra = record.extra or {}
    if is_padding(extra):
        file.notes[_LEFT_OUT] += 1
        return False
    has_failed = record.status == "failed" or (record.error is not None and record.status != "truncated")
    if has_failed and record.env_return is not None and not file.errors_count:
        _set_return_aside(record)
        file.notes[_SET_ASIDE] += 1
    if extra:
        _exclude_steps(record, extra)
    if isinstance(extra.get("loss"), float):
        file.notes[_LOGGED] += 1
    holders = [extra, *[step.extra for step in record.steps if step.extra]]
    for name in {name for fields in holders for name in filter(_is_unknown_mask, fields) if _has_flags(fields[name])}:
        rule = f"trained on, although {name!r} may exclude some: its meaning is unknown"
        file.notes[Note("rule", rule, "episode")] += 1
    return True


def is_padding(row: dict[str, Any]) -> bool:
    """Return whether a trainer made a row to fill a batch: it says so, or its `uid` is verl's for such rows."""
    holders = (row, *(tags for key in _TAGS if isinstance(tags := row.get(key), dict)))
    if any(holder.get("is_padding") is True for holder in holders):
        return True
    return isinstance(uid := row.get("uid"), str) and _PADDING.fullmatch(uid) is not None


def is_excluded(message: dict[str, Any]) -> bool:
    """Return whether a message says that it is not trained on."""
    if EXCLUSIONS.isdisjoint(message):
        return False
    return any(_is_off(message.get(key)) for key in WEIGHTS) or any(message.get(key) == 1 for key in IGNORES)


def _is_off(weight: Any) -> bool:
    """Return whether a weight is 0 or false, or a list of nothing else: of the tokens of a message, say."""
    if isinstance(weight, list):
        return bool(weight) and all(map(_is_off, weight))
    return isinstance(weight, bool | int | float) and weight == 0


def _set_return_aside(record: EpisodeRecord) -> None:
    """Keep the return as a score, and remove it."""
    names = {score.scorer for score in record.scores if score.step_index is None}
    is_score = any(score.value == record.env_return for score in record.scores if score.step_index is None)
    name = next((name for name in ("reward", "env_return") if name not in names), None)
    if name is not None and not is_score:
        score = ScoreRecord(scorer=name, value=record.env_return, reason="the rollout failed before it was measured")
        record.scores = [*record.scores, score]
    record.env_return = None


def _exclude_steps(record: EpisodeRecord, row: dict[str, Any]) -> None:
    """Exclude the decisions that a row excludes: all of them by a flag, single ones by a list."""
    if EXCLUSIONS.isdisjoint(row):
        return
    # The number that a trainer logged as `loss` is no flag.
    flags = {key: flag for key, flag in row.items() if key != "loss" or not isinstance(flag, float)}
    if is_excluded(flags):
        for step in record.steps:
            step.trainable = False
    for key in EXCLUSIONS & flags.keys():
        if isinstance(entries := flags[key], list):
            for step, index in zip(record.steps, _align_weights(record, len(entries)), strict=False):
                step.trainable &= not is_excluded({key: entries[index]})


def _align_weights(record: EpisodeRecord, count: int) -> Iterator[int]:
    """Yield the index in a list of `count` weights for each step; nothing if the list is not of messages."""
    if count == len(record.steps):
        yield from range(count)
        return
    initial = record.initial_messages or []
    contexts = [len(step.context) for step in record.steps]
    total = len(initial) + sum(contexts) + len(record.steps) + len(record.final_observation or ())
    # A system prompt may come from another column.
    surplus = total - count
    if surplus == 0 or (surplus == 1 and initial and initial[0].get("role") == "system"):
        index = len(initial) - surplus - 1
        for context in contexts:
            index += context + 1
            yield index


@lru_cache(4096)
def _is_unknown_mask(name: str) -> bool:
    """Return whether a key sounds like a mask and has no known meaning."""
    is_known = name in EXCLUSIONS or name in _OTHER_MASKS
    return not is_known and not _LOSS_WORDS.isdisjoint(re.split(r"[^a-z]+", name.lower()))


def _has_flags(field: Any) -> bool:
    entries = field if isinstance(field, list) else [field]
    return bool(entries) and all(isinstance(entry, bool | int | float) and entry in (0, 1) for entry in entries[:64])
