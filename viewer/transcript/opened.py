"""What opened steps show: texts, the ledger of their credit, facts, scores, branches; whole texts, and tokens."""

from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from lake.read.text_table import counted
from viewer import plain
from viewer.queries import Row, anchors, only_row, transcripts, updates
from viewer.queries.episodes import TEXT
from viewer.transcript import blocks, ledger, outline
from viewer.transcript import tokens as strip
from viewer.transcript.blocks import Block
from viewer.transcript.told import Told

ALL = 500_000
"""Characters that `show all` shows at most."""
BEFORE = -1
"""What stands for the messages before the first step; the number of steps, for those after the last."""


def steps(told: Told, indices: Sequence[int]) -> list[dict[str, Any]]:
    """What opened steps show, in the order of their indices."""
    if not indices:
        return []
    rows = {row["step_index"]: row for row in _read(told, indices).iter_rows(named=True)}
    credit, scale = _credit(told, indices), told.scale
    formula = None if told.credit is None else told.credit.formula
    scores, branches, trained = told.scores, told.branches, told.trained
    found = []
    for index in indices:
        row, given = rows.get(index), credit.get(index)
        opened: dict[str, Any] = {"index": index, "blocks": [one.sent() for one in _blocks(told, index, rows)]}
        if row is not None:
            opened |= {
                "ledger": ledger.lines(row["reward"], given, scale, formula),
                "marks": [*outline.facts(row), *ledger.marks(given)],
                "disagree": given is not None and ledger.disagree(given),
                "shared": ledger.shared(given, told.chosen, told.link),
                "facts": _facts(row, trained.get(index, [])),
                "scores": [_score(one) for one in scores.get(index, ())],
                "branches": branches.get(index, []),
            }
        found.append(opened)
    return found


def shared(told: Told, index: int) -> dict[str, str] | None:
    """The link to the steps from a step's state, with what makes the state doubtful; its siblings' texts are read."""
    given = _credit(told, [index]).get(index)
    if told.credit is None or given is None or given["anchor_key"] is None:
        return None
    seen = told.read(anchors.seen, told.credit, (given["anchor_key"],), given["group_id"])
    return ledger.shared(given, told.chosen, told.link, only_row(seen))


def whole(told: Told, index: int, name: str) -> str | None:
    """A text up to `ALL` characters; None if the step has no such block."""
    rows = {row["step_index"]: row for row in _read(told, [index], ALL).iter_rows(named=True)}
    found = next((one for one in _blocks(told, index, rows) if one.name == name), None)
    return None if found is None else str(found.sent(ALL)["text"])


def tokens(told: Told, index: int) -> list[dict[str, Any]]:
    """The token strips of a step."""
    encodings, rescored = (
        told.read(query, told.episode_id, index) for query in (transcripts.tokens, transcripts.rescored)
    )
    consumed = told.read(updates.of_step, told.episode_id, index)
    return strip.strips(encodings.to_dicts(), rescored.to_dicts(), consumed)


def _read(told: Told, indices: Sequence[int], limit: int = TEXT) -> pl.DataFrame:
    """The rows of some steps and of those after them, which hold the results of their calls."""
    wanted = sorted({near for index in indices for near in (index, index + 1)})
    return told.read(transcripts.steps, told.episode_id, tuple(wanted), limit)


def _credit(told: Told, indices: Sequence[int]) -> dict[int, Row]:
    found = told.advantages
    near = found if found.is_empty() else found.filter(pl.col("step_index").is_in(indices))
    return {row["step_index"]: row for row in near.iter_rows(named=True)}


def _blocks(told: Told, index: int, rows: Mapping[int, Row]) -> list[Block]:
    if index == BEFORE:
        first = (rows.get(0) or {}).get("state") or ""
        messages = told.before
        return blocks.of_messages([one for one in messages if plain.content(one)[:TEXT] != first], "before")
    if index == told.count:
        return blocks.of_messages(told.after, "after")
    if index not in rows:
        return []
    is_last = index == told.count - 1
    after = told.after if is_last else blocks.following(rows.get(index + 1))
    return blocks.of_step(rows[index], after)


def _facts(row: Row, trained: Sequence[Row]) -> list[tuple[str, str]]:
    """Facts of an opened step besides its ledger."""
    values = {
        "model": row["model"] and plain.one_line(row["model"]),
        "policy version": row["policy_version"],
        "finished by": row["finish_reason"] and plain.one_line(row["finish_reason"]),
        "latency": None if row["latency"] is None else plain.seconds(row["latency"]),
        "prompt tokens": None if row["prompt_tokens"] is None else plain.number(row["prompt_tokens"]),
        "completion tokens": None if row["completion_tokens"] is None else plain.number(row["completion_tokens"]),
        "value estimate": None if row["value_estimate"] is None else plain.number(row["value_estimate"]),
        "trained on": _trained(trained[0]) if trained else None,
    }
    return [(name, str(value)) for name, value in values.items() if value is not None]


def _trained(row: Row) -> str:
    runs = "; ".join(
        f"{plain.one_line(one['run'] or 'a run')}: updates {', '.join(map(str, one['updates']))}" for one in row["runs"]
    )
    return f"{counted(row['times'], 'time')} ({plain.one_line(runs, 300)})"


def _score(row: Row) -> dict[str, Any]:
    value = plain.number(row["value"])
    return {
        "scorer": plain.one_line(row["scorer"]),
        "value": value,
        "why": plain.visible((row["reason"] or row["error"] or "")[:TEXT]),
    }
