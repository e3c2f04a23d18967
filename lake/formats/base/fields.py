"""Fields that formats write in different ways: times, numbers, rollout indices, scores.

These rules hold for all formats, so that a time or a score means the same in each of them.
"""

import math
import re
from datetime import UTC, datetime
from typing import Any

import msgspec

from lake import ids
from lake.formats.base.source import Input, Note
from lake.records import ScoreRecord

_SCORE_WORDS = frozenset(
    (
        *("reward", "rewards", "score", "scores", "acc", "accuracy", "correct", "correctness", "success", "pass"),
        *("passed", "resolved", "solved"),
    )
)
_NO_SCORE_WORDS = frozenset(("max", "maximum", "possible", "threshold", "weight"))
"""Words of names for what a score is compared with."""
_BY_TEXT = Note("rule", "grouped by their prompts' text, because the file names neither groups nor truths", "rollout")
_SPLIT = Note("rule", "in groups apart, because another group, truth or image has their prompt or task", "rollout")
_INT32 = (1 << 31) - 1


def parse_time(field: Any) -> datetime | None:
    """Parse ISO 8601 text or seconds since 1970; None for anything else. A time without a zone is UTC."""
    try:
        if isinstance(field, str):
            time = msgspec.convert(field.strip().replace(" ", "T", 1), datetime)
            return time if time.tzinfo else time.replace(tzinfo=UTC)
        if isinstance(field, int | float) and not isinstance(field, bool):
            return datetime.fromtimestamp(field, UTC)
    except (msgspec.MsgspecError, ValueError, OverflowError, OSError):
        pass
    return None


def parse_number(field: Any) -> float | None:
    """Parse a score: true is 1, false is 0; None for anything but a number."""
    try:
        return float(field) if isinstance(field, bool | int | float) else None
    except OverflowError:
        return None


def parse_finite(field: Any) -> float | None:
    """Parse a score that a column of returns can hold: a finite number, else None."""
    score = parse_number(field)
    return score if score is not None and math.isfinite(score) else None


def is_score_name(name: str) -> bool:
    """Return whether a number under a name is a score, by its words: `reward`, `acc`, `pass@1`, but not `max_score`."""
    words = re.split(r"[^a-z]+", name.lower())
    return not _SCORE_WORDS.isdisjoint(words) and _NO_SCORE_WORDS.isdisjoint(words)


def parse_count(field: Any) -> int | None:
    """Return a count or an index that an int32 column can hold; None for anything else."""
    return field if isinstance(field, int) and not isinstance(field, bool) and 0 <= field <= _INT32 else None


def as_object(field: Any) -> dict[str, Any]:
    """Return an object; an empty one for anything else."""
    return field if isinstance(field, dict) else {}


def as_list(field: Any) -> list[Any]:
    """Return a list; an empty one for anything else."""
    return field if isinstance(field, list) else []


def as_text(field: Any) -> str | None:
    """Return a text that is not blank; None for anything else."""
    return field if isinstance(field, str) and field.strip() else None


def hash_rollout_index(name: str) -> int:
    """Return a rollout index for a rollout that its source only names.

    It depends on the name alone: files that hold one rollout each have nothing to count by.
    """
    return ids.text_hash(name) & _INT32


def choose_rollout_index(file: Input, source_index: Any, *key: Any) -> int:
    """Return a rollout index that no earlier record of the file uses under `key`: the source's, if it is free."""
    numbers = file.memory.setdefault("free_number", {}).setdefault(key, set())
    number = parse_count(source_index)
    if number is None or number in numbers:
        # The counter never decreases, so a file that repeats one number causes no search.
        number = file.next_index("free_number", *key)
        while number in numbers:
            number = file.next_index("free_number", *key)
    numbers.add(number)
    return number


def make_prompt_task_id(prompt: Any) -> str:
    """Return the task of rollouts that only share their prompt: `prompt-` and the hash of its text or JSON.

    It is the same in every file and step, so that queries can follow a prompt over a training run.
    """
    text = prompt if isinstance(prompt, str) else msgspec.json.encode(prompt, order="deterministic").decode()
    return f"prompt-{ids.to_text(ids.text_hash(text))}"


def split_group(file: Input, task: str, *, within: Any = None, key: str | None = None, truth: Any = None) -> str:
    """Return the task of a rollout if several groups of its file may have one name: that of their prompt, say.

    The first group has the name `task`, further ones `task-2`, `task-3`. The report of the ingest says so.

    `within` keeps groups of one task apart in any case: round and run. `key` is a group that the source names. Without
    one, `truth` tells problems apart: the ground truth, images.
    """
    group = key
    if key is None and truth not in (None, {}, []):
        group = msgspec.json.encode(truth, order="deterministic").decode()
    if group is None and (index := file.next_index("by text", task, within)):
        file.notes[_BY_TEXT] += 1 + (index == 1)  # the first one has siblings now
    groups = file.memory.setdefault("prompt_groups", {}).setdefault((task, within), {})
    number = groups.setdefault(group, len(groups)) + 1
    if number == 1:
        return task
    file.notes[_SPLIT] += 1
    return f"{task}-{number}"


class ScoreList:
    """The scores of an episode; each scorer has at most one per step and one for the episode."""

    def __init__(self) -> None:
        self.records: list[ScoreRecord] = []
        self._keys: set[tuple[str, int | None]] = set()

    def add(
        self,
        scorer: str,
        score: Any,
        *,
        step_index: int | None = None,
        reason: Any = None,
        error: Any = None,
        metrics: dict[str, Any] | None = None,
    ) -> None:
        """Add a score under the name that its source uses; a repeated name gets a number: `acc#2`.

        A `score` that is not a finite number is stored under `value` of the metrics, and a `reason` or `error` that is
        not a text under its name.
        """
        name = base = scorer.replace("@", "_").strip() or "score"
        count = 1
        while (name, step_index) in self._keys:
            count += 1
            name = f"{base}#{count}"
        self._keys.add((name, step_index))
        number = parse_number(score)
        stored_metrics = dict(metrics or {})
        if number is None and score is not None:
            stored_metrics["value"] = score
        elif number is not None and not math.isfinite(number):
            stored_metrics["value"], number = str(number), None
        for key, text in (("reason", reason), ("error", error)):
            if text is not None and not isinstance(text, str):
                stored_metrics[key] = text
        self.records.append(
            ScoreRecord(
                scorer=name,
                value=number,
                step_index=step_index,
                reason=reason if isinstance(reason, str) else None,
                error=error if isinstance(error, str) else None,
                metrics=stored_metrics or None,
            )
        )
