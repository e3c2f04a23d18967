"""Mounting a transcript, and answering what its page asks: opened steps, whole texts, where a text occurs.

Two components: the transcript has all lines, and is sent once; a small one beside it (`answers.js`), in a fragment of
its own, carries a question to the server and the answer back. So opening a step sends that step and nothing else.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import streamlit as st  # noqa: TID253 - loaded by the viewer's process only

from lake import ids
from lake.read.text_table import counted
from viewer import links, plain
from viewer.links import Page
from viewer.navigation import changed, href
from viewer.pinned import read
from viewer.queries import Row, Window, episodes, transcripts
from viewer.queries.episodes import TEXT
from viewer.transcript import blocks, ledger, outline, tokens
from viewer.transcript.blocks import Block

ALL = 500_000
"""Characters that `show all` shows at most."""
OPENED = 12
"""Steps that an answer holds at most."""
LINES = 2000
"""Lines of a transcript at most; a longer one has pages."""
BEFORE = -1
"""What stands for the messages before the first step; the number of steps, for those after the last."""

_FOLDER = Path(__file__).parent
_SCRIPTS = ("transcript.js", "line.js", "body.js", "text.js", "find.js", "overview.js", "tokens.js")
_TRANSCRIPT = st.components.v2.component(
    "trajlake_transcript",
    js="\n".join((_FOLDER / name).read_text() for name in _SCRIPTS),
    css=(_FOLDER / "transcript.css").read_text(),
    isolate_styles=False,
)
_ANSWERS = st.components.v2.component("trajlake_answers", js=(_FOLDER / "answers.js").read_text())


@dataclass(frozen=True, slots=True)
class Told:
    """What a transcript is of."""

    facts: Row
    """The row of `episodes.episode`."""
    window: Window
    """Which steps have a line."""
    credit: pl.DataFrame
    """Their rows of `training.advantages`; an empty frame without credit."""
    chosen: str | None
    """The chosen credit, for links."""
    formula: str | None
    """How its terms make an advantage (`Credit.formula`)."""

    @property
    def episode_id(self) -> int:
        """The episode."""
        return int(self.facts["episode_id"])


def show(told: Told, selected: int | None, hidden: Sequence[str]) -> None:
    """Draw the transcript, with a step opened if one is selected, without the hidden kinds of text."""
    name = f"{ids.to_text(told.episode_id)}-{told.window.offset}"
    rows = read(transcripts.outline, told.episode_id, told.window)
    scale = _scale(told)
    data = {
        "name": name,
        "lines": outline.lines(rows, _by_step(told.credit), _scores(told), scale, _branches(told)),
        "repeats": outline.repeats(rows),
        "ends": _ends(told),
        "rewarded": scale.rewarded,
        "credited": told.chosen is not None,
        "selected": selected,
        "opened": [] if selected is None else steps(told, [selected]),
        "hidden": hidden,
        "address": changed(step=None),
    }
    _TRANSCRIPT(key=f"transcript-{name}", data=data)
    with st.container(key="answers"):
        _answers(told, f"answers-{name}")


@st.fragment
def _answers(told: Told, key: str) -> None:
    """Answer the question that the page asked last."""
    asked = st.session_state.get(key, {}).get("asked")
    data = {"key": key, "answer": answer(told, asked) if isinstance(asked, Mapping) else None}
    _ANSWERS(key=key, data=data, on_asked_change=lambda: None)


def answer(told: Told, asked: Mapping[Any, Any]) -> dict[str, Any]:
    """The answer to a question; what makes no sense in it is left out.

    Args:
        asked: its `number`; and of `steps` (indices to open), `whole` (a step and the name of a block of it),
            `tokens` (a step) and `find` (a text) those that are wanted.
    """
    found: dict[str, Any] = {"number": asked.get("number")}
    wanted = asked.get("steps")
    if isinstance(wanted, list):
        found["steps"] = steps(told, [one for one in wanted if _is_step(told, one)][:OPENED])
    match asked.get("whole"):
        case [int() as index, str() as name] if _is_step(told, index):
            found["whole"] = [index, name, _whole(told, index, name)]
    match asked.get("tokens"):
        case int() as index if _is_step(told, index):
            found["tokens"] = _tokens(told, index)
    if isinstance(text := asked.get("find"), str):
        found["find"] = {"text": text, "steps": read(transcripts.find, told.episode_id, text[:TEXT]) if text else []}
    return found


def steps(told: Told, indices: list[int]) -> list[dict[str, Any]]:
    """What opened steps show."""
    credit, scores, scale = _by_step(told.credit), _scores(told), _scale(told)
    rows = {row["step_index"]: row for row in _read(told, indices).iter_rows(named=True)} if indices else {}
    branches = _branches(told)
    trained = {row["step_index"]: row for row in read(transcripts.trained, told.episode_id).iter_rows(named=True)}
    found = []
    for index in indices:
        row, given = rows.get(index), credit.get(index)
        opened: dict[str, Any] = {"index": index, "blocks": [one.sent() for one in _blocks(told, index, rows)]}
        if row is not None:
            opened |= {
                "ledger": ledger.lines(row["reward"], given, scale, told.formula),
                "marks": [*outline.facts(row), *ledger.marks(given)],
                "disagree": given is not None and ledger.disagree(given),
                "shared": ledger.shared(given, told.chosen),
                "facts": _facts(row, trained.get(index)),
                "scores": [_score(one) for one in scores.get(index, ())],
                "branches": branches.get(index, []),
            }
        found.append(opened)
    return found


def _read(told: Told, indices: list[int], limit: int = TEXT) -> pl.DataFrame:
    """The rows of some steps and of those after them, which hold the results of their calls."""
    wanted = sorted({near for index in indices for near in (index, index + 1)})
    return read(transcripts.steps, told.episode_id, tuple(wanted), limit)


def _blocks(told: Told, index: int, rows: Mapping[int, Row]) -> list[Block]:
    if index == BEFORE:
        first = (rows.get(0) or {}).get("state") or ""
        messages = _document(told, "initial_messages")
        return blocks.of_messages([one for one in messages if plain.content(one)[:TEXT] != first], "before")
    if index == told.facts["num_steps"]:
        return blocks.of_messages(_document(told, "final_observation"), "after")
    if index not in rows:
        return []
    is_last = index == told.facts["num_steps"] - 1
    after = _document(told, "final_observation") if is_last else blocks.following(rows.get(index + 1))
    return blocks.of_step(rows[index], after)


def _whole(told: Told, index: int, name: str) -> str | None:
    """A text up to `ALL` characters; None if the step has no such block."""
    rows = {row["step_index"]: row for row in _read(told, [index], ALL).iter_rows(named=True)}
    found = next((one for one in _blocks(told, index, rows) if one.name == name), None)
    return None if found is None else str(found.sent(ALL)["text"])


def _tokens(told: Told, index: int) -> list[dict[str, Any]]:
    """The token strips of a step."""
    asked = [read(query, told.episode_id, index).to_dicts() for query in (transcripts.tokens, transcripts.rescored)]
    return tokens.strips(*asked)


def _ends(told: Told) -> list[dict[str, Any]]:
    """What stands before the first line and after the last: the messages outside the steps."""
    count = told.facts["num_steps"]
    found = []
    if told.window.offset == 0 and (messages := _document(told, "initial_messages")):
        found.append({"index": BEFORE, "text": f"Before the first step: {_roles(messages)}"})
    if told.window.offset + told.window.limit >= count and (messages := _document(told, "final_observation")):
        found.append({"index": count, "text": f"After the last step: {_roles(messages)}"})
    return found


def _roles(messages: list[Any]) -> str:
    roles = ", ".join(plain.role(one) for one in messages[:5])
    return plain.one_line(f"{roles}{', ...' if len(messages) > 5 else ''}", 80)


def _document(told: Told, column: episodes.EpisodeColumn) -> list[Any]:
    return plain.messages(*read(episodes.document, told.episode_id, column))


def _facts(row: Row, trained: Row | None) -> list[tuple[str, str]]:
    """Facts of an opened step besides its ledger."""
    values = {
        "model": row["model"] and plain.one_line(row["model"]),
        "policy version": row["policy_version"],
        "finished by": row["finish_reason"] and plain.one_line(row["finish_reason"]),
        "latency": None if row["latency"] is None else plain.seconds(row["latency"]),
        "prompt tokens": None if row["prompt_tokens"] is None else plain.number(row["prompt_tokens"]),
        "completion tokens": None if row["completion_tokens"] is None else plain.number(row["completion_tokens"]),
        "value estimate": None if row["value_estimate"] is None else plain.number(row["value_estimate"]),
        "trained on": None if trained is None else _trained(trained),
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


def _branches(told: Told) -> dict[int, list[dict[str, str]]]:
    """Links to the episodes that came out of a step (sub-agents, forks, continuations), by step."""
    found: dict[int, list[dict[str, str]]] = {}
    for row in read(episodes.related, told.episode_id).drop_nulls("parent_step_index").iter_rows(named=True):
        if not row["is_parent"]:
            text = f"{row['relation'] or 'child'}: {row['agent_id'] or links.episode(row)}"
            link = {"text": plain.one_line(text), "href": href(Page.EPISODE, episode=ids.to_text(row["episode_id"]))}
            found.setdefault(row["parent_step_index"], []).append(link)
    return found


def _scores(told: Told) -> dict[int, list[Row]]:
    """Scores of steps, by step."""
    found: dict[int, list[Row]] = {}
    for row in read(transcripts.scores, told.episode_id).iter_rows(named=True):
        found.setdefault(row["step_index"], []).append(row)
    return found


def _scale(told: Told) -> ledger.Scale:
    largest, rewarded = read(transcripts.scales, told.episode_id)
    return ledger.scale_of(told.credit, largest, rewarded=rewarded)


def _by_step(credit: pl.DataFrame) -> dict[int, Row]:
    return {row["step_index"]: row for row in credit.iter_rows(named=True)}


def _is_step(told: Told, index: Any) -> bool:
    return isinstance(index, int) and BEFORE <= index <= told.facts["num_steps"]
