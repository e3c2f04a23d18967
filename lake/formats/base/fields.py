"""Values that formats spell in their own ways: times, numbers of siblings, scores.

What is said here holds for all of them, so that a time or a score of one format means what it means in the next.
"""

import math
import re
from datetime import UTC, datetime
from typing import Any

import msgspec

from lake import ids
from lake.formats.base.source import Input
from lake.records import ScoreRecord

_SCORE_WORDS = frozenset(
    ("reward", "rewards", "score", "scores", "acc", "accuracy", "correct", "correctness", "success", "pass", "passed")
)
_INT32 = (1 << 31) - 1


def moment(value: Any) -> datetime | None:
    """A time: ISO 8601 text, or seconds since 1970. What names no zone is UTC, as everywhere in a lake; else None."""
    try:
        if isinstance(value, str):
            time = msgspec.convert(value.strip().replace(" ", "T", 1), datetime)
            return time if time.tzinfo else time.replace(tzinfo=UTC)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return datetime.fromtimestamp(value, UTC)
    except (msgspec.MsgspecError, ValueError, OverflowError, OSError):
        pass
    return None


def number(value: Any) -> float | None:
    """A score as a number: true is 1, false is 0; what is no number has none."""
    if isinstance(value, bool | int | float):
        try:
            return float(value)
        except OverflowError:
            return None
    return None


def finite(value: Any) -> float | None:
    """A score as a number, if it is finite: what a column of returns can hold."""
    found = number(value)
    return found if found is not None and math.isfinite(found) else None


def is_score_name(name: str) -> bool:
    """Whether a number under a name is a score, by a word of the name: `reward`, `acc`, `pass@1`, `format_reward`."""
    return not _SCORE_WORDS.isdisjoint(re.split(r"[^a-z]+", name.lower()))


def whole(value: Any) -> int | None:
    """A count or an index that a column can hold; None for anything else."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _INT32:
        return value
    return None


def as_object(value: Any) -> dict[str, Any]:
    """An object; an empty one for anything else."""
    return value if isinstance(value, dict) else {}


def as_text(value: Any) -> str | None:
    """A text that is not blank; None for anything else."""
    return value if isinstance(value, str) and value.strip() else None


def sibling_number(name: str) -> int:
    """A number among the siblings for a rollout that its source calls by a name of its own.

    It is the same wherever and whenever the rollout is read, beside whichever others: files that hold one rollout each
    have nothing to count by.
    """
    return ids.text_hash(name) & _INT32


def free_number(file: Input, given: Any, *key: Any) -> int:
    """A number among the siblings of a key that no earlier record of the file has: the source's own, if it is free."""
    taken: dict[Any, set[int]] = file.memory.setdefault("free_number", {})
    numbers = taken.setdefault(key, set())
    number = whole(given)
    if number is None or number in numbers:
        # The counter never goes back, so a file that repeats one number costs no search.
        number = file.next_index("free_number", *key)
        while number in numbers:
            number = file.next_index("free_number", *key)
    numbers.add(number)
    return number


def prompt_task(prompt: Any) -> str:
    """The task of rollouts that have nothing in common but their prompt: `prompt-` and the hash of its text or JSON.

    It is the same in every file and step, so that what became of a prompt over a training run can be asked for.
    """
    text = prompt if isinstance(prompt, str) else msgspec.json.encode(prompt, order="deterministic").decode()
    return f"prompt-{ids.to_text(ids.text_hash(text))}"


class Scores:
    """The scores of an episode, each scorer once per step and once for the whole."""

    def __init__(self) -> None:
        self.records: list[ScoreRecord] = []
        self._seen: set[tuple[str, int | None]] = set()

    def add(
        self,
        scorer: str,
        value: Any,
        *,
        step_index: int | None = None,
        reason: Any = None,
        error: Any = None,
        metrics: dict[str, Any] | None = None,
    ) -> None:
        """Add a score under the name that its source gives it; a second one of a name gets a number behind it.

        What is no number scores nothing: it is kept under `value` of the metrics. So is a reason that is no text.
        """
        name = base = scorer.replace("@", "_").strip() or "score"
        count = 1
        while (name, step_index) in self._seen:
            count += 1
            name = f"{base}#{count}"
        self._seen.add((name, step_index))
        score = number(value)
        kept = dict(metrics or {})
        if score is None and value is not None:
            kept["value"] = value
        elif score is not None and not math.isfinite(score):
            kept["value"], score = str(score), None
        for key, text in (("reason", reason), ("error", error)):
            if text is not None and not isinstance(text, str):
                kept[key] = text
        self.records.append(
            ScoreRecord(
                scorer=name,
                value=score,
                step_index=step_index,
                reason=reason if isinstance(reason, str) else None,
                error=error if isinstance(error, str) else None,
                metrics=kept or None,
            )
        )
