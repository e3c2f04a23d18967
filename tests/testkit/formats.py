"""Reading files of any format in tests: what they hold, counted, and the same files damaged.

`counts` is about records. What they are compared with is counted in each format's test by a few lines that know nothing
of the readers.
"""

import json
import random
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

from hypothesis import settings
from msgspec import UNSET

from lake.formats.registry import choose_format
from lake.records import EpisodeRecord, Reject, check, identify, retype


class Counts(NamedTuple):
    """What a file holds."""

    episodes: int
    decisions: int
    tool_calls: int
    rewards: list[float]
    """Returns and episode scores and step rewards that are known, sorted; see `counts`."""
    characters: int
    """Of the agent's text: actions, without reasoning and tool calls."""


def read_file(path: Path, run_id: str | None = None) -> tuple[list[EpisodeRecord], list[Reject]]:
    """Records and rejects of a file, its format recognised; every record can be stored and has its own key."""
    fmt = choose_format(path)
    items = list(fmt.read(path, run_id=run_id))
    records = [item[1] for item in items if isinstance(item, tuple)]
    for record in records:
        assert record.source_format == fmt.name
        assert check(record) is None
        assert retype(record) == record, "a field is of a type that its column does not hold"
    keys = [identify(record, record.run_id or "run").episode_id for record in records]
    for record in records:
        spell_out(record)
    assert len(set(keys)) == len(keys), "two records of one file have the same key"
    return records, [item for item in items if isinstance(item, Reject)]


def spell_out(record: EpisodeRecord) -> None:
    """Write down what records leave out of tokens because it is the default: which step they extend."""
    for index, step in enumerate(record.steps):
        if step.tokens is not None and step.tokens.prefix_step_index is UNSET:
            step.tokens.prefix_step_index = index - 1 if index else None


def counts(records: list[EpisodeRecord]) -> Counts:
    """What records hold; steps that stand for an outcome alone are no decisions."""
    steps = [step for record in records for step in record.steps if step.trainable or step.action or step.tool_calls]
    rewards = [record.env_return for record in records if record.env_return is not None]
    rewards += [score.value for record in records for score in record.scores if score.value is not None]
    rewards += [step.reward for step in steps if step.reward is not None]
    return Counts(
        episodes=len(records),
        decisions=len(steps),
        tool_calls=sum(len(step.tool_calls or ()) for step in steps),
        rewards=sorted(rewards),
        characters=sum(len(step.action) for step in steps),
    )


_OTHERS = (None, True, 7, -1.5, "text", [], [3], {}, {"a": [1]})
_MISSING = object()


def damaged(value: Any) -> list[Any]:
    """Copies of a JSON value, in each of which one place is missing or of another type: a sample of all of them.

    The profile of hypothesis says how many: `HYPOTHESIS_PROFILE=explore` tries some thousand.
    """
    places = list(_places(value))
    ways = [(path, replacement) for path in places for replacement in _OTHERS]
    ways += [(path, _MISSING) for path in places if isinstance(path[-1], str)]
    sample = random.Random(0).sample(ways, min(len(ways), 3 * settings().max_examples))
    return [_changed(value, path, replacement) for path, replacement in sample]


def assert_never_raises(path: Path, value: Any, *, lines: bool = False) -> None:
    """A file of a format with any one place wrong or missing is read, rejected, or told to be of no format."""
    from lake.errors import FormatError

    write: Callable[[Any], str] = (
        (lambda values: "\n".join(json.dumps(item) for item in values) + "\n") if lines else json.dumps
    )
    for variant in damaged(value):
        path.write_text(write(variant), "utf-8")
        try:
            read_file(path)
        except FormatError:
            continue


def _changed(value: Any, path: tuple[Any, ...], replacement: Any) -> Any:
    changed = deepcopy(value)
    if replacement is _MISSING:
        _at(changed, path[:-1]).pop(path[-1])
    else:
        _put(changed, path, replacement)
    return changed


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield (*path, key)
        yield from _places(item, (*path, key))


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def _put(value: Any, path: tuple[Any, ...], replacement: Any) -> None:
    _at(value, path[:-1])[path[-1]] = replacement
