"""TRL's completion logs: a Parquet table as GRPOTrainer writes it with `log_completions`.

.. code-block:: text

    step                    the collection round
    prompt, completion      messages; texts, if all episodes of a file were read as texts
    <reward>                a column for each scorer of a whole episode; `reward` is the score that counts; `scores`:
                            further scores, as `lake.formats.chat.exported_rows` says
    advantage               one number for the completion: that of its decisions, where they do not differ
    <extra>                 what the episode was logged with; of one of another source its id, run_id, task_id and
                            rollout_index

The columns are what the episodes of a file have. An episode that was read from such a table is read as the same one
again: siblings stand in their order, by which they are numbered. `lake.formats.trl_completions` has the spec.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from lake.export.plain import chat, flat, flat_type, named, return_beside, score_columns
from lake.export.target import Choices, Exported, Losses, Row, Target, by_rollout, first_prompt
from lake.formats.base.fields import prompt_task
from lake.formats.trl_completions import NAME
from lake.write.rows import json_text

_COLUMNS = ("step", "prompt", "completion", "advantage")
_ROLES = {"prompt": "user", "completion": "assistant"}
_TYPES = {bool: "bool", int: "int64", float: "double", str: "string"}


def _rows(group: Sequence[Exported], choices: Choices, losses: Losses) -> Iterator[Row]:
    for exported in by_rollout(group):
        record = exported.record
        is_own = record.source_format == NAME
        messages = chat(exported, losses)
        start = len(first_prompt(record))
        texts = [_text(messages[:start]), _text(messages[start:])]
        if is_own and None not in texts and prompt_task(texts[0]) == record.task_id:
            prompt, completion = texts
        else:
            prompt, completion = flat(messages[:start], losses), flat(messages[start:], losses)
        row: Row = {"step": record.collection_round or 0, "prompt": prompt, "completion": completion}
        extra = dict(record.extra or {}) if is_own else named(exported)
        row["advantage"] = _advantage(exported, losses, extra.pop("advantage", None))
        if not is_own:
            row |= {"reward": exported.score} | return_beside(record, choices.score)
        further = extra | score_columns(exported, losses, NAME, _fits(own=is_own))
        yield row | {key: value for key, value in further.items() if key not in row}


def _text(messages: Sequence[Row]) -> Any:
    """What a lone message says, if it says no more than a text."""
    if len(messages) != 1 or not messages[0].keys() <= {"role", "content"}:
        return None
    content = messages[0].get("content")
    return content if isinstance(content, str) else None


def _fits(*, own: bool) -> Callable[[str], bool]:
    """Which names columns of scores may have: `reward` is the return, unless it came with a row of TRL's."""
    taken = _COLUMNS if own else (*_COLUMNS, "reward")
    return lambda name: name not in taken


def _advantage(exported: Exported, losses: Losses, logged: Any) -> float | None:
    """The one advantage of a completion; of an episode that nobody gave credit for, the one it was logged with."""
    if (advantages := exported.advantages()) is None:
        return logged if isinstance(logged, float) else None
    known = {advantage for advantage in advantages if advantage is not None}
    if len(known) > 1:
        losses.add("advantages that differ between decisions", len(known))
    return known.pop() if len(known) == 1 else None


def _schema_of(rows: Iterable[Row]) -> tuple[Any, Callable[[Row], Row]]:
    """The columns of a file, and how a row is made to fit them."""
    import pyarrow as pa

    kinds: dict[str, Counter[type]] = {name: Counter() for name in _COLUMNS}
    for row in rows:
        for name, value in row.items():
            kinds.setdefault(name, Counter())[type(value)] += value is not None
    types: dict[str, Any] = {}
    others = set()
    for name, found in kinds.items():
        known = {kind for kind, number in found.items() if number}
        if name in _ROLES:
            types[name] = pa.string() if known == {str} else flat_type()
        elif known <= {int, float} and known != {int}:
            types[name] = pa.float64()
        elif len(known) == 1 and (kind := _TYPES.get(next(iter(known)))) is not None:
            types[name] = pa.type_for_alias(kind)
        else:
            types[name] = pa.string()
            others.add(name)

    def fit(row: Row) -> Row:
        for name, role in _ROLES.items():
            if isinstance(row[name], str) and types[name] != pa.string():
                row[name] = [{"role": role, "content": row[name]}]
        return row | {name: json_text(row.get(name)) for name in others}

    return pa.schema(types), fit


TARGET = Target(
    "trl-completions",
    "TRL's completion logs (Parquet); its own come out as they went in",
    "parquet",
    _rows,
    schema_of=_schema_of,
    holds=frozenset(("advantages",)),
)
