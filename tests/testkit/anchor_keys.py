"""Anchor keys of small frames, and slow obvious versions of every definition."""

import json
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from decimal import Decimal
from difflib import SequenceMatcher
from typing import Any

import polars as pl

from pipelines.credit.anchors import Anchors
from pipelines.credit.steps import Bools, InputNeeds, StepBatch, select_inputs

Row = dict[str, Any]
SCHEMA = {
    "group_id": pl.Int64,
    "episode_id": pl.Int64,
    "step_index": pl.Int32,
    "state": pl.String,
    "state_hash": pl.Int64,
    "state_role": pl.String,
    "state_is_error": pl.Boolean,
    "agent_id": pl.String,
    "context": pl.String,
}


def steps_frame(rows: Sequence[Row]) -> pl.DataFrame:
    """A frame of steps; columns that no row has are left out, keys are filled in (one group, one episode)."""
    named = [{"group_id": 0, "episode_id": 0, "step_index": n} | row for n, row in enumerate(rows)]
    present = {name for row in named for name in row}
    return pl.DataFrame(named, schema={name: dtype for name, dtype in SCHEMA.items() if name in present})


def texts(*states: str | None) -> list[Row]:
    """Rows that have nothing but a state."""
    return [{"state": state} for state in states]


def batch_of(definition: Anchors, frame: pl.DataFrame) -> StepBatch:
    """The batch an estimator would hand to the definition."""
    needs = InputNeeds(anchor_columns=definition.columns(frame.columns))
    batch = StepBatch.of(select_inputs(frame.lazy(), needs).collect(), needs)
    assert batch is not None
    return batch


def keys_of(definition: Anchors, frame: pl.DataFrame, included_N: Bools | None = None) -> list[int | None]:
    """Keys in canonical order, all episodes taking part unless said."""
    batch = batch_of(definition, frame)
    taking_part = pl.repeat(True, batch.frame.height, eager=True).to_numpy()
    keys = definition.keys(batch, taking_part if included_N is None else included_N)
    assert keys.name == "anchor_key"
    assert keys.dtype == pl.Int64
    assert keys.len() == batch.frame.height
    return keys.to_list()


def partition(labels: Sequence[Hashable | None]) -> list[int | None]:
    """Labels numbered in order of first occurrence: equal for equal partitions. None stays None."""
    numbers: dict[Hashable, int] = {}
    return [None if label is None else numbers.setdefault(label, len(numbers)) for label in labels]


def naive_clusters(states: Sequence[str], threshold: float) -> list[str]:
    """The first member of each text's cluster: the definition, without any shortcut."""
    firsts: list[str] = []
    keys = []
    for text in states:
        for first in firsts:
            if SequenceMatcher(None, text, first).ratio() >= threshold:
                keys.append(first)
                break
        else:
            firsts.append(text)
            keys.append(text)
    return keys


def naive_similar(rows: Sequence[Row], threshold: float) -> list[str | None]:
    """Clusters of each group, in (episode, step) order; rows are sorted."""
    by_group: dict[Any, list[str]] = defaultdict(list)
    for row in rows:
        if row["state"] is not None:
            by_group[row["group_id"]].append(row["state"])
    clusters = {group: iter(naive_clusters(states, threshold)) for group, states in by_group.items()}
    return [None if row["state"] is None else next(clusters[row["group_id"]]) for row in rows]


def naive_history(rows: Sequence[Row], labels: Sequence[Hashable | None], k: int, short: str) -> list[Any]:
    """The last k labels of each row's episode; None if one of them is, or if there are fewer and `short` says so."""
    clusters = []
    for at, row in enumerate(rows):
        before = [n for n in range(at + 1) if rows[n]["episode_id"] == row["episode_id"]]
        window = tuple(labels[n] for n in before[-k:])
        clusters.append(None if None in window or (short == "unknown" and len(window) < k) else window)
    return clusters


def naive_json(text: str, drop: Sequence[str] = ()) -> Any:
    """A value that is equal for equal JSON values, numbers by their value; raises ValueError if it is no JSON."""

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    def frozen(value: Any, path: tuple[str, ...]) -> Any:
        if isinstance(value, dict):
            fields = {k: v for k, v in value.items() if not dropped((*path, k), k)}
            return ("object", frozenset((k, frozen(v, (*path, k))) for k, v in fields.items()))
        if isinstance(value, list):
            items = [(str(n), v) for n, v in enumerate(value) if not dropped((*path, str(n)), None)]
            return ("list", tuple(frozen(v, (*path, n)) for n, v in items))
        return (type(value).__name__, value)

    def dropped(path: tuple[str, ...], key: str | None) -> bool:
        paths = [tuple(field[2:].split(".")) for field in drop if field.startswith("$")]
        fits = [len(p) == len(path) and all(a in ("*", b) for a, b in zip(p, path, strict=True)) for p in paths]
        return key in drop or any(fits)

    parsed = json.loads(text, parse_int=Decimal, parse_float=Decimal, parse_constant=refuse)
    return frozen(parsed, ())


def labelled(rows: Sequence[Row], label: Callable[[str], Hashable | None]) -> list[Hashable | None]:
    """A label of each known state."""
    return [None if row["state"] is None else label(row["state"]) for row in rows]
